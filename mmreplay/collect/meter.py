"""A progress bar with rate and bytes; rich is loaded only where one is shown."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

REFRESH_S = 0.1


class Meter(AbstractContextManager["Meter"]):
    """Counts bytes, and shows a bar with rate and bytes where it is wanted."""

    def __init__(self, steps: int, row_nbytes: int, show: bool | None) -> None:
        self.nbytes = 0
        self._row_nbytes = row_nbytes
        self._bar: Progress | None = None
        self._started = self._shown = perf_counter()
        if sys.stderr.isatty() if show is None else show:
            self._bar = _bar()
            self._task = self._bar.add_task("recording", total=steps, rate="")

    def update(self, done: int, rows: int) -> None:
        """Count rows just added."""
        self.nbytes += rows * self._row_nbytes
        self._done = done
        if self._bar is not None and perf_counter() - self._shown > REFRESH_S:
            self._show()

    def _show(self) -> None:
        assert self._bar is not None
        self._shown = perf_counter()
        seconds = max(1e-9, self._shown - self._started)
        rate = f"{self._done / seconds:,.0f} steps/s, "
        rate += f"{self.nbytes / seconds / 1e6:.1f} MB/s"
        self._bar.update(self._task, completed=self._done, rate=rate)

    def __enter__(self) -> Meter:
        self._done = 0
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()


def _bar() -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )

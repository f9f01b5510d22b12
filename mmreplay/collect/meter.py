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
    """Counts bytes, and shows a bar with rate and bytes where it is wanted.

    Attributes:
        done: Of the total.
        nbytes: Of the rows counted.
    """

    def __init__(
        self,
        total: int,
        row_nbytes: int,
        show: bool | None,
        *,
        what: str = "recording",
        unit: str = "steps",
    ) -> None:
        """Make one.

        Args:
            total: How many there will be.
            row_nbytes: Bytes of a row.
            show: Show the bar, on stderr; None where it is a terminal.
            what: What goes on meanwhile.
            unit: Of what there are so many.
        """
        self.done = self.nbytes = 0
        self._unit = unit
        self._row_nbytes = row_nbytes
        self._bar: Progress | None = None
        self._started = self._shown = perf_counter()
        if sys.stderr.isatty() if show is None else show:
            self._bar = _bar()
            self._task = self._bar.add_task(what, total=total, rate="")

    def update(self, done: int, rows: int) -> None:
        """Count rows just added."""
        self.nbytes += rows * self._row_nbytes
        self.done = done
        if self._bar is not None and perf_counter() - self._shown > REFRESH_S:
            self._show()

    def _show(self) -> None:
        assert self._bar is not None
        self._shown = perf_counter()
        seconds = max(1e-9, self._shown - self._started)
        rate = f"{self.done / seconds:,.0f} {self._unit}/s, "
        rate += f"{self.nbytes / seconds / 1e6:.1f} MB/s"
        self._bar.update(self._task, completed=self.done, rate=rate)

    def __enter__(self) -> Meter:
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

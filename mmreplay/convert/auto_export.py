"""Exports a ring in the background, before its rows are overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Self

from mmreplay.arguments import integer, one_of
from mmreplay.buffer.opening import StrPath, absolute, refuse_inside
from mmreplay.buffer.replay_buffer import ReplayBuffer, check_buffer
from mmreplay.convert import registry
from mmreplay.convert.base import Report
from mmreplay.convert.episode_export import EpisodeExport
from mmreplay.convert.row_export import RowExport
from mmreplay.errors import SchemaError

LONG = ("refuse", "cut")


class AutoExport:
    """Exports the rows of a ring before they are overwritten; a context manager.

    To most formats it writes a file whenever the ring is full; to a LeRobot set it
    appends episodes.

    A file holds the rows since the last file: the capacity of each environment, or
    fewer by at most one block of an `extend`, so that every row is in exactly one file.
    A thread writes it; it appears complete or not at all. No row is overwritten before
    its file exists and is synced: adds continue while `every` leaves free rows, and an
    add that would overwrite such a row waits. A writer that is killed at any instant
    leaves every row in a file or alive. An error of the thread is raised by the add
    that needs the rows, which then adds nothing; the next add tries again.

    Rows alive when this is made belong to its first file, including those that an
    earlier run has exported (their positions show it). If the ring is nearly full, that
    file is written at once. Rows that `clear`, `dequeue` or a smaller `resize` drop are
    not exported. Close it before the buffer.

    In npz, pt and safetensors images are arrays; parquet keeps their files.

    With ``format="lerobot"`` the folder is a set. A thread looks each second for
    episodes that are finished and committed, and appends them in one step: a kill
    leaves the set before or after it, and no episode is appended twice or forgotten.
    The ring holds the rows that are not appended, over kills too, and is the journal of
    the set. An add that would overwrite them waits; where they are one unfinished
    episode, it raises FailedError. An episode that `end_episodes` with ``discard=True``
    broke off is left out; without it, the episode is truncated and appended. To read a
    set during the recording, use `linked_copy`.

    Attributes:
        reports: Path and report of each file, or append, so far.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", "r+")
        >>> exporter = mr.AutoExport(buffer, "exported", every=1000)
        >>> buffer.close()
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        folder: StrPath,
        *,
        format: str = "npz",
        fields: Sequence[str] | None = None,
        every: int | None = None,
        every_episodes: int | None = None,
        on_long: Literal["refuse", "cut"] | None = None,
        overwrite: bool = False,
        **options: object,
    ) -> None:
        """Watch a buffer.

        Args:
            buffer: Open for writing, on disk or in RAM.
            folder: Folder of the files, ``<year-month-day_time>_memory_<id>.<format>``;
                made if it does not exist.
            format: A format's name; to ``"lerobot"`` episodes are appended.
            fields: Paths, or subtrees, to write; all by default.
            every: Rows of an environment after which a file is written; the capacity
                by default, so that the next add waits for the file. With half of it
                adds wait only if rows come faster than they are written.
            every_episodes: Of a set: finished episodes that are appended together, at
                least; 1 by default. Where an add needs room, fewer are.
            on_long: Of a set: ``"cut"`` appends an unfinished episode that alone fills
                the ring as truncated, and its rest as an episode of its own;
                ``"refuse"``, the default, has the add raise.
            overwrite: Of a set: replace one that is there, by the first append.
            **options: The format's own.

        Raises:
            FormatError: The folder is inside the buffer's; or the set is not one of
                appends of this ring, or was edited since.
            LockedError: Another process appends to the set.
            SchemaError: Format, field or option is unknown, or the format cannot hold
                a field.
            FailedError: The buffer is not open for writing, or is watched already; or
                the folder cannot be written.
        """
        check_buffer(buffer)
        path = absolute(folder)
        if buffer.path is not None:
            refuse_inside(path, buffer.path)
        found = registry.target_format(path / "x", format)
        registry.refuse_unknown(found, "open_writer", options)
        of_sets = {"every_episodes": every_episodes, "on_long": on_long}
        given = [name for name, value in of_sets.items() if value is not None]
        self._export: RowExport | EpisodeExport
        if not found.appends:
            if given or overwrite:
                raise SchemaError(
                    f"{(*given, 'overwrite')[0]} is for formats that episodes are appended to, "
                    f"such as 'lerobot', got format={format!r}. Leave it out."
                )
            self._export = RowExport(buffer, path, found, fields=fields, every=every, **options)
            return
        if every is not None:
            raise SchemaError(
                f"every counts rows of a file, got {every!r} with format={format!r}, to which "
                "episodes are appended. Pass every_episodes instead."
            )
        one_of("on_long", "refuse" if on_long is None else on_long, LONG)
        self._export = EpisodeExport(
            buffer,
            path,
            found,
            fields=fields,
            every_episodes=1
            if every_episodes is None
            else integer("every_episodes", every_episodes, 1),
            truncates=on_long == "cut",
            overwrite=overwrite,
            **options,
        )

    @property
    def reports(self) -> list[tuple[Path, Report]]:
        """See the class."""
        return self._export.reports

    def flush(self) -> None:
        """Export the rows since the last file, or finished episodes, now, and wait."""
        self._export.flush()

    def close(self) -> None:
        """Wait for a running export, and stop watching; a second call does nothing.

        Finished episodes are appended to a set.

        Raises:
            ReplayError: The export failed.

        Warns:
            DurabilityWarning: Unfinished episodes are in the ring, and not in the set.
        """
        self._export.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

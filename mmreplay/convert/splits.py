"""Writes several targets into a folder that appears complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mmreplay.convert.base import Progress, Report
from mmreplay.convert.staging import Staging, refuse_open
from mmreplay.errors import FormatError, undone_by

WriteOne = Callable[[str, Path, bool, Progress | None], Report]
"""Writes the split of a name to a path, perhaps over an existing one."""


def write_splits(
    rows: Mapping[str, int],
    target: Path,
    write_one: WriteOne,
    *,
    suffix: str = "",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write the splits of a data set into one folder.

    Args:
        rows: Of each split by its name.
        target: The folder to make.
        write_one: Writes one of them.
        suffix: Of the names of their files.
        overwrite: Replace a folder that holds exactly such files or folders, of which
            `write_one` may replace every one: its `Staging` decides.
        progress: Called after each block with (rows done, rows in all).

    Returns:
        The sums of all; what is said of one split only names it.

    Raises:
        FormatError: The target exists and may not be replaced.
    """
    refuse_other_folder(target, rows, suffix, overwrite)
    names = {name + suffix for name in rows}
    staging = Staging(
        target, overwrite=overwrite, folder=True, owns=lambda folder: _listed(folder) == names
    )
    reports: dict[str, Report] = {}
    with undone_by(staging.abort):
        for name in rows:
            before, total = sum(rows[each] for each in reports), sum(rows.values())

            def advance(done: int, _: int, before: int = before, total: int = total) -> None:
                assert progress is not None
                progress(before + done, total)

            reports[name] = write_one(
                name, staging.path / (name + suffix), False, progress and advance
            )
        nbytes = staging.publish()
    every = [*reports.values()]
    return Report(
        rows=sum(each.rows for each in every),
        episodes=sum(each.episodes for each in every),
        nbytes=nbytes,
        seconds=sum(each.seconds for each in every),
        notes=_of_all({name: each.notes for name, each in reports.items()}),
        doubts=_of_all({name: each.doubts for name, each in reports.items()}),
    )


def refuse_other_folder(
    target: Path, names: Mapping[str, object], suffix: str, overwrite: bool
) -> None:
    """Refuse to replace anything but a folder of splits of these names.

    Raises:
        FormatError: It is something else.
        LockedError: One of them is open for writing.
    """
    if not overwrite or not os.path.lexists(target):
        return
    wanted = {name + suffix for name in names}
    if target.is_symlink() or not target.is_dir() or _listed(target) != wanted:
        raise FormatError(
            f"{target} must hold {', '.join(sorted(wanted))} and nothing else to be replaced. "
            "Remove it yourself, or choose another path."
        )
    for name in wanted:
        refuse_open(target / name, True)


def _listed(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def _of_all(texts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """What is said of all splits once, and of others with their names."""
    everywhere = set.intersection(*(set(each) for each in texts.values()))
    said = [text for text in next(iter(texts.values())) if text in everywhere]
    said += [
        f"{name}: {text}" for name, each in texts.items() for text in each if text not in everywhere
    ]
    return tuple(said)

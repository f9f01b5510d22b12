"""Finished episodes of a ring appended to a LeRobot dataset, each time in one step.

An append writes into a staged folder: the old files as hard links, new ones beside
them, the few files that describe all; and exchanges the two folders. A kill leaves the
old set or the new one. Nothing is written through a link, and no number of a file is
used twice, so that a process that has the set open reads its own files or none.

The last unit is joined with the new one while it is smaller than twice that and not
full: a byte is written again log times, and a set has few files. meta/mmreplay.json
says which rows of the ring the set has, and what the files that describe it were.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.convert.base import Appended, Appender, Notes, Reader
from mmreplay.convert.description import Description
from mmreplay.convert.parquet import Compression, ParquetFileWriter
from mmreplay.convert.staging import STAGED, Staging, make_parents
from mmreplay.convert.transfer import env_by_env
from mmreplay.datasets import lerobot_record
from mmreplay.datasets.images import TOLERANCE_S
from mmreplay.datasets.lerobot_layout import Layout
from mmreplay.datasets.lerobot_record import RECORD
from mmreplay.datasets.lerobot_stats import Statistics
from mmreplay.datasets.lerobot_video import Codec, VideoFile, find_packets
from mmreplay.datasets.lerobot_writer import (
    DATA_PATH,
    EPISODES,
    EPISODES_PATH,
    INFO,
    STATS,
    TASKS,
    VIDEO_PATH,
    Sizes,
    TaskNumbers,
    Unit,
    UnitsWriter,
    features_json,
    frame_rate,
    laid_out,
    owns,
    statistics_of,
    write_meta,
)
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import FailedError, FormatError, LockedError, system_error, undone_by

Ids = NDArray[np.int64]
MAX_NBYTES = 256 << 20
"""Of a file that describes all units."""
DESCRIBING = (INFO, TASKS, STATS)
COPY_NBYTES = 1 << 20
SNAPPY = Compression("snappy")
FRESH = "fresh"
"""The folder of the staged one in which new episodes are written first."""
WAY_OUT = "Append to another folder, or pass overwrite=True (--overwrite) to replace the set."


@dataclass(frozen=True, slots=True)
class Journal:
    """What the record says of appends.

    Attributes:
        own: CRC-32 of all else that this holds.
        uuid: Hex name of the ring.
        count: Appends so far.
        next: By environment, the position from which rows are not appended.
        continued: By environment, whether the row at `next` continues an episode whose
            first steps are in the set.
        episodes: Of the set.
        rows: Steps of the set.
        numbers: Numbers of files that were used.
        units: Each as [number, episodes, rows, fullness].
        sums: CRC-32 of the files that describe all units.
    """

    uuid: str
    count: int
    next: list[int]
    continued: list[bool]
    own: int = 0
    episodes: int = 0
    rows: int = 0
    numbers: int = 0
    units: list[list[Any]] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)

    def sealed(self) -> Journal:
        """The same with its own checksum."""
        text = json.dumps({**asdict(self), "own": 0}, sort_keys=True)
        return replace(self, own=zlib.crc32(text.encode()))


def open_appender(
    target: Path, description: Description, *, overwrite: bool = False, **options: Any
) -> LerobotAppender:
    """Append to a dataset, which is made by the first append.

    Args:
        target: Its folder.
        description: Of the ring.
        overwrite: Replace a dataset that exists, by the first append.
        **options: Those of `open_writer`.

    Raises:
        FormatError: The set is not one of appends of this ring, was edited since, or
            has other features.
        FailedError: The file system has no hard links, or exchanges no folders.
        LockedError: Another appender has it.
    """
    layout, codec = laid_out(description, **options)
    return LerobotAppender(target, description, layout, codec, overwrite=overwrite)


class LerobotAppender(Appender):
    """Appends episodes to one dataset; see the module."""

    def __init__(
        self,
        target: Path,
        description: Description,
        layout: Layout,
        codec: Codec | None,
        *,
        overwrite: bool,
        sizes: Sizes | None = None,
    ) -> None:
        """Check what is there; nothing is written until the first append."""
        self.target = target
        self._description, self._layout, self._codec = description, layout, codec
        self._sizes = sizes or Sizes()
        make_parents(target)
        self._lock: File | None = _lock(target)
        with undone_by(self.close):
            _refuse_file_system(target)
            self._tasks: dict[str, int] = {}
            self._statistics: dict[str, Statistics] = {}
            self._old, self._overwrite = os.path.lexists(target) and not overwrite, overwrite
            self._noted = False
            # Files of the staged folder that are the set's, and durable.
            self._linked: set[Path] = set()
            if os.path.lexists(target) and (target.is_symlink() or not target.is_dir()):
                raise FormatError(
                    f"{target} is a file or a link, and a set is a folder. Append to another path."
                )
            zeros = [0] * description.num_envs
            self._journal = Journal(description.uuid, 0, zeros, [False] * len(zeros))
            if self._old:
                self._read()
            elif os.path.lexists(target) and any(target.iterdir()) and not owns(target):
                raise FormatError(
                    f"{target} is no LeRobot set of mmreplay, or holds other files too, and is "
                    "not replaced. Remove it yourself, or choose another path."
                )

    @property
    def appended(self) -> Appended:
        """See `Appender.appended`."""
        return Appended(
            np.array(self._journal.next, np.int64), np.array(self._journal.continued, bool)
        )

    def _read(self) -> None:
        """Read the record of the set, and refuse a record that does not fit."""
        target, uuid = self.target, self._description.uuid
        if not (target / RECORD).is_file():
            raise FormatError(
                f"{target} exists, and was not made by appends (it has no {RECORD}). Append to "
                "another folder, or remove it yourself."
            )
        value = strict_json.parse(files.read_bytes(target / RECORD, MAX_NBYTES), str(target))
        journal = value.get("appends")
        if not isinstance(journal, dict):
            raise FormatError(
                f"{target} was written at once, and not by appends: which rows of the ring it has "
                f"is not known. {WAY_OUT}"
            )
        try:
            self._journal = Journal(**journal)
            legal = _is_legal(self._journal, self._description.num_envs)
        except (TypeError, ValueError, AttributeError, OverflowError):
            legal = False
        if not legal:
            raise FormatError(f"{target / RECORD} says nothing legal of appends. {WAY_OUT}")
        if self._journal.uuid != uuid:
            raise FormatError(
                f"{target} has episodes of the ring {self._journal.uuid[:8]}, not of {uuid[:8]}. "
                f"{WAY_OUT}"
            )
        self._refuse_edited()
        info = strict_json.parse(files.read_bytes(target / INFO, MAX_NBYTES), str(target / INFO))
        wanted = features_json(self._layout, self._codec, {})
        stored = info.get("features")
        wanted = {**wanted, "fps": frame_rate(self._layout)}
        there = {**(stored if isinstance(stored, dict) else {}), "fps": info.get("fps")}
        for name in sorted(wanted.keys() | there.keys()):
            if there.get(name) != wanted.get(name):
                raise FormatError(
                    f"{target} has other features: {name!r} is {str(there.get(name))[:120]} and "
                    f"would be {str(wanted.get(name))[:120]}. Use the options that it was made "
                    "with, or append to another folder."
                )
        table = pq.read_table(target / TASKS).to_pydict()
        self._tasks = dict(zip(table["task"], table["task_index"], strict=True))
        stats = strict_json.parse(files.read_bytes(target / STATS, MAX_NBYTES), str(target / STATS))
        self._statistics = {
            name: {key: np.asarray(each) for key, each in of.items()} for name, of in stats.items()
        }

    def _refuse_edited(self) -> None:
        """Refuse a set that is not as the last append left it.

        Raises:
            FormatError: It is not.
        """
        journal, target = self._journal, self.target
        for name, crc in journal.sums.items():
            if not (target / name).is_file() or _crc(target / name) != crc:
                raise FormatError(
                    f"{target} was edited since the last append: {name} is another. {WAY_OUT}"
                )

    def append(self, reader: Reader, appended: Appended) -> tuple[int, Notes]:
        """See `Appender.append`."""
        journal, description = self._journal, reader.describe()
        if self._old:
            self._refuse_edited()
        # The record says that it is this set, whatever other files a user put there.
        mine = self._old and not self.target.is_symlink()
        staging = Staging(
            self.target,
            overwrite=self._old or self._overwrite,
            folder=True,
            owns=lambda folder: mine or owns(folder),
        )
        with undone_by(staging.abort):
            tasks = TaskNumbers(self._tasks)
            fresh = staging.path / FRESH
            self._linked = set[Path]()
            writer = UnitsWriter(
                fresh,
                description,
                self._layout,
                self._codec,
                tasks,
                number=journal.numbers,
                first_episode=journal.episodes,
                first_row=journal.rows,
                sizes=self._sizes,
            )
            with undone_by(writer.abandon):
                for block in env_by_env(reader, description):
                    writer.write(block)
                units = writer.close()
            statistics = statistics_of(units, self._statistics)
            old = [Unit(*each) for each in journal.units]
            units = self._put(staging.path, old, units)
            total = replace(
                journal,
                count=journal.count + 1,
                next=appended.next.tolist(),
                continued=appended.continued.tolist(),
                episodes=sum(unit.episodes for unit in units),
                rows=sum(unit.rows for unit in units),
                numbers=units[-1].number + 1,
                units=[[u.number, u.episodes, u.rows, u.fullness] for u in units],
            )
            files.remove_tree(fresh)
            write_meta(
                staging.path,
                self._layout,
                self._codec,
                tasks,
                episodes=total.episodes,
                rows=total.rows,
                statistics=statistics,
                sizes=self._sizes,
            )
            total = replace(total, sums={n: _crc(staging.path / n) for n in DESCRIBING}).sealed()
            record = lerobot_record.to_bytes(self._description, self._layout, asdict(total))
            files.make_staged(staging.path / RECORD, record)
            nbytes = staging.publish(self._linked)
        self._old, self._journal = True, total
        self._tasks, self._statistics = tasks.numbers, statistics
        if not self._noted:
            self._noted = True
            for note in self._layout.notes:
                writer.notes.note(note)
            for doubt in self._layout.doubts:
                writer.notes.doubt(doubt)
        return nbytes, writer.notes

    def skip(self, appended: Appended) -> None:
        """See `Appender.skip`: only the record is written, in place of the old one."""
        journal = replace(
            self._journal, next=appended.next.tolist(), continued=appended.continued.tolist()
        ).sealed()
        if journal == self._journal:
            return
        if self._old:
            self._refuse_edited()
            record = lerobot_record.to_bytes(self._description, self._layout, asdict(journal))
            files.replace_bytes(self.target / RECORD, record)
        self._journal = journal

    def _put(self, folder: Path, old: list[Unit], new: list[Unit]) -> list[Unit]:
        """Put the files of all units into a folder: links, joined files, new ones.

        Args:
            folder: The staged one.
            old: Units of the set.
            new: Units in the folder `FRESH` of the staged one.

        Returns:
            The units of the folder.
        """
        fresh, joined = folder / FRESH, list[Unit]()
        if len(new) == 1:
            rows = new[0].rows
            while old and old[-1].fullness < 1 and old[-1].rows < 2 * rows:
                joined.insert(0, old.pop())
                rows += joined[0].rows
        if joined:
            sources = [*((self.target, unit) for unit in joined), (fresh, new[0])]
            unit = join_units(sources, folder, new[0].number, self._layout, self._sizes)
            if unit is None:
                # Their videos were encoded otherwise: they stay apart.
                old += joined
            else:
                new = [unit]
                files.remove_tree(fresh)
        for unit in old:
            for name in self._names(unit):
                _link(self.target / name, files.make_staged(folder / name))
                self._linked.add(folder / name)
        if self._old:
            self._keep_others(folder, [*old, *joined])
        if fresh.exists():
            for unit in new:
                for name in self._names(unit):
                    files.disk.rename(fresh / name, files.make_staged(folder / name))
        return old + new

    def _keep_others(self, folder: Path, units: list[Unit]) -> None:
        """Link the files that a user put into the set, such as a README.md."""
        known = {*DESCRIBING, RECORD, *(name for unit in units for name in self._names(unit))}
        for path in sorted(self.target.rglob("*")):
            name = str(path.relative_to(self.target))
            is_folder = path.is_dir() and not path.is_symlink()
            if name not in known and not is_folder:
                _link(path, files.make_staged(folder / name))

    def _names(self, unit: Unit) -> list[str]:
        """Paths of a unit's files in the set."""
        names = [self._sizes.path(each, unit.number) for each in (DATA_PATH, EPISODES_PATH)]
        cameras = self._layout.cameras
        return names + [self._sizes.path(VIDEO_PATH, unit.number, name) for name in cameras]

    def close(self) -> None:
        """See `Appender.close`."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):
                files.disk.unlink(lock.path)
            lock.close()


def _is_legal(journal: Journal, num_envs: int) -> bool:
    """Whether the record of a set has what a record of appends has."""
    numbers = [*journal.next, journal.count, journal.episodes, journal.rows, journal.numbers]
    for number, episodes, rows, fullness in journal.units:
        numbers += [number, episodes, rows]
        if type(fullness) is not float:
            return False
    return (
        all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        and len(journal.next) == len(journal.continued) == num_envs
        and all(type(each) is bool for each in journal.continued)
        and (set(journal.sums) == set(DESCRIBING) or not journal.units)
        and journal.numbers > max((unit[0] for unit in journal.units), default=-1)
        and journal.own == journal.sealed().own
        and sum(unit[1] for unit in journal.units) == journal.episodes
        and sum(unit[2] for unit in journal.units) == journal.rows
    )


def join_units(
    sources: Sequence[tuple[Path, Unit]], folder: Path, number: int, layout: Layout, sizes: Sizes
) -> Unit | None:
    """Join units to one in another folder, without decoding their videos.

    Args:
        sources: Folder and unit, in the order of their episodes.
        folder: Of the new unit, which is no source.
        number: Of its files.
        layout: Of all.
        sizes: Of the set.

    Returns:
        The unit; None, and no file, where videos of a camera were encoded otherwise.
    """
    video_nbytes = _join_videos(sources, folder, number, layout, sizes)
    if video_nbytes is None:
        return None
    for template in (DATA_PATH, EPISODES_PATH):
        _join_tables(sources, folder, number, layout, sizes, template)
    data_nbytes = (folder / sizes.path(DATA_PATH, number)).stat().st_size
    fullness = max(data_nbytes / sizes.data_mb, video_nbytes / sizes.video_mb) / 1e6
    episodes = sum(unit.episodes for _, unit in sources)
    return Unit(number, episodes, sum(unit.rows for _, unit in sources), fullness)


def _join_videos(
    sources: Sequence[tuple[Path, Unit]], folder: Path, number: int, layout: Layout, sizes: Sizes
) -> int | None:
    """Join the videos of each camera by packets: the largest file in bytes.

    Returns:
        None, and no file is written, where videos of a camera were encoded otherwise.
    """
    fps = float(layout.fps)
    packets = {
        name: [
            find_packets(
                each / sizes.path(VIDEO_PATH, unit.number, name), 0, unit.rows, fps, TOLERANCE_S
            )
            for each, unit in sources
        ]
        for name in layout.cameras
    }
    for of_camera in packets.values():
        parameters = {None if each is None else each.parameters for each in of_camera}
        if len(parameters) > 1 or None in parameters:
            return None
    nbytes = 0
    for name, of_camera in packets.items():
        path = files.make_staged(folder / sizes.path(VIDEO_PATH, number, name))
        assert of_camera[0] is not None
        video = VideoFile.copying(path, layout.fps, of_camera[0])
        with undone_by(video.abandon):
            for each in of_camera:
                assert each is not None
                video.copy(each)
        video.close()
        nbytes = max(nbytes, video.nbytes)
    return nbytes


def _join_tables(
    sources: Sequence[tuple[Path, Unit]],
    folder: Path,
    number: int,
    layout: Layout,
    sizes: Sizes,
    template: str,
) -> None:
    """Join the tables of rows, or those of episodes, by the template of their path."""
    chunk, index = sizes.location(number)
    path = files.make_staged(folder / sizes.path(template, number))
    with pq.ParquetFile(sources[0][0] / sizes.path(template, sources[0][1].number)) as first:
        metadata = first.schema_arrow.metadata or {}
        schema = first.schema_arrow.remove_metadata()
    writer = ParquetFileWriter(File.create(path, 0), schema, SNAPPY, 1 << 10)
    rows = 0
    with undone_by(writer.close, None):
        for source, unit in sources:
            with pq.ParquetFile(source / sizes.path(template, unit.number)) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group).cast(schema)
                    if template == EPISODES_PATH:
                        seconds = float(rows / layout.fps)
                        table = _moved(table, chunk, index, seconds, layout)
                    writer.write(table.combine_chunks().to_batches())
            rows += unit.rows
    writer.close({key: text for key, text in metadata.items() if key != b"ARROW:schema"})


def _moved(table: Any, chunk: int, index: int, seconds: float, layout: Layout) -> Any:
    """Episodes whose rows and frames lie in other files now, so many seconds later."""
    for where in ("data", *(f"videos/{name}" for name in layout.cameras), EPISODES):
        for end, number in (("chunk_index", chunk), ("file_index", index)):
            column = pa.array(np.full(len(table), number))
            table = table.set_column(*_column(table, f"{where}/{end}"), column)
    for name in layout.cameras:
        for end in ("from_timestamp", "to_timestamp"):
            place = _column(table, f"videos/{name}/{end}")
            table = table.set_column(*place, pa.array(table[place[1]].to_numpy() + seconds))
    return table


def _column(table: Any, name: str) -> tuple[int, str]:
    return table.schema.get_field_index(name), name


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where it has too many already."""
    try:
        files.disk.link(source, target)
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise system_error("link", target, error) from error
        old = File.open(source, None)
        with closing(old), closing(File.create(target, old.nbytes)) as new:
            for offset in range(0, old.nbytes, COPY_NBYTES):
                new.pwrite(old.pread(min(COPY_NBYTES, old.nbytes - offset), offset), offset)


def _crc(path: Path) -> int:
    return zlib.crc32(files.read_bytes(path, MAX_NBYTES))


def _refuse_file_system(target: Path) -> None:
    """Try links and an exchange in two folders beside a target.

    Raises:
        FailedError: One is missing.
    """
    box = target.with_name(f"{STAGED}try-{target.name}")
    files.remove_tree(box)
    one, other = box / "one", box / "other"
    for folder in (box, one, other):
        files.make_folder(folder)
    missing = ""
    try:
        File.create(one / "file", 0).close()
        what = "hard links"
        files.disk.link(one / "file", other / "link")
        what = "exchange of two folders (RENAME_EXCHANGE)"
        files.disk.exchange(one, other)
        if not (one / "link").exists():
            missing = what
    except OSError as error:
        missing = f"{what} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    finally:
        files.remove_tree(box)
    if missing:
        raise FailedError(
            f"the file system of {target.parent} has no {missing}, so that episodes cannot be "
            "appended in one step. Choose another folder, or write the set at once with mmreplay "
            "convert."
        )


def _lock(target: Path) -> File:
    """The lock of all who append to a set, beside it.

    Raises:
        LockedError: Another appender has it.
    """
    path = target.with_name(f"{STAGED}lock-{target.name}")
    with suppress(FailedError):
        File.create(path, 0).close()
    lock = File.open(path, None, writable=True)
    with undone_by(lock.close):
        try:
            files.disk.lock(lock.fd)
            # The lock of a file that was removed would not turn others away.
            mine = os.path.samestat(os.stat(path), os.fstat(lock.fd))
        except (BlockingIOError, FileNotFoundError):
            mine = False
        if not mine:
            raise LockedError(
                f"{target} is being appended to by another process, or another AutoExport of this "
                "one. Close that one first, or choose another folder."
            )
    return lock

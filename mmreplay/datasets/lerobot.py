"""LeRobot's datasets, v2 and v3: parquet files of frames, episodes by their numbers.

The text of a frame's task, which a file beside the frames has by its ``task_index``,
becomes a field of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.convert.base import Block, Notes, Reader, refuse_expansion
from mmreplay.convert.episode_ends import Bools
from mmreplay.convert.parquet import (
    CommonColumns,
    ParquetFile,
    decode_values,
    is_text,
    plain_type,
    row_nbytes_of,
)
from mmreplay.datasets.arrow import ROWS, Window, flat, image_rows, number_rows, text_rows
from mmreplay.datasets.common.fields import (
    Flags,
    ambiguous_end_note,
    check_done,
    make_schema,
    select_metadata,
)
from mmreplay.datasets.common.fragments import (
    ENDS,
    NO_TEXT,
    TRUNCATED_FIELD,
    Fragment,
    FragmentReader,
)
from mmreplay.datasets.common.rows import (
    ColumnRows,
    ShiftedRows,
    TextRows,
    is_scalar,
    nbytes_of,
    scalar,
)
from mmreplay.datasets.images import LOSSY, VideoRows
from mmreplay.datasets.lerobot_append import open_appender as open_appender
from mmreplay.datasets.lerobot_episodes import (
    EPISODES,
    Columns,
    Episodes,
    check_rows,
    check_times,
    find_videos,
    read_columns,
    read_statistics,
)
from mmreplay.datasets.lerobot_frames import Camera
from mmreplay.datasets.lerobot_layout import MAX_FPS, MIN_FPS, is_rate
from mmreplay.datasets.lerobot_record import Appends, read_record, restored
from mmreplay.datasets.lerobot_writer import open_writer as open_writer
from mmreplay.datasets.lerobot_writer import planned as planned
from mmreplay.disk import files
from mmreplay.errors import FormatError, ReplayError, SchemaError, undone_by
from mmreplay.ragged import Ragged
from mmreplay.schema import Field
from mmreplay.schema.source_names import name_fields, own_names_of
from mmreplay.strict_json import Json

INFO = Path("meta") / "info.json"
MAX_NBYTES = 16 << 20
MAX_FILES = 1_000_000
EPISODE, DONE, REWARD = "episode_index", "next.done", "next.reward"
STATED = ("next.terminated", "next.truncated")
"""Columns that tell both ends apart, which this library writes."""
TASK, TASK_INDEX, TEXTS = "task", "task_index", "meta/tasks"
TIMESTAMP = "timestamp"
TASK_FILES = (Path("meta") / "tasks.jsonl", Path("meta") / "tasks.parquet")
"""Texts of tasks by their numbers, of v2 and v3."""
TASK_COLUMNS = (TASK, "__index_level_0__")
"""Columns of the texts in v3, where they are the index of a table of pandas."""
COUNTED = (EPISODE, "frame_index", "index")
"""Columns that positions and flags make redundant."""
DATA_FILE = re.compile(r"(?:episode|file)[-_](\d+)\.parquet")
CHUNK = re.compile(r"chunk-(\d+)")
VIDEOS = ("refuse", "skip", "decode")
METADATA_KEYS = ("codebase_version", "fps", "robot_type", "features")
"""Keys of info.json that become user metadata ``lerobot``; of features their names."""


class Frames:
    """The frames of all files, one after another.

    Attributes:
        folder: Folder of the dataset.
        count: Number of frames.
        nbytes: Bytes of the files.
        names: Names of the columns.
    """

    def __init__(self, folder: Path, notes: Notes) -> None:
        """Look at the files.

        Raises:
            FormatError: A column is not in all of them.
        """
        self.folder = folder
        self._paths = _data_files(folder / "data")
        self.count = self.nbytes = 0
        self._open_file: ParquetFile | None = None
        self._columns = CommonColumns()
        for path in self._paths:
            with closing(ParquetFile(path)) as part:
                self._columns.add(part)
                for name in part.schema.names:
                    part.refuse_long(name)
                self.count += part.rows
                self.nbytes += part.nbytes
        self._columns.note(notes)
        types = self._columns.types
        self.names = list(types)
        # As an entry of a dictionary a text is in memory once, wherever it is named.
        self._texts = [name for name, kind in types.items() if is_text(kind)]

    def batches(self) -> Iterator[Mapping[str, Any]]:
        """Yield Arrow arrays by column; structs by their leaves."""
        for path in self._paths:
            self.close()
            self._open_file = ParquetFile(path, self._columns.types)
            for batch in self._open_file.batches(ROWS, self.names, self._texts):
                yield flat(batch)

    def text_field(self, name: str, allow_expansion: bool) -> Field | None:
        """Return the field that holds a column of texts, after a pass over it.

        None if a frame has no text.
        """
        longest = total = 0
        for path in self._paths:
            with closing(ParquetFile(path, self._columns.types)) as part:
                part.refuse_expanding(name, allow_expansion)
                for batch in part.split_batches(ROWS, [name], [name]):
                    if batch[name].null_count:
                        return None
                    nbytes = row_nbytes_of(batch[name])
                    longest = max(longest, int(nbytes.max(initial=0)))
                    total += int(nbytes.sum())
        refuse_expansion(self.folder, total, self.nbytes, allow_expansion)
        # The next text may be a little longer.
        return Field.text(1 << max(0, longest - 1).bit_length())

    def close(self) -> None:
        """Close the open file."""
        if self._open_file is not None:
            self._open_file.close()
            self._open_file = None


class _CountedTimes:
    """Seconds of frames by their number in the episode; see `common.rows.Rows`."""

    dtype: str = "float64"
    shape: tuple[int, ...] = ()

    def __init__(self, bounds: NDArray[np.int64], fps: float) -> None:
        self.count = int(bounds[-1])
        self._bounds, self._fps = bounds, fps

    def read(self, first: int, stop: int) -> Any:
        """See `Rows.read`."""
        rows = np.arange(first, stop)
        begins = self._bounds[np.searchsorted(self._bounds, rows, "right") - 1]
        return (rows - begins) / self._fps


class LerobotReader(FragmentReader):
    """Reads the episodes one after another as one environment.

    Attributes:
        skipped: Names of the videos that are left out.
        texts: Whether a task has a text that is not empty.
    """

    def __init__(
        self,
        frames: Frames,
        notes: Notes,
        info: Json,
        video: str,
        done: str | None,
        allow_expansion: bool,
        fields: Sequence[str] | None = None,
        *,
        appends: Appends,
        stored: bool = False,
        recorded: bool = False,
    ) -> None:
        self._stays, self._appends = stored, appends
        self.skipped: list[str] = []
        self._frames = frames
        self._notes = notes
        self._info = info
        features = info.get("features")
        self._features = features if isinstance(features, dict) else {}
        videos = self._videos(video)
        self._allow_expansion = allow_expansion
        window = Window(frames.batches, frames.count, str(frames.folder / "data"))
        self._columns = self._find(window)
        # Without frames unpacked from videos: they are in other files, and each frame
        # takes at least some bytes there.
        row_nbytes = sum(map(nbytes_of, self._columns.values()))
        refuse_expansion(frames.folder, frames.count * row_nbytes, frames.nbytes, allow_expansion)
        dones = self._columns.pop(DONE, None)
        self._done = None
        if dones is not None:
            self._done = Flags(f"{window.name}: {DONE!r}", dones, frames.count)
        self._stated: list[Flags] = []
        if all(self._is_bool(name) for name in STATED):
            self._stated = [
                Flags(f"{window.name}: {name!r}", self._columns.pop(name), frames.count)
                for name in STATED
            ]
        self._done_meaning = done
        self._episodes = self._find_episodes()
        # A column of a table may have the name of a video.
        cameras = {f"videos/{name}" if name in self._columns else name: name for name in videos}
        paths = {name: _path_of(name) for name in self._columns if name not in COUNTED}
        paths |= {own: _path_of(name) for own, name in cameras.items()}
        tasks = None
        if self._integers(TASK_INDEX) is not None:
            tasks = read_tasks(frames.folder)
        self.texts = tasks is not None and bool(tasks.texts.lengths.any())
        if tasks is not None:
            paths[TEXTS] = TASK
        ends = dict.fromkeys(ENDS, EPISODE if self._done is None else DONE)
        names = name_fields(paths, frames.folder, notes, fields, ends)
        tables = self._episode_tables()
        self._cameras: dict[str, VideoRows] = {}
        # A camera that becomes no field is not looked up.
        read = [camera for own, camera in cameras.items() if own in names]
        listed = read_columns(frames.folder, tables, read)
        self._named = self._rows_of(names, cameras, tables, listed, tasks, window)
        if tables:
            check_rows(frames.folder, listed, self._episodes, notes)
        schema = make_schema(self._named, notes, frames.folder, observed=not recorded)
        self._add_notes(info)
        about = {"features": self._feature_names(names, cameras)}
        selected = select_metadata({**info, **about}, METADATA_KEYS, notes)
        super().__init__(
            self._fragments_of,
            schema,
            notes,
            frames.close,
            user_metadata={"lerobot": selected},
            # A path by which another column is a branch stays a name.
            own_names=own_names_of(names, ends, {own.replace(".", "/"): own for own in names}),
        )

    def _feature_names(self, names: Mapping[str, str], cameras: Mapping[str, str]) -> Json:
        """Return the name of each field's feature, and those of its components."""
        found = {}
        for own, path in names.items():
            name = cameras.get(own, own)
            feature = self._features.get(name)
            if isinstance(feature, dict):
                found[path] = {"name": name, "names": feature.get("names")}
        return found

    def _rows_of(
        self,
        names: Mapping[str, str],
        cameras: Mapping[str, str],
        tables: Sequence[Path],
        listed: Columns,
        tasks: Tasks | None,
        window: Window,
    ) -> dict[str, ColumnRows]:
        """Return the rows of each field.

        Args:
            names: Paths of fields by columns, and by what `cameras` and `TEXTS` call.
            cameras: Cameras by name.
            tables: Tables of episodes.
            listed: Their columns.
            tasks: Texts of tasks.
            window: The columns.
        """
        folder, found, times = self._frames.folder, dict[str, ColumnRows](), None
        for own, path in names.items():
            if own in cameras:
                camera = cameras[own]
                if times is None:
                    times = check_times(folder, self._episodes, self._times())
                where = find_videos(folder, self._info, listed, self._episodes, times, camera)
                self._cameras[camera] = VideoRows(where, times.rows, f"video {camera!r}")
                found[path] = self._cameras[camera]
                if self._stays:
                    known = cache(partial(read_statistics, tables, camera))
                    frames, named = self._cameras[camera], self._appends.named
                    found[path] = Camera(frames, where, times, known, named)
            elif own == TEXTS and tasks is not None:
                found[path] = self._task_rows(tasks, window)
            else:
                rows = self._columns[own]
                found[path] = scalar(rows) if own == REWARD else rows
        return found

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        with self._appends.named():
            yield from super().blocks(rows_per_block)
        for camera, frames in self._cameras.items():
            if frames.surplus:
                self._notes.note(
                    f"{frames.surplus:,} frames in {frames.surplus_files:,} videos of "
                    f"{camera!r} belong to no episode, and were left out"
                )

    def marks(self) -> Iterator[Block]:
        """See `Reader.marks`."""
        with self._appends.named():
            yield from super().marks()

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        with self._appends.named():
            yield from super().measures()

    def identity(self) -> object:
        """See `Reader.identity`: how many appends there were."""
        return self._appends.count

    def _task_rows(self, tasks: Tasks, window: Window) -> TextRows:
        """Return the text of the task of each row."""
        longest = int(tasks.texts.lengths.max(initial=0))
        refuse_expansion(
            self._frames.folder,
            self._frames.count * longest,
            self._frames.nbytes,
            self._allow_expansion,
        )
        self._notes.note(
            f"{TASK!r} is the text of the {len(tasks.texts) - 1} tasks that {TASK_INDEX!r} names"
        )
        rows, known = self._columns[TASK_INDEX], tasks.numbers

        def texts(first: int, stop: int) -> Ragged:
            numbers = np.asarray(rows.read(first, stop)).reshape(-1)
            at = np.searchsorted(known, _as_integers(numbers))
            there = np.append(known, -1)[at] == numbers
            there &= at < len(known)
            if not there.all():
                self._notes.doubt(
                    f"{TASK_INDEX!r} {numbers[~there][0]} has no text, and such "
                    f"frames have an empty {TASK!r}"
                )
            # An empty text stands behind the others.
            found: Ragged = tasks.texts[np.where(there, at, len(known))]
            return found

        # The next task may be a little longer.
        field = Field.text(1 << max(0, longest - 1).bit_length())
        return TextRows(texts, window.count, field, f"{window.name}: {TASK!r}")

    def _videos(self, video: str) -> list[str]:
        """Return the names of the videos to decode."""
        videos = [
            name
            for name, feature in self._features.items()
            if isinstance(feature, dict) and feature.get("dtype") == "video"
        ]
        if videos and video == "refuse":
            casts = " ".join(f"--cast {_path_of(name)}=jpeg:90:420" for name in videos)
            raise FormatError(
                f"{self._frames.folder} has videos, of {', '.join(map(repr, videos))}. Cast "
                f"them to files of images, such as {casts}; or pass video='decode' to unpack them "
                "with PyAV, or video='skip' to leave them out. From set to set (--to lerobot) they "
                "stay videos."
            )
        if video == "decode":
            self.videos = videos
            for name in videos if not self._stays else ():
                self._notes.note(f"{name!r} was unpacked from video: {LOSSY}")
            return videos
        for name in videos:
            self._notes.note(f"{name!r} is kept as video, and was left out")
        self.skipped = videos
        return []

    def _episode_tables(self) -> list[Path]:
        """Return the tables of ``meta/episodes``, which v3 has."""
        folder = self._frames.folder / EPISODES
        if str(self._info.get("codebase_version")).startswith("v2") or not folder.is_dir():
            return []
        return _data_files(folder)

    def _times(self) -> ColumnRows:
        """Return the seconds of each frame since its episode began."""
        rows = self._columns.get(TIMESTAMP)
        if rows is None:
            fps = self._info.get("fps")
            if not is_rate(fps):
                raise FormatError(
                    f"{self._frames.folder}: fps of info.json must be from {MIN_FPS} to "
                    f"{MAX_FPS} to find frames of videos without {TIMESTAMP!r}, got "
                    f"{str(fps)[:40]}. Correct it, or pass video='skip'."
                )
            return _CountedTimes(self._episodes.bounds, fps)
        if not is_scalar(rows.shape) or rows.dtype not in ("float32", "float64"):
            raise FormatError(
                f"{self._frames.folder}: {TIMESTAMP!r} must hold one float32 or "
                f"float64 a row, got {rows.dtype}{list(rows.shape)}. Download the "
                "dataset again, or pass video='skip'."
            )
        return scalar(rows)

    def close(self) -> None:
        """See `Reader.close`."""
        super().close()
        for frames in self._cameras.values():
            frames.close()

    def _find(self, window: Window) -> dict[str, ColumnRows]:
        """Return the columns that fields can hold, by their names in the tables."""
        if EPISODE not in self._frames.names or not window.count:
            raise FormatError(
                f"{window.name} has {window.count} frames of {self._frames.names[:20]} "
                f"without {EPISODE!r}. The dataset is damaged."
            )
        found: dict[str, ColumnRows] = {}
        first = next(self._frames.batches())
        for name, array in first.items():
            rows = self._rows(window, name, array)
            short = name.removesuffix("/bytes")
            if rows is not None:
                found[name if short in first else short] = rows
            elif not name.endswith("/path"):
                reason = f"{array.type} is no field dtype"
                if name in self._frames.names and is_text(plain_type(array.type)):
                    reason = "some frames have none (null)"
                self._notes.doubt(f"column {name!r} was left out: {reason}")
        return found

    def _rows(self, window: Window, name: str, array: Any) -> ColumnRows | None:
        if name.endswith("/bytes"):
            return image_rows(window, name)
        if is_text(plain_type(array.type)) and name in self._frames.names:
            field = self._frames.text_field(name, self._allow_expansion)
            return None if field is None else text_rows(window, name, field)
        feature = self._features.get(name)
        shape = feature.get("shape") if isinstance(feature, dict) else None
        return number_rows(window, name, array, shape)

    def _find_episodes(self) -> Episodes:
        """Return the episodes, in one pass over the columns that count frames."""
        episode_rows = self._columns.pop(EPISODE, None)
        if episode_rows is None or not is_scalar(episode_rows.shape):
            raise self._no_episode("other values")
        counts = self._integers("frame_index")
        indices = self._integers("index")
        begins: list[NDArray[np.int64]] = []
        numbers: list[NDArray[np.int64]] = []
        firsts: list[NDArray[np.int64]] = []
        begin, before = 0, None
        for first in range(0, episode_rows.count, ROWS):
            stop = min(first + ROWS, episode_rows.count)
            stored = np.asarray(episode_rows.read(first, stop)).reshape(-1)
            found = _as_integers(stored)
            odd = np.flatnonzero(found != stored)
            if len(odd):
                raise self._no_episode(f"{stored[odd[0]]} in row {first + odd[0]}")
            before = found[:1] - 1 if before is None else before
            changes = np.flatnonzero(np.diff(found, prepend=before))
            begins.append(changes + first)
            numbers.append(found[changes])
            if indices is not None:
                found_indices = _as_integers(indices.read(first, stop).reshape(-1))
                firsts.append(found_indices[changes])
            if counts is not None:
                own = np.full(stop - first, begin)
                own[changes] = changes + first
                expected = np.arange(first, stop) - np.maximum.accumulate(own)
                got = counts.read(first, stop).reshape(-1)
                wrong = np.flatnonzero(got != expected)
                if len(wrong):
                    self._notes.doubt(
                        f"'frame_index' must count the frames of each episode from 0 "
                        f"on, and the first that does not is {got[wrong[0]]} in row "
                        f"{first + wrong[0]}"
                    )
                    counts = None
            begin = int(begins[-1][-1]) if len(changes) else begin
            before = found[-1:]
        bounds = np.concatenate([*begins, [episode_rows.count]])
        every = np.concatenate(numbers)
        unique = np.unique(every)
        if len(unique) < len(every):
            self._notes.doubt(
                f"the frames of an episode lie in {len(every):,} places for "
                f"{len(unique):,} numbers of {EPISODE!r}: each was read as an episode"
            )
        elif not np.array_equal(every, np.arange(len(every))):
            self._notes.note(
                f"{EPISODE!r} does not count from 0 without a gap: each episode was "
                "read by its own number"
            )
        return Episodes(bounds, every, np.concatenate([np.zeros(0, np.int64), *firsts]))

    def _no_episode(self, got: str) -> FormatError:
        return FormatError(
            f"{self._frames.folder / 'data'}: {EPISODE!r} must be one whole number in "
            f"each row, got {got}. Number the episodes, or download the dataset again."
        )

    def _is_bool(self, name: str) -> bool:
        """Return whether there is a column of one bool a row."""
        rows = self._columns.get(name)
        return rows is not None and is_scalar(rows.shape) and rows.dtype == "bool"

    def _integers(self, name: str) -> ColumnRows | None:
        """Return a column of one number a row, or None."""
        rows = self._columns.get(name)
        if rows is None or not is_scalar(rows.shape):
            return None
        return rows if rows.dtype.startswith(("int", "uint", "float")) else None

    def _fragments_of(self) -> Iterator[Fragment]:
        bounds = self._episodes.bounds.tolist()
        for first, stop in pairwise(bounds):
            steps = stop - first
            yield Fragment(
                f"{self._frames.folder}, frame {first}",
                steps,
                {p: ShiftedRows(r, first, steps) for p, r in self._named.items()},
                {},
                self._ends(first, steps),
            )

    def _ends(self, begin: int, steps: int) -> Any:
        def ends(first: int, stop: int) -> tuple[Bools, Bools]:
            if self._stated:
                terminated, truncated = self._stated
                rows = begin + first, begin + stop
                return terminated.read(*rows), truncated.read(*rows)
            over = np.zeros(stop - first, bool)
            over[-1] = stop == steps
            done = np.zeros(stop - first, bool)
            if self._done is not None:
                done = self._done.read(begin + first, begin + stop)
            if self._done_meaning == TRUNCATED_FIELD:
                return np.zeros_like(done), done | over
            return done, over & ~done

        return ends

    def _add_notes(self, info: Json) -> None:
        episodes, frames = len(self._episodes.numbers), self._frames.count
        note = self._notes.note
        note(f"{episodes:,} episodes begin where {EPISODE!r} changes")
        note(
            "there are as many observations as actions: what was seen after the last "
            "step of an episode is not known"
        )
        if self._stated:
            note(f"ends are those of {STATED[0]!r} and {STATED[1]!r}")
        elif self._done is None:
            note(f"no {DONE!r}: all episodes are truncated")
        elif self._done_meaning is None:
            self._notes.doubt(ambiguous_end_note(DONE))
        for key, got in (("total_episodes", episodes), ("total_frames", frames)):
            if info.get(key) != got:
                self._notes.doubt(
                    f"{INFO} says {key} {str(info.get(key))[:40]}, and the data has {got}"
                )


@dataclass(frozen=True, slots=True)
class Tasks:
    """Texts of the tasks of a dataset.

    Attributes:
        numbers: int64 ``[tasks]``, their numbers, which rise.
        texts: The text of each; an empty one stands behind them.
    """

    numbers: NDArray[np.int64]
    texts: Ragged


def read_tasks(folder: Path) -> Tasks | None:
    """Texts of the tasks of a dataset, or None if it has none.

    Raises:
        FormatError: They are no texts, or take too much memory; or two have one number.
    """
    lines, table = (folder / name for name in TASK_FILES)
    if table.is_file():
        return _tasks_of_table(table)
    if lines.is_file():
        return _tasks_of_lines(lines)
    return None


def _tasks_of_lines(path: Path) -> Tasks:
    numbers: list[int] = []
    texts: list[bytes] = []
    for number, line in enumerate(files.read_bytes(path, MAX_NBYTES).splitlines(), 1):
        if not line.strip():
            continue
        value = strict_json.parse(line, f"{path}, line {number}")
        index, text = value.get(TASK_INDEX), value.get(TASK)
        if type(index) is not int or not isinstance(text, str):
            raise FormatError(
                f"{path}, line {number} must have a number {TASK_INDEX!r} and a text "
                f"{TASK!r}, got {line[:60]!r}. Download the dataset again."
            )
        numbers.append(index)
        texts.append(text.encode())
    return _numbered(path, numbers, texts)


def _tasks_of_table(path: Path) -> Tasks:
    with closing(ParquetFile(path)) as table:
        named = [name for name in TASK_COLUMNS if name in table.schema.names]
        if not named or TASK_INDEX not in table.schema.names:
            raise FormatError(
                f"{path} must have columns {TASK_INDEX!r} and {TASK!r}, got "
                f"{table.schema.names[:20]}. Download the dataset again."
            )
        column = named[0]
        if not is_text(table.schema.field(column).type) or table.nbytes > MAX_NBYTES:
            raise FormatError(
                f"{path}: column {column!r} must be text in at most {MAX_NBYTES} bytes,"
                f" got {table.schema.field(column).type} in {table.nbytes}. Download "
                "the dataset again."
            )
        numbers: list[int] = []
        texts: list[bytes] = []
        nbytes = 0
        for batch in table.split_batches(ROWS, [TASK_INDEX, column], [column]):
            if batch[TASK_INDEX].null_count or batch[column].null_count:
                raise FormatError(
                    f"{path} must have a number and a text in each row, got none in "
                    "some. Download the dataset again."
                )
            found = decode_values(batch[column], Field.text(MAX_NBYTES))
            # Tools that edit tables make floats of them.
            numbers += [
                int(number) if isinstance(number, float) and number % 1 == 0 else number
                for number in batch[TASK_INDEX].to_pylist()
            ]
            texts += [text.tobytes() for text in found]
            nbytes += len(found.values)
            if nbytes > MAX_NBYTES:
                raise FormatError(
                    f"{path}: texts must take at most {MAX_NBYTES} bytes, got more. Shorten them."
                )
    return _numbered(path, numbers, texts)


def _numbered(path: Path, numbers: Sequence[object], texts: Sequence[bytes]) -> Tasks:
    """Texts in the order of their numbers, which may have gaps."""
    placed: dict[int, bytes] = {}
    for number, text in zip(numbers, texts, strict=True):
        if type(number) is not int or not 0 <= number < 1 << 63 or number in placed:
            raise FormatError(
                f"{path}: {TASK_INDEX!r} must be a number from 0 on for each task, and "
                f"no number twice, got {str(number)[:40]}. Download the dataset again."
            )
        placed[number] = text
    ordered = sorted(placed)
    parts = [placed[number] for number in ordered]
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    every = Ragged(np.frombuffer(b"".join(parts), np.uint8), offsets)
    return Tasks(np.array(ordered, np.int64), Ragged.concatenate([every, NO_TEXT]))


def _as_integers(numbers: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers as integers; tools that edit tables make floats of them."""
    with np.errstate(invalid="ignore"):
        found: NDArray[np.int64] = numbers.astype(np.int64)
    return found


def _path_of(name: str) -> str:
    return "reward" if name == REWARD else name.replace(".", "/")


def _data_files(folder: Path) -> list[Path]:
    """Return the files of frames, ordered by chunk and number."""
    found = []
    for chunk in folder.iterdir() if folder.is_dir() else ():
        number = CHUNK.fullmatch(chunk.name)
        for path in chunk.iterdir() if number and chunk.is_dir() else ():
            part = DATA_FILE.fullmatch(path.name)
            if part and number:
                found.append((int(number[1]), int(part[1]), path))
    if not found or len(found) > MAX_FILES:
        raise FormatError(
            f"{folder} must hold 1 to {MAX_FILES} parquet files under chunk-000 and "
            f"so on, got {len(found)}. Download the dataset again."
        )
    return [path for _, _, path in sorted(found)]


def _info(path: Path) -> Json:
    return strict_json.parse(files.read_bytes(path / INFO, MAX_NBYTES), str(path / INFO))


def recognizes(path: Path) -> bool:
    """Return whether a folder has LeRobot's info.json."""
    try:
        return (path / INFO).is_file() and "codebase_version" in _info(path)
    except ReplayError:
        return False


def open_reader(
    path: Path,
    *,
    video: str = "refuse",
    done: str | None = None,
    allow_expansion: bool = False,
    fields: Sequence[str] | None = None,
) -> Reader:
    """Open a dataset as a source.

    Args:
        path: Its folder.
        done: What ``next.done`` means, ``"terminated"`` or ``"truncated"``.
        video: ``"skip"`` leaves out what is kept as video, ``"decode"`` unpacks it
            with PyAV, ``"refuse"`` refuses it.
        allow_expansion: Read tables that expand to more than 1,000 times the file.
        fields: See `name_fields`.
    """
    return _open(path, video, done, allow_expansion, fields, stored=False)


def open_stored(path: Path, *, video: str | None = None, **options: Any) -> Reader:
    """Open a dataset whose videos need not be unpacked; see `registry.open_stored`.

    Args:
        path: Its folder.
        video: As in `open_reader`; by default frames stay in their videos.
        **options: The others of `open_reader`.
    """
    if video is not None:
        return open_reader(path, video=video, **options)
    defaults = {"done": None, "allow_expansion": False, "fields": None}
    return _open(path, "decode", **{**defaults, **options}, stored=True)


def _open(
    path: Path,
    video: str,
    done: str | None,
    allow_expansion: bool,
    fields: Sequence[str] | None,
    *,
    stored: bool,
) -> Reader:
    if video not in VIDEOS:
        raise SchemaError(
            f"video must be one of {', '.join(VIDEOS)}, got {video!r}. Leave it out to "
            "refuse datasets with videos."
        )
    check_done(done)
    appends = Appends.of(path)
    info = _info(path)
    version = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith(("v2", "v3")):
        raise FormatError(
            f"{path / INFO}: codebase_version must be v2 or v3, got "
            f"{str(version)[:40]!r}. Convert the dataset with LeRobot."
        )
    notes = Notes()
    with appends.named():
        record = read_record(path)
        frames = Frames(path, notes)
        with undone_by(frames.close):
            chosen = fields if record is None else None
            options = (video, done, allow_expansion, chosen)
            known = record is not None
            reader = LerobotReader(
                frames, notes, info, *options, appends=appends, stored=stored, recorded=known
            )
            if record is None:
                return reader
            found = restored(reader, record, reader.skipped, texts=reader.texts)
            # Others of the dataset are no fields of the record, and are not read.
            named = {*found.own_names(), *found.describe().schema.paths}
            found.videos = [name for name in reader.videos if name in named]
            return found

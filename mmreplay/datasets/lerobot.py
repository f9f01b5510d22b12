"""LeRobot's datasets, v2 and v3: parquet files of frames, episodes by their numbers.

The text of a frame's task, which a file beside the frames has by its ``task_index``,
becomes a field of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay import strict_json
from mmreplay.convert.base import Block, Notes, refuse_expansion
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Bools
from mmreplay.convert.parquet import (
    ParquetFile,
    decode_values,
    is_text,
    plain_type,
    row_nbytes_of,
)
from mmreplay.convert.values import split_by_bytes
from mmreplay.datasets.arrow import (
    ROWS,
    Window,
    flat,
    image_rows,
    number_rows,
    text_rows,
)
from mmreplay.datasets.common.fields import (
    Flags,
    ambiguous_end_note,
    check_done,
    make_schema,
    select_metadata,
)
from mmreplay.datasets.common.fragments import (
    NO_TEXT,
    TRUNCATED_FIELD,
    Fragment,
    FragmentReader,
)
from mmreplay.datasets.common.rows import ColumnRows, ShiftedRows, nbytes_of, scalar
from mmreplay.datasets.images import LOSSY, VideoRows
from mmreplay.disk import files
from mmreplay.errors import FormatError, ReplayError, SchemaError
from mmreplay.ragged import Ragged
from mmreplay.schema import Field, Schema
from mmreplay.strict_json import Json

INFO = Path("meta") / "info.json"
MAX_NBYTES = 16 << 20
MAX_FILES = 1_000_000
EPISODE, DONE, REWARD = "episode_index", "next.done", "next.reward"
TASK, TASK_INDEX = "task", "task_index"
TASKS = (Path("meta") / "tasks.jsonl", Path("meta") / "tasks.parquet")
"""Texts of tasks by their numbers, of v2 and v3."""
TASK_COLUMNS = (TASK, "__index_level_0__")
"""Columns of the texts in v3, where they are the index of a table of pandas."""
COUNTED = (EPISODE, "frame_index", "index")
"""Columns that positions and flags make redundant."""
DATA_FILE = re.compile(r"(?:episode|file)[-_](\d+)\.parquet")
VIDEO = re.compile(r"(?:episode|file)[-_](\d+)\.mp4")
CHUNK = re.compile(r"chunk-(\d+)")
VIDEOS = ("refuse", "skip", "decode")
METADATA_KEYS = ("codebase_version", "fps", "robot_type")
"""Keys of info.json that become user metadata ``lerobot``."""


class Frames:
    """The frames of all files, one after another.

    Attributes:
        folder: Folder of the dataset.
        count: Number of frames.
        nbytes: Bytes of the files.
        names: Names of the columns.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._paths = _data_files(folder / "data")
        self.count = self.nbytes = 0
        self._open_file: ParquetFile | None = None
        for path in self._paths:
            with closing(ParquetFile(path)) as part:
                if path == self._paths[0]:
                    schema = part.schema
                if not part.schema.equals(schema):
                    raise FormatError(
                        f"{path} has other columns than {self._paths[0]}. Download the "
                        "dataset again."
                    )
                for name in part.schema.names:
                    part.refuse_long(name)
                self.count += part.rows
                self.nbytes += part.nbytes
        self.names: list[str] = list(schema.names)
        # As an entry of a dictionary a text is in memory once, wherever it is named.
        self._texts = [field.name for field in schema if is_text(field.type)]

    def batches(self) -> Iterator[Mapping[str, Any]]:
        """Yield Arrow arrays by column; structs by their leaves."""
        for path in self._paths:
            self.close()
            self._open_file = ParquetFile(path)
            for batch in self._open_file.batches(ROWS, self.names, self._texts):
                yield flat(batch)

    def text_field(self, name: str, allow_expansion: bool) -> Field | None:
        """Return the field that holds a column of texts, after a pass over it.

        None if a frame has no text.
        """
        longest = total = 0
        for path in self._paths:
            with closing(ParquetFile(path)) as part:
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


class LerobotReader(FragmentReader):
    """Reads the episodes one after another as one environment."""

    def __init__(
        self,
        frames: Frames,
        info: Json,
        video: str,
        done: str | None,
        allow_expansion: bool,
    ) -> None:
        self._frames = frames
        self._notes = notes = Notes()
        features = info.get("features")
        self._features = features if isinstance(features, dict) else {}
        videos = self._videos(video)
        self._allow_expansion = allow_expansion
        window = Window(frames.batches, frames.count, str(frames.folder / "data"))
        self._columns = self._find(window)
        # Without frames unpacked from videos: they are in other files, and each frame
        # takes at least some bytes there.
        row_nbytes = sum(map(nbytes_of, self._columns.values()))
        refuse_expansion(
            frames.folder, frames.count * row_nbytes, frames.nbytes, allow_expansion
        )
        self._video_columns = [self._video_rows(name) for name in videos]
        self._columns |= dict(zip(videos, self._video_columns, strict=True))
        dones = self._columns.pop(DONE, None)
        self._done = None
        if dones is not None:
            self._done = Flags(f"{window.name}: {DONE!r}", dones, frames.count)
        self._done_meaning = done
        self._bounds = self._episodes(self._columns.pop(EPISODE))
        self._named = {
            _renamed(name): scalar(rows) if name == REWARD else rows
            for name, rows in self._columns.items()
            if name not in COUNTED
        }
        schema = make_schema(self._named, notes, frames.folder)
        self._add_notes(info)
        selected = select_metadata(info, METADATA_KEYS, notes)
        super().__init__(
            self._fragments_of,
            schema,
            notes,
            frames.close,
            user_metadata={"lerobot": selected},
        )
        self._tasks = None
        if TASK_INDEX in schema and TASK not in schema:
            self._tasks = read_tasks(frames.folder)
        self._described = self._with_tasks(allow_expansion)

    def _with_tasks(self, allow_expansion: bool) -> Description:
        """The description, with the field of tasks if there are some."""
        described = super().describe()
        if self._tasks is None:
            return described
        longest = int(self._tasks.lengths.max(initial=0))
        refuse_expansion(
            self._frames.folder, self._frames.count * longest, self._frames.nbytes,
            allow_expansion,
        )  # fmt: skip
        self._notes.note(
            f"{TASK!r} is the text of the {len(self._tasks)} tasks that "
            f"{TASK_INDEX!r} names"
        )
        # The next task may be a little longer.
        field = Field.text(1 << max(0, longest - 1).bit_length())
        schema = described.schema
        fields = {**schema.fields, TASK: field}
        return replace(described, schema=Schema.from_flat(fields, schema.roles))

    def describe(self) -> Description:
        """See `Reader.describe`."""
        return self._described

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        tasks = self._tasks
        for block in super().blocks(rows_per_block):
            if tasks is None:
                yield block
                continue
            numbers = block.columns[TASK_INDEX].reshape(-1).astype(np.int64)
            known = (numbers >= 0) & (numbers < len(tasks))
            if not known.all():
                self._notes.doubt(
                    f"{TASK_INDEX!r} {numbers[~known][0]} has no text, and such frames "
                    f"have an empty {TASK!r}"
                )
            # An empty text stands behind the others.
            numbers = np.where(known, numbers, len(tasks))
            every = Ragged.concatenate([tasks, NO_TEXT])
            for first, stop in split_by_bytes(every.lengths[numbers]):
                rows = block.rows(first, stop)
                texts: Any = every[numbers[first:stop]]
                columns = {**rows.columns, TASK: texts}
                yield Block(columns, rows.env_ids, rows.positions, rows.flags)

    def _videos(self, video: str) -> list[str]:
        """Return the names of the videos to decode."""
        videos = [
            name
            for name, feature in self._features.items()
            if isinstance(feature, dict) and feature.get("dtype") == "video"
        ]
        if videos and video == "refuse":
            raise FormatError(
                f"{self._frames.folder}: {videos[0]!r} is stored as video. Pass "
                "video='decode' to unpack it with PyAV, or video='skip' to leave it "
                "out."
            )
        if video == "decode":
            for name in videos:
                self._notes.note(f"{name!r} was unpacked from video: {LOSSY}")
            return videos
        for name in videos:
            self._notes.note(f"{name!r} is kept as video, and was left out")
        return []

    def _video_rows(self, name: str) -> VideoRows:
        """Return the frames of a camera from all its files, in order."""
        folder = self._frames.folder / "videos"
        found = []
        for path in folder.rglob("*.mp4"):
            part, chunk = VIDEO.fullmatch(path.name), None
            for parent in path.relative_to(folder).parts[:-1]:
                chunk = CHUNK.fullmatch(parent) or chunk
            if part and chunk and name in path.relative_to(folder).parts:
                found.append((int(chunk[1]), int(part[1]), path))
        if not found:
            raise FormatError(
                f"{folder} holds no video of {name!r}. Download the dataset again, or "
                "pass video='skip'."
            )
        paths = [path for _, _, path in sorted(found)]
        return VideoRows(paths, self._frames.count, f"video {name!r}")

    def close(self) -> None:
        """See `Reader.close`."""
        super().close()
        for rows in self._video_columns:
            rows.close()

    def _find(self, window: Window) -> dict[str, ColumnRows]:
        """Return the columns that fields can hold, by their names in the tables."""
        if EPISODE not in self._frames.names or not window.count:
            raise FormatError(
                f"{window.name} has {window.count} frames of {self._frames.names[:20]} "
                f"without {EPISODE!r}. The dataset is damaged."
            )
        found: dict[str, ColumnRows] = {}
        for name, array in next(self._frames.batches()).items():
            rows = self._rows(window, name, array)
            if rows is not None:
                found[name.removesuffix("/bytes")] = rows
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

    def _episodes(self, numbers: ColumnRows) -> NDArray[np.int64]:
        """Return the first frame of each episode, and the number of frames."""
        begins, before = [np.zeros(1, np.int64)], None
        for first in range(0, numbers.count, ROWS):
            stop = min(first + ROWS, numbers.count)
            found = numbers.read(first, stop).astype(np.int64).reshape(-1)
            begin = found[0] if before is None else before
            changes = np.flatnonzero(np.diff(found, prepend=begin))
            begins.append(changes + first)
            before = found[-1]
        return np.concatenate([*begins, [numbers.count]])

    def _fragments_of(self) -> Iterator[Fragment]:
        bounds = self._bounds.tolist()
        for first, stop in pairwise(bounds):
            steps = stop - first
            yield Fragment(
                f"{self._frames.folder}, frame {first}", steps,
                {p: ShiftedRows(r, first, steps) for p, r in self._named.items()}, {},
                self._ends(first, steps),
            )  # fmt: skip

    def _ends(self, begin: int, steps: int) -> Any:
        def ends(first: int, stop: int) -> tuple[Bools, Bools]:
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
        episodes, frames = len(self._bounds) - 1, self._frames.count
        note = self._notes.note
        note(f"{episodes:,} episodes begin where {EPISODE!r} changes")
        note(
            "there are as many observations as actions: what was seen after the last "
            "step of an episode is not known"
        )
        if self._done is None:
            note(f"no {DONE!r}: all episodes are truncated")
        elif self._done_meaning is None:
            self._notes.doubt(ambiguous_end_note(DONE))
        for key, got in (("total_episodes", episodes), ("total_frames", frames)):
            if info.get(key) != got:
                self._notes.doubt(
                    f"{INFO} says {key} {str(info.get(key))[:40]}, and the data has "
                    f"{got}"
                )


def read_tasks(folder: Path) -> Ragged | None:
    """Texts of the tasks of a dataset by their numbers, or None if it has none.

    Raises:
        FormatError: They are no texts, or take too much memory.
    """
    lines, table = (folder / name for name in TASKS)
    if table.is_file():
        return _tasks_of_table(table)
    if lines.is_file():
        return _tasks_of_lines(lines)
    return None


def _tasks_of_lines(path: Path) -> Ragged:
    texts: dict[int, str] = {}
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
        texts[index] = text
    return _numbered(path, list(texts), [text.encode() for text in texts.values()])


def _tasks_of_table(path: Path) -> Ragged:
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
            numbers += batch[TASK_INDEX].to_pylist()
            texts += [text.tobytes() for text in found]
            nbytes += len(found.values)
            if nbytes > MAX_NBYTES:
                raise FormatError(
                    f"{path}: texts must take at most {MAX_NBYTES} bytes, got more. "
                    "Shorten them."
                )
    return _numbered(path, numbers, texts)


def _numbered(path: Path, numbers: Sequence[object], texts: Sequence[bytes]) -> Ragged:
    """Texts in the order of their numbers, which begin with 0."""
    placed: list[bytes] = [b""] * len(texts)
    for number, text in zip(numbers, texts, strict=True):
        if type(number) is not int or not 0 <= number < len(texts):
            raise FormatError(
                f"{path}: {TASK_INDEX!r} must number {len(texts)} tasks from 0 on, got "
                f"{str(number)[:40]}. Download the dataset again."
            )
        placed[number] = text
    offsets = np.cumsum([0, *map(len, placed)], dtype=np.int64)
    return Ragged(np.frombuffer(b"".join(placed), np.uint8), offsets)


def _renamed(name: str) -> str:
    return {REWARD: "reward"}.get(name, name.replace(".", "/"))


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
            f"{folder} must hold 1 to {MAX_FILES} files of frames under chunk-000 and "
            f"so on, got {len(found)}. Download the dataset again."
        )
    return [path for _, _, path in sorted(found)]


def _info(path: Path) -> Json:
    return strict_json.parse(
        files.read_bytes(path / INFO, MAX_NBYTES), str(path / INFO)
    )


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
) -> LerobotReader:
    """Open a dataset as a source.

    Args:
        path: Its folder.
        done: What ``next.done`` means, ``"terminated"`` or ``"truncated"``.
        video: ``"skip"`` leaves out what is kept as video, ``"decode"`` unpacks it
            with PyAV, ``"refuse"`` refuses it.
        allow_expansion: Read tables that expand to more than 1,000 times the file.
    """
    if video not in VIDEOS:
        raise SchemaError(
            f"video must be one of {', '.join(VIDEOS)}, got {video!r}. Leave it out to "
            "refuse datasets with videos."
        )
    check_done(done)
    info = _info(path)
    version = info.get("codebase_version")
    if not isinstance(version, str) or not version.startswith(("v2", "v3")):
        raise FormatError(
            f"{path / INFO}: codebase_version must be v2 or v3, got "
            f"{str(version)[:40]!r}. Convert the dataset with LeRobot."
        )
    frames = Frames(path)
    try:
        return LerobotReader(frames, info, video, done, allow_expansion)
    except BaseException:
        frames.close()
        raise

"""Where the rows and video frames of LeRobot's episodes are, by ``meta/episodes``.

The file of each camera and the second in it at which an episode begins. In v2 each
episode has a file of its own, and begins at second 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from mmreplay.convert.base import Notes
from mmreplay.convert.parquet import ParquetFile, first_null, has_nulls
from mmreplay.datasets.common.rows import ColumnRows
from mmreplay.datasets.images import TOLERANCE_S, VideoEpisodes
from mmreplay.datasets.lerobot_layout import is_rate
from mmreplay.datasets.lerobot_stats import KEYS, Statistics
from mmreplay.errors import FormatError
from mmreplay.strict_json import Json

EPISODES = Path("meta") / "episodes"
EPISODE, LENGTH, FIRST = "episode_index", "length", "dataset_from_index"
ADDRESS = ("chunk_index", "file_index", "from_timestamp")
"""Endings of the columns that say where the frames of a camera are."""
STOP = "to_timestamp"
"""Ending of the column that says where they end, which a set may lack."""
INTEGERS = (EPISODE, LENGTH, FIRST, *ADDRESS[:2])
"""Endings of the columns of whole numbers, which other tools may store as floats."""
MAX_EPISODES = 10_000_000
MAX_CHUNK = 1 << 31
PATHS = {
    "v2": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    "v3": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
"""Paths of videos where info.json names none."""
NAME = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")
BATCH_ROWS = 1024
Numbers = NDArray[np.int64]
Columns = Mapping[str, NDArray[np.float64]]
"""Columns of ``meta/episodes`` by name, each float64 ``[episodes]``."""
AGAIN = "Download the dataset again."
WAY_OUT = "Download the dataset again, or pass video='skip'."
"""For what is read for videos only."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """The episodes of the data files.

    Attributes:
        bounds: int64 ``[episodes + 1]``, first row of each, and the number of rows.
        numbers: int64 ``[episodes]``, their ``episode_index``.
        indices: int64 ``[episodes]``, ``index`` of the first row of each; empty if the
            data has none.
    """

    bounds: Numbers
    numbers: Numbers
    indices: Numbers


def check_rows(folder: Path, columns: Columns, in_data: Episodes, notes: Notes) -> None:
    """Doubt rows that are not where ``meta/episodes`` says.

    Args:
        folder: The dataset.
        columns: Of ``meta/episodes``; see `read_columns`.
        in_data: The episodes of the data.
        notes: Receives the doubts.
    """
    rows = _rows_of(columns[EPISODE], in_data.numbers)
    lacking = np.flatnonzero(rows < 0)
    if len(lacking):
        notes.doubt(f"{EPISODES} has no episode {in_data.numbers[lacking[0]]}, which the data has")
    known = np.flatnonzero(rows >= 0)
    for name, values in ((LENGTH, np.diff(in_data.bounds)), (FIRST, in_data.indices)):
        if name not in columns or not len(values):
            continue
        said = columns[name][rows[known]]
        wrong = np.flatnonzero(said != values[known])
        if len(wrong):
            at = known[wrong[0]]
            notes.doubt(
                f"{EPISODES} says {name} {said[wrong[0]]:g} of episode "
                f"{in_data.numbers[at]}, and the data has {values[at]}"
            )


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of rows since their episode began.

    Attributes:
        rows: Of each row, of shape ``[]``.
        first: float64 ``[episodes]``, of the first row of each.
        last: float64 ``[episodes]``, of the last row of each.
        slowest: float64 ``[episodes]``, the lowest rate, in rows a second, that the
            times of all rows of each allow; 0 of a single row.
        fastest: float64 ``[episodes]``, the highest one; infinite of a single row.
    """

    rows: ColumnRows
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    slowest: NDArray[np.float64]
    fastest: NDArray[np.float64]


def check_times(folder: Path, in_data: Episodes, rows: ColumnRows) -> Times:
    """Return the times of rows, in one pass over them.

    Raises:
        FormatError: They do not rise within an episode.
    """
    bounds = in_data.bounds
    first, last = np.empty((2, len(bounds) - 1))
    slowest, fastest = np.zeros(len(first)), np.full(len(first), np.inf)
    before = np.full(1, -np.inf)
    for begin in range(0, rows.count, BATCH_ROWS):
        stop = min(begin + BATCH_ROWS, rows.count)
        stored = rows.read(begin, stop).reshape(-1)
        seconds = stored.astype(np.float64)
        shifted = np.concatenate([before, seconds[:-1]])
        low, high = np.searchsorted(bounds[:-1], (begin, stop))
        starts = bounds[low:high] - begin
        first[low:high] = seconds[starts]
        shifted[starts] = -np.inf
        wrong = np.flatnonzero(~(seconds - shifted > 2 * TOLERANCE_S))
        if len(wrong):
            at = wrong[0]
            raise FormatError(
                f"{folder}: times of rows must rise within an episode, as two rows "
                f"would have one frame, got {seconds[at]:g} s after {shifted[at]:g} s "
                f"in row {begin + at}. {WAY_OUT}"
            )
        low, high = np.searchsorted(bounds[1:], (begin + 1, stop + 1))
        last[low:high] = seconds[bounds[1:][low:high] - begin - 1]
        before = seconds[-1:]
        row = np.arange(begin, stop)
        episode = np.searchsorted(bounds, row, "right") - 1
        later = row > bounds[episode]
        steps, episode = (row - bounds[episode])[later], episode[later]
        passed = seconds[later] - first[episode]
        # The time of a row may be rounded to its dtype.
        apart = TOLERANCE_S + np.spacing(np.abs(stored[later])).astype(float)
        np.maximum.at(slowest, episode, steps / (passed + apart))
        np.minimum.at(fastest, episode, steps / np.maximum(passed - apart, TOLERANCE_S))
    return Times(rows, first, last, slowest, fastest)


def find_videos(
    folder: Path, info: Json, columns: Columns, in_data: Episodes, times: Times, camera: str
) -> VideoEpisodes:
    """Return where the frames of a camera are.

    Args:
        folder: The dataset.
        info: Its info.json.
        columns: Of ``meta/episodes``, of v3; see `read_columns`.
        in_data: The episodes of the data.
        times: Times of their rows.
        camera: Name of the feature.

    Raises:
        FormatError: An episode has no place, or its file is not there; or it has more
            rows than frames, or shares some with another one.
    """
    version = str(info.get("codebase_version"))[:2]
    template = info.get("video_path")
    if not isinstance(template, str):
        template = PATHS[version]
    if version == "v2":
        keys = ("episode_chunk", EPISODE)
        places, starts = _numbered_files(folder, info, in_data)
    else:
        keys = ("chunk_index", "file_index")
        places, starts = _listed_files(folder, info, columns, in_data, times, camera)
    distinct, files_of = np.unique(places, axis=0, return_inverse=True)
    paths = []
    for place in distinct.tolist():
        values = {"video_key": camera, **dict(zip(keys, place, strict=True))}
        paths.append(folder / _filled(folder, template, values))
        if not paths[-1].is_file():
            raise FormatError(
                f"{paths[-1]} does not exist, but the dataset has frames of "
                f"{camera!r} there. {WAY_OUT}"
            )
    # A template may give several places one path.
    unique = list(dict.fromkeys(paths))
    places_of = {path: place for place, path in enumerate(unique)}
    number_of = np.array([places_of[path] for path in paths], np.int64)
    videos = VideoEpisodes(
        in_data.bounds, in_data.numbers, unique, number_of[files_of.reshape(-1)], starts
    )
    _refuse_shared(videos, times, camera)
    return videos


def _numbered_files(
    folder: Path, info: Json, in_data: Episodes
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Chunk and number of each episode of v2, and where in its file it begins."""
    size = info.get("chunks_size", 1000)
    if type(size) is not int or size < 1:
        raise FormatError(
            f"{folder}: chunks_size of info.json must be at least 1, got "
            f"{str(size)[:40]}. {WAY_OUT}"
        )
    places = np.stack([in_data.numbers // size, in_data.numbers], axis=1)
    return places, np.zeros(len(in_data.numbers))


def _listed_files(
    folder: Path, info: Json, columns: Columns, in_data: Episodes, times: Times, camera: str
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Chunk and number of the file of each episode of v3, and where in it it begins."""
    to = f"videos/{camera}/{STOP}"
    rows = _rows_of(columns[EPISODE], in_data.numbers)
    if (rows < 0).any():
        raise FormatError(
            f"{folder / EPISODES} has no episode {in_data.numbers[rows < 0][0]}, "
            f"so that its frames of {camera!r} cannot be found. {WAY_OUT}"
        )
    chunks, numbers, starts = (columns[name][rows] for name in _addresses(camera))
    good = (starts >= 0) & (starts < np.inf)
    for each in (chunks, numbers):
        good &= (each >= 0) & (each < MAX_CHUNK)
    if not good.all():
        at = int(np.argmin(good))
        raise FormatError(
            f"{folder / EPISODES}: chunk_index, file_index and from_timestamp of "
            f"{camera!r} must be at least 0, got {chunks[at]:g}, {numbers[at]:g} "
            f"and {starts[at]:g} of episode {in_data.numbers[at]}. {WAY_OUT}"
        )
    places = np.stack([chunks, numbers], axis=1).astype(np.int64)
    if to in columns:
        fps, stops, ends = info.get("fps"), columns[to][rows], starts + times.last
        apart = TOLERANCE_S
        if is_rate(fps):
            # A timestamp may be rounded, but not by half a frame.
            apart = 0.5 / fps
        short = ends > stops - apart
        if short.any():
            at = int(np.argmax(short))
            raise FormatError(
                f"{folder / EPISODES} says that the frames of {camera!r} of "
                f"episode {in_data.numbers[at]} end at {stops[at]:.4f} s, but the "
                f"frame of its last row begins at {ends[at]:.4f} s. {WAY_OUT}"
            )
    return places, starts


def _refuse_shared(videos: VideoEpisodes, times: Times, camera: str) -> None:
    """Refuse episodes of which two would have one frame.

    Raises:
        FormatError: There are such.
    """
    begins, ends = videos.starts + times.first, videos.starts + times.last
    order = np.lexsort((begins, videos.starts, videos.files))
    one, other = order[:-1], order[1:]
    # The rows of an episode may lie in several places.
    apart = videos.numbers[one] != videos.numbers[other]
    limits = np.where(apart, videos.starts[other], begins[other])
    shared = videos.files[one] == videos.files[other]
    shared &= ends[one] >= limits - 2 * TOLERANCE_S
    if shared.any():
        at = int(np.argmax(shared))
        raise FormatError(
            f"{videos.paths[videos.files[one[at]]]}: the last row of episode "
            f"{videos.numbers[one[at]]} of {camera!r} is at {ends[one[at]]:.4f} s, "
            f"but episode {videos.numbers[other[at]]} begins at {limits[at]:.4f} s. "
            f"{WAY_OUT}"
        )


def _filled(folder: Path, template: str, values: Mapping[str, object]) -> PurePosixPath:
    """Return a path inside the dataset by its template.

    Raises:
        FormatError: The template names anything else, or leads out of the dataset.
    """

    def fill(match: re.Match[str]) -> str:
        value = str(values.get(match[1], match[0]))
        return value.zfill(int(match[2] or 0)) if value.isdecimal() else value

    path = NAME.sub(fill, template)
    parts = PurePosixPath(path).parts
    if "{" in path or "\0" in path or not parts or {"..", "/"} & set(parts):
        raise FormatError(
            f"{folder}: video_path of info.json must be a path in the dataset with "
            f"{', '.join(f'{{{name}}}' for name in values)}, got {template[:80]!r}. "
            f"{WAY_OUT}"
        )
    return PurePosixPath(path)


def _rows_of(numbers: NDArray[np.float64], wanted: Numbers) -> Numbers:
    """Return the row of each wanted number; -1 of one that is not there."""
    order = np.argsort(numbers, kind="stable")
    at = np.searchsorted(numbers, wanted, sorter=order)
    rows = order[np.minimum(at, len(order) - 1)] if len(order) else at - at - 1
    there = (at < len(order)) & (
        numbers[rows] == wanted if len(order) else np.zeros(len(wanted), bool)
    )
    in_data: Numbers = np.where(there, rows, -1)
    return in_data


def _addresses(camera: str) -> list[str]:
    """Columns that say where the frames of a camera are."""
    return [f"videos/{camera}/{end}" for end in ADDRESS]


def read_columns(folder: Path, files: Sequence[Path], cameras: Sequence[str]) -> Columns:
    """Return columns of ``meta/episodes`` that say where rows and frames are.

    Args:
        folder: The dataset.
        files: Its tables of episodes.
        cameras: Names of the features whose frames are read.

    Raises:
        FormatError: A column is not there, or holds no numbers, or fractions where
            those count; or an episode is listed twice.
    """
    names = [name for camera in cameras for name in _addresses(camera)]
    optional = [LENGTH, FIRST, *(f"videos/{camera}/{STOP}" for camera in cameras)]
    return _read(folder, files, names, optional)


def _read(
    folder: Path, files: Sequence[Path], names: Sequence[str], optional: Sequence[str]
) -> Columns:
    """Return columns by name, of which some may be missing; see `read_columns`."""
    in_data: dict[str, list[NDArray[np.float64]]] = {}
    for path in files:
        with closing(ParquetFile(path)) as table:
            missing = [n for n in (EPISODE, *names) if n not in table.schema.names]
            if missing or table.rows > MAX_EPISODES:
                got = f"no {missing[0]!r}" if missing else f"{table.rows} rows"
                raise FormatError(
                    f"{path} must say in at most {MAX_EPISODES} rows where episodes "
                    f"are, got {got}. {_way_out(*missing[:1])}"
                )
            wanted = [EPISODE, *names]
            wanted += [name for name in optional if name in table.schema.names]
            for name, values in _values(table, wanted):
                in_data.setdefault(name, []).append(values)
    columns = {name: np.concatenate(parts) for name, parts in in_data.items()}
    numbers = columns.setdefault(EPISODE, np.zeros(0))
    unique, counts = np.unique(numbers, return_counts=True)
    if len(unique) < len(numbers):
        raise FormatError(
            f"{folder / EPISODES} has episode {unique[counts > 1][0]:g} twice. {AGAIN}"
        )
    return {name: values for name, values in columns.items() if len(values) == len(numbers)}


def _values(table: ParquetFile, names: Sequence[str]) -> Iterator[tuple[str, NDArray[np.float64]]]:
    for name in names:
        kind = table.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise FormatError(
                f"{table.path}: column {name!r} must hold numbers, got {kind}. {_way_out(name)}"
            )
    first = 0
    for batch in table.batches(BATCH_ROWS, names):
        for name, array in batch.items():
            if has_nulls(array):
                raise FormatError(
                    f"{table.path}: column {name!r} lacks a value in row "
                    f"{first + first_null(array)}. {_way_out(name)}"
                )
            values = array.to_numpy(zero_copy_only=False).astype(np.float64)
            odd = np.flatnonzero(~np.isfinite(values) | (np.trunc(values) != values))
            if len(odd) and name.rpartition("/")[2] in INTEGERS:
                raise FormatError(
                    f"{table.path}: column {name!r} must hold whole numbers, got "
                    f"{values[odd[0]]:g} in row {first + odd[0]}. {_way_out(name)}"
                )
            yield name, values
        first += len(values)


def read_statistics(files: Sequence[Path], camera: str) -> dict[int, Statistics]:
    """Return the statistics of a camera that ``meta/episodes`` has, by episode.

    None at all where a table lacks them. Those of episodes whose values are not of the
    usual shape are left out.
    """
    found: dict[int, Statistics] = {}
    wanted = [EPISODE, *(f"stats/{camera}/{key}" for key in KEYS)]
    for path in files:
        with closing(ParquetFile(path)) as table:
            if not set(wanted) <= set(table.schema.names):
                return {}
            for batch in table.batches(BATCH_ROWS, wanted):
                rows = zip(*(batch[name].to_pylist() for name in wanted), strict=True)
                for episode, *values in rows:
                    if (usual := _usual(values)) is not None:
                        found[int(episode)] = usual
    return found


def _usual(values: Sequence[object]) -> Statistics | None:
    """Statistics, in the order of `KEYS`, as arrays; None of another shape."""
    try:
        every = {k: np.array(v, np.float64) for k, v in zip(KEYS, values, strict=True)}
    except (TypeError, ValueError):
        return None
    count = every.pop("count")
    if count.shape != (1,) or {each.shape for each in every.values()} != {(3, 1, 1)}:
        return None
    return {**every, "count": count.astype(np.int64)}


def _way_out(name: str = "") -> str:
    """Return the advice about a column; of episodes it is read in any case."""
    return WAY_OUT if name.startswith("videos/") else AGAIN

"""Steps written as a LeRobot v3 dataset, which `LeRobotDataset` opens.

A dataset is made of *units*: unit k is data file k, episodes file k and video file k of
each camera, and all of them hold the same episodes. `UnitWriter` writes one, from any
number of a file, an episode and a row on, and `write_meta` the few files that describe
all units. An append writes one more unit, and those files again.
Packets of videos that are there can be copied (`lerobot_video.VideoFile.copying`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Notes, Writer, in_order, refuse_empty
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Bools, NamedEnds
from mmreplay.convert.parquet import Compression, ParquetFileWriter, encode_field
from mmreplay.convert.staging import Staging
from mmreplay.datasets import lerobot_record
from mmreplay.datasets.lerobot_frames import StoredFrames
from mmreplay.datasets.lerobot_layout import DONE, OWN_DTYPES, Feature, Layout, lay_out
from mmreplay.datasets.lerobot_stats import (
    LIMIT_NBYTES,
    QUANTILES,
    ImageStatistics,
    NumberStatistics,
    Statistics,
    as_json,
    merged,
)
from mmreplay.datasets.lerobot_video import (
    PIXELS,
    Codec,
    Packets,
    VideoFile,
    check_options,
    find_codec,
)
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.episodes import CUT, FINAL, START, TERMINATED, TRUNCATED
from mmreplay.errors import SourceError, undone_by
from mmreplay.ragged import Ragged
from mmreplay.schema.images import ImageEncoding
from mmreplay.strict_json import Json

WHAT = "LeRobot"
VERSION = "v3.0"
GROUP_NBYTES = 8 << 20
"""Of the rows, or episodes, that wait for others to be written with them."""
GROUP_EPISODES = 256
MAX_TASKS_NBYTES = 16 << 20
"""Of the texts of tasks, which every reader has in memory."""
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = f"meta/episodes/{DATA_PATH.removeprefix('data/')}"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES = "meta/episodes"
NO_NUMBERS = ("video", "image", "string")
"""Dtypes of features whose statistics are not those of numbers."""
INFO, TASKS, STATS = "meta/info.json", "meta/tasks.parquet", "meta/stats.json"


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    fps: float | None = None,
    task: str | None = None,
    video: bool | str | None = None,
    codec: str | None = None,
    crf: int | None = None,
    gop: int | None = None,
    robot_type: str | None = None,
) -> LerobotWriter:
    """Make a dataset as a target.

    Args:
        target: Its folder.
        description: What will come.
        overwrite: As for every target.
        fps: Steps in a second; by default as the user metadata of the source says it.
        task: Text of the task of all steps, where no field says it.
        video: Whether images become video, or the names of those that do with commas
            between them; all by default.
        codec: ``"h264"`` by default, or ``"av1"``.
        crf: Quality of videos, lower is better: 23 by default, 30 of AV1.
        gop: Frames from one complete frame to the next, 2 by default.
        robot_type: The name of the robot, as info.json has it.
    """
    layout = lay_out(description, fps=fps, task=task, video=video, robot_type=robot_type)
    encoding = checked_codec(layout, codec, crf, gop)
    copies = (codec, crf, gop) == (None, None, None)
    return LerobotWriter(target, description, layout, encoding, overwrite=overwrite, copies=copies)


def planned(description: Description, **options: Any) -> None:
    """Refuse data that cannot be written; see `registry.planned`."""
    refuse_empty(description.rows, WHAT)
    laid_out(description, **options)


def laid_out(
    description: Description,
    *,
    codec: object = None,
    crf: object = None,
    gop: object = None,
    **options: object,
) -> tuple[Layout, Codec | None]:
    """What becomes of fields, and how videos are encoded; see `open_writer`."""
    layout = lay_out(description, **options)
    return layout, checked_codec(layout, codec, crf, gop)


def checked_codec(layout: Layout, codec: object, crf: object, gop: object) -> Codec | None:
    """How videos are encoded; None where none is written."""
    if layout.cameras:
        return find_codec(codec, crf, gop)
    check_options(codec, crf, gop)
    return None


def owns(folder: Path) -> bool:
    """Return whether a folder holds a dataset written here, and nothing else."""
    names = {each.name for each in folder.iterdir()}
    return names <= {"data", "meta", "videos"} and (folder / lerobot_record.RECORD).is_file()


@dataclass(frozen=True, slots=True)
class Sizes:
    """When a file is full, and how many files a folder holds.

    Attributes:
        data_mb: Of a data file, after which the next unit begins, in 1e6 bytes.
        video_mb: Of a video file, likewise.
        chunk_files: Files of a chunk.
    """

    data_mb: float = 100
    video_mb: float = 200
    chunk_files: int = 1000

    def location(self, number: int) -> tuple[int, int]:
        """Chunk and index of file ``number``."""
        return divmod(number, self.chunk_files)

    def path(self, template: str, number: int, camera: str = "") -> str:
        """Path of file ``number`` in the dataset."""
        chunk, index = self.location(number)
        return template.format(chunk_index=chunk, file_index=index, video_key=camera)


class TaskNumbers:
    """Numbers of the texts of tasks, in the order in which they first came.

    Attributes:
        numbers: The number of each text.
    """

    def __init__(self, texts: Mapping[str, int] | None = None) -> None:
        """Begin with those that a dataset has already."""
        self.numbers = dict(texts or {})
        self._nbytes = sum(len(text.encode()) for text in self.numbers)

    def number(self, texts: list[str]) -> NDArray[np.int64]:
        """The number of each text, int64 ``[N]``.

        Raises:
            SourceError: All texts together take too much memory.
        """
        for text in texts:
            if text not in self.numbers:
                self.numbers[text] = len(self.numbers)
                self._nbytes += len(text.encode())
        if self._nbytes > MAX_TASKS_NBYTES:
            raise SourceError(
                f"the texts of {len(self.numbers):,} tasks take more than {MAX_TASKS_NBYTES} "
                "bytes, and LeRobot has all of them in memory. Leave the field out with drop= "
                "(--drop), or convert to parquet."
            )
        return np.array([self.numbers[text] for text in texts], np.int64)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit that was written.

    Attributes:
        number: Of its files.
        episodes: How many it holds.
        rows: Steps of them.
        fullness: The size of its largest data or video file, as a share of the size at
            which such a file is full: at least 1 of a full unit.
        statistics: Of its steps, by feature.
        copied: Codec and format of pixels of the cameras whose packets were copied.
    """

    number: int
    episodes: int
    rows: int
    fullness: float
    statistics: dict[str, Statistics] = field(default_factory=dict, repr=False)
    copied: dict[str, tuple[str, str]] = field(default_factory=dict)


class UnitWriter:
    """Writes the files of one unit, episode after episode.

    The files appear in a folder that nobody reads yet, under their final names, and are
    complete after `close`. Nothing is synced: the caller syncs the folder. Memory: the
    rows of a call, those of a row group, and the numbers of the episode up to a limit.

    Attributes:
        episodes: Episodes that ended.
        rows: Steps so far, those of the open episode included.
        encoded: Cameras whose frames were encoded, and whether some were video before.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        codec: Codec | None,
        tasks: TaskNumbers,
        *,
        number: int = 0,
        first_episode: int = 0,
        first_row: int = 0,
        sizes: Sizes = Sizes(),
        copies: bool = True,
    ) -> None:
        """Begin a unit.

        Args:
            folder: Of the dataset that is written.
            layout: Of all its units.
            codec: How videos are encoded; None without cameras.
            tasks: Of all units; texts that are new get the next numbers.
            number: Of the unit's files, which must not exist.
            first_episode: ``episode_index`` of its first episode.
            first_row: ``index`` of its first step.
            sizes: Of the dataset.
            copies: Copy packets of frames that are `StoredFrames`, where that can be.
        """
        self.encoded: dict[str, bool] = {}
        self._copies = copies
        self.episodes = self.rows = 0
        self._folder, self._layout, self._tasks = folder, layout, tasks
        self._number, self._sizes, self._codec = number, sizes, codec
        self._first_episode, self._first_row = first_episode, first_row
        self._total: dict[str, Statistics] = {}
        self._videos: dict[str, VideoFile] = {}
        self._data = self._table = None
        numbers = [n for n, each in layout.features.items() if each.dtype not in NO_NUMBERS]
        self._limit_nbytes = LIMIT_NBYTES // (len(numbers) + len(OWN_DTYPES))
        self._data_schema = pa.schema(
            [
                *((n, _arrow_type(f)) for n, f in layout.features.items() if f.dtype != "video"),
                *((name, pa.from_numpy_dtype(np.dtype(own))) for name, own in OWN_DTYPES.items()),
            ]
        )
        self._batches: list[Any] = []
        self._batches_nbytes = 0
        self._table_rows: list[dict[str, object]] = []
        self._begin_episode()
        with undone_by(self.abandon):
            self._data = self._parquet(DATA_PATH, self._data_schema)
            self._table = self._parquet(EPISODES_PATH, _table_schema(layout))

    def _parquet(self, template: str, schema: Any) -> ParquetFileWriter:
        path = self._made(template)
        return ParquetFileWriter(File.create(path, 0), schema, Compression("snappy"), 1 << 10)

    def _made(self, template: str, camera: str = "") -> Path:
        """The path of a file of this unit, in a folder that exists."""
        path = self._folder / self._sizes.path(template, self._number, camera)
        return files.make_staged(path)

    def _begin_episode(self) -> None:
        self._steps = 0
        self._last: tuple[Any, NDArray[np.int64], Bools, Bools] | None = None
        self._texts: dict[str, None] = {}
        self._numbers: dict[str, NumberStatistics] = {}
        self._images: dict[str, ImageStatistics] = {}
        self._copied: dict[str, StoredFrames] = {}
        for name, each in self._layout.features.items():
            if each.is_camera:
                self._images[name] = ImageStatistics()
            elif each.dtype != "string":
                self._numbers[name] = NumberStatistics(each.size, self._limit_nbytes)
        for name in OWN_DTYPES:
            self._numbers[name] = NumberStatistics(1, self._limit_nbytes)

    def add(self, columns: Mapping[str, Any], terminated: Bools, truncated: Bools) -> None:
        """Add steps to the open episode.

        Args:
            columns: ``[N, *shape]`` by path of each field of the layout, as in a
                `Block`; the arrays may change after this call.
            terminated: bool ``[N]``.
            truncated: bool ``[N]``.

        Raises:
            SourceError: The format cannot hold a value.
        """
        if not len(terminated):
            return
        self._film(columns)
        arrays = []
        for name, each in self._layout.features.items():
            if each.dtype != "video":
                arrays.append(self._encoded(name, each, columns[each.path]))
        stored = [n for n in self._data_schema.names if n not in OWN_DTYPES]
        batch = pa.RecordBatch.from_arrays(arrays, names=stored) if stored else None
        if self._layout.task_path:
            texts = columns[self._layout.task_path].text()
        else:
            texts = [self._layout.task] * len(terminated)
        self._texts |= dict.fromkeys(texts)
        numbers = self._tasks.number(texts)
        if self._last is not None:
            self._push(*self._last)
        # The row after the last one may say that it was truncated.
        count = len(terminated) - 1
        rows = [
            (None if batch is None else batch.slice(low, high - low), numbers[low:high])
            for low, high in ((0, count), (count, count + 1))
        ]
        self._push(*rows[0], terminated[:-1], truncated[:-1])
        self._last = (*rows[1], terminated[-1:].copy(), truncated[-1:].copy())

    def fits(self, columns: Mapping[str, Any]) -> bool:
        """Return whether an episode that begins with these steps can be in this unit.

        A video file holds packets of one kind: those of another dataset may need the
        files of another unit.
        """
        found = {name: self._packets(name, columns) for name in self._videos}
        return all(
            (None if packets is None else packets.parameters) == self._videos[name].parameters
            for name, packets in found.items()
        )

    def _packets(self, name: str, columns: Mapping[str, Any]) -> Packets | None:
        """The packets of a camera's frames, if they are to be copied."""
        column = columns[self._layout.features[name].path]
        if not self._copies or not isinstance(column, StoredFrames):
            return None
        return column.packets(float(self._layout.fps))

    def _film(self, columns: Mapping[str, Any]) -> None:
        """Note the frames of steps that are copied, and encode the others.

        Those of several cameras are encoded at a time.
        """
        encoded = []
        for name in self._layout.cameras:
            column = columns[self._layout.features[name].path]
            packets = self._packets(name, columns) if self._last is None else None
            if name not in self._videos:
                self._videos[name] = self._new_video(name, column, packets)
            if packets is not None:
                self._copied[name] = column
            elif name not in self._copied:
                encoded.append(name)
            elif isinstance(column, StoredFrames) and self._copied[name].precedes(column):
                self._copied[name] = StoredFrames.concatenate([self._copied[name], column])
            else:
                raise SourceError(
                    f"frames of {self._layout.features[name].path!r} are left out within an "
                    "episode of a video. Pass from.video=decode to encode them again."
                )

        def encode(name: str) -> None:
            column = columns[self._layout.features[name].path]
            self.encoded[name] = isinstance(column, StoredFrames) or self.encoded.get(name, False)
            frames = self._layout.features[name].frames(column)
            if self._last is None:
                self._videos[name].begin_episode()
            self._videos[name].add(frames)
            self._images[name].add(frames)

        # All end before this call does, as the arrays may change afterwards.
        for _ in in_order(encode, encoded) if encoded else ():
            pass

    def _new_video(self, name: str, column: Any, packets: Packets | None) -> VideoFile:
        """Begin the video of a camera, with packets or frames to come."""
        path, fps = self._made(VIDEO_PATH, name), self._layout.fps
        if packets is not None:
            with column.camera.named():
                return VideoFile.copying(path, fps, packets)
        assert self._codec is not None
        height, width, _ = self._layout.features[name].shape
        return VideoFile(path, fps, self._codec, height, width)

    def _encoded(self, name: str, feature: Feature, column: Any) -> Any:
        """A column as Arrow stores it, counted in the statistics."""
        if feature.dtype == "string":
            assert isinstance(column, Ragged)
            return encode_field(column, feature.field)
        if feature.dtype == "image":
            frames = feature.frames(column)
            self._images[name].add(frames)
            # Files stay as they are: nothing is lost a second time.
            is_file = isinstance(column, Ragged)
            height, width, channels = feature.shape
            png = ImageEncoding((height, width, channels), "png", None, None)
            encoded = map(bytes, column) if is_file else in_order(png.encode, frames)
            packed = [{"bytes": data, "path": None} for data in encoded]
            return pa.array(packed, IMAGE)
        try:
            numbers = feature.numbers(column)
        except OverflowError as error:
            raise SourceError(
                f"field {feature.path!r} has the value {error}, and LeRobot's items hold integers "
                "up to 2**63 - 1. Leave it out with drop= (--drop), or convert to parquet."
            ) from error
        self._numbers[name].add(numbers)
        flat = pa.array(np.ascontiguousarray(numbers).reshape(-1))
        return flat if feature.size == 1 else pa.FixedSizeListArray.from_arrays(flat, feature.size)

    def _push(
        self, batch: Any, tasks: NDArray[np.int64], terminated: Bools, truncated: Bools
    ) -> None:
        """Add rows with the columns that the writer makes itself."""
        count = len(tasks)
        frames = np.arange(self._steps, self._steps + count)
        own: dict[str, NDArray[Any]] = {
            DONE: terminated | truncated,
            "next.terminated": terminated,
            "next.truncated": truncated,
            "timestamp": (frames / float(self._layout.fps)).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(count, self._first_episode + self.episodes),
            "index": np.arange(count) + self._first_row + self.rows,
            "task_index": tasks,
        }
        arrays = [] if batch is None else list(batch.columns)
        for name, column in own.items():
            self._numbers[name].add(column[:, None])
            arrays.append(pa.array(column))
        self._steps += count
        self.rows += count
        if count:
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self._data_schema))
            self._batches_nbytes += self._batches[-1].nbytes
        if self._batches_nbytes > GROUP_NBYTES:
            self._flush_rows()

    def _flush_rows(self) -> None:
        batches, self._batches, self._batches_nbytes = self._batches, [], 0
        if batches:
            assert self._data is not None
            self._data.write(batches)

    def end_episode(self, *, truncated: bool = False) -> None:
        """End the open episode; without a step there is none.

        Args:
            truncated: Its last step is, as the row after it says.
        """
        if self._last is None:
            return
        batch, tasks, over, cut = self._last
        copied = {}
        for name, frames in self._copied.items():
            packets = frames.packets(float(self._layout.fps))
            if packets is None:
                raise SourceError(
                    f"frames of {name!r} lack packets in {frames.camera.episodes.paths[0].parent}. "
                    "Pass from.video=decode to encode them again."
                )
            with frames.camera.named():
                self._videos[name].copy(packets)
            copied[name] = frames.statistics()
            del self._images[name]
        self._push(batch, tasks, over, cut | (truncated and not over[0]))
        number, steps = self._first_episode + self.episodes, self._steps
        chunk, index = self._sizes.location(self._number)
        stop = self._first_row + self.rows
        row: dict[str, object] = {
            "episode_index": number,
            "tasks": list(self._texts),
            "length": steps,
            "dataset_from_index": stop - steps,
            "dataset_to_index": stop,
        }
        for where in ("data", *(f"videos/{name}" for name in self._layout.cameras), EPISODES):
            row |= {f"{where}/chunk_index": chunk, f"{where}/file_index": index}
        for name in self._layout.cameras:
            count, fps = self._videos[name].frames, self._layout.fps
            row[f"videos/{name}/from_timestamp"] = float((count - steps) / fps)
            row[f"videos/{name}/to_timestamp"] = float(count / fps)
        found = {name: each.result() for name, each in (self._numbers | self._images).items()}
        for name, statistics in {**found, **copied}.items():
            before = self._total.get(name)
            self._total[name] = statistics if before is None else merged(before, statistics)
            row |= {f"stats/{name}/{key}": each for key, each in as_json(statistics).items()}
        self._table_rows.append(row)
        if len(self._table_rows) == GROUP_EPISODES:
            self._flush_episodes()
        self.episodes += 1
        self._begin_episode()

    def _flush_episodes(self) -> None:
        rows, self._table_rows = self._table_rows, []
        if rows:
            assert self._table is not None
            schema = _table_schema(self._layout)
            self._table.write([pa.RecordBatch.from_pylist(rows, schema)])

    @property
    def fullness(self) -> float:
        """See `Unit`; of what reached the files so far."""
        stored = 0 if self._data is None else self._data.nbytes
        shares = [(stored + self._batches_nbytes) / self._sizes.data_mb]
        shares += [each.nbytes / self._sizes.video_mb for each in self._videos.values()]
        return float(max(shares)) / 1e6

    def close(self) -> Unit:
        """End the open episode, and complete the files."""
        self.end_episode()
        with undone_by(self.abandon):
            self._flush_rows()
            self._flush_episodes()
            for each in self._videos.values():
                each.close()
            assert self._data is not None
            assert self._table is not None
            described = {"info": {"features": _huggingface(self._layout)}}
            self._data.close({"huggingface": json.dumps(described)})
            self._table.close({})
            sizes = [self._data.nbytes / self._sizes.data_mb]
            sizes += [each.nbytes / self._sizes.video_mb for each in self._videos.values()]
            self._data = self._table = None
        videos = {
            name: (str(each.parameters[0]), str(each.parameters[1]))
            for name, each in self._videos.items()
            if each.parameters is not None
        }
        full = max(sizes) / 1e6
        return Unit(self._number, self.episodes, self.rows, full, self._total, videos)

    def abandon(self) -> None:
        """Close the files as they are."""
        for video in self._videos.values():
            video.abandon()
        for file in (self._data, self._table):
            if file is not None:
                file.close(None)
        self._data = self._table = None


def write_meta(
    folder: Path,
    layout: Layout,
    codec: Codec | None,
    tasks: TaskNumbers,
    *,
    episodes: int,
    rows: int,
    statistics: Mapping[str, Statistics],
    copied: Mapping[str, tuple[str, str]] | None = None,
    sizes: Sizes = Sizes(),
) -> None:
    """Write the files that describe all units, but for the record; nothing is synced.

    Args:
        folder: Of the dataset, with its units.
        layout: Of its units.
        codec: How their videos are encoded; None without cameras.
        tasks: All tasks.
        episodes: Of all units.
        rows: Steps of all units.
        statistics: Of all units together, by feature; see `merged`.
        copied: Codec and format of pixels of cameras that were copied; see `Unit`.
        sizes: Of the dataset.
    """
    info: Json = {
        "codebase_version": VERSION,
        "robot_type": layout.robot_type,
        "total_episodes": episodes,
        "total_frames": rows,
        "total_tasks": len(tasks.numbers),
        "chunks_size": sizes.chunk_files,
        "data_files_size_in_mb": sizes.data_mb,
        "video_files_size_in_mb": sizes.video_mb,
        "fps": frame_rate(layout),
        "splits": {"train": f"0:{episodes}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if layout.cameras else None,
        "features": features_json(layout, codec, copied or {}),
    }
    stats = {name: as_json(each) for name, each in statistics.items()}
    for name, value in ((INFO, info), (STATS, stats)):
        data = json.dumps(value, allow_nan=False, indent=1).encode()
        files.make_staged(folder / name, data)
    files.make_staged(folder / TASKS, _tasks_table(tasks))


def _tasks_table(tasks: TaskNumbers) -> bytes:
    """The table of tasks; LeRobot reads the texts as pandas' index."""
    columns = [
        {
            "name": name,
            "field_name": name,
            "pandas_type": kind,
            "numpy_type": dtype,
            "metadata": None,
        }
        for name, kind, dtype in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    about = {"index_columns": ["task"], "column_indexes": [], "columns": columns}
    schema = pa.schema(
        [("task_index", pa.int64()), ("task", pa.string())],
        metadata={"pandas": json.dumps(about | {"pandas_version": "2.0.0"})},
    )
    arrays = [pa.array([*tasks.numbers.values()], pa.int64()), pa.array([*tasks.numbers], "string")]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), sink)
    return sink.getvalue()


def frame_rate(layout: Layout) -> int | float:
    """Frames a second, as a whole number where it is one."""
    return int(layout.fps) if layout.fps.denominator == 1 else float(layout.fps)


def features_json(
    layout: Layout, codec: Codec | None, copied: Mapping[str, tuple[str, str]]
) -> Json:
    """The features of info.json."""
    found: Json = {}
    for name, each in layout.features.items():
        found[name] = {"dtype": each.dtype, "shape": list(each.shape), "names": each.names}
        if each.dtype == "video" and codec is not None:
            height, width, channels = each.shape
            coded, pixels = copied.get(name, (codec.name, PIXELS))
            found[name]["info"] = {
                "video.height": height,
                "video.width": width,
                "video.codec": coded,
                "video.pix_fmt": pixels,
                "video.is_depth_map": False,
                "video.fps": frame_rate(layout),
                "video.channels": channels,
                "has_audio": False,
            }
    for name, dtype in OWN_DTYPES.items():
        found[name] = {"dtype": dtype, "shape": [1], "names": None}
    return found


def _huggingface(layout: Layout) -> Json:
    """The features as Hugging Face's library reads them from the footer of a table."""
    found: Json = {}
    for name, each in layout.features.items():
        value = {"dtype": each.dtype, "_type": "Value"}
        if each.dtype == "image":
            found[name] = {"_type": "Image"}
        elif each.dtype != "video":
            several = {"feature": value, "length": each.size, "_type": "List"}
            found[name] = value if each.size == 1 else several
    return found | {name: {"dtype": own, "_type": "Value"} for name, own in OWN_DTYPES.items()}


def _arrow_type(feature: Feature) -> Any:
    """The type of a feature's column in the data files."""
    if feature.dtype == "image":
        return IMAGE
    if feature.dtype == "string":
        return pa.string()
    number = pa.from_numpy_dtype(np.dtype(feature.dtype))
    return number if feature.size == 1 else pa.list_(number, feature.size)


def _table_schema(layout: Layout) -> Any:
    """The columns of the table of episodes."""
    whole, real = pa.int64(), pa.float64()
    columns: list[tuple[str, Any]] = [("episode_index", whole), ("tasks", pa.list_(pa.string()))]
    columns += [("length", whole), ("data/chunk_index", whole), ("data/file_index", whole)]
    columns += [("dataset_from_index", whole), ("dataset_to_index", whole)]
    for name in layout.cameras:
        columns += [(f"videos/{name}/{end}", whole) for end in ("chunk_index", "file_index")]
        columns += [(f"videos/{name}/{end}", real) for end in ("from_timestamp", "to_timestamp")]
    names = {**dict.fromkeys(layout.features), **dict.fromkeys(OWN_DTYPES)}
    for name in names:
        each = layout.features.get(name)
        if each is not None and each.dtype == "string":
            continue
        kind = pa.list_(real)
        if each is not None and each.is_camera:
            kind = pa.list_(pa.list_(kind))
        columns += [(f"stats/{name}/{key}", kind) for key in ("min", "max", "mean", "std")]
        columns.append((f"stats/{name}/count", pa.list_(whole)))
        columns += [(f"stats/{name}/{key}", kind) for key in QUANTILES]
    columns += [(f"{EPISODES}/chunk_index", whole), (f"{EPISODES}/file_index", whole)]
    return pa.schema(columns)


class UnitsWriter:
    """Writes blocks of rows, one environment after another, as units in a folder.

    Attributes:
        notes: What the dataset leaves out.
        units: Those that are complete.
        unended: Episodes so far without an end.
    """

    def __init__(
        self,
        folder: Path,
        description: Description,
        layout: Layout,
        codec: Codec | None,
        tasks: TaskNumbers,
        *,
        number: int = 0,
        first_episode: int = 0,
        first_row: int = 0,
        sizes: Sizes = Sizes(),
        copies: bool = True,
    ) -> None:
        """Begin with the first unit; see `UnitWriter`."""
        self.notes, self.units, self.unended = Notes(), list[Unit](), 0
        self._folder, self._layout, self._codec = folder, layout, codec
        self._tasks, self._sizes, self._copies = tasks, sizes, copies
        self._number, self._episodes, self._rows = number, first_episode, first_row
        self._left = description.rows
        self._ends = NamedEnds(description)
        self._ends.add_notes(self.notes, both=False)
        self._env_id = -1
        self._over = self._begins = True
        self._unit: UnitWriter | None = None

    def write(self, block: Block) -> None:
        """Write the next rows; the block's arrays may change after this call."""
        block = self._ends.marked(block)
        flags, env_ids = block.flags, block.env_ids
        final = (flags & FINAL) != 0
        if final.any():
            self.notes.doubt(
                "LeRobot has no observation after the last step: those of the source were left out"
            )
        changes = np.diff(env_ids, prepend=self._env_id) != 0
        begins = changes | ((flags & START) != 0)
        edges = np.union1d(np.flatnonzero(begins), (0, len(block))).tolist()
        for first, stop in pairwise(edges):
            if begins[first]:
                self._end_episode(truncated=not changes[first] and bool(flags[first] & CUT))
            steps = block.rows(first, stop).select(~final[first:stop])
            if len(steps):
                ends = [(steps.flags & end) != 0 for end in (TERMINATED, TRUNCATED)]
                if self._unit is not None and self._begins and not self._unit.fits(steps.columns):
                    self._end_unit()
                self._begins = False
                self._opened().add(steps.columns, ends[0], ends[1])
                self._note_encoded(self._opened())
                self._over = bool(ends[0][-1] or ends[1][-1])
        if len(block):
            self._env_id = int(env_ids[-1])
        self._left -= len(block)
        if not self._left:
            # Now, so that what is lost is known before anything appears.
            self._end_episode()

    def _note_encoded(self, unit: UnitWriter) -> None:
        """Doubt frames that are not those of the source to the bit."""
        for name, was_video in unit.encoded.items():
            path = self._layout.features[name].path
            if was_video:
                self.notes.doubt(
                    f"frames of {path!r} were encoded again, as they could not be copied: the "
                    "options or fps are others, or an episode begins between complete frames"
                )
            else:
                self.notes.doubt(
                    f"{path!r} became video, which is lossy: pass video=false to store images"
                )

    def _opened(self) -> UnitWriter:
        """The open unit."""
        if self._unit is None:
            self._unit = UnitWriter(
                self._folder,
                self._layout,
                self._codec,
                self._tasks,
                number=self._number,
                first_episode=self._episodes,
                first_row=self._rows,
                sizes=self._sizes,
                copies=self._copies,
            )
        return self._unit

    def _end_episode(self, *, truncated: bool = False) -> None:
        """End the open episode, and its unit where that is full."""
        if self._unit is None:
            return
        before = self._unit.episodes
        self._begins = True
        self._unit.end_episode(truncated=truncated)
        if self._unit.episodes > before:
            self.unended += not (self._over or truncated)
            if self._unit.fullness >= 1:
                self._end_unit()

    def _end_unit(self) -> None:
        assert self._unit is not None
        # Still the writer's own until it is complete: `abandon` closes its files.
        done = self._unit.close()
        self._unit = None
        self._number += 1
        self._episodes += done.episodes
        self._rows += done.rows
        self.units.append(done)

    def close(self) -> list[Unit]:
        """End the open episode and unit, and return all units."""
        self._end_episode()
        if self._unit is not None:
            self._end_unit()
        return self.units

    def abandon(self) -> None:
        """Close the files as they are."""
        unit, self._unit = self._unit, None
        if unit is not None:
            with suppress(OSError):
                unit.abandon()


def statistics_of(
    units: Sequence[Unit], before: Mapping[str, Statistics] | None = None
) -> dict[str, Statistics]:
    """Statistics of units together, and of what was there before, by feature."""
    total = dict(before or {})
    for unit in units:
        for name, each in unit.statistics.items():
            total[name] = merged(total[name], each) if name in total else each
    return total


class LerobotWriter(Writer):
    """Writes episodes, one environment after another, as units in a staged folder."""

    env_by_env = True

    def __init__(
        self,
        target: Path,
        description: Description,
        layout: Layout,
        codec: Codec | None,
        *,
        overwrite: bool,
        sizes: Sizes = Sizes(),
        copies: bool = True,
    ) -> None:
        """Make the folder; see `open_writer`, and `UnitWriter` for the last two."""
        self.nbytes = 0
        self._description, self._layout = description, layout
        self._codec, self._sizes, self._tasks = codec, sizes, TaskNumbers()
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        self._units = UnitsWriter(
            self._staging.path, description, layout, codec, self._tasks, sizes=sizes, copies=copies
        )
        self.notes = self._units.notes
        for note in layout.notes:
            self.notes.note(note)
        for doubt in layout.doubts:
            self.notes.doubt(doubt)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        self._units.write(block)

    def finish(self) -> None:
        """See `Writer.finish`."""
        units = self._units.close()
        refuse_empty(sum(unit.rows for unit in units), WHAT)
        if self._units.unended:
            self.notes.note(
                f"{self._units.unended:,} episodes were cut off without an end: their last step "
                "ends nothing"
            )
        write_meta(
            self._staging.path,
            self._layout,
            self._codec,
            self._tasks,
            episodes=sum(unit.episodes for unit in units),
            rows=sum(unit.rows for unit in units),
            statistics=statistics_of(units),
            copied={name: each for unit in units for name, each in unit.copied.items()},
            sizes=self._sizes,
        )
        record = lerobot_record.to_bytes(self._description, self._layout)
        files.make_staged(self._staging.path / lerobot_record.RECORD, record)
        self.nbytes = self._staging.publish()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._units.abandon()
        self._staging.abort()

"""What each field becomes in a LeRobot dataset: name, dtype and shape, or an error."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, TypeGuard

import numpy as np

from mmreplay.convert.description import Description
from mmreplay.datasets.common.rows import Array, is_scalar
from mmreplay.errors import SchemaError, SourceError, shown
from mmreplay.nesting import under
from mmreplay.ragged import Ragged
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import from_bfloat16_bits
from mmreplay.strict_json import Json

ENDS = ("terminated", "truncated")
DONE = "next.done"
OWN_DTYPES = {
    DONE: "bool",
    "next.terminated": "bool",
    "next.truncated": "bool",
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns that the writer makes itself."""
WIDER = {"float16": "float32", "bfloat16": "float32"}
"""Dtypes that a file has no name for, or other tools do not read."""
MAX_NUMBERS_NBYTES = 64 << 10
"""Of a row of numbers that are no image."""
MAX_NAMED = 1024
"""Numbers of a row whose places are named."""
MAX_NAME_NBYTES = 200
"""Of a feature, since cameras are folders of that name."""
LEAST_SIDE = 4
"""An image with its channels first has sides above it; others have them last."""
MIN_FPS, MAX_FPS = 0.001, 100_000


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of info.json that holds a field.

    Attributes:
        path: The field's.
        field: The field.
        dtype: ``"video"``, ``"image"``, ``"string"`` or the dtype of its numbers.
        shape: As info.json gives it.
        names: Names of its components or axes, JSON.
        channels_first: An image's first axis is that of its channels.
        stored: The field of images, where columns have their files in place of arrays.
    """

    path: str
    field: Field
    dtype: str
    shape: tuple[int, ...]
    names: object = None
    channels_first: bool = False
    stored: Field | None = None

    @property
    def is_camera(self) -> bool:
        """Whether it holds images."""
        return self.dtype in ("video", "image")

    @property
    def size(self) -> int:
        """Numbers of a row, or one text."""
        return 1 if self.field.varies else math.prod(self.field.shape)

    def frames(self, column: Any) -> Array:
        """Images ``[N, *shape]`` of the field as the feature's, ``[N, H, W, C]``.

        Raises:
            SourceError: A file of an image is damaged.
        """
        if self.stored is not None and isinstance(column, Ragged):
            column, damage = self.stored.rules.decode(self.stored, column, None)
            for what in damage.values():
                raise SourceError(
                    f"field {self.path!r} has a damaged image ({what}). Repair the source first."
                )
        column = np.asarray(column)
        if self.channels_first:
            column = np.moveaxis(column, 1, -1)
        if column.shape[-1] != self.shape[-1]:
            # A video has three channels in any case.
            column = np.broadcast_to(column, (*column.shape[:-1], self.shape[-1]))
        return np.ascontiguousarray(column)

    def numbers(self, column: Array) -> Array:
        """Numbers of the field as the feature's, ``[N, size]``.

        Raises:
            OverflowError: A number is above 2**63 - 1.
        """
        if self.field.dtype == "bfloat16":
            column = from_bfloat16_bits(column)
        rows = column.reshape(len(column), self.size)
        if rows.dtype == np.uint64 and len(rows) and rows.max() > np.iinfo(np.int64).max:
            raise OverflowError(str(rows.max()))
        return rows.astype(self.dtype, copy=False)


@dataclass(frozen=True, slots=True)
class Layout:
    """The features of a dataset, and what all its files share.

    Attributes:
        features: By name, in the order of the schema, without the writer's own.
        task_path: The field whose text is the task of each step, or ``""``.
        task: The text where there is no such field.
        fps: Frames a second.
        robot_type: As info.json says it.
        notes: What a reader of LeRobot sees otherwise.
        doubts: What is lost.
    """

    features: Mapping[str, Feature]
    task_path: str
    task: str
    fps: Fraction
    robot_type: str | None
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the features that are stored as video."""
        return tuple(name for name, each in self.features.items() if each.dtype == "video")


def lay_out(
    description: Description,
    *,
    fps: object = None,
    task: object = None,
    video: object = None,
    robot_type: object = None,
) -> Layout:
    """Decide what becomes of each field; see `lerobot_writer.open_writer`.

    Raises:
        SchemaError: The format cannot hold a field, two would get one name, or an
            option is not one.
    """
    schema = description.schema.drawn
    user = description.user.get("lerobot")
    imported: Json = user if isinstance(user, dict) else {}
    known = imported.get("features")
    stored_names = known if isinstance(known, dict) else {}
    task_path, text = _task(schema, task)
    derived = {schema.role(end): end for end in ENDS if is_scalar(_shape_of(schema, end))}
    features: dict[str, Feature] = {}
    notes: list[str] = []
    for path, each in schema.fields.items():
        if path == task_path or path in derived:
            continue
        stored = stored_names.get(path)
        stored = stored if isinstance(stored, dict) else {}
        name = _name(path, each, schema)
        if isinstance(stored.get("name"), str):
            name = stored["name"]
        if name in (*OWN_DTYPES, "task"):
            if imported:
                notes.append(f"field {path!r} was left out: {name!r} is numbered anew")
                continue
            raise SchemaError(
                f"field {path!r}: LeRobot has a column {name!r} of its own. Leave the field "
                "out with drop= (--drop), or rename it."
            )
        _check_name(path, name)
        if name in features:
            raise SchemaError(
                f"fields {features[name].path!r} and {path!r} would both be named {name!r} in "
                "LeRobot. Rename one of them, or leave it out with drop= (--drop)."
            )
        features[name] = _feature(path, each, stored.get("names"))
        if each is not description.schema.fields[path]:
            features[name] = replace(features[name], stored=description.schema.fields[path])
    if not features:
        raise SchemaError(
            f"no field is left to write, of {', '.join(schema.paths[:20])}. Select another one."
        )
    _choose_video(features, True if video is None else video)
    notes += _notes_on(features.values(), videos=video is not False)
    if task_path:
        notes.append(f"the text of {task_path!r} is the task of each step")
    elif task is None:
        notes.append("no field says what the task is, and its text is empty: pass task= for one")
    robot = imported.get("robot_type") if robot_type is None else robot_type
    if robot is not None and not isinstance(robot, str):
        raise SchemaError(f"robot_type must be a text, got {shown(robot)}. Pass such as 'so100'.")
    rate = _fps(fps, description.user, imported)
    doubts = _doubts(description)
    return Layout(features, task_path, text, rate, robot, notes, doubts)


def _notes_on(features: Collection[Feature], *, videos: bool) -> Iterator[str]:
    """What the user may not expect of features.

    Args:
        features: As they are stored.
        videos: The user did not turn video off.
    """
    stay = [each.path for each in features if each.stored is not None and each.dtype == "image"]
    if stay and videos:
        yield (
            f"files of {', '.join(map(repr, stay))} go into the set as they are. A set that "
            "is made with video= and the names of all images that become video has video of them"
        )
    wide = [each.path for each in features if each.dtype == "float64"]
    if wide:
        others = f", as {len(wide) - 1} others" if len(wide) > 1 else ""
        yield f"{wide[0]!r} is float64 in the files; LeRobot's items hold it as float32{others}"


def _shape_of(schema: Schema, end: str) -> tuple[int, ...]:
    path = schema.role(end)
    return schema.fields[path].shape if path else (0, 0)


def _task(schema: Schema, task: object) -> tuple[str, str]:
    """The field with the text of the task, and the text without one."""
    texts = [path for path, each in schema.fields.items() if each.kind == "text"]
    named = [path for path in texts if path == "task"]
    path = (named or (texts if len(texts) == 1 else [""]))[0]
    if task is None:
        return path, ""
    if not isinstance(task, str):
        raise SchemaError(f"task must be a text, got {shown(task)}. Pass such as 'push the cube'.")
    if path == "task":
        raise SchemaError(
            f"field {path!r} says what the task is, and task={shown(task)} too. Leave task= out, "
            "or the field with drop= (--drop)."
        )
    # Then the only text is a column like others.
    return "", task


def _name(path: str, column: Field, schema: Schema) -> str:
    """The name of a field in LeRobot."""
    if path == schema.role("reward"):
        return "next.reward"
    if path in (schema.role(end) for end in ENDS):
        # Of several agents, beside those of the episode.
        return f"agents.{path.replace('/', '.')}"
    following = schema.role("next_observation")
    if following is not None and under([path], following):
        # Beside the reward that follows a step; as the observation itself is named.
        beside = (schema.role("observation") or "observation") + path[len(following) :]
        return f"next.{_name(beside, column, schema)}"
    for role in ("observation", "action"):
        top = schema.role(role)
        if top is not None and under([path], top):
            path = role + path[len(top) :]
    top, slash, below = path.partition("/")
    if top == "observation" and (not slash or _image(column) is not None):
        if _image(column) is None:
            return "observation.state"
        below = below.removeprefix("images/") or "image"
        return f"observation.images.{below.replace('/', '.')}"
    return path.replace("/", ".")


def _image(column: Field) -> bool | None:
    """Whether the channels of an image come first; None if a field is no image."""
    if column.varies or column.dtype != "uint8" or len(column.shape) != 3:
        return None
    first, *sides = column.shape
    if first in (1, 3) and min(sides) > LEAST_SIDE:
        return True
    return False if column.shape[-1] in (1, 3) and min(column.shape) > 0 else None


def _check_name(path: str, name: str) -> None:
    nbytes = len(name.encode())
    if "/" in name or "\\" in name or name in (".", "..") or not 0 < nbytes <= MAX_NAME_NBYTES:
        raise SchemaError(
            f"field {path!r} would be named {name[:60]!r} in LeRobot, where a camera is a folder "
            f"of its name. Rename it to at most {MAX_NAME_NBYTES} bytes without slashes."
        )


def _feature(path: str, column: Field, names: object) -> Feature:
    """The feature of a field; images are stored as images so far.

    Raises:
        SchemaError: There is none.
    """
    drop = "Leave it out with drop= (--drop), or convert to parquet."
    if column.kind == "text":
        return Feature(path, column, "string", (1,))
    if column.varies:
        raise SchemaError(
            f"field {path!r} varies from step to step, which LeRobot does not store but for "
            f"text. {drop}"
        )
    if 0 in column.shape:
        raise SchemaError(f"field {path!r} of shape {list(column.shape)} holds no value. {drop}")
    first = _image(column)
    if first is not None:
        height, width, channels = (*column.shape[1:], column.shape[0]) if first else column.shape
        axes = ["height", "width", "channels"]
        return Feature(path, column, "image", (height, width, channels), axes, first)
    if column.nbytes > MAX_NUMBERS_NBYTES:
        raise SchemaError(
            f"field {path!r} takes {column.nbytes} bytes a step, and LeRobot keeps at most "
            f"{MAX_NUMBERS_NBYTES} of what is no image of 1 or 3 channels. {drop}"
        )
    size = math.prod(column.shape)
    fitting = isinstance(names, list) and len(names) == size
    if not fitting and not isinstance(names, dict):
        names = None
    if names is None and len(column.shape) > 1 and size <= MAX_NAMED:
        # Flat, as LeRobot's own tools break on more axes: the names say where it was.
        names = [",".join(map(str, place)) for place in np.ndindex(*column.shape)]
    return Feature(path, column, WIDER.get(column.dtype, column.dtype), (size,), names)


def _choose_video(features: dict[str, Feature], video: object) -> None:
    """Make videos of the images that are to be stored so.

    Raises:
        SchemaError: A name is no image, or the sides of one are odd.
    """
    cameras = {name: each for name, each in features.items() if each.dtype == "image"}
    for name in _named_cameras(cameras, video):
        each = cameras[name]
        height, width, _ = each.shape
        if height % 2 or width % 2:
            raise SchemaError(
                f"field {each.path!r} of {height} x {width} pixels cannot become video, whose "
                "sides must be even. Pass video=false, or the names of other images with video=."
            )
        features[name] = replace(each, dtype="video", shape=(height, width, 3))


def _named_cameras(cameras: dict[str, Feature], video: object) -> list[str]:
    """The names of the images that the option names."""
    if isinstance(video, bool):
        # What is a file already stays one, unless it is named.
        return [name for name, each in cameras.items() if each.stored is None and video]
    named = video.split(",") if isinstance(video, str) else video
    if not isinstance(named, list | tuple) or not all(isinstance(each, str) for each in named):
        raise SchemaError(
            f"video must be true, false or names of images, got {shown(video)}. Leave it out to "
            "store all images as video."
        )
    chosen = list[str]()
    for wanted in named:
        meant = [n for n, f in cameras.items() if wanted == n or under([f.path], wanted)]
        if not meant:
            raise SchemaError(
                f"video must name fields that are images, of {', '.join(cameras) or 'none'}, "
                f"got {shown(wanted)}. Pass true, false, or their names with commas."
            )
        chosen += meant
    return chosen


def _fps(fps: object, user_metadata: Json, imported: Json) -> Fraction:
    """The option, else what the user metadata say."""
    for given, where in (
        (fps, ""),
        (imported.get("fps"), "of user metadata 'lerobot' "),
        (user_metadata.get("fps"), "of the user metadata "),
    ):
        if given is None:
            continue
        if not is_rate(given):
            raise SchemaError(
                f"fps {where}must be from {MIN_FPS} to {MAX_FPS}, got {shown(given)}. Pass the "
                "frames that were recorded in a second, such as fps=30 (-o fps=30)."
            )
        if where and given % 1:
            raise SchemaError(
                f"fps {where}must be a whole number, as LeRobot's are, got {shown(given)}. Pass "
                f"fps= (-o fps=), such as fps={max(1, round(given))}."
            )
        return Fraction(given).limit_denominator(100_000)
    raise SchemaError(
        "LeRobot stores times, and nothing says how many steps were recorded in a second. Pass "
        "fps=, such as fps=30 (-o fps=30)."
    )


def is_rate(fps: object) -> TypeGuard[int | float]:
    """Whether a value is a number of frames a second that a dataset can have."""
    if not isinstance(fps, int | float) or isinstance(fps, bool):
        return False
    return MIN_FPS <= fps <= MAX_FPS


def _doubts(description: Description) -> list[str]:
    """What is lost by the format itself, whatever the rows."""
    doubts = []
    if description.priorities:
        doubts.append(
            f"priorities {description.priorities!r} were left out: LeRobot cannot store them"
        )
    filled = int((description.stop > description.first).sum())
    if filled > 1:
        doubts.append(
            f"LeRobot has no environments: the episodes of {filled} stand one environment after "
            "another"
        )
    if (description.first > 0).any():
        doubts.append("LeRobot has no positions: rows count from 0 on")
    return doubts

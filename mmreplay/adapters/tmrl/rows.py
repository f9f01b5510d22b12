"""The rows of tmrl's samples, and transitions made from rows.

A sample has an observation, the action before it, its reward and its ends. A row stores
all of them under the role of the observation, so that the buffer derives next actions
and rewards from the next row, too. The last row of an episode is stored as truncated
without a final observation and never begins a transition. The ends of the sample are
stored next to its reward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.common.values import PAD, array_of
from mmreplay.adapters.tmrl.nests import Arrays, built, crcs_of, leaves, mapped, structure
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import FormatError, SchemaError, refuse_masked
from mmreplay.schema import Field, Schema
from mmreplay.transforms.base import Transform
from mmreplay.transforms.stack import FrameStack

NOW, NEXT = "observation", "next_observation"
KEY = "tmrl"
Columns = dict[str, NDArray[Any]]


class Rows:
    """The layout of one memory.

    Attributes:
        transforms: Transforms that make histories; known with the structure.
        user: What the ring's metadata is to say.
        crc_debug: Whether rows have CRCs.
    """

    def __init__(
        self,
        imgs_obs: int | None,
        act_buf_len: int,
        imgs_shape: tuple[int, ...] | None,
        imgs_scale: float | None,
        crc_debug: bool,
    ) -> None:
        """Lay rows out; see `GenericTorchMemory`."""
        self._imgs_obs, self._act_buf_len = imgs_obs, act_buf_len
        self._imgs_shape, self._imgs_scale = imgs_shape, imgs_scale
        self.crc_debug = crc_debug
        self._obs: Any = None
        self._act: Any = None
        self._no_act: Any = None
        self._fields: dict[str, Field] = {}

    @property
    def user_metadata(self) -> dict[str, Any]:
        """The structure of observations and actions, as JSON."""
        return {KEY: {"obs": self._obs, "act": self._act, "crc": self.crc_debug}}

    def load(self, ring: ReplayBuffer) -> None:
        """Read the structure of a ring from its metadata.

        Raises:
            FormatError: No memory made it, or `crc_debug` differs.
        """
        stored = ring.metadata.user.get(KEY)
        if not isinstance(stored, dict) or stored.get("crc") is not self.crc_debug:
            raise FormatError(
                f"{ring.path} must be a memory made with crc_debug={self.crc_debug}, "
                f"got {stored} of {KEY!r} in its metadata. Pass the value that it was "
                "made with."
            )
        self._obs, self._act = stored["obs"], stored["act"]
        self._fields = dict(ring.schema.fields)
        self._no_act = self._none(ring.schema)
        self._check_images()

    @property
    def _images(self) -> str | None:
        """Path of the images, below an observation's: its last leaf; None of none.

        Raises:
            SchemaError: The last part of an observation is empty.
        """
        asked = self._imgs_obs, self._imgs_scale, self._imgs_shape
        if asked == (None, None, None):
            return None
        path, made = "obs", self._obs
        while made is not None:
            if not made["parts"]:
                raise SchemaError(
                    f"{path}: the last component of an observation must be images, got "
                    "an empty one. Put the images last."
                )
            key = list(made["parts"])[-1]
            path, made = f"{path}/{key}", made["parts"][key]
        return path

    @property
    def transforms(self) -> tuple[Transform, ...]:
        """Frame stacks, of images and of actions."""
        made: list[Transform] = []
        if self._imgs_obs is not None:
            made.append(FrameStack(self._imgs_obs, f"{NOW}/{self._images}"))
        if self._act_buf_len:
            made.append(FrameStack(self._act_buf_len, f"{NOW}/act"))
        return tuple(made)

    def describe(self, samples: list[Any]) -> Schema:
        """Return the schema of samples; at least one must have an action."""
        act = next(sample[0] for sample in samples if sample[0] is not None)
        _, obs, reward, *_ = samples[0]
        self._obs, self._act = structure(obs), structure(act)
        fields: dict[str, Field] = {}
        for stem, nest in (("obs", obs), ("act", act), ("reward", reward)):
            for path, leaf in leaves(nest, f"{NOW}/{stem}"):
                if path in fields:
                    raise SchemaError(
                        f"{path}: two leaves have this path. Rename a key that has a slash in it."
                    )
                array = array_of(leaf, path)
                fields[path] = Field(array.shape, array.dtype)
        stored = fields[f"{NOW}/reward"]
        if stored.numpy.kind in "biu":
            # Later rewards may be no integers.
            fields[f"{NOW}/reward"] = Field(stored.shape, "float64")
        for name in ("terminated", "truncated"):
            fields[f"{NOW}/{name}"] = Field((), "bool")
        if self.crc_debug:
            fields[f"{NOW}/crcs"] = Field((6,), "uint32")
            fields[f"{NOW}/crc_ts"] = Field((2,), "int64")
        schema = Schema.from_flat({**fields, "truncated": Field((), "bool")})
        self._fields = dict(schema.fields)
        self._no_act = self._none(schema)
        self._check_images()
        return schema

    def _check_images(self) -> None:
        """Refuse a shape that images, or stacks of them, cannot be given.

        Raises:
            SchemaError: They have another number of elements.
        """
        path = self._images
        if path is None or self._imgs_shape is None:
            return
        shape = self._fields[f"{NOW}/{path}"].shape
        if self._imgs_obs is not None:
            shape = (self._imgs_obs, *shape)
        try:
            np.broadcast_to(np.False_, (1, *shape)).reshape(1, *self._imgs_shape)
        except ValueError:
            raise SchemaError(
                f"imgs_shape {list(self._imgs_shape)} does not fit images of shape "
                f"{list(shape)}. Use (-1,) for flat images."
            ) from None

    def _none(self, schema: Schema) -> Any:
        """Return the action before an episode's first observation: zeros."""
        fields = schema.fields.items()
        zeros = {
            path.removeprefix(f"{NOW}/"): np.zeros(field.shape, field.numpy)
            for path, field in fields
        }
        return built(self._act, zeros, "act")

    def columns(self, samples: list[Any]) -> Columns:
        """Rows of samples, ``[T, *shape]`` by path.

        Raises:
            SchemaError: A sample is of another structure, or lacks its CRC.
        """
        acts, obs, rewards, terminated, truncated, infos = zip(
            *(sample[:6] for sample in samples), strict=True
        )
        tensor = torch.Tensor
        stored = [array_of(r) if isinstance(r, tensor) else r for r in rewards]
        for name, column in (
            ("reward", stored),
            ("terminated", terminated),
            ("truncated", truncated),
        ):
            refuse_masked(column, name)
        found: Columns = {f"{NOW}/reward": np.asarray(stored)}
        found |= _stacked("obs", self._obs, obs)
        found |= _stacked("act", self._act, acts, self._no_act)
        found[f"{NOW}/terminated"] = np.asarray(terminated).astype(bool)
        found[f"{NOW}/truncated"] = np.asarray(truncated).astype(bool)
        found["truncated"] = found[f"{NOW}/terminated"] | found[f"{NOW}/truncated"]
        if self.crc_debug:
            found[f"{NOW}/crcs"] = np.stack([crcs_of(_worker_sample(i)) for i in infos])
            found[f"{NOW}/crc_ts"] = np.array([i["crc_sample_ts"] for i in infos])
        return {p: _fitted(array, self._fields[p]) for p, array in found.items()}

    def check(self, columns: Columns) -> None:
        """Refuse what a ring would refuse, before there is one.

        Raises:
            SchemaError: Values do not fit the first sample's dtypes or shapes.
        """
        for path, array in columns.items():
            self._fields[path].convert(array, path, (len(array),))

    def _seen(self, fields: Arrays, top: str) -> tuple[Any, Any]:
        """Observation, histories included, and last action, ``[B, ...]``."""
        below = {
            path.removeprefix(f"{top}/"): array
            for path, array in fields.items()
            if path.startswith(f"{top}/")
        }
        if (path := self._images) is not None:
            images = below[path]
            if self._imgs_scale is not None:
                images = images.astype(np.float32) / np.float32(self._imgs_scale)
            if self._imgs_shape is not None:
                images = images.reshape(len(images), *self._imgs_shape)
            below[path] = images
        seen = built(self._obs, below, "obs")
        acts = built(self._act, below, "act")
        if not self._act_buf_len:
            return seen, acts
        past = [
            mapped(acts, lambda a: a[:, k])  # noqa: B023 - used at once
            for k in range(self._act_buf_len)
        ]
        parts = seen if isinstance(seen, tuple | list) else (seen,)
        return (*parts, *past), past[-1]

    def _components(self, fields: Arrays) -> tuple[Any, ...]:
        previous, _ = self._seen(fields, NOW)
        following, action = self._seen(fields, NEXT)
        rest = [fields[f"{NEXT}/{n}"] for n in ("reward", "terminated", "truncated")]
        return (previous, action, rest[0], following, *rest[1:])

    def transition(self, fields: Arrays, number: int) -> tuple[Any, ...]:
        """One transition of a batch: its six parts, and its info."""
        one = {path: array[number : number + 1] for path, array in fields.items()}
        parts = mapped(self._components(one), lambda array: array[0])
        info: dict[str, Any] = {}
        if self.crc_debug:
            info["crcs"] = one[f"{NEXT}/crcs"][0]
            info["crc_sample_ts"] = tuple(one[f"{NEXT}/crc_ts"][0].tolist())
        return (*parts, info)

    def batch(self, fields: Arrays, device: Any) -> tuple[Any, ...]:
        """All transitions of a batch, as tensors, flags and rewards as float32."""
        previous, action, reward, following, *ends = self._components(fields)

        def tensor(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        floats = [np.asarray(array, np.float32) for array in (reward, *ends)]
        parts = (previous, action, floats[0], following, *floats[1:])
        return tuple(mapped(part, tensor) for part in parts)


def _stacked(stem: str, made: Any, nests: tuple[Any, ...], empty: Any = None) -> Columns:
    """Leaves of nests, ``[T, *shape]`` by path; those of an empty one for None."""
    known = [nest for nest in nests if nest is not None]
    other = next((nest for nest in known if structure(nest) != made), None)
    if other is not None:
        raise SchemaError(
            f"{stem} must have the structure {made} of the first sample, got "
            f"{structure(other)}. Samples of one memory have one structure."
        )
    columns: dict[str, list[NDArray[Any]]] = {}
    for nest in nests:
        if nest is None:
            nest = empty
        for path, leaf in leaves(nest, f"{NOW}/{stem}"):
            columns.setdefault(path, []).append(array_of(leaf, path))
    for path, column in columns.items():
        shapes = sorted({array.shape for array in column})
        if len(shapes) > 1:
            raise SchemaError(
                f"{path} must have one shape in all samples of an append, got "
                f"{[list(s) for s in shapes]}. {PAD}"
            )
    return {path: np.stack(column) for path, column in columns.items()}


def _fitted(array: NDArray[Any], field: Field) -> NDArray[Any]:
    """An array in a field's dtype, where that holds every value of it."""
    bits = field.dtype == "bfloat16"
    if array.dtype == field.numpy or bits or array.dtype.kind not in "biuf":
        return array
    with np.errstate(all="ignore"):
        cast = array.astype(field.numpy)
        again = cast.astype(array.dtype)
    # Compared as floats, whole numbers from 2**53 on are equal to their neighbours.
    same = (cast == array) & (again == array)
    same |= (cast != cast) & (array != array)
    return cast if same.all() else array


def _worker_sample(info: Any) -> Any:
    """Return the worker's own sample.

    Raises:
        SchemaError: The info has none.
    """
    if not isinstance(info, dict) or "crc_sample" not in info:
        raise SchemaError(
            "crc_debug: a sample has no 'crc_sample' in its info. Set crc_debug in the "
            "RolloutWorker as well."
        )
    return info["crc_sample"]

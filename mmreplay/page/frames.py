"""Frames of image fields, as raw uint8 pixels that a browser can paint.

A layout names the axes of a field: H rows, W columns, C channels, N frames of a stack.
Pixels that are no uint8 are scaled by the range of the sample: one channel by a colour
map (viridis), three of them to their own colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import SchemaError
from mmreplay.schema import Field
from mmreplay.schema.convert import widen

MAX_NBYTES = 4 << 20
"""Of the pixels of one answer."""
MAX_FRAMES = 96
READ_NBYTES = 4 << 20
"""Rows are read so many bytes at a time: large frames may be wanted small."""
MIN_SIDE, MAX_STACK = 16, 16
MAX_SIDE = 4096

VIRIDIS = (
    "440154 470d60 48186a 482374 472d7b 453781 424086 3e4989 3b528b 375b8d 33638d "
    "2f6b8e 2c728e 297a8e 26828e 23898e 21918c 1f988b 1fa088 22a785 28ae80 32b67a "
    "3fbc73 4ec36b 5ec962 70cf57 84d44b 98d83e addc30 c2df23 d8e219 ece51b fde725"
)
"""The colour map at 33 equal steps; between them it is linear."""

Ids = NDArray[np.int64]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How the pixels of a field lie.

    Attributes:
        axes: One letter an axis of the field: H, W, C (channels), N (stacked frames).
        height: Pixels.
        width: Pixels.
        channels: 1 or 3.
        stack: Frames of one row; 1 where nothing is stacked.
    """

    axes: str
    height: int
    width: int
    channels: int
    stack: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "axes": self.axes,
            "height": self.height,
            "width": self.width,
            "channels": self.channels,
            "stack": self.stack,
        }

    @classmethod
    def of(cls, axes: str, shape: tuple[int, ...]) -> ImageLayout | None:
        """Return the layout of these axes; None where the shape does not have it."""
        sizes = dict(zip(axes, shape, strict=True))
        channels = sizes.get("C", 1)
        if channels not in (1, 3):
            return None
        return cls(axes, sizes["H"], sizes["W"], channels, sizes.get("N", 1))


def recognize(field: Field) -> ImageLayout | None:
    """Return the layout of a field that looks like an image; None for others.

    Images have two axes of at least 16 pixels. An axis of 1 or 3 is one of channels,
    another axis of at most 16 one of stacked frames.
    """
    shape = field.shape
    candidates: tuple[str, ...]
    if not field.rules.computes:
        return None
    if len(shape) == 2:
        candidates = ("HW",)
    elif len(shape) == 3:
        last_is_small, first_is_small = shape[2] <= MAX_STACK, shape[0] <= MAX_STACK
        candidates = ("HWC", "HWN") if last_is_small else ("CHW", "NHW")
        if not last_is_small and not first_is_small:
            return None
    elif len(shape) == 4:
        candidates = ("NHWC", "NCHW", "HWCN")
    else:
        return None
    for axes in candidates:
        layout = ImageLayout.of(axes, shape)
        if layout is None or min(layout.height, layout.width) < MIN_SIDE:
            continue
        if layout.stack <= MAX_STACK:
            return layout
    return None


def stated(path: str, field: Field, axes: str) -> ImageLayout:
    """Return the layout that a user stated for a field.

    Args:
        path: The field, for errors.
        field: The field.
        axes: Such as ``"CHW"``.

    Raises:
        SchemaError: The axes are no layout, or the field does not have it.
    """
    if not field.rules.computes:
        raise SchemaError(
            f"{path} must have one shape to be an image, but its length varies. Leave "
            f"--image {path}={axes} out."
        )
    letters = axes.upper()
    wanted = {2: "HW", 3: "HWC", 4: "NHWC"}.get(len(field.shape))
    if wanted is None:
        raise SchemaError(
            f"{path} must have 2 to 4 axes to be an image, got the shape "
            f"{list(field.shape)}. Leave --image {path}={axes} out."
        )
    legal = set(letters) <= set("HWCN") and {"H", "W"} <= set(letters)
    if not legal or len(set(letters)) != len(letters):
        raise SchemaError(
            f"The layout of {path} must be made of H, W, C and N, each once, got "
            f"{axes!r}. Pass --image {path}=HWC, for example."
        )
    if len(letters) != len(field.shape):
        raise SchemaError(
            f"The layout {axes!r} of {path} must have {len(field.shape)} letters, one "
            f"for each axis of its shape {list(field.shape)}: H and W"
            f"{', C for channels, N for stacked frames' if len(wanted) > 2 else ''}. "
            f"Pass --image {path}={wanted}, for example."
        )
    layout = ImageLayout.of(letters, field.shape)
    if layout is None:
        raise SchemaError(
            f"The axis C of {path} must have 1 or 3 channels, got the shape "
            f"{list(field.shape)} with {axes!r}. Use N for stacked frames."
        )
    return layout


def layouts(buffer: ReplayBuffer, images: dict[str, str]) -> dict[str, ImageLayout]:
    """Return the layout of each image field of a buffer.

    Args:
        buffer: Open in any mode.
        images: Stated layout by path; ``"none"`` for a field that is no image.

    Raises:
        SchemaError: A stated layout does not fit.
    """
    found = {}
    for path, field in buffer.schema.drawn.fields.items():
        if path in images:
            if images[path].lower() != "none":
                found[path] = stated(path, field, images[path])
        elif (layout := recognize(field)) is not None:
            found[path] = layout
    return found


def one_frame(rows: NDArray[Any], layout: ImageLayout, number: int) -> NDArray[Any]:
    """Return one frame of each row.

    Args:
        rows: ``[B, *shape]``.
        layout: Of the shape.
        number: Which frame of a stack; -1 for the last one, which is the newest.

    Returns:
        ``[B, H, W, C]``, a view.
    """
    axes = layout.axes
    if "N" in axes:
        rows = np.take(rows, number, axis=1 + axes.index("N"))
        axes = axes.replace("N", "")
    if "C" not in axes:
        rows, axes = rows[..., None], axes + "C"
    return rows.transpose(0, *(1 + axes.index(name) for name in "HWC"))


def read_frames(
    buffer: ReplayBuffer,
    path: str,
    layout: ImageLayout,
    env_ids: Ids,
    positions: Ids,
    *,
    side: int = MAX_SIDE,
    number: int = -1,
    limits: tuple[float, float] | None = None,
) -> Pixels:
    """Read frames of rows, at most 4 MiB of them.

    Args:
        buffer: Open in any mode.
        path: An image field.
        layout: Of its shape.
        env_ids: int64 ``[B]``.
        positions: int64 ``[B]``, alive.
        side: Of larger frames only every so many-th pixel is taken, so that neither
            side is longer.
        number: Which frame of a stack.
        limits: Lowest and highest value, for fields that are no uint8.

    Returns:
        uint8 ``[N, H, W, 1 or 3]``, N at most B: as many frames as 4 MiB hold.
    """
    field = buffer.schema.drawn[path]
    channels = 3 if needs_colours(field, layout) else layout.channels
    stride = max(1, -(-max(layout.height, layout.width) // side))
    while _nbytes(layout, stride) * channels > MAX_NBYTES:
        stride += 1
    count = min(len(positions), MAX_NBYTES // (_nbytes(layout, stride) * channels))
    height, width = -(-layout.height // stride), -(-layout.width // stride)
    pixels = np.empty((count, height, width, channels), np.uint8)
    step = max(1, READ_NBYTES // field.nbytes)
    for first in range(0, count, step):
        some = slice(first, min(first + step, count))
        rows = widen(buffer.get_field(path, env_ids[some], positions[some]), field)
        frames = one_frame(rows, layout, number)[:, ::stride, ::stride]
        pixels[some] = to_pixels(frames, limits, colours=channels > layout.channels)
    return pixels


def _nbytes(layout: ImageLayout, stride: int) -> int:
    return -(-layout.height // stride) * -(-layout.width // stride)


def needs_colours(field: Field, layout: ImageLayout) -> bool:
    """Return whether a field's numbers are shown by a colour map."""
    return layout.channels == 1 and field.dtype not in ("uint8", "bool")


def to_pixels(frames: NDArray[Any], limits: tuple[float, float] | None, *, colours: bool) -> Pixels:
    """Return frames as bytes.

    Args:
        frames: ``[B, H, W, C]``.
        limits: What becomes 0 and 255; values beyond are clipped. Not for uint8.
        colours: Show the one channel by a colour map; what is not finite is black.

    Returns:
        uint8 ``[B, H, W, C]``, or ``[B, H, W, 3]`` with a colour map.
    """
    if frames.dtype in (np.uint8, bool):
        plain: Pixels = frames.astype(np.uint8, copy=False)
        return plain * np.uint8(255) if frames.dtype == bool else plain
    low, high = limits if limits is not None else (0.0, 1.0)
    scaled = (frames.astype(np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-30))
    np.nan_to_num(scaled, copy=False, nan=0.0, posinf=1.0, neginf=0.0)
    scaled.clip(0, 1, out=scaled)
    scaled *= 255
    scaled += 0.5
    levels: Pixels = scaled.astype(np.uint8)
    if not colours:
        return levels
    pixels = _viridis()[levels[..., 0]]
    pixels[~np.isfinite(frames[..., 0])] = 0
    return pixels


_colours: list[Pixels] = []


def _viridis() -> Pixels:
    """The colour map, uint8 ``[256, 3]``."""
    if not _colours:
        steps = np.array([[*bytes.fromhex(step)] for step in VIRIDIS.split()])
        at = np.linspace(0, len(steps) - 1, 256)
        channels = [np.interp(at, np.arange(len(steps)), steps[:, c]) for c in range(3)]
        _colours.append((np.stack(channels, -1) + 0.5).astype(np.uint8))
    return _colours[0]


def alive_rows(
    buffer: ReplayBuffer, rows: Sequence[tuple[int, int]], margin: Ids
) -> tuple[Ids, Ids]:
    """Return those of some (environment, position) that the buffer holds.

    Args:
        buffer: Open in any mode.
        rows: The pairs.
        margin: int64 ``[E]``, so many of the oldest rows are left out.

    Returns:
        env_ids and positions, int64 ``[N]`` each.
    """
    span = buffer.span
    pairs = np.array(rows, np.int64).reshape(-1, 2)
    env_ids, positions = pairs[:, 0], pairs[:, 1]
    known = env_ids < len(span.stop)
    env_ids, positions = env_ids[known], positions[known]
    alive = positions >= (span.first + margin)[env_ids]
    alive &= positions < span.stop[env_ids]
    return env_ids[alive], positions[alive]

"""Images as the files that are stored, for a decoder of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mmreplay.errors import SchemaError, shown
from mmreplay.nesting import meant, under
from mmreplay.schema import Schema
from mmreplay.transforms.base import Bound, Layer
from mmreplay.transforms.base_steps import BaseSteps
from mmreplay.transforms.outline import Outline


@dataclass(frozen=True, slots=True)
class Encoded:
    """Images of a batch stay JPEG or PNG files, as they are stored: nothing is decoded.

    The batch holds `Ragged` of uint8, the bytes of each file, for example to decode
    them on the GPU. Other transforms in the list see files, too, wherever this stands.

    Args:
        paths: One path of an image field or of a subtree of some, or several; all
            images by default.

    Raises:
        SchemaError: When it meets a schema: a path names no image.

    Example:
        >>> import numpy as np
        >>> schema = mr.Schema({"image": mr.Field.image((96, 96, 3), "png")})
        >>> buffer = mr.ReplayBuffer.create(
        ...     None, schema, 9, engine="memory", transforms=[mr.Encoded()]
        ... )
        >>> buffer.extend(image=np.zeros((4, 96, 96, 3), np.uint8))
        >>> bytes(buffer.sample(2)["image"][0])[1:4]
        b'PNG'
    """

    paths: str | Iterable[str] | None = None

    described: ClassVar[bool] = True

    def bind(self, outline: Outline) -> Bound:
        """Nothing is left to do; see `Transform.bind`."""
        return Bound(outline, _below, finishes=False)


def as_stored(transforms: Sequence[Any], schema: Schema) -> frozenset[str]:
    """Paths of the fields that batches hold as they are stored.

    Raises:
        SchemaError: `Encoded` names what is no image.
    """
    images = [path for path, field in schema.fields.items() if field.drawn is not field]
    named = set[str]()
    for transform in transforms:
        if not isinstance(transform, Encoded):
            continue
        paths = transform.paths
        if paths is not None and not isinstance(paths, Iterable):
            raise SchemaError(
                f"Encoded: paths must be paths of image fields, got {shown(paths)}. Pass one, or "
                "a list of them."
            )
        for path in (paths,) if isinstance(paths, str) else images if paths is None else paths:
            leaves = under(images, path) if isinstance(path, str) else ()
            if not leaves and not images:
                raise SchemaError(
                    f"Encoded: paths must name fields of images, got {shown(path)} where there "
                    "are none. Leave it out, or declare one by Field.image."
                )
            if not leaves:
                raise SchemaError(
                    f"Encoded: paths must name fields of images, of {', '.join(images)}, got "
                    f"{shown(path)}. {meant(str(path), images)}"
                )
            named.update(leaves)
    return frozenset(named)


def _below(below: Layer, base_steps: BaseSteps) -> Layer:
    """The layer below, as it is."""
    return below

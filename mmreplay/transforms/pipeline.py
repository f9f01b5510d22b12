"""Transforms, composed: what makes a batch of stored single steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError, shown
from mmreplay.schema import Field, Schema
from mmreplay.transforms.anchors import Anchors, anchor, around
from mmreplay.transforms.base import (
    Bound,
    Fields,
    Layer,
    Rows,
    Touched,
    Transform,
)
from mmreplay.transforms.outline import Outline, Place

Ids = NDArray[np.int64]


class Pipeline:
    """Transforms in their order, fitted to a schema.

    The first one is nearest to the rows stored; each next one sees what those before
    it made. Windows add where one transform reads what another has made.

    Attributes:
        before: Rows before a step that its batch is read from.
        after: Rows after it, up to its episode's end; the row of a derived next
            observation is one of them.
        fields: Shape and dtype of what a batch holds, by name.
    """

    def __init__(
        self, transforms: Sequence[Transform], schema: Schema,
        *, final_follows: bool = False,
    ) -> None:  # fmt: skip
        """Compose transforms.

        Args:
            transforms: In the order they are applied; none give single steps with
                their next observations.
            schema: Of the rows stored.
            final_follows: As in `Outline`.

        Raises:
            SchemaError: A transform cannot stand where it does.
        """
        outline = Outline.of(schema, final_follows=final_follows)
        bounds = list[Bound]()
        for transform in transforms:
            made = not isinstance(transform, type)
            if not (made and callable(getattr(transform, "bind", None))):
                raise SchemaError(
                    f"transforms: got {shown(transform)}, expected transforms such as "
                    "NStep(3, gamma=0.99); wrap a function in Apply"
                )
            name = type(transform).__name__
            if "Apply" in outline.names and name != "Apply":
                raise SchemaError(
                    f"transforms: got {name} after Apply, whose fields are known only "
                    "when it has run, expected nothing but Apply there; put it first"
                )
            bounds.append(transform.bind(outline))
            outline = replace(bounds[-1].outline, names=(*outline.names, name))
        self._bounds = bounds
        self._outline = outline
        self.before = max(outline.before.values(), default=0)
        self.after = outline.steps - (not outline.derived)
        self.fields: Mapping[str, Field] = outline.fields

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the fields whose arrays hold the bits of bfloat16 numbers."""
        return frozenset(n for n, f in self.fields.items() if f.dtype == "bfloat16")

    @property
    def reach(self) -> dict[str, tuple[int, ...]]:
        """Rows around a step, by the stored field that its batch is read from there.

        How much that is, and no more: near an end others are read, nearer to the step,
        and what a transform looks for elsewhere is not among them; see `touched`.
        """
        outline, steps = self._outline, self._outline.steps
        found = {}
        for path in outline.schema.paths:
            back = outline.before.get(path, 0)
            place = outline.places.get(path)
            first, stop = {
                None: (0, 0), Place.MADE: (-back, steps),
                Place.LAST: (steps - 1 - back, steps),
            }.get(place, (-back, 1))  # fmt: skip
            offsets = set(range(first, stop))
            ahead = outline.nexts.get(path)
            if ahead is not None and outline.places.get(ahead) is Place.NEXT:
                offsets |= set(range(steps - back, steps + 1))
            found[path] = tuple(sorted(offsets))
        return found

    def touched(
        self, rows: Rows, env_ids: Ids, positions: Ids, key: int,
        length: int | None = None,
    ) -> Iterator[Touched]:  # fmt: skip
        """Say which rows `gather` will read, so that the disk is asked for them early.

        Boundaries are read, no field. See `gather` for the arguments.
        """
        outline = self._outline
        anchors = anchor(
            rows, env_ids, positions, key, length,
            before=self.before, steps=outline.steps,
        )  # fmt: skip
        here, last, after = anchors.positions, anchors.last, anchors.following
        ends = {
            Place.HERE: (here, here), Place.LAST: (last, last),
            Place.MADE: (here, last), Place.NEXT: (after, after),
        }  # fmt: skip
        groups: dict[tuple[Place, int], list[str]] = {}
        for path in outline.schema.paths:
            for name in (path, outline.nexts.get(path)):
                place = None if name is None else outline.places.get(name)
                if place is None:
                    continue
                back = outline.before.get(path, 0)
                # The frames before a stored next observation are those of its step.
                if name == path or place is Place.NEXT or back:
                    groups.setdefault((place, back), []).append(path)
        for (place, back), paths in groups.items():
            yield (tuple(paths), *around(anchors, *ends[place], back))
        for bound in self._bounds:
            if bound.elsewhere is not None:
                yield from bound.elsewhere(anchors)

    def gather(
        self, rows: Rows, env_ids: Ids, positions: Ids, key: int,
        length: int | None = None,
    ) -> Fields:  # fmt: skip
        """Make the batch of some steps.

        Args:
            rows: The buffer.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, legal starts under `before` and `after`.
            key: In ``[0, 2**64)``; the same key, steps and rows give the same batch.
            length: Steps a window where the steps are those of windows, one window
                after another; each window then gets one goal of `HER`.

        Returns:
            Per name ``[N, *shape]``.
        """
        outline = self._outline
        anchors = anchor(
            rows, env_ids, positions, key, length,
            before=self.before, steps=outline.steps,
        )  # fmt: skip
        layer: Layer = Stored(anchors)
        for bound in self._bounds:
            layer = bound.over(layer, anchors)
        return layer.finish(batch_of(layer, outline, anchors))


class Stored:
    """The rows themselves."""

    def __init__(self, anchors: Anchors) -> None:
        """Read around some steps."""
        self._anchors = anchors

    def read(self, paths: tuple[str, ...], rows: Ids) -> Fields:
        """Stored fields of rows; see `Layer.read`."""
        if not paths:
            return {}
        anchors = self._anchors
        env_ids = np.repeat(anchors.env_ids, rows.shape[1])
        found = anchors.rows.read(paths, env_ids, rows.reshape(-1))
        return {p: a.reshape(*rows.shape, *a.shape[1:]) for p, a in found.items()}

    def made(self, names: tuple[str, ...]) -> Fields:
        """Nothing is made down here."""
        assert not names, names
        return {}

    def finish(self, fields: Fields) -> Fields:
        """Nothing is left to be done."""
        return fields


def batch_of(layer: Layer, outline: Outline, anchors: Anchors) -> Fields:
    """The fields of an outline, as a layer shows them, ``[N, *shape]`` each."""
    found: Fields = {}
    here, last = outline.at(Place.HERE), outline.at(Place.LAST)
    if outline.steps == 1:
        here, last = here + last, ()
    for names, rows in ((here, anchors.positions), (last, anchors.last)):
        for name, array in layer.read(names, rows[:, None]).items():
            found[name] = array[:, 0]
    ahead = {
        path: n for path, n in outline.nexts.items() if n in outline.at(Place.NEXT)
    }
    for path, array in layer.read(tuple(ahead), anchors.following[:, None]).items():
        found[ahead[path]] = array[:, 0]
    found |= layer.made(outline.at(Place.MADE))
    return {name: found[name] for name in outline.fields}

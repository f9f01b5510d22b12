"""Transforms, composed: what makes a batch of stored single steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError, shown
from mmreplay.schema import Field, Schema
from mmreplay.transforms.base import (
    Bound,
    BufferRows,
    Direct,
    Fields,
    Layer,
    RowPlan,
    RowReads,
    Sums,
    Transform,
)
from mmreplay.transforms.base_steps import BaseSteps, BatchRows, Where, around
from mmreplay.transforms.encoded import as_stored
from mmreplay.transforms.outline import Outline, ReadAt
from mmreplay.transforms.without_next import WithoutNext

Ids = NDArray[np.int64]
Asked = dict[Where, tuple[str, ...]]

MAX_ASKED = 64
"""Limit of `Where` instances that are read for every batch, in case a custom transform
makes new ones each time."""


class Pipeline:
    """Transforms in their order, fitted to a schema.

    The first one is nearest to the rows stored; each next one sees what those before
    it made. Windows add where one transform reads what another has made.

    Attributes:
        before: Rows before a step that its batch is read from.
        after: Rows after it, up to its episode's end; the row of a derived next
            observation is one of them.
        derived: Next observations are read from the row after a step.
        as_stored: Paths of fields that batches hold as they are stored; see `Encoded`.
        fields: Shape and dtype of what a batch holds, by name.
    """

    def __init__(
        self, transforms: Sequence[Transform], schema: Schema, *, final_follows: bool = False
    ) -> None:
        """Compose transforms.

        Args:
            transforms: In the order they are applied; none give single steps with
                their next observations.
            schema: Of the rows stored.
            final_follows: As in `Outline`.

        Raises:
            SchemaError: A transform cannot stand where it does.
        """
        # Before the first of them looks at a field.
        self.as_stored = as_stored(transforms, schema)
        outline = Outline.of(schema.drawn_without(self.as_stored), final_follows=final_follows)
        without = next((t for t in transforms if isinstance(t, WithoutNext)), None)
        bounds = list[Bound]()
        for transform in transforms:
            made = not isinstance(transform, type)
            if not (made and callable(getattr(transform, "bind", None))):
                raise SchemaError(
                    "transforms must be transforms such as NStep(3, gamma=0.99), got "
                    f"{shown(transform)}. Wrap a function in Apply."
                )
            name = type(transform).__name__
            if without is not None and getattr(transform, "reads_next", False):
                raise SchemaError(
                    f"transforms: {name} needs next observations, which WithoutNext "
                    "leaves out. Remove one of the two."
                )
            if "Apply" in outline.names and name != "Apply":
                raise SchemaError(
                    f"transforms: {name} must not follow Apply, whose fields are "
                    f"unknown until it runs. Put {name} first."
                )
            bounds.append(transform.bind(outline))
            outline = replace(bounds[-1].outline, names=(*outline.names, name))
        self._bounds = bounds
        self._outline = outline
        self.before = max(outline.before.values(), default=0)
        self.derived = outline.derived
        self.after = outline.steps - (not outline.derived)
        self.fields: Mapping[str, Field] = outline.fields
        self._batch_rows = BatchRows(outline.steps)
        self._batch = _batch(outline, self._batch_rows, bounds)
        # The rows and fields that layers have read so far, and the plan for them.
        self._asked: Asked = {}
        self._planned: tuple[BufferRows, Asked, RowPlan] | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """Names of the fields of a batch; None where `Apply` makes them."""
        return None if "Apply" in self._outline.names else tuple(self.fields)

    @property
    def unknown(self) -> frozenset[str]:
        """Names of the fields that are NaN where they cannot be computed."""
        return self._outline.unknown

    @property
    def bfloat16(self) -> frozenset[str]:
        """Names of the fields whose arrays hold the bits of bfloat16 numbers."""
        return frozenset(n for n, f in self.fields.items() if f.dtype == "bfloat16")

    @property
    def reach(self) -> dict[str, tuple[int, ...]]:
        """Rows around a step, by the stored field that its batch is read from there.

        How much that is, and no more: near an end others are read, nearer to the step,
        and what a transform looks for elsewhere is not among them; see `rows_read`.
        """
        outline, steps = self._outline, self._outline.steps
        offsets_of = {}
        for path in outline.schema.paths:
            back = outline.before.get(path, 0)
            read_at = outline.read_at.get(path)
            first, stop = {
                None: (0, 0),
                ReadAt.MADE: (-back, steps),
                ReadAt.LAST: (steps - 1 - back, steps),
            }.get(read_at, (-back, 1))
            offsets = set(range(first, stop))
            ahead = outline.next_obs.get(path)
            if ahead is not None and outline.read_at.get(ahead) is ReadAt.NEXT:
                offsets |= set(range(steps - back, steps + 1))
            offsets_of[path] = tuple(sorted(offsets))
        return offsets_of

    def rows_read(
        self, rows: BufferRows, env_ids: Ids, positions: Ids, key: int, length: int | None = None
    ) -> Iterator[RowReads]:
        """Say which rows `gather` will read, so that the disk is asked for them early.

        Boundaries are read, no field. See `gather` for the arguments.
        """
        outline = self._outline
        bounds = rows.find(self.plan(rows, {}, {}, None), env_ids, positions)
        base_steps = BaseSteps(
            rows,
            env_ids,
            positions,
            key,
            length,
            self._batch_rows,
            bounds.base_steps,
            bounds.terminated,
        )
        here, last, after = base_steps.positions, base_steps.last, base_steps.following
        ends = {
            ReadAt.HERE: (here, here),
            ReadAt.LAST: (last, last),
            ReadAt.MADE: (here, last),
            ReadAt.NEXT: (after, after),
        }
        groups: dict[tuple[ReadAt, int], list[str]] = {}
        for path in outline.schema.paths:
            for name in (path, outline.next_obs.get(path)):
                read_at = None if name is None else outline.read_at.get(name)
                if read_at is None:
                    continue
                back = outline.before.get(path, 0)
                # The frames before a stored next observation are those of its step.
                if name == path or read_at is ReadAt.NEXT or back:
                    groups.setdefault((read_at, back), []).append(path)
        for (read_at, back), paths in groups.items():
            yield (tuple(paths), *around(base_steps, *ends[read_at], back))
        for bound in self._bounds:
            if bound.elsewhere is not None:
                yield from bound.elsewhere(base_steps)

    def gather(
        self, rows: BufferRows, env_ids: Ids, positions: Ids, key: int, length: int | None = None
    ) -> Fields:
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
        planned, asked = self._planned, self._asked
        if planned is None or planned[0] is not rows or planned[1] is not asked:
            planned = self._planned = (
                rows,
                asked,
                self.plan(rows, self._batch.direct, asked, self._batch.sums),
            )
        steps = rows.find(planned[2], env_ids, positions)
        fields = steps.fields
        if self._batch.is_complete:
            return {name: fields[name] for name in self._batch.names}
        base_steps = BaseSteps(
            rows,
            env_ids,
            positions,
            key,
            length,
            self._batch_rows,
            steps.base_steps,
            steps.terminated,
        )
        layer: Layer = StoredLayer(base_steps, steps.columns, self)
        for bound in self._bounds:
            layer = bound.over(layer, base_steps)
        for names, where, name_of in self._batch.layered:
            for path, array in layer.read(names, where).items():
                fields[name_of[path]] = array[:, 0]
        if self._batch.made:
            fields |= layer.made(self._batch.made)
        fields = {name: fields[name] for name in self._batch.names}
        return layer.finish(fields)

    def plan(self, rows: BufferRows, direct: Direct, asked: Asked, sums: Sums | None) -> RowPlan:
        """Find out where what is read of each draw lies; see `BufferRows.plan`."""
        return rows.plan(self.before, self._outline.steps, direct, asked, sums)

    def learn(self, paths: tuple[str, ...], where: Where) -> None:
        """Add fields to those that are read for every batch from now on."""
        asked = self._asked
        if len(asked) < MAX_ASKED or where in asked:
            # Replaced, never changed in place: other threads may be using it.
            known = asked.get(where, ())
            self._asked = {**asked, where: (*dict.fromkeys((*known, *paths)),)}


@dataclass(frozen=True, slots=True)
class _Batch:
    """What a batch is put together of.

    Attributes:
        direct: Fields that no transform changes, which are read as they are stored.
        layered: Fields that layers are asked for, where, and their names in the batch.
        made: Names of those that are made from several rows.
        names: All names, in order.
        sums: What is summed as it is read; None for nothing.
        is_complete: Nothing is left to layers.
    """

    direct: Direct
    layered: tuple[tuple[tuple[str, ...], Where, Mapping[str, str]], ...]
    made: tuple[str, ...]
    names: tuple[str, ...]
    sums: Sums | None
    is_complete: bool


def _batch(outline: Outline, batch_rows: BatchRows, bounds: Sequence[Bound]) -> _Batch:
    stacks = _stacked(outline, bounds)
    sums = _summed_rewards(outline, bounds)

    at = {ReadAt.HERE: batch_rows.here, ReadAt.LAST: batch_rows.last}
    wanted = [(at[read_at], n, n) for n, read_at in outline.read_at.items() if read_at in at]
    wanted += [
        (batch_rows.following, path, name)
        for path, name in outline.next_obs.items()
        if outline.read_at[name] is ReadAt.NEXT
    ]
    direct: dict[Where, dict[str, str]] = {}
    layered: dict[Where, dict[str, str]] = {}
    for where, path, name in wanted:
        group = direct if outline.as_stored(path) or path in stacks else layered
        group.setdefault(where.stacked(stacks.get(path, 1)), {})[path] = name
    read = tuple((tuple(names), where, names) for where, names in layered.items())
    summed = () if sums is None else (*sums.dtypes, sums.discount)
    made = tuple(name for name in outline.at(ReadAt.MADE) if name not in summed)
    is_complete = not read and not made and not any(bound.finishes for bound in bounds)
    return _Batch(direct, read, made, tuple(outline.fields), sums, is_complete)


def _stacked(outline: Outline, bounds: Sequence[Bound]) -> dict[str, int]:
    """Fields that are stacked as they are read, and nothing else is done, by path."""
    ends = {
        path for role in ("terminated", "truncated") for path in outline.schema.role_paths(role)
    }
    once = {path for path, changed in outline.changed_by.items() if len(changed) == 1}
    once = once.intersection(outline.schema.fields) - ends
    return {path: k for bound in bounds for path, k in bound.stacks.items() if path in once}


def _summed_rewards(outline: Outline, bounds: Sequence[Bound]) -> Sums | None:
    """What is summed of stored rewards and stays as it is; None for nothing."""
    for bound in bounds:
        sums = bound.sums
        if sums is None or len(sums.powers) != outline.steps + 1:
            continue
        dtypes = {
            path: dtype for path, dtype in sums.dtypes.items() if len(outline.changed_by[path]) == 1
        }
        discount = sums.discount
        if discount is not None and len(outline.changed_by[discount]) > 1:
            discount = None
        if dtypes or discount is not None:
            return Sums(sums.where, sums.powers, dtypes, discount)
    return None


class StoredLayer:
    """The rows themselves."""

    def __init__(
        self, base_steps: BaseSteps, columns: Mapping[Where, Fields], pipeline: Pipeline
    ) -> None:
        """Read around some steps.

        Args:
            base_steps: The steps.
            columns: What was read of them.
            pipeline: What is to read for the next draws what was not.
        """
        self._base_steps = base_steps
        self._columns = columns
        self._pipeline = pipeline

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Stored fields of rows; see `Layer.read`."""
        if not paths:
            return {}
        if not isinstance(rows, Where):
            base_steps = self._base_steps
            env_ids = base_steps.env_ids
            if rows.shape[1] > 1:
                env_ids = np.repeat(env_ids, rows.shape[1])
            columns = base_steps.rows.read(paths, env_ids, rows.reshape(-1))
            return {p: a.reshape(*rows.shape, *a.shape[1:]) for p, a in columns.items()}
        known = self._columns.get(rows, _NOTHING)
        try:
            return {path: known[path] for path in paths}
        except KeyError:
            return self._learnt(paths, rows)

    def _learnt(self, paths: tuple[str, ...], where: Where) -> Fields:
        """Read fields that the plan lacks, and add them to it."""
        base_steps, pipeline = self._base_steps, self._pipeline
        pipeline.learn(paths, where)
        plan = pipeline.plan(base_steps.rows, {}, {where: paths}, None)
        steps = base_steps.rows.find(plan, base_steps.env_ids, base_steps.positions)
        return dict(steps.columns[where])

    def made(self, names: tuple[str, ...]) -> Fields:
        """Nothing is made down here."""
        assert not names, names
        return {}

    def finish(self, fields: Fields) -> Fields:
        """Nothing is left to be done."""
        return fields


_NOTHING = Fields()

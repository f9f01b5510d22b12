"""The contract of transforms: `check_transform`.

A transform is a value: what it makes of steps is a function of the steps and of the key
of their draw. Draws are made in several threads, again after rows were overwritten, and
in worker processes, so that one that counts or averages what it has seen would give
each of them other batches.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import DurabilityWarning
from mmreplay.ragged import Ragged
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.schema import Field, Schema
from mmreplay.testing.disks import QuickDisk, using
from mmreplay.testing.rules import ContractError, by_name, run_rules

NUM_ENVS, NUM_STEPS, BATCH, KEY = 2, 60, 16, 7

SCHEMA = Schema(
    {
        "observation": Field((3,), "float32"),
        "action": Field((2,), "float32"),
        "reward": Field((), "float32"),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
    }
)


@dataclass(frozen=True, slots=True)
class TransformCase:
    """A transform, and a buffer to read through it.

    Attributes:
        make: Makes the transform, or a sequence of transforms.
        path: Of the buffer.
    """

    make: Callable[[], Any]
    path: Path

    def transforms(self) -> tuple[Any, ...]:
        """New ones."""
        made = self.make()
        return tuple(made) if isinstance(made, Sequence) else (made,)

    def starts(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Steps of two batches, which share some."""
        with ReplayBuffer.open(self.path, transforms=self.transforms()) as buffer:
            view, sampler = buffer.view, UniformSampler(seed=1)
            draws = [sampler.draw(view, BATCH) for _ in range(2)]
        return [(draw.env_ids, draw.positions) for draw in draws]

    def batches(self, transforms: Sequence[Any], order: Sequence[int]) -> dict[int, Batch]:
        """Batches by number, read in this order by one buffer."""
        starts = self.starts()
        with ReplayBuffer.open(self.path, transforms=transforms) as buffer:
            return {number: buffer.take(*starts[number], key=KEY) for number in order}


def makes_equal_batches(case: TransformCase) -> None:
    """The same steps and key give the same batch, again and again."""
    starts = case.starts()[0]
    with ReplayBuffer.open(case.path, transforms=case.transforms()) as buffer:
        first = buffer.take(*starts, key=KEY)
        _refuse_difference(first, buffer.take(*starts, key=KEY), "taken again")


def depends_on_no_earlier_batch(case: TransformCase) -> None:
    """A batch is the same whatever was read before it."""
    forward = case.batches(case.transforms(), (0, 1))
    backward = case.batches(case.transforms(), (1, 0))
    for number in (0, 1):
        what = "read before another batch instead of after it"
        _refuse_difference(forward[number], backward[number], what)


def copies_by_pickle(case: TransformCase) -> None:
    """A pickled copy, as a worker process gets, makes the same batches."""
    transforms = case.transforms()
    copied = pickle.loads(pickle.dumps(transforms))
    # Also of one that was used before it was pickled.
    used = case.batches(transforms, (0, 1))
    again = pickle.loads(pickle.dumps(transforms))
    for copies in (copied, again):
        for number, batch in case.batches(copies, (0, 1)).items():
            _refuse_difference(used[number], batch, "made by a pickled copy")


def makes_equal_windows(case: TransformCase) -> None:
    """Windows of the same seed are the same."""
    made = []
    for _ in range(2):
        sampler = SequenceSampler(4, UniformSampler(seed=2))
        with ReplayBuffer.open(case.path, transforms=case.transforms(), sampler=sampler) as buffer:
            made.append(buffer.sample(BATCH))
    first, second = made
    _refuse_difference(first, second, "drawn again as windows")


RULES = by_name(
    makes_equal_batches, depends_on_no_earlier_batch, copies_by_pickle, makes_equal_windows
)
TRANSFORM_RULES = tuple(RULES)
"""Names of the rules of `check_transform`."""


def check_transform(
    make_transform: Callable[[], Any],
    folder: str | Path | None = None,
    *,
    schema: Schema | None = None,
    rules: Sequence[str] | None = None,
) -> None:
    """Check that a transform is a value, as `mmreplay.transforms.base.Transform` says.

    It reads batches of a buffer of two environments with short episodes: twice, in two
    orders, as windows, and through pickled copies. Their bits must be equal.

    Args:
        make_transform: Makes the transform, or a list of transforms.
        folder: Where buffers are made; a temporary folder by default.
        schema: Fields of the buffer, each of one shape, with roles as in
            `ReplayBuffer.create`; by default an observation of 3 numbers, an action of
            2, a reward and both ends.
        rules: Names of the rules to check, of `TRANSFORM_RULES`; all by default.

    Raises:
        ContractError: A rule is broken. What the transform itself raises is passed on,
            with a note that names the rule.

    Example:
        >>> from mmreplay.testing import check_transform
        >>> check_transform(lambda: mr.NStep(3, 0.99))
    """
    fields = SCHEMA if schema is None else schema

    @contextmanager
    def make_case(own: Path) -> Iterator[TransformCase]:
        # No power is cut here, and every buffer would wait for the device.
        with using(QuickDisk()), warnings.catch_warnings():
            warnings.simplefilter("ignore", DurabilityWarning)
            with ReplayBuffer.create(
                own / "ring", fields, NUM_STEPS, NUM_ENVS, autoreset="disabled"
            ) as buffer:
                buffer.extend(_steps(fields))
            yield TransformCase(make_transform, own / "ring")

    name = getattr(make_transform, "__name__", "the transform")
    subject = type(make_transform()).__name__ if name == "<lambda>" else name
    run_rules(subject, RULES, rules, folder, make_case)


def _steps(schema: Schema) -> Mapping[str, NDArray[Any]]:
    """Finite values of steps, an episode in five of them ended."""
    rng = np.random.default_rng(0)
    lead = (NUM_STEPS, NUM_ENVS)
    values: dict[str, NDArray[Any]] = {}
    for path, each in schema.fields.items():
        shape = (*lead, *each.shape)
        if each.dtype == "bool":
            values[path] = rng.random(shape) < 0.2
        elif each.numpy.kind in "iu":
            values[path] = rng.integers(0, 100, shape).astype(each.numpy)
        else:
            values[path] = rng.normal(0, 1, shape).astype(np.float32)
    return values


def _refuse_difference(expected: Batch, batch: Batch, what: str) -> None:
    """Compare the bits of two batches.

    Raises:
        ContractError: They differ.
    """
    if expected.fields.keys() != batch.fields.keys():
        raise ContractError(
            f"a batch {what} has the fields {list(batch.fields)}, and before "
            f"{list(expected.fields)}. Make a transform a function of steps and key."
        )
    for path, array in expected.fields.items():
        other = batch.fields[path]
        if _bits(array) != _bits(other):
            raise ContractError(
                f"field {path!r} of a batch {what} has other bits. Make the transform "
                "a function of the steps and the key alone: what it learns of earlier "
                "batches, such as a running scale, is computed once, as by "
                "mmreplay.field_moments, and given to it."
            )


def _bits(array: Any) -> tuple[Any, ...]:
    if isinstance(array, Ragged):
        return _bits(array.values), _bits(array.offsets), array.shape
    return array.dtype, array.shape, np.ascontiguousarray(array).tobytes()

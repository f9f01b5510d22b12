"""The contract of transforms notices state, and mmreplay's own transforms keep it."""

from dataclasses import dataclass, field

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.testing import TRANSFORM_RULES, ContractError, check_transform
from mmreplay.transforms.elementwise import elementwise

GOALS = mr.Schema.from_flat(
    {
        "observation/observation": mr.Field((3,), "float32"),
        "observation/achieved_goal": mr.Field((2,), "float32"),
        "observation/desired_goal": mr.Field((2,), "float32"),
        "action": mr.Field((2,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def scaled(fields, generator):
    return {**fields, "reward": fields["reward"] * generator.random()}


def reached(achieved, desired, info):
    return -np.abs(achieved - desired).sum(-1)


OURS = {
    "NStep": (lambda: mr.NStep(3, 0.9), None),
    "FrameStack": (lambda: mr.FrameStack(3), None),
    "ActionHistory": (lambda: mr.ActionHistory(2), None),
    "Delta": (mr.Delta, None),
    "Cast": (lambda: mr.Cast("float64", "reward"), None),
    "WithoutNext": (mr.WithoutNext, None),
    "Apply": (lambda: mr.Apply(scaled, random=True), None),
    "DiscountedReturn": (lambda: mr.DiscountedReturn(0.9), None),
    "HER": (lambda: mr.HER("future", 0.8, reached), GOALS),
    "two": (lambda: [mr.FrameStack(2), mr.NStep(2, 0.9)], None),
}


@pytest.mark.parametrize("name", OURS)
def test_our_transforms_are_values(name, tmp_path):
    make, schema = OURS[name]
    check_transform(make, tmp_path, schema=schema)


@dataclass
class Running:
    """Rewards over the greatest that was seen so far: a state."""

    greatest: list = field(default_factory=lambda: [1e-3])

    def bind(self, outline):
        def change(path, values):
            self.greatest[0] = max(self.greatest[0], float(np.abs(values).max()))
            return values / np.float32(self.greatest[0])

        paths = outline.pick("reward", "Running")
        return elementwise(outline, paths, "Running", lambda path, field: field, change)


@dataclass
class Counting(Running):
    """Rewards and how many batches were made."""

    def bind(self, outline):
        def change(path, values):
            self.greatest[0] += 1
            return values + np.float32(self.greatest[0])

        paths = outline.pick("reward", "Counting")
        return elementwise(outline, paths, "Counting", lambda path, field: field, change)


@dataclass
class Chance(Running):
    """Rewards and a number of a source of chance of its own."""

    def bind(self, outline):
        def change(path, values):
            return values + np.random.default_rng().random(dtype=np.float32)

        paths = outline.pick("reward", "Chance")
        return elementwise(outline, paths, "Chance", lambda path, field: field, change)


BROKEN = {
    "makes_equal_batches": (Counting, Chance),
    "depends_on_no_earlier_batch": (Running, Counting, Chance),
    "copies_by_pickle": (Counting, Chance),
    "makes_equal_windows": (Chance,),
}


@pytest.mark.parametrize("rule", TRANSFORM_RULES)
def test_a_transform_with_a_state_is_refused(rule, tmp_path):
    for kind in BROKEN[rule]:
        message = f"{kind.__name__} breaks rule '{rule}' .*field 'reward' of a batch"
        with pytest.raises(ContractError, match=message) as caught:
            check_transform(kind, tmp_path, rules=[rule])
        assert caught.value.rule == rule
        assert "such as a running scale, is computed once" in str(caught.value)

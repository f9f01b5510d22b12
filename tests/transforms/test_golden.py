"""Values that the systems this one learned from give, or should have given."""

import pytest

import mmreplay as mr

SCALAR = mr.Field((), "float64")
ENDS = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}


def of_alf(rows, capacity, transform):
    """A buffer of alf's rows (kind, discount, reward): F first, M middle, L last.

    alf's row holds the reward that led to it, a step here the one it led to, so the
    last row is the final one.
    """
    schema = mr.Schema(
        {"observation": mr.Field((), "int64"), "reward": SCALAR, "row_discount": SCALAR} | ENDS
    )
    buffer = mr.ReplayBuffer.create(None, schema, capacity, engine="memory", transforms=[transform])
    for number, (kind, discount, reward) in enumerate(rows):
        if number == 0 or kind == "F":
            before = discount
            continue
        ended = {"final_observation": [number]} if kind == "L" else {}
        buffer.add(
            **ended,
            observation=number - 1,
            reward=reward,
            row_discount=before,
            terminated=kind == "L" and discount == 0,
            truncated=kind == "L" and discount == 1,
        )
        before = discount
    return buffer


def returns(rows, capacity=32, **options):
    options.setdefault("discount", "row_discount")
    options.setdefault("discount_with", "observation")
    buffer = of_alf(rows, capacity, mr.DiscountedReturn(0.5, default=-7.0, **options))
    alive = buffer.gather_all()
    steps = alive.positions[~alive["final"]]
    if rows[-1][0] == "M":
        # Its next observation is yet to come.
        steps = steps[:-1]
    return buffer.take(0, steps)["discounted_return"].tolist()


G1 = [("F", 1, 0), ("M", 1, 1), ("L", 0, 2)]
G1 += [("F", 1, 10), ("M", 1, 20), ("M", 1, 30), ("L", 0, 40)]
G3 = [("F", 1, 0), ("M", 1, 1), ("M", 0, 2), ("M", 1, 3), ("L", 0, 4)]
G4 = [("F", 1, 0), *[("M", 1, i) for i in range(1, 5)], ("L", 0, 5)]
G6 = [("F", 0.9, 0), ("M", 0.9, 1), ("M", 0.9, 1), ("L", 0, 1)]


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        (G1, {}, [2, 2, 45, 50, 40]),
        ([("F", 1, 0), ("M", 1, 1), ("L", 1, 2), ("F", 1, 3)], {}, [-7, -7]),
        # A life lost is the end of what is to come; alf gives 2 for the third.
        (G3, {}, [2, 2, 0, 4]),
        (G4, {"capacity": 4}, [6.25, 6.5, 5]),
        ([("F", 1, 0), ("M", 1, 5), ("L", 0, -5)], {"clip": (-1, 1)}, [0.5, -1]),
        # The product of all discounts; alf counts each for its own term alone.
        (G6, {}, [1.48725, 1.305, 0.9]),
        ([("F", 1, 0), ("M", 1, 1), ("M", 1, 2)], {}, [-7]),
    ],
    ids=["episodes", "truncated", "life", "headless", "clip", "fraction", "running"],
)
def test_returns_are_those_of_alf(rows, options, expected):
    assert returns(rows, **options) == pytest.approx(expected, rel=1e-12)


def test_n_step_rewards_stop_at_a_terminal():
    schema = mr.Schema({"observation": mr.Field((), "int64"), "reward": SCALAR} | ENDS)
    buffer = mr.ReplayBuffer.create(
        None, schema, 16, engine="memory", transforms=[mr.NStep(3, 0.9)]
    )
    for number in range(6):
        buffer.add(observation=number, reward=1.0, terminated=number == 1, truncated=False)
    batch = buffer.take(0, [0, 1, 2])
    assert batch["reward"].tolist() == pytest.approx([1.9, 1, 2.71])
    assert batch["terminated"].tolist() == [True, True, False]
    assert batch["next_observation"][2] == 5
    assert batch["discount"].tolist() == pytest.approx([0, 0, 0.9**3], rel=1e-6)


def of_tmrl(images, actions):
    """Rows 0 to 11, each holding its number and the action that led there; 5 ends."""
    number = mr.Field((), "int64")
    schema = mr.Schema(
        {"observation": {"image": number, "act": number}, "action": number}
        | {"reward": SCALAR}
        | ENDS
    )
    buffer = mr.ReplayBuffer.create(
        None,
        schema,
        16,
        engine="memory",
        autoreset="next_step",
        transforms=[
            mr.FrameStack(images, "observation/image"),
            mr.FrameStack(actions, "observation/act"),
        ],
    )
    for row in range(12):
        buffer.add(
            observation={"image": row, "act": row},
            action=row + 1,
            reward=row + 1.0,
            terminated=row == 4,
            truncated=False,
        )
    return buffer


def rows_of(batch, i):
    names = ("observation/image", "observation/act", "next_observation/image")
    first = [batch[name][i].tolist() for name in names]
    acts = batch["next_observation/act"][i].tolist()
    return [*first, acts, int(batch["reward"][i]), bool(batch["terminated"][i])]


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (3, [[0, 1, 2, 3], [3], [1, 2, 3, 4], [4], 4, False]),
        (4, [[1, 2, 3, 4], [4], [2, 3, 4, 5], [5], 5, True]),
        (6, [[6, 6, 6, 6], [6], [6, 6, 6, 7], [7], 7, False]),
        (7, [[6, 6, 6, 7], [7], [6, 6, 7, 8], [8], 8, False]),
        (8, [[6, 6, 7, 8], [8], [6, 7, 8, 9], [9], 9, False]),
        (9, [[6, 7, 8, 9], [9], [7, 8, 9, 10], [10], 10, False]),
    ],
)
def test_histories_are_those_of_tmrl(position, expected):
    assert rows_of(of_tmrl(4, 1).take(0, [position]), 0) == expected


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (2, [[1, 2], [0, 1, 2], [2, 3], [1, 2, 3], 3, False]),
        (6, [[6, 6], [6, 6, 6], [6, 7], [6, 6, 7], 7, False]),
        (9, [[8, 9], [7, 8, 9], [9, 10], [8, 9, 10], 10, False]),
        # The newest transition, which tmrl cannot reach.
        (10, [[9, 10], [8, 9, 10], [10, 11], [9, 10, 11], 11, False]),
    ],
)
def test_histories_of_two_lengths_are_those_of_tmrl(position, expected):
    assert rows_of(of_tmrl(2, 3).take(0, [position]), 0) == expected

"""Rings whose exported rows others filter, and a twin of what must come back.

The twin is plain Python: it knows the rows of the source and which of them a condition
keeps, and says which steps, ends, episodes and next observations are left.
"""

import random

import numpy as np

import mmreplay as mr

AUTORESETS = ("disabled", "same_step", "next_step")
NOTES = ("go", "", 'say "no", then', "å")
START, TERMINATED, TRUNCATED, FINAL, BREAK = 1, 2, 4, 8, 16
SCHEMA = mr.Schema(
    {
        "observation": mr.Field((2,), "float32"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
        "note": mr.Field.text(max_bytes=16),
    }
)


def record(path, autoreset, seed):
    """A ring of three environments that came round, with every kind of end."""
    rng = np.random.default_rng(seed)

    def observed():
        # Eighths: csv parsers that round give the same bits.
        return (rng.integers(0, 1 << 20, (3, 2)) / 8).astype(np.float32)

    with mr.ReplayBuffer.create(
        path, SCHEMA, 40, 3, autoreset=autoreset, commit_every=None, heap_bytes=8192
    ) as buffer:
        for number in range(int(rng.integers(20, 90))):
            drawn = rng.random(3)
            step = {
                "observation": observed(),
                "action": rng.integers(0, 100, 3),
                "reward": rng.integers(-40, 40, 3) / 8,
                "terminated": drawn < 0.12,
                "truncated": drawn > 0.92,
                "note": [NOTES[n] for n in rng.integers(0, len(NOTES), 3)],
            }
            over = step["terminated"] | step["truncated"]
            # Only some ends have a final observation, except where each must.
            if autoreset != "next_step" and over.any() and rng.random() < 0.7:
                buffer.add(step, final_observation=observed())
            else:
                buffer.add(step)
            if number % 17 == 16:
                buffer.end_episodes([int(rng.integers(3))])
    return path


def rows_of(path):
    """Every row as a dict, oldest first, environment by environment."""
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
        flags = buffer.flags(rows.env_ids, rows.positions)
        texts = rows["note"].text()
        return [
            {
                "env": int(rows.env_ids[n]),
                "position": int(rows.positions[n]),
                "flags": int(flags[n]),
                "observation": tuple(rows["observation"][n].tolist()),
                "step": (
                    int(rows["action"][n]),
                    float(rows["reward"][n]),
                    bool(rows["terminated"][n]),
                    bool(rows["truncated"][n]),
                    texts[n],
                ),
            }
            for n in range(len(flags))
        ]


def conditions(seed, columns):
    """Conditions on some of a file's columns, all of which must hold, or any."""
    rng = random.Random(seed)
    low = rng.randrange(0, 80)
    every = [
        ("action", "in", sorted(rng.sample(range(100), rng.choice((50, 80, 97))))),
        ("episode_index", "in", sorted(rng.sample(range(30), rng.randrange(1, 25)))),
        ("reward", ">", rng.randrange(-30, 10) / 8),
        ("_position", "between", (low, low + rng.randrange(1, 60))),
        ("_position", "not divided by", rng.randrange(2, 9)),
        ("step_index", "<", rng.randrange(1, 12)),
        ("_flags", "without", FINAL),
        ("_flags", "without", TERMINATED),
        ("_env_id", "in", sorted(rng.sample(range(3), rng.randrange(1, 3)))),
    ]
    every = [test for test in every if test[0] in columns]
    return rng.choice((all, all, any)), rng.sample(every, rng.randrange(1, 4))


def holds(value, operator, operand):
    """One condition on one value, as plain Python."""
    if operator == "in":
        return value in operand
    if operator == ">":
        return value > operand
    if operator == "<":
        return value < operand
    if operator == "between":
        return operand[0] <= value <= operand[1]
    if operator == "not divided by":
        return value % operand != 0
    return value & operand == 0


def expected(rows, retained):
    """The steps that are left, by environment.

    Args:
        rows: Of the source; see `rows_of`.
        kept: Which of them are in the file.

    Returns:
        By environment (observation, the other columns, whether an episode begins or,
        of the oldest step, None, next observation, whether it must be known). The next
        observation is None where it is unknown.
    """
    at = {(row["env"], row["position"]): row for row in rows}
    there = {(row["env"], row["position"]) for row, k in zip(rows, retained, strict=True) if k}
    found = {}
    for place in sorted(there):
        row = at[place]
        if row["flags"] & FINAL:
            continue
        env, position = place
        steps = found.setdefault(env, [])
        begins = bool(row["flags"] & START) or (env, position - 1) not in there
        after = at.get((env, position + 1), {"flags": START})
        ended = bool(row["flags"] & (TERMINATED | TRUNCATED))
        follows = (env, position + 1) in there
        if ended:
            follows &= bool(after["flags"] & FINAL)
        else:
            follows &= not after["flags"] & START
        steps.append(
            (
                row["observation"],
                row["step"],
                begins if steps else None,
                after["observation"] if follows else None,
            )
        )
    return found


def loaded(path):
    """What a buffer holds, as `expected` says it; and it is in order."""
    assert not mr.verify_buffer(path).findings
    rows = rows_of(path)
    found, numbers = {}, {}
    for row in rows:
        if row["flags"] & FINAL:
            continue
        steps = found.setdefault(row["env"], [])
        numbers[row["env"], row["position"]] = row["env"], len(steps)
        begins = bool(row["flags"] & START) if steps else None
        steps.append([row["observation"], row["step"], begins, None])
    with mr.ReplayBuffer.open(path) as buffer:
        view = buffer.view
        count = int(view.starts.lengths.sum()) - view.num_illegal
        if count:
            starts = view.start_at(np.arange(count))
            batch = buffer.take(*starts)
            for env, position, after in zip(
                *starts, batch["next_observation"].tolist(), strict=True
            ):
                env, number = numbers[int(env), int(position)]
                found[env][number][3] = tuple(after)
    return {env: [tuple(step) for step in steps] for env, steps in found.items()}


def compare(got, want):
    """Every step that is left is there, with its own ends and next observation."""
    assert got.keys() == want.keys()
    for env, steps in want.items():
        assert len(got[env]) == len(steps)
        for mine, (observation, step, begins, after) in zip(got[env], steps, strict=True):
            assert mine[:3] == (observation, step, begins)
            if step[2] and after is None:
                # What follows a termination does not count.
                continue
            assert mine[3] == after

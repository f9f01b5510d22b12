"""What a case may be, which pairs cannot be, and how cases are drawn.

A case names one value of each dimension. Pairs of values of two dimensions are what is
covered: a fault that needs three at once is found by chance.
"""

from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations

import numpy as np


@dataclass(frozen=True)
class Case:
    """One buffer: a value of each dimension, and the seed of what is random in it."""

    engine: str
    num_envs: int
    layout: str
    autoreset: str
    ends: str
    kind: str
    role: str
    next_observation: str
    history: str
    seed: int
    steps: int = 10


DIMENSIONS = {
    "engine": ("memmap", "zarr", "memory"),
    "num_envs": (1, 3),
    "layout": ("env_major", "time_major"),
    "autoreset": ("disabled", "same_step", "next_step"),
    "ends": (
        "terminated",
        "truncated",
        "final",  # truncated with the final observation
        "end_episodes",
        "discard",  # end_episodes, some of which discard
        "break",  # reopened with on_resume="break", and so on
        "truncate",
        "continue",
        "partial",  # each add is of some environments
    ),
    "kind": (
        "vector",
        "scalar",
        "large",
        "nested",
        "mutable",
        "numbers",  # of any length
        "text",
        "bytes",
        "png",  # images
        "jpeg",
        "bool",
        "float16",
        "bfloat16",
        "agents",
    ),
    "role": ("observation", "extra"),  # where the field of that kind is
    "next_observation": ("stored", "derived", "absent"),
    "history": (
        "fresh",
        "wrapped",
        "cleared",
        "dequeued",
        "grown",
        "shrunk",
        "field_added",
        "snapshot",
        "compacted",
        "repaired",
        "npz",  # exported and loaded, and so on
        "pt",
        "csv",
        "parquet",
        "safetensors",
        "concatenated",  # the consumers draw from three such buffers, joined
        "split",  # and from one of two parts
    ),
}
"""The first value of each is the plainest, which shrinking tries."""

_VARYING = ("numbers", "text", "bytes", "png", "jpeg")

IMPOSSIBLE = (
    (
        {"engine": ("memory",), "ends": ("break", "truncate", "continue")},
        "a buffer in memory has no folder to open again",
    ),
    (
        {"engine": ("memory",), "history": ("snapshot", "compacted", "repaired")},
        "a buffer in memory has no folder to copy",
    ),
    (
        {"engine": ("zarr",), "layout": ("time_major",), "kind": _VARYING},
        "shards of values that vary are of one environment each",
    ),
    ({"autoreset": ("next_step",), "ends": ("final",)}, "the next row is the final one"),
    ({"kind": ("agents",), "role": ("observation",)}, "the ends of agents are fields of their own"),
    ({"role": ("observation",), "next_observation": ("absent",)}, "there is no observation"),
    (
        {"ends": ("final",), "next_observation": ("absent", "stored")},
        "final observations are stored where next ones are derived",
    ),
    ({"kind": ("bfloat16",), "history": ("csv",)}, "csv has no bfloat16"),
)
"""Values that cannot be together, and why: two of them are an impossible pair."""


def pairs_of(case):
    """All pairs of values of a case, as (dimension, value, dimension, value)."""
    values = [(name, getattr(case, name)) for name in DIMENSIONS]
    return [(*one, *other) for one, other in combinations(values, 2)]


def possible_pairs():
    """All pairs of values that a case may have."""
    return [
        (one, a, other, b)
        for one, other in combinations(DIMENSIONS, 2)
        for a in DIMENSIONS[one]
        for b in DIMENSIONS[other]
        if not any(
            set(rule) == {one, other} and a in rule[one] and b in rule[other]
            for rule, _ in IMPOSSIBLE
        )
    ]


def impossible(case):
    """The reason for which a case cannot be, or None."""
    for rule, reason in IMPOSSIBLE:
        if all(getattr(case, name) in values for name, values in rule.items()):
            return reason
    return None


def draw_cases(count, seed):
    """Draw cases; each has the most new pairs of some that were drawn at random.

    Args:
        count: Cases.
        seed: The same cases for the same seed; a longer run begins with a shorter one.
    """
    rng = np.random.default_rng(seed)
    seen = dict.fromkeys(possible_pairs(), 0)
    for number in range(count):
        tried = [_random_case(rng, seed * 1_000_000 + number) for _ in range(12)]
        # The rarest pair counts for the most.
        best = max(tried, key=lambda c: sum(4.0 ** -seen[p] for p in pairs_of(c)))
        for pair in pairs_of(best):
            seen[pair] += 1
        yield best


def _random_case(rng, seed):
    while True:
        values = {n: v[int(rng.integers(len(v)))] for n, v in DIMENSIONS.items()}
        case = Case(**values, seed=seed, steps=int(rng.integers(6, 15)))
        if impossible(case) is None:
            return case


def simpler(case):
    """Cases that are simpler by one change, the boldest first."""
    for name, values in DIMENSIONS.items():
        value = getattr(case, name)
        for plainer in values[: values.index(value)]:
            found = replace(case, **{name: plainer})
            if impossible(found) is None:
                yield found
    for steps in (case.steps // 2, case.steps - 1):
        if 1 <= steps < case.steps:
            yield replace(case, steps=steps)


def written(case):
    """The call that makes a case again."""
    values = ", ".join(f"{name}={value!r}" for name, value in asdict(case).items())
    return f"Case({values})"


assert {f.name for f in fields(Case)} == {*DIMENSIONS, "seed", "steps"}

"""Draws by a column go on exactly: from a state, over a reopening, through a loader."""

import numpy as np
import pytest

import mmreplay as mr

ROWS = 400
FIELDS = {
    "group": mr.Field((), "int64"),
    "version": mr.Field((), "int64"),
    "terminated": mr.Field((), "bool"),
}


def stale(sampler):
    return mr.StalenessSampler("version", 9, 6, sampler=sampler, seed=3)


def groups():
    return mr.GroupSampler("group", rows=4, seed=1)


def prioritized():
    return mr.PrioritizedSampler(seed=2)


INNER = {
    "groups": groups,
    "recent": lambda: stale(None),
    "weighted": lambda: mr.StalenessSampler("version", 9, 6, lambda behind: 0.8**behind, seed=3),
    "recent groups": lambda: stale(groups()),
    "recent distinct": lambda: stale(mr.DistinctSampler(seed=2)),
    "recent by priority": lambda: stale(prioritized()),
    "distinct": lambda: mr.DistinctSampler(seed=2),
    "by priority": prioritized,
}


def counted(inner, maximum=2, **options):
    return lambda: mr.UseCounter(maximum, INNER[inner](), seed=4, **options)


SAMPLERS = INNER | {
    f"uses of {name}": counted(name, maximum=1 if "groups" in name else 2) for name in INNER
}
LEASED = {f"leases of {name}": counted(name, 1, lease_s=3600) for name in INNER}


def ring(path, sampler):
    """Rows of groups of four and versions 0 to 9; each is a legal start."""
    numbers = np.arange(ROWS)
    buffer = mr.ReplayBuffer.create(
        path, mr.Schema(FIELDS), ROWS, autoreset="same_step", sampler=sampler
    )
    buffer.extend(group=numbers // 4, version=numbers // 40, terminated=np.ones(ROWS, bool))
    return buffer


def learned(buffer, draws, size=6):
    """What is drawn, while what was drawn gets priorities of its own."""
    found = []
    for _ in range(draws):
        batch = buffer.sample(size)
        found.append((batch.positions.tolist(), batch.probabilities.tolist()))
        if buffer.sampler.keeps_priorities:
            buffer.update_priorities(batch, np.abs(np.sin(7.0 * batch.positions)))
    return found


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.sliced(8)
def test_a_run_goes_on_exactly_over_a_reopening(tmp_path, kind):
    make = SAMPLERS[kind]
    with ring(tmp_path / "whole", make()) as buffer:
        expected = learned(buffer, 9)
    with ring(tmp_path / "cut", make()) as buffer:
        assert learned(buffer, 5) == expected[:5]
        state = buffer.sampler.state_dict()
    # Priorities and counts are those on disk, and the state has the rest.
    sampler = make()
    sampler.load_state_dict(state)
    with mr.ReplayBuffer.open(tmp_path / "cut", "r+", sampler=sampler) as buffer:
        assert learned(buffer, 4) == expected[5:]


@pytest.mark.parametrize("kind", INNER)
def test_a_run_goes_on_exactly_from_a_state_of_the_same_buffer(tmp_path, kind):
    make = INNER[kind]
    with ring(tmp_path / "ring", make()) as buffer:
        learned(buffer, 5)
        options = {"priorities": True} if buffer.sampler.keeps_priorities else {}
        state = buffer.sampler.state_dict(**options)
        expected = learned(buffer, 4)
        buffer.sampler.load_state_dict(state)
        assert learned(buffer, 4) == expected


@pytest.mark.parametrize("kind", INNER | LEASED)
@pytest.mark.sliced(8)
def test_a_loader_goes_on_exactly_over_a_reopening(tmp_path, kind):
    """Batches that were drawn ahead are lost: their leases end with the process."""
    make = (INNER | LEASED)[kind]
    leased = kind in LEASED

    def loaded(buffer, loader, count):
        found = []
        for _, batch in zip(range(count), loader, strict=False):
            found.append(np.asarray(batch.positions).tolist())
            if leased:
                buffer.acknowledge(batch)
        return found

    def opened(path, sampler):
        buffer = mr.ReplayBuffer.open(path, "r+", sampler=sampler)
        return buffer, mr.ReplayLoader(buffer, batch_size=6)

    for name in ("whole", "cut"):
        ring(tmp_path / name, None).close()
    buffer, loader = opened(tmp_path / "whole", make())
    with buffer, loader:
        expected = loaded(buffer, loader, 9)
    buffer, loader = opened(tmp_path / "cut", make())
    with buffer, loader:
        assert loaded(buffer, loader, 5) == expected[:5]
        state = loader.state_dict()
    buffer, loader = opened(tmp_path / "cut", make())
    with buffer, loader:
        loader.load_state_dict(state)
        assert loaded(buffer, loader, 4) == expected[5:]

"""The rules of values in shards hold in a model, and each mutant of one is caught.

``HEAP_MODEL_WORLDS=2000`` runs as many worlds of each kind, as for `test_heap_model`.
"""

import os
import random
from collections import Counter

import pytest

from tests.heap.heap_model import Violation
from tests.heap.sealed_model import SealedMutant, SealedWorld

pytestmark = pytest.mark.model

WORLDS = int(os.environ.get("HEAP_MODEL_WORLDS", "0"))
STEPS = 2000
FIRST_SEED = random.SystemRandom().randrange(1 << 40) if WORLDS else 0

KINDS = {
    "any values": {},
    "longest values": {"lengths": "longest"},
    "few commits": {"lengths": "longest", "commits": 0.1},
    "a shard a row": {"lengths": "longest", "shard_rows": 1},
    "blocks": {"lengths": "longest", "block": 4, "row_reserve": 4, "slots": 20},
    "two environments": {"num_envs": 2, "lengths": "longest"},
    "two fields": {"max_lengths": (3, 1), "lengths": "extremes", "shard_rows": 1},
    "a heap whose end is skipped": {
        "heap_size": 13,
        "shard_rows": 1,
        "max_lengths": (3,),
        "lengths": "longest",
    },
}


def broken(world):
    """What a world breaks, or None."""
    try:
        world.run(STEPS)
    except Violation as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sliced(3)
def test_the_rules_hold(kind):
    for seed in range(FIRST_SEED, FIRST_SEED + (WORLDS or 2)):
        world = SealedWorld(seed, **KINDS[kind])
        assert broken(world) is None, f"seed {seed}"
        assert world.seen["power cuts checked"] > STEPS // 4


@pytest.mark.slow
def test_the_worlds_meet_every_case():
    seen = Counter()
    for seed in range(8):
        world = SealedWorld(seed, lengths="longest", shard_rows=1 + seed % 2)
        assert broken(world) is None
        seen.update(world.seen)
    for event in (
        "commits",
        "drops",
        "clears",
        "kills",
        "power cuts",
        "raises",
        "seals",
        "unseals",
        "reads of shards",
        "reads again",
    ):
        assert seen[event] >= 5, event


def opened(mutants):
    world = SealedWorld(mutants=mutants)
    world.finish_opening()
    return world


def add(world, count):
    """Add longest rows to environment 0, each published alone."""
    for _ in range(count):
        world.finish(world.add({0: [[2]]}))


def raise_before_the_sync(world):
    """Raise the heap tail while the thread that seals waits for its sync."""
    add(world, 3)
    world.finish(world.commit())
    seal = world.seal(0, 0)
    while not world.number_of(0, 0):
        next(seal)
    world.finish(world.raise_tails([world.heap_size + 4]))


def overwrite_under_a_reader(world):
    """Seal, give up and overwrite a value that is being read."""
    add(world, 8)
    read = world.read_row(world.newest_live(None), 0, 0)
    next(read)
    next(read)
    world.finish(world.commit(), world.seal(0, 0))
    add(world, 1)
    world.finish(read)


def pass_what_is_not_committed(world):
    """Raise the heap tail past a range that is complete in the live slot alone."""
    add(world, 1)
    world.finish(world.commit())
    add(world, 1)
    world.finish(world.seal(0, 0), world.raise_tails([world.heap_size + 4]))


def seal_what_was_dequeued(world):
    """Seal a row that a power cut brings back."""
    add(world, 2)
    world.finish(world.commit(), world.drop(0, 1), world.seal(0, 0))


STORIES = {
    SealedMutant.GIVES_UP_BEFORE_SYNC: raise_before_the_sync,
    SealedMutant.READERS_IGNORE_NUMBERS: overwrite_under_a_reader,
    SealedMutant.GIVES_UP_ABOVE_DURABLE_HEAD: pass_what_is_not_committed,
    SealedMutant.SEALS_BY_LIVE_TAILS: seal_what_was_dequeued,
}


@pytest.mark.parametrize("mutant", SealedMutant, ids=lambda mutant: mutant.name)
def test_a_story_shows_the_mutant(mutant):
    STORIES[mutant](opened([]))
    with pytest.raises(Violation):
        STORIES[mutant](opened([mutant]))


# The first seeds of random worlds that catch these, out of sixty.
CAUGHT = {
    SealedMutant.GIVES_UP_ABOVE_DURABLE_HEAD: ("few commits", 0),
    SealedMutant.SEALS_BY_LIVE_TAILS: ("few commits", 2),
}


@pytest.mark.parametrize("mutant", CAUGHT, ids=lambda mutant: mutant.name)
def test_a_random_world_catches_the_mutant(mutant):
    kind, seed = CAUGHT[mutant]
    assert broken(SealedWorld(seed, mutants=[mutant], **KINDS[kind])) is not None
    assert broken(SealedWorld(seed, **KINDS[kind])) is None


def test_removed_values_are_overwritten_though_no_range_is_complete():
    # Sixteen units of values that are cleared, and a range that is never full.
    world = opened([])
    for _ in range(9):
        add(world, 1)
        world.finish(world.clear(), world.commit())
    assert world.live.heap_heads[0] > world.heap_size

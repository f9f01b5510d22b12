"""The laws of the heap hold in a model, and each mutant that breaks one is caught.

``HEAP_MODEL_WORLDS=2000 pytest tests/heap/test_heap_model.py`` runs as many worlds of
each kind, from fresh seeds, for as long as that takes (about 0.1 s a world); by default
a few with fixed seeds.
"""

import os
import random

import pytest

from tests.heap.heap_model import DURABLE, Mutant, Violation, World

pytestmark = pytest.mark.model

WORLDS = int(os.environ.get("HEAP_MODEL_WORLDS", "0"))
STEPS = 2000
FIRST_SEED = random.SystemRandom().randrange(1 << 40) if WORLDS else 0

KINDS = {
    "one field": {},
    "two fields": {"max_lengths": (1, 1)},
    "two fields of several sizes": {"max_lengths": (3, 1), "heap_size": 17},
    "a heap whose end is skipped": {"heap_size": 9, "lengths": "longest"},
    "empty values only": {"lengths": "zero"},
    "empty and longest values": {"lengths": "extremes"},
    "two environments": {"num_envs": 2},
    "blocks": {"block": 8, "row_reserve": 8, "slots": 30, "capacity": 20},
    "no commits": {"commits": 0},
    "rows that end by capacity": {"heap_size": 40, "slots": 6, "capacity": 2},
    "a heap of two longest rows": {"heap_size": 4},
}


def broken(world, steps=STEPS):
    """What a world breaks in so many steps, or None."""
    try:
        world.run(steps)
    except Violation as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sliced(3)
def test_the_rules_hold(kind):
    for seed in range(FIRST_SEED, FIRST_SEED + (WORLDS or 2)):
        world = World(seed, **KINDS[kind])
        assert broken(world) is None, f"seed {seed}"
        assert world.seen["power cuts checked"] > STEPS // 4


@pytest.mark.slow
def test_the_worlds_meet_every_case():
    seen = World().seen
    for seed in range(4):
        for heap_size in (4, 8):
            world = World(seed, heap_size=heap_size)
            assert broken(world) is None
            seen.update(world.seen)
    for event in (
        "commits",
        "drops",
        "clears",
        "kills",
        "power cuts",
        "raises",
        "raises that empty the ring",
        "reads",
        "reads discarded",
    ):
        assert seen[event] >= 5, event


# The first seeds that catch each: found by 200 worlds, which caught every one of them.
CAUGHT = {
    Mutant.RAISE_REPEATS_HEADS: ({}, 1),
    Mutant.COMMIT_WRITES_EARLY_TAILS: ({}, 2),
    Mutant.READERS_CHECK_LIMITS_ONLY: ({}, 1),
    Mutant.EMPTY_VALUES_IN_RANGE: ({}, 6),
    Mutant.TRUSTS_UNSYNCED_SLOT: ({}, 48),
    Mutant.NO_RAISE_ABOVE_DURABLE_HEAD: ({"commits": 0.05}, 23),
    Mutant.OPENING_TAKES_LIVE_TAILS: ({"lengths": "longest"}, 4),
    Mutant.BLOCK_NOT_SPLIT: (KINDS["blocks"], 3),
    Mutant.HEAP_NOT_SYNCED: ({}, 2),
    Mutant.LIVE_SLOT_LATE: ({}, 2),
}


@pytest.mark.parametrize("mutant", Mutant, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant):
    kind, seed = CAUGHT[mutant]
    assert broken(World(seed, mutants=[mutant], **kind)) is not None
    # By the mutant, and not by the world.
    assert broken(World(seed, **kind)) is None


# The three that random worlds find last, each by the shortest story that shows it.


def opened(mutants=()):
    world = World(mutants=mutants)
    world.finish_opening()
    return world


def add(world, *lengths):
    """Add rows to environment 0, each published alone."""
    for each in lengths:
        world.finish(world.add({0: [[each]]}))


def commit_during_a_raise(mutants):
    """Commit while the writer laps the heap."""
    world = opened(mutants)
    add(world, 2, 2, 2, 2)
    commit = world.commit()
    next(commit)
    # The commit has looked at the published record and waits for its sync. The writer
    # overwrites the heap from its beginning on.
    add(world, 2, 2)
    world.finish(commit)
    return world


def overwrite_after_reopening(mutants):
    """Dequeue, kill, open, and overwrite what was dequeued."""
    world = opened(mutants)
    add(world, 2, 2, 2, 2)
    world.finish(world.commit(), world.drop(0, 3))
    world.kill()
    world.finish_opening()
    # The durable slots still count the rows that were dequeued.
    add(world, 2)
    return world


def empty_value_before_the_end(mutants):
    """Store an empty value right before units that are skipped at the ring's end."""
    world = opened(mutants)
    add(world, 2, 2, 2, 1)
    # Position 7 of 8: the next two units begin at 8, and the row before them has none.
    add(world, 0, 2, 2, 2, 2)
    return world


STORIES = {
    Mutant.COMMIT_WRITES_EARLY_TAILS: commit_during_a_raise,
    Mutant.OPENING_TAKES_LIVE_TAILS: overwrite_after_reopening,
    Mutant.EMPTY_VALUES_IN_RANGE: empty_value_before_the_end,
}


@pytest.mark.parametrize("mutant", STORIES, ids=lambda mutant: mutant.name)
def test_a_story_shows_the_mutant(mutant):
    story = STORIES[mutant]
    assert story([]).live.heads[0] >= 5
    with pytest.raises(Violation):
        story([mutant])


def test_a_durable_record_that_is_emptied_says_so_itself():
    world = opened()
    add(world, 2, 2, 2, 2, 2)
    durable = world.files.read((DURABLE, world.durable_slot))
    assert durable.heads == durable.tails > (0,)
    assert durable.heap_heads == durable.heap_tails > (0,)

"""Any sampler's steps and windows go through any transforms, here and elsewhere."""

import numpy as np
import pytest

import mmreplay as mr
from tests.transforms.world import FIELDS, World, distance

TRANSFORMS = [
    mr.FrameStack(3, "observation/frame"),
    mr.DiscountedReturn(0.9, default=-1.0, time_limit="none"),
    mr.GAE(0.9, 0.8, "action", default=-1.0),
    mr.NStep(3, 0.9),
]
SAMPLERS = {
    "uniform": lambda: mr.UniformSampler(seed=0),
    "prioritized": lambda: mr.PrioritizedSampler(seed=0),
    "recent": lambda: mr.RecentSampler(9, 0.5, seed=0),
    "shuffled": lambda: mr.ShuffledSampler(seed=0),
}
BOUNDARIES = ["episode", "any", "pad"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:windows with boundary='any' hold steps whose next observation is unknown"
)


def filled(sampler, transforms, path=None):
    """Episodes of all lengths and ends in a ring that has wrapped."""
    world = World(40, 2, "disabled", False, transforms, path)
    rng = np.random.default_rng(0)
    for _ in range(70):
        kinds = rng.choice(["", "", "", "", "t", "u"], 2).tolist()
        world.add(kinds, final=bool(rng.integers(2)))
    world.sampler = sampler
    return world


def sample(world, sampler, batch_size):
    """Draw through the buffer with another sampler than the scripted one."""
    view = world.buffer._reader
    with view.lock:
        draw = sampler.draw(view, batch_size)
    return draw, world.buffer.gather(draw)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_each_step_of_a_window_is_what_that_step_is_alone(name, boundary):
    sampler = mr.SequenceSampler(4, SAMPLERS[name](), boundary=boundary)
    world = filled(sampler, TRANSFORMS)
    draw, batch = sample(world, sampler, 8)
    steps = draw.windows.positions
    assert steps.shape == (8, 4)
    # What is no transition cannot be taken alone: the oracle has it.
    legal = {row[:2] for row in world.legal()}
    places = list(zip(np.repeat(draw.env_ids, 4).tolist(), steps.ravel().tolist(), strict=True))
    known = np.array([place in legal for place in places])
    assert not (batch.mask.ravel() & ~known).any()
    alone = world.buffer.take(*np.array(places)[known].T)
    for path, array in alone.fields.items():
        windows = batch[path].reshape(-1, *array.shape[1:])[known]
        np.testing.assert_array_equal(windows, array, err_msg=path)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_draw_gathered_again_gives_the_same_hindsight(name):
    sampler = SAMPLERS[name]()
    world = filled(sampler, [mr.HER("future", 0.5, distance), *TRANSFORMS[::3]])
    _, batch = sample(world, sampler, 32)
    again = world.buffer.take(batch.env_ids, batch.positions, key=batch.key)
    for path, array in batch.fields.items():
        np.testing.assert_array_equal(array, again[path], err_msg=path)
    assert len(set((batch["observation/desired_goal"][:, 0] > 0).tolist())) == 2


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_windows_of_priorities_share_their_goal_within_an_episode(boundary):
    sampler = mr.SequenceSampler(4, mr.PrioritizedSampler(seed=0), boundary=boundary)
    her = mr.HER("final", 1.0, distance)
    world = filled(sampler, [her, mr.NStep(2, 0.9)])
    draw, batch = sample(world, sampler, 64)
    begin = {row[:2]: row[2].begin for row in world.rows()}
    goals = batch["observation/desired_goal"]
    several = 0
    for i, env_id in enumerate(draw.env_ids.tolist()):
        of = [begin[env_id, step] for step in draw.windows.positions[i].tolist()]
        for episode in set(of):
            some = goals[i, [b == episode for b in of] & batch.mask[i]]
            relabelled = some[:, 0] > 0
            assert relabelled.all() or not relabelled.any()
            if relabelled.all():
                assert (some == some[:1]).all()
        several += len(set(of)) > 1
    assert (several > 0) == (boundary == "any")


def test_a_reader_gathers_what_the_writer_drew(tmp_path):
    sampler = mr.UniformSampler(seed=0)
    transforms = [mr.HER("episode", 0.8, distance), *TRANSFORMS[::3]]
    world = filled(sampler, transforms, tmp_path / "buffer")
    draw, batch = sample(world, sampler, 32)
    reader = mr.ReplayBuffer.open(tmp_path / "buffer", "r", transforms=transforms)
    again = reader.gather(draw)
    for path, array in batch.fields.items():
        np.testing.assert_array_equal(array, again[path], err_msg=path)


def test_priorities_of_folded_steps_flow_back():
    schema = mr.Schema(FIELDS)
    buffer = mr.ReplayBuffer.create(
        None,
        schema,
        40,
        engine="memory",
        transforms=TRANSFORMS,
        sampler=mr.PrioritizedSampler(1.0, 0.0, eps=0.0, seed=0),
    )
    world = World(40, 1, "disabled", False, TRANSFORMS)
    world.buffer = buffer
    for number in range(30):
        world.add(["t" if number % 9 == 8 else ""])
    batch = buffer.sample(200)
    assert buffer.update_priorities(batch, np.zeros(200)) == 0
    drawn = set(batch.positions.tolist())
    assert len(drawn) == len(world.legal())
    one = buffer.take(0, [3])
    assert buffer.update_priorities(one, np.ones(1)) == 0
    assert set(buffer.sample(50).positions.tolist()) == {3}

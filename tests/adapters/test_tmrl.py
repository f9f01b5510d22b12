"""tmrl's memories on disk: rounds, samples, and histories by the golden table."""

from collections import Counter

import numpy as np
import pytest
import torch

from mmreplay.adapters.common import values
from mmreplay.adapters.tmrl import GenericTorchMemory, Memory, TorchMemory
from mmreplay.adapters.tmrl.nests import collate_torch
from mmreplay.errors import FormatError, SchemaError


class Buffer:
    """tmrl's, as far as memories look at it."""

    def __init__(self, memory=(), stat=0.0):
        self.memory = list(memory)
        self.stat_train_return = self.stat_test_return = stat
        self.stat_train_steps = self.stat_test_steps = stat

    def __len__(self):
        return len(self.memory)


def sample(number, end=None, act="number"):
    """A sample in which everything tells its number."""
    value = np.float32([number])
    act = value if act == "number" else act
    lidar = np.full((2,), number, np.float32)
    return act, (value, lidar), float(number), end == "term", end == "trunc", {}


def golden(**changes):
    """Rows 0 to 11, of which row 5 ends an episode."""
    ends = {5: "term"}
    return [sample(n, ends.get(n), **changes) for n in range(12)]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(memory_size=100, batch_size=4, name="ring", **options):
        memory = GenericTorchMemory(memory_size, batch_size, path=tmp_path / name, **options)
        made.append(memory)
        return memory

    yield make
    for memory in made:
        memory.close()


def item_of(memory, item):
    """What an item of a memory with histories holds, as numbers."""
    old, act, reward, new, terminated, _ = memory[item]

    def images(seen):
        return seen[1].reshape(-1, 2)[:, 0].astype(int).tolist()

    def acts(seen):
        return [int(a[0]) for a in seen[2:]]

    return (images(old), acts(old), int(act[0]), images(new), acts(new), reward, terminated)


def test_histories_of_four_images_and_one_action_are_the_golden_ones(make):
    memory = make(imgs_obs=4, act_buf_len=1)
    memory.append(Buffer(golden()))
    # Each of the 12 rows but the end and the newest begins a transition.
    assert len(memory) == 10
    of = {item_of(memory, i)[0][-1]: item_of(memory, i) for i in range(10)}
    assert list(of) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert of[3] == ([0, 1, 2, 3], [3], 4, [1, 2, 3, 4], [4], 4.0, 0.0)
    assert of[4] == ([1, 2, 3, 4], [4], 5, [2, 3, 4, 5], [5], 5.0, 1.0)
    assert of[6] == ([6, 6, 6, 6], [6], 7, [6, 6, 6, 7], [7], 7.0, 0.0)
    assert of[7] == ([6, 6, 6, 7], [7], 8, [6, 6, 7, 8], [8], 8.0, 0.0)
    assert of[8] == ([6, 6, 7, 8], [8], 9, [6, 7, 8, 9], [9], 9.0, 0.0)
    assert of[9] == ([6, 7, 8, 9], [9], 10, [7, 8, 9, 10], [10], 10.0, 0.0)
    # The newest transition, which tmrl's memory never draws.
    assert of[10] == ([7, 8, 9, 10], [10], 11, [8, 9, 10, 11], [11], 11.0, 0.0)


def test_histories_of_two_images_and_three_actions_are_the_golden_ones(make):
    memory = make(imgs_obs=2, act_buf_len=3, imgs_shape=(-1,))
    memory.append(Buffer(golden()))
    of = {item_of(memory, i)[0][-1]: item_of(memory, i) for i in range(10)}
    assert of[2][:3] == ([1, 2], [0, 1, 2], 3)
    assert of[6][:5] == ([6, 6], [6, 6, 6], 7, [6, 7], [6, 6, 7])
    assert of[9][:3] == ([8, 9], [7, 8, 9], 10)
    assert memory[0][0][1].shape == (4,)


@pytest.mark.parametrize("sizes", [[12], [1] * 12, [1, 4, 1, 6], [5, 7]])
def test_buffers_of_any_size_give_the_same_memory(make, sizes):
    rows = golden()
    memory = make(imgs_obs=2, act_buf_len=1)
    first = 0
    for size in sizes:
        memory.append(Buffer(rows[first : first + size]))
        first += size
    assert len(memory) == 10
    assert [item_of(memory, i)[2] for i in range(10)] == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


def test_random_episodes_are_those_of_a_list(make):
    rng = np.random.default_rng(0)
    memory = make(memory_size=30, imgs_obs=3, act_buf_len=2)
    rows = []
    for _ in range(25):
        count = int(rng.integers(0, 9))
        ends = rng.choice([None, "term", "trunc"], count, p=[0.7, 0.2, 0.1])
        new = [sample(len(rows) + n, ends[n]) for n in range(count)]
        rows += new
        memory.append(Buffer(new))
        check_against(memory, rows, 31)


def check_against(memory, rows, size):
    """Every legal transition, made by walking over the list."""
    first = max(0, len(rows) - size)
    ended = [row[3] or row[4] for row in rows]
    expected = []
    for now in range(first, len(rows) - 1):
        if ended[now]:
            continue
        begin = now
        while begin > 0 and not ended[begin - 1]:
            begin -= 1
        headless = begin < first
        if headless and now - first < 2:
            continue
        back = [max(begin, now - age) for age in (2, 1, 0)]
        ahead = [max(begin, now + 1 - age) for age in (2, 1, 0)]
        ends = float(rows[now + 1][3])
        expected.append((back, back[1:], now + 1, ahead, ahead[1:], float(now + 1), ends))
    assert [item_of(memory, i) for i in range(len(memory))] == expected


def test_a_round_is_as_many_batches_as_steps(make):
    memory = make(batch_size=5, nb_steps=3)
    memory.append(Buffer(golden()))
    batches = list(memory)
    assert len(batches) == 3
    for old, act, reward, new, terminated, truncated in batches:
        assert isinstance(old, tuple)
        assert old[1].shape == (5, 2)
        assert act.dtype == reward.dtype == terminated.dtype == torch.float32
        assert terminated.shape == truncated.shape == reward.shape == (5,)
        assert torch.equal(old[0] + 1, new[0])
        assert torch.equal(act[:, 0], reward)
        assert torch.equal(terminated, (reward == 5).float())


def test_a_preprocessor_changes_samples_and_batches_alike(make):
    def double(old, act, reward, new, terminated, truncated):
        return old, act * 2, reward, new, terminated, truncated

    memory = make(sample_preprocessor=double, batch_size=16)
    memory.append(Buffer(golden()))
    _, act, reward, *_ = memory.sample()
    assert torch.equal(act[:, 0], reward * 2)
    assert reward.dtype == torch.float32
    assert memory[0][1][0] == 2


def test_all_ends_end_the_draw_with_a_message_and_not_in_a_loop(make):
    memory = make()
    for draw in (memory.sample, lambda: list(memory.sample_indices())):
        with pytest.raises(ValueError, match="cannot draw 4 samples from a memory without"):
            draw()
    memory.append(Buffer([sample(n, "term") for n in range(5)]))
    assert len(memory) == 0
    with pytest.raises(ValueError, match="Append a buffer first"):
        memory.sample()
    with pytest.raises(IndexError, match="item 0 is not in a memory of 0 transitions"):
        memory[0]


def test_statistics_come_with_a_buffer_and_stay_on_disk(make):
    memory = make()
    memory.append(Buffer(golden(), stat=3.0))
    memory.append(Buffer([], stat=9.0))
    assert memory.stat_train_return == memory.stat_test_steps == 3.0
    memory.close()
    again = make(resume=True)
    assert again.stat_test_return == 3.0
    assert len(again) == 10
    assert [first_action(again, i) for i in (0, -1)] == [1, 11]
    # What comes after a resume does not follow what was before it.
    again.append(Buffer([sample(12), sample(13)]))
    assert [first_action(again, i) for i in (-2, -1)] == [11, 13]


def first_action(memory, item):
    return int(memory[item][1][0])


def test_another_size_or_crc_than_that_on_disk_is_refused(make):
    make().append(Buffer(golden()))
    with pytest.raises(FormatError, match="resume=True"):
        make()
    with pytest.raises(SchemaError, match=r"must hold 1 x 51 rows .* got 1 x 101"):
        make(memory_size=50, resume=True)
    with pytest.raises(FormatError, match="must be a memory made with crc_debug=True"):
        make(crc_debug=True, resume=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"memory_size": 0},
        {"memory_size": None},
        {"batch_size": 0},
        {"imgs_obs": 0},
        {"act_buf_len": -1},
        {"nb_steps": 1.5},
    ],
)
def test_numbers_that_make_no_sense_are_refused_at_once(make, bad):
    with pytest.raises(SchemaError, match=f"{next(iter(bad))} must be an integer"):
        make(**bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"imgs_scale": 0}, "imgs_scale must be a finite number above 0"),
        ({"imgs_scale": np.nan}, "imgs_scale must be a finite .* got nan"),
        ({"imgs_scale": "x"}, "imgs_scale must be a finite .* got .x."),
        ({"imgs_shape": 5}, "imgs_shape must be a tuple of integers, got 5"),
        ({"imgs_shape": (2.0,)}, "imgs_shape must be a tuple of integers"),
    ],
)
def test_what_images_are_made_with_is_judged_at_once(make, bad, message):
    with pytest.raises(SchemaError, match=f"^{message}"):
        make(**bad)


def test_a_shape_that_images_cannot_have_is_refused_before_there_is_a_ring(make):
    images = [plain((np.float32([1]), np.zeros((1, 4, 4), np.uint8))) for _ in range(3)]
    memory = make(imgs_obs=2, imgs_shape=(3, -1))
    with pytest.raises(SchemaError, match=r"imgs_shape \[3, -1\] does not fit images of"):
        memory.append_buffer(Buffer(images))
    assert not memory.home.path.exists()
    memory = make(imgs_obs=2, imgs_shape=(8, -1))
    memory.append_buffer(Buffer(images))
    assert memory.sample()[0][1].shape == (4, 8, 4)
    memory.close()
    with pytest.raises(SchemaError, match=r"imgs_shape .* does not fit"):
        make(imgs_obs=2, imgs_shape=(3,), resume=True)


def test_crc_debug_does_not_change_once_there_is_a_ring(make):
    memory = make()
    memory.crc_debug = True
    with pytest.raises(SchemaError, match="crc_debug: a sample has no 'crc_sample' in"):
        memory.append_buffer(Buffer([plain(1.0), plain(2.0)]))
    memory.crc_debug = False
    memory.append_buffer(Buffer([plain(1.0), plain(2.0)]))
    memory.crc_debug = False
    with pytest.raises(SchemaError, match="crc_debug cannot change"):
        memory.crc_debug = True
    assert memory.sample()[0].shape == (4,)


def test_actions_that_are_none_after_a_reset_are_zero(make):
    memory = make(act_buf_len=2)
    memory.append(Buffer([sample(0, act=None)]))
    assert len(memory) == 0
    memory.append(Buffer([sample(7), sample(8, "trunc"), sample(9, act=None)]))
    memory.append(Buffer([sample(10, act=None)]))
    old, act, _, new, *_ = memory[0]
    assert [int(a[0]) for a in (*old[2:], act, *new[2:])] == [0, 0, 7, 0, 7]
    assert memory[1][-1] == 1.0
    assert int(memory[2][1][0]) == 0


@pytest.mark.parametrize("first", [0, True, np.int32(0), torch.tensor(0)])
def test_rewards_are_floats_whatever_comes_first(make, first):
    memory = make()
    later = [torch.tensor(0.5, requires_grad=True), 0.25, 2, np.float32(0.75)]
    rows = [sample(n) for n in range(5)]
    rows = [(*r[:2], w, *r[3:]) for r, w in zip(rows, [first, *later], strict=True)]
    memory.append(Buffer(rows[:1]))
    memory.append(Buffer(rows[1:]))
    rewards = [memory[item][2] for item in range(len(memory))]
    assert rewards == [0.5, 0.25, 2, 0.75]


def plain(obs, act=0.0, reward=0.0):
    return (np.float32([act]), obs, reward, False, False, {})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            plain((np.ones(3, "f4"),)),
            r"observation/obs/0 must have one shape .* got \[\[2\], \[3\]",
        ),
        (plain([np.ones(2, "f4")]), r"Samples of one memory have one structure\."),
        (plain((np.array(["a", "b"]),)), "observation/obs/0"),
    ],
)
def test_a_first_append_that_is_refused_leaves_nothing(make, bad, message):
    memory = make(name="ring")
    with pytest.raises(SchemaError, match=message):
        memory.append(Buffer([plain((np.ones(2, "f4"),)), bad]))
    assert not memory.home.path.exists()
    memory.append(Buffer([plain((np.ones(3, "f4"),), reward=2.0)] * 3))
    assert memory[0][0][0].shape == (3,)


def test_whole_numbers_are_cast_where_they_fit(make):
    memory = make()
    for given in ("u1", "i8", "f4"):
        memory.append(Buffer([plain((np.array([3, 4], given),))] * 2))
    assert {memory[i][3][0].dtype for i in range(len(memory))} == {np.dtype("u1")}
    for other in (np.float32([3.5, 4]), np.array([300, 4])):
        with pytest.raises(SchemaError, match="observation/obs/0"):
            memory.append(Buffer([plain((other,))]))
    assert len(memory) == 5


@pytest.mark.parametrize(
    ("first", "other"),
    [("f4", np.array([2**53 + 1])), ("u8", np.array([-1])), ("?", np.array([2]))],
)
def test_whole_numbers_that_a_cast_would_change_are_refused(make, first, other):
    memory = make()
    memory.append(Buffer([plain((np.zeros(1, first),))] * 2))
    with pytest.raises(SchemaError, match="observation/obs/0"):
        memory.append(Buffer([plain((other,))]))
    assert len(memory) == 1


@pytest.mark.parametrize("last", [(), {}, {"a": ()}])
def test_an_observation_may_end_with_nothing_unless_images_are_there(make, last):
    memory = make()
    memory.append(Buffer([plain((np.float32([n]), last)) for n in range(4)]))
    assert memory[1][0][1] == last
    assert memory[1][0][0].tolist() == [1]
    other = make(name="other", imgs_obs=2)
    with pytest.raises(SchemaError, match="the last component of an observation must"):
        other.append(Buffer([plain((np.float32([1]), last))]))


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ({0: np.ones(1), "0": np.ones(1)}, r"sample: keys must differ as text, got \[0,"),
        ({"a/b": np.ones(1), "a": {"b": np.ones(1)}}, "observation/obs/a/b: two leaves have this"),
    ],
)
def test_keys_that_are_written_alike_are_refused(make, obs, message):
    with pytest.raises(SchemaError, match=message):
        make().append(Buffer([plain(obs)]))


def test_images_are_scaled_when_they_are_drawn(make):
    memory = make(imgs_obs=2, imgs_scale=256)
    pixels = np.arange(12, dtype=np.uint8).reshape(4, 3)
    rows = [
        (np.float32([0]), (np.float32([n]), pixels[n]), 0.0, False, False, {}) for n in range(4)
    ]
    memory.append(Buffer(rows))
    old, *_ = memory.sample()
    assert old[1].dtype == torch.float32
    assert old[1].shape == (4, 2, 3)
    assert (memory[1][0][1] == pixels[:2] / np.float32(256)).all()


def test_nested_observations_and_actions_keep_their_structure(make):
    def row(n):
        act = {"steer": np.float32([n]), "gas": np.int64(n)}
        return act, {"a": [np.int8([n])], "b": np.float64(n)}, n, False, False, {}

    memory = make(act_buf_len=2)
    memory.append(Buffer([row(n) for n in range(6)]))
    old, act, reward, *_ = memory.sample()
    assert reward.dtype == torch.float32
    assert torch.equal(act["gas"].float(), reward)
    assert act["gas"].dtype == torch.int64
    assert torch.equal(old[0]["a"][0][:, 0], old[2]["gas"].to(torch.int8))
    with pytest.raises(SchemaError, match=r"Samples of one memory have one structure\."):
        memory.append(Buffer([sample(1)]))
    assert len(memory) == 5


class Listed(TorchMemory):
    """A memory of somebody's own, in a list."""

    def append_buffer(self, buffer):
        self.data += buffer.memory

    def __len__(self):
        return max(0, len(self.data) - 1)

    def get_transition(self, item):
        (_, old, *_), (act, new, reward, *ends, info) = self.data[item : item + 2]
        return old, act, reward, new, *ends, info


def test_memories_of_ones_own_subclass_as_in_tmrl():
    with pytest.raises(TypeError, match="abstract"):
        Memory("cpu", 1)
    memory = Listed("cpu", nb_steps=2, batch_size=3)
    memory.append(Buffer(golden()))
    batches = list(memory)
    assert len(batches) == 2
    assert batches[0][1].shape == (3, 1)
    assert torch.equal(batches[0][1][:, 0], batches[0][2])


def test_subclasses_that_choose_their_samples_are_asked(make):
    class Last(GenericTorchMemory):
        def sample_indices(self):
            return [len(self) - 1] * self.batch_size

    memory = Last(50, 3)
    memory.append(Buffer(golden()))
    assert memory.sample()[2].tolist() == [11.0] * 3
    memory.close()


def test_draws_repeat_under_torchs_seed(make, monkeypatch):
    drawn = []
    for name in "ab":
        torch.manual_seed(2)
        monkeypatch.setattr(values, "_seeded", Counter())  # as a new process
        memory = make(name=name, batch_size=20)
        memory.append(Buffer(golden()))
        drawn.append((memory.sample()[2], list(memory.sample_indices())))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert drawn[0][1] == drawn[1][1]


def test_collating_keeps_structures_and_dtypes():
    batch = [({"a": np.int8([n])}, [n, float(n)], True, torch.ones(2)) for n in (1, 2)]
    a, (ints, floats), flags, tensors = collate_torch(batch)
    assert a["a"].dtype == torch.int8
    assert (ints.dtype, floats.dtype) == (torch.int64, torch.float32)
    assert flags.dtype == torch.bool
    assert tensors.shape == (2, 2)
    with pytest.raises(SchemaError, match=r"collate takes arrays, .* got a str"):
        collate_torch([("a",), ("b",)])
    with pytest.raises(SchemaError, match=r"collate needs at least one sample\. Use a"):
        collate_torch([])

"""A sampler of a user that says how it draws in one file is right everywhere."""

from collections import Counter

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.draws import draw_steps, parse_sampler
from mmreplay.page.requests import Refusal
from mmreplay.page.shown import ShownBuffer
from mmreplay.testing import check_sampler
from tests.combinations.own_sampler import ThirdsSampler
from tests.samplers.frequencies import assert_distribution

SCHEMA = mr.Schema({"uid": mr.Field((), "int64")})
SIZES = (7, 40, 3)


def made(count, sampler, first=0, path=None):
    """A buffer of steps that hold a number each."""
    buffer = mr.ReplayBuffer.create(
        path, SCHEMA, count, engine="memory" if path is None else "memmap", sampler=sampler
    )
    buffer.extend(uid=np.arange(first, first + count))
    return buffer


def several(sizes=SIZES):
    """Buffers whose steps are numbered one after another, and their probabilities."""
    firsts = np.cumsum([0, *sizes[:-1]]).tolist()
    buffers = [
        made(size, ThirdsSampler(n), first)
        for n, (size, first) in enumerate(zip(sizes, firsts, strict=True))
    ]
    masses = {
        first + position: 1.0 if position % 3 else 5.0
        for size, first in zip(sizes, firsts, strict=True)
        for position in range(size)
    }
    total = sum(masses.values())
    return buffers, {uid: mass / total for uid, mass in masses.items()}


def assert_drawn_by(batches, wanted):
    drawn = []
    for batch in batches:
        uids = np.asarray(batch["uid"]).tolist()
        drawn += uids
        np.testing.assert_allclose(batch.probabilities, [wanted[uid] for uid in uids])
        assert (np.asarray(batch.weights) == 1).all()
    assert_distribution(drawn, wanted)


@pytest.mark.slow
def test_it_keeps_the_contract(tmp_path):
    check_sampler(ThirdsSampler, tmp_path)


def test_it_draws_by_its_probabilities_from_one_buffer():
    (buffer,), wanted = several((40,))
    assert_drawn_by([buffer.sample(64) for _ in range(100)], wanted)


@pytest.mark.parametrize("sizes", [(40,), SIZES])
def test_several_buffers_as_one_have_its_probabilities(sizes):
    buffers, wanted = several(sizes)
    both = mr.concat(buffers, by="priority", seed=0)
    assert_drawn_by([both.sample(64) for _ in range(100)], wanted)
    with mr.ReplayLoader(both, 64) as loader:
        assert_drawn_by([batch for _, batch in zip(range(100), loader, strict=False)], wanted)


@pytest.mark.parametrize("options", [{}, {"shares": [1, 2, 1]}])
def test_by_rows_or_shares_each_buffer_is_drawn_from_by_itself(options):
    buffers, _ = several()
    both = mr.concat(buffers, **options, seed=0)
    uids = Counter()
    for _ in range(50):
        uids.update(both.sample(64)["uid"].tolist())
    assert uids.keys() == {*range(sum(SIZES))}


def test_a_split_buffer_has_its_probabilities():
    (buffer,), wanted = several((40,))
    part, rest = mr.split(buffer, [0.5, 0.5], by="step", seed=0)
    found = {}
    for each in (part, rest):
        buffer.sampler = each.sampler(ThirdsSampler(1))
        batches = [buffer.sample(64) for _ in range(100)]
        own = {*np.concatenate([batch["uid"] for batch in batches]).tolist()}
        total = sum(wanted[uid] for uid in own)
        assert_drawn_by(batches, {uid: wanted[uid] / total for uid in own})
        assert not found.keys() & own
        found |= dict.fromkeys(own)
    assert found.keys() == wanted.keys()


def test_a_loader_and_a_dataset_draw_by_its_probabilities():
    (buffer,), wanted = several((40,))
    with mr.ReplayLoader(buffer, 64) as loader:
        assert_drawn_by([batch for _, batch in zip(range(100), loader, strict=False)], wanted)


def test_windows_around_it_begin_by_its_probabilities():
    buffers, wanted = several()
    for buffer in buffers:
        buffer.sampler = mr.SequenceSampler(2, ThirdsSampler(0), boundary="pad")
    both = mr.concat(buffers, by="priority", seed=0)
    drawn = []
    for _ in range(100):
        batch = both.sample(64)
        drawn += batch["uid"][:, 0].tolist()
    assert_distribution(drawn, wanted)


def test_the_page_draws_by_its_probabilities(tmp_path):
    made(40, None, path=tmp_path / "b").close()
    _, wanted = several((40,))
    drawn = []
    for seed in range(30):
        answer = draw_steps(ShownBuffer(tmp_path / "b"), "ThirdsSampler(heavy=5.0)", seed)
        assert (answer["seed"], answer["count"]) == (seed, 256)
        drawn += answer["positions"].tolist()
        expected = [wanted[position] for position in answer["positions"].tolist()]
        np.testing.assert_allclose(answer["probabilities"], expected)
    assert_distribution(drawn, wanted)
    answer = draw_steps(ShownBuffer(tmp_path / "b"), "SequenceSampler(2, ThirdsSampler())", 0)
    assert answer["form"] == "windows of 2 steps"


def test_the_page_draws_by_no_class_that_it_cannot_describe():
    with pytest.raises(Refusal, match="Uneven cannot draw a batch in parts, which the page needs"):
        parse_sampler("Uneven()", 0)


def test_other_arguments_are_another_sampler():
    buffers, _ = several()
    buffers[1].sampler = ThirdsSampler(1, heavy=4.0)
    with pytest.raises(mr.SchemaError, match=r"heavy is 4\.0 in buffer 1, and 5\.0 in buffer 0"):
        mr.concat(buffers, by="priority")


class Uneven(ThirdsSampler):
    """Replaces the draw, and says nothing of several buffers."""

    def draw(self, view, batch_size):
        return mr.UniformSampler(0).draw(view, batch_size)


def test_a_draw_that_was_replaced_is_of_one_buffer_alone():
    buffers, _ = several()
    for buffer in buffers:
        buffer.sampler = Uneven(0)
    with pytest.raises(mr.SchemaError, match=r"^Uneven cannot draw a batch in parts, which concat"):
        mr.concat(buffers, by="priority")
    mr.concat(buffers, seed=0).sample(9)


def test_without_a_generator_it_says_what_to_set():
    class Bare(ThirdsSampler):
        def __init__(self):
            pass

        def state_dict(self):
            return {}

    with pytest.raises(TypeError, match=r"Bare needs a draw method, .* Set self\._random"):
        made(4, None).sample_by(Bare(), 2)


def test_mass_zero_is_nothing_to_draw():
    class Nothing(ThirdsSampler):
        def masses(self, view):
            env_ids, positions, masses = super().masses(view)
            return env_ids, positions, 0 * masses

    with pytest.raises(mr.EmptyError, match="cannot draw 2 steps: all 4 legal starts have mass 0"):
        made(4, Nothing(0)).sample(2)


def test_an_argument_that_no_attribute_holds_is_asked_for():
    class Forgets(mr.UniformSampler):
        def __init__(self, width):
            super().__init__(0)

        settings = ThirdsSampler.settings

    with pytest.raises(mr.SchemaError, match="Forgets must say with which width it was made"):
        Forgets(3).settings()

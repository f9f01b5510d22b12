"""Whole groups, against a loop over all rows."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mmreplay as mr
from mmreplay.errors import EmptyError, FormatError, SchemaError
from mmreplay.samplers.combine import RestrictedSampler
from tests.contracts.sampler import ListedView

FIELDS = {
    "prompt": mr.Field((), "int32"),
    "reward": mr.Field((), "float32", mutable=True),
    "observation": mr.Field((), "int8"),
    "terminated": mr.Field((), "bool"),
}


def ring(prompts, rewards=None, capacity=1000, num_envs=1, ends=True, **options):
    """A ring of steps of one episode each, or of one long episode."""
    buffer = mr.ReplayBuffer.create(
        None,
        mr.Schema(FIELDS),
        capacity,
        num_envs,
        engine="memory",
        autoreset="same_step",
        **options,
    )
    if len(prompts):
        extend(buffer, prompts, rewards, ends)
    return buffer


def extend(buffer, prompts, rewards=None, ends=True):
    shape = np.shape(prompts)
    buffer.extend(
        {
            "prompt": np.array(prompts, np.int32),
            "reward": np.zeros(shape, np.float32)
            if rewards is None
            else np.array(rewards, np.float32),
            "observation": np.zeros(shape, np.int8),
            "terminated": np.full(shape, ends),
        }
    )


def groups_of(buffer, rows=None, varies=False):
    """Complete groups, as tuples of (env_id, position), by a loop over all rows."""
    view = buffer.view
    starts = view.starts
    count = int(starts.lengths.sum()) - view.num_illegal
    legal = set(zip(*(a.tolist() for a in view.start_at(np.arange(count))), strict=True))
    every = buffer.gather_all()
    found = defaultdict(list)
    for number in range(len(every)):
        if not every["final"][number]:
            place = int(every.env_ids[number]), int(every.positions[number])
            found[int(every["prompt"][number])].append((place, float(every["reward"][number])))
    groups = set()
    for members in found.values():
        places = {place for place, _ in members}
        rewards = {reward for _, reward in members}
        if places <= legal and rows in (None, len(places)) and not (varies and len(rewards) == 1):
            groups.add(frozenset(places))
    return groups


def drawn_groups(draw):
    """The groups of a draw, as sets of places, in their order."""
    places = list(zip(draw.env_ids.tolist(), draw.positions.tolist(), strict=True))
    return [
        frozenset(places[first:stop])
        for first, stop in zip(draw.offsets[:-1], draw.offsets[1:], strict=True)
    ]


@settings(deadline=None)
@given(
    prompts=st.lists(st.integers(0, 6), min_size=2, max_size=40),
    capacity=st.integers(2, 30),
    envs=st.integers(1, 2),
    rows=st.sampled_from([None, 1, 2, 3]),
    varies=st.booleans(),
    ends=st.booleans(),
    data=st.data(),
)
def test_all_complete_groups_are_drawn_and_no_others(
    prompts, capacity, envs, rows, varies, ends, data
):
    steps = len(prompts) // envs
    block = np.array(prompts[: steps * envs]).reshape(steps, envs)
    rewards = (np.arange(steps * envs) % 3 == 0).reshape(steps, envs)
    with ring([], capacity=capacity, num_envs=envs) as buffer:
        buffer.view.column_index("prompt")  # from the first row on
        for first in range(0, steps, 3):
            extend(buffer, block[first : first + 3], rewards[first : first + 3], ends)
            buffer.view.column_index("prompt")
        expected = groups_of(buffer, rows, varies)
        where = "reward_varies" if varies else None
        sampler = mr.GroupSampler("prompt", rows, where, seed=data.draw(st.integers(0, 9)))
        if rows is None:
            # Of rows that left the index alone knows: tests/buffer/test_find.py.
            index = buffer.view.column_index("prompt")
            broken = {value for value in range(7) if index.look_up(np.array([value])).broken[0]}
            expected = {
                group
                for group in expected
                if int(buffer.get_field("prompt", *next(iter(group)))) not in broken
            }
        if not expected:
            with pytest.raises(EmptyError, match=r"cannot draw 50 (groups|steps)"):
                sampler.draw(buffer.view, 50)
            return
        for size in (50, 1, 2):
            draw = sampler.draw(buffer.view, size)
            found = drawn_groups(draw)
            assert len(found) == len(set(found)) == min(size, len(expected))
            assert set(found) <= expected
            assert draw.probabilities.min() > 0
            assert draw.probabilities.max() <= 1
            assert (draw.weights == 1).all()


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.sliced(1)
def test_each_group_is_drawn_equally_often(rows, size):
    # Groups of two among others, of five without rows=.
    prompts = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    if rows is None:
        prompts += [7] * 5 + [8]
    else:
        prompts += [7] * 5
    with ring(prompts) as buffer:
        groups = sorted(map(sorted, groups_of(buffer, rows)))
        sampler = mr.GroupSampler("prompt", rows, seed=1)
        counts = Counter()
        draws = 3000
        for _ in range(draws):
            counts.update(drawn_groups(sampler.draw(buffer.view, size)))
        observed = [counts[frozenset(group)] for group in groups]
        share = draws * size / len(groups)
        # Five standard deviations of a binomial, which drawing without replacement
        # does not exceed.
        assert np.abs(np.array(observed) - share).max() < 5 * np.sqrt(share)


def test_a_batch_holds_whole_groups_one_after_another():
    sampler = mr.GroupSampler("prompt", 3, seed=0)
    with ring([1, 2, 1, 2, 1, 2, 3], np.arange(7), sampler=sampler) as buffer:
        batch = buffer.sample(2)
        assert batch.offsets.tolist() == [0, 3, 6]
        assert sorted(map(tuple, batch["prompt"].reshape(2, 3).tolist())) == [(1, 1, 1), (2, 2, 2)]
        # Oldest first.
        assert (np.diff(batch.positions.reshape(2, 3), axis=1) > 0).all()
        assert batch.torch().offsets.tolist() == [0, 3, 6]


def test_a_group_waits_for_its_rows_and_ends_with_its_first_one():
    with ring([1, 1], capacity=6) as buffer:
        sampler = mr.GroupSampler("prompt", 3, seed=0)
        with pytest.raises(
            EmptyError,
            match="cannot draw 4 groups: none of the 2 legal starts is of a complete "
            r"group of 3 rows of field 'prompt'\. Add the rows that are missing, or",
        ):
            sampler.draw(buffer.view, 4)
        extend(buffer, [1])
        assert len(drawn_groups(sampler.draw(buffer.view, 4))) == 1
        extend(buffer, [2, 2, 2, 2])
        with pytest.raises(EmptyError, match="complete group of 3 rows"):
            sampler.draw(buffer.view, 4)
        every = mr.GroupSampler("prompt", seed=0)
        assert [len(group) for group in drawn_groups(every.draw(buffer.view, 9))] == [4]


def test_late_rewards_are_seen_and_a_callable_sees_the_rows():
    with ring([1, 1, 2, 2], [0, 0, 0, 0]) as buffer:
        sampler = mr.GroupSampler("prompt", 2, "reward_varies", seed=0)
        with pytest.raises(EmptyError, match="where= selects"):
            sampler.draw(buffer.view, 2)
        buffer.write_field("reward", [0], [3], [1.0])
        assert drawn_groups(sampler.draw(buffer.view, 2)) == [frozenset({(0, 2), (0, 3)})]
        asked = []

        def where(groups):
            asked.append(groups)
            best = np.maximum.reduceat(groups.read("reward"), groups.offsets[:-1])
            return best < 1

        chosen = mr.GroupSampler("prompt", where=where, seed=0)
        assert drawn_groups(chosen.draw(buffer.view, 2)) == [frozenset({(0, 0), (0, 1)})]
        groups = asked[0]
        assert sorted(groups.values.tolist()) == [1, 2]
        assert len(groups) == 2
        assert groups.read("prompt").tolist() == np.repeat(groups.values, 2).tolist()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.ones(3, bool), r"where must return bool\[1\], got bool\[3\]"),
        (np.ones(1), r"where must return bool\[1\], got float64\[1\]"),
        (None, r"where must return bool\[1\], got object\[\]"),
    ],
)
def test_an_answer_that_selects_nothing_is_refused(answer, message):
    with ring([1, 1]) as buffer:
        sampler = mr.GroupSampler("prompt", where=lambda _: answer, seed=0)
        with pytest.raises(SchemaError, match=message):
            sampler.draw(buffer.view, 1)


def test_arguments_that_are_no_groups_are_refused():
    for arguments, message in (
        (("prompt", 0), "rows must be an integer of at least 1, got 0"),
        ((3,), "field must be the path of an integer field, got 3"),
        (("prompt", 2, "best"), "where must be 'reward_varies' or a callable"),
    ):
        with pytest.raises(SchemaError, match=message):
            mr.GroupSampler(*arguments)
    with ring([1, 1]) as buffer:
        for field, message in (
            ("promt", "Did you mean 'prompt'"),
            ("reward", "field 'reward' must be one integer and not mutable"),
        ):
            with pytest.raises(SchemaError, match=message):
                mr.GroupSampler(field, seed=0).draw(buffer.view, 1)
    with pytest.raises(SchemaError, match="view: ListedView shows no data"):
        mr.GroupSampler("prompt", seed=0).draw(ListedView(["sss"]), 1)
    plain = mr.Schema({"prompt": mr.Field((), "int32")})
    with mr.ReplayBuffer.create(None, plain, 9, engine="memory") as buffer:
        buffer.extend(prompt=np.zeros(2, np.int32))
        with pytest.raises(SchemaError, match="plays the role 'reward', got a schema"):
            mr.GroupSampler("prompt", where="reward_varies").draw(buffer.view, 1)


def test_groups_share_no_batch_with_other_samplers():
    with pytest.raises(SchemaError, match=r"must not draw groups, got .*'groups', 'single steps'"):
        mr.MixtureSampler([(mr.GroupSampler("prompt"), 1), (mr.UniformSampler(), 1)])
    with pytest.raises(SchemaError, match="got the GroupSampler, of groups"):
        mr.SequenceSampler(2, mr.GroupSampler("prompt"))


def test_draws_continue_exactly_from_a_state_also_in_another_process(tmp_path):
    prompts = np.repeat(np.arange(40), 3)
    with mr.ReplayBuffer.create(
        tmp_path / "ring", mr.Schema(FIELDS), 90, autoreset="same_step"
    ) as buffer:
        for first in range(0, 120, 7):
            extend(buffer, prompts[first : first + 7])
            buffer.view.column_index("prompt")
        sampler = mr.GroupSampler("prompt", 3, seed=5)
        sampler.draw(buffer.view, 4)
        state = sampler.state_dict()
        expected = [drawn_groups(sampler.draw(buffer.view, 4)) for _ in range(9)]
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        again = mr.GroupSampler("prompt", 3, seed=0)
        again.load_state_dict(state)
        found = [drawn_groups(again.draw(buffer.view, 4)) for _ in range(9)]
    assert found == expected
    for change, message in (
        ({"field": "other"}, "field must be 'prompt'"),
        ({"rows": None}, "rows must be 3"),
        ({"kind": "UniformSampler"}, "kind must be 'GroupSampler'"),
        ({"step": -1}, "step must be"),
    ):
        with pytest.raises(FormatError, match=message):
            again.load_state_dict(state | change)
    assert repr(mr.GroupSampler("prompt", 3, seed=5)) == (
        "GroupSampler(field='prompt', rows=3, seed=5)"
    )


def test_groups_are_whole_within_what_another_sampler_narrows():
    with ring(np.repeat(np.arange(10), 2)) as buffer:
        newest = mr.ignore_earliest(5, mr.GroupSampler("prompt", 2, seed=0))
        assert isinstance(newest, RestrictedSampler)
        found = drawn_groups(newest.draw(buffer.view, 20))
        # The first two groups are left out, and half of the third.
        expected = {frozenset({(0, 2 * n), (0, 2 * n + 1)}) for n in range(3, 10)}
        assert set(found) == expected


def test_groups_are_loaded_by_a_loader():
    sampler = mr.GroupSampler("prompt", 4, seed=0)
    with (
        ring(np.repeat(np.arange(20), 4), sampler=sampler) as buffer,
        mr.ReplayLoader(buffer, batch_size=5) as loader,
    ):
        for batch, _ in zip(loader, range(4), strict=False):
            assert batch["prompt"].shape == (20,)
            assert (batch["prompt"].reshape(5, 4).diff(dim=1) == 0).all()
            assert batch.offsets.tolist() == [0, 4, 8, 12, 16, 20]


def test_groups_that_lose_a_row_while_they_are_copied_are_drawn_again(monkeypatch):
    with ring(np.repeat(np.arange(20), 2), capacity=40) as buffer:
        buffer.sampler = mr.GroupSampler("prompt", 2, seed=0)
        reader = buffer.view
        original = type(reader).copy_draw
        struck = []

        def copy_draw(self, draw, contiguous=False):
            fields = original(self, draw, contiguous)
            if not struck:
                # A whole lap: every row that was copied may be torn.
                struck.append(1)
                for first in range(0, 200, 40):
                    extend(buffer, np.repeat(np.arange(20) + 100 + first, 2))
            return fields

        monkeypatch.setattr(type(reader), "copy_draw", copy_draw)
        batch = buffer.sample(3)
        assert (batch["prompt"].reshape(3, 2)[:, 0] >= 100).all()
        assert (np.diff(batch["prompt"].reshape(3, 2), axis=1) == 0).all()


@pytest.mark.slow
def test_frequencies_hold_where_few_rows_are_of_groups():
    prompts = np.arange(500) + 100
    prompts[::50] = np.repeat(np.arange(5), 2)
    with ring(prompts) as buffer:
        sampler = mr.GroupSampler("prompt", 2, seed=3)
        counts = Counter()
        for _ in range(1500):
            counts.update(drawn_groups(sampler.draw(buffer.view, 2)))
        share = 1500 * 2 / 5
        assert len(counts) == 5
        assert max(abs(n - share) for n in counts.values()) < 5 * np.sqrt(share)


def text_ring(path, engine):
    schema = mr.Schema(
        {
            "prompt": mr.Field((), "int32"),
            "text": mr.Field.text(max_bytes=20),
            "tokens": mr.Field((None,), "int32", max_length=9),
        }
    )
    buffer = mr.ReplayBuffer.create(
        path, schema, 40, engine=engine, heap_bytes="8 KiB", commit_every=None
    )
    numbers = range(24)
    buffer.extend(
        prompt=np.array([number // 4 for number in numbers], np.int32),
        text=["ü" * (number // 4) for number in numbers],
        tokens=[np.arange(number % 5, dtype=np.int32) for number in numbers],
    )
    return buffer


@pytest.mark.parametrize("engine", ["memory", "memmap", "zarr"])
def test_groups_are_selected_by_their_texts_and_lengths(tmp_path, engine):
    path = None if engine == "memory" else tmp_path / "ring"

    def where(groups):
        texts, tokens = groups.read("text"), groups.read("tokens")
        assert isinstance(texts, mr.Ragged)
        assert tokens.lengths.shape == groups.positions.shape
        assert (tokens.lengths == groups.positions % 5).all()
        words = np.array(texts.text())[groups.offsets[:-1]]
        assert words.tolist() == ["ü" * value for value in groups.values.tolist()]
        return words == "üü"

    with text_ring(path, engine) as buffer:
        buffer.sampler = mr.GroupSampler("prompt", rows=4, where=where, seed=0)
        batch = buffer.sample(3)
        assert batch["prompt"].tolist() == [2] * 4
        assert batch["text"].text() == ["üü"] * 4
        buffer.sampler = mr.StalenessSampler("prompt", 3, 2, sampler=buffer.sampler, seed=0)
        assert buffer.sample(1)["text"].text() == ["üü"] * 4

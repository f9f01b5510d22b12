"""Streamed facts against numpy over everything at once."""

import math
import sys

import numpy as np
import pytest

import mmreplay as mr
from mmreplay import stats
from mmreplay.stats import Moments, episode_table, field_moments, histogram, moments_of


def schema(reward="float32"):
    return mr.Schema(
        {
            "observation": {"image": mr.Field((4, 4), "uint8"), "x": mr.Field((3,), "float64")},
            "action": mr.Field((), "int64"),
            "half": mr.Field((2,), "bfloat16"),
            "reward": mr.Field((), reward),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )


def steps(rng, lead):
    return {
        "observation": {
            "image": rng.integers(0, 256, (*lead, 4, 4), np.uint8),
            "x": rng.normal(1e9, 1.0, (*lead, 3)),
        },
        "action": rng.integers(-3, 4, lead),
        "half": rng.integers(0, 0x3F80, (*lead, 2)).astype(np.uint16),
        "reward": rng.integers(-5, 6, lead).astype(np.float32),
        "terminated": rng.random(lead) < 0.05,
        "truncated": rng.random(lead) < 0.05,
    }


def fill(buffer, rng, count):
    buffer.extend(steps(rng, (count, buffer.num_envs)))


@pytest.fixture(params=["disabled", "next_step"])
def buffer(request, tmp_path, rng, monkeypatch):
    """A wrapped buffer, read in blocks that cut episodes."""
    monkeypatch.setattr(stats, "MAX_BLOCK_ROWS", 7)
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema(), 200, 3, autoreset=request.param, commit_every=None
    ) as buffer:
        for _ in range(5):
            fill(buffer, rng, 60)
        yield buffer


def steps_of(buffer):
    everything = buffer.gather_all()
    return everything, ~everything["final"]


@pytest.mark.parametrize("path", ["observation/image", "observation/x", "action", "reward"])
def test_moments_are_those_of_all_steps_at_once(buffer, path):
    everything, steps = steps_of(buffer)
    values = everything[path][steps].astype(np.float64)
    found = field_moments(buffer, (path,))[path]
    assert found.count == values.size
    assert (found.min, found.max) == (values.min(), values.max())
    # Relative to the spread: float64 keeps 16 digits, 10 of them above it.
    assert found.mean == pytest.approx(values.mean(), rel=1e-14)
    assert found.std == pytest.approx(values.std(), rel=1e-6)


def test_bfloat16_is_reckoned_with_by_value(buffer):
    everything, steps = steps_of(buffer)
    bits = everything["half"][steps].astype(np.uint32) << 16
    values = bits.view(np.float32).astype(np.float64)
    found = field_moments(buffer, ("half",))["half"]
    assert found.max == values.max()
    assert found.mean == pytest.approx(values.mean())


def test_all_fields_are_reported_by_default(buffer):
    assert set(field_moments(buffer)) == set(buffer.schema.paths)


def test_merging_is_as_good_as_one_pass(rng):
    values = rng.normal(1e12, 1.0, 10_000)
    total = Moments()
    for part in np.split(values, [1, 17, 4000]):
        total = total.merge(moments_of(part))
    assert total.count == 10_000
    # One pass itself keeps 4 digits of the spread at this distance from zero.
    assert total.std == pytest.approx(values.std(), rel=1e-3)


def test_what_is_not_finite_is_counted_apart():
    found = moments_of(np.array([1.0, np.nan, 3.0, np.inf]))
    assert (found.count, found.nonfinite, found.mean) == (2, 2, 2.0)
    assert (found.min, found.max) == (1.0, 3.0)


def test_moments_of_nothing_are_no_numbers():
    found = Moments().merge(moments_of(np.array([np.nan])))
    assert (found.count, found.nonfinite) == (0, 1)
    assert math.isnan(found.mean)
    assert math.isnan(found.std)


def test_large_integers_keep_their_last_digit():
    found = moments_of(np.array([2**62 + 1, 5]))
    assert (found.min, found.max) == (5, 2**62 + 1)


@pytest.mark.parametrize(
    ("on_resume", "lengths", "broken", "complete"),
    [
        ("break", [2, 3, 2, 2], [1], [0, 2]),
        ("truncate", [2, 3, 2, 2], [], [0, 1, 2]),
        ("continue", [2, 5, 2], [], [0, 1]),
    ],
)
def test_an_episode_that_was_broken_off_is_not_whole(
    tmp_path, rng, on_resume, lengths, broken, complete
):
    path = tmp_path / "b"
    ends = [[False, True, False, False, False], [False, True, False, False]]
    with mr.ReplayBuffer.create(path, schema(), 50) as buffer:
        step = steps(rng, (1,)) | {"terminated": [False], "truncated": [False]}
        for end in ends[0]:
            buffer.add(step | {"terminated": [end]})
    with mr.ReplayBuffer.open(path, "r+", on_resume=on_resume) as buffer:
        for end in ends[1]:
            buffer.add(step | {"truncated": [end]})
        table = episode_table(buffer)
    assert table.lengths.tolist() == lengths
    assert np.flatnonzero(table.broken).tolist() == broken
    assert np.flatnonzero(table.whole).tolist() == complete
    assert np.flatnonzero(table.running).tolist() == [len(lengths) - 1]


def brute_force(buffer):
    """(env, begin, end, return, headless, running), row by row."""
    everything = buffer.gather_all()
    span = buffer.span
    found = []
    for env_id in range(buffer.num_envs):
        mine = np.flatnonzero(everything.env_ids == env_id)
        begin, total, after_end = int(span.first[env_id]), 0.0, False
        for row in mine.tolist():
            position = int(everything.positions[row])
            if everything["final"][row]:
                begin, total = position + 1, 0.0
                continue
            total += float(everything["reward"][row])
            after_end = bool(everything["terminated"][row] | everything["truncated"][row])
            newest = row == mine[-1]
            if after_end or newest:
                found.append((env_id, begin, position + 1, total, not after_end))
                begin, total = position + 1, 0.0
    return found


def test_episodes_are_those_of_a_loop_over_rows(buffer):
    table = episode_table(buffer)
    found = list(
        zip(
            table.env_ids.tolist(),
            table.begin.tolist(),
            table.end.tolist(),
            table.returns.tolist(),
            table.running.tolist(),
            strict=True,
        )
    )
    assert found == brute_force(buffer)
    assert (table.lengths == table.end - table.begin).all()


def test_unfinished_episodes_and_those_missing_their_start_are_distinguished(tmp_path):
    fields = mr.Schema({"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "b", fields, 10, commit_every=None) as buffer:
        ends = np.zeros(14, bool)
        ends[[5, 9]] = True
        buffer.extend(reward=np.ones(10, np.float32), terminated=ends[:10])
        buffer.extend(reward=np.ones(4, np.float32), terminated=ends[10:])
        table = episode_table(buffer)
        assert table.begin.tolist() == [4, 6, 10]
        assert table.headless.tolist() == [True, False, False]
        assert table.running.tolist() == [False, False, True]
        assert table.whole.tolist() == [False, True, False]
        assert table.returns.tolist() == [2, 4, 4]
        assert episode_table(buffer, newest=1).begin.tolist() == [6]


def test_a_table_is_also_a_dict_of_columns(buffer):
    table = episode_table(buffer)
    columns = table.to_dict()
    assert list(columns) == [
        "env_ids",
        "begin",
        "end",
        "lengths",
        "returns",
        "headless",
        "running",
        "broken",
        "number",
        "source",
        "whole",
    ]
    assert type(columns) is dict
    for name, column in columns.items():
        assert column.shape == (len(table),)
        assert column.dtype == getattr(table, name).dtype
        assert column.tolist() == getattr(table, name).tolist()
    assert [len(column) for column in table.newest(0).to_dict().values()] == [0] * 11


def test_pandas_makes_a_frame_of_a_table(buffer):
    pandas = pytest.importorskip("pandas")
    table = episode_table(buffer)
    frame = pandas.DataFrame(table.to_dict())
    assert len(frame) == len(table)
    assert frame["env_ids"].dtype == np.int64
    assert frame["whole"].dtype == bool
    means = frame[frame["whole"]].groupby("env_ids")["returns"].mean()
    for env_id, mean in means.items():
        some = table.whole & (table.env_ids == env_id)
        assert mean == pytest.approx(table.returns[some].mean())


def test_the_newest_none_are_none(buffer):
    assert len(episode_table(buffer).newest(0)) == 0


def test_the_newest_whole_episodes_of_each_environment(buffer):
    table = episode_table(buffer)
    newest = episode_table(buffer, newest=2)
    for env_id in range(3):
        whole = table.whole & (table.env_ids == env_id)
        mine = newest.env_ids == env_id
        assert newest.begin[mine].tolist() == table.begin[whole][-2:].tolist()
        assert newest.returns[mine].tolist() == table.returns[whole][-2:].tolist()


def test_without_a_reward_returns_are_no_numbers(tmp_path):
    fields = mr.Schema({"observation": mr.Field((), "int64")})
    with mr.ReplayBuffer.create(tmp_path / "b", fields, 10) as buffer:
        buffer.extend(observation=np.arange(5))
        table = episode_table(buffer)
        assert table.lengths.tolist() == [5]
        assert np.isnan(table.returns).all()


def test_an_empty_buffer_has_no_episodes_and_no_numbers(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "b", schema(), 10) as buffer:
        assert len(episode_table(buffer)) == 0
        assert len(episode_table(buffer, newest=3)) == 0
        assert field_moments(buffer)["reward"].count == 0
        counts, edges = histogram(buffer, "action", 10)
        assert (counts.tolist(), len(edges)) == ([0], 2)


@pytest.mark.parametrize("bins", [3, 100])
def test_a_histogram_counts_every_element_once(buffer, bins):
    everything, steps = steps_of(buffer)
    for path in ("observation/image", "action", "reward", "observation/x"):
        values = everything[path][steps]
        counts, edges = histogram(buffer, path, bins)
        assert counts.sum() == values.size
        assert len(counts) <= bins
        assert edges[0] <= values.min()
        assert edges[-1] >= values.max()


@pytest.mark.parametrize("bins", [0, 2.5, np.linspace(0, 9, 4)], ids=str)
def test_bins_that_are_no_number_are_refused(buffer, bins):
    with pytest.raises(mr.SchemaError, match=r"^bins must be an integer of at least 1"):
        histogram(buffer, "action", bins)


def test_integers_get_a_bin_each_where_they_fit(buffer):
    everything, steps = steps_of(buffer)
    counts, edges = histogram(buffer, "action", 50)
    assert ((edges[:-1] + edges[1:]) / 2).tolist() == [-3, -2, -1, 0, 1, 2, 3]
    actions = everything["action"][steps]
    assert counts.tolist() == [int((actions == a).sum()) for a in range(-3, 4)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("low", "high", "width"), [(-3, 4, 1), (0, 200, 4)])
def test_whole_numbers_of_a_float_field_get_bins_of_whole_width(
    tmp_path, rng, monkeypatch, dtype, low, high, width
):
    # Bins of 3 numbers beside bins of 4 would look like a pattern of the values.
    monkeypatch.setattr(stats, "CACHED", 64)
    values = rng.integers(low, high + 1, 3000).astype(np.float64)
    values[:3] = np.nan, low, high
    fields = mr.Schema({"x": mr.Field((), dtype)})
    with mr.ReplayBuffer.create(tmp_path / "b", fields, 3000) as made:
        made.extend(x=values.astype(np.float32) if dtype == "bfloat16" else values)
        assert field_moments(made, "x")["x"].whole
        counts, edges = histogram(made, "x", 60)
    assert set(np.diff(edges)) == {width}
    assert edges[0] == low - 0.5
    assert counts.tolist() == np.histogram(values[1:], edges)[0].tolist()
    assert counts.sum() == 2999


def test_one_fraction_among_whole_numbers_shows_in_the_last_block(tmp_path, monkeypatch):
    monkeypatch.setattr(stats, "CACHED", 64)
    values = np.arange(1000.0) % 7
    values[999] = 2.5
    with mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema({"x": mr.Field((), "float64")}), 1000
    ) as made:
        made.extend(x=values)
        assert not field_moments(made, "x")["x"].whole
        counts, edges = histogram(made, "x", 60)
    assert edges.tolist() == np.linspace(0, 6, 61).tolist()
    assert counts[25] == 1


def test_whole_numbers_beyond_halves_get_bins_between_their_limits(tmp_path):
    values = np.array([0.0, 2.0**52, 2.0**60])
    with mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema({"x": mr.Field((), "float64")}), 10
    ) as made:
        made.extend(x=values)
        counts, edges = histogram(made, "x", 4)
    assert edges.tolist() == np.linspace(0, 2.0**60, 5).tolist()
    assert counts.tolist() == [2, 0, 0, 1]


def test_a_bool_field_has_moments_and_a_histogram(buffer):
    everything, steps = steps_of(buffer)
    share = everything["terminated"][steps].mean()
    assert field_moments(buffer, ("terminated",))["terminated"].mean == pytest.approx(share)
    counts, _ = histogram(buffer, "terminated", 10)
    assert counts[1] == everything["terminated"][steps].sum()


def test_steps_overwritten_during_the_scan_make_an_episode_miss_its_start(tmp_path, monkeypatch):
    """A writer laps the reader between two blocks."""
    monkeypatch.setattr(stats, "MAX_BLOCK_ROWS", 5)
    fields = mr.Schema({"reward": mr.Field((), "float32")})
    writer = mr.ReplayBuffer.create(tmp_path / "b", fields, 32, commit_every=None)
    writer.extend(reward=np.ones(32, np.float32))
    reader = mr.ReplayBuffer.open(tmp_path / "b")
    table = episode_table(reader, lambda done, total: writer.extend(reward=np.ones(6, np.float32)))
    assert table.headless.tolist() == [True]
    assert table.returns[0] == table.lengths[0]
    assert table.lengths[0] < 32
    writer.close()
    reader.close()


def test_progress_reaches_the_end(buffer):
    seen = []
    episode_table(buffer, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(buffer)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "int16", "uint64", "float16"])
def test_moments_of_every_width_are_those_of_numpy(rng, dtype):
    values = rng.integers(0, 2 if dtype == "bool" else 256, (3000, 7)).astype("uint8")
    values = values.view("int8") if dtype == "int8" else values.astype(dtype)
    found, wide = moments_of(values), values.astype(np.float64)
    assert (found.count, found.min, found.max) == (21_000, wide.min(), wide.max())
    assert found.mean == pytest.approx(wide.mean(), rel=1e-14, abs=1e-14)
    assert found.std == pytest.approx(wide.std(), rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_left_out_of_every_chunk(rng, monkeypatch, bad):
    monkeypatch.setattr(stats, "CACHED", 16)
    values = rng.normal(size=400).astype(np.float32)
    values[[0, 17, 399]] = bad
    values[32:48] = bad
    found, finite = moments_of(values), values[np.isfinite(values)].astype(np.float64)
    assert (found.count, found.nonfinite) == (381, 19)
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), rel=1e-13)
    assert found.std == pytest.approx(finite.std(), rel=1e-12)


def test_a_summary_is_moments_and_episodes_of_one_reading(buffer):
    moments, table = stats.summarize(buffer)
    assert moments == field_moments(buffer)
    expected = episode_table(buffer)
    for name in stats.EpisodeTable.__slots__:
        np.testing.assert_array_equal(getattr(table, name), getattr(expected, name))
    only, _ = stats.summarize(buffer, ("action",))
    assert only == {"action": moments["action"]}


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint64", "float32", "float64"])
@pytest.mark.parametrize("spread", [1, 50, 1000])
def test_counts_are_those_of_numpy_between_the_same_edges(
    tmp_path, rng, monkeypatch, dtype, spread
):
    monkeypatch.setattr(stats, "CACHED", 64)
    values = rng.normal(0, spread, 3000).clip(-100, 100).astype(dtype)
    if dtype == "uint64":
        values = rng.integers(0, spread + 1, 3000).astype(dtype) + np.uint64(2**63)
    if dtype.startswith("f"):
        values[:3] = np.nan, np.inf, -np.inf
    fields = mr.Schema({"x": mr.Field((), dtype)})
    with mr.ReplayBuffer.create(tmp_path / "b", fields, 3000) as made:
        made.extend(x=values)
        counts, edges = histogram(made, "x", 60)
    if dtype.startswith("f"):
        finite = values[np.isfinite(values)].astype(np.float64)
        expected = np.histogram(finite, edges)[0].tolist()
    else:
        whole = values.tolist()
        width = -(-(max(whole) - min(whole) + 1) // 60)
        expected = len(counts) * [0]
        for value in whole:
            expected[(value - min(whole)) // width] += 1
    assert counts.tolist() == expected


def test_whole_numbers_of_the_widest_range_are_all_counted():
    limits = np.iinfo(np.int64)
    for values in (
        [limits.min, 0, limits.max],
        [-9_131_150_555_823_520_001, 5, 9_175_009_318_040_891_001],
    ):
        array = np.array(values)
        moments = moments_of(array)
        edges = stats.edges_of(moments, mr.Field((), "int64"), 40)
        assert stats.count_values(array, moments, edges).sum() == 3


def test_floats_that_hardly_differ_are_counted(tmp_path):
    values = np.array([2.0**53, 2.0**53 + 2, 2.0**53 + 2])
    fields = mr.Schema({"x": mr.Field((), "float64")})
    with mr.ReplayBuffer.create(tmp_path / "b", fields, 10) as made:
        made.extend(x=values)
        counts, edges = histogram(made, "x", 60)
    assert counts.sum() == 3
    assert (edges[0], edges[-1]) == (values[0], values[1])


def test_each_row_is_read_once_for_all_facts_and_once_more_to_count(tmp_path, rng, monkeypatch):
    with mr.ReplayBuffer.create(tmp_path / "b", schema(), 500, 2, autoreset="disabled") as made:
        fill(made, rng, 700)
        read, get_fields = [], mr.ReplayBuffer.get_fields

        def counting(self, paths, env_ids, positions):
            read.append(len(positions))
            return get_fields(self, paths, env_ids, positions)

        monkeypatch.setattr(mr.ReplayBuffer, "get_fields", counting)
        moments, _ = stats.summarize(made)
        assert sum(read) == int(made.span.lengths.sum())
        read.clear()
        stats.histograms(made, {p: moments[p] for p in ("action", "reward")}, 60)
        assert sum(read) == int(made.span.lengths.sum())


def test_a_million_rows_cost_few_calls(tmp_path, rng):
    """Of Python's: what a loop over rows or episodes would need is 100 times more."""
    fields = mr.Schema(
        {
            "observation": mr.Field((4,), "float32"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    rows = 200_000
    with mr.ReplayBuffer.create(tmp_path / "b", fields, rows) as made:
        made.extend(
            observation=rng.normal(size=(rows, 4)).astype(np.float32),
            reward=np.ones(rows, np.float32),
            terminated=rng.random(rows) < 0.05,
        )
        stats.summarize(made)  # what is loaded and cached once
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            moments, table = stats.summarize(made)
            stats.histograms(made, {"reward": moments["reward"]}, 60)
        finally:
            sys.setprofile(None)
    assert len(table) > 9000
    assert calls * 1_000_000 / rows < 25_000


def test_one_field_is_named_by_itself(rng):
    path = "reward"
    schema = mr.Schema({path: mr.Field((), "float32")})
    with mr.ReplayBuffer.create(None, schema, 9, engine="memory") as buffer:
        buffer.extend(reward=rng.random(5, np.float32))
        assert mr.field_moments(buffer, path) == mr.field_moments(buffer, (path,))
        batches = [buffer.sample(4)]
    one, listed = (mr.Normalize.fit(batches, given) for given in (path, [path]))
    np.testing.assert_array_equal(one.means[path], listed.means[path])


def test_moments_and_histograms_of_fields_that_vary_are_of_items_or_of_lengths():
    schema = mr.Schema(
        {
            "tokens": mr.Field((None,), "int32", max_length=9),
            "logits": mr.Field((None, 2), "bfloat16", max_length=9),
            "text": mr.Field.text(9),
            "frame": mr.Field.bytes(9),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    buffer = mr.ReplayBuffer.create(None, schema, 20, heap_bytes=8192, engine="memory")
    for n in range(8):
        buffer.add(
            tokens=[n] * n,
            logits=np.full((n % 3, 2), n / 2),
            text="å" * (n % 4),
            frame=b"x" * n,
            reward=float(n),
            terminated=n == 5,
        )
    expected = {
        "tokens": np.repeat(np.arange(8), np.arange(8)),
        "logits": np.repeat(np.arange(8) / 2, 2 * (np.arange(8) % 3)),
        "text": 2 * (np.arange(8) % 4),
        "frame": np.arange(8),
    }
    moments = field_moments(buffer)
    for path, numbers in expected.items():
        found = moments[path]
        assert (found.count, found.nonfinite) == (len(numbers), 0)
        assert (found.min, found.max) == (numbers.min(), numbers.max())
        assert found.mean == pytest.approx(numbers.mean())
        counts, edges = histogram(buffer, path, 5)
        assert counts.tolist() == np.histogram(numbers, edges)[0].tolist()
        assert counts.sum() == len(numbers)

"""Each answer of the page equals what numpy makes of the buffer's rows."""

import cProfile
import itertools
import json
import math
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.api import Page
from mmreplay.page.episodes import KINDS, table_rows
from mmreplay.page.shown import rows_version
from mmreplay.page.wire import encode_json, pack, unpack
from tests.page.conftest import LENGTH, healthy_steps, make_buffer, one_step, schema


def test_figures_of_the_overview_are_the_buffers(ask, path, stored):
    overview = ask(path).json("overview")
    assert overview["steps"] == len(stored) == 600
    assert overview["rows"] == int(stored.span.lengths.sum())
    assert overview["capacity"] == stored.capacity
    assert overview["num_envs"] == 2
    assert overview["heads"] == stored.heads.tolist()
    assert overview["episodes"]["count"] == 20
    assert overview["sample"] == {"rows": 600, "whole": True}


def test_returns_and_lengths_are_those_of_the_episode_table(ask, path, stored):
    overview, table = ask(path).json("overview"), mr.episode_table(stored)
    order = np.argsort(table.end, kind="stable")
    returns = overview["returns"]
    assert returns["x"] == table.end[order].tolist()
    np.testing.assert_allclose(returns["y"], table.returns[order], rtol=1e-5, atol=1e-5)
    assert overview["lengths"]["y"] == table.lengths[order].tolist()
    window = returns["window"]
    means = np.convolve(table.returns[order], np.full(window, 1 / window), "valid")
    assert returns["mean"][: window - 1] == [None] * (window - 1)
    np.testing.assert_allclose(returns["mean"][window - 1 :], means, atol=1e-5)


def test_quarters_are_of_all_newest_episodes(ask, tmp_path, rng):
    count = 3 * 3000
    ends = np.arange(count) % 3 == 2
    rewards = rng.normal(size=count).astype(np.float32)
    fields = {
        "observation": mr.Field((), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    with mr.ReplayBuffer.create(
        tmp_path / "a", mr.Schema(fields), count, autoreset="disabled"
    ) as buffer:
        zeros = np.zeros(count, np.float32)
        buffer.extend(observation=zeros, reward=rewards, terminated=ends)
    returns = ask(tmp_path / "a").json("overview")["returns"]
    assert len(returns["y"]) == 2000
    expected = rewards.reshape(-1, 3).sum(axis=1)
    assert returns["average"] == pytest.approx(expected.mean(), abs=1e-6)
    assert returns["oldest"] == pytest.approx(expected[:750].mean(), abs=1e-6)
    assert returns["newest"] == pytest.approx(expected[-750:].mean(), abs=1e-6)


def test_ends_are_counted_by_kind(ask, tmp_path, rng):
    path = tmp_path / "ends"
    with mr.ReplayBuffer.create(path, schema(), 100, autoreset="disabled") as buffer:
        for step in range(30):
            row = one_step(rng)
            row["terminated"] = step in (9, 24)
            row["truncated"] = step in (19, 24)
            ended = row["terminated"] or row["truncated"]
            buffer.add(row, final_observation=row["observation"] if ended else None)
    with mr.ReplayBuffer.open(path, "r+", on_resume="break") as buffer:
        buffer.add(row)
    ends = ask(path).json("overview")["ends"]
    assert ends == {"terminated": 1, "truncated": 1, "both": 1, "broken off": 1, "running": 1}


def test_histograms_of_rewards_and_actions_are_numpys(ask, path, stored):
    overview = ask(path).json("overview")
    rows = stored.gather_all()
    steps = ~rows.fields["final"]
    for name, values in (
        ("reward", rows["reward"][steps][:, None]),
        ("action", rows["action"][steps]),
    ):
        histogram = overview["histograms"][name]
        assert histogram["whole"]
        assert histogram["all"] == values.shape[1]
        for number, component in enumerate(histogram["components"]):
            edges = np.array(component["edges"])
            counts = np.histogram(values[:, number], len(edges) - 1)[0]
            assert component["counts"] == counts.tolist()


def test_fields_say_their_limits(ask, path, stored):
    fields = {field["path"]: field for field in ask(path).json("overview")["fields"]}
    rows = stored.gather_all()
    joints = rows["observation/joints"][~rows.fields["final"]]
    assert fields["observation/joints"]["low"] == pytest.approx(float(joints.min()))
    assert fields["observation/joints"]["high"] == pytest.approx(float(joints.max()))
    assert fields["observation/pixels"]["image"]["axes"] == "HWC"
    assert fields["reward"]["role"] == "reward"
    assert fields["observation/joints"]["role"] == "observation"


@pytest.mark.parametrize("sort", ["age", "length", "return", "env", "begin"])
@pytest.mark.parametrize("descending", [0, 1])
def test_the_table_is_sorted(ask, path, stored, sort, descending):
    table = mr.episode_table(stored)
    answer = ask(path).json("episodes", f"sort={sort}&desc={descending}&limit=500")
    assert answer["total"] == answer["all"] == len(table) == 20
    assert answer["done"] == 1.0
    column = {"env": 0, "begin": 1, "length": 2, "return": 3, "age": 6}[sort]
    values = [row[column] for row in answer["rows"]]
    assert values == sorted(values, reverse=bool(descending))
    known = {(row[0], row[1]): row for row in answer["rows"]}
    for env_id, begin, length, value in zip(
        table.env_ids, table.begin, table.lengths, table.returns, strict=True
    ):
        row = known[env_id, begin]
        assert row[2] == length
        assert row[3] == pytest.approx(value, abs=1e-4)
        assert row[6] == stored.heads[env_id] - begin - length


@pytest.mark.parametrize("descending", [0, 1])
def test_the_table_is_sorted_by_how_episodes_end(ask, path, descending):
    client = ask(path)
    answer = client.json("episodes", f"sort=end&desc={descending}&limit=500")
    kinds = [KINDS.index(row[4]) for row in answer["rows"]]
    assert len(set(kinds)) > 1
    assert kinds == sorted(kinds, reverse=bool(descending))


def test_the_table_is_filtered(ask, path, stored):
    table, client = mr.episode_table(stored), ask(path)
    middle = float(np.median(table.returns))
    low, high = float(table.returns.min()), float(table.returns.max())
    for query, expected in (
        ("env=1", 10),
        (f"ret={middle},{high}", int((table.returns >= middle).sum())),
        (f"ret={low},{middle}", int((table.returns <= middle).sum())),
        (f"len={LENGTH},{LENGTH}", 20),
        ("len=0,29", 0),
        ("whole=1", 20),
        ("end=running", 0),
    ):
        assert client.json("episodes", query)["total"] == expected, query
    ends = client.json("overview")["ends"]
    for kind, count in ends.items():
        assert client.json("episodes", f"end={kind}")["total"] == count


def test_pages_of_the_table_join_up(ask, path):
    client = ask(path)
    whole = client.json("episodes", "limit=500")["rows"]
    pages = [
        row
        for offset in range(0, 20, 7)
        for row in client.json("episodes", f"offset={offset}&limit=7")["rows"]
    ]
    assert pages == whole


def test_the_histogram_of_episodes_counts_each_once(ask, path):
    for measure in ("return", "length"):
        histogram = ask(path).json("episodes", f"hist={measure}")["histogram"]
        assert sum(histogram["counts"]) == 20
        assert len(histogram["edges"]) == len(histogram["counts"]) + 1


@pytest.mark.parametrize("span", [1, 13, 48, 121, 1000])
def test_each_bin_of_whole_returns_holds_as_many_numbers(ask, tmp_path, span):
    # Episodes of one step, whose returns are whole numbers in a float field; and the
    # same numbers as rewards.
    returns = np.arange(-3, span - 3)
    fields = {"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")}
    for name, rewards in (("a", returns), ("b", returns[::-1])):
        with mr.ReplayBuffer.create(tmp_path / name, mr.Schema(fields), 1000) as buffer:
            rewards = rewards.astype(np.float32)
            buffer.extend(reward=rewards, terminated=np.ones(span, bool))
    client = ask(tmp_path / "a", tmp_path / "b")
    compared = client.json("compare", "c=1")["histograms"]
    found = [
        client.json("episodes", "hist=return")["histogram"],
        client.json("overview")["histograms"]["reward"]["components"][0],
        *(
            {**each, "counts": each["counts"][0]}
            for each in compared
            if each["name"] in ("return", "reward")
        ),
    ]
    assert len(found) == 4
    for histogram in found:
        if "values" in histogram:
            assert histogram["values"] == returns.tolist()
            continue
        edges, counts = histogram["edges"], histogram["counts"]
        # The ticks at whole numbers stand over the middle of bins of one.
        assert {edge % 1 for edge in edges} == {0.5}
        assert edges[0] == -3.5
        expected = [
            sum(low < value < high for value in returns.tolist())
            for low, high in itertools.pairwise(edges)
        ]
        assert counts == expected
        assert len(set(counts[:-1])) <= 1
        assert counts[-1] <= counts[0]


def test_an_episode_is_found_by_any_of_its_positions(ask, path, stored):
    client = ask(path)
    with_final = stored.episodes.episodes(1)
    for number, (begin, end) in enumerate(
        zip(with_final.begin.tolist(), with_final.end.tolist(), strict=True)
    ):
        for position in (begin, (begin + end) // 2, end - 1, end):
            episode = client.json("episode", f"env=1&at={position}")
            assert (episode["begin"], episode["end"]) == (begin, end)
            assert (episode["number"], episode["count"]) == (number, 10)
            assert episode["final_row"]
        rewards = stored.get_field("reward", 1, np.arange(begin, end))
        assert episode["return"] == pytest.approx(float(rewards.sum(dtype=float)))
        nonzero = np.flatnonzero(rewards)
        assert episode["rewards"]["at"] == nonzero.tolist()
        assert episode["rewards"]["values"] == rewards[nonzero].tolist()
        previous = None if not number else with_final.begin[number - 1]
        assert episode["previous"] == previous


@pytest.mark.parametrize("buckets", [1, 7, 100, 4096])
def test_a_curve_is_what_numpy_reduces(ask, path, stored, buckets):
    head, body = ask(path).arrays(
        "curve", f"field=observation/joints&env=1&first=5&stop=250&buckets={buckets}&c0=1&c1=4"
    )
    values = stored.get_field("observation/joints", 1, np.arange(5, 250))[:, 1:4]
    number = min(buckets, len(values))
    assert head["buckets"] == number
    assert head["names"] == [f"observation/joints[{i}]" for i in (1, 2, 3)]
    lowest, highest, mean = np.frombuffer(body, "<f4").reshape(3, 3, number)
    edges = [*((np.arange(number) * len(values)) // number), len(values)]
    for bucket in range(number):
        some = values[edges[bucket] : edges[bucket + 1]]
        np.testing.assert_array_equal(lowest[:, bucket], some.min(0))
        np.testing.assert_array_equal(highest[:, bucket], some.max(0))
        np.testing.assert_allclose(mean[:, bucket], some.mean(0, dtype=float), rtol=1e-5)


def test_a_bucket_larger_than_a_block_is_what_numpy_reduces(ask, path, stored, monkeypatch):
    monkeypatch.setattr("mmreplay.page.curves.BLOCK_ROWS", 7)
    client = ask(path)
    for buckets in (1, 2, 5, 40, 245):
        query = f"env=1&first=5&stop=250&buckets={buckets}&c0=0&c1=4"
        _, body = client.arrays("curve", f"field=observation/joints&{query}")
        curves = np.frombuffer(body, "<f4").reshape(3, 4, buckets)
        values = stored.get_field("observation/joints", 1, np.arange(5, 250))
        edges = [*((np.arange(buckets) * 245) // buckets), 245]
        for bucket in range(buckets):
            some = values[edges[bucket] : edges[bucket + 1]]
            expected = some.min(0), some.max(0), some.mean(0, dtype=float)
            np.testing.assert_allclose(curves[:, :, bucket], expected, rtol=1e-5)


@pytest.mark.parametrize("block", [13, 1 << 17])
@pytest.mark.parametrize(
    ("dtype", "first", "step"),
    [
        ("int64", 1_764_000_000_123_456_789, 50_000_000),
        ("uint64", (1 << 64) - 60, 1),
        ("int32", -2_147_483_648, 3),
        ("float64", 1_764_000_000.25, 0.05),
    ],
)
def test_curves_of_time_stamps_are_distances(ask, tmp_path, monkeypatch, block, dtype, first, step):
    monkeypatch.setattr("mmreplay.page.curves.BLOCK_ROWS", block)
    fields = {"observation": mr.Field((2,), dtype), "near": mr.Field((2,), dtype)}
    kind = int if dtype != "float64" else float
    stamps = np.array([[kind(first + step * i)] * 2 for i in range(50)], dtype)
    near = np.array([[i, 7] for i in range(50)], dtype)
    if dtype == "float64":
        stamps[[0, 20], 0] = np.nan
    path = tmp_path / "stamps"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 100) as buffer:
        buffer.extend(observation=stamps, near=near)
    client = ask(path)
    query = "field=observation&env=0&first=0&stop=50&buckets=25&c0=0&c1=2"
    head, body = client.arrays("curve", query)
    lowest, highest, mean = np.frombuffer(body, "<f4").reshape(3, 2, 25)
    assert [kind(text) for text in head["offsets"]] == [
        np.nanmin(stamps[:, number]).item() for number in (0, 1)
    ]
    away = np.array([kind(step * i) for i in range(50)], float).reshape(25, 2)
    np.testing.assert_allclose(lowest[1], away.min(1), rtol=1e-5)
    np.testing.assert_allclose(highest[1], away.max(1), rtol=1e-5)
    # Distances of whole numbers are exact, whatever float64 holds of them.
    lost = 1e-4 if dtype == "float64" else 0
    np.testing.assert_allclose(mean[1], away.mean(1), rtol=1e-4, atol=lost)
    if dtype == "float64":
        assert mean[0, 0] == lowest[0, 0] == 0
        assert mean[0, 10] == pytest.approx(20 * step, abs=1e-4)
    head, body = client.arrays("curve", query.replace("observation", "near"))
    assert "offsets" not in head
    assert np.frombuffer(body, "<f4").reshape(3, 2, 25)[2, :, 3].tolist() == [6.5, 7]


def test_steps_that_are_not_written_yet_are_not_overwritten(ask, path, tmp_path, rng):
    client = ask(path)
    for name, query in (
        ("curve", "field=reward&env=1&first=9000&stop=9100"),
        ("values", "env=1&first=9000"),
        ("frames", "field=observation/pixels&env=1&first=9000"),
    ):
        status, text = client.refused(name, query)
        words = "These steps of environment 1 are not written yet."
        assert (status, text) == (410, words), name
    status, text = client.refused("frames", "field=observation/pixels&at=7:0")
    assert (status, text) == (404, "There is no environment 7: the buffer has 2.")
    client = ask(make_buffer(tmp_path / "lap", rng, count=300, capacity=100))
    _, text = client.refused("curve", "field=reward&env=1&first=0&stop=100")
    assert text == "These steps of environment 1 were overwritten."


def test_frames_of_which_some_are_not_written_are_not_stored(ask, path, stored):
    client = ask(path)
    version = rows_version(client.page.shown[0].buffer.buffer())
    head = int(stored.heads[0])
    query = f"field=observation/pixels&env=0&count=4&v={version}"
    answer = client.answer("frames", f"{query}&first={head - 4}")
    assert "immutable" in answer.headers["cache-control"]
    answer = client.answer("frames", f"{query}&first={head - 3}")
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-store")


def test_what_is_not_finite_is_a_gap_in_curves(ask, tmp_path, rng):
    def change(steps):
        steps["observation"]["joints"][10:20, 0, 0] = np.nan
        steps["observation"]["joints"][25, 0, 0] = np.inf

    path = make_buffer(tmp_path / "gaps", rng, num_envs=1, change=change)
    query = "field=observation/joints&env=0&first=0&stop=30&buckets=6"
    head, body = ask(path).arrays("curve", query)
    lowest, highest, mean = np.frombuffer(body, "<f4").reshape(3, 1, 6)
    assert head["nonfinite"] == 11
    for curve in (lowest, highest, mean):
        assert np.isnan(curve[0]).tolist() == [False, False, True, True, False, False]
    with mr.ReplayBuffer.open(path) as stored:
        values = stored.get_field("observation/joints", 0, np.arange(26, 30))[:, 0]
    assert mean[0, 5] == pytest.approx(float(values.mean()), rel=1e-5)


def test_curves_of_whole_numbers_and_bools(ask, tmp_path):
    fields = {
        "observation": mr.Field((), "int64"),
        "flag": mr.Field((), "bool"),
        "half": mr.Field((), "bfloat16"),
        "big": mr.Field((), "float64"),
    }
    path = tmp_path / "kinds"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 100) as buffer:
        buffer.extend(
            observation=np.arange(50),
            flag=np.arange(50) % 2 == 0,
            half=np.arange(50).astype(np.float32),
            big=np.full(50, 1e300),
        )
    client = ask(path)
    for name, low, high, integer in (
        ("observation", 0, 49, True),
        ("flag", 0, 1, True),
        ("half", 0, 49, False),
        ("big", 0, 0, False),
    ):
        query = f"field={name}&env=0&first=0&stop=50&buckets=1"
        head, body = client.arrays("curve", query)
        lowest, highest, _ = np.frombuffer(body, "<f4")
        assert (lowest, highest, head["integer"]) == (low, high, integer)
        assert head.get("offsets") == (["1e+300"] if name == "big" else None)


def test_frames_are_the_pixels(ask, path, stored):
    head, body = ask(path).arrays("frames", "field=observation/pixels&env=1&first=7&count=5")
    pixels = stored.get_field("observation/pixels", 1, np.arange(7, 12))
    assert head["shape"] == [5, 24, 32, 3]
    assert head["at"] == [[1, 7 + i] for i in range(5)]
    assert body == pixels.tobytes()
    head, body = ask(path).arrays("frames", "field=observation/pixels&at=1:9,0:3&side=16")
    assert head["shape"] == [2, 12, 16, 3]
    first = stored.get_field("observation/pixels", 1, [9])[0, ::2, ::2]
    assert body[: first.size] == first.tobytes()


def test_values_are_the_rows(ask, path, stored):
    answer = ask(path).json("values", "env=0&first=25&count=10")
    positions = np.arange(25, 35)
    assert answer["first"] == 25
    assert answer["flags"] == stored.flags(0, positions).tolist()
    assert "observation/pixels" not in answer["values"]
    joints = stored.get_field("observation/joints", 0, positions)
    assert answer["values"]["observation/joints"] == joints.astype(float).tolist()


def test_an_entity_tag_saves_the_answer_until_the_buffer_changes(ask, path, rng):
    client = ask(path)
    queries = {
        "overview": "",
        "episodes": "sort=length",
        "episode": "env=0&at=0",
        "curve": "field=reward&env=0&first=0&stop=100",
        "values": "env=0&first=0&count=4",
    }
    tags = {}
    for name, query in queries.items():
        answer = client.answer(name, query)
        tags[name] = answer.headers["etag"]
        again = client.answer(name, query, tags[name])
        assert (again.status, again.body) == (304, b"")
        other = client.answer(name, query + "&x=1", tags[name])
        assert other.status == 200
    with mr.ReplayBuffer.open(path, "r+") as buffer:
        steps = healthy_steps(rng, 5, 2)
        buffer.extend(steps, final_observation=steps["observation"])
    time.sleep(1.1)
    for name, query in queries.items():
        assert client.answer(name, query, tags[name]).status == 200, name


def test_an_entity_tag_changes_with_what_is_still_read(ask, path, stored, monkeypatch):
    monkeypatch.setattr("mmreplay.page.episodes.AT_ONCE_STEPS", 0)
    monkeypatch.setattr("mmreplay.page.episodes.SLICE_STEPS", 2 * LENGTH)
    client = ask(path)
    # The background thread waits, so that each look finds a share that is known.
    submitted = []
    monkeypatch.setattr(client.page.background, "submit", lambda _key, job: submitted.append(job))
    tag, shares = "", []
    for _ in range(30):
        answer = client.answer("episodes", "sort=return&limit=500", tag)
        assert answer.status == 200, "304 hides progress"
        tag = answer.headers["etag"]
        shares.append(json.loads(answer.body)["done"])
        if shares[-1] == 1:
            break
        again = client.answer("episodes", "sort=return&limit=500", tag)
        assert again.status == 304
        submitted[-1]()
    assert shares[0] == 0
    assert shares == sorted(set(shares))
    assert len(shares) > 3
    assert client.answer("episodes", "sort=return&limit=500", tag).status == 304
    rows = client.json("episodes", "sort=return&desc=0&limit=500")["rows"]
    returns = np.sort(mr.episode_table(stored).returns)
    np.testing.assert_allclose([row[3] for row in rows], returns, atol=1e-4)


def test_a_tag_is_of_the_rows_that_came_with_it(ask, path, rng, monkeypatch):
    monkeypatch.setattr("mmreplay.page.episodes.REFRESH_S", 0)
    monkeypatch.setattr("mmreplay.page.episodes.PATIENCE", 0)
    client = ask(path)
    steps = healthy_steps(rng, 90, 2)
    with mr.ReplayBuffer.open(path, "r+") as writer:

        def overtaken(*arguments):
            writer.extend(steps, final_observation=steps["observation"])
            return table_rows(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr("mmreplay.page.episodes.table_rows", overtaken)
            answer = client.answer("episodes", "limit=500")
        before = json.loads(answer.body)["all"]
        again = client.answer("episodes", "limit=500", answer.headers["etag"])
        assert again.status == 200
        assert json.loads(again.body)["all"] == before + 6


def test_two_buffers_are_counted_on_the_same_axes(ask, path, stored, tmp_path, rng):
    fields = {
        "observation": mr.Field((5,), "float32"),
        "action": mr.Field((2,), "float64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    other = tmp_path / "other"
    values = {
        "observation": np.zeros((90, 5), np.float32),
        "action": rng.normal(size=(90, 2)) * 9,
        "reward": rng.normal(size=90).astype(np.float32),
        "terminated": np.arange(90) % 9 == 8,
    }
    with mr.ReplayBuffer.create(other, mr.Schema(fields), 100, autoreset="disabled") as buffer:
        buffer.extend(values)
    answer = ask(path, other).json("compare", "c=1")
    assert answer["names"] == ["robot", "other"]
    assert answer["schema"] == [
        "observation/pixels is in the first buffer only.",
        "observation/joints is in the first buffer only.",
        "action has the dtypes float32 and float64.",
        "truncated is in the first buffer only.",
        "observation is in the second buffer only.",
        "The truncated is truncated in the first buffer and not there in the second.",
    ]
    histograms = {entry["name"]: entry for entry in answer["histograms"]}
    assert {"return", "length", "reward", "action[0]", "action[1]"} == set(histograms)
    rows = stored.gather_all()
    steps = ~rows.fields["final"]
    for name, first, second in (
        ("action[1]", rows["action"][steps][:, 1], values["action"][:, 1]),
        ("reward", rows["reward"][steps], values["reward"]),
    ):
        edges = np.array(histograms[name]["edges"])
        assert edges[0] <= min(first.min(), second.min())
        assert edges[-1] >= max(first.max(), second.max())
        for counts, numbers in zip(histograms[name]["counts"], (first, second), strict=True):
            assert counts == np.histogram(numbers, edges)[0].tolist()
    assert histograms["length"]["values"] == [9.0, 30.0]
    assert histograms["length"]["counts"] == [[0, 20], [10, 0]]


def test_episodes_are_compared_that_are_whole(ask, tmp_path, rng):
    # Of 70 steps an environment has two whole episodes of 30 and one that goes on.
    paths = [make_buffer(tmp_path / name, rng, count=70) for name in "ab"]
    answer = ask(*paths).json("compare", "c=1")
    histograms = {entry["name"]: entry for entry in answer["histograms"]}
    assert histograms["length"]["values"] == [30.0]
    assert histograms["length"]["counts"] == [[4], [4]]
    assert [sum(counts) for counts in histograms["return"]["counts"]] == [4, 4]


def test_frames_of_a_known_generation_are_cached_by_the_browser(ask, path):
    query = "field=observation/pixels&env=0&first=0"
    client = ask(path)
    (state,) = client.page.states()
    # As the page's script makes it of a version.
    same = ".".join(state["version"].split(".")[:2])
    known = client.answer("frames", f"{query}&v={same}").headers
    assert "immutable" in known["cache-control"]
    for other in ("", "&v=1.0", f"&v={same}1"):
        headers = ask(path).answer("frames", query + other).headers
        assert headers["cache-control"] == "private, no-cache"


def test_versions_of_another_buffer_or_page_are_others(path, tmp_path, rng):
    with Page([path]).shown[0].buffer.buffer() as buffer:
        version = rows_version(buffer)
    # A buffer that is made again has other rows at the same positions.
    shutil.rmtree(path)
    make_buffer(path, rng)
    with Page([path]).shown[0].buffer.buffer() as buffer:
        assert rows_version(buffer) != version
    code = (
        "import sys, mmreplay as mr\n"
        "from mmreplay.page.shown import rows_version\n"
        "with mr.ReplayBuffer.open(sys.argv[1]) as buffer: print(rows_version(buffer))"
    )
    command = [sys.executable, "-c", code, str(path)]
    versions = {subprocess.check_output(command, text=True) for _ in range(2)}
    # Another page on the same port: a browser keeps answers by their addresses.
    assert len(versions) == 2


def test_not_finite_numbers_are_null():
    value = {"a": [1.5, math.nan, -math.inf], "b": np.array([1.0, np.nan]), "c": True}
    text = encode_json(value)
    assert json.loads(text) == {"a": [1.5, None, None], "b": [1.0, None], "c": True}


def test_binary_answers_are_aligned():
    for name in ("a", "ab", "abc", "abcdefgh"):
        data = pack({"name": name}, np.arange(3, dtype=np.float32))
        head, body = unpack(data)
        assert head == {"name": name}
        assert (len(data) - len(body)) % 8 == 0
        assert np.frombuffer(body, "<f4").tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["float64", "bool", "int8"])
def test_the_next_reward_is_numpys(ask, tmp_path, monkeypatch, rng, dtype):
    monkeypatch.setattr("mmreplay.page.episodes.REWARD_ROWS", 7)
    monkeypatch.setattr("mmreplay.page.episodes.MAX_EPISODE_ROWS", 21)
    count = 300
    rewards = (rng.random(count) < 0.02).astype(dtype)
    if dtype == "float64":
        rewards *= 1e-60
        rewards[::10] = np.nan
    fields = {"observation": mr.Field((), "float32"), "reward": mr.Field((), dtype)}
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 200) as buffer:
        buffer.extend(observation=np.zeros(count, np.float32), reward=rewards)
    client = ask(tmp_path / "a")
    there = np.flatnonzero(np.nan_to_num(rewards))
    there = there[there >= 100]
    assert len(there)
    for first, stop in ((0, 300), (120, 280), (there[0], there[0]), (150, 1 << 50)):
        for back in (0, 1):
            rest, found = (first, stop), None
            for _ in range(20):
                query = f"env=0&first={rest[0]}&stop={rest[1]}&back={back}"
                answer = client.json("reward", query)
                rest, found = answer["rest"], answer["at"]
                if found is not None or rest[0] >= rest[1]:
                    break
            wanted = there[(there >= first) & (there < stop)]
            assert found == (wanted[-1 if back else 0] if len(wanted) else None)
    assert client.refused("reward", "env=1&first=0&stop=9")[0] == 400


BOUNDS = {
    "overview": ["alpha=5", "alpha=-1", "alpha=nan", "alpha=x"],
    "episodes": [
        "sort=x",
        "desc=2",
        "env=-1",
        "env=x",
        "len=1",
        "len=a,b",
        "ret=1,nan",
        "end=x",
        "whole=yes",
        "offset=-1",
        "limit=501",
        "limit=0",
        "hist=x",
    ],
    "episode": [
        "",
        "env=0",
        "env=2&at=0",
        "env=0&at=-1",
        "env=0&at=1e3",
        "env=0&at=0&listed=20001",
    ],
    "reward": ["", "env=0&first=0", "env=0&first=-1&stop=2", "env=0&first=0&stop=1&back=2"],
    "curve": [
        "field=reward",
        "field=reward&env=0&first=0&stop=9&buckets=4097",
        "field=reward&env=0&first=0&stop=9&buckets=0",
        "field=reward&env=0&first=0&stop=9&c0=1",
        "field=reward&env=0&first=0&stop=9&c0=0&c1=65",
        "field=reward&env=0&first=0&stop=9&c0=3&c1=2",
        f"field=reward&env=0&first={1 << 62}&stop=9",
    ],
    "frames": [
        "field=reward&env=0&first=0",
        "field=observation/pixels",
        "field=observation/pixels&env=0&first=0&count=97",
        "field=observation/pixels&env=0&first=0&side=4",
        "field=observation/pixels&env=0&first=0&frame=1",
        "field=observation/pixels&at=1",
        "field=observation/pixels&at=a:b",
        "field=observation/pixels&at=0:-1",
        "field=observation/pixels&at=9999999999999999999:0",
        "field=observation/pixels&at=" + ",".join(["0:1"] * 97),
    ],
    "values": ["env=0", "env=0&first=0&count=257", "env=0&first=0&count=0"],
    "draws": ["", "sampler=x", "sampler=UniformSampler(&seed=0", "sampler=UniformSampler&seed=-1"],
    "compare": ["", "c=1", "c=-1"],
}


@pytest.mark.parametrize(
    ("name", "query"), [(n, q) for n, queries in BOUNDS.items() for q in queries]
)
def test_parameters_out_of_bounds_are_refused(ask, path, name, query):
    status, text = ask(path).refused(name, query)
    assert status == 400, text
    assert text


def test_a_field_that_is_not_there(ask, path):
    for name in ("x", "../../etc/passwd", "<script>", "observation"):
        query = f"field={name}&env=0&first=0&stop=9"
        assert ask(path).refused("curve", query)[0] == 404
        assert ask(path).refused("frames", query)[0] == 404


def test_addresses_that_are_not_there(ask, path):
    page = ask(path).page
    for address in (
        "/api/b/1/overview",
        "/api/b/x/overview",
        "/api/b/0/x",
        "/api/b/0",
        "/api",
        "/api/b/0/overview/x",
        "/api/b/-1/overview",
        "/api/b/99999/overview",
        "/api/b/0/../0/overview",
    ):
        assert page.answer(address, "").status == 404, address


def test_queries_that_cannot_be_read(ask, path):
    page = ask(path).page
    for query in ("x" * 9000, "&".join(["a=1"] * 40), "a=%ff%fe"):
        assert page.answer("/api/b/0/overview", query).status == 400


def test_rows_that_left_the_ring_are_gone(ask, tmp_path, rng):
    path = make_buffer(tmp_path / "ring", rng, count=400, num_envs=1, capacity=100)
    client = ask(path)
    for name, query in (
        ("episode", "env=0&at=5"),
        ("episode", "env=0&at=500000"),
        ("curve", "field=reward&env=0&first=0&stop=50"),
        ("frames", "field=observation/pixels&env=0&first=3"),
        ("values", "env=0&first=0&count=10"),
    ):
        assert client.refused(name, query)[0] == 410, name
    assert client.refused("episode", "env=0&at=5")[1] == (
        "Position 5 of environment 0 was overwritten."
    )
    overview = client.json("overview")
    assert overview["episodes"]["missing_start"] == 1
    assert overview["laps"] > 4


def test_a_curve_of_too_many_bytes_is_refused(ask, tmp_path):
    wide = mr.Schema({"observation": mr.Field((1 << 20,), "float32")})
    path = tmp_path / "wide"
    with mr.ReplayBuffer.create(path, wide, 100) as buffer:
        buffer.extend(observation=np.zeros((70, 1 << 20), np.float32))
    status, text = ask(path).refused("curve", "field=observation&env=0&first=0&stop=70")
    assert status == 413
    assert "Zoom in" in text
    assert ask(path).json("overview")["steps"] == 70


def test_ten_thousand_action_components(ask, tmp_path, rng):
    fields = {"observation": mr.Field((2,), "float32"), "action": mr.Field((10_000,), "float32")}
    path = tmp_path / "wide"
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 200) as buffer:
        buffer.extend(
            observation=rng.random((100, 2), np.float32),
            action=rng.random((100, 10_000), np.float32),
        )
    client = ask(path)
    overview = client.json("overview")
    assert overview["histograms"]["action"]["all"] == 10_000
    assert len(overview["histograms"]["action"]["components"]) == 8
    head, _ = client.arrays(
        "curve", "field=action&env=0&first=0&stop=100&c0=9990&c1=10054&buckets=10"
    )
    assert (head["components"], head["all"]) == (10, 10_000)
    assert len(client.json("values", "env=0&first=0&count=2")["values"]) == 1


@pytest.mark.slow
def test_the_cost_of_many_fields_is_linear(ask, tmp_path):
    def calls(count, name, query=""):
        fields = {f"f{i}": mr.Field((), "float32") for i in range(count)}
        path = tmp_path / f"{count}"
        if not path.exists():
            with mr.ReplayBuffer.create(path, mr.Schema(fields), 100) as buffer:
                for _ in range(2):
                    buffer.add(dict.fromkeys(fields, 1.0))
        client, profile = ask(path), cProfile.Profile()
        client.json(name, query)  # once for what is made at the first request
        client = ask(path)
        profile.runcall(client.json, name, query)
        return sum(each.callcount for each in profile.getstats())

    # Calls, not seconds: four times as many fields take less than five times as many.
    requests = {"overview": "", "episode": "env=0&at=0", "values": "env=0&first=0"}
    for name, query in requests.items():
        assert calls(800, name, query) < 5 * calls(200, name, query), name

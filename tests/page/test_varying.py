"""Values that vary on the page: shown as what they are, and never interpreted."""

import base64
import json
import re

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import SchemaError
from mmreplay.page import frames, varying
from mmreplay.page.api import Page
from mmreplay.page.saved import save_page
from tests.heap.test_stored_values import forge
from tests.page.browser import needs_chromium

LENGTH, EPISODES = 30, 4
ROWS = LENGTH * EPISODES
HOSTILE = "\x1b[31m<img src=x onerror=window.hacked=1>\n=1+1 \u202e"
SEEN = r"\x1b[31m<img src=x onerror=window.hacked=1>\n=1+1 \u202e"


def schema():
    """A robot that is spoken to, and sees points."""
    return mr.Schema(
        {
            "observation": {
                "mission": mr.Field.text(5000),
                "points": mr.Field((None, 3), "float32", max_length=50),
            },
            "action": mr.Field((None,), "int32", max_length=9),
            "frame": mr.Field.bytes(200),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )


def mission(number):
    return HOSTILE + "x" * (number % 7)


def step(number):
    return {
        "observation": {
            "mission": mission(number),
            "points": np.full((number % 5, 3), number, np.float32),
        },
        "action": np.arange(1 + number % 3),
        "frame": bytes(range(number % 40)),
        "reward": float(number % 11),
        "terminated": number % LENGTH == LENGTH - 1,
        "truncated": False,
    }


@pytest.fixture
def path(tmp_path):
    return make_spoken(tmp_path, "memmap")


def make_spoken(tmp_path, engine):
    """A ring of four episodes, closed; of a compressed one some rows are in shards."""
    with mr.ReplayBuffer.create(
        tmp_path / "spoken", schema(), 200, heap_bytes="1 MiB", commit_every=None, engine=engine
    ) as buffer:
        for number in range(ROWS):
            buffer.add(step(number))
    return tmp_path / "spoken"


def test_the_overview_has_lengths_and_the_fill_of_the_heap(ask, path):
    overview = ask(path).json("overview")
    fields = {field["path"]: field for field in overview["fields"]}
    text = fields["observation/mission"]
    assert (text["dtype"], text["shape"], text["varies"]) == ("text", ["0 to 5,000"], True)
    size = len(HOSTILE.encode())
    assert (text["low"], text["high"]) == (size, size + 6)
    assert fields["observation/points"]["shape"] == ["0 to 50", 3]
    assert fields["observation/points"]["mean"] == np.mean(np.arange(ROWS) % 5)
    assert fields["frame"]["dtype"] == "bytes"
    assert fields["reward"]["varies"] is False
    [length] = overview["histograms"]["action"]["components"]
    assert length["name"] == "length of action"
    assert length["counts"] == [ROWS // 3] * 3
    with mr.ReplayBuffer.open(path) as buffer:
        used = int(buffer.view.heap_used[0])
    assert overview["storage"]["heap"] == f"{used / 1024:.2f} KiB of 1.00 MiB (1%)"
    # Lengths are no values: nothing is said of those that are always the same.
    found = {check["id"]: check["level"] for check in overview["checks"]}
    assert "one action" not in found
    assert "never changes" not in found
    assert "heap" not in found
    assert found["not finite"] == "fine"


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("mode", ["disabled", "same_step", "next_step"])
@pytest.mark.parametrize("final", [True, False])
@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.sliced(2)
def test_every_screen_shows_observations_of_text_with_known_final_ones(
    ask, tmp_path, engine, mode, final, num_envs
):
    """As a recording of MiniGrid has them."""
    with mr.ReplayBuffer.create(
        tmp_path / "spoken",
        schema(),
        200,
        num_envs,
        heap_bytes="1 MiB",
        engine=engine,
        autoreset=mode,
        commit_every=None,
    ) as buffer:
        for number in range(ROWS):
            one = step(number)
            given = one if num_envs == 1 else several(one, num_envs)
            last = step(number + 1)["observation"]
            last = last if num_envs == 1 else several(last, num_envs)
            known = final and one["terminated"] and mode != "next_step"
            buffer.add(given, final_observation=last if known else None)
    client = ask(tmp_path / "spoken", tmp_path / "spoken", sampler="UniformSampler")
    found = {check["id"]: check for check in client.json("overview")["checks"]}
    assert not any(check["failed"] for check in found.values())
    assert "reset rows" not in found
    for name, query in (
        ("episodes", ""),
        ("episode", "env=0&at=3"),
        ("values", "env=0&first=0"),
        ("reward", "env=0&first=0&stop=90"),
        ("draws", "sampler=UniformSampler"),
        ("compare", "c=1"),
        ("curve", "field=observation/mission&env=0&first=0&stop=90&buckets=9"),
    ):
        answer = client.answer(name, query)
        assert answer.status == 200, (name, answer.body)
    report = save_page(client.page, tmp_path / "page")
    assert report.missing == 0


def several(value, num_envs):
    """A value, or nested values, of each of some environments."""
    if isinstance(value, dict):
        return {name: several(each, num_envs) for name, each in value.items()}
    return [value] * num_envs


def test_rows_that_reset_stand_out_by_texts(ask, tmp_path):
    with mr.ReplayBuffer.create(
        tmp_path / "spoken", schema(), 400, heap_bytes="1 MiB", autoreset="same_step"
    ) as buffer:
        buffer.skip_autoreset_check()
        for number in range(300):
            one = step(number) | {"terminated": number % 9 == 8}
            if number % 9 == 0:
                one["reward"] = 0.0
            last = step(number + 1)["observation"] if one["terminated"] else None
            buffer.add(one, final_observation=last)
    checks = ask(tmp_path / "spoken").json("overview")["checks"]
    [finding] = [check for check in checks if check["id"] == "reset rows"]
    assert finding["level"] == "problem"
    assert finding["text"].startswith("The row after each of 33 episode ends has rew")


def test_a_heap_for_less_than_half_of_the_rows_stands_out(ask, tmp_path):
    fields = {"observation": mr.Field.text(1000)}
    with mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema(fields), 500, heap_bytes="64 KiB"
    ) as buffer:
        buffer.extend(observation=["y" * 800] * 300)
    [finding] = [
        check for check in ask(tmp_path / "b").json("overview")["checks"] if check["id"] == "heap"
    ]
    assert finding["level"] == "look"
    assert "The values of about 75 of 500 rows fit into it" in finding["text"]


def test_values_at_a_step_are_texts_without_control_characters(ask, path):
    values = ask(path).json("values", "env=0&first=30&count=30")["values"]
    assert values["observation/mission"] == [SEEN + "x" * (number % 7) for number in range(30, 60)]
    assert values["observation/points"][3:6] == [
        "3 items of [3]: [33, 33, 33, 33, 33, 33, 33, 33, …]",
        "4 items of [3]: [34, 34, 34, 34, 34, 34, 34, 34, …]",
        "0 items of [3]: []",
    ]
    assert values["action"][:3] == ["1 item: [0]", "2 items: [0, 1]", "3 items: [0, 1, 2]"]
    assert values["frame"][10:13] == ["(0 bytes)", "00 (1 byte)", "00 01 (2 bytes)"]
    assert values["frame"][5].endswith("1f… (35 bytes)")
    assert values["reward"][0] == [30 % 11]


def test_a_compressed_buffer_shows_the_same(ask, tmp_path):
    client = ask(make_spoken(tmp_path, "zarr"))
    with mr.ReplayBuffer.open(tmp_path / "spoken") as buffer:
        sealed = buffer._files.store.sealed(np.arange(ROWS))
        assert sealed.any()
    values = client.json("values", f"env=0&first=0&count={ROWS}")["values"]
    assert values["observation/mission"] == [mission_seen(n) for n in range(ROWS)]
    query = "field=observation/points&env=0&first=0&stop=120&buckets=120&c0=0&c1=8"
    _, body = client.arrays("curve", query)
    lowest, _, _ = np.frombuffer(body, "<f4").reshape(3, 120)
    assert lowest.tolist() == [n % 5 for n in range(ROWS)]
    overview = client.json("overview")
    fields = {field["path"]: field for field in overview["fields"]}
    assert fields["observation/points"]["mean"] == 2
    assert "heap" not in {check["id"] for check in overview["checks"]}


def test_long_values_are_shortened_and_very_long_ones_are_not_read(ask, tmp_path):
    fields = {"observation": mr.Field.text(1 << 20)}
    with mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema(fields), 50, heap_bytes="8 MiB"
    ) as buffer:
        for count in (10, 1000, varying.MAX_VALUE_NBYTES + 2):
            buffer.add({"observation": "é" * (count // 2)})
    values = ask(tmp_path / "b").json("values", "env=0&first=0&count=9")["values"]
    assert values["observation"] == [
        "é" * 5,
        "é" * 400 + "… (1,000 bytes)",
        "65,538 bytes, not shown",
    ]


def test_an_answer_reads_no_more_than_some_mib(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(varying, "MAX_VALUE_NBYTES", 100)
    monkeypatch.setattr(varying, "MAX_READ_NBYTES", 250)
    fields = {"observation": mr.Field.bytes(200)}
    with mr.ReplayBuffer.create(
        tmp_path / "b", mr.Schema(fields), 50, heap_bytes="1 MiB"
    ) as buffer:
        for count in (100, 101, 100, 100, 3):
            buffer.add({"observation": b"\1" * count})
    values = ask(tmp_path / "b").json("values", "env=0&first=0&count=9")["values"]
    assert [text.split("(")[-1] for text in values["observation"]] == [
        "100 bytes)",
        "101 bytes, not shown",
        "100 bytes)",
        "100 bytes, not shown",
        "3 bytes, not shown",
    ]


def test_curves_are_of_lengths(ask, path):
    query = "field=observation/points&env=0&first=0&stop=120&buckets=4&c0=0&c1=8"
    head, body = ask(path).arrays("curve", query)
    assert head["names"] == ["length of observation/points"]
    assert (head["integer"], head["components"], head["all"]) == (True, 1, 1)
    lowest, highest, mean = np.frombuffer(body, "<f4").reshape(3, 4)
    assert lowest.tolist() == [0] * 4
    assert highest.tolist() == [4] * 4
    assert mean.tolist() == [2] * 4
    status, text = ask(path).refused("curve", query.replace("c0=0", "c0=1"))
    assert (status, text) == (
        400,
        "c0 must be below 1, the components of observation/points, got 1.",
    )


def test_a_damaged_value_says_so_and_the_others_are_shown(ask, path):
    forge(path, 1, (1 << 40, 5, 0))
    values = ask(path).json("values", "env=0&first=0&count=3")["values"]
    first, damaged, last = values["observation/mission"]
    assert (first, last) == (mission_seen(0), mission_seen(2))
    assert damaged.startswith(
        "field 'observation/mission' is damaged in position 1 of environment 0: its "
    )
    assert values["reward"] == [[0], [1], [2]]


def test_text_that_is_no_utf8_is_shown_with_marks(ask, path):
    heap = path / "data-000001" / "heap.bin"
    with heap.open("r+b") as file:
        file.write(b"\xff\xfe")
    values = ask(path).json("values", "env=0&first=0&count=1")["values"]
    assert values["observation/mission"][0].startswith("��31m<img")


def test_a_field_that_varies_is_no_image():
    field = mr.Field((None, 84, 84), "uint8", max_length=4)
    assert frames.recognize(field) is None
    with pytest.raises(SchemaError, match="clip must have one shape to be an image, but"):
        frames.stated("clip", field, "NHW")


def test_frames_of_a_field_that_varies_are_refused_by_what_it_is(ask, path):
    query = "field=observation/mission&env=0&first=0&count=1"
    refusal = str(ask(path).refused("frames", query))
    assert "as its length varies. Read its values" in refusal
    assert "--image" not in refusal


def test_two_buffers_are_compared_by_lengths(ask, path, tmp_path):
    fields = dict(schema().fields)
    fields["observation/mission"] = mr.Field.text(100)
    other = tmp_path / "other"
    with mr.ReplayBuffer.create(
        other, mr.Schema.from_flat(fields, schema().roles), 200, heap_bytes="1 MiB"
    ) as buffer:
        for number in range(ROWS):
            buffer.add(step(number))
    compared = ask(path, other).json("compare", "c=1")
    assert compared["schema"] == [
        "observation/mission is text of at most 5000 bytes and text of at most 100 bytes."
    ]
    [action] = [each for each in compared["histograms"] if each["role"] == "action"]
    assert action["name"] == "length of action"
    assert action["counts"] == [[ROWS // 3] * 3] * 2


def test_a_saved_page_has_the_texts(path, tmp_path):
    page = Page([path])
    try:
        save_page(page, tmp_path / "page")
    finally:
        page.close()
    keys, texts = [], []
    for each in (tmp_path / "page").glob("data-*.js"):
        for key, body in re.findall(r'mmr.saved\("([^"]*)","[^"]*","([^"]*)"', each.read_text()):
            keys.append(key)
            texts.append(base64.b64decode(body))
    assert any("curve?" in key and "points" in key for key in keys)
    assert any(json.dumps(mission_seen(34)).encode() in text for text in texts)
    assert not any(b"\x1b" in text for text in texts)


# In a browser


@needs_chromium
@pytest.mark.slow
def test_a_browser_shows_hostile_text_as_text(tab, serve, path):
    tab.open(serve(path), "e=0:30&t=4")
    tab.wait("return document.querySelectorAll('.curve .uplot').length === 5")
    shown = "return document.querySelector('[data-value=\"{}\"]')?.textContent"
    tab.wait(shown.format("observation/mission") + f" === {json.dumps(mission_seen(34))}")
    assert tab.run(shown.format("observation/points")).startswith("4 items of [3]: [34")
    assert tab.run(shown.format("frame")).endswith("… (34 bytes)")
    assert tab.run("return window.hacked === undefined")
    assert tab.run("return document.querySelectorAll('dd img').length") == 0
    titles = tab.run("return [...document.querySelectorAll('.curve h3')].map((e) => e.textContent)")
    assert "observation/mission (length)" in titles
    assert "reward" in titles
    assert tab.run("return document.documentElement.scrollWidth <= innerWidth")
    tab.open(serve(path), "overview")
    tab.wait("return document.querySelector('#fields')")
    assert "1.00 MiB (1%)" in tab.run("return document.querySelector('#storage').textContent")
    assert tab.run("return document.querySelector('#actions .note').textContent") == (
        "lengths in all steps"
    )
    row = tab.run("return document.querySelector('[id=\"field:frame\"]').textContent")
    assert "bytes0 to 200" in row
    assert "39 long" in row


def mission_seen(number):
    return SEEN + "x" * (number % 7)

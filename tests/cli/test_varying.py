"""The command line of fields that vary."""

import json
import re

import gymnasium as gym
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.plan import parse_field
from mmreplay.format.metadata import load
from tests.cli.test_compressed import run


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("mission:text:200", mr.Field.text(200)),
        ("frame:bytes:65536", mr.Field.bytes(65536)),
        ("tokens:int32:0-4096", mr.Field((None,), "int32", max_length=4096)),
        ("cloud:float32:0-9x3", mr.Field((None, 3), "float32", max_length=9)),
        ("plain:uint8:84x84", mr.Field((84, 84), "uint8")),
    ],
)
def test_fields_that_vary_are_written(text, field):
    assert parse_field(text) == (text.split(":")[0], field)


@pytest.mark.parametrize(
    "text", ["a:text", "a:text:0", "a:text:3x3", "a:int32:0-", "a:int32:0-x", "a:int32:3x0-9"]
)
def test_fields_that_are_not_written_so_are_refused(text, capsys):
    assert run(["plan", "--field", text, "--capacity", "9", "--length", "1"]) == 2
    assert "--field" in capsys.readouterr().err


def test_a_heap_is_planned_by_length_or_given_or_that_of_a_buffer(tmp_path, capsys):
    fields = ["--field", "mission:text:200"]
    assert run(["plan", *fields, "--capacity", "1e4"]) == 2
    assert "--length is missing, as field 'mission' varies" in capsys.readouterr().err
    assert run(["plan", *fields, "--capacity", "1e4", "--length", "30", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    schema = mr.Schema({"mission": mr.Field.text(200)})
    expected = mr.plan_buffer(schema, 10_000, lengths=30)
    assert planned["heap_bytes"] == expected.heap_bytes
    assert planned["nbytes"] == expected.nbytes
    given = [*fields, "--capacity", "9", "--heap-bytes", "1MiB"]
    assert run(["plan", *given]) == 0
    out = capsys.readouterr().out
    assert "heap.bin" in out
    assert "1,048,576: 1.00 MiB an environment" in out
    path = tmp_path / "ring"
    mr.ReplayBuffer.create(path, schema, 100, heap_bytes="64 KiB").close()
    assert run(["plan", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heap_bytes"] == 65_536


def test_a_recording_of_texts_says_what_their_heap_takes(tmp_path, capsys):
    name = "Speaking-v0"
    gym.register(name, "tests.recording.test_varying_spaces:Speaking")
    try:
        path = tmp_path / "ring"
        assert run(["record", name, str(path), "--steps", "9", "--seed", "0"]) == 0
        out = capsys.readouterr().out
        heap = load(path).heap_nbytes
        assert "values that vary have" in out
        assert f"of each environment (heap_bytes {heap:,})" in out
        given = [name, str(tmp_path / "b"), "--steps", "9", "--heap-bytes", "2MiB"]
        assert run(["record", *given, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["heap_bytes"] == 2 << 20
        given = [name, str(tmp_path / "c"), "--steps", "99", "--capacity", "20"]
        assert run(["record", *given]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert "enlarges it for later steps, and its heap with --heap-bytes;" in told
        assert f"mmreplay info {tmp_path / 'c'} says which of the two is full" in told
    finally:
        del gym.registry[name]


def test_a_heap_larger_than_the_disk_is_refused(tmp_path, capsys):
    name, message = ("Speaking-v0", r"heap_bytes must be at most [\d,]+, as the disk of /")
    gym.register(name, "tests.recording.test_varying_spaces:Speaking")
    try:
        path, given = str(tmp_path / "a"), ["--steps", "9", "--heap-bytes"]
        assert run(["record", name, path, *given, "900 PiB"]) != 0
        assert re.search(message, capsys.readouterr().err)
        assert not (tmp_path / "a").exists()
        assert run(["record", name, path, *given, "1 MiB"]) == 0
    finally:
        del gym.registry[name]
    assert run(["resize", path, "99", "--heap-bytes", "900 PiB", "--yes"]) != 0
    assert re.search(message, capsys.readouterr().err)
    mr.export(path, tmp_path / "b.npz")
    given = [str(tmp_path / "b.npz"), str(tmp_path / "b"), "--heap-bytes", "900 PiB"]
    assert run(["convert", *given]) != 0
    assert re.search(message, capsys.readouterr().err)
    assert load(tmp_path / "a").heap_nbytes == 1 << 20
    assert not (tmp_path / "b").exists()


TEXT = "go \x1b[31m<b>=1+1"


@pytest.fixture
def ring(tmp_path):
    schema = mr.Schema(
        {
            "mission": mr.Field.text(100),
            "frame": mr.Field.bytes(100),
            "cloud": mr.Field((None, 3), "float32", max_length=50),
        }
    )
    path = tmp_path / "ring"
    with mr.ReplayBuffer.create(path, schema, 20, heap_bytes="64 KiB") as buffer:
        for number in range(5):
            cloud = np.full((number, 3), number, np.float32)
            buffer.add(mission=TEXT + "x" * number, frame=b"\0" * number, cloud=cloud)
        buffer.add(mission="y" * 99, frame=b"", cloud=np.ones((20, 3), np.float32))
    return path


def test_texts_are_shown_as_text_and_never_as_terminal_commands(ring, capsys):
    assert run(["head", str(ring), "-n", "6"]) == 0
    shown = capsys.readouterr().out
    assert r"go \x1b[31m<b>=1+1xx" in shown
    assert "\x1b" not in shown
    assert "4 bytes" in shown
    assert "y" * 60 + "…" in shown
    assert "y" * 61 not in shown
    assert "20 items: 1 .. 1, mean 1" in shown
    assert run(["head", str(ring), "-n", "6", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["mission"] for row in rows[:3]] == [TEXT, TEXT + "x", TEXT + "xx"]
    assert rows[5]["mission"] == "y" * 99
    assert rows[3]["frame"] == {"bytes": 3}
    assert rows[0]["cloud"] == []
    assert rows[5]["cloud"]["shape"] == [20, 3]
    assert rows[5]["cloud"]["items"] == 20
    assert rows[1]["cloud"] == [[1.0, 1.0, 1.0]]


def test_info_says_what_varies_and_stats_count_its_items(ring, capsys):
    assert run(["info", str(ring)]) == 0
    lines = capsys.readouterr().out.splitlines()
    fields = [line.split() for line in lines if "[up to" in line]
    assert fields == [
        ["mission", "text", "[up", "to", "100]"],
        ["frame", "bytes", "[up", "to", "100]"],
        ["cloud", "float32", "[up", "to", "50,", "3]"],
    ]
    assert run(["stats", str(ring), "--json"]) == 0
    assert next(iter(json.loads(capsys.readouterr().out)["fields"])) == "mission"
    assert run(["stats", str(ring)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mission", "(its", "bytes)"] in [line[:3] for line in lines]
    assert ["frame", "(its", "bytes)"] in [line[:3] for line in lines]
    assert "cloud" in [line[0] for line in lines if line]
    with mr.ReplayBuffer.open(ring) as buffer:
        moments = mr.field_moments(buffer)
    # Of texts and bytes their lengths.
    lengths = [len(TEXT) + number for number in range(5)] + [99]
    assert (moments["mission"].count, moments["mission"].max) == (6, 99)
    assert moments["mission"].mean == pytest.approx(np.mean(lengths))
    assert (moments["frame"].min, moments["frame"].max) == (0, 4)
    items = np.concatenate([np.full(3 * n, n) for n in range(5)] + [np.ones(60)])
    assert moments["cloud"].count == len(items)
    assert moments["cloud"].mean == pytest.approx(items.mean())


def test_stored_text_is_never_printed_as_it_is(ring, capsys):
    for command in ("info", "head", "stats", "verify"):
        for options in ([], ["--json"]):
            assert run([command, str(ring), *options]) == 0
            shown, warned = capsys.readouterr()
            lines = (shown + warned).splitlines()
            assert all(line.isprintable() for line in lines), command
    # Damage of a text is told of by its place, not by what it says.
    heap = ring / "data-000001" / "heap.bin"
    with heap.open("r+b") as file:
        file.write(b"\x1b]0;title\x07")
    assert run(["verify", str(ring)]) == 1
    shown, warned = capsys.readouterr()
    assert "field 'mission' of environment 0, position 0: the checksum" in shown
    assert "\x1b" not in shown + warned
    assert run(["head", str(ring)]) == 0
    shown, _ = capsys.readouterr()
    assert r"\x1b]0;title\x07" in shown
    assert "\x1b" not in shown


def test_info_says_which_bound_of_a_ring_is_tighter(ring, tmp_path, capsys):
    assert run(["info", str(ring)]) == 0
    shown, warned = capsys.readouterr()
    assert (
        "of 64.00 KiB of values that vary (1%), 6 of 20 rows (30%), in the fullest "
        "environment; all rows fit: capacity is the tighter bound"
    ) in " ".join(shown.split())
    assert "RAM, find 144 B at most where rows are looked up by a column" in (
        " ".join(shown.split())
    )
    assert warned == ""
    schema = mr.Schema({"mission": mr.Field.text(1000)})
    path = tmp_path / "small"
    with mr.ReplayBuffer.create(path, schema, 500, heap_bytes="64 KiB") as buffer:
        assert run(["info", str(path)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "0 B of 64.00 KiB of values that vary (0%), 0 of 500 rows (0%)" in shown
        buffer.extend(mission=["x" * 800] * 400)
        alive = int(buffer.sizes[0])
    assert run(["info", str(path), "--json"]) == 0
    heap = json.loads(capsys.readouterr().out)["heap"]
    assert heap["heap_bytes"] == 65_536
    # Where the heap begins anew, less than one value's bytes are passed by.
    assert 0 <= heap["used"][0] - 800 * alive < 800
    # The reserve is a sixteenth: 61,440 bytes are for rows of 800.
    fit = heap["rows_that_fit"]
    assert fit == 61_440 * alive // heap["used"][0]
    assert fit in (75, 76)
    assert heap["rows"] == [alive]
    assert run(["info", str(path)]) == 0
    shown, warned = capsys.readouterr()
    text = f"about {fit} rows fit: heap_bytes is the tighter bound"
    assert text in " ".join(shown.split())
    assert warned == (
        f"mmreplay: {path}: the heap holds the values of about {fit} rows, less than "
        "half of the capacity of 500. Give it more bytes with mmreplay resize "
        "--heap-bytes, or lower the capacity\n"
    )
    assert run(["resize", str(path), "500", "--heap-bytes", "1 MiB", "--yes"]) == 0
    out = capsys.readouterr().out
    assert f"0 rows removed, {alive} steps left\nheap_bytes 65,536 -> 1,048,576" in out
    assert run(["info", str(path)]) == 0
    shown, warned = capsys.readouterr()
    assert "of 1.00 MiB of values that vary" in " ".join(shown.split())
    assert warned == ""
    mr.ReplayBuffer.create(
        tmp_path / "packed", schema, 500, heap_bytes="64 KiB", engine="zarr"
    ).close()
    assert run(["info", str(tmp_path / "packed")]) == 0
    assert "move on to shards, so that a full heap ends no row" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert run(["resize", str(path), "500", "--heap-bytes", "16 KiB", "--yes"]) == 0
    left = (16384 - 1024) // 800
    expected = f"{alive - left} rows removed, {left} steps left"
    assert expected in capsys.readouterr().out
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.sizes.tolist() == [left]
    plain = tmp_path / "plain"
    mr.ReplayBuffer.create(plain, mr.Schema({"x": mr.Field((), "int8")}), 9).close()
    assert run(["info", str(plain), "--json"]) == 0
    assert "heap" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("size", ["none", "2GB", "0", "-1", "", "64 M", "nan"])
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "--field", "note:text:9", "--capacity", "9"],
        ["record", "CartPole-v1", "x", "--steps", "9"],
        ["resize", "x", "9"],
        ["convert", "x.npz", "y"],
    ],
)
def test_a_size_that_is_none_is_refused_by_every_command(command, size, capsys):
    assert run([*command, "--heap-bytes", size]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"must be a size of at least 1 byte, such as 1GiB, got {size!r}." in shown
    assert "'--heap-bytes'" in shown
    assert "Use the units B, KiB" in shown


@pytest.mark.parametrize(
    ("size", "nbytes"), [("2 MiB", 2 << 20), ("1.5GiB", 3 << 29), ("1e6", 1_003_520)]
)
def test_a_size_is_written_with_a_unit_or_as_a_count(size, nbytes, capsys):
    fields = ["--field", "note:text:9", "--capacity", "9"]
    assert run(["plan", *fields, "--heap-bytes", size, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heap_bytes"] == nbytes


def test_the_length_of_each_field_is_given_by_name(capsys):
    fields = ["--field", "mission:text:4096", "--field", "tokens:int32:0-20"]
    command = ["plan", *fields, "--capacity", "1e4", "--length"]
    assert run([*command, "40"]) == 3
    assert "length of field 'tokens' must be" in capsys.readouterr().err
    assert run([*command, "mission=40, tokens=6.5", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    schema = mr.Schema(dict(map(parse_field, fields[1::2])))
    lengths = {"mission": 40, "tokens": 6.5}
    expected = mr.plan_buffer(schema, 10_000, lengths=lengths)
    assert planned["heap_bytes"] == expected.heap_bytes
    for wrong in ("much", "mission=", "=4,tokens", "mission=4,tokens"):
        assert run([*command, wrong]) == 2
        assert "--length must be N or NAME=N, such as 40 or" in (capsys.readouterr().err)
    assert run([*command, "mision=4"]) == 3
    assert "lengths must be of fields that vary, got 'mision'" in (capsys.readouterr().err)

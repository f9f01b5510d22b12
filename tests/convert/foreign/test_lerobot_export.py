"""Rings written as LeRobot v3: the table of docs/convert.md, files, refusals."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert import base
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.datasets import lerobot_video, lerobot_writer
from mmreplay.datasets.lerobot_writer import Sizes
from mmreplay.disk import files
from mmreplay.errors import FailedError, FormatError, FullError, SchemaError, SourceError
from tests import slices
from tests.convert.foreign.lerobot_sets import FPS, TASKS, TOP, WRIST, code, codes_of, export, ring
from tests.convert.test_kills import after, at_call, in_a_child, leftovers

PLAIN = {"observation": mr.Field((2,), "float32"), "action": mr.Field((), "int64")}
ENDS = {"terminated": mr.Field((), "bool"), "truncated": mr.Field((), "bool")}
LENGTHS = (5, 1, 8, 3, 6, 2, 7, 4)


def filled(path, fields, columns, steps=6, **options):
    """A ring of one environment with more fields; episodes have three steps."""
    rng = np.random.default_rng(0)
    schema = mr.Schema.from_flat({**PLAIN, "reward": mr.Field((), "float32"), **ENDS, **fields})
    if schema.varying:
        options["heap_bytes"] = "1 MiB"
    with mr.ReplayBuffer.create(path, schema, steps, **options) as buffer:
        for n in range(steps):
            step = {
                "observation": rng.normal(size=2).astype("f4"),
                "action": rng.integers(-9, 9),
                "reward": np.float32(rng.normal()),
                "terminated": n % 3 == 2,
                "truncated": False,
            }
            step |= {name: column[n] for name, column in columns.items()}
            buffer.add({name: step[name] for name in schema.paths})
    return path


def rows_of(path):
    with mr.ReplayBuffer.open(path) as buffer:
        rows = buffer.gather_all()
        return {
            name: rows[name].text() if field.kind == "text" else np.asarray(rows[name])
            for name, field in buffer.schema.fields.items()
        }, buffer.schema


def info_of(folder):
    return json.loads((folder / "meta" / "info.json").read_text())


def table_of(folder, name="data"):
    files_of = sorted((folder / name).rglob("*.parquet"))
    columns = [pq.read_table(path).to_pydict() for path in files_of]
    return {name: [value for each in columns for value in each[name]] for name in columns[0]}


RNG = np.random.default_rng(5)
IMAGE = RNG.integers(0, 256, (6, 8, 6, 3), np.uint8)
# The field, its values, and its name, dtype and shape in the dataset.
TABLE = {
    "image": ("observation/x", "uint8", IMAGE, "observation.images.x", "image", [8, 6, 3]),
    "image of images": (
        *("observation/images/x", "uint8", IMAGE, "observation.images.x", "image", [8, 6, 3]),
    ),
    "image elsewhere": ("map/x", "uint8", IMAGE, "map.x", "image", [8, 6, 3]),
    "gray": ("map", "uint8", IMAGE[..., :1], "map", "image", [8, 6, 1]),
    "channels first": (
        *("map", "uint8", np.moveaxis(IMAGE, -1, 1).copy(), "map", "image", [8, 6, 3]),
    ),
    "frame stack": ("map", "uint8", np.repeat(IMAGE, 2, -1)[..., :4], "map", "uint8", [192]),
    "depth": ("map", "float32", IMAGE.astype("f4"), "map", "float32", [144]),
    "float16": ("h", "float16", RNG.normal(size=(6, 2)).astype("f2"), "h", "float32", [2]),
    "bfloat16": ("h", "bfloat16", RNG.normal(size=(6, 2)), "h", "float32", [2]),
    "float64": ("h", "float64", RNG.normal(size=(6, 3)), "h", "float64", [3]),
    "bool": ("h", "bool", RNG.random(6) < 0.5, "h", "bool", [1]),
    "one bool": ("h", "bool", RNG.random((6, 1)) < 0.5, "h", "bool", [1]),
    "int8": ("h", "int8", RNG.integers(-128, 128, (6, 2), np.int8), "h", "int8", [2]),
    "int64": ("h", "int64", RNG.integers(-(1 << 62), 1 << 62, 6), "h", "int64", [1]),
    "uint16": ("h", "uint16", RNG.integers(0, 1 << 16, 6, np.uint16), "h", "uint16", [1]),
    "uint64": ("h", "uint64", np.array([0, 1, 2, 3, 4, (1 << 63) - 1], "u8"), "h", "uint64", [1]),
    "NaN": (
        "h",
        "float32",
        np.array([1, np.nan, np.inf, -np.inf, -0.0, 2], "f4"),
        "h",
        "float32",
        [1],
    ),
    "matrix": ("h", "float32", RNG.normal(size=(6, 2, 2, 2)).astype("f4"), "h", "float32", [8]),
    "text": ("h", "text", ["a", "", "ä\n", "b" * 30, "x", "a"], None, None, None),
    "action": (
        "act/arm",
        "float32",
        RNG.normal(size=(6, 2)).astype("f4"),
        "act.arm",
        "float32",
        [2],
    ),
}


@pytest.mark.parametrize("row", TABLE)
def test_what_becomes_of_a_field_and_what_comes_back(tmp_path, row):
    path, dtype, values, name, stored_dtype, shape = TABLE[row]
    field = mr.Field.text(64) if dtype == "text" else mr.Field(values.shape[1:], dtype)
    extra = {"observation": {}} if path.startswith("observation/") else {}
    fields = {path: field}
    columns = {path: values}
    if extra:
        source = tmp_path / "ring"
        schema = {k: v for k, v in PLAIN.items() if k != "observation"}
        schema = mr.Schema.from_flat({**schema, **ENDS, path: field})
        with mr.ReplayBuffer.create(source, schema, 6) as buffer:
            for n in range(6):
                step = {"action": n, "terminated": n % 3 == 2, "truncated": False}
                buffer.add({**step, path: values[n]})
    else:
        source = filled(tmp_path / "ring", fields, columns)
    report = mr.export(source, tmp_path / "set", format="lerobot", fps=FPS, video=False)
    assert report.doubts == ()
    info = info_of(tmp_path / "set")
    if name is None:
        assert path not in info["features"]
        tasks = pq.read_table(tmp_path / "set" / "meta" / "tasks.parquet").to_pydict()
        numbers = table_of(tmp_path / "set")["task_index"]
        texts = dict(zip(tasks["task_index"], tasks["task"], strict=True))
        assert [texts[n] for n in numbers] == values
    else:
        feature = info["features"][name]
        assert (feature["dtype"], feature["shape"]) == (stored_dtype, shape)
    mr.load(tmp_path / "set", tmp_path / "back")
    before, schema = rows_of(source)
    back, back_schema = rows_of(tmp_path / "back")
    assert back_schema == schema
    assert mr.verify_buffer(tmp_path / "back").ok
    for each in schema.paths:
        if isinstance(before[each], list):
            assert back[each] == before[each]
        else:
            assert back[each].dtype == before[each].dtype
            assert back[each].tobytes() == before[each].tobytes(), each


def test_rings_without_an_observation_come_back(tmp_path):
    schema = mr.Schema.from_flat({"action": mr.Field((), "int64"), "prompt": mr.Field.text(9)})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 4, heap_bytes="1 MiB") as buffer:
        for n in range(4):
            buffer.add(action=n, prompt=f"say {n}")
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    mr.load(tmp_path / "set", tmp_path / "back")
    back, back_schema = rows_of(tmp_path / "back")
    assert back_schema == schema
    assert back["prompt"] == [f"say {n}" for n in range(4)]
    assert back["action"].tolist() == [*range(4)]


def test_ends_of_each_agent_come_back(tmp_path):
    ends = {name: mr.Field((2,), "bool") for name in ("terminated", "truncated")}
    schema = mr.Schema.from_flat({**PLAIN, **ends})
    over = RNG.random((8, 2)) < 0.3
    over[3] = over[7] = True
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 8) as buffer:
        for n in range(8):
            step = {"observation": np.zeros(2, "f4"), "action": n, "terminated": over[n]}
            buffer.add(**step, truncated=np.zeros(2, bool))
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    assert info_of(tmp_path / "set")["features"]["agents.terminated"]["shape"] == [2]
    mr.load(tmp_path / "set", tmp_path / "back")
    before, after = rows_of(tmp_path / "ring")[0], rows_of(tmp_path / "back")[0]
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    flags = []
    for name in ("ring", "back"):
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            rows = buffer.gather_all()
            flags.append(buffer.view.flags(rows.env_ids, rows.positions).tolist())
    assert flags[0] == flags[1]


def test_several_texts_are_columns_and_only_task_is_the_task(tmp_path):
    words = ["a", "b", "", "ä", "c", "a"]
    source = filled(
        tmp_path / "ring",
        {"note": mr.Field.text(8), "task": mr.Field.text(8)},
        {"note": words, "task": words[::-1]},
    )
    mr.export(source, tmp_path / "set", format="lerobot", fps=FPS)
    assert table_of(tmp_path / "set")["note"] == words
    assert info_of(tmp_path / "set")["features"]["note"]["dtype"] == "string"
    assert info_of(tmp_path / "set")["total_tasks"] == 5
    mr.load(tmp_path / "set", tmp_path / "back")
    back, _ = rows_of(tmp_path / "back")
    assert (back["note"], back["task"]) == (words, words[::-1])


@pytest.mark.parametrize("video", [False, True])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(0.001, 0.001, 2)])
def test_all_episodes_of_all_environments_come_back(tmp_path, video, sizes):
    steps = ring(tmp_path / "ring", LENGTHS)
    report = export(tmp_path / "ring", tmp_path / "set", sizes=sizes, video=video)
    assert any("episodes of 2 stand one environment after another" in d for d in report.doubts)
    assert any("became video, which is lossy" in d for d in report.doubts) == video
    info = info_of(tmp_path / "set")
    assert info["total_episodes"] == len(LENGTHS)
    assert info["total_frames"] == sum(LENGTHS)
    assert info["splits"] == {"train": f"0:{len(LENGTHS)}"}
    options = {"video": "decode"} if video else {}
    mr.load(tmp_path / "set", tmp_path / "back", **options)
    back, _ = rows_of(tmp_path / "back")
    for name in ("action", "reward", "terminated", "truncated", "task"):
        assert np.array_equal(back[name], [step[name] for step in steps]), name
    for index, camera in enumerate(("top", "wrist")):
        images = back[f"observation/images/{camera}"]
        wanted = [code(step["episode"], step["frame"], index) for step in steps]
        assert codes_of(images).tolist() == wanted
    numbers = table_of(tmp_path / "set")
    order = [step["episode"] for step in steps if not step["frame"]]
    assert numbers["episode_index"] == [order.index(step["episode"]) for step in steps]
    assert numbers["frame_index"] == [step["frame"] for step in steps]
    assert numbers["index"] == [*range(len(steps))]
    ended = np.array(back["terminated"]) | back["truncated"]
    assert numbers["next.done"] == ended.tolist()
    seconds = (np.array(numbers["frame_index"]) / FPS).astype("f4")
    np.testing.assert_array_equal(np.array(numbers["timestamp"], "f4"), seconds)
    episodes = table_of(tmp_path / "set", "meta/episodes")
    assert episodes["length"] == [LENGTHS[each] for each in order]
    assert episodes["dataset_to_index"] == np.cumsum(episodes["length"]).tolist()
    if sizes.chunk_files == 2:
        assert (tmp_path / "set" / "data" / "chunk-001").is_dir()
        places = [*zip(episodes["data/chunk_index"], episodes["data/file_index"], strict=True)]
        assert len(set(places)) >= 3
        for name in (TOP, WRIST) if video else ():
            assert episodes[f"videos/{name}/file_index"] == episodes["data/file_index"]


def test_equal_rings_give_equal_files_whatever_the_blocks(tmp_path, monkeypatch):
    ring(tmp_path / "ring", LENGTHS)
    export(tmp_path / "ring", tmp_path / "one", video=False)
    monkeypatch.setattr(base, "BLOCK_NBYTES", 40_000)
    export(tmp_path / "ring", tmp_path / "other", video=False)
    first, second = contents(tmp_path / "one"), contents(tmp_path / "other")
    assert len(first) == 6
    assert first == second


def test_statistics_are_those_of_numpy(tmp_path):
    steps = ring(tmp_path / "ring", LENGTHS)
    export(tmp_path / "ring", tmp_path / "set", sizes=Sizes(0.005, 0.01))
    episodes = table_of(tmp_path / "set", "meta/episodes")
    order = [step["episode"] for step in steps if not step["frame"]]
    shares = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
    for number, episode in enumerate(order):
        mine = [step for step in steps if step["episode"] == episode]
        images = np.stack([step["observation"]["images"]["top"] for step in mine]) / 255
        for name, values, axes in (
            ("action", np.stack([step["action"] for step in mine]), 0),
            ("next.reward", np.stack([step["reward"] for step in mine])[:, None], 0),
            ("next.terminated", np.array([[float(step["terminated"])] for step in mine]), 0),
            (TOP, images, (0, 1, 2)),
        ):
            values = values.astype(np.float64)
            wanted = {
                "min": values.min(axes),
                "max": values.max(axes),
                "mean": values.mean(axes),
                "std": values.std(axes),
                **{
                    q: np.quantile(values, s, axes, method="inverted_cdf")
                    for q, s in shares.items()
                },
            }
            for key, each in wanted.items():
                stored = np.array(episodes[f"stats/{name}/{key}"][number])
                assert stored.shape == ((3, 1, 1) if name == TOP else each.shape)
                np.testing.assert_allclose(stored.reshape(-1), each.reshape(-1), atol=1e-12)
            assert episodes[f"stats/{name}/count"][number] == [len(mine)]
    stats = json.loads((tmp_path / "set" / "meta" / "stats.json").read_text())
    every = np.stack([step["action"] for step in steps]).astype(np.float64)
    for key in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(stats["action"][key], getattr(every, key)(0), atol=1e-12)
    assert stats["action"]["count"] == [len(steps)]


class TestStatistics:
    """Of one feature, beside numpy."""

    def made(self, rows, limit=1 << 20, chunks=7):
        found = lerobot_writer.NumberStatistics(rows.shape[1], limit)
        for chunk in np.array_split(rows, chunks):
            found.add(chunk)
        return found.result()

    def test_numbers_beyond_the_limit_are_counted_in_bins(self):
        rng = np.random.default_rng(1)
        rows = np.cumsum(rng.normal(size=(20_000, 2)), axis=0)
        found, exact = self.made(rows, limit=1 << 18, chunks=100), self.made(rows)
        spread = exact["max"] - exact["min"]
        for key in ("min", "max", "mean", "std"):
            np.testing.assert_allclose(found[key], exact[key], rtol=1e-9)
        for key in ("q01", "q10", "q50", "q90", "q99"):
            # Bins that grew are up to four times as wide as those of the range.
            assert (np.abs(found[key] - exact[key]) < 5 * spread / 5000).all(), key

    def test_blocks_of_other_sizes_give_the_same_numbers(self):
        rng = np.random.default_rng(2)
        for rows in (rng.normal(size=(9000, 3)), rng.random((9000, 1)) < 0.3):
            found = [self.made(rows, chunks=chunks) for chunks in (1, 2, 700)]
            for key, value in found[0].items():
                assert all((each[key] == value).all() for each in found), key
            np.testing.assert_allclose(found[0]["mean"], rows.mean(axis=0), atol=1e-12)
            np.testing.assert_allclose(found[0]["std"], rows.std(axis=0), atol=1e-12)

    def test_numbers_that_are_not_finite_are_left_out(self):
        rows = np.array([[1, np.nan], [np.inf, np.nan], [3, -np.inf]])
        found = self.made(rows, chunks=2)
        assert found["mean"].tolist() == [2, 0]
        assert found["max"].tolist() == [3, 0]
        assert found["q99"].tolist() == [3, 0]
        assert found["count"].tolist() == [3]
        assert self.made(rows, limit=1)["max"].tolist() == [3, 0]

    def test_frames_of_long_episodes_are_those_that_the_library_chooses(self):
        from mmreplay.datasets.lerobot_stats import ImageStatistics, chosen_frames

        assert chosen_frames(1).tolist() == [0]
        assert chosen_frames(100).tolist() == [*range(100)]
        assert len(chosen_frames(464)) == 100
        assert len(chosen_frames(10_000)) == 1000
        assert len(chosen_frames(1 << 30)) == 10_000
        found = ImageStatistics()
        frames = np.arange(1000, dtype=np.uint16)[:, None, None, None] // 4
        found.add(np.broadcast_to(frames.astype("u1"), (1000, 4, 4, 1)))
        wanted = frames[chosen_frames(1000)].reshape(-1) / 255
        result = found.result()
        assert result["mean"].shape == (1, 1, 1)
        np.testing.assert_allclose(result["mean"].item(), wanted.mean())
        np.testing.assert_allclose(result["std"].item(), wanted.std())
        assert result["count"] == [len(wanted)]

    def test_frames_of_very_long_episodes_take_bounded_memory(self, monkeypatch):
        from mmreplay.datasets import lerobot_stats

        monkeypatch.setattr(lerobot_stats, "MAX_COUNTS", 250)
        found = lerobot_stats.ImageStatistics()
        frames = np.arange(2000)[:, None, None, None] // 8
        found.add(np.broadcast_to(frames.astype("u1"), (2000, 4, 4, 3)))
        assert len(found._counts) < 250
        result = found.result()
        assert abs(result["mean"] - frames.mean() / 255).max() < 0.01
        assert result["max"].max() >= 248 / 255


REFUSED = [
    (
        {"task": mr.Field((), "int8"), "note": mr.Field.text(9)},
        {"fps": 9},
        "LeRobot has a column 'task' of its own",
    ),
    ({}, {}, "LeRobot stores times, and nothing says how many steps .* Pass fps="),
    ({}, {"fps": 0}, r"fps must be from 0\.001 to 100000, got 0"),
    ({}, {"fps": 0.00099}, r"fps must be from 0\.001 to 100000, got 0\.00099"),
    ({}, {"fps": 100_001}, r"fps must be from 0\.001 to 100000, got 100001"),
    ({}, {"fps": float("nan")}, r"fps must be from 0\.001 to 100000, got nan"),
    ({}, {"fps": True}, r"fps must be from 0\.001 to 100000, got True"),
    ({}, {"fps": 9, "codec": "vp9"}, "codec must be h264 or av1, got 'vp9'"),
    ({}, {"fps": 9, "crf": -1}, r"crf must be an integer in \[0, 51\] with codec h264, got -1"),
    ({}, {"fps": 9, "gop": 0}, r"gop must be an integer in \[1, 10000\]"),
    ({}, {"fps": 9, "task": 3}, "task must be a text, got 3"),
    ({}, {"fps": 9, "robot_type": 3}, "robot_type must be a text, got 3"),
    ({}, {"fps": 9, "video": 3}, "video must be true, false or names of images, got 3"),
    ({}, {"fps": 9, "video": "x"}, "video must name fields that are images, of none, got 'x'"),
    (
        {"task": mr.Field.text(9)},
        {"fps": 9, "task": "a"},
        "field 'task' says what the task is, and",
    ),
    ({"a": mr.Field((None,), "float32", max_length=3)}, {"fps": 9}, "field 'a' varies from step"),
    ({"a": mr.Field.bytes(3)}, {"fps": 9}, "field 'a' varies from step to step"),
    ({"a": mr.Field((128, 129), "float32")}, {"fps": 9}, "takes 66048 bytes a step, .* 65536"),
    ({"a": mr.Field((7, 6, 3), "uint8")}, {"fps": 9}, "'a' of 7 x 6 pixels cannot become video"),
    ({"index": mr.Field((), "int64")}, {"fps": 9}, "'index': LeRobot has a column 'index' of its"),
    (
        {"next/done": mr.Field((), "bool")},
        {"fps": 9},
        "LeRobot has a column 'next.done' of its own",
    ),
    (
        {"a/b": mr.Field((), "bool"), "a.b": mr.Field((), "bool")},
        {"fps": 9},
        "fields 'a/b' and 'a.b' would both be named 'a.b' in LeRobot",
    ),
    ({"..": mr.Field((), "bool")}, {"fps": 9}, r"field '\.\.' would be named '\.\.' in LeRobot"),
    ({"a" * 201: mr.Field((), "bool")}, {"fps": 9}, "Rename it to at most 200 bytes"),
    (
        {"a": mr.Field((8, 8, 3), "uint8")},
        {"fps": 9, "codec": "vp9"},
        "codec must be h264 or av1, got 'vp9'",
    ),
    (
        {"a": mr.Field((8, 8, 3), "uint8")},
        {"fps": 9, "crf": 52},
        r"crf must be an integer in \[0, 51\] with codec h264, got 52",
    ),
    (
        {"a": mr.Field((8, 8, 3), "uint8")},
        {"fps": 9, "crf": 64, "codec": "av1"},
        r"crf must be an integer in \[0, 63\] with codec av1, got 64",
    ),
    ({"a": mr.Field((8, 8, 3), "uint8")}, {"fps": 9, "gop": 0}, r"gop must be an integer in \[1, "),
]


@pytest.mark.parametrize(("fields", "options", "message"), REFUSED)
def test_what_the_format_cannot_hold_is_refused_before_a_file_is_made(
    tmp_path, fields, options, message
):
    schema = mr.Schema.from_flat({**PLAIN, **fields})
    heap = {"heap_bytes": "1 MiB"} if schema.varying else {}
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 4, **heap) as buffer:
        buffer.add({name: _zero(each) for name, each in schema.fields.items()})
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        about = BufferReader(buffer).describe()
    with pytest.raises(SchemaError, match=message):
        lerobot_writer.planned(about, **options)
    with pytest.raises(SchemaError, match=message):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", **options)
    assert [each.name for each in tmp_path.iterdir()] == ["ring"]


def _zero(field):
    if field.kind == "text":
        return ""
    if field.kind == "bytes":
        return b""
    return np.zeros((0,) if field.varies else field.shape, field.numpy)


def test_integers_that_items_cannot_hold_are_refused_and_nothing_appears(tmp_path):
    values = np.array([0, 1, 2, 1 << 63, 4, 5], np.uint64)
    filled(tmp_path / "ring", {"h": mr.Field((), "uint64")}, {"h": values})
    with pytest.raises(SourceError, match="field 'h' has the value 9223372036854775808, and"):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    assert [each.name for each in tmp_path.iterdir()] == ["ring"]


def test_texts_of_tasks_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(lerobot_writer, "MAX_TASKS_NBYTES", 9)
    filled(tmp_path / "ring", {"h": mr.Field.text(8)}, {"h": ["aaa", "b", "ccc", "ddd", "e", "f"]})
    with pytest.raises(SourceError, match=r"the texts of .* tasks take more than 9 bytes"):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    assert not (tmp_path / "set").exists()


def test_a_ring_without_a_step_is_refused(tmp_path):
    mr.ReplayBuffer.create(tmp_path / "ring", mr.Schema.from_flat(PLAIN), 4).close()
    with pytest.raises(SchemaError, match="got no steps to write, but LeRobot needs at least one"):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    assert not (tmp_path / "set").exists()


def test_images_need_no_video_library_where_they_stay_images(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    ring(tmp_path / "ring", LENGTHS)
    with pytest.raises(FailedError, match=r"mmreplay\[video\].*or pass video=false"):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS, video=False)
    assert info_of(tmp_path / "set")["video_path"] is None


def test_a_codec_that_is_not_there_is_named_with_those_that_are(tmp_path, monkeypatch):
    ring(tmp_path / "ring", LENGTHS)
    monkeypatch.setattr(lerobot_video, "_encodes", lambda av, encoder: encoder == "libx264")
    with pytest.raises(
        SchemaError, match="codec must be one that PyAV encodes here, h264, got 'av1'"
    ):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS, codec="av1")


def test_final_observations_positions_and_priorities_are_doubts(tmp_path):
    schema = mr.Schema.from_flat({**PLAIN, **ENDS})
    with mr.ReplayBuffer.create(
        tmp_path / "ring", schema, 8, num_envs=2, autoreset="next_step"
    ) as buffer:
        for n in range(20):
            over = np.array([n % 5 == 4, n % 7 == 6])
            step = {"observation": np.full((2, 2), n, "f4"), "action": np.full(2, n)}
            buffer.add(**step, terminated=over, truncated=np.zeros(2, bool))
    report = mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    for words in ("no observation after the last step", "no positions", "no environments"):
        assert any(words in doubt for doubt in report.doubts), words
    with pytest.raises(SourceError, match="and strict allows no loss"):
        mr.export(tmp_path / "ring", tmp_path / "other", format="lerobot", fps=FPS, strict=True)
    assert not (tmp_path / "other").exists()
    mr.load(tmp_path / "set", tmp_path / "back")
    assert mr.verify_buffer(tmp_path / "back").ok
    with mr.ReplayBuffer.open(tmp_path / "back") as back:
        assert back.metadata.autoreset == "next_step"
        rows = back.gather_all()
    before = np.asarray(rows_of(tmp_path / "ring")[0]["action"])
    with mr.ReplayBuffer.open(tmp_path / "ring") as buffer:
        gathered = buffer.gather_all()
        final = (buffer.view.flags(gathered.env_ids, gathered.positions) & 8) != 0
    np.testing.assert_array_equal(np.asarray(rows["action"]), before[~final])


def test_environments_that_interleave_are_written_one_after_another(tmp_path):
    """Two rings as one: environment 0 of the second follows 1 of the first."""
    first = ring(tmp_path / "one", LENGTHS)
    second = ring(tmp_path / "two", LENGTHS[::-1])
    target = tmp_path / "set"
    args = [tmp_path / "one", tmp_path / "two", target, "--to", "lerobot", "-o", "fps=10"]
    assert run(["convert", *map(str, args), "-o", "video=false"]) == 0
    wanted = []
    for env_id in (0, 1):
        for steps in (first, second):
            wanted += [step for step in steps if step["episode"] % 2 == env_id]
    numbers = table_of(target)
    np.testing.assert_array_equal(numbers["action"], [step["action"] for step in wanted])
    assert info_of(target)["total_episodes"] == 2 * len(LENGTHS)


def test_what_came_from_lerobot_keeps_its_names(tmp_path):
    ring(tmp_path / "ring", LENGTHS)
    export(tmp_path / "ring", tmp_path / "set", video=False, robot_type="so100", fps=12.5)
    # As a set of another library, with names of its own.
    (tmp_path / "set" / "meta" / "mmreplay.json").unlink()
    info = info_of(tmp_path / "set")
    assert (info["fps"], info["robot_type"]) == (12.5, "so100")
    info["features"]["action"]["names"] = ["x", "y"]
    (tmp_path / "set" / "meta" / "info.json").write_text(json.dumps(info))
    mr.load(tmp_path / "set", tmp_path / "back")
    with pytest.raises(SchemaError, match=r"fps of user metadata 'lerobot' must be a whole number"):
        mr.export(tmp_path / "back", tmp_path / "again", format="lerobot", video=False)
    options = {"format": "lerobot", "video": False, "fps": 12.5}
    report = mr.export(tmp_path / "back", tmp_path / "again", **options)
    assert any("'timestamp' is numbered anew" in note for note in report.notes)
    again = info_of(tmp_path / "again")
    assert again["features"] == info["features"]
    assert (again["fps"], again["robot_type"]) == (12.5, "so100")
    assert table_of(tmp_path / "again") == table_of(tmp_path / "set")
    # Once more, from a record that names them.
    mr.load(tmp_path / "again", tmp_path / "back2")
    assert rows_of(tmp_path / "back2")[1] != rows_of(tmp_path / "ring")[1]
    mr.export(tmp_path / "back2", tmp_path / "third", **options)
    assert info_of(tmp_path / "third")["features"] == info["features"]


def test_user_metadata_comes_back(tmp_path):
    schema = mr.Schema.from_flat(PLAIN)
    with mr.ReplayBuffer.create(
        tmp_path / "ring", schema, 4, user_metadata={"fps": 20, "by": "me"}
    ) as buffer:
        buffer.add(observation=np.zeros(2, "f4"), action=1)
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot")
    assert info_of(tmp_path / "set")["fps"] == 20
    mr.load(tmp_path / "set", tmp_path / "back")
    with mr.ReplayBuffer.open(tmp_path / "back") as back:
        user = dict(back.metadata.user)
        assert user.pop("lerobot")["fps"] == 20
        assert user == {"fps": 20, "by": "me"}
        assert back.schema == schema


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"fps": 7.5}, r"fps of the user metadata must be a whole number, .* got 7\.5\. Pass fps="),
        ({"fps": 1e-4}, r"fps of the user metadata must be from 0\.001 to 100000, got 0\.0001"),
        ({"lerobot": {"fps": 0.5}}, r"fps of user metadata 'lerobot' must be a whole .* fps=1\."),
        ({"lerobot": {"fps": 1e-320}}, r"fps of user metadata 'lerobot' must be from 0\.001 to"),
        ({"lerobot": {"fps": "9"}}, r"fps of user metadata 'lerobot' must be from 0\.001 .* '9'"),
    ],
)
def test_frames_a_second_of_user_metadata_are_checked(tmp_path, user, message):
    filled(tmp_path / "ring", {}, {}, user_metadata=user)
    with pytest.raises(SchemaError, match=message):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot")
    assert not (tmp_path / "set").exists()
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=7.5)
    assert info_of(tmp_path / "set")["fps"] == 7.5


def test_a_record_that_does_not_fit_is_not_used(tmp_path):
    ring(tmp_path / "ring", LENGTHS, video=False)
    export(tmp_path / "ring", tmp_path / "set")
    path = tmp_path / "set" / "meta" / "mmreplay.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "names": {**record["names"], "action": "gone"}}))
    report = mr.load(tmp_path / "set", tmp_path / "back")
    assert any(
        "field 'action', and the dataset has no data of its shape" in d for d in report.doubts
    )
    assert "timestamp" in rows_of(tmp_path / "back")[1]
    for broken in ({**record, "version": 9}, {**record, "schema": []}, {**record, "names": 3}):
        path.write_text(json.dumps(broken))
        with pytest.raises(FormatError, match="Remove it to read the dataset as any other"):
            mr.load(tmp_path / "set", tmp_path / "broken")


@pytest.mark.parametrize(
    ("path", "dtype", "shape"),
    [
        ("h", "int8", (2,)),
        ("h", "float16", (3,)),
        ("h", "float64", (2,)),
        ("h", "bfloat16", None),
        ("observation", "uint8", (1, 1, 2)),
        ("map", "uint8", (8, 8, 3)),
        ("map", "uint8", (6, 8, 4)),
        ("map", "int8", (8, 6, 3)),
    ],
)
def test_a_record_of_another_dtype_or_shape_is_not_used(tmp_path, path, dtype, shape):
    fields = {"h": mr.Field((2,), "float32"), "map": mr.Field((8, 6, 3), "uint8")}
    halves = np.arange(12, dtype=np.float32).reshape(6, 2) + 0.5
    filled(tmp_path / "ring", fields, {"h": halves, "map": IMAGE})
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS, video=False)
    record_path = tmp_path / "set" / "meta" / "mmreplay.json"
    record = json.loads(record_path.read_text())
    (each,) = (each for each in record["schema"] if each["name"] == path)
    each.update({"dtype": dtype} if shape is None else {"dtype": dtype, "shape": list(shape)})
    record_path.write_text(json.dumps(record))
    report = mr.load(tmp_path / "set", tmp_path / "back")
    # What is stored as float32 may have been bfloat16.
    used = shape is None
    doubts = [d for d in report.doubts if f"{path!r}, and the dataset has no data of its" in d]
    assert bool(doubts) != used
    back = rows_of(tmp_path / "back")[0]
    np.testing.assert_array_equal(back["map"], IMAGE)
    if not used:
        np.testing.assert_array_equal(back["h"], halves)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"h": "action"}, "names two fields of 'action', such as 'h': the record was not used"),
        ({"h": "next.done"}, "names field 'h', and the dataset has no data of its shape"),
    ],
)
def test_a_record_of_two_fields_of_one_feature_is_not_used(tmp_path, names, message):
    filled(tmp_path / "ring", {"h": mr.Field((), "int64")}, {"h": range(6)})
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    path = tmp_path / "set" / "meta" / "mmreplay.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "names": {**record["names"], **names}}))
    report = mr.load(tmp_path / "set", tmp_path / "back")
    assert any(message in doubt for doubt in report.doubts)
    assert rows_of(tmp_path / "back")[0]["h"].tolist() == [*range(6)]


def test_a_recorded_set_is_read_without_its_videos(tmp_path):
    steps = ring(tmp_path / "ring", LENGTHS)
    export(tmp_path / "ring", tmp_path / "set", video="observation/images/top")
    features = info_of(tmp_path / "set")["features"]
    assert (features[TOP]["dtype"], features[WRIST]["dtype"]) == ("video", "image")
    mr.load(tmp_path / "set", tmp_path / "back", video="skip")
    back, schema = rows_of(tmp_path / "back")
    assert "observation/images/top" not in schema
    assert codes_of(back["observation/images/wrist"]).tolist() == [
        code(step["episode"], step["frame"], 1) for step in steps
    ]
    mr.load(tmp_path / "set", tmp_path / "few", video="skip", fields=["action", "task"])
    assert rows_of(tmp_path / "few")[1].paths == ("action", "task")
    assert rows_of(tmp_path / "few")[0]["task"] == [step["task"] for step in steps]


def test_a_camera_that_a_record_does_not_name_is_no_reason_to_refuse_a_cast(tmp_path):
    pytest.importorskip("av")
    ring(tmp_path / "ring", LENGTHS)
    wrist = "observation/images/wrist"
    export(tmp_path / "ring", tmp_path / "both", video="observation/images")
    mr.load(tmp_path / "ring", tmp_path / "one", drop=[wrist])
    export(tmp_path / "one", tmp_path / "set", video="observation/images/top")
    # Another tool adds the camera to the set.
    shutil.copytree(tmp_path / "both" / "videos" / WRIST, tmp_path / "set" / "videos" / WRIST)
    info = info_of(tmp_path / "set")
    info["features"][WRIST] = info_of(tmp_path / "both")["features"][WRIST]
    (tmp_path / "set" / "meta" / "info.json").write_text(json.dumps(info))
    (mine, other) = (
        next((tmp_path / name / "meta" / "episodes").rglob("*.parquet")) for name in ("set", "both")
    )
    table, more = pq.read_table(mine), pq.read_table(other)
    for name in more.column_names:
        if WRIST in name:
            table = table.append_column(name, more[name])
    pq.write_table(table, mine)
    casts = {"observation/images/top": "png"}
    mr.load(tmp_path / "set", tmp_path / "back", cast=casts)
    assert wrist not in rows_of(tmp_path / "back")[1]


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_each_episode_begins_with_a_frame_that_needs_no_other(tmp_path, codec):
    av = pytest.importorskip("av")
    ring(tmp_path / "ring", LENGTHS)
    options = {"fps": FPS, "codec": codec, "gop": 5}
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", **options)
    episodes = table_of(tmp_path / "set", "meta/episodes")
    path = tmp_path / "set" / "videos" / TOP / "chunk-000" / "file-000.mp4"
    with av.open(str(path)) as video:
        stream = video.streams.video[0]
        packets = [packet for packet in video.demux(stream) if packet.size]
        times = [float(packet.pts * packet.time_base) for packet in packets]
        assert info_of(tmp_path / "set")["features"][TOP]["info"]["video.codec"] == codec
        assert stream.codec_context.name in (codec, f"lib{codec}", "libdav1d")
    np.testing.assert_allclose(times, np.arange(sum(LENGTHS)) / FPS, atol=1e-9)
    keys = [time for time, packet in zip(times, packets, strict=True) if packet.is_keyframe]
    if codec == "h264":
        assert set(np.round(episodes[f"videos/{TOP}/from_timestamp"], 6)) <= set(np.round(keys, 6))


def test_gray_images_come_back_from_video_with_one_channel(tmp_path):
    shades = np.broadcast_to(np.arange(40, 220, 30, np.uint8)[:, None, None, None], (6, 16, 16, 1))
    filled(tmp_path / "ring", {"map": mr.Field((16, 16, 1), "uint8")}, {"map": shades})
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    assert info_of(tmp_path / "set")["features"]["map"]["shape"] == [16, 16, 3]
    mr.load(tmp_path / "set", tmp_path / "back", video="decode")
    back = rows_of(tmp_path / "back")[0]["map"]
    assert back.shape == shades.shape
    assert np.abs(back.astype(int) - shades).max() <= 4


class Full(files.Disk):
    """A disk on which the n-th write finds no room."""

    def __init__(self, number):
        self.number = number

    def pwrite(self, fd, data, offset):
        self.number -= 1
        if self.number < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwrite(fd, data, offset)


@pytest.mark.parametrize("video", [False, True])
@pytest.mark.sliced(1)
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, video):
    ring(tmp_path / "ring", LENGTHS)
    for number in range(0, 3000, slices.count(13, 41)):
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", Full(number))
            try:
                export(tmp_path / "ring", tmp_path / "set", video=video)
            except FullError:
                assert [each.name for each in tmp_path.iterdir()] == ["ring"]
                continue
        break
    assert number > 41
    assert (tmp_path / "set" / "meta" / "info.json").is_file()


def contents(folder):
    """Bytes of each file of a folder, by its path in it; of videos their frames' codes.

    On a busy machine x264 sometimes packs equal frames into other bytes.
    """
    every = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder): shown(path) if path.suffix == ".mp4" else path.read_bytes()
        for path in every
    }


def shown(path):
    import av

    with av.open(str(path)) as video:
        frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
    return codes_of(np.stack(frames)).tolist()


def kill_again_and_again(folder, random):
    """Replace a set again and again, killed each time; run in a process of its own."""
    made = folder / "made"
    ring(folder / "ring", LENGTHS, size=32)
    ring(folder / "other", LENGTHS[::-1], size=32)

    def write(source="ring"):
        mr.export(folder / source, made / "set", format="lerobot", fps=FPS, overwrite=True)

    whole = []
    for source in ("other", "ring"):
        write(source)
        whole.append(contents(made / "set"))
    rng = np.random.default_rng(0)
    prepares = map(at_call, range(0, 10_000, 5 if random else slices.count(37, 311)))
    if random:
        prepares = [*prepares, *(after(float(rng.uniform(0.01, 0.4))) for _ in range(200))]
    ends = set()
    for prepare in prepares:
        write("other")
        killed = in_a_child(prepare, write)
        assert killed in (0, signal.SIGKILL, signal.SIGALRM)
        old = made / "tmp-mmreplay-old-set"
        # Between two renames it lies beside its place: the next run restores it.
        assert contents(made / "set" if (made / "set").exists() else old) in whole
        ends.add(killed)
        if not killed and not random:
            break
    write()
    assert contents(made / "set") == whole[1]
    assert leftovers(made) == []
    assert {0, signal.SIGKILL} <= ends


@pytest.mark.crash
@pytest.mark.parametrize("random", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_kill_leaves_the_old_set_or_the_new_one(tmp_path, random):
    # Threads that other tests left would be dead in the forks, and locks held.
    script = (
        "import pathlib, sys; from tests.convert.foreign import test_lerobot_export as tests; "
        f"tests.kill_again_and_again(pathlib.Path(sys.argv[1]), {random})"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, timeout=900 if random else 120
    )


def test_a_folder_of_others_is_not_replaced(tmp_path):
    ring(tmp_path / "ring", LENGTHS, video=False)
    export(tmp_path / "ring", tmp_path / "set")
    with pytest.raises(FormatError, match="already exists"):
        mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    options = {"format": "lerobot", "fps": FPS, "overwrite": True}
    mr.export(tmp_path / "ring", tmp_path / "set", **options)
    (tmp_path / "set" / "meta" / "mmreplay.json").unlink()
    with pytest.raises(FormatError, match="is a folder that holds no buffer"):
        mr.export(tmp_path / "ring", tmp_path / "set", **options)


def test_the_command_takes_all_options(tmp_path, capsys):
    ring(tmp_path / "ring", LENGTHS)
    options = [
        "fps=10",
        "codec=h264",
        "crf=30",
        "gop=4",
        "robot_type=arm",
        "video=observation/images/top",
    ]
    args = ["convert", str(tmp_path / "ring"), str(tmp_path / "set"), "--to", "lerobot"]
    args += [each for option in options for each in ("-o", option)]
    assert run([*args, "-n"]) == 0
    assert not (tmp_path / "set").exists()
    assert run(args) == 0
    assert "episodes" in capsys.readouterr().out
    assert info_of(tmp_path / "set")["robot_type"] == "arm"
    assert {*pq.read_table(tmp_path / "set/meta/tasks.parquet").to_pydict()["task"]} == {*TASKS}

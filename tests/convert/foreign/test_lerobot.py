"""LeRobot's datasets, written by pyarrow in the layouts of v2.1 and v3.0."""

import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmreplay as mr
from mmreplay.convert import base, registry
from mmreplay.errors import CorruptError, FailedError, FormatError, SchemaError, SourceError
from tests.convert.contract import error_of, text_of

LENGTHS = (4, 1, 6)


def frames(rng, lengths=LENGTHS, image=False):
    """Columns as LeRobot has them, all episodes in one."""
    total = sum(lengths)
    episodes = np.repeat(np.arange(len(lengths)), lengths)
    inner = np.concatenate([np.arange(length) for length in lengths])
    done = np.append(np.diff(episodes) > 0, True)
    done[lengths[0] - 1] = False
    found = {
        "observation.state": rng.random((total, 3)).astype(np.float32),
        "action": rng.random((total, 2)).astype(np.float32),
        "next.reward": rng.random(total).astype(np.float32),
        "next.done": done,
        "timestamp": (inner / 10).astype(np.float32),
        "frame_index": inner,
        "episode_index": episodes,
        "index": np.arange(total),
        "task_index": np.zeros(total, np.int64),
    }
    if image:
        found["observation.images.top"] = rng.integers(0, 256, (total, 6, 5, 3), "u1")
    return found


def column(values):
    if values.ndim == 4:
        packed = []
        for each in values:
            held = io.BytesIO()
            Image.fromarray(each).save(held, "PNG")
            packed.append({"bytes": held.getvalue(), "path": "x.png"})
        return pa.array(packed)
    if values.ndim == 2:
        return pa.array(list(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
    return pa.array(values)


def write(folder, data, version="v3.0", files=2, **info):
    episodes = data["episode_index"]
    total = int(episodes[-1]) + 1
    for number in range(total if version == "v2.1" else files):
        section = folder / "data" / "chunk-000"
        section.mkdir(parents=True, exist_ok=True)
        if version == "v2.1":
            rows, name = episodes == number, f"episode_{number:06d}.parquet"
        else:
            name = f"file-{number:03d}.parquet"
            rows = (episodes * files // total) == number
        table = {key: column(values[rows]) for key, values in data.items()}
        pq.write_table(pa.table(table), section / name)
    features = {
        key: {"dtype": "image" if v.ndim == 4 else str(v.dtype), "shape": [*v.shape[1:]]}
        for key, v in data.items()
    }
    told_ = {
        "codebase_version": version,
        "total_episodes": total,
        "fps": 10,
        "total_frames": len(episodes),
        "features": features,
    }
    (folder / "meta").mkdir()
    (folder / "meta" / "info.json").write_text(json.dumps(told_ | info))
    return folder


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_frames_come_episode_by_episode(tmp_path, rng, version):
    data = frames(rng, image=True)
    folder = write(tmp_path / "set", data, version)
    assert registry.source_format(folder).name == "lerobot"
    report = mr.load(folder, tmp_path / "buffer")
    assert (report.rows, report.episodes) == (11, 3)
    assert [doubt[:11] for doubt in report.doubts] == ["'next.done'"]
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
        lengths = [len(each) for each in buffer.episodes.episodes(0).begin.reshape(-1, 1)]
        assert len(lengths) == 3
        assert buffer.metadata.user["lerobot"]["fps"] == 10
    for name, ours in (
        ("observation.state", "observation/state"),
        ("observation.images.top", "observation/images/top"),
        ("action", "action"),
        ("next.reward", "reward"),
        ("timestamp", "timestamp"),
    ):
        np.testing.assert_array_equal(rows[ours], data[name])
        assert rows[ours].dtype == data[name].dtype
    np.testing.assert_array_equal(rows["terminated"], data["next.done"])
    # The first episode ends without being done.
    assert np.flatnonzero(rows["truncated"]).tolist() == [3]


def test_without_done_all_episodes_are_truncated(tmp_path, rng):
    data = frames(rng)
    del data["next.done"]
    mr.load(write(tmp_path / "set", data), tmp_path / "buffer", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        ends = buffer.gather_all()["truncated"]
    assert np.flatnonzero(ends).tolist() == [3, 4, 10]


def test_what_done_means_can_be_said(tmp_path, rng):
    folder = write(tmp_path / "set", frames(rng))
    mr.load(folder, tmp_path / "over", done="terminated", strict=True)
    mr.load(folder, tmp_path / "cut", done="truncated", strict=True)
    for name, role in (("over", "terminated"), ("cut", "truncated")):
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            ends = np.flatnonzero(buffer.gather_all()[role]).tolist()
        assert ends == ([4, 10] if name == "over" else [3, 4, 10])
    with pytest.raises(SchemaError, match=r"be one of terminated, truncated, got 'both'\."):
        mr.load(folder, tmp_path / "both", done="both")


def test_videos_are_refused_or_left_out(tmp_path, rng):
    data = frames(rng)
    features = {"observation.images.top": {"dtype": "video", "shape": [6, 5, 3]}}
    folder = write(tmp_path / "set", data, features=features)
    with pytest.raises(FormatError, match=r"has videos, of 'observation\.images\.top'\."):
        mr.load(folder, tmp_path / "buffer")
    report = mr.load(folder, tmp_path / "buffer", video="skip")
    assert any("is kept as video, and was left out" in note for note in report.notes)
    with pytest.raises(SchemaError, match="video must be one of refuse, skip"):
        mr.load(folder, tmp_path / "other", video="play")


def video_path(folder, episode=0):
    name = f"episode_{episode:06d}.mp4"
    return folder / "videos" / "chunk-000" / "observation.images.top" / name


def test_without_pyav_the_message_says_what_to_install(tmp_path, rng, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    features = {"observation.images.top": {"dtype": "video", "shape": [6, 5, 3]}}
    folder = write(tmp_path / "set", frames(rng), "v2.1", features=features)
    with pytest.raises(
        FormatError, match=r"000000\.mp4 does not exist, but .* 'observation.images.top'"
    ):
        mr.load(folder, tmp_path / "buffer", video="decode")
    for episode in range(3):
        video_path(folder, episode).parent.mkdir(parents=True, exist_ok=True)
        video_path(folder, episode).touch()
    with pytest.raises(FailedError, match=r'pip install "mmreplay\[video\]"'):
        mr.load(folder, tmp_path / "buffer", video="decode")


class Plane(np.ndarray):
    """Pixels of a frame, without space between lines."""

    line_size = 3 * 640


class Film:
    """Stands for PyAV, and unpacks a video of black frames, whatever is in the file."""

    class error:
        FFmpegError = OSError

    width, height, frames, pts, time_base = 640, 480, 2000, 0, 0.1

    def __init__(self):
        self.streams = SimpleNamespace(video=[self])
        self.video = SimpleNamespace(reformatter=self)

    def VideoReformatter(self):
        return self

    def open(self, path, format):
        return self

    def decode(self, stream):
        return iter([self])

    def reformat(self, frame, format):
        plane = np.zeros(3 * self.width * self.height, np.uint8).view(Plane)
        return SimpleNamespace(planes=[plane], width=self.width, height=self.height)

    def close(self):
        pass


def test_frames_of_videos_are_not_weighed_against_the_tables(tmp_path, rng, monkeypatch):
    film = Film()
    for name in ("av", "av.video", "av.video.reformatter"):
        monkeypatch.setitem(sys.modules, name, film)
    features = {"observation.images.top": {"dtype": "video", "shape": [480, 640, 3]}}
    folder = write(tmp_path / "set", frames(rng, (2000,)), "v2.1", features=features)
    video_path(folder).parent.mkdir(parents=True)
    video_path(folder).touch()
    found = registry.source_format(folder)
    # 1.8 GB of frames beside some kilobytes of tables: only described.
    with registry.open_reader(found, folder, video="decode") as reader:
        described = reader.describe()
    assert described.schema["observation/images/top"].shape == (480, 640, 3)
    assert described.rows == 2000


def test_tables_that_hold_far_more_than_they_take_need_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "HARMLESS_NBYTES", 1 << 10)
    data = {
        "observation.state": np.zeros((100_000, 64), np.float32),
        "action": np.zeros((100_000, 2), np.float32),
        "episode_index": np.zeros(100_000, np.int64),
    }
    folder = write(tmp_path / "set", data, files=1)
    found = registry.source_format(folder)
    with pytest.raises(
        FormatError, match=r"times as many\. Pass allow_expansion=True if you trust the"
    ):
        registry.open_reader(found, folder)
    with registry.open_reader(found, folder, allow_expansion=True) as reader:
        assert reader.describe().rows == 100_000


def test_a_done_that_is_no_flag_is_refused(tmp_path, rng):
    data = frames(rng)
    data["next.done"] = np.where(np.arange(11) == 6, np.nan, data["next.done"])
    folder = write(tmp_path / "set", data)
    with pytest.raises(SourceError, match=r"'next.done' .*got NaN or no value in row 6"):
        mr.load(folder, tmp_path / "buffer")
    data["next.done"] = np.zeros((11, 2), np.float32)
    folder = write(tmp_path / "other", data)
    with pytest.raises(FormatError, match=r"'next.done' must .* 11 rows of float32\[2\]"):
        mr.load(folder, tmp_path / "buffer")


def test_other_numbers_in_the_information_are_a_doubt(tmp_path, rng):
    data = frames(rng)
    del data["next.done"]
    folder = write(tmp_path / "set", data, total_frames=12)
    with pytest.raises(SourceError, match="says total_frames 12, and the data has 11"):
        mr.load(folder, tmp_path / "buffer", strict=True)


@pytest.mark.parametrize(
    ("info", "match"),
    [
        ({"codebase_version": "v1.6"}, "codebase_version must be v2 or v3, got 'v1.6'"),
        ({"codebase_version": None}, "codebase_version must be v2 or v3, got 'None'"),
    ],
)
def test_other_versions_are_refused(tmp_path, rng, info, match):
    folder = write(tmp_path / "set", frames(rng), **info)
    with pytest.raises(FormatError, match=match):
        mr.load(folder, tmp_path / "buffer")


def test_files_that_differ_are_refused(tmp_path, rng):
    folder = write(tmp_path / "set", frames(rng))
    path = folder / "data" / "chunk-000" / "file-001.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["action"]), path)
    with pytest.raises(FormatError, match=r"lacks column 'action', unlike .*-000\.parq"):
        mr.load(folder, tmp_path / "buffer")
    path.unlink()
    report = mr.load(folder, tmp_path / "buffer")
    assert any("total_frames 11, and the data" in doubt for doubt in report.doubts)


def test_files_may_have_other_widths_and_orders_and_no_rows(tmp_path, rng):
    """As edits of several libraries leave them."""
    folder = write(tmp_path / "set", data := frames(rng))
    chunk = folder / "data" / "chunk-000"
    path = chunk / "file-001.parquet"
    table = pq.read_table(path)
    table = table.set_column(
        table.column_names.index("action"),
        "action",
        table["action"].combine_chunks().cast(pa.list_(pa.float64(), 2)),
    )
    pq.write_table(table.select(table.column_names[::-1]), path)
    pq.write_table(table.slice(0, 0), chunk / "file-002.parquet")
    report = mr.load(folder, tmp_path / "buffer", done="terminated", strict=True)
    assert "column 'action' is of several types, and was read as" in report.notes[0]
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
    np.testing.assert_array_equal(rows["action"], data["action"].astype(float))
    np.testing.assert_array_equal(rows["observation"]["state"], data["observation.state"])


def test_numbers_that_an_edit_made_floats_are_read(tmp_path, rng):
    data = frames(rng) | {"task_index": np.arange(11) % 3}
    numbers = ("episode_index", "task_index", "frame_index", "index")
    floats = data | {name: data[name].astype(float) for name in numbers}
    folder = write(tmp_path / "set", floats)
    write_tasks(folder, "v3.0", numbers=(0.0, 1.0, 2.0))
    report = mr.load(folder, tmp_path / "buffer", done="terminated", strict=True)
    assert report.episodes == len(np.unique(data["episode_index"]))
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        texts = buffer.gather_all()["task"].text()
    assert texts == [TASKS[number] for number in data["task_index"]]


@pytest.mark.parametrize(
    ("odd", "got"),
    [
        (0.5, "got 0.5 in row 3"),
        (np.nan, "got nan in row 3"),
        ("a", "got other values"),
        (None, "lacks a value in row 3"),
    ],
)
def test_an_episode_index_that_is_no_number_is_refused(tmp_path, rng, odd, got):
    folder = write(tmp_path / "set", frames(rng), files=1)
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    numbers = table["episode_index"].to_pylist()
    kind = float if isinstance(odd, float) else str if odd == "a" else int
    numbers = [kind(number) for number in numbers]
    numbers[3] = odd
    at = table.column_names.index("episode_index")
    pq.write_table(table.set_column(at, "episode_index", pa.array(numbers)), path)
    with pytest.raises((FormatError, SourceError), match=got) as caught:
        mr.load(folder, tmp_path / "buffer")
    assert "'episode_index'" in str(caught.value)


def test_labels_of_rows_that_pandas_adds_are_no_field(tmp_path, rng):
    folder = write(tmp_path / "set", frames(rng), files=1)
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path).append_column("__index_level_0__", pa.array(range(11)))
    about = {"pandas": '{"index_columns": ["__index_level_0__"]}'}
    pq.write_table(table.replace_schema_metadata(about), path)
    report = mr.load(folder, tmp_path / "buffer")
    assert any("'__index_level_0__' is the index" in note for note in report.notes)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert "__index_level_0__" not in buffer.schema


def test_task_numbers_that_are_none_have_an_empty_text(tmp_path, rng):
    data = frames(rng) | {"task_index": np.array([0.0, 0.5, np.nan] + 8 * [1.0])}
    folder = write(tmp_path / "set", data)
    write_tasks(folder, "v3.0")
    report = mr.load(folder, tmp_path / "buffer")
    assert any("'task_index' 0.5 has no text, and such" in d for d in report.doubts)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        texts = buffer.gather_all()["task"].text()
    assert texts == [TASKS[0], "", "", *8 * [TASKS[1]]]


def test_a_damaged_image_is_named(tmp_path, rng):
    data = frames(rng, (3,), image=True)
    folder = write(tmp_path / "set", data, files=1)
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    held = table["observation.images.top"].to_pylist()
    held[1]["bytes"] = held[1]["bytes"][:60]
    place = table.column_names.index("observation.images.top")
    pq.write_table(table.set_column(place, "observation.images.top", pa.array(held)), path)
    with pytest.raises(CorruptError, match="row 1 is not a complete JPEG or PNG image of"):
        mr.load(folder, tmp_path / "buffer")


def test_flipped_bits_are_errors_that_name_the_dataset(tmp_path, rng):
    folder = write(tmp_path / "set", frames(rng, (5, 4)), files=1)
    path = folder / "data" / "chunk-000" / "file-000.parquet"
    whole = path.read_bytes()
    for number, place in enumerate(rng.integers(0, len(whole), 30).tolist()):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed if number % 4 else whole[:place])
        target = tmp_path / str(number)

        def load(target=target):
            mr.load(folder, target)

        error = error_of(load)
        if error is not None:
            assert str(folder) in text_of(error)
            assert not target.exists()


TASKS = ["pick up the cup", "=1+å", ""]


def write_tasks(folder, version, tasks=TASKS, numbers=(0, 1, 2)):
    """Texts of tasks in the layout of a version."""
    if version == "v2.1":
        lines = [
            json.dumps({"task_index": number, "task": text})
            for number, text in zip(numbers, tasks, strict=True)
        ]
        (folder / "meta" / "tasks.jsonl").write_text("\n".join(lines) + "\n")
        return
    # As pandas writes an index without a name.
    table = pa.table({"task_index": list(numbers), "__index_level_0__": list(tasks)})
    pq.write_table(table, folder / "meta" / "tasks.parquet")


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_the_text_of_a_task_is_a_field(version, tmp_path):
    data = frames(np.random.default_rng(0))
    data["task_index"] = np.arange(11) % 3
    write(tmp_path / "set", data, version)
    write_tasks(tmp_path / "set", version)
    report = mr.load(tmp_path / "set", tmp_path / "buffer")
    assert "'task' is the text of the 3 tasks that 'task_index' names" in report.notes
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert buffer.schema["task"] == mr.Field.text(max_bytes=16)
        texts = buffer.gather_all()["task"].text()
    assert texts == [TASKS[number % 3] for number in range(11)]


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("numbers", [(1, 4, 2), (0, 1 << 40, 7), (9, 8, 3)])
def test_tasks_go_by_their_numbers_which_may_have_gaps(version, numbers, tmp_path):
    data = frames(np.random.default_rng(0))
    data["task_index"] = np.array(numbers)[np.arange(11) % 3]
    write(tmp_path / "set", data, version)
    write_tasks(tmp_path / "set", version, numbers=numbers)
    mr.load(tmp_path / "set", tmp_path / "buffer", done="terminated", strict=True)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        texts = buffer.gather_all()["task"].text()
    assert texts == [TASKS[number % 3] for number in range(11)]


def test_a_frame_of_no_task_has_an_empty_text_and_is_a_doubt(tmp_path):
    data = frames(np.random.default_rng(0))
    data["task_index"] = np.arange(11) % 4
    write(tmp_path / "set", data)
    write_tasks(tmp_path / "set", "v3.0")
    report = mr.load(tmp_path / "set", tmp_path / "buffer")
    assert any("'task_index' 3 has no text" in doubt for doubt in report.doubts)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert buffer.gather_all()["task"].text()[:4] == [*TASKS, ""]


@pytest.mark.parametrize(
    ("version", "change", "message"),
    [
        ("v3.0", {"numbers": (0, 1, 1)}, "no number twice, got 1"),
        ("v2.1", {"numbers": (0, 1, 1)}, "no number twice, got 1"),
        ("v2.1", {"numbers": (0, 1, -1)}, "a number from 0 on for each task, .* got -1"),
        ("v3.0", {"numbers": (0.0, 1.5, 2.0)}, "a number from 0 on .* got 1.5"),
        ("v2.1", {"tasks": [1, 2, 3]}, "line 1 must have a number 'task_index'"),
        ("v3.0", {"tasks": [1, 2, 3]}, "must be text in at most"),
        ("v3.0", {"tasks": [None, "a", "b"]}, "a number and a text in each row"),
    ],
)
def test_tasks_that_are_no_texts_are_refused(version, change, message, tmp_path):
    write(tmp_path / "set", frames(np.random.default_rng(0)), version)
    write_tasks(tmp_path / "set", version, **change)
    with pytest.raises(FormatError, match=message):
        mr.load(tmp_path / "set", tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


NOTES = ["a", "", "a text of more than twelve bytes", "épingle", *"abcdefg"]


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize(
    ("section", "retained"),
    [
        ({}, slice(0, 11)),
        ({"episodes": slice(1, 3)}, slice(4, 11)),
        ({"rows": slice(3, 9)}, slice(3, 9)),
    ],
    ids=["all", "episodes", "rows"],
)
@pytest.mark.parametrize(
    ("tasks", "name", "fields", "expected"),
    [
        (False, "note", None, ["note"]),
        (True, "note", None, ["note", "task"]),
        (False, "note", ["note"], ["note"]),
        (True, "note", ["note"], ["note"]),
        (True, "note", ["task"], ["task"]),
        (True, "note", ["task", "note"], ["note", "task"]),
        (False, "task", None, ["own"]),
        (True, "task", ["task"], ["own"]),
        (True, "task", ["meta/tasks"], ["task"]),
        (True, "note", ["task_index"], []),
    ],
)
def test_columns_of_text_come_with_tasks(
    tmp_path, engine, section, retained, tasks, name, fields, expected
):
    data = frames(np.random.default_rng(0))
    data["task_index"] = np.arange(11) % 3
    data[name] = np.array(NOTES)
    write(tmp_path / "set", data)
    if tasks:
        write_tasks(tmp_path / "set", "v3.0")
    if fields is not None:
        fields = [*fields, "observation.state", "action"]
    mr.load(tmp_path / "set", tmp_path / "buffer", engine=engine, fields=fields, **section)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
        found = {path: rows[path].text() for path in buffer.schema.varying}
    known = {
        "note": ("note", NOTES),
        "own": ("task", NOTES),
        "task": ("task", [TASKS[row % 3] for row in range(11)]),
    }
    assert found == {known[each][0]: known[each][1][retained] for each in expected}

"""From one LeRobot set to another: frames are copied as packets, to the bit."""

import json
import time
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert import registry
from mmreplay.datasets import images, lerobot_video
from mmreplay.datasets.lerobot_writer import Sizes
from mmreplay.errors import FormatError, StaleError
from tests.convert.foreign.lerobot_sets import FPS, TOP, WRIST, code, codes_of, export, ring
from tests.convert.foreign.test_lerobot_export import PLAIN, filled, info_of, rows_of, table_of

pytest.importorskip("av")
LENGTHS = (5, 1, 8, 3, 6, 2, 7, 4)
CAMERAS = ("observation/images/top", "observation/images/wrist")


@pytest.fixture
def source(tmp_path):
    """A set of many files, and the steps that it was written from."""
    steps = ring(tmp_path / "ring", LENGTHS)
    export(tmp_path / "ring", tmp_path / "set", sizes=Sizes(0.002, 0.002, 2))
    return tmp_path / "set", steps


def convert(*args):
    assert run(["convert", *map(str, args), "--to", "lerobot"]) == 0


def reported(capsys, *args):
    """The report of a conversion."""
    capsys.readouterr()
    convert(*args, "--json")
    return json.loads(capsys.readouterr().out)


def decoded(folder, tmp_path):
    """All rows of a set, by field."""
    target = tmp_path / f"decoded-{folder.name}"
    mr.load(folder, target, video="decode", overwrite=True)
    with mr.ReplayBuffer.open(target) as buffer:
        rows = buffer.gather_all()
        return {
            name: rows[name].text() if field.kind == "text" else np.asarray(rows[name])
            for name, field in buffer.schema.fields.items()
        }


def rows_of_episodes(steps, numbers):
    """Rows of the steps of some episodes of the set, in order."""
    order = [step["episode"] for step in steps if not step["frame"]]
    chosen = [order[number] for number in numbers]
    return [row for row, step in enumerate(steps) if step["episode"] in chosen]


def test_episodes_that_are_selected_keep_their_frames_to_the_bit(
    source, tmp_path, capsys, monkeypatch
):
    folder, steps = source
    decodes = []
    frame_at = images._Video.frame_at
    monkeypatch.setattr(
        images._Video, "frame_at", lambda self, *args: decodes.append(args) or frame_at(self, *args)
    )
    report = reported(capsys, folder, tmp_path / "some", "--episodes", "0,2,3,6")
    assert not any("encoded" in doubt or "lossy" in doubt for doubt in report["doubts"])
    # The first frame of each camera, for its shape.
    assert len(decodes) == 2
    monkeypatch.undo()
    rows = rows_of_episodes(steps, [0, 2, 3, 6])
    before, after = decoded(folder, tmp_path), decoded(tmp_path / "some", tmp_path)
    for name in before:
        np.testing.assert_array_equal(np.asarray(before[name])[rows], after[name], err_msg=name)
    episodes, whole = (table_of(each, "meta/episodes") for each in (tmp_path / "some", folder))
    for name in (key for key in whole if key.startswith(f"stats/{TOP}")):
        assert episodes[name] == [whole[name][number] for number in (0, 2, 3, 6)]
    assert info_of(tmp_path / "some")["features"] == info_of(folder)["features"]


@pytest.mark.slow
def test_conditions_read_the_frames_of_cameras(source, tmp_path, capsys):
    folder, steps = source
    before = decoded(folder, tmp_path)
    frames = before[CAMERAS[0]]
    firsts = [row for row, step in enumerate(steps) if not step["frame"]]
    episodes = [*pairwise([*firsts, len(steps)])]
    means = [float(frames[slice(*each)].mean()) for each in episodes]
    # Between two means, so that no rounding decides.
    limit = float(np.mean(np.sort(means)[3:5]))
    rows = [
        row
        for mean, each in zip(means, episodes, strict=True)
        if mean > limit
        for row in range(*each)
    ]
    report = reported(
        capsys, folder, tmp_path / "some", "--where", f"mean(`{CAMERAS[0]}`) > {limit}"
    )
    assert not any("encoded" in doubt for doubt in report["doubts"])
    after = decoded(tmp_path / "some", tmp_path)
    for name in before:
        np.testing.assert_array_equal(np.asarray(before[name])[rows], after[name], err_msg=name)


@pytest.mark.slow
def test_sets_are_merged_without_encoding_again(source, tmp_path, capsys):
    folder, steps = source
    other = ring(tmp_path / "ring2", LENGTHS[::-1])
    options = {"fps": FPS, "crf": 40, "gop": 3, "codec": "av1"}
    mr.export(tmp_path / "ring2", tmp_path / "other", format="lerobot", **options)
    report = reported(capsys, folder, tmp_path / "other", folder, tmp_path / "more")
    assert not any("encoded" in doubt or "lossy" in doubt for doubt in report["doubts"])
    several = [decoded(each, tmp_path) for each in (folder, tmp_path / "other", folder)]
    after = decoded(tmp_path / "more", tmp_path)
    for name in CAMERAS:
        wanted = np.concatenate([each[name] for each in several])
        np.testing.assert_array_equal(after[name], wanted)
    assert info_of(tmp_path / "more")["total_frames"] == 2 * len(steps) + len(other)


@pytest.mark.slow
def test_other_options_encode_again_and_say_so(source, tmp_path, capsys):
    folder, steps = source
    report = reported(capsys, folder, tmp_path / "again", "-o", "crf=30")
    assert sum("were encoded again" in doubt for doubt in report["doubts"]) == 2
    report = reported(capsys, folder, tmp_path / "fast", "-o", "fps=20")
    assert sum("were encoded again" in doubt for doubt in report["doubts"]) == 2
    for name in ("again", "fast"):
        after = decoded(tmp_path / name, tmp_path)
        for camera, path in enumerate(CAMERAS):
            wanted = [code(step["episode"], step["frame"], camera) for step in steps]
            assert codes_of(after[path]).tolist() == wanted
    assert info_of(tmp_path / "fast")["fps"] == 20


def test_a_single_frame_of_another_rate_is_that_frame(source, tmp_path, capsys):
    """At half the rate its place in the file is that of a complete frame, two later."""
    folder, steps = source
    for first in (1, 7):
        options = ["--rows", f"{first}:{first + 1}", "-o", f"fps={FPS // 2}", "--overwrite"]
        report = reported(capsys, folder, tmp_path / "one", *options)
        assert sum("were encoded again" in doubt for doubt in report["doubts"]) == 2
        after = decoded(tmp_path / "one", tmp_path)
        for camera, path in enumerate(CAMERAS):
            wanted = code(steps[first]["episode"], steps[first]["frame"], camera)
            assert codes_of(after[path]).tolist() == [wanted]


@pytest.mark.parametrize("stated", [None, FPS, 2 * FPS])
@pytest.mark.parametrize(("fps", "copied"), [(FPS, True), (2 * FPS, False)])
def test_times_of_rows_say_whether_frames_are_copied(source, tmp_path, capsys, stated, fps, copied):
    """Whatever rate the set states, or none."""
    folder, steps = source
    info = info_of(folder)
    info.pop("fps")
    info |= {} if stated is None else {"fps": stated}
    (folder / "meta/info.json").write_text(json.dumps(info))
    for first, stop in ((0, len(steps)), (1, 2)):
        options = ["--rows", f"{first}:{stop}", "-o", f"fps={fps}", "--overwrite"]
        report = reported(capsys, folder, tmp_path / "other", *options)
        again = sum("were encoded again" in doubt for doubt in report["doubts"])
        # The second frame of an episode needs the first one.
        assert again == (0 if copied and stop > 2 else 2)
        after = decoded(tmp_path / "other", tmp_path)
        for camera, path in enumerate(CAMERAS):
            wanted = [code(step["episode"], step["frame"], camera) for step in steps[first:stop]]
            assert codes_of(after[path]).tolist() == wanted


def test_another_rate_encodes_episodes_that_begin_at_the_end_of_a_block(
    source, tmp_path, capsys, monkeypatch
):
    folder, steps = source
    # Episodes begin at rows 0, 5, 6, 14, 17.
    monkeypatch.setattr("mmreplay.datasets.common.fragments.default_rows", lambda *_: 6)
    report = reported(capsys, folder, tmp_path / "fast", "-o", f"fps={2 * FPS}")
    assert sum("were encoded again" in doubt for doubt in report["doubts"]) == 2
    after = decoded(tmp_path / "fast", tmp_path)
    for camera, path in enumerate(CAMERAS):
        wanted = [code(step["episode"], step["frame"], camera) for step in steps]
        assert codes_of(after[path]).tolist() == wanted


def test_names_of_components_go_with_their_field(tmp_path):
    names = {"joints": ["shoulder", "elbow"], "target": ["x", "y"]}
    fields = {"observation": {name: mr.Field((2,), "float32") for name in names}}
    features = {
        f"observation/{name}": {"name": f"observation.{name}", "names": each}
        for name, each in names.items()
    }
    with mr.ReplayBuffer.create(
        tmp_path / "ring",
        mr.Schema(fields),
        20,
        user_metadata={"lerobot": {"fps": FPS, "features": features}},
    ) as buffer:
        for n in range(4):
            buffer.add(observation={"joints": [n, n], "target": [-n, -n]})
    for number, (changes, wanted) in enumerate(
        [
            ({}, {"observation.joints": "joints", "observation.target": "target"}),
            (
                {"rename": {"observation/joints": "observation/arm"}},
                {"observation.arm": "joints", "observation.target": "target"},
            ),
            (
                {
                    "rename": {
                        "observation/joints": "observation/target",
                        "observation/target": "observation/joints",
                    }
                },
                {"observation.target": "joints", "observation.joints": "target"},
            ),
            (
                {
                    "drop": ["observation/target"],
                    "rename": {"observation/joints": "observation/target"},
                },
                {"observation.target": "joints"},
            ),
        ]
    ):
        folder = tmp_path / f"set{number}"
        mr.export(tmp_path / "ring", folder, format="lerobot", **changes)
        stored = info_of(folder)["features"]
        found = {name: stored[name]["names"] for name in stored if name.startswith("observation.")}
        assert found == {name: names[of] for name, of in wanted.items()}


@pytest.mark.parametrize(
    ("first", "copied"),
    [
        (0, True),
        (1, False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(5, True), (6, False), (7, True)]
        ),
    ],
)
@pytest.mark.sliced(1)
def test_rows_within_an_episode_are_copied_where_a_frame_needs_no_other(
    source, tmp_path, capsys, first, copied
):
    """Of H.264 with a complete frame each second one."""
    folder, steps = source
    report = reported(capsys, folder, tmp_path / "some", "--rows", f"{first}:21")
    assert any("encoded again" in doubt for doubt in report["doubts"]) != copied
    after, before = decoded(tmp_path / "some", tmp_path), decoded(folder, tmp_path)
    for camera, path in enumerate(CAMERAS):
        wanted = [code(step["episode"], step["frame"], camera) for step in steps[first:21]]
        assert codes_of(after[path]).tolist() == wanted
        if copied:
            np.testing.assert_array_equal(after[path], before[path][first:21])
    np.testing.assert_array_equal(after["action"], before["action"][first:21])


def test_what_is_decoded_before_it_is_cast_is_a_number(source, tmp_path):
    folder, steps = source
    options = ["--cast", f"{CAMERAS[0]}=int16", "--drop", CAMERAS[1]]
    convert(folder, tmp_path / "cast", *options)
    found = decoded(tmp_path / "cast", tmp_path)[CAMERAS[0]]
    assert found.dtype == np.int16
    wanted = [code(step["episode"], step["frame"], 0) for step in steps]
    assert codes_of(found).tolist() == wanted


@pytest.mark.slow
def test_sets_without_a_record_and_with_channels_first_are_copied(tmp_path, capsys):
    shades = np.arange(6 * 3 * 16 * 16, dtype=np.int64).reshape(6, 3, 16, 16) // 20 % 256
    filled(tmp_path / "ring", {"map": mr.Field((3, 16, 16), "uint8")}, {"map": shades.astype("u1")})
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    for name in ("recorded", "plain"):
        report = reported(capsys, tmp_path / "set", tmp_path / name)
        assert not any("encoded" in doubt for doubt in report["doubts"])
        one, other = (decoded(tmp_path / each, tmp_path)["map"] for each in ("set", name))
        np.testing.assert_array_equal(one, other)
        assert one.shape == ((6, 3, 16, 16) if name == "recorded" else (6, 16, 16, 3))
        (tmp_path / "set" / "meta" / "mmreplay.json").unlink(missing_ok=True)


@pytest.mark.slow
def test_a_set_with_images_of_its_own_becomes_video_when_asked(source, tmp_path):
    folder, _ = source
    export(tmp_path / "ring", tmp_path / "images", video=False)
    convert(tmp_path / "images", tmp_path / "video")
    assert info_of(tmp_path / "video")["features"][WRIST]["dtype"] == "video"
    convert(folder, tmp_path / "back", "-o", "from.video=decode", "-o", "to.video=false")
    assert info_of(tmp_path / "back")["features"][WRIST]["dtype"] == "image"
    before, after = decoded(folder, tmp_path), decoded(tmp_path / "back", tmp_path)
    np.testing.assert_array_equal(before[CAMERAS[1]], after[CAMERAS[1]])


def test_damaged_videos_are_named_and_nothing_appears(source, tmp_path, capsys):
    folder, _ = source
    path = sorted((folder / "videos" / TOP).rglob("*.mp4"))[-1]
    path.write_bytes(path.read_bytes()[:200])
    lerobot_video._index.cache_clear()
    assert run(["convert", str(folder), str(tmp_path / "made"), "--to", "lerobot"]) != 0
    assert path.name in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def tasks_of(folder):
    """The text of the task of each row of a set."""
    tasks = pq.read_table(folder / "meta" / "tasks.parquet").to_pydict()
    texts = dict(zip(tasks["task_index"], tasks["task"], strict=True))
    return [texts[number] for number in table_of(folder)["task_index"]]


def test_a_task_that_was_an_option_stays_from_set_to_set_and_to_a_ring(tmp_path):
    filled(tmp_path / "ring", {}, {})
    for task in ("pick", "place"):
        mr.export(tmp_path / "ring", tmp_path / task, format="lerobot", fps=FPS, task=task)
    convert(tmp_path / "pick", tmp_path / "some", "--episodes", "1")
    assert tasks_of(tmp_path / "some") == ["pick"] * 3
    convert(tmp_path / "place", tmp_path / "some", tmp_path / "both")
    assert tasks_of(tmp_path / "both") == ["place"] * 6 + ["pick"] * 3
    mr.load(tmp_path / "both", tmp_path / "back")
    rows, schema = rows_of(tmp_path / "back")
    assert rows["task"] == ["place"] * 6 + ["pick"] * 3
    before = rows_of(tmp_path / "ring")[1]
    assert dict(schema.fields) == {**before.fields, "task": schema["task"]}
    assert schema.roles == before.roles


def test_fewer_steps_have_fewer_frames_a_second(tmp_path, capsys):
    filled(tmp_path / "ring", {}, {}, user_metadata={"fps": 8})
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=10)
    convert(tmp_path / "set", tmp_path / "half", "--frame-skip", "2")
    assert info_of(tmp_path / "half")["fps"] == 5
    mr.load(tmp_path / "half", tmp_path / "back")
    with mr.ReplayBuffer.open(tmp_path / "back") as buffer:
        user = buffer.metadata.user
        assert (user["fps"], user["lerobot"]["fps"]) == (4, 5)
    third = [str(tmp_path / "set"), str(tmp_path / "third"), "--to", "lerobot", "--frame-skip", "3"]
    assert run(["convert", *third]) != 0
    message = capsys.readouterr().err
    assert "fps of user metadata 'lerobot' must be a whole number" in message
    assert not (tmp_path / "third").exists()
    convert(tmp_path / "set", tmp_path / "third", "--frame-skip", "3", "-o", "fps=3")
    assert info_of(tmp_path / "third")["fps"] == 3


def test_an_empty_task_adds_no_field(tmp_path):
    filled(tmp_path / "ring", {}, {})
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS)
    mr.load(tmp_path / "set", tmp_path / "back")
    assert rows_of(tmp_path / "back")[1] == rows_of(tmp_path / "ring")[1]


def test_a_task_has_no_field_where_others_lie_below_its_name(tmp_path):
    filled(tmp_path / "ring", {"task/x": mr.Field((), "int64")}, {"task/x": range(6)})
    mr.export(tmp_path / "ring", tmp_path / "set", format="lerobot", fps=FPS, task="pick")
    report = mr.load(tmp_path / "set", tmp_path / "back")
    assert any("the texts of the tasks were left out, as meta/mmrep" in d for d in report.doubts)
    assert rows_of(tmp_path / "back")[0]["task/x"].tolist() == [*range(6)]


@pytest.mark.parametrize("stored", [False, True])
def test_a_set_that_grows_while_it_is_read_is_named_and_what_to_do(tmp_path, stored):
    fields = {"map": mr.Field((16, 16, 3), "uint8"), "terminated": mr.Field((), "bool")}
    schema = mr.Schema.from_flat({**PLAIN, **fields})
    with (
        mr.ReplayBuffer.create(tmp_path / "ring", schema, 40, autoreset="disabled") as buffer,
        mr.AutoExport(buffer, tmp_path / "set", format="lerobot", fps=FPS) as exporter,
    ):

        def record(steps):
            for n in range(steps):
                step = {"observation": np.zeros(2, "f4"), "action": n, "terminated": n == steps - 1}
                buffer.add({**step, "map": np.full((16, 16, 3), 9, np.uint8)})
            exporter.flush()

        # Files of their own, until the third one is joined with both.
        record(8)
        record(4)
        lerobot_set = registry.named("lerobot")
        options = {} if stored else {"video": "decode"}
        opened = registry.open_stored if stored else registry.open_reader
        with opened(lerobot_set, tmp_path / "set", **options) as reader:
            before = reader.identity()
            last = list(reader.blocks(4))[-1].columns["map"] if stored else None
            record(4)
            lerobot_video._index.cache_clear()
            message = r"set: episodes were appended while it was read \(.*\) Read a copy"
            with pytest.raises(StaleError, match=message):
                np.asarray(list(reader.blocks(4))[-1].columns["map"])
            if last is not None:
                with pytest.raises(StaleError, match=message):
                    np.asarray(last)
                with pytest.raises(StaleError, match=message):
                    last.packets(FPS)
        with opened(lerobot_set, tmp_path / "set", **options) as reader:
            assert reader.identity() != before
            assert reader.describe().rows == 16


def test_a_file_that_is_gone_without_appends_is_missing(source, tmp_path):
    folder, _ = source
    next((folder / "videos" / TOP).rglob("*.mp4")).unlink()
    with pytest.raises(FormatError, match="does not exist, but the dataset has frames"):
        mr.load(folder, tmp_path / "back", video="decode")


@pytest.mark.slow
def test_copies_take_a_fraction_of_the_time(tmp_path):
    ring(tmp_path / "ring", [60] * 8, size=128)
    export(tmp_path / "ring", tmp_path / "set")
    seconds = []
    for options in ((), ("-o", "crf=24")):
        begin = time.perf_counter()
        convert(tmp_path / "set", tmp_path / f"made{len(seconds)}", *options)
        seconds.append(time.perf_counter() - begin)
    assert seconds[0] < seconds[1] / 2

"""LeRobot's videos: each row has the frame that meta/episodes and its time name."""

import os
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.datasets import images, lerobot_episodes
from mmreplay.errors import CorruptError, FormatError
from tests.convert.foreign.lerobot_sets import (
    FPS,
    SURPLUS,
    TOP,
    WRIST,
    change_info,
    change_meta,
    code,
    codes_of,
    film,
    make,
    wanted,
)
from tests.convert.foreign.test_lerobot import frames, write

pytest.importorskip("av", reason="PyAV is not installed")
LENGTHS = (4, 1, 6)
FIELD = "observation/images/top"
LAYOUTS = {
    "plain": {(0, 0): [0, 1, 2]},
    "gap": {(0, 0): [0, -9, 1, 2]},
    "front": {(0, 0): [-5, 0, 1, 2]},
    "swapped": {(0, 0): [2, 0, 1]},
    "files": {(0, 0): [0], (0, 1): [-1, 1, -1], (0, 2): [2, -3]},
    "files swapped": {(0, 0): [2, -2], (0, 3): [1, 0], (7, 0): [-4]},
    "chunks with holes": {(2, 5): [1], (9, 1): [-30, 2], (9, 2): [0]},
}
CODECS = {
    "key frames": partial(film, g=1),
    "pairs": partial(film, codec="libx264", g=2, crf=18),
    "frames out of order": partial(film, codec="libx264", g=12, bf=3, crf=18),
}


def load(folder, target, **options):
    """The report, and the codes of the rows' frames by field."""
    report = mr.load(folder, target, video="decode", **options)
    with mr.ReplayBuffer.open(target) as buffer:
        rows = buffer.gather_all()
        found = {p: codes_of(rows[p]).tolist() for p in rows.fields if "images" in p}
    return report, found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_row_has_the_frame_of_its_address(tmp_path, layout, codec):
    make(tmp_path / "set", LENGTHS, {TOP: LAYOUTS[layout]}, video=CODECS[codec])
    report, found = load(tmp_path / "set", tmp_path / "buffer")
    assert found[FIELD] == wanted(LENGTHS)
    surplus = -sum(n for each in LAYOUTS[layout].values() for n in each if n < 0)
    notes = [note for note in report.notes if "belong to no episode" in note]
    files = [each for each in LAYOUTS[layout].values() if min(each) < 0 <= max(each)]
    if layout == "files swapped":
        surplus -= 4  # a file that no episode names is not opened
    assert notes == [
        f"{surplus} frames in {len(files)} videos of {TOP!r} belong to no episode, and "
        "were left out"
    ] * (surplus > 0)


@pytest.mark.parametrize("seed", range(6))
def test_cameras_may_lie_in_any_files_in_any_order(tmp_path, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 12, rng.integers(2, 8)).tolist()

    def layout():
        order, files = rng.permutation(len(lengths)).tolist(), {}
        for number in order:
            content = files.setdefault((int(rng.integers(2)), int(rng.integers(2))), [])
            content += [-int(rng.integers(1, 25))] * int(rng.random() < 0.4) + [number]
        return files

    codec = list(CODECS.values())[seed % len(CODECS)]
    make(tmp_path / "set", lengths, {TOP: layout(), WRIST: layout()}, video=codec)
    _, found = load(tmp_path / "set", tmp_path / "buffer")
    assert found == {FIELD: wanted(lengths, 0), "observation/images/wrist": wanted(lengths, 1)}


def test_the_decoder_seeks_at_most_once_an_episode(tmp_path, monkeypatch):
    seeks, frames_ = [], []
    seek, forward = images._Video._seek, images._Video._forward
    monkeypatch.setattr(images._Video, "_seek", lambda self, s: (seeks.append(s), seek(self, s)))
    monkeypatch.setattr(
        images._Video, "_forward", lambda self, s: (frames_.append(s), forward(self, s))
    )
    lengths = (30, 20, 25)
    for number, (layout, most) in enumerate(
        [([0, 1, 2], 0), ([0, -40, 1, 2], 1), ([0, -2, 1, 2], 0), ([2, 0, 1], 3)]
    ):
        seeks.clear()
        folder = make(tmp_path / str(number), lengths, {TOP: {(0, 0): layout}})
        load(folder, tmp_path / f"buffer{number}")
        # The first frame is read when the set is opened, for its shape.
        assert len(seeks) <= most + (layout[0] != 0)


def test_rows_that_were_removed_leave_their_frames(tmp_path, rng):
    data = frames(rng, (10, 10))
    kept = ~np.isin(np.arange(20), [0, 1, 5, 13, 19])
    data = {name: values[kept] for name, values in data.items()}
    folder = make(tmp_path / "set", (10, 10), {TOP: {(0, 0): [1, 0]}}, data=data)
    report, found = load(folder, tmp_path / "buffer")
    assert found[FIELD] == np.array(wanted((10, 10)))[kept].tolist()
    assert any(
        "'frame_index' must count the frames of each episode from 0 on, and the first "
        "that does not is 2 in row 0" in doubt
        for doubt in report.doubts
    )
    assert any(
        "says length 10 of episode 0, and the data has 7" in doubt for doubt in report.doubts
    )


def test_without_times_frames_are_counted_by_fps(tmp_path, rng):
    data = frames(rng)
    del data["timestamp"]
    layout = {TOP: {(0, 0): [1, -3, 0, 2]}}
    folder = make(tmp_path / "set", LENGTHS, layout, data=data)
    assert load(folder, tmp_path / "buffer")[1][FIELD] == wanted(LENGTHS)
    for fps in (0, -1, "10", None, 1e-320, True):
        change_info(folder, fps=fps)
        with pytest.raises(FormatError, match=r"fps of info\.json must be from 0\.001 to"):
            load(folder, tmp_path / "other")


def test_times_that_are_no_numbers_are_refused(tmp_path, rng):
    data = frames(rng)
    data["timestamp"] = np.arange(11)
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}}, data=data)
    with pytest.raises(FormatError, match=r"'timestamp' must hold one float32 or .* a"):
        load(folder, tmp_path / "buffer")


@pytest.mark.parametrize(
    ("layout", "starts", "match"),
    [
        # The file is too short.
        ([0, 1], None, r"has 5 frames by its header, but video '.*' has 11 rows there"),
        ([0, 1, 2], [0.0, 0.4, 0.8], r"no frame at 1\.1000 s, which frame 3 of episode"),
        ([0, 1, 2], [0.0, 0.4, 7.0], r"no frame at 7\.0000 s, which frame 0 of episode"),
        # Between two frames.
        ([0, 1, 2], [0.0, 0.45, 0.5], r"no frame at 0\.4500 s, which frame 0 of episode"),
    ],
)
def test_a_missing_frame_is_refused(tmp_path, layout, starts, match):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}})
    codes = [code(e, n) for e in layout for n in range(LENGTHS[e])]
    if starts == [0.0, 0.4, 0.8]:
        starts = [0.0, 0.4, 0.8]
    film(folder / "videos" / TOP / "chunk-000" / "file-000.mp4", codes)
    if starts is not None:
        change_meta(folder, **{f"videos/{TOP}/from_timestamp": starts})
    with pytest.raises(CorruptError, match=match):
        load(folder, tmp_path / "buffer")
    assert os.listdir(tmp_path) == ["set"]


def test_a_truncated_video_is_named(tmp_path):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}})
    path = folder / "videos" / TOP / "chunk-000" / "file-000.mp4"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CorruptError, match=r"file-000\.mp4 cannot be decoded after 0"):
        load(folder, tmp_path / "buffer")
    path.unlink()
    with pytest.raises(FormatError, match=r"mp4 does not exist, but the dataset has f"):
        load(folder, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"from_timestamp": [0.0, np.nan, 0.5]}, r"must be at least 0, got 0, 0 and nan"),
        ({"from_timestamp": [0.0, np.inf, 0.5]}, r"must be at least 0, got 0, 0 and inf"),
        ({"from_timestamp": [0.0, -0.1, 0.5]}, r"got 0, 0 and -0\.1 of episode 1"),
        ({"chunk_index": [0, -1, 0]}, r"must be at least 0, got -1, 0 and 0\.4"),
        ({"file_index": [0, 0, 1 << 40]}, r"must be at least 0, got 0, 1\.09"),
        ({"file_index": [0, 0, 1]}, r"file-001\.mp4 does not exist"),
        ({"file_index": [0, 0, None]}, r"file_index' lacks a value in row 2\."),
        ({"file_index": ["0", "0", "0"]}, r"file_index' must hold numbers, got string"),
        ({"from_timestamp": None}, r"where episodes are, got no 'videos/.*timestamp'"),
        (
            {"file_index": [0.0, 0.5, 0.0]},
            r"file_index' must hold whole numbers, got 0\.5 in row 1\. Download the "
            r"dataset again, or pass video='skip'\.$",
        ),
        ({"chunk_index": [0.0, 0.0, 0.25]}, r"chunk_index' must .*, got 0\.25 in row 2"),
        ({"file_index": [np.nan, 0.0, 0.0]}, r"must hold whole numbers, got nan in r"),
        ({"file_index": [0.0, np.inf, 0.0]}, r"must hold whole numbers, got inf in r"),
    ],
)
def test_addresses_that_are_none_are_refused(tmp_path, change, match):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}})
    change_meta(folder, **{f"videos/{TOP}/{name}": v for name, v in change.items()})
    with pytest.raises(FormatError, match=match):
        load(folder, tmp_path / "buffer")
    report = mr.load(folder, tmp_path / "skipped", video="skip")
    assert report.rows == 11


def test_whole_numbers_may_be_stored_as_floats(tmp_path):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, -2, 1, 2]}})
    floats = {f"videos/{TOP}/{name}": [0.0] * 3 for name in ("chunk_index", "file_index")}
    starts = np.cumsum([0, *LENGTHS[:-1]]).astype(float)
    change_meta(
        folder,
        episode_index=[0.0, 1.0, 2.0],
        length=[float(n) for n in LENGTHS],
        dataset_from_index=starts.tolist(),
        **floats,
    )
    report, found = load(folder, tmp_path / "buffer")
    assert found[FIELD] == wanted(LENGTHS)
    assert not any(str(lerobot_episodes.EPISODES) in doubt for doubt in report.doubts)


@pytest.mark.parametrize("video", ["decode", "skip"])
@pytest.mark.parametrize("name", ["episode_index", "length", "dataset_from_index"])
def test_fractions_among_the_numbers_of_episodes_are_refused(tmp_path, name, video):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}})
    change_meta(folder, **{name: [0.0, 1.0, 2.5]})
    match = (
        rf"column '{name}' must hold whole numbers, got 2\.5 in row 2\. Download the "
        r"dataset again\.$"
    )
    with pytest.raises(FormatError, match=match):
        mr.load(folder, tmp_path / "buffer", video=video)


def test_episodes_go_by_their_number_not_by_their_row(tmp_path, rng):
    data = frames(rng)
    numbers = np.array([7, 3, 12])
    data["episode_index"] = numbers[data["episode_index"]]
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [1, -2, 2, 0]}})
    write(tmp_path / "other", data, files=1)
    os.replace(tmp_path / "other" / "data", tmp_path / "data")
    for path in (folder / "data" / "chunk-000").iterdir():
        path.unlink()
    section = next((tmp_path / "data").rglob("*.parquet"), None)
    os.replace(section, folder / "data" / "chunk-000" / "file-000.parquet")
    order = [2, 0, 1]
    table = {"episode_index": numbers[order].tolist()}
    for name, values in (
        ("length", LENGTHS),
        ("dataset_from_index", (0, 4, 5)),
        (f"videos/{TOP}/from_timestamp", (0.9, 0.0, 0.3)),
    ):
        table[name] = [values[number] for number in order]
    change_meta(folder, **table)
    report, found = load(folder, tmp_path / "buffer")
    assert found[FIELD] == wanted(LENGTHS)
    assert any("does not count from 0 without a gap" in note for note in report.notes)
    change_meta(folder, episode_index=[7, 3, 3])
    with pytest.raises(FormatError, match="has episode 3 twice"):
        load(folder, tmp_path / "twice")
    change_meta(folder, episode_index=[7, 4, 3])
    with pytest.raises(FormatError, match="has no episode 12, so that its frames of"):
        load(folder, tmp_path / "lost")
    assert any(
        "has no episode 12, which the data has" in doubt
        for doubt in mr.load(folder, tmp_path / "skipped", video="skip").doubts
    )


SECTIONS = ({}, {"episodes": slice(0, 1)}, {"rows": slice(5, 11)})


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize(
    ("starts", "stops", "match"),
    [
        # The recorder lost a frame of the first episode.
        (
            [0.0, 0.3, 0.4],
            [0.3, 0.4, 1.0],
            r"'.*top' of episode 0 end at 0\.3000 s, but the frame of its last row begins "
            r"at 0\.3000 s\. Download the dataset again, or pass video='skip'\.",
        ),
        ([0.0, 0.4, 0.5], [0.4, 0.5, 0.9], r"of episode 2 end at 0\.9000 s, but the f"),
        (
            [0.0, 0.3, 0.5],
            None,
            r"file-000\.mp4: the last row of episode 0 of '.*top' is at 0\.3000 s, but "
            r"episode 1 begins at 0\.3000 s\. Download the dataset again, or pass video=",
        ),
        ([0.0, 0.4, 0.0], None, r"of episode [02] of .* but episode [02] begins at 0"),
        ([0.0, 0.0, 0.0], [1.1, 1.1, 1.1], r"the last row of episode \d of '.*top' is"),
    ],
)
def test_frames_that_two_rows_would_have_are_refused_before_any_is_decoded(
    tmp_path, monkeypatch, section, starts, stops, match
):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}})
    columns = {f"videos/{TOP}/from_timestamp": starts}
    if stops is not None:
        columns[f"videos/{TOP}/to_timestamp"] = stops
    change_meta(folder, **columns)
    monkeypatch.setattr(images, "_Video", None)
    with pytest.raises(FormatError, match=match):
        load(folder, tmp_path / "buffer", **section)
    assert mr.load(folder, tmp_path / "skipped", video="skip").rows == 11


@pytest.mark.parametrize("seed", range(12))
def test_addresses_are_refused_where_two_rows_have_one_frame(tmp_path, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 4, 3)
    files, begins = rng.integers(0, 2, 3), rng.integers(0, 10, 3)
    codes = np.full((2, 13), SURPLUS)
    taken = [(files[e], begins[e] + n) for e, many in enumerate(lengths) for n in range(many)]
    for (file, at), each in zip(taken, wanted(lengths), strict=True):
        codes[file, at] = each
    # All frames of both files.
    folder = make(tmp_path / "set", lengths, {TOP: {(0, 0): [0, 1, 2]}})
    for file in range(2):
        film(folder / "videos" / TOP / f"chunk-000/file-{file:03d}.mp4", codes[file])
    change_meta(
        folder,
        **{
            f"videos/{TOP}/file_index": files,
            f"videos/{TOP}/from_timestamp": begins / FPS,
            f"videos/{TOP}/to_timestamp": (begins + lengths) / FPS,
        },
    )
    if len(set(taken)) == len(taken):
        assert load(folder, tmp_path / "buffer")[1][FIELD] == wanted(lengths)
    else:
        with pytest.raises(FormatError, match=r"the last row of episode .* but episode"):
            load(folder, tmp_path / "buffer")


def test_the_end_of_an_episode_may_be_later_or_unknown(tmp_path, rng):
    data = frames(rng)
    kept = np.delete(np.arange(11), [3, 10])
    data = {name: values[kept] for name, values in data.items()}
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, -3, 1, 2]}}, data=data)
    for stops in ([0.7, 0.8, 1.4], [np.nan, 0.8, np.inf], [0.3001, 0.8001, 1.301]):
        change_meta(folder, **{f"videos/{TOP}/to_timestamp": stops})
        _, found = load(folder, tmp_path / "buffer", overwrite=True)
        assert found[FIELD] == np.array(wanted(LENGTHS))[kept].tolist()


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("rows_per_batch", [1, 3, 1024])
@pytest.mark.parametrize(
    ("row", "time", "match"),
    [
        (8, 0.2, r"rise within an episode, as two .* got 0\.2 s after 0\.2 s in row 8"),
        (8, 0.1, r"within an episode, .* got 0\.1 s after 0\.2 s in row 8\. Download"),
        (9, np.nan, r"within an episode, .* got nan s after 0\.3 s in row 9\. Downl"),
        (9, 0.30015, r"within an episode, .* got 0\.30015 s after 0\.3 s in row 9\. D"),
    ],
)
def test_times_that_do_not_rise_are_refused(
    tmp_path, rng, monkeypatch, section, rows_per_batch, row, time, match
):
    monkeypatch.setattr(lerobot_episodes, "BATCH_ROWS", rows_per_batch)
    data = frames(rng)
    make(tmp_path / "good", LENGTHS, {TOP: {(0, 0): [2, 0, 1]}}, data=data)
    assert load(tmp_path / "good", tmp_path / "b")[1][FIELD] == wanted(LENGTHS)
    data["timestamp"][row] = time
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [2, 0, 1]}}, data=data)
    monkeypatch.setattr(images, "_Video", None)
    with pytest.raises(FormatError, match=match):
        load(folder, tmp_path / "buffer", **section)


def test_an_episode_at_several_addresses_has_frames_of_its_own(tmp_path, rng):
    order = [0, 1, 4, 2, 3, 5, 6, 7, 8, 9, 10]
    data = {name: values[order] for name, values in frames(rng).items()}
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [1, 0, 2]}}, data=data)
    report, found = load(folder, tmp_path / "buffer")
    assert found[FIELD] == np.array(wanted(LENGTHS))[order].tolist()
    assert any("episode lie in 4 places for 3 numbers" in d for d in report.doubts)
    data["timestamp"][3] = 0.1
    folder = make(tmp_path / "twice", LENGTHS, {TOP: {(0, 0): [1, 0, 2]}}, data=data)
    with pytest.raises(
        FormatError, match=r"the last row of episode 0 .* is at 0\.2000 s, but episode 0"
    ):
        load(folder, tmp_path / "other")


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_path_that_episodes_share_is_one_file(tmp_path, rng, version):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0], (0, 1): [1, 2]}})
    change_info(folder, codebase_version=version, video_path="videos/{video_key}.mp4")
    film(folder / "videos" / f"{TOP}.mp4", wanted(LENGTHS))
    with pytest.raises(FormatError, match=r"top\.mp4: the last row of episode \d of"):
        load(folder, tmp_path / "buffer")


@pytest.mark.parametrize("section", SECTIONS)
def test_a_file_of_fewer_frames_than_rows_is_refused(tmp_path, section):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}})
    codes = np.delete(wanted(LENGTHS), 7)
    film(folder / "videos" / TOP / "chunk-000" / "file-000.mp4", codes)
    with pytest.raises(
        CorruptError, match=r"has 10 frames by its header, but video '.*top' has 11 rows"
    ):
        load(folder, tmp_path / "buffer", **section)


def test_a_path_that_leads_elsewhere_is_refused(tmp_path):
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [0, 1, 2]}})
    for template in (
        "../{video_key}.mp4",
        "/tmp/{video_key}.mp4",
        "{video_key.__class__}.mp4",
        "",
        "videos/{episode_chunk}/a.mp4",
        "videos/{chunk_index!r}.mp4",
        "a\0.mp4",
    ):
        change_info(folder, video_path=template)
        with pytest.raises(FormatError, match=r"video_path of info\.json must be a path"):
            load(folder, tmp_path / "buffer")
    path = folder / "videos" / TOP / "chunk-000" / "file-000.mp4"
    os.replace(path, folder / f"0-{TOP}-00000.mp4")
    change_info(folder, video_path="{file_index}-{video_key}-{chunk_index:05d}.mp4")
    assert load(folder, tmp_path / "buffer")[1][FIELD] == wanted(LENGTHS)


def test_in_v2_each_episode_has_a_file(tmp_path, rng):
    features = {TOP: {"dtype": "video", "shape": [64, 64, 3]}}
    folder = write(tmp_path / "set", frames(rng), "v2.1", features=features, chunks_size=2)
    for number, length in enumerate(LENGTHS):
        codes = [code(number, frame) for frame in range(length)] + [SURPLUS] * number
        where = folder / "videos" / f"chunk-{number // 2:03d}" / TOP
        film(where / f"episode_{number:06d}.mp4", codes)
    report, found = load(folder, tmp_path / "buffer")
    assert found[FIELD] == wanted(LENGTHS)
    assert any("3 frames in 2 videos of" in note for note in report.notes)
    film(where / f"episode_{number:06d}.mp4", codes[:4])
    with pytest.raises(
        CorruptError, match=r"has 4 frames by its header, but .* has 6 rows there\. Res"
    ):
        load(folder, tmp_path / "short")
    change_info(folder, chunks_size=0)
    with pytest.raises(FormatError, match=r"chunks_size of info\.json must be at least 1"):
        load(folder, tmp_path / "other")


def test_only_videos_of_the_episodes_and_fields_that_are_loaded_are_read(tmp_path):
    layout = {(0, 0): [0], (0, 1): [1], (0, 2): [2]}
    folder = make(tmp_path / "set", LENGTHS, {TOP: layout, WRIST: layout})
    videos = folder / "videos"
    (videos / TOP / "chunk-000" / "file-002.mp4").write_bytes(b"damaged")
    (videos / WRIST / "chunk-000" / "file-001.mp4").write_bytes(b"damaged")
    with pytest.raises(CorruptError, match=r"file-00[12]\.mp4 cannot be decoded"):
        load(folder, tmp_path / "buffer")
    _, found = load(
        folder, tmp_path / "two", episodes=slice(0, 2), fields=[TOP, "action", "task_index"]
    )
    assert found == {FIELD: wanted(LENGTHS)[:5]}
    _, found = load(folder, tmp_path / "last", episodes=slice(2, 3), fields=[WRIST, "action"])
    assert found == {"observation/images/wrist": wanted(LENGTHS, 1)[5:]}
    report, found = load(folder, tmp_path / "none", fields=["action", "observation.state"])
    assert (report.rows, found) == (11, {})


def test_a_column_and_a_video_of_one_name_are_refused(tmp_path, rng):
    data = frames(rng)
    data[TOP] = np.zeros((11, 2), np.float32)
    folder = make(tmp_path / "set", LENGTHS, {TOP: {(0, 0): [2, 1, 0]}}, data=data)
    change_info(folder, features={TOP: {"dtype": "video", "shape": [64, 64, 3]}})
    match = rf"columns '{TOP}' and 'videos/{TOP}' both become field '{FIELD}'"
    with pytest.raises(mr.errors.SourceError, match=match):
        load(folder, tmp_path / "buffer")
    _, found = load(folder, tmp_path / "buffer", fields=["action", f"videos/{TOP}"])
    assert found[FIELD] == wanted(LENGTHS)
    # Where the video is left out, nothing has to say where it is.
    for path in (folder / "meta" / "episodes").rglob("*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.drop_columns([f"videos/{TOP}/chunk_index"]), path)
    mr.load(folder, tmp_path / "column", fields=["action", TOP], video="decode", done="terminated")
    with mr.ReplayBuffer.open(tmp_path / "column") as buffer:
        assert buffer.schema[FIELD].shape == (2,)


def test_a_video_of_frames_of_another_size_is_refused(tmp_path):
    layout = {(0, 0): [0], (0, 1): [1, 2]}
    folder = make(tmp_path / "set", LENGTHS, {TOP: layout})
    import av

    path = folder / "videos" / TOP / "chunk-000" / "file-001.mp4"
    with av.open(str(path), "w") as video:
        stream = video.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 32, 64, "yuv420p"
        for _ in range(9):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 32, 3), np.uint8), "rgb24")
            video.mux(stream.encode(frame))
        video.mux(stream.encode())
    with pytest.raises(CorruptError, match=r"frame 4 must have shape \(64, 64, 3\) lik"):
        load(folder, tmp_path / "buffer")


def test_opening_a_set_decodes_one_frame_of_each_camera(tmp_path, monkeypatch):
    arrays = []
    forward = images._Video._forward
    monkeypatch.setattr(
        images._Video, "_forward", lambda self, s: (forward(self, s), arrays.append(s))
    )
    folder = make(tmp_path / "set", (40,), {TOP: {(0, 0): [0]}, WRIST: {(0, 0): [0]}})
    found = registry.source_format(folder)
    with registry.open_reader(found, folder, video="decode") as reader:
        assert len(arrays) == 2
        first = next(reader.blocks(3))
        assert codes_of(first.columns[FIELD]).tolist() == [0, 2, 4]
        assert len(arrays) == 2 + 2 * 3

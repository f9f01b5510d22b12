"""LeRobot's recorder, editor and `LeRobotDataset`, item by item, beside our import.

With lerobot 0.6 or 0.4 (v3.0), or 0.3 (v2.1). torchvision from PyPI loads beside a
torch for CPUs where its operators are named, which are not called. Before 0.6 frames
are decoded here, as torchvision no longer does it: with PyAV, the nearest to a time,
within LeRobot's tolerance.
"""

import inspect
import json
import os
from functools import lru_cache
from importlib.metadata import version

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.datasets.lerobot_writer import Sizes
from mmreplay.errors import CorruptError
from tests.convert.foreign.lerobot_sets import (
    FPS,
    TOP,
    WRIST,
    change_meta,
    code,
    codes_of,
    export,
    film,
    ring,
    stamp,
)

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("lerobot", reason="lerobot is not installed")
av = pytest.importorskip("av", reason="PyAV is not installed")
os.environ["HF_HUB_OFFLINE"] = "1"
if torch.version.cuda is None:
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import datasets  # noqa: E402
from lerobot.datasets import lerobot_dataset  # noqa: E402

LeRobotDataset = lerobot_dataset.LeRobotDataset
V2 = version("lerobot") < "0.4"
v3_only = pytest.mark.skipif(V2, reason="lerobot writes v2, where a file is an episode")
CAMERAS = (TOP, WRIST)
TOLERANCE_S = 1e-4


@lru_cache(2)
def frames_of(path, changed):
    with av.open(path) as video:
        return [
            (float(frame.pts * frame.time_base), frame.to_ndarray(format="rgb24"))
            for frame in video.decode(video=0)
        ]


def decode(path, timestamps, tolerance_s, backend=None):
    shown = frames_of(str(path), os.stat(path).st_mtime_ns)
    times = np.array([time for time, _ in shown])
    found = []
    for each in timestamps:
        nearest = int(np.abs(times - each).argmin())
        assert abs(times[nearest] - each) < tolerance_s, "no frame within tolerance"
        found.append(torch.from_numpy(shown[nearest][1]).permute(2, 0, 1).float() / 255)
    return torch.stack(found)


@pytest.fixture(autouse=True)
def _with_newer_libraries(monkeypatch, tmp_path):
    """Let it run beside newer numpy, datasets and torchvision."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    if hasattr(lerobot_dataset, "decode_video_frames"):
        # Later versions decode with PyAV themselves.
        monkeypatch.setattr(lerobot_dataset, "decode_video_frames", decode)
    encode = datasets.features.features.Value.encode_example
    monkeypatch.setattr(
        datasets.features.features.Value,
        "encode_example",
        lambda self, value: encode(self, value.item() if getattr(value, "size", 0) == 1 else value),
    )
    item = datasets.Dataset.__getitem__
    if V2:
        monkeypatch.setattr(
            datasets.Dataset,
            "__getitem__",
            lambda self, key: list(item(self, key)) if isinstance(key, str) else item(self, key),
        )


def number(shape, names=None):
    return {"dtype": "float32", "shape": shape, "names": names}


def record(root, takes, dtype="video", cameras=CAMERAS, extra=(), texts=()):
    """A set by the recorder; a take is its frames, and whether it is kept.

    Fields of two numbers and of texts, by their names, stand beside the usual ones.
    """
    shown = {"dtype": dtype, "shape": (64, 64, 3)}
    shown["names"] = ["height", "width", "channels"]
    features = {
        "observation.state": number((3,), ["x", "y", "z"]),
        "action": number((2,), ["a", "b"]),
        "next.reward": number((1,)),
        "next.done": {"dtype": "bool", "shape": (1,), "names": None},
        **dict.fromkeys(cameras, shown),
        **{name: number((2,), ["a", "b"]) for name in extra},
        **{name: {"dtype": "string", "shape": (1,), "names": None} for name in texts},
    }
    made = LeRobotDataset.create(
        repo_id="me/set", fps=FPS, features=features, root=root, use_videos=dtype == "video"
    )
    rng = np.random.default_rng(0)
    kept = 0
    for length, keep in takes:
        for n in range(length):
            frame = {
                name: rng.normal(size=each["shape"]).astype("f4")
                for name, each in features.items()
                if each["dtype"] == "float32"
            }
            frame |= {name: f"{name} of {kept}, ä" for name in texts}
            frame["next.done"] = np.array([n == length - 1 and kept % 2 == 0])
            for index, camera in enumerate(cameras):
                # Takes that are discarded have the codes of no episode.
                frame[camera] = stamp(code(kept if keep else 200, n, index))
            task = ("push the T", "épingle")[kept % 2]
            if "task" in inspect.signature(made.add_frame).parameters:
                made.add_frame(frame, task=task)
            else:
                made.add_frame({**frame, "task": task})
        if keep:
            made.save_episode()
            kept += 1
        else:
            made.clear_episode_buffer()
    if hasattr(made, "finalize"):
        made.finalize()
    return root


def compare(root, target, paths=(), **options):
    """Compare our rows with the library's items; the notes of the report.

    Args:
        root: The set.
        target: Of our buffer.
        paths: Our path by the library's name, where it is not that with slashes.
        options: Of `load`.
    """
    library = LeRobotDataset("me/set", root=root)
    report = mr.load(root, target, video="decode", overwrite=True, **options)
    with mr.ReplayBuffer.open(target) as buffer:
        rows = buffer.gather_all()
        assert len(library) == len(rows) == report.rows
        texts = {
            path: rows[path].text()
            for path, field in buffer.schema.fields.items()
            if field.kind == "text"
        }
    # Of an export we have the fields that were exported, and the library's own besides.
    added = ("timestamp", "task_index") if (root / "meta" / "mmreplay.json").exists() else ()
    episodes = []
    for row in range(len(library)):
        item = library[row]
        episodes.append(int(item["episode_index"]))
        for name, value in item.items():
            known = {f"next.{end}": end for end in ("reward", "terminated", "truncated")}
            known |= dict(paths)
            path = known.get(name, name.replace(".", "/"))
            if name in ("episode_index", "frame_index", "index", "next.done", *added):
                continue
            if isinstance(value, str):
                assert texts[path][row] == value
                continue
            if "images" in name:
                image = (value.numpy().transpose(1, 2, 0) * 255).round().astype("u1")
                assert codes_of(image) == codes_of(rows[path][row]), (row, name)
                np.testing.assert_array_equal(rows[path][row], image)
            else:
                ours = np.asarray(rows[path][row]).reshape(-1)
                np.testing.assert_array_equal(ours, value.numpy().reshape(-1))
    last = np.append(np.diff(episodes) != 0, True)
    np.testing.assert_array_equal(rows["terminated"] | rows["truncated"], last)
    return report.notes


def test_a_take_that_was_recorded_again_leaves_its_frames_in_no_row(tmp_path):
    takes = [(6, True), (20, False), (8, True), (3, False), (5, True), (1, True)]
    root = record(tmp_path / "set", takes)
    notes = compare(root, tmp_path / "buffer")
    videos = next((root / "videos").rglob("*.mp4"))
    if not V2 and av.open(str(videos)).streams.video[0].frames > 20:
        assert any("frames in 1 videos of" in note for note in notes)


@pytest.mark.parametrize("dtype", ["video", "image"])
def test_sets_of_the_recorder_are_read_as_the_library_reads_them(tmp_path, dtype):
    lengths = (7, 20, 3, 11, 1, 9)
    root = record(tmp_path / "set", [(n, True) for n in lengths], dtype)
    compare(root, tmp_path / "buffer")


@pytest.mark.slow
def test_a_thousand_items_are_those_of_the_library(tmp_path):
    lengths = np.random.default_rng(3).integers(1, 90, 30).tolist()
    assert sum(lengths) > 1000
    takes = [(n, True) for n in lengths]
    takes.insert(5, (12, False))
    root = record(tmp_path / "set", takes, cameras=CAMERAS[:1])
    compare(root, tmp_path / "buffer")


def test_sets_of_names_like_droid_are_read_as_the_library_reads_them(tmp_path):
    """Leaves that are branches too, in a set as LeRobot's port of DROID makes it."""
    joined = {
        "action.original": "action_original_2",
        "action.cartesian_position": "action_cartesian_position",
        "action.gripper.velocity": "action_gripper/velocity",
        "observation.state.joint_position": "observation/state_joint_position",
        "observation.state.gripper": "observation/state_gripper",
    }
    texts = ("language_instruction", "building", "task_category")
    root = record(
        tmp_path / "set",
        [(n, True) for n in (4, 9, 1)],
        "image",
        extra=(*joined, "action_original", "discount", "camera_extrinsics.wrist_left"),
        texts=texts,
    )
    notes = compare(root, tmp_path / "buffer", joined)
    for own, path in joined.items():
        assert any(f"{own!r} became field {path!r}" in note for note in notes)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert set(texts) < set(buffer.schema.paths)


@v3_only
def test_edited_sets_are_read_as_the_library_reads_them(tmp_path):
    from lerobot.datasets import dataset_tools

    def opened(name):
        return LeRobotDataset("me/set", root=tmp_path / name)

    record(tmp_path / "one", [(n, True) for n in (7, 20, 3, 11, 1, 9)])
    record(tmp_path / "two", [(5, True), (9, False), (6, True)])
    dataset_tools.delete_episodes(
        opened("one"), [1, 3], output_dir=tmp_path / "less", repo_id="me/less"
    )
    dataset_tools.merge_datasets(
        [opened("two"), opened("less"), opened("one")],
        output_repo_id="me/more",
        output_dir=tmp_path / "more",
    )
    # It refuses to split sets with frames of no episode.
    dataset_tools.split_dataset(
        opened("one"), {"train": [0, 2, 4], "val": [5, 1]}, output_dir=tmp_path / "split"
    )
    dataset_tools.remove_feature(
        opened("two"), ["next.done"], output_dir=tmp_path / "ends", repo_id="me/ends"
    )
    dataset_tools.remove_feature(
        opened("less"), [WRIST, "next.reward"], output_dir=tmp_path / "sight", repo_id="me/sight"
    )
    made = [path.parent.parent for path in tmp_path.rglob("meta/info.json")]
    assert len(made) == 8
    for root in made:
        compare(root, tmp_path / "buffer")


@v3_only
@pytest.mark.parametrize(
    "layouts",
    [
        {TOP: {(0, 0): [0, -9, 1, 2]}, WRIST: {(0, 0): [0, 1, 2]}},
        {TOP: {(0, 0): [-5, 0, 1, 2]}, WRIST: {(0, 0): [2, 1, 0]}},
        {TOP: {(0, 0): [1, 0, 2]}, WRIST: {(0, 0): [0], (0, 1): [2, 1]}},
        {TOP: {(3, 7): [2], (4, 0): [0, 1]}, WRIST: {(0, 2): [1, -3], (1, 0): [2, 0]}},
    ],
)
def test_frames_that_were_moved_are_found_as_the_library_finds_them(tmp_path, layouts):
    lengths = (6, 8, 5)
    root = record(tmp_path / "set", [(n, True) for n in lengths])
    columns = {}
    for path in (root / "videos").rglob("*.mp4"):
        path.unlink()
    for index, (camera, files) in enumerate(layouts.items()):
        places = {}
        for (chunk, file), content in files.items():
            codes = []
            for each in content:
                if each < 0:
                    codes += [0xFFFF] * -each
                    continue
                places[each] = chunk, file, len(codes) / FPS
                codes += [code(each, n, index) for n in range(lengths[each])]
            name = f"chunk-{chunk:03d}/file-{file:03d}.mp4"
            film(root / "videos" / camera / name, codes, "libx264", g=2, crf=18)
        for place, end in enumerate(("chunk_index", "file_index", "from_timestamp")):
            columns[f"videos/{camera}/{end}"] = [places[e][place] for e in range(3)]
        columns[f"videos/{camera}/to_timestamp"] = [
            places[e][2] + lengths[e] / FPS for e in range(3)
        ]
    change_meta(root, **columns)
    compare(root, tmp_path / "buffer")
    film(root / "videos" / TOP / "chunk-000" / "file-000.mp4", [code(0, n) for n in range(3)])
    if (0, 0) in layouts[TOP]:
        with pytest.raises(CorruptError, match="has 3 frames by its header"):
            mr.load(root, tmp_path / "short", video="decode")
        library = LeRobotDataset("me/set", root=root)
        with pytest.raises(Exception, match="tolerance"):
            [library[row] for row in range(len(library))]
    assert pq.read_table(root / "meta" / "episodes").num_rows == 3


def check_items(root, steps, rows):
    """Compare some of the library's items with the steps that were exported."""
    library = LeRobotDataset("me/set", root=root)
    assert len(library) == len(steps)
    numbers = {each["episode"]: number for number, each in enumerate_episodes(steps)}
    for row in rows:
        item, step = library[int(row)], steps[row]
        for name, value in {
            "observation.state": step["observation"]["state"],
            "action": step["action"],
            "next.reward": step["reward"],
            "next.terminated": step["terminated"],
            "next.truncated": step["truncated"],
            "next.done": step["terminated"] or step["truncated"],
            "episode_index": numbers[step["episode"]],
            "frame_index": step["frame"],
            "index": row,
        }.items():
            np.testing.assert_array_equal(item[name].numpy().reshape(-1), np.reshape(value, -1))
        assert item["task"] == step["task"]
        for camera, name in enumerate(CAMERAS):
            image = (item[name].numpy().transpose(1, 2, 0) * 255).round().astype("u1")
            assert codes_of(image) == code(step["episode"], step["frame"], camera), (row, name)
    return library


def enumerate_episodes(steps):
    """The first step of each episode, numbered in the order of the export."""
    return enumerate(step for step in steps if not step["frame"])


@v3_only
def test_an_export_of_many_files_opens_in_the_library(tmp_path):
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 40, 40).tolist()
    steps = ring(tmp_path / "ring", lengths)
    sizes = Sizes(data_mb=0.01, video_mb=0.05, chunk_files=2)
    report = export(tmp_path / "ring", tmp_path / "set", sizes=sizes)
    assert report.rows == sum(lengths)
    for folder in ("data", "meta/episodes", *(f"videos/{name}" for name in CAMERAS)):
        assert len([*(tmp_path / "set" / folder).rglob("file-*")]) >= 3, folder
        assert (tmp_path / "set" / folder / "chunk-001").is_dir()
    # The first and last step of each episode, so of each file, and random ones.
    edges = [row for row, step in enumerate(steps) if not step["frame"]]
    edges += [row - 1 for row in edges[1:]] + [len(steps) - 1]
    library = check_items(tmp_path / "set", steps, [*edges, *rng.integers(0, len(steps), 200)])
    assert library.num_episodes == len(lengths)


@v3_only
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"video": False}, {}])
def test_a_thousand_random_items_of_an_export_are_its_steps(tmp_path, options):
    rng = np.random.default_rng(3)
    steps = ring(tmp_path / "ring", rng.integers(1, 90, 30).tolist())
    assert len(steps) > 1000
    export(tmp_path / "ring", tmp_path / "set", **options)
    check_items(tmp_path / "set", steps, rng.integers(0, len(steps), 1000))


@v3_only
def test_the_tools_of_the_library_work_on_an_export(tmp_path):
    from lerobot.datasets import dataset_tools

    steps = ring(tmp_path / "ring", [5, 9, 1, 12, 7, 8, 3, 4])
    export(tmp_path / "ring", tmp_path / "set", sizes=Sizes(data_mb=0.01, video_mb=0.02))
    ring(tmp_path / "ring2", [3, 8, 2, 6, 7])
    export(tmp_path / "ring2", tmp_path / "other")
    library = LeRobotDataset("me/set", root=tmp_path / "set")
    dataset_tools.delete_episodes(library, [1, 4], output_dir=tmp_path / "less", repo_id="me/less")
    dataset_tools.merge_datasets(
        # Videos of one codec, which it joins without a look at that.
        [library, LeRobotDataset("me/other", root=tmp_path / "other")],
        output_repo_id="me/more",
        output_dir=tmp_path / "more",
    )
    dataset_tools.split_dataset(
        library, {"train": [0, 2, 4, 6], "val": [1, 3, 5, 7]}, output_dir=tmp_path / "split"
    )
    dataset_tools.remove_feature(
        library, ["next.done"], output_dir=tmp_path / "ends", repo_id="me/ends"
    )
    made = sorted(path.parent.parent for path in tmp_path.rglob("meta/info.json"))
    assert len(made) == 7
    for root in made:
        compare(root, tmp_path / "buffer")
    episodes = [each["episode"] for _, each in enumerate_episodes(steps)]
    fewer = [step for step in steps if step["episode"] not in (episodes[1], episodes[4])]
    check_items(tmp_path / "less", fewer, range(len(fewer)))


@v3_only
@pytest.mark.slow
def test_a_policy_of_the_library_trains_on_an_export(tmp_path):
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy

    ring(tmp_path / "ring", [12, 9, 14, 20])
    export(tmp_path / "ring", tmp_path / "set")
    library = LeRobotDataset(
        "me/set", root=tmp_path / "set", delta_timestamps={"action": [n / FPS for n in range(4)]}
    )
    shapes = {"observation.state": (3,), "action": (2,), **dict.fromkeys(CAMERAS, (3, 64, 64))}
    for name, shape in shapes.items():
        if "images" not in name:
            assert library.meta.stats[name]["mean"].shape == shape
    policy = ACTPolicy(
        ACTConfig(
            input_features={
                "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
                TOP: PolicyFeature(FeatureType.VISUAL, (3, 64, 64)),
            },
            output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
            chunk_size=4,
            n_action_steps=4,
            dim_model=32,
            n_heads=2,
            dim_feedforward=64,
            n_encoder_layers=1,
            n_decoder_layers=1,
            pretrained_backbone_weights=None,
            device="cpu",
            use_vae=False,
        )
    )
    policy.train()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    batches = torch.utils.data.DataLoader(library, batch_size=4, shuffle=True)
    losses = []
    for batch, _ in zip(batches, range(10), strict=False):
        loss, _ = policy.forward(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert len(losses) == 10
    assert np.isfinite(losses).all()


@v3_only
@pytest.mark.parametrize("dtype", ["video", "image"])
def test_sets_of_the_recorder_lose_nothing_from_set_to_set(tmp_path, capsys, dtype):
    takes = [(6, True), (20, False), (8, True), (3, False), (5, True), (1, True)]
    root = record(tmp_path / "set", takes, dtype)
    record(tmp_path / "other", [(4, True), (7, True)], dtype)
    chosen = ["--where", "length != 5"]
    sources = [str(root), str(tmp_path / "other")]
    args = ["convert", *sources, str(tmp_path / "made"), "--to", "lerobot", *chosen, "--json"]
    if dtype == "image":
        args += ["-o", "to.video=false"]
    assert run(args) == 0
    doubts = json.loads(capsys.readouterr().out)["doubts"]
    assert not any("encoded" in doubt or "lossy" in doubt for doubt in doubts)
    made = LeRobotDataset("me/made", root=tmp_path / "made")
    items = [
        item
        for name in ("set", "other")
        for item in LeRobotDataset("me/set", root=tmp_path / name)
        if (name, int(item["episode_index"])) != ("set", 2)
    ]
    assert len(made) == len(items)
    for row, item in enumerate(items):
        mine = made[row]
        assert mine.keys() >= item.keys()
        for name, value in item.items():
            if name not in ("index", "episode_index", "task_index", "next.done"):
                same = mine[name] == value
                assert same if isinstance(same, bool) else same.all(), (row, name)
    assert made.meta.stats[TOP]["mean"].shape == (3, 1, 1)
    assert made.meta.info["features"][TOP] == LeRobotDataset("me/set", root=root).features[TOP]


@v3_only
def test_a_set_that_is_open_while_20_appends_go_by_shows_its_own_frames_or_none(tmp_path):
    lengths = [3 + number % 5 for number in range(32)]

    def grow(buffer, exporter, first, stop):
        for episode in range(first, stop):
            for frame in range(lengths[episode]):
                ended = frame == lengths[episode] - 1
                buffer.add(
                    observation={
                        "state": np.array([episode, frame, 0], np.float32),
                        "images": {
                            "top": stamp(code(episode, frame)),
                            "wrist": stamp(code(episode, frame, 1)),
                        },
                    },
                    terminated=ended and episode % 2 == 0,
                    truncated=ended and episode % 2 == 1,
                )
            exporter.flush()

    def look(library, count):
        """How many items are right, and how many cannot be read; none may be wrong."""
        right = gone = row = 0
        for episode in range(count):
            for frame in range(lengths[episode]):
                try:
                    item = library[row]
                except (OSError, AssertionError):
                    gone += 1
                else:
                    assert item["observation.state"][:2].tolist() == [episode, frame]
                    for camera, name in enumerate(CAMERAS):
                        image = (item[name].numpy().transpose(1, 2, 0) * 255).round().astype("u1")
                        assert codes_of(image) == code(episode, frame, camera)
                    right += 1
                row += 1
        return right, gone

    images = {name: mr.Field((64, 64, 3), "uint8") for name in ("top", "wrist")}
    schema = mr.Schema(
        {
            "observation": {"state": mr.Field((3,), "float32"), "images": images},
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    with (
        mr.ReplayBuffer.create(tmp_path / "ring", schema, 60, autoreset="disabled") as buffer,
        mr.AutoExport(buffer, tmp_path / "set", format="lerobot", fps=FPS) as exporter,
    ):
        grow(buffer, exporter, 0, 12)
        opened = LeRobotDataset("me/set", root=tmp_path / "set")
        mr.linked_copy(tmp_path / "set", tmp_path / "copy")
        copied = LeRobotDataset("me/set", root=tmp_path / "copy")
        total = sum(lengths[:12])
        assert look(opened, 12) == (total, 0)
        for episode in range(12, 32):
            grow(buffer, exporter, episode, episode + 1)
            right, gone = look(opened, 12)
            assert right + gone == total
            fresh = LeRobotDataset("me/set", root=tmp_path / "set")
            assert fresh.num_episodes == episode + 1
        assert look(copied, 12) == (total, 0)
    library = LeRobotDataset("me/set", root=tmp_path / "set")
    assert look(library, 32) == (sum(lengths), 0)

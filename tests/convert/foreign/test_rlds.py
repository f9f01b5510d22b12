"""RLDS in TFRecord files: framing and messages made here, byte by byte."""

import io
import json
import struct

import google_crc32c
import numpy as np
import pytest
from PIL import Image

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.datasets.rlds import example
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from tests.convert.contract import error_of, text_of
from tests.convert.foreign.oracle import assert_same, drawn, episode, joined
from tests.convert.test_image_casts import files_of


def varint(value):
    value &= (1 << 64) - 1
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def sized(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(values, packed=True):
    if isinstance(values, list):
        return sized(1, b"".join(sized(1, each) for each in values))
    if values.dtype.kind == "f":
        raw = values.astype("<f4").tobytes()
        if packed:
            return sized(2, sized(1, raw))
        parts = [raw[n : n + 4] for n in range(0, len(raw), 4)]
        return sized(2, b"".join(varint(1 << 3 | 5) + part for part in parts))
    numbers = [varint(int(each)) for each in values]
    if packed:
        return sized(3, sized(1, b"".join(numbers)))
    return sized(3, b"".join(varint(1 << 3) + each for each in numbers))


def message(features, packed=True):
    entries = [
        sized(1, sized(1, name.encode()) + sized(2, feature(values, packed)))
        for name, values in features.items()
    ]
    return sized(1, b"".join(entries))


def checksum(data):
    crc = google_crc32c.value(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked)


def record(data):
    size = struct.pack("<Q", len(data))
    return size + checksum(size) + data + checksum(data)


def tensor(dtype, *shape):
    return {"tensor": {"shape": {"dimensions": [str(n) for n in shape]}, "dtype": dtype}}


FEATURES = {
    "observation": {
        "featuresDict": {
            "features": {
                "pose": tensor("float32", 3),
                "grid": tensor("uint8", 2, 2),
                "image": {
                    "image": {
                        "shape": {"dimensions": ["6", "5", "3"]},
                        "dtype": "uint8",
                        "encodingFormat": "png",
                    }
                },
            }
        }
    },
    "action": tensor("int64"),
    "reward": tensor("float32"),
    "discount": tensor("float32"),
    "is_first": tensor("bool"),
    "is_last": tensor("bool"),
    "is_terminal": tensor("bool"),
    "language": {"text": {}},
}


def episodes(rng, lengths=(4, 2, 7)):
    """Examples as TensorFlow Datasets writes them, and what `episode` makes of them."""
    found, wanted = [], []
    for number, steps in enumerate(lengths):
        rows = steps + 1
        last = np.arange(rows) == steps
        values = {
            "pose": rng.random((rows, 3)).astype(np.float32),
            "grid": rng.integers(0, 256, (rows, 2, 2), np.uint8),
            "image": rng.integers(0, 256, (rows, 6, 5, 3), np.uint8),
        }
        action = rng.integers(-5, 5, rows)
        reward = rng.random(rows).astype(np.float32) * ~last
        terminal = last & (number % 2 == 0)
        found.append(
            {
                "steps/observation/pose": values["pose"].reshape(-1),
                "steps/observation/grid": values["grid"].reshape(-1),
                "steps/observation/image": [png(each) for each in values["image"]],
                "steps/action": action,
                "steps/reward": reward,
                "steps/discount": np.ones(rows, np.float32),
                "steps/is_first": np.arange(rows) == 0,
                "steps/is_last": last,
                "steps/is_terminal": terminal,
                "steps/language": [b"go"] * rows,
                "episode_id": [b"x"],
            }
        )
        ends = np.arange(steps) == steps - 1
        over = ends & bool(terminal[-1])
        made = episode(values, action[:-1], reward[:-1], over, ends & ~over)
        wanted.append(made | {"discount": np.ones(steps, np.float32)})
    return found, joined(wanted)


def png(image):
    held = io.BytesIO()
    Image.fromarray(image).save(held, "PNG")
    return held.getvalue()


def write(folder, episodes, shards=2, split="train", features=FEATURES, packed=True):
    folder.mkdir(exist_ok=True)
    steps = {"sequence": {"feature": {"featuresDict": {"features": features}}}}
    top = {"featuresDict": {"features": {"steps": steps, "episode_id": {"text": {}}}}}
    (folder / "features.json").write_text(json.dumps(top))
    for number in range(shards):
        name = f"robot-{split}.tfrecord-{number:05d}-of-{shards:05d}"
        here = episodes[number * len(episodes) // shards : (number + 1) * len(episodes) // shards]
        (folder / name).write_bytes(b"".join(record(message(e, packed)) for e in here))
    return folder


LANGUAGE = "'language' can be no field, and was left out"
OBSERVATIONS = ["observation/pose", "observation/grid", "observation/image"]


@pytest.mark.parametrize("packed", [True, False])
def test_the_last_row_of_an_episode_is_what_was_seen_last(tmp_path, rng, packed):
    found, wanted = episodes(rng)
    folder = write(tmp_path / "set", found, packed=packed)
    assert registry.source_format(folder).name == "rlds"
    report = mr.load(folder, tmp_path / "buffer")
    assert (report.rows, report.episodes) == (13 + 3, 3)
    assert report.doubts == (LANGUAGE,)
    with pytest.raises(SourceError, match=LANGUAGE):
        mr.load(folder, tmp_path / "strict", strict=True)
    got, left = drawn(tmp_path / "buffer", OBSERVATIONS)
    assert left == 0
    assert_same(got, wanted)


def test_images_stay_the_files_that_they_are_where_that_is_asked_for(tmp_path, rng):
    found, wanted = episodes(rng)
    folder = write(tmp_path / "set", found)
    image = "observation/image"
    report = mr.load(folder, tmp_path / "buffer", cast={image: "png"})
    assert f"images of field {image!r} stay the files that they are" in report.notes
    files = [file for each in found for file in each["steps/observation/image"]]
    assert files_of(tmp_path / "buffer", image) == files
    got, left = drawn(tmp_path / "buffer", OBSERVATIONS)
    assert left == 0
    assert_same(got, wanted)


def test_a_last_row_with_a_reward_is_a_doubt_and_can_be_a_step(tmp_path, rng):
    found, _ = episodes(rng)
    found[1]["steps/reward"] = found[1]["steps/reward"] + np.float32(1)
    folder = write(tmp_path / "set", found)
    report = mr.load(folder, tmp_path / "buffer")
    assert "1 episodes have a reward in their last row" in report.doubts[0]
    report = mr.load(folder, tmp_path / "steps", last="step")
    assert report.doubts == (LANGUAGE,)
    assert (report.rows, report.episodes) == (16, 3)
    with mr.ReplayBuffer.open(tmp_path / "steps") as buffer:
        rows = buffer.gather_all()
    assert (
        rows["reward"].tolist() == np.concatenate([each["steps/reward"] for each in found]).tolist()
    )
    assert np.flatnonzero(rows["terminated"]).tolist() == [4, 15]
    assert np.flatnonzero(rows["truncated"]).tolist() == [7]
    with pytest.raises(SchemaError, match="last must be one of final, step, got 'row'"):
        mr.load(folder, tmp_path / "other", last="row")


@pytest.mark.parametrize("mark", ["is_first", "is_last"])
def test_an_episode_that_begins_within_another_is_one_of_its_own(tmp_path, rng, mark):
    found, wanted = episodes(rng, (4, 2))
    both = {
        key: [*found[0][key], *found[1][key]]
        if isinstance(found[0][key], list)
        else np.concatenate([found[0][key], found[1][key]])
        for key in found[0]
    }
    other = "is_first" if mark == "is_last" else "is_last"
    rows = len(both["steps/is_last"])
    place = 0 if other == "is_first" else rows - 1
    both[f"steps/{other}"] = np.arange(rows) == place
    folder = write(tmp_path / "set", [both], 1)
    report = mr.load(folder, tmp_path / "buffer")
    assert report.doubts == (
        "1 episodes begin inside an episode of the source, by is_first and is_last: "
        "each was read as an episode",
        LANGUAGE,
    )
    got, left = drawn(tmp_path / "buffer", OBSERVATIONS)
    assert left == 0
    assert_same(got, wanted)


def test_features_of_a_role_that_can_be_no_field_are_doubts(tmp_path, rng):
    found, _ = episodes(rng)
    features = FEATURES | {"reward": {"text": {}}}
    folder = write(tmp_path / "set", found, features=features)
    report = mr.load(folder, tmp_path / "buffer")
    assert "'reward' can be no field, and was left out" in report.doubts
    with pytest.raises(SchemaError, match=r"split must be one of \['train'\] in .*, got \[1\]"):
        mr.load(folder, tmp_path / "other", split=[1])


def test_episodes_of_one_row_have_no_step(tmp_path, rng):
    found, _ = episodes(rng, (3, 0))
    report = mr.load(write(tmp_path / "set", found, 1), tmp_path / "buffer")
    assert report.rows == 4
    assert any("1 episodes of one row were left out" in note for note in report.notes)


def test_splits_follow_each_other_or_are_chosen(tmp_path, rng):
    found, _ = episodes(rng)
    folder = write(tmp_path / "set", found[:1], 1, split="val")
    write(folder, found[1:], 2)
    assert mr.load(folder, tmp_path / "all").episodes == 3
    assert mr.load(folder, tmp_path / "val", split="val").episodes == 1
    with pytest.raises(SchemaError, match=r"split must be one of .*, got 'test'"):
        mr.load(folder, tmp_path / "test", split="test")
    (folder / "robot-train.tfrecord-00001-of-00002").unlink()
    with pytest.raises(CorruptError, match="must hold 2 files of split 'train', got 1"):
        mr.load(folder, tmp_path / "cut")


def test_flipped_and_truncated_files_are_errors_that_name_the_byte(tmp_path, rng):
    found, _ = episodes(rng, (3,))
    folder = write(tmp_path / "set", found, 1)
    path = next(folder.glob("*.tfrecord*"))
    whole = path.read_bytes()
    for number, place in enumerate(rng.integers(1, len(whole), 40).tolist()):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed if number % 4 else whole[:place])
        with pytest.raises(CorruptError, match=r"at byte \d+"):
            mr.load(folder, tmp_path / str(number))
        assert not (tmp_path / str(number)).exists()


def test_messages_that_lie_are_errors(tmp_path, rng):
    found, _ = episodes(rng, (3,))
    folder = write(tmp_path / "set", found, 1)
    path = next(folder.glob("*.tfrecord*"))
    whole = message(found[0])
    for number, place in enumerate(rng.integers(0, len(whole), 80).tolist()):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(record(bytes(changed)))
        target = tmp_path / str(number)

        def load(target=target):
            mr.load(folder, target)

        error = error_of(load)
        if error is not None:
            assert str(folder) in text_of(error)
            assert not target.exists()


@pytest.mark.parametrize(
    "data", [b"\x0a\xff\xff\xff\xff\x7f", b"\x0b", b"\x0a\x80", b"\xff" * 12, sized(1, b"\x0a")]
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(CorruptError, match=r"x is not a tf\.train\.Example: "):
        example(data, "x")


def test_numbers_of_every_size_come_back(rng):
    wanted = np.concatenate(
        [
            [0, 1, -1, 127, 128, 2**63 - 1, -(2**63)],
            rng.integers(-(2**63), 2**63, 500, np.int64) >> rng.integers(0, 63, 500),
        ]
    ).astype(np.int64)
    for packed in (True, False):
        found = example(message({"x": wanted}, packed), "x")
        np.testing.assert_array_equal(found["x"], wanted)
    assert found["x"].dtype == np.int64


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"steps/is_last": np.zeros(0, np.int64)}, "has no 'steps/is_last' with one flag per row"),
        (
            {"steps/action": np.zeros(3, np.int64)},
            "must have 4 values for 4 rows .* got 3 of 'action'",
        ),
        (
            {"steps/is_terminal": np.array([0, 1])},
            "got 2 values of 'is_terminal' and 4 of 'is_last'",
        ),
        ({"steps/observation/grid": np.full(16, 300)}, "beyond uint8, which"),
        (
            {"steps/observation/image": [b"x"]},
            "must have 4 images of 'observation/image', one per row, got 1",
        ),
    ],
)
def test_episodes_that_differ_from_their_features_are_refused(tmp_path, rng, change, match):
    found, _ = episodes(rng, (3,))
    folder = write(tmp_path / "set", [found[0] | change], 1)
    with pytest.raises((FormatError, SourceError), match=match):
        mr.load(folder, tmp_path / "buffer")


@pytest.mark.parametrize("text", ["[]", "{}", '{"featuresDict": {"features": 3}}', "x"])
def test_features_that_are_none_are_refused(tmp_path, rng, text):
    folder = write(tmp_path / "set", episodes(rng)[0])
    (folder / "features.json").write_text(text)
    with pytest.raises(FormatError, match=r"features.json does not describe steps"):
        mr.load(folder, tmp_path / "buffer")

"""Minari's datasets, written by h5py and pyarrow in Minari's layout."""

import io
import json
from functools import partial

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import mmreplay as mr
from mmreplay.convert import registry
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from tests.convert.contract import error_of, text_of
from tests.convert.foreign.oracle import assert_same, drawn, episode, joined
from tests.convert.test_image_casts import files_of

BOX = {"type": "Box", "dtype": "float64", "shape": [3], "low": [-np.inf] * 3}
BOX["high"] = [np.inf] * 3
DISCRETE = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}
KINDS = ["hdf5", "arrow", "parquet"]


def made(rng, lengths=(5, 1, 8)):
    """Arguments of `oracle.episode`, of episodes that end both ways and not at all."""
    found = []
    for number, length in enumerate(lengths):
        ends = np.zeros(length, bool)
        ends[-1] = True
        found.append(
            [
                rng.random((length + 1, 3)),
                rng.integers(0, 4, length),
                rng.random(length),
                ends & (number == 0),
                ends & (number == 1),
            ]
        )
    return found


def write(folder, kind, episodes, *, spaces=(BOX, DISCRETE), jpeg=False, **metadata):
    data = folder / "data"
    data.mkdir(parents=True)
    content = {
        "total_episodes": len(episodes),
        "total_steps": sum(len(each[2]) for each in episodes),
        "data_format": kind,
        "jpeg_encoding": jpeg,
        "observation_space": json.dumps(spaces[0]),
        "action_space": json.dumps(spaces[1]),
        "dataset_id": "some/thing-v0",
        "minari_version": "0.5.4",
    }
    (data / "metadata.json").write_text(json.dumps(content | metadata))
    for number, each in enumerate(episodes):
        if kind == "hdf5":
            with h5py.File(data / "main_data.hdf5", "a") as file:
                put(file.create_group(f"episode_{number}"), each)
        else:
            table(data / str(number), kind, each)
    return folder


NAMES = ["observations", "actions", "rewards", "terminations", "truncations"]


def put(group, values):
    for name, each in zip(NAMES, values, strict=True):
        group.create_dataset(name, data=each, chunks=True)
    group["infos/x"] = np.arange(len(values[0]))


def column(values, rows):
    if isinstance(values, list):
        return pa.array(values, pa.binary())
    padded = np.zeros((rows, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    if padded.ndim == 1:
        return pa.array(padded)
    flat = padded.reshape(rows, -1)
    return pa.FixedSizeListArray.from_arrays(flat.reshape(-1), flat.shape[1])


def table(folder, kind, values, **options):
    folder.mkdir()
    rows = len(values[0])
    columns = [column(each, rows) for each in values]
    infos = pa.StructArray.from_arrays([pa.array(np.arange(rows))], ["x"])
    batch = pa.table([*columns, infos], names=[*NAMES, "infos"])
    if kind == "parquet":
        pq.write_table(batch, folder / "part-0.parquet", **options)
        return
    with pa.ipc.new_file(folder / "part-0.arrow", batch.schema, **options) as file:
        file.write_table(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_comes_with_what_followed_it(tmp_path, rng, kind):
    episodes = made(rng)
    folder = write(tmp_path / "thing-v0", kind, episodes)
    assert registry.source_format(folder).name == "minari"
    assert registry.source_format(folder / "data").name == "minari"
    report = mr.load(folder, tmp_path / "buffer", strict=True)
    assert (report.rows, report.episodes) == (14 + 3, 3)
    # The last one was cut off by whoever made it.
    episodes[2][4][-1] = True
    got, left = drawn(tmp_path / "buffer", ["observation"])
    assert left == 0
    assert_same(got, joined([episode(*each) for each in episodes]))
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert buffer.metadata.user["minari"]["dataset_id"] == "some/thing-v0"


class Opened:
    """What is used of a MinariDataset: where it lies, and which episodes it has."""

    class Storage:
        def __init__(self, folder):
            self.data_path = folder / "data"

    def __init__(self, folder, indices):
        self.storage = self.Storage(folder)
        self.episode_indices = np.array(indices)

    def __repr__(self):
        return "contents" * 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("indices", [[0, 1, 2], [2, 0], [1]])
def test_an_open_dataset_is_loaded_with_the_episodes_that_it_has(tmp_path, rng, kind, indices):
    episodes = made(rng)
    dataset = Opened(write(tmp_path / "thing-v0", kind, episodes), indices)
    report = mr.load(dataset, tmp_path / "buffer", strict=True)
    assert report.episodes == len(indices)
    episodes[2][4][-1] = True
    got, _ = drawn(tmp_path / "buffer", ["observation"])
    assert_same(got, joined([episode(*episodes[index]) for index in indices]))


@pytest.mark.parametrize(
    ("indices", "message"), [([3], "got 3"), ([-1], "got -1"), ([], "got no episode")]
)
def test_episodes_missing_in_a_dataset_are_reported(tmp_path, rng, indices, message):
    dataset = Opened(write(tmp_path / "thing-v0", "hdf5", made(rng)), indices)
    with pytest.raises(SchemaError, match=rf"episode_indices must be .*in \[0, 3\), {message}"):
        mr.load(dataset, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


@pytest.mark.parametrize("root", ["MINARI_DATASETS_PATH", "HOME"])
def test_a_dataset_is_loaded_by_its_id(tmp_path, rng, monkeypatch, root):
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    monkeypatch.setenv(root, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    datasets = tmp_path / (".minari/datasets" if root == "HOME" else "")
    for number, name in enumerate(("mine-v0", "ours/door/human-v2")):
        episodes = made(rng)
        write(datasets / name, "hdf5", episodes)
        for format in (None, "minari"):
            target = tmp_path / f"buffer-{number}-{format}"
            mr.load(name, target, format=format, strict=True)
            got, _ = drawn(target, ["observation"])
            episodes[2][4][-1] = True
            assert_same(got, joined([episode(*each) for each in episodes]))
    # A path that is there is the path.
    write(tmp_path / "near-v0", "hdf5", made(rng, lengths=(4,)))
    assert mr.load("near-v0", tmp_path / "near").episodes == 1


def test_an_id_of_nothing_tells_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    monkeypatch.chdir(tmp_path)
    message = (
        r"ours/none-v3 does not exist, neither as a path nor as a dataset of Minari in "
        r".*sets\. .*minari.download_dataset\('ours/none-v3'\)"
    )
    with pytest.raises(FormatError, match=message):
        mr.load("ours/none-v3", tmp_path / "buffer")


@pytest.mark.parametrize("kind", KINDS)
def test_infos_come_along_when_asked_for(tmp_path, rng, kind):
    folder = write(tmp_path / "thing-v0", kind, made(rng))
    without = mr.load(folder, tmp_path / "without")
    assert sum("infos were left out; infos=True" in note for note in without.notes) == 1
    report = mr.load(folder, tmp_path / "buffer", infos=True)
    assert not any("infos" in note for note in report.notes)
    got, _ = drawn(tmp_path / "buffer", ["observation"])
    assert got["info/x"].tolist() == [*range(5), 0, *range(8)]


@pytest.mark.parametrize(
    ("number", "change", "match"),
    [
        (
            3,
            lambda ends: ends[:4],
            r"'terminations' must hold one flag for each of .* got 4 rows of bool\[\]",
        ),
        (
            3,
            lambda ends: np.repeat(ends, 2),
            r"must hold one flag for each of 8 steps, got 16 rows of bool\[\]",
        ),
        (
            4,
            lambda ends: np.stack([ends] * 2, 1),
            r"'truncations' must hold one flag .* got 8 rows of bool\[2",
        ),
        (1, lambda actions: actions[:4], "must have 8, got 4 rows of 'action' for 8 steps"),
        (1, lambda actions: np.repeat(actions, 2), "got 16 rows of 'action' for 8 st"),
        (0, lambda seen: seen[:-1], "must have 9, got 8 rows of 'observation' for 8 steps"),
    ],
)
def test_what_is_not_one_row_a_step_is_refused(tmp_path, rng, number, change, match):
    episodes = made(rng)
    episodes[2][number] = change(episodes[2][number])
    folder = write(tmp_path / "thing-v0", "hdf5", episodes)
    with pytest.raises(FormatError, match=match):
        mr.load(folder, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


def test_episodes_without_ends_are_a_doubt(tmp_path, rng):
    folder = write(tmp_path / "thing-v0", "hdf5", made(rng))
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        for group in file.values():
            del group["terminations"]
    report = mr.load(folder, tmp_path / "buffer")
    assert "truncations say how they end" in report.notes[1]
    assert report.doubts[0].startswith("an episode has no 'terminations'")


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_within_an_episode_is_a_doubt(tmp_path, rng, kind):
    episodes = made(rng)
    episodes[2][3][4] = True
    folder = write(tmp_path / "thing-v0", kind, episodes)
    report = mr.load(folder, tmp_path / "buffer")
    assert "1 steps end inside an episode of the source" in report.doubts[0]
    episodes[2][4][-1] = True
    got, _ = drawn(tmp_path / "buffer", ["observation"])
    assert_same(got, joined([episode(*each) for each in episodes]))


def test_other_numbers_in_the_metadata_are_a_doubt(tmp_path, rng):
    folder = write(tmp_path / "thing-v0", "hdf5", made(rng), total_steps=99)
    report = mr.load(folder, tmp_path / "buffer")
    assert "says total_steps 99, and the data has 14" in report.doubts[0]
    folder = write(tmp_path / "more-v0", "hdf5", made(rng), total_episodes=4)
    with pytest.raises(FormatError, match=r"has no 'episode_3', but .* says 4 episodes"):
        mr.load(folder, tmp_path / "other")


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_images_of_any_shape_come_from_flat_lists(tmp_path, rng, kind):
    episodes = made(rng, (3,))
    episodes[0][0] = rng.integers(0, 256, (4, 6, 5, 3), np.uint8)
    space = {"type": "Box", "dtype": "uint8", "shape": [6, 5, 3], "low": 0, "high": 255}
    folder = write(tmp_path / "a-v0", kind, episodes, spaces=(space, DISCRETE))
    mr.load(folder, tmp_path / "buffer")
    got, _ = drawn(tmp_path / "buffer", ["observation"])
    np.testing.assert_array_equal(got["observation"], episodes[0][0][:-1])
    np.testing.assert_array_equal(got["next_observation"], episodes[0][0][1:])


def packed(images, form="JPEG"):
    found = []
    for each in images:
        held = io.BytesIO()
        Image.fromarray(each).save(held, form)
        found.append(held.getvalue())
    return found


def pictures(rng, count):
    return rng.integers(0, 256, (count, 33, 32, 3), np.uint8)


SEEN = {"type": "Box", "dtype": "uint8", "shape": [33, 32, 3], "low": 0, "high": 255}


@pytest.mark.parametrize("kind", KINDS)
def test_jpeg_is_decoded_and_reported(tmp_path, rng, kind):
    episodes = made(rng, (3, 2))
    wanted = []
    for each in episodes:
        held = packed(pictures(rng, len(each[0])))
        wanted.append([np.array(Image.open(io.BytesIO(data))) for data in held])
        each[0] = held if kind != "hdf5" else strings(held)
    folder = write(tmp_path / "a-v0", kind, episodes, spaces=(SEEN, DISCRETE), jpeg=True)
    report = mr.load(folder, tmp_path / "buffer")
    assert any("kept as JPEG: it is lossy" in note for note in report.notes)
    got, _ = drawn(tmp_path / "buffer", ["observation"])
    nexts = np.concatenate([each[1:] for each in wanted])
    np.testing.assert_array_equal(got["next_observation"], nexts)


@pytest.mark.parametrize("codec", ["jpeg", "png"])
@pytest.mark.parametrize("kind", KINDS)
def test_images_stay_the_files_that_they_are_where_that_is_asked_for(tmp_path, rng, kind, codec):
    episodes = made(rng, (3, 2))
    held = [packed(pictures(rng, len(each[0])), codec) for each in episodes]
    for each, images in zip(episodes, held, strict=True):
        each[0] = images if kind != "hdf5" else strings(images)
    folder = write(tmp_path / "a-v0", kind, episodes, spaces=(SEEN, DISCRETE), jpeg=True)
    report = mr.load(folder, tmp_path / "buffer", cast={"observation": codec})
    assert any("it is lossy" in note for note in report.notes) == (codec == "jpeg")
    assert "images of field 'observation' stay the files that they are" in report.notes
    files = [file for images in held for file in images]
    assert files_of(tmp_path / "buffer", "observation") == files
    mr.load(folder, tmp_path / "arrays")
    stayed, _ = drawn(tmp_path / "buffer", ["observation"])
    unpacked, _ = drawn(tmp_path / "arrays", ["observation"])
    assert_same(stayed, unpacked)


def strings(images):
    found = np.empty(len(images), object)
    found[:] = [np.frombuffer(data, np.uint8) for data in images]
    return found.astype(h5py.vlen_dtype(np.uint8))


@pytest.mark.parametrize("damage", ["cut", "shape", "text"])
def test_a_damaged_image_is_named_by_its_row(tmp_path, rng, damage):
    episodes = made(rng, (3,))
    held = packed(pictures(rng, 4))
    held[2] = {
        "cut": held[2][:300],
        "shape": packed(rng.integers(0, 256, (1, 64, 64, 3), np.uint8))[0],
        "text": b"no image",
    }[damage]
    episodes[0][0] = held
    folder = write(tmp_path / "a-v0", "arrow", episodes, spaces=(SEEN, DISCRETE), jpeg=True)
    with pytest.raises(CorruptError, match=r"part-0.arrow: 'observations', row 2 is not"):
        mr.load(folder, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


def test_packed_arrow_batches_are_refused(tmp_path, rng):
    folder = write(tmp_path / "a-v0", "arrow", made(rng, (3,)))
    part = folder / "data" / "0"
    (part / "part-0.arrow").unlink()
    part.rmdir()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    table(part, "arrow", made(rng, (3,))[0], options=options)
    with pytest.raises(FormatError, match="has compressed record batches"):
        mr.load(folder, tmp_path / "buffer")


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bits_are_errors_that_name_the_dataset(tmp_path, rng, kind):
    folder = write(tmp_path / "thing-v0", kind, made(rng, (4,)))
    data = folder / "data"
    path = next(p for p in data.rglob("*") if p.suffix in (".hdf5", f".{kind}"))
    whole = path.read_bytes()
    for number, place in enumerate(rng.integers(0, len(whole), 40).tolist()):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        # Some are cut as well.
        path.write_bytes(changed if number % 4 else changed[:place])
        target = tmp_path / str(number)
        error = error_of(partial(mr.load, folder, target))
        if error is not None:
            assert str(folder) in text_of(error)
            assert not target.exists()


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"data_format": "zip"}, "data_format must be hdf5, arrow or parquet, got 'zip'"),
        ({"total_episodes": -1}, "total_episodes must be in .*, got -1"),
        ({"total_episodes": 0}, "has no episodes. Record some"),
    ],
)
def test_metadata_that_makes_no_sense_is_refused(tmp_path, rng, metadata, match):
    folder = write(tmp_path / "thing-v0", "hdf5", made(rng), **metadata)
    with pytest.raises(FormatError, match=match):
        mr.load(folder, tmp_path / "buffer")


def test_what_goes_out_comes_back(tmp_path, rng):
    episodes = made(rng)
    folder = write(tmp_path / "some" / "thing-v0", "hdf5", episodes)
    mr.load(folder, tmp_path / "buffer")
    report = mr.export(tmp_path / "buffer", tmp_path / "some" / "other-v3", format="minari")
    assert report.notes == ()
    data = tmp_path / "some" / "other-v3" / "data"
    content = json.loads((data / "metadata.json").read_text())
    assert content["dataset_id"] == "some/other-v3"
    assert json.loads(content["action_space"]) == DISCRETE
    assert (content["total_episodes"], content["total_steps"]) == (3, 14)
    mr.load(tmp_path / "some" / "other-v3", tmp_path / "again", strict=True)
    one, other = (drawn(tmp_path / each, ["observation"])[0] for each in ("buffer", "again"))
    assert_same(one, other)


def test_the_space_of_large_images_is_made_anew(tmp_path, rng):
    low, high = ([[[n] * 3] * 120] * 90 for n in (0, 255))
    space = {"type": "Box", "dtype": "uint8", "shape": [90, 120, 3]}
    space |= {"low": low, "high": high}
    episodes = made(rng, (2,))
    episodes[0][0] = rng.integers(0, 256, (3, 90, 120, 3), np.uint8)
    folder = write(tmp_path / "a-v0", "hdf5", episodes, spaces=(space, DISCRETE))
    report = mr.load(folder, tmp_path / "buffer")
    assert any("'observation_space' of" in note for note in report.notes)
    mr.export(tmp_path / "buffer", tmp_path / "b-v0", format="minari")
    content = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    assert json.loads(content["observation_space"]) == space
    assert content["jpeg_encoding"] is False


def test_a_name_that_minari_would_not_take_is_refused(tmp_path, rng):
    mr.load(write(tmp_path / "a-v0", "hdf5", made(rng)), tmp_path / "buffer")
    with pytest.raises(SchemaError, match="as Minari demands, got 'none'"):
        mr.export(tmp_path / "buffer", tmp_path / "b", format="minari", dataset_id="none")
    assert not (tmp_path / "b").exists()


TEXT = {"type": "Text", "max_length": 12, "min_length": 0, "charset": "abc"}
SPOKEN = {"type": "Dict", "subspaces": {"mission": TEXT, "view": BOX}}
TEXTS = ["", "abc", "größer", "日本語 ok", "=1+1", "x" * 12]


def write_spoken(folder, kind, lengths, change=lambda texts: texts, **parquet):
    """A dataset whose observations have a text, and whose actions are texts."""
    data = folder / "data"
    data.mkdir(parents=True)
    content = {
        "total_episodes": len(lengths),
        "total_steps": sum(lengths),
        "data_format": kind,
        "observation_space": json.dumps(SPOKEN),
        "action_space": json.dumps(TEXT),
        "jpeg_encoding": False,
    }
    (data / "metadata.json").write_text(json.dumps(content))
    for number, steps in enumerate(lengths):
        missions = change([TEXTS[(number + i) % 6] for i in range(steps + 1)])
        actions = [TEXTS[(number + 2 * i) % 6] for i in range(steps)]
        view = np.arange(3.0 * (steps + 1)).reshape(-1, 3) + number
        ends = np.arange(steps + 1) == steps - 1
        if kind == "hdf5":
            with h5py.File(data / "main_data.hdf5", "a") as file:
                group = file.create_group(f"episode_{number}")
                kept = h5py.string_dtype("utf-8")
                put = group.create_dataset
                put("observations/mission", data=missions, dtype=kept, maxshape=(None,))
                put("observations/view", data=view)
                put("actions", data=actions, dtype=kept)
                put("rewards", data=np.ones(steps))
                put("terminations", data=ends[:steps])
                put("truncations", data=np.zeros(steps, bool))
            continue
        observations = pa.StructArray.from_arrays(
            [pa.array(missions), column(view, steps + 1)], ["mission", "view"]
        )
        batch = pa.table(
            [
                observations,
                pa.array([*actions, None]),
                pa.array(np.ones(steps + 1)),
                pa.array(ends),
                pa.array(np.zeros(steps + 1, bool)),
            ],
            names=NAMES,
        )
        (data / str(number)).mkdir()
        if kind == "parquet":
            pq.write_table(batch, data / str(number) / "part-0.parquet", **parquet)
            continue
        file_name = data / str(number) / "part-0.arrow"
        with pa.ipc.new_file(file_name, batch.schema) as file:
            file.write_table(batch)
    return folder


@pytest.mark.parametrize("rows_per_block", [None, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("hdf5", {}),
        ("arrow", {}),
        ("parquet", {"use_dictionary": False}),
        ("parquet", {"use_dictionary": True}),
    ],
)
def test_texts_come_with_what_followed_them(tmp_path, kind, options, rows_per_block, monkeypatch):
    if rows_per_block:
        monkeypatch.setattr("mmreplay.datasets.common.fragments.VALUES_NBYTES", rows_per_block * 96)
    lengths = (5, 1, 8)
    folder = write_spoken(tmp_path / "spoken-v0", kind, lengths, **options)
    report = mr.load(folder, tmp_path / "buffer")
    assert (report.rows, report.episodes) == (14 + 3, 3)
    assert not [note for note in report.notes if "left out" in note]
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        assert buffer.schema["observation/mission"] == mr.Field.text(48)
        assert buffer.schema["action"] == mr.Field.text(48)
        rows = buffer.gather_all()
        missions = [TEXTS[(n + i) % 6] for n in range(3) for i in range(lengths[n] + 1)]
        assert rows["observation/mission"].text() == missions
        actions = [
            TEXTS[(n + 2 * i) % 6] if i < lengths[n] else ""
            for n in range(3)
            for i in range(lengths[n] + 1)
        ]
        assert rows["action"].text() == actions
        ends = np.cumsum([steps + 1 for steps in lengths]) - 2
        batch = buffer.take(np.zeros(3, int), ends)
        finals = [TEXTS[(n + lengths[n]) % 6] for n in range(3)]
        assert batch["next_observation/mission"].text() == finals


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_longer_than_its_space_is_refused(tmp_path, kind):
    folder = write_spoken(tmp_path / "spoken-v0", kind, (2,), lambda texts: ["x", "y" * 49, "z"])
    with pytest.raises(CorruptError, match="row 1 must have 0 to 48 items, got 49"):
        mr.load(folder, tmp_path / "buffer")
    assert not (tmp_path / "buffer").exists()


def test_bytes_that_are_no_text_are_refused(tmp_path):
    folder = write_spoken(tmp_path / "spoken-v0", "hdf5", (2,), lambda texts: [b"x", b"\xff", b"z"])
    with pytest.raises(CorruptError, match="row 1 must be UTF-8, got text that is not"):
        mr.load(folder, tmp_path / "buffer")


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_text_that_is_missing_is_refused(tmp_path, kind):
    folder = write_spoken(tmp_path / "spoken-v0", kind, (2,), lambda texts: ["x", None, "z"])
    with pytest.raises(SourceError, match=r"observations/mission.* lacks a value in row 1\."):
        mr.load(folder, tmp_path / "buffer")


def test_strings_of_another_space_are_left_out_with_a_note(tmp_path):
    folder = write_spoken(tmp_path / "spoken-v0", "hdf5", (2,))
    path = folder / "data" / "metadata.json"
    content = json.loads(path.read_text()) | {"action_space": json.dumps(DISCRETE)}
    path.write_text(json.dumps(content))
    report = mr.load(folder, tmp_path / "buffer")
    assert "'/episode_0/actions' was left out" in " ".join(report.doubts)

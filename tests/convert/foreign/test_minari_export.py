"""Minari datasets that are written: long and short episodes alike."""

import json

import h5py
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.datasets.minari import writer
from mmreplay.errors import FormatError, SchemaError, SourceError
from tests.convert.foreign.oracle import assert_same, drawn
from tests.convert.test_image_casts import files_of
from tests.schema.image_files import camera, jpeg, pixels_of

SCHEMA = mr.Schema(
    {
        "observation": {"a": mr.Field((2, 3), "float32"), "b": mr.Field((), "int16")},
        "action": mr.Field((2,), "float64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
        "extra": mr.Field((3,), "uint8"),
    }
)


def record(path, rng, length, ends):
    """A buffer of one environment whose episodes end at those steps."""
    stops = np.zeros((length, 1), bool)
    stops[ends] = True
    with mr.ReplayBuffer.create(path, SCHEMA, 2 * length) as buffer:
        buffer.extend(
            {
                "observation/a": rng.random((length, 1, 2, 3), np.float32),
                "observation/b": rng.integers(-9, 9, (length, 1), np.int16),
                "action": rng.random((length, 1, 2)),
                "reward": rng.random((length, 1), np.float32),
                "terminated": stops,
                "truncated": np.zeros((length, 1), bool),
                "extra": rng.integers(0, 256, (length, 1, 3), np.uint8),
            }
        )
    return path


def contents(path):
    """Every dataset and attribute of a file."""
    found = {}

    def look(name, item):
        # Equal buffers give equal files, whenever.
        assert h5py.h5o.get_info(item.id).mtime == 0
        if isinstance(item, h5py.Dataset):
            found[name] = (item.dtype, item.shape, item[()].tobytes())
        found[f"{name}@"] = {
            key: (value.dtype, value.shape, value.tobytes()) for key, value in item.attrs.items()
        }

    with h5py.File(path) as file:
        file.visititems(look)
        return list(file), found


@pytest.mark.parametrize("limit", [0, 3000])
def test_episodes_written_in_blocks_equal_those_written_at_once(tmp_path, rng, monkeypatch, limit):
    ends = [0, 1, 5, 400, 401, 799]
    source = record(tmp_path / "buffer", rng, 900, ends)
    monkeypatch.setattr("mmreplay.convert.base.BLOCK_NBYTES", 4000)
    made = []
    for name, bound in (("one-v0", 8 << 20), ("other-v0", limit)):
        monkeypatch.setattr(writer, "EPISODE_NBYTES", bound)
        mr.export(source, tmp_path / name, format="minari")
        made.append(contents(tmp_path / name / "data" / "main_data.hdf5"))
    assert made[0] == made[1]
    assert made[0][0] == [f"episode_{number}" for number in range(7)]
    mr.load(tmp_path / "other-v0", tmp_path / "back")
    names = ["observation/a", "observation/b"]
    one, other = (drawn(tmp_path / each, names)[0] for each in ("buffer", "back"))
    # The running episode was cut: its last step has no next observation of its own.
    for path in one:
        if path not in ("truncated", "extra", *(f"next_{name}" for name in names)):
            assert (other[path][: len(one[path])] == one[path]).all()


@pytest.mark.slow
def test_an_episode_of_one_step_takes_little_disk_space(tmp_path, rng):
    source = record(tmp_path / "buffer", rng, 500, slice(None))
    report = mr.export(source, tmp_path / "a-v0", format="minari")
    assert report.episodes == 500
    # Headers of six datasets and their group; chunks of their own took 14 KB.
    assert report.nbytes < 500 * 4000
    mr.load(tmp_path / "a-v0", tmp_path / "back", fields=["observation", "reward"])
    one, other = (drawn(tmp_path / each, ["observation/b"])[0] for each in ("buffer", "back"))
    names = ["observation/a", "observation/b", "reward"]
    assert_same({n: one[n] for n in names}, {n: other[n] for n in names})


def test_a_dataset_is_replaced_and_a_folder_with_more_is_not(tmp_path, rng):
    source = record(tmp_path / "buffer", rng, 20, [9])
    target = tmp_path / "a-v0"
    mr.export(source, target, format="minari")
    whole = contents(target / "data" / "main_data.hdf5")
    with pytest.raises(FormatError, match=r"already exists\. Choose another path, or pass"):
        mr.export(source, target, format="minari")
    mr.export(source, target, format="minari", overwrite=True)
    assert contents(target / "data" / "main_data.hdf5") == whole
    (target / "notes.txt").write_text("mine")
    with pytest.raises(FormatError, match="is a folder that holds no buffer"):
        mr.export(source, target, format="minari", overwrite=True)


FRAME, GRAY = (40, 36, 3), (33, 35, 1)
IMAGES = {
    "observation": {
        "top": mr.Field.image(FRAME, "jpeg", 90),
        "gray": mr.Field.image(GRAY, "png"),
        "x": mr.Field((2,), "float32"),
    }
}
OTHERS = {
    "action": mr.Field((), "int64"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
}


def seen(number):
    return {"top": camera(FRAME, number), "gray": camera(GRAY, number), "x": np.full(2, number)}


def filmed(path, *, stored=False, rows=17):
    """A ring of images, whose next observations are final rows, or stored."""
    schema = IMAGES | OTHERS | ({"next_observation": IMAGES["observation"]} if stored else {})
    with mr.ReplayBuffer.create(path, mr.Schema(schema), 40) as buffer:
        for number in range(rows):
            ends = number % 7 == 6
            more = {"next_observation": seen(number + 1 + 50 * ends)} if stored else {}
            final = {"final_observation": seen(number + 51)} if ends and not stored else {}
            buffer.add(
                observation=seen(number),
                action=number % 3,
                reward=0.5,
                terminated=ends,
                **more,
                **final,
            )
    return path


@pytest.mark.parametrize("limit", [0, 8 << 20])
@pytest.mark.parametrize("stored", [False, True])
def test_images_stay_the_files_that_they_are(tmp_path, monkeypatch, stored, limit):
    monkeypatch.setattr(writer, "EPISODE_NBYTES", limit)
    monkeypatch.setattr("mmreplay.convert.base.BLOCK_NBYTES", 20_000)
    ring, target = filmed(tmp_path / "ring", stored=stored), tmp_path / "a-v0"
    report = mr.export(ring, target, format="minari")
    for name in ("top", "gray"):
        kind = "jpeg" if name == "top" else "png"
        assert f"Minari has images of field 'observation/{name}' as {kind} files" in report.notes
    casts = {"observation/top": "jpeg", "observation/gray": "png"}
    mr.load(target, tmp_path / "back", cast=casts)
    with mr.ReplayBuffer.open(tmp_path / "back") as buffer:
        assert buffer.schema["observation/top"] == IMAGES["observation"]["top"]
        assert buffer.schema["observation/gray"] == IMAGES["observation"]["gray"]
    # Three episodes; the running one shows its newest observation twice.
    numbers = [*range(7), 57, *range(7, 14), 64, 14, 15, 16, 16 + stored]
    for name, shape in (("top", FRAME), ("gray", GRAY)):
        encode = IMAGES["observation"][name].encoding.encode
        files = [encode(camera(shape, number)) for number in numbers]
        assert files_of(tmp_path / "back", f"observation/{name}") == files, name
    # What is read as arrays is what those files show.
    mr.load(target, tmp_path / "arrays")
    with mr.ReplayBuffer.open(tmp_path / "arrays") as buffer:
        rows = buffer.gather_all()
    assert rows["observation/gray"][0].tolist() == camera(GRAY, 0)[..., 0].tolist()
    assert rows["observation/top"][0].tolist() == pixels_of(jpeg(camera(FRAME, 0))).tolist()


def test_a_set_of_images_that_came_from_minari_keeps_its_spaces(tmp_path):
    mr.export(filmed(tmp_path / "ring"), tmp_path / "a-v0", format="minari")
    casts = {"observation/top": "jpeg", "observation/gray": "png"}
    mr.load(tmp_path / "a-v0", tmp_path / "back", cast=casts)
    mr.export(tmp_path / "back", tmp_path / "b-v0", format="minari")
    first, second = (
        json.loads((tmp_path / name / "data" / "metadata.json").read_text())
        for name in ("a-v0", "b-v0")
    )
    assert first["jpeg_encoding"] is second["jpeg_encoding"] is True
    assert first["observation_space"] == second["observation_space"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"observation": {"a": mr.Field.image((31, 40, 3), quality=90)}},
            r"images of field 'observation/a' are files, which Minari has of observations and "
            r"actions with sides of at least 32 alone\. Cast them to arrays with cast= "
            r"\(--cast observation/a=uint8\), or leave the field out\.",
        ),
        (
            {"observation": mr.Field((2,), "float32"), "info": {"a": mr.Field.image(FRAME, "png")}},
            r"images of field 'info/a' are files, which Minari has of observations",
        ),
        (
            {"observation": {"a": mr.Field.image(FRAME, "png"), "b": mr.Field((64, 64), "uint8")}},
            r"field 'observation/a' is images as files and field 'observation/b' arrays, but "
            r"Minari has all images as files, or none\. Cast 'observation/a' to arrays with cast= "
            r"\(--cast observation/a=uint8\), or the other one to files, or leave one out\.",
        ),
        (
            {
                "observation": {"a": mr.Field.image(FRAME, quality=90)},
                "next_observation": {"a": mr.Field.image(FRAME, quality=50)},
            },
            r"images of field 'next_observation/a' must be files like those of 'observation/a', "
            r"jpeg image \[40, 36, 3\], as Minari has both as one; got others\. Cast both",
        ),
        (
            {"observation": {"a": mr.Field.image(FRAME, "png"), "b": mr.Field.text(9)}},
            r"field 'observation/b' varies from step to step, which format 'minari' cannot store\."
            r" Declare a fixed shape and pad its values, or leave the field out\.",
        ),
    ],
)
def test_images_that_minari_has_not_as_files_are_refused(tmp_path, fields, message):
    schema = mr.Schema(fields | OTHERS)
    with (
        mr.ReplayBuffer.create(tmp_path / "ring", schema, 4, heap_bytes="1 MiB") as buffer,
        pytest.raises(SchemaError, match=f"^{message}"),
    ):
        mr.export(buffer, tmp_path / "a-v0", format="minari")
    assert not (tmp_path / "a-v0").exists()


def from_minari(folder, spaces, arrays, jpeg=False, n=4):
    """A set of one episode of such observations, loaded into a ring."""
    group = folder / "data" / "main_data.hdf5"
    group.parent.mkdir(parents=True)
    leaves = {"type": "Dict", "subspaces": spaces}
    content = {
        "total_episodes": 1,
        "total_steps": 2,
        "data_format": "hdf5",
        "jpeg_encoding": jpeg,
        "observation_space": json.dumps(leaves),
        "action_space": json.dumps({"type": "Discrete", "dtype": "int64", "start": 0, "n": n}),
        "dataset_id": "a-v0",
        "minari_version": "0.5.4",
    }
    (folder / "data" / "metadata.json").write_text(json.dumps(content))
    with h5py.File(group, "w") as file:
        for name, values in arrays.items():
            file[f"episode_0/observations/{name}"] = values
        file["episode_0/actions"], file["episode_0/rewards"] = np.arange(2), np.ones(2)
        file["episode_0/terminations"] = np.array([False, True])
        file["episode_0/truncations"] = np.zeros(2, bool)
    mr.load(folder, folder.with_name("ring"))
    return folder.with_name("ring")


def box_of(array, high, dtype="uint8"):
    shape = list(array.shape[1:])
    return {"type": "Box", "dtype": dtype, "shape": shape, "low": 0, "high": high}


def test_spaces_stay_where_they_still_say_what_is_stored(tmp_path):
    frames = np.stack([camera((32, 32, 3), n) for n in range(3)])
    mask = np.ones((3, 32, 32), np.uint8)
    arrays = {"a": frames, "m": mask}
    # A mask of 0 and 1 is no image to Minari, and stays an array beside files.
    ring = from_minari(tmp_path / "a-v0", {"a": box_of(frames, 255), "m": box_of(mask, 1)}, arrays)
    mr.export(ring, tmp_path / "b-v0", format="minari", cast={"observation/a": "png"})
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    space = json.loads(written["observation_space"])["subspaces"]
    assert (space["m"]["high"], space["a"]["high"], written["jpeg_encoding"]) == (1, 255, True)
    mr.load(tmp_path / "b-v0", tmp_path / "back")
    with mr.ReplayBuffer.open(tmp_path / "back") as buffer:
        rows = buffer.gather_all()
    assert np.array_equal(rows["observation/a"], frames)
    assert np.array_equal(rows["observation/m"], mask)


def test_a_space_of_images_goes_where_the_values_are_others(tmp_path):
    frames = np.stack([camera((32, 32, 3), n) for n in range(3)])
    mask = np.ones((3, 32, 32), np.uint8)
    spaces = {"a": box_of(frames, 255), "m": box_of(mask, 255)}
    ring = from_minari(tmp_path / "a-v0", spaces, {"a": frames, "m": mask})
    casts = {"observation/a": "jpeg:90", "observation/m": "float32"}
    mr.export(ring, tmp_path / "b-v0", format="minari", cast=casts)
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    assert json.loads(written["observation_space"])["subspaces"]["m"]["dtype"] == "float32"


@pytest.mark.parametrize(
    ("options", "action", "high"),
    [
        ({}, {"type": "Discrete", "n": 4}, 3),
        ({"cast": {"action": "int16"}}, {"type": "Discrete", "n": 4}, 3),
        ({"cast": {"action": "float32"}}, {"type": "Box", "dtype": "float32"}, 3),
        ({"cast": {"observation/m": "float64"}}, {"type": "Discrete", "n": 4}, None),
        ({"cast": {"observation/m": "float16"}}, {"type": "Discrete", "n": 4}, 3),
    ],
)
def test_spaces_of_other_values_go(tmp_path, options, action, high):
    state = np.ones((3, 2), np.float32)
    spaces = {"m": box_of(state, 3, "float32")}
    ring = from_minari(tmp_path / "a-v0", spaces, {"m": state})
    mr.export(ring, tmp_path / "b-v0", format="minari", **options)
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    found = json.loads(written["action_space"])
    assert found | action == found
    space = json.loads(written["observation_space"])["subspaces"]["m"]
    assert (space["high"] == 3) is (high == 3)


def test_a_space_is_widened_where_values_lie_outside_of_it(tmp_path):
    state = np.array([[1, 2], [2, np.nan], [3, 1]], np.float32)
    mask = np.ones((3, 2), np.uint8)
    spaces = {"m": box_of(state, 3, "float32"), "n": box_of(mask, 1)}
    ring = from_minari(tmp_path / "a-v0", spaces, {"m": state, "n": mask})

    def further(columns):
        return {"action": columns["action"] + 9, "observation/m": columns["observation/m"] + 3}

    report = mr.export(ring, tmp_path / "b-v0", format="minari", map=further)
    said = {
        f"values of {name!r} lie outside of its space, which was widened"
        for name in ("action", "observation/m")
    }
    assert said <= {*report.notes}
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    found = json.loads(written["action_space"])
    assert (found["type"], found["start"], found["n"]) == ("Discrete", 0, 11)
    found = json.loads(written["observation_space"])["subspaces"]
    # Of each component; the final observation stays below.
    assert (found["m"]["low"], found["m"]["high"]) == ([0, 0], [5, 5])
    assert found["n"] == spaces["n"]
    report = mr.export(
        ring,
        tmp_path / "c-v0",
        format="minari",
        map=lambda c: {"reward": c["reward"] * 2},
        strict=True,
    )
    assert not any("outside" in note for note in report.notes)
    again = json.loads((tmp_path / "c-v0" / "data" / "metadata.json").read_text())
    first = json.loads((tmp_path / "a-v0" / "data" / "metadata.json").read_text())
    for key in ("observation_space", "action_space"):
        assert again[key] == first[key]


@pytest.mark.parametrize(
    ("actions", "start", "n"), [([-1, 5], -1, 19), ([3, 20], 0, 21), ([0, 17], 0, 18)]
)
def test_a_discrete_space_keeps_what_it_had(tmp_path, actions, start, n):
    state = np.ones((3, 2), np.float32)
    ring = from_minari(tmp_path / "a-v0", {"m": box_of(state, 3, "float32")}, {"m": state}, n=18)
    mr.export(
        ring, tmp_path / "b-v0", format="minari", map=lambda columns: {"action": np.array(actions)}
    )
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    found = json.loads(written["action_space"])
    assert (found["type"], found["start"], found["n"]) == ("Discrete", start, n)


def test_a_final_observation_widens_a_space(tmp_path):
    state = np.array([[1], [2], [9]], np.float32)
    ring = from_minari(tmp_path / "a-v0", {"m": box_of(state, 3, "float32")}, {"m": state})
    report = mr.export(ring, tmp_path / "b-v0", format="minari")
    assert "values of 'observation/m' lie outside of its space, which was widened" in report.notes
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    assert json.loads(written["observation_space"])["subspaces"]["m"]["high"] == [9]


def test_a_mask_stays_an_array_where_others_are_files(tmp_path):
    frames = np.stack([camera((32, 32, 3), n) for n in range(3)])
    for value in (2, 255):
        mask = np.full((3, 32, 32), value, np.uint8)
        spaces = {"a": box_of(frames, 255), "m": box_of(mask, 1)}
        ring = from_minari(tmp_path / f"{value}" / "a-v0", spaces, {"a": frames, "m": mask})
        target = tmp_path / f"{value}" / "b-v0"
        if value == 2:
            mr.export(ring, target, format="minari", cast={"observation/a": "png"})
            mr.load(target, tmp_path / "back")
            with mr.ReplayBuffer.open(tmp_path / "back") as buffer:
                np.testing.assert_array_equal(buffer.gather_all()["observation/m"], mask)
            continue
        message = "values of 'observation/m' lie outside of its space, and Minari would take its"
        with pytest.raises(SourceError, match=message):
            mr.export(ring, target, format="minari", cast={"observation/a": "png"})
        assert not target.exists()


@pytest.mark.parametrize("dtype", [{"a": ["f4", 0, "x", 1]}, "O", "V", None, 3])
def test_a_space_whose_dtype_is_none_goes(tmp_path, dtype):
    state = np.ones((3, 2), np.float32)
    ring = from_minari(tmp_path / "a-v0", {"m": box_of(state, 3, dtype)}, {"m": state})
    mr.export(ring, tmp_path / "b-v0", format="minari")
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    space = json.loads(written["observation_space"])["subspaces"]["m"]
    assert space["dtype"] == "float32"


@pytest.mark.parametrize("low", [[[0], [0, 0]], [0], "a"])
def test_bounds_that_are_none_do_not_stay(tmp_path, low):
    frames = np.stack([camera((32, 32, 3), n) for n in range(3)])
    space = box_of(frames, 255) | {"low": low}
    ring = from_minari(tmp_path / "a-v0", {"a": space}, {"a": frames})
    mr.export(ring, tmp_path / "b-v0", format="minari", cast={"observation/a": "png"})
    written = json.loads((tmp_path / "b-v0" / "data" / "metadata.json").read_text())
    space = json.loads(written["observation_space"])["subspaces"]["a"]
    assert space["low"] == np.zeros((32, 32, 3)).tolist()


def test_a_row_without_an_image_is_refused_with_the_way_out(tmp_path):
    fields = {
        "observation": {"x": mr.Field((), "float32")},
        "info": {"cam": IMAGES["observation"]["top"]},
    }
    with mr.ReplayBuffer.create(tmp_path / "ring", mr.Schema(fields | OTHERS), 9) as buffer:
        for number in range(3):
            ends = number == 2
            buffer.add(
                observation={"x": number},
                info={"cam": seen(number)["top"]},
                action=0,
                reward=0,
                terminated=ends,
                **({"final_observation": {"x": 9}} if ends else {}),
            )
    renamed = {"info/cam": "observation/cam"}
    message = (
        r"field 'observation/cam' has a row without an image in episode 0, and Minari has a file "
        r"for each\. Cast it to arrays with cast= \(--cast observation/cam=uint8\), which are zeros"
    )
    with pytest.raises(SourceError, match=message):
        mr.export(tmp_path / "ring", tmp_path / "a-v0", format="minari", rename=renamed)
    assert not (tmp_path / "a-v0").exists()
    cast = {"info/cam": "uint8"}
    mr.export(tmp_path / "ring", tmp_path / "a-v0", format="minari", rename=renamed, cast=cast)


def test_an_episode_of_jpeg_after_one_of_png_is_said_to_be_lossy(tmp_path):
    mr.export(
        filmed(tmp_path / "ring"),
        tmp_path / "a-v0",
        format="minari",
        fields=["observation/gray", "action", "reward", "terminated"],
    )
    file = tmp_path / "a-v0" / "data" / "main_data.hdf5"
    with h5py.File(file, "a") as group:
        files = group["episode_1/observations/gray"]
        for row in range(len(files)):
            files[row] = np.frombuffer(jpeg(camera(GRAY, row)), np.uint8)
    report = mr.load(tmp_path / "a-v0", tmp_path / "back")
    assert any("it is lossy" in note for note in report.notes)

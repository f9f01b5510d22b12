"""Minari datasets that are written: long and short episodes alike."""

import h5py
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.datasets.minari import writer
from mmreplay.errors import FormatError
from tests.convert.foreign.oracle import assert_same, drawn

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

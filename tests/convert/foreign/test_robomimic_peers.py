"""robomimic's own `SequenceDataset`, item by item, beside our import of its files."""

import h5py
import numpy as np
import pytest

import mmreplay as mr
from tests.convert.foreign.oracle import drawn

# robomimic warns of macros that nobody has set.
pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("robomimic", reason="robomimic is not installed")

from robomimic.utils import obs_utils  # noqa: E402
from robomimic.utils.dataset import SequenceDataset  # noqa: E402

OBSERVED = ["position", "camera"]
NAMES = {"actions": "action", "rewards": "reward", "dones": "done", "states": "states"}


def write(path, rng, lengths, name="demo_{}", **options):
    """Demonstrations as robomimic's tools store them."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"], data.attrs["env_args"] = sum(lengths), "{}"
        for number, steps in enumerate(lengths):
            demo = data.create_group(name.format(number))
            demo.attrs["num_samples"] = steps
            seen = {
                "position": rng.normal(size=(steps + 1, 3)),
                "camera": rng.integers(0, 256, (steps + 1, 6, 5, 3), np.uint8),
            }
            ends = np.zeros(steps, np.int64)
            ends[-1] = number % 2
            values = {
                "actions": rng.normal(size=(steps, 2)),
                "rewards": rng.random(steps),
                "states": rng.normal(size=(steps, 7)),
                "dones": ends,
            }
            for key, each in seen.items():
                values |= {f"obs/{key}": each[:-1], f"next_obs/{key}": each[1:]}
            for key, each in values.items():
                demo.create_dataset(key, data=each, **options)
    return path


def items(path, key):
    """All items of the library, by the paths of our fields."""
    obs_utils.initialize_obs_utils_with_obs_specs(
        {"obs": {"low_dim": ["position"], "rgb": ["camera"]}}
    )
    dataset = SequenceDataset(
        str(path),
        obs_keys=OBSERVED,
        dataset_keys=list(NAMES),
        frame_stack=1,
        seq_length=1,
        load_next_obs=True,
        hdf5_cache_mode=None,
        filter_by_attribute=key,
    )
    found = []
    for number in range(len(dataset)):
        item = dataset[number]
        row = {NAMES[name]: item[name][0] for name in NAMES}
        for name in OBSERVED:
            row[f"observation/{name}"] = item["obs"][name][0]
            row[f"next_observation/{name}"] = item["next_obs"][name][0]
        found.append(row)
    dataset.close_and_delete_hdf5_handle()
    return {name: np.stack([row[name] for row in found]) for name in found[0]}


@pytest.mark.parametrize(
    ("name", "options"), [("demo_{}", {}), ("demo_{}", {"compression": "gzip"}), ("traj_{}", {})]
)
def test_every_item_is_the_librarys(tmp_path, rng, name, options):
    lengths = rng.integers(1, 40, 60).tolist()
    assert sum(lengths) > 1000
    path = write(tmp_path / "demos.hdf5", rng, lengths, name, **options)
    chosen = rng.permutation(len(lengths))
    keys = {"train": chosen[:42], "valid": chosen[42:], "mine": np.array([11, 2, 59, 9])}
    with h5py.File(path, "a") as file:
        for key, numbers in keys.items():
            file[f"mask/{key}"] = np.array([name.format(n) for n in numbers], "S")
    compared = 0
    for key in (None, *keys):
        expected = items(path, key)
        options = {} if key is None else {"filter": key}
        mr.load(path, tmp_path / f"{key}", strict=True, **options)
        paths = [f"observation/{each}" for each in OBSERVED]
        found, left = drawn(tmp_path / f"{key}", paths)
        assert left == 0
        assert set(found) == {*expected, "terminated", "truncated"}
        for path_, values in expected.items():
            np.testing.assert_array_equal(found[path_], values, err_msg=path_)
        ends = found["terminated"] | found["truncated"]
        assert ends.sum() == len(keys.get(key, lengths))
        compared += len(found["action"])
    assert compared > 2 * sum(lengths)

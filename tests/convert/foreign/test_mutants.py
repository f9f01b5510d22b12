"""Every reader of the field's datasets against thousands of damaged sources.

Each mutant has bits flipped, bytes overwritten, a part cut out or its end cut off. It
is an error that names the source, with no target, or loads. ``MUTANTS=10000`` runs as
many of each; one that is found goes into the reader's own test.
"""

import gzip
import os
import pickle
from pathlib import Path

import pytest
import torch
import zarr
from numcodecs import Zlib

import mmreplay as mr
from mmreplay.disk import files
from tests.buffer.test_sealed_groups import record
from tests.convert.contract import error_of, text_of
from tests.convert.foreign import (
    lerobot_sets,
    test_d4rl,
    test_dqn_replay,
    test_lerobot,
    test_minari,
    test_pickles,
    test_rlds,
    test_robomimic,
    test_tensors,
)
from tests.storage.zarr_groups import policy_store, put

COUNT = int(os.environ.get("MUTANTS", "150"))


def minari(kind):
    def make(folder, rng):
        return test_minari.write(folder / "a-v0", kind, test_minari.made(rng, (3, 2)))

    return make


def pickled(folder, rng):
    path = folder / "data.pkl"
    path.write_bytes(pickle.dumps(test_pickles.generic(rng)[0]))
    return path


def store(path, rng, version, **options):
    policy_store(path, rng, version, (3, 2), **options)
    return path


def sharded(folder, rng):
    made = zarr.open_group(folder / "a.zarr", mode="w")
    for name in ("obs", "action"):
        put(made, name, rng.random((12, 2)), chunks=(2, 2), shards=(6, 2))
    return folder / "a.zarr"


def unframed(folder, rng):
    """Messages whose records fit them whatever they say."""
    found, _ = test_rlds.episodes(rng, (2,))
    return test_rlds.write(folder / "set", found, 1)


def storage(folder, rng):
    data = {k: torch.from_numpy(v) for k, v in test_tensors.storage(rng, 4, 2).items()}
    torch.save(data | {"size": 4, "step": 2}, folder / "a.pt")
    return folder / "a.pt"


def exported(folder, rng):
    """A LeRobot set with our record, of images and text."""
    lerobot_sets.ring(folder / "ring", (2, 3, 4), size=8)
    lerobot_sets.export(folder / "ring", folder / "set", video=False)
    return folder / "set"


SOURCES = {
    "d4rl": lambda f, rng: test_d4rl.write(f / "a.hdf5", test_d4rl.episodes(rng, (3, 2))),
    "robomimic": lambda f, rng: test_robomimic.write(
        f / "a.hdf5", test_robomimic.demonstrations(rng, (3, 2))
    ),
    "minari hdf5": minari("hdf5"),
    "minari arrow": minari("arrow"),
    "minari parquet": minari("parquet"),
    "tmrl": pickled,
    "sb3": lambda f, rng: test_pickles.save(f, **test_pickles.steps(rng)),
    "alf": lambda f, rng: test_tensors.played(rng, 1, 4, 6)[0].save(f / "a.pt"),
    "pytorchrl": storage,
    "dqn-replay": lambda f, rng: test_dqn_replay.write(
        f / "logs", *test_dqn_replay.played(rng, 9, 12)[:2]
    ),
    "lerobot": lambda f, rng: test_lerobot.write(
        f / "set", test_lerobot.frames(rng, (2, 3)), files=1
    ),
    "lerobot ours": exported,
    "rlds": unframed,
    "zarr v2": lambda f, rng: store(f / "a.zarr", rng, 2, compressors=Zlib()),
    "zarr v3": lambda f, rng: store(f / "a.zarr", rng, 3),
    "zarr shards": sharded,
    "zarr ours": lambda f, rng: record(f / "ours", rng, steps=12)[1],
    "zarr-zip": lambda f, rng: store(f / "a.zip", rng, 2),
}


def mutated(original, rng):
    data = bytearray(original)
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(len(data) or 1))
        how = rng.integers(4)
        if how == 0 and data:
            data[place] ^= 1 << int(rng.integers(8))
        elif how == 1 and data:
            size = int(rng.integers(1, 9))
            data[place : place + size] = rng.bytes(size)
        elif how == 2:
            del data[place : place + int(rng.integers(1, 99))]
        else:
            del data[place:]
    return bytes(data)


def mend(name, path, data):
    """Checksums around what was changed, so that what lies behind them is reached."""
    if name == "rlds" and path.suffix != ".json" and len(data) > 16:
        return test_rlds.record(data[12:-4])
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_mutants_are_errors_that_name_the_source_or_load(tmp_path, rng, name):
    source = SOURCES[name](tmp_path, rng)
    options = {"allow_pickle": True} if name in ("tmrl", "sb3") else {}
    parts = [p for p in source.rglob("*") if p.is_file()] if source.is_dir() else [source]
    wholes = {part: part.read_bytes() for part in parts}
    target = tmp_path / "target"
    form = name.split()[0]

    def load():
        mr.load(source, target, format=form, **options)

    load()
    files.remove_tree(target)
    errors = 0
    for number in range(COUNT):
        part = parts[number % len(parts)]
        data = mend(name, part, mutated(wholes[part], rng))
        if part.suffix == ".gz" and number % 2:
            inner = mutated(gzip.decompress(wholes[part]), rng)
            data = gzip.compress(inner, 1, mtime=0)
        part.write_bytes(data)
        error = error_of(load)
        if error is None:
            files.remove_tree(target)
        else:
            errors += 1
            assert str(source) in text_of(error), (number, part, error)
            assert not target.exists()
        part.write_bytes(wholes[part])
        assert not [p for p in Path(tmp_path).iterdir() if p.name.startswith("tmp-")]
    assert errors > COUNT // 10

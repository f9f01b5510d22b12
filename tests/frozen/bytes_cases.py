"""Bytes on disk of fixed sequences of writes, and of exported files.

Only the standard library is replaced: `secrets.token_bytes` for uuids and
`time.gmtime` for the time of creation. What else differs from run to run is left out by
the offsets of docs/format.md: boot, device, inode and birth, times, the sums over them,
and how many records a writer makes on the way.
"""

from __future__ import annotations

import json
import struct
import time
from contextlib import contextmanager
from unittest import mock

import google_crc32c
import numpy as np

import mmreplay as mr
from tests.frozen.frozen_files import described, digest
from tests.frozen.frozen_worlds import CAPACITY, buffer, fixed_uuids, schema, write

CREATED = time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))
LIMITER = (2, 5, 20.0)
# Written by us to the byte; other libraries decide the bytes of the rest.
EXACT = ("x.npz", "packed.npz", "x.pt", "x.csv", "x.safetensors")
BY_CONTENT = {"x.parquet": {}, "x.hdf5": {"format": "d4rl"}}
MINARI = "frozen-v0"


@contextmanager
def fixed():
    """Fix what metadata.json would hold of the run."""
    gmtime = mock.patch("time.gmtime", return_value=CREATED)
    with fixed_uuids(), gmtime:
        yield


def _lock(data):
    """Size and keys of the writer's LOCK, which only informs."""
    padded = data[data.index(b"}") + 1 :].strip(b" ") == b""
    return [len(data), sorted(json.loads(data)), padded]


def _slots(data, magic, count):
    """Each slot that was ever written, checked, by its number; the others are void."""
    assert len(data) % count == 0
    size = len(data) // count
    for number in range(count):
        slot = data[number * size : (number + 1) * size]
        if any(slot):
            assert slot[:8] == magic
            assert struct.unpack("<I", slot[-4:]) == (google_crc32c.value(slot[:-4]),)
            yield number, slot


def commit_slots(data):
    """What the newest durable and the newest live slot of COMMIT say."""
    found = {"durable": (), "live": ()}
    for number, slot in _slots(data, b"MMRCMT01", 4):
        flags, num_envs, sequence, epoch = struct.unpack_from("<IIQQ", slot, 8)
        uuid = slot[48:64].hex()
        (generation,) = struct.unpack_from("<Q", slot, 64)
        cut = struct.unpack_from("<QQ", slot, 96)
        arrays = np.frombuffer(slot, "<i8", 4 * num_envs, 128).reshape(4, -1).tolist()
        assert not any(slot[128 + 32 * num_envs : -4])
        says = [len(slot), flags, epoch, uuid, generation, *cut, arrays]
        kind = "durable" if number < 2 else "live"
        found[kind] = max(found[kind], (epoch, sequence, says))
    return {kind: newest[2] for kind, newest in found.items() if newest}


def state_slots(data):
    """What the newest slot of a sampler's STATE says."""
    newest = ()
    for _, slot in _slots(data, b"MMRSMP01", 2):
        flags, num_envs, sequence, generation = struct.unpack_from("<IIQQ", slot, 8)
        uuid, (cut,) = slot[48:64].hex(), struct.unpack_from("<Q", slot, 80)
        seen = np.frombuffer(slot, "<i8", num_envs, 128).tolist()
        assert not any(slot[104:128])
        assert not any(slot[128 + 8 * num_envs : -4])
        says = [len(slot), flags, generation, uuid, cut, seen]
        newest = max(newest, (sequence, says))
    return newest[1]


def tree(folder, *, without=()):
    """Every file below a folder: what can be compared of its bytes."""
    found, shards = {}, []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        data = path.read_bytes()
        if name == "LOCK":
            found[name] = _lock(data)
        elif path.name == "COMMIT":
            found[name] = commit_slots(data)
        elif path.name == "STATE":
            found[name] = state_slots(data)
        elif path.name.startswith("c."):
            shards.append((name, digest(data)))
        elif path.name not in without:
            found[name] = [len(data), digest(data)]
        if name == "metadata.json":
            found["metadata.json keys"] = list(json.loads(data))
    if shards:
        found["shards"] = [len(shards), digest(json.dumps([n for n, _ in shards]).encode())]
        found["bytes of shards"] = digest(json.dumps(shards).encode())
    return found


def _with_priorities(made):
    made.sampler = mr.PrioritizedSampler(seed=0)
    made.update_priorities(made.sample(9), np.arange(9) / 4)
    made.set_statistics({"mean": [1.5, 2]})
    made.commit()


def memmap_case(folder, layout):
    """Mapped files, a file of priorities, statistics."""
    with fixed():
        with buffer(folder / "a", "memmap", layout) as made:
            _with_priorities(made)
            made.sampler = mr.UniformSampler(0)
        return tree(folder / "a")


def killed_case(folder):
    """Mapped files of a writer that has not closed."""
    with fixed(), buffer(folder / "a", num_steps=70) as made:
        made.commit()
        write(made, 70, 75)
        return tree(folder / "a")


def resized_case(folder):
    """A second generation, after a new field and another capacity."""
    with fixed():
        with buffer(folder / "a") as made:
            made.resize(40)
            made.add_field("extra", mr.Field((), "int16"), 7)
        return tree(folder / "a")


def snapshot_case(folder):
    """A snapshot, priorities included."""
    with fixed():
        with buffer(folder / "a") as made:
            _with_priorities(made)
            made.snapshot(folder / "b")
        return tree(folder / "b")


def limited_case(folder):
    """The files of a limiter."""
    with fixed():
        limited(folder / "a").close()
        return tree(folder / "a")


def limited(path):
    """A buffer under a limiter, which counted a draw."""
    made = mr.ReplayBuffer.create(
        path,
        schema(),
        CAPACITY,
        3,
        autoreset="disabled",
        commit_every=None,
        sampler=mr.UniformSampler(0),
        limiter=mr.RateLimiter(*LIMITER),
    )
    write(made, 0, 6)
    made.sample(4)
    return made


def shards_case(folder, codec):
    """Shards of a compacted buffer: all rows that are whole are in them."""
    with fixed():
        with buffer(folder / "a", num_steps=70):
            pass
        mr.compact(folder / "a", folder / "b", codec=codec)
        found = tree(folder / "b")
    if codec != "none":
        # A codec's bytes are not ours: a newer one of the same format may do better.
        del found["bytes of shards"]
    return found


def zarr_case(folder):
    """What a writer of shards writes whatever its thread has sealed by then."""
    with fixed():
        with buffer(folder / "a", "zarr") as made:
            _with_priorities(made)
            made.sampler = mr.UniformSampler(0)
        kept = ("places.bin", "flags.bin", "sums.bin", "records.bin")
        found = tree(folder / "a", without=kept)
    sizes = {name: (folder / "a" / "data-000001" / name).stat().st_size for name in kept}
    return {name: entry for name, entry in found.items() if "shards" not in name} | {"sizes": sizes}


def exports_case(folder):
    """Exported files, to the byte or by what another library reads in them."""
    with fixed():
        with buffer(folder / "a") as made:
            _with_priorities(made)
            made.sampler = mr.UniformSampler(0)
        for name in EXACT:
            options = {"compression": "deflate"} if name == "packed.npz" else {}
            chosen = {} if options else {"priorities": "prioritized"}
            mr.export(folder / "a", folder / name, **chosen, **options)
        for name, options in BY_CONTENT.items():
            mr.export(folder / "a", folder / name, **options)
        mr.export(folder / "a", folder / MINARI, format="minari")
    found = {
        path.name: [path.stat().st_size, digest(path.read_bytes())]
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in BY_CONTENT
    }
    # Deflate's bytes are zlib's.
    with np.load(folder / "packed.npz") as arrays:
        found["packed.npz"] = {key: described(arrays[key]) for key in sorted(arrays)}
    found["x.parquet"] = _parquet(folder / "x.parquet")
    found["x.hdf5"] = _hdf5(folder / "x.hdf5")
    for path in sorted((folder / MINARI).rglob("*")):
        if path.suffix == ".hdf5":
            found[f"minari {path.name}"] = _hdf5(path)
        elif path.suffix == ".json":
            keys = sorted(json.loads(path.read_text()))
            found[f"minari {path.name}"] = keys
    return found


def _parquet(path):
    from pyarrow import parquet

    table = parquet.read_table(path)
    columns = {
        name: [str(table[name].type), digest(json.dumps(table[name].to_pylist()).encode())]
        for name in table.column_names
    }
    return {"columns": columns, "metadata": sorted(map(str, table.schema.metadata or {}))}


def _hdf5(path):
    import h5py

    found = {}

    def note(name, item):
        attributes = sorted(item.attrs)
        array = described(item[()]) if isinstance(item, h5py.Dataset) else None
        found[name] = [attributes, array]

    with h5py.File(path) as file:
        file.visititems(note)
        found["/"] = [sorted(file.attrs), None]
    return found


CASES = {
    "memmap env_major": lambda folder: memmap_case(folder, "env_major"),
    "memmap time_major": lambda folder: memmap_case(folder, "time_major"),
    "killed": killed_case,
    "resized": resized_case,
    "snapshot": snapshot_case,
    "limited": limited_case,
    "shards": lambda folder: shards_case(folder, "none"),
    "shards lz4": lambda folder: shards_case(folder, "blosc-lz4"),
    "shards zstd": lambda folder: shards_case(folder, "zstd"),
    "zarr": zarr_case,
    "exports": exports_case,
}


def recordings(folder):
    """Entries of bytes.json."""
    found = {}
    for name, case in CASES.items():
        (folder / name).mkdir()
        found[name] = case(folder / name)
    return found

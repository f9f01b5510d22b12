"""A reader written from docs/format.md alone; it shares no code with mmreplay.

Reads a folder that nobody writes to, and checks everything that the page says can be
checked. `assert` stands for "MUST": this is a specification at work, not a library.
"""

import ctypes
import json
import math
import os
import stat
import struct
from pathlib import Path

import google_crc32c
import numpy as np

from tests.format import independent_shards

STORED = {"bool": "?", "bfloat16": "<u2"} | {
    kind + str(bits): f"<{kind[0]}{bits // 8}"
    for kind, sizes in (
        ("int", (8, 16, 32, 64)),
        ("uint", (8, 16, 32, 64)),
        ("float", (16, 32, 64)),
    )
    for bits in sizes
}
ENDS = ("terminated", "truncated")
REFERENCE = np.dtype([("position", "<i8"), ("length", "<u4"), ("crc", "<u4")])


def load(path, size=None):
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        assert stat.S_ISREG(os.fstat(fd).st_mode)
        data = file.read()
    assert size is None or len(data) == size, (path, len(data), size)
    return data


def read_metadata(folder):
    data = load(folder / "metadata.json")
    body, tail = data[:-23], data[-23:]
    assert len(data) <= 1 << 20
    assert tail == b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body)
    said = json.loads(data)
    assert said["format"] == "mmreplay"
    assert said["version"][0] == 1
    varies = any(field["shape"][:1] == [None] for field in said["schema"])
    images = [field for field in said["schema"] if field.get("kind") == "image"]
    assert said["features"]["incompat"] == ["heap"] * varies + ["image"] * bool(images)
    for field in said["schema"]:
        assert ("image" in field) == (field in images)
        if field in images:
            check_image_field(field)
    assert said["version"] == [1, int(varies)]
    assert ("heap_bytes" in said) == varies
    if varies:
        assert said["heap_bytes"] % 4096 == 0
        rows = said["zarr"]["shard_rows"] if said["engine"] == "zarr" else 1
        assert said["heap_bytes"] >= 4 * rows * longest_row(said)
        assert said["engine"] != "zarr" or said["layout"] == "env_major"
    assert said["engine"] in ("memmap", "zarr")
    assert said["slots"] >= said["capacity"] + said["reserve"] + said["block_rows"]
    assert said["slots"] % said["block_rows"] == 0
    return said


def check_image_field(field):
    assert (field["shape"], field["dtype"], field["exact"]) == ([None], "uint8", False)
    assert not field["mutable"]
    image = field["image"]
    assert set(image) == {"shape", "codec", "quality", "subsampling"}
    height, width, channels = image["shape"]
    assert 1 <= height <= 65_500
    assert 1 <= width <= 65_500
    assert channels in (1, 3)
    if image["codec"] == "jpeg":
        assert 1 <= image["quality"] <= 100
        assert image["subsampling"] in ("444", "422", "420")
    else:
        assert image["codec"] == "png"
        assert image["quality"] is image["subsampling"] is None


def image_shape(file):
    """The shape that the header of a PNG or JPEG states, and its codec."""
    if file.startswith(b"\x89PNG\r\n\x1a\n"):
        width, height, bits, color = struct.unpack_from(">IIBB", file, 16)
        assert bits == 8
        return [height, width, {0: 1, 2: 3}[color]], "png"
    assert file.startswith(b"\xff\xd8")
    at = 2
    while file[at + 1] not in (0xC0, 0xC1):
        at += 2 + int.from_bytes(file[at + 2 : at + 4], "big")
    bits, height, width, channels = struct.unpack_from(">BHHB", file, at + 4)
    assert bits == 8
    return [height, width, channels], "jpeg"


def aligned(nbytes):
    return -(-nbytes // 8) * 8


def item_nbytes(field):
    return np.dtype(STORED[field["dtype"]]).itemsize * math.prod(field["shape"][1:])


def varying(said):
    return [field for field in said["schema"] if field["shape"][:1] == [None]]


def longest_row(said):
    return sum(aligned(f["max_length"] * item_nbytes(f)) for f in varying(said))


def files_of(said):
    """Which file a field is in, with its offset in the record where it is there."""
    files, small, served = {}, [], {}
    for field in said["schema"]:
        dtype = np.dtype(STORED[field["dtype"]])
        name, shape = field["name"], tuple(field["shape"])
        if shape[:1] == (None,):
            dtype, shape = REFERENCE, ()
        nbytes = dtype.itemsize * math.prod(shape)
        role = [end for end in ENDS if said["roles"].get(end) == name]
        if role:
            served[name] = 2 if role == ["terminated"] else 4
        elif field["mutable"] or nbytes >= 4096:
            files[name] = (f"f{len(files):03d}.bin", dtype, shape, field["mutable"])
        else:
            small.append((-dtype.itemsize, len(small), name, dtype, shape, nbytes))
    members, end = {}, 0
    for _, _, name, dtype, shape, nbytes in sorted(small):
        members[name] = (end, dtype, shape, nbytes)
        end += nbytes
    return files, members, -(-end // 8) * 8, served


def birth(path):
    """The bytes that stand for the time at which a file was created."""
    found = ctypes.create_string_buffer(256)
    none = ctypes.CDLL(None).statx(-100, bytes(path), 0, 0x800, found)
    mask = 0 if none else struct.unpack_from("<I", found)[0]
    # Without a time nothing live is trusted here: no lock is looked at.
    seconds, nanoseconds = struct.unpack_from("<qI", found, 80)
    return struct.pack("<qII", seconds, nanoseconds, 1) if mask & 0x800 else b""


def read_commit(path, said):
    envs = said["num_envs"]
    heap_bytes = said.get("heap_bytes", 0)
    num_columns = 6 if heap_bytes else 4
    size = -(-(128 + 8 * num_columns * envs + 4) // 4096) * 4096
    data = load(path, 4 * size)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = (bytes.fromhex(boot.replace("-", "")), path.stat().st_dev, path.stat().st_ino)
    births = bytes(16), birth(path)
    records = []
    for slot in range(4):
        part = data[slot * size : (slot + 1) * size]
        magic, flags, n, sequence, epoch, boot, uuid, generation, dev, ino, _, born = (
            struct.unpack_from("<8sIIQQ16s16sQQQq16x16s", part)
        )
        columns = np.frombuffer(part, "<i8", num_columns * envs, 128)
        columns = columns.reshape(num_columns, envs).tolist()
        head, limit, tail = columns[:3]
        heap_head, heap_tail = columns[4:] or ([0] * envs, [0] * envs)
        heap = all(
            0 <= t <= h <= t + heap_bytes and h < 1 << 62 and h % 8 == t % 8 == 0
            for h, t in zip(heap_head, heap_tail)  # noqa: B905
        )
        whole = (
            magic == b"MMRCMT01"
            and (n, uuid.hex(), generation) == (envs, said["uuid"], said["generation"])
            and struct.unpack("<I", part[-4:])[0] == google_crc32c.value(part[:-4])
            and all(0 <= t <= h <= m < 1 << 62 for h, m, t in zip(head, limit, tail))  # noqa: B905
            and max(epoch, sequence) < 1 << 62
            and heap
        )
        trusted = whole and (slot < 2 or ((boot, dev, ino) == here and born in births))
        if whole:
            order = epoch, sequence
            heap = heap_head, heap_tail
            records.append((slot, trusted, order, head, limit, tail, flags, heap))
    durable = max((r for r in records if r[0] < 2), key=lambda r: r[2])
    least = durable[2][0] + (durable[6] // 2 & 1)
    live = [r for r in records if r[0] >= 2 and r[1] and r[2][0] >= least]
    truth = max(live, key=lambda r: r[2]) if live else durable
    limits = np.max([r[4] for r in records], axis=0)
    tails = np.maximum(truth[5], limits - said["slots"])
    heads = np.maximum(truth[3], tails)
    summed_from = np.maximum(tails, durable[5])
    return heads, tails, limits, np.array(durable[3]), summed_from, truth[7]


def read_values(said, heap, env, references, bounds, sealed):
    """The values of one environment's rows by field, each a list of bytes.

    Args:
        said: metadata.json.
        heap: heap.bin.
        env: The environment.
        references: By field, of its rows.
        bounds: Heap heads and heap tails.
        sealed: By field, the values that shards hold of its rows; None for others.
    """
    size, found, end = said["heap_bytes"], {}, 0
    head, tail = (column[env] for column in bounds)
    for field in varying(said):
        found[field["name"]] = []
    for row in range(len(next(iter(references.values())))):
        for field in varying(said):
            position, length, crc = references[field["name"]][row].tolist()
            nbytes = length * item_nbytes(field)
            packed = sealed[field["name"]][row] if sealed else None
            if length == 0:
                assert (position, crc) == (0, 0)
                assert not packed
                found[field["name"]].append(b"")
                continue
            assert length <= field["max_length"]
            assert position % 8 == 0
            assert packed is not None or tail <= position
            assert position + nbytes <= head
            assert position % size + nbytes <= size
            # Values of an environment rise with its rows.
            assert position >= end
            end = position + nbytes
            begin = env * size + position % size
            value = heap[begin : begin + nbytes] if packed is None else packed
            assert google_crc32c.value(value) == crc
            if field["kind"] == "text":
                value.decode()
            if field["kind"] == "image":
                image = field["image"]
                assert image_shape(value) == (image["shape"], image["codec"])
            found[field["name"]].append(value)
    return found


def check_sums(said, columns, sums, tails, limits, committed):
    """Check every block that has a valid sum, and count them."""
    size, slots = said["block_rows"], said["slots"]
    laps, checked = slots // size, 0
    for env in range(said["num_envs"]):
        oldest = max(0, limits[env] - slots, tails[env] - size + 1)
        for block in range(-(-int(oldest) // size), int(committed[env]) // size):
            where = rows_of(said, env, np.arange(block * size, (block + 1) * size))
            covered = [struct.pack("<Q", block * size)]
            covered += [column[where].tobytes() for column in columns]
            entry = struct.unpack_from("<II", sums, 8 * (env * laps + block % laps))
            crc = google_crc32c.value(b"".join(covered))
            assert entry == (crc, block // laps % 2**32), (env, block)
            checked += 1
    return checked


def rows_of(said, env, positions):
    if said["layout"] == "env_major":
        return env * said["slots"] + positions % said["slots"]
    return positions % said["slots"] * said["num_envs"] + env


def read_files(said, data, total):
    """Raw bytes of every field's rows, of shards where those hold them.

    Returns:
        By file, and the records, uint8 ``[total, stride]``; None where there are none.
    """
    files, members, stride, _ = files_of(said)
    raws = {
        name: bytearray(load(data / file, total * dtype.itemsize * math.prod(shape)))
        for name, (file, dtype, shape, _) in files.items()
    }
    records, targets = None, {}
    if members:
        raw = bytearray(load(data / "records.bin", total * stride))
        records = np.frombuffer(raw, "u1").reshape(total, stride)
        for name, (offset, _, _, nbytes) in members.items():
            targets[name] = records[:, offset : offset + nbytes]
    for name, (_, _, _, mutable) in files.items():
        if not mutable:
            targets[name] = np.frombuffer(raws[name], "u1").reshape(total, -1)
    if said["engine"] == "zarr":
        independent_shards.fill(said, data, targets)
    return raws, records


def read(folder):
    """Everything alive: first, stop, flags and rows per environment; blocks checked."""
    said = read_metadata(folder)
    data = folder / f"data-{said['generation']:06d}"
    files, members, _, served = files_of(said)
    total = said["slots"] * said["num_envs"]
    flags = np.frombuffer(load(data / "flags.bin", total), "u1")
    covered, values = [flags], {}
    raws, records = read_files(said, data, total)
    if records is not None:
        covered.append(records)
    for name, (offset, dtype, shape, nbytes) in members.items():
        part = np.ascontiguousarray(records[:, offset : offset + nbytes])
        values[name] = part.view(dtype).reshape(total, *shape)
    for name, (_, dtype, shape, mutable) in files.items():
        values[name] = np.frombuffer(raws[name], dtype).reshape(total, *shape)
        if not mutable:
            covered.append(values[name])
    heads, tails, limits, committed, summed_from, bounds = read_commit(data / "COMMIT", said)
    sums = load(data / "sums.bin", total // said["block_rows"] * 8)
    checked = check_sums(said, covered, sums, summed_from, limits, committed)
    heap = b""
    if varying(said):
        heap = load(data / "heap.bin", said["num_envs"] * said["heap_bytes"])
    firsts = np.maximum(tails, heads - said["capacity"])
    envs = []
    for env in range(said["num_envs"]):
        where = rows_of(said, env, np.arange(firsts[env], heads[env]))
        here = flags[where]
        found = {name: column[where] for name, column in values.items()}
        after = np.append(here[1:], 0)[: len(here)]
        if heap:
            references = {field["name"]: found[field["name"]] for field in varying(said)}
            sealed = {}
            if said["engine"] == "zarr":
                sealed = independent_shards.values(said, data, where)
            found |= read_values(said, heap, env, references, bounds, sealed)
        for name, bit in served.items():
            found[name] = (here & bit != 0) | (bit == 4) & (after & 32 != 0)
        envs.append((here, found))
    return {"first": firsts, "stop": heads, "envs": envs, "blocks": checked}

"""What can happen to the files of a buffer, by accident or by an adversary.

Accidents change bytes, lose sectors, put back what was there before and put files in
each other's place. An adversary also makes checksums anew over lies, and puts links,
pipes, folders and files of a terabyte where files are expected.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.format import commit, metadata
from mmreplay.format.commit import seal
from mmreplay.samplers import priority_file
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.layout import record_layout
from mmreplay.storage.zarr import group
from mmreplay.storage.zarr.group import ShardedArray
from tools.torture import forged
from tools.torture.forged import LIMITS, Rng
from tools.torture.specimens import FOLDER, Contents, Specimen

SPARSE_NBYTES = 1 << 40
OUTSIDE = "outside"
SECTOR = 512
JSON_FILES = (
    *("metadata.json", "statistics.json", "LOCK"),
    *("ray/writers.json", "ray/epochs.json"),
)
SAME_SIZE = (forged._flip, forged._flip, forged._scrawl, forged._lie)
CURRENT = ("flags.bin", "records.bin", "sums.bin")

Odd = Callable[[Path], None]
"""Puts something in the place of a file that is no file of bytes."""


@dataclass(slots=True)
class Damage:
    """What is done to a specimen.

    Attributes:
        files: What is written.
        odd: What is done after that, by path.
        descriptions: In words.
        lawful: Whether an accident could have done it: no checksum was made anew.
        older: Whether a whole file of before was put back, checksums and all.
    """

    files: Contents
    odd: dict[str, Odd]
    descriptions: list[str]
    lawful: bool = True
    older: bool = False


def damaged(specimen: Specimen, rng: Rng) -> Damage:
    """Damage that depends on the generator alone."""
    damage = Damage(dict(specimen.files), {}, [specimen.name])
    has_heap = any(name.endswith("/heap.bin") for name in specimen.files)
    has_shards = any("/zarr/" in name for name in specimen.files)
    ways: Sequence[Way] = WAYS
    if has_heap:
        ways = (*WAYS, *HEAP_WAYS, *(SHARD_WAYS if has_shards else ()))
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        way = ways[int(rng.integers(len(ways)))]
        name = _name(damage.files, rng)
        damage.descriptions.append(f"{way.__name__.strip('_')} {name}")
        way(damage, name, specimen, rng)
    return damage


def _name(files: Contents, rng: Rng) -> str:
    """A file, most often of those that are in force and hold what is checked."""
    which = rng.random()
    if which < 0.25:
        return str(rng.choice(["metadata.json", _last(files, "COMMIT")]))
    shards = [name for name in files if "/c." in name]
    if shards and which < 0.5:
        return str(rng.choice([*shards, _last(files, "places.bin")]))
    if which < 0.6:
        return _last(files, str(rng.choice(CURRENT)))
    return str(rng.choice(list(files)))


def _last(files: Contents, name: str) -> str:
    """The path of a data file in the generation in force."""
    return max(path for path in files if path.endswith(f"/{name}"))


def _bytes(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Change bytes; where a size is known beforehand, mostly without changing it."""
    data = bytearray(damage.files[name])
    ways: Sequence[Callable[[bytearray, Rng], bytearray]] = forged.WAYS
    if name not in JSON_FILES and rng.random() < 0.8:
        ways = SAME_SIZE
    way = ways[int(rng.integers(len(ways)))]
    damage.files[name] = bytes(way(data, rng) if data else data)


def _sector(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Lose a sector, or the write that changed it last."""
    data, old = bytearray(damage.files[name]), specimen.older.get(name, b"")
    at = SECTOR * int(rng.integers(1 + len(data) // SECTOR))
    piece = old[at : at + SECTOR] if rng.random() < 0.7 else b""
    piece = piece or bytes(len(data[at : at + SECTOR]))
    data[at : at + len(piece)] = piece
    damage.files[name] = bytes(data)


def _older(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Put a whole file of before in its place."""
    if name in specimen.older:
        damage.files[name] = specimen.older[name]
        damage.older = True


def _swap(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let two files take each other's place."""
    other = str(rng.choice(list(damage.files)))
    files = damage.files
    files[name], files[other] = files[other], files[name]
    damage.descriptions.append(f"with {other}")
    damage.older = True


def _swap_slots(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let two slots of a record take each other's place, or hold the same."""
    name = _last(damage.files, "COMMIT")
    data = bytearray(damage.files[name])
    size = len(data) // commit.NUM_SLOTS
    a, b = (size * int(slot) for slot in rng.integers(commit.NUM_SLOTS, size=2))
    one, two = bytes(data[a : a + size]), bytes(data[b : b + size])
    data[b : b + size] = one
    if rng.random() < 0.5:
        data[a : a + size] = two
    damage.files[name] = bytes(data)
    damage.older = True


def _sealed_commit(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let a record lie under a right checksum."""
    name = _last(damage.files, "COMMIT")
    data = bytearray(damage.files[name])
    size = len(data) // commit.NUM_SLOTS
    for slot in rng.integers(commit.NUM_SLOTS, size=rng.integers(1, 5)).tolist():
        part = bytearray(data[size * slot : size * (slot + 1)])
        if len(part) > 2 * SECTOR:
            _number(part, rng, [8, 16, 24, 64, 88, *range(128, 256, 8)])
            seal(part)
            data[size * slot : size * (slot + 1)] = part
    damage.files[name] = bytes(data)
    damage.lawful = False


def _references(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let rows name values elsewhere; sometimes no checksum is left to tell."""
    name = _last(damage.files, "records.bin")
    if damage.files[name] != specimen.files[name]:
        return
    known = metadata.decode(specimen.files[metadata.FILE_NAME], Path(FOLDER))
    record = record_layout(known.schema).record
    assert record is not None
    rows = np.frombuffer(bytearray(damage.files[name]), record)
    for path in known.schema.varying:
        _forge(rows[path], rng)
    damage.files[name] = rows.tobytes()
    _lose_sums(damage, rng)


def _forge(references: NDArray[np.void], rng: Rng) -> None:
    """Change some references of a field, `REFERENCE` ``[N]``."""
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(references)))
        other = references[int(rng.integers(len(references)))].copy()
        member = str(rng.choice(["position", "length", "crc"]))
        near = int(other[member]) + int(rng.integers(-16, 17)) * int(rng.integers(9))
        extreme = LIMITS[int(rng.integers(len(LIMITS)))]
        number = near if rng.random() < 0.5 else extreme
        if rng.random() < 0.7:
            bits = 8 * REFERENCE[member].itemsize
            other[member] = np.array(number % (1 << bits), f"u{bits // 8}").view(REFERENCE[member])
        references[at] = other


def _lose_sums(damage: Damage, rng: Rng) -> None:
    """Sometimes leave no checksum of rows."""
    if rng.random() < 0.5:
        sums = _last(damage.files, "sums.bin")
        damage.files[sums] = bytes(len(damage.files[sums]))


def _shard_values(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let a chunk of values lie, in a shard whose index has a right checksum."""

    def lie(array: ShardedArray, packed: bytes) -> bytes:
        chunk = bytearray(array.codec.nbytes(memoryview(packed)))
        array.codec.unpack(memoryview(packed), np.frombuffer(chunk, np.uint8))
        way = CHUNK_WAYS[int(rng.integers(len(CHUNK_WAYS)))]
        damage.descriptions.append(way.__name__.strip("_"))
        raw = np.frombuffer(bytes(way(chunk, rng)), np.uint8)
        return bytes(array.codec.pack(raw))

    _rewrite_shard(damage, specimen, rng, lie, values=True)


def _shard_references(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """The same of references, whose values are in a shard, too."""

    def lie(array: ShardedArray, packed: bytes) -> bytes:
        chunk = np.empty(array.chunk_nbytes, np.uint8)
        array.codec.unpack(memoryview(packed), chunk)
        _forge(chunk.view(REFERENCE), rng)
        return bytes(array.codec.pack(chunk))

    _rewrite_shard(damage, specimen, rng, lie, values=False)
    _lose_sums(damage, rng)


def _shard_index(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let the index of a shard of values lie, under a right checksum."""
    _rewrite_shard(damage, specimen, rng, None, values=True)


def _rewrite_shard(
    damage: Damage,
    specimen: Specimen,
    rng: Rng,
    lie: Callable[[ShardedArray, bytes], bytes] | None,
    *,
    values: bool,
) -> None:
    """Write a shard again, with another chunk or, where there is none, another index.

    Args:
        damage: Takes the shard.
        specimen: What is damaged.
        rng: Chooses the shard and the chunk.
        lie: Returns other bytes of a chunk.
        values: The shard is of values, else of references.
    """
    known = metadata.decode(specimen.files[metadata.FILE_NAME], Path(FOLDER))
    root = f"{known.folder}/{group.FOLDER}/"
    arrays = group.arrays_of(known)
    named = {arrays[path].name: arrays[path] for path in known.schema.varying}
    if not values:
        found = [arrays[group.references_of(path)] for path in known.schema.varying]
        named = {array.name: array for array in found}
    shards = {
        shard: named[folder]
        for shard, data in damage.files.items()
        if shard.startswith(root) and data == specimen.files.get(shard)
        if (folder := shard.removeprefix(root).partition("/c.")[0]) in named
    }
    if not shards:
        return
    shard = str(rng.choice(list(shards)))
    damage.descriptions.append(shard)
    array, data = shards[shard], damage.files[shard]
    nbytes = 16 * array.num_chunks + 4
    table = np.frombuffer(data[-nbytes:-4], "<u8").reshape(-1, 2).copy()
    chunks = [data[at : at + size] for at, size in table.tolist()]
    at = int(rng.integers(len(chunks)))
    if lie is not None:
        chunks[at] = lie(array, chunks[at])
        table[:, 1] = [len(chunk) for chunk in chunks]
        table[:, 0] = np.cumsum(table[:, 1]) - table[:, 1]
    else:
        near = int(table.flat[at]) + int(rng.integers(-20, 21))
        number = (near, LIMITS[int(rng.integers(len(LIMITS)))])[int(rng.integers(2))]
        table[at, int(rng.integers(2))] = number % (1 << 64)
    index = table.tobytes()
    checksum = struct.pack("<I", google_crc32c.value(index))
    damage.files[shard] = b"".join(chunks) + index + checksum


def _lengths_at(chunk: bytearray) -> list[int]:
    """Where a chunk of values has their lengths."""
    at, found = 4, []
    while at + 4 <= len(chunk):
        found.append(at)
        at += 4 + int.from_bytes(chunk[at : at + 4], "little")
    return found


def _count(chunk: bytearray, rng: Rng) -> bytearray:
    """Let a chunk say that it has other many values."""
    _put_number(chunk, 0, rng)
    return chunk


def _length(chunk: bytearray, rng: Rng) -> bytearray:
    """Let a value be of another length, with or without the bytes of it."""
    found = _lengths_at(chunk)
    if not found:
        return chunk
    at = found[int(rng.integers(len(found)))]
    before = int.from_bytes(chunk[at : at + 4], "little")
    _put_number(chunk, at, rng)
    after = int.from_bytes(chunk[at : at + 4], "little")
    if rng.random() < 0.6 and after < 1 << 10:
        value = bytes(chunk[at + 4 : at + 4 + before])[:after]
        chunk[at + 4 : at + 4 + before] = value.ljust(after, b"x")
    return chunk


def _value(chunk: bytearray, rng: Rng) -> bytearray:
    """Give a value other bytes, or those of another one."""
    found = _lengths_at(chunk)
    if not found:
        return chunk
    one, other = (found[int(rng.integers(len(found)))] for _ in range(2))
    size = 4 + int.from_bytes(chunk[one : one + 4], "little")
    if rng.random() < 0.5:
        chunk[one + 4 : one + size] = rng.bytes(size - 4)
    else:
        stop = other + 4 + int.from_bytes(chunk[other : other + 4], "little")
        chunk[one : one + size] = chunk[other:stop]
    return chunk


def _put_number(chunk: bytearray, at: int, rng: Rng) -> None:
    near = int.from_bytes(chunk[at : at + 4], "little") + int(rng.integers(-9, 10))
    number = (near, LIMITS[int(rng.integers(len(LIMITS)))])[int(rng.integers(2))]
    chunk[at : at + 4] = struct.pack("<I", number % (1 << 32))


def _heap(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Change bytes of the heap, put an older one back, or cut it."""
    name = _last(damage.files, "heap.bin")
    way = (_bytes, _bytes, _sector, _older)[int(rng.integers(4))]
    way(damage, name, specimen, rng)


def _sealed_heads(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let heap heads and heap tails of a record lie under a right checksum."""
    name = _last(damage.files, "COMMIT")
    data = bytearray(damage.files[name])
    size = len(data) // commit.NUM_SLOTS
    num_envs = len(specimen.committed)
    for slot in rng.integers(commit.NUM_SLOTS, size=rng.integers(1, 5)).tolist():
        part = bytearray(data[size * slot : size * (slot + 1)])
        if len(part) > 2 * SECTOR:
            _number(part, rng, [*range(128 + 32 * num_envs, 128 + 48 * num_envs, 8)])
            seal(part)
            data[size * slot : size * (slot + 1)] = part
    damage.files[name] = bytes(data)
    damage.lawful = False


def _sealed_state(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """The same for the record of the priorities."""
    name = "samplers/prioritized/STATE"
    data = bytearray(damage.files[name])
    size = len(data) // priority_file.NUM_SLOTS
    for slot in range(priority_file.NUM_SLOTS):
        part = bytearray(data[size * slot : size * (slot + 1)])
        if len(part) > 2 * SECTOR:
            _number(part, rng, [8, 16, 24, 64, *range(128, 256, 8)])
            seal(part)
            data[size * slot : size * (slot + 1)] = part
    damage.files[name] = bytes(data)


def _number(data: bytearray, rng: Rng, offsets: list[int]) -> None:
    at = int(rng.choice(offsets))
    number = int.from_bytes(rng.bytes(8), "little") >> int(rng.integers(64))
    if rng.random() < 0.5:
        near = struct.unpack_from("<Q", data, at)[0]
        number = (near + int(rng.integers(-40, 40))) % (1 << 64)
    struct.pack_into("<Q", data, at, number)


def _sealed_metadata(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Let metadata lie under a right checksum."""
    name = metadata.FILE_NAME
    body = bytearray(damage.files[name][: -metadata._TAIL_NBYTES])
    for _ in range(int(rng.integers(1, 3))):
        way = (forged._lie_in_text, forged._flip, forged._splice)
        body = way[int(rng.integers(3))](body, rng) if body else body
    checksum = google_crc32c.value(bytes(body))
    damage.files[name] = bytes(body) + b'"crc32c": "%08x"\n}\n' % checksum
    damage.lawful = False


def _numbers(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Give priorities that no sampler would."""
    name = "samplers/prioritized/priorities.bin"
    data = damage.files[name]
    values = np.frombuffer(data, "<f4", len(data) // 4).copy()
    odd = np.array([np.nan, np.inf, -np.inf, -1, 0, 3e38, 1e-45], np.float32)
    if len(values):
        at = rng.integers(len(values), size=rng.integers(1, len(values) + 1))
        values[at] = rng.choice(odd, len(at))
    damage.files[name] = values.tobytes()


def _odd(damage: Damage, name: str, specimen: Specimen, rng: Rng) -> None:
    """Put something that is no file of bytes in its place."""
    odd = ODDS[int(rng.integers(len(ODDS)))]
    damage.descriptions.append(odd.__name__.strip("_"))
    damage.odd[name] = odd


def _removed(path: Path) -> None:
    path.unlink()


def _link(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    outside = path.with_name(OUTSIDE)
    outside.write_bytes(data)
    path.symlink_to(outside)


def _link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _link_to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _terabyte(path: Path) -> None:
    os.truncate(path, SPARSE_NBYTES)


Way = Callable[[Damage, str, Specimen, Rng], None]
CHUNK_WAYS = (
    *(_count, _length, _length, _length, _value, _value, *SAME_SIZE),
    *(forged._truncate, forged._grow, forged._drop, forged._splice),
)
WAYS = (
    *(_bytes, _bytes, _bytes, _bytes, _sector, _sector, _older, _swap, _swap_slots),
    *(_sealed_commit, _sealed_state, _sealed_metadata, _numbers, _odd),
)
HEAP_WAYS = (*(_references,) * 6, *(_heap,) * 3, _sealed_heads, _sealed_heads)
"""Of buffers with values that vary, beside the others."""
SHARD_WAYS = (*(_shard_values,) * 8, *(_shard_references,) * 4, _shard_index)
"""Of those whose shards hold the values, beside these."""
ODDS: tuple[Odd, ...] = (
    *(_removed, _link, _link_to_itself, _link_to_device, _pipe, _folder, _terabyte),
)

"""Files of a damaged buffer, opened as far as they go.

What is still known of a damaged buffer: its metadata, its heads, its bad blocks.

Nothing is believed but what a checksum or a second fact bears out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import (
    CorruptError,
    FailedError,
    FormatError,
    VersionError,
    raise_if_out_of_files,
    undone_by,
)
from mmreplay.format import commit
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import ON_DISK, Metadata
from mmreplay.ring import Ring
from mmreplay.storage import recovery
from mmreplay.storage.commit_state import FILE_NAME as COMMIT
from mmreplay.storage.layout import FLAGS, HEAP, SUMS, record_layout
from mmreplay.storage.memmap import POLICY, MemmapStore
from mmreplay.storage.store import ReadPolicy
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.storage.zarr.group import FOLDER, arrays_of, shard_name
from mmreplay.storage.zarr.shards import DTYPE, ShardStates
from mmreplay.storage.zarr.shards import DTYPE as PLACE_DTYPE
from mmreplay.storage.zarr.shards import FILE_NAME as PLACES
from mmreplay.verify.engines import CHECKS
from mmreplay.verify.rows import Stripe, SumCheck, lost, stripes
from mmreplay.verify.slots import CommitFile

MAX_GUESSED = 1 << 20
"""Places for which shards are looked for; metadata may speak of any number."""
SHORT = ReadPolicy("pread", "never")
"""A read that ends too early is an error, a look beyond a mapping's end a SIGBUS."""


class ShortStore(ZarrStore):
    """A compressed buffer whose staging files may be too short for some rows.

    Missing rows take no memory. The heap may be too short for some values, each of
    which is then a `CorruptError`.

    Attributes:
        num_staged: Rows that every staging file has.
        num_unsealed: Rows that the files have whose rows are never in shards.
        summed: The same two numbers of the files under checksums.
    """

    num_staged: int
    num_unsealed: int
    summed: tuple[int, int]

    def absent(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows no file holds, bool of their shape."""
        return self._beyond(rows, self.num_staged, self.num_unsealed)

    def _beyond(
        self, rows: NDArray[np.int64], num_staged: int, num_unsealed: int
    ) -> NDArray[np.bool_]:
        beyond = rows >= num_staged
        if beyond.any():
            beyond &= ~self.sealed(rows)
        return beyond | (rows >= num_unsealed)

    def stored(
        self, rows: NDArray[np.int64], paths: Sequence[str]
    ) -> dict[str, NDArray[np.generic]]:
        """Copy rows out as they are stored; see `ZarrStore.stored`."""
        # Metadata that anybody made may speak of rows of any size.
        mutable = any(self.schema[path].mutable for path in paths)
        limits = (self.num_staged, self.num_unsealed) if mutable else self.summed
        if self._beyond(rows, *limits).any():
            raise CorruptError(
                f"{self.path.parent}: files end before row {rows.max()}, and no shard "
                "holds it. Restore them from a copy."
            )
        return super().stored(rows, paths)


def open_files(
    folder: Path, sizes: dict[str, int], restored: list[str] | None = None
) -> dict[str, File]:
    """Open files of a data folder for reading; a missing file is opened as empty.

    Args:
        folder: Where they are.
        sizes: Bytes by name; of a longer file no more is looked at.
        restored: Gets a line for each file that is missing or of another size.

    Raises:
        FormatError: There is a link, a folder, a pipe or a device in the place of one.
    """
    opened: dict[str, File] = {}
    with undone_by(_close, opened):
        for name, nbytes in sizes.items():
            file, problem = _open(folder / name)
            opened[name] = file
            if restored is not None and (problem or file.nbytes != nbytes):
                wrong = f"{name} has {file.nbytes} bytes of {nbytes}: the rows in it are used"
                restored.append(problem or wrong)
            file.nbytes = min(file.nbytes, nbytes)
    return opened


def _close(opened: dict[str, File]) -> None:
    """Close files."""
    for file in opened.values():
        file.close()


def _open(path: Path) -> tuple[File, str]:
    """Return the file, and a message where it is not a regular file."""
    try:
        return File.open(path, None), ""
    except CorruptError:
        # Every read of what stands in for it ends before the first byte.
        empty = files.disk.open(Path(os.devnull), os.O_RDONLY)
        return File(
            path, empty, 0, writable=False
        ), f"{path.name} is missing: rows in other files are used"


def open_store(folder: Path, metadata: Metadata) -> ShortStore:
    """Open a compressed buffer's rows; those of a short file are a `CorruptError`.

    Raises:
        CorruptError: What says which rows are in shards is lost, and of too many.
    """
    ring, schema = metadata.ring, metadata.schema
    placement, maps = record_layout(schema), POLICY.maps(folder)
    sizes = placement.file_sizes(ring, schema, metadata.heap_nbytes)
    opened = open_files(folder, sizes)
    num_held = {name: opened[name].nbytes // nbytes for name, nbytes in row_sizes(metadata).items()}
    lasting = CHECKS[metadata.engine].lasting_files(schema)
    num_unsealed = min(num_held[name] for name in lasting)
    # No flags are kept: they are asked for by row, and memory is not taken for all.
    opened[FLAGS].nbytes = 0
    with undone_by(_close, opened):
        staging = MemmapStore(ring, schema, placement, opened, SHORT)
        # Shards are mapped as ever, rather than read whole.
        staging.maps = maps
        if staging.heap is not None:
            # The file may be shorter, and values lie where the whole heap has them.
            staging.heap.nbytes = metadata.heap_nbytes
        shard_index = _open_shard_index(folder, metadata, maps, num_held[FLAGS])
        store = ShortStore(folder, metadata, staging, shard_index)
    store.num_staged, store.num_unsealed = min(num_held.values()), num_unsealed
    free = lasting - {FLAGS}
    store.summed = (min(n for name, n in num_held.items() if name not in free), num_held[FLAGS])
    return store


def _open_shard_index(folder: Path, metadata: Metadata, mapped: bool, rows: int) -> ShardStates:
    """Return the states of that file; beyond its end they follow from the shards.

    Args:
        folder: Of the data.
        metadata: What the buffer is.
        mapped: Read it through a mapping.
        rows: No shard is looked for beyond so many.
    """
    [nbytes] = CHECKS[metadata.engine].index_sizes(metadata).values()
    [file] = open_files(folder, {PLACES: nbytes}).values()
    if file.nbytes == nbytes:
        return ShardStates(file, mapped)
    try:
        known = np.frombuffer(file.pread(file.nbytes // 4 * 4, 0), DTYPE)
    finally:
        file.close()
    count = nbytes // DTYPE.itemsize
    count = min(count, -(-rows * count // metadata.ring.num_rows))
    if count - len(known) > MAX_GUESSED:
        raise CorruptError(
            f"{file.path} must have {nbytes} bytes, got {file.nbytes}, and more than "
            f"{MAX_GUESSED} shard ranges would have to be searched. Restore it from a "
            "copy."
        )
    guessed = [_sealed(folder, metadata, each) for each in range(len(known), count)]
    numbers = np.concatenate([known, np.array(guessed, DTYPE)])
    made = File(file.path, os.memfd_create(PLACES), 0, writable=True)
    made.resize(nbytes)
    made.pwrite(numbers.tobytes(), 0)
    return ShardStates(made, mapped=True)


def _sealed(folder: Path, metadata: Metadata, number: int) -> bool:
    """Return whether every field has a shard for a shard index."""
    names = (shard_name(array, metadata.ring, number) for array in arrays_of(metadata).values())
    return all((folder / FOLDER / name).is_file() for name in names)


Array = NDArray[np.int64]
Bounds = tuple[Array, Array, Array, Array, Array, Array]
"""Six of a `DamageScan`, from `firsts` to `heap_tails`."""
# Every bit of a file this long is tried in less than a second.
FLIP_NBYTES = 1 << 14
FEW_NBYTES = 16 << 20


@dataclass(slots=True)
class DamageScan:
    """State of a damaged buffer that its files still show.

    Attributes:
        path: Its folder.
        metadata: What it is.
        opened: Its data files by name, as long as they are; a missing file is empty.
        firsts: int64 ``[E]``, the oldest position alive.
        heads: int64 ``[E]``, the heads to go on from.
        summed: int64 ``[E]``, the blocks below must have a checksum that fits.
        unsummed: int64 ``[E]``, so must none of the blocks that begin below.
        heap_heads: int64 ``[E]``, no value ends above.
        heap_tails: int64 ``[E]``, no value begins below.
        restored: What was found out from other facts than the damaged ones.
        reach: Rows in the files whose rows are nowhere else; from it on there is none.
    """

    path: Path
    metadata: Metadata
    opened: dict[str, File]
    firsts: Array
    heads: Array
    summed: Array
    unsummed: Array
    heap_heads: Array
    heap_tails: Array
    restored: list[str] = field(default_factory=list)
    reach: int = field(init=False)

    def __post_init__(self) -> None:
        self.reach = _reach(self.metadata, self.opened, summed=False)

    def bad_blocks(self) -> Iterator[tuple[int, int, str]]:
        """(environment, block, why) of each in reach that no checksum bears out."""
        ring = self.metadata.ring
        size = ring.block_rows
        begins = np.maximum(self.firsts // size, -(-self.unsummed // size))
        ends = np.maximum(self.summed // size, begins)
        with _checking(self.metadata, self.opened) as check:
            for stripe in stripes(ring, begins, ends, self.reach):
                yield from self._bad(check, stripe)

    def _bad(self, check: SumCheck, stripe: Stripe) -> Iterator[tuple[int, int, str]]:
        for env_id, block, computed in _computed(check, stripe):
            if computed is None:
                yield env_id, block, "missing"
            elif not _proven(check, self.metadata, env_id, block, computed):
                gone = _lost(check, self.metadata, env_id, block)
                yield env_id, block, "unproven" if gone else "checksum"

    def alive(self, env_id: int) -> tuple[list[range], list[range]]:
        """Positions alive of an environment whose rows are in reach, and the others.

        Metadata that anybody made may speak of any number of the others.
        """
        first, head = int(self.firsts[env_id]), int(self.heads[env_id])
        inside, beyond = [], []
        for row, step, count in self.metadata.ring.split_at_wrap(env_id, first, head):
            held = min(count, max(0, -(-(self.reach - row) // step)))
            inside.append(range(first, first + held))
            beyond.append(range(first + held, first + count))
            first += count
        return [*filter(len, inside)], [*filter(len, beyond)]

    def placed(self) -> int:
        """Number of rows whose shard state is known; compressed buffers only."""
        [nbytes] = CHECKS[self.metadata.engine].index_sizes(self.metadata).values()
        nbytes_found = self.opened[PLACES].nbytes
        width = PLACE_DTYPE.itemsize
        return self.metadata.ring.num_rows // (nbytes // width) * (nbytes_found // width)

    def close(self) -> None:
        """Close the files."""
        for file in self.opened.values():
            file.close()


class _Tried(suppress):
    """Go on after an error that says what is wrong with a file, or its disk."""

    def __init__(self, kind: type[FormatError]) -> None:
        super().__init__(kind, FailedError)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is not None:
            raise_if_out_of_files(error)
        return super().__exit__(kind, error, trace)


def row_sizes(metadata: Metadata) -> dict[str, int]:
    """Bytes of a row in each file that has rows."""
    sizes = record_layout(metadata.schema).file_sizes(metadata.ring, metadata.schema)
    rows = metadata.ring.num_rows
    return {name: size // rows for name, size in sizes.items() if name != SUMS}


def _reach(metadata: Metadata, opened: dict[str, File], *, summed: bool) -> int:
    """Rows in the files whose rows are nowhere else; of those under checksums alone."""
    nbytes = row_sizes(metadata)
    names = CHECKS[metadata.engine].lasting_files(metadata.schema)
    if summed:
        large = record_layout(metadata.schema).large.items()
        names -= {name for path, name in large if metadata.schema[path].mutable}
    return min(opened[name].nbytes // nbytes[name] for name in names)


@contextmanager
def _checking(metadata: Metadata, opened: dict[str, File]) -> Iterator[SumCheck]:
    """Return the object that computes checksums as `verify` does."""
    commit_file = CommitFile(opened[COMMIT], COMMIT, metadata)
    check = CHECKS[metadata.engine].sum_check(opened, metadata, commit_file, open_store)
    try:
        yield check
    finally:
        check.close()


def _computed(check: SumCheck, stripe: Stripe) -> Iterator[tuple[int, int, int | None]]:
    """(environment, block, checksum) of the blocks of a stripe; None for unreadable."""
    for one in check.apart(stripe):
        sums: list[int | None] = [None] * len(one.blocks)
        with _Tried(CorruptError):
            sums = [*check.compute(one, None)]
        for (_, env_id, block), computed in zip(one.blocks, sums, strict=True):
            yield env_id, block, computed


def _proven(check: SumCheck, metadata: Metadata, env_id: int, block: int, computed: int) -> bool:
    lap = (block // metadata.ring.num_blocks) & 0xFFFFFFFF
    with _Tried(CorruptError):
        return check.entry(env_id, block)[1:] == (computed, lap)
    return False


def _lost(check: SumCheck, metadata: Metadata, env_id: int, block: int) -> bool:
    """Return whether nothing disproves a block that no checksum proves."""
    with _Tried(CorruptError):
        lap = (block // metadata.ring.num_blocks) & 0xFFFFFFFF
        return lost(*check.entry(env_id, block)[1:], lap)
    return True


def _file_sizes(metadata: Metadata) -> dict[str, int]:
    """Bytes of each data file but COMMIT."""
    placement, heap_nbytes = record_layout(metadata.schema), metadata.heap_nbytes
    sizes = placement.file_sizes(metadata.ring, metadata.schema, heap_nbytes)
    return sizes | CHECKS[metadata.engine].index_sizes(metadata)


def refuse_oversized(scan: DamageScan) -> None:
    """Refuse a ring whose metadata.json says more rows than any file holds.

    Forged metadata may have a right checksum. Where files are damaged, some are short
    or missing, but any other one has the size of the ring.

    Raises:
        CorruptError: A buffer of that size would take space, and hold nothing.
    """
    metadata, opened = scan.metadata, scan.opened
    rows, sized = metadata.ring.num_rows, _file_sizes(metadata)
    # The size of the heap says nothing of rows.
    sized.pop(HEAP, None)
    max_rows = max(rows * opened[name].nbytes // size for name, size in sized.items())
    if max_rows < rows:
        raise CorruptError(
            f"{opened[FLAGS].path.parent}: metadata.json is for {rows} rows, but the "
            f"files hold at most {max_rows}, so it belongs to other files. Restore the "
            "files, or name a snapshot or copy of the buffer with like= (--like)."
        )
    # This file is written whole, also where the rows of the source are holes.
    needed = sized.get(PLACES, 0)
    disk_nbytes = sum(file.disk_nbytes()[1] for file in opened.values())
    if needed > max(disk_nbytes, FEW_NBYTES):
        raise CorruptError(
            f"{opened[PLACES].path}: metadata.json needs at least {needed} bytes on "
            f"disk, but the other files have {disk_nbytes}, so it belongs to other "
            "files. Restore the files, or name a snapshot or copy of the buffer with "
            "like= (--like)."
        )


def gather(folder: Path, like: Path | None) -> DamageScan:
    """Scan all files of a damaged buffer.

    Raises:
        CorruptError: What is left says too little.
    """
    metadata, restored = _metadata(folder, like)
    if metadata.engine not in ON_DISK or metadata.unknown_features:
        raise VersionError(
            f"{folder} was written with engine {metadata.engine!r} and the features "
            f"{list(metadata.unknown_features)}, but this mmreplay repairs "
            f"{list(ON_DISK)} without features. Install a newer mmreplay."
        )
    sizes = _file_sizes(metadata)
    sizes[COMMIT] = _commit_nbytes(metadata)
    opened = open_files(folder / metadata.folder, sizes, restored)
    with undone_by(_close, opened):
        known = _settled(folder, metadata, opened[COMMIT], restored)
        if known is None:
            if like is not None:
                _refuse_another(metadata, opened[COMMIT], like)
            known = _scanned(metadata, opened)
            max_lost = metadata.ring.block_rows - 1
            restored.append(
                "COMMIT has no whole record: heads are taken from the checksums of "
                "complete blocks. Newer rows without a checksum (up to "
                f"{max_lost} committed ones per environment) are dropped, and rows "
                "that had been overwritten or cleared may be back"
            )
    return DamageScan(folder, metadata, opened, *known, restored)


def _metadata(folder: Path, like: Path | None) -> tuple[Metadata, list[str]]:
    """The metadata, and how it was found where that was not the plain way."""
    if like is not None:
        return metadata_file.load(like), [f"metadata.json is the one of {like}"]
    try:
        return metadata_file.load(folder), []
    except VersionError:
        raise
    except FormatError as error:
        path, damage = folder / metadata_file.FILE_NAME, error
        if not folder.is_dir():
            raise
    with _Tried(FormatError):
        data = files.read_bytes(path, FLIP_NBYTES)
        return _unflipped(data, path), ["metadata.json had one wrong bit, which was corrected"]
    spare = path.with_name(f"tmp-{path.name}")
    with _Tried(FormatError):
        data = files.read_bytes(spare, metadata_file.MAX_NBYTES)
        return metadata_file.decode(data, spare), [f"metadata.json is from {spare.name}"]
    raise CorruptError(
        f"{str(damage).rstrip('.')}. There is no second copy of it to repair "
        "by: name a snapshot or copy of the buffer with like= (--like)."
    ) from damage


def _unflipped(data: bytes, path: Path) -> Metadata:
    """Turn each bit over in turn, until the checksum fits again.

    Three bits at least tell two texts of one checksum apart, at any length of ours:
    what is one bit away from fitting is what was written.
    """
    size = len(_tail(b""))
    body, rest = bytearray(data[:-size]), data[-size:]
    own = _tail(bytes(body))
    if (int.from_bytes(own) ^ int.from_bytes(rest)).bit_count() == 1:
        return metadata_file.decode(bytes(body) + own, path)
    for bit in range(8 * len(body)):
        body[bit // 8] ^= 1 << bit % 8
        if _tail(bytes(body)) == rest:
            return metadata_file.decode(bytes(body) + rest, path)
        body[bit // 8] ^= 1 << bit % 8
    problem = "does not match its checksum, and no single bit explains it"
    raise CorruptError(f"{path} {problem}")


def _tail(body: bytes) -> bytes:
    return b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body)


def _settled(folder: Path, metadata: Metadata, file: File, restored: list[str]) -> Bounds | None:
    """Oldest rows, heads and `DamageScan`'s bounds, as opening decides; or None."""
    nbytes = _commit_nbytes(metadata)
    data = file.pread(min(nbytes, file.nbytes), 0).ljust(nbytes, b"\0")
    ring, heap_nbytes = metadata.ring, metadata.heap_nbytes
    slots = commit.split(data, metadata.uuid, metadata.generation, ring.num_envs, heap_nbytes)
    if commit.newest_durable(slots) is None:
        return None
    identity = recovery.identify(file, metadata)
    live, durable, report = recovery.settle(slots, identity, metadata, folder)
    if report.cut_rows:
        restored.append(
            f"rows above the last commit, at least {report.cut_rows}, are discarded, "
            "as after a power cut or in a copy of a buffer that was open"
        )
    firsts = np.maximum(live.tails, live.heads - ring.capacity)
    heap_heads, heap_tails = live.heap_heads, live.heap_tails
    if heap_heads is None or heap_tails is None:
        heap_heads = heap_tails = np.zeros(ring.num_envs, np.int64)
    limits = live.limits - ring.slots
    return firsts, live.heads, durable.heads, limits, heap_heads, heap_tails


def _commit_nbytes(metadata: Metadata) -> int:
    """Bytes of the COMMIT file."""
    num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
    return commit.NUM_SLOTS * commit.record_nbytes(num_envs, heap_nbytes)


def _refuse_another(metadata: Metadata, file: File, like: Path) -> None:
    """Refuse the metadata of a buffer that no record in COMMIT speaks of."""
    nbytes = _commit_nbytes(metadata)
    data = file.pread(min(nbytes, file.nbytes), 0)
    spoken_of = commit.uuids(data, metadata.ring.num_envs, metadata.heap_nbytes)
    if spoken_of and metadata.uuid not in spoken_of:
        uuids = sorted(uuid.hex() for uuid in spoken_of)
        raise CorruptError(
            f"{like} is of buffer {metadata.uuid.hex()}, but {file.path} is of "
            f"{uuids}. Pass a snapshot or copy of the same buffer."
        )


def _scanned(metadata: Metadata, opened: dict[str, File]) -> Bounds:
    """Return the same from checksums alone: a block whose sum fits was committed."""
    ring = metadata.ring
    heads = np.zeros(ring.num_envs, np.int64)
    with _checking(metadata, opened) as check:
        for stripe in _summed(check, ring, _reach(metadata, opened, summed=True)):
            for env_id, block, computed in _computed(check, stripe):
                if computed is not None and _proven(check, metadata, env_id, block, computed):
                    stop = (block + 1) * ring.block_rows
                    heads[env_id] = max(heads[env_id], stop)
    if not heads.any():
        raise CorruptError(
            f"{opened[SUMS].path.parent}: COMMIT has no valid record, and no block has "
            "a valid checksum. Restore the buffer from a copy."
        )
    zeros = np.zeros(ring.num_envs, np.int64)
    firsts = np.maximum(heads - ring.capacity, 0)
    # Where values end is lost: what a reference leads to is known by its checksum.
    return firsts, heads, heads, zeros, np.full_like(heads, commit.MAX_COUNT - 1), zeros


def _summed(check: SumCheck, ring: Ring, reach: int) -> Iterator[Stripe]:
    """Yield the blocks that have a checksum, in the lap that it names.

    Metadata that were edited may name more blocks than the file has checksums, or rows.
    """
    first, stop = np.zeros(ring.num_envs, np.int64), ring.num_blocks
    for stripe in stripes(ring, first, first + stop, reach):
        blocks = []
        for column, env_id, place_ in stripe.blocks:
            with _Tried(CorruptError):
                block = check.entry(env_id, place_)[2] * ring.num_blocks + place_
                if (block + 1) * ring.block_rows <= commit.MAX_COUNT:
                    blocks.append((column, env_id, block))
        if blocks:
            yield replace(stripe, blocks=tuple(blocks))

"""What is still known of a damaged buffer: its metadata, its heads, its bad blocks.

Nothing is believed but what a checksum or a second fact bears out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mmreplay import files, recovery
from mmreplay.errors import (
    CorruptError,
    FailedError,
    FormatError,
    VersionError,
    raise_if_out_of_files,
)
from mmreplay.files import File
from mmreplay.format import commit
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import Metadata
from mmreplay.repairing.lenient import (
    never_sealed,
    open_files,
    open_store,
    place_nbytes,
)
from mmreplay.ring import Ring
from mmreplay.storage.engines import ON_DISK
from mmreplay.storage.ledger import FILE_NAME as COMMIT
from mmreplay.storage.placement import FLAGS, SUMS, place
from mmreplay.storage.places import DTYPE as PLACE_DTYPE
from mmreplay.storage.places import FILE_NAME as PLACES
from mmreplay.verify.sealed import SealedSumCheck
from mmreplay.verify.slots import CommitFile
from mmreplay.verify.sums import Stripe, SumCheck, lost, stripes

Array = NDArray[np.int64]
# Every bit of a file this long is tried in less than a second.
FLIP_NBYTES = 1 << 14
FEW_NBYTES = 16 << 20


@dataclass(slots=True)
class Evidence:
    """What is known of a buffer.

    Attributes:
        path: Its folder.
        metadata: What it is.
        opened: Its data files by name, as long as they are; one that is missing is
            an empty one.
        firsts: int64 ``[E]``, the oldest position alive.
        heads: int64 ``[E]``, the heads to go on from.
        summed: int64 ``[E]``, the blocks below must have a checksum that fits.
        unsummed: int64 ``[E]``, so must none of the blocks that begin below.
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
        for row, step, count in self.metadata.ring.stretch(env_id, first, head):
            held = min(count, max(0, -(-(self.reach - row) // step)))
            inside.append(range(first, first + held))
            beyond.append(range(first + held, first + count))
            first += count
        return [*filter(len, inside)], [*filter(len, beyond)]

    def placed(self) -> int:
        """Rows of a compressed buffer of which it is known whether a shard has them."""
        found, nbytes = self.opened[PLACES].nbytes, place_nbytes(self.metadata)
        width = PLACE_DTYPE.itemsize
        return self.metadata.ring.num_rows // (nbytes // width) * (found // width)

    def close(self) -> None:
        """Give the files back."""
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
    sizes = place(metadata.schema).file_sizes(metadata.ring, metadata.schema)
    rows = metadata.ring.num_rows
    return {name: size // rows for name, size in sizes.items() if name != SUMS}


def _reach(metadata: Metadata, opened: dict[str, File], *, summed: bool) -> int:
    """Rows in the files whose rows are nowhere else; of those under checksums alone."""
    nbytes = row_sizes(metadata)
    names = set(nbytes)
    if metadata.engine == "zarr":
        names = set(never_sealed(metadata.schema))
    if summed:
        large = place(metadata.schema).large.items()
        names -= {name for path, name in large if metadata.schema[path].mutable}
    return min(opened[name].nbytes // nbytes[name] for name in names)


@contextmanager
def _checking(metadata: Metadata, opened: dict[str, File]) -> Iterator[SumCheck]:
    """What computes checksums as `verify` does."""
    commit_file = CommitFile(opened[COMMIT], COMMIT, metadata)
    given = (opened, metadata.folder, metadata, commit_file)
    if metadata.engine == "zarr":
        store = open_store(opened[COMMIT].path.parent, metadata)
        check: SumCheck = SealedSumCheck(*given, store)
    else:
        check = SumCheck(*given)
    try:
        yield check
    finally:
        check.close()


def _computed(check: SumCheck, stripe: Stripe) -> Iterator[tuple[int, int, int | None]]:
    """(environment, block, checksum) of the blocks of a stripe; None for unreadable."""
    parts = [stripe]
    if isinstance(check, SealedSumCheck):
        # Each is unpacked by itself: one may be damaged and the next one not.
        parts = [replace(stripe, blocks=(each,)) for each in stripe.blocks]
    for part in parts:
        sums: list[int | None] = [None] * len(part.blocks)
        with _Tried(CorruptError):
            sums = [*check.compute(part, None)]
        for (_, env_id, block), computed in zip(part.blocks, sums, strict=True):
            yield env_id, block, computed


def _proven(
    check: SumCheck, metadata: Metadata, env_id: int, block: int, computed: int
) -> bool:
    lap = (block // metadata.ring.num_blocks) & 0xFFFFFFFF
    with _Tried(CorruptError):
        return check.entry(env_id, block)[1:] == (computed, lap)
    return False


def _lost(check: SumCheck, metadata: Metadata, env_id: int, block: int) -> bool:
    """Whether a block that is not proven is not disproven either."""
    with _Tried(CorruptError):
        lap = (block // metadata.ring.num_blocks) & 0xFFFFFFFF
        return lost(*check.entry(env_id, block)[1:], lap)
    return True


def _sizes(metadata: Metadata) -> dict[str, int]:
    """Bytes of each data file but COMMIT."""
    sizes = place(metadata.schema).file_sizes(metadata.ring, metadata.schema)
    if metadata.engine == "zarr":
        sizes[PLACES] = place_nbytes(metadata)
    return sizes


def refuse_oversized(evidence: Evidence) -> None:
    """Refuse a ring whose metadata.json says more rows than any file holds.

    Forged metadata may have a right checksum. Where files are damaged, some are short
    or missing, but any other one has the size of the ring.

    Raises:
        CorruptError: A buffer of that size would take space, and hold nothing.
    """
    metadata, opened = evidence.metadata, evidence.opened
    rows, sized = metadata.ring.num_rows, _sizes(metadata)
    held = max(rows * opened[name].nbytes // size for name, size in sized.items())
    if held < rows:
        raise CorruptError(
            f"{opened[FLAGS].path.parent}: got files that hold {held} rows at most, "
            f"expected {rows}, for which metadata.json has space reserved; it is "
            "not of these files: restore them, or name a snapshot or copy of it "
            "with like= (--like)"
        )
    # This file is written whole, also where the rows of the source are holes.
    needed = sized.get(PLACES, 0)
    there = sum(file.disk_nbytes()[1] for file in opened.values())
    if needed > max(there, FEW_NBYTES):
        raise CorruptError(
            f"{opened[PLACES].path}: got {there} bytes on the disk in all files beside "
            f"it, expected {needed} at least, which metadata.json would have written; "
            "it is not of these files: restore them, or name a snapshot or copy of the "
            "buffer with like= (--like)"
        )


def gather(folder: Path, like: Path | None) -> Evidence:
    """Look at everything; see `repair`.

    Raises:
        CorruptError: What is left says too little.
    """
    metadata, restored = _metadata(folder, like)
    if metadata.engine not in ON_DISK or metadata.unknown_features:
        raise VersionError(
            f"{folder} was written with engine {metadata.engine!r} and the features "
            f"{list(metadata.unknown_features)}, this mmreplay repairs "
            f"{list(ON_DISK)} without any; install a newer mmreplay"
        )
    sizes = _sizes(metadata)
    sizes[COMMIT] = commit.NUM_SLOTS * commit.slot_nbytes(metadata.ring.num_envs)
    opened = open_files(folder / metadata.folder, sizes, restored)
    try:
        found = _settled(folder, metadata, opened[COMMIT], restored)
        if found is None:
            if like is not None:
                _refuse_another(metadata, opened[COMMIT], like)
            found = _scanned(metadata, opened)
            most = metadata.ring.block_rows - 1
            restored.append(
                "COMMIT has no whole record: heads are from the checksums of whole "
                "blocks, newer rows, which had none (of committed ones up to "
                f"{most} an environment), are not kept, and rows that had been given "
                "up or cleared may be back"
            )
    except BaseException:
        for file in opened.values():
            file.close()
        raise
    return Evidence(folder, metadata, opened, *found, restored)


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
        return _unflipped(data, path), [
            "metadata.json had one bit turned, which was turned back"
        ]
    spare = path.with_name(f"tmp-{path.name}")
    with _Tried(FormatError):
        data = files.read_bytes(spare, metadata_file.MAX_NBYTES)
        return metadata_file.decode(data, spare), [
            f"metadata.json is from {spare.name}"
        ]
    raise CorruptError(
        f"{damage}; got no second copy of it either, "
        "expected one to repair by: name a snapshot or copy of the buffer with like= "
        "(--like)"
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
    told = "is not one bit away from what its checksum says"
    raise CorruptError(f"{path} {told}")


def _tail(body: bytes) -> bytes:
    return b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body)


def _settled(
    folder: Path, metadata: Metadata, file: File, restored: list[str]
) -> tuple[Array, Array, Array, Array] | None:
    """Oldest, heads, committed heads and given up, as opening decides; or None."""
    nbytes = commit.NUM_SLOTS * commit.slot_nbytes(metadata.ring.num_envs)
    data = file.pread(min(nbytes, file.nbytes), 0).ljust(nbytes, b"\0")
    ring = metadata.ring
    slots = commit.split(data, metadata.uuid, metadata.generation, ring.num_envs)
    if commit.newest_durable(slots) is None:
        return None
    identity = recovery.identify(file, metadata)
    live, durable, report = recovery.settle(slots, identity, metadata, folder)
    if report.cut_rows:
        restored.append(
            f"rows above the last commit, at least {report.cut_rows}, are not kept, as "
            "in any copy of a buffer that was not closed, or after a power cut"
        )
    firsts = np.maximum(live.tails, live.heads - ring.capacity)
    return firsts, live.heads, durable.heads, live.limits - ring.slots


def _refuse_another(metadata: Metadata, file: File, like: Path) -> None:
    """Refuse the metadata of a buffer that no record in COMMIT speaks of."""
    nbytes = commit.NUM_SLOTS * commit.slot_nbytes(metadata.ring.num_envs)
    data = file.pread(min(nbytes, file.nbytes), 0)
    spoken_of = commit.uuids(data, metadata.ring.num_envs)
    if spoken_of and metadata.uuid not in spoken_of:
        found = sorted(uuid.hex() for uuid in spoken_of)
        raise CorruptError(
            f"{like}: got the metadata of buffer {metadata.uuid.hex()}, expected those "
            f"of {found}, which {file.path} speaks of; name a snapshot or copy of the "
            "same buffer"
        )


def _scanned(
    metadata: Metadata, opened: dict[str, File]
) -> tuple[Array, Array, Array, Array]:
    """The same from the checksums alone: a block whose sum fits was committed."""
    ring = metadata.ring
    heads = np.zeros(ring.num_envs, np.int64)
    with _checking(metadata, opened) as check:
        for stripe in _summed(check, ring, _reach(metadata, opened, summed=True)):
            for env_id, block, computed in _computed(check, stripe):
                if computed is not None and _proven(
                    check, metadata, env_id, block, computed
                ):
                    stop = (block + 1) * ring.block_rows
                    heads[env_id] = max(heads[env_id], stop)
    if not heads.any():
        raise CorruptError(
            f"{opened[SUMS].path.parent}: got no whole record in COMMIT and no block "
            "with a checksum that fits, expected one of both; nothing can be restored: "
            "take a copy"
        )
    zeros = np.zeros(ring.num_envs, np.int64)
    return np.maximum(heads - ring.capacity, 0), heads, heads, zeros


def _summed(check: SumCheck, ring: Ring, reach: int) -> Iterator[Stripe]:
    """Blocks of which there is an entry, in the lap that it says.

    Metadata that anybody made may speak of more blocks than there are entries, or rows.
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

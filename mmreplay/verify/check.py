"""The check of a buffer: names, metadata, files, COMMIT, flags, checksums, in order.

Files of samplers, limiters and servers on Ray lie beside the data. A buffer is whole
without them, and a sampler or limiter starts over where its file is damaged: the check
reports such a file as a note.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from mmreplay import strict_json
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.disk.lock import FILE_NAME as LOCK
from mmreplay.disk.pause import FILE_NAME as PAUSE
from mmreplay.errors import CorruptError, FailedError, FormatError, ReplayError, VersionError
from mmreplay.format import commit, ray_files
from mmreplay.format import metadata as metadata_file
from mmreplay.format.metadata import ON_DISK, Metadata
from mmreplay.samplers import priority_file
from mmreplay.samplers.priority_file import LOCK_FILE, PRIORITIES, STATE, SYNCED, USES, ColumnKind
from mmreplay.storage.commit_state import FILE_NAME as COMMIT
from mmreplay.storage.layout import FLAGS, record_layout
from mmreplay.verify.engines import CHECKS
from mmreplay.verify.flag_check import FlagCheck
from mmreplay.verify.report import Notebook, Progress, VerifyReport
from mmreplay.verify.slots import CommitFile

NONE = -1
"""The number of a row that a conversion found to have none of its own."""
CHUNK_NUMBERS = 1 << 20
COUNT_NBYTES = 16
BOUNDS_NBYTES = 4096
MASK = (1 << 64) - 1


def check_columns(folder: Path, metadata: Metadata, notes: Notebook, deep: bool) -> None:
    """Check the samplers' columns; their numbers too where it is to be deep."""
    for place in _inside(folder / "samplers", notes):
        name = f"samplers/{place.name}"
        if not place.is_dir() or place.is_symlink():
            notes.note("unknown", name, None, f"{name} is not the folder of a sampler's column")
            continue
        entries = set(files.names(place))
        # A folder has the one or the other, and SYNCED beside counts alone.
        counts = {USES.file, f"tmp-{USES.file}", SYNCED}
        kind = PRIORITIES
        if PRIORITIES.file not in entries and entries & counts:
            kind = USES
        own = {kind.file, STATE, LOCK_FILE, f"tmp-{kind.file}"}
        for entry in sorted(entries - (own | counts if kind is USES else own)):
            what = f"{name}/{entry}"
            notes.note("unknown", what, None, f"{what} is not a file of mmreplay")
        lost = "the sampler discards its priorities"
        if kind is USES:
            lost = "counts of uses that it held are lost"
        for file, num_slots in ((STATE, (priority_file.NUM_SLOTS,)), (SYNCED, (1, 2))):
            if file == STATE or file in entries:
                _check_records(place / file, f"{name}/{file}", num_slots, lost, metadata, notes)
        _check_size(place, name, kind, lost, metadata, notes)
        _check_numbers(place / kind.file, f"{name}/{kind.file}", kind, lost, metadata, notes, deep)


def _inside(root: Path, notes: Notebook) -> list[Path]:
    """Return the names in a folder of the buffer; a link instead has none."""
    if root.is_symlink():
        notes.note("unknown", root.name, None, f"{root.name} must be a folder, got a link")
        return []
    return [root / name for name in files.names(root)] if root.is_dir() else []


@contextmanager
def _opened(path: Path, name: str, nbytes: int | None, notes: Notebook) -> Iterator[File | None]:
    file = None
    try:
        file = File.open(path, nbytes)
    except (FormatError, FailedError) as error:
        notes.fail("beside", name, error)
    try:
        yield file
    finally:
        if file is not None:
            file.close()


def _check_records(
    path: Path,
    name: str,
    num_slots: tuple[int, ...],
    lost: str,
    metadata: Metadata,
    notes: Notebook,
) -> None:
    """Check STATE, or SYNCED, which have so many slots."""
    num_envs = metadata.ring.num_envs
    size = priority_file.slot_nbytes(num_envs)
    with _opened(path, name, None, notes) as file:
        if file is None:
            return
        if file.nbytes not in [size * number for number in num_slots]:
            expected = " or ".join(f"{size * number}" for number in num_slots)
            notes.note(
                "beside",
                name,
                None,
                f"{name} must have {expected} bytes, got {file.nbytes}; {lost}",
            )
            return
        data = file.pread(file.nbytes, 0)
        slots = [data[at : at + size] for at in range(0, len(data), size)]
        valid = [priority_file.decode(each, metadata.uuid, num_envs) for each in slots]
        # A new STATE is empty; SYNCED is stored whole.
        is_state = num_slots == (priority_file.NUM_SLOTS,)
        whole = any(valid) or not any(data) if is_state else all(valid)
        if whole:
            return
        what = "none is a valid one" if not any(valid) else "one is not a valid one"
        notes.note(
            "beside", name, 0, f"{name}: of its {len(slots)} records {what} of this buffer; {lost}"
        )


def _check_size(
    folder: Path, name: str, kind: ColumnKind, lost: str, metadata: Metadata, notes: Notebook
) -> None:
    """Check numbers against STATE: of this generation they are as many as rows."""
    ring, size = metadata.ring, priority_file.slot_nbytes(metadata.ring.num_envs)
    nbytes = priority_file.NUM_SLOTS * size
    try:
        with closing(File.open(folder / STATE, nbytes)) as file:
            data = file.pread(nbytes, 0)
        with closing(File.open(folder / kind.file, None)) as file:
            got, empty = file.nbytes, not any(data)
            if empty and got and np.frombuffer(file.map_readonly(), "u1").any():
                notes.note(
                    "beside",
                    f"{name}/{STATE}",
                    0,
                    f"{name}/{STATE} is empty beside {kind.words}; {lost}",
                )
    except ReplayError:
        return  # What is missing is noted by itself.
    found = priority_file.newest(data, metadata.uuid, ring.num_envs)
    expected = kind.itemsize * ring.num_rows
    width = kind.itemsize * ring.num_envs
    if found is None or not found[1].seen.any() or got % width or not got:
        return
    # Of a generation before the numbers are carried over when a sampler opens them.
    if found[1].generation == metadata.generation and got != expected:
        notes.note(
            "beside",
            f"{name}/{kind.file}",
            None,
            f"{name}/{kind.file} must have {expected} bytes, got {got}; {lost}",
        )


def _check_numbers(
    path: Path,
    name: str,
    kind: ColumnKind,
    lost: str,
    metadata: Metadata,
    notes: Notebook,
    deep: bool,
) -> None:
    width = kind.itemsize * metadata.ring.num_envs
    with _opened(path, name, None, notes) as file:
        if file is None:
            return
        if file.nbytes % width or not file.nbytes:
            notes.note(
                "beside",
                name,
                None,
                f"{name}: its size must be a multiple of {width}, a number for each "
                f"row, got {file.nbytes} bytes; {lost}",
            )
        # Of a count each number is a legal one.
        for first in _chunks_with_data(file) if deep and kind is PRIORITIES else ():
            count = min(CHUNK_NUMBERS, file.nbytes // 4 - first)
            numbers = np.frombuffer(file.pread(4 * count, 4 * first), "<f4")
            notes.read(4 * count)
            fine = (np.isfinite(numbers) & (numbers >= 0)) | (numbers == NONE)
            bad = np.flatnonzero(~fine)
            if len(bad):
                at = 4 * (first + int(bad[0]))
                notes.note(
                    "beside",
                    name,
                    at,
                    f"{name}: numbers must be -1, or finite and at least 0, got "
                    f"{len(bad)} others such as {numbers[bad[0]]}; the priorities of "
                    "these rows are reset",
                )


def _chunks_with_data(file: File) -> Iterator[int]:
    """First numbers of the pieces that hold any: holes are zeros, of any size."""
    nbytes, at = 4 * CHUNK_NUMBERS, 0
    while at < file.nbytes // 4 * 4:
        try:
            at = os.lseek(file.fd, at, os.SEEK_DATA) // nbytes * nbytes
        except OSError:
            return
        yield at // 4
        at += nbytes


def check_limiter(folder: Path, notes: Notebook) -> None:
    """Check the state and the counts of a limiter."""
    for entry in _inside(folder / "limiter", notes):
        name = f"limiter/{entry.name}"
        if entry.name == "law.json":
            try:
                strict_json.parse(files.read_bytes(entry, BOUNDS_NBYTES), name)
            except (FormatError, FailedError) as error:
                notes.fail("beside", name, error)
        elif entry.name.startswith("learner-"):
            _check_count(entry, name, notes)
        elif entry.name != "writer" and not entry.name.startswith("tmp-"):
            notes.note("unknown", name, None, f"{name} is not a file of mmreplay")


def _check_count(path: Path, name: str, notes: Notebook) -> None:
    with _opened(path, name, COUNT_NBYTES, notes) as file:
        if file is None:
            return
        data = file.pread(COUNT_NBYTES, 0)
        pair = [int.from_bytes(data[at : at + 8], "little") for at in (0, 8)]
        if any(pair) and pair[0] ^ pair[1] != MASK:
            notes.note(
                "beside",
                name,
                0,
                f"{name} must hold a count and its complement, got {pair[0]} and "
                f"{pair[1]}; it counts as 0",
            )


def check_ray(folder: Path, metadata: Metadata, notes: Notebook) -> None:
    """Check what a server on Ray notes: leases of writers, and frozen epochs."""
    num_envs = metadata.ring.num_envs
    for entry in _inside(folder / ray_files.FOLDER, notes):
        name = f"{ray_files.FOLDER}/{entry.name}"
        if entry.name.startswith("tmp-"):
            continue
        if entry.name not in (ray_files.WRITERS, ray_files.EPOCHS):
            notes.note("unknown", name, None, f"{name} is not a file of mmreplay")
            continue
        try:
            data = files.read_bytes(entry, ray_files.MAX_NBYTES)
            if entry.name == ray_files.WRITERS:
                ray_files.parse_leases(data, name, num_envs)
            else:
                ray_files.parse_epochs(data, name, num_envs)
        except (FormatError, FailedError) as error:
            notes.fail("beside", name, error)


STATISTICS = "statistics.json"
STATISTICS_NBYTES = 16 << 20
KNOWN = {metadata_file.FILE_NAME, LOCK, PAUSE, STATISTICS} | metadata_file.SIDECARS
TRIES = 3


def verify_buffer(
    path: str | os.PathLike[str], progress: Progress | None = None, *, deep: bool = True
) -> VerifyReport:
    """Check every claim that the files of a buffer make; change nothing.

    Metadata, names, file sizes and types, the slots of COMMIT, the flags of all rows
    alive, and the checksums of all committed whole blocks that hold one; of a
    compressed buffer, also whether all other rows unpack, and the metadata of its group
    for other readers of Zarr. Works on a read-only folder and while a writer lives:
    blocks that the writer overwrites during the check are skipped and counted. Memory:
    a few MiB, whatever the size.

    Args:
        path: The buffer's folder.
        progress: Called with (bytes read, bytes to read).
        deep: Read the data too, for its checksums, and the numbers of samplers; else a
            check costs a byte a row.

    Raises:
        FormatError: There is no buffer at path.
        VersionError: It needs a newer mmreplay.

    Example:
        >>> mr.verify_buffer("runs/cartpole").ok
        True
    """
    folder = Path(os.path.abspath(files.expanded(path)))
    for _ in range(TRIES):
        notes = Notebook(progress, deep)
        metadata = _metadata(folder, notes)
        if metadata is None:
            break
        _check_names(folder, metadata, notes)
        _check_statistics(folder, notes)
        _check_generation(folder, metadata, notes)
        check_columns(folder, metadata, notes, deep)
        check_limiter(folder, notes)
        check_ray(folder, metadata, notes)
        damaged = any(finding.damage for finding in notes.findings)
        # A writer may have moved on to the next generation while we read.
        if not damaged or _generation(folder) == metadata.generation:
            break
    return notes.report(folder)


def _metadata(folder: Path, notes: Notebook) -> Metadata | None:
    try:
        metadata = metadata_file.load(folder)
    except VersionError:
        raise
    except FormatError as error:
        if not (folder / metadata_file.FILE_NAME).exists():
            raise
        notes.note("metadata", metadata_file.FILE_NAME, None, str(error))
        return None
    if metadata.engine not in ON_DISK:
        raise VersionError(
            f"{folder} was written with engine {metadata.engine!r}, but this mmreplay "
            f"verifies {list(ON_DISK)}. Install a newer mmreplay."
        )
    return metadata


def is_buffer(folder: Path) -> bool:
    """Return whether a folder holds a buffer, damaged or not, and no foreign name."""
    names = set(files.names(folder))
    generations = {name for name in names if _is_generation(name)}
    strange = {name for name in names - KNOWN if not name.startswith("tmp-")}
    if metadata_file.FILE_NAME not in names or strange - generations:
        return False
    return any((folder / name / COMMIT).exists() for name in generations)


def _is_generation(name: str) -> bool:
    return name.startswith("data-") and name[5:].isdigit()


def _generation(folder: Path) -> int:
    try:
        return metadata_file.load(folder).generation
    except FormatError:
        return -1


def _check_names(folder: Path, metadata: Metadata, notes: Notebook) -> None:
    """Report foreign and left-over names; delete none."""
    for name in files.names(folder):
        if name in KNOWN or name == metadata.folder:
            continue
        if name.startswith("tmp-") or _is_generation(name):
            notes.note(
                "left_over",
                name,
                None,
                f"{name} is left over from a resize or from a writer that was stopped; "
                "the next writable open removes it",
            )
        else:
            notes.note("unknown", name, None, f"{name} is not a file of mmreplay")
    if (folder / LOCK).exists():
        _open(folder / LOCK, LOCK, None, notes, {})


def _check_statistics(folder: Path, notes: Notebook) -> None:
    path = folder / STATISTICS
    if path.exists():
        try:
            strict_json.parse(files.read_bytes(path, STATISTICS_NBYTES), STATISTICS)
        except (FormatError, FailedError) as error:
            notes.fail("statistics", STATISTICS, error)


def _check_generation(folder: Path, metadata: Metadata, notes: Notebook) -> None:
    """Check the data folder of the current generation."""
    ring, where = metadata.ring, folder / metadata.folder
    engine = CHECKS[metadata.engine]
    sizes = record_layout(metadata.schema).file_sizes(ring, metadata.schema, metadata.heap_nbytes)
    slot_nbytes = commit.record_nbytes(ring.num_envs, metadata.heap_nbytes)
    sizes[COMMIT] = commit.NUM_SLOTS * slot_nbytes
    if where.is_dir():
        for entry in files.names(where):
            if entry not in sizes and entry not in engine.other_names():
                name = f"{metadata.folder}/{entry}"
                notes.note("unknown", name, None, f"{name} is not a file of mmreplay")
        engine.check_names(folder, metadata, notes)
    opened: dict[str, File] = {}
    try:
        for name, nbytes in sizes.items():
            _open(where / name, f"{metadata.folder}/{name}", nbytes, notes, opened)
        if len(opened) == len(sizes):
            _check_data(opened, metadata, notes)
        elif COMMIT in opened:
            _commit_file(opened, metadata).check(notes)
    finally:
        for file in opened.values():
            file.close()


def _open(
    path: Path, name: str, nbytes: int | None, notes: Notebook, opened: dict[str, File]
) -> None:
    """Open a file of a known size, or report it; kept only where opened is."""
    try:
        file = File.open(path, nbytes)
    except (FormatError, FailedError) as error:
        notes.fail("file", name, error)
        return
    if nbytes is None:
        file.close()
    else:
        opened[path.name] = file


def _commit_file(opened: dict[str, File], metadata: Metadata) -> CommitFile:
    return CommitFile(opened[COMMIT], f"{metadata.folder}/{COMMIT}", metadata)


def _check_data(opened: dict[str, File], metadata: Metadata, notes: Notebook) -> None:
    commit_file = _commit_file(opened, metadata)
    claim = commit_file.check(notes)
    if claim is None:
        return
    follows = metadata.autoreset == "next_step"
    name = f"{metadata.folder}/{FLAGS}"
    flags = FlagCheck(opened[FLAGS], name, metadata.ring, follows, commit_file)
    try:
        sums = CHECKS[metadata.engine].sum_check(opened, metadata, commit_file)
    except (FormatError, FailedError) as error:
        # What says which rows of a compressed buffer are in shards.
        notes.fail("file", metadata.folder, error)
        return
    notes.expected_nbytes = flags.nbytes(claim)
    notes.expected_nbytes += sums.nbytes(claim) if notes.deep else 0
    try:
        try:
            flags.run(claim, notes)
        except (CorruptError, FailedError) as error:
            notes.fail("file", name, error)
        if notes.deep:
            sums.run(claim, notes)
            sums.value_check().run(claim, notes)
    finally:
        sums.close()

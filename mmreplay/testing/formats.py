"""The contract of file formats: `check_format`.

The rules export buffers to files and load them again: with fields of every dtype,
wrapped rings, episode ends, final rows and several environments. Files are truncated
and damaged bit by bit, disks fill up, and runs are killed.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import BLOCK_NBYTES, Report
from mmreplay.convert.export import export
from mmreplay.convert.load import load
from mmreplay.convert.registry import Format
from mmreplay.errors import (
    FailedError,
    FormatError,
    FullError,
    LockedError,
    ReplayError,
    SchemaError,
)
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import DTYPES
from mmreplay.testing.buffers import (
    difference_of_metadata,
    difference_of_rows,
    every_kind,
    make_large,
    nested,
    play,
    random_past,
)
from mmreplay.testing.disks import FaultyDisk, QuickDisk, WatchedDisk, using
from mmreplay.testing.rules import ContractError, by_name, run_rules
from mmreplay.verify import verify_buffer

STAGED = "tmp-mmreplay-"
HISTORIES = 25
"""Random buffers that are exported and loaded."""
TRUNCATIONS = (0, 0.001, 0.3, 0.7, 0.98, 0.999)
"""Shares of a file that are left."""
TEXTS = ("", "=1+1", 'a"b,c\r\n', "\0\x1b[31m", "\N{LATIN SMALL LETTER A WITH RING ABOVE}")
KILLED = """
import os, signal, sys
import mmreplay as mr
from mmreplay.convert.registry import Format, registered
def die(done, total):
    os.kill(os.getpid(), signal.SIGKILL)
with registered({format!r}):
    mr.export(sys.argv[1], sys.argv[2], format={format.name!r}, progress=die)
"""

Column = NDArray[Any]


def with_one_nan(column: Column) -> Column:
    """A column whose NaNs all have the same bits, as text has one NaN.

    Pass it as ``stored_as`` of `check_format` for a format that writes numbers as text.
    """
    column = np.array(column)
    if column.dtype.kind == "f":
        column[np.isnan(column)] = np.nan
    return column


@dataclass
class FormatCase:
    """A format to check, and a folder for its files.

    Attributes:
        format: The format.
        folder: Holds buffers and files.
        suffix: Of the files; empty for folders.
        dtypes: The dtypes that it holds.
        options: Options of `export` for random buffers.
        stored_as: What a column becomes in a file.
        flips: Bits that are flipped.
        large_nbytes: Bytes of the buffer that shows memory is bounded.
        large_shape: Shape of its uint8 observations.
        memory_nbytes: The most that an export or a load of it may allocate.
    """

    format: Format
    folder: Path
    suffix: str
    dtypes: Sequence[str]
    options: Mapping[str, Any]
    stored_as: Callable[[Column], Column]
    flips: int
    large_nbytes: int
    large_shape: tuple[int, ...]
    memory_nbytes: int

    @contextmanager
    def source(self) -> Iterator[ReplayBuffer]:
        """Open a buffer of every dtype, with wraps, ends and final rows."""
        with every_kind(self.folder / "source", dtypes=self.dtypes) as buffer:
            yield buffer

    def path(self, name: str) -> Path:
        """Path of a file of the format."""
        return self.folder / f"{name}{self.suffix}"

    def export(self, source: ReplayBuffer | Path, path: Path, **options: Any) -> Report:
        """Write a file of the format."""
        return export(source, path, format=self.format.name, **options)

    def load(self, path: Path, target: Path, **options: Any) -> Report:
        """Load a file of the format."""
        return load(path, target, format=self.format.name, **options)

    def compare(self, source: ReplayBuffer, target: Path, what: str) -> None:
        """Refuse a loaded buffer that differs from its source."""
        with ReplayBuffer.open(target) as loaded:
            different = difference_of_metadata(source, loaded) or difference_of_rows(
                source, loaded, self.stored_as
            )
        if different:
            raise ContractError(
                f"{what} that was exported and loaded differs: {different}. Store "
                "every column of Description.columns and the description itself, to "
                "the bit; pass stored_as for what the format cannot hold, such as "
                "with_one_nan for text"
            )
        findings = verify_buffer(target).findings
        if findings:
            raise ContractError(
                f"{what} that was exported and loaded is damaged: {findings[0]}. "
                "Return blocks as they were written"
            )


def contents(path: Path) -> dict[str, bytes]:
    """Bytes of a file, or of every file in a folder, by relative name."""
    if not path.is_dir():
        return {"": path.read_bytes()}
    files = sorted(item for item in path.rglob("*") if item.is_file())
    return {str(item.relative_to(path)): item.read_bytes() for item in files}


def text_of(error: BaseException) -> str:
    """Message and notes of an error."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def expect(
    call: Callable[[], object], kinds: tuple[type[Exception], ...], what: str, advice: str
) -> Exception:
    """Return the error of a call, which must be of one of the kinds."""
    names = " or ".join(f"mmreplay.{kind.__name__}" for kind in kinds)
    try:
        call()
    except kinds as error:
        return error
    except Exception as error:
        raise ContractError(
            f"{what} raised {type(error).__name__} ({error}). Raise {names}"
        ) from error
    raise ContractError(f"{what} raised nothing. {advice}, and raise {names}")


def random_buffers_come_back(case: FormatCase) -> None:
    """Random buffers that are exported and loaded are the same to the bit."""
    if not case.format.reads:
        return
    for seed in range(HISTORIES):
        past = random_past(np.random.default_rng(seed), case.dtypes)
        own = case.folder / str(seed)
        file = own / f"file{case.suffix}"
        with play(own / "source", past) as source:
            case.export(source, file, **case.options)
            report = case.load(file, own / "target")
            case.compare(source, own / "target", f"random buffer {seed}")
            rows, episodes = int(source.span.lengths.sum()), num_episodes(source)
        if (report.rows, report.episodes) != (rows, episodes):
            raise ContractError(
                f"random buffer {seed} of {rows} rows in {episodes} episodes was "
                f"loaded with {report.rows} in {report.episodes}. Return every row "
                "once, with its flags"
            )
        shutil.rmtree(own)


def num_episodes(buffer: ReplayBuffer) -> int:
    """Episodes of a buffer, those whose first rows were overwritten included."""
    index = buffer.episodes
    return sum(len(index.episodes(env_id).begin) for env_id in range(buffer.num_envs))


def every_dtype_comes_back(case: FormatCase) -> None:
    """A buffer with fields of every dtype comes back, without notes or doubts."""
    if not case.format.reads:
        return
    with case.source() as source:
        case.export(source, case.path("file"))
        report = case.load(case.path("file"), case.folder / "target")
        case.compare(source, case.folder / "target", "a buffer of every dtype")
    if report.notes or report.doubts or not report.nbytes:
        raise ContractError(
            f"the report of a file of its own has notes {report.notes}, doubts "
            f"{report.doubts} and {report.nbytes} bytes. Guess nothing in files that "
            "the format itself wrote"
        )


def values_of_any_length_come_back(case: FormatCase) -> None:
    """Values of fields that vary come back, of a format that says it takes them."""
    if not case.format.reads or not case.format.varies:
        return
    fields = {
        "text": Field.text(max_bytes=40),
        "frame": Field.bytes(max_bytes=40),
        "points": Field((None, 2), "int16", max_length=6),
        "reward": Field((), "float32"),
    }
    rng = np.random.default_rng(0)
    buffer = ReplayBuffer.create(
        case.folder / "varying", Schema(fields), 20, 2, heap_bytes=8192, autoreset="disabled"
    )
    with buffer:
        for _ in range(30):
            buffer.add(
                text=[TEXTS[int(rng.integers(len(TEXTS)))] for _ in range(2)],
                frame=[rng.bytes(int(rng.integers(41))) for _ in range(2)],
                points=[rng.integers(-9, 9, (int(rng.integers(7)), 2), np.int16) for _ in range(2)],
                reward=rng.random(2, np.float32),
            )
        case.export(buffer, case.path("file"), **case.options)
        case.load(case.path("file"), case.folder / "target")
        expected = buffer.gather_all()
    with ReplayBuffer.open(case.folder / "target") as target:
        result = target.gather_all()
    for path in ("text", "frame", "points"):
        differs = result[path].offsets.tobytes() != expected[path].offsets.tobytes()
        if differs or result[path].values.tobytes() != expected[path].values.tobytes():
            raise ContractError(
                f"values of field {path!r} came back as others, or of other lengths. "
                "Write the values of each row, and where each begins"
            )


def rings_go_on_at_their_positions(case: FormatCase) -> None:
    """A loaded ring goes on at the positions where its source stopped."""
    if not case.format.reads:
        return
    with case.source() as source:
        case.export(source, case.path("file"))
        case.load(case.path("file"), case.folder / "target")
        rows = source.gather_all()
        step = nested({p: rows[p][:1].repeat(2, 0) for p in source.schema.paths})
        target = case.folder / "target"
        with ReplayBuffer.open(target, "r+", on_resume="continue") as loaded:
            for _ in range(60):
                loaded.add(step)
            heads, wanted = loaded.heads.tolist(), (source.heads + 60).tolist()
    if heads != wanted:
        raise ContractError(
            f"after 60 more steps the heads of a loaded ring are {heads} instead of "
            f"{wanted}. Store first and stop of the description"
        )


def empty_buffers_come_back(case: FormatCase) -> None:
    """A buffer without rows is exported and loaded."""
    if not case.format.reads:
        return
    with case.source() as source:
        source.clear()
        case.export(source, case.path("empty"))
        report = case.load(case.path("empty"), case.folder / "target")
        case.compare(source, case.folder / "target", "an empty buffer")
    if (report.rows, report.episodes) != (0, 0):
        raise ContractError(
            f"an empty buffer was loaded with {report.rows} rows and "
            f"{report.episodes} episodes. Return no block, or one of no rows"
        )


def equal_buffers_give_equal_files(case: FormatCase) -> None:
    """Two exports of one buffer have the same bytes."""
    with case.source() as source:
        path = source.path
        assert path is not None
        case.export(source, case.path("one"))
    case.export(path, case.path("other"))
    one, other = contents(case.path("one")), contents(case.path("other"))
    for name in one.keys() | other.keys():
        left, right = one.get(name, b""), other.get(name, b"")
        if left != right:
            pairs = zip(left, right, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(left))
            raise ContractError(
                f"two exports of one buffer differ at byte {at} of "
                f"{len(left)} and {len(right)}. Write no times, names of files or "
                "order of sets"
            )


def selections_come_back(case: FormatCase) -> None:
    """Some of the fields and environments are exported and loaded."""
    if not case.format.reads:
        return
    with case.source() as source:
        file, target = case.path("some"), case.folder / "target"
        case.export(source, file, fields=["observation", "all"], env_ids=[1])
        case.load(file, target)
        wanted = [p for p in source.schema.paths if p.startswith(("obs", "all"))]
        with ReplayBuffer.open(target) as loaded:
            paths, lengths = list(loaded.schema.paths), loaded.span.lengths.tolist()
        if paths != wanted:
            raise ContractError(
                f"fields {wanted} were exported and {paths} were loaded. Keep the "
                "order of description.schema"
            )
        if lengths != [0, int(source.span.lengths[1])]:
            raise ContractError(
                f"environment 1 of 2 was exported, and {lengths} rows were loaded. "
                "Keep the numbers of environments, also of empty ones"
            )


def existing_targets_are_refused(case: FormatCase) -> None:
    """An existing file stays as it is, unless `overwrite` replaces it."""
    file = case.path("file")
    with case.source() as source:
        case.export(source, file)
        before = contents(file)
        expect(
            lambda: case.export(source, file),
            (FormatError,),
            f"an export to {file.name}, which exists,",
            "Pass overwrite to mmreplay.convert.staging.Staging",
        )
        if contents(file) != before:
            raise ContractError(
                f"a refused export changed {file.name}. Write under the path of Staging"
            )
        source.clear([0])
        case.export(source, file, overwrite=True)
        if contents(file) == before:
            raise ContractError(
                f"an export with overwrite=True left {file.name} as it was. Replace it"
            )
        if case.format.reads:
            case.load(file, case.folder / "target")
            case.compare(source, case.folder / "target", "a file written over another")
    refuse_leftovers(case, "an export over an existing file")


def refuse_leftovers(case: FormatCase, what: str) -> None:
    """Refuse staged files that stayed."""
    left = [p.name for p in case.folder.iterdir() if p.name.startswith(STAGED)]
    if left:
        raise ContractError(
            f"{what} left {left[0]}. Call Staging.abort in Writer.abort, and where the "
            "constructor of the writer fails: abort is not called then"
        )


def refuse_target(case: FormatCase, path: Path, what: str) -> None:
    """Refuse a target that appeared although its export failed, or is left over."""
    if os.path.lexists(path):
        raise ContractError(
            f"{what} made {path.name}, which is not complete. Write under the path of "
            "mmreplay.convert.staging.Staging, and publish in finish"
        )
    refuse_leftovers(case, what)


def two_runs_do_not_mix(case: FormatCase) -> None:
    """A second export to the same target is refused while the first one runs."""
    target = case.path("file")
    with case.source() as source:

        def again(*_: int) -> None:
            expect(
                lambda: case.export(source, target),
                (LockedError,),
                "a second export to the same target",
                "Write with Staging",
            )

        case.export(source, target, progress=again)
    if not target.exists():
        raise ContractError(
            f"an export returned and {target.name} is not there. Publish it in finish"
        )


def killed_runs_leave_no_target(case: FormatCase) -> None:
    """An export that is killed leaves no target, and can be started again."""
    with case.source() as source:
        path = source.path
    assert path is not None
    target = case.path("new")
    died = subprocess.run(
        [sys.executable, "-c", KILLED.format(format=case.format), path, target],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    if died.returncode != -signal.SIGKILL:
        raise ContractError(
            f"an export in a new process ended with {died.returncode} before it was "
            f"killed:\n{died.stderr[-500:]}\nMake {case.format.home} importable there"
        )
    if os.path.lexists(target):
        raise ContractError(
            f"an export that was killed left {target.name}. Write under the path of "
            "mmreplay.convert.staging.Staging, and publish in finish"
        )
    case.export(path, target)
    refuse_leftovers(case, "the export after a killed one")


def full_disks_leave_no_target(case: FormatCase) -> None:
    """A full disk is a `FullError`, and leaves neither a target nor a staged file."""
    target = case.path("new")
    watched = WatchedDisk()
    with case.source() as source:
        with using(watched):
            case.export(source, case.path("whole"))
        total = watched.calls["pwrite"]
        if not total:
            raise ContractError(
                "a file was written without a call of mmreplay.disk, so that no test "
                "can fill the disk. Write with the File of Staging.open"
            )
        for at in sorted({0, min(1, total - 1), total // 2, total - 1}):
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with using(FaultyDisk(full, at, 1 << 30, ("pwrite",))):
                what = f"a disk full at write {at} of {total}"
                expect(
                    lambda: case.export(source, target),
                    (FullError,),
                    what,
                    "Pass errors of File on",
                )
            refuse_target(case, target, what)


class SyncFailsDisk(QuickDisk):
    """A disk that fails every sync of a file."""

    def datasync(self, fd: int) -> None:
        """Fail."""
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def failed_syncs_leave_no_target(case: FormatCase) -> None:
    """A sync that fails is a `FailedError`, and leaves no target."""
    target = case.path("new")
    with case.source() as source, using(SyncFailsDisk()):
        expect(
            lambda: case.export(source, target),
            (FailedError,),
            "an export whose sync failed",
            "Sync before the target appears, by Staging",
        )
    refuse_target(case, target, "an export whose sync failed")


def truncated_files_are_refused(case: FormatCase) -> None:
    """A truncated file is an error that names it, and makes no buffer."""
    for file, data in damaged_files(case):
        for share in TRUNCATIONS:
            file.write_bytes(data[: int(len(data) * share)])
            what = f"a file truncated to {int(len(data) * share)} of {len(data)} bytes"
            refuse_loaded(case, what)
        file.write_bytes(data)


def damaged_files(case: FormatCase) -> Iterator[tuple[Path, bytes]]:
    """Each file that an export made, with its bytes; none of a format not read."""
    if not case.format.reads:
        return
    path = case.path("file")
    with case.source() as source:
        case.export(source, path)
    for name, data in contents(path).items():
        if data:
            yield (path / name if name else path), data


def refuse_loaded(case: FormatCase, what: str, *, may_load: bool = False) -> bool:
    """Load a damaged file; return whether it was refused, as it must be."""
    path, target = case.path("file"), case.folder / "target"
    try:
        case.load(path, target)
    except ReplayError as error:
        if str(path) not in text_of(error):
            raise ContractError(
                f"{what} raised {type(error).__name__} without its path: {error}. "
                "Name the file in the message"
            ) from error
        if os.path.lexists(target):
            raise ContractError(f"{what} was refused and left a buffer") from error
        return True
    except Exception as error:
        raise ContractError(
            f"{what} raised {type(error).__name__} ({error}). Raise "
            "mmreplay.FormatError or mmreplay.CorruptError with the path"
        ) from error
    if not may_load:
        raise ContractError(
            f"{what} was loaded. Compare its length and checksums with what it says, "
            "and raise mmreplay.CorruptError with the path"
        )
    return False


def flipped_bits_are_noticed(case: FormatCase) -> None:
    """A file with a flipped bit is an error that names it, or loads the same rows."""
    rng = np.random.default_rng(1)
    target = case.folder / "target"
    for file, data in damaged_files(case):
        for at in rng.integers(0, len(data), case.flips).tolist():
            damaged, bit = bytearray(data), int(rng.integers(8))
            damaged[at] ^= 1 << bit
            file.write_bytes(damaged)
            what = f"a file with bit {bit} of byte {at} of {len(data)} flipped"
            if refuse_loaded(case, what, may_load=True):
                continue
            with (
                ReplayBuffer.open(case.folder / "source") as source,
                ReplayBuffer.open(target) as loaded,
            ):
                different = difference_of_rows(source, loaded, case.stored_as)
            if different:
                raise ContractError(
                    f"{what} was loaded and differs: {different}. Store checksums, and "
                    "raise mmreplay.CorruptError with the path"
                )
            shutil.rmtree(target)
        file.write_bytes(data)


def irregular_files_are_refused(case: FormatCase) -> None:
    """Links and pipes are refused and not waited for."""
    if not case.format.reads or not case.suffix:
        return
    with case.source() as source:
        case.export(source, case.path("file"))
    case.path("link").symlink_to(case.path("file"))
    os.mkfifo(case.path("pipe"))
    for name in ("link", "pipe"):
        expect(
            lambda n=name: case.load(case.path(n), case.folder / "target"),  # type: ignore[misc]  # bound at once
            (FormatError,),
            f"a {name} in place of a file",
            "Open sources with mmreplay.disk.files.File.open",
        )


def other_contents_are_refused(case: FormatCase) -> None:
    """A file of something else under the format's name is an error that names it."""
    if not case.format.reads or not case.suffix:
        return
    for data in (b"", b"no", b"hello world, I am not it\n" * 40, bytes(4096)):
        case.path("file").write_bytes(data)
        refuse_loaded(case, f"a file of {len(data)} bytes, {data[:12]!r}...,")


def memory_is_bounded(case: FormatCase) -> None:
    """The memory of an export or a load does not grow with the buffer."""
    # A small buffer first: what modules take that are imported now is not counted.
    for name, nbytes in (("small", 1 << 20), ("large", case.large_nbytes)):
        make_large(case.folder / f"{name} source", nbytes, case.large_shape)
        check_memory(case, name)


def check_memory(case: FormatCase, name: str) -> None:
    """Export and load a buffer, and refuse more memory than the case allows."""
    source, file = case.folder / f"{name} source", case.path(name)
    target = case.folder / f"{name} target"
    calls: list[tuple[str, Callable[[], object]]] = [
        ("an export", lambda: case.export(source, file))
    ]
    if case.format.reads:
        calls.append(("a load", lambda: case.load(file, target)))
    for what, call in calls:
        nbytes = peak(call)
        if name == "large" and nbytes >= case.memory_nbytes:
            raise ContractError(
                f"{what} of {case.large_nbytes >> 20} MiB allocated "
                f"{nbytes >> 20} MiB, more than {case.memory_nbytes >> 20}. Write each "
                "block when it comes, and return blocks of at most rows_per_block rows"
            )


def peak(call: Callable[[], object]) -> int:
    """The most bytes that Python and numpy held during a call beyond those before."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


RULES = by_name(
    random_buffers_come_back,
    every_dtype_comes_back,
    values_of_any_length_come_back,
    rings_go_on_at_their_positions,
    empty_buffers_come_back,
    equal_buffers_give_equal_files,
    selections_come_back,
    existing_targets_are_refused,
    two_runs_do_not_mix,
    killed_runs_leave_no_target,
    full_disks_leave_no_target,
    failed_syncs_leave_no_target,
    truncated_files_are_refused,
    flipped_bits_are_noticed,
    irregular_files_are_refused,
    other_contents_are_refused,
    memory_is_bounded,
)
FORMAT_RULES = tuple(RULES)
"""Names of the rules of `check_format`."""


def check_format(
    format: str | Format,
    folder: str | Path | None = None,
    *,
    rules: Sequence[str] | None = None,
    suffix: str | None = None,
    dtypes: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    stored_as: Callable[[Column], Column] = np.ascontiguousarray,
    flips: int = 60,
    large_nbytes: int = 200 << 20,
    large_shape: tuple[int, ...] = (84, 84, 4),
    memory_nbytes: int = 3 * BLOCK_NBYTES + (2 << 20),
) -> None:
    """Check that a file format keeps the contract of `mmreplay.convert.base`.

    Of a format that does not read, what it writes is not loaded again.

    Args:
        format: A format, or the name of a registered one. It must write.
        folder: Where buffers and files are made; a temporary folder by default.
        rules: Names of the rules to check, of `FORMAT_RULES`; all by default.
        suffix: Of the files; the first of the format by default.
        dtypes: Dtypes that the format holds; all by default.
        options: Options of `export` for random buffers, such as to allow wide tables.
        stored_as: What a column becomes in a file that does not hold every bit, such
            as `with_one_nan`.
        flips: Bits to flip, one in each copy of a file.
        large_nbytes: Bytes of the buffer that shows that memory is bounded; less for
            formats that write text, which are slow.
        large_shape: Shape of its uint8 observations.
        memory_nbytes: The most that its export or load may allocate: by default three
            blocks of 16 MiB and 2 MiB.

    Raises:
        ContractError: A rule is broken. What the format itself raises is passed on,
            with a note that names the rule.
        SchemaError: The format does not write.

    Example:
        >>> from mmreplay.testing import check_format
        >>> check_format("npz", rules=["every_dtype_comes_back"])
    """
    own = registry.named(format) if isinstance(format, str) else format
    if not own.writes:
        raise SchemaError(
            f"format must write, got {own.name!r}, which only reads. Add open_writer "
            "to its module, if only for tests."
        )
    if suffix is None:
        suffix = own.suffixes[0] if own.suffixes else ""

    @contextmanager
    def make_case(path: Path) -> Iterator[FormatCase]:
        case = FormatCase(
            own,
            path,
            suffix,
            dtypes or DTYPES,
            options or {},
            stored_as,
            flips,
            large_nbytes,
            large_shape,
            memory_nbytes,
        )
        # No power is cut here; memory is measured as it is with the real disk.
        large = path.name.startswith(memory_is_bounded.__name__)
        with nullcontext() if large else using(QuickDisk()):
            yield case

    with registry.registered(own):
        run_rules(f"format {own.name!r}", RULES, rules, folder, make_case)

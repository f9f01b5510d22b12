"""Files that somebody damaged or made up: a named error, or the same buffer."""

import contextlib
import gc
import itertools
import os
import resource
import shutil

import google_crc32c
import numpy as np
import pytest

import mmreplay as mr
from mmreplay import episodes, process
from mmreplay.disk import files
from mmreplay.disk.lock import Owner
from mmreplay.errors import CorruptError, EmptyError, FailedError, FormatError, LockedError
from mmreplay.format.commit import seal
from mmreplay.ring import Span
from tests.format.support import BOOT_ID, fill, schema_of
from tests.slices import count

MUTANTS = count(2000, 800)
TOKENS = b'0179-+eE."[]{},:\\u\0\xff '
MEMORY_NBYTES = 64 << 20


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A small buffer that was killed after its last commit."""
    monkeypatch.setattr(process, "boot_id", lambda: BOOT_ID)
    with mr.ReplayBuffer.create(tmp_path / "b", schema_of(), 12, 2, autoreset="disabled") as buffer:
        fill(buffer, 0, 30)
    return tmp_path / "b"


def mutants(data, rng, tail=0):
    """Bytes changed, cut, put in, swapped or doubled; the last `tail` stay."""
    size = len(data) - tail
    for _ in range(MUTANTS):
        made = bytearray(data)
        kind = rng.integers(5)
        for at in rng.integers(size, size=rng.integers(1, 4)).tolist():
            piece = bytes(made[at : at + int(rng.integers(1, 9))])
            if kind == 0:
                made[at] = int(rng.integers(256))
            elif kind == 1:
                made[at] ^= 1 << int(rng.integers(8))
            elif kind == 2:
                del made[at : at + len(piece)]
            elif kind == 3:
                made[at:at] = piece
            else:
                made[at] = TOKENS[int(rng.integers(len(TOKENS)))]
        yield bytes(made)


def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def opens_true_or_is_refused(folder):
    """Open for reading: a named error, or rows that are what was written there."""
    try:
        buffer = mr.ReplayBuffer.open(folder)
    except FormatError:
        return False
    with buffer:
        found = buffer.gather_all()
        assert np.array_equal(found["action"], 1000 * found.env_ids + found.positions)
    return True


def test_mutants_of_metadata_are_refused_by_name_in_bounded_memory(folder, rng):
    path = folder / "metadata.json"
    data = path.read_bytes()
    before, opened = peak_nbytes(), 0
    for made in mutants(data, rng):
        path.write_bytes(made)
        opened += opens_true_or_is_refused(folder)
    # A change that puts the same byte in its place is the one that opens.
    assert opened < MUTANTS / 20
    assert peak_nbytes() - before < MEMORY_NBYTES


def test_mutants_of_metadata_with_a_right_checksum_are_refused_or_open(folder, rng):
    path = folder / "metadata.json"
    body = path.read_bytes()[:-23]
    before = peak_nbytes()
    for made in mutants(body, rng, tail=3):
        checksum = google_crc32c.value(made)
        path.write_bytes(made + b'"crc32c": "%08x"\n}\n' % checksum)
        # It may say other dtypes and names of the same sizes: other values then.
        opens_or_is_refused(folder)
    assert peak_nbytes() - before < MEMORY_NBYTES


def opens_or_is_refused(folder):
    try:
        buffer = mr.ReplayBuffer.open(folder)
    except FormatError:
        return
    with buffer:
        buffer.gather_all()


def test_mutants_of_commit_are_refused_or_serve_rows_that_were_there(folder, rng):
    path = folder / "data-000001" / "COMMIT"
    data = path.read_bytes()
    before, opened = peak_nbytes(), 0
    for made in mutants(data, rng):
        with open(path, "r+b") as file:
            file.truncate(len(made))
            file.write(made)
        opened += opens_true_or_is_refused(folder)
    # Those that change no size damage one slot or two of four.
    assert opened > MUTANTS / 4
    assert peak_nbytes() - before < MEMORY_NBYTES


def test_records_of_any_counts_with_a_right_checksum_open_or_are_void(folder, rng):
    path = folder / "data-000001" / "COMMIT"
    data = path.read_bytes()
    before = peak_nbytes()
    for _ in range(MUTANTS // 16):
        made = bytearray(data)
        for slot in rng.integers(4, size=rng.integers(1, 5)).tolist():
            part = bytearray(made[4096 * slot : 4096 * (slot + 1)])
            at = int(rng.choice([8, 16, 24, 64, 88, *range(128, 192, 8)]))
            number = int.from_bytes(rng.bytes(8), "little") >> int(rng.integers(64))
            part[at : at + 8] = number.to_bytes(8, "little")
            seal(part)
            made[4096 * slot : 4096 * (slot + 1)] = part
        path.write_bytes(made)
        for mode in ("r", "r+"):
            try:
                buffer = mr.ReplayBuffer.open(folder, mode, commit_every=None)
            except CorruptError:
                continue
            with buffer:
                buffer.gather_all()
                if mode == "r+":
                    fill(buffer, 0, 2)
    assert peak_nbytes() - before < MEMORY_NBYTES


@pytest.mark.parametrize("name", ["COMMIT", "flags.bin", "records.bin", "f000.bin", "sums.bin"])
@pytest.mark.parametrize("damage", ["cut", "longer", "gone", "link", "folder", "pipe"])
def test_a_file_that_is_not_what_it_should_be_is_refused_by_name(folder, name, damage):
    path = folder / "data-000001" / name
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "longer":
        path.write_bytes(data + b"\0")
    elif damage == "link":
        (folder / "elsewhere").write_bytes(data)
        path.symlink_to(folder / "elsewhere")
    elif damage == "folder":
        path.mkdir()
    elif damage == "pipe":
        os.mkfifo(path)
    for mode in ("r", "r+"):
        with pytest.raises(FormatError, match=f"{name} (has|is)"):
            mr.ReplayBuffer.open(folder, mode)
    if damage != "folder":
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        mr.ReplayBuffer.open(folder, "r+").close()


def test_metadata_and_files_that_disagree_are_refused(folder, tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "other", schema_of(), 13, 2, autoreset="disabled"):
        pass
    shutil.copy(tmp_path / "other" / "metadata.json", folder / "metadata.json")
    with pytest.raises(CorruptError, match=r"durable slots|bytes, but metadata"):
        mr.ReplayBuffer.open(folder)


LOCK_TEXTS = [b"[" * 60_000, b"\xff", b"", b"[]", b'{"a": NaN}', b"x" * (1 << 20)]


@pytest.mark.parametrize("text", LOCK_TEXTS, ids=range(len(LOCK_TEXTS)))
def test_a_lock_that_says_anything_at_all_hurts_nobody(folder, text):
    path = folder / "LOCK"
    path.write_bytes(text)
    assert not Owner(folder).text
    path.write_bytes(text[:100])
    with mr.ReplayBuffer.open(folder, "r+"):
        assert Owner(folder).pid == os.getpid()
        path.write_bytes(text)
        with pytest.raises(LockedError, match="already open for writing"):
            mr.ReplayBuffer.open(folder, "r+")


def test_a_folder_that_cannot_be_read_is_a_failure_with_its_name(folder, monkeypatch):
    def refuse(self, path, flags):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files.Disk, "open", refuse)
    with pytest.raises(FailedError, match=r"cannot open .*metadata\.json: Permission"):
        mr.ReplayBuffer.open(folder)


def test_flags_are_scanned_in_chunks(monkeypatch):
    monkeypatch.setattr(episodes.index, "SCAN_ROWS", 5)
    flags = np.random.default_rng(0).integers(0, 64, 100).astype(np.uint8)
    asked = []

    def read(env_id, first, stop):
        asked.append(stop - first)
        return flags[first:stop]

    span = Span(np.array([3]), np.array([100]))
    pieces = episodes.EpisodeIndex(1, derived=True, final_follows=False)
    pieces.update(span, read)
    assert max(asked) == 5
    monkeypatch.setattr(episodes.index, "SCAN_ROWS", 1000)
    whole = episodes.EpisodeIndex(1, derived=True, final_follows=False)
    whole.update(span, read)
    for name in ("begin", "end", "headless", "running"):
        pair = [getattr(index.episodes(0), name) for index in (pieces, whole)]
        assert np.array_equal(*pair), name
    assert pieces.num_illegal == whole.num_illegal
    assert pieces.num_steps == whole.num_steps


def num_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def heads_found(folder, mode, limit):
    """Heads that an opening with so many descriptors finds; it never commits."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        buffer = mr.ReplayBuffer.open(folder, mode, commit_every=None)
    except FailedError as error:
        assert "Too many open files" in str(error)  # noqa: PT017
        return None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    heads = buffer.heads.tolist()
    abandon(buffer)
    return heads


def limit_with(spare):
    """The limit below which so many descriptors are free, whatever others left open."""
    used = set()
    for name in os.listdir("/proc/self/fd"):
        # That of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            os.fstat(int(name))
            used.add(int(name))
    free = (number for number in itertools.count() if number not in used)
    return next(itertools.islice(free, spare, None))


def abandon(buffer):
    """Leave a buffer as its writer's death does."""
    buffer._finalizer.detach()
    buffer._files.committer = None
    buffer._files.close()


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_too_few_descriptors_are_reported_and_drop_no_row(tmp_path, mode):
    buffer = mr.ReplayBuffer.create(
        tmp_path / "b", schema_of(), 12, 2, commit_every=None, autoreset="disabled"
    )
    fill(buffer, 0, 9)
    abandon(buffer)
    del buffer
    # Garbage of other tests would give its descriptors back in the middle.
    gc.collect()
    before = num_descriptors()
    opened = []
    for spare in range(24):
        opened.append(heads_found(tmp_path / "b", mode, limit_with(spare)))
        assert num_descriptors() == before
    # Published and not committed: what an opening in doubt would cut.
    enough = opened.index([9, 9])
    assert 5 < enough < 22
    assert opened == [None] * enough + [[9, 9]] * (24 - enough)


@pytest.mark.parametrize("autoreset", ["disabled", "same_step", "next_step"])
@pytest.mark.sliced(1)
def test_any_flags_at_all_are_drawn_from_or_refused(tmp_path, rng, autoreset):
    with mr.ReplayBuffer.create(tmp_path / "b", schema_of(), 12, 2, autoreset=autoreset) as buffer:
        fill(buffer, 0, 30)
    path = tmp_path / "b" / "data-000001" / "flags.bin"
    size = path.stat().st_size
    for _ in range(25):
        masks = rng.choice([0, 1, 2, 4, 8, 16, 32, 63, 255], size)
        path.write_bytes((rng.integers(256, size=size) & masks).astype("u1").tobytes())
        with mr.ReplayBuffer.open(tmp_path / "b") as reader:
            assert 0 <= len(reader) <= 24
            for env_id in range(2):
                episodes_found = reader.episodes.episodes(env_id)
                assert (episodes_found.lengths > 0).all()
            assert len(reader.gather_all().positions) == 24
            with contextlib.suppress(EmptyError):
                assert len(reader.sample(16).positions) == 16
        with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None) as writer:
            fill(writer, 0, 1)
            writer.clear()
            fill(writer, 0, 30)

"""A file that is missing, empty, cut or zeros costs what it held, and no more."""

import errno
import os
import shutil
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import OR_REPAIR, CorruptError, FailedError, FormatError, FullError
from mmreplay.format.metadata import encode, load
from mmreplay.repairing import restore, scan
from mmreplay.repairing import restore as sealed_rows
from mmreplay.repairing import scan as lenient
from mmreplay.storage import recovery
from mmreplay.storage.layout import record_layout
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.testing.disks import QuickDisk, using
from mmreplay.verify import verify_buffer
from mmreplay.verify.engines import CHECKS
from mmreplay.verify.rows import SumCheck
from tests.buffer.test_snapshots import SCHEMA, extend
from tests.descriptors import few_descriptors
from tests.repairing.test_repair import DATA, assert_repaired, contents

KINDS = [
    (engine, layout) for engine in ("memmap", "zarr") for layout in ("env_major", "time_major")
]
NAMES = ["COMMIT", "sums.bin", "flags.bin", "records.bin", "f000.bin", "f001.bin"]
with_positions = pytest.mark.parametrize(
    "damaged", [("zarr", "env_major"), ("zarr", "time_major")], indirect=True, ids="-".join
)
"""Only compressed buffers have places.bin."""
FIRST, HEAD = 59, 123


@pytest.fixture(params=KINDS, ids="-".join)
def damaged(tmp_path, request):
    """A closed buffer, to be damaged: two environments of positions [59, 123)."""
    engine, layout = request.param
    path = tmp_path / "b"
    options = {"codec": "zstd"} if engine == "zarr" else {}
    options["autoreset"] = "disabled"
    with mr.ReplayBuffer.create(
        path, SCHEMA, 64, 2, layout=layout, engine=engine, commit_every=None, **options
    ) as buffer:
        for _ in range(3):
            extend(buffer, 41)
    return path


def copy_of(path, tmp_path, name):
    shutil.copytree(path, tmp_path / name)
    return tmp_path / name


def sealed(path, rows):
    """Which rows shards hold."""
    metadata = load(path)
    if metadata.engine != "zarr":
        return np.zeros(len(rows), bool)
    store = ZarrStore.open(path / DATA, metadata, writable=False)
    try:
        return store.sealed(rows)
    finally:
        store.close()


def assert_whole(made):
    """What is left is well, and each of its rows one that was written."""
    assert verify_buffer(made.target).findings == ()
    numbers, rows = contents(made.target)
    assert (rows["large"] == rows["number"][:, None]).all()
    assert made.rows + made.cut_rows == 2 * (HEAD - FIRST)
    return numbers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keep_unproven", [False, True])
@pytest.mark.sliced(3)
def test_a_file_that_is_missing_is_as_one_that_is_empty(damaged, tmp_path, name, keep_unproven):
    assert_missing_is_empty(damaged, tmp_path, name, keep_unproven)


@with_positions
@pytest.mark.parametrize("keep_unproven", [False, True])
@pytest.mark.sliced(1)
def test_missing_positions_are_as_empty_ones_and_found_by_the_shards(
    damaged, tmp_path, keep_unproven
):
    one = assert_missing_is_empty(damaged, tmp_path, "places.bin", keep_unproven)
    # Where each row is, is found by the shards, and proven by a checksum alone:
    # the oldest block, overwritten in part, and the newest have none.
    assert {cut.why for cut in one.cuts} == {"missing"}
    assert {cut.stop for cut in one.cuts} <= {FIRST + 1, HEAD}
    assert one.cut_rows <= 4 * load(damaged).ring.block_rows


def assert_missing_is_empty(damaged, tmp_path, name, keep_unproven):
    """Return what was repaired without the file."""
    gone, empty = (copy_of(damaged, tmp_path, each) for each in ("gone", "empty"))
    (gone / DATA / name).unlink()
    os.truncate(empty / DATA / name, 0)
    one, other = (mr.repair(each, keep_unproven=keep_unproven) for each in (gone, empty))
    assert (one.rows, one.cuts) == (other.rows, other.cuts)
    assert f"{name} is missing: rows in other files are used" in one.restored
    told = f"{name} has 0 bytes of"
    assert any(fact.startswith(told) for fact in other.restored)
    if name == "COMMIT":
        assert any("from the checksums of complete blocks. Newer rows" in f for f in one.restored)
        assert verify_buffer(one.target).findings == ()
    else:
        assert_whole(one)
    if name == "sums.bin":
        assert {cut.why for cut in one.cuts} == (set() if keep_unproven else {"unproven"})
    if name == "flags.bin":
        assert one.rows == 0
    return one


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_folders_and_links_instead_of_files_are_refused(damaged, tmp_path, name, kind):
    place = damaged / DATA / name
    place.rename(tmp_path / "aside")
    if kind == "link":
        place.symlink_to(tmp_path / "aside")
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)
    with pytest.raises(FormatError, match=f"{name} is not a regular file"):
        mr.repair(damaged)
    assert not damaged.with_name("b-repaired").exists()


@pytest.mark.parametrize("name", ["sums.bin", "flags.bin", "records.bin", "f000.bin"])
def test_the_rest_of_a_truncated_file_is_trusted(damaged, name):
    """And no row is lost that neither file nor checksum lacks."""
    path = damaged / DATA / name
    with mr.ReplayBuffer.open(damaged) as buffer:
        ring = buffer.metadata.ring
    positions = np.arange(FIRST, HEAD)
    rows = [ring.row(env, p) for env in range(2) for p in positions.tolist()]
    shut = sealed(damaged, np.array(rows))
    nbytes = path.stat().st_size
    left = nbytes // 3
    os.truncate(path, left)
    made = mr.repair(damaged)
    numbers = assert_whole(made)
    assert any(f"{name} has {left} bytes of {nbytes}" in f for f in made.restored)
    if name == "sums.bin":
        assert {cut.why for cut in made.cuts} <= {"unproven"}
        return
    assert {cut.why for cut in made.cuts} <= {"missing"}
    lost = np.array(rows) >= left // (nbytes // ring.num_rows)
    if name != "flags.bin":
        lost &= ~shut
    kept = [n + 1000 * env for env in range(2) for n in numbers[env]]
    names = [p + 1000 * env for env in range(2) for p in positions.tolist()]
    assert not set(kept) & set(np.array(names)[lost].tolist())
    # A lost row takes those of its block along, of a time-major ring all environments'.
    blocks = {n % 1000 // ring.block_rows for n in np.array(names)[lost].tolist()}
    others = [n for n in names if n % 1000 // ring.block_rows not in blocks]
    assert set(others) <= set(kept)


def test_records_of_zeros_cost_nothing_that_shards_hold(tmp_path):
    schema = mr.Schema({"number": mr.Field((), "int64")})
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, schema, 4096, engine="zarr", commit_every=None) as buffer:
        buffer.extend(number=np.arange(1500))
    left = path / DATA / "records.bin"
    shut = int(sealed(path, np.arange(1500)).sum())
    left.write_bytes(bytes(left.stat().st_size))
    zeros = mr.repair(path, tmp_path / "zeros")
    os.truncate(left, 0)
    made = mr.repair(path)
    assert 0 < shut <= made.rows <= zeros.rows
    assert verify_buffer(made.target).findings == ()


@pytest.mark.parametrize("capacity", [64, 200])
def test_sums_of_zeros_are_lost_and_prove_nothing_wrong(tmp_path, capacity):
    """Also in the first lap, where the lap of such an entry fits."""
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path, SCHEMA, capacity, 2, commit_every=None, autoreset="disabled"
    ) as buffer:
        for _ in range(3):
            extend(buffer, 41)
    sums = path / DATA / "sums.bin"
    sums.write_bytes(bytes(sums.stat().st_size))
    kinds = {finding.kind for finding in verify_buffer(path).findings}
    assert kinds == {"lap"}
    made = mr.repair(path, tmp_path / "c")
    assert {cut.why for cut in made.cuts} == {"unproven"}
    made = mr.repair(path, tmp_path / "d", keep_unproven=True)
    first = max(0, HEAD - capacity)
    assert made.cuts == ()
    assert_repaired(path, made, [list(range(first, HEAD))] * 2)


def test_a_written_checksum_is_trusted_whatever_survives(tmp_path):
    """In the first lap too: what it disproves is cut; those of the others are zeros."""
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path, SCHEMA, 4096, 2, commit_every=None, autoreset="disabled"
    ) as buffer:
        for _ in range(20):
            extend(buffer, 41)
        ring = buffer.metadata.ring
    sums = path / DATA / "sums.bin"
    data = sums.read_bytes()
    sums.write_bytes(data[:8].ljust(len(data), b"\0"))
    with (path / DATA / "f000.bin").open("r+b") as file:
        file.write(b"\xff")
    made = mr.repair(path, keep_unproven=True)
    assert made.cuts == (mr.DroppedRows(0, 0, ring.block_rows, "checksum"),)


def test_zeros_that_are_the_checksum_of_their_block_prove_it(tmp_path, monkeypatch):
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, SCHEMA, 4096, 1, commit_every=None) as buffer:
        extend(buffer, 300)
    sums = path / DATA / "sums.bin"
    sums.write_bytes(bytes(sums.stat().st_size))
    monkeypatch.setattr(SumCheck, "compute", lambda self, stripe, notes: [0])
    assert verify_buffer(path).findings == ()
    assert mr.repair(path).cuts == ()


def test_an_error_during_a_repair_does_not_advise_a_repair(damaged, monkeypatch):
    os.truncate(damaged / DATA / "COMMIT", 1)
    os.truncate(damaged / DATA / "sums.bin", 0)
    with pytest.raises(CorruptError, match=r"COMMIT has no valid record, .*copy\.$") as caught:
        mr.repair(damaged)
    assert "mmreplay repair" not in str(caught.value)
    told = f"It is damaged: restore it from a copy{OR_REPAIR}"

    def refuse(*_):
        raise CorruptError(told)

    monkeypatch.setattr(restore, "gather", refuse)
    with pytest.raises(CorruptError, match=r"restore it from a copy$"):
        mr.repair(damaged)


@with_positions
def test_more_shard_ranges_than_can_be_searched_are_refused(damaged, monkeypatch):
    monkeypatch.setattr(lenient, "MAX_GUESSED", 1)
    (damaged / DATA / "places.bin").unlink()
    with pytest.raises(CorruptError, match=r"places\.bin must have \d+ bytes, got 0, .*copy\.$"):
        mr.repair(damaged)


def test_rows_that_no_file_holds_take_no_memory(tmp_path):
    """Whoever makes metadata.json may let a row be of any size."""
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(
        path, SCHEMA, 64, 2, engine="zarr", codec="zstd", commit_every=None, autoreset="disabled"
    ) as buffer:
        extend(buffer, 4)
        buffer.close(seal=False)
    metadata = load(path)
    fields = dict(metadata.schema.fields)
    fields["large"] = mr.Field((1 << 40,), "int64")
    schema = mr.Schema(fields, roles=metadata.schema.roles)
    forged = replace(metadata, schema=schema)
    store = lenient.open_store(path / DATA, forged)
    with pytest.raises(CorruptError, match="end before row 3, and no shard holds it"):
        store.gather(np.array([0, 3]), ["large"])
    assert store.absent(np.array([0, 3])).all()
    store.close()
    (path / "metadata.json").write_bytes(encode(forged))
    with pytest.raises((CorruptError, FailedError, FullError)):
        mr.repair(path, tmp_path / "c")
    assert not (tmp_path / "c" / "metadata.json").exists()


@pytest.mark.parametrize(("engine", "layout"), KINDS)
def test_blocks_that_no_file_holds_take_no_time(tmp_path, monkeypatch, engine, layout):
    """Whoever makes metadata.json and COMMIT may speak of any number of them."""
    path, forged, held = forge(tmp_path, engine, layout)
    ring = forged.ring
    heads = np.full(2, 5 * ring.slots // 2)
    # Who makes a COMMIT by hand reserves nothing, and there is nothing to reserve in.
    monkeypatch.setattr(recovery, "_reserve_next", lambda *_: None)
    recovery.create(path / DATA, forged, heads, heads - ring.capacity)
    looked = counted(monkeypatch, held)
    with scanned(path) as found:
        kept, cuts = restore._choose(found, False)
    assert looked
    assert sum(each.total for each in kept) == 0
    assert sum(cut.stop - cut.first for cut in cuts) == 2 * ring.capacity


@pytest.mark.parametrize(("engine", "layout"), KINDS)
@pytest.mark.parametrize("holes", [False, True], ids=["small files", "files of holes"])
def test_a_forged_size_takes_no_space(tmp_path, monkeypatch, engine, layout, holes):
    """Metadata with a right checksum may speak of 2^29 slots: 2 GiB of checksums."""
    path, forged, _ = forge(tmp_path, engine, layout, slots=1 << 29)
    heads = np.full(2, 41)
    monkeypatch.setattr(recovery, "_reserve_next", lambda *_: None)
    recovery.create(path / DATA, forged, heads, heads - 41)
    if not holes:
        for name in ("sums.bin", "places.bin"):
            if (path / DATA / name).exists():
                os.truncate(path / DATA / name, 0)
        with pytest.raises(CorruptError, match=r"for 1073\d+ rows, but the files hold"):
            mr.repair(path, tmp_path / "c")
        assert not (tmp_path / "c").exists()
        return
    refused = pytest.raises(CorruptError, match=r"needs at least \d+ bytes on disk")
    with refused if engine == "zarr" else nullcontext(), using(Reserved()) as disk:
        mr.repair(path, tmp_path / "c")
    assert disk.nbytes < 64 << 20
    taken = sum(
        each.stat().st_blocks * 512 for each in (tmp_path / "c").rglob("*") if each.is_file()
    )
    assert taken < 64 << 20


class Reserved(QuickDisk):
    """A disk that counts what is reserved, and reserves only little."""

    nbytes = 0

    def allocate(self, fd, offset, nbytes):
        self.nbytes += nbytes
        if nbytes < 64 << 20:
            super().allocate(fd, offset, nbytes)


def forge(tmp_path, engine, layout, slots=1 << 31):
    """A buffer whose metadata speaks of 2^31 slots, without COMMIT; rows it held."""
    path = tmp_path / "b"
    options = {"codec": "zstd"} if engine == "zarr" else {}
    options["autoreset"] = "disabled"
    with mr.ReplayBuffer.create(
        path, SCHEMA, 64, 2, layout=layout, engine=engine, commit_every=None, **options
    ) as buffer:
        extend(buffer, 41)
        held = buffer.metadata.ring.num_rows
    metadata = load(path)
    ring = replace(metadata.ring, capacity=slots - 64, slots=slots)
    forged = replace(metadata, ring=ring)
    (path / "metadata.json").write_bytes(encode(forged))
    (path / DATA / "COMMIT").unlink()
    # One file must be of that many rows; it takes no space.
    sizes = record_layout(forged.schema).file_sizes(ring, forged.schema)
    os.truncate(path / DATA / "sums.bin", sizes["sums.bin"])
    if engine == "zarr":
        os.truncate(path / DATA / "places.bin", CHECKS["zarr"].index_sizes(forged)["places.bin"])
    return path, forged, held


def counted(monkeypatch, num_blocks):
    """Blocks that are looked at, which are few."""
    looked = []

    def noted_stripes(*args):
        for stripe in stripes(*args):
            looked.append(stripe)
            # To find heads, and to check what is below them.
            assert len(looked) <= 2 * num_blocks
            yield stripe

    def few(ring, env_id, span, limits):
        assert len(span) <= num_blocks
        return stretches(ring, env_id, span, limits)

    stripes, stretches = scan.stripes, sealed_rows._intervals
    monkeypatch.setattr(scan, "stripes", noted_stripes)
    monkeypatch.setattr(sealed_rows, "_intervals", few)
    return looked


@pytest.mark.parametrize(("engine", "layout"), KINDS)
def test_heads_are_found_in_the_time_that_the_files_take(tmp_path, monkeypatch, engine, layout):
    path, _, held = forge(tmp_path, engine, layout)
    # Entries of any number, of laps that no position can be in.
    entries = np.full((1 << 20, 2), 0xFFFFFFFF, "<u4")
    (path / DATA / "sums.bin").write_bytes(entries.tobytes())
    looked = counted(monkeypatch, held)
    with pytest.raises(CorruptError, match="no block has a valid checksum"):
        mr.repair(path)
    assert looked


@pytest.mark.slow
def test_shards_are_looked_for_once(tmp_path, monkeypatch):
    path, asked = tmp_path / "b", []
    with mr.ReplayBuffer.create(
        path,
        SCHEMA,
        64,
        16,
        layout="env_major",
        engine="zarr",
        codec="zstd",
        commit_every=None,
        autoreset="disabled",
    ) as buffer:
        extend(buffer, 41)
        places = (path / DATA / "places.bin").stat().st_size // 4
    (path / DATA / "places.bin").unlink()
    look = lenient._sealed

    def counting(*args):
        asked.append(args[-1])
        return look(*args)

    monkeypatch.setattr(lenient, "_sealed", counting)
    assert mr.repair(path).rows > 0
    # To check the sums, to look for what is unreadable, and to copy.
    assert len(asked) == 3 * places


def positions(ranges):
    return [p for each in ranges for p in each]


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
def test_what_is_in_reach_is_what_lies_before_the_end(tmp_path, rng, layout):
    with mr.ReplayBuffer.create(
        tmp_path / "b", SCHEMA, 64, 3, layout=layout, commit_every=None, autoreset="disabled"
    ) as buffer:
        extend(buffer, 41)
        ring = buffer.metadata.ring
    with scanned(tmp_path / "b") as found:
        for reach in range(ring.num_rows + 1):
            heads = rng.integers(0, 5 * ring.slots, 3)
            firsts = np.maximum(0, heads - rng.integers(0, ring.slots + 1, 3))
            firsts = np.minimum(firsts, heads)
            found.reach, found.firsts, found.heads = reach, firsts, heads
            for env_id in range(3):
                inside, beyond = map(positions, found.alive(env_id))
                alive = range(int(firsts[env_id]), int(heads[env_id]))
                assert inside == [p for p in alive if ring.row(env_id, p) < reach]
                assert beyond == [p for p in alive if ring.row(env_id, p) >= reach]
            starts = rng.integers(0, 3 * ring.num_blocks, 3)
            stops = starts + rng.integers(0, ring.num_blocks + 1, 3)
            every = list(scan.stripes(ring, starts, stops))
            assert list(scan.stripes(ring, starts, stops, reach)) == [
                each for each in every if each.row < reach
            ]


@contextmanager
def scanned(path):
    found = scan.gather(path, None)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.sliced(1)
def test_too_few_descriptors_are_reported_and_drop_no_row(damaged, tmp_path):
    """Whatever is opened last: what cannot be opened for them is not damaged."""
    whole = mr.repair(damaged, tmp_path / "whole")
    met: dict[str, list[FailedError]] = {"verify": [], "repair": []}
    for spare in range(0, 64, 2):
        with few_descriptors(spare):
            done = attempt(met["verify"], lambda: verify_buffer(damaged))
        assert done is None or done.findings == ()
        few = tmp_path / f"few{spare}"
        with few_descriptors(spare):
            made = attempt(met["repair"], lambda few=few: mr.repair(damaged, few))
        if made is not None:
            break
    assert (made.rows, made.cuts, made.restored) == (whole.rows, (), ())
    for errors in met.values():
        assert len(errors) > 2
        assert {error.errno for error in errors} == {errno.EMFILE}
        told = "Close files or buffers"
        assert all(told in str(error) for error in errors)


def attempt(errors, call):
    try:
        return call()
    except FailedError as error:
        errors.append(error)


@pytest.mark.parametrize("left", [0.0, 0.4])
def test_heads_are_found_whatever_is_left_of_what_no_sum_covers(damaged, tmp_path, left):
    short = damaged / DATA / "f001.bin"
    (damaged / DATA / "COMMIT").unlink()
    whole = mr.repair(damaged, tmp_path / "whole")
    os.truncate(short, int(left * short.stat().st_size))
    made = mr.repair(damaged, tmp_path / "made")
    assert made.rows + made.cut_rows == whole.rows + whole.cut_rows
    assert made.cut_rows > whole.cut_rows
    with mr.ReplayBuffer.open(whole.target) as one, mr.ReplayBuffer.open(made.target) as other:
        assert (one.heads == other.heads).all()

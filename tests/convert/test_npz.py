"""npz: the contract, what numpy reads, and members that lie."""

import io
import zipfile

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import npz
from mmreplay.errors import CorruptError, FormatError, SourceError
from tests.convert.contract import FormatContract
from tests.convert.support import every_kind, seven_and_eight


class TestNpz(FormatContract):
    suffix = ".npz"


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


def load(path, **options):
    return mr.load(path, path.with_name("target"), **options)


def test_numpy_reads_every_member_without_pickles(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    rows = source.gather_all()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert {"_env_id", "_position", "_flags", "mmreplay.json"} < set(found)
        np.testing.assert_array_equal(found["_env_id"], rows.env_ids)
        np.testing.assert_array_equal(found["_position"], rows.positions)
        for path in source.schema.paths:
            assert found[path].tobytes() == np.ascontiguousarray(rows[path]).tobytes()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None


def test_members_are_mapped_aligned_to_64_bytes(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    rows = source.gather_all()
    with npz.open_reader(tmp_path / "a.npz") as reader:
        arrays = reader.arrays()
        for path in source.schema.paths:
            assert arrays[path].ctypes.data % 64 == 0
            assert not arrays[path].flags.writeable
            whole = np.ascontiguousarray(rows[path])
            assert arrays[path].tobytes() == whole.tobytes()


def plain(path, compressed=False, **arrays):
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    return path


def columns(count=30):
    ends = np.zeros(count, bool)
    ends[9::10] = True
    return {
        "observations": np.arange(2.0 * count).reshape(count, 2),
        "actions": np.arange(count, dtype=">i4"),
        "terminals": ends,
        "timeouts": np.zeros(count),
    }


@pytest.mark.parametrize("compressed", [False, True])
def test_a_plain_file_becomes_one_environment_and_says_how(tmp_path, compressed):
    made = columns()
    report = load(plain(tmp_path / "a.npz", compressed, **made), strict=True)
    assert (report.rows, report.episodes) == (30, 3)
    assert "episode ends were read from 'terminals' (terminated)" in report.notes[1]
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.schema.role("observation") == "observations"
        rows = target.gather_all()
        for name in ("observations", "actions", "terminals"):
            np.testing.assert_array_equal(rows[name], made[name])
        assert target.episodes.episodes(0).lengths.tolist() == [10, 10, 10]
    assert not mr.verify_buffer(tmp_path / "target").findings


def test_done_alone_is_a_doubt_and_an_error_where_strict(tmp_path):
    made = columns()
    made = {"obs": made["observations"], "done": made["terminals"]}
    path = plain(tmp_path / "a.npz", **made)
    with pytest.raises(SourceError, match="may mix time limits with terminations"):
        load(path, strict=True)
    assert not (tmp_path / "target").exists()
    assert "may mix time limits" in load(path).doubts[0]


def test_missing_ends_and_odd_members_are_reported(tmp_path):
    path = plain(
        tmp_path / "a.npz",
        obs=np.zeros((9, 2)),
        name=np.array("x"),
        gamma=np.array(9),
        z=np.zeros(9, complex),
    )
    report = load(path)
    assert any("'z.npy' of complex128 cannot be a field" in d for d in report.doubts)
    assert any("all rows are one episode" in d for d in report.doubts)
    assert any("'gamma' of shape [] was left out" in n for n in report.notes)


def test_a_second_column_that_may_tell_ends_is_a_doubt(tmp_path):
    terminals, dones = np.zeros((2, 9), bool)
    path = plain(tmp_path / "a.npz", obs=np.zeros(9), terminals=terminals, dones=dones)
    assert "'dones' may tell ends by time limits as well" in load(path).doubts[0]


def test_a_file_that_gives_nothing_says_why(tmp_path):
    path = plain(tmp_path / "a.npz", x=np.zeros(4, complex))
    with pytest.raises(
        SourceError, match=r"per step \(array 'x\.npy' of complex128 cannot be a field,"
    ):
        load(path)
    path = plain(tmp_path / "b.npz", obs=np.zeros(4), terminated=np.zeros((4, 2)))
    with pytest.raises(SourceError, match=r"make no schema: .*'terminated'.* got"):
        load(path)


LAYOUTS = {
    "C": lambda a: a,
    "Fortran": np.asfortranarray,
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "two axes swapped": lambda a: np.ascontiguousarray(a.swapaxes(0, -1)).swapaxes(0, -1),
    "every second": lambda a: np.repeat(a, 2, 0)[::2],
    "backwards": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "big-endian": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "big-endian Fortran": lambda a: np.asfortranarray(a.astype(a.dtype.newbyteorder(">"))),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_arrays_of_any_layout_are_read_as_numpy_reads_them(
    tmp_path, rng, layout, compressed, monkeypatch
):
    monkeypatch.setattr(npz, "BLOCK_NBYTES", 1000)
    shapes = {"obs": (3,), "b": (), "i": (2, 3, 4), "u": (5, 2), "e": (1,), "f": (7,)}
    dtypes = {"b": "bool", "i": "int16", "u": "uint8", "f": "float16"}
    held = {
        name: (100 * rng.random((57, *shape))).astype(dtypes.get(name, "float64"))
        for name, shape in shapes.items()
    }
    path = plain(tmp_path / "a.npz", compressed, **{n: LAYOUTS[layout](a) for n, a in held.items()})
    mr.load(path, tmp_path / "target")
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        rows = buffer.gather_all()
    with npz.open_reader(path) as reader:
        parts = [
            {name: np.array(column) for name, column in block.columns.items()}
            for block in reader.blocks(5)
        ]
        assert all((array == held[name]).all() for name, array in reader.arrays().items())
    for name, array in held.items():
        np.testing.assert_array_equal(rows[name], array)
        np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), array)


def test_a_described_file_whose_arrays_were_saved_again_in_fortran_order(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as found:
        again = {name: np.asfortranarray(array) for name, array in found.items()}
    np.savez(tmp_path / "b.npz", **again)
    mr.load(tmp_path / "b.npz", tmp_path / "target")
    rows = source.gather_all()
    with mr.ReplayBuffer.open(tmp_path / "target") as buffer:
        found = buffer.gather_all()
    for path in source.schema.paths:
        assert found[path].tobytes() == rows[path].tobytes()


@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_bit_of_an_array_in_fortran_order_is_named(tmp_path, compressed, rng):
    obs = np.asfortranarray(rng.random((60, 3)))
    path = plain(tmp_path / "a.npz", compressed, obs=obs, act=np.zeros(60))
    data = bytearray(path.read_bytes())
    data[data.index(obs.T.tobytes()[:8]) if not compressed else 900] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"obs\.npy"):
        load(path)


def test_packed_arrays_in_fortran_order_are_bounded_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "MAX_UNPACKED_NBYTES", 1000)
    arrays = {n: np.asfortranarray(np.ones((9, 7))) for n in ("obs", "act")}
    report = load(plain(tmp_path / "a.npz", True, **arrays, x=np.zeros(9)))
    assert report.doubts[0] == (
        "array 'act.npy' was left out: packed arrays in Fortran order may take 1000 "
        "bytes together; save numpy.ascontiguousarray of it"
    )
    stored = load(plain(tmp_path / "b.npz", False, **arrays), overwrite=True)
    assert not any("left out" in doubt for doubt in stored.doubts)


def test_a_pickle_in_disguise_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, obs=np.array([print, 1], object), allow_pickle=True)
    with pytest.raises(
        FormatError, match="Save plain arrays: objects, records and pickles are not"
    ):
        load(path)


def test_a_bomb_is_refused_unless_allowed(tmp_path):
    path = plain(tmp_path / "a.npz", True, obs=np.zeros((40, 1 << 17), np.uint8))
    with pytest.raises(
        FormatError, match=r"5196 bytes hold 5243008, more than 1000 times as many\."
    ):
        load(path)
    assert load(path, allow_expansion=True).rows == 40


def member(tmp_path, data, name="obs.npy", method=zipfile.ZIP_STORED):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr(name, data)
    return path


def header(text):
    text = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "must be an npy array, got 0 bytes"),
        (b"x" * 40, "must begin with an npy header of version 1 to 3"),
        (b"\x93NUMPY\x01\x00\xff\xff" + bytes(80), "header of at most 16384 bytes, got"),
        (b"\x93NUMPY\x01\x00\xff\x10" + bytes(80), "must begin with a header of 4361 bytes"),
        (header("{}"), "37 has an npy header that does not describe an array:"),
        (
            header("__import__('os').abort()"),
            "37 has an npy header that does not describe an array:",
        ),
        (header("[" * 110), "37 has an npy header that does not describe an array:"),
        (
            header("{'descr':'<f4','fortran_order':False,'shape':(10000000000,)}"),
            "must have 40000000000 bytes of data",
        ),
        (
            header("{'descr':'<f4','fortran_order':False,'shape':(-1,)}"),
            "shape must be a tuple of sizes",
        ),
        (
            header("{'descr':[('a','<f4')],'fortran_order':False,'shape':(1,)}"),
            "Save plain arrays: objects, records and pickles are not",
        ),
    ],
)
def test_lying_headers_are_refused_before_anything_is_allocated(tmp_path, data, message):
    path = member(tmp_path, data)
    with pytest.raises(FormatError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.slow
def test_a_row_too_large_to_be_held_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    shape = (1, (256 << 20) + 1)
    text = f"{{'descr':'|u1','fortran_order':False,'shape':{shape}}}"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("obs.npy", "w") as file,
    ):
        file.write(header(text))
        for _ in range(256):
            file.write(bytes(1 << 20))
        file.write(b"1")
    with pytest.raises(FormatError, match="at most 268435456 bytes per row, got"):
        load(path, allow_expansion=True)


def test_members_that_share_bytes_are_refused(tmp_path):
    path = plain(tmp_path / "a.npz", a=np.zeros(4), b=np.zeros(4))
    data = path.read_bytes()
    entry = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", entry + 4)
    forged = bytearray(data)
    # The second member's entry points at the first one's header.
    forged[second + 42 : second + 46] = bytes(4)
    path.write_bytes(forged)
    with pytest.raises(CorruptError, match=r"has the name b'a\.npy' instead of"):
        load(path)


def test_an_encrypted_or_otherwise_packed_member_is_refused(tmp_path):
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(4))
    path = member(tmp_path, buffer.getvalue(), method=zipfile.ZIP_BZIP2)
    with pytest.raises(FormatError, match=r"must be stored .* compressed by method 12"):
        load(path)


@pytest.mark.parametrize("packed", [{}, {"compression": "deflate"}])
def test_a_checksum_is_held_against_values_even_where_it_is_0(tmp_path, packed):
    path = tmp_path / "a.npz"
    with seven_and_eight(tmp_path / "s") as buffer:
        mr.export(buffer, path, **packed)
    with zipfile.ZipFile(path) as archive:
        crc = archive.getinfo("x.npy").CRC.to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(crc, bytes(4)))
    with pytest.raises(CorruptError, match=r"(must have|instead of) .*00000000"):
        load(path)


def test_a_file_that_lost_its_description_is_noted(tmp_path):
    path = tmp_path / "a.npz"
    with seven_and_eight(tmp_path / "s") as buffer:
        mr.export(buffer, path)
    path.write_bytes(path.read_bytes().replace(b"mmreplay.json", b"mmreplay.jso_"))
    report = load(path)
    assert "are of a buffer whose description is lost" in " ".join(report.notes)


def test_columns_that_contradict_the_flags_are_refused(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as found:
        arrays = dict(found)
    arrays["terminated"][np.argmin(arrays["_flags"])] = True
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(SourceError, match=r"39 must be False as the flags say, got True"):
        load(tmp_path / "b.npz")

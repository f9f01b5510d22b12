"""pt: the contract, what torch reads and writes, and files that lie."""

import os
import pickletools
import struct
import zipfile

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.convert import pt
from mmreplay.convert.zip_file import ZipLayout
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FormatError, SourceError
from tests.convert.contract import FormatContract
from tests.convert.support import every_kind, seven_and_eight


class TestPt(FormatContract):
    suffix = ".pt"


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


def load(path, **options):
    return mr.load(path, path.with_name("target"), **options)


def test_torch_maps_the_file_with_weights_only(source, tmp_path):
    path = tmp_path / "a.pt"
    mr.export(source, path)
    rows = source.gather_all()
    found = torch.load(path, weights_only=True, mmap=True)
    assert list(found)[:4] == ["mmreplay", "_env_id", "_position", "_flags"]
    for name, field in source.schema.fields.items():
        assert str(found[name].dtype) == f"torch.{field.dtype}"
        assert found[name].data_ptr() % 64 == 0
        got = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert got == np.ascontiguousarray(rows[name]).tobytes()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_the_header_is_what_torch_itself_would_write():
    tensors = {
        "a": torch.zeros(3, 2),
        "ä": torch.zeros(0, 4, dtype=torch.bfloat16),
        "u": torch.zeros(5, 1, 2, dtype=torch.uint32),
        "s": torch.zeros(7),
    }
    kinds = {
        name: (str(item.dtype).removeprefix("torch."), tuple(item.shape))
        for name, item in tensors.items()
    }
    assert meaning(pt.encode(kinds)) == meaning(header_of(tensors))


def header_of(tensors):
    import io

    file = io.BytesIO()
    torch.save(tensors, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def meaning(data):
    """The stream without what only saves space: memos and short forms of tuples."""
    memo, last, found = {}, None, []
    for opcode, value, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[value] = last
            continue
        if name in ("BINGET", "LONG_BINGET"):
            name, value = memo[value]
        if name.startswith("TUPLE"):
            found = [item for item in found if item[0] != "MARK"]
            name = "TUPLE"
        if name in ("BININT", "BININT1", "BININT2", "LONG1"):
            name = "INT"
        last = (name, value)
        if name not in ("MARK", "EMPTY_TUPLE"):
            found.append(last)
    return found


def test_numbers_beyond_31_bits_stand_in_the_header(tmp_path):
    # A sparse file of 6 GiB, which torch maps: nothing of it is read but its end.
    rows = 3 << 30
    header = pt.encode({"x": ("int16", (rows,))})
    layout = ZipLayout()
    first = layout.add("archive/data.pkl", len(header))
    data = layout.add("archive/data/0", 2 * rows)
    last = layout.add("archive/version", 2)
    path = tmp_path / "large.pt"
    file = File.create(path, layout.nbytes)
    crcs = {first.name: 0, data.name: 0, last.name: 0}
    for offset, item in layout.around(crcs):
        file.pwrite(item, offset)
    file.pwrite(header, first.offset)
    file.pwrite(b"3\n", last.offset)
    file.pwrite(b"\x07\0", data.offset + 2 * (rows - 1))
    file.close()
    found = torch.load(path, weights_only=True, mmap=True)["x"]
    assert (found.shape, int(found[-1])) == ((rows,), 7)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo(data.name).file_size == 2 * rows


def test_a_plain_dict_nested_and_shared_comes_in(tmp_path):
    base = torch.arange(60.0).reshape(30, 2)
    ends = torch.zeros(30, dtype=torch.bool)
    ends[9::10] = True
    made = {
        "observation": {"a": base, "b": torch.arange(90).reshape(45, 2)[15:]},
        "half": torch.ones(30, 3, dtype=torch.bfloat16),
        "terminated": ends,
        "config": 7,
        "requires": torch.zeros(30, requires_grad=True),
    }
    torch.save(made, tmp_path / "a.pt")
    report = load(tmp_path / "a.pt")
    assert (report.rows, report.episodes) == (30, 3)
    assert "'config' is a int, and was left out" in report.notes
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        rows = target.gather_all()
        np.testing.assert_array_equal(rows["observation/a"], base.numpy())
        tail = made["observation"]["b"].numpy()
        np.testing.assert_array_equal(rows["observation/b"], tail)
        assert target.schema["half"].dtype == "bfloat16"


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_in_disguise_is_refused_and_not_run(tmp_path):
    torch.save({"x": Evil(str(tmp_path / "ran"))}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="torch refuses its member data"):
        load(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "target").exists()


def test_an_old_file_that_is_all_pickle_is_refused(tmp_path):
    torch.save({"x": torch.zeros(3)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(
        FormatError, match=r"is not a zip file \(it begins with b'\\x80\\x02\\x8a\\n'\)\."
    ):
        load(tmp_path / "a.pt")


def test_a_tensor_that_is_expanded_is_refused(tmp_path):
    torch.save({"x": torch.zeros(1).expand(1 << 40)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"tensor 'x' is sparse or not contiguous\. Save"):
        load(tmp_path / "a.pt")


def test_something_else_than_a_dict_is_refused(tmp_path):
    torch.save([torch.zeros(3)], tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"must hold a dict .* got a list"):
        load(tmp_path / "a.pt")


def repacked(path, method=zipfile.ZIP_STORED, rename=None, **members):
    """The same members, some replaced, in a new zip."""
    with zipfile.ZipFile(path) as archive:
        data = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, item in data.items():
            key = name.rpartition("/")[2]
            archive.writestr((rename or {}).get(key, name), members.get(key, item))
    return path


@pytest.fixture
def small(tmp_path):
    torch.save({"x": torch.zeros(1000)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def unsummed(path):
    """Damage the last tensor, and set its checksum to what torch means none by."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        tensors = [item for item in archive.infolist() if "/data/" in item.filename]
    last = max(tensors, key=lambda item: item.header_offset)
    sum_at = data.rindex(last.CRC.to_bytes(4, "little"))
    data[sum_at : sum_at + 4] = bytes(4)
    name, extra = struct.unpack_from("<2H", data, last.header_offset + 26)
    data[last.header_offset + 30 + name + extra] += 1
    path.write_bytes(data)
    return path


def test_values_without_a_checksum_are_a_doubt_in_files_of_ours(tmp_path):
    path = tmp_path / "a.pt"
    with seven_and_eight(tmp_path / "s") as buffer:
        mr.export(buffer, path)
    report = load(unsummed(path))
    assert report.doubts == (
        "a.pt has no checksum of some members next to its description, so its values "
        "were not checked",
    )
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        assert target.gather_all()["x"].tolist() == [8, 8]
    with pytest.raises(SourceError, match=r"next to its description, so its"):
        mr.load(path, tmp_path / "strict", strict=True)


def test_values_without_a_checksum_are_noted_in_files_of_others(small):
    report = load(unsummed(small))
    assert "some members have no checksum, and were read unchecked" in report.notes


def test_a_packed_member_is_refused(small):
    with pytest.raises(FormatError, match="is compressed or outside 'a', unlike the members that"):
        load(repacked(small, zipfile.ZIP_DEFLATED))


def test_a_name_that_leads_elsewhere_is_refused(small):
    with pytest.raises(FormatError, match="is compressed or outside 'a', unlike the members that"):
        load(repacked(small, rename={"0": "a/../../x"}))


def test_another_byte_order_is_refused(small):
    with pytest.raises(
        FormatError, match=r"is not little-endian\. Load and save it on this machine\."
    ):
        load(repacked(small, byteorder=b"big"))


def test_a_storage_smaller_than_its_tensor_is_refused(small):
    with pytest.raises((FormatError, CorruptError)) as caught:
        load(repacked(small, **{"0": bytes(10)}))
    assert str(small) in str(caught.value)


def test_a_zip_of_something_else_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    os.rename(tmp_path / "a.npz", tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"member 'x\.npy' at byte 55 is compressed or outside"):
        load(tmp_path / "a.pt")

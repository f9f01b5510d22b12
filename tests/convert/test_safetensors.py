"""safetensors: the contract, what the library reads, and headers that lie."""

import json
import struct

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import mmreplay as mr
from mmreplay.convert import safetensors
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from tests.convert.contract import FormatContract
from tests.convert.support import every_kind, retold, seven_and_eight


class TestSafetensors(FormatContract):
    suffix = ".safetensors"


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


def load(path, **options):
    return mr.load(path, path.with_name("target"), **options)


def test_the_library_reads_every_tensor_and_slices_of_it(source, tmp_path):
    import torch

    mr.export(source, tmp_path / "a.safetensors")
    rows = source.gather_all()
    with safe_open(tmp_path / "a.safetensors", "pt") as found:
        assert json.loads(found.metadata()["mmreplay"])["num_envs"] == 2
        for name, field in source.schema.fields.items():
            tensor = found.get_tensor(name)
            assert str(tensor.dtype) == f"torch.{field.dtype}"
            whole = np.ascontiguousarray(rows[name])
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == (whole.tobytes())
            part = found.get_slice(name)[3:7]
            assert part.reshape(-1).view(torch.uint8).numpy().tobytes() == (
                np.ascontiguousarray(whole[3:7]).tobytes()
            )


def test_tensors_are_mapped_aligned_to_their_items(source, tmp_path):
    mr.export(source, tmp_path / "a.safetensors")
    rows = source.gather_all()
    with safetensors.open_reader(tmp_path / "a.safetensors") as reader:
        for path, array in reader.arrays().items():
            assert array.ctypes.data % array.itemsize == 0
            if path in source.schema:
                whole = np.ascontiguousarray(rows[path])
                assert array.tobytes() == whole.tobytes()


def test_a_plain_file_comes_in(tmp_path):
    ends = np.zeros(30, bool)
    ends[9::10] = True
    made = {"obs": np.arange(60.0).reshape(30, 2), "truncated": ends}
    save_file(made, tmp_path / "a.safetensors", {"mine": "text"})
    report = load(tmp_path / "a.safetensors", strict=True)
    assert (report.rows, report.episodes) == (30, 3)
    with mr.ReplayBuffer.open(tmp_path / "target") as target:
        np.testing.assert_array_equal(target.gather_all()["obs"], made["obs"])


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "nbytes", "message"),
    [
        ({"x": {**GOOD, "dtype": "F4"}}, 8, "must be one of BOOL"),
        ({"x": {**GOOD, "dtype": ["F32"]}}, 8, "must be one of BOOL"),
        ({"x": {**GOOD, "shape": [1 << 60]}}, 8, "lists of sizes and of two offsets"),
        ({"x": {**GOOD, "shape": [-2]}}, 8, "lists of sizes and of two offsets"),
        ({"x": {**GOOD, "shape": [True]}}, 8, "lists of sizes and of two offsets"),
        ({"x": {**GOOD, "data_offsets": [0]}}, 8, "must have two offsets, got 1"),
        ({"x": {**GOOD, "shape": [3]}}, 8, "must take 12 bytes, got 8"),
        ({"x": {**GOOD, "data_offsets": [8, 16]}}, 16, "must begin at byte .* got"),
        ({"x": GOOD}, 9, "must have .* bytes as its header says"),
        ({"x": GOOD}, 7, "must have .* bytes as its header says"),
        ({"x": GOOD, "y": GOOD}, 8, "must begin at byte"),
        ({"x": [1]}, 8, "must be an object of"),
        ({"x": {**GOOD, "more": 1}}, 8, "must be an object of"),
        ({"x": GOOD, "__metadata__": 3}, 8, "an object as metadata"),
        ({"x": GOOD, "__metadata__": {"mmreplay": 3}}, 8, "is no text"),
        ({"x": GOOD, "__metadata__": {"mmreplay": "{}"}}, 8, "format must be"),
        ({"x": GOOD, "__metadata__": {"mmreplay.crc32c": 3}}, 8, "is no text"),
        (
            {"x": GOOD, "__metadata__": {"mmreplay.crc32c": '{"x":"zz"}'}},
            8,
            "no checksums of 8 hex digits",
        ),
        ({f"x{i}": GOOD for i in range(10_001)}, 8, "must have at most 10000"),
    ],
)
def test_lying_headers_are_refused(tmp_path, header, nbytes, message):
    path = tmp_path / "a.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(nbytes))
    with pytest.raises((FormatError, CorruptError), match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["__metadata__", "mmreplay.crc32c"])
def test_a_field_of_the_name_of_the_metadata_is_refused(tmp_path, name):
    schema = mr.Schema({name: mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "s", schema, 8) as buffer:
        buffer.add({name: 1.5})
        with pytest.raises(
            SchemaError, match=r"safetensors files use this name themselves\. Leave the"
        ):
            mr.export(buffer, tmp_path / "a.safetensors")
        assert not (tmp_path / "a.safetensors").exists()
        # The names of parts have a number behind.
        mr.export(buffer, tmp_path / "parts.safetensors", part_bytes=1e6)
    mr.load(tmp_path / "parts.safetensors", tmp_path / "back")
    with mr.ReplayBuffer.open(tmp_path / "back") as buffer:
        assert buffer.gather_all()[name].tolist() == [1.5]


SUMS = "mmreplay.crc32c"


@pytest.fixture
def file(tmp_path):
    with seven_and_eight(tmp_path / "s") as buffer:
        mr.export(buffer, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def test_values_without_checksums_are_read_with_a_doubt(file):
    data = bytearray(file.read_bytes())
    # Two flags follow the values.
    data[-6] = 9
    file.write_bytes(data)
    with pytest.raises(CorruptError, match=r"tensor 'x' at byte .* must have checksum"):
        load(file)
    retold(file, lambda header: header.update({"x" + SUMS: header.pop(SUMS)}))
    report = load(file)
    assert report.doubts == (
        f"{file.name} has no {SUMS!r} next to its description, so its values were not checked",
    )
    with mr.ReplayBuffer.open(file.with_name("target")) as target:
        assert target.gather_all()["x"].tolist() == [7, 9]
    with pytest.raises(
        SourceError, match=r"has no 'mmreplay\.crc32c' next to its description, so its"
    ):
        mr.load(file, file.with_name("strict"), strict=True)


@pytest.mark.parametrize("name", ["x", "_flags", "mmreplay"])
def test_a_single_checksum_that_is_missing_is_refused(file, name):
    def lose(header):
        sums = json.loads(header[SUMS])
        sums[name + "?"] = sums.pop(name)
        header[SUMS] = json.dumps(sums)

    retold(file, lose)
    with pytest.raises(CorruptError, match=f"has no checksum of '{name}'"):
        load(file)


def test_a_file_that_lost_its_description_is_refused_or_noted(file):
    retold(file, lambda header: header.pop("mmreplay"))
    with pytest.raises(CorruptError, match="in its metadata, but no 'mmreplay'"):
        load(file)
    retold(file, lambda header: header.pop(SUMS))
    report = load(file)
    assert "are of a buffer whose description is lost" in " ".join(report.notes)


@pytest.mark.parametrize("size", [1 << 40, (16 << 20) + 1, 200])
def test_a_lying_length_is_refused_before_anything_is_read(tmp_path, size):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", size) + b"{}" * 50)
    with pytest.raises(FormatError, match=r"must have a header"):
        load(path)


def test_a_shape_of_no_elements_and_many_rows_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    header = {"x": {"dtype": "F32", "shape": [1 << 40, 0], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match=r"can be a field. Name a file"):
        load(path)

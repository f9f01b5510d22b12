"""safetensors in parts: what library and index say of them, and indexes that lie."""

import json
import math

import numpy as np
import pytest
from safetensors import safe_open

import mmreplay as mr
from mmreplay.convert.description import KEY
from mmreplay.convert.safetensors import INDEX, ROWS, SHARD, SUMS, shard_name
from mmreplay.disk import files
from mmreplay.errors import CorruptError, FormatError, ReplayError, SchemaError
from tests.convert.support import every_kind, retold, same, same_rows


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


@pytest.fixture
def folder(source, tmp_path):
    """Parts of seven rows each; of 48 rows in all."""
    target = tmp_path / "a.safetensors"
    mr.export(source, target, part_bytes=7.5 * row_nbytes(source))
    return target


def row_nbytes(buffer):
    return 17 + sum(field.nbytes for field in buffer.schema.fields.values())


@pytest.mark.parametrize("rows", [0.1, 1, 7, 24, 47, 48, 1000])
@pytest.mark.sliced(4)
def test_parts_come_back_by_folder_and_by_index(source, tmp_path, rows):
    target = tmp_path / "a.safetensors"
    report = mr.export(source, target, part_bytes=rows * row_nbytes(source))
    names = sorted(path.name for path in target.iterdir())
    count = math.ceil(48 / max(1, rows))
    assert names == sorted([INDEX, *(shard_name(k + 1, count) for k in range(count))])
    assert report.nbytes == sum(path.stat().st_size for path in target.iterdir())
    for index, path in enumerate((target, target / INDEX)):
        mr.load(path, tmp_path / f"b{index}")
        with mr.ReplayBuffer.open(tmp_path / f"b{index}") as loaded:
            same(source, loaded)


def test_an_empty_buffer_has_one_part(source, tmp_path):
    source.clear()
    mr.export(source, tmp_path / "a.safetensors", part_bytes=100)
    mr.load(tmp_path / "a.safetensors", tmp_path / "b")
    with mr.ReplayBuffer.open(tmp_path / "b") as loaded:
        same(source, loaded)


def test_the_library_finds_every_tensor_where_the_index_says(source, folder):
    index = json.loads((folder / INDEX).read_text())
    rows = source.gather_all()
    parts = {}
    for tensor, name in index["weight_map"].items():
        with safe_open(folder / name, "pt") as file:
            assert tensor in file.keys()  # noqa: SIM118  # no mapping
            path, _, number = tensor.rpartition(".")
            parts.setdefault(path, {})[number] = file.get_tensor(tensor)
    for path in source.schema.paths:
        whole = b"".join(
            shard.reshape(-1).view(torch_uint8()).numpy().tobytes()
            for _, shard in sorted(parts[path].items())
        )
        assert whole == np.ascontiguousarray(rows[path]).tobytes()
    sizes = [p.stat().st_size for p in folder.iterdir() if p.name != INDEX]
    assert index["metadata"]["total_size"] == sum(sizes)


def torch_uint8():
    import torch

    return torch.uint8


def test_episodes_and_priorities_go_through_parts(source, folder, tmp_path):
    mr.load(folder, tmp_path / "b", rows=slice(5, 20))
    with mr.ReplayBuffer.open(tmp_path / "b") as shard:
        assert len(shard.gather_all()) == 15


def test_a_folder_of_parts_is_replaced_on_request_and_no_other_is(source, folder):
    with pytest.raises(FormatError, match=r"already exists\. Choose another path, or pass"):
        mr.export(source, folder, part_bytes=1e6)
    mr.export(source, folder, part_bytes=1e6, overwrite=True)
    assert len(list(folder.iterdir())) == 2
    (folder / "mine").write_text("mine")
    with pytest.raises(FormatError, match="a folder that holds no buffer"):
        mr.export(source, folder, part_bytes=1e6, overwrite=True)
    assert (folder / "mine").exists()


def test_a_part_alone_is_refused(folder, tmp_path):
    with pytest.raises(FormatError, match=r"is one of several files\. Name their folder or"):
        mr.load(folder / shard_name(1, 7), tmp_path / "b")


@pytest.mark.parametrize("size", [0, -1, "5GB", True, None, float("nan"), 1e30])
def test_what_is_no_size_of_a_part_is_refused(source, tmp_path, size):
    if size is None:
        mr.export(source, tmp_path / "x.safetensors", part_bytes=None)
        assert (tmp_path / "x.safetensors").is_file()
        return
    with pytest.raises(SchemaError, match="part_bytes must be a number of bytes"):
        mr.export(source, tmp_path / "x.safetensors", part_bytes=size)


def lie(folder, change):
    value = json.loads((folder / INDEX).read_text())
    change(value)
    (folder / INDEX).write_text(json.dumps(value))


def rename(value, old, new):
    rows = value["metadata"][ROWS]
    value["metadata"][ROWS] = {new if k == old else k: v for k, v in rows.items()}


FIRST, SECOND = shard_name(1, 7), shard_name(2, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda v: rename(v, FIRST, "../../etc/passwd"),
            r"must name the file .*, got '\.\./\.\./etc/passwd'",
        ),
        (lambda v: rename(v, FIRST, "/etc/passwd"), "must name the file .*, got '/etc/passwd'"),
        (
            lambda v: rename(v, FIRST, f"x/../{FIRST}"),
            r"must name .* got 'x/\.\./model-00001-of-00007\.safetensors'",
        ),
        (lambda v: v["metadata"][ROWS].update({SECOND: [3, 14]}), r"got \[3, 14\]"),
        (lambda v: v["metadata"][ROWS].update({SECOND: [7, 3]}), r"got \[7, 3\]"),
        (lambda v: v["metadata"][ROWS].update({SECOND: [7, "9"]}), "the rows of"),
        (lambda v: v["metadata"][ROWS].update({SECOND: 9}), r"must be .*, got 9\."),
        (
            lambda v: v["metadata"][ROWS].popitem(),
            r"must name .* got 'model-00001-of-00007\.safetensors'",
        ),
        (lambda v: v["metadata"].update({ROWS: []}), "must have the rows of 1 to"),
        (lambda v: v["metadata"].update({ROWS: {}}), "must have the rows of 1 to"),
        (
            lambda v: v["metadata"].pop(ROWS),
            r"and 'mmreplay\.rows', so it is not the index of a buffer\.",
        ),
        (
            lambda v: v["metadata"].pop(KEY),
            r"and 'mmreplay\.rows', so it is not the index of a buffer\.",
        ),
        (lambda v: v["metadata"].update({KEY: {}}), "is no text"),
        (lambda v: v["metadata"].update({KEY: "{}"}), "format must be .* got None"),
        (
            lambda v: v.pop("metadata"),
            r"and 'mmreplay\.rows', so it is not the index of a buffer\.",
        ),
        (lambda v: v.pop("weight_map"), "weight_map must give tensor .* got 'None'"),
        (lambda v: v["weight_map"].update({"x": FIRST}), "give tensor 'x' the file"),
        (
            lambda v: v["weight_map"].update({"_flags.00002": "../x"}),
            "give tensor '_flags.00002' the file 'model-00002.*, got '../x'",
        ),
        (lambda v: v["weight_map"].popitem(), "the file 'model-00007.* got 'None'"),
    ],
)
def test_an_index_that_lies_is_refused_by_name(folder, tmp_path, change, message):
    lie(folder, change)
    with pytest.raises(FormatError, match=message) as caught:
        mr.load(folder, tmp_path / "b")
    assert INDEX in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_a_missing_or_foreign_part_is_refused_by_name(source, folder, tmp_path):
    other = tmp_path / "other.safetensors"
    source.set_statistics({"other": 1})
    mr.export(source, other, part_bytes=7.5 * row_nbytes(source))
    kept = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes((other / SECOND).read_bytes())
    with pytest.raises(FormatError, match=f"{SECOND} says .* is of another export"):
        mr.load(folder, tmp_path / "b")
    (folder / SECOND).write_bytes((folder / FIRST).read_bytes())
    with pytest.raises(FormatError, match=f"{SECOND} says that it is part"):
        mr.load(folder, tmp_path / "b")
    (folder / SECOND).unlink()
    with pytest.raises(CorruptError, match=f"{SECOND} is missing"):
        mr.load(folder, tmp_path / "b")
    (folder / SECOND).symlink_to(other / SECOND)
    with pytest.raises(FormatError, match="not a regular file"):
        mr.load(folder, tmp_path / "b")
    (folder / SECOND).unlink()
    (folder / SECOND).write_bytes(kept)
    mr.load(folder, tmp_path / "b")


def test_a_part_without_a_column_is_refused(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    path = folder / FIRST
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = {name: each for name, each in load_file(path).items() if "reward" not in name}
    tensors.pop("_flags.00001")
    save_file(tensors, path, {SHARD: header[SHARD]})
    with pytest.raises(FormatError, match="lacks the array '_flags'"):
        mr.load(folder, tmp_path / "b")


def test_a_part_without_its_checksums_is_doubted_or_refused(folder, tmp_path):
    whole = (folder / SECOND).read_bytes()
    retold(folder / SECOND, lambda header: header.pop(SUMS))
    report = mr.load(folder, tmp_path / "b")
    assert [doubt.partition(" next to")[0] for doubt in report.doubts] == [
        f"{SECOND} has no {SUMS!r}"
    ]
    (folder / SECOND).write_bytes(whole)
    retold(folder / SECOND, lambda header: header.update({SUMS: "{}"}))
    with pytest.raises(CorruptError, match=r"checksum of '_env_id\.00002'"):
        mr.load(folder, tmp_path / "c")
    (folder / SECOND).write_bytes(whole)
    retold(folder / SECOND, lambda header: header.pop(SHARD))
    with pytest.raises(CorruptError, match="in its metadata, but no 'mmreplay'"):
        mr.load(folder / SECOND, tmp_path / "c")


def test_a_flipped_bit_is_an_error_or_changes_nothing(source, folder, tmp_path):
    rng = np.random.default_rng(1)
    noticed = 0
    for turn in range(60):
        name = sorted(p.name for p in folder.iterdir())[turn % 8]
        whole = (folder / name).read_bytes()
        data = bytearray(whole)
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        (folder / name).write_bytes(data)
        try:
            mr.load(folder, tmp_path / "target")
        except ReplayError:
            noticed += 1
        else:
            with mr.ReplayBuffer.open(tmp_path / "target") as target:
                same_rows(source, target)
            files.remove_tree(tmp_path / "target")
        assert not (tmp_path / "target").exists()
        (folder / name).write_bytes(whole)
    # What is not noticed is padding, and text of the description.
    assert noticed > 40

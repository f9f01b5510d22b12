"""A buffer as a source and as a target, and targets that appear whole."""

import errno
import importlib
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer import bulk_writer
from mmreplay.convert import buffer_reader, registry
from mmreplay.convert.base import Block
from mmreplay.convert.description import Description
from mmreplay.convert.registry import Format
from mmreplay.convert.staging import UNFINISHED, Staging
from mmreplay.disk import files
from mmreplay.errors import FailedError, FormatError, SchemaError, SourceError, StaleError
from mmreplay.testing.disks import WatchedDisk, using
from tests.convert.support import every_kind, same, same_rows

SCHEMA = mr.Schema({"a": mr.Field((), "int64"), "terminated": mr.Field((), "bool")})


@pytest.fixture
def source(tmp_path):
    with every_kind(tmp_path / "source") as buffer:
        yield buffer


def describe(stop=4, first=0, **options):
    options.setdefault("capacity", 10)
    return Description(SCHEMA, np.array([first]), np.array([stop]), **options)


def block(flags, first=0, env_id=0):
    flags = np.array(flags, np.uint8)
    count = len(flags)
    columns = {"a": np.arange(count), "terminated": (flags & 2) != 0}
    places = np.arange(first, first + count)
    return Block(columns, np.full(count, env_id), places, flags)


def write(tmp_path, blocks, **options):
    with buffer_reader.open_writer(tmp_path / "new", describe(**options)) as writer:
        for each in blocks:
            writer.write(each)
        writer.finish()


def test_a_buffer_is_copied_by_reading_and_writing_it(source, tmp_path):
    with buffer_reader.BufferReader(source) as reader:
        description = reader.describe()
        with buffer_reader.open_writer(tmp_path / "copy", description) as writer:
            for each in reader.blocks(7):
                writer.write(each)
            writer.finish()
    with mr.ReplayBuffer.open(tmp_path / "copy") as copy:
        same(source, copy)


def test_blocks_of_mixed_environments_are_accepted(source, tmp_path):
    with buffer_reader.BufferReader(source) as reader:
        parts = list(reader.blocks(5))
        order = np.argsort([p.positions[0] for p in parts], kind="stable")
        with buffer_reader.open_writer(tmp_path / "copy", reader.describe()) as writer:
            for a, b in zip(order[::2], order[1::2], strict=True):
                writer.write(joined(parts[a], parts[b]))
            writer.finish()
    with mr.ReplayBuffer.open(tmp_path / "copy") as copy:
        same(source, copy)


def joined(one, other):
    """Two blocks as one, their rows in turns."""
    order = np.argsort(np.concatenate([np.arange(len(one)), np.arange(len(other))]), kind="stable")
    columns = {
        path: np.concatenate([one.columns[path], other.columns[path]])[order]
        for path in one.columns
    }
    rest = [
        np.concatenate([getattr(one, name), getattr(other, name)])[order]
        for name in ("env_ids", "positions", "flags")
    ]
    return Block(columns, *rest)


def test_a_smaller_capacity_keeps_the_newest_rows(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    report = mr.load(tmp_path / "a.npz", tmp_path / "small", capacity=6)
    assert "the oldest 36 rows were left out" in report.notes[0]
    source.resize(6)
    with mr.ReplayBuffer.open(tmp_path / "small") as small:
        same_rows(source, small)
    assert not mr.verify_buffer(tmp_path / "small").findings


def test_rows_that_a_writer_overwrites_end_the_export(source, tmp_path):
    with mr.ReplayBuffer.open(source.path) as reader:
        made = buffer_reader.BufferReader(reader)
        source.clear([0])
        with pytest.raises(StaleError, match="the writer overwrote rows of"):
            list(made.blocks())


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([block([1, 0]), block([0, 0], 3)], "next position must be 2, got 3"),
        ([block([1, 0, 0, 0, 0])], "rows must stop at position 4, got"),
        ([block([1, 0, 0])], r"must reach position 4, got rows up to 3\. The source"),
        (
            [block([1, 0], env_id=1)],
            r"environment 1: environments must be in \[0, 1\)\. The source",
        ),
        ([block([0, 0, 0, 0])], "row of an environment must have START, got n"),
        ([block([1, 0, 1, 0])], "must follow an episode's end or also have"),
        ([block([1, 0]), block([8, 0], 2)], "a final row must follow an episode's end"),
        ([block([1, 200, 0, 0])], "flags must be within 0x3f"),
        ([block([1, 2, 0, 0])], "row after an end must have FINAL or START"),
    ],
)
def test_rows_that_no_buffer_could_hold_are_refused(tmp_path, blocks, message):
    with pytest.raises(SourceError, match=message):
        write(tmp_path, blocks)
    assert list(tmp_path.iterdir()) == []


def test_columns_that_differ_from_the_description_are_refused(tmp_path):
    good = block([1, 0, 0, 0])
    bad = Block({**good.columns, "a": np.zeros(4)}, good.env_ids, good.positions, good.flags)
    with pytest.raises(SourceError, match=r"field 'a' must be .* got float64"):
        write(tmp_path, [bad])


def test_a_field_with_a_reserved_name_is_refused_with_the_way_out(tmp_path):
    schema = mr.Schema({"_flags": mr.Field((), "int8"), "a": mr.Field((), "int8")})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, 4) as buffer:
        buffer.add(_flags=1, a=2)
        with pytest.raises(SchemaError, match=r"Leave the field out with fields=, or rename it\."):
            mr.export(buffer, tmp_path / "a.npz")
        assert mr.export(buffer, tmp_path / "a.npz", fields=["a"]).rows == 1


def test_a_buffer_in_ram_is_exported(tmp_path):
    buffer = mr.ReplayBuffer.create(None, SCHEMA, 9, engine="memory")
    buffer.extend(a=np.arange(5), terminated=np.zeros(5, bool))
    mr.export(buffer, tmp_path / "a.npz")
    mr.load(tmp_path / "a.npz", tmp_path / "b")
    with mr.ReplayBuffer.open(tmp_path / "b") as loaded:
        same_rows(buffer, loaded)


def test_a_description_survives_json(source):
    with buffer_reader.BufferReader(source) as reader:
        description = reader.describe()
    again = Description.from_bytes(description.to_bytes(), "x")
    assert again.to_bytes() == description.to_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "format must be 'mmreplay', got 'x'"),
        ({"version": [2, 0]}, r"version 2\.0, but this mmreplay reads 1\.x\. Install a newer"),
        ({"version": "1"}, r"must be \[major, minor\]"),
        ({"num_envs": 2**40}, "num_envs must be .* got 1099511627776"),
        ({"first": [0, 0, 0]}, "must be a list of 2 positions"),
        ({"stop": [2**62, 0]}, "stop must be an integer"),
        ({"stop": [0, 0]}, "x: description: first and stop must be 0 <= first <= stop"),
        ({"capacity": 0}, "capacity must be .* got 0"),
        ({"autoreset": "x"}, "autoreset must be .* got 'x'"),
        ({"layout": 3}, "layout must be .* got '3'"),
        ({"uuid": "../x"}, "must be 32 hex digits or ''"),
        ({"user": []}, "user must be an object, got '\\[\\]'"),
        ({"schema": [3]}, "schema field entry"),
    ],
)
def test_descriptions_that_lie_are_refused(source, change, message):
    import json

    with buffer_reader.BufferReader(source) as reader:
        value = json.loads(reader.describe().to_bytes())
    with pytest.raises(FormatError, match=message):
        Description.from_bytes(json.dumps(value | change).encode(), "x")


def test_a_folder_of_somebody_elses_is_never_removed(tmp_path):
    (tmp_path / "tmp-mmreplay-new-new").mkdir()
    (tmp_path / "tmp-mmreplay-new-new" / "mine").write_text("mine")
    with pytest.raises(
        FormatError, match=r"exists and is not a temporary folder of mmreplay\. Move it"
    ):
        Staging(tmp_path / "new", folder=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mine").write_text("mine")
    with pytest.raises(FormatError, match="a folder that holds no buffer"):
        Staging(tmp_path / "old", folder=True, overwrite=True)
    assert (tmp_path / "tmp-mmreplay-new-new" / "mine").exists()
    assert (tmp_path / "old" / "mine").exists()


def test_a_folder_replaces_no_file_and_no_link(source, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source.path)
    for name in ("file", "link"):
        with pytest.raises(
            FormatError, match=r"is a file or a link, which a folder does not replace\."
        ):
            mr.load(source.path, tmp_path / name, overwrite=True)
    assert (tmp_path / "file").read_text() == "mine"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("tmp-")]


def test_a_folder_left_by_a_killed_run_is_replaced(tmp_path):
    (tmp_path / "tmp-mmreplay-new-new").mkdir()
    for name in (UNFINISHED, "rest"):
        (tmp_path / "tmp-mmreplay-new-new" / name).write_text("")
    staging = Staging(tmp_path / "new", folder=True)
    staging.publish()
    assert list((tmp_path / "new").iterdir()) == []


def test_a_buffer_moved_away_by_a_killed_run_is_put_back(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    source.close()
    source.path.rename(source.path.with_name("tmp-mmreplay-old-source"))
    with pytest.raises(FormatError, match=r"already exists\. Choose another path, or pass"):
        mr.load(tmp_path / "a.npz", source.path)
    assert (source.path / "metadata.json").exists()


def test_a_failed_switch_puts_the_old_buffer_back(source, tmp_path, monkeypatch):
    mr.export(source, tmp_path / "a.npz")
    source.close()

    class Broken(files.Disk):
        def rename(self, old, new):
            if old.name == "tmp-mmreplay-new-source":
                raise OSError(5, "Input/output error")
            super().rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", Broken())
        with pytest.raises(OSError, match="cannot rename"):
            mr.load(tmp_path / "a.npz", source.path, overwrite=True)
    assert (source.path / "metadata.json").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz", "source"]


class Point:
    name = "later"

    def __init__(self, value):
        self.value = value

    def load(self):
        return self.value


def test_a_format_is_found_by_its_entry_point(source, tmp_path, monkeypatch):
    added = Format("later", "mmreplay.convert.npz", "a plugin's", (".later",))
    monkeypatch.setattr(registry, "entry_points", lambda group: [Point(added)])
    registry.formats.cache_clear()
    try:
        mr.export(source, tmp_path / "a.later")
        mr.load(tmp_path / "a.later", tmp_path / "b")
        for bad in (3, registry.OURS[1]):
            registry.formats.cache_clear()
            points = [Point(bad)]
            monkeypatch.setattr(registry, "entry_points", lambda group, p=points: p)
            with pytest.raises(FormatError, match="entry point 'later' of"):
                mr.export(source, tmp_path / "b.npz", format="later")
    finally:
        registry.formats.cache_clear()


def test_an_option_that_no_format_takes_is_refused(source, tmp_path):
    with pytest.raises(SchemaError, match="option 'colour' is unknown to 'npz' as a target, which"):
        mr.export(source, tmp_path / "a.npz", colour=3)


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("compresion", r"Did you mean 'compression'\?$"),
        ("overwrit", r"Did you mean 'overwrite'\?$"),
        ("priority", r"Did you mean 'priorities'\?$"),
        # Another format has it.
        ("vectors", r"Leave it out, or use parquet, which takes it\.$"),
        ("zzz", r"Leave it out\.$"),
    ],
)
def test_an_option_that_is_misspelt_is_guessed(source, tmp_path, option, advice):
    match = rf"option '{option}' is unknown to 'npz' as a target, which takes compress"
    with pytest.raises(SchemaError, match=f"{match}.*{advice}"):
        mr.export(source, tmp_path / "a.npz", **{option: 3})


def test_an_argument_of_load_that_is_misspelt_is_guessed(source, tmp_path):
    mr.export(source, tmp_path / "a.parquet")
    match = (
        r"^option 'capcity' is unknown to 'parquet' as a source, which takes "
        r"allow_expansion, autoreset\. Did you mean 'capacity'\?$"
    )
    with pytest.raises(SchemaError, match=match):
        mr.load(tmp_path / "a.parquet", tmp_path / "b", capcity=9)


def test_importing_convert_loads_no_format_library():
    from tests.test_imports import HEAVY, modules_after

    code = "import mmreplay as mr; mr.export; mr.load; import mmreplay.convert.transfer"
    assert not HEAVY & modules_after(code)


def test_the_format_of_the_page_works_as_it_stands(source, tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "convert.md"
    example = re.search(r"^```python\n(# myformat.*?)^```", page.read_text(), re.M | re.S)
    (tmp_path / "myformat.py").write_text(example[1])
    monkeypatch.syspath_prepend(tmp_path)
    added = importlib.import_module("myformat").FORMAT
    monkeypatch.setattr(registry, "formats", lambda: {"raw": added})
    report = mr.export(source, tmp_path / "a.raw")
    # Fields only: without the byte of flags that a row of a schema has.
    assert report.nbytes == report.rows * (source.schema.row_nbytes - 1)
    with pytest.raises(SchemaError, match="format must be one of , got 'raw', which mmreplay does"):
        mr.load(tmp_path / "a.raw", tmp_path / "b", format="raw")


def test_a_buffer_is_reported_without_the_holes_of_its_ring(tmp_path):
    schema = mr.Schema({"x": mr.Field((1000,), "uint8")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 1_000_000) as buffer:
        buffer.extend(x=np.ones((500, 1000), np.uint8))
    mr.export(tmp_path / "a", tmp_path / "a.npz")
    report = mr.load(tmp_path / "a.npz", tmp_path / "b")
    assert 500_000 <= report.nbytes < 2_000_000


@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.safetensors", "a.parquet"])
def test_rows_that_no_file_is_read_of_are_not_written(tmp_path, name):
    schema = mr.Schema({"x": mr.Field((1 << 28,), "uint8")})
    with mr.ReplayBuffer.create(tmp_path / "source", schema, 1) as source:
        with pytest.raises(
            SchemaError, match=r"whose rows have at most 268435456\. Leave a field out with"
        ):
            mr.export(source, tmp_path / name)
        # A buffer takes them.
        mr.load(source.path, tmp_path / "target")
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.safetensors", None])
def test_a_block_stays_as_it_is_while_the_next_one_is_made(tmp_path, name):
    with mr.ReplayBuffer.create(tmp_path / "b", SCHEMA, 1000) as buffer:
        buffer.extend(a=np.arange(1000), terminated=np.zeros(1000, bool))
    source = tmp_path / "b" if name is None else tmp_path / name
    if name is not None:
        mr.export(tmp_path / "b", source)
    kind = buffer_reader.open_reader if name is None else registry.named(name[2:])
    reader = kind(source) if name is None else registry.open_reader(kind, source)
    with reader:
        for number, each in enumerate(reader.blocks(100)):
            time.sleep(0.02)  # in which the next one is made
            expected = np.arange(100 * number, 100 * (number + 1))
            assert (each.columns["a"] == expected).all()
            assert (each.positions == expected).all()


@pytest.mark.parametrize("wrong", ["datasync", None])
def test_a_device_that_fails_while_a_buffer_is_filled_leaves_none(tmp_path, monkeypatch, wrong):
    """The device is given what was written so far, in a thread."""
    monkeypatch.setattr(bulk_writer, "SYNC_NBYTES", 64)
    synced = []

    def datasync(self, fd):
        synced.append(threading.current_thread().name)
        if wrong:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.Disk, "datasync", datasync)
    with suppress(FailedError):
        write(tmp_path, [block([n == 0], n) for n in range(400)], stop=400, capacity=400)
        assert not wrong
    assert any(name.startswith("mmreplay-load") for name in synced)
    assert (tmp_path / "new").exists() is not bool(wrong)
    assert not list(tmp_path.glob("tmp-*"))


@pytest.mark.parametrize("before", ["tmp-", "tmp-old-", "tmp-whole-", "tmp-rows-"])
def test_names_of_the_users_own_are_left_alone(source, tmp_path, before):
    mr.export(source, tmp_path / "a.npz")
    source.close()
    mine = tmp_path / f"{before}b.npz"
    shutil.copy(tmp_path / "a.npz", mine)
    mr.load(mine, tmp_path / "first")
    mr.export(tmp_path / "first", tmp_path / "b.npz")
    folder = tmp_path / f"{before}run"
    shutil.copytree(source.path, folder)
    (folder / "thesis.tex").write_text("mine")
    mr.load(folder, tmp_path / "run")
    mr.load(mine, tmp_path / "run", overwrite=True)
    assert (folder / "thesis.tex").read_text() == "mine"
    assert mine.read_bytes() == (tmp_path / "a.npz").read_bytes()


def test_what_a_stopped_run_left_is_no_source(source, tmp_path):
    left = tmp_path / "tmp-mmreplay-new-a.npz"
    mr.export(source, tmp_path / "b.npz")
    (tmp_path / "b.npz").rename(left)
    with pytest.raises(FormatError, match="is the unfinished target of a conversion that was"):
        mr.load(left, tmp_path / "a.npz")
    assert left.exists()


@pytest.mark.parametrize("name", ["tmp-mmreplay-new-a.npz", "tmp-mmreplay-old-a"])
def test_what_the_next_run_would_remove_is_no_target(source, tmp_path, name):
    mr.export(source, tmp_path / "b.npz")
    for make in (
        lambda: mr.export(source, tmp_path / name, format="npz"),
        lambda: mr.load(tmp_path / "b.npz", tmp_path / name),
    ):
        with pytest.raises(FormatError, match=f"target must not begin with .*{name}'"):
            make()
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_folder_with_metadata_of_another_kind_is_never_removed(source, tmp_path, with_rows):
    mr.export(source, tmp_path / "a.npz")
    source.close()
    model = tmp_path / "model"
    if with_rows:
        shutil.copytree(source.path, model)
    model.mkdir(exist_ok=True)
    (model / "metadata.json").write_text("{}")
    (model / "weights.bin").write_text("mine")
    with pytest.raises(FormatError, match="is a folder that holds no buffer or other files too,"):
        mr.load(tmp_path / "a.npz", model, overwrite=True)
    assert (model / "weights.bin").read_text() == "mine"


def test_a_damaged_buffer_may_be_overwritten(source, tmp_path):
    mr.export(source, tmp_path / "a.npz")
    source.close()
    (source.path / "metadata.json").write_text("{}")
    mr.load(tmp_path / "a.npz", source.path, overwrite=True)
    assert mr.verify_buffer(source.path).ok


def test_a_staged_folder_whose_removal_was_killed_is_removed_by_the_next_run(tmp_path):
    """Its marker may be gone before its other files are."""

    class Killed(WatchedDisk):
        left = 0

        def watch(self, name):
            if name == "unlink":
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt

    for left in range(4):
        staging = Staging(tmp_path / "target", folder=True)
        for name in ("a", "z"):
            (staging.path / name).write_text("x")
        disk = Killed()
        disk.left = left
        with using(disk), suppress(KeyboardInterrupt):
            staging.abort()
        staging._unlock()  # as the end of the process does
        Staging(tmp_path / "target", folder=True).abort()
        assert not os.listdir(tmp_path)

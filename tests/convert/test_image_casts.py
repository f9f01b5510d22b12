"""Images that become files, arrays, or stay what they are, on the way."""

import json
import re
import threading
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert import base, mapped, transfer
from mmreplay.datasets import images
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from mmreplay.testing.disks import QuickDisk, using
from tests.buffer.test_image_fields import ended_early, forge
from tests.convert.foreign.lerobot_sets import make
from tests.convert.foreign.test_lerobot import frames, write
from tests.schema.image_files import by_pillow, camera, jpeg, noise, pixels_of, png

SHAPE, GRAY = (18, 22, 3), (6, 5, 1)
TOP, DEPTH = "observation/top", "observation/depth"
ROWS = 23
RAW = {TOP: mr.Field(SHAPE, "uint8"), DEPTH: mr.Field(GRAY, "uint8")}
KINDS = {
    "raw": RAW,
    "png": {TOP: mr.Field.image(SHAPE, "png"), DEPTH: mr.Field.image(GRAY, "png")},
    "jpeg": {TOP: mr.Field.image(SHAPE, "jpeg", 90), DEPTH: mr.Field.image(GRAY, "jpeg", 90)},
}


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


def array(path, number):
    return camera(SHAPE if path == TOP else GRAY, number)


def schema_of(kind, **more):
    others = {"number": mr.Field((), "int64"), "terminated": mr.Field((), "bool")}
    return mr.Schema.from_flat(KINDS[kind] | others | more)


def step(number, value=array):
    observation = {path.partition("/")[2]: value(path, number) for path in RAW}
    return {"observation": observation, "number": number, "terminated": number % 7 == 6}


@pytest.fixture
def rings(tmp_path):
    """Closed rings of each kind, made where they are asked for."""

    def make_ring(kind, rows=ROWS, value=array, name=None, **options):
        path = tmp_path / (name or kind)
        with mr.ReplayBuffer.create(path, schema_of(kind), 40, **options) as buffer:
            for number in range(rows):
                buffer.add(step(number, value))
        return path

    return make_ring


def files_of(path, name=TOP):
    """The files that a ring stores."""
    with mr.ReplayBuffer.open(path) as buffer:
        env_ids, positions = rows_in(buffer)
        column = buffer.view.read_values((name,), env_ids, positions)[name]
    return [bytes(file) for file in column]


def rows_in(buffer):
    span = buffer.span
    rows = [np.arange(first, stop) for first, stop in zip(span.first, span.stop, strict=True)]
    return np.repeat(np.arange(len(rows)), [len(r) for r in rows]), np.concatenate(rows)


def rows_of(path):
    assert not mr.verify_buffer(path).findings
    with mr.ReplayBuffer.open(path) as buffer:
        return buffer.schema, buffer.gather_all()


def before(kind, path, number):
    """What the ring of a kind holds, as an array."""
    exact = array(path, number)
    return pixels_of(jpeg(exact)) if kind == "jpeg" else exact


CASTS = {
    "uint8": (mr.Field(SHAPE, "uint8"), None),
    "png": (mr.Field.image(SHAPE, "png"), None),
    "jpeg": (mr.Field.image(SHAPE, "jpeg", 90, "420"), (90, "420")),
    "jpeg:90:420": (mr.Field.image(SHAPE, "jpeg", 90, "420"), (90, "420")),
    "jpeg:80": (mr.Field.image(SHAPE, "jpeg", 80, "420"), (80, "420")),
    "jpeg:100:444": (mr.Field.image(SHAPE, "jpeg", 100, "444"), (100, "444")),
    "jpeg:1:422": (mr.Field.image(SHAPE, "jpeg", 1, "422"), (1, "422")),
}


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("kind", KINDS)
def test_images_become_what_is_asked_for(rings, tmp_path, kind, cast, engine):
    source, target = rings(kind), tmp_path / "target"
    report = mr.load(source, target, cast={TOP: cast}, engine=engine)
    schema, rows = rows_of(target)
    field, options = CASTS[cast]
    assert schema[TOP] == field
    assert schema[DEPTH] == KINDS[kind][DEPTH]
    assert rows["number"].tolist() == list(range(ROWS))
    stays = field == KINDS[kind][TOP]
    for number in range(ROWS):
        old = before(kind, TOP, number)
        if options is not None and not stays:
            old = pixels_of(jpeg(old, *options))
        assert rows[TOP][number].tolist() == old.tolist()
        depth = before(kind, DEPTH, number)
        assert rows[DEPTH][number].tolist() == depth.tolist()
    if options is not None:
        expected = [
            jpeg(array(TOP, n) if stays else before(kind, TOP, n), *options) for n in range(ROWS)
        ]
        assert files_of(target) == expected
    said = [note for note in report.notes if "images of field" in note]
    if cast == "uint8":
        assert said == []
    elif stays:
        assert said == [f"images of field {TOP!r} stay the files that they are"]
    else:
        lossy = "" if options is None else ", which changes them"
        assert said == [f"images of field {TOP!r} are stored as {field.encoding.options}{lossy}"]


def test_subtrees_and_several_fields_are_cast_together(rings, tmp_path):
    source = rings("raw")
    with pytest.raises(SchemaError, match=r"'observation' is several fields\. Cast each by its"):
        mr.load(source, tmp_path / "a", cast={"observation": "png"})
    casts = {TOP: "jpeg:95:444", DEPTH: "png"}
    mr.load(source, tmp_path / "a", cast=casts, rename={TOP: "observation/camera"}, drop=["number"])
    schema, rows = rows_of(tmp_path / "a")
    assert schema.paths == ("observation/camera", DEPTH, "terminated")
    for number in range(ROWS):
        file = jpeg(array(TOP, number), 95, "444")
        assert rows["observation/camera"][number].tolist() == pixels_of(file).tolist()
        assert rows[DEPTH][number].tolist() == array(DEPTH, number).tolist()


def test_final_rows_and_text_go_along(tmp_path):
    fields = KINDS["raw"] | {
        "info": mr.Field(GRAY, "uint8"),
        "number": mr.Field((), "int64"),
        "prompt": mr.Field.text(max_bytes=40),
        "terminated": mr.Field((), "bool"),
    }
    source = tmp_path / "ring"
    with mr.ReplayBuffer.create(
        source, mr.Schema.from_flat(fields), 40, 2, heap_bytes=8192, autoreset="same_step"
    ) as buffer:
        for number in range(0, 60, 2):
            numbers = [number, number + 1]
            done = [number % 14 == 4, number % 10 == 2]
            buffer.add(
                {
                    "observation": {
                        "top": np.stack([array(TOP, n) for n in numbers]),
                        "depth": np.stack([array(DEPTH, n) for n in numbers]),
                    },
                    "info": np.stack([array(DEPTH, 500 + n) for n in numbers]),
                    "number": numbers,
                    "prompt": [f"é{n}" for n in numbers],
                    "terminated": done,
                },
                final_observation={
                    "top": np.stack([array(TOP, 1000 + n) for n in numbers]),
                    "depth": np.stack([array(DEPTH, 1000 + n) for n in numbers]),
                },
            )
    casts = {TOP: "png", DEPTH: "png", "info": "png"}
    mr.load(source, tmp_path / "png", cast=casts)
    mr.load(tmp_path / "png", tmp_path / "again", cast=dict.fromkeys(casts, "uint8"))
    _, old = rows_of(source)
    for name in ("png", "again"):
        schema, rows = rows_of(tmp_path / name)
        assert old["final"].any()
        for path in (TOP, DEPTH, "number", "final", "terminated"):
            assert rows[path].tolist() == old[path].tolist(), path
        steps = ~old["final"]
        assert rows["info"][steps].tolist() == old["info"][steps].tolist()
        assert rows["prompt"].text() == old["prompt"].text()
    assert schema == mr.Schema.from_flat(fields)


# The heap of what is encoded


def test_the_heap_is_as_large_as_what_is_stored_and_is_written_on(rings, tmp_path):
    source, target = rings("raw"), tmp_path / "target"
    report = mr.load(source, target, cast={TOP: "jpeg:50", DEPTH: "png"}, capacity=ROWS)
    stored = sum(-(-len(file) // 8) * 8 for name in RAW for file in files_of(target, name))
    heap = target / "data-000001" / "heap.bin"
    with mr.ReplayBuffer.open(target, "r+") as buffer:
        nbytes, least = buffer.metadata.heap_nbytes, 4 * buffer.schema.max_heap_nbytes
        # Of the files that are there; at least four of the longest rows.
        assert least <= nbytes <= max(least, 2 * stored) + 4096
        assert heap.stat().st_size == nbytes
        assert len(report.notes) >= 3
        (said,) = [note for note in report.notes if note.startswith("heap_bytes is ")]
        assert said.endswith(
            "per environment, by what was stored: pass heap_bytes= (--heap-bytes) for another size"
        )
        begin = buffer.heads[0]
        written = 0
        for number in range(ROWS, 6000):
            image = noise(SHAPE, number)
            buffer.add(
                observation={"top": jpeg(image, 100, "444"), "depth": array(DEPTH, number)},
                number=number,
                terminated=False,
            )
            written += len(jpeg(image, 100, "444"))
            if written > 2 * nbytes:
                break
        assert buffer.heads[0] > begin
        rows = buffer.gather_all()
        assert len(rows) > 3
        for row, n in enumerate(rows["number"].tolist()):
            assert rows[DEPTH][row].tolist() == array(DEPTH, n).tolist()
            if n >= ROWS:
                file = jpeg(noise(SHAPE, n), 100, "444")
                assert rows[TOP][row].tolist() == pixels_of(file).tolist()
    assert not mr.verify_buffer(target).findings


def test_a_full_ring_of_images_goes_on_as_long(tmp_path):
    # As many images of the same size as there are rows fit, not one fewer.
    shape, source, target = (64, 64, 3), tmp_path / "raw", tmp_path / "target"
    schema = mr.Schema({"image": mr.Field(shape, "uint8")})
    with mr.ReplayBuffer.create(source, schema, 300) as buffer:
        buffer.extend(image=np.stack([camera(shape, n) for n in range(100)]))
    mr.load(source, target, cast={"image": "jpeg:90:420"}, capacity=300)
    raw = 300 * 64 * 64 * 3
    with mr.ReplayBuffer.open(target, "r+") as buffer:
        assert buffer.metadata.heap_nbytes < raw / 2
        buffer.extend(image=[jpeg(camera(shape, n)) for n in range(100, 900)])
        assert buffer.span.lengths.tolist() == [300]
        drawn = buffer.gather_all()["image"]
        for row, n in enumerate(range(600, 900)):
            assert drawn[row].tolist() == pixels_of(jpeg(camera(shape, n))).tolist()


@pytest.mark.parametrize("heap_bytes", [1 << 20, "1 MiB"])
def test_a_heap_that_is_given_stays_as_large(rings, tmp_path, heap_bytes):
    report = mr.load(rings("raw"), tmp_path / "a", cast={TOP: "jpeg:90:420"}, heap_bytes=heap_bytes)
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        assert buffer.metadata.heap_nbytes == 1 << 20
    assert not [note for note in report.notes if "by what was stored" in note]


def test_rows_that_a_heap_does_not_hold_are_left_out(rings, tmp_path):
    source = rings("raw", value=lambda path, n: noise(SHAPE if path == TOP else GRAY, n))
    least = 4 * mr.Field.image(SHAPE, "png", max_bytes=SHAPE[0] * 66 + (64 << 10)).max_heap_nbytes
    report = mr.load(source, tmp_path / "a", cast={TOP: "png"}, heap_bytes=2 * least)
    _, rows = rows_of(tmp_path / "a")
    assert rows["number"].tolist() == list(range(ROWS))
    for number in range(ROWS):
        assert rows[TOP][number].tolist() == noise(SHAPE, number).tolist()
    assert report.rows == ROWS


@pytest.mark.parametrize("capacity", [5, 23, 100])
def test_the_newest_rows_stay_where_the_capacity_is_less(rings, tmp_path, capacity):
    mr.load(rings("raw"), tmp_path / "a", cast={TOP: "png"}, capacity=capacity)
    _, rows = rows_of(tmp_path / "a")
    expected = range(max(0, ROWS - capacity), ROWS)
    assert rows["number"].tolist() == list(expected)
    for row, number in enumerate(expected):
        assert rows[TOP][row].tolist() == array(TOP, number).tolist()


def test_conditions_and_fractions_choose_rows_of_images(rings, tmp_path):
    mr.load(rings("jpeg"), tmp_path / "a", cast={TOP: "png"}, where="max(number) > 6")
    _, rows = rows_of(tmp_path / "a")
    assert rows["number"].tolist() == list(range(7, ROWS))
    for row, number in enumerate(range(7, ROWS)):
        assert rows[TOP][row].tolist() == before("jpeg", TOP, number).tolist()


def test_several_rings_are_cast_as_one(rings, tmp_path):
    one, two = rings("raw", 9, name="one"), rings("raw", 7, name="two")
    mr.load([one, two], tmp_path / "a", cast={TOP: "jpeg:90:420"})
    _, rows = rows_of(tmp_path / "a")
    assert sorted(rows["number"].tolist()) == sorted([*range(9), *range(7)])
    for row, number in enumerate(rows["number"].tolist()):
        assert rows[TOP][row].tolist() == before("jpeg", TOP, number).tolist()


# Files of other formats


FORMATS = ("npz", "pt", "csv", "parquet", "safetensors")
ARRAYS = ("npz", "pt", "safetensors")
"""Formats to which images become arrays, unless they are cast to files."""
ALL_ARRAYS = (
    f"images of {TOP!r}, {DEPTH!r} become arrays. Parquet keeps their files, and so does mr.export "
    f"with cast={{{TOP!r}: 'jpeg', {DEPTH!r}: 'jpeg'}} (--cast {TOP}=jpeg --cast {DEPTH}=jpeg) to "
    "npz, pt and safetensors"
)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_files_stay_byte_for_byte_through_other_formats(rings, tmp_path, kind, form):
    source, there = rings(kind), tmp_path / f"rows.{form}"
    casts = dict.fromkeys(RAW, kind) if form in ARRAYS else None
    report = mr.export(source, there, cast=casts)
    assert not [note for note in report.notes if "become arrays" in note]
    mr.load(there, tmp_path / "again")
    schema, rows = rows_of(tmp_path / "again")
    assert schema == schema_of(kind)
    for path in RAW:
        files = files_of(tmp_path / "again", path)
        assert files == files_of(source, path)
        if kind == "jpeg":
            assert files == [jpeg(array(path, n)) for n in range(ROWS)]
    assert rows["number"].tolist() == list(range(ROWS))
    # What is cast afterwards is as if it had been cast at once.
    mr.load(there, tmp_path / "arrays", cast={TOP: "uint8"})
    _, rows = rows_of(tmp_path / "arrays")
    for number in range(ROWS):
        assert rows[TOP][number].tolist() == before(kind, TOP, number).tolist()


@pytest.mark.parametrize(
    ("form", "cast"), [*((form, None) for form in ARRAYS), *((form, "uint8") for form in FORMATS)]
)
def test_exports_of_arrays_have_arrays(rings, tmp_path, form, cast):
    there = tmp_path / f"rows.{form}"
    report = mr.export(
        rings("jpeg"), there, cast=None if cast is None else dict.fromkeys(RAW, cast)
    )
    said = [note for note in report.notes if "become arrays" in note]
    assert said == ([ALL_ARRAYS] if cast is None else [])
    mr.load(there, tmp_path / "again")
    schema, rows = rows_of(tmp_path / "again")
    assert schema == schema_of("raw")
    for path in RAW:
        for number in range(ROWS):
            assert rows[path][number].tolist() == before("jpeg", path, number).tolist()


def test_arrays_of_a_file_are_those_that_are_drawn(rings, tmp_path):
    source = rings("jpeg")
    mr.export(source, tmp_path / "rows.npz", cast={DEPTH: "jpeg"})
    drawn = [before("jpeg", TOP, n) for n in range(ROWS)]
    with np.load(tmp_path / "rows.npz") as loaded:
        (name,) = [each for each in loaded.files if each.startswith(TOP)]
        np.testing.assert_array_equal(loaded[name], drawn)
        # What is cast to files is files.
        assert not [each for each in loaded.files if each == DEPTH]
    # So have steps that are changed, and files that AutoExport writes.
    report = mr.export(source, tmp_path / "few.npz", frame_skip=2, rename={TOP: "frame"})
    assert ALL_ARRAYS in report.notes
    with np.load(tmp_path / "few.npz") as loaded:
        assert loaded["frame"].shape[1:] == SHAPE
    with mr.ReplayBuffer.open(source, "r+") as buffer:
        exporter = mr.AutoExport(buffer, tmp_path / "files", format="npz")
        exporter.flush()
        exporter.close()
        (path,) = [path for path, _ in exporter.reports]
    with np.load(path) as loaded:
        np.testing.assert_array_equal(loaded[name], drawn)


def test_files_of_other_values_have_another_name_and_no_statistics(rings, tmp_path):
    source = rings("png")
    with mr.ReplayBuffer.open(source, "r+") as buffer:
        buffer.set_statistics({"number": {"mean": 11.0}})
    for name in ("one.npz", "two.npz"):
        mr.export(source, tmp_path / name, cast={"number": "float64"})
    mr.load([tmp_path / "one.npz", tmp_path / "two.npz"], tmp_path / "both")
    with mr.ReplayBuffer.open(tmp_path / "both") as buffer:
        assert buffer.statistics == {}
        assert len(buffer) == 2 * ROWS


@pytest.mark.parametrize(
    "cast", [None, dict.fromkeys(RAW, "png"), dict.fromkeys(RAW, "uint8"), {"number": "int64"}]
)
def test_rings_with_images_keep_their_name_and_statistics_in_files(rings, tmp_path, cast):
    """With arrays of images, with their files, and with a cast that changes nothing."""
    source = rings("png")
    with mr.ReplayBuffer.open(source, "r+") as buffer:
        buffer.set_statistics({"number": {"mean": 11.0}})
    for name in ("one.npz", "two.npz"):
        mr.export(source, tmp_path / name, cast=cast)
    mr.load(tmp_path / "one.npz", tmp_path / "again")
    with mr.ReplayBuffer.open(tmp_path / "again") as buffer:
        assert buffer.statistics == {"number": {"mean": 11.0}}
    # So rows that two files both have are found.
    with pytest.raises(SchemaError, match="both have the row at position 0"):
        mr.load([tmp_path / "one.npz", tmp_path / "two.npz"], tmp_path / "both")


@pytest.mark.parametrize("form", ["npz", "parquet"])
def test_files_that_are_made_get_a_heap_of_their_own(tmp_path, form):
    """The source's heap holds texts, or smaller files."""
    rng = np.random.default_rng(0)
    fields = {TOP: mr.Field(SHAPE, "uint8"), "note": mr.Field.text(max_bytes=16)}
    with mr.ReplayBuffer.create(
        tmp_path / "texts", mr.Schema.from_flat(fields), 300, heap_bytes="64 KiB"
    ) as buffer:
        for n in range(300):
            frame = rng.integers(0, 256, SHAPE, np.uint8)
            buffer.add(observation={"top": frame}, note=f"note {n}")
    there = tmp_path / f"rows.{form}"
    mr.export(tmp_path / "texts", there, cast={TOP: "jpeg:50"})
    mr.load(there, tmp_path / "again")
    _, rows = rows_of(tmp_path / "again")
    assert rows["note"].text() == [f"note {n}" for n in range(300)]
    # PNG of noise takes more than JPEG.
    mr.load(tmp_path / "again", tmp_path / "tight", heap_bytes="300 KiB")
    mr.load(tmp_path / "tight", tmp_path / "png", cast={TOP: "png"})
    assert len(rows_of(tmp_path / "png")[1]) == 300
    report = mr.load(tmp_path / "tight", tmp_path / "few", cast={TOP: "png"}, heap_bytes="300 KiB")
    left = len(rows_of(tmp_path / "few")[1])
    assert 200 < left < 300
    said = f"the oldest {300 - left} rows were left out: heap_bytes of 307,200 do not hold"
    assert any(said in note for note in report.notes), report.notes


@pytest.mark.parametrize("form", ["npz", "pt", "csv"])
def test_a_layout_of_another_library_gets_arrays(tmp_path, form):
    schema = mr.Schema(
        {
            "observation": mr.Field.image(SHAPE, "png"),
            "action": mr.Field((1,), "float32"),
            "reward": mr.Field((1,), "float32"),
            "terminated": mr.Field((1,), "bool"),
        }
    )
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 4) as buffer:
        for n in range(4):
            buffer.add(
                observation=array(TOP, n), action=[n], reward=[np.float32(n)], terminated=[False]
            )
    there, options = tmp_path / f"a.{form}", {"force": True} if form == "csv" else {}
    report = mr.export(tmp_path / "ring", there, layout="skrl", **options)
    assert [note for note in report.notes if "become arrays" in note]
    mr.load(there, tmp_path / "arrays", layout="skrl")
    schema, rows = rows_of(tmp_path / "arrays")
    assert schema["observation"].encoding is None
    expected = np.stack([array(TOP, n) for n in range(4)])
    np.testing.assert_array_equal(rows["observation"].reshape(expected.shape), expected)
    # In its own layout a table keeps the files.
    mr.export(tmp_path / "ring", tmp_path / "plain.csv")
    mr.load(tmp_path / "plain.csv", tmp_path / "again")
    assert files_of(tmp_path / "again", "observation") == files_of(tmp_path / "ring", "observation")


def test_small_files_of_large_images_are_decoded_a_block_at_a_time(tmp_path, monkeypatch):
    shape = (256, 256, 3)
    schema = mr.Schema({"observation": mr.Field.image(shape, "png")})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 300) as buffer:
        buffer.extend(observation=np.zeros((300, *shape), np.uint8))
    seen = []
    cast = mapped.ImageCast.__call__
    monkeypatch.setattr(
        mapped.ImageCast,
        "__call__",
        lambda self, column: seen.append(len(column)) or cast(self, column),
    )
    nbytes = int(np.prod(shape))
    for target, casts, most in (
        ("rows.npz", None, base.BLOCK_NBYTES),
        ("ring2.parquet", {"observation": "jpeg:90"}, mapped.ENCODED_NBYTES),
    ):
        mr.export(tmp_path / "ring", tmp_path / target, cast=casts)
        assert sum(seen) == 300
        assert max(seen) * nbytes <= most
        seen.clear()


@pytest.mark.parametrize("other", [mr.Field.image(SHAPE, "jpeg", 90), mr.Field.image(GRAY, "png")])
def test_rings_of_other_images_are_not_read_as_one(tmp_path, other):
    fields = {"one": mr.Field.image(SHAPE, "png"), "two": other}
    for name, field in fields.items():
        with mr.ReplayBuffer.create(
            tmp_path / name, mr.Schema({"observation": field}), 4
        ) as buffer:
            buffer.add(observation=np.zeros(field.drawn.shape, np.uint8))
    with pytest.raises(SchemaError, match=r"field 'observation' is png image .* in .*one, and"):
        mr.export([tmp_path / "one", tmp_path / "two"], tmp_path / "rows.npz")


def test_a_field_that_is_cast_may_be_dropped(rings, tmp_path):
    for kind, codec in (("png", "png"), ("raw", "png"), ("jpeg", "uint8")):
        target = tmp_path / f"{kind}.parquet"
        mr.export(rings(kind), target, cast={TOP: codec}, drop=[TOP])
        assert not [name for name in pq.read_schema(target).names if name.endswith("top")]


def test_a_table_has_the_files_as_bytes(rings, tmp_path):
    source = rings("jpeg")
    mr.export(source, tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    (name,) = [each for each in table.column_names if each.endswith("top")]
    assert pa.types.is_binary(table.schema.field(name).type)
    assert table[name].to_pylist() == files_of(source)


def test_arrays_become_files_on_the_way_to_a_table(rings, tmp_path):
    mr.export(rings("raw"), tmp_path / "rows.parquet", cast={TOP: "jpeg:70:444"})
    table = pq.read_table(tmp_path / "rows.parquet")
    (name,) = [each for each in table.column_names if each.endswith("top")]
    expected = [jpeg(array(TOP, n), 70, "444") for n in range(ROWS)]
    assert table[name].to_pylist() == expected
    mr.load(tmp_path / "rows.parquet", tmp_path / "a")
    assert files_of(tmp_path / "a") == expected


# LeRobot


NAME, OURS = "observation.images.top", "observation/images/top"
LENGTHS = (5, 4)
SMALL = (6, 5, 3)


def image_set(folder, files):
    """A set of v3 whose images are such files."""
    data = frames(np.random.default_rng(0), LENGTHS, image=True)
    write(folder, data, files=1)
    (path,) = (folder / "data").rglob("*.parquet")
    table = pq.read_table(path)
    packed = [{"bytes": file, "path": "x.png"} for file in files]
    place = table.column_names.index(NAME)
    pq.write_table(table.set_column(place, NAME, pa.array(packed)), path)
    return folder


def files_in_set(folder):
    return [
        row["bytes"]
        for path in sorted((folder / "data").rglob("*.parquet"))
        for row in pq.read_table(path)[NAME].to_pylist()
    ]


MADE = {
    "png": lambda n: png(camera(SMALL, n)),
    "jpeg": lambda n: by_pillow(camera(SMALL, n), "JPEG", quality=77, optimize=True),
}


@pytest.mark.parametrize("codec", MADE)
@pytest.mark.parametrize("name", [NAME, OURS])
def test_files_of_a_set_stay_as_they_are_and_come_back(tmp_path, codec, name):
    files = [MADE[codec](n) for n in range(sum(LENGTHS))]
    source, ring = image_set(tmp_path / "set", files), tmp_path / "ring"
    report = mr.load(source, ring, cast={name: codec}, done="terminated")
    assert f"images of field {OURS!r} stay the files that they are" in report.notes
    schema, rows = rows_of(ring)
    options = (90, "420") if codec == "jpeg" else ()
    assert schema[OURS] == mr.Field.image(SMALL, codec, *options)
    assert files_of(ring, OURS) == files
    for row, file in enumerate(files):
        assert rows[OURS][row].tolist() == pixels_of(file).tolist()
    # By default, too, images are arrays.
    mr.load(source, tmp_path / "arrays", done="terminated")
    schema, arrays = rows_of(tmp_path / "arrays")
    assert schema[OURS] == mr.Field(SMALL, "uint8")
    assert arrays[OURS].tolist() == rows[OURS].tolist()
    # And back.
    mr.export(ring, tmp_path / "again", format="lerobot", fps=10)
    assert files_in_set(tmp_path / "again") == files
    features = json.loads((tmp_path / "again" / "meta" / "info.json").read_text())["features"]
    assert features[NAME]["dtype"] == "image"
    assert features[NAME]["shape"] == list(SMALL)
    mr.load(tmp_path / "again", tmp_path / "ring2", cast={OURS: codec})
    assert files_of(tmp_path / "ring2", OURS) == files


@pytest.mark.parametrize("codec", MADE)
def test_files_of_the_other_codec_are_encoded(tmp_path, codec):
    other = "png" if codec == "jpeg" else "jpeg"
    files = [MADE[codec](n) for n in range(sum(LENGTHS))]
    source = image_set(tmp_path / "set", files)
    report = mr.load(source, tmp_path / "ring", cast={OURS: other}, done="terminated")
    _, rows = rows_of(tmp_path / "ring")
    for row, file in enumerate(files):
        expected = pixels_of(file)
        if other == "jpeg":
            expected = pixels_of(jpeg(expected))
        assert rows[OURS][row].tolist() == expected.tolist()
    assert any("are stored as" in note for note in report.notes)


@pytest.mark.parametrize("form", ["jpeg:60", "uint8", "png"])
def test_files_of_a_set_become_what_is_asked_for(tmp_path, form):
    files = [MADE["jpeg"](n) for n in range(sum(LENGTHS))]
    source = image_set(tmp_path / "set", files)
    mr.load(source, tmp_path / "ring", cast={OURS: form}, done="terminated")
    _, rows = rows_of(tmp_path / "ring")
    for row, file in enumerate(files):
        expected = pixels_of(file)
        if form == "jpeg:60":
            expected = pixels_of(jpeg(expected, 60))
        assert rows[OURS][row].tolist() == expected.tolist()


UNFIT = {
    "of another codec": (lambda: MADE["png"](3), "it is a PNG"),
    "progressive": (
        lambda: by_pillow(camera(SMALL), "JPEG", progressive=True),
        "it is a progressive JPEG",
    ),
    "of another shape": (lambda: jpeg(camera((5, 6, 3))), r"it is an image of \(5, 6, 3\)"),
    "too large": (
        lambda: (
            jpeg(camera(SMALL))[:2]
            + (b"\xff\xe1\xff\xff" + bytes(65_533)) * 2
            + jpeg(camera(SMALL))[2:]
        ),
        r"it has \d+ bytes",
    ),
    "cut off": (lambda: MADE["jpeg"](6)[:-5], "it is cut off: it has no end marker"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_file_that_cannot_stay_is_named_with_the_way_out(tmp_path, kind):
    make_file, what = UNFIT[kind]
    files = [MADE["jpeg"](n) for n in range(sum(LENGTHS))]
    files[6] = make_file()
    source = image_set(tmp_path / "set", files)
    message = (
        rf"{NAME}.*, row \d+, cannot be stored as it is, as {what}\. Cast the field to "
        "jpeg:90:420, which encodes it again"
    )
    with pytest.raises(CorruptError, match=message):
        mr.load(source, tmp_path / "ring", cast={OURS: "jpeg"}, done="terminated")
    assert not (tmp_path / "ring").exists()
    if kind in ("of another codec", "progressive", "too large"):
        mr.load(source, tmp_path / "ring", cast={OURS: "jpeg:90:420"}, done="terminated")
        _, rows = rows_of(tmp_path / "ring")
        assert rows[OURS][6].tolist() == pixels_of(jpeg(pixels_of(files[6]))).tolist()


def test_videos_are_decoded_where_images_are_asked_for(tmp_path):
    pytest.importorskip("av")
    lengths = (5, 3)
    source = make(tmp_path / "set", lengths, {NAME: {(0, 0): [0, 1]}})
    with pytest.raises(mr.ReplayError, match=r"has videos, of .*cast"):
        mr.load(source, tmp_path / "ring", done="terminated")
    mr.load(source, tmp_path / "arrays", video="decode", done="terminated")
    _, arrays = rows_of(tmp_path / "arrays")
    for form, options in (("jpeg:85:444", (85, "444")), ("jpeg", (90, "420"))):
        ring = tmp_path / form.replace(":", "-")
        mr.load(source, ring, cast={NAME: form}, done="terminated")
        assert files_of(ring, OURS) == [jpeg(each, *options) for each in arrays[OURS]]
    with mr.ReplayBuffer.open(ring) as buffer:
        assert buffer.metadata.heap_nbytes < arrays[OURS].nbytes + 5 * (64 << 10)
    mr.load(source, tmp_path / "png", cast={OURS: "png"}, done="terminated")
    _, rows = rows_of(tmp_path / "png")
    assert rows[OURS].tolist() == arrays[OURS].tolist()


def test_a_video_of_which_nothing_is_said_is_refused(tmp_path):
    pytest.importorskip("av")
    wrist, other = "observation.images.wrist", "observation/images/wrist"
    source = make(tmp_path / "set", (5, 3), {name: {(0, 0): [0, 1]} for name in (NAME, wrist)})
    with pytest.raises(FormatError) as refused:
        mr.load(source, tmp_path / "ring", done="terminated")
    assert f"has videos, of {NAME!r}, {wrist!r}. Cast them" in str(refused.value)
    assert f"--cast {OURS}=jpeg:90:420 --cast {other}=jpeg:90:420; or pass" in str(refused.value)
    message = (
        rf"nothing says what becomes of the videos of {wrist!r}\. Cast them \(--cast "
        rf"{other}=jpeg:90:420, or =uint8 for arrays\), or leave them out with drop= \(--drop\)"
    )
    for options in (
        {"cast": {OURS: "png"}},
        {"drop": [OURS]},
        {"drop": [NAME]},
        {"cast": {OURS: "png"}, "where": "length > 3"},
        {"cast": {OURS: "png"}, "fields": ["observation"]},
    ):
        with pytest.raises(FormatError, match=message):
            mr.load(source, tmp_path / "ring", done="terminated", **options)
        if options != {"drop": [NAME]}:
            with pytest.raises(FormatError, match=message):
                mr.load([source, source], tmp_path / "ring", done="terminated", **options)
    for drop in (5, OURS):
        with pytest.raises(SchemaError, match=r"drop must be a list of paths, got .* Pass "):
            mr.load(source, tmp_path / "ring", done="terminated", drop=drop)
    assert not (tmp_path / "ring").exists()
    several = {
        "arrays": {"cast": {OURS: "png", other: "uint8"}},
        "all": {"cast": {OURS: "png"}, "video": "decode"},
        "dropped": {"cast": {OURS: "png"}, "drop": [other]},
        "below": {"drop": ["observation/images"]},
        "fields": {"fields": ["observation/state", "action"]},
        "one": {"fields": [OURS, "action"], "cast": {OURS: "png"}},
        "both": {"cast": {OURS: "uint8", other: "uint8"}},
        "some": {"fields": ["observation/state", "action"], "where": "length > 3", "unique": True},
        "long": {"cast": {"observation/images/top": "png", other: "png"}, "where": "length > 3"},
    }
    for name, options in several.items():
        mr.load(source, tmp_path / name, done="terminated", **options)
        mr.load([source, source], tmp_path / f"{name}-twice", done="terminated", **options)
    with mr.ReplayBuffer.open(tmp_path / "arrays") as buffer:
        assert buffer.schema[OURS].encoding is not None
        assert buffer.schema[other] == mr.Field((64, 64, 3), "uint8")
        wanted = buffer.gather_all()
    with mr.ReplayBuffer.open(tmp_path / "all") as buffer:
        assert np.array_equal(buffer.gather_all()[other], wanted[other])
    for name, there in (("dropped", [OURS]), ("below", []), ("fields", []), ("one", [OURS])):
        with mr.ReplayBuffer.open(tmp_path / name) as buffer:
            assert [path for path in buffer.schema.paths if "images" in path] == there


def test_cameras_are_decoded_side_by_side_and_each_in_order(tmp_path, monkeypatch):
    pytest.importorskip("av")
    lengths = (9, 6, 7)
    names = [NAME, "observation.images.wrist"]
    source = make(tmp_path / "set", lengths, {name: {(0, 0): [0, 1, 2]} for name in names})
    mr.load(source, tmp_path / "arrays", video="decode", done="terminated")
    _, arrays = rows_of(tmp_path / "arrays")
    monkeypatch.setattr(mapped, "ENCODED_NBYTES", 0)
    monkeypatch.setattr(mapped, "default_rows", lambda _: 5)
    read, both = images.VideoRows.read, threading.Barrier(2, timeout=30)
    met = []

    def reads(self, first, stop):
        if threading.current_thread().name.startswith("mmreplay-decode"):
            # Each waits for the other camera, which would break one after another.
            met.append(both.wait())
        return read(self, first, stop)

    monkeypatch.setattr(images.VideoRows, "read", reads)
    mr.load(source, tmp_path / "ring", cast=dict.fromkeys(names, "png"), done="terminated")
    assert sorted(met) == [0] * 5 + [1] * 5
    assert not [t for t in threading.enumerate() if t.name.startswith("mmreplay-decode")]
    _, rows = rows_of(tmp_path / "ring")
    for path in (OURS, OURS.replace("top", "wrist")):
        assert rows[path].tolist() == arrays[path].tolist()


def test_files_of_one_camera_and_arrays_of_another_are_read_by_no_two_threads(
    tmp_path, monkeypatch, cli
):
    pytest.importorskip("av")
    names, wrist = [NAME, "observation.images.wrist"], "observation/images/wrist"
    lengths = {"a": (9, 6, 7), "b": (8, 5)}
    sources = [
        make(tmp_path / name, each, {camera: {(0, 0): [*range(len(each))]} for camera in names})
        for name, each in lengths.items()
    ]
    mr.load(sources, tmp_path / "arrays", video="decode", done="terminated")
    _, arrays = rows_of(tmp_path / "arrays")
    monkeypatch.setattr(mapped, "ENCODED_NBYTES", 0)
    monkeypatch.setattr(mapped, "default_rows", lambda _: 3)
    # Who takes a block reads no frames beside the threads that decode the next one.
    read, threads = images.VideoRows.read, set()

    def reads(self, first, stop):
        if (first, stop) != (0, 1):
            threads.add(threading.current_thread().name[:15])
        return read(self, first, stop)

    monkeypatch.setattr(images.VideoRows, "read", reads)
    for number, casts in enumerate(({OURS: "uint8", wrist: "png"}, {OURS: "png", wrist: "uint8"})):
        ring = tmp_path / f"ring{number}"
        mr.load(sources, ring, cast=casts, done="terminated")
        _, rows = rows_of(ring)
        for path in (OURS, wrist):
            assert np.array_equal(rows[path], arrays[path])
    assert threads == {"mmreplay-decode"}
    # From set to set the frames of the other camera stay video, which the writer reads.
    code, _, err = cli(sources[0], tmp_path / "out", "--to", "lerobot", "--cast", f"{OURS}=png")
    assert code == 0, err
    mr.load(tmp_path / "out", tmp_path / "again", video="decode", cast={OURS: "uint8"})
    _, rows = rows_of(tmp_path / "again")
    assert np.array_equal(rows[OURS], arrays[OURS][:22])
    # Its packets depend on others, so that it was encoded again.
    assert np.abs(rows[wrist].astype(int) - arrays[wrist][:22]).mean() < 8


def test_exports_to_a_set_have_files_as_images_and_arrays_as_video(rings, tmp_path):
    pytest.importorskip("av")
    shape = (64, 64, 3)
    schema = mr.Schema.from_flat(
        {
            "observation/images/top": mr.Field.image(shape, "jpeg", 90),
            "observation/images/side": mr.Field(shape, "uint8"),
            "action": mr.Field((2,), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    ring = tmp_path / "ring"
    with mr.ReplayBuffer.create(ring, schema, 20) as buffer:
        for n in range(8):
            both = {"top": camera(shape, n), "side": camera(shape, n)}
            buffer.add(
                observation={"images": both}, action=np.zeros(2, "f4"), terminated=n % 4 == 3
            )
    report = mr.export(ring, tmp_path / "set", format="lerobot", fps=10, video=True)
    said = (
        "files of 'observation/images/top' go into the set as they are. A set that is made with "
        "video= and the names of all images that become video has video of them"
    )
    assert said in report.notes
    features = json.loads((tmp_path / "set" / "meta" / "info.json").read_text())["features"]
    assert features["observation.images.top"]["dtype"] == "image"
    assert features["observation.images.side"]["dtype"] == "video"
    assert files_in_set(tmp_path / "set") == files_of(ring, "observation/images/top")
    report = mr.export(ring, tmp_path / "images", format="lerobot", fps=10, video=False)
    assert not [note for note in report.notes if "files of" in note]
    # Where it is named a camera of files becomes video, too.
    mr.export(ring, tmp_path / "video", format="lerobot", fps=10, video=[NAME])
    features = json.loads((tmp_path / "video" / "meta" / "info.json").read_text())["features"]
    assert features["observation.images.top"]["dtype"] == "video"
    # The ring's schema comes back, with arrays.
    mr.load(tmp_path / "set", tmp_path / "again", video="decode")
    schema, rows = rows_of(tmp_path / "again")
    assert schema["observation/images/top"] == mr.Field(shape, "uint8")
    _, old = rows_of(ring)
    assert rows[OURS].tolist() == old[OURS].tolist()


# What is refused


@pytest.mark.parametrize(
    ("kind", "cast", "message"),
    [
        ("raw", {"number": "png"}, r"cast: field 'number' must be images uint8 \[height, width, 1"),
        ("raw", {"number": "jpeg"}, r"or 3\] to become jpeg, got int64\[\]\. Cast other fields"),
        ("raw", {TOP: "jpeg:0"}, r"image quality must be an integer in \[1, 100\], got 0"),
        ("raw", {TOP: "jpeg:101"}, "image quality must be .* got 101"),
        ("raw", {TOP: "jpeg:90:421"}, "image subsampling must be .* got '421'"),
        ("raw", {TOP: "jpeg:90:"}, "image subsampling must be"),
        ("raw", {TOP: "JPEG:90"}, r"got 'JPEG:90'\. Did you mean 'jpeg:90'\?"),
        ("raw", {TOP: "jpeg:"}, "cast: images of field 'observation/top' become uint8, png, or jp"),
        ("raw", {TOP: "jpeg:x"}, "such as jpeg:90:420, got 'jpeg:x'. Write one of these"),
        ("raw", {TOP: "jpeg:-5"}, "such as jpeg:90:420, got 'jpeg:-5'"),
        ("raw", {TOP: "jpeg:\N{SUPERSCRIPT TWO}"}, "such as jpeg:90:420, got 'jpeg:"),
        ("raw", {TOP: "jpeg:9.5"}, "got 'jpeg:9.5'"),
        ("raw", {TOP: "jpeg:90:420:1"}, "got 'jpeg:90:420:1'"),
        ("raw", {TOP: "png:9"}, "got 'png:9'"),
        ("raw", {TOP: "webp"}, r"got 'webp'\. Use one of them\. Images also become jpeg:90:420 or"),
        ("raw", {TOP: "jpg:90:420"}, r"got 'jpg:90:420'\. Did you mean 'jpeg:90:420'\?"),
        ("raw", {TOP: "PNG"}, r"uint8, got 'PNG'\. Did you mean 'png'\?"),
        ("jpeg", {TOP: "float32"}, "cast: images of field 'observation/top' become uint8, png"),
        ("jpeg", {TOP: "webp"}, r"got 'webp'\. Use one of them\. Images also become"),
        ("jpeg", {TOP: None}, "cast"),
        ("jpeg", {TOP: 8}, "cast"),
        ("jpeg", {"observation/tip": "jpeg"}, "observation/tip"),
        ("jpeg", {"terminated": "jpeg"}, r"cast: field 'terminated' must be images uint8 .*bool"),
    ],
)
def test_casts_that_are_none_are_refused(rings, tmp_path, kind, cast, message):
    source = rings(kind, 2)
    with pytest.raises(SchemaError, match=message):
        mr.load(source, tmp_path / "target", cast=cast)
    with pytest.raises(SchemaError, match=message):
        mr.export(source, tmp_path / "target.npz", cast=cast)
    assert [path.name for path in tmp_path.iterdir()] == [kind]


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (mr.Field((8, 8), "uint8"), r"must be images uint8 \[.*\] to become png, got uint8\[8, 8"),
        (mr.Field((8, 8, 3), "float32"), r"to become png, got float32\[8, 8, 3\]"),
        (mr.Field((8, 8, 3, 1), "uint8"), r"to become png, got uint8\[8, 8, 3, 1\]"),
        (mr.Field((8, 8, 4), "uint8"), r"image shape must be .* got \(8, 8, 4\)"),
        (mr.Field((8, 8, 3), "uint8", mutable=True), "'x' is mutable, and images never change"),
        (mr.Field((None,), "uint8", max_length=9), r"to become png, got uint8\[up to 9\]"),
        (mr.Field.text(max_bytes=9), "to become png, got text"),
        (mr.Field.bytes(max_bytes=9), "to become png, got bytes"),
    ],
)
def test_only_images_become_files(tmp_path, field, message):
    options = {"heap_bytes": 8192} if field.varies else {}
    schema = mr.Schema({"x": field, "n": mr.Field((), "int8")})
    mr.ReplayBuffer.create(tmp_path / "ring", schema, 9, **options).close()
    with pytest.raises(SchemaError, match=message):
        mr.load(tmp_path / "ring", tmp_path / "target", cast={"x": "png"})
    assert not (tmp_path / "target").exists()


def test_info_shows_how_images_are_encoded(rings, capsys):
    assert run(["info", str(rings("jpeg", 2))]) == 0
    assert re.search(rf"{TOP} +jpeg .* jpeg:90:420$", capsys.readouterr().out, re.M)


def test_plan_names_a_conversion_that_runs(rings, tmp_path, capsys):
    flat = {path: np.zeros(SHAPE if path == TOP else GRAY, np.uint8) for path in RAW}
    ring = rings("png", value=lambda path, _: flat[path])
    assert run(["plan", str(ring)]) == 0
    # A long line is broken at a space.
    words = capsys.readouterr().out.partition(f"convert with --cast {TOP}=uint8 ")[2].split()[:4]
    command = ["convert", str(ring), str(tmp_path / "packed"), "--cast", f"{TOP}=uint8", *words]
    assert run(command) == 0
    with mr.ReplayBuffer.open(tmp_path / "packed") as buffer:
        assert words == ["--engine", "zarr", "--codec", buffer.metadata.sharding.codec]


def test_a_codec_is_no_dtype():
    with pytest.raises(SchemaError, match=r"got 'jpg'\. Declare images by Field\.image"):
        mr.Field((8, 8, 3), "jpg")


def test_a_format_without_files_gets_arrays_alone(rings, tmp_path):
    h5py = pytest.importorskip("h5py")
    message = (
        r"field 'observation/depth' varies from step to step, which format 'd4rl' cannot store\. "
        r"Declare arrays of this shape \(a conversion makes them with cast=, --cast "
        r"observation/depth=uint8\), or leave the field out\."
    )
    with pytest.raises(SchemaError, match=f"^{message}"):
        mr.export(rings("png"), tmp_path / "a.hdf5", cast={DEPTH: "png"})
    assert not (tmp_path / "a.hdf5").exists()
    schema = mr.Schema(
        {
            "observation": mr.Field.image(SHAPE, "png"),
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
        }
    )
    frames = np.stack([array(TOP, n) for n in range(4)])
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 10) as buffer:
        for n, frame in enumerate(frames):
            buffer.add(observation=frame, action=n, reward=np.float32(n), terminated=n == 3)
    mr.export(tmp_path / "ring", tmp_path / "a.hdf5")
    with h5py.File(tmp_path / "a.hdf5") as file:
        np.testing.assert_array_equal(file["observations"][()], frames)


def test_a_damaged_file_of_a_source_is_named(rings, tmp_path):
    source = rings("jpeg")
    forge(source, TOP, 4, ended_early)
    message = (
        r"field 'observation/top': the image of environment 0, position 4 as the target "
        r"counts, is no jpeg image \[18, 22, 3\] "
        r"\(.+\)\. The source is damaged: drop the field, leave out the episode, or restore the "
        r"source from a copy\."
    )
    for form in ("uint8", "png", "jpeg:50"):
        with pytest.raises(SourceError, match=message):
            mr.load(source, tmp_path / "target", cast={TOP: form})
        assert not (tmp_path / "target").exists()
    with pytest.raises(SourceError, match=message):
        mr.export(source, tmp_path / "target.npz")
    assert not (tmp_path / "target.npz").exists()


def test_files_that_are_no_such_images_are_refused_by_their_row(rings, tmp_path):
    there = tmp_path / "rows.npz"
    mr.export(rings("jpeg", 3), there, cast={TOP: "jpeg"})
    with np.load(there) as loaded:
        arrays = dict(loaded)
    (values,) = [name for name in arrays if name.startswith(f"{TOP}") and "offset" not in name]
    (offsets,) = [name for name in arrays if name.startswith(f"{TOP}") and "offset" in name]
    begin, end = arrays[offsets][1:3]
    nbytes = end - begin
    for file, what in (
        (png(np.zeros(SHAPE, np.uint8)), "it is a PNG"),
        (jpeg(camera((4, 4, 3)), 1), r"it is an image of \(4, 4, 3\)"),
        (b"text", "it is no JPEG"),
        (files_of(tmp_path / "jpeg")[1][:-2], "it is cut off: it has no end marker"),
    ):
        changed = arrays[values].copy()
        changed[begin:end] = np.frombuffer(file.ljust(nbytes, b"\0")[:nbytes], np.uint8)
        np.savez(there, allow_pickle=False, **arrays | {values: changed})
        message = (
            rf"observation/top.*, row 1 must be jpeg image \[18, 22, 3\], but {what}\. The file "
            "was edited or damaged: restore it from a copy"
        )
        with pytest.raises(CorruptError, match=message):
            mr.load(there, tmp_path / "target")
        assert not (tmp_path / "target").exists()


# The size of what is unpacked


@pytest.fixture
def low_limits(monkeypatch):
    monkeypatch.setattr(transfer, "EXPANSION", 2)
    monkeypatch.setattr(transfer, "LEAST_EXPANDED_NBYTES", 100)


def warnings_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [each for each in caught if "images become about" in str(each.message)]


def flat_set(tmp_path):
    """A set of images that hardly take space."""
    files = [png(np.zeros((200, 200, 3), np.uint8)) for _ in range(sum(LENGTHS))]
    folder = image_set(tmp_path / "set", files)
    info = json.loads((folder / "meta" / "info.json").read_text())
    info["features"][NAME]["shape"] = [200, 200, 3]
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


@pytest.mark.usefixtures("low_limits")
def test_what_becomes_many_times_larger_is_said_with_the_way_out(tmp_path, cli):
    source = flat_set(tmp_path)
    (said,) = warnings_of(lambda: mr.load(source, tmp_path / "a", done="terminated"))
    assert said.category is transfer.SizeWarning
    assert said.filename == __file__
    text = str(said.message)
    assert text.startswith("images become about 1.0 MiB of arrays, ") or "MiB" in text
    assert f" of {source}. cast={{'{OURS}': 'jpeg:90:420'}} (--cast {OURS}=jpeg:90:420)" in text
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = cli(source, tmp_path / "c", "-o", "done=terminated")
    assert code == 0
    assert f"(--cast {OURS}=jpeg:90:420) stores them" in err
    assert "Warning" not in err
    # Shards are compressed, and so are files of images.
    for options in ({"engine": "zarr"}, {"cast": {OURS: "png"}}, {"cast": {OURS: "jpeg:90:420"}}):
        target = tmp_path / "b"
        assert not warnings_of(
            lambda: mr.load(source, target, done="terminated", overwrite=True, **options)  # noqa: B023
        )


def test_sets_of_usual_size_are_not_said_to_become_large(tmp_path):
    assert not warnings_of(lambda: mr.load(flat_set(tmp_path), tmp_path / "a", done="terminated"))


# The command


def test_the_command_casts_images(rings, tmp_path, cli):
    source = rings("raw")
    code, out, _ = cli(source, tmp_path / "jpeg", "--cast", f"{TOP}=jpeg:80:444")
    assert code == 0
    assert "are stored as jpeg:80:444, which changes them" in out
    assert files_of(tmp_path / "jpeg") == [jpeg(array(TOP, n), 80, "444") for n in range(ROWS)]
    code, out, _ = cli(tmp_path / "jpeg", tmp_path / "arrays", "--cast", f"{TOP}=uint8")
    assert code == 0
    code, _, err = cli(source, tmp_path / "none", "--cast", f"{TOP}=jpeg:800")
    assert (code, (tmp_path / "none").exists()) == (3, False)
    assert "image quality must be an integer in [1, 100], got 800" in err


def test_functions_of_episodes_get_what_they_change(rings, tmp_path):
    seen = []

    def dark(columns):
        seen.append(type(columns[TOP]))
        return {TOP: columns[TOP] // 2}

    mr.load(rings("raw"), tmp_path / "a", map=dark, cast={TOP: "png"})
    _, rows = rows_of(tmp_path / "a")
    for row, number in enumerate(rows["number"].tolist()):
        assert rows[TOP][row].tolist() == (array(TOP, number) // 2).tolist()
    assert set(seen) == {np.ndarray}

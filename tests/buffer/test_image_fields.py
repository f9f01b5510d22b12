"""Images in buffers: what is drawn is what the libraries see in the stored files."""

import hashlib
import struct
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import suppress
from functools import partial

import google_crc32c
import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.errors import CorruptError, FailedError, SchemaError, VersionError
from mmreplay.format import metadata as metadata_file
from mmreplay.schema import image_values, images
from mmreplay.schema.field import REFERENCE
from mmreplay.schema.images import ImageEncoding
from mmreplay.testing.disks import QuickDisk, using
from tests.ctrl_c import CtrlC
from tests.forks import in_child
from tests.schema.image_files import camera, jpeg, jpeg_of, noise, pixels_of, png, segments_of
from tests.slices import count


@pytest.fixture(autouse=True)
def quick_disk():
    """A disk that syncs nothing: no test here cuts the power."""
    with using(QuickDisk()):
        yield


TOP, DEPTH = (12, 14, 3), (9, 7, 1)
FIELDS = {
    "observation": {
        "top": mr.Field.image(TOP, "jpeg", 80, "444"),
        "depth": mr.Field.image(DEPTH, "png"),
    },
    "action": mr.Field((), "int64"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
SCHEMA = mr.Schema(FIELDS)
PATHS = ("observation/top", "observation/depth")
ENGINES = ["memmap", "zarr", "memory"]
HEAP, DATA = 1 << 21, "data-000001"


def create(tmp_path, engine="memmap", capacity=60, num_envs=1, schema=SCHEMA, **options):
    options = {"heap_bytes": HEAP, "commit_every": None, "autoreset": "disabled"} | options
    path = None if engine == "memory" else tmp_path / "ring"
    return mr.ReplayBuffer.create(path, schema, capacity, num_envs, engine=engine, **options)


def reopened(buffer, tmp_path, **options):
    """The same rows, after a close where they lie on disk."""
    if buffer.metadata.engine == "memory":
        return buffer
    buffer.close()
    return mr.ReplayBuffer.open(tmp_path / "ring", **options)


def file_of(path, number):
    """The file of a step's image, whichever form it is given in."""
    if path.endswith("top"):
        return jpeg(camera(TOP, number), 80, "444")
    return png(camera(DEPTH, number), compress_level=1)


def pixels(path, number):
    return pixels_of(file_of(path, number))


FORMS = {
    "array": lambda path, n: camera(TOP if path.endswith("top") else DEPTH, n),
    "bytes": file_of,
    "tensor": lambda path, n: torch.from_numpy(FORMS["array"](path, n)),
    "bytearray": lambda path, n: bytearray(file_of(path, n)),
    "memoryview": lambda path, n: memoryview(file_of(path, n)),
    "bytes as array": lambda path, n: np.frombuffer(file_of(path, n), np.uint8),
    "bytes as tensor": lambda path, n: torch.tensor(list(file_of(path, n)), dtype=torch.uint8),
    "view": lambda path, n: np.asfortranarray(FORMS["array"](path, n)),
}


def value(path, number, form=None):
    """A step's image in one of the forms."""
    form = list(FORMS)[number % len(FORMS)] if form is None else form
    return FORMS[form](path, number)


def ends(*shape):
    return {name: np.zeros(shape, bool) for name in ("terminated", "truncated")}


def step(number, form=None, **more):
    return {
        "observation": {path[12:]: value(path, number, form) for path in PATHS},
        "action": number,
        **ends(),
        **more,
    }


def filled(tmp_path, steps=20, form=None, **options):
    buffer = create(tmp_path, **options)
    for number in range(steps):
        buffer.add(step(number, form, terminated=number % 8 == 7))
    return buffer


def assert_pixels(batch, numbers=None):
    """Each step's images are those of its number."""
    for path in PATHS:
        for row, number in enumerate(batch["action"] if numbers is None else numbers):
            assert batch[path][row].tolist() == pixels(path, int(number)).tolist(), (path, row)


# What is added


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_is_stored_as_the_same_file(tmp_path, engine, form):
    buffer = create(tmp_path, engine)
    buffer.add(step(0, form))
    # Beside the form that needs no list where there is one environment.
    listed = {path[12:]: [value(path, 1, form)] for path in PATHS}
    buffer.add(observation=listed, action=1, **ends())
    several = {path[12:]: [value(path, n, form) for n in (2, 3)] for path in PATHS}
    buffer.extend(observation=several, action=[2, 3], **ends(2))
    nested = {path[12:]: [[value(path, n, form)] for n in (4, 5)] for path in PATHS}
    buffer.extend(observation=nested, action=[[4], [5]], **ends(2, 1))
    ragged = {path[12:]: ragged_of([file_of(path, n) for n in (6, 7)]) for path in PATHS}
    buffer.extend(observation=ragged, action=[6, 7], **ends(2))
    with reopened(buffer, tmp_path) as buffer:
        assert_pixels(buffer.gather_all(), range(8))
        for path in PATHS:
            files = buffer.view.read_values((path,), np.zeros(8, np.int64), np.arange(8))[path]
            assert [bytes(file) for file in files] == [file_of(path, n) for n in range(8)]


def ragged_of(files, shape=None):
    offsets = np.cumsum([0, *map(len, files)], dtype=np.int64)
    ragged = mr.Ragged(np.frombuffer(b"".join(files), np.uint8), offsets)
    return ragged if shape is None else ragged.reshape(*shape)


@pytest.mark.parametrize("engine", ENGINES)
def test_several_environments_and_lists_of_mixed_forms(tmp_path, engine):
    envs, buffer = 3, create(tmp_path, engine, num_envs=3)
    number, expected = 0, {}

    def numbers(steps, ids):
        nonlocal number
        made = number + np.arange(steps * len(ids)).reshape(steps, len(ids))
        number += made.size
        for n, env in zip(made.ravel(), list(ids) * steps, strict=True):
            expected.setdefault(env, []).append(int(n))
        return made

    def nested(path, made):
        return [[value(path, int(n)) for n in row] for row in made]

    for _ in range(3):
        (row,) = numbers(1, range(envs))
        columns = {path[12:]: nested(path, [row])[0] for path in PATHS}
        buffer.add(observation=columns, action=row, **ends(envs))
    (row,) = numbers(1, [2, 0])
    columns = {path[12:]: nested(path, [row])[0] for path in PATHS}
    buffer.add(observation=columns, action=row, env_ids=[2, 0], **ends(2))
    made = numbers(4, range(envs))
    columns = {path[12:]: nested(path, made) for path in PATHS}
    buffer.extend(observation=columns, action=made, **ends(4, envs))
    made = numbers(2, range(envs))
    columns = {
        path[12:]: np.array([[value(path, int(n), "array") for n in row] for row in made])
        for path in PATHS
    }
    buffer.extend(observation=columns, action=made, **ends(2, envs))
    made = numbers(2, range(envs))
    columns = {
        path[12:]: ragged_of([file_of(path, int(n)) for n in made.ravel()], (2, envs))
        for path in PATHS
    }
    buffer.extend(observation=columns, action=made, **ends(2, envs))
    (row,) = numbers(1, range(envs))
    tensors = {
        path[12:]: torch.stack([value(path, int(n), "tensor") for n in row]) for path in PATHS
    }
    buffer.add(observation=tensors, action=row, **ends(envs))
    (row,) = numbers(1, range(envs))
    cells = {path[12:]: objects(nested(path, [row])[0]) for path in PATHS}
    buffer.add(observation=cells, action=row, **ends(envs))
    with reopened(buffer, tmp_path) as buffer:
        found = buffer.gather_all()
        assert found["action"].tolist() == [n for env in range(envs) for n in expected[env]]
        assert_pixels(found)


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("steps", [1, 9])
def test_ctrl_c_while_images_are_encoded_loses_none_and_tears_none(
    tmp_path, monkeypatch, engine, steps
):
    # Even small blocks are encoded by threads.
    monkeypatch.setattr(images, "ALONE_NBYTES", 0)
    schema = mr.Schema(
        {"image": mr.Field.image((120, 160, 3), quality=90), "number": mr.Field((), "int64")}
    )
    frames = [camera((120, 160, 3), number) for number in range(steps)]
    buffer = create(tmp_path, engine, capacity=50, schema=schema, heap_bytes=4 << 20)
    numbers = []
    with CtrlC(count(200, 25)) as ctrl_c:
        while ctrl_c.comes():
            block = {"image": frames, "number": np.arange(steps)}
            call = partial(buffer.extend, block)
            if steps == 1:
                call = partial(buffer.add, image=frames[0], number=0)
            with suppress(KeyboardInterrupt):
                ctrl_c.during(call)
            # Of a block that was struck, the first steps may be in.
            more = int(buffer.heads[0]) - len(numbers)
            assert 0 <= more <= steps
            numbers += range(more)
    assert ctrl_c.strikes
    buffer.add(image=frames[0], number=0)
    with reopened(buffer, tmp_path) as buffer:
        rows = buffer.gather_all()
        assert rows["number"].tolist() == [*numbers, 0][-50:]
        wanted = [pixels_of(jpeg(frame)) for frame in frames]
        for image, number in zip(rows["image"], rows["number"], strict=True):
            assert np.array_equal(image, wanted[int(number)])
    report = mr.verify_buffer(tmp_path / "ring", deep=True)
    assert report.ok, report


def objects(values):
    cells = np.empty(len(values), object)
    for at, each in enumerate(values):
        cells[at] = each
    return cells


ONE = mr.Schema({"image": mr.Field.image(TOP, "png"), "number": mr.Field((), "int64")})


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (
            np.zeros((12, 14), np.uint8),
            r"field 'image' must be an image uint8\[12, 14, 3\] or a png file, got uint8\[12, 14\]"
            r"\. Check shape and dtype; floats are multiplied by 255 first",
        ),
        (np.zeros((14, 12, 3), np.uint8), r"got uint8\[14, 12, 3\]"),
        (np.zeros((3, 12, 14), np.uint8), r"got uint8\[3, 12, 14\]"),
        (np.zeros(TOP, np.float32), r"got float32\[12, 14, 3\]"),
        (np.zeros(TOP, np.int64), r"got int64\[12, 14, 3\]"),
        (np.zeros(TOP, bool), r"got bool\[12, 14, 3\]"),
        (np.zeros(9, np.int8), r"got int8\[9\]"),
        (np.zeros((), np.uint8), r"got uint8\[\]"),
        (None, "must be an image .* got None"),
        ("text", "got 'text'"),
        (7, r"got int64\[\]"),
        (b"text", "field 'image' must be png image .*, but it is no PNG. Pass an array, or a png"),
        (b"", "but it has no bytes"),
        (np.frombuffer(b"text", np.uint8), "but it is no PNG"),
        ([], r"must be an image uint8\[12, 14, 3\] or a png file, got float64\[0\]"),
        ([b"a", b"b"], "must have 1 image, got 2"),
        (ragged_of([b"a", b"b"]), r"must have images of shape \[1\], got \[2\]\. Use Ragged"),
        (ragged_of([b"text"]), "field 'image'.* but it is no PNG"),
        (mr.Ragged(np.zeros(9, np.float32), [0, 9]), r"value 0 must be .* got float32\[9\]"),
        (mr.Ragged(noise((11, 14, 3)), [0, 11]), r"value 0 must be .* got uint8\[11, 14, 3\]"),
        ([png(noise(TOP)), png(noise(TOP))], "must have 1 image, got 2"),
        ({"a": 1}, "image"),
    ],
)
def test_what_is_no_image_is_refused_and_nothing_is_stored(image, message):
    with create(None, "memory", schema=ONE) as buffer:
        with pytest.raises(SchemaError, match=message):
            buffer.add(image=image, number=0)
        assert buffer.heads.tolist() == [0]


@pytest.mark.parametrize(
    ("images_", "message"),
    [
        ([noise(TOP)], "must have 2 images, got 1. Give one for each"),
        (
            noise(TOP),
            r"must be images uint8\[2, 12, 14, 3\], got uint8\[12, 14, 3\]\. Give one for",
        ),
        (noise((2, 12, 14, 3)).astype(float), r"got float64\[2, 12, 14, 3\]"),
        ([noise(TOP), b"x"], "field 'image', value 1 must be png image .*, but it is no PNG"),
        ([noise(TOP), noise((4, 4, 3))], r"field 'image', value 1 must .* got uint8\[4, 4, 3\]"),
        ([None, noise(TOP)], "field 'image', value 0 must .* got None"),
        (b"file", "must have 2 images, got"),
        ("two", "must have 2 images, got 'two'"),
        (ragged_of([b"a"]), r"must have images of shape \[2\], got \[1\]"),
    ],
)
def test_the_environment_of_what_is_refused_is_named(images_, message):
    with create(None, "memory", num_envs=2, schema=ONE) as buffer:
        with pytest.raises(SchemaError, match=message):
            buffer.add(image=images_, number=[0, 1])
        assert buffer.heads.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("images_", "message"),
    [
        ([[noise(TOP)] * 2, [noise(TOP), b"x"]], "field 'image', step 1, value 1 must be png"),
        ([[noise(TOP)] * 2, [noise(TOP), 5]], "field 'image', step 1, value 1 must be an image"),
        ([[noise(TOP)] * 2, [noise(TOP)]], "field 'image', step 1 must have 2 images, got"),
        ([[noise(TOP)] * 2, b"xx"], "field 'image', step 1 must have 2 images, got b'xx'. Give on"),
        (noise((2, 12, 14, 3)), r"must be a list of values \[T, 2\], got shape \[2, 12, 14, 3\]"),
        (
            noise((2, 2, 12, 13, 3)),
            r"must be images uint8\[2, 2, 12, 14, 3\], got uint8\[2, 2, 12, 13, 3\]\. Give one for "
            "each step",
        ),
    ],
)
def test_the_step_of_what_is_refused_is_named(images_, message):
    with create(None, "memory", num_envs=2, schema=ONE) as buffer:
        with pytest.raises(SchemaError, match=message):
            buffer.extend(image=images_, number=[[0, 1], [2, 3]])
        assert buffer.heads.tolist() == [0, 0]


def test_the_step_is_named_where_there_is_one_environment():
    with create(None, "memory", schema=ONE) as buffer:
        with pytest.raises(SchemaError, match="field 'image', value 1 must be png image"):
            buffer.extend(image=[png(noise(TOP)), b"x"], number=[0, 1])
        assert buffer.heads.tolist() == [0]


# Laws


OTHER = """
import hashlib, sys
import mmreplay as mr
with mr.ReplayBuffer.open(sys.argv[1]) as buffer:
    rows = buffer.gather_all()
    for path in sys.argv[2:]:
        print(hashlib.sha256(rows[path].tobytes()).hexdigest())
"""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.sliced(2)
def test_draws_equal_the_decoded_files_everywhere(tmp_path, engine):
    with reopened(filled(tmp_path, 40, engine=engine), tmp_path) as buffer:
        rows = buffer.gather_all()
        assert_pixels(rows, range(40))
        for path in PATHS:
            assert (rows[path].dtype, rows[path].flags.c_contiguous) == (np.uint8, True)
            column = buffer.get_field(path, 0, [[3, 4], [4, 5]])
            assert column.shape == (2, 2, *rows[path].shape[1:])
            assert column.tolist() == rows[path][[[3, 4], [4, 5]]].tolist()
        assert_pixels(buffer.take(0, [5, 5, 2]), [5, 5, 2])
        batch = buffer.sample(50)
        assert_pixels(batch)
        for path in PATHS:
            for row, number in enumerate(batch["action"].tolist()):
                if not batch["terminated"][row]:
                    after = pixels(path, number + 1)
                    assert batch[f"next_{path}"][row].tolist() == after.tolist()
        if engine != "memory":
            command = [sys.executable, "-c", OTHER, str(tmp_path / "ring"), *PATHS]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            sums = [hashlib.sha256(rows[path].tobytes()).hexdigest() for path in PATHS]
            assert ran.stdout.split() == sums


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.sliced(2)
def test_rows_live_and_are_right_while_the_heap_laps(tmp_path, engine):
    heap = 4 * SCHEMA.max_heap_nbytes
    if engine == "zarr":
        heap *= 4
    buffer = create(tmp_path, engine, capacity=30, heap_bytes=heap)
    for number in range(700):
        buffer.add(step(number, "bytes"))
        if number % 100 == 99:
            rows = buffer.gather_all()
            assert rows["action"].tolist() == list(range(number + 1 - len(rows), number + 1))
            assert_pixels(rows)
    with reopened(buffer, tmp_path) as buffer:
        assert_pixels(buffer.gather_all())


def test_a_row_that_is_overwritten_during_a_draw_is_drawn_again(tmp_path):
    heap = 4 * ONE.max_heap_nbytes
    writer = create(tmp_path, capacity=40, schema=ONE, heap_bytes=heap)

    def add(numbers):
        for number in numbers:
            writer.add(image=noise(TOP, number), number=number)

    add(range(60))
    sampler = mr.UniformSampler(seed=0)
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        pending = reader.view.draw(sampler, 20)
        drawn = pending.draw.positions.copy()
        add(range(60, 1200))
        batch = reader.view.gather(pending)
        assert batch.positions.min() > drawn.max()
        for row, number in enumerate(batch["number"]):
            assert batch["image"][row].tolist() == noise(TOP, int(number)).tolist()
    writer.close()


def test_values_that_change_while_they_are_decoded_are_no_damage(tmp_path, monkeypatch):
    heap = 4 * ONE.max_heap_nbytes
    writer = create(tmp_path, capacity=40, schema=ONE, heap_bytes=heap)
    for number in range(60):
        writer.add(image=noise(TOP, number), number=number)
    decode, done = ImageEncoding.decode, []

    def lapped(encoding, data, out):
        if not done:
            done.append(True)
            for number in range(60, 1200):
                writer.add(image=noise(TOP, number), number=number)
            data = b"torn"
        decode(encoding, data, out)

    monkeypatch.setattr(ImageEncoding, "decode", lapped)
    with mr.ReplayBuffer.open(tmp_path / "ring", sampler=mr.UniformSampler(seed=0)) as reader:
        batch = reader.sample(9)
        assert batch["number"].min() >= 60
        for row, number in enumerate(batch["number"]):
            assert batch["image"][row].tolist() == noise(TOP, int(number)).tolist()
    writer.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_next_observations_are_those_of_final_rows_too(tmp_path, engine, autoreset):
    envs = 2
    schema = mr.Schema({**FIELDS, "info": mr.Field.image(DEPTH, "png")})
    buffer = create(tmp_path, engine, num_envs=envs, schema=schema, autoreset=autoreset)
    following = {}
    for number in range(0, 40, envs):
        numbers = [number, number + 1]
        done = [number % 12 == 10, number % 8 == 6]
        columns = {path[12:]: [value(path, n) for n in numbers] for path in PATHS}
        final = {path[12:]: [value(path, 1000 + n) for n in numbers] for path in PATHS}
        given = {"final_observation": final} if autoreset == "same_step" else {}
        info = [camera(DEPTH, 500 + n) for n in numbers]
        data = {"observation": columns, "action": numbers, "info": info, "terminated": done}
        buffer.add(data | {"truncated": [False] * envs}, **given)
        for n, ended in zip(numbers, done, strict=True):
            following[n] = 1000 + n if ended and autoreset == "same_step" else n + envs
    with reopened(buffer, tmp_path) as buffer:
        batch = buffer.sample(80)
        assert_pixels(batch)
        for row, number in enumerate(batch["action"].tolist()):
            assert batch["info"][row].tolist() == camera(DEPTH, 500 + number).tolist()
            for path in PATHS:
                got = batch[f"next_{path}"][row]
                assert got.tolist() == pixels(path, following[number]).tolist()
        rows = buffer.gather_all()
        final = rows["final"]
        assert final.any()
        # Rows of final observations have nothing else.
        assert not rows["info"][final].any()
        assert rows["info"][~final].any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("engine", ENGINES)
def test_next_observations_may_be_stored(tmp_path, engine):
    schema = mr.Schema({**FIELDS, "next_observation": FIELDS["observation"]})
    with create(tmp_path, engine, schema=schema) as buffer:
        for number in range(20):
            after = {path[12:]: value(path, 1000 + number) for path in PATHS}
            buffer.add(step(number, next_observation=after))
        batch = buffer.sample(30)
        assert_pixels(batch)
        for row, number in enumerate(batch["action"].tolist()):
            for path in PATHS:
                after = pixels(path, 1000 + number)
                assert batch[f"next_{path}"][row].tolist() == after.tolist()


# The loss is said once


@pytest.fixture
def unwarned(monkeypatch):
    monkeypatch.setattr(image_values, "_warned", set())


def losses_of(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [each for each in caught if each.category is mr.LossWarning]


DEFAULTS = mr.Schema({"a": mr.Field.image(TOP), "b": mr.Field.image(TOP, quality=90)})


@pytest.mark.usefixtures("unwarned")
def test_the_loss_of_arrays_is_said_once_where_no_quality_was_chosen():
    with create(None, "memory", schema=DEFAULTS) as buffer:
        files = {name: jpeg(camera(TOP)) for name in "ab"}
        assert not losses_of(lambda: buffer.add(files))
        arrays = {name: camera(TOP) for name in "ab"}
        (loss,) = losses_of(lambda: buffer.add(arrays))
        assert str(loss.message) == (
            "field 'a' stores arrays as JPEG of quality 90, which changes them. Pass quality= to "
            "Field.image to choose, or codec='png', which loses nothing."
        )
        assert loss.filename == __file__
        assert not losses_of(lambda: buffer.add(arrays))
        assert buffer.heads.tolist() == [3]


@pytest.mark.usefixtures("unwarned")
def test_a_warning_that_is_an_error_refuses_each_such_array():
    with create(None, "memory", schema=DEFAULTS) as buffer, warnings.catch_warnings():
        warnings.simplefilter("error", mr.LossWarning)
        for _ in range(2):
            with pytest.raises(mr.LossWarning, match="field 'a'"):
                buffer.add({name: camera(TOP) for name in "ab"})
        assert buffer.heads.tolist() == [0]


# heap_bytes


def test_heap_bytes_hold_a_capacity_of_images_of_usual_size(tmp_path):
    shape = (48, 64, 3)
    for codec, share in (("jpeg", 4), ("png", 1)):
        schema = mr.Schema({"image": mr.Field.image(shape, codec, max_bytes=12_000)})
        planned = -(-(48 * 64 * 3 // share) // 8) * 8
        with mr.ReplayBuffer.create(None, schema, 200, engine="memory") as buffer:
            nbytes = buffer.metadata.heap_nbytes
            assert 200 * planned < nbytes < 200 * planned * 17 / 15 + 3 * 12_000
            image = np.zeros(shape, np.uint8)
            made = buffer.schema["image"].encoding.encode(image)
            # Padded to the size for which there is room.
            made = made + bytes(max(0, planned - len(made) - 8))
            for _ in range(500):
                buffer.add(image=made)
            assert buffer.span.lengths.tolist() == [200]


def test_heap_bytes_of_other_fields_stay_to_be_given(tmp_path):
    schema = mr.Schema({**FIELDS, "prompt": mr.Field.text(max_bytes=9)})
    with pytest.raises(SchemaError, match="heap_bytes must be given, as field 'prompt' varies"):
        create(tmp_path, schema=schema, heap_bytes=None)
    assert not (tmp_path / "ring").exists()
    create(tmp_path, schema=schema, heap_bytes=HEAP).close()


def test_heap_bytes_that_hold_no_four_images_are_refused(tmp_path):
    least = 4 * SCHEMA.max_heap_nbytes
    with pytest.raises(SchemaError, match=f"at least {-(-least // 4096) * 4096} for this"):
        create(tmp_path, heap_bytes=9000)


# Each file is decoded once


@pytest.fixture
def decoded(monkeypatch):
    """A counter of the files that were decoded."""
    count, decode = Counter(), ImageEncoding.decode

    def counted(encoding, data, out):
        count[bytes(data)] += 1
        decode(encoding, data, out)

    monkeypatch.setattr(ImageEncoding, "decode", counted)
    return count


def files_of(path, numbers):
    return {file_of(path, number) for number in numbers}


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_are_drawn_twice_are_decoded_once(tmp_path, engine, decoded):
    with reopened(filled(tmp_path, 6, engine=engine), tmp_path) as buffer:
        decoded.clear()
        assert_pixels(buffer.take(0, [3, 1, 3, 3, 1]))
        top = PATHS[0]
        # Of the steps, and of those after them.
        assert decoded[file_of(top, 3)] == decoded[file_of(top, 1)] == 1
        decoded.clear()
        assert buffer.get_field(top, 0, [[2, 2], [2, 5]]).shape == (2, 2, *TOP)
        assert decoded == {file_of(top, 2): 1, file_of(top, 5): 1}


@pytest.mark.parametrize("first_only", [(), ("image",)])
@pytest.mark.parametrize("engine", ENGINES)
def test_windows_decode_each_row_once_and_only_those_that_they_hold(
    tmp_path, engine, first_only, decoded
):
    sampler = mr.SequenceSampler(4, mr.UniformSampler(seed=0), first_only=first_only)
    schema = mr.Schema({**ONE.fields, "terminated": mr.Field((), "bool")})
    with create(tmp_path, engine, schema=schema, sampler=sampler) as buffer:
        files = {}
        for number in range(50):
            files[png(noise(TOP, number))] = number
            done = number % 7 == 6
            buffer.add(image=png(noise(TOP, number)), number=number, terminated=done)
        batch = buffer.sample(30)
        assert batch["image"].shape == ((30, *TOP) if first_only else (30, 4, *TOP))
        drawn = set()
        for row, step in np.ndindex(30, 1 if first_only else 4):
            got = batch["image"][row] if first_only else batch["image"][row, step]
            if batch.mask is None or batch.mask[row, step]:
                number = int(batch["number"][row, step])
                drawn.add(number)
                assert got.tolist() == noise(TOP, number).tolist()
            else:
                assert not got.any()
        assert decoded.total() == len(decoded)
        assert {files[file] for file in decoded} >= drawn
        if first_only:
            assert {files[file] for file in decoded} == drawn


@pytest.mark.parametrize("axis", [None, -1])
@pytest.mark.parametrize("engine", ENGINES)
def test_stacks_decode_each_row_once(tmp_path, engine, axis, decoded):
    stack = mr.FrameStack(3, paths=[PATHS[0]], axis=axis)
    with filled(tmp_path, 24, engine=engine, transforms=[stack]) as buffer:
        decoded.clear()
        batch = buffer.take(0, np.arange(20))
        frames = batch[PATHS[0]]
        if axis == -1:
            frames = frames.reshape(20, 12, 14, 3, 3).transpose(0, 3, 1, 2, 4)
        assert frames.shape == (20, 3, *TOP)
        for number in range(20):
            begin = number // 8 * 8
            for at in range(3):
                shown = max(begin, number - 2 + at)
                assert frames[number, at].tolist() == pixels(PATHS[0], shown).tolist()
        # Of stacks and of those of the next observations.
        assert max(decoded[file_of(PATHS[0], number)] for number in range(20)) <= 2


# The files themselves


@pytest.mark.parametrize("engine", ENGINES)
def test_encoded_leaves_the_files(tmp_path, engine, decoded):
    ring = filled(tmp_path, 20, engine=engine, transforms=[mr.Encoded("observation/top")])
    with ring as buffer:
        decoded.clear()
        batch = buffer.sample(9)
        for path in ("observation/top", "next_observation/top"):
            assert isinstance(batch[path], mr.Ragged)
        for row, number in enumerate(batch["action"].tolist()):
            assert bytes(batch["observation/top"][row]) == file_of(PATHS[0], number)
            shown = batch["observation/depth"][row]
            assert shown.tolist() == pixels(PATHS[1], number).tolist()
        assert not any(file.startswith(b"\xff\xd8") for file in decoded)
        # Rows that are asked for by name are decoded all the same.
        assert buffer.get_field("observation/top", 0, [3]).shape == (1, *TOP)
        tensors = buffer.sample(3).torch()
        file = tensors["observation/top"][0]
        assert file.dtype == torch.uint8
        assert bytes(file.tolist())[:2] == b"\xff\xd8"


@pytest.mark.parametrize("paths", [None, "observation", ["observation/top", "observation/depth"]])
def test_encoded_takes_all_images_or_a_subtree(tmp_path, paths):
    with filled(tmp_path, 9, engine="memory", transforms=[mr.Encoded(paths)]) as buffer:
        batch = buffer.take(0, [2, 3])
        for path in PATHS:
            assert bytes(batch[path][1]) == file_of(path, 3)
            assert bytes(batch[f"next_{path}"][1]) == file_of(path, 4)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ("observation/tip", r"Encoded: paths must name fields of images, of observation/top, obs"),
        ("action", "Encoded: paths must name fields of images, of .*, got 'action'"),
        (["observation/top", "reward"], "Encoded: paths must name .* got 'reward'"),
        ([3], "Encoded: paths must name .* got 3"),
        (7, "Encoded: paths must be paths of image fields, got 7. Pass one, or a list of them"),
    ],
)
def test_encoded_names_images(tmp_path, paths, message):
    with pytest.raises(SchemaError, match=message):
        create(tmp_path, "memory", transforms=[mr.Encoded(paths)])


def test_encoded_of_a_schema_without_images_is_refused():
    schema = mr.Schema({"number": mr.Field((), "int64")})
    with pytest.raises(SchemaError, match="got 'number' where there are none"):
        create(None, "memory", schema=schema, heap_bytes=None, transforms=[mr.Encoded("number")])


def test_stacks_and_windows_of_files_hold_the_files(tmp_path):
    transforms = [mr.FrameStack(2, paths=["observation/top"]), mr.Encoded("observation/top")]
    with filled(tmp_path, 8, engine="memory", transforms=transforms) as buffer:
        stacked = buffer.take(0, [3])["observation/top"]
        assert stacked.shape == (1, 2)
        assert [bytes(stacked[0, at]) for at in (0, 1)] == [file_of(PATHS[0], n) for n in (2, 3)]
    joined = [mr.FrameStack(2, paths=["observation/top"], axis=-1), mr.Encoded("observation/top")]
    with pytest.raises(SchemaError, match="axis"):
        create(tmp_path, "memory", transforms=joined)


def test_functions_get_arrays(tmp_path):
    def brighter(batch):
        assert batch["observation/top"].dtype == np.uint8
        return {"observation/top": batch["observation/top"] // 2}

    with filled(tmp_path, 9, engine="memory", transforms=[mr.Apply(brighter)]) as buffer:
        batch = buffer.take(0, [2])
        assert batch["observation/top"][0].tolist() == (pixels(PATHS[0], 2) // 2).tolist()


# Torch, loaders, forks


def test_tensors_are_arrays_of_uint8(tmp_path):
    with filled(tmp_path, 9, engine="memory") as buffer:
        batch = buffer.take(0, [2, 3]).torch()
        assert batch["observation/top"].dtype == torch.uint8
        assert batch["observation/top"].shape == (2, *TOP)
        assert batch["observation/top"][1].tolist() == pixels(PATHS[0], 3).tolist()


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_loaders_with_threads_hold_the_same_batches(tmp_path, num_threads, encoded):
    transforms = [mr.Encoded()] if encoded else []
    filled(tmp_path, 20).close()
    path = tmp_path / "ring"
    sampler = mr.UniformSampler(seed=3)
    with mr.ReplayBuffer.open(path, sampler=sampler, transforms=transforms) as alone:
        expected = [alone.sample(8).torch() for _ in range(6)]
    sampler = mr.UniformSampler(seed=3)
    with (
        mr.ReplayBuffer.open(path, sampler=sampler, transforms=transforms) as buffer,
        mr.ReplayLoader(buffer, 8, num_threads=num_threads) as loader,
    ):
        for batch, other in zip(loader, expected, strict=False):
            assert batch["action"].tolist() == other["action"].tolist()
            for name in (*PATHS, *(f"next_{path}" for path in PATHS)):
                if not encoded:
                    assert torch.equal(batch[name], other[name])
                    continue
                for row in range(8):
                    assert torch.equal(batch[name][row], other[name][row])


def test_workers_decode(tmp_path, monkeypatch):
    filled(tmp_path, 20).close()
    monkeypatch.setattr(images, "ALONE_NBYTES", 0)
    dataset = mr.ReplayDataset(tmp_path / "ring")
    # The pool of this process is there when workers are forked.
    assert_pixels(dataset.buffer.take(0, np.arange(9)))
    draws = dataset.draws(mr.ShuffledSampler(seed=0), 6)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=draws,
        collate_fn=mr.collate,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=120,
    )
    batches = list(loader)
    assert sum(len(batch["action"]) for batch in batches) >= 12
    for batch in batches:
        assert_pixels(batch)


def test_a_child_that_is_forked_makes_threads_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "ALONE_NBYTES", 0)
    monkeypatch.setattr(images, "_num_threads", lambda: 2)
    monkeypatch.setattr(images, "_threads", None)
    path = tmp_path / "ring"
    filled(tmp_path, 20).close()

    def rows():
        with mr.ReplayBuffer.open(path) as buffer:
            found = buffer.gather_all()
        return [hashlib.sha256(found[path].tobytes()).hexdigest() for path in PATHS]

    expected = rows()
    assert images._threads is not None
    assert in_child(rows) == repr(expected)
    # Even where another thread was about to make the pool.
    with images._lock:
        assert in_child(rows) == repr(expected)
    assert rows() == expected


# Without the extra


@pytest.mark.parametrize(
    ("module", "said", "path"),
    [
        ("simplejpeg", "simplejpeg, which fields of JPEG images need", PATHS[0]),
        ("PIL", "Pillow, which PNG and packed images need", PATHS[1]),
    ],
)
def test_without_the_extra_all_works_but_to_code(tmp_path, monkeypatch, module, said, path):
    monkeypatch.setattr(images, "ALONE_NBYTES", 0)
    filled(tmp_path, 9).close()
    message = said + r', is not installed. Run: pip install "mmreplay\[images\]"'
    (other,) = {*PATHS} - {path}
    arrays = {path[12:]: value(path, 9, "array"), other[12:]: file_of(other, 9)}
    files = {path[12:]: file_of(path, 10), other[12:]: file_of(other, 10)}
    monkeypatch.setitem(sys.modules, module, None)
    with mr.ReplayBuffer.open(tmp_path / "ring", "r+") as buffer:
        for call in (
            lambda: buffer.sample(4),
            lambda: buffer.take(0, [1, 2]),
            buffer.gather_all,
            lambda: buffer.get_field(path, 0, [1]),
            lambda: buffer.add(observation=arrays, action=9, **ends()),
        ):
            with pytest.raises(FailedError, match=message):
                call()
        assert buffer.heads.tolist() == [9]
        # Files of a camera need nothing.
        buffer.add(observation=files, action=10, **ends())
        assert buffer.get_field("action", 0, [9]).tolist() == [10]
        assert len(buffer.get_field(other, 0, [1])) == 1
    with mr.ReplayBuffer.open(tmp_path / "ring", transforms=[mr.Encoded(path)]) as buffer:
        assert isinstance(buffer.sample(4)[path], mr.Ragged)
    assert mr.verify_buffer(tmp_path / "ring").ok


# Damage


def forge(ring, path, position, change, schema=SCHEMA):
    """Change the value of a row, and its checksum, as a forger does."""
    with mr.ReplayBuffer.open(ring) as buffer:
        where = np.zeros(1, np.int64), np.array([position])
        reference = buffer.view.references((path,), *where)[path][0]
        rows = buffer.metadata.ring.num_rows
        assert buffer.heads[0] <= rows
    heap, records = ring / DATA / "heap.bin", ring / DATA / "records.bin"
    with heap.open("r+b") as file:
        file.seek(int(reference["position"]))
        value = file.read(int(reference["length"]))
        changed = change(value)
        assert len(changed) == len(value) != 0
        file.seek(int(reference["position"]))
        file.write(changed)
    forged = reference.copy()
    forged["crc"] = google_crc32c.value(changed)
    stride = records.stat().st_size // rows
    data = bytearray(records.read_bytes())
    at = data.index(reference.tobytes(), position * stride, (position + 1) * stride)
    data[at : at + REFERENCE.itemsize] = forged.tobytes()
    records.write_bytes(data)
    # Blocks whose sum is not there are not looked at.
    sums = ring / DATA / "sums.bin"
    sums.write_bytes(bytes(sums.stat().st_size))


def ended_early(file):
    """A JPEG whose scan is short: header and end are right."""
    segments, rest = segments_of(file)
    return jpeg_of(segments, rest[:9] + b"\xff\xd9" + bytes(len(rest) - 11))


def progressive(file):
    segments, rest = segments_of(file)
    return jpeg_of([(0xC2 if kind == 0xC0 else kind, body) for kind, body in segments], rest)


def smaller(file):
    segments, rest = segments_of(file)
    made = [(k, b[:1] + struct.pack(">H", 11) + b[3:] if k == 0xC0 else b) for k, b in segments]
    return jpeg_of(made, rest)


def flipped_pixels(file):
    data = bytearray(file)
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


DAMAGE = {
    "a short scan": (PATHS[0], ended_early, r"\(.+\)"),
    "another process": (PATHS[0], progressive, r"\(it is a progressive JPEG\)"),
    "another shape": (PATHS[0], smaller, r"\(it is an image of \(11, 14, 3\)\)"),
    "zeros": (PATHS[0], lambda file: bytes(len(file)), r"\(it is no JPEG\)"),
    "damaged pixels": (PATHS[1], flipped_pixels, r"\(.+\)"),
    "another file": (PATHS[1], lambda file: b"\xff\xd8" + file[2:], r"\(it is a JPEG\)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_value_that_is_no_such_image_is_damage_that_names_its_row(tmp_path, kind):
    path, change, what = DAMAGE[kind]
    ring = tmp_path / "ring"
    filled(tmp_path, 7).close()
    forge(ring, path, 4, change)
    message = (
        rf"field '{path}' is damaged in position 4 of environment 0: it is no "
        rf"{SCHEMA[path].rules.name(SCHEMA[path])} image \[.*\] {what}\. Restore the buffer from a "
        "copy, or run mmreplay repair"
    )
    with mr.ReplayBuffer.open(ring, check_values=True) as buffer:
        for call in (
            lambda: buffer.take(0, [3, 4]),
            # As what follows a step.
            lambda: buffer.take(0, [3]),
            lambda: buffer.get_field(path, 0, [1, 4]),
            buffer.gather_all,
        ):
            with pytest.raises(CorruptError, match=message):
                call()
        assert_pixels(buffer.take(0, [0, 1, 2, 5]))
    for stack in (mr.FrameStack(2, paths=[path]), mr.FrameStack(2, paths=[path], axis=-1)):
        with (
            mr.ReplayBuffer.open(ring, transforms=[stack]) as buffer,
            pytest.raises(CorruptError, match=f"'{path}' is damaged in .*: it is no "),
        ):
            buffer.take(0, [5])
    # Files go on as they are.
    with mr.ReplayBuffer.open(ring, transforms=[mr.Encoded()]) as buffer:
        assert len(buffer.take(0, [3, 4])) == 2
    report = mr.verify_buffer(ring)
    (finding,) = [each for each in report.findings if each.kind == "value"]
    assert (finding.damage, report.ok) == (True, False)
    start = f"field '{path}' of environment 0, position 4: it is no {SCHEMA[path].description}: "
    assert start in finding.message


def test_windows_name_the_row_that_is_damaged(tmp_path):
    ring = tmp_path / "ring"
    filled(tmp_path, 7).close()
    forge(ring, PATHS[0], 4, ended_early)
    sampler = mr.SequenceSampler(3, mr.UniformSampler(seed=0))
    with (
        mr.ReplayBuffer.open(ring, sampler=sampler) as buffer,
        pytest.raises(CorruptError, match="'observation/top' is damaged in position 4 of"),
    ):
        # Of 5 windows each but the first and the last has that row.
        buffer.sample(60)


def test_verify_decodes_some_of_many_images_and_looks_at_all(tmp_path, monkeypatch, decoded):
    from mmreplay.verify import values

    monkeypatch.setattr(values, "DECODED_IMAGES", 5)
    filled(tmp_path, 40).close()
    decoded.clear()
    assert mr.verify_buffer(tmp_path / "ring").ok
    assert 5 <= decoded.total() <= 20
    forge(tmp_path / "ring", PATHS[0], 4, progressive)
    findings = mr.verify_buffer(tmp_path / "ring").findings
    (finding,) = [each for each in findings if each.kind == "value"]
    assert finding.message.endswith("it is a progressive JPEG")


def test_repair_leaves_the_files_as_they_are(tmp_path):
    ring = tmp_path / "ring"
    filled(tmp_path, 12).close()
    heap = bytearray((ring / DATA / "heap.bin").read_bytes())
    heap[3] ^= 1
    (ring / DATA / "heap.bin").write_bytes(heap)
    mr.repair(ring, tmp_path / "repaired")
    with mr.ReplayBuffer.open(tmp_path / "repaired", transforms=[mr.Encoded()]) as buffer:
        numbers = buffer.get_field("action", 0, np.arange(*span_of(buffer))).tolist()
        assert len(numbers) == 11
        assert_pixels(decoded_rows(buffer), numbers)


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("change", [progressive, ended_early])
def test_verify_finds_and_repair_leaves_out_what_is_no_image(tmp_path, monkeypatch, engine, change):
    ring = tmp_path / "ring"
    with create(tmp_path, engine) as buffer:
        for number in range(12):
            given = step(number, "bytes")
            with monkeypatch.context() as careless:
                if number == 4:
                    careless.setattr(ImageEncoding, "problem", lambda *_: None)
                    given["observation"]["top"] = change(file_of(PATHS[0], 4))
                buffer.add(given)
    (finding,) = mr.verify_buffer(ring).findings
    assert (finding.kind, finding.damage) == ("value", True)
    assert "position 4" in finding.message
    assert "it is no jpeg image [12, 14, 3]: " in finding.message
    made = mr.repair(ring, tmp_path / "repaired")
    assert made.rows == 11
    assert mr.verify_buffer(tmp_path / "repaired").ok
    with mr.ReplayBuffer.open(tmp_path / "repaired") as buffer:
        rows = buffer.gather_all()
        assert rows["action"].tolist() == [n for n in range(12) if n != 4]
        assert_pixels(rows)


def span_of(buffer):
    return int(buffer.span.first[0]), int(buffer.span.stop[0])


def decoded_rows(buffer):
    rows = np.arange(*span_of(buffer))
    return {path: buffer.get_field(path, 0, rows) for path in PATHS}


# Other buffers, other readers


def test_a_concat_with_arrays_is_refused(tmp_path):
    observation = FIELDS["observation"] | {"top": mr.Field(TOP, "uint8")}
    arrays = mr.Schema({**FIELDS, "observation": observation})
    with filled(tmp_path, 9, engine="memory") as one:
        other = create(tmp_path, "memory", schema=arrays)
        other.add(step(0, "array"))
        message = (
            r"concat: field 'observation/top' of buffer 1 .* is Field\(shape=\(12, 14, 3\), .* but "
            r"in buffer 0 .* it is Field\.image\(\(12, 14, 3\), 'jpeg', quality=80, "
        )
        with pytest.raises(SchemaError, match=message):
            mr.concat([one, other], [1, 1], seed=0)
        same = filled(tmp_path, 9, engine="memory")
        both = mr.concat([one, same], [1, 1], seed=0)
        assert_pixels(both.sample(12))


def test_a_reader_that_knows_no_images_refuses_them_by_name(tmp_path, monkeypatch):
    filled(tmp_path, 3).close()
    monkeypatch.setattr(metadata_file, "INCOMPAT", metadata_file.INCOMPAT - {metadata_file.IMAGE})
    for mode in ("r", "r+"):
        with pytest.raises(VersionError, match="image"):
            mr.ReplayBuffer.open(tmp_path / "ring", mode)


def test_write_field_takes_no_images(tmp_path):
    with (
        filled(tmp_path, 3, engine="memory") as buffer,
        pytest.raises(SchemaError, match="its published values never change"),
    ):
        buffer.write_field("observation/top", 0, [1], np.zeros((1, *TOP), np.uint8))


@pytest.mark.parametrize("codec", ["jpeg", "png"])
def test_an_array_whose_file_is_too_large_is_refused_with_what_helps(codec):
    field = mr.Field.image((32, 32, 3), codec, 95 if codec == "jpeg" else None, max_bytes=900)
    noise = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    with mr.ReplayBuffer.create(None, mr.Schema({"i": field}), 9, engine="memory") as buffer:
        with pytest.raises(
            SchemaError,
            match=r"it has \d+ bytes, more than max_bytes=900\. Declare a larger max_bytes, or a ",
        ):
            buffer.add(i=noise)
        buffer.add(i=np.zeros((32, 32, 3), np.uint8))
        assert len(buffer) == 1


def test_rows_before_a_field_of_images_was_added_have_none(tmp_path):
    with mr.ReplayBuffer.create(
        tmp_path / "ring", mr.Schema({"x": mr.Field((), "int64")}), 50
    ) as buffer:
        buffer.extend(x=np.arange(5))
    with mr.ReplayBuffer.open(tmp_path / "ring", "r+") as buffer:
        field = mr.Field.image((4, 6, 3), "png")
        for fill in (np.zeros((4, 6, 3), np.uint8), b"abc"):
            with pytest.raises(SchemaError, match=r"Pass b''|Pass bytes"):
                buffer.add_field("image", field, fill, heap_bytes="1 MiB")
        buffer.add_field("image", field, b"", heap_bytes="1 MiB")
        image = np.full((4, 6, 3), 7, np.uint8)
        buffer.add(x=5, image=image)
        drawn = buffer.get_field("image", 0, np.arange(6))
        assert not drawn[:5].any()
        assert (drawn[5] == image).all()

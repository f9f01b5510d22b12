"""Fields of images: what may be declared, which files are taken, and the codecs."""

import json
import pickle
import resource
import struct
import subprocess
import sys
import threading
import zlib
from contextlib import suppress

import numpy as np
import pytest
import simplejpeg
from PIL import Image

import mmreplay as mr
from mmreplay.errors import FailedError, SchemaError
from mmreplay.plan import coding_ms
from mmreplay.schema import Field, Schema, images
from mmreplay.schema.field import REFERENCE, field_from_json, field_to_json
from mmreplay.schema.images import ImageEncoding, in_threads
from tests.schema.image_files import (
    SHAPE,
    by_pillow,
    camera,
    chunks_of,
    frame_of,
    jpeg,
    jpeg_of,
    noise,
    pixels_of,
    png,
    png_of,
    scans_apart,
    segments_of,
    texts,
    with_chunk,
    with_frame,
    with_header,
)

JPEG, PNG = Field.image(SHAPE), Field.image(SHAPE, "png")
GRAY = (*SHAPE[:2], 1)
GRAY_JPEG, GRAY_PNG = Field.image(GRAY), Field.image(GRAY, "png")
ARRAY = camera()


def problem(field, file):
    return field.encoding.problem(file)


def decoded(field, file):
    out = np.full(field.encoding.shape, 77, np.uint8)
    field.encoding.decode(file, out)
    return out


# Declarations


def test_an_image_is_a_value_that_varies_and_is_drawn_as_an_array():
    field = Field.image((480, 640, 3))
    assert (field.shape, field.dtype, field.kind) == ((None,), "uint8", "image")
    assert (field.varies, field.mutable, field.nbytes) == (True, False, REFERENCE.itemsize)
    assert field.max_length == 480 * 640 * 3 + (64 << 10)
    assert field.encoding == ImageEncoding((480, 640, 3), "jpeg", 90, "420")
    assert field.encoding.options == "jpeg:90:420"
    assert field.encoding.planned_nbytes == 480 * 640 * 3 // 4
    assert field.drawn == Field((480, 640, 3), "uint8")
    assert field.description == "jpeg image [480, 640, 3]"
    png_field = Field.image([np.int64(4), 5, np.uint8(1)], "png", max_bytes=99)
    assert png_field.encoding == ImageEncoding((4, 5, 1), "png", None, None)
    assert type(png_field.encoding.shape[0]) is int
    assert (png_field.max_length, png_field.encoding.planned_nbytes) == (99, 20)
    assert png_field.encoding.options == "png"
    assert Field((3,), "int8").drawn == Field((3,), "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 5),), r"image shape must be \(height, width, 1\) or .*, got \(4, 5\)\. Images of"),
        (((4, 5, 2),), r"sides of at most 65500, got \(4, 5, 2\)"),
        (((4, 5, 4),), r"image shape must be .* are a Field\(shape, 'uint8'\); engine='zarr'"),
        (((0, 5, 3),), r"got \(0, 5, 3\)"),
        (((4, -5, 3),), r"got \(4, -5, 3\)"),
        (((4, 65_501, 3),), r"got \(4, 65501, 3\)"),
        (((4.0, 5, 3),), r"got \(4\.0, 5, 3\)"),
        (((None, 5, 3),), r"got \(None, 5, 3\)"),
        ((480,), "got 480"),
        (("483",), "got '483'"),
        ((None,), "got None"),
        ((np.array([4, 5, 3]),), "image shape must be"),
        (((4, 5, 3), "webp"), "image codec must be one of 'jpeg', 'png', got 'webp'. Pass 'jpeg'"),
        (((4, 5, 3), None), "image codec must be .* got None"),
        (((4, 5, 3), ["png"]), "image codec must be"),
        (((4, 5, 3), "jpeg", 0), r"image quality must be an integer in \[1, 100\], got 0\. 95 is"),
        (((4, 5, 3), "jpeg", 101), "image quality must be .* got 101"),
        (((4, 5, 3), "jpeg", 90.0), r"image quality must be .* got 90\.0"),
        (((4, 5, 3), "jpeg", True), "image quality must be .* got True"),
        (((4, 5, 3), "jpeg", "90"), "image quality must be .* got '90'"),
        (((4, 5, 3), "jpeg", 9, "411"), "image subsampling must be one of '444', '422', '420', go"),
        (((4, 5, 3), "jpeg", 9, 420), "image subsampling must be .* got 420. '444' keeps all"),
        (((4, 5, 3), "png", 90), "image quality must be None with codec 'png', .* got 90. Leave"),
        (((4, 5, 3), "png", None, "444"), "image subsampling must be None with codec 'png'"),
    ],
)
def test_what_no_image_can_be_is_refused(arguments, message):
    with pytest.raises(SchemaError, match=message):
        Field.image(*arguments)


@pytest.mark.parametrize("max_bytes", [0, -1, 2**32, 1.5, "9", True])
def test_max_bytes_is_a_number_of_bytes(max_bytes):
    with pytest.raises(SchemaError, match=r"max_\w+ must be an integer in \[1, 4294967295\]"):
        Field.image((4, 5, 3), max_bytes=max_bytes)


def test_an_image_larger_than_a_value_may_be_is_refused():
    with pytest.raises(SchemaError, match="must be an integer in"):
        Field.image((65_500, 65_500, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Field((None,), "uint8", max_length=9, kind="image"),
            "field kind 'image' must not have encoding=None. Use Field.image",
        ),
        (
            lambda: Field((None,), "uint8", max_length=9, encoding=JPEG.encoding),
            "field kind 'array' must not have encoding=ImageEncoding",
        ),
        (
            lambda: Field.image((4, 5, 3)).__class__(
                (None,), "uint8", max_length=9, kind="image", encoding="jpeg"
            ),
            "field kind 'image' must not have encoding='jpeg'",
        ),
        (
            lambda: Field(
                (None,), "uint8", max_length=9, kind="image", encoding=JPEG.encoding, mutable=True
            ),
            "option mutable must be False",
        ),
        (
            lambda: Field((9,), "uint8", kind="image", encoding=JPEG.encoding),
            "needs a shape that begins with None",
        ),
        (
            lambda: Field((None,), "int8", max_length=9, kind="image", encoding=JPEG.encoding),
            "uint8",
        ),
        (
            lambda: Field((None, 3), "uint8", max_length=9, kind="image", encoding=JPEG.encoding),
            "image",
        ),
        (lambda: Field((None,), "uint8", max_length=9, kind="video"), "Field.bytes or Field.image"),
    ],
)
def test_encodings_and_kinds_go_together(make, message):
    with pytest.raises(SchemaError, match=message):
        make()


@pytest.mark.parametrize("role", ["reward", "terminated", "truncated"])
@pytest.mark.parametrize("field", [JPEG, PNG], ids=["jpeg", "png"])
def test_rewards_and_ends_are_no_images(field, role):
    with pytest.raises(SchemaError, match=f"{role}.*image"):
        Schema({"observation": Field((), "int8"), role: field})


ALL = [
    JPEG,
    PNG,
    GRAY_JPEG,
    GRAY_PNG,
    Field.image((4, 6, 3), "jpeg", 100, "444", max_bytes=1000),
    Field.image((4, 6, 3), "jpeg", 1, "422"),
    Field.image((4, 6, 3), "png", max_bytes=1000),
]


@pytest.mark.parametrize("field", ALL, ids=repr)
def test_reprs_pickles_and_json_give_the_same_field(field):
    assert eval(repr(field), {"Field": Field}) == field
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(field, protocol))
        assert again == field
        assert (again.encoding, again.max_length) == (field.encoding, field.max_length)
        assert hash(again) == hash(field)
    entry = json.loads(json.dumps(field_to_json("a/b", field)))
    name, again = field_from_json(entry)
    assert (name, again) == ("a/b", field)
    assert again.encoding == field.encoding
    # What a ring holds was chosen when it was made.
    assert again.encoding.stated


def test_reprs():
    assert repr(JPEG) == "Field.image((18, 22, 3), 'jpeg', quality=90, subsampling='420')"
    assert repr(GRAY_PNG) == "Field.image((18, 22, 1), 'png')"
    assert repr(Field.image((1, 1, 1), "png", max_bytes=9)).endswith("'png', max_bytes=9)")


def test_fields_of_other_encodings_are_others():
    assert len({*ALL, Field.image(SHAPE, "jpeg", 91), Field.bytes(JPEG.max_length)}) == 9
    # Whether the quality was written down is no property of what is stored.
    assert Field.image(SHAPE, "jpeg", 90) == JPEG
    assert not JPEG.encoding.stated
    assert Field.image(SHAPE, "jpeg", 90).encoding.stated


def entry(**changes):
    return field_to_json("camera", JPEG) | changes


def image_entry(**changes):
    return entry(image=field_to_json("camera", JPEG)["image"] | changes)


def without(key, of):
    return {name: value for name, value in of.items() if name != key}


KEYS = r"keys .* must be|must be exactly|must have"
WHAT = "an object of shape, codec, quality and subsampling"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (without("image", entry()), r"exactly \["),
        (without("kind", entry()), r"exactly \["),
        (without("max_length", entry()), r"exactly \["),
        (entry(more=1), r"exactly \["),
        (entry(kind="bytes"), r"exactly \["),
        (entry(kind="array"), r"exactly \["),
        (entry(image=None), WHAT),
        (entry(image=[]), WHAT),
        (entry(image="jpeg"), WHAT),
        (entry(image=without("codec", entry()["image"])), WHAT),
        (entry(image=without("quality", entry()["image"])), WHAT),
        (image_entry(more=1), WHAT),
        (image_entry(codec="webp"), WHAT),
        (image_entry(codec=["jpeg"]), WHAT),
        (image_entry(codec="png"), WHAT),
        (image_entry(codec="png", quality=None), WHAT),
        (image_entry(quality=None), WHAT),
        (image_entry(quality=0), WHAT),
        (image_entry(quality=90.0), WHAT),
        (image_entry(quality=True), WHAT),
        (image_entry(quality="90"), WHAT),
        (image_entry(subsampling=None), WHAT),
        (image_entry(subsampling="411"), WHAT),
        (image_entry(subsampling=420), WHAT),
        (image_entry(subsampling=["420"]), WHAT),
        (image_entry(shape=[18, 22]), WHAT),
        (image_entry(shape=[18, 22, 4]), WHAT),
        (image_entry(shape=[18, 22.0, 3]), WHAT),
        (image_entry(shape=[18, True, 3]), WHAT),
        (image_entry(shape=[18, 22, {}]), WHAT),
        (image_entry(shape="18"), WHAT),
        (image_entry(shape=None), WHAT),
        (image_entry(shape=[18, 1 << 70, 3]), WHAT),
        (entry(shape=[None, 3]), "image"),
        (entry(dtype="int8"), "uint8"),
        (entry(max_length=0), "max_length"),
        (entry(shape=[9]), r"exactly \["),
    ],
)
def test_illegal_json_is_refused(value, message):
    with pytest.raises(mr.ReplayError, match=message):
        field_from_json(json.loads(json.dumps(value)))


# Files that are accepted


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sides", [(1, 1), (7, 5), (8, 8), (17, 3), (3, 33), (16, 16), (1, 40)])
@pytest.mark.parametrize("subsampling", ["444", "422", "420"])
def test_jpegs_are_what_simplejpeg_makes_and_reads(sides, channels, subsampling):
    array = camera((*sides, channels))
    field = Field.image(array.shape, "jpeg", 85, subsampling)
    file = field.encoding.encode(array)
    assert file == jpeg(array, 85, subsampling)
    assert problem(field, file) is None
    found = decoded(field, file)
    assert found.tolist() == pixels_of(file).tolist()
    header = simplejpeg.decode_jpeg_header(file)
    assert header[:2] == sides
    assert header[2:] == (("Gray",) * 2 if channels == 1 else ("YCbCr", subsampling))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 3), (7, 5, 3), (40, 3, 1), SHAPE])
def test_pngs_are_equal_to_the_bit(shape):
    field = Field.image(shape, "png")
    for array in (camera(shape), noise(shape), np.zeros(shape, np.uint8)):
        file = field.encoding.encode(array)
        assert problem(field, file) is None
        assert decoded(field, file).tolist() == array.tolist() == pixels_of(file).tolist()
        other = png(array, optimize=True)
        assert decoded(field, other).tolist() == array.tolist()


def test_arrays_that_are_not_contiguous_are_encoded_as_their_copies():
    array = camera((40, 44, 3))
    for view in (array[::-1, ::2], array[5:23, 3:25], array.transpose(1, 0, 2)[:18, :22]):
        for codec in ("jpeg", "png"):
            field = Field.image(view.shape, codec)
            copied = np.ascontiguousarray(view)
            assert field.encoding.encode(view) == field.encoding.encode(copied)


@pytest.mark.parametrize("shape", [(1, 1, 3), (8, 8, 1), (64, 64, 3), (100, 31, 1)])
def test_the_default_max_bytes_holds_noise_at_the_highest_quality(shape):
    for arguments in (("jpeg", 100, "444"), ("jpeg", 100, "420"), ("png",)):
        field = Field.image(shape, *arguments)
        assert len(field.encoding.encode(noise(shape))) <= field.max_length
        assert len(png(noise(shape), compress_level=0)) <= field.max_length


FORMS = {
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": memoryview,
    "array": lambda file: np.frombuffer(file, np.uint8),
    "strided": lambda file: np.frombuffer(file, np.uint8).repeat(2)[::2],
}


@pytest.mark.parametrize("form", FORMS)
def test_files_are_looked_at_in_every_form(form):
    for field, file in ((JPEG, jpeg(ARRAY)), (PNG, png(ARRAY))):
        assert problem(field, FORMS[form](file)) is None
        assert decoded(field, FORMS[form](file)).tolist() == pixels_of(file).tolist()
        assert "cut off" in problem(field, FORMS[form](file[:-4]))


def without_tables(file):
    """A JPEG without Huffman tables, as cameras send in MJPEG."""
    segments, rest = segments_of(file)
    return jpeg_of([each for each in segments if each[0] != 0xC4], rest)


def rotated(form, array=ARRAY):
    exif = Image.Exif()
    exif[0x0112] = 6
    return by_pillow(array, form, exif=exif)


def filled(file):
    """A JPEG with fill bytes before each marker of its header."""
    segments, rest = segments_of(file)
    packed = b"".join(
        jpeg_of([each], b"")[2:].replace(b"\xff", b"\xff" * 5, 1) for each in segments
    )
    return b"\xff\xd8" + packed + rest


ACCEPTED = {
    "Pillow's": lambda: (JPEG, by_pillow(ARRAY, "JPEG")),
    "optimized": lambda: (JPEG, by_pillow(ARRAY, "JPEG", optimize=True)),
    "with restarts": lambda: (JPEG, by_pillow(ARRAY, "JPEG", restart_marker_blocks=1)),
    "a comment": lambda: (JPEG, by_pillow(ARRAY, "JPEG", comment=b"c" * 60_000)),
    "a profile": lambda: (JPEG, by_pillow(ARRAY, "JPEG", icc_profile=b"p" * 70_000)),
    "extended": lambda: (JPEG, with_frame(jpeg(ARRAY), 0xC1)),
    "gray": lambda: (GRAY_JPEG, by_pillow(camera(GRAY), "JPEG")),
    "rotated": lambda: (JPEG, rotated("JPEG")),
    "zero padding": lambda: (JPEG, jpeg(ARRAY) + bytes(999)),
    "fill bytes": lambda: (JPEG, filled(jpeg(ARRAY))),
    "scans apart": lambda: (JPEG, scans_apart(ARRAY)),
    "PNG with text": lambda: (PNG, png(ARRAY, pnginfo=texts(tEXt="t" * 65_531))),
    "PNG with dpi": lambda: (PNG, png(ARRAY, dpi=(72, 72))),
    "PNG with a transparent color": lambda: (PNG, png(ARRAY, transparency=(1, 2, 3))),
    "gray PNG with a transparent color": lambda: (GRAY_PNG, png(camera(GRAY), transparency=7)),
    "rotated PNG": lambda: (PNG, rotated("PNG")),
    "PNG with padding": lambda: (PNG, png(ARRAY) + bytes(99)),
    "many chunks of pixels": lambda: (PNG, split_pixels(png(ARRAY))),
    "PNG with chunks of its own": lambda: (PNG, with_chunk(png(ARRAY), b"abCd", b"x" * 65_536)),
    "suggested palette": lambda: (PNG, with_chunk(png(ARRAY), b"PLTE", bytes(9))),
}


def split_pixels(file):
    """A PNG whose pixels are in chunks of one byte."""
    found = []
    for name, data in chunks_of(file):
        if name == b"IDAT":
            found += [(name, data[at : at + 1]) for at in range(len(data))]
        else:
            found.append((name, data))
    return png_of(found)


@pytest.mark.parametrize("name", ACCEPTED)
def test_files_of_any_writer_are_accepted(name):
    field, file = ACCEPTED[name]()
    assert problem(field, file) is None
    assert decoded(field, file).tolist() == pixels_of(file).tolist()


def test_rotations_of_exif_are_never_applied():
    for field, form in ((JPEG, "JPEG"), (PNG, "PNG")):
        plain = by_pillow(ARRAY, form)
        assert decoded(field, rotated(form)).tolist() == decoded(field, plain).tolist()
        turned = Field.image((SHAPE[1], SHAPE[0], 3), field.encoding.codec)
        assert problem(turned, rotated(form)) == f"it is an image of {SHAPE}"


def test_scans_of_each_color_are_one_image():
    exact = np.abs(decoded(JPEG, scans_apart(ARRAY, 100)).astype(int) - ARRAY)
    assert exact.max() <= 4


def test_mjpeg_without_huffman_tables_is_decoded():
    for quality in (50, 90):
        file = jpeg(ARRAY, quality)
        bare = without_tables(file)
        assert len(bare) < len(file) - 400
        assert problem(JPEG, bare) is None
        assert decoded(JPEG, bare).tolist() == decoded(JPEG, file).tolist()


# Files that are refused


def animated():
    others = [Image.fromarray(camera(seed=seed)) for seed in (1, 2)]
    return png(ARRAY, save_all=True, append_images=others)


def two_frames(file):
    segments, rest = segments_of(file)
    at = segments.index(frame_of(file))
    return jpeg_of([*segments[:at], segments[at], *segments[at:]], rest)


def many_scans(file, count):
    segments, rest = segments_of(file)
    scan = jpeg_of(segments[-1:], rest[:-2])[2:]
    return jpeg_of(segments, rest[:-2] + scan * (count - 1) + b"\xff\xd9")


def last_scan(file):
    return file[file.rindex(b"\xff\xda") : -2]


def without_header(file):
    return png_of(chunks_of(file)[1:])


CUT, DAMAGED = "it is cut off: it has no end", "its header is damaged"
REFUSED = {
    "nothing": (JPEG, lambda: b"", "it has no bytes"),
    "no PNG bytes": (PNG, lambda: b"", "it has no bytes"),
    "text": (JPEG, lambda: b"<svg/>", "it is no JPEG"),
    "text as PNG": (PNG, lambda: b"<svg/>", "it is no PNG"),
    "a GIF": (PNG, lambda: by_pillow(ARRAY, "GIF"), "it is no PNG"),
    "a PNG": (JPEG, lambda: png(ARRAY), "it is a PNG"),
    "a JPEG": (PNG, lambda: jpeg(ARRAY), "it is a JPEG"),
    "huge": (
        JPEG,
        lambda: with_frame(jpeg(ARRAY), height=65_535, width=65_535),
        "it is an image of (65535, 65535, 3)",
    ),
    "no height": (JPEG, lambda: with_frame(jpeg(ARRAY), height=0), "it is an image of (0, 22, 3)"),
    "larger": (JPEG, lambda: jpeg(camera((19, 22, 3))), "it is an image of (19, 22, 3)"),
    "turned": (JPEG, lambda: jpeg(camera((22, 18, 3))), "it is an image of (22, 18, 3)"),
    "gray in RGB": (JPEG, lambda: jpeg(camera(GRAY)), "it is an image of (18, 22, 1)"),
    "RGB in gray": (GRAY_JPEG, lambda: jpeg(ARRAY), "it is an image of (18, 22, 3)"),
    "progressive": (
        JPEG,
        lambda: by_pillow(ARRAY, "JPEG", progressive=True),
        "it is a progressive JPEG",
    ),
    "lossless": (
        JPEG,
        lambda: with_frame(jpeg(ARRAY), 0xC3),
        "it is an arithmetic or lossless JPEG",
    ),
    "arithmetic": (
        JPEG,
        lambda: with_frame(jpeg(ARRAY), 0xC9),
        "it is an arithmetic or lossless JPEG",
    ),
    "hierarchical": (
        JPEG,
        lambda: with_frame(jpeg(ARRAY), 0xC5),
        "it is an arithmetic or lossless JPEG",
    ),
    "CMYK": (JPEG, lambda: by_pillow(ARRAY, "JPEG", "CMYK"), "it has 4 components, as CMYK has"),
    "two components": (
        JPEG,
        lambda: with_frame(jpeg(ARRAY), components=2),
        "it has 2 components, as CMYK has",
    ),
    "12 bits": (JPEG, lambda: with_frame(jpeg(ARRAY), precision=12), "its samples have 12 bits"),
    "two frames": (JPEG, lambda: two_frames(jpeg(ARRAY)), "it has two frames"),
    "no frame": (
        JPEG,
        lambda: jpeg_of(
            [each for each in segments_of(jpeg(ARRAY))[0] if each[0] != 0xC0], b"\xff\xd9"
        ),
        "it has no frame",
    ),
    "short frame": (
        JPEG,
        lambda: jpeg_of([(0xC0, b"\x08\0\x12"), *segments_of(jpeg(ARRAY))[0][-1:]], b"\xff\xd9"),
        "it has no frame",
    ),
    "scans": (
        JPEG,
        lambda: scans_apart(ARRAY)[:-2] + last_scan(scans_apart(ARRAY)) + b"\xff\xd9",
        "it has 4 scans of 3 components",
    ),
    "many scans": (
        JPEG,
        lambda: scans_apart(ARRAY)[:-2] + last_scan(scans_apart(ARRAY)) * 300 + b"\xff\xd9",
        "it has 303 scans of 3 components",
    ),
    "no end": (JPEG, lambda: jpeg(ARRAY)[:-2], "it is cut off: it has no end marker"),
    "no length": (JPEG, lambda: b"\xff\xd8\xff\xe0\0\x01" + bytes(9) + b"\xff\xd9", DAMAGED),
    "a restart marker": (JPEG, lambda: b"\xff\xd8\xff\xd0" + bytes(9) + b"\xff\xd9", DAMAGED),
    "no marker": (
        JPEG,
        lambda: b"\xff\xd8" + bytes(9) + b"\xff\xd9",
        "its header is cut off or damaged",
    ),
    "only fill bytes": (
        JPEG,
        lambda: b"\xff\xd8" + b"\xff" * 99 + b"\xd9",
        "its header is cut off or damaged",
    ),
    "a JPEG of two bytes": (JPEG, lambda: b"\xff\xd8\xff\xd9", "its header is cut off or damaged"),
    "huge PNG": (
        PNG,
        lambda: with_header(png(ARRAY), width=65_535, height=65_535),
        "it is an image of (65535, 65535, 3)",
    ),
    "larger than any": (
        PNG,
        lambda: with_header(png(ARRAY), width=2**31 - 1),
        "it is an image of (18, 2147483647, 3)",
    ),
    "larger PNG": (PNG, lambda: png(camera((18, 23, 3))), "it is an image of (18, 23, 3)"),
    "gray PNG in RGB": (PNG, lambda: png(camera(GRAY)), "it is an image of (18, 22, 1)"),
    "RGB PNG in gray": (GRAY_PNG, lambda: png(ARRAY), "it is an image of (18, 22, 3)"),
    "palette": (PNG, lambda: by_pillow(ARRAY, "PNG", "P"), "it is a PNG with a palette"),
    "alpha": (PNG, lambda: by_pillow(ARRAY, "PNG", "RGBA"), "it has an alpha channel"),
    "gray with alpha": (GRAY_PNG, lambda: by_pillow(ARRAY, "PNG", "LA"), "it has an alpha channel"),
    "16 bits": (
        GRAY_PNG,
        lambda: by_pillow(Image.fromarray(np.zeros(GRAY[:2], np.uint16)), "PNG"),
        "its samples have 16 bits",
    ),
    "1 bit": (GRAY_PNG, lambda: by_pillow(ARRAY, "PNG", "1"), "its samples have 1 bits"),
    "interlaced": (PNG, lambda: with_header(png(ARRAY), interlace=1), "it is interlaced"),
    "unknown color": (PNG, lambda: with_header(png(ARRAY), color=5), DAMAGED),
    "unknown interlacing": (PNG, lambda: with_header(png(ARRAY), interlace=2), DAMAGED),
    "unknown compression": (PNG, lambda: with_header(png(ARRAY), compression=1), DAMAGED),
    "unknown filter": (PNG, lambda: with_header(png(ARRAY), filter=1), DAMAGED),
    "animated": (PNG, animated, "it is animated"),
    "frames without control": (
        PNG,
        lambda: with_chunk(png(ARRAY), b"fdAT", bytes(9), 2),
        "it is animated",
    ),
    "profile": (PNG, lambda: png(ARRAY, icc_profile=b"p" * 99), "it has a compressed chunk iCCP"),
    "packed text": (
        PNG,
        lambda: png(ARRAY, pnginfo=texts(zTXt="t" * 99)),
        "it has a compressed chunk zTXt",
    ),
    "international text": (
        PNG,
        lambda: png(ARRAY, pnginfo=texts(iTXt="t")),
        "it has a compressed chunk iTXt",
    ),
    "a profile behind the pixels": (
        PNG,
        lambda: with_chunk(png(ARRAY), b"iCCP", b"p\0\0", -1),
        "it has a compressed chunk iCCP",
    ),
    "a large chunk": (
        PNG,
        lambda: with_chunk(png(ARRAY), b"abCd", bytes(65_537)),
        "it has a chunk of 65537 bytes without pixels",
    ),
    "much text": (
        PNG,
        lambda: png(ARRAY, pnginfo=texts(tEXt="t" * 65_532)),
        "it has a chunk of 65537 bytes without pixels",
    ),
    "many chunks": (
        PNG,
        lambda: png_of([*chunks_of(png(ARRAY))[:1], *[(b"abCd", b"")] * 20_000]),
        "it has more than 16384 chunks",
    ),
    "no pixels": (
        PNG,
        lambda: png_of([each for each in chunks_of(png(ARRAY)) if each[0] != b"IDAT"]),
        "it has no pixels",
    ),
    "no header": (PNG, lambda: without_header(png(ARRAY)), DAMAGED),
    "a header of another size": (
        PNG,
        lambda: png_of([(b"IHDR", bytes(14)), *chunks_of(png(ARRAY))[1:]]),
        DAMAGED,
    ),
    "a chunk beyond the end": (
        PNG,
        lambda: png(ARRAY)[:33] + struct.pack(">I", 2**32 - 1) + b"IDAT" + bytes(99),
        CUT,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_costs_more_than_a_frame_or_is_none_is_refused(name):
    field, make, said = REFUSED[name]
    file = make()
    assert problem(field, file) == said
    with pytest.raises(ValueError, match=r"^i"):
        decoded(field, file)
    # Nothing of it comes into a buffer, and the message names the place.
    with mr.ReplayBuffer.create(None, mr.Schema({"image": field}), 9, engine="memory") as buffer:
        with pytest.raises(SchemaError) as refused:
            buffer.add(image=file)
        assert str(refused.value) == (
            f"field 'image' must be {field.description}, but {said}. Pass an array, or a "
            f"{field.encoding.codec} file of this shape."
        )
        assert buffer.heads.tolist() == [0]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("field", [JPEG, GRAY_JPEG, PNG, GRAY_PNG], ids=repr)
def test_a_file_without_its_end_is_refused_wherever_it_stops(field, padding):
    array = camera(field.encoding.shape)
    file = field.encoding.encode(array)
    assert problem(field, file + bytes(padding)) is None
    # Zeros may stand for the checksum of a PNG's last chunk, which is empty.
    ends = 4 if padding and file.startswith(b"\x89PNG") else 0
    for stop in range(len(file) - ends):
        assert problem(field, file[:stop] + bytes(padding)) is not None, stop


def test_pixels_that_are_damaged_are_an_error_of_the_decoder():
    segments, rest = segments_of(jpeg(ARRAY))
    short = jpeg_of(segments, rest[:40] + b"\xff\xd9")
    assert problem(JPEG, short) is None
    with pytest.raises(ValueError, match=r"."):
        decoded(JPEG, short)
    chunks = chunks_of(png(ARRAY))
    few = zlib.compress(bytes(9))
    for data in (b"", b"no zlib", few, chunks[1][1][:40]):
        file = png_of([(name, data if name == b"IDAT" else of) for name, of in chunks])
        assert problem(PNG, file) is None
        with pytest.raises(ValueError, match=r"."):
            decoded(PNG, file)
    flipped = bytearray(png(ARRAY))
    flipped[60] ^= 1
    with pytest.raises(ValueError, match=r"."):
        decoded(PNG, bytes(flipped))


@pytest.mark.parametrize("count", [2, 1000])
@pytest.mark.parametrize("field", [JPEG, GRAY_JPEG], ids=repr)
def test_scans_behind_one_of_all_colors_are_an_error_of_the_decoder(field, count):
    file = many_scans(jpeg(camera(field.encoding.shape)), count)
    with pytest.raises(ValueError, match=r"."):
        decoded(field, file)


def test_pixels_beyond_the_image_are_not_unpacked():
    bomb = zlib.compress(bytes(200 << 20), 1)
    chunks = [(name, bomb if name == b"IDAT" else of) for name, of in chunks_of(png(ARRAY))]
    file = png_of(chunks)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with suppress(ValueError):
        decoded(PNG, file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_large_images_are_no_bombs_where_they_are_declared(monkeypatch):
    # Pillow's limit, which images of 13,000 x 13,000 pixels reach.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decoded(PNG, png(ARRAY)).tolist() == ARRAY.tolist()


def test_a_file_larger_than_max_bytes_is_refused():
    field = Field.image(SHAPE, "png", max_bytes=500)
    for image in (noise(), png(noise())):
        nbytes = len(png(noise(), compress_level=1) if isinstance(image, np.ndarray) else image)
        with mr.ReplayBuffer.create(
            None, mr.Schema({"image": field}), 9, engine="memory"
        ) as buffer:
            with pytest.raises(SchemaError, match=f"but it has {nbytes} bytes, more than max_byte"):
                buffer.add(image=image)
            buffer.add(image=np.zeros(SHAPE, np.uint8))
            assert buffer.heads.tolist() == [1]


MUTANTS = """
import resource, sys
import numpy as np
import mmreplay as mr
from tests.schema.image_files import camera, jpeg, mutants, png

SHAPE = (40, 52, 3)


def attack(codec, file, count):
    encoding, out = mr.Field.image(SHAPE, codec).encoding, np.empty(SHAPE, np.uint8)
    encoding.decode(file, out)
    schema = mr.Schema({"image": mr.Field.image(SHAPE, codec)})
    buffer = mr.ReplayBuffer.create(None, schema, 100, engine="memory", heap_bytes=1 << 20)
    buffer.add(image=file)
    buffer.sample(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = dict.fromkeys(("refused", "not added", "damaged", "drawn"), 0)
    for forged in mutants(file, count, seed=7):
        problem = encoding.problem(forged)
        try:
            encoding.decode(forged, out)
        except ValueError:
            seen["refused"] += 1
        else:
            assert problem is None, problem
        try:
            buffer.add(image=forged)
        except mr.SchemaError:
            seen["not added"] += 1
            continue
        assert problem is None, problem
        position = buffer.heads[0] - 1
        try:
            buffer.take(0, position)
        except mr.CorruptError as error:
            seen["damaged"] += 1
            assert f"position {position}" in str(error), error
        else:
            seen["drawn"] += 1
    assert seen["not added"] + seen["damaged"] == seen["refused"], seen
    assert min(seen.values()) > 0, seen
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10, grown
    print(codec, seen, f"{grown} KiB")


attack("jpeg", jpeg(camera(SHAPE)), int(sys.argv[1]))
attack("png", png(camera(SHAPE)), int(sys.argv[1]))
"""


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutants_cost_named_errors_and_little_memory(count):
    command = [sys.executable, "-W", "error", "-c", MUTANTS, str(count)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    print(ran.stdout)


# Threads and libraries


def test_images_are_coded_in_order_by_several_threads(monkeypatch):
    monkeypatch.setattr(images, "ALONE_NBYTES", 0)
    monkeypatch.setattr(images, "_num_threads", lambda: 3)
    monkeypatch.setattr(images, "_threads", None)
    seen, barrier = set(), threading.Barrier(3, timeout=60)

    def work(number):
        if number < 3:
            barrier.wait()
        seen.add(threading.current_thread().name)
        return number * number

    assert in_threads(work, list(range(50)), 1) == [number**2 for number in range(50)]
    assert len(seen) == 3
    assert all(name.startswith("mmreplay-images") for name in seen)


@pytest.mark.parametrize("nbytes", [images.ALONE_NBYTES - 1, images.ALONE_NBYTES])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_few_bytes_and_single_images_stay_in_the_thread_of_the_caller(monkeypatch, nbytes, count):
    monkeypatch.setattr(images.os, "sched_getaffinity", lambda _: {0, 1})
    names = in_threads(lambda _: threading.current_thread().name, list(range(count)), nbytes)
    alone = count < 2 or nbytes < images.ALONE_NBYTES
    assert len(names) == count
    assert all((name == threading.current_thread().name) == alone for name in names)


def test_one_core_needs_no_threads(monkeypatch):
    monkeypatch.setattr(images.os, "sched_getaffinity", lambda _: {0})
    names = in_threads(lambda _: threading.current_thread().name, [1, 2, 3], 1 << 30)
    assert set(names) == {threading.current_thread().name}


def test_the_error_of_a_thread_is_that_of_the_caller(monkeypatch):
    monkeypatch.setattr(images.os, "sched_getaffinity", lambda _: {0, 1})

    def work(number):
        raise ValueError(f"image {number}")

    with pytest.raises(ValueError, match="image 0"):
        in_threads(work, [0, 1, 2], 1 << 30)


@pytest.mark.parametrize(
    ("codec", "module", "said"),
    [
        ("jpeg", "simplejpeg", "simplejpeg, which fields of JPEG images need"),
        ("png", "PIL", "Pillow, which PNG and packed images need"),
    ],
)
def test_a_library_that_is_not_there_is_named_with_its_extra(monkeypatch, codec, module, said):
    field = Field.image(SHAPE, codec)
    file = field.encoding.encode(ARRAY)
    monkeypatch.setitem(sys.modules, module, None)
    message = said + r', is not installed. Run: pip install "mmreplay\[images\]"'
    with pytest.raises(FailedError, match=message):
        field.encoding.encode(ARRAY)
    with pytest.raises(FailedError, match=message):
        decoded(field, file)
    with pytest.raises(FailedError, match=message):
        coding_ms(field.encoding)
    # To look at a file takes neither.
    assert problem(field, file) is None


@pytest.mark.parametrize("field", [JPEG, PNG], ids=repr)
def test_times_of_both_ways_are_measured(field):
    encode_ms, decode_ms = coding_ms(field.encoding)
    assert 0 < encode_ms < 1e5
    assert 0 < decode_ms < 1e5


@pytest.mark.parametrize("second", [(16_000, 16_000, 2), (6, 4, 2), (18, 4, 0)])
def test_a_png_with_a_second_header_is_refused(second):
    # Pillow obeys the last one: it would take gigabytes, or show other pixels.
    image = mr.Field.image((4, 6, 3), "png").encoding
    file = image.encode(np.zeros((4, 6, 3), np.uint8))
    width, height, color = second
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    header = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    forged = file[:33] + header + file[33:]
    assert image.problem(forged) == "it has two headers"
    with pytest.raises(ValueError, match="two headers"):
        image.decode(forged, np.empty((4, 6, 3), np.uint8))

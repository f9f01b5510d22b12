"""JPEG and PNG files for tests: by Pillow and simplejpeg, taken apart and forged."""

import io
import random
import struct
import zlib

import numpy as np
import simplejpeg
from PIL import Image, PngImagePlugin

SHAPE = (18, 22, 3)
"""Sides that no block of JPEG divides."""


def camera(shape=SHAPE, seed=0):
    """A picture with edges and some noise, as cameras make them."""
    rng = np.random.default_rng(seed)
    rows, columns, channels = np.indices(shape)
    smooth = 128 + 100 * np.sin((rows + 2 * columns + 5 * channels + seed) / 9)
    return (smooth + rng.integers(-9, 10, shape)).clip(0, 255).astype(np.uint8)


def noise(shape=SHAPE, seed=0):
    """The array that no codec makes smaller."""
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def jpeg(array, quality=90, subsampling="420"):
    """What simplejpeg, the oracle, makes of an array."""
    gray = array.shape[2] == 1
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(array),
        quality,
        "GRAY" if gray else "RGB",
        "Gray" if gray else subsampling,
        fastdct=False,
    )


def pixels_of(file):
    """What the oracles see in a file, ``[height, width, channels]``."""
    if file.startswith(b"\xff\xd8"):
        gray = simplejpeg.decode_jpeg_header(file)[2] == "Gray"
        return simplejpeg.decode_jpeg(file, "GRAY" if gray else "RGB")
    with Image.open(io.BytesIO(file)) as image:
        array = np.asarray(image)
    return array[..., None] if array.ndim == 2 else array


def by_pillow(array, form, mode=None, **options):
    """A file of Pillow's, of an array or an image."""
    image = array
    if isinstance(array, np.ndarray):
        image = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    if mode is not None:
        image = image.convert(mode)
    packed = io.BytesIO()
    image.save(packed, form, **options)
    return packed.getvalue()


def png(array, **options):
    """A PNG of Pillow's."""
    return by_pillow(array, "PNG", **options)


def texts(**chunks):
    """Text chunks for Pillow: keys ``tEXt``, ``zTXt`` and ``iTXt``."""
    info = PngImagePlugin.PngInfo()
    for kind, text in chunks.items():
        if kind == "iTXt":
            info.add_itxt("note", text)
        else:
            info.add_text("note", text, zip=kind == "zTXt")
    return info


def segments_of(file):
    """The segments ``[(kind, body)]`` of a JPEG up to its first scan, and the rest."""
    at, found = 2, []
    while True:
        kind, nbytes = file[at + 1], int.from_bytes(file[at + 2 : at + 4])
        found.append((kind, file[at + 4 : at + 2 + nbytes]))
        at += 2 + nbytes
        if kind == 0xDA:
            return found, file[at:]


def jpeg_of(segments, rest):
    """The reverse of `segments_of`."""
    packed = [b"\xff\xd8"]
    for kind, body in segments:
        packed.append(bytes([0xFF, kind]) + (len(body) + 2).to_bytes(2) + body)
    return b"".join([*packed, rest])


def with_frame(file, process=None, **numbers):
    """A JPEG whose frame header says other things."""
    segments, rest = segments_of(file)
    changed = []
    for kind, body in segments:
        if kind in (0xC0, 0xC1):
            names = ("precision", "height", "width", "components")
            said = dict(zip(names, struct.unpack(">BHHB", body[:6]), strict=True)) | numbers
            body = struct.pack(">BHHB", *said.values()) + body[6:]
            kind = process or kind
        changed.append((kind, body))
    return jpeg_of(changed, rest)


def frame_of(file):
    """The segment that is a JPEG's frame header."""
    return next(each for each in segments_of(file)[0] if each[0] in (0xC0, 0xC1))


def scans_apart(array, quality=90):
    """A baseline JPEG, 4:4:4, with a scan for each color, of three gray ones."""
    planes = np.asarray(Image.fromarray(array).convert("YCbCr"))
    files = [jpeg(np.ascontiguousarray(planes[..., n : n + 1]), quality) for n in range(3)]
    segments, _ = segments_of(files[0])
    made, scans = [], []
    for kind, body in segments:
        if kind == 0xC0:
            components = b"".join(bytes([n, 0x11, 0]) for n in (1, 2, 3))
            body = body[:5] + b"\x03" + components
        if kind != 0xDA:
            made.append((kind, body))
    for n, file in enumerate(files):
        _, data = segments_of(file)
        scans.append(b"\xff\xda\x00\x08\x01" + bytes([n + 1, 0, 0, 63, 0]) + data[:-2])
    return jpeg_of(made, b"".join(scans) + b"\xff\xd9")


def chunks_of(file):
    """The chunks ``[(name, data)]`` of a PNG."""
    at, found = 8, []
    while at < len(file):
        (nbytes,) = struct.unpack(">I", file[at : at + 4])
        found.append((file[at + 4 : at + 8], file[at + 8 : at + 8 + nbytes]))
        at += 12 + nbytes
    return found


def chunk(name, data):
    """A chunk with the checksum that it has to have."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(chunks):
    """The reverse of `chunks_of`."""
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


def with_header(file, **numbers):
    """A PNG whose header says other things, and whose checksum fits."""
    chunks = chunks_of(file)
    names = ("width", "height", "bits", "color", "compression", "filter", "interlace")
    said = dict(zip(names, struct.unpack(">IIBBBBB", chunks[0][1]), strict=True)) | numbers
    return png_of([(b"IHDR", struct.pack(">IIBBBBB", *said.values())), *chunks[1:]])


def with_chunk(file, name, data=b"", at=1):
    """A PNG with one more chunk."""
    chunks = chunks_of(file)
    return png_of([*chunks[:at], (name, data), *chunks[at:]])


NAMES = [b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"tRNS", b"PLTE", b"gAMA", b"cHRM", b"pHYs", b"sRGB"]
NAMES += [b"bKGD", b"eXIf", b"tIME", b"acTL", b"fcTL", b"fdAT", b"IDAT", b"IEND", b"IHDR", b"abCd"]


def mutant(file, rng):
    """A file with some damage.

    Args:
        file: A valid one.
        rng: A `random.Random`, which decides.
    """
    kinds = [_flipped, _flipped, _shortened, _doubled, _inserted, _rewritten]
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        try:
            file = rng.choice(kinds)(file, rng)
        except (IndexError, ValueError, struct.error):
            # No longer one that can be taken apart.
            file = _flipped(file, rng)
    return file


def _flipped(file, rng):
    data = bytearray(file or b"\0")
    for _ in range(rng.choice([1, 1, 3, 30])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _shortened(file, rng):
    data = file[: rng.randrange(len(file) + 1)]
    # With its end, so that more is looked at.
    ends = [b"", b"\xff\xd9", chunk(b"IEND", b""), b"\0" * 9]
    return data + rng.choice(ends)


def _doubled(file, rng):
    if file.startswith(b"\xff\xd8"):
        segments, rest = segments_of(file)
        segments.insert(rng.randrange(len(segments)), rng.choice(segments))
        return jpeg_of(segments, rest * rng.choice([1, 1, 2]))
    chunks = chunks_of(file)
    chunks.insert(rng.randrange(1, len(chunks)), rng.choice(chunks))
    return png_of(chunks)


def _inserted(file, rng):
    body = rng.randbytes(rng.choice([0, 1, 2, 3, 5, 9, 40, 5000]))
    if file.startswith(b"\xff\xd8"):
        segments, rest = segments_of(file)
        kind = rng.choice([0xC4, 0xC8, 0xCC, 0xDB, 0xDC, 0xDD, 0xDE, 0xE0, 0xE1, 0xEE, 0xFE, 1])
        segments.insert(rng.randrange(len(segments)), (kind, body))
        return jpeg_of(segments, rest)
    chunks = chunks_of(file)
    return with_chunk(file, rng.choice(NAMES), body, rng.randrange(len(chunks) + 1))


def _rewritten(file, rng):
    """Bytes of one segment or chunk change; its length and checksum fit."""
    if file.startswith(b"\xff\xd8"):
        segments, rest = segments_of(file)
        at = rng.randrange(len(segments))
        segments[at] = (segments[at][0], _flipped(segments[at][1], rng))
        return jpeg_of(segments, rest)
    chunks = chunks_of(file)
    at = rng.randrange(len(chunks))
    chunks[at] = (chunks[at][0], _flipped(chunks[at][1], rng))
    return png_of(chunks)


def mutants(file, count, seed):
    """So many mutants of a file."""
    rng = random.Random(seed)
    return (mutant(file, rng) for _ in range(count))

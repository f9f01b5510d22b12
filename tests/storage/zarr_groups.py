"""Groups of arrays as others write them: by zarr-python, in either version."""

import warnings

import numcodecs
import numpy as np
import zarr

V2_COMPRESSORS = {
    "blosc-lz4": numcodecs.Blosc("lz4"),
    "blosc-zstd": numcodecs.Blosc("zstd", shuffle=numcodecs.Blosc.BITSHUFFLE),
    "zstd": numcodecs.Zstd(3),
    "zlib": numcodecs.Zlib(1),
    "gzip": numcodecs.GZip(1),
    "bz2": numcodecs.BZ2(1),
    "lzma": numcodecs.LZMA(preset=1),
    "lz4": numcodecs.LZ4(),
    "none": None,
}
V3_COMPRESSORS = {
    "blosc": [zarr.codecs.BloscCodec(cname="lz4", shuffle="shuffle", typesize=8)],
    "zstd": [zarr.codecs.ZstdCodec(level=3)],
    "gzip": [zarr.codecs.GzipCodec(level=1)],
    "zstd, crc32c": [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()],
    "none": None,
}


def values(rng, dtype, shape):
    """Values of a dtype, some of them the fill value."""
    found = rng.integers(0, 100, shape).astype(dtype)
    found[: len(found) // 3] = 0
    return found


def put(group, name, data, **options):
    """An array of a group, with what is in it."""
    options.setdefault("chunks", tuple(max(1, min(7, n)) for n in data.shape))
    with warnings.catch_warnings():
        # zarr-python warns of codecs that only numcodecs names.
        warnings.simplefilter("ignore")
        array = group.create_array(name, shape=data.shape, dtype=data.dtype, **options)
        array[...] = data
    return array


def policy_store(path, rng, version=2, lengths=(20, 40, 40), **options):
    """A store as diffusion policies have them: ``data/*`` and ``meta/episode_ends``.

    Returns:
        What its arrays hold, by the names of fields.
    """
    rows = sum(lengths)
    held = {
        "img": rng.integers(0, 256, (rows, 6, 5, 3)).astype("uint8"),
        "state": rng.random((rows, 5)).astype("float32"),
        "action": rng.random((rows, 2)),
    }
    store = zarr.storage.ZipStore(path, mode="w") if path.suffix == ".zip" else path
    group = zarr.open_group(store, mode="w", zarr_format=version)
    for name, data in held.items():
        put(group, f"data/{name}", data, **options)
    put(group, "meta/episode_ends", np.cumsum(lengths).astype("int64"))
    if path.suffix == ".zip":
        store.close()
    return held

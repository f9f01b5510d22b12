"""Arrays that zarr-python wrote, read item by item, against what it was given."""

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmreplay.errors import CorruptError, FormatError
from mmreplay.zarr_groups import arrays, hierarchy
from mmreplay.zarr_groups.blobs import FolderBlobs
from tests.storage.zarr_groups import V2_COMPRESSORS, V3_COMPRESSORS, put, values


def rows_of(path, name, rows, complete=False):
    """Some rows of an array, as our reader gives them."""
    blobs = FolderBlobs(path)
    array = hierarchy.read(blobs).array(name)
    reader = arrays.ChunkedReader(blobs, complete=complete)
    out = np.empty((len(rows), *array.shape[1:]), array.dtype.newbyteorder("="))
    reader.take(array, [np.asarray(rows)], out)
    return out


def check(path, rng, data, version, **options):
    """Write data under options; every row, and some in any order, read as given."""
    put(zarr.open_group(path, mode="w", zarr_format=version), "a/b", data, **options)
    rows = rng.integers(0, len(data), 50)
    for some in (np.arange(len(data)), rows, rows[:0]):
        assert np.array_equal(rows_of(path, "a/b", some), data[some])


@pytest.mark.parametrize("name", V2_COMPRESSORS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_codec_of_version_2_is_read(tmp_path, rng, name, order):
    data = values(rng, "float64", (23, 4, 3))
    options = {"compressors": V2_COMPRESSORS[name], "order": order}
    check(tmp_path / "g", rng, data, 2, chunks=(5, 3, 3), **options)


@pytest.mark.parametrize("name", V3_COMPRESSORS)
@pytest.mark.parametrize("shards", [None, (10, 6, 3)])
def test_every_codec_of_version_3_is_read(tmp_path, rng, name, shards):
    data = values(rng, "float64", (23, 4, 3))
    options = {"compressors": V3_COMPRESSORS[name], "shards": shards}
    check(tmp_path / "g", rng, data, 3, chunks=(5, 3, 3), **options)


DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    ">i4",
    ">f8",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("version", [2, 3])
def test_every_dtype_is_read_in_either_byte_order(tmp_path, rng, dtype, version):
    options = {}
    if version == 3 and dtype.startswith(">"):
        # In version 3 the codec tells the byte order, not the dtype.
        options["serializer"] = zarr.codecs.BytesCodec(endian="big")
        dtype = dtype[1:]
    check(tmp_path / "g", rng, values(rng, dtype, (23, 3)), version, **options)


@pytest.mark.parametrize(
    "filters",
    [numcodecs.Delta("<i4"), numcodecs.Shuffle(4), numcodecs.FixedScaleOffset(0, 1, "<i4", "<i2")],
    ids=lambda codec: codec.codec_id,
)
def test_filters_of_version_2_are_undone(tmp_path, rng, filters):
    data = values(rng, "int32", (40, 3))
    check(tmp_path / "g", rng, data, 2, filters=[filters], compressors=numcodecs.Zstd())


@pytest.mark.parametrize("end", ["start", "end"])
def test_transposed_shards_with_their_index_at_either_end_are_read(tmp_path, rng, end):
    data = values(rng, "float32", (40, 4, 6, 2))
    inner = [
        zarr.codecs.TransposeCodec(order=(2, 0, 3, 1)),
        zarr.codecs.BytesCodec(),
        zarr.codecs.ZstdCodec(),
    ]
    codec = zarr.codecs.ShardingCodec(chunk_shape=(5, 4, 3, 2), codecs=inner, index_location=end)
    check(tmp_path / "g", rng, data, 3, chunks=(20, 4, 6, 2), serializer=codec, compressors=None)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
@pytest.mark.slow
def test_any_shape_in_any_chunks_and_shards_is_read(tmp_path, data):
    axes = data.draw(st.integers(1, 4))
    chunk = data.draw(st.tuples(*[st.integers(1, 5)] * axes))
    shape = data.draw(st.tuples(*[st.integers(1, 11)] * axes))
    inner = data.draw(st.none() | st.tuples(*[st.integers(1, 3)] * axes))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    held = values(rng, data.draw(st.sampled_from(DTYPES[:12])), shape)
    shards = inner and tuple(c * n for c, n in zip(chunk, inner, strict=True))
    made = zarr.open_group(tmp_path / "g", mode="w")
    put(made, "a", held, chunks=chunk, shards=shards)
    rows = rng.integers(0, shape[0], 20)
    assert np.array_equal(rows_of(tmp_path / "g", "a", rows), held[rows])


@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("version", [2, 3])
def test_names_of_chunks_with_either_separator_are_found(tmp_path, rng, separator, version):
    name = "v2" if version == 2 else "default"
    key = {"name": name, "separator": separator}
    data = values(rng, "int16", (30, 4))
    check(tmp_path / "g", rng, data, version, chunk_key_encoding=key, chunks=(7, 2))


@pytest.mark.parametrize("fill", [7.5, float("nan"), float("-inf"), -0.0])
@pytest.mark.parametrize("version", [2, 3])
def test_what_no_chunk_holds_is_the_fill_value(tmp_path, rng, fill, version):
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    array = group.create_array("a", shape=(40, 3), chunks=(10, 3), dtype="float32", fill_value=fill)
    array[10:20] = 1
    wanted = np.full((40, 3), fill, "float32")
    wanted[10:20] = 1
    got = rows_of(tmp_path / "g", "a", np.arange(40))
    assert got.tobytes() == wanted.tobytes()


def test_what_is_alive_and_in_no_chunk_is_damage_where_all_are_written(tmp_path, rng):
    group = zarr.open_group(tmp_path / "g", mode="w")
    group.create_array("a", shape=(40,), chunks=(10,), dtype="float32")
    with pytest.raises(CorruptError, match=r"chunk \[0\] .*is damaged: it is missing"):
        rows_of(tmp_path / "g", "a", [3], complete=True)


def test_a_chunk_is_decoded_once_while_it_is_cached(tmp_path, rng, monkeypatch):
    data = values(rng, "float32", (40, 3))
    put(zarr.open_group(tmp_path / "g", mode="w"), "a", data, chunks=(10, 3))
    blobs = FolderBlobs(tmp_path / "g")
    array, reader = hierarchy.read(blobs).array("a"), arrays.ChunkedReader(blobs)
    asked = []
    fetch = blobs.fetch
    monkeypatch.setattr(
        blobs, "fetch", lambda wanted, limit: asked.append(wanted) or fetch(wanted, limit)
    )
    out = np.empty((40, 3), "float32")
    for _ in range(3):
        reader.take(array, [np.arange(40)], out)
    assert [len(wanted) for wanted in asked] == [4]


def test_cached_chunks_are_bounded(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(arrays, "CACHE_NBYTES", 1000)
    data = values(rng, "float64", (400, 5))
    put(zarr.open_group(tmp_path / "g", mode="w"), "a", data, chunks=(10, 5))
    blobs = FolderBlobs(tmp_path / "g")
    array, reader = hierarchy.read(blobs).array("a"), arrays.ChunkedReader(blobs)
    out = np.empty((400, 5))
    reader.take(array, [np.arange(400)], out)
    assert np.array_equal(out, data)
    assert sum(each.nbytes for each in reader._chunks._arrays.values()) <= 1000


def test_fetches_are_bounded_by_their_bytes(tmp_path, rng, monkeypatch):
    monkeypatch.setattr(arrays, "FETCH_NBYTES", 1000)
    data = values(rng, "float64", (100, 5))
    put(zarr.open_group(tmp_path / "g", mode="w"), "a", data, chunks=(10, 5))
    blobs = FolderBlobs(tmp_path / "g")
    limit = []
    fetch = blobs.fetch
    monkeypatch.setattr(blobs, "fetch", lambda w, m: limit.append(len(w)) or fetch(w, m))
    array = hierarchy.read(blobs).array("a")
    out = np.empty((100, 5))
    arrays.ChunkedReader(blobs).take(array, [np.arange(100)], out)
    # Chunks of 400 bytes; the metadata was asked for first.
    assert np.array_equal(out, data)
    assert limit[-5:] == [2] * 5


def test_a_damaged_chunk_is_named(tmp_path, rng):
    put(zarr.open_group(tmp_path / "g", mode="w"), "a", values(rng, "int32", (20, 3)))
    (tmp_path / "g/a/c/2/0").write_bytes(b"no chunk of Zstandard")
    with pytest.raises(CorruptError, match=r"g: chunk \[2, 0\] of array 'a' is"):
        rows_of(tmp_path / "g", "a", [15])


def test_a_chunk_that_says_it_is_larger_is_refused_before_it_is_unpacked(tmp_path, rng):
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=2)
    put(group, "a", values(rng, "int32", (20, 3)), compressors=numcodecs.Zlib())
    (tmp_path / "g/a/1.0").write_bytes(numcodecs.Zlib().encode(bytes(1 << 28)))
    with pytest.raises(FormatError, match=r"but its array allows at most \d+"):
        rows_of(tmp_path / "g", "a", [9])


def test_a_shard_whose_index_is_damaged_is_named(tmp_path, rng):
    data = values(rng, "int32", (40, 3))
    put(zarr.open_group(tmp_path / "g", mode="w"), "a", data, chunks=(5, 3), shards=(20, 3))
    path = tmp_path / "g/a/c/1/0"
    held = bytearray(path.read_bytes())
    held[-9] ^= 1
    path.write_bytes(held)
    with pytest.raises(CorruptError, match=r"chunk \[1, 0\] .*: its index does"):
        rows_of(tmp_path / "g", "a", [25])
    path.write_bytes(held[:10])
    with pytest.raises(CorruptError, match=r"has 10 bytes, but needs at least 68"):
        rows_of(tmp_path / "g", "a", [25])

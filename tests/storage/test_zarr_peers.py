"""Groups of ours in the readers that others wrote: each field equals ours."""

import warnings

import numpy as np
import pytest
import zarr

import mmreplay as mr
from mmreplay.storage.zarr.group import folder_name
from tests.buffer.test_sealed_groups import record

pytestmark = pytest.mark.peer


def by_tensorstore(path):
    """Arrays by name, read by tensorstore."""
    library = pytest.importorskip("tensorstore", reason="tensorstore is not installed")

    def read(name):
        place = {"driver": "file", "path": f"{path / name}/"}
        spec = {"driver": "zarr3", "kvstore": place}
        return library.open(spec, read=True, open=True).result().read().result()

    return read


def by_zarrs(path):
    """Arrays by name, read by zarrs under zarr-python."""
    pytest.importorskip("zarrs", reason="zarrs is not installed")
    pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}

    def read(name):
        with zarr.config.set(pipeline), warnings.catch_warnings():
            # It warns where it leaves an array to zarr-python, which is no reading.
            warnings.simplefilter("error")
            return zarr.open_array(path / name, mode="r")[...]

    return read


READERS = {"tensorstore": by_tensorstore, "zarrs": by_zarrs}


@pytest.mark.parametrize("layout", ["env_major", "time_major"])
@pytest.mark.parametrize("codec", ["blosc-lz4", "zstd", "none"])
@pytest.mark.parametrize("reader", READERS)
def test_another_reader_reads_every_field_of_a_closed_buffer(
    tmp_path, rng, reader, codec, layout
):
    wanted, path = record(tmp_path / "b", rng, layout=layout, codec=codec)
    read = READERS[reader](path)
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        slots = wanted.positions % buffer.slots
        flags = buffer.flags(wanted.env_ids, wanted.positions)
    assert np.array_equal(np.asarray(read("%flags"))[wanted.env_ids, slots], flags)
    for name in ("pixels", "joint.angles", "half"):
        found = np.asarray(read(folder_name(f"observation/{name}")))
        picked = found[wanted.env_ids, slots]
        assert picked.tobytes() == wanted[f"observation/{name}"].tobytes(), name
    for name in ("action", "reward", "terminated", "truncated"):
        found = np.asarray(read(name))[wanted.env_ids, slots]
        assert found.tobytes() == wanted[name].tobytes(), name


def texts(path):
    """A closed buffer of texts and tokens, and the path of its group."""
    schema = mr.Schema(
        {
            "text": mr.Field.text(max_bytes=60),
            "tokens": mr.Field((None,), "int16", max_length=20),
            "number": mr.Field((), "int64"),
        }
    )
    with mr.ReplayBuffer.create(
        path, schema, 60, engine="zarr", heap_bytes=8192
    ) as buffer:
        for number in range(60):
            tokens = np.arange(number % 7, dtype=np.int16)
            buffer.add(text=f"å{number}" * (number % 5), tokens=tokens, number=number)
        return buffer.zarr_path


def test_zarrs_reads_text_and_bytes(tmp_path):
    path = texts(tmp_path / "b")
    assert by_zarrs(path)("text")[0, :60].tolist() == [
        f"å{number}" * (number % 5) for number in range(60)
    ]
    pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
    with zarr.config.set(pipeline), pytest.warns(Warning, match="V3 specification"):
        tokens = zarr.open_array(path / "tokens", mode="r")[0, :60]
    assert [len(value) // 2 for value in tokens] == [n % 7 for n in range(60)]


def test_tensorstore_refuses_text_and_bytes_by_name_and_reads_the_rest(tmp_path):
    path = texts(tmp_path / "b")
    read = by_tensorstore(path)
    assert np.asarray(read("number"))[0, :60].tolist() == list(range(60))
    for name, kind in (("text", "string"), ("tokens", "variable_length_bytes")):
        with pytest.raises(ValueError, match=f"{kind} data type is not one of the sup"):
            read(name)


@pytest.mark.parametrize("codec", ["blosc-lz4", "zstd"])
def test_what_tensorstore_wrote_is_read(tmp_path, rng, codec):
    library = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    data = rng.random((60, 5, 3))
    packed = {
        "zstd": {"name": "zstd", "configuration": {"level": 1}},
        "blosc-lz4": {
            "name": "blosc",
            "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle"},
        },
    }
    inner = [{"name": "bytes"}, packed[codec], {"name": "crc32c"}]
    sharded = {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [4, 5, 3], "codecs": inner},
    }
    zarr.open_group(tmp_path / "g", mode="w")
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/g/obs/"},
        "metadata": {
            "shape": [60, 5, 3], "data_type": "float64", "codecs": [sharded],
            "chunk_grid": {
                "name": "regular", "configuration": {"chunk_shape": [20, 5, 3]},
            },
        },
    }  # fmt: skip
    array = library.open(spec, create=True).result()
    array.write(data).result()
    with mr.ReplayBuffer.open(tmp_path / "g") as buffer:
        assert np.array_equal(buffer.gather_all()["obs"], data)

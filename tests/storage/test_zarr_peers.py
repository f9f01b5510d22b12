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
def test_another_reader_reads_every_field_of_a_closed_buffer(tmp_path, rng, reader, codec, layout):
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
    with mr.ReplayBuffer.create(path, schema, 60, engine="zarr", heap_bytes=8192) as buffer:
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
            "shape": [60, 5, 3],
            "data_type": "float64",
            "codecs": [sharded],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [20, 5, 3]}},
        },
    }
    array = library.open(spec, create=True).result()
    array.write(data).result()
    with mr.ReplayBuffer.open(tmp_path / "g") as buffer:
        assert np.array_equal(buffer.gather_all()["obs"], data)


def group_of(path, rng, version, shards):
    """A policy's store that zarr-python made, and then edited.

    Episodes are appended, a slice is written over, and rows that nobody wrote are
    added.
    """
    rows = 1_100
    kinds = {
        "data/img": (rng.integers(0, 256, (rows, 6, 5, 3), np.uint8), (37, 6, 5, 2)),
        "data/state": (rng.normal(size=(rows, 5)).astype("f4"), (50, 5)),
        "data/action": (rng.normal(size=(rows, 2)), (64, 1)),
        "data/half": (rng.normal(size=rows).astype("f2"), (100,)),
        "data/flag": (rng.random(rows) < 0.3, (128,)),
        "data/count": (rng.integers(-9, 9, (rows, 2, 3)), (33, 2, 2)),
        "meta/episode_ends": (np.sort(rng.permutation(rows)[:40]) + 1, (16,)),
    }
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, (data, chunks) in kinds.items():
        options = {"fill_value": 3} if name == "data/count" else {}
        if shards and name.startswith("data/"):
            options["shards"] = tuple(3 * n for n in chunks)
        array = group.create_array(
            name, shape=data.shape, chunks=chunks, dtype=data.dtype, **options
        )
        array[...] = data
    extra = 150
    for name, (data, _) in kinds.items():
        array = group[name]
        if name.startswith("meta/"):
            array.append(np.array([rows + 60, rows + extra]))
        elif name == "data/count":
            array.resize((rows + extra, *data.shape[1:]))
            array[rows + 120 :] = 5
        else:
            array.append(data[:extra][::-1].copy())
            array[200:260] = data[300:360]
    return [name.removeprefix("data/") for name in kinds if name != "meta/episode_ends"]


@pytest.mark.parametrize(("version", "shards"), [(2, False), (3, False), (3, True)])
def test_edited_groups_are_read_as_tensorstore_and_zarr_python_read_them(
    tmp_path, rng, version, shards
):
    library = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    path = tmp_path / "group"
    names = group_of(path, rng, version, shards)
    report = mr.load(path, tmp_path / "buffer")
    doubts = [doubt for doubt in report.doubts if "'data/count' are not there" in doubt]
    assert doubts == list(report.doubts)
    assert len(doubts) == 1
    assert report.rows == 1_250
    group = zarr.open_group(path, mode="r")
    driver = {2: "zarr", 3: "zarr3"}[version]
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        rows = buffer.gather_all()
        assert set(buffer.schema.paths) == {*names, "terminated", "truncated"}
    with mr.ReplayBuffer.open(path) as buffer:
        # The last step of an episode has no next observation, and is no start.
        order = rng.permutation(np.flatnonzero(~rows["truncated"]))
        taken = buffer.take(np.zeros(len(order), np.int64), order)
        for name in names:
            place = {"driver": "file", "path": f"{path}/data/{name}/"}
            spec = {"driver": driver, "kvstore": place}
            theirs = library.open(spec, read=True, open=True).result().read().result()
            for wanted in (np.asarray(theirs), group[f"data/{name}"][...]):
                assert rows[name].dtype == wanted.dtype
                assert rows[name].tobytes() == wanted.tobytes(), name
                some = np.asarray(taken[name])
                assert some.tobytes() == wanted[order].tobytes(), name
    ends = group["meta/episode_ends"][...]
    assert np.flatnonzero(rows["truncated"]).tolist() == (ends - 1).tolist()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_groups_that_tensorstore_made_and_edited_are_read(tmp_path, rng, driver):
    library = pytest.importorskip("tensorstore", reason="tensorstore is not installed")
    path, rows = tmp_path / "group", 1_300
    zarr.open_group(path, mode="w", zarr_format=2 if driver == "zarr" else 3)
    held = {
        "obs": rng.normal(size=(rows, 4, 3)),
        "action": rng.integers(0, 9, rows),
        "reward": rng.normal(size=rows).astype("f4"),
        "terminated": rng.random(rows) < 0.03,
        "pixels": rng.integers(0, 256, (rows, 8, 8), np.uint8),
    }
    arrays = {}
    for name, data in held.items():
        place = {"driver": "file", "path": f"{path}/{name}/"}
        arrays[name] = library.open(
            {"driver": driver, "kvstore": place},
            create=True,
            shape=[rows - 300, *data.shape[1:]],
            dtype=data.dtype,
            chunk_layout=library.ChunkLayout(
                chunk_shape=[70, *[max(1, n // 2) for n in data.shape[1:]]]
            ),
        ).result()
        arrays[name].write(data[: rows - 300]).result()
        arrays[name] = arrays[name].resize(exclusive_max=[rows, *data.shape[1:]]).result()
        arrays[name][rows - 300 :].write(data[rows - 300 :]).result()
        arrays[name][40:90].write(data[100:150]).result()
        data[40:90] = data[100:150]
    report = mr.load(path, tmp_path / "buffer")
    assert report.rows == rows
    # It leaves out chunks in which nothing ends.
    assert all("of array 'terminated' are not there" in each for each in report.doubts)
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        found = buffer.gather_all()
        assert {*held, "truncated"} == set(buffer.schema.paths)
    for name, data in held.items():
        theirs = np.asarray(arrays[name].read().result())
        assert found[name].tobytes() == theirs.tobytes() == data.tobytes(), name

"""Zarr groups as sources of buffers and files, and what info says of them."""

import json

import numpy as np
import pytest
import zarr

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.convert import base, registry
from mmreplay.errors import CorruptError, FormatError, SchemaError, SourceError
from mmreplay.zarr_groups import arrays
from tests.storage.zarr_groups import policy_store, put


@pytest.mark.parametrize("name", ["a.zarr", "a.zarr.zip"])
@pytest.mark.parametrize("version", [2, 3])
def test_a_group_becomes_a_buffer_and_a_file(tmp_path, rng, name, version):
    held = policy_store(tmp_path / name, rng, version, lengths=(5, 30, 8))
    report = mr.load(tmp_path / name, tmp_path / "buffer", strict=True)
    assert (report.rows, report.episodes) == (43, 3)
    assert "field 'img' is array 'data/img'" in report.notes
    mr.load(tmp_path / name, tmp_path / "small", fields=["state"], capacity=10)
    with (
        mr.ReplayBuffer.open(tmp_path / "buffer") as buffer,
        mr.ReplayBuffer.open(tmp_path / "small") as small,
    ):
        rows, few = buffer.gather_all(), small.gather_all()
        assert buffer.episodes.episodes(0).begin.tolist() == [0, 5, 35]
    for path, data in held.items():
        assert np.array_equal(rows[path], data)
    assert next(iter(few.fields)) == "state"
    assert np.array_equal(few["state"], held["state"][-10:])
    assert np.flatnonzero(rows["truncated"]).tolist() == [4, 34, 42]


def test_shards_within_a_zip_file_are_read(tmp_path, rng):
    held = policy_store(tmp_path / "a.zip", rng, 3)
    with zarr.storage.ZipStore(tmp_path / "b.zip", mode="w") as store:
        group = zarr.open_group(store, mode="w")
        put(group, "obs", held["img"], chunks=(5, 6, 5, 3), shards=(25, 6, 5, 3))
    with mr.ReplayBuffer.open(tmp_path / "b.zip") as buffer:
        assert np.array_equal(buffer.gather_all()["obs"], held["img"])


def test_options_say_what_arrays_are(tmp_path, rng):
    held = policy_store(tmp_path / "a.zarr", rng)
    mr.load(
        tmp_path / "a.zarr",
        tmp_path / "b",
        ends="terminated",
        fields_of={"data/img": "observation/img", "data/action": "action"},
    )
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        rows = buffer.gather_all()
    assert np.array_equal(rows["observation/img"], held["img"])
    assert np.flatnonzero(rows["terminated"]).tolist() == [19, 59, 99]
    assert "state" not in rows.fields


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fields_of": {"data/img": 3}}, r"fields_of\['data/img'\] must be a text, got 3"),
        ({"fields_of": {"data/img": [1]}}, r"fields_of\['data/img'\] must be a text"),
        ({"episode_ends": [1]}, r"episode_ends must be a str, got \[1\]\. Leave it"),
        ({"endpoint": 3}, "endpoint must be a str, got 3"),
        ({"region": 3}, "region must be a str, got 3"),
    ],
)
def test_options_that_are_no_texts_are_refused(tmp_path, rng, options, match):
    policy_store(tmp_path / "a.zarr", rng)
    with pytest.raises(SchemaError, match=match):
        mr.load(tmp_path / "a.zarr", tmp_path / "b", **options)


@pytest.mark.parametrize("name", ["a.zarr", "a.zip"])
def test_a_source_goes_with_all_that_it_says(tmp_path, rng, name):
    held = policy_store(tmp_path / name, rng)
    source = mr.ZarrSource(tmp_path / name, fields={"data/img": "observation"})
    mr.load(source, tmp_path / "b")
    mr.export(source, tmp_path / "c.npz")
    mr.load(tmp_path / "c.npz", tmp_path / "c")
    for each in ("b", "c"):
        with mr.ReplayBuffer.open(tmp_path / each) as buffer:
            rows = buffer.gather_all()
        assert set(rows.fields) == {"observation", "terminated", "truncated", "final"}
        assert np.array_equal(rows["observation"], held["img"])


def test_what_is_guessed_is_refused_under_strict(tmp_path, rng):
    put(zarr.open_group(tmp_path / "a", mode="w"), "obs", rng.random((30, 2)))
    assert mr.load(tmp_path / "a", tmp_path / "b").doubts
    with pytest.raises(SourceError, match="no column says where episodes end: all rows"):
        mr.load(tmp_path / "a", tmp_path / "c", strict=True)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("shards", [None, (14, 2)])
def test_chunks_that_a_copy_lost_are_a_doubt(tmp_path, rng, version, shards):
    if version == 2 and shards is not None:
        return
    path = tmp_path / "group"
    group = zarr.open_group(path, mode="w", zarr_format=version)
    held = rng.random((28, 2))
    put(group, "obs", held, chunks=(7, 2), shards=shards)
    put(group, "action", rng.random(28))
    put(group, "episode_ends", np.array([14, 28]))
    mr.load(path, tmp_path / "whole", strict=True)
    lost = {None: {2: "1.0", 3: "c/1/0"}, (14, 2): {3: "c/0/0"}}[shards][version]
    (path / "obs" / lost).unlink()
    report = mr.load(path, tmp_path / "buffer")
    count = "1 chunk" if shards is None else "2 chunks"
    assert report.doubts == (
        f"{count} of array 'obs' are not there, and were read as its fill value: "
        "writers leave out chunks of nothing else, but a copy may lack some",
    )
    held[7:14] = 0
    held[:7] *= shards is None
    with mr.ReplayBuffer.open(tmp_path / "buffer") as buffer:
        np.testing.assert_array_equal(buffer.gather_all()["obs"], held)
    with pytest.raises(SourceError, match="of array 'obs' are not there"):
        mr.load(path, tmp_path / "strict", strict=True)
    with mr.ReplayBuffer.open(path) as buffer:
        assert buffer.mapping.missing == {}
        buffer.gather_all()
        assert buffer.mapping.missing == {"obs": int(count[0])}


def test_groups_are_distinguished_from_other_folders_and_zip_files(tmp_path, rng):
    policy_store(tmp_path / "a.zarr", rng)
    (tmp_path / "b").mkdir()
    (tmp_path / "c.zip").write_bytes(b"no zip file")
    assert registry.source_format(tmp_path / "a.zarr").name == "zarr"
    for name, expected in (
        ("b", "must be a buffer or one of .* of no known format"),
        ("c.zip", "of no known format. Its name fits"),
    ):
        with pytest.raises(FormatError, match=expected):
            registry.source_format(tmp_path / name)
    with pytest.raises(FormatError, match="mmreplay writes no format of this name"):
        registry.target_format(tmp_path / "a.zip")


def test_the_command_line_converts_and_tells(tmp_path, rng, capsys):
    policy_store(tmp_path / "a.zarr", rng)
    assert run(["convert", str(tmp_path / "a.zarr"), str(tmp_path / "b.npz")]) == 0
    assert "3 episodes end where 'meta/episode_ends' says" in capsys.readouterr().out
    assert run(["info", str(tmp_path / "a.zarr"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["episodes"], facts["never_drawn_steps"]) == (100, 3, 3)
    assert facts["arrays"]["img"] == "data/img"
    assert run(["info", str(tmp_path / "a.zarr")]) == 0
    content = capsys.readouterr().out
    assert "a Zarr group of version 2, not mmreplay's, read only" in content
    assert "derived from flags" in content


def test_memory_is_some_chunks_whatever_the_size(tmp_path, rng, monkeypatch):
    """Kept chunks and fetched ones, of a group many times as large."""
    monkeypatch.setattr(arrays, "CACHE_NBYTES", 1 << 20)
    monkeypatch.setattr(arrays, "FETCH_NBYTES", 1 << 20)
    data = np.zeros((4000, 64, 64), np.uint8)
    data[:, 0, 0] = np.arange(4000) % 251
    put(
        zarr.open_group(tmp_path / "a", mode="w"), "obs", data, chunks=(16, 64, 64)
    )  # 16 MiB, packed to next to nothing
    largest = [0]
    take = arrays.ChunkedReader._take_chunks

    def watched(self, array, positions):
        found = take(self, array, positions)
        held = sum(each.nbytes for each in found.values())
        largest[0] = max(largest[0], held + self._chunks.nbytes)
        return found

    monkeypatch.setattr(arrays.ChunkedReader, "_take_chunks", watched)
    report = mr.load(tmp_path / "a", tmp_path / "b")
    assert report.rows == 4000
    assert largest[0] <= 3 << 20


def test_a_group_of_next_to_nothing_is_not_unpacked_unasked(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "HARMLESS_NBYTES", 1 << 20)
    made = zarr.open_group(tmp_path / "a", mode="w")
    made.create_array("obs", shape=(6000, 64, 64), chunks=(1000, 64, 64), dtype="u1")
    made["obs"][0] = 1
    with pytest.raises(
        FormatError, match="says that 815 bytes hold 24594000, more than 1,000 times"
    ):
        mr.load(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    with mr.ReplayBuffer.open(tmp_path / "a") as buffer:
        assert buffer.take(0, [0, 5998])["obs"].max(axis=(1, 2)).tolist() == [1, 0]


def test_ends_that_would_take_hours_to_read_are_refused(tmp_path):
    made = zarr.open_group(tmp_path / "a", mode="w")
    for name, chunk in (("obs", 1 << 20), ("done", 1)):
        made.create_array(name, shape=(1 << 23,), chunks=(chunk,), dtype="u1")
    with pytest.raises(FormatError, match=r"array 'done' must .* in chunks of 1\."):
        mr.ReplayBuffer.open(tmp_path / "a")


def edited(path, name, change):
    """Change the JSON of one file."""
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))


V2 = "data/img/.zarray"
LIES_2 = {
    "shape": [[1 << 40, 6, 5, 3], [100, 6, 5], "a", [-1, 6, 5, 3], [True] * 4],
    "chunks": [[0, 6, 5, 3], [1 << 30, 6, 5, 3], [7.5, 6, 5, 3], None],
    "fill_value": ["a", [1, 2], {}],
    "order": ["Q", 3],
    "filters": [
        "a",
        3,
        [3],
        [{"id": "pickle"}],
        [{"id": "delta", "dtype": "|O"}],
        [{"id": "astype", "encode_dtype": "O", "decode_dtype": "u1"}],
    ],
    "compressor": [{"id": "none of ours"}, {"id": 3}, "zlib"],
    "dimension_separator": ["x", 3],
}


def test_metadata_of_version_2_that_lies_is_refused(tmp_path, rng):
    policy_store(tmp_path / "a", rng)
    truth = (tmp_path / "a" / V2).read_text()
    for key, value in ((k, each) for k, found in LIES_2.items() for each in found):
        (tmp_path / "a" / V2).write_text(truth)
        edited(tmp_path / "a", V2, lambda content, k=key, v=value: content.update({k: v}))
        with pytest.raises(
            (FormatError, SourceError), match=r"(expected|must|cannot|refuses|allows) .*[;.] "
        ):
            mr.load(tmp_path / "a", tmp_path / f"b{key}", strict=True)


V3 = "data/img/zarr.json"
LIES_3 = {
    "data_type": [3, {"name": 3}],
    "chunk_grid": [{"name": "rectilinear"}, {"name": "regular"}, 3],
    "chunk_key_encoding": [{"name": "other"}, {"name": "default", "configuration": 3}],
    "codecs": [
        [],
        "a",
        [{"name": "zstd"}],
        [{"name": "sharding_indexed"}],
        [3],
        [{"name": "transpose", "configuration": {"order": [*"3210"]}}, "bytes"],
        [{"name": "transpose", "configuration": {"order": [3, 2, 1, False]}}, "bytes"],
    ],
    "storage_transformers": [[{"name": "a"}]],
    "fill_value": ["0xzz", "a"],
}


def test_metadata_of_version_3_that_lies_is_refused(tmp_path, rng):
    policy_store(tmp_path / "a", rng, 3)
    truth = (tmp_path / "a" / V3).read_text()
    for key, value in ((k, each) for k, found in LIES_3.items() for each in found):
        (tmp_path / "a" / V3).write_text(truth)
        edited(tmp_path / "a", V3, lambda content, k=key, v=value: content.update({k: v}))
        with pytest.raises(
            (FormatError, SourceError), match=r"(expected|must|cannot|refuses|allows) .*[;.] "
        ):
            mr.load(tmp_path / "a", tmp_path / f"b{key}", strict=True)


def test_names_that_lead_out_of_the_group_are_refused(tmp_path, rng):
    policy_store(tmp_path / "a", rng)
    nodes = {"../b/.zarray": json.loads((tmp_path / "a" / V2).read_text())}
    (tmp_path / "a/.zmetadata").write_text(
        json.dumps({"zarr_consolidated_format": 1, "metadata": nodes})
    )
    with pytest.raises(FormatError, match=r"must not have empty segments.* got '../b'"):
        mr.load(tmp_path / "a", tmp_path / "b")


def test_arrays_that_are_no_numbers_are_left_out_and_reported(tmp_path, rng):
    policy_store(tmp_path / "a", rng)
    group = zarr.open_group(tmp_path / "a", mode="r+")
    put(group, "data/names", np.array(["abc"] * 100, "S3"))
    put(group, "data/times", np.zeros(100, "M8[ns]"))
    put(group, "data/waves", np.zeros(100, "c16"))
    report = mr.load(tmp_path / "a", tmp_path / "b")
    left = [doubt for doubt in report.doubts if "was left out" in doubt]
    assert len(left) == 3
    with pytest.raises(SourceError, match=r"was left out: .*strict allows no guess"):
        mr.load(tmp_path / "a", tmp_path / "c", strict=True)


def test_a_bomb_in_a_zip_file_is_refused(tmp_path, rng):
    import zipfile

    policy_store(tmp_path / "a", rng)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for each in sorted((tmp_path / "a").rglob("*")):
            if each.is_file():
                name = str(each.relative_to(tmp_path / "a"))
                bomb = name == "data/img/3.0.0.0"
                archive.writestr(name, bytes(1 << 26) if bomb else each.read_bytes())
    with pytest.raises((FormatError, CorruptError), match=r"img/3.*(allow|say)"):
        mr.load(tmp_path / "a.zip", tmp_path / "b")


def test_a_dtype_that_numpy_lacks_is_left_out_and_reported(tmp_path, rng):
    policy_store(tmp_path / "a", rng)
    edited(tmp_path / "a", V2, lambda content: content.update(dtype="<f1"))
    report = mr.load(tmp_path / "a", tmp_path / "b")
    assert any("'data/img' was left out" in doubt for doubt in report.doubts)

"""What is taken for a Zarr group, and where it lies."""

import sys
from pathlib import Path

import pytest

import mmreplay as mr
from mmreplay.errors import FailedError
from mmreplay.storage import remote
from mmreplay.storage.zarr_source import source_of
from tests.storage.zarr_groups import policy_store


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket", "s3://bucket"),
        (str(Path("s3://bucket/a")), "s3://bucket/a"),
        ("s3:bucket/a", None),
        ("/s3://bucket/a", None),
        ("a/s3:/bucket", None),
    ],
)
def test_urls_are_told_from_paths(path, url):
    assert remote.url_of(path) == url


def test_what_is_a_group_is_told_by_its_files(tmp_path, rng):
    policy_store(tmp_path / "a.zarr", rng)
    policy_store(tmp_path / "a.zip", rng)
    schema = mr.Schema({"observation": mr.Field((2,), "float32")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 10).close()
    assert source_of(tmp_path / "a.zarr").location == str(tmp_path / "a.zarr")
    assert source_of(tmp_path / "a.zip").location == str(tmp_path / "a.zip")
    for name in ("b", "none", "a.zarr/data/img/.zarray"):
        assert source_of(tmp_path / name) is None
    # A buffer stays one, whatever else lies in its folder.
    (tmp_path / "b/zarr.json").write_text("{}")
    assert source_of(tmp_path / "b") is None


def test_a_relative_place_is_one_for_workers_elsewhere(tmp_path, rng, monkeypatch):
    policy_store(tmp_path / "a.zarr", rng)
    monkeypatch.chdir(tmp_path)
    assert mr.ZarrSource("a.zarr").location == str(tmp_path / "a.zarr")


def test_a_remote_group_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(FailedError, match=r'install "mmreplay\[remote\]"'):
        mr.ReplayBuffer.open("s3://bucket/prefix")
    with pytest.raises(FailedError, match="which is only read, expected a buffer's fo"):
        mr.ReplayBuffer.open("s3://bucket/prefix", "r+")

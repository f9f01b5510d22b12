"""What is taken for a Zarr group, and where it lies."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zarr

import mmreplay as mr
from mmreplay.disk import address
from mmreplay.errors import FailedError, FormatError, SchemaError
from mmreplay.zarr_groups import remote
from mmreplay.zarr_groups.source import source_of
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
def test_urls_are_distinguished_from_paths(path, url):
    assert address.url_of(path) == url


def test_a_group_is_recognized_by_its_files(tmp_path, rng):
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


def test_a_relative_path_becomes_absolute_for_workers(tmp_path, rng, monkeypatch):
    policy_store(tmp_path / "a.zarr", rng)
    monkeypatch.chdir(tmp_path)
    assert mr.ZarrSource("a.zarr").location == str(tmp_path / "a.zarr")


def test_a_remote_group_without_the_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(FailedError, match=r'install "mmreplay\[remote\]"'):
        mr.ReplayBuffer.open("s3://bucket/prefix")
    with pytest.raises(FailedError, match=r"which cannot be written. Make a buffer"):
        mr.ReplayBuffer.open("s3://bucket/prefix", "r+")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"fields": {"data/obs": 3}}, "fields must be a dict of paths"),
        ({"fields": {}}, r"fields must be a dict of paths .*, got \{\}"),
        ({"fields": [("a", "b")]}, "fields must be a dict of paths"),
        ({"episode_ends": ["meta/ends"]}, "episode_ends must be a str, got"),
        ({"endpoint": 9000}, "endpoint must be a str, got 9000"),
        ({"region": 1}, "region must be a str, got 1"),
        ({"anonymous": "no"}, "anonymous must be True or False, got 'no'"),
        ({"location": None}, "location must be a path or s3://.*, got None"),
        ({"location": b"a.zarr"}, r"location must be a path or s3.*, got b'a.zarr'"),
    ],
)
def test_arguments_of_other_types_are_refused(option, message):
    with pytest.raises(SchemaError, match=message):
        mr.ZarrSource(**{"location": "a.zarr", **option})


def test_a_source_with_fields_has_a_hash():
    one, same = (mr.ZarrSource("a.zarr", fields={"a": "b"}) for _ in range(2))
    assert hash(one) == hash(same)
    assert len({one, same, mr.ZarrSource("a.zarr", fields={"a": "c"})}) == 2


@pytest.fixture
def panicking(monkeypatch):
    """An obstore that must not be asked."""

    class Panic(BaseException):
        pass

    def panic(*args, **options):
        raise Panic

    monkeypatch.setattr(remote, "_library", lambda name: SimpleNamespace(S3Store=panic))


@pytest.mark.parametrize("bucket", ["my bucket", "a?b", "a#b", "ü"])
def test_a_bucket_of_no_name_is_refused_before_the_library_panics(panicking, bucket):
    with pytest.raises(SchemaError, match=r"a bucket's name must be letters"):
        mr.ZarrSource(f"s3://{bucket}/x").open()


@pytest.mark.parametrize(
    "endpoint",
    [
        "localhost:9000",
        "9000",
        "http:/a",
        "ftp://a",
        "http://",
        "http://a b",
        "http://:9",
        "http:///x",
        "https://@",
        "http://a:99999",
        "http://[::1",
        "http://%zz",
        "http://a:b",
    ],
)
def test_an_endpoint_that_is_no_url_is_refused(panicking, endpoint, monkeypatch):
    told = "endpoint must be a server's URL"
    with pytest.raises(SchemaError, match=told):
        mr.ZarrSource("s3://bucket/x", endpoint=endpoint).open()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(SchemaError, match=told):
        mr.ReplayBuffer.open("s3://bucket/x")


@pytest.mark.parametrize(
    "endpoint", ["http://localhost:9000", "https://[::1]:9/x/", "http://a.b-c/%20"]
)
def test_endpoints_that_are_urls_are_accepted(endpoint):
    remote._check("s3://b", "a.B_c-9", endpoint)


def test_a_group_without_zarr_python_says_what_to_install(tmp_path, rng, monkeypatch):
    policy_store(tmp_path / "a.zarr", rng)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(FailedError, match=r'install "mmreplay\[zarr\]"'):
        mr.ReplayBuffer.open(tmp_path / "a.zarr")


def test_no_codec_of_another_package_is_loaded(tmp_path, rng, monkeypatch):
    """Codecs are looked up in a list before zarr-python sees their names."""
    policy_store(tmp_path / "a.zarr", rng, 3)
    file = tmp_path / "a.zarr/data/img/zarr.json"
    text = file.read_text()
    assert text.count('"bytes"') == 1
    file.write_text(text.replace('"bytes"', '"another_package.codec"'))
    asked = []
    get = zarr.registry.get_codec_class
    monkeypatch.setattr(zarr.registry, "get_codec_class", lambda key: asked.append(key) or get(key))
    with pytest.raises(FormatError, match=r"'another_package\.codec', but must use"):
        mr.ReplayBuffer.open(tmp_path / "a.zarr")
    assert "another_package.codec" not in asked

"""Groups in a bucket, read through obstore from a local S3 server (moto)."""

import os
import threading

import numpy as np
import pytest
import zarr

import mmreplay as mr
from mmreplay.errors import CorruptError, FailedError, ForkedError, FormatError
from mmreplay.zarr_groups import arrays, remote
from mmreplay.zarr_groups.blobs import Extent
from tests.buffer.test_sealed_groups import record
from tests.storage.zarr_groups import policy_store, put

pytestmark = pytest.mark.peer
BUCKET = "experience"


@pytest.fixture(scope="module")
def server():
    """An S3 server of this process; its URL."""
    pytest.importorskip("obstore", reason="obstore is not installed")
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    made = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    made.start()
    host, port = made.get_host_and_port()
    yield f"http://{host}:{port}"
    made.stop()


@pytest.fixture
def bucket(server, monkeypatch):
    """Puts a folder's files into the bucket; returns their URL."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    client = boto3.client("s3", endpoint_url=server, region_name="us-east-1")
    if BUCKET not in [each["Name"] for each in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)

    def upload(folder, prefix):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}"
                client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
        return f"s3://{BUCKET}/{prefix}"

    upload.client = client
    return upload


@pytest.mark.parametrize("version", [2, 3])
def test_anybodys_group_reads_as_it_does_on_a_disk(tmp_path, rng, bucket, version):
    held = policy_store(tmp_path / "a", rng, version)
    url = bucket(tmp_path / "a", f"pusht-{version}.zarr")
    with mr.ReplayBuffer.open(url, sampler=mr.UniformSampler(seed=0)) as buffer:
        rows, batch = buffer.gather_all(), buffer.sample(30)
        assert buffer.mapping.location == url
        assert repr(buffer).startswith(f"<ReplayBuffer {url} 'r': 100 steps")
    for name, data in held.items():
        assert np.array_equal(rows[name], data)
    assert np.array_equal(batch["img"], held["img"][batch.positions])


@pytest.mark.parametrize("complete", [True, False])
def test_our_buffers_are_read_from_their_shards(tmp_path, rng, bucket, complete):
    wanted, path = record(tmp_path / "b", rng)
    # A buffer's whole folder, or its group alone.
    source = tmp_path / "b" if complete else path
    url = bucket(source, f"ours-{complete}")
    with mr.ReplayBuffer.open(url) as buffer:
        found, mapping = buffer.gather_all(), buffer.mapping
    assert mapping.ours
    assert np.array_equal(found.positions, wanted.positions)
    for name, values in found.fields.items():
        assert values.tobytes() == wanted[name].tobytes(), name


def test_a_remote_group_converts_and_is_shown_by_the_command_line(tmp_path, rng, bucket, capsys):
    from mmreplay.cli.run import run

    held = policy_store(tmp_path / "a", rng)
    url = bucket(tmp_path / "a", "told.zarr")
    assert run(["info", url]) == 0
    assert "a Zarr group of version 2" in capsys.readouterr().out
    assert run(["convert", url, str(tmp_path / "b")]) == 0
    with mr.ReplayBuffer.open(tmp_path / "b") as buffer:
        assert np.array_equal(buffer.gather_all()["img"], held["img"])


def test_options_override_the_environment(tmp_path, rng, bucket, monkeypatch):
    policy_store(tmp_path / "a", rng)
    url, server = bucket(tmp_path / "a", "options"), os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    source = mr.ZarrSource(url, endpoint=server, region="us-east-1")
    with mr.ReplayBuffer.open(source) as buffer:
        assert len(buffer) == 100
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    bare = mr.ZarrSource(url, endpoint=server, region="us-east-1", anonymous=True)
    with pytest.raises(FailedError, match=r"the server refused access .* Check AWS_AC"):
        mr.ReplayBuffer.open(bare)
    # Everybody may read what is there; what is not there is refused all the same.
    listed = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix="options/")
    for each in listed["Contents"]:
        bucket.client.put_object_acl(Bucket=BUCKET, Key=each["Key"], ACL="public-read")
    bucket.client.put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    with mr.ReplayBuffer.open(bare) as buffer:
        assert len(buffer) == 100


def test_workers_that_are_spawned_read_the_bucket(tmp_path, rng, bucket):
    from torch.utils.data import DataLoader

    held = policy_store(tmp_path / "a", rng)
    dataset = mr.ReplayDataset(bucket(tmp_path / "a", "workers"))
    draws = dataset.draws(mr.UniformSampler(seed=0), 8, num_batches=2)
    loader = DataLoader(
        dataset, sampler=draws, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    for batch in loader:
        assert np.array_equal(batch["img"].numpy(), held["img"][batch.positions])


def test_forked_workers_are_refused_with_advice_to_spawn(tmp_path, rng, bucket):
    policy_store(tmp_path / "a", rng)
    url = bucket(tmp_path / "a", "forked")
    mr.ReplayBuffer.open(url).close()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            mr.ReplayBuffer.open(url)
        except ForkedError as error:
            code = 0 if "multiprocessing_context='spawn'" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_requests_run_side_by_side_and_no_more_than_so_many(bucket, monkeypatch):
    blobs = remote.RemoteBlobs(f"s3://{BUCKET}/none")
    running, highest, lock = [0], [0], threading.Lock()
    together = threading.Barrier(remote.REQUESTS, timeout=30)

    def get(module, extent, limit):
        with lock:
            running[0] += 1
            highest[0] = max(highest[0], running[0])
        together.wait()
        with lock:
            running[0] -= 1
        return b""

    monkeypatch.setattr(blobs, "_get", get)
    blobs.fetch([Extent(f"a{n}") for n in range(3 * remote.REQUESTS)], 10)
    blobs.close()
    assert highest[0] == remote.REQUESTS


def test_chunks_that_lie_together_are_one_request(tmp_path, rng, bucket, monkeypatch):
    data = rng.random((64, 3))
    made = zarr.open_group(tmp_path / "a", mode="w")
    put(made, "obs", data, chunks=(2, 3), shards=(32, 3), compressors=None)
    asked = []
    get = remote.RemoteBlobs._get
    monkeypatch.setattr(
        remote.RemoteBlobs,
        "_get",
        lambda self, module, extent, limit: (
            asked.append(extent) or get(self, module, extent, limit)
        ),
    )
    with mr.ReplayBuffer.open(bucket(tmp_path / "a", "joined")) as buffer:
        asked.clear()
        assert np.array_equal(buffer.gather_all()["obs"], data)
    # An index, and all chunks, of each of two shards.
    assert len(asked) == 4


def test_a_truncated_object_is_named(tmp_path, rng, bucket):
    made = zarr.open_group(tmp_path / "a", mode="w")
    put(made, "obs", rng.random((64, 3)), chunks=(2, 3), shards=(32, 3))
    url = bucket(tmp_path / "a", "cut")
    body = (tmp_path / "a/obs/c/1/0").read_bytes()
    for size in (10, 0):
        key = "cut/obs/c/1/0"
        bucket.client.put_object(Bucket=BUCKET, Key=key, Body=body[-size:][:size])
        with (
            mr.ReplayBuffer.open(url) as buffer,
            pytest.raises(
                (CorruptError, FailedError),
                match=r"obs/c/1/0 has .*(least 260|than 260 bytes): it was trunc",
            ),
        ):
            buffer.take(0, [40])
    bucket.client.put_object(Bucket=BUCKET, Key=key, Body=body[-260:])
    with (
        mr.ReplayBuffer.open(url) as buffer,
        pytest.raises(
            (CorruptError, FailedError), match=r"cut.*obs.* 260 bytes, but needs at least 285"
        ),
    ):
        buffer.take(0, [40])


def test_an_object_that_is_larger_than_its_chunk_is_refused(tmp_path, rng, bucket):
    policy_store(tmp_path / "a", rng)
    url = bucket(tmp_path / "a", "large")
    bucket.client.put_object(Bucket=BUCKET, Key="large/data/img/3.0.0.0", Body=bytes(1 << 20))
    with (
        mr.ReplayBuffer.open(url) as buffer,
        pytest.raises(FormatError, match=r"has 1048576 bytes, but its array allows at most"),
    ):
        buffer.gather_all()


def test_an_archive_without_a_group_is_reported(bucket):
    with pytest.raises(FormatError, match=r"nothing-here must be .*, got nothing"):
        mr.ReplayBuffer.open(f"s3://{BUCKET}/nothing-here")


def test_a_missing_bucket_is_reported(bucket):
    with pytest.raises(FormatError, match=r"there is no bucket 'not-there' .* Check its name"):
        mr.ReplayBuffer.open("s3://not-there/a")


def test_a_missing_server_is_reported(bucket, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 0)
    source = mr.ZarrSource(f"s3://{BUCKET}/a", endpoint="http://127.0.0.1:9")
    with pytest.raises(FailedError, match=r"cannot be reached .* Check the network"):
        mr.ReplayBuffer.open(source)


def test_missing_credentials_are_reported(bucket, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # Where a machine of Amazon's would be asked for its role.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(FailedError, match=r"no credentials found .* Set AWS_ACCESS"):
        mr.ReplayBuffer.open(f"s3://{BUCKET}/a")


def test_a_remote_buffer_of_files_advises_compact(tmp_path, bucket):
    schema = mr.Schema({"observation": mr.Field((2,), "float32")})
    mr.ReplayBuffer.create(tmp_path / "b", schema, 100).close()
    url = bucket(tmp_path / "b", "files")
    with pytest.raises(FormatError, match="must have engine 'zarr', got 'memmap'"):
        mr.ReplayBuffer.open(url)


def test_cached_chunks_are_not_requested_again(tmp_path, rng, bucket, monkeypatch):
    policy_store(tmp_path / "a", rng)
    with mr.ReplayBuffer.open(bucket(tmp_path / "a", "kept")) as buffer:
        buffer.gather_all()
        monkeypatch.setattr(remote.RemoteBlobs, "_get", None)
        assert len(buffer.gather_all()) == 100
    assert arrays.CACHE_NBYTES > 0

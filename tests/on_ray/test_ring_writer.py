"""What a writer of a run refuses before it joins, without a cluster."""

import threading
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.disk.lock import WriterLock  # noqa: E402
from mmreplay.ray import cluster, ring_writer, thin  # noqa: E402
from mmreplay.ray.ring_writer import _check_ring_name, _open  # noqa: E402
from tests.on_ray.rows import SCHEMA  # noqa: E402


@pytest.mark.parametrize("name", ["thin", "LOCK"])
def test_names_of_other_files_of_the_folder_are_refused(name):
    with pytest.raises(mr.SchemaError, match="name must not be 'thin'"):
        _check_ring_name(name)


def test_a_ring_is_opened_again_only_by_what_it_was_made_with(tmp_path):
    def again(**create):
        ring, is_new = _open(tmp_path, ["w"], SCHEMA, 100, 1, None, "break", create)
        ring.close()
        return is_new

    assert again(autoreset="disabled")
    assert not again()
    assert not again(autoreset="disabled", engine="memmap")
    with pytest.raises(
        mr.SchemaError, match=r"autoreset must be 'disabled', as of .*got 'next_step'"
    ):
        again(autoreset="next_step")
    with pytest.raises(mr.SchemaError, match=r"engine must be 'memmap', as of .*zarr"):
        again(engine="zarr")


@pytest.mark.parametrize(
    ("create", "other", "message"),
    [
        ({"heap_bytes": "64 KiB"}, {"heap_bytes": "1 MiB"}, "heap_bytes must be 65536"),
        ({"layout": "env_major"}, {"layout": "time_major"}, "layout must be 'env_maj"),
        ({"codec": "zstd"}, {"codec": "none"}, "codec must be 'zstd', as of .*'none'"),
        ({"level": 3}, {"level": 4}, "level must be 3, as of .*, got 4"),
        ({"chunk_crc32c": True}, {"chunk_crc32c": False}, "chunk_crc32c must be True"),
    ],
)
def test_a_ring_is_opened_again_with_all_that_it_was_made_with(tmp_path, create, other, message):
    """And where such an argument is left out."""
    fields = {**SCHEMA.fields, "text": mr.Field.text(40)}
    schema = mr.Schema(fields)
    engine = "memmap" if "layout" in create else "zarr"

    def again(**more):
        more = {"engine": engine, "heap_bytes": "64 KiB", **more}
        ring, is_new = _open(tmp_path, ["w"], schema, 100, 1, None, "break", more)
        ring.close()
        return is_new

    assert again(**create)
    assert not again(**create)
    assert not again()
    assert not again(heap_bytes=None)
    with pytest.raises(mr.SchemaError, match=message):
        again(**other)


@pytest.fixture
def refusing(monkeypatch):
    """A run whose registry finds at the end that another writer was first."""

    def call(method, *arguments):
        if method == "join":
            raise mr.SchemaError("the run has another schema")

    registry = SimpleNamespace(call=call)
    monkeypatch.setattr(cluster, "require_connection", lambda: None)
    monkeypatch.setattr(cluster, "this_node", lambda: cluster.Node("id", "n0", None))
    for module in (ring_writer, thin):
        monkeypatch.setattr(module, "start_registry", lambda run: registry)


def test_a_writer_that_is_refused_at_the_end_leaves_no_ring(refusing, tmp_path):
    with pytest.raises(mr.SchemaError, match="has another schema"):
        ring_writer.writer("run", SCHEMA, 100, root=tmp_path, autoreset="disabled")
    with pytest.raises(mr.SchemaError, match="has another schema"):
        thin.thin_ring("run", SCHEMA, 100, root=tmp_path, autoreset="disabled")
    assert list((tmp_path / "run").iterdir()) == []
    # One that was there before stays.
    for name in ("ring-000", "thin"):
        path = tmp_path / "run" / name
        mr.ReplayBuffer.create(path, SCHEMA, 100, 8, autoreset="disabled").close()
    with pytest.raises(mr.SchemaError, match="has another schema"):
        ring_writer.writer("run", SCHEMA, 100, root=tmp_path, num_envs=8)
    with pytest.raises(mr.SchemaError, match="has another schema"):
        thin.thin_ring("run", SCHEMA, 100, root=tmp_path, autoreset="disabled")
    assert len(list((tmp_path / "run").iterdir())) == 2


def test_a_ring_that_an_ending_shard_still_has_open_is_removed(refusing, tmp_path, monkeypatch):
    ring, refused = tmp_path / "run" / "thin", ring_writer.start_registry("run").call
    threads = []

    def call(method, *arguments):
        if method == "join":
            lock = WriterLock(ring)
            threads.append(threading.Timer(0.3, lock.release))
            threads[0].start()
        refused(method, *arguments)

    registry = SimpleNamespace(call=call)
    monkeypatch.setattr(thin, "start_registry", lambda run: registry)
    with pytest.raises(mr.SchemaError, match="has another schema"):
        thin.thin_ring("run", SCHEMA, 100, root=tmp_path, autoreset="disabled")
    threads[0].join()
    assert list((tmp_path / "run").iterdir()) == []

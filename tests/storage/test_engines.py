import mmreplay as mr
from mmreplay.format.metadata import ON_DISK
from mmreplay.storage.engines import STORES
from mmreplay.storage.memmap import MemmapStore

SCHEMA = mr.Schema({"x": mr.Field((), "int64")})


def test_every_engine_on_a_disk_has_a_store():
    assert tuple(STORES) == ON_DISK


def test_whatever_makes_or_opens_a_buffer_takes_the_store_of_the_table(tmp_path, monkeypatch):
    calls = []

    class NotedStore(MemmapStore):
        @classmethod
        def create(cls, folder, metadata):
            calls.append("create")
            return super().create(folder, metadata)

        @classmethod
        def open(cls, folder, metadata, **options):
            calls.append("open")
            return super().open(folder, metadata, **options)

    monkeypatch.setitem(STORES, "memmap", NotedStore)
    path = tmp_path / "b"
    with mr.ReplayBuffer.create(path, SCHEMA, 20) as buffer:
        assert calls == ["create", "open"]
        buffer.extend(x=range(10))
        buffer.resize(30)
        assert calls == ["create", "open"] * 2
        buffer.snapshot(tmp_path / "copy")
        assert calls == ["create", "open"] * 2 + ["open", "create"]
    with mr.ReplayBuffer.open(tmp_path / "copy") as copy:
        assert copy.gather_all()["x"].tolist() == list(range(10))
    mr.export(path, tmp_path / "b.npz")
    calls.clear()
    mr.load(tmp_path / "b.npz", tmp_path / "again")
    assert calls == ["create"]

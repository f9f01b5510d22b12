"""What is copied out of mapped records in one go is what the files' readers give."""

from types import SimpleNamespace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk.files import File
from mmreplay.errors import FailedError
from mmreplay.nesting import unflatten
from mmreplay.storage import gather, read_ahead
from mmreplay.storage.read_ahead import Pages

FIELDS = {
    "observation/a": mr.Field((3,), "float32"),
    "observation/b": mr.Field((), "int16"),
    "action": mr.Field((2,), "float64"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
STORED = FIELDS | {
    "next_observation/a": FIELDS["observation/a"],
    "next_observation/b": FIELDS["observation/b"],
}
SCHEMAS = {
    "stored": STORED,
    "derived": FIELDS,
    "no ends": {path: FIELDS[path] for path in list(FIELDS)[:4]},
    "no observation": {path: FIELDS[path] for path in list(FIELDS)[2:]},
    "one field apart": FIELDS | {"pixels": mr.Field((64, 64), "uint8")},
    "observation apart": FIELDS | {"observation/c": mr.Field((64, 64), "uint8")},
}
STEPS = 90


def filled(path, name, rng, num_envs=2, ended=False):
    """A ring of some laps, with episodes that end in either way."""
    fields = SCHEMAS[name]
    buffer = mr.ReplayBuffer.create(
        path, mr.Schema(unflatten(fields)), 40, num_envs, autoreset="disabled"
    )
    data = {
        path: (50 * rng.random((STEPS, num_envs, *field.shape))).astype(field.dtype)
        for path, field in fields.items()
    }
    for path in data.keys() & {"terminated", "truncated"}:
        data[path] = rng.random((STEPS, num_envs)) < 0.1
    final = "observation/a" in data and "next_observation/a" not in data and not ended
    follow = {p: a for p, a in data.items() if p.startswith("observation")}
    follow = unflatten(follow).get("observation")
    buffer.extend(unflatten(data), final_observation=follow if final else None)
    if ended:
        buffer.end_episodes()
        buffer.extend(unflatten({path: a[:9] for path, a in data.items()}))
    return buffer


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("name", SCHEMAS)
def test_both_ways_give_the_same_fields_in_the_same_order(tmp_path, rng, monkeypatch, name, ended):
    buffer = filled(tmp_path, name, rng, ended=ended)
    taken = []
    store = buffer._current()._store
    take = type(store.records).take

    def watched(self, *args):
        taken.append(take(self, *args))
        return taken[-1]

    monkeypatch.setattr(type(store.records), "take", watched)
    with buffer:
        for size in (1, 7, 300):
            batch = buffer.sample(size)
            assert ("apart" in name) == (not taken)
            monkeypatch.setattr(store, "records", None)
            again = buffer.take(batch.env_ids, batch.positions)
            monkeypatch.undo()
            monkeypatch.setattr(type(store.records), "take", watched)
            assert list(batch.fields) == list(again.fields)
            for path, array in batch.fields.items():
                assert array.dtype == again[path].dtype, path
                assert array.tolist() == again[path].tolist(), path


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"advise": "never"}, False),
        ({"advise": "kernel"}, False),
        # Written a moment ago, they are in the page cache.
        ({"advise": "auto"}, False),
        ({"advise": "always"}, True),
    ],
)
@pytest.mark.parametrize("name", ["stored", "derived"])
def test_pages_are_asked_for_where_they_are_to_be(tmp_path, rng, monkeypatch, name, options, asked):
    filled(tmp_path, name, rng).close()
    found = []
    monkeypatch.setattr(File, "will_need", lambda self, *range_: found.append(range_))
    with mr.ReplayBuffer.open(tmp_path, **options) as reader:
        for _ in range(30):
            assert reader.sample(5)["action"].shape == (5, 2)
    assert bool(found) == asked


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("advise", ["auto", "always", "never", "kernel"])
def test_others_run_while_pages_have_to_be_waited_for(tmp_path, rng, monkeypatch, advise, there):
    filled(tmp_path, "stored", rng).close()
    waits, take = set(), gather._steps.take

    def watched(*args):
        waits.add(args[-1])
        return take(*args)

    kernel = SimpleNamespace(take=watched)
    monkeypatch.setattr(gather, "_steps", kernel)
    monkeypatch.setattr(Pages, "holds", lambda self, offset: there)
    with mr.ReplayBuffer.open(tmp_path, advise=advise) as reader:
        for _ in range(30):
            reader.sample(5)
        # Nobody looks where it is "never" or "kernel", and all may well be in memory.
        assert waits == {advise == "always" or (advise == "auto" and not there)}
        # What a loader asked for is on its way, perhaps.
        waits.clear()
        with read_ahead.Gathering(True):
            for _ in range(30):
                reader.sample(5)
    assert (True in waits) == (advise in ("auto", "always"))


def test_long_records_are_asked_for_as_they_are_copied_not_read(tmp_path, rng, monkeypatch):
    """Fields of less than 4 KiB each, more together, in a batch of a MiB and more."""
    field = mr.Field((500,), "float32")
    schema = mr.Schema({"observation": dict.fromkeys("abc", field)})
    rows = {name: rng.random((400, 500), np.float32) for name in "abc"}
    with mr.ReplayBuffer.create(tmp_path, schema, 400) as buffer:
        buffer.extend(observation=rows)
        stride = buffer._files.store.placement.stride
    found = []
    monkeypatch.setattr(File, "will_need", lambda self, *range_: found.append(range_))
    monkeypatch.setattr(Pages, "holds", lambda self, offset: False)
    with mr.ReplayBuffer.open(tmp_path) as reader:
        for _ in range(10):
            found.clear()
            batch = reader.sample(256)
            assert (batch["observation/a"] == rows["a"][batch.positions]).all()
            wanted = batch.positions * stride
            asked = np.array(found)
            assert all(
                ((asked[:, 0] <= at) & (at < asked.sum(axis=1))).any() for at in wanted.tolist()
            )


def test_rows_that_are_read_are_not_mapped_records(tmp_path, rng):
    filled(tmp_path, "stored", rng).close()
    with mr.ReplayBuffer.open(tmp_path, read_mode="pread") as reader:
        assert reader._current()._store.records is None
        assert reader.sample(5)["action"].shape == (5, 2)


def test_a_closed_buffers_records_say_so(tmp_path, rng):
    buffer = filled(tmp_path, "stored", rng)
    view = buffer.view
    buffer.sample(3)
    buffer.close()
    ids = np.zeros(2, np.int64)
    with pytest.raises(FailedError, match="it was closed meanwhile"):
        view.copy_steps(ids, ids + 60)

"""Values of any length in the rings of a run, and in datasets of Ray Data."""

import numpy as np
import pytest
import torch

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.errors import SchemaError  # noqa: E402
from mmreplay.ray import data  # noqa: E402
from mmreplay.ray.client import ReplayClient  # noqa: E402
from mmreplay.ray.data import look_at, read, read_rows  # noqa: E402
from tests.on_ray.rings import Run, Shard  # noqa: E402

SCHEMA = mr.Schema(
    {
        "observation": {
            "tokens": mr.Field((None, 3), "int32", max_length=50),
            "mission": mr.Field.text(60),
        },
        "n": mr.Field((), "int64"),
    }
)


def tokens_of(number):
    return np.full((number * 7 % 41, 3), number, np.int32)


def mission_of(number):
    return f"ünit {number} " * (number % 5)


def make(path, numbers, long=1, engine="memmap"):
    """A closed ring of steps that follow from their numbers."""
    with mr.ReplayBuffer.create(
        path, SCHEMA, len(numbers), heap_bytes="1 MiB", engine=engine
    ) as buffer:
        for number in numbers:
            buffer.add(
                observation={"tokens": tokens_of(number), "mission": mission_of(number)}, n=number
            )
    return path


def numpy_of(batch):
    """Fields of a batch of tensors, as numpy arrays and `Ragged` of them."""
    return {name: column.numpy() for name, column in batch.fields.items()}


def assert_right(fields, numbers):
    """Values are those of the steps, and of the steps after them."""
    for name, ahead in (("observation", 0), ("next_observation", 1)):
        tokens, missions = fields[f"{name}/tokens"], fields[f"{name}/mission"]
        expected = [tokens_of(number + ahead) for number in numbers]
        assert [len(each) for each in expected] == tokens.lengths.tolist()
        np.testing.assert_array_equal(np.concatenate(expected), tokens.values)
        assert missions.text() == [mission_of(number + ahead) for number in numbers]


@pytest.fixture(params=["memmap", "zarr"])
def run(tmp_path, request):
    shards = [
        Shard(f"s{n}", {"r": make(tmp_path / f"{n}", range(100 * n, 100 * n + 60))})
        for n in range(2)
    ]
    shards[1].folders["q"] = make(tmp_path / "q", range(300, 340), engine=request.param)
    result = Run(*shards, key="s0")
    yield result
    result.close()


@pytest.mark.parametrize("per_call", [1, 4])
@pytest.mark.parametrize("batch_size", [5, 64, 300])
@pytest.mark.parametrize("sampler", [mr.UniformSampler, mr.PrioritizedSampler])
def test_values_arrive_from_every_ring(run, sampler, batch_size, per_call):
    found, kept = set(), []
    with ReplayClient(run, sampler(seed=0), batch_size=batch_size, per_call=per_call) as client:
        for batch, _ in zip(client, range(12), strict=False):
            assert isinstance(batch["observation/tokens"].values, torch.Tensor)
            own = numpy_of(batch)
            assert_right(own, own["n"])
            found |= set(batch.buffer_ids.tolist())
            kept.append((batch, own["n"].copy()))
            if sampler is mr.PrioritizedSampler:
                client.update_priorities(batch, torch.rand(batch_size))
        for batch, numbers in kept:
            # Memory is used again only once nobody has the batch.
            assert_right(numpy_of(batch), numbers)
    assert found == {0, 1, 2}


def test_large_batches_of_values_travel_in_blocks(run):
    with ReplayClient(run, mr.UniformSampler(0), batch_size=1500) as client:
        for batch, _ in zip(client, range(6), strict=False):
            own = numpy_of(batch)
            assert_right(own, own["n"])
    assert "blocks" in run.known[1].calls


def test_windows_and_epochs_have_values(run):
    windows = mr.SequenceSampler(4, mr.UniformSampler(seed=0))
    with ReplayClient(run, windows, batch_size=16) as client:
        for batch, _ in zip(client, range(6), strict=False):
            own = numpy_of(batch)
            tokens, numbers = own["observation/tokens"], own["n"]
            assert tokens.shape == numbers.shape == (16, 4)
            for i, j in np.ndindex(numbers.shape):
                np.testing.assert_array_equal(tokens[i, j], tokens_of(numbers[i, j]))
    seen = []
    with ReplayClient(run, mr.ShuffledSampler(seed=0), batch_size=16) as client:
        for batch in client:
            own = numpy_of(batch)
            assert_right(own, own["n"])
            seen += own["n"].tolist()
    # The newest step of a ring has no next one yet.
    rings = [range(59), range(100, 159), range(300, 339)]
    assert sorted(seen) == [number for ring in rings for number in ring]


# Ray Data.


def rows_of(path, columns, transforms=()):
    ring = look_at(path, transforms=transforms)
    blocks = read_rows(ring, 0, ring.first, ring.stop, columns, transforms)
    return [row for block in blocks for row in block.to_pylist()]


def test_a_block_has_lists_and_text_as_parquet_has(tmp_path):
    names = ("n", "observation/tokens", "next_observation/mission")
    rows = rows_of(make(tmp_path / "r", range(40)), names)
    assert [tuple(row) for row in rows] == [names] * 39
    for row in rows:
        assert row["observation/tokens"] == tokens_of(row["n"]).tolist()
        assert row["next_observation/mission"] == mission_of(row["n"] + 1)
    missions = rows_of(tmp_path / "r", ("observation/mission",))
    assert missions == [{"observation/mission": mission_of(n)} for n in range(39)]


def test_blocks_of_long_values_have_fewer_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK_NBYTES", 5000)
    ring = look_at(make(tmp_path / "r", range(60)))
    assert 200 < ring.nbytes["observation/tokens"] < 300
    names = ("n", "observation/tokens")
    blocks = list(read_rows(ring, 0, 0, 59, names, ()))
    assert max(len(block) for block in blocks) < 25
    assert sum(len(block) for block in blocks) == 59


def test_stacks_of_values_are_refused_by_name(tmp_path):
    stack = (mr.FrameStack(3, ["observation/tokens"]),)
    path = make(tmp_path / "r", range(20))
    told = "column 'observation/tokens' has 3 values of any length a row"
    with pytest.raises(SchemaError, match=told):
        rows_of(path, ("observation/tokens",), stack)


def test_rings_of_a_dataset_may_have_values_of_other_lengths(cluster, tmp_path):
    paths = [make(tmp_path / "a", range(60)), make(tmp_path / "b", range(201, 209))]
    rows = read([str(path) for path in paths]).take_all()
    assert len(rows) == 59 + 7
    for row in rows:
        assert row["observation/mission"] == mission_of(row["n"])


def test_a_writer_of_a_run_has_values_of_any_length(cluster, tmp_path):
    name = "varying"
    with mr.ray.writer(name, SCHEMA, 60, root=tmp_path / "nodes", heap_bytes="1 MiB") as writer:
        try:
            for number in range(60):
                writer.add(
                    observation={"tokens": tokens_of(number), "mission": mission_of(number)},
                    n=number,
                )
            with mr.ray.ReplayClient(name, mr.PrioritizedSampler(seed=0), (), 32) as c:
                for batch, _ in zip(c, range(5), strict=False):
                    own = numpy_of(batch)
                    assert_right(own, own["n"])
                    c.update_priorities(batch, torch.rand(32))
        finally:
            mr.ray.stop(name)

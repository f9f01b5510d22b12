"""Rings as a Ray Data dataset, and a dataset as rings, against numpy."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.ray import data  # noqa: E402
from mmreplay.ray.data import RingDatasink, RingDatasource, read, read_as, write  # noqa: E402
from tests.waits import WAIT_S  # noqa: E402

SCHEMA = mr.Schema(
    {
        "observation": {"joints": mr.Field((6,), "float32"), "pixels": mr.Field((8, 8), "uint8")},
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)
ROW_COLUMNS = ("buffer_id", "env_id", "position")


def fill(ring, seed, steps):
    """Add steps whose actions say where they are: ring, environment and position."""
    rng, envs = np.random.default_rng(seed), ring.num_envs
    action = np.arange(steps)[:, None] + 10_000 * np.arange(envs) + 1_000_000 * seed
    observation, final = (
        {
            "joints": rng.random((steps, envs, 6), np.float32),
            "pixels": rng.integers(0, 255, (steps, envs, 8, 8), dtype=np.uint8),
        }
        for _ in range(2)
    )
    ring.extend(
        observation=observation,
        action=action,
        reward=rng.random((steps, envs)).astype(np.float32),
        terminated=rng.random((steps, envs)) < 0.03,
        truncated=rng.random((steps, envs)) < 0.02,
        final_observation=final,
    )


def make_ring(path, seed=0, steps=400, envs=3, capacity=1000):
    ring = mr.ReplayBuffer.create(path, SCHEMA, capacity, num_envs=envs, autoreset="disabled")
    with ring:
        fill(ring, seed, steps)
    return str(path)


def legal(path, *transforms):
    """What `take` gives of all legal starts, as a dict of arrays."""
    with mr.ReplayBuffer.open(path, transforms=transforms) as ring:
        view = ring.view
        count = int(view.starts.lengths.sum()) - view.num_illegal
        batch = ring.take(*view.start_at(np.arange(count)))
        return {
            **{name: np.array(array) for name, array in batch.fields.items()},
            "env_id": batch.env_ids,
            "position": batch.positions,
        }


def columns(dataset):
    """All rows of a dataset, as a dict of arrays, by ring, environment and position."""
    blocks = list(dataset.iter_batches(batch_size=None))
    rows = {name: np.concatenate([b[name] for b in blocks]) for name in blocks[0]}
    if not set(ROW_COLUMNS) <= set(rows):
        return rows
    order = np.lexsort([rows[name] for name in reversed(ROW_COLUMNS)])
    return {name: values[order] for name, values in rows.items()}


def assert_rows(got, want):
    assert set(got) >= set(want)
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


@pytest.fixture(autouse=True)
def _quiet(request):
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster")
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False


@pytest.fixture
def rings(tmp_path):
    return [make_ring(tmp_path / name, seed) for seed, name in enumerate("ab")]


def test_a_dataset_has_each_legal_start_once_as_take_gives_it(cluster, rings):
    rows = columns(read(rings))
    for number, path in enumerate(rings):
        mine = rows["buffer_id"] == number
        assert_rows({name: v[mine] for name, v in rows.items()}, legal(path))
    assert len(rows["action"]) == sum(len(legal(path)["action"]) for path in rings)


def test_rows_keep_their_order_where_ray_is_asked_to_keep_it(cluster, rings):
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    try:
        rows = [b["action"] for b in read(rings[0]).iter_batches(batch_size=None)]
    finally:
        context.execution_options.preserve_order = False
    np.testing.assert_array_equal(np.concatenate(rows), legal(rings[0])["action"])


def test_transforms_are_applied_where_the_ring_is(cluster, rings):
    nstep = mr.NStep(3, 0.9)
    rows = columns(read(rings[0], transforms=[nstep]))
    assert_rows(rows, legal(rings[0], nstep))
    assert "discount" in rows


def test_columns_that_nothing_asks_for_are_not_read(cluster, rings):
    dataset = read(rings).select_columns(["reward", "action"])
    rows = columns(dataset)
    assert set(rows) == {"reward", "action"}
    both = np.concatenate([legal(path)["action"] for path in rings])
    assert sorted(rows["action"]) == sorted(both)
    done = dataset.materialize()
    assert "ReadRing" in done.stats()
    assert "Project" not in done.stats()


def test_fields_are_paths_or_subtrees(cluster, rings):
    names = read(rings[0], fields=["observation", "position"]).schema().names
    assert sorted(names) == ["observation/joints", "observation/pixels", "position"]
    with pytest.raises(mr.SchemaError, match="'rewards'"):
        read(rings[0], fields=["rewards"])


def test_rows_can_be_counted_without_columns(cluster, rings):
    count = len(legal(rings[0])["action"])
    assert read(rings[0]).count() == count
    assert read(rings[0]).map_batches(lambda b: b).count() == count
    # Of a ring that may be written, tasks alone know how many there are.
    assert read(rings[0], live=True).count() == count


@pytest.mark.parametrize("chosen", [slice(0, 1), slice(2, 9), slice(-3, None)])
def test_episodes_are_those_that_export_counts(cluster, rings, tmp_path, chosen):
    target = tmp_path / "episodes.npz"
    mr.export(rings[0], target, episodes=chosen)
    mr.load(target, tmp_path / "loaded")
    rows = columns(read(rings[0], episodes=chosen))
    want = legal(tmp_path / "loaded")
    assert_rows(rows, {n: want[n] for n in ("action", "env_id", "position")})


def test_a_block_has_at_most_the_bytes_of_a_block(rings, monkeypatch):
    monkeypatch.setattr(data, "BLOCK_NBYTES", 5000)
    source = RingDatasource(rings[0])
    (task,) = source.get_read_tasks(1)
    blocks = list(task())
    assert sum(block.num_rows for block in blocks) == task.metadata.num_rows
    assert max(block.num_rows for block in blocks) == 5000 // source._row_nbytes()


def test_tasks_divide_rings_by_their_rows(tmp_path):
    short = make_ring(tmp_path / "short", 0, steps=50, envs=1)
    long = make_ring(tmp_path / "long", 1, steps=900, envs=1)
    tasks = RingDatasource([short, long]).get_read_tasks(10)
    by_path = {}
    for task in tasks:
        (path,) = task.metadata.input_files
        by_path[path] = by_path.get(path, 0) + 1
    assert by_path == {short: 1, long: 9}


def test_a_ring_with_a_living_writer_is_refused(cluster, rings):
    with mr.ReplayBuffer.open(rings[0], "r+"):
        with pytest.raises(mr.LockedError, match=r"live=True") as caught:
            RingDatasource(rings)
        assert caught.value.pid is not None
        RingDatasource(rings, live=True)


def test_rows_that_a_writer_overwrites_are_left_out_and_counted(cluster, tmp_path):
    ring = mr.ReplayBuffer.create(tmp_path / "live", SCHEMA, 300, num_envs=2, autoreset="disabled")
    with ring:
        fill(ring, 0, 300)
        before = legal(tmp_path / "live")
        source = RingDatasource(tmp_path / "live", live=True)
        dataset = ray.data.read_datasource(source, override_num_blocks=2)
        fill(ring, 1, 200)
        rows = columns(dataset)
        alive = before["position"] >= ring.span.first[before["env_id"]]
        assert 0 < alive.sum() < len(alive)
        assert_rows(rows, {name: v[alive] for name, v in before.items()})
        assert source.left_out() == (~alive).sum()


class WithNode(RingDatasource):
    """Also says where a row was read."""

    def supports_projection_pushdown(self):
        return False

    @staticmethod
    def _finish(buffer, block):
        node = ray.get_runtime_context().get_node_id()
        return {"action": block["action"], "node": np.full(len(block["action"]), node)}


def test_a_ring_is_read_on_the_node_that_is_named(cluster, rings):
    # Workers import this module by the folder of the tests.
    named = {"n0": [rings[1]], cluster.node_id("n1"): [rings[0]]}
    rows = columns(read_as(WithNode, named))
    for ring, label in ((1, "n0"), (0, "n1")):
        nodes = set(rows["node"][rows["action"] // 1_000_000 == ring])
        assert nodes == {cluster.node_id(label)}


def test_relative_paths_start_from_the_working_folder_of_the_caller(
    cluster, rings, tmp_path, monkeypatch
):
    def folder():
        return os.getcwd()

    where = ray.remote(folder).options(num_cpus=0, label_selector={"mmreplay": "n1"})
    monkeypatch.chdir(tmp_path)
    assert ray.get(where.remote(), timeout=WAIT_S) != str(tmp_path)
    rows = columns(read({"n0": ["a"], "n1": ["b"]}))
    assert len(rows["action"]) == sum(len(legal(path)["action"]) for path in rings)
    assert_rows(columns(read("a")), legal(rings[0]))
    written = write(read(["a"]), "written", SCHEMA)
    assert written
    assert all(path.startswith(str(tmp_path / "written")) for path in written)
    assert len(mr.concat(written).sample(64)["reward"]) == 64


def test_an_unknown_node_is_refused_with_the_known_ones(cluster, rings):
    with pytest.raises(mr.FormatError, match=r"'n7'.*'n0'"):
        read({"n7": rings})


def test_a_node_without_a_cpu_is_refused(rings, monkeypatch):
    def node(name, **resources):
        return {
            "Alive": True,
            "NodeID": f"id of {name}",
            "NodeManagerHostname": "host",
            "Labels": {"mmreplay": name},
            "Resources": resources,
        }

    def ask(node_id, paths, look):
        return [look(path) for path in paths]

    every = [node("head"), node("n0", CPU=2.0)]
    monkeypatch.setattr(data, "require_connection", lambda: None)
    monkeypatch.setattr(data, "_ask", ask)
    monkeypatch.setattr(ray, "nodes", lambda: every)
    with pytest.raises(mr.SchemaError, match=r"node 'head' has no CPU.* --num-cpus=1"):
        read({"head": rings})
    # By a name of several nodes those that can are asked.
    for name in ("n0", "host"):
        ((nodes, _),) = data._find(name, rings[:1], data.look_at)
        assert nodes == ("id of n0",)
    del every[1]
    with pytest.raises(mr.SchemaError, match="this cluster has no CPU, which Ray Data"):
        read(rings)


def test_a_path_without_a_ring_is_refused(cluster, tmp_path):
    with pytest.raises(mr.FormatError, match="nothing"):
        read(tmp_path / "nothing")


def test_one_path_with_other_rings_on_other_nodes_is_refused(cluster, rings, monkeypatch):
    def ask(node_id, paths, look):
        return [look(rings[int(node_id == cluster.node_id("n0"))])]

    monkeypatch.setattr(data, "_ask", ask)
    with pytest.raises(mr.FormatError, match="another ring on each of 2 nodes"):
        read(rings[0])


def test_a_ring_that_some_nodes_have_is_read_on_those(cluster, rings, monkeypatch):
    one = cluster.node_id("n1")

    def ask(node_id, paths, look):
        if node_id != one:
            return [mr.FormatError("there is none") for _ in paths]
        return [look(path) for path in paths]

    monkeypatch.setattr(data, "_ask", ask)
    rows = columns(read_as(WithNode, rings))
    assert set(rows["node"]) == {one}


def test_rings_of_other_columns_are_refused(tmp_path, rings):
    schema = mr.Schema({"observation": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "other", schema, 10) as ring:
        ring.extend(observation=np.zeros(5, np.float32))
    with pytest.raises(mr.SchemaError, match="same columns"):
        RingDatasource([rings[0], tmp_path / "other"])


def test_empty_rings_are_refused(tmp_path):
    mr.ReplayBuffer.create(tmp_path / "empty", SCHEMA, 10).close()
    with pytest.raises(mr.EmptyError, match="none of 1 rings"):
        RingDatasource([tmp_path / "empty"])


def transitions(paths):
    """All legal starts of rings, sorted by action."""
    every = [legal(path) for path in paths]
    rows = {name: np.concatenate([r[name] for r in every]) for name in every[0]}
    order = np.argsort(rows["action"])
    return {name: values[order] for name, values in rows.items()}


def test_what_is_written_is_read_back_by_concat(cluster, rings, tmp_path):
    parts = write(read(rings), tmp_path / "out", SCHEMA)
    assert [path.rsplit("/", 1)[1] for path in parts] == [
        f"part-{number:05d}" for number in range(len(parts))
    ]
    want, got = transitions(rings), transitions(parts)
    for name in set(want) - {"env_id", "position", "truncated"}:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert (got["truncated"] | ~want["truncated"]).all()
    assert len(mr.concat(parts).sample(64)["reward"]) == 64
    assert all(mr.verify_buffer(path).ok for path in parts)


def test_shuffled_rows_stay_transitions(cluster, rings, tmp_path):
    parts = write(read(rings).random_shuffle(seed=1), tmp_path / "out", SCHEMA)
    want, got = transitions(rings), transitions(parts)
    for name in set(want) - {"env_id", "position", "truncated"}:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_a_folder_with_rings_is_refused(cluster, rings, tmp_path):
    write(read(rings[0]), tmp_path / "out", SCHEMA)
    with pytest.raises(mr.FormatError, match="holds part-00000 already"):
        write(read(rings[0]), tmp_path / "out", SCHEMA)


def test_what_is_no_dataset_no_schema_and_no_folder_for_rings_is_refused(cluster, rings, tmp_path):
    dataset = read(rings[0])
    with pytest.raises(mr.SchemaError, match="dataset must be a ray"):
        write(None, tmp_path / "out", SCHEMA)
    with pytest.raises(mr.SchemaError, match="schema must be a Schema, got NoneType"):
        write(dataset, tmp_path / "out", None)
    with pytest.raises(mr.FormatError, match="is a ring itself"):
        write(dataset, rings[0], SCHEMA)
    with pytest.raises(mr.SchemaError, match="transforms must be a list of transforms"):
        read(rings[0], transforms=mr.Cast("float32"))
    with pytest.raises(mr.SchemaError, match="live must be"):
        read(rings[0], live="yes")


def blocks_of(path):
    (task,) = RingDatasource(path).get_read_tasks(1)
    return list(task())


def test_an_attempt_that_is_repeated_leaves_one_ring(rings, tmp_path):
    sink = RingDatasink(tmp_path / "out", SCHEMA)
    sink.on_write_start()
    killed = tmp_path / "out" / f"tmp-{sink._run}-00003-killed"
    mr.ReplayBuffer.create(killed, SCHEMA, 10).close()
    for _ in range(2):
        part = sink.write(blocks_of(rings[0]), SimpleNamespace(task_idx=3))
        assert [p.name for p in (tmp_path / "out").iterdir()] == ["part-00003"]
    assert len(legal(part)["action"]) == len(legal(rings[0])["action"])
    other = RingDatasink(tmp_path / "out", SCHEMA)
    with pytest.raises(mr.FormatError, match="of another write"):
        other.write(blocks_of(rings[0]), SimpleNamespace(task_idx=3))


def test_a_failed_write_leaves_no_ring(rings, tmp_path, monkeypatch):
    sink = RingDatasink(tmp_path / "out", SCHEMA)
    sink.on_write_start()

    def fail(*_, **__):
        raise mr.FullError("no space")

    monkeypatch.setattr(mr.ReplayBuffer, "extend", fail)
    with pytest.raises(mr.FullError) as caught:
        sink.write(blocks_of(rings[0]), SimpleNamespace(task_idx=0))
    sink.on_write_failed(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_without_next_observations_a_break_ends_an_episode(tmp_path):
    sink = RingDatasink(tmp_path / "out", SCHEMA)
    sink.on_write_start()
    path = make_ring(tmp_path / "a", envs=1, steps=100)
    rows = legal(path)
    names = [*SCHEMA.paths, "env_id", "position"]
    kept = np.r_[0:20, 40:60]
    accessor = data.BlockAccessor.batch_to_arrow_block
    block = accessor({name: rows[name][kept] for name in names})
    part = sink.write([block], SimpleNamespace(task_idx=0))
    got = legal(part)
    followed = np.isin(got["position"], [19])
    assert not followed.any()  # the row whose successor is not there
    # What follows a terminated step is known by a final observation alone.
    alive = ~got["terminated"]
    want = rows["next_observation/joints"][np.isin(rows["action"], got["action"])]
    np.testing.assert_array_equal(got["next_observation/joints"][alive], want[alive])


def test_a_missing_column_is_named(rings, tmp_path):
    sink = RingDatasink(tmp_path / "out", SCHEMA)
    with pytest.raises(mr.SchemaError, match="'observation/pixels'"):
        sink.on_write_start(SimpleNamespace(names=["action", "observation/joints"]))


def test_a_read_without_ray_says_what_to_call(rings, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(mr.SchemaError, match=r"ray\.init"):
        read(rings)

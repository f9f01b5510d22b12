"""What a shard does for its clients, over rings that are opened in one process."""

import multiprocessing
import shutil
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError, FullError, LockedError, SchemaError, StarvedError
from mmreplay.format.ray_files import read_epochs
from mmreplay.ray import draws
from mmreplay.ray.draws import RingDraws, ShardDraws
from mmreplay.ray.shard import Shard
from mmreplay.testing.disks import FaultyDisk, using
from tests.on_ray.rings import client_of, ring, update_of, wanted_of


@pytest.fixture
def folders(tmp_path):
    return {
        "a": ring(tmp_path / "a", np.arange(30)),
        "b": ring(tmp_path / "b", 1000 + np.arange(70)),
    }


@pytest.fixture
def shard(folders):
    own = ShardDraws(lambda: folders)
    yield own
    own.close()


def test_masses_are_of_every_ring(shard):
    uniform = client_of(mr.UniformSampler())
    assert shard.masses(uniform, 0, 0.0) == {
        "a": [30.0, 30.0, 1.0, 0.0],
        "b": [70.0, 70.0, 1.0, 0.0],
    }
    prioritized = client_of(mr.PrioritizedSampler(1.0, eps=0.5, normalize="buffer"))
    assert shard.masses(prioritized, 0, 0.0)["a"] == pytest.approx([45, 30, 1.5, 1])


def test_priorities_come_before_the_draws_of_their_request(shard):
    client = client_of(mr.PrioritizedSampler(1.0, eps=0.0))
    update = update_of(np.arange(30), np.where(np.arange(30) == 7, 3.0, 0.0))
    middle = np.linspace(0, 1, 20, endpoint=False)
    reply = shard.exchange(client, {"a": [update]}, wanted_of({"a": middle}), 0.0)
    drawn = reply["draws"]["a"]
    assert (drawn["positions"] == 7).all()
    np.testing.assert_array_equal(drawn["probabilities"], 1.0)
    assert reply["masses"]["a"][:2] == [3.0, 30.0]
    assert reply["masses"]["b"][:2] == [70.0, 70.0]
    assert reply["dropped"] == 0


@pytest.mark.parametrize("rows", [False, True])
def test_a_request_that_is_repeated_gives_the_same(shard, rows, rng):
    client = client_of(mr.PrioritizedSampler(0.7))
    update = update_of(rng.permutation(30)[:20], rng.random(20))
    wanted = wanted_of({"a": rng.random(9), "b": rng.random(4)}, 3, 3, rows)
    first = shard.exchange(client, {"a": [update]}, wanted, 2.0)
    again = shard.exchange(client, {"a": [update]}, wanted, 2.0)
    assert first["masses"] == again["masses"]
    for name in ("a", "b"):
        one, other = first["draws"][name], again["draws"][name]
        np.testing.assert_array_equal(one["positions"], other["positions"])
        np.testing.assert_array_equal(one["probabilities"], other["probabilities"])


def test_rows_that_are_asked_for_are_those_of_the_steps(shard, rng):
    client = client_of(mr.UniformSampler())
    shares = {"a": rng.random(50), "b": rng.random(50)}
    bare = shard.exchange(client, {}, wanted_of(shares), 0.0)["draws"]
    full = shard.exchange(client, {}, wanted_of(shares, rows=True), 0.0)["draws"]
    for name, first in (("a", 0), ("b", 1000)):
        assert "fields" not in bare[name]
        np.testing.assert_array_equal(bare[name]["positions"], full[name]["positions"])
        numbers = full[name]["fields"]["n"]
        np.testing.assert_array_equal(numbers, first + full[name]["positions"])


def test_windows_and_transforms_are_those_of_the_client(tmp_path):
    schema = mr.Schema({"reward": mr.Field((), "float32"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "w", schema, 40) as buffer:
        ends = np.arange(40) % 10 == 9
        buffer.extend(reward=np.arange(40, dtype=np.float32), terminated=ends)
    sampler = mr.SequenceSampler(3, mr.UniformSampler())
    client = client_of(sampler, [mr.Cast("float64", ["reward"], scale=2.0)])
    shard = ShardDraws(lambda: {"w": tmp_path / "w"})
    shares = wanted_of({"w": np.linspace(0, 0.99, 12)}, rows=True)
    drawn = shard.exchange(client, {}, shares, 0.0)["draws"]["w"]
    assert drawn["windows"].shape == drawn["mask"].shape == (12, 3)
    assert drawn["fields"]["is_first"].shape == (12, 3)
    np.testing.assert_array_equal(drawn["fields"]["reward"], 2.0 * drawn["windows"])
    bare = shard.exchange(client, {}, {**shares, "rows": []}, 0.0)
    bare = bare["draws"]["w"]
    np.testing.assert_array_equal(bare["windows"], drawn["windows"])
    np.testing.assert_array_equal(bare["is_first"], drawn["fields"]["is_first"])
    shard.close()


def test_a_ring_without_mass_draws_nothing(tmp_path):
    folders = {"empty": ring(tmp_path / "e", [], 5), "zero": ring(tmp_path / "z", [1])}
    shard = ShardDraws(lambda: folders)
    client = client_of(mr.PrioritizedSampler(eps=0.0))
    updates = {"zero": [update_of([0], [0.0])]}
    shares = wanted_of({"empty": [0.1], "zero": [0.1], "unknown": [0.5]})
    for rows in (False, True):
        wanted = {**shares, "rows": [*shares["shares"]] * rows}
        reply = shard.exchange(client, updates, wanted, 0.0)
        assert reply["draws"] == {"empty": None, "zero": None, "unknown": None}
    assert reply["masses"]["zero"][:2] == [0.0, 1.0]
    shard.close()


def test_a_ring_that_was_deleted_since_it_was_listed_is_passed_over(tmp_path, folders):
    listings = [{**folders, "gone": tmp_path / "gone"}, folders, folders]
    shard = ShardDraws(lambda: listings.pop(0))
    client = client_of(mr.UniformSampler())
    expected = shard.masses(client, 0, 0.0)
    assert [*expected] == [*folders]
    assert shard.masses(client, 0, 0.0) == expected
    shard.close()


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_a_ring_that_is_listed_and_not_there_is_a_format_error(tmp_path, folders, there):
    folders["c"] = tmp_path / "c"
    if there == "an empty folder":
        folders["c"].mkdir()
    shard = ShardDraws(lambda: folders)
    with pytest.raises(mr.FormatError, match=r"c (does not exist|is not a replay buffer)"):
        shard.masses(client_of(mr.UniformSampler()), 0, 0.0)
    shard.close()


def test_a_ring_that_is_made_again_damaged_is_drawn_from_once_it_is_whole(folders, shard):
    client = client_of(mr.UniformSampler())
    expected = shard.masses(client, 0, 0.0)
    shutil.copytree(folders["a"], folders["a"].with_name("copy"))
    shutil.rmtree(folders["a"])
    folders["a"].mkdir()
    (folders["a"] / "metadata.json").write_bytes(b"{")
    with pytest.raises(mr.FormatError, match=r"metadata\.json"):
        shard.masses(client, 0, 0.0)
    shutil.rmtree(folders["a"])
    folders["a"].with_name("copy").rename(folders["a"])
    assert shard.masses(client, 0, 0.0) == expected


def test_new_rings_and_new_rows_are_seen(tmp_path, folders, shard):
    client = client_of(mr.PrioritizedSampler(1.0, eps=0.0))
    shard.masses(client, 0, 0.0)
    folders["c"] = tmp_path / "c"
    with mr.ReplayBuffer.create(tmp_path / "c", ring_schema(), 9) as writer:
        writer.extend(n=np.arange(3))
        assert shard.masses(client, 0, 40.0)["c"] == pytest.approx([120, 3, np.inf, 40])
        writer.extend(n=np.arange(3))
        # Lower news never lowers it: rows enter at the highest of their own ring, too.
        assert shard.masses(client, 0, 5.0)["c"][:2] == [240.0, 6.0]
    del folders["b"]
    assert set(shard.masses(client, 0, 0.0)) == {"a", "c"}


def ring_schema():
    return mr.Schema({"n": mr.Field((), "int64")})


def test_overwritten_priorities_are_counted(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "a", ring_schema(), 10) as writer:
        writer.extend(n=np.arange(10))
        shard = ShardDraws(lambda: {"a": tmp_path / "a"})
        client = client_of(mr.PrioritizedSampler())
        shard.masses(client, 0, 0.0)
        writer.extend(n=np.arange(5))
        update = update_of(np.arange(10), np.ones(10))
        unknown = update_of([5000], [1.0])
        updates = {"a": [update, unknown], "gone": [update_of([1], [1.0])]}
        assert shard.exchange(client, updates, None, 0.0)["dropped"] == 5 + 1 + 1
        shard.close()


def test_values_that_do_not_fit_are_refused(shard):
    client = client_of(mr.PrioritizedSampler())
    with pytest.raises(SchemaError, match="priorities must be finite"):
        shard.exchange(client, {"a": [update_of([1], [np.nan])]}, None, 0.0)


def draw_and_wait(path, ready, end):
    sampler = mr.PrioritizedSampler()
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        buffer.sample(4)
        ready.set()
        end.wait(60)


def test_priorities_of_another_process_are_refused_with_its_pid(shard, folders):
    context = multiprocessing.get_context("spawn")
    ready, end = context.Event(), context.Event()
    holder = context.Process(target=draw_and_wait, args=(folders["a"], ready, end))
    holder.start()
    assert ready.wait(60)
    client = client_of(mr.PrioritizedSampler())
    try:
        for _ in range(2):
            with pytest.raises(LockedError, match=f"of pid {holder.pid}") as error:
                shard.masses(client, 0, 0.0)
            assert error.value.pid == holder.pid
        # Other samplers go on.
        assert shard.masses(client_of(mr.UniformSampler()), 0, 0.0)
    finally:
        end.set()
        holder.join()
    assert shard.masses(client, 0, 0.0)["a"][1] == 30.0


def test_a_full_disk_refuses_priorities_and_frozen_epochs_and_draws_go_on(shard):
    prioritized = client_of(mr.PrioritizedSampler())
    shuffled = client_of(mr.ShuffledSampler(seed=0))
    uuids = shard.freeze(shuffled, "0/none", 0, None)
    no_space = OSError(28, "No space left on device")
    with using(FaultyDisk(no_space, 0, 99, names=("allocate", "pwrite"))):
        message = r"the priorities of .*a must be on disk, but are in RAM: .* No space"
        for _ in range(2):
            with pytest.raises(FullError, match=message):
                shard.masses(prioritized, 0, 0.0)
        with pytest.raises(FullError, match=r"epochs\.json: No space left"):
            shard.freeze(shuffled, "0/some", 0, list(uuids))
        uniform = client_of(mr.UniformSampler())
        reply = shard.exchange(uniform, {}, wanted_of({"a": [0.5]}, rows=True), 0.0)
        assert len(reply["draws"]["a"]["fields"]["n"]) == 1
    assert shard.masses(prioritized, 0, 0.0)["a"][1] == 30.0
    frozen = shard.freeze(shuffled, "0/some", 0, list(uuids))
    assert all(each is not None for each in frozen.values())


def test_clients_that_differ_need_samplers_of_different_names(shard):
    shard.masses(client_of(mr.PrioritizedSampler(0.6)), 0, 0.0)
    with pytest.raises(LockedError, match="give this one another name"):
        shard.masses(client_of(mr.PrioritizedSampler(0.7)), 0, 0.0)
    assert shard.masses(client_of(mr.PrioritizedSampler(0.7, name="other")), 0, 0.0)


def test_priorities_are_given_back_once_no_learner_asks_by_them(shard, monkeypatch):
    first = client_of(mr.PrioritizedSampler(0.6))
    other = client_of(mr.PrioritizedSampler(0.7))
    shard.exchange(first, {"a": [update_of([7], [5.0])]}, None, 0.0)
    with pytest.raises(LockedError, match="given back 120 s after the last"):
        shard.masses(other, 0, 0.0)
    monkeypatch.setattr(draws, "IDLE_S", 0.05)
    time.sleep(0.1)
    # They are on disk, whatever the settings.
    assert shard.masses(other, 0, 0.0)["a"][3] == 5.0
    assert len(shard._by_client) == 1


def test_priorities_that_cannot_be_stored_are_refused(shard, folders):
    (folders["a"] / "samplers").write_bytes(b"a file where a folder should be")
    with pytest.raises((FailedError, mr.FormatError)):
        shard.masses(client_of(mr.PrioritizedSampler()), 0, 0.0)
    assert shard.masses(client_of(mr.PrioritizedSampler(name=None)), 0, 0.0)


def test_priorities_outlive_the_shard(folders):
    client = client_of(mr.PrioritizedSampler())
    first = ShardDraws(lambda: folders)
    update = update_of(np.arange(30), np.arange(30))
    expected = first.exchange(client, {"a": [update]}, None, 0.0)["masses"]
    first.close()
    second = ShardDraws(lambda: folders)
    shares = {"a": np.linspace(0, 0.9, 10)}
    # The first call may be any: a client repeats what a restart interrupted.
    reply = second.exchange(client, {}, wanted_of(shares), 0.0)
    assert reply["masses"]["a"] == pytest.approx(expected["a"])
    assert reply["draws"]["a"] is not None
    second.close()


def test_rows_overwritten_while_they_are_copied_are_drawn_again(tmp_path, monkeypatch):
    with mr.ReplayBuffer.create(tmp_path / "a", ring_schema(), 100) as writer:
        writer.extend(n=np.arange(100))
        own = RingDraws(client_of(mr.UniformSampler()))
        own.serve({"a": tmp_path / "a"})
        reader = own.buffers["a"].view
        copy, count = type(reader).copy_draw, [0]

        def slow_copy(self, *args, **kwargs):
            if self is reader and count[0] < limit:
                count[0] += 1
                writer.extend(n=100 * count[0] + np.arange(100))
            return copy(self, *args, **kwargs)

        monkeypatch.setattr(type(reader), "copy_draw", slow_copy)
        limit = 1
        request = wanted_of({"a": np.linspace(0, 0.99, 50)}, rows=True)
        drawn = own.exchange({}, request, 0.0)["draws"]["a"]
        np.testing.assert_array_equal(drawn["fields"]["n"], drawn["positions"])
        assert drawn["positions"].min() >= 100
        limit = 1000
        with pytest.raises(StarvedError, match="gave up after 100 attempts"):
            own.exchange({}, request, 0.0)
        own.close()


def test_a_resize_is_followed(tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "a", ring_schema(), 100) as writer:
        writer.extend(n=np.arange(100))
        shard = ShardDraws(lambda: {"a": tmp_path / "a"})
        client = client_of(mr.PrioritizedSampler())
        assert shard.masses(client, 0, 0.0)["a"][1] == 100
        writer.resize(50)
        for rows in (False, True):
            request = wanted_of({"a": np.linspace(0, 0.99, 50)}, rows=rows)
            reply = shard.exchange(client, {}, request, 0.0)
            assert reply["masses"]["a"][1] == 50
            assert reply["draws"]["a"]["positions"].min() >= 50
        shard.close()


@pytest.mark.parametrize(
    "wrong",
    [{"name": "x" * 300}, {"stops": [30, 30], "counts": [30, 30]}, {"counts": [31], "stops": [-1]}],
    ids=["name", "environments", "numbers"],
)
def test_an_epoch_of_a_wrong_state_is_not_stored(shard, folders, wrong):
    client = client_of(mr.ShuffledSampler(seed=0))
    (uuid, *_) = shard.freeze(client, "x", 0, None)
    epoch = {"name": "x", "epoch": 0, "stops": [30], "counts": [30], "buffers": [uuid]}
    with pytest.raises(mr.FormatError):
        shard.restore(client, {uuid: {**epoch, **wrong}})
    if "name" in wrong:
        with pytest.raises(mr.FormatError):
            shard.freeze(client, wrong["name"], 0, [uuid])
    assert [read_epochs(folder) for folder in folders.values()] == [[], []]
    shard.restore(client, {uuid: epoch})
    assert len(read_epochs(folders["a"])) == 1


def test_a_shard_whose_folder_is_gone_answers_an_error_of_mmreplay(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    ring(run / "a", np.arange(9))
    shard, client = Shard("run", str(tmp_path), "here"), client_of(mr.UniformSampler())
    assert shard.masses(client, 0, 0.0)["a"][1] == 9
    shutil.rmtree(run)
    with pytest.raises(FailedError, match=str(run)):
        shard.masses(client, 0, 0.0)
    shard.stop()

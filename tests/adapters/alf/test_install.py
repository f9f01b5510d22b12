"""`install`: alf makes our buffer, with the arguments of its own configuration."""

import multiprocessing
import pickle
import sys
from functools import wraps
from inspect import signature

import pytest
import torch

import mmreplay as mr
from mmreplay.adapters import alf as ours
from mmreplay.adapters.alf import RingBuffer, install, installing
from tests.adapters.alf import stand_in
from tests.adapters.alf.support import FIRST, MID, SPEC, rows


@pytest.fixture
def alf(monkeypatch):
    monkeypatch.setattr(installing.ReplayBuffer, "replaced", None)
    monkeypatch.setattr(installing.ReplayBuffer, "top", None)
    monkeypatch.setattr(installing.ReplayBuffer, "resume", False)
    return stand_in.put(monkeypatch)


def made(alf, *args, **kwargs):
    """What an algorithm that was imported before the installation makes."""
    return alf.algorithms.rl_algorithm.ReplayBuffer(*args, **kwargs)


def capacity(folder):
    with mr.ReplayBuffer.open(folder) as ring:
        return ring.capacity


def test_every_loaded_module_of_alf_makes_our_buffer(alf, tmp_path):
    theirs = alf.experience_replayers.replay_buffer.ReplayBuffer
    with pytest.raises(NotImplementedError):
        made(alf, SPEC, 1)
    elsewhere = sys.modules[__name__]
    elsewhere.Theirs = theirs
    install(path=tmp_path)
    for module, name in (
        (alf.experience_replayers.replay_buffer, "ReplayBuffer"),
        (alf.algorithms.rl_algorithm, "ReplayBuffer"),
        (alf.algorithms.data_transformer, "Buffer"),
    ):
        assert issubclass(getattr(module, name), ours.ReplayBuffer)
    # Only alf's own modules are changed.
    assert elsewhere.Theirs is theirs
    assert isinstance(made(alf, SPEC, 1), ours.ReplayBuffer)
    assert (tmp_path / "ReplayBuffer").is_dir()


def test_configuration_counts_whenever_it_was_given_and_arguments_win(alf, tmp_path):
    alf.config("ReplayBuffer", max_length=50, keep_episodic_info=True)
    install(path=tmp_path)
    # As a conf file does, which alf reads when its algorithms are loaded.
    alf.config("ReplayBuffer", gamma=0.5, record_episodic_return=True)
    buffer = made(alf, SPEC, 1, name="a")
    assert buffer._max_length == 50
    for kind, reward in ((FIRST, 0.0), (MID, 1.0), (MID, 1.0), (2, 1.0)):
        ends = 0.0 if kind == 2 else 1.0
        buffer.add_batch(rows([kind], [ends], [reward]))
    zeros = torch.zeros(1, dtype=torch.int64)
    field = buffer._core.buffer.get_field("discounted_return", zeros, zeros)
    assert field.tolist() == [1 + 0.5 + 0.25]
    assert made(alf, SPEC, 1, 20, name="b")._max_length == 20
    assert made(alf, SPEC, 1, name="c", max_length=30)._max_length == 30


def test_all_arguments_are_asked_for(alf, tmp_path, monkeypatch):
    original, seen = ours.ReplayBuffer.__init__, {}

    @wraps(original)
    def noting(*args, **kwargs):
        seen.update(signature(original).bind(*args, **kwargs).arguments)
        original(*args, **kwargs)

    monkeypatch.setattr(ours.ReplayBuffer, "__init__", noting)
    install(path=tmp_path)
    values = {
        "max_length": 20,
        "num_earliest_frames_ignored": 1,
        "prioritized_sampling": True,
        "initial_priority": 2.0,
        "recent_data_steps": 3,
        "recent_data_ratio": 0.5,
        "with_replacement": True,
        "device": "cpu",
        "allow_multiprocess": False,
        "keep_episodic_info": True,
        "record_episodic_return": True,
        "default_return": -3.0,
        "gamma": 0.25,
        "reward_clip": (-1.0, 1.0),
        "enable_checkpoint": True,
        "name": "of alf",
    }
    alf.config("ReplayBuffer", **values)
    made(alf, SPEC, 1)
    assert {name: seen[name] for name in values} == values
    others = {"self", "data_spec", "num_environments", "path", "resume"}
    assert values.keys() == seen.keys() - others
    assert capacity(tmp_path / "of alf") == 20


def test_gather_all_follows_its_own_configuration(alf, tmp_path):
    install(path=tmp_path)
    alf.config("ReplayBuffer.gather_all", ignore_earliest_frames=True)
    buffer = made(alf, SPEC, 1, 10, num_earliest_frames_ignored=2)
    for number in range(5):
        buffer.add_batch(rows([FIRST if number == 0 else MID], [1.0], [float(number)]))
    assert buffer.gather_all()[0].reward.tolist() == [[2, 3, 4]]
    assert buffer.gather_all(False)[0].reward.tolist() == [[0, 1, 2, 3, 4]]
    found, _ = buffer.gather_all(ignore_earliest_frames=False)
    assert found.reward.tolist() == [[0, 1, 2, 3, 4]]


def test_each_buffer_of_a_path_has_a_folder_by_its_name(alf, tmp_path):
    install(path=tmp_path, resume=True)
    names = ["SacAlgorithm_replay_buffer", "SacAlgorithm_offline_replay_buffer", "a/b"]
    buffers = {name: made(alf, SPEC, 1, 10, name=name) for name in names}
    for number, buffer in enumerate(buffers.values()):
        buffer.add_batch(rows([FIRST], [1.0], [float(number)]))
        buffer.close()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted([*names[:2], "a%2Fb"])
    # In another order each finds its own rows.
    for number, name in reversed(list(enumerate(names))):
        again = made(alf, SPEC, 1, 10, name=name)
        assert again.gather_all()[0].reward.tolist() == [[number]]


def test_two_buffers_of_one_name_are_refused(alf, tmp_path):
    install(path=tmp_path, resume=True)
    first = made(alf, SPEC, 1, 10)
    with pytest.raises(AssertionError, match="two buffers are named 'ReplayBuffer', a"):
        made(alf, SPEC, 1, 10)
    first.close()
    again = made(alf, SPEC, 1, 10)
    # One that nothing refers to any more, but itself, is closed first.
    again.itself = again
    del again
    made(alf, SPEC, 1, 10).close()


@pytest.mark.parametrize("name", ["", ".", "..", "a\0b", "x" * 256])
def test_a_name_that_is_no_folder_s_is_refused(alf, tmp_path, name):
    install(path=tmp_path)
    with pytest.raises(AssertionError, match="name must be usable as the name of a fo"):
        made(alf, SPEC, 1, 10, name=name)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_passed_is_the_buffer_s_own(alf, tmp_path):
    install(path=tmp_path / "top")
    made(alf, SPEC, 1, 10, path=tmp_path / "own").close()
    assert capacity(tmp_path / "own") == 10
    with pytest.raises(mr.FormatError, match="already holds a buffer"):
        made(alf, SPEC, 1, 10, path=tmp_path / "own")
    made(alf, SPEC, 1, 10, path=tmp_path / "own", resume=True).close()


def test_a_second_installation_counts_for_buffers_made_after_it(alf, tmp_path):
    install(path=tmp_path / "a")
    made(alf, SPEC, 1, 10).close()
    with pytest.raises(mr.FormatError, match="already holds a buffer"):
        made(alf, SPEC, 1, 10)
    # A module that was loaded from a copy of the class still gets ours.
    alf.algorithms.data_transformer.Buffer = installing.ReplayBuffer.replaced
    install(path=tmp_path / "b", resume=True)
    for _ in range(2):
        made(alf, SPEC, 1, 10).close()
    alf.algorithms.data_transformer.Buffer(SPEC, 1, 10, name="c").close()
    assert sorted(each.name for each in (tmp_path / "b").iterdir()) == ["ReplayBuffer", "c"]


def test_without_a_path_a_buffer_is_in_a_temporary_folder(alf, monkeypatch, tmp_path):
    monkeypatch.delenv("MMREPLAY_DIR", raising=False)
    install()
    first, second = made(alf, SPEC, 1, 10), made(alf, SPEC, 1, 10)
    assert "temporary folder" in repr(first)
    assert repr(first) != repr(second)


def test_without_alf_it_says_what_is_missing(monkeypatch):
    for name in [each for each in sys.modules if each.partition(".")[0] == "alf"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "alf", None)
    with pytest.raises(ImportError, match=r"install needs alf, but alf\.exper"):
        install()


def add_in_child(data):
    buffer = pickle.loads(data)
    buffer.add_batch(rows([FIRST], [1.0], [7.0]))


@pytest.mark.slow
def test_a_child_process_reaches_an_installed_buffer(alf, tmp_path):
    install(path=tmp_path)
    buffer = made(alf, SPEC, 1, 10, allow_multiprocess=True)
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=add_in_child, args=(pickle.dumps(buffer),))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert buffer.gather_all()[0].reward.tolist() == [[7]]
    buffer.close()


def test_a_folder_is_not_shared_by_buffers_of_different_names(tmp_path):
    first = ours.ReplayBuffer(SPEC, 1, 10, name="a", path=tmp_path / "b", resume=True)
    for kind in (ours.ReplayBuffer, RingBuffer):
        with pytest.raises(AssertionError, match="is open as the buffer 'a', and can"):
            kind(SPEC, 1, 10, name="b", path=tmp_path / "b", resume=True)
    first.close()
    ours.ReplayBuffer(SPEC, 1, 10, name="b", path=tmp_path / "b", resume=True).close()

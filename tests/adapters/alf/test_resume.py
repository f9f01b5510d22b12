"""A buffer that is closed, or whose process died, goes on where it was."""

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import mmreplay as mr
from mmreplay.adapters.alf import DataBuffer, ReplayBuffer
from mmreplay.adapters.alf.episodes import Log
from mmreplay.adapters.common import values
from mmreplay.errors import FormatError
from tests.adapters.alf.support import (
    LAST,
    MID,
    SPEC,
    counted,
    episodic,
    returns,
    rows,
    rows_of,
    story,
)


def test_a_run_goes_on_with_rows_episodes_and_returns(tmp_path):
    buffer = episodic(tmp_path / "b")
    story(buffer, "F1/0 M1/1 L0/2 F1/3 M1/4")
    buffer.close()
    again = episodic(tmp_path / "b", resume=True)
    assert again.gather_all()[0].reward.tolist() == [[0, 1, 2, 3, 4]]
    # What another run adds does not go on with the episode that was broken off.
    assert again.gather_all()[0].step_type.tolist() == [[0, 1, LAST, 0, LAST]]
    story(again, "F1/5 L0/6")
    env_ids, positions = rows_of(again)
    assert again.get_episode_begin_position(positions, env_ids).tolist() == [0, 0, 0, 3, 3, 5, 5]
    left = again.steps_to_episode_end(positions, env_ids)
    assert left.tolist() == [2, 1, 0, 1, 0, 1, 0]
    assert returns(again) == [2, 2, -7, -7, -7, 6, -7]
    again.close()


def test_a_row_that_is_not_first_begins_an_episode_after_a_break(tmp_path):
    buffer = episodic(tmp_path / "b")
    story(buffer, "F1/0 M1/1")
    buffer.close()
    again = episodic(tmp_path / "b", resume=True)
    story(again, "M1/2 L0/3")
    env_ids, positions = rows_of(again)
    begins = again.get_episode_begin_position(positions, env_ids)
    assert begins.tolist() == [0, 0, 2, 2]
    assert returns(again) == [-7, -7, 3, -7]
    again.close()


def test_returns_are_summed_where_a_run_died_before_it_could(tmp_path, monkeypatch):
    buffer = episodic(tmp_path / "b")
    story(buffer, "F1/0 M1/1")
    with monkeypatch.context() as patch:
        patch.setattr(mr.ReplayBuffer, "write_field", interrupts)
        with pytest.raises(KeyboardInterrupt):
            story(buffer, "L0/2")
    buffer.close()
    again = episodic(tmp_path / "b", resume=True)
    assert returns(again) == [2, 2, -7]
    again.close()


@pytest.mark.parametrize("at", range(3))
def test_an_add_that_was_interrupted_is_caught_up_with(tmp_path, monkeypatch, at):
    buffer = episodic(tmp_path / "b")
    told = ["F1/0 M1/1", "L0/2", "F1/3", "L0/4"]
    for which, text in enumerate(told):
        with monkeypatch.context() as patch:
            if which == at + 1:
                # Ctrl-C comes when the row is in, and before it is noted.
                patch.setattr(Log, "added", interrupts)
                with pytest.raises(KeyboardInterrupt):
                    story(buffer, text)
            else:
                story(buffer, text)
    story(buffer, "F1/5")
    env_ids, positions = rows_of(buffer)
    begins = buffer.get_episode_begin_position(positions, env_ids)
    assert begins.tolist() == [0, 0, 0, 3, 3, 5]
    zeros = buffer.get_disc_0_begin_position(positions, env_ids)
    assert zeros.tolist() == [0, 0, 2, 3, 4, 5]
    assert returns(buffer) == [2, 2, -7, 4, -7, -7]
    buffer.close()


def interrupts(*_):
    raise KeyboardInterrupt


def test_a_checkpoint_is_small_and_draws_go_on_from_it(tmp_path):
    options = {"prioritized_sampling": True, "num_earliest_frames_ignored": 1}
    buffer = ReplayBuffer(SPEC, 2, 16, path=tmp_path / "b", **options)
    counted(buffer, 16, 2)
    _, info = buffer.get_batch(8, 2)
    buffer.update_priority(info.env_ids, info.positions, torch.arange(1.0, 9))
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    assert os.path.getsize(tmp_path / "state.pt") < 4096
    # The newest rows become LAST ones when a state is loaded.
    wanted = [buffer.get_batch(8, 2) for _ in range(3)]
    buffer.close()
    again = ReplayBuffer(SPEC, 2, 16, path=tmp_path / "b", resume=True, **options)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for data, info in wanted:
        found, where = again.get_batch(8, 2)
        assert torch.equal(where.positions, info.positions)
        assert torch.equal(where.importance_weights, info.importance_weights)
        assert torch.equal(found.reward, data.reward)
    ends = again.gather_all()[0].step_type[:, -1]
    assert ends.tolist() == [LAST, LAST]
    again.close()


def test_the_end_of_every_environment_is_marked_when_a_state_is_loaded(tmp_path):
    buffer = ReplayBuffer(SPEC, 2, 4, path=tmp_path / "b")
    counted(buffer, 3, 2)
    buffer.load_state_dict(buffer.state_dict())
    assert buffer.gather_all()[0].step_type.tolist() == [[1, 1, 2]] * 2
    buffer.close()


def test_nests_without_step_types_are_resumed_as_well(tmp_path):
    buffer = DataBuffer({"x": SPEC.reward}, 4, path=tmp_path / "b")
    buffer.add_batch({"x": torch.arange(3.0)})
    state = buffer.state_dict()
    buffer.close()
    again = DataBuffer({"x": SPEC.reward}, 4, path=tmp_path / "b", resume=True)
    again.load_state_dict(state)
    assert again.get_all()["x"].tolist() == [0, 1, 2]
    again.close()


def test_states_that_do_not_fit_are_refused(tmp_path):
    one = ReplayBuffer(SPEC, 1, 4, path=tmp_path / "one")
    other = ReplayBuffer(SPEC, 1, 4, path=tmp_path / "other")
    with pytest.raises(FormatError, match="with the state's path and resume=True, then"):
        one.load_state_dict(other.state_dict())
    with pytest.raises(FormatError, match=r"got kind None\. Load what state_dict"):
        one.load_state_dict({})
    with pytest.raises(FormatError, match="which is removed at exit"):
        ReplayBuffer(SPEC, 1, 4).state_dict()
    one.close()
    other.close()


def test_the_page_about_alf_shows_what_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[3] / "docs" / "migrating" / "alf.md"
    (block,) = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    names = {}
    exec(compile(block, str(page), "exec"), names)
    assert names["batch"].reward.shape == (32, 3)
    assert names["goal"].shape == (32, 3, 8, 8)
    assert (names["goal"] == 9).all()
    names["buffer"].close()


def test_seeds_of_torch_are_those_of_draws(monkeypatch):
    drawn = []
    for seed, anew in ((1, True), (1, True), (2, False), (1, False)):
        if anew:
            monkeypatch.setattr(values, "_seeded", Counter())  # as a new process
        torch.manual_seed(seed)
        buffer = ReplayBuffer(SPEC, 1, 64)
        counted(buffer, 64, 1)
        drawn.append(buffer.get_batch(16, 2)[1].positions.tolist())
        data = DataBuffer(SPEC.reward, 64)
        data.add_batch(torch.arange(64.0))
        drawn[-1] += data.get_batch(16).tolist()
        buffer.close()
    assert drawn[0] == drawn[1] not in drawn[2:]


def test_the_folder_is_a_buffer_like_any_other(tmp_path):
    buffer = episodic(tmp_path / "b")
    # The last episode is begun without a LAST row before it.
    story(buffer, "F1/0 M1/1 L0/2 F1/3 L1/4 F1/5 M1/6 F1/7")
    buffer.close()
    assert mr.verify_buffer(tmp_path / "b").ok
    with mr.ReplayBuffer.open(tmp_path / "b") as plain:
        episodes = plain.episodes.episodes(0)
        assert episodes.lengths.tolist() == [3, 2, 2, 1]
        found = plain.get_field("terminated", 0, range(8))
        assert np.flatnonzero(found).tolist() == [2]
        found = plain.get_field("truncated", 0, range(8))
        assert np.flatnonzero(found).tolist() == [4, 6]
        assert plain.schema.role("reward") == "step/reward"
        batch = plain.sample(4)
        assert batch["step/observation/image"].shape == (4, 2, 2)


def test_a_writer_that_is_killed_loses_no_row(tmp_path):
    pid = os.fork()
    if pid == 0:
        buffer = ReplayBuffer(SPEC, 1, 8, path=tmp_path / "b")
        for step in range(5):
            buffer.add_batch(rows([MID], [1.0], [step]))
        os._exit(9)  # as kill -9: nothing is closed
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    again = ReplayBuffer(SPEC, 1, 8, path=tmp_path / "b", resume=True)
    assert again.gather_all()[0].reward.tolist() == [[0, 1, 2, 3, 4]]
    again.close()

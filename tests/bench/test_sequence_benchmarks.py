"""The benchmark of sequences runs, small, so that it cannot rot."""

import numpy as np
import pytest

from tools.bench import bench_sequences, slices, transitions
from tools.bench.simulated import SimulatedView


@pytest.mark.slow
def test_sequences_are_measured_without_any_peer(tmp_path):
    result = bench_sequences.measure(tmp_path, bench_sequences.QUICK, [])
    assert all(us > 0 for us in result["median_us"].values())
    assert set(result["draw_us_by_rows"]) == set(bench_sequences.BOUNDARIES)


@pytest.mark.peer
def test_sequences_are_measured_against_every_peer(tmp_path):
    names = slices.installed()
    if len(names) < len(slices.MAKERS):
        pytest.skip("a peer is not installed; see tools/bench/peers.txt")
    result = bench_sequences.measure(tmp_path, bench_sequences.QUICK, names)
    assert set(result["speedup"]) == set(names)


def sequences(firsts):
    numbers = np.asarray(firsts)[:, None] + np.arange(bench_sequences.LENGTH)
    return transitions.columns(numbers.reshape(-1))


@pytest.mark.parametrize("boundary", bench_sequences.BOUNDARIES)
def test_sequences_of_one_episode_pass_every_check(boundary):
    rows = sequences(100 * np.arange(bench_sequences.COUNT) + 7)
    bench_sequences.check(rows, "peer", boundary)


def test_a_sequence_over_an_end_is_refused_where_it_should_not_be():
    rows = sequences(100 * np.arange(bench_sequences.COUNT) + 70)
    bench_sequences.check(rows, "peer", "any")
    with pytest.raises(AssertionError, match="peer: a sequence goes over the end"):
        bench_sequences.check(rows, "peer", "episode")


def test_steps_that_do_not_follow_each_other_are_refused():
    rows = sequences(np.zeros(bench_sequences.COUNT, int))
    rows = {path: column[::-1] for path, column in rows.items()}
    with pytest.raises(AssertionError, match="do not follow each other"):
        bench_sequences.check(rows, "peer", "any")


def test_a_simulated_buffer_has_the_episodes_that_it_says():
    view = SimulatedView(1050, 100)
    found = view.index.episodes(0)
    assert found.begin.tolist() == list(range(0, 1050, 100))
    assert found.lengths.tolist() == [100] * 10 + [50]
    assert found.running.tolist() == [False] * 10 + [True]

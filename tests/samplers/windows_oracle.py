"""Windows of an oracle's steps, found by looking at every step and every row."""

from tests.samplers.test_uniform import assert_uniform


def episode_begins(oracle, env_id, position):
    """Whether a row is the first of its episode."""
    rows = oracle.envs[env_id].rows
    return position == 0 or rows[position - 1].episode != rows[position].episode


def windows(
    oracle, length, boundary="episode", burn_in=0, stride=1, bootstrap=0, legal=None, before=0
):
    """Positions, mask and is_first of every window, by (env_id, step drawn).

    Args:
        oracle: What the buffer holds.
        length, boundary, burn_in, stride, bootstrap: As of `SequenceSampler`.
        legal: (env_id, position) of the legal starts, if not those of single steps.
        before: See `Oracle.window_steps`.
    """
    every = oracle.window_steps(legal, before)
    legal = set(oracle.legal() if legal is None else legal)
    found = {}
    for env_id, stream in enumerate(oracle.envs):
        mine = [p for e, p in every if e == env_id]
        for start in mine:
            episode = stream.rows[start].episode
            here = [p for p in mine if stream.rows[p].episode == episode]
            steps = mine if boundary == "any" else here
            at = steps.index(start)
            columns = range(at - burn_in, at + length + bootstrap)
            mask = [0 <= c < len(steps) for c in columns]
            if boundary != "pad" and not all(mask):
                continue
            inside = [min(max(c, 0), len(steps) - 1) for c in columns]
            places = [steps[c] for c in inside]
            first = places[0] if boundary == "episode" else start
            fresh = episode_begins(oracle, env_id, first)
            if not fresh and start % stride:
                continue
            begins = [episode_begins(oracle, env_id, p) for p in places]
            is_first = [m and b for m, b in zip(mask, begins, strict=True)]
            known = [(env_id, p) in legal for p in places]
            mask = [m and k for m, k in zip(mask, known, strict=True)]
            found[env_id, start] = (places, mask, is_first)
    return found


def drawn(draw):
    """The windows of a draw, as `windows` gives them."""
    names = zip(draw.env_ids.tolist(), draw.positions.tolist(), strict=True)
    w = draw.windows
    values = zip(w.positions.tolist(), w.mask.tolist(), w.is_first.tolist(), strict=True)
    return list(zip(names, values, strict=True))


def assert_windows(draw, expected):
    """The draw's windows are the expected ones, each as often as chance lets it."""
    got = drawn(draw)
    for name, (positions, mask, is_first) in got:
        assert (positions, mask, is_first) == expected[name], name
    assert_uniform([name for name, _ in got], expected)

"""Ctrl-C at every moment of a call, one after another: the call is in, or it is not.

The oracle is fed what the heads and tails say of the struck call, and must then agree
with the buffer in every row, flag and legal start, as after a call that was whole.
"""

import itertools
import threading

import numpy as np
import pytest

import mmreplay as mr
from tests.buffer.interrupting import Striker
from tests.buffer.oracle import columns
from tests.buffer.support import Twin, check

MAX_POINTS = 3000
WITHIN = {
    "buffer/append.py",
    "buffer/flag_rules.py",
    "storage/committer.py",
    "storage/commit_state.py",
    "storage/memmap.py",
    "disk/files.py",
}
"""Where a call changes anything; before, all of it is checked, and nothing is done."""
ROUNDS = 2
"""Strikes at one moment, so that it is met at several places of the ring."""


class Struck:
    """A twin whose calls are struck, one moment after another."""

    def __init__(self, path, capacity, num_envs, **options):
        self.twin = Twin(path, capacity, num_envs, **options)
        self.buffer, self.oracle = self.twin.buffer, self.twin.oracle
        self.reader = None if path is None else mr.ReplayBuffer.open(path)
        self.points = set()

    def rows(self):
        return [len(stream.rows) for stream in self.oracle.envs]

    def agree(self):
        check(self.buffer, self.oracle, illegal=False)
        if self.reader is not None:
            check(self.reader, self.oracle, illegal=False)

    def strike(self, point, call, apply):
        """Strike a call and feed the oracle what is in; True if it was struck."""
        striker = Striker(point, WITHIN)
        struck = striker.call(call)
        if struck:
            self.points.add(striker.where)
        try:
            apply(struck)
            self.agree()
        except BaseException as error:
            error.add_note(f"struck at {striker.where}, moment {point}")
            raise
        return struck

    def all(self, act):
        """Strike every moment of an act, and see that whole acts go on between."""
        for point in range(MAX_POINTS):
            struck = [self.strike(point, *act()) for _ in range(ROUNDS)]
            call, apply = act()
            call()
            apply(False)
            self.agree()
            if not any(struck):
                break
        assert point > 5

    def close(self):
        """Close as a user does, and look at the files as nobody's friend."""
        if self.reader is not None:
            self.reader.close()
        closing = threading.Thread(target=self.buffer.close, daemon=True)
        closing.start()
        closing.join(60)
        assert not closing.is_alive(), "close hangs"
        if self.twin.path is not None:
            report = mr.verify_buffer(self.twin.path)
            assert report.ok, report

    # What each call is, and how the oracle is told of as much of it as is in.

    def extending(self, steps, env_ids, final):
        """An act of many steps, or of one by `add`."""
        ids = list(range(self.buffer.num_envs)) if env_ids is None else env_ids
        turns = itertools.count()

        def act():
            made = []
            for _ in range(steps):
                turn = next(turns)
                kinds = [KINDS_IN_TURN[(turn + 2 * e) % 4] for e in range(len(ids))]
                made.append(self.twin.steps(ids, kinds))
            given = [columns(list(values.values())) for values, _ in made]
            data = {name: np.stack([g[name] for g in given]) for name in given[0]}
            options = {"env_ids": env_ids}
            if final:
                options["final_observation"] = [list(f.values()) for _, f in made]
            method = self.buffer.extend
            if steps == 1:
                method, data = self.buffer.add, given[0]
                if final:
                    options["final_observation"] = list(made[0][1].values())

            def apply(struck):
                heads = self.buffer.heads.tolist()
                for values, finals in made:
                    if struck and self.rows() == heads:
                        break
                    self.oracle.add(values, finals if final else None)
                assert self.rows() == heads

            return (lambda: method(data, **options)), apply

        return act


KINDS_IN_TURN = ["", "t", "", "u"]
LAYOUTS = ("env_major", "time_major")


SLOW = pytest.mark.slow
# Few in the everyday run, all of them in the slow one.
SUBSETS = [None, pytest.param([1], marks=SLOW), pytest.param([2, 0], marks=SLOW)]


@pytest.fixture(params=["memmap", "memory"])
def path(request, tmp_path):
    return tmp_path / "ring" if request.param == "memmap" else None


@pytest.mark.parametrize("every", [None, pytest.param(60.0, marks=SLOW)])
@pytest.mark.parametrize("env_ids", SUBSETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_an_add_struck_anywhere(path, layout, autoreset, env_ids, every):
    options = {"layout": layout, "autoreset": autoreset, "commit_every": every}
    struck = Struck(path, 4, 3, **options)
    struck.all(struck.extending(1, env_ids, final=False))
    struck.close()


def test_an_add_of_one_environment_struck_anywhere(path):
    struck = Struck(path, 4, 1)
    struck.all(struck.extending(1, None, final=False))
    struck.close()


@pytest.mark.parametrize("env_ids", [None, pytest.param([2, 0], marks=SLOW)])
@pytest.mark.sliced(1)
def test_an_add_with_final_observations_struck_anywhere(path, env_ids):
    struck = Struck(path, 5, 3, autoreset="same_step")
    struck.all(struck.extending(1, env_ids, final=True))
    struck.close()


@pytest.mark.slow
@pytest.mark.parametrize("final", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("env_ids", [None, pytest.param([2, 0], marks=SLOW)])
@pytest.mark.parametrize("layout", ["time_major", pytest.param("env_major", marks=SLOW)])
def test_an_extend_struck_anywhere(tmp_path, layout, env_ids, final):
    struck = Struck(tmp_path / "ring", 6, 3, layout=layout, autoreset="same_step")
    struck.all(struck.extending(3, env_ids, final=final))
    struck.close()


@pytest.mark.slow
@pytest.mark.parametrize("env_ids", [None, [1]])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.sliced(1)
def test_a_clear_struck_anywhere(path, autoreset, env_ids):
    struck = Struck(path, 6, 2, autoreset=autoreset)
    adding = struck.extending(1, None, final=False)
    ids = [0, 1] if env_ids is None else env_ids

    def act():
        for _ in range(2):
            call, apply = adding()
            call()
            apply(False)

        def apply(_):
            gone = struck.buffer.span.first[ids] == struck.buffer.heads[ids]
            assert gone.all() or not gone.any()
            if gone.all():
                struck.oracle.clear(ids)

        return (lambda: struck.buffer.clear(env_ids)), apply

    struck.all(act)
    struck.close()


@pytest.mark.parametrize("env_ids", [[0], [1, 0]])
def test_a_dequeue_struck_anywhere(path, env_ids):
    struck = Struck(path, 6, 2, autoreset="next_step")
    adding = struck.extending(1, None, final=False)

    def act():
        for _ in range(2):
            call, apply = adding()
            call()
            apply(False)
        before = struck.buffer.span.first.copy()

        def apply(_):
            moved = struck.buffer.span.first - before
            assert set(moved[env_ids].tolist()) in ({0}, {1})
            if moved[env_ids[0]]:
                struck.oracle.dequeue(1, env_ids)

        return (lambda: struck.buffer.dequeue(1, env_ids)), apply

    struck.all(act)
    struck.close()

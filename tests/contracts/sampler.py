"""Views written down, and what mmreplay's own samplers promise beyond the contract.

`mmreplay.testing.check_sampler` is the contract: tests/samplers/test_contract.py.
"""

import numpy as np
import pytest

from mmreplay.episodes.starts import BufferIdentity, StartView
from mmreplay.errors import EmptyError, FormatError
from mmreplay.ring import Ring, Span


class ListedView(StartView):
    """A view whose legal starts are written down.

    Args:
        legal: Per environment the row kinds from the first one alive on, such as
            ``"sxs-"``: s is a legal start, x none, and a last ``-`` is a newest row
            that waits for the one after it.
        firsts: Position of the first row of each environment.
    """

    span = starts = None

    def __init__(self, legal, firsts=None):
        self.rows = legal
        first = np.array([0] * len(legal) if firsts is None else firsts, np.int64)
        lengths = np.array([len(rows) for rows in legal], np.int64)
        waiting = np.array([rows.endswith("-") for rows in legal])
        self.span = Span(first, first + lengths)
        self.starts = Span(first, first + lengths - waiting)
        self.num_illegal = sum(rows.count("x") for rows in legal)
        ring = Ring.sized(int(max(lengths.max(), 1)), len(legal))
        self.home = BufferIdentity(ring, None, bytes(16), 1)

    def legal(self, env_ids, positions):
        assert (positions >= self.starts.first[env_ids]).all()
        assert (positions < self.starts.stop[env_ids]).all()
        offsets = positions - self.span.first[env_ids]
        pairs = zip(env_ids.tolist(), offsets.tolist(), strict=True)
        return np.array([self.rows[e][o] == "s" for e, o in pairs], bool)

    def start_at(self, ranks):
        found = np.array(self.legal_starts(), np.int64)[ranks]
        return found[:, 0], found[:, 1]

    def legal_starts(self):
        """Every legal start as (env_id, position)."""
        return [
            (env_id, int(self.span.first[env_id]) + offset)
            for env_id, rows in enumerate(self.rows)
            for offset, kind in enumerate(rows)
            if kind == "s"
        ]


def steps_of(draw):
    return list(zip(draw.env_ids.tolist(), draw.positions.tolist(), strict=True))


VIEWS = [
    ListedView(["sss"]),
    ListedView(["sss-"], [7]),
    ListedView(["ss-", "", "s", "-"], [5, 0, 2, 9]),
    ListedView(["sxsxs-", "xxs-", "xxx", "", "sssxx"], [1 << 40, 3, 0, 8, 11]),
    ListedView(["x" * 40, "x" * 30 + "s" + "x" * 30 + "s-", "x-"], [0, 9, 4]),
]


class SamplerContract:
    """A draw depends on nothing but the step, and damaged states name the value.

    Subclass it and fill in `make`.
    """

    def make(self, seed=0):
        """A new sampler."""
        raise NotImplementedError

    @pytest.mark.parametrize("view", VIEWS)
    def test_draws_are_the_legal_starts_and_all_of_them(self, view):
        draw = self.make().draw(view, 3000)
        # At most 12 starts: one is missed with a probability below 12 * exp(-250).
        assert set(steps_of(draw)) == set(view.legal_starts())

    @pytest.mark.parametrize("rows", [[""], ["-"], ["x", "xx-", ""]])
    def test_nothing_to_draw_is_an_error_that_says_so(self, rows):
        with pytest.raises(EmptyError, match=r"(is a legal start|begins one).*Add steps first"):
            self.make().draw(ListedView(rows), 4)

    def test_a_draw_is_a_function_of_the_step_and_not_of_what_went_before(self):
        one, other = self.make(), self.make()
        one.draw(VIEWS[0], 1)
        other.draw(VIEWS[4], 500)
        assert steps_of(one.draw(VIEWS[3], 64)) == steps_of(other.draw(VIEWS[3], 64))

    def test_another_samplers_state_is_refused(self):
        state = self.make().state_dict() | {"kind": "OtherSampler"}
        with pytest.raises(FormatError, match=r"sampler state:.*got 'OtherSampler'"):
            self.make().load_state_dict(state)

    @pytest.mark.parametrize("damage", ["seed", "step"])
    @pytest.mark.parametrize("value", [None, "x", -1, 1.5, 1 << 70, [1], True])
    def test_a_damaged_state_is_refused_and_nothing_is_loaded(self, damage, value):
        sampler = self.make(4)
        before = sampler.state_dict()
        state = self.make(8).state_dict()
        if value is None:
            del state[damage]
        else:
            state[damage] = value
        with pytest.raises(FormatError, match=f"sampler state: .*{damage}"):
            sampler.load_state_dict(state)
        assert sampler.state_dict() == before

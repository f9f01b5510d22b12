"""A sampler of a user, whose law is a mass of each legal start, and nothing else."""

import numpy as np

import mmreplay as mr
from mmreplay.samplers.base import Draw, Sampler
from mmreplay.samplers.joint import Mass
from mmreplay.samplers.random import StepGenerator
from mmreplay.samplers.states import check_kind, stored_integer


class ThirdsSampler(Sampler):
    """Draws steps at positions that 3 divides `heavy` times as often as the others."""

    def __init__(self, seed=None, *, heavy=5.0):
        self._random = StepGenerator(seed)
        self.heavy = heavy

    def masses(self, view):
        """Legal starts, and their masses."""
        count = int(view.starts.lengths.sum()) - view.num_illegal
        env_ids, positions = view.start_at(np.arange(count))
        return env_ids, positions, np.where(positions % 3, 1.0, self.heavy)

    def mass(self, view, step):
        masses = self.masses(view)[2]
        return Mass(float(masses.sum()), len(masses), float(masses.min(initial=np.inf)), 0.0)

    def draw_at(self, view, shares):
        env_ids, positions, masses = self.masses(view)
        if not len(masses):
            raise mr.EmptyError("There is no legal start. Add steps first.")
        sums = np.cumsum(masses)
        which = np.minimum(np.searchsorted(sums, shares * sums[-1], "right"), len(sums) - 1)
        ones = np.ones(len(shares), np.float32)
        return Draw(env_ids[which], positions[which], masses[which] / sums[-1], ones)

    def state_dict(self):
        return {"kind": "ThirdsSampler", "seed": self._random.seed, "step": self._step}

    def load_state_dict(self, state):
        check_kind(state, "ThirdsSampler")
        seed, step = stored_integer(state, "seed"), stored_integer(state, "step")
        self._random, self._step = StepGenerator(seed), step

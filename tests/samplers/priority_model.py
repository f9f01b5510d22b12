"""Priorities as a dict, beside a sampler: the rules alone, with no thought of speed."""

import math

import numpy as np


class PriorityModel:
    """What a prioritized sampler must know after the same calls.

    Args:
        oracle: The buffer's own, which knows rows alive and legal starts.
        initial: The least priority that a new row enters at.
    """

    def __init__(self, oracle, initial=1.0):
        self.oracle = oracle
        self.initial = np.float32(initial)
        self.known = {}
        self.seen = [0] * len(oracle.envs)

    def look(self):
        """The sampler looks at the buffer, and keeps to what it finds."""
        alive = self.oracle.alive()
        self.known = {p: v for p, v in self.known.items() if p in set(alive)}
        entry = max([self.initial, *self.known.values()])
        for env_id, position in alive:
            if position >= self.seen[env_id]:
                self.known[env_id, position] = entry
        self.seen = [len(stream.rows) for stream in self.oracle.envs]

    def update(self, pairs, values):
        """Returns how many were dropped."""
        self.look()
        dropped = 0
        for place, value in zip(pairs, values, strict=True):
            if place in self.known:
                self.known[place] = np.float32(value)
            else:
                dropped += 1
        return dropped

    def probabilities(self, alpha, eps):
        """Probability by legal start."""
        self.look()
        legal = self.oracle.legal()
        masses = {p: mass(float(self.known[p]) + eps, alpha) for p in legal}
        total = sum(masses.values())
        return {p: m / total for p, m in masses.items()} if total else {}


def mass(number, alpha):
    """A power of 24 significant bits."""
    fraction, exponent = math.frexp(number**alpha)
    return math.ldexp(math.floor(fraction * 2**24 + 0.5), exponent - 24)


def known_to(sampler):
    """Every priority that the sampler's column holds, by place."""
    rows = sampler.priorities
    ring, span = rows.column.ring, rows.span
    found = {}
    for env_id in range(ring.num_envs):
        for position in range(int(span.first[env_id]), int(span.stop[env_id])):
            value = rows.column.values[ring.row(env_id, position)]
            found[env_id, position] = np.float32(value)
    return found


def check(sampler, view, model, alpha, eps):
    """The sampler knows what the model knows, and draws by the model's law."""
    probabilities = model.probabilities(alpha, eps)
    sampler.priorities.follow(view)
    assert known_to(sampler) == model.known
    rows = sampler.priorities
    leaves = rows.distribution._tree.leaves
    ring = rows.column.ring
    open_ = np.flatnonzero(leaves)
    places = zip(*(a.tolist() for a in rows.steps_of(open_)), strict=True)
    found = dict(zip(places, (leaves[open_] / rows.distribution.total).tolist(), strict=True))
    assert set(found) == {p for p, probability in probabilities.items() if probability}
    for place, probability in found.items():
        # Sums of some hundred numbers in another order.
        assert abs(probability - probabilities[place]) <= 1e-12 + 1e-9 * probabilities[place]
    assert rows.num_legal == len(probabilities)
    # Nothing is left of rows that are not alive.
    alive = {ring.row(*place) for place in model.known}
    dead = np.setdiff1d(np.arange(ring.num_rows), sorted(alive))
    assert not rows.column.values[dead].any()
    assert rows.highest() == max(model.known.values(), default=0)
    if probabilities:
        least = min((m for m in leaves.tolist() if m), default=np.inf)
        assert rows.distribution.lowest() == least

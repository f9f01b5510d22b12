"""A ring of dicts in lists that does what alf's documents say, row by row."""

from tests.adapters.alf.support import FIRST, LAST


class Twin:
    """Rows of each environment as dicts, oldest first, found by searching."""

    def __init__(self, num_envs, length, ignored, default, gamma):
        self.length, self.ignored = length, ignored
        self.default, self.gamma = default, gamma
        self.rings = [[] for _ in range(num_envs)]
        self.heads = [0] * num_envs
        # The row added last, also when it was taken out; None where an episode begins
        # whatever the type.
        self.newest = [None] * num_envs

    def add(self, env_id, step_type, discount, reward):
        ring, position = self.rings[env_id], self.heads[env_id]
        before = self.newest[env_id]
        begins = step_type == FIRST or before is None
        ring.append(
            {
                "position": position,
                "step_type": step_type,
                "discount": discount,
                "reward": reward,
                "begin": position if begins else before["begin"],
                "zero": position if begins or discount == 0 else before["zero"],
                "return": self.default,
            }
        )
        self.rings[env_id] = ring[-self.length :]
        self.heads[env_id] += 1
        self.newest[env_id] = ring[-1]
        if discount == 0 and not begins:
            self._settle(self.rings[env_id], before["zero"])

    def _settle(self, ring, since):
        """Sum the rewards up to the newest row, from the row before which all is known.

        G[t] = d[t] r[t+1] + gamma d[t] d[t+1] r[t+2] + ..., written out.
        """
        for place, row in enumerate(ring[:-1]):
            if row["position"] >= since:
                row["return"], weight = 0.0, 1.0
                for here, after in zip(ring[place:], ring[place + 1 :], strict=False):
                    weight *= here["discount"]
                    row["return"] += weight * after["reward"]
                    weight *= self.gamma

    def clear(self, env_id):
        self.rings[env_id], self.newest[env_id] = [], None

    def remove(self, env_id, count):
        self.rings[env_id] = self.rings[env_id][count:]

    def break_off(self):
        for env_id, ring in enumerate(self.rings):
            if ring:
                ring[-1]["step_type"] = LAST
            self.newest[env_id] = None

    def left(self, env_id, row):
        """Rows after this one that are of its episode."""
        return sum(
            other["begin"] == row["begin"] and other["position"] > row["position"]
            for other in self.rings[env_id]
        )

    def starts(self, length):
        """Every window's environment and first position."""
        return {
            (env_id, row["position"])
            for env_id, ring in enumerate(self.rings)
            for row in ring[self.ignored : len(ring) - length + 1]
        }

"""A buffer as a list of dicts: the rules of experience, with no thought of speed.

Written from the rules alone, without a look at how mmreplay keeps flags or rows. A
row knows its episode, and a step may be drawn when what it needs of the row after
it is there.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Row:
    """One row: its values, and which episode it belongs to."""

    values: dict
    episode: int
    final: bool = False
    cut_flag: bool = False

    def ended(self):
        return not self.final and (self.values["terminated"] or self.values["truncated"])


@dataclass
class Stream:
    """Everything one environment ever sent; positions index `rows`."""

    rows: list = field(default_factory=list)
    tail: int = 0
    apart: bool = True  # the next row starts an episode, whatever stands before it
    lost: bool = True  # and nothing is known of what stands before it
    truncates: bool = False  # and the step before it is then reported as truncated

    def first(self, capacity):
        return max(self.tail, len(self.rows) - capacity)


class Oracle:
    """What a buffer must hold and may draw after the same calls."""

    def __init__(self, capacity, num_envs, autoreset, stored=False):
        self.capacity = capacity
        self.next_step = autoreset == "next_step"
        self.stored = stored
        self.envs = [Stream() for _ in range(num_envs)]

    def add(self, steps, finals=None):
        """Take one step (a dict of values) of some environments.

        Args:
            steps: Values by environment.
            finals: Final observation by environment, read where the step ends.
        """
        for env_id, values in steps.items():
            stream = self.envs[env_id]
            last = None if stream.lost or not stream.rows else stream.rows[-1]
            final = self.next_step and last is not None and last.ended()
            fresh = stream.apart or last is None or last.final
            if not self.next_step:
                fresh = fresh or last.ended()
            episode = stream.rows[-1].episode + fresh if stream.rows else 0
            if stream.truncates:
                stream.rows[-1].cut_flag = True
            stream.rows.append(Row(dict(values), episode, final))
            stream.apart = stream.lost = stream.truncates = False
            if finals is not None and stream.rows[-1].ended():
                values = dict(values, observation=finals[env_id])
                stream.rows.append(Row(values, episode, True))

    def extend(self, steps, finals=None):
        """Take many; of more than the capacity the last ones stay."""
        for index, step in enumerate(steps):
            self.add(step, None if finals is None else finals[index])

    def clear(self, env_ids):
        """Give up every row; the environments themselves go on."""
        for stream in (self.envs[e] for e in env_ids):
            stream.tail = len(stream.rows)
            stream.apart = True

    def dequeue(self, count, env_ids):
        """Give up the oldest rows of each and return their positions."""
        taken = []
        for env_id in env_ids:
            first = self.envs[env_id].first(self.capacity)
            taken += [(env_id, first + i) for i in range(count)]
            self.envs[env_id].tail = first + count
        return taken

    def resume(self, how):
        """Open again for writing."""
        for stream in self.envs:
            alive = stream.first(self.capacity) < len(stream.rows)
            stream.lost = how != "continue"
            stream.apart = stream.lost or not alive
            # An episode that is over cannot be cut short any more.
            last = stream.rows[-1] if alive else None
            running = last is not None and not last.final and not last.ended()
            stream.truncates = how == "truncate" and running

    def resize(self, capacity):
        """Keep the newest rows that fit."""
        for stream in self.envs:
            stream.tail = max(stream.first(self.capacity), len(stream.rows) - capacity)
        self.capacity = capacity

    def alive(self):
        """(env_id, position) of every row, oldest first, by environment."""
        return [
            (env_id, position)
            for env_id, stream in enumerate(self.envs)
            for position in range(stream.first(self.capacity), len(stream.rows))
        ]

    def steps(self):
        """Those of them that are steps."""
        return [(e, p) for e, p in self.alive() if not self.envs[e].rows[p].final]

    def row(self, env_id, position):
        """Stored values of a row; the ends of a final row mean nothing, and are 0."""
        stream = self.envs[env_id]
        row = stream.rows[position]
        values = dict(row.values)
        if row.final:
            values.update(terminated=False, truncated=False)
        values["truncated"] |= row.cut_flag
        return values

    def transition(self, env_id, position):
        """What drawing the step gives, or None where it may not be drawn."""
        stream = self.envs[env_id]
        row = stream.rows[position]
        if row.final:
            return None
        found = self.row(env_id, position)
        if self.stored:
            return found
        rest = stream.rows[position + 1 :]
        after = rest[0] if rest else None
        if after is not None and after.episode == row.episode:
            found["next_observation"] = after.values["observation"]
        elif row.values["terminated"] and (after is not None or not self.next_step):
            found["next_observation"] = row.values["observation"]
        else:
            return None
        return found

    def legal(self):
        """Transition by (env_id, position), of every legal start."""
        found = {place: self.transition(*place) for place in self.alive()}
        return {place: values for place, values in found.items() if values is not None}

    def over(self, env_id, position):
        """Whether the episode of a step has ended, and nothing more can come of it."""
        rows = self.envs[env_id].rows
        if rows[-1].episode != rows[position].episode:
            return True
        return rows[-1].final or (rows[-1].ended() and not self.next_step)

    def window_steps(self, legal=None, before=0):
        """(env_id, position) of the steps of windows and whole episodes, in order.

        Args:
            legal: Legal starts, if not those of single steps.
            before: Rows before a step that have to be there, up to its episode's first.
        """
        found = set(self.legal() if legal is None else legal)
        for env_id, position in [] if self.stored else self.steps():
            stream = self.envs[env_id]
            first, episode = stream.first(self.capacity), stream.rows[position].episode
            begun = position - before >= first or any(
                stream.rows[p - 1].episode != episode if p else True
                for p in range(first, position + 1)
            )
            if begun and self.over(env_id, position):
                found.add((env_id, position))
        return sorted(found)


def columns(values):
    """List of dicts as arrays by name."""
    return {name: np.array([v[name] for v in values]) for name in values[0]}

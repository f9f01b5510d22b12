"""A plain-Python twin of a buffer: per environment a list of dicts of steps.

It imports nothing of mmreplay (`test_cases.py` checks this), knows the laws of
experience alone, and answers each question by looking at every row. So it may judge all
that a buffer is asked. `tests/buffer/oracle.py` has the laws of rows and legal starts
for the state machines of `tests/buffer` and `tests/model`; this one has them for any
fields, agents and histories, and those of windows and episodes as well.
"""

from dataclasses import dataclass, field, replace

NOT_KNOWN = None


@dataclass
class Row:
    """One row of one environment.

    Attributes:
        values: By path of the field.
        episode: Number of its episode; rows of one episode follow each other.
        terminated: The environment ended with this step, for all agents.
        truncated: The episode was broken off after it, for some agent.
        final: It is no step, and holds the observation after an episode's last one.
        broken: It begins an episode only because somebody said so, such as a resume.
    """

    values: dict
    episode: int
    terminated: bool = False
    truncated: bool = False
    final: bool = False
    broken: bool = False

    @property
    def ended(self):
        return not self.final and (self.terminated or self.truncated)


@dataclass
class Environment:
    """All rows that one environment ever sent; positions are their indices.

    Attributes:
        first: Position of the oldest row alive.
        fresh: The next row begins an episode, whatever is before it.
        reset_due: The next row is the environment's own final row.
        truncates: The next row says that the step before it was truncated.
    """

    rows: list = field(default_factory=list)
    first: int = 0
    fresh: bool = True
    reset_due: bool = False
    truncates: bool = False
    breaks: bool = False


class Twin:
    """What a buffer holds after the same calls, and all that may be asked of it.

    Args:
        capacity: Rows that each environment keeps.
        num_envs: Environments.
        next_step: Whether the row after an end is the environment's final row.
        observations: Paths of the fields of the observation.
        next_observation: ``"stored"``, ``"derived"`` or ``"absent"``.
        agents: Agents that end apart, or None.
        varying: Paths of the fields whose values are of any length.
    """

    def __init__(
        self, capacity, num_envs, *, next_step, observations, next_observation, agents, varying=()
    ):
        self.capacity = capacity
        self.next_step = next_step
        self.observations = observations
        self.next_observation = next_observation
        self.agents = agents
        self.varying = varying
        self.envs = [Environment() for _ in range(num_envs)]

    # Changes.

    def add(self, env_id, values, final=None):
        """Take one step of an environment.

        Args:
            env_id: Which.
            values: By path.
            final: The observation after it, by path; read where the step ends.
        """
        env = self.envs[env_id]
        last = env.rows[-1] if env.rows else None
        if env.truncates and last is not None:
            last.truncated = True
        is_final = env.reset_due
        begins = env.fresh or last is None or last.final
        if not self.next_step and last is not None:
            begins = begins or last.ended
        begins = begins and not is_final
        episode = (0 if last is None else last.episode) + begins
        terminated, truncated = self._ends(values)
        row = Row(dict(values), episode, terminated, truncated)
        if is_final:
            row.terminated = row.truncated = False
            row.final = True
        row.broken = begins and env.breaks
        env.rows.append(row)
        env.fresh = env.truncates = env.breaks = False
        env.reset_due = self.next_step and row.ended
        if final is not None and row.ended:
            env.rows.append(Row(dict(final), episode, final=True))
        self._overwrite(env)

    def _ends(self, values):
        terminated, truncated = values["terminated"], values["truncated"]
        if self.agents is None:
            return bool(terminated), bool(truncated)
        pairs = list(zip(terminated, truncated, strict=True))
        over = all(a or b for a, b in pairs)
        return over and all(terminated), over and any(truncated)

    def _overwrite(self, env):
        env.first = max(env.first, len(env.rows) - self.capacity)

    def clear(self, env_id):
        """Give up all rows of an environment."""
        env = self.envs[env_id]
        env.first = len(env.rows)
        env.truncates = False if env.reset_due else env.truncates
        if not env.reset_due:
            env.fresh = True
            env.breaks = bool(env.rows)

    def dequeue(self, env_id, count):
        """Give up the oldest rows of an environment."""
        self.envs[env_id].first += count

    def lose(self, env_id, first, stop):
        """Lose rows: those before move up, and what follows begins an episode.

        Args:
            env_id: The environment.
            first: Position of the oldest row, or of a step that its episode goes
                before.
            stop: One after the last; a step of the same episode.
        """
        env = self.envs[env_id]
        oldest, env.first = env.first, env.first + stop - first
        if first == oldest:
            return
        lost = env.rows[first:stop]
        # Positions stay as they were; no row is of the episode of a lost one.
        env.rows[first:stop] = []
        env.rows[:0] = [replace(row, episode=-1) for row in lost]
        for row in env.rows[stop:]:
            row.episode += 1
        env.rows[stop].broken = True

    def end_episodes(self, env_id, *, discard):
        """Truncate, or break off, the running episode once its next row comes."""
        self._resume(self.envs[env_id], "break" if discard else "truncate")

    def reopen(self, on_resume):
        """Open again for writing."""
        for env in self.envs:
            # What was to be said with the next row is forgotten with the writer.
            env.truncates = False
            alive = env.first < len(env.rows)
            if on_resume == "continue":
                last = env.rows[-1] if env.rows else None
                due = self.next_step and last is not None and last.ended
                env.reset_due = due
                env.fresh = env.breaks = not alive and bool(env.rows) and not due
            else:
                self._resume(env, on_resume)

    def _resume(self, env, how):
        alive = env.first < len(env.rows)
        last = env.rows[-1] if alive else None
        running = last is not None and not last.final and not last.ended
        env.truncates = how == "truncate" and running
        env.fresh, env.reset_due = True, False
        env.breaks = bool(env.rows)

    def resize(self, capacity):
        """Keep the newest rows that fit."""
        self.capacity = capacity
        for env in self.envs:
            self._overwrite(env)

    def add_field(self, path, fill):
        """Give each row another value."""
        for env in self.envs:
            for row in env.rows:
                if "terminated" in row.values:
                    row.values[path] = fill

    # Rows and steps.

    def alive(self):
        """(env_id, position) of every row, oldest first, by environment."""
        return [
            (env_id, position)
            for env_id, env in enumerate(self.envs)
            for position in range(env.first, len(env.rows))
        ]

    def row(self, index):
        """The row at (env_id, position)."""
        env_id, position = index
        return self.envs[env_id].rows[position]

    def stored(self, index):
        """Values of a row as they are read.

        A final row has no ends, though agents keep the values that came with it. One
        that was made of a final observation has nothing else that means anything.
        """
        row = self.row(index)
        values = dict(row.values)
        if row.final:
            # Nor does it have values of any length but of the observation.
            values = {
                path: value
                for path, value in values.items()
                if path in self.observations or path not in self.varying
            }
        if row.final and self.agents is None and "terminated" in values:
            values.update(terminated=False, truncated=False)
        elif not row.final and row.truncated and not self._ends(values)[1]:
            values["truncated"] = self._drop(values)
        return values

    def _drop(self, values):
        if self.agents is None:
            return True
        # Whoever terminated is over: the others are truncated.
        return [not ended for ended in values["terminated"]]

    def steps(self):
        """(env_id, position) of every row that is a step."""
        return [index for index in self.alive() if not self.row(index).final]

    def after(self, index):
        """The next row of the same episode, or None."""
        env_id, position = index
        rows = self.envs[env_id].rows
        if position + 1 == len(rows):
            return None
        following = rows[position + 1]
        return following if following.episode == rows[position].episode else None

    def next_of(self, index):
        """The next observation of a step, by path, or None where it is not known."""
        row = self.row(index)
        if self.next_observation == "absent":
            return {}
        if self.next_observation == "stored":
            return {p: row.values[f"next_{p}"] for p in self.observations}
        following = self.after(index)
        if following is None:
            env_id, position = index
            waits = self.next_step and position + 1 == len(self.envs[env_id].rows)
            if not row.terminated or waits:
                return NOT_KNOWN
            following = row
        return {path: following.values[path] for path in self.observations}

    # Episodes.

    def episodes(self):
        """Indices of each episode's steps, by environment, oldest first."""
        found = {}
        for index in self.steps():
            found.setdefault((index[0], self.row(index).episode), []).append(index)
        return list(found.values())

    def episode_of(self, index):
        """The episode that a step is in."""
        return next(steps for steps in self.episodes() if index in steps)

    def headless(self, steps):
        """Whether the first steps of an episode are gone."""
        env_id, position = steps[0]
        rows = self.envs[env_id].rows
        return position > 0 and rows[position - 1].episode == rows[position].episode

    def running(self, steps):
        """Whether more of an episode may come, as far as its rows say."""
        env = self.envs[steps[-1][0]]
        last = self.row(steps[-1])
        if env.rows[-1].episode != last.episode or env.rows[-1].final:
            return False
        return not last.ended

    def waits(self, steps):
        """Whether the newest step's next observation is still to come."""
        env_id, position = steps[-1]
        last = position + 1 == len(self.envs[env_id].rows)
        if not last:
            return False
        final_comes = self.next_step and self.next_observation == "derived"
        return final_comes or not self.row(steps[-1]).ended

    def broken(self, steps):
        """Whether an episode was broken off without a step that says so."""
        if self.running(steps):
            return False
        env_id, position = steps[-1]
        rows = self.envs[env_id].rows
        if rows[position].ended or position + 1 == len(rows):
            return False
        return rows[position + 1].broken

    def total(self, steps):
        """Sum of an episode's rewards."""
        return sum(float(self.row(index).values["reward"]) for index in steps)

    # Draws.

    def legal(self, *, n=1, k=1, without_next=False):
        """Places that may be drawn, in the order of their ranks.

        Args:
            n: Rows that a transform folds from each step on.
            k: Rows that a transform reads up to each step, its own included.
            without_next: Whether next observations are left out.
        """
        return [
            index
            for index in self.steps()
            if self._begun(index, k) and self._num_folded(index, n, without_next)
        ]

    def _begun(self, index, k):
        steps = self.episode_of(index)
        return not self.headless(steps) or steps.index(index) >= k - 1

    def _num_folded(self, index, n, without_next):
        last = self.last_of(index, n)
        if last is None:
            return False
        return without_next or self.next_of(last) is not NOT_KNOWN

    def last_of(self, index, n):
        """The last step that an n-step transition sums; None where it is not there."""
        steps = self.episode_of(index)
        rest = steps[steps.index(index) :]
        if len(rest) >= n:
            return rest[n - 1]
        last = self.row(rest[-1])
        if last.ended:
            return rest[-1]
        if self.next_observation == "derived" and self.next_of(rest[-1]) is not None:
            return rest[-1]
        return None

    def n_step(self, index, n, gamma):
        """Reward, discount by agent, last step of an n-step transition."""
        steps = self.episode_of(index)
        first, last = steps.index(index), steps.index(self.last_of(index, n))
        rewards = [float(self.row(s).values["reward"]) for s in steps[first : last + 1]]
        reward = sum(gamma**i * r for i, r in enumerate(rewards))
        ended = self.stored(steps[last])["terminated"]
        power = gamma ** len(rewards)
        if self.agents is None:
            return reward, power * (not ended), steps[last]
        return reward, [power * (not each) for each in ended], steps[last]

    def stack(self, index, k, path):
        """The last k values of an observation, the episode's first one repeated."""
        steps = self.episode_of(index)
        at = steps.index(index)
        chosen = [steps[max(0, at - back)] for back in range(k - 1, -1, -1)]
        return [self.row(each).values[path] for each in chosen]

    def next_stack(self, index, k, path, n=1):
        """The same of the observation after the n-step transition's last step."""
        last = self.last_of(index, n)
        steps = self.episode_of(index)
        frames = [self.row(each).values[path] for each in steps[: steps.index(last) + 1]]
        known = self.after(last) is not None or self.next_observation == "stored"
        if known:
            frames.append(self.next_of(last)[path])
        at = len(frames) - 1
        return [frames[max(0, at - back)] for back in range(k - 1, -1, -1)]

    def history(self, index, k, path):
        """The k values before a step in its episode; None where there was none."""
        steps = self.episode_of(index)
        at = steps.index(index)
        return [
            self.row(steps[at - back]).values[path] if at >= back else None
            for back in range(k, 0, -1)
        ]

    def discounted_return(self, index, gamma):
        """The return to the episode's end; None where it is not known."""
        steps = self.episode_of(index)
        last = self.row(steps[-1])
        if not last.terminated:
            return None
        rest = steps[steps.index(index) :]
        rewards = [float(self.row(each).values["reward"]) for each in rest]
        return sum(gamma**i * reward for i, reward in enumerate(rewards))

    # Windows and whole episodes.

    def window_steps(self, *, without_next=False):
        """Places of the steps of windows: legal starts, and all of ended episodes."""
        found = set(self.legal(without_next=without_next))
        for steps in self.episodes():
            if not self.waits(steps):
                found.update(steps)
        return sorted(found)

    def windows(self, length, boundary, *, burn_in=0, stride=1, bootstrap=0, without_next=False):
        """Places, mask and `is_first` of every window, by the step drawn."""
        every = self.window_steps(without_next=without_next)
        legal, found = set(self.legal(without_next=without_next)), {}
        for start in every:
            episode = self.row(start).episode
            mine = [p for p in every if p[0] == start[0]]
            here = [p for p in mine if self.row(p).episode == episode]
            steps = mine if boundary == "any" else here
            at = steps.index(start)
            columns = range(at - burn_in, at + length + bootstrap)
            inside = [0 <= column < len(steps) for column in columns]
            if boundary != "pad" and not all(inside):
                continue
            indices = [steps[min(max(c, 0), len(steps) - 1)] for c in columns]
            first = indices[0] if boundary == "episode" else start
            if start[1] % stride and not self.begins(first):
                continue
            pairs = list(zip(inside, indices, strict=True))
            mask = [there and index in legal for there, index in pairs]
            is_first = [there and self.begins(index) for there, index in pairs]
            found[start] = (indices, mask, is_first)
        return found

    def begins(self, index):
        env_id, position = index
        rows = self.envs[env_id].rows
        return position == 0 or rows[position - 1].episode != rows[position].episode

    def whole_episodes(self, *, without_next=False, running=False, headless=False):
        """Places and mask of the episodes that an EpisodeSampler draws."""
        every = set(self.window_steps(without_next=without_next))
        legal = set(self.legal(without_next=without_next))
        found = []
        for steps in self.episodes():
            if self.headless(steps) and not headless:
                continue
            if self.waits(steps) and not running:
                continue
            held = [index for index in steps if index in every]
            if held:
                found.append((held, [index in legal for index in held]))
        return found

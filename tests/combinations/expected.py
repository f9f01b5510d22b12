"""What a batch holds after transforms, computed from the plain twin, step by step.

Like `twin`, it imports nothing of mmreplay. Values are plain numbers, and arrays where
a field is one. An `Expected` is what a list of transforms makes; each of its methods
has the law of one transform.
"""

from dataclasses import dataclass, field

import numpy as np

GAMMA = LAM = 0.5


@dataclass
class Expected:
    """What is known of a step after some transforms.

    Attributes:
        twin: The rows.
        n: Rewards that a transition sums.
        k: Rows up to a step that are read, its own included.
        without_next: Next observations are left out.
        at_row: Changes of the fields of each row, in order: functions of the index and
            the fields made so far.
        at_next: The same of the next observation, by path of the observation.
        at_step: Changes of what a batch holds: functions of the index, the last step
            that is folded, and the fields.
        keeping: Whether a step keeps its goal, and with it all of its group.
        keeps_goal: Whether the step that is looked at does.
    """

    twin: object
    n: int | None = None
    k: int = 1
    without_next: bool = False
    at_row: list = field(default_factory=list)
    at_next: list = field(default_factory=list)
    at_step: list = field(default_factory=list)
    keeping: list = field(default_factory=list)
    keeps_goal: bool = False

    def legal(self):
        """Places that may be drawn."""
        return self.twin.legal(n=self.n or 1, k=self.k, without_next=self.without_next)

    # A step.

    def row(self, index, upto=None):
        """Fields of a row, by path."""
        values = dict(self.twin.stored(index))
        for change in self.at_row[:upto]:
            values = change(index, values)
        return values

    def next_of(self, index, upto=None):
        """The next observation of a step, by path of the observation; or None."""
        values = self.twin.next_of(index)
        if values is None:
            return None
        for change in self.at_next[:upto]:
            values = change(index, dict(values))
        return values

    def step(self, index, group=None):
        """What a batch holds of a step, by path.

        Args:
            index: The step.
            group: The steps of its window that are of its episode.
        """
        twin = self.twin
        self.keeps_goal = any(keeps(each) for keeps in self.keeping for each in group or [index])
        last = index if self.n is None else twin.last_of(index, self.n)
        values = self.row(index)
        for path in ("terminated", "truncated"):
            values[path] = self.row(last)[path]
        values = {p: v for p, v in values.items() if not p.startswith("next_")}
        if not self.without_next:
            values |= {f"next_{p}": v for p, v in self.next_of(last).items()}
        for change in self.at_step:
            values = change(index, last, values)
        return values

    # Transforms.

    def elementwise(self, paths, change):
        """Change values of fields, and of the next ones of them."""

        def of_row(index, values):
            return {p: change(v) if p in paths else v for p, v in values.items()}

        def of_step(index, last, values):
            made = {p: change(values[p]) for p in paths if p in values}
            return values | made

        if self.n is not None and "reward" in paths:
            # Sums are changed, not what is summed.
            assert paths == ("reward",)
            self.at_step.append(of_step)
            return
        self.at_row.append(of_row)
        self.at_next.append(of_row)

    def stack(self, k):
        """Stack observations."""
        twin, paths = self.twin, self.twin.observations
        self.k = max(self.k, k)
        upto, upto_next = len(self.at_row), len(self.at_next)

        def frames(indices):
            return {path: [self.row(each, upto)[path] for each in indices] for path in paths}

        def of_row(index, values):
            steps = twin.episode_of(index)
            at = steps.index(index)
            chosen = [steps[max(0, at - back)] for back in range(k - 1, -1, -1)]
            return values | {p: stacked(v) for p, v in frames(chosen).items()}

        def of_next(index, values):
            steps = twin.episode_of(index)
            found = frames(steps[: steps.index(index) + 1])
            stored = twin.next_observation == "stored"
            if stored or twin.after(index) is not None:
                following = self.next_of(index, upto_next)
                found = {p: [*v, following[p]] for p, v in found.items()}
            last = {p: len(v) - 1 for p, v in found.items()}
            return values | {
                p: stacked([v[max(0, last[p] - back)] for back in range(k - 1, -1, -1)])
                for p, v in found.items()
            }

        self.at_row.append(of_row)
        self.at_next.append(of_next)

    def history(self, k, path="action"):
        """Add the actions before each step."""
        twin = self.twin
        self.k = max(self.k, k + 1)
        upto = len(self.at_row)

        def before(steps, at):
            filled = np.zeros_like(self.row(steps[0], upto)[path])
            return np.stack(
                [
                    self.row(steps[at - back], upto)[path] if at >= back else filled
                    for back in range(k, 0, -1)
                ]
            )

        def of_row(index, values):
            steps = twin.episode_of(index)
            return values | {"action_history": before(steps, steps.index(index))}

        def of_step(index, last, values):
            if self.without_next or twin.next_observation == "absent":
                return values
            steps = twin.episode_of(last)
            made = before(steps, steps.index(last) + 1)
            return values | {"next_action_history": made}

        self.at_row.append(of_row)
        self.at_step.append(of_step)

    def summed(self, n):
        """Sum n rewards."""
        self.n = n
        upto = len(self.at_row)

        def of_step(index, last, values):
            steps = self.twin.episode_of(index)
            some = steps[steps.index(index) : steps.index(last) + 1]
            rewards = [float(self.row(each, upto)["reward"]) for each in some]
            ended = np.asarray(self.twin.stored(last)["terminated"])
            total = sum(GAMMA**i * reward for i, reward in enumerate(rewards))
            discount = GAMMA ** len(some) * (1.0 - ended)
            return values | {"reward": total, "discount": discount}

        self.at_step.append(of_step)

    def returns(self, time_limit, critic):
        """Add the discounted return."""
        twin = self.twin

        def of_row(index, values):
            steps = twin.episode_of(index)
            last = twin.row(steps[-1])
            tail = 0.0 if last.terminated else None
            if last.truncated and not last.terminated:
                if time_limit == "none":
                    tail = 0.0
                following = twin.next_of(steps[-1])
                if time_limit == "bootstrap" and following is not None:
                    tail = critic(following)
            if tail is None:
                return values | {"discounted_return": np.nan}
            total = tail
            for each in reversed(steps[steps.index(index) :]):
                total = float(twin.stored(each)["reward"]) + GAMMA * total
            return values | {"discounted_return": total}

        self.at_row.append(of_row)

    def estimates(self, names, value, bootstrap, critic, horizon=None):
        """Add lambda returns, and advantages.

        Args:
            names: Of the returns and of the advantages; None for none.
            value: Path of the values, or None for the critic's.
            bootstrap: Path of the next values of last steps, or None.
            critic: A function of an observation by path.
            horizon: Steps of each return at most.
        """
        twin = self.twin
        upto, upto_next = len(self.at_row), len(self.at_next)

        def of(index):
            return critic(self.row(index, upto)) if value is None else self.at(index, value)

        def next_value(steps, at):
            if at + 1 < len(steps):
                return of(steps[at + 1])
            last = steps[at]
            if twin.row(last).terminated:
                return 0.0
            if bootstrap is not None:
                return self.at(last, bootstrap)
            if value is None:
                # Of a newest step the next observation is not stored yet.
                following = self.next_of(last, upto_next)
                return None if following is None else critic(following)
            after = twin.after(last)
            if after is None or not twin.next_step:
                return None
            return float(after.values[value])

        def of_row(index, values):
            steps = twin.episode_of(index)
            first, stop = steps.index(index), len(steps)
            stop -= next_value(steps, stop - 1) is None
            total = np.nan
            if horizon is not None:
                stop = min(stop, first + horizon)
            for at in reversed(range(first, stop)):
                reward = float(twin.stored(steps[at])["reward"])
                following = next_value(steps, at)
                ended = at + 1 == len(steps) and twin.row(steps[at]).terminated
                if ended:
                    total = reward
                elif at + 1 == stop:
                    total = reward + GAMMA * following
                else:
                    total = reward + GAMMA * ((1 - LAM) * following + LAM * total)
            made, advantage = names
            found = {made: total} if made else {}
            if advantage:
                found[advantage] = total - of(index)
            return values | found

        self.at_row.append(of_row)

    def at(self, index, path):
        """A stored number of a step."""
        return float(self.twin.stored(index)[path])

    def differences(self, paths):
        """Add what each step changed."""
        upto, upto_next = len(self.at_row), len(self.at_next)

        def of_step(index, last, values):
            here, then = self.row(index, upto), self.next_of(last, upto_next)
            made = {
                f"delta{path.removeprefix('observation')}": (
                    as_numbers(then[path]) - as_numbers(here[path])
                )
                for path in paths
            }
            return values | made

        self.at_step.append(of_step)

    def leave_next_out(self):
        """Leave next observations out."""
        self.without_next = True

    def hindsight(self):
        """Have each step keep the goal that its episode achieved last."""
        twin = self.twin
        achieved, desired = "observation/achieved_goal", "observation/desired_goal"

        def after(index):
            # A terminated step without a final observation achieved nothing known.
            if twin.next_observation == "derived" and twin.after(index) is None:
                return None
            return twin.next_of(index)[achieved]

        def goal(index):
            return [g for g in map(after, twin.episode_of(index)) if g is not None][-1]

        def keeps(index):
            last = index if self.n is None else twin.last_of(index, self.n)
            return after(last) is None

        def of_row(index, values):
            if self.keeps_goal or after(index) is None:
                return values
            wanted = goal(index)
            reward = reward_of(after(index), wanted)
            return values | {desired: wanted, "reward": reward}

        def of_next(index, values):
            return values if self.keeps_goal else values | {desired: goal(index)}

        self.keeping.append(keeps)
        self.at_row.append(of_row)
        self.at_next.append(of_next)


def reward_of(achieved, desired):
    """A reward of goals, as HER asks for it."""
    difference = np.asarray(achieved, np.float64) - np.asarray(desired, np.float64)
    return -np.abs(difference).max(-1)


def as_numbers(value):
    """A value as float64; 16 bits without a sign are those of a bfloat16."""
    array = np.asarray(value)
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def stacked(values):
    """Frames as one value; of values that vary a list."""
    if isinstance(values[0], str | bytes) or any(
        np.shape(value) != np.shape(values[0]) for value in values
    ):
        return values
    return np.stack(values)

"""A buffer and the oracle's episodes, fed alike with steps that no two share."""

import numpy as np

import mmreplay as mr
from mmreplay.samplers.base import Draw, Windows
from tests.transforms.oracle import Episode

GOAL = mr.Field((2,), "float64")
OBSERVATION = {"frame": mr.Field((2,), "int64"), "achieved_goal": GOAL, "desired_goal": GOAL}
FIELDS = {
    "observation": OBSERVATION,
    "action": mr.Field((), "int32"),
    "reward": mr.Field((), "float32"),
    "life": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


def distance(achieved, desired, info):
    """What `compute_reward` of a goal environment is like."""
    return -np.abs(achieved - desired).sum(-1)


def observation(number):
    return {
        "frame": [number, -number],
        "achieved_goal": [number, number / 2],
        "desired_goal": [-1000.0 - number, 0.25],
    }


class Scripted:
    """A sampler that draws what it is told."""

    def __init__(self):
        self.next = None

    def draw(self, view, batch_size):
        assert view.legal(self.next.env_ids, self.next.positions).all()
        return self.next

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class World:
    def __init__(self, capacity, num_envs, autoreset, stored, transforms, path=None):
        fields = FIELDS | ({"next_observation": OBSERVATION} if stored else {})
        self.stored, self.autoreset = stored, autoreset
        self.capacity = capacity
        self.sampler = Scripted()
        self.buffer = mr.ReplayBuffer.create(
            path,
            mr.Schema(fields),
            capacity,
            num_envs,
            autoreset=autoreset,
            engine="memory" if path is None else "memmap",
            sampler=self.sampler,
            transforms=transforms,
            commit_every=None,
        )
        self.episodes = [[] for _ in range(num_envs)]
        self.heads = [0] * num_envs
        self.tails = [0] * num_envs
        self.resets = [False] * num_envs
        self.breaks = [False] * num_envs
        self.number = 0
        self.calls = [f"World({capacity}, {num_envs}, {autoreset!r}, {stored})"]

    def __repr__(self):
        return "; ".join([*self.calls, repr(self.buffer.transforms)])

    def add(self, kinds, final=False):
        """One step an environment; `kinds` has t and u for its ends."""
        self.calls.append(f"add({kinds}, {final})")
        steps, finals = [], []
        for env_id, kind in enumerate(kinds):
            self.number += 1
            step = {
                "observation": observation(self.number),
                "action": np.int32(self.number),
                "reward": self.number / 4,
                "life": [1.0, 0.5, 1.0, 0.0, 0.25][self.number % 5],
            }
            if self.stored:
                step["next_observation"] = observation(self.number + 100)
            finals.append(observation(self.number + 500))
            steps.append(step | {"terminated": "t" in kind, "truncated": "u" in kind})
            self.take_in(env_id, step, kind, finals[-1] if final else None)
        options = {"final_observation": columns(finals)} if final else {}
        self.buffer.add(columns(steps), **options)

    def take_in(self, env_id, step, kind, final):
        episodes = self.episodes[env_id]
        newest = episodes[-1] if episodes else None
        self.heads[env_id] += 1
        if self.resets[env_id]:
            self.resets[env_id] = False
            return
        if self.autoreset == "next_step" and newest and newest.end and not newest.final:
            newest.final = step["observation"]
            return
        if newest is None or newest.end or self.breaks[env_id]:
            self.breaks[env_id] = False
            newest = Episode(self.heads[env_id] - 1)
            episodes.append(newest)
        newest.steps.append(step)
        newest.end = kind
        if kind and final is not None:
            newest.final = final
            self.heads[env_id] += 1

    def clear(self):
        self.calls.append("clear()")
        self.buffer.clear()
        self.tails = list(self.heads)
        for env_id, episodes in enumerate(self.episodes):
            # The reset that follows an end is a row of no episode that is kept.
            ended = episodes and episodes[-1].end and episodes[-1].final is None
            self.resets[env_id] |= bool(ended and self.autoreset == "next_step")
            episodes.clear()

    def reopen(self, on_resume):
        """Close the buffer and go on with it, as after a night."""
        path, transforms = self.buffer.path, self.buffer.transforms
        self.buffer.close()
        self.buffer = mr.ReplayBuffer.open(
            path,
            "r+",
            on_resume=on_resume,
            sampler=self.sampler,
            transforms=transforms,
            commit_every=None,
        )
        for env_id, episodes in enumerate(self.episodes):
            if on_resume == "truncate" and episodes and not episodes[-1].end:
                episodes[-1].end = "u"
            self.breaks[env_id] = on_resume != "continue"

    def first(self, env_id):
        return max(self.tails[env_id], self.heads[env_id] - self.capacity)

    def rows(self):
        """env_id, position, episode and number in it of every step alive."""
        for env_id, episodes in enumerate(self.episodes):
            for episode in episodes:
                for t in range(len(episode.steps)):
                    if episode.begin + t >= self.first(env_id):
                        yield env_id, episode.begin + t, episode, t

    def legal(self):
        """The rows that the buffer calls legal starts."""
        view = self.buffer._reader
        starts, rows = view.starts, list(self.rows())
        within = [row for row in rows if starts.first[row[0]] <= row[1] < starts.stop[row[0]]]
        ids, positions = (np.array([row[i] for row in within], int) for i in (0, 1))
        legal = view.legal(ids, positions)
        return [row for row, one in zip(within, legal, strict=True) if one]

    def draw(self, env_ids, positions, key=0, windows=None):
        """What the buffer makes of a draw."""
        count = len(env_ids)
        ids, places = np.array(env_ids, np.int64), np.array(positions, np.int64)
        if windows is not None:
            steps = np.array(windows, np.int64)
            windows = Windows(steps, np.ones(steps.shape, bool))
        self.sampler.next = Draw(
            ids, places, np.full(count, 1 / count), np.ones(count, np.float32), key, windows
        )
        batch = self.buffer.sample(count)
        # The first batch of a buffer tells what is read, those after it are read in
        # one go; and what is drawn apart is the same, too.
        for contiguous in (False, True):
            again = self.buffer.sample(count, contiguous=contiguous)
            assert again.fields.keys() == batch.fields.keys()
            for path, array in batch.fields.items():
                assert array.tobytes() == again[path].tobytes(), path
        return batch


def columns(steps):
    """Arrays ``[E, ...]`` of one dict an environment, nested alike."""
    if isinstance(steps[0], dict):
        return {name: columns([step[name] for step in steps]) for name in steps[0]}
    return np.array(steps)

"""Every episode as Python lists, and what a draw from it has to be."""

from dataclasses import dataclass, field


@dataclass
class Episode:
    begin: int
    steps: list = field(default_factory=list)
    final: dict | None = None
    end: str = ""

    def observations(self):
        final = [] if self.final is None else [self.final]
        return [step["observation"] for step in self.steps] + final


def known_stop(episode, stored):
    """One past the last step whose next observation is known."""
    return len(episode.steps) - (not stored and episode.final is None)


def after(episode, t, stored):
    """The observation after step t."""
    if stored:
        return episode.steps[t]["next_observation"]
    return episode.observations()[t + 1]


def stack(frames, t, k):
    return [frames[max(0, t - back)] for back in range(k - 1, -1, -1)]


def expected(episode, t, first, *, n, k, gamma, stored, next_step, reward):
    """The transition from step t, or None where it is no legal start."""
    last = min(t + n, len(episode.steps)) - 1
    ended = bool(episode.end) and last == len(episode.steps) - 1
    frames = [o["frame"] for o in episode.observations()]
    if episode.begin < first and episode.begin + t - (k - 1) < first:
        return None
    if last < t + n - 1 and not ended:
        return None
    if stored:
        nexts = [*frames[: last + 1], episode.steps[last]["next_observation"]["frame"]]
        then = stack(nexts, last + 1, k)
    elif last < known_stop(episode, stored):
        then = stack(frames, last + 1, k)
    elif ended and "t" in episode.end and not next_step:
        then = stack(frames, last, k)
    else:
        return None
    return {
        "observation/frame": stack(frames, t, k),
        "next_observation/frame": then,
        "action": episode.steps[t]["action"],
        "reward": sum(gamma ** (i - t) * reward(i) for i in range(t, last + 1)),
        "discount": gamma ** (last - t + 1) * (not (ended and "t" in episode.end)),
        "terminated": ended and "t" in episode.end,
        "truncated": ended and "u" in episode.end,
    }

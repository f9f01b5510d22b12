"""How fast are adds and draws through an adapter beside the library's own memory?

Vector transitions (obs f32[17], action f32[6]) go into full memories of the sizes that
each library is used at, whose rings have come round: ours in files, through the
adapter, theirs in RAM, through their own class, one process, in turns. A ratio above 1
says that ours takes less time; an agent that learns once a step does "both". Libraries
that are not installed are left out, and ours is then timed alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tools.bench.adapter_faces import (
    ACTION,
    BLOCK,
    OBSERVATION,
    Array,
    Pytorchrl,
    Tmrl,
    Velora,
    numbered,
    rounds,
)
from tools.bench.turns import OURS, Side, chosen, medians_us, race, run_benchmark, speedups

THEIRS = "original"
MODULES = {
    "sb3": "stable_baselines3",
    "skrl": "skrl",
    "velora": "velora",
    "tmrl": "tmrl",
    "pytorchrl": "pytorchrl",
}
NEEDED = {
    "sb3": "stable_baselines3",
    "skrl": "torch",
    "velora": "torch",
    "tmrl": "torch",
    "pytorchrl": "torch",
}
"""Without which not even ours runs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure.

    Attributes:
        steps: Steps of each environment that the memories hold.
        turns: Bursts of each side.
        calls: Calls in a burst.
        batch: Transitions in a draw.
    """

    steps: int = 1_000_000
    turns: int = 100
    calls: int = 20
    batch: int = 256


QUICK = Sizes(steps=3000, turns=8, calls=5)


class Face(Protocol):
    """One memory, ours or theirs, behind calls that a training loop makes."""

    def add(self) -> object:
        """Add the next step."""

    def sample(self, batch: int) -> object:
        """Draw a batch as the agent does."""

    def drawn(self, batch: int) -> tuple[Array, Array]:
        """Observations and rewards of a draw, to be checked."""


class Sb3:
    """Stable-Baselines3: one environment, as SAC adds and draws."""

    def __init__(self, path: Path | None, steps: int) -> None:
        spaces = import_module("gymnasium").spaces
        given = (
            steps,
            spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32),
            spaces.Box(-1, 1, (ACTION,), np.float32),
            "cpu",
        )
        self._next = 0
        if path is None:
            common = import_module("stable_baselines3.common.buffers")
            self.buffer = common.ReplayBuffer(*given)
            self._fill_theirs(steps)
        else:
            adapter = import_module("mmreplay.adapters.sb3")
            self.buffer = adapter.ReplayBuffer(*given, path=path, seed=0)
            self._fill_ours(steps)
        self._action = np.zeros((1, ACTION), np.float32)
        self._done, self._infos = np.zeros(1, bool), [{"TimeLimit.truncated": False}]

    def _fill_theirs(self, steps: int) -> None:
        buffer = self.buffer
        buffer.observations[:, 0] = numbered(0, steps)
        buffer.next_observations[:, 0] = numbered(1, steps)
        buffer.rewards[:, 0] = np.arange(steps)
        buffer.full, self._next = True, steps

    def _fill_ours(self, steps: int) -> None:
        ring, first = self.buffer._ready(), 0
        while first < steps or not rounds(ring):
            count = min(BLOCK, steps - first) if first < steps else BLOCK
            ring.extend(
                observation=numbered(first, count),
                next_observation=numbered(first + 1, count),
                action=np.zeros((count, ACTION), np.float32),
                reward=np.arange(first, first + count, dtype=np.float32),
                terminated=np.zeros(count, bool),
                truncated=np.zeros(count, bool),
            )
            first += count
        self._next = first

    def add(self) -> None:
        """See `Face`."""
        number = self._next = self._next + 1
        self.buffer.add(
            numbered(number - 1, 1),
            numbered(number, 1),
            self._action,
            np.array([number - 1.0]),
            self._done,
            self._infos,
        )

    def sample(self, batch: int) -> Any:
        """See `Face`."""
        return self.buffer.sample(batch)

    def drawn(self, batch: int) -> tuple[Array, Array]:
        """See `Face`."""
        samples = self.sample(batch)
        following = samples.next_observations.numpy()
        assert (following == samples.observations.numpy() + 1).all()
        return samples.observations.numpy(), samples.rewards.numpy()


class Skrl:
    """skrl: eight environments, as DDPG adds and draws."""

    ENVS = 8
    NAMES = ("observations", "actions", "rewards", "next_observations", "terminated")

    def __init__(self, path: Path | None, steps: int) -> None:
        self._torch = torch = import_module("torch")
        rows = steps // self.ENVS
        options: dict[str, Any] = {"num_envs": self.ENVS, "device": "cpu"}
        if path is None:
            memories = import_module("skrl.memories.torch")
        else:
            memories = import_module("mmreplay.adapters.skrl")
            options |= {"path": path, "seed": 0}
        self.memory = memories.RandomMemory(memory_size=rows, **options)
        sizes = (OBSERVATION, ACTION, 1, OBSERVATION, 1)
        for name, size in zip(self.NAMES, sizes, strict=True):
            kind = torch.bool if name == "terminated" else torch.float32
            self.memory.create_tensor(name=name, size=size, dtype=kind)
        self._next = 0
        self._rest = {
            "actions": torch.zeros(self.ENVS, ACTION),
            "terminated": torch.zeros(self.ENVS, 1, dtype=torch.bool),
        }
        for _ in range(rows):
            self.add()
        while not rounds(getattr(self.memory, "ring", None)):
            self.add()

    def add(self) -> None:
        """See `Face`."""
        torch, number = self._torch, self._next
        self._next += self.ENVS
        observations = torch.from_numpy(numbered(number, self.ENVS))
        self.memory.add_samples(
            observations=observations,
            rewards=observations[:, :1],
            next_observations=observations + self.ENVS,
            **self._rest,
        )

    def sample(self, batch: int) -> Any:
        """See `Face`."""
        return self.memory.sample(self.NAMES, batch_size=batch)[0]

    def drawn(self, batch: int) -> tuple[Array, Array]:
        """See `Face`."""
        found = dict(zip(self.NAMES, self.sample(batch), strict=True))
        now, then = found["observations"], found["next_observations"]
        assert (then == now + self.ENVS).all()
        return now.numpy(), found["rewards"].numpy()


FACES: dict[str, Callable[[Path | None, int], Face]] = {
    "sb3": Sb3,
    "skrl": Skrl,
    "velora": Velora,
    "tmrl": Tmrl,
    "pytorchrl": Pytorchrl,
}


def check(face: Face, system: str, steps: int) -> None:
    """Refuse draws that are no transitions of the memory.

    Raises:
        AssertionError: A draw is none.
    """
    observations, rewards = face.drawn(100)
    told = f"{system}: a drawn transition is not one that was added"
    assert (observations[:, 0] == rewards[:, 0]).all(), told
    assert len(np.unique(rewards)) > min(50, steps // 4), told


def measure(folder: Path, sizes: Sizes, originals: list[str]) -> dict[str, object]:
    """Time every system that can run.

    Args:
        folder: Where the files go.
        sizes: How much.
        originals: Systems whose own memories are timed beside.
    """
    told: dict[str, object] = {}
    for system in chosen(NEEDED, None):
        faces = {OURS: FACES[system](folder / system, sizes.steps)}
        if system in originals:
            faces[THEIRS] = FACES[system](None, sizes.steps)
        for face in faces.values():
            check(face, system, sizes.steps)
        adds: dict[str, Side] = {name: face.add for name, face in faces.items()}
        draws: dict[str, Side] = {
            name: lambda face=face: face.sample(sizes.batch)  # type: ignore[misc]
            for name, face in faces.items()
        }
        both: dict[str, Side] = {
            name: lambda face=face: (face.add(), face.sample(sizes.batch))  # type: ignore[misc]
            for name, face in faces.items()
        }
        told[system] = {
            part: {"speedup": speedups(times), "median_us": medians_us(times)}
            for part, times in (
                ("add", race(adds, sizes.turns, sizes.calls)),
                ("sample", race(draws, sizes.turns, sizes.calls)),
                ("both", race(both, sizes.turns, sizes.calls)),
            )
        }
    return told


def main() -> None:
    """Measure and print one line of JSON."""
    run_benchmark(
        __doc__,
        lambda folder, options: {
            "adapters": measure(
                folder, QUICK if options.quick else Sizes(), chosen(MODULES, options.peers)
            )
        },
        one_torch_thread=True,
    )


if __name__ == "__main__":
    main()

"""Small buffers of steps that follow from their places, drawn from in every way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import mmreplay as mr

SHAPE = (64, 65)
FIELDS = {
    "observation": {"number": mr.Field((), "int64"), "pixels": mr.Field(SHAPE, "uint8")},
    "action": mr.Field((3,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
Random = np.random.Generator


class OddError(Exception):
    """What a transform raises."""


class DeviceError(OSError):
    """What a device raises."""


def block(first: int, count: int, num_envs: int) -> dict[str, Any]:
    """Steps ``[count, num_envs]`` that follow from their places."""
    number = np.arange(first, first + count)[:, None] * num_envs + np.arange(num_envs)
    pixels = np.broadcast_to(
        (number % 251).astype(np.uint8)[..., None, None], (*number.shape, *SHAPE)
    )
    return {
        "observation": {"number": number, "pixels": pixels},
        "action": np.stack([number, -number, 2 * number], -1).astype(np.float32),
        "reward": number.astype(np.float32),
        "terminated": terminates(number),
        "truncated": number % 19 == 7,
    }


def terminates(number: Any) -> Any:
    """Whether the episode of a step, or of each of some, ends there."""
    return number % 23 == 5


def fails(fields: dict[str, Any], rng: Random) -> dict[str, Any]:
    """A transform that fails for one draw in ten, always for the same ones."""
    if rng.random() < 0.1:
        raise OddError("a transform")
    return fields | {"noise": rng.random(fields["reward"].shape)}


def distance(achieved: Any, desired: Any, info: Any) -> Any:
    """A reward."""
    return -np.abs(achieved.astype(np.float32) - desired).mean((1, 2))


PIXELS = "observation/pixels"
TRANSFORMS: tuple[Callable[[], list[Any]], ...] = (
    list,
    list,
    lambda: [mr.FrameStack(3, paths=PIXELS)],
    lambda: [mr.NStep(3, gamma=0.9)],
    lambda: [mr.FrameStack(2, paths=PIXELS), mr.NStep(2, gamma=0.9)],
    lambda: [mr.DiscountedReturn(0.9)],
    lambda: [mr.GAE(0.9, value="reward")],
    lambda: [mr.ActionHistory(2)],
    lambda: [mr.Apply(fails, True)],
    lambda: [mr.NStep(2, gamma=0.9), mr.Apply(fails, True)],
)
SAMPLERS: dict[str, Callable[[int], Any]] = {
    "uniform": lambda seed: mr.UniformSampler(seed),
    "shuffled": lambda seed: mr.ShuffledSampler(seed),
    "prioritized": lambda seed: mr.PrioritizedSampler(seed=seed, name=None),
    "ranked": lambda seed: mr.RankPrioritizedSampler(seed=seed, name=None),
    "recent": lambda seed: mr.RecentSampler(20, 0.5, seed=seed),
    "windows": lambda seed: mr.SequenceSampler(4, mr.UniformSampler(seed)),
    "shuffled windows": lambda seed: mr.SequenceSampler(3, mr.ShuffledSampler(seed)),
    "padded": lambda seed: mr.SequenceSampler(
        5, mr.PrioritizedSampler(seed=seed, name=None), boundary="pad"
    ),
    "mixture": lambda seed: mr.MixtureSampler(
        [(mr.UniformSampler(seed=seed), 3), (mr.RecentSampler(9, 0.5, seed=seed), 1)], seed=seed
    ),
}
ENGINES: tuple[Literal["memmap", "zarr"], ...] = ("memmap", "memmap", "zarr")
KEEPING = ("prioritized", "ranked", "padded")


@dataclass(frozen=True, slots=True)
class World:
    """Buffers of one try, and how they are drawn from.

    Attributes:
        paths: Their folders.
        sampler: By name.
        seed: Of the samplers.
        transforms: By place.
        shares: Of several.
        reading: Options of opening.
        loading: Options of the loader.
        batch_size: Steps a batch.
    """

    paths: tuple[Path, ...]
    sampler: str
    seed: int
    transforms: int
    shares: list[float] | None
    reading: dict[str, Any]
    loading: dict[str, Any]
    batch_size: int

    @staticmethod
    def made(rng: Random, folder: Path, several: bool) -> World:
        """Make buffers, wrapped or not, and choose the rest."""
        count = int(rng.integers(2, 4)) if several else 1
        paths = tuple(folder / str(k) for k in range(count))
        num_envs = int(rng.integers(1, 4))
        for path in paths:
            capacity = int(rng.integers(40, 120))
            engine = ENGINES[rng.integers(len(ENGINES))]
            with mr.ReplayBuffer.create(
                path,
                mr.Schema(FIELDS),
                capacity,
                num_envs,
                commit_every=None,
                engine=engine,
                autoreset="disabled",
            ) as buffer:
                buffer.extend(block(0, int(rng.integers(30, 240)), num_envs))
        names = list(SAMPLERS)
        return World(
            paths,
            names[rng.integers(len(names))],
            int(rng.integers(1000)),
            int(rng.integers(len(TRANSFORMS))),
            [1.0, 3.0, 2.0][:count] if rng.random() < 0.5 else None,
            {
                "read_mode": ("auto", "mmap", "pread")[rng.integers(3)],
                "advise": ("auto", "always", "never", "kernel")[rng.integers(4)],
            },
            {
                "prefetch": int(rng.integers(1, 6)),
                "num_threads": int(rng.integers(1, 4)),
                "read_ahead_nbytes": (1, 200_000, 1 << 26)[rng.integers(3)],
            },
            int(rng.integers(1, 24)),
        )

    def opened(self, transforms: bool = True) -> Any:
        """One buffer, or several as one; each call the same, drawing the same."""
        buffers = []
        for number, path in enumerate(self.paths):
            sampler = SAMPLERS[self.sampler](self.seed + number)
            made = TRANSFORMS[self.transforms]() if transforms else []
            buffer = mr.ReplayBuffer.open(path, sampler=sampler, transforms=made, **self.reading)
            buffers.append(buffer)
        if len(buffers) == 1:
            return buffers[0]
        return mr.concat(buffers, self.shares, seed=self.seed)


def buffers_of(drawn: Any) -> list[Any]:
    """The buffers of one or several."""
    return list(getattr(drawn, "buffers", [drawn]))


def closed(drawn: Any) -> None:
    """Close one or several."""
    for buffer in buffers_of(drawn):
        buffer.close()


def state_of(drawn: Any) -> Any:
    """State of what draws."""
    found = drawn if hasattr(drawn, "buffers") else drawn.sampler
    return found.state_dict()


def put_back(drawn: Any, state: Any) -> None:
    """Draw from a state on."""
    found = drawn if hasattr(drawn, "buffers") else drawn.sampler
    found.load_state_dict(state)


def sampled(drawn: Any, size: int) -> Any:
    """The next batch of a twin, or what failed."""
    try:
        return drawn.sample(size).torch()
    except OddError as error:
        if hasattr(drawn, "buffers"):
            # It goes back to before the draw; a loader goes on after it.
            drawn.draw(size)
        return error


def next_batch(loader: Any) -> Any:
    """The next batch of a loader, whatever the epoch, or what failed."""
    try:
        for batch in loader:
            return batch
        return next_batch(loader)
    except (OddError, DeviceError) as error:
        return error


def refuse_other(actual: Any, expected: Any) -> None:
    """Raise AssertionError unless both are the same batch, or failed alike."""
    if isinstance(actual, DeviceError):
        return
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, Exception):
        return
    assert set(actual) == set(expected)
    names = ("env_ids", "positions", "probabilities", "weights", "mask", "buffer_ids")
    pairs = {n: (getattr(actual, n), getattr(expected, n)) for n in names}
    pairs |= {f"field {p}": (actual[p], expected[p]) for p in expected}
    for name, (one, other) in pairs.items():
        assert (one is None) == (other is None), name
        if other is not None:
            assert one.shape == other.shape, (name, one.shape, other.shape)
            same = (one == other) | ((one != one) & (other != other))  # NaN, too
            assert same.all(), (name, one, other)


def check_steps(batch: Any, num_envs: int) -> None:
    """Raise AssertionError where a step is not that of its place."""
    positions, env_ids = batch.positions, batch.env_ids
    if batch.window_positions is not None:
        positions, env_ids = batch.window_positions, env_ids[:, None]
    number = batch["observation/number"]
    assert torch.equal(number, positions * num_envs + env_ids), "places"
    assert torch.equal(batch["reward"], number.to(torch.float32)), "rewards"
    low = (number % 251).to(torch.uint8)
    pixels = batch[PIXELS]
    assert (pixels == low[..., None, None]).all(), "pixels"
    after = batch["next_observation/number"]
    ends = terminates(number)
    assert torch.equal(batch["terminated"], ends), "ends"
    assert torch.equal(after, number + num_envs * ~ends), "what follows"

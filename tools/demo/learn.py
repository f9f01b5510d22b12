"""A small network, trained from the buffer: where will the next frame differ?

A frame is 12 x 12 blocks of 7 x 7 pixels. The network sees one frame and the
action, and predicts for each block whether the next frame differs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import mmreplay as mr
from tools.demo.play import SEED
from tools.demo.processes import resident

BATCH_SIZE = 128
NUM_WORKERS = 2
UPDATES = 500
WINDOW = 50
DRAWN = 300
DRAWN_BATCH_SIZE = 256
ACTIONS = 6


@dataclass(frozen=True, slots=True)
class Learned:
    """Result of the training.

    Attributes:
        first: Mean loss of the first 50 updates.
        last: Mean loss of the last 50.
        baseline: Loss of always predicting the mean frequency of each block's
            changes, over the batches of the last 50 updates.
        updates_per_s: Updates a second, waiting for data included.
        drawn_per_s: Batches of 256 a second that the loader alone hands over.
        memory: Of the learner, by `resident`.
    """

    first: float
    last: float
    baseline: float
    updates_per_s: float
    drawn_per_s: float
    memory: dict[str, int]


class Network(nn.Module):
    """A frame and an action to one logit a block.

    The same weights for every block, and a bias per block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Conv2d(1, 16, 7, stride=7)
        self.around = nn.Conv2d(16 + ACTIONS, 16, 3, padding=1)
        self.change = nn.Conv2d(16, 1, 3, padding=1)
        self.often = nn.Parameter(torch.zeros(12, 12))

    def forward(self, frames: Tensor, actions: Tensor) -> Tensor:
        """Logits ``[B, 144]`` of uint8 frames ``[B, 84, 84]`` and actions ``[B]``."""
        seen = functional.relu(self.blocks(frames[:, None].float() / 255))
        done = functional.one_hot(actions, ACTIONS)[:, :, None, None]
        both = torch.cat([seen, done.expand(-1, -1, 12, 12)], dim=1)
        found = self.change(functional.relu(self.around(both)))[:, 0]
        logits: Tensor = (found + self.often).flatten(1)
        return logits


def changes(batch: mr.Batch) -> Tensor:
    """Whether any pixel of each block differs in the next frame, float ``[B, 144]``."""
    differs = batch["observation"] != batch["next_observation"]
    return functional.max_pool2d(differs[:, None].float(), 7).flatten(1)


def batches(path: Path, batch_size: int, count: int) -> Iterator[mr.Batch]:
    """Uniform draws through a DataLoader with two workers."""
    dataset = mr.ReplayDataset(path)
    draws = dataset.draws(mr.UniformSampler(seed=SEED), batch_size, num_batches=count)
    yield from DataLoader(
        dataset, batch_sampler=draws, collate_fn=mr.collate, num_workers=NUM_WORKERS
    )


def learn(path: Path) -> Learned:
    """Train, and measure the loader by itself."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses, often = np.zeros(UPDATES), torch.zeros(UPDATES, 144)
    started = perf_counter()
    for update, batch in enumerate(batches(path, BATCH_SIZE, UPDATES)):
        target = changes(batch)
        logits = network(batch["observation"], batch["action"])
        loss = functional.binary_cross_entropy_with_logits(logits, target)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        losses[update], often[update] = loss.item(), target.mean(dim=0)
    updates_per_s = UPDATES / (perf_counter() - started)
    memory = resident()
    return Learned(
        float(np.mean(losses[:WINDOW])),
        float(np.mean(losses[-WINDOW:])),
        _baseline(often),
        updates_per_s,
        _drawn_per_s(path),
        memory,
    )


def _baseline(often: Tensor) -> float:
    """Loss of predicting each block's mean over all updates, in the last ones."""
    predicted = often.mean(dim=0).clamp(1e-6, 1 - 1e-6)
    actual = often[-WINDOW:].mean(dim=0)
    return float(functional.binary_cross_entropy(predicted, actual))


def _drawn_per_s(path: Path) -> float:
    found = batches(path, DRAWN_BATCH_SIZE, DRAWN)
    next(found)  # The start of the workers is not measured.
    started = perf_counter()
    count = sum(1 for _ in found)
    return count / (perf_counter() - started)

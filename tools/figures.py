"""Draw the figures of docs/: python -m tools.figures [folder].

Each is made from a real buffer and real draws, so a figure cannot say what the
samplers do not do.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

import mmreplay as mr

STEPS, DRAWS, BATCH = 400, 200_000, 1_000
SCHEMA = mr.Schema(
    {
        "observation": mr.Field((2,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def ring() -> mr.ReplayBuffer:
    """A full ring whose episodes get longer, half of them truncated."""
    buffer = mr.ReplayBuffer.create(None, SCHEMA, STEPS, engine="memory")
    ends = {31: "terminated", 80: "truncated", 150: "terminated", 259: "truncated"}
    for number in range(STEPS):
        kind = ends.get(number)
        observation = np.full(2, number, np.float32)
        buffer.add(
            observation=observation,
            reward=float(np.sin(number / 25)),
            terminated=kind == "terminated",
            truncated=kind == "truncated",
            final_observation=observation if kind else None,
        )
    return buffer


def frequencies(buffer: mr.ReplayBuffer, sampler: Any) -> NDArray[np.float64]:
    """How often each position was drawn, over the uniform share."""
    first, stop = int(buffer.view.span.first[0]), int(buffer.heads[0])
    counts = np.zeros(stop - first)
    for _ in range(DRAWS // BATCH):
        draw = sampler.draw(buffer.view, BATCH)
        np.add.at(counts, draw.positions - first, 1)
    return np.asarray(counts / DRAWS * (stop - first))


def prioritized(buffer: mr.ReplayBuffer) -> Any:
    """A sampler that was told larger errors for later steps of each hump."""
    sampler = mr.PrioritizedSampler(alpha=0.6, name=None, seed=0)
    draw = sampler.draw(buffer.view, 4_000)
    errors = np.abs(np.sin(draw.positions / 40)) + 0.05
    sampler.update_priorities(buffer.view, draw.env_ids, draw.positions, errors)
    return sampler


def draw_samplers(target: Path) -> None:
    """The law of four samplers over one ring."""
    buffer = ring()
    shrinking = mr.EmphasizeRecentSampler(DRAWS // BATCH, eta=0.998, smallest=40, seed=0)
    laws = {
        "UniformSampler": mr.UniformSampler(seed=0),
        "PrioritizedSampler, alpha 0.6": prioritized(buffer),
        "SequenceSampler, 40 steps of one episode (starts)": mr.SequenceSampler(
            40, mr.UniformSampler(seed=0)
        ),
        "EmphasizeRecentSampler, all its updates": shrinking,
    }
    figure, axes = plt.subplots(len(laws), 1, sharex=True, figsize=(7.5, 6))
    for axis, (name, sampler) in zip(axes, laws.items(), strict=True):
        found = frequencies(buffer, sampler)
        positions = int(buffer.view.span.first[0]) + np.arange(len(found))
        axis.fill_between(positions, found, step="mid", linewidth=0)
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_ylim(0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("position")
    figure.supylabel("drawn, relative to uniform", fontsize=9)
    save(figure, target)


def draw_window(target: Path) -> None:
    """The rows that FrameStack(4) and NStep(3) read around one step."""
    figure, axis = plt.subplots(figsize=(7.5, 2.2))
    offsets = np.arange(-5, 6)
    roles = {
        "observation: frames -3 to 0": (range(-3, 1), 2, "tab:blue"),
        "reward: steps 0 to 2": (range(3), 1, "tab:orange"),
        "next observation: frames 0 to 3": (range(4), 0, "tab:green"),
    }
    for name, (reads, height, colour) in roles.items():
        for offset in offsets:
            inside = offset in reads
            axis.add_patch(
                Rectangle(
                    (offset - 0.45, height - 0.4),
                    0.9,
                    0.8,
                    edgecolor="0.7",
                    facecolor=colour if inside else "none",
                )
            )
        axis.text(5.8, height, name, va="center", fontsize=9)
    axis.set_xlim(-5.6, 11.5)
    axis.set_ylim(-0.6, 2.6)
    axis.set_xticks(offsets, [f"t{o:+d}" if o else "t" for o in offsets], fontsize=8)
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    save(figure, target)


def save(figure: Any, target: Path) -> None:
    """Write a figure, the same bytes each time."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "mmreplay"}):
        figure.tight_layout()
        figure.savefig(target, metadata={"Date": None})
    plt.close(figure)
    print(target)


def main(folder: Path) -> None:
    """Draw all of them."""
    draw_samplers(folder / "samplers.svg")
    draw_window(folder / "windows.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/figures"))

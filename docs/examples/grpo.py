"""Group-relative policy optimization that may be killed at any time, and goes on.

    .venv/bin/python docs/examples/grpo.py runs/spelling    # after make demo
    .venv/bin/python docs/examples/grpo.py runs/spelling    # after a kill: goes on

A policy learns to spell. A prompt is a text such as "Spell: abba", an answer a sequence
of letters of any length, and its reward, which comes late, the share of letters that
are right. Eight answers to each prompt are a group, whose rewards are compared (Shao et
al. 2024). The buffer holds prompts, answers and their log-probabilities, each as long
as it is; the versions of the policy; and which answers were trained on.

The learner's checkpoint names the batch that it knows, by a ticket. After a kill that
batch is acknowledged before another is drawn, so that each group is trained on exactly
once: neither skipped, nor used twice. That holds whenever the process is killed. After
a power cut it would with a checkpoint that is synced before it is renamed, a commit of
the buffer before that, and ``acknowledge(batch, sync=True)``, which all wait for the
disk.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import mmreplay as mr
from mmreplay.samplers.groups import GroupRows

LETTERS = "abcdefgh"
END = len(LETTERS)
LONGEST = 24
GROUP, PROMPTS = 8, 4
"""Answers to a prompt, and prompts in a round."""
REPORTED = 20
"""Updates between two lines of progress."""
CAPACITY, TYPICAL = 2048, 12
SCHEMA = mr.Schema(
    {
        "group": mr.Field((), "int64"),
        "prompt": mr.Field.text(max_bytes=100),
        "tokens": mr.Field((None,), "int64", max_length=LONGEST),
        "logp": mr.Field((None,), "float32", max_length=LONGEST),
        "version": mr.Field((), "int64"),
        "reward": mr.Field((), "float32", mutable=True),
    }
)


def judged(groups: GroupRows) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Select the groups all of whose rewards have come."""
    there = np.isfinite(groups.read("reward"))
    return np.logical_and.reduceat(there, groups.offsets[:-1])


def contexts(prompt: str, count: int) -> torch.Tensor:
    """What the policy sees at each of the first tokens: the letter to be spelled."""
    word = [LETTERS.index(letter) for letter in prompt.removeprefix("Spell: ")]
    return torch.tensor((word + [END] * count)[:count])


class Learner:
    """A policy, a table of logits, and how far its training is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.policy = nn.Embedding(END + 1, END + 1)
        nn.init.zeros_(self.policy.weight)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), 0.05)
        self.trained: list[tuple[float, list[int]]] = []
        """Of each update the mean reward, and the groups."""
        self.ticket: dict[str, Any] | None = None
        if path.exists():
            state = torch.load(path)
            self.policy.load_state_dict(state["policy"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.trained, self.ticket = state["trained"], state["ticket"]

    def save(self) -> None:
        """Replace the checkpoint in one step."""
        state = {
            "policy": self.policy.state_dict(),
            "trained": self.trained,
            "optimizer": self.optimizer.state_dict(),
            "ticket": self.ticket,
        }
        torch.save(state, f"{self.path}.new")
        os.replace(f"{self.path}.new", self.path)

    def progress(self, num_groups: int) -> str:
        """Say how many groups were trained on."""
        done = sum(len(groups) for _, groups in self.trained)
        return f"{done} of {num_groups} groups"

    def learn(self, batch: mr.Batch) -> None:
        """Take one step on whole groups."""
        tokens, logp, texts = batch["tokens"], batch["logp"], batch["prompt"].text()
        lengths = tokens.lengths.tolist()
        seen = torch.cat([contexts(*pair) for pair in zip(texts, lengths, strict=True)])
        rewards = batch["reward"].reshape(-1, GROUP)
        spread = rewards.std(1, keepdim=True) + 1e-3
        advantages = (rewards - rewards.mean(1, keepdim=True)) / spread
        each = advantages.reshape(-1).repeat_interleave(tokens.lengths)
        now = Categorical(logits=self.policy(seen)).log_prob(tokens.values)
        ratio = (now - logp.values).exp()
        loss = -torch.minimum(ratio * each, ratio.clamp(0.8, 1.2) * each).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        groups = batch["group"][::GROUP].tolist()
        self.trained.append((float(rewards.mean()), groups))


def answer(buffer: mr.ReplayBuffer, learner: Learner, group: int) -> None:
    """Add the answers to a prompt, or those that a kill left out."""
    missing = GROUP - len(buffer.find("group", group)[0])
    if missing:
        random = np.random.default_rng(group)
        word = "".join(random.choice(list(LETTERS), random.integers(1, 12)))
        prompt = f"Spell: {word}"
        with torch.no_grad():
            chances = Categorical(logits=learner.policy(contexts(prompt, LONGEST)))
            letters = chances.sample((missing,))
            logp = chances.log_prob(letters).numpy()
        answers = [row[: [*row, END].index(END) + 1] for row in letters.tolist()]
        buffer.extend(
            group=[group] * missing,
            prompt=[prompt] * missing,
            tokens=answers,
            logp=[row[: len(a)] for row, a in zip(logp, answers, strict=True)],
            version=[len(learner.trained)] * missing,
            reward=[np.nan] * missing,
        )


def judge(buffer: mr.ReplayBuffer, group: int) -> None:
    """Write the rewards of a group: the share of tokens that are right."""
    env_ids, positions = buffer.find("group", group)
    rows = buffer.take(env_ids, positions)
    rewards = []
    for prompt, tokens in zip(rows["prompt"].text(), rows["tokens"], strict=True):
        right = contexts(prompt, len(tokens)).numpy() == tokens
        rewards.append(right.sum() / max(len(prompt) - len("Spell: ") + 1, len(tokens)))
    buffer.write_field("reward", env_ids, positions, rewards)


def train(folder: Path, num_groups: int) -> list[tuple[float, list[int]]]:
    """Train on so many groups, from where the folder is."""
    folder.mkdir(parents=True, exist_ok=True)
    learner = Learner(folder / "learner.pt")
    groups = mr.GroupSampler("group", GROUP, judged)
    recent = mr.StalenessSampler("version", len(learner.trained), 8, sampler=groups)
    sampler = mr.UseCounter(1, recent, lease_s=600)
    replay, begin = folder / "replay", 0
    if (replay / "metadata.json").exists():
        buffer = mr.ReplayBuffer.open(replay, "r+", sampler=sampler)
    else:
        heap = mr.plan_buffer(SCHEMA, CAPACITY, lengths=TYPICAL).heap_bytes
        buffer = mr.ReplayBuffer.create(replay, SCHEMA, CAPACITY, heap_bytes=heap, sampler=sampler)
    with buffer:
        if learner.ticket is not None:
            print(f"goes on after {learner.progress(num_groups)}", file=sys.stderr)
            buffer.acknowledge(learner.ticket)
        if buffer.heads[0]:
            last = int(buffer.get_field("group", 0, buffer.heads[0] - 1))
            begin = last // PROMPTS * PROMPTS
        for first in range(begin, num_groups + PROMPTS, PROMPTS):
            for group in range(first, min(first + PROMPTS, num_groups)):
                answer(buffer, learner, group)
            for group in range(max(0, first - PROMPTS), min(first, num_groups)):
                judge(buffer, group)
            try:
                batch = buffer.sample(1000)
            except mr.EmptyError:
                continue  # no rewards have come
            learner.ticket = buffer.ticket(batch)
            learner.learn(batch.torch())
            learner.save()
            buffer.acknowledge(batch)
            recent.move_to(len(learner.trained))
            if len(learner.trained) % REPORTED == 0:
                mean = np.mean([reward for reward, _ in learner.trained[-REPORTED:]])
                text = f"{learner.progress(num_groups)}, mean reward {mean:.2f}"
                print(text, file=sys.stderr)
    return learner.trained


def main() -> None:
    """Train, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--groups", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rewards = [reward for reward, _ in train(options.folder, options.groups)]
    first, last = np.mean(rewards[:5]), np.mean(rewards[-5:])
    print(json.dumps({"first_return": round(first, 2), "last_return": round(last, 2)}))


if __name__ == "__main__":
    main()

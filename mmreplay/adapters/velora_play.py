"""Steps that a velora agent makes in copies of its environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mmreplay.adapters.values import array_of
from mmreplay.recording.environments import make_vector

Steps = tuple[torch.Tensor, ...]
"""States, actions, rewards, next states, dones and hidden states, ``[N, ...]`` each."""


def played(agent: Any, num_envs: int, count: int) -> Iterator[Steps]:
    """Play so many steps, exactly, and give them as they come.

    What an environment returns for a reset is no step, and is left out; the hidden
    state begins anew with the episode.

    Args:
        agent: Has ``env``, ``device`` and ``predict`` as velora's agents do.
        num_envs: Environments side by side.
        count: Steps.
    """
    spec = agent.env.spec
    # Nobody looks at the copies.
    kwargs = {k: v for k, v in spec.kwargs.items() if k != "render_mode"}
    envs = make_vector(spec.id, num_envs, kwargs)
    try:
        hidden = None
        states = torch.as_tensor(envs.reset()[0], device=agent.device)
        ended = torch.zeros(num_envs, dtype=torch.bool)
        while count > 0:
            actions, hidden = agent.predict(states, hidden, train_mode=True)
            found, rewards, terminated, truncated, _ = envs.step(array_of(actions))
            following = torch.as_tensor(found, device=agent.device)
            dones = torch.as_tensor(terminated | truncated)
            # Gymnasium resets in the step after an end, which is no step of a policy.
            keep = torch.nonzero(~ended)[:count, 0]
            given = (states, actions, torch.as_tensor(rewards), following, dones)
            yield tuple(v[keep.to(v.device)] for v in (*given, hidden))
            count -= len(keep)
            begun = ended.to(hidden.device)[:, None]
            hidden = torch.where(begun, torch.zeros_like(hidden), hidden)
            states, ended = following, dones & ~ended
    finally:
        envs.close()

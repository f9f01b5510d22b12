"""Seeds of the learners of a run: each rank draws by another one."""

from __future__ import annotations

from typing import Any

import numpy as np

from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Sampler, State, ask, innermost


def seed_of_rank(sampler: Sampler, seed: int | None, rank: int) -> int | None:
    """The seed of a learner's draws; by default that of the sampler, or inside it."""
    if seed is None:
        inner = innermost(sampler)
        generators = ask(inner, "generators")()
        seed = generators[0].seed if generators else ask(inner, "settings")().get("seed")
    return _mixed(seed or 0, rank) if rank else seed


def draw_by_rank(sampler: Sampler, seed: int | None, rank: int) -> None:
    """Have a sampler draw by the seed of a learner, and those inside it.

    Args:
        sampler: Draws from one ring by itself.
        seed: In place of its own; each sampler inside it gets another one.
        rank: Of the learner; 0 leaves seeds as they are.

    Raises:
        SchemaError: Its state has no seed to change.
    """
    if seed is None and not rank:
        return
    num_seeds = 0

    def changed(state: Any) -> Any:
        nonlocal num_seeds
        if isinstance(state, list):
            return [changed(each) for each in state]
        if not isinstance(state, dict):
            return state
        result = dict(state)
        if type(state.get("seed")) is int:
            own = state["seed"] if seed is None else seed
            if seed is not None and num_seeds:
                own = _mixed(seed, num_seeds, 1)
            result["seed"] = _mixed(own, rank) if rank else own
            num_seeds += 1
        return {name: changed(each) for name, each in result.items()}

    state: State = changed(sampler.state_dict())
    if not num_seeds:
        raise SchemaError(
            f"seed and rank must be left out with {type(sampler).__name__}, whose "
            f"state has no seed, got seed {seed} and rank {rank}. Give each learner a "
            "sampler of its own seed."
        )
    sampler.load_state_dict(state)


def _mixed(seed: int, *numbers: int) -> int:
    """A seed in ``[0, 2**63)`` of a seed and what tells its users apart."""
    sequence = np.random.SeedSequence([seed, *numbers])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

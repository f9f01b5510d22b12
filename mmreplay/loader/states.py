"""States with tensors for arrays, which torch loads with ``weights_only=True``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def as_tensors(state: Any) -> Any:
    """A state with a tensor, of memory of its own, for each array in it."""
    if isinstance(state, dict):
        return {name: as_tensors(value) for name, value in state.items()}
    if isinstance(state, list):
        return [as_tensors(value) for value in state]
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


def as_arrays(state: Any) -> Any:
    """A state with an array for each tensor in it, wherever that was loaded to."""
    if isinstance(state, dict):
        return {name: as_arrays(value) for name, value in state.items()}
    if isinstance(state, list):
        return [as_arrays(value) for value in state]
    return state.cpu().numpy() if isinstance(state, torch.Tensor) else state

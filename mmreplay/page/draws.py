"""What a sampler draws from a buffer, without a trace in its files.

A sampler is named by text such as ``PrioritizedSampler(alpha=0.6)``. The text is parsed
and never evaluated: names are looked up in a list, arguments are literals. Stored
priorities are copied out of their column: the sampler keeps its own in memory, so that
the column's LOCK is not taken and its STATE is not written.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import ReplayError, SchemaError
from mmreplay.page.priorities import column_of
from mmreplay.page.requests import BAD, TOO_LARGE, UNREADABLE, Refusal
from mmreplay.samplers.base import PrioritySampler, Sampler, View, keeps_priorities
from mmreplay.samplers.distinct import DistinctSampler
from mmreplay.samplers.prioritized import (
    PrioritizedSampler,
    PriorityBasedSampler,
    RankPrioritizedSampler,
)
from mmreplay.samplers.priority_distribution import LinearSchedule
from mmreplay.samplers.recent import EmphasizeRecentSampler, RecentSampler
from mmreplay.samplers.shuffled import ShuffledSampler
from mmreplay.samplers.stratified import StratifiedSampler
from mmreplay.samplers.uniform import UniformSampler

DRAWN = 256
MAX_TEXT_LENGTH = 300
MAX_DEPTH = 3
MAX_INTEGER = 1 << 40
MAX_PRIORITY_ROWS = 1 << 22
"""Rows of a ring that priorities are copied of: 13 bytes each."""
CHUNK_ROWS = 1 << 20
AGE_BINS = 40

SAMPLERS: dict[str, Callable[..., Any]] = {
    sampler.__name__: sampler
    for sampler in (
        UniformSampler, PrioritizedSampler, RankPrioritizedSampler, RecentSampler,
        EmphasizeRecentSampler, StratifiedSampler, DistinctSampler, ShuffledSampler,
    )
}  # fmt: skip
"""Samplers that draw single steps."""
CALLABLE = {**SAMPLERS, LinearSchedule.__name__: LinearSchedule}


def parse_sampler(text: str, seed: int) -> Sampler:
    """Make the sampler that a text names.

    Args:
        text: A call with literal arguments, such as ``"UniformSampler()"``; a name
            alone stands for a call without arguments.
        seed: Of samplers for which the text gives none.

    Raises:
        Refusal: The text is something else, or an argument is not legal.
    """
    if len(text) > MAX_TEXT_LENGTH:
        raise Refusal(BAD, f"A sampler must have at most {MAX_TEXT_LENGTH} characters.")
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise _no_sampler(text) from error
    if isinstance(node, ast.Name):
        node = ast.Call(node, [], [])
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise _no_sampler(text)
    if node.func.id not in SAMPLERS:
        raise _no_sampler(text)
    try:
        sampler: Sampler = _make(node, seed, 0, text)
    except (ReplayError, TypeError, ValueError, OverflowError) as error:
        raise Refusal(BAD, f"{text}: {error}") from error
    return sampler


def _make(node: ast.Call, seed: int, depth: int, text: str) -> Any:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in CALLABLE or depth > MAX_DEPTH:
        raise _no_sampler(text)
    function = CALLABLE[name]
    arguments = [_value(argument, seed, depth, text) for argument in node.args]
    named = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise _no_sampler(text)
        named[keyword.arg] = _value(keyword.value, seed, depth, text)
    parameters = inspect.signature(function).parameters
    bound = inspect.signature(function).bind(*arguments, **named)
    if "seed" in parameters and "seed" not in bound.arguments:
        named["seed"] = seed
    if issubclass(function, PriorityBasedSampler):  # type: ignore[arg-type]  # a class
        # Kept in memory: a name would take the column's lock and write its state.
        named["name"] = None
    return function(*arguments, **named)


def _value(node: ast.expr, seed: int, depth: int, text: str) -> Any:
    if isinstance(node, ast.Call):
        return _make(node, seed, depth + 1, text)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise _no_sampler(text) from error
    plain = isinstance(value, bool | float | str) or value is None
    if not plain and not (isinstance(value, int) and abs(value) <= MAX_INTEGER):
        raise _no_sampler(text)
    return value


def _no_sampler(text: str) -> Refusal:
    return Refusal(
        BAD,
        f"{text!r} must be a sampler with plain arguments, such as "
        f"PrioritizedSampler(alpha=0.6). Known are {', '.join(SAMPLERS)}.",
    )


def draw_steps(buffer: ReplayBuffer, text: str, seed: int) -> dict[str, Any]:
    """Draw 256 steps with a sampler, as JSON values.

    Args:
        buffer: Open to read.
        text: The sampler; see `parse_sampler`.
        seed: Of the draw.

    Returns:
        ``env_ids``, ``positions``, ``probabilities``, ``weights`` and ``ages`` (rows
        since, in the step's environment) ``[256]`` each, and histograms of ages:
        ``stored`` and ``drawn`` counts between ``edges``.

    Raises:
        Refusal: The text names no sampler, no step can be drawn, or the ring is too
            large to copy its priorities.
    """
    sampler = parse_sampler(text, seed)
    view = buffer.view
    try:
        with view.lock:
            if keeps_priorities(sampler):
                copy_priorities(buffer, view, sampler)
            draw = sampler.draw(view, DRAWN)
            span = view.span
    except SchemaError as error:
        raise Refusal(BAD, str(error)) from error
    except LookupError as error:
        raise Refusal(UNREADABLE, str(error)) from error
    ages = span.stop[draw.env_ids] - 1 - draw.positions
    edges, stored = age_histogram(span.lengths)
    return {
        "sampler": text,
        "seed": seed,
        "env_ids": draw.env_ids,
        "positions": draw.positions,
        "probabilities": draw.probabilities,
        "weights": draw.weights,
        "ages": ages,
        "edges": edges,
        "stored": stored,
        "drawn": np.histogram(ages, edges)[0],
        "priorities": keeps_priorities(sampler),
    }


def copy_priorities(buffer: ReplayBuffer, view: View, sampler: Sampler) -> None:
    """Give a sampler the stored priorities of a buffer, if there are any.

    Rows without one have the highest of the others, as they would enter at.

    Args:
        buffer: Open to read.
        view: Of the buffer; its lock is held.
        sampler: Keeps priorities, in memory; before its first draw.

    Raises:
        Refusal: The ring is too large.
    """
    ring = view.home.ring
    if ring.num_rows > MAX_PRIORITY_ROWS:
        raise Refusal(
            TOO_LARGE,
            f"Draws by priority are shown of rings of at most {MAX_PRIORITY_ROWS:,} "
            f"rows; this one has {ring.num_rows:,}.",
        )
    column = column_of(buffer)
    if column is None or not int(view.span.lengths.sum()):
        return
    span = view.span
    lengths = span.lengths
    edges = np.cumsum(lengths) - lengths
    env_ids = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(env_ids)) + np.repeat(span.first - edges, lengths)
    values = column.read(env_ids, positions)
    known = values >= 0
    if not known.any():
        return
    values[~known] = max(float(values.max()), 1.0)
    assert isinstance(sampler, PrioritySampler)
    for first in range(0, len(values), CHUNK_ROWS):
        some = slice(first, first + CHUNK_ROWS)
        sampler.update_priorities(view, env_ids[some], positions[some], values[some])


def age_histogram(
    lengths: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Count the ages of all rows alive, without reading any.

    Args:
        lengths: int64 ``[E]``, rows alive of each environment; their ages are 0 to
            length - 1.

    Returns:
        Edges float64 ``[N + 1]`` of whole ages, and counts int64 ``[N]``.
    """
    longest = int(lengths.max(initial=1)) or 1
    width = -(-longest // AGE_BINS)
    number = -(-longest // width)
    edges = np.arange(number + 1) * width
    counts = np.array(
        [np.clip(lengths - edge, 0, width).sum() for edge in edges[:-1]], np.int64
    )
    return edges.astype(np.float64) - 0.5, counts

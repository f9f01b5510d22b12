"""The discounted return from each step to its episode's end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import number, one_of
from mmreplay.episodes import CUT, FINAL, TERMINATED, TRUNCATED
from mmreplay.errors import SchemaError, called, refuse_masked, shown
from mmreplay.nesting import meant
from mmreplay.schema.convert import widen
from mmreplay.transforms.base import Bound, Fields, Ids, Layer, Over, RowReads
from mmreplay.transforms.base_steps import BaseSteps, Where, from_chain_ends
from mmreplay.transforms.checks import label, real
from mmreplay.transforms.outline import Outline, ReadAt

TIME_LIMITS = ("default", "none", "bootstrap")
DISCOUNTS = ("reward", "observation")
BLOCK_STEPS = 128
"""Steps of each episode read at a time."""
SAME_PAGE = 16
"""Rows, of those packed, that mostly lie in one page or two."""

Floats = NDArray[np.float64]
ValueFunction = Callable[[Mapping[str, NDArray[np.generic]]], Any]
"""Final observations by path, ``[M, *shape]`` each, to values ``[M]``."""


@dataclass(frozen=True, slots=True)
class DiscountedReturn:
    """What is still to come: ``G[t] = r[t] + gamma * d[t] * G[t + 1]``.

    ``d`` is 1, or a field of discounts per step, as of dm_env, where it comes with the
    reward. In alf it stands with the observation that a step starts from, and counts
    from that step's reward on: ``G[t] = d[t] * (r[t] + gamma * G[t + 1])``. After an
    episode's last step G is 0 if it terminated. If it was truncated, `time_limit` says:

    - ``"default"``: its returns are not known;
    - ``"none"``: as if it had terminated, the limit being part of the task;
    - ``"bootstrap"``: G is what `value_fn` gives for the final observation, and not
      known where that was not stored.

    Returns that are not known, and all of an episode that is still running or was
    broken off, are `default`; but a discount of 0 on the way makes those before it
    known.

    Makes a field of the reward's shape, float32, or float64 where the stored dtype is
    that exact; reckoned in float64. Costs a read of the rewards from each step to its
    episode's end, each once a batch, and a look-up in the episode index. Stands before
    transforms that change rewards.

    Attributes:
        gamma: Discount per step, in [0, 1].
        default: Return of steps whose return is not known.
        clip: Bounds of each reward, before it is summed; None for none.
        time_limit: One of ``"default"``, ``"none"``, ``"bootstrap"``.
        value_fn: For ``"bootstrap"``: observation leaves by path, as they are stored,
            ``[M, *shape]`` each, to ``[M]``.
        discount: Path of a field of discounts.
        discount_with: What it stands with: ``"reward"`` or ``"observation"``.
        name: Of the field made.

    Example:
        >>> returns = mr.DiscountedReturn(gamma=0.99)
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", transforms=[returns])
        >>> buffer.sample(32)["discounted_return"].shape
        (32,)
    """

    described: ClassVar[bool] = True

    gamma: float
    default: float = math.nan
    clip: tuple[float, float] | None = None
    time_limit: str = "default"
    value_fn: ValueFunction | None = None
    discount: str | None = None
    discount_with: str = "reward"
    name: str = "discounted_return"

    def __post_init__(self) -> None:
        """Check the arguments."""
        number("DiscountedReturn gamma", self.gamma, 0, "0.99 is usual.", maximum=1)
        number("DiscountedReturn default", self.default, finite=False, nan=True)
        label("DiscountedReturn name", self.name)
        for option, value, known in (
            ("time_limit", self.time_limit, TIME_LIMITS),
            ("discount_with", self.discount_with, DISCOUNTS),
        ):
            one_of(f"DiscountedReturn {option}", value, known)
        if self.value_fn is not None and not callable(self.value_fn):
            raise SchemaError(
                "DiscountedReturn value_fn must be a function of the final "
                f"observations, got {shown(self.value_fn)}. Pass one, or leave it out."
            )
        if (self.time_limit == "bootstrap") != (self.value_fn is not None):
            raise SchemaError(
                "DiscountedReturn: value_fn and time_limit='bootstrap' must be passed "
                f"together, got time_limit {self.time_limit!r} with value_fn "
                f"{self.value_fn!r}. Pass both or neither."
            )
        if self.clip is not None and not _ordered(self.clip):
            raise SchemaError(
                "DiscountedReturn clip must be (lowest, highest), got "
                f"{shown(self.clip)}. Pass the lower bound first."
            )

    @property
    def reads_next(self) -> bool:
        """Whether it needs next observations: the final ones, to bootstrap from."""
        return self.time_limit == "bootstrap"

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no single reward as stored, no such discount, or no
                observation of one shape, as stored, to bootstrap from.
        """
        reward = outline.schema.role("reward")
        extra = () if self.discount is None else (self.discount,)
        before = "put DiscountedReturn before the transforms that change it."
        if reward is None or not outline.stored(reward):
            raise SchemaError(
                "DiscountedReturn: the reward must be one stored field that no "
                f"transform changed, got {reward!r}. Name the reward in the "
                f"schema's roles, and {before}"
            )
        for path in extra:
            if not outline.stored(path):
                way_out = before.capitalize()
                if path not in outline.fields:
                    way_out = meant(path, outline.schema.paths)
                raise SchemaError(
                    "DiscountedReturn: discount must be a stored field that no "
                    f"transform changed, got {path!r}. {way_out}"
                )
        outline.refuse_varying((reward, *extra), "DiscountedReturn")
        if self.time_limit == "bootstrap":
            if outline.schema.num_agents is not None:
                raise SchemaError(
                    "DiscountedReturn: time_limit='bootstrap' needs one value of "
                    "terminated and truncated a step, got values per agent. Use 'default' "
                    "or 'none'."
                )
            if not outline.next_obs:
                raise SchemaError(
                    "DiscountedReturn: value_fn is a function of observations, but the "
                    "schema names no observation. Name it in the schema's roles, or "
                    "use time_limit='default' or 'none'."
                )
            top = outline.schema.role_paths("observation")
            outline.refuse_varying(top, "DiscountedReturn")
            for path in top:
                if not outline.stored(path):
                    raise SchemaError(
                        "DiscountedReturn: value_fn gets observations as they are "
                        f"stored, but {' and '.join(outline.changed_by[path])} changed "
                        f"{path!r}. Put DiscountedReturn before it."
                    )
        if self.discount is not None and outline.fields[self.discount].shape:
            raise SchemaError(
                f"DiscountedReturn: {self.discount!r} must be one discount a step, "
                f"got shape {list(outline.fields[self.discount].shape)}. Name a "
                "scalar field."
            )
        field = real(outline.fields[reward])
        above = outline.with_field(self.name, field, ReadAt.HERE, "DiscountedReturn")
        if math.isnan(self.default):
            above = replace(above, unknown=above.unknown | {self.name})

        def over(below: Layer, base_steps: BaseSteps) -> Layer:
            return _Returns(below, base_steps, self, outline)

        def elsewhere(base_steps: BaseSteps) -> Iterator[RowReads]:
            _, end = base_steps.rows.locate(base_steps.env_ids, base_steps.positions)
            last = np.maximum(base_steps.positions, end - 1)[:, None]
            rows = base_steps.positions[:, None] + np.arange(0, BLOCK_STEPS, SAME_PAGE)
            rows = np.concatenate([np.minimum(rows, last), last], axis=1)
            paths = (outline.schema.roles["reward"],)
            yield paths, np.repeat(base_steps.env_ids, rows.shape[1]), rows.reshape(-1)

        return Bound(above, over, elsewhere)


def _ordered(bounds: tuple[float, float]) -> bool:
    """Whether they are two numbers, the lower one first."""
    try:
        low, high = bounds
        return bool(low <= high)
    except (TypeError, ValueError):
        return False


class _Returns(Over):
    """Rows with their returns."""

    def __init__(
        self, below: Layer, base_steps: BaseSteps, spec: DiscountedReturn, outline: Outline
    ) -> None:
        super().__init__(below, base_steps)
        self._spec = spec
        self._outline = outline

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Fields of rows, and their returns; see `Layer.read`."""
        name = self._spec.name
        fields = self.below.read(tuple(p for p in paths if p != name), rows)
        if name in paths:
            positions = self.base_steps.at(rows)
            env_ids = np.repeat(self.base_steps.env_ids, positions.shape[1])
            returns = self._returns(env_ids, positions.reshape(-1))
            fields[name] = returns.reshape(*positions.shape, *returns.shape[1:])
        return fields

    def _returns(self, env_ids: Ids, rows: Ids) -> NDArray[np.generic]:
        """Returns of rows, ``[M, *shape]``."""
        _, ends = self.base_steps.rows.locate(env_ids, rows)
        order = np.lexsort((rows, env_ids))
        env_ids, starts, ends = env_ids[order], rows[order], ends[order]
        # Each row's rewards are read up to the next row asked for: none twice.
        joined = np.zeros(len(rows), bool)
        joined[:-1] = (env_ids[1:] == env_ids[:-1]) & (ends[1:] == ends[:-1])
        stops = np.where(joined, np.append(starts[1:], 0), ends)
        sums, weights, cut = self._segments(env_ids, starts, stops)
        values, known = self._tails(env_ids, ends)
        for some in from_chain_ends(joined):
            then = some + joined[some]
            known[some] = known[then] | cut[some]
            after = values[then]
            after[cut[some]] = 0
            values[some] = sums[some] + np.einsum("m,m...->m...", weights[some], after)
        values[~known] = self._spec.default
        out = np.empty_like(values)
        out[order] = values
        return out.astype(self._outline_field().numpy)

    def _outline_field(self) -> Any:
        reward = self._outline.schema.roles["reward"]
        return real(self._outline.fields[reward])

    def _segments(
        self, env_ids: Ids, starts: Ids, stops: Ids
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Discounted sums of rewards in ``[start, stop)``, and what is left after.

        Returns:
            Sums ``[M, *shape]``, the products of all discounts ``[M]``, and where one
            of those is 0, bool ``[M]``: a product may be that by rounding alone.
        """
        spec, rows = self._spec, self.base_steps.rows
        reward = self._outline.schema.roles["reward"]
        shape = self._outline.fields[reward].shape
        sums, weights = np.zeros((len(starts), *shape)), np.ones(len(starts))
        cut = np.zeros(len(starts), bool)
        done = starts.copy()
        while len(active := np.flatnonzero(done < stops)):
            steps = done[active, None] + np.arange(BLOCK_STEPS)
            steps = steps[:, : int((stops - done)[active].max())]
            within = steps < stops[active, None]
            flat = np.minimum(steps, stops[active, None] - 1).reshape(-1)
            paths = tuple({reward: 0, **({spec.discount: 0} if spec.discount else {})})
            fields = rows.read(paths, np.repeat(env_ids[active], steps.shape[1]), flat)
            here, after, zero = self._weights(fields, within)
            some = widen(fields[reward], self._outline.fields[reward])
            wide = some.astype(np.float64).reshape(*steps.shape, *shape)
            if spec.clip is not None:
                np.clip(wide, *spec.clip, out=wide)
            # Not left to the weight: 0 times infinity is no 0.
            wide[(here == 0) | cut[active, None]] = 0
            sums[active] += np.einsum("m,mk,mk...->m...", weights[active], here, wide)
            weights[active] *= after
            cut[active] |= zero
            done[active] += steps.shape[1]
        return sums, weights, cut

    def _weights(
        self, fields: Fields, within: NDArray[np.bool_]
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Weight of each reward of a block ``[M, K]``, and of what follows ``[M]``.

        And whether a discount is 0, bool ``[M]``.
        """
        spec = self._spec
        factors = np.full(within.shape, spec.gamma)
        discounts = np.ones(within.shape)
        if spec.discount is not None:
            field = self._outline.fields[spec.discount]
            values = widen(fields[spec.discount], field).astype(np.float64)
            discounts = values.reshape(within.shape)
        factors = np.where(within, spec.gamma * discounts, 1.0)
        products = np.cumprod(factors, axis=1)
        here = np.ones(within.shape)
        here[:, 1:] = products[:, :-1]
        if spec.discount_with == "observation":
            here = here * discounts
        zero = (factors == 0).any(axis=1)
        return np.where(within, here, 0.0), products[:, -1], zero

    def _tails(self, env_ids: Ids, ends: Ids) -> tuple[Floats, NDArray[np.bool_]]:
        """What follows each episode's last step ``[M, *shape]``, and if it is known."""
        rows, spec = self.base_steps.rows, self._spec
        reward = self._outline.schema.roles["reward"]
        values = np.zeros((len(ends), *self._outline.fields[reward].shape))
        heads = rows.heads[env_ids]
        here = rows.flags(env_ids, ends - 1)
        after = rows.flags(env_ids, np.minimum(ends, heads - 1))
        after = np.where(ends < heads, after, np.uint8(0))
        known = (here & TERMINATED) != 0
        truncated = (((here & TRUNCATED) | (after & CUT)) != 0) & ~known
        if spec.time_limit == "none":
            known |= truncated
        if spec.time_limit == "bootstrap":
            stored = not self._outline.derived
            final = truncated & (stored | ((after & FINAL) != 0))
            which = np.flatnonzero(final)
            if len(which):
                values[which] = self._values(env_ids[which], ends[which])
            known |= final
        return values, known

    def _values(self, env_ids: Ids, ends: Ids) -> Floats:
        """What `value_fn` gives for the final observations."""
        outline, spec = self._outline, self._spec
        top = outline.schema.role_paths("observation")
        shift = 0 if outline.derived else 1
        names = {(p if outline.derived else outline.next_obs[p]): p for p in top}
        found = self.base_steps.rows.read(tuple(names), env_ids, ends - shift)
        given = {names[n]: widen(a, outline.schema.fields[names[n]]) for n, a in found.items()}
        assert spec.value_fn is not None
        found = called("DiscountedReturn value_fn", spec.value_fn, given)
        refuse_masked(found, "DiscountedReturn value_fn")
        values = np.asarray(found, np.float64)
        reward = outline.schema.roles["reward"]
        expected = (len(ends), *outline.fields[reward].shape)
        if values.shape != expected:
            raise SchemaError(
                f"DiscountedReturn value_fn must return {list(expected)}, got "
                f"{list(values.shape)}. Return a value for each final observation."
            )
        return values

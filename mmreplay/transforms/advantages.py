"""Lambda returns and generalized advantage estimates, from stored steps and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer, number
from mmreplay.episodes import FINAL, TERMINATED
from mmreplay.errors import SchemaError, called, refuse_masked, shown
from mmreplay.nesting import meant
from mmreplay.schema.convert import widen
from mmreplay.transforms.base import Bound, Fields, Ids, Layer, Over, RowReads
from mmreplay.transforms.base_steps import BaseSteps, Where, from_chain_ends
from mmreplay.transforms.checks import label, real
from mmreplay.transforms.outline import Outline, ReadAt

BLOCK_STEPS = 128
"""Steps after each row that are read at a time."""
BLOCK_ROWS = 4096
"""Rows whose observations are read at a time, where a function values them."""
SAME_PAGE = 16
"""Rows, of those packed, that mostly lie in one page or two."""

Floats = NDArray[np.float64]
ValueFunction = Callable[[Mapping[str, NDArray[np.generic]]], Any]
"""Observations by path, ``[M, *shape]`` each, to values ``[M]``."""


@dataclass(frozen=True, slots=True)
class LambdaReturn:
    """The lambda return of each step, TD(lambda)'s target (Sutton and Barto, 12.1).

    ::

        G[t] = r[t] + gamma * ((1 - lam) * V(s[t+1]) + lam * G[t+1])

    After a terminated step ``G[t+1]`` and ``V(s[t+1])`` are 0. After the last step
    whose next value is known, ``G[t+1] = V(s[t+1])``: a truncated episode is
    bootstrapped, and so is one that is still running, at the newest step. With
    `horizon` that happens after so many steps at the latest.

    The next value of a step is that of the episode's next row. After the last step of
    an episode it is what `bootstrap` gives; see there. Where it is not known, that
    step's return is `default`, and the steps before it bootstrap from its value.

    Makes a field of the reward's shape, float32, or float64 where the stored dtype is
    that exact; computed in float64. Reads the rewards and values from each step to its
    episode's end, each once a batch, or of `horizon` steps. Stands before transforms
    that change rewards.

    Attributes:
        gamma: Discount per step, in [0, 1].
        lam: Lambda, in [0, 1]: 0 is the one-step target, 1 the Monte Carlo return.
        value: Path of a stored field of V(s[t]), of the reward's shape, such as PPO
            stores; it may be mutable. Or a function of observations: it gets the
            leaves by path, ``[M, *shape]`` each, as the transforms before show them,
            and returns ``[M]``, arrays or tensors. It is called several times a batch.
        bootstrap: V of the observation after an episode's last step. Path of a stored
            field of V(s[t+1]), of which the last step's is read; or a function of
            final observations. By default `value`, if that is a function, else the
            field `value` of the episode's final row. That row is the environment's
            own with ``autoreset="next_step"`` alone: elsewhere it holds nothing but
            an observation, and values of truncated ends are not known.
        horizon: Steps of each return at most; None for all.
        default: Return of steps whose next value is not known.
        name: Name of the field made.

    Example:
        >>> import mmreplay as mr
        >>> fields = dict.fromkeys(["reward", "value"], mr.Field((), "float32"))
        >>> fields["terminated"] = mr.Field((), "bool")
        >>> transform = mr.LambdaReturn(gamma=0.5, lam=0.5)
        >>> buffer = mr.ReplayBuffer.create(
        ...     None, mr.Schema(fields), 8, engine="memory", transforms=[transform]
        ... )
        >>> for end in (False, True):
        ...     buffer.add(reward=1.0, value=4.0, terminated=end)
        >>> buffer.take(0, [0, 1])["lambda_return"].tolist()
        [2.25, 1.0]
    """

    described: ClassVar[bool] = True

    gamma: float
    lam: float = 0.95
    value: str | ValueFunction = "value"
    bootstrap: str | ValueFunction | None = None
    horizon: int | None = None
    default: float = math.nan
    name: str = "lambda_return"

    reads_next = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check(self)

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no single reward as stored, or no such value.
        """
        return _bound(self, outline, {self.name: False})


@dataclass(frozen=True, slots=True)
class GAE:
    """Generalized advantage estimates (Schulman et al. 2016), and value targets.

    ::

        delta[t] = r[t] + gamma * V(s[t+1]) - V(s[t])
        A[t]     = delta[t] + gamma * lam * A[t+1]
        target   = A[t] + V(s[t])

    After a terminated step ``V(s[t+1])`` and ``A[t+1]`` are 0; after a truncated one,
    and after the newest step of a running episode, ``A[t+1]`` is 0 and the value stays.
    The target is the lambda return: see `LambdaReturn`, which has the same arguments,
    for what is read, where values come from and when they are not known.

    Advantages are not normalized: do it over the batches that you train on.

    Attributes:
        gamma: Discount per step, in [0, 1].
        lam: Lambda, in [0, 1].
        value: Path of a stored field of V(s[t]), or a function of observations.
        bootstrap: V of the observation after an episode's last step, a path or a
            function.
        horizon: Steps of each estimate at most; None for all.
        default: Advantage and target of steps whose next value is not known.
        name: Name of the field of advantages.
        target: Name of the field of targets; None for none.

    Example:
        >>> import mmreplay as mr
        >>> fields = dict.fromkeys(["reward", "value"], mr.Field((), "float32"))
        >>> fields["terminated"] = mr.Field((), "bool")
        >>> transform = mr.GAE(gamma=0.5, lam=0.5)
        >>> buffer = mr.ReplayBuffer.create(
        ...     None, mr.Schema(fields), 8, engine="memory", transforms=[transform]
        ... )
        >>> for end in (False, True):
        ...     buffer.add(reward=1.0, value=4.0, terminated=end)
        >>> batch = buffer.take(0, [0, 1])
        >>> batch["advantage"].tolist(), batch["value_target"].tolist()
        ([-1.75, -3.0], [2.25, 1.0])
    """

    described: ClassVar[bool] = True

    gamma: float
    lam: float = 0.95
    value: str | ValueFunction = "value"
    bootstrap: str | ValueFunction | None = None
    horizon: int | None = None
    default: float = math.nan
    name: str = "advantage"
    target: str | None = "value_target"

    reads_next = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check(self)
        if self.target is not None:
            label("GAE target", self.target)

    def bind(self, outline: Outline) -> Bound:
        """Fit it; see `Transform.bind`.

        Raises:
            SchemaError: There is no single reward as stored, or no such value.
        """
        targets = {} if self.target is None else {self.target: False}
        return _bound(self, outline, {self.name: True, **targets})


def _check(spec: LambdaReturn | GAE) -> None:
    """Check the arguments that both have.

    Raises:
        SchemaError: One is refused.
    """
    who = type(spec).__name__
    number(f"{who} gamma", spec.gamma, 0, "0.99 is usual.", maximum=1)
    number(f"{who} lam", spec.lam, 0, "0.95 is usual.", maximum=1)
    number(f"{who} default", spec.default, finite=False, nan=True)
    label(f"{who} name", spec.name)
    if spec.horizon is not None:
        integer(f"{who} horizon", spec.horizon, 1, "Leave it out for whole episodes.")
    given = [("value", spec.value)]
    if spec.bootstrap is not None:
        given.append(("bootstrap", spec.bootstrap))
    for option, value in given:
        if not callable(value) and not (isinstance(value, str) and value):
            raise SchemaError(
                f"{who} {option} must be the path of a stored field or a function of "
                f"observations, got {shown(value)}. Pass one of them."
            )


def _bound(spec: LambdaReturn | GAE, outline: Outline, made: Mapping[str, bool]) -> Bound:
    """Fit either to the fields below it.

    Args:
        spec: The transform.
        outline: The fields.
        made: Names of the fields made, and whether V is subtracted.

    Raises:
        SchemaError: There is no single reward as stored, or no such value; or ends are
            stored per agent.
    """
    who = type(spec).__name__
    reward = _reward_of(outline, who)
    read = [reward]
    for source in (spec.value, spec.bootstrap):
        if isinstance(source, str):
            read.append(source)
        elif source is not None:
            # A function of observations gets all of their leaves.
            read += outline.next_obs
    outline.refuse_varying(read, who)
    _check_source(f"{who} value", spec.value, outline, reward)
    _check_source(f"{who} bootstrap", spec.bootstrap, outline, reward)
    above = outline
    for name in made:
        above = above.with_field(name, real(outline.fields[reward]), ReadAt.HERE, who)
    if math.isnan(spec.default):
        above = replace(above, unknown=above.unknown | made.keys())
    sources = (spec.value, spec.bootstrap)
    paths = {path: 0 for path in (reward, *sources) if isinstance(path, str)}
    observed = {path: 0 for path in outline.next_obs if path in outline.schema.fields}
    if callable(spec.value):
        paths |= observed

    def over(below: Layer, base_steps: BaseSteps) -> Layer:
        return _Estimated(below, base_steps, spec, outline, made)

    def elsewhere(base_steps: BaseSteps) -> Iterator[RowReads]:
        first = base_steps.positions[:, None]
        _, end = base_steps.rows.locate(base_steps.env_ids, base_steps.positions)
        last, span = np.maximum(base_steps.positions, end)[:, None], BLOCK_STEPS
        if spec.horizon is not None:
            last, span = np.minimum(last, first + spec.horizon), spec.horizon
        rows = np.minimum(first + np.arange(0, span, SAME_PAGE), last)
        rows = np.concatenate([rows, np.maximum(last - 1, first), last], axis=1)
        env_ids = np.repeat(base_steps.env_ids, rows.shape[1])
        yield tuple(paths), env_ids, rows.reshape(-1)
        if callable(spec.bootstrap):
            rows = np.maximum(end[:, None] - (not outline.derived), first)
            yield tuple(observed), base_steps.env_ids, rows.reshape(-1)

    return Bound(above, over, elsewhere)


def _reward_of(outline: Outline, who: str) -> str:
    """The path of the reward, of which each step has one, with one end.

    Raises:
        SchemaError: There is no single reward as stored, or ends are of agents.
    """
    reward = outline.schema.role("reward")
    if reward is None or not outline.stored(reward):
        raise SchemaError(
            f"{who}: the reward must be one stored field that no transform changed, "
            f"got {reward!r}. Name the reward in the schema's roles, and put {who} "
            "before the transforms that change it."
        )
    if outline.schema.num_agents is not None:
        raise SchemaError(
            f"{who}: terminated and truncated must have one value a step, got "
            f"{outline.schema.num_agents} agents a step. Store one bool for each "
            "step: an agent that terminated before the episode ends has no next value."
        )
    return reward


def _check_source(
    what: str, source: str | ValueFunction | None, outline: Outline, reward: str
) -> None:
    """Check where values come from.

    Raises:
        SchemaError: The field is not stored, or not one value for each reward; or there
            are no observations for the function.
    """
    if isinstance(source, str):
        if not outline.stored(source) or outline.fields[source].dtype == "bool":
            way_out = "Add it to the schema, or pass a function of observations."
            if source not in outline.fields:
                way_out = meant(source, outline.schema.paths, way_out)
            raise SchemaError(
                f"{what} must be a stored field of numbers that no "
                f"transform changed, got {source!r}. {way_out}"
            )
        shape, wanted = outline.fields[source].shape, outline.fields[reward].shape
        if shape != wanted:
            raise SchemaError(
                f"{what} must have shape {list(wanted)} as {reward!r}, got "
                f"{source!r} of shape {list(shape)}. Store a value for each reward."
            )
    elif source is not None and not outline.next_obs:
        raise SchemaError(
            f"{what} is a function of observations, but the schema names "
            "no observation. Name it in the schema's roles, or pass the path of a "
            "stored field."
        )


class _Estimated(Over):
    """Rows with their lambda returns or advantages."""

    def __init__(
        self,
        below: Layer,
        base_steps: BaseSteps,
        spec: LambdaReturn | GAE,
        outline: Outline,
        made: Mapping[str, bool],
    ) -> None:
        super().__init__(below, base_steps)
        self._spec = spec
        self._outline = outline
        self._made = made
        self._reward = outline.schema.roles["reward"]
        self._shape = outline.fields[self._reward].shape

    def read(self, paths: tuple[str, ...], rows: Where | Ids) -> Fields:
        """Fields of rows, and what is made of them; see `Layer.read`."""
        mine = [name for name in paths if name in self._made]
        rest = tuple(name for name in paths if name not in self._made)
        found = dict(self.below.read(rest, rows))
        columns: dict[str, list[Floats]] = {name: [] for name in mine}
        for starts in np.moveaxis(self.base_steps.at(rows), 1, 0) if mine else ():
            returns, known = self._returns(starts)
            values = np.zeros_like(returns)
            if any(self._made[name] for name in mine):
                values[known] = self._values(starts[:, None], known[:, None])
            for name in mine:
                made = returns - values if self._made[name] else returns.copy()
                made[~known] = self._spec.default
                columns[name].append(made)
        dtype = real(self._outline.fields[self._reward]).numpy
        for name in mine:
            found[name] = np.stack(columns[name], axis=1).astype(dtype)
        return found

    def _returns(self, starts: Ids) -> tuple[Floats, NDArray[np.bool_]]:
        """Lambda returns of one row a step drawn.

        Args:
            starts: int64 ``[N]``, positions.

        Returns:
            Float64 ``[N, *shape]``, and where they are known, bool ``[N]``.
        """
        spec, env_ids = self._spec, self.base_steps.env_ids
        _, ends = self.base_steps.rows.locate(env_ids, starts)
        tails, terminated, bootstrapped = self._tails(env_ids, ends)
        # One past the last step whose next value is known.
        stops = ends - ~(terminated | bootstrapped)
        known = starts < stops
        if spec.horizon is not None:
            stops = np.minimum(stops, starts + spec.horizon)
        # Each row is read up to the next row asked for in its episode: none twice.
        order = np.lexsort((starts, env_ids))
        here, after = order[:-1], order[1:]
        chained = np.zeros(len(order), bool)
        if spec.horizon is None:
            chained[:-1] = (env_ids[here] == env_ids[after]) & known[after]
            chained[:-1] &= ends[here] == ends[after]
        joined = np.zeros(len(order), bool)
        joined[order] = chained
        stops[here[chained[:-1]]] = starts[after[chained[:-1]]]
        sums, weights = self._segments(starts, stops, ends, joined, tails, terminated)
        returns = np.zeros_like(sums)
        for some in from_chain_ends(chained):
            then = returns[order[some + chained[some]]]
            weight = weights[order[some]]
            then[weight == 0] = 0  # not left to the weight: 0 times infinity is no 0
            one = order[some]
            returns[one] = sums[one] + np.einsum("m,m...->m...", weight, then)
        return returns, known

    def _segments(
        self,
        starts: Ids,
        stops: Ids,
        ends: Ids,
        joined: NDArray[np.bool_],
        tails: Floats,
        terminated: NDArray[np.bool_],
    ) -> tuple[Floats, Floats]:
        """Sums over ``[start, stop)``, and the weight of the return that follows.

        A return is ``a[t] + b[t] * G[t+1]``, with ``b = gamma * lam`` and ``a`` of the
        reward and of ``1 - lam`` of the next value; at its last step b is 0, and the
        next value counts whole.

        Args:
            starts: int64 ``[N]``.
            stops: int64 ``[N]``.
            ends: int64 ``[N]``, of the episodes.
            joined: bool ``[N]``, another return follows.
            tails: Float64 ``[N, *shape]``, values after the episodes.
            terminated: bool ``[N]``.

        Returns:
            Float64 ``[N, *shape]`` and ``[N]``.
        """
        spec, env_ids, rows = self._spec, self.base_steps.env_ids, self.base_steps.rows
        field = self._outline.fields[self._reward]
        sums, weights = np.zeros((len(starts), *self._shape)), np.ones(len(starts))
        block = BLOCK_STEPS
        if callable(spec.value):
            block = max(1, min(block, BLOCK_ROWS // max(1, len(starts))))
        done = starts.copy()
        while len(active := np.flatnonzero(done < stops)):
            count = min(block, int((stops - done)[active].max()))
            steps = done[active, None] + np.arange(count)
            within = steps < stops[active, None]
            flat = np.minimum(steps, stops[active, None] - 1).reshape(-1)
            found = rows.read((self._reward,), np.repeat(env_ids[active], count), flat)
            terms = widen(found[self._reward], field).astype(np.float64)
            terms = terms.reshape(*steps.shape, *self._shape)
            at_end = within & (steps == ends[active, None] - 1)
            over = at_end & terminated[active, None]
            last = within & (steps == stops[active, None] - 1)
            last &= ~joined[active, None]
            mixed = np.where(last, spec.gamma, spec.gamma * (1 - spec.lam))
            mixed = np.where(within & ~over, mixed, 0.0)
            factors = np.where(last | over, 0.0, spec.gamma * spec.lam)
            products = np.cumprod(np.where(within, factors, 1.0), axis=1)
            here = np.ones(steps.shape)
            here[:, 1:] = products[:, :-1]
            here = np.where(within, here * weights[active, None], 0.0)
            # A value is read only where it counts: it may not be there elsewhere.
            counts = (mixed != 0) & (here != 0)
            next_obs = np.zeros((*steps.shape, *self._shape))
            wanted = np.zeros((len(starts), count), bool)
            wanted[active] = counts & ~at_end
            places = np.repeat(self.base_steps.positions[:, None], count, axis=1)
            places[wanted] = (steps + 1)[wanted[active]]
            next_obs[wanted[active]] = self._values(places, wanted)
            tail = counts & at_end
            next_obs[tail] = tails[active][tail.nonzero()[0]]
            terms += np.einsum("mk,mk...->mk...", mixed, next_obs)
            terms[here == 0] = 0
            sums[active] += np.einsum("mk,mk...->m...", here, terms)
            weights[active] *= products[:, -1]
            done[active] += count
        return sums, weights

    def _tails(
        self, env_ids: Ids, ends: Ids
    ) -> tuple[Floats, NDArray[np.bool_], NDArray[np.bool_]]:
        """Values after episodes' last steps.

        Args:
            env_ids: int64 ``[N]``.
            ends: int64 ``[N]``, one past those steps.

        Returns:
            Float64 ``[N, *shape]``, 0 where there is none; where the step terminated;
            and where the value is known, bool ``[N]`` each.
        """
        outline, rows, spec = self._outline, self.base_steps.rows, self._spec
        tails = np.zeros((len(ends), *self._shape))
        heads = rows.heads[env_ids]
        terminated = (rows.flags(env_ids, ends - 1) & TERMINATED) != 0
        final = (rows.flags(env_ids, np.minimum(ends, heads - 1)) & FINAL) != 0
        final &= ends < heads
        source = spec.value if spec.bootstrap is None else spec.bootstrap
        if isinstance(source, str):
            shift = 1 if spec.bootstrap is not None else 0
            known = np.full(len(ends), bool(shift)) | (final & outline.final_follows)
            some = known & ~terminated
            if some.any():
                read = rows.read((source,), env_ids[some], ends[some] - shift)
                tails[some] = widen(read[source], outline.fields[source])
            return tails, terminated, known
        known = final if outline.derived else np.ones(len(ends), bool)
        some = (known & ~terminated)[:, None]
        if some.any():
            places = np.where(
                some, (ends - (not outline.derived))[:, None], self.base_steps.positions[:, None]
            )
            tails[some[:, 0]] = self._asked(source, places, some, next_obs=not outline.derived)
        return tails, terminated, known

    def _values(self, rows: Ids, wanted: NDArray[np.bool_]) -> Floats:
        """Values of some rows, float64 ``[M, *shape]``.

        Args:
            rows: int64 ``[N, K]``, all of them alive.
            wanted: bool ``[N, K]``, which ones.
        """
        source = self._spec.value
        if not wanted.any():
            return np.zeros((0, *self._shape))
        if callable(source):
            return self._asked(source, rows, wanted, next_obs=False)
        env_ids = np.broadcast_to(self.base_steps.env_ids[:, None], rows.shape)[wanted]
        found = self.base_steps.rows.read((source,), env_ids, rows[wanted])[source]
        field = self._outline.fields[source]
        return widen(found, field).astype(np.float64)

    def _asked(
        self, function: ValueFunction, rows: Ids, wanted: NDArray[np.bool_], *, next_obs: bool
    ) -> Floats:
        """What a function gives for observations of rows, float64 ``[M, *shape]``.

        Args:
            function: The function.
            rows: int64 ``[N, K]``, all of them alive.
            wanted: bool ``[N, K]``, which ones.
            next_obs: Read the next observations that are stored with the rows.

        Raises:
            SchemaError: It gives no value for each.
        """
        outline = self._outline
        names = {(n if next_obs else path): path for path, n in outline.next_obs.items()}
        found = self.below.read(tuple(names), rows)
        given = {
            path: widen(found[name][wanted], outline.fields[name]) for name, path in names.items()
        }
        who = type(self._spec).__name__
        made: Any = called(f"{who} value function", function, given)
        if hasattr(made, "detach"):
            made = made.detach().cpu()
        refuse_masked(made, f"{who} value function")
        values = np.asarray(made, np.float64)
        expected = (int(wanted.sum()), *self._shape)
        if values.shape != expected:
            raise SchemaError(
                f"{who}: the value function must return {list(expected)}, got "
                f"{list(values.shape)}. Return a value for each observation."
            )
        return values

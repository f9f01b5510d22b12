"""pytorchrl's storages on disk: model-based, off-policy, n-step and prioritized.

Public names, keys and shapes are those of pytorchrl 3.2.15.
docs/migrating/pytorchrl.md lists the differences.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.common.location import StrPath
from mmreplay.adapters.common.values import array_of, check_counts
from mmreplay.adapters.pytorchrl.data import (
    ACT,
    ACTPROBS,
    DONE,
    DONE2,
    ENDED,
    GAMMAS,
    IREW,
    KEY,
    N_STEP,
    OBS,
    OBS2,
    PRIORITIES,
    REW,
    RHS,
    RHS2,
    Columns,
    Gammas,
    Maker,
    first_of,
    nstep_sums,
    put,
    shapes_of,
)
from mmreplay.adapters.pytorchrl.priorities import (
    LIMITS,
    EmphasizingSampler,
    Exponents,
    SequencePriorities,
    priorities_of,
)
from mmreplay.adapters.pytorchrl.ring import RingStorage
from mmreplay.adapters.pytorchrl.sequences import Ids, SequenceStorage
from mmreplay.arguments import is_number, number
from mmreplay.batch import Batch
from mmreplay.buffer.replay_buffer import ReplayBuffer as Ring
from mmreplay.episodes import END, FINAL, START
from mmreplay.errors import EmptyError, SchemaError, undone_by
from mmreplay.nesting import unflatten
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.samplers.recent import window_size
from mmreplay.transforms.base import Transform
from mmreplay.transforms.nstep import NStep

ALGORITHM, EPISODES = "Algorithm", "Episodes"
HerFunction = Callable[..., tuple[Any, Any, Any, Any, Any]]
_gammas_of: WeakKeyDictionary[Ring, Gammas] = WeakKeyDictionary()
"""The gammas that all storages of an open ring share."""


def unchanged(
    o: Any, rhs: Any, o2: Any, rhs2: Any, r: Any, initial_state: Any, final_state: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """The `her_function` that changes nothing, pytorchrl's default."""
    return o, rhs, o2, rhs2, r


class MBReplayBuffer(RingStorage):
    """Storage for model-based algorithms: batches to learn the dynamics from.

    Example:
        >>> make = MBReplayBuffer.create_factory(1_000_000, path="runs/model")
    """

    storage_tensors: ClassVar[tuple[str, ...]] = (OBS, RHS, DONE, ACT, REW, OBS2, RHS2, DONE2)
    _keys_of_none = True

    def __init__(
        self,
        size: int,
        device: Any,
        actor: Any,
        algorithm: Any,
        envs: Any,
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a storage; see `RingStorage`."""
        super().__init__(size, device, actor, algorithm, envs, path=path, resume=resume)
        self.scaler = actor.dynamics_model.standard_scaler
        self._random = np.random.default_rng(self._seed)

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int = 256, num_epochs: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Yield all rows once, shuffled and normalized by the actor's scaler.

        Args:
            num_mini_batch: Not used.
            mini_batch_size: Rows of a batch; the last may have fewer.
            num_epochs: Not used.

        Yields:
            ``train_input`` of observation and action, ``train_label`` of the change of
            the observation and, where the model has no function for it, the reward,
            ``[B, features]`` each, and ``batch_number``.

        Raises:
            EmptyError: There is no row.
            SchemaError: The size is not positive.
        """
        check_counts(mini_batch_size=mini_batch_size)
        inputs, targets = self._examples()
        self.scaler.fit(inputs=inputs, targets=targets)
        inputs, targets = self.scaler.transform(inputs=inputs, targets=targets)
        order = self._random.permutation(len(inputs))
        for index, first in enumerate(range(0, len(order), mini_batch_size)):
            rows = torch.from_numpy(order[first : first + mini_batch_size])
            rows = rows.to(inputs.device)
            yield {"train_input": inputs[rows], "train_label": targets[rows], "batch_number": index}

    def _examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the model for every row."""
        self._settle()
        if self._ring is None or not self.size:
            raise EmptyError(
                "cannot make batches from a storage without rows. Insert transitions first."
            )
        data = self._ring.gather_all().fields
        actions = data[ACT]
        space = self.actor.action_space
        if type(space).__name__ == "Discrete":
            actions = np.eye(int(space.n), dtype=np.float32)[actions[..., 0].astype(int)]
        inputs = np.concatenate([data[OBS], actions], axis=-1)
        targets = data[OBS2] - data[OBS]
        if self.actor.dynamics_model.reward_function is None:
            targets = np.concatenate([targets, data[REW]], axis=-1)
        return self._tensor(inputs), self._tensor(targets)

    def _tensor(self, rows: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.float32, copy=False)).to(self.device)


class ReplayBuffer(SequenceStorage):
    """Storage for off-policy algorithms: uniform draws with replacement.

    Hidden states of actors that are not recurrent are not stored. Batches have one row
    of zeros for them, as those of pytorchrl.

    Example:
        >>> make = ReplayBuffer.create_factory(1_000_000, path="runs/replay")
    """

    storage_tensors: ClassVar[tuple[str, ...]] = (
        OBS,
        RHS,
        DONE,
        ACT,
        REW,
        IREW,
        OBS2,
        RHS2,
        DONE2,
        ACTPROBS,
    )

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int, num_epochs: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Draw batches.

        Args:
            num_mini_batch: How many.
            mini_batch_size: Transitions of each; of a recurrent actor's, as many whole
                sequences as hold more.
            num_epochs: Not used.

        Yields:
            float32 ``[B, *shape]`` by key, or dicts of them; of sequences, B is that of
            all their rows, and of hidden states only the first ones are there.

        Raises:
            EmptyError: There is no transition, or no whole sequence.
        """
        if self.recurrent_actor:
            yield from self._batches(num_mini_batch, mini_batch_size)
            return
        self._settle()
        for _ in range(num_mini_batch):
            yield self._batch(self._drawn(mini_batch_size))

    def _drawn(self, count: int) -> Batch:
        if self._ring is None:
            raise EmptyError(
                f"cannot draw {count} transitions from a storage without any. Insert "
                "transitions first."
            )
        return self._ring.sample(count)

    def _batch(self, drawn: Batch) -> dict[str, Any]:
        found = self._tensors({p: drawn.fields[p] for p in drawn if p in self._paths})
        return found | self._tensors_of_none()

    def _tensors_of_none(self) -> dict[str, Any]:
        """Zeros in place of hidden states, ``[1, *shape]``."""

        def zeros(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: zeros(part) for name, part in value.items()}
            return torch.zeros((1, *value.shape[2:]), device=self.device)

        return {key: zeros(value) for key, value in self._empty.items()}


class NStepReplayBuffer(ReplayBuffer):
    """Draws n-step transitions, made from single steps at each draw.

    The reward is ``sum(gamma**i * r[t + i])`` up to the first end or n steps. The next
    observation and its end are those of the last step of the sum; see `NStep`.

    Example:
        >>> make = NStepReplayBuffer.create_factory(1_000_000, 3, path="runs/nstep")
    """

    _gammas: Gammas

    def __init__(
        self,
        size: int,
        device: Any,
        actor: Any,
        algorithm: Any,
        envs: Any,
        n_step: int = 1,
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a storage.

        Args:
            size: As in `RingStorage`, as are those not listed here.
            device: As there.
            actor: As there.
            algorithm: Has ``gamma``.
            envs: As there.
            n_step: Steps, at least 1.
            path: As there.
            resume: As there.

        Raises:
            SchemaError: n_step is not positive, or gamma is not in [0, 1].
        """
        self._check("n_step", n_step)
        self._check("gamma", algorithm.gamma)
        self._n_step, self._gammas = int(n_step), Gammas(float(algorithm.gamma))
        # What the ring's transform sums by, whatever gamma has become since.
        self._ring_gamma = float(algorithm.gamma)
        super().__init__(size, device, actor, algorithm, envs, path=path, resume=resume)

    @classmethod
    def _check(cls, name: str, value: object) -> None:
        super()._check(name, value)
        if name == "n_step":
            check_counts(n_step=value)
        elif name == "gamma" and not (is_number(value) and 0 <= value <= 1):
            raise SchemaError(
                f"gamma must be a number in [0, 1], got {value!r:.80}. Set another "
                "discount in the algorithm."
            )

    @property
    def n_step(self) -> int:
        """Number of steps in a sum; fixed once there are rows."""
        return self._n_step

    @n_step.setter
    def n_step(self, value: int) -> None:
        self._check("n_step", value)
        if value == self._n_step:
            return
        if self._ring is not None:
            raise SchemaError(
                f"n_step must be {self._n_step} as the storage was made with, got "
                f"{value}. Close it and make it again with resume=True and "
                f"n_step={value}, which then holds for all rows."
            )
        self._n_step = int(value)
        if self._grid is not None:
            self._grid.n_step = int(value)

    @property
    def gamma(self) -> float:
        """Discount of new rows; complete rows keep theirs."""
        return self._gammas.values[-1]

    @gamma.setter
    def gamma(self, value: float) -> None:
        self._check("gamma", value)
        if self._ring is None:
            self._gammas, self._ring_gamma = Gammas(float(value)), float(value)
            return
        self._settle()
        # The newest rows wait for what follows them, unless nothing can.
        head = int(self._ring.heads[0])
        # In place: other storages of the ring share it.
        before = self._gammas.begins.copy(), self._gammas.values.copy()
        self._gammas.begin(max(head - self._n_step + 1, self._cut_at), float(value))
        with undone_by(self._gammas.restore, *before):
            self._note()

    def _make(self, columns: Columns) -> None:
        super()._make(columns)
        _gammas_of[self._made] = self._gammas
        if self._n_step > 1:
            self._note()

    def _open_again(self, sampler: Sampler | None) -> None:
        super()._open_again(sampler)
        if self._ring is not None and self._ring in _gammas_of:
            self._gammas = _gammas_of[self._ring]

    def _recall(self) -> None:
        head, gamma = int(self._made.heads[0]), self.gamma
        stored = self._made.statistics.get(KEY, {}).get(GAMMAS)
        if self._made in _gammas_of:
            self._gammas = _gammas_of[self._made]
        elif stored:
            self._gammas = Gammas(gamma)
            begins = [int(position) for position in stored[0]]
            self._gammas.restore(begins, [float(each) for each in stored[1]])
        # After a power cut, positions above the head are of rows to come.
        self._gammas.begin(head, gamma)
        _gammas_of[self._made] = self._gammas
        super()._recall()
        if self._n_step > 1:
            self._note()

    def _transforms(self) -> tuple[Transform, ...]:
        if self.n_step == 1 or self.recurrent_actor:
            return ()
        return (NStep(self.n_step, self._ring_gamma, REW),)

    def _batch(self, drawn: Batch) -> dict[str, Any]:
        found = super()._batch(drawn)
        if self.n_step == 1:
            return {**found, N_STEP: 1}
        ended = drawn.fields[ENDED].astype(np.float32)
        found[DONE2] = torch.from_numpy(ended[:, None]).to(self.device)
        gammas = self._gammas.at(drawn.positions)
        # Discounts of gammas 0 and 1 do not tell how many steps were summed.
        exact = 0 < self._ring_gamma < 1 or len(self._gammas.values) == 1
        if exact and (gammas == self._ring_gamma).all():
            return {**found, N_STEP: self._summed(drawn)}
        counts, rewards = self._nstep_sums(drawn.env_ids, drawn.positions, gammas)
        found |= self._tensors({REW: rewards.reshape(drawn.fields[REW].shape)})
        return {**found, N_STEP: self._reported_counts(np.where(ended, np.inf, counts))}

    def _nstep_sums(
        self, env_ids: Ids, positions: Ids, gammas: NDArray[np.float64]
    ) -> tuple[Ids, NDArray[np.float64]]:
        """Count and sum the rewards of rows, each by its gamma.

        Args:
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``.
            gammas: float64 ``[B]``.

        Returns:
            Steps that are summed, int64 ``[B]``, and sums, float64 ``[B, features]``.
        """
        ring, envs = self._made, env_ids[:, None]
        steps = positions[:, None] + np.arange(self.n_step + 1)
        written = steps < ring.heads[envs]
        steps = np.minimum(steps, ring.heads[envs] - 1)
        flags = ring.flags(envs, steps)
        ends = (flags & END) != 0
        ends[:, :-1] |= (flags[:, 1:] & (START | FINAL)) != 0
        ends, written, steps = ends[:, :-1], written[:, :-1], steps[:, :-1]
        rewards = ring.get_field(REW, envs, steps)
        summed, sums = nstep_sums(rewards, ends, written, gammas)
        return summed.sum(1), sums

    def _summed(self, drawn: Batch) -> Any:
        """Return the numbers of steps in the sums, from the transform's discounts."""
        if not 0 < self._ring_gamma < 1:
            return self.n_step
        # An end leaves 0, which no power of gamma is: nothing is discounted there.
        with np.errstate(divide="ignore"):
            counts = np.log(drawn.fields["discount"]) / np.log(self._ring_gamma)
        return self._reported_counts(np.where(drawn.fields[ENDED], np.inf, np.rint(counts)))

    def _reported_counts(self, counts: NDArray[np.floating[Any]]) -> Any:
        """Return ``n_step`` of a batch: n, or ``[B, 1]`` if some sums are shorter."""
        if (counts >= self.n_step).all():
            return self.n_step
        counts = np.minimum(counts, self.n_step).astype(np.float32)
        return torch.from_numpy(counts[:, None]).to(self.device)

    def _sequences(self, mini_batch_size: int) -> dict[str, Any]:
        return {N_STEP: self.n_step, **super()._sequences(mini_batch_size)}


class PERBuffer(NStepReplayBuffer, SequencePriorities):
    """Draws transitions in proportion to their errors (Schaul et al. 2016).

    ``P = (error + epsilon) ** alpha / sum``, weights ``(N * P) ** -beta`` over the
    greatest in the storage; new transitions enter at the default error, or at the
    highest in the storage if that is higher. Of a recurrent actor's, whole sequences
    are drawn so: a sequence's error is 0.9 times the highest of its steps' and 0.1
    times their mean (Kapturowski et al. 2019).

    Attributes:
        alpha: Exponent of the errors; may be changed.
        beta: Exponent of the weights; may be changed.
        epsilon: Added to errors; may be changed.
        error: Error of new transitions; may be changed.

    Example:
        >>> make = PERBuffer.create_factory(1_000_000, alpha=0.6, path="runs/per")
    """

    def __init__(
        self,
        size: int,
        device: Any,
        actor: Any,
        algorithm: Any,
        envs: Any,
        n_step: int = 1,
        epsilon: float = 0.0,
        alpha: float = 0.0,
        beta: float = 1.0,
        default_error: float = 1000000,
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a storage.

        Args:
            size: As in `NStepReplayBuffer`, as are those not listed here.
            device: As there.
            actor: As there.
            algorithm: As there.
            envs: As there.
            n_step: As there.
            epsilon: Added to errors.
            alpha: Power of errors; 0 draws uniformly.
            beta: Power of the weights.
            default_error: What new transitions enter at.
            path: As there.
            resume: As there.

        Raises:
            SchemaError: An option is out of range: alpha in [0, 4], beta in [0, 1],
                epsilon at least 0, default_error above 0.
        """
        given = {"epsilon": epsilon, "alpha": alpha, "beta": beta, "default_error": default_error}
        for name, value in given.items():
            self._check(name, value)
        self._powers = Exponents(alpha, beta)
        self._epsilon, self._error = epsilon, default_error
        super().__init__(size, device, actor, algorithm, envs, n_step, path=path, resume=resume)

    @classmethod
    def _check(cls, name: str, value: object) -> None:
        super()._check(name, value)
        least, most = LIMITS.get("default_error" if name == "error" else name, (0, 0))
        if most and not (is_number(value) and least <= value <= most):
            raise SchemaError(
                f"{name} must be a number in [{least:g}, {most:g}], got {value!r:.80}. "
                "Leave it out for the default."
            )

    @property
    def alpha(self) -> float:  # noqa: D102 - an attribute of the class
        return self._powers.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._check("alpha", value)
        self._powers.alpha = value

    @property
    def beta(self) -> float:  # noqa: D102 - an attribute of the class
        return self._powers.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._check("beta", value)
        self._powers.beta = value

    @property
    def epsilon(self) -> float:  # noqa: D102 - an attribute of the class
        return self._epsilon

    @epsilon.setter
    def epsilon(self, value: float) -> None:
        self._check("epsilon", value)
        self._epsilon = value

    @property
    def error(self) -> float:  # noqa: D102 - an attribute of the class
        return self._error

    @error.setter
    def error(self, value: float) -> None:
        self._check("error", value)
        if self._ring is not None and not self.recurrent_actor:
            self._settle()
            priorities, view = self._prioritized.priorities, self._ring.view
            with view.lock:
                # Rows that are there enter at what held when they came.
                priorities.follow(view)
                priorities.initial = float(value)
        self._error = value

    default_error = error
    """The same under the name of the constructor's argument."""

    @property
    def _prioritized(self) -> PrioritizedSampler:
        """The sampler with the priorities of steps."""
        assert isinstance(self._made.sampler, PrioritizedSampler)
        return self._made.sampler

    def _sampler(self) -> Sampler:
        if self.recurrent_actor:
            return super()._sampler()
        return self._by_priority()

    def _by_priority(self) -> PrioritizedSampler:
        return PrioritizedSampler(
            self._powers.alpha_at,
            self._powers.beta_at,
            eps=0.0,
            initial_priority=float(self._error),
            stratified=False,
            normalize="buffer",
            alpha_every=1,
            seed=self._seed,
        )

    def _settle(self) -> None:
        if self._forgotten is None or self.recurrent_actor or self._ring is None:
            super()._settle()
            return
        sampler, (first, stop) = self._prioritized, self._alive()
        errors = self._step_errors(first, stop)
        super()._settle()
        # Kept rows were copied forward, to end at the mark.
        positions = self._mark - stop + np.arange(first, stop)
        for env_id, each in enumerate(errors):
            with self._ring.view.lock:
                ids = np.full(len(positions), env_id)
                sampler.update_priorities(self._ring.view, ids, positions, each)

    def _step_errors(self, first: int, stop: int) -> list[NDArray[np.float32]]:
        """Errors of rows ``[first, stop)``, float32 ``[T]`` of each environment."""
        sampler = self._prioritized
        with self._made.view.lock:
            sampler.priorities.follow(self._made.view)
            return priorities_of(sampler, first, stop)

    def _next_to(self, first: int, stop: int) -> dict[str, Any]:
        """Return the priorities of rows, float64 ``[T, num_proc, 1]``."""
        if self._ring is None:
            return {}
        if self.recurrent_actor:
            errors = self._sequence_priorities(first, stop)
        else:
            errors = np.stack(self._step_errors(first, stop), 1).astype(np.float64)
        return {PRIORITIES: errors[..., None] ** self.alpha}

    def _batch(self, drawn: Batch) -> dict[str, Any]:
        sequences = np.stack([drawn.env_ids, drawn.positions], axis=1)
        return {**super()._batch(drawn), **self._weights(drawn), "idxs": sequences}

    def _weights(self, drawn: Batch) -> dict[str, Any]:
        """Importance weights of a batch, float32 ``[B, 1]``; 1.0 without priorities."""
        if self.alpha == 0:
            return {"per_weights": 1.0}
        return {"per_weights": torch.from_numpy(drawn.weights[:, None]).to(self.device)}

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Set the errors of the transitions of a batch, and return the info.

        Args:
            batch: What `generate_batches` gave; its ``idxs`` are taken out.
            info: ``info["Algorithm"]["errors"]`` are numbers ``[B]`` or ``[B, 1]``, at
                least 0; of sequences, those of all rows, or of all but the overlaps.

        Raises:
            SchemaError: There are none, or they do not fit.
        """
        if not isinstance(batch.get("per_weights"), torch.Tensor):
            return info
        if "errors" not in info[ALGORITHM]:
            raise SchemaError(
                f"after_gradients needs 'errors', got {list(info[ALGORITHM])} of the "
                "algorithm. Use an algorithm that returns TD errors."
            )
        sequences = batch.pop("idxs")
        errors = array_of(info[ALGORITHM]["errors"]).reshape(-1) + self.epsilon
        if self.recurrent_actor:
            self._learned(sequences, errors)
            return info
        view = self._made.view
        with view.lock:
            self._prioritized.update_priorities(view, sequences[:, 0], sequences[:, 1], errors)
        return info


class EREBuffer(PERBuffer):
    """Draws from the newest transitions, in a window that shrinks from batch to batch.

    Emphasizing Recent Experience (Wang and Ross 2019): of N transitions, batch k of K
    is from the newest ``max(N * eta ** (1000 * k / K), cmin)``, k from 0; of less than
    cmin all are drawn uniformly. Priorities, where alpha is not 0, count within the
    window, as their weights do. Of a recurrent actor's, the newest whole sequences of
    each environment are drawn so, N and cmin being numbers of them.

    Attributes:
        eta: Rate at which the window shrinks; `update_eta` adapts it.
        initial_eta: The eta that the storage was made with, and the least one.
        cmin: Transitions that the window has at least.

    Example:
        >>> make = EREBuffer.create_factory(1_000_000, eta=0.996, path="runs/ere")
    """

    def __init__(
        self,
        size: int,
        device: Any,
        actor: Any,
        algorithm: Any,
        envs: Any,
        n_step: int = 1,
        epsilon: float = 0.0,
        alpha: float = 0.0,
        beta: float = 1.0,
        default_error: float = 1000000,
        eta: float = 1.0,
        cmin: int = 5000,
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a storage.

        Args:
            size: As in `PERBuffer`, as are those not listed here.
            device: As there.
            actor: As there.
            algorithm: As there.
            envs: As there.
            n_step: As there.
            epsilon: As there.
            alpha: As there.
            beta: As there.
            default_error: As there.
            eta: How fast the window shrinks, in ``(0, 1]``; 1 draws from everything.
            cmin: Transitions that the window has at least.
            path: As there.
            resume: As there.

        Raises:
            SchemaError: As there; or eta or cmin is out of range.
        """
        self._check("eta", eta)
        self._check("cmin", cmin)
        self.eta, self.initial_eta, self.cmin = eta, eta, int(cmin)
        self.eps_reward: deque[float] = deque(maxlen=20)
        self.max_grad_rew, self.min_grad_rew = -np.inf, 0.0
        self._share = 1.0
        super().__init__(
            size,
            device,
            actor,
            algorithm,
            envs,
            n_step,
            epsilon,
            alpha,
            beta,
            default_error,
            path=path,
            resume=resume,
        )

    @classmethod
    def _check(cls, name: str, value: object) -> None:
        super()._check(name, value)
        if name in ("eta", "initial_eta"):
            number(name, value, above=0, maximum=1, way_out="1 draws from all steps.")
        elif name == "cmin":
            check_counts(1, cmin=value)

    def _sampler(self) -> Sampler:
        if self.recurrent_actor:
            return super()._sampler()
        return EmphasizingSampler(self._powers, self._by_priority(), self.cmin, self._seed)

    @property
    def _emphasizing(self) -> EmphasizingSampler:
        assert isinstance(self._made.sampler, EmphasizingSampler)
        return self._made.sampler

    @property
    def _prioritized(self) -> PrioritizedSampler:
        return self._emphasizing.prioritized

    def generate_batches(
        self, num_mini_batch: int, mini_batch_size: int, num_epochs: int = 1
    ) -> Iterator[dict[str, Any]]:
        """Draw batches; see `ReplayBuffer.generate_batches`.

        Batches have ``ck``, the size of the window, as well, and ``per_weights`` only
        where priorities count.
        """
        self._settle()
        for k in range(num_mini_batch):
            self._share = self.eta ** (1000 * k / num_mini_batch)
            if self.recurrent_actor:
                yield self._sequences(mini_batch_size)
            else:
                yield self._batch(self._drawn(mini_batch_size))

    def _drawn(self, count: int) -> Batch:
        if self._ring is not None:
            sampler = self._emphasizing
            sampler.share, sampler.smallest = self._share, int(self.cmin)
        return super()._drawn(count)

    def _weights(self, drawn: Batch) -> dict[str, Any]:
        weights = {"ck": self._emphasizing.window}
        if self._emphasizing.by_priority:
            weights |= super()._weights(drawn)
        return weights

    def _chosen(self, starts: Ids, count: int) -> tuple[Ids, Ids, dict[str, Any]]:
        num_envs = self._made.num_envs
        if num_envs * self.size < self.cmin:
            env_ids, chosen, extra = self._evenly(starts, count)
            return env_ids, chosen, {**extra, "ck": len(starts)}
        least = max(1, int(self.cmin) // self.sequence_length // num_envs)
        window = min(window_size(len(starts), self._share, least), len(starts))
        env_ids, chosen, extra = super()._chosen(starts[-window:], count)
        return env_ids, chosen, {**extra, "ck": window}

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Set the errors of the transitions of a batch, and adapt eta.

        Args:
            batch: What `generate_batches` gave; its ``idxs`` and ``ck`` are taken out
                where it has weights.
            info: As in `PERBuffer.after_gradients`; see `update_eta`, too.

        Returns:
            The info.

        Raises:
            SchemaError: There are no errors, or they do not fit.
        """
        if isinstance(batch.get("per_weights"), torch.Tensor):
            super().after_gradients(batch, info)
            batch.pop("ck")
        return self.update_eta(info)

    def update_eta(self, info: Any) -> Any:
        """Adapt eta to the growth of the last 20 returns.

        Where they grow fastest it is the initial one, where they fall fastest it is 1.

        Args:
            info: ``info["Episodes"]["TrainReward"]`` is a return, if there is one.

        Returns:
            The info; from the 20th return on its ``"Algorithm"`` has ``eta`` and
            ``RewardGradient``, in ``[-1, 1]``.
        """
        episodes = info.get(EPISODES, {})
        if "TrainReward" in episodes:
            self.eps_reward.append(episodes["TrainReward"])
        if len(self.eps_reward) < 20:
            return info
        slope = float(np.gradient(np.array(self.eps_reward, np.float64)).mean())
        if slope > self.max_grad_rew:
            self.max_grad_rew = slope
        else:
            self.max_grad_rew *= 0.9999
        if slope < -self.min_grad_rew:
            self.min_grad_rew = abs(slope)
        else:
            self.min_grad_rew *= 0.9999
        if slope:
            slope /= self.max_grad_rew if slope > 0 else self.min_grad_rew
        # The nearest of 1000 steps.
        rank = int(np.abs(np.linspace(-1.0, 1.0, 1000) - slope).argmin())
        self.eta = float(np.linspace(1.0, self.initial_eta, 1000)[rank])
        info[ALGORITHM].update({"RewardGradient": slope, "eta": self.eta})
        return info


class HERBuffer(EREBuffer):
    """Inserts each episode twice: unchanged, and with the goal that it reached.

    Hindsight experience replay (Andrychowicz et al. 2017). When a step ends the
    episodes of all environments, `her_function` is called with each of the episode's
    steps but the last, and what it returns is inserted behind them, with the step's
    own action and ends. Draws are those of `EREBuffer`.

    With several environments, episodes must have one length: where some environments'
    episodes end before others', nothing is inserted for them, which a warning says.
    The steps of the episodes that are not over are kept in memory.

    Example:
        >>> def reach(o, rhs, o2, rhs2, r, initial_state, final_state):
        ...     o["goal"][:] = o2["goal"][:] = final_state["position"]
        ...     reached = (o2["position"] == o2["goal"]).all(-1, keepdims=True)
        ...     return o, rhs, o2, rhs2, reached.astype("float32")
        >>> make = HERBuffer.create_factory(1_000_000, reach, path="runs/her")
    """

    def __init__(
        self,
        size: int,
        device: Any,
        actor: Any,
        algorithm: Any,
        envs: Any,
        her_function: HerFunction,
        n_step: int = 1,
        epsilon: float = 0.0,
        alpha: float = 0.0,
        beta: float = 1.0,
        default_error: float = 1000000,
        eta: float = 1.0,
        cmin: int = 5000,
        *,
        path: StrPath | None = None,
        resume: bool = False,
    ) -> None:
        """Make a storage.

        Args:
            size: As in `EREBuffer`, as are those not listed here. Relabelled steps
                take as much room as others.
            device: As there.
            actor: As there.
            algorithm: As there.
            envs: As there.
            her_function: ``(o, rhs, o2, rhs2, r, initial_state, final_state)`` to new
                ``(o, rhs, o2, rhs2, r)``: float32 arrays ``[num_proc, *shape]``, or
                dicts of them, of one step; the states are the observations of the
                episode's first and last step.
            n_step: As there; 1 where the actor is recurrent.
            epsilon: As there.
            alpha: As there.
            beta: As there.
            default_error: As there.
            eta: As there.
            cmin: As there.
            path: As there.
            resume: As there.

        Raises:
            SchemaError: As there; or `her_function` cannot be called, or the actor is
                recurrent and n_step above 1.
        """
        self._check("her_function", her_function)
        if actor.is_recurrent and n_step != 1:
            raise SchemaError(
                "n_step must be 1 in a HERBuffer with a recurrent actor, got "
                f"{n_step}. Relabelled steps are sequences of their own."
            )
        self.her_function = her_function
        self._episode: list[Columns] = []
        self._uneven = False
        super().__init__(
            size,
            device,
            actor,
            algorithm,
            envs,
            n_step,
            epsilon,
            alpha,
            beta,
            default_error,
            eta,
            cmin,
            path=path,
            resume=resume,
        )

    @classmethod
    def create_factory(
        cls,
        size: int,
        her_function: HerFunction = unchanged,
        *options: Any,
        path: StrPath | None = None,
        resume: bool = False,
        **named: Any,
    ) -> Maker:
        """Return a factory of storages, which pickles if `her_function` does.

        Raises:
            SchemaError: An option is out of range.
        """
        return super().create_factory(
            size, her_function, *options, path=path, resume=resume, **named
        )

    @classmethod
    def _check(cls, name: str, value: object) -> None:
        super()._check(name, value)
        if name == "her_function" and not callable(value):
            raise SchemaError(
                "her_function must be a function of (o, rhs, o2, rhs2, r, "
                f"initial_state, final_state), got {value!r:.80}. Leave it out to "
                "change nothing."
            )

    def insert_transition(self, sample: Mapping[str, Any]) -> None:
        """Insert one step, and behind an episode's last one the relabelled steps.

        Raises:
            SchemaError: See `RingStorage.insert_transition`; or `her_function` raised,
                or returned what does not fit. The step is inserted then.
        """
        columns = {path: np.array(each) for path, each in self._columns(sample).items()}
        if ENDED not in columns:
            raise SchemaError(
                f"transition: {DONE2} is missing, which says where episodes end. Pass "
                "it with each transition."
            )
        super().insert_transition(sample)
        ends = columns[ENDED]
        if ends.any() and not ends.all():
            self._episode.clear()
            if not self._uneven:
                warnings.warn(
                    "HERBuffer: episodes of several environments must end at the same "
                    "step to be relabelled; these do not. Use one environment for "
                    "episodes of any length",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._uneven = True
        if not self._uneven:
            self._episode.append(columns)
        if ends.all():
            self.handle_end_of_episode()

    def handle_end_of_episode(self) -> None:
        """Insert the relabelled steps of the episode; called at its end.

        Raises:
            SchemaError: `her_function` raised, or returned what does not fit.
        """
        steps, self._episode, self._uneven = self._episode, [], False
        if len(steps) < 2:
            return
        initial, final = (self._argument(steps[index], OBS) for index in (0, -1))
        made = [self._relabelled(step, initial, final) for step in steps[:-1]]
        columns = {path: np.stack([each[path] for each in made]) for path in made[0]}
        # They do not follow the step before them.
        columns[DONE][0] = 1
        if self.recurrent_actor:
            # Sequences go on through them, as through the ends of other episodes.
            for index in range(len(made)):
                rows = {path: torch.from_numpy(c[index]) for path, c in columns.items()}
                super().insert_transition(unflatten(rows))
            return
        self._interrupt()
        self._append(columns)
        self._interrupt()

    def _append(self, columns: Columns) -> None:
        """Insert steps; see `RingStorage`. Where Done says so, an episode begins.

        Of another process's slice, nothing else says where relabelled steps end.
        """
        if self.recurrent_actor or DONE not in columns:
            super()._append(columns)
            return
        begun = (columns[DONE] != 0).reshape(len(columns[DONE]), -1).all(1)
        edges = [0, *(1 + np.flatnonzero(begun[1:])).tolist(), len(begun)]
        for begin, end in pairwise(edges):
            if begin:
                self._interrupt()
            super()._append({path: each[begin:end] for path, each in columns.items()})

    def _argument(self, columns: Columns, key: str) -> Any:
        """Return an argument of `her_function`: a float32 array, or a dict of them."""
        found: dict[str, Any] = {}
        for path, array in columns.items():
            if path.partition("/")[0] == key:
                put(found, path, array.astype(np.float32))
        if key in found:
            return found[key]
        # Hidden states that are not stored are zeros, as in batches.
        return first_of(self._empty[key]) if key in self._empty else None

    def _relabelled(self, step: Columns, initial: Any, final: Any) -> Columns:
        """Return the step that `her_function` makes, of the same shapes and dtypes."""
        keys = (OBS, RHS, OBS2, RHS2, REW)
        try:
            given = [self._argument(step, key) for key in keys]
            made = self.her_function(*given, copy.deepcopy(initial), copy.deepcopy(final))
            found = self._columns(dict(zip(keys, made, strict=True)))
        except Exception as error:
            raise SchemaError(
                f"her_function must return (o, rhs, o2, rhs2, r) for a step of "
                f"{shapes_of(dict(step))}, got {type(error).__name__}: {error}. The "
                "episode is inserted without relabelled steps."
            ) from error
        found = {path: found.get(path, step[path]) for path in step}
        for path, array in found.items():
            if array.shape != step[path].shape:
                raise SchemaError(
                    f"her_function: {path} must have the shape "
                    f"{list(step[path].shape)}, got {list(array.shape)}. The episode "
                    "is inserted without relabelled steps."
                )
        return found

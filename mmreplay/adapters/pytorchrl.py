"""pytorchrl's storages on disk: model-based, off-policy, n-step and prioritized.

Public names, keys and shapes are those of pytorchrl 3.2.15. The differences are told
in docs/migrating/pytorchrl.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.adapters.home import StrPath
from mmreplay.adapters.pytorchrl_data import (
    ACT,
    ACTPROBS,
    DONE,
    DONE2,
    ENDED,
    IREW,
    N_STEP,
    OBS,
    OBS2,
    REW,
    RHS,
    RHS2,
)
from mmreplay.adapters.pytorchrl_priorities import (
    Powers,
    SequencePriorities,
    priorities_of,
)
from mmreplay.adapters.pytorchrl_ring import RingStorage
from mmreplay.adapters.pytorchrl_sequences import SequenceStorage
from mmreplay.adapters.values import array_of, check_counts
from mmreplay.batch import Batch
from mmreplay.errors import EmptyError, SchemaError
from mmreplay.samplers.base import Sampler
from mmreplay.samplers.prioritized import PrioritizedSampler
from mmreplay.transforms.base import Transform
from mmreplay.transforms.nstep import NStep

ALGORITHM = "Algorithm"


class MBReplayBuffer(RingStorage):
    """Storage for model-based algorithms: batches to learn the dynamics from."""

    storage_tensors: ClassVar[tuple[str, ...]] = (
        OBS, RHS, DONE, ACT, REW, OBS2, RHS2, DONE2,
    )  # fmt: skip

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
        """All rows once, shuffled and normalized by the actor's scaler, fitted to them.

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
        for number, first in enumerate(range(0, len(order), mini_batch_size)):
            rows = torch.from_numpy(order[first : first + mini_batch_size])
            rows = rows.to(inputs.device)
            yield {
                "train_input": inputs[rows],
                "train_label": targets[rows],
                "batch_number": number,
            }

    def _examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model is given and what it should give, of every row."""
        self._settle()
        if self._ring is None or not self.size:
            raise EmptyError(
                "cannot make batches: got a storage without a row, expected at least "
                "one; insert transitions first"
            )
        data = self._ring.gather_all().fields
        actions = data[ACT]
        space = self.actor.action_space
        if type(space).__name__ == "Discrete":
            actions = np.eye(int(space.n), dtype=np.float32)[
                actions[..., 0].astype(int)
            ]
        inputs = np.concatenate([data[OBS], actions], axis=-1)
        targets = data[OBS2] - data[OBS]
        if self.actor.dynamics_model.reward_function is None:
            targets = np.concatenate([targets, data[REW]], axis=-1)
        return self._tensor(inputs), self._tensor(targets)

    def _tensor(self, rows: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(rows.astype(np.float32, copy=False)).to(self.device)


class ReplayBuffer(SequenceStorage):
    """Storage for off-policy algorithms: uniform draws with replacement.

    Where the actor is not recurrent, hidden states are not stored: batches hold one
    row of zeros of them, as those of pytorchrl do.
    """

    storage_tensors: ClassVar[tuple[str, ...]] = (
        OBS, RHS, DONE, ACT, REW, IREW, OBS2, RHS2, DONE2, ACTPROBS,
    )  # fmt: skip

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
                f"cannot draw {count} transitions: got a storage without one, expected "
                "at least one; insert transitions first"
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
    """Draws n-step transitions, which are made of single ones when they are drawn.

    The reward is ``sum(gamma**i * r[t + i])`` up to the first end or n steps, the next
    observation and its end are those of the last step summed; see `NStep`.
    """

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
            SchemaError: n_step is not positive.
        """
        check_counts(n_step=n_step)
        self.n_step, self.gamma = n_step, algorithm.gamma
        super().__init__(size, device, actor, algorithm, envs, path=path, resume=resume)

    def _transforms(self) -> tuple[Transform, ...]:
        if self.n_step == 1 or self.recurrent_actor:
            return ()
        return (NStep(self.n_step, self.gamma, REW),)

    def _batch(self, drawn: Batch) -> dict[str, Any]:
        found = super()._batch(drawn)
        if self.n_step > 1:
            ended = drawn.fields[ENDED].astype(np.float32)
            found[DONE2] = torch.from_numpy(ended[:, None]).to(self.device)
        return {**found, N_STEP: self._summed(drawn)}

    def _summed(self, drawn: Batch) -> Any:
        """How many steps were summed: n, or ``[B, 1]`` where some ended at a cut."""
        if self.n_step == 1 or not 0 < self.gamma < 1:
            return self.n_step
        # An end leaves 0, which no power of gamma is: nothing is discounted there.
        with np.errstate(divide="ignore"):
            counts = np.log(drawn.fields["discount"]) / np.log(self.gamma)
        counts = np.where(drawn.fields[ENDED], np.inf, np.rint(counts))
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
        alpha: How much errors count; may be changed.
        beta: How much the weights make up for it; may be changed.
        epsilon: Added to errors; may be changed.
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
        """
        self._powers = Powers(alpha, beta)
        self.epsilon = epsilon
        self.error = default_error
        super().__init__(
            size, device, actor, algorithm, envs, n_step, path=path, resume=resume
        )

    @property
    def alpha(self) -> float:  # noqa: D102 - an attribute of the class
        return self._powers.alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._powers.alpha = value

    @property
    def beta(self) -> float:  # noqa: D102 - an attribute of the class
        return self._powers.beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._powers.beta = value

    def _sampler(self) -> Sampler:
        if self.recurrent_actor:
            return super()._sampler()
        return PrioritizedSampler(
            self._powers.alpha_at,
            self._powers.beta_at,
            eps=0.0,
            initial_priority=float(self.error),
            stratified=False,
            normalize="buffer",
            alpha_every=1,
            seed=self._seed,
        )

    def _settle(self) -> None:
        if self._forgotten is None or self.recurrent_actor or self._ring is None:
            super()._settle()
            return
        sampler, (first, stop) = self._ring.sampler, self._alive()
        assert isinstance(sampler, PrioritizedSampler)
        with self._ring.view.lock:
            sampler.priorities.follow(self._ring.view)
            errors = priorities_of(sampler, first, stop)
        super()._settle()
        # Kept rows were copied forward, to end at the mark.
        positions = self._mark - stop + np.arange(first, stop)
        for env_id, each in enumerate(errors):
            with self._ring.view.lock:
                ids = np.full(len(positions), env_id)
                sampler.update_priorities(self._ring.view, ids, positions, each)

    def _batch(self, drawn: Batch) -> dict[str, Any]:
        weights: Any = 1.0
        if self.alpha != 0:
            weights = torch.from_numpy(drawn.weights[:, None]).to(self.device)
        places = np.stack([drawn.env_ids, drawn.positions], axis=1)
        return {**super()._batch(drawn), "per_weights": weights, "idxs": places}

    def after_gradients(self, batch: Any, info: Any) -> Any:
        """Give the transitions of a batch their errors; returns the info.

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
                f"after_gradients: got {list(info[ALGORITHM])} of the algorithm, "
                "expected 'errors'; use an algorithm that gives TD errors"
            )
        places = batch.pop("idxs")
        errors = array_of(info[ALGORITHM]["errors"]).reshape(-1) + self.epsilon
        assert self._ring is not None
        if self.recurrent_actor:
            self._learned(places, errors)
            return info
        sampler, view = self._ring.sampler, self._ring.view
        assert isinstance(sampler, PrioritizedSampler)
        with view.lock:
            sampler.update_priorities(view, places[:, 0], places[:, 1], errors)
        return info

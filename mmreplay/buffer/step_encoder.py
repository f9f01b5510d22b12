"""Steps that users pass, checked, with the episode ends that are in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.flag_rules import Columns, EpisodeFlags
from mmreplay.buffer.validation import StepValidator
from mmreplay.schema import Schema

Block = dict[str, NDArray[Any]]
"""By path ``[T, E, *shape]``."""


class StepEncoder:
    """Checks steps for a buffer elsewhere, and finds the ends of episodes in them.

    By the same rules as the `Appender` of that buffer: `StepValidator`, `EpisodeFlags`.
    Of a schema with fields that vary it encodes none, as their values go to a heap.

    Attributes:
        validator: Checks and casts what users pass.
    """

    def __init__(self, schema: Schema, num_envs: int, autoreset: str) -> None:
        """Begin before the first step.

        Args:
            schema: Of the steps.
            num_envs: Environments.
            autoreset: Of the buffer that the steps are for.
        """
        self._schema, self._num_envs = schema, num_envs
        self.validator = StepValidator(schema, num_envs)
        follows = autoreset == "next_step"
        self._flags = EpisodeFlags(schema, num_envs, final_follows=follows)

    def encode_step(
        self, data: Mapping[str, object], final_observation: object = None
    ) -> tuple[Block, NDArray[np.bool_], Block | None]:
        """Check one step of each environment; see `ReplayBuffer.add`.

        Returns:
            The step as a block; bool ``[1, E]``, where it ends an episode; and what
            those episodes ended with, of the observation's fields, if that was passed.
        """
        columns = self.validator.step(self.validator.flat(data), self._num_envs)
        return self._encode(columns, (self._num_envs,), final_observation)

    def encode_block(
        self, data: Mapping[str, object], final_observation: object = None
    ) -> tuple[Block, NDArray[np.bool_], Block | None]:
        """Check many steps of each environment; see `ReplayBuffer.extend`.

        Returns:
            As `encode_step`, of T steps.
        """
        columns, steps = self.validator.block(self.validator.flat(data), self._num_envs)
        return self._encode(columns, (steps, self._num_envs), final_observation)

    def _encode(
        self, columns: Columns, lead: tuple[int, ...], final_observation: object
    ) -> tuple[Block, NDArray[np.bool_], Block | None]:
        ended, final = self._flags.ended(columns, lead), None
        if final_observation is not None:
            self._flags.refuse_final()
            final = self._as_block(self.validator.final(final_observation, ended))
        return self._as_block(columns), ended.reshape(-1, self._num_envs), final

    def _as_block(self, columns: Columns) -> Block:
        fields = self._schema.fields
        return {
            path: np.reshape(column, (-1, self._num_envs, *fields[path].shape))
            for path, column in columns.items()
        }

"""Steps added to a buffer, one of each environment at a time or many."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.buffer.open_buffer import OpenBuffer

Heads = NDArray[np.int64]


class Adding(OpenBuffer):
    """What adds to an open buffer; see `ReplayBuffer`."""

    def add(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *,
        final_observation: object = None,
        env_ids: ArrayLike | None = None,
        **fields: object,
    ) -> None:
        """Add one step of each environment, all or nothing.

        Args:
            data: The step as one nested mapping, or else keywords; every field of
                the schema ``[E, *shape]``, or ``[*shape]`` where num_envs is 1.
            final_observation: The observation that each ended episode ended with;
                read only where the step ends one. ``[E, *shape]``, nested as the
                observation is, or Gymnasium's ``infos["final_obs"]``: an object array
                or list ``[E]`` of observations (arrays, dicts or tuples), with None
                where no episode ended. Not with ``autoreset="next_step"``.
            env_ids: int ``[N]``, the environments that the step is of, each once;
                all of them by default. Fields are then ``[N, *shape]``.
            **fields: The step's fields, in place of data.

        Values decide what a field takes, as arrays, tensors, lists or scalars: integers
        and bools that it holds exactly, and floats in a field of floats. A narrower
        float rounds them. The first time that an array or a tensor is rounded, a
        `RuntimeWarning` names the field, but for rewards.

        Warns:
            AutoresetWarning: Once, before this step is added: rows after episode ends
                look like resets that another ``autoreset`` would leave out.

        Raises:
            SchemaError: A field is unknown, missing, or of a wrong shape or dtype; or
                a final observation is None where an episode ended.
            FullError: No space is left; nothing of the step is visible.
            FailedError: The buffer is read-only, closed, or its device failed.
        """
        if self.limit is not None:
            self._await_insert()
        with self._turn:
            writer = self._writer()
            plain = final_observation is None and env_ids is None
            plain = plain and (data is None or not fields)
            if plain and writer.add_plain(fields if data is None else data) is not None:
                return
            given = writer.intake.flat(data, fields)
            ids = None if env_ids is None else writer.intake.env_ids(env_ids)
            writer.add(given, final_observation, ids)

    def add_as_is(
        self, data: Mapping[str, object], published: Heads | None = None
    ) -> Heads | None:
        """Add one step of each environment, if no value is to be cast or shaped.

        For who makes steps of other libraries' and knows a longer way for all others,
        which tells what is wrong with a step.

        Args:
            data: By path, with no mapping in it: arrays, numbers, or DLPack capsules of
                arrays' values; see `PackerKernel.step`.
            published: What `published` is to be, if the step follows what is there.

        Returns:
            int64 ``[E]``, `published` from now on; None for a step that is not in.

        Raises:
            FullError: As in `add`.
            FailedError: As in `add`.
        """
        if self.limit is not None:
            self._await_insert()
        with self._turn:
            # As `_writer` does, whose call a step would notice.
            parts = self._parts
            writer = parts.writer
            if writer is None or parts.closed:
                writer = self._writer()
            if published is not None and parts.ledger.heads is not published:
                return None
            return writer.add_plain(data)

    def skip_autoreset_check(self) -> None:
        """Do not check rows after episode ends for a wrong ``autoreset``.

        For adapters: their library states what its environments do, and their users
        cannot answer otherwise.
        """
        self._writer().checks_ends = False

    @property
    def published(self) -> Heads:
        """int64 ``[E]``, the heads: another array each time that rows were added.

        Nobody may change it. Of who reads beside a writer, as of the last look.

        Raises:
            FailedError: The buffer is closed.
        """
        parts = self._parts
        if parts.closed:
            self._read()
        return parts.ledger.heads

    def extend(
        self,
        data: Mapping[str, object] | None = None,
        /,
        *,
        final_observation: object = None,
        env_ids: ArrayLike | None = None,
        **fields: object,
    ) -> None:
        """Add many steps of each environment.

        The whole call is validated first and then published in blocks. Of more
        steps than the capacity the last ones stay, and positions advance by all.

        Args:
            data: As in `add`, every field ``[T, E, *shape]``, or ``[T, *shape]``
                where num_envs is 1; T may be 0, which adds nothing.
            final_observation: As in `add`, with a leading axis of steps; None in
                place of a step's array where no episode ended.
            env_ids: As in `add`.
            **fields: As in `add`.

        Warns:
            AutoresetWarning: As in `add`, after all steps are in.

        Raises:
            SchemaError: As in `add`.
            FullError: No space is left; whole blocks are in, and the note on the
                error says how many steps.
            FailedError: As in `add`.
        """
        if self.limit is not None:
            self._await_insert()
        with self._turn:
            writer = self._writer()
            plain = final_observation is None and env_ids is None
            plain = plain and (data is None or not fields)
            if plain and writer.extend_plain(fields if data is None else data):
                return
            given = writer.intake.flat(data, fields)
            ids = None if env_ids is None else writer.intake.env_ids(env_ids)
            writer.extend(given, final_observation, ids)

    def _await_insert(self) -> None:
        # Who closes the buffer in another thread takes it away meanwhile.
        limit = self.limit
        self._writer()  # A reader is refused before it takes the writer's place.
        if limit is not None:
            limit.await_insert()

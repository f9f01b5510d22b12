"""Tables of the episodes of any source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from mmreplay import stats
from mmreplay.buffer.opening import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import name_source
from mmreplay.convert.load import source_of
from mmreplay.convert.select import Selection, facts_of, span_of
from mmreplay.convert.transfer import Source
from mmreplay.errors import SchemaError, shown
from mmreplay.stats import EpisodeTable

Episodes = ReplayBuffer | StrPath


def episode_table(
    buffer: Episodes | Sequence[Episodes],
    progress: Callable[[int, int], None] | None = None,
    newest: int | None = None,
    *,
    where: str | None = None,
    env_ids: ArrayLike | None = None,
) -> EpisodeTable:
    """Returns and lengths of the episodes of a buffer, a file or several of them.

    Args:
        buffer: Open in any mode; of a live one, episodes that leave the ring during
            the call are left out or become headless. Or the path of whatever `load`
            takes, or a list of these.
        progress: Called with (steps read, steps to read), of each source.
        newest: Read rewards of the newest so many whole episodes of each environment
            only, and leave out the others; of an open buffer only.
        where: List only the episodes that meet a condition; see `export`.
        env_ids: int ``[N]``, environments to list; all by default.

    Returns:
        With the numbers by which `load` and `export` select episodes of the same source
        and environments.

    Raises:
        FormatError: A source does not exist, or is of no known format.
        SchemaError: The condition, or an environment, does not fit a source.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> table = mr.episode_table(buffer)
        >>> len(table) == len(table.returns) == len(table.lengths)
        True
        >>> long = mr.episode_table("runs/cartpole", where="length > 20")
        >>> bool((long.lengths > 20).all())
        True
    """
    listed = isinstance(buffer, list | tuple)
    if isinstance(buffer, ReplayBuffer) and where is None and env_ids is None:
        return stats.episode_table(buffer, progress, newest)
    if newest is not None:
        raise SchemaError(
            f"newest must be None but for an open buffer whose episodes are all listed, got "
            f"{shown(newest)}. Leave it out, or pick episodes of the table."
        )
    several: Sequence[Episodes] = buffer if listed else [buffer]  # type: ignore[assignment,list-item]  # one that is no list
    tables: list[EpisodeTable] = []
    before = 0
    for number, each in enumerate(several):
        source = _source(each)
        with name_source(source.name), source.open({}) as reader:
            selection = Selection(where=where, env_ids=env_ids)
            span = span_of(reader.describe(), selection)
            facts = facts_of(
                reader,
                selection,
                span,
                source=number,
                before=before,
                returns=True,
                progress=progress,
            )
            ended = facts.terminated | facts.truncated
            last = np.diff(facts.env_ids, append=-1) != 0
            table = EpisodeTable(
                env_ids=facts.env_ids,
                begin=facts.first,
                end=facts.first + facts.lengths,
                lengths=facts.lengths,
                returns=facts.returns if len(facts.returns) else np.full(len(facts), np.nan),
                headless=~facts.begun,
                running=last & ~ended,
                broken=~last & ~ended,
                number=before + np.arange(len(facts)),
                source=np.full(len(facts), number),
            )
            before += len(facts)
            tables.append(table if where is None else table.pick(facts.selected().true))
    if not tables:
        raise SchemaError("buffer must be at least one buffer, file or folder, got an empty list.")
    return EpisodeTable(
        *(
            np.concatenate([getattr(table, name) for table in tables])
            for name in EpisodeTable.__slots__
        )
    )


def _source(source: Episodes) -> Source:
    if isinstance(source, ReplayBuffer):
        return Source(source.path, registry.BUFFERS, {}, source)
    return source_of(source)

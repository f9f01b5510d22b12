"""Appends the finished episodes of a ring that another process writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Appender, Report
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.condition import parse
from mmreplay.convert.description import Description
from mmreplay.convert.episode_export import LOOK_S, append, refuse_older
from mmreplay.convert.finished import finished
from mmreplay.convert.mapped import Changes, change
from mmreplay.convert.registry import Format
from mmreplay.disk.lock import Owner
from mmreplay.errors import FailedError, FormatError, StaleError


class Following:
    """Appends episodes of a ring as they finish; a context manager.

    It only reads: rows that the ring overwrites before they are appended are lost to
    the target, and counted. Only committed rows are taken: a power cut loses others,
    and gives their positions to new ones.

    Attributes:
        lost: Rows that were overwritten before they were appended.
        episodes: Appended by this object.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        file_format: Format,
        options: dict[str, object],
        *,
        fields: Sequence[str] | None = None,
        where: str | None = None,
        changes: Changes | None = None,
        overwrite: bool = False,
    ) -> None:
        """Say what is to be appended.

        Args:
            source: Folder of the ring.
            target: Of the episodes.
            file_format: Its format.
            options: The format's.
            fields: Paths, or subtrees, to write; all by default.
            where: A condition that episodes meet.
            changes: What becomes of fields.
            overwrite: Replace a target that is there, by the first append.
        """
        self.lost = self.episodes = 0
        self._source, self._target, self._format = source, target, file_format
        self._options, self._overwrite = options, overwrite
        self._fields, self._where = fields, where
        self._changes = changes or Changes()
        self._appender: Appender | None = None
        self._appended_lost = 0
        self._description: Description | None = None

    def run(
        self, reported: Callable[[Report], None] = lambda _: None, wait_s: float = LOOK_S
    ) -> None:
        """Append until no writer has the ring and no finished episode is left.

        Args:
            reported: Called with the report of each append.
            wait_s: Seconds between two looks.

        Raises:
            FormatError: The target is not one of appends of this ring.
            FailedError: The ring's newest rows are not committed, and no writer has it.
        """
        while True:
            # Asked first: what a writer added before it closed is read below.
            written = Owner(self._source).alive
            try:
                uncommitted = self._look(reported)
            except StaleError:
                # The ring was faster: the next look counts what it gave up.
                uncommitted, written = 0, True
            if not written and uncommitted:
                raise FailedError(
                    f"{self._source} has {uncommitted} rows that its writer did not commit before "
                    "it ended, and a power cut would lose them: they were not appended. Open the "
                    "ring with mode='r+' once, and run again."
                )
            if not written:
                return
            time.sleep(wait_s)

    def _look(self, reported: Callable[[Report], None]) -> int:
        """Append what is finished, and return how many rows are not committed."""
        with ReplayBuffer.open(self._source) as buffer:
            reader = change(BufferReader(buffer, fields=self._fields), self._changes)
            # Changed fields are of no ring, and their rows are where they were.
            description = replace(reader.describe(), uuid=buffer.metadata.uuid.hex())
            before, self._description = self._description or description, description
            if (before.uuid, before.schema) != (description.uuid, description.schema):
                raise FormatError(
                    f"{self._source} was replaced by another ring, or its fields were changed. "
                    f"Append its episodes to another folder than {self._target}."
                )
            if self._appender is None:
                self._appender = registry.open_appender(
                    self._format,
                    self._target,
                    description,
                    overwrite=self._overwrite,
                    **self._options,
                )
                refuse_older(self._appender, buffer.heads)
            # A condition may name fields that are not written.
            rows = BufferReader(buffer)
            schema, condition = rows.describe().schema, None
            if self._where is not None:
                condition = parse(self._where, schema.fields, schema.role("reward") or "")
            upto = np.minimum(description.stop, buffer.committed)
            now = finished(rows, self._appender.appended, upto, condition)
            # Noted first: Ctrl-C may end this at any instant.
            self.lost = self._appended_lost + int(now.lost.sum())
            if not now.episodes:
                self._appender.skip(now.appended)
            else:
                report = append(self._appender, reader, now)
                self.episodes += now.episodes
                reported(report)
            # What the target says of its rows takes those in.
            self._appended_lost = self.lost
            return int(np.maximum(description.stop - upto, 0).sum())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._appender is not None:
            self._appender.close()

"""Values that vary: references against COMMIT, and values against their checksums."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32c
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError
from mmreplay.format.heap import References, legal, nbytes_of, offsets
from mmreplay.format.metadata import Metadata
from mmreplay.storage.layout import HEAP, RECORDS, record_layout
from mmreplay.verify.report import Notebook
from mmreplay.verify.slots import Claim, CommitFile

CHUNK_ROWS = 4096

Array = NDArray[np.int64]


class ValueCheck:
    """Checks the references and values of one generation's rows."""

    def __init__(
        self, opened: Mapping[str, File], metadata: Metadata, commit_file: CommitFile
    ) -> None:
        self._opened, self._metadata, self._commit = opened, metadata, commit_file
        self._placement = record_layout(metadata.schema)
        self._fields = {
            path: metadata.schema.fields[path] for path in metadata.schema.varying
        }

    def run(self, claim: Claim, notes: Notebook) -> None:
        """Check the rows that are served to readers; none where no field varies."""
        if not self._fields:
            return
        for env_id in range(self._metadata.ring.num_envs):
            stop = int(claim.published[env_id])
            # Where the values of rows so far end: those after them begin there.
            end = 0
            for first in range(int(claim.firsts[env_id]), stop, CHUNK_ROWS):
                last = min(first + CHUNK_ROWS, stop)
                try:
                    end = self._check(env_id, first, last, end, notes)
                except (CorruptError, FailedError) as error:
                    notes.fail("file", f"{self._metadata.folder}/{HEAP}", error)
                    break

    def _check(
        self, env_id: int, first: int, stop: int, end: int, notes: Notebook
    ) -> int:
        """Check some rows of one environment; return where their values end."""
        heap_nbytes, count = self._metadata.heap_nbytes, stop - first
        records = self._records(env_id, first, stop)
        ids = np.full(count, env_id)
        columns, wrong = {}, np.full((count, len(self._fields)), None, object)
        # Heads of after the rows were read, and no tail: a writer may have raised both
        # since, and the rows below those tails are left out in the end.
        heap_heads = np.full(count, self._commit.heap_heads()[env_id])
        for number, (path, field) in enumerate(self._fields.items()):
            references = columns[path] = records[path]
            zeros = np.zeros(count, np.int64)
            fits = legal(references, field, heap_nbytes, zeros, heap_heads)
            wrong[~fits, number] = "its reference does not lead to a value in the heap"
            nbytes = nbytes_of(references, field)
            begins = offsets(references, ids, heap_nbytes)
            for at in np.flatnonzero(fits & (nbytes > 0)).tolist():
                data = self._opened[HEAP].pread(int(nbytes[at]), int(begins[at]))
                notes.read(len(data))
                if crc32c(data) != references["crc"][at]:
                    wrong[at, number] = (
                        f"the checksum of its value must be "
                        f"{references['crc'][at]:08x}, got {crc32c(data):08x}"
                    )
        limits, tails, heap_tails = self._commit.bounds()
        oldest = max(
            int(limits[env_id]) - self._metadata.ring.slots, int(tails[env_id])
        )
        for at in range(max(0, oldest - first), count):
            for number, (path, field) in enumerate(self._fields.items()):
                references = columns[path]
                begin = int(references["position"][at])
                if wrong[at, number] is None and references["length"][at]:
                    if begin < max(end, int(heap_tails[env_id])):
                        wrong[at, number] = (
                            f"its value must begin at heap position "
                            f"{max(end, int(heap_tails[env_id]))} or later, got {begin}"
                        )
                    end = begin + int(nbytes_of(references[at : at + 1], field)[0])
                if wrong[at, number] is not None:
                    notes.note(
                        "value", f"{self._metadata.folder}/{HEAP}", None,
                        f"field {path!r} of environment {env_id}, position "
                        f"{first + at}: {wrong[at, number]}",
                    )  # fmt: skip
        return end

    def _records(self, env_id: int, first: int, stop: int) -> References:
        """Read the records of positions."""
        stride, spans = self._placement.stride, []
        for row, step, count in self._metadata.ring.split_at_wrap(env_id, first, stop):
            rows = step * (count - 1) + 1
            data = self._opened[RECORDS].pread(rows * stride, row * stride)
            spans.append(np.frombuffer(data, self._placement.record)[::step])
        records: References = np.concatenate(spans)
        return records

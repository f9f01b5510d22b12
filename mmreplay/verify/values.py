"""Values that vary: references against COMMIT, and values against their checksums."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32c
from mmreplay.disk.files import File
from mmreplay.errors import CorruptError, FailedError, raise_if_out_of_files
from mmreplay.format.heap import References, checksums, legal, nbytes_of, offsets
from mmreplay.format.metadata import Metadata
from mmreplay.schema import Field
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.layout import HEAP, RECORDS, record_layout
from mmreplay.storage.zarr.engine import ZarrStore
from mmreplay.storage.zarr.group import FOLDER
from mmreplay.verify.report import Notebook
from mmreplay.verify.slots import Claim, CommitFile

CHUNK_ROWS = 4096
CHUNK_NBYTES = 1 << 20
"""Longer values are read in chunks: a forged one may be of any length."""
DECODED_IMAGES = 1000
"""About so many images are decoded; of the others header and end are looked at."""

Array = NDArray[np.int64]


class StoredValues:
    """References and values in the files of one generation.

    Attributes:
        fields: By path, those that vary.
        decode_every: One of so many images is decoded; 0 for none.
    """

    def __init__(self, opened: Mapping[str, File], metadata: Metadata) -> None:
        self._opened, self._metadata = opened, metadata
        self._placement = record_layout(metadata.schema)
        self.fields = {path: metadata.schema.fields[path] for path in metadata.schema.varying}
        self._num_images, self.decode_every = 0, 1

    def records(self, env_id: int, first: int, stop: int) -> References:
        """Read the records of positions ``[first, stop)``, with their references."""
        stride, spans = self._placement.stride, []
        for row, step, count in self._metadata.ring.split_at_wrap(env_id, first, stop):
            rows = step * (count - 1) + 1
            data = self._opened[RECORDS].pread(rows * stride, row * stride)
            spans.append(np.frombuffer(data, self._placement.record)[::step])
        records: References = np.concatenate(spans)
        return records

    def problems(
        self,
        records: References,
        env_id: int,
        heap_tail: int,
        heap_head: int,
        count_read: Callable[[int], None] | None = None,
    ) -> NDArray[np.object_]:
        """Say what is wrong with each value of some rows.

        Args:
            records: Of ``[N]`` rows.
            env_id: Their environment.
            heap_tail: The lowest heap position that a reference may have.
            heap_head: Where the newest value ends.
            count_read: Called with the bytes of each value that was read.

        Returns:
            ``[N, F]`` for F fields: None, or what is wrong, in words.
        """
        heap_nbytes, count = self._metadata.heap_nbytes, len(records)
        wrong = np.full((count, len(self.fields)), None, object)
        for number, (path, field) in enumerate(self.fields.items()):
            references: References = records[path]
            fits = legal(
                references, field, heap_nbytes, np.full(count, heap_tail), np.full(count, heap_head)
            )
            wrong[~fits, number] = "its reference does not lead to a value in the heap"
            nbytes = nbytes_of(references, field)
            begins = offsets(references, np.full(count, env_id), heap_nbytes)
            for at in np.flatnonzero(fits & (nbytes > 0)).tolist():
                size, expected = int(nbytes[at]), int(references["crc"][at])
                try:
                    found = self._checksum(size, int(begins[at]))
                except (CorruptError, FailedError) as error:
                    wrong[at, number] = f"its value cannot be read: {error}"
                    continue
                if count_read is not None:
                    count_read(size)
                if found != expected:
                    wrong[at, number] = (
                        f"the checksum of its value must be {expected:08x}, got {found:08x}"
                    )
                elif field.encoding is not None:
                    file = self._opened[HEAP].pread(size, int(begins[at]))
                    wrong[at, number] = self.image_problem(field, file)
        return wrong

    def image_problem(self, field: Field, file: bytes | NDArray[np.uint8]) -> str | None:
        """What is wrong with the file of an image; every so many are decoded."""
        encoding = field.encoding
        assert encoding is not None
        problem = encoding.problem(file)
        self._num_images += 1
        if problem is None and self.decode_every and self._num_images % self.decode_every == 0:
            try:
                encoding.decode(file, np.empty(encoding.shape, np.uint8))
            except ValueError as error:
                problem = str(error)
            except FailedError:
                # Without the library headers are what can be looked at.
                self.decode_every = 0
        return None if problem is None else f"it is no {field.description}: {problem}"

    def _checksum(self, nbytes: int, offset: int) -> int:
        """The checksum of bytes of the heap."""
        found, file = 0, self._opened[HEAP]
        for at in range(0, nbytes, CHUNK_NBYTES):
            chunk = file.pread(min(CHUNK_NBYTES, nbytes - at), offset + at)
            found = crc32c(chunk, found)
        return found


class ValueCheck:
    """Checks the references and values of one generation's rows."""

    _rows = CHUNK_ROWS
    """Of more rows values could take more memory than the heap does."""
    _file = HEAP
    """Where values lie, for messages."""
    _ends_at_failure = True
    """One file has all values: where it cannot be read, no more are."""

    def __init__(
        self, opened: Mapping[str, File], metadata: Metadata, commit_file: CommitFile
    ) -> None:
        """Check a generation.

        Args:
            opened: Its files.
            metadata: What it is.
            commit_file: Its COMMIT.
        """
        self._metadata, self._commit = metadata, commit_file
        self._values = StoredValues(opened, metadata)

    def run(self, claim: Claim, notes: Notebook) -> None:
        """Check the rows that are served to readers; none where no field varies."""
        if not self._values.fields:
            return
        rows = int((claim.published - claim.firsts).sum())
        self._values.decode_every = max(1, rows // DECODED_IMAGES)
        for env_id in range(self._metadata.ring.num_envs):
            stop = int(claim.published[env_id])
            # Where the values of rows so far end: those after them begin there.
            end = 0
            for first in range(int(claim.firsts[env_id]), stop, self._rows):
                last = min(first + self._rows, stop)
                try:
                    end = self._check(env_id, first, last, end, notes)
                except (CorruptError, FailedError) as error:
                    raise_if_out_of_files(error)
                    notes.fail("file", self._where, error)
                    if self._ends_at_failure:
                        break

    @property
    def _where(self) -> str:
        return f"{self._metadata.folder}/{self._file}"

    def _check(self, env_id: int, first: int, stop: int, end: int, notes: Notebook) -> int:
        """Check some rows of one environment; return where their values end."""
        # Heads of after the rows were read, and no tail: a writer may have raised both
        # since, and the rows below those tails are left out in the end.
        records, wrong = self._read(env_id, first, stop, notes)
        limits, tails, heap_tails = self._commit.bounds()
        in_heap = self._in_heap(env_id, first, stop)
        oldest = max(int(limits[env_id]) - self._metadata.ring.slots, int(tails[env_id]))
        for at in range(max(0, oldest - first), stop - first):
            for number, (path, field) in enumerate(self._values.fields.items()):
                references: References = records[path]
                begin = int(references["position"][at])
                if wrong[at, number] is None and references["length"][at]:
                    lowest = max(end, int(heap_tails[env_id]) if in_heap[at] else 0)
                    if begin < lowest:
                        wrong[at, number] = (
                            f"its value must begin at heap position {lowest} or later, got {begin}"
                        )
                    end = begin + int(nbytes_of(references[at : at + 1], field)[0])
                if wrong[at, number] is not None:
                    notes.note(
                        "value",
                        self._where,
                        None,
                        f"field {path!r} of environment {env_id}, position "
                        f"{first + at}: {wrong[at, number]}",
                    )
        return end

    def _read(
        self, env_id: int, first: int, stop: int, notes: Notebook
    ) -> tuple[References, NDArray[np.object_]]:
        """References of rows, and what is wrong with each value or None, ``[N, F]``."""
        records = self._values.records(env_id, first, stop)
        heap_head = int(self._commit.heap_heads()[env_id])
        return records, self._values.problems(records, env_id, 0, heap_head, notes.read)

    def _in_heap(self, env_id: int, first: int, stop: int) -> NDArray[np.bool_]:
        """Which rows have their values in the heap, bool ``[N]``: all."""
        return np.ones(stop - first, np.bool_)


class SealedValueCheck(ValueCheck):
    """Checks them in shards, too, through the store."""

    _file = FOLDER
    _ends_at_failure = False

    def __init__(
        self,
        opened: Mapping[str, File],
        metadata: Metadata,
        commit_file: CommitFile,
        store: ZarrStore,
    ) -> None:
        """Check what a store serves; see `ValueCheck`."""
        super().__init__(opened, metadata, commit_file)
        self._store, self._rows = store, store.sealing.steps

    def _in_heap(self, env_id: int, first: int, stop: int) -> NDArray[np.bool_]:
        """The others: the heap frees the values of rows that shards hold."""
        return ~self._store.sealed(self._rows_of(env_id, first, stop))

    def _rows_of(self, env_id: int, first: int, stop: int) -> Array:
        """Rows of positions."""
        positions = np.arange(first, stop)
        return self._metadata.ring.rows(np.full(len(positions), env_id), positions)

    def _read(
        self, env_id: int, first: int, stop: int, notes: Notebook
    ) -> tuple[References, NDArray[np.object_]]:
        """The same, of values in shards and in the heap."""
        fields, rows = self._values.fields, self._rows_of(env_id, first, stop)
        count = len(rows)
        records: References = np.zeros(count, [(path, REFERENCE) for path in fields])
        wrong = np.full((count, len(fields)), None, object)
        heap_heads = np.full(count, self._commit.heap_heads()[env_id])
        for number, (path, field) in enumerate(fields.items()):
            references, data, illegal = self._store.take_values_of(
                path,
                rows,
                np.zeros(count, np.int64),
                heap_heads,
                lambda nbytes: np.empty(nbytes, np.uint8),
            )
            notes.read(len(data))
            records[path] = references
            nbytes = nbytes_of(references, field)
            sums = checksums(data, np.cumsum(nbytes) - nbytes, nbytes)
            for at in np.flatnonzero(sums != references["crc"]).tolist():
                wrong[at, number] = (
                    f"the checksum of its value must be {references['crc'][at]:08x}, "
                    f"got {sums[at]:08x}"
                )
            wrong[illegal, number] = "its reference leads to no value, or to one of another length"
            ends = np.cumsum(nbytes)
            for at in np.flatnonzero(nbytes).tolist() if field.encoding is not None else ():
                if wrong[at, number] is None:
                    file = data[ends[at] - nbytes[at] : ends[at]]
                    wrong[at, number] = self._values.image_problem(field, file)
        return records, wrong

"""Memories of skrl and rofunc, written: tensors ``[memory_size, num_envs, size]``.

Their files have no cursor, and say nothing of which rows were ever written: floats that
were not are NaN. What is written here is chronological, each environment from row 0 on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.checksums import crc32
from mmreplay.convert.array_file import Kinds, Plan, bytes_of
from mmreplay.convert.base import Block, Notes, Writer, doubt_priorities, refuse_empty
from mmreplay.convert.description import Description
from mmreplay.convert.staging import Staging
from mmreplay.disk.files import File
from mmreplay.disk.filesystem import COPY_ON_WRITE, file_system
from mmreplay.episodes import FINAL
from mmreplay.errors import SchemaError
from mmreplay.schema.dtypes import storage_dtype

LAYOUT = "skrl's layout"
COPY_NBYTES = 1 << 20
# More than the most that a header, padded, may be longer before than after.
SLACK_NBYTES = 128

Lay = Callable[[Kinds], Plan]
"""Lays a file out, whose pieces are steps: ``[num_envs, *size]`` each."""
Ids = NDArray[np.int64]


def is_float(dtype: str) -> bool:
    """Whether a dtype has NaNs, which stand where nothing was written."""
    return dtype == "bfloat16" or dtype.startswith("float")


def nan_of(dtype: str) -> np.generic:
    """A NaN as a file stores it."""
    if dtype == "bfloat16":
        return np.uint16(0x7FC0)
    return storage_dtype(dtype).type(np.nan)


class SkrlWriter(Writer):
    """Writes such a file; see `Writer`.

    The number of steps is known when all rows are in, final rows being none. Until
    then every tensor has room for more; then tensors are moved together.
    """

    def __init__(
        self, target: Path, description: Description, lay: Lay, overwrite: bool
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._lay = lay
        self._description = description
        doubt_priorities(self.notes, description, LAYOUT)
        fields = description.schema.fields
        self._dtypes = {path: fields[path].dtype for path in sorted(fields)}
        self._sizes = {path: fields[path].shape or (1,) for path in self._dtypes}
        self._counts = np.zeros(description.num_envs, np.int64)
        most = int((description.stop - description.first).max())
        plan = lay(self._kinds(most))
        self._offsets = {
            path: plan.pieces[path].offset + SLACK_NBYTES * (number + 1)
            for number, path in enumerate(self._dtypes)
        }
        self._finals = 0
        self._file: File | None = None
        self._staging = Staging(target, overwrite=overwrite)
        try:
            self._file = self._staging.open(
                plan.nbytes + SLACK_NBYTES * (len(self._dtypes) + 1)
            )
            scattered = description.num_envs > 1
            if scattered and file_system(self._staging.path) not in COPY_ON_WRITE:
                self._file.map_writable()
        except BaseException:
            self.abort()
            raise

    @property
    def steps(self) -> int:
        """Steps of the environment that has most."""
        return int(self._counts.max())

    @property
    def cells(self) -> int:
        """Cells of those steps, less those of the last one that none came for.

        As skrl counts them: those are of the last environments.
        """
        left_out = np.flatnonzero(self._counts[::-1] == self.steps)
        return self.steps * len(self._counts) - int(left_out[0])

    def _kinds(self, count: int) -> Kinds:
        lead = (count, self._description.num_envs)
        return {
            path: (dtype, (*lead, *self._sizes[path]))
            for path, dtype in self._dtypes.items()
        }

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        steps = (block.flags & FINAL) == 0
        self._finals += len(block) - int(steps.sum())
        for env_id in np.unique(block.env_ids).tolist():
            part = block.taken(steps & (block.env_ids == env_id))
            for path in self._dtypes:
                column = part.columns[path].reshape(len(part), *self._sizes[path])
                self._put(path, int(self._counts[env_id]), env_id, column)
            self._counts[env_id] += len(part)

    def _put(
        self, path: str, first: int, env_id: int, column: NDArray[np.generic]
    ) -> None:
        """Write steps of one environment from a step on."""
        assert self._file is not None
        num_envs = len(self._counts)
        nbytes = column.itemsize * int(np.prod(column.shape[1:]))
        offset = self._offsets[path] + (first * num_envs + env_id) * nbytes
        if num_envs == 1:
            self._file.pwrite(bytes_of(column), offset)
            return
        if self._file.mapping is None:
            for number, row in enumerate(column):
                self._file.pwrite(bytes_of(row), offset + number * num_envs * nbytes)
            return
        start = self._offsets[path] + first * num_envs * nbytes
        count = len(column) * num_envs * nbytes
        view = np.frombuffer(self._file.mapping, np.uint8, count, start)
        try:
            cells = view.reshape(len(column), num_envs, nbytes)
            given = np.frombuffer(bytes_of(column), np.uint8)
            cells[:, env_id] = given.reshape(len(column), nbytes)
        finally:
            # A mapping is not closed while an array looks at it.
            del view, cells

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        steps = self.steps
        refuse_empty(steps, LAYOUT)
        for path, dtype in self._dtypes.items():
            self._fill(path, dtype, steps)
        plan = self._lay(self._kinds(steps))
        sums = {}
        for path in self._dtypes:
            piece = plan.pieces[path]
            nbytes = steps * piece.row_nbytes
            sums[path] = self._move(path, piece.offset, nbytes, piece.start)
        for offset, data in plan.around(sums):
            self._file.pwrite(data, offset)
        self._file.resize(plan.nbytes)
        self._file.close()
        self._tell(steps)
        self.nbytes = self._staging.publish()

    def _fill(self, path: str, dtype: str, steps: int) -> None:
        """Fill what no step came for as skrl does: floats by NaN, others by 0."""
        value = nan_of(dtype) if is_float(dtype) else storage_dtype(dtype).type(0)
        for env_id, count in enumerate(self._counts.tolist()):
            for first in range(count, steps, 1024):
                size = (min(1024, steps - first), *self._sizes[path])
                self._put(path, first, env_id, np.full(size, value))

    def _move(self, path: str, offset: int, nbytes: int, checksum: int) -> int:
        """Move a tensor towards the beginning of the file; returns its checksum."""
        assert self._file is not None
        for first in range(0, nbytes, COPY_NBYTES):
            size = min(COPY_NBYTES, nbytes - first)
            data = self._file.pread(size, self._offsets[path] + first)
            checksum = crc32(data, checksum)
            self._file.pwrite(data, offset + first)
        return checksum

    def _tell(self, steps: int) -> None:
        if self._finals:
            self.notes.note(
                f"{self._finals:,} final observations were left out: skrl's layout has "
                "steps only; store next observations as a field to keep them"
            )
        if (self._counts < steps).any():
            self.notes.note(
                "environments hold different numbers of steps: cells without one are "
                "NaN in floats, 0 in other tensors"
            )
        self.notes.note("positions, flags, schema and statistics were left out")

    def abort(self) -> None:
        """See `Writer.abort`."""
        if self._file is not None:
            self._file.close()
        self._staging.abort()


def refuse_dtypes(description: Description, what: str, *dtypes: str) -> None:
    """Refuse fields of dtypes that a file without a description cannot name.

    Raises:
        SchemaError: There is one.
    """
    for path, field in description.schema.fields.items():
        if field.dtype in dtypes:
            raise SchemaError(
                f"field {path!r} is {field.dtype}, expected another dtype in {what} of "
                "skrl's layout; leave it out with fields=, or write pt"
            )

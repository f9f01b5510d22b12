"""Reads values that vary: checks the references of rows, and copies what they name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.open_files import OpenFiles
from mmreplay.buffer.read_plan import Fields, Ids
from mmreplay.errors import OR_REPAIR, CorruptError, FailedError, StaleError
from mmreplay.format.heap import References, checksums, legal, nbytes_of
from mmreplay.ragged import Ragged
from mmreplay.ring import Span
from mmreplay.schema.field import REFERENCE
from mmreplay.storage.commit_state import heap_bounds
from mmreplay.storage.gather import BufferPool
from mmreplay.storage.heap import Heap

AVERAGED_ROWS = 256
"""Rows of each environment by which a batch that memory does not hold is measured."""


class Overwritten(Protocol):
    """Says which steps may be overwritten by now; see `ValueReader`."""

    def __call__(self, env_ids: Ids, positions: Ids, *, alone: bool) -> NDArray[np.bool_]:
        """Return bool ``[N]``."""


def _first_of_equal(references: References, env_ids: Ids) -> Ids:
    """Of each value the first that lies at the same place in the heap."""
    # An empty value lies where another begins.
    keys = references["position"], references["length"], env_ids
    order = np.lexsort(keys)
    begins = np.ones(len(order), bool)
    begins[1:] = np.logical_or.reduce([np.diff(key[order]) != 0 for key in keys])
    # The sort is stable: the first of equal ones is the lowest.
    first = np.empty_like(order)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


class UndecodedImages:
    """Images ``[N, ..., height, width, channels]`` that are not decoded yet.

    A batch may need only some of them. `shape`, `reshape` and indices of the leading
    axes work as those of an array; `numpy.asarray` decodes.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        read: Callable[[References, Ids, Ids], Any],
        references: References,
        env_ids: Ids,
        positions: Ids,
        inner: tuple[int, ...],
        numbers: Ids | None = None,
    ) -> None:
        """Refer to images.

        Args:
            read: Reads those of references of rows.
            references: ``[N, ...]``.
            env_ids: int64 ``[N]``, of the rows.
            positions: int64 ``[N]``.
            inner: Shape of an image.
            numbers: Which of the references, in the shape of the leading axes.
        """
        self._read, self._references, self._inner = read, references, inner
        self._env_ids, self._positions = env_ids, positions
        if numbers is None:
            numbers = np.arange(references.size).reshape(references.shape)
        self._numbers = numbers

    @property
    def shape(self) -> tuple[int, ...]:
        """As of an array."""
        return (*self._numbers.shape, *self._inner)

    @property
    def ndim(self) -> int:
        """As of an array."""
        return self._numbers.ndim + len(self._inner)

    def __len__(self) -> int:
        return len(self._numbers)

    def _with(self, numbers: Ids) -> UndecodedImages:
        rows = self._references, self._env_ids, self._positions
        return UndecodedImages(self._read, *rows, self._inner, numbers)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and len(key) > self._numbers.ndim:
            return np.asarray(self)[key]
        return self._with(np.asarray(self._numbers[key]))

    def reshape(self, *shape: int) -> Any:
        """As of an array."""
        leading = shape[: len(shape) - len(self._inner)]
        if shape[len(leading) :] != self._inner:
            return np.asarray(self).reshape(*shape)
        return self._with(self._numbers.reshape(leading))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        flat = self._numbers.reshape(-1)
        rows = flat // max(1, self._references.size // max(1, len(self._env_ids)))
        references = self._references.reshape(-1)[flat]
        images: NDArray[Any] = self._read(references, self._env_ids[rows], self._positions[rows])
        images = images.reshape(self.shape)
        return images if dtype is None else images.astype(dtype, copy=False)


def decoded(fields: Fields) -> Fields:
    """The same, whose images are arrays."""
    return {
        name: np.asarray(column) if isinstance(column, UndecodedImages) else column
        for name, column in fields.items()
    }


class ValueReader:
    """Reads the values that vary of one generation."""

    def __init__(
        self, files: OpenFiles, heap: Heap, next_paths: Mapping[str, str], overwritten: Overwritten
    ) -> None:
        """Read of one generation.

        Args:
            files: Its open files.
            heap: Of its store.
            next_paths: Of fields whose next values batches hold too, under these names.
            overwritten: Says which steps may be overwritten by now, each by itself
                (``alone``) or with the rows that transforms read around it.
        """
        self._store, self._heap, self._commit = files.store, heap, files.commit
        self._fields, self._ring = files.metadata.schema.fields, files.metadata.ring
        self._checks, self._overwritten = files.policy.check_values, overwritten
        self._paths = files.metadata.schema.varying
        self._buffers = BufferPool()
        # Names of batches under which values vary: stored paths, and next ones.
        self._named = {}
        for path in self._paths:
            field = self._fields[path]
            self._named[path] = (path, 0, field)
            if path in next_paths:
                self._named[next_paths[path]] = (path, 1, field)

    def with_values(
        self,
        fields: Fields,
        env_ids: Ids,
        positions: Ids,
        *,
        copied: bool = False,
        by_row: bool = False,
        as_stored: Collection[str] = (),
        later: bool = False,
    ) -> Fields:
        """Replace references by the values that they name, as draws hold them.

        Args:
            fields: Per path ``[N, ...]``; of fields that vary references, or `Ragged`,
                which stays as it is.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, the steps.
            by_row: Each row counts by itself; see `_refuse_damaged`.
            copied: The rows go to other files, each by itself, where values get new
                checksums: they are compared with those that they have here, and stay
                as they are stored.
            as_stored: Fields whose values stay as they are stored, too.
            later: Images become `UndecodedImages`, which `decoded` makes arrays of.

        Returns:
            The same, with `Ragged` of references ``[N, ...]``, or what draws hold.

        Raises:
            CorruptError: A reference of a row that is still there is illegal or, where
                that is looked at, a value differs from its checksum.
        """
        result = dict(fields)
        for name, column in fields.items():
            if column.dtype != REFERENCE:
                continue
            path, _, field = self._named[name]
            drawn = field.drawn is not field and not copied and path not in as_stored
            read = partial(
                self._values_of, name, copied=copied, alone=copied or by_row, drawn=drawn
            )
            if drawn and later:
                result[name] = UndecodedImages(read, column, env_ids, positions, field.drawn.shape)
            else:
                result[name] = read(column, env_ids, positions)
        return result

    def _values_of(
        self,
        name: str,
        column: References,
        env_ids: Ids,
        positions: Ids,
        *,
        copied: bool,
        alone: bool,
        drawn: bool,
    ) -> Any:
        """The values that a column of references ``[N, ...]`` names, of N rows.

        Args:
            name: Of the column in a batch.
            column: The references.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``.
            copied: See `with_values`.
            alone: See `_refuse_damaged`.
            drawn: As draws hold them, and not as they are stored.

        Returns:
            `Ragged` of shape ``[N, ...]``, or what draws hold.
        """
        # Of a record no older than the draw, whose rows end below these heads, and no
        # newer than the recheck, which drops the rows below its tails.
        heap_heads, heap_tails = heap_bounds(self._commit)
        path, ahead, field = self._named[name]
        count = len(env_ids)
        references = column if column.ndim == 1 else column.reshape(-1)
        each = len(references) // count if count else 1
        ids = env_ids if each == 1 else np.repeat(env_ids, each)
        references, data, offsets, illegal = self._store.take_values(
            path, references, ids, heap_tails, heap_heads, self._buffers.empty_bytes
        )
        if illegal is not None:
            steps = illegal.reshape(count, -1).any(axis=1)
            self._refuse_damaged(path, env_ids[steps], positions[steps], ahead, alone=alone)
        if copied or self._checks:
            nbytes = nbytes_of(references, field)
            sums = checksums(data, np.cumsum(nbytes) - nbytes, nbytes)
            differs = sums != references["crc"]
            if differs.any():
                steps = differs.reshape(count, -1).any(axis=1)
                self._refuse_damaged(
                    path,
                    env_ids[steps],
                    positions[steps],
                    ahead,
                    "its value differs from its checksum",
                    alone=alone,
                )
        values = data.view(field.numpy)
        if field.inner:
            values = values.reshape(-1, *field.inner)
        taken = Ragged(values, offsets)
        if drawn:
            array, damage = field.rules.decode(field, taken, _first_of_equal(references, ids))
            for number, what in damage.items():
                step = slice(number // each, number // each + 1)
                what = f"it is no {field.description} ({what})"
                self._refuse_damaged(path, env_ids[step], positions[step], ahead, what, alone=alone)
            return array.reshape(*column.shape, *array.shape[1:])
        return taken if column.ndim == 1 else taken.reshape(*column.shape)

    def refuse_overlaps(self, fields: Fields, env_ids: Ids, positions: Ids) -> None:
        """Refuse references of rows in order whose values do not rise without overlap.

        Values of many rows then take no more memory than the heap does: references
        that were forged could all lead to one long value.

        Args:
            fields: Per path ``[N]``, what `Store.gather` returned of fields that vary.
            env_ids: int64 ``[N]``, equal ones together.
            positions: int64 ``[N]``, rising in each environment.

        Raises:
            CorruptError: Some overlap, and their rows are still there.
        """
        paths, (heap_heads, heap_tails) = self._paths, heap_bounds(self._commit)
        rows = self._ring.rows(env_ids, positions)
        columns: Fields = dict(
            self._store.heap_references(rows, {path: fields[path] for path in paths})
        )
        bounds = self._heap.nbytes, heap_tails[env_ids], heap_heads[env_ids]
        starts = np.stack([columns[path]["position"] for path in paths], axis=1)
        sizes = []
        for path in paths:
            field, references = self._fields[path], columns[path]
            # Illegal ones lead nowhere, and are refused by name where they are read.
            fits = legal(references, field, *bounds)
            sizes.append(np.where(fits, nbytes_of(references, field), 0))
        nbytes = np.stack(sizes, axis=1)
        for env_id in np.unique(env_ids).tolist():
            (rows,) = np.nonzero(env_ids == env_id)
            row, number = np.nonzero(nbytes[rows] > 0)
            begins = starts[rows][row, number]
            ends = begins + nbytes[rows][row, number]
            overlaps = np.flatnonzero(begins[1:] < np.maximum.accumulate(ends)[:-1])
            if len(overlaps):
                at = int(overlaps[0]) + 1
                which = rows[row[at : at + 1]]
                path = paths[int(number[at])]
                self._refuse_damaged(path, env_ids[which], positions[which], 0, alone=True)

    def lengths(
        self, paths: Sequence[str], env_ids: Ids, positions: Ids, *, damaged: bool
    ) -> dict[str, Ids]:
        """Items of the values of given rows, without the values.

        Args:
            paths: Fields that vary.
            env_ids: int64 ``[N]``.
            positions: int64 ``[N]``, alive.
            damaged: What damaged references say counts, too.

        Returns:
            Per path int64 ``[N]``.

        Raises:
            CorruptError: A reference of a row that is still there is illegal.
        """
        heap_heads, heap_tails = heap_bounds(self._commit)
        rows = self._ring.rows(env_ids, positions)
        # After the record: a heap tail passes values once shards hold them.
        fields: Fields = self._store.stored(rows, tuple(paths))
        in_shards = self._store.sealed(rows)
        found = {}
        for path in paths:
            references, field = fields[path], self._fields[path]
            assert field.max_length is not None
            bounds = self._heap.nbytes, heap_tails[env_ids], heap_heads[env_ids]
            illegal = ~legal(references, field, *bounds)
            illegal &= ~(in_shards & (references["length"] <= field.max_length))
            if illegal.any() and not damaged:
                self._refuse_damaged(path, env_ids[illegal], positions[illegal], 0)
            found[path] = references["length"].astype(np.int64)
        return found

    def average_nbytes(self, span: Span, get_lengths: Callable[..., dict[str, Ids]]) -> int:
        """Bytes of the values of a row, by some of the rows alive.

        Args:
            span: The rows alive.
            get_lengths: `GenerationReader.get_lengths`.
        """
        numbers = np.linspace(0, 1, AVERAGED_ROWS, endpoint=False)[:, None]
        there = np.flatnonzero(span.lengths)
        lengths = span.lengths[there]
        positions = span.first[there] + (numbers * lengths).astype(np.int64)
        try:
            items = get_lengths(self._paths, there, positions, damaged=True)
        except (StaleError, FailedError, CorruptError):
            # It is for a message about something else.
            return 0
        sizes = [items[path] * self._fields[path].inner_nbytes for path in self._paths]
        # Environments count by their rows.
        means = np.sum(sizes, axis=0).mean(axis=0)
        return round(float(means @ lengths / lengths.sum()))

    def _refuse_damaged(
        self,
        path: str,
        env_ids: Ids,
        positions: Ids,
        ahead: int,
        damage: str | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Refuse references and values that are wrong, unless overwritten by now.

        Args:
            path: Their field.
            env_ids: int64 ``[N]``, of their steps.
            positions: int64 ``[N]``, likewise.
            ahead: Steps after those in which they lie.
            damage: What is wrong; by default, their references.
            alone: Each row counts by itself, whatever transforms would read with it.

        Raises:
            CorruptError: They are damage.
        """
        damaged = np.flatnonzero(~self._overwritten(env_ids, positions, alone=alone))
        if len(damaged):
            env_id, position = env_ids[damaged[:1]], positions[damaged[:1]] + ahead
            if damage is None:
                (row,) = self._ring.rows(env_id, position).tolist()
                file = self._store.file_with(path, row)
                damage = f"its reference does not lead to a value in {file}"
            raise CorruptError(
                f"field {path!r} is damaged in position {position[0]} of environment "
                f"{env_id[0]}: {damage}. Restore the buffer from a "
                f"copy{OR_REPAIR}."
            )

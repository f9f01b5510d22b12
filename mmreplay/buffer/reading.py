"""What every open buffer can read: draws, given rows, everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.batch import Batch
from mmreplay.buffer.ahead import ReadAhead
from mmreplay.buffer.drawing import Drawing, Fold
from mmreplay.buffer.lifecycle import Parts
from mmreplay.buffer.steps import Fields
from mmreplay.buffer.view import LiveView, Moment
from mmreplay.episodes import FINAL, EpisodeIndex
from mmreplay.errors import EmptyError, SchemaError, shown
from mmreplay.files import File
from mmreplay.format.metadata import Metadata
from mmreplay.ring import Span
from mmreplay.samplers.base import Draw, Home, Sampler
from mmreplay.schema.convert import array_of, on_host
from mmreplay.storage.zarr import ZarrStore
from mmreplay.storage.zarr_group import shards_in

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

SCAN_ROWS = 8192
MAX_INT64 = 2**63 - 1

Ids = NDArray[np.int64]


class Reading:
    """Reads one open generation of a buffer."""

    def __init__(
        self, parts: Parts, fold: Fold | None = None, former: Reading | None = None
    ) -> None:
        """Make one.

        Args:
            parts: The generation.
            fold: What makes a batch of stored rows.
            former: What read the generation before this one.
        """
        self._store = parts.store
        self._schema = parts.metadata.schema
        metadata = parts.metadata
        self._ring = metadata.ring
        epoch, cuts = parts.ledger.cut_epoch, parts.ledger.cuts
        home = Home(
            metadata.ring, parts.path, metadata.uuid, metadata.generation, epoch,
            cuts if epoch else None,
        )  # fmt: skip
        self.view: LiveView = LiveView(
            parts.store, parts.ledger, self._schema, metadata.autoreset, home, fold,
            None if former is None else former.view,
        )  # fmt: skip
        self.drawing = Drawing(self.view, self._schema, fold)
        self.ahead = ReadAhead(parts.store, self.view, self.view.next_paths, fold)

    @property
    def files(self) -> list[File]:
        """Open files that hold the rows."""
        return self._store.files

    @property
    def paths(self) -> list[Path]:
        """Of the same and, in a compressed buffer, of its shards."""
        store = self._store
        shards = shards_in(store.path) if isinstance(store, ZarrStore) else []
        return [*(file.path for file in store.files), *shards]

    @property
    def span(self) -> Span:
        """What is alive."""
        return self.view.span

    @property
    def index(self) -> EpisodeIndex:
        """The episodes alive."""
        return self.view.index

    def _ids(self, env_ids: ArrayLike, positions: ArrayLike) -> tuple[Ids, Ids]:
        """Broadcast and check what a user names rows with."""
        ids, places = _integers("env_ids", env_ids), _integers("positions", positions)
        try:
            ids, places = np.broadcast_arrays(ids, places)
        except ValueError:
            raise SchemaError(
                f"env_ids and positions: got shapes {list(ids.shape)} and "
                f"{list(places.shape)}, expected shapes that broadcast; give one "
                "environment a position"
            ) from None
        self.view.check(ids.ravel(), places.ravel())
        return ids, places

    def _still(self, env_ids: Ids, positions: Ids, moment: Moment) -> None:
        """Raise StaleError if rows were given up while they were copied."""
        if self.view.stale(env_ids, positions, moment) is not None:
            self.view.check(env_ids, positions)

    def take(self, env_ids: ArrayLike, positions: ArrayLike, key: int) -> Batch:
        """Gather given steps; see `ReplayBuffer.take`."""
        ids, places = self._ids(env_ids, positions)
        return self.drawing.gather(_given(ids.ravel(), places.ravel(), key))

    def update_priorities(
        self, sampler: Sampler, batch: Batch, values: ArrayLike
    ) -> int:
        """Pass priorities on; see `ReplayBuffer.update_priorities`."""
        # To ask isinstance for the protocol takes 9 us, a tenth of a whole turn.
        update = getattr(sampler, "update_priorities", None)
        if update is None:
            raise SchemaError(
                f"update_priorities: got the sampler {type(sampler).__name__}, which "
                "keeps no priorities, expected one that does; open the buffer with "
                "sampler=mmreplay.PrioritizedSampler(...), or give those of a batch "
                "that a dataset's draws made to draws.update_priorities"
            )
        if not isinstance(batch, Batch):
            raise SchemaError(
                f"update_priorities: got {type(batch).__name__}, expected the batch "
                "that sample gave, which knows its steps; pass "
                "update_priorities(batch, values)"
            )
        uuid, several = self.view.home.uuid, batch.buffer_ids is not None
        if several or batch.buffer not in (b"", uuid):
            whose = "several buffers" if several else f"buffer {batch.buffer.hex()}"
            raise SchemaError(
                f"update_priorities: got a batch of {whose}, expected one of "
                f"{uuid.hex()} ({self.view.home.folder or 'in RAM'}); give it to what "
                "drew it"
            )
        mask = None if batch.mask is None else _array(batch.mask)
        # To make tensors of both and to look at these as arrays takes 4 us.
        env_ids = _array(batch.drawn("env_ids"))
        positions = _array(batch.drawn("positions"))
        numbers = _array(values)
        with self.view.lock:
            self.view.check_in_force()
            return int(update(self.view, env_ids, positions, numbers, mask))

    def _plain(self, fields: Fields, env_ids: Ids, positions: Ids) -> Batch:
        return self.drawing.batch(_given(env_ids, positions), fields)

    def rows(self, env_ids: Ids, positions: Ids, moment: Moment) -> Batch:
        """Stored fields of rows, and which are final."""
        fields = self.view.read(self._schema.paths, env_ids, positions)
        final = (self.view.flags(env_ids, positions) & FINAL) != 0
        self._still(env_ids, positions, moment)
        fields.setdefault("final", final)
        return self._plain(fields, env_ids, positions)

    def gather_all(self) -> Batch:
        """Every row; see `ReplayBuffer.gather_all`."""
        moment = self.view.moment
        ids, span = np.arange(self._ring.num_envs), self.span
        return self._between(ids, span.first, span.stop, moment)

    def oldest(self, count: int, env_ids: Ids | None) -> Batch:
        """The oldest rows of each environment; see `ReplayBuffer.dequeue`."""
        if not isinstance(count, int | np.integer) or count < 1:
            raise SchemaError(
                f"count: got {shown(count)}, expected an integer of at least 1; ask "
                "for rows"
            )
        moment = self.view.moment
        ids = np.arange(self._ring.num_envs) if env_ids is None else env_ids
        span = self.span
        lengths = span.lengths[ids]
        if (lengths < count).any():
            which = int(ids[np.argmin(lengths)])
            raise EmptyError(
                f"cannot dequeue {count} rows: environment {which} holds "
                f"{lengths.min()}, expected at least that many; ask for fewer, or name "
                "other environments"
            )
        firsts = span.first[ids]
        return self._between(ids, firsts, firsts + count, moment)

    def _between(self, ids: Ids, firsts: Ids, stops: Ids, moment: Moment) -> Batch:
        lengths = stops - firsts
        total = int(lengths.sum())
        env_ids = np.repeat(ids, lengths)
        edges = np.cumsum(lengths) - lengths
        positions = np.arange(total) - np.repeat(edges - firsts, lengths)
        out: Fields = {}
        for first in range(0, max(1, total), SCAN_ROWS):
            piece = slice(first, first + SCAN_ROWS)
            part = self.rows(env_ids[piece], positions[piece], moment).fields
            for path, array in part.items():
                if path not in out:
                    out[path] = np.empty((total, *array.shape[1:]), array.dtype)
                out[path][piece] = array
        return self._plain(out, env_ids, positions)

    def get_field(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike
    ) -> NDArray[np.generic]:
        """One field; see `ReplayBuffer.get_field`."""
        return self.get_fields((path,), env_ids, positions)[path]

    def get_fields(
        self, paths: tuple[str, ...], env_ids: ArrayLike, positions: ArrayLike
    ) -> Fields:
        """Some fields of given rows; see `ReplayBuffer.get_fields`."""
        fields = [self._schema[path] for path in paths]
        moment = self.view.moment
        ids, places = self._ids(env_ids, positions)
        found = self.view.read(paths, ids.ravel(), places.ravel())
        self._still(ids.ravel(), places.ravel(), moment)
        return {
            path: np.ascontiguousarray(found[path]).reshape((*ids.shape, *field.shape))
            for path, field in zip(paths, fields, strict=True)
        }

    def flags(self, env_ids: ArrayLike, positions: ArrayLike) -> NDArray[np.uint8]:
        """Flags of rows; see `OpenBuffer.flags`."""
        moment = self.view.moment
        ids, places = self._ids(env_ids, positions)
        found = self.view.flags(ids, places)
        self._still(ids.ravel(), places.ravel(), moment)
        return found

    def set(
        self, path: str, env_ids: ArrayLike, positions: ArrayLike, values: object
    ) -> None:
        """Overwrite values; see `ReplayBuffer.set`."""
        field = self._schema[path]
        if not field.mutable:
            raise SchemaError(
                f"field {path!r} is not mutable, expected one declared with "
                "Field(..., mutable=True); published rows never change otherwise"
            )
        ids, places = self._ids(env_ids, positions)
        column = field.convert(values, path, ids.shape)
        rows = self._ring.rows(ids.ravel(), places.ravel())
        if len(rows):
            self._store.set(path, rows, column.reshape(-1, *field.shape))


def _integers(name: str, values: ArrayLike) -> Ids:
    array = array_of(values, name)
    kind = array.dtype.kind
    if array.size and kind not in "iu":
        raise SchemaError(
            f"{name}: got {array.dtype}, expected integers; cast them first"
        )
    if array.size and kind == "u" and int(array.max()) > MAX_INT64:
        raise SchemaError(
            f"{name}: got {array.max()}, expected at most {MAX_INT64}; no row has such "
            "a number, look at buffer.span"
        )
    return array.astype(np.int64)


def _given(env_ids: Ids, positions: Ids, key: int = 0) -> Draw:
    """Named steps as a draw, each as likely."""
    count = len(positions)
    probabilities = np.full(count, 1 / max(1, count))
    return Draw(env_ids, positions, probabilities, np.ones(count, np.float32), key)


def _array(values: Any) -> NDArray[Any]:
    """An array of what may be a tensor, of any device, with a gradient or without."""
    if type(values) is np.ndarray:
        return values
    if hasattr(values, "detach"):
        values = on_host(values)
    return array_of(values, "values")


def listed(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Several transforms as one value.

    Raises:
        SchemaError: They are no list.
    """
    if not isinstance(transforms, Sequence):
        raise SchemaError(
            f"transforms: got {shown(transforms)}, expected a list of transforms; put "
            "one "
            "into a list of its own"
        )
    return tuple(transforms)


def fold_of(transforms: Sequence[Transform], metadata: Metadata) -> Fold | None:
    """What makes a buffer's batches, or None for steps as they are.

    Raises:
        SchemaError: The transforms do not fit the schema, the ring, or each other.
    """
    if not listed(transforms):
        return None
    from mmreplay.transforms.pipeline import Pipeline

    follows = metadata.autoreset == "next_step"
    fold = Pipeline(transforms, metadata.schema, final_follows=follows)
    rows, capacity = fold.before + 1 + fold.after, metadata.ring.capacity
    if rows > capacity:
        raise SchemaError(
            f"transforms: got windows of {rows} rows, expected at most the {capacity} "
            "that the buffer keeps of each environment; take fewer steps, or resize it"
        )
    return fold

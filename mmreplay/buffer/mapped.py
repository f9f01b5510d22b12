"""A field of all rows alive as it lies in its file: views instead of copies.

They are for whoever wants to look at a whole field that is larger than RAM, such as
the faces of other libraries that hand their tensors out. The mapping is private: the
system shows the pages of the file, and gives whoever writes into one a copy of it, so
that a stray store neither ends the process, as on a mapping that is read-only, nor
changes a row that was published.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.ring import Span
from mmreplay.storage.base import Store
from mmreplay.storage.memmap import MemmapStore
from mmreplay.storage.placement import RECORDS, place


def mapped(store: Store, span: Span, path: str) -> list[NDArray[Any]] | None:
    """Views of a field's rows; see `ReplayBuffer.mapped`."""
    field = store.schema[path]
    placement, ring = place(store.schema), store.ring
    first, stop = int(span.first[0]), int(span.stop[0])
    in_step = (span.first == first).all() and (span.stop == stop).all()
    if not isinstance(store, MemmapStore) or path in placement.served or not in_step:
        return None
    name = placement.large.get(path, RECORDS)
    (file,) = [file for file in store.files if file.path.name == name]
    mapping = file.map_private()
    if name == RECORDS:
        rows = np.frombuffer(mapping, placement.record)[path]
    else:
        rows = np.frombuffer(mapping, field.numpy).reshape(-1, *field.shape)
    if ring.layout == "time_major":
        steps = rows.reshape(ring.slots, ring.num_envs, *field.shape)
    else:
        steps = rows.reshape(ring.num_envs, ring.slots, *field.shape).swapaxes(0, 1)
    begin, count = first % ring.slots, stop - first
    ahead = min(count, ring.slots - begin)
    pieces = [steps[begin : begin + ahead]]
    return pieces if ahead == count else [*pieces, steps[: count - ahead]]

"""From gathered arrays to the tensors that a learner is handed.

On the CPU they are the arrays themselves. For a GPU they are gathered into pinned
memory and copied on a stream of the loader's own: all small arrays of a batch in one
copy, each large one by itself.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.errors import SchemaError, shown
from mmreplay.storage.buffer_pool import BufferPool

if TYPE_CHECKING:
    from torch import device as Device

Array = NDArray[Any]
LARGE_NBYTES = 256 << 10
"""Arrays from here on are copied by themselves: what a copy costs to begin is less
than to put them beside the others."""
ALIGNMENT = 64
MAX_SHAPES = 256
NO_LIMIT = 1 << 62


class Sender(Protocol):
    """Brings batches to where the learner wants them."""

    recycler: BufferPool

    def send(self, batch: Batch) -> Any:
        """Begin to bring a batch there; called by the threads that gather."""

    def receive(self, sent: Any) -> Batch:
        """Return the batch; called by the learner, which may use it at once."""

    def settle(self) -> None:
        """Wait for what is under way, and keep no memory for it."""


def sender_of(
    device: str | Device, room: int, kind: type[BufferPool] = BufferPool
) -> Sender:
    """Make the sender for a device.

    Args:
        device: As torch names them.
        room: Arrays of one shape in memory at once, of all batches.
        kind: Of memory that batches are gathered into.

    Raises:
        SchemaError: There is no such device here, or it is neither CPU nor CUDA.
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(
            f"device: got {shown(device)}, expected one such as 'cpu' or 'cuda'; name "
            "one"
        ) from error
    if found.type == "cpu":
        return ToCpu(room, kind)
    if found.type != "cuda":
        raise SchemaError(
            f"device: got {device!r}, expected 'cpu' or 'cuda'; take device='cpu' and "
            "move the batches with batch.to(device)"
        )
    if not torch.cuda.is_available():
        raise SchemaError(
            f"device: got {device!r}, expected 'cpu', as torch finds no GPU here; take "
            "device='cpu', or install a GPU's driver and torch's CUDA build"
        )
    return ToCuda(found, room, kind)


class ToCpu:
    """Hands over the arrays as tensors, without a copy."""

    def __init__(self, room: int, kind: type[BufferPool] = BufferPool) -> None:
        self.recycler = kind(room, MAX_SHAPES, NO_LIMIT)

    def send(self, batch: Batch) -> Batch:
        """See `Sender.send`."""
        if not torch.is_inference_mode_enabled():
            return batch.torch()
        # Of a learner's that makes it itself; others' batches are plain ones, too.
        with torch.inference_mode(False):
            return batch.torch()

    def receive(self, sent: Batch) -> Batch:
        """See `Sender.receive`."""
        return sent

    def settle(self) -> None:
        """Let the memory go that nobody holds."""
        self.recycler.clear()


class ToCuda:
    """Copies batches to a GPU beside what the learner computes there.

    Threads: any may send, and one at a time receives.
    """

    def __init__(
        self, device: Device, room: int, kind: type[BufferPool] = BufferPool
    ) -> None:
        # An index, because the current device is each thread's own.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.recycler = kind(room, MAX_SHAPES, NO_LIMIT, pinned)
        self._lock = threading.RLock()
        self._flying: deque[tuple[torch.cuda.Event, list[Array]]] = deque()

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event, list[torch.Tensor]]:
        """Queue the copies; see `Sender.send`."""
        arrays = arrays_of(batch)
        small = {name: a for name, a in arrays.items() if a.nbytes < LARGE_NBYTES}
        places, nbytes = laid_out(small)
        slab = self.recycler.empty((nbytes,), np.dtype(np.uint8))
        put_together(small, places, slab)
        sources = {"": slab}
        for name in arrays.keys() - small.keys():
            sources[name] = self._pinned(arrays[name])
        there, event = self._begin(sources)
        self._hold(event, list(sources.values()))
        tensors = apart(there[""], small, places) | there
        tensors = {name: tensors[name] for name in arrays}
        return rebuilt(batch, tensors), event, list(there.values())

    def _begin(
        self, sources: dict[str, Array]
    ) -> tuple[dict[str, torch.Tensor], torch.cuda.Event]:
        """Queue the copies of arrays, and an event after them."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            there = {
                name: torch.from_numpy(array).to(self._device, non_blocking=True)
                for name, array in sources.items()
            }
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return there, event

    def _pinned(self, array: Array) -> Array:
        """The array itself where it is one piece of pinned memory, or a copy."""
        if array.flags.c_contiguous and is_pinned(array):
            return array
        copy = self.recycler.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def _hold(self, event: torch.cuda.Event, sources: list[Array]) -> None:
        """Keep memory from being filled again before it was copied."""
        with self._lock:
            self._flying.append((event, sources))
            flying = self._flying
            while flying and flying[0][0].query():  # type: ignore[no-untyped-call]
                flying.popleft()

    def receive(
        self, sent: tuple[Batch, torch.cuda.Event, list[torch.Tensor]]
    ) -> Batch:
        """Have the learner's stream wait for the copies; see `Sender.receive`."""
        batch, event, tensors = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors:
            # Dropped, it is used again only when this stream has done what was
            # queued on it until then.
            tensor.record_stream(stream)
        return batch

    def settle(self) -> None:
        """Wait for the copies, and let the pinned memory go."""
        self._stream.synchronize()
        with self._lock:
            self._flying.clear()
        self.recycler.clear()


def pinned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Make an array in memory that a GPU copies from by itself."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    tensor = torch.empty(
        max(1, nbytes), dtype=torch.uint8, device="cpu", pin_memory=True
    )
    return array_over(tensor, shape, dtype)


def is_pinned(array: Array) -> bool:
    """Whether a GPU copies from an array's memory by itself."""
    return torch.from_numpy(array).is_pinned()


def array_over(
    tensor: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> Array:
    """An array of any dtype in a tensor's memory, on the CPU.

    Views of an array that is a view itself refer to what is beneath it: they would
    not count as views of this one, and it would be used again while they are read.
    So beneath it is something that is no array.
    """
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]  # lives as long as that
    return np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]  # a buffer


def arrays_of(batch: Batch) -> dict[str, Array]:
    """Every array of a batch, by a name that `rebuilt` knows."""
    found: dict[str, Array] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            found[f".{field.name}"] = value
    return found | {f"/{path}": array for path, array in batch.fields.items()}


def rebuilt(batch: Batch, tensors: dict[str, torch.Tensor]) -> Batch:
    """The batch with tensors in place of its arrays; see `arrays_of`."""
    own = {name[1:]: t for name, t in tensors.items() if name[0] == "."}
    found = {name[1:]: t for name, t in tensors.items() if name[0] == "/"}
    for path in batch.bfloat16 & found.keys():
        found[path] = found[path].view(torch.bfloat16)
    return replace(batch, fields=found, **own)  # type: ignore[arg-type]  # by name


def laid_out(arrays: dict[str, Array]) -> tuple[dict[str, int], int]:
    """Where arrays lie in one piece of memory: offsets, and bytes in all."""
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


def put_together(
    arrays: dict[str, Array], places: dict[str, int], slab: NDArray[Any]
) -> None:
    """Copy arrays into one piece of memory.

    Args:
        arrays: By name, of any strides.
        places: As `laid_out` says.
        slab: uint8 ``[N]``.
    """
    for name, array in arrays.items():
        there = slab[places[name] : places[name] + array.nbytes]
        there.view(array.dtype).reshape(array.shape)[...] = array


def apart(
    slab: torch.Tensor, arrays: dict[str, Array], places: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Tensors over a copy of what was put together, on whichever device it is."""
    return {
        name: slab[places[name] : places[name] + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .reshape(array.shape)
        for name, array in arrays.items()
    }

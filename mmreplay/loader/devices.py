"""Senders: from gathered arrays to tensors on the learner's device.

On the CPU the tensors share the arrays' memory. For a GPU batches are gathered into
pinned memory and copied on a stream of the loader's own: all small arrays of a batch in
one copy, each large one by itself.
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
from mmreplay.ragged import Ragged
from mmreplay.storage.gather import BufferPool

if TYPE_CHECKING:
    from torch import device as Device

Array = NDArray[Any]
LARGE_NBYTES = 256 << 10
"""Smallest array that is copied by itself: below it, packing it with the others costs
less than beginning another copy."""
ALIGNMENT = 64
MAX_SHAPES = 256
NO_LIMIT = 1 << 62


class Sender(Protocol):
    """Moves batches to the learner's device.

    Attributes:
        pool: Memory that batches are gathered into.
    """

    pool: BufferPool

    def send(self, batch: Batch) -> Any:
        """Begin to move a batch; called by the threads that gather."""

    def receive(self, sent: Any) -> Batch:
        """Return the batch; called by the learner, which may use it at once."""

    def settle(self) -> None:
        """Wait for copies under way, and release the memory."""


def sender_of(
    device: str | Device, max_arrays: int, pool_type: type[BufferPool] = BufferPool
) -> Sender:
    """Make the sender for a device.

    Args:
        device: As torch names it.
        max_arrays: Arrays of one shape in memory at once, of all batches.
        pool_type: Kind of memory that batches are gathered into.

    Raises:
        SchemaError: There is no such device here, or it is neither CPU nor CUDA.
    """
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(
            f"device must be 'cpu' or 'cuda', got {shown(device)}. Pass one of them."
        ) from error
    if target.type == "cpu":
        return ToCpu(max_arrays, pool_type)
    if target.type != "cuda":
        raise SchemaError(
            f"device must be 'cpu' or 'cuda', got {device!r}. Pass device='cpu' and "
            "move the batches with batch.to(device)."
        )
    if not torch.cuda.is_available():
        raise SchemaError(
            f"device must be 'cpu', because torch finds no GPU, got {device!r}. Pass "
            "device='cpu', or install the GPU's driver and torch's CUDA build."
        )
    return ToCuda(target, max_arrays, pool_type)


class ToCpu:
    """Hands over the arrays as tensors, without a copy."""

    def __init__(self, max_arrays: int, pool_type: type[BufferPool] = BufferPool) -> None:
        self.pool = pool_type(max_arrays, MAX_SHAPES, NO_LIMIT)

    def send(self, batch: Batch) -> Batch:
        """Return the batch as tensors."""
        if not torch.is_inference_mode_enabled():
            return batch.torch()
        # A learner in inference mode gathers by itself, too. Its batches are plain
        # tensors, as those of threads, where that mode is off.
        with torch.inference_mode(False):
            return batch.torch()

    def receive(self, sent: Batch) -> Batch:
        """Return the batch as it is."""
        return sent

    def settle(self) -> None:
        """Release the memory; batches that the learner has keep theirs."""
        self.pool.clear()


class ToCuda:
    """Copies batches to a GPU while the learner computes there.

    Threads: any may send, and one at a time receives.
    """

    def __init__(
        self, device: Device, max_arrays: int, pool_type: type[BufferPool] = BufferPool
    ) -> None:
        # By index: each thread has a current device of its own.
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.pool = pool_type(max_arrays, MAX_SHAPES, NO_LIMIT, pinned)
        self._lock = threading.RLock()
        # Events after copies, and the pinned memory that each one reads.
        self._copying: deque[tuple[torch.cuda.Event, list[Array]]] = deque()

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event, list[torch.Tensor]]:
        """Queue the copies of a batch, and an event after them."""
        arrays = arrays_of(batch)
        small = {name: a for name, a in arrays.items() if a.nbytes < LARGE_NBYTES}
        offsets, nbytes = slab_offsets(small)
        slab = self.pool.empty_bytes(nbytes)
        pack(small, offsets, slab)
        sources = {"": slab}
        for name in arrays.keys() - small.keys():
            varies = name.replace("/", "#", 1) in arrays
            sources[name] = self._pinned(arrays[name], varies)
        copies, event = self._begin(sources)
        self._keep_until(event, list(sources.values()))
        tensors = unpack(copies[""], small, offsets) | copies
        tensors = {name: tensors[name] for name in arrays}
        return with_tensors(batch, tensors), event, list(copies.values())

    def _begin(self, sources: dict[str, Array]) -> tuple[dict[str, torch.Tensor], torch.cuda.Event]:
        """Queue the copies of arrays, and an event after them."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copies = {
                name: torch.from_numpy(array).to(self._device, non_blocking=True)
                for name, array in sources.items()
            }
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return copies, event

    def _pinned(self, array: Array, varies: bool) -> Array:
        """The array itself where it is contiguous pinned memory, or else a copy.

        Args:
            array: Of a batch.
            varies: Other batches have another number of its items.
        """
        if array.flags.c_contiguous and is_pinned(array):
            return array
        if varies:
            data = self.pool.empty_bytes(array.nbytes)
            copy = data.view(array.dtype).reshape(array.shape)
        else:
            copy = self.pool.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def _keep_until(self, event: torch.cuda.Event, sources: list[Array]) -> None:
        """Keep memory from being filled again before it was copied."""
        with self._lock:
            copying = self._copying
            copying.append((event, sources))
            while copying and copying[0][0].query():  # type: ignore[no-untyped-call]
                copying.popleft()

    def receive(self, sent: tuple[Batch, torch.cuda.Event, list[torch.Tensor]]) -> Batch:
        """Have the learner's current stream wait for the copies."""
        batch, event, tensors = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for tensor in tensors:
            # After it is dropped, its memory is used again only when this stream has
            # done the work that was queued on it until then.
            tensor.record_stream(stream)
        return batch

    def settle(self) -> None:
        """Wait for the copies, and release the pinned memory."""
        self._stream.synchronize()
        with self._lock:
            self._copying.clear()
        self.pool.clear()


def pinned(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return an array in pinned memory, whose content means nothing."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    tensor = torch.empty(max(1, nbytes), dtype=torch.uint8, device="cpu", pin_memory=True)
    return array_over(tensor, shape, dtype)


def is_pinned(array: Array) -> bool:
    """Whether an array's memory is pinned."""
    return torch.from_numpy(array).is_pinned()


def array_over(tensor: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
    """Return an array of any dtype in a tensor's memory, on the CPU.

    Its base is a ctypes object. With an array as its base, views of this array would
    refer to that base and not to this array: its reference count, by which the pool
    decides, would not count them, and the memory would be used again while they are
    read.
    """
    memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    # The tensor lives as long as the array.
    memory.tensor = tensor  # type: ignore[attr-defined]  # ctypes takes any attribute
    return np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]  # a buffer


def arrays_of(batch: Batch) -> dict[str, Array]:
    """Return every array of a batch: ``.name`` of columns, ``/path`` of fields.

    Of a field that varies these are ``/path`` of its values, and ``#path`` of offsets.
    """
    arrays: dict[str, Array] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, np.ndarray):
            arrays[f".{field.name}"] = value
    for path, array in batch.fields.items():
        if isinstance(array, Ragged):
            arrays[f"#{path}"] = array.offsets
            array = array.values
        arrays[f"/{path}"] = array
    return arrays


def with_tensors(batch: Batch, tensors: dict[str, torch.Tensor]) -> Batch:
    """Return the batch with tensors in place of its arrays.

    Args:
        batch: Of arrays.
        tensors: By the names of `arrays_of`.
    """
    columns = {name[1:]: t for name, t in tensors.items() if name[0] == "."}
    by_path: dict[str, Any] = {n[1:]: t for n, t in tensors.items() if n[0] == "/"}
    for path, array in batch.fields.items():
        if isinstance(array, Ragged):
            by_path[path] = Ragged(by_path[path], tensors[f"#{path}"], array.shape)
    for path in batch.bfloat16 & by_path.keys():
        by_path[path] = by_path[path].view(torch.bfloat16)
    return replace(batch, fields=by_path, **columns)  # type: ignore[arg-type]  # by name


def slab_offsets(arrays: dict[str, Array]) -> tuple[dict[str, int], int]:
    """Return the offset of each array in one slab of memory, and the slab's bytes."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, max(end, ALIGNMENT)


def pack(arrays: dict[str, Array], offsets: dict[str, int], slab: NDArray[Any]) -> None:
    """Copy arrays into a slab.

    Args:
        arrays: By name, of any strides.
        offsets: From `slab_offsets`.
        slab: uint8 ``[N]``.
    """
    for name, array in arrays.items():
        target = slab[offsets[name] : offsets[name] + array.nbytes]
        target.view(array.dtype).reshape(array.shape)[...] = array


def unpack(
    slab: torch.Tensor, arrays: dict[str, Array], offsets: dict[str, int]
) -> dict[str, torch.Tensor]:
    """Return tensors over a copy of a packed slab, on the device that it is on."""
    return {
        name: slab[offsets[name] : offsets[name] + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .reshape(array.shape)
        for name, array in arrays.items()
    }

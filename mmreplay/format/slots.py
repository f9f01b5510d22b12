"""Slots of the COMMIT file and of a sampler's STATE file: a header and int64 columns.

A slot is whole pages: the header with its magic, flags and number of environments
first, columns of one int64 for each environment from byte 128 on, and a CRC-32C of all
of that in the last four bytes. Each file has its own magic, header and rules for which
slot counts; see `commit` and `samplers.priority_file`. docs/format.md has the offsets.
"""

from __future__ import annotations

import struct
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

HEADER_NBYTES = 128
CHECKSUM = struct.Struct("<I")
PAGE_NBYTES = 4096


def slot_nbytes(num_envs: int, num_columns: int) -> int:
    """Bytes of one slot: the pages that hold header, columns and checksum."""
    needed = HEADER_NBYTES + 8 * num_columns * num_envs + CHECKSUM.size
    return -(-needed // PAGE_NBYTES) * PAGE_NBYTES


def encode_slot(header: bytes, columns: NDArray[np.int64]) -> bytes:
    """Return the bytes of a slot.

    Args:
        header: At most 128 bytes, packed.
        columns: int64 ``[K, E]``.
    """
    num_columns, num_envs = columns.shape
    data = bytearray(slot_nbytes(num_envs, num_columns))
    data[: len(header)] = header
    body = columns.astype("<i8").tobytes()
    data[HEADER_NBYTES : HEADER_NBYTES + len(body)] = body
    seal(data)
    return bytes(data)


def seal(data: bytearray) -> None:
    """Store the checksum of a slot's bytes at their end."""
    end = len(data) - CHECKSUM.size
    CHECKSUM.pack_into(data, end, google_crc32c.value(bytes(data[:end])))


def decode_slot(
    data: bytes, magic: bytes, header: struct.Struct, num_envs: int, num_columns: int
) -> tuple[tuple[Any, ...], NDArray[np.int64]] | None:
    """Return the header's values and the columns of a slot, or None if it is void.

    A slot that is torn, blank or of another file is an ordinary case and no error: it
    is why each file has several.

    Args:
        data: The slot's bytes.
        magic: The first 8 bytes of a slot of this file.
        header: Begins with the magic, flags and the number of environments.
        num_envs: Environments of the buffer.
        num_columns: K.

    Returns:
        The values of the header that follow the magic, without the number of
        environments, and the columns, int64 ``[K, E]``.
    """
    end = len(data) - CHECKSUM.size
    if len(data) != slot_nbytes(num_envs, num_columns) or data[: len(magic)] != magic:
        return None
    if CHECKSUM.unpack_from(data, end)[0] != google_crc32c.value(data[:end]):
        return None
    _, flags, envs, *values = header.unpack_from(data)
    if envs != num_envs:
        return None
    body = np.frombuffer(data, "<i8", num_columns * num_envs, HEADER_NBYTES)
    columns = body.reshape(num_columns, num_envs).astype(np.int64)
    return (flags, *values), columns

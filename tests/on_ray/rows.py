"""Rows that carry a checksum of what they are, and writers of such rows on a node."""

from __future__ import annotations

import os
import zlib

import numpy as np

import mmreplay as mr

SCHEMA = mr.Schema(
    {
        "number": mr.Field((), "int64"),
        "writer": mr.Field((), "int64"),
        "crc": mr.Field((), "uint32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


def crc(writer: int, number: int) -> int:
    """The checksum of a row."""
    return zlib.crc32(f"{writer}/{number}".encode())


def block(writer: int, first: int, steps: int) -> dict[str, np.ndarray]:
    """Rows ``[first, first + steps)`` of a writer."""
    numbers = np.arange(first, first + steps)
    return {
        "number": numbers,
        "writer": np.full(steps, writer),
        "crc": np.array([crc(writer, n) for n in numbers.tolist()], np.uint32),
        "terminated": numbers % 50 == 49,
        "truncated": np.zeros(steps, bool),
    }


def check(batch) -> None:
    """Refuse rows whose checksum is not that of their numbers."""
    numbers, writers = batch["number"].tolist(), batch["writer"].tolist()
    sums = [crc(w, n) for w, n in zip(writers, numbers, strict=True)]
    assert batch["crc"].tolist() == sums


class Writing:
    """An actor that writes such rows on its node."""

    def __init__(self, run, root, number=0, **arguments):
        self.number = number
        arguments = {"capacity": 10_000, **arguments}
        capacity = arguments.pop("capacity")
        self.writer = mr.ray.writer(run, SCHEMA, capacity, root=root, **arguments)
        self.next = int(self.writer.buffer.heads.sum())

    def pid(self):
        return os.getpid()

    def add(self, steps):
        """Add rows and return how many there are, which are published then."""
        self.writer.extend(block(self.number, self.next, steps))
        self.next += steps
        return self.next

    def path(self):
        return str(self.writer.buffer.path)

    def key(self):
        return self.writer.key

    def close(self):
        self.writer.close()

"""Token sequences of any length behind one face: ours, and what others keep them in.

Each holds the newest rows of a ring, adds single rows and blocks, and draws random
rows: the items of all of them in one array or tensor, and how many each has. What is on
disk is durable once a second: ours by its thread; others ask for it in the first call
after each second, and where that waits for the disk, the call does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

import numpy as np

from mmreplay import Field, ReplayBuffer, Schema, UniformSampler
from tools.bench import token_rows
from tools.bench.token_rows import LONGEST, Tokens
from tools.bench.turns import OURS, chosen

BATCH = 256
COMMIT_S = 1.0
PADDED = "padded"


class Side(Protocol):
    """One way to keep token sequences, in a folder or in RAM."""

    def add(self, number: int, row: Tokens) -> None:
        """Store the row of a number, over the oldest where there is no space."""

    def extend(self, first: int, rows: list[Tokens]) -> None:
        """Store rows of consecutive numbers."""

    def draw(self) -> tuple[Any, Any]:
        """Draw a batch: the items of all rows, and the length of each."""

    def close(self) -> None:
        """Give up what is open, after what was added is durable."""


class Ours:
    """Our ring, with values that vary."""

    def __init__(self, folder: Path, capacity: int) -> None:
        """Create it."""
        self.buffer = token_rows.make(
            folder, capacity, commit_every=COMMIT_S, sampler=UniformSampler(seed=0)
        )

    def add(self, number: int, row: Tokens) -> None:
        """See `Side`."""
        self.buffer.add(tokens=row)

    def extend(self, first: int, rows: list[Tokens]) -> None:
        """See `Side`."""
        self.buffer.extend(tokens=rows)

    def draw(self) -> tuple[Any, Any]:
        """See `Side`."""
        tokens = self.buffer.sample(BATCH)["tokens"]
        return tokens.values, tokens.lengths

    def close(self) -> None:
        """See `Side`."""
        self.buffer.close()


class Padded:
    """Our ring, with all rows as long as the longest; zeros are behind the items."""

    def __init__(self, folder: Path, capacity: int) -> None:
        """Create it."""
        fields = {"tokens": Field((LONGEST,), "int32"), "length": Field((), "int32")}
        self.buffer = ReplayBuffer.create(
            folder, Schema(fields), capacity, commit_every=COMMIT_S, sampler=UniformSampler(seed=0)
        )
        self._block = np.zeros((BATCH, LONGEST), np.int32)

    def add(self, number: int, row: Tokens) -> None:
        """See `Side`."""
        padded = self._block[0]
        padded[: len(row)] = row
        padded[len(row) :] = 0
        self.buffer.add(tokens=padded, length=len(row))

    def extend(self, first: int, rows: list[Tokens]) -> None:
        """See `Side`."""
        for padded, row in zip(self._block, rows, strict=True):
            padded[: len(row)] = row
            padded[len(row) :] = 0
        lengths = np.array(list(map(len, rows)), np.int32)
        self.buffer.extend(tokens=self._block, length=lengths)

    def draw(self) -> tuple[Any, Any]:
        """See `Side`; the items are ``[B, 8000]``."""
        batch = self.buffer.sample(BATCH)
        return batch["tokens"], batch["length"]

    def close(self) -> None:
        """See `Side`."""
        self.buffer.close()


class Lmdb:
    """LMDB: a value a row, a transaction an add or block, synced once a second."""

    def __init__(self, folder: Path, capacity: int) -> None:
        """Create it."""
        folder.mkdir()
        self._capacity, self._count = capacity, 0
        # A row that is overwritten takes other pages until older readers have gone.
        size = 4 * (token_rows.nbytes(capacity) + 4096 * capacity)
        self._env = import_module("lmdb").open(
            str(folder), map_size=size, sync=False, metasync=False, readahead=False
        )
        self._rng, self._synced = np.random.default_rng(0), monotonic()

    def _key(self, number: int) -> bytes:
        return (number % self._capacity).to_bytes(4, "big")

    def add(self, number: int, row: Tokens) -> None:
        """See `Side`."""
        self.extend(number, [row])

    def extend(self, first: int, rows: list[Tokens]) -> None:
        """See `Side`."""
        with self._env.begin(write=True) as transaction:
            for number, row in enumerate(rows, first):
                transaction.put(self._key(number), row.data.cast("B"))
        self._count = min(self._capacity, max(self._count, first + len(rows)))
        if monotonic() - self._synced > COMMIT_S:
            self._env.sync(True)
            self._synced = monotonic()

    def draw(self) -> tuple[Any, Any]:
        """See `Side`: values are read where they lie, and copied once."""
        keys = self._rng.integers(self._count, size=BATCH).tolist()
        with self._env.begin(buffers=True) as transaction:
            found = [np.frombuffer(transaction.get(self._key(key)), np.int32) for key in keys]
            return np.concatenate(found), np.array(list(map(len, found)))

    def close(self) -> None:
        """See `Side`."""
        self._env.sync(True)
        self._env.close()


class Sqlite:
    """SQLite: a blob a row, a transaction an add or block, a checkpoint a second."""

    def __init__(self, folder: Path, capacity: int) -> None:
        """Create it."""
        folder.mkdir()
        self._capacity, self._count = capacity, 0
        self._db = sqlite3.connect(folder / "rows.db", isolation_level=None)
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "mmap_size=8000000000"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, tokens BLOB)")
        self._rng, self._synced = np.random.default_rng(0), monotonic()
        marks = ",".join("?" * BATCH)
        self._select = f"SELECT id, tokens FROM rows WHERE id IN ({marks})"

    def add(self, number: int, row: Tokens) -> None:
        """See `Side`."""
        self.extend(number, [row])

    def extend(self, first: int, rows: list[Tokens]) -> None:
        """See `Side`."""
        values = [
            ((first + at) % self._capacity, row.data.cast("B")) for at, row in enumerate(rows)
        ]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO rows VALUES (?, ?)", values)
        self._db.execute("COMMIT")
        self._count = min(self._capacity, max(self._count, first + len(rows)))
        if monotonic() - self._synced > COMMIT_S:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._synced = monotonic()

    def draw(self) -> tuple[Any, Any]:
        """See `Side`; of rows that are drawn twice each counts once."""
        keys = self._rng.integers(self._count, size=BATCH).tolist()
        found = [
            np.frombuffer(tokens, np.int32) for _, tokens in self._db.execute(self._select, keys)
        ]
        return np.concatenate(found), np.array(list(map(len, found)))

    def close(self) -> None:
        """See `Side`."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._db.close()


class TorchRl:
    """TorchRL's replay buffer over a list of tensors, in RAM."""

    def __init__(self, folder: Path, capacity: int) -> None:
        """Create it."""
        self._torch = import_module("torch")
        data = import_module("torchrl.data")
        self._buffer = data.ReplayBuffer(
            storage=data.ListStorage(capacity), batch_size=BATCH, collate_fn=self._cat
        )

    def _cat(self, rows: Sequence[Any]) -> Any:
        return self._torch.cat(list(rows)), [len(row) for row in rows]

    def add(self, number: int, row: Tokens) -> None:
        """See `Side`; the list holds what it is given, so that is a copy."""
        self._buffer.add(self._torch.tensor(row))

    def extend(self, first: int, rows: list[Tokens]) -> None:
        """See `Side`."""
        self._buffer.extend([self._torch.tensor(row) for row in rows])

    def draw(self) -> tuple[Any, Any]:
        """See `Side`."""
        values, lengths = self._buffer.sample()
        return values, lengths

    def close(self) -> None:
        """See `Side`."""


class TransferQueue:
    """TransferQueue's default store: processes of a Ray cluster that hold RAM."""

    def __init__(self, folder: Path, capacity: int) -> None:
        """Start it on this machine."""
        self._torch = import_module("torch")
        self._tensordict = import_module("tensordict").TensorDict
        self._capacity, self._count = capacity, 0
        ray = import_module("ray")
        # Not a cluster that someone else started here.
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=4)
        self._queue = import_module("transfer_queue")
        self._queue.init()
        self._shutdown: Callable[[], object] = ray.shutdown
        self._rng = np.random.default_rng(0)

    def add(self, number: int, row: Tokens) -> None:
        """See `Side`."""
        self._queue.kv_put(
            key=str(number % self._capacity),
            partition_id="rows",
            fields={"tokens": self._torch.from_numpy(row)},
        )
        self._count = min(self._capacity, max(self._count, number + 1))

    def extend(self, first: int, rows: list[Tokens]) -> None:
        """See `Side`."""
        nested = self._torch.nested.as_nested_tensor(
            [self._torch.from_numpy(row) for row in rows], layout=self._torch.jagged
        )
        self._queue.kv_batch_put(
            keys=[str((first + at) % self._capacity) for at in range(len(rows))],
            partition_id="rows",
            fields=self._tensordict({"tokens": nested}, batch_size=len(rows)),
        )
        self._count = min(self._capacity, max(self._count, first + len(rows)))

    def draw(self) -> tuple[Any, Any]:
        """See `Side`."""
        keys = self._rng.choice(self._count, BATCH, replace=False).tolist()
        found = self._queue.kv_batch_get(
            keys=list(map(str, keys)), partition_id="rows", select_fields="tokens"
        )["tokens"]
        return found.values(), found.offsets().diff()

    def close(self) -> None:
        """See `Side`."""
        self._queue.close()
        self._shutdown()


MAKERS: Mapping[str, Callable[[Path, int], Side]] = {
    OURS: Ours,
    PADDED: Padded,
    "lmdb": Lmdb,
    "sqlite": Sqlite,
    "torchrl": TorchRl,
    "transfer_queue": TransferQueue,
}
ON_DISK = (OURS, PADDED, "lmdb", "sqlite")
SLOW = ("transfer_queue",)
"""Sides whose calls take milliseconds: they are timed by themselves beside ours."""
MODULES = {
    "lmdb": "lmdb",
    "torchrl": "torchrl",
    "transfer_queue": "transfer_queue",
    PADDED: "mmreplay",
    "sqlite": "sqlite3",
}


def installed(wanted: str | None) -> list[str]:
    """Names of the other sides that are here, of those wanted; see `chosen`."""
    return chosen(MODULES, wanted)

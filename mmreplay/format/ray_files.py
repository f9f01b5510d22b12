"""The optional folder ``ray/`` of a buffer: what a server of the buffer must remember.

A server on Ray (mmreplay.ray) lets writers without a disk add rows, each to
environments of its own, and lets learners draw an epoch over several buffers. Which
writer has which environments is in ``writers.json``, and which legal starts an epoch
has in ``epochs.json``. Both are strict JSON of at most 16 MiB, replaced whole by a
rename. A buffer is complete without the folder, and no reader of rows looks at it.

Nothing here needs Ray, because `verify_buffer` checks these files everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmreplay import strict_json
from mmreplay.arguments import is_number
from mmreplay.disk import files
from mmreplay.disk.files import refuse_link
from mmreplay.errors import FormatError, shown

FOLDER = "ray"
WRITERS = "writers.json"
EPOCHS = "epochs.json"
MAX_NBYTES = 16 << 20
VERSION = 1
IDLE_S = 600.0
MAX_ENDED = 256
"""Leases that ended and are remembered, the newest ones."""
MAX_NAME_LENGTH = 256
LIMIT = 1 << 62
"""Positions are below it, as in all files of a buffer."""
MAX_ENVS = 1 << 20
MAX_BUFFERS = 1 << 16
HEX_DIGITS = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Lease:
    """The environments of one writer.

    Attributes:
        writer: 32 lower-case hexadecimal digits, another one for each lease.
        env_ids: Its environments, in the order of the writer's.
        first: Heads of these when the lease began; the first row at one begins an
            episode.
        stop: Heads when it ended; None while it holds.
    """

    writer: str
    env_ids: tuple[int, ...]
    first: tuple[int, ...]
    stop: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as an item of ``leases``."""
        return {
            "writer": self.writer,
            "env_ids": list(self.env_ids),
            "first": list(self.first),
            "stop": None if self.stop is None else list(self.stop),
        }

    @classmethod
    def from_json(cls, value: object, name: str) -> Lease:
        """Return the lease that an item of ``leases`` describes.

        Raises:
            FormatError: It is none.
        """
        members = _members(value, name, ("writer", "env_ids", "first", "stop"))
        writer = members["writer"]
        if not isinstance(writer, str) or not HEX_DIGITS.fullmatch(writer):
            raise _wrong(f"{name}.writer", "32 hexadecimal digits", writer)
        env_ids = _numbers(members["env_ids"], f"{name}.env_ids", MAX_ENVS)
        if not env_ids or len(set(env_ids)) < len(env_ids):
            raise _wrong(f"{name}.env_ids", "one or more, each once", list(env_ids))
        count = len(env_ids)
        stop = members["stop"]
        return cls(
            writer,
            env_ids,
            _numbers(members["first"], f"{name}.first", LIMIT, count),
            None if stop is None else _numbers(stop, f"{name}.stop", LIMIT, count),
        )


@dataclass(frozen=True, slots=True)
class FrozenEpoch:
    """The legal starts of one buffer that an epoch over several buffers draws.

    Attributes:
        name: Of the epoch's user, such as a learner's sampler.
        epoch: Its number.
        stops: One past the newest legal start of each environment; 0 for none.
        counts: Legal starts of each environment.
        buffers: All buffers of the epoch, in its order: their uuids in hex digits.
    """

    name: str
    epoch: int
    stops: tuple[int, ...]
    counts: tuple[int, ...]
    buffers: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as an item of ``epochs``."""
        return {
            "name": self.name,
            "epoch": self.epoch,
            "stops": list(self.stops),
            "counts": list(self.counts),
            "buffers": list(self.buffers),
        }

    @classmethod
    def from_json(cls, value: object, name: str) -> FrozenEpoch:
        """Return the epoch that an item of ``epochs`` describes.

        Raises:
            FormatError: It is none.
        """
        keys = ("name", "epoch", "stops", "counts", "buffers")
        members = _members(value, name, keys)
        own = members["name"]
        if not isinstance(own, str) or not 1 <= len(own) <= MAX_NAME_LENGTH:
            legal = f"1 to {MAX_NAME_LENGTH} characters"
            raise _wrong(f"{name}.name", legal, own)
        (epoch,) = _numbers([members["epoch"]], f"{name}.epoch", LIMIT)
        stops = _numbers(members["stops"], f"{name}.stops", LIMIT)
        counts = _numbers(members["counts"], f"{name}.counts", LIMIT, len(stops))
        buffers = members["buffers"]
        if not isinstance(buffers, list) or len(buffers) > MAX_BUFFERS:
            raise _wrong(f"{name}.buffers", "a list", buffers)
        for uuid in buffers:
            if not isinstance(uuid, str) or not HEX_DIGITS.fullmatch(uuid):
                raise _wrong(f"{name}.buffers", "32 hexadecimal digits each", uuid)
        if len(set(buffers)) < len(buffers):
            raise _wrong(f"{name}.buffers", "uuids, each once", buffers)
        return cls(own, epoch, stops, counts, tuple(buffers))


@dataclass(frozen=True, slots=True)
class Leases:
    """What ``writers.json`` holds.

    Attributes:
        leases: Oldest first.
        idle_s: Seconds without a call of its writer after which a lease may end.
    """

    leases: tuple[Lease, ...] = ()
    idle_s: float = IDLE_S


def read_leases(folder: Path) -> Leases:
    """Return the leases in a buffer's folder; none without the file.

    Raises:
        FormatError: The folder is a link, or the file damaged.
        FailedError: The system refuses.
    """
    data, name = _read(folder, WRITERS)
    return Leases() if data is None else parse_leases(data, name)


def write_leases(folder: Path, leases: Leases) -> Leases:
    """Replace the leases in a buffer's folder; they are durable when this returns.

    Of leases that ended the newest ones stay, at most `MAX_ENDED`.

    Args:
        folder: The buffer's.
        leases: What it is to hold.

    Returns:
        What was written.

    Raises:
        FormatError: They take more than 16 MiB, or the folder is a link.
        FullError: No space is left; the old ones stay.
    """
    ended = [lease for lease in leases.leases if lease.stop is not None]
    dropped = {lease.writer for lease in ended[:-MAX_ENDED]}
    stay = tuple(lease for lease in leases.leases if lease.writer not in dropped)
    items = [lease.to_json() for lease in stay]
    _write(folder, WRITERS, {"idle_s": leases.idle_s, "leases": items})
    return Leases(stay, leases.idle_s)


def parse_leases(data: bytes, name: str, num_envs: int = MAX_ENVS) -> Leases:
    """Return the leases of a ``writers.json``.

    Args:
        data: Its bytes.
        name: What to call it in errors.
        num_envs: Environments of the buffer.

    Raises:
        FormatError: It is none, or two leases hold one environment.
    """
    value = _parsed(data, name)
    leases = tuple(
        Lease.from_json(item, f"{name}: leases[{index}]")
        for index, item in enumerate(_items(value, name, "leases"))
    )
    idle_s = value.get("idle_s")
    if not is_number(idle_s) or not idle_s > 0:
        raise _wrong(f"{name}: idle_s", "a number above 0", idle_s)
    writers: set[str] = set()
    holders: set[int] = set()
    for lease in leases:
        if lease.writer in writers:
            raise FormatError(f"{name} names the writer {lease.writer} twice.")
        writers.add(lease.writer)
        if max(lease.env_ids) >= num_envs:
            raise FormatError(
                f"{name}: environments must be below {num_envs}, got {max(lease.env_ids)}."
            )
        if lease.stop is None:
            if shared := holders.intersection(lease.env_ids):
                raise FormatError(f"{name}: environment {min(shared)} is held by two writers.")
            holders.update(lease.env_ids)
    return Leases(leases, float(idle_s))


def read_epochs(folder: Path) -> list[FrozenEpoch]:
    """Return the epochs in a buffer's folder, oldest first; none without the file.

    Raises:
        FormatError: The folder is a link, or the file damaged.
        FailedError: The system refuses.
    """
    data, name = _read(folder, EPOCHS)
    return [] if data is None else parse_epochs(data, name)


def write_epochs(folder: Path, epochs: Sequence[FrozenEpoch]) -> None:
    """Replace the epochs in a buffer's folder; they are durable when this returns.

    Args:
        folder: The buffer's.
        epochs: Oldest first.

    Raises:
        FormatError: They take more than 16 MiB, or the folder is a link.
        FullError: No space is left; the old ones stay.
    """
    _write(folder, EPOCHS, {"epochs": [epoch.to_json() for epoch in epochs]})


def parse_epochs(data: bytes, name: str, num_envs: int | None = None) -> list[FrozenEpoch]:
    """Return the epochs of an ``epochs.json``.

    Args:
        data: Its bytes.
        name: What to call it in errors.
        num_envs: Environments of the buffer; None for any number.

    Raises:
        FormatError: It is none, or has an epoch twice.
    """
    epochs = [
        FrozenEpoch.from_json(item, f"{name}: epochs[{index}]")
        for index, item in enumerate(_items(_parsed(data, name), name, "epochs"))
    ]
    keys: set[tuple[str, int]] = set()
    for epoch in epochs:
        if num_envs is not None and len(epoch.stops) != num_envs:
            raise FormatError(
                f"{name}: an epoch must have {num_envs} environments, got {len(epoch.stops)}."
            )
        if (epoch.name, epoch.epoch) in keys:
            raise FormatError(f"{name} has epoch {epoch.epoch} of {epoch.name!r} twice.")
        keys.add((epoch.name, epoch.epoch))
    return epochs


def _read(folder: Path, name: str) -> tuple[bytes | None, str]:
    """Return a file's bytes, or None where it is missing, and its name in errors."""
    own = folder / FOLDER
    refuse_link(own)
    path = own / name
    # A link that leads nowhere is no missing file.
    if not path.exists() and not path.is_symlink():
        return None, str(path)
    return files.read_bytes(path, MAX_NBYTES), str(path)


def _write(folder: Path, name: str, value: dict[str, Any]) -> None:
    own = folder / FOLDER
    refuse_link(own)
    data = strict_json.dump({"version": VERSION, **value}, name)
    if len(data) > MAX_NBYTES:
        raise FormatError(
            f"{own / name} must have at most {MAX_NBYTES} bytes, got {len(data)}. Use "
            "fewer environments."
        )
    files.make_folder(own, exist_ok=True)
    files.replace_bytes(own / name, data)


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    """Return the object of a file, after a look at its version."""
    value = strict_json.parse(data, name)
    if value.get("version") != VERSION:
        raise FormatError(
            f"{name}: version must be {VERSION}, got {shown(value.get('version'))}. "
            "Install the mmreplay that wrote it."
        )
    return value


def _items(value: dict[str, Any], name: str, key: str) -> list[object]:
    """Return the list that a file holds."""
    items = value.get(key)
    if not isinstance(items, list):
        raise _wrong(f"{name}: {key}", "a list", items)
    return items


def _members(value: object, name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or not value.keys() >= set(keys):
        raise _wrong(name, f"an object with {list(keys)}", value)
    return value


def _numbers(value: object, name: str, limit: int, count: int | None = None) -> tuple[int, ...]:
    """Return integers in [0, limit), as many as there must be."""
    if not isinstance(value, list) or len(value) > MAX_ENVS:
        raise _wrong(name, "a list", value)
    if count is not None and len(value) != count:
        raise _wrong(name, f"a list of {count} integers", value)
    for number in value:
        if type(number) is not int or not 0 <= number < limit:
            raise _wrong(name, f"integers in [0, {limit})", number)
    return tuple(value)


def _wrong(name: str, legal: str, value: object) -> FormatError:
    return FormatError(
        f"{name} must be {legal}, got {shown(value)}. Remove the file while no process "
        "serves the buffer."
    )

"""Requests to shards and their replies as bytes, which Ray sends at the least cost.

Ray pickles other arguments and results: for each array that takes as long as to draw
a hundred steps by priority. A message is a head of JSON, and the bytes of arrays that
have a column for all rings together. Arrays out of a message are read-only views of it.
Fields of rows do not travel so: they have dtypes of their own, and blocks.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.ray.draws import Client, Reply, RingDraw, Update, Wanted

Array = NDArray[Any]
ARGUMENT_NBYTES = 96 << 10
"""Of each argument that a request is sent as: Ray puts larger ones, from 100 KiB on,
into its object store, which takes milliseconds."""
ALIGNMENT = 8
HEAD = struct.Struct("<I")
ARRAY = "=array"
"""Key of an array in the JSON of a client: no name of an argument or a field."""


def to_bytes(head: object, columns: Sequence[Sequence[Array]]) -> bytes:
    """Write a message.

    Args:
        head: What JSON can write.
        columns: Arrays of one dtype and shape each, which are joined to one.
    """
    specs: list[list[Any]] = []
    pieces: list[Any] = []
    for column in columns:
        first = column[0]
        rows = sum([len(array) for array in column])
        specs.append([first.dtype.str, rows, *first.shape[1:]])
        pieces += [np.ascontiguousarray(array) for array in column]
        pieces.append(bytes(-sum([array.nbytes for array in column]) % ALIGNMENT))
    text = json.dumps([head, specs]).encode()
    padding = bytes(-(HEAD.size + len(text)) % ALIGNMENT)
    return b"".join([HEAD.pack(len(text)), text, padding, *pieces])


def from_bytes(message: bytes) -> tuple[Any, list[Array]]:
    """Read what `to_bytes` wrote: the head, and an array of each column."""
    (length,) = HEAD.unpack_from(message)
    at = HEAD.size + length
    head, specs = json.loads(message[HEAD.size : at])
    arrays = []
    for dtype, *shape in specs:
        at += -at % ALIGNMENT
        array = np.frombuffer(message, dtype, math.prod(shape), at)
        at += array.nbytes
        arrays.append(array if len(shape) == 1 else array.reshape(shape))
    return head, arrays


# What a client draws by.


def client_to_bytes(client: Client) -> bytes:
    """Write what a client draws by."""
    return json.dumps(client, default=_array_to_json).encode()


def _array_to_json(array: Array) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {ARRAY: [array.dtype.str, array.shape, data]}


@lru_cache(maxsize=32)
def client_from_bytes(data: bytes) -> Client:
    """Read what `client_to_bytes` wrote; the same client each time."""
    client: Client = json.loads(data, object_hook=_array_from_json)
    return client


def _array_from_json(value: dict[str, Any]) -> Any:
    if ARRAY not in value:
        return value
    dtype, shape, data = value[ARRAY]
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)


# Requests.

PriorityColumn = Literal["env_ids", "positions", "values"]
PRIORITIES: tuple[PriorityColumn, ...] = ("env_ids", "positions", "values")


def request_to_bytes(
    updates: Mapping[str, Sequence[Update]], wanted: Wanted, highest: float
) -> list[bytes]:
    """Write a request, in as many arguments as Ray needs.

    Args:
        updates: See `RingDraws.exchange`, as the others.
        wanted: See there.
        highest: See there.
    """
    shares = wanted["shares"]
    rest = {name: value for name, value in wanted.items() if name != "shares"}
    columns: list[Sequence[Array]] = []
    if shares:
        columns.append([np.asarray(own, np.float64) for own in shares.values()])
    groups = _groups(updates)
    for group in groups:
        columns += [[each[column] for _, each in group] for column in PRIORITIES]
        if group[0][1]["mask"] is not None:
            columns.append([cast(Array, each["mask"]) for _, each in group])
    head = {
        "highest": highest,
        "wanted": rest,
        "shares": [[name, len(own)] for name, own in shares.items()],
        "updates": [
            [
                group[0][1]["mask"] is not None,
                [[name, len(each["positions"])] for name, each in group],
            ]
            for group in groups
        ],
    }
    message = to_bytes(head, columns)
    firsts = range(0, len(message), ARGUMENT_NBYTES)
    if len(firsts) == 1:
        return [message]
    return [message[first : first + ARGUMENT_NBYTES] for first in firsts]


Group = list[tuple[str, Update]]
"""Priorities whose arrays can be joined, each with the name of its ring."""


def _groups(updates: Mapping[str, Sequence[Update]]) -> list[Group]:
    """Priorities in groups, those of a ring in their order."""
    every = [(name, each) for name, own in updates.items() for each in own]
    if not every:
        return []
    # Of a batch that a user put together, numbers of steps may have other dtypes.
    dtypes = [every[0][1][column].dtype for column in PRIORITIES]
    if all(
        each["mask"] is None
        and each["values"].ndim == 1
        and [each[column].dtype for column in PRIORITIES] == dtypes
        for _, each in every
    ):
        return [every]
    return [[each] for each in every]


def request_from_bytes(arguments: Sequence[bytes]) -> tuple[dict[str, list[Update]], Wanted, float]:
    """Read what `request_to_bytes` wrote.

    Priorities of a ring that follow each other come as one: the last ones win.
    """
    head, arrays = from_bytes(arguments[0] if len(arguments) == 1 else b"".join(arguments))
    columns = iter(arrays)
    wanted = head["wanted"]
    wanted["shares"] = {}
    if head["shares"]:
        wanted["shares"] = _by_name(head["shares"], next(columns))
    if "epoch" in wanted:
        wanted["epoch"] = tuple(wanted["epoch"])
    updates: dict[str, list[Update]] = {}
    for masked, counts in head["updates"]:
        together: dict[str, int] = {}
        for name, count in counts:
            together[name] = together.get(name, 0) + count
        env_ids, positions, values = next(columns), next(columns), next(columns)
        mask, first = next(columns) if masked else None, 0
        for name, count in together.items():
            own = slice(first, first + count)
            update: Update = {
                "env_ids": env_ids[own],
                "positions": positions[own],
                "values": values[own],
                "mask": None if mask is None else mask[own],
            }
            updates.setdefault(name, []).append(update)
            first += count
    return updates, wanted, head["highest"]


def _by_name(counts: Sequence[tuple[str, int]], array: Array) -> dict[str, Array]:
    """Divide an array of all rings between them."""
    found, first = {}, 0
    for name, count in counts:
        found[name] = array[first : first + count]
        first += count
    return found


# Replies.

DrawnColumn = Literal["env_ids", "positions", "probabilities"]
DRAWN: tuple[DrawnColumn, ...] = ("env_ids", "positions", "probabilities")
WindowColumn = Literal["windows", "mask", "is_first"]
WINDOWS: tuple[WindowColumn, ...] = ("windows", "mask", "is_first")


def reply_to_bytes(reply: Reply) -> bytes | Reply:
    """Write a reply; one with fields of rows is left to Ray."""
    drawn = {name: each for name, each in reply["draws"].items() if each is not None}
    if any("fields" in each for each in drawn.values()):
        return reply
    masses = np.array([*reply["masses"].values()], np.float64).reshape(-1, 4)
    columns: list[Sequence[Array]] = [[masses]]
    if drawn:
        every = [*drawn.values()]
        columns += [[each[column] for each in every] for column in DRAWN]
    described = {}
    for name, each in drawn.items():
        more = _described(each)
        if more:
            described[name] = more
            windows: list[WindowColumn] = more.get("windows", [])
            columns += [[cast(Array, each[column])] for column in windows]
    head = {
        "rings": [*reply["masses"]],
        "dropped": reply["dropped"],
        "draws": [
            [name, -1 if each is None else len(each["positions"])]
            for name, each in reply["draws"].items()
        ],
        "described": described,
    }
    return to_bytes(head, columns)


def _described(drawn: RingDraw) -> dict[str, Any]:
    """What a draw has beside its steps."""
    more: dict[str, Any] = {}
    columns = [column for column in WINDOWS if drawn[column] is not None]
    if columns:
        more = {"windows": columns, "first_only": drawn["first_only"]}
    if "bfloat16" in drawn:
        more["bfloat16"] = drawn["bfloat16"]
    return more


def reply_from_bytes(message: bytes) -> Reply:
    """Read what `reply_to_bytes` wrote."""
    head, arrays = from_bytes(message)
    columns = iter(arrays)
    masses = dict(zip(head["rings"], next(columns).tolist(), strict=True))
    counts = [(name, count) for name, count in head["draws"] if count >= 0]
    draws: dict[str, RingDraw | None] = {name: None for name, _ in head["draws"]}
    if counts:
        env_ids, positions, probabilities = (next(columns) for _ in DRAWN)
        first = 0
        for name, count in counts:
            own = slice(first, first + count)
            more = head["described"].get(name, {})
            draw: RingDraw = {
                "env_ids": env_ids[own],
                "positions": positions[own],
                "probabilities": probabilities[own],
                "windows": None,
                "mask": None,
                "is_first": None,
                "first_only": more.get("first_only", []),
            }
            windows: list[WindowColumn] = more.get("windows", [])
            for column in windows:
                draw[column] = next(columns)
            if "bfloat16" in more:
                draw["bfloat16"] = more["bfloat16"]
            draws[name] = draw
            first += count
    return {"masses": masses, "draws": draws, "dropped": head["dropped"]}

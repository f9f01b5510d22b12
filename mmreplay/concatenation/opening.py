"""The buffers of a `concat`: opened where they are not, and of one schema."""

from __future__ import annotations

from contextlib import ExitStack

from mmreplay.buffer.lifecycle import StrPath
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.errors import SchemaError


def opened(source: ReplayBuffer | StrPath, stack: ExitStack) -> ReplayBuffer:
    """Return an open buffer; a folder is opened for reading, for as long as a stack.

    Raises:
        FormatError: There is no buffer at the path.
    """
    if isinstance(source, ReplayBuffer):
        return source
    return stack.enter_context(ReplayBuffer.open(source))


def check_schema(number: int, buffer: ReplayBuffer, first: ReplayBuffer) -> None:
    """Refuse a buffer whose steps are not those of the first one.

    Raises:
        SchemaError: Fields differ, or their roles or order.
    """
    mine, other = buffer.schema, first.schema
    if mine == other:
        return
    paths = [*other.paths, *(path for path in mine.paths if path not in other.paths)]
    for path in paths:
        here = repr(mine[path]) if path in mine.paths else "no such field"
        there = repr(other[path]) if path in other.paths else "no such field"
        if here != there:
            raise SchemaError(
                f"concat: got {here} for field {path!r} of buffer {number} "
                f"({buffer.path}), expected {there} as in buffer 0 ({first.path}); "
                "draw from buffers of one schema"
            )
    raise SchemaError(
        f"concat: got a schema of buffer {number} ({buffer.path}) whose fields are in "
        f"other roles or another order than those of buffer 0 ({first.path}), expected "
        "the same; draw from buffers of one schema"
    )

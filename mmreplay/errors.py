"""Every error mmreplay raises on purpose.

ReplayError
├─ SchemaError      the data does not match the fields declared (ValueError)
├─ FormatError      the files are not a replay this version reads (ValueError)
│  ├─ CorruptError  they were, and are damaged
│  └─ VersionError  a newer version wrote them
├─ LockedError      another writer holds the buffer (OSError)
├─ ForkedError      a writer was used in a forked child (RuntimeError)
├─ FullError        the disk has no space left for a write (OSError)
├─ FailedError      the device failed, or the call is not possible now (OSError)
│  └─ RemovedError   the folder was deleted, or its path leads to another one
├─ EmptyError       nothing to draw yet (LookupError)
├─ StarvedError     a wait for another process took too long (TimeoutError)
├─ StaleError       the steps asked for are no longer, or not yet, alive (IndexError)
└─ SourceError      data to be converted is not what it says it is (ValueError)

Each is also the builtin that callers catch. A message says what is wrong, with the
value and the user's name for it, and then what to do: ``capacity must be at least 1,
got 0. Give ...``. Errors that are an `OSError` take the number of the error that
caused them: ``FullError(message, errno_=errno.ENOSPC)``. The warnings are
`FullWarning`, `AutoresetWarning` and `DurabilityWarning`.
"""

from __future__ import annotations

import errno
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

OR_REPAIR = ", or run mmreplay repair SOURCE TARGET"
"""Ends the advice for a damaged buffer whose other rows `repair` can save."""
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
OUT_OF_FILES = {errno.EMFILE, errno.ENFILE}
MAX_AXES = 64
"""Of numpy's arrays; sequences that nest deeper, as one within itself, make none."""
_NUMBERS_OR_TEXT = (str, bytes, bytearray, memoryview, range, array)


class ReplayError(Exception):
    """Base of every error mmreplay raises on purpose.

    Example:
        >>> try:
        ...     buffer = mr.ReplayBuffer.open("runs/typo")
        ... except mr.ReplayError as error:  # the base of all errors of mmreplay
        ...     print(type(error).__name__)
        FormatError
    """


class SchemaError(ReplayError, ValueError):
    """Data or a declaration does not match the fields declared.

    Example:
        >>> mr.Field((), "floot")
        Traceback (most recent call last):
        mmreplay.errors.SchemaError: ...'floot'...
    """


class FormatError(ReplayError, ValueError):
    """The files are not a replay that this version can read.

    Example:
        >>> mr.ReplayBuffer.open("runs/typo")
        Traceback (most recent call last):
        mmreplay.errors.FormatError: ...runs/typo does not exist. ...
    """


class CorruptError(FormatError):
    """The files were a replay, and are damaged.

    Example:
        >>> with open("runs/cartpole/data-000001/COMMIT", "wb"):
        ...     pass  # empties the file
        >>> mr.ReplayBuffer.open("runs/cartpole")
        Traceback (most recent call last):
        mmreplay.errors.CorruptError: ...COMMIT has 0 bytes, ...
    """


class VersionError(FormatError):
    """The files are a replay of a version this one does not read.

    Example:
        >>> try:
        ...     buffer = mr.ReplayBuffer.open("runs/cartpole")
        ... except mr.VersionError:
        ...     print("install a newer mmreplay")
    """


class _SystemError(ReplayError, OSError):
    """An `OSError` whose text is our message and whose errno is the cause's."""

    # OSError parses its arguments in __new__ unless __init__ is its own; two
    # arguments there would turn the message into "[Errno 28] ...".
    def __init__(self, message: str = "", *, errno_: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno_

    def __reduce__(self) -> tuple[object, ...]:
        # OSError's own way to pickle forgets errno.
        return type(self), self.args, {**self.__dict__, "errno": self.errno}

    def __str__(self) -> str:
        # A path in `filename` would otherwise be appended to the message.
        return str(self.args[0]) if self.args else ""


class LockedError(_SystemError):
    """Another writer holds the buffer, or the file to be read.

    Attributes:
        pid: The process that holds it; None where it is not known.
        host: The host of that process, likewise.

    Example:
        >>> writer = mr.ReplayBuffer.open("runs/cartpole", "r+")
        >>> mr.ReplayBuffer.open("runs/cartpole", "r+")
        Traceback (most recent call last):
        mmreplay.errors.LockedError: ...runs/cartpole is already open for writing ...
    """

    def __init__(
        self,
        message: str = "",
        *,
        errno_: int | None = None,
        pid: int | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(message, errno_=errno_)
        self.pid, self.host = pid, host


class ForkedError(ReplayError, RuntimeError):
    """A writer was used in a process forked from the one that opened it.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> try:
        ...     batch = buffer.sample(32)
        ... except mr.ForkedError:  # in a forked child, without a seed
        ...     buffer = mr.ReplayBuffer.open("runs/cartpole")
    """


class FullWarning(UserWarning):
    """A ring is larger than the free space of its disk; adds will raise `FullError`.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", mr.FullWarning)  # refuse such a buffer
    """


class AutoresetWarning(UserWarning):
    """Rows after episode ends look like resets; ``autoreset`` is probably wrong.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", mr.AutoresetWarning)  # stop the first time
    """


class DurabilityWarning(UserWarning):
    """Rows, priorities or an episode's end will not be there after the process.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", mr.DurabilityWarning)  # refuse such a disk
    """


class LossWarning(UserWarning):
    """What is drawn will not be what was added, bit by bit.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", mr.LossWarning)  # refuse such a field
    """


class FullError(_SystemError):
    """The disk has no space left for a write.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", "r+")
        >>> try:
        ...     buffer.commit()
        ... except mr.FullError:
        ...     print("free some space, then call commit again")
    """


class FailedError(_SystemError):
    """The device failed, or the call is not possible in the state of the buffer.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")  # mode="r"
        >>> buffer.clear()
        Traceback (most recent call last):
        mmreplay.errors.FailedError: ... is open with mode='r'. ...
    """


class RemovedError(FailedError):
    """The folder of an open buffer was deleted, or its path leads to another one.

    Example:
        >>> import shutil
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole", "r+")
        >>> shutil.rmtree("runs/cartpole")
        >>> try:
        ...     buffer.close()
        ... except mr.RemovedError:
        ...     print("the buffer's folder is gone")
        the buffer's folder is gone
    """


class EmptyError(ReplayError, LookupError):
    """There is nothing to draw yet.

    Example:
        >>> schema = mr.Schema({"x": mr.Field((), "float32")})
        >>> buffer = mr.ReplayBuffer.create(None, schema, 100, engine="memory")
        >>> buffer.sample(32)
        Traceback (most recent call last):
        mmreplay.errors.EmptyError: ...
    """


class StarvedError(ReplayError, TimeoutError):
    """A wait for the writer, or for learners, took too long.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> try:
        ...     batch = buffer.sample(32)
        ... except mr.StarvedError:
        ...     print("the writer laps the reader: increase the capacity")
    """


class StaleError(ReplayError, IndexError):
    """Steps were asked for that are no longer, or not yet, alive.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> buffer.get_field("reward", 0, 10**9)
        Traceback (most recent call last):
        mmreplay.errors.StaleError: ... is not in the buffer, ...
    """


class SourceError(ReplayError, ValueError):
    """Data to be converted is not what it says it is.

    Example:
        >>> np.savez("scalar.npz", x=1.0)
        >>> mr.load("scalar.npz", "runs/new")
        Traceback (most recent call last):
        mmreplay.errors.SourceError: ... holds no array with one row per step. ...
    """


def raise_if_out_of_files(error: BaseException) -> None:
    """Raise an error that says that too many files are open, and ignore any other.

    For callers that take other errors as the state of the file, and go on.
    """
    if isinstance(error, OSError) and error.errno in OUT_OF_FILES:
        raise error


def shortage(error: BaseException) -> int:
    """Return the errno if space, files or memory ran out, which may pass; else 0."""
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, FullError):
        return error.errno or errno.ENOSPC
    if isinstance(error, OSError) and error.errno in {*OUT_OF_FILES, errno.ENOMEM}:
        return error.errno or 0
    return 0


def no_thread(what: str, error: RuntimeError, way_out: str = "") -> FailedError:
    """Return the error for a thread that the system cannot start.

    Args:
        what: What the thread does, as in ``"that commits"``.
        error: Python's error.
        way_out: More advice, to end the sentence.
    """
    return FailedError(
        f"cannot start a thread {what}: {error}. End other threads or processes, or "
        f"raise the limit (ulimit -u){way_out}.",
        errno_=errno.EAGAIN,
    )


def system_error(what: str, path: Path, error: OSError) -> FullError | FailedError:
    """Return mmreplay's error for a system call that failed, by its errno."""
    if error.errno in FULL:
        way_out = "Free space, or resize to less capacity, and call again."
        if error.errno == errno.EFBIG:
            way_out = (
                "Choose a smaller capacity or heap_bytes (see mmreplay plan), as the "
                "file system or ulimit -f allows no file this large."
            )
        return FullError(
            f"cannot {what} {path}: {error.strerror}, so what was being written is "
            f"not published. {way_out}",
            errno_=error.errno,
        )
    return system_failure(what, path, error)


def system_failure(what: str, path: Path, error: OSError) -> FailedError:
    """Return the `FailedError` for a system call that failed."""
    if error.errno == errno.EBADF:
        return FailedError(
            f"cannot {what} {path}: it was closed meanwhile. Let no thread close the "
            "buffer while another one uses it, and open it again.",
            errno_=error.errno,
        )
    way_out = "Check the disk, and open the buffer again."
    if error.errno in READ_ONLY:
        way_out = "Open with mode='r' to read, or choose a path that can be written."
    if error.errno == errno.ENOENT:
        way_out = "Check the path, or choose another one."
    if error.errno == errno.ENOMEM:
        way_out = (
            "Free memory, close buffers that are not needed, or raise the limit "
            "(ulimit -v, or vm.max_map_count), and call again."
        )
    if error.errno in OUT_OF_FILES:
        way_out = (
            "Close files or buffers that are not needed, or raise the limit (ulimit "
            "-n), and call again."
        )
    return FailedError(
        f"cannot {what} {path}: {error.strerror} (errno {error.errno}). {way_out}",
        errno_=error.errno,
    )


@contextmanager
def undone_by(undo: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Undo what a block began, where the block does not end as it should.

    Unlike a ``try`` it can be interrupted between its entry and the block, so it is for
    code that loses nothing then: a file that stays open until it is collected.

    Args:
        undo: Called when the block raises anything, Ctrl-C included. It is looked up
            here, so that what it is a method of must not change in the block.
        *arguments: What it is called with.

    Example:
        >>> with undone_by(print, "closed"):
        ...     raise ValueError("damaged")
        Traceback (most recent call last):
        ValueError: damaged
    """
    try:
        yield
    except BaseException:
        undo(*arguments)
        raise


def called(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function; an error gets a note with its name and arguments.

    Args:
        what: The role of the function, such as ``"HER reward_fn"``.
        function: The function.
        *arguments: What it is called with.

    Returns:
        What it returns.

    Raises:
        Exception: What it raises, of its own type, with a note.
    """
    try:
        return function(*arguments)
    except Exception as error:
        own = type(function)
        name = getattr(function, "__qualname__", own.__qualname__)
        module = getattr(function, "__module__", own.__module__)
        got = ", ".join(_outline(argument) for argument in arguments)
        error.add_note(f"raised by {what} {module}.{name}, which got ({got})")
        raise


def _outline(value: Any) -> str:
    """Describe a value: dtypes and shapes of arrays, without their numbers."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_outline(v)}" for k, v in value.items()) + "}"
    if is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={_outline(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    return repr(value) if isinstance(value, int | float) else type(value).__name__


def shown(value: Any) -> str:
    """A value as messages show it: numbers and short texts, and the type of all else.

    Args:
        value: What was given.

    Returns:
        At most some 80 characters.
    """
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= 60 else f"{value[:57]!r}..."
    if isinstance(value, list | tuple | set | frozenset) and len(value) <= 8:
        text = _items(value)
        return text if len(text) <= 80 else type(value).__name__
    plain = isinstance(value, int | float | complex | slice | type | Enum | PurePath)
    few = type(value).__module__ == "numpy" and getattr(value, "size", 1) <= 8
    if plain or value is None or few:
        text = repr(value)
        return text if len(text) <= 80 and "\n" not in text else type(value).__name__
    return "{}" if isinstance(value, dict) and not value else type(value).__name__


def _items(value: list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any]) -> str:
    """Items as messages show them, in the brackets of their type."""
    items = ", ".join(shown(each) for each in value)
    if isinstance(value, list):
        return f"[{items}]"
    if isinstance(value, tuple):
        return f"({items}{',' if len(value) == 1 else ''})"
    return f"{{{items}}}" if value else f"{type(value).__name__}()"


def refuse_masked(value: object, name: str) -> None:
    """Refuse an array of numpy.ma with a masked item, also one in a sequence.

    numpy takes the value under the mask, which means nothing, without a word.

    Args:
        value: Anything that numpy makes an array of.
        name: What messages call it.

    Raises:
        SchemaError: It has masked items.
    """
    if type(value) is np.ndarray:
        return
    # There is no such array where numpy.ma was not imported, and its import is slow.
    masked = sys.modules.get("numpy.ma")
    if masked is not None and (count := _masked(value, masked.MaskedArray, 0)):
        raise SchemaError(
            f"{name} must have a value in each place, got {count} masked "
            f"item{'' if count == 1 else 's'}. Pass values for them, such as "
            "array.filled(0), or leave the rows out."
        )


def unmasked(name: str, value: object) -> NDArray[Any]:
    """Return what numpy makes of a value.

    Args:
        name: What messages call it.
        value: Any array-like.

    Raises:
        SchemaError: It has masked items, or gives an array that has some.
    """
    if type(value) is not np.ndarray:
        refuse_masked(value, name)
        value = np.asanyarray(value)
        # What ``__array__`` returned may be masked as well.
        refuse_masked(value, name)
    return np.asarray(value)


def _masked(value: Any, kind: type, depth: int) -> int:
    """Number of masked items in a masked array, or in those of a sequence."""
    if isinstance(value, kind):
        mask = value.mask  # type: ignore[attr-defined]  # of a MaskedArray
        return int(mask.sum()) if mask.dtype == bool else 0
    if not _has_items(type(value)) or depth > MAX_AXES:
        return 0
    if not any(issubclass(each, kind) or _has_items(each) for each in {*map(type, value)}):
        return 0
    return sum(_masked(each, kind, depth + 1) for each in value)


def _has_items(kind: type) -> bool:
    """Return whether numpy makes an array of the items of such a value."""
    # Asking for Sequence goes through the ABC.
    if issubclass(kind, list | tuple):
        return True
    return issubclass(kind, Sequence) and not issubclass(kind, _NUMBERS_OR_TEXT)


def frames_to_caller() -> int:
    """Return the ``stacklevel`` that makes a warning name the user's line."""
    frame, count = sys._getframe(1), 0
    while frame.f_back and frame.f_globals["__name__"].startswith("mmreplay."):
        frame, count = frame.f_back, count + 1
    return count + 1

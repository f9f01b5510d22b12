"""The folder of an adapter's buffer, and the buffer once it exists.

Every adapter takes ``path`` and ``resume`` in addition to the arguments of its
original. The buffer is made with the first data, when all its fields are known.

Without a path, folders under ``$MMREPLAY_DIR`` are named ``<system>-<n>``. A process
holds the lock of each name that it uses, in ``.names`` next to the folders, even before
the buffer exists. Without that variable the folder is a temporary one. Its name has the
number of the process, so that the folder of a killed process can be found and removed.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.disk.lock import Owner, WriterLock
from mmreplay.errors import FormatError, LockedError, ReplayError, SchemaError, undone_by
from mmreplay.format import metadata
from mmreplay.format.metadata import FILE_NAME, Autoreset, Metadata
from mmreplay.ring import Layout
from mmreplay.samplers.base import Sampler
from mmreplay.schema import Schema
from mmreplay.schema.dtypes import describe

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

StrPath = str | os.PathLike[str]
FOLDER = "MMREPLAY_DIR"
NAMES = ".names"
TEMPORARY = re.compile(r"mmreplay-.+-([0-9]{1,10})-[0-9a-f]{8}")
MEMORIES = ("skrl", "rofunc", "memory")
"""Systems that open each other's buffers."""
_open: weakref.WeakValueDictionary[Path, ReplayBuffer] = weakref.WeakValueDictionary()
_numbers: dict[str, int] = {}
"""The first number to try for the next folder, by system."""
_swept: set[Path] = set()


def open_here(path: StrPath) -> bool:
    """Whether an adapter of this process has the buffer of a folder open."""
    buffer = _open.get(files.absolute(path))
    return buffer is not None and not buffer.closed


class BufferLocation:
    """The folder of one adapter's buffer.

    A path is used unchanged. Without one the folder is ``$MMREPLAY_DIR/<system>-<n>``:
    n counts the folders of this process from 0 and skips those that other processes
    use, so that a program that is started again finds its own. Without that variable it
    is a temporary folder, which is removed at exit or when the next one is made.

    Attributes:
        path: The folder; absolute.
        temporary: Whether the folder is removed when this object or the process ends.
        buffer: The buffer, once it is made or opened.
        resumed: Whether the folder held a buffer when this object was made.
    """

    def __init__(
        self, system: str, path: StrPath | None = None, resume: bool = False, *, fresh: bool = False
    ) -> None:
        """Choose the folder.

        Args:
            system: Name of the adapter, for folders without a path.
            path: The folder: new, empty, or with a buffer.
            resume: Continue with the buffer of the folder, if there is one.
            fresh: Without a path, skip folders that hold a buffer, for callers that
                cannot resume one.

        Raises:
            FormatError: The folder holds a buffer, and resume is False.
            SchemaError: Another adapter made that buffer.
        """
        # An agent may use a path as a name.
        system = system.replace("/", "%2F")
        self._system, self._resume, self._copies = system, resume, 0
        folder = os.environ.get(FOLDER)
        self.temporary = path is None and not folder
        self._name: WriterLock | None = None
        if path is None and folder:
            top = files.absolute(folder)
            path, self._name = numbered_folder(top, system, resume=resume, fresh=fresh)
        if path is None:
            path = temporary_folder(system)
        self.path = files.absolute(path)
        self.buffer: ReplayBuffer | None = None
        self.resumed = (self.path / FILE_NAME).exists()
        if self.resumed and not resume:
            self._let_name_go()
            way = "Choose another path."
            if not fresh:
                way = "Pass resume=True to continue it, or choose another path."
            raise FormatError(f"{self.path} already holds a buffer. {way}")
        if self.resumed:
            self._refuse_others()
        if self.temporary:
            self._open_buffers: list[ReplayBuffer] = []
            # Processes of multiprocessing do not run the finalizers of weakref at exit.
            Finalize(self, _remove, (self.path, self._open_buffers), exitpriority=0)

    @property
    def _maker(self) -> str:
        """The adapter's name in the metadata."""
        return self._system.partition("-")[0]

    def _refuse_others(self) -> None:
        """Refuse another adapter's buffer before it is opened and perhaps resized."""
        ours = MEMORIES if self._maker in MEMORIES else (self._maker,)
        with undone_by(self._let_name_go):
            maker = metadata.load(self.path).user.get("adapter")
            if maker not in (None, *ours):
                raise SchemaError(
                    f"{self.path} must hold a buffer of {' or '.join(ours[:2])}, got a "
                    f"buffer of the adapter {maker!r}. Choose another path."
                )

    def __repr__(self) -> str:
        """Say where the data is."""
        kind = "temporary folder, removed at exit: " if self.temporary else ""
        return f"{kind}{self.path}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path, and commit the data.

        Raises:
            FormatError: The folder is removed with this process.
        """
        made = (self.path / FILE_NAME).exists()
        if self.temporary and not made:
            return BufferLocation, (self._system,)
        if self.temporary:
            raise FormatError(
                f"pickling a buffer in the temporary folder {self.path}, which is "
                f"removed at exit. Pass path=, or set ${FOLDER}."
            )
        if self.buffer is not None and not self.buffer.closed:
            self.buffer.commit()
        return _reopened, (self._system, str(self.path), made)

    def discard(self) -> None:
        """Close the buffer, and remove the folder if this object made it."""
        if self.buffer is not None:
            self.buffer.close()
        if not self.resumed:
            files.remove_tree(self.path)

    def for_copy(self) -> BufferLocation:
        """Return the location of a copy; its name starts with the name of this one."""
        if self.temporary:
            return BufferLocation(self._system)
        self._copies += 1
        return BufferLocation(self._system, f"{self.path}-copy{self._copies}", self._resume)

    def ring(
        self,
        schema: Schema,
        capacity: int,
        num_envs: int = 1,
        *,
        layout: Layout | None = None,
        autoreset: Autoreset = "disabled",
        sampler: Sampler | None = None,
        transforms: Sequence[Transform] = (),
        on_resume: Literal["break", "truncate", "continue"] = "break",
        user_metadata: dict[str, Any] | None = None,
        size_name: str | None = None,
    ) -> ReplayBuffer:
        """Return the buffer; the first call makes or opens it.

        Args:
            schema: The fields.
            capacity: Rows per environment.
            num_envs: Number of environments.
            layout: As in `ReplayBuffer.create`; an existing buffer may have another.
            autoreset: As in `ReplayBuffer.create`.
            sampler: The sampler; a buffer that is already open keeps its own.
            transforms: Transforms of the draws.
            on_resume: As in `ReplayBuffer.open`.
            user_metadata: JSON of a new buffer, in addition to the adapter's name.
            size_name: The adapter's argument that sets the capacity, for messages.

        Raises:
            SchemaError: The existing buffer has other fields, capacity or environments.
                It is not changed.
        """
        if self.buffer is None and (self.path / FILE_NAME).exists():
            # Before it is opened, which ends unfinished episodes.
            existing = metadata.load(self.path)
            self._check(existing, schema, capacity, num_envs, size_name)
        if self.buffer is None:
            buffer = self.reopen(sampler, transforms, on_resume)
            if buffer is None:
                buffer = ReplayBuffer.create(
                    self.path,
                    schema,
                    capacity,
                    num_envs,
                    layout=layout,
                    autoreset=autoreset,
                    sampler=sampler,
                    transforms=transforms,
                    user_metadata={"adapter": self._maker, **(user_metadata or {})},
                )
                self._keep(buffer)
        assert self.buffer is not None
        self._check(self.buffer.metadata, schema, capacity, num_envs, size_name)
        return self.buffer

    def reopen(
        self,
        sampler: Sampler | None = None,
        transforms: Sequence[Transform] = (),
        on_resume: Literal["break", "truncate", "continue"] = "break",
    ) -> ReplayBuffer | None:
        """Return the existing buffer, open for writing; None if there is none yet.

        Adapters of this process share an open buffer, because only one writer can open
        it. So a copy that is loaded from a pickle continues with the same buffer.

        Raises:
            LockedError: Another process is writing to it.
            SchemaError: It is shared, and the other adapter has other transforms.
        """
        if self.buffer is None and (self.path / FILE_NAME).exists():
            shared = _open.get(self.path)
            if shared is None or shared.closed:
                shared = ReplayBuffer.open(
                    self.path, "r+", sampler=sampler, transforms=transforms, on_resume=on_resume
                )
            elif shared.transforms != tuple(transforms):
                raise SchemaError(
                    f"{self.path} is open in this process with the transforms "
                    f"{list(shared.transforms)}, got {list(transforms)}. Close the "
                    "other adapter first."
                )
            self._keep(shared)
        return self.buffer

    def close(self) -> None:
        """Commit and close the buffer, and remove a temporary folder's data."""
        if self.buffer is not None:
            self.buffer.close()
        if self.temporary:
            files.remove_tree(self.path)
        self._let_name_go()

    def _let_name_go(self) -> None:
        if self._name is not None:
            self._name.release()

    def _keep(self, buffer: ReplayBuffer) -> None:
        self.buffer = _open[self.path] = buffer
        buffer.skip_autoreset_check()
        if self.temporary:
            self._open_buffers.append(buffer)

    def _check(
        self,
        existing: Metadata,
        schema: Schema,
        capacity: int,
        num_envs: int,
        size_name: str | None,
    ) -> None:
        got = (existing.ring.num_envs, existing.ring.capacity)
        if got == (num_envs, capacity) and existing.schema.drawn == schema:
            return
        name, way = "", "Pass the arguments that it was made with, or another path."
        if got[0] == num_envs and existing.schema.drawn == schema:
            name = f"{size_name}: " if size_name else ""
            where = shlex.quote(str(self.path))
            way = f"Close it and run mmreplay resize {where} {capacity}. {way}"
        raise SchemaError(
            f"{name}{self.path} must hold {_description(num_envs, capacity, schema)}, "
            f"got {_description(*got, existing.schema)}. {way}"
        )


class PickledByPath:
    """An object with a `home` and a ring that pickles the path, not the data."""

    home: BufferLocation
    held: ClassVar[str] = "_ring"
    """Name of the attribute that holds the ring; None before the ring is made."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the ring, and its sampler.

        Raises:
            FormatError: The ring is in a temporary folder.
        """
        state = dict(self.__dict__)
        ring = state.pop(self.held)
        return state | {"sampler": None if ring is None else ring.sampler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the ring at the path; it may have grown since."""
        sampler = state.pop("sampler")
        self.__dict__ |= state
        setattr(self, self.held, None)
        self._open_again(sampler)

    def _open_again(self, sampler: Sampler | None) -> None:
        """Open the ring, if it exists."""
        raise NotImplementedError


def fixed(name: str, way_out: str) -> Any:
    """Return a property that is set once, because rows depend on it.

    Args:
        name: Name of the attribute.
        way_out: The advice of the error that a change raises.

    Example:
        >>> class Memory:
        ...     size = fixed("size", "Make another memory.")
        >>> memory = Memory()
        >>> memory.size = 4
        >>> memory.size
        4
    """

    def read(self: object) -> Any:
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(name) from None

    def write(self: object, value: object) -> None:
        known = vars(self).setdefault(name, value)
        if value is not known and value != known:
            raise SchemaError(
                f"{name} cannot change: this {type(self).__name__} was made with "
                f"{known}, got {value!r:.80}. {way_out}"
            )

    return property(read, write, doc=f"The {name} that it was made with; fixed.")


def _reopened(system: str, path: str, made: bool) -> BufferLocation:
    """Return the location that was pickled."""
    if made and not (Path(path) / FILE_NAME).exists():
        raise FormatError(
            f"{path} no longer holds the buffer that was pickled by its path. Move it back."
        )
    return BufferLocation(system, path, True)


def _remove(path: Path, buffers: list[ReplayBuffer]) -> None:
    for buffer in buffers:
        buffer.close()
    files.remove_tree(path)


def _description(num_envs: int, capacity: int, schema: Schema) -> str:
    fields = ", ".join(
        f"{path} {describe(field.dtype, field.shape)}" + " mutable" * field.mutable
        for path, field in schema.fields.items()
    )
    return f"{num_envs} x {capacity} rows of {fields}"


def numbered_folder(
    folder: Path, system: str, *, resume: bool, fresh: bool
) -> tuple[Path, WriterLock]:
    """Return the next folder that no process uses, and the lock of its name.

    Args:
        folder: ``$MMREPLAY_DIR``.
        system: Name of the adapter.
        resume: An existing buffer will be opened. If False, it will be refused, and the
            next call tries the same folder again.
        fresh: Skip folders that hold a buffer.
    """
    for number in count(_numbers.get(system, 0)):
        name = f"{system}-{number}"
        name_folder = folder / NAMES / name
        make_folders(name_folder)
        with suppress(LockedError):
            lock = WriterLock(name_folder)
            exists = (folder / name / FILE_NAME).exists()
            if fresh and exists:
                lock.release()
                continue
            _numbers[system] = number + (resume or not exists)
            return folder / name, lock
    raise AssertionError("numbers never end")


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents."""
    for folder in [*reversed(path.parents), path]:
        if not folder.exists():
            files.make_folder(folder, exist_ok=True)


def temporary_folder(system: str) -> Path:
    """Return a new folder in ``$TMPDIR`` or /tmp; remove those of killed processes."""
    top = Path(os.environ.get("TMPDIR", "/tmp"))
    if top not in _swept:
        _swept.add(top)
        _sweep(top)
    return top / f"mmreplay-{system}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _sweep(top: Path) -> None:
    """Remove temporary buffers of this user whose processes were killed."""
    with suppress(OSError, ReplayError):
        for name in files.names(top):
            found = TEMPORARY.fullmatch(name)
            if found and not _lives(int(found[1])):
                # It may be another user's, or another process removes it as well.
                with suppress(OSError, ReplayError):
                    _remove_left(top / name)


def _remove_left(path: Path) -> None:
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        return
    # Processes of another machine or container are not visible here.
    if Owner(path).host != socket.gethostname():
        return
    lock = WriterLock(path)
    try:
        files.remove_tree(path)
    finally:
        lock.release()


def _lives(pid: int) -> bool:
    """Return whether a process of that number exists, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True

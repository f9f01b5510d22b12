"""Where an adapter's buffer lives, and the buffer once there is one.

Every face takes ``path`` and ``resume`` beside the arguments of what it stands for.
The ring is made when the first data comes, as only then all fields are known.

Which folder an adapter's buffer gets where nobody named one.

Under ``$MMREPLAY_DIR`` the names are ``<system>-<n>``; a process holds the lock of each
name that it uses, in ``.names`` beside the folders, from before there is a buffer.
Otherwise the folder is a temporary one, whose name holds the process's number, so that
one that a killed process left can be told and removed.
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

from mmreplay.buffer import opening
from mmreplay.buffer.opening import absolute
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.disk.lock import WriterLock, held_by
from mmreplay.errors import FormatError, LockedError, ReplayError, SchemaError
from mmreplay.format import metadata
from mmreplay.format.metadata import FILE_NAME, Autoreset, Metadata
from mmreplay.ring import Layout
from mmreplay.samplers.base import Sampler
from mmreplay.schema import Schema
from mmreplay.schema.dtypes import describe

if TYPE_CHECKING:
    from mmreplay.transforms.base import Transform

NAMES = ".names"
TEMPORARY = re.compile(r"mmreplay-.+-([0-9]{1,10})-[0-9a-f]{8}")

_numbers: dict[str, int] = {}
"""Of each system, from where the next place is looked for."""
_swept: set[Path] = set()


def numbered_folder(
    folder: Path, system: str, *, resume: bool, fresh: bool
) -> tuple[Path, WriterLock]:
    """The next place of a system under a folder that no process uses, and its lock.

    Args:
        folder: ``$MMREPLAY_DIR``.
        system: Name of the adapter.
        resume: A buffer there is gone on with; otherwise it is refused, and the same
            place is the next one again.
        fresh: Pass over places that hold a buffer.
    """
    for number in count(_numbers.get(system, 0)):
        name = f"{system}-{number}"
        place = folder / NAMES / name
        opening.make_place(place)
        with suppress(LockedError):
            lock = WriterLock(place)
            held = (folder / name / FILE_NAME).exists()
            if fresh and held:
                lock.release()
                continue
            _numbers[system] = number + (resume or not held)
            return folder / name, lock
    raise AssertionError("numbers never end")


def temporary_folder(system: str) -> Path:
    """A new place in ``$TMPDIR``, or /tmp; those that are nobody's any more go."""
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
                # Another user's, or one that somebody else removes as well, is let be.
                with suppress(OSError, ReplayError):
                    _remove_left(top / name)


def _remove_left(path: Path) -> None:
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        return
    told = held_by(path)
    # A process of another machine, or container, is not seen from here.
    if told is None or told["host"] != socket.gethostname():
        return
    lock = WriterLock(path)
    try:
        files.remove_tree(path)
    finally:
        lock.release()


def _lives(pid: int) -> bool:
    """Whether there is such a process, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


StrPath = str | os.PathLike[str]
FOLDER = "MMREPLAY_DIR"
MEMORIES = ("skrl", "rofunc", "memory")
"""Systems of which one goes on with what another one made."""

_open: weakref.WeakValueDictionary[Path, ReplayBuffer] = weakref.WeakValueDictionary()


class BufferLocation:
    """One folder for one adapter's buffer.

    A path is used as it is. Without one it is ``$MMREPLAY_DIR/<system>-<n>``, n
    counting those of this process from 0 and passing over those that other processes
    use, so that a program started again finds its own; without that variable, a
    temporary folder that is removed at exit, or else by the next one that is made.

    Attributes:
        path: The folder; absolute.
        temporary: Whether it is removed when this object or the process ends.
        buffer: The buffer, once it was made or opened.
        resumed: Whether it held a buffer when this object was made.
    """

    def __init__(
        self,
        system: str,
        path: StrPath | None = None,
        resume: bool = False,
        *,
        fresh: bool = False,
    ) -> None:
        """Choose the folder; nothing is in it yet.

        Args:
            system: Name of the adapter, for folders without a path.
            path: The folder, new, empty, or with a buffer of before.
            resume: Go on with the buffer that is there, if there is one.
            fresh: Without a path, pass over folders that hold a buffer: whoever asks
                cannot resume one.

        Raises:
            FormatError: A buffer is there, and resume is False.
            SchemaError: It is another adapter's.
        """
        # A name that an agent gave may be a path.
        system = system.replace("/", "%2F")
        self._system, self._resume, self._copies = system, resume, 0
        folder = os.environ.get(FOLDER)
        self.temporary = path is None and not folder
        self._name: WriterLock | None = None
        if path is None and folder:
            top = absolute(folder)
            path, self._name = numbered_folder(top, system, resume=resume, fresh=fresh)
        if path is None:
            path = temporary_folder(system)
        self.path = absolute(path)
        self.buffer: ReplayBuffer | None = None
        self.resumed = (self.path / FILE_NAME).exists()
        if self.resumed and not resume:
            self._let_name_go()
            way = "choose another path"
            if not fresh:
                way = f"go on with it by resume=True, or {way}"
            raise FormatError(
                f"{self.path} already holds a buffer, expected a new path; {way}"
            )
        if self.resumed:
            self._refuse_others()
        if self.temporary:
            self._held: list[ReplayBuffer] = []
            # Of weakref's, processes that multiprocessing starts run none at exit.
            Finalize(self, _remove, (self.path, self._held), exitpriority=0)

    @property
    def _maker(self) -> str:
        """Whose buffers these are."""
        return self._system.partition("-")[0]

    def _refuse_others(self) -> None:
        """Refuse what another adapter made, before it is opened and perhaps resized."""
        ours = MEMORIES if self._maker in MEMORIES else (self._maker,)
        try:
            maker = metadata.load(self.path).user.get("adapter")
            if maker not in (None, *ours):
                raise SchemaError(
                    f"{self.path} holds a buffer of the adapter {maker!r}, expected "
                    f"one of {', '.join(ours[:2])}; give another path"
                )
        except BaseException:
            self._let_name_go()
            raise

    def __repr__(self) -> str:
        """Say where the data is."""
        kind = "temporary folder, removed at exit: " if self.temporary else ""
        return f"{kind}{self.path}"

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the path; the data stays where it is, as of now.

        Raises:
            FormatError: The folder goes with this process.
        """
        made = (self.path / FILE_NAME).exists()
        if self.temporary and not made:
            return BufferLocation, (self._system,)
        if self.temporary:
            raise FormatError(
                f"pickling a buffer in the temporary folder {self.path}: got a folder "
                "that is removed at exit, expected one that stays; give path=, or set "
                f"${FOLDER}"
            )
        if self.buffer is not None and not self.buffer.closed:
            self.buffer.commit()
        return _again, (self._system, str(self.path), made)

    def beside(self) -> BufferLocation:
        """A home for a copy of the buffer: its folder has this one's name and more."""
        if self.temporary:
            return BufferLocation(self._system)
        self._copies += 1
        return BufferLocation(
            self._system, f"{self.path}-copy{self._copies}", self._resume
        )

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
        user: dict[str, Any] | None = None,
        size_name: str | None = None,
    ) -> ReplayBuffer:
        """The buffer: made now, or opened if it is there; later the same again.

        Args:
            schema: As in `ReplayBuffer.create`, as are those not listed here.
            capacity: Rows per environment.
            num_envs: Environments.
            layout: Not compared with that of a buffer that is there.
            autoreset: What the row after an end is.
            sampler: What draws; a buffer that is open already keeps its own.
            transforms: What draws make of steps.
            on_resume: As in `ReplayBuffer.open`.
            user: JSON kept with a new buffer, beside whose it is.
            size_name: The user's argument that sets the capacity, for messages.

        Raises:
            SchemaError: The buffer that is there has other fields, capacity or
                environments. It is left as it is.
        """
        if self.buffer is None and (self.path / FILE_NAME).exists():
            # Before it is opened, which ends its running episodes.
            there = metadata.load(self.path)
            self._check(there, schema, capacity, num_envs, size_name)
        if self.buffer is None:
            found = self.reopen(sampler, transforms, on_resume)
            if found is None:
                found = ReplayBuffer.create(
                    self.path, schema, capacity, num_envs,
                    layout=layout, autoreset=autoreset,
                    sampler=sampler, transforms=transforms,
                    user={"adapter": self._maker, **(user or {})},
                )  # fmt: skip
                self._keep(found)
        assert self.buffer is not None
        self._check(self.buffer.metadata, schema, capacity, num_envs, size_name)
        return self.buffer

    def reopen(
        self,
        sampler: Sampler | None = None,
        transforms: Sequence[Transform] = (),
        on_resume: Literal["break", "truncate", "continue"] = "break",
    ) -> ReplayBuffer | None:
        """The buffer that is there, open for writing; None if there is none yet.

        One that another face in this process holds open is shared with it: there is
        one writer, and a copy that was loaded from a pickle goes on with it.

        Raises:
            LockedError: Another process is writing it.
            SchemaError: It is shared, and the other face draws by other transforms.
        """
        if self.buffer is None and (self.path / FILE_NAME).exists():
            shared = _open.get(self.path)
            if shared is None or shared.closed:
                shared = ReplayBuffer.open(
                    self.path,
                    "r+",
                    sampler=sampler,
                    transforms=transforms,
                    on_resume=on_resume,
                )
            elif shared.transforms != tuple(transforms):
                raise SchemaError(
                    f"{self.path} is open in this process with the transforms "
                    f"{list(shared.transforms)}, got {list(transforms)}, expected the "
                    "same; close the other face first"
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
            self._held.append(buffer)

    def _check(
        self,
        there: Metadata,
        schema: Schema,
        capacity: int,
        num_envs: int,
        size_name: str | None,
    ) -> None:
        got = (there.ring.num_envs, there.ring.capacity)
        if got == (num_envs, capacity) and there.schema == schema:
            return
        name, way = "", "give the arguments that it was made with, or another path"
        if got[0] == num_envs and there.schema == schema:
            name = f"{size_name}: " if size_name else ""
            where = shlex.quote(str(self.path))
            way = f"close it and run mmreplay resize {where} {capacity}, or {way}"
        raise SchemaError(
            f"{name}{self.path} holds {_told(*got, there.schema)}, expected "
            f"{_told(num_envs, capacity, schema)}; {way}"
        )


def fixed(name: str, way_out: str) -> Any:
    """An attribute that is set once, as rows depend on it.

    Args:
        name: Its name.
        way_out: What to do instead of changing it.

    Example:
        >>> class Memory:
        ...     size = fixed("size", "make another memory")
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
                f"{name}: got {value!r:.80} for {type(self).__name__} that was made "
                f"with {known}, expected no change; {way_out}"
            )

    return property(read, write, doc=f"The {name} that it was made with; fixed.")


class PickledByPath:
    """What has a `home` and a ring, and pickles as the way to it."""

    home: BufferLocation
    held: ClassVar[str] = "_ring"
    """The attribute that the ring is, or None before it is made."""

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the ring, with what draws from it.

        Raises:
            FormatError: The ring is in a temporary folder.
        """
        state = dict(self.__dict__)
        ring = state.pop(self.held)
        return state | {"sampler": None if ring is None else ring.sampler}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the ring that the path leads to; it may have grown since."""
        sampler = state.pop("sampler")
        self.__dict__ |= state
        setattr(self, self.held, None)
        self._open_again(sampler)

    def _open_again(self, sampler: Sampler | None) -> None:
        """Open the ring, if it is there."""
        raise NotImplementedError


def _again(system: str, path: str, made: bool) -> BufferLocation:
    """The home that was pickled."""
    if made and not (Path(path) / FILE_NAME).exists():
        raise FormatError(
            f"{path}: got no buffer there any more, expected the one that was pickled "
            "by its path; move it back"
        )
    return BufferLocation(system, path, True)


def _told(num_envs: int, capacity: int, schema: Schema) -> str:
    fields = ", ".join(
        f"{path} {describe(field.dtype, field.shape)}" + " mutable" * field.mutable
        for path, field in schema.fields.items()
    )
    return f"{num_envs} x {capacity} rows of {fields}"


def _remove(path: Path, held: list[ReplayBuffer]) -> None:
    for buffer in held:
        buffer.close()
    files.remove_tree(path)

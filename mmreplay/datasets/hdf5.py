"""HDF5 files, read and written through h5py (extra hdf5), which only this module uses.

Only data in the file itself is read: links, external files and virtual datasets could
name any file of this machine. Uncompressed contiguous datasets are read and mapped
without the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmreplay.convert.array_file import native
from mmreplay.convert.base import MAX_ROW_NBYTES, Notes
from mmreplay.convert.values import check_lengths
from mmreplay.convert.zip_file import MAX_EXPANSION
from mmreplay.datasets.common.rows import Array, TextRows
from mmreplay.disk.files import File
from mmreplay.disk.lock import lock_pid
from mmreplay.errors import (
    CorruptError,
    FailedError,
    FormatError,
    LockedError,
    ReplayError,
    SchemaError,
    system_error,
    undone_by,
)
from mmreplay.ragged import Ragged
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import canonical_name
from mmreplay.schema.naming import left_out

if TYPE_CHECKING:
    import h5py

UNCLOSED = "already open for write"
"""The library's words for a file that says that a program is writing it."""
MAGIC = b"\x89HDF\r\n\x1a\n"
SUFFIXES = (".hdf5", ".h5")
MAX_CHILDREN = 1_000_000
MAX_DEPTH = 16
MAX_ATTRIBUTE_NBYTES = 8 << 20
# A dataset without stored bytes holds only fill values.
LEAST_NBYTES = 1 << 10
MAX_STRINGS = 1024
"""Strings that are read at a time."""
MOST_COMPACT = 32 << 10
"""Maximum bytes of a dataset stored in its own header, which holds up to 64 KiB."""


class Hdf5:
    """A file open for reading.

    Attributes:
        file: The file, read without the library.
        notes: The report.
    """

    def __init__(self, path: Path, notes: Notes, *, allow_expansion: bool = False) -> None:
        """Open a file.

        Args:
            path: A regular file.
            notes: The report.
            allow_expansion: Read datasets that expand to more than 1,000 times the
                file.

        Raises:
            LockedError: It cannot be read while a program has it open for writing.
            CorruptError: The library cannot read it.
        """
        h5py = library()
        self.notes = notes
        self._last: tuple[str, Any] = ("", None)
        self._allow_expansion = allow_expansion
        self.file = File.open(path, None)
        # The library holds a lock while a file is open for writing.
        writer = lock_pid(path, exclusive=True)
        who = "this process" if writer == os.getpid() else f"process {writer}"
        who = who if writer else "another process"
        try:
            with undone_by(self.file.close), self.translated_errors(str(path)):
                # By descriptor: the path may be another file by now.
                self._h5 = h5py.File(f"/proc/self/fd/{self.file.fd}", "r", locking=False)
        except CorruptError as error:
            if writer is not None:
                raise LockedError(
                    f"{path} is an HDF5 file that {who} has open for writing. Close it "
                    "there, then try again.",
                    pid=writer or None,
                ) from error
            if UNCLOSED in str(error.__cause__):
                raise LockedError(
                    f"{path} is an HDF5 file that is open for writing, or was not "
                    "closed by a program that ended. Close it there, or run h5clear "
                    "--status on it."
                ) from error
            raise
        if writer is not None:
            notes.doubt(
                f"{who} has the file open for writing: rows may be missing, or change "
                "while they are read"
            )

    @contextmanager
    def translated_errors(self, name: str) -> Iterator[None]:
        """Translate any error of the library into an error that names the file."""
        try:
            yield
        except (FormatError, SchemaError):
            raise
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise CorruptError(
                f"{name}: the HDF5 library cannot read the file of {self.file.nbytes} "
                f"bytes ({why}). The file is truncated or damaged: restore it from a "
                "copy."
            ) from error

    def path_of(self, name: str) -> str:
        """Return the name of an object of the file for errors."""
        return f"{self.file.path}: {name!r}"

    def children(self, name: str = "/") -> list[str]:
        """Return the names in a group, in the file's order, without links.

        Raises:
            CorruptError: It is no group, or cannot be read.
            FormatError: It holds more than a million names.
        """
        h5py = library()
        with self.translated_errors(self.path_of(name)):
            group = self._h5[name]
            if len(group) > MAX_CHILDREN:
                raise FormatError(
                    f"{self.path_of(name)} must have at most {MAX_CHILDREN} members, "
                    f"got {len(group)}. Split the file."
                )
            found = []
            for child in group:
                if isinstance(group.get(child, getlink=True), h5py.HardLink):
                    found.append(child)
                else:
                    self.notes.doubt(f"{name}: {child!r} is a link, and was left out")
            return found

    def is_group(self, name: str) -> bool:
        """Return whether an object is a group."""
        h5py = library()
        with self.translated_errors(self.path_of(name)):
            return isinstance(self._object(name), h5py.Group)

    def _object(self, name: str) -> Any:
        # Opening is slow, and an object is usually read right after a check.
        if self._last[0] != name:
            self._last = (name, self._h5[name])
        return self._last[1]

    def attributes(self, name: str = "/") -> dict[str, object]:
        """Return the attributes of an object: numbers and text up to 8 MiB each."""
        found: dict[str, object] = {}
        with self.translated_errors(self.path_of(name)):
            attributes = self._h5[name].attrs
            for key in attributes:
                if attributes.get_id(key).get_storage_size() <= MAX_ATTRIBUTE_NBYTES:
                    found[key] = _plain(attributes[key])
        return found

    def rows(self, name: str, path: str) -> Hdf5Rows | None:
        """Return a dataset as rows; None, with a note, if no field can hold them.

        Args:
            name: Name of the dataset in the file.
            path: Path of the field, for the note.

        Raises:
            CorruptError: It cannot be read, or is larger than the file.
            FormatError: It is in another file, or expands far too much.
        """
        with self.translated_errors(self.path_of(name)):
            dataset = self._object(name)
            try:
                if not dataset.shape:
                    reason = "it is a single value, not one a step"
                    left_out(self.notes, path, f"dataset {name!r} was left out: {reason}")
                    return None
                self._refuse(dataset, name)
                return Hdf5Rows(self, dataset, self.path_of(name))
            except SchemaError as error:
                self.notes.doubt(f"dataset {name!r} was left out: {error}")
                return None

    def _refuse(self, dataset: h5py.Dataset, name: str) -> None:
        what = self.path_of(name)
        if dataset.external or dataset.is_virtual:
            raise FormatError(
                f"{what} is stored in other files. Copy it into this one with h5repack."
            )
        held = max(dataset.id.get_storage_size(), LEAST_NBYTES)
        nbytes = int(np.prod(dataset.shape, dtype=object)) * dataset.dtype.itemsize
        if nbytes > MAX_EXPANSION * held and not self._allow_expansion:
            raise FormatError(
                f"{what} says that {held} bytes hold {nbytes}, more than "
                f"{MAX_EXPANSION} times as many. Pass allow_expansion=True if you "
                "trust the file."
            )
        chunk = int(np.prod(dataset.chunks or (0,), dtype=object))
        if chunk * dataset.dtype.itemsize > MAX_ROW_NBYTES:
            raise FormatError(
                f"{what} must have chunks of at most {MAX_ROW_NBYTES} bytes, got "
                f"{chunk * dataset.dtype.itemsize}. Repack it with smaller chunks."
            )

    def texts(self, name: str, field: Field) -> TextRows | None:
        """Return a dataset of strings as rows; None if it is none.

        Args:
            name: Name of the dataset in the file.
            field: The text field that holds them.
        """
        dataset, what = self.raw(name), self.path_of(name)
        if dataset.ndim != 1 or library().check_string_dtype(dataset.dtype) is None:
            return None
        count = len(dataset)
        # Rows may be the same string of the file: it is in memory once for each.
        group = max(1, min(MAX_STRINGS, MAX_ROW_NBYTES // max(1, self.file.nbytes)))

        def read(first: int, stop: int) -> Ragged:
            if stop > count:
                raise CorruptError(
                    f"{what} must have at least {stop} rows, got {count}. The file was "
                    "truncated or edited: restore it from a copy."
                )
            found: list[bytes] = []
            for begin in range(first, stop, group):
                with self.translated_errors(what):
                    some = dataset[begin : min(begin + group, stop)].tolist()
                lengths = np.array([len(each) for each in some])
                check_lengths(lengths, field, what, begin)
                found += some
            offsets = np.cumsum([0, *map(len, found)], dtype=np.int64)
            return Ragged(np.frombuffer(b"".join(found), np.uint8), offsets)

        return TextRows(read, count, field, what)

    def raw(self, name: str) -> h5py.Dataset:
        """Return a dataset to be decoded, such as one of compressed images."""
        with self.translated_errors(self.path_of(name)):
            dataset = self._object(name)
            self._refuse(dataset, name)
            return dataset

    def datasets(self, name: str) -> dict[str, str]:
        """Return full names of all datasets of a group, or of a dataset, by path."""
        return dict(self._walk(name, "", 0))

    def _walk(self, name: str, path: str, depth: int) -> Iterator[tuple[str, str]]:
        if depth > MAX_DEPTH:
            raise FormatError(
                f"{self.path_of(name)} nests deeper than {MAX_DEPTH}. The file is "
                "damaged or hostile."
            )
        if not self.is_group(name):
            yield path, name
            return
        for child in self.children(name):
            below = f"{path}/{child}" if path else child
            yield from self._walk(f"{name.rstrip('/')}/{child}", below, depth + 1)

    def close(self) -> None:
        """Close the file."""
        if self.file.fd >= 0:
            self._last = ("", None)
            self._h5.close()
            self.file.close()


class Hdf5Rows:
    """A dataset ``[rows, *shape]``; see `common.rows.Rows`.

    Attributes:
        offset: Offset of its bytes in the file; None where the library decodes them.
        stored: Their dtype in the file.
    """

    def __init__(self, hdf5: Hdf5, dataset: h5py.Dataset, name: str) -> None:
        self._hdf5, self._dataset, self._name = hdf5, dataset, name
        self.stored = dataset.dtype
        self.dtype = canonical_name(dataset.dtype)
        self.shape = dataset.shape[1:]
        self.count = dataset.shape[0]
        self.offset = self._find()

    def _find(self) -> int | None:
        h5py, dataset = library(), self._dataset
        offset = dataset.id.get_offset()
        # Types that numpy lacks are converted by the library.
        numpy_type = h5py.h5t.py_create(dataset.dtype, logical=True)
        if offset is None or dataset.chunks or numpy_type != dataset.id.get_type():
            return None
        place = int(offset)
        if place + dataset.nbytes > self._hdf5.file.nbytes:
            raise CorruptError(
                f"{self._name} ends at byte {place + dataset.nbytes}, after the end of "
                f"the file at {self._hdf5.file.nbytes}. The file is truncated: restore "
                "it from a copy."
            )
        return place

    def read(self, first: int, stop: int) -> Array:
        """See `Rows.read`.

        Raises:
            CorruptError: The dataset has fewer rows.
        """
        if stop > self.count:
            # The bytes after a dataset belong to another one.
            raise CorruptError(
                f"{self._name} must have at least {stop} rows, got {self.count}. The "
                "file was truncated or edited: restore it from a copy."
            )
        if self.offset is None:
            with self._hdf5.translated_errors(self._name):
                return native(np.asarray(self._dataset[first:stop]), self.dtype)
        part = np.empty((stop - first, *self.shape), self.stored)
        if part.size:
            place = self.offset + first * (part.nbytes // len(part))
            self._hdf5.file.pread_into(part.reshape(-1).view(np.uint8).data, place)
        return native(part, self.dtype)

    def mapped(self, mapping: Any) -> Array | None:
        """Return all rows in a mapping of the file, or None if they are encoded."""
        if self.offset is None:
            return None
        count = int(np.prod((self.count, *self.shape), dtype=object))
        flat: Array = np.frombuffer(mapping, self.stored, count, self.offset)
        return flat.reshape(self.count, *self.shape)


class Hdf5Output:
    """A file open for writing, made by `Staging`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._translated_errors():
            # The staged file is locked by us already.
            self._h5 = library().File(path, "w", locking=False, track_order=True)
        self._open = True
        self._low = low = library()
        self._types: dict[np.dtype[Any], Any] = {}
        self._scalar = low.h5s.create(low.h5s.SCALAR)
        self._compact, self._apart = (low.h5p.create(low.h5p.DATASET_CREATE) for _ in range(2))
        self._compact.set_layout(low.h5d.COMPACT)
        self._nested = low.h5p.create(low.h5p.LINK_CREATE)
        self._nested.set_create_intermediate_group(True)
        self._grouped = low.h5p.create(low.h5p.GROUP_CREATE)
        # Groups that keep an order are of the newer, smaller kind.
        self._grouped.set_link_creation_order(low.h5p.CRT_ORDER_TRACKED | low.h5p.CRT_ORDER_INDEXED)
        for each in (self._compact, self._apart, self._grouped):
            # Equal buffers give equal files.
            each.set_obj_track_times(False)

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except FailedError:
            # Ours already: the library is not installed.
            raise
        except OSError as error:
            # The library says what the system said in its text only.
            found = re.search(r"errno = (\d+)", str(error))
            number = int(found[1]) if found else error.errno
            raise system_error("write", self._path, OSError(number, str(error))) from (error)

    def put(self, name: str, values: Mapping[str, Array], attributes: Mapping[str, object]) -> None:
        """Make a group with complete datasets.

        The library's own calls take three times as long and 14 KB a group, which is too
        much for an episode of one step.
        """
        low = self._low
        with self._translated_errors():
            group = low.h5g.create(self._h5.id, name.encode(), gcpl=self._grouped)
            for below, stored in values.items():
                array = _with_type(stored)
                compact = array.nbytes <= MOST_COMPACT and array.dtype != object
                dataset = low.h5d.create(
                    group,
                    below.encode(),
                    self._type(array.dtype),
                    low.h5s.create_simple(array.shape),
                    self._compact if compact else self._apart,
                    self._nested,
                )
                whole = np.ascontiguousarray(array)
                in_memory = None if array.dtype == object else self._type(array.dtype)
                dataset.write(low.h5s.ALL, low.h5s.ALL, whole, in_memory)
            for key, value in attributes.items():
                one = np.asarray(value)
                kind = self._type(one.dtype)
                attribute = low.h5a.create(group, key.encode(), kind, self._scalar)
                attribute.write(one, kind)

    def _type(self, dtype: np.dtype[Any]) -> Any:
        """Return the file's type of a dtype."""
        if dtype not in self._types:
            self._types[dtype] = self._low.h5t.py_create(dtype, logical=True)
        return self._types[dtype]

    def append(self, name: str, values: Array) -> None:
        """Add rows to a dataset; the first rows make it."""
        values = _with_type(values)
        with self._translated_errors():
            if name not in self._h5:
                self._h5.create_dataset(
                    name, data=values, chunks=True, maxshape=(None, *values.shape[1:])
                )
                return
            dataset = self._h5[name]
            before = len(dataset)
            dataset.resize(before + len(values), axis=0)
            if values.dtype != object:
                dataset[before:] = values
                return
            for row, value in enumerate(values, before):
                dataset[row] = value

    def set_attributes(self, name: str, values: Mapping[str, object]) -> None:
        """Set attributes of a group; make the group if it is missing."""
        with self._translated_errors():
            self._h5.require_group(name).attrs.update(values)

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        if self._open:
            self._open = False
            with self._translated_errors():
                self._h5.close()


def is_hdf5(path: Path, passes: Callable[[Hdf5], bool]) -> bool:
    """Return whether a regular file is HDF5 and passes a test.

    Raises:
        FormatError: It is a link.
        LockedError: It is HDF5 that a program has open for writing.
        CorruptError: It is HDF5 that the library cannot read.
    """
    if not path.is_file():
        return False
    with closing(File.open(path, None)) as file:
        if file.pread(min(len(MAGIC), file.nbytes), 0) != MAGIC:
            return False
    with closing(Hdf5(path, Notes())) as hdf5:
        try:
            return passes(hdf5)
        except ReplayError:
            return False


def refuse_unfit(schema: Schema, target: str) -> None:
    """Refuse fields that HDF5 cannot store or name.

    Raises:
        SchemaError: A field has dtype bfloat16 or a name ``"."``.
    """
    for path, each in schema.fields.items():
        if "." in path.split("/"):
            raise SchemaError(
                f"field {path!r}: the name '.' stands for its own group in {target}'s "
                "HDF5. Leave it out with fields=."
            )
        if each.dtype == "bfloat16":
            raise SchemaError(
                f"field {path!r}: {target} cannot store bfloat16. Leave it out with fields=."
            )


def library() -> Any:
    """Return h5py.

    Raises:
        FailedError: It is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise FailedError(
            'h5py, which HDF5 files need, is not installed. Run: pip install "mmreplay[hdf5]"'
        ) from error
    return h5py


def _with_type(values: Array) -> Array:
    """Values as they are, of files (an array of arrays of bytes) with HDF5's dtype."""
    return values.astype(library().vlen_dtype(np.uint8)) if values.dtype == object else values


def _plain(value: object) -> object:
    """Return an attribute as a Python value; None unless it is a number or text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist() if value.dtype.kind in "biufSU" else None
    return value if isinstance(value, str) else None

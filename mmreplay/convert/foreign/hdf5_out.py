"""HDF5 files that grow row by row, for targets that are some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mmreplay.convert.foreign.columns import Array
from mmreplay.convert.foreign.hdf5 import library
from mmreplay.errors import SchemaError, system_error
from mmreplay.schema import Schema


class Hdf5Output:
    """A file open for writing, which was made before; see `Staging`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            # The staged file is locked by us already.
            self._h5 = library().File(path, "w", locking=False, track_order=True)
        self._open = True

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # The library says what the system said in its text only.
            found = re.search(r"errno = (\d+)", str(error))
            number = int(found[1]) if found else error.errno
            raise system_error("write", self._path, OSError(number, str(error))) from (
                error
            )

    def append(self, name: str, values: Array) -> None:
        """Add rows to a dataset, which is made of the first ones."""
        with self._told():
            if name not in self._h5:
                self._h5.create_dataset(
                    name, data=values, chunks=True, maxshape=(None, *values.shape[1:])
                )
                return
            dataset = self._h5[name]
            before = len(dataset)
            dataset.resize(before + len(values), axis=0)
            dataset[before:] = values

    def set_attributes(self, name: str, values: Mapping[str, object]) -> None:
        """Set attributes of a group, which is made if need be."""
        with self._told():
            self._h5.require_group(name).attrs.update(values)

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        if self._open:
            self._open = False
            with self._told():
                self._h5.close()


def refuse_unfit(schema: Schema, target: str) -> None:
    """Refuse fields that HDF5 has no type or no name for.

    Raises:
        SchemaError: There is one.
    """
    for path, each in schema.fields.items():
        if "." in path.split("/"):
            raise SchemaError(
                f"field {path!r}: got the name '.', which stands for its own group in "
                f"{target}'s HDF5, expected another; leave it out with fields="
            )
        if each.dtype == "bfloat16":
            raise SchemaError(
                f"field {path!r}: got bfloat16, which {target} lacks, expected another "
                "dtype; leave it out with fields="
            )

"""HDF5 files that grow row by row, for targets that are some."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.foreign.columns import Array
from mmreplay.convert.foreign.hdf5 import library
from mmreplay.errors import FailedError, SchemaError, system_error
from mmreplay.schema import Schema

MOST_COMPACT = 32 << 10
"""Bytes of a dataset that lies in its own header, which holds up to 64 KiB."""


class Hdf5Output:
    """A file open for writing, which was made before; see `Staging`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            # The staged file is locked by us already.
            self._h5 = library().File(path, "w", locking=False, track_order=True)
        self._open = True
        self._low = low = library()
        self._types: dict[np.dtype[Any], Any] = {}
        self._scalar = low.h5s.create(low.h5s.SCALAR)
        self._compact, self._apart = (
            low.h5p.create(low.h5p.DATASET_CREATE) for _ in range(2)
        )
        self._compact.set_layout(low.h5d.COMPACT)
        self._nested = low.h5p.create(low.h5p.LINK_CREATE)
        self._nested.set_create_intermediate_group(True)
        self._grouped = low.h5p.create(low.h5p.GROUP_CREATE)
        # Groups that keep an order are of the newer, smaller kind.
        self._grouped.set_link_creation_order(
            low.h5p.CRT_ORDER_TRACKED | low.h5p.CRT_ORDER_INDEXED
        )
        for each in (self._compact, self._apart, self._grouped):
            # Equal buffers give equal files.
            each.set_obj_track_times(False)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FailedError:
            # Ours already: the library is not installed.
            raise
        except OSError as error:
            # The library says what the system said in its text only.
            found = re.search(r"errno = (\d+)", str(error))
            number = int(found[1]) if found else error.errno
            raise system_error("write", self._path, OSError(number, str(error))) from (
                error
            )

    def put(
        self, name: str, values: Mapping[str, Array], attributes: Mapping[str, object]
    ) -> None:
        """Make a group of datasets at once, each whole.

        Not by the library's own calls for that, which take three times as long and
        14 KB a group: an episode may be one step.
        """
        low = self._low
        with self._told():
            group = low.h5g.create(self._h5.id, name.encode(), gcpl=self._grouped)
            for below, array in values.items():
                compact = array.nbytes <= MOST_COMPACT
                dataset = low.h5d.create(
                    group, below.encode(), self._type(array.dtype),
                    low.h5s.create_simple(array.shape),
                    self._compact if compact else self._apart, self._nested,
                )  # fmt: skip
                whole = np.ascontiguousarray(array)
                dataset.write(low.h5s.ALL, low.h5s.ALL, whole, self._type(array.dtype))
            for key, value in attributes.items():
                one = np.asarray(value)
                kind = self._type(one.dtype)
                attribute = low.h5a.create(group, key.encode(), kind, self._scalar)
                attribute.write(one, kind)

    def _type(self, dtype: np.dtype[Any]) -> Any:
        """The file's type of a dtype, made once."""
        if dtype not in self._types:
            self._types[dtype] = self._low.h5t.py_create(dtype, logical=True)
        return self._types[dtype]

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

"""Episodes in Minari's main_data.hdf5."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mmreplay.convert.base import Notes
from mmreplay.datasets import images
from mmreplay.datasets.common.rows import ColumnRows
from mmreplay.datasets.hdf5 import Hdf5
from mmreplay.datasets.images import ImageRows
from mmreplay.datasets.minari.spaces import is_image, leaf_of, text_field
from mmreplay.errors import FormatError

HDF5_FILE_NAME = "main_data.hdf5"
SECTIONS = ("observations", "actions", "rewards", "terminations", "truncations")
TUPLE_ITEM = re.compile(r"(?<=/)_index_(?=\d+(?:/|$))")
"""Stands before the number of a tuple's item in the name of its group."""
INFOS = "infos were left out; infos=True takes what every episode has of them"


class Hdf5Episodes:
    """See `minari.EpisodeFiles`.

    Attributes:
        lossy: Some images were kept as JPEG.
        notes: What was left out.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        spaces: Mapping[str, object],
        *,
        jpeg: bool,
        infos: bool,
        allow_expansion: bool,
    ) -> None:
        """Open the file of a dataset's folder."""
        self.lossy = False
        self.notes = Notes()
        self._spaces, self._jpeg = spaces, jpeg
        self._sections = (*SECTIONS, "infos") if infos else SECTIONS
        self._hdf5 = Hdf5(folder / HDF5_FILE_NAME, self.notes, allow_expansion=allow_expansion)
        self._count = count

    def names(self) -> list[str]:
        """See `minari.EpisodeFiles.names`."""
        held = set(self._hdf5.children())
        names = [f"episode_{index}" for index in range(self._count)]
        for name in names:
            if name not in held:
                raise FormatError(
                    f"{self._hdf5.file.path} has no {name!r}, but metadata.json says "
                    f"{self._count} episodes. The file was truncated or edited."
                )
        return [self._hdf5.path_of(name) for name in names]

    def columns(self, index: int) -> dict[str, ColumnRows]:
        """See `minari.EpisodeFiles.columns`."""
        group = f"/episode_{index}"
        there = set(self._hdf5.children(group))
        left_out = not index and "infos" in there - set(self._sections)
        if left_out and self._hdf5.datasets(f"{group}/infos"):
            self.notes.note(INFOS)
        found: dict[str, ColumnRows] = {}
        for section in self._sections:
            if section not in there:
                continue
            for path, name in self._hdf5.datasets(f"{group}/{section}").items():
                own = f"{section}/{path}".rstrip("/")
                below = self.name_of(own).partition("/")[2]
                rows = self._rows(name, section, below)
                if rows is not None:
                    found[own] = rows
        return found

    def name_of(self, own: str) -> str:
        """See `minari.EpisodeFiles.name_of`."""
        return TUPLE_ITEM.sub("", own)

    def _rows(self, name: str, section: str, path: str) -> ColumnRows | None:
        space = self._spaces.get(section)
        leaf = leaf_of(space, path)
        field = text_field(leaf)
        if field is not None and (texts := self._hdf5.texts(name, field)) is not None:
            return texts
        may_be_packed = space is None or is_image(leaf)
        if self._jpeg and section in self._spaces and may_be_packed:
            packed = self._packed(name)
            if packed is not None:
                return packed
        return self._hdf5.rows(name, f"{section}/{path}")

    def _packed(self, name: str) -> ImageRows | None:
        """Images kept as files: one string of bytes a row, of one length or of many."""
        dataset = self._hdf5.raw(name)
        many = dataset.dtype.kind == "O"
        if not many and (dataset.dtype != np.uint8 or dataset.ndim != 2):
            return None
        if not len(dataset):
            return None
        path = self._hdf5.path_of(name)

        def packed(first: int, stop: int) -> list[bytes]:
            with self._hdf5.translated_errors(path):
                return [np.asarray(each).tobytes() for each in dataset[first:stop]]

        first = packed(0, 1)[0]
        if not first.startswith(images.PACKED):
            return None
        self.lossy |= first.startswith(images.MAGIC)
        return ImageRows(packed, len(dataset), path)

    def close(self) -> None:
        """See `minari.EpisodeFiles.close`."""
        self._hdf5.close()

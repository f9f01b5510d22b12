"""Episodes of Minari's arrow and parquet datasets: one folder of one table each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmreplay.convert.base import Notes, refuse_expansion
from mmreplay.convert.parquet import ParquetFile, is_text
from mmreplay.datasets import images
from mmreplay.datasets.arrow import (
    Batches,
    IpcFile,
    Window,
    image_rows,
    number_rows,
    parquet_batches,
    text_rows,
)
from mmreplay.datasets.common.rows import ColumnRows, ShiftedRows, nbytes_of
from mmreplay.datasets.minari.hdf5_episodes import INFOS, SECTIONS
from mmreplay.datasets.minari.spaces import leaf_of, text_field
from mmreplay.errors import FormatError
from mmreplay.schema import Field


class TableEpisodes:
    """Episodes in tables of one row more than steps; the last row is padded.

    Attributes:
        lossy: Some images were kept as JPEG.
        notes: What was left out.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        count: int,
        spaces: Mapping[str, object],
        *,
        infos: bool,
        allow_expansion: bool,
    ) -> None:
        """Look at a dataset's data folder; kind is ``"arrow"`` or ``"parquet"``."""
        self.lossy = False
        self.notes = Notes()
        self._paths = [folder / str(n) / f"part-0.{kind}" for n in range(count)]
        self._kind, self._spaces = kind, spaces
        self._sections = (*SECTIONS, "infos") if infos else SECTIONS
        self._open: IpcFile | ParquetFile | None = None
        self._allow_expansion = allow_expansion

    def names(self) -> list[str]:
        """See `minari.EpisodeFiles.names`."""
        for path in self._paths:
            if len(list(path.parent.glob("part-*"))) > 1:
                raise FormatError(
                    f"{path.parent} has more files than {path.name}. Write the dataset "
                    "with smaller episodes."
                )
        return [str(path) for path in self._paths]

    def columns(self, index: int) -> dict[str, ColumnRows]:
        """See `minari.EpisodeFiles.columns`."""
        self.close()
        window, first = self._window(self._paths[index])
        found: dict[str, ColumnRows] = {}
        for path, array in first.items():
            rows = self._rows(window, path, array)
            if rows is None:
                self.notes.doubt(f"column {path!r} was left out: {array.type} is no field dtype")
            elif path.split("/")[0] in ("observations", "infos"):
                found[path] = rows
            else:
                found[path] = ShiftedRows(rows, 0, window.count - 1)
        row_nbytes = sum(nbytes_of(rows) for rows in found.values())
        refuse_expansion(
            self._paths[index],
            window.count * row_nbytes,
            self._columns(index),
            self._allow_expansion,
        )
        return found

    def name_of(self, own: str) -> str:
        """See `minari.EpisodeFiles.name_of`."""
        return own

    def _columns(self, index: int) -> int:
        return self._paths[index].stat().st_size

    def _window(self, path: Path) -> tuple[Window, Mapping[str, Any]]:
        """A table, and the first rows of its columns."""
        batches: Callable[[list[str]], Batches]
        if self._kind == "parquet":
            section = ParquetFile(path)
            self._open, count, names = section, section.rows, section.schema.names

            texts = [leaf for leaf in section.leaf_names() if self._text_of(leaf)]
            for leaf in texts:
                section.refuse_expanding(leaf, self._allow_expansion)

            def batches(names: list[str]) -> Batches:
                return parquet_batches(section, names, texts)

        else:
            ipc = IpcFile(path)
            self._open, count, names = ipc, ipc.count, ipc.names
            batches = ipc.batches
        kept = [name for name in names if name in self._sections]
        if "infos" in names and "infos" not in kept:
            self.notes.note(INFOS)
        if "observations" not in kept or not count:
            raise FormatError(
                f"{path} has columns {list(names)[:20]} and {count} rows, but no "
                "observations. The file is damaged, or of another version."
            )
        window = Window(batches(kept), count, str(path))
        return window, next(batches(kept)())

    def _rows(self, window: Window, path: str, array: Any) -> ColumnRows | None:
        section, _, below = path.partition("/")
        space = leaf_of(self._spaces.get(section), below)
        field, kind = text_field(space), array.type
        if field is not None and is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
            return text_rows(window, path, field)
        if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
            first = array[0].as_py()
            if first is None or not first.startswith(images.PACKED):
                return None
            self.lossy |= first.startswith(images.MAGIC)
            return image_rows(window, path)
        shape = space.get("shape") if isinstance(space, dict) else None
        return number_rows(window, path, array, shape)

    def _text_of(self, path: str) -> Field | None:
        """Return the field of a column of text; of a struct by a path with dots."""
        section, _, below = path.partition(".")
        return text_field(leaf_of(self._spaces.get(section), below.replace(".", "/")))

    def close(self) -> None:
        """See `minari.EpisodeFiles.close`."""
        if self._open is not None:
            self._open.close()
            self._open = None

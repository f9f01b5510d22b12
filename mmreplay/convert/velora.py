"""velora's pair: six float32 tensors, and a metadata.json with a cursor.

``<prefix>metadata.json`` and ``<prefix>state.safetensors`` lie in one folder. A row is
a transition, next state included.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.array_file import ArrayFile
from mmreplay.convert.base import Block, Notes, Writer, doubt_priorities
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import NamedEnds
from mmreplay.convert.safetensors import SafetensorsPlan
from mmreplay.convert.staging import Staging
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.episodes import END, FINAL, START, TERMINATED
from mmreplay.errors import SchemaError
from mmreplay.nesting import under

METADATA, STATE = "metadata.json", "state.safetensors"
PREFIX = "buffer_"
TENSORS = ("states", "actions", "rewards", "next_states", "dones", "hiddens")
HIDDEN = ("hidden", "hiddens", "hidden_state", "hidden_states")

Floats = NDArray[np.float32]
Held = tuple[dict[str, NDArray[np.generic]], NDArray[np.uint8]]
"""Columns and flags of an environment's newest row, which waits for the next one."""


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that is no beginning of a file's name.

    Raises:
        SchemaError: It is none.
    """
    if not isinstance(prefix, str) or set(prefix) & set("/\0"):
        raise SchemaError(
            f"prefix: got {prefix!r}, expected the beginning of a file's name, such as "
            f"{PREFIX!r}"
        )


def owns(folder: Path) -> bool:
    """Whether a folder holds such a pair and nothing else."""
    names = sorted(each.name for each in folder.iterdir())
    prefix = names[0].removesuffix(METADATA) if names else ""
    return names == [prefix + METADATA, prefix + STATE]


class Parts:
    """Which fields make which tensor."""

    def __init__(self, description: Description) -> None:
        """Find them by their roles.

        Raises:
            SchemaError: One that a transition needs is missing.
        """
        schema = description.schema
        self.fields = schema.fields
        self.paths: dict[str, tuple[str, ...]] = {}
        tensors = {
            "states": "observation", "actions": "action", "rewards": "reward",
            "next_states": "next_observation",
        }  # fmt: skip
        for tensor, role in tensors.items():
            top = schema.role(role)
            found = () if top is None else under(schema.paths, top)
            if not found and role != "next_observation":
                raise SchemaError(
                    f"role {role!r}: got no field of it, expected one for "
                    f"{tensor!r} of velora's layout; add it, or name it by roles="
                )
            self.paths[tensor] = found
        hidden = [name for name in HIDDEN if under(schema.paths, name)][:1]
        self.paths["hiddens"] = under(schema.paths, hidden[0]) if hidden else ()

    def width(self, tensor: str) -> int:
        """Numbers of a row."""
        if tensor == "dones":
            return 1
        if tensor == "next_states":
            tensor = "states"
        shapes = [self.fields[path].shape for path in self.paths[tensor]]
        return sum(int(np.prod(shape, dtype=object)) for shape in shapes)


class VeloraWriter(Writer):
    """Writes the pair into a folder; see `Writer`.

    What follows a step is the next row's observation, where none is stored; a step of
    which nobody knows what followed is left out.
    """

    def __init__(
        self, target: Path, description: Description, prefix: str, overwrite: bool
    ) -> None:
        check_prefix(prefix)
        self.nbytes = 0
        self.notes = Notes()
        self._prefix = prefix
        self._parts = parts = Parts(description)
        self._derived = not parts.paths["next_states"]
        self._ends = NamedEnds(description)
        self._ends.tell(self.notes, both=True)
        doubt_priorities(self.notes, description, "velora's layout")
        self._held: dict[int, Held] = {}
        self._capacity = max(1, description.rows)
        self._size = self._lost = 0
        kinds = {name: ("float32", (parts.width(name),)) for name in TENSORS}
        self._widths = {name: shape[0] for name, (_, shape) in kinds.items()}
        plan = SafetensorsPlan(kinds, self._capacity, {})
        self._file: ArrayFile | None = None
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        try:
            file = File.create(self._staging.path / f"{prefix}{STATE}", plan.nbytes)
            self._file = ArrayFile(file, plan, self._capacity)
        except BaseException:
            self.abort()
            raise

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        block = self._ends.marked(block)
        used = sorted({path for paths in self._parts.paths.values() for path in paths})
        for env_id in np.unique(block.env_ids).tolist():
            part = block.taken(block.env_ids == env_id)
            columns, flags = {path: part.columns[path] for path in used}, part.flags
            if self._derived:
                self._derive(env_id, columns, flags)
            else:
                steps = (flags & FINAL) == 0
                kept = {path: column[steps] for path, column in columns.items()}
                self._put(kept, flags[steps], None)

    def _derive(
        self, env_id: int, columns: dict[str, NDArray[np.generic]],
        flags: NDArray[np.uint8],
    ) -> None:  # fmt: skip
        """Write the rows before the last one, each with what its next row tells."""
        if env_id in self._held:
            held, before = self._held[env_id]
            columns = {p: np.concatenate([held[p], c]) for p, c in columns.items()}
            flags = np.concatenate([before, flags])
        self._held[env_id] = (
            {path: column[-1:].copy() for path, column in columns.items()},
            flags[-1:].copy(),
        )
        steps, after = flags[:-1], flags[1:]
        ended = (steps & END) != 0
        follows = np.where(ended, (after & FINAL) != 0, (after & START) == 0)
        self._keep(columns, steps, follows)

    def _keep(
        self, columns: Mapping[str, NDArray[np.generic]], flags: NDArray[np.uint8],
        follows: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Write those steps that somebody can learn from.

        Args:
            columns: ``[N + 1, *shape]`` or, of the very last row, ``[1, *shape]``.
            flags: uint8 ``[N]``.
            follows: bool ``[N]``, whether the next row holds what followed.
        """
        count = len(flags)
        step = (flags & FINAL) == 0
        # What follows a terminated step does not count: its own observation stands in.
        kept = step & (follows | ((flags & TERMINATED) != 0))
        self._lost += int((step & ~kept).sum())
        places = np.flatnonzero(kept)
        after = places + follows[places]
        paths = self._parts.paths["states"]
        nexts = {path: columns[path][after] for path in paths}
        here = {path: column[:count][kept] for path, column in columns.items()}
        self._put(here, flags[kept], nexts)

    def _put(
        self, columns: Mapping[str, NDArray[np.generic]], flags: NDArray[np.uint8],
        nexts: Mapping[str, NDArray[np.generic]] | None,
    ) -> None:  # fmt: skip
        count = len(flags)
        paths = self._parts.paths
        tensors = {
            name: self._tensor(name, columns, paths[name], count)
            for name in ("states", "actions", "rewards", "hiddens")
        }
        tensors["next_states"] = (
            self._tensor("next_states", columns, paths["next_states"], count)
            if nexts is None
            else self._tensor("states", nexts, paths["states"], count)
        )
        tensors["dones"] = ((flags & END) != 0).astype(np.float32)[:, None]
        self._write(tensors, count)
        self._size += count

    def _tensor(
        self, name: str, columns: Mapping[str, NDArray[np.generic]],
        paths: tuple[str, ...], count: int,
    ) -> Floats:  # fmt: skip
        """The fields of a tensor beside each other, float32 ``[N, width]``."""
        parts = [self._floats(path, columns[path]) for path in paths]
        made = [part.reshape(count, -1) for part in parts] if count else []
        if not made:
            return np.zeros((count, self._widths[name]), np.float32)
        return np.concatenate(made, axis=1)

    def _floats(self, path: str, column: NDArray[np.generic]) -> Floats:
        if self._parts.fields[path].dtype == "bfloat16":
            return (column.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(over="ignore"):
            found: Floats = column.astype(np.float32)
        if column.dtype.itemsize >= 4 and column.dtype != np.float32:
            same = found.astype(column.dtype) == column
            if not (same | (column != column)).all():
                self.notes.doubt(
                    f"field {path!r} of {column.dtype} was rounded to float32, the one "
                    "dtype of velora's layout"
                )
        return found

    def _write(self, tensors: Mapping[str, NDArray[np.generic]], count: int) -> None:
        assert self._file is not None
        nothing = np.zeros(count, np.int64)
        block = Block(tensors, nothing, nothing, np.zeros(count, np.uint8))
        self._file.write(block)

    def finish(self) -> None:
        """See `Writer.finish`."""
        for columns, flags in self._held.values():
            self._keep(columns, flags, np.zeros(1, bool))
        self._held.clear()
        self._pad()
        assert self._file is not None
        self._file.finish()
        metadata = {
            "capacity": self._capacity,
            "state_dim": self._widths["states"],
            "action_dim": self._widths["actions"],
            "hidden_dim": self._widths["hiddens"],
            "position": self._size % self._capacity,
            "size": self._size,
            "device": None,
        }
        path = self._staging.path / f"{self._prefix}{METADATA}"
        files.replace_bytes(path, json.dumps(metadata, indent=2).encode())
        self._tell()
        self.nbytes = self._staging.publish()

    def _pad(self) -> None:
        """Fill the rows that no transition came for with zeros, as velora does."""
        assert self._file is not None
        while self._file.room:
            count = min(self._file.room, 4096)
            zeros = {
                name: np.zeros((count, width), np.float32)
                for name, width in self._widths.items()
            }
            self._write(zeros, count)

    def _tell(self) -> None:
        note = self.notes.note
        if self._lost:
            note(
                f"{self._lost:,} steps were left out: nobody knows what followed them "
                "(cut off, truncated without a final observation, or the newest)"
            )
        if not self._widths["hiddens"]:
            note(f"no field is named {' or '.join(HIDDEN)}: hiddens has no columns")
        note("dones are terminations and truncations; environments follow each other")

    def abort(self) -> None:
        """See `Writer.abort`."""
        if self._file is not None:
            self._file.close()
        self._staging.abort()

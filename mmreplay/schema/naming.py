"""Fields, roles and episode ends of columns, inferred from their names.

For sources without a description. Each guess is noted. Fields keep their names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from mmreplay.errors import SchemaError, SourceError
from mmreplay.nesting import check_path
from mmreplay.schema.field import Field
from mmreplay.schema.notes import Notes
from mmreplay.schema.schema import Schema

Columns = Mapping[str, NDArray[np.generic]]
Ends = NDArray[np.bool_]

ROLE_NAMES = {
    "observation": ("observation", "observations", "obs", "state", "states"),
    "next_observation": (
        "next_observation",
        "next_observations",
        "next_obs",
        "next_state",
        "next_states",
    ),
    "action": ("action", "actions", "act"),
    "reward": ("reward", "rewards", "rew"),
    "terminated": (
        "terminated",
        "terminateds",
        "terminal",
        "terminals",
        "termination",
        "terminations",
        "done",
        "dones",
    ),
    "truncated": ("truncated", "truncateds", "truncation", "truncations", "timeout", "timeouts"),
}
"""Usual names of the columns of each role, the surest first."""
KNOWN = {name for names in ROLE_NAMES.values() for name in names}
VARYING_ROLES = ("observation", "next_observation", "action")
"""Roles whose fields may vary from row to row."""
ENDS = ("terminated", "truncated")
UNSURE = ("done", "dones")


def find_roles(paths: tuple[str, ...]) -> dict[str, str]:
    """Return the path of each role that a column or subtree is named after."""
    tops = set(paths) | {path.split("/")[0] for path in paths}
    roles = {}
    for role, names in ROLE_NAMES.items():
        for name in names:
            if name in tops:
                roles[role] = name
                break
    return roles


def left_out(notes: Notes, path: str, text: str) -> None:
    """Note what has no value a step and was left out; a doubt by the name of a role.

    A column of one value a step that is left out is a doubt whatever its name.

    Args:
        notes: Receives the note.
        path: The column's.
        text: The note.
    """
    (notes.doubt if path.split("/")[0] in KNOWN else notes.note)(text)


class InferredColumns:
    """A schema and episode ends, inferred from the names, dtypes and shapes of columns.

    Attributes:
        schema: The inferred schema.
        ends: Column by role, of ``terminated`` and ``truncated``.
    """

    def __init__(
        self,
        columns: Mapping[str, tuple[str, tuple[int, ...]]],
        notes: Notes,
        *,
        reserved: Collection[str] = (),
        ends_known: bool = False,
        varying: Mapping[str, Field] | None = None,
    ) -> None:
        """Infer the schema.

        Args:
            columns: Dtype name and row shape by name.
            notes: Receives facts and guesses.
            reserved: Names that no field may have.
            ends_known: Episode ends come from elsewhere.
            varying: By name, columns whose values vary from row to row.

        Raises:
            SourceError: No column can be a field.
        """
        self._notes, self._reserved = notes, reserved
        varying = self._playable(varying or {})
        roles = find_roles((*columns, *varying))
        self.ends = {
            role: roles[role]
            for role in ENDS
            if role in roles and _is_end(columns.get(roles[role]))
        }
        fields = self._storable(columns) | varying
        for inner in fields:
            parts = inner.split("/")
            starts = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
            name = next((start for start in starts if start in fields), None)
            if name is not None:
                raise SourceError(
                    f"columns {name!r} and {inner!r} cannot both be fields, as a field "
                    "holds no other. Rename one of them."
                )
        # The file's size does not bound the number of rows without bytes.
        if not any(field.nbytes for field in fields.values()):
            raise SourceError(
                f"none of the columns {list(columns)[:20]} can be a field. Name a file "
                "with arrays of one row per step."
            )
        self.schema = self._make_schema(fields, roles)
        if self.ends or not ends_known:
            self._note_ends()

    def _playable(self, varying: Mapping[str, Field]) -> dict[str, Field]:
        """Columns that vary, without those of a name and role that cannot."""
        fields = {}
        for name, field in varying.items():
            top = name.split("/")[0]
            fixed = [
                role
                for role, names in ROLE_NAMES.items()
                if top in names and role not in VARYING_ROLES
            ]
            problem = f"a {fixed[0]} cannot vary" if fixed else ""
            if name in self._reserved:
                problem = "it has a reserved name"
            try:
                check_path(name)
            except SchemaError as error:
                problem = str(error)
            if problem:
                self._notes.doubt(f"column {name!r} was left out: {problem}")
            else:
                fields[name] = field
        return fields

    def _storable(self, columns: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Field]:
        fields = {}
        for name, (dtype, shape) in columns.items():
            if name in self._reserved:
                self._notes.doubt(f"column {name!r} has a reserved name: left out")
                continue
            try:
                check_path(name)
                end = name in self.ends.values()
                fields[name] = Field((), "bool") if end else Field(shape, dtype)
            except SchemaError as error:
                self._notes.doubt(f"column {name!r} was left out: {error}")
        return fields

    def _make_schema(self, fields: dict[str, Field], roles: dict[str, str]) -> Schema:
        sure = {r: p for r, p in roles.items() if r not in ENDS} | self.ends
        unfit = set(roles) - set(sure)
        refused: SchemaError | None = None
        for dropped in ((), ("next_observation",), tuple(sure)):
            playing = {r: p for r, p in sure.items() if r not in dropped}
            try:
                schema = Schema.from_flat(fields, playing)
            except SchemaError as error:
                self._notes.doubt(f"roles were not all found: {error}")
                refused = error
                continue
            if schema.num_agents is not None:
                # Which of its rows end an episode is unknown.
                raise SourceError(
                    "each row must have one 'terminated' and one 'truncated', got ends "
                    f"of {schema.num_agents} agents. Join them, or rename them."
                )
            roles_text = ", ".join(f"{r} is {p!r}" for r, p in playing.items())
            self._notes.note(f"roles by name: {roles_text or 'none'}")
            for role in sorted(unfit):
                self._notes.doubt(
                    f"column {roles[role]!r} is not one flag per row, so it is not "
                    "read as an episode end"
                )
            return schema
        raise SourceError(
            f"columns {list(fields)[:20]} make no schema: {refused} Rename them."
        ) from refused

    def _note_ends(self) -> None:
        if not self.ends:
            self._notes.doubt("no column says where episodes end: all rows are one episode")
            return
        columns = " and ".join(f"{path!r} ({role})" for role, path in self.ends.items())
        self._notes.note(f"episode ends were read from {columns}")
        if "truncated" not in self.ends:
            path = self.ends["terminated"]
            if path in UNSURE:
                self._notes.doubt(
                    f"column {path!r} may mix time limits with terminations, and no "
                    "column tells them apart: all are taken as terminations"
                )
            else:
                self._notes.note("no column tells truncations")
            for other in UNSURE:
                if other in self.schema and other != path:
                    self._notes.doubt(
                        f"column {other!r} may tell ends by time limits as well: only "
                        f"those of {path!r} were taken"
                    )

    def take(self, columns: Columns, first: int) -> tuple[Columns, NDArray[np.bool_], Ends]:
        """Return the columns of the schema, and both ends of each row.

        Args:
            columns: Per column ``[N, *shape]``; unwanted fields may be missing.
            first: Number of the first of these rows, for errors.

        Returns:
            Columns, terminated bool ``[N]``, truncated bool ``[N]``.
        """
        made = {p: columns[p] for p in self.schema.paths if p in columns}
        ends = self.ends_of(columns, len(next(iter(made.values()))), first)
        for role, path in self.ends.items():
            made[path] = ends[role]
        return made, ends["terminated"], ends["truncated"]

    def ends_of(self, columns: Columns, count: int, first: int) -> dict[str, Ends]:
        """Return both ends of rows by role, bool ``[N]``.

        Args:
            columns: Per column of ends ``[N]`` or ``[N, 1]``.
            count: N.
            first: Number of the first of these rows, for errors.

        Raises:
            SourceError: An end is NaN.
        """
        ends = {role: np.zeros(count, bool) for role in ENDS}
        for role, path in self.ends.items():
            values = np.asarray(columns[path]).reshape(count)
            refuse_nan(f"column {path!r}", values, first)
            ends[role] = values.astype(bool)
        if self.ends.get("terminated") in UNSURE and "truncated" in self.ends:
            # Gym's done covers both; a step at its time limit is truncated only.
            ends["terminated"] = ends["terminated"] & ~ends["truncated"]
        return ends


def refuse_nan(what: str, values: NDArray[np.generic], first: int) -> None:
    """Refuse missing ends: as a bool, NaN would be true.

    Args:
        what: The column, for the message.
        values: ``[N]``.
        first: Number of the first of these rows.

    Raises:
        SourceError: An end is NaN.
    """
    if values.dtype.kind == "f" and np.isnan(values).any():
        row = first + int(np.flatnonzero(np.isnan(values))[0])
        raise SourceError(
            f"{what} tells where episodes end and must be 0 or 1 in every row, got NaN "
            f"or no value in row {row}. Fill it in, or leave the column out."
        )


def _is_end(column: tuple[str, tuple[int, ...]] | None) -> bool:
    return column is not None and column[1] in ((), (1,)) and column[0] != "bfloat16"

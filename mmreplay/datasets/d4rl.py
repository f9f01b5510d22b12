"""D4RL's HDF5 files: all steps in sequence, ends in datasets of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmreplay.convert.base import Block, Notes, refuse_empty
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import Bools
from mmreplay.convert.staging import StagedWriter, Staging
from mmreplay.datasets.common.fields import Ends, Flags, ends_of, make_schema, rename_top
from mmreplay.datasets.common.fragments import Fragment, FragmentReader
from mmreplay.datasets.common.rows import Array, ColumnRows, scalar
from mmreplay.datasets.common.transitions import (
    TransitionMaker,
    Transitions,
    quarters,
    refuse_clashes,
)
from mmreplay.datasets.hdf5 import Hdf5, Hdf5Output, Hdf5Rows, is_hdf5, refuse_unfit
from mmreplay.errors import FormatError, undone_by
from mmreplay.nesting import under
from mmreplay.schema.naming import left_out
from mmreplay.schema.source_names import name_fields, own_names_of

WHAT = "D4RL"
NAMES = {"observations": "observation", "actions": "action", "rewards": "reward", "infos": "info"}
"""Names of fields in D4RL, and here."""
ROLE_NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}
"""Names of roles in D4RL."""
NEXT = "next_observations"
NEXT_PREFIX = "next_"
TERMINALS, TIMEOUTS, EPISODE_ENDS = "terminals", "timeouts", "episode_terminals"
NEEDED = ("observations", "actions", "rewards", TERMINALS)


def open_reader(
    path: Path, *, allow_expansion: bool = False, fields: Sequence[str] | None = None
) -> D4rlReader:
    """Open a D4RL file as a source.

    Args:
        path: The file.
        allow_expansion: Read datasets that expand to more than 1,000 times the file.
        fields: See `name_fields`.
    """
    hdf5 = Hdf5(path, Notes(), allow_expansion=allow_expansion)
    with undone_by(hdf5.close):
        return D4rlReader(hdf5, fields)


def recognizes(path: Path) -> bool:
    """Return whether a file has D4RL's datasets."""
    return is_hdf5(path, lambda hdf5: set(NEEDED) <= set(hdf5.children()))


def open_writer(target: Path, description: Description, *, overwrite: bool = False) -> D4rlWriter:
    """Make a D4RL file as a target."""
    return D4rlWriter(target, description, overwrite)


def planned(description: Description) -> None:
    """Refuse data that cannot be written; see `registry.planned`."""
    refuse_empty(description.rows, WHAT)
    _laid_out(description)


class D4rlReader(FragmentReader):
    """Reads the steps of one file as one environment."""

    def __init__(self, hdf5: Hdf5, fields: Sequence[str] | None = None) -> None:
        self._hdf5 = hdf5
        self._rows_by_name = self._find(hdf5)
        found = {
            name: rename_top(name, NAMES)
            for name in self._rows_by_name
            if not under([name], NEXT) and name not in (TERMINALS, TIMEOUTS, EPISODE_ENDS)
        }
        timed = TIMEOUTS in self._rows_by_name
        marks = TIMEOUTS if timed else EPISODE_ENDS
        ends = {"terminated": TERMINALS, "truncated": marks}
        names = name_fields(found, hdf5.file.path, hdf5.notes, fields, ends)
        columns = {
            path: scalar(self._rows_by_name[name]) if path == "reward" else self._rows_by_name[name]
            for name, path in names.items()
        }
        schema = make_schema(columns, hdf5.notes, hdf5.file.path)
        kept = {path: rows for path, rows in columns.items() if path in schema}
        fragment = Fragment(
            name=str(hdf5.file.path),
            steps=self._steps,
            columns=kept,
            next_obs=self._next_obs(kept, names),
            ends=self._ends(),
            is_episode=False,
        )
        self._add_notes(bool(fragment.next_obs))
        super().__init__(
            lambda: iter([fragment]),
            schema,
            hdf5.notes,
            hdf5.close,
            own_names=own_names_of(names, ends),
        )

    def _find(self, hdf5: Hdf5) -> dict[str, Hdf5Rows]:
        """Return datasets of one row a step, by their names in the file."""
        found = {}
        self._next_there = False
        for path, name in hdf5.datasets("/").items():
            if path.startswith("metadata/"):
                hdf5.notes.note("'metadata' was left out: it is of no step")
                continue
            rows = hdf5.rows(name, path)
            self._next_there |= bool(under([path], NEXT))
            if rows is not None:
                found[path] = rows
        missing = [name for name in NEEDED if not under(found, name)]
        if TERMINALS not in found:
            missing = [TERMINALS]
        if missing:
            raise FormatError(
                f"{hdf5.file.path} has no dataset {missing[0]!r} with one row per "
                "step, as D4RL's files have. Name its format with format= (--from)."
            )
        self._steps = found[TERMINALS].count
        for path, rows in list(found.items()):
            if rows.count != self._steps:
                if path in NEEDED or under([path], "observations"):
                    raise FormatError(
                        f"{hdf5.path_of(path)} must have {self._steps} rows like "
                        f"{TERMINALS!r}, got {rows.count}. The file was truncated or "
                        "edited."
                    )
                reason = f"it has {rows.count} rows, not {self._steps}"
                left_out(hdf5.notes, path, f"{path!r} was left out: {reason}")
                del found[path]
        return found

    def _next_obs(
        self, columns: Mapping[str, ColumnRows], names: Mapping[str, str]
    ) -> dict[str, ColumnRows]:
        """Return next observations by path; empty unless the file has all of them.

        Args:
            columns: By path.
            names: Path by the name of the dataset.
        """
        seen: dict[str, ColumnRows] = {}
        own_names = {path: name for name, path in names.items()}
        for path in under(columns, "observation"):
            rows, top = None, own_names[path].partition("/")
            if top[0] == "observations":
                rows = self._rows_by_name.get("".join((NEXT, *top[1:])))
            here = columns[path]
            if rows is None or (rows.dtype, rows.shape) != (here.dtype, here.shape):
                if self._next_there:
                    got = "none" if rows is None else f"{rows.dtype}{list(rows.shape)}"
                    self._hdf5.notes.doubt(
                        f"{NEXT!r} were left out: of {path!r}, rows of {here.dtype}"
                        f"{list(here.shape)}, they have {got}"
                    )
                return {}
            seen[path] = rows
        return seen

    def _ends(self) -> Ends:
        terminals, timeouts, episode_ends = (
            Flags(self._hdf5.path_of(name), self._rows_by_name[name], self._steps)
            if name in self._rows_by_name
            else None
            for name in (TERMINALS, TIMEOUTS, EPISODE_ENDS)
        )
        if timeouts is not None:
            return ends_of(terminals, timeouts)
        both = ends_of(terminals, episode_ends)

        def ends(first: int, stop: int) -> tuple[Bools, Bools]:
            terminated, ended = both(first, stop)
            return terminated, ended & ~terminated

        return ends

    def _add_notes(self, next_known: bool) -> None:
        notes = self._hdf5.notes
        markers = [name for name in (TERMINALS, TIMEOUTS) if name in self._rows_by_name]
        if TIMEOUTS not in markers and EPISODE_ENDS in self._rows_by_name:
            markers.append(EPISODE_ENDS)
        after = f", and by comparing {NEXT!r}" if next_known else ""
        notes.note(f"episode ends were found from {' and '.join(markers)}{after}")
        if next_known:
            return
        notes.note(
            f"{NEXT!r} {'were left out' if self._next_there else 'are not there'}: "
            "what was seen after an episode's last step is not known, and steps that "
            "end by a time limit are not drawn where it is needed"
        )
        if len(markers) == 1:
            notes.doubt(
                f"neither {TIMEOUTS!r} nor {NEXT!r} is there to mark time limits: an "
                "episode that ends by one continues with the next"
            )

    def arrays(self) -> dict[str, Array]:
        """Return uncompressed datasets by name, mapped read-only."""
        if not self._rows_by_name:
            return {}
        mapping = self._hdf5.file.map_readonly()
        mapped = {name: rows.mapped(mapping) for name, rows in self._rows_by_name.items()}
        return {name: array for name, array in mapped.items() if array is not None}


class D4rlWriter(StagedWriter):
    """Writes steps, environment by environment, as one flat file."""

    def __init__(self, target: Path, description: Description, overwrite: bool) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._maker, self._names = _laid_out(description)
        self._maker.add_notes(self.notes)
        self._steps = self._open_ends = 0
        self._staging = Staging(target, overwrite=overwrite)
        self._file: Hdf5Output | None = None
        with undone_by(self.abort):
            self._file = Hdf5Output(self._staging.path)
        if description.num_envs > 1:
            self.notes.note(
                f"the {description.num_envs} environments' steps follow each other in "
                "the file, which has no place for their numbers"
            )

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        for part in quarters(block):
            self._put(self._maker.feed(part))

    def _put(self, steps: Transitions | None) -> None:
        if steps is None:
            return
        assert self._file is not None
        self._steps += len(steps)
        for path, values in steps.columns.items():
            self._file.append(self._names[path], values)
        for path, values in steps.next_obs.items():
            self._file.append(NEXT_PREFIX + self._names[path], values)
        # D4RL knows of an episode's end by nothing else.
        timeouts = steps.truncated | (steps.last & ~steps.terminated)
        self._open_ends += int((timeouts & ~steps.truncated).sum())
        self._file.append(TERMINALS, steps.terminated)
        self._file.append(TIMEOUTS, timeouts)
        if (~steps.known & steps.terminated).any():
            self.notes.note(
                f"terminations whose next observation is not known have their own in "
                f"'{NEXT_PREFIX}observations'"
            )
        if (~steps.known & ~steps.terminated).any():
            self.notes.doubt(
                "steps whose next observation is not known (truncated without a final "
                f"observation, cut off, or the newest) have their own in "
                f"'{NEXT_PREFIX}observations'"
            )

    def finish(self) -> None:
        """See `Writer.finish`."""
        refuse_empty(self._steps, WHAT)
        if self._open_ends:
            self.notes.note(
                f"{self._open_ends:,} episodes were cut off without an end, and got a timeout"
            )
        self._close()
        self.nbytes = self._staging.publish()


def _laid_out(description: Description) -> tuple[TransitionMaker, dict[str, str]]:
    """Return a maker of the steps, and the name of each field in the file.

    Raises:
        SchemaError: The file cannot hold them.
    """
    schema = description.schema
    refuse_unfit(schema, WHAT)
    maker = TransitionMaker(description, WHAT)
    tops = {schema.role(role) or "": name for role, name in ROLE_NAMES.items()}
    names = {path: _name(path, tops) for path in maker.paths}
    refuse_clashes(names, WHAT)
    return maker, names


def _name(path: str, tops: Mapping[str, str]) -> str:
    for top, name in tops.items():
        if path == top or path.startswith(f"{top}/"):
            return name + path.removeprefix(top)
    return f"infos/{path.removeprefix('info/')}"

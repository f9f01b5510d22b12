"""robomimic's HDF5 files: demonstrations as groups of ``data``, one an episode."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mmreplay.convert.base import Notes
from mmreplay.convert.episode_ends import Bools
from mmreplay.datasets.common.fields import (
    Ends,
    Flags,
    ends_of,
    make_schema,
    rename_top,
    select_metadata,
)
from mmreplay.datasets.common.fragments import Fragment, FragmentReader
from mmreplay.datasets.common.rows import ColumnRows, scalar
from mmreplay.datasets.hdf5 import Hdf5, is_hdf5
from mmreplay.errors import FormatError, SchemaError, undone_by
from mmreplay.nesting import under
from mmreplay.schema.naming import left_out
from mmreplay.schema.source_names import OwnNames, name_fields, own_names_of

DATA, MASK, DONES = "data", "mask", "dones"
DEMO = re.compile(r"demo_(\d+)")
NUMBERED = re.compile(r"(\D*)(\d{0,18})")
ACTIONS = {"actions", "action"}
NAMES = {"obs": "observation", "actions": "action", "rewards": "reward", DONES: "done"}
"""Names of fields in robomimic, and here."""
ENDS = {"terminated": DONES, "truncated": DONES}
"""Columns that fields of ends are read from."""
NEXT = "next_obs"


class RobomimicReader(FragmentReader):
    """Reads demonstrations, in the order of their numbers, as one environment."""

    def __init__(self, hdf5: Hdf5, demos: list[str], fields: Sequence[str] | None = None) -> None:
        self._hdf5, self._fields = hdf5, fields
        self._own_names: OwnNames = {}
        self._inner = 0
        self._next_there = False
        notes = hdf5.notes
        first = self._fragment(demos[0])
        schema = make_schema(first.columns, notes, hdf5.file.path)
        notes.note(
            f"{len(demos):,} demonstrations were read as episodes: {DONES!r} of the "
            "last step says that it terminated, otherwise it is truncated"
        )
        if not self._next_there:
            notes.note(
                f"{NEXT!r} are not there: what was seen after the last step of a "
                "demonstration is not known"
            )
        selected = select_metadata(hdf5.attributes(f"/{DATA}"), ["env_args"], notes)

        def fragments() -> Iterator[Fragment]:
            self._inner = 0
            for demo in demos:
                yield self._fragment(demo)

        super().__init__(
            fragments,
            schema,
            notes,
            hdf5.close,
            user_metadata={"robomimic": selected},
            own_names=self._own_names,
        )
        if self._inner:
            notes.doubt(
                f"{self._inner:,} steps are done within a demonstration, and were not "
                "taken as ends; field 'done' has them"
            )

    def _fragment(self, demo: str) -> Fragment:
        name = f"/{DATA}/{demo}"
        datasets = self._hdf5.datasets(name).items()
        read = {path: self._hdf5.rows(dataset, path) for path, dataset in datasets}
        held = {path: rows for path, rows in read.items() if rows is not None}
        names = name_fields(
            {path: rename_top(path, NAMES) for path in held if not under([path], NEXT)},
            self._hdf5.path_of(name),
            self._hdf5.notes,
            self._fields,
            ENDS,
        )
        self._own_names = self._own_names or own_names_of(names, ENDS)
        found: dict[str, ColumnRows] = {path: held[own] for own, path in names.items()}
        next_obs = {path: held[own] for path, own in _next_names(held, names).items()}
        actions = held.get("actions", held.get("action"))
        if actions is None:
            raise FormatError(
                f"{self._hdf5.path_of(name)} has no 'actions'. The file is damaged, or "
                "not of robomimic."
            )
        steps = actions.count
        for path in ("reward", "done"):
            if path in found:
                found[path] = scalar(found[path])
        # What has another length is of no step.
        kept = {path: rows for path, rows in found.items() if rows.count == steps}
        notes = self._hdf5.notes
        for path in found.keys() - kept.keys():
            left_out(notes, path, f"{path!r} was left out: it has no row a step")
        self._next_there |= bool(next_obs)
        return Fragment(
            self._hdf5.path_of(name),
            steps,
            kept,
            self._paired(next_obs, set(under(kept, "observation"))),
            self._ends(name, held.get(DONES), steps),
            is_episode=False,
        )

    def _paired(self, next_obs: Mapping[str, ColumnRows], here: set[str]) -> dict[str, ColumnRows]:
        """Return the next observations of those that are here, if each has one."""
        if next_obs and next_obs.keys() != here:
            self._hdf5.notes.doubt(
                f"{NEXT!r} are of {sorted(next_obs)[:9]} and observations of "
                f"{sorted(here)[:9]}: those of only one were left out, or all of the "
                "next ones where they lack some"
            )
        return {} if here - next_obs.keys() else {path: next_obs[path] for path in here}

    def _ends(self, name: str, dones: ColumnRows | None, steps: int) -> Ends:
        """Return the ends of a demonstration: only its last step ends."""
        flags = None
        if dones is not None and dones.count == steps:
            flags = Flags(self._hdf5.path_of(f"{name}/{DONES}"), dones, steps)
        all_dones = ends_of(flags, None)

        def ends(first: int, stop: int) -> tuple[Bools, Bools]:
            done, _ = all_dones(first, stop)
            last = np.zeros(stop - first, bool)
            last[-1] = stop == steps
            self._inner += int((done & ~last).sum())
            return done & last, last & ~done

        return ends


def _next_names(datasets: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Return the datasets of next observations, by the path of the observation.

    Args:
        datasets: All of them.
        names: Path of the field that each becomes.
    """
    found = {}
    for own in under(datasets, NEXT):
        beside = own.replace(NEXT, "obs", 1)
        path = rename_top(beside, NAMES)
        if beside in names:
            # By the name that the observation has.
            found[names[beside]] = own
        elif path not in names.values():
            found[path] = own
    return found


def _demos(hdf5: Hdf5, chosen: str | None) -> list[str]:
    """Return the names of demonstrations in order, all or those of a filter.

    Raises:
        SchemaError: There is no such filter.
        FormatError: There is no demonstration.
    """
    demos = _all_demos(hdf5)
    if chosen is not None:
        kept = _filtered(hdf5, chosen)
        lost = sorted(kept.difference(demos), key=_in_order)
        if lost:
            hdf5.notes.doubt(
                f"filter {chosen!r} names {len(lost):,} demonstrations that are not in "
                f"the file, such as {lost[0]!r}"
            )
        demos = [demo for demo in demos if demo in kept]
    if not demos:
        raise FormatError(
            f"{hdf5.file.path} has no demonstration such as {DATA}/demo_0. Name its "
            "format with format= (--from)."
        )
    return demos


def _all_demos(hdf5: Hdf5) -> list[str]:
    """Return the names of all demonstrations in order."""
    demos = []
    for name in sorted(hdf5.children(f"/{DATA}"), key=_in_order):
        if DEMO.fullmatch(name) or _has_actions(hdf5, name):
            demos.append(name)
        elif hdf5.is_group(f"/{DATA}/{name}"):
            hdf5.notes.doubt(f"group '{DATA}/{name}' has no 'actions', and was left out")
        else:
            hdf5.notes.note(f"'{DATA}/{name}' is no demonstration, and was left out")
    others = [name for name in demos if not DEMO.fullmatch(name)]
    if others:
        hdf5.notes.note(
            f"{len(others):,} demonstrations have other names than demo_<n>, such as "
            f"{others[0]!r}: those of one name were read in the order of their numbers"
        )
    return demos


def _filtered(hdf5: Hdf5, chosen: str) -> set[str]:
    """Return the names that a filter holds."""
    masks = hdf5.children(f"/{MASK}") if MASK in hdf5.children() else []
    masks = [name for name in masks if not hdf5.is_group(f"/{MASK}/{name}")]
    if chosen not in masks:
        raise SchemaError(
            f"filter must be one of {', '.join(masks) or 'none'} in "
            f"{hdf5.file.path}, got {chosen!r}. Leave it out for all "
            "demonstrations."
        )
    with hdf5.translated_errors(hdf5.path_of(f"{MASK}/{chosen}")):
        named = hdf5.raw(f"/{MASK}/{chosen}")[:]
        return {
            bytes(each).decode() if not isinstance(each, str) else each for each in named.tolist()
        }


def _in_order(name: str) -> list[tuple[str, int]]:
    """A key that sorts the numbers in names by value."""
    return [(text, int(digits or 0)) for text, digits in NUMBERED.findall(name)]


def _has_actions(hdf5: Hdf5, name: str) -> bool:
    """Return whether a child of the data group may be a demonstration."""
    path = f"/{DATA}/{name}"
    return hdf5.is_group(path) and not ACTIONS.isdisjoint(hdf5.children(path))


def recognizes(path: Path) -> bool:
    """Return whether a file has robomimic's groups."""

    def has_demos(hdf5: Hdf5) -> bool:
        return DATA in hdf5.children() and any(
            DEMO.fullmatch(name)
            or (_has_actions(hdf5, name) and "obs" in hdf5.children(f"/{DATA}/{name}"))
            for name in hdf5.children(f"/{DATA}")
        )

    return is_hdf5(path, has_demos)


def open_reader(
    path: Path,
    *,
    filter: str | None = None,
    allow_expansion: bool = False,
    fields: Sequence[str] | None = None,
) -> RobomimicReader:
    """Open a robomimic file as a source.

    Args:
        path: The file.
        filter: Read the demonstrations of this filter key (``mask/<filter>``) only.
        allow_expansion: Read datasets that expand to more than 1,000 times the file.
        fields: See `name_fields`.
    """
    hdf5 = Hdf5(path, Notes(), allow_expansion=allow_expansion)
    with undone_by(hdf5.close):
        return RobomimicReader(hdf5, _demos(hdf5, filter), fields)

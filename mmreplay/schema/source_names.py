"""Names that columns have in a source, and the fields that they become."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mmreplay.errors import SourceError
from mmreplay.nesting import SEPARATOR, under
from mmreplay.schema.episode_numbers import EPISODE_COLUMNS
from mmreplay.schema.naming import KNOWN
from mmreplay.schema.notes import Notes

OwnNames = Mapping[str, tuple[str, ...]]
"""Paths of fields by the name of their column in the source."""


def name_fields(
    columns: Mapping[str, str],
    where: object,
    notes: Notes,
    fields: Sequence[str] | None = None,
    ends: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the path of the field that each column becomes, each path once.

    A path inside that of another column is joined to it; see `join_nested`.

    Args:
        columns: Path by the name of the column in the source.
        where: The source, for errors.
        notes: Receives what was renamed or left out.
        fields: The fields that the user selects, by path or by the name in the source.
            Of columns with one path the one that is named here is kept, and any if
            the path is not selected.
        ends: By path, the column that fields of episode ends are read from. Other
            columns of such a path are left out if the user selects fields.

    Raises:
        SourceError: Two columns become one field.
    """
    if isinstance(fields, str):
        fields = None
    joined = join_nested(columns.values())
    owners: dict[str, list[str]] = {}
    for own, path in columns.items():
        owners.setdefault(joined.get(path, path), []).append(own)
    kept: dict[str, str] = {}
    for path, own_names in owners.items():
        named = own_names
        if fields is not None:
            named = [own for own in own_names if own in fields]
        end = (ends or {}).get(path)
        if end is not None and named:
            raise SourceError(
                f"{where}: columns {named[0]!r} and {end!r} both become field "
                f"{path!r}. Pass fields= (--fields) with {end!r} in place of "
                f"{named[0]!r}, beside the other fields to load."
            )
        if end is not None:
            chosen = end
        elif len(own_names) == 1 or len(named) == 1:
            chosen = named[0] if named else own_names[0]
            kept[chosen] = path
        elif named or _selects(fields or (), path, own_names):
            raise _both(where, own_names, path)
        else:
            # None is loaded, but readers may need one: that which its format renames.
            usual = [own for own in own_names if own != columns[own]]
            kept[(usual or own_names)[0]] = path
            continue
        for own in own_names:
            if own != chosen:
                notes.note(f"column {own!r} was left out: field {path!r} is column {chosen!r}")
    for own, path in kept.items():
        if path != columns[own]:
            note_joined(notes, own, columns[own], path)
    return kept


def join_nested(paths: Iterable[str]) -> dict[str, str]:
    """Return other paths for those that lie inside another one, which is a field.

    A field holds no other: ``action/original`` beside ``action`` becomes
    ``action_original``, or ``action_original_2`` where that name is taken. The names of
    roles and episode numbers, such as ``next_observation``, are never made up.

    Args:
        paths: Of all columns.

    Returns:
        The new path, by the old one, of those that change.
    """
    leaves = set(paths)
    nodes = {tuple(path.split(SEPARATOR)) for path in leaves}
    nodes |= {parts[:depth] for parts in nodes for depth in range(1, len(parts))}
    used = {*KNOWN, *EPISODE_COLUMNS}
    names: dict[str, str] = {}
    # By depth: a joined name stands beside names of less depth, which are all in use.
    for parts in sorted(nodes, key=lambda node: (len(node), node)):
        node, above = SEPARATOR.join(parts), SEPARATOR.join(parts[:-1])
        if above in leaves:
            joined = f"{names[above]}_{parts[-1]}"
            name, number = joined, 2
            while name in used:
                name, number = f"{joined}_{number}", number + 1
        else:
            name = f"{names[above]}{SEPARATOR}{parts[-1]}" if above else node
        names[node] = name
        used.add(name)
    return {path: names[path] for path in leaves if names[path] != path}


def note_joined(notes: Notes, own: str, nested: str, path: str) -> None:
    """Note a column whose path `join_nested` changed.

    Args:
        notes: Receives the note.
        own: The column's name in the source.
        nested: The path that it would have.
        path: The path that it has.
    """
    notes.note(
        f"column {own!r} became field {path!r}, as another column's path is the "
        f"beginning of {nested!r}"
    )


def own_names_of(
    names: Mapping[str, str],
    ends: Mapping[str, str] | None = None,
    inner: Mapping[str, str] | None = None,
) -> OwnNames:
    """Return paths by the names in the source, those of episode ends included.

    Args:
        names: Path by the name of the column.
        ends: Name of the column by the path of an episode end.
        inner: Name of the column by another name that it has in the source.
    """
    found: dict[str, tuple[str, ...]] = {own: (path,) for own, path in names.items()}
    for own, name in (inner or {}).items():
        if name in names:
            found[own] = (names[name],)
    for path, own in (ends or {}).items():
        found[own] = (*found.get(own, ()), path)
    return found


def _selects(fields: Sequence[object], path: str, own_names: Sequence[str]) -> bool:
    """Return whether a selection names the subtree of a path or of its columns."""
    return any(under((path, *own_names), name) for name in fields if isinstance(name, str))


def _both(where: object, own_names: Sequence[str], path: str) -> SourceError:
    names = f"{', '.join(map(repr, own_names[:-1]))} and {own_names[-1]!r}"
    return SourceError(
        f"{where}: columns {names} both become field {path!r}. Pass fields= (--fields) "
        "with one of these names, beside the other fields to load."
    )

"""Which fields a batch has after some transforms, and what each is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from mmreplay.errors import SchemaError, shown
from mmreplay.nesting import meant, under
from mmreplay.schema import Field, Schema


class ReadAt(Enum):
    """Where a field of the batch is read."""

    HERE = "at the step drawn"
    LAST = "at the last step folded into it"
    NEXT = "at the row after that one"
    MADE = "from several rows"


@dataclass(frozen=True, slots=True)
class Outline:
    """The fields of a batch.

    Attributes:
        schema: Of the rows stored.
        fields: Field by name, in the batch's order.
        read_at: Where each is read.
        next_obs: Name of the next observation, by the path that it is the next of.
        steps: Steps folded into one, 1 without `NStep`.
        before: Rows before a step that a field of it is read from; 0 if left out.
        changed_by: Names of the transforms that changed a field, oldest first.
        names: Classes of all transforms so far.
        final_follows: The environment's own final row follows each end, with all its
            fields (``autoreset="next_step"``). Other final rows hold an observation.
        unknown: Names of the fields that are NaN where they cannot be computed.
    """

    schema: Schema
    fields: Mapping[str, Field]
    read_at: Mapping[str, ReadAt]
    next_obs: Mapping[str, str]
    steps: int
    before: Mapping[str, int]
    changed_by: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...]
    final_follows: bool = False
    unknown: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: Schema, *, final_follows: bool = False) -> Outline:
        """Outline of single steps with their next observations."""
        fields = dict(schema.fields)
        read_at = dict.fromkeys(fields, ReadAt.HERE)
        top, stored = schema.role("observation"), schema.role("next_observation")
        next_obs = {}
        for path in schema.role_paths("observation"):
            rest = path.removeprefix(str(top))
            name = next_obs[path] = (stored or "next_observation") + rest
            fields[name] = fields[path]
            read_at[name] = ReadAt.NEXT if stored is None else ReadAt.LAST
        return cls(schema, fields, read_at, next_obs, 1, {}, {}, (), final_follows)

    @property
    def derived(self) -> bool:
        """Next observations are read from the row after a step."""
        schema = self.schema
        return bool(self.next_obs) and schema.role("next_observation") is None

    def of_rows(self, path: str) -> bool:
        """Whether a field can be read at any row."""
        return self.read_at.get(path) in (ReadAt.HERE, ReadAt.LAST)

    def at(self, read_at: ReadAt) -> tuple[str, ...]:
        """Names of the fields that are read there."""
        return tuple(name for name in self.fields if self.read_at[name] is read_at)

    def pick(self, paths: Iterable[str] | str | None, who: str) -> tuple[str, ...]:
        """Fields by path or subtree; the observation by default.

        Args:
            paths: Leaves or subtrees of the batch; not next observations, which
                follow the observations that they are the next of.
            who: The transform, for messages.

        Raises:
            SchemaError: There is no such field.
        """
        if paths is None:
            paths = self.playing("observation", who, "paths")
        if not isinstance(paths, Iterable):
            raise SchemaError(
                f"{who}: paths must be paths of fields, got {shown(paths)}. Pass, for "
                "example, ['observation']."
            )
        ours = [name for name in self.fields if name not in self.next_obs.values()]
        picked: dict[str, None] = {}
        for path in (paths,) if isinstance(paths, str) else paths:
            leaves = under(ours, path)
            if not leaves:
                raise SchemaError(self._unknown(path, ours, who))
            picked.update(dict.fromkeys(leaves))
        return tuple(picked)

    def refuse_varying(self, paths: Iterable[str], who: str) -> None:
        """Refuse fields that vary, for transforms that compute with arrays.

        Raises:
            SchemaError: One of them varies.
        """
        for path in paths:
            if path in self.fields and not self.fields[path].rules.computes:
                raise SchemaError(
                    f"{who}: {path!r} must have one shape, but it varies from step to "
                    f"step. Name other fields in {who}, or compute with it in Apply."
                )

    def playing(self, role: str, who: str, option: str) -> str:
        """Path of what plays a role.

        Raises:
            SchemaError: Nothing does; the option of the transform is the way out.
        """
        path = self.schema.role(role)
        if path is None:
            raise SchemaError(
                f"{who}: the schema names no {role}. Name it in the schema's roles, "
                f"or in {who}({option}=...)."
            )
        return path

    def _unknown(self, path: str, ours: list[str], who: str) -> str:
        if under(self.next_obs.values(), path):
            return (
                f"{who}: {path!r} must be an observation. Next observations change in "
                "the same way as observations: name those."
            )
        left_out = self.schema.role("next_observation") or "next_observation"
        if "WithoutNext" in self.names and f"{path}/".startswith(f"{left_out}/"):
            return (
                f"{who}: {path!r} must be one of the fields {ours}: WithoutNext leaves "
                "next observations out. Name one of them."
            )
        otherwise = "Name one of them, or put the transform that adds it first."
        return f"{who}: {path!r} must be one of the fields {ours}. {meant(path, ours, otherwise)}"

    def sources(self, paths: Iterable[str]) -> dict[str, str]:
        """The paths, and the stored next observations of them, each to its path.

        A derived next observation is read by the path of the observation, and so is
        changed with it.
        """
        sources = {}
        for path in paths:
            sources[path] = path
            name = self.next_obs.get(path)
            if name is not None and self.read_at[name] is not ReadAt.NEXT:
                sources[name] = path
        return sources

    def changed(self, paths: Iterable[str], change: Callable[[Field], Field], who: str) -> Outline:
        """Outline with some fields, and the nexts of them, changed by a transform."""
        fields, changed_by = dict(self.fields), dict(self.changed_by)
        for path in paths:
            for name in (path, self.next_obs.get(path, path)):
                fields[name] = change(self.fields[name])
                changed_by[name] = (*self.changed_by.get(name, ()), who)
        return replace(self, fields=fields, changed_by=changed_by)

    def with_field(
        self, name: str, field: Field, read_at: ReadAt, who: str, before: int = 0
    ) -> Outline:
        """Outline with one more field, made by a transform.

        Raises:
            SchemaError: The name is taken.
        """
        above = (other for other in self.fields if under([name], other))
        used = (*under(self.fields, name), *above)
        if used:
            raise SchemaError(
                f"{who}: the name {name!r} must be new, but {used[0]!r} is a field. "
                "Choose another name."
            )
        return replace(
            self,
            fields={**self.fields, name: field},
            read_at={**self.read_at, name: read_at},
            before={**self.before, name: before},
            changed_by={**self.changed_by, name: (who,)},
        )

    def stored(self, path: str) -> bool:
        """Whether a field of rows is as it was stored."""
        return path in self.schema.fields and not self.changed_by.get(path)

    def as_stored(self, path: str) -> bool:
        """Whether batches hold a field, at whichever row, as it is stored."""
        return self.stored(path) and self.fields[path] == self.schema.fields[path]

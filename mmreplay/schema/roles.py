"""Roles: the field or subtree that holds each part of an environment's step.

The names are Gymnasium's. A role is played by one leaf or by a whole subtree,
as a Dict observation is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmreplay.errors import SchemaError
from mmreplay.nesting import under
from mmreplay.schema.dtypes import describe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mmreplay.schema.field import Field

ROLES = (
    "observation",
    "next_observation",
    "action",
    "reward",
    "terminated",
    "truncated",
)

_LISTED = 20


def assign_roles(
    paths: tuple[str, ...], roles: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the path of each role: as stated, else the field of the role's name.

    Args:
        paths: Every field's path.
        roles: The paths that the user stated.

    Raises:
        SchemaError: A role or path is unknown, or two roles share a field.
    """
    stated = {} if roles is None else dict(roles)
    for role, path in stated.items():
        if role not in ROLES:
            raise SchemaError(
                f"role {role!r}: got an unknown role, expected one of "
                f"{', '.join(ROLES)}; fields without a role need none"
            )
        if not isinstance(path, str) or not under(paths, path):
            raise SchemaError(
                f"role {role!r}: got the path {path!r}, expected a field or subtree "
                f"of {listing(paths)}"
            )
    named = {role: role for role in ROLES if under(paths, role)}
    playing = {role: (named | stated)[role] for role in ROLES if role in named | stated}
    _check_apart(playing)
    return playing


def check_roles(fields: Mapping[str, Field], roles: Mapping[str, str]) -> None:
    """Refuse fields that cannot play their role.

    Raises:
        SchemaError: An end is no plain bool, nor one bool per agent, or the next
            observation differs from the observation.
    """
    for role in ("terminated", "truncated"):
        if role in roles:
            _check_end(role, roles[role], fields)
    if "terminated" in roles and "truncated" in roles:
        ends = roles["terminated"], roles["truncated"]
        shapes = [fields[path].shape for path in ends]
        if shapes[0] != shapes[1]:
            raise SchemaError(
                f"fields {ends[0]!r} and {ends[1]!r}: got the shapes "
                f"{list(shapes[0])} and {list(shapes[1])}, expected the same, as they "
                "play 'terminated' and 'truncated'; declare both per agent or neither"
            )
    if "next_observation" in roles:
        _check_next(fields, roles)


def listing(paths: Iterable[str]) -> str:
    """The first paths of a schema, as messages list them."""
    every = list(paths)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(map(repr, every[:_LISTED])) + more


def _check_apart(playing: Mapping[str, str]) -> None:
    for role, path in playing.items():
        for other, its in playing.items():
            if role != other and under([path], its):
                raise SchemaError(
                    f"role {role!r}: got the path {path!r}, which plays {other!r} as "
                    f"{its!r}, expected fields of its own; name another path"
                )


def _check_end(role: str, path: str, fields: Mapping[str, Field]) -> None:
    field = fields.get(path)
    if field is None:
        raise SchemaError(
            f"role {role!r}: got the subtree {path!r}, expected one field; name a leaf"
        )
    agents = not field.shape or (len(field.shape) == 1 and field.shape[0] > 0)
    if not agents or field.dtype != "bool" or field.mutable:
        raise SchemaError(
            f"field {path!r}: got {field}, expected Field((), 'bool'), or "
            f"Field((num_agents,), 'bool'), that is not mutable, as it plays {role!r}; "
            "name another field in roles"
        )


def _check_next(fields: Mapping[str, Field], roles: Mapping[str, str]) -> None:
    following = roles["next_observation"]
    if "observation" not in roles:
        raise SchemaError(
            f"role 'next_observation': got {following!r} without an observation, "
            "expected both; name the observation in roles"
        )
    now = _kinds(fields, roles["observation"])
    following_kinds = _kinds(fields, following)
    if now != following_kinds:
        differing = sorted(set(now.items()) ^ set(following_kinds.items()))
        leaf = differing[0][0]
        raise SchemaError(
            f"field {following + leaf!r}: got {following_kinds.get(leaf, 'nothing')}, "
            f"expected {now.get(leaf, 'nothing')} as {roles['observation'] + leaf!r}; "
            "declare both alike, or leave next_observation to be derived"
        )


def _kinds(fields: Mapping[str, Field], top: str) -> dict[str, str]:
    return {
        path.removeprefix(top): describe(fields[path].dtype, fields[path].shape)
        for path in under(fields, top)
    }

"""The fields of one step by path, and their roles in it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from mmreplay.errors import SchemaError, shown
from mmreplay.nesting import SEPARATOR, check_path, flatten, meant, split, under, unflatten
from mmreplay.notebook import html_table
from mmreplay.schema.env_forms import space_of, values_of
from mmreplay.schema.field import Field, field_from_json, field_to_json
from mmreplay.schema.spaces import (
    Autoreset,
    env_autoreset,
    env_count,
    env_spaces,
    example_field,
    field_at,
    space_fields,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from gymnasium.spaces import Space
    from numpy.typing import DTypeLike


from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from mmreplay.schema.field import Field

MAX_FIELDS = 4096


class Schema:
    """Fields of one step, in order, and their roles; it never changes.

    Equal schemas have the same fields in the same order and the same roles. One that
    `from_env` made knows what the environment does after an episode's end, too, which
    does not count for that.

    Attributes:
        fields: Field by path, in order.
        roles: Path of a leaf or of a subtree, by role.

    Example:
        >>> schema = mr.Schema(
        ...     {
        ...         "observation": {"pixels": mr.Field((84, 84), "uint8")},
        ...         "reward": mr.Field((), "float32"),
        ...     }
        ... )
        >>> schema.paths
        ('observation/pixels', 'reward')
    """

    __slots__ = ("_autoreset", "_drawn", "_num_envs", "fields", "roles")

    fields: Mapping[str, Field]
    roles: Mapping[str, str]
    _autoreset: Autoreset | None
    _drawn: Schema | None
    _num_envs: int | None

    def __init__(
        self, fields: Mapping[str, object], roles: Mapping[str, str] | None = None
    ) -> None:
        """Declare the fields of a step.

        Such a schema states no `autoreset`, also where its fields come from one that
        does. `with_field` and `from_env` keep it.

        Args:
            fields: Nested mappings (and tuples) of `Field`. A key may be a path, such
                as ``"observation/pixels"``, so that `fields` of another schema fit.
            roles: Path by role, for roles whose field is not named after them.
                A path names a leaf or a subtree. A role that is left out is
                played by the field or subtree of its name, if there is one.
                ``terminated`` and ``truncated`` are bools, or ``[num_agents]`` bools
                each; see `num_agents`.

        Raises:
            SchemaError: A name, field or role is not storable, or what plays a
                role does not fit it.

        Example:
            >>> import mmreplay as mr
            >>> pixels, logp = mr.Field((8, 8), "uint8"), mr.Field((), "float32")
            >>> schema = mr.Schema({"observation": {"pixels": pixels}})
            >>> mr.Schema({**schema.fields, "logp": logp}).paths
            ('observation/pixels', 'logp')
        """
        self._declare(_by_path(_mapping(fields, "schema fields")), roles)

    @classmethod
    def from_flat(
        cls, fields: Mapping[str, Field], roles: Mapping[str, str] | None = None
    ) -> Schema:
        """Declare fields by path, such as ``observation/pixels``.

        The order is kept even where a subtree's fields do not stand together.

        Args:
            fields: Field by path.
            roles: As in `Schema`.

        Raises:
            SchemaError: As `Schema` does; also a path that is leaf and branch.
        """
        unflatten(fields)
        schema = cls.__new__(cls)
        schema._declare(fields, roles)
        return schema

    @classmethod
    def from_spaces(
        cls,
        observation_space: object,
        action_space: object,
        *,
        reward_dtype: DTypeLike = "float32",
        extra: Mapping[str, object] | None = None,
        exclude: Sequence[str] = (),
    ) -> Schema:
        """Fields of an environment's steps by its Gymnasium spaces.

        Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them,
        nested at will, keep their dtypes and shapes. Text and Sequence become fields
        that vary, and Graph two or three. A Sequence or Graph has at most 4,096 items:
        exclude it and declare it in `extra` where more may come.

        Args:
            observation_space: Of one environment.
            action_space: Of one environment.
            reward_dtype: Of the scalar reward.
            extra: Fields to add at the end, as in `Schema`.
            exclude: Paths of leaves or subtrees to leave out, such as
                ``"observation/text"``. Leave these values out of `add`, too.

        Returns:
            Schema of observation, action, reward, terminated and truncated, without
            the excluded and with the extra ones.

        Raises:
            SchemaError: A space is of another kind; an extra field is there already;
                an excluded path is not.
            ModuleNotFoundError: Gymnasium is not installed.
        """
        if isinstance(exclude, str):
            raise SchemaError(
                f"exclude must be a sequence of paths, got the string {exclude!r}. "
                f"Pass exclude=[{exclude!r}]."
            )
        # Paths that were met, and whether they are left out.
        met: dict[str, bool] = {}
        spaces = {"observation": observation_space, "action": action_space}
        fields: dict[str, object] = {}
        for role in ("observation", "action", "reward", "terminated", "truncated"):
            met[role] = role in exclude
            if met[role]:
                continue
            if role in spaces:
                fields[role] = space_fields(spaces[role], role, exclude, met)
            elif role == "reward":
                fields[role] = field_at(role, (), reward_dtype)
            else:
                fields[role] = Field((), "bool")
        left_out = [path for path, excluded in met.items() if excluded]
        for path in exclude:
            if not any(under([path], top) for top in left_out):
                raise SchemaError(
                    f"exclude must name some of {listing(met)}, got {path!r}. {meant(path, met)}"
                )
        flat = flatten(fields)
        for path, field in _by_path(_mapping(extra or {}, "extra")).items():
            if path in flat:
                raise SchemaError(
                    f"extra must name new fields, got {path!r}, which the environment "
                    f"has. Rename it, or pass exclude=[{path!r}] to replace it."
                )
            flat[path] = field
        unflatten(flat)
        schema = cls.__new__(cls)
        schema._declare(flat, None)
        return schema

    def to_spaces(self) -> tuple[Space[Any], Space[Any]]:
        """Return Gymnasium spaces that hold the observations and actions stored here.

        What `from_spaces` read comes back with the widest bounds: Box, and of fields
        that vary Text, Sequence (stacked) and Graph; a branch with the names ``0``,
        ``1``, ... is a Tuple, any other a Dict. Text has printable ASCII characters.

        A schema does not hold which spaces it is of. So a Dict with such names, or with
        the names of a Graph's fields and Sequences below them, comes back as a Tuple or
        Graph, here and from `to_env`. Give its keys other names to keep the Dict.

        Returns:
            The observation and the action space of one environment.

        Raises:
            SchemaError: The schema has no observation or no action.
            ModuleNotFoundError: Gymnasium is not installed.

        Example:
            >>> import mmreplay as mr
            >>> mission = mr.Field.text(max_bytes=40)
            >>> fields = {"observation": mission, "action": mr.Field((), "int64")}
            >>> mr.Schema(fields).to_spaces()[0].max_length
            40
        """
        observation, action = (space_of(*self._of_role(role)) for role in ("observation", "action"))
        return observation, action

    def to_env(self, batch: Mapping[str, Any], role: str = "observation") -> Any:
        """Return values of a batch as a vector environment gives those of its B.

        Such as to ask a policy about them that reads ``VectorEnv.step``. Gymnasium puts
        texts, sequences and graphs of several environments into tuples.

        Args:
            batch: Of steps, from a buffer of this schema; or a mapping of paths to its
                arrays.
            role: ``"observation"``, ``"action"`` or ``"next_observation"``.

        Returns:
            An array ``[B, *shape]``; a tuple of `str`, of arrays, or of
            ``GraphInstance``; or a dict or tuple of these.

        Raises:
            SchemaError: The schema has no such role, or the batch lacks a field.

        Example:
            >>> import mmreplay as mr
            >>> schema = mr.Schema({"observation": mr.Field.text(max_bytes=40)})
            >>> buffer = mr.ReplayBuffer.create(
            ...     None, schema, 9, heap_bytes=4096, engine="memory"
            ... )
            >>> buffer.extend(observation=["go", "stop"])
            >>> schema.to_env(buffer.gather_all())
            ('go', 'stop')
        """
        following = role == "next_observation" and not self.role_paths(role)
        fields, root = self._of_role("observation" if following else role)
        if following:
            # Batches derive them; their paths begin with the role's name.
            fields = {f"{role}{path.removeprefix(root)}": field for path, field in fields.items()}
            root = role
        missing = [path for path in fields if path not in batch]
        if missing:
            raise SchemaError(
                f"batch must have field {missing[0]!r}, got only {listing(batch)}. "
                "Pass a batch of a buffer with this schema."
            )
        return values_of(fields, batch, root)

    def _of_role(self, role: str) -> tuple[dict[str, Field], str]:
        """Return the fields that play a role, by path, and the path of the role."""
        paths = self.role_paths(role)
        if not paths:
            raise SchemaError(
                f"the schema must have the role {role!r}, got {listing(self.roles)}. "
                "Name the field that plays it in roles."
            )
        root = self.role(role)
        assert root is not None
        return {path: self.fields[path].drawn for path in paths}, root

    @classmethod
    def from_env(
        cls, env: object, *, extra: Mapping[str, object] | None = None, exclude: Sequence[str] = ()
    ) -> Schema:
        """Fields of the steps of a Gymnasium environment or vector environment.

        `ReplayBuffer.create` takes ``autoreset`` from it where that is left out, and
        refuses to make a buffer of one environment for a vector environment of more.

        Args:
            env: What has ``observation_space`` and ``action_space``; of a vector
                environment the spaces of a single one are taken.
            extra: Fields to add at the end, as in `Schema`.
            exclude: Paths of leaves or subtrees to leave out, such as
                ``"observation/text"``. Leave these values out of `add`, too.

        Raises:
            SchemaError: It has no spaces, or as `from_spaces` does.

        Example:
            >>> import gymnasium
            >>> import mmreplay as mr
            >>> env = gymnasium.make("CartPole-v1")
            >>> extra = {"logp": mr.Field((), "float32")}
            >>> schema = mr.Schema.from_env(env, extra=extra, exclude=["truncated"])
            >>> schema.paths
            ('observation', 'action', 'reward', 'terminated', 'logp')
        """
        schema = cls.from_spaces(*env_spaces(env), extra=extra, exclude=exclude)
        return schema._stating(env_autoreset(env), env_count(env))

    @classmethod
    def from_example(cls, step: Mapping[str, object]) -> Schema:
        """Fields of the steps that look like one example.

        Arrays, numpy scalars and torch tensors keep dtype and shape. A Python
        bool becomes bool, an int int64, a float float32; so do lists of them.

        Args:
            step: Nested mapping of one step's values, without an axis for
                environments.

        Raises:
            SchemaError: A value is not storable.
        """
        leaves = flatten(_mapping(step, "example step"))
        return cls.from_flat({path: example_field(path, leaves[path]) for path in leaves})

    @classmethod
    def from_json(cls, fields: object, roles: object) -> Schema:
        """The schema that `to_json` and `roles` wrote, strictly.

        Args:
            fields: List of objects with exactly the keys of `to_json`.
            roles: Object of path by role.

        Raises:
            SchemaError: A key is missing or unknown, a value of the wrong type,
                or the schema would be refused by `Schema`.
        """
        if not isinstance(fields, list) or len(fields) > MAX_FIELDS:
            raise SchemaError(
                f"schema fields must be a list of at most {MAX_FIELDS}, got "
                f"{_size(fields)}. mmreplay did not write the file."
            )
        flat: dict[str, Field] = {}
        for entry in fields:
            path, field = field_from_json(entry)
            if path in flat:
                raise SchemaError(
                    f"schema fields must name each path once, got {path!r} twice. "
                    "mmreplay did not write the file."
                )
            flat[path] = field
        return cls.from_flat(flat, _mapping(roles, "schema roles"))

    def to_json(self) -> list[dict[str, object]]:
        """One object a field, in order: name, dtype, shape, exact, mutable.

        A shape that varies begins with None; then there are max_length and kind, too.
        """
        return [field_to_json(path, field) for path, field in self.fields.items()]

    @property
    def paths(self) -> tuple[str, ...]:
        """Path of every field, in order."""
        return tuple(self.fields)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one step, its flags included; of values that vary the references."""
        return 1 + sum(field.nbytes for field in self.fields.values())

    @property
    def varying(self) -> tuple[str, ...]:
        """Paths of the fields that vary from step to step, in order."""
        return tuple(path for path, field in self.fields.items() if field.varies)

    @property
    def drawn(self) -> Schema:
        """The schema of what draws hold: images are arrays there, and not files."""
        if self._drawn is None:
            object.__setattr__(self, "_drawn", self.drawn_without(()))
        assert self._drawn is not None
        return self._drawn

    def drawn_without(self, as_stored: Collection[str]) -> Schema:
        """The same, where some fields stay as they are stored.

        Args:
            as_stored: Their paths.
        """
        drawn = {p: f if p in as_stored else f.drawn for p, f in self.fields.items()}
        if all(field is self.fields[path] for path, field in drawn.items()):
            return self
        return Schema.from_flat(drawn, self.roles)

    @property
    def max_heap_nbytes(self) -> int:
        """The most bytes that the values of one step take in the heap.

        Each begins at a multiple of 8; 0 where no field varies.
        """
        return sum(field.max_heap_nbytes for field in self.fields.values())

    def role(self, name: str) -> str | None:
        """Path of the leaf or subtree that plays a role; None if nothing does.

        Args:
            name: One of `mmreplay.schema.ROLES`, such as ``"reward"``.

        Raises:
            SchemaError: There is no such role.
        """
        if name not in ROLES:
            raise SchemaError(
                f"role must be one of {', '.join(ROLES)}, got {name!r}. Get any other "
                "field by its path."
            )
        return self.roles.get(name)

    def role_paths(self, name: str) -> tuple[str, ...]:
        """Paths of all fields that play a role, in order; empty if none does.

        Args:
            name: As in `role`.

        Raises:
            SchemaError: There is no such role.
        """
        path = self.role(name)
        return () if path is None else under(self.fields, path)

    def with_field(self, path: str, field: Field) -> Schema:
        """This schema with one more field at its end, and the same `autoreset`.

        Args:
            path: A new one, such as ``"info/lives"``.
            field: Its shape and dtype.

        Raises:
            SchemaError: The path is taken, or is no path.

        Example:
            >>> import mmreplay as mr
            >>> schema = mr.Schema({"observation": mr.Field((4,), "float32")})
            >>> schema.with_field("info/lives", mr.Field((), "uint8")).paths
            ('observation', 'info/lives')
        """
        if path in self.fields:
            raise SchemaError(f"the schema already has a field {path!r}. Choose another path.")
        schema = Schema.from_flat({**self.fields, path: field}, self.roles)
        return schema._stating(self._autoreset, self._num_envs)

    @property
    def autoreset(self) -> Autoreset | None:
        """What the environments do after an episode's end.

        ``"disabled"``, ``"same_step"`` or ``"next_step"``; None where `from_env` did
        not make the schema, or the environment does not say.
        """
        return self._autoreset

    @property
    def num_agents(self) -> int | None:
        """Agents that have ``terminated`` and ``truncated`` of their own.

        Their number where these are declared ``Field((num_agents,), "bool")``; None
        where a step has one value for all. An episode ends with the step in which every
        agent is terminated or truncated: agents that ended before keep their flag. That
        end is a termination if all agents are terminated, and a truncation if any is
        truncated.
        """
        for role in ("terminated", "truncated"):
            path = self.roles.get(role)
            if path is not None:
                shape = self.fields[path].shape
                return shape[0] if shape else None
        return None

    def __getitem__(self, path: str) -> Field:
        try:
            return self.fields[path]
        except (KeyError, TypeError):
            raise SchemaError(
                f"field {shown(path)} is not in the schema, which has "
                f"{listing(self.fields)}. {meant(path, self.fields)}"
            ) from None

    def __contains__(self, path: object) -> bool:
        return path in self.fields

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schema):
            return NotImplemented
        ours, theirs = list(self.fields.items()), list(other.fields.items())
        return ours == theirs and self.roles == other.roles

    def __hash__(self) -> int:
        return hash((tuple(self.fields.items()), frozenset(self.roles.items())))

    def __repr__(self) -> str:
        width = max(map(len, self.fields))
        lines = []
        for path, field in self.fields.items():
            line = f"  {path:{width}}  {field.description}"
            line += " exact" * field.exact + " mutable" * field.mutable
            roles = [r for r, top in self.roles.items() if under([path], top)]
            # A role says nothing new where the field is named after it.
            if roles and self.roles[roles[0]] != roles[0]:
                line += f" as {roles[0]}"
            lines.append(line)
        return "\n".join(["Schema(", *lines, ")"])

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return names of columns, and a row of text for each field."""
        rows: list[tuple[str, ...]] = []
        for path, field in self.fields.items():
            roles = [role for role, top in self.roles.items() if under([path], top)]
            options = [name for name in ("exact", "mutable") if getattr(field, name)]
            shape = str(list(field.shape)) if field.shape else "scalar"
            name = field.rules.name(field) if field.rules.numeric else field.dtype
            if field.varies:
                shape = field.description.removeprefix(name)
            rows.append((path, name, shape, roles[0] if roles else "", " ".join(options)))
        return ("field", "dtype", "shape", "role", "options"), rows

    def _repr_html_(self) -> str:
        """Return the fields as a table, for notebooks."""
        return html_table(f"Schema of {len(self)} fields", *self.table())

    def __reduce__(self) -> tuple[object, ...]:
        # The views of its dicts cannot be pickled.
        stated = (self._autoreset, self._num_envs)
        return _made, (dict(self.fields), dict(self.roles), *stated)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"schema.{name} cannot be assigned: a schema never changes. Make another schema."
        )

    def _declare(self, flat: Mapping[str, object], roles: Mapping[str, str] | None) -> None:
        fields = _checked(flat)
        playing = assign_roles(tuple(fields), roles)
        check_roles(fields, playing)
        object.__setattr__(self, "fields", MappingProxyType(fields))
        object.__setattr__(self, "roles", MappingProxyType(playing))
        # Found when it is asked for: most schemas are their own.
        object.__setattr__(self, "_drawn", None)
        self._stating(None)

    def _stating(self, autoreset: Autoreset | None, num_envs: int | None = None) -> Schema:
        object.__setattr__(self, "_autoreset", autoreset)
        object.__setattr__(self, "_num_envs", num_envs)
        return self


def _by_path(fields: Mapping[str, object]) -> dict[str, object]:
    """Leaves by path of nested mappings, whose outer keys may be paths themselves."""
    flat: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(name, str) and SEPARATOR in name:
            name, *below = split(name)
            for part in reversed(below):
                value = {part: value}
        for path, leaf in flatten({name: value}).items():
            if path in flat:
                raise SchemaError(
                    f"field {path!r} is declared twice, nested and by its path. Leave one out."
                )
            flat[path] = leaf
    unflatten(flat)
    return flat


def refuse_varying(schema: Schema, target: str, but: Container[str] = ()) -> None:
    """Refuse fields that vary from step to step, for a target that cannot store them.

    Args:
        schema: The fields.
        target: What cannot, such as ``"engine 'memory'"``.
        but: Paths of fields that it can store all the same.

    Raises:
        SchemaError: A field varies.
    """
    for path, field in schema.fields.items():
        if not field.rules.travels and path not in but:
            way_out = (
                "Declare a fixed shape and pad its values"
                if field.drawn.varies
                else "Declare arrays of this shape (a conversion makes them with cast=, --cast "
                f"{path}=uint8)"
            )
            raise SchemaError(
                f"field {path!r} varies from step to step, which {target} cannot store. "
                f"{way_out}, or leave the field out."
            )


def stated_num_envs(schema: Schema) -> int | None:
    """The size of the vector environment that a schema was made of, if it was."""
    return schema._num_envs


def _made(
    fields: Mapping[str, Field],
    roles: Mapping[str, str],
    autoreset: Autoreset | None,
    num_envs: int | None,
) -> Schema:
    return Schema.from_flat(fields, roles)._stating(autoreset, num_envs)


def _checked(flat: Mapping[str, object]) -> dict[str, Field]:
    if not 1 <= len(flat) <= MAX_FIELDS:
        raise SchemaError(
            f"schema must have 1 to {MAX_FIELDS} fields, got {len(flat)}. Join small "
            "fields into arrays."
        )
    fields: dict[str, Field] = {}
    for path, field in flat.items():
        if not isinstance(field, Field):
            raise SchemaError(
                f"field {path!r} must be a Field, got {type(field).__name__}. Write "
                "Field(shape, dtype), or use Schema.from_example."
            )
        check_path(path)
        fields[path] = field
    return fields


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise SchemaError(f"{what} must be a mapping by name, got {type(value).__name__}. Pass a dict.")


def _size(fields: object) -> str:
    if isinstance(fields, list):
        return f"a list of {len(fields)}"
    return type(fields).__name__


ROLES = ("observation", "next_observation", "action", "reward", "terminated", "truncated")
"""The parts of an environment's step, by Gymnasium's names.

Each is played by one leaf or by a whole subtree, as a Dict observation is.
"""

_LISTED = 20


def assign_roles(paths: tuple[str, ...], roles: Mapping[str, str] | None) -> dict[str, str]:
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
                f"role must be one of {', '.join(ROLES)}, got {role!r}. Leave it out: "
                "a field needs no role."
            )
        if not isinstance(path, str) or not under(paths, path):
            raise SchemaError(
                f"role {role!r} must be played by a field or subtree, got {path!r}. "
                f"The schema has {listing(paths)}."
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
    for role in ("reward", "terminated", "truncated"):
        for path in under(fields, roles[role]) if role in roles else ():
            if fields[path].varies:
                raise SchemaError(
                    f"field {path!r} plays {role!r} and must have one shape in every "
                    f"step, got {fields[path]}. Name another field in roles."
                )
    for role in ("terminated", "truncated"):
        if role in roles:
            _check_end(role, roles[role], fields)
    if "terminated" in roles and "truncated" in roles:
        ends = roles["terminated"], roles["truncated"]
        shapes = [fields[path].shape for path in ends]
        if shapes[0] != shapes[1]:
            raise SchemaError(
                f"fields {ends[0]!r} and {ends[1]!r} must have the same shape, as "
                "'terminated' and 'truncated', got "
                f"{list(shapes[0])} and {list(shapes[1])}. Declare both per agent or "
                "neither."
            )
    if "next_observation" in roles:
        _check_next(fields, roles)


def listing(paths: Iterable[str]) -> str:
    """Return the first paths of a schema, as messages list them."""
    every = list(paths)
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(map(repr, every[:_LISTED])) + more


def _check_apart(playing: Mapping[str, str]) -> None:
    for role, path in playing.items():
        for other, its in playing.items():
            if role != other and under([path], its):
                raise SchemaError(
                    f"role {role!r} must have fields of its own, got {path!r}, which "
                    f"plays {other!r} as {its!r}. Name another path."
                )


def _check_end(role: str, path: str, fields: Mapping[str, Field]) -> None:
    field = fields.get(path)
    if field is None:
        raise SchemaError(
            f"role {role!r} must be one field, got the subtree {path!r}. Name a leaf."
        )
    agents = not field.shape or (len(field.shape) == 1 and field.shape[0] > 0)
    if not agents or field.dtype != "bool" or field.mutable:
        raise SchemaError(
            f"field {path!r} plays {role!r} and must be Field((), 'bool') or "
            f"Field((num_agents,), 'bool') and not mutable, got {field}. Name another "
            "field in roles."
        )


def _check_next(fields: Mapping[str, Field], roles: Mapping[str, str]) -> None:
    following = roles["next_observation"]
    if "observation" not in roles:
        raise SchemaError(
            f"role 'next_observation' needs an observation, got {following!r} alone. "
            "Name the observation in roles."
        )
    now = _kinds(fields, roles["observation"])
    following_kinds = _kinds(fields, following)
    if now != following_kinds:
        differing = sorted(set(now.items()) ^ set(following_kinds.items()))
        leaf = differing[0][0]
        raise SchemaError(
            f"field {following + leaf!r} must be {now.get(leaf, 'nothing')} as "
            f"{roles['observation'] + leaf!r}, got "
            f"{following_kinds.get(leaf, 'nothing')}. Declare both alike, or leave "
            "next_observation out to derive it."
        )


def _kinds(fields: Mapping[str, Field], top: str) -> dict[str, str]:
    return {path.removeprefix(top): fields[path].description for path in under(fields, top)}

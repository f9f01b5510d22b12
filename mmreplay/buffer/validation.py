"""Steps and blocks that users pass to add and extend, checked and cast."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.batch import Batch
from mmreplay.errors import SchemaError, frames_to_caller, shown
from mmreplay.nesting import flatten, meant
from mmreplay.ragged import Ragged
from mmreplay.schema import Field, Schema
from mmreplay.schema.convert import array_of, as_numpy, shape_of
from mmreplay.schema.varying import ValueList, list_plain
from mmreplay.storage.layout import packer, record_layout

Columns = dict[str, Any]
"""An array by path; `Ragged` or `ValueList` of a field that varies."""


ANY = (-math.inf, math.inf)
"""Bounds that need no comparison."""


def note_progress(error: OSError, done: int, steps: int) -> None:
    """Add to an error how many steps of its call were published before it."""
    error.add_note(f"{done} of {steps} steps of this call are in")


class StepValidator:
    """Checks steps and blocks against one schema, and casts them.

    Values of the right dtype and shape are recognised by a few comparisons a field;
    all others go through `Field.convert`.
    """

    def __init__(self, schema: Schema, num_envs: int) -> None:
        self._schema = schema
        self._num_envs = num_envs
        self._names = schema.fields.keys()
        self._quick = [
            (path, field.numpy, (num_envs, *field.shape), field.shape)
            for path, field in schema.fields.items()
            if not field.varies
        ]
        self._varying = {path: schema.fields[path] for path in schema.varying}
        single = num_envs == 1
        self._scalars = {
            path: _scalars(field) if single else {} for path, field in schema.fields.items()
        }
        self._packer = packer(schema, record_layout(schema), num_envs)
        self._observation = schema.role("observation")
        agents = schema.num_agents
        self._by_agent = tuple(
            path
            for path, field in schema.fields.items()
            if agents is not None and field.shape[:1] == (agents,)
        )
        """Fields with a value for each agent, which may come as a dict."""
        self._ends = {schema.role("terminated"), schema.role("truncated")}
        self._single_ends = tuple(self._ends - {None} - set(self._by_agent))
        self._agents: tuple[str, ...] | None = None
        """Names of agents, in the order of the fields' axes, from the first dict on."""
        # Rewards are rounded in silence: Gymnasium gives float64 for all of them. So
        # is what goes into bfloat16, which numpy does not have.
        rewards = schema.role_paths("reward")
        self.unrounded = {
            path
            for path, field in schema.fields.items()
            if field.dtype in ("float16", "float32") and path not in rewards
        }
        """Float fields that have rounded no value yet; each warns once."""

    def refuse_both(self, fields: Mapping[str, object]) -> NoReturn:
        """Refuse keywords together with a mapping.

        Raises:
            SchemaError: Always.
        """
        raise SchemaError(
            f"add takes a mapping or keywords, got both. Put {sorted(fields)} into the mapping."
        )

    def refuse_positional(self, count: int, call: str) -> NoReturn:
        """Refuse more than one positional argument.

        Raises:
            SchemaError: Always.
        """
        named = ", ".join(f"{path}=..." for path in self._names if path.isidentifier())
        raise SchemaError(
            f"{call} takes the fields by name, got {count} positional arguments. Pass "
            f"one mapping by path, or for example {call}({named or '**fields'})."
        )

    def flat(self, data: Mapping[str, object] | Batch) -> Mapping[str, object]:
        """Return values by path of a nested or flat mapping.

        Raises:
            SchemaError: It is no mapping, or its names are not the schema's.
        """
        if not isinstance(data, Mapping):
            if not isinstance(data, Batch):
                raise self._no_mapping(data)
            data = dict(data)
        for path in self._by_agent:
            if isinstance(data.get(path), Mapping):
                data = {**data, path: self._joined(path, cast("Any", data[path]))}
        for end in self._single_ends:
            if isinstance(data.get(str(end)), Mapping):
                raise SchemaError(
                    f"field {end!r} must be one bool a step, got a dict of agents. "
                    "Declare it Field((num_agents,), 'bool') to store each, or pass "
                    "whether all of them ended."
                )
        if data.keys() != self._names:
            data = flatten(data, self._varying)
            if data.keys() != self._names:
                raise self._misnamed(data)
        return data

    def _joined(self, path: str, values: Mapping[str, object]) -> object:
        """Return the values of agents, a dict by their names, as one array.

        Args:
            path: Field whose first axis counts the agents.
            values: By name. RLlib's ``"__all__"`` ends every agent.

        Raises:
            SchemaError: The names are not those of before, or not as many as agents.
        """
        field = self._schema.fields[path]
        given = dict(values)
        everyone = given.pop("__all__", None) if path in self._ends else None
        if self._agents is None:
            self._agents = self._named_agents(set(given)) or tuple(given)
        agents, num_agents = self._agents, field.shape[0]
        if set(given) != set(agents) or len(agents) != num_agents:
            if len(given) != num_agents:
                self._agents = None
            names = f", {sorted(map(str, agents))}" if len(agents) == num_agents else ""
            raise SchemaError(
                f"field {path!r} must have a value for each of {num_agents} agents"
                f"{names}, got {sorted(map(str, given))}. Pass a value for agents that "
                "are gone, too: of an end True, as they have ended."
            )
        columns = [as_numpy(given[name], path)[0] for name in agents]
        try:
            joined = np.stack(columns, axis=columns[0].ndim - len(field.shape) + 1)
        except (ValueError, IndexError):
            found = zip(agents, columns, strict=True)
            shapes = {str(name): list(column.shape) for name, column in found}
            raise SchemaError(
                f"field {path!r} must have values of one shape for all agents, got "
                f"{shapes}. Pass {list(field.shape[1:])} for each."
            ) from None
        if everyone is not None:
            joined = joined | np.asarray(everyone, bool)[..., None]
        return joined

    def _named_agents(self, names: set[str]) -> tuple[str, ...] | None:
        """Return agents in the order of the schema's subtree that has their names."""
        below: dict[str, dict[str, None]] = {}
        for path in self._names:
            top, _, rest = path.partition("/")
            below.setdefault(top, {})[rest.partition("/")[0]] = None
        return next((tuple(b) for b in below.values() if set(b) == names), None)

    def plain_block(self, data: Mapping[str, object]) -> Mapping[str, Any] | None:
        """Return the columns of a block that needs no conversion, or None.

        Returns:
            C-contiguous, ``[T, E, *shape]``, or ``[T, *shape]`` of one environment; T
            is at least 1.
        """
        return self._packer.block(data)

    def _no_mapping(self, data: object) -> SchemaError:
        way_out = "Pass the fields by name."
        if isinstance(data, list | tuple) and any(isinstance(each, Mapping) for each in data):
            way_out = "Pass each step to add, or stack them by field for extend."
        return SchemaError(
            f"data must be a mapping of {list(self._names)}, or keywords, got "
            f"{type(data).__name__}. {way_out}"
        )

    def _misnamed(self, data: Mapping[str, object]) -> SchemaError:
        unknown = sorted(set(data) - set(self._names))
        missing = sorted(set(self._names) - set(data))
        differences = []
        if unknown:
            differences.append(f"unknown fields {unknown}")
        if missing:
            differences.append(f"missing fields {missing}")
        way_out = "Fix the names, or make a buffer with another schema."
        if own := [path for path in missing if path in ("env_ids", "final_observation")]:
            way_out = f"{own[0]} is a keyword of the call: pass the step as a dict."
        if unknown == ["next_observation"] and "observation" in self._names:
            way_out = "Leave it out: it is read from the row of the next step."
        if unknown and missing:
            suggestion = meant(unknown[0], missing)
            way_out = suggestion if suggestion.endswith("?") else way_out
        return SchemaError(
            f"the fields of a step must be exactly {list(self._names)}, got "
            f"{' and '.join(differences)}. {way_out}"
        )

    def step(self, data: Mapping[str, object], count: int) -> Columns:
        """Check one step of count environments.

        Returns:
            Per path ``[count, *shape]``; of the only environment of a buffer also
            ``[*shape]``, if the value has that shape. `Ragged` of shape ``(count,)``
            where a field varies.
        """
        columns: Columns = {}
        single = self._num_envs == 1
        for path, dtype, shape, alone in self._quick:
            value = data[path]
            if type(value) is np.ndarray and value.dtype == dtype:
                got = value.shape
                if (got == shape and count == self._num_envs) or (single and got == alone):
                    columns[path] = value
                    continue
            else:
                bounds = self._scalars[path].get(type(value))
                if bounds is ANY or (
                    bounds is not None and bounds[0] <= value <= bounds[1]  # type: ignore[operator]  # its type is one that compares
                ):
                    columns[path] = np.array(value, dtype)
                    continue
            columns[path] = self._convert(path, value, count)
        for path in self._varying:
            field = self._schema.fields[path]
            lead: tuple[int, ...] = (count,)
            if single and not field.rules.leading(field, data[path]):
                lead = ()
            columns[path] = self._ragged(path, data[path], lead).reshape(count)
        return columns

    def _ragged(self, path: str, value: object, lead: tuple[int, ...]) -> Ragged:
        """Check values of a field that varies; see `Field.convert`."""
        field = self._schema.fields[path]
        column: Ragged = field.rules.convert(field, value, path, lead)
        if path in self.unrounded:
            for given, items in _arrays(value, column):
                self._rounded(path, given, items)
        return column

    def _convert(self, path: str, value: object, count: int) -> NDArray[np.generic]:
        field = self._schema.fields[path]
        lead: tuple[int, ...] = (count,)
        if self._num_envs == 1:
            shape = shape_of(value, f"field {path!r}")
            # The axis of environments may be left out.
            has_env_axis = len(shape) == len(field.shape) + 1 and shape[0] == 1
            lead = lead if has_env_axis else ()
        return self._rounded(path, value, field.convert(value, path, lead))

    def _rounded(
        self, path: str, value: object, column: NDArray[np.generic]
    ) -> NDArray[np.generic]:
        """Return the column that a field made of a value; warn once if it rounds."""
        # Only arrays have a float width that the user may have meant.
        if path not in self.unrounded or not hasattr(value, "dtype"):
            return column
        array = as_numpy(value, path)[0]
        if array.dtype.kind != "f" or array.dtype.itemsize <= column.dtype.itemsize:
            return column
        lost = (column.astype(array.dtype) != array) & ~np.isnan(array)
        if lost.any():
            self.unrounded.discard(path)
            got, stored = array.dtype.name, column.dtype.name
            number = array[lost].reshape(-1)[0]
            warnings.warn(
                f"field {path!r}: {stored} does not hold {got} values such as "
                f"{number!s} exactly, so they are rounded from now on. Pass .astype("
                f"{stored!r}) if that is meant, or declare the field {got}.",
                RuntimeWarning,
                stacklevel=frames_to_caller(),
            )
        return column

    def block(
        self, data: Mapping[str, object], count: int, *, joined: bool = True
    ) -> tuple[Columns, int]:
        """Check T steps of count environments.

        Args:
            data: By path.
            count: Environments.
            joined: Values of a list are put together, too, that could be stored one by
                one.

        Returns:
            Per path ``[T, count, *shape]``, and T. `Ragged` of shape ``(T, count)``
            where a field varies; or, if not joined, `ValueList`.
        """
        columns: Columns = {}
        steps = -1
        for path, field in self._schema.fields.items():
            value = data[path]
            if field.varies:
                columns[path] = self._ragged_block(path, value, count, joined)
                self._check_steps(path, len(columns[path]), steps)
                steps = len(columns[path])
                continue
            if type(value) is np.ndarray and value.dtype == field.numpy:
                got = value.shape
                if self._num_envs == 1 and got == (steps, *field.shape):
                    columns[path] = value[:, None]
                    continue
            shape = shape_of(value, f"field {path!r}")
            lead = shape[: len(shape) - len(field.shape)]
            if self._num_envs == 1 and len(lead) == 1:
                column = field.convert(value, path, (lead[0],))
                column = self._rounded(path, value, column)[:, None]
            elif len(lead) == 2:
                column = field.convert(value, path, (lead[0], count))
                column = self._rounded(path, value, column)
            elif shape == (0,):
                column = np.empty((0, count, *field.shape), field.numpy)
            else:
                inner = "".join(f", {axis}" for axis in field.shape)
                way_out = "extend takes many steps, add takes one."
                if shape in (field.shape, (count, *field.shape)):
                    way_out = "That is one step: pass it to add."
                raise SchemaError(
                    f"field {path!r} must have shape [T, {count}{inner}], got "
                    f"{list(shape)}. {way_out}"
                )
            self._check_steps(path, len(column), steps)
            steps = len(column)
            columns[path] = column
        return columns, steps

    def _check_steps(self, path: str, got: int, steps: int) -> None:
        if steps >= 0 and got != steps:
            raise SchemaError(
                f"field {path!r} must have T={steps} steps as the fields before it, "
                f"got {got}. Give every field the same T."
            )

    def _ragged_block(self, path: str, value: Any, count: int, joined: bool) -> Ragged | ValueList:
        """Check T steps of a field that varies; return shape ``(T, count)``."""
        field, single = self._schema.fields[path], self._num_envs == 1
        # The only one of several environments that is named has an axis all the same.
        plain = list_plain(field, value, count) if single or count > 1 else None
        if plain is not None:
            return plain.joined(field) if joined else plain
        lead = field.rules.leading(field, value)
        steps = len(value) if hasattr(value, "__len__") else -1
        # Lists without an item are values where the buffer has one environment.
        lists = isinstance(value, list | tuple) and (lead == 0 or not single)
        if steps < 0 or not (lists or lead == 2 or (single and lead == 1)):
            axes = "[T]" if single else f"[T, {count}]"
            shape = getattr(value, "shape", None)
            got = shown(value) if shape is None else f"shape {list(shape)}"
            raise SchemaError(
                f"field {path!r} must be a list of values {axes}, got {got}. extend "
                "takes many steps, add takes one."
            )
        full = (steps,) if single and lead < 2 else (steps, count)
        return self._ragged(path, value, full).reshape(steps, count)

    def final(self, observation: object, ended: NDArray[np.bool_]) -> Columns:
        """Check final observations.

        Args:
            observation: One leaf, or a nested mapping of the leaves under the
                observation role, each ``[*lead, *shape]``. Or an object array or a list
                ``[*lead]`` of one observation, or None, for each environment (and
                step), as Gymnasium's ``infos["final_obs"]`` is; None may stand for a
                whole step.
            ended: bool ``[*lead]``, which steps end an episode: ``[E]`` for add,
                ``[T, E]`` for extend.

        Returns:
            By path of the observation's fields; arbitrary where no episode ended.

        Raises:
            SchemaError: They do not fit the schema, or one is None where an episode
                ended.
        """
        role = self._observation
        if role is None or self._schema.role("next_observation") is not None:
            why = "no observation field" if role is None else "a next_observation field"
            raise SchemaError(
                f"final_observation: the schema has {why}, so none can be stored. Leave it out."
            )
        if self._one_by_one(observation):
            return self._final_cells(observation, ended)
        lead = ended.shape
        finals: Columns = {}
        for path, value in self._final_leaves(observation).items():
            field = self._schema[path]
            name = f"final_observation/{path}"
            if field.varies:
                given_axes = field.rules.leading(field, value)
                alone = self._num_envs == 1 and given_axes == len(lead) - 1
                values = field.rules.convert(field, value, name, lead[:-1] if alone else lead)
                finals[path] = values.reshape(*lead)
                continue
            axes = len(lead) + len(field.shape)
            given_axes = len(shape_of(value, f"field {name!r}"))
            alone = self._num_envs == 1 and given_axes == axes - 1
            column = field.convert(value, name, lead[:-1] if alone else lead)
            column = self._rounded(path, value, column)
            finals[path] = column.reshape(*lead, *field.shape)
        return finals

    def _final_leaves(self, observation: object, where: str = "") -> dict[str, object]:
        """Return leaves by path of all final observations, or of one of them."""
        paths, role = self._schema.role_paths("observation"), self._observation
        assert role is not None
        # One value of a single field may be a tuple of numbers.
        branch = not where or paths != (role,)
        nested = isinstance(observation, (Mapping, tuple) if branch else Mapping)
        leaves = {role: observation}
        if nested:
            leaves = flatten(leaves, self._varying)
        if set(leaves) != set(paths):
            raise SchemaError(
                f"final_observation{where} must have the fields {sorted(paths)}, got "
                f"{sorted(leaves)}. Nest it as the observation in the schema."
            )
        return leaves

    def _one_by_one(self, value: object) -> bool:
        """Whether final observations are an object array, or a list like it."""
        if isinstance(value, np.ndarray):
            return bool(value.dtype == object)
        if not isinstance(value, list):
            return False
        branch = self._schema.role_paths("observation") != (self._observation,)
        nested = (Mapping, tuple) if branch else Mapping
        return any(
            item is None or isinstance(item, nested) or self._one_by_one(item) for item in value
        )

    def _final_cells(self, observation: object, ended: NDArray[np.bool_]) -> Columns:
        """Check final observations that come one by one; see `final`."""
        lead = ended.shape
        finals: Columns = {}
        ragged: dict[str, dict[tuple[int, ...], NDArray[Any]]] = {}
        for path in self._schema.role_paths("observation"):
            field = self._schema[path]
            if field.varies:
                ragged[path] = {}
            else:
                finals[path] = np.zeros((*lead, *field.shape), field.numpy)
        cells = np.empty(lead, object)
        _fill(cells, observation)
        for index in zip(*np.nonzero(ended), strict=True):
            where = f" of environment {index[-1]}"
            where += f" in step {index[0]}" if len(lead) == 2 else ""
            if cells[index] is None:
                raise SchemaError(
                    f"final_observation{where} must be the observation that the "
                    "episode ended with, got None. Pass the infos of the same call of "
                    "step, or leave final_observation out."
                )
            for path, leaf in self._final_leaves(cells[index], where).items():
                name = f"final_observation/{path}{where}"
                if path in ragged:
                    field = self._schema[path]
                    one = field.rules.convert(field, leaf, name, ())
                    ragged[path][index] = one.values
                    continue
                # numpy makes one object array of numbers from equal shapes.
                boxed = isinstance(leaf, np.ndarray) and leaf.dtype == object
                value = array_of(leaf.tolist(), name) if boxed else leaf  # type: ignore[attr-defined]  # an array
                finals[path][index] = self._schema[path].convert(value, name, ())
        for path, values in ragged.items():
            field = self._schema[path]
            empty = np.empty((0, *field.inner), field.numpy)
            every = [values.get(index, empty) for index in np.ndindex(lead)]
            flat = field.rules.convert(field, every, path, (len(every),))
            finals[path] = flat.reshape(*lead)
        return finals

    def env_ids(self, env_ids: object) -> NDArray[np.int64] | None:
        """Check a subset of environments; None means all.

        Raises:
            SchemaError: They are no integers, unknown, or named twice.
        """
        if env_ids is None:
            return None
        ids = np.atleast_1d(array_of(env_ids, "env_ids"))
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) == 0:
            raise SchemaError(
                "env_ids must be one or more integers in one axis, got "
                f"{ids.dtype}{list(ids.shape)}. Leave it out for all environments."
            )
        ids = ids.astype(np.int64)
        bad = ids[(ids < 0) | (ids >= self._num_envs)]
        if len(bad):
            raise SchemaError(
                f"env_ids must be in [0, {self._num_envs}), got {int(bad[0])}. This "
                "buffer was created with that num_envs."
            )
        if len(np.unique(ids)) != len(ids):
            raise SchemaError(
                f"env_ids must name each environment once, got {ids.tolist()}. Use "
                "extend to add several steps of an environment."
            )
        return ids


def _arrays(value: Any, column: Ragged) -> Iterator[tuple[Any, NDArray[Any]]]:
    """Arrays among values that vary, each with what was made of it."""
    if isinstance(value, Ragged):
        yield value.values, column.values
    elif hasattr(value, "dtype") and value.dtype != object:
        yield value, column.values.reshape(value.shape)
    elif column.shape and isinstance(value, list | tuple | np.ndarray):
        for number, each in enumerate(value):
            if len(column.shape) > 1:
                yield from _arrays(each, column[number])
            elif getattr(each, "dtype", column.dtype) != column.dtype:
                yield each, column[number]


def _fill(cells: NDArray[np.object_], values: object) -> None:
    """Put final observations into cells ``[*lead]``; None stands for a whole step.

    Raises:
        SchemaError: There are more or fewer of them than cells.
    """
    if values is None:
        return
    count = 0
    if isinstance(values, list | tuple) or (isinstance(values, np.ndarray) and values.ndim):
        count = len(values)
    if cells.shape == (1,) and not (count == 1 and _is_list(values)):
        # Of the only environment, without an axis for it.
        cells[0] = values
        return
    if count != len(cells):
        what = "steps" if cells.ndim == 2 else "environments"
        raise SchemaError(
            f"final_observation must have a value for each of the {len(cells)} "
            f"{what}, got {count}. Put None where no episode ended."
        )
    for index in range(count):
        value = values[index]  # type: ignore[index]  # a sequence, as it has a count
        if cells.ndim == 2:
            _fill(cells[index], value)
        else:
            cells[index] = value


def _is_list(values: object) -> bool:
    """Whether values is a list of observations, rather than the numbers of one."""
    objects = isinstance(values, np.ndarray) and values.dtype == object
    return objects or isinstance(values, list)


def _scalars(field: Field) -> dict[type, tuple[float, float]]:
    """Return the scalar types that need no `Field.convert`, and their bounds.

    Within the bounds numpy casts as `Field.convert` would; NaN and all values outside
    go through it. The field's own type has no bounds: comparing a numpy scalar costs
    more than storing it.
    """
    if field.shape or field.mutable or field.dtype == "bfloat16":
        return {}
    kind = field.numpy.kind
    if kind == "b":
        return {bool: ANY, np.bool_: ANY}
    if kind in "iu":
        info = np.iinfo(field.dtype)
        return {int: (int(info.min), int(info.max)), field.numpy.type: ANY}
    if field.exact:
        return {field.numpy.type: ANY}
    largest = float(np.finfo(field.dtype).max)
    return {float: (-largest, largest), field.numpy.type: ANY}

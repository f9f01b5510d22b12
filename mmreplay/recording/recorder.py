"""A progress bar with rate and bytes; rich is loaded only where one is shown.

Playing environments into a buffer, step by step.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import integer, size_in_bytes
from mmreplay.buffer.opening import remove_empty
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk import files
from mmreplay.errors import FullError, SchemaError, frames_to_caller, undone_by
from mmreplay.format.metadata import (
    FILE_NAME,
    HEAP_STEP_NBYTES,
    Autoreset,
    Engine,
    load,
    planned_heap_nbytes,
)
from mmreplay.format.sharding import Codec
from mmreplay.nesting import unflatten
from mmreplay.recording.environments import make_vector
from mmreplay.recording.policies import Actor, Policy
from mmreplay.recording.sources import Leaves, Source, open_source
from mmreplay.schema import Field, Schema

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.vector import VectorEnv
    from rich.progress import Progress

REFRESH_S = 0.1


class Meter(AbstractContextManager["Meter"]):
    """Counts bytes, and shows a bar with rate and bytes where it is wanted.

    Attributes:
        done: Of the total.
        nbytes: Of the rows counted.
    """

    def __init__(
        self,
        total: int,
        row_nbytes: int,
        show: bool | None,
        *,
        what: str = "recording",
        unit: str = "steps",
    ) -> None:
        """Make one.

        Args:
            total: How many there will be.
            row_nbytes: Bytes of a row, without values that vary.
            show: Show the bar, on stderr; None where it is a terminal.
            what: What goes on meanwhile.
            unit: Of what there are so many.
        """
        self.done = self.nbytes = 0
        self._unit = unit
        self._row_nbytes = row_nbytes
        self._bar: Progress | None = None
        self._started = self._shown = perf_counter()
        if sys.stderr.isatty() if show is None else show:
            self._bar = _bar()
            self._task = self._bar.add_task(what, total=total, rate="")

    def update(self, done: int, rows: int, values_nbytes: int = 0) -> None:
        """Count rows just added, and the bytes of their values that vary."""
        self.nbytes += rows * self._row_nbytes + values_nbytes
        self.done = done
        if self._bar is not None and perf_counter() - self._shown > REFRESH_S:
            self._show()

    def _show(self) -> None:
        assert self._bar is not None
        self._shown = perf_counter()
        seconds = max(1e-9, self._shown - self._started)
        rate = f"{self.done / seconds:,.0f} {self._unit}/s, "
        rate += f"{self.nbytes / seconds / 1e6:.1f} MB/s"
        self._bar.update(self._task, completed=self.done, rate=rate)

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._show()
            self._bar.stop()


def _bar() -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )


Resume = Literal["break", "truncate", "continue"]


@dataclass(frozen=True, slots=True)
class RecordReport:
    """What one recording added to a buffer.

    Attributes:
        path: The buffer's folder.
        steps: Steps written; final rows are not counted.
        seconds: From the first reset to the buffer's close.
        nbytes: Bytes of the rows written, with final rows and values of any length.
        episodes: Episodes that ended.
        held: Steps that the buffer holds in the end: fewer than were written, where
            its ring has come round.
        heap_bytes: Of the buffer, for values that vary; 0 where none does.

    Example:
        >>> done = mr.record("CartPole-v1", "runs/new", steps=100, seed=0)
        >>> done.steps, done.held
        (100, 100)
    """

    path: Path
    steps: int
    seconds: float
    nbytes: int
    episodes: int
    held: int
    heap_bytes: int = 0


def record(
    env: str | Env[Any, Any] | VectorEnv[Any, Any, Any],
    path: str | os.PathLike[str],
    policy: Policy | None = None,
    *,
    steps: int,
    num_envs: int | None = None,
    capacity: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    autoreset: Autoreset | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    on_resume: Resume = "break",
    commit_every: float | None = 10.0,
    engine: Engine | None = None,
    codec: Codec | None = None,
    level: int | None = None,
    heap_bytes: int | str | None = None,
) -> RecordReport:
    """Play an environment into a new buffer, or go on with an existing one.

    Exactly `steps` steps are added, as ``len`` counts them; where they are no
    multiple of num_envs, the last call adds a step of the environments that have
    the fewest. An interruption (``KeyboardInterrupt``) or an error of the
    environment closes the buffer with all that came before it, and goes on up; a new
    buffer without one step is removed. The
    last episodes are left as they are: no truncation is invented.

    Args:
        env: A Gymnasium environment or vector environment, or the id of one, such
            as ``"ALE/Pong-v5"``, of which a vector environment is made.
        path: The buffer's folder; resumed where there is one.
        policy: Takes the observation as the environment gives it (``[E, *shape]``
            from a vector environment) and returns the action that it takes, as
            arrays or torch tensors; None
            for random actions. What it raises goes on up with a note.
        steps: Steps to add, of all environments, at least 1.
        num_envs: With an id: environments to make; by default those of the buffer
            that is gone on with, and 1 for a new one.
        capacity: Rows kept per environment; by default all that is recorded fits.
            A buffer that exists keeps its own.
        seed: Of the environments and of random actions.
        progress: Show a progress bar on stderr; None where it is a terminal.
        autoreset: What a vector environment does after an end, where its metadata
            do not say.
        env_kwargs: With an id: what the environment is made with.
        on_resume: As in `ReplayBuffer.open`.
        commit_every: As in `ReplayBuffer.create`.
        engine: ``"memmap"`` (by default) or ``"zarr"``; a buffer that exists keeps
            its own.
        codec: Of a new buffer of the Zarr engine, as the next; see
            `ReplayBuffer.create`.
        level: The codec's.
        heap_bytes: Of a new buffer, where a space varies, such as Text; see
            `ReplayBuffer.create`. None plans it by the first observation and action,
            for values twice as long, or a sixteenth of the longest.

    Spaces such as Sequence, Graph and Text state no length, or a small one: their
    fields take up to 4,096 items, and texts what their space says. For longer values
    make the buffer first, with fields of a larger ``max_length``, and record into it.
    The error about a value that is too long has the call. The buffer's own
    ``max_length`` counts.

    Raises:
        SchemaError: The environment is unknown, has a space that cannot be stored,
            or differs from the buffer; or the policy cannot be called with an
            observation, or gives an action that fails and is none of the space's.
        ModuleNotFoundError: gymnasium, or ale-py for Atari, is not installed.
        LockedError: Another process is writing the buffer.

    Example:
        >>> done = mr.record("CartPole-v1", "runs/new", steps=100, num_envs=2, seed=0)
        >>> done.steps
        100
    """
    integer("steps", steps, 1, "Give the steps to record.")
    path = Path(files.expanded(path))
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    made = isinstance(env, str)
    played = (
        make_vector(env, _num_envs(path, num_envs), env_kwargs or {})
        if isinstance(env, str)
        else env
    )
    empty = False
    try:
        source = open_source(played, autoreset, num_envs)
        actor = Actor(_random(played, seed) if policy is None else policy, played.action_space)
        max_rows = rows_of(steps, source.num_envs)
        started = perf_counter()
        fresh = not (path / FILE_NAME).exists()
        schema = Schema.from_env(played)
        source.varying = schema.varying
        is_reset = False
        if fresh and schema.varying and heap_bytes is None:
            source.reset(seed)
            is_reset = True
            heap_bytes = _heap_bytes(schema, source, played, path, capacity or max_rows)
        buffer = _open(
            path,
            schema,
            source,
            capacity,
            max_rows,
            on_resume,
            commit_every,
            {"engine": engine, "codec": codec, "level": level, "heap_bytes": heap_bytes},
        )
        with buffer, Meter(steps, _row_nbytes(buffer.schema), progress) as meter:
            try:
                if not is_reset:
                    source.reset(seed)
                episodes = _play(source, buffer, actor, steps, meter)
                num_held = len(buffer)
            except BaseException as error:
                empty = fresh and not buffer.heads.any()
                if isinstance(error, FullError) and buffer.heads.any():
                    counting = f"mmreplay info {path} counts them"
                    error.add_note(f"earlier steps are stored; {counting}")
                raise
        seconds = perf_counter() - started
    except BaseException:
        # Nothing was recorded: a buffer of this size would be in the way of the next
        # attempt. Why it failed is what is raised, not what could not be removed.
        if empty:
            remove_empty(path, buffer.metadata.uuid)
        with suppress(OSError):
            for folder in missing:
                with suppress(FileNotFoundError):
                    files.disk.rmdir(folder)
        raise
    finally:
        if made:
            played.close()
    return RecordReport(
        path, steps, seconds, meter.nbytes, episodes, num_held, buffer.metadata.heap_nbytes
    )


def _heap_bytes(schema: Schema, source: Source, played: Any, path: Path, rows: int) -> int:
    """Plan the heap of a new buffer by the first observation and an action."""
    # Of a copy: the draws of the actions that are played stay as they are.
    action = deepcopy(played.action_space).sample()
    first = source.leaves("observation", source.observation)
    first |= source.leaves("action", action)
    lengths = {}
    for name in schema.varying:
        field = schema[name]
        try:
            values = field.rules.convert(field, first[name], name, (source.num_envs,))
        except SchemaError as error:
            ring = path, rows, source.num_envs, source.autoreset
            _say_how_to_record_longer(error, schema, *ring, first)
            raise
        assert field.max_length is not None
        longer = max(2 * float(values.lengths.mean()), field.max_length / 16)
        lengths[name] = min(longer, field.max_length)
    return planned_heap_nbytes(schema, rows, lengths)


def _say_how_to_record_longer(
    error: SchemaError,
    schema: Schema,
    path: Path,
    capacity: int,
    num_envs: int,
    autoreset: Autoreset,
    *rows: Leaves,
) -> None:
    """Note the call that makes a ring for values of rows that are too long.

    Args:
        error: Takes the note; none where no value is too long.
        schema: Of the ring that refused the rows.
        path: Its folder, and so on.
        capacity: Of it.
        num_envs: Of it.
        autoreset: Of it.
        rows: Values by path, as `Source.leaves` has them.
    """
    longer: dict[str, Field] = {}
    lengths = {}
    for name in schema.varying:
        field = schema[name]
        assert field.max_length is not None
        lengths[name] = field.max_length / 16
        cells = np.concatenate([row[name] for row in rows if name in row])
        # A character takes four bytes at most.
        limit = 4 * max((len(cell) for cell in cells if hasattr(cell, "__len__")), default=0)
        limit = max(limit, field.max_length)
        try:
            wide = replace(field, max_length=limit)
            values = wide.rules.convert(wide, cells, name, (len(cells),))
        except SchemaError:
            # It is refused for something else.
            continue
        length = int(values.lengths.max(initial=0))
        if length > field.max_length:
            longer[name] = replace(field, max_length=2 * length)
            lengths[name] = float(length)
    if not longer:
        return
    fields = Schema.from_flat({**schema.fields, **longer})
    made = ", ".join(f"{name!r}: mr.{field!r}" for name, field in longer.items())
    there = f"{path}-longer"
    error.add_note(
        "to record longer values, make a buffer for them and record into it: "
        f"fields = {{**mr.Schema.from_env(env).fields, {made}}}; "
        f"mr.ReplayBuffer.create({there!r}, mr.Schema.from_flat(fields), "
        f"{capacity}, {num_envs}, autoreset={autoreset!r}, "
        f"heap_bytes={planned_heap_nbytes(fields, capacity, lengths)}).close(); "
        f"mr.record(env, {there!r}, ...)"
    )


def rows_of(steps: int, num_envs: int) -> int:
    """Rows per environment that hold so many steps of all, with their final rows."""
    # Every second row of an environment is a final one at most.
    return 2 * -(-steps // num_envs) + 2


def _play(source: Source, buffer: ReplayBuffer, actor: Actor, steps: int, meter: Meter) -> int:
    """Add exactly steps steps, and return how many episodes ended."""
    none = np.zeros(source.num_envs, bool)
    waiting = none
    seen = source.leaves("observation", source.observation)
    done = episodes = 0
    values = 0

    def grown() -> int:
        """Bytes of values added since the last call."""
        nonlocal values
        heads, before = buffer.view.heap_heads, values
        values = 0 if heads is None else int(heads.sum())
        return values - before

    grown()  # What a resumed ring holds already is not counted.
    try:
        while done < steps:
            action = actor.act(source.observation)
            with actor.acting(action):
                begun = seen | source.leaves("action", action)
                turn = source.step(action)
            # Whole, or still the last one: what fails in between writes final rows.
            row = begun | turn.leaves()
            # From here on an interruption may find the final rows written.
            due, waiting = waiting, none
            kept = _rows_to_store(due, steps - done, buffer)
            with actor.acting(action):
                _add(buffer, row, turn.final, kept)
            stepped = kept & ~due
            ended = stepped & (turn.terminated | turn.truncated)
            done += int(stepped.sum())
            episodes += int(ended.sum())
            finals = 0 if turn.final is None else int(ended.sum())
            meter.update(done, int(kept.sum()) + finals, grown())
            seen = source.leaves("observation", source.observation)
            if source.autoreset == "next_step":
                # The row after an end is the final row, whatever the call says.
                waiting = ended
    finally:
        if waiting.any():
            # What followed the last ends is known, and drawing them needs it.
            _add(buffer, row | seen, None, waiting)
            meter.update(done, int(waiting.sum()), grown())
    return episodes


def _rows_to_store(
    waiting: NDArray[np.bool_], num_free: int, buffer: ReplayBuffer
) -> NDArray[np.bool_]:
    """The environments whose row is added: all, or those that room is left for."""
    live = np.flatnonzero(~waiting)
    stored = np.ones(len(waiting), bool)
    if len(live) > num_free:
        fewest = np.argsort(buffer.heads[live], kind="stable")
        stored[live[fewest[num_free:]]] = False
    return stored


def _add(
    buffer: ReplayBuffer, row: Leaves, final: Leaves | None, stored: NDArray[np.bool_]
) -> None:
    try:
        _add_rows(buffer, row, final, stored)
    except SchemaError as error:
        assert buffer.path is not None
        ring = buffer.path, buffer.capacity, buffer.num_envs, buffer.autoreset
        _say_how_to_record_longer(error, buffer.schema, *ring, row, final or {})
        raise


def _add_rows(
    buffer: ReplayBuffer, row: Leaves, final: Leaves | None, stored: NDArray[np.bool_]
) -> None:
    if stored.all():
        buffer.add(row, final_observation=_nested(final))
        return
    ids = np.flatnonzero(stored)
    columns = {path: leaf[ids] for path, leaf in row.items()}
    ends = None if final is None else {p: leaf[ids] for p, leaf in final.items()}
    buffer.add(columns, final_observation=_nested(ends), env_ids=ids)


def _nested(final: Leaves | None) -> object:
    """Final observations as `ReplayBuffer.add` takes them: a leaf or a mapping."""
    if final is None or "observation" in final:
        return final and final["observation"]
    return unflatten(dict(final))["observation"]


def _row_nbytes(schema: Schema) -> int:
    """Bytes of one row on disk: the flags, which hold both ends, and the rest."""
    return 1 + sum(
        field.nbytes
        for path, field in schema.fields.items()
        if path not in ("terminated", "truncated")
    )


def _num_envs(path: Path, asked: int | None) -> int:
    """Environments to make: as told, or as the buffer has."""
    if asked is None and (path / FILE_NAME).exists():
        return load(path).ring.num_envs
    return 1 if asked is None else asked


def _random(env: Any, seed: int | None) -> Policy:
    env.action_space.seed(seed)
    return lambda _: env.action_space.sample()


def _open(
    path: Path,
    schema: Schema,
    source: Source,
    capacity: int | None,
    max_rows: int,
    on_resume: Resume,
    commit_every: float | None,
    asked: dict[str, Any],
) -> ReplayBuffer:
    """Create the buffer, or open the one that is there and compare."""
    given = {name: value for name, value in asked.items() if value is not None}
    if not (path / FILE_NAME).exists():
        return ReplayBuffer.create(
            path,
            schema,
            max_rows if capacity is None else capacity,
            source.num_envs,
            autoreset=source.autoreset,
            commit_every=commit_every,
            **given,
        )
    buffer = ReplayBuffer.open(path, "r+", on_resume=on_resume, commit_every=commit_every)
    with undone_by(buffer.close):
        missing = tuple(path for path in schema.varying if path not in buffer.schema)
        if missing:
            warnings.warn(
                f"{path} has no field {missing[0]!r}, whose values vary, so they are "
                "left out as before. Add the field with add_field, or record to "
                "another path, to store them.",
                RuntimeWarning,
                stacklevel=frames_to_caller(),
            )
            source.left_out = missing
        _compare(buffer, schema, source, capacity)
        _compare_engine(buffer, given)
    return buffer


def _compare_engine(buffer: ReplayBuffer, asked: dict[str, Any]) -> None:
    sharding = buffer.metadata.sharding
    for name, value in asked.items():
        held = getattr(sharding, name, None)
        held = buffer.metadata.engine if name == "engine" else held
        way_out = "convert the buffer with mmreplay compact"
        if name == "heap_bytes":
            held, way_out = (buffer.metadata.heap_nbytes, "change it with mmreplay resize")
            # Rounded up, as it was when the buffer was made.
            value = -(-size_in_bytes(name, value) // HEAP_STEP_NBYTES) * HEAP_STEP_NBYTES
        if value != held:
            raise SchemaError(
                f"{name} must be {held!r}, as in the buffer at {buffer.path}, got "
                f"{value!r}. Leave it out, or {way_out}."
            )


def _compare(buffer: ReplayBuffer, schema: Schema, source: Source, capacity: int | None) -> None:
    """Refuse an environment that is not the one that the buffer was made for."""
    ours, theirs = dict(buffer.schema.fields), dict(schema.fields)
    for name in source.left_out:
        del theirs[name]
    for name in [*ours, *theirs]:
        if not _alike(ours.get(name), theirs.get(name)):
            raise SchemaError(
                f"field {name!r}: the environment gives {_field_text(theirs, name)}, "
                f"but the buffer at {buffer.path} holds {_field_text(ours, name)}. "
                "Record to another path."
            )
    for name, got, held in (
        ("num_envs", source.num_envs, buffer.num_envs),
        ("autoreset", source.autoreset, buffer.autoreset),
        ("capacity", capacity or buffer.capacity, buffer.capacity),
    ):
        if got != held:
            others = {"capacity": "Leave it out, resize the buffer", "num_envs": "Leave it out"}
            way_out = f"{others[name]}, or record" if name in others else "Record"
            raise SchemaError(
                f"{name} must be {held!r} like the buffer at {buffer.path}, got "
                f"{got!r}. {way_out} to another path."
            )


def _alike(ours: Field | None, theirs: Field | None) -> bool:
    """Whether a field takes the values of another, but for how long they may be.

    A space states no length, or one that the ring was made to go beyond, nor that its
    images are stored as files.
    """
    if ours is None or theirs is None or not (ours.varies and theirs.varies):
        return ours == theirs or (ours is not None and ours.drawn == theirs)
    return ours == replace(theirs, max_length=ours.max_length)


def _field_text(fields: Mapping[str, Field], name: str) -> str:
    field = fields.get(name)
    if field is None:
        return "nothing"
    return field.description + " mutable" * field.mutable

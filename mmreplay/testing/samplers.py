"""The contract of samplers: `check_sampler`.

Every rule draws from buffers on disk, of several shapes: one environment and many,
wrapped rings, episodes so short that most rows are no legal starts, positions beyond
2**40, and transforms that need rows around a step.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Block
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.episodes import FINAL
from mmreplay.errors import DurabilityWarning, EmptyError, FormatError, SchemaError, StaleError
from mmreplay.samplers.base import (
    GROUPS,
    PADDED,
    RAGGED,
    STEPS,
    Draw,
    Sampler,
    State,
    Traits,
    View,
    ask,
    checked,
    traits_of,
)
from mmreplay.samplers.combine import MixtureSampler, state_of
from mmreplay.samplers.holding import Claims
from mmreplay.samplers.joint import DrawPlan
from mmreplay.samplers.recent import ignore_earliest
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.samplers.uses import counters_in
from mmreplay.schema import Field, Schema
from mmreplay.splitting import split
from mmreplay.testing.disks import QuickDisk, using
from mmreplay.testing.rules import ContractError, by_name, run_rules
from mmreplay.transforms.apply import Apply
from mmreplay.transforms.base import Transform
from mmreplay.transforms.nstep import NStep
from mmreplay.transforms.stack import FrameStack

Step = tuple[int, int]
"""(env_id, position)"""

SCHEMA = Schema(
    {
        "observation": Field((2,), "int64"),
        "pair": Field((), "int64"),
        "reward": Field((), "float32"),
        "terminated": Field((), "bool"),
        "truncated": Field((), "bool"),
    }
)
LONG = "......t" + "." * 14 + "f....." + "." * 12
KINDS: dict[str, tuple[list[str], int]] = {
    "one environment": (["." * 30], 40),
    "many environments": ([LONG * 2, "", LONG, "..t....." * 8, "."], 30),
    "short episodes": (["u.u..", "uut...", "uuu", "", ".t.tuu..."], 12),
}
"""Steps of each environment, and the capacity. A step is ``.``, or ends its episode:
terminated ``t``, truncated ``u``, or truncated with a final observation ``f``. One that
is truncated without a final observation is no legal start."""


def make_buffer(path: Path, kinds: Sequence[str], capacity: int) -> ReplayBuffer:
    """Make a buffer whose observations are (env_id, position), open for writing.

    Each two rows of an environment share a number, ``pair``, for draws by a column.

    Args:
        path: Of the new folder.
        kinds: Per environment the kind of each step, as in `KINDS`.
        capacity: Rows of each environment.
    """
    buffer = ReplayBuffer.create(
        path, SCHEMA, capacity, len(kinds), autoreset="disabled", commit_every=None
    )
    for env_id, steps in enumerate(kinds):
        add_steps(buffer, env_id, steps)
    return buffer


def add_steps(buffer: ReplayBuffer, env_id: int, kinds: str) -> None:
    """Add steps of one environment; see `make_buffer`."""
    for block in re.findall(r"[^f]+|f", kinds):
        kind = np.array([[each] for each in block])
        positions = buffer.heads[env_id] + np.arange(len(block))
        observations = np.stack([np.full_like(positions, env_id), positions], axis=1)[:, None]
        steps = {
            "observation": observations,
            "pair": (positions // 2)[:, None],
            "reward": np.ones((len(block), 1), np.float32),
            "terminated": kind == "t",
            "truncated": (kind == "u") | (kind == "f"),
        }
        final = observations + np.array([0, 1]) if block == "f" else None
        buffer.extend(steps, final_observation=final, env_ids=[env_id])


def move_buffer(source: ReplayBuffer, path: Path, shift: int) -> None:
    """Write a closed buffer of the same rows at positions that are higher by shift."""
    reader = BufferReader(source)
    description = reader.describe()
    moved = replace(
        description, first=description.first + shift, stop=description.stop + shift, uuid=""
    )
    target = registry.named(registry.BUFFER)
    with registry.open_writer(target, path, moved, overwrite=False) as writer:
        for block in reader.blocks():
            positions = block.positions + shift
            writer.write(Block(block.columns, block.env_ids, positions, block.flags))
        writer.finish()


@dataclass
class SamplerCase:
    """A sampler to check, and a folder for buffers.

    Attributes:
        make_sampler: Makes one, from a seed.
        folder: Holds the buffers.
        draws_every_start: Each legal start is drawn sooner or later.
        depends_on_seed: Other seeds draw other steps.
    """

    make_sampler: Callable[[int], Any]
    folder: Path
    draws_every_start: bool
    depends_on_seed: bool
    made: list[Sampler] = field(default_factory=list)

    def sampler(self, seed: int = 0) -> Sampler:
        """Make a sampler, which is closed with the case."""
        sampler = self.make_sampler(seed)
        try:
            self.made.append(checked(sampler))
        except SchemaError as error:
            raise ContractError(str(error)) from None
        return self.made[-1]

    def close(self) -> None:
        """Close the samplers made so far."""
        for sampler in self.made:
            ask(sampler, "close")()
        self.made.clear()

    @property
    def windows(self) -> bool:
        """Whether it draws windows or episodes, not single steps."""
        return traits_of(self.sampler()).form not in (None, STEPS)

    def buffer(self, name: str = "many environments") -> ReplayBuffer:
        """Make a buffer of `KINDS`, open for writing."""
        kinds, capacity = KINDS[name]
        path = self.folder / f"{name} {len(list(self.folder.iterdir()))}"
        return make_buffer(path, kinds, capacity)

    def buffers(self) -> Iterator[tuple[str, ReplayBuffer]]:
        """Make one buffer after another, with its name; each is closed at the next."""
        for name in KINDS:
            with self.buffer(name) as buffer:
                yield name, buffer
        with self.buffer() as buffer:
            move_buffer(buffer, self.folder / "far", 1 << 40)
        with ReplayBuffer.open(self.folder / "far") as buffer:
            yield "positions beyond 2**40", buffer
        with self.buffer() as buffer:
            path = buffer.path
        assert path is not None
        around: list[Transform] = [FrameStack(3), NStep(3, gamma=0.9)]
        with ReplayBuffer.open(path, transforms=around) as buffer:
            yield "transforms that read 2 rows before and 3 after", buffer

    def draw(self, sampler: Sampler, view: View, batch_size: int) -> Draw | None:
        """Draw a batch, or return None where no window fits into the episodes."""
        try:
            return sampler.draw(view, batch_size)
        except EmptyError as error:
            if traits_of(sampler).form not in (None, STEPS) or not legal_starts(view):
                return None
            raise ContractError(
                f"draw raised {type(error).__name__} ({error}) for a view with "
                f"{len(legal_starts(view))} legal starts. Read view.starts first in "
                "each draw, before view.num_illegal, and draw one of them"
            ) from None


def legal_starts(view: View) -> list[Step]:
    """Every legal start of a view, by rank."""
    total = int(view.starts.lengths.sum()) - view.num_illegal
    return pairs(*view.start_at(np.arange(total)))


def pairs(env_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Step]:
    """Steps as pairs of plain integers."""
    return list(zip(env_ids.tolist(), positions.tolist(), strict=True))


def steps_of(draw: Draw) -> list[Step]:
    """The steps that a draw drew, first ones of windows."""
    return pairs(draw.env_ids, draw.positions)


def drawn(draw: Draw | None) -> object:
    """All of a draw as plain values, to be compared; None where there is none."""
    if draw is None:
        return None
    windows = draw.windows
    around = None
    if windows is not None:
        around = windows.positions.tolist(), windows.mask.tolist()
    return (
        steps_of(draw),
        draw.probabilities.tolist(),
        draw.weights.tolist(),
        int(draw.key),
        around,
    )


def first_steps(value: object) -> str:
    """The first steps of what `drawn` returned, for a message."""
    if not isinstance(value, tuple):
        return "nothing"
    steps = value[0]
    return f"{steps[:4]}{'...' if len(steps) > 4 else ''}"


def check_steps(draw: Draw | None, view: View, where: str, *, windows: bool = False) -> None:
    """Refuse a draw with a step that is no legal start of the view."""
    if draw is None:
        return
    if windows:
        check_alive(draw, view, where)
        return
    legal = set(legal_starts(view))
    wrong = [step for step in steps_of(draw) if step not in legal]
    if wrong:
        env_id, position = wrong[0]
        span = view.span
        alive = 0 <= env_id < len(span.first) and (
            span.first[env_id] <= position < span.stop[env_id]
        )
        reason = "no legal start" if alive else "not in the buffer"
        way_out = "Draw ranks and pass them to view.start_at, or draw again what view.legal refuses"
        if not alive:
            way_out = (
                "Read view.starts in each draw, as rows come and go, and pass ranks to "
                "view.start_at, which returns int64 positions"
            )
        raise ContractError(
            f"{len(wrong)} of {len(draw)} steps are {reason} of {where}, such as "
            f"position {position} of environment {env_id}. {way_out}"
        )


def check_alive(draw: Draw, view: View, where: str) -> None:
    """Refuse windows or episodes of rows that are overwritten, or no steps."""
    span = view.span
    env_ids, positions = draw.env_ids, draw.positions
    if draw.windows is not None:
        mask = draw.windows.mask
        env_ids = np.repeat(env_ids, mask.sum(1))
        positions = draw.windows.positions[mask]
    good = (span.first[env_ids] <= positions) & (positions < span.stop[env_ids])
    if good.all():
        good = (view.flags(env_ids, positions) & FINAL) == 0
    if not good.all():
        env_id, position = pairs(env_ids[~good], positions[~good])[0]
        raise ContractError(
            f"position {position} of environment {env_id} in a window of {where} is "
            "no step that can be read. Draw starts of a WindowStarts view"
        )


def draws_the_promised_arrays(case: SamplerCase) -> None:
    """A draw has the arrays that `Draw` documents, for the steps asked for.

    Fewer steps are right where the sampler draws without replacement and no more are
    left. An `EpisodeSampler` may return the steps of `batch_size` episodes.
    """
    for name, buffer in case.buffers():
        for batch_size in (1, 7, 256):
            sampler, view = case.sampler(), buffer.view
            draw = case.draw(sampler, view, batch_size)
            if draw is None:
                continue
            if not isinstance(draw, Draw):
                raise ContractError(
                    f"draw returned {type(draw).__name__}. Return a mmreplay.samplers.base.Draw"
                )
            _check_arrays(draw)
            count = len(draw.positions) if draw.offsets is None else len(draw.offsets) - 1
            if count == batch_size:
                continue
            different = len(set(steps_of(draw))) == len(draw)
            if not (0 < count < batch_size and different):
                raise ContractError(
                    f"draw returned {count} steps of {name} for a batch_size of "
                    f"{batch_size}. Return batch_size steps; fewer only without "
                    "replacement, where no more are left"
                )
            left = not case.windows and not traits_of(sampler).ends
            if left and count < len(legal_starts(view)):
                raise ContractError(
                    f"draw returned {count} different steps of {name} for a "
                    f"batch_size of {batch_size}, which has "
                    f"{len(legal_starts(view))} legal starts. Return batch_size steps"
                )


def _check_arrays(draw: Draw) -> None:
    """Check dtypes, shapes and ranges of what a draw holds."""
    count = len(draw.positions)
    for attribute, dtype in (
        ("env_ids", np.int64),
        ("positions", np.int64),
        ("probabilities", np.float64),
        ("weights", np.float32),
    ):
        array = getattr(draw, attribute)
        if not isinstance(array, np.ndarray) or array.dtype != dtype:
            got = getattr(array, "dtype", type(array).__name__)
            raise ContractError(
                f"{attribute} of a draw is {got}. Make it a numpy array of {np.dtype(dtype).name}"
            )
        if array.shape != (count,):
            raise ContractError(
                f"{attribute} of a draw has the shape {array.shape}, positions "
                f"{draw.positions.shape}. Give all the shape [B]"
            )
    if not ((draw.probabilities > 0) & (draw.probabilities <= 1)).all():
        raise ContractError(
            f"probabilities are between {draw.probabilities.min()} and "
            f"{draw.probabilities.max()}. Give each drawn step its probability in (0, 1]"
        )
    if not (np.isfinite(draw.weights) & (draw.weights >= 0)).all():
        raise ContractError(
            f"weights are between {draw.weights.min()} and "
            f"{draw.weights.max()}. Give each step a finite weight; all ones "
            "where the draw is uniform"
        )
    if not 0 <= draw.key < 1 << 64:
        raise ContractError(
            f"key is {draw.key}. Give an integer in [0, 2**64), another one for each draw"
        )


def draws_legal_starts(case: SamplerCase) -> None:
    """Every step that is drawn is a legal start of the view."""
    for name, buffer in case.buffers():
        sampler = case.sampler()
        for batch_size in (1, 64, 500):
            draw = case.draw(sampler, buffer.view, batch_size)
            check_steps(draw, buffer.view, name, windows=case.windows)


def draws_every_legal_start(case: SamplerCase) -> None:
    """Every legal start is drawn sooner or later."""
    if case.windows or not case.draws_every_start:
        return
    for name, buffer in case.buffers():
        sampler, missing = case.sampler(), set(legal_starts(buffer.view))
        for _ in range(100):
            draw = case.draw(sampler, buffer.view, 100)
            missing -= set(steps_of(draw)) if draw is not None else set()
            if not missing:
                break
        if missing:
            env_id, position = min(missing)
            raise ContractError(
                f"100 batches of 100 steps of {name} never drew {len(missing)} of "
                f"{len(legal_starts(buffer.view))} legal starts, such as position "
                f"{position} of environment {env_id}. Draw ranks from 0 to the number "
                "of legal starts, or pass draws_every_start=False if steps are left "
                "out on purpose"
            )


def refuses_an_empty_view(case: SamplerCase) -> None:
    """Without a legal start a draw raises `EmptyError` and changes nothing."""
    with make_buffer(case.folder / "waiting", ["."], 8) as buffer:
        sampler = case.sampler(3)
        before = deepcopy(sampler.state_dict())
        try:
            draw = sampler.draw(buffer.view, 4)
        except EmptyError:
            if not equal(sampler.state_dict(), before):
                raise ContractError(
                    f"a draw that raised EmptyError changed the state from {before} "
                    f"to {sampler.state_dict()}. Change it after the draw succeeded"
                ) from None
        except Exception as error:
            raise ContractError(
                f"draw raised {type(error).__name__} ({error}) where no row is a legal "
                "start. Raise mmreplay.EmptyError"
            ) from error
        else:
            got = steps_of(draw) if isinstance(draw, Draw) else type(draw).__name__
            raise ContractError(
                f"drew {got} where no row is a legal start. Raise mmreplay.EmptyError"
            )


def draws_by_seed(case: SamplerCase) -> None:
    """Equal seeds draw alike, batch by batch, and other seeds differ."""
    with case.buffer() as buffer:
        samplers = [case.sampler(seed) for seed in (5, 5, 6)]
        draws = [
            [drawn(case.draw(sampler, buffer.view, 48)) for _ in range(4)] for sampler in samplers
        ]
    for turn, (first, again) in enumerate(zip(draws[0], draws[1], strict=True)):
        if first != again:
            raise ContractError(
                f"batch {turn} of seed 5 is {first_steps(first)} and then "
                f"{first_steps(again)}. Draw from a generator that the sampler makes "
                "of its seed"
            )
    if case.depends_on_seed and draws[0] == draws[2]:
        raise ContractError(
            f"seeds 5 and 6 both draw {first_steps(draws[0][0])}. Use the seed, or "
            "pass depends_on_seed=False if nothing is random"
        )


def draws_anew_each_time(case: SamplerCase) -> None:
    """A batch is not the batch before it."""
    if not case.depends_on_seed:
        return
    with case.buffer() as buffer:
        sampler = case.sampler()
        batches = [drawn(case.draw(sampler, buffer.view, 16)) for _ in range(6)]
    if all(batch == batches[0] for batch in batches):
        raise ContractError(
            f"6 batches are all {first_steps(batches[0])}. Go on with the generator "
            "from batch to batch"
        )


def leaves_global_generators_alone(case: SamplerCase) -> None:
    """A draw takes no random number from `numpy.random` or `random`."""
    with case.buffer() as buffer:
        before = np.random.get_state(legacy=False)  # noqa: NPY002
        plain = random.getstate()
        case.draw(case.sampler(), buffer.view, 64)
        after = np.random.get_state(legacy=False)  # noqa: NPY002
    same = equal(before, after)
    if not same or plain != random.getstate():
        which = "random" if same else "numpy.random"
        raise ContractError(
            f"a draw changed the state of {which}. Make a numpy.random.Generator of "
            "the seed, or use mmreplay.samplers.random.StepGenerator"
        )


def leaves_the_view_alone(case: SamplerCase) -> None:
    """A draw changes nothing of the view, whose arrays others use."""
    with case.buffer() as buffer:
        view = buffer.view
        before = [view.span.first, view.span.stop, view.starts.first, view.starts.stop]
        copies = [array.copy() for array in before]
        case.draw(case.sampler(), view, 64)
        for array, copy in zip(before, copies, strict=True):
            if not np.array_equal(array, copy):
                raise ContractError(
                    f"a draw changed an array of the view from {copy.tolist()} to "
                    f"{array.tolist()}. Copy it before you change it"
                )


def equal(one: object, other: object) -> bool:
    """Whether two states are equal, arrays included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        same = len(one) == len(other)
        return same and all(map(equal, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return bool(np.array_equal(np.asarray(one), np.asarray(other)))
    return type(one) is type(other) and one == other


def foreign_value(state: object) -> object:
    """The first value in a state that is neither JSON nor an array, or None."""
    if isinstance(state, dict):
        for key, value in state.items():
            result = key if not isinstance(key, str) else foreign_value(value)
            if result is not None:
                return result
        return None
    if isinstance(state, list | tuple):
        result = [item for item in map(foreign_value, state) if item is not None]
        return result[0] if result else None
    plain = state is None or isinstance(state, bool | int | float | str | np.ndarray)
    return None if plain else state


def saves_plain_states(case: SamplerCase) -> None:
    """A state is a dict of JSON values and arrays, and later draws do not change it."""
    with case.buffer() as buffer:
        sampler = case.sampler()
        case.draw(sampler, buffer.view, 8)
        state = sampler.state_dict()
        if not isinstance(state, dict):
            raise ContractError(f"state_dict returned {type(state).__name__}. Return a dict")
        result = foreign_value(state)
        if result is not None:
            raise ContractError(
                f"state_dict holds {result!r}, a {type(result).__name__}. Save it as "
                "numbers, text, lists, dicts or arrays"
            )
        before = deepcopy(state)
        case.draw(sampler, buffer.view, 8)
        if not equal(state, before):
            raise ContractError(
                f"a draw changed the state returned before from {before} to {state}. Return copies"
            )


def stored(state: State) -> State:
    """A state as it comes out of a file: by JSON where that can hold it."""
    try:
        loaded: State = json.loads(json.dumps(state))
    except TypeError:
        loaded = pickle.loads(pickle.dumps(state))
    return loaded


def continues_from_a_state(case: SamplerCase) -> None:
    """A sampler that loads a state draws what the saved one draws next.

    States are taken before the first draw, after one, and in mid-epoch.
    """
    with case.buffer() as buffer:
        for count in (0, 1, 3):
            saved = case.sampler(9)
            for _ in range(count):
                case.draw(saved, buffer.view, 6)
            compare_loaded(case, saved, stored(saved.state_dict()), buffer, count)


def compare_loaded(
    case: SamplerCase, saved: Sampler, state: State, buffer: ReplayBuffer, count: int
) -> None:
    """Compare the next draws of a sampler with those of others that load its state."""
    expected = [drawn(case.draw(saved, buffer.view, 6)) for _ in range(3)]
    for who, sampler in (
        ("a new sampler of the same seed", case.sampler(9)),
        ("a new sampler of another seed", case.sampler(77)),
        ("the same sampler", saved),
    ):
        sampler.load_state_dict(state)
        draws = [drawn(case.draw(sampler, buffer.view, 6)) for _ in range(3)]
        for turn, (got, wanted) in enumerate(zip(draws, expected, strict=True)):
            if got != wanted:
                raise ContractError(
                    f"after {count} draws the saved sampler went on with "
                    f"{first_steps(wanted)} in batch {turn}, and {who} that loaded its "
                    f"state with {first_steps(got)}. Save all that a draw depends on: "
                    "the seed, the number of the draw, the order of the epoch"
                )


def refuses_foreign_states(case: SamplerCase) -> None:
    """What is not a state of this sampler raises `FormatError` and changes nothing."""
    own = case.sampler(4).state_dict()
    strange: list[Any] = [None, [], "state", {}, {"kind": "OtherSampler", "seed": 1}]
    if "kind" in own:
        strange.append({**own, "kind": "OtherSampler"})
    for state in strange:
        sampler = case.sampler(4)
        try:
            sampler.load_state_dict(state)
        except FormatError:
            if not equal(sampler.state_dict(), own):
                raise ContractError(
                    f"load_state_dict({state!r}) was refused and changed the state to "
                    f"{sampler.state_dict()}. Check a state before any of it is used"
                ) from None
        except Exception as error:
            raise ContractError(
                f"load_state_dict({state!r}) raised {type(error).__name__} ({error}). "
                "Raise mmreplay.FormatError; mmreplay.samplers.states has checks"
            ) from error
        else:
            raise ContractError(
                f"load_state_dict({state!r}) was accepted. Put a kind into the state "
                "and refuse others; mmreplay.samplers.states.check_kind does it"
            )


def refuses_damaged_states(case: SamplerCase) -> None:
    """A state with a damaged value is loaded, or raises `FormatError` alone."""
    missing = object()
    own = case.sampler(4).state_dict()
    other = case.sampler(8).state_dict()
    sampler = case.sampler(4)
    for key in other:
        for value in (missing, None, "x", -1, 1.5, 1 << 70, [1], {}, True):
            state = {name: item for name, item in other.items() if name != key}
            if value is not missing:
                state[key] = value
            try:
                sampler.load_state_dict(state)
            except FormatError:
                if equal(sampler.state_dict(), own):
                    continue
                raise ContractError(
                    f"a state with {key!r} of {value!r} was refused and changed the "
                    "sampler. Check a state before any of it is used"
                ) from None
            except Exception as error:
                what = f"without {key!r}" if value is missing else f"of {key!r} {value}"
                raise ContractError(
                    f"a state {what} raised {type(error).__name__} ({error}). Raise "
                    "mmreplay.FormatError; mmreplay.samplers.states has checks"
                ) from error
            sampler.load_state_dict(own)


def copies_by_pickle(case: SamplerCase) -> None:
    """A pickled copy draws what the original draws next."""
    with case.buffer() as buffer:
        sampler = case.sampler()
        case.draw(sampler, buffer.view, 6)
        try:
            data = pickle.dumps(sampler)
        except Exception as error:
            raise ContractError(
                f"pickle raised {type(error).__name__} ({error}). Hold nothing that "
                "cannot be pickled, or leave it out in __getstate__"
            ) from error
        copy = pickle.loads(data)
        case.made.append(copy)
        for _ in range(3):
            wanted = drawn(case.draw(sampler, buffer.view, 6))
            got = drawn(case.draw(copy, buffer.view, 6))
            if got != wanted:
                raise ContractError(
                    f"the original drew {first_steps(wanted)}, its copy "
                    f"{first_steps(got)}. Pickle all that a draw depends on"
                )


def follows_a_writer(case: SamplerCase) -> None:
    """While a writer adds, clears and overwrites rows, only rows alive are drawn."""
    windows = case.windows
    path = case.folder / "live"
    with make_buffer(path, ["...", ""], 20) as buffer, ReplayBuffer.open(path) as reader:
        writer_sampler, reader_sampler = case.sampler(1), case.sampler(2)
        for turn in range(40):
            add_steps(buffer, turn % 2, "......."[: turn % 8] + "tuf."[turn % 4])
            if turn % 15 == 14:
                buffer.clear([turn % 2])
            for sampler, view, where in (
                (writer_sampler, buffer.view, "a buffer being written"),
                (reader_sampler, reader.view, "a reader beside a writer"),
            ):
                draw = case.draw(sampler, view, 16)
                check_steps(draw, view, where, windows=windows)


def follows_a_resize(case: SamplerCase) -> None:
    """After a resize rows of the new ring are drawn, larger or smaller."""
    windows = case.windows
    with case.buffer() as buffer:
        sampler = case.sampler()
        case.draw(sampler, buffer.view, 16)
        for capacity in (50, 12):
            buffer.resize(capacity)
            for _ in range(3):
                draw = case.draw(sampler, buffer.view, 64)
                where = f"a buffer resized to {capacity}"
                check_steps(draw, buffer.view, where, windows=windows)
            add_steps(buffer, 0, "....t...")


def draws_from_restricted_views(case: SamplerCase) -> None:
    """Inside a split, `ignore_earliest` or a mixture it draws legal starts of those."""
    windows = case.windows
    with case.buffer() as buffer:
        view = buffer.view
        restricted = [subset.sampler(case.sampler()) for subset in split(buffer, [0.6, 0.4])]
        restricted.append(ignore_earliest(3, case.sampler()))
        for sampler in restricted:
            for _ in range(3):
                shown = sampler.shown(view)
                draw = case.draw(sampler, view, 40)
                check_steps(draw, shown, repr(sampler), windows=windows)
        if windows:
            return
        mixture = MixtureSampler([(case.sampler(), 1), (UniformSampler(0), 1)], seed=0)
        for _ in range(3):
            check_steps(mixture.draw(view, 40), view, "a mixture")


def gathers_what_it_drew(case: SamplerCase) -> None:
    """`ReplayBuffer.sample` returns the rows drawn, and later draws change no batch."""
    if case.windows:
        return
    sampler = case.sampler()
    with case.buffer() as buffer:
        path = buffer.path
    assert path is not None
    with ReplayBuffer.open(path, sampler=sampler) as buffer:
        batches = [buffer.sample(16) for _ in range(3)]
    for batch in batches:
        result = np.asarray(batch["observation"])
        wanted = np.stack([batch.env_ids, batch.positions], 1)
        if not np.array_equal(result, wanted):
            raise ContractError(
                f"a batch says that its steps are {wanted[:3].tolist()}... and holds "
                f"the rows {result[:3].tolist()}.... Return new arrays from each draw"
            )


class FailingView:
    """A view of which one access fails, and the others do not.

    Attributes:
        left: Accesses until then; None for no failure.
    """

    def __init__(self, view: View) -> None:
        """Show a view, as it is for now."""
        self._view, self.left = view, cast(int | None, None)

    def __getattr__(self, name: str) -> Any:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise ViewFailedError
        value = getattr(self._view, name)
        if name == "steps":
            # The steps of windows are looked at through this view, too.
            if value is self._view:
                return self
            if getattr(value, "base", None) is self._view:
                value.base = self
        return value


class ViewFailedError(Exception):
    """Raised by a `FailingView` alone."""


MAX_ACCESSES = 60
"""Accesses to a view, each of which fails in one draw."""


def failed_draws_leave_all_as_before(case: SamplerCase) -> None:
    """After a draw that raised, state, priorities, uses and the next draw are the same.

    The uses are those of a draw that `ReplayBuffer.sample` makes, whatever is around
    the sampler that counts them.
    """

    def draw_with(sampler: Sampler, view: FailingView) -> Draw | None:
        with suppress(EmptyError):
            return sampler.draw(cast(View, view), 6)
        return None

    with case.buffer() as buffer, case.buffer() as other:
        view, twin_view = FailingView(buffer.view), FailingView(other.view)
        sampler, twin = case.sampler(5), case.sampler(5)
        for access in range(MAX_ACCESSES):
            before = unchanged(sampler, buffer.view)
            view.left, claims = access, Claims()
            draw = None
            try:
                draw = claims.call(draw_with, sampler, view)
            except ViewFailedError:
                claims.release()
                check_unchanged(sampler, before, unchanged(sampler, buffer.view))
                draw = claims.call(draw_with, sampler, view)
            failed, view.left = view.left is None, None
            claims.store()
            wanted = drawn(draw_with(twin, twin_view))
            if drawn(draw) != wanted:
                raise ContractError(
                    f"after a draw that raised it drew {first_steps(drawn(draw))}, and "
                    f"without that {first_steps(wanted)}. Change what a draw depends "
                    "on after the last error, and put parts back by all_or_nothing of "
                    "mmreplay.samplers.holding"
                )
            if not failed:
                return


def failed_batches_leave_all_as_before(case: SamplerCase) -> None:
    """After a `sample` whose transform raised, all is as before, and so is the next."""
    raises = False

    def transform(fields: dict[str, Any]) -> dict[str, Any]:
        if raises:
            raise ViewFailedError
        return fields

    paths = [case.folder / name for name in ("failing", "twin")]
    for path in paths:
        make_buffer(path, *KINDS["many environments"]).close()
    sampler, twin = case.sampler(6), case.sampler(6)
    around = [Apply(transform)]
    with (
        ReplayBuffer.open(paths[0], sampler=sampler, transforms=around) as buffer,
        ReplayBuffer.open(paths[1], sampler=twin) as other,
    ):
        for _ in range(4):
            before, raises = unchanged(sampler, buffer.view), True
            with suppress(ViewFailedError, EmptyError):
                buffer.sample(5)
            raises = False
            check_unchanged(sampler, before, unchanged(sampler, buffer.view))
            found: list[object] = []
            for each in (buffer, other):
                try:
                    batch = each.sample(5)
                except EmptyError:
                    found.append(None)
                    continue
                found.append((pairs(batch.env_ids, batch.positions), batch.key))
            if found[0] != found[1]:
                raise ContractError(
                    "after a sample whose transform raised it drew "
                    f"{first_steps(found[0])}, and without that "
                    f"{first_steps(found[1])}. Put all that a draw depends on into "
                    "the state"
                )


def unchanged(sampler: Sampler, view: View) -> dict[str, Any]:
    """What a draw that raises leaves as it is, of a sampler and its parts."""
    span = view.span
    lengths = span.lengths
    env_ids = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(len(env_ids)) + np.repeat(
        span.first - np.cumsum(lengths) + lengths, lengths
    )
    return {
        "state": deepcopy(sampler.state_dict()),
        "epoch": ask(sampler, "epoch"),
        "priorities": deepcopy(state_of(sampler, priorities=True)),
        "uses": [counter.uses(view, env_ids, positions) for counter in counters_in(sampler)],
    }


def check_unchanged(sampler: Sampler, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Refuse a sampler that changed in a draw that raised."""
    for name, value in before.items():
        # Rows that it had not seen may have entered.
        entered = name == "priorities" and "priorities" not in value
        if not entered and not equal(value, after[name]):
            raise ContractError(
                f"its {name} was {value!r:.80} before a draw that raised, and "
                f"{after[name]!r:.80} after it. Change what a draw depends on after "
                "the last error, and put parts back by all_or_nothing of "
                "mmreplay.samplers.holding"
            )


def goes_through_epochs(case: SamplerCase) -> None:
    """With an `epoch`, `num_batches` draws end it and `more` says so."""
    sampler = case.sampler()
    if not traits_of(sampler).ends:
        return
    with case.buffer() as buffer:
        for _ in range(2):
            number, count, steps = sampler.epoch, 0, []
            expected = sampler.num_batches(buffer.view, 6)
            while sampler.epoch == number and sampler.more(buffer.view, 6):
                draw = sampler.draw(buffer.view, 6)
                steps += steps_of(draw)
                count += 1
            if count != expected:
                raise ContractError(
                    f"epoch {number} had {count} batches, num_batches returned "
                    f"{expected}. Return the batches of the whole epoch"
                )
            if sampler.epoch == number:
                raise ContractError(
                    f"epoch is {number} after {count} of {expected} batches, and more "
                    "returned False. Count the epoch when its last batch is drawn"
                )
            twice = len(steps) - len(set(steps))
            if traits_of(sampler).once and not case.windows and twice:
                raise ContractError(
                    f"epoch {number} drew {twice} steps twice. Draw each legal start "
                    "once, or set draws_once = False"
                )


def is_what_its_traits_say(case: SamplerCase) -> None:
    """What `traits` say of it before it draws is true of its draws.

    Of a sampler of others that declares none, the defaults are. What they leave open,
    such as the form of its draws, is not checked.
    """
    with case.buffer() as buffer:
        view = buffer.view
        sampler = case.sampler(2)
        traits = traits_of(sampler)
        for _ in range(4):
            draw = case.draw(sampler, view, 9)
            if draw is not None:
                check_form(draw, traits)
                check_distinct(draw, traits)
        if traits_of(sampler) != traits:
            raise ContractError(
                f"traits were {traits} before it drew, and are {traits_of(sampler)} "
                "now. Let them follow from the arguments alone"
            )
        ended = not ask(case.sampler(2), "more")(view, 9)
        if ended and not traits.ends:
            raise ContractError(
                "more returned False before the first draw, and traits.ends is False. "
                "Declare epochs: an epoch that counts, more and num_batches"
            )
        if traits.ends and not traits.epochs:
            raise ContractError(
                "traits.ends is True, and traits.epochs False. Epochs that end are epochs"
            )
        if not traits.memory:
            check_without_memory(case, view)


def check_form(draw: Draw, traits: Traits) -> None:
    """Refuse a draw of another form than the traits say."""
    form, windows = traits.form, draw.windows
    if form is None:
        return
    got = STEPS
    if draw.offsets is not None:
        got = form if form in (RAGGED, GROUPS) else RAGGED
    elif windows is not None:
        got = f"windows of {windows.positions.shape[1]} steps"
        got = PADDED if form == PADDED else got
    if got != form:
        raise ContractError(f"it drew {got}, and traits.form is {form!r}. Say what a draw holds")
    if windows is None or form == PADDED:
        return
    first_only = tuple(sorted(set(windows.first_only)))
    drawn_as = windows.positions.shape[1], first_only
    if drawn_as != (traits.window_length, traits.first_only):
        raise ContractError(
            f"it drew windows of {drawn_as[0]} steps with first_only={first_only}, and "
            f"the traits say {traits.window_length} and {traits.first_only}. Let them "
            "follow from the arguments"
        )


def check_distinct(draw: Draw, traits: Traits) -> None:
    """Refuse a step twice in a batch where the traits say that there is none."""
    twice = len(draw) - len(set(steps_of(draw)))
    if traits.distinct and twice:
        raise ContractError(
            f"a batch has {twice} steps twice, and traits.distinct is True. Draw "
            "without replacement, or say that it does not"
        )


def check_without_memory(case: SamplerCase, view: View) -> None:
    """Refuse draws that follow from the sizes of earlier ones."""
    found = []
    for size in (2, 5):
        sampler = case.sampler(2)
        for _ in range(3):
            case.draw(sampler, view, size)
        found.append(drawn(case.draw(sampler, view, 7)))
    if found[0] != found[1]:
        raise ContractError(
            f"after three draws of 2 steps it drew {first_steps(found[0])}, and after "
            f"three of 5 {first_steps(found[1])}, and traits.memory is False. Say that "
            "a draw depends on what earlier ones drew"
        )


JOINT_KIND = "many environments"
JOINT_ENVS = ((0, 1), (2,), (3, 4))
"""Environments of each of several buffers, which together have those of one."""
JOINT_BATCHES, JOINT_SIZE = 600, 64
SIGMAS = 6.0
"""Counts of two samples of one law differ by less, in standard deviations: by chance
they do in one of 5 * 10**8 comparisons. The variance of a count is at most that of
independent draws, as strata only lower it."""


def joint_draws_as_alone(case: SamplerCase) -> None:
    """Several buffers as one are drawn from as one buffer with all of their rows.

    Where `traits.divides` says so: by shares with equal probabilities, weights and
    windows, and each step as often; by ranks each step once. The steps drawn are not
    the same, since a plan over several buffers takes other random numbers.
    """
    traits = traits_of(case.sampler())
    if not traits.in_shares and not traits.in_ranks:
        return
    kinds, capacity = KINDS[JOINT_KIND]
    with case.buffer(JOINT_KIND) as whole, ExitStack() as stack:
        buffers = [
            stack.enter_context(
                make_buffer(case.folder / f"part {n}", [kinds[e] for e in envs], capacity)
            )
            for n, envs in enumerate(JOINT_ENVS)
        ]
        views = [buffer.view for buffer in buffers]
        sampler, samplers = case.sampler(3), [case.sampler(3) for _ in buffers]
        if traits.in_ranks:
            check_ranks(sampler, whole.view, samplers, views)
            return
        if traits.priorities:
            firsts = [0, *(envs[0] for envs in JOINT_ENVS)]
            for each, view, first in zip(
                [sampler, *samplers], [whole.view, *views], firsts, strict=True
            ):
                ids, positions = view.start_at(np.arange(len(legal_starts(view))))
                values = (1.0 + ids + first) * (1.0 + positions % 7)
                ask(each, "update_priorities")(view, ids, positions, values)
        alone, joint = DrawProbabilities("one buffer"), DrawProbabilities("several buffers as one")
        random = np.random.default_rng(11)
        for step in range(JOINT_BATCHES):
            mass = ask(sampler, "mass")(whole.view, step)
            draw = case.draw(sampler, whole.view, JOINT_SIZE)
            if draw is None:
                return
            weights = ask(sampler, "joint_weights")(step, [mass]).of(draw.probabilities)
            alone.note(draw, weights)
            shares = random.random(JOINT_SIZE)
            for one in drawn_as_one(samplers, views, step, shares):
                joint.note(one, one.weights)
        alone.compare(joint)


def drawn_as_one(
    samplers: Sequence[Sampler], views: Sequence[View], step: int, numbers: NDArray[np.float64]
) -> list[Draw]:
    """The draws of a batch from several buffers as from one, of each that has steps.

    Args:
        samplers: The sampler of each.
        views: Of each, with the environments of `JOINT_ENVS`.
        step: The batch's.
        numbers: float64 ``[B]``, in ``[0, 1)``.
    """
    masses = [ask(part, "mass")(view, step) for part, view in zip(samplers, views, strict=True)]
    points = ask(samplers[0], "points")(numbers)
    plan = DrawPlan.of(np.array([each.total for each in masses]), points)
    drawn = []
    for number, shares in enumerate(plan.shares):
        if len(shares):
            draw: Draw = ask(samplers[number], "draw_at")(views[number], shares.copy())
            draw.env_ids = draw.env_ids + JOINT_ENVS[number][0]
            draw.probabilities = draw.probabilities * plan.fractions[number]
            drawn.append(draw)
    every = np.concatenate([draw.probabilities for draw in drawn])
    weights = ask(samplers[0], "joint_weights")(step, masses).of(every)
    stops = np.cumsum([len(draw) for draw in drawn])[:-1]
    for draw, own in zip(drawn, np.split(weights, stops), strict=True):
        draw.weights = own
    return drawn


class DrawProbabilities:
    """How often each step was drawn, with which probability, and in which window.

    Attributes:
        source: What was drawn from, for messages.
    """

    def __init__(self, source: str) -> None:
        """Begin without a draw."""
        self.source = source
        self._counts: Counter[Step] = Counter()
        self._probabilities: dict[Step, float] = {}
        self._windows: dict[Step, object] = {}

    def note(self, draw: Draw, weights: NDArray[np.float32]) -> None:
        """Note a draw, whose weights have to be those given."""
        if not np.allclose(draw.weights, weights, rtol=1e-4):
            raise ContractError(
                f"weights of a draw from {self.source} are {draw.weights[:3].tolist()}..., "
                f"and joint_weights says {weights[:3].tolist()}.... Let both say the same"
            )
        steps = steps_of(draw)
        self._counts.update(steps)
        self._probabilities.update(zip(steps, draw.probabilities.tolist(), strict=True))
        windows = draw.windows
        if windows is not None:
            for at, step in enumerate(steps):
                if step not in self._windows:
                    mask = windows.mask[at]
                    self._windows[step] = windows.positions[at][mask].tolist(), mask.tolist()

    def compare(self, other: DrawProbabilities) -> None:
        """Refuse another law.

        Raises:
            ContractError: Probabilities, frequencies or windows differ.
        """
        for step in sorted({*self._counts, *other._counts}):
            where = f"position {step[1]} of environment {step[0]}"
            mine, theirs = self._counts[step], other._counts[step]
            if abs(mine - theirs) > SIGMAS * (mine + theirs) ** 0.5 + SIGMAS:
                raise ContractError(
                    f"{where} was drawn {mine} times from {self.source} and {theirs} times "
                    f"from {other.source}. Let mass and draw_at have the law of draw, or "
                    "say divides = ALONE"
                )
            if step not in self._probabilities or step not in other._probabilities:
                continue
            mine_p, theirs_p = self._probabilities[step], other._probabilities[step]
            if not np.isclose(mine_p, theirs_p, rtol=1e-5):
                raise ContractError(
                    f"{where} has probability {mine_p:g} in {self.source} and {theirs_p:g} in "
                    f"{other.source}. Let draw_at give those of its own buffer, and mass "
                    "the sum that they are of"
                )
            if self._windows.get(step) != other._windows.get(step):
                raise ContractError(
                    f"{where} has the window {self._windows.get(step)} in {self.source} and "
                    f"{other._windows.get(step)} in {other.source}. Lay the same in draw_at"
                )


def check_ranks(
    sampler: Sampler, view: View, samplers: Sequence[Sampler], views: Sequence[View]
) -> None:
    """Refuse ranks that do not draw each step of an epoch once."""
    drawn: Counter[Step] = Counter()
    for part, own, envs in zip(samplers, views, JOINT_ENVS, strict=True):
        total = int(ask(part, "mass")(own, 0).total)
        if total:
            shares = (np.arange(total) + 0.5) / total
            draw = ask(part, "draw_at")(own, shares)
            drawn.update(pairs(draw.env_ids + envs[0], draw.positions))
    total = int(ask(sampler, "mass")(view, 0).total)
    shares = (np.arange(total) + 0.5) / total
    epoch = Counter(steps_of(ask(sampler, "draw_at")(view, shares)))
    if drawn != epoch or max(epoch.values()) > 1:
        raise ContractError(
            f"all ranks of several buffers drew {len(drawn)} steps, {drawn.total()} times, "
            f"and those of one buffer {len(epoch)}, {epoch.total()} times. Let each rank of "
            "draw_at be another step of the epoch"
        )


def updates_priorities(case: SamplerCase) -> None:
    """Priorities are set by position, all of a batch or none, or are refused."""
    with case.buffer() as buffer:
        view, sampler = buffer.view, case.sampler(9)
        draw = case.draw(sampler, view, 12)
        if draw is None or draw.offsets is not None:
            return
        ids, positions = draw.env_ids, draw.positions
        if not traits_of(sampler).priorities:
            update = getattr(sampler, "update_priorities", None)
            if update is not None:
                expect_refusal(
                    partial(update, view, ids, positions, np.ones(len(ids))),
                    SchemaError,
                    "priorities of a sampler whose keeps_priorities is False",
                )
            return
        check_updates(case, sampler, buffer, draw)


def check_updates(case: SamplerCase, sampler: Any, buffer: ReplayBuffer, draw: Draw) -> None:
    """Check what `update_priorities` takes, drops and refuses."""
    view, ids, positions = buffer.view, draw.env_ids, draw.positions
    values = np.linspace(0.5, 2.0, len(ids))
    dropped = sampler.update_priorities(view, ids, positions, values)
    if dropped != 0:
        raise ContractError(
            f"update_priorities returned {dropped} for {len(ids)} steps that are all "
            "alive. Return how many were overwritten since they were drawn"
        )
    state = deepcopy(state_of(sampler, priorities=True))
    ahead = positions.copy()
    ahead[-1] = view.span.stop[ids[-1]] + 5
    nan = np.where(values > 1, np.nan, values)
    for wrong, at, kind, what in (
        (-values, positions, SchemaError, "negative priorities"),
        (nan, positions, SchemaError, "priorities that are NaN"),
        (values + 1, ahead, StaleError, "priorities of a position never written"),
    ):
        update = partial(sampler.update_priorities, view, ids, at, wrong)
        expect_refusal(update, kind, what)
        if not equal(state_of(sampler, priorities=True), state):
            raise ContractError(
                f"an update with {what} was refused and changed the priorities. Check "
                "all values before any is set"
            )
    for _ in range(3):
        after = case.draw(sampler, view, 40)
        check_steps(after, view, "a buffer with priorities", windows=case.windows)
    saved = stored(state_of(sampler, priorities=True))
    compare_loaded(case, sampler, saved, buffer, 4)
    newest = int(ids[0])
    add_steps(buffer, newest, "." * (buffer.capacity + 20))
    lost = int((ids == newest).sum())
    dropped = sampler.update_priorities(buffer.view, ids, positions, values)
    if dropped != lost:
        raise ContractError(
            f"update_priorities returned {dropped} where {lost} of {len(ids)} steps "
            "were overwritten since they were drawn. Drop those, set the others, and "
            "return the number dropped"
        )
    for _ in range(3):
        after = case.draw(sampler, buffer.view, 40)
        check_steps(after, buffer.view, "a buffer", windows=case.windows)


def expect_refusal(call: Callable[[], object], kind: type[Exception], what: str) -> None:
    """Expect an error of a kind."""
    try:
        result = call()
    except kind:
        return
    except Exception as error:
        raise ContractError(
            f"{what} raised {type(error).__name__} ({error}). Raise mmreplay.{kind.__name__}"
        ) from error
    raise ContractError(
        f"{what} were accepted, and {result!r} was returned. Raise mmreplay.{kind.__name__}"
    )


RULES = by_name(
    draws_the_promised_arrays,
    draws_legal_starts,
    draws_every_legal_start,
    refuses_an_empty_view,
    draws_by_seed,
    draws_anew_each_time,
    leaves_global_generators_alone,
    leaves_the_view_alone,
    saves_plain_states,
    continues_from_a_state,
    refuses_foreign_states,
    refuses_damaged_states,
    copies_by_pickle,
    follows_a_writer,
    follows_a_resize,
    draws_from_restricted_views,
    gathers_what_it_drew,
    failed_draws_leave_all_as_before,
    failed_batches_leave_all_as_before,
    goes_through_epochs,
    is_what_its_traits_say,
    joint_draws_as_alone,
    updates_priorities,
)
SAMPLER_RULES = tuple(RULES)
"""Names of the rules of `check_sampler`."""


def check_sampler(
    make_sampler: Callable[[int], Any],
    folder: str | Path | None = None,
    *,
    rules: Sequence[str] | None = None,
    draws_every_start: bool = True,
    depends_on_seed: bool = True,
) -> None:
    """Check that a sampler keeps the contract of `mmreplay.samplers.base.Sampler`.

    The sampler need not derive from that class. It draws from buffers on disk: of one
    environment and of many, wrapped, with short episodes, with transforms, while rows
    are added and overwritten, after a resize, and within `split` and mixtures. What it
    does not have is not checked: epochs, priorities.

    Args:
        make_sampler: Makes a sampler from a seed; a class whose first argument is the
            seed will do.
        folder: Where buffers are made; a temporary folder by default.
        rules: Names of the rules to check, of `SAMPLER_RULES`; all by default.
        draws_every_start: False for a sampler that leaves legal starts out on purpose.
        depends_on_seed: False for a sampler that draws nothing at random.

    Raises:
        ContractError: A rule is broken. What the sampler itself raises is passed on,
            with a note that names the rule.

    Example:
        >>> from mmreplay.testing import check_sampler
        >>> check_sampler(mr.UniformSampler)
    """

    @contextmanager
    def make_case(own: Path) -> Iterator[SamplerCase]:
        case = SamplerCase(make_sampler, own, draws_every_start, depends_on_seed)
        # No power is cut here, and every buffer would wait for the device. Samplers of
        # one folder of priorities are compared: the second has them in RAM.
        with using(QuickDisk()), warnings.catch_warnings():
            warnings.simplefilter("ignore", DurabilityWarning)
            try:
                yield case
            finally:
                case.close()

    name = getattr(make_sampler, "__name__", "the sampler")
    subject = type(make_sampler(0)).__name__ if name == "<lambda>" else name
    run_rules(subject, RULES, rules, folder, make_case)

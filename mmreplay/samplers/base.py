"""What a sampler is shown and what it returns, and the base class of samplers.

`Sampler` has the defaults of what a sampler may be asked for. A sampler of a user need
not derive from it: `ask` finds the same defaults.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from mmreplay.episodes.starts import BufferIdentity as BufferIdentity
from mmreplay.episodes.starts import StartView, nothing_to_draw, num_legal
from mmreplay.errors import EmptyError, SchemaError, shown
from mmreplay.ring import position_chunks
from mmreplay.samplers.joint import DrawPlan, JointWeights, Mass
from mmreplay.samplers.random import StepGenerator
from mmreplay.schema import Schema

State = dict[str, Any]
"""JSON values and arrays."""

View = StartView
"""A buffer as a sampler sees it."""

MISSING = object()

STEPS = "single steps"
PADDED = "padded episodes"
RAGGED = "ragged episodes"
GROUPS = "groups"

SHARES = "shares"
RANKS = "ranks"
ALONE = "alone"
DIVIDES = (SHARES, RANKS, ALONE)


@dataclass(frozen=True, slots=True)
class Traits:
    """What a sampler is, as far as others depend on it, before anything is drawn.

    Of samplers with parts the traits of the parts count too; see `traits_of`.

    Attributes:
        form: What a draw holds, such as ``"single steps"``; None where it is not known.
        window_length: Steps of each window; None without windows of one length.
        first_only: Paths of the fields of which only a window's first step is drawn.
        ends: Its draws come in epochs that end: `Sampler.more` says when.
        epochs: It, or a part at any depth, goes through epochs.
        once: Some steps are drawn once, an epoch or for good, so that a failed batch
            must not draw others in their place.
        memory: A draw depends on what earlier ones drew, beyond their number.
        priorities: `update_priorities` reaches a sampler that keeps some.
        distinct: No step comes twice in a batch.
        divides: How several buffers are drawn from as one: by `SHARES` of the masses of
            each (`Sampler.mass`, `Sampler.draw_at`), by the `RANKS` of an epoch, each
            once, or not at all, `ALONE`.
        local: Arguments that do not matter where the rows are: learners that differ in
            these alone share a sampler there, and its priorities.
        learned: First and one past the last step of each window that learners give
            priorities to; None for all.
    """

    form: str | None = None
    window_length: int | None = None
    first_only: tuple[str, ...] = ()
    ends: bool = False
    epochs: bool = False
    once: bool = False
    memory: bool = False
    priorities: bool = False
    distinct: bool = False
    divides: str = ALONE
    local: frozenset[str] = frozenset({"seed"})
    learned: tuple[int, int] | None = None

    @property
    def in_shares(self) -> bool:
        """Whether a batch is divided by shares of masses."""
        return self.divides == SHARES

    @property
    def in_ranks(self) -> bool:
        """Whether an epoch is divided by the ranks of its steps."""
        return self.divides == RANKS

    @property
    def shape(self) -> str | None:
        """The form, and which fields windows hold of their first step alone."""
        if self.form is None or not self.first_only:
            return self.form
        return f"{self.form} with first_only={sorted(self.first_only)}"


@dataclass(frozen=True, slots=True)
class Windows:
    """The steps of each window of a draw, T of them.

    Attributes:
        positions: int64 ``[B, T]``, a step each, none before the one to its left; where
            mask is false, also one that stands in for a step that is not there.
        mask: bool ``[B, T]``, true where the step belongs to the window and is a legal
            start. False, too, at a step of an ended episode whose next observation is
            unknown.
        is_first: bool ``[B, T]``, true where an episode begins, false where mask is;
            None where it was not asked for. Batches hold it as a field.
        first_only: Paths of the fields of which only the first step of each window is
            wanted, ``[B, *shape]``.
    """

    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    is_first: NDArray[np.bool_] | None = None
    first_only: tuple[str, ...] = ()

    def taken(self, places: NDArray[np.int64]) -> Windows:
        """Return the windows of these indices, int64 ``[N]`` in ``[0, B)``."""
        firsts = self.is_first
        return Windows(
            self.positions[places],
            self.mask[places],
            None if firsts is None else firsts[places],
            self.first_only,
        )

    @staticmethod
    def joined(windows: Sequence[Windows]) -> Windows:
        """Put windows one after the other.

        Args:
            windows: At least one, all equally long. ``is_first`` is kept where all
                have it, and `first_only` is that of the first.
        """
        firsts = [w.is_first for w in windows if w.is_first is not None]
        return Windows(
            np.concatenate([w.positions for w in windows]),
            np.concatenate([w.mask for w in windows]),
            np.concatenate(firsts) if len(firsts) == len(windows) else None,
            windows[0].first_only,
        )


@dataclass(slots=True)  # frozen, each costs half a microsecond more
class Draw:
    """Steps, or windows of steps, drawn from a buffer.

    Attributes:
        env_ids: int64 ``[B]``, in ``[0, num_envs)``.
        positions: int64 ``[B]``, within the span that the sampler saw; of windows the
            first step to learn from, which burn-in may precede.
        probabilities: float64 ``[B]``, of each step under the sampler.
        weights: float32 ``[B]``, importance weights; ones without importance sampling.
        key: In ``[0, 2**64)``, seed of this draw's random transforms: a draw gathered
            in another process gives the same batch.
        windows: None where each draw is one step.
        offsets: int64 ``[N + 1]`` where the steps are those of N episodes one after
            another: where each begins, and B; else None.
        buffer: uuid of the buffer it is of, where a dataset's draws made it; or b"".
        mask: bool ``[B]`` where the steps are those of episodes of a buffer that
            derives next observations: true where a step is a legal start; else None.

    Example:
        >>> buffer = mr.ReplayBuffer.open("runs/cartpole")
        >>> draw = mr.UniformSampler(seed=0).draw(buffer.view, 32)
        >>> draw.positions.shape
        (32,)
        >>> buffer.gather(draw)["reward"].shape
        (32,)
    """

    env_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    weights: NDArray[np.float32]
    key: int = 0
    windows: Windows | None = None
    offsets: NDArray[np.int64] | None = None
    buffer: bytes = b""
    mask: NDArray[np.bool_] | None = None

    def __setstate__(self, state: tuple[None, State]) -> None:
        """Restore a pickle, also of a draw that knew no mask."""
        self.mask = None
        for name, value in state[1].items():
            setattr(self, name, value)

    def __len__(self) -> int:
        """Steps, or windows, drawn."""
        return len(self.positions)

    def taken(self, places: NDArray[np.int64]) -> Draw:
        """Return some steps, or windows, of this draw.

        Args:
            places: int64 ``[N]``, in ``[0, B)``.
        """
        windows = self.windows
        return Draw(
            self.env_ids[places],
            self.positions[places],
            self.probabilities[places],
            self.weights[places],
            self.key,
            None if windows is None else windows.taken(places),
            buffer=self.buffer,
            mask=None if self.mask is None else self.mask[places],
        )

    def around(self, windows: Windows) -> Draw:
        """Return this draw with windows around its steps.

        Args:
            windows: Of T rows each, ``[B, T]``.
        """
        return Draw(
            self.env_ids,
            self.positions,
            self.probabilities,
            self.weights,
            self.key,
            windows,
            buffer=self.buffer,
        )


class Sampler(Protocol):
    """Chooses steps; the base class of samplers, with the defaults of most.

    A draw is a function of (seed, step) and of the view: the same seed over the
    same buffer gives the same draws, and `state_dict` brings them back.

    A sampler of your own needs `draw`, `state_dict` and `load_state_dict`, and one that
    keeps priorities `update_priorities`. It may derive from this class, and behaves
    the same where it does not. One that derives from it may have `mass` and `draw_at`
    in place of `draw`: see `draw`.

    What it is, others read from `traits`, before it draws. By default they follow from
    the attributes here, and from those of its parts.

    Attributes:
        epoch: Epochs gone through; None for a sampler that has no epochs.
        draws_once: Whether some steps are drawn once an epoch only, so that a failed
            batch must not draw others in their place; None: whether it has epochs.
        keeps_priorities: Whether `update_priorities` takes any; None: whether there is
            such a method.
        distinct: Whether no step comes twice in a batch, as of `DistinctSampler`. A
            sampler that makes a batch of several draws keeps to it.
        form: What it draws, if not single steps: samplers of one batch must agree.
        parts: The samplers that it draws with.
        looked_up: Path of the integer field that it looks rows up by; a buffer without
            it refuses the sampler at once.
        divides: See `Traits`; `SHARES` of a class without a `draw` of its own. Else it
            holds for the `draw` of the class that says it, and of a class that replaces
            `draw` and says nothing it is `ALONE`, unless it keeps priorities: by those
            it is drawn then.
        described: It may be made again of its class and `settings` in a process that
            another one asks to draw.
        only_starts: A draw reads nothing of the rows but which are legal starts, and
            stores nothing, or what it stores can be read without it.
        where: Where it stores what it keeps of rows: ``"disk"``, or ``"RAM"`` and why;
            None before the first draw, and of one that stores nothing.
    """

    epoch: int | None = None
    draws_once: bool | None = None
    keeps_priorities: bool | None = None
    distinct: bool = False
    form: str | None = None
    parts: Sequence[Sampler] = ()
    looked_up: str | None = None
    divides: str = SHARES
    described: bool = True
    only_starts: bool = True
    where: str | None = None
    _random: StepGenerator | None = None
    _step: int = 0

    def __init_subclass__(cls) -> None:
        """Take defaults where a class replaces the constructor or the state alone."""
        super().__init_subclass__()
        if "__init__" in vars(cls) and "settings" not in vars(cls):
            cls.settings = Sampler.settings  # type: ignore[method-assign]  # of this class
        # A bookmark of the class that it extends lacks what it adds to the state.
        holders = list(enumerate(cls.__mro__))
        first = {name: number for number, each in reversed(holders) for name in vars(each)}
        if min(first["state_dict"], first["load_state_dict"]) < first["bookmark"]:
            cls.bookmark = Sampler.bookmark  # type: ignore[method-assign]  # of this class
            cls.return_to = Sampler.return_to  # type: ignore[method-assign]  # of this class

    @property
    def traits(self) -> Traits:
        """What it is; see `Traits`."""
        return declared_traits(self)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch.

        By default what `mass` and `draw_at` say of this buffer alone, by the generator
        ``_random`` and at the step ``_step``, which a sampler sets when it is made.

        Args:
            view: The buffer now.
            batch_size: Steps to draw, at least 1.

        Raises:
            EmptyError: There is no legal start.
        """
        random, step = self._random, self._step
        if random is None:
            raise TypeError(
                f"{type(self).__name__} needs a draw method, or a generator of its own. "
                "Set self._random = StepGenerator(seed) where it is made."
            )
        mass = self.mass(view, step)
        if not mass.num_legal:
            raise nothing_to_draw(view, batch_size)
        if not mass.total > 0:
            raise EmptyError(
                f"cannot draw {batch_size} steps: all {mass.num_legal} legal starts have "
                "mass 0. Add steps that can be drawn."
            )
        totals = np.array([mass.total])
        plan = DrawPlan.of(totals, self.points(random.shares(step, batch_size)))
        drawn = self.draw_at(view, plan.shares[0])
        drawn.weights = self.joint_weights(step, [mass]).of(drawn.probabilities)
        drawn.key = random.key(step)
        self._step += 1
        return drawn

    def mass(self, view: View, step: int) -> Mass:
        """Return what there is to draw from; by default each legal start has mass 1.

        Args:
            view: The buffer now.
            step: The draw's, for exponents that follow a schedule.
        """
        # Before the number of those that are not legal, which follows from the look.
        count = int(view.starts.lengths.sum()) - view.num_illegal
        return Mass(float(count), count, 1.0, 0.0)

    def draw_at(self, view: View, shares: NDArray[np.float64]) -> Draw:
        """Draw the steps that shares fall on; `draw` is not affected.

        Args:
            view: The buffer now.
            shares: float64 ``[B]`` in ``[0, 1)``, of the mass; may be written into.

        Returns:
            In the order of the shares, with the probabilities of this buffer alone;
            weights are ones, and the key is 0. By default legal starts by rank.

        Raises:
            EmptyError: There is no mass.
        """
        count = int(view.starts.lengths.sum()) - view.num_illegal
        if count < 1:
            raise nothing_to_draw(view, len(shares))
        # The product of a number below 1 can round up to the count.
        ranks = np.minimum((shares * count).astype(np.int64), count - 1)
        env_ids, positions = view.start_at(ranks)
        ones = np.ones(len(ranks), np.float32)
        return Draw(env_ids, positions, np.full(len(ranks), 1.0 / count), ones)

    def enter_at(self, priority: float) -> None:
        """Have rows that are first seen from now on enter at least at a priority."""
        return

    def points(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Points of batches in ``[0, 1)``: by default the numbers as they are.

        Args:
            numbers: float64 ``[B]``, in ``[0, 1)`` and independent, or ``[N, B]`` of
                several batches.
        """
        return numbers

    def joint_weights(self, step: int, masses: Sequence[Mass]) -> JointWeights:
        """Weights of a batch drawn from several buffers as one; ones by default.

        Args:
            step: The batch's.
            masses: Of each buffer.
        """
        return JointWeights(0.0, 1.0)

    def settings(self) -> dict[str, Any]:
        """The arguments of the call that makes it again, by name.

        By default those of the constructor, each an attribute of that name, or of that
        name with an underscore before it.

        Raises:
            SchemaError: There is no such attribute.
        """
        found: dict[str, Any] = {}
        for name, parameter in inspect.signature(type(self)).parameters.items():
            value = getattr(self, name, getattr(self, f"_{name}", MISSING))
            if value is MISSING and name == "seed" and self._random is not None:
                value = self._random.given_seed
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                value = MISSING
            if value is MISSING:
                raise SchemaError(
                    f"{type(self).__name__} must say with which {name} it was made, and "
                    "has no such attribute. Define settings(), or keep the argument."
                )
            found[name] = value
        return found

    @property
    def joint_settings(self) -> dict[str, Any]:
        """What has to be equal in buffers that are drawn from as one; see `concat`."""
        parts = ask(self, "parts")
        own = {
            name: value
            for name, value in ask(self, "settings")().items()
            if name != "seed" and not any(value is part for part in parts)
        }
        for part in parts:
            own |= ask(part, "joint_settings")
        return own

    def num_starts_of(self, view: View) -> int:
        """Legal starts of a view that it draws from: of windows and episodes theirs."""
        return num_legal(view)

    def bookmark(self) -> Any:
        """Where it is now, for `return_to` in this process: cheaper than its state."""
        return self.state_dict()

    def return_to(self, bookmark: Any) -> None:
        """Go back to where it was; draws since then handed nothing out.

        Args:
            bookmark: What `bookmark` of this sampler returned.
        """
        self.load_state_dict(bookmark)

    def can_draw(
        self, view: View, env_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which legal starts it may draw, or begin a window or an episode at.

        All by default. What a sampler that goes through epochs drew in this one counts.

        Args:
            view: The buffer now.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, legal starts of the view.

        Returns:
            bool ``[B]``.
        """
        return np.ones(len(positions), bool)

    def more(self, view: View, batch_size: int) -> bool:
        """Whether this epoch has another batch; where not, the epoch is over.

        Draws do not end by themselves: a draw after the last batch of an epoch begins
        the next one. Without epochs there is always another batch.

        Raises:
            EmptyError: There is no legal start.
        """
        return True

    def num_batches(self, view: View, batch_size: int) -> int:
        """Batches of the whole of this epoch.

        Raises:
            EmptyError: There is no legal start.
            TypeError: It has no epochs.
        """
        raise TypeError(
            f"num_batches needs a sampler with epochs, got {type(self).__name__}. Use "
            "a ShuffledSampler."
        )

    def check_priorities(
        self,
        view: View,
        env_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> None:
        """Refuse what `update_priorities` would refuse, and set nothing."""
        return

    def generators(self) -> Sequence[StepGenerator]:
        """Its own random generators, without those of its parts."""
        random: StepGenerator | None = ask(self, "_random")
        return () if random is None else (random,)

    def state_dict(self) -> State:
        """Everything needed to continue exactly here."""

    def load_state_dict(self, state: State) -> None:
        """Continue from a state.

        Raises:
            FormatError: It is another sampler's, or not a state at all.
        """

    def close(self) -> None:
        """Release what it holds, such as stored priorities; a draw opens it again."""
        return


def ask(sampler: object, name: str) -> Any:
    """Return an attribute or method of a sampler, or the default of `Sampler`."""
    value = getattr(sampler, name, MISSING)
    if value is MISSING:
        value = getattr(Sampler, name)
        if isinstance(value, property):
            return value.__get__(sampler)
        return MethodType(value, sampler) if isinstance(value, FunctionType) else value
    return value


def innermost(sampler: Sampler) -> Sampler:
    """The sampler that draws the steps which those around it only narrow or lay out."""
    while len(parts := ask(sampler, "parts")) == 1:
        sampler = parts[0]
    return sampler


def replaces_draw(kind: type) -> bool:
    """Whether a class replaces the `draw` of the class that says how it is divided."""
    for each in kind.__mro__:
        if "divides" in vars(each):
            return False
        if "draw" in vars(each):
            break
    return True


def declared_divides(sampler: Sampler) -> str:
    """How a sampler's batches are divided, by what its class says of its `draw`."""
    kind = type(sampler)
    says = next((each for each in kind.__mro__ if "divides" in vars(each)), Sampler)
    if replaces_draw(kind):
        # By priority it is drawn by those that it keeps, whichever way it draws alone.
        by_default = getattr(says, "draw", Sampler.draw) is Sampler.draw
        if by_default or not keeps_priorities(sampler):
            return ALONE
    own = ask(sampler, "divides")
    return own if isinstance(own, str) and own in DIVIDES else ALONE


def num_left_out(sampler: Sampler | None, view: View) -> int:
    """Count the rows alive that a sampler does not draw, nor begin an item at: O(rows).

    Args:
        sampler: Of the buffer; None for one that draws each legal start.
        view: The buffer now; its lock is held.
    """
    starts = view.starts
    alive = int(view.span.lengths.sum())
    if sampler is None:
        return alive - num_legal(view)
    drawn, can_draw = 0, ask(sampler, "can_draw")
    for env_ids, positions in position_chunks(view.home.ring, starts.first, starts.stop):
        legal = view.legal(env_ids, positions)
        answer = can_draw(view, env_ids[legal], positions[legal])
        drawn += int(np.count_nonzero(answer))
    return alive - drawn


def traits_of(sampler: Sampler) -> Traits:
    """What a sampler of any class is, by its own word or by the default."""
    # A user's sampler may have another attribute of that name.
    own = getattr(sampler, "traits", None)
    return own if isinstance(own, Traits) else declared_traits(sampler)


def declared_traits(sampler: Sampler) -> Traits:
    """What a sampler is by its attributes, and by the traits of its parts."""
    inner = [traits_of(part) for part in ask(sampler, "parts")]
    # A user's sampler may have another attribute of that name.
    ends = (
        ask(sampler, "epoch") is not None
        and hasattr(sampler, "more")
        and hasattr(sampler, "num_batches")
    )
    epochs = ends or any(part.epochs for part in inner)
    once = ask(sampler, "draws_once")
    if once is None:
        once = ends or any(part.once for part in inner)
    # A user's sampler may draw windows, or remember, without saying so.
    ours = type(sampler).__module__.startswith("mmreplay.")
    # Windows of its parts are its own where all have the same.
    windows = {(part.form, part.window_length, part.first_only, part.learned) for part in inner}
    _, length, first_only, learned = windows.pop() if len(windows) == 1 else (None, None, (), None)
    return Traits(
        _declared_form(sampler, inner, ours),
        length,
        first_only,
        ends,
        epochs,
        bool(once),
        epochs or bool(once) or not ours or any(part.memory for part in inner),
        keeps_priorities(sampler),
        ask(sampler, "distinct") is True,
        declared_divides(sampler),
        frozenset().union({"seed"}, *(part.local for part in inner)),
        learned,
    )


def _declared_form(sampler: Sampler, inner: Sequence[Traits], ours: bool) -> str | None:
    """What a sampler draws, by its word or by its parts."""
    form = ask(sampler, "form")
    if isinstance(form, str):
        return form
    forms = {part.form for part in inner}
    common_form = forms.pop() if len(forms) == 1 else None
    if common_form not in (None, STEPS):
        return common_form
    # Around single steps it may lay windows.
    known = ours and all(part.form == STEPS for part in inner)
    return STEPS if known else None


def keeps_priorities(sampler: Sampler) -> bool:
    """Whether a sampler draws by priorities, or has a part that does."""
    # To ask isinstance for the protocol takes 9 us, a tenth of a draw with its update.
    own = ask(sampler, "keeps_priorities")
    return hasattr(sampler, "update_priorities") and own in (None, True)


def unseeded(sampler: object, *, elsewhere: bool = False) -> str | None:
    """Name of a sampler, or of a part of it, whose seed was drawn from the system.

    A state that was loaded gives a seed.

    Args:
        sampler: Any, or anything else that draws and has generators and parts.
        elsewhere: Only those drawn in another process, of which this one is a fork.

    Returns:
        None where all seeds were given, as far as it is known.
    """
    for generator in ask(sampler, "generators")():
        if not generator.given and (not elsewhere or generator.pid != os.getpid()):
            return type(sampler).__name__
    names = (unseeded(part, elsewhere=elsewhere) for part in ask(sampler, "parts"))
    return next(filter(None, names), None)


@runtime_checkable
class PrioritySampler(Protocol):
    """A sampler that draws by priorities, or has a part that does."""

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `Sampler.draw`."""

    def state_dict(self, priorities: bool = False) -> State:
        """Everything needed to continue exactly here.

        Args:
            priorities: Include the priorities, as arrays.
        """

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Sampler.load_state_dict`."""

    def update_priorities(
        self,
        view: View,
        env_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        values: NDArray[np.generic],
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """Set the priorities of steps, or windows, that were drawn.

        Args:
            view: The buffer now.
            env_ids: int64 ``[B]``.
            positions: int64 ``[B]``, as drawn.
            values: Numbers ``[B]``, or ``[B, T]`` of the steps of windows.
            mask: bool ``[B, T]``, which of those are steps; None where all are.

        Returns:
            How many were dropped, because they have been overwritten since.

        Raises:
            SchemaError: A value is negative or NaN, or a wrapped sampler keeps no
                priorities.
            StaleError: A position was never written.
        """


def call_repr(sampler: Sampler) -> str:
    """Text of the call that makes a sampler again, by its `settings`: its `repr`.

    Those that are the constructor's default are left out where they are given by
    keyword alone, or are None. Of a class with another constructor they are those of
    the class that it derives from.
    """
    own = (None, Sampler.settings)
    kinds = type(sampler).__mro__
    kind = next(each for each in kinds if vars(each).get("settings") not in own)
    parameters = inspect.signature(kind).parameters
    arguments = []
    for name, value in vars(kind)["settings"](sampler).items():
        parameter = parameters[name]
        plain = parameter.kind is parameter.KEYWORD_ONLY or value is None
        if not (plain and value == parameter.default):
            arguments.append(f"{name}={value!r}")
    return f"{type(sampler).__name__}({', '.join(arguments)})"


def checked(sampler: object) -> Sampler:
    """Return what is a sampler.

    Raises:
        SchemaError: It is none.
    """
    needed = ("draw", "state_dict", "load_state_dict")
    if isinstance(sampler, type) or not all(
        callable(getattr(sampler, name, None)) for name in needed
    ):
        raise SchemaError(
            "sampler must have draw, state_dict and load_state_dict, got "
            f"{shown(sampler)}. Pass one such as mmreplay.UniformSampler(seed=0)."
        )
    return cast(Sampler, sampler)


def require_integer(path: str, schema: Schema) -> None:
    """Check that rows can be looked up by a field.

    Raises:
        SchemaError: There is no such field, or it is not one integer, or mutable.
    """
    field = schema[path]
    # bfloat16 is kept in integers.
    integer = field.dtype.startswith(("int", "uint"))
    if not integer or field.shape or field.mutable:
        raise SchemaError(
            f"field {path!r} must be one integer and not mutable, as rows are looked "
            f"up by it, got {field}. Name another field."
        )


def single(sampler: object, whose: str) -> Sampler:
    """Return a sampler that is to draw single steps.

    Args:
        sampler: Any object.
        whose: What it is a part of, for the message.

    Raises:
        SchemaError: It is no sampler, or draws windows or episodes.
    """
    own = checked(sampler)
    form = traits_of(own).form
    if form not in (None, STEPS):
        raise SchemaError(
            f"the sampler inside a {whose} must draw single steps, got the "
            f"{type(own).__name__}, of {form}. Pass it to the outer sampler instead, "
            "or use it alone."
        )
    return own


def alike(samplers: Sequence[object]) -> list[Sampler]:
    """Return samplers whose draws can be put into one batch, as far as is known.

    Raises:
        SchemaError: One is no sampler, or they cannot.
    """
    own = [checked(sampler) for sampler in samplers]
    traits = [traits_of(sampler) for sampler in own]
    forms = [each.form for each in traits]
    if GROUPS in forms and len(own) > 1:
        raise SchemaError(
            f"samplers that share a batch must not draw groups, got {forms}. Use the "
            "GroupSampler alone."
        )
    if RAGGED in forms and len(own) > 1:
        raise SchemaError(
            f"samplers that share a batch must not be ragged, got {forms}. Create the "
            "EpisodeSamplers with layout='padded'."
        )
    shapes = [each.shape for each in traits]
    if len({*shapes} - {None}) > 1:
        way_out = "Wrap the mixture in one SequenceSampler instead."
        if len({*forms}) == 1:
            way_out = "Give all of them the same first_only."
        raise SchemaError(
            f"samplers that share a batch must draw the same form, got {shapes}. {way_out}"
        )
    return own


def common(samplers: Sequence[Sampler]) -> str | None:
    """The form of several samplers, as `Sampler.form`; None where they differ."""
    forms = {traits_of(sampler).form for sampler in samplers}
    return forms.pop() if len(forms) == 1 and STEPS not in forms else None


def padded(windows: Sequence[Windows]) -> list[Windows]:
    """Windows as long as the longest, their last column standing in for the rest."""
    longest = max(window.positions.shape[1] for window in windows)
    return [_longer(window, longest) for window in windows]


def _longer(windows: Windows, length: int) -> Windows:
    count, width = windows.positions.shape
    firsts, none = windows.is_first, np.zeros((count, length - width), bool)
    return Windows(
        np.pad(windows.positions, ((0, 0), (0, length - width)), "edge"),
        np.hstack([windows.mask, none]),
        None if firsts is None else np.hstack([firsts, none]),
        windows.first_only,
    )

"""What a sampler draws from a buffer, without a trace in its files.

A sampler is named by text such as ``PrioritizedSampler(alpha=0.6)``. The text is parsed
and never evaluated: names are looked up in a list, arguments are literals. Stored
priorities are only read: the column's LOCK is not taken, its STATE is not written, and
no copy is made of them. Of windows and episodes the steps that they are drawn by are
shown, and their other steps are not laid out: an episode may have millions.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.buffer.statistics import stored_priorities
from mmreplay.episodes.starts import nothing_to_draw, num_legal
from mmreplay.errors import EmptyError, ReplayError, SchemaError
from mmreplay.page.priorities import BlockMasses, Weighing, written_at
from mmreplay.page.requests import BAD, TOO_LARGE, UNREADABLE, Refusal
from mmreplay.page.shown import SharedView, ShownBuffer, rows_version
from mmreplay.ring import position_chunks
from mmreplay.samplers.base import Draw, Sampler, View
from mmreplay.samplers.divided import refuse_alone
from mmreplay.samplers.episode import EpisodeSampler
from mmreplay.samplers.prioritized import PrioritizedSampler, RankPrioritizedSampler
from mmreplay.samplers.priority_distribution import MAX_ALPHA, LinearSchedule, Scheduled
from mmreplay.samplers.priority_file import StoredColumn, read_column
from mmreplay.samplers.recent import ignore_earliest
from mmreplay.samplers.sequence import SequenceSampler
from mmreplay.samplers.uniform import UniformSampler
from mmreplay.samplers.uses import UseCounter

DRAWN = 256
MAX_TEXT_LENGTH = 300
MAX_DEPTH = 6
MAX_INTEGER = 1 << 40
MAX_WINDOW = 1 << 16
"""Steps of a window: a SequenceSampler has an array of so many."""
MAX_EPISODES = 400_000
"""Of a buffer whose windows or episodes are drawn: a draw takes 100 bytes for each."""
MAX_WEIGHED_ROWS = 1 << 24
"""Of a ring whose rows are weighed within a draw, for about a second."""
MAX_RANKED_ROWS = 600_000
"""Rows of a ring that are ranked: their priorities are sorted in memory."""
LARGE_ROWS, LARGE_AGE_S = 1 << 22, 30.0
"""Of a ring of so many rows, masses of blocks are weighed again after so long."""
AGE_BINS = 40
DEFAULT_COLUMN = "prioritized"
"""Name of the samplers' own column by default."""


class ColumnSampler(PrioritizedSampler):
    """Draws what a `PrioritizedSampler` draws, by priorities that are only read.

    Attributes:
        column: The stored priorities; None where there are none.
        masses: Of the blocks of rows; weighed by the first draw if None.
    """

    column: StoredColumn | None = None
    masses: BlockMasses | None = None

    @property
    def wanted(self) -> str | None:
        """Name of the column that was asked for."""
        return self._options.name

    def weighing(self) -> Weighing:
        """How much a row counts."""
        alpha = Scheduled("alpha", self._alpha, MAX_ALPHA).at(self._step)
        initial = float(self._options.initial_priority)
        return Weighing(self.column, alpha, self._eps, initial)

    def weigh(self, view: View, lock: AbstractContextManager[Any]) -> None:
        """Weigh all rows, if they are not weighed yet; see `BlockMasses.of`."""
        if self.masses is None:
            self.masses = BlockMasses.of(view, self.weighing(), lock)

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `PrioritizedSampler.draw`.

        Raises:
            EmptyError: There is no legal start, or all of them have priority 0.
            StaleError: Every drawn row was overwritten since the rows were weighed.
        """
        count = num_legal(view)
        if count < 1:
            raise nothing_to_draw(view, batch_size)
        self.weigh(view, nullcontext())
        assert self.masses is not None
        total, options = self.masses.total, self._options
        if not np.isfinite(total):
            raise Refusal(
                BAD,
                "(priority + eps) ** alpha must be finite for all rows, and its sum "
                "overflows. Use a smaller alpha or eps.",
            )
        if not total > 0:
            raise EmptyError(
                f"cannot draw {batch_size} steps: all {count} legal starts have priority 0."
            )
        shares = self._random.shares(self._step, batch_size)
        if options.stratified:
            shares = (shares + np.arange(float(batch_size))) / batch_size
        env_ids, positions, masses, probabilities = self.masses.draw(view, self.weighing(), shares)
        scale = float(masses.min())
        if options.normalize == "mean":
            scale = total / count
        elif options.normalize == "buffer":
            scale = self.masses.lowest
        weights = (scale / masses) ** options.beta.at(self._step)
        return Draw(env_ids, positions, probabilities, weights.astype(np.float32))


class WindowStartsSampler(SequenceSampler):
    """Draws the first steps of a `SequenceSampler`'s windows."""

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `SequenceSampler.draw`."""
        what = f"windows of {self.window_length} steps"
        return self._draw_starts(view, batch_size, what, "ask for shorter windows")


class EpisodeStepsSampler(EpisodeSampler):
    """Draws the steps that an `EpisodeSampler` draws episodes by."""

    def _form(self) -> str:
        # Neither padded nor ragged: no other steps are laid out.
        return "episodes"

    def draw(self, view: View, batch_size: int) -> Draw:
        """Draw a batch; see `EpisodeSampler.draw`."""
        way_out = "let shorter, longer or running ones in"
        return self._draw_starts(view, batch_size, "episodes", way_out)


SHOWN_AS: dict[Callable[..., Any], Callable[..., Any]] = {
    PrioritizedSampler: ColumnSampler,
    SequenceSampler: WindowStartsSampler,
    EpisodeSampler: EpisodeStepsSampler,
}
"""What draws in place of a sampler, which would take locks, or lay out windows."""


def known_samplers() -> dict[str, Callable[..., Any]]:
    """What can be named: samplers of mmreplay, and those of others in this process."""
    public = import_module("mmreplay")
    named = {name: getattr(public, name) for name in public.__all__ if name.endswith("Sampler")}
    found: dict[str, Callable[..., Any]] = {"UseCounter": UseCounter, **named}
    found[ignore_earliest.__name__] = ignore_earliest
    waiting = Sampler.__subclasses__()
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if not each.__module__.startswith("mmreplay."):
            found.setdefault(each.__name__, each)
    return found


def of_others(function: Callable[..., Any]) -> bool:
    """Whether what can be named is a class outside mmreplay."""
    return isinstance(function, type) and not function.__module__.startswith("mmreplay.")


def why_not_drawn(function: Callable[..., Any]) -> str | None:
    """Say why the page does not draw from what can be named; None where it does."""
    if not getattr(function, "only_starts", True):
        return "indexes a column or counts uses"
    shown_otherwise = {*SHOWN_AS, RankPrioritizedSampler}
    if of_others(function) and not shown_otherwise.isdisjoint(getattr(function, "__mro__", ())):
        return "would lock stored priorities or lay out windows"
    return None


def stores_something(sampler: Sampler) -> bool:
    """Whether a sampler, or one inside it, has priorities or reads more than starts."""
    # Of a part that does not derive from the base class nothing is known.
    traits, parts = getattr(sampler, "traits", None), getattr(sampler, "parts", ())
    own = getattr(traits, "priorities", True) or not getattr(sampler, "only_starts", False)
    return own or any(stores_something(part) for part in parts)


@dataclass(slots=True)
class ParsedSampler:
    """The sampler that a text names.

    Attributes:
        sampler: It.
        by_column: The samplers in it that draw by stored priorities, in the order of
            the text.
        by_rank: Those in it that rank them.
        columns: The names of columns that `by_rank` ask for.
        by_episode: Windows or episodes are drawn.
        seed: What it draws with; None where no one seed says it.
        own_seed: The text gives it.
    """

    sampler: Sampler
    by_column: list[ColumnSampler]
    by_rank: list[RankPrioritizedSampler]
    columns: list[str | None]
    by_episode: bool
    seed: int | None
    own_seed: bool


class _Parser:
    """Makes one sampler of its text."""

    def __init__(self, text: str, seed: int) -> None:
        self.known = known_samplers()
        self._text = text
        self._seed = seed
        self.by_column: list[ColumnSampler] = []
        self.by_rank: list[RankPrioritizedSampler] = []
        self.columns: list[str | None] = []
        self.by_episode = False
        self.seeds: list[int | None] = []
        """Those of the text, and the page's own where it is used."""

    def make(self, node: ast.Call, depth: int = 0) -> Any:
        """Call what a call names, with its arguments."""
        name = name_of(node.func)
        function = {**self.known, LinearSchedule.__name__: LinearSchedule}.get(name)
        if function is None or depth > MAX_DEPTH or why_not_drawn(function):
            raise self.refusal(name)
        arguments = [self._value(argument, depth) for argument in node.args]
        named = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.refusal()
            named[keyword.arg] = self._value(keyword.value, depth)
        signature = inspect.signature(function)
        bound = signature.bind(*arguments, **named).arguments
        if "seed" in signature.parameters:
            if "seed" not in bound:
                named["seed"] = self._seed
            self.seeds.append(bound.get("seed", self._seed))
        if "sampler" in signature.parameters and bound.get("sampler") is None:
            # By default it would draw another batch each time.
            if "sampler" in bound and "sampler" not in named:
                raise self.refusal()
            named["sampler"] = UniformSampler(self._seed)
            self.seeds.append(self._seed)
        return self._made(function, arguments, named, bound)

    def _made(
        self,
        function: Callable[..., Any],
        arguments: list[Any],
        named: dict[str, Any],
        bound: Mapping[str, Any],
    ) -> Any:
        """Call what was named, or what is shown in its place."""
        if function is RankPrioritizedSampler:
            self.columns.append(named.get("name", DEFAULT_COLUMN))
            # In memory: a name would take the column's lock and write its state.
            named["name"] = None
        if function is SequenceSampler:
            steps = [bound.get(n, 0) for n in ("length", "burn_in", "bootstrap")]
            longest = max(n for n in (*steps, 0) if isinstance(n, int))
            if longest > MAX_WINDOW:
                raise Refusal(
                    BAD, f"Windows must have at most {MAX_WINDOW:,} steps, got {longest:,}."
                )
        made = SHOWN_AS.get(function, function)(*arguments, **named)
        if function is PrioritizedSampler:
            self.by_column.append(made)
        elif function is RankPrioritizedSampler:
            self.by_rank.append(made)
        elif function in (SequenceSampler, EpisodeSampler):
            self.by_episode = True
        elif of_others(function):
            if stores_something(made):
                raise not_drawn(function.__name__, "keeps priorities, or reads more than starts")
            # Of what says itself where steps fall nothing else is called.
            refuse_alone([made], "the page")
        return made

    def _value(self, node: ast.expr, depth: int) -> Any:
        if isinstance(node, ast.Call):
            return self.make(node, depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            if depth > MAX_DEPTH:
                raise self.refusal()
            return tuple(self._value(element, depth + 1) for element in node.elts)
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, MemoryError, RecursionError) as error:
            raise self.refusal() from error
        plain = isinstance(value, bool | float | str) or value is None
        if not plain and not (isinstance(value, int) and abs(value) <= MAX_INTEGER):
            raise self.refusal()
        return value

    def refusal(self, name: str = "") -> Refusal:
        """What is said of a text that names no sampler.

        Args:
            name: What is called, where that is the fault.
        """
        reason = why_not_drawn(self.known[name]) if name in self.known else None
        if reason is not None:
            return not_drawn(name, reason)
        drawn = [each for each, made in self.known.items() if not why_not_drawn(made)]
        known = {each.lower(): each for each in (*drawn, LinearSchedule.__name__)}
        near = difflib.get_close_matches(name.lower(), known, 1)
        if near and known[near[0]] != name:
            return Refusal(BAD, f"{name!r} is no sampler. Did you mean {known[near[0]]!r}?")
        ours = [each for each in drawn if self.known[each].__module__.startswith("mmreplay.")]
        names = [each for each in ours if each != ignore_earliest.__name__]
        return Refusal(
            BAD,
            f"{self._text!r} must be a sampler with plain arguments, such as "
            f"PrioritizedSampler(alpha=0.6). Known are {', '.join(names)}; "
            "ignore_earliest(100, UniformSampler()) leaves the oldest rows out.",
        )


def not_drawn(name: str, reason: str) -> Refusal:
    """What is said of a sampler that the page does not draw from."""
    return Refusal(
        BAD, f"The page cannot draw from {name}, which {reason}. Draw from it in Python."
    )


def name_of(node: ast.expr) -> str:
    """Return the name that an expression is, without the library's; or ``""``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id in ("mr", "mmreplay") else ""
    return node.id if isinstance(node, ast.Name) else ""


def parse_sampler(text: str, seed: int) -> ParsedSampler:
    """Make the sampler that a text names.

    Args:
        text: A call with literal arguments, such as ``"UniformSampler()"``; a name
            alone stands for a call without arguments. Arguments may be such calls.
        seed: Of samplers for which the text gives none.

    Raises:
        Refusal: The text is something else, or an argument is not legal.
    """
    if len(text) > MAX_TEXT_LENGTH:
        raise Refusal(BAD, f"A sampler must have at most {MAX_TEXT_LENGTH} characters.")
    parser = _Parser(text, seed)
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        if "never closed" in error.msg or "unmatched" in error.msg:
            raise Refusal(BAD, f"{text!r}: {error.msg}. Check the brackets.") from error
        raise parser.refusal() from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise parser.refusal() from error
    alone = not isinstance(node, ast.Call)
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    name = name_of(call.func)
    if alone and name == ignore_earliest.__name__:
        raise Refusal(
            BAD,
            f"{name} is not a sampler: it leaves the oldest rows out of one. Type, for "
            f"example, {name}(100, UniformSampler()).",
        )
    if name not in parser.known:
        raise parser.refusal(name)
    try:
        sampler: Sampler = parser.make(call)
    except (ReplayError, TypeError, ValueError, OverflowError) as error:
        raise Refusal(BAD, f"{text}: {_as_typed(str(error))}") from error
    used = parser.seeds[-1] if len(set(parser.seeds)) == 1 else None
    own_seed = used is not None and "seed=" in text.replace(" ", "")
    return ParsedSampler(
        sampler, parser.by_column, parser.by_rank, parser.columns, parser.by_episode, used, own_seed
    )


def _as_typed(text: str) -> str:
    """Return advice in names that can be typed on the page, and without functions."""
    for named, shown_as in SHOWN_AS.items():
        text = text.replace(shown_as.__name__, named.__name__)
    if text.startswith("where must be a callable"):
        return "where is a function, which cannot be typed here. Leave it out."
    return text.replace(" or a callable that maps a step to one", "")


def draw_steps(shown: ShownBuffer, text: str, seed: int) -> dict[str, Any]:
    """Draw 256 steps with a sampler, as JSON values.

    Args:
        shown: The buffer; masses of blocks of rows are kept with its results.
        text: The sampler; see `parse_sampler`.
        seed: Of the draw.

    Returns:
        ``env_ids``, ``positions``, ``probabilities``, ``weights`` and ``ages`` (rows
        since, in the step's environment) ``[N]`` each, N at most 256; histograms of
        ages: ``stored`` and ``drawn`` counts between ``edges``; ``form``, what is drawn
        by these steps, or None for the steps themselves; ``seed`` and ``own_seed``, see
        `ParsedSampler`; ``ranked``, priorities are ranked; ``legal_starts`` and
        ``legal_starts_without_next``, of the buffer.

    Raises:
        Refusal: The text names no sampler, no step can be drawn, or the ring is too
            large to rank its priorities.
    """
    parsed = parse_sampler(text, seed)
    buffer, view = shown.buffer(), shown.view_to_draw_from()
    by_priority = bool(parsed.by_column or parsed.by_rank)
    try:
        weighed = _use_columns(shown, buffer, view, text, parsed)
        num_rows = view.home.ring.num_rows
        if parsed.by_rank:
            check_ranked(num_rows, len(parsed.by_rank))
        if [parsed.sampler] != parsed.by_column and parsed.by_column:
            check_weighed(num_rows)
        with view.lock:
            view.refresh()
            if parsed.by_episode:
                check_episodes(view)
            for sampler, name in zip(parsed.by_rank, parsed.columns, strict=True):
                copy_priorities(buffer, view, sampler, name)
            draw = _draw(parsed.sampler, view, text)
            span, index = view.span, view.index
            num_legal_starts, num_steps = index.num_legal, index.num_steps
        for number, by_column in enumerate(parsed.by_column):
            if by_column.masses is not None:
                weighed[number] = by_column.masses
    except SchemaError as error:
        raise Refusal(BAD, str(error)) from error
    except LookupError as error:
        raise Refusal(UNREADABLE, str(error)) from error
    ages = span.stop[draw.env_ids] - 1 - draw.positions
    edges, stored = age_histogram(span.lengths)
    return {
        "sampler": text,
        "seed": parsed.seed,
        "own_seed": parsed.own_seed,
        "count": len(draw),
        "legal_starts": num_legal_starts,
        "legal_starts_without_next": num_steps,
        "env_ids": draw.env_ids,
        "positions": draw.positions,
        "probabilities": draw.probabilities,
        "weights": draw.weights,
        "ages": ages,
        "edges": edges,
        "stored": stored,
        "drawn": np.histogram(ages, edges)[0],
        "priorities": by_priority,
        "ranked": bool(parsed.by_rank),
        "form": parsed.sampler.form,
    }


def _draw(sampler: Sampler, view: View, text: str) -> Draw:
    try:
        return sampler.draw(view, DRAWN)
    except (ArithmeticError, TypeError, ValueError) as error:
        # Arguments that are legal one by one, such as shares whose sum overflows.
        if isinstance(error, ReplayError):
            raise
        raise Refusal(BAD, f"{text} cannot draw: {error}. Change it.") from error


def _use_columns(
    shown: ShownBuffer, buffer: ReplayBuffer, view: SharedView, text: str, parsed: ParsedSampler
) -> dict[int, BlockMasses]:
    """Give samplers their columns, and the masses that an earlier draw weighed.

    Returns:
        These masses by the number of the sampler in the text, for further draws.
    """
    if not parsed.by_column:
        return {}
    num_rows = buffer.view.home.ring.num_rows
    key = ("masses", text, written_at(buffer), rows_version(buffer))
    weighed: dict[int, BlockMasses] = shown.result(
        key, lambda _: {}, max_age_s=LARGE_AGE_S if num_rows > LARGE_ROWS else None
    ).value
    for number, sampler in enumerate(parsed.by_column):
        sampler.column = column_named(buffer, sampler.wanted)
        sampler.masses = weighed.get(number)
    with view.lock:
        view.refresh()
        count = num_legal(view)
    if [parsed.sampler] == parsed.by_column and count > 0:
        # Others are shown some of the starts, and weigh them within their draws.
        parsed.by_column[0].weigh(view, view.lock)
    return weighed


def column_named(buffer: ReplayBuffer, name: str | None) -> StoredColumn | None:
    """Return a column of stored priorities, or None where the buffer has none.

    Args:
        buffer: Open to read.
        name: Of the column; for the default one the first by name does as well.

    Raises:
        Refusal: There are others, and none of that name.
    """
    names = stored_priorities(buffer.path)
    if not names or name is None:
        return None
    if name not in names:
        if name != DEFAULT_COLUMN:
            raise Refusal(
                BAD, f"The buffer has no priorities named {name!r}. Known are {', '.join(names)}."
            )
        name = names[0]
    return read_column(buffer.view.home, name)


def check_ranked(num_rows: int, num_samplers: int) -> None:
    """Check that the priorities of a ring can be ranked in memory.

    Args:
        num_rows: Of the ring.
        num_samplers: Samplers of a text that rank them: each keeps ranks of its own.

    Raises:
        Refusal: The ring is too large for so many.
    """
    if num_rows * num_samplers > MAX_RANKED_ROWS:
        each = f" for each of {num_samplers} samplers" if num_samplers > 1 else ""
        raise Refusal(
            TOO_LARGE,
            f"Draws by rank are shown of rings of at most {MAX_RANKED_ROWS:,} rows, "
            f"and this one has {num_rows:,}{each}: ranks need all priorities sorted in "
            "memory. Use PrioritizedSampler.",
        )


def check_weighed(num_rows: int) -> None:
    """Check that all rows of a ring can be weighed within a draw.

    Raises:
        Refusal: The ring is too large.
    """
    if num_rows > MAX_WEIGHED_ROWS:
        raise Refusal(
            TOO_LARGE,
            "A PrioritizedSampler within another sampler is shown for rings of at most "
            f"{MAX_WEIGHED_ROWS:,} rows, and this one has {num_rows:,}. Use it alone.",
        )


def check_episodes(view: View) -> None:
    """Check that windows or episodes can be laid out in memory.

    Args:
        view: Of the buffer; its lock is held.

    Raises:
        Refusal: There are too many episodes.
    """
    index = view.index
    count = sum(len(index.begins(env_id)) for env_id in range(view.home.ring.num_envs))
    if count > MAX_EPISODES:
        raise Refusal(
            TOO_LARGE,
            f"Windows and episodes are drawn of at most {MAX_EPISODES:,} episodes, and "
            f"this buffer has {count:,}. Use a sampler of single steps.",
        )


def copy_priorities(
    buffer: ReplayBuffer, view: View, sampler: RankPrioritizedSampler, name: str | None
) -> None:
    """Give a sampler that ranks priorities those of a buffer, if there are any.

    Rows without one have the highest of the others, as they would enter at.

    Args:
        buffer: Open to read.
        view: Of the buffer; its lock is held.
        sampler: Keeps priorities in memory; before its first draw.
        name: Of the column.
    """
    ring, span = view.home.ring, view.span
    column = column_named(buffer, name)
    if column is None or not span.lengths.any():
        return
    chunks = list(position_chunks(ring, span.first, span.stop))
    values = [column.read(env_ids, positions) for env_ids, positions in chunks]
    entry = max(1.0, *(float(some.max()) for some in values))
    for (env_ids, positions), some in zip(chunks, values, strict=True):
        some[some < 0] = entry
        sampler.update_priorities(view, env_ids, positions, some)


def age_histogram(lengths: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Count the ages of all rows alive, without reading any.

    Args:
        lengths: int64 ``[E]``, rows alive of each environment; their ages are 0 to
            length - 1.

    Returns:
        Edges float64 ``[N + 1]`` of whole ages, and counts int64 ``[N]``.
    """
    longest = int(lengths.max(initial=1)) or 1
    width = -(-longest // AGE_BINS)
    number = -(-longest // width)
    edges = np.arange(number + 1) * width
    counts = np.array([np.clip(lengths - edge, 0, width).sum() for edge in edges[:-1]], np.int64)
    return edges.astype(np.float64) - 0.5, counts

"""Selects fields, environments, episodes or rows of a reader.

Whatever chooses episodes makes ranges of rows, and `RangesReader` reads those. Episodes
are counted environment by environment, oldest first, unfinished ones and those whose
beginning was overwritten included.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmreplay.arguments import integer, is_number, one_of
from mmreplay.convert.base import Notes, Progress, Reader
from mmreplay.convert.condition import parse
from mmreplay.convert.description import Description, refuse_new_ends
from mmreplay.convert.episode_facts import EpisodeFacts
from mmreplay.convert.ranges import RangesReader, RowRanges, select_ranges
from mmreplay.convert.staging import STAGED
from mmreplay.errors import SchemaError, shown, undone_by
from mmreplay.nesting import SEPARATOR, meant, under
from mmreplay.ring import Span
from mmreplay.schema.source_names import OwnNames
from mmreplay.splitting import deal

Bools = NDArray[np.bool_]
Ids = NDArray[np.int64]
MAX_COUNTED = 8
"""Of so many sources each step says what it left."""
SPLIT_NAME = re.compile(r"[^\W_][\w.-]{0,63}")
EpisodeNumbers = Any
"""A slice, rising integers, or a table of episodes with a column ``number``."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a source that a user selects; all of it by default.

    In this order: environments, episodes by their numbers, those that `where` holds of,
    the first of equal ones, a random share or the best of these, splits, rows of what
    is left, and fields.

    Attributes:
        fields: Paths, or subtrees.
        env_ids: int ``[N]``.
        episodes: Numbers of episodes: a slice, a list, or a table with a column
            ``number``.
        rows: Rows, counted likewise, within the other selections.
        ranges: Rows by position, in place of the other selections but fields.
        skip: Numbers of episodes to leave out, in place of `episodes`.
        where: A condition; see `mmreplay.convert.condition`.
        fraction: A share of the episodes, chosen at random.
        top: The episodes with the highest returns: a share below 1, or a number.
        seed: Of the random choices.
        unique: Leave out episodes that equal an earlier one in all their bytes.
        splits: Shares of the episodes by the names of the splits to deal them into.
    """

    fields: Sequence[str] | None = None
    env_ids: ArrayLike | None = None
    episodes: EpisodeNumbers | None = None
    rows: slice | None = None
    ranges: RowRanges | None = None
    skip: EpisodeNumbers | None = None
    where: str | None = None
    fraction: float | None = None
    top: float | None = None
    seed: int = 0
    unique: bool = False
    splits: Mapping[str, float] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What selects something, by name; the seed where there is a random choice."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.fraction is None and self.splits is None:
            del values["seed"]
        return {n: v for n, v in values.items() if v is not None and v is not False}

    @property
    def reads_fields(self) -> bool:
        """Whether episodes are chosen by fields, be these selected or not."""
        return self.where is not None or self.top is not None or self.unique

    @property
    def by_episode(self) -> bool:
        """Whether episodes are chosen."""
        by_number = (self.episodes, self.skip, self.fraction, self.top)
        return self.unique or any(
            each is not None for each in (*by_number, self.where, self.splits)
        )


@dataclass(frozen=True, slots=True)
class Origin:
    """What is read of a source.

    Attributes:
        source: The description of all its rows.
        ranges: The rows that are read; None for all.
        episodes: Episodes of the source, and those that are read; None where they were
            not counted.
    """

    source: Description
    ranges: RowRanges | None = None
    episodes: tuple[int, int] | None = None

    @property
    def rows(self) -> int:
        """Rows that are read."""
        return self.source.rows if self.ranges is None else self.ranges.rows


@dataclass(frozen=True, slots=True)
class Selected:
    """The rows that a selection takes, all of them or those of a split.

    Attributes:
        reader: Of the rows.
        origins: What it reads of each source, in their order.
    """

    reader: Reader
    origins: Sequence[Origin]


def select(
    reader: Reader, selection: Selection, progress: Progress | None = None
) -> dict[str, Selected]:
    """What is selected of a source, by the names of the splits; ``""`` without splits.

    The readers close the other one with themselves.

    Args:
        reader: Of the source.
        selection: What to read.
        progress: Called with (rows done, rows in all) where episodes are looked at.

    Raises:
        SchemaError: Something selected does not exist; the reader is closed.
    """
    counted = (selection.env_ids, selection.rows)
    others = any(each is not None for each in counted) or selection.by_episode
    description = reader.describe()
    if not others and selection.fields is None and selection.ranges is None:
        return {"": Selected(reader, [Origin(description)])}
    with undone_by(reader.close):
        check_selection(selection)
        paths = None
        if selection.fields is not None:
            paths = paths_of(description.schema.paths, selection.fields, reader.own_names())
        if selection.ranges is not None:
            if others:
                raise SchemaError(
                    "select: rows must be selected by position or by number, got both. "
                    "Leave out env_ids, episodes and rows."
                )
            ranged = select_ranges(reader, selection.ranges)
            return {"": Selected(_read(ranged, paths), [Origin(description, ranged.ranges)])}
        span = span_of(description, selection)
        ranges = RowRanges.of_span(span)
        if selection.env_ids is not None:
            reader.report.steps.append(f"env_ids leaves {ranges.rows:,} rows")
        origins = {"": Origin(description, ranges)}
        if selection.by_episode:
            reader.narrow(span)
            facts = facts_of(reader, selection, span, progress=progress)
            chosen = there(choose([facts], selection, reader.report), facts, reader, reader.report)
            ranges = facts.ranges(chosen)
            origins = {
                name: Origin(description, facts.ranges(mine), (len(facts), int(mine.sum())))
                for name, mine in divide(chosen, selection, reader.report).items()
            }
        if selection.rows is not None:
            ranges = ranges.sliced(*bounds_of("rows", selection.rows, ranges.rows))
            origins = {"": replace(origins[""], ranges=ranges, episodes=None)}
            reader.report.steps.append(f"rows leaves {ranges.rows:,} rows")
        reader.narrow(ranges.span(description.stop))
        return {
            name: Selected(_read(RangesReader(reader, origin.ranges or ranges), paths), [origin])
            for name, origin in origins.items()
        }


def paths_of(
    paths: tuple[str, ...],
    fields: Sequence[str],
    own_names: OwnNames | None = None,
    option: str = "fields",
) -> tuple[str, ...]:
    """Paths of the fields and subtrees that a user names, in schema order.

    Args:
        paths: Of all fields.
        fields: As the user named them.
        own_names: Other names of the fields, see `Reader.own_names`. One that is named
            in full is that column, whatever path has the same name.
        option: Of the user, for errors.

    Raises:
        SchemaError: A name is no field, or there is none.
    """
    several = isinstance(fields, Iterable) and not isinstance(fields, str)
    names = list(fields) if several else []
    if not names:
        raise SchemaError(
            f"fields must be a list of at least one path, got {shown(fields)}. Leave "
            "it out for all fields."
        )
    known = own_names or {}
    selected: set[str] = set()
    for name in names:
        found: set[str] = set()
        if isinstance(name, str):
            exact = [name] if name in known else [] if name in paths else under(known, name)
            found = {path for own in exact for path in known[own]}.intersection(paths)
            found.update(under(paths, name) if name not in known else ())
        if not found:
            raise _unknown(name, paths, known, option)
        selected.update(found)
    return tuple(path for path in paths if path in selected)


def _unknown(
    name: object, paths: tuple[str, ...], known: Iterable[str], option: str
) -> SchemaError:
    """The error for a name that is neither a field nor a subtree."""
    legal = {
        SEPARATOR.join(parts[:depth])
        for parts in (path.split(SEPARATOR) for path in (*paths, *known))
        for depth in range(1, len(parts) + 1)
    }
    advice = meant(name, sorted(legal - {name}), "Check the spelling.")
    return SchemaError(
        f"{option} must be fields or subtrees of {', '.join(paths[:20])}, got {shown(name)}. "
        f"{advice}"
    )


def span_of(description: Description, selection: Selection) -> Span:
    """The rows of the environments that are selected.

    Raises:
        SchemaError: One of them is none.
    """
    span = Span(description.first, description.stop)
    if selection.env_ids is None:
        return span
    mask = env_mask(description.num_envs, selection.env_ids)
    return Span(np.where(mask, span.first, span.stop), span.stop)


def env_mask(num_envs: int, env_ids: ArrayLike) -> NDArray[np.bool_]:
    """A mask of the environments that a user names, bool ``[E]``.

    Raises:
        SchemaError: They are no environments.
    """
    try:
        ids = np.asarray(env_ids)
    except ValueError:
        # Lists of several lengths; numpy's message would not help the user.
        ids = np.zeros(0)
    integers = ids.dtype.kind in "iu" and ids.ndim <= 1 and ids.size > 0
    if not integers or ids.min() < 0 or ids.max() >= num_envs:
        raise SchemaError(
            f"env_ids must be one or more integers in [0, {num_envs}), got "
            f"{shown(env_ids)}. Leave it out for all environments."
        )
    mask = np.zeros(num_envs, bool)
    mask[ids] = True
    return mask


def bounds_of(name: str, selected: slice, total: int) -> tuple[int, int]:
    """First and stop of a slice among so many items.

    Args:
        name: Of the argument, for errors.
        selected: The slice; ends beyond the items are clipped.
        total: Number of items.

    Raises:
        SchemaError: It is no slice of step 1, or selects no item.
    """
    plain = isinstance(selected, slice) and selected.step in (None, 1)
    if not plain or not all(
        end is None or type(end) is int for end in (selected.start, selected.stop)
    ):
        raise SchemaError(
            f"{name} must be a slice of step 1, such as slice(0, 100) (0:100), got "
            f"{shown(selected)}. Pass one."
        )
    first, stop, _ = selected.indices(total)
    if first >= stop and total:
        start, end = ("" if n is None else n for n in (selected.start, selected.stop))
        raise SchemaError(
            f"{name} selects none of {total}, got {start}:{end}. Select at least one."
        )
    return first, max(first, stop)


def _read(reader: RangesReader, paths: tuple[str, ...] | None) -> Reader:
    """The same reader, of some fields only."""
    if paths is not None:
        roles = reader.describe().schema.roles
        reader.keep(paths)
        refuse_new_ends(roles, reader.describe().schema, "fields")
    return reader


def check_selection(selection: Selection) -> None:
    """Refuse selections that exclude each other, and splits that are none."""
    given = {name: getattr(selection, name) is not None for name in ("episodes", "skip", "where")}
    given |= {name: getattr(selection, name) is not None for name in ("rows", "fraction", "top")}
    given["splits"] = selection.splits is not None
    pairs = (("episodes", "skip"), ("where", "rows"), ("fraction", "top"), ("splits", "rows"))
    for one, other in pairs:
        if given[one] and given[other]:
            raise SchemaError(f"{one} and {other} exclude each other. Pass one of them.")
    one_of("unique", selection.unique, (True, False))
    if selection.splits is not None:
        check_splits(selection.splits)


def there(chosen: Bools, facts: EpisodeFacts, reader: Reader, notes: Notes) -> Bools:
    """The chosen episodes that a live ring still has, bool ``[N]``.

    Args:
        chosen: bool ``[N]``.
        facts: Of the source, which was read once.
        reader: Of the source.
        notes: Counts the others.
    """
    gone = chosen & (facts.first < reader.oldest()[facts.env_ids])
    if gone.any():
        notes.note(
            f"{gone.sum():,} selected episodes were left out, as the writer overwrote rows of them"
        )
    return chosen & ~gone


def facts_of(
    reader: Reader,
    selection: Selection,
    span: Span,
    *,
    source: int = 0,
    before: int = 0,
    returns: bool = False,
    progress: Progress | None = None,
) -> EpisodeFacts:
    """What a selection asks of a source's episodes.

    Args:
        reader: Of the source.
        selection: With the condition.
        span: The rows to look at.
        source: See `EpisodeFacts`, as the next one.
        before: See there.
        returns: Sum rewards in any case, where they are numbers.
        progress: Called after each block with (rows done, rows in all).
    """
    schema = reader.describe().schema
    reward = schema.role("reward") or ""
    condition = None
    if selection.where is not None:
        condition = parse(selection.where, schema.fields, reward)
        for note in condition.notes:
            reader.report.note(f"where: {note}")
    field = schema.fields.get(reward)
    scalar = field is not None and not field.varies and math.prod(field.shape) == 1
    if selection.top is not None and not scalar:
        raise SchemaError(
            "top needs returns, and no field of one number has the role of the reward. Use where "
            "with sum(FIELD)."
        )
    return EpisodeFacts(
        reader,
        condition,
        span=span,
        returns=scalar and (returns or selection.top is not None),
        digests=selection.unique,
        source=source,
        before=before,
        progress=progress,
    )


def choose(sources: Sequence[EpisodeFacts], selection: Selection, notes: Notes) -> Bools:
    """Which episodes are selected, bool ``[N]``, of all sources one after another.

    Raises:
        SchemaError: None is, of some.
    """
    total = sum(map(len, sources))
    steps = notes.steps
    steps.append(f"the source has {total:,} episodes")
    if len(sources) > 1:
        steps[-1] = f"the {len(sources):,} sources have {total:,} episodes"
    chosen = np.ones(total, bool)
    edges = np.cumsum([0, *map(len, sources)])

    def left(by: str) -> None:
        each = [f"{chosen[first:stop].sum():,}" for first, stop in pairwise(edges.tolist())]
        of_each = f" ({', '.join(each)})" if 1 < len(each) <= MAX_COUNTED else ""
        steps.append(f"{by} leaves {chosen.sum():,}{of_each}")

    for name in ("episodes", "skip"):
        given = getattr(selection, name)
        if given is not None:
            listed = numbered(name, given, total)
            chosen &= listed if name == "episodes" else ~listed
            left(name)
    if selection.where is not None:
        truths = [facts.selected() for facts in sources]
        none = [np.zeros(len(facts), bool) for facts in sources]
        unknown = np.concatenate(
            [n if t.unknown is None else t.unknown for t, n in zip(truths, none, strict=True)]
        )
        left_out = int((chosen & unknown).sum())
        if left_out:
            notes.note(
                f"{left_out:,} episodes were left out, as NaN does not say whether where holds of "
                "them"
            )
        chosen &= np.concatenate([truth.true for truth in truths])
        left("where")
    if selection.unique:
        which = np.flatnonzero(chosen)
        digests = np.concatenate([facts.digests for facts in sources])
        first = np.unique(digests[which], return_index=True)[1]
        chosen = np.zeros(total, bool)
        chosen[which[first]] = True
        left("unique")
    if selection.fraction is not None:
        chosen = _some(chosen, selection.fraction, selection.seed)
        left("fraction")
    if selection.top is not None:
        chosen = _best(chosen, sources, selection.top, notes)
        left("top")
    if total and not chosen.any():
        raise SchemaError(f"no episode is selected: {', '.join(steps)}. Select at least one.")
    return chosen


def divide(chosen: Bools, selection: Selection, notes: Notes) -> dict[str, Bools]:
    """The chosen episodes of each split by its name, bool ``[N]`` each.

    Args:
        chosen: bool ``[N]``.
        selection: With the shares; without splits all are of the one named ``""``.
        notes: Of the result.

    Raises:
        SchemaError: A split would have no episode.
    """
    if selection.splits is None:
        return {"": chosen}
    shares = selection.splits
    which = np.flatnonzero(chosen)
    dealt = deal(len(which), [*shares.values()], integer("seed", selection.seed, 0))
    counts = ", ".join(f"{name} {len(each):,}" for name, each in zip(shares, dealt, strict=True))
    if not all(map(len, dealt)):
        raise SchemaError(
            f"each of splits must have an episode, and of {len(which):,} there would be: {counts}. "
            "Select more episodes, or fewer splits."
        )
    notes.steps.append(f"splits: {counts}")
    divided = {name: np.zeros(len(chosen), bool) for name in shares}
    for name, each in zip(shares, dealt, strict=True):
        divided[name][which[each]] = True
    return divided


def check_splits(splits: Mapping[str, float]) -> None:
    """Refuse splits without a name of a file, or whose shares are not all there is."""
    if not isinstance(splits, Mapping) or not splits:
        raise SchemaError(
            f"splits must be shares by name, got {shown(splits)}. Pass such as "
            "{'train': 0.9, 'val': 0.1}."
        )
    for name in splits:
        if not isinstance(name, str) or not SPLIT_NAME.fullmatch(name):
            raise SchemaError(
                "names of splits must be 1 to 64 letters, digits, '_', '-' or '.', and begin with "
                f"a letter or digit, got {shown(name)}. Pass such as 'train'."
            )
        if name.startswith(STAGED):
            raise SchemaError(
                f"names of splits must not begin with {STAGED!r}, got {name!r}. Such names are for "
                "unfinished targets."
            )
    shares = [*splits.values()]
    if not all(is_number(share) and 0 < share <= 1 for share in shares) or (
        abs(sum(shares) - 1) > 1e-9
    ):
        raise SchemaError(
            f"shares of splits must be above 0 and 1 together, got {shown(shares)}. Pass such as "
            "0.9 and 0.1."
        )


def numbered(name: str, selected: Any, total: int) -> Bools:
    """The episodes that a user numbers, bool ``[N]``.

    Args:
        name: Of the argument, for errors.
        selected: A slice, rising integers, or a table with a column ``number``.
        total: Number of episodes.

    Raises:
        SchemaError: It is none of these, or there is no such episode.
    """
    mask = np.zeros(total, bool)
    if isinstance(selected, slice):
        mask[slice(*bounds_of(name, selected, total))] = True
        return mask
    table = numbers_of(selected)
    try:
        numbers = np.asarray(selected if table is None else table)
    except ValueError:
        numbers = np.zeros((), object)
    if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
        raise SchemaError(
            f"{name} must be a slice, a list of integers or a table with a column 'number', got "
            f"{shown(selected)}. Pass such as slice(0, 100)."
        )
    numbers = numbers.astype(np.int64) if not numbers.size else numbers
    beyond = numbers[(numbers < 0) | (numbers >= total)]
    if len(beyond):
        raise SchemaError(
            f"{name} names episode {beyond[0]}, and the source has {total:,}. Episodes are "
            "counted from 0."
        )
    if table is None and (np.diff(numbers) <= 0).any():
        raise SchemaError(
            f"{name} must rise, as rows stay in the order in which they were written, got "
            f"{numbers[1:][np.diff(numbers) <= 0][0]} after "
            f"{numbers[:-1][np.diff(numbers) <= 0][0]}. Sort the list, each number once."
        )
    mask[numbers] = True
    return mask


def numbers_of(selected: Any) -> Any:
    """The numbers of a table of episodes; None of anything else."""
    number = getattr(selected, "number", None)
    if number is not None:
        return number
    names = selected if isinstance(selected, dict) else getattr(selected, "columns", ())
    # pyarrow has the names apart.
    names = getattr(selected, "column_names", names)
    return selected["number"] if "number" in list(names) else None


def _some(chosen: Bools, fraction: float, seed: int) -> Bools:
    """A random share of the episodes that are chosen, at least one."""
    if not is_number(fraction) or not 0 < fraction <= 1:
        raise SchemaError(
            f"fraction must be above 0 and at most 1, got {shown(fraction)}. Pass such as 0.1."
        )
    which = np.flatnonzero(chosen)
    least = 1 / max(1, len(which))
    (some,) = deal(len(which), [max(fraction, least)], integer("seed", seed, 0))
    mask = np.zeros(len(chosen), bool)
    mask[which[some]] = True
    return mask


def _best(chosen: Bools, sources: Sequence[EpisodeFacts], top: float, notes: Notes) -> Bools:
    """The whole episodes with the highest returns; of equal ones the earlier."""
    if not is_number(top) or not 0 < top < math.inf or (top >= 1 and top != int(top)):
        raise SchemaError(
            f"top must be a share below 1 or a number of episodes, got {shown(top)}. Pass such as "
            "0.1 or 30."
        )
    returns = np.concatenate([facts.returns for facts in sources])
    known = chosen & ~np.isnan(returns) & np.concatenate([facts.complete for facts in sources])
    left_out = int((chosen & ~known).sum())
    if left_out:
        notes.note(
            f"{left_out:,} episodes were left out of top: they lack their beginning, their end "
            "or a return that is a number"
        )
    which = np.flatnonzero(known)
    count = max(1, math.floor(len(which) * top + 0.5)) if top < 1 else int(top)
    order = np.argsort(-returns[which], kind="stable")
    mask = np.zeros(len(chosen), bool)
    mask[which[order[:count]]] = True
    return mask

"""The first screen: figures, findings, episodes, histograms, fields and storage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.arguments import format_size
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.episodes.rules import find_reset_rows
from mmreplay.episodes.smoothing import moving_mean, smoothing_window
from mmreplay.episodes.starts import num_legal
from mmreplay.errors import StaleError
from mmreplay.format.heap import comparable
from mmreplay.page import checks
from mmreplay.page.episodes import KIND_BROKEN, EpisodeColumns, EpisodeList, histogram_of_episodes
from mmreplay.page.frames import ImageLayout, layouts
from mmreplay.page.priorities import PriorityFacts, measure_priorities
from mmreplay.page.sample import FieldFacts, Sample, component_name, measure, take_sample
from mmreplay.page.sections import RowRepeats
from mmreplay.page.shown import ShownBuffer, last_commit
from mmreplay.page.varying import mean_nbytes, name_of
from mmreplay.schema import Field, Schema

NEWEST_EPISODES = 4096
MAX_POINTS = 2000
RESET_ROWS = 1 << 16
LISTED_ENVS = 64
"""Heads of so many environments are listed."""
Check = tuple[str, str, Callable[[], checks.Result]]
"""The arguments of `checks.run_check`."""


def make_overview(
    shown: ShownBuffer, episodes: EpisodeList, buffer: ReplayBuffer
) -> dict[str, Any]:
    """Return all but the priorities, as JSON values.

    Args:
        shown: The buffer.
        episodes: Of the buffer.
        buffer: The open buffer.
    """
    begin = time.perf_counter()
    columns, newest = episodes.newest(NEWEST_EPISODES)
    view = buffer.view
    with view.lock:
        span, index = view.span, view.index
        num_steps = index.num_steps
        shown.note_index(view)
        num_unknown = index.num_unknown_next
        num_starts = num_legal(view)
    metadata, heap = buffer.metadata, buffer.facts().heap()
    fit = None if heap is None else heap.rows_that_fit
    image_layouts = layouts(buffer, shown.images)
    sample = take_sample(buffer, span=span)
    steps = sample.steps
    roles = roles_of(buffer.schema.drawn)
    measured = _Measured(buffer, sample, roles, image_layouts)
    facts, frames = measured.facts, measured.frames
    findings: list[checks.PageFinding] = []
    for path in buffer.schema.drawn.paths if len(sample) else ():
        findings += checks.run_check(f"values of {path}", "fields", partial(measured.add, path))
    ends = columns.ends()
    heads = span.stop.tolist()
    steps_of_episodes = int(columns.lengths.sum(dtype=np.int64))
    rewards = [fact for fact in facts if fact.role == "reward"]
    longest = int(columns.lengths.max(initial=0))
    run: list[Check] = []
    if rewards or not buffer.schema.drawn.role_paths("reward"):
        run = [("rewards", "rewards", lambda: checks.check_rewards(rewards))]
    run += [
        ("not finite", "fields", lambda: checks.check_finite(facts)),
        ("never changes", "fields", lambda: checks.check_changes(facts)),
        *_by_field(
            "repeated frames",
            "fields",
            lambda fact: checks.check_repeats(fact, frames[fact.path], steps),
            [fact for fact in facts if fact.path in frames],
        ),
        (
            "repeated rows",
            "fields",
            lambda: (
                checks.check_repeated_rows(facts, measured.observed, measured.with_action, steps)
                if len(facts) == len(buffer.schema.drawn.paths)
                else None
            ),
        ),
        ("scales", "fields", lambda: checks.check_scales(facts)),
        *_by_field("clipped", "fields", checks.check_clipped, facts),
        *_by_field("saturated", "actions", checks.check_saturated, facts),
        *_by_field("one action", "actions", checks.check_one_action, facts),
        ("ends", "episodes", lambda: checks.check_ends(ends, longest)),
        ("never ends", "ends", lambda: checks.check_endless(*endless_of(columns, len(heads)))),
        (
            "dominates",
            "episodes",
            lambda: checks.check_dominates(longest, steps_of_episodes, len(columns)),
        ),
        ("heap", "storage", lambda: checks.check_heap(fit, metadata.ring.capacity)),
        ("next unknown", "storage", lambda: checks.check_unknown_next(num_unknown, num_steps)),
        ("behind", "storage", lambda: checks.check_behind(heads)),
        ("reset rows", "episodes", lambda: checks.check_reset_rows(find_reset_rows_of(buffer))),
    ]
    for name, to, check in run if len(sample) else ():
        findings += checks.run_check(name, to, check)
    if len(facts) < len(buffer.schema.drawn.paths):
        findings = _without_fine(findings)
    overview = {
        "steps": num_steps,
        "starts": num_starts,
        "rows": int(span.lengths.sum()),
        "capacity": metadata.ring.capacity,
        "num_envs": len(heads),
        "laps": max(heads) / metadata.ring.capacity,
        "heads": heads[:LISTED_ENVS],
        "written": sum(heads),
        "episodes": {"count": len(columns), "missing_start": int(columns.missing_start.sum())},
        "ends": ends,
        "returns": series_of_returns(columns, newest),
        "lengths": series_of_lengths(columns, newest),
        "histograms": histograms_of(facts, buffer.schema.drawn),
        "fields": fields_of(buffer, roles, image_layouts, facts, sample),
        "storage": storage_of(shown, buffer, num_unknown),
        "checks": [finding.to_json() for finding in checks.by_level(checks.folded(findings))],
        "sample": {"rows": len(sample), "whole": sample.complete},
    }
    overview["ms"] = round(1000 * (time.perf_counter() - begin), 1)
    return overview


class _Measured:
    """What is known of the fields of a sample that could be read.

    Attributes:
        facts: Of each field, in order.
        observed: Steps with the observation of the step before.
        with_action: Steps with its action and reward, too.
        frames: Frames that equal the one before, by the path of an image field.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        sample: Sample,
        roles: Mapping[str, str],
        images: Mapping[str, ImageLayout],
    ) -> None:
        self._buffer, self._sample = buffer, sample
        self._roles, self._images = roles, images
        self.facts: list[FieldFacts] = []
        self.observed, self.with_action = RowRepeats(sample.follows), RowRepeats(sample.follows)
        self.frames: dict[str, RowRepeats] = {}

    def add(self, path: str) -> None:
        """Read a field."""
        role, layout = self._roles[path], self._images.get(path)
        repeats = [self.with_action] if role in ("action", "reward") else []
        if role == "observation":
            repeats = [self.observed, self.with_action]
        if repeats and layout is not None:
            self.frames[path] = RowRepeats(self._sample.follows)
            repeats.append(self.frames[path])
        self.facts.append(measure(self._buffer, path, role, self._sample, layout, repeats))


def _without_fine(findings: Sequence[checks.PageFinding]) -> list[checks.PageFinding]:
    """Findings without what is fine of all fields: of some of them nothing is known."""
    of_all = ("not finite", "never changes", "scales")
    return [each for each in findings if each.level != "fine" or each.id not in of_all]


def histograms_of(facts: Sequence[FieldFacts], schema: Schema) -> dict[str, Any]:
    """Return the histograms of the components of each field, as JSON values."""
    return {
        fact.path: {
            "role": fact.role,
            "rows": fact.rows,
            "whole": fact.complete,
            "all": fact.num_components,
            "integer": fact.kind != "f",
            "varies": fact.varies,
            "components": [
                {
                    "name": component_name(name_of(fact.path, schema[fact.path]), n, fact.shape),
                    **histogram.to_json(),
                }
                for n, histogram in enumerate(fact.histograms)
            ],
        }
        for fact in facts
        if fact.histograms
    }


def _by_field(
    name: str, to: str, check: Callable[[FieldFacts], checks.Result], facts: Sequence[FieldFacts]
) -> list[Check]:
    """A check of each field: one that fails takes no other field with it."""
    return [(f"{name} of {each.path}", to, partial(check, each)) for each in facts]


def endless_of(columns: EpisodeColumns, num_envs: int) -> tuple[int, int, list[int]]:
    """Return what `checks.check_endless` asks for."""
    ended = columns.kinds < KIND_BROKEN
    open_ = columns.kinds > KIND_BROKEN
    has_end = np.zeros(num_envs, bool)
    has_end[columns.env_ids[~open_]] = True
    running = np.zeros(num_envs, np.int64)
    np.maximum.at(running, columns.env_ids[open_], columns.lengths[open_])
    running[has_end] = 0
    longest = int(columns.lengths[ended].max(initial=0))
    return longest, int(ended.sum()), running.tolist()


def make_priorities(
    buffer: ReplayBuffer, alpha: float
) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the priorities at an alpha, and what stands out of them, as JSON values.

    Args:
        buffer: The open buffer.
        alpha: Exponent of the priorities.

    Returns:
        The priorities, None where none are stored; and findings.
    """
    facts: PriorityFacts | None = None

    def check() -> checks.Result:
        nonlocal facts
        sample = take_sample(buffer)
        facts = measure_priorities(buffer, sample, alpha) if len(sample) else None
        if facts is None:
            return None
        return checks.check_priorities(facts.top_share, facts.effective, facts.common_share, alpha)

    findings = checks.run_check("priorities", "priorities", check)
    stored = None if facts is None else facts.to_json()
    return stored, [finding.to_json() for finding in findings]


def roles_of(schema: Schema) -> dict[str, str]:
    """Return the role of each field by its path, or ``""``."""
    found = dict.fromkeys(schema.paths, "")
    for role in schema.roles:
        for path in schema.role_paths(role):
            found[path] = role
    return found


def find_reset_rows_of(buffer: ReplayBuffer) -> str | None:
    """Say whether the newest rows after episode ends look like resets.

    The rule, and what is read for it, are the writer's own.
    """
    schema = buffer.schema.drawn
    if buffer.autoreset == "next_step" or not schema.role_paths("reward"):
        return None
    most = max(4, RESET_ROWS // buffer.num_envs)
    while True:
        try:
            return _find_reset_rows(buffer, most)
        except StaleError:
            # The oldest of them were overwritten: newer ones are looked at.
            if most <= 4:
                return None
            most = max(4, most // 4)


def _find_reset_rows(buffer: ReplayBuffer, num_rows: int) -> str | None:
    """Look at the newest rows of each environment, at most so many."""
    schema, view = buffer.schema.drawn, buffer.view
    span = view.span
    firsts = np.maximum(span.first, span.stop - num_rows)
    lengths = (span.stop - firsts)[:RESET_ROWS]
    env_ids = np.repeat(np.arange(len(lengths)), lengths)
    offsets = np.arange(len(env_ids)) - (np.cumsum(lengths) - lengths)[env_ids]
    positions = firsts[env_ids] + offsets
    reward = schema.role_paths("reward")[0]
    found, _ = find_reset_rows(
        buffer.flags(env_ids, positions),
        env_ids,
        lambda rows, paths: comparable(view.get_stored(paths, env_ids[rows], positions[rows])),
        reward=reward,
        numbers=partial(schema[reward].rules.numbers, schema[reward]),
        observation=schema.role_paths("observation"),
        next_observation=schema.role_paths("next_observation"),
    )
    return found


def _points(count: int) -> NDArray[np.int64]:
    """Evenly chosen numbers in ``[0, count)``, at most 2,000, the last one included."""
    if count <= MAX_POINTS:
        return np.arange(count)
    return np.linspace(0, count - 1, MAX_POINTS).astype(np.int64)


def series_of_returns(columns: EpisodeColumns, newest: NDArray[np.int64]) -> dict[str, Any]:
    """Return the newest returns in the order of their ends, with a moving mean."""
    rows = newest[np.isfinite(columns.returns[newest])]
    series = _series(columns, rows, columns.returns)
    return {**series, "count": len(rows), "total": len(columns)}


def series_of_lengths(columns: EpisodeColumns, newest: NDArray[np.int64]) -> dict[str, Any]:
    """Return the newest lengths in the order of their ends, and a histogram of all."""
    series = _series(columns, newest, columns.lengths)
    histogram = histogram_of_episodes(columns, "length").to_json()
    return {**series, "histogram": histogram}


def _series(
    columns: EpisodeColumns, rows: NDArray[np.int64], numbers: NDArray[Any]
) -> dict[str, Any]:
    """One number of each of some episodes, in the order of their ends.

    Args:
        columns: All episodes.
        rows: int64 ``[N]``, which of them.
        numbers: A number of each of all episodes.

    Returns:
        ``x`` (positions of the ends), ``y`` and ``mean`` (moving, over ``window``) of
        2,000 of them at most; ``average`` of all, ``oldest`` and ``newest`` of a
        quarter.
    """
    ends = columns.begin[rows] + columns.lengths[rows]
    order = np.argsort(ends, kind="stable")
    rows, ends = rows[order], ends[order]
    values = numbers[rows].astype(np.float64)
    window = smoothing_window(len(rows))
    means = np.full(len(rows), np.nan)
    if window > 1:
        means[window - 1 :] = moving_mean(values, window)
    some = _points(len(rows))
    quarter = -(-len(rows) // 4)
    return {
        "x": ends[some],
        "y": values[some],
        "mean": means[some],
        "window": window,
        "env_ids": columns.env_ids[rows[some]],
        "begin": columns.begin[rows[some]],
        "average": float(values.mean()) if len(values) else None,
        "oldest": float(values[:quarter].mean()) if len(values) else None,
        "newest": float(values[-quarter:].mean()) if len(values) else None,
    }


def fields_of(
    buffer: ReplayBuffer,
    roles: dict[str, str],
    image_layouts: dict[str, Any],
    facts: list[FieldFacts],
    sample: Sample,
) -> list[dict[str, Any]]:
    """Return the fields with their limits in the sample."""
    known = {fact.path: fact for fact in facts}
    found = []
    for path, field in buffer.schema.drawn.fields.items():
        fact, layout = known.get(path), image_layouts.get(path)
        entry = {
            "path": path,
            "dtype": field.rules.name(field),
            "shape": shape_of(field),
            "integer": field.rules.integers(field),
            "varies": field.rules.by_length,
            "nbytes": field.nbytes,
            "row_nbytes": field.nbytes,
            "role": roles[path],
            "mutable": field.mutable,
            "image": None if layout is None else layout.to_json(),
            "rows": 0 if fact is None else fact.rows,
        }
        stored = buffer.schema.fields[path]
        if stored.encoding is not None:
            # The references, and the files that they lead to.
            files = mean_nbytes(buffer, path, sample) if len(sample) else 0
            entry["row_nbytes"] = stored.nbytes + files
        if fact is not None:
            moments = fact.moments
            entry |= {
                "low": float(moments.min),
                "high": float(moments.max),
                "mean": float(moments.mean),
                "nan": fact.num_nan,
                "infinite": fact.num_infinite,
            }
            if field.rules.by_length:
                # The references, and the values that they lead to.
                values = float(moments.mean) * field.inner_nbytes
                entry["row_nbytes"] = field.nbytes + round(values)
            elif moments.count:
                entry["low_text"] = field.rules.label(field, moments.min)
                entry["high_text"] = field.rules.label(field, moments.max)
        found.append(entry)
    return found


def shape_of(field: Field) -> list[int | str | None]:
    """The axes of a field's rows; the varying axis with its longest length."""
    if field.varies:
        return [f"0 to {field.max_length:,}", *field.inner]
    return list(field.shape)


def storage_of(shown: ShownBuffer, buffer: ReplayBuffer, num_unknown: int) -> dict[str, Any]:
    """Return what matters for the disk: engine, sizes, commits and laps."""
    metadata, folder = buffer.metadata, buffer.folder_now()
    facts: dict[str, Any] = {
        "path": str(folder or buffer.source),
        "uuid": metadata.uuid.hex(),
        "engine": metadata.engine,
        "codec": None if metadata.sharding is None else metadata.sharding.codec,
        "layout": metadata.ring.layout,
        "autoreset": metadata.autoreset,
        "created": metadata.created,
        "generation": metadata.generation,
        "never_drawn": num_unknown,
        "opening": shown.opening(buffer),
        "row_nbytes": metadata.schema.row_nbytes,
    }
    heap = buffer.facts().heap()
    if heap is not None:
        used = int(heap.used.max())
        facts["heap"] = (
            f"{format_size(used)} of {format_size(heap.nbytes)} ({used / heap.nbytes:.0%})"
        )
    if folder is not None:
        apparent, allocated = buffer.facts().disk()
        facts["disk"] = {"apparent": apparent, "allocated": allocated}
        facts["commit"] = last_commit(buffer)
    return facts

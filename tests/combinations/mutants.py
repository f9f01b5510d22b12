"""Would the cases notice if a rule were missing where parts of the package meet?

Each mutant is the real code with one fault. `mutants.json` has the case and the
consumer that notice it, result by ``python -m tools.combinations --mutants --record``.
One that survives says that the cases are blind there.
"""

import json
import shutil
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from inspect import getattr_static
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

import mmreplay as mr
from mmreplay import concatenation, splitting, stats
from mmreplay.batch import Batch
from mmreplay.buffer import copy_rows as copying
from mmreplay.buffer import facts, reader, value_reader
from mmreplay.buffer.append import Appender
from mmreplay.buffer.flag_rules import EpisodeFlags
from mmreplay.buffer.reader import GenerationReader
from mmreplay.concatenation import Concat
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.episodes import BREAK, CUT, END, FINAL, TERMINATED
from mmreplay.episodes.index import EpisodeIndex
from mmreplay.episodes.starts import EpisodeSteps, LaterStarts, SubsetStarts
from mmreplay.loader.dataset import ReplayDataset
from mmreplay.loader.draws import Draws
from mmreplay.loader.prefetch import Prefetcher
from mmreplay.loader.stream import InterleavedStream, ReplayStream
from mmreplay.page import api, checks, overview
from mmreplay.page.requests import BAD, Refusal
from mmreplay.samplers import combine, episode, groups, recent, sequence, uses
from mmreplay.samplers.combine import Shares
from mmreplay.samplers.distinct import DistinctSampler
from mmreplay.samplers.episode import Filter
from mmreplay.samplers.holding import Claims
from mmreplay.samplers.prioritized import PriorityBasedSampler, RankPrioritizedSampler
from mmreplay.samplers.priority_store import PriorityStore
from mmreplay.samplers.shuffled import ShuffledSampler
from mmreplay.samplers.staleness import StalenessSampler
from mmreplay.samplers.stratified import StratifiedSampler
from mmreplay.samplers.uses import UseCounter
from mmreplay.schema import kinds
from mmreplay.transforms import her, nstep
from mmreplay.transforms.advantages import _Estimated
from mmreplay.transforms.base import Bound
from mmreplay.transforms.base_steps import BaseSteps
from mmreplay.transforms.delta import _Deltas
from mmreplay.transforms.nstep import NStep
from mmreplay.transforms.outline import Outline
from mmreplay.transforms.returns import _Returns
from mmreplay.transforms.stack import ActionHistory
from mmreplay.transforms.without_next import WithoutNext, _below
from tests.combinations.cases import Case

RECORDED = Path(__file__).with_name("mutants.json")


@dataclass(frozen=True)
class Mutant:
    """The package with one fault.

    Attributes:
        name: What the table calls it.
        fault: What is wrong.
        consumer: The one that is to notice it.
        patches: Object, attribute and what takes its index.
    """

    name: str
    fault: str
    consumer: str
    patches: tuple

    @contextmanager
    def alive(self):
        """The package has the fault inside."""
        with ExitStack() as stack:
            for owner, name, new in self.patches:
                stack.enter_context(mock.patch.object(owner, name, new))
            yield

    @property
    def case(self):
        """The case that notices it; None where none was recorded."""
        return recorded().get(self.name)


def recorded():
    """Cases by name of the mutant."""
    result = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    return {name: Case(**values) for name, values in result.items()}


def record(result):
    """Write down cases by name of the mutant."""
    values = {name: asdict(result[name]) for name in sorted(result)}
    RECORDED.write_text(json.dumps(values, indent=2) + "\n")


# Patches.


def result(owner, name, change):
    """What a function returns, or a property is, is changed.

    Args:
        owner: Class or module.
        name: Of the function in it.
        change: Function of the result and the arguments.
    """
    real = getattr_static(owner, name)
    if isinstance(real, property):
        return owner, name, property(lambda self: change(real.fget(self), self))
    if isinstance(real, classmethod):
        made = real.__func__
        return owner, name, classmethod(lambda *args, **kw: change(made(*args, **kw), *args))

    @wraps(real)
    def faulty(*args, **kwargs):
        return change(real(*args, **kwargs), *args)

    return owner, name, faulty


def with_arguments(owner, name, change):
    """What a function is given is changed: a function of its positional arguments."""
    real = getattr_static(owner, name)

    @wraps(real)
    def faulty(*args, **kwargs):
        return real(*change(*args), **kwargs)

    return owner, name, faulty


def keywords(owner, name, change):
    """The same of its arguments by name, a dict."""
    real = getattr_static(owner, name)

    @wraps(real)
    def faulty(*args, **kwargs):
        return real(*args, **change(kwargs))

    return owner, name, faulty


def before(owner, name, do):
    """Something is done before a function."""
    return with_arguments(owner, name, lambda *args: (do(*args), args)[1])


def after(owner, name, do):
    """Something is done after a method of a class."""
    return result(owner, name, lambda result, *args: (do(*args), result)[1])


def without(owner, name, returned=None):
    """A function does nothing."""
    return owner, name, lambda *_, **__: returned


def other_property(owner, name, change):
    """A property is something else."""
    return owner, name, property(change)


def bare(samplers, draw, /, *args):
    """`all_or_nothing` that puts nothing back."""
    return draw(*args)


def proxy(module, **functions):
    """A module with some other functions."""
    names = {name: getattr(module, name) for name in dir(module) if name[0] != "_"}
    return SimpleNamespace(**{**names, **functions})


# Faults of some lines.


def next_across(fields, view, env_ids, positions, *_):
    """Next observations of the next row, whichever episode that is of."""
    paths = tuple(p for p in view.next_paths if p not in view._schema.varying)
    rows = np.minimum(positions + 1, view.span.stop[env_ids] - 1)
    result = view.read(paths, env_ids, rows) if paths else {}
    return fields | {view.next_paths[p]: np.asarray(result[p]) for p in paths}


def unresolved(real):
    """`GenerationReader.find` that leaves references for later, under other names."""

    def find(self, plan, env_ids, positions):
        values, self._values = self._values, None
        try:
            return real(self, plan, env_ids, positions)
        finally:
            self._values = values

    return find


def fold_too_far(real):
    def weighted_sums(positions, last, weights, *rest):
        beyond = np.minimum(last + 1, positions + len(weights) - 1)
        return real(positions, beyond, weights, *rest)

    return weighted_sums


def no_ends(real):
    def discounts(positions, last, powers, terminated, out):
        return real(positions, last, powers, np.zeros_like(terminated), out)

    return discounts


def in_python(bound, *_):
    """NStep sums rewards itself, where it may be patched."""
    return replace(bound, sums=None)


def always_next(self, outline):
    """`ActionHistory.bind` of an outline that seems to have next observations."""

    class Known(dict):
        def __bool__(self):
            return True

    return self, replace(outline, next_obs=Known(outline.next_obs))


def without_flag(flag):
    def blocks(result, *_):
        return (replace(each, flags=each.flags & ~np.uint8(flag)) for each in result)

    return blocks


def swap_newest(self):
    drawn = self._drawn
    if len(drawn) > 1:
        drawn[-1], drawn[-2] = drawn[-2], drawn[-1]


def store_ahead(self):
    for pending in self._drawn:
        pending.claims.store()


def forget_ahead(self):
    for pending in self._drawn:
        pending.state = None


def legal_alone(self, view, env_ids, positions, values):
    keep = reader._are_starts(view, env_ids, positions)
    return self, view, env_ids[keep], positions[keep], values[keep]


def first_twice(draw, *_):
    rows = np.arange(len(draw)) // 2
    return replace(draw.taken(rows))


def as_if_rank_0(real):
    def steps_at(self, *args):
        rank, self.rank = self.rank, 0
        try:
            return real(self, *args)
        finally:
            self.rank = rank

    return steps_at


def lost_done(self, *_):
    self._done = 0


def lost_drawn(self, *_):
    self._drawn = np.zeros_like(self._drawn)


def shifted(result, *_):
    env_ids, begins, ends = result
    return env_ids, begins, ends - 1


def overlapping(result, *_):
    env_ids, begins, ends = result
    return env_ids, np.maximum(begins - 1, 0), ends


def fails_for_text(buffer, *_):
    if buffer.schema.varying:
        raise TypeError("unexpected Ragged")


def uncaught(name, to, check):
    result = check()
    several = result if isinstance(result, list | tuple) else [result]
    return [each for each in several if each is not None]


def same_goal_row(self, *_):
    self.source = self.source[0], 0


def both_known(result, *_):
    values, known = result
    return values, np.ones_like(known)


def of_half(draw, *_):
    """A draw whose steps all have the probability 0.5."""
    return replace(draw, probabilities=np.full(len(draw), 0.5))


def three_times(draw, *_):
    """A draw whose steps count three times."""
    return replace(draw, weights=3 * draw.weights)


def one_step(draw, *_):
    """A draw of one step, as often as there are steps."""
    return draw.taken(np.zeros(len(draw), np.int64))


def black_copies(result, field, column, same):
    images, damage = result
    if same is not None:
        images[same != np.arange(len(same))] = 0
    return images, damage


def whole_copy(path, target):
    """`repair` that copies a buffer as it is."""
    shutil.copytree(path, target)
    return SimpleNamespace(cuts=())


def refused_curve(*_):
    raise Refusal(BAD, "There is no such curve.")


def without_masks(batches, *_):
    return (batch for batch in batches if batch.mask is None)


def moved_windows(batch, *_):
    positions = batch.window_positions
    return batch if positions is None else replace(batch, window_positions=positions + 1)


def first_draw(value, *_):
    ids, positions = value["env_ids"], value["positions"]
    return value | {
        "env_ids": np.full_like(ids, ids[0]),
        "positions": np.full_like(positions, positions[0]),
    }


EXPECTED = {
    "RankPrioritizedSampler": RankPrioritizedSampler,
    "StratifiedSampler": StratifiedSampler,
    "DistinctSampler": DistinctSampler,
    "ShuffledSampler": ShuffledSampler,
    "RecentSampler": recent.RecentSampler,
    "EmphasizeRecentSampler": recent.EmphasizeRecentSampler,
    "MixtureSampler": combine.MixtureSampler,
    "StalenessSampler": StalenessSampler,
    "GroupSampler": groups.GroupSampler,
    "UseCounter": UseCounter,
    "SequenceSampler": sequence.SequenceSampler,
    "EpisodeSampler": episode.EpisodeSampler,
}
"""Samplers by the consumer that looks at each."""

OF_SAMPLERS = tuple(
    mutant
    for name, sampler in EXPECTED.items()
    for mutant in (
        Mutant(
            f"{name} of half",
            "each step has the probability 0.5",
            name,
            (result(sampler, "draw", of_half),),
        ),
        Mutant(
            f"{name} three times",
            "each step has three times its weight",
            name,
            (result(sampler, "draw", three_times),),
        ),
        Mutant(
            f"{name} without its state",
            "a loaded state changes nothing",
            name,
            (without(sampler, "load_state_dict"),),
        ),
    )
)

MUTANTS = (
    *OF_SAMPLERS,
    Mutant(
        "one rank",
        "by rank, one step is drawn",
        "RankPrioritizedSampler",
        (result(RankPrioritizedSampler, "draw", one_step),),
    ),
    Mutant(
        "one recent step",
        "of the window of newest steps, one is drawn",
        "EmphasizeRecentSampler",
        (result(recent.EmphasizeRecentSampler, "draw", one_step),),
    ),
    Mutant(
        "mixture of the first part",
        "the first part of a mixture draws whole batches",
        "MixtureSampler",
        (result(Shares, "split", lambda counts, *_: [sum(counts), *[0] * len(counts[1:])]),),
    ),
    Mutant(
        "states without uses are loaded",
        "a counter whose state is loaded draws from its beginning",
        "resumed",
        (without(UseCounter, "load_state_dict"),),
    ),
    # Statistics and damage.
    Mutant(
        "all in one bin",
        "a histogram counts all values in its first bin",
        "stats",
        (
            result(
                stats, "count_values", lambda counts, *_: np.append(counts.sum(), 0 * counts[1:])
            ),
        ),
    ),
    Mutant(
        "edges too far apart",
        "the edges of a histogram are five times the values",
        "stats",
        (result(stats, "edges_of", lambda edges, *_: 5 * edges),),
    ),
    Mutant(
        "another deviation",
        "the standard deviation is none of the values",
        "stats",
        (other_property(stats.Moments, "std", lambda self: 7.0),),
    ),
    Mutant(
        "verify finds nothing",
        "a damaged buffer passes",
        "verify",
        ((mr, "verify_buffer", lambda *_: SimpleNamespace(findings=())),),
    ),
    Mutant(
        "repair copies damage",
        "repair copies a buffer as it is",
        "gather_all",
        ((mr, "repair", whole_copy),),
    ),
    # The page.
    Mutant(
        "page without returns",
        "the page knows the return of no episode",
        "page",
        (
            result(
                api,
                "answer_episodes",
                lambda value, *_: (
                    value | {"rows": [[*row[:3], None, *row[4:]] for row in value["rows"]]}
                ),
            ),
        ),
    ),
    Mutant(
        "curve of zeros",
        "the page's curves are zero",
        "page",
        (
            result(
                api,
                "read_curve",
                lambda curve, *_: replace(
                    curve, lowest=0 * curve.lowest, highest=0 * curve.highest, mean=0 * curve.mean
                ),
            ),
        ),
    ),
    Mutant(
        "no curve", "the page refuses every curve", "page", ((api, "read_curve", refused_curve),)
    ),
    Mutant(
        "values of zeros",
        "the page's values are zero",
        "page",
        (
            result(
                api,
                "read_values",
                lambda value, *_: value | {"values": {p: [[0.0]] for p in value["values"]}},
            ),
        ),
    ),
    Mutant(
        "draws of one step",
        "the page draws one step",
        "page",
        (result(api, "draw_steps", first_draw),),
    ),
    # Windows where steps are the rule.
    Mutant(
        "stream without windows",
        "a stream hands out no windows",
        "ReplayStream",
        (result(ReplayStream, "__iter__", without_masks),),
    ),
    Mutant(
        "joined windows by one too late",
        "windows of joined buffers are said to be one step later",
        "concat of 3",
        (result(Batch, "join", moved_windows),),
    ),
    # A step of an episode is not a transition.
    Mutant(
        "window without the last step",
        "windows lack the last step of a truncated episode",
        "SequenceSampler",
        (other_property(GenerationReader, "steps", lambda self: self),),
    ),
    Mutant(
        "episode without the last step",
        "whole episodes lack the last step of a truncated one",
        "EpisodeSampler",
        (other_property(GenerationReader, "steps", lambda self: self),),
    ),
    Mutant(
        "length without the last step",
        "lengths of episodes do not count the steps of the batch",
        "episodes by length",
        (with_arguments(Filter, "keep", lambda s, i, e, b, stops, u: (s, i, e, b, stops - 1, u)),),
    ),
    Mutant(
        "no mask at an unknown end",
        "the mask is true where the next observation is unknown",
        "SequenceSampler",
        (without(EpisodeSteps, "transitions"),),
    ),
    Mutant(
        "ragged episodes without mask",
        "the mask of ragged episodes is true everywhere",
        "EpisodeSampler",
        (result(episode, "_ragged", lambda draw, *_: replace(draw, mask=None)),),
    ),
    Mutant(
        "padding with a mask",
        "the mask of padded windows says only what is a transition",
        "SequenceSampler",
        ((sequence, "with_transitions", lambda view, env_ids, steps, mask: np.ones_like(mask)),),
    ),
    Mutant(
        "end before its final row",
        "windows hold a last step whose final row is still to come",
        "SequenceSampler",
        (other_property(EpisodeIndex, "whole_at", lambda self: FINAL | END),),
    ),
    Mutant(
        "WithoutNext asks the schema",
        "with WithoutNext, legal starts are those with a next observation",
        "legal_starts",
        (
            other_property(
                Outline,
                "derived",
                lambda self: (
                    self.schema.role("observation") is not None
                    and self.schema.role("next_observation") is None
                ),
            ),
        ),
    ),
    Mutant(
        "WithoutNext has a next observation",
        "batches hold next observations with WithoutNext",
        "WithoutNext",
        ((WithoutNext, "bind", lambda self, outline: Bound(outline, _below, finishes=False)),),
    ),
    Mutant(
        "next history without observation",
        "ActionHistory adds a next field where there is no observation",
        "ActionHistory",
        (with_arguments(ActionHistory, "bind", always_next),),
    ),
    # A call that fails uses nothing up.
    Mutant(
        "failed draw goes on",
        "a sampler is not put back where a transform fails",
        "failed draw",
        (without(GenerationReader, "put_back"),),
    ),
    Mutant(
        "failed batch is used",
        "uses of a batch that failed are stored",
        "failed draw",
        ((Claims, "release", lambda self: self.store()),),
    ),
    Mutant(
        "mixture loses the first part",
        "parts of a mixture are not put back where the last one is empty",
        "mixture with an empty part",
        ((combine, "all_or_nothing", bare), without(reader, "put_back")),
    ),
    Mutant(
        "concat loses the first buffer",
        "buffers of concat are not put back where another is empty",
        "concat with an empty buffer",
        ((concatenation, "all_or_nothing", bare),),
    ),
    Mutant(
        "closed loader uses batches ahead",
        "uses of batches ahead are stored where a loader is closed",
        "closed loader",
        (before(Prefetcher, "reset", store_ahead),),
    ),
    Mutant(
        "closed loader loses batches ahead",
        "a closed loader leaves the sampler where its threads were",
        "closed loader",
        (before(Prefetcher, "reset", forget_ahead),),
    ),
    Mutant(
        "groups over two rings",
        "concat takes samplers between which it cannot divide a batch",
        "refusals",
        (without(concatenation, "refuse_undivided"),),
    ),
    Mutant(
        "counters of one name",
        "two counters of a mixture store into one file",
        "refusals",
        (without(combine, "refuse_counts_of_one_name"),),
    ),
    Mutant(
        "lease of many uses",
        "leases with more than one use are accepted",
        "refusals",
        (without(uses, "_refuse_leases_of_many"),),
    ),
    # Values of any length.
    Mutant(
        "older frames of the next field",
        "the older frames of a stored next stack are of the next field",
        "FrameStack",
        (result(Outline, "sources", lambda result, *_: {p: p for p in result}),),
    ),
    Mutant(
        "references of two fields",
        "references of two fields meet before they become values",
        "FrameStack of 3",
        ((GenerationReader, "find", unresolved(GenerationReader.find)),),
    ),
    Mutant(
        "no reset check beside text",
        "the autoreset warning is off where a field varies",
        "reset rows",
        (
            result(
                Appender,
                "_next_step_rows",
                lambda result, self: None if self._store.schema.varying else result,
            ),
        ),
    ),
    Mutant(
        "page fails on text",
        "a check of the page fails where a field varies",
        "page",
        (before(overview, "_find_reset_rows", fails_for_text),),
    ),
    Mutant(
        "failed check takes the page",
        "a check that fails takes the overview with it",
        "page",
        (before(overview, "_find_reset_rows", fails_for_text), (checks, "run_check", uncaught)),
    ),
    # Images.
    Mutant(
        "one image for all",
        "of the images of a batch only the first is decoded",
        "take",
        (result(value_reader, "_first_of_equal", lambda first, *_: np.zeros_like(first)),),
    ),
    Mutant(
        "copies of an image are black",
        "an image that is in a batch again is zeros",
        "FrameStack of 3",
        (result(kinds, "decode_images", black_copies),),
    ),
    # Other seams: ends.
    Mutant(
        "next observation across an end",
        "the next observation is of the next row, also of another episode",
        "take",
        (result(GenerationReader, "copy_steps", next_across),),
    ),
    Mutant(
        "fold over an end",
        "NStep counts the last reward of an episode again",
        "NStep of 3",
        (
            result(NStep, "bind", in_python),
            (
                nstep,
                "_kernel",
                proxy(nstep._kernel, weighted_sums=fold_too_far(nstep._kernel.weighted_sums)),
            ),
        ),
    ),
    Mutant(
        "discount after the end",
        "NStep bootstraps after a termination",
        "NStep",
        (
            result(NStep, "bind", in_python),
            (nstep, "_kernel", proxy(nstep._kernel, discounts=no_ends(nstep._kernel.discounts))),
        ),
    ),
    Mutant(
        "fold beyond the newest row",
        "starts whose n steps are still to come are legal",
        "NStep of 3",
        (
            keywords(
                EpisodeIndex,
                "__init__",
                lambda result: result | {"after": min(result.get("after") or 0, 1)},
            ),
        ),
    ),
    Mutant(
        "start at the wrap",
        "starts whose stack was overwritten are legal",
        "FrameStack of 3",
        (keywords(EpisodeIndex, "__init__", lambda result: result | {"before": 0}),),
    ),
    Mutant(
        "history over a beginning",
        "a history holds an action of the episode before",
        "ActionHistory",
        (result(BaseSteps, "first", lambda result, self: np.maximum(result - 1, 0)),),
    ),
    Mutant(
        "newest truncated step",
        "the newest step of a truncated episode is a legal start",
        "legal_starts",
        (result(EpisodeIndex, "_usable_alone", lambda result, self: result | END),),
    ),
    Mutant(
        "truncated step is taken",
        "a truncated step without a final observation can be taken",
        "take",
        (result(reader, "legal_start_table", lambda result, *_: np.ones_like(result)),),
    ),
    Mutant(
        "truncation by the next row",
        "a step that the next row says was truncated is not",
        "take",
        (
            result(
                GenerationReader, "_forced_truncations", lambda result, *_: np.zeros_like(result)
            ),
        ),
    ),
    Mutant(
        "interruption without a word",
        "an episode goes on over a resume, a clear or an end",
        "episode_table",
        (without(EpisodeFlags, "interrupt"),),
    ),
    Mutant(
        "all agents are truncated",
        "a truncation by the next row is of agents that had terminated, too",
        "take",
        (
            result(
                GenerationReader,
                "_truncated_agents",
                lambda result, self, fields, path, forced: result | forced[..., None],
            ),
        ),
    ),
    Mutant(
        "ends that are not said",
        "end_episodes breaks episodes off, and truncates none",
        "take",
        ((Appender, "end_episodes", lambda self, env_ids, _: self.resume("break", env_ids)),),
    ),
    Mutant(
        "resume forgets the rows before",
        "a writer that continues does not look at the newest rows",
        "get_field",
        (without(Appender, "_continue_episodes"),),
    ),
    Mutant(
        "next observation across an end of a window",
        "a window has the next row's observation after a truncation",
        "SequenceSampler",
        (result(GenerationReader, "copy_steps", next_across),),
    ),
    Mutant(
        "return of other steps",
        "return_within asks of the episode that ends one step before",
        "episodes by return",
        (
            with_arguments(
                episode, "_ends_in", lambda known, rows: (known, replace(rows, end=rows.end - 1))
            ),
        ),
    ),
    Mutant(
        "return over a time limit",
        "the return of a truncated episode is taken for known",
        "DiscountedReturn",
        (result(_Returns, "_tails", both_known),),
    ),
    Mutant(
        "advantage over an end",
        "estimates take what follows a last step for known",
        "LambdaReturn",
        (result(_Estimated, "_tails", lambda result, *_: (*result[:2], np.ones_like(result[2]))),),
    ),
    Mutant(
        "goal achieved before the step",
        "HER takes the goal that was achieved before a step",
        "HER",
        (after(her._Goals, "__init__", same_goal_row),),
    ),
    Mutant(
        "goal of another episode",
        "HER gives all steps of a window one goal, over an end, too",
        "HER",
        (with_arguments(her, "_groups", lambda length, begins: (length, np.zeros_like(begins))),),
    ),
    Mutant(
        "difference with itself",
        "Delta reads the step's own observation as its next one",
        "Delta",
        (
            (
                _Deltas,
                "_next_obs",
                lambda self, paths: self.below.read(paths, self.base_steps.batch_rows.here),
            ),
        ),
    ),
    Mutant(
        "next observation is not cast",
        "stored next observations stay as they are where observations change",
        "Normalize",
        (
            result(
                Outline,
                "sources",
                lambda result, *_: {p: source for p, source in result.items() if p == source},
            ),
        ),
    ),
    # Guards on the schema and between transforms.
    Mutant(
        "no guard on text",
        "transforms take fields of any length for arrays",
        "Normalize",
        (without(Outline, "refuse_varying"),),
    ),
    Mutant(
        "NStep beside WithoutNext",
        "NStep is not refused beside WithoutNext",
        "pairs of transforms",
        ((NStep, "reads_next", False),),
    ),
    Mutant(
        "counter around a hidden epoch",
        "wrappers do not say that a sampler inside has epochs",
        "refusals",
        (result(uses, "traits_of", lambda result, *_: replace(result, once=False)),),
    ),
    Mutant(
        "stack of a stack",
        "what a transform changed is not noted",
        "pairs of transforms",
        (
            result(
                Outline,
                "changed",
                lambda result, self, *_: replace(result, changed_by=self.changed_by),
            ),
        ),
    ),
    # Files.
    Mutant(
        "converter drops BREAK",
        "exports forget where episodes were broken off",
        "episode_table",
        (result(BufferReader, "blocks", without_flag(BREAK)),),
    ),
    Mutant(
        "converter drops CUT",
        "exports forget truncations that the next row tells of",
        "take",
        (result(BufferReader, "blocks", without_flag(CUT)),),
    ),
    Mutant(
        "converter drops FINAL",
        "exports take final rows for steps",
        "gather_all",
        (result(BufferReader, "blocks", without_flag(FINAL)),),
    ),
    Mutant(
        "converter drops TERMINATED",
        "exports forget terminations",
        "export to npz",
        (result(BufferReader, "blocks", without_flag(TERMINATED)),),
    ),
    Mutant(
        "copy without the oldest row",
        "a resized or compacted buffer lacks the oldest row",
        "gather_all",
        (result(copying, "copy_rows", lambda span, *_: (span[0] + 1, *span[1:])),),
    ),
    # Weights and priorities.
    Mutant(
        "weights of another power",
        "importance weights are of the square root",
        "PrioritizedSampler",
        (
            result(
                PriorityBasedSampler,
                "draw",
                lambda draw, *_: replace(draw, weights=np.sqrt(draw.weights)),
            ),
        ),
    ),
    Mutant(
        "priorities of the neighbour",
        "priorities go to the next step of the batch",
        "PrioritizedSampler",
        (
            with_arguments(
                PriorityBasedSampler,
                "update_priorities",
                lambda s, v, env_ids, positions, values, *rest: (
                    s,
                    v,
                    env_ids,
                    positions,
                    np.roll(values, 1),
                    *rest,
                ),
            ),
        ),
    ),
    Mutant(
        "priority of a later start",
        "a step that becomes a legal start has lost its priority",
        "kept priorities",
        (with_arguments(PriorityStore, "update", legal_alone),),
    ),
    Mutant(
        "priorities lost in a state",
        "a state with priorities has none",
        "PrioritizedSampler",
        (
            result(
                PriorityBasedSampler,
                "state_dict",
                lambda state, *_: {k: state[k] for k in ("kind", "seed", "step")},
            ),
        ),
    ),
    # Epochs and states.
    Mutant(
        "rank without the rest",
        "ranks leave out what does not divide by their number",
        "ShuffledSampler",
        ((ShuffledSampler, "_size", lambda s, frozen: frozen.total // s.num_ranks),),
    ),
    Mutant(
        "every rank is rank 0",
        "all ranks draw the steps of the first one",
        "ShuffledSampler",
        ((ShuffledSampler, "_steps_at", as_if_rank_0(ShuffledSampler._steps_at)),),
    ),
    Mutant(
        "resumed epoch begins again",
        "a loaded state forgets how far its epoch was",
        "ShuffledSampler",
        (after(ShuffledSampler, "load_state_dict", lost_done),),
    ),
    Mutant(
        "resumed mixture forgets shares",
        "a loaded state forgets what each part has drawn",
        "MixtureSampler",
        (after(Shares, "load_state_dict", lost_drawn),),
    ),
    # Samplers.
    Mutant(
        "step twice in a batch",
        "a batch without replacement has a step twice",
        "DistinctSampler",
        (result(DistinctSampler, "draw", first_twice),),
    ),
    Mutant(
        "strata of the first",
        "all environments count as the first one",
        "StratifiedSampler",
        (
            result(
                StratifiedSampler,
                "draw",
                lambda draw, *_: draw.taken(np.sort(np.arange(len(draw)) // 2)),
            ),
        ),
    ),
    Mutant(
        "recent without the newest",
        "the newest steps are those before the newest",
        "RecentSampler",
        (with_arguments(recent, "newest", lambda view, counts, edges: (view, counts + 2, edges)),),
    ),
    Mutant(
        "earliest by one too few",
        "the oldest row but one too few are left out",
        "ignore_earliest",
        (with_arguments(LaterStarts, "__init__", lambda s, base, count: (s, base, count - 1)),),
    ),
    Mutant(
        "stale by one",
        "rows that are too old by one version are drawn",
        "StalenessSampler",
        (result(StalenessSampler, "_oldest", lambda result, *_: result - 1),),
    ),
    Mutant(
        "one use too many",
        "each row is used once more than it may",
        "UseCounter",
        (
            after(
                UseCounter,
                "__init__",
                lambda self, *_: setattr(self, "_maximum", self._maximum + 1),
            ),
        ),
    ),
    Mutant(
        "reservations ignored",
        "two batches in flight have the same use",
        "closed loader",
        (without(UseCounter, "_unavailable"),),
    ),
    Mutant(
        "group with an illegal row",
        "groups are drawn of which a row is no legal start",
        "GroupSampler",
        ((groups, "legal_among", lambda view, env_ids, positions: np.ones(len(positions), bool)),),
    ),
    # Rows by value.
    Mutant(
        "rows of find oldest first",
        "rows by value come oldest first",
        "find",
        (
            result(
                GenerationReader,
                "find_rows",
                lambda result, *_: tuple(column[::-1] for column in result),
            ),
        ),
    ),
    Mutant(
        "final rows by value",
        "final rows are result by the values that came with them",
        "find",
        (
            (
                GenerationReader,
                "_read_column",
                lambda self, path, env_ids, positions: (
                    lambda result: (result[0][path], result[1])
                )(self.read_rows((path,), env_ids, positions)),
            ),
        ),
    ),
    # Joins and parts.
    Mutant(
        "ids of the first buffer",
        "steps of all buffers have the id of the first",
        "concat of 3",
        (
            result(
                Concat,
                "_sample",
                lambda batch, *_: replace(batch, buffer_ids=np.zeros_like(batch.buffer_ids)),
            ),
        ),
    ),
    Mutant(
        "taken in another order",
        "steps of several buffers come in an order of their own",
        "concat of 3",
        (with_arguments(Batch, "select", lambda batch, rows: (batch, np.argsort(rows))),),
    ),
    Mutant(
        "probability in its own buffer",
        "probabilities of joined buffers are those of each alone",
        "concat of 3",
        (with_arguments(Concat, "_sample", lambda s, n, count, _, by: (s, n, count, 1.0, by)),),
    ),
    Mutant(
        "weights of each buffer",
        "weights of buffers joined by priority are those of each alone",
        "concat by priority",
        ((Concat, "weighed", lambda self, batch, weights=None: batch),),
    ),
    Mutant(
        "shares of another buffer",
        "shares go to the buffers in another order",
        "concat of 3",
        (result(Shares, "split", lambda counts, *_: counts[::-1]),),
    ),
    Mutant(
        "part without a step",
        "parts lack the last step of each range",
        "split",
        (result(splitting, "_units", shifted),),
    ),
    Mutant(
        "parts that share a step",
        "parts have the step before each range, too",
        "split",
        (result(splitting, "_units", overlapping),),
    ),
    Mutant(
        "windows of the other part",
        "windows of a part begin anywhere in the buffer",
        "split",
        (other_property(SubsetStarts, "steps", lambda self: self.base.steps),),
    ),
    # Loaders, datasets and streams.
    Mutant(
        "loader out of order",
        "batches of a loader come in another order than their draws",
        "loader ahead",
        (after(Prefetcher, "_draw", swap_newest),),
    ),
    Mutant(
        "loader state ahead",
        "the state of a loader is that of the batches drawn ahead",
        "loader ahead",
        ((Prefetcher, "_state_before", lambda self: self._source.state_dict()),),
    ),
    Mutant(
        "item of another rank",
        "an item is the one after that asked for",
        "ReplayDataset",
        (
            with_arguments(
                ReplayDataset, "_at", lambda self, ranks: (self, (ranks + 1) % max(1, len(self)))
            ),
        ),
    ),
    Mutant(
        "epoch without its last draw",
        "draws of an epoch end before its last batch",
        "ReplayDataset",
        (result(Draws, "_draws", lambda result, *_: iter(list(result)[:-1])),),
    ),
    Mutant(
        "stream of the other rank",
        "a rank of a stream hands out what is another one's",
        "ReplayStream",
        (
            after(
                InterleavedStream,
                "__init__",
                lambda self, *_: setattr(self, "_rank", (self._rank + 1) % self._num_ranks),
            ),
        ),
    ),
    Mutant(
        "stream state behind",
        "the state of a stream is that of the batch before",
        "ReplayStream",
        (
            result(
                InterleavedStream,
                "state_after",
                lambda state, *_: state | {"batches": state["batches"] - 1},
            ),
        ),
    ),
    # What people look at.
    Mutant(
        "episodes are whole",
        "the table takes episodes whose beginning is gone for whole",
        "episode_table",
        (
            result(
                stats,
                "_columns",
                lambda result, *_: (*result[:5], np.zeros_like(result[5]), *result[6:]),
            ),
        ),
    ),
    Mutant(
        "one number of legal starts",
        "info counts the same starts with and without next observations",
        "info",
        (
            result(
                facts, "_count_rows", lambda result, *_: replace(result, legal_starts=result.steps)
            ),
        ),
    ),
    Mutant(
        "overview counts illegal starts",
        "the page counts rows that cannot be drawn",
        "page",
        ((overview, "num_legal", lambda view: int(view.starts.lengths.sum())),),
    ),
)

"""What works with what: samplers, transforms and fields, each done on a small ring.

A cell is *works*, or *refused* with one sentence of what is wrong and one of what to
do, raised before anything was drawn, stored or used up. What is done comes in two
steps: the first one puts the parts together, or makes the one call that is asked about,
and may refuse; after it nothing may. `python -m tests.combinations.table` writes what
each cell is into table.json, and the tables of docs/samplers.md and docs/transforms.md.
"""

from __future__ import annotations

import atexit
import io
import json
import math
import pickle
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import mmreplay as mr
from mmreplay.cli.run import run
from mmreplay.page.draws import draw_steps
from mmreplay.page.episodes import EpisodeList
from mmreplay.page.overview import make_overview
from mmreplay.page.requests import Refusal
from mmreplay.page.shown import BackgroundReader, ShownBuffer
from mmreplay.samplers.base import ask
from mmreplay.samplers.combine import RestrictedSampler, state_of
from mmreplay.samplers.uses import counters_in
from mmreplay.testing.disks import QuickDisk, using

RECORD = Path(__file__).parent / "table.json"
DOCS = Path(__file__).parent.parent.parent / "docs"
WORKS = "works"
STEPS = 24
Cells = dict[str, dict[str, str]]


class CellError(Exception):
    """A cell that is neither: a bare exception, a late refusal, or a bad message."""


@dataclass
class Bench:
    """A folder for one cell, and what is closed with it.

    Attributes:
        path: An empty folder.
        stack: Closes what the cell opened.
        unchanged: What a refusal has to leave as it is.
        made: Paths so far.
        may_be_late: What a sampler draws is not known before it draws.
    """

    path: Path
    stack: ExitStack
    unchanged: list[Callable[[], object]] = field(default_factory=list)
    made: int = 0
    may_be_late: bool = False

    def new(self) -> Path:
        """A path that is not there yet."""
        self.made += 1
        return self.path / f"b{self.made}"

    def ring(self, sampler: Any = None, **options: Any) -> mr.ReplayBuffer:
        """A ring of short episodes, closed for writing and opened to draw from."""
        path = self.new()
        shutil.copytree(sampled_ring(self.made), path)
        return self.open(path, sampler, **options)

    def open(self, path: Path, sampler: Any = None, **options: Any) -> Any:
        """Open a ring, and watch its sampler."""
        buffer = mr.ReplayBuffer.open(path, sampler=sampler, **options)
        self.stack.enter_context(buffer)
        if sampler is not None:
            self.watch(sampler, buffer)
        return buffer

    def watch(self, sampler: Any, buffer: Any) -> None:
        """Have a refusal leave a sampler, and the uses that it counts, as they are."""
        self.unchanged.append(lambda: state_of(sampler, priorities=False))
        for counter in counters_in(sampler):
            every = np.arange(len(buffer))
            self.unchanged.append(partial(uses_of, counter, buffer, every))


def uses_of(counter: Any, buffer: Any, positions: Any) -> object:
    """The uses of steps of environment 0."""
    return counter.uses(buffer.view, 0 * positions, positions).tolist()


SAMPLED = mr.Schema(
    {
        "observation": mr.Field((2,), "float32"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "group": mr.Field((), "int64"),
        "version": mr.Field((), "int64"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
)


@cache
def sampled_ring(number: int) -> Path:
    """The ring that cells copy as their n-th: those of one cell are different rings."""
    folder = Path(tempfile.mkdtemp(prefix="table-ring-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with mr.ReplayBuffer.create(
        folder / "ring", SAMPLED, 64, commit_every=None, autoreset="disabled"
    ) as writer:
        add_sampled(writer)
    return folder / "ring"


def add_sampled(buffer: mr.ReplayBuffer, steps: int = STEPS) -> None:
    """Add episodes of 6 steps, in groups of 2."""
    every = np.arange(steps)
    buffer.extend(
        observation=np.stack([every, every], 1).astype(np.float32),
        action=every % 3,
        reward=np.ones(steps, np.float32),
        group=every // 2,
        version=np.full(steps, 5),
        terminated=every % 6 == 5,
        truncated=np.zeros(steps, bool),
    )


def outcome(bench: Bench, first: Callable[[], Any], then: Callable[[Any], Any]) -> str:
    """Do a cell's two steps; return what it is.

    Raises:
        CellError: It is neither of the two.
    """
    before = [look() for look in bench.unchanged]
    watched = len(bench.unchanged)
    try:
        made = first()
    except (mr.ReplayError, Refusal) as error:
        after = [look() for look in bench.unchanged[:watched]]
        if not equal(before, after):
            raise CellError(f"the refusal changed something: {error}") from error
        return f"refused: {sentence(error)}"
    except Exception as error:
        raise CellError(f"bare {type(error).__name__}: {error}") from error
    try:
        then(made)
    except (mr.ReplayError, Refusal) as error:
        if bench.may_be_late:
            return f"refused at the draw: {sentence(error)}"
        raise CellError(f"late {type(error).__name__}: {error}") from error
    except Exception as error:
        raise CellError(f"late and bare {type(error).__name__}: {error}") from error
    return WORKS


def equal(one: Any, other: Any) -> bool:
    """Whether two values are equal, arrays in them included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(np.array_equal(one, other))


def sentence(error: Exception) -> str:
    """The text of a refusal: what is wrong, then what to do.

    Raises:
        CellError: It does not say both.
    """
    text = str(error)
    # Paths, addresses and identities are others each time.
    text = re.sub(r"/[\w./-]*/b\d+", "PATH", text)
    text = re.sub(r"\b[0-9a-f]{32}\b", "UUID", text)
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    text = re.sub(r"seed=\d{6,}", "seed=N", text)
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|\d+\.\d+|\w\.\w+", "", text)
    num_sentences = len(re.findall(r"[.?](?:\s|$)", bare))
    if not text.endswith((".", "?")) or not 2 <= num_sentences <= 3 or len(text) > 420:
        raise CellError(f"the message is not what is wrong and what to do: {text}")
    return text


@contextmanager
def bench() -> Iterator[Bench]:
    """A folder for a cell, without waits for the device."""
    folder = Path(tempfile.mkdtemp(prefix="table-"))
    try:
        with ExitStack() as stack, warnings.catch_warnings(), using(QuickDisk()):
            warnings.simplefilter("ignore")
            yield Bench(folder, stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# Samplers.


class Own:
    """A sampler of a user, which declares nothing."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.step = seed, 0

    def draw(self, view: Any, batch_size: int) -> Any:
        return mr.UniformSampler(self.seed).draw(view, batch_size)

    def __repr__(self) -> str:
        return f"Own({self.seed})"

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "Own", "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]


SAMPLERS: dict[str, Callable[[], Any]] = {
    "Uniform": lambda: mr.UniformSampler(0),
    "Uniform, blocks": lambda: mr.UniformSampler(0, block=3),
    "Distinct": lambda: mr.DistinctSampler(0),
    "Stratified": lambda: mr.StratifiedSampler(0),
    "Shuffled": lambda: mr.ShuffledSampler(0),
    "Prioritized": lambda: mr.PrioritizedSampler(seed=0),
    "RankPrioritized": lambda: mr.RankPrioritizedSampler(seed=0),
    "EmphasizeRecent": lambda: mr.EmphasizeRecentSampler(9, smallest=5, seed=0),
    "Recent": lambda: mr.RecentSampler(3, 0.5, mr.UniformSampler(1), seed=0),
    "Recent of Shuffled": lambda: mr.RecentSampler(3, 0.5, mr.ShuffledSampler(1), seed=0),
    "Recent of Prioritized": lambda: mr.RecentSampler(
        3, 0.5, mr.PrioritizedSampler(seed=1), seed=0
    ),
    "ignore_earliest": lambda: mr.ignore_earliest(2, mr.UniformSampler(0)),
    "ignore_earliest of Shuffled": lambda: mr.ignore_earliest(2, mr.ShuffledSampler(0)),
    "Mixture": lambda: mr.MixtureSampler(
        [(mr.UniformSampler(1), 2), (mr.StratifiedSampler(2), 1)], seed=0
    ),
    "Mixture of Shuffled": lambda: mr.MixtureSampler(
        [(mr.UniformSampler(1), 2), (mr.ShuffledSampler(2), 1)], seed=0
    ),
    "Mixture of Sequence": lambda: mr.MixtureSampler(
        [(mr.SequenceSampler(3, mr.UniformSampler(1)), 1)], seed=0
    ),
    "Sequence": lambda: mr.SequenceSampler(3, mr.UniformSampler(0)),
    "Sequence of Shuffled": lambda: mr.SequenceSampler(3, mr.ShuffledSampler(0)),
    "Sequence of Prioritized": lambda: mr.SequenceSampler(
        3, mr.PrioritizedSampler(seed=0), boundary="pad", first_only=["action"]
    ),
    "Episode, padded": lambda: mr.EpisodeSampler(mr.UniformSampler(0)),
    "Episode, ragged": lambda: mr.EpisodeSampler(mr.UniformSampler(0), layout="ragged"),
    "Group": lambda: mr.GroupSampler("group", 2, seed=0),
    "Staleness": lambda: mr.StalenessSampler("version", 6, 2, seed=0),
    "Staleness of Group": lambda: mr.StalenessSampler(
        "version", 6, 2, sampler=mr.GroupSampler("group", 2, seed=1), seed=0
    ),
    "UseCounter": lambda: mr.UseCounter(60, mr.UniformSampler(0), seed=0),
    "UseCounter of Group": lambda: mr.UseCounter(60, mr.GroupSampler("group", 2, seed=1), seed=0),
    "UseCounter, lease": lambda: mr.UseCounter(1, mr.DistinctSampler(0), lease_s=1e-6, seed=0),
    "a user's own": Own,
}
Make = Callable[[], Any]
SamplerUse = Callable[[Bench, Make], tuple[Callable[[], Any], Callable[[Any], Any]]]


def sampled(buffer: Any) -> None:
    """Draw a few batches."""
    for size in (1, 4, 3):
        assert len(buffer.sample(size)) > 0


def first_batches(batches: Any) -> None:
    """Take a few batches, or an epoch."""
    assert [len(batch) for _, batch in zip(range(3), batches, strict=False)]


def do_sample(b: Bench, make: Make) -> Any:
    return lambda: b.ring(make()), sampled


def do_set(b: Bench, make: Make) -> Any:
    buffer, sampler = b.ring(), make()
    b.watch(sampler, buffer)
    return lambda: setattr(buffer, "sampler", sampler), lambda _: sampled(buffer)


def do_sample_by(b: Bench, make: Make) -> Any:
    buffer, sampler = b.ring(), make()
    return lambda: sampler, lambda s: [buffer.sample_by(s, 3) for _ in range(3)]


def loader(num_threads: int) -> SamplerUse:
    def do(b: Bench, make: Make) -> Any:
        buffer = b.ring(make())

        def first() -> Any:
            made = mr.ReplayLoader(buffer, 4, num_threads=num_threads)
            return b.stack.enter_context(made)

        return first, first_batches

    return do


def dataset(num_workers: int) -> SamplerUse:
    def do(b: Bench, make: Make) -> Any:
        buffer = b.ring()
        data, sampler = mr.ReplayDataset(buffer), make()
        b.watch(sampler, buffer)
        b.stack.callback(ask(sampler, "close"))

        def then(draws: Any) -> None:
            first_batches(DataLoader(data, sampler=draws, batch_size=None, num_workers=num_workers))

        return lambda: data.draws(sampler, 4, num_batches=3), then

    return do


def stream(written: bool = False, num_ranks: int = 1) -> SamplerUse:
    def do(b: Bench, make: Make) -> Any:
        buffer, sampler = b.ring(), make()
        if written:
            b.stack.enter_context(mr.ReplayBuffer.open(buffer.path, mode="r+"))
        b.watch(sampler, buffer)
        b.stack.callback(ask(sampler, "close"))
        return (
            lambda: mr.ReplayStream(buffer.path, sampler, 4, num_ranks=num_ranks),
            first_batches,
        )

    return do


def concat(count: int, **options: Any) -> SamplerUse:
    def do(b: Bench, make: Make) -> Any:
        rings = [b.ring(make()) for _ in range(count)]
        return lambda: mr.concat(rings, seed=0, **options), sampled

    return do


def concat_with(other: Make) -> SamplerUse:
    def do(b: Bench, make: Make) -> Any:
        rings = [b.ring(make()), b.ring(other())]
        return lambda: mr.concat(rings, [1, 1], seed=0), sampled

    return do


def concat_loader(b: Bench, make: Make) -> Any:
    rings = [b.ring(make()) for _ in range(2)]

    def first() -> Any:
        both = mr.concat(rings, seed=0)
        return b.stack.enter_context(mr.ReplayLoader(both, 4))

    return first, first_batches


def concat_data(b: Bench, make: Make) -> Any:
    rings = [b.ring(make()) for _ in range(2)]

    def first() -> Any:
        data = mr.ConcatDataset(mr.concat(rings, seed=0))
        return DataLoader(data, sampler=data.draws(4, 3), batch_size=None)

    return first, first_batches


def concat_stream(b: Bench, make: Make) -> Any:
    rings = [b.ring(make()) for _ in range(2)]
    return lambda: mr.ConcatStream(mr.concat(rings, seed=0), 4, 3), first_batches


def within(wrap: Callable[[Any], Any]) -> SamplerUse:
    """Put the sampler into another one, and draw."""

    def do(b: Bench, make: Make) -> Any:
        path, inner = b.new(), make()
        with mr.ReplayBuffer.create(path, SAMPLED, 64, commit_every=None) as writer:
            add_sampled(writer)
        b.unchanged.append(lambda: state_of(inner, priorities=False))
        return lambda: wrap(inner), lambda outer: sampled(b.open(path, outer))

    return do


def split(by: str) -> SamplerUse:
    def do(b: Bench, make: Make) -> Any:
        buffer = b.ring()
        part, _ = mr.split(buffer, [0.5, 0.5], by=by)  # type: ignore[arg-type]

        def first() -> Any:
            buffer.sampler = part.sampler(make())
            return buffer

        return first, sampled

    return do


def priorities(b: Bench, make: Make) -> Any:
    buffer = b.ring(make())
    batch = buffer.sample(4)
    values = np.arange(1.0, len(batch) + 1)
    return lambda: buffer.update_priorities(batch, values), lambda _: sampled(buffer)


def acknowledged(b: Bench, make: Make) -> Any:
    buffer = b.ring(make())
    batch = buffer.sample(4)
    return lambda: buffer.acknowledge(batch), lambda _: sampled(buffer)


def resumed(b: Bench, make: Make) -> Any:
    buffer = b.ring(make())
    buffer.sample(3)
    state = json.loads(json.dumps(buffer.sampler.state_dict()))

    def then(other: Any) -> None:
        own = buffer.sampler.draw(buffer.view, 4)
        # A counter of the same name would count in the same file.
        ask(buffer.sampler, "close")()
        again = other.draw(buffer.view, 4)
        ask(other, "close")()
        if not counters_in(other):
            assert equal(own.positions, again.positions)

    def first() -> Any:
        other = make()
        other.load_state_dict(state)
        return other

    return first, then


def pickled(b: Bench, make: Make) -> Any:
    buffer = b.ring()
    return (
        lambda: pickle.loads(pickle.dumps(make())),
        lambda copy: (setattr(buffer, "sampler", copy), sampled(buffer)),
    )


def page(b: Bench, make: Make) -> Any:
    buffer, sampler = b.ring(), make()
    text = repr(sampler)
    if isinstance(sampler, RestrictedSampler):
        # It does not show the call that made it.
        text = f"ignore_earliest(2, {sampler.parts[0]!r})"
    return lambda: draw_steps(ShownBuffer(buffer.path), text, 0), lambda _: None


USES: dict[str, SamplerUse] = {
    "sample": do_sample,
    "buffer.sampler =": do_set,
    "sample_by": do_sample_by,
    "ReplayLoader, 1 thread": loader(1),
    "ReplayLoader, 2 threads": loader(2),
    "ReplayDataset.draws": dataset(0),
    "ReplayDataset.draws, 2 workers": dataset(2),
    "ReplayStream": stream(),
    "ReplayStream, 2 ranks": stream(num_ranks=2),
    "ReplayStream, beside a writer": stream(written=True),
    "concat of 1": concat(1),
    "concat of 3": concat(3),
    "concat by shares": concat(2, shares=[2, 1]),
    "concat by priority": concat(2, by="priority"),
    "concat, with Uniform": concat_with(lambda: mr.UniformSampler(1)),
    "concat, in ReplayLoader": concat_loader,
    "concat, in ConcatDataset": concat_data,
    "concat, in ConcatStream": concat_stream,
    "part of split": split("episode"),
    "in ignore_earliest": within(lambda s: mr.ignore_earliest(1, s)),
    "in Mixture, with Uniform": within(
        lambda s: mr.MixtureSampler([(s, 1), (mr.UniformSampler(4), 1)], seed=0)
    ),
    "in Mixture, with Sequence": within(
        lambda s: mr.MixtureSampler(
            [(s, 1), (mr.SequenceSampler(3, mr.UniformSampler(4)), 1)], seed=0
        )
    ),
    "in Recent": within(lambda s: mr.RecentSampler(3, 0.5, s, seed=0)),
    "in Sequence": within(lambda s: mr.SequenceSampler(2, s)),
    "in Episode": within(lambda s: mr.EpisodeSampler(s)),
    "in Episode, ragged": within(lambda s: mr.EpisodeSampler(s, layout="ragged")),
    "in Episode, running, max_length": within(
        lambda s: mr.EpisodeSampler(s, running=True, max_length=9)
    ),
    "in Staleness": within(lambda s: mr.StalenessSampler("version", 6, 2, sampler=s, seed=0)),
    "in UseCounter": within(lambda s: mr.UseCounter(90, s, name="other", seed=0)),
    "in UseCounter, lease": within(
        lambda s: mr.UseCounter(1, s, lease_s=1e-6, name="other", seed=0)
    ),
    "update_priorities": priorities,
    "acknowledge": acknowledged,
    "state_dict, resumed": resumed,
    "pickle": pickled,
    "mmreplay view, draws": page,
}


def some(columns: Iterable[str], row: int, every: int) -> list[str]:
    """One in so many columns of a row; its neighbours have others."""
    return [name for at, name in enumerate(columns) if at % every == row % every]


def sampler_cells(every: int = 1) -> Cells:
    """Each sampler with each of its uses, or with `some`."""
    return {
        name: {
            use: cell(partial(USES[use], make=make), make is Own) for use in some(USES, row, every)
        }
        for row, (name, make) in enumerate(SAMPLERS.items())
    }


def cell(do: Callable[[Bench], Any], may_be_late: bool = False) -> str:
    """Do one cell in a folder of its own."""
    with bench() as b:
        b.may_be_late = may_be_late
        try:
            first, then = do(b)
        except Exception as error:
            return f"broken: not even set up, {type(error).__name__}: {error}"
        try:
            return outcome(b, first, then)
        except CellError as error:
            return f"broken: {error}"


# Fields and transforms.

WORDS = np.array(["", "a", "länger"], object)


def numbers(count: int, shape: tuple[int, ...], dtype: str) -> Any:
    """Small numbers of a dtype."""
    size = count * math.prod(shape)
    values = (np.arange(size) % 3).reshape(count, *shape)
    return values.astype("float32" if dtype == "bfloat16" else dtype)


@dataclass(frozen=True)
class FieldKind:
    """A kind of field: how it is declared, and values of it.

    Attributes:
        fields: By path.
        values: Makes so many, by path.
        num_agents: Ends are per agent; None where they are not.
    """

    fields: dict[str, Any]
    values: Callable[[int], dict[str, Any]]
    num_agents: int | None = None


def plain(shape: tuple[int, ...], dtype: str, **options: Any) -> FieldKind:
    return FieldKind(
        {"x": mr.Field(shape, dtype, **options)}, lambda count: {"x": numbers(count, shape, dtype)}
    )


KINDS: dict[str, FieldKind] = {
    "scalar": plain((), "float32"),
    "integer": plain((), "int64"),
    "vector": plain((3,), "float32"),
    "image": plain((4, 4, 3), "uint8"),
    "bool": plain((), "bool"),
    "float16": plain((2,), "float16"),
    "bfloat16": plain((2,), "bfloat16"),
    "mutable": plain((), "float32", mutable=True),
    "nested": FieldKind(
        {"x/a": mr.Field((2,), "float32"), "x/b": mr.Field((), "float32")},
        lambda count: {
            "x/a": numbers(count, (2,), "float32"),
            "x/b": numbers(count, (), "float32"),
        },
    ),
    "numbers of any length": FieldKind(
        {"x": mr.Field((None,), "float32", max_length=8)},
        lambda count: {"x": [np.arange(n % 3, dtype=np.float32) for n in range(count)]},
    ),
    "text": FieldKind({"x": mr.Field.text(16)}, lambda count: {"x": WORDS[np.arange(count) % 3]}),
    "bytes": FieldKind(
        {"x": mr.Field.bytes(16)}, lambda count: {"x": [b"\x00\xff"[: n % 3] for n in range(count)]}
    ),
    "png": FieldKind(
        {"x": mr.Field.image((8, 10, 3), "png", max_bytes=2000)},
        lambda count: {"x": numbers(count, (8, 10, 3), "uint8")},
    ),
    "agents": FieldKind(
        {"x": mr.Field((2,), "float32")},
        lambda count: {"x": numbers(count, (2,), "float32")},
        num_agents=2,
    ),
}


def schema_of(kind: FieldKind, role: str | None = None) -> Any:
    """Fields of a step, of which ``x`` is of a kind, and plays a role if asked for."""
    ends = () if kind.num_agents is None else (kind.num_agents,)
    fields: dict[str, Any] = {
        "observation": mr.Field((2,), "float32"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field(ends, "bool"),
        "truncated": mr.Field(ends, "bool"),
    }
    if role is None:
        return mr.Schema({**fields, **kind.fields})
    if role == "goals":
        fields["observation"] = {
            "observation": mr.Field((2,), "float32"),
            **goals(nested(kind.fields)),
        }
        return mr.Schema(fields)
    fields.pop(role, None)
    return mr.Schema({**fields, **kind.fields}, roles={role: "x"})


def goals(x: dict[str, Any]) -> dict[str, Any]:
    """Achieved and desired goals of a kind."""
    return {"achieved_goal": x["x"], "desired_goal": x["x"]}


def steps_of(schema: Any, kind: FieldKind, count: int) -> dict[str, Any]:
    """Steps of such a schema, in episodes of 6."""
    every = np.arange(count)
    steps = {
        path: numbers(count, tuple(f.shape), f.dtype)
        for path, f in schema.fields.items()
        if not path.startswith("x") and "goal" not in path
    }
    for role in ("terminated", "truncated"):
        shape = tuple(schema.fields[role].shape)
        ended = (every % 6 == 5) & (role == "terminated")
        steps[role] = np.broadcast_to(ended.reshape(-1, *[1] * len(shape)), (count, *shape)).copy()
    if "observation/observation" not in steps:
        return nested({**steps, **kind.values(count)})
    result = nested(steps)
    result["observation"].update(goals(nested(kind.values(count))))
    return result


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Paths as nested dicts."""
    result: dict[str, Any] = {}
    for path, value in flat.items():
        place = result
        *parents, name = path.split("/")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return result


def heap_of(schema: Any) -> dict[str, Any]:
    """The option that rings of values of any length need."""
    varies = any(each.varies for each in schema.fields.values())
    return {"heap_bytes": "64 KiB"} if varies else {}


def same(fields: Any) -> Any:
    return fields


def unreached(achieved: Any, desired: Any, info: Any) -> Any:
    """The reward of goals that are never reached."""
    return -np.ones(len(achieved), np.float32)


def of_moments(value: float) -> Callable[[FieldKind], Any]:
    return lambda kind: mr.Normalize(
        dict.fromkeys(kind.fields, value), dict.fromkeys(kind.fields, 1.0)
    )


# The role that `x` plays, and the transform of it.
TRANSFORMS: dict[str, tuple[str | None, Callable[[FieldKind], Any]]] = {
    "NStep": ("reward", lambda _: mr.NStep(2, gamma=0.9)),
    "FrameStack": (None, lambda _: mr.FrameStack(2, "x")),
    "FrameStack, axis": (None, lambda _: mr.FrameStack(2, "x", axis=-1)),
    "ActionHistory": ("action", lambda _: mr.ActionHistory(2)),
    "HER": ("goals", lambda _: mr.HER("future", 0.5, unreached)),
    "DiscountedReturn": ("reward", lambda _: mr.DiscountedReturn(0.9, time_limit="none")),
    "GAE": (None, lambda _: mr.GAE(0.9, 0.9, value="x")),
    "LambdaReturn": (None, lambda _: mr.LambdaReturn(0.9, 0.9, value="x")),
    "Cast": (None, lambda _: mr.Cast("float32", "x")),
    "Normalize": (None, of_moments(0.5)),
    "OneHot": (None, lambda _: mr.OneHot(3, "x")),
    "Delta": ("observation", lambda _: mr.Delta()),
    "WithoutNext": ("observation", lambda _: mr.WithoutNext()),
    "Encoded": (None, lambda _: mr.Encoded("x")),
    "Apply": (None, lambda _: mr.Apply(same)),
}


def transform_cell(name: str, kind: FieldKind) -> str:
    """A transform of a field of a kind: draws, windows and a loader."""

    def do(b: Bench) -> Any:
        role, make = TRANSFORMS[name]

        def first() -> Any:
            schema = schema_of(kind, role)
            return b.stack.enter_context(
                mr.ReplayBuffer.create(
                    None,
                    schema,
                    64,
                    engine="memory",
                    transforms=[make(kind)],
                    sampler=mr.UniformSampler(0),
                    autoreset="disabled",
                    **heap_of(schema),
                )
            )

        def then(buffer: Any) -> None:
            buffer.extend(steps_of(buffer.schema, kind, STEPS))
            batch = buffer.sample(5)
            assert len(batch) == 5
            buffer.take(batch.env_ids, batch.positions, key=batch.key)
            buffer.sampler = mr.SequenceSampler(3, mr.UniformSampler(0))
            buffer.sample(2)

        return first, then

    return cell(do)


def transform_cells(every: int = 1) -> Cells:
    """Each transform with each kind of field that it works on, or with `some`."""
    return {
        name: {each: transform_cell(name, KINDS[each]) for each in some(KINDS, row, every)}
        for row, name in enumerate(TRANSFORMS)
    }


FieldUse = Callable[[Bench, Any, FieldKind, Any], Any]


def as_written(buffer: Any, kind: FieldKind) -> None:
    """What is stored is what was added."""
    wanted = kind.values(STEPS)
    for path in kind.fields:
        got = buffer.get_field(path, 0, np.arange(STEPS))
        assert same_values(got, wanted[path]), path


def same_values(got: Any, wanted: Any) -> bool:
    """Whether a column of any kind has some values."""
    if len(got) != len(wanted):
        return False
    for one, other in zip(got, wanted, strict=True):
        one = np.asarray(one)
        if isinstance(other, str | bytes):
            wanted_bytes = other.encode() if isinstance(other, str) else other
            if one.tobytes() != wanted_bytes:
                return False
            continue
        if one.dtype == np.uint16 and np.asarray(other).dtype == np.float32:
            one = (one.astype(np.uint32) << 16).view(np.float32)
        if not np.array_equal(one, np.asarray(other)):
            return False
    return True


def field_ring(b: Bench, kind: FieldKind, role: str | None = None) -> Any:
    """A ring of a kind of field, closed; and its schema."""
    schema, path = schema_of(kind, role), b.new()
    with mr.ReplayBuffer.create(
        path, schema, 64, commit_every=None, autoreset="disabled", **heap_of(schema)
    ) as buffer:
        buffer.extend(steps_of(schema, kind, STEPS))
    return path


def use_add(b: Bench, kind: FieldKind) -> Any:
    schema, path = schema_of(kind), b.new()

    def first() -> Any:
        return b.stack.enter_context(
            mr.ReplayBuffer.create(path, schema, 64, autoreset="disabled", **heap_of(schema))
        )

    def then(buffer: Any) -> None:
        steps = steps_of(schema, kind, STEPS)
        for n in range(STEPS):
            buffer.add(at(steps, n))
        as_written(buffer, kind)

    return first, then


def at(steps: Any, number: int) -> Any:
    """One step of nested columns."""
    if isinstance(steps, dict):
        return {name: at(each, number) for name, each in steps.items()}
    return steps[number]


def use_extend(engine: str) -> Any:
    def do(b: Bench, kind: FieldKind) -> Any:
        schema = schema_of(kind)
        path = None if engine == "memory" else b.new()

        def first() -> Any:
            return b.stack.enter_context(
                mr.ReplayBuffer.create(
                    path, schema, 64, engine=engine, autoreset="disabled", **heap_of(schema)
                )
            )

        def then(buffer: Any) -> None:
            buffer.extend(steps_of(schema, kind, STEPS))
            as_written(buffer, kind)
            buffer.sample(5)

        return first, then

    return do


def writing(change: Callable[[Any, Bench, FieldKind], Any]) -> Any:
    """Change an open ring; it holds what it held."""

    def do(b: Bench, kind: FieldKind) -> Any:
        buffer = b.stack.enter_context(mr.ReplayBuffer.open(field_ring(b, kind), mode="r+"))
        return (
            lambda: change(buffer, b, kind),
            lambda result: as_written(buffer if result is None else result, kind),
        )

    return do


def resize(buffer: Any, b: Bench, kind: FieldKind) -> None:
    for capacity in (90, STEPS):
        buffer.resize(capacity)


def snapshot(buffer: Any, b: Bench, kind: FieldKind) -> Any:
    path = b.new()
    buffer.snapshot(path)
    return b.stack.enter_context(mr.ReplayBuffer.open(path))


def rewrite(buffer: Any, b: Bench, kind: FieldKind) -> None:
    for path in kind.fields:
        some = np.arange(3)
        buffer.write_field(path, 0 * some, some, kind.values(3)[path])


def reading(
    open_: Callable[[Any, Bench, FieldKind], Any],
    then: Callable[[Any, FieldKind], Any] = lambda opened, kind: None,
) -> Any:
    """Look at a ring in some way.

    Args:
        open_: Puts the parts together, or makes the one call that is asked about: it
            may be refused.
        then: Takes what that returned, and must work.
    """

    def do(b: Bench, kind: FieldKind) -> Any:
        path = field_ring(b, kind)
        return lambda: open_(path, b, kind), lambda opened: then(opened, kind)

    return do


def opened(b: Bench, path: Path, **options: Any) -> Any:
    return b.stack.enter_context(mr.ReplayBuffer.open(path, **options))


def said(*words: str) -> str:
    """What a command prints; it has to succeed."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = run([str(word) for word in words])
    assert code == 0, (words, code, out.getvalue())
    return out.getvalue()


def compact(path: Path, b: Bench, kind: FieldKind) -> Any:
    target = b.new()
    mr.compact(path, target)
    return opened(b, target)


def exported(name: str, suffix: str) -> Any:
    """Export a ring to a format, which may be refused, and load it again."""

    def do(b: Bench, kind: FieldKind) -> Any:
        path, file = field_ring(b, kind), b.path / f"out{suffix}"
        b.unchanged.append(file.exists)

        def then(_: Any) -> None:
            back = b.new()
            mr.load(file, back, format=name)
            as_written(opened(b, back), kind)

        return lambda: mr.export(path, file, format=name), then

    return do


def overview(path: Path, b: Bench, kind: FieldKind) -> None:
    shown = ShownBuffer(path)
    b.stack.callback(shown.close)
    background = BackgroundReader()
    b.stack.callback(background.close)
    make_overview(shown, EpisodeList(shown, background), shown.buffer())


def joined(path: Path, b: Bench, kind: FieldKind) -> Any:
    return b.stack.enter_context(mr.concat([path, field_ring(b, kind)], seed=0))


def loaded(path: Path, b: Bench, kind: FieldKind) -> Any:
    return b.stack.enter_context(mr.ReplayLoader(opened(b, path), 4))


def collated(path: Path, b: Bench, kind: FieldKind) -> Any:
    return DataLoader(mr.ReplayDataset(path), batch_size=4, collate_fn=mr.collate)


def windowed(path: Path, b: Bench, kind: FieldKind) -> Any:
    return [
        opened(b, path, sampler=sampler)
        for sampler in (
            mr.SequenceSampler(3, mr.UniformSampler(0), first_only=list(kind.fields)),
            mr.EpisodeSampler(mr.UniformSampler(0)),
            mr.EpisodeSampler(mr.UniformSampler(0), layout="ragged"),
        )
    ]


def draw_each(buffers: Any, kind: FieldKind) -> None:
    """Draw from each of some buffers."""
    for buffer in buffers:
        sampled(buffer)


FIELD_USES: dict[str, Any] = {
    "add": use_add,
    "extend, memmap": use_extend("memmap"),
    "extend, zarr": use_extend("zarr"),
    "extend, memory": use_extend("memory"),
    "resize": writing(resize),
    "snapshot": writing(snapshot),
    "write_field": writing(rewrite),
    "compact": reading(compact, as_written),
    "windows and episodes": reading(windowed, draw_each),
    "concat": reading(joined, lambda both, kind: sampled(both)),
    "ReplayLoader": reading(loaded, lambda batches, kind: first_batches(batches)),
    "ReplayDataset, collate": reading(collated, lambda batches, kind: first_batches(batches)),
    "field_moments": reading(
        lambda path, b, kind: mr.field_moments(opened(b, path), list(kind.fields))
    ),
    "histogram": reading(
        lambda path, b, kind: [mr.histogram(opened(b, path), p, 4) for p in kind.fields]
    ),
    "episode_table": reading(lambda path, b, kind: mr.episode_table(opened(b, path))),
    "GroupSampler by it": reading(
        lambda path, b, kind: opened(b, path, sampler=mr.GroupSampler("x", rows=8)),
        lambda buffer, kind: buffer.sample(1),
    ),
    "verify": reading(lambda path, b, kind: mr.verify_buffer(path)),
    "mmreplay info, JSON": reading(lambda path, b, kind: json.loads(said("info", path, "--json"))),
    "mmreplay head, JSON": reading(lambda path, b, kind: json.loads(said("head", path, "--json"))),
    "mmreplay stats, JSON": reading(
        lambda path, b, kind: json.loads(said("stats", path, "--json"))
    ),
    "mmreplay view, overview": reading(overview),
    "npz and back": exported("npz", ".npz"),
    "pt and back": exported("pt", ".pt"),
    "safetensors and back": exported("safetensors", ".safetensors"),
    "parquet and back": exported("parquet", ".parquet"),
    "csv and back": exported("csv", ".csv"),
}


def field_cells(every: int = 1) -> Cells:
    """Each kind of field with each of its uses, or with `some`."""
    return {
        name: {
            use: cell(partial(FIELD_USES[use], kind=kind)) for use in some(FIELD_USES, row, every)
        }
        for row, (name, kind) in enumerate(KINDS.items())
    }


# What is recorded and shown.

TABLES: dict[str, Callable[[int], Cells]] = {
    "samplers": sampler_cells,
    "transforms": transform_cells,
    "fields": field_cells,
}


def shown_table(cells: Cells, corner: str) -> str:
    """A table in Markdown: uses that are refused to some, and what is said."""
    says: dict[str, int] = {}
    marks = {
        row: {
            column: "✓"
            if what == WORKS
            else str(says.setdefault(general(what, row), len(says) + 1))
            for column, what in columns.items()
        }
        for row, columns in cells.items()
    }
    # Uses that are refused alike share a column.
    alike: dict[tuple[str, ...], list[str]] = {}
    for column in next(iter(cells.values())):
        alike.setdefault(tuple(row[column] for row in marks.values()), []).append(column)
    works = ("✓",) * len(cells)
    always = alike.pop(works, [])
    lines = [
        f"| {corner} | " + " | ".join("; ".join(each) for each in alike.values()) + " |",
        "|---|" + ":-:|" * len(alike),
    ]
    for name, row in marks.items():
        shown = " | ".join(row[columns[0]] for columns in alike.values())
        lines.append(f"| {name} | {shown} |")
    text = f"With all of them work: {'; '.join(always)}.\n\n" if always else ""
    notes = "".join(f"{number}. {each}\n" for each, number in says.items())
    return text + "\n".join(lines) + "\n\n" + notes


def general(cell: str, row: str) -> str:
    """A refusal without the values of its cell, so that the like have one note."""
    text = cell.removeprefix("refused: ")
    text = re.sub(r"\bgot .*?(?=[.:;] |, and |\.$)", "got …", text, count=1)
    text = re.sub(
        r"\b(of the|of a|has a|which the|draw from) (\w+Sampler|UseCounter|Own)\b", r"\1 …", text
    )
    text = re.sub(r"^\w+( around \w+)*(?= cannot draw a batch in parts)", "…", text)
    text = re.sub(r"^(Replay|Concat)Stream", "a stream", text)
    text = re.sub(r"'x(/\w)?'", "'x'", text)
    if row in TRANSFORMS:
        text = text.replace(row.partition(",")[0], "…")
    return text.replace("|", "\\|")


PAGES = {"samplers": ("samplers.md", "sampler"), "transforms": ("transforms.md", "transform")}


def with_table(text: str, name: str, table: str) -> str:
    """A page with its generated table put in."""
    begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def main() -> None:
    """Compute all cells, record them and write the tables of the pages."""
    tables = {name: make(1) for name, make in TABLES.items()}
    broken = [
        f"{table}: {row} x {column}: {what}"
        for table, cells in tables.items()
        for row, columns in cells.items()
        for column, what in columns.items()
        if what.startswith("broken")
    ]
    print("\n".join(broken), file=sys.stderr)
    print(f"{len(broken)} broken cells", file=sys.stderr)
    RECORD.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n")
    for name, (file, corner) in PAGES.items():
        shown = shown_table(tables[name], corner)
        text = (DOCS / file).read_text()
        (DOCS / file).write_text(with_table(text, name, shown))


if __name__ == "__main__":
    main()

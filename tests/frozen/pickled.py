"""Objects that users pickle: how each is made, and what it does when it is back.

Everything is reached by public names. The pickles were made in `HERE`; where they are
read, the folder in them is another one (`moved`).
"""

from __future__ import annotations

import dataclasses
import pickle
import pickletools
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import mmreplay as mr

HERE = Path("/tmp/mmreplay-frozen-pickles")
PROTOCOL = 3
"""The newest without frames, whose lengths would have to be made anew with a path's."""


def moved(data: bytes, folder: Path) -> bytes:
    """A recorded pickle, with another folder in the place of `HERE`.

    Paths are pickled as text, or as their parts: a part that is an absolute path takes
    the place of all before it.
    """
    out, ends = bytearray(), [*pickletools.genops(data)]
    for number, (code, value, at) in enumerate(ends):
        assert at is not None
        after = ends[number + 1][2] if number + 1 < len(ends) else len(data)
        if code.name != "BINUNICODE" or HERE.name not in str(value):
            out += data[at:after]
            continue
        text = str(folder) if value == HERE.name else value.replace(str(HERE), str(folder))
        coded = text.encode()
        out += b"X" + struct.pack("<I", len(coded)) + coded
    return bytes(out)


# The buffer that most cases read.


def double(batch: dict[str, Any]) -> dict[str, Any]:
    """A transform of the user's own, which pickles as its name."""
    return batch | {"reward": batch["reward"] * 2}


def distance(achieved: Any, desired: Any, info: Any) -> Any:
    """The reward of a goal."""
    return -np.abs(achieved - desired).sum(-1)


def falling(number: int) -> float:
    """A schedule of the user's own."""
    return 1 / (1 + number)


GOAL = mr.Field((2,), "float32")
FIELDS = {
    "observation": {"frame": mr.Field((2,), "int64"), "achieved_goal": GOAL, "desired_goal": GOAL},
    "action": mr.Field((), "int32"),
    "reward": mr.Field((), "float32"),
    "value": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}


def step(number: int, end: bool) -> dict[str, Any]:
    """Values that no other step has."""
    return {
        "observation": {
            "frame": [number, -number],
            "achieved_goal": [number, number / 2],
            "desired_goal": [-number, 0.25],
        },
        "action": np.int32(number % 7),
        "reward": np.float32(number / 4),
        "value": np.float32(number / 8),
        "terminated": end,
        "truncated": False,
    }


def ring(path: Path) -> Path:
    """130 steps in a ring of 100, in episodes of nine."""
    with mr.ReplayBuffer.create(
        path, mr.Schema(FIELDS), 100, engine="memmap", commit_every=None, autoreset="disabled"
    ) as buffer:
        for number in range(130):
            buffer.add(step(number, number % 9 == 8))
    return path


def reader(folder: Path, **options: Any) -> mr.ReplayBuffer:
    """The ring, open to be read."""
    return mr.ReplayBuffer.open(folder / "ring", **options)


def plain(value: Any, folder: Path) -> Any:
    """A value as JSON, with the folder made alike."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist(), folder)
    if hasattr(value, "detach"):
        return plain(value.detach().cpu().float().numpy(), folder)
    if isinstance(value, Mapping):
        return {str(key): plain(each, folder) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, folder) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    # A function's address differs by process.
    text = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    return text.replace(str(folder), "<folder>")


# What an object does, by its kind.


def draws(sampler: Any, folder: Path) -> Any:
    """Three batches, and what is learned of them where that is kept."""
    found = []
    with reader(folder, sampler=sampler) as buffer:
        for _ in range(3):
            batch = buffer.sample(6)
            found.append([batch.env_ids, batch.positions, batch.probabilities, batch.weights])
            if getattr(sampler, "keeps_priorities", hasattr(sampler, "priorities")):
                buffer.update_priorities(batch, batch.positions % 7 + 1.0)
    return found


def sampled(sampler: Any, folder: Path) -> Any:
    return {"repr": repr(sampler), "draws": draws(sampler, folder), "state": sampler.state_dict()}


def transformed(transform: Any, folder: Path) -> Any:
    """The fields of steps that the transform makes."""
    with reader(folder, sampler=mr.UniformSampler(0), transforms=[transform]) as buffer:
        batch = buffer.take(np.zeros(6, int), np.arange(60, 66), key=7)
        return {"repr": repr(transform), "batch": {n: batch[n] for n in sorted(batch)}}


def scheduled(schedule: Any, _: Path) -> Any:
    return {"repr": repr(schedule), "values": [schedule(n) for n in (0, 3, 100)]}


def shown(value: Any, _: Path) -> Any:
    """Text, and the values of what has fields."""
    told = {"repr": repr(value)}
    if dataclasses.is_dataclass(value):
        told |= {
            each.name: getattr(value, each.name)
            for each in dataclasses.fields(value)
            if not each.name.startswith("_")
        }
    return told


def raised(error: Any, _: Path) -> Any:
    return {
        "name": type(error).__name__,
        "text": str(error),
        "notes": getattr(error, "__notes__", []),
    }


def opened(buffer: mr.ReplayBuffer, _: Path) -> Any:
    """A buffer that came back open."""
    with buffer:
        batch = buffer.sample(6)
        return {
            "path": buffer.path,
            "length": len(buffer),
            "writable": buffer.writable,
            "sampler": repr(buffer.sampler),
            "transforms": repr(buffer.transforms),
            "positions": batch.positions,
            "fields": {name: batch[name] for name in sorted(batch)},
        }


def mixed(both: mr.Concat, _: Path) -> Any:
    batches = [both.sample(6) for _ in range(3)]
    both.close()
    return [[batch.positions, batch.buffer_ids] for batch in batches]


def split_off(part: mr.Part, folder: Path) -> Any:
    return {
        "repr": repr(part),
        "state": part.state_dict(),
        "draws": draws(part.sampler(mr.UniformSampler(3)), folder),
    }


def streamed(stream: Any, _: Path) -> Any:
    return [batch.positions for batch in stream]


def indexed(dataset: Any, _: Path) -> Any:
    return {"length": len(dataset)}


def limited(limiter: mr.RateLimiter, _: Path) -> Any:
    return {
        "repr": repr(limiter),
        "inserts": [limiter.allows_insert(i, 10, 20) for i in (5, 50)],
        "samples": [limiter.allows_sample(20, s, 20) for s in (5, 500)],
    }


def summed(tree: Any, _: Path) -> Any:
    return {"repr": repr(tree), "leaves": tree.get(np.arange(8))}


def batched(batch: mr.Batch, _: Path) -> Any:
    return {
        "fields": {name: batch[name] for name in sorted(batch)},
        "places": [batch.env_ids, batch.positions, batch.probabilities, batch.weights],
    }


# Samplers, after three batches each.


def used(make: Callable[[mr.ReplayBuffer], Any]) -> Callable[[Path], Any]:
    """A sampler in the middle of its work."""

    def made(folder: Path) -> Any:
        with reader(folder) as buffer:
            sampler = make(buffer)
        draws(sampler, folder)
        return sampler

    return made


def per(**options: Any) -> mr.PrioritizedSampler:
    return mr.PrioritizedSampler(seed=1, **options)


def rich(buffer: mr.ReplayBuffer) -> Any:
    """Episodes by their returns."""
    table = mr.episode_table(buffer)
    return mr.return_within(table, least=float(np.nanmedian(table.returns)))


uniform = mr.UniformSampler
SAMPLERS: dict[str, Callable[[mr.ReplayBuffer], Any]] = {
    "uniform": lambda _: uniform(1),
    "uniform, blocks": lambda _: uniform(1, block=4),
    "prioritized": lambda _: per(),
    "prioritized, in RAM": lambda _: per(name=None),
    "prioritized, schedule": lambda _: per(beta=mr.LinearSchedule(0.4, 1.0, 10)),
    "prioritized, own schedule": lambda _: per(alpha=falling, alpha_every=2),
    "prioritized, buffer": lambda _: per(normalize="buffer"),
    "rank": lambda _: mr.RankPrioritizedSampler(seed=1, resort_every=20),
    "sequence": lambda _: mr.SequenceSampler(4, uniform(1)),
    "sequence, padded": lambda _: mr.SequenceSampler(4, per(), boundary="pad"),
    "sequence, shuffled": lambda _: mr.SequenceSampler(4, mr.ShuffledSampler(1)),
    "episode": lambda _: mr.EpisodeSampler(uniform(1)),
    "episode, where": lambda b: mr.EpisodeSampler(uniform(1), where=rich(b)),
    "recent": lambda _: mr.RecentSampler(20, 0.5, per(), seed=1),
    "shrinking": lambda _: mr.EmphasizeRecentSampler(20, seed=1),
    "shuffled": lambda _: mr.ShuffledSampler(1),
    "stratified": lambda _: mr.StratifiedSampler(1),
    "distinct": lambda _: mr.DistinctSampler(1),
    "mixture": lambda _: mr.MixtureSampler([(uniform(1), 0.5), (per(), 0.5)], seed=1),
    "earliest": lambda _: mr.ignore_earliest(3, per()),
    "earliest, sequence": lambda _: mr.ignore_earliest(3, mr.SequenceSampler(4, uniform(1))),
    "part": lambda b: mr.split(b, [0.5, 0.5], seed=0)[0].sampler(per()),
}
TRANSFORMS: dict[str, Callable[[], Any]] = {
    "FrameStack": lambda: mr.FrameStack(2, "observation/frame"),
    "ActionHistory": lambda: mr.ActionHistory(2),
    "NStep": lambda: mr.NStep(2, 0.9),
    "Delta": lambda: mr.Delta("observation/frame"),
    "OneHot": lambda: mr.OneHot(10),
    "Cast": lambda: mr.Cast("float32", "observation/achieved_goal", scale=0.5),
    "Normalize": lambda: mr.Normalize({"reward": 1.0}, {"reward": 2.0}),
    "Apply": lambda: mr.Apply(double),
    "HER": lambda: mr.HER("future", 0.5, distance),
    "GAE": lambda: mr.GAE(0.9, 0.8),
    "LambdaReturn": lambda: mr.LambdaReturn(0.9, 0.8),
    "DiscountedReturn": lambda: mr.DiscountedReturn(0.9),
}


def _error(_: Path) -> Exception:
    error = mr.SchemaError("got 1, expected 2")
    error.add_note("a note")
    return error


def _batch(folder: Path) -> mr.Batch:
    with reader(folder, sampler=uniform(1)) as buffer:
        return buffer.sample(4)


def _table(folder: Path) -> mr.EpisodeTable:
    with reader(folder) as buffer:
        return mr.episode_table(buffer)


def _tree(tree: Any) -> Any:
    tree.set(np.arange(8), np.arange(8.0))
    return tree


def _opened(folder: Path) -> mr.ReplayBuffer:
    sampler = per()
    draws(sampler, folder)
    return reader(folder, sampler=sampler, transforms=[mr.NStep(3, gamma=0.5)])


def _concat(folder: Path) -> mr.Concat:
    readers = [reader(folder, sampler=uniform(seed)) for seed in (0, 1)]
    both = mr.concat(readers, shares=[0.25, 0.75], seed=3)
    both.sample(6)
    return both


def _part(folder: Path) -> mr.Part:
    with reader(folder) as buffer:
        return mr.split(buffer, [0.5, 0.5], seed=0)[1]


# Adapters: a ring of their own each.


def _skrl(kind: str, module: str) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        import torch

        memories = __import__(f"mmreplay.adapters.{module}", fromlist=[kind])
        memory = getattr(memories, kind)(8, device="cpu", path=folder / "own")
        memory.create_tensor("x", 1)
        for number in range(11):
            memory.add_samples(x=torch.tensor([[float(number)]]))
        if kind == "RandomMemory":
            memory.sample(["x"], 5)
        return memory

    return made


def skrl_does(memory: Any, _: Path) -> Any:
    told = {"length": len(memory), "x": memory.get_tensor_by_name("x")}
    if hasattr(type(memory), "sample") and "Random" in type(memory).__name__:
        told["draws"] = [memory.sample(["x"], 5)[0][0] for _ in range(3)]
    return told


def _velora(folder: Path) -> Any:
    import torch

    from mmreplay.adapters import velora

    buffer = velora.ReplayBuffer(8, 1, 1, 1, path=folder / "own")
    one = torch.arange(11.0)[:, None]
    buffer.add_multi(one, one, one, one, one > 99, one)
    buffer.sample(5)
    return buffer


def velora_does(buffer: Any, _: Path) -> Any:
    return {
        "metadata": buffer.metadata(),
        "length": len(buffer),
        "draws": [buffer.sample(5).states for _ in range(3)],
    }


class Collected:
    """What tmrl hands to a memory."""

    def __init__(self, count: int) -> None:
        self.memory = [
            (np.float32([n]), np.float32([n]), float(n), n == 5, False, {}) for n in range(count)
        ]

    def __len__(self) -> int:
        return len(self.memory)

    def __getattr__(self, name: str) -> float:
        if name.startswith("stat_"):
            return 7.0
        raise AttributeError(name)


def _tmrl(folder: Path) -> Any:
    from mmreplay.adapters import tmrl

    memory = tmrl.GenericTorchMemory(8, 4, path=folder / "own", act_buf_len=1)
    memory.append(Collected(11))
    memory.sample()
    return memory


def tmrl_does(memory: Any, _: Path) -> Any:
    return {
        "length": len(memory),
        "stat": memory.stat_test_return,
        "draws": [memory.sample()[2] for _ in range(3)],
    }


def _actor() -> Any:
    return SimpleNamespace(is_recurrent=False, action_space=SimpleNamespace())


ALGORITHM = SimpleNamespace(gamma=0.9, update_every=5)


def _transition(number: int) -> dict[str, Any]:
    import torch

    value = torch.full((1, 1), float(number))
    return {
        "Observation": value,
        "RecurrentHiddenStates": {"rhs": torch.ones(1, 3)},
        "Done": torch.zeros(1, 1),
        "Action": value + 100,
        "Reward": value,
        "NextObservation": value + 1,
        "NextRecurrentHiddenStates": {"rhs": torch.ones(1, 3)},
        "NextDone": torch.full((1, 1), float(number % 9 == 8)),
        "EnvironmentInformation": [{}],
    }


def _pytorchrl(kind: str) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        from mmreplay.adapters import pytorchrl

        build = getattr(pytorchrl, kind).create_factory(40, path=folder / "own")
        storage = build("cpu", _actor(), ALGORITHM, None)
        for number in range(30):
            storage.insert_transition(_transition(number))
        next(storage.generate_batches(1, 6))
        return storage

    return made


def pytorchrl_does(storage: Any, _: Path) -> Any:
    found = {
        "size": storage.size,
        "first": storage.data["Observation"][:3],
        "draws": [next(storage.generate_batches(1, 6))["Reward"] for _ in range(3)],
    }
    storage.close()
    return found


def _factory(folder: Path) -> Any:
    from mmreplay.adapters import pytorchrl

    return pytorchrl.PERBuffer.create_factory(
        40, alpha=0.6, n_step=2, path=folder / "made", resume=True
    )


def factory_does(build: Any, _: Path) -> Any:
    storage = build("cpu", _actor(), ALGORITHM, None)
    for number in range(30):
        storage.insert_transition(_transition(number))
    # It draws without a seed.
    found = {
        "size": storage.size,
        "n_step": storage.n_step,
        "drawn": [len(next(storage.generate_batches(1, 6))["Reward"])],
    }
    storage.close()
    return found


def _sb3(kind: str, **options: Any) -> Callable[[Path], Any]:
    def made(folder: Path) -> Any:
        from gymnasium import spaces

        from mmreplay.adapters import sb3

        box = spaces.Box(-100, 100, (2,), np.float32)
        space = box
        if kind == "DictReplayBuffer":
            space = spaces.Dict({"a": box})
        buffer = getattr(sb3, kind)(40, space, box, "cpu", path=folder / "own", seed=3, **options)
        for number in range(30):
            seen = np.full((1, 2), number, np.float32)
            obs = {"a": seen} if kind == "DictReplayBuffer" else seen
            after = {"a": seen + 1} if kind == "DictReplayBuffer" else seen + 1
            done = np.array([number % 9 == 8])
            buffer.add(obs, after, seen, np.array([float(number)]), done, [{}])
        buffer.sample(6)
        return buffer

    return made


def sb3_does(buffer: Any, _: Path) -> Any:
    found = {"size": buffer.size(), "draws": [buffer.sample(6).rewards for _ in range(3)]}
    buffer.close()
    return found


@dataclasses.dataclass
class Case:
    """One object: how it is made, what it does, and what it needs."""

    make: Callable[[Path], Any]
    does: Callable[[Any, Path], Any]
    needs: str = "numpy"

    @property
    def installed(self) -> bool:
        return find_spec(self.needs) is not None


def cases() -> Iterator[tuple[str, Case]]:
    """Every case by name."""
    for name, sampler in SAMPLERS.items():
        yield f"sampler, {name}", Case(used(sampler), sampled)
    for name, transform in TRANSFORMS.items():
        yield f"transform, {name}", Case(lambda _, made=transform: made(), transformed)
    yield "schedule", Case(lambda _: mr.LinearSchedule(0.4, 1.0, 9), scheduled)
    yield "schema", Case(lambda _: mr.Schema(FIELDS), shown)
    yield "field", Case(lambda _: mr.Field((2,), "bfloat16", mutable=True), shown)
    yield "error", Case(_error, raised)
    yield "batch", Case(_batch, batched)
    yield "episode table", Case(_table, shown)
    yield "span", Case(lambda _: mr.Span(np.array([1]), np.array([5])), shown)
    yield (
        "limiter",
        Case(lambda _: mr.RateLimiter(4.0, 10, 8.0, on_timeout="proceed", timeout=1.0), limited),
    )
    yield "sum tree", Case(lambda _: _tree(mr.SumTree(8)), summed)
    yield "segment tree", Case(lambda _: _tree(mr.SegmentTree(8, "min")), summed)
    yield "buffer", Case(_opened, opened)
    yield "concat", Case(_concat, mixed)
    yield "part of a split", Case(_part, split_off)
    yield "dataset", Case(lambda d: mr.ReplayDataset(d / "ring"), indexed, "torch")
    yield (
        "stream",
        Case(
            lambda d: mr.ReplayStream(d / "ring", uniform(1), 6, num_batches=3), streamed, "torch"
        ),
    )
    yield (
        "stream, shuffled",
        Case(lambda d: mr.ReplayStream(d / "ring", mr.ShuffledSampler(1), 30), streamed, "torch"),
    )
    yield ("dataset of several", Case(lambda d: mr.ConcatDataset(_concat(d)), indexed, "torch"))
    yield (
        "stream of several",
        Case(lambda d: mr.ConcatStream(_concat(d), 6, num_batches=3), streamed, "torch"),
    )
    for module in ("skrl", "rofunc"):
        for kind in ("Memory", "RandomMemory"):
            yield f"{module}, {kind}", Case(_skrl(kind, module), skrl_does, "torch")
    yield "velora", Case(_velora, velora_does, "torch")
    yield "tmrl", Case(_tmrl, tmrl_does, "torch")
    for kind in ("ReplayBuffer", "NStepReplayBuffer", "PERBuffer", "EREBuffer"):
        yield f"pytorchrl, {kind}", Case(_pytorchrl(kind), pytorchrl_does, "torch")
    yield "pytorchrl, factory", Case(_factory, factory_does, "torch")
    peer = "stable_baselines3"
    yield "sb3, ReplayBuffer", Case(_sb3("ReplayBuffer"), sb3_does, peer)
    yield ("sb3, n-step", Case(_sb3("ReplayBuffer", n_steps=3), sb3_does, peer))
    yield "sb3, DictReplayBuffer", Case(_sb3("DictReplayBuffer"), sb3_does, peer)


CASES = dict(cases())
STORE = Path(__file__).parent / "pickles"


def file_of(name: str) -> Path:
    """Where the pickle of a case is."""
    return STORE / f"{name.replace(', ', '-').replace(' ', '_')}.pickle"


def restored(name: str, folder: Path) -> Any:
    """The recorded object, over copies of its folders."""
    shutil.copytree(STORE / "ring", folder / "ring")
    own = file_of(name).with_suffix(".folder")
    if own.exists():
        shutil.copytree(own, folder / "own")
    return pickle.loads(moved(file_of(name).read_bytes(), folder))


def behaviour(name: str, folder: Path) -> Any:
    """What the recorded object does."""
    back = restored(name, folder)
    return plain(CASES[name].does(back, folder), folder)


def record(name: str) -> None:
    """Pickle a case that was not recorded yet."""
    if file_of(name).exists():
        return
    STORE.mkdir(exist_ok=True)
    if not (STORE / "ring").exists():
        ring(STORE / "ring")
        (STORE / "ring" / "LOCK").unlink(missing_ok=True)
    HERE.mkdir()
    try:
        shutil.copytree(STORE / "ring", HERE / "ring")
        made = CASES[name].make(HERE)
        data = pickle.dumps(made, PROTOCOL)
        home = getattr(made, "home", made)
        getattr(home, "close", lambda: None)()
        if (HERE / "own").exists():
            own = file_of(name).with_suffix(".folder")
            shutil.copytree(HERE / "own", own)
            for lock in own.rglob("LOCK"):
                lock.unlink()
        file_of(name).write_bytes(data)
    finally:
        shutil.rmtree(HERE)

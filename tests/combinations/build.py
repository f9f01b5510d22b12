"""Makes the buffer of a case through the public calls, and its twin beside it."""

import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import simplejpeg

import mmreplay as mr
from tests.combinations.cases import Case
from tests.combinations.twin import Twin

CAPACITY = 12
HEAP = 1 << 16
AGENTS = 2
VARYING = ("numbers", "text", "bytes")
"""Kinds whose values differ in length."""
IMAGES = ("png", "jpeg")
IN_HEAP = VARYING + IMAGES
IMAGE_SHAPE = (8, 10, 3)
FORMATS = {
    "npz": "rows.npz",
    "pt": "rows.pt",
    "csv": "rows.csv",
    "parquet": "rows.parquet",
    "safetensors": "rows.safetensors",
}
ARRAYS = ("npz", "pt", "safetensors")
"""Formats to which images become arrays, unless they are cast to files."""


@dataclass
class Built:
    """A buffer and its twin.

    Attributes:
        case: What was asked for.
        folder: For files of consumers.
        buffer: Open; for writing where it is in memory or was not copied.
        twin: What it must hold.
        fields: By path of what differs from field to field: how it is compared.
        opened: Buffers that are closed with it.
        changes: Changes of rows by consumers.
    """

    case: Case
    folder: Path
    buffer: mr.ReplayBuffer
    twin: Twin
    fields: dict
    opened: list = field(default_factory=list)
    changes: int = 0

    @property
    def path(self):
        return self.buffer.path

    def open(self, **options):
        """The same buffer again, with a sampler or transforms of its own.

        A buffer in memory cannot be opened twice: its sampler is replaced, and it is
        exported and loaded where transforms are asked for.
        """
        if self.path is not None:
            self.buffer.commit() if self.buffer.writable else None
            found = mr.ReplayBuffer.open(self.path, **options)
        else:
            target = self.folder / f"of_memory-{self.changes}"
            if not target.exists():
                file = self.folder / f"{target.name}.npz"
                mr.export(self.buffer, file)
                mr.load(file, target)
            found = mr.ReplayBuffer.open(target, **options)
        self.opened.append(found)
        return found

    def new_path(self, name):
        """A path in the folder that no other consumer has."""
        for number in range(1000):
            found = self.folder / f"{number}-{name}"
            if not found.exists():
                return found
        raise AssertionError("no free name")

    def close(self):
        for each in [*self.opened, self.buffer]:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", mr.DurabilityWarning)
                each.close()


def value_of(kind, number):
    """The value of a field of a kind in one step: no other step has the same.

    Of bool and of lengths some steps do, as there are only so many.
    """
    if kind == "scalar":
        return np.float32(number / 8)
    if kind in ("vector", "mutable"):
        return np.array([number, -number], np.float32)
    if kind == "large":
        return ((np.arange(4096) + number) % 251).astype(np.uint8).reshape(64, 64)
    if kind == "numbers":
        return np.arange(number, number + number % 4, dtype=np.int32)
    if kind == "text":
        return f"é{number}" * (number % 3)
    if kind == "bytes":
        return bytes([number % 251, 0]) * (number % 3)
    if kind in IMAGES:
        image = np.zeros(IMAGE_SHAPE, np.uint8)
        image[:4], image[4:] = number % 256, number // 256
        return image
    if kind == "bool":
        return np.array([number >> bit & 1 for bit in range(8)], bool)
    if kind == "float16":
        return np.array([number % 2048, 0.5], np.float16)
    assert kind == "bfloat16"
    # Numbers below 256 are exact; as they are stored, by the upper half of float32.
    return np.array([number % 256, 1.5], np.float32)


def as_read(kind, value):
    """A value as the buffer gives it back."""
    if kind == "bfloat16":
        return (value.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "jpeg":
        return simplejpeg.decode_jpeg(file_of(value))
    return value


def file_of(image):
    """An image as the library for JPEG encodes it."""
    return simplejpeg.encode_jpeg(image, 95, colorsubsampling="444", fastdct=False)


def field_of(kind):
    """The declaration of a field of a kind."""
    return {
        "scalar": lambda: mr.Field((), "float32"),
        "vector": lambda: mr.Field((2,), "float32"),
        "large": lambda: mr.Field((64, 64), "uint8"),
        "mutable": lambda: mr.Field((2,), "float32", mutable=True),
        "numbers": lambda: mr.Field((None,), "int32", max_length=8),
        "text": lambda: mr.Field.text(max_bytes=60),
        "bytes": lambda: mr.Field.bytes(max_bytes=60),
        "png": lambda: mr.Field.image(IMAGE_SHAPE, "png", max_bytes=2000),
        "jpeg": lambda: mr.Field.image(IMAGE_SHAPE, "jpeg", 95, "444", max_bytes=2000),
        "bool": lambda: mr.Field((8,), "bool"),
        "float16": lambda: mr.Field((2,), "float16"),
        "bfloat16": lambda: mr.Field((2,), "bfloat16"),
    }[kind]()


def leaves_of(case):
    """Kind by path of the observation's fields, and of the others."""
    observation, extra = {"observation": "vector"}, {}
    of_kind = {"extra": case.kind}
    if case.kind == "nested":
        names = ("achieved_goal", "desired_goal", "deep/state")
        of_kind = {f"extra/{name}": "vector" for name in names}
    if case.kind == "agents":
        of_kind = {}
    if case.role == "observation":
        observation = {
            path.replace("extra", "observation", 1): kind for path, kind in of_kind.items()
        }
    else:
        extra = of_kind
    if case.next_observation == "absent":
        observation = {}
    return observation, extra


class Builder:
    """Drives the calls of a case on a buffer and on its twin."""

    def __init__(self, case, folder):
        self.case, self.folder = case, folder
        self.rng = np.random.default_rng(case.seed)
        self.observation, extra = leaves_of(case)
        following = {}
        if case.next_observation == "stored":
            following = {f"next_{p}": kind for p, kind in self.observation.items()}
        self.leaves = {**self.observation, **following, **extra}
        agents = AGENTS if case.kind == "agents" else None
        self.agents = agents
        ends = mr.Field(() if agents is None else (agents,), "bool")
        self.varies = any(kind in IN_HEAP for kind in self.leaves.values())
        flat = {path: field_of(kind) for path, kind in self.leaves.items()}
        flat |= {
            "action": mr.Field((), "int32"),
            "reward": mr.Field((), "float32"),
            "uid": mr.Field((), "int64"),
            "group": mr.Field((), "int64"),
            "terminated": ends,
            "truncated": ends,
        }
        self.schema = mr.Schema.from_flat(flat)
        self.path = None if case.engine == "memory" else folder / "buffer"
        self.twin = Twin(
            CAPACITY,
            case.num_envs,
            next_step=case.autoreset == "next_step",
            observations=tuple(self.observation),
            next_observation=case.next_observation,
            agents=agents,
            varying={path for path, kind in self.leaves.items() if kind in IN_HEAP},
        )
        self.number = 0
        self.lost = []
        self.buffer = mr.ReplayBuffer.create(
            self.path,
            self.schema,
            CAPACITY,
            case.num_envs,
            engine=case.engine,
            layout=case.layout,
            autoreset=case.autoreset,
            commit_every=None,
            heap_bytes=HEAP if self.varies else None,
        )

    # Steps.

    def _step(self):
        """Values by path as they are given, and as they are read."""
        self.number += 1
        given = {path: value_of(k, self.number) for path, k in self.leaves.items()}
        read = {p: as_read(self.leaves[p], value) for p, value in given.items()}
        given |= {
            "action": np.int32(self.number),
            "reward": np.float32(self.number / 8),
            "uid": np.int64(self.number),
            "group": np.int64(self.number // 3),
        }
        given["terminated"], given["truncated"] = self._ends()
        if "added" in self.leaves:
            read["added"] = given["added"]
        return given, {**given, **read}

    def _ends(self):
        rng, kind = self.rng, self.case.ends
        chance = rng.random()
        terminated = chance < (0.3 if kind == "terminated" else 0.12)
        truncated = 0.12 < chance < 0.3 and kind != "terminated"
        if self.agents is None:
            return bool(terminated), bool(truncated)
        if terminated or truncated:
            which = rng.random(self.agents) < 0.5
            if terminated:
                which[:] = True
            return which, ~which
        # Some agents end before the others.
        return np.array([rng.random() < 0.2, False]), np.zeros(self.agents, bool)

    def _final(self):
        self.number += 1
        return {p: value_of(kind, self.number) for p, kind in self.observation.items()}

    def add(self, env_ids=None):
        """One step of each environment, or of some."""
        chosen = list(range(self.case.num_envs)) if env_ids is None else env_ids
        made = {env_id: self._step() for env_id in chosen}
        finals = {env_id: self._final() for env_id in chosen}
        with_final = self.case.ends == "final" and self.rng.random() < 0.8
        alone = self.case.num_envs == 1 and env_ids is None

        def joined(rows):
            return rows[0] if alone else stacked(rows)

        options = {} if env_ids is None else {"env_ids": env_ids}
        if with_final:
            final = joined(list(finals.values()))
            options["final_observation"] = nested(final).get("observation")
        self.buffer.add(nested(joined([g for g, _ in made.values()])), **options)
        for env_id, (_, read) in made.items():
            final = {p: as_read(self.observation[p], v) for p, v in finals[env_id].items()}
            self.twin.add(env_id, read, final if with_final else None)

    def extend(self, count):
        """Some steps of all environments in one call."""
        made = [[self._step() for _ in self.twin.envs] for _ in range(count)]
        rows = [
            step[0][0] if self.case.num_envs == 1 else stacked([g for g, _ in step])
            for step in made
        ]
        if not rows:
            return
        self.buffer.extend(nested(stacked(rows)))
        for step in made:
            for env_id, (_, read) in enumerate(step):
                self.twin.add(env_id, read)

    def write(self, count):
        """So many steps, and between them what the case's ends ask for."""
        ends, num_envs = self.case.ends, self.case.num_envs
        done = 0
        while done < count:
            if ends == "partial" and self.rng.random() < 0.7:
                some = self.rng.permutation(num_envs)[: self.rng.integers(1, num_envs + 1)]
                self.add(some.tolist())
                done += 1
            elif ends != "final" and self.rng.random() < 0.3:
                block = min(count - done, 3)
                self.extend(block)
                done += block
            else:
                self.add()
                done += 1
            if ends in ("end_episodes", "discard") and self.rng.random() < 0.25:
                some = [e for e in range(num_envs) if self.rng.random() < 0.6]
                discard = ends == "discard" and self.rng.random() < 0.7
                if some:
                    self.buffer.end_episodes(some, discard=discard)
                    for env_id in some:
                        self.twin.end_episodes(env_id, discard=discard)
            if ends in ("break", "truncate", "continue") and self.rng.random() < 0.2:
                self.reopen(ends)

    def reopen(self, on_resume="break"):
        self.buffer.close()
        self.buffer = mr.ReplayBuffer.open(self.path, "r+", on_resume=on_resume, commit_every=None)
        self.twin.reopen(on_resume)

    # Histories.

    def history(self):
        """What happens to the buffer besides."""
        case = self.case
        name = case.history
        self.write(case.steps)
        if name == "wrapped":
            self.write(CAPACITY + 3)
        elif name == "cleared":
            some = [e for e in range(case.num_envs) if self.rng.random() < 0.6] or [0]
            self.buffer.clear(some)
            for env_id in some:
                self.twin.clear(env_id)
            self.write(case.steps // 2)
        elif name == "dequeued":
            self._dequeue()
            self.write(case.steps // 2)
        elif name in ("grown", "shrunk"):
            self.write(CAPACITY)
            capacity = CAPACITY + 5 if name == "grown" else CAPACITY - 5
            self.buffer.resize(capacity)
            self.twin.resize(capacity)
            self.write(case.steps // 2)
        elif name == "field_added":
            self.buffer.add_field("added", mr.Field((), "float32"), 1.5)
            self.twin.add_field("added", np.float32(1.5))
            self.leaves["added"] = "scalar"
            self.write(case.steps // 2)
        elif name in ("snapshot", "compacted", "repaired"):
            self._copy(name)
        elif name in FORMATS:
            self._convert(name)

    def _dequeue(self):
        envs = [e for e, env in enumerate(self.twin.envs) if len(env.rows) - env.first >= 3]
        if envs:
            taken = self.buffer.dequeue(2, envs)
            expected = [(e, self.twin.envs[e].first + i) for e in envs for i in range(2)]
            assert indices_of(taken) == expected
            for env_id in envs:
                self.twin.dequeue(env_id, 2)

    def _copy(self, name):
        target = self.folder / name
        if name == "snapshot":
            self.buffer.snapshot(target)
        self.buffer.close()
        if name == "compacted":
            mr.compact(self.path, target)
        elif name == "repaired":
            self._lose()
            report = mr.repair(self.path, target)
            cuts = [(cut.env_id, cut.first, cut.stop) for cut in report.cuts]
            assert cuts == self.lost, cuts
        self._go_on(target)

    def _lose(self):
        """Damage steps inside of episodes, or the oldest rows, where there are any."""
        alive = self.twin.alive()
        for number in self.rng.permutation(len(alive)).tolist():
            found = damaged_with(self.path, self.twin, *alive[number])
            if all(self._inside_or_oldest(*each) for each in found):
                damage(self.path, *alive[number])
                for each in found:
                    self.twin.lose(*each)
                self.lost = found
                return

    def _inside_or_oldest(self, env_id, first, stop):
        env = self.twin.envs[env_id]
        if first == env.first:
            # Not where an episode would begin with the row of its end.
            return stop < len(env.rows) - 1 and not env.rows[stop].final
        around = {(env_id, first - 1), (env_id, stop)}
        return any(around <= {*steps} for steps in self.twin.episodes())

    def _go_on(self, target):
        """Write a few steps to a copy."""
        self.path = target
        ends = self.case.ends
        on_resume = ends if ends in ("truncate", "continue") else "break"
        self.buffer = mr.ReplayBuffer.open(target, "r+", on_resume=on_resume, commit_every=None)
        self.twin.reopen(on_resume)
        self.write(3)

    def _convert(self, name):
        file, target = self.folder / FORMATS[name], self.folder / "loaded"
        # csv holds no images unless it must.
        options = {"force": True} if name == "csv" and self.case.kind == "large" else {}
        images = {path: kind for path, kind in self.leaves.items() if kind in IMAGES}
        casts = images if name in ARRAYS else None
        mr.export(self.buffer, file, cast=casts, **options)
        self.buffer.close()
        mr.load(file, target)
        self._go_on(target)


def stacked(rows):
    """Steps by path as columns; values of any length as lists."""
    return {path: column([row[path] for row in rows]) for path in rows[0]}


def column(values):
    """Values of some steps as an array, or as a list where they may vary."""
    first = values[0]
    varies = isinstance(first, str | bytes | list)
    if varies or (np.ndim(first) == 1 and first.dtype == np.int32):
        return values
    return np.stack(values)


def nested(flat):
    """A nested mapping of values by path."""
    found = {}
    for path, value in flat.items():
        *branches, name = path.split("/")
        here = found
        for branch in branches:
            here = here.setdefault(branch, {})
        here[name] = value
    return found


def indices_of(batch):
    """(env_id, position) of each step of a batch."""
    return list(zip(batch.env_ids.tolist(), batch.positions.tolist(), strict=True))


def stored_at(path, env_id, position):
    """Where a row lies, and what is lost with it.

    Of Zarr, that is a shard of a field that every buffer here has.

    Returns:
        The file, the byte in it, and ranges of environments and of slots.
    """
    data = max(path.glob("data-*"))
    with mr.ReplayBuffer.open(path) as buffer:
        ring = buffer.metadata.ring
    slot = position % ring.slots
    if not (data / "zarr").exists():
        records = data / "records.bin"
        at = ring.row(env_id, position) * (records.stat().st_size // ring.num_rows)
        return records, at, range(env_id, env_id + 1), range(slot, slot + 1)
    described = json.loads((data / "zarr" / "uid" / "zarr.json").read_text())
    size = described["chunk_grid"]["configuration"]["chunk_shape"]
    both = zip((env_id, slot), size, strict=True)
    numbers = [at // each for at, each in both]
    ranges = [
        range(number * each, (number + 1) * each)
        for number, each in zip(numbers, size, strict=True)
    ]
    return data / "zarr" / "uid" / ".".join(["c", *map(str, numbers)]), 9, *ranges


def damaged_with(path, twin, env_id, position):
    """Rows that are lost with one: environment, first and stop of each stretch."""
    with mr.ReplayBuffer.open(path) as buffer:
        num_slots = buffer.metadata.ring.slots
    _, _, env_ids, slots = stored_at(path, env_id, position)
    found = []
    for each, position in twin.alive():
        if each in env_ids and position % num_slots in slots:
            if found and found[-1][0] == each and found[-1][2] == position:
                found[-1] = (each, found[-1][1], position + 1)
            else:
                found.append((each, position, position + 1))
    return found


def damage(path, env_id, position):
    """Change a byte of a row on disk."""
    file, offset, _, _ = stored_at(path, env_id, position)
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


def build(case, folder):
    """Make the buffer of a case, and its twin."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mr.DurabilityWarning)
        builder = Builder(case, folder)
        builder.history()
    return Built(case, folder, builder.buffer, builder.twin, builder.leaves)

"""A closed buffer lets go of every file and mapping, though the object lives."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FailedError

FLAT = {
    "observation": mr.Field((17,), "float32"),
    "pixels": mr.Field((40, 40), "uint8"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
VARYING = {**FLAT, "text": mr.Field.text(40), "seen": mr.Field((), "int8", mutable=True)}


def open_files(folder):
    """Files below a folder that this process has open or mapped."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(each)
        except FileNotFoundError:  # The one that lists the folder.
            continue
        found.add(target)
    for line in Path("/proc/self/maps").read_text().splitlines():
        found.add(line.split(maxsplit=5)[-1])
    return sorted(each for each in found if each.startswith(f"{folder}/"))


def make(folder, schema=None, capacity=300, **options):
    schema = mr.Schema(FLAT if schema is None else schema)
    varies = {"heap_bytes": "1 MiB"} if schema.varying else {}
    return mr.ReplayBuffer.create(folder / "ring", schema, capacity, **varies, **options)


def fill(buffer, count=400):
    numbers = np.arange(count)
    columns = {
        "observation": np.ones((count, 17), np.float32) * numbers[:, None],
        "pixels": np.full((count, 40, 40), 3, np.uint8),
        "reward": numbers.astype(np.float32),
        "terminated": numbers % 7 == 6,
        "truncated": np.zeros(count, bool),
    }
    if "text" in buffer.schema:
        columns["text"] = [f"row {number}" for number in numbers]
        columns["seen"] = np.zeros(count, np.int8)
    buffer.extend(columns)
    buffer.sample(32)
    buffer.commit()


def load(buffer):
    with mr.ReplayLoader(buffer, 32, num_threads=2) as batches:
        for _, _ in zip(range(5), batches, strict=False):
            pass


def read(buffer):
    first = int(buffer.span.first[0])
    buffer.take([0], [first + 3])
    buffer.gather_all()
    buffer.get_field("reward", [0], [first])
    mr.episode_table(buffer)
    mr.field_moments(buffer)
    return buffer.episodes.episodes(0)


def grow(buffer):
    buffer.resize(500)
    fill(buffer)


def prioritize(buffer):
    batch = buffer.sample(8)
    buffer.update_priorities(batch, np.ones(8))


USES = {
    "filled": (dict, None),
    "values that vary": (lambda: {"schema": VARYING}, read),
    "read": (dict, read),
    "loaded": (dict, load),
    "resized": (dict, grow),
    "n-step": (lambda: {"transforms": [mr.NStep(3, 0.9)]}, load),
    "stacks": (lambda: {"transforms": [mr.FrameStack(4)]}, load),
    "priorities": (lambda: {"sampler": mr.PrioritizedSampler(seed=0)}, prioritize),
    "uses": (lambda: {"sampler": mr.UseCounter(1)}, None),
    "windows": (lambda: {"sampler": mr.SequenceSampler(5)}, load),
    "a limiter": (lambda: {"limiter": mr.RateLimiter(1.0, min_size=1, error_buffer=1e6)}, None),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_nothing_is_open_or_mapped_after_close(engine, name, tmp_path):
    options, use = USES[name]
    buffer = make(tmp_path, engine=engine, **options())
    fill(buffer)
    if use is not None:
        use(buffer)
    assert open_files(tmp_path)
    buffer.close()
    assert open_files(tmp_path) == []
    buffer.close()
    with mr.ReplayBuffer.open(tmp_path / "ring") as reader:
        reader.sample(32)
        if use in (read, load):
            use(reader)
        assert open_files(tmp_path)
    assert open_files(tmp_path) == []
    for closed in (buffer, reader):
        with pytest.raises(FailedError, match="ring is closed"):
            closed.sample(2)


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_batches_and_views_of_a_closed_buffer_stay_as_they_are(engine, tmp_path):
    buffer = make(tmp_path, VARYING, engine=engine)
    fill(buffer)
    batch, text = buffer.sample(16), buffer.sample(16)["text"]
    copies = {name: batch[name].copy() for name in ("observation", "pixels")}
    texts = text.text()
    buffer.close()
    for name, copy in copies.items():
        np.testing.assert_array_equal(batch[name], copy)
    assert text.text() == texts
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize(
    "sampler",
    [
        lambda: mr.PrioritizedSampler(seed=0),
        lambda: mr.UseCounter(3, seed=0),
        lambda: mr.StalenessSampler("version", 400, 400, seed=0),
        lambda: mr.SequenceSampler(4, mr.UniformSampler(seed=0)),
        lambda: mr.EpisodeSampler(mr.UniformSampler(seed=0)),
    ],
    ids=["priorities", "uses", "rows by value", "windows", "episodes"],
)
def test_nothing_of_a_generation_before_is_open_after_close(engine, sampler, tmp_path):
    schema = mr.Schema({**FLAT, "version": mr.Field((), "int64")})
    path = tmp_path / "ring"
    buffer = mr.ReplayBuffer.create(
        path, schema, 300, engine=engine, autoreset="disabled", sampler=sampler()
    )
    numbers = np.arange(400)
    buffer.extend(
        observation=np.ones((400, 17), np.float32),
        reward=np.ones(400, np.float32),
        pixels=np.ones((400, 40, 40), np.uint8),
        terminated=numbers % 7 == 6,
        truncated=np.zeros(400, bool),
        version=numbers,
    )
    buffer.sample(8)
    reader = mr.ReplayBuffer.open(path)
    reader.find("version", [390])
    # Garbage is not collected: what a cycle holds is open for long.
    gc.collect()
    gc.disable()
    try:
        buffer.find("version", [390])
        buffer.resize(350)
        reader.find("version", [391])
        buffer.close()
        reader.close()
        assert open_files(tmp_path) == []
    finally:
        gc.enable()
    with mr.ReplayBuffer.open(path, sampler=sampler()) as other:
        other.sample(8)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_threads_that_draw_over_a_close_get_whole_batches_or_say_it_is_closed(engine, tmp_path):
    for attempt in range(10):
        options = {"transforms": [mr.NStep(2, 0.5)]} if attempt % 2 else {}
        if attempt % 3 == 0:
            options["sampler"] = mr.PrioritizedSampler(seed=1)
        folder = tmp_path / str(attempt)
        folder.mkdir()
        buffer = make(folder, VARYING, engine=engine, **options)
        fill(buffer)
        others, running = [], threading.Barrier(4)

        def draw(buffer=buffer, others=others, running=running):
            running.wait()
            try:
                while True:
                    batch = buffer.sample(64)
                    rows = batch["observation"]
                    assert (rows == rows[:, :1]).all()
                    assert len(batch["text"].text()) == 64
            except FailedError:
                return
            except BaseException as error:
                others.append(error)

        threads = [threading.Thread(target=draw) for _ in range(3)]
        for thread in threads:
            thread.start()
        running.wait()
        for _ in range(attempt):
            buffer.sample(8)
        buffer.close()
        for thread in threads:
            thread.join()
        assert others == []
        assert open_files(folder) == []

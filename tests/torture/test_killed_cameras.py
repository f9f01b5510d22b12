"""Writers of images are killed: each row that is drawn is the one that was added."""

import mmap
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import EmptyError, StaleError, StarvedError
from tests.schema.image_files import jpeg, pixels_of, png
from tests.waits import until

ENVS, CAPACITY = 2, 40
TOP, WRIST = (7, 9, 3), (8, 8, 1)
SCHEMA = mr.Schema.from_flat(
    {
        "observation/top": mr.Field.image(TOP, "png", max_bytes=400),
        "number": mr.Field((), "int64"),
        "wrist": mr.Field.image(WRIST, "jpeg", 80, max_bytes=700),
        "terminated": mr.Field((), "bool"),
    }
)
HEAP = {"memmap": 8192, "zarr": 16_384}
MOST_S = {"memmap": 0.03, "zarr": 0.3}
"""How long a writer lives at most, once it has opened: shards wait for their syncs."""
FAILED, ENDED = 3, os.WEXITED | os.WNOHANG | os.WNOWAIT


def top_of(number):
    """The number, drawn into pixels, among noise that no codec makes smaller."""
    image = np.random.default_rng(number).integers(0, 256, TOP, np.uint8)
    image[: number % 8] = number % 251
    image[0, :8, 0] = np.frombuffer(np.int64(number).tobytes(), np.uint8)
    return image


def wrist_of(number):
    """A file as a camera makes it."""
    image = np.full(WRIST, number % 256, np.uint8)
    image[:4] = number // 256 % 256
    return jpeg(image, 60)


def numbers_of(env_ids, positions):
    return [ENVS * position + env for env, position in zip(env_ids, positions, strict=True)]


def steps(first, count, rng):
    """Steps ``[count, ENVS]`` in either form of an image, numbered by their places."""
    numbers = [[ENVS * (first + n) + env for env in range(ENVS)] for n in range(count)]
    return {
        "observation": {
            "top": [
                [top_of(n) if rng.random() < 0.5 else png(top_of(n)) for n in row]
                for row in numbers
            ]
        },
        "wrist": [[wrist_of(n) for n in row] for row in numbers],
        "number": numbers,
        "terminated": [[n % 23 == 22 for n in row] for row in numbers],
    }


class Victim:
    """A ring whose writers are killed.

    Attributes:
        heads: Shared with the writers: how many rows each environment had, at least.
        opened: Shared, too: whether the writer of this time has opened the ring.
        seen: What was looked at.
    """

    def __init__(self, path, engine, seed):
        self.path, self.engine, self.rng = path, engine, random.Random(seed)
        shared = mmap.mmap(-1, 8 * (ENVS + 1))
        self.heads = np.frombuffer(shared, np.int64, ENVS)
        self.opened = np.frombuffer(shared, np.int64, 1, 8 * ENVS)
        self.seen = Counter()
        mr.ReplayBuffer.create(
            path,
            SCHEMA,
            CAPACITY,
            ENVS,
            engine=engine,
            heap_bytes=HEAP[engine],
            autoreset="same_step",
            commit_every=None,
        ).close()

    def kill(self):
        """Let a writer live for a while, kill it, and look at what it left."""
        self.opened[0] = 0
        seed = self.rng.getrandbits(32)
        pid = os.fork()
        if pid == 0:
            self._write(seed)
        until(lambda: self.opened[0] or os.waitid(os.P_PID, pid, ENDED))
        self._live(self.rng.random() * MOST_S[self.engine])
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        # What a writer of shards had begun may be left over. A live slot may be torn,
        # as `add` was publishing it, and a durable one, as the commit thread wrote it.
        report = mr.verify_buffer(self.path)
        assert report.ok, report.findings
        found = Counter(finding.kind for finding in report.findings)
        assert found.keys() <= {"left_over", "torn"}, report.findings
        assert found["torn"] <= 2, report.findings
        self._check("r")
        if self.rng.random() < 0.2:
            self._check("r+")
        self.seen["kills"] += 1

    def _write(self, seed):
        """Add steps for ever, one or several at a time; never returns."""
        try:
            rng = random.Random(seed)
            buffer = mr.ReplayBuffer.open(self.path, "r+", commit_every=0.002)
            self.opened[0] = 1
            while True:
                count = rng.choice([1, 1, 2, 9])
                made = steps(int(buffer.heads.min()), count, rng)
                if count == 1:
                    observation = {"top": made["observation"]["top"][0]}
                    rest = {name: made[name][0] for name in ("wrist", "number", "terminated")}
                    buffer.add(observation=observation, **rest)
                else:
                    buffer.extend(made)
                self.heads[:] = buffer.heads
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(FAILED)

    def _live(self, seconds):
        """Wait, and draw meanwhile half of the time."""
        stop = time.monotonic() + seconds
        if self.rng.random() < 0.5:
            time.sleep(seconds)
            return
        sampler = mr.UniformSampler(seed=self.rng.getrandbits(32))
        with (
            suppress(StaleError, StarvedError),
            mr.ReplayBuffer.open(self.path, sampler=sampler) as reader,
        ):
            while time.monotonic() < stop:
                with suppress(EmptyError):
                    self._compare(reader.sample(12))
                    self.seen["rows drawn from a writer"] += 12

    def _check(self, mode):
        """All rows that were published are there, and right."""
        with mr.ReplayBuffer.open(self.path, mode, commit_every=None) as buffer:
            assert (buffer.heads >= self.heads).all()
            self.heads[:] = buffer.heads
            if buffer.span.lengths.sum():
                rows = buffer.gather_all()
                self._compare(rows)
                self.seen["rows"] += len(rows)
            self.seen["heap laps"] = int(buffer.view.heap_heads.max()) // HEAP[self.engine]

    def _compare(self, batch):
        numbers = numbers_of(batch.env_ids.tolist(), batch.positions.tolist())
        assert batch["number"].tolist() == numbers
        for row, number in enumerate(numbers):
            assert batch["observation/top"][row].tolist() == top_of(number).tolist()
            assert batch["wrist"][row].tolist() == pixels_of(wrist_of(number)).tolist()


@pytest.fixture
def shared_memory():
    """A folder where syncs cost nothing, so that heaps lap often."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    folder = Path(tempfile.mkdtemp(prefix="cameras-", dir=place))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("engine", ["memmap", "zarr"])
@pytest.mark.parametrize("kills", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.sliced(1)
def test_no_kill_loses_or_mixes_images(shared_memory, engine, kills):
    victim = Victim(shared_memory / "ring", engine, seed=kills)
    for _ in range(kills):
        victim.kill()
    print(victim.seen)
    # However slow the machine is, more is written until a heap has lapped.
    while victim.seen["heap laps"] < 2:
        victim.kill()
    assert victim.seen["rows"] > kills


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["memmap", "zarr"])
def test_no_kill_loses_or_mixes_images_on_a_disk(tmp_path, engine):
    victim = Victim(tmp_path / "ring", engine, seed=1)
    for _ in range(40):
        victim.kill()
    assert victim.seen["rows"] > 40

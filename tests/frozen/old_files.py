"""Small buffers kept as files, to be opened by whatever code comes.

``python -m tests.frozen.record_behaviour`` makes those of tests/frozen/data/old that
are missing. They hold files of priorities with their STATE, a limiter's files, and
shards with places.bin.
"""

from __future__ import annotations

import shutil

import numpy as np

import mmreplay as mr
from tests.frozen.bytes_cases import LIMITER, fixed, limited, tree
from tests.frozen.frozen_files import DATA, described
from tests.frozen.frozen_worlds import buffer, drawn

OLD = DATA / "old"


def _make_priorities(path):
    with buffer(path, num_steps=70) as made:
        made.sampler = mr.PrioritizedSampler(seed=0, name="kept")
        for number in range(3):
            batch = made.sample(20)
            made.update_priorities(batch, (batch.positions + number) % 9 / 4)
        made.commit()
        made.sampler = mr.RankPrioritizedSampler(seed=0, name="ranked")
        batch = made.sample(20)
        made.update_priorities(batch, batch.positions % 9 / 4)


def _make_limited(path):
    limited(path).close()


def _make_shards(path):
    schema = mr.Schema({"number": mr.Field((2,), "int16")})
    scratch = path.with_name("scratch")
    with mr.ReplayBuffer.create(scratch, schema, 48, autoreset="disabled") as made:
        for number in range(70):
            made.add(number=np.array([[number, -number]], np.int16))
    mr.compact(scratch, path, codec="none")
    shutil.rmtree(scratch)


MAKERS = {"priorities": _make_priorities, "limited": _make_limited, "shards": _make_shards}


def make_missing():
    """Make the folders that are not there; return their names."""
    OLD.mkdir(parents=True, exist_ok=True)
    missing = [name for name in MAKERS if not (OLD / name).exists()]
    for name in missing:
        with fixed():
            MAKERS[name](OLD / name)
        # They inform of the process that wrote, or are empty.
        for lock in (OLD / name).rglob("LOCK"):
            lock.unlink()
    return missing


def priorities(path):
    """Draws by stored priorities, and the files after a close."""
    found = {}
    with mr.ReplayBuffer.open(path, "r") as made:
        for name, kind in (("kept", mr.PrioritizedSampler), ("ranked", mr.RankPrioritizedSampler)):
            sampler = made.sampler = kind(seed=9, name=name)
            found[name] = [drawn(made.sample(8)) for _ in range(2)]
            found[f"{name} where"] = sampler.where
    return found | {"files": tree(path / "samplers")}


def limiter(path):
    """A limiter's counts go on."""
    options = {"sampler": mr.UniformSampler(4), "limiter": mr.RateLimiter(*LIMITER)}
    with mr.ReplayBuffer.open(path, "r", **options) as made:
        made.sample(3)
    return tree(path / "limiter")


def shards(path):
    """Rows of shards, read and written on."""
    with mr.ReplayBuffer.open(path, "r") as made:
        rows = made.gather_all()
        found = {"rows": described(rows["number"]), "positions": described(rows.positions)}
    with mr.ReplayBuffer.open(path, "r+", commit_every=None) as made:
        for number in range(3):
            made.add(number=np.array([[number, number]], np.int16))
        rows = made.gather_all()
        found["later rows"] = described(rows["number"])
    return found | {"verified": mr.verify_buffer(path).ok}


CASES = {"priorities": priorities, "limited": limiter, "shards": shards}


def recordings(folder):
    """Entries of old.json."""
    found = {}
    for name, case in CASES.items():
        found[name] = case(shutil.copytree(OLD / name, folder / name))
    return found

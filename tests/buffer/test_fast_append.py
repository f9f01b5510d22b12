"""Steps stored and published by one call leave the files of all others."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.buffer.append import FastAppend
from mmreplay.disk import files
from mmreplay.disk.calls import Disk
from mmreplay.episodes import START, TERMINATED, TRUNCATED
from mmreplay.errors import FailedError, ForkedError
from mmreplay.storage import write_path
from mmreplay.storage.commit_state import CommitWriter
from mmreplay.testing.disks import WatchedDisk, using
from mmreplay.verify import verify_buffer
from tests.slices import count

FIELDS = {
    "observation": mr.Field((5,), "float32"),
    "reward": mr.Field((), "float32"),
    "terminated": mr.Field((), "bool"),
    "truncated": mr.Field((), "bool"),
}
RINGS = [(1, "env_major"), (3, "time_major")]
SLOTS = 512


@pytest.fixture(autouse=True)
def stores(tmp_path):
    """Whether steps are stored where the test's files are."""
    kind = files.file_system(tmp_path)
    if kind not in files.KEEPS_SPACE:
        pytest.skip(f"{kind} is written, never stored into")


@pytest.fixture
def appended(monkeypatch):
    """Positions of the steps that it took."""
    found, add = [], FastAppend.add

    def note(self, data, head, *heap_heads):
        heads = add(self, data, head, *heap_heads)
        if heads is not None:
            found.append(head)
        return heads

    monkeypatch.setattr(FastAppend, "add", note)
    return found


def make(path, num_envs=1, layout="env_major", **options):
    return mr.ReplayBuffer.create(
        path,
        mr.Schema(FIELDS),
        SLOTS,
        num_envs=num_envs,
        layout=layout,
        **({"commit_every": None, "autoreset": "disabled"} | options),
    )


def step_of(number, num_envs=1, ends=(False, False)):
    lead = (num_envs,) if num_envs > 1 else ()
    envs = np.arange(num_envs) if num_envs > 1 else 0
    value = np.asarray(number * 10 + envs, np.float32)
    return {
        "observation": np.repeat(value[..., None], 5, -1),
        "reward": value,
        "terminated": np.full(lead, ends[0]),
        "truncated": np.full(lead, ends[1]),
    }


def files_of(folder):
    """All but COMMIT, which has times and numbers in it."""
    found = {}
    for file in sorted(folder.glob("data-*/*")):
        if file.is_file() and file.name != "COMMIT":
            found[file.name] = file.read_bytes()
    return found


def state_of(buffer):
    return [buffer.heads.tolist(), buffer.span.first.tolist(), buffer.sizes.tolist()]


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
@pytest.mark.sliced(1)
def test_it_leaves_what_other_ways_leave(tmp_path, appended, num_envs, layout, autoreset):
    """Over laps, with ends, odd steps, cuts, clears and commits between."""
    found, shares = [], []
    for way in ("fast", "watched"):
        rng, path = np.random.default_rng(5), tmp_path / way
        appended.clear()
        with using(WatchedDisk()) if way == "watched" else using(files.disk):
            buffer = make(path, num_envs, layout, autoreset=autoreset)
            for number in range(8 * SLOTS):
                ends = rng.random(2) < 0.03
                step = step_of(number, num_envs, ends.tolist())
                chance = rng.random()
                if chance < 0.02:
                    buffer.end_episodes()
                elif chance < 0.03:
                    buffer.clear()
                elif chance < 0.05:
                    buffer.commit()
                elif chance < 0.1:
                    step["reward"] = np.asarray(step["reward"], np.float64)
                if rng.random() < 0.1:
                    buffer.extend({path: a[None] for path, a in step.items()})
                else:
                    buffer.add(step)
            found.append([files_of(path), state_of(buffer)])
            buffer.close()
        shares.append(len(appended) / (8 * SLOTS))
        assert verify_buffer(path).ok
    assert found[0] == found[1]
    assert shares[0] > 0.4
    assert shares[1] == 0


VALUES = FIELDS | {
    "state": {
        "mission": mr.Field.text(max_bytes=40),
        "cloud": mr.Field((None, 2), "float16", max_length=9),
    },
    "image": mr.Field.bytes(max_bytes=30),
    "tokens": mr.Field((None,), "int32", max_length=50),
}


def values_of(rng, chance):
    """Values of a step, now and then in a form that must be looked at."""
    count = int(rng.integers(51))
    tokens = rng.integers(1 << 20, size=count, dtype=np.int32)
    mission = "für dich " * int(rng.integers(4))
    if chance < 0.1:
        tokens, mission = tokens.tolist(), mission.encode()
    elif chance < 0.15:
        tokens = np.repeat(tokens, 2)[::2]
    elif chance < 0.2:
        tokens = tokens.astype(np.int64)
    return {
        "state": {
            "mission": mission,
            "cloud": rng.random((int(rng.integers(10)), 2)).astype(np.float16),
        },
        "image": rng.bytes(int(rng.integers(31))),
        "tokens": tokens,
    }


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.sliced(1)
def test_values_that_vary_are_left_as_other_ways_leave_them(tmp_path, appended, autoreset):
    """Over laps of rows and of the heap, with odd values, ends, clears, commits."""
    found, shares, laps = [], [], count(6, 3)
    for way in ("fast", "watched"):
        rng, path = np.random.default_rng(5), tmp_path / way
        appended.clear()
        with using(WatchedDisk()) if way == "watched" else using(files.disk):
            buffer = mr.ReplayBuffer.create(
                path,
                mr.Schema(VALUES),
                SLOTS,
                heap_bytes=40_960,
                commit_every=None,
                autoreset=autoreset,
            )
            for number in range(laps * SLOTS):
                ends = rng.random(2) < 0.03
                step = step_of(number, 1, ends.tolist())
                step |= values_of(rng, rng.random())
                chance = rng.random()
                if chance < 0.02:
                    buffer.end_episodes()
                elif chance < 0.03:
                    buffer.clear()
                elif chance < 0.05:
                    buffer.commit()
                if rng.random() < 0.2:
                    step["state/mission"] = step["state"]["mission"]
                    step["state/cloud"] = step.pop("state")["cloud"]
                buffer.add(step)
            rows = buffer.gather_all()
            found.append(
                [
                    files_of(path),
                    state_of(buffer),
                    rows["state/mission"].text(),
                    rows["tokens"].values.tolist(),
                ]
            )
            buffer.close()
        shares.append(len(appended) / (laps * SLOTS))
        assert verify_buffer(path).ok
    assert found[0] == found[1]
    assert shares[0] > 0.3
    assert shares[1] == 0


def test_what_varies_and_is_no_plain_value_is_looked_at(tmp_path, appended):
    schema = mr.Schema(VALUES | {"brain": mr.Field((None,), "bfloat16", max_length=5)})
    rng = np.random.default_rng(0)
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, SLOTS, heap_bytes=40_960, commit_every=None
    ) as buffer:
        for number in range(2 * SLOTS):
            brain = rng.random(int(rng.integers(6)))
            buffer.add(step_of(number) | values_of(rng, 1) | {"brain": brain})
        # numpy does not know numbers of this kind.
        assert appended == []
    with mr.ReplayBuffer.create(
        tmp_path / "c", mr.Schema(VALUES), SLOTS, heap_bytes=40_960, commit_every=None
    ) as buffer:
        for number in range(2 * SLOTS):
            buffer.add(step_of(number) | values_of(rng, 1))
        assert appended
        for change, message in (
            ({"tokens": np.zeros(51, np.int32)}, "at most 50 items, got 51"),
            ({"image": b"x" * 31}, "at most 30 bytes, got 31"),
            ({"image": "text"}, "field 'image'"),
            ({"tokens": np.zeros((2, 2), np.int32)}, "field 'tokens'"),
            ({"tokens": None}, "field 'tokens'"),
        ):
            heads = buffer.heads
            with pytest.raises(mr.SchemaError, match=message):
                buffer.add(step_of(7) | values_of(rng, 1) | change)
            assert buffer.heads is heads


@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
def test_steps_of_a_first_lap_go_by_it_into_reserved_space(tmp_path, appended, num_envs, layout):
    """From the first step on, up to the limits, and as far behind a new opening."""
    steps = 0
    for opening in range(3):
        path = tmp_path / "b"
        opened = mr.ReplayBuffer.open(path, "r+") if opening else None
        with opened or make(path, num_envs, layout) as buffer:
            appended.clear()
            for _ in range(SLOTS // 4):
                buffer.add(step_of(steps, num_envs))
                steps += 1
            # But for the first step of an opening, which starts an episode, and where
            # limits are raised: in the middle and at the end of each 32 rows.
            assert len(appended) >= SLOTS // 4 * 15 // 16 - 1
            rewards = buffer.gather_all()["reward"].reshape(-1)
            expected = [step_of(n, num_envs)["reward"] for n in range(steps)]
            assert sorted(rewards) == sorted(np.ravel(expected))
    assert verify_buffer(tmp_path / "b").ok


def test_pages_of_a_first_lap_beyond_the_limits_are_not_stored_into(
    tmp_path, appended, monkeypatch
):
    """Their space is reserved with the limits: a store into a hole may kill."""
    asked, populate = [], Disk.populate

    def note(self, address, nbytes):
        buffer_limits = buffer._files.appender._limits
        asked.append((address, nbytes, int(buffer_limits.min())))
        populate(self, address, nbytes)

    with make(tmp_path / "b") as buffer:
        monkeypatch.setattr(Disk, "populate", note)
        monkeypatch.setattr(buffer._files.appender, "_ahead_rows", 3)
        for number in range(SLOTS // 2):
            buffer.add(step_of(number))
        records, flags = buffer._files.store.writers
        stride = buffer._files.store.placement.stride
        assert appended
        for address, nbytes, limit in asked:
            for writer, row_nbytes in ((records, stride), (flags, 1)):
                first = address - writer._address
                if 0 <= first < writer.file.nbytes:
                    assert first + nbytes <= limit * row_nbytes


@pytest.mark.parametrize("field", ["large", "mutable"])
def test_none_goes_by_it_that_has_fields_in_files_of_their_own(tmp_path, appended, field):
    own = {"large": mr.Field((2000,), "float32"), "mutable": mr.Field((), "float32", mutable=True)}
    schema = mr.Schema(FIELDS | {field: own[field]})
    with mr.ReplayBuffer.create(tmp_path / "b", schema, SLOTS) as buffer:
        more = {field: np.zeros(own[field].shape, np.float32)}
        for number in range(3 * SLOTS):
            buffer.add(step_of(number) | more)
    assert appended == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
def test_ctrl_c_in_a_step_loses_none_and_doubles_none(
    tmp_path, appended, monkeypatch, num_envs, layout, after
):
    with make(tmp_path / "b", num_envs, layout) as buffer:
        for number in range(2 * SLOTS):
            buffer.add(step_of(number, num_envs))
        fast = buffer._files.appender._fast_append
        add, rng = fast._add, np.random.default_rng(0)

        def struck(*args):
            if after:
                add(*args)
            raise KeyboardInterrupt

        number = 2 * SLOTS
        for _ in range(40):
            fast._add = struck if (hit := rng.random() < 0.3) else add
            try:
                buffer.add(step_of(number, num_envs))
            except KeyboardInterrupt:
                number += after
                assert int(buffer.heads[0]) == number
            else:
                assert not hit or int(buffer.heads[0]) == number + 1
                number += 1
            assert buffer.heads.tolist() == [number] * num_envs
        fast._add = add
        rewards = buffer.gather_all()["reward"].reshape(-1)
        first = buffer.span.first.tolist()[0]
        expected = [float(10 * n + e) for e in range(num_envs) for n in range(first, number)]
        assert sorted(rewards.tolist()) == sorted(expected)
    assert verify_buffer(tmp_path / "b").ok


def test_a_buffer_that_is_closed_takes_no_step(tmp_path, appended):
    buffer = make(tmp_path / "b")
    for number in range(2 * SLOTS):
        buffer.add(step_of(number))
    assert appended
    writer = buffer._files.appender
    buffer.close()
    held = (tmp_path / "b" / "data-000001" / "records.bin").read_bytes()
    with pytest.raises(FailedError, match="closed"):
        buffer.add(step_of(7))
    assert writer._fast_append.add(step_of(7), 2 * SLOTS) is None
    assert (tmp_path / "b" / "data-000001" / "records.bin").read_bytes() == held


def test_a_closed_buffer_that_is_still_held_keeps_no_commit_open(tmp_path, appended):
    buffer = make(tmp_path / "b")
    for number in range(2 * SLOTS):
        buffer.add(step_of(number))
    assert appended
    # Both mappings of it have gone, that of the fast append and its file's own.
    buffer.close()
    maps = Path("/proc/self/maps").read_text().split("\n")
    assert not [line for line in maps if str(tmp_path) in line and "COMMIT" in line]


def test_a_forked_child_takes_no_step(tmp_path, appended):
    with make(tmp_path / "b") as buffer:
        for number in range(2 * SLOTS):
            buffer.add(step_of(number))
        assert appended
        child = os.fork()
        if child == 0:
            try:
                buffer.add(step_of(1))
            except ForkedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert int(buffer.heads[0]) == 2 * SLOTS


def test_a_disk_that_is_replaced_later_sees_every_store(tmp_path, appended):
    with make(tmp_path / "b") as buffer:
        for number in range(2 * SLOTS):
            buffer.add(step_of(number))
        appended.clear()
        disk = WatchedDisk()
        with using(disk):
            for number in range(10):
                buffer.add(step_of(number))
        assert appended == []
        assert disk.calls["store"] + disk.calls["pwrite"] >= 30
        buffer.add(step_of(3))
        assert len(appended) == 1


@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
@pytest.mark.sliced(1)
def test_it_continues_from_one_reserved_range_to_the_next(
    tmp_path, appended, monkeypatch, num_envs, layout
):
    """Only where limits are raised, or a lap begins, is a step left to other ways."""
    slots = 16 * SLOTS
    monkeypatch.setattr(write_path, "NEAR_NBYTES", 4096)
    monkeypatch.setattr(write_path, "NEAR_STEPS", 1)
    monkeypatch.setattr(write_path, "NEAR_S", 1e9)
    asked, raised = [], []
    populate, give_up = Disk.populate, CommitWriter.give_up

    def note(self, address, nbytes):
        asked.append(nbytes)
        populate(self, address, nbytes)

    def raise_(self, limits):
        raised.append(limits)
        give_up(self, limits)

    schema = mr.Schema(FIELDS)
    with mr.ReplayBuffer.create(
        tmp_path / "b", schema, slots, num_envs=num_envs, layout=layout, autoreset="disabled"
    ) as buffer:
        for number in range(2 * slots):
            buffer.add(step_of(number, num_envs))
        appended.clear()
        monkeypatch.setattr(Disk, "populate", note)
        monkeypatch.setattr(CommitWriter, "give_up", raise_)
        for number in range(3 * slots):
            buffer.add(step_of(number, num_envs))
        left = set(range(2 * slots, 5 * slots)) - set(appended)
        # Two each time, and one a lap.
        assert len(left) <= 2 * len(raised) + 3
        assert len(asked) > 100
        for env in range(num_envs):
            positions = np.arange(4 * slots, 5 * slots)
            found = buffer.get_field("reward", env, positions)
            expected = np.arange(2 * slots, 3 * slots) * 10 + env
            assert found.tolist() == expected.tolist()
    assert verify_buffer(tmp_path / "b").ok


def test_heads_handed_out_stay_as_they_were(tmp_path, appended):
    with make(tmp_path / "b", 3, "time_major") as buffer:
        held = []
        for number in range(4 * SLOTS):
            buffer.add(step_of(number, 3))
            held.append(buffer.published)
        assert [each.tolist() for each in held] == [[n + 1] * 3 for n in range(4 * SLOTS)]
        assert len({id(each) for each in held}) == len(held)
    assert appended


@pytest.fixture
def blocks(monkeypatch):
    """Rows of the blocks that it took, short ones as well."""
    found, extend = [], FastAppend.extend

    def note(self, columns, skipped, flags, row, heads):
        done = extend(self, columns, skipped, flags, row, heads)
        if done:
            found.append(flags.size)
        return done

    monkeypatch.setattr(FastAppend, "extend", note)
    monkeypatch.setattr(write_path, "LEAST_NBYTES", 256)
    return found


def block_of(number, steps, num_envs, rng):
    rows = [step_of(number + k, num_envs, (rng.random(2) < 0.1).tolist()) for k in range(steps)]
    return {path: np.stack([row[path] for row in rows]) for path in FIELDS}


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
@pytest.mark.sliced(1)
def test_blocks_leave_what_other_ways_leave(tmp_path, blocks, num_envs, layout, autoreset):
    found, counts = [], []
    for way in ("fast", "watched"):
        rng, path = np.random.default_rng(6), tmp_path / way
        blocks.clear()
        with using(WatchedDisk()) if way == "watched" else using(files.disk):
            buffer = make(path, num_envs, layout, autoreset=autoreset)
            for _ in range(150):
                number, steps = int(buffer.heads[0]), int(rng.integers(1, 100))
                block = block_of(number, steps, num_envs, rng)
                if rng.random() < 0.1:
                    buffer.end_episodes()
                if rng.random() < 0.2:
                    block["reward"] = np.asarray(block["reward"], np.float64)
                buffer.extend(block)
                buffer.add(step_of(number + steps, num_envs))
            found.append([files_of(path), state_of(buffer)])
            buffer.close()
        counts.append(sum(blocks))
        assert verify_buffer(path).ok
    assert found[0] == found[1]
    assert counts[0] > 2000 * num_envs
    assert counts[1] == 0


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
def test_ctrl_c_in_a_block_loses_none_and_doubles_none(tmp_path, blocks, num_envs, layout, after):
    rng = np.random.default_rng(0)
    with make(tmp_path / "b", num_envs, layout) as buffer:
        fast = buffer._files.appender._fast_append
        extend = fast._extend

        def struck(*args):
            if after:
                extend(*args)
            raise KeyboardInterrupt

        number = 0
        for _ in range(60):
            fast._extend = struck if rng.random() < 0.3 else extend
            try:
                buffer.extend(block_of(number, 30, num_envs, rng))
            except KeyboardInterrupt:
                number += 30 * after
            else:
                number += 30
            assert buffer.heads.tolist() == [number] * num_envs
        fast._extend = extend
        rewards = buffer.gather_all()["reward"].reshape(-1)
        first = buffer.span.first.tolist()[0]
        expected = [float(10 * n + e) for e in range(num_envs) for n in range(first, number)]
        assert sorted(rewards.tolist()) == sorted(expected)
    assert blocks
    assert verify_buffer(tmp_path / "b").ok


@pytest.mark.slow
def test_a_concurrent_reader_finds_every_row_complete(tmp_path, appended):
    torn, stop = [], threading.Event()
    with make(tmp_path / "b", commit_every=0.01) as buffer:
        for number in range(2 * SLOTS):
            buffer.add(step_of(number))
        reader = mr.ReplayBuffer.open(tmp_path / "b", "r")

        def look():
            while not stop.is_set():
                batch = reader.sample(16)
                same = batch["observation"] == batch["reward"][:, None]
                wanted = (batch.positions % 100_000) * 10
                if not same.all() or (batch["reward"] != wanted).any():
                    torn.append(batch)

        thread = threading.Thread(target=look)
        thread.start()
        for number in range(2 * SLOTS, 20_000):
            buffer.add(step_of(number))
        stop.set()
        thread.join()
        reader.close()
    assert torn == []
    assert len(appended) > 5000


CHILD = """
import sys
import numpy as np
import mmreplay as mr
from tests.buffer.test_fast_append import make, step_of

buffer = make(sys.argv[1], commit_every=0.02)
for number in range(1 << 40):
    buffer.add(step_of(number % 99_999))
    if number % 64 == 0 or number > 200:
        print(number, flush=True)
"""


@pytest.mark.parametrize("lines", [60, 333, 2500])
@pytest.mark.sliced(1)
def test_kill_9_loses_no_step_that_was_acknowledged(tmp_path, lines):
    """Of a writer whose steps it takes: they are published when it returns."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "b")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    ) as child:
        for _ in range(lines):
            last = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split("\n")
    whole = [int(each) for each in rest[:-1]]
    last = max([last, *whole])
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None) as buffer:
        head = int(buffer.heads[0])
        assert head > last
        batch = buffer.gather_all()
        wanted = (batch.positions % 99_999).astype(np.float32) * 10
        assert (batch["reward"] == wanted).all()
        assert (batch["observation"] == wanted[:, None]).all()
        buffer.add(step_of(1))
    assert verify_buffer(tmp_path / "b").ok


BLOCKS_CHILD = """
import sys
import numpy as np
from tests.buffer.test_fast_append import FastAppend, block_of, make, write_path

took, extend = [], FastAppend.extend

def note(self, *args):
    took.append(extend(self, *args))
    return took[-1]

FastAppend.extend = note
write_path.LEAST_NBYTES = 256
num_envs, layout = int(sys.argv[2]), sys.argv[3]
buffer = make(sys.argv[1], num_envs, layout, commit_every=0.02)
rng, number = np.random.default_rng(0), 0
while True:
    steps = int(rng.integers(10, 120))
    buffer.extend(block_of(number, steps, num_envs, rng))
    number += steps
    print(number, sum(took), flush=True)
"""


@pytest.mark.parametrize("lines", [7, 60, 201])
@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
@pytest.mark.sliced(1)
def test_kill_9_loses_no_block_that_was_acknowledged(tmp_path, num_envs, layout, lines):
    root = Path(__file__).parents[2]
    given = str(tmp_path / "b"), str(num_envs), layout
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKS_CHILD, *given], stdout=subprocess.PIPE, text=True, cwd=root
    ) as child:
        for _ in range(lines):
            last, taken = map(int, child.stdout.readline().split())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split("\n")
    last = max([last, *(int(each.split()[0]) for each in rest[:-1])])
    assert taken >= lines // 4
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None) as buffer:
        assert len({*buffer.heads.tolist()}) == 1
        assert buffer.heads[0] >= last
        batch = buffer.gather_all()
        wanted = (batch.positions * 10 + batch.env_ids).astype(np.float32)
        assert (batch["reward"] == wanted).all()
        assert (batch["observation"] == wanted[:, None]).all()
        flags = buffer.view.flags(batch.env_ids, batch.positions)
        follows = np.diff(batch.env_ids) == 0
        ended = (flags & (TERMINATED | TRUNCATED)) != 0
        assert (((flags[1:] & START) != 0) == ended[:-1])[follows].all()
        buffer.add(step_of(1, num_envs))
    assert verify_buffer(tmp_path / "b").ok


STRUCK_CHILD = """
import os, sys
from pathlib import Path
import numpy as np
from tests.buffer.test_fast_append import block_of, make, step_of, write_path

write_path.LEAST_NBYTES = 0
path, num_envs, layout, way = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
buffer = make(path, num_envs, layout)
# Below the first limits, which are published before rows.
rng = np.random.default_rng(0)
buffer.extend(block_of(0, 20, num_envs, rng))
buffer.add(step_of(20, num_envs))
buffer.add(step_of(21, num_envs))
(commit,) = Path(path).glob("data-*/COMMIT")
os.truncate(commit, 0)
if way == "block":
    block = block_of(22, 8, num_envs, rng)
    block["terminated"][:] = True
    buffer.extend(block)
else:
    buffer.add(step_of(22, num_envs))
"""


@pytest.mark.parametrize("way", ["block", "step"])
@pytest.mark.parametrize(("num_envs", "layout"), RINGS)
@pytest.mark.sliced(1)
def test_rows_and_flags_are_stored_before_their_publication(tmp_path, num_envs, layout, way):
    """A store into COMMIT kills the writer here: its file has lost its pages."""
    arguments = str(tmp_path / "b"), str(num_envs), layout, way
    child = subprocess.run(
        [sys.executable, "-c", STRUCK_CHILD, *arguments], cwd=Path(__file__).parents[2], check=False
    )
    assert child.returncode == -signal.SIGBUS
    (folder,) = (tmp_path / "b").glob("data-*")
    flags = np.fromfile(folder / "flags.bin", np.uint8)
    records = (folder / "records.bin").read_bytes()
    stride = len(records) // len(flags)
    rows = range(22 * num_envs, (30 if way == "block" else 23) * num_envs)
    for row in rows:
        number, env_id = divmod(row, num_envs)
        reward = np.float32(number * 10 + env_id).tobytes()
        assert records[row * stride : (row + 1) * stride].count(reward) == 6
    if way == "block":
        assert (flags[rows.start : rows.stop] & TERMINATED != 0).all()


TOKENS = FIELDS | {
    "tokens": mr.Field((None,), "int32", max_length=50),
    "prompt": mr.Field.text(max_bytes=40),
}


def make_tokens(path, **options):
    return mr.ReplayBuffer.create(
        path,
        mr.Schema(TOKENS),
        SLOTS,
        heap_bytes=40_960,
        **({"commit_every": None, "autoreset": "disabled"} | options),
    )


def tokens_of(number):
    """A step whose values follow from its number."""
    tokens = np.arange(number, number + number % 51, dtype=np.int32)
    return step_of(number) | {"tokens": tokens, "prompt": f"Nö {number}"}


def holds_what_was_added(batch):
    """Whether each step's values are those of its number."""
    for reward, tokens, prompt in zip(
        batch["reward"], batch["tokens"], batch["prompt"].text(), strict=True
    ):
        expected = tokens_of(round(float(reward)) // 10)
        if prompt != expected["prompt"] or tokens.tolist() != expected["tokens"].tolist():
            return False
    return True


TOKENS_CHILD = """
import sys
from tests.buffer.test_fast_append import FastAppend, make_tokens, tokens_of

took, add = [], FastAppend.add

def note(self, *args):
    heads = add(self, *args)
    took.append(heads is not None)
    return heads

FastAppend.add = note
buffer = make_tokens(sys.argv[1], commit_every=0.02)
for number in range(99_999):
    buffer.add(tokens_of(number))
    if number % 64 == 0 or number > 200:
        print(number, sum(took), flush=True)
"""


@pytest.mark.parametrize("lines", [60, 333, 2500])
@pytest.mark.sliced(1)
def test_kill_9_loses_no_value_that_was_acknowledged(tmp_path, lines):
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", TOKENS_CHILD, str(tmp_path / "b")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
    ) as child:
        for _ in range(lines):
            last, taken = map(int, child.stdout.readline().split())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split("\n")
    last = max([last, *(int(each.split()[0]) for each in rest[:-1])])
    assert taken > last // 4
    with mr.ReplayBuffer.open(tmp_path / "b", "r+", commit_every=None, check_values=True) as buffer:
        assert int(buffer.heads[0]) > last
        batch = buffer.gather_all()
        assert batch.positions[-1] == buffer.heads[0] - 1
        assert (batch["reward"] == 10 * batch.positions).all()
        assert holds_what_was_added(batch)
        buffer.add(tokens_of(1))
    assert verify_buffer(tmp_path / "b").ok


@pytest.mark.slow
def test_readers_of_it_see_whole_values_while_the_heap_wraps(tmp_path, appended):
    torn, stop, seen = [], threading.Event(), []
    with make_tokens(tmp_path / "b") as buffer:
        for number in range(2 * SLOTS):
            buffer.add(tokens_of(number))
        reader = mr.ReplayBuffer.open(tmp_path / "b", sampler=mr.UniformSampler(seed=0))

        def look():
            while not stop.is_set():
                batch = reader.sample(64)
                seen.append(len(batch))
                if not holds_what_was_added(batch):
                    torn.append(batch)

        thread = threading.Thread(target=look)
        thread.start()
        for number in range(2 * SLOTS, 12_000):
            buffer.add(tokens_of(number))
        stop.set()
        thread.join()
        reader.close()
    assert torn == []
    assert seen
    assert len(appended) > 3000

"""Episodes of a ring appended to a LeRobot set: which, when, and over kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest

import mmreplay as mr
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.finished import finished, reader_of
from mmreplay.convert.following import Following
from mmreplay.convert.mapped import Changes
from mmreplay.convert.registry import named, open_appender
from mmreplay.datasets.lerobot_append import LerobotAppender
from mmreplay.datasets.lerobot_layout import lay_out
from mmreplay.datasets.lerobot_video import find_codec
from mmreplay.datasets.lerobot_writer import Sizes
from mmreplay.errors import DurabilityWarning, FailedError, FormatError, LockedError, SchemaError
from mmreplay.testing.disks import WatchedDisk, using
from tests.slices import count

av = pytest.importorskip("av", reason="av is not installed")

SIDE = 32
RECORD = "meta/mmreplay.json"


def schema(*, camera=True):
    fields = {"observation": {"state": mr.Field((2,), "float32")}}
    if camera:
        fields["observation"]["images"] = {"top": mr.Field((SIDE, SIDE, 3), "uint8")}
    ends = {name: mr.Field((), "bool") for name in ("terminated", "truncated")}
    return mr.Schema(fields | {"reward": mr.Field((), "float32")} | ends)


def length_of(episode):
    return 3 + episode * 7 % 5


def step(episode, number, *, camera=True, ends=True):
    """Number ``number`` of an episode, whose image is as bright as its number says."""
    observation = {"state": np.array([episode, number], np.float32)}
    if camera:
        observation["images"] = {"top": np.full((SIDE, SIDE, 3), bright(episode), np.uint8)}
    return {
        "observation": observation,
        "reward": number / 8,
        "terminated": ends and number == length_of(episode) - 1,
        "truncated": False,
    }


def bright(episode):
    return episode * 40 % 240


def add_episode(buffer, episode, **options):
    for number in range(length_of(episode)):
        buffer.add(step(episode, number, **options))


def add_all(buffer, steps):
    for each in steps:
        buffer.add(each)


def episodes_of(folder):
    """The episodes of a set as (number, steps), read by pyarrow and PyAV alone."""
    info = json.loads((folder / "meta/info.json").read_text())
    tables = sorted((folder / "meta/episodes").rglob("*.parquet"))
    rows = [row for path in tables for row in pq.read_table(path).to_pylist()]
    rows.sort(key=lambda row: row["episode_index"])
    found, at, decoded = [], 0, {}
    for index, row in enumerate(rows):
        assert row["episode_index"] == index
        assert (row["dataset_from_index"], row["dataset_to_index"]) == (at, at + row["length"])
        chunk, file = row["data/chunk_index"], row["data/file_index"]
        data = pq.read_table(folder / f"data/chunk-{chunk:03d}/file-{file:03d}.parquet").to_pydict()
        mine = [n for n, each in enumerate(data["episode_index"]) if each == index]
        assert [data["index"][n] for n in mine] == list(range(at, at + row["length"]))
        assert [data["frame_index"][n] for n in mine] == list(range(row["length"]))
        states = [data["observation.state"][n] for n in mine]
        assert [state[1] for state in states] == list(range(row["length"]))
        (episode,) = {int(state[0]) for state in states}
        key = "videos/observation.images.top"
        if f"{key}/file_index" in row:
            name = f"chunk-{row[f'{key}/chunk_index']:03d}/file-{row[f'{key}/file_index']:03d}.mp4"
            if name not in decoded:
                with av.open(str(folder / key / name)) as video:
                    decoded[name] = {
                        round(frame.time * info["fps"]): frame.to_ndarray(format="rgb24")
                        for frame in video.decode(video=0)
                    }
            first = round(row[f"{key}/from_timestamp"] * info["fps"])
            for frame in range(first, first + row["length"]):
                assert abs(decoded[name][frame].mean() - bright(episode)) < 12
        found.append((episode, row["length"]))
        at += row["length"]
    assert (info["total_episodes"], info["total_frames"]) == (len(rows), at)
    return found


def appends_of(folder):
    return json.loads((folder / RECORD).read_text())["appends"]


def make(path, *, capacity=100, camera=True, **options):
    return mr.ReplayBuffer.create(
        path, schema(camera=camera), capacity, autoreset="disabled", **options
    )


def exporter(buffer, folder, **options):
    return mr.AutoExport(buffer, folder, format="lerobot", fps=10, **options)


@pytest.mark.parametrize("engine", ["memmap", "zarr", "memory"])
@pytest.mark.sliced(2)
def test_episodes_are_appended_before_their_rows_are_overwritten(tmp_path, engine):
    path = None if engine == "memory" else tmp_path / "ring"
    with make(path, capacity=40, engine=engine) as buffer, exporter(buffer, tmp_path / "set") as of:
        for episode in range(25):
            add_episode(buffer, episode)
    assert episodes_of(tmp_path / "set") == [(e, length_of(e)) for e in range(25)]
    assert sum(report.episodes for _, report in of.reports) == 25
    assert {folder for folder, _ in of.reports} == {tmp_path / "set"}
    assert not [each for each in os.listdir(tmp_path) if each.startswith("tmp-")]


def test_several_environments_end_at_their_own_times(tmp_path):
    with (
        make(tmp_path / "ring", capacity=30, num_envs=3, camera=False) as buffer,
        exporter(buffer, tmp_path / "set", every_episodes=5) as of,
    ):
        at = [(0, 0), (100, 0), (200, 0)]
        for _ in range(102):
            steps = [step(*each, camera=False) for each in at]
            buffer.add(
                {
                    "observation": {
                        "state": np.stack([each["observation"]["state"] for each in steps])
                    },
                    **{
                        name: np.array([each[name] for each in steps])
                        for name in ("reward", "terminated", "truncated")
                    },
                }
            )
            at = [
                (e + 1, 0) if each["terminated"] else (e, n + 1)
                for (e, n), each in zip(at, steps, strict=True)
            ]
        of.flush()
        with pytest.warns(DurabilityWarning, match="rows of unfinished episodes"):
            of.close()
    found = episodes_of(tmp_path / "set")
    for env, (last, _) in enumerate(at):
        mine = [episode for episode, _ in found if episode // 100 == env]
        assert mine == list(range(100 * env, last))
    assert all(steps == length_of(episode) for episode, steps in found)


def test_a_thread_appends_what_is_finished_without_being_asked(tmp_path):
    with (
        make(tmp_path / "ring", commit_every=0.1) as buffer,
        exporter(buffer, tmp_path / "set", every_episodes=2),
    ):
        add_episode(buffer, 0)
        add_episode(buffer, 1)
        deadline = time.monotonic() + 60
        while not (tmp_path / "set").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert episodes_of(tmp_path / "set") == [(0, 3), (1, 5)]


def test_units_are_joined_and_no_number_of_a_file_is_used_twice(tmp_path):
    used, sizes, episodes = [], [], count(20, 10)
    with make(tmp_path / "ring", capacity=500) as buffer, exporter(buffer, tmp_path / "set") as of:
        for episode in range(episodes):
            add_episode(buffer, episode)
            of.flush()
            journal = appends_of(tmp_path / "set")
            names = {path.name for path in (tmp_path / "set/data").rglob("*.parquet")}
            assert names == {f"file-{number:03d}.parquet" for number, *_ in journal["units"]}
            used.append(max(number for number, *_ in journal["units"]))
            sizes.append(len(journal["units"]))
    assert used == list(range(episodes))
    # Each is at least twice the one after it: their number grows as the logarithm.
    assert max(sizes) <= 6
    assert sum(steps for _, _, steps, _ in journal["units"]) == journal["rows"]
    assert [e for e, _ in episodes_of(tmp_path / "set")] == list(range(episodes))


def test_full_units_are_not_joined(tmp_path):
    with make(tmp_path / "ring", capacity=500) as buffer:
        description = BufferReader(buffer).describe()
        layout = lay_out(description, fps=10)
        appender = LerobotAppender(
            tmp_path / "set",
            description,
            layout,
            find_codec(),
            overwrite=False,
            sizes=Sizes(data_mb=1e-6, video_mb=1e-6, chunk_files=3),
        )
        for episode in range(7):
            add_episode(buffer, episode)
            reader, found = finished_of(buffer, appender)
            appender.append(reader, found.appended)
        appender.close()
    assert [number for number, *_ in appends_of(tmp_path / "set")["units"]] == list(range(7))
    assert (tmp_path / "set/data/chunk-002/file-000.parquet").exists()
    assert len(episodes_of(tmp_path / "set")) == 7


def test_a_discarded_take_is_left_out_and_a_truncated_one_is_appended(tmp_path):
    with make(tmp_path / "ring") as buffer, exporter(buffer, tmp_path / "set") as of:
        buffer.add(step(0, 0))
        buffer.add(step(0, 1))
        buffer.end_episodes(discard=True)
        buffer.add(step(1, 0))
        buffer.add(step(1, 1))
        buffer.end_episodes()
        add_episode(buffer, 2)
        of.flush()
        (_, _report) = of.reports[-1]
    assert episodes_of(tmp_path / "set") == [(1, 2), (2, length_of(2))]
    assert sum(report.episodes for _, report in of.reports) == 2
    notes = [note for _, report in of.reports for note in report.notes]
    assert "1 episodes that were broken off were left out" in notes
    assert "1 episodes were cut: their last step is truncated" in notes
    table = pq.read_table(next((tmp_path / "set/data").rglob("*.parquet"))).to_pydict()
    assert table["next.truncated"][1]
    assert table["next.done"][1]


def test_unfinished_episodes_stay_in_the_ring_and_the_next_run_appends_them(tmp_path):
    with make(tmp_path / "ring") as buffer:
        of = exporter(buffer, tmp_path / "set")
        add_episode(buffer, 0)
        buffer.add(step(1, 0))
        with pytest.warns(DurabilityWarning) as said:
            of.close()
        of.close()  # says nothing more
    (message,) = [str(each.message) for each in said]
    assert message == (
        f"{tmp_path / 'set'}: 1 rows of unfinished episodes, of environments [0], were not "
        "appended: they are in the ring, and the next AutoExport appends them once they end."
    )
    with (
        mr.ReplayBuffer.open(tmp_path / "ring", "r+", on_resume="continue") as buffer,
        exporter(buffer, tmp_path / "set"),
    ):
        for number in range(1, length_of(1)):
            buffer.add(step(1, number))
    assert episodes_of(tmp_path / "set") == [(0, 3), (1, 5)]


def test_an_unfinished_episode_that_fills_the_ring_is_refused_and_nothing_is_lost(tmp_path):
    with make(tmp_path / "ring", capacity=20, camera=False) as buffer:
        of = exporter(buffer, tmp_path / "set")
        add_episode(buffer, 0, camera=False)
        told = (
            rf"environment 0 has \d+ steps of an episode that is not finished, and they fill the "
            rf"ring, which keeps 20 rows and the bytes of their values: nothing can be appended to "
            rf"{tmp_path / 'set'}\. End the episode with end_episodes, pass on_long='cut', or "
            r"create the ring with a larger capacity\."
        )
        steps = (step(5, number, camera=False, ends=False) for number in range(1000))
        with pytest.raises(FailedError, match=told):
            add_all(buffer, steps)
        # The finished one was appended, and no step of the other was given up.
        assert episodes_of(tmp_path / "set") == [(0, 3)]
        head = int(buffer.heads[0])
        assert buffer.span.first[0] <= 3
        assert buffer.get_field("observation/state", 0, [head - 1])[0][1] == head - 1 - 3
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DurabilityWarning)
            of.close()


def test_a_long_episode_is_truncated_where_that_is_asked_for(tmp_path):
    with (
        make(tmp_path / "ring", capacity=20, camera=False) as buffer,
        exporter(buffer, tmp_path / "set", on_long="cut") as of,
    ):
        for number in range(70):
            ended = number == 69
            buffer.add({**step(1, number, camera=False), "terminated": ended})
        of.flush()
    tables = sorted((tmp_path / "set/data").rglob("*.parquet"))
    data = [row for path in tables for row in pq.read_table(path).to_pylist()]
    data.sort(key=lambda row: row["index"])
    # No step is lost, none comes twice, and each cut is a truncation.
    assert [row["observation.state"][1] for row in data] == list(range(70))
    last = [
        row
        for row, after in zip(data, [*data[1:], None], strict=True)
        if after is None or after["frame_index"] == 0
    ]
    assert len(last) >= 3
    assert [row["next.truncated"] for row in last] == [True] * (len(last) - 1) + [False]
    assert last[-1]["next.terminated"]
    assert any("1 episodes were cut" in note for _, each in of.reports for note in each.notes)


def test_values_of_any_length_are_held_for_their_bytes(tmp_path):
    fields = dict(schema(camera=False).fields) | {"task": mr.Field.text(max_bytes=100)}
    text = mr.Schema(fields)
    with mr.ReplayBuffer.create(
        tmp_path / "ring", text, 1000, autoreset="disabled", heap_bytes=4096
    ) as buffer:
        with exporter(buffer, tmp_path / "set") as of:
            for episode in range(40):
                for number in range(length_of(episode)):
                    buffer.add(step(episode, number, camera=False) | {"task": "t" * 90})
        assert sum(report.episodes for _, report in of.reports) == 40
    assert [episode for episode, _ in episodes_of(tmp_path / "set")] == list(range(40))


def test_sets_that_do_not_fit_are_refused_and_stay_as_they_are(tmp_path):
    ring, folder = tmp_path / "ring", tmp_path / "set"
    with make(ring) as buffer, exporter(buffer, folder):
        add_episode(buffer, 0)
    record = (folder / RECORD).read_bytes()
    way_out = r"Append to another folder, or pass overwrite=True \(--overwrite\)"

    def refused(match, error=FormatError, buffer_path=ring, **options):
        with mr.ReplayBuffer.open(buffer_path, "r+") as buffer, pytest.raises(error, match=match):
            exporter(buffer, folder, **options)

    with make(tmp_path / "other") as other:
        add_episode(other, 0)
    refused(
        rf"has episodes of the ring \w{{8}}, not of \w{{8}}\. {way_out}",
        buffer_path=tmp_path / "other",
    )
    refused(
        r"other features: 'observation\.images\.top' is \{'dtype': 'video'.* and would be "
        r"\{'dtype': 'image'.*\. Use the options",
        video=False,
    )
    info = folder / "meta/info.json"
    text = info.read_bytes()
    info.write_bytes(text.replace(b'"robot_type": null', b'"robot_type": "so"'))
    refused(rf"was edited since the last append: meta/info\.json is another\. {way_out}")
    info.write_bytes(text)
    for name, value in {
        "continued": [0],
        "units": [[0, 1, 3, "full"]],
        "rows": 4,
        "next": [2],
        "numbers": 0,
        "count": "x",
        "uuid": 5,
        "sums": {},
        "other": 1,
    }.items():
        changed = json.loads(record)
        changed["appends"][name] = value
        (folder / RECORD).write_text(json.dumps(changed))
        refused(r"mmreplay\.json says nothing legal of appends")
    del changed["appends"]
    (folder / RECORD).write_text(json.dumps(changed))
    refused("was written at once, and not by appends")
    (folder / RECORD).unlink()
    refused(
        rf"was not made by appends \(it has no {RECORD}\)\. Append to another folder, or remove"
    )
    (folder / RECORD).write_bytes(record)
    (folder / "mine.txt").write_text("mine")
    (folder / RECORD).unlink()
    refused("and is not replaced. Remove it yourself", overwrite=True)
    (folder / "mine.txt").unlink()
    (folder / RECORD).write_bytes(record)
    assert episodes_of(folder) == [(0, 3)]
    # With overwrite the first append replaces it.
    with (
        mr.ReplayBuffer.open(tmp_path / "other", "r+") as buffer,
        exporter(buffer, folder, overwrite=True),
    ):
        add_episode(buffer, 1)
    assert [episode for episode, _ in episodes_of(folder)] == [0, 1]


def test_two_appenders_of_one_set_are_refused(tmp_path):
    with make(tmp_path / "ring") as buffer, make(tmp_path / "other") as other:
        with exporter(buffer, tmp_path / "set"):
            add_episode(buffer, 0)
            with pytest.raises(LockedError, match="is being appended to by another process"):
                exporter(other, tmp_path / "set")
        # The other buffer holds no rows for it.
        add_episode(other, 0)
        exporter(other, tmp_path / "set2").close()
    assert not [each for each in os.listdir(tmp_path) if each.startswith("tmp-")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 5}, r"every counts rows of a file, got 5 with format='lerobot'"),
        ({"every_episodes": 0}, "every_episodes must be an integer of at least 1, got 0"),
        ({"on_long": "drop"}, "on_long must be one of 'refuse', 'cut', got 'drop'"),
        ({"format": "npz", "every_episodes": 5}, "every_episodes is for formats that episodes are"),
        ({"format": "npz", "on_long": "cut"}, "on_long is for formats that episodes are"),
        ({"format": "npz", "overwrite": True}, "overwrite is for formats that episodes are"),
        ({"codec": "mpeg"}, "codec must be h264 or av1, got 'mpeg'"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, options, message):
    given = {"format": "lerobot", "fps": 10} | options
    if given["format"] == "npz":
        del given["fps"]
    with make(tmp_path / "ring") as buffer, pytest.raises(SchemaError, match=message):
        mr.AutoExport(buffer, tmp_path / "set", **given)
    assert os.listdir(tmp_path) == ["ring"]


@pytest.mark.parametrize("missing", ["link", "exchange"])
def test_a_file_system_without_links_or_exchange_is_refused_at_the_start(tmp_path, missing):
    class Lacking(WatchedDisk):
        def watch(self, name):
            if name == missing:
                raise OSError(1, "Operation not permitted")

    what = "hard links" if missing == "link" else r"exchange of two folders \(RENAME_EXCHANGE\)"
    with (
        make(tmp_path / "ring") as buffer,
        using(Lacking()),
        pytest.raises(FailedError, match=rf"has no {what} \(EPERM\), so that episodes"),
    ):
        exporter(buffer, tmp_path / "set")
    assert os.listdir(tmp_path) == ["ring"]


def test_an_error_of_an_append_is_raised_and_the_next_one_appends_all(tmp_path):
    class Full(WatchedDisk):
        full = True

        def watch(self, name):
            if self.full and name == "exchange":
                raise OSError(28, "No space left on device")

    folder = tmp_path / "new" / "folders" / "set"
    with make(tmp_path / "ring") as buffer:
        of = exporter(buffer, folder)
        add_episode(buffer, 0)
        of.flush()
        with using(Full()) as disk:
            add_episode(buffer, 1)
            with pytest.raises(mr.FullError):
                of.flush()
            assert episodes_of(folder) == [(0, 3)]
            disk.full = False
            of.close()
    assert episodes_of(folder) == [(0, 3), (1, 5)]


RECORDER = """
import json, os, sys, time
import mmreplay as mr
from pathlib import Path
from mmreplay.disk import files
from mmreplay.testing.disks import WatchedDisk, die
from tests.convert.foreign.test_lerobot_append import add_episode, exporter, length_of, make

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
ring = folder / "ring"

class Killing(WatchedDisk):
    calls = -1
    def watch(self, name):
        if self.calls >= 0:
            self.calls += 1
            if self.calls == kill_at:
                die()

if ring.exists():
    buffer = mr.ReplayBuffer.open(ring, "r+", commit_every=0.05)
else:
    buffer = make(ring, capacity=30, commit_every=0.05)
head = int(buffer.heads[0])
episode = 0
if head:
    episode = int(buffer.get_field("observation/state", 0, [head - 1])[0][0]) + 1
of = exporter(buffer, folder / "set")
files.disk = disk = Killing()
disk.calls = 0
of.flush()
print("begun", flush=True)
for _ in range(int(sys.argv[3])):
    add_episode(buffer, episode)
    print("finished", episode, flush=True)
    episode += 1
    of.flush()
    print("appended", sum(report.episodes for _, report in of.reports), flush=True)
print("calls", disk.calls, flush=True)
of.close()
buffer.close()
"""


def record(tmp_path, kill_at, episodes=2, delay=None):
    """Run a recorder that is killed; return its lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", RECORDER, str(tmp_path), str(kill_at), str(episodes)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
    )
    first = process.stdout.readline()
    if delay is not None:
        time.sleep(delay)
        process.kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode, [first.strip(), *out.split("\n")]


def record_and_kill(folder, lives):
    """Recorders of one set that are killed one after another; return how many were.

    Args:
        folder: Of the ring and the set.
        lives: What kills each, a call or a time, and which.
    """
    finished, promised, killed = [], 0, 0
    for kind, when in lives:
        before = len(episodes_of(folder / "set")) if (folder / "set").exists() else 0
        at, delay = (when, None) if kind == "call" else (0, when)
        code, lines = record(folder, at, 2 if kind == "call" else 50, delay)
        killed += code != 0
        for line in lines:
            what, _, number = line.partition(" ")
            if what == "finished":
                finished.append(int(number))
            if what == "appended":
                promised = max(promised, before + int(number))
        if not (folder / "set").exists():
            assert not promised
            continue
        found = [episode for episode, _ in episodes_of(folder / "set")]
        assert found == sorted(set(found)), (kind, when)
        assert len(found) >= promised, (kind, when)
    record(folder, 0, 0)
    found = episodes_of(folder / "set")
    # Between its last row and its message an episode is finished, and nobody was told.
    assert set(finished) <= {episode for episode, _ in found}
    assert all(steps == length_of(episode) for episode, steps in found)
    assert not [each for each in os.listdir(folder) if each.startswith("tmp-mmreplay-new")]
    return killed


@pytest.mark.slow
@pytest.mark.crash
def test_no_kill_appends_an_episode_twice_or_forgets_one(tmp_path):
    rng = np.random.default_rng(1)
    lives = [("call", each) for each in range(1, count(120, 3) * 7, 7)]
    lives += [("time", rng.random() * 0.6) for _ in range(count(200, 3))]
    killed = 0
    # After each life the whole set is read: a new one now and then keeps that short.
    for first in range(0, len(lives), 20):
        folder = tmp_path / str(first)
        folder.mkdir()
        killed += record_and_kill(folder, lives[first : first + 20])
    assert killed > len(lives) // 2


def test_every_call_of_one_append_may_be_its_last(tmp_path):
    """In one process: an append that fails leaves the old set or the new one."""

    class Dying(WatchedDisk):
        at, number = 0, 0

        def watch(self, name):
            self.number += 1
            if self.number == self.at:
                raise KeyboardInterrupt

    with make(tmp_path / "ring", camera=False) as buffer:
        add_episode(buffer, 0, camera=False)
        exporter(buffer, tmp_path / "set").close()
        appender_of(buffer, tmp_path / "set").close()
        add_episode(buffer, 1, camera=False)
        total = appends = 0
        at = 0
        while True:
            at += count(1, 53)
            disk = Dying()
            disk.at = at
            appender = appender_of(buffer, tmp_path / "set")
            reader, found = finished_of(buffer, appender)
            if not found.episodes:
                # The exchange was done: a new episode for the calls after it.
                add_episode(buffer, 2 + appends, camera=False)
                appends += 1
                reader, found = finished_of(buffer, appender)
            try:
                with using(disk):
                    appender.append(reader, found.appended)
                break
            except KeyboardInterrupt:
                total += 1
            finally:
                appender.close()
            found = [episode for episode, _ in episodes_of(tmp_path / "set")]
            assert found == list(range(len(found)))
            assert len(found) >= 1 + appends
    assert total > count(300, 5)
    assert [episode for episode, _ in episodes_of(tmp_path / "set")] == list(range(2 + appends))


def appender_of(buffer, folder):
    description = BufferReader(buffer).describe()
    return open_appender(named("lerobot"), folder, description, overwrite=False, fps=10)


def finished_of(buffer, appender):
    reader = BufferReader(buffer)
    found = finished(reader, appender.appended, buffer.heads)
    return reader_of(reader, found), found


# Another process reads what one writes.


def followed(ring, folder, **options):
    return Following(ring, folder, named("lerobot"), {"fps": 10}, **options)


def test_follow_appends_what_another_process_records_and_ends_with_it(tmp_path):
    buffer = make(tmp_path / "ring", capacity=1000, camera=False)
    add_episode(buffer, 0, camera=False)
    buffer.commit()
    reports = []
    with followed(tmp_path / "ring", tmp_path / "set") as following:
        thread = threading.Thread(target=following.run, args=(reports.append, 0.02))
        thread.start()
        for episode in range(1, 30):
            add_episode(buffer, episode, camera=False)
            buffer.commit()
            time.sleep(0.01)
        buffer.add(step(30, 0, camera=False))
        buffer.close()
        thread.join(60)
        assert not thread.is_alive()
        assert (following.episodes, following.lost) == (30, 0)
    assert len(reports) > 1
    assert [episode for episode, _ in episodes_of(tmp_path / "set")] == list(range(30))


def test_follow_takes_committed_rows_only(tmp_path):
    buffer = make(tmp_path / "ring", capacity=1000, camera=False, commit_every=None)
    add_episode(buffer, 0, camera=False)
    buffer.commit()
    add_episode(buffer, 1, camera=False)
    with followed(tmp_path / "ring", tmp_path / "set") as following:
        assert following._look(lambda _: None) == length_of(1)
    assert episodes_of(tmp_path / "set") == [(0, 3)]
    buffer.close()


def test_follow_counts_rows_that_were_overwritten_once(tmp_path):
    buffer = make(tmp_path / "ring", capacity=20, camera=False)
    for episode in range(10):
        add_episode(buffer, episode, camera=False)
    buffer.commit()
    first = int(buffer.span.first[0])
    with followed(tmp_path / "ring", tmp_path / "set") as following:
        for _ in range(3):
            following._look(lambda _: None)
            assert following.lost == first
        there = appends_of(tmp_path / "set")["next"][0]
        for episode in range(10, 20):
            add_episode(buffer, episode, camera=False)
        buffer.commit()
        for _ in range(2):
            following._look(lambda _: None)
            assert following.lost == first + int(buffer.span.first[0]) - there
    buffer.close()
    found = [episode for episode, _ in episodes_of(tmp_path / "set")]
    assert found == sorted(set(found))
    assert found[-1] == 19


def test_follow_selects_and_changes(tmp_path):
    with make(tmp_path / "ring", capacity=1000, camera=False) as buffer:
        for episode in range(10):
            add_episode(buffer, episode, camera=False)
    changes = Changes(rename={"reward": "score"}, drop=("truncated",))
    with followed(
        tmp_path / "ring", tmp_path / "set", where="length > 4", changes=changes
    ) as following:
        following.run()
    found = episodes_of(tmp_path / "set")
    assert found == [(e, length_of(e)) for e in range(10) if length_of(e) > 4]
    features = json.loads((tmp_path / "set/meta/info.json").read_text())["features"]
    assert "score" in features or "next.reward" in features


def test_follow_of_the_command_line(tmp_path, cli):
    with make(tmp_path / "ring", capacity=1000, camera=False) as buffer:
        add_episode(buffer, 0, camera=False)
    words = [tmp_path / "ring", tmp_path / "set", "--to", "lerobot", "-o", "fps=10"]
    code, out, _ = cli(*words, "--follow")
    assert code == 0
    assert "3 rows, 1 episode" in out
    assert episodes_of(tmp_path / "set") == [(0, 3)]
    code, _, err = cli(*words, "--follow", "--episodes", "0:1")
    assert code == 2
    assert "--follow takes --fields, --where, --drop, --rename and --cast, got" in err
    code, _, err = cli(tmp_path / "set", tmp_path / "other", "--follow")
    assert code == 2
    assert "--follow reads a buffer that is written, got lerobot" in err


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "code"), [(20, 1), (500, 0)])
def test_ctrl_c_ends_follow_and_lost_rows_are_an_error(tmp_path, capacity, code):
    ring, folder = tmp_path / "ring", tmp_path / "set"
    with make(ring, capacity=capacity, camera=False) as buffer:
        for episode in range(20):
            add_episode(buffer, episode, camera=False)
        buffer.commit()
        lost = int(buffer.span.first[0])
        words = [ring, folder, "--to", "lerobot", "-o", "fps=10", "--follow"]
        process = subprocess.Popen(
            [sys.executable, "-m", "mmreplay", "convert", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert f"{folder}: " in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    if code:
        assert f"{lost} rows of {ring} were overwritten before they were appended to" in err


# A copy that stays.


def test_a_linked_copy_stays_what_it_was(tmp_path):
    with make(tmp_path / "ring", capacity=500) as buffer, exporter(buffer, tmp_path / "set") as of:
        add_episode(buffer, 0)
        of.flush()
        copy = mr.linked_copy(tmp_path / "set", tmp_path / "copy")
        assert copy == tmp_path / "copy"
        for episode in range(1, 6):
            add_episode(buffer, episode)
            of.flush()
    assert episodes_of(copy) == [(0, 3)]
    assert len(episodes_of(tmp_path / "set")) == 6


@pytest.mark.slow
def test_linked_copies_are_consistent_while_appends_go_on(tmp_path):
    with (
        make(tmp_path / "ring", capacity=2000, camera=False) as buffer,
        exporter(buffer, tmp_path / "set") as of,
    ):
        add_episode(buffer, 0, camera=False)
        of.flush()
        stop, counts = threading.Event(), []

        def copy():
            number = 0
            while not stop.is_set():
                number += 1
                path = mr.linked_copy(tmp_path / "set", tmp_path / f"copy{number}")
                counts.append(len(episodes_of(path)))

        thread = threading.Thread(target=copy)
        thread.start()
        for episode in range(1, count(60, 15)):
            add_episode(buffer, episode, camera=False)
            of.flush()
        stop.set()
        thread.join()
    assert counts == sorted(counts)
    assert len(set(counts)) > 2


def test_linked_copies_of_what_is_no_set_are_refused(tmp_path):
    with pytest.raises(FormatError, match=r"is no LeRobot set: it has no meta/info\.json"):
        mr.linked_copy(tmp_path, tmp_path / "copy")
    with make(tmp_path / "ring", camera=False) as buffer:
        add_episode(buffer, 0, camera=False)
        exporter(buffer, tmp_path / "set").close()
    with pytest.raises(FormatError, match="already exists"):
        mr.linked_copy(tmp_path / "set", tmp_path / "ring")
    with pytest.raises(FormatError, match="inside"):
        mr.linked_copy(tmp_path / "set", tmp_path / "set/copy")

    class Other(WatchedDisk):
        def watch(self, name):
            if name == "link":
                raise OSError(18, "Invalid cross-device link")

    with using(Other()), pytest.raises(FailedError, match="Copy to the file system of the set"):
        mr.linked_copy(tmp_path / "set", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_disk_that_fails_its_commits_ends_the_add_that_waits(tmp_path):
    class Failing(WatchedDisk):
        fails = False

        def watch(self, name):
            if self.fails and name == "datasync":
                raise OSError(5, "Input/output error")

    with using(Failing()) as disk:
        buffer = make(tmp_path / "ring", capacity=20, camera=False, commit_every=None)
        of = exporter(buffer, tmp_path / "set")
        add_episode(buffer, 0, camera=False)
        of.flush()
        disk.fails = True
        steps = (step(1, number, camera=False, ends=False) for number in range(1000))
        with pytest.raises(FailedError):
            add_all(buffer, steps)
        disk.fails = False
        with pytest.raises(FailedError):
            of.close()
        with pytest.raises(FailedError):
            buffer.close()
    assert episodes_of(tmp_path / "set") == [(0, 3)]


def test_an_older_copy_of_the_ring_is_refused(tmp_path):
    with make(tmp_path / "ring", camera=False) as buffer:
        add_episode(buffer, 0, camera=False)
    shutil.copytree(tmp_path / "ring", tmp_path / "copy")
    with (
        mr.ReplayBuffer.open(tmp_path / "ring", "r+") as buffer,
        exporter(buffer, tmp_path / "set"),
    ):
        add_episode(buffer, 1, camera=False)
    told = r"has rows up to 8 of environment 0, and the ring ends at 3: it is an older copy"
    with (
        mr.ReplayBuffer.open(tmp_path / "copy", "r+") as buffer,
        pytest.raises(FormatError, match=told),
    ):
        exporter(buffer, tmp_path / "set")


@pytest.mark.parametrize("on_resume", ["break", "truncate", "continue"])
@pytest.mark.filterwarnings("ignore::mmreplay.errors.DurabilityWarning")
def test_the_last_take_is_appended_when_its_end_was_declared(tmp_path, on_resume):
    with make(tmp_path / "ring", camera=False) as buffer, exporter(buffer, tmp_path / "set"):
        buffer.add(step(0, 0, camera=False))
        buffer.add(step(0, 1, camera=False))
        buffer.end_episodes()
    assert episodes_of(tmp_path / "set") == [(0, 2)]
    with (
        mr.ReplayBuffer.open(tmp_path / "ring", "r+", on_resume=on_resume) as buffer,
        exporter(buffer, tmp_path / "set"),
    ):
        add_episode(buffer, 1, camera=False)
    assert episodes_of(tmp_path / "set") == [(0, 2), (1, 5)]


@pytest.mark.filterwarnings("ignore::mmreplay.errors.DurabilityWarning")
def test_the_last_take_is_left_out_when_it_was_discarded(tmp_path):
    with make(tmp_path / "ring", camera=False) as buffer, exporter(buffer, tmp_path / "set") as of:
        add_episode(buffer, 0, camera=False)
        of.flush()
        buffer.add(step(1, 0, camera=False))
        buffer.end_episodes(discard=True)
    assert appends_of(tmp_path / "set")["next"] == [4]
    with (
        mr.ReplayBuffer.open(tmp_path / "ring", "r+") as buffer,
        exporter(buffer, tmp_path / "set") as of,
    ):
        add_episode(buffer, 2, camera=False)
    assert episodes_of(tmp_path / "set") == [(0, 3), (2, 7)]
    assert not [
        doubt for _, each in of.reports for doubt in each.doubts if "left the ring" in doubt
    ]


@pytest.mark.parametrize("discard", [False, True])
def test_an_episode_that_fills_the_ring_can_be_ended(tmp_path, discard):
    with (
        make(tmp_path / "ring", capacity=20, camera=False) as buffer,
        exporter(buffer, tmp_path / "set"),
    ):
        steps = (step(1, number, camera=False, ends=False) for number in range(1000))
        with pytest.raises(FailedError, match="they fill the ring"):
            add_all(buffer, steps)
        head = int(buffer.heads[0])
        buffer.end_episodes(discard=discard)
        add_episode(buffer, 2, camera=False)
    wanted = [(2, length_of(2))] if discard else [(1, head), (2, length_of(2))]
    assert episodes_of(tmp_path / "set") == wanted


def test_a_set_that_appeared_meanwhile_is_not_replaced(tmp_path):
    with make(tmp_path / "ring", camera=False) as buffer:
        of = exporter(buffer, tmp_path / "set")
        with make(tmp_path / "other", camera=False) as other:
            add_episode(other, 7, camera=False)
        mr.export(tmp_path / "other", tmp_path / "set", format="lerobot", fps=10)
        add_episode(buffer, 0, camera=False)
        with pytest.raises(FormatError, match="already exists"):
            of.flush()
        assert episodes_of(tmp_path / "set") == [(7, length_of(7))]
        with pytest.raises(FormatError, match="already exists"):
            of.close()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_target_that_is_no_folder_is_refused(tmp_path, kind):
    if kind == "file":
        (tmp_path / "set").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "set").symlink_to(tmp_path / "elsewhere")
    with make(tmp_path / "ring", camera=False) as buffer:
        for overwrite in (False, True):
            with pytest.raises(FormatError, match="is a file or a link, and a set is a folder"):
                exporter(buffer, tmp_path / "set", overwrite=overwrite)


def test_files_that_somebody_put_into_the_set_stay(tmp_path):
    with make(tmp_path / "ring", camera=False) as buffer, exporter(buffer, tmp_path / "set") as of:
        add_episode(buffer, 0, camera=False)
        of.flush()
        (tmp_path / "set/README.md").write_text("a card")
        (tmp_path / "set/meta/more").mkdir()
        (tmp_path / "set/meta/more/notes.txt").write_text("notes")
        for episode in (1, 2):
            add_episode(buffer, episode, camera=False)
            of.flush()
    assert (tmp_path / "set/README.md").read_text() == "a card"
    assert (tmp_path / "set/meta/more/notes.txt").read_text() == "notes"
    assert len(episodes_of(tmp_path / "set")) == 3


def test_a_report_says_what_the_set_leaves_out(tmp_path):
    with make(tmp_path / "ring") as buffer, exporter(buffer, tmp_path / "set") as of:
        add_episode(buffer, 0)
        of.flush()
        add_episode(buffer, 1)
    with (
        mr.ReplayBuffer.open(tmp_path / "ring", "r+") as buffer,
        exporter(buffer, tmp_path / "set") as again,
    ):
        add_episode(buffer, 2)
    reports = [report for _, report in (*of.reports, *again.reports)]
    assert len(reports) == 3
    assert all("became video, which is lossy" in " ".join(each.doubts) for each in reports)
    # Once a session.
    task = ["no field says what the task is" in " ".join(each.notes) for each in reports]
    assert task == [True, False, True]


def test_a_forked_child_ends(tmp_path):
    with make(tmp_path / "ring", camera=False) as buffer, exporter(buffer, tmp_path / "set") as of:
        add_episode(buffer, 0, camera=False)
        pid = os.fork()
        if not pid:
            try:
                of.flush()
            except mr.ForkedError:
                of.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert episodes_of(tmp_path / "set") == [(0, 3)]


def test_follow_knows_its_ring_by_its_name_also_where_fields_are_changed(tmp_path):
    changes = Changes(rename={"reward": "score"})
    for name in ("one", "two"):
        with make(tmp_path / name, camera=False) as buffer:
            add_episode(buffer, 0, camera=False)
    with followed(tmp_path / "one", tmp_path / "set", changes=changes) as following:
        following.run()
    with (
        followed(tmp_path / "two", tmp_path / "set", changes=changes) as following,
        pytest.raises(FormatError, match="has episodes of the ring"),
    ):
        following.run()


def test_follow_refuses_a_ring_that_replaced_the_one_it_reads(tmp_path):
    with make(tmp_path / "ring", camera=False) as buffer:
        add_episode(buffer, 0, camera=False)
    with followed(tmp_path / "ring", tmp_path / "set") as following:
        following._look(lambda _: None)
        shutil.rmtree(tmp_path / "ring")
        with make(tmp_path / "ring", camera=False) as buffer:
            for episode in range(5, 9):
                add_episode(buffer, episode, camera=False)
        with pytest.raises(FormatError, match="was replaced by another ring"):
            following._look(lambda _: None)
    assert episodes_of(tmp_path / "set") == [(0, 3)]


def test_follow_goes_on_where_the_ring_is_faster_and_counts_what_it_gave_up(tmp_path):
    buffer = make(tmp_path / "ring", capacity=20, camera=False, commit_every=None)
    stop = threading.Event()

    def write():
        episode = 0
        while not stop.is_set():
            add_episode(buffer, episode, camera=False)
            episode += 1
        buffer.close()

    writer = threading.Thread(target=write)
    with followed(tmp_path / "ring", tmp_path / "set") as following:
        writer.start()
        reader = threading.Thread(target=following.run, args=(lambda _: None, 0.01))
        reader.start()
        time.sleep(0.5)
        stop.set()
        writer.join()
        reader.join(60)
        assert not reader.is_alive()
        assert following.lost > 0
    found = [episode for episode, _ in episodes_of(tmp_path / "set")]
    assert found == sorted(set(found))


def test_episodes_that_a_condition_refuses_are_not_lost_rows(tmp_path):
    buffer = make(tmp_path / "ring", capacity=30, camera=False)
    with followed(tmp_path / "ring", tmp_path / "set", where="length > 100") as following:
        for episode in range(40):
            add_episode(buffer, episode, camera=False)
            buffer.commit()
            following._look(lambda _: None)
        assert following.lost == 0
    buffer.close()

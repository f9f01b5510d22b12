"""A ring that fills goes to files before it gives anything up."""

import subprocess
import sys
import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert import row_export
from mmreplay.disk import files
from mmreplay.errors import FailedError, FullError, SchemaError
from tests.convert.test_kills import after, in_a_child

SCHEMA = mr.Schema(
    {
        "a": mr.Field((), "int64"),
        "b": mr.Field((3,), "float32"),
        "terminated": mr.Field((), "bool"),
        "observation": mr.Field((2,), "float32"),
    }
)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture(params=["memmap", "memory"])
def engine(request):
    return request.param


def create(tmp_path, capacity=50, num_envs=1, engine="memmap", **options):
    path = None if engine == "memory" else tmp_path / "buffer"
    return mr.ReplayBuffer.create(
        path, SCHEMA, capacity, num_envs, engine=engine, autoreset="disabled", **options
    )


def step(number, num_envs, lead=()):
    """Steps whose numbers say which they are, of `lead` and environments."""
    numbers = number + np.arange(int(np.prod(lead)) or 1).reshape(*lead, 1)
    numbers = numbers * 10 + np.arange(num_envs)
    if not lead:
        numbers = numbers.reshape(num_envs)
    return {
        "a": numbers,
        "b": np.stack([numbers] * 3, -1).astype(np.float32),
        "terminated": numbers // 10 % 7 == 6,
        "observation": np.stack([numbers] * 2, -1).astype(np.float32),
    }


def rows_of(folder):
    """Every row of every file, as (environment, position, a), in order of the files."""
    found = []
    for path in sorted(folder.iterdir()):
        assert not path.name.startswith("tmp-")
        with np.load(path) as file:
            columns = (file["_env_id"], file["_position"], file["a"])
            found += zip(*(each.tolist() for each in columns), strict=True)
    return found


def test_every_row_is_in_exactly_one_file(tmp_path, engine):
    with (
        create(tmp_path, 50, 2, engine) as buffer,
        mr.AutoExport(buffer, tmp_path / "files") as auto,
    ):
        for number in range(330):
            buffer.add(step(number, 2))
        auto.flush()
    assert len(auto.reports) == 7
    assert [report.rows for _, report in auto.reports] == [100] * 6 + [60]
    got = rows_of(tmp_path / "files")
    assert sorted(got) == sorted(
        (env, number, number * 10 + env) for env in (0, 1) for number in range(330)
    )
    assert [path for path, _ in auto.reports] == sorted((tmp_path / "files").iterdir())


@pytest.mark.parametrize("every", [None, 20])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.sliced(1)
def test_it_holds_for_blocks_and_environments_that_run_apart(tmp_path, engine, seed, every):
    rng = np.random.default_rng(seed)
    want, done = set(), np.zeros(3, int)
    with (
        create(tmp_path, 40, 3, engine) as buffer,
        mr.AutoExport(buffer, tmp_path / "files", every=every) as auto,
    ):
        for number in range(0, 3000, 20):
            steps = int(rng.integers(1, 20))
            ids = np.sort(rng.choice(3, int(rng.integers(1, 4)), replace=False))
            given = {k: v[:, ids] for k, v in step(number, 3, (steps,)).items()}
            final = given["observation"] if rng.random() < 0.3 else None
            before = buffer.heads
            buffer.extend(given, final_observation=final, env_ids=ids)
            for env in ids.tolist():
                want |= {(env, p) for p in range(int(before[env]), int(buffer.heads[env]))}
            done[ids] += steps
        auto.flush()
    got = [row[:2] for row in rows_of(tmp_path / "files")]
    assert len(got) == len(set(got))
    assert set(got) == want


def test_what_is_exported_is_loaded_again(tmp_path):
    with (
        create(tmp_path) as buffer,
        mr.AutoExport(buffer, tmp_path / "files", format="safetensors") as auto,
    ):
        for number in range(51):
            buffer.add(step(number, 1))
    ((path, report),) = [*auto.reports]
    assert path.suffix == ".safetensors"
    assert (report.rows, report.episodes) == (50, 8)
    mr.load(path, tmp_path / "loaded")
    assert not mr.verify_buffer(tmp_path / "loaded").findings


def test_rows_are_held_until_their_file_is_there(tmp_path, monkeypatch):
    """The writer waits where it would give up a row, and not before."""
    let_go, begun = threading.Event(), threading.Event()
    whole = row_export.transfer

    def slow(*args, **options):
        begun.set()
        assert let_go.wait(30)
        return whole(*args, **options)

    monkeypatch.setattr(row_export, "transfer", slow)
    with create(tmp_path, 64) as buffer, mr.AutoExport(buffer, tmp_path / "files") as auto:
        for number in range(64):
            buffer.add(step(number, 1))
        waiting = threading.Thread(target=buffer.add, args=(step(64, 1),))
        waiting.start()
        assert begun.wait(30)
        waiting.join(0.2)
        assert waiting.is_alive()
        assert (buffer.heads[0], buffer.span.first[0]) == (64, 0)
        let_go.set()
        waiting.join(30)
        assert buffer.heads[0] == 65
        auto.flush()
    assert [row[1] for row in rows_of(tmp_path / "files")] == list(range(65))


def test_adds_go_on_where_a_file_is_due_early(tmp_path, monkeypatch):
    let_go = threading.Event()
    whole = row_export.transfer

    def slow(*args, **options):
        assert let_go.wait(30)
        return whole(*args, **options)

    monkeypatch.setattr(row_export, "transfer", slow)
    with (
        create(tmp_path, 64) as buffer,
        mr.AutoExport(buffer, tmp_path / "files", every=32) as auto,
    ):
        for number in range(64):
            buffer.add(step(number, 1))
        assert auto.reports == []
        let_go.set()
        for number in range(64, 200):
            buffer.add(step(number, 1))
        auto.flush()
        assert [report.rows for _, report in auto.reports] == [32] * 6 + [8]


def test_what_fails_is_raised_by_an_add_and_tried_again(tmp_path, monkeypatch):
    def full(*args, **options):
        raise FullError("no room for files")

    with create(tmp_path, 64) as buffer, mr.AutoExport(buffer, tmp_path / "files") as auto:
        with monkeypatch.context() as patch:
            patch.setattr(row_export, "transfer", full)
            failed = 0
            for _ in range(5 * buffer.slots):
                try:
                    buffer.add(step(int(buffer.heads[0]), 1))
                except FullError:
                    failed += 1
            # Nothing that is in no file was overwritten, however often it failed.
            assert failed > 10
            assert (buffer.heads[0], buffer.span.first[0]) == (64, 0)
        for number in range(int(buffer.heads[0]), 300):
            buffer.add(step(number, 1))
        auto.flush()
    got = rows_of(tmp_path / "files")
    assert [row[2] for row in got] == [10 * number for number in range(300)]


def test_rows_that_are_cleared_are_not_exported(tmp_path):
    with create(tmp_path, 50) as buffer, mr.AutoExport(buffer, tmp_path / "files") as auto:
        for number in range(30):
            buffer.add(step(number, 1))
        buffer.clear()
        for number in range(30, 100):
            buffer.add(step(number, 1))
        auto.flush()
    got = [row[1] for row in rows_of(tmp_path / "files")]
    assert got == list(range(30, 100))


def test_a_buffer_that_was_filled_before_is_exported_from_its_oldest_row(tmp_path):
    with create(tmp_path, 50) as buffer:
        for number in range(70):
            buffer.add(step(number, 1))
    with (
        mr.ReplayBuffer.open(tmp_path / "buffer", "r+") as buffer,
        mr.AutoExport(buffer, tmp_path / "files") as auto,
    ):
        for number in range(70, 90):
            buffer.add(step(number, 1))
        auto.flush()
    got = [row[1] for row in rows_of(tmp_path / "files")]
    assert got == list(range(20, 90))


def test_a_ring_that_is_resized_stays_watched(tmp_path):
    with create(tmp_path, 50) as buffer, mr.AutoExport(buffer, tmp_path / "files") as auto:
        for number in range(40):
            buffer.add(step(number, 1))
        buffer.resize(80)
        for number in range(40, 200):
            buffer.add(step(number, 1))
        auto.flush()
    got = [row[1] for row in rows_of(tmp_path / "files")]
    assert got == list(range(200))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "foo"}, "format must be one of buffer, csv, d4rl, lerobot, minari, npz,"),
        ({"fields": ["x"]}, "fields or subtrees of a, b, terminated, observation, got"),
        ({"colour": 3, "format": "pt"}, "option 'colour' is unknown to 'pt' as a target, which"),
        ({"compression": "x"}, r"compression must be 'deflate' or None, got 'x'\. Leave it"),
        ({"every": 0}, r"every must be an integer in \[1, 50\], got 0"),
        ({"every": 51}, r"every must be an integer in \[1, 50\], got 51"),
    ],
)
def test_a_bad_choice_is_found_at_construction(tmp_path, options, message):
    with create(tmp_path) as buffer:
        with pytest.raises(SchemaError, match=message):
            mr.AutoExport(buffer, tmp_path / "files", **options)
        # Nothing is held by one that was refused.
        mr.AutoExport(buffer, tmp_path / "files").close()
    assert not list((tmp_path / "files").iterdir())


def test_one_watches_a_buffer_that_is_written(tmp_path):
    with create(tmp_path) as buffer:
        with (
            mr.AutoExport(buffer, tmp_path / "files"),
            pytest.raises(FailedError, match="another callback already holds"),
        ):
            mr.AutoExport(buffer, tmp_path / "other")
        mr.AutoExport(buffer, tmp_path / "other").close()
    with (
        mr.ReplayBuffer.open(tmp_path / "buffer") as reader,
        pytest.raises(FailedError, match="is not open for writing"),
    ):
        mr.AutoExport(reader, tmp_path / "files")


def test_closing_the_buffer_first_is_no_deadlock(tmp_path):
    buffer = create(tmp_path)
    auto = mr.AutoExport(buffer, tmp_path / "files")
    for number in range(20):
        buffer.add(step(number, 1))
    buffer.close()
    auto.close()
    auto.close()


@pytest.mark.slow
@pytest.mark.crash
def test_a_killed_writer_leaves_whole_files_and_a_whole_buffer(tmp_path):
    """Rows that were given up are in a file, and no file is cut, at any instant."""
    rng = np.random.default_rng(2)
    for turn in range(12):
        folder = tmp_path / str(turn)
        folder.mkdir()

        def write(folder=folder):
            buffer = create(folder, 50)
            auto = mr.AutoExport(buffer, folder / "files")
            for number in range(100_000):
                buffer.add(step(number, 1))
            auto.close()

        assert in_a_child(after(float(rng.uniform(0.02, 0.2))), write)
        if not (folder / "buffer" / "metadata.json").exists():
            continue
        got = set()
        for path in folder.glob("files/*"):
            if not path.name.startswith("tmp-"):
                with np.load(path) as file:
                    got |= set(file["_position"].tolist())
        with mr.ReplayBuffer.open(folder / "buffer") as buffer:
            first, stop = int(buffer.span.first[0]), int(buffer.span.stop[0])
        assert got | set(range(first, stop)) == set(range(stop))


FORGOTTEN = """
import sys, threading, time
from concurrent.futures import thread
from mmreplay import AutoExport
from mmreplay.convert import buffer_reader, row_export
from mmreplay.convert.episode_ends import EpisodeStarts
from tests.convert.test_auto_export import create, step
from pathlib import Path

run, look = row_export.RowExport._run, EpisodeStarts.look
begun = threading.Event()


def late(export, span):
    while not thread._shutdown:
        time.sleep(0.01)
    run(export, span)


def between(seen, block):
    begun.set()
    # Python ends now, and with it the threads that wait for jobs.
    pools = "mmreplay-convert", "mmreplay-export", "mmreplay-load"
    while not thread._shutdown or any(
        each.name.startswith(pools) for each in threading.enumerate()
    ):
        time.sleep(0.01)
    return look(seen, block)


where, when, name, *options = sys.argv[1:]
if when == "before":
    row_export.RowExport._run = late
else:
    buffer_reader.default_rows = lambda _: 7
    EpisodeStarts.look = between
buffer = create(Path(where))
export = AutoExport(
    buffer, Path(where) / "files", format=name, every=20,
    **dict(each.split("=") for each in options),
)
buffer.extend(step(0, 1, (20,)))
buffer.add(step(20, 1))
assert when == "before" or begun.wait(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "wanted", [["npz"], ["npz", "compression=deflate"], ["csv"], ["parquet"], ["buffer"]]
)
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.sliced(2)
def test_a_file_that_is_begun_is_ended_by_a_program_that_ends(tmp_path, when, wanted):
    ended = subprocess.run(
        [sys.executable, "-c", FORGOTTEN, tmp_path, when, *wanted],
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    (found,) = (path for path in (tmp_path / "files").iterdir() if not path.name.endswith(".json"))
    if wanted == ["buffer"]:
        with mr.ReplayBuffer.open(found) as buffer:
            assert buffer.gather_all()["a"].shape == (20,)
    else:
        assert mr.load(found, tmp_path / "again").rows == 20


LINGERING = """
import sys, threading, time
from concurrent.futures import thread
from mmreplay import AutoExport
from tests.convert.test_auto_export import create, step
from pathlib import Path


def play():
    while not thread._shutdown:
        time.sleep(0.01)
    with AutoExport(buffer, Path(sys.argv[1]) / "files", format="npz", every=20):
        for number in range(130):
            buffer.add(step(number, 1))


buffer = create(Path(sys.argv[1]))
threading.Thread(target=play).start()
"""


@pytest.mark.slow
def test_a_thread_that_outlives_the_program_exports_what_it_adds(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", LINGERING, tmp_path], timeout=120, capture_output=True, text=True
    )
    assert ended.stderr == ""
    expected = [(0, at, at * 10) for at in range(120)]
    assert rows_of(tmp_path / "files") == expected


def test_rows_whose_export_could_not_begin_are_exported_later(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    buffer = create(tmp_path)
    with buffer, mr.AutoExport(buffer, tmp_path / "files", format="npz", every=20):
        buffer.extend(step(0, 1, (20,)))
        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", refuse)
            with pytest.raises(FailedError, match="cannot start a thread that converts"):
                buffer.add(step(20, 1))
        for number in range(20, 45):
            buffer.add(step(number, 1))
    expected = [(0, at, at * 10) for at in range(40)]
    assert rows_of(tmp_path / "files") == expected

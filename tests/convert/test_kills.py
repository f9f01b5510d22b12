"""A conversion that is killed leaves its target absent, old or whole, at any instant.

Killed before each of its calls to the disk, and half through each write; and at random
instants, as libraries of formats write on their own.
"""

import os
import signal
import sys

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.disk import files
from tests.convert.support import same_rows
from tests.slices import count

SCHEMA = mr.Schema.from_flat(
    {
        "observation": mr.Field((3,), "float32"),
        "action": mr.Field((), "int32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
    }
)
WAYS = {
    "npz": ("a.npz", {}),
    "deflated": ("a.npz", {"compression": "deflate"}),
    "pt": ("a.pt", {}),
    "safetensors": ("a.safetensors", {}),
    "parts": ("a.safetensors", {"part_bytes": 400}),
    "csv": ("a.csv", {}),
    "csv.gz": ("a.csv.gz", {}),
    "parquet": ("a.parquet", {}),
    "files": ("a.parquet", {"file_nbytes": 400}),
}
ONE_WAY = {
    "skrl": ("b.pt", {"layout": "skrl"}),
    "skrl csv": ("b.csv", {"layout": "skrl"}),
    "velora": ("b", {"layout": "velora", "format": "safetensors"}),
    "d4rl": ("b.hdf5", {}),
    "minari": ("ours/b-v0", {"format": "minari"}),
}
CALLS = (
    "open",
    "pwrite",
    "store",
    "truncate",
    "allocate",
    "datasync",
    "sync_folder",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
)


class Deadly(files.Disk):
    """A disk that kills its user at the n-th call, counted from 0."""

    def __init__(self, number):
        self.number = number

    def _count(self):
        self.number -= 1
        return self.number < 0


def _deadly(name):
    plain = getattr(files.Disk, name)

    def call(self, *args):
        if self._count():
            if name == "pwrite":
                fd, data, offset = args
                plain(self, fd, memoryview(data).cast("B")[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args)

    return call


for _name in CALLS:
    setattr(Deadly, _name, _deadly(_name))


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(files.Disk, "datasync", lambda self, fd: None)
    monkeypatch.setattr(files.Disk, "sync_folder", lambda self, fd: None)


@pytest.fixture
def source(tmp_path):
    """A closed buffer of 24 rows, and another one of the same fields."""
    for name, seed in (("source", 0), ("other", 1)):
        rng = np.random.default_rng(seed)
        with mr.ReplayBuffer.create(tmp_path / name, SCHEMA, 12, 2, autoreset="disabled") as buffer:
            buffer.extend(
                observation=rng.random((17, 2, 3), np.float32),
                action=rng.integers(0, 9, (17, 2), np.int32),
                reward=rng.random((17, 2), np.float32),
                terminated=rng.random((17, 2)) < 0.2,
            )
    return tmp_path / "source"


def in_a_child(prepare, call):
    """Run a call in a fork; returns the signal that ended it, 0 for none."""
    pid = os.fork()
    if not pid:
        try:
            prepare()
            call()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def at_call(number):
    def prepare():
        files.disk = Deadly(number)

    return prepare


def after(seconds):
    def prepare():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)

    return prepare


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith("tmp-")]


class Exporting:
    """From a buffer to a file, which is read to see what it holds."""

    def __init__(self, tmp_path, source, way):
        name, self.options = way
        self.source, self.target = source, tmp_path / "made" / name
        self.back = tmp_path / "back"

    def run(self, source=None, **options):
        mr.export(source or self.source, self.target, **self.options, **options)

    def holds(self):
        """Rows of the target, as a buffer's, which is open."""
        if self.back.exists():
            files.remove_tree(self.back)
        mr.load(self.target, self.back)
        return mr.ReplayBuffer.open(self.back)


class Loading(Exporting):
    """From a file to a buffer."""

    def __init__(self, tmp_path, source, way):
        name, options = way
        self.files = {}
        for each in (source, source.with_name("other")):
            folder = tmp_path / f"file-{each.name}"
            folder.mkdir()
            self.files[each] = folder / name
            mr.export(each, folder / name, **options)
        self.source, self.target = source, tmp_path / "made" / "buffer"

    def run(self, source=None, **options):
        mr.load(self.files[source or self.source], self.target, **options)

    def holds(self):
        return mr.ReplayBuffer.open(self.target)


class Sealing(Loading):
    """From a file to a buffer of compressed shards."""

    def run(self, source=None, **options):
        super().run(source, engine="zarr", **options)


def equal(made, source):
    with made.holds() as one, mr.ReplayBuffer.open(source) as other:
        same_rows(one, other)


def check_killed(made, prepare):
    """Kill a run for a target that is not there; True where it came to its end."""
    killed = in_a_child(prepare, made.run)
    if killed and made.target.exists():
        # The rename is what makes it appear: it is whole.
        equal(made, made.source)
    made.run(overwrite=made.target.exists())
    equal(made, made.source)
    assert leftovers(made.target.parent) == []
    files.remove_tree(made.target)
    return not killed


def check_replaced(made, prepare):
    """Kill a run that replaces a target; True where it came to its end."""
    other = made.source.with_name("other")
    made.run(other)
    killed = in_a_child(prepare, lambda: made.run(overwrite=True))
    if killed and made.target.exists():
        with made.holds() as found:
            which = [other, made.source][_is(found, made.source)]
        equal(made, which)
    # Of a folder the old one may lie beside its place; the next run puts it back.
    old = made.target.with_name(f"tmp-mmreplay-old-{made.target.name}")
    assert made.target.exists() or old.exists()
    made.run(overwrite=True)
    equal(made, made.source)
    assert leftovers(made.target.parent) == []
    files.remove_tree(made.target)
    return not killed


def _is(opened, source):
    with mr.ReplayBuffer.open(source) as buffer:
        a, b = (np.asarray(each.gather_all()["reward"]) for each in (opened, buffer))
        return bool((a == b).all())


@pytest.mark.crash
@pytest.mark.parametrize("kind", [Exporting, Loading])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sliced(2)
def test_killed_at_any_call_to_the_disk(tmp_path, source, way, kind):
    made = kind(tmp_path, source, WAYS[way])
    # Some of the calls, others for each format: it is to take half a second.
    number = list(WAYS).index(way)
    while not (check_replaced if number % 2 else check_killed)(made, at_call(number)):
        number += count(11, 23)


@pytest.mark.slow
@pytest.mark.crash
def test_killed_while_shards_are_written(tmp_path, source):
    made = Sealing(tmp_path, source, WAYS["npz"])
    number = 5
    while not check_killed(made, at_call(number)):
        number += 230


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["buffer", "npz"])
@pytest.mark.sliced(1)
def test_killed_while_splits_are_written(tmp_path, source, kind):
    # All splits are there, of the one source or of the other, or none of them.
    other, target = source.with_name("other"), tmp_path / "made" / "sets"

    def run(path, **options):
        mr.export(path, target, format=kind, splits={"a": 0.5, "b": 0.5}, **options)

    def rewards(paths):
        found = []
        for path in paths:
            back = path
            if path.suffix:
                back = tmp_path / "back"
                mr.load(path, back, overwrite=True)
            with mr.ReplayBuffer.open(back) as buffer:
                found += buffer.gather_all()["reward"].tolist()
        return sorted(found)

    whole = [rewards([each]) for each in (source, other)]
    number, killed = count(3, 1), True
    while killed:
        run(other)
        killed = in_a_child(at_call(number), lambda: run(source, overwrite=True))
        if killed and target.exists():
            assert len(list(target.iterdir())) == 2
            assert rewards(target.iterdir()) in whole
        old = target.with_name("tmp-mmreplay-old-sets")
        assert target.exists() or old.exists()
        run(source, overwrite=True)
        assert rewards(target.iterdir()) == whole[0]
        assert leftovers(target.parent) == []
        files.remove_tree(target)
        number += count(1, 37)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("check", [check_killed, check_replaced])
@pytest.mark.parametrize("way", [*WAYS, "buffer", "shards"])
def test_killed_at_every_call_and_at_random_instants(tmp_path, source, way, check):
    # All files are loaded by one writer, that of buffers.
    kind = {"buffer": Loading, "shards": Sealing}.get(way, Exporting)
    made = kind(tmp_path, source, WAYS.get(way, WAYS["npz"]))
    number = 0
    while not check(made, at_call(number)):
        # Shards take a thousand calls, of which many are alike.
        number += 13 if way == "shards" else 1
    rng = np.random.default_rng(0)
    for _ in range(20):
        check(made, after(float(rng.uniform(0.0005, 0.03))))


def check_layout(tmp_path, source, way, prepares):
    """Kill runs for a target that others read, which is absent or whole after each."""
    name, options = ONE_WAY[way]
    target = tmp_path / "made" / name

    def run(**more):
        mr.export(source, target, **options, **more)

    def content():
        each = sorted(target.rglob("*")) if target.is_dir() else [target]
        return [path.read_bytes() for path in each if path.is_file()]

    run()
    whole = content()
    files.remove_tree(target)
    for prepare in prepares:
        killed = in_a_child(prepare, run)
        if target.exists():
            assert content() == whole
        run(overwrite=target.exists())
        assert content() == whole
        assert leftovers(target.parent) == []
        files.remove_tree(target)
        if not killed:
            break


@pytest.mark.crash
@pytest.mark.parametrize("way", ONE_WAY)
@pytest.mark.sliced(2)
def test_layouts_of_others_are_absent_or_whole_as_well(tmp_path, source, way):
    check_layout(tmp_path, source, way, map(at_call, range(0, 10_000, count(4, 12))))


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.parametrize("way", ONE_WAY)
def test_layouts_of_others_at_random_instants(tmp_path, source, way):
    # h5py writes by itself, at no call of ours.
    rng = np.random.default_rng(0)
    for _ in range(20):
        seconds = float(rng.uniform(0.0005, 0.02))
        check_layout(tmp_path, source, way, [after(seconds)])

"""Where adapters keep their buffers: paths, refusals, temporary folders, pickles."""

import gc
import json
import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from mmreplay import Field, NStep, ReplayBuffer, Schema
from mmreplay.adapters import skrl, tmrl, velora
from mmreplay.adapters.common import location
from mmreplay.adapters.common.location import BufferLocation
from mmreplay.adapters.tmrl.memory import STATS
from mmreplay.buffer import new_generation
from mmreplay.disk import files
from mmreplay.disk.calls import Disk
from mmreplay.disk.lock import WriterLock
from mmreplay.errors import AutoresetWarning, FailedError, FormatError, SchemaError

SCHEMA = Schema({"observation": Field((2,), "float32"), "reward": Field((), "float32")})


def filled(folder: BufferLocation, steps: int = 3) -> None:
    buffer = folder.ring(SCHEMA, 10)
    for i in range(steps):
        buffer.add(observation=np.full(2, i, np.float32), reward=float(i))


@pytest.mark.parametrize("adapter", [True, False])
def test_a_library_that_states_its_autoreset_is_not_doubted(tmp_path, adapter):
    """Its users cannot give another answer."""
    schema = SCHEMA.with_field("terminated", Field((), "bool"))
    home = BufferLocation("any", tmp_path / "ring")
    buffer = home.ring(schema, 400)
    if not adapter:
        home.close()
        buffer = ReplayBuffer.open(tmp_path / "ring", "r+")
    with warnings.catch_warnings(record=True) as found, buffer:
        warnings.simplefilter("always")
        for number in range(8 * 40):
            buffer.add(
                observation=np.zeros(2, np.float32),
                reward=float(number % 8 > 0),
                terminated=number % 8 == 7,
            )
    categories = [each.category for each in found]
    assert categories == ([] if adapter else [AutoresetWarning])


def test_a_buffer_that_is_there_is_refused_without_resume(tmp_path):
    home = BufferLocation("any", tmp_path / "ring")
    filled(home)
    home.close()
    with pytest.raises(FormatError, match=r"already holds a buffer.*resume=True"):
        BufferLocation("any", tmp_path / "ring")


@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.slow), False])
def test_another_capacity_names_resize_and_leaves_the_folder_as_it_is(tmp_path, shared):
    home = BufferLocation("any", tmp_path / "my ring")
    filled(home)
    if not shared:
        home.close()
    before = {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()}
    again = BufferLocation("any", home.path, resume=True)
    message = (
        rf"^steps: {home.path} must hold 1 x 20 rows of .*, got 1 x 10 rows of .*\. "
        rf"Close it and run mmreplay resize '{home.path}' 20\. Pass"
    )
    with pytest.raises(SchemaError, match=message):
        again.ring(SCHEMA, 20, on_resume="truncate", size_name="steps")
    assert {p: p.read_bytes() for p in home.path.rglob("*") if p.is_file()} == before
    # It is not held: the command can resize it.
    home.close()
    done = subprocess.run(
        [sys.executable, "-m", "mmreplay", "resize", str(home.path), "20"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ring = again.ring(SCHEMA, 20, size_name="steps")
    assert (ring.capacity, len(ring)) == (20, 3)
    again.close()


SYSTEMS = ["skrl", "rofunc", "alf-own", "tmrl", "velora", "pytorchrl", "sb3"]


@pytest.mark.parametrize("maker", SYSTEMS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_buffer_of_another_adapter_is_refused_and_left_as_it_is(tmp_path, maker, system):
    home = BufferLocation(maker, tmp_path / "ring")
    filled(home)
    home.close()
    before = (tmp_path / "ring" / "metadata.json").read_bytes()
    if maker == system or {maker, system} == {"skrl", "rofunc"}:
        assert BufferLocation(system, tmp_path / "ring", resume=True).resumed
    else:
        with pytest.raises(SchemaError, match=f"got .* the adapter .*{maker[:3]}"):
            BufferLocation(system, tmp_path / "ring", resume=True)
    assert (tmp_path / "ring" / "metadata.json").read_bytes() == before


def test_a_name_that_is_a_path_names_one_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MMREPLAY_DIR", str(tmp_path))
    home = BufferLocation("alf-../Agent/buffer")
    assert home.path == tmp_path / "alf-..%2FAgent%2Fbuffer-0"
    home.close()


def test_a_buffer_that_is_there_goes_on_with_resume(tmp_path):
    home = BufferLocation("any", tmp_path / "ring", resume=True)
    assert not home.resumed
    filled(home)
    home.close()
    again = BufferLocation("any", tmp_path / "ring", resume=True)
    assert again.resumed
    filled(again, steps=1)
    assert again.buffer.heads.tolist() == [4]
    again.close()


def test_a_buffer_of_other_fields_is_not_resumed(tmp_path):
    home = BufferLocation("any", tmp_path / "ring")
    filled(home)
    home.close()
    again = BufferLocation("any", tmp_path / "ring", resume=True)
    with pytest.raises(SchemaError, match=r"must hold 2 x 10 rows.* got 1 x 10 rows"):
        again.ring(SCHEMA, 10, 2)
    again.close()


def test_without_a_path_buffers_are_numbered_under_the_folder_named(tmp_path, monkeypatch):
    monkeypatch.setenv("MMREPLAY_DIR", str(tmp_path))
    monkeypatch.setattr(location, "_numbers", {})
    found = [BufferLocation("any").path, BufferLocation("any").path, BufferLocation("other").path]
    assert found == [tmp_path / "any-0", tmp_path / "any-1", tmp_path / "other-0"]
    # As another process: it finds what nobody uses any more.
    monkeypatch.setattr(location, "_numbers", {})
    home = BufferLocation("any")
    filled(home)
    home.close()
    monkeypatch.setattr(location, "_numbers", {})
    with pytest.raises(FormatError, match=r"any-0 already holds.*resume=True"):
        BufferLocation("any")
    # What the refusal says is the way out of it, in this process too.
    again = BufferLocation("any", resume=True)
    assert again.resumed
    assert again.path == tmp_path / "any-0"
    assert BufferLocation("any", resume=True).path == tmp_path / "any-1"
    del again
    monkeypatch.setattr(location, "_numbers", {})
    assert BufferLocation("any", fresh=True).path == tmp_path / "any-1"


def process(code, **env):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


MAKING = """
import multiprocessing
from mmreplay import Field, Schema
from mmreplay.adapters.common.location import BufferLocation
from mmreplay.adapters.tmrl.memory import STATS

def make(wait=lambda: None):
    global home
    home = BufferLocation('any', resume=True)
    wait()
    home.ring(Schema({'reward': Field((), 'float32')}), 10).add(reward=1.0)
    print(home.path.name, flush=True)
"""


@pytest.mark.slow
def test_processes_under_one_folder_get_folders_of_their_own(tmp_path):
    code = MAKING + "make(lambda: print('named', flush=True) or input())\ninput()"
    both = [process(code, MMREPLAY_DIR=str(tmp_path)) for _ in range(2)]
    # Each has its name before there is a ring, and until it ends.
    found = []
    for turn in range(2):
        for each in both:
            found.append(each.stdout.readline())
            each.stdin.write("\n")
            if turn == 0:
                each.stdin.flush()
    assert found[:2] == ["named\n"] * 2
    assert sorted(found[2:]) == ["any-0\n", "any-1\n"]
    for each in both:
        assert each.communicate(timeout=60) == ("", "")
    (again, _) = process(MAKING + "make()", MMREPLAY_DIR=str(tmp_path)).communicate()
    assert again == "any-0\n"


def test_a_folder_that_is_made_at_the_same_time_is_used(tmp_path, monkeypatch):
    """Whichever of the folders on the way another process makes just before we do."""
    mkdir, made = Disk.mkdir, []

    def late(self, path):
        mkdir(self, path)
        made.append(path.name)
        mkdir(self, path)  # as if the first one were another process's

    monkeypatch.setattr(Disk, "mkdir", late)
    path = tmp_path / "a" / "b" / "c"
    new_generation.prepare_folder(path)
    assert made == ["a", "b", "c"]
    assert path.is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FailedError, match="File exists"):
        files.make_folder(tmp_path / "file", exist_ok=True)
    with pytest.raises(FailedError, match="File exists"):
        files.make_folder(tmp_path / "new")


@pytest.mark.slow
def test_a_worker_that_ends_takes_its_temporary_folder_along(tmp_path):
    code = MAKING + (
        "worker = multiprocessing.get_context('fork').Process(target=make)\n"
        "worker.start()\nworker.join()\nprint(worker.exitcode)"
    )
    out, err = process(code, TMPDIR=str(tmp_path)).communicate(timeout=60)
    name, code = out.split()
    assert (name[:12], code, err) == ("mmreplay-any", "0", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_a_killed_process_left_goes_with_the_next(tmp_path, monkeypatch):
    monkeypatch.delenv("MMREPLAY_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    killed = process(MAKING + "make()\ninput()", TMPDIR=str(tmp_path))
    name = killed.stdout.readline().strip()
    monkeypatch.setattr(location, "_swept", set())
    BufferLocation("any")
    # It lives.
    assert (tmp_path / name).is_dir()
    killed.kill()
    killed.communicate()
    others = {
        "not-of-ours": None,
        f"mmreplay-any-{killed.pid}-0": None,
        # Nothing says whose it was.
        f"mmreplay-any-{killed.pid}-00000000": None,
        # Of a machine that is not this one, where the number is another process's.
        f"mmreplay-any-{killed.pid}-00000001": {"pid": killed.pid, "host": "far"},
    }
    for each, told in others.items():
        (tmp_path / each).mkdir()
        if told:
            (tmp_path / each / "LOCK").write_text(json.dumps(told))
    (tmp_path / f"mmreplay-any-{killed.pid}-00000002").symlink_to(tmp_path / name)
    BufferLocation("any")
    # Once in a process is enough.
    assert (tmp_path / name).is_dir()
    monkeypatch.setattr(location, "_swept", set())
    lock = WriterLock(tmp_path / name)
    BufferLocation("any")
    assert (tmp_path / name).is_dir()
    lock.release()
    monkeypatch.setattr(location, "_swept", set())
    BufferLocation("any")
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {*others, f"mmreplay-any-{killed.pid}-00000002"}


def test_a_temporary_folder_is_named_and_goes_with_its_owner(tmp_path, monkeypatch):
    monkeypatch.delenv("MMREPLAY_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    home = BufferLocation("any")
    filled(home)
    path = home.path
    assert path.is_relative_to(tmp_path)
    assert path.is_dir()
    assert repr(home) == f"temporary folder, removed at exit: {path}"
    del home
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_is_removed_at_exit(tmp_path):
    code = (
        "from mmreplay import Field, Schema\n"
        "from mmreplay.adapters.common.location import BufferLocation\n"
        "home = BufferLocation('any')\n"
        "buffer = home.ring(Schema({'reward': Field((), 'float32')}), 10)\n"
        "buffer.add(reward=1.0)\n"
        "print(home.path.is_dir())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env={"TMPDIR": str(tmp_path)},
    )
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_pickle_holds_the_path_and_goes_on_with_the_open_buffer(tmp_path):
    home = BufferLocation("any", tmp_path / "ring")
    filled(home)
    data = pickle.dumps(home)
    assert len(data) < 1000
    shared = pickle.loads(data)
    assert shared.reopen() is home.buffer
    home.close()
    again = pickle.loads(data)
    assert len(again.reopen()) == 3
    again.close()


def test_an_open_buffer_is_not_shared_under_other_transforms(tmp_path):
    home = BufferLocation("any", tmp_path / "ring")
    filled(home)
    other = BufferLocation("any", tmp_path / "ring", resume=True)
    with pytest.raises(SchemaError, match="is open in this process with the transf"):
        other.reopen(transforms=[NStep(2, 0.9)])
    home.close()


def test_a_buffer_in_a_temporary_folder_is_not_pickled(tmp_path, monkeypatch):
    monkeypatch.delenv("MMREPLAY_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    home = BufferLocation("any")
    # Nothing is lost of one that holds nothing.
    assert pickle.loads(pickle.dumps(home)).path != home.path
    filled(home)
    with pytest.raises(FormatError, match=r"which is removed at exit\. Pass path=, or set"):
        pickle.dumps(home)
    home.close()


def test_a_pickle_of_a_folder_that_was_moved_is_refused(tmp_path):
    home = BufferLocation("any", tmp_path / "ring")
    filled(home)
    data = pickle.dumps(home)
    home.close()
    (tmp_path / "ring").rename(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="no longer holds the buffer that was pickled"):
        pickle.loads(data)


def of_skrl(path):
    memory = skrl.RandomMemory(8, device="cpu", path=path)
    memory.create_tensor("x", 1)
    for number in range(11):
        memory.add_samples(x=torch.tensor([[float(number)]]))
    return memory


def of_velora(path):
    buffer = velora.ReplayBuffer(8, 1, 1, 1, path=path)
    one = torch.arange(11.0)[:, None]
    buffer.add_multi(one, one, one, one, one > 99, one)
    return buffer


def of_tmrl(path):
    memory = tmrl.GenericTorchMemory(8, 4, path=path, act_buf_len=1)
    rows = [(np.float32([n]), np.float32([n]), float(n), n == 5, False, {}) for n in range(11)]
    stats = dict.fromkeys(STATS, 7.0)
    memory.append(type("Buffer", (), {"__len__": lambda _: 11, "memory": rows} | stats)())
    return memory


DRAWS = {
    of_skrl: lambda memory: memory.sample(["x"], 5)[0][0].tolist(),
    of_velora: lambda buffer: buffer.sample(5).states.tolist(),
    of_tmrl: lambda memory: (memory.sample()[2].tolist(), memory.stat_test_return),
}


@pytest.mark.parametrize("make", DRAWS)
def test_adapters_pickle_as_a_path_and_go_on_drawing(tmp_path, make):
    draw, memory = DRAWS[make], make(tmp_path / "ring")
    draw(memory)
    data = pickle.dumps(memory)
    assert len(data) < 10_000
    length = len(memory)
    assert len(pickle.loads(data)) == length
    drawn = draw(memory)
    memory.home.close()
    again = pickle.loads(data)
    assert (len(again), draw(again)) == (length, drawn)
    again.home.close()


def test_a_buffer_that_another_process_makes_first_is_opened(tmp_path, monkeypatch):
    place, isdir = tmp_path / "names" / "any-0", os.path.isdir

    def late(path):
        told = isdir(path)
        place.mkdir(parents=True, exist_ok=True)
        return told

    monkeypatch.setattr(os.path, "isdir", late)
    new_generation.prepare_folder(place)
    monkeypatch.undo()
    assert place.is_dir()

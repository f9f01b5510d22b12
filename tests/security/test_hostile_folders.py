"""A folder that somebody else made reads and writes nothing outside itself."""

import os
import resource
import shutil
import stat

import google_crc32c
import numpy as np
import pytest

import mmreplay as mr
from mmreplay.errors import FormatError, ReplayError
from mmreplay.verify import verify_buffer
from tests.format.support import fill, schema_of
from tools.torture.forged import bounded

MODES = ("r", "r+")
BOUND_NBYTES = 64 << 20


def sampler():
    return mr.PrioritizedSampler(seed=0, name="prioritized")


@pytest.fixture
def folder(tmp_path):
    """A small buffer with priorities on disk, in a folder of its own."""
    path = tmp_path / "given" / "b"
    with mr.ReplayBuffer.create(
        path, schema_of(), 12, 2, sampler=sampler(), autoreset="disabled"
    ) as buffer:
        fill(buffer, 0, 30)
        buffer.sample(4)
    return path


@pytest.fixture
def victim(tmp_path):
    """Somebody's files, outside."""
    path = tmp_path / "victim"
    path.mkdir()
    (path / "diary").write_text("mine")
    return path


def contents(path):
    return {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def use(path, mode):
    """Do everything that a user may do with what somebody gave them."""
    with mr.ReplayBuffer.open(path, mode, sampler=sampler()) as buffer:
        buffer.gather_all()
        batch = buffer.sample(8)
        buffer.update_priorities(batch, np.ones(8))
        if mode == "r+":
            fill(buffer, 30, 40)
            buffer.resize(8)
            buffer.set_statistics({"mean": 1})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["data-000001", "samplers", "samplers/prioritized"])
def test_a_folder_that_leads_outside_is_refused(folder, victim, name, mode):
    # The victim's folder has the very files that are looked for.
    shutil.copytree(folder / name, victim / "same")
    shutil.rmtree(folder / name)
    (folder / name).symlink_to(victim / "same")
    before = contents(victim)
    with pytest.raises(FormatError, match=r"must be a folder, got a link.*Move the"):
        use(folder, mode)
    assert contents(victim) == before
    if name.startswith("data"):
        assert not verify_buffer(folder).ok


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["LOCK", "metadata.json", "statistics.json"])
def test_a_file_that_leads_outside_is_neither_read_nor_written(folder, victim, name, mode):
    with mr.ReplayBuffer.open(folder, "r+") as buffer:
        buffer.set_statistics({"mean": 2})
    shutil.move(folder / name, victim / "same")
    (folder / name).symlink_to(victim / "same")
    before = contents(victim)
    try:
        use(folder, mode)
    except FormatError as error:
        assert "not a regular file" in str(error)  # noqa: PT017
    assert contents(victim) == before


@pytest.mark.parametrize(
    "name", ["tmp-metadata.json", "tmp-x", "data-000000", "data-000002", "tmp-deep"]
)
def test_what_a_writer_sweeps_or_replaces_is_inside(folder, victim, name):
    if name == "tmp-deep":
        # Deeper than Python calls itself.
        made = folder / name
        for _ in range(1100):
            made.mkdir()
            made = made / "a"
        (folder / name / "link").symlink_to(victim)
    else:
        (folder / name).symlink_to(victim)
    before = contents(victim)
    use(folder, "r+")
    assert contents(victim) == before
    assert not (folder / name / "diary").exists()


def test_a_whole_buffer_may_be_a_link_of_the_users(folder, tmp_path):
    (tmp_path / "short").symlink_to(folder)
    for mode in MODES:
        use(tmp_path / "short", mode)


def forge(folder, **numbers):
    """Change numbers of metadata.json, with a right checksum."""
    path = folder / "metadata.json"
    body = path.read_bytes()[:-23]
    for key, number in numbers.items():
        head, _, tail = body.partition(b'"%s": ' % key.encode())
        body = head + b'"%s": %d' % (key.encode(), number) + tail[tail.index(b",") :]
    path.write_bytes(body + b'"crc32c": "%08x"\n}\n' % google_crc32c.value(body))


@pytest.mark.parametrize("number", [-1, 0, 1 << 31, 1 << 63, 1 << 64, 999_999])
def test_no_generation_names_a_path_elsewhere(folder, number):
    forge(folder, generation=number)
    for mode in MODES:
        with pytest.raises(FormatError, match=r"generation|data-999999.*is missing"):
            use(folder, mode)


@pytest.mark.parametrize("name", ["COMMIT", "flags.bin", "records.bin", "sums.bin"])
def test_a_file_of_a_terabyte_is_refused_without_being_read(folder, name):
    os.truncate(folder / "data-000001" / name, 1 << 40)
    with bounded(BOUND_NBYTES):
        for mode in MODES:
            with pytest.raises(FormatError, match=f"{name} has {1 << 40} bytes"):
                use(folder, mode)
        assert not verify_buffer(folder).ok


def test_a_ring_of_a_terabyte_that_holds_nothing_takes_no_memory(tmp_path):
    """Sparse files that agree with their metadata are opened by what they hold."""
    path = tmp_path / "b"
    fields = {"action": mr.Field((), "int64"), "terminated": mr.Field((), "bool")}
    mr.ReplayBuffer.create(path, mr.Schema(fields), 1 << 37).close()
    assert sum(p.stat().st_size for p in path.rglob("*")) > 1 << 40
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for mode in MODES:
        with mr.ReplayBuffer.open(path, mode) as buffer:
            assert len(buffer) == 0
    assert verify_buffer(path).ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < 64 << 20


HUGE = {
    "large": b" " * (64 << 20),
    "nested": b"[" * 500_000,
    "nested objects": b'{"a":' * 100_000,
    "many keys": b"{" + b",".join(b'"%d": 1' % i for i in range(90_000)) + b"}",
    "many digits": b'{"format": ' + b"9" * 900_000 + b"}",
    "twice": b'{"format": "mmreplay", "format": "mmreplay"}',
    "not finite": b'{"format": NaN}',
}


@pytest.mark.parametrize("name", ["metadata.json", "statistics.json", "LOCK"])
@pytest.mark.parametrize("kind", HUGE)
def test_json_of_any_size_and_depth_is_refused_or_ignored(folder, name, kind):
    (folder / name).write_bytes(HUGE[kind])
    with bounded(256 << 20):
        for mode in MODES:
            try:
                with mr.ReplayBuffer.open(folder, mode) as buffer:
                    assert len(buffer) == 24
                    buffer.statistics  # noqa: B018
            except ReplayError as error:
                assert name in str(error)  # noqa: PT017
        verify_buffer(folder)


@pytest.mark.parametrize("name", ["LOCK", "STATE", "priorities.bin"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link"])
def test_a_pipe_or_device_instead_of_a_samplers_file_never_blocks(folder, victim, name, kind):
    path = folder / "samplers" / "prioritized" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(victim / "diary")
    before = contents(victim)
    with bounded(BOUND_NBYTES):
        for mode in MODES:
            with pytest.raises(FormatError, match=f"{name} is not a regular file"):
                use(folder, mode)
    assert contents(victim) == before


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027, 0o002])
def test_files_are_made_as_the_users_umask_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        with mr.ReplayBuffer.create(
            tmp_path / "b", schema_of(), 12, 2, sampler=sampler(), autoreset="disabled"
        ) as buffer:
            fill(buffer, 0, 30)
            buffer.sample(4)
            buffer.set_statistics({"mean": 1})
            buffer.resize(6)
            buffer.commit()
        for format in ("npz", "pt", "safetensors", "csv", "parquet"):
            target = tmp_path / "out" / f"a.{format}"
            mr.export(tmp_path / "b", target, fields=["action", "terminated"])
    finally:
        os.umask(before)
    made = [p for p in tmp_path.rglob("*") if "out" in p.parts or "b" in p.parts]
    assert len(made) > 12
    for path in made:
        mode = stat.S_IMODE(path.stat().st_mode)
        most = 0o777 if path.is_dir() else 0o666
        assert mode == most & ~umask, path


def test_a_column_of_a_terabyte_of_nothing_is_verified_at_once(folder):
    path = folder / "samplers" / "prioritized" / "priorities.bin"
    os.truncate(path, 1 << 42)
    with path.open("r+b") as file:
        file.seek(1 << 41)
        file.write(np.float32(np.nan).tobytes())
    with bounded(BOUND_NBYTES):
        report = verify_buffer(folder)
    told = [finding.message for finding in report.findings]
    assert any("got 1 others such as nan" in message for message in told)

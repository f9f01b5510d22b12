"""Rules of this repository that no ready-made linter knows.

The disk is written through `mmreplay.disk.files` alone, so that a test can fail, tear
or kill at the n-th call; nothing read from a file is ever executed.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "mmreplay").rglob("*.py"))
DOOR = (ROOT / "mmreplay" / "disk" / "files.py", ROOT / "mmreplay" / "disk" / "calls.py")
# Damages files that it made, and pickles the objects that it checks, as tests do.
TESTING = ROOT / "mmreplay" / "testing"
# Runs others' pickles where the user says so, with stand-ins for what they name.
PICKLES = ROOT / "mmreplay" / "datasets" / "pickles.py"
RUNNING = [path for path in PACKAGE if not path.is_relative_to(TESTING)]

# Names that change the disk, or map it in a way that could.
RAW = {
    *("os.open", "os.fdopen", "os.write", "os.writev", "os.pwrite", "os.pwritev"),
    *("os.sendfile", "os.copy_file_range", "os.splice", "os.truncate", "os.ftruncate"),
    *("os.posix_fallocate", "os.fsync", "os.fdatasync", "os.sync", "os.lockf"),
    *("os.replace", "os.rename", "os.renames", "os.link", "os.symlink", "os.unlink"),
    *("os.remove", "os.rmdir", "os.removedirs", "os.mkdir", "os.makedirs", "os.mknod"),
    *("os.mkfifo", "os.utime", "os.chmod", "os.fchmod", "os.chown", "os.fchown"),
    *("fcntl.flock", "fcntl.lockf", "fcntl.fcntl", "fcntl.ioctl"),
    *("numpy.memmap", "numpy.lib.format.open_memmap", "torch.from_file", "torch.save"),
    *("numpy.save", "numpy.savez", "numpy.savez_compressed", "numpy.savetxt"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copyfileobj"),
    *("shutil.copytree", "shutil.move", "shutil.rmtree", "tempfile"),
}
# Modules and builtins that run what they read.
EXECUTES = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal"),
    *("shelve", "eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
}
PATH_METHODS = {"write_text", "write_bytes", "touch", "tofile", "symlink_to"}
# These are also methods of the door's own object, `disk`.
DISK_METHODS = {"mkdir", "unlink", "rename", "rmdir", "hardlink_to"}
MODE = re.compile(r"[rwaxbtU+]{1,4}")


def imported(nodes: list[ast.AST]) -> dict[str, str]:
    """What each name that an import binds stands for, dotted."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    names[alias.asname] = alias.name
                else:
                    root = alias.name.partition(".")[0]
                    names[root] = root
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """The dotted name of an expression with imports resolved, or nothing."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = dotted(node.value, names)
        return f"{base}.{node.attr}" if base else ""
    return ""


def listed(name: str, forbidden: set[str]) -> bool:
    """Whether a dotted name is forbidden, itself or by one that holds it."""
    return any(f"{name}.".startswith(f"{bad}.") for bad in forbidden)


def mode_writes(mode: ast.expr | None) -> bool:
    """Whether a mode may write; one that is not a literal may."""
    if mode is None:
        return False
    if not isinstance(mode, ast.Constant):
        return True
    return bool(set(str(mode.value)) & set("wax+"))


def opens_for_writing(call: ast.Call, names: dict[str, str]) -> bool:
    """Whether a call is `open` or `Path.open` with a mode that writes."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    name = dotted(call.func, names)
    if name in ("open", "io.open", "gzip.open", "bz2.open", "lzma.open"):
        mode = call.args[1] if len(call.args) > 1 else keywords.get("mode")
        return mode_writes(mode)
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "open"):
        return False
    # Path.open takes its mode first; ReplayBuffer.open takes a path first.
    mode = call.args[0] if call.args else keywords.get("mode")
    literal = isinstance(mode, ast.Constant) and isinstance(mode.value, str)
    return literal and bool(MODE.fullmatch(mode.value)) and mode_writes(mode)


def bad_call(call: ast.Call, names: dict[str, str]) -> str:
    """What is wrong with a call, or nothing."""
    if opens_for_writing(call, names):
        return "open for writing"
    # The type itself is what annotations name.
    if dotted(call.func, names) == "mmap.mmap":
        return "mmap.mmap"
    for keyword in call.keywords:
        if keyword.arg == "allow_pickle" and not (
            isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        ):
            return "allow_pickle"
    if isinstance(call.func, ast.Attribute):
        receiver = dotted(call.func.value, names).rpartition(".")[2]
        if call.func.attr in PATH_METHODS:
            return call.func.attr
        if call.func.attr in DISK_METHODS and receiver not in ("disk", "_disk"):
            return call.func.attr
    return ""


def offences(source: str, forbidden: set[str]) -> list[tuple[int, str]]:
    """Line and name of every use of a forbidden name, called or not."""
    words = {name.rpartition(".")[2] for name in forbidden}
    if not any(word in source for word in words):
        return []
    return uses([*ast.walk(ast.parse(source))], forbidden)


def uses(nodes: list[ast.AST], forbidden: set[str]) -> list[tuple[int, str]]:
    """Line and name of every use of a forbidden name among the nodes of a source."""
    names = imported(nodes)
    words = {name.rpartition(".")[2] for name in forbidden}
    # What cannot stand for one of them is not looked at: most of a source.
    words |= {alias for alias, name in names.items() if listed(name, forbidden)}
    found = set()
    for node in nodes:
        if not isinstance(node, ast.Name | ast.Attribute):
            continue
        if (node.id if isinstance(node, ast.Name) else node.attr) not in words:
            continue
        name = dotted(node, names)
        if listed(name, forbidden):
            found.add((node.lineno, name))
    return sorted(found)


def disk_offences(source: str) -> list[tuple[int, str]]:
    """Line and name of everything that goes to the disk past `files`."""
    nodes = [*ast.walk(ast.parse(source))]
    names = imported(nodes)
    calls = (node for node in nodes if isinstance(node, ast.Call))
    bad = {(call.lineno, bad_call(call, names)) for call in calls}
    return sorted({*uses(nodes, RAW), *(item for item in bad if item[1])})


def test_the_files_that_rules_name_exist():
    assert {*DOOR, PICKLES} <= {*PACKAGE}


def test_the_disk_is_written_through_files_alone():
    found = {p: disk_offences(p.read_text()) for p in RUNNING if p not in DOOR}
    assert {path: each for path, each in found.items() if each} == {}


def test_nothing_that_is_read_is_executed():
    found = {p: offences(p.read_text(), EXECUTES) for p in RUNNING if p != PICKLES}
    assert {path: each for path, each in found.items() if each} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.pwrite(3, b'', 0)",
        "import os as o\nsync = o.fdatasync",
        "from os import replace as swap\nswap('a', 'b')",
        "import fcntl\nfcntl.flock(3, 2)",
        "import numpy as np\nnp.memmap('a')",
        "import torch\ntorch.from_file('a')",
        "from mmap import mmap\nmmap(3, 0)",
        "import shutil\nshutil.rmtree('a')",
        "open('a', 'wb')",
        "open('a', mode='r+')",
        "open('a', mode)",
        "path.open('a')",
        "path.open(mode='x')",
        "path.write_text('a')",
        "(path / 'a').mkdir()",
        "path.unlink()",
        "import numpy\nnumpy.load('a', allow_pickle=True)",
        "np.load('a', allow_pickle=flag)",
    ],
)
def test_a_way_round_files_is_noticed(source):
    assert disk_offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "open('a')",
        "open('a', 'rb')",
        "path.open('rb')",
        "ReplayBuffer.open('runs/a', mode='r+')",
        "ReplayBuffer.open('runs/a', 'r+')",
        "from mmreplay.disk.files import disk\ndisk.mkdir('a')",
        "from mmreplay import files\nfiles.disk.rename('a', 'b')",
        "name.replace('a', 'b')",
        "import shutil\nshutil.disk_usage('a')",
        "import os\nos.fstat(3)",
        "np.load('a', allow_pickle=False)",
        "figure.savefig('a.png')",
        "import mmap\ndef f(mapping: mmap.mmap) -> None: ...",
    ],
)
def test_reading_and_the_door_itself_are_no_offence(source):
    assert disk_offences(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "from pickle import loads as read\nread(b'')",
        "import yaml\nyaml.load('a')",
        "eval('1')",
        "import marshal as m\nm.loads(b'')",
    ],
)
def test_a_way_to_execute_data_is_noticed(source):
    assert offences(source, EXECUTES)


@pytest.mark.parametrize("source", ["model.eval()", "import re\nre.compile('a')"])
def test_methods_that_share_a_name_are_no_offence(source):
    assert offences(source, EXECUTES) == []

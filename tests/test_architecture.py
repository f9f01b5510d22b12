"""What docs/architecture.md says of the code is so: names, order, lines and layers."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import mmreplay as mr
from mmreplay import kernels
from mmreplay.disk.files import KEEPS_SPACE, file_system
from tools.journeys import NESTED, step_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mmreplay"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FIGURES = ("write-path.svg", "read-path.svg")
FILE = r"`([\w/]+\.(?:py|c|h))`"


def section(title):
    """The text under a heading, up to the next one."""
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]


def rows(text, *columns):
    """Cells of each row of the tables that begin with these columns."""
    head = "| " + " | ".join(columns)
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        first, _, *lines = table.splitlines()
        if first.startswith(head):
            found += [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return found


@cache
def definitions(name):
    """Source of every function, class and variable of a file, by qualified name."""
    path = PACKAGE / name
    text = path.read_text()
    if path.suffix != ".py":
        return dict.fromkeys(re.findall(r"^(\w+)\(", text, re.M), text)
    found, lines = {}, text.splitlines()

    def look(node, prefix):
        for child in node.body:
            source = "\n".join(lines[child.lineno - 1 : child.end_lineno])
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[prefix + child.name] = source
                if isinstance(child, ast.ClassDef):
                    look(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else []
                targets = targets or [child.target]
                for target in (name for each in targets for name in ast.walk(each)):
                    if isinstance(target, ast.Name):
                        found[prefix + target.id] = source

    look(ast.parse(text), "")
    return found


@pytest.mark.parametrize("title", ["Write path", "Read path"])
def test_each_call_of_a_path_is_in_the_file_that_the_table_names(title):
    steps = rows(section(title), "stage", "call", "file")
    assert len(steps) > 10
    for _, call, file, _ in steps:
        assert call.strip("`") in definitions(file.strip("`")), call


@pytest.mark.parametrize("sentence", re.findall(r"`[^`\n]+` \(`[^)]*\)", PAGE))
def test_a_name_next_to_a_file_is_defined_there(sentence):
    name = re.match(r"`([^`]+)`", sentence)[1]
    file = re.search(FILE, sentence)
    if file is None or not re.fullmatch(r"[\w.]+", name) or name.endswith(".py"):
        pytest.skip("it names no function or class")
    assert name in definitions(file[1]), sentence


@pytest.mark.slow
def test_names_without_a_file_are_defined_somewhere():
    known = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in definitions(path.relative_to(PACKAGE).as_posix())
    }
    # Attributes that `__init__` sets are no definitions.
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    attributes = set(re.findall(r"\bself\.(\w+)", source))
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE))
    assert len(named) > 30
    for name in named:
        owner, attribute = name.split(".")
        assert owner in known, name
        assert name in known or attribute in attributes, name


def threads_made():
    """Name and work of each thread that the package starts, as (name, function).

    The thread within `Worker` is left out: each `Worker` is listed.
    """
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            made = ast.unparse(node.func)
            named = {each.arg: each.value for each in node.keywords}
            if made == "threading.Thread":
                name, work = named["name"], named["target"]
            elif made == "Worker":
                name, work = node.args
            else:
                continue
            if isinstance(work, ast.Call):
                assert ast.unparse(work.func) == "partial"
                work = work.args[0]
            if path.name != "process.py":
                found.append((name.value, ast.unparse(work).split(".")[-1]))
    return found


@pytest.mark.slow
def test_each_thread_has_a_row():
    threads = rows(section("Threads and locks"), "thread", "runs")[1:]
    shown = [
        (name.strip("`"), re.match(r"`(?:\w+\.)?(\w+)`", work)[1]) for name, work, _ in threads
    ]
    made = threads_made()
    assert len(made) >= 9
    assert sorted(shown) == sorted(made)


def called(call):
    """Qualified names of the package's functions that a call runs, in order."""
    names = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            names.append(frame.f_code.co_qualname)

    former = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(former)
    return names


def assert_in_order(named, names):
    """Each named call runs, after the one that is named before it."""
    rest = iter(names)
    for name in named:
        assert name in rest, f"{name} does not run, or runs earlier: {names}"


@pytest.fixture
def buffer(tmp_path):
    """A ring that wrapped, whose steps have an image; commits are made by hand."""
    sampler = mr.UniformSampler(seed=0)
    with mr.ReplayBuffer.create(
        tmp_path / "ring", NESTED, 64, commit_every=None, sampler=sampler
    ) as buffer:
        for _ in range(200):
            buffer.add(step_of(NESTED))
        yield buffer


def test_an_add_and_a_commit_run_the_write_path_in_its_order(buffer):
    named = [call.strip("`") for _, call, *_ in rows(section("Write path"), "stage", "call")]
    first = named.index("Committer.commit")
    for _ in range(buffer.slots):
        names = called(lambda: buffer.add(step_of(NESTED)))
        if "Appender._raise_limits" in names:
            break
    assert_in_order(named[:first], names)
    assert_in_order(named[first:], called(buffer.commit))


def test_a_draw_runs_the_read_path_in_its_order(buffer):
    buffer.sample(8)
    buffer.add(step_of(NESTED))
    named = [call.strip("`") for _, call, *_ in rows(section("Read path"), "stage", "call")]
    assert_in_order(named, called(lambda: buffer.sample(8)))


@pytest.mark.parametrize("title", ["After a kill", "After a power cut"])
def test_a_line_that_makes_a_crash_harmless_is_in_its_function(title):
    lines = [cells[2:4] for cells in rows(section(title), "killed")]
    lines += [cells[2:4] for cells in rows(section(title), "what")]
    quoted = [(line, place) for line, place in lines if line.startswith("`")]
    assert len(quoted) >= 5
    for line, place in quoted:
        name, file = re.fullmatch(r"`([\w.]+)`, " + FILE, place).groups()
        assert line.strip("`") in definitions(file)[name], line


@pytest.mark.parametrize("figure", FIGURES)
def test_each_function_of_a_figure_is_named_in_the_text(figure):
    assert f"](figures/{figure})" in PAGE
    text = (ROOT / "docs" / "figures" / figure).read_text()
    texts = re.findall(r'<text class="call"[^>]*>([^<]+)', text)
    joined = re.sub(r"\n\s+\.", ".", "\n".join(texts))
    names = re.findall(r"^[A-Z]\w+\.\w+$", joined, re.M)
    assert len(names) >= 8
    for name in names:
        assert f"`{name}`" in PAGE, name
    # The site and GitHub show it without a network.
    assert not re.search(r"href|url\((?!#)|@import", text)


def test_the_layers_are_those_of_the_import_contract():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {each["id"]: each for each in project["tool"]["importlinter"]["contracts"]}
    (block,) = re.findall(r"^```\n(.*?)^```", section("Layers"), re.M | re.S)
    shown = [line.split(", ") for line in block.splitlines()]
    assert shown == [re.findall(r"\w+", layer) for layer in contracts["layers"]["layers"]]


def journeys_shown():
    """The quoted table, line by line."""
    quoted = re.search(r"<!-- journeys:begin -->\n\n(.*?)\n\n<!-- journeys:end -->", PAGE, re.S)
    return quoted[1].splitlines()


def test_the_table_of_journeys_has_a_number_of_files_for_each():
    head, rule, *lines = journeys_shown()
    assert (head, rule) == ("| journey | files |", "|---|---:|")
    assert len(lines) == 17
    for line in lines:
        assert re.fullmatch(r"\| [\w ,:'+-]+ \| \d+ \|", line), line


@pytest.mark.slow
def test_the_table_of_journeys_is_what_the_tool_prints(tmp_path):
    pytest.importorskip("pyarrow")
    # Without C, and where pages do not keep their space, more of the work is Python.
    if kernels.missing() or kernels.choice() == "numpy":
        pytest.skip("the page counts with the kernels in C")
    if file_system(tmp_path) not in KEEPS_SPACE:
        pytest.skip("the page counts on ext4 or tmpfs")
    done = subprocess.run(
        [sys.executable, "-m", "tools.journeys", "--markdown"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
    )
    assert done.stdout.splitlines() == journeys_shown()

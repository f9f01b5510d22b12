"""What the README and the pages under docs/ tell to type works when it is typed.

Figures and paths that pages print differ from run to run; that each command ends as its
page shows, and that each block runs, does not.
"""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import mmreplay as mr
from mmreplay.cli.exits import run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MANY_STEPS = re.compile(r"--steps [0-9e]{5,}")


def blocks(page, language):
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def typed(line):
    """Arguments of a command line, of few steps; nobody is there to be asked."""
    words = shlex.split(MANY_STEPS.sub("--steps 300", line), comments=True)
    assert words.pop(0) == "mmreplay"
    return [*words, "--yes"] if words[0] in ("resize", "clear") else words


def test_the_blocks_of_the_readme_run_one_after_another(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    names = {}
    found = blocks(PAGES[0], "python")
    for block in found:
        exec(compile(block, "README.md", "exec"), names)
        if "batch" in names:
            names.setdefault("first batch", names["batch"])
    # What was said of the shapes, where it was said.
    assert len(found) == 9
    assert names["first batch"]["observation"].shape == (256, 4)
    assert names["first batch"]["next_observation"].dtype == "float32"
    assert names["tensors"]["observation"].shape == (256, 4)
    batch = next(iter(names["loader"]))
    assert batch["observation"].shape == (256, 4)
    with mr.ReplayBuffer.open("runs/again") as again:
        assert len(again) == len(names["buffer"])
    # Closed here, or its workers would be told of later, by another test.
    del batch, names["loader"]


@pytest.mark.slow
def test_the_command_lines_of_the_readme_work_in_order(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ale_py")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    page = PAGES[0].read_text()
    lines = re.findall(r"^mmreplay .*$", page, re.M)
    assert len(lines) == 14
    for line in lines:
        code = run(typed(line))
        assert code == 0, f"{line}: {capsys.readouterr().err}"
        capsys.readouterr()
    with mr.ReplayBuffer.open("runs/pong") as buffer:
        assert (buffer.capacity, len(buffer)) == (2_000_000, 0)


@pytest.mark.slow
def test_the_commands_of_the_cli_page_end_as_it_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ale_py")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    done = 0
    for block in blocks(ROOT / "docs" / "cli.md", "console"):
        for session in re.split(r"^\$ ", block, flags=re.M)[1:]:
            line, _, shown = session.partition("\n")
            words = shlex.split(line.partition(" | ")[0], comments=True)
            if words[0] == "cp":
                shell = line.partition("; mmreplay ")[0]
                subprocess.run(["bash", "-c", shell], check=True)
            if words[0] != "mmreplay":
                continue
            code = run(words[1:])
            told = capsys.readouterr().err
            refused = shown.startswith("mmreplay: ")
            assert (code != 0) == refused, f"{line}: exit {code}, {told}"
            done += 1
    assert done > 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_is_python_and_its_names_are_there(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
        for name in set(re.findall(r"\bmr\.(\w+)", block)):
            assert hasattr(mr, name), f"mr.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    for name in set(re.findall(r"-m (tools\.[\w.]+\w)", text)):
        assert importlib.util.find_spec(name), name
    for name in set(re.findall(r"`((?:tests|tools|docs)/[\w/]+(?:\.\w+)?)`", text)):
        assert (ROOT / name).exists(), name
    for link in set(re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)):
        assert (page.parent / link).exists(), link

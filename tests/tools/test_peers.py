"""The groups of libraries that tests run beside: pinned, shown, and whole."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import peers

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_groups():
    # python -m tools.peers --table prints it again.
    assert peers.table() in (ROOT / "docs/peers.md").read_text()


@pytest.mark.parametrize("name", peers.GROUPS)
def test_every_library_is_pinned(name):
    for arguments in peers.GROUPS[name].installs:
        words = shlex.split(arguments.removeprefix(peers.PINNED))
        named = [word for word in words if word != "--no-deps"]
        assert named
        assert [w for w in named if not re.fullmatch(r"[\w\[\].-]+==[\w.]+", w)] == []


def test_every_test_of_a_library_is_in_a_group():
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.peer\b", path.read_text()) and path.parent.name != "bench"
    ]
    named = {ROOT / test for group in peers.GROUPS.values() for test in group.tests}
    assert [path for path in named if not path.exists()] == []
    assert marked
    assert [path for path in marked if not {path, path.parent} & named] == []


def test_a_group_is_made_and_run_by_its_name_and_an_unknown_one_is_refused():
    said = subprocess.run(
        [sys.executable, "-m", "tools.peers", "sklr"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 2
    assert "no group 'sklr'. Name one of skrl, sb3, velora" in said.stderr


def test_an_environment_is_made_once_and_again_when_a_version_changes(tmp_path, monkeypatch):
    """Of the commands only the names are looked at: none is run."""
    ran = []
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "run", lambda command: ran.append(command) or 0)
    monkeypatch.setattr(peers.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\n")
    assert peers.install("skrl")
    assert [command[-1] for command in ran] == ["wheel", ".[dev]", "skrl==2.1.1"]
    assert peers.install("skrl")
    assert len(ran) == 3
    (tmp_path / "constraints.txt").write_text("numpy==2.4.7\n")
    monkeypatch.setattr(peers.venv, "create", lambda folder, **_: None)
    assert peers.install("skrl")
    assert len(ran) == 6


@pytest.mark.parametrize(("fails", "said"), [("pip", "not installed"), ("pytest", "tests failed")])
def test_a_group_that_fails_is_named_and_the_others_run(tmp_path, monkeypatch, capsys, fails, said):
    def run(command):
        for word in command:
            if word.startswith("--junitxml="):
                Path(word.removeprefix("--junitxml=")).write_text("<testsuites/>")
        return int("peers-sb3" in command[0] and command[2] == fails)

    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(peers.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    monkeypatch.setattr(sys, "argv", ["peers", "sb3", "tmrl"])
    (tmp_path / "constraints.txt").write_text("")
    assert peers.main() == 1
    assert capsys.readouterr().out == f"sb3: {said}\ntmrl: passed\n"


@pytest.mark.parametrize(
    ("reason", "without"),
    [
        ("stable-baselines3 is not installed", {"stable_baselines3"}),
        ("jax, which Minari records with, is missing", {"jax"}),
        ("could not import 'minari.data': No module named 'minari'", {"minari"}),
        ("lerobot is not installed", set()),
        ("ray, which minari imports, is missing", set()),
        ("needs a file system that counts inodes", set()),
    ],
)
def test_a_group_fails_where_tests_are_skipped_without_a_library_of_it(
    tmp_path, monkeypatch, capsys, reason, without
):
    def run(command):
        for word in command:
            if word.startswith("--junitxml="):
                suites = ElementTree.Element("testsuites")
                case = ElementTree.SubElement(suites, "testcase")
                ElementTree.SubElement(case, "skipped", message=reason)
                path = word.removeprefix("--junitxml=")
                ElementTree.ElementTree(suites).write(path)
        return 0

    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(peers.venv, "create", lambda folder, **_: folder.mkdir(parents=True))
    monkeypatch.setattr(sys, "argv", ["peers", "datasets"])
    (tmp_path / "constraints.txt").write_text("")
    assert peers.main() == int(bool(without))
    said = f"tests skipped without {', '.join(without)}" if without else "passed"
    assert capsys.readouterr().out == f"datasets: {said}\n"

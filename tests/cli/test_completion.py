"""Shells complete commands, options and choices, and leave paths to themselves."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = """
eval "$(mmreplay --show-completion bash)"
declare -F _mmreplay_completion >/dev/null || exit 9
complete -p mmreplay
words=("$@")
COMP_WORDS=(mmreplay "${words[@]}") COMP_CWORD=$#
COMP_LINE="${COMP_WORDS[*]}" COMP_POINT=${#COMP_LINE}
_mmreplay_completion mmreplay "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def on_path(tmp_path_factory):
    """Environment in which `mmreplay` is this Python's."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "mmreplay"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m mmreplay "$@"\n')
    script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        # Or --show-completion takes no shell's name.
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }


def completed(env, *words):
    """What bash offers for the last of some words."""
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env=env,
    )
    assert (done.returncode, done.stderr) == (0, "")
    spec, *found = done.stdout.splitlines()
    # Where nothing is offered, bash completes the names of files.
    assert spec == "complete -o default -F _mmreplay_completion mmreplay"
    return [word for word in found if word]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["re"], ["record", "repair", "resize"]),
        (["plot", "--out"], ["--output"]),
        (["record", "E", "x", "--engine", "z"], ["zarr"]),
        (["record", "E", "x", "--on-resume", ""], ["break", "truncate", "continue"]),
        (["compact", "x", "y", "--codec", "r"], ["raw"]),
        (["info", "ru"], []),
        (["plot", "x", "--output", "ru"], []),
        (["load", "ru"], []),
        (["nonsense", "ru"], []),
    ],
)
def test_bash_completes(on_path, words, offered):
    assert sorted(completed(on_path, *words)) == sorted(offered)


def test_bash_completes_commands(on_path):
    assert sorted(completed(on_path, "s")) == ["snapshot", "stats"]


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("zsh", "#compdef mmreplay"),
        ("fish", "complete --command mmreplay"),
        ("bash", "_mmreplay_completion() {"),
    ],
)
def test_the_script_is_of_the_shell_that_is_named(cli, shell, line):
    code, out, err = cli("--show-completion", shell)
    assert (code, err) == (0, "")
    assert out.startswith(line)


def test_a_shell_without_a_script_is_refused(cli):
    code, _, err = cli("--show-completion", "csh")
    assert code == 2
    assert "must be one of bash, zsh" in err

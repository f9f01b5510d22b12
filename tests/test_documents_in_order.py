"""A newcomer types every block of the README and the pages, in one folder, in order.

Each page is one session of Python, whose names its later blocks see; the command lines
of a page come after them. What needs a package that is missing is skipped by name.
"""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

import mmreplay as mr
from tests.convert.test_recipes import record
from tests.test_documents import MANY_STEPS, ROOT, blocks, example_files

NAVIGATION = re.findall(
    r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2], re.M
)
# Runs on Ray have an environment of their own, where tests/on_ray runs their page.
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in NAVIGATION if name != "ray.md")]
__all__ = ["example_files"]
SESSION = """
import json, sys
names = {"__name__": "__main__"}
for name, block in json.load(open(sys.argv[1])):
    exec(compile(block, name, "exec"), names)
"""
# A server, which ends by Ctrl-C, and what takes an hour or a clone of the project.
NO_COMMANDS = {"view.md", "benchmarks.md", "install.md", "peers.md"}
AGAIN = {"runs/robot"}
"""Targets that are there already: their page opens them before it makes them."""
EXTRAS = {"ALE/": "ale_py", "mmreplay plot": "matplotlib", "mmreplay view": "starlette"}


def missing(block):
    """Modules that a block of Python imports and that are not there."""
    found = set(re.findall(r"^(?:import|from) (\w+)", block, re.M))
    return sorted(name for name in found if importlib.util.find_spec(name) is None)


def test_the_pages_of_the_navigation_are_all_there():
    assert len(PAGES) > 20
    assert PAGES[1].name == "index.md"
    with_blocks = [
        page
        for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/migrating/*.md")]
        if blocks(page, "python") and page.name != "ray.md"
    ]
    assert set(with_blocks) <= set(PAGES)


def run_blocks(page, folder, environment):
    """Run the blocks of a page in one session; why some are skipped."""
    session, skipped = [], []
    for number, block in enumerate(blocks(page, "python")):
        lacking = missing(block)
        if lacking:
            skipped.append(f"{page.name} block {number} needs {', '.join(lacking)}")
        else:
            session.append((f"{page.name} block {number}", block))
        if file := re.match(r"# (\w+\.py)\n", block):
            (folder / file[1]).write_text(block)
    if not session:
        return skipped
    path = folder.parent / "session.json"
    path.write_text(json.dumps(session))
    done = subprocess.run(
        [sys.executable, "-c", SESSION, str(path)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{page.name}: {done.stderr}"
    return skipped


def command_lines(page):
    """Command lines of a page, as typed, and whether each is refused, as it shows."""
    for block in blocks(page, "sh"):
        yield from ((line, False) for line in block.splitlines())
    for block in blocks(page, "console"):
        for session in re.split(r"^\$ ", block, flags=re.M)[1:]:
            line, _, shown = session.partition("\n")
            yield line, re.search(r"^\(exit code [1-9]\)$", shown, re.M) is not None


def run_command(line, refused, folder, environment):
    """Run one command line; the reason where it is skipped."""
    for part, module in EXTRAS.items():
        if part in line and importlib.util.find_spec(module) is None:
            return f"{line} needs {module}"
    typed = MANY_STEPS.sub("--steps 300", line)
    words = shlex.split(typed, comments=True)
    if words[0] == "mmreplay" and words[1] == "view":
        # Until Ctrl-C; tests/test_documents.py ends it so.
        return None
    if words[:2] == ["mmreplay", "convert"] and AGAIN & {*words}:
        typed += " --overwrite"
    if words[:2] in (["mmreplay", "resize"], ["mmreplay", "clear"]) and not refused:
        # Nobody is there to be asked.
        typed = typed.partition("#")[0] + (" --yes" if "--yes" not in words else "")
    command = f'mmreplay() {{ {sys.executable} -m mmreplay "$@"; }}; {typed}'
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == refused, f"{line}: {done.stdout}{done.stderr}"
    return None


def bring_recordings(example_files, folder):
    """What the pages do not make: recordings of a robot and of several actors."""
    for name in ("runs/raw", "runs/robot", "my_set"):
        shutil.copytree(example_files / name, folder / name)
    for seed in range(4):
        record(folder / "actors" / str(seed), seed, 10)
    mr.export(folder / "actors" / "2", folder / "night.parquet")


@pytest.mark.slow
def test_all_blocks_run_as_typed_in_the_order_of_the_pages(example_files, tmp_path, subtests):
    folder = tmp_path / "home"
    folder.mkdir()
    bring_recordings(example_files, folder)
    kept = {name: os.environ[name] for name in os.environ if "TORCH" not in name}
    environment = {**kept, "PYTHONPATH": str(ROOT), "HOME": str(folder)}
    skipped, num_blocks = [], 0
    for page in PAGES:
        num_blocks += len(blocks(page, "python"))
        with subtests.test(page=page.name):
            skipped += run_blocks(page, folder, environment)
        if page.name in NO_COMMANDS:
            continue
        for line, refused in command_lines(page):
            if not line.startswith((".venv/bin/python", "make ")):
                with subtests.test(line=line):
                    reason = run_command(line, refused, folder, environment)
                    skipped += [] if reason is None else [reason]
    assert num_blocks > 30
    for reason in skipped:
        with subtests.test(skipped=reason):
            pytest.skip(reason)

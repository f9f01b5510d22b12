"""What README, CONTRIBUTING and the pages under docs/ tell to type works.

Figures and paths that pages print differ from run to run; that each command ends as its
page shows, and that each block runs, does not.
"""

import contextlib
import importlib.util
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli.run import run

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.glob("*.md")),
]
MANY_STEPS = re.compile(r"--steps [0-9e]{5,}")


def blocks(page, language):
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def typed(line):
    """Arguments of a command line, of few steps; nobody is there to be asked."""
    words = shlex.split(MANY_STEPS.sub("--steps 300", line), comments=True)
    assert words.pop(0) == "mmreplay"
    return [*words, "--yes"] if words[0] in ("resize", "clear") else words


def test_the_table_of_extras_has_those_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"]
    table = (DOCS / "install.md").read_text().partition("## Extras\n")[2]
    rows = {}
    for line in re.findall(r"^\| (`.*) \|$", table.partition("\n## ")[0], re.M):
        names, adds, _ = line.split(" | ")
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", names), adds)
    assert rows.keys() == extras.keys()
    own = next(each for each in extras["dev"] if each.startswith("mmreplay["))
    assert re.findall(r"`(\w+)`", rows["dev"]) == re.findall(r"\w+", own)[1:]


def test_the_readme_is_short_and_its_quick_start_fits_on_a_screen():
    (block,) = blocks(PAGES[0], "python")
    assert sum(1 for line in block.splitlines() if line.strip()) <= 15
    assert len(PAGES[0].read_text().splitlines()) < 120


def test_the_quick_start_of_the_readme_draws_what_it_wrote(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(blocks(PAGES[0], "python")[0], "README.md", "exec"), names)
    assert names["batch"]["observation"].shape == (256, 4)
    assert names["batch"]["next_observation"].dtype == "float32"
    # 16,000 rows in a ring of 10,000 each.
    assert len(names["reader"]) > 15_000


def test_the_readme_and_the_page_that_it_leads_to_share_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    for page in (PAGES[0], DOCS / "writing.md"):
        names = {}
        exec(compile(blocks(page, "python")[0], page.name, "exec"), names)
        names["buffer"].close()


def test_the_page_of_the_limiter_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = blocks(DOCS / "rate-limiter.md", "python")[-1]
    exec(compile(block, "rate-limiter.md", "exec"), {})
    said = re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
    assert capsys.readouterr().out.splitlines() == said == ["4.0"]


def test_the_blocks_of_writing_and_reading_run_one_after_another(tmp_path, monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    names = {}
    found = [
        (page, block)
        for page in ("writing.md", "reading.md")
        for block in blocks(DOCS / page, "python")
    ]
    for page, block in found:
        exec(compile(block, page, "exec"), names)
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


def listed_commands():
    """The command lines at the head of the page on the command line, in order."""
    (block,) = blocks(DOCS / "cli.md", "sh")
    return block.splitlines()


@pytest.mark.slow
def test_the_listed_command_lines_work_in_order(tmp_path, monkeypatch, capsys):
    pytest.importorskip("ale_py")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    # The page is served until Ctrl-C: a test below runs that command alone.
    lines = [line for line in listed_commands() if typed(line)[0] != "view"]
    assert len(lines) == 13
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


def converting_commands():
    """Commands of the table of conversions whose source the tests have."""
    lines = re.findall(r"\| `(mmreplay convert [^`]+)` \|", (DOCS / "convert.md").read_text())
    there = re.compile(r"mmreplay convert (runs/(pong|cart|mine)|pong\.\w+|theirs\.npz) ")
    return [line for line in lines if there.match(line)]


@pytest.mark.slow
def test_the_table_of_conversions_converts(example_files, tmp_path, monkeypatch, capsys):
    pytest.importorskip("h5py")
    shutil.copytree(example_files, tmp_path, dirs_exist_ok=True)
    shutil.copytree(tmp_path / "runs" / "cart", tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    lines = converting_commands()
    assert len(lines) >= 12
    for line in lines:
        command = [*typed(line), "--overwrite"]
        assert run(command) == 0, f"{line}: {capsys.readouterr().err}"
        if line.endswith("runs/again"):
            with (
                mr.ReplayBuffer.open("runs/pong") as source,
                mr.ReplayBuffer.open("runs/again") as again,
            ):
                for path, rows in source.gather_all().items():
                    np.testing.assert_array_equal(rows, again.gather_all()[path])


class Enough(Exception):
    """Ends a training loop that has no end of its own."""


class Learner:
    """What a page calls `learn`: the reader's own update of a network."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls > 3:
            raise Enough
        batch = args[0]
        return np.ones(len(batch))


def filled(path, observation, num_envs=2, count=200, capacity=400):
    """A buffer with the fields that a page's buffer has, of random values."""
    rng = np.random.default_rng(0)
    schema = mr.Schema(
        {
            "observation": observation,
            "action": mr.Field((), "int64"),
            "reward": mr.Field((), "float32"),
            "terminated": mr.Field((), "bool"),
            "truncated": mr.Field((), "bool"),
        }
    )
    with mr.ReplayBuffer.create(path, schema, capacity, num_envs, autoreset="next_step") as buffer:
        shape = count, num_envs
        ends = np.zeros(shape, bool)
        ends[9::10] = True
        fields = {
            path: rng.integers(0, 2, (*shape, *field.shape)).astype(field.dtype)
            for path, field in schema.fields.items()
        }
        buffer.extend(fields | {"terminated": ends, "truncated": ends & False})


@pytest.fixture(scope="module")
def example_files(tmp_path_factory):
    """The files that pages speak of, small ones."""
    folder = tmp_path_factory.mktemp("pages")
    pixels = mr.Field((84, 84), "uint8")
    filled(folder / "runs" / "pong", pixels)
    filled(folder / "runs" / "cartpole", mr.Field((4,), "float32"), num_envs=8)
    filled(folder / "runs" / "pixels", pixels)
    nested = {"pixels": pixels, "joints": mr.Field((7,), "float32")}
    filled(folder / "runs" / "arm", nested)
    filled(folder / "runs" / "quick-start", mr.Field((4,), "float32"), num_envs=8)
    filled(
        folder / "runs" / "cart", mr.Field((4,), "float32"), num_envs=4, count=5000, capacity=3000
    )
    filled(folder / "runs" / "damaged", mr.Field((4,), "float32"), count=1000, capacity=3000)
    with (folder / "runs/damaged/data-000001/records.bin").open("r+b") as file:
        file.seek(1000)
        file.write(b"\x7f")
    np.savez(folder / "theirs.npz", x=np.arange(9.0), reward=np.ones(9, np.float32))
    cameras = {"top": mr.Field((48, 64, 3), "uint8"), "wrist": mr.Field((48, 64, 3), "uint8")}
    schema = {
        "observation": {"images": cameras, "state": mr.Field((7,), "float32")},
        "action": mr.Field((7,), "float32"),
        "terminated": mr.Field((), "bool"),
    }
    made = folder / "runs" / "camera"
    with mr.ReplayBuffer.create(made, mr.Schema(schema), 200) as buffer:
        for step in range(120):
            frame = np.full((48, 64, 3), step, np.uint8)
            observation = {"images": {"top": frame, "wrist": frame}, "state": np.zeros(7)}
            buffer.add(observation=observation, action=np.zeros(7), terminated=step % 60 == 59)
    casts = {f"observation/images/{name}": "jpeg" for name in cameras}
    mr.load(made, folder / "runs" / "robot", cast=casts)
    mr.load(made, folder / "runs" / "raw", rename={"observation/images": "observation"})
    mr.export(made, folder / "my_set", format="lerobot", fps=30)
    return folder


def every(language, pages):
    return [
        pytest.param(page, block, id=f"{page.name}-{number}")
        for page in pages
        for number, block in enumerate(blocks(page, language))
    ]


EVERYWHERE = [*PAGES, *sorted((DOCS / "migrating").glob("*.md"))]


@pytest.mark.parametrize(("page", "block"), every("python", EVERYWHERE))
def test_a_block_of_python_runs_alone(page, block, example_files, tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    for module in set(re.findall(r"^(?:import|from) (\w+)", block, re.M)):
        pytest.importorskip(module)
    if not torch.cuda.is_available():
        block = block.replace('"cuda"', '"cpu"').replace("pin_memory=True", "timeout=0")
    # One worker is enough to see that the data gets there.
    block = re.sub(r"num_workers=\d", "num_workers=1", block)
    block = block.replace("range(2_000)", "range(200)")
    shutil.copytree(example_files, tmp_path, dirs_exist_ok=True)
    for made in re.findall(r'ReplayBuffer\.create\(\s*"(runs/[\w-]+)"', block):
        shutil.rmtree(tmp_path / made, ignore_errors=True)
    monkeypatch.chdir(tmp_path)
    learn = Learner()
    names = {"__name__": "page", "learn": learn}
    with contextlib.suppress(Enough):
        exec(compile(block, page.name, "exec"), names)
    assert learn.calls > 0 or "learn(" not in block or "def learn(" in block


SLOW_COMMANDS = ("record ALE", "plan ALE")


def consoles():
    pages = [ROOT / "docs" / name for name in ("cli.md", "images.md", "robotics.md")]
    for param in every("console", pages):
        slow = any(words in param.values[1] for words in SLOW_COMMANDS)
        yield pytest.param(*param.values, id=param.id, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("page", "block"), [*consoles()])
@pytest.mark.sliced(8)
def test_a_block_of_commands_runs_alone(page, block, example_files, tmp_path, monkeypatch, capsys):
    for module in ("gymnasium", "matplotlib"):
        pytest.importorskip(module)
    if "ALE" in block:
        pytest.importorskip("ale_py")
    shutil.copytree(example_files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for session in re.split(r"^\$ ", block, flags=re.M)[1:]:
        line, _, shown = session.partition("\n")
        for made in re.findall(r"(?:record \S+|cp -r \S+|convert my_set) (\S+?);?(?= |$)", line):
            shutil.rmtree(tmp_path / made)
        ends = re.search(r"^\(exit code (\d)\)$", shown, re.M)
        expected = int(ends[1]) if ends else 0
        if "cart.npz" in line and expected:
            (tmp_path / "cart.npz").write_bytes(b"")  # what the page wrote before
        words = shlex.split(MANY_STEPS.sub("--steps 300", line), comments=True)
        if words[0] == "mmreplay" and "|" not in words:
            assert run(words[1:]) == expected, capsys.readouterr().err
            continue
        # Pipes, several commands, or an environment: what a shell is for.
        command = f'mmreplay() {{ {sys.executable} -m mmreplay "$@"; }}; {line}'
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=environment
        )
        assert done.returncode == expected, done.stderr
        assert done.stdout


def marked_commands():
    for line in listed_commands():
        slow = any(words in line for words in SLOW_COMMANDS)
        yield pytest.param(
            line, id=line.split("#")[0].strip(), marks=[pytest.mark.slow] if slow else []
        )


@pytest.mark.parametrize("line", [*marked_commands()])
def test_a_listed_command_runs_alone(line, example_files, tmp_path, monkeypatch, capsys):
    for module in ("gymnasium", "matplotlib"):
        pytest.importorskip(module)
    if "ALE" in line:
        pytest.importorskip("ale_py")
    shutil.copytree(example_files, tmp_path, dirs_exist_ok=True)
    if "record" in line:
        shutil.rmtree(tmp_path / "runs" / "pong")
    monkeypatch.chdir(tmp_path)
    if typed(line)[0] == "view" and "--save" not in line:
        view_until_ctrl_c([*typed(line), "--no-open"])
        return
    assert run(typed(line)) == 0, capsys.readouterr().err


def view_until_ctrl_c(arguments):
    """Serve the page, fetch it at the printed address, and end it as Ctrl-C does."""
    pytest.importorskip("starlette")
    command = [sys.executable, "-m", "mmreplay", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"http://\S+", server.stdout.readline())[0]
            # The token of the address becomes a cookie, and leads on to the page.
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with browser.open(address) as answer:
                assert b"<title>" in answer.read()
        finally:
            server.send_signal(signal.SIGINT)
        assert server.wait() == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_is_python_and_its_names_are_there(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
        for name in set(re.findall(r"\bmr\.(\w+)", block)):
            if name == "ray" and importlib.util.find_spec("ray") is None:
                continue
            assert hasattr(mr, name), f"mr.{name}"


@pytest.mark.parametrize("page", EVERYWHERE, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    for name in set(re.findall(r"-m (tools\.[\w.]+\w)", text)):
        assert importlib.util.find_spec(name), name
    for name in set(re.findall(r"`((?:tests|tools|docs)/[\w/]+(?:\.\w+)?)`", text)):
        assert (ROOT / name).exists(), name
    for name in set(re.findall(r"`(\w+/[\w/]+\.(?:py|c|h))`", text)):
        assert (ROOT / name).exists() or (ROOT / "mmreplay" / name).exists(), name
    for name, file in re.findall(r"`(_?[A-Z_]+)`\s(?:of|\()\s?`([\w/]+\.py)`", text):
        path = ROOT / file if (ROOT / file).exists() else ROOT / "mmreplay" / file
        assert re.search(rf"^{name}\b", path.read_text(), re.M), f"{file}: {name}"
    for link in set(re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text)):
        assert (page.parent / link).exists(), link
    for file, names in re.findall(r"`(tests/[\w/]+\.py)` \(((?:`test_\w+`(?:, )?)+)", text):
        source = (ROOT / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"def {name}\(", source), f"{file}: {name}"


def anchor(heading):
    """The anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", EVERYWHERE, ids=lambda page: page.name)
def test_a_link_into_a_page_finds_its_heading(page):
    for target, name in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
        text = (page.parent / target if target else page).read_text()
        headings = re.findall(r"^#+ (.+)$", text, re.M)
        assert name in {anchor(heading) for heading in headings}, f"{target}#{name}"


@pytest.mark.parametrize("page", EVERYWHERE, ids=lambda page: page.name)
def test_lists_and_tables_of_a_page_begin_after_an_empty_line(page):
    # GitHub does without the line, the site's Markdown does not.
    text = re.sub(r"^```.*?^```$", "\n", page.read_text(), flags=re.M | re.S)
    begins = re.findall(r"^(?![-|*\s]|\d\.).+\n(?:[-*] |\||\d\. ).*$", text, re.M)
    assert begins == []


def test_each_minimum_version_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    stated = {
        (match["name"], match["version"])
        for each in wanted
        if (match := re.match(r"(?P<name>[a-z0-9-]+)(\[.*\])?>=(?P<version>[0-9.]+)", each))
    }
    table = re.findall(
        r"^\| ([a-z0-9-]+) \| ([0-9.]+) \| \S", (DOCS / "install.md").read_text(), re.M
    )
    assert {*table} == stated

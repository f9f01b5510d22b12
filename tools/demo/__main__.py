"""Record Atari, kill a writer, reopen, train; exit code 1 if anything is amiss."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import mmreplay as mr
from tools.demo import crash, learn, play
from tools.demo.crash import Comparison, Reported
from tools.demo.learn import Learned
from tools.demo.processes import apart

MIB = 1 << 20
FOLDER = Path(__file__).resolve().parents[2] / "build" / "demo"
"""The recording of the last run stays here, to be looked at."""


def main() -> None:
    """Run every step, in a new build/demo unless another folder is named."""
    if len(sys.argv) > 2:
        sys.exit("python -m tools.demo: too many arguments. Pass one folder, or none.")
    if len(sys.argv) == 2:
        run(Path(sys.argv[1]))
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    run(FOLDER / "pong")


def run(path: Path) -> None:
    """Run every step on a new buffer."""
    started = perf_counter()
    say(
        f"1. Record {play.STEPS:,} steps of Pong, {play.NUM_ENVS} environments, into a "
        f"ring of {play.CAPACITY:,} rows each,\n   and end the process"
    )
    done, recorder = apart(play.record, path)
    show_recorded(path, done)
    say("2. Start a writer that continues the recording, and kill it with SIGKILL")
    reported = crash.kill_a_writer(path)
    print(f"   it had reported {reported.positions.size:,} steps when it died")
    say("3. Reopen in another process, and compare all steps that it had reported")
    comparison = apart(crash.compare, path, reported)
    show_comparison(reported, comparison)
    say("4. Train from it in another process, through a DataLoader with 2 workers")
    learned = apart(learn.learn, path)
    show_learned(learned)
    table(path, done, reported, learned, recorder)
    print(f"\nAll of it in {perf_counter() - started:.0f} s.")
    if comparison.missing or comparison.different or comparison.damage:
        sys.exit("demo: steps that were published are lost or damaged.")
    if not learned.last < learned.first:
        sys.exit("demo: the loss did not fall.")
    print(f"\nLook at the recording in a browser:\n\n  {view_command(path)}")


def view_command(path: Path) -> str:
    """Return what opens the page on a buffer, from the current folder."""
    program = Path(sys.executable).with_name("mmreplay")
    words = [_near(program)] if program.exists() else ["mmreplay"]
    command = shlex.join([*words, "view", _near(path)])
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        install = shlex.join([_near(Path(sys.executable)), "-m", "pip", "install"])
        return f"{install} starlette uvicorn\n  {command}"
    return command


def _near(path: Path) -> str:
    """A path as seen from the current folder, where it lies below."""
    # Not resolved: the interpreter of an environment is a link out of it.
    absolute = Path(os.path.abspath(path))
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else path)


def say(title: str) -> None:
    """Print the title of a step."""
    print(f"\n{title}", flush=True)


def show_recorded(path: Path, done: mr.RecordReport) -> None:
    """Print what the recorder wrote."""
    with mr.ReplayBuffer.open(path) as buffer:
        heads, alive = buffer.heads, len(buffer)
        print(
            f"   {done.steps:,} steps and {done.episodes} ends of episodes in "
            f"{done.seconds:.1f} s\n"
            f"   the ring wrapped: {alive:,} steps are alive, positions "
            f"{buffer.span.first.min():,} to {heads.max():,}"
        )


def show_comparison(reported: Reported, comparison: Comparison) -> None:
    """Print what the buffer holds after the kill."""
    last = reported.positions[-1].tolist()
    print(
        f"   last writer: {comparison.how}; last reported positions {last},\n"
        f"   next positions in the buffer {comparison.heads}\n"
        f"   {reported.positions.size:,} rows compared by checksum: "
        f"{comparison.missing} missing, {comparison.different} different\n"
        f"   mmreplay verify: {comparison.damage} damages"
    )
    if not (comparison.missing or comparison.different or comparison.damage):
        print("   no published step is lost")


def show_learned(learned: Learned) -> None:
    """Print how the training went."""
    print(
        f"   where will the next frame differ? {learn.UPDATES} updates of "
        f"{learn.BATCH_SIZE} steps\n"
        f"   mean loss of the first {learn.WINDOW}: {learned.first:.4f}, of the last "
        f"{learn.WINDOW}: {learned.last:.4f}\n"
        f"   (baseline that always predicts the mean: {learned.baseline:.4f})"
    )


def table(
    path: Path,
    done: mr.RecordReport,
    reported: Reported,
    learned: Learned,
    recorder: dict[str, int],
) -> None:
    """Print the figures."""
    with mr.ReplayBuffer.open(path) as buffer:
        apparent, allocated = buffer.nbytes
    rows = [
        ("steps written/s, playing", f"{done.steps / done.seconds:,.0f}"),
        (
            "steps written/s, one step per call",
            f"{reported.positions.size / reported.seconds:,.0f}",
        ),
        (f"batches of {learn.DRAWN_BATCH_SIZE} drawn/s", f"{learned.drawn_per_s:,.0f}"),
        (f"updates/s, batches of {learn.BATCH_SIZE}", f"{learned.updates_per_s:,.0f}"),
        ("bytes on disk, apparent", f"{apparent / MIB:,.1f} MiB"),
        ("bytes on disk, allocated", f"{allocated / MIB:,.1f} MiB"),
        ("resident memory, recorder", memory(recorder)),
        ("resident memory, learner", memory(learned.memory)),
    ]
    print()
    for name, value in rows:
        print(f"  {name:36}{value}")


def memory(resident: dict[str, int]) -> str:
    """Memory of the process, and pages of files, which the kernel may reclaim."""
    own, files = resident["own"] / MIB, resident["files"] / MIB
    return f"{own:,.0f} MiB own, {files:,.0f} MiB of files"


if __name__ == "__main__":
    main()

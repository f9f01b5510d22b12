"""Record Atari, kill a writer, reopen, train; exit code 1 if anything is amiss."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from time import perf_counter

import mmreplay as mr
from tools.demo import crash, learn, play
from tools.demo.crash import Found, Told
from tools.demo.learn import Learned
from tools.demo.processes import apart

MIB = 1 << 20


def main() -> None:
    """Run every part, in a temporary folder unless one is named."""
    if len(sys.argv) > 2:
        sys.exit("python -m tools.demo: got too many arguments, expected one folder")
    if len(sys.argv) == 2:
        run(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory(prefix="mmreplay-demo-") as folder:
        run(Path(folder) / "pong")


def run(path: Path) -> None:
    """Run every part on a new buffer."""
    started = perf_counter()
    say(
        f"1. Record {play.STEPS:,} steps of Pong, {play.NUM_ENVS} environments, into a "
        f"ring of {play.CAPACITY:,} rows each,\n   and end the process"
    )
    done, recorder = apart(play.record, path)
    tell_recorded(path, done)
    say("2. Start a writer that goes on, and kill it with SIGKILL while it writes")
    told = crash.kill_a_writer(path)
    print(f"   it had told of {told.positions.size:,} steps when it died")
    say("3. Reopen in another process, and look for all that it had told")
    found = apart(crash.look_for, path, told)
    tell_found(told, found)
    say("4. Train from it in another process, through a DataLoader with 2 workers")
    learned = apart(learn.learn, path)
    tell_learned(learned)
    table(path, done, told, learned, recorder)
    print(f"\nAll of it in {perf_counter() - started:.0f} s.")
    if found.missing or found.different or found.damage:
        sys.exit("demo: steps that were published are lost or damaged, expected all")
    if not learned.last < learned.first:
        sys.exit("demo: the loss did not fall, expected the last 50 updates below")


def say(what: str) -> None:
    """Begin a part."""
    print(f"\n{what}", flush=True)


def tell_recorded(path: Path, done: mr.RecordReport) -> None:
    """What the recorder left."""
    with mr.ReplayBuffer.open(path) as buffer:
        heads, alive = buffer.heads, len(buffer)
        print(
            f"   {done.steps:,} steps and {done.episodes} ends of episodes in "
            f"{done.seconds:.1f} s\n"
            f"   the ring wrapped: {alive:,} steps are alive, positions "
            f"{buffer.span.first.min():,} to {heads.max():,}"
        )


def tell_found(told: Told, found: Found) -> None:
    """What was there after the kill."""
    last = told.positions[-1].tolist()
    print(
        f"   left as: {found.how}; last positions told {last},\n"
        f"   next positions found {found.heads}\n"
        f"   {told.positions.size:,} rows compared by checksum: {found.missing} "
        f"missing, {found.different} different\n"
        f"   every claim of the files verified: {found.damage} broken"
    )
    if not (found.missing or found.different or found.damage):
        print("   nothing that was published is lost")


def tell_learned(learned: Learned) -> None:
    """How the training went."""
    print(
        f"   where will the next frame differ? {learn.UPDATES} updates of "
        f"{learn.BATCH_SIZE} steps\n"
        f"   mean loss of the first {learn.WINDOW}: {learned.first:.4f}, of the last "
        f"{learn.WINDOW}: {learned.last:.4f}\n"
        f"   (always telling how often a block changes: {learned.guess:.4f})"
    )


def table(
    path: Path,
    done: mr.RecordReport,
    told: Told,
    learned: Learned,
    recorder: dict[str, int],
) -> None:
    """Close with the figures."""
    with mr.ReplayBuffer.open(path) as buffer:
        apparent, allocated = buffer.nbytes
    rows = [
        ("steps written/s, playing", f"{done.steps / done.seconds:,.0f}"),
        (
            "steps written/s, told one by one",
            f"{told.positions.size / told.seconds:,.0f}",
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
        print(f"  {name:34}{value}")


def memory(taken: dict[str, int]) -> str:
    """Own memory, and pages of files, which the kernel takes back when it must."""
    own, files = taken["own"] / MIB, taken["files"] / MIB
    return f"{own:,.0f} MiB own, {files:,.0f} MiB of files"


if __name__ == "__main__":
    main()

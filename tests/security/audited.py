"""What is executed, and what is written outside a folder, while files are read.

Run alone, as hooks of the interpreter stay for good: ``python -m
tests.security.audited FOLDER`` makes a buffer and a file of each format, does
everything once so that all is imported, does it again under the hook, and prints as
JSON what the hook saw. ``--wrong`` also does what is forbidden.
"""

import json
import os
import pickle
import sys
from pathlib import Path

import numpy as np

import mmreplay as mr
from mmreplay.convert.registry import formats
from mmreplay.errors import ReplayError
from tests.convert.foreign.test_mutants import SOURCES

# Not "compile": numpy's headers are parsed as literals, which compiles a tree and runs
# none; whatever is run is an "exec", `eval` too.
EXECUTES = (
    *("pickle.find_class", "exec", "marshal.loads", "marshal.load"),
    *("code.__new__", "function.__new__", "os.system", "os.exec", "os.fork"),
    *("os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "os.startfile"),
    *("ctypes.dlopen", "import", "socket.connect", "socket.bind", "urllib.Request"),
)
CHANGES = {
    "os.rename": 2,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.mkdir": 1,
    "os.truncate": 1,
    "os.symlink": 2,
    "os.link": 2,
    "os.chmod": 1,
    "os.utime": 1,
    "os.chown": 1,
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OWN_FORMATS = {
    "npz": "a.npz",
    "pt": "a.pt",
    "safetensors": "a.safetensors",
    "csv": "a.csv",
    "parquet": "a.parquet",
    "buffer": "copy",
}


class Hook:
    """Notes events while it is on."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.on = False
        self.count = 0
        self.executed: list[str] = []
        self.outside: list[str] = []

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """Note what runs something, or changes what is not in the folder."""
        if not self.on:
            return
        self.count += 1
        if event in EXECUTES:
            self.executed.append(f"{event} {arguments!r}"[:200])
        elif event == "open" and isinstance(arguments[2], int):
            if arguments[2] & WRITING:
                self._write(event, arguments[0])
        elif event in CHANGES:
            for each in arguments[: CHANGES[event]]:
                self._write(event, each)

    def _write(self, event: str, path: object) -> None:
        # Descriptors stand for files whose opening was seen.
        if isinstance(path, int):
            return
        real = os.path.realpath(os.fspath(path))  # type: ignore[call-overload]
        if not real.startswith(self.folder + os.sep):
            self.outside.append(f"{event} {real}")


def make(folder: Path) -> None:
    """A ring that has wrapped, with priorities."""
    fields = {
        "observation": mr.Field((3,), "float32"),
        "image": mr.Field((70, 50), "uint8"),
        "action": mr.Field((2,), "float32"),
        "reward": mr.Field((), "float32"),
        "terminated": mr.Field((), "bool"),
        "truncated": mr.Field((), "bool"),
    }
    sampler = mr.PrioritizedSampler(seed=0, name="prioritized")
    with mr.ReplayBuffer.create(
        folder / "buffer", mr.Schema(fields), 12, 2, sampler=sampler, autoreset="disabled"
    ) as buffer:
        for number in range(20):
            buffer.add(
                observation=np.full((2, 3), number, np.float32),
                image=np.full((2, 70, 50), number, np.uint8),
                action=np.zeros((2, 2), np.float32),
                reward=np.zeros(2, np.float32),
                terminated=np.full(2, number % 7 == 6),
                truncated=np.zeros(2, bool),
            )
        batch = buffer.sample(4)
        buffer.update_priorities(batch, np.ones(4))


def use(folder: Path) -> None:
    """Read, draw, verify and write the buffer."""
    path = folder / "buffer"
    for mode in ("r", "r+"):
        sampler = mr.PrioritizedSampler(seed=0, name="prioritized")
        with mr.ReplayBuffer.open(path, mode, sampler=sampler) as buffer:
            batch = buffer.sample(8)
            buffer.update_priorities(batch, np.ones(8))
            buffer.gather_all()
            if mode == "r+":
                buffer.resize(buffer.capacity - 1)
    mr.verify_buffer(path)


def convert(folder: Path, turn: int, names: list[str], sources: list[str]) -> list[str]:
    """Write and read every format, into names of this turn; what was read."""
    done = []
    for name in names:
        target = folder / f"out-{turn}-{name}" / OWN_FORMATS.get(name, "a")
        mr.export(folder / "buffer", target, format=name)
        mr.load(target, folder / f"in-{turn}-{name}", format=name)
        done.append(name)
    for name in sources:
        try:
            mr.load(Path(name), folder / f"from-{turn}-{len(done)}")
        except ReplayError as error:
            print(f"{name}: {error}", file=sys.stderr)
        done.append(name)
    return done


def do_wrong(folder: Path) -> None:
    """Do what the hook must see."""
    pickle.loads(pickle.dumps(os.getcwd))
    eval("1 + 1")
    (folder.parent / "outside").write_text("here")


def main() -> None:
    """Do everything twice, and print what the second turn did."""
    folder = Path(os.path.realpath(sys.argv[1]))
    hook = Hook(folder)
    make(folder)
    sources = []
    for name, source in SOURCES.items():
        place = folder / "sources" / name.replace(" ", "-")
        place.mkdir(parents=True)
        sources.append(str(source(place, np.random.default_rng(5))))
    names = [each.name for each in formats().values() if each.name in OWN_FORMATS]
    sys.addaudithook(hook)
    for turn in (0, 1):
        hook.on = turn == 1
        use(folder)
        done = convert(folder, turn, names, sources)
        if "--wrong" in sys.argv:
            do_wrong(folder)
        hook.on = False
    told = {"executed": hook.executed, "outside": hook.outside, "done": done}
    print("\nAUDIT" + json.dumps(told | {"count": hook.count}))


if __name__ == "__main__":
    main()

"""``mmreplay record``: an environment played into a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import InterruptedRun
from mmreplay.cli.options import (
    BufferPath,
    CodecName,
    EngineName,
    Json,
    Level,
    NumEnvs,
    check_choice,
    completing,
    heap_bytes_option,
    load_function,
    parse_count,
    parse_integer,
    usage_error,
)
from mmreplay.errors import FailedError, ReplayError
from mmreplay.format.metadata import ON_DISK
from mmreplay.format.sharding import CODECS

RESUMES = ("break", "truncate", "continue")
LARGE_NBYTES = 1 << 30
"""Recordings of this size or more say so before they begin."""


Env = Annotated[
    str,
    typer.Argument(metavar="ENV", help="A Gymnasium id, such as ALE/Pong-v5.", show_default=False),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps",
        parser=parse_count,
        metavar="N",
        show_default=False,
        help="Steps to add, of all environments together, such as 1e5.",
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(
        "--capacity",
        parser=parse_count,
        metavar="N",
        show_default=False,
        help="Capacity per environment of a new buffer; by default all these steps.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        parser=parse_integer,
        metavar="N",
        show_default=False,
        help="Seed of environments and actions.",
    ),
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="MODULE:NAME",
        show_default=False,
        help="A function from observations [num_envs, ...] to actions [num_envs, ...], "
        "also of one environment; random by default.",
    ),
]
OnResume = Annotated[
    str,
    typer.Option(
        "--on-resume",
        metavar="|".join(RESUMES),
        autocompletion=completing(*RESUMES),
        help="How the first new row continues the last old one.",
    ),
]
HeapBytes = Annotated[
    int | None, heap_bytes_option("planned by the first values, for a new buffer")
]


def record(
    env: Env,
    path: BufferPath,
    steps: Steps,
    num_envs: NumEnvs = None,
    capacity: Capacity = None,
    seed: Seed = None,
    policy: PolicyName = None,
    on_resume: OnResume = "break",
    engine: EngineName = None,
    codec: CodecName = None,
    level: Level = None,
    heap_bytes: HeapBytes = None,
    json: Json = False,
) -> None:
    """Play an environment into a new buffer, or go on with an existing one."""
    if seed is not None and seed < 0:
        raise usage_error(f"--seed must be at least 0, got {seed}")
    check_choice("--on-resume", on_resume, RESUMES)
    check_choice("--engine", engine, ON_DISK)
    check_choice("--codec", codec, CODECS)
    function = None if policy is None else load_policy(policy)
    from mmreplay.recording import record as play

    with _writing_rows(path):
        _say_size(env, path, steps, num_envs, capacity, heap_bytes)
        _warn_of_small_ring(path, steps)
        report = play(
            env,
            path,
            function,
            steps=steps,
            num_envs=num_envs,
            capacity=capacity,
            seed=seed,
            on_resume=on_resume,  # type: ignore[arg-type]  # checked above
            engine=engine,  # type: ignore[arg-type]  # checked above
            codec=codec,  # type: ignore[arg-type]  # checked above
            level=level,
            heap_bytes=heap_bytes,
        )
    if json:
        show.print_json({**asdict(report), "path": str(path)})
        return
    rate = report.steps / report.seconds if report.seconds else 0.0
    show.print_line(
        f"{path}: {show.plural(report.steps, 'step')} and "
        f"{show.plural(report.episodes, 'episode end')} in {report.seconds:.1f} s, "
        f"{show.count(rate)} steps/s, {show.format_size(report.nbytes)}"
    )
    if report.heap_bytes:
        show.print_line(
            f"values that vary have {show.format_size(report.heap_bytes)} of each "
            f"environment (heap_bytes {show.count(report.heap_bytes)})"
        )
    if report.held < report.steps:
        enlarges = "mmreplay resize enlarges it for later steps"
        if report.heap_bytes:
            enlarges += (
                f", and its heap with --heap-bytes; mmreplay info {path} says which of "
                "the two is full"
            )
        show.print_line(
            f"the ring is full and holds the newest {show.count(report.held)} of them; {enlarges}"
        )


@contextmanager
def _writing_rows(path: Path) -> Iterator[None]:
    """Turn Ctrl-C into a line that says whether rows were written."""
    before = _rows_ever(path)
    try:
        yield
    except KeyboardInterrupt:
        added = _rows_ever(path) > before
        what = "rows written before are committed" if added else "no row was written"
        raise InterruptedRun(f"interrupted; {what}") from None


def _rows_ever(path: Path) -> int:
    """Rows that were ever written to a buffer; 0 where there is none to read."""
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.format import metadata

    if not (path / metadata.FILE_NAME).exists():
        return 0
    with suppress(ReplayError, OSError), ReplayBuffer.open(path) as buffer:
        return int(buffer.heads.sum())
    return 0


def _say_size(
    env: str,
    path: Path,
    steps: int,
    num_envs: int | None,
    capacity: int | None,
    heap_bytes: int | None,
) -> None:
    """Say, before hours of recording, how much disk space a large recording takes."""
    from mmreplay.cli.exits import say
    from mmreplay.format import metadata
    from mmreplay.plan import plan_buffer
    from mmreplay.recording.environments import make_vector
    from mmreplay.recording.recorder import rows_of
    from mmreplay.schema import Schema

    if (path / metadata.FILE_NAME).exists():
        return
    played = make_vector(env, 1, {})
    try:
        schema = Schema.from_env(played)
    finally:
        played.close()
    envs = num_envs or 1
    rows = min(-(-steps // envs), capacity or rows_of(steps, envs))
    lengths = {path: (schema[path].max_length or 0) / 16 for path in schema.varying}
    planned = plan_buffer(schema, rows, envs, heap_bytes=heap_bytes, lengths=lengths)
    nbytes = planned.nbytes
    if nbytes >= LARGE_NBYTES:
        say(
            f"{path}: {show.plural(rows * envs, 'row')} take about "
            f"{show.format_size(nbytes)} without compression; "
            "--capacity or --engine zarr makes it less"
        )


def _warn_of_small_ring(path: Path, steps: int) -> None:
    """Warn, before hours of recording, that the existing ring holds fewer steps."""
    from mmreplay.cli.exits import say
    from mmreplay.format import metadata

    if not (path / metadata.FILE_NAME).exists():
        return
    ring = metadata.load(path).ring
    if steps > (num_rows := ring.capacity * ring.num_envs):
        say(
            f"{path} holds {show.plural(num_rows, 'row')}: only the newest of these "
            f"{show.plural(steps, 'step')} will stay; mmreplay resize enlarges it"
        )


def load_policy(name: str) -> Callable[[Any], Any]:
    """Import the policy that ``module:name`` names; what it raises is one line."""
    return _guarded(name, load_function("--policy", name))


def _guarded(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make what a user's function raises one line; SystemExit would say nothing."""

    @wraps(function)
    def act(observation: Any) -> Any:
        try:
            return function(observation)
        except (Exception, SystemExit) as error:
            raise FailedError(
                f"--policy {name!r} raised {type(error).__name__}: {error}. It must return an "
                "action for each observation: call it in Python to find the cause."
            ) from error

    return act

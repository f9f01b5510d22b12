"""Is a damaged buffer refused, told of by `verify`, or right?

Each try damages the files of a buffer that has lived: bytes flipped, cut, spliced,
put back from before, files gone, linked, swapped or of a terabyte, and records that
lie under a right checksum, as only an adversary writes them. Then it is verified,
read, drawn from with priorities, repaired and written. Allowed are named errors and
right rows; findings are a crash, a hang, memory beyond a bound, an unexpected error, a
wrong row in a whole committed block that `verify` calls well, committed rows that are
lost without a word, and a repaired buffer that is not whole. Tries run in child
processes, so that a crash is a finding too, and depend on the seed and their number
alone, with which each finding is made again:
``python -m tools.torture mutate --seed 1 --first 7 --count 1``.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from mmreplay.errors import (
    EmptyError,
    FailedError,
    FormatError,
    FullError,
    LockedError,
    StarvedError,
)
from mmreplay.format import ray_files
from mmreplay.nesting import unflatten
from mmreplay.verify import VerifyReport
from tools.torture import forged
from tools.torture.damages import Damage, damaged
from tools.torture.powerloss import Report
from tools.torture.rows import GEOMETRIES, SHARDED, Geometry
from tools.torture.specimens import (
    FOLDER,
    Contents,
    Specimen,
    alive,
    one_boot,
    specimens,
    values_of,
)

BOUND_NBYTES = 256 << 20
"""Address space that a try may add; buffers here have less than a MiB."""
SLOW_S = forged.TRY_S
"""Of all that is done in a try; each part has as long."""
CHUNK = 250
"""Tries of one child process."""

MEANT = (EmptyError, FailedError, FullError, LockedError, StarvedError)


class Try:
    """One damaged buffer, looked at in every way.

    Args:
        path: Where it lies.
        specimen: What it was.
        damage: What was done to it.
        report: Takes what happened.
    """

    def __init__(self, path: Path, specimen: Specimen, damage: Damage, report: Report) -> None:
        self.path = path
        self.specimen = specimen
        self.damage = damage
        self.report = report
        self.verified: VerifyReport | None = None
        self.faults: list[str] = []

    def run(self) -> list[str]:
        """What is wrong with how everything ended."""
        begin = time.monotonic()
        for do in (
            *(self._verify, self._read, self._draw, self._repair),
            *(self._leases, self._epochs, self._write, self._read_again),
        ):
            self._guarded(do)
        if time.monotonic() - begin > SLOW_S:
            self.faults.append(f"slow: {time.monotonic() - begin:.0f} s")
        return self.faults

    def _guarded(self, do: Callable[[], None]) -> None:
        step = do.__name__.strip("_")
        try:
            with forged.bounded(BOUND_NBYTES):
                do()
        except FormatError as error:
            self.report.seen[f"{step}: {type(error).__name__}"] += 1
            if self.path.name not in str(error):
                self.faults.append(f"unnamed: {step}: {error}")
        except MEANT as error:
            self.report.seen[f"{step}: {type(error).__name__}"] += 1
        except (Exception, forged.Late) as error:
            text = " ".join(str(error).split())[:200]
            self.faults.append(f"{step} escaped {type(error).__name__}: {text}")

    def _verify(self) -> None:
        self.verified = mr.verify_buffer(self.path)
        ok = "well" if self.verified.ok else "damaged"
        self.report.seen[f"verify: {ok}"] += 1

    def _leases(self) -> None:
        """Read what a server on Ray notes of its writers, and write it back."""
        ray_files.write_leases(self.path, ray_files.read_leases(self.path))

    def _epochs(self) -> None:
        """The same of frozen epochs."""
        ray_files.write_epochs(self.path, ray_files.read_epochs(self.path))

    def _read(self) -> None:
        with mr.ReplayBuffer.open(self.path, check_values=True) as buffer:
            found = alive(buffer)
            if not self.damage.lawful:
                self.report.seen["read: forged"] += 1
                return
            wrong = [at for at in found if self.specimen.rows.get(at) != found[at]]
            self._check_wrong(buffer, wrong)
            self._check_lost(buffer)
            self.report.seen["read: wrong rows" if wrong else "read: right"] += 1

    def _check_wrong(self, buffer: mr.ReplayBuffer, wrong: list[tuple[int, int]]) -> None:
        """Rows under a checksum that are not what was written must be told of."""
        if self.verified is None or not self.verified.ok:
            return
        ring, ledger = buffer.metadata.ring, buffer._files.commit
        for env_id, position in wrong:
            first = position // ring.block_rows * ring.block_rows
            whole = first + ring.block_rows <= buffer.committed[env_id]
            if whole and first >= ledger.limits[env_id] - ring.slots:
                at = f"env {env_id} position {position}"
                self.faults.append(f"wrong row unreported: {at} of {len(wrong)}")
                return
        self.report.seen["rows wrong that no sum covers"] += len(wrong)

    def _check_lost(self, buffer: mr.ReplayBuffer) -> None:
        """Committed rows are not lost without a word."""
        if self.damage.older or (self.verified and self.verified.findings):
            return
        if (buffer.heads < self.specimen.committed).any():
            self.faults.append(f"lost unsaid: {buffer.heads}, expected {self.specimen.committed}")

    def _draw(self) -> None:
        sampler = mr.PrioritizedSampler(seed=0, name="prioritized")
        with mr.ReplayBuffer.open(self.path, sampler=sampler) as buffer:
            batch = buffer.sample(32)
            span = buffer.span
            inside = batch.positions >= span.first[batch.env_ids]
            inside &= batch.positions < span.stop[batch.env_ids]
            law = batch.probabilities
            if not (inside.all() and np.isfinite(law).all() and (law > 0).all()):
                self.faults.append("draw: of what is not there, or of no probability")
            if not np.isfinite(batch.weights).all():
                self.faults.append("draw: weights that are not finite")
            buffer.update_priorities(batch, np.ones(32))
            buffer.sample(32)
        self.report.seen["draw: drawn"] += 1

    def _repair(self) -> None:
        """What is repaired is whole; without damage all that was committed is kept."""
        target = self.path.with_name(f"{self.path.name}-repaired")
        try:
            made = mr.repair(self.path, target)
            report = mr.verify_buffer(target)
            if not report.ok:
                self.faults.append(f"repaired damaged: {report.findings[:2]}")
            with mr.ReplayBuffer.open(target) as buffer:
                found, schema = alive(buffer), buffer.schema
                if len(found) != made.rows:
                    self.faults.append("repaired: not as many rows as were told")
            if schema.varying and self.damage.lawful:
                # Each has a checksum of its own, whatever sums there are of rows.
                known = values_of(self.specimen.rows, schema)
                if values_of(found, schema) - known:
                    self.faults.append("repaired: a value that was never written")
            well = self.verified is not None and self.verified.ok
            # Intact rows make space for the reserve of a new heap.
            lost = [cut for cut in made.cuts if cut.why != "heap"]
            if well and lost and self.damage.lawful:
                self.faults.append(f"cut unsaid: {made.cuts[:2]}, and verify is well")
            self.report.seen["repair: cut" if made.cuts else "repair: all"] += 1
        finally:
            shutil.rmtree(target, ignore_errors=True)

    def _write(self) -> None:
        buffer = mr.ReplayBuffer.open(self.path, "r+", commit_every=None)
        with buffer:
            lead = (3, buffer.num_envs)
            zeros = {
                path: [[_short(field)] * lead[1]] * lead[0]
                if field.varies
                else np.zeros((*lead, *field.shape), field.numpy)
                for path, field in buffer.schema.fields.items()
            }
            buffer.extend(unflatten(zeros))
            buffer.commit()
            buffer.resize(max(1, buffer.capacity // 2))
        self.report.seen["write: written"] += 1

    def _read_again(self) -> None:
        with mr.ReplayBuffer.open(self.path) as buffer:
            alive(buffer)


def _short(field: mr.Field) -> NDArray[np.generic]:
    """A short value of a field that varies."""
    assert field.max_length is not None
    return np.zeros((min(9, field.max_length), *field.inner), field.numpy)


def attack(
    count: int,
    seed: int,
    first: int = 0,
    verbose: bool = False,
    geometries: tuple[Geometry, ...] = GEOMETRIES + SHARDED,
) -> Report:
    """Look at damaged buffers.

    Args:
        count: Tries.
        seed: With the number of a try says what is done.
        first: Number of the first try.
        verbose: Print each try before it is made.
        geometries: Of the buffers.
    """
    report = Report()
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="torture-", dir=shm if shm.is_dir() else None) as name:
        folder = Path(name)
        bases = specimens(geometries)
        stop = first + count
        while first < stop:
            first = _chunk(folder, bases, (first, stop), seed, verbose, report)
    return report


def _chunk(
    folder: Path,
    bases: list[Specimen],
    numbers: tuple[int, int],
    seed: int,
    verbose: bool,
    report: Report,
) -> int:
    """Make tries in a child process; the number of the first that is left."""
    first, stop = numbers[0], min(numbers[1], numbers[0] + CHUNK)
    reached = mmap.mmap(-1, 8)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            part = Report()
            for number in range(first, stop):
                reached[:] = struct.pack("<q", number)
                _one(folder, bases, number, seed, verbose, part)
                (folder / "report").write_text(json.dumps(_as_list(part)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if (folder / "report").exists():
        _take(report, json.loads((folder / "report").read_text()))
        (folder / "report").unlink()
    if code == 0:
        return stop
    number = int(struct.unpack("<q", reached[:])[0])
    report.states += 1
    report.add([f"crash: the process ended with {code}"], _again(seed, number))
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    return number + 1


def _as_list(report: Report) -> list[object]:
    return [report.states, report.findings, report.examples, report.seen]


def _take(report: Report, values: list[object]) -> None:
    states, findings, examples, happened = values
    assert isinstance(states, int)
    assert isinstance(findings, dict)
    assert isinstance(examples, dict)
    assert isinstance(happened, dict)
    report.states += states
    report.findings += Counter(findings)
    report.seen += Counter(happened)
    report.examples = examples | report.examples


def _again(seed: int, number: int) -> str:
    return f"--seed {seed} --first {number} --count 1"


def put(path: Path, files: Contents) -> None:
    """Write a buffer's files."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)


def _one(
    folder: Path, bases: list[Specimen], number: int, seed: int, verbose: bool, report: Report
) -> None:
    rng = np.random.default_rng([seed, number])
    specimen = bases[number % len(bases)]
    damage = damaged(specimen, rng)
    where = f"{_again(seed, number)} ({', '.join(damage.descriptions)})"
    if verbose:
        print(where, flush=True)
    path = folder / FOLDER
    try:
        put(path, damage.files)
        for name, odd in damage.odd.items():
            odd(path / name)
        report.states += 1
        with one_boot():
            report.add(Try(path, specimen, damage, report).run(), where)
    finally:
        shutil.rmtree(path)

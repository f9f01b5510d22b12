"""Findings of a check, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mmreplay.errors import called, raise_if_out_of_files

Kind = Literal[
    "metadata",
    "statistics",
    "file",
    "commit",
    "slot",
    "sum",
    "lap",
    "flags",
    "value",
    "torn",
    "left_over",
    "unknown",
    "beside",
]
# A crash leaves the first two behind in a whole buffer. The third is a foreign file. A
# sampler or limiter starts over where the fourth is damaged.
NOTES: frozenset[str] = frozenset({"torn", "left_over", "unknown", "beside"})
MAX_FINDINGS = 1000

Progress = Callable[[int, int], None]
"""(bytes read so far, bytes to read)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim of the files that is false.

    Attributes:
        kind: ``"metadata"``, ``"statistics"`` (the JSON files), ``"file"`` (missing,
            cut, no regular file, unreadable; of a compressed buffer's group, other
            than the buffer), ``"commit"`` (no whole durable slot),
            ``"slot"`` (a slot contradicts itself or another), ``"sum"`` (a block's
            data and checksum differ), ``"lap"`` (a block's checksum is missing or of
            another lap), ``"flags"`` (impossible boundaries), ``"value"`` (a value that
            varies is not where its row says, or differs from its checksum); and, being
            no damage,
            ``"torn"`` (a slot that a crash cut short), ``"left_over"`` (a folder or
            file that the next writer sweeps), ``"unknown"`` (a name not ours),
            ``"beside"`` (a sampler's column or a limiter's count that starts over).
        file: Path within the buffer's folder.
        offset: Byte in the file, where it has one.
        message: What, got, expected, in one sentence.

    Example:
        >>> report = mr.verify_buffer("runs/cartpole")
        >>> [finding.message for finding in report.findings if finding.damage]
        []
    """

    kind: Kind
    file: str
    offset: int | None
    message: str

    @property
    def damage(self) -> bool:
        """Whether it is damage, not a note."""
        return self.kind not in NOTES


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify_buffer`.

    Attributes:
        path: The buffer's folder.
        findings: At most 1,000, in the order found.
        omitted: Findings beyond those.
        blocks: Blocks whose checksum was computed and compared.
        skipped_blocks: Blocks that a live writer overwrote while they were read.
        rows: Committed rows alive, whose flags were checked; None where a file that
            says which these are is damaged.
        uncommitted_rows: Those published since, whose flags were checked too.
        unsummed_rows: Those of them in blocks that have no checksum yet (the
            newest of each environment) or no longer; 0 where not `deep`.
        nbytes: Bytes read from the data files.
        deep: Whether checksums, and the numbers of samplers, were looked at.

    Example:
        >>> report = mr.verify_buffer("runs/cartpole")
        >>> report.ok, report.findings
        (True, ())
    """

    path: Path
    findings: tuple[Finding, ...]
    omitted: int
    blocks: int
    skipped_blocks: int
    rows: int | None
    uncommitted_rows: int
    unsummed_rows: int
    nbytes: int
    deep: bool = True

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged; there may be notes."""
        return self.omitted == 0 and not any(f.damage for f in self.findings)


@dataclass(slots=True)
class Notebook:
    """Findings and counts of a check in progress."""

    progress: Progress | None = None
    deep: bool = True
    findings: list[Finding] = field(default_factory=list)
    omitted: int = 0
    blocks: int = 0
    skipped_blocks: int = 0
    rows: int | None = None
    uncommitted_rows: int = 0
    unsummed_rows: int = 0
    nbytes: int = 0
    expected_nbytes: int = 0

    def note(self, kind: Kind, file: str, offset: int | None, message: str) -> None:
        """Keep a finding, or count it where there are too many to keep."""
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(kind, file, offset, message))
        else:
            self.omitted += 1

    def fail(self, kind: Kind, file: str, error: Exception) -> None:
        """Record an error as a finding; raise it if the process is out of files."""
        raise_if_out_of_files(error)
        self.note(kind, file, None, str(error))

    def read(self, nbytes: int) -> None:
        """Count bytes read, and call progress."""
        self.nbytes += nbytes
        if self.progress is not None:
            expected = max(self.nbytes, self.expected_nbytes)
            called("progress", self.progress, self.nbytes, expected)

    def report(self, path: Path) -> VerifyReport:
        """Return the report of the check so far."""
        return VerifyReport(
            path,
            tuple(self.findings),
            self.omitted,
            self.blocks,
            self.skipped_blocks,
            self.rows,
            self.uncommitted_rows,
            self.unsummed_rows,
            self.nbytes,
            self.deep,
        )

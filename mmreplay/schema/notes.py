"""Notes and doubts about data without a description."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Notes:
    """What a reader found out about a source without a description.

    Attributes:
        notes: Facts: how ends were found, what was left out and why.
        doubts: Guesses that may be wrong; errors under ``strict``.
        steps: How many episodes each step of a selection left.
    """

    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a fact, once."""
        if text not in self.notes:
            self.notes.append(text)

    def doubt(self, text: str) -> None:
        """Add a guess, once."""
        if text not in self.doubts:
            self.doubts.append(text)

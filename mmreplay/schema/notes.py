"""What was found and guessed of data that nobody described."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Notes:
    """What is to be said of a source that nobody described.

    Attributes:
        notes: Facts: how ends were found, what was left out and why.
        doubts: What was guessed and may be wrong; errors where the user is strict.
    """

    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a fact, once."""
        if text not in self.notes:
            self.notes.append(text)

    def doubt(self, text: str) -> None:
        """Add a guess, once."""
        if text not in self.doubts:
            self.doubts.append(text)

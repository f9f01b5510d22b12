"""Public names that are going to change, each with an alias for one version.

A recorded name of the left column may be served by the name of the right one, with a
DeprecationWarning; everything else that is recorded keeps its name.
"""

from __future__ import annotations

NAMES = {
    "ShrinkingSampler": "EmphasizeRecentSampler",
    "Cut": "DroppedRows",
    "Repaired": "RepairReport",
    "Compacted": "CompactReport",
    "Recorded": "RecordReport",
    "Memory": "MemoryUsage",
}
METHODS = {"cut": "end_episodes", "set": "write_field"}
PARAMETERS = {"user": "user_metadata", "then": "on_timeout"}
VALUES = {"'go_on'": "'proceed'"}


def modern(text: str) -> str:
    """Text of a repr or a state with every announced name as it is going to be."""
    for old, new in NAMES.items():
        # `Memory` is also the name of adapters' classes and part of other names.
        if old not in ("Memory", "Cut"):
            text = text.replace(old, new)
    for old, new in PARAMETERS.items():
        text = text.replace(f"{old}=", f"{new}=")
    for old, new in VALUES.items():
        text = text.replace(old, new)
    return text

"""Which flags a row may have, alone and after the row before it."""

from __future__ import annotations

from mmreplay.episodes import ALL_FLAGS, BREAK, CUT, END, FINAL, START, TERMINATED, TRUNCATED

NAMES = {
    START: "START",
    TERMINATED: "TERMINATED",
    TRUNCATED: "TRUNCATED",
    FINAL: "FINAL",
    BREAK: "BREAK",
    CUT: "CUT",
}


def names(flags: int) -> str:
    """Return the names of flags, such as ``"START|BREAK"``."""
    known = [name for bit, name in NAMES.items() if flags & bit]
    unknown = flags & ~ALL_FLAGS
    return "|".join(known + ([f"unknown {unknown:#04x}"] if unknown else [])) or "none"


def alone_problem(flags: int) -> str:
    """Return the rule that a row's flags break by themselves, or ''."""
    if flags & ~ALL_FLAGS:
        return f"flags must be within {ALL_FLAGS:#04x}"
    if flags & FINAL and flags != FINAL:
        return "a final row must have no flag but FINAL"
    if flags & BREAK and not flags & START:
        return "a row with BREAK must also have START"
    if flags & CUT and not flags & BREAK:
        return "a row with CUT must also have BREAK"
    return ""


def pair_problem(before: int, after: int, final_follows: bool) -> str:
    """Return the rule that a row's flags break after the row before, or ''."""
    if after & FINAL:
        return "" if before & END else "a final row must follow an episode's end"
    if before & FINAL:
        return "" if after & START else "the row after a final row must have START"
    if before & END:
        if final_follows:
            # A resumed writer cannot know the final observation any more.
            legal = "the row after an end must have FINAL or START|BREAK"
            return "" if after & BREAK else legal
        return "" if after & START else "the row after an end must have FINAL or START"
    if after & START and not after & BREAK:
        return "a row with START must follow an episode's end or also have BREAK"
    return ""

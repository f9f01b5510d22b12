"""What benchmarks printed, as the tables of docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.bench.turns import rounded

Group = tuple[tuple[str, ...], dict[str, Any]]
"""Where in a result figures stand, and the figures there, by name."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure is held to.

    Attributes:
        question: In words.
        script: Whose result it is in.
        path: Keys from the result's root to the figure; the last may be ``*``, the
            worst of all figures there.
        bound: What it is compared with.
        is_minimum: Whether it is to be at least that, or at most.
    """

    question: str
    script: str
    path: tuple[str, ...]
    bound: float
    is_minimum: bool = True

    def figure(self, results: Mapping[str, Any]) -> float | None:
        """The figure, or None where it was not measured."""
        place = results.get(self.script, {}).get("result", {})
        for key in self.path:
            if not isinstance(place, Mapping):
                return None
            if key == "*":
                figures = [v for v in place.values() if isinstance(v, int | float)]
                worst = min if self.is_minimum else max
                return worst(figures) if figures else None
            place = place.get(key)
        return place if isinstance(place, int | float) else None

    def row(self, results: Mapping[str, Any]) -> str:
        """A line of the table of targets."""
        figure = self.figure(results)
        bound = f"at {'least' if self.is_minimum else 'most'} {self.bound:g}"
        if figure is None:
            return f"| {self.question} | `{self.script}` | not measured | {bound} | |"
        met = figure >= self.bound if self.is_minimum else figure <= self.bound
        told = "met" if met else "**missed**"
        return f"| {self.question} | `{self.script}` | {figure:g} | {bound} | {told} |"


def groups(result: Any, path: tuple[str, ...] = ()) -> Iterator[Group]:
    """Every group of figures in a result, outermost first."""
    if isinstance(result, list):
        result = {str(number): item for number, item in enumerate(result)}
    inner = {k: v for k, v in result.items() if isinstance(v, dict | list)}
    figures = {k: v for k, v in result.items() if k not in inner and v is not None}
    if figures:
        yield path, figures
    for name, value in inner.items():
        yield from groups(value, (*path, name))


def table(record: Mapping[str, Any]) -> list[str]:
    """Lines of one script's table: where, and what each side or name has there."""
    lines = ["| | |", "|---|---|"]
    for path, figures in groups(record["result"]):
        where = ", ".join(words(part) for part in path) or "in all"
        told = ", ".join(f"{words(n)} **{figure(v)}**" for n, v in figures.items())
        lines.append(f"| {where} | {told} |")
    return lines


def words(name: str) -> str:
    """A key as it reads: ``mb_per_s`` stays a unit, the rest is words."""
    for unit, said in (("mb_per_s", "MB/s"), ("median_us", "median µs")):
        name = name.replace(unit, said)
    return name.replace("_", " ")


def figure(value: Any) -> str:
    """A figure as it is printed: floats to three digits, thousands with commas."""
    if isinstance(value, float):
        shown = rounded(value)
        return f"{int(shown):,}" if abs(shown) >= 1000 else f"{shown:g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def targets(results: Mapping[str, Any], those: tuple[Target, ...]) -> list[str]:
    """Lines of the table of targets."""
    head = ["| question | script | found | target | |", "|---|---|---|---|---|"]
    return [*head, *(target.row(results) for target in those)]


def with_block(text: str, name: str, lines: list[str]) -> str:
    """A document with other lines between two markers; all else stays by hand.

    Args:
        text: The document.
        name: Of the markers, ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``.
        lines: What goes between.

    Returns:
        The document; with the markers and the lines at its end where it has none.

    Raises:
        ValueError: One of the markers stands alone, or twice.
    """
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    whole = "\n".join([begin, "", *lines, "", end])
    counts = text.count(begin), text.count(end)
    if counts == (0, 0):
        return f"{text.rstrip()}\n\n{whole}\n"
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(
            f"{begin} must be there once, and {end} once after it, got {counts[0]} "
            f"and {counts[1]}. Correct the document by hand."
        )
    before, after = text.split(begin)[0], text.split(end)[1]
    return before + whole + after

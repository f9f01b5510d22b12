"""``mmreplay stats``: what the data looks like."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mmreplay.cli import show
from mmreplay.cli.info import summary
from mmreplay.cli.options import BufferPath, Json

if TYPE_CHECKING:
    from mmreplay.schema import Field
    from mmreplay.stats import EpisodeTable, Moments


def stats(path: BufferPath, json: Json = False) -> None:
    """Print each field's range, mean and spread, and the returns of all episodes."""
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.stats import summarize

    with ReplayBuffer.open(path) as buffer:
        with show.waiting("reading") as progress:
            moments, episodes = summarize(buffer, progress=progress)
        fields = buffer.schema.drawn.fields
        index = buffer.episodes
        counts = {
            "rows": int(buffer.span.lengths.sum()),
            "rows_left_out": buffer.count_left_out(),
            "steps": len(buffer),
            "legal_starts": index.num_legal,
            "legal_starts_without_next": index.num_steps,
        }
    if json:
        show.print_json(_facts(counts, moments, episodes))
    else:
        rows = [_row(each, fields[each], found) for each, found in moments.items()]
        _print(str(path), counts, rows, episodes)


def _facts(
    counts: dict[str, int], moments: dict[str, Moments], episodes: EpisodeTable
) -> dict[str, Any]:
    whole = episodes.pick(episodes.whole)
    names = ("env_ids", "begin", "lengths", "returns", "headless", "running", "broken")
    return {
        **counts,
        "fields": {p: {**asdict(m), "std": m.std} for p, m in moments.items()},
        "returns": summary(whole.returns),
        "lengths": summary(whole.lengths),
        "episodes": {name: getattr(episodes, name) for name in names},
    }


def _row(path: str, field: Field, moments: Moments) -> list[str]:
    """The cells of a field: of text and bytes what is known of their lengths."""
    number, rules = show.number, field.rules
    limits = [moments.min, moments.max, moments.mean]
    cells = [number(each) for each in limits]
    if rules.numeric and moments.count:
        cells = [rules.label(field, each) or text for each, text in zip(limits, cells, strict=True)]
    name = path if rules.numeric else f"{path} (its bytes)"
    return [
        name,
        *cells,
        number(moments.std),
        show.count(moments.count),
        show.count(moments.nonfinite),
    ]


def _print(
    name: str, counts: dict[str, int], fields: list[list[str]], episodes: EpisodeTable
) -> None:
    number = show.number
    titles = ["field", "min", "max", "mean", "std", "elements", "not finite"]
    show.print_table(titles, fields)
    whole = episodes.pick(episodes.whole)
    rows = []
    for what, values in (("return", whole.returns), ("length", whole.lengths)):
        numbers = summary(values) or {}
        cells = [number(numbers.get(n)) for n in ("min", "max", "mean", "std")]
        rows.append([what, *cells, show.count(numbers.get("count", 0))])
    show.print_table(["", "min", "max", "mean", "std", "whole episodes"], rows)
    unfinished, lacking = int(episodes.running.sum()), int(episodes.headless.sum())
    broken = int(episodes.broken.sum())
    broken_text = f", {show.count(broken)} interrupted" if broken else ""
    show.print_facts(
        name,
        [
            ("steps", show.count(counts["steps"])),
            ("legal starts", show.starts(counts)),
            (
                "left out",
                f"{show.count(counts['rows_left_out'])} of "
                f"{show.count(counts['rows'])} rows, by a uniform sampler",
            ),
            (
                "episodes",
                f"{show.count(len(episodes))}, of them "
                f"{show.count(unfinished)} unfinished{broken_text} and "
                f"{show.count(lacking)} without their first steps, which the "
                "table above leaves out",
            ),
        ],
    )

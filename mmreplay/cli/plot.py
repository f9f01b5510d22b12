"""``mmreplay plot``: episodes over time and histograms, as a PNG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmreplay.cli import show
from mmreplay.cli.options import BufferPath, Json, parse_path, usage_error
from mmreplay.errors import EmptyError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.stats import EpisodeTable

INCHES, DPI = (12.0, 8.0), 100
BINS = 60
SMOOTHED = 20
POINT_SIZE, CROWD = 22, 2000
LABELLED = 12
POINT, LINE, BARS, OTHER = "#9ecae1", "#08519c", "#4292c6", "#756bb1"


@dataclass(frozen=True, slots=True)
class Counts:
    """A histogram and the words around it."""

    path: str
    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    whole: bool
    unit: str


def plot(
    path: BufferPath,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", parser=parse_path, metavar="FILE", show_default=False,
            help="The PNG; the buffer's name and .png, here, by default.",
        ),
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Draw episode returns and lengths over time, and action and reward histograms."""
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.stats import episode_table

    with ReplayBuffer.open(path) as buffer:
        if len(buffer) == 0:
            raise EmptyError(
                f"{path} holds no steps, expected some to draw; record some first"
            )
        figure_of = _figure_maker()
        target = output or Path(f"{buffer.path.name if buffer.path else 'buffer'}.png")
        _check(target)
        with show.waiting("episodes") as progress:
            table = episode_table(buffer, progress)
        found = [_counts(buffer, role) for role in ("action", "reward")]
        figure = draw(figure_of, buffer, table, found)
    figure.savefig(target)
    if json:
        show.print_json({"file": str(target), "episodes": len(table)})
    else:
        count = int(table.whole.sum())
        left = len(table) - count
        told = f"; {show.count(left)} cut or running left out" if left else ""
        show.print_line(f"{target}: {show.plural(count, 'whole episode')} drawn{told}")


def _check(target: Path) -> None:
    """Refuse a place that cannot take a file, before minutes of reading."""
    if target.suffix.lower() != ".png":
        raise usage_error(f"--output: got {target}, expected a name in .png")
    if target.is_dir() or not target.parent.is_dir():
        raise usage_error(
            f"--output: got {target}, expected a file in a folder that exists"
        )


def _figure_maker() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot: got no matplotlib, expected it installed; "
            "pip install 'mmreplay[plot]'"
        ) from error
    return Figure


def _counts(buffer: ReplayBuffer, role: str) -> Counts | None:
    """The histogram of the first field that plays a role."""
    from mmreplay.stats import histogram

    paths = buffer.schema.role_paths(role)
    if not paths:
        return None
    with show.waiting(role) as progress:
        counts, edges = histogram(buffer, paths[0], BINS, progress)
    field = buffer.schema[paths[0]]
    whole = field.numpy.kind in "iub" and field.dtype != "bfloat16"
    unit = "elements" if field.shape else "steps"
    return Counts(paths[0], counts, edges, whole, unit)


def draw(
    figure_of: type[Figure],
    buffer: ReplayBuffer,
    table: EpisodeTable,
    found: list[Counts | None],
) -> Figure:
    """Make the figure: two panels over time, two histograms."""
    import numpy as np

    figure = figure_of(figsize=INCHES, dpi=DPI, layout="constrained")
    panels = figure.subplots(2, 2)
    whole = table.pick(table.whole)
    whole = whole.pick(np.argsort(whole.end, kind="stable"))
    left_out = len(table) - len(whole)
    note = f"{show.plural(len(whole), 'whole episode')}"
    if left_out:
        note += f"; {show.count(left_out)} cut or running left out"
    name = buffer.path.name if buffer.path else "buffer"
    figure.suptitle(
        f"{name}: {show.plural(len(buffer), 'step')} of "
        f"{show.plural(buffer.num_envs, 'environment')}, {note}",
        fontsize=14, fontweight="bold",
    )  # fmt: skip
    series(
        panels[0, 0], whole, whole.returns, "Episode returns", "return (sum of rewards)"
    )
    series(panels[0, 1], whole, whole.lengths, "Episode lengths", "length (steps)")
    bars(panels[1, 0], found[0], "Actions", BARS)
    bars(panels[1, 1], found[1], "Rewards", OTHER)
    return figure


def series(
    axes: Axes, table: EpisodeTable, values: Any, title: str, label: str
) -> None:
    """Draw one value of each episode by the position of its end."""
    import numpy as np

    values = np.asarray(values, np.float64)
    _tidy(axes, title)
    axes.set_ylabel(label)
    axes.set_xlabel("position of the episode's end (rows of its environment)")
    if len(values) == 0 or np.isnan(values).all():
        _nothing(axes, "no whole episode" if len(values) == 0 else "no scalar reward")
        return
    axes.scatter(
        table.end,
        values,
        s=POINT_SIZE if len(values) < CROWD else POINT_SIZE / 4,
        color=POINT,
        label="one episode",
        zorder=2,
    )
    # Longer over many episodes, or the line is as restless as the points.
    window = min(max(SMOOTHED, len(values) // 50), len(values) // 3)
    if window > 1:
        mean = np.convolve(values, np.full(window, 1 / window), "valid")
        axes.plot(
            table.end[window - 1 :], mean, color=LINE, linewidth=2, zorder=3,
            label=f"mean of {show.count(window)} episodes",
        )  # fmt: skip
    # Beside the title, where it hides no episode.
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, frameon=False,
        borderaxespad=0.2,
    )  # fmt: skip


def bars(axes: Axes, found: Counts | None, title: str, color: str) -> None:
    """Draw a histogram; on a logarithmic scale where one value dwarfs the rest."""
    _tidy(axes, title)
    if found is None or found.counts.sum() == 0:
        _nothing(axes, "no such field" if found is None else "no finite value")
        return
    filled = found.counts > 0
    log = bool(found.counts.max() > 100 * found.counts[filled].min())
    centres = (found.edges[:-1] + found.edges[1:]) / 2
    width = found.edges[1] - found.edges[0]
    if filled.sum() <= LABELLED:
        # A few values: bars that can be seen and counted.
        centres, counts = centres[filled], found.counts[filled]
        width = max(width, (found.edges[-1] - found.edges[0]) / 30) * 0.8
        drawn = axes.bar(centres, counts, width=width, color=color, zorder=2)
        axes.bar_label(drawn, [show.count(n) for n in counts], padding=2)
        # Room for the numbers; a lone bar should not look like a wall.
        axes.margins(x=1.0 if len(counts) == 1 else 0.05, y=0.12)
    else:
        axes.bar(centres, found.counts, width=width, color=color, zorder=2)
    if found.whole and len(found.counts) <= BINS // 2:
        axes.set_xticks((found.edges[:-1] + found.edges[1:]) / 2)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(f"value of {found.path}")
    axes.set_ylabel(found.unit + (" (log scale)" if log else ""))


def _tidy(axes: Axes, title: str) -> None:
    from matplotlib.ticker import StrMethodFormatter

    axes.set_title(title, loc="left", fontweight="bold")
    axes.grid(True, color="#e5e5e5", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(StrMethodFormatter("{x:,.12g}"))


def _nothing(axes: Axes, why: str) -> None:
    axes.text(
        0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="#777"
    )

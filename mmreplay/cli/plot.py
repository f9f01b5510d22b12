"""``mmreplay plot``: episodes over time and histograms, as a PNG."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmreplay.cli import show
from mmreplay.cli.options import BufferPath, Json, parse_path, usage_error
from mmreplay.disk import files
from mmreplay.errors import EmptyError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.schema import Field
    from mmreplay.stats import EpisodeTable, Moments

INCHES, DPI = (12.0, 8.0), 100
BINS = 60
CROWD = 2000
MOST_POINTS = 1000
"""Across and up: more of them than pixels hide each other."""
AXES_WIDTH, DIGIT_WIDTH = 460, 9
"""In pixels: of a panel at least, and of a digit at most."""
LONGEST_NAME = 80
LABELLED = 12
POINT, LINE, BARS, OTHER = "#9ecae1", "#08519c", "#4292c6", "#756bb1"


@dataclass(frozen=True, slots=True)
class Counts:
    """A histogram and the words around it."""

    path: str
    counts: NDArray[np.int64]
    edges: NDArray[np.float64]
    integers: bool
    unit: str

    @classmethod
    def of(
        cls,
        field: Field,
        path: str,
        moments: Moments,
        counts: NDArray[np.int64],
        edges: NDArray[np.float64],
    ) -> Counts:
        """Name what was counted of a field."""
        unit = "elements" if field.shape else "steps"
        return cls(path, counts, edges, moments.whole, unit)


def plot(
    path: BufferPath,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=parse_path,
            metavar="FILE",
            show_default=False,
            help="The PNG; by default the buffer's name and .png, in the current "
            "folder. Missing folders are made.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Draw episode returns and lengths over time, and action and reward histograms."""
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.stats import histograms, summarize

    with ReplayBuffer.open(path) as buffer:
        if len(buffer) == 0:
            raise EmptyError(f"{path} holds no steps to draw. Record some first.")
        figure_of = _figure_maker()
        target = output or Path(f"{buffer.path.name if buffer.path else 'buffer'}.png")
        _check(target)
        # The first field that plays each role.
        roles = [buffer.schema.role_paths(role)[:1] for role in ("action", "reward")]
        paths = tuple(dict.fromkeys(path for role in roles for path in role))
        with show.waiting("reading") as progress:
            moments, table = summarize(buffer, paths, progress)
        with show.waiting("counting") as progress:
            counted = histograms(buffer, moments, BINS, progress)
        panels_counts = [
            Counts.of(buffer.schema.drawn[role[0]], role[0], moments[role[0]], *counted[role[0]])
            if role
            else None
            for role in roles
        ]
        figure = draw(figure_of, buffer, table, panels_counts)
    for folder in reversed(target.absolute().parents):
        if not folder.exists():
            files.make_folder(folder, exist_ok=True)
    figure.savefig(target)
    if json:
        show.print_json({"file": str(target), "episodes": len(table)})
    else:
        count = int(table.whole.sum())
        left = len(table) - count
        left_out = f"; {show.count(left)} truncated or unfinished left out" if left else ""
        show.print_line(f"{target}: {show.plural(count, 'whole episode')} drawn{left_out}")


def _check(target: Path) -> None:
    """Refuse a place that cannot take a file, before minutes of reading."""
    if target.suffix.lower() != ".png":
        raise usage_error(f"--output must be a name that ends in .png, got {target}")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if target.is_dir() or not above.is_dir():
        in_way = target if target.is_dir() else above
        kind = "a folder" if target.is_dir() else "no folder"
        raise usage_error(f"--output must be a file to make, got {target}: {in_way} is {kind}")


def _figure_maker() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plot needs matplotlib, which is not installed. Run pip install 'mmreplay[plot]'."
        ) from error
    return Figure


def draw(
    figure_of: type[Figure],
    buffer: ReplayBuffer,
    table: EpisodeTable,
    histograms: list[Counts | None],
) -> Figure:
    """Make the figure: two panels over time, two histograms."""
    import numpy as np

    from mmreplay.stats import reward_field

    figure = figure_of(figsize=INCHES, dpi=DPI, layout="constrained")
    panels = figure.subplots(2, 2)
    whole = table.pick(table.whole)
    whole = whole.pick(np.argsort(whole.end, kind="stable"))
    left_out = len(table) - len(whole)
    note = f"{show.plural(len(whole), 'whole episode')}"
    if left_out:
        note += f"; {show.count(left_out)} truncated or unfinished left out"
    name = show.printable(buffer.path.name if buffer.path else "buffer")
    if len(name) > LONGEST_NAME:
        name = f"{name[: LONGEST_NAME - 1]}…"
    figure.suptitle(
        f"{name}\n{show.plural(len(buffer), 'step')} of "
        f"{show.plural(buffer.num_envs, 'environment')}, {note}",
        fontsize=13,
        fontweight="bold",
        parse_math=False,
    )
    missing = "no scalar reward" if reward_field(buffer) is None else "rewards are NaN"
    series(
        panels[0, 0], whole, whole.returns, missing, "Episode returns", "return (sum of rewards)"
    )
    series(panels[0, 1], whole, whole.lengths, "", "Episode lengths", "length (steps)")
    bars(panels[1, 0], histograms[0], "Actions", BARS)
    bars(panels[1, 1], histograms[1], "Rewards", OTHER)
    return figure


def series(
    axes: Axes, table: EpisodeTable, values: Any, missing: str, title: str, label: str
) -> None:
    """Draw one value of each episode by the position of its end.

    Args:
        axes: Of the panel.
        table: Complete episodes.
        values: A value of each.
        missing: What the panel says where all values are NaN.
        title: Of the panel.
        label: Of the values.
    """
    import numpy as np

    from mmreplay.episodes.smoothing import moving_mean, smoothing_window

    values = np.asarray(values, np.float64)
    # Above the legend, which hides no episode and no title there.
    _tidy(axes, title, pad=24)
    axes.set_ylabel(label)
    axes.set_xlabel("position of the episode's end (rows of its environment)")
    known = np.isfinite(values)
    end, values = table.end[known], values[known]
    if len(values) == 0:
        _nothing(axes, missing if known.size else "no complete episode")
        return
    crowd = len(values) >= CROWD
    shown = _apart(end, values) if crowd else np.arange(len(values))
    axes.plot(
        end[shown],
        values[shown],
        "o",
        color=POINT,
        label="one episode",
        zorder=2,
        markersize=2.5 if crowd else 5,
        markeredgewidth=0,
    )
    window = smoothing_window(len(values))
    if window > 1:
        mean = moving_mean(values, window)
        few = slice(None, None, -(-len(mean) // MOST_POINTS))
        axes.plot(
            end[window - 1 :][few],
            mean[few],
            color=LINE,
            linewidth=2,
            zorder=3,
            label=f"mean of {show.count(window)} episodes",
        )
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=2,
        frameon=False,
        borderaxespad=0.2,
        borderpad=0.0,
        fontsize=9,
        markerscale=2 if crowd else 1,
    )
    low, high = axes.get_xlim() if end.min() < end.max() else (end[0], end[0])
    _tick_x(axes, low, high, integers=True)
    if values.min() == values.max():
        axes.set_yticks([values[0]])


def _apart(x: NDArray[np.int64], y: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which points to draw of many: one of those that would hide each other."""
    import numpy as np

    across = (x - x.min()) / max(1, int(x.max() - x.min())) * MOST_POINTS
    spread = float(y.max() - y.min())
    up = (y - y.min()) / spread * MOST_POINTS if 0 < spread < np.inf else 0 * y
    places = across.astype(np.int64) * (MOST_POINTS + 1) + up.astype(np.int64)
    return np.unique(places, return_index=True)[1]


def bars(axes: Axes, values: Counts | None, title: str, color: str) -> None:
    """Draw a histogram; on a logarithmic scale where one value dwarfs the rest."""
    import numpy as np

    _tidy(axes, title)
    if values is None or values.counts.sum() == 0:
        _nothing(axes, "no such field" if values is None else "no finite value")
        return
    filled = values.counts > 0
    log = bool(values.counts.max() > 100 * values.counts[filled].min())
    centres = (values.edges[:-1] + values.edges[1:]) / 2
    width = values.edges[1] - values.edges[0]
    low, high = values.edges[0], values.edges[-1]
    if filled.sum() <= LABELLED:
        # A few values: bars that can be seen and counted.
        centres, counts = centres[filled], values.counts[filled]
        width = max(width, (high - low) / 30) * 0.8
        drawn = axes.bar(centres, counts, width=width, color=color, zorder=2)
        # For half a number; and a lone bar should not look like a wall.
        margin = (1.0 if len(counts) == 1 else 0.1) * (high - low)
        low, high = low - margin, high + margin
        gap = np.diff(centres).min(initial=high - low) / (high - low) * AXES_WIDTH
        for spell in (show.count, _tick):
            labels = [spell(n) for n in counts]
            if max(map(len, labels)) * DIGIT_WIDTH < gap:
                axes.bar_label(drawn, labels, padding=2)
                break
        axes.margins(y=0.12)  # for the numbers
    else:
        axes.bar(centres, values.counts, width=width, color=color, zorder=2)
    axes.set_xlim(low, high)
    if filled.sum() == 1:
        axes.set_xticks([centres[0] if len(centres) == 1 else centres[filled][0]])
    else:
        _tick_x(axes, low, high, integers=values.integers)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel(f"value of {show.printable(values.path)}", parse_math=False)
    axes.set_ylabel(values.unit + (" (log scale)" if log else ""))


def _tick_x(axes: Axes, low: float, high: float, integers: bool) -> None:
    """Set as many ticks as there is room for their labels.

    Args:
        axes: Where.
        low: The least value.
        high: The largest; a tick of its own where it is the least.
        integers: Integers only.
    """
    from matplotlib.ticker import MaxNLocator

    if low == high:
        axes.set_xticks([low])
        return
    for number in range(10, 0, -1):
        ticks = MaxNLocator(number, steps=[1, 2, 2.5, 5, 10], integer=integers).tick_values(
            low, high
        )
        ticks = [tick for tick in ticks if low <= tick <= high]
        widest = max((len(_tick(tick)) for tick in ticks), default=0)
        if (widest + 1) * DIGIT_WIDTH * len(ticks) < AXES_WIDTH:
            break
    axes.set_xticks(ticks)


def _tick(value: float, _: int = 0) -> str:
    """A number on an axis: 1,200,000 is 1.2M, where that is exact."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        short = f"{value / unit:.4g}"
        if 1 <= abs(value) / unit < 1000 and abs(float(short) * unit - value) < 1e-3:
            return short + letter
    return f"{value:,.12g}"


def _tidy(axes: Axes, title: str, pad: float = 6) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.set_title(title, loc="left", fontweight="bold", pad=pad)
    axes.grid(True, color="#e5e5e5", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(_tick))


def _nothing(axes: Axes, why: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color="#777")

"""Plots of any size are legible: no label lies on another one."""

from itertools import combinations

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.cli import plot
from mmreplay.cli.plot import BINS, Counts
from mmreplay.stats import EpisodeTable, count_values, edges_of, moments_of

figures = pytest.importorskip("matplotlib.figure")
texts = pytest.importorskip("matplotlib.text")
backend = pytest.importorskip("matplotlib.backends.backend_agg")

FLOAT, INTEGER = mr.Field((), "float64"), mr.Field((), "int64")


def table_of(ends, returns):
    """Whole episodes of one environment."""
    ends = np.asarray(ends, np.int64)
    count, no = len(ends), np.zeros(len(ends), bool)
    begin = np.concatenate([[0], ends[:-1]])[:count]
    return EpisodeTable(
        np.zeros(count, np.int64),
        begin,
        ends,
        ends - begin,
        np.asarray(returns, np.float64),
        no,
        no,
        no,
    )


def counts_of(values, field, path="value", times=1):
    values = np.asarray(values, field.numpy)
    moments = moments_of(values)
    edges = edges_of(moments, field, BINS)
    counts = times * count_values(values, moments, edges)
    return Counts.of(field, path, moments, counts, edges)


def drawn(tmp_path, table, actions, rewards, name="b"):
    """The figure, rendered, and every text on it that is seen."""
    schema = mr.Schema({"reward": FLOAT})
    with mr.ReplayBuffer.create(tmp_path / name, schema, 5) as buffer:
        figure = plot.draw(figures.Figure, buffer, table, [actions, rewards])
    canvas = backend.FigureCanvasAgg(figure)
    canvas.draw()
    hidden = {
        id(text)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        if not inside(tick.get_loc(), axis.get_view_interval())
        for text in tick.findobj(texts.Text)
    }
    return figure, [
        text
        for text in figure.findobj(texts.Text)
        if text.get_text() and text.get_visible() and id(text) not in hidden
    ]


def inside(tick, limits):
    """Whether a tick is drawn: those beyond the limits are there, and hidden."""
    return min(limits) <= tick <= max(limits)


def check(figure, labels):
    boxes = [(text.get_text(), text.get_window_extent()) for text in labels]
    assert len(boxes) > 8
    for name, box in boxes:
        assert box.x0 >= -1, name
        assert box.x1 <= figure.bbox.x1 + 1, name
    for (one, here), (other, there) in combinations(boxes, 2):
        over = min(here.x1, there.x1) - max(here.x0, there.x0)
        tall = min(here.y1, there.y1) - max(here.y0, there.y0)
        assert not (over > 0.5 and tall > 2), (one, other)


def many(count, last):
    rng = np.random.default_rng(0)
    ends = np.unique(rng.integers(1, last, count))
    return table_of(ends, rng.exponential(20.0, len(ends)))


CASES = {
    "ten million steps": (
        lambda: many(50_000, 1_250_000),
        lambda: counts_of([0, 1], INTEGER, times=5_001_538),
        lambda: counts_of([1.0], FLOAT, times=10_000_000),
    ),
    "a billion steps": (
        lambda: many(1000, 1_000_000_000),
        lambda: counts_of(range(12), INTEGER, times=83_333_333),
        lambda: counts_of([-1.0, 0.0, 1.0], FLOAT, times=333_333_333),
    ),
    "one step": (
        lambda: table_of([1], [1.0]),
        lambda: counts_of([0], INTEGER),
        lambda: counts_of([1.0], FLOAT),
    ),
    "values side by side": (
        lambda: table_of([3, 9, 12], [1e9, -2.5, 0.125]),
        lambda: counts_of([0, 1, 2, 59], INTEGER, times=1_234_567),
        lambda: counts_of([0.0, 0.0, 0.02, 1.0], FLOAT, times=1_234_567),
    ),
    "many numbers of four digits": (
        lambda: many(3000, 30_000),
        lambda: counts_of(range(1000, 1030), INTEGER),
        lambda: counts_of(np.linspace(-1e-6, 1e-6, 500), FLOAT),
    ),
    "far from zero": (
        lambda: table_of([1, 2, 3], [1e12 + 1, 1e12 + 2, 1e12 + 3]),
        lambda: counts_of(np.arange(0, 10**15, 10**13), INTEGER),
        lambda: counts_of(np.linspace(1e9, 1e9 + 1, 500), FLOAT),
    ),
    "one value dwarfs the rest": (
        lambda: many(100, 1000),
        lambda: counts_of([0] * 100_000 + [1], INTEGER, times=100),
        lambda: counts_of(np.r_[np.zeros(10**5), np.arange(50.0)], FLOAT),
    ),
    "nothing": (lambda: table_of([], []), lambda: None, lambda: None),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sliced(2)
def test_no_label_lies_on_another_one(tmp_path, case):
    made = [make() for make in CASES[case]]
    check(*drawn(tmp_path, *made))


def ticks(axis):
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_ticklocs() if low <= tick <= high]


def test_a_single_value_has_one_tick(tmp_path):
    made = [make() for make in CASES["one step"]]
    figure, _ = drawn(tmp_path, *made)
    returns, lengths, actions, rewards = figure.axes
    for axes, position, value in ((returns, 1, 1), (lengths, 1, 1)):
        assert ticks(axes.xaxis) == [position]
        assert ticks(axes.yaxis) == [value]
    assert ticks(actions.xaxis) == [0]
    assert ticks(rewards.xaxis) == [1]


@pytest.mark.parametrize("field", [FLOAT, INTEGER])
@pytest.mark.parametrize(("count", "width"), [(7, 1), (30, 1), (170, 3)])
@pytest.mark.sliced(2)
def test_bars_of_whole_numbers_stand_over_their_ticks(tmp_path, field, count, width):
    values = counts_of(np.arange(count), field)
    figure, _ = drawn(tmp_path, table_of([], []), None, values)
    axes = figure.axes[3]
    centres = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
    assert np.array(centres) == pytest.approx(np.arange(0, count, width) + width // 2)
    assert all(tick == int(tick) for tick in ticks(axes.xaxis))
    # No pattern: as many numbers in each bar, but for the last one.
    assert {bar.get_height() for bar in axes.patches[:-1]} == {width}


def test_a_point_that_would_be_hidden_is_not_drawn(tmp_path):
    table = many(200_000, 10_000_000)
    figure, _ = drawn(tmp_path, table, None, None)
    points = figure.axes[0].lines[0].get_xydata()
    assert len(points) < 0.7 * len(table)
    # No episode is further from a point than a pixel.
    across, up = np.ptp(table.end) / 1000, np.ptp(table.returns) / 1000
    places = {(int(x // across), int(y // up)) for x, y in points}
    for x, y in zip(table.end[::997], table.returns[::997], strict=True):
        here = int(x // across), int(y // up)
        assert any((here[0] + i, here[1] + j) in places for i in (-1, 0, 1) for j in (-1, 0, 1))


def test_the_mean_line_is_that_of_the_last_episodes(tmp_path):
    rng = np.random.default_rng(0)
    returns = 1e9 + rng.normal(size=300)
    figure, _ = drawn(tmp_path, table_of(np.arange(1, 301), returns), None, None)
    line = figure.axes[0].lines[1].get_xydata()
    window = 20
    expected = np.convolve(returns, np.full(window, 1 / window), "valid")
    assert line[:, 0].tolist() == list(range(window, 301))
    np.testing.assert_allclose(line[:, 1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (800_000, "800,000"),
        (1_200_000, "1.2M"),
        (-5e6, "-5M"),
        (2e9, "2G"),
        (1e12, "1T"),
        (1_234_567, "1,234,567"),
        (0.5, "0.5"),
        (1e-6, "1e-06"),
        (1e9 + 0.5, "1,000,000,000.5"),
    ],
)
def test_numbers_on_axes_are_short_where_that_is_exact(value, text):
    assert plot._tick(value) == text


def test_names_are_printed_unchanged(tmp_path):
    """Dollar signs would begin a formula; a long name would leave the picture."""
    made = [make() for make in CASES["one step"]]
    figure, found = drawn(tmp_path, *made, name="a$b$" + 100 * "x")
    check(figure, found)
    assert figure.get_suptitle().startswith("a$b$xxx")
    rewards = counts_of([1.0], FLOAT, path="r$x$")
    figure, found = drawn(tmp_path, made[0], None, rewards)
    assert "value of r$x$" in [text.get_text() for text in found]
    assert not any(text.get_parse_math() for text in found if "$" in text.get_text())


@pytest.mark.parametrize(
    ("field", "why"), [(FLOAT, "rewards are NaN"), (mr.Field((2,), "float64"), "no scalar reward")]
)
def test_a_panel_without_returns_says_why(tmp_path, field, why):
    table = table_of([5, 9], [np.nan, np.nan])
    with mr.ReplayBuffer.create(tmp_path / "b", mr.Schema({"reward": field}), 5) as b:
        figure = plot.draw(figures.Figure, b, table, [None, None])
    shown = {text.get_text() for text in figure.axes[0].texts}
    assert shown == {why}


def test_missing_folders_are_made_as_convert_makes_them(cli, path, tmp_path):
    places = [tmp_path / "a" / "b" / "x.png", tmp_path / "c" / "d" / "x.npz"]
    assert cli("plot", path, "--output", places[0])[0] == 0
    assert cli("convert", path, places[1])[0] == 0
    for place in places:
        assert place.is_file()


@pytest.mark.parametrize(("inside", "reported"), [("", "is a folder"), ("x.png", "is no folder")])
def test_a_path_that_takes_no_file_is_refused_before_reading(cli, path, tmp_path, inside, reported):
    taken = tmp_path / "taken.png"
    if inside:
        taken.write_text("")
    else:
        taken.mkdir()
    code, _, err = cli("plot", path, "--output", taken / inside)
    assert code == 2
    assert f"--output must be a file to make, got {taken / inside}: {taken} {reported}" in err

"""One episode in a real browser: its curves, by hand and by numbers, and its player."""

import json
import re
import threading

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.api import Page
from mmreplay.page.saved import save_page
from tests.page.browser import needs_chromium
from tests.page.conftest import healthy_steps, make_buffer, schema, squeezed

pytestmark = [needs_chromium, pytest.mark.slow]

DATA = """
const [curve] = mmr.app.player.curves().filter((c) => c.title === arguments[0]);
const { x, lines, plain } = curve.data();
return { x, plain, names: lines.map((l) => l.name), mean: lines.map((l) => l.mean),
         lowest: lines.map((l) => l.lowest), highest: lines.map((l) => l.highest) };
"""


def curves_drawn(tab, number):
    tab.wait(
        f"return document.querySelectorAll('.curve .uplot').length === {number} && "
        f"mmr.app.player.curves().every((c) => c.data())"
    )


def floats(columns):
    """Columns of the page as numpy arrays; gaps are NaN."""
    return np.array(
        [[np.nan if value is None else value for value in column] for column in columns]
    )


STEPS = 1_000_000
UNKNOWN = (5, 77, 123_456)


@pytest.fixture(scope="module")
def long_episode(tmp_path_factory):
    """One episode of a million steps; some rewards are NaN."""
    path = tmp_path_factory.mktemp("long") / "run"
    rng = np.random.default_rng(0)
    fields = {
        "observation": mr.Field((4,), "float32"),
        "action": mr.Field((), "int64"),
        "reward": mr.Field((), "float32"),
    }
    values = {
        "observation": rng.normal(size=(STEPS, 4)).astype(np.float32),
        "action": rng.integers(0, 5, STEPS),
        "reward": rng.integers(0, 3, STEPS).astype(np.float32),
    }
    values["reward"][list(UNKNOWN)] = np.nan
    with mr.ReplayBuffer.create(path, mr.Schema(fields), STEPS) as buffer:
        for first in range(0, STEPS, 100_000):
            rows = slice(first, first + 100_000)
            buffer.extend({name: value[rows] for name, value in values.items()})
    return path, values


def test_each_bucket_is_what_numpy_computes(tab, serve, long_episode):
    path, values = long_episode
    tab.open(serve(path), "e=0:0")
    curves_drawn(tab, 3)
    for name, wanted in values.items():
        data = tab.run(DATA, name)
        wanted = wanted.reshape(STEPS, -1).astype(np.float64)
        edges = np.array(data["x"])
        buckets = len(edges)
        assert not data["plain"]
        assert 500 < buckets <= 4096
        np.testing.assert_array_equal(edges, np.arange(buckets) * STEPS // buckets)
        parts = np.split(wanted, edges[1:])
        lowest = np.array([np.nanmin(part, axis=0) for part in parts]).T
        highest = np.array([np.nanmax(part, axis=0) for part in parts]).T
        mean = np.array([np.nanmean(part, axis=0) for part in parts]).T
        np.testing.assert_array_equal(floats(data["lowest"]), lowest)
        np.testing.assert_array_equal(floats(data["highest"]), highest)
        # Means are computed in float64 and sent as float32.
        np.testing.assert_allclose(floats(data["mean"]), mean, rtol=1e-6, atol=1e-7)
    remark = tab.text('[data-curve="reward"] header .muted')
    assert remark.startswith("3 values not finite, drawn as gaps")
    assert "return not finite: 3 rewards" in tab.text(".title")
    # The cursor says the bucket, its mean, lowest and highest value.
    over = '[data-curve="observation"] .u-over'
    x, y, *_ = tab.center(over)
    tab.mouse("mouseMoved", x, y, 0)
    tip = tab.wait(
        "const t = document.querySelector('[data-tip=observation]');"
        "return t && !t.hidden && t.textContent"
    )
    steps, *lines = tip.split("\n")
    first, until = (int(n.replace(",", "")) for n in steps.split(":")[0].split(" to "))
    part = values["observation"][first : until + 1, 2].astype(np.float64)
    shown = [float(n) for n in lines[2].split(" ", 1)[1].replace(" to ", ", ").split(", ")]
    wanted = [part.mean(), part.min(), part.max()]
    np.testing.assert_allclose(shown, wanted, rtol=1e-3, atol=1e-3)
    assert tab.errors() == []


def test_the_last_steps_of_a_long_episode_are_seen_one_by_one(tab, serve, long_episode):
    path, values = long_episode
    tab.open(serve(path), "e=0:0")
    curves_drawn(tab, 3)
    tab.key("End")
    tab.wait("return document.querySelector('.time').textContent === '999,999 / 999,999'")
    for _ in range(12):
        tab.key("x")
    tab.wait("return mmr.app.player.curves().every((c) => c.data().plain)")
    data = tab.wait(
        "const { x, lines } = mmr.app.player.curves()[2].data();"
        "return x.at(-1) === 999999 && x.length < 1000 && lines.map((l) => l.mean)"
    )
    wanted = values["observation"][-len(data[0]) :].T
    np.testing.assert_array_equal(floats(data), wanted)
    action = values["action"][-1]
    tab.wait(f"return document.querySelector('[data-value=action]')?.textContent === '{action}'")


def test_nan_rewards_are_gaps(tab, serve, long_episode):
    path, values = long_episode
    tab.open(serve(path), f"e=0:0&t={UNKNOWN[1]}")
    curves_drawn(tab, 3)
    for _ in range(12):
        tab.key("x")
    data = tab.wait(
        "const { x, lines, plain } = mmr.app.player.curves()[0].data();"
        "return plain && x.length < 1000 && [x, lines[0].mean]"
    )
    steps, shown = data
    for step, value in zip(steps, shown, strict=True):
        wanted = values["reward"][step]
        assert value is None if np.isnan(wanted) else value == wanted
    assert shown[steps.index(UNKNOWN[1])] is None
    tab.wait("return document.querySelector('[data-value=reward]')?.textContent === 'not finite'")


def test_ten_thousand_components_are_paged(tab, serve, tmp_path, rng):
    actions = rng.normal(size=(60, 10_000)).astype(np.float32)
    fields = {"observation": mr.Field((), "float32"), "action": mr.Field((10_000,), "float32")}
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 100) as buffer:
        buffer.extend(observation=np.arange(60, dtype=np.float32), action=actions)
    tab.open(serve(tmp_path / "a"))
    assert "8 of 10,000 components" in tab.text("#actions .note")
    tab.go("e=0:0")
    curves_drawn(tab, 2)
    data = tab.run(DATA, "action")
    np.testing.assert_array_equal(floats(data["mean"]), actions[:, :8].T)
    tab.run("document.querySelector('[aria-label=\"Components after of action\"]').click()")
    tab.wait(
        "return document.querySelector('[data-curve=action] .pair').textContent"
        ".includes('8 to 15 of 10,000')"
    )
    data = tab.run(DATA, "action")
    assert data["names"] == [f"action[{i}]" for i in range(8, 16)]
    np.testing.assert_array_equal(floats(data["mean"]), actions[:, 8:16].T)
    assert tab.errors() == []


def test_curves_are_grouped_hidden_and_shown_by_hand(tab, serve, path, stored):
    tab.open(serve(path), "e=0:0")
    curves_drawn(tab, 3)
    choose = (
        "const s = document.querySelector('select[data-group=action]');"
        "s.value = 'observation/joints'; s.dispatchEvent(new Event('change'))"
    )
    tab.run(choose)
    tab.wait("return document.querySelectorAll('.curve .uplot').length === 2")
    together = "observation/joints + action"
    assert tab.texts(".curve h3") == ["reward", together]
    data = tab.wait(
        f"return mmr.app.player.curves()[1].title === '{together}' && (() =>"
        "{" + DATA.replace("arguments[0]", f"'{together}'") + "})()"
    )
    positions = np.arange(len(data["x"]))
    joints = stored.get_field("observation/joints", 0, positions)
    action = stored.get_field("action", 0, positions)
    wanted = np.concatenate([joints, action], axis=1).T
    np.testing.assert_array_equal(floats(data["mean"]), wanted)
    # One component is hidden: it leaves the tip, and comes back.
    hide = "document.querySelector('[aria-label=\"Show action[1]\"]').click()"
    tab.run(hide)
    pressed = "return document.querySelector('[aria-label=\"Show action[1]\"]').ariaPressed"
    assert tab.run(pressed) == "false"
    x, y, *_ = tab.center(f'[data-curve="{together}"] .u-over')
    tab.mouse("mouseMoved", x, y, 0)
    tip = tab.wait(
        f"const t = document.querySelector('[data-tip=\"{together}\"]');"
        "return !t.hidden && t.textContent"
    )
    assert "action[0]" in tip
    assert "action[1]" not in tip
    tab.run(hide)
    assert tab.run(pressed) == "true"
    # A whole field is switched off. The next episode is arranged alike.
    tab.run("document.querySelector('[aria-label=\"Show reward\"]').click()")
    tab.wait("return document.querySelectorAll('.curve').length === 1")
    tab.key("n")
    tab.wait("return location.hash.startsWith('#e=0:3')")
    curves_drawn(tab, 1)
    assert tab.texts(".curve h3") == [together]
    tab.run("document.querySelector('button[data-group]').click()")
    tab.run("document.querySelector('[aria-label=\"Show reward\"]').click()")
    curves_drawn(tab, 3)
    assert sorted(tab.texts(".curve h3")) == ["action", "observation/joints", "reward"]
    assert tab.errors() == []


def scales(tab):
    return tab.run(
        "return [...document.querySelectorAll('.curve')].map((c, i) => "
        "mmr.app.player.curves()[i].scale())"
    )


def test_a_drag_zooms_all_curves_and_a_click_moves_the_playhead(tab, serve, path):
    tab.open(serve(path), "e=0:0")
    curves_drawn(tab, 3)
    assert scales(tab) == [[0, 29]] * 3
    tab.drag('[data-curve="action"] .u-over', 0.4, 0.7)
    tab.wait("return mmr.app.player.curves()[0].scale()[0] > 5")
    [zoomed] = {tuple(scale) for scale in scales(tab)}
    assert zoomed == pytest.approx((0.4 * 29, 0.7 * 29), abs=2)
    x, y, *_ = tab.center('[data-curve="reward"] .u-over')
    tab.click(x, y)
    middle = round(sum(zoomed) / 2)
    tab.wait(
        "const n = Number(document.querySelector('.time').textContent.split(' ')[0]);"
        f"return Math.abs(n - {middle}) <= 1"
    )
    tab.click(x, y, 2)
    tab.wait("return mmr.app.player.curves()[2].scale().join() === '0,29'")
    tab.key("x")
    tab.wait("return mmr.app.player.curves()[1].scale()[1] < 29")
    tab.key("z")
    tab.wait("return mmr.app.player.curves()[1].scale().join() === '0,29'")


def test_the_cursor_is_the_same_in_all_curves(tab, serve, path):
    tab.open(serve(path), "e=1:0")
    curves_drawn(tab, 3)
    x, y, *_ = tab.center('[data-curve="action"] .u-over')
    tab.mouse("mouseMoved", x, y, 0)
    tips = tab.wait(
        "const tips = [...document.querySelectorAll('.curve .tip')];"
        "return tips.every((t) => !t.hidden) && tips.map((t) => t.textContent)"
    )
    assert len(tips) == 3
    assert len({tip.split(":")[0] for tip in tips}) == 1


def test_the_player_plays_and_finds_rewards(tab, serve, tmp_path, rng):
    def change(steps):
        steps["reward"][:] = 0
        steps["reward"][[4, 21]] = 1

    tab.open(serve(make_buffer(tmp_path / "a", rng, change=change)), "e=0:0")
    curves_drawn(tab, 3)
    time = "return document.querySelector('.time').textContent"
    tab.key("r")
    assert tab.run(time) == "4 / 29"
    tab.key("r")
    assert tab.run(time) == "21 / 29"
    tab.key("R", shift=True)
    assert tab.run(time) == "4 / 29"
    tab.key("ArrowRight", shift=True)
    assert tab.run(time) == "14 / 29"
    tab.key("+")
    assert tab.run("return document.getElementById('speed').value") == "30"
    # It plays for half a second, after which a slow machine may look at the button.
    tab.run(
        "const button = document.querySelector('.transport'); window.shown = [];"
        "new MutationObserver(() => window.shown.push(button.textContent)).observe("
        "button, {subtree: true, childList: true, characterData: true});"
    )
    tab.key(" ")
    tab.wait("return document.querySelector('.time').textContent === '29 / 29'")
    assert any("Pause" in text for text in tab.run("return window.shown"))
    tab.wait("return mmr.app.player.shown() === 29")
    assert "Play" in tab.text(".transport .main")
    assert tab.errors() == []


def test_an_address_leads_to_the_step(tab, serve, tmp_path, rng):
    def change(steps):
        steps["terminated"][:] = False
        steps["truncated"][:] = False
        steps["terminated"][99::100] = True

    path = make_buffer(tmp_path / "a", rng, count=1250, num_envs=4, capacity=1400, change=change)
    url = serve(path)
    tab.open(url, "e=3:1204&t=37")
    with mr.ReplayBuffer.open(path) as buffer:
        episodes = buffer.episodes
        begin, end = (int(x[0]) for x in episodes.locate(np.array([3]), np.array([1204])))
    assert begin < 1204 < end
    tab.wait("return document.querySelector('.time').textContent.startsWith('37 /')")
    assert f"environment 3, positions {begin:,} to {end - 1:,}" in tab.text(".title")
    tab.key("ArrowRight")
    tab.wait(f"return location.hash === '#e=3:{begin}&t=38'")
    shared = tab.run("return location.href")
    tab.driver.get("about:blank")
    tab.driver.get(shared)
    tab.wait("return document.querySelector('.time')?.textContent.startsWith('38 /')")


def test_steps_in_view_are_selected(tab, serve, path, stored):
    tab.open(serve(path), "e=1:290")
    curves_drawn(tab, 3)
    locate = stored.episodes.locate(np.array([1]), np.array([290]))
    begin = int(locate[0][0])
    tab.key("s")
    assert tab.text("[aria-label=Selection] h2") == "1 episode selected"
    # The final observation of the episode goes with it.
    assert tab.text("[aria-label=Selection] .note") == "31 rows"
    tab.run("mmr.app.player.zoom(4, 9)")
    tab.key("s")
    words = "1 episode and 1 range selected"
    tab.wait(
        f"return document.querySelector('[aria-label=Selection] h2').textContent === '{words}'"
    )
    command = tab.text(".cmd")
    assert command.startswith("mmreplay convert ")
    assert command.endswith(" selected.npz --select selection.json")
    tab.go("episodes")
    assert tab.text("[aria-label=Selection] h2") == words
    tab.wait(f"return document.querySelector('.erow a[href*=\"e=1:{begin}\"]')")
    tab.wait(
        f"return document.querySelector('.erow a[href*=\"e=1:{begin}\"]')"
        ".closest('.erow').querySelector('input').checked"
    )
    tab.run("document.querySelector('[aria-label=\"Clear the selection\"]').click()")
    assert tab.run("return document.querySelectorAll('.erow :checked').length") == 0


def test_images_of_every_kind_are_shown(tab, serve, tmp_path, rng):
    count = 12
    images = {
        "camera": rng.integers(0, 256, (count, 24, 32, 3), np.uint8),
        "first": rng.integers(0, 256, (count, 3, 24, 32), np.uint8),
        "gray": rng.integers(0, 256, (count, 20, 20), np.uint8),
        "stack": rng.integers(0, 256, (count, 4, 36, 36), np.uint8),
        "depth": rng.random((count, 18, 16), np.float32),
        "png": rng.integers(0, 256, (count, 22, 30, 3), np.uint8),
        "jpeg": rng.integers(0, 256, (count, 26, 30, 3), np.uint8),
    }
    fields = {
        name: mr.Field(values.shape[1:], values.dtype.name) for name, values in images.items()
    }
    fields["png"] = mr.Field.image((22, 30, 3), "png")
    fields["jpeg"] = mr.Field.image((26, 30, 3), quality=90)
    schema = mr.Schema({"observation": fields, "reward": mr.Field((), "float32")})
    with mr.ReplayBuffer.create(tmp_path / "a", schema, 20) as buffer:
        reward = np.ones(count, np.float32)
        buffer.extend({"observation": images, "reward": reward})
        jpeg = buffer.get_field("observation/jpeg", 0, 5)
    tab.open(serve(tmp_path / "a"), "e=0:0&t=5")
    options = tab.wait(
        "const o = [...document.querySelectorAll('#image option')].map((e) => e.value);"
        "return o.length && o"
    )
    assert options == [f"observation/{name}" for name in images]
    gray = {"gray": images["gray"][5], "stack": images["stack"][5, -1]}
    wanted = {
        "camera": images["camera"][5],
        "png": images["png"][5],
        "jpeg": jpeg,
        "first": images["first"][5].transpose(1, 2, 0),
        **{name: np.repeat(frame[..., None], 3, 2) for name, frame in gray.items()},
    }
    for name, values in images.items():
        tab.run(
            "const s = document.getElementById('image'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('change'))",
            f"observation/{name}",
        )
        height, width = wanted[name].shape[:2] if name in wanted else values.shape[1:]
        tab.wait(
            "const c = document.querySelector('.screen canvas');"
            f"return c.width === {width} && c.height === {height} && "
            "mmr.app.player.shown() === 5"
        )
        pixels = tab.run(
            "const c = document.querySelector('.screen canvas');"
            "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        )
        shown = np.array(pixels, np.uint8).reshape(height, width, 4)[..., :3]
        if name in wanted:
            np.testing.assert_array_equal(shown, wanted[name])
        else:
            # Dark violet is near, yellow is far: green grows with the depth.
            order = np.argsort(values[5], axis=None)
            assert (np.diff(shown[..., 1].ravel()[order].astype(int)) >= 0).all()
            assert "to" in tab.text(".transport + .transport .muted")
    assert tab.errors() == []


def test_a_field_has_one_colour_everywhere(tab, serve, path):
    def fnv(text):
        value = 0x811C9DC5
        for byte in text.encode():
            value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
        return value % 6

    tab.open(serve(path), "e=0:0")
    curves_drawn(tab, 3)
    slots = {"reward": 0, "action": 1, "observation/joints": fnv("observation/joints")}
    for name, slot in slots.items():
        colour = tab.run(f"return mmr.token('s{slot}')").lstrip("#")
        wanted = "rgb({}, {}, {})".format(*bytes.fromhex(colour))
        key, value = tab.run(
            "const of = (e) => getComputedStyle(e.querySelector('.swatch'))"
            ".borderTopColor;"
            "const dt = [...document.querySelectorAll('dt')].find((e) => e.textContent "
            "=== arguments[0]);"
            'return [of(document.querySelector(`[aria-label="Show ${arguments[0]}"]`)),'
            " of(dt)]",
            name,
        )
        assert key == value == wanted


LARGE = {
    "stamp_ns": 1_700_000_000_000_000_000 + np.arange(50) * 20_000_000,
    "huge": 2**62 + np.arange(50),
    "negative": np.full(50, -(2**63)),
    "unsigned": np.full(50, 2**64 - 1, np.uint64),
    "rounded": 123_456 + np.arange(50),
    "float": np.full(50, 1e20),
    "largest": np.full(50, 1.7e308),
    "reward": np.full(50, 1e20),
}


def test_large_numbers_are_drawn_and_are_exact_at_the_step(tab, serve, tmp_path):
    fields = {name: mr.Field((), x.dtype.name) for name, x in LARGE.items()}
    fields["observation"] = mr.Field((), "float32")
    fields["terminated"] = mr.Field((), "bool")
    ends = np.arange(50) % 10 == 9
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 100) as buffer:
        buffer.extend(observation=np.zeros(50, np.float32), terminated=ends, **LARGE)
    tab.driver.set_script_timeout(5)
    try:
        tab.open(serve(tmp_path / "a"))
        for screen in ("episodes", "e=0:3"):
            tab.go(screen)
        curves_drawn(tab, 9)
        for name in ("stamp_ns", "huge", "negative", "unsigned", "rounded"):
            assert tab.text(f"[data-value={name}]") == f"{int(LARGE[name][3]):,}"
        for low, high in ((2.0**62, 2.0**62), (1e20, 1e20), (1e300, 1e300)):
            bottom, top = tab.run("return mmr.limitsOf(arguments)", low, high)
            assert bottom + (top - bottom) / 10 > bottom
        # An axis of what is nearly equal has a tick, and labels are short.
        assert tab.run("return mmr.labels(null, [1.7e18, 0], 0, 0, 1e16)") == ["1.70e18", "0"]
    finally:
        tab.driver.set_script_timeout(60)
    assert tab.errors() == []


def test_rewards_past_the_listed_ones_are_found(tab, serve, tmp_path, monkeypatch):
    count = 10_000
    rewards = np.zeros(count)
    rewards[:6000:2] = 1
    rewards[9000] = -1e-60  # float32 has no such number
    rewards[9500] = np.nan
    fields = {"observation": mr.Field((), "float32"), "reward": mr.Field((), "float64")}
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), count) as buffer:
        buffer.extend(observation=np.zeros(count, np.float32), reward=rewards)
    tab.open(serve(tmp_path / "a"), "e=0:0&t=3996")
    note = tab.text("[data-note=rewards]")
    assert note == "ticks: first 2,000 of 3,001 rewards"
    wanted = [(False, 3998), (False, 4000), (True, 3998), (False, 4000), (False, 4002)]
    for back, step in wanted:
        tab.key("R" if back else "r", shift=back)
        tab.wait(f"return document.querySelector('.time').textContent === '{step:,} / 9,999'")
    tab.run("mmr.app.player.move(5998)")
    for back, step in ((False, 9000), (True, 5998), (True, 5996)):
        tab.key("R" if back else "r", shift=back)
        tab.wait(f"return document.querySelector('.time').textContent === '{step:,} / 9,999'")
    # There is no other one behind the last.
    tab.run("mmr.app.player.move(9000)")
    tab.key("r")
    tab.run("mmr.app.player.move(9001)")
    tab.key("r")
    tab.key("R", shift=True)
    tab.wait("return document.querySelector('.time').textContent === '9,000 / 9,999'")
    # A saved page has more of them,
    page = Page([tmp_path / "a"])
    save_page(page, tmp_path / "page")
    tab.open((tmp_path / "page" / "index.html").as_uri(), "e=0:0&t=5998")
    assert tab.text("[data-note=rewards]") == ""
    for back, step in ((False, 9000), (True, 5998)):
        tab.key("R" if back else "r", shift=back)
        tab.wait(f"return document.querySelector('.time').textContent === '{step:,} / 9,999'")
    # and says where it ends.
    monkeypatch.setattr("mmreplay.page.saved.MAX_LISTED_REWARDS", 2000)
    save_page(page, tmp_path / "less")
    page.close()
    tab.open((tmp_path / "less" / "index.html").as_uri(), "e=0:0&t=3997")
    tab.key("r")
    tab.wait("return document.querySelector('.time').textContent === '3,998 / 9,999'")
    tab.key("r")
    tab.wait(
        "return document.querySelector('[data-note=rewards]').textContent === "
        "'later rewards are not in the saved page'"
    )
    assert tab.errors() == []


def test_time_stamps_are_drawn_as_distances(tab, serve, tmp_path):
    stamps = 1_700_000_000_000_000_123 + np.arange(50) * 20_000_000
    fields = {
        "observation": mr.Field((), "float32"),
        "stamp_ns": mr.Field((), "int64"),
        "received_ns": mr.Field((), "int64"),
    }
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 100) as buffer:
        buffer.extend(
            observation=np.zeros(50, np.float32), stamp_ns=stamps, received_ns=stamps + 1000
        )
    tab.open(serve(tmp_path / "a"), "e=0:3")
    curves_drawn(tab, 3)
    data = tab.run(DATA, "stamp_ns")
    np.testing.assert_allclose(data["mean"], [stamps - stamps[0]], rtol=1e-6)
    remark = tab.text('[data-curve="stamp_ns"] header .muted')
    assert remark == "above 1,700,000,000,000,000,123"
    x, y, *_ = tab.center("[data-curve=stamp_ns] .u-over")
    tab.mouse("mouseMoved", x, y, 0)
    tip = tab.wait(
        "const t = document.querySelector('[data-tip=stamp_ns]');return !t.hidden && t.textContent"
    )
    step, value = tip.split(": ")
    assert abs(int(value.replace(",", "")) - stamps[int(step)]) <= 64
    # Two of them on one axis have one offset.
    tab.run(
        "const s = document.querySelector('select[data-group=received_ns]');"
        "s.value = 'stamp_ns'; s.dispatchEvent(new Event('change'))"
    )
    curves_drawn(tab, 2)
    data = tab.run(DATA, "stamp_ns + received_ns")
    distances = np.array([stamps, stamps + 1000]) - stamps[0]
    np.testing.assert_allclose(data["mean"], distances, atol=64)
    assert tab.errors() == []


def test_e_goes_to_the_end_and_then_to_the_next_one(tab, serve, path):
    tab.open(serve(path), "e=0:0")
    number = "return document.querySelector('h1')?.textContent"
    at_end = "return document.querySelector('.time')?.textContent === '29 / 29'"
    for episode in (1, 2, 3):
        tab.key("e")
        tab.wait(f"{number} === 'Episode {episode} of 10'")
        tab.wait(at_end)
    tab.key("p")
    tab.wait(f"{number} === 'Episode 2 of 10'")
    tab.key("P")  # Caps Lock
    tab.wait(f"{number} === 'Episode 1 of 10'")
    tab.key("p")
    tab.key("N")
    tab.wait(f"{number} === 'Episode 2 of 10'")
    assert tab.errors() == []


def test_the_address_of_the_playhead_does_not_replace_one_that_was_followed(tab, serve, path):
    tab.open(serve(path), "e=0:0")
    # The timer of the playhead ends after the key, and before the event of its address.
    tab.run(
        "const begin = window.setTimeout, timers = [];"
        "window.setTimeout = (timer) => timers.push(timer);"
        "mmr.app.player.move(3);"
        "window.setTimeout = begin;"
        "location.hash = mmr.app.link('e=0:31');"
        "for (const timer of timers) timer();"
    )
    tab.wait("return document.querySelector('h1')?.textContent === 'Episode 2 of 10'")
    tab.key("ArrowRight")
    tab.wait("return location.hash === '#e=0:31&t=1'")
    assert tab.errors() == []


def test_keys_work_with_caps_lock(tab, serve, path):
    tab.open(serve(path), "e=0:0")
    curves_drawn(tab, 3)
    theme = "return document.documentElement.dataset.theme"
    assert tab.run(theme) == "light"
    tab.key("T")
    assert tab.run(theme) == "dark"
    tab.key("t")
    tab.key("X")
    tab.wait("return mmr.app.player.curves()[0].scale()[1] < 29")
    tab.key("Z")
    tab.wait("return mmr.app.player.curves()[0].scale()[1] === 29")
    tab.key("S")
    assert tab.text("[aria-label=Selection] h2") == "1 episode selected"
    tab.run("document.querySelector('[aria-label=\"Clear the selection\"]').click()")
    tab.key("E")
    tab.wait("return document.querySelector('.time').textContent === '29 / 29'")
    # Shift undoes Caps Lock: the letter is small, and the way is back.
    tab.key("r", shift=True)
    tab.wait("return document.querySelector('.time').textContent === '28 / 29'")
    tab.key("R")
    tab.wait("return document.querySelector('.time').textContent === '29 / 29'")


def test_every_field_can_be_switched_on(tab, serve, tmp_path):
    fields = {f"f{n:02}": mr.Field((), "float32") for n in range(17)}
    fields["wide"] = mr.Field((20_000,), "float32")
    values = {f"f{n:02}": np.full(9, n, np.float32) for n in range(17)}
    values["wide"] = np.zeros((9, 20_000), np.float32)
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 9) as buffer:
        buffer.extend(values)
    tab.open(serve(tmp_path / "a"), "e=0:0")
    curves_drawn(tab, 12)
    assert tab.text("details summary") == "5 more fields"
    assert tab.texts("[aria-label='More fields'] .key") == [f"f{n}" for n in range(12, 17)]
    tab.run("document.querySelector('details').open = true")
    for number in (14, 16):
        tab.run(f"document.querySelector('[aria-label=\"Show f{number}\"]').click()")
    curves_drawn(tab, 14)
    assert floats(tab.run(DATA, "f16")["mean"]).tolist() == [[16.0] * 9]
    tab.run("document.querySelector('[aria-label=\"Show f14\"]').click()")
    curves_drawn(tab, 13)
    words = tab.texts(".nothing")
    assert words == [
        "wide is not drawn: a row of it has 78.1 KiB, a curve is read of 64.0 KiB at most."
    ]
    assert tab.errors() == []


def test_an_age_says_how_long_ago_that_is(tab, serve, tmp_path):
    fields = {"observation": mr.Field((), "float32"), "terminated": mr.Field((), "bool")}
    stop = threading.Event()
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 100_000) as buffer:

        def write():
            number = 0
            while not stop.wait(0.004):
                buffer.add(observation=0.0, terminated=number % 50 == 49)
                number += 1

        writer = threading.Thread(target=write)
        writer.start()
        try:
            tab.open(serve(tmp_path / "a"))
            tab.wait("return mmr.app.states[0].rate > 20 && mmr.app.states[0].head > 99")
            tab.go("e=0:0")
            text = tab.text(".title")
            # It moves with the writer.
            tab.wait(
                f"return !{json.dumps(text)}.includes(document.querySelector"
                "('#age').textContent.split(' steps')[0])"
            )
        finally:
            stop.set()
            writer.join()
    found = re.search(r"([\d,]+) steps ago, about (\d+) s at ([\d.]+) steps/s", text)
    assert found, text
    steps, seconds, rate = (float(each.replace(",", "")) for each in found.groups())
    assert seconds == pytest.approx(steps / rate, abs=1)


@pytest.mark.parametrize("kind", ["env_major", "next_step"])
def test_buffers_of_other_kinds_are_shown(tab, serve, tmp_path, rng, kind):
    path = tmp_path / "a"
    if kind == "env_major":
        make_buffer(path, rng, layout="env_major")
    else:
        with mr.ReplayBuffer.create(path, schema(), 1000, 2, autoreset="next_step") as buffer:
            buffer.extend(healthy_steps(rng, 300, 2))
    tab.open(serve(path))
    with mr.ReplayBuffer.open(path) as buffer:
        table = mr.episode_table(buffer)
        assert f"{buffer.num_envs} environments" in tab.text(".title")
        assert kind in tab.text(".title")
        assert tab.text("[data-fact=episodes]").startswith(f"{len(table)}")
        tab.go("episodes")
        tab.wait("return document.querySelectorAll('.erow').length > 5")
        tab.run("document.querySelector('[data-sort=env]').click()")
        tab.wait("return document.querySelector('[aria-sort=ascending]')")
        tab.wait(
            "const r = document.querySelector('.erow[data-row=\"0\"] .mono');"
            "return r?.textContent === '0 : 0'"
        )
        rows = [text.split(" : ") for text in tab.texts(".erow .mono")]
        shown = [(int(env), int(begin.replace(",", ""))) for env, begin in rows]
        stored = list(zip(table.env_ids.tolist(), table.begin.tolist(), strict=True))
        assert shown == sorted(stored)[: len(shown)]
        for env_id, begin in shown[1], sorted(stored)[-2]:
            tab.go(f"e={env_id}:{begin}")
            curves_drawn(tab, 3)
            end = begin + int(table.lengths[stored.index((env_id, begin))])
            positions = np.arange(begin, end)
            for name in ("reward", "action", "observation/joints"):
                wanted = buffer.get_field(name, env_id, positions)
                drawn = floats(tab.run(DATA, name)["mean"])
                np.testing.assert_array_equal(drawn, wanted.reshape(len(wanted), -1).T)
    assert tab.errors() == []


def test_an_episode_without_an_end_grows(tab, serve, tmp_path, rng):
    steps = healthy_steps(rng, 300, 1, length=200)

    def rows_of(value, first, stop):
        if isinstance(value, dict):
            return {name: rows_of(each, first, stop) for name, each in value.items()}
        return value[first:stop]

    def some(first, stop):
        rows = rows_of(squeezed(steps), first, stop)
        return rows, {"final_observation": rows["observation"]}

    with mr.ReplayBuffer.create(tmp_path / "live", schema(), 250, autoreset="disabled") as writer:
        rows, more = some(0, 60)
        writer.extend(rows, **more)
        tab.open(serve(tmp_path / "live"), "e=0:0&t=50")
        curves_drawn(tab, 3)
        time_text = "return document.querySelector('.time').textContent"
        assert tab.run(time_text) == "50 / 59"
        assert "no end so far" in tab.text(".title")
        rows, more = some(60, 90)
        writer.extend(rows, **more)
        tab.wait(f"{time_text} === '50 / 89'")
        assert "positions 0 to 89" in tab.text(".title")
        tab.wait("return mmr.app.player.curves()[0].scale()[1] === 89")
        rewards = floats(tab.run(DATA, "reward")["mean"])[0]
        np.testing.assert_array_equal(rewards, steps["reward"][:90, 0])
        tab.key("End")
        tab.wait("return mmr.app.player.shown() === 89")
        # A part that was zoomed in to stays; the end is seen.
        tab.run("mmr.app.player.zoom(70, 80)")
        rows, more = some(90, 300)
        writer.extend(rows, **more)
        tab.wait(f"{time_text} === '89 / 199'")
        assert tab.run("return mmr.app.player.curves()[0].scale()") == [70, 80]
        assert "no end so far" not in tab.text(".title")
        # The ring has 250 rows and one is the final one: the first steps are gone.
        assert "its first steps were overwritten" in tab.text(".title")
        assert not tab.run("return document.querySelector('[aria-label^=\"Next →\"]').disabled")
        tab.key("End")
        tab.wait("return mmr.app.player.shown() === 199")
    assert tab.errors() == []


DRAWN = """
const plot = document.querySelector(`[data-curve="${arguments[0]}"] .uplot`);
const canvas = plot.querySelector('canvas');
const [whole, over] = [canvas, plot.querySelector('.u-over')].map((e) =>
  e.getBoundingClientRect());
const ratio = canvas.width / whole.width;
const [left, top, width, height] = [over.left - whole.left, over.top - whole.top,
  over.width, over.height].map((each) => Math.round(each * ratio));
const { data } = canvas.getContext('2d').getImageData(left, top, width, height);
const rows = [];
for (let y = 0; y < height; y++) {
  const row = [];
  for (let x = 0; x < width; x++) {
    const [r, g, b, a] = data.subarray(4 * (y * width + x));
    row.push(a > 20 && Math.max(r, g, b) - Math.min(r, g, b) > 20 ? 1 : 0);
  }
  rows.push(row);
}
return rows;
"""
"""Which pixels of a chart have a colour: axes and grid are grey."""


def test_curves_show_each_step_whole_and_nothing_else(tab, serve, tmp_path):
    count, long = 12, 20_000
    fields = {
        name: mr.Field((), dtype)
        for name, dtype in (
            ("action", "int64"),
            ("reward", "float32"),
            ("terminated", "bool"),
            ("value", "float32"),
            ("advantage", "float32"),
        )
    }
    actions = np.zeros(count + long, np.int64)
    actions[count - 1], actions[count + long // 2 :] = 3, 3
    ends = np.zeros(count + long, bool)
    ends[[count - 1, -1]] = True
    rewards = np.zeros(count + long, np.float32)
    rewards[[0, count - 1]] = 1.0
    steps = {"action": actions, "reward": rewards, "terminated": ends}
    steps["value"] = np.where(np.arange(count + long) % 2 == 0, 1.0, np.nan)
    steps["advantage"] = np.linspace(0, 1, count + long)
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), 1 << 15) as buffer:
        buffer.extend({name: steps[name].astype(fields[name].dtype) for name in fields})
    url = serve(tmp_path / "a")
    tab.open(url, "e=0:0&t=5")
    curves_drawn(tab, 4)

    def heights(left, right):
        """Rows with a colour in a part of the action's columns, each as a share."""
        drawn = np.array(tab.run(DRAWN, "action"), bool)
        width = drawn.shape[1]
        part = drawn[:, round(left * width) : round(right * width)]
        rows = np.flatnonzero(part.any(axis=1))
        assert len(rows), "no step is seen"
        # A line, all along, and nothing beside it.
        assert rows[-1] - rows[0] < 4
        assert part.any(axis=0).all()
        return rows.mean() / len(drawn)

    shown = [heights((i + 0.1) / count, (i + 0.9) / count) for i in range(count)]
    assert np.ptp(shown[:-1]) < 0.05
    # The last one, which is the only one with another action, is as wide as the others.
    assert shown[-1] < shown[0] - 0.5
    # Values between gaps are points.
    assert np.array(tab.run(DRAWN, "value"), bool).any(axis=0).sum() >= 3 * count // 2
    # Rewards of the first and of the last step stand over the ends of the slider's way.
    first, last = tab.run(
        "const canvas = document.querySelector('.scrub canvas');"
        "const [{left, width}, slider] = [canvas, document.getElementById('step')]"
        ".map((e) => e.getBoundingClientRect());"
        "const {data} = canvas.getContext('2d').getImageData(0, 2, canvas.width, 1);"
        "const drawn = [...Array(canvas.width).keys()].filter((x) => data[4 * x + 3]);"
        "return [drawn[0], drawn.at(-1)].map((x) => "
        "  left + (x + 0.5) * width / canvas.width - slider.left);"
    )
    thumb = 16
    width = tab.run("return document.getElementById('step').clientWidth")
    assert first == pytest.approx(thumb / 2, abs=1.5)
    assert last == pytest.approx(width - thumb / 2, abs=1.5)
    # Fields that share a colour have two in one chart.
    assert tab.run("return mmr.slot('value') === mmr.slot('advantage')")
    tab.run(
        "const s = document.querySelector('select[data-group=advantage]');"
        "s.value = 'value'; s.dispatchEvent(new Event('change'))"
    )
    curves_drawn(tab, 3)
    colours = tab.run(
        'return [...document.querySelectorAll(\'[data-curve="value + advantage"] '
        ".legend .swatch')].map((e) => getComputedStyle(e).borderTopColor)"
    )
    assert len(set(colours)) == 2
    # Of many steps, what does not change is seen, too.
    tab.go(f"e=0:{count}")
    curves_drawn(tab, 3)
    assert not tab.run(DATA, "action")["plain"]
    assert heights(0.01, 0.49) - heights(0.51, 0.99) > 0.5
    assert tab.errors() == []

"""The page in a real browser: what it shows is what numpy computes."""

import json
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page import app
from mmreplay.page.api import Page
from mmreplay.page.saved import save_page
from tests.page.browser import needs_chromium
from tests.page.conftest import healthy_steps, make_buffer, one_step, schema, squeezed
from tests.page.test_server import WRITER

pytestmark = [needs_chromium, pytest.mark.slow]


def numbers(text):
    return [float(part.replace(",", "")) for part in re.findall(r"-?[\d,.]+(?:e-?\d+)?", text)]


def test_the_overview_shows_the_buffers_figures(tab, serve, path, stored):
    tab.open(serve(path))
    assert tab.text('[data-fact="steps"]').startswith("600")
    assert tab.text('[data-fact="episodes"]').startswith("20")
    table = mr.episode_table(stored)
    order = np.argsort(table.end, kind="stable")
    newest = table.returns[order][-5:].mean()
    assert numbers(tab.text('[data-fact="return"]'))[0] == pytest.approx(newest, rel=1e-3)
    assert tab.text("#state") == "Not being written"
    assert "Nothing stands out." in tab.text("main")
    assert tab.texts("#fields th[scope=row]") == list(stored.schema.paths)
    canvases = tab.run("return document.querySelectorAll('main canvas').length")
    assert canvases >= 4
    sizes = tab.run("return [0, 1023, 1024, 1023 * 1024, 1048575, 1.56 * 2 ** 30].map(mmr.size)")
    assert sizes == ["0 B", "1023 B", "1.00 KiB", "1023 KiB", "1024 KiB", "1.56 GiB"]
    assert tab.errors() == []


def test_the_mean_of_few_episodes_is_of_all_of_them(tab, serve, tmp_path, rng):
    path = make_buffer(tmp_path / "few", rng, count=90, num_envs=1)
    tab.open(serve(path))
    with mr.ReplayBuffer.open(path) as buffer:
        table = mr.episode_table(buffer)
    assert len(table) == 3
    text = tab.text('[data-fact="return"]')
    assert numbers(text)[0] == pytest.approx(table.returns.mean(), rel=1e-3)
    assert text.endswith("mean of 3 episodes")


def test_findings_lead_to_where_they_are_seen(tab, serve, tmp_path, rng):
    def change(steps):
        steps["observation"]["joints"][3, 0, 0] = np.nan

    tab.open(serve(make_buffer(tmp_path / "a", rng, change=change)))
    assert tab.text('[data-check="not finite"] b') == "Not finite: observation/joints"
    assert tab.texts(".checks:not(.calm) .mark") == ["!"]
    tab.run("document.querySelector('[data-check=\"not finite\"] a').click()")
    focused = tab.wait("return document.activeElement.id")
    assert focused == "field:observation/joints"


def test_the_table_lists_sorts_and_filters(tab, serve, path, stored):
    table = mr.episode_table(stored)
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    tab.run(
        "[...document.querySelectorAll('.ehead button')].find((b) => b.textContent"
        ".startsWith('Return')).click()"
    )
    tab.wait(
        "return document.querySelector('.ehead [aria-sort=descending]')?.textContent"
        ".startsWith('Return')"
    )
    best = int(table.returns.argmax())
    wanted = f"e={table.env_ids[best]}:{table.begin[best]}"
    tab.wait(
        "return document.querySelector('.erow[data-row=\"0\"] a')"
        f"?.getAttribute('href').includes('{wanted}')"
    )
    shown = tab.text('.erow[data-row="0"] [role=cell]:nth-child(4)')
    assert numbers(shown)[0] == pytest.approx(table.returns.max(), rel=1e-3)
    tab.run(
        "const s = document.getElementById('env'); s.value = '1'; s"
        ".dispatchEvent(new Event('change'))"
    )
    tab.wait("return document.querySelector('.note').textContent.startsWith('10 of 20')")
    assert all(text.startswith("1 :") for text in tab.texts(".erow a"))


def test_frames_in_the_table_are_pixels(tab, serve, path, stored):
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelector('.erow .thumbs canvas')?.width === 32")
    address = tab.run("return document.querySelector('.erow a').getAttribute('href')")
    env_id, begin = map(int, re.findall(r"\d+", address)[:2])
    pixels = tab.run(
        "const c = document.querySelector('.erow .thumbs canvas');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    )
    shown = np.array(pixels, np.uint8).reshape(24, 32, 4)[..., :3]
    frame = stored.get_field("observation/pixels", env_id, [begin])[0]
    np.testing.assert_array_equal(shown, frame)


def test_a_million_rows_are_reached_first_middle_and_last(tab, serve, tmp_path):
    # A million episodes of one step: 52 px each is more than the tallest element.
    count = 1_000_000
    fields = {"observation": mr.Field((), "float32"), "reward": mr.Field((), "float32")}
    fields["terminated"] = mr.Field((), "bool")
    with mr.ReplayBuffer.create(tmp_path / "a", mr.Schema(fields), count) as buffer:
        buffer.extend(
            observation=np.zeros(count, np.float32),
            reward=np.arange(count, dtype=np.float32),
            terminated=np.ones(count, bool),
        )
    tab.open(serve(tmp_path / "a"), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    tab.wait("return document.querySelector('.note').textContent === '1,000,000'", 30)
    height = tab.run("return document.querySelector('.list .space').clientHeight")
    assert height == 8_000_000
    tab.run("document.querySelector('[data-row=\"0\"] a').focus()")
    for share in (0, 0.5, 1):
        tab.run(
            "const l = document.querySelector('.list'); l.scrollTop = arguments[0] * "
            "(l.scrollHeight - l.clientHeight)",
            share,
        )
        target = round(share * (count - 1))
        rows = tab.wait(
            "const rows = [...document.querySelectorAll('.erow')].map((e) => "
            "Number(e.dataset.row));"
            f"return rows.some((r) => Math.abs(r - {target}) < 20) && rows"
        )
        assert (count - 1 in rows) == (share == 1)
        # The focus survives scrolling, also of its row out of view.
        assert (
            tab.run("return document.activeElement.parentElement.parentElement.dataset.row") == "0"
        )
    names = tab.texts(f'[data-row="{count - 1}"] [role=cell]')
    assert names[1:4] == ["0 : 0", "1", "0"]
    tab.key("ArrowDown")
    tab.wait("return document.activeElement.closest('.erow')?.dataset.row === '1'")
    tab.key("End")
    last = f"return document.activeElement.closest('.erow')?.dataset.row === '{count - 1}'"
    tab.wait(last)
    assert tab.errors() == []


def test_the_playhead_shows_the_steps_values_and_frame(tab, serve, path, stored):
    tab.open(serve(path), "e=1:40&t=7")
    begin, _ = (int(x[0]) for x in stored.episodes.locate(np.array([1]), np.array([40])))
    for step in (7, 8, 0):
        if step == 8:
            tab.key("ArrowRight")
        if step == 0:
            tab.key("Home")
        position = begin + step
        joints = stored.get_field("observation/joints", 1, [position])[0]
        tab.wait(f"return document.querySelector('.time')?.textContent.startsWith('{step} /')")
        text = tab.wait(
            "return document.querySelector('[data-value=\"observation/joints\"]')?.textContent"
        )
        end = time.monotonic() + 5
        while time.monotonic() < end and not np.allclose(
            numbers(text), joints, rtol=1e-3, atol=1e-4
        ):
            text = tab.text('[data-value="observation/joints"]')
        np.testing.assert_allclose(numbers(text), joints, rtol=1e-3, atol=1e-4)
        tab.wait(f"return mmr.app.player.shown() === {step}")
        pixels = tab.run(
            "const c = document.querySelector('.screen canvas');"
            "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
        )
        shown = np.array(pixels, np.uint8).reshape(24, 32, 4)[..., :3]
        frame = stored.get_field("observation/pixels", 1, [position])[0]
        np.testing.assert_array_equal(shown, frame)
    tab.wait(f"return location.hash === '#e=1:{begin}&t=0'")
    assert tab.errors() == []


def test_curves_are_drawn_from_the_values(tab, serve, path, stored):
    tab.open(serve(path), "e=0:0")
    tab.wait("return document.querySelectorAll('.curve .uplot').length === 3")
    assert tab.texts(".curve h3") == ["reward", "action", "observation/joints"]
    assert tab.texts('[data-curve="action"] .key') == ["[0]", "[1]"]
    over = tab.run(
        'const o = document.querySelector(\'[data-curve="observation/joints"] '
        ".u-over');"
        "const r = o.getBoundingClientRect();"
        "o.dispatchEvent(new MouseEvent('mousemove', {clientX: r.left + r.width / 2, "
        "clientY: r.top + 20, bubbles: true}));"
        "return r.width"
    )
    assert over > 100
    tip = tab.wait(
        "const t = document.querySelector('[data-tip=\"observation/joints\"]'); "
        "return t && !t.hidden && t.textContent"
    )
    step, *values = numbers(tip.replace(":", " "))
    joints = stored.get_field("observation/joints", 0, [int(step)])[0]
    np.testing.assert_allclose(values, joints, rtol=1e-3, atol=1e-4)


def test_keys_alone_reach_an_episode(tab, serve, path):
    tab.open(serve(path))
    tab.key("2")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    tab.run("document.querySelector('.list').focus()")
    tab.key("ArrowDown")
    tab.wait("return document.activeElement.closest('.erow')?.dataset.row === '0'")
    tab.key("ArrowDown")
    tab.wait("return document.activeElement.closest('.erow')?.dataset.row === '1'")
    tab.key("s")
    assert "1 episode selected" in tab.text("section[aria-label=Selection]")
    assert "--select selection.json" in tab.text(".cmd")
    tab.key("Enter")
    tab.wait("return document.querySelector('.transport')")
    tab.key("n") if "→" in tab.text(".pair") else None
    tab.key("t")
    assert tab.run("return document.documentElement.dataset.theme") == "dark"
    tab.key("?")
    assert tab.run("return document.getElementById('keys').open")


def test_draws_show_the_samplers_steps(tab, serve, path, stored):
    tab.open(serve(path, sampler="UniformSampler(seed=5)"), "draws")
    tab.wait("return document.querySelectorAll('.tiles li').length === 256")
    draw = mr.UniformSampler(seed=5).draw(stored.view, 256)
    wanted = sorted(f"{e} : {p}" for e, p in zip(draw.env_ids, draw.positions, strict=True))
    assert sorted(tab.texts(".tiles .mono")) == wanted
    assert "seed 5, the sampler's own" in tab.text("main")
    tab.run(
        "const t = document.getElementById('sampler'); t.value = 'SequenceSampler(3)';"
        " t.form.requestSubmit()"
    )
    tab.wait("return document.querySelector('main').textContent.includes('of 3 steps')")
    assert "windows of 3 steps" in tab.text("main")
    tab.run(
        "const t = document.getElementById('sampler'); t.value = 'open(1)'; t.form.requestSubmit()"
    )
    assert "must be a sampler" in tab.wait(
        "const e = document.querySelector('.error'); return !e.hidden && e.textContent"
    )
    # What was refused has no seed.
    tab.run(
        "const t = document.getElementById('sampler'); t.value = 'UniformSampler()'; "
        "t.form.requestSubmit()"
    )
    tab.wait("return document.querySelector('main').textContent.includes('seed 2')")
    assert "all are equally probable; newest first" in tab.text("main")
    assert tab.texts(".tiles br") != []


def test_two_buffers_are_compared(tab, serve, path, tmp_path, rng):
    other = make_buffer(tmp_path / "other", rng, count=90)
    tab.open(serve(path, other), "compare&c=1")
    assert "The schemas are the same." in tab.text("main")
    titles = tab.texts("main h2")
    assert {"Episode returns", "Episode lengths", "action[0]", "reward"} <= set(titles)
    tab.run(
        "const s = document.getElementById('buffer'); s.value = '1'; s"
        ".dispatchEvent(new Event('change'))"
    )
    tab.wait("return location.hash === '#compare&b=1'")


def test_the_page_grows_with_its_buffer(tab, serve, tmp_path, rng):
    path = tmp_path / "live"
    with mr.ReplayBuffer.create(path, schema(), 1000, 2, autoreset="disabled") as writer:
        tab.open(serve(path))
        assert "No step yet" in tab.text("main")
        assert tab.text("#state").startswith("Live")
        steps = healthy_steps(rng, 60, 2)
        writer.extend(steps, final_observation=steps["observation"])
        tab.wait(
            "return document.querySelector('[data-fact=steps]')?.textContent.startsWith('120')"
        )
        # What the mouse points at is said through redraws.
        x, y, *_ = tab.center("#returns .u-over")
        tab.mouse("mouseMoved", x, y, 0)
        tip = (
            "const tip = document.querySelector('#returns .tip');"
            "return tip && !tip.hidden && tip.textContent"
        )
        assert tab.wait(tip).startswith("return ")
        chart = tab.run("return (window.before = document.querySelector('.uplot'))")
        assert chart is not None
        writer.extend(steps, final_observation=steps["observation"])
        tab.wait("return document.querySelector('.uplot') && !before.isConnected")
        assert tab.wait(tip).startswith("return ")
    tab.wait("return document.getElementById('state').textContent === 'Not being written'")
    assert tab.errors() == []


@pytest.mark.crash
def test_a_killed_writer_is_reported(tab, serve, tmp_path):
    path = tmp_path / "killed"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        writer.stdout.readline()
        tab.open(serve(path))
        tab.wait("return document.getElementById('state').textContent.startsWith('Live')")
        writer.kill()
        begin = time.monotonic()
        tab.wait("return document.getElementById('state').textContent === 'Writer gone'")
        assert time.monotonic() - begin < 1.5
        # What was drawn before is drawn again, as the pill has it.
        tab.wait(
            "return document.getElementById('storage').textContent"
            ".includes('the writer was killed')"
        )
        assert "1 episode unfinished" in tab.text("#ends")
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)<"


def hostile(path, rng):
    fields = {"observation": mr.Field((2,), "float32"), HOSTILE: mr.Field((3,), "float32")}
    fields["reward"] = mr.Field((), "float32")
    with mr.ReplayBuffer.create(path, mr.Schema(fields), 200) as buffer:
        buffer.extend(
            {
                "observation": rng.random((50, 2), np.float32),
                HOSTILE: np.full((50, 3), np.nan, np.float32),
                "reward": rng.random(50, np.float32),
            }
        )
    return path


def test_names_are_text(tab, serve, tmp_path, rng):
    tab.open(serve(hostile(tmp_path / "<b>x", rng)))
    for screen in ("overview", "e=0:3", "episodes", "draws"):
        tab.go(screen)
        assert tab.run("return document.querySelectorAll('main img, main script').length") == 0
        if screen in ("overview", "e=0:3"):
            tab.wait(f"return document.body.textContent.includes({HOSTILE!r})")
    assert tab.errors() == []


def test_no_request_leaves_for_another_host(tab, serve, path):
    url = serve(path, path)
    tab.open(url)
    for screen in ("episodes", "e=0:3", "draws", "compare&c=1"):
        tab.go(screen)
        time.sleep(0.3)
    asked = [address for address in tab.requests() if not address.startswith(("data:", "blob:"))]
    base = url.partition("?")[0]
    assert len(asked) > 20
    assert [a for a in asked if not a.startswith((base, "about:"))] == []
    assert tab.errors() == []


def test_a_damaged_buffer_has_words(tab, serve, path, tmp_path, rng):
    bad = make_buffer(tmp_path / "bad", rng)
    (bad / "data-000001" / "COMMIT").write_bytes(b"")
    tab.open(serve(bad, path))
    assert "This buffer cannot be read" in tab.text("main")
    assert "mmreplay repair" in tab.text("code")
    assert tab.text("#state") == "Cannot be read"
    tab.go("overview&b=1")
    assert tab.text('[data-fact="steps"]').startswith("600")
    tab.go("e=0:999999&b=1")
    assert "Position 999,999 of environment 0 is not written yet." in tab.text("main")


@pytest.mark.parametrize("screen", ["overview", "episodes", "e=0:0", "draws", "compare&c=1"])
def test_no_sideways_scroll_on_a_phone(tab, serve, path, screen):
    tab.open(serve(path, path), screen, width=390, height=840)
    time.sleep(0.3)
    assert tab.run("return document.documentElement.scrollWidth") == 390


def test_the_saved_page_opens_from_disk(tab, path, tmp_path, stored):
    page = Page([path], sampler="UniformSampler(seed=1)")
    save_page(page, tmp_path / "page")
    page.close()
    tab.open((tmp_path / "page" / "index.html").as_uri())
    assert tab.text('[data-fact="steps"]').startswith("600")
    assert tab.text("#state") == "Saved page"
    tab.go("episodes")
    tab.wait("return document.querySelector('.erow .thumbs canvas')?.width === 32")
    address = tab.run("return document.querySelector('.erow a').getAttribute('href')")
    env_id, begin = map(int, re.findall(r"\d+", address)[:2])
    tab.go(address[1:])
    tab.wait("return document.querySelectorAll('.curve .uplot').length === 3")
    tab.key("End")
    tab.wait("return mmr.app.player.shown() > 0")
    step = tab.run("return mmr.app.player.shown()")
    pixels = tab.run(
        "const c = document.querySelector('.screen canvas');"
        "return [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    )
    shown = np.array(pixels, np.uint8).reshape(24, 32, 4)[..., :3]
    frame = stored.get_field("observation/pixels", env_id, [begin + step])[0]
    np.testing.assert_array_equal(shown, frame)
    tab.run(
        "const s = document.querySelector('select[data-group=action]');"
        "s.value = 'reward'; s.dispatchEvent(new Event('change'))"
    )
    tab.wait("return document.querySelectorAll('.curve .uplot').length === 2")
    tab.key("x")
    tab.wait("return mmr.app.player.curves()[0].scale()[0] > 0")
    tab.go("episodes")
    tab.run("document.getElementById('highest').focus()")
    tab.type("-1000")
    tab.key("Enter")
    assert "No episode fits these filters." in tab.text(".list .empty")
    tab.go("draws")
    tab.wait("return document.querySelectorAll('.tiles li').length === 256")
    assert [a for a in tab.requests() if a.startswith("http")] == []
    assert tab.errors() == []


def test_pages_that_were_left_hold_no_connection(tab, serve, path):
    # A browser has six connections to a host, and each page listens on one.
    url = serve(path)
    for _ in range(9):
        tab.open(url, "episodes")
        tab.wait("return document.querySelectorAll('.erow').length > 5")


def test_the_system_says_whether_colours_are_dark(tab, serve, path):
    tab.open(serve(path), theme="dark")
    assert tab.run("return document.documentElement.dataset.theme") == "dark"
    background = tab.run("return getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(16, 20, 26)"


def test_a_range_of_returns_is_chosen_by_mouse_and_by_keys(tab, serve, path, stored):
    returns = mr.episode_table(stored).returns
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    tab.drag(".card .u-over", 0.0, 0.5)
    low, high = tab.wait(
        "const [a, b] = ['lowest', 'highest'].map((n) => document.getElementById(n)"
        ".value); return a && [Number(a), Number(b)]"
    )
    span = returns.max() - returns.min()
    assert low == pytest.approx(returns.min(), abs=span / 50)
    assert high == pytest.approx(returns.min() + span / 2, abs=span / 50)
    kept = int(((returns >= low - 1e-3) & (returns <= high + 1e-3)).sum())
    tab.wait(f"return document.querySelector('.note').textContent === '{kept} of 20'")
    tab.run("document.querySelector('[aria-label^=\"Remove the filter\"]').click()")
    tab.wait("return document.querySelector('.note').textContent === '20'")
    median = float(np.median(returns))
    tab.run("document.getElementById('lowest').focus()")
    tab.type(f"{median:.4f}")
    tab.key("Enter")
    kept = int((returns >= round(median, 4)).sum())
    tab.wait(f"return document.querySelector('.note').textContent === '{kept} of 20'")
    assert tab.errors() == []


def test_a_step_is_seen_soon_after_it_was_added(tab, serve, tmp_path, rng):
    path = tmp_path / "live"
    with mr.ReplayBuffer.create(path, schema(), 1000, autoreset="disabled") as writer:
        steps = squeezed(healthy_steps(rng, 60, 1))
        writer.extend(steps, final_observation=steps["observation"])
        tab.open(serve(path))
        tab.wait("return document.getElementById('state').textContent.startsWith('Live')")
        fact = "return document.querySelector('[data-fact=steps]').textContent"
        for added in range(1, 4):
            writer.add(one_step(rng))
            begin = time.monotonic()
            tab.wait(f"{fact}.startsWith('{60 + added}')")
            # The page promises a second; a busy machine may take longer.
            assert time.monotonic() - begin < 2
        tab.wait("return mmr.app.overview(mmr.app.id, true).then(each => each.steps === 63)")
    # One number of steps is on the screen, that of the figure.
    assert tab.text("#rewards .note") == "all steps"
    assert "Looked at: all steps." in tab.run("return document.querySelector('main').textContent")
    assert tab.errors() == []


def test_a_removed_folder_leaves_its_last_state(tab, serve, path):
    tab.open(serve(path))
    tab.go("e=0:40&t=3")
    drawn = (
        "return document.querySelectorAll('.curve .uplot').length === 3 && "
        "mmr.app.player.curves().every((c) => c.data()) && "
        "mmr.app.player.shown() === 3 && document.querySelector('.now').innerText"
    )
    values = tab.wait(drawn)
    tab.go("overview")
    shutil.rmtree(path)
    tab.wait("return document.getElementById('state').textContent === 'Removed'")
    words = "The folder was removed; what is shown is the last state."
    assert tab.text("#banner") == words
    assert tab.text('[data-fact="steps"]').startswith("600")
    # The server tries to open it again after a second.
    time.sleep(1.6)
    assert tab.text("#state") == "Removed"
    tab.go("episodes")
    assert tab.text("#banner") == words
    # The table was not looked at before; it is sorted and filtered as ever.
    tab.wait("return document.querySelectorAll('.erow').length > 10")
    tab.run("document.querySelector('[data-sort=return]').click()")
    texts = tab.wait(
        "const texts = [...document.querySelectorAll('.erow')].map((e) => "
        "e.children[3].textContent); const values = texts.map(Number);"
        "return values.every((v, i) => !i || v <= values[i - 1]) && texts"
    )
    assert len(texts) > 10
    tab.go("e=0:40&t=3")
    assert tab.text("#banner") == words
    assert tab.wait(drawn) == values
    # Of what was not looked at nothing is left, and the page says so.
    tab.go("e=1:200")
    assert tab.text("#banner") == "The folder was removed."
    assert "Its folder was removed before this was read." in tab.text("main")
    tab.go("overview")
    assert tab.text("#banner") == words
    assert tab.text('[data-fact="steps"]').startswith("600")


def test_a_folder_that_is_moved_while_it_is_written_is_followed(tab, serve, tmp_path):
    path, elsewhere = tmp_path / "live", tmp_path / "elsewhere"
    rng = np.random.default_rng(0)
    with mr.ReplayBuffer.create(path, schema(), 1000, 2, autoreset="disabled") as writer:
        steps = healthy_steps(rng, 60, 2)
        writer.extend(steps, final_observation=steps["observation"])
        tab.open(serve(path))
        assert tab.run("return document.getElementById('banner') === null")
        path.rename(elsewhere)
        words = (
            f"{path} leads nowhere: the folder was moved to {elsewhere}. The page still follows it."
        )
        tab.wait("return document.getElementById('banner') !== null")
        assert tab.text("#banner") == words
        assert tab.text("#state").startswith("Live")
        writer.extend(steps, final_observation=steps["observation"])
        tab.wait("return document.querySelector('[data-fact=steps]').textContent.startsWith('240')")
        assert tab.text("#banner") == words
        elsewhere.rename(path)
        tab.wait("return document.getElementById('banner') === null")


def test_a_server_that_ended_is_named(tab, serve, path):
    url = serve(path)
    tab.open(url)
    tab.wait("return document.getElementById('state').textContent === 'Not being written'")
    serve.servers[0].close()
    tab.wait("return document.getElementById('state').textContent === 'No answer from the server'")
    assert tab.text('[data-fact="steps"]').startswith("600")
    tab.go("draws")
    assert "mmreplay view has ended" in tab.wait(
        "const e = document.querySelector('.error'); return !e.hidden && e.textContent"
    )
    # Another one has another key.
    again = app.make_server(Page([path]), "127.0.0.1", int(tab.base.split(":")[2][:-1]))
    again.start()
    serve.servers.append(again)
    assert tab.wait("return document.getElementById('banner')?.textContent") == (
        "The server was started again. Open the address that mmreplay view printed."
    )


def test_each_tab_has_its_own_key(tab, serve, path, tmp_path, rng):
    with mr.ReplayBuffer.create(tmp_path / "one", schema(), 100, autoreset="disabled") as writer:
        writer.add(one_step(rng))
        tab.open(serve(tmp_path / "one", path))
        assert tab.texts("#nav a") == ["Overview", "Episodes", "Compare"]
        tab.key("3")
        assert tab.run("return location.hash") == "#overview"
        tab.key("?")
        help_ = tab.text("#keys")
        assert "1 2 4 Screens: overview, episodes, compare" in help_
        tab.key("Escape")
        tab.wait("return !document.getElementById('keys').open")
        tab.key("4")
        tab.wait("return mmr.app.shown?.startsWith('#compare')")
        assert tab.errors() == []


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("nonsense", "There is no screen “nonsense”."),
        ("e=abc", "e=abc is no episode."),
        ("compare", "There is one buffer on this page."),
        ("e=0:99999", "not written yet"),
    ],
)
def test_an_address_that_leads_nowhere_offers_the_episodes(tab, serve, path, address, words):
    tab.open(serve(path), address)
    assert words in tab.text(".empty")
    assert tab.texts(".empty a") == ["All episodes"]
    tab.run("document.querySelector('.empty a').click()")
    tab.wait("return mmr.app.shown === '#episodes'")


def test_one_buffer_is_named_without_a_choice(tab, serve, path):
    tab.open(serve(path))
    assert tab.run("return document.getElementById('buffer').hidden")
    assert tab.run("return document.querySelector('.pick').innerText").endswith("robot")


def test_time_stamps_have_all_their_digits(tab, serve, path):
    tab.open(serve(path))
    numbers_ = tab.run(
        "return [1700000001, 1.7e15, 3e16, 12345678.4, 1700000016.03, -1e7 - 0.25].map(mmr.number)"
    )
    assert numbers_ == [
        "1,700,000,001",
        "1,700,000,000,000,000",
        "3.00e+16",
        "12,345,678.4",
        "1,700,000,016.03",
        "-10,000,000.25",
    ]
    assert tab.run('return mmr.plus("1700000016.0", 0.03)') == "1,700,000,016.03"


def test_rows_are_compared_with_rows_and_steps_with_steps(tab, serve, tmp_path, rng):
    path = make_buffer(tmp_path / "finals", rng, count=300, capacity=400)
    tab.open(serve(path))
    # 20 episodes have a final row each.
    note = tab.text('[data-fact="steps"] small')
    assert tab.text('[data-fact="steps"]').startswith("600")
    assert note == "620 of 800 rows, 78 % full"


def test_bytes_of_a_text_are_those_of_its_values_and_references(tab, serve, tmp_path):
    fields = {"note": mr.Field.text(100), "reward": mr.Field((), "float32")}
    with mr.ReplayBuffer.create(
        tmp_path / "a", mr.Schema(fields), 10, heap_bytes=4096, autoreset="disabled"
    ) as buffer:
        for number in range(4):
            buffer.add(note="x" * 10 * number, reward=1.0)
    tab.open(serve(tmp_path / "a"))
    assert tab.texts("#fields tbody tr:first-child > *")[6] == str(16 + 15)
    assert tab.text("#fields .note") == "35 B a row, mean of the values looked at"


def test_two_pages_on_two_ports(tab, serve, path, tmp_path, rng):
    other = make_buffer(tmp_path / "other", rng, count=90)
    first, second = serve(path), serve(other)
    tab.open(first)
    tab.open(second)
    assert tab.text("h1") == "other"
    # A cookie holds for all ports of a host: these have names of their own.
    tab.open(first.partition("?")[0])
    assert tab.text("h1") == "robot"
    tab.open(second.partition("?")[0])
    assert tab.text("h1") == "other"


def test_nothing_moves_where_the_reader_wants_none(tab, serve, tmp_path):
    with mr.ReplayBuffer.create(tmp_path / "a", schema(), 100):
        url = serve(tmp_path / "a")
        moves = (
            "return getComputedStyle(document.getElementById('state'), '::before').animationName"
        )
        for motion, wanted in (("no-preference", "beat"), ("reduce", "none")):
            tab.open(url, motion=motion)
            tab.wait("return document.querySelector('.pill.live')")
            assert tab.run(moves) == wanted
            assert tab.run("return mmr.calm()") == (wanted == "none")


REACHABLE = """
const seen = (e) => e.checkVisibility() && !e.disabled && e.tabIndex >= 0;
return [...document.querySelectorAll(
  'a[href], button, input, select, summary, [tabindex]')].filter(seen).length;
"""
MARK_FOCUSED = """
const e = document.activeElement;
if (e && e !== document.body) e.dataset.reached = '1';
const visible = e.matches('.skip') || (() => { const r = e.getBoundingClientRect();
  return r.width > 0 && r.height > 0; })();
const style = getComputedStyle(e);
const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0;
return [document.querySelectorAll('[data-reached]').length, visible && outlined];
"""


@pytest.mark.parametrize(
    "screen", ["overview", "episodes", "e=0:0", "draws", "compare&c=1", "overview&b=2"]
)
def test_tab_reaches_everything_and_shows_where_it_is(tab, serve, path, tmp_path, rng, screen):
    def change(steps):
        steps["observation"]["joints"][3, 0, 0] = np.nan

    other = make_buffer(tmp_path / "other", rng, count=90, change=change)
    bad = make_buffer(tmp_path / "bad", rng, count=30)
    (bad / "data-000001" / "COMMIT").write_bytes(b"")
    tab.open(serve(other, path, bad), screen)
    if screen.startswith("e="):
        tab.wait("return document.querySelectorAll('.curve .uplot').length === 3")
    time.sleep(0.3)
    wanted = tab.run(REACHABLE)
    assert wanted >= 6
    found, outlined = 0, []
    for _ in range(wanted + 3):
        tab.key("Tab")
        found, shown = tab.run(MARK_FOCUSED)
        outlined.append(shown)
        if found == wanted:
            break
    missing = (
        "return [...document.querySelectorAll('a[href], button, input, select')]"
        ".filter((e) => e.tabIndex >= 0 && !e.dataset.reached).map((e) => e.outerHTML)"
    )
    assert found == wanted, tab.run(missing)
    assert all(outlined)


def test_keys_open_every_screen_and_change_what_it_shows(tab, serve, path):
    tab.open(serve(path, path))
    for key, screen in (("2", "episodes"), ("3", "draws"), ("4", "compare"), ("1", "overview")):
        tab.key(key)
        tab.wait(f"return mmr.app.shown?.startsWith('#{screen}')")
    tab.key("2")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    # A column is sorted from its head.
    tab.run("document.querySelector('.ehead [data-sort=length]').focus()")
    tab.key("Enter")
    tab.wait(
        "return document.querySelector('[aria-sort=descending]')?.textContent.startsWith('Length')"
    )
    tab.key("?")
    assert tab.run("return document.getElementById('keys').open")
    tab.key("Escape")
    tab.wait("return !document.getElementById('keys').open")
    assert tab.errors() == []


SLOW = """
const ask = window.fetch;
const [part, ms] = arguments;
window.fetch = async (path) => {
  const answer = await ask(path);
  if (path.includes(part)) await new Promise((resolve) => setTimeout(resolve, ms));
  return answer;
};
"""


@pytest.mark.parametrize(
    ("slow", "first", "second", "shown"),
    [
        ("at=31", "e=0:31", "e=0:62", "positions 62 to"),
        ("at=31", "e=0:31", "episodes", "Episodes20"),
        ("at=31", "e=0:31", "overview", "environment"),
        ("sampler", "draws", "e=0:62", "positions 62 to"),
    ],
)
def test_a_slow_answer_does_not_replace_a_newer_one(tab, serve, path, slow, first, second, shown):
    tab.open(serve(path))
    tab.run(SLOW, slow, 700)
    tab.run("location.hash = arguments[0]", f"#{first}")
    time.sleep(0.05)
    tab.go(second)
    assert shown in tab.text(".title")
    time.sleep(1.2)
    assert shown in tab.text(".title")
    hash_ = tab.run("return location.hash")
    assert hash_.startswith(f"#{second}")
    tab.key("ArrowRight")
    time.sleep(0.4)
    hash_ = tab.run("return location.hash")
    wanted = "#e=0:62&t=1" if second == "e=0:62" else f"#{second}"
    assert hash_ == wanted
    assert tab.errors() == []


def test_a_slow_overview_does_not_replace_another_screen(tab, serve, path):
    tab.open(serve(path), "episodes")
    tab.run(SLOW, "alpha", 700)
    tab.run("mmr.app.alpha = 0.5; location.hash = '#overview'")
    time.sleep(0.05)
    tab.run("mmr.app.alpha = null")
    tab.go("e=0:62")
    time.sleep(1)
    assert "positions 62 to" in tab.text(".title")


def choose(tab, name, value):
    tab.run(
        "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change'))",
        name,
        value,
    )


def test_of_two_filters_the_last_one_holds(tab, serve, path):
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    tab.run(SLOW, "env=0", 600)
    choose(tab, "env", "0")
    time.sleep(0.05)
    choose(tab, "env", "")
    choose(tab, "end", "unfinished")
    tab.wait("return document.querySelector('.note').textContent === '0 of 20'")
    time.sleep(1)
    assert tab.text(".note") == "0 of 20"
    assert tab.text(".list .empty") == "No episode fits these filters."
    rows = "return document.querySelector('[role=table]').ariaRowCount"
    assert tab.run(rows) == "1"
    choose(tab, "end", "")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    assert tab.text(".note") == "20"
    assert tab.run(rows) == "21"
    assert tab.errors() == []


def test_rows_keep_the_focus_while_returns_are_read(tab, serve, path):
    tab.open(serve(path))
    tab.run("""
      const ask = window.fetch;
      window.asked = 0;
      window.fetch = async (path) => {
        const answer = await ask(path);
        if (!path.includes("/episodes")) return answer;
        const table = await answer.json();
        window.asked++;
        table.done = window.asked < 4 ? 0.5 : 1;
        if (window.asked < 3) table.rows[2][3] = null;
        return new Response(JSON.stringify(table));
      };
    """)
    tab.go("episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    tab.run("window.first = document.querySelector('.erow[data-row=\"1\"]')")
    # A change starts no second chain of requests.
    choose(tab, "measure", "length")
    tab.wait("return window.asked === 2")
    tab.run("document.querySelector('.erow[data-row=\"1\"]').dataset.same = 1")
    tab.run("document.querySelector('.erow[data-row=\"2\"] a').focus()")
    cell = "document.querySelector('.erow[data-row=\"2\"] [role=cell]:nth-child(4)')"
    assert tab.run(f"return {cell}.textContent") == "\u2013"
    tab.wait(f"return {cell}.textContent !== '\\u2013'")
    focused = "return document.activeElement.closest('.erow')?.dataset.row"
    assert tab.run(focused) == "2"
    assert tab.run("return document.querySelectorAll('[data-same]').length") == 1
    tab.wait("return document.querySelector('.note').textContent === '20'")
    assert tab.run("return window.asked") == 4
    time.sleep(2.5)
    assert tab.run("return window.asked") == 4
    assert tab.run(focused) == "2"
    assert tab.errors() == []


def test_a_refused_table_has_words(tab, serve, path):
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    tab.run("""
      window.ask = window.fetch;
      window.fetch = async (path) => !path.includes("/episodes") ? ask(path)
        : new Response('{"error": "The disk is gone."}', {status: 409});
    """)
    tab.run("document.querySelector('.ehead button').focus()")
    tab.key("Enter")
    assert "The disk is gone." in tab.text(".list .empty")
    assert tab.run("return document.querySelectorAll('.erow').length") == 0
    # The head of a column keeps the focus when the table is sorted by it.
    assert tab.run("return document.activeElement.closest('.ehead') != null")
    tab.run("window.fetch = window.ask")
    tab.run("document.querySelector('.list .empty button').click()")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    assert tab.run("return document.querySelector('.list .empty')") is None
    assert tab.errors() == []


def test_a_live_overview_is_drawn_around_the_focus(tab, serve, tmp_path, rng):
    path = tmp_path / "live"
    with mr.ReplayBuffer.create(path, schema(), 1000, autoreset="disabled") as writer:
        steps = squeezed(healthy_steps(rng, 60, 1))
        writer.extend(steps, final_observation=steps["observation"])
        tab.open(serve(path))
        fact = "return document.querySelector('[data-fact=episodes]').textContent"
        wanted = 2
        for focus in ("#fine", "#scroll", "#rewards"):
            tab.run(
                "const e = document.querySelector(arguments[0]);"
                "if (!e.matches('summary, .scroll')) e.tabIndex = -1; e.focus()",
                focus,
            )
            writer.extend(steps, final_observation=steps["observation"])
            wanted += 2
            tab.wait(f"{fact}.startsWith('{wanted}')")
            assert "#" + tab.run("return document.activeElement.id") == focus
    assert tab.errors() == []


def test_alpha_is_chosen_on_the_page(tab, serve, path, rng):
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(path, sampler=sampler) as buffer:
        for _ in range(4):
            batch = buffer.sample(256)
            buffer.update_priorities(batch, rng.random(256))
    page = Page([path])
    tab.open(serve(path))
    shares = {}
    for alpha in ("0.6", "1.5", "0"):
        if alpha != "0.6":
            choose(tab, "alpha", alpha)
        tab.wait(
            "return [...document.querySelectorAll('.note')].some((n) => "
            f"n.textContent === 'with alpha {alpha}')"
        )
        assert tab.run("return document.getElementById('alpha').value") == alpha
        answer = json.loads(page.answer("/api/b/0/overview", f"alpha={alpha}").body)
        shares[alpha] = round(100 * answer["priorities"]["effective"])
        rows = tab.texts("dl.now dd")
        assert f"{shares[alpha]} % of the rows" in rows
    assert len(set(shares.values())) == 3
    page.close()
    assert tab.errors() == []


def test_the_table_is_sorted_by_environment(tab, serve, path):
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    for direction, env in (("ascending", "0"), ("descending", "1")):
        tab.run("document.querySelector('[data-sort=env]').click()")
        tab.wait(
            "return document.querySelector('[role=columnheader][aria-sort="
            f"{direction}]')?.textContent.startsWith('Env')"
        )
        tab.wait(
            "const all = [...document.querySelectorAll('.erow .mono')];"
            "return all.length > 9 && all.slice(0, 10).every((e) => "
            f"e.textContent.startsWith('{env} :'))"
        )
    assert tab.errors() == []


def test_the_table_is_sorted_by_the_kind_of_end(tab, serve, path):
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    for direction, word in (("ascending", "terminated"), ("descending", "truncated")):
        tab.run("document.querySelector('[data-sort=end]').click()")
        tab.wait(
            "return document.querySelector('[role=columnheader][aria-sort="
            f"{direction}]')?.textContent.startsWith('End')"
        )
        tab.wait(
            f"return document.querySelector('.erow[data-row=\"0\"] .tag')?.textContent === '{word}'"
        )
    assert tab.errors() == []


def test_a_table_grows_with_its_buffer(tab, serve, tmp_path, rng):
    path = make_buffer(tmp_path / "live", rng, count=60)
    with mr.ReplayBuffer.open(path, "r+") as writer:
        tab.open(serve(path), "episodes")
        tab.wait("return document.querySelector('.note').textContent === '4'")
        steps = healthy_steps(rng, 90, 2)

        def add():
            writer.extend(steps, final_observation=steps["observation"])

        add()
        tab.wait("return document.querySelector('.note').textContent === '10'")
        assert tab.texts(".erow[data-row='0'] .mono") == ["0 : 124"]
        # Under the reader's focus rows do not move.
        tab.run("document.querySelector('.erow[data-row=\"1\"] .mono').focus()")
        add()
        time.sleep(3)
        assert tab.text(".note") == "10"
        tab.run("document.activeElement.blur()")
        tab.wait("return document.querySelector('.note').textContent === '16'")
    assert tab.errors() == []


def test_another_buffer_at_the_same_path_is_another(tab, serve, path, rng):
    tab.open(serve(path), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    thumb = (
        "const c = document.querySelector('.erow[data-row=\"0\"] canvas');"
        "if (c?.width !== 32) return null;"
        "return [...c.getContext('2d').getImageData(0, 0, 32, 24).data].join()"
    )
    before = tab.wait(thumb)
    tab.run("document.querySelector('.erow input').click()")
    assert tab.text("[aria-label=Selection] h2") == "1 episode selected"
    version = tab.run("return mmr.app.states[0].version")
    shutil.rmtree(path)
    make_buffer(path, rng)
    tab.wait(f"return mmr.app.states[0].version?.split('.')[0] !== {version.split('.')[0]!r}")
    tab.go("overview")
    tab.go("episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    assert tab.run("return document.querySelector('[aria-label=Selection]').hidden")
    assert tab.run("return document.querySelector('.erow input').checked") is False
    assert tab.wait(thumb) != before


def test_any_of_many_environments_is_chosen(tab, serve, tmp_path):
    num_envs = 600
    fields = {"observation": mr.Field((), "float32"), "reward": mr.Field((), "float32")}
    schema_ = mr.Schema(fields | {"terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(
        tmp_path / "many", schema_, 20, num_envs, autoreset="disabled"
    ) as buffer:
        ends = np.zeros((20, num_envs), bool)
        ends[4::5] = True
        zeros = np.zeros((20, num_envs), np.float32)
        buffer.extend(observation=zeros, reward=zeros + 1, terminated=ends)
    tab.open(serve(tmp_path / "many"), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 5")
    choose(tab, "env", "598")
    tab.wait("return document.querySelector('.note').textContent === '4 of 2,400'")
    assert all(text.startswith("598 :") for text in tab.texts(".erow .mono"))
    choose(tab, "env", "")
    tab.wait("return document.querySelector('.note').textContent === '2,400'")
    # There is no such environment: the table stays.
    choose(tab, "env", "600")
    assert tab.run("return document.getElementById('env').matches(':invalid')")
    assert tab.text(".note") == "2,400"
    assert tab.errors() == []


def test_names_that_objects_have_are_names(tab, serve, tmp_path, rng):
    def add(steps):
        steps["constructor"] = steps["reward"] * 2

    fields = dict(schema().fields) | {"constructor": mr.Field((), "float32")}
    path = make_buffer(tmp_path / "a", rng, change=add, schema=mr.Schema(fields))
    tab.open(serve(path), "e=0:0")
    tab.wait("return document.querySelectorAll('.curve .uplot').length === 4")
    assert re.fullmatch(r"s[0-5]", tab.run("return 's' + mmr.slot('constructor')"))
    tab.go("constructor")
    assert "There is no screen “constructor”." in tab.text("main")
    assert tab.errors() == []


def test_a_saved_table_is_that_of_the_server(tab, serve, path, tmp_path):
    page = Page([path])
    save_page(page, tmp_path / "page")
    page.close()
    tab.open((tmp_path / "page" / "index.html").as_uri(), "episodes")
    tab.wait("return document.querySelectorAll('.erow').length > 3")
    label = "return document.querySelector('.plot').getAttribute('aria-label')"
    assert tab.run(label) == "Histogram of episode returns"
    choose(tab, "measure", "length")
    tab.wait(f"{label} === 'Histogram of episode lengths'")
    tab.run("document.querySelector('[data-sort=end]').click()")
    tab.wait(
        "const k = [...document.querySelectorAll('.erow .tag')].map((e) => "
        "e.textContent); return k.length > 3 && k.join() === [...k].sort().join()"
    )
    assert tab.errors() == []


def test_draws_are_offered_where_a_step_can_be_drawn(tab, serve, tmp_path, rng):
    with mr.ReplayBuffer.create(tmp_path / "one", schema(), 100, autoreset="disabled") as writer:
        writer.add(one_step(rng))
        tab.open(serve(tmp_path / "one"))
        assert tab.text("[data-fact=steps]").startswith("1")
        assert tab.texts("#nav a") == ["Overview", "Episodes"]
        tab.key("3")
        assert tab.run("return location.hash") == "#overview"
        # Another screen reads no overview: the state says that one can be drawn.
        tab.go("episodes")
        writer.add(one_step(rng))
        tab.wait("return document.querySelectorAll('#nav a').length === 3")
        writer.clear()
        tab.wait("return document.querySelectorAll('#nav a').length === 2")


def test_a_saved_page_leads_to_saved_episodes_only(tab, path, tmp_path):
    page = Page([path], sampler="UniformSampler(seed=1)")
    save_page(page, tmp_path / "page")
    page.close()
    tab.open((tmp_path / "page" / "index.html").as_uri(), "episodes")
    tab.wait("return document.querySelectorAll('.erow a').length > 2")
    saved = sorted(
        tuple(int(n.replace(",", "")) for n in text.split(" : ")) for text in tab.texts(".erow a")
    )
    for env_id in (0, 1):
        begins = [begin for env, begin in saved if env == env_id]
        if not begins:
            continue
        tab.go(f"e={env_id}:{begins[0]}")
        for key, order in (("n", begins[1:]), ("p", begins[-2::-1])):
            for begin in order:
                tab.key(key)
                tab.wait(f"return mmr.app.shown === '#e={env_id}:{begin}'")
                assert f"positions {begin:,} to" in tab.text(".title")
            tab.key(key)
            time.sleep(0.3)
            assert "This cannot be shown" not in tab.text("main")
    tab.go("draws")
    tab.wait("return document.querySelectorAll('.tiles li').length === 256")
    links = tab.texts(".tiles a")
    assert 0 < len(links) < 256
    address = tab.run("return document.querySelector('.tiles a').getAttribute('href')")
    tab.go(address[1:])
    position = int(address.split(":")[1])
    words = tab.text(".title").replace(",", "")
    begin, last = map(int, re.search(r"positions (\d+) to (\d+)", words).groups())
    assert begin <= position <= last
    step = position - begin
    tab.wait(f"return document.querySelector('.time').textContent.startsWith('{step} ')")
    assert tab.errors() == []


BOXES = """
const box = (e) => {
  const { left, right, top, bottom } = e.getBoundingClientRect();
  return [left, right, top, bottom];
};
const seen = (selector) =>
  [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility());
const boxes = (selector) => seen(selector).map(box);
return {
  scroll: document.documentElement.scrollWidth,
  bar: boxes('.bar > :not(nav, .grow), .bar nav a'),
  lists: seen('.list').map((e) => e.scrollWidth - e.clientWidth),
  rows: boxes('.ehead, .ehead > *'),
  facts: boxes('.facts, .facts > div'),
  cards: boxes('main > :not(.title), .wide-grid > :not(.title)'),
  small: boxes('a, button, input, select, summary').filter(
    ([left, right, top, bottom]) =>
      right > left && (right - left < 24 || bottom - top < 24),
  ),
};
"""


def ends_of_rows(boxes):
    """Right edges of the last boxes of each row, from left and top."""
    rows = {}
    for _, right, top, _ in boxes:
        rows[round(top)] = max(right, rows.get(round(top), 0))
    return rows.values()


def test_each_width_shows_all_of_the_page_without_holes(tab, serve, tmp_path):
    rng = np.random.default_rng(0)

    def without_actions(path):
        fields = dict(schema().fields)
        fields.pop("action")
        steps = healthy_steps(rng, 60, 2)
        steps.pop("action")
        with mr.ReplayBuffer.create(
            path, mr.Schema(fields), 100, 2, autoreset="disabled"
        ) as buffer:
            buffer.extend(steps, final_observation=steps["observation"])
        return path

    long_name = "a-camera-without-actions-and-with-a-long-name"
    url = serve(*(without_actions(tmp_path / name) for name in (long_name, "other")))
    screens = ("overview", "episodes", "e=0:40", "draws", "compare&c=1")
    for width in (390, 641, 700, 768, 860, 900, 1000, 1440):
        tab.open(url, width=width, theme="dark" if width % 100 else "light")
        for screen in screens:
            tab.go(screen)
            # The pill is as wide as it is over a fast writer.
            tab.run(
                "const [word, speed] = document.querySelector('#state span').children;"
                "[word.textContent, speed.textContent] = ['Live', ', 12,300 steps/s']"
            )
            if screen == "episodes":
                tab.wait("return document.querySelectorAll('.erow').length > 3")
            if screen == "compare&c=1":
                tab.wait("return document.querySelectorAll('.wide-grid .uplot').length")
            places = tab.run(BOXES)
            where = (screen, width)
            assert places["scroll"] == width, where
            margin = 12 if width <= 640 else 24
            for left, right, top, bottom in places["bar"]:
                assert margin <= left < right <= width - margin, where
                assert 0 <= top < bottom <= 100, where
            assert all(over == 0 for over in places["lists"]), where
            if places["rows"]:
                whole, *columns = places["rows"]
                assert max(right for _, right, _, _ in columns) <= whole[1] + 0.5, where
            if places["facts"]:
                whole, *facts = places["facts"]
                for end in ends_of_rows(facts):
                    assert end == pytest.approx(whole[1], abs=2), where
            for end in ends_of_rows(places["cards"]):
                wanted = min(width, 1440) - margin
                assert screen.startswith("e=") or end == pytest.approx(wanted, abs=1), (where,)
            if width == 390:
                assert places["small"] == [], where
    assert tab.errors() == []


def test_returns_fill_their_card_and_have_whole_ticks(tab, serve, tmp_path, rng):
    def change(steps):
        # -0.0 is 0 to the reader.
        steps["reward"][:] = np.round(steps["reward"] / 4)
        steps["reward"][0] = [-0.0, 1]

    tab.open(serve(make_buffer(tmp_path / "a", rng, change=change)), "episodes")
    tab.run(
        "const labels = mmr.labels; window.ticks = [];"
        "mmr.labels = (...given) => { ticks.push(labels(...given));"
        " return ticks.at(-1); }"
    )
    tab.go("overview")
    tab.wait("return document.querySelector('#returns .uplot')")
    gap = tab.run(
        "const bottom = (e) => e.getBoundingClientRect().bottom;"
        "return bottom(document.querySelector('#returns'))"
        " - bottom(document.querySelector('#returns .uplot'))"
    )
    assert 0 < gap < 60
    labels = tab.wait("return ticks.length && ticks.flat().filter(Boolean)")
    assert labels
    assert not any("." in label for label in labels[: len(labels) // 2])
    rewards = tab.text("#rewards")
    assert "-0" not in rewards
    assert tab.errors() == []

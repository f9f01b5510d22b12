"""axe-core finds no serious fault, in both colours, wide and on a phone.

It comes from npm: `.ci/run` unpacks it into build/axe, and MMREPLAY_AXE names the
axe.min.js of another one.
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.page.api import Page
from tests.page.browser import Tab, needs_chromium
from tests.page.conftest import make_buffer, schema
from tests.page.test_server import app

ROOT = Path(__file__).resolve().parents[2]
AXE = Path(os.environ.get("MMREPLAY_AXE", ROOT / "build/axe/package/axe.min.js"))

pytestmark = [
    needs_chromium,
    pytest.mark.slow,
    pytest.mark.skipif(
        not AXE.is_file(), reason="axe-core is missing; .ci/run fetches it, or set MMREPLAY_AXE"
    ),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory, driver):
    """A browser, and a page with findings, priorities and other buffers."""

    def change(steps):
        steps["observation"]["joints"][3, 0, 0] = np.nan
        steps["reward"][:] = np.round(steps["reward"])

    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("axe")
    one = make_buffer(folder / "one", rng, change=change)
    two = make_buffer(folder / "two", rng, count=60)
    sampler = mr.PrioritizedSampler(seed=0)
    with mr.ReplayBuffer.open(one, sampler=sampler) as buffer:
        batch = buffer.sample(256)
        buffer.update_priorities(batch, rng.random(256))
    bad = make_buffer(folder / "bad", rng, count=60)
    (bad / "data-000001" / "COMMIT").write_bytes(b"")
    empty = folder / "empty"
    mr.ReplayBuffer.create(empty, schema(), 10).close()
    server = app.make_server(Page([one, two, bad, empty]), "127.0.0.1", 0)
    server.start()
    yield Tab(driver), server.url
    server.close()


RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done(
  found.violations.map((v) => [v.impact, v.id, v.nodes.map((n) => n.html).slice(0, 5)])
));
"""


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "screen",
    [
        "overview",
        "episodes",
        "e=0:40",
        "draws",
        "compare&c=1",
        "overview&b=2",
        "overview&b=3",
        "e=0:999",
    ],
)
def test_no_serious_violation(page, screen, theme, width):
    tab, url = page
    tab.open(url, screen, width=width, theme=theme)
    assert tab.run("return document.documentElement.dataset.theme") == theme
    time.sleep(0.3)
    # The page's policy refuses scripts of others, a debugger's are not asked.
    tab.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
    violations = tab.driver.execute_async_script(RUN)
    serious = [v for v in violations if v[0] in ("serious", "critical")]
    assert serious == []

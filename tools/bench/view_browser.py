"""Measures the page of `mmreplay view` as headless Chromium shows it.

Debian's packages chromium and chromium-driver, and selenium. What is timed is timed in
the page itself, by its own clock, from the start of the navigation where there is one.
"""

from __future__ import annotations

import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--window-size=1440,900",
)

WATCH = """
window.seen = {};
new MutationObserver(() => {
  if (!seen.returns && document.querySelector('#returns .uplot')) {
    seen.returns = performance.now();
  }
}).observe(document, {childList: true, subtree: true});
"""
"""Runs before the page's own scripts: when are the episode returns drawn?"""

OPENED = """
const paint = performance.getEntriesByName('first-contentful-paint')[0];
return paint && seen.returns ? [paint.startTime, seen.returns] : null;
"""

SCRUB = """
const [seconds, last, isRandom, done] = arguments;
const paint = mmr.paint;
let painted = 0, step = 0;
mmr.paint = (canvas, frame) => {
  if (canvas.closest('.screen')) painted++;
  paint(canvas, frame);
};
const begin = performance.now();
const tick = () => {
  const passed = performance.now() - begin;
  if (passed >= 1000 * seconds) {
    mmr.paint = paint;
    done(1000 * painted / passed);
    return;
  }
  step = isRandom ? Math.floor(Math.random() * (last + 1)) : (step + 1) % (last + 1);
  mmr.app.player.move(step);
  requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
"""

CURVE = """
const [turns, last, done] = arguments;
(async () => {
  const curve = mmr.app.player.curves().find((each) => each.title === 'observation');
  const times = [];
  for (let turn = 1; turn <= turns; turn++) {
    mmr.app.player.zoom(turn, last - turn);
    const begin = performance.now();
    await curve.load();
    await Promise.resolve();
    times.push(performance.now() - begin);
    await new Promise((resolve) => setTimeout(resolve, 150));
  }
  done(times);
})();
"""

STEPS_SEEN = """
window.stepsSeen = {};
new MutationObserver(() => {
  const fact = document.querySelector('[data-fact=steps]');
  const steps = fact && fact.firstChild && fact.firstChild.data.replaceAll(',', '');
  if (steps && !(steps in stepsSeen)) stepsSeen[steps] = Date.now();
}).observe(document.getElementById('main'),
           {childList: true, subtree: true, characterData: true});
"""

GONE_SEEN = """
window.goneSeen = 0;
new MutationObserver(() => {
  const text = document.getElementById('state').textContent;
  if (text === 'Writer gone' && !goneSeen) goneSeen = Date.now();
}).observe(document.getElementById('state'),
           {childList: true, subtree: true, characterData: true});
"""


def is_there() -> bool:
    """Whether Chromium, its driver and selenium are installed."""
    programs = shutil.which("chromium") and shutil.which("chromedriver")
    return bool(programs) and find_spec("selenium") is not None


class Browser:
    """One headless Chromium with one tab."""

    def __init__(self) -> None:
        """Start it."""
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        for argument in ARGUMENTS:
            options.add_argument(argument)
        options.binary_location = shutil.which("chromium") or ""
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver: Any = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(120)
        script = {"source": WATCH}
        self.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)

    def close(self) -> None:
        """End it."""
        self.driver.quit()

    def look(self, width: int, height: int, theme: str) -> None:
        """Show pages at a size, in light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {**metrics, "mobile": False}
        )
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def wait(self, script: str, seconds: float = 60.0) -> Any:
        """Wait until a script returns something true, and return it.

        Raises:
            TimeoutError: It did not.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = self.driver.execute_script(script)
            if value:
                return value
            time.sleep(0.02)
        raise TimeoutError(f"{script} stayed false for {seconds:g} s.")

    def open(self, url: str, screen: str = "overview") -> None:
        """Open a page at a screen, and wait until it is drawn."""
        self.driver.get("about:blank")
        self.driver.get(f"{url}#{screen}")
        self.wait("return window.mmr?.app?.shown != null")

    def opened(self, url: str) -> dict[str, float]:
        """Seconds until the first paint, and until the overview is drawn."""
        self.driver.get("about:blank")
        self.driver.get(url)
        paint, returns = self.wait(OPENED)
        return {"first_paint_s": paint / 1000, "overview_s": returns / 1000}

    def scrubbed(self, url: str, steps: int, seconds: float) -> dict[str, float]:
        """Frames painted a second: dragged forward, and moved at random."""
        found = {}
        for name, is_random in (("forward", False), ("random", True)):
            self.open(url, "e=0:0")
            self.wait("return mmr.app.player?.shown() === 0")
            time.sleep(0.5)
            found[name] = self.driver.execute_async_script(SCRUB, seconds, steps - 1, is_random)
        return found

    def curve_s(self, url: str, steps: int, turns: int = 9) -> float:
        """Median seconds from a new zoom until its curve is drawn."""
        self.open(url, "e=0:0")
        self.wait(
            "return mmr.app.player?.curves().length === 2 && "
            "mmr.app.player.curves().every((each) => each.data())"
        )
        times: list[float] = self.driver.execute_async_script(CURVE, turns, steps - 1)
        return median(times) / 1000

    def watch_steps(self, url: str) -> None:
        """Open a page, and note when each number of steps is shown."""
        self.open(url)
        self.wait("return document.getElementById('state').textContent.startsWith('Live')")
        self.driver.execute_script(STEPS_SEEN)
        self.driver.execute_script(GONE_SEEN)

    def steps_seen(self) -> dict[str, float]:
        """When each number of steps was shown, in seconds since the epoch."""
        seen = self.driver.execute_script("return stepsSeen")
        return {steps: at / 1000 for steps, at in seen.items()}

    def gone_seen(self) -> float:
        """When the page said that the writer is gone, in seconds since the epoch."""
        return float(self.wait("return goneSeen", 20)) / 1000


def wheel_nbytes(names: tuple[str, ...]) -> int:
    """Bytes of installed distributions, compressed as in their wheels."""
    import io
    import zipfile
    from importlib import metadata

    total = 0
    for name in names:
        memory = io.BytesIO()
        with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in metadata.distribution(name).files or ():
                path = Path(str(file.locate()))
                if path.suffix != ".pyc" and path.is_file():
                    archive.write(path, str(file))
        total += len(memory.getvalue())
    return total

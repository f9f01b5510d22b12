"""Take the screenshots of docs/view.md, of a recording of Breakout.

``python -m tools.view_shots`` plays Breakout by a rule that follows the ball more and
more often, into a buffer in a temporary folder, serves the page and writes
docs/figures/view-*.png. The priorities are made up: larger near a reward. It needs the
extras rl, web and images, selenium, and Debian's chromium and chromium-driver.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import mmreplay as mr
from tools.bench.view_browser import Browser

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
NUM_ENVS, STEPS, CAPACITY = 4, 16_000, 5_000
LEARNED_STEPS = 3_000
"""Steps until the ball is followed nearly always."""
COURT = (slice(93, 188), slice(8, 152))
PADDLE_ROW = 190
SHOTS = {
    # By file: the screen, the height, dark or light, and what is awaited.
    "overview": ("overview", 830, "light", "document.querySelector('#returns .uplot')"),
    "episode": ("{episode}", 830, "light", "document.querySelector('.curve:nth-child(2) .uplot')"),
    "draws": ("draws", 900, "dark", "document.querySelectorAll('.tiles canvas')[60]?.width > 1"),
}


def play(path: Path) -> None:
    """Record Breakout, and give its steps priorities."""
    import ale_py
    import gymnasium

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    envs: Any = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make("ALE/Breakout-v5")] * NUM_ENVS
    )
    rng = np.random.default_rng(0)
    played = 0

    def policy(frames: NDArray[np.uint8]) -> NDArray[np.int64]:
        nonlocal played
        played += 1
        actions = rng.integers(0, 4, NUM_ENVS)
        for i in np.flatnonzero(rng.random(NUM_ENVS) < played / LEARNED_STEPS - 0.03):
            actions[i] = follow_ball(frames[i, :, :, 0], int(actions[i]))
        return actions

    mr.record(envs, path, steps=STEPS, capacity=CAPACITY, seed=0, policy=policy)
    with mr.ReplayBuffer.open(path, sampler=mr.PrioritizedSampler(seed=0)) as buffer:
        for _ in range(150):
            batch = buffer.sample(256)
            spread = rng.lognormal(-3, 0.8, 256)
            buffer.update_priorities(batch, spread + batch["reward"] / 4)


def follow_ball(frame: NDArray[np.uint8], otherwise: int) -> int:
    """Fire where there is no ball, else move the paddle towards it."""
    ball = np.argwhere(frame[COURT] > 150)
    paddle = np.flatnonzero(frame[PADDLE_ROW, COURT[1]] > 150)
    if not len(ball):
        return 1
    if not len(paddle):
        return otherwise
    away = float(ball[:, 1].mean() - paddle.mean())
    return 2 if away > 3 else 3 if away < -3 else 0


def take(path: Path, browser: Browser) -> None:
    """Take all screenshots of the page on a buffer."""
    with mr.ReplayBuffer.open(path) as buffer:
        table = mr.episode_table(buffer)
    best = int(np.nanargmax(np.where(table.whole, table.returns, np.nan)))
    length = int(table.end[best] - table.begin[best])
    episode = f"e={table.env_ids[best]}:{table.begin[best]}&t={int(0.6 * length)}"
    page = mr.view(path)
    try:
        for name, (screen, height, theme, awaited) in SHOTS.items():
            browser.look(1440, height, theme)
            browser.open(page.url, screen.format(episode=episode))
            browser.wait(f"return {awaited}")
            browser.driver.execute_script("document.activeElement.blur()")
            browser.driver.execute_async_script("setTimeout(arguments[0], 700)")
            save(browser.driver.get_screenshot_as_png(), FIGURES / f"view-{name}.png")
    finally:
        page.close()


def save(png: bytes, path: Path) -> None:
    """Write a screenshot with 128 colours, which are enough for it."""
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size >> 10} KiB")


def main() -> None:
    """Play, serve and take them."""
    browser = Browser()
    try:
        with tempfile.TemporaryDirectory(prefix="mmreplay-shots-") as folder:
            path = Path(folder) / "breakout"
            play(path)
            take(path, browser)
    finally:
        browser.close()


if __name__ == "__main__":
    main()

"""A headless Chromium for the tests of the page, where one is installed."""

from __future__ import annotations

import json
import shutil
import time

import pytest

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing")
pytest.importorskip("starlette")

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="chromium and chromium-driver are missing",
)


def start():
    """Start a browser; its console and its requests are logged."""
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ):
        options.add_argument(argument)
    options.binary_location = CHROMIUM
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    service = webdriver.ChromeService(DRIVER)
    return webdriver.Chrome(options=options, service=service)


class Tab:
    """One tab: opens addresses of a page, waits, and reads what is there."""

    def __init__(self, driver):
        self.driver = driver
        self.base = ""

    def open(self, url, fragment="overview", width=1440, height=900, theme="light"):
        """Open the first address of a server, or a file, at a screen."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": width < 600,
            },
        )
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": theme}]},
        )
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get("about:blank")
        self.driver.get(url)
        self.base = url.partition("?")[0].partition("#")[0]
        self.go(fragment)

    def go(self, fragment):
        """Go to a screen, and wait until it is drawn."""
        self.wait("return window.mmr?.app?.shown != null")
        self.run("location.hash = arguments[0]", f"#{fragment}")
        self.wait(f"return mmr.app.shown === {json.dumps('#' + fragment)}")

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, script, seconds=10.0):
        """Wait until a script returns something true, and return it."""
        end = time.monotonic() + seconds
        while True:
            value = self.run(script)
            if value:
                return value
            if time.monotonic() > end:
                text = self.run("return document.body.innerText")[:2000]
                raise AssertionError(f"{script} stayed {value!r}:\n{text}")
            time.sleep(0.03)

    def text(self, selector):
        """Text of an element, once it is there."""
        quoted = json.dumps(selector)
        self.wait(f"return document.querySelector({quoted})")
        return self.run(f"return document.querySelector({quoted}).textContent")

    def texts(self, selector):
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e"
            ".textContent)",
            selector,
        )

    def key(self, key, shift=False):
        """Press a key where the focus is."""
        names = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40}
        names |= {"Home": 36, "End": 35, "Enter": 13, "Tab": 9, " ": 32}
        event = {
            "key": key,
            "windowsVirtualKeyCode": names.get(key, ord(key[0].upper())),
            "modifiers": 8 if shift else 0,
        }
        if len(key) == 1:
            event["text"] = key
        elif key == "Enter":
            event["text"] = "\r"
        self.driver.execute_cdp_cmd(
            "Input.dispatchKeyEvent", {"type": "keyDown", **event}
        )
        event.pop("text", None)
        self.driver.execute_cdp_cmd(
            "Input.dispatchKeyEvent", {"type": "keyUp", **event}
        )

    def errors(self):
        """Messages of the console."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
            and "willReadFrequently" not in entry["message"]
        ]

    def requests(self):
        """Addresses that were requested since `open`."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found

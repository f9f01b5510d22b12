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
    CHROMIUM is None or DRIVER is None, reason="chromium and chromium-driver are missing"
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
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(DRIVER)
    return webdriver.Chrome(options=options, service=service)


class Tab:
    """One tab: opens addresses of a page, waits, and reads what is there."""

    def __init__(self, driver):
        self.driver = driver
        self.base = ""

    def open(
        self,
        url,
        fragment="overview",
        width=1440,
        height=900,
        theme="light",
        motion="no-preference",
    ):
        """Open the first address of a server, or a file, at a screen."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {
                "features": [
                    {"name": "prefers-color-scheme", "value": theme},
                    {"name": "prefers-reduced-motion", "value": motion},
                ]
            },
        )
        # The page before this one may still ask a server that has ended.
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
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
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)",
            selector,
        )

    def key(self, key, shift=False):
        """Press a key where the focus is."""
        names = {"ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40}
        names |= {"Home": 36, "End": 35, "Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        event = {
            "key": key,
            "windowsVirtualKeyCode": names.get(key, ord(key[0].upper())),
            "modifiers": 8 if shift else 0,
        }
        if len(key) == 1:
            event["text"] = key
        elif key == "Enter":
            event["text"] = "\r"
        self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", **event})
        event.pop("text", None)
        self.driver.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def type(self, text):
        """Type a text where the focus is."""
        self.driver.execute_cdp_cmd("Input.insertText", {"text": text})

    def center(self, selector):
        """Return the middle of an element and its size, once it is there."""
        quoted = json.dumps(selector)
        self.wait(f"return document.querySelector({quoted})")
        return self.run(
            f"const e = document.querySelector({quoted});"
            "e.scrollIntoView({block: 'center'});"
            "const r = e.getBoundingClientRect();"
            "return [r.left + r.width / 2, r.top + r.height / 2, r.width, r.height]"
        )

    def mouse(self, kind, x, y, clicks=1):
        """Move, press or release the mouse."""
        held = {"button": "left", "clickCount": clicks, "buttons": 1}
        event = {"type": kind, "x": x, "y": y, **held}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def click(self, x, y, clicks=1):
        """Click once, or several times."""
        self.mouse("mouseMoved", x, y, 0)
        for number in range(1, clicks + 1):
            self.mouse("mousePressed", x, y, number)
            self.mouse("mouseReleased", x, y, number)

    def drag(self, selector, low, high):
        """Drag over an element, from one share of its width to another."""
        x, y, width, _ = self.center(selector)
        left = x - width / 2
        self.mouse("mouseMoved", left + low * width, y, 0)
        self.mouse("mousePressed", left + low * width, y)
        for step in range(1, 6):
            share = low + (high - low) * step / 5
            self.mouse("mouseMoved", left + share * width, y)
        self.mouse("mouseReleased", left + high * width, y)

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

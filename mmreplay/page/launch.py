"""Starts the page for the command line and for notebooks, where it is installed."""

from __future__ import annotations

import os
import threading
import webbrowser
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.disk.files import absolute
from mmreplay.errors import CorruptError, FormatError, SchemaError
from mmreplay.format.metadata import FILE_NAME
from mmreplay.nesting import meant
from mmreplay.page.api import Page
from mmreplay.page.draws import parse_sampler
from mmreplay.page.frames import layouts
from mmreplay.page.requests import Refusal

if TYPE_CHECKING:
    from mmreplay.page.app import PageServer

MISSING = "The page needs Starlette and uvicorn. Run: pip install 'mmreplay[web]'"


def make_page(
    paths: list[Path], images: Mapping[str, str] | None = None, sampler: str = ""
) -> Page:
    """Make a page of buffers that exist.

    A damaged buffer is shown: the page says what is wrong with it.

    Args:
        paths: Their folders.
        images: Stated layout by the path of an image field.
        sampler: What draws at first.

    Raises:
        FormatError: A path holds no buffer, or one of a newer version.
        FailedError: A path cannot be read.
        SchemaError: A stated layout fits no buffer, or the sampler is none.
    """
    if sampler:
        try:
            parse_sampler(sampler, 0)
        except Refusal as refusal:
            raise SchemaError(f"--sampler: {refusal.text}") from refusal
    known: set[str] = set()
    known_images: list[str] = []
    opened = False
    for path in paths:
        try:
            with ReplayBuffer.open(path) as buffer:
                own = buffer.schema.drawn.fields
                layouts(buffer, {p: a for p, a in (images or {}).items() if p in own})
                known |= own.keys()
                known_images += layouts(buffer, {})
                opened = True
        except CorruptError:
            continue
        except FormatError as error:
            inside = buffers_inside(path)
            if not inside:
                raise
            names = " or ".join(map(str, inside))
            raise FormatError(f"{path} is not a replay buffer. Did you mean {names}?") from error
    if opened:
        _check_images(images or {}, known, known_images)
    return Page(paths, images, sampler)


def _check_images(images: Iterable[str], known: set[str], known_images: Sequence[str]) -> None:
    """Refuse the path of an image field that no buffer has.

    Args:
        images: The paths that are given.
        known: Those of all fields.
        known_images: Those of image fields.
    """
    for path in images:
        if path not in known:
            within = [each for each in known_images if each.startswith(f"{path}/")]
            advice = f"Did you mean {within[0]!r}?" if within else meant(path, known)
            raise SchemaError(
                f"--image: no buffer has a field {path!r}. Known are "
                f"{', '.join(sorted(known))}. {advice}"
            )


def buffers_inside(path: Path) -> list[Path]:
    """Return the buffers directly inside a folder, at most 4, by name."""
    with suppress(OSError):
        return sorted(each.parent for each in path.glob(f"*/{FILE_NAME}"))[:4]
    return []


def make_server(page: Page, host: str = "127.0.0.1", port: int | None = None) -> PageServer:
    """Bind a server for a page.

    Args:
        page: What it answers.
        host: What it is bound to.
        port: None for the first free one from 8642 on.

    Raises:
        ModuleNotFoundError: The extra ``web`` is not installed.
        FailedError: The port is taken.
    """
    try:
        from mmreplay.page import app
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("starlette", "uvicorn", "anyio"):
            raise ModuleNotFoundError(MISSING, name=error.name) from error
        raise
    return app.make_server(page, host, port)


def open_browser(url: str) -> bool:
    """Open an address in the user's browser; return whether there is one.

    A thread opens it, since some browsers end only when their window is closed. A
    browser within the terminal would take it away from the server: it is not used,
    unless the variable BROWSER names it.
    """
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    if type(browser) is webbrowser.GenericBrowser and "BROWSER" not in os.environ:
        return False
    threading.Thread(
        target=_open_browser, args=(browser, url), name="mmreplay-browser", daemon=True
    ).start()
    return True


def _open_browser(browser: webbrowser.BaseBrowser, url: str) -> None:
    # The address was printed: who waits for the browser in vain can open it.
    with suppress(webbrowser.Error, OSError):
        browser.open(url)


class ServedPage:
    """A page that is served by this process, made by `view`.

    Attributes:
        url: Its address, with the key.
    """

    def __init__(self, server: PageServer) -> None:
        """Hold a server that runs."""
        self._server = server
        self.url = server.url

    def __repr__(self) -> str:
        """Say where it is."""
        return f"<ServedPage {self.url}>"

    def _repr_html_(self) -> str:
        """Return a link, for notebooks."""
        url = escape(self.url, quote=True)
        return f'<a href="{url}" target="_blank" rel="noopener">Open the page</a>'

    def close(self) -> None:
        """Stop serving; a second call does nothing."""
        self._server.close()

    def __enter__(self) -> ServedPage:
        """Return the view."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        self.close()


def view(
    *paths: str | PathLike[str],
    port: int | None = None,
    images: Mapping[str, str] | None = None,
    sampler: str = "",
) -> ServedPage:
    """Serve a page that shows buffers, and print a link to it.

    The page only reads, and may show a buffer while it is written. It is served by a
    thread of this process on 127.0.0.1, until `ServedPage.close` or the process ends. A
    notebook cannot show it within itself: open the link.

    Args:
        *paths: Folders of buffers.
        port: Of the server; by default the first free one from 8642 on.
        images: Axes by the path of an image field, such as ``{"observation": "HWC"}``;
            by default they are recognized.
        sampler: What draws at first, such as ``"PrioritizedSampler(alpha=0.6)"``.

    Raises:
        FormatError: A path holds no buffer.
        SchemaError: No path was given, a layout does not fit, or the sampler is none.
        ModuleNotFoundError: The extra ``web`` is not installed.
        FailedError: The port is taken.

    Example:
        >>> page = mr.view("runs/cartpole")  # doctest: +SKIP
        Open http://127.0.0.1:8642/?token=... in a browser.
    """
    if not paths:
        raise SchemaError("view needs at least one path, got none. Pass the folder of a buffer.")
    page = make_page([absolute(path) for path in paths], images, sampler)
    server = make_server(page, port=port)
    server.start()
    print(f"Open {server.url} in a browser.")
    return ServedPage(server)

"""Serves the page over HTTP: the one module that imports Starlette and uvicorn.

Requests are answered by `api.Page` in threads, two at a time, beside the one that reads
in the background. A thread more makes the state of the buffers: it waits for no large
request. A response is sent in small pieces and has a minute to arrive.
Of all responses that are being sent, 16 MiB are in memory at most: beyond, the oldest
one is dropped, so that slow clients hold no memory and keep no one waiting.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, MutableMapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import anyio
import uvicorn
from anyio import CapacityLimiter
from isal import igzip
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mmreplay.errors import FailedError
from mmreplay.page.api import NOT_MODIFIED, STATE_PATH, Page
from mmreplay.page.guard import SECURITY_HEADERS, Guard, is_loopback
from mmreplay.page.static_files import static_files
from mmreplay.page.wire import encode_json

MAX_THREADS, MAX_STATE_THREADS = 2, 1
"""That answer requests, and that make the state of the buffers."""
MAX_LIVE_CLIENTS = 16
MAX_CONNECTIONS = 48
TICK_S = 0.5
"""State is sent at most so often."""
COMMENT_S = 15.0
RESPONSE_S = 60.0
"""A response must arrive within so many seconds."""
SILENT_S = 10.0
"""A connection that sent no request for so long, or twice as long, is closed."""
CHUNK_NBYTES = 64 << 10
MAX_SENDING_NBYTES = 16 << 20
"""Of all responses that are being sent."""
MIN_GZIP_NBYTES = 1024
SEE_OTHER = 303
HAS_KEY = "has_key"
"""In the state of a request's scope: the guard let the request through."""
FIRST_PORT, TRIED_PORTS = 8642, 20


class Guarded:
    """Checks each request with a guard, and puts security headers on each response."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        """Guard an app."""
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond to it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    *((k.encode(), v.encode()) for k, v in SECURITY_HEADERS.items()),
                ]
            await send(message)

        headers = {name.lower(): value for name, value in Headers(scope=scope).items()}
        query = scope.get("query_string", b"").decode("latin-1")
        instead = self._guard.check(scope["method"], scope["path"], query, headers)
        if instead is not None:
            # A client without the key must not hold a connection.
            ending = {} if instead.status == SEE_OTHER else {"connection": "close"}
            response = Response(
                instead.text, instead.status, instead.headers | ending, "text/plain"
            )
            await response(scope, receive, send_guarded)
            return
        scope["state"][HAS_KEY] = True
        await self._app(scope, receive, send_guarded)


class ImpatientProtocol(H11Protocol):
    """Closes connections that send no whole request, not only those that sent one.

    Any client that reaches the port can open connections, also without the key. Where
    there are too many, the oldest one whose newest request had no key, or that sent
    none yet, is closed for each new one: they do not keep the key's owner out.

    Attributes:
        made: When, by the clock of the loop.
    """

    made = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Watch a connection from its beginning."""
        if self.limit_concurrency is not None:
            self._close_keyless(self.limit_concurrency)
        super().connection_made(transport)
        self.made = self.loop.time()
        self._former: object = self
        self.loop.call_later(SILENT_S, self._look)

    @property
    def has_key(self) -> bool:
        """The newest request had the key."""
        scope: Any = self.scope
        return scope is not None and HAS_KEY in scope["state"]

    def _close_keyless(self, limit: int) -> None:
        """Close connections without the key until there is one less than the limit."""
        # uvicorn counts the new one too, and answers 503 at the limit.
        keyless = [
            protocol
            for protocol in self.connections
            if isinstance(protocol, ImpatientProtocol) and not protocol.has_key
        ]
        keyless.sort(key=lambda protocol: protocol.made)
        too_many = max(0, len(self.connections) + 2 - limit)
        for protocol in keyless[:too_many]:
            self.connections.discard(protocol)
            protocol.transport.close()

    def _look(self) -> None:
        if self.transport.is_closing():
            return
        cycle = self.cycle
        waiting = cycle is None or cycle.response_complete
        if waiting and cycle is self._former:
            self.transport.close()
            return
        self._former = cycle
        self.loop.call_later(SILENT_S, self._look)


class Outbox:
    """The responses that are being sent, and how much memory they hold.

    Attributes:
        nbytes: Of all of them.
    """

    def __init__(self) -> None:
        """Hold none."""
        self.nbytes = 0
        self._sending: OrderedDict[anyio.CancelScope, int] = OrderedDict()

    def add(self, scope: anyio.CancelScope, nbytes: int) -> None:
        """Take a response in; older ones are dropped where there are too many bytes.

        Args:
            scope: What sends it; cancelled where it is dropped.
            nbytes: Of the response.
        """
        while self._sending and self.nbytes + nbytes > MAX_SENDING_NBYTES:
            oldest, size = self._sending.popitem(last=False)
            self.nbytes -= size
            oldest.cancel()
        self._sending[scope] = nbytes
        self.nbytes += nbytes

    def remove(self, scope: anyio.CancelScope) -> None:
        """Forget a response that was sent or dropped."""
        self.nbytes -= self._sending.pop(scope, 0)


class PatientResponse(Response):
    """A response that is sent in pieces, and dropped when it takes too long."""

    outbox: Outbox | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        start: MutableMapping[str, Any] = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        outbox = self.outbox or Outbox()
        with anyio.move_on_after(RESPONSE_S) as sending:
            outbox.add(sending, len(self.body))
            try:
                await send(start)
                size = len(self.body)
                for first in range(0, max(size, 1), CHUNK_NBYTES):
                    chunk = bytes(self.body[first : first + CHUNK_NBYTES])
                    more = first + CHUNK_NBYTES < size
                    await send({"type": "http.response.body", "body": chunk, "more_body": more})
            finally:
                outbox.remove(sending)
                # A traceback of the cancellation may hold the response for a while.
                self.body = b""


class StreamResponse(StreamingResponse):
    """Server-sent events; it ends where one of them takes too long to be sent."""

    def __init__(self, events: AsyncIterator[str], ended: Callable[[], None]) -> None:
        """Send events.

        Args:
            events: As text.
            ended: Called once when no more are sent, also where none was.
        """
        super().__init__(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them until the client leaves."""
        try:
            with anyio.CancelScope() as whole:

                async def send_in_time(message: Message) -> None:
                    with anyio.move_on_after(RESPONSE_S) as sending:
                        await send(message)
                    if sending.cancelled_caught:
                        whole.cancel()

                await super().__call__(scope, receive, send_in_time)
        finally:
            self._ended()


class StateStream:
    """Sends clients the state of the buffers when it changes, twice a second at most.

    A state is made when it is sent: no client has a queue.
    """

    def __init__(
        self, page: Page, threads: Callable[[], CapacityLimiter], closing: Callable[[], bool]
    ) -> None:
        """Send the state of a page.

        Args:
            page: Its buffers.
            threads: Limits what works at a time.
            closing: Whether the server is to end: streams then end first.
        """
        self._page = page
        self._threads = threads
        self._closing = closing
        self._clients = 0
        self._lock: asyncio.Lock | None = None
        self._text, self._made = "", 0.0

    async def respond(self, request: Request) -> Response:
        """Return a stream of server-sent events, or 503 for too many clients."""
        if self._clients >= MAX_LIVE_CLIENTS:
            text = f"The page has {MAX_LIVE_CLIENTS} live viewers already."
            return PatientResponse(encode_json({"error": text}), 503, media_type="application/json")
        self._clients += 1
        return StreamResponse(self._events(request), self._leave)

    def _leave(self) -> None:
        self._clients -= 1

    async def _events(self, request: Request) -> AsyncIterator[str]:
        last, sent = "", time.monotonic()
        while not (self._closing() or await request.is_disconnected()):
            text = await self._state()
            now = time.monotonic()
            if text != last:
                last, sent = text, now
                yield f"event: state\ndata: {text}\n\n"
            elif now - sent > COMMENT_S:
                sent = now
                yield ": no change\n\n"
            await asyncio.sleep(TICK_S)

    async def _state(self) -> str:
        """The state as JSON, made for all clients together."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if time.monotonic() - self._made > TICK_S / 2:
                states = await anyio.to_thread.run_sync(self._page.states, limiter=self._threads())
                self._text = encode_json(states).decode()
                self._made = time.monotonic()
        return self._text


def make_app(
    page: Page, guard: Guard, *, compress: bool = False, closing: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Make the app of a page.

    Args:
        page: Answers the requests.
        guard: Checks them first.
        compress: Compress answers, for clients on other machines.
        closing: Whether the server is to end.
    """
    files = static_files()
    # Made within the loop that uses them.
    threads = cache(partial(CapacityLimiter, MAX_THREADS))
    state_threads = cache(partial(CapacityLimiter, MAX_STATE_THREADS))
    live, outbox = StateStream(page, state_threads, closing), Outbox()

    async def answer(request: Request) -> Response:
        query = request.scope.get("query_string", b"").decode("latin-1")
        tag = request.headers.get("if-none-match", "")
        path = request.scope["path"]
        work = partial(page.answer, path, query, tag)
        limiter = state_threads() if path == STATE_PATH else threads()
        found = await anyio.to_thread.run_sync(work, limiter=limiter)
        headers, body = dict(found.headers), found.body
        if (
            compress
            and len(body) >= MIN_GZIP_NBYTES
            and "gzip" in request.headers.get("accept-encoding", "")
        ):
            body = await anyio.to_thread.run_sync(
                partial(igzip.compress, body, 1), limiter=threads()
            )
            headers |= {"content-encoding": "gzip", "vary": "accept-encoding"}
        media_type = None if found.status == NOT_MODIFIED else found.media_type
        response = PatientResponse(body, found.status, headers, media_type)
        response.outbox = outbox
        return response

    async def static(request: Request) -> Response:
        path = request.scope["path"]
        name = "index.html" if path == "/" else path.removeprefix("/static/")
        if name not in files:
            return PatientResponse("There is no such address.", 404, media_type="text/plain")
        data, media_type = files[name]
        return PatientResponse(data, headers={"cache-control": "no-cache"}, media_type=media_type)

    routes = [
        Route("/", static),
        Route("/static/{name:path}", static),
        Route("/api/live", live.respond),
        Route("/api/{path:path}", answer),
    ]
    return Guarded(Starlette(routes=routes), guard)


@dataclass(slots=True)
class PageServer:
    """A page that is served.

    Attributes:
        page: Its answers.
        url: The first address, with the key.
        server: Of uvicorn.
        listener: The socket that it accepts connections on.
        thread: That runs it; None where `run` is called.
    """

    page: Page
    url: str
    server: uvicorn.Server
    listener: socket.socket
    thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until Ctrl-C, or until `close` is called in another thread."""
        try:
            self.server.run(sockets=[self.listener])
        except KeyboardInterrupt:
            # uvicorn has shut down in order, and passes the signal on.
            pass
        finally:
            self.page.close()

    def start(self) -> None:
        """Serve in a thread, which ends with the process."""
        self.thread = threading.Thread(target=self.run, name="mmreplay-view", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop serving and close the buffers."""
        self.server.should_exit = True
        if self.thread is not None:
            self.thread.join(timeout=10)


def bind(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens on a port.

    Args:
        host: A name or address of this machine.
        port: The port; 0 for any, None for the first free one from 8642 on.

    Raises:
        FailedError: The port is taken, or the host is none of this machine.
    """
    ports = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + TRIED_PORTS)]
    for last, number in enumerate(ports, 1 - len(ports)):
        try:
            family, _, protocol, _, address = socket.getaddrinfo(
                host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            # asyncio sends small answers at once (TCP_NODELAY) where the protocol is
            # named; else the body of one waits up to 40 ms behind its head.
            listener = socket.socket(family, socket.SOCK_STREAM, protocol)
        except OSError as error:
            raise _not_bound(host, number, error) from error
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(64)
        except OSError as error:
            listener.close()
            if last < 0 and error.errno == errno.EADDRINUSE:
                continue
            raise _not_bound(host, number, error) from error
        return listener
    raise AssertionError("no port was tried")


def _not_bound(host: str, port: int, error: OSError) -> FailedError:
    if error.errno == errno.EADDRINUSE:
        return FailedError(
            f"Port {port} of {host} is taken by another program. Pass another --port, "
            "or 0 for any free one.",
            errno_=error.errno,
        )
    return FailedError(
        f"Cannot listen on port {port} of {host}: {error.strerror or error}. Pass a "
        "--host of this machine and a --port from 1024 on.",
        errno_=error.errno,
    )


def make_server(page: Page, host: str = "127.0.0.1", port: int | None = None) -> PageServer:
    """Bind a server for a page; `PageServer.run` or `PageServer.start` serves it.

    Args:
        page: What it answers.
        host: What it is bound to; 127.0.0.1 is reached from this machine only.
        port: See `bind`.

    Raises:
        FailedError: The port is taken.
    """
    listener = bind(host, port)
    number = listener.getsockname()[1]
    guard = Guard(host, number)
    servers: list[uvicorn.Server] = []
    app = make_app(
        page,
        guard,
        compress=not is_loopback(host),
        closing=lambda: any(server.should_exit for server in servers),
    )
    config = uvicorn.Config(
        app,
        http=ImpatientProtocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        # It would print a line for each client that was dropped.
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )
    name = f"[{host}]" if ":" in host else host
    if name in ("0.0.0.0", "[::]"):
        name = socket.gethostname()
    url = f"http://{name}:{number}/?token={guard.token}"
    servers.append(uvicorn.Server(config))
    return PageServer(page, url, servers[0], listener)

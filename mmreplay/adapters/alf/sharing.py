"""Calls from children of the process that owns a ring, through a socket to it.

Only one process writes a buffer. Its children's calls go to a thread of it, a thread
for each connection, so that one that waits keeps no other from being served.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
import weakref
from contextlib import suppress
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from mmreplay.errors import FailedError

_ends: weakref.WeakSet[Listener | Connection] = weakref.WeakSet()
"""What this process serves at."""


def _let_go() -> None:
    """Close them in a forked child: held there, they would outlive who serves."""
    for end in list(_ends):
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_let_go)


class Server:
    """Serves the calls of other processes on one object.

    Who connects must know this process's `multiprocessing` key, which its children
    are born with. The socket has a name of Linux's own and no file.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, target: object) -> None:
        """Begin to serve.

        Args:
            target: Its public methods are called, from any thread.
        """
        self.address = f"\0mmreplay-{uuid.uuid4().hex}"
        self._closed, self._pid = threading.Event(), os.getpid()
        listener = Listener(self.address, "AF_UNIX", authkey=_key())
        _ends.add(listener)
        threading.Thread(
            target=_accept, args=(listener, self._closed, target), daemon=True
        ).start()

    def close(self) -> None:
        """Take no more connections."""
        if os.getpid() != self._pid:
            return
        self._closed.set()
        # Whoever accepts is woken by this alone: closing a socket under it does not.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as wake:
            wake.connect(self.address)


def _key() -> bytes:
    return bytes(current_process().authkey)


def _accept(listener: Listener, closed: threading.Event, target: object) -> None:
    with listener:
        while not closed.is_set():
            with suppress(AuthenticationError, EOFError, OSError):
                connection = listener.accept()
                _ends.add(connection)
                threading.Thread(
                    target=_serve, args=(connection, target), daemon=True
                ).start()


def _serve(connection: Connection, target: object) -> None:
    with connection:
        while True:
            try:
                name, arguments = connection.recv()
            except (EOFError, OSError):
                return
            try:
                answer = True, getattr(target, name)(*arguments)
            except Exception as error:
                answer = False, error
            try:
                connection.send(answer)
            except OSError:
                return


class Remote:
    """Another process's object; every method is called there.

    Each thread of each process has a connection of its own.

    Attributes:
        address: Where that process listens.
    """

    def __init__(self, address: str) -> None:
        """Make one; the first call connects."""
        self.address = address
        self._pid = os.getpid()
        self._local = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            return self._call(name, arguments)

        return call

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        try:
            connection = self._connection()
            connection.send((name, arguments))
            well, answer = connection.recv()
        except (EOFError, OSError, AuthenticationError) as error:
            raise FailedError(
                f"{name}: got no answer from the process that owns the buffer "
                f"({error!r}), expected it to live; keep it alive while others use it"
            ) from error
        if well:
            return answer
        raise answer

    def _connection(self) -> Connection:
        if os.getpid() != self._pid:
            self._pid, self._local = os.getpid(), threading.local()
        if not hasattr(self._local, "connection"):
            self._local.connection = Client(self.address, "AF_UNIX", authkey=_key())
        found: Connection = self._local.connection
        return found


def serve(owner: object, target: object) -> Server:
    """Serve a target for as long as its owner lives."""
    server = Server(target)
    weakref.finalize(owner, server.close)
    return server

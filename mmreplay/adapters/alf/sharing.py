"""Calls from children of the process that owns a ring, through a socket to it.

Only one process writes a buffer. Its children's calls go to a thread of it, a thread
for each connection, so that one that waits keeps no other from being served.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from mmreplay.errors import FailedError


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
        key = _key()
        self._listener = Listener(self.address, "AF_UNIX", authkey=key)
        self._pid = os.getpid()
        threading.Thread(
            target=_accept, args=(self._listener, target), daemon=True
        ).start()

    def close(self) -> None:
        """Take no more connections."""
        if os.getpid() == self._pid:
            self._listener.close()


def _key() -> bytes:
    from multiprocessing import current_process

    return bytes(current_process().authkey)


def _accept(listener: Listener, target: object) -> None:
    while True:
        try:
            connection = listener.accept()
        except (AuthenticationError, EOFError, ConnectionError):
            continue
        except OSError:
            return
        threading.Thread(target=_serve, args=(connection, target), daemon=True).start()


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
    """

    def __init__(self, address: str) -> None:
        """Make one; the first call connects."""
        self._address = address
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
            self._local.connection = Client(self._address, "AF_UNIX", authkey=_key())
        found: Connection = self._local.connection
        return found


def serve(owner: object, target: object) -> Server:
    """Serve a target for as long as its owner lives."""
    server = Server(target)
    weakref.finalize(owner, server.close)
    return server

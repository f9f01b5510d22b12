"""Calls from children of the process that owns a ring, through a socket to it.

Only one process writes a buffer. Its children's calls go to a thread of it, a thread
for each connection, so that a waiting call does not block the others.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import uuid
import warnings
import weakref
from contextlib import suppress
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

from mmreplay.errors import FailedError, undone_by

KEY_S = 10
"""Time limit of each message of a handshake."""
PAUSE_S = 0.1
"""Pause between tries to accept a connection when files or threads run out."""

_serving = threading.local()

_ends: weakref.WeakSet[Listener | Connection] = weakref.WeakSet()
"""Address of this process's server."""


def _let_go() -> None:
    """Close them in a forked child: held there, they would outlive who serves."""
    for end in list(_ends):
        end.close()
    _ends.clear()


os.register_at_fork(after_in_child=_let_go)


def hung_up() -> bool:
    """Return whether the client that this thread serves has disconnected.

    The other process sends nothing while it waits: readable data is its end.
    """
    connection: Connection | None = getattr(_serving, "connection", None)
    return connection is not None and connection.poll()


def serves() -> bool:
    """Return whether this thread serves another process."""
    return getattr(_serving, "connection", None) is not None


class Server:
    """Serves the calls of other processes on one object.

    A client must run as this process's user and know its `multiprocessing` key, which
    its children inherit. The socket has an abstract Linux name and no file.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, target: object) -> None:
        """Start to serve.

        Args:
            target: Its public methods are called, from any thread.
        """
        self.address = f"\0mmreplay-{uuid.uuid4().hex}"
        self._closed, self._pid = threading.Event(), os.getpid()
        listener = Listener(self.address, "AF_UNIX")
        _ends.add(listener)
        arguments = (listener, self._closed, target, _key())
        threading.Thread(target=_accept, args=arguments, daemon=True, name="alf accepts").start()

    def close(self) -> None:
        """Accept no more connections."""
        if os.getpid() != self._pid:
            return
        self._closed.set()
        # Whoever accepts is woken by this alone: closing a socket under it does not.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as wake:
            wake.connect(self.address)


def _key() -> bytes:
    return bytes(current_process().authkey)


def _accept(listener: Listener, closed: threading.Event, target: object, key: bytes) -> None:
    warned = False
    with listener:
        while not closed.is_set():
            try:
                connection = listener.accept()
                if closed.is_set():
                    # `Server.close` woke this thread; at exit no thread can start.
                    connection.close()
                    return
                _begin(connection, target, key)
            except (OSError, RuntimeError) as error:
                # At exit a warning would help no user.
                if threading.main_thread().is_alive():
                    warned = warned or _reported(error)
                # Clients wait in the backlog; accepting again at once would spin.
                closed.wait(PAUSE_S)


def _begin(connection: Connection, target: object, key: bytes) -> None:
    """Serve a connection in a thread."""
    _ends.add(connection)
    # Nothing is asked of who connects here, where all others wait for it.
    thread = threading.Thread(
        target=_serve, args=(connection, target, key), daemon=True, name="alf serves"
    )
    try:
        thread.start()
    except RuntimeError:
        connection.close()
        raise


def _reported(error: OSError | RuntimeError) -> bool:
    """Warn that calls wait, which would go unnoticed otherwise."""
    with suppress(RuntimeWarning):  # where warnings are errors
        warnings.warn(
            f"a ring that children share cannot serve one more ({error}), and tries "
            "again. Close files or end threads that are not needed, or raise the "
            "limits (ulimit -n, ulimit -u).",
            RuntimeWarning,
            stacklevel=1,
        )
    return True


def _known(connection: Connection, key: bytes) -> bool:
    """Return whether the client is of this user and proves that it has the key."""
    end = socket.socket(fileno=connection.fileno())
    end.setblocking(True)  # whatever the program's default timeout is
    try:
        credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.geteuid():
            return False
        _wait_at_most(end, KEY_S)
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        _wait_at_most(end, 0)
    finally:
        end.detach()  # it is the connection's
    return True


def _wait_at_most(end: socket.socket, seconds: int) -> None:
    """Set the time limit of reads; 0 is none."""
    limit = struct.pack("ll", seconds, 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _serve(connection: Connection, target: object, key: bytes) -> None:
    with connection:
        try:
            if not _known(connection, key):
                return
        except (AuthenticationError, EOFError, OSError):
            return
        _serving.connection = connection
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
    """An object of another process; its methods run there.

    Each thread of each process has a connection of its own.

    Attributes:
        address: Where that process listens.
    """

    def __init__(self, address: str) -> None:
        """Make a proxy; the first call connects."""
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
            # After an interrupt, too: its answer is not to be that to the next call.
            with undone_by(self.close):
                connection = self._connection()
                connection.send((name, arguments))
                well, answer = connection.recv()
        except (EOFError, OSError, AuthenticationError) as error:
            raise FailedError(
                f"{name}: the process that owns the buffer does not answer "
                f"({error!r}). Keep it alive while other processes use the buffer."
            ) from error
        if well:
            return answer
        raise answer

    def close(self) -> None:
        """Disconnect this thread; the next call connects again."""
        if os.getpid() == self._pid:
            connection = self._local.__dict__.pop("connection", None)
            if connection is not None:
                connection.close()

    def _connection(self) -> Connection:
        if os.getpid() != self._pid:
            self._pid, self._local = os.getpid(), threading.local()
        if not hasattr(self._local, "connection"):
            self._local.connection = Client(self.address, "AF_UNIX", authkey=_key())
        found: Connection = self._local.connection
        return found


def serve(owner: object, target: object) -> Server:
    """Serve a target as long as its owner is alive."""
    server = Server(target)
    weakref.finalize(owner, server.close)
    return server

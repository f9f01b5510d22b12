"""Checks a request before anything else sees it: host, method, cookie.

Another site that the same browser shows can send requests to this server. The Host
header stops a name that was made to lead here (DNS rebinding), the cookie stops
everything that does not come from the page itself, and the content security policy
stops what a field's name or value might try to run.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
"""Headers of every response."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class Response:
    """A response in place of an answer.

    Attributes:
        status: The HTTP status.
        text: The body.
        headers: Beside `SECURITY_HEADERS`.
    """

    status: int
    text: str
    headers: dict[str, str] = field(default_factory=dict)


class Guard:
    """Lets requests of one page's own browser through, and no others.

    Attributes:
        token: The key; part of the first address, and of the cookie from then on.
        cookie: Name of the cookie. Cookies know no ports: two pages on one host would
            log each other out if theirs had one name.
    """

    def __init__(self, host: str, port: int, token: str | None = None) -> None:
        """Guard a server.

        Args:
            host: The name or address that the server is bound to.
            port: Its port.
            token: The key; a new random one by default.
        """
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.cookie = f"mmreplay-{port}"
        self._port = port
        bare = f"[{host}]" if ":" in host else host
        self._names = {*LOOPBACK, bare.lower()}
        # Bound to every address, it is reached by any of them, and by its own names.
        # An address as Host is no rebinding: the name of an attacker would stand there.
        self._any_address = _is_unspecified(host)
        if self._any_address:
            self._names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    def check(
        self, method: str, path: str, query: str, headers: Mapping[str, str]
    ) -> Response | None:
        """Return what to respond in place of an answer, or None to answer.

        Args:
            method: Such as ``"GET"``.
            path: Decoded, without the query.
            query: Text after the question mark.
            headers: By lower-case name.
        """
        if not self._is_ours(headers.get("host", "")):
            return Response(421, "This server does not have the name in the request's Host header.")
        if method != "GET":
            return Response(405, "The page only reads: use GET.", {"allow": "GET"})
        if path == "/":
            try:
                tokens = parse_qs(query, max_num_fields=8).get("token", [])
            except ValueError:
                tokens = []
            if tokens and self._is_token(tokens[-1]):
                cookie = f"{self.cookie}={self.token}; HttpOnly; SameSite=Strict"
                return Response(
                    303,
                    "",
                    {
                        "location": "/",
                        "set-cookie": f"{cookie}; Path=/",
                        "cache-control": "no-store",
                    },
                )
        if not self._is_token(self._cookie_of(headers.get("cookie", ""))):
            return Response(
                403, "Open the address that mmreplay view printed. It contains the key."
            )
        return None

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        if not colon or not port.isdigit():
            name, port = host.lower(), "80"
        if port != str(self._port):
            return False
        return name in self._names or (self._any_address and _is_address(name))

    def _is_token(self, value: str) -> bool:
        return secrets.compare_digest(value.encode(), self.token.encode())

    def _cookie_of(self, header: str) -> str:
        for item in header.split(";"):
            name, _, value = item.strip().partition("=")
            if name == self.cookie:
                return value
        return ""


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True

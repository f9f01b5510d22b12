"""Addresses of remote stores, as users write them."""

from __future__ import annotations

import re

URL = re.compile(r"s3:/{1,2}([^/]+)(?:/(.*))?")
URL_SCHEME = "s3:"
"""Scheme of remote stores; a URL may lack one of its slashes, see `url_of`."""


def url_of(path: str) -> str | None:
    """The URL that a path is, ``s3://bucket/prefix``; None where it is none.

    One slash of the two may be missing, as `pathlib.Path` makes one of both.
    """
    match = URL.fullmatch(path)
    if match is None:
        return None
    return f"s3://{match[1]}/{(match[2] or '').strip('/')}".rstrip("/")

"""Objects of an S3 bucket, through obstore (extra ``remote``), imported only here.

A bounded number of requests run side by side. Ranges of one object that lie near each
other are one request.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from mmreplay.disk.address import URL
from mmreplay.errors import CorruptError, FailedError, ForkedError, FormatError, SchemaError
from mmreplay.zarr_groups.blobs import Blobs, Extent, refuse_many, span_of

BUCKET = re.compile(r"[A-Za-z0-9._-]+")
ENDPOINT = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?(/[!-~]*)?")
MAX_PORT = 65535
REQUESTS = 16
"""Requests that run at a time."""
GAP_NBYTES = 64 << 10
JOINED_NBYTES = 8 << 20
CONNECT_TIMEOUT, READ_TIMEOUT = timedelta(seconds=10), timedelta(seconds=60)
RETRIES = 3
CUT = ("InvalidRange", " 416 ", "non-partial response")
NO_CREDENTIALS = ("169.254.169.254", "/latest/api/token", "redential")
"""What the library says where it looked for a machine's role in vain."""
_first_pid: list[int] = []


class AccessRefusedError(FailedError):
    """The server does not let us read that, or hides that it is not there."""


@dataclass(slots=True)
class _JoinedRead:
    """One range of an object, and the extents in it by their numbers."""

    name: str
    first: int
    stop: int
    extents: list[int] = field(default_factory=list)


def _library(name: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise FailedError(
            "reading s3:// stores needs obstore, which is not installed. Run: "
            'pip install "mmreplay[remote]"'
        ) from error
    # Its threads do not survive a fork, and it then waits for them without end.
    if not _first_pid:
        _first_pid.append(os.getpid())
    if _first_pid[0] != os.getpid():
        raise ForkedError(
            "s3:// stores cannot be read in a process that was forked after one was "
            "read. Pass multiprocessing_context='spawn' to the DataLoader."
        )
    return module


class RemoteBlobs(Blobs):
    """Objects below a prefix; see `blobs.Blobs`."""

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        anonymous: bool = False,
    ) -> None:
        """Make one; nothing is asked for yet.

        Args:
            url: ``s3://bucket/prefix``.
            endpoint: Of a server that is not Amazon's, such as
                ``"http://localhost:9000"``; ``AWS_ENDPOINT_URL`` by default.
            region: ``AWS_REGION`` or ``AWS_DEFAULT_REGION`` by default.
            anonymous: Send no credentials, as public buckets take it.

        Raises:
            SchemaError: The bucket's name or the endpoint is none.
            FailedError: obstore is not installed, or refuses the options.
        """
        self.where = url
        match = URL.fullmatch(url)
        assert match is not None
        self._bucket, self._prefix = match[1], (match[2] or "").strip("/")
        self._store_module = _library("obstore")
        options = _options(endpoint, region, anonymous)
        _check(url, self._bucket, options.get("endpoint"))
        try:
            self._store = _library("obstore.store").S3Store(
                self._bucket, prefix=self._prefix or None, **options
            )
        except Exception as error:
            self._fail(error)
        self._pool = ThreadPoolExecutor(REQUESTS, "mmreplay-remote")

    def children(self, name: str) -> list[str]:
        """See `Blobs.children`."""
        prefix = f"{name}/" if name else None
        module = self._module()
        try:
            listing = module.list_with_delimiter(self._store, prefix)
        except Exception as error:
            self._fail(error)
        names = [*listing["common_prefixes"], *(o["path"] for o in listing["objects"])]
        refuse_many(f"{self.where}/{name}", len(names))
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in names)

    def fetch(self, wanted: Sequence[Extent], max_nbytes: int) -> list[bytes | None]:
        """See `Blobs.fetch`."""
        module = self._module()
        data_of: list[bytes | None] = [None] * len(wanted)
        alone = [n for n, extent in enumerate(wanted) if not _ranged(extent)]
        requests = _joined(wanted)

        def fetch_alone(number: int) -> None:
            data_of[number] = self._get(module, wanted[number], max_nbytes)

        def fetch_joined(request: _JoinedRead) -> None:
            data = self._get(
                module,
                Extent(request.name, request.first, request.stop - request.first),
                max(max_nbytes, JOINED_NBYTES),
            )
            for number in request.extents:
                extent = wanted[number]
                assert extent.nbytes is not None
                if data is not None:
                    first = extent.first - request.first
                    data_of[number] = data[first : first + extent.nbytes]

        tasks = [self._pool.submit(fetch_alone, number) for number in alone]
        tasks += [self._pool.submit(fetch_joined, request) for request in requests]
        for task in tasks:
            task.result()
        return data_of

    def look(self, names: Sequence[str], max_nbytes: int) -> list[bytes | None]:
        """See `Blobs.look`.

        Who may not list a bucket is refused what is not there.
        """
        module = self._module()
        tasks = [self._pool.submit(self._get, module, Extent(name), max_nbytes) for name in names]
        refused: FailedError | None = None
        data_of: list[bytes | None] = []
        for task in tasks:
            try:
                data_of.append(task.result())
            except AccessRefusedError as error:
                refused = error
                data_of.append(None)
        if refused is not None and not any(data_of):
            raise refused
        return data_of

    def _get(self, module: Any, extent: Extent, max_nbytes: int) -> bytes | None:
        name, first, nbytes = extent
        what = f"{self.where}/{name}"
        options: dict[str, Any] = {}
        if first < 0:
            options = {"range": {"suffix": -first}}
        elif nbytes is not None:
            span_of(extent, first + nbytes, max_nbytes, what)
            if nbytes == 0:
                return b""
            options = {"range": (first, first + nbytes)}
        try:
            got = module.get(self._store, name, options=options)
        except Exception as error:
            if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                return None
            if options and any(mark in str(error) for mark in CUT):
                needed = -first if first < 0 else first + (nbytes or 0)
                raise CorruptError(
                    f"{what} has fewer than {needed} bytes: it was truncated. Restore "
                    "it from a copy."
                ) from error
            self._fail(error)
        # What the server says of the size is known before anything is taken.
        span_of(extent, got.meta["size"], max_nbytes, what)
        try:
            data = bytes(got.bytes())
        except Exception as error:
            self._fail(error)
        return data

    def _module(self) -> Any:
        return _library("obstore") and self._store_module

    def _fail(self, error: Exception) -> NoReturn:
        """Turn what the library says into an error with a way out."""
        text = " ".join(str(error).split("Debug source")[0].split())[:300]
        if "NoSuchBucket" in text:
            raise FormatError(
                f"{self.where}: there is no bucket {self._bucket!r} ({text[:120]}). "
                "Check its name, the endpoint and the region."
            ) from error
        if any(mark in text for mark in NO_CREDENTIALS):
            raise FailedError(
                f"{self.where}: no credentials found ({text[:200]}). Set "
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass anonymous=True "
                "for a public bucket."
            ) from error
        if isinstance(error, PermissionError) or any(
            mark in text for mark in (" 403 ", " 401 ", "AccessDenied")
        ):
            raise AccessRefusedError(
                f"{self.where}: the server refused access ({text[:200]}). Check "
                "AWS_ACCESS_KEY_ID, or pass anonymous=True for a public bucket."
            ) from error
        raise FailedError(
            f"{self.where} cannot be reached ({text}). Check the network, "
            "AWS_ENDPOINT_URL (endpoint=) and AWS_REGION (region=)."
        ) from error

    def close(self) -> None:
        """See `Blobs.close`."""
        self._pool.shutdown(wait=False)


def _check(url: str, bucket: str, endpoint: str | None) -> None:
    """Refuse what the library would panic at, which no handler of errors sees.

    Raises:
        SchemaError: The bucket's name or the endpoint is none.
    """
    if not BUCKET.fullmatch(bucket):
        raise SchemaError(
            f"{url}: a bucket's name must be letters, digits, '.', '_' and '-', got "
            f"{bucket!r}. Write s3://bucket/prefix."
        )
    match = ENDPOINT.fullmatch(endpoint) if endpoint is not None else None
    known = match is not None and int(match[2] or 0) <= MAX_PORT
    if endpoint is not None and not known:
        raise SchemaError(
            f"endpoint must be a server's URL, such as 'http://localhost:9000', got "
            f"{endpoint!r}. Pass endpoint= or set AWS_ENDPOINT_URL."
        )


def _options(endpoint: str | None, region: str | None, anonymous: bool) -> Mapping[str, Any]:
    """Options of the library's store; it looks the others up in AWS_*."""
    named = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    endpoints = [os.environ[name] for name in named if os.environ.get(name)]
    endpoint = endpoint or (endpoints[0] if endpoints else None)
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": (endpoint or "").startswith("http://"),
            "connect_timeout": CONNECT_TIMEOUT,
            "timeout": READ_TIMEOUT,
        },
        "retry_config": {"max_retries": RETRIES, "retry_timeout": READ_TIMEOUT},
    }
    if endpoint:
        options["endpoint"] = endpoint
    if region:
        options["region"] = region
    if anonymous:
        options["skip_signature"] = True
    return options


def _ranged(extent: Extent) -> bool:
    return extent.first >= 0 and extent.nbytes is not None


def _joined(wanted: Sequence[Extent]) -> list[_JoinedRead]:
    """Requests for extents of known bytes, near ones together."""
    ranged = sorted(
        (extent.name, extent.first, number)
        for number, extent in enumerate(wanted)
        if _ranged(extent)
    )
    requests: list[_JoinedRead] = []
    for name, first, number in ranged:
        nbytes = wanted[number].nbytes
        assert nbytes is not None
        stop, last = first + nbytes, requests[-1] if requests else None
        if (
            last is None
            or last.name != name
            or first - last.stop > GAP_NBYTES
            or stop - last.first > JOINED_NBYTES
        ):
            last = _JoinedRead(name, first, stop)
            requests.append(last)
        last.stop = max(last.stop, stop)
        last.extents.append(number)
    return requests

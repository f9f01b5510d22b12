"""Where the rows of a target come from, as its user metadata say it.

The JSON has no path, address or time: data sets are published, and a rerun gives equal
bytes.
"""

from __future__ import annotations

import hashlib
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.select import Origin, numbers_of
from mmreplay.disk import files
from mmreplay.errors import ReplayError
from mmreplay.strict_json import Json

PROVENANCE = "mmreplay_provenance"
"""Its key among the user's metadata."""
MAX_LISTED = 100
"""Numbers of episodes that are named one by one, and sources."""
MAX_SOURCE_NBYTES = 64 << 20


def provenance_of(
    sources: Sequence[tuple[str, str]],
    origins: Sequence[Origin],
    target: str,
    options: Mapping[str, Any],
) -> Json:
    """Say where rows come from.

    Args:
        sources: Name without its folder, and format, of each.
        origins: What is read of each.
        target: Name of the target, without its folder.
        options: What selects and changes rows, by the names of the arguments.

    Returns:
        The version, the command, and of each source how many rows and episodes it had
        and how many of them were read; the seed of a random choice, and the digest of
        a function's file. Of more than 100 sources the first 100 are named.
    """
    names = [name for name, _ in sources[:MAX_LISTED]]
    words = ["mmreplay", "convert", *names, target]
    for name, value in options.items():
        words += _words("--" + name.replace("_", "-"), value)
    said: Json = {
        "version": _version(),
        "command": shlex.join(words),
        "sources": [
            _source(*named, origin)
            for named, origin in zip(sources[:MAX_LISTED], origins, strict=False)
        ],
    }
    if len(sources) > MAX_LISTED:
        said["further_sources"] = len(sources) - MAX_LISTED
    if "seed" in options:
        said["seed"] = int(options["seed"])
    if "map" in options:
        said["map"] = _function(options["map"])
    return said


def _version() -> str:
    try:
        return version("mmreplay")
    except PackageNotFoundError:
        # Copied somewhere, and not installed.
        return ""


def lines(user_metadata: Json) -> list[str]:
    """What user metadata say of where the rows come from, to be shown; perhaps nothing.

    Args:
        user_metadata: Of any buffer: another program may have written the key.
    """
    said = user_metadata.get(PROVENANCE)
    if not isinstance(said, dict):
        return []
    command = [str(said["command"])] if "command" in said else []
    sources = said.get("sources")
    return command + [
        f"{source['name']} ({source.get('format')}): {counts_of(source)}"
        for source in (sources if isinstance(sources, list) else [])
        if isinstance(source, dict) and "name" in source
    ]


def counts_of(source: Json) -> str:
    """How much was read of a source, in words."""
    text = f"{source.get('read_rows')} of {source.get('rows')} rows"
    if source.get("episodes") is not None:
        text += f", {source.get('read_episodes')} of {source['episodes']} episodes"
    return text


def _source(name: str, file_format: str, origin: Origin) -> Json:
    source = origin.source
    said: Json = {
        # Another name than one of UTF-8 is said as far as it can be.
        "name": name.encode(errors="replace").decode(),
        "format": file_format,
        "uuid": source.uuid,
        "rows": source.rows,
        "read_rows": origin.rows,
    }
    if origin.episodes is not None:
        said["episodes"], said["read_episodes"] = origin.episodes
    return said


def _words(option: str, value: Any) -> list[str]:
    """An option of the command line, with its value."""
    if option == "--ranges":
        return ["--select", f"({value.rows} rows)"]
    if option == "--env-ids":
        # One option for each, as the command line takes them.
        return [word for number in _numbers(value).split(",") for word in ("--env", number)]
    if value is True:
        return [option]
    if isinstance(value, slice):
        first, stop = ("" if end is None else str(end) for end in (value.start, value.stop))
        return [option, f"{first}:{stop}"]
    if option == "--splits":
        return ["--split", ",".join(f"{name}={share}" for name, share in value.items())]
    if option in ("--cast", "--rename"):
        return [word for pair in value.items() for word in (option, "=".join(map(str, pair)))]
    if option == "--drop":
        return [word for path in value for word in (option, str(path))]
    if option == "--fields":
        return [option, ",".join(map(str, value))]
    if option == "--map":
        return [option, function_name(value)]
    if option in ("--episodes", "--skip"):
        table = numbers_of(value)
        return [option, _numbers(value if table is None else table)]
    return [option, str(value)]


def _numbers(value: Any) -> str:
    """Numbers with commas between them; of many, how many there are."""
    numbers = np.asarray(value).reshape(-1)
    if len(numbers) > MAX_LISTED:
        return f"({len(numbers)} numbers)"
    return ",".join(str(number) for number in numbers.tolist())


def function_name(function: Callable[..., Any]) -> str:
    """``MODULE:NAME`` of a function."""
    module = getattr(function, "__module__", "?")
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}:{name}"


def _function(function: Callable[..., Any]) -> Json:
    """A function's module and name, and the digest of its file if it has one."""
    module, _, name = function_name(function).partition(":")
    said: Json = {"module": module, "name": name}
    try:
        path = inspect.getsourcefile(function)
        source = b"" if path is None else files.read_bytes(Path(path), MAX_SOURCE_NBYTES)
    except (TypeError, OSError, ReplayError):
        # Made in a notebook, or by a C library.
        source = b""
    if source:
        said["blake2b"] = hashlib.blake2b(source, digest_size=16).hexdigest()
    return said

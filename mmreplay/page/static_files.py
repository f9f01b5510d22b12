"""The files of the page: scripts, style, icon, and what they are made of elsewhere."""

from __future__ import annotations

from importlib import resources

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def static_files() -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by name: their bytes and media types.

    Lines of its own files are not indented, which browsers do without: a page that is
    saved, or read over a slow network, is smaller by nearly a tenth.

    A request's name is looked up here: no part of it is ever a path.
    """
    files: dict[str, tuple[bytes, str]] = {}
    folder = resources.files("mmreplay.page") / "static"
    pending = [("", folder)] if folder.is_dir() else []
    while pending:
        prefix, where = pending.pop()
        for entry in where.iterdir():
            name = f"{prefix}{entry.name}"
            suffix = name[name.rfind(".") :] if "." in name else ""
            if entry.is_dir():
                pending.append((f"{name}/", entry))
            elif suffix in TYPES:
                data = entry.read_bytes()
                if not prefix:
                    data = b"\n".join(line.lstrip() for line in data.split(b"\n"))
                files[name] = (data, TYPES[suffix])
    return files

"""Build the documentation site into build/site, and check that it needs no network.

``python -m tools.docs_site [FOLDER]`` runs ``mkdocs build --strict`` and then looks
through the built pages for scripts, styles, fonts and images of other hosts. mkdocs
calls the functions ``on_files`` and ``on_page_markdown`` of this module (mkdocs.yml,
``hooks``): they add the pages that are not written under docs/, which are the API
reference, made of the docstrings of all public names, and CHANGELOG, CONTRIBUTING and
SECURITY.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "build" / "site"
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages at the root of the repository that the site shows, in lower case."""
REFERENCE = {
    "buffer": (
        "Buffers",
        "buffer",
        "schema",
        "batch",
        "ragged",
        "ring",
        "storage.memory_usage",
        "concatenation",
        "splitting",
    ),
    "samplers": ("Samplers", "samplers"),
    "transforms": ("Transforms", "transforms"),
    "loader": ("Loaders", "loader", "limiter"),
    "convert": ("Conversions", "convert", "datasets", "zarr_groups"),
    "tools": ("Tools", "page.launch", "plan", "recording", "repairing", "stats", "verify"),
    "errors": ("Errors and warnings", "errors"),
}
"""Pages of the reference: title, and the modules whose public names they show."""
EXTENSIONS = (
    "mmreplay.convert.base",
    "mmreplay.convert.registry",
    "mmreplay.convert.staging",
    "mmreplay.convert.episode_ends",
    "mmreplay.samplers.base",
    "mmreplay.testing.samplers",
    "mmreplay.testing.formats",
    "mmreplay.testing.stores",
    "mmreplay.testing.rules",
)
"""Modules for those who add a sampler or a file format."""
LOADED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("audio", "src"),
    ("object", "data"),
    ("embed", "src"),
}
"""Attributes whose address a browser loads by itself; links of text are not loaded."""


def reference_pages() -> dict[str, str]:
    """Return the pages of the API reference: Markdown by path.

    Raises:
        LookupError: A public name belongs to a module that is in no group of
            `REFERENCE`.
    """
    import mmreplay

    names: dict[str, list[str]] = {page: [] for page in REFERENCE}
    for name in sorted(mmreplay.__all__):
        module = getattr(mmreplay, name).__module__.removeprefix("mmreplay.")
        pages = [
            page
            for page, (_, *modules) in REFERENCE.items()
            if any(f"{module}.".startswith(f"{group}.") for group in modules)
        ]
        if len(pages) != 1:
            raise LookupError(
                f"mmreplay.{name} must be on one page of the reference, got "
                f"{len(pages)}. Name its module, {module!r}, once in REFERENCE."
            )
        names[pages[0]].append(name)
    texts = {
        f"reference/{page}.md": "\n\n".join(
            [f"# {title}", *(f"::: mmreplay.{name}" for name in names[page])]
        )
        for page, (title, *_) in REFERENCE.items()
    }
    texts["reference/extending.md"] = "\n\n".join(
        ["# Extending mmreplay", *(f"::: {module}" for module in EXTENSIONS)]
    )
    return texts


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are not written under docs/; mkdocs calls it."""
    from mkdocs.structure.files import File

    for name in ROOT_PAGES:
        text = (ROOT / name).read_text("utf-8")
        # These stand beside docs/, the site's pages within it.
        text = text.replace("](docs/", "](")
        text = re.sub(
            r"\]\((" + "|".join(ROOT_PAGES) + ")", lambda match: f"]({match[1].lower()}", text
        )
        files.append(File.generated(config, name.lower(), content=text))
    for path, text in reference_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to pages beside docs/ to their copies in the site; mkdocs calls it."""
    markdown = markdown.replace("](../README.md)", "](index.md)")
    return re.sub(
        r"\]\(\.\./(" + "|".join(ROOT_PAGES) + ")", lambda match: f"]({match[1].lower()}", markdown
    )


class _Loads(HTMLParser):
    """Addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        self.addresses += [value or "" for name, value in attrs if (tag, name) in LOADED]


def external_loads(site: Path) -> Iterator[tuple[Path, str]]:
    """Yield each file of a site with an address of another host that it loads."""
    for path in sorted(site.rglob("*.html")):
        parser = _Loads()
        parser.feed(path.read_text("utf-8"))
        for address in parser.addresses:
            if re.match(r"(?:[a-z]+:)?//", address, re.I):
                yield path, address
    for path in sorted(site.rglob("*.css")):
        text = path.read_text("utf-8")
        for address in re.findall(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")]+)", text):
            yield path, address


def main(site: Path = SITE) -> int:
    """Build the site into a folder, strictly, and check it."""
    # Not --quiet, which has --strict overlook warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean"]
    # The theme prints an announcement about its successor otherwise.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [*command, "--site-dir", str(site)], cwd=ROOT, env=environment, check=False
    )
    if done.returncode:
        return done.returncode
    loads = list(external_loads(site))
    for path, address in loads:
        print(f"{path.relative_to(site)} loads {address}", file=sys.stderr)
    if not loads:
        print(site / "index.html")
    return 1 if loads else 0


if __name__ == "__main__":
    sys.exit(main(*(Path(folder).resolve() for folder in sys.argv[1:2])))

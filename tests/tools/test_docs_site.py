"""The site of the documentation has every page once, and needs no network."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mmreplay as mr
from tools import docs_site

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text()
NAV = re.findall(r"(\S+\.md)$", CONFIG.partition("\nnav:\n")[2], re.M)


def test_the_navigation_names_each_page_once():
    docs = ROOT / "docs"
    written = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    added = {name.lower() for name in docs_site.ROOT_PAGES}
    assert not written & (added | set(docs_site.reference_pages()))
    assert sorted(NAV) == sorted(written | added | set(docs_site.reference_pages()))


def test_the_reference_shows_every_public_name_once():
    text = "\n".join(docs_site.reference_pages().values())
    names = re.findall(r"^::: mmreplay\.(\w+)$", text, re.M)
    assert sorted(names) == sorted(mr.__all__)


def test_a_public_name_of_an_unknown_module_is_refused(monkeypatch):
    monkeypatch.delitem(docs_site.REFERENCE, "errors")
    with pytest.raises(LookupError, match=r"mmreplay\.\w+ must be on one page .* got 0\."):
        docs_site.reference_pages()


@pytest.mark.parametrize("module", docs_site.EXTENSIONS)
def test_the_modules_for_extensions_are_there(module):
    assert importlib.util.find_spec(module)


def test_files_that_the_configuration_names_are_there():
    for folder, name in re.findall(r"\b(assets|tools)/([\w.-]+)", CONFIG):
        base = ROOT if folder == "tools" else ROOT / "docs"
        assert (base / folder / name).exists(), name
    assert re.search(r"^  font: false$", CONFIG, re.M)


@pytest.mark.parametrize(
    ("name", "text", "loads"),
    [
        ("a.html", '<script src="https://a.net/b.js"></script>', ["https://a.net/b.js"]),
        ("a.html", '<link rel="stylesheet" href="//a.net/b">', ["//a.net/b"]),
        ("a.html", '<img src="http://a.net/b.png">', ["http://a.net/b.png"]),
        ("a.css", "@import 'https://a.net/b.css'; x {}", ["https://a.net/b.css"]),
        ("a.css", "x { src: url(https://a.net/b.woff) }", ["https://a.net/b.woff"]),
        ("a.html", '<a href="https://a.net">a</a><script src="b.js"></script>', []),
        ("a.css", "x { src: url(../b.woff); y: url(data:image/png;base64,aa) }", []),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(name, text, loads, tmp_path):
    (tmp_path / name).write_text(text)
    found = [address for _, address in docs_site.external_loads(tmp_path)]
    assert found == loads


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "tools.docs_site", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == f"{site / 'index.html'}\n"
    page = (site / "reference" / "buffer.html").read_text()
    assert 'id="mmreplay.ReplayBuffer"' in page
    assert 'id="mmreplay.ReplayBuffer.sample"' in page
    # The index that a page opened as a file searches.
    assert (site / "search" / "search_index.js").exists()

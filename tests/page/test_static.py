"""The page's own files: their size, where they come from, and what they may not do."""

import re
from pathlib import Path

import mmreplay.page
from mmreplay.page.static_files import static_files

STATIC = Path(mmreplay.page.__file__).parent / "static"


def test_the_page_is_small():
    assert sum(len(data) for data, _ in static_files().values()) < 200 << 10


def test_every_file_is_named_by_the_page_or_a_licence():
    index = (STATIC / "index.html").read_text()
    for name in static_files():
        licence = name.endswith(".txt")
        assert licence or name == "index.html" or f"static/{name}" in index, name
    for name in re.findall(r'(?:src|href)="static/([^"]+)"', index):
        assert name in static_files()


def test_scripts_parse_no_html_and_name_no_host():
    for name, (data, _) in static_files().items():
        if name.startswith("vendor/") or not name.endswith((".js", ".html")):
            continue
        text = data.decode()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "Function("):
            assert word not in text, (name, word)
        hosts = set(re.findall(r"https?://[^\"'`/ ]+", text)) - {"http://page"}
        assert not hosts, (name, hosts)
        assert "style=" not in text
        assert not re.search(r"\bon(click|load|error)=", text), name


def test_no_text_of_a_program_depends_on_how_its_lines_are_indented():
    """They are served without indentation, which a template of several lines holds."""
    for path in STATIC.glob("*.js"):
        for template in re.findall(r"`[^`]*`", path.read_text()):
            assert "\n" not in template, (path.name, template)

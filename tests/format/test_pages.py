"""The pages of the format name tests that exist, and show bytes that are."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ["format.md", "guarantees.md", "design-notes.md"]


@pytest.mark.parametrize("page", PAGES)
def test_files_and_tests_that_a_page_names_exist(page):
    text = (ROOT / "docs" / page).read_text()
    for path in re.findall(r"`((?:tests|tools)/[\w/.]+)", text):
        assert (ROOT / path).exists(), path
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for name in re.findall(r"`(test_\w+)", text):
        assert f"def {name}" in sources, name


def test_the_example_of_the_format_is_in_the_golden_buffer():
    text = (ROOT / "docs" / "format.md").read_text()
    data = (ROOT / "tests/golden/v1/env_major/data-000001/COMMIT").read_bytes()
    lines = re.findall(r"^(\w{4}): ((?:\w{4} ){7}\w{4})  ", text, re.M)
    assert len(lines) == 9
    for offset, digits in lines:
        assert data[int(offset, 16) :][:16].hex() == digits.replace(" ", "")

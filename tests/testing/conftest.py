"""The examples of CONTRIBUTING as modules."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from mmreplay.convert.registry import Format

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
JSONL = Format("jsonl", "example_jsonl", "JSON lines", (".jsonl",))


def example(name):
    """The block of CONTRIBUTING that is the file of a name."""
    pattern = rf"^```python\n(# mmreplay/\w+/{name}\.py.*?)^```"
    return re.search(pattern, TEXT, re.M | re.S)[1]


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Imports the file of an example, from where new processes find it as well."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    names = []

    def load(name, change=lambda source: source):
        (folder / f"example_{name}.py").write_text(change(example(name)))
        names.append(f"example_{name}")
        importlib.invalidate_caches()
        return importlib.import_module(names[-1])

    yield load
    for name in names:
        sys.modules.pop(name, None)

"""Names that are to be replaced are found, and no others."""

import subprocess
import sys

import pytest

from tools import words
from tools.words import Name


def broken(name, kind="attribute", path="mmreplay/storage/other.py"):
    """The old name that a name is listed under, or None."""
    rule = words.rule_of(Name(name, kind, path, 1))
    return None if rule is None else rule.old


def names_of(text, tmp_path, monkeypatch, local=False):
    """Kinds and names of a file of this text."""
    monkeypatch.setattr(words, "ROOT", tmp_path)
    path = tmp_path / "file.py"
    path.write_text(text)
    return [(n.kind, n.name) for n in words.names_in(path, local)][1:]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_told_of", ("told", "of")),
        ("ToldOf", ("told", "of")),
        ("LAW_NBYTES", ("law", "nbytes")),
        ("HTTPPart2", ("http", "part", "2")),
        ("placement", ("placement",)),
    ],
)
def test_underscores_and_capitals_separate_words(name, expected):
    assert words.words_of(name) == expected


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("_told_of", "told"),
        ("parts", "part"),
        ("Stretches", "Stretch"),
        ("_inlets", "Inlet"),
        ("lane_of", "Lane"),
        ("_at_hand", "at_hand"),
        ("given_up", "given_up"),
        ("_given", "given"),
    ],
)
def test_old_names_are_found_in_plural_and_in_longer_names(name, old):
    assert broken(name) == old


@pytest.mark.parametrize(
    "name", ["placement", "replace", "department", "boot_id", "shape", "column", "holds"]
)
def test_other_words_and_new_names_are_not_old_ones(name):
    assert broken(name) is None


@pytest.mark.parametrize("name", ["CUT", "cut_rows", "_tails", "field_moments", "tail"])
def test_terms_of_the_format_and_json_keys_stay(name):
    assert broken(name) is None


def test_some_names_are_old_in_one_folder_only():
    assert broken("tail", path="mmreplay/storage/zarr/engine.py") == "tail"
    assert broken("tail", path="mmreplay/ring.py") is None
    assert broken("Column", "class", "mmreplay/samplers/priority_file.py") == "Column"
    assert broken("Column", "class", "mmreplay/convert/array_file.py") is None


def test_some_names_are_old_for_a_class_only():
    assert broken("Shape", "class") == "Shape"
    assert broken("shape", "parameter") is None


def test_every_kind_of_name_is_found(tmp_path, monkeypatch):
    text = """
from elsewhere import room
LIMIT = 1
class Store:
    __slots__ = ("slot",)
    kind: int = 0
    def put(self, row, *rows, key=lambda item: item, **fields):
        self.head = other.tail = 1
        self.head = value = 2
        def inner(): ...
async def wait(): ...
def test_a_claim(): ...
"""
    names = names_of(text, tmp_path, monkeypatch)
    assert sorted(set(names)) == [
        ("attribute", "LIMIT"),
        ("attribute", "__slots__"),
        ("attribute", "head"),
        ("attribute", "kind"),
        ("attribute", "slot"),
        ("claim", "test_a_claim"),
        ("class", "Store"),
        ("function", "inner"),
        ("function", "wait"),
        ("method", "put"),
        ("parameter", "fields"),
        ("parameter", "item"),
        ("parameter", "key"),
        ("parameter", "row"),
        ("parameter", "rows"),
        ("parameter", "self"),
    ]
    assert names.count(("attribute", "head")) == 1
    local = names_of(text, tmp_path, monkeypatch, local=True)
    assert set(local) - set(names) == {("local", "value")}


def test_a_variable_of_a_comprehension_is_local(tmp_path, monkeypatch):
    text = "LENGTHS = [len(part) for part in range(3)]\n"
    assert names_of(text, tmp_path, monkeypatch) == [("attribute", "LENGTHS")]
    local = names_of(text, tmp_path, monkeypatch, local=True)
    assert ("local", "part") in local


def test_tell_of_a_file_is_no_old_name(tmp_path, monkeypatch):
    text = "class File:\n    def tell(self): ...\n    def seek(self, to): ...\n"
    assert ("method", "tell") not in names_of(text, tmp_path, monkeypatch)
    text = "class Report:\n    def tell(self): ...\n"
    assert ("method", "tell") in names_of(text, tmp_path, monkeypatch)


def test_names_are_grouped_by_rule_and_counted_by_folder():
    names = [
        Name("told", "parameter", "mmreplay/buffer/a.py", 3),
        Name("_told", "attribute", "mmreplay/b.py", 4),
        Name("Lane", "class", "mmreplay/buffer/append.py", 5),
    ]
    pairs = [(name, words.rule_of(name)) for name in names]
    assert words.listing(pairs)[:3] == [
        "told -> message, reported: 2",
        "  mmreplay/buffer/a.py:3 parameter told",
        "  mmreplay/b.py:4 attribute _told",
    ]
    counted = [line.split() for line in words.totals(pairs)]
    assert counted[0] == ["folder", "class", "parameter", "attribute", "all"]
    assert counted[1] == ["mmreplay", "1", "1", "1", "3"]
    assert ["mmreplay/*", "1", "1"] in counted


def test_every_exception_belongs_to_a_rule():
    rules = {rule.old.lower() for rule in (*words.RENAMED, *words.AMBIGUOUS)}
    assert {exempt.old for exempt in words.EXCEPTIONS} <= rules


def test_the_tool_prints_and_does_not_fail():
    command = [sys.executable, "-m", "tools.words", "tools", "--count"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("folder")


@pytest.mark.slow
@pytest.mark.parametrize("folder", words.FOLDERS)
def test_no_name_of_the_project_is_an_old_one(folder):
    assert words.listing(words.search([folder])) == []

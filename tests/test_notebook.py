"""What notebooks show of buffers, schemas and batches: tables of escaped text."""

from html.parser import HTMLParser

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.notebook import MAX_ROWS, html_table

HOSTILE = "<img src=x onerror=alert(1)><script>"
TAGS = {"div", "strong", "table", "thead", "tbody", "tr", "th", "td"}


class Table(HTMLParser):
    """Tags, attributes and the text of each cell of some HTML."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.cells = set(), [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag in ("th", "td", "strong"):
            self.cells.append("")

    def handle_data(self, data):
        self.cells[-1] += data


@pytest.fixture
def buffer(tmp_path):
    fields = {
        "observation": {HOSTILE: mr.Field((3,), "float32")},
        "action": mr.Field((), "int64"),
        HOSTILE: mr.Field((2, 2), "uint8", mutable=True),
        "terminated": mr.Field((), "bool"),
    }
    path = tmp_path / "<b>&amp;</b>"
    path.parent.mkdir(exist_ok=True)
    with mr.ReplayBuffer.create(
        tmp_path / "<b>&", mr.Schema(fields), 100, autoreset="disabled"
    ) as made:
        made.extend(
            {
                "observation": {HOSTILE: np.zeros((20, 3), np.float32)},
                "action": np.zeros(20, np.int64),
                HOSTILE: np.zeros((20, 2, 2), np.uint8),
                "terminated": np.zeros(20, bool),
            }
        )
        yield made


def checked(thing):
    """The cells of what a notebook shows; nothing in it is more than a table."""
    table = Table(thing._repr_html_())
    assert table.tags <= TAGS
    assert all(name == "colspan" for name, _ in table.attributes)
    return table.cells


def test_a_schema_is_a_table_of_its_fields(buffer):
    cells = checked(buffer.schema)
    assert cells[:6] == ["Schema of 4 fields", "field", "dtype", "shape", "role", "options"]
    rows = [cells[i : i + 5] for i in range(6, len(cells), 5)]
    assert rows == [
        [f"observation/{HOSTILE}", "float32", "[3]", "observation", ""],
        ["action", "int64", "scalar", "action", ""],
        [HOSTILE, "uint8", "[2, 2]", "", "mutable"],
        ["terminated", "bool", "scalar", "terminated", ""],
    ]


def test_a_buffer_is_a_table_with_what_its_repr_says(buffer):
    cells = checked(buffer)
    assert cells[0] == repr(buffer)
    assert "20 steps" in cells[0]
    assert "<b>&" in cells[0]
    assert cells[1:] == checked(buffer.schema)[1:]
    buffer.close()
    assert checked(buffer) == [repr(buffer)]


def test_a_batch_is_a_table_of_its_arrays(buffer):
    buffer.sampler = mr.UniformSampler(seed=0)
    cells = checked(buffer.sample(8))
    assert cells[:4] == ["Batch of 8 steps", "field", "dtype", "shape"]
    rows = [cells[i : i + 3] for i in range(4, len(cells), 3)]
    assert ["action", "int64", "[8]"] in rows
    assert [HOSTILE, "uint8", "[8, 2, 2]"] in rows
    assert [f"observation/{HOSTILE}", "float32", "[8, 3]"] in rows
    buffer.sampler = mr.SequenceSampler(4, mr.UniformSampler(seed=0))
    assert checked(buffer.sample(8))[0] == "Batch of 8 windows"


def test_a_long_table_says_what_it_leaves_out():
    cells = Table(html_table("t", ("n",), [(i,) for i in range(MAX_ROWS + 7)])).cells
    assert cells[:3] == ["t", "n", "0"]
    assert cells[-1] == "... and 7 more"
    assert len(cells) == 2 + MAX_ROWS + 1

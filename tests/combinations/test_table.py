"""What works with what is as recorded: each cell works, or is refused at once."""

import json
from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pyarrow")

import mmreplay as mr
from mmreplay.buffer.reader import GenerationReader
from mmreplay.errors import EmptyError, SchemaError
from tests.combinations import table
from tests.slices import count

RECORDED = json.loads(table.RECORD.read_text())

ROWS = {"samplers": table.SAMPLERS, "transforms": table.TRANSFORMS, "fields": table.KINDS}
COLUMNS = {"samplers": table.USES, "transforms": table.KINDS, "fields": table.FIELD_USES}


@pytest.mark.parametrize("name", table.TABLES)
def test_every_cell_is_recorded_and_no_other(name):
    expected = [(row, column) for row in ROWS[name] for column in COLUMNS[name]]
    assert [(row, column) for row in RECORDED[name] for column in RECORDED[name][row]] == expected


@pytest.mark.parametrize("name", table.TABLES)
def test_each_cell_is_as_recorded(name):
    now = table.TABLES[name](count(1, 5))
    assert {column for columns in now.values() for column in columns} == {*COLUMNS[name]}
    changed = [
        f"{row} x {column}: {RECORDED[name].get(row, {}).get(column)!r} is {what!r}"
        for row, columns in now.items()
        for column, what in columns.items()
        if RECORDED[name].get(row, {}).get(column) != what
    ]
    # python -m tests.combinations.table records them again.
    assert changed == []
    assert now.keys() == ROWS[name].keys()


def test_each_cell_works_or_is_refused_at_once():
    late = [
        (name, row, column, what)
        for name, cells in RECORDED.items()
        for row, columns in cells.items()
        for column, what in columns.items()
        if what != table.WORKS and not what.startswith("refused: ")
    ]
    # What a sampler of others draws is not known where it does not say so.
    assert {row for _, row, _, _ in late} == {"a user's own"}
    assert all(what.startswith("refused at the draw: ") for *_, what in late)


@pytest.mark.parametrize("name", table.PAGES)
def test_the_pages_show_the_recorded_table(name):
    file, corner = table.PAGES[name]
    text = (table.DOCS / file).read_text()
    shown = table.shown_table(RECORDED[name], corner)
    assert table.with_table(text, name, shown) == text


def test_every_public_sampler_and_transform_has_a_row():
    samplers = {
        name.removesuffix("Sampler")
        for name in mr.__all__
        if name.endswith("Sampler") or name == "UseCounter"
    }
    rows = {row.partition(",")[0].partition(" of ")[0] for row in table.SAMPLERS}
    assert samplers - {"Shrinking"} <= rows
    transforms = {
        name
        for name in mr.__all__
        if isinstance(getattr(mr, name), type)
        and getattr(mr, name).__module__.startswith("mmreplay.transforms.")
    }
    assert transforms <= {row.partition(",")[0] for row in table.TRANSFORMS}


# What the table is to see.


def raises(error):
    def call(*_, **__):
        raise error

    return call


GOOD = SchemaError("it must be one, got two. Pass one.")


def test_a_refusal_at_once_is_not_a_late_one():
    def nothing(_):
        return None

    assert table.cell(lambda b: (raises(GOOD), nothing)) == f"refused: {GOOD}"
    late = table.cell(lambda b: (lambda: None, raises(GOOD)))
    assert late == f"broken: late SchemaError: {GOOD}"
    permitted = table.cell(lambda b: (lambda: None, raises(GOOD)), may_be_late=True)
    assert permitted == f"refused at the draw: {GOOD}"


@pytest.mark.parametrize("error", [TypeError("no"), AssertionError(), KeyError("x")])
def test_a_bare_exception_is_seen(error):
    bare = table.cell(lambda b: (raises(error), raises(error)))
    assert bare.startswith(f"broken: bare {type(error).__name__}")
    late = table.cell(lambda b: (lambda: None, raises(error)))
    assert late.startswith(f"broken: late and bare {type(error).__name__}")
    before = table.cell(raises(error))
    assert before.startswith("broken: not even set up")


@pytest.mark.parametrize(
    "message", ["no", "it must be one, got two", "It must be one.", "One. Two. Three. Four."]
)
def test_a_message_of_another_form_is_seen(message):
    cell = table.cell(lambda b: (raises(EmptyError(message)), raises(GOOD)))
    assert cell.startswith("broken: the message is not what is wrong")


def test_a_refusal_after_a_buffer_was_opened_is_a_late_one():
    refusing = table.reading(lambda path, b, kind: path, raises(GOOD))
    text = table.cell(lambda b: refusing(b, table.KINDS["text"]))
    assert text == f"broken: late SchemaError: {GOOD}"


@pytest.mark.parametrize("use", ["concat", "ReplayLoader", "windows and episodes"])
def test_a_refusal_at_the_second_batch_is_a_late_one(use, monkeypatch):
    calls = []

    def late(self, *args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise GOOD
        return real(self, *args, **kwargs)

    real = GenerationReader.copy_steps
    monkeypatch.setattr(GenerationReader, "copy_steps", late)
    text = table.cell(partial(table.FIELD_USES[use], kind=table.KINDS["text"]))
    assert text.startswith("broken: late"), text


def test_a_refusal_of_a_load_after_its_export_is_a_late_one(monkeypatch):
    monkeypatch.setattr(mr, "load", raises(GOOD))
    text = table.cell(partial(table.FIELD_USES["npz and back"], kind=table.KINDS["text"]))
    assert text == f"broken: late SchemaError: {GOOD}"


def test_a_refused_export_that_left_a_file_is_seen(monkeypatch):
    def left(path, file, **options):
        file.write_text("half")
        raise GOOD

    monkeypatch.setattr(mr, "export", left)
    text = table.cell(partial(table.FIELD_USES["csv and back"], kind=table.KINDS["text"]))
    assert text == f"broken: the refusal changed something: {GOOD}"


def test_a_refusal_that_used_something_up_is_seen():
    def draws(b):
        sampler = mr.UseCounter(2, mr.UniformSampler(0), name=None, seed=0)
        buffer = b.ring(sampler)

        def refuse():
            buffer.sample(2)
            raise GOOD

        return refuse, raises(GOOD)

    assert table.cell(draws) == f"broken: the refusal changed something: {GOOD}"


def test_values_of_every_kind_are_compared():
    texts = [np.frombuffer(each, np.uint8) for each in (b"a", b"")]
    assert table.same_values(texts, ["a", ""])
    assert table.same_values(texts, [b"a", b""])
    assert not table.same_values(texts, ["b", ""])
    assert not table.same_values(texts, ["a"])
    assert table.same_values(np.eye(2), np.eye(2))
    assert not table.same_values(np.eye(2), np.ones((2, 2)))
    # The bits of bfloat16 numbers.
    assert table.same_values(np.array([0x3F80], np.uint16), np.ones(1, np.float32))

"""`check_format` refuses broken formats with a reason: the example, changed once."""

import pytest

import mmreplay as mr
from mmreplay.convert.registry import Format
from mmreplay.testing import FORMAT_RULES, ContractError, check_format, with_one_nan
from tests.testing.conftest import JSONL

OPEN = "Staging(target, overwrite=overwrite)"
CHECK = "if size < 1 or self._data[size:] != LAST_LINE.format(total).encode():"
BARE = """

class Bare:
    def __init__(self, target, overwrite):
        self.target = target

    def open(self, nbytes):
        return File.create(self.target, nbytes)

    def publish(self):
        return 1

    def abort(self):
        pass
"""
DIRECT = """

class Direct(Bare):
    def open(self, nbytes):
        self.handle = open(self.target, "w+b")
        return self

    def pwrite(self, data, offset):
        self.handle.write(data)

    def close(self):
        self.handle.close()
"""


def bare(source):
    return source.replace(OPEN, "Bare(target, overwrite)") + BARE


def direct(source):
    return source.replace(OPEN, "Direct(target, overwrite)") + BARE + DIRECT


def replaced(old, new):
    def change(source):
        assert old in source
        return source.replace(old, new)

    return change


READS = "column[row] = values[name]"
DESCRIBES = "return self._description\n"
SELECTED = "return self._description.select(self._description.schema.paths[::-1])\n"
MOVED = """first = self._description.first
        from dataclasses import replace
        stop = self._description.stop + 5
        return replace(self._description, first=first + 5, stop=stop)
"""
BLOCK = "yield Block(columns, env_ids, positions, flags)"
LOWER = BLOCK.replace("positions", "positions + 5")
BROKEN = [
    (
        replaced(READS, 'column[row] = 0 if name == "observation/o" else values[name]'),
        "random_buffers_come_back",
        "random buffer .* differs: field 'observation/o' of environment",
    ),
    (
        replaced("def describe(self):", "def describe(self):\n        self.report.doubt('ends')"),
        "every_dtype_comes_back",
        r"has notes \(\), doubts \('ends'",
    ),
    (
        lambda source: source.replace(DESCRIBES, MOVED).replace(BLOCK, LOWER),
        "rings_go_on_at_their_positions",
        "the heads of a loaded ring are",
    ),
    (
        replaced("if not self._end:  # there were no rows", "if False:"),
        "empty_buffers_come_back",
        None,
    ),
    (
        replaced("json.dumps(item)", "json.dumps({**item, 'id': id(item)})"),
        "equal_buffers_give_equal_files",
        "two exports of one buffer differ at byte",
    ),
    (
        replaced(DESCRIBES, SELECTED),
        "selections_come_back",
        "were exported and .* were loaded. Keep the order",
    ),
    (
        replaced("overwrite=overwrite)\n        self._file", "overwrite=True)\n        self._file"),
        "existing_targets_are_refused",
        "which exists, raised nothing. Pass overwrite to",
    ),
    (bare, "two_runs_do_not_mix", "a second export to the same target raised"),
    (bare, "killed_runs_leave_no_target", "an export that was killed left new.jsonl"),
    (bare, "full_disks_leave_no_target", "a disk full at write 0 .* made new.jsonl"),
    (
        replaced(
            "# nothing here may fail after this line", "\n        self._append(self._first_line)"
        ),
        "full_disks_leave_no_target",
        "a disk full at write 0 .* left tmp-mmreplay-new-new.jsonl. .* constructor",
    ),
    (direct, "full_disks_leave_no_target", "without a call of mmreplay.disk"),
    (bare, "failed_syncs_leave_no_target", "whose sync failed raised nothing"),
    (
        replaced(CHECK, "if False:"),
        "truncated_files_are_refused",
        "a file truncated to 0 of .* raised AttributeError",
    ),
    (
        replaced(CHECK, "if size < 1:"),
        "flipped_bits_are_noticed",
        "a file with bit . of byte .* flipped (raised|was loaded and differs)",
    ),
    (
        replaced("File.open(path, None)", "File.open(path.resolve(), None)"),
        "irregular_files_are_refused",
        "a link in place of a file raised nothing. Open sources with",
    ),
    (
        replaced('f"{path} does not end with', 'f"It does not end with'),
        "other_contents_are_refused",
        "raised CorruptError without its path: It does not end",
    ),
    (
        replaced("rows_per_block or default_rows(self._description)", "1 << 40"),
        "memory_is_bounded",
        "an export of 1 MiB allocated . MiB, more than 0",
    ),
]


@pytest.mark.parametrize(("change", "rule", "message"), BROKEN)
@pytest.mark.sliced(9)
def test_a_broken_format_is_refused(imported, change, rule, message, tmp_path):
    imported("jsonl", change)
    options = {"large_nbytes": 1 << 20, "large_shape": (8,), "memory_nbytes": 1 << 19}
    if message is None:
        # What the format raises for its own file is passed on with the rule.
        with pytest.raises(mr.FormatError) as caught:
            check_format(JSONL, tmp_path, rules=[rule], stored_as=with_one_nan)
        assert f"raised while rule {rule!r} checked" in caught.value.__notes__[-1]
        return
    with pytest.raises(ContractError, match=f"(?s)breaks rule '{rule}' .*{message}"):
        check_format(JSONL, tmp_path, rules=[rule], stored_as=with_one_nan, **options)


def test_values_that_look_alike_are_reported_with_their_bytes(imported, tmp_path):
    imported("jsonl")
    # Text has one NaN, so that others come back with another payload.
    with pytest.raises(ContractError, match=r"is nan \(bytes \w+\) .* with_one_nan for"):
        check_format(JSONL, tmp_path, rules=["every_dtype_comes_back"])


VALUES = "values_of_any_length_come_back"


def test_a_format_that_mixes_values_up_is_refused(tmp_path):
    """The example has no fields that vary, so this is another."""
    broken = Format("shifted", "tests.testing.shifted", "npz", (".shifted",), varies=True)
    with pytest.raises(ContractError, match=f"(?s)breaks rule '{VALUES}' .*of field"):
        check_format(broken, tmp_path, rules=[VALUES])


def test_every_rule_has_a_format_that_breaks_it():
    assert set(FORMAT_RULES) == {VALUES, *(rule for _, rule, _ in BROKEN)}


def test_a_format_that_only_reads_is_refused():
    with pytest.raises(mr.SchemaError, match=r"format must write, got 'rlds'"):
        check_format("rlds")


def test_a_format_that_only_writes_is_checked_as_far_as_it_goes(imported, tmp_path):
    imported("jsonl")
    writes = Format("jsonl", "example_jsonl", "JSON lines", (".jsonl",), reads=False)
    rules = [rule for rule in FORMAT_RULES if rule != "memory_is_bounded"]
    check_format(writes, tmp_path, rules=rules)
    assert "jsonl" not in mr.convert.registry.formats()


def test_a_format_with_the_name_of_another_is_refused():
    other = Format("npz", "example_jsonl", "JSON lines", (".jsonl",))
    with pytest.raises(mr.SchemaError, match="format 'npz' exists already"):
        check_format(other)

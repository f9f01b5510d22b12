"""Every message that docs/troubleshooting.md quotes is one that the code raises."""

import ast
import difflib
import re
from pathlib import Path

import pytest

import mmreplay as mr
from tests.buffer.support import schema, step

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^\| `(\w+)`: `([^`]+)` \|", PAGE.read_text(), re.M)
HOLE = "\N{HORIZONTAL ELLIPSIS}"


def text_of(node):
    """The text of a string in the source, with a mark for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return HOLE


def raised_messages():
    """Class and text of every error that is made, or warning that is given."""
    found = set()
    for path in sorted((ROOT / "mmreplay").rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args:
                continue
            name = ast.unparse(call.func)
            if name == "warnings.warn":
                given = [*call.args[1:], *(word.value for word in call.keywords)]
                name = ast.unparse(given[0]) if given else ""
            found.add((name.rpartition(".")[2], text_of(call.args[0])))
    return found


@pytest.fixture(scope="module")
def messages():
    return raised_messages()


@pytest.mark.parametrize(("error", "message"), QUOTED)
def test_a_quoted_message_is_raised_by_the_code(error, message, messages):
    # A hole of the page covers holes of the source and words around them.
    pattern = ".*".join(re.escape(part) for part in message.split(HOLE))
    texts = [text for name, text in messages if name == error]
    if any(re.search(pattern, text, re.S) for text in texts):
        return
    closest = difflib.get_close_matches(message, texts, n=3, cutoff=0.1)
    pytest.fail(f"no {error} says {message!r}; the closest: {closest}")


def test_most_messages_of_the_page_are_quoted():
    rows = re.findall(r"^\| .+ \| .+ \| .+ \|$", PAGE.read_text(), re.M)
    rows = [row for row in rows if row != "| message | cause | fix |"]
    assert len(QUOTED) > 60
    assert len(rows) - len(QUOTED) < 10


def opened_twice(path):
    writer = filled(path)
    return lambda: (mr.ReplayBuffer.open(path, "r+"), writer)


def filled(path):
    buffer = mr.ReplayBuffer.create(path, schema(), 50)
    for number in range(30):
        buffer.add(step(number))
    return buffer


def created_twice(path):
    filled(path).close()
    return lambda: mr.ReplayBuffer.create(path, schema(), 50)


def added_to_a_reader(path):
    filled(path).close()
    reader = mr.ReplayBuffer.open(path)
    return lambda: reader.add(step(0))


def added_after_close(path):
    buffer = filled(path)
    buffer.close()
    return lambda: buffer.add(step(0))


def drawn_from_nothing(path):
    buffer = mr.ReplayBuffer.create(path, schema(), 50)
    buffer.add(step(0))
    return lambda: buffer.sample(8)


def truncated(path):
    filled(path).close()
    with (path / "data-000001" / "records.bin").open("r+b") as file:
        file.truncate(10)
    return lambda: mr.ReplayBuffer.open(path)


def deleted_file(path):
    filled(path).close()
    (path / "data-000001" / "records.bin").unlink()
    return lambda: mr.ReplayBuffer.open(path)


def overwritten_position(path):
    buffer = filled(path)
    return lambda: buffer.take(0, 10_000)


def unprioritized(path):
    buffer = filled(path)
    batch = buffer.sample(8)
    return lambda: buffer.update_priorities(batch, batch.weights)


def unknown_field(path):
    batch = filled(path).sample(8)
    return lambda: batch["nothing"]


def unknown_format(path):
    path.with_suffix(".what").write_bytes(b"x" * 100)
    return lambda: mr.load(path.with_suffix(".what"), path)


def existing_target(path):
    filled(path).close()
    path.with_suffix(".npz").write_bytes(b"")
    return lambda: mr.export(path, path.with_suffix(".npz"))


def indexed_buffer(path):
    buffer = filled(path)
    return lambda: buffer[0]


def drawn_by(sampler):
    """A buffer of two groups of two rows, of two versions, with that sampler."""
    fields = {name: mr.Field((), "int64") for name in ("group", "version")}
    buffer = mr.ReplayBuffer.create(None, mr.Schema(fields), 50, engine="memory", sampler=sampler)
    buffer.extend(group=[1, 2, 1, 2], version=[0, 0, 1, 1])
    return buffer


def incomplete_groups(path):
    buffer = drawn_by(mr.GroupSampler("group", 3))
    return lambda: buffer.sample(1)


def old_versions(path):
    buffer = drawn_by(mr.StalenessSampler("version", 9, 2))
    return lambda: buffer.sample(1)


def used_rows(path):
    buffer = drawn_by(mr.UseCounter(1, mr.DistinctSampler()))
    buffer.sample(4)
    return lambda: buffer.sample(1)


def found_by_a_float(path):
    buffer = filled(path)
    return lambda: buffer.find("reward", 1)


def batch_of_another_sampler(path):
    buffer = drawn_by(mr.UseCounter(1, lease_s=60))
    batch = buffer.sample(2)
    buffer.sampler = mr.UseCounter(1, name="other", lease_s=60)
    return lambda: buffer.acknowledge(batch)


def ticket_of_counted_uses(path):
    buffer = drawn_by(mr.UseCounter(1))
    batch = buffer.sample(2)
    return lambda: buffer.ticket(batch)


def acknowledged_data(path):
    buffer = drawn_by(mr.UseCounter(1, lease_s=60))
    return lambda: buffer.acknowledge(buffer.sample(2)["group"])


def leased_twice(path):
    return lambda: mr.UseCounter(2, lease_s=60)


def counters_of_one_name(path):
    return lambda: mr.MixtureSampler([(mr.UseCounter(1), 1), (mr.UseCounter(1), 1)])


def groups_of_two_buffers(path):
    buffers = [drawn_by(mr.GroupSampler("group", 2)) for _ in range(2)]
    return lambda: mr.concat(buffers)


def acknowledged_without_counter(path):
    buffer = filled(path)
    batch = buffer.sample(8)
    return lambda: buffer.acknowledge(batch)


@pytest.mark.parametrize(
    ("make", "section", "number"),
    [
        (created_twice, "Creating and opening", 0),
        (opened_twice, "Locks", 1),
        (added_to_a_reader, "Locks", 3),
        (truncated, "After a crash", 0),
        (deleted_file, "After a crash", 2),
        (added_after_close, "Adding steps", 10),
        (drawn_from_nothing, "Drawing", 0),
        (overwritten_position, "Drawing", 1),
        (unknown_field, "Drawing", 4),
        (unprioritized, "Drawing", 5),
        (incomplete_groups, "Groups, versions and uses", 0),
        (old_versions, "Groups, versions and uses", 1),
        (used_rows, "Groups, versions and uses", 2),
        (found_by_a_float, "Groups, versions and uses", 3),
        (batch_of_another_sampler, "Groups, versions and uses", 4),
        (ticket_of_counted_uses, "Groups, versions and uses", 5),
        (acknowledged_data, "Groups, versions and uses", 6),
        (acknowledged_without_counter, "Groups, versions and uses", 7),
        (leased_twice, "Groups, versions and uses", 9),
        (counters_of_one_name, "Groups, versions and uses", 10),
        (groups_of_two_buffers, "Groups, versions and uses", 11),
        (indexed_buffer, "Training with torch", 2),
        (unknown_format, "Converting", 0),
        (existing_target, "Converting", 1),
    ],
)
def test_the_cause_that_the_page_names_raises_the_message(make, section, number, tmp_path):
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^\| `(\w+)`: `([^`]+)` \|", text, re.M)
    error, message = quoted[number]
    pattern = ".*".join(re.escape(part) for part in message.split(HOLE))
    call = make(tmp_path / "b")
    with pytest.raises(Exception, match=f"(?s){pattern}") as caught:
        call()
    assert type(caught.value).__name__ == error

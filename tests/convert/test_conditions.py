"""Conditions on episodes say what a twin in plain Python says."""

import ast
import random
import re
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mmreplay as mr
from mmreplay.convert.base import Block
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.condition import parse
from mmreplay.convert.episode_facts import EpisodeFacts
from mmreplay.errors import SchemaError
from mmreplay.ragged import Ragged
from tests.convert import condition_twin as twin
from tests.slices import count


def field_of(dtype, shape):
    if dtype == "text":
        return mr.Field.text(max_bytes=60)
    return mr.Field(shape, dtype)


FIELDS = {path: field_of(*what) for path, what in twin.FIELDS.items()}


def column(path, values):
    dtype, shape = twin.FIELDS[path]
    if dtype == "text":
        texts = [each[0].encode() for each in values]
        offsets = np.cumsum([0, *map(len, texts)])
        return Ragged(np.frombuffer(b"".join(texts), np.uint8), offsets)
    if dtype == "bfloat16":
        bits = np.array(values, np.float32).reshape(-1, *shape).view(np.uint32) >> 16
        return bits.astype(np.uint16)
    return np.array(values, dtype).reshape(-1, *shape)


class Rows:
    """A reader of blocks that are made already."""

    def __init__(self, num_envs, blocks, fields=FIELDS):
        roles = {"reward": "reward" if "reward" in fields else None}
        schema = SimpleNamespace(fields=fields, role=roles.get)
        first, stop = np.zeros(num_envs, np.int64), np.full(num_envs, 1 << 40)
        self._description = SimpleNamespace(
            schema=SimpleNamespace(**vars(schema), paths=tuple(fields)),
            num_envs=num_envs,
            first=first,
            stop=stop,
        )
        self._blocks = blocks

    def describe(self):
        return self._description

    def only(self, paths):
        assert set(paths) <= set(self._description.schema.fields)

    def blocks(self):
        return iter(self._blocks)

    def marks(self):
        for block in self._blocks:
            yield Block({}, block.env_ids, block.positions, block.flags)


def blocks_of(rng, envs):
    blocks = []
    for places in twin.random_order(rng, envs):
        rows = [envs[env][at] for env, at in places]
        blocks.append(
            Block(
                {path: column(path, [values[path] for values, _ in rows]) for path in FIELDS},
                np.array([env for env, _ in places]),
                np.array([at for _, at in places]),
                np.array([flags for _, flags in rows], np.uint8),
            )
        )
    return blocks


BEYOND = ["int64"]


def outcomes(condition, reader):
    """True, False or None of each episode; or that an integer is too large."""
    try:
        truth = EpisodeFacts(reader, condition).selected()
    except SchemaError as error:
        return [str(error).partition(" becomes larger than ")[2][:5]]
    unknown = np.zeros(len(truth.true), bool) if truth.unknown is None else truth.unknown
    assert not (truth.true & unknown).any()
    return [None if u else bool(t) for t, u in zip(truth.true, unknown, strict=True)]


def expected(tree, episodes):
    try:
        values = [twin.value(tree, episode) for episode in episodes]
    except twin.BeyondInt64:
        return BEYOND
    return [None if each is None else bool(each) for each in values]


def test_random_conditions_are_what_the_twin_says():
    conditions, both, unknown, beyond = count(10_000, 300), 0, 0, 0
    for world in range(conditions // 20):
        rng = twin.make(world)
        envs, episodes = twin.random_rows(rng)
        readers = [Rows(len(envs), blocks_of(rng, envs)) for _ in range(2)]
        for _ in range(20):
            text, tree = twin.random_condition(rng)
            condition = parse(text, FIELDS, "reward")
            wanted = expected(tree, episodes)
            for reader in readers:
                assert outcomes(condition, reader) == wanted, text
            beyond += wanted == BEYOND
            both += True in wanted and False in wanted
            unknown += None in wanted
    # The conditions tell something apart, and every outcome is met.
    assert both > 0.3 * conditions
    assert unknown > 0.05 * conditions
    assert beyond > 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_infinities_of_both_signs_sum_to_nan_in_blocks_of_any_size(tmp_path, size):
    schema = mr.Schema({"x": mr.Field((), "float64"), "terminated": mr.Field((), "bool")})
    with mr.ReplayBuffer.create(tmp_path / "ring", schema, 4) as buffer:
        for x, end in ((np.inf, False), (-np.inf, True), (1e308, False), (1e308, True)):
            buffer.add(x=x, terminated=end)
        rows = BufferReader(buffer)
        whole = rows.blocks
        rows.blocks = lambda rows_per_block=None: whole(size)
        truth = EpisodeFacts(rows, parse("sum(x) > 0", schema.fields, "")).selected()
    # NaN says nothing of the first episode; the second one is infinite.
    assert truth.true.tolist() == [False, True]
    assert truth.unknown is not None
    assert truth.unknown.tolist() == [True, False]


def test_the_twin_imports_nothing_of_the_package():
    tree = ast.parse(Path(twin.__file__).read_text())
    names = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert set(names) == {"math", "random", "struct", "fractions"}


# What is refused.

SMALL = {
    "x": mr.Field((), "float32"),
    "obs/v": mr.Field((3,), "float32"),
    "m": mr.Field((2, 2), "float64"),
    "action": mr.Field((), "int64"),
    "flag": mr.Field((), "bool"),
    "length": mr.Field((), "int32"),
    "reward": mr.Field((), "float32"),
    "task": mr.Field.text(max_bytes=60),
    "tokens": mr.Field((None,), "int32", max_length=9),
    "in": mr.Field((), "uint8"),
    "empty": mr.Field((0,), "float32"),
}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty. Write a condition"),
        ("length", "it is a number, and no condition. Compare it, as in return > 20."),
        ("'a'", "it is a text, and no condition"),
        ("3 > 2", "it names no fact and no field, so it is the same for every episode"),
        ("x > 3", r"x is a field, with a value for each step. Write mean\(x\) > 0 or any\(x > 0\)"),
        ("`obs/v` > 3", r"Write mean\(`obs/v`\[0\]\) > 0"),
        ("flag", r"Write any\(flag\), all\(flag\) or end\(flag\)"),
        ("task == 'a'", r'Write start\(task\) == "..." or any\(task == "..."\)'),
        ("lenght > 3", "'lenght' is unknown. Did you mean length"),
        ("Return > 3", "'Return' is unknown. Did you mean return"),
        ("mean(rewrad) > 3", "there is no field 'rewrad'. Did you mean reward"),
        ("any(whole)", "whole is a fact of an episode, and no field has that name"),
        ("mean(obs) > 3", "'obs' is a group of fields. Name one of them in backquotes"),
        ("whole == true", "true is unknown. Did you mean True"),
        ("mean", r"mean lacks what it is of. Write mean\(FIELD\)"),
        ("length = 5", "character 8, '=', is not understood. Write ==."),
        ("length > 3 & whole", "character 12, '&', is not understood. Write and."),
        ("length > 3 && whole", "character 12, '&&', is not understood. Write and."),
        ("length => 3", "character 8, '=>', is not understood. Write >=."),
        ("length =< 3", "character 8, '=<', is not understood. Write <=."),
        ("length > 3 AND whole", "AND is unknown. Write and."),
        ("length > 3 Or whole", "Or is unknown. Write or."),
        ("NOT whole", "NOT is unknown. Write not."),
        ("NOT(whole)", "NOT is unknown. Write not."),
        ("env IN [0]", "IN is unknown. Write in."),
        ("length > 3 length", "it cannot be read from character 12 on, 'length'"),
        ("3length > 3", "a number and a name touch. Put a space or a sign between them."),
        ("length > " + "1" * 41, "a number has 41 characters. Write at most 40."),
        ("length > 18446744073709551616", "is too large. Integers are below 2"),
        ("length > 1e999", "1e999 is too large"),
        (r"start(task) == 'a\x'", "a text has an unknown escape. Use"),
        ("start(task) == '\ud800'", "a text is not valid Unicode"),
        ("x" * 2001, "it has 2,001 characters. Write at most 2,000."),
        ("(" * 51 + "whole" + ")" * 51, "it is nested more than 50 deep"),
        ("not " * 51 + "whole", "it is nested more than 50 deep"),
        ("length" + " + 1" * 60 + " > 3", "it is nested more than 50 deep"),
        ("mean(tokens) > 3", "values of `tokens` have any length.* Make a field of numbers"),
        ("mean(empty) > 3", "`empty` has no component"),
        ("mean(m[0]) > start(m[0])", r"start\(m\[0\]\) has 2 components. Name one"),
        ("mean(m[2]) > 3", r"`m` has no such component, as its shape is \[2, 2\]"),
        ("mean(task[0]) > 3", "`task` has no such component"),
        ("mean(x[length]) > 3", "an index is one integer that is written out"),
        ("start(x)[0] > 3", "only a field within a reduction has components"),
        ("max(task) == 'a'", "max is of numbers, and this is a text"),
        ("sum(x > 3) > 2", r"sum is of numbers, and this is a condition. Write sum\(FIELD\) > 0"),
        ("any(action)", "action is a number, where a condition is needed. Write action != 0."),
        ("any(task)", "task is a text, where a condition is needed. Compare it by =="),
        ("-start(task) == 3", "is a text, where a number is needed. Compare it by =="),
        ("(length > 3) + 1 > 2", r"is a condition, where a number is needed. Count steps with"),
        ("(length > 3) == whole", "length > 3 is a condition, and is compared with nothing"),
        ("start(task) == 3", "compares a text with a number. Put text in quotes"),
        ("start(task) < 'a'", "texts have no order here. Compare them by ==, != or in."),
        ("env in 2", "in needs one list that is written out"),
        ("env in [0] in [1]", "in needs one list that is written out"),
        ("env in []", "the list is empty. Write items into it."),
        ("env in [length]", "items of a list are numbers, texts, True or False"),
        ("(env > 0) in [True]", "env > 0 is a condition. Write it as it is."),
        ("length % 0 == 0", "the right side must be a number above 0 that is written out"),
        ("length // env > 0", "the right side must be a number above 0 that is written out"),
        ("any(foo(x))", r"foo\(x\) calls what cannot be called. There are min, max"),
        ("coutn(flag) > 1", "calls what cannot be called. Did you mean count"),
        ("mean(x, x) > 1", r"mean takes one expression. Write mean\(FIELD\)."),
        ("mean(max(x)) > 1", "is a reduction within another one. Write one of them."),
        ("mean(3) > 1", r"mean\(3\) names no field. Write a field of each step."),
        ("sum(`obs/v` * m) > 1", r"one side has the shape \[3\], the other \[2, 2\]"),
        ("()", r"\( \) is not understood|is not understood. There are and, or, not"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_way_out(text, message):
    with pytest.raises(SchemaError, match=message) as caught:
        parse(text, SMALL, "reward")
    assert str(caught.value).startswith("where: ")


def test_a_condition_is_a_text():
    with pytest.raises(SchemaError, match="where must be a text such as 'length >= 50', got 3"):
        parse(3, SMALL)


def test_a_return_needs_a_reward_of_one_number():
    with pytest.raises(SchemaError, match="no field has the role of the reward"):
        parse("return > 3", SMALL)
    with pytest.raises(SchemaError, match="the reward `obs/v` is not one number"):
        parse("return > 3", SMALL, "obs/v")


def test_a_fact_with_the_name_of_a_field_is_noted():
    assert parse("length > 3", SMALL).notes == [
        "length is the fact of an episode there; the field of that name is `length` in a reduction"
    ]
    assert parse("any(length > 3)", SMALL).notes == []


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("length > 3 and env == 0 or whole", ()),
        ("return > 3", ("reward",)),
        ("mean(x) > 0 or any(`obs/v`[0] > 0)", ("x", "obs/v")),
    ],
)
def test_only_the_fields_that_are_asked_for_are_read(text, paths):
    assert parse(text, SMALL, "reward").paths == paths


def test_equal_reductions_are_made_once():
    condition = parse("mean(x) > 0 and mean(`x`) < 3 and mean ( x ) != 1", SMALL)
    assert [each.name for each in condition.reductions] == ["mean", "mean"]


def test_more_episodes_than_memory_should_hold_are_refused(monkeypatch):
    monkeypatch.setattr("mmreplay.convert.episode_facts.MAX_EPISODES", 3)
    flags = np.array([1, 1, 1, 1], np.uint8)
    block = Block({}, np.zeros(4, np.int64), np.arange(4), flags)
    with pytest.raises(SchemaError, match="the source has more than 3 episodes, too many"):
        EpisodeFacts(Rows(1, [block], {}))


def test_an_integer_that_int64_does_not_hold_is_named_by_its_episode():
    fields = {"n": mr.Field((), "int64")}
    values = np.array([1, 2, 2**62, 2**62, 2**62], np.int64)
    flags = np.array([1, 0, 1, 0, 1], np.uint8)
    block = Block({"n": values}, np.zeros(5, np.int64), np.arange(7, 12), flags)
    reader = Rows(1, [block], fields)
    for text in ("sum(n) > 0", "max(n * 2) > 0", "end(n) + max(n) > 0"):
        with pytest.raises(SchemaError, match="the episode at position 9 of environment 0"):
            EpisodeFacts(reader, parse(text, fields)).selected()
    assert outcomes(parse("mean(n) > 3", fields), reader) == [False, True, True]


def test_no_episode_meets_any_condition():
    fields = {"n": mr.Field((), "int64")}
    for text in ("length + 9223372036854775808 > 0", "any(n > 3)", "start(n) == 2", "sum(n) > 0"):
        assert outcomes(parse(text, fields), Rows(1, [], fields)) == []


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("-18446744073709551615 in [1] or env == 0", True),
        ("-18446744073709551615 in [-18446744073709551615] and env == 0", True),
        ("0.5 in [1, 0.5] and env == 0", True),
        ("True in [1] and env == 0", True),
        ("2 in [1, 3] or env > 0", False),
    ],
)
def test_written_numbers_are_listed_by_value(text, holds):
    block = Block({}, np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.uint8))
    assert outcomes(parse(text, {}), Rows(1, [block], {})) == [holds]


# Texts that were made to do harm.

FRAGMENTS = [
    *("lambda: 0", "(lambda x: x)(1)", "x := 3", "f'{x}'", "rb'a'", "'''a'''", "# comment"),
    *("__import__('os')", "x.__class__", "eval('1')", "[i for i in x]", "{1: 2}", "await x"),
    *(
        "`",
        "``",
        "`a",
        "'",
        '"',
        "\\",
        "\0",
        "\u202e",
        "\ufeff",
        "\uff4cength",
        "²",
        "\u0661",
        "\ud800",
    ),
    *(
        "\u2018a\u2019",
        "≤",
        "\u2212",
        "9" * 500,
        "1e400",
        "1e-400",
        "0x10",
        "1_000",
        "1__0",
        "1j",
        ".5",
        "1..2",
    ),
    *("**", "<<", "&", "@", "=", "===", ":", "...", "$", "->", "is not", "None", "nan", "_0", "_1"),
    *("`obs/v`[99]", "`obs/v`[0:2]", "m[0, 1]", "mean(mean(x))", "mean(*x)", "mean(x=3)", "start"),
    *("in []", "in [x]", "1 / 0", "% 0", "- - - 1", "()", "(,)", "(" * 60, "not " * 70, "-" * 90),
]


def hostile(rng):
    """A condition that was bent, or pieces of what is none."""
    choice = rng.random()
    if choice < 0.1:
        return "".join(rng.choice(FRAGMENTS) + rng.choice(["", " "]) for _ in range(5))
    if choice < 0.2:
        return "".join(
            chr(rng.choice([rng.randrange(128), rng.randrange(0x110000)])) for _ in "a" * 40
        )
    if choice < 0.3:
        n = rng.choice([3, 49, 51, 200, 490])
        return rng.choice(
            [
                "(" * n + "length > 3" + ")" * n,
                "not(" * n + "whole" + ")" * n,
                "length" + "+1" * n + " > 3",
                " and ".join(["whole"] * n),
                "count(" * n + "flag" + ")" * n,
                "any(" + "action*" * n + "1 > 0)",
                "m" + "[0]" * n + " > 1",
                "any(task == '" + "\\\\" * n + "')",
            ]
        )
    text, _ = twin.random_condition(rng)
    for _ in range(rng.randint(1, 4)):
        first = rng.randrange(len(text) + 1)
        stop = min(len(text), first + rng.randint(1, 6))
        way = rng.random()
        if way < 0.3:
            text = text[:first] + text[stop:]
        elif way < 0.6:
            text = text[:first] + rng.choice(FRAGMENTS) + text[first:]
        elif way < 0.8:
            text = text[:first] + text[first:stop] * 3 + text[stop:]
        else:
            words = [match.span() for match in re.finditer(r"\w+|[^\w\s]+", text)]
            begin, end = rng.choice(words) if words else (0, 0)
            text = text[:begin] + rng.choice(FRAGMENTS) + text[end:]
    return text


def test_hostile_texts_meet_one_error_and_take_no_time():
    rng = random.Random(7)
    envs, episodes = twin.random_rows(twin.make(5))
    reader = Rows(len(envs), blocks_of(rng, envs))
    accepted, slowest, messages = 0, 0.0, []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(count(10_000, 250)):
            text, begin = hostile(rng), time.process_time()
            try:
                truth = EpisodeFacts(reader, parse(text, FIELDS, "reward")).selected()
            except SchemaError as error:
                messages.append(str(error))
            else:
                assert len(truth.true) == len(episodes)
                accepted += 1
            slowest = max(slowest, time.process_time() - begin)
    assert accepted > 0
    assert max(map(len, messages)) < 1000
    assert all(message.encode() for message in messages)
    # CPU time, of a limit of a second for each; the slowest takes some tens of ms.
    assert slowest < 1

"""Conditions on episodes: a small language, checked before a row is read.

``return > 20 and length >= 50``, ``any(action == 3)``, ``start(task) == "push"``.
Outside of a reduction a word is a fact of the episode, inside it is a field. A
condition is cut into tokens first; Python's own parser then sees placeholders in their
places, so nothing in quotes is looked at twice, and only the nodes named here are
understood. It is made into functions over arrays; `mmreplay.convert.episode_facts`
calls them. docs/convert.md describes the language.
"""

from __future__ import annotations

import ast
import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Protocol, cast

import numpy as np

from mmreplay.convert.condition_values import (
    Operation,
    Truth,
    as_float64,
    compared,
    computed,
    listed,
    rounded,
    same_text,
)
from mmreplay.errors import SchemaError, shown
from mmreplay.schema import Field

TRUTHS = ("terminated", "truncated", "whole")
FACTS = ("return", "length", "env", "number", "source", *TRUTHS)
REDUCTIONS = ("min", "max", "mean", "sum", "any", "all", "start", "end", "count")
MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS = 2000, 50, 40
NAMES_SHOWN = 20

COMPARISONS: dict[type[ast.cmpop], Operation] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
OPERATIONS: dict[type[ast.operator], Operation] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<number>(?:[0-9]+(?:_[0-9]+)*\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)
    |(?P<word>[^\W\d]\w*)
    |(?P<path>`[^`]*`)
    |(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    |(?P<sign>//|<=|>=|==|!=|[-+*/%<>()\[\],])""",
    re.VERBOSE | re.DOTALL,
)
WORD = re.compile(r"[^\W\d]\w*")
KEYWORDS = ("and", "or", "not", "in")
ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "t": "\t"}
MEANT = {
    "=>": ">=",
    "=<": "<=",
    "&&": "and",
    "||": "or",
    "=": "==",
    "&": "and",
    "|": "or",
    "~": "not",
    "!": "not or !=",
    "^": "!=",
    ".": "`a/b` for a field of a group",
    "{": "[ ]",
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "\u2212": "-",
    "\u00d7": "*",
    "`": "a closing `",
    "'": "a closing '",
    '"': 'a closing "',
}
KINDS = {"text": "a text", "truth": "a condition", "bool": "true or false"}


class Steps(Protocol):
    """What is evaluated within a reduction: some steps."""

    def field(self, path: str) -> Any:
        """Numbers ``[N, *shape]`` or texts ``[N]``."""


class Episodes(Protocol):
    """What is evaluated outside of reductions: some episodes."""

    def fact(self, name: str) -> Any:
        """Numbers or bools ``[N]``."""

    def reduced(self, number: int) -> Any:
        """What a reduction gave, ``[N]``; a `Truth` of ``any`` and ``all``."""


Evaluate = Callable[[Any], Any]
"""Called with `Steps` within a reduction, and with `Episodes` outside."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A part of a condition.

    Attributes:
        kind: ``"int"``, ``"float"``, ``"bool"``, ``"text"``, or ``"truth"``.
        evaluate: Numbers, texts (`Ragged` or bytes) or a `Truth`. Of steps numbers and
            truths have an axis for components, of size 1 too.
        shape: Of its components; ``()`` of one.
        paths: Fields that it reads.
        dtype: Of a float that is a field's own: written numbers are rounded to it.
        written: A number or text that was written out.
    """

    kind: str
    evaluate: Evaluate
    shape: tuple[int, ...] = ()
    paths: frozenset[str] = frozenset()
    dtype: str = "float64"
    written: Any = None

    @property
    def numeric(self) -> bool:
        """Whether it can be computed with."""
        return self.kind in ("int", "float", "bool")


@dataclass(frozen=True, slots=True)
class Reduction:
    """One value for each episode, of all its steps.

    Attributes:
        name: One of `REDUCTIONS`.
        of: What is reduced; a truth for ``any``, ``all`` and ``count``.
    """

    name: str
    of: Expression


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of a condition: kind, value, and the character that it begins at."""

    kind: str
    value: Any
    at: int


@dataclass(slots=True)
class Condition:
    """A condition that was checked against the fields of a source.

    Attributes:
        text: As it was written.
        reductions: What it needs of the steps.
        facts: Facts that it names.
        paths: Fields that it reads; none where facts other than the return suffice.
        notes: What may surprise its author.
    """

    text: str
    reductions: list[Reduction] = field(default_factory=list)
    facts: set[str] = field(default_factory=set)
    paths: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)
    _evaluate: Evaluate = field(default=lambda rows: rows)

    def holds(self, episodes: Episodes) -> Truth:
        """For which episodes it holds, and for which that is unknown."""
        return cast("Truth", self._evaluate(episodes))


def parse(text: str, fields: Mapping[str, Field], reward: str = "") -> Condition:
    """Read a condition, and check it against the fields that there are.

    Args:
        text: Up to 2,000 characters.
        fields: By path.
        reward: Path of the reward; ``""`` if there is none.

    Raises:
        SchemaError: It is no condition, or does not fit the fields: what is wrong with
            it, and what to write in its place.
    """
    if not isinstance(text, str):
        raise SchemaError(f"where must be a text such as 'length >= 50', got {shown(text)}.")
    condition = Condition(text)
    try:
        _Parser(condition, fields, reward).parse()
    except _Refusal as refusal:
        raise SchemaError(f"where: {refusal}") from None
    return condition


class _Refusal(Exception):
    """Why a text is no condition: a sentence or two."""


def _tokens(text: str) -> list[Token]:
    """Cut a text into its tokens."""
    found, at = [], 0
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            mark = text[at : at + 2] if text[at : at + 2] in MEANT else text[at]
            meant = MEANT.get(mark, "text in quotes, and a field of another name in `backquotes`")
            raise _Refusal(f"character {at + 1}, {mark!r}, is not understood. Write {meant}.")
        kind, raw, at_first = match.lastgroup or "", match[0], at
        at = match.end()
        if kind == "number":
            found.append(Token(kind, _number(raw, text, at_first, at), at_first))
        elif kind == "text":
            found.append(Token(kind, _unescaped(raw[1:-1], at_first), at_first))
        elif kind == "path":
            found.append(Token(kind, raw[1:-1], at_first))
        elif kind == "word" and raw in ("True", "False"):
            found.append(Token("bool", raw == "True", at_first))
        elif kind != "space":
            found.append(Token("sign" if raw in KEYWORDS else kind, raw, at_first))
    return found


def _number(raw: str, text: str, at: int, stop: int) -> int | float:
    if WORD.match(text, stop):
        raise _Refusal(
            f"character {at + 1}: a number and a name touch. Put a space or a sign between them."
        )
    if len(raw) > MAX_DIGITS:
        raise _Refusal(
            f"character {at + 1}: a number has {len(raw)} characters. Write at most {MAX_DIGITS}."
        )
    digits = raw.replace("_", "")
    number = int(digits) if digits.isdigit() else float(digits)
    if (isinstance(number, int) and number >= 1 << 64) or math.isinf(number):
        raise _Refusal(
            f"character {at + 1}: {raw} is too large. Integers are below 2^64, others below 1e308."
        )
    return number


def _unescaped(raw: str, at: int) -> bytes:
    if re.search(r"\\[^\\'\"nt]", raw.replace("\\\\", "")):
        raise _Refusal(
            f"character {at + 1}: a text has an unknown escape. Use \\\\, \\', \\\", \\n or \\t."
        )
    text = re.sub(r"\\(.)", lambda escape: ESCAPES[escape[1]], raw, flags=re.DOTALL)
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _Refusal(
            f"character {at + 1}: a text is not valid Unicode. Write it without surrogates."
        ) from None


class _Parser:
    """Makes a condition of its text."""

    def __init__(self, condition: Condition, fields: Mapping[str, Field], reward: str) -> None:
        self._condition, self._fields, self._reward = condition, fields, reward
        self._inside = False
        self._numbers: dict[tuple[str, str], int] = {}
        # By the number in a placeholder's name.
        self._table: list[Token] = []
        self._placed = ""

    def parse(self) -> None:
        """Fill the condition in."""
        condition = self._condition
        if len(condition.text) > MAX_CHARACTERS:
            raise _Refusal(
                f"it has {len(condition.text):,} characters. Write at most {MAX_CHARACTERS:,}."
            )
        whole = self._made(self._tree())
        if whole.kind not in ("truth", "bool"):
            raise _Refusal(
                f"it is {KINDS.get(whole.kind, 'a number')}, and no condition. "
                "Compare it, as in return > 20."
            )
        condition._evaluate = self._truth(whole)
        if not condition.facts and not condition.reductions:
            raise _Refusal(
                "it names no fact and no field, so it is the same for every episode. "
                f"Facts are {', '.join(FACTS)}."
            )
        paths = {path for each in condition.reductions for path in each.of.paths}
        if "return" in condition.facts:
            paths.add(self._reward)
        condition.paths = tuple(path for path in self._fields if path in paths)
        for name in sorted(condition.facts & set(self._fields) - {"terminated", "truncated"}):
            condition.notes.append(
                f"{name} is the fact of an episode there; the field of that name is "
                f"`{name}` in a reduction"
            )

    def _tree(self) -> ast.expr:
        """Python's tree of the text with placeholders."""
        tokens = _tokens(self._condition.text)
        if not tokens:
            raise _Refusal("it is empty. Write a condition, such as length >= 50.")
        begins = self._replace(tokens)
        try:
            return ast.parse(self._placed.strip(), mode="eval").body
        except SyntaxError as error:
            for token in tokens:
                if token.kind == "word":
                    self._refuse_capitals(token.value)
            before = [n for n, begin in enumerate(begins) if begin < (error.offset or 1)]
            at = tokens[before[-1] if before else 0].at
            raise _Refusal(
                f"it cannot be read from character {at + 1} on, "
                f"{shown(self._condition.text[at:])}. Check the signs and brackets there."
            ) from None
        except (ValueError, RecursionError, MemoryError, OverflowError):
            raise self._too_deep() from None

    def _replace(self, tokens: list[Token]) -> list[int]:
        """Write the text with placeholders for words, numbers and texts.

        Returns:
            Where each token begins in it.
        """
        depth = signs = 0
        begins, numbers = list[int](), dict[tuple[str, type, Any], int]()
        for token in tokens:
            begins.append(len(self._placed))
            signed = token.kind == "sign"
            depth += (signed and token.value in ("(", "[")) - (signed and token.value in (")", "]"))
            signs = signs + 1 if signed and token.value in ("-", "not") else 0
            if max(depth, signs) > MAX_DEPTH:
                raise self._too_deep()
            if signed:
                self._placed += f"{token.value} "
            else:
                # Equal tokens have one name, so that equal reductions are one.
                key = (token.kind, type(token.value), token.value)
                number = numbers.setdefault(key, len(self._table))
                self._placed += f"_{number} "
                if number == len(self._table):
                    self._table.append(token)
        return begins

    def _refuse_capitals(self, word: str) -> None:
        """Refuse ``AND`` as other languages write it."""
        if word.lower() in KEYWORDS and word not in self._fields:
            raise _Refusal(f"{word} is unknown. Write {word.lower()}.")

    def _too_deep(self) -> _Refusal:
        return _Refusal(f"it is nested more than {MAX_DEPTH} deep. Write it with fewer brackets.")

    def _made(self, node: ast.AST, depth: int = 0) -> Expression:
        """The expression of a node of the tree."""
        if depth > MAX_DEPTH:
            raise self._too_deep()
        if isinstance(node, ast.Name):
            return self._named(self._table[int(node.id[1:])])
        if isinstance(node, ast.Subscript):
            return self._component(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._inverted(node.operand, depth)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._negated(node.operand, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            return self._operation(node, depth)
        if isinstance(node, ast.BoolOp):
            return self._joined(node, depth)
        if isinstance(node, ast.Compare):
            if isinstance(node.ops[0], ast.In | ast.NotIn):
                return self._listed(node, depth)
            if all(type(each) in COMPARISONS for each in node.ops):
                return self._chain(node, depth)
        if isinstance(node, ast.Call):
            return self._call(node, depth)
        raise _Refusal(
            f"{self._text(node)} is not understood. There are and, or, not, comparisons, "
            f"in [...], + - * / // %, and {', '.join(REDUCTIONS)}, isnan."
        )

    def _text(self, node: ast.AST) -> str:
        """A part of the condition as it was written, short."""

        def written(match: re.Match[str]) -> str:
            token = self._table[int(match[1])]
            if token.kind == "text":
                return repr(token.value.decode())
            return f"`{token.value}`" if token.kind == "path" else str(token.value)

        placed = ast.get_source_segment(self._placed.strip(), cast("ast.expr", node)) or "?"
        text = re.sub(r"_(\d+)", written, placed)
        text = re.sub(r"(?<=[(\[]) | (?=[)\],])|(?<!in) (?=[(\[])", "", text)
        return text if len(text) <= 60 else f"{text[:57]}..."

    # Names.

    def _named(self, token: Token) -> Expression:
        value: Any = token.value
        if token.kind == "number":
            kind = "int" if isinstance(value, int) else "float"
            return Expression(kind, lambda rows: value, written=value)
        if token.kind in ("bool", "text"):
            return Expression(token.kind, lambda rows: value, written=value)
        if self._inside:
            return self._column(value, quoted=token.kind == "path")
        if token.kind == "word" and value in FACTS:
            return self._fact(value)
        if value in self._fields or token.kind == "path":
            self._column(value, quoted=token.kind == "path")
            raise self._bare(value)
        if value.lower() in ("true", "false", *KEYWORDS):
            meant = value.capitalize() if value.lower() in ("true", "false") else value.lower()
            raise _Refusal(f"{value} is unknown. Did you mean {meant}?")
        if value in (*REDUCTIONS, "isnan"):
            raise _Refusal(f"{value} lacks what it is of. Write {value}(FIELD).")
        near = _near(value, FACTS) or _near(value, self._fields)
        raise _Refusal(
            f"{shown(value)} is unknown.{near} Facts are {', '.join(FACTS)}; fields, within "
            f"{', '.join(REDUCTIONS)}, are {self._names()}."
        )

    def _fact(self, name: str) -> Expression:
        if name == "return":
            reward = self._fields.get(self._reward)
            if reward is None:
                raise _Refusal(
                    "no field has the role of the reward, so there is no return. Write sum(FIELD)."
                )
            if reward.varies or math.prod(reward.shape) != 1:
                raise _Refusal(
                    f"the reward `{self._reward}` is not one number, so there is no return. "
                    f"Write sum(`{self._reward}`[0])."
                )
        self._condition.facts.add(name)
        kind = "float" if name == "return" else "bool" if name in TRUTHS else "int"
        return Expression(kind, lambda rows: rows.fact(name))

    def _column(self, path: str, *, quoted: bool) -> Expression:
        """A field, of which a reduction is asked."""
        field_ = self._fields.get(path)
        if field_ is None:
            inner = [known for known in self._fields if known.startswith(f"{path}/")]
            if inner:
                raise _Refusal(
                    f"{shown(path)} is a group of fields. Name one of them in backquotes, such "
                    f"as `{inner[0]}`."
                )
            if path in FACTS and not quoted:
                raise _Refusal(
                    f"{path} is a fact of an episode, and no field has that name. Write it "
                    "outside of reductions."
                )
            raise _Refusal(
                f"there is no field {shown(path)}.{_near(path, self._fields)} Fields are "
                f"{self._names()}."
            )
        paths = frozenset([path])
        if field_.kind == "text":
            return Expression("text", lambda rows: rows.field(path), paths=paths)
        if field_.varies:
            raise _Refusal(
                f"values of `{path}` have any length, and of those only text can be asked for. "
                "Make a field of numbers of it with --map."
            )
        if not math.prod(field_.shape):
            raise _Refusal(f"`{path}` has no component. Ask for another field.")
        kind = "bool" if field_.dtype == "bool" else "float" if "float" in field_.dtype else "int"
        return Expression(
            kind,
            lambda rows: rows.field(path).reshape(len(rows.field(path)), -1),
            _components(field_.shape),
            paths,
            field_.dtype if kind == "float" else "float64",
        )

    def _names(self) -> str:
        names = [_written(path) for path in list(self._fields)[:NAMES_SHOWN]]
        more = ", ..." if len(self._fields) > NAMES_SHOWN else ""
        return f"{', '.join(names)}{more}"

    def _bare(self, path: str) -> _Refusal:
        """The refusal of a field outside of a reduction, with what may be meant."""
        name, field_ = _written(path), self._fields[path]
        if field_.kind == "text":
            meant = f'start({name}) == "..." or any({name} == "...")'
        elif field_.dtype == "bool":
            meant = f"any({name}), all({name}) or end({name})"
        else:
            at = "" if math.prod(field_.shape) == 1 else "[0]" * len(field_.shape)
            meant = f"mean({name}{at}) > 0 or any({name}{at} > 0)"
        return _Refusal(f"{name} is a field, with a value for each step. Write {meant}.")

    def _component(self, node: ast.Subscript) -> Expression:
        """A component of a field."""
        base: ast.expr = node
        index: list[int] = []
        while isinstance(base, ast.Subscript):
            index.insert(0, self._index(base))
            base = base.value
        token = self._table[int(base.id[1:])] if isinstance(base, ast.Name) else None
        if token is None or token.kind not in ("word", "path") or not self._inside:
            raise _Refusal(
                f"{self._text(node)}: only a field within a reduction has components. Write "
                "it as in mean(x[0])."
            )
        path = token.value
        column, shape = self._column(path, quoted=True), tuple(self._fields[path].shape)
        fits = len(index) <= len(shape) and column.kind != "text"
        fits = fits and all(-n <= i < n for i, n in zip(index, shape, strict=False))
        if not fits:
            raise _Refusal(
                f"{self._text(node)}: `{path}` has no such component, as its shape is "
                f"{list(shape)}. Count them from 0."
            )
        key = (slice(None), *index)
        return replace(
            column,
            evaluate=lambda rows: rows.field(path)[key].reshape(len(rows.field(path)), -1),
            shape=_components(shape[len(index) :]),
        )

    def _index(self, node: ast.Subscript) -> int:
        at, sign = node.slice, 1
        if isinstance(at, ast.UnaryOp) and isinstance(at.op, ast.USub):
            at, sign = at.operand, -1
        token = self._table[int(at.id[1:])] if isinstance(at, ast.Name) else None
        if token is None or token.kind != "number" or not isinstance(token.value, int):
            raise _Refusal(
                f"{self._text(node)}: an index is one integer that is written out. Write x[0], "
                "or x[0][1] of two axes."
            )
        return sign * token.value

    # Numbers.

    def _number(self, node: ast.expr, depth: int) -> Expression:
        made = self._made(node, depth + 1)
        if not made.numeric:
            advice = "Count steps with count(...)." if made.kind == "truth" else "Compare it by ==."
            raise _Refusal(
                f"{self._text(node)} is {KINDS[made.kind]}, where a number is needed. {advice}"
            )
        return made

    def _inverted(self, node: ast.expr, depth: int) -> Expression:
        made = self._made(node, depth + 1)
        truth = self._truth(made, node)
        return replace(made, kind="truth", evaluate=lambda rows: ~truth(rows))

    def _negated(self, node: ast.expr, depth: int) -> Expression:
        made = self._number(node, depth)
        if made.written is not None:
            written = -made.written
            kind = "float" if made.kind == "float" else "int"
            return Expression(kind, lambda rows: written, written=written)
        if made.kind == "float":
            return replace(made, evaluate=lambda rows: -made.evaluate(rows))
        return replace(
            made, kind="int", evaluate=lambda rows: computed(operator.sub, 0, made.evaluate(rows))
        )

    def _operation(self, node: ast.BinOp, depth: int) -> Expression:
        operation = OPERATIONS[type(node.op)]
        left, right = self._number(node.left, depth), self._number(node.right, depth)
        shape = self._one_shape(node, left.shape, right.shape)
        paths = left.paths | right.paths
        if operation in (operator.floordiv, operator.mod):
            divisor = right.written
            if divisor is None or divisor is True or not divisor > 0:
                raise _Refusal(
                    f"{self._text(node)}: the right side must be a number above 0 that is "
                    "written out. Write it as in number % 10."
                )
        if operation is not operator.truediv and "float" not in (left.kind, right.kind):
            return Expression(
                "int",
                lambda rows: computed(operation, left.evaluate(rows), right.evaluate(rows)),
                shape,
                paths,
            )

        def real(rows: Any) -> Any:
            with np.errstate(all="ignore"):
                return operation(as_float64(left.evaluate(rows)), as_float64(right.evaluate(rows)))

        return Expression("float", real, shape, paths)

    def _one_shape(self, node: ast.AST, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        several = [shape for shape in shapes if shape]
        for shape in several:
            if shape != several[0]:
                raise _Refusal(
                    f"{self._text(node)}: one side has the shape {list(several[0])}, the other "
                    f"{list(shape)}. Name components, such as x[0]."
                )
        return several[0] if several else ()

    # Truths.

    def _truth(self, made: Expression, node: ast.AST | None = None) -> Evaluate:
        """The truth of a condition or a bool."""
        if made.kind == "truth":
            return made.evaluate
        if made.kind != "bool":
            what = "it" if node is None else self._text(node)
            advice = f"Write {what} != 0." if made.numeric else "Compare it by ==."
            raise _Refusal(
                f"{what} is {KINDS.get(made.kind, 'a number')}, where a condition is needed. "
                f"{advice}"
            )
        return lambda rows: Truth.of(made.evaluate(rows))

    def _joined(self, node: ast.BoolOp, depth: int) -> Expression:
        parts = [self._made(value, depth + 1) for value in node.values]
        truths = [self._truth(*both) for both in zip(parts, node.values, strict=True)]
        shape = self._one_shape(node, *(part.shape for part in parts))
        join = operator.and_ if isinstance(node.op, ast.And) else operator.or_
        return Expression(
            "truth",
            lambda rows: reduce(join, (truth(rows) for truth in truths)),
            shape,
            frozenset[str]().union(*(part.paths for part in parts)),
        )

    def _chain(self, node: ast.Compare, depth: int) -> Expression:
        """Comparisons one after another; each item is evaluated once."""
        nodes = [node.left, *node.comparators]
        items = [self._made(each, depth + 1) for each in nodes]
        operations = [COMPARISONS[type(each)] for each in node.ops]
        for place, operation in enumerate(operations):
            self._check_pair(node, nodes[place : place + 2], items[place : place + 2], operation)
        shape = self._one_shape(node, *(item.shape for item in items))

        def holds(rows: Any) -> Truth:
            values = [item.evaluate(rows) for item in items]
            pairs = (
                _compare(operation, items[n], values[n], items[n + 1], values[n + 1])
                for n, operation in enumerate(operations)
            )
            return reduce(operator.and_, pairs)

        paths = frozenset[str]().union(*(item.paths for item in items))
        return Expression("truth", holds, shape, paths)

    def _check_pair(
        self,
        node: ast.Compare,
        nodes: Sequence[ast.expr],
        pair: Sequence[Expression],
        operation: Operation,
    ) -> None:
        for each, item in zip(nodes, pair, strict=True):
            if item.kind == "truth":
                raise _Refusal(
                    f"{self._text(each)} is a condition, and is compared with nothing. Write it "
                    f"as it is, or not ({self._text(each)})."
                )
        texts = [item.kind == "text" for item in pair]
        if any(texts) and not all(texts):
            raise _Refusal(
                f"{self._text(node)} compares a text with a number. Put text in quotes, and "
                "numbers without."
            )
        if all(texts) and operation not in (operator.eq, operator.ne):
            raise _Refusal(
                f"{self._text(node)}: texts have no order here. Compare them by ==, != or in."
            )

    def _listed(self, node: ast.Compare, depth: int) -> Expression:
        """A value among written ones."""
        made, box = self._made(node.left, depth + 1), node.comparators[0]
        if len(node.ops) > 1 or not isinstance(box, ast.List | ast.Tuple):
            raise _Refusal(
                f"{self._text(node)}: in needs one list that is written out. Write it as in "
                "env in [0, 2]."
            )
        if not box.elts:
            raise _Refusal(f"{self._text(node)}: the list is empty. Write items into it.")
        if made.kind == "truth":
            raise _Refusal(f"{self._text(node.left)} is a condition. Write it as it is.")
        items: list[Any] = []
        for each in box.elts:
            item = self._made(each, depth + 1)
            if item.written is None:
                raise _Refusal(
                    f"{self._text(each)}: items of a list are numbers, texts, True or False "
                    "that are written out. Use == and or."
                )
            self._check_pair(node, [node.left, each], [made, item], operator.eq)
            narrow = item.kind == "float" and made.dtype != "float64"
            items.append(rounded(item.written, made.dtype) if narrow else item.written)
        negated = isinstance(node.ops[0], ast.NotIn)

        def holds(rows: Any) -> Truth:
            value = made.evaluate(rows)
            if made.kind == "text":
                truth = Truth.of(reduce(operator.or_, (same_text(value, i) for i in items)))
                truth = truth if not made.paths else _by_component(truth)
            else:
                truth = listed(value, items)
            return ~truth if negated else truth

        return Expression("truth", holds, made.shape, made.paths)

    # Reductions.

    def _call(self, node: ast.Call, depth: int) -> Expression:
        token = self._table[int(node.func.id[1:])] if isinstance(node.func, ast.Name) else None
        name = "" if token is None or token.kind != "word" else str(token.value)
        if name not in (*REDUCTIONS, "isnan"):
            self._refuse_capitals(name)
            near = _near(name, (*REDUCTIONS, "isnan")) if name else ""
            raise _Refusal(
                f"{self._text(node)} calls what cannot be called.{near} There are "
                f"{', '.join(REDUCTIONS)} and isnan."
            )
        if len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
            raise _Refusal(f"{self._text(node)}: {name} takes one expression. Write {name}(FIELD).")
        argument = node.args[0]
        if name == "isnan":
            made = self._number(argument, depth)
            return replace(
                made,
                kind="truth",
                evaluate=lambda rows: Truth.of(np.isnan(as_float64(made.evaluate(rows)))),
                written=None,
            )
        if self._inside:
            raise _Refusal(
                f"{self._text(node)} is a reduction within another one. Write one of them."
            )
        self._inside = True
        made = self._made(argument, depth + 1)
        self._inside = False
        if not made.paths:
            raise _Refusal(f"{self._text(node)} names no field. Write a field of each step.")
        return self._reduced(name, made, node, argument)

    def _reduced(
        self, name: str, made: Expression, node: ast.Call, argument: ast.expr
    ) -> Expression:
        kind, dtype = made.kind, made.dtype
        if name in ("any", "all", "count"):
            made = replace(made, kind="truth", evaluate=self._truth(made, argument))
            kind = "int" if name == "count" else "truth"
        elif made.kind == "truth" or (made.kind == "text" and name not in ("start", "end")):
            advice = (
                f"Write {name}(FIELD) > 0, or count({self._text(argument)})."
                if made.kind == "truth"
                else f'Write any({self._text(argument)} == "...").'
            )
            raise _Refusal(
                f"{self._text(node)}: {name} is of numbers, and this is {KINDS[made.kind]}. "
                f"{advice}"
            )
        elif name in ("start", "end"):
            if made.shape:
                component = f"{self._text(argument)}{'[0]' * len(made.shape)}"
                raise _Refusal(
                    f"{self._text(node)} has {math.prod(made.shape)} components. Name one, such "
                    f"as {name}({component})."
                )
        else:
            kind = "float" if name == "mean" else "int" if made.kind == "bool" else made.kind
            dtype = made.dtype if name in ("min", "max") else "float64"
        known = (name, ast.dump(argument))
        number = self._numbers.setdefault(known, len(self._condition.reductions))
        if number == len(self._condition.reductions):
            self._condition.reductions.append(Reduction(name, made))
        return Expression(kind, lambda rows: rows.reduced(number), dtype=dtype)


def _compare(
    operation: Operation, one: Expression, left: Any, other: Expression, right: Any
) -> Truth:
    if one.kind == "text":
        same = same_text(left, right)
        truth = Truth.of(same if operation is operator.eq else ~same)
        return _by_component(truth) if one.paths | other.paths else truth
    if one.kind == other.kind == "float":
        # A written number meets the field's own: 0.1 finds a float32 of 0.1.
        if one.written is not None and other.written is None and other.dtype != "float64":
            left = rounded(left, other.dtype)
        elif other.written is not None and one.written is None and one.dtype != "float64":
            right = rounded(right, one.dtype)
    if one.kind == "bool":
        left = left * 1
    if other.kind == "bool":
        right = right * 1
    return compared(operation, left, right)


def _by_component(truth: Truth) -> Truth:
    """A truth of texts of steps, with the axis that numbers of steps have."""
    return truth if truth.true.ndim == 0 else Truth(truth.true[:, None])


def _components(shape: Sequence[int]) -> tuple[int, ...]:
    return () if math.prod(shape) == 1 else tuple(shape)


def _written(path: str) -> str:
    """A path as a condition writes it."""
    words = (*KEYWORDS, "True", "False")
    return path if WORD.fullmatch(path) and path not in words else f"`{path}`"


def _near(name: str, known: Sequence[str] | Mapping[str, Field]) -> str:
    """``" Did you mean ...?"`` where a name is like a known one."""
    if len(name) > 64:
        return ""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower)[:2000], 1)
    return f" Did you mean {_written(by_lower[near[0]])}?" if near else ""

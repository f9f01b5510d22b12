"""Random conditions, and what they say of episodes, in plain Python.

A condition is written as text and as a tree of tuples: ``("compare", ("<",), (tree,
tree))``. `Writer` makes both at once; `value` walks the tree over lists of numbers.
Nothing here is of the package, nor of numpy: numbers are Python's, and exact.
"""

import math
import random
import struct
from fractions import Fraction

FIELDS = {
    "x": ("float32", ()),
    "y": ("float64", (1,)),
    "obs/v": ("float32", (3,)),
    "m": ("float64", (2, 2)),
    "h": ("float16", ()),
    "b16": ("bfloat16", (2,)),
    "action": ("int64", ()),
    "u": ("uint64", ()),
    "i8": ("int8", (2,)),
    "flag": ("bool", ()),
    "flags": ("bool", (2,)),
    "terminated": ("bool", ()),
    "length": ("int32", ()),
    "reward": ("float32", ()),
    "task": ("text", ()),
    "note with 'q'": ("text", ()),
    "return": ("float64", ()),
    "in": ("uint8", ()),
    "größe": ("int16", ()),
}
"""Dtype and shape by path; some have the names of facts, one that of a keyword."""

TEXTS = ["push", "return home", "a > b", "`x`", "", "größe", "it's", 'say "hi"', "line\nbreak"]
INTEGERS = {
    "action": [-3, -1, 0, 1, 2, 3, 2**53 + 1, 2**53, -(2**63), 2**63 - 1],
    "u": [0, 1, 2, 5, 2**53, 2**53 + 1, 2**63, 2**64 - 1],
    "i8": [-128, -1, 0, 1, 2, 127],
    "length": [0, 1, 5, 9],
    "in": [0, 1, 200, 255],
    "größe": [-32768, 0, 3, 32767],
}
REALS = [0.1, 0.5, -0.25, 1.0, 2.0, 3.0, 0.3, -1.0, 9007199254740992.0]
COMPARISONS = ["<", "<=", ">", ">=", "==", "!="]
FACTS = ["return", "length", "env", "number", "source"]


class BeyondInt64(Exception):
    """An integer that the language refuses."""


def rounded(number, dtype):
    """A number as a dtype holds it; beyond its range as it is."""
    if dtype == "bfloat16":
        return _bfloat16(number)
    code = {"float32": "<f", "float16": "<e"}.get(dtype)
    if code is None:
        return number
    try:
        narrow = struct.unpack(code, struct.pack(code, number))[0]
    except OverflowError:
        return number
    return number if math.isinf(narrow) else narrow


def _bfloat16(number):
    """The nearest of three neighbours; of two as near the even one."""
    if number == 0 or not math.isfinite(number):
        return number
    near = struct.unpack("<I", struct.pack("<f", max(-3.4e38, min(3.4e38, number))))[0] >> 16
    candidates = []
    for bits in (near - 1, near, near + 1):
        each = struct.unpack("<f", struct.pack("<I", (bits & 0xFFFF) << 16))[0]
        if math.isfinite(each):
            candidates.append((abs(Fraction(each) - Fraction(number)), bits & 1, each))
    return min(candidates)[2]


def random_value(rng, path):
    """A value of a field: a list of its components."""
    dtype, shape = FIELDS[path]
    return [_component(rng, path, dtype) for _ in range(math.prod(shape))]


def _component(rng, path, dtype):
    if dtype == "text":
        return rng.choice(TEXTS[:4] if rng.random() < 0.7 else TEXTS)
    if dtype == "bool":
        return rng.random() < 0.5
    if "int" in dtype:
        return rng.choice(INTEGERS[path][:5] if rng.random() < 0.85 else INTEGERS[path])
    number = rng.choice(REALS) if rng.random() < 0.6 else rng.gauss(0, 1)
    if rng.random() < 0.02:
        number = math.nan
    elif rng.random() < 0.004:
        number = rng.choice([math.inf, -math.inf])
    if dtype == "float16" and math.isfinite(number) and abs(number) > 6e4:
        number = 4.0
    return rounded(number, dtype)


class Writer:
    """Writes random conditions of the whole grammar: (text, tree, kind, shape) each."""

    def __init__(self, rng):
        self.rng = rng

    def condition(self, depth=None, inside=False):
        """A condition; inside of a reduction one of steps."""
        rng = self.rng
        depth = rng.choice([1, 2, 2, 3, 4]) if depth is None else depth
        choice = rng.random()
        if depth <= 0 or choice < 0.4:
            return self._compared(depth, inside)
        if choice < 0.5:
            return self._texts(inside)
        if choice < 0.57:
            return self._listed(self.number(1, inside), [self._literal() for _ in range(3)])
        if choice < 0.66:
            if inside:
                return self._field("bool")
            if rng.random() < 0.5:
                fact = rng.choice(["terminated", "truncated", "whole"])
                return fact, ("fact", fact), "bool", ()
        if choice < 0.78 and not inside:
            name = rng.choice(["any", "all"])
            text, tree, _, shape = self._of_steps(lambda: self.condition(depth - 1, True))
            return f"{name}({text})", ("reduce", name, tree, shape), "truth", ()
        if choice < 0.82:
            text, tree, _, shape = self.number(1, inside)
            return f"isnan({text})", ("isnan", tree), "truth", shape
        if choice < 0.9:
            text, tree, _, shape = self.condition(depth - 1, inside)
            if rng.random() < 0.7:
                return f"not ({text})", ("not", tree), "truth", shape
            return f"not not ({text})", ("not", ("not", tree)), "truth", shape
        one, other = self._alike(lambda: self.condition(depth - 1, inside))
        word = rng.choice(["and", "or"])
        shape = one[3] or other[3]
        return f"({one[0]}) {word} ({other[0]})", (word, one[1], other[1]), "truth", shape

    def number(self, depth, inside, *, single=False):
        """A number; of steps, or of an episode."""
        rng = self.rng
        choice = rng.random()
        if depth <= 0 or choice < 0.45:
            if inside:
                if rng.random() < 0.2:
                    return self._literal()
                while True:
                    made = self._field("number")
                    if not single or not made[3]:
                        return made
            if choice < 0.12:
                return self._literal()
            if choice < 0.24:
                fact = rng.choice(FACTS)
                return fact, ("fact", fact), "float" if fact == "return" else "int", ()
            return self._reduced(depth)
        if choice < 0.55:
            text, tree, kind, shape = self.number(depth - 1, inside, single=single)
            return f"-({text})", ("minus", tree), "int" if kind == "bool" else kind, shape
        one = self.number(depth - 1, inside, single=single)
        sign = rng.choice(["+", "-", "*", "/", "%", "//"])
        if sign in ("%", "//"):
            by = rng.choice([2, 3, 2.5, 7])
            other = repr(by), ("number", by), "float" if isinstance(by, float) else "int", ()
        else:
            one, other = self._alike(lambda: self.number(depth - 1, inside, single=single), one)
        real = sign == "/" or "float" in (one[2], other[2])
        text = f"({one[0]}{self._space()}{sign}{self._space()}{other[0]})"
        return text, (sign, one[1], other[1]), "float" if real else "int", one[3] or other[3]

    def _compared(self, depth, inside):
        rng = self.rng
        parts = [self.number(max(depth - 1, 0) if rng.random() < 0.5 else 0, inside)]
        for _ in range(1 if rng.random() < 0.8 else 2):
            shape = next((part[3] for part in parts if part[3]), ())
            while True:
                part = self.number(0 if rng.random() < 0.7 else max(depth - 1, 0), inside)
                if not shape or not part[3] or part[3] == shape:
                    break
            parts.append(part)
        signs = tuple(rng.choice(COMPARISONS) for _ in parts[1:])
        text = parts[0][0]
        for sign, part in zip(signs, parts[1:], strict=True):
            text += f"{self._space()}{sign}{self._space()}{part[0]}"
        shape = next((part[3] for part in parts if part[3]), ())
        return text, ("compare", signs, tuple(part[1] for part in parts)), "truth", shape

    def _texts(self, inside):
        rng = self.rng
        one = self._text(inside)
        if rng.random() < 0.4:
            items = [rng.choice(TEXTS) for _ in range(rng.randint(1, 4))]
            return self._listed(one, [(self._quoted(each), ("text", each)) for each in items])
        if rng.random() < 0.3:
            other = self._text(inside)
        else:
            literal = rng.choice(TEXTS[:5])
            other = (self._quoted(literal), ("text", literal))
        if rng.random() < 0.2:
            one, other = other, one
        sign = rng.choice(["==", "!="])
        text = f"{one[0]}{self._space()}{sign}{self._space()}{other[0]}"
        return text, ("compare", (sign,), (one[1], other[1])), "truth", ()

    def _listed(self, made, items):
        word = self.rng.choice(["in", "not in"])
        text = f"{made[0]} {word} [{', '.join(each[0] for each in items)}]"
        return text, (word, made[1], tuple(each[1] for each in items)), "truth", made[3]

    def _reduced(self, depth):
        name = self.rng.choice(["min", "max", "mean", "sum", "start", "end", "count"])
        edge = name in ("start", "end")
        if name == "count":
            made = self._of_steps(lambda: self.condition(depth - 1, True))
        else:
            made = self._of_steps(lambda: self.number(min(depth - 1, 2), True, single=edge))
        text, tree, kind, shape = made
        kind = {"mean": "float", "count": "int"}.get(name, kind)
        kind = "int" if kind == "bool" and not edge else kind
        space = self._space()
        return f"{name}{space}({space}{text}{space})", ("reduce", name, tree, shape), kind, ()

    def _of_steps(self, make):
        """Something that names a field."""
        while True:
            made = make()
            if "'field'" in repr(made[1]):
                return made

    def _alike(self, make, one=None):
        """Two things whose shapes fit."""
        one = make() if one is None else one
        for _ in range(30):
            other = make()
            if not one[3] or not other[3] or one[3] == other[3]:
                return one, other
        return one, one

    def _field(self, of):
        """A field, or some components of it."""
        rng = self.rng
        paths = [
            path
            for path, (dtype, _) in FIELDS.items()
            if dtype == of or (of == "number" and dtype != "text")
        ]
        path = rng.choice(paths)
        dtype, shape = FIELDS[path]
        text, index = self._name(path), []
        for size in shape[: len(shape) if rng.random() < 0.6 else rng.randint(0, len(shape))]:
            index.append(rng.randint(-size, size - 1))
            text += f"[{index[-1]}]"
        rest = shape[len(index) :]
        kind = dtype if dtype in ("text", "bool") else "float" if "float" in dtype else "int"
        return text, ("field", path, tuple(index)), kind, rest if math.prod(rest) > 1 else ()

    def _text(self, inside):
        text, tree, *_ = self._field("text")
        if inside:
            return text, tree, "text", ()
        name = self.rng.choice(["start", "end"])
        return f"{name}({text})", ("reduce", name, tree, ()), "text", ()

    def _literal(self):
        rng = self.rng
        if rng.random() < 0.5:
            small = rng.random() < 0.85
            number = rng.choice([0, 1, 2, 3, 5, 10] if small else [2**53 + 1, 2**63, 2**64 - 1])
            kind = "int"
        else:
            number = rng.choice([*map(abs, REALS), 1e5, 1e-3])
            kind = "float"
        if rng.random() < 0.25:
            return f"-{number!r}", ("minus", ("number", number)), kind, ()
        return repr(number), ("number", number), kind, ()

    def _quoted(self, text):
        mark = self.rng.choice("'\"")
        text = text.replace("\\", "\\\\").replace(mark, f"\\{mark}")
        if self.rng.random() < 0.5:
            text = text.replace("\n", "\\n")
        return f"{mark}{text}{mark}"

    def _name(self, path):
        bare = path.isidentifier() and path != "in" and self.rng.random() < 0.8
        return path if bare else f"`{path}`"

    def _space(self):
        return self.rng.choice(["", " ", " ", "  "])


def value(tree, episode, step=None, component=0):
    """What a tree is worth: a number, a text, a bool, or None for unknown.

    Args:
        tree: Of a `Writer`.
        episode: Facts by name, and ``steps``.
        step: Values by path, of one step.
        component: Which one of those that take part.
    """
    kind, *rest = tree
    if kind in ("number", "text"):
        return rest[0]
    if kind == "fact":
        return episode[rest[0]]
    if kind == "field":
        path, index = rest
        size, at = math.prod(FIELDS[path][1]), 0
        for each, axis in zip(index, FIELDS[path][1], strict=False):
            size //= axis
            at += each % axis * size
        return step[path][at + (component if size > 1 else 0)]
    if kind == "reduce":
        return _reduce(*rest, episode)
    if kind in ("compare", "in", "not in"):
        left = rest[0] if kind != "compare" else None
        if left is not None:
            found = value(left, episode, step, component)
            if isinstance(found, float) and math.isnan(found):
                return None
            among = any(
                _compare("==", found, value(item, episode, step, component), left, item)
                for item in rest[1]
            )
            return among == (kind == "in")
        signs, items = rest
        values = [value(item, episode, step, component) for item in items]
        pairs = [
            _compare(sign, *values[n : n + 2], *items[n : n + 2]) for n, sign in enumerate(signs)
        ]
        return _all(pairs)
    values = [value(each, episode, step, component) for each in rest]
    if kind == "isnan":
        return isinstance(values[0], float) and math.isnan(values[0])
    if kind == "not":
        return None if values[0] is None else not values[0]
    if kind == "and":
        return _all(values)
    if kind == "or":
        return _any(values)
    if kind == "minus":
        return -values[0] if _written(rest[0]) else _fit(-_fit(values[0]))
    return _operation(kind, *values)


def _all(truths):
    if any(truth is not None and not truth for truth in truths):
        return False
    return None if None in truths else True


def _any(truths):
    if any(truths):
        return True
    return None if None in truths else False


def _written(tree):
    return tree[0] == "number" or (tree[0] == "minus" and _written(tree[1]))


def _fit(number):
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise BeyondInt64
    return number


def _operation(sign, one, other):
    one, other = (int(each) if isinstance(each, bool) else each for each in (one, other))
    if sign == "/":
        one, other = float(one), float(other)
        if other and not math.isnan(other):
            return one / other
        if one == 0 or math.isnan(one) or math.isnan(other):
            return math.nan
        return math.copysign(math.inf, one) * math.copysign(1, other)
    if isinstance(one, float) or isinstance(other, float):
        one, other = float(one), float(other)
        if sign in ("%", "//") and math.isinf(one):
            return math.nan
    _fit(one)
    _fit(other)
    if sign in ("%", "//"):
        return one % other if sign == "%" else one // other
    return _fit(one + other if sign == "+" else one - other if sign == "-" else one * other)


def _reduce(name, tree, shape, episode):
    steps = episode["steps"]
    values = [
        value(tree, episode, step, component)
        for step in steps
        for component in range(math.prod(shape))
    ]
    if name in ("start", "end"):
        return values[0 if name == "start" else -1]
    if name == "any":
        return _any(values)
    if name == "all":
        return _all(values)
    if name == "count":
        return sum(1 for each in values if each)
    values = [int(each) if isinstance(each, bool) else each for each in values]
    if name in ("min", "max"):
        if any(isinstance(each, float) and math.isnan(each) for each in values):
            return math.nan
        return min(values) if name == "min" else max(values)
    total = 0.0 if isinstance(values[0], float) else 0
    for each in values:
        total += each
    if name == "mean":
        return float(total) / len(values)
    for each in values:
        _fit(each)
    return _fit(total)


def _compare(sign, one, other, left, right):
    """Compare two values; their trees say whether a written one is rounded."""
    if isinstance(one, str):
        return (one == other) == (sign == "==")
    if any(isinstance(each, float) and math.isnan(each) for each in (one, other)):
        return None
    narrow = ("float16", "bfloat16", "float32")
    if _written_real(left) and _dtype(right) in narrow:
        one = rounded(one, _dtype(right))
    elif _written_real(right) and _dtype(left) in narrow:
        other = rounded(other, _dtype(left))
    one, other = (
        (1 if each > 0 else -1, 0) if each in (math.inf, -math.inf) else (0, Fraction(each))
        for each in (one, other)
    )
    return {
        "<": one < other,
        "<=": one <= other,
        ">": one > other,
        ">=": one >= other,
        "==": one == other,
        "!=": one != other,
    }[sign]


def _written_real(tree):
    return _written(tree) and isinstance(
        tree[-1] if tree[0] == "number" else value(tree, {}), float
    )


def _dtype(tree):
    """Of a field's own numbers; of others None."""
    if tree[0] == "field":
        return FIELDS[tree[1]][0]
    if tree[0] == "minus":
        return _dtype(tree[1])
    if tree[0] == "reduce" and tree[1] in ("min", "max", "start", "end"):
        return _dtype(tree[2])
    return None


def facts_of(steps, *, env, terminated, truncated, begun):
    """The facts of an episode."""
    total = 0.0
    for step in steps:
        total += step["reward"][0]
    return {
        "steps": steps,
        "length": len(steps),
        "env": env,
        "source": 0,
        "terminated": terminated,
        "truncated": truncated,
        "whole": begun and (terminated or truncated),
        "return": total,
    }


def random_rows(rng):
    """Rows with flags of some environments, and the episodes that they are.

    Returns:
        For each environment (values by path, flags) of each row, oldest first; and the
        facts of the episodes in the order of their numbers.
    """
    start, terminated, truncated, final, broken, cut = 1, 2, 4, 8, 16, 32
    envs, episodes = [], []
    for env in range(rng.randint(1, 3)):
        rows, after_cut = [], False
        count = rng.randint(2, 7)
        for number in range(count):
            begun = number > 0 or rng.random() < 0.7
            if not begun and rng.random() < 0.3:
                # The final row of an episode that is gone.
                rows.append((_row(rng), final))
                begun = True
            steps = [_row(rng) for _ in range(rng.choice([1, 1, 2, 3, 5, 8]))]
            end = rng.choice([terminated, truncated, terminated | truncated, 0, cut])
            flags = [0] * len(steps)
            flags[0] |= start * begun | (broken | cut) * after_cut
            flags[-1] |= end & ~cut
            rows += zip(steps, flags, strict=True)
            if end in (terminated, truncated) and rng.random() < 0.4:
                rows.append((_row(rng), final))
            # Only a row after it can say that an episode was cut.
            after_cut = end == cut and number < count - 1
            episodes.append(
                facts_of(
                    steps,
                    env=env,
                    terminated=bool(end & terminated),
                    truncated=bool(end & truncated) or after_cut,
                    begun=begun,
                )
            )
        envs.append(rows)
    for number, episode in enumerate(episodes):
        episode["number"] = number
    return envs, episodes


def episodes_of(rows, env):
    """The episodes of an environment's rows, as a ring holds them.

    Args:
        rows: (number, values by path, flags) of each, oldest first.
        env: The environment.

    Returns:
        (numbers of the rows, facts) of each episode.
    """
    start, terminated, truncated, final, cut = 1, 2, 4, 8, 32
    groups = []
    for number, values, flags in rows:
        if flags & start or not groups:
            groups.append([])
        groups[-1].append((number, values, flags))
    found = []
    for at, group in enumerate(groups):
        steps = [values for _, values, flags in group if not flags & final]
        if not steps:
            continue
        every = 0
        for _, _, flags in group:
            every |= flags
        follows = groups[at + 1][0][2] if at + 1 < len(groups) else 0
        facts = facts_of(
            steps,
            env=env,
            terminated=bool(every & terminated),
            truncated=bool(every & truncated or follows & cut),
            begun=bool(group[0][2] & start),
        )
        found.append(([number for number, _, _ in group], facts))
    return found


def _row(rng):
    return {path: random_value(rng, path) for path in FIELDS}


def random_order(rng, envs):
    """(environment, row) of all rows, environments mixed, in blocks of random sizes."""
    at, order = [0] * len(envs), []
    mixed = rng.random() < 0.6
    while open_envs := [env for env, rows in enumerate(envs) if at[env] < len(rows)]:
        env = rng.choice(open_envs) if mixed else open_envs[0]
        for _ in range(min(rng.choice([1, 1, 2, 7]), len(envs[env]) - at[env])):
            order.append((env, at[env]))
            at[env] += 1
    blocks = []
    while order:
        size = rng.choice([1, 2, 5, 11, 100])
        blocks.append(order[:size])
        order = order[size:]
    return blocks


def random_condition(rng):
    """Text and tree of a condition that names a fact or a field."""
    while True:
        text, tree, *_ = Writer(rng).condition()
        if len(text) <= 2000 and any(word in repr(tree) for word in ("'fact'", "'field'")):
            return text, tree


def make(seed):
    """A random number generator, equal for equal seeds."""
    return random.Random(seed)

"""Names in the code that are to be replaced by plain ones.

Prints every class, function, method, module, parameter and attribute whose name is an
old name of `RENAMED`, or has one of the words of `AMBIGUOUS` in it. Words of a name
are what underscores and capitals separate: ``_told_of`` and ``ToldOf`` both have the
word ``told``, ``placement`` does not have the word ``place``. Names are found by the
syntax tree where they are defined, so what another library calls something is found
only where it is given a name here. A plural is the same word. Names of JSON keys, of
files on disk and terms of the format stand in `EXCEPTIONS`, each with its reason.

Each name is listed once, under the first rule that it breaks, in the order of the
tables. Names of tests are sentences: they count as a kind of their own, ``claim``.

    python -m tools.words              # each name: file, line, kind, old and new
    python -m tools.words --count      # how many, by folder and kind
    python -m tools.words --locals     # local variables too
    python -m tools.words mmreplay     # in one folder of the repository
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("mmreplay", "tools", "tests")
KINDS = ("class", "function", "method", "module", "parameter", "attribute", "claim", "local")
CLASS = frozenset({"class"})
MODULE = frozenset({"module", "function", "method"})
"""Of short old names of modules, which say something else as a parameter."""

ANYWHERE = ("*",)
ZARR = ("mmreplay/storage/zarr/*", "mmreplay/zarr_groups/arrays.py")
"""Where rows wait to be sealed; elsewhere a tail is a term of the format."""

EPISODES = ("mmreplay/episodes/*", "mmreplay/samplers/*", "mmreplay/stats*", "mmreplay/buffer/*")
"""Where it is an episode that runs."""

COMMIT = ("mmreplay/format/*", "mmreplay/storage/*", "mmreplay/episodes/*", "mmreplay/samplers/*")
"""Where numbers of COMMIT are named as docs/format.md names them."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An old name.

    Attributes:
        old: The name, in words that underscores separate.
        new: What takes its place.
        within: Whether longer names that have these words break the rule too.
        kinds: What it names; empty for everything.
        where: Patterns of the paths in which it is to go.
    """

    old: str
    new: str
    within: bool = True
    kinds: frozenset[str] = frozenset()
    where: tuple[str, ...] = ANYWHERE

    def broken_by(self, name: Name) -> bool:
        """Whether a name has to be replaced."""
        if self.kinds and name.kind not in self.kinds:
            return False
        if self.where != ANYWHERE and not any(fnmatch(name.path, w) for w in self.where):
            return False
        words, old = words_of(name.name), words_of(self.old)
        if not self.within:
            return same(words, old)
        starts = range(len(words) - len(old) + 1)
        return any(same(words[n : n + len(old)], old) for n in starts)


@dataclass(frozen=True, slots=True)
class Name:
    """A name, where it is defined.

    Attributes:
        name: As it is written.
        kind: One of `KINDS`.
        path: Of the file, from the root of the repository.
        line: Its number.
    """

    name: str
    kind: str
    path: str
    line: int


@cache
def words_of(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return tuple(part.lower() for part in parts)


def same(words: Sequence[str], old: Sequence[str]) -> bool:
    """Whether words are the old ones, the last of them perhaps in the plural."""
    *former, last = old
    return len(words) == len(old) and [*words[:-1]] == former and words[-1] in forms_of(last)


def forms_of(word: str) -> set[str]:
    """A word and its plurals."""
    return {word} if word in VERBS else {word, f"{word}s", f"{word}es"}


VERBS = {"follow", "hold", "know", "set", "tell", "then"}
"""Whose form with an s is no plural: ``holds`` says something, ``hold`` does not."""


def _classes(*pairs: tuple[str, str]) -> list[Rule]:
    """Names that are ordinary words unless a class has them."""
    return [Rule(old, new, within=False, kinds=CLASS) for old, new in pairs]


def _exactly(*pairs: tuple[str, str]) -> list[Rule]:
    """Whole names only: longer ones with the word may say what they mean."""
    return [Rule(old, new, within=False) for old, new in pairs]


def _within(*pairs: tuple[str, str]) -> list[Rule]:
    return [Rule(old, new) for old, new in pairs]


RENAMED: list[Rule] = [
    # Elsewhere the tail of a ring, and the tails of all its environments, are terms of
    # the format.
    Rule("tail", "staging rows", where=ZARR),
    *_within(
        ("Inlet", "MappedWriter"),
        ("Lane", "FastAppend"),
        ("lease", "reserve"),
        ("Passing", "BlockChecksums"),
        ("Asking", "ReadAheadBudget"),
        ("Recycler", "BufferPool"),
        ("Ledger", "CommitState"),
        ("Book", "CommitState"),
        ("Taking", "copy, select"),
        ("taken", "copy, select"),
        ("Judge", "StartTable"),
        ("Marker", "EpisodeFlags"),
        ("Intake", "StepValidator"),
        ("in_force", "current generation"),
        ("know", "set_published"),
        ("catch_up", "recover_interrupted"),
        ("Law", "PriorityDistribution, StartTable"),
        ("Extremes", "RunningMaximum"),
        ("DealtReader", "InterleavedReader"),
        ("DealtStream", "InterleavedStream"),
        ("dealt", "interleaved"),
        ("Laying", "DirectWriter"),
        ("Stretch", "Fragment"),
        ("arrivals", "shifted rows"),
        ("mending", "repair"),
        ("evidence", "scan"),
        ("lenient", "tolerant"),
        ("headless", "missing_start"),
        ("given_up", "durable_limits"),
        ("owed", "commit_overdue"),
        ("touched", "rows_modified"),
        ("nexts", "next_obs"),
        ("AsideError", "ShardError"),
        ("Sooner", "CopyTuner"),
        ("disown", "distrust_page_cache"),
        ("beside", "run_both"),
        ("torn", "update_interrupted"),
        ("at_hand", "from_mapped_records"),
        ("lockstep", "common_head"),
        ("calm", "no_boundary"),
        ("adopt", "start_from"),
        ("grain", "limit_step"),
        ("ShrinkingSampler", "EmphasizeRecentSampler"),
    ),
    Rule("Places", "ShardStates, shard index", False, where=ZARR),
    Rule("Kept", "ChunkCache", False, where=("mmreplay/storage/*",)),
    Rule("Kept", "SurvivingRows", False, where=("mmreplay/repairing/*",)),
    Rule("Kept", "PickledByPath", False, where=("mmreplay/adapters/*",)),
    Rule("Home", "BufferLocation", False, where=("mmreplay/adapters/*",)),
    Rule("Home", "BufferIdentity", False, CLASS),
    # Of the histogram of `stats` edges are a term.
    Rule("Edges", "PartialPageFiller", False, where=("mmreplay/storage/*",)),
    *_classes(
        ("Powers", "PriorityDistribution"),
        ("Parts", "OpenFiles"),
        ("GroupParts", "OpenFiles"),
        ("Moment", "LimitsBefore"),
        ("Runs", "EnvironmentQueues"),
        ("Queues", "EnvironmentQueues"),
        ("Order", "PendingBatch"),
        ("Drawn", "PendingDraw"),
        ("Space", "SpaceReservation"),
        ("Inner", "StepSource"),
        ("Shape", "WindowShape"),
        ("Frozen", "EpochSnapshot"),
    ),
    Rule("Column", "PriorityFile", False, CLASS, ("mmreplay/samplers/*",)),
    Rule("DiskColumn", "PriorityFile", False, CLASS),
    Rule("Entry", "PendingBatch", False, CLASS, ("mmreplay/loader/*",)),
    Rule("Choice", "EpisodeFilter", False, CLASS, ("mmreplay/samplers/*",)),
    # What the loader's orders and entries were called where they are held.
    Rule("order", "pending batch", False, where=("mmreplay/loader/*",)),
    Rule("entry", "pending batch", False, where=("mmreplay/loader/*",)),
    *_exactly(
        ("Hold", "before_overwrite"),
        ("Gone", "ClosedStore"),
        ("Fold", "BatchTransform"),
        ("fold_of", "BatchTransform"),
        ("Pace", "LearnerTiming"),
        ("Anchors", "BaseSteps"),
        ("early", "prefetched, refill_at"),
        ("between", "paths"),
        ("least", "minimum"),
        ("most", "maximum"),
        ("whole", "integer"),
        ("boot", "boot_id"),
        ("mounts", "filesystem"),
        ("ram", "available_memory"),
        ("positioned", "seekable"),
        ("tell", "notify"),
        ("found", "result"),
        ("given", "columns"),
        ("each", "item"),
        ("held", "owned_by_thread"),
        ("follow", "continue_from"),
    ),
    # Of an episode; threads and processes run, too.
    Rule("running", "unfinished", False, where=EPISODES),
    Rule("sizes", "format_size", False, MODULE),
    Rule("sums", "checksums", False, MODULE),
    Rule("collect", "recording", False, frozenset({"module"})),
    Rule("speed", "bench", False, frozenset({"module"})),
    # Public names.
    Rule("set", "write_field", False, where=("mmreplay/buffer/*",)),
    Rule("user", "user_metadata", False, where=("mmreplay/*",)),
    Rule("then", "on_timeout", False, where=("mmreplay/limiter/*",)),
    Rule("Cut", "DroppedRows", False, CLASS),
    Rule("Repaired", "RepairReport", False, CLASS),
    Rule("Compacted", "CompactReport", False, CLASS),
    Rule("Recorded", "RecordReport", False, CLASS),
    Rule("Memory", "MemoryUsage", False, CLASS, ("mmreplay/storage/*",)),
]
"""Old names and what takes their place."""

AMBIGUOUS = _within(
    ("place", "row, slot, position, location"),
    ("room", "disk space, free rows, capacity"),
    ("law", "distribution, table, bound"),
    ("moment", "time, limits before"),
    ("cut", "dropped, truncated, end_episodes"),
    ("told", "message, reported"),
    ("kept", "cached, surviving, retained"),
    ("lane", "fast append"),
    ("home", "identity, location"),
    ("part", "component, section, share"),
    ("piece", "chunk, span, slice"),
)
"""Words that mean several things."""


@dataclass(frozen=True, slots=True)
class Exempt:
    """A name that stays.

    Attributes:
        old: The rule that it breaks.
        name: Pattern of the name, underscores in front left out.
        where: Patterns of the paths.
        reason: Why it stays.
    """

    old: str
    name: str
    where: tuple[str, ...]
    reason: str


SERVERS = (
    *("mmreplay/ray/*", "mmreplay/format/ray_files.py", "mmreplay/verify/check.py"),
    *("tests/on_ray/*", "tests/format/test_ray_files.py", "tools/torture/*"),
)
EXCEPTIONS = [
    Exempt("marker", "*_marker*", ("tests/*slices.py",), "methods of pytest.Item"),
    Exempt("tail", "*tails", ANYWHERE, "tails of a ring, a term of the format"),
    Exempt("cut", "CUT", ANYWHERE, "a flag of the format"),
    Exempt("lease", "*[lL]ease*", SERVERS, "a key of writers.json"),
    Exempt(
        "lease",
        "*[lL]ease*",
        ("mmreplay/samplers/uses.py", "tests/samplers/test_uses*"),
        "UseCounter(lease_s=), public: rows that wait to be acknowledged",
    ),
    Exempt("lane", "*[lL]ane*", SERVERS, "an environment of a thin writer"),
    Exempt("cut", "cuts", COMMIT, "a column of COMMIT"),
    Exempt("cut", "cut_epoch", COMMIT, "a number of COMMIT and STATE"),
    Exempt("cut", "*cut_rows", ANYWHERE, "a JSON key of info and repair"),
    Exempt("given_up", "given_up_rows", ANYWHERE, "a JSON key of info"),
    Exempt("user", "user", ("mmreplay/format/*",), "Metadata.user: the JSON key"),
    Exempt("moment", "*[Mm]oments*", ANYWHERE, "mean and variance: mmreplay.Moments"),
    Exempt("cut", "*power_cut*", ANYWHERE, "a power cut: a term of the glossary"),
    Exempt("cut", "*PowerCut*", ANYWHERE, "a power cut: a term of the glossary"),
    Exempt("cut", "*cut_flag*", ANYWHERE, "a flag of the format"),
    Exempt("place", "*in_place*", ANYWHERE, "an option of the command line"),
    Exempt("whole", "whole", ("mmreplay/stats.py",), "EpisodeTable.whole: public"),
    Exempt("part", "Part", ("mmreplay/splitting*",), "public: what split returns"),
    Exempt(
        "part",
        "*part*",
        ("tests/test_splitting.py", "tests/frozen/*"),
        "public: what split returns",
    ),
    Exempt("part", "parts", ("mmreplay/samplers/*",), "Sampler.parts, of the protocol"),
    Exempt("part", "*part*", ("tests/samplers/*",), "Sampler.parts, of the protocol"),
    Exempt(
        "part",
        "*part*",
        ("tests/convert/test_safetensors*", "tests/convert/test_parquet*"),
        "files of an export in parts: part_bytes and mmreplay.part",
    ),
    Exempt("part", "part", ("mmreplay/episodes/starts.py",), "SubsetStarts(base, part)"),
    Exempt(
        "home",
        "home",
        (
            "mmreplay/episodes/*",
            "mmreplay/samplers/*",
            "mmreplay/buffer/*",
            "tests/contracts/sampler.py",
            "tests/samplers/moving.py",
            "tools/bench/simulated.py",
        ),
        "StartView.home, of the documented view",
    ),
    Exempt("follow", "follow", ("mmreplay/samplers/prior*",), "PriorityStore.follow(view)"),
    Exempt(
        "home",
        "home",
        ("mmreplay/adapters/*",),
        "in pickles of memories; public, and the pickles of tests/frozen have it",
    ),
    Exempt(
        "home",
        "home",
        ("mmreplay/convert/registry.py",),
        "Format.home, which entry points of other packages pass",
    ),
    Exempt(
        "user",
        "user",
        ("mmreplay/convert/description.py",),
        "Description.user, for writers of formats; the JSON key",
    ),
    Exempt("between", "between", ("mmreplay/convert/base.py",), "deprecated: Block.rows"),
    Exempt("taken", "taken", ("mmreplay/convert/base.py",), "deprecated: Block.select"),
    Exempt("tell", "tell", ("mmreplay/convert/parquet.py",), "a file to pyarrow"),
    Exempt(
        "part", "part_bytes", ("mmreplay/convert/safetensors.py",), "public: an option of export"
    ),
    Exempt("held", "held", ("mmreplay/recording/*",), "RecordReport.held, public and a JSON key"),
    Exempt("held", "held", ("mmreplay/adapters/tmrl/*",), "in pickles of memories"),
    Exempt(
        "held",
        "held",
        ("mmreplay/adapters/common/*", "mmreplay/adapters/skrl/*"),
        "a public attribute of memories that tests/frozen records",
    ),
    Exempt(
        "found", "found", ("mmreplay/convert/registry.py",), "a parameter of its public functions"
    ),
    Exempt("cut", "cut_at", ("mmreplay/adapters/pytorchrl/*",), "in pickles of storages"),
    Exempt("cut", "cuts", ("mmreplay/repairing/*",), "RepairReport.cuts, public and a JSON key"),
    Exempt("cut", "cut_epoch", ANYWHERE, "a field of COMMIT and of STATE"),
    Exempt("cut", "cuts", ("mmreplay/episodes/starts.py",), "a field of COMMIT"),
    Exempt("taken", "taken", ("mmreplay/samplers/base.py",), "public: Draw.taken"),
    Exempt("place", "places", ("mmreplay/samplers/base.py",), "public: Draw.taken(places)"),
    Exempt("given", "given", ("mmreplay/samplers/random.py",), "in pickles"),
    Exempt(
        "headless",
        "headless",
        (
            "mmreplay/episodes/*",
            "mmreplay/samplers/episode.py",
            "mmreplay/stats.py",
            "tests/combinations/twin.py",
        ),
        "public: EpisodeTable.headless, EpisodeSampler(headless=)",
    ),
    Exempt(
        "running",
        "running",
        ("mmreplay/episodes/*", "mmreplay/samplers/episode.py", "mmreplay/stats.py"),
        "public: EpisodeTable.running, EpisodeSampler(running=)",
    ),
    Exempt("each", "each", ("mmreplay/concatenation.py",), "public: Concat.each"),
    Exempt("least", "least", ("mmreplay/samplers/episode.py",), "return_within(least)"),
    Exempt("most", "most", ("mmreplay/samplers/episode.py",), "return_within(most)"),
    Exempt(
        "sizes", "sizes", ("mmreplay/buffer/*", "mmreplay/episodes/*"), "public: ReplayBuffer.sizes"
    ),
]
"""Names that stay, and why."""


def names_in(path: Path, local: bool = False) -> Iterator[Name]:
    """Names that a Python file defines, its own among them."""
    shown = path.relative_to(ROOT).as_posix()
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    kind = "claim" if stem.startswith("test_") else "module"
    yield Name(stem, kind, shown, 1)
    if path.suffix == ".py":
        tree = ast.parse(path.read_text("utf-8"), str(path))
        yield from _Finder(shown, local).names_of(tree)


class _Finder(ast.NodeVisitor):
    """Collects the names of one file."""

    def __init__(self, path: str, local: bool) -> None:
        self._path, self._local = path, local
        self._names: list[Name] = []
        self._scopes: list[ast.AST] = []
        self._attributes: set[str] = set()
        self._globals: set[str] = set()

    def names_of(self, tree: ast.Module) -> list[Name]:
        self._scopes.append(tree)
        self.generic_visit(tree)
        return self._names

    def _add(self, name: str, kind: str, line: int) -> None:
        self._names.append(Name(name, kind, self._path, line))

    def _attribute(self, name: str, line: int) -> None:
        # An attribute that is set in several methods is one name of the file.
        if name not in self._attributes:
            self._attributes.add(name)
            self._add(name, "attribute", line)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._add(node.name, "class", node.lineno)
        self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if isinstance(self._scopes[-1], ast.ClassDef):
            # A class that has both is a file to other libraries.
            if node.name != "tell" or not any(
                isinstance(n, ast.FunctionDef) and n.name == "seek"
                for n in ast.walk(self._scopes[-1])
            ):
                kind = "claim" if node.name.startswith("test_") else "method"
                self._add(node.name, kind, node.lineno)
        else:
            kind = "claim" if node.name.startswith("test_") else "function"
            self._add(node.name, kind, node.lineno)
        self._inside(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._inside(node)

    def _inside(self, node: ast.AST) -> None:
        self._scopes.append(node)
        self.generic_visit(node)
        self._scopes.pop()

    def visit_arg(self, node: ast.arg) -> None:
        self._add(node.arg, "parameter", node.lineno)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        # `self.name = ...`; what is set on another object is named by its class.
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if isinstance(node.ctx, ast.Store) and owner in ("self", "cls"):
            self._attribute(node.attr, node.lineno)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Store):
            return
        if isinstance(self._scopes[-1], (ast.Module, ast.ClassDef)):
            self._attribute(node.id, node.lineno)
        elif self._local:
            self._add(node.id, "local", node.lineno)

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if "__slots__" in targets:
            for inner in ast.walk(node.value):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    self._attribute(inner.value, inner.lineno)
        self.generic_visit(node)

    def visit_ListComp(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    ) -> None:
        self._inside(node)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp


@cache
def rules_by_last_word() -> dict[str, set[int]]:
    """Numbers of the rules that a name with a word may break."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for number, rule in enumerate((*RENAMED, *AMBIGUOUS)):
        for word in forms_of(words_of(rule.old)[-1]):
            found[word].add(number)
    return found


def rule_of(name: Name) -> Rule | None:
    """The first rule that a name breaks, unless it is an exception."""
    rules, by_word = (*RENAMED, *AMBIGUOUS), rules_by_last_word()
    for number in sorted(set().union(*(by_word.get(word, ()) for word in words_of(name.name)))):
        rule = rules[number]
        if rule.broken_by(name):
            exempt = any(
                e.old == rule.old.lower()
                and fnmatch(name.name.lstrip("_"), e.name)
                and any(fnmatch(name.path, pattern) for pattern in e.where)
                for e in EXCEPTIONS
            )
            if not exempt:
                return rule
    return None


def sources(folders: Iterable[str]) -> Iterator[Path]:
    """Python and C files of folders, in order."""
    for folder in folders:
        for suffix in ("py", "c", "h"):
            yield from sorted((ROOT / folder).rglob(f"*.{suffix}"))


def search(folders: Iterable[str] = FOLDERS, local: bool = False) -> list[tuple[Name, Rule]]:
    """All names that are to be replaced, and the rules that they break."""
    return [
        (name, rule)
        for path in sources(folders)
        for name in names_in(path, local)
        if (rule := rule_of(name)) is not None
    ]


def listing(names: Sequence[tuple[Name, Rule]]) -> list[str]:
    """Lines of all names, grouped by rule, those that most names break first."""
    groups: dict[tuple[str, str], list[Name]] = defaultdict(list)
    for name, rule in names:
        groups[rule.old, rule.new].append(name)
    lines = []
    for (old, new), group in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0])):
        lines += ["", f"{old} -> {new}: {len(group)}"]
        lines += [f"  {n.path}:{n.line} {n.kind} {n.name}" for n in group]
    return lines[1:]


def totals(names: Sequence[tuple[Name, Rule]]) -> list[str]:
    """Lines of the table of folders and kinds."""
    counts: Counter[tuple[str, str]] = Counter()
    for name, _ in names:
        top, *rest = name.path.split("/")
        folders = [top, f"{top}/{rest[0]}" if len(rest) > 1 else f"{top}/*"]
        for folder in folders:
            counts[folder, name.kind] += 1
            counts[folder, "all"] += 1
    kinds = [k for k in (*KINDS, "all") if any(kind == k for _, kind in counts)]
    rows = [
        (folder, *(str(counts[folder, kind] or "") for kind in kinds))
        for folder in sorted({folder for folder, _ in counts})
    ]
    rows.insert(0, ("folder", *kinds))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def main() -> int:
    """Print what was asked for; never fail."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", default=FOLDERS, help="of the repository")
    parser.add_argument("--count", action="store_true", help="totals by folder")
    parser.add_argument("--locals", action="store_true", help="local variables too")
    options = parser.parse_args()
    names = search(options.folders, options.locals)
    print("\n".join(totals(names) if options.count else listing(names)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

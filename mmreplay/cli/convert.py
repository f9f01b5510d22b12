"""``mmreplay convert``: a buffer to a file, a file to a buffer, a file to a file."""

from __future__ import annotations

import json as json_text
import os
import re
import typing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmreplay.cli import show
from mmreplay.cli.exits import InterruptedRun
from mmreplay.cli.options import (
    CodecName,
    EngineName,
    Envs,
    Json,
    check_choice,
    heap_bytes_option,
    load_function,
    parse_count,
    parse_path,
    usage_error,
)
from mmreplay.errors import FailedError, FormatError
from mmreplay.format.metadata import ON_DISK
from mmreplay.format.sharding import CODECS

if TYPE_CHECKING:
    from mmreplay.convert.base import Report, Writer
    from mmreplay.convert.by_episode import SkipReward as Rewards
    from mmreplay.convert.description import Description
    from mmreplay.convert.joined import Envs as JoinEnvs
    from mmreplay.convert.mapped import Changes
    from mmreplay.convert.registry import Format
    from mmreplay.convert.select import Origin, Selected
    from mmreplay.convert.transfer import Conversion

MAX_LIST_NBYTES = 1 << 30
"""Of a file with numbers of episodes."""
PYTHON: dict[str, object] = {"True": True, "False": False, "None": None}
"""Values that Python and JSON spell in two ways."""


def parse_share(argument: object) -> float:
    """Read a number that may be a share, such as ``0.1``; no percents."""
    text = str(argument)
    try:
        return float(text)
    except ValueError:
        pass
    if match := re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*", text):
        raise typer.BadParameter(f"must be a number, got {text!r}. Pass {float(match[1]) / 100:g}.")
    raise typer.BadParameter(f"must be a number such as 0.1, got {text!r}.")


Sources = Annotated[
    list[Path],
    typer.Argument(
        parser=parse_path,
        metavar="SRC...",
        help="A buffer's folder, or a file; several are read as one.",
        show_default=False,
    ),
]
Target = Annotated[
    Path,
    typer.Argument(
        parser=parse_path,
        metavar="DST",
        show_default=False,
        help="The target: its suffix names the format; without a suffix, a buffer.",
    ),
]
From = Annotated[
    str | None, typer.Option("--from", metavar="FORMAT", help="Format of SRC.", show_default=False)
]
To = Annotated[
    str | None, typer.Option("--to", metavar="FORMAT", help="Format of DST.", show_default=False)
]
Fields = Annotated[
    str | None,
    typer.Option(
        "--fields",
        metavar="A,B",
        show_default=False,
        help="Only these fields or subtrees, separated by commas; also by the names "
        "that columns have in SRC.",
    ),
]
Episodes = Annotated[
    str | None,
    typer.Option(
        "--episodes",
        metavar="A:B",
        show_default=False,
        help="Only these complete episodes, counted environment by environment: 0:100, "
        "3,7,20:40, or @FILE with numbers.",
    ),
]
Skip = Annotated[
    str | None,
    typer.Option(
        "--skip", metavar="A:B", show_default=False, help="All episodes but these, as --episodes."
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        show_default=False,
        help="Only episodes that meet it, such as 'return > 20 and length >= 50'.",
    ),
]
Fraction = Annotated[
    float | None,
    typer.Option(
        "--fraction",
        parser=parse_share,
        metavar="F",
        show_default=False,
        help="A share of these episodes, chosen at random by --seed.",
    ),
]
Top = Annotated[
    float | None,
    typer.Option(
        "--top",
        parser=parse_share,
        metavar="N",
        show_default=False,
        help="The whole episodes with the highest returns: a share below 1, or a number.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Of --fraction and --split.")]
Unique = Annotated[
    bool,
    typer.Option(
        "--unique", help="Leave out episodes that equal an earlier one in all their bytes."
    ),
]
Split = Annotated[
    str | None,
    typer.Option(
        "--split",
        metavar="A=F,B=F",
        show_default=False,
        help="Make DST a folder of several targets, such as train=0.9,val=0.1, with a share of "
        "the episodes each; --to says their format.",
    ),
]
FrameSkip = Annotated[
    int | None,
    typer.Option("--frame-skip", metavar="N", show_default=False, help="Make one step of N steps."),
]
SkipReward = Annotated[
    str | None,
    typer.Option(
        "--skip-reward",
        metavar="sum|last|first",
        show_default=False,
        help="Which reward --frame-skip gives these; their sum by default.",
    ),
]
Map = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="MODULE:NAME",
        show_default=False,
        help="A function that changes the columns of each episode.",
    ),
]
Drop = Annotated[
    list[str] | None,
    typer.Option(
        "--drop", metavar="FIELD", show_default=False, help="Leave a field out; repeat it."
    ),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="A=B", show_default=False, help="Name field A B in DST; repeat it."
    ),
]
Cast = Annotated[
    list[str] | None,
    typer.Option(
        "--cast",
        metavar="A=DTYPE",
        show_default=False,
        help="Convert field A to a dtype, such as float32, or images to jpeg:90:420, png or "
        "uint8; repeat it.",
    ),
]
JoinedEnvs = Annotated[
    str,
    typer.Option(
        "--envs",
        metavar="append|stack",
        help="Of several SRC: continue each environment by that of the next, or set them side by "
        "side.",
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="A:B",
        show_default=False,
        help="Only these rows, counted in the same way, among the selected episodes "
        "and environments.",
    ),
]
Select = Annotated[
    Path | None,
    typer.Option(
        "--select",
        parser=parse_path,
        metavar="FILE",
        show_default=False,
        help="Only the rows that a file of the page (mmreplay view) selects.",
    ),
]
SaveSelection = Annotated[
    Path | None,
    typer.Option(
        "--save-selection",
        parser=parse_path,
        metavar="FILE",
        show_default=False,
        help="Also write which rows of SRC are selected, for --select.",
    ),
]
Priorities = Annotated[
    str | None,
    typer.Option(
        "--priorities",
        metavar="NAME",
        show_default=False,
        help="Sampler whose stored priorities are converted too; from a file: its name in DST.",
    ),
]
Compression = Annotated[
    str | None,
    typer.Option(
        "--compression",
        metavar="NAME",
        show_default=False,
        help="Compression of DST, such as deflate for npz; for formats that have it.",
    ),
]
Capacity = Annotated[
    int | None,
    typer.Option(
        "--capacity",
        parser=parse_count,
        metavar="N",
        show_default=False,
        help="Capacity per environment of a new buffer; the source's by default.",
    ),
]
HeapBytes = Annotated[int | None, heap_bytes_option("the source's, or planned by its values")]
AutoresetName = Annotated[
    str | None,
    typer.Option(
        "--autoreset",
        metavar="NAME",
        show_default=False,
        help="What the environments of SRC did at episode ends, where its rows do not "
        "say it: next_step, same_step or disabled.",
    ),
]
FormatOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        show_default=False,
        help="An option of the formats; from.NAME or to.NAME for one of them; repeat it.",
    ),
]


def convert(
    sources: Sources,
    target: Target,
    from_: From = None,
    to: To = None,
    fields: Fields = None,
    env: Envs = None,
    episodes: Episodes = None,
    skip: Skip = None,
    where: Where = None,
    fraction: Fraction = None,
    top: Top = None,
    seed: Seed = 0,
    unique: Unique = False,
    split: Split = None,
    envs: JoinedEnvs = "append",
    frame_skip: FrameSkip = None,
    skip_reward: SkipReward = None,
    map_: Map = None,
    cast: Cast = None,
    rename: Rename = None,
    drop: Drop = None,
    rows: Rows = None,
    select: Select = None,
    save_selection: SaveSelection = None,
    priorities: Priorities = None,
    capacity: Capacity = None,
    heap_bytes: HeapBytes = None,
    engine: EngineName = None,
    codec: CodecName = None,
    compression: Compression = None,
    autoreset: AutoresetName = None,
    option: FormatOptions = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST if it exists.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Refuse a source whose meaning would have to be guessed."),
    ] = False,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle", help="Run a pickle, which is a program: only if you trust its maker."
        ),
    ] = False,
    following: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Append episodes to DST as another process records them; Ctrl-C ends it.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Print the plan; write nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Convert buffers and files into each other; DST appears whole or not at all."""
    from mmreplay.convert import registry, transfer
    from mmreplay.convert.by_episode import SKIP_REWARDS
    from mmreplay.convert.joined import JOINS
    from mmreplay.convert.mapped import Changes
    from mmreplay.convert.ranges import read_ranges, write_selection
    from mmreplay.convert.select import Selection
    from mmreplay.convert.splits import refuse_other_folder
    from mmreplay.recording.recorder import Meter

    check_choice("--engine", engine, ON_DISK)
    check_choice("--codec", codec, CODECS)
    check_choice("--envs", envs, JOINS)
    check_choice("--skip-reward", skip_reward, SKIP_REWARDS)
    changes = Changes(
        frame_skip,
        typing.cast("Rewards | None", skip_reward),
        None if map_ is None else load_function("--map", map_),
        read_pairs("--cast", cast),
        read_pairs("--rename", rename),
        drop or (),
    )
    typed = target
    sources = [transfer.local(source, "SRC", remote=True) for source in sources]
    target = transfer.local(target, "DST")
    named = {
        "capacity": capacity,
        "engine": engine,
        "codec": codec,
        "compression": compression,
        "priorities": priorities,
        "allow_pickle": allow_pickle or None,
        "heap_bytes": heap_bytes,
        "autoreset": autoreset,
    }
    options = read_options(option or [])
    options |= {name: value for name, value in named.items() if value is not None}
    formats = [registry.source_format(source, from_) for source in sources]
    for source, reads in zip(sources, formats, strict=True):
        what = "buffer" if reads.name == registry.BUFFER else "source"
        transfer.refuse_inside(target, source, what)
    writes = registry.target_format(target, to)
    of_sides = [transfer.split_options(reads, writes, options) for reads in formats]
    writing = of_sides[0][1]
    names = None if fields is None else [name.strip() for name in fields.split(",")]
    if following:
        refused = {
            "several SRC": len(sources) > 1,
            "--env": env is not None,
            "--envs": envs != "append",
            "--seed": seed != 0,
            "--strict": strict,
            "--episodes": episodes is not None,
            "--skip": skip is not None,
            "--fraction": fraction is not None,
            "--top": top is not None,
            "--unique": unique,
            "--split": split is not None,
            "--save-selection": save_selection is not None,
            "--frame-skip": frame_skip is not None,
            "--map": map_ is not None,
            "--rows": rows is not None,
            "--select": select is not None,
            "--priorities": priorities is not None,
            "--dry-run": dry_run,
        }
        for name, given in refused.items():
            if given:
                raise usage_error(
                    f"--follow takes --fields, --where, --drop, --rename and --cast, got {name}"
                )
        if formats[0].name != registry.BUFFER:
            raise usage_error(f"--follow reads a buffer that is written, got {formats[0].name}")
        _append_as_recorded(
            sources[0],
            target,
            typed,
            writes,
            writing,
            fields=names,
            where=where,
            changes=changes,
            overwrite=overwrite,
            json=json,
        )
        return
    choice = Selection(
        names,
        env,
        read_numbers("--episodes", episodes),
        read_slice("--rows", rows),
        None if select is None else read_ranges(select),
        skip=read_numbers("--skip", skip),
        where=where,
        fraction=fraction,
        top=top,
        seed=seed,
        unique=unique,
        splits=read_shares(split),
    )
    suffix = "" if split is None else registry.split_suffix(writes, target)
    if save_selection is not None:
        paths = [("SRC", each) for each in sources] + [("DST", target)]
        refuse_selection_inside(save_selection, paths)
    # What changes steps needs the values of columns, and others may stay as they are.
    stays = frame_skip is None and map_ is None
    conversion = transfer.Conversion(
        [
            transfer.Source(source, reads, reading, stored=stays and reads.name == writes.name)
            for source, reads, (reading, _) in zip(sources, formats, of_sides, strict=True)
        ],
        choice,
        changes if changes.options or frame_skip is not None else None,
        typing.cast("JoinEnvs", envs),
        arrays=not writes.takes_images(writing),
    )
    # Opening may take long, too: a table is read once to find what its columns are.
    with _report_interrupts(target, typed):
        shared = transfer.name_shared_options(options, of_sides[0][0], writing)
        with shared, _selecting() as selecting:
            opened = conversion.open(selecting)
        with transfer.closing_all(opened):
            saved = None
            if save_selection is not None:
                saved = selection_to_save(opened, save_selection, overwrite)
            if split is not None:
                refuse_other_folder(target, choice.splits or {}, suffix, overwrite)
            if dry_run:
                made = target, writes
                with conversion.naming():
                    _print_plan(opened, conversion, made, writing, overwrite, strict, json)
                return
            about = [each.reader.describe() for each in opened.values()]
            total = sum(each.rows for each in about)
            with Meter(total, about[0].row_nbytes, None, what="converting", unit="rows") as meter:
                report = conversion.write(
                    opened,
                    target,
                    partial(_open_writer, writes, writing),
                    suffix=suffix,
                    overwrite=overwrite,
                    strict=strict,
                    progress=lambda done, _: meter.update(done, done - meter.done),
                    uncompressed=writes.name == registry.BUFFER and writing.get("engine") != "zarr",
                )
            if saved is not None and save_selection is not None:
                write_selection(save_selection, saved)
    _print_report(report, typed, json)


def _append_as_recorded(
    source: Path,
    target: Path,
    typed: Path,
    writes: Format,
    options: dict[str, object],
    *,
    fields: list[str] | None,
    where: str | None,
    changes: Changes,
    overwrite: bool,
    json: bool,
) -> None:
    """Append episodes as they finish; Ctrl-C ends it in order.

    Raises:
        FailedError: Rows were overwritten before they were appended.
    """
    from mmreplay.convert.following import Following

    def appended(report: Report) -> None:
        _print_report(report, typed, json)

    appending = Following(
        source,
        target,
        writes,
        options,
        fields=fields,
        where=where,
        changes=changes,
        overwrite=overwrite,
    )
    with appending, suppress(KeyboardInterrupt):
        appending.run(appended)
    if not (appending.episodes or appending.lost or json):
        show.print_line(f"{typed}: nothing new: {source} has no finished episode that is not there")
    if appending.lost:
        raise FailedError(
            f"{appending.lost} rows of {source} were overwritten before they were appended to "
            f"{typed}, which has all others. Record with a larger capacity, or with AutoExport, "
            "which holds rows until they are appended."
        )


@contextmanager
def _selecting() -> Iterator[Callable[[int, int], None]]:
    """Shows a bar for each source whose episodes are looked at."""
    from mmreplay.recording.recorder import Meter

    meter: Meter | None = None
    total = 0
    with ExitStack() as stack:

        def look(done: int, rows: int) -> None:
            nonlocal meter, total
            if meter is None or meter.done == total:
                # The one of the source before.
                stack.close()
                meter, total = Meter(rows, 0, None, what="selecting", unit="rows"), rows
                stack.enter_context(meter)
            meter.update(done, 0)

        yield look


def _open_writer(
    writes: Format,
    options: dict[str, object],
    path: Path,
    description: Description,
    overwrite: bool,
) -> Writer:
    from mmreplay.convert import registry

    return registry.open_writer(writes, path, description, overwrite=overwrite, **options)


def selection_to_save(opened: dict[str, Selected], path: Path, overwrite: bool) -> bytes:
    """A file of the selected rows.

    Raises:
        UsageError: They are not of one source, or in splits.
        FormatError: The source has no name, there are too many ranges, or the file
            exists and may not be replaced.
    """
    from mmreplay.convert.ranges import RowRanges
    from mmreplay.ring import Span

    if list(opened) != [""]:
        raise usage_error("--save-selection and --split exclude each other. Pass one of them.")
    origins = opened[""].origins
    if len(origins) > 1:
        raise usage_error(
            f"--save-selection is of the rows of one SRC, got {len(origins)}. Convert each by "
            "itself, or leave it out."
        )
    (origin,) = origins
    if not origin.source.uuid:
        raise FormatError(
            "--save-selection needs a source whose rows stand where a buffer has them, and this "
            "one names no buffer. Save the selection of the buffer itself."
        )
    if os.path.lexists(path) and not overwrite:
        raise FormatError(
            f"{path} already exists. Choose another file for --save-selection, or pass --overwrite."
        )
    source = origin.source
    ranges = origin.ranges or RowRanges.of_span(Span(source.first, source.stop))
    return replace(ranges, uuid=source.uuid).to_bytes()


def refuse_selection_inside(path: Path, paths: list[tuple[str, Path]]) -> None:
    """Refuse a file of a selection that would replace, or change, a source or target.

    Args:
        path: Of the file.
        paths: Sources and target, with what they are called.

    Raises:
        FormatError: It would, it is a folder, or its folder does not exist.
    """
    file = Path(os.path.realpath(path))
    for name, given in paths:
        other = Path(os.path.realpath(given))
        if file.is_relative_to(other) or other.is_relative_to(file):
            where = "is" if file == other else "holds" if file in other.parents else "is inside"
            raise FormatError(
                f"--save-selection: {path} {where} {name}, {given}. Choose another file."
            )
    if path.is_dir() or not path.parent.is_dir():
        raise FormatError(
            f"--save-selection must be a file in a folder that exists, got {path}. Make the "
            "folder first, or choose another file."
        )


@contextmanager
def _report_interrupts(target: Path, typed: Path) -> Iterator[None]:
    """Turn Ctrl-C into a line that says what is there and how to start again."""
    from mmreplay.convert import staging

    before = _identity(target)
    try:
        yield
    except KeyboardInterrupt:
        after = _identity(target)
        if after not in (before, None):
            raise InterruptedRun(
                f"interrupted; {typed} is complete, it was finished already"
            ) from None
        outcome = "was not made" if after is None else "is as it was"
        # A second Ctrl-C ends the taking away.
        left = staging.leftover(target)
        other = "nothing else is kept" if left is None else f"{left.name} is left"
        raise InterruptedRun(
            f"interrupted; {typed} {outcome}, the source was only read, and {other}. "
            "Run the same command again to start from the beginning"
        ) from None


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def read_slice(
    option: str, text: str | None, legal: str = "A:B, such as 0:100, or one number"
) -> slice | None:
    """Read ``A:B``, ``A:``, ``:B`` or ``A``, which selects one.

    Args:
        option: Its name, for errors.
        text: Its value.
        legal: What the option takes, for errors.

    Raises:
        UsageError: It is none of these.
    """
    if text is None:
        return None
    match = re.fullmatch(r"\s*(-?\d*)\s*(?:(:)\s*(-?\d*)\s*)?", text)
    try:
        assert match is not None
        first = int(match[1]) if match[1] else None
        if match[2]:
            return slice(first, int(match[3]) if match[3] else None)
        assert first is not None
    except (AssertionError, ValueError):
        raise usage_error(f"{option} must be {legal}, got {text!r}") from None
    return slice(first, first + 1 or None)


def read_numbers(option: str, text: str | None) -> slice | list[int] | None:
    """Read numbers of episodes: ``A:B`` as `read_slice`, ``3,7,20:40``, or ``@FILE``.

    Raises:
        UsageError: It is none of these.
        FormatError: The file is missing, is too large, or holds something else.
    """
    if text is None or not ("," in text or text.startswith("@")):
        return read_slice(
            option, text, "A:B such as 0:100, a list such as 3,7,20:40, or @FILE with numbers"
        )
    from mmreplay.convert.episode_facts import MAX_EPISODES
    from mmreplay.disk import files

    where = option
    if text.startswith("@"):
        path = files.absolute(text[1:])
        if not path.exists():
            raise FormatError(f"{path} does not exist. Check the path after @.")
        where = str(path)
        text = files.read_bytes(path, MAX_LIST_NBYTES).decode("utf-8-sig", "replace")
    parts = re.split(r"[\s,]+", text.strip(" \t\r\n,"))
    spans = [re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", part) for part in parts]
    for part, span in zip(parts, spans, strict=True):
        if span is None:
            message = f"{where} must hold numbers and ranges, such as 3,7,20:40, got {part[:60]!r}"
            if where == option:
                raise usage_error(message)
            raise FormatError(f"{message}. Write one number in a line.")
    pairs = [(int(s[1]), int(s[2] or int(s[1]) + 1)) for s in spans if s is not None]
    for first, stop in pairs:
        if first >= stop:
            raise usage_error(f"{option} must name ranges that rise, got {first}:{stop}")
    if sum(max(0, stop - first) for first, stop in pairs) > MAX_EPISODES:
        raise usage_error(f"{option} must name at most {MAX_EPISODES:,} episodes")
    return [number for first, stop in pairs for number in range(first, stop)]


def read_pairs(option: str, texts: list[str] | None, legal: str = "A=B") -> dict[str, str]:
    """Read ``A=B`` of an option that is repeated.

    Args:
        option: Its name, for errors.
        texts: Its values.
        legal: What the option takes, for errors.

    Raises:
        UsageError: One is no pair, or names a field twice.
    """
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise usage_error(f"{option} must be {legal}, got {text!r}")
        if name in pairs:
            raise usage_error(f"{option} must give {name!r} once, got it twice")
        pairs[name] = value
    return pairs


def read_shares(text: str | None) -> dict[str, float] | None:
    """Read the shares of ``train=0.9,val=0.1``.

    Raises:
        UsageError: It is something else, or names one twice.
    """
    if text is None:
        return None
    example = "names with shares, such as train=0.9,val=0.1"
    shares: dict[str, float] = {}
    for name, share in read_pairs("--split", text.split(","), example).items():
        try:
            shares[name.strip()] = float(share)
        except ValueError:
            raise usage_error(f"--split must be {example}, got {text!r}") from None
    return shares


def read_options(texts: list[str]) -> dict[str, object]:
    """Options as a format takes them: JSON values where they are some, else text.

    ``True``, ``False`` and ``None`` are what they are in Python.

    Raises:
        UsageError: One is not NAME=VALUE.
    """
    options: dict[str, object] = {}
    for assignment in texts:
        name, equals, text = assignment.partition("=")
        if not name or not equals:
            raise usage_error(f"--option must be NAME=VALUE, got {assignment!r}")
        try:
            value = PYTHON[text] if text in PYTHON else json_text.loads(text)
        except (ValueError, RecursionError):
            value = text
        name = name.replace("-", "_")
        if name in options:
            raise usage_error(f"--option must give {name!r} once, got {assignment!r} too")
        options[name] = value
    return options


def _print_plan(
    opened: dict[str, Selected],
    conversion: Conversion,
    target: tuple[Path, Format],
    writing: dict[str, object],
    overwrite: bool,
    strict: bool,
    json: bool,
) -> None:
    from mmreplay.convert import provenance, registry, staging, transfer

    abouts = {
        name: transfer.describe(each.reader, conversion.provenance(each, target[0]))
        for name, each in opened.items()
    }
    # Splits are of one source, whose notes are those of all their readers.
    reader = next(iter(opened.values())).reader
    description = next(iter(abouts.values()))
    transfer.refuse_doubts(reader, strict)
    staging.refuse_open(target[0], overwrite)
    takes = [
        registry.planned(target[1], about, target=target[0], **writing) for about in abouts.values()
    ]
    nbytes = None if None in takes else sum(each or 0 for each in takes)
    plan = _plan(conversion, opened, abouts, target)
    plan["target_nbytes"] = nbytes
    plan["target_exists"] = os.path.lexists(target[0])
    misnamed = registry.misnamed(target[1], target[0])
    notes = [*reader.report.notes, *([misnamed] if misnamed else [])]
    plan["notes"], plan["doubts"] = notes, reader.report.doubts
    # What is changed is said by the readers of all splits.
    steps = list(dict.fromkeys(reader.report.steps))
    plan["steps"] = steps
    if json:
        show.print_json(plan)
        return
    selects = bool(conversion.options)
    facts = [
        *(
            (
                "from" if not n else "",
                f"{path} ({name})" + (f": {provenance.counts_of(counts)}" if selects else ""),
            )
            for n, (path, name, counts) in enumerate(
                zip(plan["sources"], plan["source_formats"], plan["read"], strict=True)
            )
        ),
        ("to", f"{target[0]} ({target[1].name})"),
        ("rows", show.count(plan["rows"])),
        *(("", f"{name} {show.count(about.rows)}") for name, about in abouts.items() if name),
        ("environments", show.count(description.num_envs)),
        *(("selected" if not n else "", step) for n, step in enumerate(steps)),
        ("data", show.format_size(plan["nbytes"])),
        ("autoreset", description.autoreset),
    ]
    if nbytes is not None:
        facts.append(("takes", show.format_size(nbytes)))
    if description.priorities:
        facts.append(("priorities", description.priorities))
    if plan["target_exists"]:
        verb = "is replaced" if overwrite else "exists: add --overwrite to replace it"
        replaced = [target[0]]
        if plan["splits"]:
            replaced = list(target[0].iterdir()) if target[0].is_dir() else []
        if overwrite and any(staging.holds_more(each) for each in replaced):
            verb = "is refused, unless an earlier run made everything in this folder"
        facts.append(("target", verb))
    show.print_facts("Plan; nothing is written", facts)
    fields = description.schema.fields
    rows = [[path, f.rules.name(f), f.rules.axes(f)] for path, f in fields.items()]
    show.print_table(["field", "dtype", "shape"], rows, left=3)
    _print_notes(notes, reader.report.doubts)


def _plan(
    conversion: Conversion,
    opened: dict[str, Selected],
    abouts: dict[str, Description],
    target: tuple[Path, Format],
) -> dict[str, Any]:
    every = [*abouts.values()]
    values = sum(0 if each.values is None else each.values.nbytes for each in every)
    rows = sum(each.rows for each in every)
    sources = conversion.sources
    return {
        "source": str(sources[0].name),
        "source_format": sources[0].format.name,
        "sources": [str(each.name) for each in sources],
        "source_formats": [each.format.name for each in sources],
        "read": [
            _counts([each.origins[n] for each in opened.values()]) for n in range(len(sources))
        ],
        "target": str(target[0]),
        "target_format": target[1].name,
        "rows": rows,
        "splits": {name: about.rows for name, about in abouts.items() if name},
        "num_envs": every[0].num_envs,
        "nbytes": rows * every[0].row_nbytes + values,
        "autoreset": every[0].autoreset,
        "priorities": every[0].priorities or None,
        "fields": every[0].schema.to_json(),
    }


def _counts(origins: list[Origin]) -> dict[str, int | None]:
    """How much of a source all splits read."""
    counted = [each.episodes for each in origins if each.episodes is not None]
    return {
        "rows": origins[0].source.rows,
        "read_rows": sum(each.rows for each in origins),
        "episodes": counted[0][0] if counted else None,
        "read_episodes": sum(read for _, read in counted) if counted else None,
    }


def _print_report(report: Report, target: Path, json: bool) -> None:
    if json:
        show.print_json({**asdict(report), "path": str(target)})
        return
    rate = report.nbytes / report.seconds if report.seconds else 0.0
    show.print_line(
        f"{target}: {show.plural(report.rows, 'row')}, "
        f"{show.plural(report.episodes, 'episode')}, "
        f"{show.format_size(report.nbytes)} in {report.seconds:.1f} s, "
        f"{show.number(rate / 1e6)} MB/s"
    )
    _print_notes(report.notes, report.doubts)


def _print_notes(notes: tuple[str, ...] | list[str], doubts: Any) -> None:
    for text in notes:
        show.print_line(f"note: {text}")
    for text in doubts:
        show.print_line(f"doubt: {text}")

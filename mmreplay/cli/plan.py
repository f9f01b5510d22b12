"""``mmreplay plan``: what a buffer would take, before anything is allocated."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmreplay.cli import show
from mmreplay.cli.options import (
    Json,
    NumEnvs,
    heap_bytes_option,
    parse_count,
    parse_path,
    usage_error,
)
from mmreplay.errors import SchemaError
from mmreplay.format.sharding import Codec

if TYPE_CHECKING:
    from mmreplay.format.metadata import Metadata
    from mmreplay.plan import Estimate, Plan
    from mmreplay.ring import Layout
    from mmreplay.schema import Field, Schema

BATCH_SIZE = 256
ESTIMATED: tuple[Codec, ...] = ("blosc-lz4", "zstd")


def plan(
    source: Annotated[
        str | None,
        typer.Argument(
            parser=os.path.expanduser,
            metavar="ENV_OR_PATH",
            show_default=False,
            help="A Gymnasium id, or a buffer or Zarr group whose fields are used.",
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            "--capacity",
            parser=parse_count,
            metavar="N",
            show_default=False,
            help="Rows per environment, such as 1e6; by default a buffer's own.",
        ),
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME:DTYPE[:SHAPE]",
            show_default=False,
            help="A field, such as observation/pixels:uint8:84x84, "
            "tokens:int32:0-4096 or mission:text:200; repeat it.",
        ),
    ] = None,
    num_envs: NumEnvs = None,
    heap_bytes: Annotated[
        int | None, heap_bytes_option("a buffer's own, or enough for rows of --length")
    ] = None,
    length: Annotated[
        str | None,
        typer.Option(
            "--length",
            metavar="N|NAME=N,...",
            show_default=False,
            help="Items, or bytes of text, of an average value that varies: one number "
            "for all fields, or one for each by name.",
        ),
    ] = None,
    at: Annotated[
        Path,
        typer.Option(
            "--at",
            parser=parse_path,
            metavar="PATH",
            help="Folder of the future buffer, whose disk's free space is shown.",
        ),
    ] = Path(),
    json: Json = False,
) -> None:
    """Say what a buffer would take on disk and in RAM; allocates nothing."""
    from mmreplay.disk.files import free_nbytes
    from mmreplay.plan import plan_buffer

    schema, known_envs, known_capacity, known_layout, known_heap = _known(source, fields)
    envs = num_envs or known_envs
    rows = capacity or known_capacity
    if rows is None:
        raise usage_error(
            "--capacity is missing. Give the rows per environment of the new buffer, such as 1e6"
        )
    layout = known_layout if envs == known_envs else None
    heap = heap_bytes
    if heap is None and length is None:
        heap = _heap_of(schema, known_heap)
    lengths = None if length is None else parse_lengths(length)
    planned = plan_buffer(schema, rows, envs, layout, heap_bytes=heap, lengths=lengths)
    free = free_nbytes(at)
    packed = _packed(source, rows, envs)
    if json:
        batch = {"batch_256_nbytes": planned.batch_nbytes(BATCH_SIZE)}
        facts = {**asdict(planned), **batch, "free_nbytes": free}
        compressed = {estimated.codec: asdict(estimated) for estimated in packed}
        show.print_json({**facts, "fits": planned.nbytes <= free, "compressed": compressed})
    else:
        _print(planned, free, packed, schema)


def _heap_of(schema: Schema, known: int) -> int | None:
    """The heap of the source; None where nothing varies, or images say their own.

    Raises:
        UsageError: Neither is so.
    """
    unknown = [path for path in schema.varying if schema[path].encoding is None]
    if unknown and not known:
        raise usage_error(
            f"--length is missing, as field {unknown[0]!r} varies. Give the items of an average "
            "value, or --heap-bytes"
        )
    return known or None


def _packed(source: str | None, rows: int, num_envs: int) -> list[Estimate]:
    """Estimate the size of an existing buffer in compressed shards, by codec."""
    from mmreplay.plan import estimate

    if source is None or not _stored(source):
        return []
    estimates = [estimate(source, rows, num_envs, codec) for codec in ESTIMATED]
    return [estimated for estimated in estimates if estimated is not None]


def _stored(source: str) -> bool:
    """Return whether the source is a buffer or a group, not an environment's id."""
    from mmreplay.zarr_groups.source import source_of

    return Path(source).exists() or source_of(source) is not None


def _known(
    source: str | None, fields: list[str] | None
) -> tuple[Schema, int, int | None, Layout | None, int]:
    """Return the schema, and the source's environments, capacity, layout and heap."""
    from mmreplay.schema import Schema

    if (source is None) == (not fields):
        raise usage_error(
            "pass either an environment's id or a buffer's folder, or fields by --field"
        )
    if source is None:
        declared: dict[str, Field] = {}
        for text in fields or []:
            name, field = parse_field(text)
            if name in declared:
                raise usage_error(
                    f"--field must name each field once, got {name!r} twice, now by {text!r}"
                )
            declared[name] = field
        return Schema.from_flat(declared), 1, None, None, 0
    if _stored(source):
        known = _metadata(source)
        ring = known.ring
        return (known.schema, ring.num_envs, ring.capacity, ring.layout, known.heap_nbytes)
    return _of_env(source), 1, None, None, 0


def _metadata(source: str) -> Metadata:
    """Return the metadata of a buffer or of a group opened as one."""
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.format import metadata
    from mmreplay.zarr_groups.source import source_of

    if source_of(source) is None:
        return metadata.load(Path(source))
    with ReplayBuffer.open(source) as buffer:
        return buffer.metadata


def _of_env(name: str) -> Schema:
    from mmreplay.recording.environments import make_vector
    from mmreplay.schema import Schema

    if name.count(":") > 1:
        raise usage_error(
            f"ENV_OR_PATH must be a Gymnasium id or a folder, got {name!r}. Give a "
            f"field with --field {name}"
        )
    try:
        env = make_vector(name, 1, {})
    except SchemaError as error:
        raise SchemaError(f"{error} A folder {name} does not exist either.") from error
    try:
        return Schema.from_env(env)
    finally:
        env.close()


def parse_lengths(text: str) -> float | dict[str, float]:
    """Read ``40``, or ``tokens=660,mission=12``.

    Raises:
        UsageError: It is neither.
    """
    try:
        if "=" not in text:
            return float(text)
        parts = [part.rpartition("=") for part in text.split(",")]
        lengths = {name.strip(): float(number) for name, _, number in parts}
        if len(lengths) == len(parts):
            return lengths
        raise usage_error(f"--length must name each field once, got {text!r}")
    except ValueError:
        raise usage_error(
            f"--length must be N or NAME=N, such as 40 or tokens=660,mission=12, got {text!r}"
        ) from None


def _parse_shape(text: str) -> tuple[int | None, list[int]]:
    """Read ``3x84x84`` or ``0-4096x2``.

    Returns:
        The longest first axis, if it varies; the other axes, one of -1 where some are
        no numbers.
    """
    # An empty axis, as in 3x, is no number.
    longest, axes = None, text.replace(",", "x").split("x")
    try:
        if axes[0].startswith("0-"):
            longest = int(axes.pop(0)[2:])
        return longest, [int(axis) for axis in axes]
    except ValueError:
        return None, [-1]


def parse_field(text: str) -> tuple[str, Field]:
    """Read ``name:dtype``, ``name:dtype:3x84x84`` or ``name:text:200``.

    Where the first axis varies it is ``0-4096``, up to the longest.
    """
    from mmreplay.schema import Field
    from mmreplay.schema.images import CODECS

    name, _, rest = text.partition(":")
    dtype, shaped, shape = rest.partition(":")
    longest, sizes = _parse_shape(shape) if shaped else (None, [])
    if not name or not dtype or any(size < 1 for size in sizes):
        raise usage_error(
            "--field must be NAME:DTYPE or NAME:DTYPE:SHAPE, such as reward:float32, "
            "observation:uint8:84x84, tokens:int32:0-4096 or mission:text:200, got "
            f"{text!r}"
        )
    try:
        if dtype in CODECS:
            return name, Field.image(sizes, dtype)
        if dtype in ("text", "bytes") and len(sizes) == 1 and longest is None:
            make = Field.text if dtype == "text" else Field.bytes
            return name, make(sizes[0])
        if dtype in ("text", "bytes", "str"):
            kind = "text" if dtype == "str" else dtype
            raise usage_error(
                f"--field {text!r}: {kind} needs the bytes of its longest value, such "
                f"as {name}:{kind}:200"
            )
        if longest is not None:
            return name, Field((None, *sizes), dtype, max_length=longest)
        return name, Field(sizes, dtype)
    except SchemaError as error:
        raise usage_error(f"--field {text!r}: {error}") from error


def _print(plan_: Plan, free: int, packed: list[Estimate], schema: Schema) -> None:
    size, count = show.format_size, show.count
    ring = plan_.ring
    rows = [[f.path, f.kind, f.file, count(f.row_nbytes), size(f.nbytes)] for f in plan_.fields]
    rows += [
        ["(alignment of records)", "", "records.bin", "", size(plan_.padding_nbytes)],
        ["(flags)", "", "flags.bin", "1", size(plan_.flags_nbytes)],
        ["(checksums)", "", "sums.bin", "", size(plan_.sums_nbytes)],
        ["(commit record)", "", "COMMIT", "", size(plan_.commit_nbytes)],
    ]
    if plan_.heap_nbytes:
        rows.append(["(values that vary)", "", "heap.bin", "", size(plan_.heap_nbytes)])
    show.print_table(["field", "type", "file", "bytes/row", "on disk"], rows, left=3)
    lack = plan_.nbytes - free
    comparison = f"lacks {size(lack)}" if lack > 0 else "it fits"
    slack = ring.slots - ring.capacity
    show.print_facts(
        f"{count(ring.capacity)} rows x {show.plural(ring.num_envs, 'environment')}, {ring.layout}",
        [
            (
                "in all",
                f"{size(plan_.nbytes)} when full; almost nothing at first, "
                "because files are sparse",
            ),
            (
                "slack",
                f"{size(plan_.slack_nbytes)} of it: {count(slack)} rows an "
                f"environment (reserve {count(ring.reserve)}, a block of "
                f"{count(ring.block_rows)}, rounding)",
            ),
            *(
                [
                    (
                        "heap_bytes",
                        f"{count(plan_.heap_bytes)}: {size(plan_.heap_bytes)} an "
                        "environment, for the values that vary",
                    )
                ]
                if plan_.heap_bytes
                else []
            ),
            ("free disk", f"{size(free)}: {comparison}"),
            *[(f"as {each.codec}", _estimate_text(each)) for each in packed],
            *_image_facts(schema, packed),
            (
                "RAM, warm",
                f"{size(plan_.pages_nbytes)} of page cache for draws that "
                "never wait for the disk; with less, draws read the disk",
            ),
            (
                "RAM, least",
                f"{size(plan_.flags_working_nbytes)} of flags, and "
                f"{size(plan_.batch_nbytes(BATCH_SIZE))} a batch of "
                f"{BATCH_SIZE} with next observations",
            ),
            (
                "RAM, find",
                f"{size(plan_.index_nbytes)} at most where rows are looked up by a column",
            ),
        ],
    )


def _image_facts(schema: Schema, packed: list[Estimate]) -> list[tuple[str, str]]:
    """How long images take here, and whether shards of arrays would be smaller."""
    from mmreplay.errors import FailedError
    from mmreplay.plan import coding_ms

    facts = []
    for path, field in schema.fields.items():
        if (encoding := field.encoding) is None:
            continue
        try:
            encode_ms, decode_ms = coding_ms(encoding)
            text = f"{encode_ms:.2g} ms to encode and {decode_ms:.2g} ms to decode one here"
            facts.append(("images", f"{path}: {text}, of noise, in one thread"))
        except FailedError as error:
            facts.append(("images", f"{path}: {error}"))
        smaller = [each for each in packed if each.images.get(path, 1.0) < 1]
        best = min(smaller, key=lambda one: one.images[path], default=None)
        if best is not None:
            facts.append(
                (
                    "as arrays",
                    f"{path}: engine='zarr' with {best.codec} would take "
                    f"{best.images[path]:.2g} of the bytes of these files: convert with --cast "
                    f"{path}=uint8 --engine zarr --codec {best.codec}",
                )
            )
    return facts


def _estimate_text(packed: Estimate) -> str:
    """Return an estimate as text."""
    fields = [f"{path} {show.number(r)}x" for path, r in packed.ratios.items()]
    return (
        f"about {show.format_size(packed.nbytes)} in shards ({', '.join(fields)}), "
        f"from a sample of {show.format_size(packed.sampled_nbytes)}"
    )

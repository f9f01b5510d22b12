"""Copies all blocks of a reader to a writer, and prepares both ends of a conversion."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from mmreplay.arguments import format_size
from mmreplay.buffer import opening
from mmreplay.buffer.opening import StrPath, absolute
from mmreplay.buffer.replay_buffer import ReplayBuffer
from mmreplay.convert import registry
from mmreplay.convert.base import Block, Progress, Reader, Report, Writer, name_source
from mmreplay.convert.buffer_reader import BufferReader
from mmreplay.convert.description import Description
from mmreplay.convert.episode_ends import EpisodeStarts
from mmreplay.convert.joined import Envs, join
from mmreplay.convert.mapped import Changes, change, check_form, listed
from mmreplay.convert.provenance import PROVENANCE, provenance_of
from mmreplay.convert.registry import BUFFER, Format
from mmreplay.convert.select import Origin, Selected, Selection, select
from mmreplay.convert.splits import write_splits
from mmreplay.convert.staging import STAGED
from mmreplay.convert.values import ValueSizes
from mmreplay.disk import files
from mmreplay.disk.address import url_of
from mmreplay.errors import (
    FormatError,
    ReplayError,
    SchemaError,
    SourceError,
    called,
    frames_to_caller,
    undone_by,
)
from mmreplay.nesting import under
from mmreplay.ring import Span
from mmreplay.schema import Field
from mmreplay.schema.images import CODECS
from mmreplay.strict_json import Json


def transfer(
    reader: Reader,
    open_writer: Callable[[Description], Writer],
    *,
    provenance: Json | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    lazy: bool = False,
) -> Report:
    """Write all rows of a reader; the target appears at the end, complete.

    Args:
        reader: The source.
        open_writer: Makes the target for a description.
        provenance: What the user metadata say of where the rows come from, if anything.
        strict: Refuse guesses and losses.
        progress: Called after each block with (rows done, rows in all).
        lazy: The target takes columns that are read when they are needed.

    Raises:
        SourceError: The source contradicts its description, or strict and doubtful.
    """
    begin = time.monotonic()
    description = describe(reader, provenance)
    refuse_doubts(reader, strict)
    rows = episodes = 0
    beginnings = EpisodeStarts(description.num_envs)
    with open_writer(description) as writer:
        blocks = env_by_env(reader, description) if writer.env_by_env else reader.blocks()
        try:
            for block in blocks:
                writer.write(block if lazy else block.arrays())
                rows += len(block)
                episodes += int(beginnings.look(block).sum())
                if progress is not None:
                    called("progress", progress, rows, description.rows)
        finally:
            # A thread that reads ahead ends now, not in the thread that collects it.
            if isinstance(blocks, Generator):
                blocks.close()
        if rows != description.rows:
            raise SourceError(
                f"the source ended after {rows} rows, but it describes "
                f"{description.rows}. The source is truncated."
            )
        refuse_doubts(reader, strict)
        if strict and writer.notes.doubts:
            raise SourceError(
                f"{writer.notes.doubts[0]}, and strict allows no loss. Choose another "
                "format, or convert without strict."
            )
        writer.finish()
    return Report(
        rows=rows,
        episodes=episodes,
        nbytes=writer.nbytes,
        seconds=time.monotonic() - begin,
        notes=(*reader.report.notes, *writer.notes.notes),
        doubts=(*reader.report.doubts, *writer.notes.doubts),
    )


def env_by_env(reader: Reader, description: Description) -> Iterator[Block]:
    """All rows, those of an environment without others between them.

    One pass where they come so, else one for each environment.
    """
    env_ids, seen, apart = -1, np.zeros(description.num_envs, bool), False
    for block in reader.marks() if description.num_envs > 1 else ():
        at = np.flatnonzero(np.diff(block.env_ids, prepend=env_ids))
        begun = block.env_ids[at]
        apart |= bool(seen[begun].any()) or len(np.unique(begun)) < len(begun)
        seen[begun] = True
        env_ids = block.env_ids[-1] if len(block) else env_ids
    if not apart:
        yield from reader.blocks()
        return
    for env_id in np.flatnonzero(description.first < description.stop).tolist():
        first = description.stop.copy()
        first[env_id] = description.first[env_id]
        reader.narrow(Span(first, description.stop))
        for block in reader.blocks():
            rows = block.select(block.env_ids == env_id)
            if len(rows):
                yield rows


def describe(reader: Reader, provenance: Json | None = None) -> Description:
    """The description of a target: a reader's, with what measures its rows' values.

    Args:
        reader: Of the rows.
        provenance: What the user metadata say of where they come from, if anything.
    """
    description = reader.describe()
    if provenance is not None:
        description = replace(description, user={**description.user, PROVENANCE: provenance})
    if not description.schema.varying:
        return description
    schema, num_envs = description.schema, description.num_envs
    bounds = reader.bounds()
    upper = None if bounds is None else ValueSizes(bounds, schema, num_envs)
    values = ValueSizes(reader.measures, schema, num_envs, upper)
    return replace(description, values=values)


def refuse_doubts(reader: Reader, strict: bool) -> None:
    """Refuse a source whose reader had to guess so far.

    Raises:
        SourceError: Strict, and it had to.
    """
    if strict and reader.report.doubts:
        raise SourceError(
            f"{reader.report.doubts[0]}, and strict allows no guess. Load without "
            "strict if the guess is right, or pass the option that says it, if any."
        )


Options = dict[str, object]
ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")
EXPANSION, LEAST_EXPANDED_NBYTES = 10, 64 << 20
"""Images that become so many times larger are warned of, from so many bytes on."""
SELECTED = ("fields", "env_ids")
"""Options of a buffer's reader that `Selection` holds."""


def local(path: StrPath, what: str, *, remote: bool = False) -> Path:
    """The absolute path of a file or folder on this machine.

    Args:
        path: As the user gave it.
        what: Name of the argument, for errors.
        remote: Allow addresses of remote stores; the path is read, not written.

    Raises:
        FormatError: It is no path, or an address, which would be a folder of that
            name; or, to write to, a root or a name that the next run would remove.
    """
    typed = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(typed, str):
        raise FormatError(
            f"{what} must be a str or pathlib.Path, got {type(path).__name__}. "
            f"{files.path_advice(path)}"
        )
    if ADDRESS.match(typed) and not (remote and url_of(typed)):
        raise FormatError(
            f"{what} must be a path on this machine, got the address {typed!r}. "
            "Convert here, then copy the file there."
        )
    found = absolute(path)
    if not remote and not found.name:
        raise FormatError(
            f"{what} must be the path of a file or folder to make, got {typed!r}, the "
            "root of all folders. Add a name."
        )
    if not remote and found.name.startswith(STAGED):
        raise FormatError(
            f"{what} must not begin with {STAGED!r}, got {typed!r}. Such names are for "
            "unfinished targets, and the next run removes them."
        )
    return found


def refuse_inside(target: Path, source: Path | None, what: str = "buffer") -> None:
    """Refuse a target inside the source's folder, if it is one.

    The folder itself may be replaced, as may a link to it: see `staging`.

    Args:
        target: The file or folder to make.
        source: A buffer, or a file or folder of another format; None of one in memory.
        what: What the source is, for the error.

    Raises:
        FormatError: The target is inside.
    """
    if source is not None and (what == "buffer" or source.is_dir()):
        opening.refuse_inside(target, source, target.parent, what=what)


def selection_of(**options: Any) -> Selection | None:
    """The selection of arguments of `load` and `export`; None where none selects."""
    some = any(
        value is not None and value is not False
        for name, value in options.items()
        if name != "seed"
    )
    return Selection(**options) if some else None


def changes_of(**options: Any) -> Changes | None:
    """The changes of arguments of `load` and `export`; None where nothing changes."""
    there = {name: value for name, value in options.items() if value is not None}
    return Changes(**there) if any(there.values()) or "frame_skip" in there else None


def open_source(
    path: Path, file_format: Format, options: Options, *, stored: bool = False
) -> Reader:
    """Open a source with the options of its format; see `Source.stored`."""
    registry.refuse_unknown(file_format, "open_reader", options)
    opened = registry.open_stored if stored else registry.open_reader
    return opened(file_format, path, **options)


@dataclass(frozen=True, slots=True)
class Source:
    """A source of a conversion.

    Attributes:
        path: Of it; None of a buffer in memory.
        format: Of it.
        options: As its reader takes them.
        buffer: The source itself where it is open.
        stored: The target is of this format as well; see `registry.open_stored`.
        files: Codecs of images that stay files, by the name of their field.
        said: Names of the fields that are cast or dropped. A video that is selected and
            not among them is refused. None: no video is refused for that.
        fields: Names of the fields that are selected; None for all.
    """

    path: Path | None
    format: Format
    options: Options
    buffer: ReplayBuffer | None = None
    stored: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    said: Collection[str] | None = None
    fields: Collection[str] | None = None

    @property
    def name(self) -> Path:
        """Its path, or what stands for it."""
        return self.path or Path("memory")

    def open(self, options: Options) -> Reader:
        """Open it with more options."""
        options = {**self.options, **options}
        if self.buffer is not None:
            return BufferReader(self.buffer, **cast("dict[str, Any]", options))
        assert self.path is not None
        reader = open_source(self.path, self.format, options, stored=self.stored)
        with undone_by(reader.close):
            self._refuse_unsaid(reader)
            for name, codec in self.files.items():
                # A name that is none is refused where fields are cast.
                paths = reader.describe().schema.paths
                for path in {*under(paths, name), *reader.own_names().get(name, ())}:
                    reader.as_files(path, codec)
        return reader

    def _refuse_unsaid(self, reader: Reader) -> None:
        """Refuse videos of which the user does not say what becomes of them.

        Raises:
            FormatError: There are some: their arrays may take a thousand times as much.
        """
        if self.said is None:
            return
        own_names = reader.own_names()

        def is_named(video: str, names: Collection[str]) -> bool:
            paths = own_names.get(video, (video,))
            # What is no text is refused where fields are cast, dropped and selected.
            texts = [name for name in names if isinstance(name, str)]
            return any(name == video or under(paths, name) for name in texts)

        left = [
            video
            for video in reader.videos
            if not is_named(video, self.said)
            and (self.fields is None or is_named(video, self.fields))
        ]
        if left:
            paths = [own_names.get(video, (video,))[0] for video in left]
            casts = " ".join(f"--cast {path}=jpeg:90:420" for path in paths)
            raise FormatError(
                f"{self.name}: nothing says what becomes of the videos of "
                f"{', '.join(map(repr, left))}. Cast them ({casts}, or =uint8 for arrays), or "
                "leave them out with drop= (--drop)."
            )

    def decoding(
        self, lazily: bool, said: Collection[str], fields: Collection[str] | None
    ) -> Source:
        """The same, whose videos are decoded where nothing else is said of them.

        Args:
            lazily: By who needs their frames.
            said: See the class.
            fields: See there.
        """
        if self.stored or "video" in self.options or self.format.name == BUFFER:
            return self
        if "video" not in registry.options_of(self.format, "open_reader"):
            return self
        if lazily:
            return replace(self, stored=True, said=said, fields=fields)
        options = {**self.options, "video": "decode"}
        return replace(self, options=options, said=said, fields=fields)

    def selected(
        self, selection: Selection, progress: Progress | None = None
    ) -> dict[str, Selected]:
        """Open the selected part, where it is the only source; see `select`."""
        options: Options = {}
        if self.format.name == BUFFER:
            # A buffer's reader skips other fields itself.
            if not selection.reads_fields:
                options = {"fields": selection.fields}
                selection = replace(selection, fields=None)
        elif selection.fields is not None and self.takes_fields:
            # It decides between columns that become one field.
            options = {"fields": selection.fields}
        return select(self.open(options), selection, progress)

    @property
    def takes_fields(self) -> bool:
        """Whether the format itself decides by the fields, and is not a buffer's."""
        return self.format.name != BUFFER and "fields" in registry.options_of(
            self.format, "open_reader"
        )


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is read from the sources, and how it is changed.

    Attributes:
        sources: At least one.
        selection: Of all sources together; None for all of their rows and fields.
        changes: Of fields and steps, if any.
        envs: How environments of several sources are joined.
        arrays: Images that are not cast become arrays; see `Format.images`.
    """

    sources: Sequence[Source]
    selection: Selection | None = None
    changes: Changes | None = None
    envs: Envs = "append"
    arrays: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What selects or changes something, by name; nothing of a plain conversion."""
        options: dict[str, Any] = {}
        for each in (self.selection, self.changes):
            options |= {} if each is None else each.options
        return options if len(self.sources) == 1 else {**options, "envs": self.envs}

    def open(self, progress: Progress | None = None) -> dict[str, Selected]:
        """Open what is selected and changed, by the names of splits.

        Args:
            progress: Called with (rows done, rows in all) of each source whose episodes
                are looked at.

        Returns:
            Without splits one, whose name is ``""``.

        Raises:
            ReplayError: Something is wrong with a source, or with what is asked of it.
        """
        selection, changes, sources = self.selection, self.changes, self._cast_sources()
        if len(sources) > 1:
            selection = selection or Selection()
            fields: Options = {}
            if not selection.reads_fields:
                fields = {"fields": selection.fields}
            openers = [
                (each.name, partial(each.open, fields if each.takes_fields else {}))
                for each in sources
            ]
            opened = join(openers, selection, self.envs, progress)
        else:
            with self.naming():
                if selection is None:
                    reader = sources[0].open({})
                    opened = {"": Selected(reader, [Origin(reader.describe())])}
                else:
                    opened = sources[0].selected(selection, progress)
        if changes is None and not self.arrays:
            return opened
        changed = partial(change, changes=changes or Changes(), arrays=self.arrays)
        return {name: replace(each, reader=changed(each.reader)) for name, each in opened.items()}

    def _cast_sources(self) -> Sequence[Source]:
        """The sources, which decode videos and keep files as casts need them."""
        changes = Changes() if self.changes is None else self.changes
        cast, fields = changes.cast, None if self.selection is None else self.selection.fields
        for form in cast.values():
            check_form(form)
        if not cast and not changes.drop and fields is None:
            return self.sources
        files = {name: form for name, form in cast.items() if form in CODECS}
        if changes.map is not None:
            # A function that changes episodes gets arrays.
            files = {}
        said = [*cast, *listed("drop", changes.drop)]
        return [
            replace(each.decoding(changes.keeps_steps, said, fields), files=files)
            for each in self.sources
        ]

    def provenance(self, selected: Selected, target: Path) -> Json | None:
        """What user metadata say of where rows of a target come from, if anything."""
        options = self.options
        if not options:
            return None
        sources = [(each.name.name, each.format.name) for each in self.sources]
        return provenance_of(sources, selected.origins, target.name, options)

    def naming(self) -> AbstractContextManager[None]:
        """Name the only source in errors; several are named as they are read."""
        return name_source(self.sources[0].name) if len(self.sources) == 1 else nullcontext()

    def run(
        self,
        target: Path,
        open_writer: Callable[[Path, Description, bool], Writer],
        *,
        suffix: str = "",
        overwrite: bool = False,
        strict: bool = False,
        progress: Progress | None = None,
        uncompressed: bool = False,
    ) -> Report:
        """Open what is selected and write it; see `write`."""
        opened = self.open()
        with closing_all(opened):
            return self.write(
                opened,
                target,
                open_writer,
                suffix=suffix,
                overwrite=overwrite,
                strict=strict,
                progress=progress,
                uncompressed=uncompressed,
            )

    def write(
        self,
        opened: Mapping[str, Selected],
        target: Path,
        open_writer: Callable[[Path, Description, bool], Writer],
        *,
        suffix: str = "",
        overwrite: bool = False,
        strict: bool = False,
        progress: Progress | None = None,
        uncompressed: bool = False,
    ) -> Report:
        """Write what was opened; the target appears complete, or not at all.

        Args:
            opened: What `open` returned.
            target: A file, or a folder.
            open_writer: Makes a target of a path and a description, perhaps over an
                existing one.
            suffix: Of the name of each split's file.
            overwrite: Replace the target if it exists.
            strict: See `transfer`.
            progress: Called after each block with (rows done, rows in all).
            uncompressed: The target takes about as many bytes as the rows.
        """

        def write_one(name: str, path: Path, overwrite: bool, progress: Progress | None) -> Report:
            return transfer(
                opened[name].reader,
                lambda description: open_writer(path, description, overwrite),
                provenance=self.provenance(opened[name], target),
                strict=strict,
                progress=progress,
                lazy=any(each.stored for each in self.sources),
            )

        with self.naming():
            if uncompressed:
                self._warn_of_size([each.reader.describe() for each in opened.values()])
            if list(opened) == [""]:
                return write_one("", target, overwrite, progress)
            rows = {name: each.reader.describe().rows for name, each in opened.items()}
            return write_splits(
                rows, target, write_one, suffix=suffix, overwrite=overwrite, progress=progress
            )

    def _warn_of_size(self, descriptions: Sequence[Description]) -> None:
        """Say that images are unpacked to many times the size of their source.

        Warns:
            SizeWarning: To more than ten times.
        """
        fields = descriptions[0].schema.fields
        images = {path: field.nbytes for path, field in fields.items() if _is_image(field)}
        nbytes = sum(each.rows for each in descriptions) * sum(images.values())
        folders = [each.path for each in self.sources if each.path and each.path.is_dir()]
        if nbytes < LEAST_EXPANDED_NBYTES or len(folders) < len(self.sources):
            return
        there = sum(map(_nbytes_in, folders))
        if nbytes > EXPANSION * there:
            cast = ", ".join(f"{path!r}: 'jpeg:90:420'" for path in images)
            words = " ".join(f"--cast {path}=jpeg:90:420" for path in images)
            warnings.warn(
                f"images become about {format_size(nbytes)} of arrays, {nbytes // max(1, there)} "
                f"times the {format_size(there)} of {folders[0]}. cast={{{cast}}} "
                f"({words}) stores them in about a twelfth of that.",
                SizeWarning,
                stacklevel=frames_to_caller(),
            )


class SizeWarning(UserWarning):
    """A target takes many times the bytes of its source."""


def _is_image(field: Field) -> bool:
    """Whether a field has arrays that an image field could hold."""
    return field.dtype == "uint8" and len(field.shape) == 3 and field.shape[-1] in (1, 3)


def _nbytes_in(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def closing_all(opened: Mapping[str, Selected]) -> Iterator[None]:
    """Close the readers of what was opened."""
    with ExitStack() as stack:
        for each in opened.values():
            stack.enter_context(each.reader)
        yield


def split_options(source: Format, target: Format, options: Options) -> tuple[Options, Options]:
    """Split options into those of the source and those of the target.

    An option ``from.<name>`` or ``to.<name>`` goes to that side only, any other to each
    side that knows it.

    Raises:
        SchemaError: Neither side knows one of them.
    """
    legal = {
        side: set(registry.options_of(each, side)) - set(SELECTED)
        for each, side in ((source, "open_reader"), (target, "open_writer"))
    }
    split: dict[str, Options] = {side: {} for side in legal}
    for option, value in options.items():
        only, _, name = option.rpartition(".")
        sides = {"from": ["open_reader"], "to": ["open_writer"]}.get(only, [*legal])
        sides = [side for side in sides if name in legal[side]]
        for side in sides:
            split[side][name] = value
        if not sides or only not in ("", "from", "to"):
            known = sorted(set().union(*legal.values()))
            raise SchemaError(
                f"option {option!r} is unknown to {source.name!r} as a source and "
                f"{target.name!r} as a target, which take "
                f"{', '.join(known) or 'none'}. {registry.option_advice(name, known)}"
            )
    return split["open_reader"], split["open_writer"]


@contextmanager
def name_shared_options(options: Options, reading: Options, writing: Options) -> Iterator[None]:
    """Add a note to errors about options that both sides received."""
    both = sorted(options.keys() & reading.keys() & writing.keys())
    try:
        yield
    except ReplayError as error:
        for name in both:
            error.add_note(
                f"option {name!r} was passed to both sides. Use from.{name} or to.{name}."
            )
        raise

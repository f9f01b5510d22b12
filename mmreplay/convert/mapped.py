"""Changes the fields and steps of a reader.

In this order: steps become fewer, a function of the user changes episodes, and fields
are cast, renamed and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmreplay.convert.base import Block, Reader, ReaderOf, default_rows, read_ahead
from mmreplay.convert.by_episode import EachNth, Function, MappedReader, SkipReward
from mmreplay.convert.description import PRIORITY, refuse_new_ends
from mmreplay.convert.select import paths_of
from mmreplay.errors import SchemaError, SourceError, shown, undone_by
from mmreplay.nesting import SEPARATOR, under
from mmreplay.process import thread_pool
from mmreplay.ragged import Ragged
from mmreplay.schema import Field, Schema
from mmreplay.schema.dtypes import bfloat16_bits, canonical_name, from_bfloat16_bits
from mmreplay.schema.images import CODECS, QUALITY
from mmreplay.strict_json import Json

Numbers = NDArray[np.generic]
ENCODED_NBYTES = 32 << 20
"""Of rows whose images are encoded, in a block."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What becomes of fields and steps; none changes by default.

    Attributes:
        frame_skip: So many steps become one; see `EachNth`.
        skip_reward: Which reward these get.
        map: Changes episodes; see `MappedReader`.
        cast: Dtype by path.
        rename: New path by path of a field or subtree.
        drop: Paths or subtrees, by the names of the source.
    """

    frame_skip: int | None = None
    skip_reward: SkipReward | None = None
    map: Function | None = None
    cast: Mapping[str, str] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    drop: Sequence[str] = ()

    @property
    def keeps_steps(self) -> bool:
        """Whether columns are cast, renamed and dropped, and nothing else."""
        return self.frame_skip is None and self.map is None

    @property
    def options(self) -> dict[str, Any]:
        """What changes something, by name."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value}


def change(reader: Reader, changes: Changes, *, arrays: bool = False) -> Reader:
    """A reader of the changed rows, which closes the other one with itself.

    Args:
        reader: Of the rows.
        changes: What becomes of them.
        arrays: Images that are not cast become arrays.

    Raises:
        SchemaError: A field is unknown, two get one name, none is left, a field
            cannot be cast, or another change is none; the reader is closed.
        SourceError: The source contradicts its description.
    """
    with undone_by(reader.close):
        if changes.frame_skip is not None:
            reader = EachNth(reader, changes.frame_skip, changes.skip_reward or "sum")
        elif changes.skip_reward is not None:
            raise SchemaError(
                f"skip_reward needs frame_skip, got {shown(changes.skip_reward)} alone. Pass both."
            )
        if changes.map is not None:
            reader = MappedReader(reader, changes.map)
        fields = reader.describe().schema.fields.values()
        images = arrays and any(field.encoding is not None for field in fields)
        if changes.cast or changes.rename or changes.drop or images:
            reader = ChangedReader(reader, changes, arrays=arrays)
        return reader


class ChangedReader(ReaderOf):
    """Reads the rows of another reader with other fields.

    Statistics, and the name of the buffer, go with a cast that changes values or a new
    name, as they are of the fields before.
    """

    def __init__(self, reader: Reader, changes: Changes, *, arrays: bool = False) -> None:
        """Wrap a reader, which is closed with this one; see `change`."""
        super().__init__(reader)
        description, own_names = reader.describe(), reader.own_names()
        schema = description.schema
        dropped: set[str] = set()
        if changes.drop:
            dropped.update(paths_of(schema.paths, listed("drop", changes.drop), own_names, "drop"))
        self._paths = tuple(path for path in schema.paths if path not in dropped)
        if not self._paths:
            raise SchemaError(
                f"drop leaves no field of {', '.join(schema.paths[:20])}. Drop fewer."
            )
        self._casts: dict[str, Cast | ImageCast] = {}
        for name, dtype in changes.cast.items():
            (path, *more) = paths_of(schema.paths, [name], own_names, "cast")
            if more:
                raise SchemaError(f"cast: {shown(name)} is several fields. Cast each by its path.")
            self._casts[path] = cast_of(path, schema.fields[path], dtype)
        self._casts = {path: cast for path, cast in self._casts.items() if path in self._paths}
        # What changes nothing, and images as arrays, are the same values: what is said
        # of them still holds.
        changed = bool(changes.rename) or any(
            cast.encodes or cast.field.drawn != schema.fields[path].drawn
            for path, cast in self._casts.items()
        )
        if arrays:
            self._cast_to_arrays(schema)
        self._names = {path: path for path in self._paths}
        for name, new in changes.rename.items():
            for path in paths_of(schema.paths, [name], own_names, "rename"):
                top = name if path in under(schema.paths, name) else path
                self._names[path] = _joined(new, path[len(top) :])
        changed_fields = self._changed(schema)
        roles = {
            role: self._names.get(path, changes.rename.get(path, path))
            for role, path in schema.roles.items()
            if any(each in self._paths for each in under(schema.paths, path))
        }
        new_schema = Schema.from_flat(changed_fields, roles)
        used = [name for name in ("rename", "drop") if name in changes.options]
        refuse_new_ends(roles, new_schema, ", ".join(used))
        user = description.user
        if changes.rename and isinstance(imported := user.get("lerobot"), dict):
            user = {**user, "lerobot": self._renamed_features(imported)}
        self._description = replace(
            description,
            schema=new_schema,
            user=user,
            statistics={} if changed else description.statistics,
            uuid="" if changed else description.uuid,
            # Files that are made here take another space than the source's.
            heap_nbytes=description.heap_nbytes if new_schema.varying and not self._encoded else 0,
            values=None,
        )
        reader.only(self._paths)
        self.report.steps += [
            f"{name}: {', '.join(_items(changed_by))}"
            for name, changed_by in changes.options.items()
            if name in ("cast", "rename", "drop")
        ]

    def _cast_to_arrays(self, schema: Schema) -> None:
        """Cast the images to arrays that no cast names."""
        images = {
            path: field.encoding.codec
            for path, field in schema.fields.items()
            if field.encoding is not None and path in self._paths and path not in self._casts
        }
        self._casts |= {path: ImageCast(path, schema.fields[path], "uint8") for path in images}
        if images:
            cast = ", ".join(f"{path!r}: {codec!r}" for path, codec in images.items())
            words = " ".join(f"--cast {path}={codec}" for path, codec in images.items())
            self.report.note(
                f"images of {', '.join(map(repr, images))} become arrays. Parquet keeps their "
                f"files, and so does mr.export with cast={{{cast}}} ({words}) to npz, pt and "
                "safetensors"
            )

    def _renamed_features(self, imported: Json) -> Json:
        """What is known of a LeRobot dataset's features, by the new paths.

        A field with a new path is exported by its path; names of components stay.
        """
        known = imported.get("features")
        features = {}
        for path, feature in known.items() if isinstance(known, dict) else ():
            new = self._names.get(path)
            if new is not None and isinstance(feature, dict):
                names = {"names": feature.get("names")}
                features[new] = feature if new == path else names
        return {**imported, "features": features}

    def _changed(self, schema: Schema) -> dict[str, Field]:
        """The fields that stay, with their new names and dtypes."""
        changed: dict[str, Field] = {}
        for path in self._paths:
            new = self._names[path]
            if new in changed:
                raise SchemaError(f"two fields would be named {new!r}. Rename or drop one of them.")
            cast = self._casts.get(path)
            changed[new] = schema.fields[path] if cast is None else cast.field
        return changed

    def blocks(self, rows_per_block: int | None = None) -> Iterator[Block]:
        """See `Reader.blocks`."""
        if any(cast.recodes for cast in self._casts.values()):
            # By what is in memory, which are arrays: files of images may be small.
            source = self._reader.describe()
            source = replace(source, schema=source.schema.drawn)
            rows = default_rows(source)
            if self._encoded:
                # More than of arrays that go to a file: each read has its price.
                rows = max(rows, ENCODED_NBYTES // max(1, source.row_nbytes))
            rows_per_block = min(rows, rows_per_block or rows)
        blocks = self._reader.blocks(rows_per_block)
        for block in self._decoded(blocks) if self._encoded else blocks:
            columns = {}
            for path in self._paths:
                cast = self._casts.get(path)
                columns[self._names[path]] = block.columns[path] if cast is None else cast(block)
            if PRIORITY in block.columns:
                columns[PRIORITY] = block.columns[PRIORITY]
            yield replace(block, columns=columns)
        for cast in self._casts.values():
            if (said := cast.said) is not None:
                self.report.note(said)

    def _decoded(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """The same blocks, in which the frames that are cast are read.

        Threads decode the next block, one a camera, while one is encoded. Where a block
        still has frames to decode, none is read ahead: its taker may decode them, and a
        source is read by one thread at a time.
        """
        with thread_pool(len(self._casts), "mmreplay-decode") as pool:

            def read(block: Block) -> Block:
                columns = {path: block.columns[path] for path in self._casts}
                lazy = {path: each for path, each in columns.items() if _is_lazy(each)}
                arrays = zip(lazy, pool.map(np.asarray, lazy.values()), strict=True)
                return replace(block, columns={**block.columns, **dict(arrays)})

            made = map(read, blocks)
            for first in made:
                yield first
                stays = any(map(_is_lazy, first.columns.values()))
                yield from made if stays else read_ahead(made)

    def measures(self) -> Iterator[Block]:
        """See `Reader.measures`."""
        if self._encoded:
            # Their lengths are known when they are encoded.
            yield from Reader.measures(self)
            return
        yield from self._lengths(self._reader.measures())

    def bounds(self) -> Callable[[], Iterator[Block]] | None:
        """See `Reader.bounds`."""
        if not self._encoded:
            return None
        others = self._reader.describe().schema.varying
        read = self._reader.measures if others else self._reader.marks
        return lambda: self._lengths(read())

    @property
    def _encoded(self) -> list[str]:
        """Paths of the fields whose images are encoded here."""
        return [path for path, cast in self._casts.items() if cast.encodes]

    def _lengths(self, blocks: Iterator[Block]) -> Iterator[Block]:
        """Lengths of values by their new paths; of images the most that they may be."""
        encoded = {p: self._casts[p].field.max_length for p in self._encoded}
        for block in blocks:
            columns: dict[str, Any] = {}
            for path in self._paths:
                if path in encoded:
                    columns[self._names[path]] = np.full(len(block), encoded[path], np.int64)
                elif path in block.columns and self._description.schema[self._names[path]].varies:
                    columns[self._names[path]] = block.columns[path]
            yield replace(block, columns=columns)


def _is_lazy(column: Any) -> bool:
    """Whether a column is still to be read, such as frames of a video."""
    return not isinstance(column, np.ndarray | Ragged)


def check_form(form: object) -> None:
    """Refuse what no field can be cast to, before a source is opened.

    Raises:
        SchemaError: It is no dtype, and no codec of images.
    """
    head, colon, rest = form.partition(":") if isinstance(form, str) else ("", "", "")
    if head in CODECS:
        return
    if head.lower() in ("jpg", *CODECS):
        meant = "png" if head.lower() == "png" else f"jpeg{colon}{rest}"
        raise SchemaError(
            f"cast: images become jpeg, jpeg:90:420, png or uint8, got {shown(form)}. Did you "
            f"mean {meant!r}?"
        )
    try:
        canonical_name(form)
    except SchemaError as error:
        raise SchemaError(f"cast: {error} Images also become jpeg:90:420 or png.") from None


def cast_of(path: str, field: Field, dtype: str) -> Cast | ImageCast:
    """What casts a field to a dtype, or images to another form.

    Args:
        path: Of the field.
        field: As it is.
        dtype: Such as ``"float32"``; ``"jpeg"``, ``"jpeg:90"``, ``"jpeg:90:420"`` or
            ``"png"`` encodes images, and ``"uint8"`` decodes them.

    Raises:
        SchemaError: The field cannot become that.
    """
    codec = dtype.partition(":")[0].lower() if isinstance(dtype, str) else ""
    if codec in CODECS or field.encoding is not None:
        return ImageCast(path, field, dtype)
    return Cast(path, field, dtype)


class ImageCast:
    """Images in another form: arrays are encoded, and files decoded.

    Attributes:
        path: Of the field.
        field: As it becomes.
    """

    def __init__(self, path: str, field: Field, form: str) -> None:
        """Check that the field has images, and that they can be stored so.

        Raises:
            SchemaError: One is not so.
        """
        arrays = field.drawn
        self.path, self._from = path, field
        if form == "uint8":
            self.field = arrays
            return
        if field.encoding is not None and form == field.encoding.codec:
            self.field = field
            return
        codec, *numbers = form.split(":") if isinstance(form, str) else [shown(form)]
        legal = codec in CODECS and len(numbers) <= (2 if codec == "jpeg" else 0)
        if not legal or not all(number.isascii() and number.isdecimal() for number in numbers[:1]):
            raise SchemaError(
                f"cast: images of field {path!r} become uint8, png, or jpeg with quality and "
                f"subsampling, such as jpeg:90:420, got {shown(form)}. Write one of these."
            )
        if arrays.varies or arrays.dtype != "uint8" or len(arrays.shape) != 3:
            raise SchemaError(
                f"cast: field {path!r} must be images uint8 [height, width, 1 or 3] to become "
                f"{form}, got {arrays.description}. Cast other fields to a dtype."
            )
        if arrays.mutable:
            raise SchemaError(
                f"cast: field {path!r} is mutable, and images never change. Cast another field."
            )
        quality = int(numbers[0]) if numbers else QUALITY if codec == "jpeg" else None
        subsampling = numbers[1] if len(numbers) > 1 else None
        self.field = Field.image(arrays.shape, codec, quality, subsampling)  # type: ignore[arg-type]  # checked there

    @property
    def recodes(self) -> bool:
        """Whether images are encoded or decoded."""
        return self.field != self._from

    @property
    def encodes(self) -> bool:
        """Whether the lengths of values are known when they are made."""
        return self.field.varies and self.recodes

    @property
    def said(self) -> str | None:
        """What the report says of it."""
        if self.field.encoding is None:
            return None
        if self.field == self._from:
            return f"images of field {self.path!r} stay the files that they are"
        lossy = ", which changes them" if self.field.encoding.codec == "jpeg" else ""
        return f"images of field {self.path!r} are stored as {self.field.encoding.options}{lossy}"

    def __call__(self, block: Block) -> Any:
        """Images ``[N, height, width, channels]``, or `Ragged` of their files.

        Raises:
            SourceError: A file is damaged.
        """
        column: Any = block.columns[self.path]
        if self.field == self._from:
            return column
        if self._from.encoding is not None:
            column, damage = self._from.rules.decode(self._from, column, None)
            for number, what in damage.items():
                raise SourceError(
                    f"field {self.path!r}: the image of environment {block.env_ids[number]}, "
                    f"position {block.positions[number]} as the target counts, is no "
                    f"{self._from.description} ({what}). The source is damaged: drop the field, "
                    "leave out the episode, or restore the source from a copy."
                )
        return self.field.rules.convert(self.field, column, self.path, (len(column),))


class Cast:
    """Values of a field in another dtype.

    Attributes:
        path: Of the field.
        field: As it becomes.
        error: The largest relative error of a float so far.
    """

    encodes = recodes = False

    @property
    def said(self) -> str | None:
        """What the report says of it."""
        if not self.error:
            return None
        return (
            f"field {self.path!r} was rounded to {self.field.dtype}, by at most "
            f"{self.error:.2g} of a value"
        )

    def __init__(self, path: str, field: Field, dtype: str) -> None:
        """Check that the field can become one of the dtype.

        Raises:
            SchemaError: It cannot.
        """
        name = canonical_name(dtype)
        if field.varies:
            raise SchemaError(
                f"cast: values of field {path!r} have any length, and stay as they are. Cast "
                "fields of one shape."
            )
        self.path, self._from, self.error = path, field, 0.0
        self.field = Field(field.shape, name, exact=field.exact, mutable=field.mutable)

    def __call__(self, block: Block) -> Numbers:
        """Values ``[N, *shape]`` in the new dtype.

        Raises:
            SourceError: One does not fit.
        """
        column = np.asarray(block.columns[self.path])
        numbers = self._from.rules.numbers(self._from, column)
        assert numbers is not None
        dtype = self.field.dtype
        if dtype == self._from.dtype:
            return column
        with np.errstate(all="ignore"):
            if dtype == "bfloat16":
                cast = bfloat16_bits(np.asarray(numbers, np.float64)).astype("<u2")
                back = from_bfloat16_bits(cast).astype(np.float64)
            else:
                cast = numbers.astype(self.field.numpy)
                back = cast
            if "float" in dtype:
                before = np.asarray(numbers, np.float64)
                wrong = np.isfinite(before) & ~np.isfinite(back)
                relative = np.abs(before - back) / np.abs(before)
                rounded = np.isfinite(before) & (before != 0) & ~wrong
                if rounded.any():
                    self.error = max(self.error, float(relative[rounded].max()))
                if numbers.dtype.kind in "iu":
                    # float64 holds no larger integers exactly: Python's are compared.
                    large = (np.abs(before) >= 1 << 53) & ~wrong
                    for value, got in zip(
                        numbers[large].tolist(), back[large].tolist(), strict=True
                    ):
                        self.error = max(self.error, abs(int(got) - value) / abs(value))
            else:
                # By value: an integer that wraps, a fraction, NaN.
                wrong = np.asarray(cast != numbers, bool)
        if wrong.any():
            value = numbers[wrong][0]
            raise SourceError(
                f"cast: field {self.path!r} has the value {value}, which {dtype} does not hold. "
                "Cast it to another dtype."
            )
        return cast


def _items(paths: Mapping[str, str] | Sequence[str]) -> list[str]:
    pairs = paths.items() if isinstance(paths, Mapping) else [(path, "") for path in paths]
    return [f"{path} to {value}" if value else path for path, value in pairs]


def listed(name: str, value: Sequence[str]) -> Sequence[str]:
    """What a user names, which must be several paths.

    Raises:
        SchemaError: It is no list.
    """
    if isinstance(value, str):
        raise SchemaError(f"{name} must be a list of paths, got {value!r}. Pass [{value!r}].")
    if not isinstance(value, Collection):
        raise SchemaError(f"{name} must be a list of paths, got {shown(value)}. Pass a list.")
    return value


def _joined(new: str, rest: str) -> str:
    """A new path, and what stands below the one that it replaces."""
    if not isinstance(new, str) or not new:
        raise SchemaError(f"rename: a path must be a text, got {shown(new)}. Pass such as 'a/b'.")
    return new + rest if not rest or rest.startswith(SEPARATOR) else rest

"""The formats of files, by name and by suffix.

A new format is a module and one line in `OURS` or `FOREIGN`; a package adds its own by
an entry point of the group ``mmreplay.formats`` that names a `Format`. The module has
``open_reader(path, **options)``,
``open_writer(target, description, *, overwrite, **options)`` or both. If the format
shares a suffix with others or reads folders, it also has ``recognizes(path) -> bool``,
and to size or refuse a target before it is written,
``planned(description, **options)``.

A `FileLayout` is how another library names and arranges the arrays in files of such a
format; `LAYOUTS` lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from mmreplay.convert.base import MAX_ROW_NBYTES, Appender, Reader, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.staging import STAGED
from mmreplay.disk.address import URL_SCHEME, url_of
from mmreplay.errors import FormatError, SchemaError, shown
from mmreplay.format.metadata import FILE_NAME as METADATA
from mmreplay.nesting import meant
from mmreplay.schema.schema import refuse_varying

BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: Value of ``format=``, ``--from`` and ``--to``.
        home: Name of its module, imported on first use.
        about: A description in a few words.
        suffixes: Endings of its files' names, in lower case; none for folders.
        reads: It can be a source.
        writes: It can be a target.
        asks: Its module has ``recognizes``, which decides for a path with its suffix,
            or for a folder. Such formats come before those with the suffix only.
        varies: Its writer takes fields that vary: columns of blocks are `Ragged`.
        images: Its writer takes the files of image fields; others get arrays.
        appends: Its module has ``open_appender``, with the options of its writer.
    """

    name: str
    home: str
    about: str
    suffixes: tuple[str, ...] = ()
    reads: bool = True
    writes: bool = True
    asks: bool = False
    varies: bool = False
    images: bool = False
    appends: bool = False

    def takes_images(self, options: Mapping[str, object]) -> bool:
        """Whether it takes files of images with these options of its writer.

        Layouts of other libraries have arrays.
        """
        return self.images and options.get("layout") is None


BUFFERS = Format(
    BUFFER, "mmreplay.convert.buffer_reader", "a buffer's folder", varies=True, images=True
)
OURS = (
    BUFFERS,
    Format("npz", "mmreplay.convert.npz", "numpy arrays in a zip", (".npz",), varies=True),
    Format("pt", "mmreplay.convert.pt", "a dict of torch tensors", (".pt", ".pth"), varies=True),
    Format(
        "safetensors",
        "mmreplay.convert.safetensors",
        "tensors under a JSON header",
        (".safetensors", ".safetensors.index.json"),
        varies=True,
    ),
    Format(
        "safetensors-folder",
        "mmreplay.convert.safetensors",
        "a folder of its parts, or velora's pair",
        writes=False,
        asks=True,
    ),
    Format(
        "csv",
        "mmreplay.convert.csv",
        "a table of text",
        (".csv", ".csv.gz"),
        varies=True,
        images=True,
    ),
    Format(
        "parquet",
        "mmreplay.convert.parquet",
        "a table, or a folder of part files",
        (".parquet", ".pq"),
        varies=True,
        images=True,
    ),
    Format(
        "parquet-folder",
        "mmreplay.convert.parquet",
        "a folder of parquet files",
        writes=False,
        asks=True,
    ),
)
_HDF5, _TORCH = (".hdf5", ".h5"), (".pt", ".pth")
FOREIGN = (
    Format("d4rl", "mmreplay.datasets.d4rl", "D4RL's HDF5", _HDF5, asks=True),
    Format(
        "minari", "mmreplay.datasets.minari", "a Minari dataset's folder", asks=True, images=True
    ),
    Format(
        "robomimic",
        "mmreplay.datasets.robomimic",
        "robomimic's HDF5",
        _HDF5,
        writes=False,
        asks=True,
    ),
    Format(
        "sb3",
        "mmreplay.adapters.sb3.files",
        "Stable-Baselines3's pickled buffer",
        (".pkl",),
        writes=False,
        asks=True,
    ),
    Format(
        "tmrl",
        "mmreplay.adapters.tmrl.files",
        "tmrl's data.pkl",
        (".pkl",),
        writes=False,
        asks=True,
    ),
    Format(
        "alf",
        "mmreplay.adapters.alf.files",
        "alf's replay buffer in a checkpoint",
        _TORCH,
        writes=False,
        asks=True,
    ),
    Format(
        "pytorchrl",
        "mmreplay.adapters.pytorchrl.files",
        "pytorchrl's storage",
        _TORCH,
        writes=False,
        asks=True,
    ),
    Format(
        "dqn-replay",
        "mmreplay.datasets.dqn_replay",
        "a folder of DQN Replay",
        writes=False,
        asks=True,
    ),
    Format(
        "lerobot",
        "mmreplay.datasets.lerobot",
        "a LeRobot dataset's folder",
        asks=True,
        varies=True,
        images=True,
        appends=True,
    ),
    Format("rlds", "mmreplay.datasets.rlds", "an RLDS dataset's folder", writes=False, asks=True),
    Format(
        "zarr", "mmreplay.datasets.zarr", "a Zarr group, also at s3://", writes=False, asks=True
    ),
    Format(
        "zarr-zip",
        "mmreplay.datasets.zarr",
        "a Zarr group in a zip file",
        (".zip",),
        writes=False,
        asks=True,
    ),
)
"""Formats of other libraries and of published datasets, which are read."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Names and arrangement of another library's arrays in files of our formats.

    Attributes:
        name: The value of ``layout=``.
        module: The module that reads and writes it, a `LayoutModule`, imported on first
            use.
        formats: Names of the formats that it is found in.
        file_names: Glob pattern. The module is asked whether it recognizes a file of
            such a name, or a folder that holds one; other files do not import it.
    """

    name: str
    module: str
    formats: tuple[str, ...]
    file_names: str


class LayoutModule(Protocol):
    """The functions of a layout's module; each takes the name of the format first."""

    def recognizes(self, path: Path, /) -> bool:
        """Return whether a file or folder is of this layout."""

    def open_reader(self, format: str, path: Path, /, **options: Any) -> Reader:
        """Open a source."""

    def open_writer(
        self,
        format: str,
        target: Path,
        description: Description,
        /,
        *,
        overwrite: bool,
        **options: Any,
    ) -> Writer:
        """Make a target."""

    def planned(self, format: str, description: Description, /, **options: Any) -> None:
        """Refuse what the layout cannot hold; write nothing."""


LAYOUTS = (
    FileLayout("skrl", "mmreplay.adapters.skrl.files", ("npz", "pt", "csv"), "*_memory_0x*.*"),
    FileLayout("velora", "mmreplay.adapters.velora.files", ("safetensors",), "*state.safetensors"),
)


GROUP = "mmreplay.formats"


@cache
def formats() -> dict[str, Format]:
    """All formats by name, those of entry points included.

    An entry point that cannot be loaded is left out, so that all others work. `named`
    raises its error.
    """
    known = {each.name: each for each in (*OURS, *FOREIGN)}
    for point in _points():
        loaded = _loaded(point, known)
        if isinstance(loaded, Format):
            known[loaded.name] = loaded
    return known


@contextmanager
def registered(own: Format) -> Iterator[None]:
    """Add a format for a while, as an entry point adds it, to this process.

    Raises:
        SchemaError: Another format has its name.
    """
    known = formats()
    if known.get(own.name, own) != own:
        raise SchemaError(f"format {own.name!r} exists already. Give the new format another name.")
    if own.name in known:
        yield
        return
    known[own.name] = own
    try:
        yield
    finally:
        del known[own.name]


def _points() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


def _loaded(point: EntryPoint, known: Collection[str]) -> Format | str:
    """The format of an entry point, or the message of its error."""
    try:
        loaded = point.load()
    except Exception as error:
        # Another package's module runs here: it may raise anything.
        loaded = f"{type(error).__name__} ({error})"
    if isinstance(loaded, Format) and loaded.name not in known:
        return loaded
    return (
        f"entry point {point.name!r} of {GROUP} must be a "
        f"mmreplay.convert.registry.Format of a new name, got {loaded!r}. Update or "
        "remove the package"
    )


def _failed() -> dict[str, str]:
    """Messages of the entry points without a format, by their names."""
    known, failed = {each.name for each in (*OURS, *FOREIGN)}, {}
    for point in _points():
        loaded = _loaded(point, known)
        if isinstance(loaded, Format):
            known.add(loaded.name)
        else:
            failed[point.name] = loaded
    return failed


def _or_failed() -> str:
    """The end of an error about a path of no known format."""
    return "".join(f" {each}" for each in _failed().values())


def named(name: str, able: str = "name") -> Format:
    """The format of a name.

    Args:
        name: As the user named it.
        able: ``"reads"`` or ``"writes"``: the error lists only such formats.

    Raises:
        SchemaError: There is no such format.
        FormatError: The entry point of that name cannot be loaded.
    """
    known = formats()
    failed = {} if name in known else _failed()
    if name in failed:
        raise FormatError(failed[name])
    if name not in known:
        fit = sorted(each.name for each in known.values() if getattr(each, able))
        otherwise = "Install the package that adds it, or choose another."
        raise SchemaError(
            f"format must be one of {', '.join(fit)}, got {shown(name)}. "
            f"{meant(name, fit, otherwise)}"
        )
    return known[name]


def source_format(path: Path, name: str | None = None) -> Format:
    """The format to read a path with.

    Args:
        path: A file or folder.
        name: Of the format, if the user named it; None looks into the path.

    Raises:
        FormatError: The path does not exist, or is of no known format.
    """
    if name is not None:
        return _able(named(name, "reads"), "reads", "read")
    text = str(path)
    if text.startswith(URL_SCHEME) and url_of(text) is not None:
        return formats()["zarr"]
    if (path / METADATA).exists() and not _asked(path):
        return formats()[BUFFER]
    if not path.exists():
        raise FormatError(
            f"{path} does not exist. Check the path of the buffer or file to convert."
        )
    asked = _asked(path)
    if asked is not None:
        return asked
    fitting = [each for each in _by_suffix(path) if each.reads]
    for each in fitting:
        if not each.asks:
            return each
    kind = "folder" if path.is_dir() else "file"
    if fitting:
        raise FormatError(
            f"{path} is a {kind} of no known format. Its name fits "
            f"{', '.join(each.name for each in fitting)}: pass format= (--from) with one "
            f"of them to see what is missing.{_or_failed()}"
        )
    raise FormatError(
        f"{path} must be a buffer or one of {', '.join(_endings('reads'))}, got a "
        f"{kind} of no "
        f"known format. Name the format with format= (--from).{_or_failed()}"
    )


def target_format(path: Path, name: str | None = None) -> Format:
    """The format to write a path with: by suffix, else a buffer.

    Raises:
        FormatError: No format of the suffix can be written.
    """
    if name is not None:
        return _able(named(name, "writes"), "writes", "write")
    fitting = _by_suffix(path)
    for each in fitting:
        if each.writes:
            return each
    if fitting or path.suffix:
        endings = _endings("writes")
        advice = meant(path.suffix.lower(), endings, "Name the format with format= (--to).")
        raise FormatError(
            f"{path}: mmreplay writes no format of this name, only "
            f"{', '.join(endings)} or a folder. {advice}{_or_failed()}"
        )
    return formats()[BUFFER]


def split_suffix(file_format: Format, folder: Path) -> str:
    """The ending of the names of files of a format in a folder of splits.

    Raises:
        FormatError: The folder has the name of a file.
    """
    if _by_suffix(folder):
        raise FormatError(
            f"{folder} must be the name of a folder, as splits are several files, got one of a "
            f"file. Leave out its suffix, and pass format={file_format.name!r} (--to "
            f"{file_format.name})."
        )
    return next(iter(file_format.suffixes), "")


def _able(file_format: Format, attribute: str, verb: str) -> Format:
    if getattr(file_format, attribute):
        return file_format
    able = [each.name for each in formats().values() if getattr(each, attribute)]
    raise SchemaError(
        f"format must be one of {', '.join(sorted(able))}, got {file_format.name!r}, "
        f"which mmreplay does not {verb}."
    )


def _by_suffix(path: Path) -> list[Format]:
    """Formats with the suffix of a path's name, the longest suffix first."""
    name = path.name.lower()
    fitting = [
        (len(suffix), each)
        for each in formats().values()
        for suffix in each.suffixes
        if name.endswith(suffix)
    ]
    return [each for _, each in sorted(fitting, key=lambda pair: -pair[0])]


def _asked(path: Path) -> Format | None:
    """The first format whose module recognizes a path."""
    candidates: Iterable[Format] = _by_suffix(path)
    if path.is_dir():
        candidates = [each for each in formats().values() if not each.suffixes]
    elif not candidates:
        # Such as alf's ckpt-100: the content alone says what it is.
        candidates = [each for each in formats().values() if each.suffixes]
    for each in candidates:
        if each.asks and each.reads and _function(each, "recognizes")(path):
            return each
    return None


def _endings(does: str) -> list[str]:
    able = [each for each in formats().values() if getattr(each, does)]
    return sorted({suffix for each in able for suffix in each.suffixes})


def misnamed(found: Format, target: Path) -> str | None:
    """A note about a target whose suffix is not one of its format; None without one."""
    fitting = _by_suffix(target)
    if found in fitting or not target.suffix or not (fitting or found.suffixes):
        return None
    return (
        f"{target.name} does not end as {found.name} does: name the format with "
        f"format={found.name!r} (--from {found.name}) to read it"
    )


def _function(file_format: Format, name: str) -> Callable[..., Any]:
    return _imported(file_format.home, name)


def _imported(home: str, name: str) -> Callable[..., Any]:
    return cast("Callable[..., Any]", getattr(import_module(home), name))


def open_reader(found: Format, path: Path, **options: object) -> Reader:
    """Open a source.

    Raises:
        SchemaError: An option is not one of the format's.
        FormatError: The source is not of the format.
    """
    if path.name.startswith(STAGED):
        raise FormatError(
            f"{path} is the unfinished target of a conversion that was stopped. Run "
            "that conversion again, or rename the path to read it."
        )
    function = _function(found, "open_reader")
    _check_options(found, function, options)
    return cast("Reader", function(path, **options))


def open_stored(found: Format, path: Path, **options: object) -> Reader:
    """Open a source for a target of its own format; see `open_reader`.

    The function ``open_stored(path, **options)`` of the format's module, if there is
    one, may leave columns as they are stored, for a writer of that module.
    """
    function = getattr(import_module(found.home), "open_stored", None)
    if function is None or path.name.startswith(STAGED):
        return open_reader(found, path, **options)
    _check_options(found, _function(found, "open_reader"), options)
    return cast("Reader", function(path, **options))


def open_writer(
    found: Format, target: Path, description: Description, *, overwrite: bool, **options: object
) -> Writer:
    """Open a target; see `open_reader`.

    A target that is named as if it were of another format gets a note.

    Raises:
        SchemaError: As there; or rows are too large to be read again.
    """
    function = _function(found, "open_writer")
    _check_options(found, function, options)
    _refuse_rows(found, description, options.get("layout"))
    writer = cast("Writer", function(target, description, overwrite=overwrite, **options))
    note = misnamed(found, target)
    if note is not None:
        writer.notes.note(note)
    return writer


def open_appender(
    found: Format, target: Path, description: Description, *, overwrite: bool, **options: object
) -> Appender:
    """Open a target to append to; see `open_reader`.

    Raises:
        SchemaError: As there; or nothing can be appended to the format.
        FormatError: The target is not one of appends of this source.
    """
    if not found.appends:
        able = [each.name for each in formats().values() if each.appends]
        raise SchemaError(
            f"format must be one that episodes are appended to, {', '.join(able)}, got "
            f"{found.name!r}. Name one with format= (--to)."
        )
    function = _function(found, "open_appender")
    _check_options(found, _function(found, "open_writer"), options)
    _refuse_rows(found, description, None)
    return cast("Appender", function(target, description, overwrite=overwrite, **options))


def planned(
    found: Format, description: Description, *, target: Path | None = None, **options: object
) -> int | None:
    """Bytes of a target, if its format can predict them; writes nothing.

    The function ``planned(description, **options)`` of the format's module returns
    them, and refuses what `open_writer` would refuse. If it has a parameter ``target``,
    it receives the path, if that is known.

    Raises:
        SchemaError: An option is not one of the format's, or it cannot hold a field.
    """
    _check_options(found, _function(found, "open_writer"), options)
    _refuse_rows(found, description, options.get("layout"))
    function = getattr(import_module(found.home), "planned", None)
    if function is None:
        return None
    if "target" in inspect.signature(function).parameters:
        options["target"] = target
    return cast("int | None", function(description, **options))


def _refuse_rows(file_format: Format, description: Description, layout: object) -> None:
    """Refuse rows that a format cannot hold: that vary, or are too large to be read.

    Values that vary are measured only as they come, and a buffer's rows may have any
    size.
    """
    if not file_format.varies:
        fields = description.schema.fields if file_format.images else {}
        images = [path for path, each in fields.items() if each.encoding is not None]
        refuse_varying(description.schema, f"format {file_format.name!r}", but=images)
    if layout is not None:
        refuse_varying(description.schema, f"layout {layout!r}")
    if file_format.name != BUFFER and description.row_nbytes > MAX_ROW_NBYTES:
        raise SchemaError(
            f"rows of {description.row_nbytes} bytes are too large for "
            f"{file_format.name}, whose rows have at most {MAX_ROW_NBYTES}. Leave a "
            "field out with fields=, or split it."
        )


def find_layout(
    format_name: str, layout: str | None, path: Path | None = None
) -> LayoutModule | None:
    """The module of another library's layout, or None for mmreplay's own.

    Args:
        format_name: The format of the file.
        layout: The value of ``layout=``.
        path: A source; its name and content decide where ``layout`` is None.

    Raises:
        SchemaError: The format has no layout of that name.
    """
    known = [each for each in LAYOUTS if format_name in each.formats]
    for each in known:
        if layout == each.name:
            return cast("LayoutModule", import_module(each.module))
    if layout is not None:
        names = " or ".join(repr(each.name) for each in known)
        raise SchemaError(f"layout must be {names}, or None for mmreplay's own, got {layout!r}.")
    if path is None:
        return None
    for each in known:
        if path.is_dir():
            fits = any(path.glob(each.file_names))
        else:
            fits = path.match(each.file_names)
        if fits:
            module = cast("LayoutModule", import_module(each.module))
            if module.recognizes(path):
                return module
    return None


def refuse_layout_options(format_name: str, **options: object) -> None:
    """Refuse options that belong to another library's layout where there is none.

    Raises:
        SchemaError: One of them is not None.
    """
    for name, value in options.items():
        if value is not None:
            layouts = [each.name for each in LAYOUTS if format_name in each.formats]
            wanted = " or ".join(f"layout={layout!r}" for layout in layouts)
            raise SchemaError(
                f"{name} needs {wanted}, got {value!r} without a layout. Pass the "
                f"layout as well, or leave {name} out."
            )


def options_of(file_format: Format, function: str) -> tuple[str, ...]:
    """Names of a format's own options of ``open_reader`` or ``open_writer``."""
    return _options(_function(file_format, function))


def refuse_unknown(file_format: Format, function: str, options: dict[str, object]) -> None:
    """Refuse what is not an option of a format's ``open_reader`` or ``open_writer``.

    Those take options as keywords, beside arguments of their own: an option with the
    name of such an argument is refused.

    Raises:
        SchemaError: There is one.
    """
    _check_options(file_format, _function(file_format, function), options)


def _options(function: Callable[..., Any]) -> tuple[str, ...]:
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    return tuple(name for name in names if name != "overwrite")


def _check_options(
    file_format: Format, function: Callable[..., Any], options: dict[str, object]
) -> None:
    legal = _options(function)
    unknown = sorted(set(options) - set(legal))
    if unknown:
        reads = function.__name__ == "open_reader"
        side, caller = ("source", "load") if reads else ("target", "export")
        # Their own arguments are options to a user, who may misspell one.
        own = _options(_imported(f"mmreplay.convert.{caller}", caller))
        raise SchemaError(
            f"option {unknown[0]!r} is unknown to {file_format.name!r} as a {side}, "
            f"which takes {', '.join(legal) or 'none'}. "
            f"{option_advice(unknown[0], (*legal, *own, 'overwrite'))}"
        )
    for name, each in inspect.signature(function).parameters.items():
        if isinstance(each.default, bool) and not isinstance(
            options.get(name, False), (bool, np.bool_)
        ):
            raise SchemaError(
                f"option {name!r} must be true or false, got {options[name]!r}. Leave "
                f"it out for {str(each.default).lower()}."
            )


def option_advice(option: str, known: Iterable[str]) -> str:
    """The advice for an option that a format does not have.

    Args:
        option: Its name.
        known: Names of options that may be passed.
    """
    sides = (("reads", "open_reader"), ("writes", "open_writer"))
    takers = [
        each.name
        for each in formats().values()
        if any(getattr(each, does) and option in options_of(each, side) for does, side in sides)
    ]
    if takers:
        verb = "takes" if len(takers) == 1 else "take"
        return f"Leave it out, or use {' or '.join(takers)}, which {verb} it."
    return meant(option, known, "Leave it out.")

"""Gymnasium's spaces as Minari's JSON tells them, read and made.

Episodes of Minari's main_data.hdf5.

Steps written as a Minari dataset of HDF5, which ``minari.load_dataset`` opens.

Minari's datasets: a folder of metadata.json and episodes of T + 1 observations.

The folder is the dataset's (``~/.minari/datasets/<name>-v0``) or its ``data``. Spaces
and other metadata go along as text, so that a dataset written again has them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmreplay import strict_json
from mmreplay.convert.base import Block, Notes, Writer, refuse_empty
from mmreplay.convert.description import Description
from mmreplay.convert.staging import Staging
from mmreplay.datasets import images
from mmreplay.datasets.common import (
    Array,
    Flags,
    Fragment,
    FragmentReader,
    Later,
    Rows,
    TransitionMaker,
    Transitions,
    ends_of,
    kept_of,
    make_schema,
    quartered,
    refuse_clashes,
    scalar,
)
from mmreplay.datasets.hdf5 import Hdf5, Hdf5Output, refuse_unfit
from mmreplay.datasets.images import LOSSY, ImageRows
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import FormatError, ReplayError, SchemaError
from mmreplay.schema import Field
from mmreplay.strict_json import Json

LEAST_SIDE = 32
"""Minari takes smaller boxes of bytes for no images."""


def leaf_of(space: Any, path: str) -> Any:
    """The space of a leaf, by its path below the whole one; None if there is none."""
    for name in path.split("/") if path else ():
        below = space.get("subspaces") if isinstance(space, dict) else None
        if isinstance(below, list) and name.isdecimal() and int(name) < len(below):
            space = below[int(name)]
        elif isinstance(below, dict):
            space = below.get(name)
        else:
            return None
    return space


def is_image(space: Any) -> bool:
    """Whether Minari takes a space for one of images, and keeps them as JPEG."""
    if not isinstance(space, dict) or space.get("type") != "Box":
        return False
    shape = space.get("shape")
    return (
        space.get("dtype") == "uint8"
        and isinstance(shape, list)
        and len(shape) in (2, 3)
        and all(isinstance(side, int) and side >= LEAST_SIDE for side in shape[:2])
    )


def box(field: Field) -> dict[str, Any]:
    """The widest space of a field's values."""
    kind = np.dtype(field.dtype).kind
    low, high = -np.inf, np.inf
    if kind in "iu":
        bounds = np.iinfo(field.dtype)
        low, high = bounds.min, bounds.max
    elif kind == "b":
        low, high = 0, 1
    return {
        "type": "Box",
        "dtype": field.dtype,
        "shape": list(field.shape),
        "low": _filled(field.shape, low),
        "high": _filled(field.shape, high),
    }


def _filled(shape: tuple[int, ...], value: float) -> Any:
    return np.full(shape, value, object).tolist() if shape else value


def discrete(least: int, most: int) -> dict[str, Any]:
    """The space of integers seen from least to most, from 0 if none is below it."""
    start = min(0, least)
    return {"type": "Discrete", "dtype": "int64", "start": start, "n": most - start + 1}


def nested(leaves: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The space of leaves by path below a role, one leaf of path ``""`` itself."""
    if "" in leaves:
        return leaves[""]
    tops: dict[str, dict[str, dict[str, Any]]] = {}
    for path, space in leaves.items():
        top, _, rest = path.partition("/")
        tops.setdefault(top, {})[rest] = space
    return {
        "type": "Dict",
        "subspaces": {top: nested(below) for top, below in tops.items()},
    }


def names_of(text: object, path: str) -> list[str]:
    """Names of a leaf's groups in Minari's HDF5, where items of a tuple have others."""
    names, space = [], parse(text)
    for name in path.split("/") if path else ():
        is_tuple = isinstance(space, dict) and space.get("type") == "Tuple"
        names.append(f"_index_{name}" if is_tuple else name)
        space = leaf_of(space, name)
    return names


def fits(text: object, fields: Mapping[str, Field]) -> bool:
    """Whether a space's JSON has a leaf of the shape of every field, and no others.

    Args:
        text: The JSON.
        fields: By path below the role.
    """
    space = parse(text)
    if space is None or _count(space) != len(fields):
        return False
    for path, field in fields.items():
        leaf = leaf_of(space, path)
        kind = leaf.get("type") if isinstance(leaf, dict) else None
        if kind not in ("Box", "Discrete") or (
            list(leaf.get("shape", [])) != list(field.shape)
        ):
            return False
    return True


def _count(space: Any) -> int:
    """Leaves of a space."""
    below = space.get("subspaces") if isinstance(space, dict) else None
    if isinstance(below, dict):
        return sum(map(_count, below.values()))
    return sum(map(_count, below)) if isinstance(below, list) else 1


def parse(text: object) -> Any:
    """A space's JSON, which may hold infinities; None where it is none."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def dump(space: dict[str, Any]) -> str:
    """A space as Minari writes it, infinities as Python's json has them."""
    return json.dumps(space)


HDF5_FILE_NAME = "main_data.hdf5"
PARTS = ("observations", "actions", "rewards", "terminations", "truncations")
INFOS = "infos were left out; infos=True takes what every episode has of them"


class Hdf5Episodes:
    """See `minari.Episodes`.

    Attributes:
        lossy: Some images were kept as JPEG.
        notes: What was left out.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        spaces: Mapping[str, object],
        *,
        jpeg: bool,
        infos: bool,
        allow_expansion: bool,
    ) -> None:
        """Open the file of a dataset's folder."""
        self.lossy = False
        self.notes = Notes()
        self._spaces, self._jpeg = spaces, jpeg
        self._parts = (*PARTS, "infos") if infos else PARTS
        self._hdf5 = Hdf5(
            folder / HDF5_FILE_NAME, self.notes, allow_expansion=allow_expansion
        )
        self._count = count

    def names(self) -> list[str]:
        """See `minari.Episodes.names`."""
        held = set(self._hdf5.children())
        names = [f"episode_{index}" for index in range(self._count)]
        for name in names:
            if name not in held:
                raise FormatError(
                    f"{self._hdf5.file.path} has no {name!r}, expected {self._count} "
                    "episodes as metadata.json says; it was cut or edited"
                )
        return [self._hdf5.path_of(name) for name in names]

    def columns(self, index: int) -> dict[str, Rows]:
        """See `minari.Episodes.columns`."""
        group = f"/episode_{index}"
        there = set(self._hdf5.children(group))
        left_out = not index and "infos" in there - set(self._parts)
        if left_out and self._hdf5.datasets(f"{group}/infos"):
            self.notes.note(INFOS)
        found: dict[str, Rows] = {}
        for part in self._parts:
            if part not in there:
                continue
            for path, name in self._hdf5.datasets(f"{group}/{part}").items():
                below = path.replace("_index_", "")
                rows = self._rows(name, part, below)
                if rows is not None:
                    found[f"{part}/{below}".rstrip("/")] = rows
        return found

    def _rows(self, name: str, part: str, path: str) -> Rows | None:
        space = self._spaces.get(part)
        if self._jpeg and part in self._spaces:
            leaf = leaf_of(space, path)
            if space is None or is_image(leaf):
                packed = self._packed(name)
                if packed is not None:
                    return packed
        return self._hdf5.rows(name, f"{part}/{path}")

    def _packed(self, name: str) -> ImageRows | None:
        """Images kept as JPEG: one string of bytes a row, of one length or of many."""
        dataset = self._hdf5.raw(name)
        many = dataset.dtype.kind == "O"
        if not many and (dataset.dtype != np.uint8 or dataset.ndim != 2):
            return None
        if not len(dataset):
            return None
        told = self._hdf5.path_of(name)

        def packed(first: int, stop: int) -> list[bytes]:
            with self._hdf5.told(told):
                return [np.asarray(each).tobytes() for each in dataset[first:stop]]

        if not packed(0, 1)[0].startswith(images.MAGIC):
            return None
        self.lossy = True
        return ImageRows(packed, len(dataset), told)

    def close(self) -> None:
        """See `minari.Episodes.close`."""
        self._hdf5.close()


WHAT = "Minari"
MAIN, METADATA = "main_data.hdf5", "metadata.json"
VERSION = "0.5.4"
"""The version of Minari whose layout this is; newer ones read it."""
WRITTEN_ID = re.compile(r"([-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")
ROLE_NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}
"""What Minari calls the fields of a role; the others stand under infos."""
EPISODE_NBYTES = 8 << 20
"""Of an episode that is kept to be written at once; a longer one grows by pieces."""
SPACES = {"observations": "observation_space", "actions": "action_space"}


def owns(folder: Path) -> bool:
    """Whether a folder holds a dataset as it is written here, and nothing else."""
    data = folder / "data"
    names = sorted(each.name for each in data.iterdir()) if data.is_dir() else []
    return names == [MAIN, METADATA] and [*folder.iterdir()] == [data]


class _Episode:
    """The episode that is being written.

    Attributes:
        group: Its name in the file.
        index: Its number.
        steps: Of it so far.
        rewards: All of them.
        parts: Rows that are not written yet, by name in the group.
        nbytes: Theirs.
        begun: Whether earlier ones are.
    """

    def __init__(self, index: int) -> None:
        self.group = f"episode_{index}"
        self.index = index
        self.steps = self.nbytes = 0
        self.rewards: list[Array] = []
        self.parts: dict[str, list[Array]] = {}
        self.begun = False

    def add(self, name: str, part: Array) -> None:
        """Keep rows until there are enough of them."""
        self.parts.setdefault(name, []).append(part)
        self.nbytes += part.nbytes

    def take(self) -> dict[str, Array]:
        """Give the rows that were kept."""
        found = {
            name: each[0] if len(each) == 1 else np.concatenate(each)
            for name, each in self.parts.items()
        }
        self.parts, self.nbytes = {}, 0
        return found

    def attributes(self) -> dict[str, object]:
        """What Minari keeps beside an episode."""
        rewards = np.concatenate(self.rewards).astype(np.float64)
        summary = {
            "sum": rewards.sum(), "mean": rewards.mean(), "std": rewards.std(),
            "max": rewards.max(), "min": rewards.min(),
        }  # fmt: skip
        told = {f"rewards_{name}": value for name, value in summary.items()}
        return {"id": self.index, "total_steps": self.steps, **told}


class MinariWriter(Writer):
    """Writes episodes, environment by environment, as groups of one HDF5 file."""

    def __init__(
        self,
        target: Path,
        description: Description,
        overwrite: bool,
        dataset_id: str | None,
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._id = _checked_id(dataset_id, target)
        self._kept = _kept(description)
        self._fields = description.schema.fields
        self._maker, self._parts, self._names = _laid_out(description, self._kept)
        self._maker.tell(self.notes)
        self._seen = [0, 0]
        self._steps = self._unended = self._parted = 0
        self._episode = _Episode(0)
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        self._file: Hdf5Output | None = None
        try:
            self._folder = self._staging.path / "data"
            files.make_folder(self._folder)
            path = self._folder / MAIN
            File.create(path, 0).close()
            self._file = Hdf5Output(path)
        except BaseException:
            self.abort()
            raise

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        for part in quartered(block):
            self._put(self._maker.feed(part))

    def _put(self, steps: Transitions | None) -> None:
        """Add steps to the episode that is open, and to those that follow."""
        if steps is None:
            return
        first = 0
        # An episode holds one row after each step: another one has to end it.
        for last in np.flatnonzero(steps.last | steps.parted).tolist():
            self._add(steps, first, last + 1)
            self._end(steps, last)
            first = last + 1
        if first < len(steps):
            self._add(steps, first, len(steps))

    def _add(self, steps: Transitions, first: int, stop: int) -> None:
        episode = self._episode
        for path, values in steps.columns.items():
            part = values[first:stop]
            episode.add(self._names[path], part)
            if self._parts[path] == ("actions", "") and part.dtype.kind in "iu":
                low, high = int(part.min()), int(part.max())
                self._seen = [min(self._seen[0], low), max(self._seen[1], high)]
            if self._parts[path][0] == "rewards":
                episode.rewards.append(part)
        ended = steps.last | steps.parted
        truncated = steps.truncated | (ended & ~steps.terminated)
        episode.add("terminations", steps.terminated[first:stop])
        episode.add("truncations", truncated[first:stop])
        episode.steps += stop - first
        self._steps += stop - first
        if episode.nbytes > EPISODE_NBYTES:
            self._spill()

    def _spill(self) -> None:
        """Write what there is of an episode that goes on."""
        assert self._file is not None
        for name, rows in self._episode.take().items():
            self._file.append(f"{self._episode.group}/{name}", rows)
        self._episode.begun = True

    def _end(self, steps: Transitions, last: int) -> None:
        """Add the row after the last step, and begin the next episode."""
        assert self._file is not None
        episode = self._episode
        for path, values in steps.columns.items():
            part = self._parts[path][0]
            if path in steps.nexts:
                values = steps.nexts[path]
            if part in ("observations", "infos"):
                episode.add(self._names[path], values[last : last + 1])
        self._tell_unknown(steps, last)
        if episode.begun:
            self._spill()
            self._file.set_attributes(episode.group, episode.attributes())
        else:
            self._file.put(episode.group, episode.take(), episode.attributes())
        self._episode = _Episode(episode.index + 1)

    def _tell_unknown(self, steps: Transitions, last: int) -> None:
        """Count an episode, and say where its last row is not what was seen."""
        ended = steps.terminated[last] or steps.truncated[last]
        self._parted += bool(steps.parted[last])
        self._unended += not (ended or steps.parted[last])
        if steps.known[last]:
            return
        twice = "their last observation stands there twice"
        if steps.terminated[last]:
            self.notes.note(f"terminated episodes lack what was seen next: {twice}")
        else:
            self.notes.doubt(
                "episodes end without the observation that was seen next (truncated "
                f"without a final one, cut off, or the newest): {twice}"
            )

    def finish(self) -> None:
        """See `Writer.finish`."""
        refuse_empty(self._steps, WHAT)
        if self._parted:
            self.notes.note(
                f"{self._parted:,} episodes were made to end where the stored next "
                "observation is not the one that follows: truncated"
            )
        if self._unended:
            self.notes.note(
                f"{self._unended:,} episodes were cut off without an end: truncated"
            )
        self._close()
        nbytes = (self._folder / MAIN).stat().st_size
        told = json.dumps(self._metadata(nbytes), allow_nan=False).encode()
        files.replace_bytes(self._folder / METADATA, told)
        self.nbytes = self._staging.publish()

    def _metadata(self, nbytes: int) -> Json:
        return {
            **self._kept,
            "total_episodes": self._episode.index,
            "total_steps": self._steps,
            "data_format": "hdf5",
            # Images are kept as they are: JPEG would change them.
            "jpeg_encoding": False,
            "observation_space": self._space("observations"),
            "action_space": self._space("actions"),
            "dataset_size": round(nbytes / 1e6, 1),
            "dataset_id": self._id,
            "minari_version": VERSION,
        }

    def _space(self, part: str) -> str:
        kept = self._kept.get(SPACES[part])
        if isinstance(kept, str):
            return kept
        leaves: dict[str, Any] = {}
        for path, (top, below) in self._parts.items():
            if top == part:
                each = self._fields[path]
                number = not each.shape and np.dtype(each.dtype).kind in "iu"
                leaves[below] = (
                    discrete(*self._seen)
                    if number and (part, below) == ("actions", "")
                    else box(each)
                )
        return dump(nested(leaves))

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._staging.abort()


def planned(
    description: Description,
    *,
    target: Path | None = None,
    dataset_id: str | None = None,
) -> None:
    """Refuse what cannot be written; see `registry.planned`."""
    refuse_empty(description.rows, WHAT)
    if target is not None or dataset_id is not None:
        _checked_id(dataset_id, target or Path())
    _laid_out(description, _kept(description))


def _laid_out(
    description: Description, kept: Json
) -> tuple[TransitionMaker, dict[str, tuple[str, str]], dict[str, str]]:
    """What makes the steps; the part of each field, and its name in an episode's group.

    Raises:
        SchemaError: The file cannot hold them.
    """
    refuse_unfit(description.schema, WHAT)
    maker = TransitionMaker(description, WHAT)
    parts = _parts(description, maker.paths)
    names = {}
    for path, (part, below) in parts.items():
        found = names_of(kept.get(SPACES.get(part, "")), below)
        names[path] = "/".join([part, *found])
    refuse_clashes(names, WHAT)
    return maker, parts, names


def _parts(
    description: Description, paths: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """Minari's part of each field, and its path below it."""
    schema = description.schema
    found = {}
    for path in paths:
        found[path] = ("infos", path.removeprefix("info/"))
        for role, part in ROLE_NAMES.items():
            top = schema.role(role)
            if path in schema.role_paths(role) and top is not None:
                found[path] = (part, path.removeprefix(top).lstrip("/"))
    return found


def _kept(description: Description) -> Json:
    """Metadata that came from Minari, with the spaces that still fit the fields."""
    kept = description.user.get("minari")
    found = dict(kept) if isinstance(kept, dict) else {}
    schema = description.schema
    for role, key in (
        ("observation", SPACES["observations"]),
        ("action", SPACES["actions"]),
    ):
        fields = {
            path.removeprefix(schema.role(role) or "").lstrip("/"): schema[path]
            for path in schema.role_paths(role)
        }
        if not fits(found.get(key), fields):
            found.pop(key, None)
    return found


def _checked_id(dataset_id: str | None, target: Path) -> str:
    """The name of a dataset: what `minari.load_dataset` will be asked for."""
    if dataset_id is None:
        above = target.parent.name
        outside = above in ("datasets", "") or not re.fullmatch(r"[-_\w]{2,}", above)
        dataset_id = target.name if outside else f"{above}/{target.name}"
    if not isinstance(dataset_id, str) or not WRITTEN_ID.fullmatch(dataset_id):
        raise SchemaError(
            f"dataset_id: got {dataset_id!r}, expected [namespace/]name-v<number>, as "
            "Minari demands; name the folder so, or pass dataset_id="
        )
    return dataset_id


FILE_NAME = "metadata.json"
MAX_NBYTES = 64 << 20
MAX_EPISODES = 10_000_000
ENDS = ("terminations", "truncations")
ID = re.compile(r"([-_\w][-_\w/]*/)?[-_\w]+-v\d+")
"""An id of Minari's: ``(namespace/)name-v0``."""
KEPT = (
    "dataset_id", "observation_space", "action_space", "env_spec", "author",
    "author_email", "algorithm_name", "code_permalink", "description", "requirements",
    "eval_env_spec", "ref_min_score", "ref_max_score", "num_episodes_average_score",
)  # fmt: skip
"""What is kept of a dataset's metadata, as user metadata ``minari``."""


class Episodes(Protocol):
    """The episodes of one data format.

    Attributes:
        lossy: Some images were kept as JPEG.
        notes: What was left out.
    """

    lossy: bool
    notes: Notes

    def names(self) -> list[str]:
        """One name an episode, in order, to call it by in errors."""

    def columns(self, index: int) -> dict[str, Rows]:
        """Columns of an episode by Minari's names, as ``observations/camera``."""

    def close(self) -> None:
        """Give files back."""


def _renamed(path: str) -> str:
    names = {"observations": "observation", "actions": "action", "rewards": "reward"}
    top, slash, rest = path.partition("/")
    return names.get(top, "info" if top == "infos" else top) + slash + rest


class MinariReader(FragmentReader):
    """Reads the episodes one after another as one environment."""

    def __init__(
        self,
        folder: Path,
        metadata: Json,
        episodes: Episodes,
        indices: Sequence[int] | None = None,
    ) -> None:
        self._episodes = episodes
        self._untold: set[str] = set()
        self._folder = folder
        notes = episodes.notes
        names = episodes.names()
        if not names:
            raise FormatError(
                f"{folder} has no episodes, expected at least one; record some first"
            )
        wanted = range(len(names)) if indices is None else _checked(indices, len(names))
        first = self._stretch(names[wanted[0]], wanted[0])
        schema = make_schema(first.columns, notes, folder)
        if episodes.lossy:
            notes.note(f"images were kept as JPEG: {LOSSY}")
        ends = [end for end in ENDS if end not in self._untold]
        notes.note(
            f"{len(wanted):,} episodes of T steps and T + 1 observations were read in "
            f"their order; their ends are told by {' and '.join(ends) or 'nothing'}"
        )
        super().__init__(
            self._stretches_of(names, wanted), schema, notes, episodes.close,
            user={"minari": kept_of(metadata, KEPT, notes)},
        )  # fmt: skip
        if indices is None:
            self._compare(metadata, len(names))

    def _stretches_of(
        self, names: list[str], wanted: Sequence[int]
    ) -> Callable[[], Iterator[Fragment]]:
        def make() -> Iterator[Fragment]:
            for index in wanted:
                yield self._stretch(names[index], index)

        return make

    def _stretch(self, name: str, index: int) -> Fragment:
        found = self._episodes.columns(index)
        if "rewards" not in found:
            raise FormatError(
                f"{name} has no rewards, expected one a step as in Minari's files; it "
                "is damaged, or of another version"
            )
        steps = found["rewards"].count
        ends = ends_of(*(self._flags(name, end, found, steps) for end in ENDS))
        found["rewards"] = scalar(found["rewards"])
        columns = {_renamed(path): rows for path, rows in found.items()}
        nexts = {
            path: Later(rows, 1, steps)
            for path, rows in columns.items()
            if path.split("/")[0] == "observation"
        }
        for path, rows in columns.items():
            wanted = steps + (path in nexts)
            # Infos have a row more or not, as the environment has given them.
            if rows.count != wanted and path.split("/")[0] != "info":
                raise FormatError(
                    f"{name}: got {rows.count} rows of {path!r} for {steps} steps, "
                    f"expected {wanted}; the file is damaged"
                )
        return Fragment(name, steps, columns, nexts, ends)

    def _flags(
        self, name: str, end: str, found: dict[str, Rows], steps: int
    ) -> Flags | None:
        rows = found.pop(end, None)
        if rows is not None:
            return Flags(f"{name}: {end!r}", rows, steps)
        self._untold.add(end)
        self._episodes.notes.doubt(
            f"an episode has no {end!r}: none of its steps is taken to end so, and its "
            "last one is truncated unless something else ends it"
        )
        return None

    def _compare(self, metadata: Json, episodes: int) -> None:
        """Say where the metadata tells other numbers than the data."""
        steps = int(self.tally.rows.sum()) - self.tally.finals
        for key, got in (("total_episodes", episodes), ("total_steps", steps)):
            if metadata.get(key) != got:
                self.report.doubt(
                    f"{FILE_NAME} says {key} {str(metadata.get(key))[:40]}, and the "
                    f"data has {got}"
                )


def _data_folder(path: Path) -> Path | None:
    for folder in (path / "data", path):
        if (folder / FILE_NAME).is_file():
            return folder
    return None


def _metadata(folder: Path) -> Json:
    data = files.read_bytes(folder / FILE_NAME, MAX_NBYTES)
    return strict_json.parse(data, str(folder / FILE_NAME))


def recognizes(path: Path) -> bool:
    """Whether a folder's metadata is Minari's."""
    folder = _data_folder(path)
    try:
        return folder is not None and "data_format" in _metadata(folder)
    except ReplayError:
        return False


def _checked(indices: Sequence[int], count: int) -> list[int]:
    """Return the numbers of episodes; refuse those that the dataset lacks."""
    found = [int(index) for index in indices]
    bad = [index for index in found if not 0 <= index < count]
    if bad or not found:
        got = f"{bad[0]}" if bad else "no episode"
        raise SchemaError(
            f"episode_indices: got {got}, expected one or more numbers in [0, {count})"
            "; leave it out for all episodes"
        )
    return found


def _root() -> Path:
    """Where Minari keeps the datasets of this user."""
    return Path(
        files.expanded(os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets"))
    )


def located(source: object) -> tuple[Path, dict[str, object]] | None:
    """The folder of a dataset that Minari has open, or knows by an id.

    Args:
        source: A ``minari.MinariDataset``, read with its filter of episodes; or an id
            such as ``"D4RL/door/human-v2"``, unless a path of that name exists.

    Returns:
        The folder and options of `open_reader`; None for what is neither.

    Raises:
        FormatError: It has the form of an id, and nothing is there.
    """
    # By its interface: a dataset that is open was made by a Minari of any version.
    folder = getattr(getattr(source, "storage", None), "data_path", None)
    if folder is not None:
        indices = getattr(source, "episode_indices", None)
        return Path(folder), {} if indices is None else {"episode_indices": indices}
    text = source if isinstance(source, str) else ""
    if not ID.fullmatch(text) or os.path.lexists(text):
        return None
    path = _root() / text
    if not path.is_dir():
        raise FormatError(
            f"{text} does not exist, neither as a path nor as a dataset of Minari in "
            f"{_root()}, expected one of them; check the path, or fetch the dataset by "
            f"minari.download_dataset({text!r})"
        )
    return path, {}


def open_reader(
    path: Path,
    *,
    infos: bool = False,
    allow_expansion: bool = False,
    episode_indices: Sequence[int] | None = None,
) -> MinariReader:
    """Open a dataset as a source.

    Args:
        path: Its folder, or the ``data`` folder in it.
        infos: Take what is recorded under ``infos`` as fields, where every episode
            has it.
        allow_expansion: Read data that holds more than 1,000 times what it takes.
        episode_indices: Numbers of the episodes to read, in the order to read them in;
            all of them by default.
    """
    folder = _data_folder(path)
    if folder is None:
        raise FormatError(
            f"{path} has no {FILE_NAME}, expected the folder of a Minari dataset; "
            "name its format with format= (--from)"
        )
    metadata = _metadata(folder)
    count = metadata.get("total_episodes")
    if type(count) is not int or not 0 <= count <= MAX_EPISODES:
        raise FormatError(
            f"{folder / FILE_NAME} says total_episodes {str(count)[:40]}, expected at "
            f"most {MAX_EPISODES}; it is damaged"
        )
    jpeg = metadata.get("jpeg_encoding", True) is not False
    spaces = {
        "observations": parse(metadata.get("observation_space")),
        "actions": parse(metadata.get("action_space")),
    }
    kind = metadata.get("data_format")
    episodes: Episodes
    if kind in ("arrow", "parquet"):
        # pyarrow loads with it.
        from mmreplay.datasets.minari.tables import TableEpisodes

        episodes = TableEpisodes(
            folder, kind, count, spaces, infos=infos, allow_expansion=allow_expansion
        )
    elif kind == "hdf5":
        episodes = Hdf5Episodes(
            folder, count, spaces, jpeg=jpeg, infos=infos,
            allow_expansion=allow_expansion,
        )  # fmt: skip
    else:
        raise FormatError(
            f"{folder / FILE_NAME} says data_format {str(kind)[:40]!r}, expected hdf5, "
            "arrow or parquet; write the dataset in one of them with Minari"
        )
    if episode_indices is not None and list(episode_indices) == list(range(count)):
        episode_indices = None
    try:
        return MinariReader(folder, metadata, episodes, episode_indices)
    except BaseException:
        episodes.close()
        raise


def open_writer(
    target: Path,
    description: Description,
    *,
    overwrite: bool = False,
    dataset_id: str | None = None,
) -> MinariWriter:
    """Make a dataset as a target.

    Args:
        target: Its folder, ``<MINARI_DATASETS_PATH>/<namespace>/<name>-v0``.
        description: What will come.
        overwrite: As for every target; a folder that is there is never replaced.
        dataset_id: Its name in Minari; that of the folder, with the one above it as
            its namespace if that lies in no ``datasets`` folder, by default.
    """
    return MinariWriter(target, description, overwrite, dataset_id)

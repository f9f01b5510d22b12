"""Steps written as a Minari dataset of HDF5, which ``minari.load_dataset`` opens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay.convert.base import Block, Notes, refuse_empty
from mmreplay.convert.description import Description
from mmreplay.convert.staging import StagedWriter, Staging
from mmreplay.datasets.common.rows import Array
from mmreplay.datasets.common.transitions import (
    TransitionMaker,
    Transitions,
    quarters,
    refuse_clashes,
)
from mmreplay.datasets.hdf5 import Hdf5Output, refuse_unfit
from mmreplay.datasets.minari.spaces import (
    LEAST_SIDE,
    bounded,
    box,
    discrete,
    dump,
    fits,
    leaf_of,
    limits_of,
    names_of,
    nested,
    parse,
    stores_files,
    widen,
)
from mmreplay.disk import files
from mmreplay.disk.files import File
from mmreplay.errors import SchemaError, SourceError, undone_by
from mmreplay.ragged import Ragged
from mmreplay.strict_json import Json

WHAT = "Minari"
MAIN, METADATA = "main_data.hdf5", "metadata.json"
VERSION = "0.5.4"
"""The version of Minari whose layout this is; newer ones read it."""
WRITTEN_ID = re.compile(r"([-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")
ROLE_NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}
"""Minari's names of roles; other fields are infos."""
EPISODE_NBYTES = 8 << 20
"""Maximum bytes of an episode that is written at once; a longer one is appended to."""
SPACES = {"observations": "observation_space", "actions": "action_space"}


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
        overwrite: As for every target; an existing folder is never replaced.
        dataset_id: Its name in Minari; that of the folder, with the one above it as
            its namespace if that lies in no ``datasets`` folder, by default.
    """
    return MinariWriter(target, description, overwrite, dataset_id)


def planned(
    description: Description, *, target: Path | None = None, dataset_id: str | None = None
) -> None:
    """Refuse data that cannot be written; see `registry.planned`."""
    refuse_empty(description.rows, WHAT)
    if target is not None or dataset_id is not None:
        _checked_id(dataset_id, target or Path())
    _laid_out(description, _source_metadata(description))


def owns(folder: Path) -> bool:
    """Return whether a folder holds a dataset written here, and nothing else."""
    data = folder / "data"
    names = sorted(each.name for each in data.iterdir()) if data.is_dir() else []
    return names == [MAIN, METADATA] and [*folder.iterdir()] == [data]


class MinariWriter(StagedWriter):
    """Writes episodes, environment by environment, as groups of one HDF5 file."""

    def __init__(
        self, target: Path, description: Description, overwrite: bool, dataset_id: str | None
    ) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._id = _checked_id(dataset_id, target)
        self._source_metadata = _source_metadata(description)
        self._fields = description.schema.fields
        self._maker, self._sections, self._names = _laid_out(description, self._source_metadata)
        self._maker.add_notes(self.notes)
        self._images = [path for path, field in self._fields.items() if field.varies]
        for name in self._images:
            if name in self._sections:
                codec = self._fields[name].rules.name(self._fields[name])
                self.notes.note(f"Minari has images of field {name!r} as {codec} files")
        self._seen = [0, 0]
        self._limits = {
            path: limits
            for path, (section, below) in self._sections.items()
            if path not in self._images
            and section in SPACES
            and (space := parse(self._source_metadata.get(SPACES[section]))) is not None
            and (limits := limits_of(leaf_of(space, below))) is not None
        }
        self._outside = set[str]()
        self._steps = self._unended = self._disconnected = 0
        self._episode = _Episode(0)
        self._staging = Staging(target, overwrite=overwrite, folder=True, owns=owns)
        self._file: Hdf5Output | None = None
        with undone_by(self.abort):
            self._folder = self._staging.path / "data"
            files.make_folder(self._folder)
            path = self._folder / MAIN
            File.create(path, 0).close()
            self._file = Hdf5Output(path)

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        for section in quarters(block):
            files_of = {path: _files(section.values(path)) for path in self._images}
            self._put(self._maker.feed(replace(section, columns={**section.columns, **files_of})))

    def _put(self, steps: Transitions | None) -> None:
        """Add steps to the current episode and the following ones."""
        if steps is None:
            return
        first = 0
        # An episode holds one row after each step: another one has to end it.
        for last in np.flatnonzero(steps.last | steps.disconnected).tolist():
            self._add(steps, first, last + 1)
            self._end(steps, last)
            first = last + 1
        if first < len(steps):
            self._add(steps, first, len(steps))

    def _add(self, steps: Transitions, first: int, stop: int) -> None:
        episode = self._episode
        for path, values in steps.columns.items():
            section = values[first:stop]
            self._refuse_missing(path, section)
            episode.add(self._names[path], section)
            if self._sections[path] == ("actions", "") and section.dtype.kind in "iu":
                low, high = int(section.min()), int(section.max())
                self._seen = [min(self._seen[0], low), max(self._seen[1], high)]
            self._compare(path, section)
            if self._sections[path][0] == "rewards":
                episode.rewards.append(section)
        ended = steps.last | steps.disconnected
        truncated = steps.truncated | (ended & ~steps.terminated)
        episode.add("terminations", steps.terminated[first:stop])
        episode.add("truncations", truncated[first:stop])
        episode.steps += stop - first
        self._steps += stop - first
        if episode.nbytes > EPISODE_NBYTES:
            self._spill()

    def _compare(self, path: str, values: Array) -> None:
        """Widen the limits of a field's space to values that lie outside."""
        if path not in self._limits or not len(values):
            return
        low, high = self._limits[path]
        if ((values < low) | (values > high)).any():
            self._outside.add(path)
            low = np.fmin(low, np.fmin.reduce(values, axis=0))
            self._limits[path] = low, np.fmax(high, np.fmax.reduce(values, axis=0))

    def _spill(self) -> None:
        """Write the buffered rows of an episode that continues."""
        assert self._file is not None
        for name, rows in self._episode.take().items():
            self._file.append(f"{self._episode.group}/{name}", rows)
        self._episode.begun = True

    def _end(self, steps: Transitions, last: int) -> None:
        """Add the row after the last step, and start the next episode."""
        assert self._file is not None
        episode = self._episode
        for path, values in steps.columns.items():
            section = self._sections[path][0]
            if path in steps.next_obs:
                values = steps.next_obs[path]
            if section in ("observations", "infos"):
                self._refuse_missing(path, values[last : last + 1])
                episode.add(self._names[path], values[last : last + 1])
                self._compare(path, values[last : last + 1])
        self._count_episode(steps, last)
        if episode.begun:
            self._spill()
            self._file.set_attributes(episode.group, episode.attributes())
        else:
            self._file.put(episode.group, episode.take(), episode.attributes())
        self._episode = _Episode(episode.index + 1)

    def _refuse_missing(self, path: str, section: Array) -> None:
        """Refuse a row without a file, such as a final row of what was no observation.

        Raises:
            SourceError: There is one.
        """
        if section.dtype == object and not all(map(len, section)):
            raise SourceError(
                f"field {path!r} has a row without an image in episode {self._episode.index}, and "
                "Minari has a file for each. Cast it to arrays with cast= (--cast "
                f"{path}=uint8), which are zeros there, or leave the field out."
            )

    def _count_episode(self, steps: Transitions, last: int) -> None:
        """Count an episode, and report an unknown final observation."""
        ended = steps.terminated[last] or steps.truncated[last]
        self._disconnected += bool(steps.disconnected[last])
        self._unended += not (ended or steps.disconnected[last])
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
        if self._disconnected:
            self.notes.note(
                f"{self._disconnected:,} episodes were truncated where the stored next "
                "observation differs from the next row"
            )
        if self._unended:
            self.notes.note(f"{self._unended:,} episodes were cut off without an end: truncated")
        self._close()
        nbytes = (self._folder / MAIN).stat().st_size
        data = json.dumps(self._metadata(nbytes), allow_nan=False).encode()
        files.replace_bytes(self._folder / METADATA, data)
        self.nbytes = self._staging.publish()

    def _metadata(self, nbytes: int) -> Json:
        return {
            **self._source_metadata,
            "total_episodes": self._episode.index,
            "total_steps": self._steps,
            "data_format": "hdf5",
            # Images are kept as they are, arrays or files: JPEG would change arrays.
            "jpeg_encoding": bool(self._images),
            "observation_space": self._space("observations"),
            "action_space": self._space("actions"),
            "dataset_size": round(nbytes / 1e6, 1),
            "dataset_id": self._id,
            "minari_version": VERSION,
        }

    def _space(self, section: str) -> str:
        """The space of a section: the source's, if it fits the fields, or a new one.

        Raises:
            SourceError: A space must be widened, and Minari would then take its arrays
                for image files.
        """
        source_metadata = self._source_metadata.get(SPACES[section])
        mine = {path: below for path, (top, below) in self._sections.items() if top == section}
        if isinstance(source_metadata, str):
            space = parse(source_metadata)
            outside = sorted(self._outside & mine.keys())
            for path in outside:
                leaf = leaf_of(space, mine[path])
                widen(leaf, *self._limits[path])
                self.notes.note(f"values of {path!r} lie outside of its space, which was widened")
                if self._images and stores_files(leaf):
                    raise SourceError(
                        f"values of {path!r} lie outside of its space, and Minari would take its "
                        f"arrays for files as those of {self._images[0]!r}. Cast both to the same, "
                        "or drop one."
                    )
            return dump(space) if outside else source_metadata
        leaves: dict[str, Any] = {}
        for path, below in mine.items():
            each = self._fields[path]
            number = not each.shape and np.dtype(each.dtype).kind in "iu"
            leaves[below] = (
                discrete(*self._seen)
                if number and (section, below) == ("actions", "")
                else box(each)
            )
        return dump(nested(leaves))


class _Episode:
    """The unfinished episode.

    Attributes:
        group: Its name in the file.
        index: Its number.
        steps: Of it so far.
        rewards: All of them.
        sections: Rows that are not written yet, by name in the group.
        nbytes: Theirs.
        begun: Whether earlier ones are.
    """

    def __init__(self, index: int) -> None:
        self.group = f"episode_{index}"
        self.index = index
        self.steps = self.nbytes = 0
        self.rewards: list[Array] = []
        self.sections: dict[str, list[Array]] = {}
        self.begun = False

    def add(self, name: str, section: Array) -> None:
        """Add rows to the buffer."""
        self.sections.setdefault(name, []).append(section)
        self.nbytes += sum(map(len, section)) if section.dtype == object else section.nbytes

    def take(self) -> dict[str, Array]:
        """Return the buffered rows, and clear the buffer."""
        found = {
            name: each[0] if len(each) == 1 else np.concatenate(each)
            for name, each in self.sections.items()
        }
        self.sections, self.nbytes = {}, 0
        return found

    def attributes(self) -> dict[str, object]:
        """Return the attributes of an episode."""
        rewards = np.concatenate(self.rewards).astype(np.float64)
        summary = {
            "sum": rewards.sum(),
            "mean": rewards.mean(),
            "std": rewards.std(),
            "max": rewards.max(),
            "min": rewards.min(),
        }
        stats = {f"rewards_{name}": value for name, value in summary.items()}
        return {"id": self.index, "total_steps": self.steps, **stats}


def _laid_out(
    description: Description, source_metadata: Json
) -> tuple[TransitionMaker, dict[str, tuple[str, str]], dict[str, str]]:
    """Return the maker of steps, and the role and the name of each field in a group.

    Raises:
        SchemaError: The file cannot hold them.
    """
    refuse_unfit(description.schema, WHAT)
    maker = TransitionMaker(description, WHAT)
    sections = _sections(description, maker.paths)
    _refuse_images(description, sections, source_metadata)
    names = {}
    for path, (section, below) in sections.items():
        found = names_of(source_metadata.get(SPACES.get(section, "")), below)
        names[path] = "/".join([section, *found])
    refuse_clashes(names, WHAT)
    return maker, sections, names


def _refuse_images(
    description: Description, sections: Mapping[str, tuple[str, str]], source_metadata: Json
) -> None:
    """Refuse image fields whose files Minari cannot store.

    Raises:
        SchemaError: There are some; or some images are files and others arrays; or next
            observations are other files than observations.
    """
    schema = description.schema
    files = [path for path, field in schema.fields.items() if field.encoding is not None]
    as_files = {}
    for path, (section, below) in sections.items():
        space = parse(source_metadata.get(SPACES.get(section, "")))
        leaf = bounded(schema[path], 0, 255) if space is None else leaf_of(space, below)
        as_files[path] = section in SPACES and stores_files(leaf)
    for path in files:
        if not as_files.get(path, True):
            raise SchemaError(
                f"images of field {path!r} are files, which Minari has of observations and "
                f"actions with sides of at least {LEAST_SIDE} alone. Cast them to arrays with "
                f"cast= (--cast {path}=uint8), or leave the field out."
            )
    packed = [path for path in sections if path in files]
    arrays = [path for path in sections if as_files[path] and path not in files]
    if packed and arrays:
        raise SchemaError(
            f"field {packed[0]!r} is images as files and field {arrays[0]!r} arrays, but Minari "
            f"has all images as files, or none. Cast {packed[0]!r} to arrays with cast= (--cast "
            f"{packed[0]}=uint8), or the other one to files, or leave one out."
        )
    top, stored = schema.role("observation") or "", schema.role("next_observation")
    for path in schema.role_paths("observation") if stored else ():
        twin = f"{stored}{path.removeprefix(top)}"
        if schema[path].encoding != schema[twin].encoding:
            raise SchemaError(
                f"images of field {twin!r} must be files like those of {path!r}, "
                f"{schema[path].description}, as Minari has both as one; got others. Cast both to "
                "arrays with cast=, or leave the next observations out."
            )


def _files(column: Ragged) -> Array:
    """Files as an array of arrays of bytes; a block's own are valid until the next."""
    found = np.empty(len(column), object)
    for row, file in enumerate(column):
        found[row] = np.array(file)
    return found


def _sections(description: Description, paths: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Minari's part of each field, and its path below it."""
    schema = description.schema
    found = {}
    for path in paths:
        found[path] = ("infos", path.removeprefix("info/"))
        for role, section in ROLE_NAMES.items():
            top = schema.role(role)
            if path in schema.role_paths(role) and top is not None:
                found[path] = (section, path.removeprefix(top).lstrip("/"))
    return found


def _source_metadata(description: Description) -> Json:
    """Return metadata that came from Minari, with the spaces that fit the fields."""
    source_metadata = description.user.get("minari")
    found = dict(source_metadata) if isinstance(source_metadata, dict) else {}
    schema = description.schema
    for role, key in (("observation", SPACES["observations"]), ("action", SPACES["actions"])):
        fields = {
            path.removeprefix(schema.role(role) or "").lstrip("/"): schema[path]
            for path in schema.role_paths(role)
        }
        if not fits(found.get(key), fields):
            found.pop(key, None)
    return found


def _checked_id(dataset_id: str | None, target: Path) -> str:
    """Return the name of a dataset for `minari.load_dataset`."""
    if dataset_id is None:
        above = target.parent.name
        outside = above in ("datasets", "") or not re.fullmatch(r"[-_\w]{2,}", above)
        dataset_id = target.name if outside else f"{above}/{target.name}"
    if not isinstance(dataset_id, str) or not WRITTEN_ID.fullmatch(dataset_id):
        raise SchemaError(
            "dataset_id must be [namespace/]name-v<number>, as Minari demands, got "
            f"{dataset_id!r}. Name the folder so, or pass dataset_id=."
        )
    return dataset_id

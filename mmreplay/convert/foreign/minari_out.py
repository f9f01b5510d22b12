"""Steps written as a Minari dataset of HDF5, which ``minari.load_dataset`` opens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from mmreplay import files
from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.foreign import spaces
from mmreplay.convert.foreign.columns import Array
from mmreplay.convert.foreign.hdf5_out import Hdf5Output, refuse_unfit
from mmreplay.convert.foreign.outgoing import (
    TransitionMaker,
    Transitions,
    refuse_clashes,
)
from mmreplay.convert.foreign.regroup import quartered
from mmreplay.convert.losses import refuse_empty
from mmreplay.convert.staging import Staging
from mmreplay.errors import SchemaError
from mmreplay.files import File
from mmreplay.format.strict_json import Json

WHAT = "Minari"
MAIN, METADATA = "main_data.hdf5", "metadata.json"
VERSION = "0.5.4"
"""The version of Minari whose layout this is; newer ones read it."""
ID = re.compile(r"([-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")
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
                    spaces.discrete(*self._seen)
                    if number and (part, below) == ("actions", "")
                    else spaces.box(each)
                )
        return spaces.dump(spaces.nested(leaves))

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
        found = spaces.names_of(kept.get(SPACES.get(part, "")), below)
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
        if not spaces.fits(found.get(key), fields):
            found.pop(key, None)
    return found


def _checked_id(dataset_id: str | None, target: Path) -> str:
    """The name of a dataset: what `minari.load_dataset` will be asked for."""
    if dataset_id is None:
        above = target.parent.name
        outside = above in ("datasets", "") or not re.fullmatch(r"[-_\w]{2,}", above)
        dataset_id = target.name if outside else f"{above}/{target.name}"
    if not isinstance(dataset_id, str) or not ID.fullmatch(dataset_id):
        raise SchemaError(
            f"dataset_id: got {dataset_id!r}, expected [namespace/]name-v<number>, as "
            "Minari demands; name the folder so, or pass dataset_id="
        )
    return dataset_id

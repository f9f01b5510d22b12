"""Steps written as D4RL's HDF5 files have them, next observations included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.foreign.hdf5_out import Hdf5Output, refuse_unfit
from mmreplay.convert.foreign.outgoing import (
    TransitionMaker,
    Transitions,
    refuse_clashes,
)
from mmreplay.convert.foreign.regroup import quartered
from mmreplay.convert.losses import refuse_empty
from mmreplay.convert.staging import Staging

WHAT = "D4RL"
ROLE_NAMES = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
}
"""What D4RL calls the fields of a role."""
NEXT = "next_"
TERMINALS, TIMEOUTS = "terminals", "timeouts"


class D4rlWriter(Writer):
    """Writes steps, environment by environment, as one flat file."""

    def __init__(self, target: Path, description: Description, overwrite: bool) -> None:
        self.nbytes = 0
        self.notes = Notes()
        self._maker, self._names = _laid_out(description)
        self._maker.tell(self.notes)
        self._steps = self._open_ends = 0
        self._staging = Staging(target, overwrite=overwrite)
        self._file: Hdf5Output | None = None
        try:
            self._file = Hdf5Output(self._staging.path)
        except BaseException:
            self.abort()
            raise
        if description.num_envs > 1:
            self.notes.note(
                f"the {description.num_envs} environments' steps follow each other in "
                "the file, which has no place for their numbers"
            )

    def write(self, block: Block) -> None:
        """See `Writer.write`."""
        for part in quartered(block):
            self._put(self._maker.feed(part))

    def _put(self, steps: Transitions | None) -> None:
        if steps is None:
            return
        assert self._file is not None
        self._steps += len(steps)
        for path, values in steps.columns.items():
            self._file.append(self._names[path], values)
        for path, values in steps.nexts.items():
            self._file.append(NEXT + self._names[path], values)
        # D4RL knows of an episode's end by nothing else.
        timeouts = steps.truncated | (steps.last & ~steps.terminated)
        self._open_ends += int((timeouts & ~steps.truncated).sum())
        self._file.append(TERMINALS, steps.terminated)
        self._file.append(TIMEOUTS, timeouts)
        if (~steps.known & steps.terminated).any():
            self.notes.note(
                f"terminations whose next observation is not known have their own in "
                f"'{NEXT}observations'"
            )
        if (~steps.known & ~steps.terminated).any():
            self.notes.doubt(
                "steps whose next observation is not known (truncated without a final "
                f"observation, cut off, or the newest) have their own in "
                f"'{NEXT}observations'"
            )

    def finish(self) -> None:
        """See `Writer.finish`."""
        refuse_empty(self._steps, WHAT)
        if self._open_ends:
            self.notes.note(
                f"{self._open_ends:,} episodes were cut off without an end, and got a "
                "timeout"
            )
        self._close()
        self.nbytes = self._staging.publish()

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def abort(self) -> None:
        """See `Writer.abort`."""
        self._close()
        self._staging.abort()


def planned(description: Description) -> None:
    """Refuse what cannot be written; see `registry.planned`."""
    refuse_empty(description.rows, WHAT)
    _laid_out(description)


def _laid_out(description: Description) -> tuple[TransitionMaker, dict[str, str]]:
    """What makes the steps, and what each field is called in the file.

    Raises:
        SchemaError: The file cannot hold them.
    """
    schema = description.schema
    refuse_unfit(schema, WHAT)
    maker = TransitionMaker(description, WHAT)
    tops = {schema.role(role) or "": name for role, name in ROLE_NAMES.items()}
    names = {path: _name(path, tops) for path in maker.paths}
    refuse_clashes(names, WHAT)
    return maker, names


def _name(path: str, tops: Mapping[str, str]) -> str:
    for top, name in tops.items():
        if path == top or path.startswith(f"{top}/"):
            return name + path.removeprefix(top)
    return f"infos/{path.removeprefix('info/')}"

"""Steps written as D4RL's HDF5 files have them, next observations included."""

from __future__ import annotations

from pathlib import Path

from mmreplay.convert.base import Block, Notes, Writer
from mmreplay.convert.description import Description
from mmreplay.convert.foreign.hdf5_out import Hdf5Output, refuse_unfit
from mmreplay.convert.foreign.outgoing import TransitionMaker, Transitions
from mmreplay.convert.foreign.regroup import quartered
from mmreplay.convert.staging import Staging

WHAT = "D4RL"
ROLE_NAMES = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
}
"""What D4RL calls the fields of a role."""


class D4rlWriter(Writer):
    """Writes steps, environment by environment, as one flat file."""

    def __init__(self, target: Path, description: Description, overwrite: bool) -> None:
        self.nbytes = 0
        self.notes = Notes()
        schema = description.schema
        refuse_unfit(schema, WHAT)
        self._maker = TransitionMaker(description, WHAT)
        self._tops = {
            schema.role(role) or "": name for role, name in ROLE_NAMES.items()
        }
        self._open_ends = 0
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
        for path, values in steps.columns.items():
            self._file.append(self._name(path), values)
        for path, values in steps.nexts.items():
            self._file.append("next_" + self._name(path), values)
        # D4RL knows of an episode's end by nothing else.
        timeouts = steps.truncated | (steps.last & ~steps.terminated)
        self._open_ends += int((timeouts & ~steps.truncated).sum())
        self._file.append("terminals", steps.terminated)
        self._file.append("timeouts", timeouts)
        if not steps.known.all():
            self.notes.note(
                "steps whose next observation is not known have their own in "
                "'next_observations'"
            )

    def _name(self, path: str) -> str:
        for top, name in self._tops.items():
            if path == top or path.startswith(f"{top}/"):
                return name + path.removeprefix(top)
        return f"infos/{path.removeprefix('info/')}"

    def finish(self) -> None:
        """See `Writer.finish`."""
        assert self._file is not None
        self._put(self._maker.finish())
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

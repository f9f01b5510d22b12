"""Minari's datasets: a folder of metadata.json and episodes of T + 1 observations."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from mmreplay import strict_json
from mmreplay.convert.base import Notes
from mmreplay.datasets.common.fields import Flags, ends_of, make_schema, rename_top, select_metadata
from mmreplay.datasets.common.fragments import Fragment, FragmentReader
from mmreplay.datasets.common.rows import ColumnRows, ShiftedRows, scalar
from mmreplay.datasets.images import LOSSY
from mmreplay.datasets.minari.hdf5_episodes import Hdf5Episodes
from mmreplay.datasets.minari.spaces import parse
from mmreplay.disk import files
from mmreplay.errors import FormatError, ReplayError, SchemaError, undone_by
from mmreplay.schema.source_names import OwnNames, name_fields, own_names_of
from mmreplay.strict_json import Json

FILE_NAME = "metadata.json"
MAX_NBYTES = 64 << 20
MAX_EPISODES = 10_000_000
ENDS = ("terminations", "truncations")
END_NAMES = {"terminated": "terminations", "truncated": "truncations"}
NAMES = {"observations": "observation", "actions": "action", "rewards": "reward", "infos": "info"}
"""Names of fields in Minari, and here."""
ID = re.compile(r"([-_\w][-_\w/]*/)?[-_\w]+-v\d+")
"""An id of Minari's: ``(namespace/)name-v0``."""
METADATA_KEYS = (
    "dataset_id",
    "observation_space",
    "action_space",
    "env_spec",
    "author",
    "author_email",
    "algorithm_name",
    "code_permalink",
    "description",
    "requirements",
    "eval_env_spec",
    "ref_min_score",
    "ref_max_score",
    "num_episodes_average_score",
)
"""Keys of the metadata that become user metadata ``minari``."""


def open_reader(
    path: Path,
    *,
    infos: bool = False,
    allow_expansion: bool = False,
    episode_indices: Sequence[int] | None = None,
    fields: Sequence[str] | None = None,
) -> MinariReader:
    """Open a dataset as a source.

    Args:
        path: Its folder, or the ``data`` folder in it.
        infos: Take what is recorded under ``infos`` as fields, where every episode
            has it.
        allow_expansion: Read data that expands to more than 1,000 times the file.
        episode_indices: Numbers of the episodes to read, in the order to read them in;
            all of them by default.
        fields: See `name_fields`.
    """
    folder = _data_folder(path)
    if folder is None:
        raise FormatError(
            f"{path} has no {FILE_NAME}, so it is not the folder of a Minari dataset. "
            "Name its format with format= (--from)."
        )
    metadata = _metadata(folder)
    count = metadata.get("total_episodes")
    if type(count) is not int or not 0 <= count <= MAX_EPISODES:
        raise FormatError(
            f"{folder / FILE_NAME}: total_episodes must be in [0, {MAX_EPISODES}], got "
            f"{str(count)[:40]}. The file is damaged."
        )
    jpeg = metadata.get("jpeg_encoding", True) is not False
    spaces = {
        "observations": parse(metadata.get("observation_space")),
        "actions": parse(metadata.get("action_space")),
    }
    kind = metadata.get("data_format")
    episodes: EpisodeFiles
    if kind in ("arrow", "parquet"):
        # pyarrow loads with it.
        from mmreplay.datasets.minari.tables import TableEpisodes

        episodes = TableEpisodes(
            folder, kind, count, spaces, infos=infos, allow_expansion=allow_expansion
        )
    elif kind == "hdf5":
        episodes = Hdf5Episodes(
            folder, count, spaces, jpeg=jpeg, infos=infos, allow_expansion=allow_expansion
        )
    else:
        raise FormatError(
            f"{folder / FILE_NAME}: data_format must be hdf5, arrow or parquet, got "
            f"{str(kind)[:40]!r}. Write the dataset in one of them with Minari."
        )
    if episode_indices is not None and list(episode_indices) == list(range(count)):
        episode_indices = None
    with undone_by(episodes.close):
        return MinariReader(folder, metadata, episodes, episode_indices, fields)


def recognizes(path: Path) -> bool:
    """Return whether a folder has Minari's metadata."""
    folder = _data_folder(path)
    try:
        return folder is not None and "data_format" in _metadata(folder)
    except ReplayError:
        return False


def located(source: object) -> tuple[Path, dict[str, object]] | None:
    """Return the folder of a dataset that Minari has open or knows by an id.

    Args:
        source: A ``minari.MinariDataset``, read with its filter of episodes; or an id
            such as ``"D4RL/door/human-v2"``, unless a path of that name exists.

    Returns:
        The folder and options of `open_reader`; None for what is neither.

    Raises:
        FormatError: It has the form of an id, and no such dataset exists.
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
            f"{_root()}. Check the path, or download the dataset by "
            f"minari.download_dataset({text!r})."
        )
    return path, {}


class EpisodeFiles(Protocol):
    """The episodes of one data format.

    Attributes:
        lossy: Whether some images are JPEG.
        notes: The report.
    """

    lossy: bool
    notes: Notes

    def names(self) -> list[str]:
        """Return one name for each episode, in order, for errors."""

    def columns(self, index: int) -> dict[str, ColumnRows]:
        """Return the columns of an episode by their names in the files."""

    def name_of(self, own: str) -> str:
        """Return Minari's name of a column by that in the files."""

    def close(self) -> None:
        """Close the files."""


class MinariReader(FragmentReader):
    """Reads the episodes one after another as one environment."""

    def __init__(
        self,
        folder: Path,
        metadata: Json,
        episodes: EpisodeFiles,
        indices: Sequence[int] | None = None,
        fields: Sequence[str] | None = None,
    ) -> None:
        self._episodes, self._fields = episodes, fields
        self._own_names: OwnNames = {}
        self._untold: set[str] = set()
        self._folder = folder
        notes = episodes.notes
        names = episodes.names()
        if not names:
            raise FormatError(f"{folder} has no episodes. Record some first.")
        wanted = range(len(names)) if indices is None else _checked(indices, len(names))
        first = self._fragment(names[wanted[0]], wanted[0])
        schema = make_schema(first.columns, notes, folder)
        ends = [end for end in ENDS if end not in self._untold]
        notes.note(
            f"{len(wanted):,} episodes of T steps and T + 1 observations were read in "
            f"their order; {' and '.join(ends) or 'nothing'} say how they end"
        )
        super().__init__(
            self._fragments_of(names, wanted),
            schema,
            notes,
            episodes.close,
            user_metadata={"minari": select_metadata(metadata, METADATA_KEYS, notes)},
            own_names=self._own_names,
        )
        # Known once each episode was looked at.
        if episodes.lossy:
            notes.note(f"images were kept as JPEG: {LOSSY}")
        if indices is None:
            self._compare(metadata, len(names))

    def _fragments_of(
        self, names: list[str], wanted: Sequence[int]
    ) -> Callable[[], Iterator[Fragment]]:
        def make() -> Iterator[Fragment]:
            for index in wanted:
                yield self._fragment(names[index], index)

        return make

    def _fragment(self, name: str, index: int) -> Fragment:
        columns = self._episodes.columns(index)
        if "rewards" not in columns:
            raise FormatError(
                f"{name} has no rewards, which Minari's files have. The file is "
                "damaged, or of another version."
            )
        steps = columns["rewards"].count
        ends = ends_of(*(self._flags(name, end, columns, steps) for end in ENDS))
        columns["rewards"] = scalar(columns["rewards"])
        names = name_fields(
            {own: rename_top(self._episodes.name_of(own), NAMES) for own in columns},
            name,
            self._episodes.notes,
            self._fields,
            END_NAMES,
        )
        self._own_names = self._own_names or own_names_of(names, END_NAMES)
        columns = {path: columns[own] for own, path in names.items()}
        next_obs = {
            path: ShiftedRows(rows, 1, steps)
            for path, rows in columns.items()
            if path.split("/")[0] == "observation"
        }
        for path, rows in columns.items():
            wanted = steps + (path in next_obs)
            # Infos have a row more or not, as the environment has given them.
            if rows.count != wanted and path.split("/")[0] != "info":
                raise FormatError(
                    f"{name} must have {wanted}, got {rows.count} rows of {path!r} for "
                    f"{steps} steps. The file is damaged."
                )
        return Fragment(name, steps, columns, next_obs, ends)

    def _flags(
        self, name: str, end: str, columns: dict[str, ColumnRows], steps: int
    ) -> Flags | None:
        rows = columns.pop(end, None)
        if rows is not None:
            return Flags(f"{name}: {end!r}", rows, steps)
        self._untold.add(end)
        self._episodes.notes.doubt(
            f"an episode has no {end!r}: none of its steps is taken to end so, and its "
            "last one is truncated unless something else ends it"
        )
        return None

    def _compare(self, metadata: Json, episodes: int) -> None:
        """Report where the metadata and the data differ."""
        steps = int(self.tally.rows.sum()) - self.tally.finals
        for key, got in (("total_episodes", episodes), ("total_steps", steps)):
            if metadata.get(key) != got:
                self.report.doubt(
                    f"{FILE_NAME} says {key} {str(metadata.get(key))[:40]}, and the data has {got}"
                )


def _data_folder(path: Path) -> Path | None:
    for folder in (path / "data", path):
        if (folder / FILE_NAME).is_file():
            return folder
    return None


def _metadata(folder: Path) -> Json:
    data = files.read_bytes(folder / FILE_NAME, MAX_NBYTES)
    return strict_json.parse(data, str(folder / FILE_NAME))


def _checked(indices: Sequence[int], count: int) -> list[int]:
    """Return the numbers of episodes; refuse those that the dataset lacks."""
    columns = [int(index) for index in indices]
    bad = [index for index in columns if not 0 <= index < count]
    if bad or not columns:
        got = f"{bad[0]}" if bad else "no episode"
        raise SchemaError(
            f"episode_indices must be one or more numbers in [0, {count}), got {got}. "
            "Leave it out for all episodes."
        )
    return columns


def _root() -> Path:
    """Return the folder of this user's datasets."""
    return Path(files.expanded(os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")))

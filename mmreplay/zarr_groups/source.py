"""Where a Zarr group lies that is opened as it is, and what its arrays are to be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmreplay.disk import files
from mmreplay.disk.address import url_of
from mmreplay.errors import FormatError, SchemaError, shown
from mmreplay.format.metadata import FILE_NAME as METADATA
from mmreplay.zarr_groups.blobs import Blobs, FolderBlobs, ZipBlobs
from mmreplay.zarr_groups.remote import RemoteBlobs

MARKS = ("zarr.json", ".zgroup", ".zmetadata")
"""A group has one of these files."""
ZIP_MAGIC = b"PK\3\4"
ENDS = ("terminated", "truncated")


@dataclass(frozen=True, slots=True)
class ZarrSource(os.PathLike[str]):
    """A Zarr group, for `ReplayBuffer.open` and whatever else takes a path.

    It may be pickled, and goes to workers as it is; credentials are looked up there,
    in ``AWS_ACCESS_KEY_ID`` and the like.

    Attributes:
        location: A folder, a zip file, or ``s3://bucket/prefix``.
        fields: The arrays that are to be fields, by their paths in the group, and the
            fields' paths; all that have a row a step, under their own names, if None.
        episode_ends: Path of the array that tells where episodes end, as counts of
            rows; found by its name if None.
        ends: What the last step of such an episode is, ``"terminated"`` or
            ``"truncated"``, where no array tells it.
        endpoint: Of an S3 server that is not Amazon's; ``AWS_ENDPOINT_URL`` if None.
        region: ``AWS_REGION`` if None.
        anonymous: Send no credentials.

    Example:
        >>> made = mr.compact("runs/cartpole", "runs/compact")
        >>> with mr.ReplayBuffer.open("runs/compact") as buffer:
        ...     source = mr.ZarrSource(str(buffer.zarr_path))
        >>> group = mr.ReplayBuffer.open(source)
    """

    location: str
    # A dict has no hash; sources that differ in it alone are seldom side by side.
    fields: Mapping[str, str] | None = field(default=None, hash=False)
    episode_ends: str | None = None
    ends: str = "truncated"
    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False

    def __post_init__(self) -> None:
        """Check the arguments, and make the location absolute."""
        if self.ends not in ENDS:
            raise SchemaError(
                f"ends must be one of {', '.join(ENDS)}, got {shown(self.ends)}. Leave "
                "it out if you do not know."
            )
        if self.fields is not None and not _texts(self.fields):
            raise SchemaError(
                f"fields must be a dict of paths of arrays to paths of fields, got "
                f"{shown(self.fields)}. Leave it out for all arrays."
            )
        for name in ("episode_ends", "endpoint", "region"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise SchemaError(
                    f"{name} must be a str, got {shown(value)}. Leave it out if you do not know it."
                )
        if not isinstance(self.anonymous, bool):
            raise SchemaError(
                f"anonymous must be True or False, got {shown(self.anonymous)}. Leave "
                "it out to send credentials."
            )
        given_location: object = self.location
        if not isinstance(given_location, str | os.PathLike):
            raise SchemaError(
                f"location must be a path or s3://bucket/prefix, got "
                f"{shown(given_location)}. Name the group's folder, zip file or URL."
            )
        location = files.expanded(self.location)
        absolute = url_of(location) or os.path.abspath(location)
        object.__setattr__(self, "location", absolute)

    def __fspath__(self) -> str:
        """The location."""
        return self.location

    def __str__(self) -> str:
        return self.location

    @property
    def options(self) -> dict[str, object]:
        """What it says beside the location, as options of the format ``zarr``."""
        return {
            "fields_of": self.fields,
            "episode_ends": self.episode_ends,
            "ends": self.ends,
            "endpoint": self.endpoint,
            "region": self.region,
            "anonymous": self.anonymous,
        }

    @property
    def remote(self) -> bool:
        """Whether it is no path of this machine."""
        return url_of(self.location) is not None

    def open(self) -> Blobs:
        """What lies there.

        Raises:
            FormatError: Nothing does.
            FailedError: A remote store cannot be asked.
        """
        if self.remote:
            return RemoteBlobs(
                self.location, endpoint=self.endpoint, region=self.region, anonymous=self.anonymous
            )
        path = Path(self.location)
        if path.is_dir():
            return FolderBlobs(path)
        if path.is_file():
            return ZipBlobs(path)
        raise FormatError(
            f"{path} must be a Zarr group's folder or zip file, but does not exist. Check the path."
        )


def _texts(value: object) -> bool:
    """Whether a value is a mapping of texts to texts, of one at least."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(text, str) for pair in value.items() for text in pair)
    )


def source_of(path: str | os.PathLike[str]) -> ZarrSource | None:
    """The group that a path is; None where it is none, such as a buffer's folder."""
    if isinstance(path, ZarrSource):
        return path
    text = files.expanded(path)
    if url_of(text) is not None:
        return ZarrSource(text)
    folder = Path(text)
    if folder.is_dir():
        named = any((folder / mark).is_file() for mark in MARKS)
        is_group = named and not (folder / METADATA).exists()
        return ZarrSource(text) if is_group else None
    return ZarrSource(text) if is_zip(folder) else None


def is_zip(path: Path) -> bool:
    """Whether a regular file is named ``.zip`` and begins as one."""
    if path.suffix.lower() != ".zip" or path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == ZIP_MAGIC

"""How the Zarr engine divides a ring into shards, and how it packs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mmreplay.arguments import flag, integer, one_of
from mmreplay.errors import SchemaError
from mmreplay.ring import Ring

Codec = Literal["blosc-lz4", "zstd", "none"]
CODECS: tuple[Codec, ...] = get_args(Codec)
LEVELS = {"blosc-lz4": 5, "zstd": 3, "none": 0}
MAX_LEVELS = {"blosc-lz4": 9, "zstd": 22, "none": 0}
# One step of shards, of all environments, is decoded again when the ring comes round.
STEP_NBYTES = 64 << 20
MAX_SHARD_ROWS = 1 << 15
CHUNK_NBYTES = 16 << 10
LARGE_NBYTES = 4096
VALUES_NBYTES = 128 << 10
"""A chunk of values that vary holds those of as many rows as take no more than this if
each is the longest; most values are much shorter."""
HEAP_SHARDS = 4
"""The heap holds the longest values of so many shards: one that is being filled, and
others that wait to be sealed."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """Shards of one buffer.

    Attributes:
        codec: ``"blosc-lz4"``, ``"zstd"`` or ``"none"``.
        level: The codec's level.
        shard_rows: Rows per environment in a shard; a power of two that divides the
            ring's slots.
        chunk_crc32c: Whether every chunk ends with its CRC32C, as the index does.
    """

    codec: Codec
    level: int
    shard_rows: int
    chunk_crc32c: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        one_of(
            "codec", self.codec, CODECS, "'blosc-lz4' is the fastest to read, 'zstd' the smallest."
        )
        highest = MAX_LEVELS[self.codec]
        way_out = f"Leave it out for the default of {self.codec!r}."
        integer("level", self.level, 0, way_out, maximum=highest)
        integer("shard_rows", self.shard_rows, 1, way_out, maximum=MAX_SHARD_ROWS)
        flag("chunk_crc32c", self.chunk_crc32c)
        if self.shard_rows & (self.shard_rows - 1):
            raise SchemaError(
                f"shard_rows must be a power of two, got {self.shard_rows}. {way_out}"
            )

    @classmethod
    def sized(
        cls,
        codec: Codec,
        ring: Ring,
        row_nbytes: int,
        level: int | None = None,
        chunk_crc32c: bool = False,
        heap_rows: int | None = None,
    ) -> Sharding:
        """Choose the shard's rows for a ring.

        As many as keep a shard of each environment within 64 MiB in all, and a
        quarter of the capacity, so that the slots to spare stay few.

        Args:
            codec: What chunks are packed with.
            ring: The ring, whose capacity and environments are looked at.
            row_nbytes: Bytes of one row.
            level: The codec's; None for its own.
            chunk_crc32c: See the attribute.
            heap_rows: Rows whose longest values a heap holds; None where no field
                varies. A shard has a quarter of them at most.
        """
        max_rows = STEP_NBYTES // max(1, row_nbytes * ring.num_envs)
        rows = max(1, min(max_rows, ring.capacity // 4, MAX_SHARD_ROWS))
        if heap_rows is not None:
            rows = max(1, min(rows, heap_rows // HEAP_SHARDS))
        # What is no codec, and may be no key either, is refused by the class itself.
        known = codec if codec in CODECS else "none"
        chosen = LEVELS.get(known, 0) if level is None else level
        return cls(codec, chosen, 1 << (rows.bit_length() - 1), chunk_crc32c)

    def resized(self, ring: Ring, row_nbytes: int, heap_rows: int | None = None) -> Sharding:
        """The same for another ring."""
        return Sharding.sized(
            self.codec, ring, row_nbytes, self.level, self.chunk_crc32c, heap_rows
        )

    def fit(self, ring: Ring) -> Ring:
        """The ring with as many slots more as make whole shards, and one to spare.

        All rows of that one may be overwritten before the first of them is.
        """
        unit = max(self.shard_rows, ring.block_rows)
        return replace(ring, slots=(-(-ring.slots // unit) + 1) * unit)

    def chunk(self, nbytes: int, ring: Ring) -> tuple[int, int]:
        """Environments and steps of a field's inner chunk.

        Args:
            nbytes: Bytes a row.
            ring: A chunk holds several environments only where it is time-major.
        """
        if nbytes >= LARGE_NBYTES:
            return 1, 1
        envs = 1
        if ring.layout == "time_major" and ring.num_envs * nbytes <= CHUNK_NBYTES:
            envs = ring.num_envs
        steps = min(self.shard_rows, max(1, CHUNK_NBYTES // (envs * nbytes)))
        return envs, 1 << (steps.bit_length() - 1)

    def value_chunk(self, max_nbytes: int) -> tuple[int, int]:
        """Environments and steps of an inner chunk of values that vary.

        Args:
            max_nbytes: Bytes of the longest value.
        """
        steps = min(self.shard_rows, max(1, VALUES_NBYTES // max_nbytes))
        return 1, 1 << (steps.bit_length() - 1)

    def to_json(self) -> dict[str, Any]:
        """Return what metadata.json says of it."""
        value = {"codec": self.codec, "level": self.level, "shard_rows": self.shard_rows}
        return value | ({"chunk_crc32c": True} if self.chunk_crc32c else {})

    @classmethod
    def from_json(cls, value: object, ring: Ring) -> Sharding:
        """Check what metadata.json says.

        Raises:
            SchemaError: It is not legal, or does not fit the ring.
        """
        keys = {"codec", "level", "shard_rows"}
        known = keys | {"chunk_crc32c"}
        if not isinstance(value, Mapping) or not keys <= set(value) <= known:
            raise SchemaError(
                f"zarr must have the keys {sorted(keys)}, got {value!r}. Restore the file."
            )
        sharding = cls(**value)
        if ring.slots % sharding.shard_rows:
            raise SchemaError(
                f"shard_rows must divide the {ring.slots} slots, got "
                f"{sharding.shard_rows}. The file is damaged: restore it from a copy."
            )
        return sharding

"""How the Zarr engine cuts a ring into shards, and what it packs them with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mmreplay.errors import SchemaError
from mmreplay.ring import Ring

Codec = Literal["blosc-lz4", "zstd", "none"]
CODECS: tuple[Codec, ...] = get_args(Codec)
LEVELS = {"blosc-lz4": 5, "zstd": 3, "none": 0}
# One step of shards, of all environments, is decoded again when the ring comes round.
STEP_NBYTES = 64 << 20
MAX_SHARD_ROWS = 1 << 15
CHUNK_NBYTES = 16 << 10
LARGE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Sharding:
    """Shards of one buffer.

    Attributes:
        codec: ``"blosc-lz4"``, ``"zstd"`` or ``"none"``.
        level: The codec's level.
        shard_rows: Rows per environment in a shard; a power of two that divides the
            ring's slots.
    """

    codec: Codec
    level: int
    shard_rows: int

    def __post_init__(self) -> None:
        """Check the values."""
        if self.codec not in CODECS:
            raise SchemaError(
                f"codec: got {self.codec!r}, expected one of {list(CODECS)}; "
                "'blosc-lz4' is read fastest, 'zstd' is smallest"
            )
        for name, number, most in (
            ("level", self.level, 22),
            ("shard_rows", self.shard_rows, MAX_SHARD_ROWS),
        ):
            if type(number) is not int or not 0 <= number <= most:
                raise SchemaError(
                    f"{name}: got {number!r}, expected an integer in [0, {most}]; "
                    "leave it to mmreplay"
                )
        if self.shard_rows < 1 or self.shard_rows & (self.shard_rows - 1):
            raise SchemaError(
                f"shard_rows: got {self.shard_rows}, expected a power of two; leave it "
                "to mmreplay"
            )

    @classmethod
    def sized(cls, codec: Codec, ring: Ring, row_nbytes: int) -> Sharding:
        """Choose the shard's rows for a ring.

        As many as keep a shard of each environment within 64 MiB in all, and a
        quarter of the capacity, so that the slots to spare stay few.
        """
        most = STEP_NBYTES // max(1, row_nbytes * ring.num_envs)
        rows = max(1, min(most, ring.capacity // 4, MAX_SHARD_ROWS))
        return cls(codec, LEVELS.get(codec, 0), 1 << (rows.bit_length() - 1))

    def fit(self, ring: Ring) -> Ring:
        """The ring with as many slots more as make whole shards."""
        unit = max(self.shard_rows, ring.block_rows)
        return replace(ring, slots=-(-ring.slots // unit) * unit)

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

    def to_json(self) -> dict[str, Any]:
        """Return what metadata.json says of it."""
        return {"codec": self.codec, "level": self.level, "shard_rows": self.shard_rows}

    @classmethod
    def from_json(cls, value: object, ring: Ring) -> Sharding:
        """Check what metadata.json says.

        Raises:
            SchemaError: It is not legal, or does not fit the ring.
        """
        keys = {"codec", "level", "shard_rows"}
        if not isinstance(value, Mapping) or set(value) != keys:
            raise SchemaError(
                f"zarr: got {value!r}, expected {sorted(keys)}; restore it"
            )
        found = cls(**value)
        if ring.slots % found.shard_rows:
            raise SchemaError(
                f"shard_rows: got {found.shard_rows}, expected a divisor of the "
                f"{ring.slots} slots; the file is damaged: restore it"
            )
        return found

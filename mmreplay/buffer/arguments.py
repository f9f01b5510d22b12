"""What users ask for when they create and open buffers, checked before it is done."""

from __future__ import annotations

import secrets
import time
from enum import Enum
from typing import cast

import numpy as np

from mmreplay.errors import SchemaError, shown
from mmreplay.format import metadata as metadata_file
from mmreplay.format import strict_json
from mmreplay.format.metadata import AUTORESETS, ENGINES, Autoreset, Engine, Metadata
from mmreplay.format.sharding import Codec, Sharding
from mmreplay.format.strict_json import Json
from mmreplay.ring import LAYOUTS, Layout, Ring
from mmreplay.schema import Schema
from mmreplay.storage import zarr_group

ROWS_EACH = "give the rows to keep of each environment, int(1e6) for a million"


def check_count(name: str, number: int, most: int, way_out: str) -> None:
    """Refuse what is no integer in ``[1, most]``.

    Raises:
        SchemaError: It is none.
    """
    whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not whole or not 1 <= number <= most:
        raise SchemaError(
            f"{name}: got {shown(number)}, expected an integer in [1, {most}]; "
            f"{way_out}"
        )


def check_sampler(sampler: object) -> None:
    """Refuse what cannot draw.

    Raises:
        SchemaError: It is neither a sampler nor None.
    """
    made = sampler is not None and not isinstance(sampler, type)
    if sampler is not None and not (made and callable(getattr(sampler, "draw", None))):
        raise SchemaError(
            f"sampler: got {shown(sampler)}, expected a sampler such as "
            "UniformSampler(seed=0); make one, or leave it out"
        )


def check_mode(mode: str) -> None:
    """Refuse a mode that is none.

    Raises:
        SchemaError: It is neither ``"r"`` nor ``"r+"``.
    """
    if mode not in ("r", "r+"):
        raise SchemaError(
            f"mode: got {shown(mode)}, expected 'r' or 'r+'; to make a new buffer, use "
            "ReplayBuffer.create"
        )


def check_interval(commit_every: float | None) -> None:
    """Refuse an interval between commits that is no time.

    Raises:
        SchemaError: It is neither None nor above 0.
    """
    number = isinstance(commit_every, int | float | np.integer | np.floating)
    if commit_every is not None and not (number and commit_every > 0):
        raise SchemaError(
            f"commit_every: got {shown(commit_every)}, expected seconds above 0, or "
            "None "
            "to commit only by commit() and close()"
        )


def describe(
    schema: Schema,
    capacity: int,
    num_envs: int,
    engine: Engine,
    layout: Layout | None,
    autoreset: Autoreset | Enum | None,
    user: Json | None,
    codec: Codec | None = None,
    level: int | None = None,
    chunk_crc32c: bool = False,
) -> Metadata:
    """Check what a user asks for and make its metadata.

    Raises:
        SchemaError: A number or choice is not legal.
        FormatError: The user's own values are no JSON.
    """
    check_count("capacity", capacity, metadata_file.MAX_CAPACITY, ROWS_EACH)
    envs = "give the number of environments that each call of add has a step of"
    check_count("num_envs", num_envs, metadata_file.MAX_NUM_ENVS, envs)
    # Gymnasium's own word, as of `env.metadata["autoreset_mode"]`.
    named = autoreset.name.lower() if isinstance(autoreset, Enum) else autoreset
    stated = schema.autoreset if isinstance(schema, Schema) else None
    if named is None:
        named = stated
    if named is None and num_envs > 1:
        raise SchemaError(
            f"autoreset: got none with num_envs={num_envs}, expected what the "
            "environments do after an episode ends; pass autoreset='next_step' "
            "(Gymnasium's vector default, EnvPool: the call of step after an end "
            "resets, with reward 0), 'same_step' (AutoresetMode.SAME_STEP, "
            "Stable-Baselines3's VecEnv, Isaac Lab: the step that ends resets as well) "
            "or 'disabled' (you call reset yourself). Schema.from_env(envs) reads it "
            "from Gymnasium's vector environments"
        )
    if named is None:
        # Nothing of another episode can come unless the caller resets.
        named = "disabled"
    _check_choices(engine, layout, named)
    if stated not in (None, named):
        raise SchemaError(
            f"autoreset: got {named!r}, but the environment that the schema was made "
            f"of says {stated!r}, expected the same; leave autoreset out, or make the "
            "schema by Schema.from_spaces if that is not what fills the buffer"
        )
    if user is not None and not isinstance(user, dict):
        raise SchemaError(
            f"user: got {type(user).__name__}, expected a dict of JSON values; put it "
            "into one"
        )
    # Also in RAM, where nothing is written: an export keeps it.
    strict_json.dump(user or {}, "user")
    if not isinstance(schema, Schema):
        raise SchemaError(
            f"schema: got {type(schema).__name__}, expected a Schema; wrap the fields "
            "in mmreplay.Schema(...), or use Schema.from_env or Schema.from_example"
        )
    asked = {"codec": codec, "level": level, "chunk_crc32c": chunk_crc32c or None}
    for name, value in asked.items():
        if value is not None and engine != "zarr":
            raise SchemaError(
                f"{name}: got {shown(value)} with engine={shown(engine)}, expected "
                "one with "
                "engine='zarr' only; leave it out, or name that engine"
            )
    ring = Ring.sized(int(capacity), int(num_envs), layout, schema.row_nbytes)
    sharding = None
    if engine == "zarr":
        zarr_group.check_names(schema)
        sharding = Sharding.sized(
            codec or "blosc-lz4", ring, schema.row_nbytes, level, chunk_crc32c
        )
        ring = sharding.fit(ring)
    return Metadata(
        uuid=secrets.token_bytes(16),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        generation=1,
        engine=engine,
        autoreset=cast("Autoreset", named),
        ring=ring,
        schema=schema,
        user=user or {},
        sharding=sharding,
    )


def _check_choices(engine: str, layout: str | None, autoreset: str) -> None:
    if engine not in ENGINES:
        raise SchemaError(
            f"engine: got {shown(engine)}, expected one of {list(ENGINES)}; leave it "
            "out "
            "for files that are mapped"
        )
    if layout is not None and layout not in LAYOUTS:
        raise SchemaError(
            f"layout: got {shown(layout)}, expected one of {LAYOUTS} or None; leave "
            "it out "
            "to have it chosen by num_envs"
        )
    if autoreset not in AUTORESETS:
        raise SchemaError(
            f"autoreset: got {shown(autoreset)}, expected one of {AUTORESETS}; name "
            "what "
            "your environments do after an end: 'next_step' is Gymnasium's vector "
            "default, 'disabled' where you call reset yourself"
        )

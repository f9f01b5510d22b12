"""Facts about a buffer on disk, and what lies beside its rows.

`buffer_facts` says what a buffer is and holds. Beside the rows lie statistics.json and
the columns of samplers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmreplay import kernels, strict_json
from mmreplay.disk import files
from mmreplay.disk.files import NO_BIRTH
from mmreplay.disk.lock import Owner
from mmreplay.episodes.column_index import BYTES_A_ROW
from mmreplay.errors import SchemaError
from mmreplay.format import commit
from mmreplay.format.metadata import heap_reserve_nbytes
from mmreplay.samplers.priority_file import PRIORITIES, USES, ColumnKind
from mmreplay.storage.commit_state import open_commit

if TYPE_CHECKING:
    from mmreplay.buffer.replay_buffer import ReplayBuffer
    from mmreplay.episodes import EpisodeIndex
    from mmreplay.ring import Span

FILE_NAME = "statistics.json"
MAX_NBYTES = 16 << 20
SETTLING_TRIES = 10
OPENINGS = {
    "clean": "closed in order",
    "live": "a writer is at work",
    "killed": "the writer was killed; no published row is lost",
    "failed": "a sync failed: rows above the last commit are discarded",
    "power_cut": "as after a power cut (or a copy): rows above the last commit are discarded",
}
"""What the kinds of `Recovery.how` mean."""


def read_statistics(folder: Path | None) -> dict[str, Any]:
    """Return the stored statistics, or ``{}`` if there are none."""
    path = None if folder is None else folder / FILE_NAME
    if path is None or not path.exists():
        return {}
    return strict_json.parse(files.read_bytes(path, MAX_NBYTES), str(path))


def write_statistics(folder: Path | None, statistics: dict[str, Any]) -> None:
    """Store statistics durably, in one step.

    Raises:
        SchemaError: The buffer has no folder, or the statistics are too large.
        FormatError: A value is no JSON.
    """
    if folder is None:
        raise SchemaError(
            "a buffer in RAM cannot store statistics. Keep them in a variable, or "
            "create the buffer with a path."
        )
    data = strict_json.dump(statistics, "statistics")
    if len(data) > MAX_NBYTES:
        raise SchemaError(
            f"statistics must take at most {MAX_NBYTES} bytes, got {len(data)}. Store "
            "large values in a field, or in a file of your own."
        )
    files.replace_bytes(folder / FILE_NAME, data)


def stored_priorities(folder: Path | None) -> list[str]:
    """Names of the samplers whose priorities are stored beside a buffer, sorted."""
    return _stored(folder, PRIORITIES)


def _stored(folder: Path | None, kind: ColumnKind) -> list[str]:
    root = None if folder is None else folder / "samplers"
    if root is None or not root.is_dir():
        return []
    return sorted(name for name in files.names(root) if (root / name / kind.file).exists())


def left_behind(folder: Path | None) -> list[str]:
    """Return a sentence for each sampler's column that a copy leaves behind."""
    try:
        names, counts = stored_priorities(folder), counts_left_behind(folder)
    except OSError as error:
        return [f"stored priorities were not copied: {error}"]
    priorities = [
        f"the priorities {name!r} were not copied. Use export(..., "
        f"priorities={name!r}) or mmreplay convert --priorities {name} to copy them."
        for name in names
    ]
    return priorities + counts


def counts_left_behind(folder: Path | None) -> list[str]:
    """Return a sentence for each UseCounter whose counts a copy leaves behind."""
    return [
        f"the counts of uses {name!r} were not copied: a UseCounter draws each row of "
        "the copy as often as it may. Only a snapshot takes them along."
        for name in _stored(folder, USES)
    ]


def buffer_facts(buffer: ReplayBuffer) -> dict[str, Any]:
    """What a buffer on disk is and holds, as JSON values.

    Args:
        buffer: Open in any mode, with a folder.
    """
    assert buffer.path is not None
    metadata = buffer.metadata
    ring = metadata.ring
    return {
        "path": str(buffer.path),
        "uuid": metadata.uuid.hex(),
        "created": metadata.created,
        "engine": metadata.engine,
        "codec": None if metadata.sharding is None else metadata.sharding.codec,
        "compression": buffer.compression,
        "layout": ring.layout,
        "autoreset": metadata.autoreset,
        "generation": metadata.generation,
        "capacity": ring.capacity,
        "num_envs": ring.num_envs,
        "slots": ring.slots,
        "reserve": ring.reserve,
        "block_rows": ring.block_rows,
        "schema": metadata.schema.to_json(),
        "roles": dict(metadata.schema.roles),
        "user": metadata.user,
        **_contents(buffer),
        **({} if (heap := heap_facts(buffer)) is None else {"heap": heap}),
        "index_nbytes": BYTES_A_ROW * int(buffer.span.lengths.sum()),
        "disk": folder_nbytes(buffer.path),
        "commit": commit_facts(buffer),
        "recovery": {
            "how": buffer.recovery.how,
            "cut_rows": buffer.recovery.cut_rows,
            "given_up_rows": buffer.recovery.given_up_rows,
            "last_cut_rows": buffer.recovery.last_cut_rows,
        },
        "writer": _writer(buffer.path),
        "kernels_not_built": kernels.missing(),
    }


def _contents(buffer: ReplayBuffer) -> dict[str, Any]:
    """Rows, steps and episodes; of one moment, unless a writer is very fast."""
    for _ in range(SETTLING_TRIES):
        span = buffer.span
        counts = _count_rows(buffer.episodes, span)
        if buffer.span is span:
            break
    return counts


def count_starts(index: EpisodeIndex) -> dict[str, int]:
    """How many steps can be drawn, with their next observations and without."""
    legal = int(index.starts.lengths.sum()) - index.num_illegal
    return {"legal_starts": legal, "legal_starts_without_next": index.num_steps}


def _count_rows(index: EpisodeIndex, span: Span) -> dict[str, Any]:
    tables = [index.episodes(env_id) for env_id in range(len(span.stop))]
    rows, steps = int(span.lengths.sum()), index.num_steps
    return {
        "rows": rows,
        "steps": steps,
        "final_rows": rows - steps,
        **count_starts(index),
        "never_drawn_steps": index.num_unknown_next,
        "tails": span.first.tolist(),
        "heads": span.stop.tolist(),
        "sizes": index.sizes().tolist(),
        "episodes": {
            "count": sum(len(e.begin) for e in tables),
            "running": sum(int(e.running.sum()) for e in tables),
            "headless": sum(int(e.headless.sum()) for e in tables),
        },
    }


def heap_facts(buffer: ReplayBuffer) -> dict[str, Any] | None:
    """How full the heaps are, and how many rows fit; None where no field varies."""
    metadata, used = buffer.metadata, buffer.view.heap_used
    if used is None:
        return None
    rows, nbytes = buffer.span.lengths, metadata.heap_nbytes
    # What may be given up ahead is not for rows: see `HeapSpace`.
    free = nbytes - heap_reserve_nbytes(metadata.schema, nbytes)
    held = (rows > 0) & (used > 0)
    fit = None
    # In a compressed buffer shards take the values, and no row ends with them.
    if held.any() and metadata.sharding is None:
        fit = int((free * rows[held] // used[held]).min())
    return {
        "heap_bytes": nbytes,
        "used": used.tolist(),
        "rows": rows.tolist(),
        "rows_that_fit": fit,
    }


def folder_nbytes(folder: Path) -> dict[str, int]:
    """Apparent and allocated bytes of everything in the folder."""
    apparent = allocated = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(where, name))
            except FileNotFoundError:
                continue  # A writer has just removed it.
            apparent += status.st_size
            allocated += status.st_blocks * 512
    return {"apparent": apparent, "allocated": allocated}


def commit_facts(buffer: ReplayBuffer, folder: Path | None = None) -> dict[str, Any]:
    """When the newest durable record was written, and its heads.

    Args:
        buffer: Open from a folder.
        folder: Where that is now, if it was renamed since.
    """
    metadata = buffer.metadata
    folder = folder or buffer.path
    assert folder is not None
    num_envs, heap_nbytes = metadata.ring.num_envs, metadata.heap_nbytes
    data_folder = folder / metadata.folder
    file, data = open_commit(data_folder, num_envs, heap_nbytes, writable=False)
    try:
        birth = file.identity()[2]
    finally:
        file.close()
    slots = commit.split(data, metadata.uuid, metadata.generation, num_envs, heap_nbytes)
    record = commit.newest_durable(slots)
    heads = buffer.recovery.committed if record is None else record.heads
    # A commit that raises the limits alone repeats the heads of the last commit.
    older = [
        each.time_ns
        for each in (slots[slot] for slot in commit.DURABLE_SLOTS)
        if each is not None
        and record is not None
        and (each.heads == heads).all()
        and (each.limits != record.limits).any()
    ]
    time_ns = 0 if record is None else record.time_ns
    return {
        "time_ns": min([time_ns, *older]),
        "exact": not older,
        "heads": heads.tolist(),
        "clean": bool(record is not None and record.flags & commit.CLEAN),
        "survives_kill": birth != NO_BIRTH,
    }


def _writer(folder: Path) -> dict[str, Any] | None:
    owner = Owner(folder)
    return owner.text if owner.alive else None

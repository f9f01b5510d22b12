"""Old module paths that pickles and documents of earlier versions name.

A pickle names the module and the class of each object in it. Modules that have moved
since stay importable under their old names, so that old pickles open and old imports
work: each old name is a small module that looks its attributes up in the new one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "mmreplay.adapters.home": "mmreplay.adapters.common.location",
    "mmreplay.adapters.pytorchrl_data": "mmreplay.adapters.pytorchrl.data",
    "mmreplay.adapters.pytorchrl_priorities": "mmreplay.adapters.pytorchrl.priorities",
    "mmreplay.adapters.tensors": "mmreplay.adapters.common.tensors",
    "mmreplay.adapters.tmrl_rows": "mmreplay.adapters.tmrl.rows",
    "mmreplay.buffer.compacting": "mmreplay.buffer.copy_rows",
    "mmreplay.buffer.snapshot": "mmreplay.buffer.copy_files",
    "mmreplay.collect": "mmreplay.recording",
    "mmreplay.collect.recorder": "mmreplay.recording.recorder",
    "mmreplay.concatenation.several": "mmreplay.concatenation",
    "mmreplay.convert.ends": "mmreplay.convert.episode_ends",
    "mmreplay.limiter.law": "mmreplay.limiter.rate_limiter",
    "mmreplay.loader.several_stream": "mmreplay.loader.several",
    "mmreplay.recovery": "mmreplay.storage.recovery",
    "mmreplay.repairing.mending": "mmreplay.repairing.restore",
    "mmreplay.samplers.blocks": "mmreplay.samplers.uniform",
    "mmreplay.samplers.earliest": "mmreplay.samplers.recent",
    "mmreplay.samplers.frozen": "mmreplay.samplers.shuffled",
    "mmreplay.samplers.laws": "mmreplay.samplers.priority_distribution",
    "mmreplay.samplers.mixture": "mmreplay.samplers.combine",
    "mmreplay.samplers.priorities": "mmreplay.samplers.priority_store",
    "mmreplay.samplers.prioritizing": "mmreplay.samplers.prioritized",
    "mmreplay.samplers.rank_law": "mmreplay.samplers.priority_distribution",
    "mmreplay.samplers.rank_prioritized": "mmreplay.samplers.prioritized",
    "mmreplay.samplers.restricted": "mmreplay.samplers.combine",
    "mmreplay.samplers.schedules": "mmreplay.samplers.priority_distribution",
    "mmreplay.samplers.shares": "mmreplay.samplers.combine",
    "mmreplay.samplers.windows": "mmreplay.episodes.starts",
    "mmreplay.samplers.windows_inner": "mmreplay.samplers.sequence",
    "mmreplay.storage.group_mapping": "mmreplay.storage.foreign_zarr.mapping",
    "mmreplay.storage.policy": "mmreplay.storage.store",
    "mmreplay.storage.residency": "mmreplay.storage.memory_usage",
    "mmreplay.storage.zarr_source": "mmreplay.storage.foreign_zarr.source",
    "mmreplay.sumtree": "mmreplay.samplers.sum_tree",
}
"""The new path of each module that moved; what is not named in pickles is left out."""

RENAMED = {
    ("mmreplay.adapters.pytorchrl_priorities", "Powers"): "Exponents",
    ("mmreplay.adapters.home", "Home"): "BufferLocation",
    ("mmreplay.adapters.home", "_again"): "_reopened",
    ("mmreplay.buffer.compacting", "Compacted"): "CompactReport",
    ("mmreplay.collect", "Recorded"): "RecordReport",
    ("mmreplay.collect.recorder", "Recorded"): "RecordReport",
    ("mmreplay.repairing.mending", "Cut"): "DroppedRows",
    ("mmreplay.repairing.mending", "Repaired"): "RepairReport",
    ("mmreplay.samplers.frozen", "Frozen"): "EpochSnapshot",
    ("mmreplay.samplers.laws", "Powers"): "Proportional",
    ("mmreplay.samplers.priorities", "Priorities"): "PriorityStore",
    ("mmreplay.samplers.priorities", "Saved"): "SavedPriorities",
    ("mmreplay.samplers.prioritizing", "Options"): "PrioritizedOptions",
    ("mmreplay.samplers.prioritizing", "Prioritizing"): "FormerObject",
    ("mmreplay.samplers.rank_law", "Ranks"): "RankBased",
    ("mmreplay.samplers.windows", "Shape"): "WindowShape",
    ("mmreplay.samplers.windows_inner", "Inner"): "FormerObject",
    ("mmreplay.storage.residency", "Memory"): "MemoryUsage",
}
"""The new name of each class or function that was renamed as it moved."""

IMPORTED = {"mmreplay.collect"}
"""Old names of modules that users imported from: a renamed class warns."""


class OldModules(MetaPathFinder, Loader):
    """Finds the modules of `MOVED`, after all other finders have failed."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Find a module that moved, by its old name."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module that stands for the old name."""
        return _old_module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module looks its names up when they are asked for."""


def _old_module(old: str) -> ModuleType:
    module = ModuleType(old, f"The old name of `{MOVED[old]}`.")

    def look_up(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        new = RENAMED.get((old, name), name)
        if old in IMPORTED and new != name:
            warn_renamed(f"{old}.{name}", f"{MOVED[old]}.{new}")
        return getattr(import_module(MOVED[old]), new)

    module.__getattr__ = look_up  # type: ignore[method-assign]
    return module


def install() -> None:
    """Make the old names importable; `mmreplay` does it once."""
    sys.meta_path.append(OldModules())
    # A module below one that is no package any more is never looked for.
    below_modules = "mmreplay.concatenation.several", "mmreplay.collect.recorder"
    for old in below_modules:
        sys.modules[old] = _old_module(old)


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that an old name is used.

    Args:
        old: The old name, as users write it.
        new: The name to use instead.
        stacklevel: Calls from the user's own to this one.
    """
    warnings.warn(
        f"{old} is now {new}. Use the new name; the old one goes with the next "
        "version.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's ``__getattr__`` that serves old names, with a warning.

    Args:
        module: The module's ``__name__``.
        names: The new name of each old one.
    """

    def look_up(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warn_renamed(f"{module}.{name}", new)
        return getattr(sys.modules[module], new)

    return look_up

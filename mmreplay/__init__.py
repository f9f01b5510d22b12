"""mmreplay: a disk-backed, memory-mapped experience dataset for reinforcement learning.

Public names load on first use, so that importing mmreplay costs what numpy costs
and ``mmreplay info`` does not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmreplay import errors as errors
    from mmreplay import ray as ray
    from mmreplay.batch import Batch as Batch
    from mmreplay.buffer.copy_files import Snapshot as Snapshot
    from mmreplay.buffer.copy_rows import CompactReport as CompactReport
    from mmreplay.buffer.copy_rows import compact as compact
    from mmreplay.buffer.replay_buffer import ReplayBuffer as ReplayBuffer
    from mmreplay.concatenation import Concat as Concat
    from mmreplay.concatenation import concat as concat
    from mmreplay.convert.auto_export import AutoExport as AutoExport
    from mmreplay.convert.base import Report as Report
    from mmreplay.convert.export import export as export
    from mmreplay.convert.load import load as load
    from mmreplay.convert.table import episode_table as episode_table
    from mmreplay.datasets.linked_copy import linked_copy as linked_copy
    from mmreplay.errors import AutoresetWarning as AutoresetWarning
    from mmreplay.errors import CorruptError as CorruptError
    from mmreplay.errors import DurabilityWarning as DurabilityWarning
    from mmreplay.errors import EmptyError as EmptyError
    from mmreplay.errors import FailedError as FailedError
    from mmreplay.errors import ForkedError as ForkedError
    from mmreplay.errors import FormatError as FormatError
    from mmreplay.errors import FullError as FullError
    from mmreplay.errors import FullWarning as FullWarning
    from mmreplay.errors import LockedError as LockedError
    from mmreplay.errors import LossWarning as LossWarning
    from mmreplay.errors import RemovedError as RemovedError
    from mmreplay.errors import ReplayError as ReplayError
    from mmreplay.errors import SchemaError as SchemaError
    from mmreplay.errors import SourceError as SourceError
    from mmreplay.errors import StaleError as StaleError
    from mmreplay.errors import StarvedError as StarvedError
    from mmreplay.errors import VersionError as VersionError
    from mmreplay.limiter import RateCounter as RateCounter
    from mmreplay.limiter import RateLimiter as RateLimiter
    from mmreplay.loader import ConcatDataset as ConcatDataset
    from mmreplay.loader import ConcatStream as ConcatStream
    from mmreplay.loader import ReplayDataset as ReplayDataset
    from mmreplay.loader import ReplayLoader as ReplayLoader
    from mmreplay.loader import ReplayStream as ReplayStream
    from mmreplay.loader import collate as collate
    from mmreplay.page.launch import view as view
    from mmreplay.plan import Plan as Plan
    from mmreplay.plan import plan_buffer as plan_buffer
    from mmreplay.ragged import Ragged as Ragged
    from mmreplay.recording import RecordReport as RecordReport
    from mmreplay.recording import record as record
    from mmreplay.repairing import DroppedRows as DroppedRows
    from mmreplay.repairing import RepairReport as RepairReport
    from mmreplay.repairing import repair as repair
    from mmreplay.ring import Span as Span
    from mmreplay.samplers.base import Draw as Draw
    from mmreplay.samplers.combine import MixtureSampler as MixtureSampler
    from mmreplay.samplers.distinct import DistinctSampler as DistinctSampler
    from mmreplay.samplers.episode import EpisodeSampler as EpisodeSampler
    from mmreplay.samplers.episode import return_within as return_within
    from mmreplay.samplers.groups import GroupSampler as GroupSampler
    from mmreplay.samplers.prioritized import PrioritizedSampler as PrioritizedSampler
    from mmreplay.samplers.prioritized import RankPrioritizedSampler as RankPrioritizedSampler
    from mmreplay.samplers.priority_distribution import LinearSchedule as LinearSchedule
    from mmreplay.samplers.recent import EmphasizeRecentSampler as EmphasizeRecentSampler
    from mmreplay.samplers.recent import RecentSampler as RecentSampler
    from mmreplay.samplers.recent import ignore_earliest as ignore_earliest
    from mmreplay.samplers.sequence import SequenceSampler as SequenceSampler
    from mmreplay.samplers.shuffled import ShuffledSampler as ShuffledSampler
    from mmreplay.samplers.staleness import StalenessSampler as StalenessSampler
    from mmreplay.samplers.stratified import StratifiedSampler as StratifiedSampler
    from mmreplay.samplers.sum_tree import SegmentTree as SegmentTree
    from mmreplay.samplers.sum_tree import SumTree as SumTree
    from mmreplay.samplers.uniform import UniformSampler as UniformSampler
    from mmreplay.samplers.uses import UseCounter as UseCounter
    from mmreplay.schema import Field as Field
    from mmreplay.schema import Schema as Schema
    from mmreplay.splitting import Part as Part
    from mmreplay.splitting import split as split
    from mmreplay.stats import EpisodeTable as EpisodeTable
    from mmreplay.stats import Moments as Moments
    from mmreplay.stats import field_moments as field_moments
    from mmreplay.stats import histogram as histogram
    from mmreplay.storage.memory_usage import MemoryUsage as MemoryUsage
    from mmreplay.transforms.advantages import GAE as GAE
    from mmreplay.transforms.advantages import LambdaReturn as LambdaReturn
    from mmreplay.transforms.apply import Apply as Apply
    from mmreplay.transforms.delta import Delta as Delta
    from mmreplay.transforms.elementwise import Cast as Cast
    from mmreplay.transforms.elementwise import OneHot as OneHot
    from mmreplay.transforms.encoded import Encoded as Encoded
    from mmreplay.transforms.her import HER as HER
    from mmreplay.transforms.normalize import Normalize as Normalize
    from mmreplay.transforms.nstep import NStep as NStep
    from mmreplay.transforms.returns import DiscountedReturn as DiscountedReturn
    from mmreplay.transforms.stack import ActionHistory as ActionHistory
    from mmreplay.transforms.stack import FrameStack as FrameStack
    from mmreplay.transforms.without_next import WithoutNext as WithoutNext
    from mmreplay.verify import Finding as Finding
    from mmreplay.verify import VerifyReport as VerifyReport
    from mmreplay.verify import verify_buffer as verify_buffer
    from mmreplay.zarr_groups.source import ZarrSource as ZarrSource

__version__ = "0.1.0"

_MODULES = {
    "ActionHistory": "mmreplay.transforms.stack",
    "Apply": "mmreplay.transforms.apply",
    "AutoExport": "mmreplay.convert.auto_export",
    "AutoresetWarning": "mmreplay.errors",
    "Batch": "mmreplay.batch",
    "Cast": "mmreplay.transforms.elementwise",
    "CompactReport": "mmreplay.buffer.copy_rows",
    "Concat": "mmreplay.concatenation",
    "ConcatDataset": "mmreplay.loader",
    "ConcatStream": "mmreplay.loader",
    "CorruptError": "mmreplay.errors",
    "Delta": "mmreplay.transforms.delta",
    "Encoded": "mmreplay.transforms.encoded",
    "DiscountedReturn": "mmreplay.transforms.returns",
    "DistinctSampler": "mmreplay.samplers.distinct",
    "Draw": "mmreplay.samplers.base",
    "DroppedRows": "mmreplay.repairing",
    "DurabilityWarning": "mmreplay.errors",
    "EmptyError": "mmreplay.errors",
    "EpisodeSampler": "mmreplay.samplers.episode",
    "EpisodeTable": "mmreplay.stats",
    "FailedError": "mmreplay.errors",
    "Field": "mmreplay.schema",
    "Finding": "mmreplay.verify",
    "ForkedError": "mmreplay.errors",
    "FormatError": "mmreplay.errors",
    "FrameStack": "mmreplay.transforms.stack",
    "FullError": "mmreplay.errors",
    "FullWarning": "mmreplay.errors",
    "LossWarning": "mmreplay.errors",
    "GAE": "mmreplay.transforms.advantages",
    "GroupSampler": "mmreplay.samplers.groups",
    "HER": "mmreplay.transforms.her",
    "LambdaReturn": "mmreplay.transforms.advantages",
    "LinearSchedule": "mmreplay.samplers.priority_distribution",
    "LockedError": "mmreplay.errors",
    "MemoryUsage": "mmreplay.storage.memory_usage",
    "MixtureSampler": "mmreplay.samplers.combine",
    "Moments": "mmreplay.stats",
    "NStep": "mmreplay.transforms.nstep",
    "Normalize": "mmreplay.transforms.normalize",
    "OneHot": "mmreplay.transforms.elementwise",
    "Part": "mmreplay.splitting",
    "Plan": "mmreplay.plan",
    "PrioritizedSampler": "mmreplay.samplers.prioritized",
    "RankPrioritizedSampler": "mmreplay.samplers.prioritized",
    "Ragged": "mmreplay.ragged",
    "RateCounter": "mmreplay.limiter",
    "RateLimiter": "mmreplay.limiter",
    "RecentSampler": "mmreplay.samplers.recent",
    "RecordReport": "mmreplay.recording",
    "RemovedError": "mmreplay.errors",
    "RepairReport": "mmreplay.repairing",
    "ReplayBuffer": "mmreplay.buffer.replay_buffer",
    "ReplayDataset": "mmreplay.loader",
    "ReplayError": "mmreplay.errors",
    "ReplayLoader": "mmreplay.loader",
    "ReplayStream": "mmreplay.loader",
    "Report": "mmreplay.convert.base",
    "Schema": "mmreplay.schema",
    "SchemaError": "mmreplay.errors",
    "SegmentTree": "mmreplay.samplers.sum_tree",
    "SequenceSampler": "mmreplay.samplers.sequence",
    "EmphasizeRecentSampler": "mmreplay.samplers.recent",
    "ShuffledSampler": "mmreplay.samplers.shuffled",
    "Snapshot": "mmreplay.buffer.copy_files",
    "SourceError": "mmreplay.errors",
    "Span": "mmreplay.ring",
    "StaleError": "mmreplay.errors",
    "StalenessSampler": "mmreplay.samplers.staleness",
    "StarvedError": "mmreplay.errors",
    "StratifiedSampler": "mmreplay.samplers.stratified",
    "SumTree": "mmreplay.samplers.sum_tree",
    "UniformSampler": "mmreplay.samplers.uniform",
    "UseCounter": "mmreplay.samplers.uses",
    "VerifyReport": "mmreplay.verify",
    "VersionError": "mmreplay.errors",
    "WithoutNext": "mmreplay.transforms.without_next",
    "ZarrSource": "mmreplay.zarr_groups.source",
    "collate": "mmreplay.loader",
    "compact": "mmreplay.buffer.copy_rows",
    "concat": "mmreplay.concatenation",
    "episode_table": "mmreplay.convert.table",
    "export": "mmreplay.convert.export",
    "field_moments": "mmreplay.stats",
    "histogram": "mmreplay.stats",
    "ignore_earliest": "mmreplay.samplers.recent",
    "linked_copy": "mmreplay.datasets.linked_copy",
    "load": "mmreplay.convert.load",
    "plan_buffer": "mmreplay.plan",
    "record": "mmreplay.recording",
    "repair": "mmreplay.repairing",
    "return_within": "mmreplay.samplers.episode",
    "split": "mmreplay.splitting",
    "verify_buffer": "mmreplay.verify",
    "view": "mmreplay.page.launch",
}

__all__ = sorted(_MODULES)  # one list, not two


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name == "errors":
        return import_module("mmreplay.errors")
    if name == "ray":
        try:
            return import_module("mmreplay.ray")
        except ImportError as error:
            # `hasattr` has to answer, and others to read what is to be installed.
            raise AttributeError(str(error)) from error
    from difflib import get_close_matches

    message = f"module 'mmreplay' has no attribute {name!r}"
    near = [] if name.startswith("_") else get_close_matches(name, _MODULES, 1)
    if not near:
        raise AttributeError(message, name=name, obj=sys.modules[__name__])
    from importlib.util import find_spec

    hint = f"Did you mean: {near[0]!r}?"
    # `from mmreplay import name` drops an AttributeError, and what it says instead
    # names nothing near before Python 3.12. Modules of the package are found later.
    if sys._getframe(1).f_code.co_name == "_handle_fromlist" and not find_spec(
        f"{__name__}.{name}"
    ):
        raise ImportError(f"cannot import name {name!r} from 'mmreplay'. {hint}", name=__name__)
    raise AttributeError(f"{message}. {hint}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

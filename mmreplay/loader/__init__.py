"""A buffer for torch's DataLoader."""

from mmreplay.loader.dataset import ReplayDataset as ReplayDataset
from mmreplay.loader.dataset import collate as collate
from mmreplay.loader.draws import Draws as Draws
from mmreplay.loader.replay_loader import ReplayLoader as ReplayLoader
from mmreplay.loader.several import ConcatDataset as ConcatDataset
from mmreplay.loader.several import ConcatStream as ConcatStream
from mmreplay.loader.stream import ReplayStream as ReplayStream

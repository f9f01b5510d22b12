"""Several buffers drawn from as one: `concat` draws, `batches` puts together."""

from mmreplay.concatenation.batches import joined as joined
from mmreplay.concatenation.concat import Concat as Concat
from mmreplay.concatenation.concat import ConcatDraw as ConcatDraw
from mmreplay.concatenation.concat import concat as concat

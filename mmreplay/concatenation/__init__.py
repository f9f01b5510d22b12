"""Several buffers drawn from as one: `concat` draws, `batches` puts together."""

from mmreplay.concatenation.batches import joined as joined
from mmreplay.concatenation.draws import ConcatDraw as ConcatDraw
from mmreplay.concatenation.several import Concat as Concat
from mmreplay.concatenation.several import concat as concat

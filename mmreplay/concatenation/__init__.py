"""Several buffers drawn from as one: `concat` draws, `batches` puts together."""

from mmreplay.concatenation.concat import Concat as Concat
from mmreplay.concatenation.concat import concat as concat

"""parquet: the contract."""

from mmreplay.convert.base import BLOCK_NBYTES
from tests.convert.contract import FormatContract


class TestParquet(FormatContract):
    suffix = ".parquet"
    # A row group of 32 MiB is held on top of the blocks.
    most_nbytes = 6 * BLOCK_NBYTES

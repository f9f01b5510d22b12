"""csv: the contract."""

from typing import ClassVar

import numpy as np

from mmreplay.schema.dtypes import DTYPES
from tests.convert.contract import FormatContract
from tests.convert.support import same_rows


def as_text_holds(column):
    """A column whose NaNs are all the one that text has."""
    column = np.array(column)
    if column.dtype.kind == "f":
        column[np.isnan(column)] = np.nan
    return column


class TestCsv(FormatContract):
    suffix = ".csv"
    dtypes = tuple(name for name in DTYPES if name != "bfloat16")
    options: ClassVar = {"force": True}
    image = (40,)
    large_nbytes = 40 << 20
    full_at = (0, 1, 2)

    def same_rows(self, one, other):
        same_rows(one, other, as_text_holds)

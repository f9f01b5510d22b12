"""The twins of the row kernels."""

import contextlib

import pytest

from mmreplay.kernels import choose
from mmreplay.kernels import rows as twin

KERNELS = {"numpy": twin}
with contextlib.suppress(ImportError):
    KERNELS["c"] = choose("rows", "c").module


@pytest.fixture(params=["numpy", "c"])
def rows(request):
    if request.param not in KERNELS:
        pytest.skip("the C kernels are not built here")
    return KERNELS[request.param]

"""What every test may use, and the settings that make test runs repeatable."""

import gc
import os
import signal
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import mmreplay as mr
from tests import slices

# A shared or virtual machine stalls for longer than any deadline worth having, and
# a failure that CI finds has to be found again here.
settings.register_profile(
    "repeatable",
    deadline=None,
    max_examples=slices.count(100, 15),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


ENGINES = ("memmap", "zarr")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--engine zarr`` runs any suite over compressed shards."""
    parser.addoption("--engine", choices=ENGINES, default="memmap")


def pytest_configure(config: pytest.Config) -> None:
    """Have Ctrl-C heard, and buffers that name no engine be of the one asked for.

    Garbage is not collected until all tests are: nearly all that is made until then
    stays, and passes over it took a third of the time.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # So a shell starts what it runs in the background; tests send it, children too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    create: Any = mr.ReplayBuffer.create
    create.__func__.__kwdefaults__["engine"] = config.getoption("--engine")


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator that starts alike in every test."""
    return np.random.default_rng(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what slices leave out, before `-m` chooses."""
    slices.mark(items)


def pytest_collection_finish() -> None:
    """Take what was imported and collected out of later collections of garbage.

    Many tests call `gc.collect`, which passes over all that is there: 0.2 s with all
    tests collected.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Take out what is left of each file of tests, too: 0.5 s after 8,000 tests."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()

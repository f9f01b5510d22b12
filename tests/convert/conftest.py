"""What several tests of conversions need."""

import pytest

from mmreplay.buffer import bulk_writer
from mmreplay.cli.run import run

PAGE = 4096


@pytest.fixture
def small(monkeypatch):
    """Files of any size go past the cache, in slabs of a few pages."""
    monkeypatch.setattr(bulk_writer, "DIRECT_NBYTES", 0)
    monkeypatch.setattr(bulk_writer, "SLAB_NBYTES", 4 * PAGE)
    monkeypatch.setattr(bulk_writer, "MIN_SLAB_NBYTES", 4 * PAGE)


@pytest.fixture
def cli(capsys):
    """Run ``mmreplay convert``; return its exit code, stdout and stderr."""

    def call(*args):
        code = run(["convert", *map(str, args)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call

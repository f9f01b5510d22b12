"""Memory does not grow with the buffer, whatever options a format is given."""

import pytest

import mmreplay as mr
from mmreplay.convert.base import BLOCK_NBYTES
from tests.convert.contract import make_large, peak

# Blocks of 16 MiB: one that is read while the last one is there still, and one that is
# packed, and what imports cost; 120 MiB of data in all.
MAX_NBYTES = 3 * BLOCK_NBYTES + (4 << 20)
WAYS = {
    "parts": ("a.safetensors", {"part_bytes": 30e6}, {}),
    "skrl": ("a.npz", {"layout": "skrl"}, {"layout": "skrl", "size": 1000}),
    "deflated": ("a.npz", {"compression": "deflate", "compression_level": 1}, {}),
    "episodes": ("a.npz", {"episodes": slice(1, 8)}, {"rows": slice(5, None)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_memory_does_not_grow_with_the_buffer(tmp_path, way):
    name, written, read = WAYS[way]
    make_large(tmp_path / "source", 120 << 20, (84, 84, 4))
    file = tmp_path / name
    assert peak(lambda: mr.export(tmp_path / "source", file, **written)) < MAX_NBYTES
    assert peak(lambda: mr.load(file, tmp_path / "target", **read)) < MAX_NBYTES

"""Workers have no copy of the buffer of their own."""

import pytest

from tools.bench import bench_workers

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("workers", "context"), [(4, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
)
def test_workers_use_little_memory_next_to_the_buffer(tmp_path, workers, context):
    nbytes = 192 * MIB
    found = bench_workers.measure(tmp_path, nbytes, workers, [context])
    # A copy in each would be all of it, many times over. What is left is batches of
    # 3.4 MiB under way: kept for reuse, and in shared memory until they are taken.
    assert found[context]["over_a_small_buffer_mib"] < workers * 16

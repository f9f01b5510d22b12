"""What a writer of a run refuses before it joins, without a cluster."""

import pytest

ray = pytest.importorskip("ray")

import mmreplay as mr  # noqa: E402
from mmreplay.ray.ring_writer import _check_ring_name, _open  # noqa: E402
from tests.on_ray.rows import SCHEMA  # noqa: E402


@pytest.mark.parametrize("name", ["thin", "LOCK"])
def test_names_of_other_files_of_the_folder_are_refused(name):
    with pytest.raises(mr.SchemaError, match="name must not be 'thin'"):
        _check_ring_name(name)


def test_a_ring_is_opened_again_only_by_what_it_was_made_with(tmp_path):
    def again(**create):
        _open(tmp_path, "w", SCHEMA, 100, 1, None, "break", create).close()

    again(autoreset="disabled")
    again()
    again(autoreset="disabled", engine="memmap")
    with pytest.raises(
        mr.SchemaError, match=r"autoreset must be 'disabled', as of .*got 'next_step'"
    ):
        again(autoreset="next_step")
    with pytest.raises(mr.SchemaError, match=r"engine must be 'memmap', as of .*zarr"):
        again(engine="zarr")

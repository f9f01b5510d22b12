"""``info --build`` tells what mmreplay itself runs on."""

import json
import subprocess
import sys

import numpy as np

import mmreplay as mr
from mmreplay import kernels


def test_it_tells_versions_and_which_kernels_run(facts):
    found = facts("info", "--build")
    assert found["version"] == mr.__version__
    assert found["libraries"]["numpy"] == np.__version__
    assert set(found["kernels"]) == set(kernels.NAMES)
    for name, kernel in found["kernels"].items():
        running = kernels.choose(name, kernels.choice())
        assert kernel == {"runs": running.runs, "why": running.why}


def test_numpy_kernels_run_on_request_and_the_reason_is_printed(cli, facts, monkeypatch):
    monkeypatch.setenv("MMREPLAY_KERNELS", "numpy")
    why = "MMREPLAY_KERNELS=numpy asks for it"
    told = {"runs": "numpy", "why": why}
    assert facts("info", "--build")["kernels"] == dict.fromkeys(kernels.NAMES, told)
    code, out, _ = cli("info", "--build")
    assert (code, f"numpy ({why})" in out) == (0, True)


def test_missing_kernels_are_reported(facts, monkeypatch):
    monkeypatch.delenv("MMREPLAY_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "mmreplay.kernels._tree", None)
    found = facts("info", "--build")["kernels"]["tree"]
    assert found["runs"] == "numpy"
    assert found["why"].startswith("C was not built when mmreplay was installed")


def test_c_that_is_asked_for_and_missing_is_one_line(cli, monkeypatch):
    monkeypatch.setenv("MMREPLAY_KERNELS", "c")
    monkeypatch.setitem(sys.modules, "mmreplay.kernels._tree", None)
    code, out, err = cli("info", "--build")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "kernel 'tree' was not built in C" in err


def test_a_missing_library_is_reported(cli, facts, monkeypatch):
    monkeypatch.setattr("mmreplay.cli.installation.LIBRARIES", ("numpy", "no-such-library"))
    assert facts("info", "--build")["libraries"]["no-such-library"] is None
    assert "not installed" in cli("info", "--build")[1]


def test_it_is_either_a_buffer_or_the_build(cli):
    code, _, err = cli("info", "--build", "runs/a")
    assert code == 2
    assert "PATH and --build were both given" in err
    assert "'PATH': a buffer's folder, or --build" in cli("info")[2]


def test_a_choice_of_kernels_that_is_none_is_a_mistake_of_usage(cli, monkeypatch):
    monkeypatch.setenv("MMREPLAY_KERNELS", "fast")
    code, out, err = cli("info", "--build")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "MMREPLAY_KERNELS must be 'c', 'numpy' or unset, got 'fast'" in err


def test_no_library_is_loaded_to_tell_its_version():
    code = (
        "import sys, json; from mmreplay.cli import installation; "
        "installation.facts(); print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"torch", "zarr", "pyarrow", "gymnasium", "matplotlib", "h5py", "mujoco"}
    assert not heavy & set(json.loads(done.stdout))

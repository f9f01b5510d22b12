"""Masses and recorded draws are the same on every processor, and by both kernels.

A child process without some of this processor's instructions takes the place of
another processor. Which of them change a power depends on where this runs: without
AVX-512 those of glibc, with it those of numpy.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from numpy._core import _multiarray_umath as umath

from mmreplay import kernels

ROOT = Path(__file__).parents[2]
GLIBC = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA"}
NUMPY = {"NPY_DISABLE_CPU_FEATURES": " ".join(umath.__cpu_dispatch__)}
PROCESSORS = {
    "this one": {},
    "without FMA in glibc": {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-FMA"},
    "without what numpy dispatches": NUMPY,
    "without both": GLIBC | NUMPY,
}
KERNELS = ["numpy", *(["c"] if kernels.choose("tree", "").runs == "c" else [])]
MASSES = {
    "priorities": "739d40fe214068356503ba4b8c374a44",
    "updated priorities": "739d40fe214068356503ba4b8c374a44",
    "ranks": "5fd6d5859e8f43cee498de0f43fb80f5",
}


def answers(what):
    """What each processor and kernel prints, by their names."""
    children = {}
    for processor, settings in PROCESSORS.items():
        for kernel in KERNELS:
            environment = os.environ | settings | {"MMREPLAY_KERNELS": kernel}
            children[processor, kernel] = subprocess.Popen(
                [sys.executable, "-m", "tests.frozen.processors", what],
                env=environment,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
    # All are started before one is waited for.
    found = {name: json.loads(child.communicate()[0]) for name, child in children.items()}
    assert all(child.returncode == 0 for child in children.values())
    return found


@pytest.mark.slow
def test_masses_are_the_same_on_every_processor():
    found = answers("masses")
    powers = {each.pop("powers") for each in found.values()}
    # Else no child would be another processor, and all would agree by themselves.
    differ = umath.__cpu_features__.get("FMA3") and platform.libc_ver()[0] == "glibc"
    assert len(powers) > 1 or not differ
    assert {name: each for name, each in found.items() if each != MASSES} == {}


@pytest.mark.slow
def test_recorded_draws_are_the_same_on_every_processor():
    assert {name: cases for name, cases in answers("draws").items() if cases} == {}

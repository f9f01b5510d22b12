"""Builds the kernels; all else about the package stands in pyproject.toml.

They are optional: where there is no compiler the package installs without them,
and their numpy twins serve. One build serves every Python from 3.11 on (the stable
ABI), except free-threaded ones, which have none and build for themselves.
"""

import sysconfig
from glob import glob

from setuptools import Extension, setup

STABLE = not sysconfig.get_config_var("Py_GIL_DISABLED")

# Sums must round as numpy's do: no fused multiply-add, no reassociation.
FLAGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-fast-math", "-Wall", "-Wextra"]


def kernel(name: str) -> Extension:
    """One module of mmreplay/kernels, of one C file."""
    return Extension(
        f"mmreplay.kernels.{name}",
        [f"mmreplay/kernels/{name}.c"],
        define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
        depends=["mmreplay/kernels/_buffers.h", *sorted(glob(f"mmreplay/kernels/{name}_*.h"))],
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread"],
        py_limited_api=STABLE,
        optional=True,
    )


setup(
    ext_modules=[kernel(name) for name in ("_copies", "_faults", "_rows", "_steps", "_tree")],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
)

"""Loops that numpy cannot run well: each in C, beside a numpy twin that defines it.

``_name.c`` is an optional extension, ``name.py`` its twin: the same functions, the
same results to the last bit. `load` gives whichever runs. ``MMREPLAY_KERNELS``,
read once, forces a choice: ``numpy`` the twins, ``c`` the extensions.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

NAMES = ("copies", "rows", "steps", "tree")
CHOICES = ("", "c", "numpy")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Which of two twins runs.

    Attributes:
        runs: ``"c"`` or ``"numpy"``.
        why: In words.
        module: What holds its functions.
    """

    runs: str
    why: str
    module: ModuleType


def choice() -> str:
    """What the environment asks for: ``"c"``, ``"numpy"`` or nothing.

    Raises:
        ValueError: It asks for something else.
    """
    asked = os.environ.get("MMREPLAY_KERNELS", "")
    if asked not in CHOICES:
        raise ValueError(
            f"MMREPLAY_KERNELS: got {asked!r}, expected 'c', 'numpy' or nothing; unset "
            "it to run C where it is built"
        )
    return asked


def choose(name: str, asked: str) -> Kernel:
    """Load one kernel.

    Args:
        name: One of `NAMES`.
        asked: As `choice` returns it.

    Raises:
        ModuleNotFoundError: C is asked for and not built.
    """
    home = f"{__name__}.{name}"
    if asked == "numpy":
        why = "MMREPLAY_KERNELS=numpy asks for it"
        return Kernel("numpy", why, import_module(home))
    try:
        module = import_module(f"{__name__}._{name}")
    except ImportError as error:
        if asked == "c":
            raise ModuleNotFoundError(
                f"kernel {name!r}: MMREPLAY_KERNELS=c asks for C, which is not here "
                f"({error}); install mmreplay where a C compiler is, or unset it"
            ) from error
        why = f"C was not built when mmreplay was installed ({error})"
        return Kernel("numpy", why, import_module(home))
    why = "MMREPLAY_KERNELS=c asks for it" if asked else "built, and nothing forbids it"
    return Kernel("c", why, module)


def load(name: str) -> ModuleType:
    """Return the module of one kernel that runs in this process."""
    return choose(name, choice()).module

"""Loops that numpy cannot run well, in C and as numpy twins that define the results.

``_name.c`` is an optional extension, ``name.py`` its numpy twin: the same functions,
the same results to the last bit. `load` returns the one that runs.
``MMREPLAY_KERNELS``, read once, forces a choice: ``numpy`` the twins, ``c`` the
extensions.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

NAMES = ("copies", "faults", "rows", "steps", "tree")
CHOICES = ("", "c", "numpy")
looked = False


class KernelsWarning(RuntimeWarning):
    """The C kernels were not built, so that their slower numpy twins run."""


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
            f"MMREPLAY_KERNELS must be 'c', 'numpy' or unset, got {asked!r}. Unset it "
            "to use the C kernels where they are built."
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
    module_name = f"{__name__}.{name}"
    if asked == "numpy":
        why = "MMREPLAY_KERNELS=numpy asks for it"
        return Kernel("numpy", why, import_module(module_name))
    try:
        module = import_module(f"{__name__}._{name}")
    except ImportError as error:
        if asked == "c":
            raise ModuleNotFoundError(
                f"kernel {name!r} was not built in C, which MMREPLAY_KERNELS=c asks "
                f"for ({error}). Install a C compiler and reinstall mmreplay, or unset "
                "it."
            ) from error
        why = f"C was not built when mmreplay was installed ({error})"
        return Kernel("numpy", why, import_module(module_name))
    why = "MMREPLAY_KERNELS=c asks for it" if asked else "built, and nothing forbids it"
    return Kernel("c", why, module)


def load(name: str) -> ModuleType:
    """Return the module of one kernel that runs in this process."""
    return choose(name, choice()).module


def missing() -> tuple[str, ...]:
    """Return the kernels whose C module was not built, or cannot be loaded.

    None where ``MMREPLAY_KERNELS=numpy`` asks for the twins.
    """
    if choice() == "numpy":
        return ()
    absent = []
    for name in NAMES:
        try:
            import_module(f"{__name__}._{name}")
        except ImportError:
            absent.append(name)
    return tuple(absent)


def warn_of_missing(frames: int) -> None:
    """Warn once per process that numpy twins run because C was not built.

    Args:
        frames: Calls from the user's own to this one.
    """
    global looked
    if looked:
        return
    looked = True
    if absent := missing():
        warnings.warn(
            f"mmreplay runs without its C kernels ({', '.join(absent)}), which were "
            "not built when it was installed: adds take twice as long, draws and "
            "n-step returns several times as long. Install a C compiler and reinstall "
            "mmreplay (pip install --force-reinstall --no-deps --no-cache-dir), or set "
            "MMREPLAY_KERNELS=numpy to use numpy without this warning",
            KernelsWarning,
            stacklevel=frames + 1,
        )

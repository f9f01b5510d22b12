"""Names of an adapter's package, imported on first use.

A format's module lies in the folder of its library. Converting imports that folder's
package, and should load neither torch nor the library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def names_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's ``__getattr__`` that imports a name on first use.

    Args:
        package: The package's ``__name__``.
        modules: The module of each public name, below ``mmreplay.adapters``.

    Example:
        >>> look_up = names_on_use("mmreplay.adapters.skrl", {"Memory": "skrl.memory"})
        >>> look_up("Memory").__name__
        'Memory'
    """

    def look_up(name: str) -> object:
        if name in modules:
            value = getattr(import_module(f"mmreplay.adapters.{modules[name]}"), name)
            setattr(sys.modules[package], name, value)
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return look_up

"""Names of an adapter's package, imported on first use.

A format's module lies in the folder of its library. Converting imports that folder's
package, and should load neither torch nor the library.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module


def names_on_use(
    package: str, modules: Mapping[str, str], old: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return a package's ``__getattr__`` that imports a name on first use.

    Args:
        package: The package's ``__name__``.
        modules: The module of each public name, below ``mmreplay.adapters``.
        old: Deprecated names: the module and the new name, as ``"sb3.steps.Steps"``.

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
        if old is None or name not in old:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, new = old[name].rpartition(".")
        warnings.warn(
            f"{package}.{name} is now mmreplay.adapters.{old[name]}. Use the new name; "
            "the old one goes with the next version.",
            DeprecationWarning,
            stacklevel=2,
        )
        found: object = getattr(import_module(f"mmreplay.adapters.{module}"), new)
        return found

    return look_up

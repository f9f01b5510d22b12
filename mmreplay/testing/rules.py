"""Runs the rules of a contract, each in a folder of its own.

A rule is a function of one case: what is checked, and a folder to write in. The first
line of its docstring says what must hold, and is part of the error's message.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from mmreplay.errors import SchemaError

Case = TypeVar("Case")
Rules = Mapping[str, Callable[[Case], None]]


class ContractError(AssertionError):
    """A sampler, store or format breaks a rule of its contract.

    Attributes:
        rule: Name of the rule, such as ``"draws_legal_starts"``.
    """

    rule: str = ""


def by_name(*functions: Callable[[Case], None]) -> Rules[Case]:
    """Rules by the names of their functions, in this order."""
    return {function.__name__: function for function in functions}


def run_rules(
    subject: str,
    known: Rules[Case],
    names: Sequence[str] | None,
    folder: str | Path | None,
    make_case: Callable[[Path], AbstractContextManager[Case]],
) -> None:
    """Run rules one after another; the first broken one raises.

    Args:
        subject: Name of what is checked, for messages.
        known: All rules of the contract.
        names: Of the rules to run; None for all.
        folder: Where buffers are made; None for a temporary folder. The files of a
            broken rule stay in a folder that is given.
        make_case: Makes the case of one rule in a new folder.

    Raises:
        ContractError: A rule is broken.
        SchemaError: There is no rule of a name.
    """
    chosen = tuple(known) if names is None else names
    for name in chosen:
        if name not in known:
            raise SchemaError(
                f"rules must be among {', '.join(known)}, got {name!r}. Correct the name."
            )
    with tempfile.TemporaryDirectory(prefix="mmreplay-testing-") as temporary:
        for name in chosen:
            base = Path(temporary if folder is None else folder)
            own = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=base))
            rule = known[name]
            try:
                with make_case(own) as case:
                    rule(case)
            except ContractError as error:
                summary = (rule.__doc__ or "").partition("\n")[0].rstrip(".")
                error.rule = name
                error.args = (f"{subject} breaks rule {name!r} ({summary}): {error}",)
                raise
            except Exception as error:
                error.add_note(f"raised while rule {name!r} checked {subject}")
                raise
            shutil.rmtree(own)

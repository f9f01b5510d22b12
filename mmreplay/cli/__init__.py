"""The command ``mmreplay``: what it prints, and what it exits with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 success, 1 failure, 2 usage, 3 refused input."""
    try:
        from mmreplay.cli.run import run

        code = run(args)
    except KeyboardInterrupt:
        # During the import of a command's modules; `run` reports later ones.
        print("mmreplay: interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)

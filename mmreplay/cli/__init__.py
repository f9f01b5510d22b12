"""The command ``mmreplay``: what it prints, and what it exits with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 well, 1 failed, 2 usage, 3 refused input."""
    try:
        from mmreplay.cli.exits import run

        code = run(args)
    except KeyboardInterrupt:
        # It struck while what a command needs was loaded: `run` tells of the others.
        told = "interrupted; what was written before is kept"
        print(f"mmreplay: {told}", file=sys.stderr)
        code = 130
    sys.exit(code)

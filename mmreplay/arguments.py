"""Bytes as people read them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(nbytes: float) -> str:
    """Bytes with a unit: ``"1.50 GiB"``."""
    step = 0
    while abs(nbytes) >= 1024 and step < len(UNITS) - 1:
        nbytes /= 1024
        step += 1
    return f"{nbytes:,.0f} B" if step == 0 else f"{nbytes:,.2f} {UNITS[step]}"

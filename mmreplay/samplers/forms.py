"""What samplers draw, single steps, windows or whole episodes, and which go together.

A sampler of windows says it as ``sampler.form``, so that parts that never fit one
batch are refused when they are put together, and not at some draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mmreplay.errors import SchemaError
from mmreplay.samplers.base import Sampler, Windows
from mmreplay.samplers.checks import checked

PADDED = "padded episodes"
RAGGED = "ragged episodes"


def form_of(sampler: object) -> str | None:
    """What a sampler says that it draws; None where it says nothing."""
    form = getattr(sampler, "form", None)
    return form if isinstance(form, str) else None


def single(sampler: object, whose: str) -> Sampler:
    """Return a sampler that is to draw single steps.

    Args:
        sampler: Any object.
        whose: What it is a part of, for the message.

    Raises:
        SchemaError: It is no sampler, or draws windows or episodes.
    """
    own = checked(sampler)
    form = form_of(own)
    if form is not None:
        raise SchemaError(
            f"sampler: got the {type(own).__name__}, of {form}, inside of a {whose}, "
            "expected one that draws single steps; give its own sampler to the outer "
            "one, or draw with it alone"
        )
    return own


def alike(samplers: Sequence[object]) -> list[Sampler]:
    """Return samplers whose draws can be put into one batch, as far as they say.

    Raises:
        SchemaError: One is no sampler, or they cannot.
    """
    own = [checked(sampler) for sampler in samplers]
    forms = [form_of(sampler) for sampler in own]
    if RAGGED in forms and len(own) > 1:
        raise SchemaError(
            f"samplers: got {forms} to put into one batch, expected none ragged, whose "
            "steps are of a number that shares know nothing of; make the "
            "EpisodeSamplers with layout='padded'"
        )
    known = {form for form in forms if form is not None}
    if len(known) > 1:
        raise SchemaError(
            f"samplers: got {forms} to put into one batch, expected them all alike; "
            "wrap the mixture in one SequenceSampler instead"
        )
    return own


def common(samplers: Sequence[Sampler]) -> str | None:
    """The form of all of several samplers; None where one says nothing or another."""
    forms = {form_of(sampler) for sampler in samplers}
    return forms.pop() if len(forms) == 1 else None


def padded(windows: Sequence[Windows]) -> list[Windows]:
    """Windows as long as the longest, their last column standing in for the rest."""
    longest = max(each.positions.shape[1] for each in windows)
    return [_longer(each, longest) for each in windows]


def _longer(windows: Windows, length: int) -> Windows:
    count, width = windows.positions.shape
    firsts, none = windows.is_first, np.zeros((count, length - width), bool)
    return Windows(
        np.pad(windows.positions, ((0, 0), (0, length - width)), "edge"),
        np.hstack([windows.mask, none]),
        None if firsts is None else np.hstack([firsts, none]),
        windows.first_only,
    )

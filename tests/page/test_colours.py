"""The page's colours: contrast, and distance for who sees fewer colours."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import mmreplay.page

CSS = Path(mmreplay.page.__file__).parent / "static" / "style.css"
# Machado, Oliveira and Fernandes 2009, severity 1, of linear RGB.
SEEN_AS = {
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
WHITE = [0.9505, 1.0, 1.089]


def tokens(theme):
    """Colours of a theme by name, linear RGB."""
    text = CSS.read_text()
    start = 0 if theme == "light" else text.index('data-theme="dark"')
    block = text[start : text.index("color-scheme", start)]
    found = re.findall(r"--([a-z0-9-]+): #([0-9a-f]{6});", block)
    return {name: linear(value) for name, value in found}


def linear(value):
    """``#rrggbb`` as linear RGB."""
    rgb = np.array([int(value[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(a, b):
    """The ratio of WCAG."""
    bright, dark = sorted((float(c @ TO_XYZ[1]) + 0.05 for c in (a, b)), reverse=True)
    return bright / dark


def lab(rgb):
    """CIE L*a*b* of linear RGB."""
    xyz = np.clip(TO_XYZ @ np.clip(rgb, 0, 1) / WHITE, 1e-9, None)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_texts_and_controls_stand_out(theme):
    colours = tokens(theme)
    for name in ("text", "muted", "accent", "bad", "warn", "good"):
        for ground in ("bg", "surface", "sunk"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    for name in ("bad", "warn", "good", "accent"):
        assert contrast(colours[name], colours[f"{name}-tint"]) >= 4.5, name
    for name in ("edge", "playhead", *(f"s{i}" for i in range(6))):
        assert contrast(colours[name], colours["surface"]) >= 3, name


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", [None, *SEEN_AS])
def test_series_differ_for_every_sight(theme, sight):
    colours = tokens(theme)
    matrix = np.array(SEEN_AS[sight]) if sight else np.eye(3)
    seen = [lab(matrix @ colours[f"s{i}"]) for i in range(6)]
    nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
    # A difference of 2.3 is just noticeable; lines are thin.
    assert nearest >= 20

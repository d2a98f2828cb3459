"""The colour that Perfetto's UI gives a slice by its name, so that a phase has one colour in every picture.

The UI hashes the name, without numbers, to a hue and a lightness of HSLuv (https://www.hsluv.org), at a saturation of
80 %.
"""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r" ?\d+")
_SATURATION = 80.0
_TO_RGB = (
    (3.240969941904521, -1.537383177570093, -0.498610760293),
    (-0.96924363628087, 1.87596750150772, 0.041555057407175),
    (0.055630079696993, -0.20397695888897, 1.056971514242878),
)
"""From CIE XYZ to linear sRGB."""
_WHITE_U, _WHITE_V = 0.19783000664283, 0.46831999493879
_KAPPA, _EPSILON = 903.2962962, 0.0088564516


def slice_color(name: str) -> str:
    """The colour of slices of a name, as `#rrggbb`."""
    bare = _NUMBER.sub("", name)
    red, green, blue = _rgb(_hash(bare) % 360, _hash(f"{bare}x") % 40 + 40.0)
    return f"#{red:02x}{green:02x}{blue:02x}"


def _hash(text: str) -> int:
    """FNV-1a as JavaScript computes it: the product is a double, of which 32 bits are taken."""
    value = 18652613
    for letter in map(ord, text):
        value = _signed(int(float(_signed(value ^ letter)) * 16777619.0))
    return abs(value)


def _signed(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _rgb(hue: float, lightness: float) -> tuple[int, int, int]:
    """Of a hue in degrees and a lightness in percent, between 0 and 255 each."""
    angle = math.radians(hue)
    chroma = _most_chroma(lightness, angle) * _SATURATION / 100
    u, v = (
        share * chroma / (13 * lightness) + white
        for share, white in ((math.cos(angle), _WHITE_U), (math.sin(angle), _WHITE_V))
    )
    y = ((lightness + 16) / 116) ** 3 if lightness > 8 else lightness / _KAPPA
    x = 9 * y * u / (4 * v)
    z = (9 * y - 15 * v * y - v * x) / (3 * v)
    red, green, blue = (
        _companded(sum(part * value for part, value in zip(row, (x, y, z), strict=True))) for row in _TO_RGB
    )
    return red, green, blue


def _companded(linear: float) -> int:
    value = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return int(255 * min(max(value, 0.0), 1.0))


def _most_chroma(lightness: float, angle: float) -> float:
    """The largest chroma of a lightness and a hue that sRGB has: to the nearest of the six lines that bound it."""
    cubed = (lightness + 16) ** 3 / 1560896
    scaled = cubed if cubed > _EPSILON else lightness / _KAPPA
    lengths = []
    for first, second, third in _TO_RGB:
        for end in (0, 1):
            top = (284517 * first - 94839 * third) * scaled
            height = (838422 * third + 769860 * second + 731718 * first) * lightness * scaled - 769860 * end * lightness
            bottom = (632260 * third - 126452 * second) * scaled + 126452 * end
            length = height / bottom / (math.sin(angle) - top / bottom * math.cos(angle))
            if length >= 0:
                lengths.append(length)
    return min(lengths)

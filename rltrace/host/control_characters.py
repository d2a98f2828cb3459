"""Makes control characters visible: a name in a Recording may hold ones that set a terminal's title, clipboard or
cursor.

Whatever goes to a terminal goes through here: `visible` for a line, `visible_lines` for several, `in_json` for JSON.
"""

from __future__ import annotations

import re

_OBEYED = "\\x00-\\x1f\\x7f-\\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""Control characters (C0, DEL, C1), characters that change the direction of text, and those that end a line."""

_CONTROL = re.compile(f"[{_OBEYED}]")
_NO_LINE_END = re.compile(f"(?!\n)[{_OBEYED}]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    r"""Return one line of text in which every control character is shown: `\x1b`, `\n`, `\u202e`."""
    # Nearly all text is printable, and control characters are not; to ask that is quicker.
    return text if text.isprintable() else _CONTROL.sub(_shown, text)


def visible_lines(text: str) -> str:
    """Return text of several lines in which every other control character is shown."""
    return _NO_LINE_END.sub(_shown, text)


def in_json(text: str) -> str:
    """Return the same JSON with escapes for all control characters; outside of its strings only line ends remain."""
    return _NO_LINE_END.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _shown(found: re.Match[str]) -> str:
    character = found[0]
    return _NAMED.get(character) or (f"\\x{ord(character):02x}" if character <= "\xff" else f"\\u{ord(character):04x}")

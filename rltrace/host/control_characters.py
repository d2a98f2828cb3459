"""Shows what a terminal would obey: a name in a Recording may hold what sets its title, clipboard or cursor.

Whatever goes to a terminal goes through here: `visible` of a line, `visible_lines` of several, `in_json` of JSON.
"""

from __future__ import annotations

import re

_OBEYED = "\\x00-\\x1f\\x7f-\\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""Control characters (C0, DEL, C1), what turns the direction of text around, and what ends a line."""

_CONTROL = re.compile(f"[{_OBEYED}]")
_NO_LINE_END = re.compile(f"(?!\n)[{_OBEYED}]")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    r"""One line of text in which every control character is shown: `\x1b`, `\n`, `\u202e`."""
    return _CONTROL.sub(_shown, text)


def visible_lines(text: str) -> str:
    """The same of text that has line ends of ours."""
    return _NO_LINE_END.sub(_shown, text)


def in_json(text: str) -> str:
    """The same JSON with escapes for all control characters; outside of its strings there are line ends alone."""
    return _NO_LINE_END.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _shown(found: re.Match[str]) -> str:
    character = found[0]
    return _NAMED.get(character) or (f"\\x{ord(character):02x}" if character <= "\xff" else f"\\u{ord(character):04x}")

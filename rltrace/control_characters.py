"""Shows what a terminal would obey: a name in a Recording may hold what sets its title, clipboard or cursor.

Whatever goes to a terminal goes through here: `visible` of a line of text, `in_json` of JSON.
"""

from __future__ import annotations

import re

_OBEYED = "\\x00-\\x1f\\x7f-\\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"
"""Control characters (C0, DEL, C1), what turns the direction of text around, and what ends a line."""

_CONTROL = re.compile(f"[{_OBEYED}]")
_CONTROL_IN_JSON = re.compile(f"(?!\n)[{_OBEYED}]")


def visible(text: str) -> str:
    r"""One line of text in which every control character is shown: `\x1b`, `\n`, `\u202e`."""
    return _CONTROL.sub(_shown, text)


def in_json(text: str) -> str:
    """The same JSON with escapes for all control characters; outside of its strings there are line ends alone."""
    return _CONTROL_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _shown(found: re.Match[str]) -> str:
    return _NAMED.get(found[0]) or (f"\\x{ord(found[0]):02x}" if found[0] <= "\xff" else f"\\u{ord(found[0]):04x}")


_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

"""Readings of other hosts' clocks, as they are appended to the Recording; `read/alignment.py` aligns times by them.

A reading is one exchange: a process of the reference clock asks, a process of the other clock says its time, the answer
comes back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rltrace.host.clock import Domain
from rltrace.record import checksum

FILE = "clocks.jsonl"
"""File in a Recording with one line per reading."""

Exchange = tuple[int, int, int]
"""When it was sent, what the other clock showed, and when the answer was back."""


def line(reference: Domain, domain: Domain, exchange: Exchange, **more: Any) -> str:
    """Return the line that is appended to `FILE` about the shortest exchange of a round, with its newline.

    Args:
        reference: The clock domain that sent and received.
        domain: The clock domain that was read in between.
        exchange: sent_ns, read_ns, received_ns.
        **more: Useful to people: the host, the number of exchanges.
    """
    times = dict(zip(("sent_ns", "read_ns", "received_ns"), exchange, strict=True))
    return checksum.signed(json.dumps({"reference": reference, "domain": domain, **times, **more})) + "\n"


def append(recording: Path, text: str) -> None:
    """Append lines of readings to a Recording.

    Raises:
        OSError: it cannot be written.
    """
    with (recording / FILE).open("a") as file:
        file.write(text)


def shortest(exchanges: list[Exchange]) -> Exchange:
    """Return the exchange that says most: the one that took the least time."""
    return min(exchanges, key=lambda exchange: exchange[2] - exchange[0])

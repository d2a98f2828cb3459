"""A port for a server that cannot be told to take any and to say which."""

from __future__ import annotations

import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The kernel gives a port of this range to whoever asks for any, such as the tests beside this one."""
FIRST = 20_000
"""Ray's workers take ports below."""


def free_port() -> int:
    """Return a port that is free, and stays so until its server binds it: nobody gets it who asks for any port."""
    taken_from = int(RANGE.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(FIRST, taken_from)
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port

"""`python -m rltrace.run.cluster_sidecar RECORDING`: the supervisor starts it beside a run on a Ray cluster.

It reads the clock of every node periodically, and collects the segments at the end. If every allocation of some steps
is to be kept, it tells each node when these steps run. It is a process of its own, so that the traced program has no
thread of ours and waits for nothing.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rltrace.errors import RltraceError
from rltrace.record import cluster, manifest
from rltrace.record.announcement import complain, say
from rltrace.run import nodes
from rltrace.run.collection import collect
from rltrace.run.sidecar import is_over

PERIOD_SECONDS = 5.0
"""Time between two rounds of readings. A clock that drifts by NTP's 15 ppm is off by at most 37 us more in the
middle."""


TELL_SECONDS = 0.1
"""Time between two rounds in which nodes hear of chosen steps. Another host hears of a step after this time and the few
ms that Ray takes."""


def main(folder: str, chosen: str = "") -> int:
    """Watch until stdin ends, then collect.

    Args:
        folder: Folder of the Recording.
        chosen: Steps whose every allocation is kept; empty if there are none.

    Returns:
        The exit code.
    """
    recording = Path(folder)
    address = cluster.ray_address(recording)
    if address is None:
        return 0
    run_id = json.loads((recording / manifest.FILE).read_text())["run_id"]
    try:
        with nodes.join(address, run_id, cluster.ray_authentication(recording)) as joined:
            failures = joined.read_clocks(recording)
            while not (_tell(joined, recording) if chosen else is_over(PERIOD_SECONDS)):
                failures = joined.read_clocks(recording)
            failures += joined.read_clocks(recording)
            done = collect(recording, joined)
    except RltraceError as error:
        complain(str(error))
        return error.exit_code
    for failure in dict.fromkeys([*failures, *done.failures]):
        complain(failure)
    if done.hosts:
        say(f"collected {done}")
    for left in done.left:
        say(left)
    return 1 if done.failures else 0


def _tell(joined: nodes.Nodes, recording: Path) -> bool:
    """Tell every node of chosen steps for one period; return whether the run ended meanwhile."""
    until = time.monotonic() + PERIOD_SECONDS
    while time.monotonic() < until:
        joined.tell_steps(recording)
        if is_over(TELL_SECONDS):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

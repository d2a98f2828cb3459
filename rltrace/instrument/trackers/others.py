"""What other processes of a run did in a step, as the process beside the run says it (`rltrace/run/step_totals.py`).

Only the thread that tells trackers asks, so that waiting for a line holds nobody up.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rltrace.record.trackers import FILE

PATIENCE_SECONDS = 3.0
"""How long a step's line is waited for. It comes when all processes were looked at once more."""
MOST_MISSED = 3
"""After so many lines that did not come, none is waited for until one comes."""
_LOOK_SECONDS = 0.05


class Others:
    """Reads the lines of a Recording."""

    def __init__(self, recording: Path) -> None:
        self._path = recording / FILE
        self._bytes = 0
        self._by_step: dict[int, Mapping[str, float]] = {}
        self._missed = 0

    def of(self, number: int, haste: threading.Event) -> Mapping[str, float]:
        """Return the scalars of a step; nothing if nobody says them, not in time, or somebody is in haste."""
        until = time.monotonic() + (PATIENCE_SECONDS if self._missed < MOST_MISSED else 0.0)
        while self._read() and number not in self._by_step and time.monotonic() < until and not haste.is_set():
            haste.wait(_LOOK_SECONDS)  # in haste it reads once more
        found = self._by_step.pop(number, None)
        if found is None:
            self._missed += not haste.is_set()
            return {}
        self._missed = 0
        self._by_step = {step: scalars for step, scalars in self._by_step.items() if step > number}
        return found

    def _read(self) -> bool:
        """Read the lines that were appended; return whether there is a file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._bytes)
                content = file.read()
        except OSError:
            return False
        whole = content[: content.rfind(b"\n") + 1]
        self._bytes += len(whole)
        for line in whole.splitlines():
            said = json.loads(line)
            if isinstance(said["step"], int):
                self._by_step[said["step"]] = said["scalars"]
        return True

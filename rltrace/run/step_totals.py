"""What all processes of a run did in each step, for the trackers that one of them has open: a process beside the run
reads what the others append, and writes a line per step into the Recording.

The process that has the tracker open reads the line in a thread (`rltrace/instrument/trackers/`), and none of them
waits for this one. A step that is shorter than `PERIOD_SECONDS` may have no line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TextIO

import numpy as np

from rltrace.analysis.figures import figures
from rltrace.analysis.metrics import Metrics, Together
from rltrace.events import owner_of_counter
from rltrace.host.pace import Pace
from rltrace.read.following import Follower, News
from rltrace.read.recording import Recording
from rltrace.record import trackers
from rltrace.run.sidecar import is_over

PERIOD_SECONDS = 0.5
"""Time between two looks at what was appended."""
NICENESS = 10
"""It gets a processor that the program leaves, as far as that is possible."""
FINDINGS_SECONDS = 60.0
"""How old findings are at least, before they are computed anew ..."""
FINDINGS_SHARE = 0.05
"""... and the most of its time that computing them may take."""


class StepTotals:
    """Follows a run, and says what each of its steps was."""

    def __init__(self, recording: Recording) -> None:
        self._follower = Follower(recording)
        self._metrics = Metrics()
        self._held_bytes: dict[tuple[str, str], float] = {}
        """By process and owner."""
        self._peak_bytes: dict[tuple[str, str], float] = {}
        """Of the step that runs."""
        self._findings: dict[str, float] = {}
        self._pace = Pace(FINDINGS_SHARE, least_seconds=FINDINGS_SECONDS, is_due=False)
        self._told = 0
        """How many steps had ended when the last line was written."""

    def poll(self) -> dict[str, object] | None:
        """Read what was appended; return the line of the step that has ended since."""
        self._read()
        ended = sum(one.steps.count for one in self._metrics.of_process.values())
        if ended == self._told:
            return None
        self._told = ended
        self._read()  # of processes that were looked at before the step ended
        together = Together(self._follower.processes, self._metrics, is_live=True)
        steps = together.steps()
        scalars = dict(self._findings)
        for _, phase, seconds in together.phase_seconds():
            name = trackers.of_phase(phase)
            scalars[name] = max(scalars.get(name, 0.0), seconds)
        for (_, owner), size in self._peak_bytes.items():
            name = trackers.of_peak(owner)
            scalars[name] = max(scalars.get(name, 0.0), size / trackers.GIB)
        self._peak_bytes = dict(self._held_bytes)
        return {"step": steps.number, "scalars": scalars}

    def judge(self) -> None:
        """Compute what bounds a step, if that is due."""
        if not self._pace.is_due:
            return
        began = time.monotonic()
        found = figures(Recording.open(self._follower.recording.path)).why.findings
        prices = [(one.id, one.seconds_per_step) for one in found]
        self._findings = {trackers.of_finding(name): price for name, price in prices if price is not None}
        self._pace.took(time.monotonic() - began)

    def _read(self) -> None:
        for news in self._follower.poll():
            self._add(news)
            if news.process.end_ns is not None:
                self._held_bytes = {key: size for key, size in self._held_bytes.items() if key[0] != news.process.key}

    def _add(self, news: News) -> None:
        self._metrics.add(news.process, news.columns)
        for name, _, values in news.columns.samples_by_name():
            owner, sizes = owner_of_counter(name), values[np.isfinite(values)]
            if owner is not None and len(sizes):
                key = (news.process.key, owner)
                self._held_bytes[key] = float(sizes[-1])
                self._peak_bytes[key] = max(self._peak_bytes.get(key, 0.0), float(sizes.max()))


def tell(totals: StepTotals, file: TextIO) -> None:
    """Write the line of a step that has ended since, and compute findings if they are due."""
    if (line := totals.poll()) is not None:
        file.write(f"{json.dumps(line)}\n")
        file.flush()
    totals.judge()


def main(folder: str) -> None:
    """Write lines until the run ends."""
    os.nice(NICENESS)
    totals = StepTotals(Recording.open(folder))
    with (Path(folder) / trackers.FILE).open("a") as file:
        while not is_over(PERIOD_SECONDS):
            tell(totals, file)


if __name__ == "__main__":
    main(sys.argv[1])

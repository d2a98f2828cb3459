"""Compares what is kept of a process's columns with what is kept of its events."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import seen_by_events

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.lanes import lanes
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.seeing import see
from rltrace.read.recording import Recording


def same_seen(recording: Recording) -> None:
    """Fail if anything differs, the order in which it was kept included."""
    on_lane, time_line = lanes(recording.processes), TimeLine(recording)
    for process in recording.processes:
        lane = on_lane[process.key]
        kept, wanted = see(process, lane, time_line), seen_by_events.see(process, lane, time_line)
        for name in vars(wanted):
            if name not in ("process", "lane"):
                assert _said(getattr(kept, name)) == _said(getattr(wanted, name)), name


def _said(kept: Any) -> Any:
    if isinstance(kept, dict):
        return [(key, _said(value)) for key, value in kept.items()]
    if isinstance(kept, array):
        return kept.typecode, kept.tobytes()
    if isinstance(kept, np.ndarray):
        return kept.dtype.str, kept.shape, kept.tobytes()
    if hasattr(type(kept), "__slots__") and not hasattr(kept, "__struct_fields__"):
        slots = [name for part in type(kept).__mro__ for name in getattr(part, "__slots__", ())]
        return [(name, _said(getattr(kept, name))) for name in slots]
    assert not isinstance(kept, Seen)
    return repr(kept)

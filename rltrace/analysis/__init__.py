"""Figures of a Recording: pure functions from what was recorded to frozen values with their units in the name.

In: a Recording. Out: a `Summary`, whose fields are the keys of the JSON. `summarize` (`summary.py`) reads every event
once, into `Observations` (`observations.py`, `seen/`); its parts can be called alone. Nothing here imports a framework.

Seconds: `steps.py` finds the steps, `phases.py` divides each rank's step, and `steady.py` makes the means that tables
show. `idle.py` and `computing.py` are about time in no phase, `gpu_work.py` about the GPUs' streams, `weight_sync.py`
about the sync's stages, `spans.py` and `open_spans.py` about spans that are no phases. `lanes.py` says which processes
are one rank, `intervals.py` does the arithmetic. `rollout.py` is about the trajectories that `trajectories.py` joins.

Bytes: `ledger.py` sets the owners of a device against its total, moment by moment; `memory.py` takes peaks and phase
boundaries from it, which are values of `moments.py`. `same_moment.py` says which samples belong together, and in older
Recordings `unstamped.py`; `looks.py` reads what samples say. `allocations.py`, `allocated_peaks.py`, `used_memory.py`
and `host_memory.py` see what lies in between and beside. `transactions.py` judges sleeps and wake-ups.

Processes: `processes.py` says of each whether it lives, ended or died, `fates.py` whether that was as it should be.
`errors.py` are exceptions, `hooks.py` says which hooks fired, `clocks.py` how far each clock can be trusted,
`samples.py` and `machines.py` what the samplers saw, `untraced.py` who was not traced.

Findings: `findings/` says what bounds a step (`why`). `checks.py` judges a run by its limits (`check`): `budget.py`
reads them, `measures.py` has the figures that they are about, `noise.py` tells a change of steps from chance, and
`series.py` has the steps one by one.

Commands ask `figures.py`, which computes them once and keeps those of a large run. `encoded.py` makes JSON of them.
`metrics.py` grows row by row instead, with a run that goes on.

Other commands: `difference.py` and `finding_changes.py` (`diff`), `overhead.py`, `listing.py` (`ls`), `first_look.py`
(`view`); `selected.py` and `step_times.py` are the part of a run that options choose.

To add a figure, write a function that returns a `msgspec.Struct`, and make it a field of `Summary`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rltrace.analysis.summary import Summary, summarize

__all__ = ["Summary", "summarize"]


def __getattr__(name: str) -> Any:
    """Return one of these two: who wants another file of this package need not wait for all of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rltrace.analysis import summary

    return getattr(summary, name)

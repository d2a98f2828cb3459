"""The requests of each engine in the steady steps; findings about a rollout share this."""

from __future__ import annotations

from rltrace.analysis import engine_requests as of_engines
from rltrace.analysis.engine_requests import EngineRequests
from rltrace.analysis.findings.finding import UnjudgeableError
from rltrace.analysis.findings.run import Run
from rltrace.analysis.observations import once


@once
def engine_requests(run: Run) -> EngineRequests:
    """Return the requests of all engines in the steady steps.

    Raises:
        UnjudgeableError: no engine recorded any.
    """
    requests = of_engines.engine_requests(run.seen, run.steps)
    if not len(requests.step):
        raise UnjudgeableError("no engine recorded a request in a steady step")
    return requests

"""When and on what machine a Recording was made, and with which packages."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from rltrace.analysis.machines import described
from rltrace.analysis.summary import Run

OURS = "rltrace-toolkit"
"""Name of the package whose command is `rltrace`."""


def when_and_where(run: Run) -> Iterator[str]:
    """Return the minute in which it began, and the GPUs that it could use; what is unknown is left out."""
    if run.created_unix_seconds is not None:
        yield datetime.fromtimestamp(run.created_unix_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    yield from (value for name, value in described(run.machines).items() if name == "gpus")


def made_with(run: Run) -> str:
    """Return packages, the GPUs' driver and the processors; empty if nothing is known."""
    packages = (f"{'rltrace' if name == OURS else name} {version}" for name, version in run.versions.items())
    machine = described(run.machines)
    driver = [f"driver {machine['driver']}"] if "driver" in machine else []
    processors = [f"processors {machine['processors']}"] if "processors" in machine else []
    return " · ".join((*packages, *driver, *processors))

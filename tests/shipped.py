"""The Recordings that ship, opened and read once in each process of the tests: nobody may change what it gets."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from rltrace.analysis.findings import Why, why
from rltrace.analysis.summary import Summary, analyse
from rltrace.read.recording import Recording

RECORDINGS = Path(__file__).parents[1] / "examples" / "recordings"
QWEN, OTHER_HOST, VERL = (
    RECORDINGS / f"{name}.zip" for name in ("qwen3_8b_4gpu", "qwen3_8b_4gpu_other_host", "verl_8b_4gpu")
)
SHIPPED = (QWEN, OTHER_HOST, VERL)


@cache
def opened(file: Path) -> Recording:
    """Return a shipped Recording, unpacked."""
    return Recording.open(file)


@cache
def _judged(file: Path) -> tuple[Summary, Why]:
    analysed = analyse(opened(file))
    return analysed.summary, why(analysed)


def summary_of(file: Path) -> Summary:
    """Return its figures."""
    return _judged(file)[0]


def why_of(file: Path) -> Why:
    """Return its findings."""
    return _judged(file)[1]

"""The tables of whole shipped Recordings say what their events say; the suite has one rank of each."""

from __future__ import annotations

from pathlib import Path

import pytest
import test_tables
from shipped import SHIPPED

import rltrace

of_shipped = pytest.mark.parametrize("run", SHIPPED, ids=lambda run: run.stem)


@of_shipped
def test_rows_are_the_events(run: Path) -> None:
    """Spans, samples and arrows are the rows, and each span has its step and its phase."""
    tables = rltrace.open(run)
    test_tables.test_spans_are_the_events(tables)
    test_tables.test_counters_are_the_samples(tables)
    test_tables.test_step_and_phase_of_a_span(tables)
    test_tables.test_flows_are_the_arrows(tables)


@of_shipped
def test_both_decoders(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where segments are decoded in Python, the rows are the same."""
    test_tables.both_decoders(run, monkeypatch)

"""`kernels: {steps: [1]}` records every operator of that step, in the workers and in the engines, and of no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from reference_runs import TINY, record

from rltrace.events import OPERATOR, STEP, Span


@pytest.mark.run
def test_operators_are_recorded_in_the_chosen_step_and_lie_inside_it(tmp_path: Path) -> None:
    recording = record(tmp_path, steps=3, kernels={"steps": [1]}, **TINY)
    events = {
        process.place: [event for event in process.events() if isinstance(event, Span)]
        for process in recording.processes
    }
    steps = {span.args["step"]: span for span in events["driver"] if span.name == STEP}
    for place in ("rank 0 worker", "rank 1 worker", "rank 0 engine", "rank 1 engine"):
        operators = [span for span in events[place] if span.name.startswith(OPERATOR)]
        assert len(operators) > 50, place
        for span in operators:
            error_ns = span.args["error_ns"]
            assert steps[1].start_ns - error_ns <= span.start_ns <= span.end_ns <= steps[1].end_ns + error_ns
    assert {"op.aten::mm", "op.aten::_foreach_copy_"} <= {span.name for span in events["rank 0 worker"]}

"""A loop with accelerate, alone and with DeepSpeed's ZeRO below it, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import TIMEOUT_SECONDS
from loop_runs import one_rank, run_loop

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)


@pytest.mark.parametrize("stage", [None, 1, 2, 3])
def test_loop_is_what_it_times_itself(deepspeed_environment: Path, tmp_path: Path, stage: int | None) -> None:
    """Each accumulation is a step, however many times its optimizer steps, and its phases are the loop's."""
    variables = {} if stage is None else one_rank(stage)
    run = run_loop(tmp_path, "accelerate_zero", deepspeed_environment / "bin/python", **variables)
    assert [(step.step, step.inferred) for step in run.summary.steps] == [(number, True) for number in range(run.steps)]
    assert run.found["unlabelled"] <= 0.05
    assert {name: apart for name, apart in run.differences.items() if abs(apart) > 0.04} == {}
    names = {span.name for span in run.summary.hook_spans}
    assert {"model.forward", "autograd.backward", "optimizer.step"} <= names
    if stage == 3:
        assert "dist.all_gather_into_tensor" in names

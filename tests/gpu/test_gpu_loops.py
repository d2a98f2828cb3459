"""Loops that know nothing of rltrace on one GPU: torchrun with FSDP2, GRPO by hand, accelerate.

Their phases and idle time are compared with their own timers, and their memory with the device's total.
"""

from __future__ import annotations

import importlib.util

import pytest
from loop_runs import LoopRun, run_loop

LOOPS = ("fsdp2_torchrun", "grpo_generate", "accelerate_zero")
MOST_UNLABELLED, MOST_APART = 0.05, 0.02
"""Shares of a step."""


@pytest.fixture(scope="module", params=LOOPS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoopRun:
    """Five steps."""
    if request.param == "accelerate_zero" and importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    return run_loop(tmp_path_factory.mktemp(request.param), request.param, ranks=1, LOOP_DEVICE="cuda")


def test_steps_are_inferred(run: LoopRun) -> None:
    """Every step of the loop is found."""
    assert [(step.step, step.inferred) for step in run.summary.steps] == [(number, True) for number in range(run.steps)]


def test_phases_match_timers(run: LoopRun) -> None:
    """Phases and idle time are those of the loop's own timers, and hardly anything is unlabelled."""
    print({name: f"{share:.2%}" for name, share in run.found.items()})
    print({name: f"{share:+.2%}" for name, share in run.differences.items()})
    assert run.found.get("unlabelled", 0.0) <= MOST_UNLABELLED
    assert max(map(abs, run.differences.values())) <= MOST_APART, run.differences


def test_every_boundary_adds_up(run: LoopRun) -> None:
    """At every boundary the owners are the device's total, to within the limit."""
    (device,) = run.summary.memory
    print(device.residual, device.unknown)
    assert device.residual is not None and device.residual.boundaries >= 2 * run.steps
    assert device.residual.boundaries_over_limit == 0
    assert device.owner_peaks["actor.params"].bytes > 0
    assert device.owner_peaks["actor.optimizer"].bytes > 0

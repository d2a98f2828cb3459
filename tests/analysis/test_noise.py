"""Steps that differ by more than noise are told from those that do not; the rates are those of recorded steps."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from numpy.typing import NDArray
from shipped import OTHER_HOST, QWEN, VERL, summary_of

from rltrace.analysis.noise import FALSE_ALARMS, change, surely_above

GPU = {
    "reference run, 4 GPUs": QWEN,
    "another host, 4 GPUs": OTHER_HOST,
    "verl, 4 GPUs": VERL,
}
LAPTOP_SECONDS = (
    0.916, 1.003, 0.786, 0.926, 0.948, 0.828, 0.882, 0.835, 1.221, 0.996, 1.269, 1.107, 0.777, 0.821, 0.870, 0.941,
    0.980, 0.728, 0.732, 0.809, 1.131, 0.924, 0.804,
)  # fmt: skip
"""Steps 1 to 23 of `rltrace run examples/laptop.yaml` on 2 processors that others used too, 2026-11-25."""

TIMES, STEPS = 1000, 20
SHARE = 0.05
"""By how much a step may be longer."""

CAUGHT = 0.95
QUIET = 0.069
"""Deviation of steps up to which a change of 10 % can be caught in 95 of 100 cases: the difference of two means of 20
steps deviates by QUIET * sqrt(2 / 20) then, of which log(1.1) is 2.71 (Student's t for half a false alarm in 100) and
1.64 times."""


def recorded(name: str) -> NDArray[np.float64]:
    if name not in GPU:
        return np.array(LAPTOP_SECONDS)
    return np.array([step.seconds for step in summary_of(GPU[name]).steps if step.steady])


def alarms(steps: NDArray[np.float64], longer: float) -> tuple[float, float]:
    """How often an alarm is raised against a baseline, and against a limit, of steps that are longer by a share."""
    random = np.random.default_rng(0)
    of_baseline = of_limit = 0
    for _ in range(TIMES):
        before, after = random.choice(steps, STEPS), random.choice(steps, STEPS) * (1 + longer)
        found = change(before.tolist(), after.tolist())
        assert found is not None
        of_baseline += found.exceeds(SHARE)
        of_limit += surely_above(after.tolist()) > steps.mean()
    return of_baseline / TIMES, of_limit / TIMES


@pytest.mark.parametrize("name", [*GPU, "laptop"])
def test_rates_on_recorded_steps(name: str) -> None:
    """Of 1,000 resamplings at most 1 % are false alarms, and 95 % of those that are 10 % longer are caught.

    Where the noise does not allow that, 95 % of those are caught that are longer by as much as it does allow.
    """
    steps = recorded(name)
    noise = float(steps.std(ddof=1) / steps.mean())
    more = 0.1 * max(1, noise / QUIET)
    false, caught, larger = alarms(steps, 0), alarms(steps, 0.1), alarms(steps, more)
    print(
        f"\n{name}: steps deviate by {noise:.1%}. Baseline: {false[0]:.1%} false, {caught[0]:.1%} of +10 % caught, "
        f"{larger[0]:.1%} of {more:+.0%}. Limit: {false[1]:.1%} false, {caught[1]:.1%} of +10 % caught"
    )
    assert max(false) <= FALSE_ALARMS
    assert min(larger) >= CAUGHT


def test_few_steps_say_nothing() -> None:
    """Four steps of each are too few, however far apart they are; five are enough."""
    few = change([1.0, 1.1, 1.2, 1.3], [2.0, 2.1, 2.2, 2.3])
    assert few is not None and few.least_share is None and not few.is_slower
    enough = change([1.0, 1.1, 1.2, 1.3, 1.4], [2.0, 2.1, 2.2, 2.3, 2.4])
    assert enough is not None and enough.is_slower and not enough.is_faster
    back = change([2.0, 2.1, 2.2, 2.3, 2.4], [1.0, 1.1, 1.2, 1.3, 1.4])
    assert back is not None and back.is_faster


def test_one_step_far_off_moves_nothing() -> None:
    """A checkpoint in one step of ten is no change of a typical step."""
    found = change([1.0, 1.01, 0.99, 1.02, 0.98] * 2, [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.02, 40.0])
    assert found is not None and abs(found.share) < 0.02 and not found.is_slower


def test_bounds_hold_the_change() -> None:
    """The change lies between its bounds, which are as far from it as what would be seen."""
    random = np.random.default_rng(1)
    found = change(random.normal(1, 0.03, 50).tolist(), random.normal(1.2, 0.03, 50).tolist())
    assert found is not None and found.least_share is not None and found.most_share is not None
    assert found.least_share < 0.2 < found.most_share and found.share == pytest.approx(0.2, abs=0.02)
    assert found.visible_share == pytest.approx((1 + found.share) / (1 + found.least_share) - 1)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([1.0], []), ([0.0, 1.0], [1.0])])
def test_nothing_to_compare(a: list[float], b: list[float]) -> None:
    """Without steps, or with one that took no time, there is no ratio."""
    assert change(a, b) is None


def test_thousands_of_steps_are_quick() -> None:
    """Ten thousand steps of each are compared by a part of them."""
    random = np.random.default_rng(2)
    steps = random.normal(1, 0.05, 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = change(steps.tolist(), (steps * 1.01).tolist())
    assert found is not None and found.share == pytest.approx(0.01, abs=0.003)


def test_one_step_is_its_own_bound() -> None:
    """One step has no noise that could be known; of two, the bound is far below."""
    assert surely_above([3.0]) == 3.0
    assert surely_above([3.0, 3.1]) < 0.1

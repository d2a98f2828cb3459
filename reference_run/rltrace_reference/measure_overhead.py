"""`python -m rltrace_reference.measure_overhead CONFIG.yaml --times FILE`: steps with and without recording, timed.

One arm of `rltrace overhead`, which starts this traced and untraced in turn. Both arms run the same lines: untraced,
`rltrace.pause` and `rltrace.resume` find nothing to switch.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
from msgspec.structs import replace

import rltrace
from rltrace_reference import garbage
from rltrace_reference.__main__ import checked, leave_out_what_ray_does_not_know
from rltrace_reference.config import Config
from rltrace_reference.exit_code import exit_code_of
from rltrace_reference.progress import PHASE_OF_CALL, Display

if TYPE_CHECKING:  # torch and Ray take seconds, in sight of the display
    from rltrace_reference.worker_group import WorkerGroup

WARM_UP_STEPS = 2
"""Steps that are left out: allocators, caches and the optimizer's state come into being in them."""


class TimedStep(msgspec.Struct, frozen=True):
    """How long one step took, by the clock of the driver."""

    step: int
    seconds: float
    recorded: bool
    pair: int | None
    """Number of the pair of neighbouring steps, one recorded and one not; None while the run warms up."""
    phases: dict[str, float] = {}
    """Seconds of each phase, by the same clock; for a step that is not recorded they are nowhere else."""


class TimedDisplay(Display):
    """Notes when each phase of a step begins, which it is told anyway."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.begun: list[tuple[str, float]] = []
        self._start_s = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self.begun = []
        self._start_s = time.monotonic()

    def phase(self, name: str) -> None:
        """Show a phase, and end the one before."""
        super().phase(name)
        self.begun.append((PHASE_OF_CALL.get(name, name), time.monotonic()))

    def end(self, seconds: float) -> dict[str, float]:
        """End a step that took so many seconds; return those of its phases, each of which lasted until the next one
        began, and the last one as long as the step."""
        ends = [at_s for _, at_s in self.begun[1:]] + [self._start_s + seconds]
        return {name: end_s - at_s for (name, at_s), end_s in zip(self.begun, ends, strict=True)}


def plan(pairs: int, seed: int) -> list[tuple[int | None, bool]]:
    """Return which step belongs to which pair, and whether it is recorded.

    Half the pairs begin with the recorded step, in a random order. So what drifts over the run, and what a step leaves
    behind for the next one, affects both kinds alike.
    """
    first = [place % 2 == 0 for place in range(pairs)]
    random.Random(seed).shuffle(first)
    return [
        *((None, True) for _ in range(WARM_UP_STEPS)),
        *((pair, on) for pair in range(pairs) for on in (first[pair], not first[pair])),
    ]


def with_fixed_length(config: Config, pairs: int) -> Config:
    """Return the run with responses of one length, so that all its steps do the same work."""
    steps = WARM_UP_STEPS + 2 * pairs
    return replace(config, steps=steps, rollout=replace(config.rollout, ignore_eos=True))


def measure(config: Config, pairs: int, display: TimedDisplay, on_step: Callable[[TimedStep], None]) -> None:
    """Run all steps.

    Args:
        config: The run.
        pairs: Of steps that are compared.
        display: Shows where it is, and times the phases.
        on_step: Given each step's time when it is done.

    Raises:
        RunError: A process died, or weights did not arrive.
    """
    garbage.pause()
    from rltrace_reference.train import train_step
    from rltrace_reference.worker_group import WorkerGroup

    with WorkerGroup(config, run_id=uuid.uuid4().hex[:8], on_call=display.phase) as workers:
        for step, (pair, recorded) in enumerate(plan(pairs, config.seed)):
            with rltrace.span("step", step=step, recorded=recorded) as span:
                _record(workers, recorded)
                display.begin()
                done = train_step(config, workers, display, step)
                phases = display.end(done.seconds)
                _record(workers, True)
                span.set(**done.figures())
            display.step(done)
            on_step(TimedStep(step, done.seconds, recorded, pair, phases))
        workers.call("measure_cost", [()] * config.ranks)
        rltrace.measure_cost()


def _record(workers: WorkerGroup, on: bool) -> None:
    """Switch recording in every process of the run, outside of what is timed."""
    if on:
        rltrace.resume()
    workers.call("record", [(on,)] * workers.config.ranks)
    if not on:
        rltrace.pause()


def main(arguments: list[str] | None = None) -> int:
    """Measure one arm and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rltrace_reference.measure_overhead", description=__doc__)
    parser.add_argument("config", help="YAML file; its responses are given one length")
    parser.add_argument("--times", type=Path, required=True, help="file for one line a step")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of steps")
    parser.add_argument("--force", action="store_true", help="try untested versions of vLLM, and GPUs others use too")
    options = parser.parse_args(arguments)

    def work() -> None:
        config = with_fixed_length(checked(options.config, options.force), options.pairs)
        leave_out_what_ray_does_not_know()
        display = TimedDisplay(config.steps)
        with options.times.open("xb") as lines, display:
            measure(config, options.pairs, display, lambda step: _keep(step, lines))

    return exit_code_of(work)


def _keep(step: TimedStep, lines: BinaryIO) -> None:
    lines.write(msgspec.json.encode(step) + b"\n")
    lines.flush()


if __name__ == "__main__":
    sys.exit(main())

"""Faults in the running example: each alone, at shares of a clean step, and what `rltrace why` says of them.

python tests/bench/live_plants.py [--shares 0.05 0.2] [--steps 24] [--fault NAME ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from live_plants import FAULTS, PlantedRun, run_with


def seconds_per_step(run: PlantedRun, fault: str) -> tuple[float, float]:
    """Return the price of a fault's finding and half of its interval; zeros if there is none."""
    finding = run.of(fault)
    if finding is None or finding.seconds_per_step is None:
        return 0.0, 0.0
    interval = finding.interval_seconds
    return finding.seconds_per_step, (interval.most - interval.least) / 2 if interval is not None else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2], help="of a clean step")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--fault", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clean = run_with(Path(folder) / "clean", {}, steps=options.steps)
        assert clean.why.step_seconds is not None
        print(f"clean: a step of {clean.why.step_seconds:.3f} s; load {os.getloadavg()[0]:.1f}", flush=True)
        print("fault | share | planted s | found | price s | of a clean run | error | half of the interval | load")
        for fault in options.fault:
            was, _ = seconds_per_step(clean, fault)
            for share in options.shares:
                rare = options.steps - 1 if fault == "slow_steps" else 1
                seconds = share * clean.why.step_seconds * rare
                run = run_with(Path(folder) / f"{fault}_{share}", {fault: seconds}, steps=options.steps)
                price, half = seconds_per_step(run, fault)
                planted = run.taken_seconds[fault] / rare
                found = "yes" if run.of(fault) is not None else "no"
                error = f"{(price - was) / planted - 1:+.0%}" if price else "-"
                print(
                    f"{fault} | {share:.0%} | {planted:.3f} | {found} | {price:.3f} | {was:.3f} | {error} | {half:.3f} "
                    f"| {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

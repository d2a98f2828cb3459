"""Measures five loops beside their own timers, and what the hooks on whole models cost.

    python tests/bench/any_loop.py [PYTHON_WITH_ACCELERATE_AND_DEEPSPEED]

Prints two tables in Markdown.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from loop_runs import COMMANDS, one_rank, run_loop, table

COST = """
import sys, time, torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x

class Model(Layer):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x, times):
        begin = time.perf_counter()
        for _ in range(times):
            self.layer(x)
        return (time.perf_counter() - begin) / times

def whole(layer, x, times):
    begin = time.perf_counter()
    for _ in range(times):
        layer(x)
    return (time.perf_counter() - begin) / times

x, model, layer = torch.ones(2, 3), Model(), Layer()
with torch.no_grad():
    inside = min(model(x, 50_000) for _ in range(7))
    outside = min(whole(layer, x, 10_000) for _ in range(7))
print(inside * 1e9, outside * 1e9)
"""


def measure(*command: str) -> tuple[float, float]:
    """Return the nanoseconds of a call inside of a model and of a model."""
    done = subprocess.run([*command, sys.executable, "-c", COST], check=True, capture_output=True, text=True)
    inside, outside = map(float, done.stdout.split())
    return inside, outside


def main(python: Path | None) -> None:
    """Print both tables."""
    print("| loop | part | rltrace | its own timers | apart |\n|---|---|---|---|---|")
    for loop in COMMANDS:
        stages = [None, 1, 2, 3] if loop == "accelerate_zero" else [None]
        for stage in stages if loop != "accelerate_zero" or python is not None else []:
            with tempfile.TemporaryDirectory() as folder:
                variables = one_rank(stage) if stage is not None else {}
                chosen = python if loop == "accelerate_zero" and python is not None else Path(sys.executable)
                run = run_loop(Path(folder), loop, chosen, **variables)
                print(table(loop if stage is None else f"the same, ZeRO {stage}", run), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        bare = measure()
        traced = measure(sys.executable, "-m", "rltrace", "exec", "--out", str(Path(folder) / "run"), "--")
    print("\n| call | bare | traced |\n|---|---|---|")
    for name, before, after in zip(("a module inside of a model", "a whole model"), bare, traced, strict=True):
        print(f"| {name} | {before:,.0f} ns | {after:,.0f} ns |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)

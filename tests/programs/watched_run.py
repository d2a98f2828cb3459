"""A run to be watched, which goes on when it is told to: `watched_run.py driver FOLDER` starts two ranks.

It waits in a place until FOLDER has a file of that place's name.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import rltrace

RANKS = 2


def wait(folder: Path, place: str) -> None:
    while not (folder / place).exists():
        time.sleep(0.02)


def driver(folder: Path) -> None:
    rltrace.start(role="driver", name="driver \x1b]0;owned\x07")
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(folder)]) for rank in range(RANKS)]
    for step in range(2):
        with rltrace.span("step", step=step) as span:
            time.sleep(0.05)
            span.set(reward_mean=0.25 * (step + 1), tokens_per_second=1234)
    with rltrace.span("step", step=2):
        [rank.wait() for rank in ranks]


def worker(rank: int, folder: Path) -> None:
    rltrace.start(role="worker", rank=rank, device={"host": "here", "uuid": f"GPU-{rank}"})
    rltrace.counter("actor.params_bytes", 2 << 30)
    rltrace.counter("rollout.kv_cache_bytes", 6 << 30)
    rltrace.counter("used_bytes", 9 << 30)
    with rltrace.phase("rollout.generate"):
        with rltrace.span("engine.step", running=7, waiting=3, tokens=500, kv_usage=0.5):
            pass
        try:
            with rltrace.span("tool.call"):
                raise ValueError("no such \x1b[31mtool")
        except ValueError:
            pass
        with rltrace.span("wait for tokens"):
            wait(folder, "generated")
    with rltrace.phase("actor.update"):
        wait(folder, "updated")


if __name__ == "__main__":
    who, where = sys.argv[1:]
    driver(Path(where)) if who == "driver" else worker(int(who), Path(where))

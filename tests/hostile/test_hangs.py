"""A program that hangs, and who watches it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from reference_runs import RLTRACE

PROGRAM = """
import os, sys, threading, time
import rltrace

if len(sys.argv) == 1:
    ranks = [os.spawnl(os.P_NOWAIT, sys.executable, sys.executable, __file__, str(rank)) for rank in range(2)]
    [os.waitpid(rank, 0) for rank in ranks]
    sys.exit()
rltrace.start(role="worker", rank=int(sys.argv[1]))
lock = threading.Lock()
lock.acquire()

def load():
    with rltrace.span("prefetch"), rltrace.span("queue.get"):
        time.sleep(3600)

threading.Thread(target=load, name="loader", daemon=True).start()
with rltrace.span("step", step=0), rltrace.phase("weight_sync"), rltrace.span("weight_sync.wait"):
    lock.acquire()
"""


def test_a_hang_shows_where_threads_stand(tmp_path: Path) -> None:
    """When two ranks wait for a lock that nobody opens, the view says for how long, and where each thread stands."""
    (tmp_path / "hangs.py").write_text(PROGRAM)
    command = [*RLTRACE, "exec", "--out", "run", "--", sys.executable, "hangs.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as run:
        words = [*RLTRACE, "summary", "--watch", "run"]
        wide = {**os.environ, "COLUMNS": "150"}
        with subprocess.Popen(words, cwd=tmp_path, env=wide, stdout=-1, stderr=-1, text=True) as watch:
            assert watch.stdout is not None
            title = next(line for line in watch.stdout if line.startswith("Nothing has begun or ended for 3"))
            stands = [watch.stdout.readline().split("  ")[-2:] for _ in range(2)]
            watch.send_signal(signal.SIGINT)
            watch.communicate()
        run.terminate()
    assert title.rstrip().endswith("s. Where each thread stands")
    assert sorted(where.strip() for where, _ in stands) == [
        "prefetch > queue.get", "step > weight_sync > weight_sync.wait",
    ]  # fmt: skip
    assert {who.strip() for _, who in stands} == {"2 threads of rank 0 worker, rank 1 worker"}

"""What a query costs, on made Recordings: `python tests/bench/sql.py`; `--large` adds 256 ranks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MADE = Path(__file__).parents[1] / "scale" / "made_recording.py"
QUERIES = {
    "nothing": "select 1",
    "count": "select count(*) from spans",
    "names": "select name, count(*), sum(seconds), sum(bytes) from spans group by name order by 2 desc",
    "one rank": "select name, sum(seconds) from spans where rank = 3 and step = 5 group by name",
    "by step": "select step, rank, sum(seconds) from spans where name = 'fsdp.forward' group by all",
    "by phase": "select phase, name, count(*) from spans group by all",
    "arguments": "select args->>'$.module' as module, sum(seconds) from spans "
    "where name = 'fsdp.all_gather' and step = 5 group by all",
    "phases": "select phase, avg(seconds) from phases where steady group by phase",
    "ledger": "select rank, step, max(used_bytes) from memory group by all",
    "sync": "select rank, avg(gigabytes_per_second) from weight_sync group by rank",
}


def main() -> None:
    """Print CPU seconds, seconds and peak memory of each query, as a process of its own."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--large", action="store_true")
    sizes = [(8, 10), (256, 10)] if arguments.parse_args().large else [(8, 10)]
    for ranks, steps in sizes:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            subprocess.run([sys.executable, MADE, run, "--ranks", str(ranks), "--steps", str(steps)], check=True)
            for name, query in QUERIES.items():
                report(f"{ranks} x {steps}  {name:<10}", "sql", str(run), query, "--format", "csv")
            report(f"{ranks} x {steps}  parquet   ", "export", str(run), "-o", str(Path(folder) / "out.parquet"))


def report(what: str, *words: str) -> None:
    """Print what a command costs."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "rltrace", *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0, what
    cpu_seconds = usage.ru_utime + usage.ru_stime
    print(
        f"{what}  {cpu_seconds:5.1f} s CPU  {time.monotonic() - began:5.1f} s  {usage.ru_maxrss / 1000:6.0f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()

"""How exactly two hosts of torchrun share a time line, and what reading their clocks costs.

    python tests/bench/host_clocks.py [--seconds 60] [--ppm 100]

Two torchruns on this machine, the second one in namespaces of its own with a drifting clock (`tests/run/two_hosts.py`).
The program's own threads say what the reading took of a processor, and how long it kept the program waiting at its end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from free_port import free_port
from other_clock import OtherClock
from test_hosts import far_spans, rltrace_command, torchrun
from two_hosts import RANKS, exec_command, two_hosts

from rltrace.read import alignment
from rltrace.read.recording import Recording

WATCHED = """
import json, threading
from rltrace.instrument.torch import distributed as ours

(clocks,) = [thread for thread in threading.enumerate() if thread.name == "rltrace clocks"]
with open(f"/proc/thread-self/../{clocks.native_id}/schedstat") as file:
    ran_ns = int(file.read().split()[0])
began_ns = time.monotonic_ns()
ours.end_reading((), {})
waited_ns = time.monotonic_ns() - began_ns
with open(f"cost{dist.get_rank()}.json", "w") as file:
    json.dump({"ran_ns": ran_ns, "waited_ns": waited_ns}, file)
dist.destroy_process_group()
"""
"""What a rank does at its end: how long its thread has run, and how long the program waits for its end."""


def main() -> None:
    """Run, and print one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the ranks run together")
    parser.add_argument("--ppm", type=int, default=100, help="drift of the second host's clock")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        program = RANKS.replace("time.sleep(dist.get_rank())\ndist.destroy_process_group()\n", WATCHED)
        (folder / "ranks.py").write_text(program)
        clock = OtherClock.begin(folder / "clock", ppm=wanted.ppm)
        commands = exec_command("first", *torchrun(0, port)), exec_command("second", *torchrun(1, port))
        with two_hosts(folder, clock, commands, ({}, {})) as hosts:
            hosts.until(lambda: hosts.readings() >= 1)
            time.sleep(wanted.seconds)
            hosts.stop()
        done = rltrace_command(folder, "collect", "first", "second")
        assert done.returncode == 0, done.stderr
        show(Recording.open(folder / "first"), clock, folder, wanted.seconds)


def show(recording: Recording, clock: OtherClock, folder: Path, seconds: float) -> None:
    """Print what was measured."""
    spans = far_spans(recording, clock, recording)
    (fit,) = {process.alignment for process in recording.processes if process.alignment is not None}
    first_ns, last_ns = fit.readings[0].at_ns, fit.readings[-1].at_ns
    inside = [span for span in spans if clock.true_ns(first_ns) <= span.true_ns <= clock.true_ns(last_ns)]
    trips_us = [(said["received_ns"] - said["sent_ns"]) / 1e3 for said in alignment.read_lines(recording.folder).values]
    print(f"{len(spans):,} spans of the second host, {len(trips_us)} readings")
    print(f"round trips: {min(trips_us):.0f} to {max(trips_us):.0f} us, median {median(trips_us):.0f} us")
    for where, some in (("between the first reading and the last", inside), ("all", spans)):
        bound_us, error_us = (max(getattr(span, of) for span in some) / 1e3 for of in ("bound_ns", "error_ns"))
        print(f"{where}: bound {bound_us:.0f} us at most, error {error_us:.0f} us at most")
        assert all(span.error_ns <= span.bound_ns + 2 for span in some)
    print(f"drift: {fit.drift * 1e6:+.2f} ppm, within {fit.drift_error * 1e6:.1f}")
    for rank in (0, 1):
        cost = json.loads((folder / f"cost{rank}.json").read_text())
        share = cost["ran_ns"] / 1e9 / seconds
        print(f"rank {rank}: its thread ran {share:.4%} of the time, its end took {cost['waited_ns'] / 1e3:.0f} us")


if __name__ == "__main__":
    main()

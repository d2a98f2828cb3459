"""A run in small: a driver, two workers, and an engine in a session of its own below each worker.

`python toy_run.py supervise FOLDER MODE` runs it as `rltrace run` runs the reference run; MODE is what the driver does:
"end" by itself, end when its engines are "told" to by SIGUSR1, "fail", "notice" the death of a worker, be "deaf" to
it, or kill its engines in a "shutdown" when it is interrupted.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import rltrace


def start(*words: str, own_session: bool = False) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, *words], start_new_session=own_session)


def driver(mode: str) -> None:
    rltrace.start(role="driver")
    workers = [start("worker", str(rank), mode) for rank in range(2)]
    if mode == "fail":
        time.sleep(0.5)
        raise SystemExit("the driver's own error")
    if mode == "shutdown":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: shut_down(workers))
    with rltrace.span("step", step=0):
        while mode == "deaf" or all(worker.poll() is None for worker in workers):
            time.sleep(0.02)
    if mode == "notice":
        raise SystemExit("a worker is gone")
    for worker in workers:
        worker.wait()


def shut_down(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.wait()
    raise SystemExit(130)


def worker(rank: int, mode: str) -> None:
    rltrace.start(role="worker", rank=rank)
    engine = start("engine", str(rank), mode, own_session=True)
    if mode == "shutdown":
        signal.signal(signal.SIGTERM, lambda *_: engine.kill())
    with rltrace.phase("actor.update"):
        while engine.poll() is None:
            time.sleep(0.02)
    if mode not in ("end", "told"):
        raise SystemExit("the engine is gone")


def engine(rank: int, mode: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    rltrace.start(role="engine", rank=rank)
    with rltrace.phase("rollout.generate"):
        if mode == "told":
            signal.sigwait({signal.SIGUSR1})
        else:
            time.sleep(0.5 if mode == "end" else 60)


def supervise(folder: Path, mode: str) -> int:
    from rltrace.cli.run import report
    from rltrace.errors import RltraceError
    from rltrace.record import manifest
    from rltrace.run import supervisor

    supervisor.DEATH_GRACE_SECONDS = 2.0
    supervisor.LEAVE_SECONDS = 2.0
    manifest.create(folder, owner=None, command=["toy"], config={})
    outcome = supervisor.supervise([sys.executable, __file__, "driver", mode], folder, is_our_run=True)
    try:
        return report(folder, outcome)
    except RltraceError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["driver", mode]:
            driver(mode)
        case ["worker", rank, mode]:
            worker(int(rank), mode)
        case ["engine", rank, mode]:
            engine(int(rank), mode)
        case ["supervise", folder, mode]:
            sys.exit(supervise(Path(folder), mode))

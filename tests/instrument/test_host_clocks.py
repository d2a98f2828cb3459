"""What a launcher says, and that a program ends as it would without the thread that reads clocks."""

import os
import subprocess
import sys

import pytest
from free_port import free_port
from traced_runs import traced_environment
from warm_python import warm

from rltrace.instrument.torch.launcher import Launched, launched
from rltrace.read.recording import Recording
from rltrace.record import manifest

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "4"}
SRUN = {"SLURM_PROCID": "5", "SLURM_NTASKS": "16", "SLURM_LOCALID": "2", "SLURM_NNODES": "2"}
STEP = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "3"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "8"}, None),
        (TORCHRUN, Launched("torchrun", 3, 8, 1, 4)),
        (SRUN, Launched("slurm", 5, 16, 2, 2)),
        (SRUN | STEP, Launched("slurm", 5, 6, 2, 3)),
        (SRUN | TORCHRUN, Launched("torchrun", 3, 8, 1, 4)),
        (SRUN | {"SLURM_PROCID": "-1"}, None),
        (TORCHRUN | {"RANK": ""}, None),
    ],
)
def test_a_launcher_says_the_rank(environment, said):
    """torchrun's word comes before srun's, a step's before a job's; what is no number is not believed."""
    assert launched(environment) == said


RANK = """
import multiprocessing, os, sys
import torch
import torch.distributed as dist
import rltrace

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=2)
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join()
assert child.exitcode == 0
dist.barrier()
if rank:
    dist.recv(torch.zeros(1), 0)  # until rank 0 is about to end
    sys.exit(3)
dist.send(torch.zeros(1), 1)
"""


def ranks_of(folder, **environment):
    """The program, and the environments of two tasks of two hosts, as they believe, without a launcher."""
    manifest.create(folder / "recording", owner=None, command=[], config=None)
    (folder / "rank.py").write_text(RANK)
    both = {"SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "WORLD_SIZE": "2"}
    both |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    of_ranks = [{**both, "SLURM_PROCID": rank, "RANK": rank} for rank in "01"]
    return folder / "rank.py", [traced_environment(folder / "recording", **of_rank) for of_rank in of_ranks]


def test_program_ends_as_it_would(tmp_path):
    """A program that never leaves its group, and forks meanwhile, has its own exit code and nothing on stderr."""
    program, environments = ranks_of(tmp_path, MASTER_PORT=str(free_port()))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, program, "env://"]
    running = [subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes) for environment in environments]
    said = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 3], said
    assert [out for out, _ in said] == ["child\n"] * 2
    assert not any(word in err for _, err in said for word in ("TCPStore", "terminate", "Fatal", "Traceback")), said
    ranks = [process for process in Recording.open(tmp_path / "recording").processes if process.rank is not None]
    assert sorted(process.rank for process in ranks) == [0, 1]
    assert all(process.end_ns is not None and not process.unavailable for process in ranks)


def test_job_without_a_tcp_store_says_so(tmp_path):
    """A store that is a file reads no clock, and the Recording says why."""
    program, environments = ranks_of(tmp_path)
    ended = warm("torch").run_together(program, environments, tmp_path, 120, [f"file://{tmp_path}/store"])
    assert [done.returncode for done in ended] == [0, 3], ended
    processes = Recording.open(tmp_path / "recording").processes
    reasons = [process.unavailable for process in processes if process.rank is not None]
    assert len(reasons) == 2 and all("FileStore" in reason["clocks of other hosts"] for reason in reasons)


TWO_READERS = """
import os, signal, sys, time
from pathlib import Path

from torch.distributed import TCPStore

from rltrace.host import clock
from rltrace.instrument.torch import host_clocks
from rltrace.record import clock_readings

host_clocks.FIRST_SECONDS = host_clocks.PERIOD_SECONDS = 0.05
host_clocks.ANSWER_SECONDS = {answer_seconds}
file = Path(clock_readings.FILE)
place = host_clocks.Place("rltrace/0/1/1")


def connect():
    return TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)


def wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def readings():
    return len(file.read_text().splitlines()) if file.exists() else 0


def waits_for_an_answer():
    return any(store.check([place.question(turn)]) and not store.check([place.answer(turn)]) for turn in (0, 1))


read, write = os.pipe()
other = os.fork()
if other == 0:
    port = os.read(read, 99)
    clock.own_domain = lambda: ("another", "1")
    answering = host_clocks.Reader(connect, "0/1", None)
    signal.pause()
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
port = store.port
os.write(write, str(port).encode())
asking = host_clocks.Reader(connect, "0/1", Path())
try:
    wait(readings)
    os.kill(other, signal.SIGSTOP)
    wait(waits_for_an_answer)
    {then}
finally:
    os.kill(other, signal.SIGKILL)
"""
"""A process that asks another one, which then stands still."""

ASKED_AGAIN = """time.sleep(0.5)  # longer than an answer may take
    before = readings()
    os.kill(other, signal.SIGCONT)
    wait(lambda: readings() > before + 2)"""

LEFT_ALONE = """asking.end()
    assert not asking._thread.is_alive()"""


@pytest.mark.parametrize(("then", "answer_seconds"), [(ASKED_AGAIN, 0.1), (LEFT_ALONE, 1e5)], ids=["asked", "left"])
def test_host_that_stands_still(tmp_path, then, answer_seconds):
    """A host that stood still is asked again, and rank 0 leaves without it."""
    program = tmp_path / "program.py"
    program.write_text(TWO_READERS.format(then=then, answer_seconds=answer_seconds))
    path = {"PYTHONPATH": traced_environment(tmp_path)["PYTHONPATH"]}
    done = warm("torch").run(program, {**os.environ, **path, "RLTRACE_DIR": ""}, tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr

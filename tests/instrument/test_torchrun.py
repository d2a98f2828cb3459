"""Ranks of a program that torchrun starts: two real ones on gloo, one with a process below it."""

import pytest
from free_port import free_port
from traced_runs import run_ranks_traced, run_traced

pytestmark = pytest.mark.run

RANK = """
import os, subprocess, sys
import torch.distributed as dist
import rltrace

store = dist.HashStore()
if sys.argv[1:] == ["below"]:  # as an engine that a rank starts: a group of its own, and the rank's variables
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with rltrace.span("below", of=int(os.environ["RANK"])):
        pass
else:
    dist.init_process_group("gloo")
    with rltrace.span("step", step=1), rltrace.phase("training"):
        if dist.get_rank() == 1:
            subprocess.run([sys.executable, __file__, "below"], check=True)
        dist.barrier()
dist.destroy_process_group()
"""

LAUNCH = """
import pathlib, subprocess, sys

rank = pathlib.Path("rank.py")
rank.write_text({source!r})
launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
sys.exit(subprocess.run([*launcher, str(rank)]).returncode)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = run_traced(tmp_path_factory.mktemp("torchrun"), LAUNCH.format(source=RANK))
    assert run.returncode == 0, run.err
    return run


def test_ranks_that_are_set_by_hand(tmp_path):
    """Without a launcher, `env://` with RANK and WORLD_SIZE says the rank; what a rank starts is none."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    recording = run_ranks_traced(tmp_path, RANK, [{"RANK": rank, **address} for rank in "01"])
    ranks = processes_with(recording, "training")
    assert sorted((process.role, process.rank, process.world_size) for process in ranks) == [
        ("worker", 0, 2),
        ("worker", 1, 2),
    ]
    assert [(process.role, process.rank) for process in processes_with(recording, "below")] == [("process", None)]


def processes_with(recording, name):
    """Those that made a span of this name."""
    return [process for process in recording.processes if any(e.name == name for e in process.events())]


def test_each_process_of_torchruns_is_its_rank(run):
    ranks = processes_with(run.recording, "training")
    assert sorted((process.role, process.rank) for process in ranks) == [("worker", 0), ("worker", 1)]


def test_child_of_a_rank_is_no_rank(run):
    """What a rank starts is no rank, though it inherits the rank's variables."""
    (below,) = processes_with(run.recording, "below")
    assert [event.args["of"] for event in below.events() if event.name == "below"] == [1]
    assert (below.role, below.rank) == ("process", None)

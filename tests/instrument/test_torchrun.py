"""Ranks of a program that torchrun starts: two real ones on gloo, each with a process below it."""

import pytest
from free_port import free_port
from traced_runs import run_traced

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
        dist.barrier()
        subprocess.run([sys.executable, __file__, "below"], check=True)
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


BY_HAND = """
import os, pathlib, subprocess, sys

rank = pathlib.Path("rank.py")
rank.write_text({source!r})
address = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}", WORLD_SIZE="2")
environments = [dict(os.environ, RANK=str(n), **address) for n in range(2)]
ranks = [subprocess.Popen([sys.executable, str(rank)], env=environment) for environment in environments]
sys.exit(max(one.wait() for one in ranks))
"""


def test_ranks_that_are_set_by_hand(tmp_path):
    """Without a launcher, `env://` with RANK and WORLD_SIZE says the rank; what a rank starts is none."""
    run = run_traced(tmp_path, BY_HAND.format(source=RANK, port=free_port()))
    assert run.returncode == 0, run.err
    ranks = processes_with(run, "training")
    assert sorted((process.role, process.rank, process.world_size) for process in ranks) == [
        ("worker", 0, 2),
        ("worker", 1, 2),
    ]
    assert [(process.role, process.rank) for process in processes_with(run, "below")] == [("process", None)] * 2


def processes_with(run, name):
    """Those that made a span of this name."""
    return [process for process in run.recording.processes if any(e.name == name for e in process.events())]


def test_each_process_of_torchruns_is_its_rank(run):
    ranks = processes_with(run, "training")
    assert sorted((process.role, process.rank) for process in ranks) == [("worker", 0), ("worker", 1)]


def test_child_of_a_rank_is_no_rank(run):
    """What a rank starts is no rank, though it inherits the rank's variables."""
    below = processes_with(run, "below")
    assert sorted(event.args["of"] for process in below for event in process.events() if event.name == "below") == [
        0,
        1,
    ]
    assert [(process.role, process.rank) for process in below] == [("process", None)] * 2

"""Worker and engine of a rank share a limited memory on a CPU: what goes beyond it fails, and sleep gives it back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rltrace_reference.config import Config
from rltrace_reference.device_memory import DeviceMemory, data_bytes
from rltrace_reference.engine.memory import MappedPool
from rltrace_reference.offload import Offload
from rltrace_reference.rollout import Rollout

from rltrace.errors import RunError

MIB = 1 << 20


def test_allocation_beyond_the_limit_fails(tmp_path: Path) -> None:
    """Within the limit an allocation succeeds, beyond it torch says so, and outside of the phase there is no limit."""
    program = tmp_path / "limited.py"
    program.write_text("""
import torch
from rltrace_reference.device_memory import DeviceMemory
torch.empty(1 << 20).fill_(1)
memory = DeviceMemory(64 << 20)
with memory.limited():
    kept = torch.empty(40 << 20, dtype=torch.uint8)
    try:
        torch.empty(40 << 20, dtype=torch.uint8)
    except RuntimeError as error:
        print("tried to allocate 41943040 bytes" in str(error))
torch.empty(40 << 20, dtype=torch.uint8)
""")
    done = subprocess.run([sys.executable, program], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_sleeping_memory_does_not_count() -> None:
    """A region counts for the limit while it is awake only."""
    pool = MappedPool()
    pool.reserve("kv_cache", 256 * MIB)
    pool.map("kv_cache")
    awake = data_bytes(os.getpid())
    pool.unmap("kv_cache")
    given_back = awake - data_bytes(os.getpid())
    assert given_back == pytest.approx(256 * MIB, abs=32 * MIB), "but for what other threads of this process do"


def test_engine_without_room_says_so(rollout: Rollout, config: Config, weights: dict[str, torch.Tensor]) -> None:
    """An engine that wakes up beside too much says how much it asked for, and wakes up when there is room."""
    rollout.sleep(2)
    rollout.memory = DeviceMemory(config.kv_cache_bytes // 2)
    rollout.memory.forget(os.getpid())  # of this process nothing counts
    rollout.memory.meet(rollout.process.pid)
    with pytest.raises(RunError, match=f"tried to allocate {config.kv_cache_bytes} bytes"):
        rollout.wake_up(["kv_cache"])
    rollout.memory.limit_bytes = 2 * config.kv_cache_bytes
    rollout.wake_up(["kv_cache"])


def test_offloaded_tensors_come_back() -> None:
    """What is offloaded has no bytes, comes back as it was, and is written again only if it has changed."""
    first, second = torch.arange(1000.0), torch.ones(7, dtype=torch.bfloat16)
    view, offload = first[10:20], Offload(torch.device("cpu"))
    assert offload.out([first, second, view], changed=True) == 4000 + 14
    assert (first.untyped_storage().nbytes(), offload.out([first])) == (0, 0)
    assert offload.back([first, second]) == 4014
    assert view[0] == 10 and torch.equal(first, torch.arange(1000.0)) and second.sum() == 7
    first += 1
    offload.out([first], changed=True)
    offload.back([first])
    assert first[0] == 1
    first += 1
    offload.out([first], changed=False)
    offload.back([first])
    assert first[0] == 1, "it was said not to have changed"

"""Pages really go back to the operating system, and addresses stay.

Proven by the kernel's account of that very mapping (smaps) and by the system's free memory: a process's RSS alone falls
for shared memory too, whose pages stay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rltrace_reference.config import Config
from rltrace_reference.engine.engine import Engine
from rltrace_reference.engine.memory import MappedPool, Region
from rltrace_reference.rollout import Rollout

MIB = 1 << 20


def smaps(address: int, pid: int | str = "self") -> dict[str, int]:
    """The kernel's figures in bytes of the one mapping that starts at the address."""
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    (entry,) = [entry for entry in entries if entry and int(entry.split("-")[0], 16) == address]
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+): +(\d+) kB$", entry, flags=re.MULTILINE)}


def system_bytes(name: str) -> int:
    return int(re.search(rf"^{name}: +(\d+) kB$", Path("/proc/meminfo").read_text(), flags=re.MULTILINE)[1]) * 1024


def test_region_is_its_own_mapping() -> None:
    """A region is one mapping of its own."""
    first, second = Region(MIB), Region(MIB)
    for region in (first, second):
        region.bytes.fill_(1)
        assert smaps(region.address)["Size"] == MIB


def test_unmapped_pages_come_back_new() -> None:
    """Unmapped pages leave the mapping and the system, and come back as new ones."""
    size = 512 * MIB
    pool = MappedPool()
    block = pool.reserve("weights", size)
    address = block.data_ptr()
    assert smaps(address)["Rss"] == 0
    given_back = []
    while len(given_back) < 20 and not any(given_back):  # again if other programs took as much in that moment
        assert pool.map("weights") == size
        assert smaps(address)["Rss"] == size
        block.fill_(7)
        given_back.append(the_system_has_it_after(lambda: pool.unmap("weights"), (size, 0)))
        assert smaps(address)["Rss"] == 0
        assert smaps(address)["Size"] == size
    assert any(given_back)

    assert pool.map("weights") == size
    assert block.data_ptr() == address
    assert (block == 0xFF).all()  # the pattern, not the sevens


def the_system_has_it_after(unmap: Callable[[], tuple[int, int]], moved: tuple[int, int]) -> bool:
    """Whether the kernel's own books say so; half the size is room for what other programs do meanwhile."""
    size = moved[0]
    anonymous, shared, available = system_bytes("AnonPages"), system_bytes("Shmem"), system_bytes("MemAvailable")
    assert unmap() == moved
    no_longer_anonymous = anonymous - system_bytes("AnonPages") > size // 2
    not_shared_instead = system_bytes("Shmem") - shared < size // 2
    # Freed pages wait in per-CPU lists that MemAvailable does not count (Linux 6.7), so: the next 512 MiB cost nothing.
    other = Region(size)
    other.bytes.fill_(1)
    free_for_others = available - system_bytes("MemAvailable") < size // 2
    other.release()
    return no_longer_anonymous and not_shared_instead and free_for_others


def test_repeated_moves_do_nothing() -> None:
    """Mapping twice and unmapping twice move nothing."""
    pool = MappedPool()
    block = pool.reserve("weights", MIB)
    pool.map("weights")
    block.fill_(7)
    assert pool.map("weights") == 0
    assert (block == 7).all()
    assert pool.unmap("weights") == (MIB, 0)
    assert pool.unmap("weights") == (0, 0)


def engine_of(config: Config, weights: dict[str, torch.Tensor]) -> Engine:
    engine = Engine(config, rank=0, eos=11)
    engine.load()
    engine.reserve_kv(engine.profile())
    for name, parameter in engine.weights.parameters.items():
        parameter.copy_(weights[name])
    return engine


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_releases_weights_and_kv(level: int, config: Config, weights: dict[str, torch.Tensor]) -> None:
    """Sleep gives back weights and KV cache."""
    engine = engine_of(config, weights)
    addresses = {tag: region.address for tag, region in engine.pool.regions.items()}
    assert smaps(addresses["kv_cache"])["Rss"] >= 64 * MIB
    assert engine.sleep(level) == {"weights": 0, "kv_cache": 0}
    assert all(smaps(address)["Rss"] == 0 for address in addresses.values())

    engine.wake_up(["weights"])
    assert smaps(addresses["weights"])["Rss"] > 0
    assert smaps(addresses["kv_cache"])["Rss"] == 0
    engine.wake_up(["kv_cache"])
    assert smaps(addresses["kv_cache"])["Rss"] >= 64 * MIB
    assert {tag: region.address for tag, region in engine.pool.regions.items()} == addresses


def test_level_1_restores_level_2_does_not(config: Config, weights: dict[str, torch.Tensor]) -> None:
    """Level 1 brings the weights back, and level 2 a pattern of NaN."""
    engine = engine_of(config, weights)
    engine.sleep(1)
    engine.wake_up(["weights"])
    assert all(torch.equal(p, weights[name]) for name, p in engine.weights.parameters.items())
    engine.sleep(2)
    engine.wake_up(["weights"])
    assert all(p.isnan().all() for p in engine.weights.parameters.values())


def test_level_0_keeps_everything(config: Config, weights: dict[str, torch.Tensor]) -> None:
    engine = engine_of(config, weights)
    assert engine.sleep(0) == {}
    assert smaps(engine.pool.regions["kv_cache"].address)["Rss"] >= 64 * MIB
    assert all(torch.equal(p, weights[name]) for name, p in engine.weights.parameters.items())


def test_sleeping_process_released_pool(rollout: Rollout) -> None:
    """A sleeping engine process has given its pool back."""

    def anonymous() -> int:
        text = Path(f"/proc/{rollout.process.pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+) kB", text)[1]) * 1024

    awake = anonymous()
    assert rollout.sleep(2) == {"weights": 0, "kv_cache": 0}
    assert awake - anonymous() >= 64 * MIB
    rollout.wake_up(["weights", "kv_cache"])
    assert anonymous() >= awake - MIB
    assert os.getpid() != rollout.process.pid

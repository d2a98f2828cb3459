"""What vLLM's allocator has on its list and the driver never gave is nobody's; tests/gpu asks the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rltrace.hooks.hook import NOBODY, HookRow
from rltrace.hooks.patching import PatchSet
from rltrace.host import memory
from rltrace.instrument.memory.pools import Pools
from rltrace.instrument.vllm import engine

ROOM_BYTES = 100


class AllocationData:
    """A segment of a pool."""

    handle: tuple[int, ...] = ()
    tag = ""

    def __init__(self, handle: tuple[int, ...], tag: str) -> None:
        self.handle, self.tag = handle, tag


class CuMemAllocator:
    """As vLLM 0.26 writes it: a segment is on the list before the driver is asked for its memory, and stays there."""

    instance: CuMemAllocator | None = None
    pointer_to_data: dict[int, Any]

    def __init__(self) -> None:
        self.pointer_to_data: dict[int, Any] = {}
        self.tag = ""

    @contextmanager
    def use_memory_pool(self, tag: str) -> Iterator[None]:
        self.tag = tag
        yield

    def allocate(self, address: int, size_bytes: int, driver: list[dict[str, int]]) -> None:
        self.pointer_to_data[address] = AllocationData((0, size_bytes, address, 0), self.tag)
        if size_bytes > ROOM_BYTES:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 200 bytes. GPU 0 has")
        driver.append({"address": address})

    def sleep(self, offload_tags: tuple[str, ...]) -> None: ...
    def wake_up(self, tags: list[str] | None = None) -> None: ...


class Register:
    """Of hooks, whose reports nobody asks for here."""

    def hook(self, *_: object, **__: object) -> HookRow:
        return NOBODY


@pytest.fixture
def allocate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int, int], None]]:
    """Ask an allocator with hooks for a segment of a pool, at an address; torch lists what its driver gave."""
    module: Any = ModuleType("vllm.device_allocator.cumem")
    module.CuMemAllocator, module.create_and_map = CuMemAllocator, lambda allocation_handle: None
    module.AllocationData = AllocationData
    monkeypatch.setattr(CuMemAllocator, "pointer_to_data", {}, raising=False)
    CuMemAllocator.instance = allocator = CuMemAllocator()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    segments: list[dict[str, int]] = []
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    patches = PatchSet("test", Register())
    engine.install_sleep(patches, Pools(engine.bytes_by_tag))

    def ask(tag: str, address: int, size_bytes: int) -> None:
        with allocator.use_memory_pool(tag):
            allocator.allocate(address, size_bytes, segments)

    yield ask
    patches.undo()
    engine.NEVER_MAPPED.clear()


def test_segment_without_room(allocate: Callable[[str, int, int], None]) -> None:
    """A segment for which there was no room counts for nobody."""
    allocate("weights", 1, 70)
    allocate("kv_cache", 2, 50)
    with pytest.raises(torch.OutOfMemoryError):
        allocate("kv_cache", 3, 200)
    assert engine.bytes_by_tag() == {"weights": 70, "kv_cache": 50}


def test_address_is_used_again(allocate: Callable[[str, int, int], None]) -> None:
    """Its address counts again when another segment has it."""
    with pytest.raises(torch.OutOfMemoryError):
        allocate("kv_cache", 3, 200)
    allocate("kv_cache", 3, 90)
    assert engine.bytes_by_tag() == {"kv_cache": 90}


def test_bytes_follow_what_comes_and_goes(allocate: Callable[[str, int, int], None]) -> None:
    """Segments are added up again whenever one has come or gone, also one for another at an address of before."""
    assert CuMemAllocator.instance is not None
    listed = CuMemAllocator.instance.pointer_to_data
    allocate("weights", 1, 70)
    allocate("kv_cache", 2, 50)
    assert engine.bytes_by_tag() == engine.bytes_by_tag() == {"weights": 70, "kv_cache": 50}
    del listed[1]
    assert engine.bytes_by_tag() == {"kv_cache": 50}
    del listed[2]
    allocate("weights", 2, 30)
    assert engine.bytes_by_tag() == {"weights": 30}
    with pytest.raises(torch.OutOfMemoryError):
        allocate("kv_cache", 3, 200)
    allocate("weights", 4, 20)
    assert engine.bytes_by_tag() == {"weights": 50}
    allocate("kv_cache", 3, 40)  # in the place of the one that had no room
    assert engine.bytes_by_tag() == {"weights": 50, "kv_cache": 40}


def test_tensors_of_a_model() -> None:
    """The parameters and buffers of all modules, those that several share once, and none of a model that is gone."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2, affine=False), torch.nn.Linear(2, 2))
    model.append(model[0])
    model[2].weight = model[0].weight
    model.register_module("nothing", None)
    expected = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    found = engine.tensors_of(model)
    assert {id(tensor) for tensor in found} == expected and len(found) == len(expected)
    assert [id(tensor) for tensor in engine.tensors_of(model)] == [id(tensor) for tensor in found]
    assert engine.tensors_of(None) == []


def test_copy_of_level_1_says_if_pinned(
    allocate: Callable[[str, int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of level 1 says itself whether it is pinned."""
    for address, (tag, size) in enumerate((("weights", 70), ("weights", 20), ("kv_cache", 50)), 1):
        allocate(tag, address, size)
    assert engine.copies(()) == {}
    copies = [torch.empty(size, dtype=torch.uint8) for size in (70, 20)]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is copies[0])
    assert CuMemAllocator.instance is not None
    for address, copy in enumerate(copies, 1):
        CuMemAllocator.instance.pointer_to_data[address].cpu_backup_tensor = copy
    assert engine.copies(()) == {"weights": memory.OnHost(90, 70)}


def test_other_errors_take_nothing(allocate: Callable[[str, int, int], None]) -> None:
    """An error of another kind takes nothing from anybody."""
    allocate("weights", 1, 70)
    assert CuMemAllocator.instance is not None
    CuMemAllocator.instance.pointer_to_data[2] = SimpleNamespace(handle=(0, 9, 2, 0), tag="weights")
    with pytest.raises(KeyError), CuMemAllocator.instance.use_memory_pool("weights"):
        raise KeyError("q_proj")
    assert engine.bytes_by_tag() == {"weights": 79}

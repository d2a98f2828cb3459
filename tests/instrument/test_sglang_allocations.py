"""torch_memory_saver's pools: of an engine they are the ledger's, and in a history of every allocation while awake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from rltrace.hooks.hook import Nobody
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.memory.cuda_memory import LEDGER
from rltrace.instrument.sglang.allocations import SaverPools
from rltrace.instrument.torch_memory_saver import SAVER, TorchMemorySaver

WEIGHTS, KV_CACHE = 0x1000, 0x9000


class Register:
    """Where hooks report to; nobody reads it."""

    def hook(self, *_: Any, **__: Any) -> Nobody:
        """A row that counts nothing."""
        return Nobody()


class Pool:
    """As torch's: of one segment."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.segment = {"address": address, "total_size": size_bytes}

    def snapshot(self) -> list[dict[str, int]]:
        """All of it."""
        return [self.segment]


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The package as it is in an engine's process."""
    pools = {
        ("weights", True, False, "pinned", 0): Pool(WEIGHTS, 40),
        ("kv_cache", False, False, "", 0): Pool(KV_CACHE, 90),
    }
    package = SimpleNamespace(torch_memory_saver=SimpleNamespace(_impl=SimpleNamespace(_mem_pools=pools)))
    monkeypatch.setitem(sys.modules, "torch_memory_saver", package)
    return package


def move(pools: SaverPools, how: str, tag: str | None) -> None:
    """A pause or a resumption, as the hooks see it."""
    tags = pools.named_tags((object(),) if tag is None else (object(), tag), {})
    (pools.paused if how == "pause" else pools.resumed)(tags, None, None)


def changes(pools: SaverPools) -> list[tuple[int, int, str | None]]:
    """Address, bytes and owner of each, of the history that ends here."""
    return [(change.address, change.size_bytes, change.owner) for change in pools.end().changes]


def test_a_pool_is_gone_while_it_is_paused(saver: SimpleNamespace) -> None:
    pools = SaverPools()
    pools.begin()
    move(pools, "pause", "kv_cache")
    move(pools, "resume", "kv_cache")
    move(pools, "resume", "kv_cache")  # it is awake: nothing comes
    assert changes(pools) == [(KV_CACHE, 90, None), (KV_CACHE, 90, "rollout.kv_cache")]


def test_slept_before_the_history(saver: SimpleNamespace) -> None:
    """What slept before the history is not there at its end."""
    pools = SaverPools()
    move(pools, "pause", None)  # all tags, while nothing is kept
    pools.begin()
    move(pools, "resume", "weights")
    history = pools.end()
    assert history.alive == {WEIGHTS: 40}
    assert history.ranges == [(WEIGHTS, WEIGHTS + 40), (KV_CACHE, KV_CACHE + 90)]
    assert [change.owner for change in history.changes] == ["rollout.weights"]


def test_a_pause_that_failed_changed_nothing(saver: SimpleNamespace) -> None:
    pools = SaverPools()
    pools.begin()
    pools.paused({"weights"}, None, RuntimeError("not now"))
    assert pools.end().alive == {WEIGHTS: 40, KV_CACHE: 90}


def test_pools_have_their_owners_names(saver: SimpleNamespace) -> None:
    assert SaverPools().owners() == {WEIGHTS: "rollout.weights", KV_CACHE: "rollout.kv_cache"}


def test_without_the_package_there_are_no_pools() -> None:
    assert not SaverPools().has_segments()


@pytest.mark.parametrize(("tag", "is_engine"), [("weights", True), ("kv_cache", True), ("default", False)])
def test_pools_of_an_engine_alone(
    saver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tag: str, is_engine: bool
) -> None:
    """Pools are the ledger's where an engine makes them, and not a trainer."""

    class Impl:
        _mem_pools: ClassVar[dict[Any, Any]] = {}
        _binary_wrapper = None

    class Saver:
        _impl = None

        @contextmanager
        def region(self, tag: str = "default", **_: Any) -> Iterator[None]:
            yield

        def pause(self, tag: str | None = None) -> None:
            """Nothing."""

        resume = pause

    module = ModuleType(SAVER.partition(":")[0])
    module.TorchMemorySaver = Saver  # type: ignore[attr-defined]
    module._TorchMemorySaverImpl = Impl  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(LEDGER, "engine", None)
    patches = PatchSet("torch_memory_saver", Register())
    TorchMemorySaver().install(patches)
    with Saver().region(tag=tag, enable_cpu_backup=True):
        pass
    patches.undo()
    assert (LEDGER.engine is not None) is is_engine

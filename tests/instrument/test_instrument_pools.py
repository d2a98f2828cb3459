"""What sleeping pools record: which bytes went and came, by tag, and what each owner holds."""

import sys
from types import SimpleNamespace

import pytest

import rltrace
from rltrace.events import Counter
from rltrace.host.memory import OnHost
from rltrace.instrument import torch_memory_saver
from rltrace.instrument.memory.pools import NOT_SAID, Pools
from rltrace.read.recording import Recording

BYTES = {"weights": 100, "kv_cache": 50, "scratch": 7}


def sleep(pools, tags=None, kept=(), error=None):
    pools.end_unmap(pools.begin_unmap(tags, kept), None, error)


def wake(pools, tags=None, error=None):
    pools.end_map(pools.begin_map(tags), None, error)


def level_1(asleep, pinned_bytes=100):
    """The copies of an allocator that keeps weights in the host's memory while they sleep."""
    return {"weights": OnHost(100, pinned_bytes)} if "weights" in asleep else {}


def recorded(folder, work, copies=lambda asleep: {}):
    """The spans of some work on pools, and the last sample of each owner."""
    rltrace.start(folder, role="engine")
    work(Pools(lambda: dict(BYTES), copies=copies))
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    events = list(process.events())
    samples = {event.name: event.value for event in events if isinstance(event, Counter)}
    spans = sorted((event for event in events if hasattr(event, "task")), key=lambda span: span.start_ns)
    return [(span.name, span.args) for span in spans], samples


def test_named_tags_come_back(folder):
    """All bytes go, and those of the tags that are named come back."""

    def work(pools):
        sleep(pools, kept=("weights",))
        wake(pools, ["weights"])

    spans, samples = recorded(folder, work, level_1)
    assert spans == [
        ("cumem.unmap", {"bytes": 157, "host_bytes": 100, "tags": BYTES}),
        ("cumem.map", {"bytes": 100, "tags": {"weights": 100}}),
    ]
    assert samples == {
        "rollout.weights_bytes": 100,
        "rollout.kv_cache_bytes": 0,
        "rollout.weights_host_bytes": 0,
        "rollout.weights_pinned_bytes": 0,
    }


def test_failed_wake_up_holds_what_it_mapped(folder):
    """A wake-up that fails holds what it has mapped until the next sleep."""
    seen = []

    def fail(pools):
        token = pools.begin_map(["kv_cache"])
        pools.arrived("kv_cache", 10)
        pools.arrived("kv_cache", 20)
        pools.arrived("weights", 9)  # of another pool, which is not waking up
        pools.end_map(token, None, RuntimeError("CUDA Error: out of memory"))

    def work(pools):
        for again in (wake, sleep, wake, sleep):
            sleep(pools)
            fail(pools)
            seen.append(pools.bytes_by_owner()["rollout.kv_cache_bytes"])
            again(pools)
            seen.append(pools.bytes_by_owner()["rollout.kv_cache_bytes"])

    spans, _ = recorded(folder, work)
    assert seen == [30, 50, 30, 0] * 2
    gone = [args["tags"] for name, args in spans if name == "cumem.unmap"]
    assert gone == [BYTES, BYTES, {"kv_cache": 30}, {}, BYTES, {"kv_cache": 30}]


def test_woken_bytes_go_with_the_sleep(folder):
    """What a wake-up brought back is gone with the next sleep."""

    def work(pools):
        sleep(pools)
        token = pools.begin_map()
        pools.arrived("kv_cache", 50)
        pools.end_map(token, None, None)
        sleep(pools)

    _, samples = recorded(folder, work)
    assert samples == {"rollout.weights_bytes": 0, "rollout.kv_cache_bytes": 0}


def test_failed_wake_up_says_what_it_asked(folder):
    """A wake-up that fails says what it asked for, and what was free before."""
    told = []
    error = RuntimeError("CUDA Error: out of memory")
    pools = Pools(lambda: dict(BYTES), free_bytes=lambda: 77, out_of_memory=lambda *args: told.append(args))
    rltrace.start(folder, role="engine")
    sleep(pools)
    wake(pools, ["kv_cache", "scratch"], error)
    rltrace.stop()
    assert told == [(error, 57, 77, ["rollout.kv_cache"])]


@pytest.mark.parametrize("pinned_bytes", [100, 60, 0])
def test_kept_copy_is_in_host_memory(folder, pinned_bytes):
    """A copy that a sleep keeps is in host memory until it is needed, and says what of it is pinned."""

    def copies(asleep):
        return level_1(asleep, pinned_bytes)

    _, samples = recorded(folder, lambda pools: sleep(pools, kept=("weights",)), copies)
    assert samples == {
        "rollout.weights_bytes": 0,
        "rollout.kv_cache_bytes": 0,
        "rollout.weights_host_bytes": 100,
        "rollout.weights_pinned_bytes": pinned_bytes,
    }


def test_pinned_part_of_a_copy_is_unknown(folder):
    """If the allocator does not say what of a copy is pinned, that is unknown, with the reason, asleep and awake."""

    def work(pools):
        for _ in range(2):
            sleep(pools, kept=("weights",))
            wake(pools)

    _, samples = recorded(folder, work, lambda asleep: level_1(asleep, None))
    assert samples["rollout.weights_host_bytes"] == 0
    assert "rollout.weights_pinned_bytes" not in samples
    (process,) = Recording.open(folder).processes
    assert process.unavailable == {"pinned bytes of rollout.weights": NOT_SAID}
    (lines,) = folder.glob("processes/*/process.jsonl")
    assert lines.read_text().count('"unavailable"') == 1


def test_copies_are_asked_after_moves(folder):
    """Where copies are is asked after sleeps and wake-ups, and at no phase boundary."""
    asked = []

    def copies(asleep):
        asked.append(sorted(asleep))
        return level_1(asleep)

    def work(pools):
        sleep(pools, ["weights"], kept=("weights",))
        for _ in range(5):
            assert pools.bytes_by_owner()["rollout.weights_pinned_bytes"] == 100
        wake(pools)

    recorded(folder, work, copies)
    assert asked == [["weights"], []]


# ---- torch_memory_saver -----------------------------------------------------------------------------------------


@pytest.fixture
def saver(monkeypatch):
    """Pools as torch_memory_saver 0.0.10 keeps them, by (tag, copied, on disk, how, device); `retains` may be set."""
    impl = SimpleNamespace(_mem_pools={}, retains=False)
    library = SimpleNamespace(tms_get_retain_cpu_backup=lambda: impl.retains)
    impl._binary_wrapper = SimpleNamespace(cdll=library)
    for key, size in (
        (("weights", True, False, "pinned", 0), 100),
        (("weights", True, False, "mmap", 0), 30),
        (("weights", False, False, "", 0), 7),
        (("kv_cache", False, False, "", 0), 50),
    ):
        segments = [{"total_size": size - 1}, {"total_size": 1}]
        impl._mem_pools[key] = SimpleNamespace(snapshot=lambda segments=segments: segments)
    module = SimpleNamespace(torch_memory_saver=SimpleNamespace(_impl=impl))
    monkeypatch.setitem(sys.modules, "torch_memory_saver", module)
    return impl


def test_torch_memory_savers_copies(saver):
    """Of torch_memory_saver's copies those are pinned that should be, and what is not copied is none."""
    copies = torch_memory_saver.Copies()
    assert copies({"weights", "kv_cache"}) == {"weights": OnHost(130, 100)}
    assert copies(set()) == {}


def test_retained_copy_stays(saver):
    """A copy that torch_memory_saver retains is there while its pool is awake."""
    copies = torch_memory_saver.Copies()
    saver.retains = True
    assert copies(set()) == {}, "none was made yet"
    copies({"weights"})
    assert copies(set()) == {"weights": OnHost(130, 100)}
    saver.retains = False
    copies({"weights"})
    assert copies(set()) == {}


def test_other_keys_leave_pinned_unknown(saver):
    """Of a torch_memory_saver with other keys nobody knows what is pinned."""
    saver._mem_pools = {("weights", True): saver._mem_pools["weights", True, False, "pinned", 0]}
    assert torch_memory_saver.Copies()({"weights"}) == {"weights": OnHost(100, None)}


def test_sleeping_pools_count_once(folder):
    """What sleeps already is not counted again."""

    def work(pools):
        sleep(pools, {"kv_cache"})
        sleep(pools)
        wake(pools)
        wake(pools)

    spans, samples = recorded(folder, work)
    assert [args["bytes"] for _, args in spans] == [50, 107, 157, 0]
    assert samples == {"rollout.weights_bytes": 100, "rollout.kv_cache_bytes": 50}


def test_pools_without_known_copies(folder):
    """Where copies cannot be asked for, pools are sampled all the same, and the error is told."""

    def copies(_asleep):
        raise KeyError("backup")

    def work(pools):
        for change in (sleep, wake, sleep):
            with pytest.raises(KeyError, match="backup"):
                change(pools)

    _, samples = recorded(folder, work, copies)
    assert samples == {"rollout.weights_bytes": 0, "rollout.kv_cache_bytes": 0}


def test_raising_allocator_moved_nothing(folder):
    """An allocator that raises has moved nothing."""

    def work(pools):
        sleep(pools, error=MemoryError())
        sleep(pools)

    spans, _ = recorded(folder, work)
    assert [args["bytes"] for _, args in spans] == [157, 157]
    assert [args.get("error") for _, args in spans] == ["MemoryError", None]


@pytest.mark.parametrize(("moved", "count"), [([10, 20, 30], 0), ([10, 21, 30], 1), ([10, 20], 1)])
def test_waking_up_says_what_has_moved(moved, count, folder, spans_of):
    """A wake-up says how many tensors are not where they fell asleep, which CUDA graphs could not know."""
    rltrace.start(folder)
    at = [10, 20, 30]
    pools = Pools(lambda: dict(BYTES), tensor_addresses=lambda: list(at))
    sleep(pools)
    at[:] = moved
    wake(pools, ["weights"])
    wake(pools)
    rltrace.stop()
    weights, rest = spans_of(folder, "cumem.map")
    assert "moved_tensors" not in weights.args, "the KV cache sleeps"
    assert rest.args["moved_tensors"] == count

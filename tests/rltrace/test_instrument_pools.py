"""What sleeping pools record: which bytes went and came, by tag, and what each owner holds."""

import rltrace
from rltrace.events import Counter
from rltrace.instrument.pools import Pools
from rltrace.recording import Recording

BYTES = {"weights": 100, "kv_cache": 50, "scratch": 7}


def sleep(pools, tags=None, kept=(), error=None):
    pools.end_unmap(pools.begin_unmap(tags, kept), None, error)


def wake(pools, tags=None, error=None):
    pools.end_map(pools.begin_map(tags), None, error)


def recorded(folder, work):
    """The spans of some work on pools, and the last sample of each owner."""
    rltrace.start(folder, role="engine")
    work(Pools(lambda: dict(BYTES)))
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    events = list(process.events())
    samples = {event.name: event.value for event in events if isinstance(event, Counter)}
    spans = sorted((event for event in events if hasattr(event, "task")), key=lambda span: span.start_ns)
    return [(span.name, span.args) for span in spans], samples


def test_all_bytes_go_and_those_of_the_named_tags_come_back(folder):
    def work(pools):
        sleep(pools, kept=("weights",))
        wake(pools, ["weights"])

    spans, samples = recorded(folder, work)
    assert spans == [
        ("cumem.unmap", {"bytes": 157, "host_bytes": 100, "tags": BYTES}),
        ("cumem.map", {"bytes": 100, "tags": {"weights": 100}}),
    ]
    assert samples == {"rollout.weights_bytes": 100, "rollout.kv_cache_bytes": 0, "rollout.weights_host_bytes": 0}


def test_a_wake_up_that_fails_holds_what_it_has_mapped_until_it_sleeps_again(folder):
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


def test_what_a_wake_up_brought_back_is_gone_when_it_sleeps(folder):
    def work(pools):
        sleep(pools)
        token = pools.begin_map()
        pools.arrived("kv_cache", 50)
        pools.end_map(token, None, None)
        sleep(pools)

    _, samples = recorded(folder, work)
    assert samples == {"rollout.weights_bytes": 0, "rollout.kv_cache_bytes": 0}


def test_a_wake_up_that_fails_says_what_it_asked_for_and_what_was_free_before(folder):
    told = []
    error = RuntimeError("CUDA Error: out of memory")
    pools = Pools(lambda: dict(BYTES), free_bytes=lambda: 77, out_of_memory=lambda *args: told.append(args))
    rltrace.start(folder, role="engine")
    sleep(pools)
    wake(pools, ["kv_cache", "scratch"], error)
    rltrace.stop()
    assert told == [(error, 57, 77, ["rollout.kv_cache"])]


def test_what_was_kept_lies_in_the_hosts_memory_until_it_is_needed(folder):
    _, samples = recorded(folder, lambda pools: sleep(pools, kept=("weights",)))
    assert samples == {"rollout.weights_bytes": 0, "rollout.kv_cache_bytes": 0, "rollout.weights_host_bytes": 100}


def test_what_sleeps_already_is_not_counted_again(folder):
    def work(pools):
        sleep(pools, {"kv_cache"})
        sleep(pools)
        wake(pools)
        wake(pools)

    spans, samples = recorded(folder, work)
    assert [args["bytes"] for _, args in spans] == [50, 107, 157, 0]
    assert samples == {"rollout.weights_bytes": 100, "rollout.kv_cache_bytes": 50}


def test_an_allocator_that_raises_has_moved_nothing(folder):
    def work(pools):
        sleep(pools, error=MemoryError())
        sleep(pools)

    spans, _ = recorded(folder, work)
    assert [args["bytes"] for _, args in spans] == [157, 157]
    assert [args.get("error") for _, args in spans] == ["MemoryError", None]

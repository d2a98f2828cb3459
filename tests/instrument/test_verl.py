"""What verl's hooks promise without any of its releases; on the real wheels they are called in tests/verl_releases."""

import asyncio
import subprocess
import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

import rltrace
from rltrace.hooks import boundaries
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.instrument.verl import dispatch, driver, rollout, weight_sync, worker
from rltrace.instrument.verl.hook_points import FIRST, HOOK_POINTS, LAST
from rltrace.record import spans

BIND = """
import sys
from rltrace.instrument.verl import Verl
from rltrace.hooks.patching import PatchSet

class Rows:
    def hook(self, instrumentation, target, state, reason=None, emits=()):
        print(target, state, reason)
        return self
    def fired(self):
        pass

patches = PatchSet("verl", Rows(), Verl.supports)
Verl().install(patches)
import verl
print("runs on")
"""


def bind_to(version, tmp_path):
    """What the hooks report when a verl of this version is imported; it has no modules but its own."""
    package = tmp_path / "verl"
    package.mkdir()
    (package / "__init__.py").write_text(f"__version__ = {version!r}\n")
    metadata = tmp_path / f"verl-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{BIND}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize("version", ["0.3.1", "0.4.0"])
def test_old_release_is_skipped(version, tmp_path):
    """A release that is older than those that were read is skipped, with the reason."""
    *lines, last = bind_to(version, tmp_path)
    assert last == "runs on"
    assert lines[-1] == (f"verl skipped verl {version} is not supported; this hook supports verl >= 0.4.1")
    assert len(lines) == 1  # no place is named


@pytest.mark.parametrize("version", ["0.10.0", "1.0.0"])
def test_newer_release_has_the_last_places(version, tmp_path):
    """Of a newer release the places of the last one that was read are named; each says by itself what it misses."""
    *lines, last = bind_to(version, tmp_path)
    assert last == "runs on"
    assert {text.split()[0] for text in lines} == {point.target for point in HOOK_POINTS if point.is_in(LAST)}


@pytest.mark.parametrize("line", range(FIRST, LAST + 1))
def test_only_the_releases_targets(line, tmp_path):
    """Only targets of the installed release are named."""
    lines = bind_to(f"0.{line}.1", tmp_path)
    named = {text.split()[0] for text in lines[:-1]}
    assert named == {point.target for point in HOOK_POINTS if point.is_in(line)}
    assert lines[-1] == "runs on"


@pytest.mark.parametrize("line", range(FIRST, LAST + 1))
def test_no_place_is_named_twice_in_a_release(line):
    targets = [point.target for point in HOOK_POINTS if point.is_in(line)]
    assert len(targets) == len(set(targets))
    assert all(point.since <= point.until for point in HOOK_POINTS)


def test_server_generates_while_requests_run(folder, spans_of):
    """A server generates while a request is in flight.

    verl's server cannot run without vLLM: its `generate` is stood in for, two requests that overlap and a third.

    Memory is looked at where a phase begins and ends, not at each of its requests.
    """
    rltrace.start(folder, role="server")
    module = ModuleType("a_server")

    async def generate(prompt_ids, request_id, seconds):
        await asyncio.sleep(seconds)
        return SimpleNamespace(token_ids=[1, 2, 3])

    module.generate = generate
    sys.modules["a_server"] = module
    patches = PatchSet("verl", spans.current())
    rollout.serve(patches, "a_server:generate")
    told = []
    unwatch = boundaries.watch(told.append)

    async def serve():
        requests = [module.generate(prompt_ids=[7] * n, request_id=f"r{n}", seconds=n / 100) for n in (1, 2)]
        await asyncio.gather(*requests)
        cancelled = asyncio.ensure_future(module.generate(prompt_ids=[7], request_id="r3", seconds=100))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)

    asyncio.run(serve())
    unwatch()
    patches.undo()
    del sys.modules["a_server"]
    rltrace.stop()
    assert [(edge.names, edge.is_end) for edge in told] == [
        (("rollout.generate",), False),
        (("rollout.generate",), True),
    ] * 2
    assert isinstance(told[-1].error, asyncio.CancelledError)
    requests = spans_of(folder, "server.request")
    assert [span.args.get("tokens") for span in requests] == [3, 3, None]
    assert [span.args["prompt_tokens"] for span in requests] == [1, 2, 1]
    both, last = spans_of(folder, "rollout.generate")
    assert both.start_ns <= requests[0].start_ns and requests[1].end_ns <= both.end_ns <= last.start_ns
    assert last.end_ns is not None
    assert both.is_phase


def names_of(spans):
    return [span.name for span in spans]


@pytest.mark.parametrize(
    ("replica", "node", "config", "rank"),
    [
        (0, 0, {"tensor_model_parallel_size": 2, "data_parallel_size": 1}, 0),
        (3, 0, {"tensor_model_parallel_size": 2, "data_parallel_size": 1}, 6),
        (1, 0, {"tensor_model_parallel_size": 2, "data_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8),
        (1, 1, {"tensor_model_parallel_size": 16, "data_parallel_size": 1}, 24),
    ],
)
@pytest.mark.parametrize("mode", ["HYBRID", "STANDALONE"])
def test_server_on_its_first_ranks_lane(mode, replica, node, config, rank, folder, process_of):
    """A server is on its first rank's lane if it shares the trainer's GPUs."""
    rltrace.start(folder)
    server = SimpleNamespace(
        rollout_mode=SimpleNamespace(name=mode),
        config=SimpleNamespace(**config),
        replica_rank=replica,
        node_rank=node,
        gpus_per_node=8,
    )
    rollout.become_server(server, None, None)
    rltrace.stop()
    assert (process_of(folder).role, process_of(folder).rank) == ("server", rank if mode == "HYBRID" else None)


def test_disaggregated_server_has_no_rank(folder, process_of):
    """A server that only prefills or only decodes says no rank.

    It does not know where among its replica's ranks its own are.
    """
    rltrace.start(folder)
    server = SimpleNamespace(rollout_mode=SimpleNamespace(name="HYBRID"), _disaggregation_role="decode")
    rollout.become_server(server, None, None)
    rltrace.stop()
    assert (process_of(folder).role, process_of(folder).rank) == ("server", None)


def test_micro_batches_of_an_update(folder, spans_of):
    """Micro-batches are those of an update, and each one ends where the next begins.

    A forward outside of an update is none, nor one of an engine that is told to go forward only.
    """
    batches = worker.MicroBatches()
    rltrace.start(folder)
    for forward_only in ((object(),), (object(), object(), object(), True), (object(), object(), object(), False)):
        batches.begin_update(forward_only, {})
        batches.begin((), {})
        batches.begin((), {})
        batches.stop((), {})
        batches.begin((), {})
        batches.end_update(None, None, None)
        batches.begin((), {})
    batches.begin_update((object(),), {"forward_only": True})
    batches.begin((), {})
    batches.end_update(None, None, None)
    rltrace.stop()
    found = spans_of(folder)
    assert names_of(found) == ["actor.micro_batch"] * 6
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(found)) and found[-1].end_ns is not None


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (SimpleNamespace(meta_info={}), ["actor.old_log_prob"]),
        (SimpleNamespace(meta_info={"is_lora": True}), []),  # `compute_ref_log_prob` has opened its phase
        (SimpleNamespace(extra_info={"no_lora_adapter": True}), ["ref.log_prob"]),
        (SimpleNamespace(extra_info={"no_lora_adapter": SimpleNamespace(data=True)}), ["ref.log_prob"]),
        (SimpleNamespace(extra_info={"no_lora_adapter": SimpleNamespace(data=False)}), ["actor.old_log_prob"]),
        ({"no_lora_adapter": False}, ["actor.old_log_prob"]),
    ],
)
def test_log_probs_owner_is_in_the_batch(batch, names, folder, spans_of):
    """The batch says whose log-probs are computed."""
    rltrace.start(folder)
    end_span(worker.begin_log_prob((object(), batch), {}), None, None)
    rltrace.stop()
    assert names_of(spans_of(folder)) == names


def test_timers_and_rewards(folder, process_of):
    """A timer is a step by its name, and a reward is that of a sequence."""

    class Trainer:
        global_steps = 7

    trainer, known = Trainer(), driver.Trainer()
    rltrace.start(folder)
    known.remember((trainer,), {})
    assert (known.step_args("step"), known.step_args("gen")) == ({"step": 7}, None)
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]])
    assert driver.reward_args((rewards, {})) == driver.reward_args(rewards) == {"reward_mean": 1.5}
    rltrace.stop()
    assert [event.value for event in process_of(folder).events()] == [1.5, 1.5]


def test_wake_up_interrupts_the_sync(folder, spans_of):
    """A wake-up in the switch interrupts the sync, and one outside of it begins none."""
    switch = weight_sync.Switch()
    rltrace.start(folder)
    switch.end_wake(switch.begin_wake((), {}), None, None)
    switch.begin((), {})
    switch.end_wake(switch.begin_wake((None, ["kv_cache"]), {}), None, None)
    switch.end(None, None, None)
    rltrace.stop()
    found = spans_of(folder)
    assert names_of(found) == ["rollout.wake_weights", "weight_sync", "rollout.wake_kv_cache", "weight_sync"]
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(found))


def test_gathers_of_the_switch_alone(monkeypatch):
    """Tensors are gathered for the sync only in the switch."""
    switch = weight_sync.Switch()
    monkeypatch.setattr(weight_sync, "_switch", switch)
    assert weight_sync.gather_args(torch.ones(3)) is None
    switch.is_on = True
    assert weight_sync.gather_args(torch.ones(3)) == {"bytes": 12, "dtype": "float32"}


def test_asynchronous_weights_are_passed_on():
    """Weights that come asynchronously are passed on as they are."""
    hook = Hook("verl", "a:b")
    for args, kwargs in (((object(), object()), {}), ((object(),), {"weights": object()})):
        assert weight_sync.watch_weights(hook, args, kwargs) == (args, kwargs)


def test_buckets_have_keys(folder, spans_of):
    """A bucket has a key of its own in each transfer over a handle, and one acknowledgement.

    Sender and receiver count alike, so that both name it so.
    """

    class Socket:
        def send_pyobj(self, _message):
            pass

        def recv(self):
            return b""

    hook = Hook("verl", "a:b")
    hook.bind(True)
    meta = {"w": {"shape": torch.Size([3, 2]), "dtype": torch.bfloat16}}
    sent, received = weight_sync.Transfers(), weight_sync.Transfers()
    rltrace.start(folder)
    keys = []
    for handle in ("ipc:///tmp/a", "ipc:///tmp/a", "ipc:///tmp/b"):
        socket = weight_sync.BucketSocket(Socket(), sent.begin(handle), "ipc", hook)
        for _ in range(2):
            socket.send_pyobj({"bucket_meta": meta})
            socket.recv()
        socket.recv()  # of what is no bucket
        buckets = received.begin(handle)
        keys += [buckets.next_key(), buckets.next_key()]
    rltrace.stop()
    assert keys == ["a:1:1", "a:1:2", "a:2:1", "a:2:2", "b:1:1", "b:1:2"]
    found = spans_of(folder)
    assert [(span.name, span.args["bucket"]) for span in found] == [
        (name, key) for key in keys for name in ("weight_sync.send", "weight_sync.wait")
    ]
    assert all(span.end_ns is not None and span.args.get("bytes") in (12, None) for span in found)


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_worker_group_calls(blocking, fails, folder, spans_of):
    """A call of a worker group waits only if it blocks, and ends where it raises.

    `func_generator` as verl writes it; its own is called in tests/verl_releases.
    """

    def func_generator(_group, method_name, dispatch_fn, collect_fn, execute_fn, blocking):
        class Functor:
            def __call__(self, *args):
                references = execute_fn(method_name, *args)
                if fails:
                    raise LookupError("a worker died")
                return collect_fn(references)

        return type(method_name, (Functor,), {})()

    hook = Hook("verl", "a:b")
    hook.bind(True)
    make = dispatch.watch_callable(func_generator, hook)
    rltrace.start(folder)
    call = make(None, "update_actor", None, lambda references: references, lambda _name, n: [n] * 3, blocking)
    if fails:
        with pytest.raises(LookupError):
            call(1)
    else:
        assert call(1) == [1, 1, 1]
    rltrace.stop()
    found = spans_of(folder)
    wanted = ["ray.dispatch", *["ray.execute"] * blocking, *["ray.collect"] * (not fails)]
    assert names_of(found) == wanted
    assert found[0].args == {"method": "update_actor", "blocking": blocking, "calls": 3}
    assert all(span.end_ns is not None for span in found)
    assert ["error" in span.args for span in found][1:] == [fails] * (len(wanted) - 1)


def test_worker_group_call_in_a_pause():
    """A call of a worker group in a pause makes no class of its own."""
    made = []

    def func_generator(_group, method_name, _dispatch_fn, collect_fn, execute_fn, _blocking):
        class Functor:
            def __call__(self, *args):
                return collect_fn(execute_fn(method_name, *args))

        made.append(Functor)
        return type(method_name, (Functor,), {})()

    hook = Hook("verl", "a:b")
    hook.bind(True)
    call = dispatch.watch_callable(func_generator, hook)(
        None, "update_actor", None, sum, lambda _name, n: [n] * 3, True
    )
    hook.hold(True)
    assert (call(1), len(made)) == (3, 1)
    hook.hold(False)
    assert (call(2), len(made)) == (6, 2)


def test_moved_bytes_of_parameters():
    """Each parameter counts once, as it is now.

    Tied, of a module that stands in two places, or of none; and replaced since the last call.
    """
    shared = torch.nn.Linear(3, 5)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 3), shared, torch.nn.ReLU(), shared, torch.nn.Linear(3, 7, False))
    model[4].weight = model[0].weight
    size_bytes = 4 * (7 * 3 + 3 * 5 + 5)
    assert worker.moved_args(model) == {"what": "model", "bytes": size_bytes}
    model.half()
    model[2].scale = torch.nn.Parameter(torch.ones(2))
    assert worker.moved_args(model) == {"what": "model", "bytes": size_bytes // 2 + 8}

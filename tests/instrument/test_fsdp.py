"""Hooks on FSDP2, on FSDP1, on backwards and on torch's optimizers: real training on two gloo ranks, and on one.

Their spans are the same, whichever shards the model.
"""

import ctypes

import pytest
import torch
from sharded_runs import spans_inside, train
from traced_runs import run_traced

from rltrace.analysis import summarize
from rltrace.instrument.torch.autograd import address_of_task_id

pytestmark = pytest.mark.run

KINDS = ("fsdp2", "fsdp1", "fsdp1_flat")
HOOKED = ("fsdp1", "fsdp2", "torch_optim", "torch_autograd", "torch_models", "torch_collectives")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return train(tmp_path_factory.mktemp("two"), *KINDS, ranks=2, imported="")


def names(spans):
    return sorted({span.name for span in spans})


def ranks_of(run, kind):
    """What each rank recorded while it trained with this kind."""
    return [spans_inside(process, "training", kind=kind) for process in run.recording.processes if [*process.events()]]


@every_kind
def test_every_span_of_a_training_step_is_there(two_ranks, kind):
    assert len(ranks_of(two_ranks, kind)) == 2
    for spans in ranks_of(two_ranks, kind):
        assert names(spans) == [
            "autograd.backward",
            "fsdp.all_gather",
            "fsdp.backward",
            "fsdp.forward",
            "fsdp.reduce_scatter",
            "optimizer.step",
        ]
        assert all(span.end_ns is not None for span in spans)
        assert not any("error" in span.args for span in spans)


@every_kind
def test_modules_have_forwards_and_backwards(two_ranks, kind):
    """Each module that is sharded has its forward and its backward."""
    for spans in ranks_of(two_ranks, kind):
        forwards = [span for span in spans if span.name == "fsdp.forward"]
        first = [span.args["module"] for span in forwards if not span.args.get("recompute")]
        assert first == ["", "layers.0", "layers.1"] * 3  # two steps, and one without gradients
        recomputed = [span.args["module"] for span in forwards if span.args.get("recompute")]
        assert recomputed == ["layers.1", "layers.0"] * 2
        backwards = [span.args["module"] for span in spans if span.name == "fsdp.backward"]
        assert backwards == ["", "layers.1", "layers.0"] * 2


@every_kind
def test_spans_nest_as_the_work_does(two_ranks, kind):
    for spans in ranks_of(two_ranks, kind):
        stack = []
        for span in spans:
            while stack and stack[-1].end_ns <= span.start_ns:
                stack.pop()
            assert not stack or span.end_ns <= stack[-1].end_ns, (stack[-1], span)
            if span.args.get("recompute"):
                assert (stack[-1].name, stack[-1].args["module"]) == ("fsdp.backward", span.args["module"])
            if span.name == "fsdp.reduce_scatter":
                assert (stack[-1].name, stack[-1].args["module"]) == ("fsdp.backward", span.args["module"])
            stack.append(span)


@every_kind
def test_backward_is_inside_that_of_the_loss(two_ranks, kind):
    """The model's backward is inside of the one that begins at the loss."""
    for spans in ranks_of(two_ranks, kind):
        wholes = [span for span in spans if span.name == "autograd.backward"]
        models = [span for span in spans if span.name == "fsdp.backward" and span.args["module"] == ""]
        assert len(wholes) == len(models) == 2
        for whole, model in zip(wholes, models, strict=True):
            assert whole.start_ns < model.start_ns and model.end_ns <= whole.end_ns


REPEATED = """
import torch
from torch.utils.checkpoint import checkpoint
import rltrace

layer = torch.nn.Linear(4, 4)
hidden = torch.ones(2, 4, requires_grad=True)
for _ in range(3):
    hidden = checkpoint(layer, hidden, use_reentrant=True)  # computed again within the backward, by a backward
hidden.sum().backward()
with rltrace.span("twice"):
    loss = layer(torch.ones(2, 4)).sum()
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        print("second time" in str(error))
torch.autograd.backward([layer(torch.ones(2, 4)).sum()])
"""


@pytest.mark.parametrize("timed", ["0", "1"])
def test_inner_and_failing_backwards(timed, tmp_path):
    """A backward inside of another one is a part of it, and one that fails says so.

    A forward that is repeated for its backward is no model's; what comes behind the backward is again.
    """
    run = run_traced(tmp_path, REPEATED, imported="torch", RLTRACE_TIME_HOOKS=timed)
    assert (run.returncode, run.out) == (0, "True\n"), run.err
    spans = run.spans("autograd.backward")
    assert [span.args.get("error") for span in spans] == [None, None, "RuntimeError", None]
    assert len(run.spans("model.forward")) == 3 + 1 + 1


COMPILED_WITH_BACKWARD = """
import torch

layer = torch.nn.Linear(4, 4)

def step(batch):
    loss = layer(batch).sin().sum()
    loss.backward()
    return loss * 2

def compiled_step():
    return torch.compile(step, backend="eager")

results = [compiled_step()(torch.ones(2, 4)).item() for _ in range(3)]
counted = torch._dynamo.utils.counters
print(len(set(results)), sorted(counted["frames"].items()), sum(counted["graph_break"].values()))
"""


def test_compiled_backward_is_unchanged(tmp_path):
    """A compiled function with a backward in it is compiled as it is without us."""
    (tmp_path / "bare").mkdir()
    bare = run_traced(tmp_path / "bare", COMPILED_WITH_BACKWARD, imported="torch", RLTRACE_DISABLE="torch_autograd")
    run = run_traced(tmp_path, COMPILED_WITH_BACKWARD, imported="torch")
    assert (run.returncode, bare.returncode) == (0, 0), run.err
    assert run.out == bare.out and run.out.startswith("1 ")
    assert (len(run.spans("autograd.backward")), len(bare.spans("autograd.backward"))) == (3, 0)


LAYER_ELEMENTS = 16 * 32 + 32 + 32 * 16 + 16


def collectives(spans, name):
    """Of the first layer."""
    args = [span.args for span in spans if span.name == name and span.args["module"] == "layers.0"]
    return [(of_one["bytes"], of_one["dtype"], of_one["tensors"], of_one["ranks"]) for of_one in args]


@every_kind
def test_collectives_know_their_bytes(two_ranks, kind):
    for spans in ranks_of(two_ranks, kind):
        gathers = collectives(spans, "fsdp.all_gather")
        if kind != "fsdp2":
            assert gathers.pop() == (LAYER_ELEMENTS * 4, "float32", 4, 2), "of the whole weights, at the end"
        assert set(gathers) == {(LAYER_ELEMENTS * 2, "bfloat16", 4, 2)}
        assert collectives(spans, "fsdp.reduce_scatter") == [(LAYER_ELEMENTS * 4, "float32", 4, 2)] * 2


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    return train(tmp_path_factory.mktemp("four"), "hsdp", ranks=4)


def test_a_mesh_of_two_dimensions_says_its_shape(four_ranks):
    """On two replicas of two shards each, collectives say both, and gradients are summed across the replicas too."""
    assert len(ranks_of(four_ranks, "hsdp")) == 4
    for spans in ranks_of(four_ranks, "hsdp"):
        sharding = [span for span in spans if span.name in ("fsdp.all_gather", "fsdp.reduce_scatter")]
        assert {(span.args["ranks"], span.args["replicas"]) for span in sharding} == {(2, 2)}
        reductions = [span for span in spans if span.name == "fsdp.reduce_scatter"]
        across = [span for span in spans if span.name == "fsdp.all_reduce"]
        assert [span.args["module"] for span in across] == [span.args["module"] for span in reductions]
        for reduced, summed in zip(reductions, across, strict=True):
            assert reduced.start_ns < summed.start_ns and summed.end_ns < reduced.end_ns
            assert (summed.args["ranks"], summed.args["bytes"]) == (2, reduced.args["bytes"] // 2)


def test_shards_in_the_hosts_memory_say_what_they_copy(tmp_path):
    """With FSDP2's offload each all-gather first copies its rank's shards to the device, and says their bytes."""
    run = train(tmp_path, "fsdp2_offloaded", ranks=2)
    for spans in ranks_of(run, "fsdp2_offloaded"):
        gathers = [span for span in spans if span.name == "fsdp.all_gather"]
        copies = [span for span in spans if span.name == "offload.h2d"]
        assert len(copies) == len(gathers)
        for gathered, copied in zip(gathers, copies, strict=True):
            assert gathered.start_ns < copied.start_ns and copied.end_ns < gathered.end_ns
            assert copied.args == {"what": "shards", "bytes": gathered.args["bytes"]}  # half of them, twice as wide


LONE_COPIES = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard"


def test_a_lone_ranks_shards_say_what_they_copy(tmp_path):
    """Where one rank has all shards there is no all-gather, and each copy to the device still says its bytes."""
    (spans,) = ranks_of(train(tmp_path, "fsdp2_offloaded", ranks=1), "fsdp2_offloaded")
    assert not [span for span in spans if span.name == "fsdp.all_gather"]
    copies = [span.args for span in spans if span.name == "offload.h2d"]
    assert len(copies) == len([span for span in spans if span.name == "fsdp.forward"])
    assert {"what": "shards", "bytes": LAYER_ELEMENTS * 4} in copies


def test_flat_parameters_are_traced(two_ranks):
    """Flat parameters are traced as original ones are."""
    for flat, original in zip(ranks_of(two_ranks, "fsdp1_flat"), ranks_of(two_ranks, "fsdp1"), strict=True):
        assert [(s.name, s.args.get("module")) for s in flat] == [(s.name, s.args.get("module")) for s in original]


def test_an_optimizer_step_says_whose_it_is(two_ranks):
    for spans in ranks_of(two_ranks, "fsdp2"):
        steps = [span for span in spans if span.name == "optimizer.step"]
        said = {"optimizer": "AdamW", "tensors": 11, "number": 1, "models": [1]}
        assert [span.args for span in steps] == [said] * 2


def test_training_is_the_same_with_hooks(two_ranks, tmp_path):
    """Training is the same with and without the hooks."""
    bare = train(tmp_path, *KINDS, ranks=2, RLTRACE_DISABLE=",".join(HOOKED))
    assert bare.out == two_ranks.out
    assert [line.split()[0] for line in bare.out.splitlines()] == [*KINDS]
    assert names(bare.spans()) == ["training"]
    hooks = [hook for process in bare.recording.processes for hook in process.hooks]
    assert {hook["reason"] for hook in hooks if hook["instrumentation"] in HOOKED} == {"disabled by RLTRACE_DISABLE"}


@pytest.mark.parametrize(("instrumentations", "count"), [(("fsdp1",), 7), (("fsdp2", "torch_optim"), 7)])
def test_every_hook_is_installed_and_fired(two_ranks, instrumentations, count):
    fired = {}
    for process in two_ranks.recording.processes:
        for hook in process.hooks:
            if hook["instrumentation"] in instrumentations:
                assert hook["state"] == "installed", hook
                fired[hook["target"]] = fired.get(hook["target"], 0) + hook["fired"]
    assert fired.pop(LONE_COPIES, 0) == 0, "two ranks gather"
    assert len(fired) == count
    assert all(fired.values()), fired


def test_one_rank_has_no_collectives(tmp_path):
    run = train(tmp_path, "fsdp2", "fsdp1", ranks=1)
    for kind in ("fsdp2", "fsdp1"):
        (spans,) = ranks_of(run, kind)
        assert names(spans) == ["autograd.backward", "fsdp.backward", "fsdp.forward", "optimizer.step"]


# ---- what does not go as usual, on one rank ----------------------------------------------------------------------

ONE_RANK = """
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    import rltrace
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.linear(x))

    def fsdp1(module):
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))

    def fsdp2(module):
        return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
"""

ODD = """
    with rltrace.span("frozen"):
        model = torch.nn.Sequential(Layer(), Layer().requires_grad_(False), Layer())
        for number in range(3):
            model[number] = fsdp1(model[number])
        model = fsdp1(model)
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()

    class Fails(torch.autograd.Function):
        fails = True
        forward = staticmethod(lambda ctx, x: x.clone())

        @staticmethod
        def backward(ctx, grad):
            if Fails.fails:
                raise KeyError("theirs")
            return grad

    class Failing(Layer):
        def forward(self, x):
            return Fails.apply(super().forward(x))

    with rltrace.span("backward raises"):
        for fails in (True, False):
            Fails.fails = fails
            model = fsdp1(Failing())
            try:
                model(torch.ones(1, 4)).sum().backward()
            except KeyError as error:
                print("caught", error)
    dist.destroy_process_group()

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    def fail(): raise KeyError("theirs, too")
    def closure():
        optimizer.zero_grad(); loss = model(torch.ones(2)).sum(); loss.backward(); return loss
    with rltrace.span("step raises"):
        try:
            optimizer.step(fail)
        except KeyError as error:
            print("caught", error)
        optimizer.step(closure)
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """The spans of one odd case, by its name."""
    run = run_traced(tmp_path_factory.mktemp("odd"), ONE_RANK + ODD, imported="torch")
    assert (run.returncode, run.out) == (0, "caught 'theirs'\ncaught 'theirs, too'\n"), run.err
    (process,) = run.recording.processes
    return lambda case: spans_inside(process, case)


def test_frozen_modules_backward_ends(odd):
    """The backward of a frozen module ends with that of the whole model."""
    backwards = [span for span in odd("frozen") if span.name == "fsdp.backward"]
    assert [span.args["module"] for span in backwards] == ["2", "1", "0"] * 2
    assert all(span.end_ns is not None and "error" not in span.args for span in backwards)


def test_raised_backward_ends_at_the_next(odd):
    """A backward that raised is over when the next one begins."""
    backwards = [span for span in odd("backward raises") if span.name == "fsdp.backward"]
    assert len(backwards) == 2
    assert all(span.end_ns is not None for span in backwards)


def test_raised_step_ends_at_the_next(odd):
    """The span of an optimizer step that raised ends when the next one begins."""
    steps = [span for span in odd("step raises") if span.name == "optimizer.step"]
    assert [span.args.get("error") for span in steps] == ["RuntimeError", None]


def test_what_is_not_recorded_is_not_lost(tmp_path):
    """Outside of the steps that were chosen neither the beginning of a span is written nor its end."""
    run = train(tmp_path, "fsdp2", ranks=2, RLTRACE_RECORD_STEPS="99")
    recorded = {event.name for process in run.recording.processes for event in process.events()}
    assert not {"fsdp.forward", "fsdp.reduce_scatter", "fsdp.all_gather"} & recorded
    assert {"model.forward", "optimizer.step"} <= recorded, "the steps that nobody marks are inferred from these"
    assert summarize(run.recording).losses == []


COMPILED = """
    for shard in (fsdp1, fsdp2):
        with rltrace.span("compiled", kind=shard.__name__):
            model = shard(torch.nn.Sequential(shard(Layer()), shard(Layer())))
            graphs = []

            def backend(graph, inputs):
                graphs.append(graph)
                return graph

            compiled = torch.compile(model, backend=backend)
            for _ in range(2):
                compiled(torch.ones(1, 4)).sum().backward()
            print(len(graphs))
            torch.compiler.reset()
    dist.destroy_process_group()
"""


def test_a_compiled_model_is_not_disturbed(tmp_path):
    (tmp_path / "bare").mkdir()
    bare = run_traced(tmp_path / "bare", ONE_RANK + COMPILED, imported="torch", RLTRACE_DISABLE="fsdp1,fsdp2")
    run = run_traced(tmp_path, ONE_RANK + COMPILED, imported="torch")
    assert (run.returncode, bare.returncode) == (0, 0), run.err
    assert run.out == bare.out
    assert "get_eval_frame_callback" not in run.err, "dynamo looked into our hook"
    (process,) = run.recording.processes
    for kind in ("fsdp1", "fsdp2"):
        expected = ["autograd.backward", "fsdp.backward", "fsdp.forward"]
        assert names(spans_inside(process, "compiled", kind=kind)) == expected


def test_task_id_by_its_address() -> None:
    """The function of torch's C++ says what torch's own for Python says, outside of a backward and inside of one."""
    address, said = address_of_task_id(), []
    assert address
    ask = ctypes.CFUNCTYPE(ctypes.c_int)(address)
    one = torch.ones(1, requires_grad=True)
    doubled = one * 2
    doubled.register_hook(lambda _: said.append((ask(), torch._C._current_graph_task_id())))
    doubled.backward()
    assert ask() == torch._C._current_graph_task_id() == -1
    assert said[0][0] == said[0][1] != -1

"""Hooks on FSDP1: real training on two gloo ranks, and on one. The spans are those of FSDP2."""

import pytest
from traced_runs import run_traced

TRAIN = """
    import hashlib, os, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.utils.checkpoint import checkpoint

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(16, 32)
            self.down = torch.nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(10, 16)
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
            self.head = torch.nn.Linear(16, 10)

        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    def work(rank, ranks, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        torch.manual_seed(0)
        model = Model()
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            use_orig_params=os.environ["ORIG_PARAMS"] == "1",
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(10).reshape(2, 5)
        for step in range(2):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = model(tokens).float().sum()
        # Its weights in full precision: one more all-gather of every module.
        with FullyShardedDataParallel.summon_full_params(model):
            digest = hashlib.sha256(b"".join(p.detach().clone().numpy().tobytes() for p in model.parameters()))
        if rank == 0:
            print(digest.hexdigest(), loss.item().hex())
        dist.destroy_process_group()

    if __name__ == "__main__":
        import socket
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = str(listener.getsockname()[1])
        mp.spawn(work, args=(int(os.environ["RANKS"]), port), nprocs=int(os.environ["RANKS"]))
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return run_traced(tmp_path_factory.mktemp("two"), TRAIN, RANKS="2", ORIG_PARAMS="1")


def names(spans):
    return sorted({span.name for span in spans})


def ranks_of(run):
    """The recorded spans of each rank: the processes that had any."""
    per_process = [
        [event for event in process.events() if hasattr(event, "task")] for process in run.recording.processes
    ]
    return [sorted(spans, key=lambda span: span.start_ns) for spans in per_process if spans]


def test_every_span_of_a_training_step_is_there(two_ranks):
    assert two_ranks.returncode == 0, two_ranks.err
    assert len(ranks_of(two_ranks)) == 2
    for spans in ranks_of(two_ranks):
        assert names(spans) == [
            "fsdp.all_gather",
            "fsdp.backward",
            "fsdp.forward",
            "fsdp.reduce_scatter",
            "optimizer.step",
        ]
        assert all(span.end_ns is not None for span in spans)
        assert not any("error" in span.args for span in spans)


def test_each_module_has_its_forward_and_backward(two_ranks):
    for spans in ranks_of(two_ranks):
        forwards = [span for span in spans if span.name == "fsdp.forward"]
        first = [span.args["module"] for span in forwards if not span.args.get("recompute")]
        assert first == ["", "layers.0", "layers.1"] * 3  # two steps, and one without gradients
        recomputed = [span.args["module"] for span in forwards if span.args.get("recompute")]
        assert recomputed == ["layers.1", "layers.0"] * 2
        backwards = [span.args["module"] for span in spans if span.name == "fsdp.backward"]
        assert backwards == ["", "layers.1", "layers.0"] * 2


def test_spans_nest_as_the_work_does(two_ranks):
    for spans in ranks_of(two_ranks):
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


def test_collectives_know_their_bytes(two_ranks):
    layer_elements = 16 * 32 + 32 + 32 * 16 + 16
    for spans in ranks_of(two_ranks):
        *gathers, in_full = [
            (span.args["bytes"], span.args["dtype"], span.args["tensors"], span.args["ranks"])
            for span in spans
            if span.name == "fsdp.all_gather" and span.args["module"] == "layers.0"
        ]
        assert set(gathers) == {(layer_elements * 2, "bfloat16", 4, 2)}
        assert in_full == (layer_elements * 4, "float32", 4, 2)
        reduces = [span for span in spans if span.name == "fsdp.reduce_scatter" and span.args["module"] == "layers.0"]
        assert [(span.args["bytes"], span.args["dtype"], span.args["tensors"]) for span in reduces] == [
            (layer_elements * 4, "float32", 4)
        ] * 2


def test_training_is_the_same_with_and_without_the_hooks(two_ranks, tmp_path):
    bare = run_traced(tmp_path, TRAIN, RANKS="2", ORIG_PARAMS="1", RLTRACE_DISABLE="fsdp1,torch_optim")
    assert (bare.returncode, two_ranks.returncode) == (0, 0), bare.err
    assert bare.out == two_ranks.out != ""
    assert bare.spans() == []


def test_every_hook_is_installed_and_fired(two_ranks):
    fired = {}
    for process in two_ranks.recording.processes:
        for hook in process.hooks:
            if hook["instrumentation"] == "fsdp1" and hook["state"] == "installed":
                fired[hook["target"]] = fired.get(hook["target"], 0) + hook["fired"]
    assert len(fired) == 7
    assert all(fired.values()), fired


def test_flat_parameters_are_traced_as_original_ones_are(two_ranks, tmp_path):
    flat = run_traced(tmp_path, TRAIN, RANKS="2", ORIG_PARAMS="0")
    assert flat.returncode == 0, flat.err
    for mine, theirs in zip(ranks_of(flat), ranks_of(two_ranks), strict=True):
        assert [(s.name, s.args.get("module")) for s in mine] == [(s.name, s.args.get("module")) for s in theirs]


def test_one_rank_has_no_collectives(tmp_path):
    run = run_traced(tmp_path, TRAIN, RANKS="1", ORIG_PARAMS="1")
    assert run.returncode == 0, run.err
    assert names(run.spans()) == ["fsdp.backward", "fsdp.forward", "optimizer.step"]


ONE_RANK = """
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.linear(x))

    def shard(module):
        return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
"""


def test_a_module_that_is_frozen_ends_its_backward_with_the_whole_one(tmp_path):
    run = run_traced(
        tmp_path,
        ONE_RANK
        + """
    model = torch.nn.Sequential(Layer(), Layer().requires_grad_(False), Layer())
    for number in range(3):
        model[number] = shard(model[number])
    model = shard(model)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()
    """,
    )
    assert run.returncode == 0, run.err
    backwards = run.spans("fsdp.backward")
    assert [span.args["module"] for span in backwards] == ["2", "1", "0"] * 2
    assert all(span.end_ns is not None and "error" not in span.args for span in backwards)


def test_a_backward_that_raised_is_over_at_the_next(tmp_path):
    run = run_traced(
        tmp_path,
        ONE_RANK
        + """
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

    for fails in (True, False):
        Fails.fails = fails
        model = shard(Failing())
        try:
            model(torch.ones(1, 4)).sum().backward()
        except KeyError as error:
            print("caught", error)
    dist.destroy_process_group()
    """,
    )
    assert (run.returncode, run.out) == (0, "caught 'theirs'\n"), run.err
    assert all(span.end_ns is not None for span in run.spans("fsdp.backward"))


def test_a_compiled_model_is_not_disturbed(tmp_path):
    source = (
        ONE_RANK
        + """
    model = shard(torch.nn.Sequential(shard(Layer()), shard(Layer())))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(torch.ones(1, 4)).sum().backward()
    print(len(graphs))
    dist.destroy_process_group()
    """
    )
    (tmp_path / "bare").mkdir()
    bare = run_traced(tmp_path / "bare", source, RLTRACE_DISABLE="fsdp1")
    run = run_traced(tmp_path, source)
    assert (run.returncode, bare.returncode) == (0, 0), run.err
    assert run.out == bare.out
    assert names(run.spans()) == ["fsdp.backward", "fsdp.forward"]

"""Hooks on FSDP2 and on torch's optimizers: real training on two gloo ranks, and on one."""

import pytest
from traced_runs import run_traced

TRAIN = """
    import hashlib, os, sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
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
        mesh = init_device_mesh("cpu", (ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(10).reshape(2, 5)
        for step in range(2):
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loss = model(tokens).float().sum()
        digest = hashlib.sha256(b"".join(p.full_tensor().numpy().tobytes() for p in model.state_dict().values()))
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
    return run_traced(tmp_path_factory.mktemp("two"), TRAIN, RANKS="2")


@pytest.fixture(scope="module")
def two_ranks_without_hooks(tmp_path_factory):
    return run_traced(tmp_path_factory.mktemp("bare"), TRAIN, RANKS="2", RLTRACE_DISABLE="fsdp1,fsdp2,torch_optim")


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
        gathers = [span for span in spans if span.name == "fsdp.all_gather" and span.args["module"] == "layers.0"]
        assert {(span.args["bytes"], span.args["dtype"], span.args["ranks"]) for span in gathers} == {
            (layer_elements * 2, "bfloat16", 2)
        }
        reduces = [span for span in spans if span.name == "fsdp.reduce_scatter" and span.args["module"] == "layers.0"]
        assert len(reduces) == 2
        assert {(span.args["bytes"], span.args["dtype"], span.args["tensors"]) for span in reduces} == {
            (layer_elements * 4, "float32", 4)
        }


def test_an_optimizer_step_says_whose_it_is(two_ranks):
    for spans in ranks_of(two_ranks):
        steps = [span for span in spans if span.name == "optimizer.step"]
        assert [span.args for span in steps] == [{"optimizer": "AdamW", "tensors": 11}] * 2


def test_training_is_the_same_with_and_without_the_hooks(two_ranks, two_ranks_without_hooks):
    assert two_ranks_without_hooks.returncode == 0
    assert two_ranks.out == two_ranks_without_hooks.out
    assert two_ranks_without_hooks.spans() == []
    hooks = [hook for process in two_ranks_without_hooks.recording.processes for hook in process.hooks]
    reasons = {hook["reason"] for hook in hooks if hook["instrumentation"] in ("fsdp2", "torch_optim")}
    assert reasons == {"disabled by RLTRACE_DISABLE"}


def test_every_hook_is_installed_and_fired(two_ranks):
    hooks = {t: h for t, h in two_ranks.hooks().items() if h["instrumentation"] in ("fsdp2", "torch_optim")}
    assert len(hooks) == 6
    assert {hook["state"] for hook in hooks.values()} == {"installed"}


def test_one_rank_has_no_collectives(tmp_path):
    run = run_traced(tmp_path, TRAIN, RANKS="1")
    assert run.returncode == 0, run.err
    assert names(run.spans()) == ["fsdp.backward", "fsdp.forward", "optimizer.step"]


def test_a_step_that_raises_ends_its_span_at_the_next(tmp_path):
    run = run_traced(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.LBFGS(model.parameters())
        def fail(): raise KeyError("theirs")
        def closure():
            optimizer.zero_grad(); loss = model(torch.ones(2)).sum(); loss.backward(); return loss
        try:
            optimizer.step(fail)
        except KeyError as error:
            print("caught", error)
        optimizer.step(closure)
        """,
    )
    assert (run.returncode, run.out) == (0, "caught 'theirs'\n")
    assert [span.args.get("error") for span in run.spans("optimizer.step")] == ["RuntimeError", None]


def test_a_compiled_model_is_not_disturbed(tmp_path):
    source = """
        import torch, torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(4, 4)
            def forward(self, x):
                return torch.relu(self.linear(x))
        layer = torch.nn.Sequential(Layer(), Layer())
        fully_shard(layer[0], mesh=init_device_mesh("cpu", (1,)))
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph
        compiled = torch.compile(layer, backend=backend)
        for _ in range(2):
            compiled(torch.ones(1, 4)).sum().backward()
        print(len(graphs))
        dist.destroy_process_group()
    """
    (tmp_path / "bare").mkdir()
    bare = run_traced(tmp_path / "bare", source, RLTRACE_DISABLE="fsdp2")
    run = run_traced(tmp_path, source)
    assert (run.returncode, bare.returncode) == (0, 0), run.err
    assert run.out == bare.out
    assert names(run.spans()) == ["fsdp.backward", "fsdp.forward"]

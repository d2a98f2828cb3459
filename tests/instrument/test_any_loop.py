"""Loops that know nothing of us: their steps and phases, beside their own timers.

One of them runs under `rltrace exec`, the others in a Python that has imported torch.
The one with accelerate and DeepSpeed is in `tests/frameworks`, where these are installed.
"""

from __future__ import annotations

import ast

import pytest
from loop_runs import COMMANDS, LoopRun, fork_loop, run_loop
from traced_runs import run_traced

from rltrace.events import Span

pytestmark = pytest.mark.run

MOST_UNLABELLED = 0.05
MOST_APART = 0.04
"""Share of a step. Alone on a machine it is below 0.02 (docs/measurements/any_loop.md)."""

UPDATE = "from the first forward with gradient to the last optimizer step"
BY_GENERATION, BY_OPTIMIZER = "from one generation to the next", "from one completed accumulation to the next"
INFERRED = {
    "grpo_generate": {
        "step": BY_GENERATION,
        "rollout.generate": "transformers generates",
        "actor.old_log_prob": "forwards without gradient of the model that learns",
        "ref.log_prob": "forwards without gradient of a model that no optimizer holds",
        "actor.update": UPDATE,
    },
    "asyncio_tools": {
        "step": BY_GENERATION,
        "weight_sync": "weights are copied into what generates",
        "rollout.generate": "transformers generates",
        "actor.old_log_prob": "forwards without gradient of the model that learns",
        "actor.update": UPDATE,
    },
    "fsdp2_torchrun": {
        "step": BY_OPTIMIZER,
        "ref.log_prob": "forwards without gradient of a model that no optimizer holds",
        "actor.update": UPDATE,
    },
    "ddp_torchrun": {
        "step": BY_OPTIMIZER,
        "actor.old_log_prob": "forwards without gradient of the model that learns",
        "actor.update": UPDATE,
    },
}
FORKED = ("asyncio_tools", "fsdp2_torchrun", "grpo_generate")
every_loop = pytest.mark.parametrize("loop", INFERRED)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each loop, run once."""
    known: dict[str, LoopRun] = {}

    def of(loop: str) -> LoopRun:
        if loop not in known:
            run = fork_loop if loop in FORKED else run_loop
            known[loop] = run(tmp_path_factory.mktemp(loop), loop)
        return known[loop]

    return of


def spans_of(run: LoopRun, rank: int | None = 0) -> list[Span]:
    (process,) = [p for p in run.recording.processes if p.rank == rank and p.hooks and any(p.events())]
    return [event for event in process.events() if isinstance(event, Span)]


def test_every_loop_is_run() -> None:
    """No loop is left out."""
    assert INFERRED.keys() | {"accelerate_zero"} == COMMANDS.keys()


@every_loop
def test_steps_and_phases_have_their_reasons(runs, loop: str) -> None:
    """Each step of the loop is there, and all that was inferred says why."""
    run = runs(loop)
    assert [(step.step, step.inferred) for step in run.summary.steps] == [(number, True) for number in range(run.steps)]
    assert {found.name: found.reason for found in run.summary.inferred} == INFERRED[loop]
    assert all(step.end_seconds is not None for step in run.summary.steps)


@every_loop
def test_phases_are_what_the_loop_times_itself(runs, loop: str) -> None:
    """Phases and idle time are the loop's own, and next to nothing is unlabelled but what it times nowhere itself.

    In the step in which they agree most: between what the loop times and what we do, a busy machine may take the
    processor away.
    """
    run = runs(loop)
    assert len(run.apart) == run.steps - 1 > 3
    assert min(apart["unlabelled"] for apart in run.apart) <= MOST_UNLABELLED
    least = {name: min(abs(apart[name]) for apart in run.apart) for name in run.own}
    assert {name: share for name, share in least.items() if share > MOST_APART} == {}, run.apart
    assert run.own.keys() == INFERRED[loop].keys() - {"step"} | {"idle"}


def test_ddp_says_what_its_buckets_moved(runs) -> None:
    """A backward of DDP has its all-reduce, of all bytes of its gradients."""
    spans = spans_of(runs("ddp_torchrun"))
    reduced = [span for span in spans if span.name == "ddp.all_reduce"]
    backwards = [span for span in spans if span.name == "autograd.backward"]
    assert len({span.args["bytes"] for span in reduced}) == 2  # the actor's, and the critic's
    assert all(span.args["ranks"] == 2 and span.args["buckets"] >= 2 for span in reduced[4:])
    during = [any(b.start_ns <= span.start_ns < span.end_ns <= b.end_ns + 5e6 for b in backwards) for span in reduced]
    assert len(during) >= 10 and all(during)


def test_called_collective_has_its_bytes(runs) -> None:
    """A collective says how many bytes it moved among which ranks."""
    reduced = [span for span in spans_of(runs("fsdp2_torchrun")) if span.name == "dist.all_reduce"]
    assert [span.args["bytes"] for span in reduced] == [4] * 5
    assert {(span.args["ranks"], span.args["group"]) for span in reduced} == {(2, "default_pg")}


def test_generation_hides_its_forwards(runs) -> None:
    """What a generation calls is its own: neither a forward of the model nor a step."""
    spans = spans_of(runs("grpo_generate"), None)
    generated = [span for span in spans if span.name == "model.generate"]
    assert [(span.args["sequences"], span.args["prompt_tokens"], span.args["tokens"]) for span in generated] == [
        (16, 8, 28)
    ] * 5
    forwards = [span for span in spans if span.name == "model.forward"]
    inside = [s for s in forwards if any(g.start_ns < s.start_ns < g.end_ns for g in generated)]
    assert inside == []


MODELS = """
    import rltrace
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x, fail=False):
            if fail:
                raise KeyError("theirs")
            return self.inner(x)

    model, loss_of = Model(), nn.MSELoss()
    with torch.no_grad():
        model(torch.ones(3, 4))
    loss_of(model(torch.ones(2, 4)), torch.ones(2, 4)).backward()
    try:
        model(torch.ones(1, 4), fail=True)
    except KeyError:
        pass
    model.inner(torch.ones(1, 4))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(torch.ones(5, 4))
    whole = torch.compile(lambda x: model(x).sum(), backend="eager", fullgraph=True)
    whole(torch.ones(6, 4)).backward()
    torch.export.export(model, (torch.ones(7, 4),))
    breaks = torch._dynamo.utils.counters["graph_break"]
    print(len(torch.fx.symbolic_trace(model.inner).graph.nodes), sum(breaks.values()))
"""


def test_only_whole_models_have_a_forward(tmp_path) -> None:
    """What a model calls has none, nor a module without parameters; compiling, exporting and tracing go on as ever."""
    run = run_traced(tmp_path, MODELS, imported="torch")
    assert (run.returncode, run.out) == (0, "4 0\n"), run.err
    forwards = [span for span in run.spans("model.forward") if span.args["rows"] in range(1, 6)]
    said = [
        (span.args["module"], span.args["rows"], span.args.get("gradient"), span.args.get("error")) for span in forwards
    ]
    assert said[:4] == [
        ("Model", 3, None, None),
        ("Model", 2, True, None),
        ("Model", 1, None, "KeyError"),
        ("Sequential", 1, True, None),
    ]
    assert ("OptimizedModule", 5, True, None) in said
    assert {span.args["model"] for span in forwards} == {1}


BOUNDARIES = """
    import torch
    from rltrace.hooks import boundaries

    told = []
    boundaries.watch(lambda boundary: told.append((*boundary.names, "end" if boundary.is_end else "begin")))
    actor, ref = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    with torch.no_grad():
        for model in (actor, actor, ref):
            model(torch.ones(1, 4))
    for _ in range(2):
        loss = actor(torch.ones(1, 4)).sum()
        with torch.no_grad():
            ref(torch.ones(1, 4))
        loss.backward()
    optimizer.step()
    print(told)
    del told[:]
    import rltrace
    with rltrace.phase("reward"):
        pass
    actor(torch.ones(1, 4)).sum().backward()
    print(told)
"""


def test_memory_at_inferred_boundaries(tmp_path) -> None:
    """Who watches memory is told of phases while they run, until the program tells of its own."""
    run = run_traced(tmp_path, BOUNDARIES, imported="torch", RLTRACE_DISABLE="cuda_memory,allocations")
    assert run.returncode == 0, run.err
    inferred, own = map(ast.literal_eval, run.out.splitlines())
    log_probs = [("actor.old_log_prob", "begin"), ("actor.old_log_prob", "end")]
    assert inferred == [*log_probs, *log_probs, ("actor.update", "begin"), ("actor.update", "end")]
    assert own == [("reward", "begin"), ("reward", "end")]

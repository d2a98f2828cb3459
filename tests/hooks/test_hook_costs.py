"""What hooks on a training step cost, in calls of functions, which a busy machine has no more of than an idle one.

Where a step waits for its host, what hooks run is the step's time, and our own bookkeeping does not see it: it counts
spans. Not counted are torch's comparisons of DTensorSpecs: a dictionary asks for one wherever hashes collide, and these
come from addresses, so processes differ by up to four for each span of these 17 modules.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from sharded_runs import TRAIN, train
from test_summary_screen import screen

from rltrace.analysis import summarize
from rltrace.cli.tables import figures

pytestmark = pytest.mark.run

COUNT = """
import json, sys
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _dtensor_spec

COMPARISONS = {
    function.__code__
    for kind in (_dtensor_spec.DTensorSpec, DeviceMesh)
    for name, function in vars(kind).items()
    if name in ("__eq__", "_check_equals")
}

def calls_of(function):
    calls = 0
    def count(frame, event, _arg):
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code not in COMPARISONS
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls

def train(kind):
    torch.manual_seed(0)
    model = Model()
    model.layers = torch.nn.ModuleList(Layer() for _ in range(16))
    model = sharded(model, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(10).reshape(2, 5)
    def step():
        model(tokens).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    step()
    step()
    recorded = min(calls_of(step) for _ in range(3))  # a cache of torch's may fill in one of them
    rltrace.pause()
    paused = min(calls_of(step) for _ in range(3))
    rltrace.resume()
    return json.dumps({"recorded": recorded, "paused": paused})

"""
RECORDED_STEPS = 5
SOURCE = TRAIN.replace("def work(", f"{COUNT}\ndef work(")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Of a step on one of two ranks, above those of a step without hooks, for each span of it."""
    folders = [tmp_path_factory.mktemp(name) for name in ("hooked", "bare")]
    hooked = train(folders[0], "fsdp2", ranks=2, source=SOURCE)
    bare = train(folders[1], "fsdp2", ranks=2, source=SOURCE, RLTRACE_DISABLE="fsdp2,torch_optim")
    without = json.loads(bare.out)  # of what other hooks call in the same state
    spans = sum(span.name != "training" for span in hooked.spans()) / RECORDED_STEPS / 2
    return {kind: (count - without[kind]) / spans for kind, count in json.loads(hooked.out).items()}


def test_calls_of_a_span(calls: dict[str, float]) -> None:
    """A span is two dozen calls with all that its hooks find out."""
    assert 8 < calls["recorded"] < 24


def test_calls_of_a_paused_hook(calls: dict[str, float]) -> None:
    """A paused hook is a few calls; those of other hooks, paused too, are not among them."""
    assert 0 < calls["paused"] < 6


def test_timed_hooks(tmp_path: Path) -> None:
    """How long each hook holds its program up is said where that is asked for."""
    run = train(tmp_path, "fsdp2", ranks=2, RLTRACE_TIME_HOOKS="1")
    hooks = {hook.target.rpartition(":")[2]: hook for hook in summarize(run.recording).hooks if hook.fired}
    for target in ("foreach_all_gather", "foreach_reduce", "FSDPState.init", "FSDPState._pre_backward"):
        assert hooks[target].seconds is not None and hooks[target].seconds / hooks[target].fired > 1e-6
    spans = sum(span.seconds for span in run.spans("fsdp.all_gather"))
    assert hooks["foreach_all_gather"].seconds < spans, "what is around a call, and not the call itself"
    text = "\n".join(screen(run.recording, 140, whole=True))
    gather = hooks["foreach_all_gather"]
    each = figures.short(gather.seconds / gather.fired)
    assert re.search(r"hook +fired +seconds +each", text)
    assert re.search(rf"foreach_all_gather +{gather.fired} +{figures.seconds(gather.seconds)} +{each}\b", text), text


def test_untimed_hooks(tmp_path: Path) -> None:
    """Nobody times hooks unasked."""
    run = train(tmp_path, "fsdp2", ranks=1)
    assert {hook.seconds for hook in summarize(run.recording).hooks} == {None}

"""Whose allocations are, on the steps on which all are kept: of real models on two gloo ranks.

torch's text of an allocation is a stand-in, for only a GPU's allocator has one; addresses are the host's.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from allocator import TEXTS
from traced_runs import run_traced

from rltrace.hooks.hook import Hook
from rltrace.instrument.memory import allocation_owners as instrument
from rltrace.instrument.memory.allocation_owners import Having
from rltrace.instrument.torch.modules import Forwards
from rltrace.record.torch import allocations

pytestmark = pytest.mark.run

TRAIN = (
    TEXTS
    + """
    import gc, json, os, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _runtime_utils
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from torch.nn.modules import module as everywhere
    from torch.nn.parallel import DistributedDataParallel
    from rltrace.record import spans
    from rltrace.record.torch import allocations
    from rltrace.instrument.memory.allocation_owners import Allocations, name_hooks
    from rltrace.hooks.patching import PatchSet

    whole_gradients = []

    def watch(owner, name, where, told=lambda *args: None):
        original = getattr(owner, name)
        def call(*args, **kwargs):
            see(where)
            told(*args)
            return original(*args, **kwargs)
        setattr(owner, name, call)

    watch(_flat_param, "_alloc_storage", "gather")
    watch(_runtime_utils, "_get_reduce_scatter_tensors", "reduce", lambda _, grad: whole_gradients.append(at(grad)))
    watch(DistributedDataParallel, "_pre_forward", "buckets")

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
        def forward(self, x):
            return Observed.apply(self.linear(x))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
            self.head = torch.nn.Linear(8, 8)
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return Observed.apply(self.head(x))

    class Watched(torch.optim.AdamW):
        def _init_group(self, *args):
            see("optimizer")
            return super()._init_group(*args)

    def made(kind):
        if kind == "ddp":
            return DistributedDataParallel(Model())
        if kind == "plain":
            return Model()
        return FullyShardedDataParallel(
            Model(),
            auto_wrap_policy=ModuleWrapPolicy({Layer}),
            use_orig_params=kind == "fsdp1",
            device_id=torch.device("cpu"),
        )

    def at(tensor):
        return tensor.untyped_storage().data_ptr()

    def hooks_of(*models):
        of_all = len(everywhere._global_forward_hooks) + len(everywhere._global_forward_pre_hooks)
        own = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for model in models for m in model.modules())
        return of_all + own

    def train(kind):
        actor, ref = made(kind), made(kind)  # the ref could be trained, and is not: no optimizer holds it
        optimizer = Watched(actor.parameters(), lr=0.1)
        gc.freeze()  # as a program may, to spare the garbage collector what stays

        def step():
            said = {}
            seen.clear()
            with torch.no_grad():
                ref(torch.ones(4, 8))
            said["ref"] = dict(seen)
            seen.clear()
            loss = actor(torch.ones(4, 8)).sum()
            see("outside")
            loss.backward()
            see("outside")
            said["gradients"] = {at(p.grad) for p in actor.parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            see("outside")
            return said | {"actor": dict(seen), "hooks": hooks_of(actor, ref)}

        def owners(addresses, named):
            return sorted({str(named.get(address)) for address in addresses if address})

        silent = step()
        before = list(sets)
        keeping = allocations._Keeping(torch.cuda.memory, 0, {})
        named = allocations._named()
        states = [value for state in optimizer.state.values() for value in state.values()]
        by_address = {
            "actor": owners(map(at, actor.parameters()), named),
            "ref": owners(map(at, ref.parameters()), named),
            "states": owners(map(at, states), named),
        }
        whole_gradients.clear()
        allocations._keep(keeping)
        kept = step()
        in_it = {address: owner for naming in keeping.namings for address, owner in naming.owners.items()}
        by_address["gradients"] = owners(kept["gradients"], in_it)
        by_address["whole gradients"] = owners(whole_gradients, in_it)
        allocations._keep(None)
        sets.clear()
        after = step()
        steps = {"silent": silent, "kept": kept, "after": after}
        for one in steps.values():
            del one["gradients"]
        return {"steps": steps, "set before": before, "set after": list(sets), "by address": by_address}

    def undo(patches):
        model = Model()
        optimizer = Watched(model.parameters())  # by which the model is met
        hooks, left = hooks_of(model), patches.undo()
        allocations._keep(allocations._Keeping(torch.cuda.memory, 0, {}))
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        return {"left": left, "set": sets, "hooks": hooks_of(model) - hooks}

    def work(rank, folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        patches = PatchSet("allocations", spans.current(), Allocations.supports)
        name_hooks(patches)
        said = {}
        for kind in ("fsdp1", "fsdp1_flat", "ddp", "plain"):
            said[kind] = train(kind)
            sets.clear()
            gc.unfreeze()
            gc.collect()
        states = {hook.target: hook.state for hook in patches.hooks}
        said["hooks"] = {state: [t for t, s in states.items() if s == state] for state in set(states.values())}
        said["undone"] = undo(patches)
        if rank == 0:
            print(json.dumps(said), flush=True)
        dist.barrier()
        os._exit(0)  # threads of gloo's may outlive the process group, and abort the interpreter's end

    if __name__ == "__main__":
        torch.multiprocessing.start_processes(work, (os.getcwd(),), nprocs=2, start_method="fork")
"""
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 saw of each kind of model: a step before, one of which all is kept, and one behind."""
    run = run_traced(tmp_path_factory.mktemp("owners"), TRAIN, imported="torch")
    assert run.returncode == 0, run.err
    said: dict[str, Any] = json.loads(run.out.splitlines()[-1])
    return said


@pytest.fixture(params=["fsdp1", "fsdp1_flat", "ddp", "plain"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def texts(said: dict[str, Any], step: str, model: str) -> dict[str, set[str]]:
    """What allocations would have carried, by where they were made."""
    return {where: set(texts) for where, texts in said["steps"][step][model].items()}


OF_ACTOR = {
    "forward": {"actor.activations"},
    "backward": {"actor.activations"},
    "optimizer": {"actor.optimizer"},
    "outside": {""},
}
OF_REF = {"forward": {"actor.activations"}}
FLAT = {"gather": {"actor.params"}, "reduce": {"actor.grads"}}, {"gather": {"ref.params"}}
BUCKETS = {"buckets": {""}}
"""DDP makes them in front of a forward."""
EXPECTED = {
    "fsdp1": (OF_ACTOR | FLAT[0], OF_REF | FLAT[1]),
    "fsdp1_flat": (OF_ACTOR | FLAT[0], OF_REF | FLAT[1]),
    "ddp": (OF_ACTOR | BUCKETS, OF_REF | BUCKETS),
    "plain": (OF_ACTOR, {"forward": {""}}),  # a model that nobody shards, wraps or trains is nobody's
}


def test_owners_are_set_at_the_allocation(kind: str, told: dict[str, Any]) -> None:
    """The owner is set where its bytes are allocated."""
    of_actor, of_ref = EXPECTED[kind]
    assert texts(told[kind], "kept", "actor") == of_actor
    assert texts(told[kind], "kept", "ref") == of_ref


def test_other_steps_have_no_hooks(kind: str, told: dict[str, Any]) -> None:
    """Outside of the chosen step no owner is set, and modules have no hook."""
    said = told[kind]
    assert said["set before"] == said["set after"] == []
    for step in ("silent", "after"):
        for model, expected in zip(("actor", "ref"), EXPECTED[kind], strict=True):
            assert texts(said, step, model) == {where: {""} for where in expected}
    hooks = {step: said["steps"][step]["hooks"] for step in ("silent", "kept", "after")}
    assert hooks["silent"] == hooks["after"] < hooks["kept"]


def test_older_blocks_have_owners_by_address(kind: str, told: dict[str, Any]) -> None:
    """What was allocated before the step has its owner by its address."""
    found = told[kind]["by address"]
    assert found["actor"] == ["actor.params"]
    assert found["ref"] == (["None"] if kind == "plain" else ["ref.params"])
    assert found["states"] == ["actor.optimizer"]


def test_gradients_have_owners_once_computed(kind: str, told: dict[str, Any]) -> None:
    """Gradients have their owner as soon as they are computed.

    Of FSDP1 also those of whole parameters, which are gone when backward is over.
    """
    found = told[kind]["by address"]
    assert found["gradients"] == ["actor.grads"]
    assert found["whole gradients"] == (["actor.grads"] if kind.startswith("fsdp1") else [])


def test_hooks_are_taken_back(told: dict[str, Any]) -> None:
    """Each hook is in place, and sets no owner any more when it is taken back."""
    ours = {"rltrace_reference.actor", "rltrace_reference.weight_sync", "rltrace_reference.host_staging"}
    ours |= {"rltrace_reference.cuda_ipc"}  # of the reference run, which this program does not import
    waiting = {target.partition(":")[0] for target in told["hooks"].pop("waiting")}
    assert waiting == ours
    assert list(told["hooks"]) == ["installed"]
    assert told["undone"] == {"left": [], "set": [], "hooks": 0}


def test_modules_of_parameters() -> None:
    """The modules of parameters are those that hold them, and no others."""
    inner, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(torch.nn.Sequential(inner), torch.nn.ReLU())
    is_meant = Having(list(inner.parameters()))
    assert [is_meant(module) for module in (inner, outer[0], outer, outer[1], other)] == [True] * 3 + [False] * 2


def test_backward_without_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a backward nobody looks for owners unless a history is kept."""
    asked: list[None] = []
    monkeypatch.setattr(instrument, "owners", lambda: asked.append(None) or {})
    instrument.end_backward([], None, None)
    assert asked == []
    monkeypatch.setattr(allocations, "_keeping", allocations._Keeping(None, 0, {}))
    instrument.end_backward([], None, None)
    assert asked == [None]


def test_hooks_are_on_all_modules_or_none() -> None:
    """If one module refuses the hooks, no module has them."""
    first, frozen = torch.nn.Linear(2, 2), object()
    forwards = Forwards(Hook("allocations", "torch:nothing"), lambda *_: None)
    with pytest.raises(AttributeError):
        forwards.attach([first, frozen], str)
    assert not first._forward_hooks and not first._forward_pre_hooks

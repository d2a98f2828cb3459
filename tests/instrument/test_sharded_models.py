"""Whose the bytes of real models are: sharded by FSDP1 or FSDP2, wrapped by DDP, or plain; here in host memory."""

from __future__ import annotations

import functools
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
from warm_python import run_source

from rltrace.instrument.memory.sharded_models import (
    Fsdp2Params,
    Models,
    Params,
    PlainParams,
    Roles,
    by_place,
    plain_params,
)
from rltrace.instrument.memory.work import Work

SIZE_BYTES = 3 * 64 * 64 * 4
"""Of a model: three linear layers."""

PROGRAM = """
    import gc, json, os, sys, traceback
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from rltrace.instrument.memory import allocation_owners
    from rltrace.instrument.memory.allocation_owners import params_owner
    from rltrace.instrument.memory.cuda_ledger import CudaLedger
    from rltrace.instrument.memory.cuda_memory import name_hooks
    from rltrace.instrument.torch.fsdp2 import groups_of
    from rltrace.instrument.memory.sharded_models import Fsdp2Params
    from rltrace.instrument.memory.turns import Turns
    from rltrace.instrument.memory.work import WORK
    from rltrace.hooks.patching import PatchSet

    class Rows:
        def hook(self, *args): return self
        def fired(self): rows["fired"] = rows.get("fired", 0) + 1

    rows = {}
    ledger = CudaLedger(lambda: None)
    patches = PatchSet("test", Rows())
    name_hooks(patches, ledger, Turns(ledger, WORK))
    broadcast, seen = dist._broadcast_coalesced, []

    def watched(*args):
        seen.append([frame.name for frame in traceback.extract_stack()])
        return broadcast(*args)

    dist._broadcast_coalesced = watched
    others = PatchSet("others", Rows())
    allocation_owners.name_hooks(others)  # which meets the same models
    (models,) = ledger.tensors.values()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))

    def model():
        made = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
        if sys.argv[1] == "fsdp1":
            return FullyShardedDataParallel(made, device_id=torch.device("cpu"))
        if sys.argv[1] == "ddp":
            return DistributedDataParallel(made)
        if sys.argv[1] == "plain":
            return made
        for layer in made:
            fully_shard(layer, mesh=mesh)
        return fully_shard(made, mesh=mesh)

    said = []
    def say(name):
        said.append([name, {owner: size for owner, size in models().items() if size}])

    def owners_of(made):
        return [params_owner(Fsdp2Params(group)) for layer in made for group in groups_of(layer._get_fsdp_state())]

    actor = model()
    say("built")
    if sys.argv[1] == "fsdp2":  # FSDP1 gives what has shapes only its memory at once
        with torch.device("meta"):
            shapes = model()
        say("beside one that has shapes only")
        del shapes
        gc.collect()
    optimizer = torch.optim.AdamW(actor.parameters())
    ref = model()  # could be trained, and is not: no optimizer holds it
    say("beside the ref")
    owners = {"actor": owners_of(actor), "ref": owners_of(ref)} if sys.argv[1] == "fsdp2" else {}
    actor(torch.ones(2, 64)).sum().backward()
    say("gradients")
    optimizer.step()
    optimizer.zero_grad()
    say("stepped")
    ref(torch.ones(2, 64))
    del ref
    gc.collect()
    say("without the ref")
    before = WORK.begin("critic")
    critic = model()
    critic_optimizer = torch.optim.AdamW(critic.parameters())
    WORK.end(before)
    say("beside a critic")
    critic(torch.ones(2, 64)).sum().backward()
    if sys.argv[1] == "fsdp2":
        owners["critic"] = owners_of(critic)
    say("a critic's gradients")
    critic_optimizer.step()
    critic_optimizer.zero_grad()
    say("a critic that has stepped")
    del critic, critic_optimizer
    gc.collect()
    say("without the critic")
    asked = []
    torch.Tensor.is_pinned = lambda tensor: asked.append(tensor) or True  # without CUDA nothing is
    say("where it was")
    rows["asked"] = len(asked)
    actor._apply(torch.clone)
    say("moved to pinned memory")
    del asked[:]
    say("there still")
    rows["asked"] += len(asked)
    dist.all_reduce(torch.ones(1))
    if sys.argv[1] == "ddp":  # and FSDP1, where rank 0 has the weights, which it does for GPUs alone
        assert seen and all("collective" in frames for frames in seen), "our wrapper is around it"
    print(json.dumps([said, owners, rows["fired"], rows["asked"], [*others.undo(), *patches.undo()]]), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo's may outlive the process group, and abort the interpreter's end
"""


Moments = dict[str, dict[str, int]]


@functools.cache
def told_by(kind: str) -> tuple[Moments, dict[str, list[str]]]:
    """The rows at each moment of the program, and whose a single allocation for a model's parameters would be."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_source("torch", PROGRAM, Path(folder), kind)
    assert done.returncode == 0, done.stderr
    moments, owners, fired, asked, left = json.loads(done.stdout.splitlines()[-1])
    assert fired > 0
    assert asked == 0, "the driver is asked about what has moved alone"
    assert left == []
    return dict(moments), owners


def said_by(kind: str) -> Moments:
    return told_by(kind)[0]


@pytest.fixture(params=["fsdp2", "fsdp1", "ddp"])
def said(request: pytest.FixtureRequest) -> Moments:
    return said_by(request.param)


def test_trainable_model_is_the_actors(
    said: Moments,
) -> None:
    """A model that can be trained is the actor's, until an optimizer holds another one."""
    assert said["built"] == {"actor.params_host_bytes": SIZE_BYTES}
    assert said["beside the ref"] == {"actor.params_host_bytes": SIZE_BYTES, "ref.params_host_bytes": SIZE_BYTES}


def test_allocations_follow_their_parameters() -> None:
    """An allocation has the owner of its parameters.

    The ref could be trained, so nothing but the optimizer tells it from the actor.
    """
    owners = {"actor": ["actor.params"] * 3, "ref": ["ref.params"] * 3, "critic": ["critic.params"] * 3}
    assert told_by("fsdp2")[1] == owners


def test_meta_model_holds_nothing() -> None:
    """A model that has only shapes holds nothing."""
    said = said_by("fsdp2")
    assert said["beside one that has shapes only"] == said["built"]


def test_gradients_and_states_come_and_go(said: Moments) -> None:
    """Gradients and optimizer states are counted as they come and go."""
    both = said["beside the ref"]
    gathered_bytes = said["gradients"]["actor.params_host_bytes"] - SIZE_BYTES
    assert gathered_bytes >= 0  # what is gathered for the backward may stay until the next forward
    assert said["gradients"]["actor.grads_host_bytes"] == SIZE_BYTES
    assert said["stepped"]["actor.optimizer_host_bytes"] == pytest.approx(2 * SIZE_BYTES, abs=100)
    assert set(said["stepped"]) == {*both, "actor.optimizer_host_bytes"}


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "ddp", "plain"])
def test_critics_model(kind: str) -> None:
    """A model that is made while the critic acts is the critic's, with all that belongs to it."""
    said = said_by(kind)
    of_actor = {owner: size for owner, size in said["without the ref"].items() if owner.startswith("actor.")}
    made, trained, stepped = (
        {owner: size for owner, size in said[moment].items() if not owner.startswith("ref.")}
        for moment in ("beside a critic", "a critic's gradients", "a critic that has stepped")
    )
    assert made == of_actor | {"critic.params_host_bytes": SIZE_BYTES}
    gathered_bytes = trained["critic.params_host_bytes"] - SIZE_BYTES
    assert gathered_bytes >= 0
    assert trained == of_actor | {
        "critic.params_host_bytes": SIZE_BYTES + gathered_bytes,
        "critic.grads_host_bytes": SIZE_BYTES,
    }
    assert stepped.keys() == made.keys() | {"critic.optimizer_host_bytes"}
    assert stepped["critic.optimizer_host_bytes"] == pytest.approx(2 * SIZE_BYTES, abs=100)


def test_moves_to_pinned_memory_are_seen(said: Moments) -> None:
    """What moves to pinned memory is pinned, though it has as many bytes as before.

    As FSDP2 moves its shards at the first forward of a model that was materialized on the host.
    """
    assert not any(owner.endswith("_pinned_bytes") for owner in said["where it was"])
    moved = said["moved to pinned memory"]
    assert moved["actor.params_pinned_bytes"] == moved["actor.params_host_bytes"] >= SIZE_BYTES
    assert "actor.optimizer_pinned_bytes" not in moved, "which has not moved"
    assert said["there still"] == moved


def test_pinned_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several storages those are pinned that say so, and views count once."""
    pageable, pinned = torch.zeros(5), torch.zeros(7)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == pinned.data_ptr())
    tensors = [pageable, pinned, pinned[:2], torch.empty(0), torch.empty(9, device="meta")]
    assert by_place("ref.params", tensors) == {
        "ref.params_bytes": 0,
        "ref.params_host_bytes": 48,
        "ref.params_pinned_bytes": 28,
    }


def test_optimizers_tensors_are_the_actors() -> None:
    """What an optimizer holds is the actor's, though nobody shards or wraps it."""
    said = said_by("plain")
    assert said["built"] == {}, "nobody has said that it is a model"
    assert said["beside the ref"] == {"actor.params_host_bytes": SIZE_BYTES}, "the ref is not met"
    assert said["gradients"] == {"actor.params_host_bytes": SIZE_BYTES, "actor.grads_host_bytes": SIZE_BYTES}
    assert said["stepped"]["actor.optimizer_host_bytes"] == pytest.approx(2 * SIZE_BYTES, abs=100)
    assert "actor.grads_host_bytes" not in said["stepped"]


def test_frozen_parameters_in_ddp() -> None:
    """Frozen parameters of what DDP wraps are the model's."""
    base, adapter = torch.nn.Linear(8, 8, bias=False).requires_grad_(False), torch.nn.Linear(8, 2, bias=False)
    model = torch.nn.Sequential(base, adapter)
    optimizer = torch.optim.SGD(adapter.parameters())
    (wrapped,) = plain_params([], [(model, list(model.parameters())), (optimizer, list(adapter.parameters()))])
    assert [len(parameter) for parameter in wrapped.held()] == [8, 2], "each once"
    assert wrapped.trained() == list(model.parameters())
    roles = Roles(Work())
    roles.meet_optimizer(optimizer)
    assert roles.subject_of(wrapped) == "actor"


def test_what_fsdp_has_is_not_plain_too() -> None:
    known = Known()
    optimizer = torch.optim.SGD([known.parameter])
    assert list(plain_params([known], [(optimizer, [known.parameter])])) == []


def test_optimizer_is_given_more_later() -> None:
    """What an optimizer is given later is found too."""
    models, first, later = Models(Roles(Work())), torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 4, bias=False)
    optimizer = torch.optim.SGD(first.parameters())
    models.roles.meet_optimizer(optimizer)
    assert models()["actor.params_host_bytes"] == 4 * 64
    optimizer.add_param_group({"params": list(later.parameters())})
    assert models()["actor.params_host_bytes"] == 4 * (64 + 32)
    first.weight.data = torch.empty(0)
    assert models()["actor.params_host_bytes"] == 4 * 32


def test_plain_parameters_that_move() -> None:
    """Plain parameters are counted anew when they move, or have other gradients."""
    model = torch.nn.Linear(4, 4)
    (params,) = plain_params([], [(model, list(model.parameters()))])
    marks = [params.mark()]
    model(torch.ones(1, 4)).sum().backward()
    marks.append(params.mark())
    model.half()
    marks.append(params.mark())
    assert len(set(marks)) == 3
    assert params.mark() == marks[-1]


@pytest.mark.parametrize(("learns", "asked"), [(True, 12), (False, 4)])
def test_few_stand_for_what_nobody_trains(learns: bool, asked: int) -> None:
    """Of a model that learns each parameter is asked that has gradients; of another one, the ends of each kind.

    So a ref that is moved to another place is seen there, and so is an adapter's gradient.
    """
    frozen = [torch.nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(10)]
    adapters = [torch.nn.Linear(8, 2, bias=False) for _ in range(10)]
    model = torch.nn.Sequential(*frozen, *adapters)
    (params,) = plain_params([], [(model, list(model.parameters()))])
    assert isinstance(params, PlainParams)
    params.say_learns(learns)
    assert len(params._asked) == asked
    marks = [params.mark()]
    model.double()
    marks.append(params.mark())
    adapters[0].weight.grad = torch.zeros_like(adapters[0].weight)
    marks.append(params.mark())
    assert len(set(marks)) == 3


def test_sparse_tensors_are_left_out() -> None:
    """Sparse tensors have no storage, and are left out."""
    models = Models(Roles(Work()))
    embedding, linear = torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.Sequential(embedding, linear)
    (params,) = plain_params([], [(model, list(model.parameters()))])
    model(torch.tensor([1, 2])).sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
    assert [grad is linear.weight.grad for grad in params.grads()] == [True]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    assert [state["momentum_buffer"].is_sparse for state in optimizer.state.values()] == [True, False]
    models.roles.meet_optimizer(optimizer)
    assert models()["actor.optimizer_host_bytes"] == 4 * 16


def test_a_model_that_is_gone_holds_nothing() -> None:
    """Of FSDP2: an FSDP1 module stays, in FSDP1's own cycles."""
    assert "ref.params_host_bytes" not in said_by("fsdp2")["without the ref"]


def test_critics_optimizer() -> None:
    """The critic's optimizer says nothing about the models of others.

    verl makes its critic before its actor: until the actor has an optimizer too, that would make it the ref.
    """
    work, params, of_critic = Work(), Known(), Known()
    roles = Roles(work)
    before = work.begin("critic")
    optimizer = torch.optim.SGD([of_critic.parameter])
    roles.meet_optimizer(optimizer)
    roles.name(of_critic, work.subject)
    work.end(before)
    assert (roles.subject_of(of_critic), roles.subject_of(params)) == ("critic", "actor")
    params.parameter.requires_grad_(False)
    assert roles.subject_of(params) == "ref"
    params.parameter.requires_grad_(True)
    work.begin("actor")
    of_actor, actors = Known(), torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    roles.meet_optimizer(actors)
    work.end(before)
    assert roles.subject_of(of_actor) == "ref", "as soon as there is an actor's, which does not hold it"
    assert (roles.states_owner(optimizer), work.owner_of("activations")) == (
        "critic.optimizer",
        "actor.activations",
    )


class Known(Params):
    """One parameter, whatever shards it."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(1))

    def holder(self) -> object:
        return self

    def trained(self) -> list[object]:
        return [self.parameter]


def test_models_follow_their_optimizers() -> None:
    """A model's owner follows the optimizers as they are made; a model that was trained stays the actor's."""
    roles, params, other = Roles(Work()), Known(), Known()
    first = torch.optim.SGD([other.parameter])
    roles.meet_optimizer(first)
    assert (roles.subject_of(params), roles.subject_of(other)) == ("ref", "actor")
    second = torch.optim.SGD([params.parameter])
    roles.meet_optimizer(second)
    assert roles.subject_of(params) == "actor"
    del second
    gc.collect()
    roles.meet_optimizer(torch.optim.SGD([other.parameter]))
    assert roles.optimizers() != [] and roles.subject_of(params) == "actor"


def test_emptied_shards_hold_nothing() -> None:
    """Shards whose storages a program empties hold nothing until it fills them again."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Linear(64, 64, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        models = Models(Roles(Work()))
        models.meet_state(_get_module_fsdp_state(model))
        models.roles.meet_optimizer(torch.optim.SGD(model.parameters()))
        storage = model.weight.to_local().untyped_storage()
        said = []
        for size_bytes in (4 * 64 * 64, 0, 4 * 64 * 64):
            storage.resize_(size_bytes)
            said.append(models().get("actor.params_host_bytes", 0))
        assert said == [4 * 64 * 64, 0, 4 * 64 * 64]
    finally:
        torch.distributed.destroy_process_group()


def test_few_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between passes the first and the last of layers that are alike stand for all; a look at all corrects them."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
        models = Models(Roles(Work()))
        for layer in layers:
            models.meet_state(_get_module_fsdp_state(fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))))
        optimizer = torch.optim.AdamW(layers.parameters())
        models.roles.meet_optimizer(optimizer)
        marked: list[Params] = []
        mark = Fsdp2Params.mark
        monkeypatch.setattr(Fsdp2Params, "mark", lambda params: (marked.append(params), mark(params))[1])

        def said(look: Callable[[], dict[str, int]]) -> tuple[dict[str, int], int]:
            marked.clear()
            rows = look()
            return {owner: size for owner, size in rows.items() if size}, len(marked)

        few = []
        for _ in range(2):
            for turn in (lambda: layers(torch.ones(1, 64)).sum().backward(), optimizer.step, optimizer.zero_grad):
                turn()
                few.append(said(models.between_passes))
                assert few[-1][0] == said(models)[0]
        assert [count for _, count in few[3:]] == [2] * 3
        layers[3].weight.grad = layers[3].weight.detach().clone()
        assert "actor.grads_host_bytes" not in said(models.between_passes)[0]
        assert said(models)[0]["actor.grads_host_bytes"] == 4 * 64 * 64
        assert said(models.between_passes)[0]["actor.grads_host_bytes"] == 4 * 64 * 64
    finally:
        torch.distributed.destroy_process_group()

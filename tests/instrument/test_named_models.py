"""A model that a framework has a name for is somebody's, though nothing wraps, shards or trains it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cuda_ledger import MIB, Register, Simulated
from warm_python import run_source

import rltrace
from rltrace.analysis import summarize
from rltrace.hooks.boundaries import Boundary
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.memory import cuda_memory, named_models, sharded_models, turn_hooks
from rltrace.instrument.memory.cuda_ledger import CudaLedger
from rltrace.instrument.memory.named_models import name_models
from rltrace.instrument.memory.sharded_models import Models, Roles
from rltrace.instrument.memory.turns import Turns
from rltrace.instrument.memory.work import Work
from rltrace.read.recording import Recording

WIDTH = 64
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Models:
    """The models of a process that has none yet."""
    made = Models(Roles(Work()))
    for module in (sharded_models, named_models, cuda_memory):
        monkeypatch.setattr(module, "MODELS", made)
    return made


def model(layers: int) -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def trainer_of(**attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**attributes)


def held(models: Models) -> dict[str, int]:
    return {row.removesuffix("_host_bytes"): size for row, size in models().items() if row.endswith("_host_bytes")}


def test_every_model_of_a_trainer_has_its_owner(models: Models) -> None:
    """Before there is an optimizer, and beside one that holds a part of the policy, as of adapters."""
    trainer = trainer_of(
        model=model(2), ref_model=model(3), value_model=model(4), reward_funcs=[len, model(5), model(6)], args=None
    )
    assert not models.met
    name_models(trainer)
    assert models.met
    named = {"actor.params": 2, "ref.params": 3, "critic.params": 4, "reward.params": 11}
    expected = {owner: layers * LAYER_BYTES for owner, layers in named.items()}
    assert {owner: size for owner, size in held(models).items() if size} == expected
    frozen, adapter = trainer.model
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(adapter.parameters())
    models.roles.meet_optimizer(optimizer)
    trainer.model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    expected |= {"actor.grads": LAYER_BYTES}
    rows = held(models)
    assert rows.pop("actor.optimizer") == pytest.approx(2 * LAYER_BYTES, abs=100)
    assert {owner: size for owner, size in rows.items() if size} == expected


def test_model_that_is_named_twice(models: Models) -> None:
    """A model that is named twice, or wrapped, counts once.

    The first name is right: a trainer that scores with its ref has one model.
    """
    one = model(2)
    trainer = trainer_of(model=None, ref_model=one, reward_funcs=[one])
    for _ in range(2):
        name_models(trainer)
    wrapper = torch.nn.Module()
    wrapper.module = one
    models.meet_ddp(wrapper)
    assert {owner: size for owner, size in held(models).items() if size} == {"ref.params": 2 * LAYER_BYTES}


def test_a_model_goes_with_its_trainer(models: Models) -> None:
    trainer = trainer_of(model=model(2), ref_model=model(3))
    name_models(trainer)
    del trainer.ref_model
    gc.collect()
    assert {owner: size for owner, size in held(models).items() if size} == {"actor.params": 2 * LAYER_BYTES}


class Model(torch.nn.Module):
    """Its forward leaves 90 MiB of a simulated GPU for its backward."""

    def __init__(self, gpu: Simulated) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self._gpu = gpu

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._gpu.allocate(90 * MIB)
        return self.layer(inputs)


@pytest.fixture
def gpu() -> Simulated:
    return Simulated()


@pytest.fixture
def ledger(gpu: Simulated, models: Models) -> Iterator[CudaLedger]:
    """A ledger whose hooks are on real torch."""
    made = CudaLedger(lambda: gpu)
    patches = PatchSet("test", Register())
    cuda_memory.name_hooks(patches, made, Turns(made, Work()))
    yield made
    assert patches.undo() == []


def test_plain_model_leaves_activations(folder: Path, gpu: Simulated, ledger: CudaLedger) -> None:
    """What a forward of a plain model leaves is seen inside of the update.

    Nobody wraps the policy; forwards without gradients leave nothing.
    """
    trainer = trainer_of(model=Model(gpu), ref_model=Model(gpu))
    name_models(trainer)
    rltrace.start(folder, role="worker", rank=0)
    ledger.sample()
    ledger.reached(Boundary(("actor.update",), is_end=False))
    with rltrace.phase("actor.update"):
        with torch.no_grad():
            trainer.ref_model(torch.ones(1, WIDTH))
        time.sleep(0.002)
        trainer.model(torch.ones(1, WIDTH)).sum().backward()
        gpu.allocate(-90 * MIB)
        ledger.sample()
    ledger.reached(Boundary(("actor.update",)))
    rltrace.stop()
    (device,) = summarize(Recording.open(folder)).memory
    peak = device.owner_peaks["actor.activations"]
    assert (peak.bytes, peak.phase) == (90 * MIB, "actor.update")
    assert device.boundaries[-1].bytes.get("actor.activations", 0) == 0


SHARDED = """
    import torch
    from torch.distributed.fsdp import fully_shard
    from types import SimpleNamespace
    from rltrace.hooks.patching import PatchSet
    from rltrace.instrument.memory import sharded_models
    from rltrace.instrument.memory.named_models import name_models

    class Register:
        def hook(self, *_):
            return self
        def fired(self):
            pass

    roots = []
    sharded_models.watch_models(PatchSet("test", Register()), lambda root, hook: roots.append(root))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    trainer = SimpleNamespace(model=torch.nn.Linear(8, 8), ref_model=torch.nn.Linear(16, 16))
    name_models(trainer)
    named = [root for root in roots if isinstance(root, sharded_models.NamedRoot)]
    assert [root._is_root for root in named] == [True, True]
    for model in (trainer.model, trainer.ref_model):
        fully_shard(model, mesh=mesh)
    assert [root._is_root for root in named] == [False, False], "FSDP's own states are looked at instead"
    rows = {row: size for row, size in sharded_models.MODELS().items() if size}
    assert rows == {"actor.params_host_bytes": 4 * 8 * 9, "ref.params_host_bytes": 4 * 16 * 17}, rows
    torch.distributed.destroy_process_group()
"""


def test_a_model_that_fsdp_shards_keeps_its_name(tmp_path: Path) -> None:
    """Both could be trained and nothing is, so that nothing but the name tells them apart."""
    done = run_source("torch", SHARDED, tmp_path)
    assert done.returncode == 0, done.stderr


# ---- models of a loop that no hook knows ------------------------------------------------------------------------


def test_models_of_a_plain_loop(models: Models) -> None:
    """What an optimizer holds is the actor's, what none holds the ref's, and a model that scores has rewards."""

    class RewardModel(torch.nn.Linear):
        """Scores."""

    actor, ref, scoring = model(2), model(3), RewardModel(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(actor.parameters())
    models.roles.meet_optimizer(optimizer)
    for used in (actor, ref, scoring, ref):
        models.meet_used(used, has_gradients=False)
    named = {"actor.params": 2, "ref.params": 3, "reward.params": 1}
    expected = {owner: layers * LAYER_BYTES for owner, layers in named.items()}
    assert {owner: size for owner, size in held(models).items() if size} == expected
    assert set(map(id, models.unwrapped())) == set(map(id, actor.parameters())), "where gradients come"
    assert models.modules() == [], "nobody watches the forwards of what nobody named"


def test_model_put_aside_is_met(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ref on a GPU has its owner from `eval` on; a part of the actor that is frozen stays the actor's."""
    monkeypatch.setattr(turn_hooks, "MODELS", models)
    monkeypatch.setattr(turn_hooks.boundaries, "are_told", lambda: False)
    actor, ref = model(2), model(3)
    optimizer = torch.optim.AdamW(actor[1].parameters())
    models.roles.meet_optimizer(optimizer)
    for put_aside in (actor[0].requires_grad_(False), ref.eval()):
        turn_hooks.meet_made(put_aside, None, None)
    assert not held(models).get("ref.params"), "they are in the host's memory"
    monkeypatch.setattr(turn_hooks, "is_on_gpu", lambda _module: True)
    for put_aside in (actor[0], ref):
        turn_hooks.meet_made(put_aside, None, None)
    models.meet_used(actor, has_gradients=True)
    assert held(models)["ref.params"] == 3 * LAYER_BYTES
    assert held(models)["actor.params"] == 2 * LAYER_BYTES


def test_eval_of_transformers_is_hooked(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of transformers, which has an `eval` of its own, is met there too."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    monkeypatch.setattr(turn_hooks, "MODELS", models)
    monkeypatch.setattr(turn_hooks.boundaries, "are_told", lambda: False)
    monkeypatch.setattr(turn_hooks, "is_on_gpu", lambda _module: True)
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    ref = Qwen2ForCausalLM(Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, **sizes))
    patches = PatchSet("test", Register())
    turn_hooks.name_turns(
        patches, Turns(CudaLedger(lambda: None), Work()), turn_hooks.loading(CudaLedger(lambda: None), Work())
    )
    try:
        assert not models.met
        ref.eval()
        assert models.met
    finally:
        patches.undo()


def test_what_learns_is_the_actors(models: Models) -> None:
    """A model that computes with gradients is the actor's, though its optimizer holds copies of its parameters."""
    actor, ref = model(2), model(3)
    copies = [torch.nn.Parameter(parameter.detach().double()) for parameter in actor.parameters()]
    optimizer = torch.optim.AdamW(copies)
    models.roles.meet_optimizer(optimizer)
    for used in (actor, ref):
        models.meet_used(used, has_gradients=False)
    assert held(models)["ref.params"] == 5 * LAYER_BYTES, "nobody can tell yet"
    models.meet_used(actor, has_gradients=True)
    assert held(models)["ref.params"] == 3 * LAYER_BYTES
    assert held(models)["actor.params"] == 2 * LAYER_BYTES + 2 * 2 * LAYER_BYTES


def test_wrapped_model_is_met_once(models: Models) -> None:
    """A wrapper's forward counts no parameter again; an engine's model is not met."""

    class Wrapper(torch.nn.Module):
        """As DDP."""

        def __init__(self) -> None:
            super().__init__()
            self.module = actor

    actor = model(2)
    engines = type("Engine", (torch.nn.Linear,), {"__module__": "vllm.model_executor.models.qwen3"})(WIDTH, WIDTH)
    for used in (actor, Wrapper(), engines):
        models.meet_used(used, has_gradients=False)
    assert {owner: size for owner, size in held(models).items() if size} == {"actor.params": 2 * LAYER_BYTES}

"""TRL's trainers: the phases of a step, with generation by transformers or by a colocated vLLM, and whose models are.

In: `GRPOTrainer`, its `VLLMGeneration`, and the Trainer of transformers below both. Out: the phases of a rank. Every
process is a rank: it generates, scores and learns, and there is no driver. `step.py` has what a step consists of,
`engine.py` how the engine in the trainer's process wakes up, gets weights and goes to sleep.

To add a part of a step, name its method in `step.py`.

Source read: TRL 1.16, transformers 5.24, peft 0.21.
"""

from __future__ import annotations

import functools
import importlib.util
import socket
import weakref
from typing import Any

from rltrace.events import STEP
from rltrace.hooks.arguments import attributes, keep_self
from rltrace.hooks.patching import PatchSet, nothing_after, nothing_before
from rltrace.instrument.memory.named_models import name_models
from rltrace.instrument.trl.engine import ColocatedEngine
from rltrace.instrument.trl.step import StepPhases
from rltrace.record import lifecycle

__all__ = ["ColocatedEngine", "StepPhases", "Trl"]

TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
GENERATION = "trl.generation.vllm_generation"
VLLM = f"{GENERATION}:VLLMGeneration"
LLM = "vllm.entrypoints.llm:LLM"
PROFILED = "trl.extras.profiling:ProfilingContext"
USE_ADAPTER = "trl.trainer.grpo_trainer:use_adapter"
CALLBACKS = "transformers.trainer_callback:CallbackHandler"
ANY_TRAINER = "transformers.trainer:Trainer"
ADAPTERS = "peft.tuners.tuners_utils:BaseTuner"


class Trl:
    """Records phases, from TRL's own profiling contexts where it has one."""

    name = "trl"
    supports = ("trl >= 1.11",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        name_models_hooks(patches)
        name_step_hooks(patches, StepPhases())
        name_engine_hooks(patches, ColocatedEngine())


def name_models_hooks(patches: PatchSet) -> None:
    """Name the hooks on what makes models and on what uses them first: engines are made in between."""
    models = TrainersModels()
    patches.around(f"{ANY_TRAINER}.__init__", keep_self, models.meet)
    patches.around(f"{VLLM}.__init__", models.look, nothing_after)
    patches.around(f"{ANY_TRAINER}._inner_training_loop", models.look, nothing_after)
    patches.around(f"{TRAINER}.__init__", keep_self, identify_rank)


def name_step_hooks(patches: PatchSet, step: StepPhases) -> None:
    """Name the hooks on the parts of a step."""
    around = functools.partial(patches.around, at_boundaries=False)  # most profiles and log-probs are no phase
    number = attributes("transformers.trainer_callback:TrainerState", "global_step")
    patches.around(f"{CALLBACKS}.on_step_begin", step.begin, nothing_after, (STEP,), reads=number)
    patches.around(f"{CALLBACKS}.on_step_end", nothing_before, step.end_update)
    patches.around(f"{CALLBACKS}.on_train_end", step.end_last, nothing_after)
    patches.around(f"{ANY_TRAINER}.train", nothing_before, step.end_training)
    name = attributes(PROFILED, "name")
    around(f"{PROFILED}.__enter__", step.begin_generate, nothing_after, ("rollout.generate",), reads=name)
    around(f"{PROFILED}.__exit__", step.end_generate, nothing_after, reads=name)
    metrics = attributes(TRAINER, "_metrics")
    patches.around(f"{TRAINER}._generate_and_score_completions", step.begin_batch, step.end_batch, reads=metrics)
    log_prob = ("actor.old_log_prob", "ref.log_prob")
    of_batch = f"{TRAINER}._get_per_token_logps_and_entropies"
    around(of_batch, step.begin_log_prob, step.end_log_prob, log_prob, reads=attributes(TRAINER, "ref_model"))
    patches.around(USE_ADAPTER, step.begin_adapter, step.end_adapter)
    around(f"{TRAINER}._calculate_rewards", step.begin_reward, step.end_reward, ("reward", "advantage"))
    around(f"{TRAINER}.compute_loss", step.begin_update, nothing_after, ("actor.update", "actor.micro_batch"))
    patches.around(f"{TRAINER}.training_step", nothing_before, step.end_micro_batch)


def name_engine_hooks(patches: PatchSet, engine: ColocatedEngine) -> None:
    """Name the hooks on an engine's wake-up, its weights and its sleep."""
    around = functools.partial(patches.around, at_boundaries=False)  # a sync is interrupted by a wake-up
    mode = attributes(VLLM, "mode")
    patches.around(f"{VLLM}._init_vllm", engine.meet, nothing_after, reads=mode)
    around(f"{VLLM}.sync_weights", engine.begin_sync, engine.end_sync, ("weight_sync",))
    stages = ("weight_sync.gather", "weight_sync.load", "weight_sync.send")
    patches.around_items(f"{VLLM}._iter_named_params", engine.begin_gather, engine.end_gather, stages, reads=mode)
    patches.when_imported(GENERATION, lambda _: name_optional_hooks(patches, engine))


def name_optional_hooks(patches: PatchSet, engine: ColocatedEngine) -> None:
    """Name the hooks on packages that TRL does without: those that are there once it is imported."""
    if importlib.util.find_spec("vllm") is not None:
        around = functools.partial(patches.around, at_boundaries=False)  # an engine that is not TRL's has no phases
        around(f"{LLM}.wake_up", engine.begin_wake, engine.end_wake, ("rollout.wake_weights", "rollout.wake_kv_cache"))
        around(f"{LLM}.reset_prefix_cache", engine.begin_reset, engine.end_reset, ("weight_sync.reset_cache",))
        around(f"{LLM}.sleep", engine.begin_sleep, engine.end_sleep, ("rollout.sleep",))
    if importlib.util.find_spec("peft") is not None:
        for method in ("merge_adapter", "unmerge_adapter"):
            patches.around(f"{ADAPTERS}.{method}", engine.begin_merge, engine.end_merge, ("weight_sync.merge",))


# ---- models -----------------------------------------------------------------------------------------------------


class TrainersModels:
    """The models of the trainer that was made last."""

    def __init__(self) -> None:
        self._trainer: Any = lambda: None

    def meet(self, trainer: Any, _result: Any, error: BaseException | None) -> None:
        """Name the models that a trainer has so far: the policy, and what rewards."""
        if error is None:
            self._trainer = weakref.ref(trainer)
            name_models(trainer)

    def look(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Name those that it has now: its ref comes before its engine."""
        name_models(self._trainer())


# ---- a rank -----------------------------------------------------------------------------------------------------


def identify_rank(trainer: Any, _result: Any, error: BaseException | None) -> None:
    """Say which rank this process is, and on which device."""
    if error is not None:
        return
    rank = trainer.accelerator.process_index
    device = {"host": socket.gethostname(), "uuid": device_uuid(trainer.accelerator.device, rank)}
    lifecycle.identify(role="worker", rank=rank, device=device)


def device_uuid(device: Any, rank: int) -> str:
    """Return the UUID of a rank's GPU as NVML writes it; on a laptop the rank has a CPU device of its own."""
    if device.type != "cuda":
        return f"cpu-{rank}"
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"

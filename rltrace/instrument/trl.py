"""TRL's GRPOTrainer: the phases of a step, with generation by transformers or by a colocated vLLM.

Source read: TRL 1.16. Every process is a rank: it generates, scores and learns, and there is no driver.
"""

from __future__ import annotations

import functools
import socket
from typing import Any

from rltrace.events import STEP
from rltrace.hooks import boundaries
from rltrace.hooks.arguments import argument, keep_self
from rltrace.hooks.patching import PatchSet, end_span, nothing_after, nothing_before
from rltrace.record import lifecycle, spans

TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
VLLM = "trl.generation.vllm_generation:VLLMGeneration"
PROFILED = "trl.extras.profiling:ProfilingContext"
USE_ADAPTER = "trl.trainer.grpo_trainer:use_adapter"
CALLBACKS = "transformers.trainer_callback:CallbackHandler"

GENERATIONS = ("transformers.generate", "transformers.generate_batch", "vLLM.generate")
"""What TRL's own profile calls the generation proper, without tokenizing and waking up around it."""


class Trl:
    """Records phases, from TRL's own profiling contexts where it has one."""

    name = "trl"
    supports = ("trl >= 1.16, < 1.17",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        step = StepPhases()
        around = functools.partial(patches.around, at_boundaries=False)  # most profiles and log-probs are no phase
        patches.around(f"{TRAINER}.__init__", keep_self, identify_rank)
        patches.around(f"{CALLBACKS}.on_step_begin", step.begin, nothing_after, (STEP,))
        patches.around(f"{CALLBACKS}.on_step_end", nothing_before, step.end)
        around(f"{PROFILED}.__enter__", step.begin_generate, nothing_after, ("rollout.generate",))
        around(f"{PROFILED}.__exit__", step.end_generate, nothing_after)
        patches.span(f"{VLLM}.sync_weights", "weight_sync")
        patches.span(f"{VLLM}._iter_named_params", "weight_sync.gather", late_args=tensor_args, each_item=True)
        patches.around(f"{TRAINER}._generate_and_score_completions", step.begin_batch, step.end_batch)
        around(
            f"{TRAINER}._get_per_token_logps_and_entropies",
            step.begin_log_prob,
            step.end_log_prob,
            ("actor.old_log_prob", "ref.log_prob"),
        )
        patches.around(USE_ADAPTER, step.begin_adapter, step.end_adapter)
        around(f"{TRAINER}._calculate_rewards", step.begin_reward, step.end_reward, ("reward", "advantage"))
        around(f"{TRAINER}.compute_loss", step.begin_update, nothing_after, ("actor.update", "actor.micro_batch"))
        patches.around(f"{TRAINER}.training_step", nothing_before, step.end_micro_batch)


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


def tensor_args(item: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the name and the bytes of the gathered parameter that comes out; the last `next` finds none."""
    if item is None:
        return {}
    name, tensor = item
    return {"tensor": name, "bytes": tensor.numel() * tensor.element_size()}


# ---- a step -----------------------------------------------------------------------------------------------------


class StepPhases:
    """What is open in the step of this process; a Trainer runs its steps in one thread.

    What TRL does in the middle of a function has no call of its own to wrap: the advantages are computed from the end
    of the rewards to the end of the batch, and the update goes from the first loss to the end of the step, so that the
    optimizer is in it.
    """

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}
        self._makes_batch = False
        """Whether a batch is being generated and scored."""
        self._is_ref = False
        """Whether the actor stands in for the ref: with adapters there is no other."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step, and close what an exception left open of the last one."""
        self._close("actor.micro_batch", "actor.update", "advantage", STEP)
        state = argument("state", 2, args, kwargs)
        self._begin(STEP, spans.automatic_span(STEP, step=state.global_step))

    def end(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """End the step: the optimizer has stepped."""
        self._close("actor.micro_batch", "actor.update", STEP)

    def begin_generate(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin a phase if what TRL begins to profile is a generation."""
        if args[0].name.partition(".")[2] in GENERATIONS:
            self._begin("rollout.generate", spans.phase("rollout.generate"))

    def end_generate(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """End the phase of a generation that TRL has profiled."""
        if args[0].name.partition(".")[2] in GENERATIONS:
            self._close("rollout.generate")

    def begin_batch(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Begin a batch, which is generated and scored; between two micro-batches this interrupts the update."""
        self._close("actor.update")
        self._makes_batch = True
        return args[0]

    def end_batch(self, trainer: Any, _result: Any, error: BaseException | None) -> None:
        """End a batch: its advantages are known."""
        self._close("advantage", error=error)
        self._makes_batch = False
        if error is None and trainer.model.training:
            spans.counter("reward_mean", trainer._metrics["train"]["reward"][-1])

    def begin_adapter(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Note that the actor stands in for the ref, without its adapter."""
        self._is_ref = True

    def end_adapter(self, _token: Any, _result: Any, _error: BaseException | None) -> None:
        """Note that it is the actor again."""
        self._is_ref = False

    def begin_log_prob(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the phase of a batch's log-probs, of the actor or of the ref; those of a loss belong to the update."""
        if self._makes_batch:
            trainer, model = args[0], argument("model", 1, args, kwargs)
            is_ref = self._is_ref or (trainer.ref_model is not None and model is trainer.ref_model)
            name = "ref.log_prob" if is_ref else "actor.old_log_prob"
            self._begin(name, spans.phase(name))

    def end_log_prob(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the phase of log-probs."""
        self._close("ref.log_prob", "actor.old_log_prob", error=error)

    def begin_reward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the phase in which the answers of a batch are scored."""
        inputs = argument("inputs", 1, args, kwargs)
        self._begin("reward", spans.phase("reward", sequences=len(inputs)))

    def end_reward(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the rewards; what follows until the end of the batch makes advantages of them."""
        self._close("reward", error=error)
        if error is None:
            self._begin("advantage", spans.phase("advantage"))

    def begin_update(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin a micro-batch with its loss; the first one of a step begins the update, and an evaluation has none."""
        if not args[0].model.training or STEP not in self._open:
            return
        if "actor.update" not in self._open:
            self._begin("actor.update", spans.phase("actor.update"))
        self._begin("actor.micro_batch", spans.automatic_span("actor.micro_batch"))

    def end_micro_batch(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End a micro-batch: its backward is over."""
        self._close("actor.micro_batch", error=error)

    def _begin(self, name: str, span: Any) -> None:
        if name in boundaries.NAMES:
            boundaries.reached(boundaries.Boundary((name,), is_end=False))
        self._open[name] = span.__enter__()

    def _close(self, *names: str, error: BaseException | None = None) -> None:
        for name in names:
            opened = self._open.pop(name, None)
            if opened is not None:
                end_span(opened, None, error)
                if name in boundaries.NAMES:
                    boundaries.reached(boundaries.Boundary((name,), is_end=True, error=error))

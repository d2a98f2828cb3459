"""AReaL: the phases of its steps, its weight sync bucket by bucket, and its rollout.

In: the trainer, whose `perf_tracer` names the parts of a step, the FSDP engine of each rank, and the workers of vLLM
that it starts. Out: the driver's step and what it asks for, the phases of a rank, and who is who. Below a launcher each
rank is a trainer too; with a controller, engines are in processes of their own.

AReaL's own tracer is asked for a scope whether it is on or not: the boundaries of its scopes are used, not its
readings. Megatron's and Archon's engines have classes of their own, which nothing here hooks.

Source read: AReaL 1.0.4.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

from rltrace.events import LOG_PROBS, LOSS, STEP
from rltrace.hooks.arguments import argument, keep_self
from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet, end_span, nothing_after, nothing_before
from rltrace.instrument.memory.work import ACTOR, CRITIC, REF, WORK, begin_startup
from rltrace.instrument.torch.devices import device_of
from rltrace.instrument.torch.tensor_sizes import announced_sizes, sizes_of, tensor_args
from rltrace.instrument.vllm import served
from rltrace.record import lifecycle, spans

TRAINER = "areal.trainer.rl_trainer:PPOTrainer"
SCOPE = "areal.utils.perf_tracer:trace_scope"
ACTOR_OF = "areal.trainer.ppo.actor:PPOActor"
CRITIC_OF = "areal.trainer.ppo.critic:PPOCritic"
ENGINE = "areal.engine.fsdp_engine:FSDPEngine"
REMOTE = "areal.infra.remote_inf_engine"
ENGINE_WORKER = "areal.engine.vllm_ext.vllm_worker_extension:VLLMWorkerExtension"

OF_STEP = "train."
"""How the scopes of a step begin."""
SCOPES = {
    "rollout": "trainer.generate",
    "compute_values": "trainer.values",
    "ref_logp": "trainer.ref_log_prob",
    "recompute_logp": "trainer.old_log_prob",
    "ppo_update": "trainer.update_actor",
    "critic_ppo_update": "trainer.update_critic",
    "checkpoint": "trainer.save_checkpoint",
    "eval": "trainer.validate",
}
"""What other trainers call it; any other scope of a step has AReaL's own name."""


class AReaL:
    """Records the driver, the FSDP engines, weight sync and rollout."""

    name = "areal"
    supports = ("areal >= 1.0",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        name_driver_hooks(patches, Steps())
        name_worker_hooks(patches, MicroBatches())
        name_sync_hooks(patches)
        name_rollout_hooks(patches)


def name_driver_hooks(patches: PatchSet, steps: Steps) -> None:
    """Name the hooks on the trainer."""
    patches.around(f"{TRAINER}.__init__", begin_trainer, nothing_after)
    patches.wrap(SCOPE, functools.partial(watch_scopes, steps), (STEP, *SCOPES.values()))
    patches.around(f"{TRAINER}._save_perf_tracer", nothing_before, steps.end)
    patches.around(f"{TRAINER}.train", nothing_before, steps.end)


def name_worker_hooks(patches: PatchSet, micro_batches: MicroBatches) -> None:
    """Name the hooks on the engines: who they are, their models, and the phases of a rank."""
    patches.around(f"{ENGINE}.create_process_group", keep_self, become_worker)
    patches.around(f"{ENGINE}.initialize", begin_build, end_work, ("actor.build", "ref.build", "critic.build"))
    shards = ("actor.shard", "ref.shard", "critic.shard")
    patches.around("areal.engine.fsdp_utils.parallel:parallelize_model", begin_shard, end_span, shards)
    log_probs = ("actor.old_log_prob", "ref.log_prob")
    patches.around(f"{ACTOR_OF}.compute_logp", begin_log_prob, end_work, log_probs)
    patches.span(f"{ACTOR_OF}.compute_advantages", "advantage", advantage_args)
    patches.around(f"{ACTOR_OF}.ppo_update", begin_actor_update, end_work, ("actor.update",))
    patches.around(f"{CRITIC_OF}.compute_values", begin_values, end_work, ("critic.values",))
    patches.around(f"{CRITIC_OF}.ppo_update", begin_critic_update, end_work, ("critic.update",))
    batches = ("actor.micro_batch", "critic.micro_batch")
    patches.around(f"{ENGINE}.forward_backward_batch", micro_batches.begin_all, micro_batches.end_all)
    patches.around(f"{ENGINE}._prepare_mb_inputs", micro_batches.begin, nothing_after, batches)
    for method in ("_compute_logprobs", "_compute_logprobs_entropy"):
        patches.span(f"{ENGINE}.{method}", LOG_PROBS)
    patches.span("areal.trainer.ppo.actor:grpo_loss_fn", LOSS)
    patches.span("areal.trainer.ppo.critic:ppo_loss_fn", LOSS)
    patches.span(f"{ENGINE}.offload", "offload.d2h")
    patches.span(f"{ENGINE}.onload", "offload.h2d")


def name_sync_hooks(patches: PatchSet) -> None:
    """Name the hooks on both ends of a sync: buckets are gathered and broadcast, and engines load them."""
    patches.span(f"{ENGINE}.update_weights", "weight_sync", sync_args)
    patches.span(f"{ENGINE}._get_full_tensor", "weight_sync.gather", gather_args)
    patches.span(f"{ENGINE}._update_bucket_weights_from_distributed_async", "weight_sync.send", bucket_args)
    patches.span(f"{ENGINE}._wait_pending_weight_update_bucket", "weight_sync.wait", pending_args)
    patches.span(f"{ENGINE_WORKER}.areal_update_weights", "weight_sync.load", from_disk_args)
    patches.span(f"{ENGINE_WORKER}.areal_update_weights_lora", "weight_sync.load", adapter_from_disk_args)
    patches.span(f"{ENGINE_WORKER}.areal_update_weight_xccl", "weight_sync.load", loaded_args)
    patches.span(f"{ENGINE_WORKER}.areal_update_weight_lora_xccl", "weight_sync.load", loaded_adapter_args)


def name_rollout_hooks(patches: PatchSet) -> None:
    """Name the hooks on trajectories, on their requests, on rewards, and on the engine behind a server."""
    patches.span("areal.workflow.rlvr:RLVRWorkflow.arun_episode", "agent_loop.trajectory")
    patches.span("areal.workflow.multi_turn:MultiTurnWorkflow.arun_episode", "agent_loop.trajectory")
    patches.span(f"{REMOTE}:RemoteInfEngine.agenerate", "agent_loop.request", request_args, answer_args)
    patches.span("areal.api.reward_api:AsyncRewardWrapper.__call__", "reward.score")
    patches.when_imported("areal", lambda _: served.name_hooks(patches))


# ---- driver -----------------------------------------------------------------------------------------------------


def begin_trainer(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Say that this process is the trainer's; below a launcher it becomes a rank."""
    lifecycle.identify(role="driver", name="trainer")


class Steps:
    """The step of a trainer: from the scope in which it waits for a batch until it has resumed the rollout."""

    def __init__(self) -> None:
        self._step = HeldSpan()

    def begin(self, number: int) -> None:
        """Begin a step, and with that end the last one."""
        self._step.close()
        self._step.open(STEP, step=number)

    def end(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End it, if it has not ended."""
        self._step.close(error)


def watch_scopes(steps: Steps, original: Function, hook: Hook) -> Function:
    """Wrap `trace_scope`: scopes of a step are spans of the trainer."""

    def begin(args: tuple[Any, ...], said: dict[str, Any]) -> Any:
        (part,) = args
        if part == "rollout":
            steps.begin(int(said["global_step"]))
        return spans.automatic_span(SCOPES.get(part, f"trainer.{part}")).__enter__()

    timed_begin, timed_end = hook.timed(begin), hook.timed(end_span)

    @contextlib.contextmanager
    def watched(scope: Any, part: str, said: dict[str, Any]) -> Iterator[Any]:
        token = hook.enter(timed_begin, (part,), said)
        try:
            with scope as entered:
                yield entered
        except BaseException as error:
            hook.leave(timed_end, token, None, error)
            raise
        hook.leave(timed_end, token, None, None)

    @functools.wraps(original)
    def trace_scope(name: str, *rest: Any, **said: Any) -> Any:
        scope = original(name, *rest, **said)
        if not hook.live or not name.startswith(OF_STEP):
            return scope
        return watched(scope, name.removeprefix(OF_STEP), said.get("args") or {})

    return trace_scope


# ---- worker -----------------------------------------------------------------------------------------------------


def become_worker(engine: Any, _result: Any, error: BaseException | None) -> None:
    """Say which rank this process is."""
    if error is None:
        lifecycle.identify(role="worker", rank=engine.rank, **device_of(f"cpu-{engine.rank}"))


def subject_of(engine: Any) -> str:
    """Return whose model an engine has: one without an optimizer is never trained."""
    if any(kind.__name__ == "FSDPPPOCritic" for kind in type(engine).__mro__):
        return CRITIC
    return REF if engine.optimizer_config is None else ACTOR


def begin_work(subject: str, phase: str, **args: Any) -> Any:
    """Open a phase in which this process works for one of its models: it may have several."""
    return spans.automatic_span(phase, **args).__enter__(), WORK.begin(subject)


def end_work(token: Any, result: Any, error: BaseException | None) -> None:
    """Close it, and work for the one of before."""
    opened, before = token
    WORK.end(before)
    end_span(opened, result, error)


def begin_build(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Begin to make an engine's model and its optimizer."""
    subject = subject_of(args[0])
    return begin_work(subject, f"{subject}.build")


def begin_shard(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Begin to shard the model that is being made."""
    return begin_startup("shard")


def begin_log_prob(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin log-probs, of the actor or of the ref."""
    subject = subject_of(args[0].engine)
    return begin_work(subject, "ref.log_prob" if subject == REF else "actor.old_log_prob", **batch_args(args, kwargs))


def begin_actor_update(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin to learn."""
    return begin_work(ACTOR, "actor.update", **batch_args(args, kwargs))


def begin_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin the critic's values."""
    return begin_work(CRITIC, "critic.values", **batch_args(args, kwargs))


def begin_critic_update(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Begin to learn as a critic."""
    return begin_work(CRITIC, "critic.update", **batch_args(args, kwargs))


def batch_args(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the number of a batch's sequences, which come as groups of some each."""
    data = argument("data", 1, args, kwargs)
    return {"sequences": sum(len(group["input_ids"]) for group in data)} if isinstance(data, list) else {}


def advantage_args(_actor: Any, data: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Sample how many tokens were generated, and the mean reward."""
    tokens = int(sum(group["loss_mask"].sum() for group in data))
    rewards = [float(reward) for group in data for reward in group["rewards"].flatten()]
    spans.counter("tokens", tokens)
    spans.counter("reward_mean", math.fsum(rewards) / max(len(rewards), 1))
    return {"tokens": tokens}


class MicroBatches:
    """The open micro-batch of an update: from its inputs until the next one's, or until the last backward is over."""

    def __init__(self) -> None:
        self._trains = False
        self._open = HeldSpan()

    def begin_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin to go through the micro-batches; forwards alone have none."""
        self._trains = not argument("forward_only", 3, args, kwargs, False)

    def begin(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin the next one."""
        self._open.close()
        if self._trains:
            self._open.open(f"{subject_of(args[0])}.micro_batch")

    def end_all(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the last one."""
        self._trains = False
        self._open.close(error)


# ---- weight sync ------------------------------------------------------------------------------------------------


def sync_args(_engine: Any, meta: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return how the weights go: by collectives (xccl), or by way of a disk."""
    return {"by": str(meta.type)}


def gather_args(_engine: Any, param: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the size of a parameter that is made whole."""
    return tensor_args(param)


def bucket_args(engine: Any, _meta: Any, named_tensors: Any, *_: Any, **__: Any) -> dict[str, Any] | None:
    """Return the size of a bucket that is broadcast; of an empty one nothing is sent."""
    if not named_tensors:
        return None
    adapter = {"adapter": True} if engine.config.use_lora else {}
    return {**sizes_of([tensor for _, tensor in named_tensors]), **adapter}


def pending_args(_engine: Any, pending_bucket: Any, *_: Any, **__: Any) -> dict[str, Any] | None:
    """Return how many tensors of the last bucket are waited for, if there is one."""
    return None if pending_bucket is None else {"tensors": len(pending_bucket.named_tensors)}


def from_disk_args(*_: Any, **__: Any) -> dict[str, Any]:
    """Return by which way the weights came."""
    return {"by": "disk"}


def adapter_from_disk_args(*_: Any, **__: Any) -> dict[str, Any]:
    """Return by which way an adapter came."""
    return {"by": "disk", "adapter": True}


def loaded_args(worker: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the size of a bucket that an engine receives and loads, as it was told before."""
    return announced_sizes(worker.areal_weight_meta_dtypes, worker.areal_weight_meta_shapes)


def loaded_adapter_args(worker: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the size of an adapter that an engine receives."""
    return announced_sizes(worker.areal_lora_weight_meta_dtypes, worker.areal_lora_weight_meta_shapes) | {
        "adapter": True
    }


# ---- rollout ----------------------------------------------------------------------------------------------------


def request_args(_engine: Any, req: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return which request it is, and how long its prompt is."""
    return {"request_id": str(req.rid), "prompt_tokens": len(req.input_ids)}


def answer_args(answer: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return how many tokens were answered."""
    return {"tokens": len(answer.output_tokens)}

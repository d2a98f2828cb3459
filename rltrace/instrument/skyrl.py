"""SkyRL: the phases of its steps, its weight sync chunk by chunk, its dispatch and its rollout.

In: the trainer in the process that began it, `PPORayActorGroup` and its dispatch, the FSDP workers below them, and
vLLM's servers and workers. Out: the driver's step and what it asks for, the phases of a rank, and who is who.

SkyRL's `Timer` names the parts of a step, in its asynchronous trainer too; the boundaries of its blocks are used, not
its readings. Megatron's workers have classes of their own, which nothing here hooks.

Source read: SkyRL 0.3.0.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

from rltrace.events import STEP
from rltrace.hooks.arguments import argument, keep_self
from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.patching import PatchSet, end_span, nothing_after
from rltrace.hooks.trajectories import name_trajectories, of_trajectory
from rltrace.instrument.memory.work import ACTOR, CRITIC, REF, WORK, begin_startup
from rltrace.instrument.torch.devices import device_of
from rltrace.instrument.torch.tensor_sizes import announced_sizes, sizes_of
from rltrace.instrument.vllm import served
from rltrace.record import lifecycle, spans

TRAIN = "skyrl.train"
TRAINER = f"{TRAIN}.trainer:RayPPOTrainer"
BACKEND = "skyrl.backends.skyrl_train"
WORKERS = f"{BACKEND}.workers.worker"
FSDP = f"{BACKEND}.workers.fsdp.fsdp_worker"
DISPATCH = f"{BACKEND}.distributed.dispatch:MeshDispatch"
SERVERS = f"{BACKEND}.inference_servers"
CLIENT = f"{SERVERS}.remote_inference_client:RemoteInferenceClient"
ENGINE_WORKER = f"{SERVERS}.new_inference_worker_wrap:NewInferenceWorkerWrap"

TIMED = {
    "train_critic_and_policy": "trainer.update",
    "run_training": "trainer.update",
    "policy_train": "trainer.update_actor",
    "critic_train": "trainer.update_critic",
    "sync_weights": "trainer.update_weights",
    "sync_weights_to_inference_engines": "trainer.update_weights",
    "save_checkpoints": "trainer.save_checkpoint",
    "eval": "trainer.validate",
}
"""What other trainers call it; any other block of a `Timer` has SkyRL's own name."""

SUBJECTS = {"PolicyWorkerBase": ACTOR, "CriticWorkerBase": CRITIC, "RefWorkerBase": REF}
"""Whose model a worker has, by the class that it derives from."""


class SkyRl:
    """Records the driver, the FSDP workers, weight sync and rollout."""

    name = "skyrl"
    supports = ("skyrl >= 0.3",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        name_driver_hooks(patches)
        name_worker_hooks(patches)
        name_sync_hooks(patches)
        name_rollout_hooks(patches)


def name_driver_hooks(patches: PatchSet) -> None:
    """Name the hooks on the trainer, and on what it asks of others."""
    steps = Steps()
    patches.around(f"{TRAINER}.__init__", steps.meet, nothing_after)
    patches.around(f"{TRAINER}._fire", steps.told, nothing_after, (STEP,))
    timer = f"{TRAIN}.utils.utils:Timer"
    timed = (STEP, "trainer.generate", *dict.fromkeys(TIMED.values()))
    patches.around(f"{timer}.__enter__", steps.begin_block, nothing_after, timed)
    patches.around(f"{timer}.__exit__", steps.end_block, nothing_after)
    patches.span(f"{TRAINER}.postprocess_generator_output", "reward", late_args=reward_args)
    patches.span(f"{TRAINER}.compute_advantages_and_returns", "advantage", advantage_args)
    patches.span(f"{WORKERS}:PPORayActorGroup.async_run_ray_method", "ray.dispatch", dispatch_args)
    patches.span(f"{DISPATCH}.dispatch_from_staged", "ray.dispatch", staged_args)
    patches.span(f"{DISPATCH}.stage_chunks", "batch.stage", stage_args)


def name_worker_hooks(patches: PatchSet) -> None:
    """Name the hooks on the workers: who they are, their models, and the phases of a rank."""
    patches.around(f"{WORKERS}:DistributedTorchRayActor.__init__", keep_self, become_worker)
    for kind, subject, forward in (
        ("Policy", ACTOR, "actor.old_log_prob"),
        ("Critic", CRITIC, "critic.values"),
        ("Ref", REF, "ref.log_prob"),
    ):
        patches.span(f"{FSDP}:FSDP{kind}WorkerBase.init_model", f"{subject}.build")
        patches.span(f"{FSDP}:FSDP{kind}WorkerBase.forward", forward, batch_args)
    shards = tuple(f"{subject}.shard" for subject in SUBJECTS.values())
    patches.around(f"{BACKEND}.distributed.fsdp_strategy:FSDPStrategy.prepare", begin_shard, end_span, shards)
    for kind, subject in (("Policy", ACTOR), ("Critic", CRITIC)):
        worker = f"{WORKERS}:{kind}WorkerBase"
        # The driver asks for the two of each mini-batch, so an update is as many pieces.
        patches.span(f"{worker}.forward_backward", f"{subject}.update", batch_args)
        patches.span(f"{worker}.optim_step", f"{subject}.update")
        patches.span(f"{worker}._forward_backward_micro", f"{subject}.micro_batch")
    patches.span(f"{WORKERS}:Worker.offload_to_cpu", "offload.d2h", moved_args)
    patches.span(f"{WORKERS}:Worker.backload_to_gpu", "offload.h2d", moved_args)


def name_sync_hooks(patches: PatchSet) -> None:
    """Name the hooks on both ends of a sync: chunks are gathered and sent, and engines load them."""
    patches.span(f"{FSDP}:FSDPPolicyWorkerBase.broadcast_to_inference_engines", "weight_sync")
    gathered = (f"{FSDP}:FSDPWeightExtractor.extract_weights", begin_gather, end_gather, ("weight_sync.gather",))
    patches.around_items(*gathered)
    adapters = f"{BACKEND}.distributed.fsdp_utils:collect_lora_params"
    patches.span(adapters, "weight_sync.gather", adapter_args, collected_args)
    # An engine answers when it has loaded them.
    patches.span(f"{CLIENT}.update_weights_ipc", "weight_sync.send", update_args)
    patches.span(f"{CLIENT}.update_weights_nccl", "weight_sync.send", update_args)
    patches.span(f"{CLIENT}.load_lora_adapter", "weight_sync.send", adapter_args)
    patches.span(f"{CLIENT}.finish_weight_update", "weight_sync.wait")
    for method in ("update_weights_ipc", "update_weights_nccl"):
        patches.span(f"{ENGINE_WORKER}.{method}", "weight_sync.load", update_args)


def name_rollout_hooks(patches: PatchSet) -> None:
    """Name the hooks on trajectories, on their requests, and on the engine behind a server."""
    loop = f"{TRAIN}.generators.skyrl_gym_generator:SkyRLGymGenerator.agent_loop"
    name_trajectories(patches, loop, lambda *_, **__: {})
    patches.span(f"{CLIENT}._generate_single", "agent_loop.request", request_args)
    patches.span(f"{CLIENT}.sleep", "trainer.sleep_replicas")
    patches.span(f"{CLIENT}.wake_up", "trainer.wake_replicas", wake_args)
    patches.when_imported(f"{SERVERS}.vllm_server_actor", lambda _: served.name_hooks(patches))


# ---- driver -----------------------------------------------------------------------------------------------------


class Steps:
    """The step of the trainer's process, and the blocks of its timers.

    With dynamic sampling one step has several blocks named `step`: it begins where the trainer tells its callbacks, and
    is over with the block in which it has told them again, for the weights are synchronized behind that. The
    asynchronous trainer tells nobody, and has one block a step.
    """

    def __init__(self) -> None:
        self._step = HeldSpan()
        self._is_told = False
        self._is_over = False
        self._trainer: Any = lambda: None
        self._blocks: dict[int, Any] = {}

    def meet(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Meet the trainer, which knows the number of its step."""
        self._trainer = weakref.ref(args[0])
        lifecycle.identify(role="driver", name="trainer")

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a step, or note that it will be over with its block."""
        event = argument("event_name", 1, args, kwargs)
        if event == "on_step_start":
            self._is_told = True
            self._begin()
        elif event == "on_step_end":
            self._is_over = True

    def begin_block(self, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin what a timer times."""
        timer = args[0]
        if timer.message == STEP:
            self._is_over = not self._is_told
            self._begin()
        else:
            name = TIMED.get(timer.message, f"trainer.{timer.message}")
            self._blocks[id(timer)] = spans.automatic_span(name).__enter__()

    def end_block(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End it; a step is over with its block, or with an error."""
        timer, error = args[0], argument("exc_val", 2, args, kwargs)
        if timer.message != STEP:
            end_span(self._blocks.pop(id(timer), None), None, error)
        elif self._is_over or error is not None:
            self._step.close(error)

    def _begin(self) -> None:
        if not self._step:
            trainer = self._trainer()
            self._step.open(STEP, **({} if trainer is None else {"step": trainer.global_step}))


def reward_args(result: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Sample the mean reward of an answer, of whose tokens each has one now."""
    rewards = result[0]["rewards"]
    mean = math.fsum(math.fsum(of_tokens) for of_tokens in rewards) / max(len(rewards), 1)
    spans.counter("reward_mean", mean)
    return {"reward_mean": mean}


def advantage_args(_trainer: Any, data: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Sample how many tokens were generated."""
    tokens = int(data["response_mask"].sum())
    spans.counter("tokens", tokens)
    return {"tokens": tokens}


def dispatch_args(group: Any, dispatch_type: str, method_name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what is called on the actors of a group, and how a batch is divided among them."""
    known = {"method": method_name, "mode": dispatch_type, "calls": len(group.actor_infos)}
    if dispatch_type != "mesh":
        return known
    chunks, copies = mesh_of(group.actor_infos)
    return {**known, "mesh": [chunks, copies], "chunk": len(args[0] if args else kwargs["data"]) // chunks}


def staged_args(_dispatch: Any, actor_infos: Any, method: str, *_: Any, **__: Any) -> dict[str, Any]:
    """Return what is called with chunks that lie in Ray's store already."""
    return {"method": method, "mode": "staged", "calls": len(actor_infos), "mesh": mesh_of(actor_infos)}


def mesh_of(actor_infos: Any) -> list[int]:
    """Return how many actors get a chunk of their own, and how many get the same one."""
    chunks = int(actor_infos[0].rank.dp_size)
    return [chunks, len(actor_infos) // chunks]


def stage_args(
    _dispatch: Any, dp_size: int, data: Any, mini_batch_boundaries: Any, *_: Any, **__: Any
) -> dict[str, Any]:
    """Return how many mini-batches are put into Ray's store, in how many chunks each."""
    return {"sequences": len(data), "mini_batches": len(mini_batch_boundaries), "mesh": [dp_size]}


# ---- worker -----------------------------------------------------------------------------------------------------


def become_worker(worker: Any, _result: Any, error: BaseException | None) -> None:
    """Say which rank this process is: it has one model, and works for nobody else."""
    if error is None:
        lifecycle.identify(role="worker", rank=worker._rank, **device_of(f"cpu-{worker._rank}"))
        WORK.begin(next((SUBJECTS[kind.__name__] for kind in type(worker).__mro__ if kind.__name__ in SUBJECTS), None))


def begin_shard(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Begin to shard this process's model and to make its optimizer."""
    return begin_startup("shard")


def batch_args(_worker: Any, data: Any = None, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the number of a batch's sequences."""
    return {} if data is None else {"sequences": len(data)}


def moved_args(_worker: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what moves: the optimizer's state, the model, or both."""
    moves = {
        "optimizer": kwargs.get("offload_optimizer", kwargs.get("backload_optimizer", args[0] if args else True)),
        "model": kwargs.get("offload_model", kwargs.get("backload_model", args[1] if len(args) > 1 else True)),
    }
    return {"what": "+".join(what for what, is_moved in moves.items() if is_moved)}


# ---- weight sync ------------------------------------------------------------------------------------------------


def begin_gather(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the span: somebody asks for the next chunk."""
    return spans.automatic_span("weight_sync.gather").__enter__()


def end_gather(opened: Any, chunk: Any, error: BaseException | None) -> None:
    """Close the span: the chunk is whole; the last `next` finds none."""
    try:
        if chunk is not None:
            opened.set(bytes=chunk.total_size_bytes, tensors=len(chunk))
    finally:
        end_span(opened, None, error)


def adapter_args(*_: Any, **__: Any) -> dict[str, Any]:
    """Return that only an adapter goes its way."""
    return {"adapter": True}


def collected_args(collected: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the size of an adapter."""
    return sizes_of(collected.values())


def update_args(_of: Any, update_info: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the size of a chunk, of which only names, types and shapes are told."""
    return announced_sizes(update_info["dtype_names"], update_info["shapes"])


# ---- rollout ----------------------------------------------------------------------------------------------------


def request_args(_client: Any, prompt_token_ids: Any = (), *_: Any, **__: Any) -> dict[str, Any]:
    """Return how long a prompt is, and whose turn it is."""
    return {"prompt_tokens": len(prompt_token_ids), **of_trajectory()}


def wake_args(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what wakes up."""
    tags = argument("tags", 1, args, kwargs, None)
    return {"tags": None if tags is None else list(tags)}

"""OpenRLHF: the phases of its steps, its weight sync tensor by tensor, its dispatch and its rollout.

In: the trainer and its experience maker in the process of one Ray actor, `RayActorGroup`, DeepSpeed's workers below it,
and vLLM's workers. Out: the driver's step and what it asks for, the phases of a rank, and who is who. Actors whose
class is decorated by `ray.remote` are sent by value, and no hook goes with them: what they call is hooked instead, and
the base of their class.

Source read: OpenRLHF 0.11.2, DeepSpeed 0.19.6, vLLM 0.29.
"""

from __future__ import annotations

from typing import Any

from rltrace.events import LOSS, STEP
from rltrace.hooks.arguments import argument
from rltrace.hooks.held_span import HeldSpan
from rltrace.hooks.patching import PatchSet, end_span, nothing_after, nothing_before
from rltrace.host.clock import now_ns
from rltrace.instrument.memory.work import ACTOR, CRITIC, REF, REWARD, WORK, begin_startup
from rltrace.instrument.torch.devices import device_of
from rltrace.instrument.torch.tensor_sizes import announced_sizes
from rltrace.instrument.vllm import served
from rltrace.record import lifecycle, spans
from rltrace.record.error_message import error_args

PPO = "openrlhf.trainer.ppo_trainer:BasePPOTrainer"
SAMPLES = "openrlhf.trainer.ppo_utils.samples_generator:SamplesGenerator"
EXPERIENCE = "openrlhf.trainer.ppo_utils.experience_maker:RemoteExperienceMaker"
LAUNCHER = "openrlhf.trainer.ray.launcher"
ACTOR_TRAINER = "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer"
CRITIC_TRAINER = "openrlhf.trainer.ray.ppo_critic:CriticPPOTrainer"
STATES = "openrlhf.utils.deepspeed.deepspeed_utils"
AGENT = "openrlhf.utils.agent"
ENGINE_WORKER = "openrlhf.trainer.ray.vllm_worker_wrap:WorkerWrap"
GATHERED = "deepspeed.runtime.zero.partition_parameters:GatheredParameters"

SUBJECTS = {
    "PolicyModelActor": ACTOR,
    "ReferenceModelActor": REF,
    "CriticModelActor": CRITIC,
    "RewardModelActor": REWARD,
}
"""Whose model an actor has, by its class."""
FORWARDS = {ACTOR: "actor.old_log_prob", REF: "ref.log_prob", CRITIC: "critic.values", REWARD: "reward"}
"""The phase of a forward of a whole batch, by whose model it is."""


class OpenRlhf:
    """Records the driver, DeepSpeed's workers, weight sync and rollout."""

    name = "openrlhf"
    supports = ("openrlhf >= 0.11",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        name_driver_hooks(patches, Steps())
        name_worker_hooks(patches)
        name_sync_hooks(patches, Sync())
        name_rollout_hooks(patches)


def name_driver_hooks(patches: PatchSet, steps: Steps) -> None:
    """Name the hooks on the trainer, and on what it asks of others."""
    patches.around(f"{PPO}.__init__", steps.meet, nothing_after)
    patches.around(f"{SAMPLES}.generate_samples", steps.begin_generate, steps.end_generate, (STEP, "trainer.generate"))
    patches.span(f"{SAMPLES}.generate_eval_samples", "trainer.validate")
    patches.around(f"{PPO}.train_step", steps.begin_train, steps.end_train)
    patches.around(f"{PPO}.save_logs_and_checkpoints", nothing_before, steps.end)
    patches.span(f"{EXPERIENCE}.make_experience", "trainer.make_experience")
    patches.span(f"{EXPERIENCE}.compute_advantages_and_returns", "advantage", advantage_args)
    patches.around(f"{PPO}._compute_rollout_stats", nothing_before, sample_reward)
    patches.span(f"{PPO}.ppo_train", "trainer.update")
    patches.span(f"{PPO}.broadcast_to_vllm", "trainer.update_weights")
    group = f"{LAUNCHER}:RayActorGroup"
    patches.span(f"{group}.async_run_method", "ray.dispatch", to_each_args)
    patches.span(f"{group}.async_run_method_batch", "ray.dispatch", in_chunks_args)


def name_worker_hooks(patches: PatchSet) -> None:
    """Name the hooks on the workers: who they are, their models, and the phases of a rank."""
    worker = f"{LAUNCHER}:BaseModelActor"
    patches.around(f"{worker}._setup_distributed", begin_worker, nothing_after)
    builds = tuple(f"{subject}.build" for subject in (ACTOR, REF, CRITIC))
    patches.around("openrlhf.models.actor:Actor.__init__", begin_build, end_span, builds)
    patches.around("openrlhf.models.model:get_llm_for_sequence_regression", begin_build, end_span, builds)
    shards = tuple(f"{subject}.shard" for subject in (ACTOR, REF, CRITIC))
    patches.around("openrlhf.utils.deepspeed.deepspeed:DeepspeedStrategy.prepare", begin_shard, end_span, shards)
    patches.around(f"{worker}.execute_batch", begin_batch, end_span, tuple(FORWARDS.values()))
    for trainer, subject, loss in ((ACTOR_TRAINER, ACTOR, "PolicyLoss"), (CRITIC_TRAINER, CRITIC, "ValueLoss")):
        patches.span(f"{trainer}.ppo_train", f"{subject}.update")
        patches.span(f"{trainer}.training_step", f"{subject}.micro_batch")
        patches.span(f"openrlhf.models.loss:{loss}.forward", LOSS)
    patches.span(f"{STATES}:offload_deepspeed_states", "offload.d2h")
    patches.span(f"{STATES}:reload_deepspeed_states", "offload.h2d")


def name_sync_hooks(patches: PatchSet, sync: Sync) -> None:
    """Name the hooks on both ends of a sync: the actor sends one tensor at a time, each engine loads it."""
    patches.around(f"{ACTOR_TRAINER}.broadcast_to_vllm", sync.begin, sync.end, ("weight_sync",))
    patches.around(f"{GATHERED}.__init__", sync.meet, nothing_after)
    patches.around(f"{GATHERED}.__enter__", sync.begin_gather, sync.end_gather, ("weight_sync.gather",))
    patches.around(f"{GATHERED}.__exit__", sync.end_send, nothing_after, ("weight_sync.send",))
    for method in ("update_weight", "update_weight_cuda_ipc"):
        patches.span(f"{ENGINE_WORKER}.{method}", "weight_sync.load", loaded_args)


def name_rollout_hooks(patches: PatchSet) -> None:
    """Name the hooks on trajectories, and on the engine in the process of its actor."""
    for executor in ("SingleTurnAgentExecutor", "MultiTurnAgentExecutor"):
        patches.span(f"{AGENT}:{executor}.execute", "agent_loop.trajectory")
    patches.when_imported("openrlhf.trainer.ray.vllm_engine", lambda _: served.name_hooks(patches))


# ---- driver -----------------------------------------------------------------------------------------------------


class Steps:
    """The step of the trainer's process: from the first request of its batch until it is logged and saved.

    Whether there is a step at all is known when a batch has come: the last request of an episode may bring none. So a
    step is recorded when it is over. Where another process generates, as in asynchronous training, a step is what the
    trainer makes of a batch.
    """

    def __init__(self) -> None:
        self._trains_here = False
        self._start_ns: int | None = None
        self._number: int | None = None

    def meet(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Note that this is the trainer's process."""
        self._trains_here = True
        lifecycle.identify(role="driver", name="trainer")

    def begin_generate(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Begin to wait for a batch; with dynamic sampling several of these make one step."""
        self._begin()
        return spans.automatic_span("trainer.generate").__enter__()

    def end_generate(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """The batch is here, or there is none left."""
        end_span(opened, result, error)
        if error is None and not result[0] and result[3]:
            self._start_ns = None

    def begin_train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin to learn from a batch: now the number of the step is known, counted as OpenRLHF logs it."""
        self._begin()
        self._number = argument("global_step", 2, args, kwargs) + 1

    def end_train(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End a step that failed; any other one is logged and saved first."""
        if error is not None:
            self.end(None, None, error)

    def end(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """End the step."""
        start_ns, self._start_ns = self._start_ns, None
        if start_ns is not None:
            late = {} if error is None else error_args(error)
            spans.automatic_span_at(STEP, start_ns, now_ns(), step=self._number, **late)

    def _begin(self) -> None:
        if self._trains_here and self._start_ns is None:
            self._start_ns = now_ns()


def advantage_args(_maker: Any, experiences: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Sample how many tokens were generated."""
    tokens = int(sum(experience.action_mask.sum() for experience in experiences))
    spans.counter("tokens", tokens)
    return {"tokens": tokens}


def sample_reward(_token: Any, stats: Any, error: BaseException | None) -> None:
    """Sample the mean reward of a batch."""
    if error is None:
        spans.counter("reward_mean", stats["rollout/reward_mean"])


def to_each_args(group: Any, method_name: str, *_: Any, **__: Any) -> dict[str, Any]:
    """Return what is called on each actor of a group."""
    return {"method": method_name, "mode": "all", "calls": len(group._actor_handlers)}


def in_chunks_args(group: Any, method_name: str, **batch: Any) -> dict[str, Any]:
    """Return what is called with a chunk of the batch each, and how large a chunk is; the last one may be smaller."""
    actors, copies = len(group._actor_handlers), group.duplicate_actors
    items = len(next(iter(batch.values()), ()))
    chunks = actors // copies
    mesh = {"mesh": [chunks, copies], "chunk": -(-items // chunks)}
    return {"method": method_name, "mode": "chunks", "calls": actors, **mesh}


# ---- worker -----------------------------------------------------------------------------------------------------


def begin_worker(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """Say which rank this process is: it has one model, and works for nobody else."""
    worker = args[0]
    lifecycle.identify(role="worker", rank=worker._rank, **device_of(f"cpu-{worker._rank}"))
    WORK.begin(SUBJECTS.get(type(worker).__name__))


def begin_build(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Begin to build this process's model; what rewards has no phase for that."""
    return begin_startup("build")


def begin_shard(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Begin to give it to DeepSpeed, which makes the optimizer too."""
    return begin_startup("shard")


def begin_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Open the phase of a batch's forwards; a batch is also appended to what is learned from."""
    phase = FORWARDS.get(str(WORK.subject))
    if argument("method_name", 1, args, kwargs) != "forward" or phase is None:
        return None
    first, last = argument("start_idx", 3, args, kwargs), argument("end_idx", 4, args, kwargs)
    return spans.automatic_span(phase, micro_batches=last - first).__enter__()


# ---- weight sync ------------------------------------------------------------------------------------------------


class Sync:
    """The sync of this process: a tensor is gathered, then sent, which lasts until every engine has loaded it.

    DeepSpeed gathers parameters elsewhere too, and without ZeRO 3 there is nothing to gather.
    """

    def __init__(self) -> None:
        self._is_on = False
        self._bytes: dict[str, int] = {}
        self._stage = HeldSpan()

    def begin(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        """Begin a sync."""
        self._is_on = True
        return spans.automatic_span("weight_sync").__enter__()

    def end(self, opened: Any, result: Any, error: BaseException | None) -> None:
        """End it: the engines have the weights, or something raised."""
        self._is_on = False
        self._stage.close(error)
        end_span(opened, result, error)

    def meet(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Meet the parameter that is to be sent next."""
        if self._is_on:
            self._bytes = {"bytes": sum(map(whole_bytes, argument("params", 1, args, kwargs)))}

    def begin_gather(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Begin to make a parameter whole."""
        if self._is_on:
            self._stage.open("weight_sync.gather", **self._bytes)

    def end_gather(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """The parameter is whole, and is sent."""
        if self._is_on:
            self._stage.close(error)
            if error is None:
                self._stage.open("weight_sync.send", **self._bytes, tensors=1)

    def end_send(self, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Every engine has it."""
        self._stage.close()


def whole_bytes(parameter: Any) -> int:
    """Return the bytes of a whole parameter: ZeRO 3 leaves a rank with its shard."""
    return int(getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size())


def loaded_args(_worker: Any, name: str, dtype: Any, shape: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the name and the bytes of a tensor that an engine receives and loads."""
    return {"tensor": name, **announced_sizes([dtype], [shape])}

"""Which place of verl is hooked, in which of its releases, and what with.

A line of releases is its second number: 9 is 0.9. A place that moved has a row for each of its names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from rltrace.events import INPUTS, LOG_PROBS, LOSS
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.verl import between_ranks, dispatch, driver, rollout, sglang_sync, weight_sync, worker

NameHook = Callable[[PatchSet, str], None]

FIRST, LAST = 4, 9
"""The lines of releases whose source was read."""


@dataclass(frozen=True)
class HookPoint:
    """One place of verl that is hooked."""

    target: str
    """ "module:Class.attr"."""
    name_hook: NameHook
    since: int = FIRST
    """The first line of releases that has the place."""
    until: int = LAST
    """The last line of releases that has the place."""

    def is_in(self, line: int) -> bool:
        """Tell whether the releases of this line have the place."""
        return self.since <= line <= self.until


TRAINER = "verl.trainer.ppo.ray_trainer:RayPPOTrainer"
TRAINER_V1 = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
FSDP_WORKER = "verl.workers.fsdp_workers:ActorRolloutRefWorker"
ENGINE_WORKER = "verl.workers.engine_workers:ActorRolloutRefWorker"
TRAINING_WORKER = "verl.workers.engine_workers:TrainingWorker"
ACTOR = "verl.workers.actor.dp_actor:DataParallelPPOActor"
CRITIC = "verl.workers.critic.dp_critic:DataParallelPPOCritic"
CRITIC_WORKER = "verl.workers.fsdp_workers:CriticWorker"
CRITIC_ROLE = "verl.workers.roles.critic:CriticWorker"
ENGINE = "verl.workers.engine.fsdp.transformer_impl"
FSDP = "verl.utils.fsdp_utils"
VLLM = "verl.workers.rollout.vllm_rollout"
MANAGER = "verl.workers.sharding_manager.fsdp_vllm:FSDPVLLMShardingManager"
SPMD = f"{VLLM}.vllm_rollout_spmd"
ADAPTER = f"{VLLM}.vllm_rollout:ServerAdapter"
SERVER = f"{VLLM}.vllm_async_server:vLLMHttpServer"
BUCKETS = f"{VLLM}.bucketed_weight_transfer"
SGLANG = "verl.workers.rollout.sglang_rollout"
SGLANG_MANAGER = "verl.workers.sharding_manager.fsdp_sglang:FSDPSGLangShardingManager"
SGLANG_ENGINE = f"{SGLANG}.sglang_rollout:AsyncEngine"
SGLANG_SPMD = f"{SGLANG}.sglang_rollout:SGLangRollout"
SGLANG_ADAPTER = f"{SGLANG}.sglang_rollout:ServerAdapter"
SGLANG_CLIENT = f"{SGLANG}.http_server_engine:AsyncHttpServerAdapter"
SGLANG_SERVER = f"{SGLANG}.async_sglang_server:SGLangHttpServer"
AGENT_LOOP = "verl.experimental.agent_loop"
SYNC_MANAGER = "verl.checkpoint_engine.base:CheckpointEngineManager"

DRIVER = (
    HookPoint(f"{TRAINER}.__init__", driver.remember_trainer),
    HookPoint(f"{TRAINER_V1}.__init__", driver.remember_trainer, since=9),
    HookPoint(f"{TRAINER}.init_workers", driver.span_named("trainer.init_workers")),
    HookPoint(f"{TRAINER_V1}._setup", driver.span_named("trainer.init_workers"), since=9),
    # No release has a function that is one step: of verl's timer the boundaries of `step` are used, not its reading.
    HookPoint("verl.utils.debug.performance:_timer", driver.step, until=4),
    HookPoint("verl.utils.profiler.performance:_timer", driver.step, since=5),
    HookPoint("verl.trainer.ppo.reward:compute_reward", driver.reward, until=6),
    HookPoint("verl.trainer.ppo.reward:extract_reward", driver.reward, since=7),
    HookPoint(f"{TRAINER}._compute_reward_colocate", driver.span_named("reward"), since=7),
    HookPoint(f"{TRAINER_V1}._compute_reward_colocate", driver.span_named("reward"), since=9),
    HookPoint("verl.trainer.ppo.ray_trainer:compute_advantage", driver.advantage),
    HookPoint(f"{TRAINER_V1}._compute_advantage", driver.span_named("advantage"), since=9),
    # Around dispatch, execution and collecting, with the driver's own conversion of the batch to and from what is sent.
    HookPoint(f"{TRAINER}._compute_old_log_prob", driver.span_named("trainer.old_log_prob"), since=7),
    HookPoint(f"{TRAINER_V1}._compute_old_log_prob", driver.span_named("trainer.old_log_prob"), since=9),
    HookPoint(f"{TRAINER}._compute_ref_log_prob", driver.span_named("trainer.ref_log_prob"), since=7),
    HookPoint(f"{TRAINER_V1}._compute_ref_log_prob", driver.span_named("trainer.ref_log_prob"), since=9),
    HookPoint(f"{TRAINER}._update_actor", driver.span_named("trainer.update_actor"), since=7),
    HookPoint(f"{TRAINER_V1}._update_actor", driver.span_named("trainer.update_actor"), since=9),
    HookPoint(f"{TRAINER}._compute_values", driver.span_named("trainer.values"), since=7),
    HookPoint(f"{TRAINER_V1}._compute_values", driver.span_named("trainer.values"), since=9),
    HookPoint(f"{TRAINER}._update_critic", driver.span_named("trainer.update_critic"), since=7),
    HookPoint(f"{TRAINER_V1}._update_critic", driver.span_named("trainer.update_critic"), since=9),
    # That conversion: padded tensors to nested ones and back; the new trainer fetches and stores them instead.
    HookPoint("verl.protocol:DataProto.to_tensordict", driver.span_named("batch.to_tensordict"), since=7),
    HookPoint("verl.protocol:DataProto.from_tensordict", driver.span_named("batch.from_tensordict"), since=7),
    HookPoint("verl.trainer.ppo.ray_trainer:left_right_2_no_padding", driver.span_named("batch.unpad"), since=7),
    HookPoint("verl.trainer.ppo.ray_trainer:no_padding_2_padding", driver.span_named("batch.pad"), since=7),
    HookPoint("transfer_queue:kv_batch_get", driver.span_named("batch.get"), since=8),
    HookPoint("transfer_queue:kv_batch_put", driver.span_named("batch.put"), since=8),
    HookPoint(f"{TRAINER}._validate", driver.span_named("trainer.validate")),
    HookPoint(f"{TRAINER_V1}._validate", driver.span_named("trainer.validate"), since=9),
    HookPoint(f"{TRAINER}._save_checkpoint", driver.span_named("trainer.save_checkpoint")),
    HookPoint(f"{TRAINER_V1}._save_checkpoint", driver.span_named("trainer.save_checkpoint"), since=9),
    HookPoint(f"{SYNC_MANAGER}.update_weights", driver.auto_awaited("trainer.update_weights"), since=7),
    HookPoint(f"{SYNC_MANAGER}.sleep_replicas", driver.auto_awaited("trainer.sleep_replicas"), since=7),
    HookPoint(
        f"{AGENT_LOOP}.agent_loop:AgentLoopManager.generate_sequences",
        driver.span_named("trainer.generate"),
        since=5,
        until=6,
    ),
    HookPoint(
        f"{AGENT_LOOP}.agent_loop:AgentLoopManager.generate_sequences",
        driver.auto_awaited("trainer.generate"),
        since=7,
    ),
    # The new trainer submits here and waits there.
    HookPoint(
        "verl.trainer.ppo.v1.agent_loop_tq:AgentLoopManagerTQ.generate_sequences",
        driver.span_named("trainer.generate"),
        since=9,
    ),
    HookPoint("verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.sample", driver.span_named("trainer.sample"), since=9),
)

DISPATCH = (
    HookPoint("verl.single_controller.ray.base:func_generator", dispatch.watch_calls),
    HookPoint("verl.single_controller.ray.base:RayResourcePool.get_placement_groups", dispatch.place),
)

WORKER = (
    HookPoint("verl.single_controller.base.worker:Worker.__init__", worker.identify),
    HookPoint(f"{FSDP_WORKER}._build_model_optimizer", worker.build_model, until=7),
    # From 0.7 on the one who calls every engine's `initialize`, whatever shards its model.
    HookPoint(f"{ENGINE}:FSDPEngine.initialize", worker.make_engine, since=6, until=6),
    HookPoint(f"{TRAINING_WORKER}.reset", worker.make_engine, since=7),
    HookPoint(f"{ENGINE}:FSDPEngine._build_module", worker.engine_phase("build"), since=6),
    HookPoint(f"{ENGINE}:FSDPEngine._build_fsdp_module", worker.engine_phase("shard"), since=6),
    HookPoint(f"{FSDP_WORKER}.compute_log_prob", worker.old_log_prob, until=7),
    HookPoint(f"{ENGINE_WORKER}.compute_log_prob", worker.old_log_prob, since=7),
    HookPoint(f"{FSDP_WORKER}.compute_ref_log_prob", worker.span_of_batch("ref.log_prob"), until=7),
    HookPoint(f"{ENGINE_WORKER}.compute_ref_log_prob", worker.span_of_batch("ref.log_prob"), since=7),
    HookPoint(f"{FSDP_WORKER}.update_actor", worker.span_of_batch("actor.update"), until=7),
    HookPoint(f"{ENGINE_WORKER}.update_actor", worker.span_of_batch("actor.update"), since=7),
    HookPoint(f"{ACTOR}.update_policy", worker.end_micro_batches, until=7),
    HookPoint(f"{ACTOR}._forward_micro_batch", worker.begin_micro_batch, until=7),
    HookPoint(f"{ACTOR}._optimizer_step", worker.stop_micro_batch, until=7),
    HookPoint(f"{ENGINE}:FSDPEngine.forward_backward_batch", worker.end_micro_batches, since=6),
    HookPoint(f"{ENGINE}:FSDPEngineWithLMHead.forward_step", worker.begin_micro_batch, since=6),
    HookPoint(f"{ENGINE}:FSDPEngineWithLMHead.prepare_model_inputs", driver.span_named(INPUTS), since=6),
    # Log-probs and entropy; the workers before the engines have one function for the model's forward and both.
    HookPoint(f"{ENGINE}:FSDPEngineWithLMHead.prepare_model_outputs", worker.timed_span(LOG_PROBS), since=6),
    HookPoint("verl.workers.actor.dp_actor:logprobs_from_logits", worker.timed_span(LOG_PROBS), until=7),
    HookPoint("verl.workers.roles.actor:ppo_loss", worker.timed_span(LOSS), since=6, until=6),
    HookPoint("verl.workers.engine_workers:ppo_loss", worker.timed_span(LOSS), since=7),
    # Of top-k distillation it is called twice, the first time where the log-probs are made, while there are logits.
    HookPoint("verl.workers.engine_workers:distillation_ppo_loss", worker.timed_span(LOSS), since=8),
    # Each calls the one for FSDP2 if the model is one.
    HookPoint(f"{FSDP}:load_fsdp_model_to_gpu", worker.offload("offload.h2d")),
    HookPoint(f"{FSDP}:load_fsdp_optimizer", worker.offload("offload.h2d")),
    HookPoint(f"{FSDP}:offload_fsdp_model_to_cpu", worker.offload("offload.d2h")),
    HookPoint(f"{FSDP}:offload_fsdp_optimizer", worker.offload("offload.d2h")),
    HookPoint(
        "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.save_checkpoint",
        driver.span_named("checkpoint.save"),
    ),
    HookPoint(
        "verl.utils.checkpoint.fsdp_checkpoint_manager:FSDPCheckpointManager.load_checkpoint",
        driver.span_named("checkpoint.load"),
    ),
)

OF_CRITIC = (
    HookPoint(f"{CRITIC_WORKER}._build_critic_model_optimizer", worker.build_critic, until=7),
    HookPoint(f"{CRITIC_WORKER}.compute_values", worker.critics_turn("critic.values", worker.of_critic), until=7),
    HookPoint(f"{CRITIC_WORKER}.update_critic", worker.critics_turn("critic.update", worker.of_critic), until=7),
    HookPoint(
        f"{CRITIC}.update_critic",
        functools.partial(worker.end_micro_batches, subject_of=worker.of_critic),
        until=7,
    ),
    HookPoint(f"{CRITIC}._forward_micro_batch", worker.begin_micro_batch, until=7),
    HookPoint(f"{CRITIC}._optimizer_step", worker.stop_micro_batch, until=7),
    # The workers of engines, at first of critics alone: `trainer.use_legacy_worker_impl=disable`.
    HookPoint(
        f"{CRITIC_ROLE}.init_model",
        functools.partial(worker.make_engine, subject_of=worker.of_critic),
        since=5,
        until=5,
    ),
    HookPoint(
        f"{CRITIC_ROLE}.compute_values", worker.critics_turn("critic.values", worker.of_critic), since=5, until=6
    ),
    HookPoint(f"{CRITIC_ROLE}.update_critic", worker.critics_turn("critic.update", worker.of_critic), since=5, until=6),
    HookPoint(f"{TRAINING_WORKER}.infer_batch", worker.critics_turn("critic.values"), since=7),
    HookPoint(f"{TRAINING_WORKER}.train_mini_batch", worker.critics_turn("critic.update"), since=7),
    # All releases call it by the same name, their losses of an engine's too.
    HookPoint("verl.trainer.ppo.core_algos:compute_value_loss", worker.timed_span(LOSS)),
)
"""The model of values that PPO trains beside the actor; GRPO has none."""

WEIGHT_SYNC = (
    HookPoint(f"{MANAGER}.__enter__", weight_sync.enter, until=5),
    HookPoint(f"{FSDP_WORKER}.rollout_mode", weight_sync.enter, since=6, until=7),
    HookPoint(f"{ENGINE_WORKER}.update_weights", weight_sync.enter, since=7),
    HookPoint(f"{MANAGER}.__exit__", driver.span_named("sharding_manager.exit"), until=5),
    HookPoint(f"{FSDP_WORKER}.trainer_mode", driver.span_named("sharding_manager.exit"), since=6, until=6),
    # The manager of these releases calls the engine itself.
    HookPoint("vllm.entrypoints.llm:LLM.wake_up", weight_sync.wake, until=5),
    HookPoint(f"{SPMD}:vLLMRollout.resume", weight_sync.wake, since=6, until=6),
    HookPoint(f"{SPMD}:vLLMAsyncRollout.resume", weight_sync.wake, since=6, until=6),
    HookPoint(f"{ADAPTER}.resume", weight_sync.wake, since=7),
    HookPoint("vllm.entrypoints.llm:LLM.sleep", driver.span_named("rollout.sleep"), until=5),
    HookPoint(f"{SPMD}:vLLMRollout.release", driver.span_named("rollout.sleep"), since=6, until=6),
    HookPoint(f"{SPMD}:vLLMAsyncRollout.release", driver.span_named("rollout.sleep"), since=6, until=6),
    HookPoint(f"{ADAPTER}.release", driver.span_named("rollout.sleep"), since=7),
    HookPoint(f"{ENGINE}:FSDPEngine.get_per_tensor_param", driver.span_named("actor.state_dict"), since=6),
    HookPoint("torch.distributed.tensor:DTensor.full_tensor", weight_sync.gather_tensor, until=5),
    HookPoint(f"{SPMD}:vLLMRollout.update_weights", weight_sync.gather_items, since=6, until=6),
    HookPoint(f"{SPMD}:vLLMAsyncRollout.update_weights", weight_sync.gather_items, since=6, until=6),
    HookPoint(f"{ADAPTER}.update_weights", weight_sync.send_items, since=7),
    HookPoint(f"{BUCKETS}:BucketedWeightSender._init_socket", weight_sync.watch_sender, since=7),
    HookPoint(f"{BUCKETS}:BucketedWeightSender._cleanup", weight_sync.clean_up, since=7),
    HookPoint(f"{BUCKETS}:BucketedWeightReceiver._init_buffer", driver.span_named("weight_sync.map"), since=7),
    HookPoint(f"{BUCKETS}:BucketedWeightReceiver.receive_weights", weight_sync.watch_receiver, since=7),
    HookPoint(f"{VLLM}.utils:vLLMColocateWorkerExtension.update_weights_from_ipc", rollout.receive_weights, since=7),
    # Of the server that stands before the engine; its worker waits for it.
    HookPoint(f"{SERVER}.clear_kv_cache", driver.span_named("weight_sync.reset_cache"), since=7),
)

ULYSSES = "verl.workers.sharding_manager.fsdp_ulysses:FSDPUlyssesShardingManager"
ULYSSES_LATER = "verl.utils.ulysses:FSDPUlyssesShardingManager"

BETWEEN_RANKS = (
    HookPoint(f"{MANAGER}.preprocess_data", between_ranks.resharded("sharding_manager.preprocess"), until=5),
    HookPoint(f"{MANAGER}.postprocess_data", between_ranks.resharded("sharding_manager.postprocess"), until=5),
    HookPoint(f"{ULYSSES}.preprocess_data", between_ranks.resharded("ulysses.preprocess"), until=7),
    HookPoint(f"{ULYSSES}.postprocess_data", between_ranks.resharded("ulysses.postprocess"), until=7),
    HookPoint(f"{ULYSSES_LATER}.preprocess_data", between_ranks.resharded("ulysses.preprocess"), since=8),
    HookPoint(f"{ULYSSES_LATER}.postprocess_data", between_ranks.resharded("ulysses.postprocess"), since=8),
    HookPoint("verl.utils.ulysses:all_to_all_tensor", between_ranks.all_to_all),
    HookPoint(f"{FSDP}:fsdp2_load_full_state_dict", between_ranks.broadcast),
    # What gathers all of an adapter calls the other one if it is to do so layer by layer.
    HookPoint(f"{FSDP}:collect_lora_params", between_ranks.adapter, since=6),
    HookPoint(f"{FSDP}:layered_summon_lora_params", between_ranks.adapter_by_layer),
    # Of engines that do not share the trainer's GPUs.
    HookPoint(
        "verl.checkpoint_engine.nccl_checkpoint_engine:NCCLCheckpointEngine.send_weights",
        between_ranks.checkpoint_engine("weight_sync.send", "nccl"),
        since=7,
    ),
    HookPoint(
        "verl.checkpoint_engine.base:CheckpointEngineWorker.update_weights",
        between_ranks.checkpoint_engine("weight_sync.receive", "checkpoint engine"),
        since=7,
    ),
)

ROLLOUT = (
    # Later its base has methods that it lacks: nobody can make one.
    HookPoint(
        "verl.workers.rollout.hf_rollout:HFRollout.generate_sequences",
        worker.span_of_batch("rollout.generate"),
        until=5,
    ),
    HookPoint(f"{SPMD}:vLLMRollout.generate_sequences", worker.span_of_batch("rollout.generate"), until=6),
    HookPoint(f"{SERVER}.__init__", rollout.identify_server, since=7),
    HookPoint(f"{SERVER}.launch_server", driver.span_named("server.launch"), since=7),
    HookPoint(f"{SERVER}.generate", rollout.serve, since=7),
    HookPoint(f"{SERVER}.wake_up", driver.span_named("server.wake_up"), since=7),
    HookPoint(f"{SERVER}.sleep", driver.span_named("rollout.sleep"), since=7),
    HookPoint(f"{AGENT_LOOP}.agent_loop:AgentLoopWorker._run_agent_loop", rollout.trajectory, since=7),
    HookPoint(f"{AGENT_LOOP}.agent_loop:AgentLoopBase.__init__", rollout.agent_loops, since=5),
    HookPoint(f"{AGENT_LOOP}.tool_agent_loop:ToolAgentLoop._call_tool", rollout.tool_call, since=5),
    HookPoint(f"{AGENT_LOOP}.agent_loop:AsyncLLMServerManager.generate", rollout.request, since=5, until=7),
    HookPoint("verl.workers.rollout.llm_server:LLMServerClient.generate", rollout.request, since=8),
    HookPoint(
        "verl.experimental.reward_loop.reward_loop:RewardLoopWorker.compute_score",
        driver.span_named("reward.score"),
        since=7,
    ),
)

ON_SGLANG = (
    # In 0.4 the one pair switches what runs in the worker, the other what a server asks for; in 0.5 it calls the other.
    HookPoint(f"{SGLANG_MANAGER}.__enter__", weight_sync.enter, until=4),
    HookPoint(f"{SGLANG_MANAGER}.__exit__", driver.span_named("sharding_manager.exit"), until=4),
    HookPoint(f"{SGLANG_MANAGER}.wake_up", weight_sync.enter, until=5),
    HookPoint(f"{SGLANG_MANAGER}.sleep", driver.span_named("sharding_manager.exit"), until=5),
    HookPoint(f"{SGLANG_ENGINE}.resume_memory_occupation", weight_sync.wake, until=5),
    HookPoint(f"{SGLANG_SPMD}.resume", weight_sync.wake, since=6, until=6),
    HookPoint(f"{SGLANG_ADAPTER}.resume", weight_sync.wake, since=6),
    HookPoint(f"{SGLANG_ENGINE}.release_memory_occupation", driver.span_named("rollout.sleep"), until=5),
    HookPoint(f"{SGLANG_SPMD}.release", driver.span_named("rollout.sleep"), since=6, until=6),
    HookPoint(f"{SGLANG_ADAPTER}.release", driver.span_named("rollout.sleep"), since=6),
    HookPoint(f"{SGLANG_SPMD}.update_weights", weight_sync.gather_items, since=6, until=6),
    HookPoint(f"{SGLANG_ADAPTER}.update_weights", weight_sync.gather_items, since=6),
    HookPoint(f"{SGLANG_ENGINE}.update_weights_from_tensor", sglang_sync.hand_over, until=5),
    HookPoint(f"{SGLANG}.sglang_rollout:sgl_update_weights", sglang_sync.send, since=6),
    HookPoint(f"{SGLANG_ENGINE}.update_weights_from_tensor", sglang_sync.wait, since=6, until=6),
    HookPoint(f"{SGLANG_CLIENT}.update_weights_from_tensor", sglang_sync.wait, since=6),
    # Of an adapter by itself, which goes in one piece.
    HookPoint(f"{SGLANG_CLIENT}.load_lora_adapter_from_tensor", sglang_sync.wait, since=8),
    HookPoint(f"{SGLANG_SPMD}.generate_sequences", worker.span_of_batch("rollout.generate"), until=6),
    HookPoint(f"{SGLANG_SERVER}.__init__", rollout.identify_server, since=7),
    HookPoint(f"{SGLANG_SERVER}.launch_server", driver.span_named("server.launch"), since=7),
    HookPoint(f"{SGLANG_SERVER}.generate", rollout.serve, since=7),
    HookPoint(f"{SGLANG_SERVER}.wake_up", driver.span_named("server.wake_up"), since=7),
    HookPoint(f"{SGLANG_SERVER}.sleep", driver.span_named("rollout.sleep"), since=7),
)
"""The same places of the rollout and of the sync where SGLang is the engine."""

HOOK_POINTS = DRIVER + DISPATCH + WORKER + OF_CRITIC + WEIGHT_SYNC + BETWEEN_RANKS + ROLLOUT + ON_SGLANG

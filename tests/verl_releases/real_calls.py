"""Calls of verl's own functions, with small real input on a CPU; each runs to its end."""

import asyncio
import base64
import contextlib
import functools
import os
import pickle
import threading
import traceback
from types import SimpleNamespace

import torch
import verl
from tensordict import TensorDict
from torch import nn
from verl import DataProto

import rltrace
from rltrace.hooks import boundaries
from rltrace.instrument.memory.work import WORK

LINE = int(verl.__version__.split(".")[1])


def call_all():
    """Make every call; what went wrong, by the call's name."""
    use_cpu()
    errors = {}
    for call in CALLS:
        try:
            call()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            errors[call.__name__] = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    return errors


def use_cpu():
    """Let verl take the CPU for its device: the only thing here that is made up, and none of it is verl's work."""
    # What torch.cuda has and torch.cpu has not: figures of an allocator, a cache to empty, a generator of its own.
    torch.cpu.empty_cache = torch.cpu.ipc_collect = lambda: None
    torch.cpu.memory_allocated = torch.cpu.memory_reserved = lambda: 0
    torch.cpu.max_memory_allocated = torch.cpu.max_memory_reserved = lambda: 0
    torch.cpu.mem_get_info = lambda: (0, 0)
    torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state
    if LINE >= 9:
        from verl.plugin.platform import platform_cuda, platform_manager

        class CpuPlatform(platform_cuda.PlatformCUDA):
            device_name = "cpu"
            device_module = torch.cpu

            def current_device(self):
                return "cpu"

            def set_allocator_settings(self, *_):
                pass

            def is_ipc_supported(self):
                return False

        platform_manager.set_platform(CpuPlatform())


# ---- driver -----------------------------------------------------------------------------------------------------


def a_step():
    """Verl's own timer around a block, in the process that made the trainer."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    if LINE == 4:
        from verl.utils.debug import marked_timer
    else:
        from verl.utils.profiler import marked_timer

    global trainer
    trainer = object.__new__(RayPPOTrainer)
    try:
        RayPPOTrainer.__init__(trainer)  # it needs a cluster's configuration: this is how far it comes without
    except TypeError:
        pass
    trainer.global_steps = 7
    times = {}
    with marked_timer("step", times), marked_timer("gen", times):
        pass
    assert set(times) == {"step", "gen"}


def batch_of_rewards():
    """Four responses to two prompts."""
    data = DataProto.from_dict(
        tensors={
            "responses": torch.ones(4, 3, dtype=torch.long),
            "attention_mask": torch.ones(4, 5, dtype=torch.long),
            "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]),
            "rm_scores": torch.tensor([[0.0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0]]),
            "token_level_rewards": torch.tensor([[0.0, 0, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0]]),
        }
    )
    import numpy as np

    data.non_tensor_batch["uid"] = np.array(["a", "a", "b", "b"], dtype=object)
    return data


def the_reward():
    """What the driver calls the reward, for a batch of mean 0.5."""
    from verl.trainer.ppo import reward

    data = batch_of_rewards()
    if LINE <= 6:
        given = reward.compute_reward(data, lambda data, return_dict: {"reward_tensor": data.batch["rm_scores"]})
    else:
        given = reward.extract_reward(data)
    assert torch.equal(given[0], data.batch["rm_scores"])


def the_advantage():
    """GRPO's, of 9 tokens."""
    from verl.trainer.ppo import ray_trainer
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    data = ray_trainer.compute_advantage(batch_of_rewards(), adv_estimator=AdvantageEstimator.GRPO, num_repeat=2)
    assert data.batch["advantages"].shape == (4, 3)


def the_batch_between_trainer_and_workers():
    """Padded on the left and on the right, without padding, and padded again."""
    from verl.trainer.ppo import ray_trainer

    attention_mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.ones(2, 2, dtype=torch.long),
            "responses": torch.ones(2, 3, dtype=torch.long),
            "input_ids": torch.arange(10).reshape(2, 5),
            "attention_mask": attention_mask,
            "response_mask": attention_mask[:, 2:],
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        }
    )
    sent = ray_trainer.left_right_2_no_padding(data.to_tensordict())
    assert sent["input_ids"].values().tolist() == [1, 2, 3, 4, 5, 6, 7]
    log_probs = ray_trainer.no_padding_2_padding(sent["input_ids"].float(), sent)
    assert log_probs.tolist() == [[1, 2, 3], [6, 0, 0]]
    back = DataProto.from_tensordict(TensorDict({"old_log_probs": log_probs}, batch_size=2))
    assert back.batch["old_log_probs"].shape == (2, 3)


# ---- worker -----------------------------------------------------------------------------------------------------


def one_rank():
    """A process group of one, over gloo."""
    if not torch.distributed.is_initialized():
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def sharded_model():
    """Two layers under FSDP2: 4 parameters, 320 bytes and 36 elements of bias and more."""
    from torch.distributed.fsdp import fully_shard

    one_rank()
    return fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)))


def offload_and_load():
    """A model and an optimizer that has its state, to the host and back."""
    from verl.utils import fsdp_utils

    model = sharded_model()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    fsdp_utils.offload_fsdp_model_to_cpu(model)
    fsdp_utils.load_fsdp_model_to_gpu(model)
    fsdp_utils.offload_fsdp_optimizer(optimizer)
    fsdp_utils.load_fsdp_optimizer(optimizer, "cpu")
    # As the workers up to 0.7 do.
    fsdp_utils.offload_fsdp_optimizer(optimizer=optimizer)
    fsdp_utils.load_fsdp_optimizer(optimizer=optimizer, device_id="cpu")


def tiny_language_model():
    """A Qwen2 with random weights under FSDP2."""
    from transformers import Qwen2ForCausalLM

    return tiny_model(Qwen2ForCausalLM)


def tiny_model_of_values():
    """The same with a value of each token in place of its logits."""
    from transformers import Qwen2ForTokenClassification

    return tiny_model(Qwen2ForTokenClassification)


def tiny_model(architecture):
    """One layer with random weights under FSDP2."""
    from torch.distributed.fsdp import fully_shard
    from transformers import Qwen2Config

    one_rank()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=32, num_key_value_heads=2, num_labels=1, classifier_dropout=0.0, **shape)
    return fully_shard(architecture(config))


def an_update():
    """The actor's update of the releases that have no engine: 4 sequences in 2 micro-batches, one optimizer step."""
    from omegaconf import OmegaConf
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    settings = {
        "strategy": "fsdp2",
        "use_remove_padding": False,
        "ulysses_sequence_parallel_size": 1,
        "use_torch_compile": False,
        "entropy_checkpointing": False,
        "entropy_from_logits_with_chunking": False,
        "ppo_mini_batch_size": 4,
        "ppo_micro_batch_size_per_gpu": 2,
        "ppo_max_token_len_per_gpu": 64,
        "ppo_epochs": 1,
        "use_dynamic_bsz": False,
        "use_kl_loss": False,
        "grad_clip": 1.0,
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "entropy_coeff": 0.0,
        "calculate_entropy": False,
        "loss_agg_mode": "token-mean",
        "policy_loss": {"loss_mode": "vanilla"},
        "use_fused_kernels": False,
        "dtype": "float32",
        "use_prefix_grouper": False,
        "fsdp_config": {"dtype": "float32", "mixed_precision": None},
        "calculate_sum_pi_squared": False,
        "sum_pi_squared_checkpointing": False,
        "global_batch_info": {},
        "shuffle": False,
        "data_loader_seed": 1,
        "tis_imp_ratio_cap": -1,
    }
    model = tiny_language_model()
    actor = DataParallelPPOActor(OmegaConf.create(settings), model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = batch_of_sequences({"temperature": 1.0}, old_log_probs=torch.zeros(4, 3), advantages=torch.ones(4, 3))
    assert "actor/grad_norm" in actor.update_policy(data=data)


def batch_of_sequences(meta_info, **of_responses):
    """4 sequences of 6 tokens, padded, the last 3 of each its response."""
    tokens = torch.randint(0, 32, (4, 6))
    return DataProto.from_dict(
        tensors={
            "input_ids": tokens,
            "responses": tokens[:, 3:],
            "attention_mask": torch.ones(4, 6, dtype=torch.long),
            "response_mask": torch.ones(4, 3, dtype=torch.long),
            "position_ids": torch.arange(6).repeat(4, 1),
            **of_responses,
        },
        meta_info=meta_info,
    )


SETTINGS_OF_A_CRITIC = {
    "strategy": "fsdp2",
    "model": {"use_remove_padding": False},
    "ulysses_sequence_parallel_size": 1,
    "ppo_mini_batch_size": 4,
    "ppo_micro_batch_size_per_gpu": 2,
    "forward_micro_batch_size_per_gpu": 2,
    "forward_max_token_len_per_gpu": 64,
    "use_dynamic_bsz": False,
    "ppo_epochs": 1,
    "grad_clip": 1.0,
    "cliprange_value": 0.5,
    "loss_agg_mode": "token-mean",
    "shuffle": False,
    "data_loader_seed": 1,
}


def a_critics_turn():
    """The worker of the releases without an engine: values of 4 sequences, and an update in 2 micro-batches."""
    from omegaconf import OmegaConf
    from verl.workers.critic.dp_critic import DataParallelPPOCritic
    from verl.workers.fsdp_workers import CriticWorker

    worker = object.__new__(CriticWorker)
    worker.config = OmegaConf.create(SETTINGS_OF_A_CRITIC)
    worker.critic_module = tiny_model_of_values()
    worker.critic_optimizer = torch.optim.SGD(worker.critic_module.parameters(), lr=0.1)
    worker.critic_lr_scheduler = torch.optim.lr_scheduler.ConstantLR(worker.critic_optimizer)
    worker.critic = DataParallelPPOCritic(worker.config, worker.critic_module, worker.critic_optimizer)
    worker.ulysses_sharding_manager = NobodyElse()
    worker.flops_counter = SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0))
    worker._is_offload_param, worker._is_offload_optimizer, worker._world_size = False, False, 1
    data = batch_of_sequences({"global_token_num": [6] * 4}, returns=torch.ones(4, 3))
    data.batch["values"] = CriticWorker.compute_values(worker, data).batch["values"]
    assert data.batch["values"].shape == (4, 3)
    with watched(worker.critic_module) as told:
        metrics = CriticWorker.update_critic(worker, data).meta_info["metrics"]
    assert "critic/grad_norm" in metrics
    assert told == ["critic.update begins", "critic", "critic", "critic.update ends"]
    assert WORK.subject is None


@contextlib.contextmanager
def watched(model):
    """A list of what is told meanwhile: edges of phases, and whose turn it is in each forward of the model."""
    told = []
    handle = model.register_forward_hook(lambda *_: told.append(WORK.subject))
    unwatch = boundaries.watch(
        lambda edge: told.append(f"{' or '.join(edge.names)} {'ends' if edge.is_end else 'begins'}")
    )
    try:
        yield told
    finally:
        handle.remove()
        unwatch()


class NobodyElse(contextlib.nullcontext):
    """What shards sequences, at one rank."""

    def preprocess_data(self, data):
        return data

    postprocess_data = preprocess_data


def an_engine_of_values():
    """The worker of the releases with engines, around a model of values: the same."""
    from verl.utils import tensordict_utils
    from verl.utils.profiler import DistProfiler
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import value_loss

    worker = worker_around(engine(FSDPEngineWithValueHead, tiny_model_of_values()))
    worker.engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(worker.engine.optimizer)
    worker.profiler = DistProfiler(rank=0)
    settings = {
        "cliprange_value": 0.5,
        "loss_agg_mode": "token-mean",
        "global_batch_info": {},
        "loss_scale_factor": None,
    }
    worker.loss_fn = functools.partial(value_loss, config=Settings(settings))
    with watched(worker.engine.module) as told:
        values = TrainingWorker.infer_batch(worker, batch_of_an_engine(compute_loss=False))["values"]
    assert told == ["critic.values begins", "critic", "critic", "critic.values ends"]
    assert [len(row) for row in values.unbind()] == [6] * 4
    if LINE == 7:  # its values have a dimension more than its loss takes
        return
    batch = batch_of_an_engine(mini_batch_size=4, epochs=1, seed=1, dataloader_kwargs={"shuffle": False})
    batch["values"] = batch["returns"] = batch["advantages"]
    with watched(worker.engine.module) as told:
        metrics = tensordict_utils.get(TrainingWorker.train_mini_batch(worker, batch), "metrics")
    assert "grad_norm" in metrics
    assert told == ["critic.update begins", "critic", "critic", "critic.update ends"]
    assert WORK.subject is None


def an_engine_of_an_actor():
    """The same worker around a language model: none of its calls is the critic's."""
    from verl.workers.engine_workers import TrainingWorker

    worker = worker_around(engine())
    with watched(worker.engine.module) as told:
        TrainingWorker.infer_batch(worker, batch_of_an_engine(compute_loss=False))
    assert told == [None, None]


def worker_around(of_worker):
    """verl's worker of the releases with engines, without what its configuration would bring."""
    from verl.workers.engine_workers import TrainingWorker

    made = object.__new__(TrainingWorker)
    made.engine, made.engine_config = of_worker, of_worker.engine_config
    made.model_config, made.loss_fn = Settings({"use_remove_padding": False}), None
    made.device_name, made.flops_counter, made.enable_routing_replay = "cpu", None, False
    return made


def engines_are_made():
    """A worker has its engine made, or an engine makes itself: its model is then of whom it is."""
    from verl.workers.engine.fsdp import transformer_impl

    made = []

    class FailsError(Exception):
        pass

    def make(*_, **__):
        made.append(WORK.subject)
        raise FailsError

    for kind, forward_only, subject in (
        ("FSDPEngineWithLMHead", False, "actor"),
        ("FSDPEngineWithLMHead", True, "ref"),
        ("FSDPEngineWithValueHead", False, "critic"),
    ):
        of_engine = object.__new__(getattr(transformer_impl, kind))
        of_engine.engine_config = SimpleNamespace(forward_only=forward_only)
        of_engine._build_model_optimizer = make
        try:
            if LINE >= 7:
                from verl.workers.engine_workers import TrainingWorker

                worker = object.__new__(TrainingWorker)
                worker.engine = of_engine
                TrainingWorker.reset(worker)
            else:
                of_engine.initialize()
        except FailsError:
            pass
        assert (made.pop(), WORK.subject) == (subject, None)


def engine(kind=None, model=None):
    """verl's FSDP engine around a tiny model, without what its configuration would bring."""
    from torch.distributed.device_mesh import init_device_mesh
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    made = object.__new__(kind or FSDPEngineWithLMHead)
    made.module = model or tiny_language_model()
    made.optimizer = torch.optim.SGD(made.module.parameters(), lr=0.1)
    made.optimizer_config = SimpleNamespace(clip_grad=1.0)
    made.engine_config = SimpleNamespace(
        forward_only=False, strategy="fsdp2", entropy_checkpointing=False, use_fused_kernels=False,
        use_dynamic_bsz=False, max_token_len_per_gpu=64, infer_max_token_len_per_gpu=64, micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2, fsdp_size=1,
    )  # fmt: skip
    made.model_config = SimpleNamespace(lora_rank=0, lora={}, hf_config=made.module.config)
    made.device_mesh, made.ulysses_device_mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)), None
    made.ulysses_sequence_parallel_size, made.ulysses_parallel_group, made.use_ulysses_sp = 1, None, False
    made.scaler, made._autocast_dtype, made.pad_to_length, made.use_remove_padding = None, torch.float32, False, False
    made._qat_enabled = made._is_offload_param = made._is_lora = made._uses_fsdp2_cpu_offload_policy = False
    made._is_offload_optimizer = False
    return made


def nested(rows):
    """Sequences without padding."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch_of_an_engine(**flags):
    """Four sequences of six tokens without padding, in micro-batches of two."""
    from verl.utils import tensordict_utils

    def of_responses(row):
        """Releases from 0.8 on leave padding out here too."""
        return nested([row] * 4) if LINE >= 8 else torch.stack([row] * 4)

    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0, "max_response_length": 3}
    tokens = [torch.randint(0, 32, (6,)) for _ in range(4)]
    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(tokens),
            "prompts": nested([row[:3] for row in tokens]),
            "responses": nested([row[3:] for row in tokens]),
            "attention_mask": torch.ones(4, 6, dtype=torch.long),
            "position_ids": nested([torch.arange(6)] * 4),
            "loss_mask": nested([torch.ones(6, dtype=torch.long)] * 4),
            "response_mask": of_responses(torch.ones(3, dtype=torch.long)),
            "old_log_probs": of_responses(torch.zeros(3)),
            "advantages": of_responses(torch.ones(3)),
        },
        non_tensor_dict={**settings, "use_remove_padding": False, "global_batch_size": 4, **flags},
    )


def loss():
    """verl's own of PPO, as its engine worker takes it."""
    from verl.workers import engine_workers

    return functools.partial(engine_workers.ppo_loss, config=configuration_of_a_loss())


def configuration_of_a_loss():
    """Of an actor."""
    settings = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    return Settings(
        settings | {"global_batch_info": {}, "loss_scale_factor": None, "loss_agg_mode": "token-mean"}
        | {"policy_loss": {"loss_mode": "vanilla"}, "entropy_coeff": 0.0, "use_kl_loss": False, "strategy": "fsdp"}
    )  # fmt: skip


def a_distillation():
    """Two real updates by a teacher's log-probs: of each token, then of the two likeliest ones beside task rewards."""
    from verl.workers import engine_workers

    for mode, many in (("k3", 1), ("forward_kl_topk", 2)):
        settings = {"loss_mode": mode, "topk": 2, "use_task_rewards": many == 2, "distillation_loss_coef": 1.0}
        of_loss = {"loss_max_clamp": 10.0, "log_prob_min_clamp": -10.0, "use_policy_gradient": False}
        loss = functools.partial(
            engine_workers.distillation_ppo_loss,
            config=configuration_of_a_loss(),
            distillation_config=Settings({"distillation_loss": Settings(settings | of_loss)}),
        )
        data = batch_of_an_engine(distillation_use_topk=many == 2)
        data["teacher_logprobs"] = nested([torch.full((6, many), -3.0)] * 4)
        data["teacher_ids"] = nested([torch.arange(6 * many).reshape(6, many)] * 4)
        metrics = engine().train_batch(data, loss)["metrics"]
        assert len(metrics["distillation/loss"].values) == 2


def phases_of_a_rank():
    """The engine worker's phases, with the real engine beneath: log-probs twice, and a real update."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    of_actor = engine()

    def infer(data):
        assert len(of_actor.infer_batch(data, loss())["loss"]) == 2

    def train(data):
        assert "grad_norm" in of_actor.train_batch(data, loss())["metrics"]

    worker = object.__new__(ActorRolloutRefWorker)
    worker.enable_routing_replay = False
    worker.actor = worker.ref = SimpleNamespace(infer_batch=infer, train_mini_batch=train)
    worker.compute_log_prob(batch_of_an_engine())
    worker.compute_log_prob(batch_of_an_engine(no_lora_adapter=True))
    worker.compute_ref_log_prob(batch_of_an_engine())
    worker.update_actor(batch_of_an_engine())
    parameters, _ = of_actor.get_per_tensor_param()
    assert len(dict(parameters)) == 15


# ---- weight sync ------------------------------------------------------------------------------------------------

PARAMETERS = {
    "embedding": torch.ones(200_000),
    "norm": torch.ones(7, dtype=torch.bfloat16),
    "head": torch.ones(200_000),
    "bias": torch.ones(3, 5),
}
"""1,600,074 bytes, of which the first 800,014 fit in a bucket of 1 MiB."""


def manager_switches():
    """The sharding manager's real enter and exit around an engine that only takes the weights."""
    from verl.workers.sharding_manager.fsdp_vllm import FSDPVLLMShardingManager

    loaded = {}
    model = placeholder_model(loaded)
    manager = object.__new__(FSDPVLLMShardingManager)
    manager.module = sharded_model()
    manager.inference_engine = placeholder_engine()
    manager.model_runner = SimpleNamespace(model=model)
    manager.rollout_config = SimpleNamespace(free_cache_engine=True)
    manager.full_params = False
    manager.offload_param, manager.device_mesh, manager.base_sync_done = False, None, True
    FSDPVLLMShardingManager.__enter__(manager)
    FSDPVLLMShardingManager.__exit__(manager, None, None, None)
    assert set(loaded) == {"0.weight", "0.bias", "1.weight", "1.bias"}


def placeholder_model(loaded):
    """What a model of vLLM's looks like to verl: it takes every weight, into `loaded`."""
    return SimpleNamespace(
        load_weights=lambda weights: loaded.update(weights) or set(loaded), model=SimpleNamespace(layers=[])
    )


def placeholder_engine():
    """What vLLM's `LLM` looks like to the manager; there is no vLLM here."""
    return SimpleNamespace(wake_up=lambda tags=None: None, sleep=lambda level: None, reset_prefix_cache=lambda: None)


def modes_switch():
    """The real `rollout_mode` and `trainer_mode`, with verl's real rollout around an engine that takes the weights."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker
    from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout

    loaded = {}
    model = placeholder_model(loaded)
    rollout = object.__new__(vLLMRollout)
    rollout.config, rollout.sleep_level, rollout.model_config = Settings({"free_cache_engine": True}), 2, Settings({})
    rollout.inference_engine = placeholder_engine()
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    rollout.inference_engine.llm_engine = SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(worker=runner))
    )
    worker = object.__new__(ActorRolloutRefWorker)
    worker.actor_module_fsdp, worker._is_offload_param, worker.base_sync_done = sharded_model(), False, True
    worker.config, worker.rollout, worker.layered_summon = SimpleNamespace(rollout=rollout.config), rollout, False
    worker.torch_random_states = worker.gen_random_states = torch.get_rng_state()
    asyncio.run(worker.rollout_mode())
    asyncio.run(worker.trainer_mode())
    assert set(loaded) == {"0.weight", "0.bias", "1.weight", "1.bias"}


class LocalAdapter:
    """verl's own adapter, made without its configuration: no server of this rank, so nobody else is called."""

    def __new__(cls):
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

        adapter = object.__new__(ServerAdapter)
        adapter.config = SimpleNamespace(
            free_cache_engine=True, checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1)
        )
        adapter.rollout_rank, adapter.replica_rank, adapter._has_server, adapter.server_handle = 1, 0, False, None
        adapter.zmq_handle = f"ipc:///tmp/rltrace-verl-{os.getpid()}.sock"
        adapter.use_shm, adapter.sleep_level, adapter.node_rank = True, 2, 0
        return adapter


def receive(handle, loaded):
    """The engine's side: verl's own receiver, over shared memory."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    receiver = BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=True)
    receiver.receive_weights(lambda weights, *_: loaded.update((name, tensor.clone()) for name, tensor in weights))


def worker_switches():
    """The engine worker's real `update_weights`: it wakes the weights, sends all buckets and wakes the KV cache."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    one_rank()
    rollout = LocalAdapter()
    worker = object.__new__(ActorRolloutRefWorker)
    config = {"free_cache_engine": True, "name": "vllm", "checkpoint_engine": SimpleNamespace(backend="naive")}
    worker.config = SimpleNamespace(rollout=Settings(config))
    worker.rollout, worker.layered_summon, worker.base_sync_done, worker.peft_merge = rollout, False, True, False
    engine = SimpleNamespace(
        get_per_tensor_param=lambda **_: (((name, tensor) for name, tensor in PARAMETERS.items()), None),
        to=lambda *_, **__: None,
        is_param_offload_enabled=False,
    )
    worker.actor = SimpleNamespace(engine=engine)
    loaded = {}
    engine_side = threading.Thread(target=receive, args=(rollout.zmq_handle, loaded), daemon=True)
    engine_side.start()
    asyncio.run(worker.update_weights(global_steps=7))
    engine_side.join(60)
    # Not the values: verl 0.7.1 acknowledges a bucket before it is read (bucketed_weight_transfer.py), and the next one
    # may be in its place by then, where the receiver's device has no memory of its own to copy to.
    assert {name: tensor.shape for name, tensor in loaded.items()} == {n: t.shape for n, t in PARAMETERS.items()}
    asyncio.run(rollout.release())


def sglang_switches():
    """verl's real adapter and its real client wake an engine of SGLang's, send it all buckets and put it to sleep.

    The server answers as SGLang's does; the handles that it gets stand for no memory.
    """
    with rltrace.span("switch to SGLang"):
        asked = asyncio.run(over_http(switch_to_sglang))
    assert [path for path, _ in asked] == [
        "resume_memory_occupation",
        "update_weights_from_tensor",
        "update_weights_from_tensor",
        "flush_cache",
        "resume_memory_occupation",
        "release_memory_occupation",
    ]
    sent = [base64.b64decode(body["serialized_named_tensors"][0]) for path, body in asked if "update" in path]
    assert [name for handles in sent for name, _ in pickle.loads(handles)] == list(PARAMETERS)


async def over_http(use):
    """Requests that a server of HTTP got while `use` was given its port: path and body of each."""
    from aiohttp import web

    asked = []

    async def answer(request):
        asked.append((request.path.strip("/"), await request.json() if request.can_read_body else None))
        return web.json_response({"success": True})

    application = web.Application(client_max_size=1 << 24)
    application.router.add_route("*", "/{path}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        await use(site._server.sockets[0].getsockname()[1])
    finally:
        await runner.cleanup()
    return asked


async def switch_to_sglang(port):
    """As a worker does it in a step."""
    from verl.workers.rollout.sglang_rollout import sglang_rollout

    adapter = object.__new__(sglang_rollout.ServerAdapter)
    buckets = {"update_weights_bucket_megabytes": 1}
    adapter.config = Settings(buckets | {"free_cache_engine": True, "checkpoint_engine": SimpleNamespace(**buckets)})
    adapter.model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"))
    adapter.device_mesh = {"infer_tp": SimpleNamespace(get_local_rank=lambda: 0)}
    adapter._engine, adapter._has_server, adapter._pd_role, adapter.sleep_level = client_of_sglang(port), True, None, 2
    await adapter.resume(tags=["weights"])
    await adapter.update_weights((name, tensor) for name, tensor in PARAMETERS.items())
    await adapter.resume(tags=["kv_cache"])
    await adapter.release()


def client_of_sglang(port):
    """verl's real client of a server."""
    from verl.workers.rollout.sglang_rollout import http_server_engine

    client = object.__new__(http_server_engine.AsyncHttpServerAdapter)
    client.server_args, client.node_rank = SimpleNamespace(host="127.0.0.1", port=port), 0
    client.timeout, client.max_attempts, client.retry_delay, client.max_connections = 30.0, 1, 0.1, 8
    return client


def an_adapter_for_sglang():
    """A LoRA adapter goes by itself, in one piece."""
    text = base64.b64encode(b"handles").decode()
    handles = {"serialized_tensors": text} if LINE == 8 else {"serialized_named_tensors": [b"handles"]}
    request = SimpleNamespace(lora_name="actor", config_dict={}, **handles)
    with rltrace.span("adapter for SGLang"):
        ((path, body),) = asyncio.run(
            over_http(lambda port: client_of_sglang(port).load_lora_adapter_from_tensor(request))
        )
    assert path == "load_lora_adapter_from_tensors"
    assert body[next(iter(handles))] == (text if LINE == 8 else [text])


class Settings(SimpleNamespace):
    """A part of a configuration."""

    def __init__(self, values):
        super().__init__(**values)

    def get(self, name, default=None):
        """As OmegaConf's."""
        return getattr(self, name, default)


# ---- rollout ----------------------------------------------------------------------------------------------------


def a_server_that_does_not_lead():
    """Sleep and wake-up of a server on a replica's second node: the first one does it."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    server = object.__new__(vLLMHttpServer)
    server.node_rank, server.config = 1, SimpleNamespace(free_cache_engine=True)
    asyncio.run(server.sleep())
    asyncio.run(server.wake_up())


def a_tool_call():
    """A tool that there is not: verl's own code answers the model with the error."""
    from custom_loops import call_a_tool

    asyncio.run(call_a_tool())


class Answering:
    """An engine's client: always the same three tokens."""

    async def generate(self, **_):
        tokens = [1, 2, 3]
        if LINE == 5:
            return tokens
        from verl.workers.rollout.replica import TokenOutput

        return TokenOutput(token_ids=tokens, log_probs=None)


def a_tokenizer():
    """One of five words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(("<unk>", "a", "b", "c", "?"))}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="?", chat_template=template)


def agent_loops():
    """A worker makes each loop from its configuration, as `agent_loop_config_path` names it, and runs it."""
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop

    own = [{"name": name, "_target_": f"custom_loops.{name}"} for name in ("OwnLoop", "AskingTwice")]
    for loop in OmegaConf.create(own):
        agent_loop._agent_loop_registry[loop.name] = loop
    rollout = {"prompt_length": 8, "response_length": 8, "name": "vllm", "agent": {}, "multi_turn": {}}
    config = OmegaConf.create(
        {"actor_rollout_ref": {"rollout": rollout, "model": {}}, "data": {}, "reward_model": {"enable": True}}
    )
    made = agent_loop.AgentLoopWorker
    worker = object.__new__(getattr(getattr(made, "__ray_metadata__", None), "modified_class", made))
    worker.config, worker.tokenizer, worker.processor, worker.dataset_cls = config, a_tokenizer(), None, object
    worker.server_manager = worker.llm_client = Answering()
    worker.hf_model_type = worker.reward_router_address = None
    worker.tools = []

    async def pass_on(output, *_, **__):
        return output

    worker._agent_loop_postprocess = pass_on
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    messages = [{"role": "user", "content": "a b ?"}]

    async def run(name):
        with rltrace.span("agent loop of a configuration", agent=name):
            if LINE == 5:
                return await worker._run_agent_loop(name, messages, {}, trajectory)
            return await worker._run_agent_loop({}, trajectory, agent_name=name, raw_prompt=messages)

    for name in ("OwnLoop", "AskingTwice", "single_turn_agent", "AskingTwice"):
        answer = torch.as_tensor(asyncio.run(run(name)).response_ids).flatten()[:3]  # 0.6 pads them here
        assert answer.tolist() == ([3, 2, 1] if name == "OwnLoop" else [1, 2, 3])


def an_actor_sent_by_value():
    """Ray sends a class that its decorator made an actor by value: the hooks it has must travel."""
    from ray import cloudpickle

    if LINE == 9:
        from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ as Actor
    else:
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker as Actor
    sent = cloudpickle.loads(cloudpickle.dumps(Actor.__ray_metadata__.modified_class))
    assert asyncio.iscoroutinefunction(sent._run_agent_loop)


CALLS = [a_step, the_reward, the_advantage, offload_and_load]
if LINE >= 9:  # before, it cannot be done without flash_attn
    CALLS.append(the_batch_between_trainer_and_workers)
if LINE <= 7:
    CALLS += [an_update, a_critics_turn]
if LINE <= 5:
    CALLS.append(manager_switches)
if LINE == 6:
    CALLS.append(modes_switch)
if LINE >= 5:
    CALLS += [a_tool_call, agent_loops]
if LINE in (5, 6, 9):
    CALLS.append(an_actor_sent_by_value)
if LINE >= 6:
    CALLS += [sglang_switches, engines_are_made]
if LINE >= 7:
    CALLS += [
        phases_of_a_rank,
        an_engine_of_values,
        an_engine_of_an_actor,
        worker_switches,
        a_server_that_does_not_lead,
    ]
if LINE >= 8:
    CALLS += [an_adapter_for_sglang, a_distillation]

"""SkyRL's own trainer learns by PPO on a CPU: its workers in Ray, its generator, its client, and its engine's worker.

    python skyrl_ppo.py

What answers its requests is a server of this file in a second process: SkyRL 0.3 starts an older vLLM than any that is
built for a CPU and this torch. It draws tokens at random, and takes weights by SkyRL's own worker of vLLM.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import socket
import time
from pathlib import Path
from types import SimpleNamespace

from tiny_model import write_model

STEPS = 2


class Transfer:
    """The receiving end of what sends weights by a file."""

    parse_update_info = staticmethod(lambda told: told)

    def receive_weights(self, told, load_weights):
        path = Path(os.environ["TRANSFER"])
        while not path.exists():
            time.sleep(0.01)
        import torch

        weights = torch.load(path)
        path.unlink()
        assert [name for name, _ in weights] == told["names"]
        load_weights(weights)


def serve(port: int) -> None:
    """Answer as a vLLM of SkyRL's does."""
    import contextlib

    import rltrace

    rltrace.identify(role="engine")
    import torch
    import vllm.config
    from aiohttp import web
    from skyrl.backends.skyrl_train.inference_servers import new_inference_worker_wrap as wrap
    from skyrl.backends.skyrl_train.inference_servers import spec_decode_utils

    vllm.config.set_current_vllm_config = lambda _config: contextlib.nullcontext()
    spec_decode_utils._reload_spec_decode_drafter = lambda _runner, _weights: None
    torch.accelerator.synchronize = lambda: None

    class Worker(wrap.NewInferenceWorkerWrap):
        weight_transfer_engine = Transfer()
        model_runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda weights: set(dict(weights))))
        vllm_config, device = None, "cpu"

        def skyrl_start_weight_update(self, **_said):
            self._skyrl_weight_update_active = True

        def skyrl_finish_weight_update(self, **_said):
            self._skyrl_weight_update_active = False

    worker = Worker()

    async def generate(request):
        said = await request.json()
        tokens = [random.randrange(2, 64) for _ in range(said["sampling_params"]["max_tokens"])]
        logprobs = {"content": [{"logprob": -4.0} for _ in tokens]}
        return web.json_response({"choices": [{"token_ids": tokens, "finish_reason": "length", "logprobs": logprobs}]})

    async def call(request):
        said = await request.json()
        await asyncio.to_thread(getattr(worker, said["method"]), **said.get("kwargs", {}))
        return web.json_response({})

    async def nothing(_request):
        return web.json_response({"world_size": 1})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    app.router.add_post("/collective_rpc", call)
    app.router.add_get("/get_world_size", nothing)
    for path in ("init_weight_transfer_engine", "pause", "resume", "sleep", "wake_up", "reset_prefix_cache"):
        app.router.add_post(f"/{path}", nothing)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=False)


def even():
    """An environment of one turn: the reward is the share of even words."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class Even(BaseTextEnv):
        def __init__(self, **_):
            super().__init__()

        def step(self, action):
            words = action.split()
            reward = sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(len(words), 1)
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})

    return Even


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def configuration(model: Path):
    """Of an actor, its ref and its critic, each with a GPU of its own that Ray is told of."""
    from skyrl.train.config import SkyRLTrainConfig

    given = {
        "trainer.policy.model.path": model, "trainer.ref.model.path": model, "trainer.critic.model.path": model,
        "trainer.strategy": "fsdp", "trainer.flash_attn": False, "trainer.remove_microbatch_padding": False,
        "trainer.placement.colocate_all": False, "trainer.placement.colocate_policy_ref": False,
        **{f"trainer.placement.{role}_num_gpus_per_node": 1 for role in ("policy", "ref", "critic")},
        "trainer.algorithm.use_kl_loss": True, "trainer.algorithm.advantage_estimator": "gae",
        "trainer.epochs": 1, "trainer.train_batch_size": 2, "trainer.policy_mini_batch_size": 2,
        "trainer.critic_mini_batch_size": 2, "trainer.micro_train_batch_size_per_gpu": 2,
        "trainer.micro_forward_batch_size_per_gpu": 2, "trainer.eval_interval": -1, "trainer.eval_before_train": False,
        "trainer.ckpt_interval": -1, "trainer.hf_save_interval": -1, "trainer.resume_mode": "none",
        "trainer.gradient_checkpointing": False, "trainer.logger": "console", "trainer.max_prompt_length": 16,
        "generator.n_samples_per_prompt": 2, "generator.sampling_params.max_generate_length": 8,
        "generator.batched": False, "generator.inference_engine.weight_sync_backend": "nccl",
        "generator.inference_engine.enable_ray_prometheus_stats": False, "trainer.enable_ray_gpu_monitor": False,
        "environment.env_class": "even", "data.dataloader.num_workers": 0,
    }  # fmt: skip
    said = [f"{name}={json.dumps(str(v)) if isinstance(v, Path) else v}" for name, v in given.items()]
    return SkyRLTrainConfig.from_cli_overrides(said)


def main() -> None:
    """Two steps of two prompts, each answered twice."""
    model = Path("model").absolute()
    write_model(model)
    os.environ["TRANSFER"] = str(Path("weights.pt").absolute())
    url = f"http://127.0.0.1:{(port := free_port())}"
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    engine.start()
    import ray
    import skyrl_gym
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import CriticWorker, PolicyWorker, RefWorker
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from skyrl.train.trainer import RayPPOTrainer
    from transformers import AutoTokenizer

    ray.init(num_cpus=8, num_gpus=3, include_dashboard=False)
    skyrl_gym.register(id="even", entry_point=even())
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = configuration(model)
    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=str(model), tokenizer=tokenizer
    )
    asked = [[{"role": "user", "content": " ".join(map(str, range(at, at + 4)))}] for at in range(2 * STEPS)]
    prompts = [
        {"prompt": prompt, "env_class": "even", "env_extras": {}, "uid": str(at)} for at, prompt in enumerate(asked)
    ]

    class Prompts(list):
        collate_fn = staticmethod(lambda batch: batch)

    trainer = RayPPOTrainer(
        cfg=config, tracker=SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None), tokenizer=tokenizer,
        train_dataset=Prompts(prompts), inference_engine_client=client,
        generator=SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, client, tokenizer),
    )  # fmt: skip
    trainer.build_models(PolicyWorker, CriticWorker, RefWorker)
    asyncio.run(trainer.train())
    print(f"RESULT {STEPS}", flush=True)
    engine.kill()
    ray.shutdown()


if __name__ == "__main__":
    main()

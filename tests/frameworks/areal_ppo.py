"""AReaL's own trainer learns by PPO on a CPU: its FSDP engines, its workflow, its client, and the worker of its engine.

    python areal_ppo.py

What answers its requests is a server of this file in a second process: AReaL 1.0 starts an older vLLM than any that is
built for a CPU and this torch. It draws tokens at random, and takes weights by AReaL's own worker of vLLM.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import socket
from pathlib import Path
from types import SimpleNamespace

from tiny_model import write_model

PORT = int(os.environ.get("ENGINE_PORT", "0"))


def serve(port: int) -> None:
    """Answer as AReaL's server does, one request after another."""
    import rltrace

    rltrace.identify(role="engine")
    from aiohttp import web
    from areal.engine.vllm_ext.vllm_worker_extension import VLLMWorkerExtension

    class Model:
        def load_weights(self, weights):
            self.last = dict(weights)

    class Worker(VLLMWorkerExtension):
        rank = 0
        model_runner = SimpleNamespace(model=Model(), device="cpu", vllm_config=None)

        def sync(self):
            """One worker waits for no other."""

    worker = Worker()

    def complete(request):
        tokens = [random.randrange(2, 64) for _ in range(request["max_tokens"])]
        logprobs = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": [-4.0] * len(tokens)}
        return {"choices": [{"finish_reason": "length", "logprobs": logprobs}]}

    calls = {
        "/v1/completions": complete,
        "/areal_init_weights_update_group": lambda said: worker.areal_init_update_weight_group(**said),
        "/areal_set_update_weight_meta": lambda said: worker.areal_set_weight_meta(**said),
        "/areal_update_weights_xccl": lambda _said: worker.areal_update_weight_xccl(),
        "/areal_pause_generation": lambda _said: (True, ""),
        "/areal_continue_generation": lambda _said: (True, ""),
    }

    async def answer(request):
        result = await asyncio.to_thread(calls[request.path], await request.json())
        if isinstance(result, tuple):
            assert result[0], result
            result = {"success": True, "message": result[1]}
        return web.json_response(result)

    async def health(_request):
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/health", health)
    for path in calls:
        app.router.add_post(path, answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=False)


def even(_prompt, _answer, _prompt_ids, answer_ids, **_data):
    """How many of the tokens are even."""
    return sum(token % 2 == 0 for token in answer_ids) / len(answer_ids)


def prompt_ids(prompt, tokenizer, _thinking):
    """The prompt's words."""
    return tokenizer.encode(prompt)


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def configuration(model: Path):
    """Of an actor, its ref and its critic, which share one process."""
    from areal.api import cli_args as of

    spec = of.MicroBatchSpec(n_mbs=2)
    common = {
        "experiment_name": "tiny", "trial_name": "one", "path": str(model), "backend": "fsdp:d1", "mb_spec": spec,
        "dtype": "bfloat16", "attn_impl": "eager", "disable_dropout": True,
    }  # fmt: skip
    optimizer = of.OptimizerConfig(type="adam", lr=1e-4)
    actor = of.PPOActorConfig(
        **common, optimizer=optimizer, kl_ctl=0.1, ppo_n_minibatches=1, weight_update_mode="xccl",
        recompute_logprob=True, use_decoupled_loss=True,
    )  # fmt: skip
    named = {"experiment_name": "tiny", "trial_name": "one", "fileroot": "out"}
    return of.PPOConfig(
        experiment_name="tiny", trial_name="one", tokenizer_path=str(model), total_train_epochs=1,
        cluster=of.ClusterSpecConfig(fileroot="out"),
        train_dataset=of.TrainDatasetConfig(path="none", type="rl", batch_size=2),
        gconfig=of.GenerationHyperparameters(n_samples=2, max_new_tokens=8),
        rollout=of.InferenceEngineConfig(
            experiment_name="tiny", trial_name="one", backend="vllm:d1", max_concurrent_rollouts=8,
            consumer_batch_size=2, max_head_offpolicyness=0,
        ),
        actor=actor, ref=of.PPOActorConfig(**common, optimizer=None),
        critic=of.PPOCriticConfig(**common, optimizer=optimizer, is_critic=True, ppo_n_minibatches=1),
        saver=of.SaverConfig(**named), evaluator=of.EvaluatorConfig(**named),
        stats_logger=of.StatsLoggerConfig(experiment_name="tiny", trial_name="one", fileroot="out"),
        recover=of.RecoverConfig(**named),
    )  # fmt: skip


def main() -> None:
    """Two steps of two prompts, each answered twice."""
    model = Path("model").absolute()
    write_model(model)
    port = free_port()
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(port,), daemon=True)
    engine.start()
    os.environ |= {
        "AREAL_SPMD_MODE": "1", "AREAL_LLM_SERVER_ADDRS": f"127.0.0.1:{port}", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
    }  # fmt: skip
    from areal.trainer.rl_trainer import PPOTrainer
    from areal.workflow.rlvr import RLVRWorkflow
    from datasets import Dataset

    prompts = Dataset.from_list([{"messages": " ".join(map(str, range(at, at + 4)))} for at in range(4)])
    config = configuration(model)
    with PPOTrainer(config, train_dataset=prompts) as trainer:
        workflow = RLVRWorkflow(even, config.gconfig, trainer.tokenizer, get_input_ids_fn=prompt_ids)
        trainer.train(workflow=workflow)
    print("RESULT 2", flush=True)
    engine.kill()


if __name__ == "__main__":
    main()

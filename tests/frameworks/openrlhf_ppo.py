"""A tiny actor, its ref and a critic learn by OpenRLHF's own command, with a real vLLM, DeepSpeed and Ray on a CPU.

python openrlhf_ppo.py [--train.async_enable]
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

from tiny_model import write_model

REWARD = """
import torch

def reward_func(queries, prompts, labels, **_):
    rewards = torch.tensor([float(len(queries[0]) % 3)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
"""


def main() -> None:
    """Run the command with four prompts a step, of which each is answered twice."""
    model = Path("model").absolute()
    write_model(model)
    Path("reward.py").write_text(REWARD)
    prompts = [json.dumps({"input": " ".join(map(str, range(number, number + 4)))}) for number in range(8)]
    Path("prompts.jsonl").write_text("\n".join(prompts))
    import ray

    ray.init(num_cpus=8, num_gpus=3, include_dashboard=False, log_to_driver=True)
    is_async = "--train.async_enable" in sys.argv
    placing = [] if is_async else ["--train.colocate_all", "--vllm.enable_sleep"]
    sys.argv = [
        "train_ppo_ray",
        *sys.argv[1:], *placing,
        "--actor.model_name_or_path", str(model), "--critic.model_name_or_path", str(model),
        "--reward.remote_url", str(Path("reward.py").absolute()),
        *(f"--{role}.num_gpus_per_node=1" for role in ("actor", "ref", "critic", "reward")),
        "--vllm.num_engines=1", "--vllm.sync_backend=gloo", "--vllm.enforce_eager",
        "--vllm.gpu_memory_utilization=0.1",
        "--data.prompt_dataset", str(Path("prompts.jsonl").absolute()), "--data.max_len=32",
        "--rollout.batch_size=4", "--rollout.n_samples_per_prompt=2", "--rollout.max_new_tokens=8",
        "--rollout.micro_batch_size=4", "--train.batch_size=8", "--train.micro_batch_size=4", "--train.num_episodes=1",
        "--ds.attn_implementation=eager", "--ds.zero_stage=2", "--ds.adam_offload",
    ]  # fmt: skip
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")


if __name__ == "__main__":
    main()

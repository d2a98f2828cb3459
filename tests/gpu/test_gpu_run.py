"""The run on GPUs: vLLM asleep and awake, weights by CUDA IPC, the same train.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rltrace_reference.architecture import transformers_config
from rltrace_reference.config import ModelConfig
from rltrace_reference.task import EOS

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu.yaml"
GPUS = [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]
VARIANTS = {
    "level 2, staged, graphs": {},
    "level 1, eager, buckets kept": {"sleep_level": 1, "enforce_eager": True, "keep_buckets": True},
    "level 2, all at once, eager": {"wake_up": "all", "enforce_eager": True},
    "level 0, eager": {"sleep_level": 0, "enforce_eager": True},
}


def run(folder: Path, ranks: int, **changes: dict[str, object]) -> list[dict[str, float]]:
    """The records of three steps of the example, with these keys of its sections changed."""
    config = yaml.safe_load(EXAMPLE.read_text()) | {"ranks": ranks, "steps": 3}
    config |= {section: config[section] | changed for section, changed in changes.items()}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "rltrace_reference", str(folder / "config.yaml"), "--out", str(folder / "out")],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("variant", VARIANTS)
def test_vllm_samples_from_synced_weights(variant: str, tmp_path: Path) -> None:
    """vLLM samples from the weights that were synced."""
    records = run(tmp_path, GPUS[-1], rollout=VARIANTS[variant])
    assert len(records) == 3
    # Of a stale or garbled engine the log-probs of its samples are off by whole units.
    assert all(record["logprob_abs_diff_max"] < 0.1 for record in records)


def test_offloaded_actor_learns_the_same(tmp_path: Path) -> None:
    """An offloaded actor learns what a resident one learns."""
    folders = tmp_path / "resident", tmp_path / "offloaded"
    for folder in folders:
        folder.mkdir()
    resident, offloaded = (
        run(folder, 1, rollout={"enforce_eager": True}, actor={"offload": folder is folders[1]}) for folder in folders
    )
    assert [record["grad_norm"] for record in offloaded] == pytest.approx(
        [record["grad_norm"] for record in resident], rel=0.1
    )


def test_every_rank_loads_the_checkpoint(tmp_path: Path) -> None:
    """The actor and the engine of every rank load the checkpoint."""
    config, folder = yaml.safe_load(EXAMPLE.read_text()), str(tmp_path / "checkpoint")
    save_one_that_always_ends(ModelConfig(**config["model"], tie_word_embeddings=False), folder)
    model = {"path": folder, "tie_word_embeddings": False}
    records = run(tmp_path, GPUS[-1], model=model, rollout={"enforce_eager": True})
    assert [record["tokens"] for record in records] == 3 * [config["task"]["prompts"] * config["rollout"]["n"]]
    assert all(record["logprob_abs_diff_max"] < 0.01 for record in records)  # the actor is as sure as the engine


def save_one_that_always_ends(config: ModelConfig, folder: str) -> None:
    """A checkpoint of a model whose layers add nothing, whose tokens are all alike, and which always says EOS."""
    from transformers import Qwen3ForCausalLM  # a second, and everybody who collects the tests would wait for it

    model = Qwen3ForCausalLM(transformers_config(config))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[EOS].fill_(1.0)
    model.save_pretrained(folder)


def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    """More ranks than GPUs are refused before anything starts."""
    file = tmp_path / "many.yaml"
    file.write_text("{device: cuda, ranks: 16, task: {prompts: 32}}")
    done = subprocess.run(
        [sys.executable, "-m", "rltrace_reference", str(file)], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (
        2,
        f"rltrace: ranks: 16, and there are {torch.cuda.device_count()} GPUs; use ranks: "
        f"{torch.cuda.device_count()} or fewer\n",
    )


@pytest.mark.in_this_process
def test_gpu_in_use_is_refused(tmp_path: Path) -> None:
    """A GPU in use is refused in one line, which says how much of it is taken."""
    taken = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    file = tmp_path / "run.yaml"
    file.write_text("{device: cuda, ranks: 1}")
    done = subprocess.run(
        [sys.executable, "-m", "rltrace_reference", str(file)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "GiB of GPU 0" in done.stderr
    assert done.stderr.count("\n") == 1
    del taken

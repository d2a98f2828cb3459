"""Real TRL on one GPU with a colocated vLLM that sleeps: whole and with adapters, with a ref and a model that rewards.

What the program says of itself, by CUDA events and by the sizes of its models, is compared with what was recorded.
"""

from __future__ import annotations

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gpu_runs import GIB, MIB, exec_

from rltrace.analysis import Summary, summarize
from rltrace.events import Span
from rltrace.read.recording import Recording

MISSING = [name for name in ("trl", "vllm", "peft", "datasets") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} is not installed"),
    pytest.mark.timeout(900),
]

STEPS = 5
PROGRAM = """
import json
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification
from trl import GRPOConfig, GRPOTrainer

WORDS = ["<pad>", "<eos>", *map(str, range(8190))]
OPTIMIZER_STEPS = []


def save_models():
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    shape = dict(
        vocab_size=len(WORDS), hidden_size=2048, intermediate_size=6144, num_hidden_layers=12, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1024, pad_token_id=0, eos_token_id=1,
    )
    torch.manual_seed(0)
    for kind, name, more in (
        (Qwen3ForCausalLM, "model", {}),
        (Qwen3ForSequenceClassification, "reward", {"num_labels": 1}),
    ):
        kind(Qwen3Config(**shape, **more)).to(torch.bfloat16).save_pretrained(name)
        tokenizer.save_pretrained(name)
    return tokenizer


def time_optimizer():
    events = []

    def before(*_):
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(lambda *_: events[-1][1].record())
    return events


def size_of(model):
    return 0 if model is None else sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())


def main(adapters):
    from peft import LoraConfig

    tokenizer, events = save_models(), time_optimizer()
    trainer = GRPOTrainer(
        "model",
        reward_funcs=[lambda completion_ids, **_: [float(len(set(ids))) for ids in completion_ids], "reward"],
        args=GRPOConfig(
            "out", bf16=True, max_steps=%(steps)s, per_device_train_batch_size=8, gradient_accumulation_steps=2,
            num_generations=8, max_completion_length=256, beta=0.1, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, seed=0, use_vllm=True, vllm_mode="colocate", vllm_enable_sleep_mode=True,
            vllm_gpu_memory_utilization=0.3, vllm_max_model_length=512, gradient_checkpointing=False,
            model_init_kwargs={"dtype": "bfloat16"},
        ),
        train_dataset=Dataset.from_list([{"prompt": " ".join(map(str, range(n, n + 64)))} for n in range(256)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, target_modules="all-linear") if adapters else None,
    )
    trainer.train()
    torch.cuda.synchronize()
    named = {"actor": trainer.model, "ref": trainer.ref_model, "reward": trainer.reward_funcs[1]}
    said = {
        "sizes": {name: size_of(model) for name, model in named.items()},
        "optimizer_ms": [start.elapsed_time(end) for start, end in events],
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
    }
    print("RESULT " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] == "adapters")
"""


class Run(NamedTuple):
    """One run."""

    adapters: bool
    said: dict[str, Any]
    recording: Recording
    summary: Summary

    def spans(self, name: str) -> list[Span]:
        """Of all processes, by their start."""
        found = [event for process in self.recording.processes for event in process.events() if event.name == name]
        return sorted((span for span in found if isinstance(span, Span)), key=lambda span: span.start_ns)


@pytest.fixture(scope="module", params=["whole", "adapters"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Five steps."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    source = f"import os\nos.chdir({str(folder)!r})\n{PROGRAM % {'steps': STEPS}}"
    done = exec_(folder, {"train": source}, request.param, timeout_s=600, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "rltrace: the hook" not in done.stderr, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    recording = Recording.open(folder / "run")
    return Run(request.param == "adapters", json.loads(line.removeprefix("RESULT ")), recording, summarize(recording))


def test_every_boundary_adds_up(run: Run) -> None:
    (device,) = run.summary.memory
    print(device.residual, device.unknown)
    assert device.residual is not None and device.residual.boundaries >= 10 * STEPS
    assert device.residual.boundaries_over_limit == 0
    assert device.residual.inconsistent_boundaries <= 0.05 * device.residual.boundaries


def test_models_have_owners_from_start_up(run: Run) -> None:
    """Every model has its owner from the engine's start-up on."""
    (device,) = run.summary.memory
    for name, size in run.said["sizes"].items():
        peak = device.owner_peaks.get(f"{name}.params")
        assert (0 if peak is None else peak.bytes) == pytest.approx(size, rel=0.01)
    loading = next(boundary for boundary in device.boundaries if boundary.phase == "rollout.load")
    assert loading.bytes["actor.params"] == pytest.approx(run.said["sizes"]["actor"], rel=0.01)
    assert loading.bytes.get("rollout.activations", 0) < 64 * MIB, "the policy is none of the engine's"
    assert device.owner_peaks["rollout.activations"].bytes < GIB


def test_peaks_lie_inside_the_update(run: Run) -> None:
    """The peaks of gradients and activations lie inside the update.

    Adapters have few gradients; activations are of the whole model.
    """
    (device,) = run.summary.memory
    for owner, least_bytes in (("actor.activations", 256 * MIB), ("actor.grads", MIB if run.adapters else GIB)):
        peak = device.owner_peaks[owner]
        assert (peak.phase, peak.bytes > least_bytes) == ("actor.update", True), (owner, peak)
    (torchs,) = device.allocated_peaks
    assert torchs.bytes <= run.said["max_allocated_bytes"]


def test_steps_abut(run: Run) -> None:
    steps = run.spans("step")
    assert [step.args["step"] for step in steps] == list(range(STEPS))
    for step, following in pairwise(steps):
        assert step.end_ns is not None and following.start_ns - step.end_ns < 1_000_000


def test_sleeps_have_bytes_and_verdicts(run: Run) -> None:
    """Every sleep and every wake-up has its bytes and its verdict."""
    sleeps = run.summary.sleeps
    names = [sleep.name for sleep in sleeps]
    assert names == ["rollout.sleep", *["rollout.wake_weights", "rollout.wake_kv_cache", "rollout.sleep"] * STEPS]
    for sleep in sleeps:
        assert (sleep.verdict, sleep.reason) == ("ok", "")
        assert sum(sleep.moved_bytes.values()) > 256 * MIB
        assert sleep.changed_bytes == pytest.approx(sum(sleep.moved_bytes.values()), abs=64 * MIB)


def test_a_sync_is_divided_into_stages(run: Run) -> None:
    for sync in run.summary.weight_sync:
        print(sync.step, sync.seconds, {name: stage.seconds for name, stage in sync.stages.items()}, sync.rest_seconds)
        assert sync.rest_seconds <= 0.05 * sync.seconds
        assert ("weight_sync.merge" in sync.stages) is run.adapters
        together = sum(stage.seconds for stage in sync.stages.values()) + sync.rest_seconds
        assert together == pytest.approx(sync.seconds, rel=0.001)


def test_optimizer_time_matches_cuda_events(run: Run) -> None:
    """The optimizer takes as long as CUDA events say, in the mean of the steady steps.

    It counts in whatever step of the program the GPU ends it.
    """
    (found,) = [work for work in run.summary.gpu_work if (work.work, work.phase) == ("optimizer.step", None)]
    said_s = sum(run.said["optimizer_ms"][1:]) / (STEPS - 1) / 1e3
    print(found.seconds, said_s)
    assert found.count == 1
    # The own events are around our look too, in which the GPU has nothing to do: up to 0.5 ms.
    assert found.seconds == pytest.approx(said_s, rel=0.02, abs=0.0005)

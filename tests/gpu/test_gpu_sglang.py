"""A real SGLang on one GPU under `rltrace exec`: it sleeps, takes new weights and generates, with no edit to it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import verl_run
from gpu_runs import MIB, exec_

from rltrace.analysis import summarize
from rltrace.events import Counter, Span
from rltrace.read.recording import Recording

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
    pytest.mark.timeout(400),
]

STEPS = 2
PROGRAM = """
import sys
import time
import rltrace
import sglang
import torch
from transformers import AutoModelForCausalLM

def main(model):
    engine = sglang.Engine(
        model_path=model, skip_tokenizer_init=True, attention_backend="triton", sampling_backend="pytorch",
        disable_cuda_graph=%(is_eager)s, cuda_graph_max_bs=16, disable_piecewise_cuda_graph=True,
        mem_fraction_static=0.2, enable_memory_saver=True, enable_weights_cpu_backup=True,
    )
    engine.release_memory_occupation(tags=["kv_cache", "weights"])
    torch.ones(1, device="cuda")
    with rltrace.phase("take weights"):  # what this process holds is known from here on
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        weights = {name: weight.cuda() for name, weight in model.state_dict().items()}
    for number in range(%(steps)s):
        with rltrace.span("step", step=number):
            engine.resume_memory_occupation(tags=["weights"])
            engine.update_weights_from_tensor(list(weights.items()))
            engine.resume_memory_occupation(tags=["kv_cache"])
            prompts = [[1 + i, 2, 3, 4] for i in range(16)]
            answers = engine.generate(
                input_ids=prompts, sampling_params={"max_new_tokens": 32, "ignore_eos": True, "temperature": 1.0}
            )
            assert [len(answer["output_ids"]) for answer in answers] == [32] * 16
            while not engine.flush_cache().success:  # its last batch is under way when the last answer is here
                time.sleep(0.01)
            engine.release_memory_occupation(tags=["kv_cache", "weights"])
    engine.shutdown()

if __name__ == "__main__":
    main(sys.argv[1])
"""


def trace(folder: Path, source: str) -> tuple[int, Recording]:
    """Run a program: the number of its model's parameters, and its Recording."""
    parameters = verl_run.prepare(folder, "tiny")
    done = exec_(folder, {"engine": source}, str(folder / "model"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "rltrace: the hook" not in done.stderr
    return parameters, Recording.open(folder / "run")


@pytest.fixture(scope="module", params=["eager", "graphs"])
def traced(request, tmp_path_factory):
    """The run of the program, without CUDA graphs and with them."""
    source = PROGRAM % {"steps": STEPS, "is_eager": request.param == "eager"}
    return trace(tmp_path_factory.mktemp(request.param), source)


def scheduler_of(recording):
    """The engine's only scheduler."""
    (found,) = [process for process in recording.processes if process.name == "scheduler 0"]
    return found


def spans_of(recording, name):
    """Of the scheduler, in order."""
    spans = [event for event in scheduler_of(recording).events() if isinstance(event, Span)]
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def test_the_scheduler_says_its_gpu(traced):
    assert scheduler_of(traced[1]).device["uuid"].startswith("GPU-")


def test_it_sleeps_and_wakes_by_tag(traced):
    _, recording = traced
    assert [span.args["tags"] for span in spans_of(recording, "rollout.sleep")] == [["kv_cache", "weights"]] * (
        STEPS + 1
    )
    assert (
        len(spans_of(recording, "rollout.wake_weights")) == len(spans_of(recording, "rollout.wake_kv_cache")) == STEPS
    )


def test_unmapped_bytes_are_mapped_again(traced):
    """What is unmapped is mapped again, to the byte."""
    parameters, recording = traced
    moved = {name: [span.args["tags"] for span in spans_of(recording, name)] for name in ("cumem.unmap", "cumem.map")}
    first = {tag: size for tags in moved["cumem.unmap"][:2] for tag, size in tags.items()}
    assert first.keys() == {"kv_cache", "weights"}
    assert 2 * parameters <= first["weights"] <= 2 * parameters + 64 * MIB
    assert moved["cumem.map"] == [{tag: first[tag]} for tag in ("weights", "kv_cache")] * STEPS


def test_every_batch_is_a_step_of_the_engine(traced):
    steps = spans_of(traced[1], "engine.step")
    assert len(steps) >= 32 * STEPS
    assert sum(step.args["tokens"] for step in steps) >= 16 * (4 + 31) * STEPS
    assert max(step.args["running"] for step in steps) == 16


def test_an_update_is_loaded_whole(traced):
    parameters, recording = traced
    loads = spans_of(recording, "weight_sync.load")
    assert len(loads) == STEPS and {load.args["source"] for load in loads} == {"tensor"}
    assert [load.args["bytes"] for load in loads] == [2 * parameters] * STEPS


def test_weights_and_kv_cache_come_and_go(traced):
    """Weights and KV cache are owners whose bytes come and go."""
    _, recording = traced
    held = {"rollout.weights_bytes": [], "rollout.kv_cache_bytes": []}
    for event in scheduler_of(recording).events():
        if isinstance(event, Counter) and event.name in held:
            held[event.name].append(event.value)
    assert all(min(values) == 0 < max(values) for values in held.values())


def test_start_up_is_in_phases(traced):
    spans = (event for event in scheduler_of(traced[1]).events() if isinstance(event, Span) and event.args.get("phase"))
    phases = [span.name for span in sorted(spans, key=lambda span: span.start_ns)]
    assert phases[:4] == ["rollout.load", "rollout.reserve_kv", "rollout.capture", "rollout.sleep"]


def test_every_sleep_frees_what_it_said(traced):
    sleeps = summarize(traced[1]).sleeps
    assert len(sleeps) == 1 + 3 * STEPS
    assert [(sleep.name, sleep.verdict, sleep.reason) for sleep in sleeps if sleep.verdict != "ok"] == []


def test_graphs_are_an_owner_where_there_are_any(traced, request):
    graphs = [event.value for event in scheduler_of(traced[1]).events() if event.name == "rollout.graphs_bytes"]
    is_eager = "eager" in request.node.name
    assert max(graphs, default=0) == 0 if is_eager else max(graphs) > 0


def test_the_ledger_adds_up(traced):
    (device,) = summarize(traced[1]).memory
    print(device.residual, device.unknown, dict(device.owner_peaks))
    assert device.residual.boundaries_over_limit == 0
    assert device.residual.inconsistent_boundaries == 0


# The tensors of an adapter go to every scheduler as they are; how it lays them out is its own.
ADAPTER = """
import sys
import sglang
import torch
from transformers import AutoConfig

def main(model):
    engine = sglang.Engine(
        model_path=model, skip_tokenizer_init=True, attention_backend="triton", sampling_backend="pytorch",
        disable_cuda_graph=True, disable_piecewise_cuda_graph=True, mem_fraction_static=0.2,
        enable_lora=True, max_lora_rank=8, max_loras_per_batch=1, lora_target_modules=["o_proj"],
    )
    config = AutoConfig.from_pretrained(model)
    heads = config.num_attention_heads * config.head_dim
    adapter = {
        f"base_model.model.model.layers.{layer}.self_attn.o_proj.{name}.weight": torch.ones(shape)
        for layer in range(config.num_hidden_layers)
        for name, shape in (("lora_A", (8, heads)), ("lora_B", (config.hidden_size, 8)))
    }
    peft = {"r": 8, "lora_alpha": 8, "target_modules": ["o_proj"], "peft_type": "LORA", "bias": "none"}
    answer = engine.load_lora_adapter_from_tensors("adapter", adapter, peft)
    assert answer.success, answer
    engine.shutdown()

if __name__ == "__main__":
    main(sys.argv[1])
"""


def test_adapter_alone_is_an_update(tmp_path):
    """An adapter that is loaded by itself is an update with its bytes."""
    _, recording = trace(tmp_path, ADAPTER)
    (load,) = spans_of(recording, "weight_sync.load")
    layers, heads, hidden = 4, 4 * 64, 256
    said = (load.args["source"], load.args["tensors"], load.args["bytes"])
    assert said == ("lora", 2 * layers, layers * 4 * 8 * (heads + hidden))

"""vLLM guesses tokens ahead and takes an adapter, on a CPU in its real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from framework_runs import TIMEOUT_SECONDS, result, trace

from rltrace.events import Span

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

HERE = Path(__file__).parent
# Prompts that repeat themselves, so that there is something to guess.
PROGRAM = """
    import json
    import os
    from pathlib import Path

    def main():
        from peft import LoraConfig, get_peft_model
        from tiny_model import write_model
        from transformers import AutoModelForCausalLM
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

        write_model(Path("model"))
        has_adapter = os.environ["WITH_ADAPTER"] == "1"
        model = AutoModelForCausalLM.from_pretrained("model")
        get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).save_pretrained("adapter")
        guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        adapters = {"enable_lora": True, "max_lora_rank": 8} if has_adapter else {}
        llm = LLM(
            model="model", dtype="bfloat16", enforce_eager=True, max_model_len=64, max_num_seqs=4,
            speculative_config=guesses, disable_log_stats=False, **adapters,
        )
        if has_adapter:
            llm.llm_engine.add_lora(LoRARequest("tiny", 1, "adapter"))
        prompts = [{"prompt_token_ids": [5, 6, 7, 5, 6, 7, 5, 6]} for _ in range(2)]
        llm.generate(prompts, SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True), use_tqdm=False)
        counted = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        print("RESULT " + json.dumps(counted))

    if __name__ == "__main__":
        main()
"""
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
OLDER = {"WITH_ADAPTER": "1"}
# The newer model runner needs Triton, whose kernels an interpreter runs here; those of adapters it cannot.
NEWER = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1", "WITH_ADAPTER": "0"}


@pytest.fixture(scope="module", params=["older", "newer"])
def run(request, tmp_path_factory):
    """Its spans by name, and what vLLM itself has counted, of either model runner."""
    is_newer = request.param == "newer"
    environment = request.getfixturevalue("vllm_environment" if is_newer else "openrlhf_environment")
    path = os.pathsep.join(map(str, (HERE, HERE / "triton_on_cpu") if is_newer else (HERE,)))
    variables = VARIABLES | {"PYTHONPATH": path} | (NEWER if is_newer else OLDER)
    traced = trace(environment, tmp_path_factory.mktemp("traced"), PROGRAM, **variables)
    spans: dict[str, list[Span]] = {}
    for process in traced.recording.processes:
        for event in process.events():
            if isinstance(event, Span):
                spans.setdefault(event.name, []).append(event)
    runner = "gpu.model_runner:GPUModelRunner" if is_newer else "gpu_model_runner:GPUModelRunner"
    assert traced.hooks()[f"vllm.v1.worker.{runner}.__init__"]["fired"]
    return spans, result(traced.out)


def test_steps_say_what_was_guessed_and_accepted(run):
    """The steps' tokens add up to what vLLM has counted, and each step that has guesses verifies them."""
    spans, counted = run
    guessing = [step.args for step in spans["engine.step"] if "drafted" in step.args]
    assert guessing
    assert sum(step["drafted"] for step in guessing) == counted["vllm:spec_decode_num_draft_tokens"] > 0
    assert sum(step["accepted"] for step in guessing) == counted["vllm:spec_decode_num_accepted_tokens"] > 0
    assert len(spans["engine.verify"]) == len(guessing)
    assert len(spans["engine.draft"]) >= len(guessing)


def test_cache_says_its_blocks(run):
    """What reserves the KV cache says how many blocks it has, and how many tokens fit into one."""
    spans, _ = run
    (reserved,) = spans["rollout.reserve_kv"]
    # 1 GiB, of 2 layers with 2 heads of 32 numbers, keys and values, two bytes each.
    assert reserved.args["gpu_blocks"] * reserved.args["block_tokens"] == 2**30 // (2 * 2 * 2 * 32 * 2)


@pytest.mark.parametrize("run", ["older"], indirect=True)
def test_adapter_is_added(run):
    spans, _ = run
    assert [span.args for span in spans["engine.add_lora"]] == [{"adapter": "tiny"}]

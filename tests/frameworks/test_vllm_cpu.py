"""vLLM's real engine on a CPU, in its real processes: the program, the engine beside it, and its worker."""

from __future__ import annotations

import pytest
from framework_runs import TIMEOUT_SECONDS, result, result_of_bare, run_contracts, trace

from rltrace.events import COLLECTION, OPENTELEMETRY
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.vllm.calls import VllmCalls
from rltrace.instrument.vllm.engine import Vllm

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

# Two requests that fit into the KV cache, then eight that do not: some of those are preempted.
PROGRAM = """
    import json, sys

    def main():
        from transformers import Qwen3Config
        from vllm import LLM, SamplingParams

        Qwen3Config(
            vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, architectures=["Qwen3ForCausalLM"],
        ).save_pretrained("model")
        llm = LLM(
            "model", skip_tokenizer_init=True, load_format="dummy", seed=0, max_model_len=64, dtype="bfloat16",
            enforce_eager=True, num_gpu_blocks_override=5, block_size=32, max_num_seqs=8, disable_log_stats=False,
            enable_prefix_caching=False,
        )
        prompts = [{"prompt_token_ids": [1 + number, 2, 3, 4]} for number in range(4)]
        sampling = SamplingParams(n=2, max_tokens=40, temperature=1.0, seed=7, detokenize=False, ignore_eos=True)
        fitting = SamplingParams(max_tokens=40, temperature=0.0, detokenize=False, ignore_eos=True)
        outputs = llm.generate(prompts[:2], fitting, use_tqdm=False)
        outputs += llm.generate(prompts, sampling, use_tqdm=False)
        llm.sleep(level=2)
        llm.wake_up()
        names = ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_preemptions")
        counted = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in names}
        said = {"tokens": [list(answer.token_ids) for output in outputs for answer in output.outputs]}
        print("RESULT " + json.dumps(said | {"metrics": counted}))

    if __name__ == "__main__":
        main()
"""
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@pytest.fixture(scope="module")
def traced(vllm_environment, tmp_path_factory):
    return trace(vllm_environment, tmp_path_factory.mktemp("traced"), PROGRAM, **VARIABLES)


@pytest.fixture(scope="module")
def bare(vllm_environment, tmp_path_factory):
    return result_of_bare(vllm_environment, tmp_path_factory.mktemp("bare"), PROGRAM, **VARIABLES)


def processes_by_role(run):
    return {process.role: process for process in run.recording.processes}


def test_tracing_keeps_vllms_answers(traced, bare):
    """Tracing does not change what vLLM answers."""
    assert result(traced.out)["tokens"] == bare["tokens"]
    assert [len(tokens) for tokens in bare["tokens"]] == [40] * 10


def test_engine_steps_match_vllms_metrics(traced):
    """The engine's steps add up to what vLLM counted."""
    steps, metrics = traced.spans("engine.step"), result(traced.out)["metrics"]
    third = traced.spans("rollout.request")[2].start_ns
    fitting = [step for step in steps if step.start_ns < third]
    # Fed to the model: every token of a prompt, and of an answer all but the last.
    assert sum(step.args["tokens"] for step in fitting) == 2 * (4 + 40 - 1)
    assert {step.args["preempted"] for step in fitting} == {0}
    # A preempted request is computed again.
    assert sum(step.args["preempted"] for step in steps) == metrics["vllm:num_preemptions"] > 0
    computed = metrics["vllm:prompt_tokens"] + metrics["vllm:generation_tokens"] - 10
    assert sum(step.args["tokens"] for step in steps) > computed
    assert all(0 <= step.args["kv_usage"] <= 1 for step in steps)
    assert max(step.args["kv_usage"] for step in steps) > 0
    assert (steps[-1].args["running"], steps[-1].args["waiting"]) == (0, 0)
    assert max(step.args["running"] + step.args["waiting"] for step in steps) == 8


def test_requests_are_whole(traced):
    """Every request is there, from the queue to its last token."""
    requests, metrics = traced.spans("rollout.request"), result(traced.out)["metrics"]
    assert len(requests) == 10
    assert sum(request.args["tokens"] for request in requests) == metrics["vllm:generation_tokens"] == 10 * 40
    assert sum(request.args["prompt_tokens"] for request in requests) == metrics["vllm:prompt_tokens"] == 10 * 4
    steps = traced.spans("engine.step")
    for request in requests:
        assert request.start_ns <= steps[-1].start_ns and steps[0].start_ns <= request.end_ns
        # It waited until the first step that computes it began, and had its first token when one ended.
        assert request.start_ns + request.args["queued_ns"] in {step.start_ns for step in steps}
        assert request.args["queued_ns"] < request.args["first_token_ns"] < request.end_ns - request.start_ns
        assert request.args["cached_tokens"] == 0


def test_steps_in_flight_have_own_lanes(traced):
    """Steps that are in flight at the same time are on different lanes."""
    for step, following in zip(traced.spans("engine.step"), traced.spans("engine.step")[1:], strict=False):
        assert step.task != following.task or step.end_ns <= following.start_ns


def test_engine_and_worker_are_traced(traced):
    """The engine and its worker are traced processes of the program."""
    roles = processes_by_role(traced)
    assert {"engine", "engine_worker"} <= roles.keys()
    program = next(process for process in traced.recording.processes if process.key == roles["engine"].parent)
    assert roles["engine_worker"].parent == roles["engine"].key
    assert program.parent is None and program.hooks
    names = {span.name for span in roles["engine"].events() if hasattr(span, "task")}
    # Collections come when they come, and what vLLM says by OpenTelemetry is of its start-up.
    names = {name for name in names if name != COLLECTION and not name.startswith(OPENTELEMETRY)}
    assert names == {"engine.step", "rollout.request"}
    assert {"rollout.load", "rollout.reserve_kv"} <= {
        span.name for span in roles["engine_worker"].events() if hasattr(span, "task")
    }


class Named(PatchSet):
    """Hooks that are named and bound nowhere."""

    def _when_imported(self, _hook, _bind):
        pass


def targets_of(instrumentation):
    """Every target that an instrumentation names at once; modules that it waits for are none."""
    patches = Named(instrumentation.name, register=None)
    instrumentation.install(patches)
    return {hook.target for hook in patches.hooks if ":" in hook.target}


def test_every_hook_is_installed(traced):
    """Every hook of these processes is installed."""
    hooks = {target: hook for target, hook in traced.hooks().items() if hook["instrumentation"] == "vllm"}
    assert set(hooks) >= targets_of(Vllm()) - targets_of(VllmCalls())  # one target is both's
    assert {(hook["state"], hook["reason"]) for hook in hooks.values()} == {("installed", None)}


UNDO = """
    import importlib, inspect, json, sys
    from rltrace import instrument
    from rltrace.record import spans

    installed = instrument.install(spans.current())
    targets = [hook.target for hook in installed.patch_sets["vllm"].hooks]

    def standing():
        found = {}
        for target in targets:
            module, _, path = target.partition(":")
            owner, _, attr = path.rpartition(".")
            imported = importlib.import_module(module)
            raw = inspect.getattr_static(getattr(imported, owner) if owner else imported, attr)
            found[target] = getattr(raw, "__func__", raw)
        return found

    bound = standing()
    left = installed.undo()

    def wrapped(hooked):  # more than one instrumentation may wrap it
        while (hooked := getattr(hooked, "__wrapped__", None)) is not None:
            yield hooked

    undone = all(found in wrapped(bound[target]) for target, found in standing().items())
    print("RESULT " + json.dumps([len(bound), left, undone]))
"""


def test_hooks_bind_to_real_vllm(vllm_environment, tmp_path):
    """The hooks bind to the real vLLM and are undone."""
    assert result(trace(vllm_environment, tmp_path, UNDO, **VARIABLES).out) == [len(targets_of(Vllm())), [], True]


def test_the_contracts_hold_for_the_real_package(vllm_environment):
    """Every hook binds, keeps the face of what it wraps, and is undone."""
    done = run_contracts(vllm_environment, "vllm")
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]

"""SGLang's real engine on a CPU, in its real processes: the program, the scheduler below it, and the detokenizer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from framework_runs import TIMEOUT_SECONDS, result, result_of_bare, run_contracts, trace

from rltrace.events import Span

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

# It answers, sleeps, wakes, gets weights that make another answer, and answers.
PROGRAM = """
    import json
    import time

    def main():
        import sglang
        import torch
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        )
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained("model")
        engine = sglang.Engine(
            model_path="model", device="cpu", attention_backend="torch_native", sampling_backend="pytorch",
            skip_tokenizer_init=True, disable_cuda_graph=True, max_total_tokens=2048, log_level="error",
        )

        def answers():
            prompts = [[1 + number, 2, 3, 4] for number in range(6)]
            sampling = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0}
            return [answer["output_ids"] for answer in engine.generate(input_ids=prompts, sampling_params=sampling)]

        def become_idle():  # its last batch is under way when the last answer is here, and weights cannot come then
            while not engine.flush_cache().success:
                time.sleep(0.1)

        before = answers()
        become_idle()
        engine.release_memory_occupation(tags=["kv_cache", "weights"])
        engine.resume_memory_occupation(tags=["weights"])
        others = [(name, torch.roll(weight, 1, 0)) for name, weight in model.state_dict().items()]
        for at in range(0, len(others), 10):
            engine.update_weights_from_tensor(others[at : at + 10])
        engine.resume_memory_occupation(tags=["kv_cache"])
        said = {"before": before, "after": answers(), "bytes": sum(weight.nbytes for _, weight in others)}
        flattened = FlattenedTensorBucket(named_tensors=list(model.state_dict().items()))
        bucket = {"flattened_tensor": flattened.get_flattened_tensor(), "metadata": flattened.get_metadata()}
        serialized = [MultiprocessingSerializer.serialize(bucket)]
        become_idle()
        engine.update_weights_from_tensor(serialized, load_format="flattened_bucket")
        print("RESULT " + json.dumps(said | {"tensors": len(others), "again": answers()}))
        engine.shutdown()

    if __name__ == "__main__":
        main()
"""
# SGLang's own counting of what a draft got right, where the model and its draft, which need a GPU, say it: three
# requests, of each three tokens are guessed for a verification, which accepts one more than was right.
SPECULATION = """
    import json
    from types import SimpleNamespace

    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler_output_processor_mixin import SchedulerOutputProcessorMixin
    from sglang.srt.managers.utils import GenerationBatchResult
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from rltrace.instrument.sglang.speculation import Guesses

    requests = [Req(str(number), "", [1, 2, 3], SamplingParams(max_new_tokens=64)) for number in range(3)]
    batch = SimpleNamespace(reqs=requests)
    server_args = SimpleNamespace(speculative_num_draft_tokens=4)
    scheduler = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.EAGLE, server_args=server_args,
        model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *_: None),
    )
    guesses = Guesses()
    said = [guesses.of(scheduler, batch, GenerationBatchResult())]  # the batch of the prompts
    for accepted in ([1, 2, 4], [4, 4, 1], [1, 1, 1]):
        result = GenerationBatchResult(
            next_token_ids=torch.arange(12), accept_lens=torch.tensor(accepted), speculative_num_draft_tokens=4
        )
        SchedulerOutputProcessorMixin._resolve_spec_overlap_tokens(scheduler, result, batch)
        said.append(guesses.of(scheduler, batch, result))
    counted = [(request.spec_verify_ct, request.spec_num_correct_drafts) for request in requests]
    print("RESULT " + json.dumps({"said": said, "counted": counted}))
"""
HERE = Path(__file__).parent
ABSENT = (HERE / "sglang_absent", HERE.parent / "absent")
VARIABLES = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(map(str, ABSENT))}


@pytest.fixture(scope="module")
def traced(sglang_environment, tmp_path_factory):
    return trace(sglang_environment, tmp_path_factory.mktemp("traced"), PROGRAM, **VARIABLES)


@pytest.fixture(scope="module")
def bare(sglang_environment, tmp_path_factory):
    return result_of_bare(sglang_environment, tmp_path_factory.mktemp("bare"), PROGRAM, **VARIABLES)


def scheduler_of(run):
    (found,) = [process for process in run.recording.processes if process.name == "scheduler 0"]
    return found


def spans_of(run):
    """The scheduler's, in order."""
    spans = [event for event in scheduler_of(run).events() if isinstance(event, Span)]
    return sorted(spans, key=lambda span: span.start_ns)


def named(run, name):
    return [span for span in spans_of(run) if span.name == name]


def test_tracing_keeps_sglangs_answers(traced, bare):
    """Tracing does not change what SGLang answers."""
    assert result(traced.out) == bare
    assert bare["before"] == bare["again"] != bare["after"]  # the new weights came, and then the old ones


def test_each_process_says_which_it_is(traced):
    names = [process.name for process in traced.recording.processes]
    assert names.count("scheduler 0") == names.count("detokenizer") == 1
    assert scheduler_of(traced).role == "engine"
    assert scheduler_of(traced).device["uuid"] == "cpu-0"


def test_start_up_is_in_phases(traced):
    phases = [span.name for span in spans_of(traced) if span.args.get("phase")]
    assert phases[:3] == ["rollout.load", "rollout.reserve_kv", "rollout.capture"]


def test_every_token_is_of_a_batch(traced):
    steps = named(traced, "engine.step")
    # Of each answer the prompt's four tokens and 15 of 16, for the last one is not computed with; and one token more:
    # when an answer is seen to be whole, the next batch has begun.
    assert sum(step.args["tokens"] for step in steps) == 3 * 6 * (4 + 15 + 1)
    assert max(step.args["running"] for step in steps) == 6
    assert {step.args["waiting"] for step in steps} == {0}


def test_every_request_is_whole(traced):
    """Each is there once, from the queue to its last token: of three batches of six prompts."""
    requests, steps = named(traced, "rollout.request"), named(traced, "engine.step")
    assert len(requests) == 3 * 6
    assert {(request.args["prompt_tokens"], request.args["tokens"]) for request in requests} == {(4, 16)}
    for request in requests:
        length_ns = request.end_ns - request.start_ns
        assert 0 <= request.args["queued_ns"] < request.args["first_token_ns"] < length_ns
        # It waited until the batch of its prompt began, and had its token when a batch was processed.
        assert request.start_ns + request.args["queued_ns"] in {step.start_ns for step in steps}
    assert len({request.args["request_id"] for request in requests}) == len(requests)


def test_prefixes_of_prompts_are_found_again(traced):
    """The tokens of a prompt that were computed before: none at first, nor with other weights in between."""
    requests = named(traced, "rollout.request")
    assert [request.args["cached_tokens"] for request in requests[:6]] == [0] * 6
    assert all(0 <= request.args["cached_tokens"] < 4 for request in requests)


def test_batches_say_how_full_the_cache_is(traced):
    """Of 2,048 tokens six requests have at most twenty each."""
    usage = [step.args["kv_usage"] for step in named(traced, "engine.step")]
    assert 0 < max(usage) <= 6 * 22 / 2048 and min(usage) >= 0
    assert {step.args["preempted"] for step in named(traced, "engine.step")} == {0}


def test_sleeps_and_wake_ups_have_tags(traced):
    """Sleep and wake-up are phases with their tags."""
    names = ("rollout.sleep", "rollout.wake_weights", "rollout.wake_kv_cache")
    said = [(span.name, span.args["tags"]) for span in spans_of(traced) if span.name in names]
    tags = (["kv_cache", "weights"], ["weights"], ["kv_cache"])
    assert said == list(zip(names, tags, strict=True))


def test_an_update_is_in_buckets_with_all_bytes(traced):
    loads, said = named(traced, "weight_sync.load"), result(traced.out)
    assert {load.args["source"] for load in loads} == {"tensor"}
    *one_by_one, flattened = loads
    assert [load.args["tensors"] for load in one_by_one] == [
        min(10, said["tensors"] - at) for at in range(0, said["tensors"], 10)
    ]
    assert sum(load.args["bytes"] for load in one_by_one) == said["bytes"]
    assert (flattened.args["tensors"], flattened.args["bytes"]) == (said["tensors"], said["bytes"])
    assert len({load.args["bucket"] for load in loads}) == len(loads)
    elsewhere = [process for process in traced.recording.processes if process.name != "scheduler 0"]
    assert not [event for process in elsewhere for event in process.events() if event.name == "weight_sync.load"]


def test_batches_say_what_was_guessed_and_accepted(sglang_environment, tmp_path):
    """What the batches say adds up to what SGLang's requests have counted."""
    found = result_of_bare(sglang_environment, tmp_path, SPECULATION, **VARIABLES)
    of_prompts, *said = found["said"]
    assert of_prompts == {}
    assert [batch["accepted"] for batch in said] == [0 + 1 + 3, 3 + 3 + 0, 0]
    verifications, right = (sum(of_requests) for of_requests in zip(*found["counted"], strict=True))
    assert sum(batch["drafted"] for batch in said) == verifications * 3 == 27
    assert sum(batch["accepted"] for batch in said) == right == 10


def test_contracts_hold_for_real_sglang(sglang_environment):
    """Every hook binds, keeps the face of what it wraps, and is undone."""
    done = run_contracts(sglang_environment, "sglang", **VARIABLES)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout, done.stdout[-2000:]

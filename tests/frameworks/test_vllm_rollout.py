"""A rollout with tools in asyncio on vLLM's real engine: what the program times itself is what rltrace says."""

from __future__ import annotations

import pytest
from framework_runs import TIMEOUT_SECONDS, result, trace

from rltrace.analysis.summary import summarize

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

# Two steps of four prompts with two samples each. A sample has two or three turns, and two tools at a time between them
# in tasks of their own; each turn's prompt is all that was before.
PROGRAM = """
    import asyncio, json, time

    import rltrace

    PROMPTS, SAMPLES, PROMPT_TOKENS, TOKENS, TOOL_SECONDS = 4, 2, 64, 8, (0.02, 0.05)

    async def main():
        from transformers import Qwen3Config
        from vllm import SamplingParams
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        Qwen3Config(
            vocab_size=2048, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=512, architectures=["Qwen3ForCausalLM"],
        ).save_pretrained("model")
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
            "model", skip_tokenizer_init=True, load_format="dummy", seed=0, max_model_len=256, dtype="bfloat16",
            enforce_eager=True, num_gpu_blocks_override=64, block_size=32, max_num_seqs=4, enable_prefix_caching=True,
            disable_log_stats=False,
        ))
        said = []

        async def answer(prompt, name):
            sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
            begin, first, output = time.perf_counter(), None, None
            async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
                first = first or time.perf_counter() - begin
            own["requests"].append((time.perf_counter() - begin, first, len(prompt)))
            return list(output.outputs[0].token_ids)

        async def call(tool, seconds, trajectory):
            with rltrace.span("tool", tool=tool, trajectory=trajectory):
                await asyncio.sleep(seconds)
            return [7, 8, 9, 10]

        async def converse(step, prompt, sample):
            name = f"{step}.{prompt}.{sample}"
            text = [1 + prompt + at % (7 + prompt) + 100 * step for at in range(PROMPT_TOKENS)]
            begin = time.perf_counter()
            with rltrace.span("trajectory", trajectory=name, prompt=f"{step}.{prompt}"):
                for turn in range(2 + sample):
                    text = text + await answer(text, f"{name}.{turn}")
                    called = [call(tool, seconds, name) for tool, seconds in zip(("search", "python"), TOOL_SECONDS)]
                    text = text + sum(await asyncio.gather(*called), [])
            own["trajectories"].append(time.perf_counter() - begin)

        await asyncio.sleep(0)
        for step in range(2):
            own = {"requests": [], "trajectories": []}
            with rltrace.span("step", step=step):
                running = [converse(step, p, s) for p in range(PROMPTS) for s in range(SAMPLES)]
                await asyncio.gather(*running)
            said.append(own)
        print("RESULT " + json.dumps(said))
        engine.shutdown()

    if __name__ == "__main__":
        asyncio.run(main())
"""
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
TURNS = 4 * (2 + 3)
SLACK_SECONDS = 0.05
"""Of two clocks' readings around the same call, on a machine that others use too."""


@pytest.fixture(scope="module")
def traced(vllm_environment, tmp_path_factory):
    run = trace(vllm_environment, tmp_path_factory.mktemp("traced"), PROGRAM, **VARIABLES)
    return summarize(run.recording), result(run.out)


def test_every_turn_and_tool_is_of_a_trajectory(traced):
    """Two or three turns of each, and two tools behind each turn, though these have tasks of their own."""
    summary, own = traced
    assert [(row.step, row.trajectories, row.requests) for row in summary.rollout_by_step] == [
        (step, 8, TURNS) for step in range(2)
    ]
    for row, said in zip(summary.rollout_by_step, own, strict=True):
        assert (row.distributions["turns"].mean, row.distributions["turns"].maximum) == (2.5, 3)
        assert (row.distributions["trajectory_tokens"].mean, row.distributions["tokens"].maximum) == (20, 8)
        assert [(tool.name, tool.calls, tool.outside) for tool in row.tools] == [
            ("python", TURNS, 0),
            ("search", TURNS, 0),
        ]
        assert row.prompts is not None and (row.prompts.prompts, row.prompts.most_samples) == (4, 2)
        assert len(said["requests"]) == TURNS


def test_lengths_are_what_the_program_timed(traced):
    """Of trajectories, requests and first tokens: median and longest."""
    for row, said in zip(traced[0].rollout_by_step, traced[1], strict=True):
        timed = {
            "trajectory_seconds": sorted(said["trajectories"]),
            "request_seconds": sorted(length for length, _, _ in said["requests"]),
            "first_token_seconds": sorted(first for _, first, _ in said["requests"]),
        }
        for name, values in timed.items():
            found = row.distributions[name]
            assert found.count == len(values)
            assert found.maximum == pytest.approx(values[-1], abs=SLACK_SECONDS), name
            middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
            assert found.p50 == pytest.approx(middle, abs=SLACK_SECONDS), name
        assert row.distributions["prompt_tokens"].maximum == max(tokens for _, _, tokens in said["requests"])


def test_tools_take_what_they_sleep(traced):
    """A trajectory of three turns has 3 x (0.02 + 0.05) s of tools."""
    for row in traced[0].rollout_by_step:
        assert row.distributions["tool_seconds"].maximum == pytest.approx(3 * 0.07, abs=SLACK_SECONDS)


def test_the_engine_makes_some_wait(traced):
    """It computes four requests at a time, and eight are sent at once."""
    for row in traced[0].rollout_by_step:
        assert row.engine is not None and row.engine.most_running == 4 and (row.engine.most_waiting or 0) >= 1
        assert row.distributions["queue_seconds"].maximum > row.distributions["queue_seconds"].p50
        assert max(one.running for one in row.load) <= 4
        assert max(one.waiting or 0.0 for one in row.load) > 0


def test_later_turns_find_their_prefix(traced):
    """Whole blocks of 32 tokens of what a trajectory has said before are not computed again."""
    for row in traced[0].rollout_by_step:
        assert row.engine is not None and row.engine.cached_tokens is not None
        # Twelve later turns, of at least two blocks each, and the prompts of second samples if they came later.
        assert row.engine.cached_tokens >= 12 * 64 and row.engine.cached_tokens % 32 == 0
        assert 0 < (row.engine.cached_share or 0) < 1

"""The context in which `AsyncLLM` is asked, as an actor of a trainer is, is the parent of vLLM's own span."""

from __future__ import annotations

import pytest
from framework_runs import TIMEOUT_SECONDS, result, trace

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

PROGRAM = """
    import asyncio, json, sys

    sys.path.insert(0, TESTS)

    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from tiny_model import write_model

    async def ask(llm, number, sampling):
        with trace.get_tracer("agent").start_as_current_span("trajectory") as span:
            async for answer in llm.generate({"prompt_token_ids": [1 + number, 2]}, sampling, str(number)):
                tokens = len(answer.outputs[0].token_ids)
        return [f"{span.get_span_context().trace_id:032x}", f"{span.get_span_context().span_id:016x}", tokens]

    async def main():
        from vllm import AsyncEngineArgs, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        write_model("model")
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
            "model", max_model_len=64, enforce_eager=True, num_gpu_blocks_override=16, block_size=32, max_num_seqs=4,
            disable_log_stats=False, otlp_traces_endpoint="http://127.0.0.1:1",
        ))
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        print("RESULT " + json.dumps(await asyncio.gather(*(ask(llm, number, sampling) for number in range(3)))))
        llm.shutdown()

    if __name__ == "__main__":
        asyncio.run(main())
"""
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@pytest.fixture(scope="module")
def traced(vllm_environment, tmp_path_factory):
    from environments import HERE

    source = PROGRAM.replace("TESTS", repr(str(HERE)))
    return trace(vllm_environment, tmp_path_factory.mktemp("traced"), source, **VARIABLES)


def test_each_request_is_below_who_asked(traced):
    """Requests that are asked at once are each below their own trajectory."""
    asked = {tuple(known[:2]): known[2] for known in result(traced.out)}
    requests = traced.spans("otel.llm_request")
    found = {(span.args["trace_id"], span.args["parent_id"]) for span in requests}
    assert found == asked.keys()
    assert {span.args["gen_ai.usage.completion_tokens"] for span in requests} == set(asked.values()) == {6}

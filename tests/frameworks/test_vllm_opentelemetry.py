"""vLLM's own traces: an agent with OpenTelemetry's SDK asks `vllm serve` over HTTP, and a collector gets the spans."""

from __future__ import annotations

import json

import pytest
from framework_runs import TIMEOUT_SECONDS, result, trace

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)

PROGRAM = """
    import json, socket, subprocess, sys, time
    from concurrent import futures

    sys.path.insert(0, TESTS)

    import grpc
    import httpx
    from opentelemetry import trace
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
    from opentelemetry.sdk.trace import TracerProvider
    from tiny_model import write_model

    received = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            received.extend(
                span for of in request.resource_spans for scope in of.scope_spans for span in scope.spans
            )
            return trace_service_pb2.ExportTraceServiceResponse()

    def free_port():
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return found.getsockname()[1]

    collector = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), collector)
    otlp = collector.add_insecure_port("127.0.0.1:0")
    collector.start()

    write_model("model")
    port = free_port()
    server = subprocess.Popen([
        # As `vllm serve`, which asks for the version of a package that is not called vllm here.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "model", "--port", str(port),
        "--max-model-len", "64", "--enforce-eager", "--num-gpu-blocks-override", "16", "--block-size", "32",
        "--max-num-seqs", "4", "--otlp-traces-endpoint", f"http://127.0.0.1:{otlp}",
    ])
    url = f"http://127.0.0.1:{port}"
    while True:
        try:
            if httpx.get(url + "/health").status_code == 200:
                break
        except httpx.HTTPError:
            assert server.poll() is None
            time.sleep(0.5)

    trace.set_tracer_provider(TracerProvider())
    asked = []
    for number in range(3):
        with trace.get_tracer("agent").start_as_current_span("trajectory") as span:
            told = {"model": "model", "prompt": "1 2 3", "max_tokens": 5, "ignore_eos": True}
            answer = httpx.post(url + "/v1/completions", json=told, timeout=60)
            answer.raise_for_status()
            asked.append([f"{span.get_span_context().trace_id:032x}", f"{span.get_span_context().span_id:016x}"])
    server.terminate()
    server.wait()
    exported = [
        [span.name, span.trace_id.hex(), span.parent_span_id.hex(), span.span_id.hex(), span.end_time_unix_nano
         - span.start_time_unix_nano] for span in received
    ]
    print("RESULT " + json.dumps({"asked": asked, "exported": exported}))
"""
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


@pytest.fixture(scope="module")
def traced(vllm_environment, tmp_path_factory):
    from environments import HERE

    source = PROGRAM.replace("TESTS", repr(str(HERE)))
    return trace(vllm_environment, tmp_path_factory.mktemp("traced"), source, **VARIABLES)


def test_request_is_in_its_trajectorys_trace(traced):
    """The span of each request is below the trajectory that made it: in the collector, and on the timeline."""
    said = result(traced.out)
    requests = [span for span in said["exported"] if span[0] == "llm_request"]
    assert [[trace_id, parent] for _, trace_id, parent, *_ in requests] == said["asked"]
    recorded = traced.spans("otel.llm_request")
    assert [[span.args["trace_id"], span.args["parent_id"]] for span in recorded] == said["asked"]
    trajectories = traced.spans("otel.trajectory")
    assert [[span.args["trace_id"], span.args["span_id"]] for span in trajectories] == said["asked"]
    for trajectory, request in zip(trajectories, recorded, strict=True):
        assert trajectory.start_ns < request.start_ns < request.end_ns < trajectory.end_ns
        assert request.args["gen_ai.usage.completion_tokens"] == 5
    for exported, request in zip(requests, recorded, strict=True):
        assert exported[3] == request.args["span_id"]
        assert abs(exported[4] - (request.end_ns - request.start_ns)) < 50_000, json.dumps(exported)


def test_start_up_of_every_process(traced):
    """What vLLM says of its start-up is recorded in the process that says it."""
    names = {}
    for process in traced.recording.processes:
        spans = {event.name for event in process.events() if hasattr(event, "end_ns")}
        names[process.role] = names.get(process.role, set()) | {name for name in spans if name.startswith("otel.")}
    assert "otel.Load model" in names["engine_worker"]
    assert "otel.EngineCoreProc init" in names["engine"]

"""What the rollout's figures cost: the engines' hooks a step, and the summary of a run with many requests.

python tests/bench/rollout.py [TRAJECTORIES]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from recordings import SECOND, Written, span

import rltrace
from rltrace.analysis.observations import Observations
from rltrace.analysis.rollout import rollouts
from rltrace.analysis.steps import StepWindows
from rltrace.host.clock import now_ns
from rltrace.instrument.sglang.requests import SchedulerRequests as SglangRequests
from rltrace.instrument.vllm.engine import SchedulerRequests as VllmRequests
from rltrace.instrument.vllm.engine import Steps

RUNNING = 256
REPEATS = 2000
TURNS, TOOLS, STEPS, ENGINES = 2, 2, 10, 8


def microseconds(function: Callable[[], Any], repeats: int = REPEATS) -> float:
    """The least of five means."""
    means = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            function()
        means.append((time.perf_counter() - begin) / repeats * 1e6)
    return min(means)


def of_vllm() -> tuple[float, float]:
    """Microseconds of a step of requests that all decode, with the span; and of one request's whole way."""
    requests = VllmRequests()
    asked = [
        SimpleNamespace(request_id=f"{number}", num_prompt_tokens=100, num_output_tokens=9) for number in range(RUNNING)
    ]
    scheduler = SimpleNamespace(
        running=asked, waiting=[], requests={one.request_id: one for one in asked},
        kv_cache_manager=SimpleNamespace(usage=0.5),
    )  # fmt: skip
    steps = Steps(requests.in_flight)
    for one in asked:
        requests.begin(one, None, None)
        requests.in_flight.scheduled(one.request_id, now_ns(), 0)
        requests.in_flight.has_token(one.request_id)

    def step() -> None:
        output = SimpleNamespace(total_num_scheduled_tokens=1, scheduled_new_reqs=[], preempted_req_ids=None)
        steps.keep_output((now_ns(), scheduler, None), output, None)
        steps.end(steps.find_output((scheduler, output), {}), None, None)

    other = SimpleNamespace(request_id="other", num_prompt_tokens=100, num_output_tokens=9)

    def request() -> None:
        requests.begin(other, None, None)
        requests.in_flight.scheduled("other", now_ns(), 0)
        requests.in_flight.has_token("other")
        requests.end(other, None, None)

    return microseconds(step), microseconds(request)


def of_sglang() -> float:
    """Microseconds of a batch of requests that all decode, beside its span."""
    requests = SglangRequests()
    asked = [SimpleNamespace(rid=f"{n}", finished_reason=None, output_ids=[1], cached_tokens=0) for n in range(RUNNING)]
    batch = SimpleNamespace(reqs=asked)
    for one in asked:
        requests.begin(one, None, None)
    requests.scheduled(batch, now_ns())
    requests.processed(batch)
    return microseconds(lambda: requests.processed(batch))


def many(folder: Path, trajectories: int) -> tuple[int, float, float]:
    """Spans of a made run, and seconds until they are read and until their rollouts are computed."""
    run, seconds = Written(folder), 100
    steps = [span("step", seconds * step, seconds * (step + 1), step=step) for step in range(STEPS)]
    run.process("driver", *steps, role="driver", ended_s=seconds * STEPS + 1)
    workers = max(1, trajectories // 1000)  # so that no segment is larger than a recorder makes them
    agents: list[list[Any]] = [[] for _ in range(workers)]
    engines: list[list[Any]] = [[] for _ in range(ENGINES)]
    for number in range(trajectories):
        start_s = seconds * (number % STEPS) + number % 37 / 10
        task = number + 1
        begin_ns = round(start_s * SECOND) + number * 1000  # no two spans of a thread begin at once
        own = {"trajectory": f"{number}", "sample_index": number // 8, "rollout_n": number % 8, "step": number % STEPS}
        agents[number % workers] += [
            ["agent_loop.trajectory", task, begin_ns, own, True],
            [begin_ns, begin_ns + 50 * SECOND, None, True],
        ]
        for turn in range(TURNS):
            at_ns = begin_ns + (turn * 20 + 1) * SECOND
            asked = {"request_id": f"{number}.{turn}", "trajectory": f"{number}", "tokens": 100, "prompt_tokens": 50}
            agents[number % workers] += [
                ["agent_loop.request", task, at_ns, asked, True],
                [at_ns, at_ns + 9 * SECOND, None, True],
            ]
            took = {**asked, "queued_ns": 10**6, "first_token_ns": 10**8, "cached_tokens": 32}
            engines[number % ENGINES].append(["rollout.request", turn, at_ns + 10, at_ns + 8 * SECOND, took, True])
            for tool in range(TOOLS):
                tool_ns = at_ns + (10 + tool) * SECOND
                said = {"tool": "search", "trajectory": f"{number}"}
                place = 10**9 + number * 10 + turn * TOOLS + tool
                agents[number % workers] += [
                    ["agent_loop.tool_call", place, tool_ns, said, True],
                    [tool_ns, tool_ns + SECOND, None, True],
                ]
    for worker, of_worker in enumerate(agents):
        run.process(f"agents{worker}", of_worker, role="agents", ended_s=seconds * STEPS + 1)
    for rank, of_engine in enumerate(engines):
        run.process(f"engine{rank}", of_engine, role="engine", rank=rank, ended_s=seconds * STEPS + 1)
    begin = time.process_time()
    seen = Observations(run.read())
    read = time.process_time()
    found = rollouts(seen, StepWindows(seen)).steady
    assert found is not None and found.trajectories == trajectories * (STEPS - 1) // STEPS
    assert found.distributions["turns"].mean == TURNS and found.distributions["tool_seconds"].mean == TURNS * TOOLS
    return trajectories * (1 + TURNS * (2 + TOOLS)), read - begin, time.process_time() - read


def main(trajectories: int) -> None:
    """Print all of it."""
    with tempfile.TemporaryDirectory() as folder:
        rltrace.start(Path(folder) / "hooks")
        step, request = of_vllm()
        print(f"vLLM: {step:.2f} µs a step of {RUNNING} that decode, {request:.2f} µs a request")
        print(f"SGLang: {of_sglang():.2f} µs a batch of {RUNNING} that decode, beside its span")
        rltrace.stop()
        spans, read, computed = many(Path(folder) / "many", trajectories)
        print(
            f"{trajectories:,} trajectories, {spans:,} spans: read in {read:.2f} s, rollouts in {computed:.2f} s (CPU)"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)

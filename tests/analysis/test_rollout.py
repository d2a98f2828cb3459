"""The rollout's figures: percentiles, tail, balance, prompts, tools, and what crosses the edges of steps and runs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted_runs import PlantedRun
from recordings import SECOND, Written, span
from rich.console import Console
from shipped import QWEN, VERL, summary_of

from rltrace.analysis import Summary, summarize
from rltrace.analysis.distributions import Distribution
from rltrace.analysis.findings import why
from rltrace.analysis.rollout import StepRollout
from rltrace.analysis.summary import analyse
from rltrace.cli.tables import show

Records = list[list[Any]]


def on_task(name: str, start_s: float, end_s: float | None, task: int, **args: Any) -> Records:
    """Records of a span of an asyncio task."""
    start_ns = round(start_s * SECOND)
    begin: Records = [[name, task, start_ns, args, True]]
    return begin if end_s is None else [*begin, [start_ns, round(end_s * SECOND), None, True]]


def request(start_s: float, end_s: float, number: int = 0, **args: Any) -> Records:
    """Records of an engine's request."""
    return span("rollout.request", start_s, end_s, request_id=f"r{number}", **args)


def written(
    folder: Path, *records: Records, steps: int = 1, seconds: float = 100, engines: tuple[list[Records], ...] = ()
) -> Summary:
    """Figures of a run of steps from 0 on; what a process of agents wrote, and what its engines wrote."""
    run, ended_s = Written(folder), steps * seconds + 1
    marked = [span("step", number * seconds, (number + 1) * seconds, step=number) for number in range(steps)]
    run.process("driver", *marked, role="driver", ended_s=ended_s)
    run.process("agents", *records, role="agents", name="agents", ended_s=ended_s)
    for rank, of_engine in enumerate(engines):
        run.process(f"engine{rank}", *of_engine, role="engine", rank=rank, ended_s=ended_s)
    return summarize(run.read())


def of_step(summary: Summary, step: int | None) -> StepRollout:
    (found,) = [row for row in summary.rollout_by_step if row.step == step]
    return found


def printed(summary: Summary) -> str:
    console = Console(width=200, file=io.StringIO())
    show(summary, console, whole=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- requests ---------------------------------------------------------------------------------------------------


def test_percentiles_are_exact(tmp_path: Path) -> None:
    """Those of a hundred and one lengths from 1 to 10.1 s, of all figures of a request."""
    records = [
        request(
            0.01 * n, 0.01 * n + 1 + 0.1 * n, n, queued_ns=n * 10**6, first_token_ns=(n + 100) * 10**6,
            prompt_tokens=n, tokens=n + 2,
        )
        for n in range(101)
    ]  # fmt: skip
    found = of_step(written(tmp_path, engines=(records,)), 0).distributions
    expected = {
        "request_seconds": [1 + 0.1 * n for n in range(101)],
        "queue_seconds": [n / 1000 for n in range(101)],
        "first_token_seconds": [(n + 100) / 1000 for n in range(101)],
        "prompt_tokens": list(range(101)),
        "tokens": [n + 2 for n in range(101)],
        "decode_tokens_per_second": [(n + 1) / (1 + 0.1 * n - (n + 100) / 1000) for n in range(101)],
    }
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        p50, p95, p99 = np.percentile(values, (50, 95, 99))
        assert found[name] == Distribution(
            count=101,
            mean=pytest.approx(np.mean(values)),
            p50=pytest.approx(p50),
            p95=pytest.approx(p95),
            p99=pytest.approx(p99),
            maximum=pytest.approx(max(values)),
        ), name
    assert found["request_seconds"].p50 == 6 and found["queue_seconds"].p99 == pytest.approx(0.099)


def test_one_request(tmp_path: Path) -> None:
    """All percentiles are its length, nothing is said of a tail, and one token has no speed."""
    found = of_step(written(tmp_path, engines=([request(1, 3, first_token_ns=2 * SECOND, tokens=1)],)), 0)
    assert found.distributions["request_seconds"] == Distribution(count=1, mean=2, p50=2, p95=2, p99=2, maximum=2)
    assert (found.seconds, found.requests, found.tail) == (2, 1, None)
    assert "decode_tokens_per_second" not in found.distributions | found.unknown
    assert "20" in found.unknown["tail"]
    assert found.unknown["queue_seconds"] == "no engine said so"


def test_a_step_without_requests(tmp_path: Path) -> None:
    """It is there with zeros, is named, and counts in no mean."""
    summary = written(tmp_path, steps=4, engines=([request(1, 3), request(101, 105, 1), request(301, 307, 2)],))
    empty = of_step(summary, 2)
    assert (empty.seconds, empty.requests, empty.distributions, empty.load, empty.balance) == (None, 0, {}, [], None)
    assert summary.rollout is not None
    assert (summary.rollout.steps, summary.rollout.steps_without) == ([1, 3], [2])
    assert summary.rollout.seconds == 5
    assert "1 steady step without any: 2" in printed(summary)


def test_no_rollout(tmp_path: Path) -> None:
    """A run without requests and trajectories has none, and says nothing of one."""
    summary = written(tmp_path, span("load_batch", 1, 2))
    assert (summary.rollout, summary.rollout_by_step) == (None, [])
    assert "Rollout" not in printed(summary)


def test_requests_across_steps(tmp_path: Path) -> None:
    """A request counts with all of its length in the step in which it began."""
    records = [request(10, 250, 0), request(110, 120, 1), request(190, 210, 2)]
    summary = written(tmp_path, steps=3, engines=(records,))
    first, second, third = summary.rollout_by_step
    assert (first.requests_ended_later, first.requests_carried_over) == (1, 0)
    assert (second.requests_ended_later, second.requests_carried_over) == (1, 1)
    assert (third.requests, third.requests_carried_over) == (0, 2)
    assert first.distributions["request_seconds"].maximum == 240 and first.seconds == 240
    assert summary.rollout is not None and summary.rollout.requests_carried_over == 1  # of step 1 alone: 2 has none
    assert (
        "outlasting their step, where all of their length counts: 1 request; in flight when a step began: 1"
        in printed(summary)
    )


def test_requests_in_flight_at_the_end(tmp_path: Path) -> None:
    """They are counted, are in no percentile, and are said."""
    records = [
        on_task("agent_loop.request", 1, 3, 1, request_id="a"),
        on_task("agent_loop.request", 2, None, 2, request_id="b"),
        on_task("trajectory", 1, None, 2),
    ]
    summary = written(tmp_path, *records)
    found = of_step(summary, 0)
    assert (found.requests, found.requests_not_over, found.seconds) == (2, 1, 2)
    assert (found.trajectories, found.trajectories_not_over) == (1, 1)
    assert found.distributions["request_seconds"].count == 1 and "trajectory_seconds" not in found.distributions
    assert "not over at the end of the Recording, and in no distribution: 1 trajectory, 1 request" in printed(summary)


def test_requests_before_and_between_steps(tmp_path: Path) -> None:
    """They have a row of their own."""
    run = Written(tmp_path)
    run.process("driver", span("step", 10, 20, step=0), role="driver", ended_s=30)
    run.process("engine", request(1, 2, 0), request(11, 14, 1), role="engine", ended_s=30)
    summary = summarize(run.read())
    assert [(row.step, row.requests, row.seconds) for row in summary.rollout_by_step] == [(None, 1, 1), (0, 1, 3)]


def test_some_requests_do_not_say(tmp_path: Path) -> None:
    records = [request(1, 3, 0, tokens=5), request(1, 4, 1, queued_ns=SECOND), request(1, 4, 2)]
    found = of_step(written(tmp_path, engines=(records,)), 0)
    assert found.distributions["queue_seconds"].count == 1
    assert found.unknown["queue_seconds"] == "2 of 3 requests do not say"
    assert found.unknown["tokens"] == "2 of 3 requests do not say"


def test_damaged_figures_are_left_out(tmp_path: Path) -> None:
    records = [request(1, 3, 0, tokens="many", first_token_ns=2**63, queued_ns=10**9)]
    found = of_step(written(tmp_path, engines=(records,)), 0)
    assert found.distributions.keys() == {"request_seconds", "queue_seconds"}


# ---- the tail and the engines -----------------------------------------------------------------------------------


def test_tail_is_the_findings(tmp_path: Path) -> None:
    """The rollout's tail is the one that the finding prices."""
    planted = PlantedRun(tmp_path)
    planted.tail = 1.5
    analysed = analyse(planted.write().read())
    (finding,) = [one for one in why(analysed).findings if one.id == "rollout_tail"]
    assert analysed.summary.rollout is not None and analysed.summary.rollout.tail is not None
    tail = analysed.summary.rollout.tail
    assert tail.of == "last engine"
    assert tail.seconds == pytest.approx(finding.seconds_per_step)
    assert tail.without_seconds == pytest.approx(finding.evidence.figures["rollout_seconds"] - tail.seconds)


def test_without_the_slowest(tmp_path: Path) -> None:
    """Of 40 requests that end each second, and 2 that take 30 s more, the rollout without the slowest 5 % is known."""
    records = [request(0, 1 + n, n) for n in range(38)] + [request(0, 68 + n, 40 + n) for n in range(2)]
    tail = of_step(written(tmp_path, engines=(records,)), 0).tail
    assert tail is not None and (tail.without_seconds, tail.seconds) == (38, 31)


def test_few_requests_of_each_engine(tmp_path: Path) -> None:
    """Then the requests of all engines are compared."""
    engines = tuple([request(0, 1 + n, n) for n in range(rank, 24, 4)] for rank in range(4))
    found = of_step(written(tmp_path, engines=engines), 0)
    assert found.tail is not None and found.tail.of == "all engines"
    assert (found.tail.without_seconds, found.tail.seconds) == (22, 2)


def test_balance_of_engines(tmp_path: Path) -> None:
    """Tokens and times of each engine, in each step and in all of them."""
    engines = (
        [request(1, 5, 0, tokens=30), request(101, 105, 1, tokens=30)],
        [request(1, 9, 2, tokens=90), request(101, 104, 3, tokens=10)],
    )
    summary = written(tmp_path, steps=2, engines=engines)
    balance = of_step(summary, 0).balance
    assert balance is not None
    assert (balance.unit, balance.least, balance.mean, balance.most) == ("tokens", 30, 60, 90)
    assert (balance.most_over_mean, balance.last_engine) == (1.5, "rank 1")
    assert (balance.first_done_seconds, balance.last_done_seconds) == (4, 8)
    assert summary.rollout is not None
    shares = {share.engine: share for share in summary.rollout.engines}
    assert (shares["rank 0"].requests, shares["rank 0"].tokens, shares["rank 0"].times_last) == (1, 30, 1)
    assert (shares["rank 1"].tokens, shares["rank 1"].seconds, shares["rank 1"].times_last) == (10, 3, 0)


def test_an_idle_engine_counts(tmp_path: Path) -> None:
    """An engine without requests has no part of the rollout."""
    engines = ([request(1, 5, 0, tokens=30), request(101, 105, 1, tokens=30)], [request(1, 9, 2, tokens=90)])
    balance = of_step(written(tmp_path, steps=2, engines=engines), 1).balance
    assert balance is not None and (balance.engines, balance.least, balance.most_over_mean) == (2, 0, 2)
    assert balance.first_done_seconds == balance.last_done_seconds == 4


def test_what_engines_say(tmp_path: Path) -> None:
    """Preemptions, prefix hits, drafts, and how full the cache is."""
    steps = [
        span("engine.step", 1, 2, running=3, waiting=4, preempted=1, kv_usage=0.5, drafted=10, accepted=7),
        span("engine.step", 2, 3, running=5, waiting=0, preempted=0, kv_usage=0.25, drafted=10, accepted=2),
        span("engine.step", 101, 102, running=9, waiting=9, preempted=9, kv_usage=1.0),
    ]
    asked = [request(1, 3, n, prompt_tokens=100, cached_tokens=64 * n) for n in range(2)]
    found = of_step(written(tmp_path, steps=2, engines=([*steps, *asked],)), 0).engine
    assert found is not None
    assert (found.preempted, found.drafted_tokens, found.accepted_tokens) == (1, 20, 9)
    assert (found.cached_tokens, found.cached_share) == (64, 0.32)
    assert (found.most_running, found.most_waiting, found.most_kv_cache_share) == (5, 4, 0.5)


def test_load_over_time(tmp_path: Path) -> None:
    """Of two requests of 20 s the second one waits for 5; a third from 15 s on has waited for 1."""
    records = [
        request(0, 20, 0, queued_ns=0),
        request(0, 20, 1, queued_ns=5 * SECOND),
        request(15, 19, 2, queued_ns=SECOND),
        span("engine.step", 0, 0.5, kv_usage=0.25),
        span("engine.step", 0.5, 0.9, kv_usage=0.75),
    ]
    load = of_step(written(tmp_path, engines=(records,)), 0).load
    assert [one.seconds for one in load] == list(range(20))
    assert [one.waiting for one in load] == pytest.approx([1] * 5 + [0] * 10 + [1] + [0] * 4)
    assert [one.running for one in load] == pytest.approx([1] * 5 + [2] * 11 + [3] * 3 + [2])
    assert [(one.kv_cache_share, one.most_kv_cache_share) for one in load] == [(0.5, 0.75)] + [(None, None)] * 19


# ---- trajectories -----------------------------------------------------------------------------------------------


def conversation(at_s: float, task: int, trajectory: str, prompt: str, turns: int) -> list[Records]:
    """A trajectory whose turns take 2 s, each with a tool of 1 s behind it that runs in a task of its own."""
    records = [on_task("trajectory", at_s, at_s + 3 * turns, task, trajectory=trajectory, prompt=prompt)]
    for turn in range(turns):
        begin_s = at_s + 3 * turn
        records.append(on_task("agent_loop.request", begin_s, begin_s + 2, task, request_id=trajectory, tokens=10))
        called = {"tool": "search", "trajectory": trajectory}
        records.append(on_task("tool", begin_s + 2, begin_s + 3, 1000 + task * 10 + turn, **called))
    return records


def test_turns_and_tools_of_trajectories(tmp_path: Path) -> None:
    """Turns are joined by their task, tools by the id, whatever task they run in."""
    records = [*conversation(1, 1, "a", "p", 1), *conversation(1, 2, "b", "p", 3), *conversation(50, 3, "c", "q", 2)]
    found = of_step(written(tmp_path, *records), 0)
    assert (found.trajectories, found.requests) == (3, 6)
    said = {name: (of.mean, of.maximum) for name, of in found.distributions.items()}
    assert said["turns"] == said["tool_seconds"] == (2, 3)
    assert said["trajectory_seconds"] == (6, 9)
    assert said["trajectory_tokens"] == (20, 30)
    (tool,) = found.tools
    assert (tool.name, tool.calls, tool.not_over, tool.outside) == ("search", 6, 0, 0)
    assert tool.seconds is not None and tool.seconds.maximum == 1


def test_samples_of_one_prompt(tmp_path: Path) -> None:
    """A prompt is done when its last sample is."""
    records = [*conversation(1, 1, "a", "p", 1), *conversation(1, 2, "b", "p", 3), *conversation(50, 3, "c", "q", 2)]
    groups = of_step(written(tmp_path, *records), 0).prompts
    assert groups is not None
    assert (groups.prompts, groups.least_samples, groups.most_samples) == (2, 1, 2)
    assert (groups.seconds.maximum, groups.seconds.mean) == (9, 7.5)
    assert (groups.waiting_seconds.maximum, groups.waiting_seconds.mean) == (6, 3)


def test_prompts_by_vllms_ids(tmp_path: Path) -> None:
    """vLLM numbers the samples of one prompt in the ids of its requests."""
    records = [
        span("rollout.request", 0, 1 + sample + prompt, request_id=f"{sample}_{prompt}-{prompt:x}")
        for prompt in range(3)
        for sample in range(4)
    ]
    groups = of_step(written(tmp_path, engines=(records,)), 0).prompts
    assert groups is not None and (groups.prompts, groups.least_samples, groups.most_samples) == (3, 4, 4)
    assert groups.waiting_seconds.p50 == 3


def test_equal_ids_in_two_processes(tmp_path: Path) -> None:
    """Of two trajectories of one id the one of the tool's process counts; a tool elsewhere joins the last one."""
    run = Written(tmp_path)
    for name, begin_s in (("one", 1), ("other", 2)):
        records = [
            on_task("trajectory", begin_s, 20, 1, trajectory="0"),
            on_task("tool", 5, 6 if name == "one" else 8, 2, trajectory="0"),
        ]
        run.process(name, *records, role=name, ended_s=30)
    run.process("sandbox", on_task("tool", 10, 14, 3, trajectory="0"), role="sandbox", ended_s=30)
    found = summarize(run.read()).rollout
    assert found is not None
    assert found.distributions["tool_seconds"].count == 2
    assert (found.distributions["tool_seconds"].mean, found.distributions["tool_seconds"].maximum) == (4, 7)


def test_an_id_is_used_again(tmp_path: Path) -> None:
    """A program may number the trajectories of each step from 0."""
    records = []
    for step in range(2):
        at_s = 100 * step
        records.append(on_task("trajectory", at_s + 1, at_s + 9, 1, trajectory=0))
        records += [on_task("tool", at_s + 2 + n, at_s + 3 + n, 2 + n, trajectory=0) for n in range(1 + step)]
    summary = written(tmp_path, *records, steps=2)
    assert [row.distributions["tool_seconds"].maximum for row in summary.rollout_by_step] == [1, 2]


def test_a_tool_outside_of_trajectories(tmp_path: Path) -> None:
    found = of_step(written(tmp_path, on_task("trajectory", 1, 2, 1), on_task("tool.call", 5, 6, 2)), 0)
    (tool,) = found.tools
    assert (tool.name, tool.outside, tool.calls) == ("tool.call", 1, 1)
    assert found.unknown["tool_seconds"] == "no call of a tool was recorded in a trajectory"


def test_a_validation_is_left_out(tmp_path: Path) -> None:
    """Its trajectories, requests and tools are counted and no more."""
    records = [
        on_task("agent_loop.trajectory", 1, 3, 1, step=0, sample_index=0, validate=False),
        on_task("agent_loop.request", 1, 2, 1, request_id="a"),
        on_task("agent_loop.trajectory", 1, 50, 2, step=0, sample_index=0, validate=True),
        on_task("agent_loop.request", 1, 40, 2, request_id="b"),
        on_task("agent_loop.tool_call", 40, 45, 2, tool="search"),
    ]
    summary = written(tmp_path, *records)
    found = of_step(summary, 0)
    assert (found.trajectories, found.validating, found.requests, found.seconds) == (1, 1, 1, 2)
    assert found.distributions["trajectory_seconds"].maximum == 2 and found.tools == []
    assert "1 trajectory of a validation: in no figure here" in printed(summary)


def test_turns_are_what_a_program_says(tmp_path: Path) -> None:
    """A program's own turns count before its requests: a turn may ask several times."""
    records = [
        on_task("trajectory", 1, 9, 1),
        on_task("turn", 1, 8, 1),
        on_task("agent_loop.request", 2, 3, 1, request_id="a"),
        on_task("agent_loop.request", 4, 5, 1, request_id="b"),
    ]
    found = of_step(written(tmp_path, *records), 0)
    assert (found.distributions["turns"].maximum, found.requests) == (1, 2)


# ---- recordings -------------------------------------------------------------------------------------------------


def test_shipped_verl_run() -> None:
    """Four steps of 8 prompts, 8 samples each, on 4 servers that had equal work."""
    summary = summary_of(VERL)
    assert [(row.step, row.trajectories, row.requests) for row in summary.rollout_by_step] == [
        (step, 64, 64) for step in (1, 2, 3, 4)
    ]
    found = summary.rollout
    assert found is not None and found.prompts is not None and found.balance is not None
    assert (found.steps, found.prompts.prompts, found.prompts.least_samples) == ([2, 3, 4], 24, 8)
    assert (found.balance.least, found.balance.most, len(found.engines)) == (2048, 2048, 4)
    # A trajectory's own seconds hold those of its request, which `requests` has too.
    (requests,) = summary.requests
    assert found.distributions["request_seconds"].mean == pytest.approx(requests.mean_seconds)
    assert found.distributions["trajectory_seconds"].p50 > found.distributions["request_seconds"].p50
    assert found.distributions["turns"].maximum == 1


def test_shipped_run_without_trajectories() -> None:
    """vLLM's ids say which samples are of one prompt."""
    found = summary_of(QWEN).rollout
    assert found is not None and found.prompts is not None and found.tail is not None
    assert (found.requests, found.trajectories, found.prompts.prompts, found.prompts.most_samples) == (192, 0, 24, 8)
    assert found.unknown["turns"] == "no trajectory was recorded"

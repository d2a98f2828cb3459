"""A request's way: its stages add up to its time, and what cannot be joined is counted, with the reason."""

from __future__ import annotations

import io
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from recordings import SECOND, Written, span
from rich.console import Console
from shipped import VERL, summary_of

from rltrace.analysis import Summary, summarize
from rltrace.analysis.requests import Requests
from rltrace.cli.tables import show
from rltrace.read.recording import Recording

ENDED_S = 100

Records = list[list[Any]]


def on_task(
    name: str, start_s: float, end_s: float | None, task: int, arrow: tuple[str, str] = ("", ""), **args: Any
) -> Records:
    """Records of a span of an asyncio task, with an arrow that leaves or arrives."""
    start_ns = round(start_s * SECOND)
    records: Records = [[name, task, start_ns, args, True]]
    if arrow[0]:
        records.append([arrow[0], task, start_ns, arrow[1], True])
    return records if end_s is None else [*records, [start_ns, round(end_s * SECOND), None, True]]


class Requested:
    """A run whose requests go from agent loops by Ray to a server, and to its engine."""

    def __init__(self) -> None:
        self.agent: list[Records] = []
        self.server: list[Records] = []
        self.engine: list[Records] = []
        self._tasks = count(1)

    def agents(
        self, key: str | None, start_s: float, sent_s: float, end_s: float | None, method: str = "generate"
    ) -> None:
        """A request of an agent loop, which asks the load balancer first; without a key it stays there."""
        task = next(self._tasks)
        self.agent.append(on_task("agent_loop.request", start_s, end_s, task, request_id=f"own-{task}"))
        asks = on_task("ray.submit", start_s + 0.01, start_s + 0.02, task, (f"ray:{task}", "out"), method="acquire")
        self.agent.append(asks)
        if key is not None:
            self.agent.append(on_task("ray.submit", sent_s, sent_s + 0.001, task, (f"ray:{key}", "out"), method=method))

    def servers(self, key: str, start_s: float, end_s: float | None, request_id: str = "") -> None:
        """The call at the server; its own span begins 1 ms later and ends 1 ms earlier."""
        task = next(self._tasks)
        call = on_task("ray.call", start_s, end_s, task, (f"ray:{key}", "in"), method="Server.generate")
        inner_end_s = None if end_s is None else end_s - 0.001
        self.server += [
            call,
            on_task("server.request", start_s + 0.001, inner_end_s, task, request_id=request_id or key),
        ]

    def engines(self, request_id: str, start_s: float, end_s: float, **args: Any) -> None:
        """The engine's request."""
        self.engine.append(span("rollout.request", start_s, end_s, request_id=request_id, **args))

    def whole(self, key: str, at_s: float, suffix: str = "-9eb78f85", **args: Any) -> None:
        """A request that is in the engine for 4 of its 10 seconds."""
        self.agents(key, at_s, at_s + 2, at_s + 10)
        self.servers(key, at_s + 3, at_s + 9)
        self.engines(key + suffix, at_s + 4, at_s + 8, **args)

    def read(self, folder: Path, *starts_s: float) -> Recording:
        """Write them, with steps of 20 seconds."""
        run = Written(folder)
        steps = [span("step", start, start + 20, step=number) for number, start in enumerate(starts_s)]
        run.process("driver", *steps, role="driver", ended_s=ENDED_S)
        for role in ("agent", "server", "engine"):
            run.process(role, *getattr(self, role), role=role, name=role, ended_s=ENDED_S)
        return run.read()


def lengths(requests: Requests) -> dict[str, float]:
    return {name: pytest.approx(stage.mean_seconds) for name, stage in requests.stages.items()}


def adds_up(requests: Requests) -> bool:
    stages = requests.stages.values()
    whole = sum(stage.mean_seconds for stage in stages) == pytest.approx(requests.mean_seconds)
    return whole and sum(stage.share for stage in stages) == pytest.approx(1)


def printed(summary: Summary, *, whole: bool) -> str:
    console = Console(width=120, file=io.StringIO())
    show(summary, console, whole=whole)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- joined -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", "-9eb78f85"])
def test_stages_add_up(suffix: str, tmp_path: Path) -> None:
    """Whether the engine has put something behind the server's id or not."""
    run = Requested()
    run.whole("a", 1, suffix)
    run.whole("b", 2, suffix)
    (requests,) = summarize(run.read(tmp_path, 0)).requests
    assert (requests.name, requests.count, requests.unjoined) == ("agent_loop.request", 2, {})
    assert lengths(requests) == {
        "agent_loop": 2, "to_server": 1, "server_before_engine": 1, "engine": 4, "server_after_engine": 1,
        "from_server": 1,
    }  # fmt: skip
    assert adds_up(requests)


def test_steps_have_their_own(tmp_path: Path) -> None:
    """By when a request began; the mean is that of the steady steps, and before the first step is none."""
    run = Requested()
    for at, key in ((1, "before"), (21, "first"), (41, "second"), (42, "third")):
        run.whole(key, at)
    run.agents("late", 61, 64, 70)
    run.servers("late", 65, 69)
    run.engines("late-1", 66, 68)
    summary = summarize(run.read(tmp_path, 20, 40, 60))
    by_step = [(row.step, row.count, row.mean_seconds) for row in summary.requests_by_step]
    assert by_step == [(None, 1, 10), (0, 1, 10), (1, 2, 10), (2, 1, 9)]
    (steady,) = summary.requests
    assert (steady.count, steady.mean_seconds, steady.median_seconds) == (3, pytest.approx(29 / 3), 10)
    assert steady.stages["engine"].median_seconds == 4 and steady.stages["engine"].p95_seconds == 4
    assert adds_up(steady)


def test_waiting_is_told_from_running(tmp_path: Path) -> None:
    run = Requested()
    run.whole("a", 1, queued_ns=SECOND)
    run.whole("b", 2, queued_ns=3 * SECOND)
    (requests,) = summarize(run.read(tmp_path)).requests
    assert requests.stages["engine_waiting"].mean_seconds == 2
    assert requests.stages["engine_running"].mean_seconds == 2
    assert "engine" not in requests.stages and adds_up(requests)


def test_waiting_is_unknown_if_some_do_not_say(tmp_path: Path) -> None:
    """How long requests waited is unknown if some of them do not say."""
    run = Requested()
    run.whole("a", 1, queued_ns=SECOND)
    run.whole("b", 2)
    (requests,) = summarize(run.read(tmp_path)).requests
    assert requests.stages["engine"].mean_seconds == 4 and adds_up(requests)


def test_damaged_wait_is_left_out(tmp_path: Path) -> None:
    run = Requested()
    run.whole("a", 1, queued_ns="long")
    (requests,) = summarize(run.read(tmp_path)).requests
    assert requests.stages["engine"].mean_seconds == 4


def test_server_without_agent_loops(tmp_path: Path) -> None:
    run = Requested()
    run.servers("a", 3, 9)
    run.engines("a-1", 4, 8)
    (requests,) = summarize(run.read(tmp_path)).requests
    assert requests.name == "server.request"
    assert lengths(requests) == {"server_before_engine": 0.999, "engine": 4, "server_after_engine": 0.999}


def test_one_process_without_ray(tmp_path: Path) -> None:
    """An agent loop that awaits its server in its own task."""
    run = Requested()
    run.agent = [
        on_task("agent_loop.request", 1, 11, 1, request_id="own"),
        on_task("server.request", 3, 10, 1, request_id="a"),
    ]
    run.engines("a", 4, 8)
    (requests,) = summarize(run.read(tmp_path)).requests
    assert requests.name == "agent_loop.request" and requests.unjoined == {}
    assert lengths(requests) == {
        "agent_loop": 2, "to_server": 0, "server_before_engine": 1, "engine": 4, "server_after_engine": 2,
        "from_server": 1,
    }  # fmt: skip


def test_engine_that_nobody_traced(tmp_path: Path) -> None:
    """Then the server's time is one stage."""
    run = Requested()
    run.whole("a", 1)
    run.engine = []
    (requests,) = summarize(run.read(tmp_path)).requests
    assert lengths(requests) == {"agent_loop": 2, "to_server": 1, "server": 6, "from_server": 1}
    assert adds_up(requests)


def test_engine_alone(tmp_path: Path) -> None:
    run = Requested()
    run.engines("a", 4, 8)
    (requests,) = summarize(run.read(tmp_path)).requests
    assert (requests.name, lengths(requests)) == ("rollout.request", {"engine": 4})


def test_id_that_comes_again(tmp_path: Path) -> None:
    """Under full determinism every turn of a trajectory has one id: each is joined with its own."""
    run = Requested()
    for turn, (at, longer) in enumerate(((1, 0), (21, 2), (41, 4))):
        run.agents(f"call-{turn}", at, at + 2, at + 10)
        run.servers(f"call-{turn}", at + 3, at + 9, "det-3")
        run.engines("det-3-00ff00ff", at + 4, at + 5 + longer)
    by_step = summarize(run.read(tmp_path, 0, 20, 40)).requests_by_step
    assert [row.stages["engine"].mean_seconds for row in by_step] == [1, 3, 5]


# ---- not joined ---------------------------------------------------------------------------------------------------


def test_reasons_why_requests_are_not_joined(tmp_path: Path) -> None:
    run = Requested()
    run.whole("joined", 1)
    run.agents(None, 2, 0, 12)
    run.agents("lost", 3, 4, 13)
    run.agents("open at the agent", 4, 5, None)
    run.agents("open at the server", 5, 6, 15)
    run.servers("open at the server", 7, None)
    run.agents("no engine", 6, 7, 16)
    run.servers("no engine", 8, 9)
    run.agents("of another method", 7, 8, 17, method="acquire_server")
    run.servers("unclaimed", 9, 12)
    run.engines("unclaimed", 10, 11)
    run.servers("unclaimed, no engine", 10, 12)
    summary = summarize(run.read(tmp_path))
    of_agents, of_servers = summary.requests
    assert (of_agents.name, of_agents.count) == ("agent_loop.request", 1)
    assert of_agents.unjoined == {
        "not over": 2, "not sent to a server": 2, "not recorded by a server": 1, "not recorded by an engine": 1,
    }  # fmt: skip
    assert (of_servers.name, of_servers.count) == ("server.request", 1)
    assert of_servers.unjoined == {"not recorded by an engine": 1}
    assert "not in the figures: 2 not over, 2 not sent to a server" in " ".join(printed(summary, whole=True).split())


def test_request_that_is_sent_again(tmp_path: Path) -> None:
    """Its stages would not add up."""
    run = Requested()
    run.whole("a", 1)
    task = 1
    run.agent.append(on_task("ray.submit", 5, 5.001, task, ("ray:again", "out"), method="generate"))
    run.servers("again", 6, 9)
    run.engines("again-1", 7, 8)
    (requests,) = summarize(run.read(tmp_path)).requests
    assert (requests.count, requests.mean_seconds, requests.stages) == (0, None, {})
    assert requests.unjoined == {"sent several times": 1}


def test_run_without_requests(tmp_path: Path) -> None:
    summary = summarize(Requested().read(tmp_path, 0))
    assert (summary.requests, summary.requests_by_step) == ([], [])
    assert "Requests" not in printed(summary, whole=True)


# ---- shown --------------------------------------------------------------------------------------------------------


def test_first_screen_has_time_outside_engines(tmp_path: Path) -> None:
    """The first screen says where the time outside of the engine went."""
    run = Requested()
    run.whole("a", 1)
    text = printed(summarize(run.read(tmp_path, 0)), whole=False)
    assert "Requests 10.000 s each, 60% outside of the engine: in the agent loop, before it is sent 2.000 s" in text


def test_first_screen_where_the_engine_has_most(tmp_path: Path) -> None:
    """The first screen is silent about requests if most of their time is the engine's."""
    run = Requested()
    run.agents("a", 1, 2, 11)
    run.servers("a", 3, 10)
    run.engines("a", 4, 9)
    summary = summarize(run.read(tmp_path, 0))
    assert "Requests" not in printed(summary, whole=False)
    table = printed(summary, whole=True)
    assert "Requests from the agent loop to the engine and back: 1 request, step 0" in table
    assert "on its way to the server" in table and "50.0%" in table


# ---- real ---------------------------------------------------------------------------------------------------------


def test_every_request_of_a_real_run_is_joined() -> None:
    """verl 0.9.1 with vLLM 0.24 on four GPUs; in its first step verl waited 13 s for its load balancer to start."""
    summary = summary_of(VERL)
    assert [(row.step, row.count, row.unjoined) for row in summary.requests_by_step] == [
        (step, 64, {}) for step in (1, 2, 3, 4)
    ]
    assert all(adds_up(row) for row in (*summary.requests, *summary.requests_by_step))
    first, *later = summary.requests_by_step
    assert first.stages["agent_loop"].share > 0.8 and first.stages["agent_loop"].mean_seconds == pytest.approx(
        12.98, abs=0.01
    )
    assert all(row.stages["engine"].share > 0.97 for row in later)
    assert all(stage.mean_seconds > 0 for row in later for stage in row.stages.values())

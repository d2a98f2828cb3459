"""Metrics: Debian's Prometheus scrapes a shipped Recording and a run that goes on, and is asked the dashboard."""

from __future__ import annotations

import http.client
import importlib.util
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from free_port import free_port
from growing_runs import grow
from inferred_loops import HOOK, generate, learn
from prometheus_client import openmetrics
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed
from recordings import Written, sample, span
from rltrace_exporters.prometheus import Prometheus
from rltrace_exporters.prometheus_scrapes import Scrapes
from shipped import VERL, opened, summary_of

from rltrace.analysis.metrics import MOST_NAMES, OTHERS
from rltrace.analysis.summary import Summary
from rltrace.errors import ViewError
from rltrace.limits import LIMITS
from rltrace.read import perfetto_ui
from rltrace.read.recording import Recording
from rltrace.read.token_file import token_in
from rltrace.record.manifest import started_ticks

ROOT = Path(__file__).parents[2]

with_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus: apt-get install prometheus"
)

LIVE = """
import sys, rltrace
rltrace.start(sys.argv[1], role="driver")
for number, _ in enumerate(sys.stdin):
    with rltrace.span("step", step=number, tokens=100):
        with rltrace.phase("actor.update"):
            rltrace.counter("actor.params_bytes", 1000 * (number + 1))
    print(number, flush=True)
"""
"""A program that makes a step for each line that it is told."""


def write(recording: Recording) -> str:
    out = BytesIO()
    Prometheus().write(recording, out)
    return out.getvalue().decode()


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a scrape, by its name and its labels."""
    return {(one.name, frozenset(one.labels.items())): one.value for family in parsed(text) for one in family.samples}


def value(text: str, name: str, **labels: str) -> float:
    return values(text)[name, frozenset(labels.items())]


# ---- a real Prometheus ------------------------------------------------------------------------------------------


class View(NamedTuple):
    """`rltrace view` of a run."""

    process: subprocess.Popen[str]
    said: str
    """Its first line."""
    token_file: Path

    @property
    def address(self) -> str:
        return re.findall(r"http://([\d.:]+)/", self.said)[0]

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    def get(self, path: str, **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{self.address}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def view(run: Path, folder: Path) -> View:
    token_file = folder / "token"
    command = [sys.executable, "-m", "rltrace", "view", str(run), "--no-open", "--token-file", str(token_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    return View(process, process.stdout.readline(), token_file)


class Asked:
    """A Prometheus that scrapes two views."""

    def __init__(self, folder: Path, views: dict[str, View]) -> None:
        jobs = [
            {
                "job_name": name,
                "authorization": {"credentials_file": str(one.token_file)},
                "static_configs": [{"targets": [one.address]}],
            }
            for name, one in views.items()
        ]
        settings = {"global": {"scrape_interval": "250ms", "scrape_timeout": "250ms"}, "scrape_configs": jobs}
        config = folder / "prometheus.yml"
        config.write_text(json.dumps(settings))  # YAML is a superset of it
        subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
        port = free_port()  # Prometheus does not say which port it took
        self.address = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=error",
             f"--web.listen-address=127.0.0.1:{port}"],
        )  # fmt: skip

    def __call__(self, query: str) -> list[dict[str, Any]]:
        """Return what an instant query finds."""
        where = f"{self.address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(where, timeout=60) as answer:
            said = json.loads(answer.read())
        assert said["status"] == "success", said
        return list(said["data"]["result"])

    def number(self, query: str) -> float | None:
        found = self(query)
        return float(found[0]["value"][1]) if found else None

    def until(self, query: str, wanted: float) -> None:
        """Wait until a query has a value."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                if self.number(query) == wanted:
                    return
            except urllib.error.URLError:  # it is starting
                pass
            time.sleep(0.1)
        raise AssertionError(f"{query} is not {wanted}, but {self.number(query)}")


class Scraped(NamedTuple):
    """Two views, a live program, and the Prometheus that scrapes them."""

    views: dict[str, View]
    program: subprocess.Popen[str]
    ask: Asked

    def step(self) -> None:
        """Have the program make a step."""
        assert self.program.stdin is not None and self.program.stdout is not None
        self.program.stdin.write("\n")
        self.program.stdin.flush()
        self.program.stdout.readline()


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    folder = tmp_path_factory.mktemp("scraped")
    (folder / "shipped").mkdir()
    live = folder / "live"
    pipe = subprocess.PIPE
    program = subprocess.Popen([sys.executable, "-c", LIVE, str(live)], stdin=pipe, stdout=pipe, text=True)
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write("\n")
    program.stdin.flush()
    program.stdout.readline()
    (folder / "of_live").mkdir()
    views = {"shipped": view(VERL, folder / "shipped"), "live": view(live, folder / "of_live")}
    ask = Asked(folder, views)
    yield Scraped(views, program, ask)
    for process in (ask.process, program, *(one.process for one in views.values())):
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="module")
def shipped() -> str:
    """The shipped Recording as a file."""
    return write(opened(VERL))


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summary_of(VERL)


@with_prometheus
def test_a_recording_is_scraped(scraped: Scraped, summary: Summary) -> None:
    """Prometheus has the seconds of every phase and the peaks of every owner that the summary has."""
    ask = scraped.ask
    ask.until('rltrace_step_seconds_count{job="shipped"}', len(summary.steps))
    of_phase: dict[str, float] = {}
    for row in summary.phases:
        for phase, share in row.phases.items():
            of_phase[phase] = of_phase.get(phase, 0.0) + share.seconds
    found = ask('rltrace_phase_seconds_sum{job="shipped"}')
    assert len(found) > 15
    for one in found:
        assert float(one["value"][1]) == pytest.approx(of_phase[one["metric"]["phase"]], rel=1e-6)
    peaks = {
        (memory.device, owner): peak.bytes for memory in summary.memory for owner, peak in memory.owner_peaks.items()
    }
    scraped_peaks = ask('rltrace_memory_peak_bytes{job="shipped"}')
    assert {
        (one["metric"]["gpu"], one["metric"]["owner"]): int(float(one["value"][1])) for one in scraped_peaks
    } == peaks
    assert ask.number('rltrace_tokens_total{job="shipped"}') == sum(step.tokens or 0 for step in summary.steps)


@with_prometheus
def test_the_dashboard_is_asked(scraped: Scraped, summary: Summary) -> None:
    """Every query of the dashboard finds numbers in the shipped Recording, where no span was left by an exception."""
    dashboard = _dashboard()
    scraped.ask.until('count_over_time(rltrace_run_live{job="shipped"}[1m]) >= bool 2', 1)  # a rate needs two
    instance = scraped.views["shipped"].address
    for query in dashboard.queries():
        asked = query.replace("$instance", re.escape(instance).replace("\\", "\\\\")).replace("$rank", ".*")
        found = scraped.ask(asked.replace("$__rate_interval", "1m"))
        assert bool(found) == (bool(summary.errors) or "rltrace_errors_total" not in query), asked
        assert all(math.isfinite(float(one["value"][1])) for one in found), asked


@with_prometheus
def test_a_live_run_is_scraped(scraped: Scraped) -> None:
    """What a run does after its view began is in a later scrape."""
    ask = scraped.ask
    ask.until('rltrace_step_seconds_count{job="live"}', 1)
    scraped.step()
    scraped.step()
    ask.until('rltrace_step_seconds_count{job="live"}', 3)
    ask.until('rltrace_tokens_total{job="live"}', 300)
    ask.until('rltrace_memory_bytes{job="live", owner="actor.params", rank="driver"}', 3000)
    assert ask.number('rltrace_run_live{job="live"}') == 1


@with_prometheus
def test_only_the_token_opens(scraped: Scraped) -> None:
    """Without the token there is nothing; with it in a header or in the address there are metrics; no line shows it."""
    one = scraped.views["shipped"]
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"}, {"Authorization": one.token}):
        status, text = one.get("/metrics", **headers)
        assert status == 401 and "rltrace_" not in text
    assert one.get("/wrong/metrics")[0] == 401
    status, text = one.get("/metrics", Authorization=f"Bearer {one.token}")
    assert status == 200 and "rltrace_step_seconds_count 4.0" in text
    assert one.get(f"/{one.token}/metrics")[0] == 200
    one.process.terminate()
    rest, _ = one.process.communicate(timeout=60)
    assert one.token in one.said and one.token not in rest


@with_prometheus
def test_promtool_has_nothing_to_say(shipped: str) -> None:
    """The names follow Prometheus's own rules."""
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=shipped, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@with_prometheus
def test_the_shipped_configuration(tmp_path: Path) -> None:
    """Prometheus takes the configuration that is shipped, with the token beside it."""
    shutil.copy(ROOT / "dashboards" / "prometheus.yml", tmp_path)
    token_in(tmp_path / "token")
    subprocess.run(["promtool", "check", "config", tmp_path / "prometheus.yml"], check=True, capture_output=True)


# ---- what a scrape says -----------------------------------------------------------------------------------------


def test_openmetrics(tmp_path: Path) -> None:
    """A scraper that asks for OpenMetrics gets it, and the strict parser reads it."""
    records = [span("actor.update", 1, 2), sample("actor.params_bytes", 1.5, 7)]
    run = Written(tmp_path / "run").process("p", *records, ended_s=3, rank=0, role="worker").folder
    found = Scrapes(run, LIMITS)(OPENMETRICS)
    assert isinstance(found, tuple)
    content_type, text = found
    assert content_type.startswith(openmetrics.exposition.CONTENT_TYPE_LATEST.partition(";")[0])
    families = {family.name: family for family in parsed_openmetrics(text.decode())}
    assert families["rltrace_phase_seconds"].unit == "seconds"
    assert families["rltrace_memory_bytes"].unit == "bytes"


def test_names_are_text(tmp_path: Path) -> None:
    """What a Recording is called by somebody hostile stays inside of one label, and no terminal obeys it."""
    bad = 'x"} 1\n# HELP\\ \x1b]0;owned\x07 \ud800 ' + "y" * 500
    phase = 'a"b\\c\nd\x1b[31m'
    records = span(phase, 1, 2, phase=True)
    run = Written(tmp_path / 'r"un\n').process("p", records, ended_s=3, role=bad, name=bad, start_ns=0).read()
    text = write(run)
    assert "\x1b" not in text and "\x07" not in text
    found = values(text)
    assert found["rltrace_phase_seconds_sum", frozenset({("phase", 'a"b\\c\\nd\\x1b[31m')})] == 1
    assert max(len(said) for _, labels in found for _, said in labels) <= 128


def test_metrics_of_many_ranks_are_bounded(tmp_path: Path) -> None:
    """130 ranks are told in 33 groups of 4, by the slowest and the fullest of each, and made-up names in 64."""
    written = Written(tmp_path / "run")
    written.process("driver", span("step", 0, 10, step=7), span("reward", 8, 9), ended_s=11, role="driver", pid=1)
    for rank in range(130):
        records = [span("actor.update", 1, 3 if rank == 37 else 2), sample("actor.params_bytes", 5, 100 + rank)]
        records += [span(f"phase {number}", 5, 6, phase=True) for number in range(100 if rank == 1 else 0)]
        device = {"host": f"h{rank // 8}", "uuid": f"GPU-{rank}"}
        written.process(f"w{rank}", *records, ended_s=11, rank=rank, role="worker", device=device, pid=rank + 2)
    text = write(written.read())
    assert value(text, "rltrace_step_phase_seconds", phase="actor.update", rank="36-39") == 2
    assert value(text, "rltrace_memory_bytes", owner="actor.params", rank="64-67", gpu="fullest of 4") == 167
    assert value(text, "rltrace_phase_seconds_count", phase=OTHERS) == 38
    labels = [dict(labels) for _, labels in values(text)]
    assert len({one["rank"] for one in labels if "rank" in one}) == 33 + 1  # and the driver
    assert len({one["phase"] for one in labels if "phase" in one}) == MOST_NAMES + 1


def test_a_step_that_is_told_by_samples(tmp_path: Path) -> None:
    """Tokens and reward come from the step's span, or else from the last sample inside of it."""
    steps = [span("step", 0, 10, step=0, tokens=50), span("step", 20, 30, step=1)]
    samples = [
        sample("tokens", 25, 10),
        sample("tokens", 29, 70),
        sample("reward_mean", 29, 0.5),
        sample("tokens", 31, 9),
    ]
    text = write(Written(tmp_path / "run").process("d", *steps, *samples, ended_s=40, role="driver").read())
    assert value(text, "rltrace_tokens_total") == 120
    assert value(text, "rltrace_step_number") == 1
    assert value(text, "rltrace_step_reward_mean") == 0.5
    assert value(text, "rltrace_step_tokens_per_second") == 7


def test_steps_that_nobody_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a loop without marks goes on, its steps and phases that are over are counted."""
    monkeypatch.setattr("rltrace.read.following.INFERRED_SHARE", 1e9)
    loop = [[*generate(at, at + 4), *learn(at + 6)] for at in range(0, 100, 20)]
    living = {"pid": os.getpid(), "start_ticks": started_ticks(os.getpid())}
    run = Written(tmp_path / "run").process("p", *loop, hooks=(HOOK,), **living).folder
    scrapes, counts = Scrapes(run, LIMITS), []
    for _ in grow(run):
        found = scrapes("")
        assert isinstance(found, tuple)
        counts.append(values(found[1].decode()).get(("rltrace_step_seconds_count", frozenset()), 0))
    assert counts == sorted(counts) and {0, 1, 2} < {*counts}
    text = scrapes("")[1].decode()  # type: ignore[union-attr]
    assert value(text, "rltrace_step_seconds_sum") == 20 * counts[-1] and value(text, "rltrace_run_live") == 1
    assert value(text, "rltrace_phase_seconds_sum", phase="rollout.generate") == 4 * counts[-1]


def test_a_process_that_came_again_counts_once(tmp_path: Path) -> None:
    """An engine that was started again holds what the new one says, and not both."""
    written = Written(tmp_path / "run")
    for key, start_s, size in (("old", 0, 1000), ("new", 50, 400)):
        records = sample("rollout.kv_cache_bytes", start_s + 1, size)
        start_ns = start_s * 10**9
        written.process(key, records, ended_s=start_s + 9, rank=0, role="engine", start_ns=start_ns, pid=len(key))
    text = write(written.read())
    assert value(text, "rltrace_memory_bytes", owner="rollout.kv_cache", rank="0", gpu="cpu") == 400


# ---- the dashboard ----------------------------------------------------------------------------------------------


def _dashboard() -> Any:
    if sys.version_info < (3, 11):
        pytest.skip("grafana_foundation_sdk needs Python 3.11")
    spec = importlib.util.spec_from_file_location("dashboard", ROOT / "dashboards" / "dashboard.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dashboard"] = module
    spec.loader.exec_module(module)
    return module


def test_the_dashboard_is_as_it_is_made() -> None:
    dashboard = _dashboard()
    assert dashboard.FILE.read_text() == dashboard.made(), "run python dashboards/dashboard.py"


def test_the_dashboard_fits_grafanas_schema() -> None:
    """Grafana's own types read it and give it back: they know every key in it. One that they do not know is dropped."""
    dashboard = _dashboard()
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    made = json.loads(dashboard.FILE.read_text())

    def given_back() -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(made)))

    assert _is_in(made, given_back())
    made["panels"][1]["unknown"] = 1
    assert not _is_in(made, given_back())


def _is_in(part: Any, whole: Any) -> bool:
    """Whether all of a JSON value is in another one, which may have more keys."""
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(
            key in whole and _is_in(value, whole[key]) for key, value in part.items()
        )
    if isinstance(part, list):
        return isinstance(whole, list) and len(part) == len(whole) and all(map(_is_in, part, whole))
    return bool(part == whole)


def test_the_dashboard_names_what_is_served(shipped: str) -> None:
    """Each name in a query of the dashboard is a metric of a scrape."""
    served = {family.name for family in parsed(shipped)}
    named = set(re.findall(r"rltrace_\w+", " ".join(_dashboard().queries()) + _dashboard().made()))
    named -= {"rltrace_run_info"}
    families = {re.sub("_(total|sum|count|bucket)$", "", name) for name in named}
    assert len(families) > 15
    assert not families - {name.removesuffix("_total") for name in served}


# ---- who may ask ------------------------------------------------------------------------------------------------


def test_beyond_this_machine(tmp_path: Path) -> None:
    """With `--host` an address and the machine's own name are answered; a site that points at us is not, nor is
    anybody without the token."""
    (tmp_path / "trace").write_text("trace")
    server = perfetto_ui.serve(tmp_path / "trace", tmp_path, host="0.0.0.0").start()
    try:
        assert not server.is_local and server.url == f"http://{socket.gethostname()}:{server.port}/{server.token}"
        statuses = {
            name: _status(server.port, f"/{server.token}{perfetto_ui.TRACE}", f"{name}:{server.port}")
            for name in ("127.0.0.1", "10.1.2.3", "[fe80::1]", socket.gethostname(), "evil.example")
        }
        assert set(statuses.values()) == {200, 403} and statuses["evil.example"] == 403
        assert [name for name, status in statuses.items() if status == 403] == ["evil.example"]
        assert _status(server.port, perfetto_ui.TRACE, f"10.1.2.3:{server.port}") == 404
        assert _status(server.port, perfetto_ui.METRICS, f"10.1.2.3:{server.port}") == 401
    finally:
        server.close()


def _status(port: int, path: str, host: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": host})
    return connection.getresponse().status


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_a_host_that_is_none_of_ours(tmp_path: Path, host: str) -> None:
    with pytest.raises(ViewError, match=f"--host {host}: .*; name an address of this machine"):
        perfetto_ui.serve(tmp_path, tmp_path, host=host)


# ---- the token --------------------------------------------------------------------------------------------------


def test_a_token_stays_the_same(tmp_path: Path) -> None:
    """A file is made for its owner alone, and has the same token again."""
    file = tmp_path / "token"
    token = token_in(file)
    assert len(token) >= 22 and file.stat().st_mode & 0o777 == 0o600
    assert token_in(file) == token != token_in(tmp_path / "other")


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [("a" * 30, 0o644, "chmod 600"), ("short", 0o600, "holds no token"), ("a b" * 20, 0o600, "holds no token")],
)
def test_a_token_that_is_none(tmp_path: Path, content: str, mode: int, said: str) -> None:
    """A token that others may read, or that can be guessed, is refused."""
    file = tmp_path / "token"
    file.write_text(content)
    file.chmod(mode)
    with pytest.raises(ViewError, match=said):
        token_in(file)


def test_a_token_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ViewError, match="cannot be made"):
        token_in(tmp_path / "none" / "token")

"""A run over two Ray nodes with clocks of their own: one Recording, on one clock, within the bound that it states."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from other_clock import OFFSET_NS, SECOND
from reference_runs import TINY, write_config
from two_nodes import DRIFT_PPM, Cluster, two_nodes

from rltrace.analysis import summarize
from rltrace.analysis.clocks import TimeLine
from rltrace.events import NO_GPU, Span
from rltrace.read.recording import Process, Recording
from rltrace.record import clock_readings, cluster, manifest

LAPTOP = Path(__file__).parents[2] / "examples" / "laptop.yaml"

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]

STEPS = 40
"""At least, on a machine that is busy too: so many spans of each rank are compared."""

RANK = """@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, rank):
        rltrace.identify(role="worker", rank=rank)
    def work(self, n):
        with rltrace.phase("actor.update", n=n):
            time.sleep(0.01)
"""
ELSEWHERE = "second records elsewhere, and is seen as far as it was collected: `rltrace collect`"
"""What a live view says of the second host."""

ENDED = """
import glob, json, os, pathlib

here_folder = os.getcwd() + "/run"
there_folder = sys.argv[2] + "/rltrace-" + json.loads(pathlib.Path("run/manifest.json").read_text())["run_id"]

def has_ended(lines):
    said = pathlib.Path(lines).read_text()
    return '"role": "worker", "rank": ' not in said or '"kind": "end"' in said

def wait_until(condition, seconds=120):
    begin = time.monotonic()
    while not condition() and time.monotonic() - begin < seconds:
        time.sleep(0.05)

def end(ranks):
    # Ray kills what has not ended by itself when the driver leaves.
    for rank in ranks:
        rank.__ray_terminate__.remote()
    folders = [f"{folder}/processes/*/process.jsonl" for folder in (here_folder, there_folder)]
    wait_until(lambda: all(has_ended(lines) for folder in folders for lines in glob.glob(folder)))
    ray.shutdown()
"""
"""How a program leaves no rank to Ray: it knows the folders of both hosts."""

BEGIN = f"""
import os, pathlib, sys, time
import ray, rltrace
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

watched, clocks = pathlib.Path("watched"), pathlib.Path("run/clocks.jsonl")

def is_seen():
    return not watched.exists() or {ELSEWHERE!r} in watched.read_text() or time.monotonic() - start > 240

def is_read_twice():
    return (clocks.exists() and len(clocks.read_text().splitlines()) > 1) or time.monotonic() - start > 240

{ENDED}
ray.init(address=sys.argv[1], log_to_driver=False)

{RANK}
here, there = sorted(ray.nodes(), key=lambda node: node["NodeManagerHostname"] == "second")
on = lambda kind, node: kind.options(scheduling_strategy=On(node["NodeID"], soft=False))
ranks = [on(Rank, node).remote(n) for n, node in enumerate((here, there))]
start = time.monotonic()
"""
"""A rank on either node."""

CHOSEN = """
def is_told(folder, step, is_over):
    chosen = pathlib.Path(folder, "chosen.jsonl")
    lines = chosen.read_text().splitlines() if chosen.exists() else []
    return any(f'"step": {step},' in line and f'"is_over": {is_over}' in line for line in lines)

def train(ranks, first, folders):
    chosen = first + 1
    for n in range(first, first + 3):
        with rltrace.span("step", step=n):
            if n == chosen:
                wait_until(lambda: all(is_told(folder, chosen, "false") for folder in folders))
            ray.get([rank.work.remote(n) for rank in ranks])
    # Before all know that it is over, whoever begins another step may say that it was in this one.
    wait_until(lambda: all(is_told(folder, chosen, "true") for folder in folders))

@ray.remote(num_cpus=0)
class Driver:
    def train(self, *arguments):
        rltrace.identify(role="driver")
        train(*arguments)

wait_until(clocks.exists)  # until then no node has an agent
folders = [here_folder, there_folder]
train(ranks, 0, folders)
ray.get(on(Driver, there).remote().train.remote(ranks, 3, folders))
"""
"""Three steps of a driver here and three of one there; the middle ones, 1 and 4, are chosen."""

STEPS_HERE = f"""
n = 6
while n < {STEPS} or not is_read_twice() or not is_seen() or "--forever" in sys.argv:
    with rltrace.span("step", step=n):
        ray.get([rank.work.remote(n) for rank in ranks])
    time.sleep(0.02)
    n += 1
end(ranks)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as started:
        yield started


@pytest.fixture(scope="module")
def run(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program under `rltrace exec`, for longer than the clocks need to be read twice; with chosen steps."""
    folder = tmp_path_factory.mktemp("exec")
    (folder / "program.py").write_text(BEGIN + CHOSEN + STEPS_HERE)
    program = [sys.executable, "program.py", nodes.address, str(nodes.spool)]
    traced = ["exec", "--out", "run", "--allocations", "1,4,100000", "--", *program]
    with (folder / "watched").open("w") as out:
        wide = {**nodes.environment, "COLUMNS": "120"}  # else a line of it is cut
        watching = subprocess.Popen([*RLTRACE, "summary", "--watch", "run"], cwd=folder, env=wide, stdout=out)
        done = rltrace_command(nodes, folder, *traced)
        assert done.returncode == 0, done.stderr
        assert watching.wait(60) == 0
    return folder / "run"


RLTRACE = (sys.executable, "-c", "from rltrace.cli import main; main()")


def rltrace_command(nodes: Cluster, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RLTRACE, *words], cwd=folder, env=nodes.environment, check=False, capture_output=True, text=True, timeout=500
    )


@dataclass(frozen=True)
class Timed:
    """A span of the second host: where the timeline shows its beginning, and when that was."""

    shown_ns: int
    true_ns: float
    bound_ns: float


def far_spans(recording: Recording, nodes: Cluster, stated: Recording) -> list[Timed]:
    """Every span of the second host, on a Recording's time line, with the bound that the aligned one states."""
    line = TimeLine(recording)
    fits = {process.key: process.alignment for process in stated.processes}
    found = []
    for process in recording.processes:
        fit = fits[process.key]
        if process.host == "second" and fit is not None:
            as_written = Process(process.folder).events()
            for raw, event in zip(as_written, process.events(), strict=True):
                if isinstance(raw, Span) and isinstance(event, Span):
                    shown_ns = event.start_ns + line.shift_ns(process)
                    found.append(Timed(shown_ns, float(nodes.true_ns(raw.start_ns)), fit.bound_ns(raw.start_ns)))
    return found


def check_bound(spans: list[Timed]) -> None:
    """No span of the second host is farther from the truth than the Recording states."""
    assert len(spans) > STEPS
    assert all(abs(span.shown_ns - span.true_ns) <= span.bound_ns + 2 for span in spans)


def check_order(recording: Recording) -> None:
    """No call runs before it was dispatched."""
    line = TimeLine(recording)
    sent, ran = {}, {}
    for process in recording.processes:
        for event in process.events():
            if isinstance(event, Span):
                sent |= {key: event.start_ns + line.shift_ns(process) for key in event.flows_out}
                if process.host == "second":
                    ran |= {key: event.start_ns + line.shift_ns(process) for key in event.flows_in}
    assert len(ran) > 10 and ran.keys() <= sent.keys()
    assert all(sent[key] <= ran[key] for key in ran)


def without_alignment(run: Path, copy: Path) -> Recording:
    shutil.copytree(run, copy)
    (copy / clock_readings.FILE).unlink()
    return Recording.open(copy)


def test_the_live_view_knows_the_hosts(run: Path) -> None:
    """It names the other host once its clock was read, and has its rank once its part was collected."""
    pictures = (run.parent / "watched").read_text()
    assert ELSEWHERE in pictures
    assert "2 ranks" in pictures and "nothing lost" in pictures and "0 hosts" not in pictures


def test_timeline_within_bound(run: Path, nodes: Cluster, tmp_path: Path) -> None:
    """The timeline of two hosts stays within the stated bound."""
    recording = Recording.open(run)
    check_bound(far_spans(recording, nodes, recording))
    with pytest.raises(AssertionError):
        check_bound(far_spans(without_alignment(run, tmp_path / "off"), nodes, recording))


def test_no_call_before_its_dispatch(run: Path, tmp_path: Path) -> None:
    """No call runs before it was dispatched."""
    check_order(Recording.open(run))
    with pytest.raises(AssertionError):
        check_order(without_alignment(run, tmp_path / "off"))


def test_times_are_moved_and_never_clamped(run: Path) -> None:
    """Every length is that of the second host's clock, made as much longer as that clock is slow."""
    (far,) = (p for p in Recording.open(run).processes if p.host == "second" and p.rank == 1)
    fit = far.alignment
    assert fit is not None
    pairs = [(raw, moved) for raw, moved in zip(Process(far.folder).events(), far.events(), strict=True)]
    assert len(pairs) > STEPS
    for raw, moved in pairs:
        assert isinstance(raw, Span) and isinstance(moved, Span) and raw.end_ns and moved.end_ns
        assert moved.start_ns == raw.start_ns + fit.shift_ns(raw.start_ns)
        assert moved.end_ns == raw.end_ns + fit.shift_ns(raw.end_ns)
    assert len({moved.start_ns for _, moved in pairs}) == len({raw.start_ns for raw, _ in pairs})


def test_summary_states_clock_error(run: Path) -> None:
    """The summary states offset, drift and bound of each clock."""
    found = summarize(Recording.open(run))
    reference, far = found.clocks
    assert reference.is_reference and far.hosts == ["second"] and far.aligned
    assert far.readings >= 2
    assert far.offset_seconds == pytest.approx(-OFFSET_NS / SECOND, abs=1)
    assert far.drift_ppm is not None and far.drift_error_ppm is not None and far.bound_seconds is not None
    assert abs(far.drift_ppm - (1e6 / (1 + DRIFT_PPM / 1e6) - 1e6)) <= far.drift_error_ppm
    assert 0 < far.bound_seconds < 1
    assert all(row.clock_aligned for row in found.phases)
    assert {row.rank for row in found.phases if row.rank is not None} == {0, 1}


def test_hosts_write_to_own_disks(run: Path, nodes: Cluster) -> None:
    """Every host wrote to its own disk."""
    recording = Recording.open(run)
    spool = nodes.spool / f"rltrace-{recording.manifest['run_id']}" / "processes"
    second = {process.key for process in recording.processes if process.host == "second"}
    assert {path.name for path in spool.iterdir()} == second
    assert cluster.ray_address(run) == nodes.address


def test_collecting_again_changes_nothing(run: Path, nodes: Cluster) -> None:
    """Collecting again fetches nothing and changes nothing."""
    before = {path: path.read_bytes() for path in run.glob("processes/*/*")}
    done = rltrace_command(nodes, run.parent, "collect", "run")
    assert (done.returncode, done.stdout) == (0, "run: nothing new on second\n"), done.stderr
    assert {path: path.read_bytes() for path in run.glob("processes/*/*")} == before


def test_chosen_steps_come_whole(run: Path, nodes: Cluster, tmp_path: Path) -> None:
    """With --steps the other node makes columns of its segments: these steps whole, of others what figures need."""
    copy = shutil.copytree(run, tmp_path / "copy")
    (far,) = (
        process.key for process in Recording.open(run).processes if process.host == "second" and process.rank == 1
    )
    shutil.rmtree(copy / "processes" / far)
    done = rltrace_command(nodes, tmp_path, "collect", "--steps", "8-10", "copy")
    assert done.returncode == 0 and "second: steps 8-10 are here whole" in done.stdout, done.stderr
    found, whole = Recording.open(copy), Recording.open(run)
    assert {*found.brief_steps} & {*range(8, 11)} == set() and len(found.brief_steps) > STEPS - 10
    assert list((copy / "processes" / far).glob("*.columns"))
    spans = [spans_of(folder / "processes" / far) for folder in (copy, run)]  # on their own clock: it was read again
    phases = [[span for span in some if span.name == "actor.update"] for some in spans]
    assert phases[0] == phases[1]
    begin_ns, end_ns = phases[1][8].start_ns, phases[1][10].end_ns or 0  # one a step
    assert within(spans[0], begin_ns, end_ns) == within(spans[1], begin_ns, end_ns) and len(spans[0]) < len(spans[1])
    assert not (nodes.spool / f"rltrace-{whole.manifest['run_id']}" / "abridged").exists()


def spans_of(folder: Path) -> list[Span]:
    return [event for event in Process(folder).events() if isinstance(event, Span)]


def within(spans: list[Span], begin_ns: int, end_ns: int) -> list[Span]:
    return [span for span in spans if begin_ns <= span.start_ns and (span.end_ns or 0) <= end_ns]


def test_collecting_leaves_other_process_alone(run: Path, nodes: Cluster, tmp_path: Path) -> None:
    """Collecting fetches what is missing and leaves another process's folder alone."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    missing, other, *_ = (process.key for process in Recording.open(run).processes if process.host == "second")
    shutil.rmtree(copy / "processes" / missing)
    lines = copy / "processes" / other / "process.jsonl"
    lines.write_text('{"kind": "process", "pid": 1}\n')
    done = rltrace_command(nodes, tmp_path, "collect", "copy", "--address", nodes.address)
    assert "from second" in done.stdout, done.stderr
    assert done.returncode == 4 and f"{other}: holds a different process" in done.stderr
    for path in (run / "processes" / missing).iterdir():
        assert (copy / "processes" / missing / path.name).read_bytes() == path.read_bytes()
    assert lines.read_text() == '{"kind": "process", "pid": 1}\n'


def test_reference_run_on_two_nodes(nodes: Cluster, tmp_path: Path) -> None:
    """The reference run spreads its ranks over the nodes.

    Each node has one CPU, so each gets one rank, with its engine.
    """
    write_config(tmp_path, steps=3, ray_address=nodes.address, **TINY)
    done = rltrace_command(nodes, tmp_path, "run", "run.yaml", "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    found = summarize(Recording.open(tmp_path / "run"))
    assert [step.end_seconds is not None for step in found.steps] == [True] * 3
    places = {rank: {p.host == "second" for p in found.processes if p.rank == rank} for rank in (0, 1)}
    assert sorted(map(list, places.values())) == [[False], [True]]
    assert len(found.weight_sync) == 6 and all(clock.aligned for clock in found.clocks)
    inside = [row for row in found.phases if row.rank is not None and row.step is not None]
    assert len(inside) == 6 and all(row.phases["idle"].share < 0.9 and not row.overlap_seconds for row in inside)
    assert [p.state for p in found.processes if p.rank is not None] == ["ended"] * 4


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["collect", "nothing"], 3, "nothing: no such file or folder"),
        (["collect", "run", "--address", "127.0.0.1:9"], 1, "127.0.0.1:9: no Ray cluster answers there"),
        (["collect", "run", "--address", "here"], 1, "here: not the address of a Ray cluster"),
        (["run", "run.yaml"], 4, "ray_address: cannot join a Ray cluster at 127.0.0.1:9"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    """Bad input is one line and an exit code."""
    manifest.create(tmp_path / "run", owner=None, command=[], config=None)
    config = yaml.safe_load(LAPTOP.read_text()) | {"ray_address": "127.0.0.1:9"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-c", "from rltrace.cli import main; main()", *words]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("rltrace: ")]
    assert done.returncode == code and lines[0].startswith(f"rltrace: {said}"), done.stderr
    if words[0] == "collect":
        assert len(done.stderr.splitlines()) == 1 and done.stdout == ""


def test_no_cluster_nothing_to_fetch(nodes: Cluster, tmp_path: Path) -> None:
    """A run that joined no cluster has nothing to fetch, whatever cluster exists."""
    manifest.create(tmp_path / "run", owner=None, command=[], config=None)
    done = rltrace_command(nodes, tmp_path, "collect", "run")
    said = (
        "run: nothing to fetch, because its driver joined no Ray cluster; name a cluster with --address, or give the "
        "folders of the other hosts too\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_chosen_step_is_known_on_every_host(run: Path) -> None:
    """A chosen step is known on every host, wherever the driver runs: here for three steps, then there for three.

    Without a GPU a process that was in the step says just that; one that never heard of it says nothing.
    """
    missed = {found.step: found for found in summarize(Recording.open(run)).allocations_missed}
    for step, driver in ((1, "driver"), (4, "Driver")):
        assert missed[step].reason == NO_GPU
        assert sorted(missed[step].processes) == [driver, "rank 0 worker", "rank 1 worker"]
    assert missed[100_000].reason.startswith("no such step has begun: the steps of this Recording are 0 to ")


def test_dead_node_is_named(nodes: Cluster, tmp_path: Path) -> None:
    """A node that dies is named, and what was collected from it stays.

    Last: it takes the second node down.
    """
    (tmp_path / "program.py").write_text((BEGIN + STEPS_HERE).replace("ray.get(", "ray.wait("))
    traced = ["exec", "--out", "run", "--", sys.executable, "program.py", nodes.address, str(nodes.spool), "--forever"]
    command = [sys.executable, "-c", "from rltrace.cli import main; main()", *traced]
    with subprocess.Popen(command, cwd=tmp_path, env=nodes.environment, stderr=subprocess.PIPE, text=True) as running:
        run = tmp_path / "run"
        wait_for(running, lambda: (run / clock_readings.FILE).exists() and has_recorded_far(run, nodes))
        done = rltrace_command(nodes, tmp_path, "collect", "run")
        assert done.returncode == 0 and "from second" in done.stdout, done.stderr
        nodes.kill_second()
        running.terminate()
        _, said = running.communicate(timeout=300)
    assert re.search(
        "^rltrace: node second: .*; what it recorded since the last collection is missing here$", said, re.MULTILINE
    ), said
    recording = Recording.open(run)
    far = [process for process in recording.processes if process.host == "second"]
    assert far and any(isinstance(event, Span) for process in far for event in process.events())
    assert all(clock.aligned for clock in summarize(recording).clocks)


def has_recorded_far(run: Path, nodes: Cluster) -> bool:
    """Whether the second host has a span of the run."""
    there = nodes.spool / f"rltrace-{Recording.open(run).manifest['run_id']}"
    return any(b"actor.update" in segment.read_bytes() for segment in there.glob("processes/*/*.seg"))


def wait_for(running: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert running.poll() is None
        time.sleep(0.1)

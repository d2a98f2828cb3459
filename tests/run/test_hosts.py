"""Two hosts without Ray: ranks of torchrun and of SLURM, each host's folder, one Recording on one clock."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner, Result
from free_port import free_port
from other_clock import OtherClock, require_namespaces
from two_hosts import RANKS, exec_command, two_hosts

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.summary import summarize
from rltrace.cli import main
from rltrace.events import Span
from rltrace.read.recording import Process, Recording
from rltrace.record import clock_readings

pytestmark = [pytest.mark.run, pytest.mark.timeout(600)]

JUMP_NS = 80_000_000
HOSTS = ((0, "first"), (1, "second"))


@dataclass(frozen=True)
class Run:
    """What two hosts recorded."""

    clock: OtherClock
    """The second host's."""
    said: tuple[str, str]
    """Standard error of each host."""
    parts: tuple[Path, Path]
    """What each of them recorded, the first host first."""
    together: Path
    """Their Recording."""
    collected: str
    """What `rltrace collect` said."""


def rltrace_command(folder: Path, *words: str) -> Result:
    """What a command says in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return CliRunner().invoke(main, words, prog_name="rltrace")


def torchrun(host: int, port: int) -> list[str]:
    """The command of one of two hosts."""
    launcher = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=1"]
    return [sys.executable, *launcher, "--master-addr=127.0.0.1", f"--master-port={port}", "ranks.py", "over"]


def of_slurm(host: int, port: int) -> dict[str, str]:
    """The environment of the only task of a host: srun's variables, and what a job's script makes of them."""
    srun = {"SLURM_PROCID": str(host), "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    script = {"RANK": str(host), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**srun, "SLURM_NTASKS": "8", "SLURM_NNODES": "4", **script, "RLTRACE_DIR": "run"}


def recorded(
    folder: Path, clock: OtherClock, commands: tuple[list[str], list[str]], environments: tuple[dict[str, str], ...]
) -> Run:
    """Run the ranks while the clock is read eight times, let it jump in between, and collect."""
    (folder / "ranks.py").write_text(RANKS)
    with two_hosts(folder, clock, commands, environments) as hosts:
        hosts.until(lambda: hosts.readings() >= 5)
        clock.jump()
        hosts.until(lambda: hosts.readings() >= 8)
        said = hosts.stop()
    by_host = {Recording.open(found.parent).manifest["host"]: found.parent for found in folder.glob("*/manifest.json")}
    there = by_host.pop("second")
    (here,) = by_host.values()
    parts = folder / "parts" / "first", folder / "parts" / "second"
    for part, path in zip(parts, (here, there), strict=True):
        shutil.copytree(path, part)
    command = [sys.executable, "-m", "rltrace", "collect", there.name, here.name]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return Run(clock, said, parts, here, done.stdout)


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """torchrun on two hosts with local disks, each under `rltrace exec`."""
    require_namespaces()
    folder, port = tmp_path_factory.mktemp("torchrun"), free_port()
    clock = OtherClock.begin(folder / "clock", ppm=100, jump_ns=JUMP_NS)
    commands = exec_command("first", *torchrun(0, port)), exec_command("second", *torchrun(1, port))
    return recorded(folder, clock, commands, ({}, {}))


@pytest.fixture(scope="module")
def of_srun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two tasks with the variables of srun and the same RLTRACE_DIR, as on a shared disk."""
    require_namespaces()
    folder, port = tmp_path_factory.mktemp("slurm"), free_port()
    clock = OtherClock.begin(folder / "clock", ppm=-100, jump_ns=JUMP_NS // 8)
    command = [sys.executable, "ranks.py", "over"]
    return recorded(folder, clock, (command, command), (of_slurm(0, port), of_slurm(1, port)))


@pytest.fixture(params=["of_torchrun", "of_srun"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = request.getfixturevalue(request.param)
    return found


@dataclass(frozen=True)
class Timed:
    """A span of the second host: where the timeline shows its beginning, when that was, and how far off at most."""

    shown_ns: int
    true_ns: float
    bound_ns: float

    @property
    def error_ns(self) -> float:
        return abs(self.shown_ns - self.true_ns)


def far_spans(recording: Recording, clock: OtherClock, stated: Recording) -> list[Timed]:
    """Every span of the second host, on a Recording's time line, with the bound that the aligned one states."""
    line = TimeLine(recording)
    fits = {process.key: process.alignment for process in stated.processes}
    found = []
    for process in recording.processes:
        fit = fits[process.key]
        if process.host == "second" and fit is not None:
            as_written = Process(process.folder).events()
            for raw, event in zip(as_written, process.events(), strict=False):  # behind them are inferred ones
                if isinstance(raw, Span) and isinstance(event, Span):
                    shown_ns = event.start_ns + line.shift_ns(process)
                    found.append(Timed(shown_ns, float(clock.true_ns(raw.start_ns)), fit.bound_ns(raw.start_ns)))
    return found


def check_bound(spans: list[Timed]) -> None:
    """No span of the second host is farther from the truth than the Recording states."""
    assert len(spans) > 100
    assert all(span.error_ns <= span.bound_ns + 2 for span in spans)


def together(recording: Recording) -> dict[int, list[tuple[Process, Span]]]:
    """The spans of each collective, on all ranks."""
    found: dict[int, list[tuple[Process, Span]]] = {}
    for process in recording.processes:
        for event in process.events():
            if isinstance(event, Span) and event.name == "together" and event.end_ns is not None:
                found.setdefault(event.args["n"], []).append((process, event))
    return found


def check_order(recording: Recording, stated: Recording) -> None:
    """No rank leaves a collective before the other one has come to it, within the bound that is stated then."""
    line = TimeLine(recording)
    bounds_ns = {
        n: sum(
            process.alignment.largest_bound_ns(
                process.alignment.undone_ns(span.start_ns), process.alignment.undone_ns(span.end_ns or 0)
            )
            for process, span in spans
            if process.alignment
        )
        for n, spans in together(stated).items()
    }
    spans_of = together(recording)
    assert len(spans_of) > 100 and all(len(spans) == 2 for spans in spans_of.values())
    for n, spans in spans_of.items():
        came_ns = max(span.start_ns + line.shift_ns(process) for process, span in spans)
        left_ns = min((span.end_ns or 0) + line.shift_ns(process) for process, span in spans)
        assert came_ns <= left_ns + bounds_ns[n]


def without_alignment(run: Path, copy: Path) -> Recording:
    shutil.copytree(run, copy)
    (copy / clock_readings.FILE).unlink()
    return Recording.open(copy)


def test_times_within_bound(run: Run, tmp_path: Path) -> None:
    """Drift and a jump stay within the stated bound; without alignment they do not."""
    recording = Recording.open(run.together)
    spans = far_spans(recording, run.clock, recording)
    check_bound(spans)
    with pytest.raises(AssertionError):
        check_bound(far_spans(without_alignment(run.together, tmp_path / "off"), run.clock, recording))
    elsewhere = [span for span in spans if span.bound_ns < run.clock.jump_ns / 2]
    bound_ns, error_ns = median(span.bound_ns for span in elsewhere), max(span.error_ns for span in elsewhere)
    print(
        f"{len(spans):,} spans; {len(elsewhere):,} apart from the jump: bound {bound_ns:,.0f} ns, {error_ns:,.0f} off"
    )
    assert len(spans) > len(elsewhere) > len(spans) / 2 and bound_ns < 5_000_000


def test_no_rank_leaves_before_the_other_comes(run: Run, tmp_path: Path) -> None:
    """No rank leaves a collective before the other one has come to it, whatever is known of the clocks."""
    recording = Recording.open(run.together)
    check_order(recording, recording)
    with pytest.raises(AssertionError):
        check_order(without_alignment(run.together, tmp_path / "off"), recording)


def test_ranks_are_known(run: Run) -> None:
    """Each rank says its rank, of how many, and its host."""
    processes = Recording.open(run.together).processes
    first = Recording.open(run.together).manifest["host"]
    ranks = [(one.rank, one.world_size, one.host, one.role) for one in processes if one.rank is not None]
    assert sorted(ranks) == [(0, 2, first, "worker"), (1, 2, "second", "worker")]


def test_missing_ranks_are_said(run: Run) -> None:
    """As long as a host's folder is missing, the summary says how many ranks are, of a part of the run too."""
    for part in run.parts:
        found = summarize(Recording.open(part))
        assert (found.run.ranks_started, found.run.ranks_missing) == (2, 1)
        said = rltrace_command(part.parent, "summary", part.name).stdout
        assert "1 of 2 ranks are not in this Recording; bring the folders of their hosts" in " ".join(said.split())
    found = summarize(Recording.open(run.together))
    assert (found.run.ranks_started, found.run.ranks_missing) == (2, 0)
    said = rltrace_command(run.together.parent, "summary", "--ranks", "0", run.together.name).stdout
    assert said and "not in this Recording" not in said


def test_the_program_is_left_alone(of_srun: Run) -> None:
    """Nothing of the reading is on a program's stderr, though the store ends with rank 0 before the others do.

    Agents of torchrun may say themselves that their store has ended.
    """
    folder = str(of_srun.together.parent)
    for said in of_srun.said:
        assert not any(word in said.replace(folder, "") for word in ("TCPStore", "socket", "Traceback")), said


def test_summary_states_the_clock(run: Run) -> None:
    """The summary states drift, jump and bound of the other clock.

    It counts the readings that it uses, which are those of exchanges that were not slower than their neighbours.
    """
    found = summarize(Recording.open(run.together))
    reference, far = found.clocks
    assert reference.is_reference and far.aligned and far.hosts == ["second"] and far.readings >= 4
    assert far.drift_ppm is not None and far.drift_error_ppm is not None and far.bound_seconds is not None
    assert abs(far.drift_ppm - (1e6 / (1 + run.clock.ppm / 1e6) - 1e6)) <= far.drift_error_ppm < 2_000
    assert far.jumps == 1 and run.clock.jump_ns / 2e9 < far.bound_seconds < run.clock.jump_ns / 1e9 + 0.5


def test_collecting_again_changes_nothing(run: Run) -> None:
    """Collecting again, in another order, brings nothing and changes nothing."""
    assert run.collected.startswith(f"{run.together.name}: ") and run.collected.endswith(" from second\n")
    before = {path: path.read_bytes() for path in run.together.rglob("*") if path.is_file()}
    done = rltrace_command(run.together.parent, "collect", run.together.name, str(run.parts[1]))
    assert (done.exit_code, done.stdout) == (0, f"{run.together.name}: nothing new on second\n"), done.stderr
    assert {path: path.read_bytes() for path in run.together.rglob("*") if path.is_file()} == before


AGAIN = """
import os, pathlib, time

import torch.distributed as dist

rank, file = int(os.environ["RANK"]), pathlib.Path(os.environ["READINGS"])


def readings():
    return len(file.read_text().splitlines()) if file.exists() else 0


for session in (1, 2):
    # The first store is gone only when rank 0 has left its group: rank 1 may be early, and must not find it.
    os.environ["MASTER_PORT"] = os.environ[f"PORT_{session}"]
    dist.init_process_group("gloo", init_method="env://")
    while rank == 0 and readings() < 2 * session:
        time.sleep(0.05)
    dist.barrier()
    if session == 2 and rank == 1:
        os._exit(9)
    if session == 2:
        time.sleep(9)  # meanwhile the other one is asked, and does not answer
    dist.destroy_process_group()
"""


def test_host_that_dies(tmp_path: Path) -> None:
    """A second process group is read as the first one is; a host that dies costs the others neither time nor life."""
    require_namespaces()
    clock = OtherClock.begin(tmp_path / "clock", ppm=100)
    (tmp_path / "again.py").write_text(AGAIN)
    ports = {f"PORT_{session}": str(free_port()) for session in (1, 2)}
    more = ports | {"READINGS": str(tmp_path / "first" / clock_readings.FILE)}
    environments = [of_slurm(host, 0) | more | {"RLTRACE_DIR": name} for host, name in HOSTS]
    command = [sys.executable, "again.py"]
    with two_hosts(tmp_path, clock, (command, command), environments) as hosts:
        ended = [process.communicate(timeout=120)[1] for process in hosts.running]
    assert [process.returncode for process in hosts.running] == [0, 9], ended
    assert "Traceback" not in ended[0] and "terminate" not in ended[0], ended[0]
    done = rltrace_command(tmp_path, "collect", "first", "second")
    assert done.exit_code == 0, done.stderr
    recording = Recording.open(tmp_path / "first")
    assert hosts.readings() >= 4 and all(clock.aligned for clock in summarize(recording).clocks)


def test_unknown_clock_is_refused(of_torchrun: Run, tmp_path: Path) -> None:
    """Hosts whose clocks nobody read are brought together on demand only, and are marked then."""
    for part in of_torchrun.parts:
        shutil.copytree(part, tmp_path / part.name)
    (tmp_path / "first" / clock_readings.FILE).unlink()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = rltrace_command(tmp_path, "collect", "first", "second")
    assert done.exit_code == 3 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("rltrace: second, of second: nobody read this clock against that of first, of ")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    done = rltrace_command(tmp_path, "collect", "first", "second", "--unknown-clocks")
    assert done.exit_code == 0 and done.stdout.endswith(" from second\n"), done.stderr
    found = summarize(Recording.open(tmp_path / "first"))
    assert [clock.aligned for clock in found.clocks] == [True, False]


def test_archive_of_a_host(of_torchrun: Run, tmp_path: Path) -> None:
    """A host's folder may come as an archive; the one with the readings has to be a folder."""
    for part in of_torchrun.parts:
        shutil.copytree(part, tmp_path / part.name)
        assert rltrace_command(tmp_path, "export", part.name, "-o", f"{part.name}.zip").exit_code == 0
    done = rltrace_command(tmp_path, "collect", "first", "second.zip")
    assert done.exit_code == 0 and done.stdout.endswith(" from second\n"), done.stderr
    ranks = {process.rank for process in Recording.open(tmp_path / "first").processes}
    assert {0, 1} <= ranks
    done = rltrace_command(tmp_path, "collect", "first.zip", "second")
    assert done.exit_code == 3 and "first.zip: an archive, which is read-only" in done.stderr


def record(folder: Path, name: str, script: str) -> subprocess.Popen[bytes]:
    """Begin to record a program on this host."""
    return subprocess.Popen([sys.executable, "-c", f"import rltrace; rltrace.start({name!r}); {script}"], cwd=folder)


MEET = """
import pathlib, sys, time
with rltrace.span('x'):
    pathlib.Path('{own}.here').touch()
    while not pathlib.Path('{other}.here').exists():
        time.sleep(0.01)
"""


def test_folders_of_one_clock_need_no_reading(tmp_path: Path) -> None:
    """Two Recordings of one host, of programs that ran side by side, share its clock."""
    running = [
        record(tmp_path, own, MEET.format(own=own, other=other)) for own, other in (("one", "two"), ("two", "one"))
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    done = rltrace_command(tmp_path, "collect", "one", "two")
    assert done.exit_code == 0 and done.stdout.startswith("one: "), done.stderr
    assert len(Recording.open(tmp_path / "one").processes) == 2


def test_unrelated_runs_stay_apart(tmp_path: Path) -> None:
    """Two runs of one host, one after the other, are brought together on demand only."""
    for name in ("one", "two"):
        assert record(tmp_path, name, "rltrace.span('x').__enter__().__exit__(None, None, None)").wait(timeout=120) == 0
    done = rltrace_command(tmp_path, "collect", "one", "two")
    assert done.exit_code == 3 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("rltrace: two is of another run than one: no process of either ran while ")
    assert len(Recording.open(tmp_path / "one").processes) == 1
    done = rltrace_command(tmp_path, "collect", "one", "two", "--unrelated")
    assert done.exit_code == 0 and len(Recording.open(tmp_path / "one").processes) == 2, done.stderr


def test_ranks_tell_runs_apart(tmp_path: Path) -> None:
    """Two runs at the same time, each with its rank 0, are not one."""
    script = "rltrace.identify(role='worker', rank=0)\n"
    running = [
        record(tmp_path, own, script + MEET.format(own=own, other=other))
        for own, other in (("one", "two"), ("two", "one"))
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    done = rltrace_command(tmp_path, "collect", "one", "two")
    assert done.exit_code == 3 and "both have a rank 0 (worker) at the same time" in done.stderr

"""What `rltrace summary` prints: where the seconds and the bytes went comes first, and no terminal cuts a figure."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import shipped
from recordings import NO_PID, SECOND, Written, hook, sample, span, two_ranks, two_workers
from rich.console import Console, Group, RenderableType
from shipped import OTHER_HOST, QWEN, VERL, opened
from traced_runs import run_traced, traced_environment

from rltrace.analysis import summarize
from rltrace.analysis.summary import Summary
from rltrace.cli import tables
from rltrace.cli.tables import figures, show
from rltrace.cli.tables.fit import Column, Figures, bars, words
from rltrace.cli.tables.memory import is_alike
from rltrace.cli.tables.phases import SLIGHT
from rltrace.cli.tables.problems import problems
from rltrace.read import ending
from rltrace.read.recording import Recording
from rltrace.record.manifest import PROCESSES
from rltrace.record.process import append_exit

EXAMPLES = Path(__file__).parents[2] / "examples"
TOY = Path(__file__).parents[1] / "toy_run.py"
PLAIN = """
    import rltrace, torch

    net = torch.nn.Linear(2, 2)
    for turn in range(3):
        with rltrace.span("tool.call"):
            weights = dict(net.state_dict())
        with rltrace.span("ask"):
            net(torch.ones(2))
            net.load_state_dict(weights)
"""
SCREEN_LINES = 52
WIDTHS = (80, 100, 140)


@lru_cache(maxsize=8)
def summary_of(recording: Recording) -> Summary:
    """Of a Recording that several screens show: those of GPUs take a second each."""
    return shipped.summary_of(recording.path) if recording.path in shipped.SHIPPED else summarize(recording)


def screen(recording: Recording, width: int = 100, *, whole: bool = False) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    show(summary_of(recording), console, whole=whole)
    return printed(console)


def lines_of_figures(recording: Recording, width: int) -> int:
    """Of the first screen; what is wrong may add to it, for there is no limit to that."""
    wrong = problems(summary_of(recording))
    return len(screen(recording, width)) - len(console_lines(Group(*wrong), width)) - bool(wrong)


def console_lines(shown: RenderableType, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(shown)
    return printed(console)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.fixture(scope="module")
def recorded() -> Iterator[dict[str, Recording]]:
    """Real Recordings: of GPUs, a loop of one's own, a torch script, and a run of which a process was killed."""
    loop = EXAMPLES / "trace_your_own_loop.py"
    with tempfile.TemporaryDirectory(prefix="rlt-", dir="/tmp") as made:  # a short path, which no screen folds
        folder = Path(made)
        subprocess.run([sys.executable, loop, folder / "loop"], check=True, capture_output=True)
        yield {
            "gpus": opened(OTHER_HOST),
            "streams": opened(QWEN),  # with the time on the GPUs' own streams
            "verl": opened(VERL),
            "loop": Recording.open(folder / "loop"),
            "plain": run_traced(folder, PLAIN, imported="torch").recording,
            "killed": killed(folder / "killed"),
        }


def killed(folder: Path) -> Recording:
    """A real driver, killed in a step and in a span of its own."""
    program = (
        f"import os, rltrace, signal; rltrace.start({str(folder)!r}, role='driver')\n"
        "with rltrace.span('step', step=0), rltrace.phase('reward'), rltrace.span('score'):\n"
        " os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    return Recording.open(folder)


# ---- the first screen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
def test_first_screen_has_seconds_and_bytes(recorded: dict[str, Recording], width: int) -> None:
    """The first screen holds the seconds and the bytes of a step."""
    lines = screen(recorded["gpus"], width)
    update = next(line.split() for line in lines if line.startswith("actor.update"))
    assert (update[1], update[2], update[-2:]) == ("2.943", "53%", ["52.63", "GiB"])
    assert any(line.startswith("rollout.kv_cache ") and "17.86 GiB" in line for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["gpus", "streams", "verl", "loop", "plain", "killed"])
def test_the_first_screen_is_one_screen(recorded: dict[str, Recording], which: str, width: int) -> None:
    assert lines_of_figures(recorded[which], width) <= SCREEN_LINES


def test_left_out_is_named(recorded: dict[str, Recording]) -> None:
    """What the first screen leaves out is named.

    Phases, owners, columns and whole tables.
    """
    text = " ".join(" ".join(screen(recorded["gpus"], 80)).split())
    assert "Below 0.1%: wait.driver 0.002 s, reward 0.002 s, advantage 146 µs" in text
    assert "Below 1% each, 1.28 GiB together: actor.activations, rollout.graphs, rollout.activations, nccl" in text
    assert "--all shows each rank and its idle time, each step, phases by step, automatic spans, weight sync" in text
    assert "--all shows" not in "".join(screen(recorded["gpus"], 80, whole=True))
    (command,) = [line for line in screen(recorded["verl"], 80) if "verl.trainer.main_ppo" in line]
    assert command.endswith("... and 34 words more")
    assert "trainer.use_v1=False" in "".join(screen(recorded["verl"], 80, whole=True))


def test_heading_names_the_steps(recorded: dict[str, Recording]) -> None:
    """The heading says which steps the figures describe."""
    lines = screen(recorded["gpus"])
    at = lines.index("Mean step (1–3; step 0 excluded as warm-up)")
    (step,) = [line.split() for line in lines[at:] if line.startswith("step ") and "seconds" not in line]
    assert step == ["step", "5.598", "9.158"]


def test_equal_ranks_share_a_row(recorded: dict[str, Recording]) -> None:
    """Equal ranks are one row with their least and most."""
    lines = screen(recorded["gpus"])
    (generate,) = [line.split() for line in lines if re.match(r"rollout\.generate +\d", line)]
    assert "0.747-0.749" in generate
    assert not any("rank 3" in line and "GPU-" in line for line in lines)
    whole = screen(recorded["gpus"], whole=True)
    assert sum(line.startswith("Memory of rank ") and "by phase" in line for line in whole) == 1
    assert sum(line.startswith("As rank 0's: ") for line in whole) == 3


def test_owners_at_the_phases_peak(recorded: dict[str, Recording]) -> None:
    """The table of owners by phases says what each held at the phase's peak.

    Of each GPU that is not as another one: a row an owner that held something, a column a phase, in GiB; the last row
    is all that is used.
    """
    devices = summary_of(recorded["streams"]).memory
    lines = screen(recorded["streams"], 160, whole=True)
    assert len(devices) == 4
    drawn = [device for device in devices if not any(is_alike(device, one) for one in devices[: devices.index(device)])]
    for device in drawn:
        at = lines.index(f"Memory of {device.lane} by phase, each at its peak, GiB")
        rows, numbered = table_below(lines, at)
        phases = [moment for moment in device.phases if moment.step is not None]
        assert numbered == {str(number): moment.phase for number, moment in enumerate(phases, 1)}
        assert {"actor.optimizer", "rollout.weights", "rollout.kv_cache", "driver.reserved", "free"} <= rows.keys()
        for owner in device.at_peak_bytes:
            held = [moment.bytes[owner] for moment in phases]
            assert rows.get(owner) == (in_gib(held) if any(held) else None), owner
        assert rows["used"] == in_gib([moment.used_bytes for moment in phases])


def table_below(lines: list[str], at: int) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Cells by row, and what the numbers of the columns stand for."""
    end = lines.index("", lines.index("", at) + 1)  # the first empty line is above the table's last row
    rows = {name: cells for name, *cells in map(str.split, filter(None, lines[at + 3 : end - 1]))}
    return rows, dict(re.findall(r"(\d+) (\S+)", lines[end - 1]))


def in_gib(sizes: list[int]) -> list[str]:
    """As the cells show them."""
    return [f"{size / 2**30:.1f}" if size else "·" for size in sizes]


def test_no_phase_no_table(recorded: dict[str, Recording]) -> None:
    """Processes without a phase have no table of phases.

    verl's driver does nothing before the first step that is a phase, and computes rewards in the steps.
    """
    titles = [line for line in screen(recorded["verl"], 120, whole=True) if line.endswith(": the others")]
    assert titles and not any(title.startswith("Start-up") for title in titles)


def test_driver_below_the_waiting(tmp_path: Path) -> None:
    """What the driver did while the ranks waited is below the waiting."""
    lines = screen(two_ranks(tmp_path / "run").read())
    at = next(number for number, line in enumerate(lines) if line.startswith("wait.driver"))
    assert lines[at].split()[1] == "1.000"
    assert lines[at + 1].split()[:2] == ["reward", "1.000"]


def test_start_up_idle_is_explained(tmp_path: Path) -> None:
    """What the start-up does in no phase is explained."""
    said = "start-up: before the first phase, while processes start and import"
    text = "\n".join(screen(two_ranks(tmp_path / "run").read(), whole=True))
    startup = text[text.index("Start-up, before the first step") :]
    assert text.count(said) == 1 and said in startup[: startup.index("\n\n")]
    phases = Written(tmp_path / "no steps").process("w", span("act", 1, 2, phase=True), ended_s=4)
    assert said not in "\n".join(screen(phases.read(), whole=True))


def test_others_have_their_own_table(tmp_path: Path) -> None:
    """Processes that are no rank are named on the first screen and have a table of their own."""
    steps = [span("step", 0, 10, step=0), span("reward", 1, 3)]
    written = Written(tmp_path / "run").process("d", *steps, role="driver", ended_s=10)
    for rank in range(4):
        written.process(f"w{rank}", span("actor.update", 4, 6), role="worker", rank=rank, ended_s=10)
    written.process("j", span("judge", 0, 5, phase=True), role="judge", pid=77, ended_s=10)
    assert "judge 77 also had phases: see --all" in screen(written.read())
    whole = screen(written.read(), whole=True)
    at = whole.index("Phases by rank, step 0: the others")
    rows = [line.split()[:3] for line in whole[at + 3 : whole.index("", at)]]
    assert rows == [["reward", "2.000", "20%"], ["judge", "5.000", "50%"], ["idle", "5.000", "50%"]]


def test_rankless_processes_are_not_averaged(tmp_path: Path) -> None:
    """Processes without a rank are not averaged over those that were not in a phase.

    Ten seconds of loading by one of seven processes are ten seconds, not one and a half.
    """
    written = Written(tmp_path / "run")
    main = [span("step", at, at + 20, step=at // 20) for at in (0, 20, 40)]
    main += [span("train", at, at + 10, phase=True) for at in (0, 20, 40)]
    written.process("main", *main, ended_s=60)
    written.process("loader", span("load", 21, 31, phase=True), role="loader", ended_s=60)
    for number in range(4):
        written.process(f"scorer{number}", span("score", 41, 43 + number, phase=True), pid=number + 2, ended_s=60)
    written.process("bare", span("work", 21, 31), ended_s=60)
    lines = screen(written.read())
    assert not any("rank" in line for line in lines[3 : lines.index("Your spans")]), lines
    rows = {line.split()[0]: line for line in lines if re.match(r"(train|load|score|idle|step) +[0-9]", line)}
    seconds = {name: line.split()[1] for name, line in rows.items()}
    idle = f"{(10 + 10 + 10 + 18 + 17 + 16 + 15) / 7:.3f}"  # not of who was in no phase at all in a step
    assert seconds == {"load": "10.000", "score": "3.500", "train": "10.000", "idle": idle, "step": "20.000"}
    assert re.search(r"4 processes +2.000-5.000$", rows["score"])
    assert rows["load"].rstrip("0123456789 ").endswith(" loader")


def test_rankless_steps_are_told_apart(tmp_path: Path) -> None:
    """Steps of processes without a rank are told apart."""
    recording = two_workers(tmp_path / "run").read()
    lines = screen(recording)
    assert lines[0].startswith("7 steps of 2 processes · ")
    assert "Mean step of 2 processes (1–3; step 0 excluded as warm-up)" in lines
    (act,) = [line.split() for line in lines if line.startswith("act ")]
    assert (act[1], act[4:]) == ("3.200", ["2", "processes", "2.000-5.000", "3.500"]), "two of 5 s and three of 2 s"
    at = lines.index("Steps of each process")
    rows = [line.split() for line in lines[at + 3 : lines.index("", at)]]
    assert rows == [["slow", "4", "3", "10.000", "10.000"], ["quick", "5", "4", "4.000", "4.000"]]
    whole = screen(recording, whole=True)
    of_quick = whole.index("Steps of quick 5")
    assert [line.split() for line in whole[of_quick + 3 : whole.index("", of_quick)]] == [
        [str(number), "4.000"] for number in range(4)
    ]


def test_problems_come_first(tmp_path: Path) -> None:
    """Problems come before every figure.

    Out of memory, then the dead, failed hooks, inconsistent boundaries, losses, and who was not traced.
    """
    device = {"host": socket.gethostname(), "uuid": "cpu:0"}
    failure = span("memory.out_of_memory", 9, 9.1, asked_bytes=5 << 20, free_bytes=1 << 20, reason="no room")
    # Of two processes; the other's sample is a second old, and it has worked since.
    edges = [
        span("memory.edge", at, at + 0.01, totals={"9": 100, "8": 100}, cpu_ns={"9": 0, "8": at * 10**9})
        for at in (2, 5)
    ]
    work: list[Any] = [*edges, sample("actor.params_bytes", 1, 7), span("actor.update", 2, 5), failure]
    hooks = (hook(1, "m:one", "failed", reason="TypeError: no"), hook(2, "m:two", "failed", reason="TypeError: no"))
    who = {"role": "worker", "rank": 0, "device": device}
    written = Written(tmp_path / "run").process("w", *work, span("actor.draw", 9, None), pid=9, hooks=hooks, **who)
    other = [span("memory.edge", 1, 1.01, totals={}, cpu_ns={"8": 0}), sample("rollout.weights_bytes", 1, 5)]
    written.process("e", *other, role="engine", rank=0, pid=8, device=device, ended_s=10)
    (written.folder / "processes" / "w" / "counts.u64").write_bytes((4).to_bytes(8, "little"))
    (written.folder / "untraced.jsonl").write_text('{"pid": 7, "command": ["python", "-S"], "reason": "with -S"}\n')
    lines = screen(written.read())
    wanted = [
        "Out of memory: rank 0 worker asked for 5.0 MiB, 1.0 MiB were free",
        "rank 0 worker (pid 9) died in actor.draw",
        "2 hooks failed: TypeError: no: reference one, reference two",
        "Memory: 4 of 4 phase boundaries are inconsistent, so not judged (rank 0): what",
        "docs/memory-ledger.md#when-a-boundary-is-consistent",
        "Lost from rank 0 worker: 4 events that could not be written",
        "not traced: python -S (pid 7): with -S",
        "Phases",
    ]
    found = [next(at for at, line in enumerate(lines) if line.startswith(start)) for start in wanted]
    assert found == sorted(found)


def test_long_command_keeps_what_ran(tmp_path: Path) -> None:
    """Of a command that is too long for a line the folders of its program go first, then its end."""
    written = Written(tmp_path / "run").process("p", ended_s=1)
    python = "/" + "folder/" * 20 + "python"
    lines = [
        {"pid": 7, "command": [python, "-S", "train.py"], "reason": "with -S"},
        {"pid": 8, "command": [python, "-S", "x" * 200], "reason": "with -S"},
    ]
    (written.folder / "untraced.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = screen(written.read(), 200)
    assert "not traced: python -S train.py (pid 7): with -S" in shown
    assert f"not traced: python -S {'x' * 87}... (pid 8): with -S" in shown


def test_aborted_step_comes_first(tmp_path: Path) -> None:
    """A step that an exception aborted is named first.

    A program whose exception nobody caught ends in good order too.
    """
    program = (
        f"import rltrace; rltrace.start({str(tmp_path / 'run')!r})\n"
        "with rltrace.span('step', step=7): raise ValueError('no data')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 1
    lines = screen(Recording.open(tmp_path / "run"))
    assert re.fullmatch(r"Step 7 was aborted by ValueError, at \d+\.\d s: no data", lines[lines.index("") + 1])


def test_many_alike_problems_are_cut(tmp_path: Path) -> None:
    """Of many problems of one kind a few are named, and all with --all."""
    written = Written(tmp_path / "run")
    for rank in range(6):
        written.process(f"w{rank}", span("actor.update", 0, None), role="worker", rank=rank)
    named = re.compile(r"rank \d worker \(pid \d+\) died in actor.update")
    assert sum(bool(named.match(line)) for line in screen(written.read())) == 3
    assert "... and 3 more of these: see --all" in screen(written.read())
    assert sum(bool(named.match(line)) for line in screen(written.read(), whole=True)) == 6


def test_hooks_by_kind(tmp_path: Path) -> None:
    """Hooks are one line per kind, and `--all` shows each."""
    hooks = (
        hook(1, "m:fires", fires=3, emits=["spans"]),
        hook(2, "m:unused", emits=["others"]),
        hook(3, "m:idle", emits=["others"]),
        hook(4, "m:old", "skipped", emits=["old"], reason="torch 1.0 is older than 2.11"),
        hook(10, "m:other_way", emits=["spans"]),
        hook(11, "m:later_way", "skipped", emits=["spans"], reason="m has no later_way"),
        hook(12, "m:of_no_span"),
        hook(5, "m:fails", "failed", reason="TypeError: no"),
        hook(6, "n:other", "waiting", instrumentation="absent"),
        hook(7, "o:silent", instrumentation="silent"),
        hook(8, "p:a", "skipped", instrumentation="refused", reason="torch 1.0 is older than 2.11"),
        hook(9, "q:a", "skipped", instrumentation="unwanted", reason="disabled by RLTRACE_DISABLE"),
    )
    recording = Written(tmp_path / "run").process("p", hooks=hooks, ended_s=1).read()
    lines = screen(recording)
    at = next(number for number, line in enumerate(lines) if line.startswith("Hooks "))
    assert lines[at : at + 4] == [
        "Hooks reference: 1 of 5 fired; none of silent fired",
        "failed: reference fails",
        "skipped: reference old; refused a; unwanted a",
        "never fired: reference idle and 1 more; 3 more were not needed",
    ]
    assert "1 hook failed: TypeError: no: reference fails" in lines[:at]
    fine = Written(tmp_path / "fine").process("p", hooks=(hooks[0], hooks[4], hooks[9]), ended_s=1).read()
    assert screen(fine)[-2] == "Hooks reference: 1 of 2 fired; none of silent fired; no span is missing"
    of_python = hook(1, "gc:callbacks", instrumentation="python_gc", emits=["python.gc"])
    tiny = Written(tmp_path / "tiny").process("p", hooks=(of_python,), ended_s=1).read()
    assert screen(tiny)[-2] == "Hooks none: no framework with hooks was imported"
    assert "not traced: refused: torch 1.0 is older than 2.11" in lines[:at], "a framework of which nothing is seen"
    assert not any(line.startswith("not traced: unwanted") for line in lines)
    rows = [" ".join(line.split()) for line in screen(recording, whole=True)]
    told = (
        "old 0 skipped: torch 1.0 is older than 2.11", "unused 0 never fired",
        "of_no_span 0 never fired",
        "other_way 0 not needed: another hook made its spans",
    )  # fmt: skip
    for row in told:
        assert row in rows


def test_alike_devices_share_tables() -> None:
    """Devices whose rows are within 1 % of each other have one pair of tables; of the others the screen says so."""
    lines = screen(opened(VERL), whole=True)
    assert [line for line in lines if line.startswith("Memory of rank ") and " by phase" in line] == [
        "Memory of rank 0 by phase, each at its peak, GiB"
    ]
    assert sum(line.startswith("As rank 0's: no row differs by more than 1% of the peak") for line in lines) == 3


def test_first_screen_promises(recorded: dict[str, Recording], tmp_path: Path) -> None:
    """What the first screen says that `--all` shows is what it draws, for runs of every kind."""
    empty = Written(tmp_path / "empty").read()
    open_step = Written(tmp_path / "open").process("p", span("step", 0, None), span("reward", 1, None), role="driver")
    idle = Written(tmp_path / "idle").process("p", span("step", 0, 1), span("step", 1, 2), role="driver", ended_s=2)
    learned = [span("autograd.backward", 0, 1), span("optimizer.step", 1, 2, number=1, models=[])]
    hook = {"slot": 1, "instrumentation": "torch_optim", "target": "torch:step", "state": "installed", "fires": 1}
    hook |= {"emits": ["autograd.backward", "optimizer.step"], "reason": None}
    any_loop = Written(tmp_path / "loop").process("p", *learned, hooks=(hook,), ended_s=2).read()
    runs = [*recorded.values(), empty, open_step.read(), idle.read(), any_loop]
    promised = set()
    for summary in map(summary_of, runs):
        for section in tables.SECTIONS:
            if section.name:
                drawn = bool(list(section.draw(summary, whole=True)))
                assert bool(section.has(summary)) is drawn, (section.name, summary.run.path)
                promised |= {(section.name, drawn)}
    names = {section.name for section in tables.SECTIONS if section.name}
    assert {name for name, drawn in promised if drawn} >= names - {"every allocation"}
    assert {name for name, drawn in promised if not drawn} == names


def test_own_spans_have_a_table(recorded: dict[str, Recording]) -> None:
    """The program's own spans have a table."""
    lines = screen(recorded["loop"])
    at = lines.index("Your spans")
    *rows, caption = [line.split() for line in lines[at + 3 : lines.index("", at)]]
    assert " ".join(caption) == "of a step: of the mean step; all other columns: of the whole run"
    assert {(row[0], row[1], row[2]) for row in rows} == {
        ("sample", "driver", "12"), ("send", "driver", "3"), ("reward.score", "driver", "3"),
    }  # fmt: skip
    assert all(row[-1].endswith("%") for row in rows)


def test_script_shows_its_spans(
    recorded: dict[str, Recording],
) -> None:
    """A script without phases shows its spans and those of hooks on the first screen."""
    found = summary_of(recorded["plain"])
    own, of_hooks = ({span.name: span.count for span in spans} for spans in (found.own_spans, found.hook_spans))
    assert own == {"tool.call": 3, "ask": 3}
    assert of_hooks.items() >= {"model.forward": 3, "model.load_weights": 3}.items()
    of_hooks.pop("host.work", None)  # where it computed between two forwards
    lines = screen(recorded["plain"])
    for title, names in (("Your spans", own.keys()), ("Automatic spans", of_hooks.keys())):
        at = lines.index(title)
        assert " ".join(lines[at + 1].split()) == "span process times seconds mean longest of the run"
        rows = [line.split() for line in lines[at + 3 : lines.index("", at)] if not line.startswith("host.work")]
        assert {row[0] for row in rows} == names
        assert {row[2] for row in rows} == {"3"}
        assert all(row[-1].endswith("%") for row in rows)


def test_calls_by_what_is_called(tmp_path: Path) -> None:
    """Calls of actors and tasks are told apart by the method or function.

    One of them may never end, as of an actor that serves.
    """
    calls = [span("ray.call", 0, None, method="Server.serve")]
    calls += [span("ray.call", at, at + 2, method="Server.answer") for at in (1, 4)]
    calls += [span("ray.call", 7, 8, method="double"), span("mine", 0, 9, method="by hand")]
    hooks = (hook(1, "ray:call", emits=["ray.call"]),)
    written = Written(tmp_path / "run").process("w", *calls, role="worker", ended_s=10, hooks=hooks)
    found = summarize(written.read())
    assert [(one.method, one.count, one.open, one.seconds) for one in found.hook_spans] == [
        ("Server.answer", 2, 0, 4.0),
        ("double", 1, 0, 1.0),
        ("Server.serve", 0, 1, 0.0),
    ]
    assert [(one.name, one.method) for one in found.own_spans] == [("mine", None)]
    rows = [line.split()[:2] for line in screen(written.read())]
    assert ["Server.answer", "worker"] in rows and ["ray.call", "double"] in rows
    assert "Class.method: ray.call of an actor" in "\n".join(screen(written.read()))


def test_hook_spans_need_all_with_phases(
    recorded: dict[str, Recording],
) -> None:
    """If phases account for the seconds, spans of hooks are shown with --all."""
    assert "Automatic spans" not in screen(recorded["gpus"])
    assert re.search("--all shows .*automatic spans", " ".join(screen(recorded["gpus"])))
    lines = screen(recorded["gpus"], whole=True)
    rows = {line.split()[0] for line in lines[lines.index("Automatic spans") :] if "4 x worker" in line}
    assert {"fsdp.forward", "fsdp.all_gather", "optimizer.step"} <= rows
    assert not rows & {"weight_sync.send", "actor.update", "cumem.map"}, "they have tables of their own"


def test_ledger_words_are_explained(tmp_path: Path) -> None:
    """The words of the ledger are explained where they are shown."""
    device = {"host": socket.gethostname(), "uuid": "cpu:0"}
    edges = [span("memory.edge", at, at + 0.01, totals={"9": 100}, cpu_ns={"9": 0}) for at in (2, 5)]
    records = [*edges, sample("unattributed_bytes", 1, 7), span("actor.update", 2, 5)]
    written = Written(tmp_path / "run")
    written.process("w", *records, role="worker", rank=0, device=device, pid=9, ended_s=9)
    for whole in (False, True):
        text = "\n".join(screen(written.read(), whole=whole))
        for word in ("unattributed", "unaccounted", *(["consistent"] if whole else [])):
            assert len(re.findall(rf"(?:^|; ){word}: ", text, re.MULTILINE)) == 1
    plain = two_ranks(tmp_path / "plain")
    assert "consistent: " not in "\n".join(screen(plain.read())), "where nothing is shown that it explains"


# ---- no figure is cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["first", "whole"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("which", ["gpus", "loop", "killed"])
def test_no_figure_is_cut(recorded: dict[str, Recording], which: str, width: int, whole: bool) -> None:
    """No figure is cut at any width."""
    lines = screen(recorded[which], width, whole=whole)
    wide = figures_in(screen(recorded[which], 1000, whole=whole))
    assert max(map(len, lines)) <= width
    assert [line for line in lines if "…" in line.lstrip("…")] == []
    kept = [line for line in lines if not line.startswith(f"not shown at {width} columns: ")]
    assert figures_in(kept) <= wide, "a figure that was cut is another figure"


def figures_in(lines: list[str]) -> set[str]:
    """Everything with a digit in it, apart from what stands still in the middle of a moving clock."""
    return {word for line in lines for word in line.split() if re.search(r"\d", word)}


def test_below_a_millisecond(tmp_path: Path) -> None:
    """Times below a millisecond are shown in microseconds, below the seconds.

    In every table with seconds, in its column; a range has one unit.
    """
    written = Written(tmp_path / "run")
    for rank, us in enumerate((312, 480)):
        records = [span("step", at, at + 2, step=at // 2) for at in (0, 2, 4)]
        records += [span("actor.update", at, at + 1.5) for at in (0, 2, 4)]
        records += [span("advance", at + 1.6, at + 1.6 + us / 1e6, phase=True) for at in (0, 2, 4)]
        written.process(f"w{rank}", *records, span("own", 1, 1.0001), role="worker", rank=rank, ended_s=6)
    lines = screen(written.read(), 80, whole=True)
    rows = (
        "phase         seconds  share               2 ranks  slowest  first step",
        "actor.update    1.500    75%  ███████▌       1.500                1.500",
        "advance        396 µs     0%            312-480 µs   rank 1      396 µs",
        "phase         rank 0  share            rank 1  share",
        "advance       312 µs     0%            480 µs     0%",
        "own   2 x worker      2   200 µs  100 µs   100 µs       0.0%",
    )
    assert [row for row in rows if row not in lines] == []
    assert any(line.startswith("Below 0.1%: advance 396 µs") for line in screen(written.read(), 80))


@pytest.mark.parametrize(
    ("least_us", "most_us", "said"),
    [
        (310, 310, "310 µs"),
        (310.1, 310.4, "310 µs"),
        (310, 311, "310-311 µs"),
        (0, 311, "0-311 µs"),
        (0, 0, "0.000"),
        (999.4, 999.4, "999 µs"),
        (999.99, 999.99, "0.001"),
        (310, 999.99, "0.000-0.001"),
    ],
)
def test_range_needs_two_figures(least_us: float, most_us: float, said: str) -> None:
    """A range is shown only if its two figures are written differently."""
    assert figures.between_seconds(least_us / 1e6, most_us / 1e6) == said
    if least_us == most_us:
        assert figures.seconds(most_us / 1e6) == said


def test_rounds_to_a_millisecond() -> None:
    """A time that rounds to a millisecond is shown as one."""
    assert (figures.short(0.9994e-3), figures.short(0.99999e-3), figures.short(0)) == ("999 µs", "1.0 ms", "0 µs")


def test_no_slowest_of_equal_ranks(tmp_path: Path) -> None:
    """No rank is the slowest if all took equally long below a millisecond."""
    written = Written(tmp_path / "run")
    for rank in range(2):
        records = [span("step", at, at + 2, step=at // 2) for at in (0, 2, 4)]
        records += [span("advance", at + 0.5, at + 0.50031, phase=True) for at in (0, 2, 4)]
        written.process(f"w{rank}", *records, role="worker", rank=rank, ended_s=6)
    row = next(line for line in screen(written.read(), 80, whole=True) if line.startswith("advance"))
    assert row.split() == ["advance", "310", "µs", "0%", "310", "µs", "310", "µs"]


@pytest.mark.parametrize("width", WIDTHS)
def test_phases_keep_seconds_and_share(recorded: dict[str, Recording], width: int) -> None:
    """Every phase keeps its seconds and share."""
    table = screen(recorded["gpus"], width)
    at = next(number for number, line in enumerate(table) if line.startswith("phase "))
    rows = {line.split()[0]: line.split() for line in table[at : table.index("", at)]}
    summary = summary_of(recorded["gpus"])
    assert summary.steady is not None
    phases = summary.steady.lanes[1].phases
    for phase in (name for name in phases if "." in name and phases[name].share >= SLIGHT):
        assert re.fullmatch(r"\d+\.\d{3}", rows[phase][1])
        assert re.fullmatch(r"\d+%", rows[phase][2])


def test_narrow_tables_give_way_in_order() -> None:
    """The least important columns go first, then words wrap, then figures go below."""
    table = Figures("name", Column("first"), bars(0), Column("nice", 3), words("remark"), Column("last"))
    table.add_row("a", "1,234,567", "█████", "7,654,321", "some words that say more", "9,999,999")
    assert [len(console_lines(table, width)) for width in (80, 65)] == [3, 3], "bars have no name that could be told"
    assert "█████" in console_lines(table, 80)[2] and "█████" not in console_lines(table, 65)[2]
    assert "7,654,321" in console_lines(table, 65)[2]
    *lines, said = console_lines(table, 49)
    narrow = "\n".join(lines)
    said = " ".join([lines.pop(), said])
    assert said == "not shown at 49 columns: nice; a wider terminal and --json have them"
    assert "7,654,321" not in narrow and "1,234,567" in narrow and "9,999,999" in narrow
    assert narrow.count("name") == 1 and "more" in narrow.splitlines()[3]
    below = console_lines(table, 24)
    assert "\n".join(below).count("name") == 3, "a block for each column"
    assert all(figure in "\n".join(below) for figure in ("1,234,567", "9,999,999"))


def test_empty_column_is_left_out() -> None:
    """A column that says nothing is left out."""
    table = Figures("name", "figure", "none")
    table.add_row("a", "1", "")
    assert "none" not in console_lines(table, 80)[0]


def test_silent_deaths_share_a_line(tmp_path: Path) -> None:
    """Processes that died without recording anything share a line after those that matter.

    Ray starts workers ahead and kills those that nobody needs.
    """
    written = Written(tmp_path / "run")
    for number in range(5):
        written.process(f"idle{number}")
    written.process("between", span("rollout.generate", 0, 1), name="between")
    written.process("inside", span("actor.update", 0, None), name="inside")
    lines = screen(written.read(), 100, whole=False)
    assert lines[0].endswith("7 processes · 2 died · nothing lost")
    assert [line.split()[0] for line in lines if " died" in line][1:4] == ["inside", "between", "5"]


@pytest.mark.parametrize("with_ray", [True, False])
def test_silent_kill_is_idle_only_with_ray(tmp_path: Path, with_ray: bool) -> None:
    """A silent process that was killed is Ray's idle worker only if there is Ray."""
    ray = (hook(1, "ray:init", instrumentation="ray", fires=1),) if with_ray else ()
    written = Written(tmp_path / "run").process("p", span("step", 0, 1), ended_s=2, hooks=ray)
    written.process("killed", name="killed")
    append_exit(written.folder / PROCESSES / "killed", end_ns=10**9, killed_by=9, was_stopped=False)
    lines = screen(written.read())
    if with_ray:
        assert not any("died" in line for line in lines), "what Ray does in a healthy run is no warning"
        assert any(line.endswith("1 stopped while idle, 1 ended") for line in lines)
    else:
        told = next(line for line in lines[1:] if " killed by " in line)
        assert told.startswith("killed (pid") and "was killed by SIGKILL" in told
        assert "was killed by SIGKILL" in lines[0]


def test_sampler_alone_is_not_complete(tmp_path: Path) -> None:
    """A Recording of the sampler alone is not complete."""
    written = Written(tmp_path / "run").process("s", sample("host.cpu_percent", 1, 2), role="sampler", ended_s=2)
    (first, *_) = screen(written.read())
    assert "no process has recorded anything" in first
    assert "complete" not in first and "nothing lost" not in first


@pytest.mark.parametrize(
    ("exit_code", "interrupted_by", "said"),
    [
        (0, None, "complete"),
        (0, signal.SIGINT, "complete"),  # it was asked to end, and did in good order
        (3, None, "failed with exit code 3"),
        (143, signal.SIGTERM, "interrupted by SIGTERM"),
    ],
)
def test_first_line_says_how_it_ended(tmp_path: Path, exit_code: int, interrupted_by: int | None, said: str) -> None:
    """The first line says how the command ended."""
    written = Written(tmp_path / "run").process("p", span("step", 0, 1, step=0), ended_s=1)
    ending.write(written.folder, ending.Ending(exit_code, interrupted_by))
    (first, *_) = screen(written.read())
    assert first.endswith(f"1 process · {said} · nothing lost")


def test_heading_says_when_and_where(tmp_path: Path) -> None:
    """The heading says when, on what and with which packages a Recording was made.

    And the sampler that says it is no process of the run.
    """
    written = Written(tmp_path / "run").process("p", span("step", 0, 1, step=0), ended_s=1)
    gpus = [{"uuid": f"GPU-{at}", "name": "NVIDIA H200"} for at in range(2)]
    machine = {"cpu": "EPYC", "cpus": 64, "gpus": gpus, "driver": "580.95"}
    recording = written.process("s", role="sampler", machine=machine, ended_s=1).read()
    versions = {"rltrace-toolkit": "0.1.0", "verl": "0.9.1", "msgspec": "0.20"}
    recording.manifest |= {"versions": versions, "created_unix_ns": 1_700_000_000 * 10**9}
    for whole in (False, True):
        head = screen(recording, 1000, whole=whole)
        assert "1 process ·" in head[0]
        assert head[1].endswith("/run · 2023-11-14 22:13 UTC · 2 NVIDIA H200")
        made = "rltrace 0.1.0 · verl 0.9.1 · msgspec 0.20 · driver 580.95 · processors 64 of EPYC"
        assert head[3] == (made if whole else "")


def test_silent_children_share_a_branch(tmp_path: Path) -> None:
    """In the tree, processes that recorded nothing are one line below their parent."""
    written = Written(tmp_path / "run").process("d", span("step", 0, 1, step=0), role="driver", ended_s=9)
    for number in range(5):
        written.process(f"p{number}", pid=2**22 + 10 + number, parent="d", ended_s=2 + number if number > 1 else None)
    device = {"host": socket.gethostname(), "uuid": "GPU-d38bb060-9e00-bf8f"}
    written.process("w", span("act", 1, 2), role="worker", rank=0, parent="d", device=device, ended_s=3)
    written.process("s", role="sampler", pid=7, ended_s=9)
    lines = screen(written.read(), 140, whole=True)
    at = lines.index(f"Processes on {socket.gethostname()}")
    assert [re.sub(r"\d+\.\d", "", line) for line in lines[at + 1 : at + 5]] == [
        f"├── driver  pid {NO_PID}  - s, 1 span  ended",
        f"│   ├── rank 0 worker  pid {NO_PID}, GPU-d38bb060  - s, 1 span  ended",
        "│   └── 5 x process  pid 4194314, 4194315, 4194316 and 2 more  - s, 0 spans  2 died, 3 ended",
        "└── sampler  pid 7  - s, 0 spans  ended",
    ]


def test_alike_deaths_share_a_line(tmp_path: Path) -> None:
    """Processes of one name that died alike are one line."""
    written = Written(tmp_path / "run")
    for number in range(5):
        written.process(f"e{number}", span("engine.step", 0, 1), name="EngineCore", pid=2**22 + 2 + number)
    written.process("f", span("engine.step", 0, None), name="EngineCore", pid=2**22 + 1)
    lines = screen(written.read())
    at = lines.index("EngineCore (pid 4194305) died in engine.step, at 0.0 s")
    assert lines[at : at + 2] == [
        "EngineCore (pid 4194305) died in engine.step, at 0.0 s",
        "EngineCore (pid 4194306, 4194307, 4194308 and 2 more) died, at 1.0 s",
    ]


PARENT = """
import os, signal, sys, time
import msgspec, rltrace

def wait_for_the_end():  # which comes when the parent is gone: it does not see how
    os.write(done, b"x")
    while os.getppid() == parent:
        time.sleep(0.01)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

parent, (worked, done) = os.getpid(), os.pipe()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
with rltrace.span("start"):
    pass
child = os.fork()
if child == 0:
    with rltrace.span("work"):
        if sys.argv[1] == "busy":
            wait_for_the_end()
    wait_for_the_end()
os.read(worked, 1)
os.kill(child, signal.SIGTERM)
"""


@pytest.mark.parametrize("which", ["idle", "busy"])
def test_ended_by_parent_is_no_death(tmp_path: Path, which: str) -> None:
    """A worker that its parent ended did not die, unless it was busy.

    `with multiprocessing.Pool()` ends its workers by SIGTERM, and so ends every daemon.
    """
    (tmp_path / "program.py").write_text(PARENT)
    command = "from rltrace.cli import main; main(prog_name='rltrace')"
    words = ["exec", "--out", tmp_path / "run", "--sample", "0", "--", sys.executable, tmp_path / "program.py", which]
    subprocess.run([sys.executable, "-c", command, *words], check=True, capture_output=True)
    lines = screen(Recording.open(tmp_path / "run"))
    ended = [line for line in lines if line.endswith("1 ended, 1 stopped while idle")]
    died = [line for line in lines[1:] if re.search(r"(died|was killed by SIGTERM) in work", line)]
    assert (len(ended), len(died)) == ((1, 0) if which == "idle" else (0, 1))
    assert ("complete" in lines[0], " died" in lines[0] or " killed " in lines[0]) == (which == "idle", which == "busy")


@pytest.mark.parametrize(
    ("ended_s", "record", "said"),
    [
        (9, [5, 0, 100, {}, True], "1 record malformed (a name that is not text"),
        (9, [5, 100, 1, True], "1 record malformed (a name that is not text"),
        (9, ["k", 0, 100, "out", True], "1 arrow outside of any span"),
        (9, ["k", 0, 100, "sideways", True], "1 record malformed (a name that is not text"),
        (9, [100, 150, None, True], "1 record without its span"),
        (9, [7, 7], "1 record damaged"),
        (None, [7, 7], "1 record cut when it died"),
    ],
)
def test_loss_has_its_reason(tmp_path: Path, ended_s: float | None, record: list[Any], said: str) -> None:
    """What is lost has its reason."""
    written = Written(tmp_path / "run").process("p", span("a", 0, 1), [record], name="trainer", ended_s=ended_s)
    told = [line for line in screen(written.read()) if line.startswith("Lost from ")]
    assert len(told) == 1 and told[0].startswith(f"Lost from trainer: {said}")
    assert told[0].count("record") + told[0].count("arrow outside") == 1


UNSEEN = """
import os, signal, sys
import msgspec, rltrace

with rltrace.span("start"):
    pass
if sys.argv[1:] == ["exec"]:
    os.execv(sys.executable, [sys.executable, __file__])
if sys.argv[1:] and os.fork() == 0:
    with rltrace.span("outer"):
        with rltrace.span("work"):
            pass
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
if sys.argv[1:]:
    os.wait()
"""


@pytest.mark.parametrize(
    ("how", "headline", "line"),
    [
        ("exec", r"complete", None),
        ("left", r"complete", r"Processes .*; 1 ended, 1 gone while idle"),
        (
            "killed",
            r"process \(pid \d+\) is gone",
            r"process .* is gone in outer, at .* s: nobody saw how it ended",
        ),
    ],
)
def test_unwatched_end_is_no_death(tmp_path: Path, how: str, headline: str, line: str | None) -> None:
    """If no supervisor watched, nobody is said to have died."""
    (tmp_path / "program.py").write_text(UNSEEN)
    words = [sys.executable, tmp_path / "program.py", how]
    subprocess.run(words, check=True, capture_output=True, env=traced_environment(tmp_path / "run"))
    lines = screen(Recording.open(tmp_path / "run"))
    assert re.search(rf"2 processes · {headline} · nothing lost", lines[0])
    assert not re.search("died|incomplete", "\n".join(lines))
    assert line is None or any(re.fullmatch(line, said) for said in lines)
    assert any(re.match(r"≥ \d\.\d s  outer", said) for said in lines) == (how == "killed")


def test_ray_ends_its_workers(tmp_path: Path) -> None:
    """Ray ends its workers, and the first process's end is unknown unless it said so."""
    ray = (hook(1, "ray:init", instrumentation="ray", fires=1),)
    for name, ended_s in (("ended", 5), ("gone", None)):
        written = Written(tmp_path / name, owner="d")
        written.process("d", span("step", 0, 2, step=0), role="driver", hooks=ray, ended_s=ended_s)
        lines = screen(written.process("w", span("act", 0, 1), role="worker", rank=0, start_ns=SECOND).read())
        assert any(line.endswith("1 gone while idle") for line in lines)
        said = "complete" if name == "ended" else f"driver (pid {NO_PID}) is gone"
        assert lines[0].endswith(f"2 processes · {said} · nothing lost")


def test_first_step_beside_other_process(tmp_path: Path) -> None:
    """A first step is named though another process has too few steps to leave its own out."""
    written = Written(tmp_path / "run")
    for name, many in (("brief", 1), ("long", 3)):
        steps = [span("step", at, at + 1, step=at) for at in range(many)]
        written.process(name, *steps, span("act", 0, 1, phase=True), role=name, pid=many, ended_s=4)
    whole = screen(written.read(), whole=True)
    assert "Mean step of 2 processes (0–2; step 0 excluded as warm-up)" in whole
    assert "Phases by rank, step 0" in whole


def test_every_step_is_a_row(tmp_path: Path) -> None:
    """Every step is a row with its phases.

    A number that comes twice is two steps, and a step that is not over has no row.
    """
    written = Written(tmp_path / "run")
    lengths = (4, 1, 2)
    for rank in range(2):
        steps = [span("step", 10 * at, 10 * at + 9, step=min(at, 1)) for at in range(3)] + [
            span("step", 30, None, step=2)
        ]
        updates = [span("actor.update", 10 * at, 10 * at + length + rank) for at, length in enumerate(lengths)]
        written.process(f"w{rank}", *(steps if rank == 0 else []), *updates, rank=rank, pid=rank + 1, ended_s=31)
    lines = screen(written.read(), whole=True)
    at = lines.index("Phases of each step: mean of 2 ranks")
    assert [line.split() for line in lines[at + 3 : at + 6]] == [
        ["0", "9.000", "4.500", "4.500"], ["1", "9.000", "1.500", "7.500"], ["1", "9.000", "2.500", "6.500"],
    ]  # fmt: skip
    assert lines[at + 6] == "1 actor.update  2 idle"


def test_step_left_open_is_told(tmp_path: Path) -> None:
    """A step that its process left open is reported.

    Whatever became of others; of one that died it is said what it died in.
    """
    steps = [span("step", 0, 2, step=0), span("step", 2, None, step=1)]
    for name, ended_s in (("left", 5), ("died", None)):
        written = Written(tmp_path / name).process("p", *steps, role="driver", ended_s=ended_s)
        written.process("dead", span("act", 0, 1), pid=NO_PID + 1)
        lines = screen(written.process("later", span("act", 9, 50), pid=NO_PID + 2, ended_s=50).read())
        told = [line for line in lines if "had not ended when its process did" in line]
        assert told == (["Step 1 had not ended when its process did, at 5.0 s"] if name == "left" else [])
        assert (f"driver (pid {NO_PID}) died in step, at 2.0 s" in lines) == (name == "died")


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ({}, "; step 0 excluded as warm-up"),
        ({"error": "ValueError"}, "; 1 aborted excluded"),
        ({"recorded": False}, ""),
    ],
)
def test_first_step_without_figures(tmp_path: Path, first: dict[str, Any], said: str) -> None:
    """A first step that has no figures is not said to be excluded."""
    steps = [span("step", 2 * at, 2 * at + 1, step=at, **(first if at == 0 else {})) for at in range(3)]
    updates = [span("actor.update", 2 * at, 2 * at + 0.5) for at in range(3)]
    recording = Written(tmp_path / "run").process("p", *steps, *updates, rank=0, ended_s=7).read()
    whole = screen(recording, whole=True)
    assert f"Mean step (1–2{said})" in whole
    assert any(line.startswith("Phases by rank, steady steps") for line in whole)
    steady = summarize(recording).steady
    assert steady is not None and not steady.has_first
    assert (steady.first_step == 0) == (not first) == any(line == "Phases by rank, step 0" for line in whole)


def test_sync_stages_add_up(tmp_path: Path) -> None:
    """The stages of a sync and the time in none add up.

    Also where a rank's sync has none.
    """
    written = Written(tmp_path / "run")
    for rank in range(2):
        send = [span("weight_sync.send", 1, 2, bytes=10**9)] if rank == 0 else []
        written.process(f"w{rank}", span("weight_sync", 1, 3), *send, rank=rank, pid=rank + 1, ended_s=4)
    lines = screen(written.read(), whole=True)
    at = next(place for place, line in enumerate(lines) if line.startswith("Weight sync by stage"))
    cells = {line.split("  ")[0]: line.split() for line in lines[at + 3 : at + 7]}
    assert cells["send"] == ["send", "0.500", "0.500", "0.5", "500.00", "1"]
    assert cells["other"][1] == "1.500" and cells["weight_sync"][1] == "2.000"
    assert not any("in the engine" in line for line in lines)


def test_engine_stages_are_named(tmp_path: Path) -> None:
    """The receiver's stages of a sync are marked as the engine's."""
    stages = [span("weight_sync.send", 1, 2, bytes=1), span("weight_sync.map", 2, 3), span("weight_sync.load", 3, 4)]
    written = Written(tmp_path / "run").process("w", span("weight_sync", 1, 4), *stages, rank=0, ended_s=5)
    assert "; in the engine: map, load" in " ".join(screen(written.read(), whole=True))


def test_only_step_is_named(tmp_path: Path) -> None:
    """Tables of the only step name it."""
    written = Written(tmp_path / "run").process(
        "p", span("step", 0, 4, step=0), span("act", 1, 3, phase=True), ended_s=5
    )
    lines = screen(written.read(), whole=True)
    assert "Step 0 (the first, which includes warm-up)" in lines
    assert "Phases by rank, step 0" in lines and "Idle and unlabelled, step 0: mean of 1 process" in lines
    assert "steady" not in "".join(lines)


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_overlap_are_said_to(tmp_path: Path, overlap: bool) -> None:
    steps = [span("step", at, at + (5 if overlap else 2), step=at) for at in (0, 2, 4)]
    recording = Written(tmp_path / "run").process("p", *steps, span("act", 1, 3, phase=True), ended_s=10).read()
    assert ("steps overlap: each is counted until the next one begins" in screen(recording)) is overlap


def test_own_phases_in_order(tmp_path: Path) -> None:
    """A program's own phases are in the order in which they happen.

    Although one of them has a name that rltrace knows.
    """
    phases = [span(name, at, at + 1, phase=True) for at, name in enumerate(("wake up", "act", "reward", "dream"))]
    written = Written(tmp_path / "run").process("p", *reversed(phases), span("step", 0, 5, step=0), ended_s=5)
    lines = screen(written.read())
    at = next(number for number, line in enumerate(lines) if line.startswith("phase "))
    assert [line[:8].strip() for line in lines[at + 2 : at + 8]] == [
        "wake up",
        "act",
        "reward",
        "dream",
        "idle",
        "step",
    ]


def test_damage_is_not_unmarked_steps(tmp_path: Path) -> None:
    """If damage hides the steps, nobody is advised to mark some.

    Where records are damaged a step may have been among them: no advice, but what was lost.
    """
    written = Written(tmp_path / "run").process(
        "p", *(span("optimizer.step", at, at + 1) for at in range(5)), ended_s=9
    )
    (segment,) = written.folder.glob("processes/p/*.seg")
    content = segment.read_bytes()
    at = content.index(b"optimizer.step") - 2
    segment.write_bytes(content[:at] + b"\xc1" + content[at + 1 :])
    text = "\n".join(screen(written.read()))
    assert "1 record damaged" in text and "No step is marked" not in text
    assert "No step is in what can be read of this Recording; see above what was lost" in text


def test_no_steps_tells_how_to_mark(tmp_path: Path) -> None:
    """A program without steps is told how to mark them."""
    written = Written(tmp_path / "run").process("p", span("optimizer.step", 0, 1), ended_s=1)
    assert "No step is marked" in "".join(screen(written.read()))
    written.process("q", span("step", 0, 1, step=0), ended_s=1)
    lines = screen(written.read())
    assert not any("No step is marked" in line for line in lines)
    assert any(
        line.startswith("Step 0 (the first, which includes warm-up): 1.000 s; `with rltrace.phase(") for line in lines
    )

"""`rltrace collect --steps`: of other hosts come totals and chosen steps, and figures are those of one machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from scale.made_recording import Wanted, make

from rltrace.analysis.encoded import as_builtins, as_json
from rltrace.analysis.summary import Summary, summarize
from rltrace.cli import main
from rltrace.events import SAMPLER, Counter, Span
from rltrace.read import alignment
from rltrace.read.recording import Process, Recording
from rltrace.read.selection import numbers
from rltrace.record import checksum, clock_readings, manifest
from rltrace.record.manifest import LINES
from rltrace.run import collection
from rltrace.run.abridgement import ALWAYS_NS, Given, StepRow, whole_windows
from rltrace.run.brief import Steps
from rltrace.run.compaction import compact
from rltrace.run.nodes import Agent

STEPS, CHOSEN = 3, 1


@dataclass(frozen=True)
class Hosts:
    """A run of sixteen ranks."""

    whole: Path
    first: Path
    """What the first of its two hosts recorded, with the readings of the other's clock."""
    second: Path
    collected: Path
    """What `rltrace collect` made of them, with one step of the second host."""
    said: str


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(main, [*map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    folder = tmp_path_factory.mktemp("hosts")
    whole, first, second, collected = (folder / name for name in ("whole", "first", "second", "collected"))
    make(whole, Wanted(ranks=16, steps=STEPS, is_thin=True))
    here = min(process.host for process in Recording.open(whole).processes)
    for part, is_its in ((first, True), (second, False)):
        shutil.copytree(whole, part)
        for process in Recording.open(whole).processes:
            if (process.host == here) != is_its:
                shutil.rmtree(part / "processes" / process.key)
    (second / "clocks.jsonl").unlink()
    shutil.copytree(first, collected)
    said = run("collect", collected, second, "--steps", CHOSEN)
    return Hosts(whole, first, second, collected, said)


@pytest.fixture(scope="module")
def summaries(hosts: Hosts) -> tuple[Summary, Summary]:
    return summarize(Recording.open(hosts.whole)), summarize(Recording.open(hosts.collected))


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield where two values differ by more than the sixth part of a million, which a clock's drift makes of a sum."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() | other.keys():
            yield from differences(one.get(key), other.get(key), f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{where}[{place}]")
    elif isinstance(one, float) and isinstance(other, float):
        if abs(one - other) > 2e-5 * max(abs(one), abs(other)):
            yield f"{where}: {one} {other}"
    elif one != other:
        yield f"{where}: {one} {other}"


def test_figures_are_those_of_one_machine(summaries: tuple[Summary, Summary]) -> None:
    """Memory, weight sync, sleeps and requests of each step are the same; so are spans by name, to the drift of the
    other host's clock."""
    whole, collected = map(as_builtins, summaries)
    exact = (
        "memory",
        "weight_sync",
        "sleeps",
        "requests_by_step",
        "errors",
        "out_of_memory",
        "leaks",
        "losses",
        "clocks",
    )
    assert [key for key in exact if whole[key] != collected[key]] == []
    for spans in (*whole["hook_spans"], *collected["hook_spans"]):
        del spans["share"]  # of steady steps
    assert [*differences(whole["hook_spans"], collected["hook_spans"])] == []
    assert whole["own_spans"] == collected["own_spans"]


def test_phases_of_all_steps_are_there(summaries: tuple[Summary, Summary]) -> None:
    """Each phase of each rank and step takes as long as it does on one machine."""
    found = []
    for summary in summaries:
        seconds = {
            (lane.lane, lane.step, name): phase.seconds
            for lane in summary.phases
            for name, phase in lane.phases.items()
            if name not in ("idle", "unlabelled")
        }
        found.append(seconds)
    assert found[0] == found[1] and len(found[0]) > 16 * STEPS * 5


def test_a_chosen_step_is_whole(hosts: Hosts, summaries: tuple[Summary, Summary]) -> None:
    """All that happened in the chosen step, and before the first one, is there; in other steps the rest is not."""
    windows = {step.step: step for step in summaries[0].steps}
    whole, collected = Recording.open(hosts.whole), Recording.open(hosts.collected)
    of_whole = {process.key: process for process in whole.processes}
    begins = [of_whole_start(whole) + int(windows[number].start_seconds * 1e9) for number in range(STEPS)]
    for process in collected.processes:
        events, had = ([*one.events()] for one in (process, of_whole[process.key]))
        assert len(events) <= len(had)
        for begin_ns, end_ns in ((0, begins[0]), (begins[CHOSEN], begins[CHOSEN + 1])):
            assert within(events, begin_ns, end_ns) == within(had, begin_ns, end_ns)
        if process.rank is not None and process.rank >= 8:
            assert len(within(events, begins[2], ALWAYS_NS)) < len(within(had, begins[2], ALWAYS_NS))


def of_whole_start(recording: Recording) -> int:
    return min(process.start_ns for process in recording.processes)


def within(events: list[Span | Counter], begin_ns: int, end_ns: int) -> list[Span | Counter]:
    """Return the events that lie well within a time."""
    slack_ns = 1_000_000
    first_ns, last_ns = begin_ns + slack_ns, end_ns - slack_ns
    return [
        event
        for event in events
        if (
            first_ns <= event.ts_ns < last_ns
            if isinstance(event, Counter)
            else first_ns <= event.start_ns and (event.end_ns or 0) < last_ns
        )
        and not (isinstance(event, Span) and (event.flows_in or event.flows_out))
    ]


def test_steps_say_why_they_are_brief(summaries: tuple[Summary, Summary]) -> None:
    """Steps of which something is elsewhere say so, and how many spans that are."""
    found = summaries[1]
    assert {step.step: step.brief_because for step in found.steps} == {
        0: "left on its host",
        1: None,
        2: "left on its host",
    }
    assert all(gone.spans_left_on_host == gone.spans > 0 for gone in found.removed)
    assert len(found.removed) >= 16


def test_the_command_says_what_was_left(hosts: Hosts) -> None:
    """It says which steps are whole, how many bytes are elsewhere, and where; the screen says so, too."""
    assert f"steps {CHOSEN} are here whole" in hosts.said and f"are in {hosts.second}" in hosts.said
    screen = " ".join(run("summary", hosts.collected).split())
    assert "only totals are here; the rest is on their hosts: `rltrace collect --steps`" in screen
    small, large = (
        sum(path.stat().st_size for path in hosts.collected.glob(f"processes/*/*{suffix}"))
        for suffix in (".columns", ".seg")
    )
    assert small < large / 5


def test_more_steps_add(hosts: Hosts, tmp_path: Path) -> None:
    """Another collection adds its steps to those that are whole, and then all; what is here never goes."""
    copy = shutil.copytree(hosts.collected, tmp_path / "copy")
    run("collect", copy, hosts.second, "--steps", 2)
    assert Recording.open(copy).brief_steps == {0}
    run("collect", copy, hosts.second, "--steps", "all")
    assert Recording.open(copy).brief_steps == frozenset()
    assert "are here whole" not in run("collect", copy, hosts.second, "--steps", 2)
    events = [{one.key: [*one.events()] for one in Recording.open(path).processes} for path in (copy, hosts.whole)]
    assert events[0] == events[1]


def test_a_collected_run_is_compacted(hosts: Hosts, tmp_path: Path) -> None:
    """Columns of brief steps stay as they are, with what they lack, beside those of the first host's segments."""
    copy = shutil.copytree(hosts.collected, tmp_path / "copy")
    before = as_json(summarize(Recording.open(copy)))
    compact(Recording.open(copy))
    assert as_json(summarize(Recording.open(copy))) == before


def test_what_was_compacted_stays_whole(hosts: Hosts, tmp_path: Path) -> None:
    """A collection of some steps takes nothing from columns that have everything."""
    copy = shutil.copytree(hosts.first, tmp_path / "copy")
    run("collect", copy, hosts.second, "--compact")
    before = {path: path.read_bytes() for path in copy.glob("processes/*/*.columns")}
    run("collect", copy, hosts.second, "--steps", 2)
    assert {path: path.read_bytes() for path in copy.glob("processes/*/*.columns")} == before
    assert Recording.open(copy).brief_steps == frozenset() and before


def test_everything_comes_if_it_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --steps everything comes, or as many of the last steps as fit."""
    assert collection.choose(None, [*range(10)], 1000) is None
    monkeypatch.setattr(collection, "EVERYTHING_BYTES", 250)
    assert collection.choose(None, [*range(10)], 1000) == numbers("8-9")
    assert collection.choose(None, [*range(10)], 1_000_000) == numbers("9")
    assert collection.choose(None, [], 1000) is None and collection.choose("all", [1], 1000) is None


def test_windows_of_steps() -> None:
    """A step reaches until the next one begins, and two that follow each other are one window."""
    steps = Steps([10, 20, 30], [15, 25, 35], [0, 1, 2])
    assert whole_windows(steps, numbers("2")) == ((-ALWAYS_NS, 10), (30, ALWAYS_NS))
    assert whole_windows(steps, numbers("0-1")) == ((-ALWAYS_NS, 30),)
    assert whole_windows(Steps([], [], []), numbers("1")) == ((-ALWAYS_NS, ALWAYS_NS),)


@pytest.fixture(scope="module")
def two(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Hosts:
    """The driver and rank 0 on the first host, rank 8 on the second."""
    folder = tmp_path_factory.mktemp("two")
    first, second = (shutil.copytree(path, folder / path.name) for path in (hosts.first, hosts.second))
    for part in (first, second):
        for process in Recording.open(part).processes:
            if process.rank not in (None, 0, 8) or process.role == SAMPLER:
                shutil.rmtree(process.folder)
    return replace(hosts, first=first, second=second)


def kill(folder: Path) -> None:
    """Have the processes of a host be killed: nobody closed their segments, and one was writing."""
    for process in Recording.open(folder).processes:
        said = [json.loads(line) for line in (process.folder / LINES).read_text().splitlines()]
        lines = [{**line, "line": number} for number, line in enumerate(said) if line["kind"] != "end"]
        text = "".join(checksum.signed(json.dumps(line)) + "\n" for line in lines)
        (process.folder / LINES).write_text(text)
    torn = process.folder / process.segment_names[-1]
    content = torn.read_bytes()
    torn.write_bytes(content + content[:5] + bytes(4096))


def losses(process: Process) -> tuple[int, int, int, int]:
    """What readers say of a process that was killed."""
    assert [*process.events()]
    return process.torn, process.orphans, process.damaged_segments, len(process.unsealed)


def test_what_nobody_closed_is_left_too(two: Hosts, tmp_path: Path) -> None:
    """Of processes that were killed the chosen step comes whole, too, and of others what figures need; readers count
    the same losses."""
    first, second = (shutil.copytree(path, tmp_path / path.name) for path in (two.first, two.second))
    kill(second)
    assert f"steps {CHOSEN} are here whole" in run("collect", first, second, "--steps", CHOSEN)
    assert Recording.open(first).brief_steps == {0, 2}
    found = {process.key: process for process in Recording.open(first).processes}
    whole = {process.key: Process(process.folder) for process in Recording.open(second).processes}
    assert all(not [*found[key].folder.glob("*.seg")] for key in whole)
    assert [losses(found[key]) for key in whole] == [losses(process) for process in whole.values()]
    assert sum(process.torn for process in whole.values()) == 1 and all(p.unsealed for p in whole.values())
    phases = [
        [event for key in whole for event in Process(of[key].folder).events() if is_phase(event)]
        for of in (found, whole)
    ]
    assert phases[0] == phases[1] != []


def is_phase(event: Span | Counter) -> bool:
    return isinstance(event, Span) and event.is_phase


def test_steps_of_another_host_are_moved(two: Hosts, tmp_path: Path) -> None:
    """A host that has the readings and no steps takes those of another one, by the clock of its own."""
    first, second = (shutil.copytree(path, tmp_path / path.name) for path in (two.first, two.second))
    domains = [Recording.open(path).processes[0].clock_domain for path in (second, first)]
    exchanges = [
        (there_ns - (back_ns - sent_ns) // 2, (sent_ns + back_ns) // 2, there_ns + (back_ns - sent_ns) // 2)
        for said in alignment.read_lines(first).values
        for sent_ns, there_ns, back_ns in [(said["sent_ns"], said["read_ns"], said["received_ns"])]
    ]
    lines = [clock_readings.line(*domains, exchange, host="first", exchanges=50) for exchange in exchanges]
    (second / clock_readings.FILE).write_text("".join(lines))
    (first / clock_readings.FILE).unlink()
    clock = dict(zip(("boot_id", "time_namespace"), domains[0], strict=True))
    said = json.loads((second / manifest.FILE).read_text())
    (second / manifest.FILE).write_text(json.dumps({**said, "clock_domain": clock}))
    assert f"steps {CHOSEN} are here whole" in run("collect", second, first, "--steps", CHOSEN)
    assert Recording.open(second).brief_steps == {0, 2}


def test_unknown_clock_is_said(two: Hosts, tmp_path: Path) -> None:
    """A host whose clock nobody read gives everything: nobody knows when its steps were."""
    first = shutil.copytree(two.first, tmp_path / "first")
    (first / clock_readings.FILE).unlink()
    said = run("collect", first, two.second, "--steps", CHOSEN, "--unknown-clocks")
    assert "are here whole" not in said and "2 of its processes came whole, because nobody read their clock" in said
    events = [
        {p.key: [*Process(p.folder).events()] for p in Recording.open(path).processes} for path in (first, two.second)
    ]
    assert {key: events[0][key] for key in events[1]} == events[1] and Recording.open(first).brief_steps == frozenset()


def test_a_node_knows_its_own_clock_only(two: Hosts, tmp_path: Path) -> None:
    """A process on a node in a time namespace of its own comes whole, and is counted."""
    agent = Agent("run")
    agent.spool = shutil.copytree(two.second, tmp_path / "spool")
    steps = [StepRow(number, number, number + 1) for number in range(STEPS)]
    assert agent.abridge(steps, str(CHOSEN), {}) == (str(agent.spool), Given(is_brief=False, unrelated=2))


def test_nothing_to_leave_out_is_said(two: Hosts, tmp_path: Path) -> None:
    """Where the chosen steps are all that there is, the command does not speak of others."""
    first = shutil.copytree(two.first, tmp_path / "first")
    said = run("collect", first, two.second, "--steps", f"0-{STEPS - 1}")
    assert "everything is here" in said and "totals" not in said
    assert Recording.open(first).brief_steps == frozenset()

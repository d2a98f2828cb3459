"""`rltrace collect --steps`: of other hosts come totals and chosen steps, and figures are those of one machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from scale.made_recording import Wanted, make

from rltrace.analysis.summary import Summary, summarize
from rltrace.cli import main
from rltrace.events import Counter, Span
from rltrace.read.recording import Recording
from rltrace.read.selection import numbers
from rltrace.run import collection
from rltrace.run.abridgement import ALWAYS_NS, whole_windows
from rltrace.run.brief import Steps
from rltrace.run.compaction import compact

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
    whole, collected = map(msgspec.to_builtins, summaries)
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
    before = msgspec.json.encode(summarize(Recording.open(copy)))
    compact(Recording.open(copy))
    assert msgspec.json.encode(summarize(Recording.open(copy))) == before


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

"""Which samples belong to one moment, by their stamps, from literals: the rule on both of its sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import Written, sample, span
from rltrace_exporters.perfetto_devices import DeviceCounters

from rltrace.analysis.ledger import Ledger, ledgers
from rltrace.analysis.observations import Observations
from rltrace.events import Counter, Span
from rltrace.read.recording import Recording

MIB = 1 << 20
WORKER, ENGINE, OTHER = 1, 2, 3
LOOK_S = 0.001


class Process:
    """What one process says: samples at times, each with what it holds and since when that is so."""

    def __init__(self, pid: int, owner: str) -> None:
        self.pid, self.owner = pid, owner
        self.records: list[Any] = []

    def looks(
        self,
        at_s: float,
        held_mib: float,
        *,
        used_mib: float | None = None,
        since_s: float | None = None,
        cpu_ms: dict[int, float] | None = None,
        cached_mib: float = 0,
        **args: Any,
    ) -> Process:
        """Add a sample that ends at a time; without `since_s` something has changed just before it."""
        start_s = at_s - LOOK_S
        args |= {"unchanged_ns": 0 if since_s is None else round((start_s - since_s) * 1e9)}
        if used_mib is not None:
            total = {"used": round(used_mib * MIB), "driver.reserved": 0}
            args |= {"totals": total, "others_bytes": round((used_mib - held_mib - cached_mib) * MIB)}
        if cpu_ms is not None:
            args["cpu_ns"] = {str(pid): round(used * 1e6) for pid, used in cpu_ms.items()}
        self.records += [
            sample(f"{self.owner}_bytes", at_s - LOOK_S / 2, round(held_mib * MIB)),
            sample("allocator.cached_bytes", at_s - LOOK_S / 2, round(cached_mib * MIB)),
            span("memory.edge", start_s, at_s, **args),
        ]
        return self


def read(folder: Path, *processes: Process) -> Ledger:
    """The ledger of a card that all of them use until 9 s."""
    written = Written(folder)
    for one in processes:
        written.process(
            str(one.pid), *one.records, rank=0, device={"host": "here", "uuid": "GPU-1"}, pid=one.pid, ended_s=9
        )
    (found,) = ledgers(Observations(written.read())).values()
    return found


def worker() -> Process:
    return Process(WORKER, "actor.params")


def engine() -> Process:
    return Process(ENGINE, "rollout.weights")


def at(found: Ledger, at_s: float) -> tuple[float, bool]:
    """What the engine is taken to hold at a moment, in MiB, and whether that is consistent."""
    index = found.times_ns.tolist().index(round(at_s * 1e9))
    return found.row("rollout.weights")[index] / MIB, bool(found.is_consistent[index])


@pytest.mark.parametrize(("since_s", "taken"), [(1.5, (70, True)), (2.0049, (70, True)), (2.0051, (50, False))])
def test_times_that_intersect(tmp_path: Path, since_s: float, taken: tuple[float, bool]) -> None:
    """A sample belongs to a moment within the time during which it holds, or 5 ms around that; the engine has grown."""
    said = engine().looks(1, 50).looks(3, 70, since_s=since_s)
    assert at(read(tmp_path / "run", worker().looks(2, 10, used_mib=999), said), 2) == taken


def test_unchanged_until_the_next_sample(tmp_path: Path) -> None:
    """A sample holds until the last one whose stamp reaches back over it, and not until the next that has changed."""
    said = engine().looks(1, 50).looks(3, 50, since_s=1 - LOOK_S).looks(5, 0)
    looked = [worker().looks(at_s, 10, used_mib=900 + at_s) for at_s in (2, 4)]
    both = worker()
    both.records = [record for one in looked for record in one.records]
    found = read(tmp_path / "run", both, said)
    assert [at(found, 2), at(found, 4)] == [(50, True), (50, False)]


@pytest.mark.parametrize(
    ("engines_used_mib", "taken"), [(300, (70, True)), (300 + 1 / MIB, (50, False)), (None, (50, False))]
)
def test_total_that_stays(tmp_path: Path, engines_used_mib: float | None, taken: tuple[float, bool]) -> None:
    """What others hold together stays the same until somebody reads another total; a sample at such a time belongs."""
    looked = worker().looks(2, 10, used_mib=300).looks(4, 10, used_mib=500, since_s=2 - LOOK_S)
    said = engine().looks(1, 50).looks(3, 70, used_mib=engines_used_mib)
    assert at(read(tmp_path / "run", looked, said), 2) == taken


@pytest.mark.parametrize(("worker_mib", "taken"), [(40, (70, True)), (41, (50, False))])
def test_total_without_its_reader(tmp_path: Path, worker_mib: float, taken: tuple[float, bool]) -> None:
    """It is what the others hold that stays, whatever the reader takes for itself meanwhile."""
    looked = worker().looks(2, 10, used_mib=300).looks(3.5, worker_mib, used_mib=330, since_s=2.5)
    said = engine().looks(1, 50).looks(3, 70, used_mib=330)
    assert at(read(tmp_path / "run", looked, said), 2) == taken


@pytest.mark.parametrize(("used_ms", "taken"), [(5, (50, True)), (5.1, (50, False))])
def test_idle_process_changes_nothing(tmp_path: Path, used_ms: float, taken: tuple[float, bool]) -> None:
    """A sample holds until somebody sees that its process has run again."""
    looked = worker().looks(2, 10, used_mib=300, cpu_ms={ENGINE: 7 + used_ms})
    said = engine().looks(1, 50, cpu_ms={ENGINE: 7})
    assert at(read(tmp_path / "run", looked, said), 2) == taken


def test_idle_process_sample_ends_with_its_next(tmp_path: Path) -> None:
    """A sample of an idle process holds until the process samples again.

    Though it has hardly run since: by its own next stamp its memory has changed.
    """
    looked = worker().looks(2, 10, used_mib=300, cpu_ms={ENGINE: 8})
    said = engine().looks(1, 50, cpu_ms={ENGINE: 7}).looks(1.1, 0, cpu_ms={ENGINE: 7.5})
    assert at(read(tmp_path / "run", looked, said), 2) == (0, True)


def test_nearest_of_one_state(tmp_path: Path) -> None:
    """While nothing comes to the card or goes, what is nearest in time is taken: memory moves within an allocator."""
    looked = engine().looks(2, 50, used_mib=300)
    said = worker().looks(1.9, 200).looks(7, 0, cached_mib=200, since_s=1.9 - LOOK_S)
    found = read(tmp_path / "run", said, looked)
    assert (found.row("actor.params")[0], found.row("allocator.cached")[0]) == (200 * MIB, 0)
    assert found.is_consistent.all()


@pytest.mark.parametrize(("other_since_s", "is_consistent"), [(3.5, False), (2.9, True)])
def test_all_times_intersect(tmp_path: Path, other_since_s: float, is_consistent: bool) -> None:
    """Two samples that each hold while the total stays are of one moment only if they hold together."""
    looked = worker().looks(2, 10, used_mib=300).looks(4, 10, used_mib=300, since_s=2 - LOOK_S)
    said = engine().looks(1, 50).looks(3, 70, used_mib=300).looks(5, 90)
    other = Process(OTHER, "rollout.kv_cache").looks(1, 5).looks(3.9, 9, since_s=other_since_s)
    assert at(read(tmp_path / "run", looked, said, other), 2) == (70, is_consistent)


def test_process_before_its_first_sample(tmp_path: Path) -> None:
    """It is not there yet, however far back its first stamp reaches; nothing is waited for."""
    said = engine().looks(3, 70, since_s=1)
    assert at(read(tmp_path / "run", worker().looks(2, 10, used_mib=300), said), 2) == (0, True)


def test_one_sample_without_a_stamp(tmp_path: Path) -> None:
    """A device of which one sample has no stamp is read by age and agreement, as older Recordings are."""
    looked = worker().looks(2, 10, used_mib=300, cpu_ms={ENGINE: 900})
    said = engine().looks(1, 50, cpu_ms={ENGINE: 0}).looks(3, 50, since_s=1 - LOOK_S, cpu_ms={ENGINE: 950})
    assert at(read(tmp_path / "stamped", looked, said), 2) == (50, True)
    del said.records[2][0][4]["unchanged_ns"]
    assert at(read(tmp_path / "run", looked, said), 2) == (50, False)


def test_hidden_move(tmp_path: Path) -> None:
    """A process that moves memory and says that nothing has changed is found out: its moments are judged."""
    looked = worker().looks(2, 10, used_mib=110).looks(4, 10, used_mib=1110, since_s=2 - LOOK_S)
    said = engine().looks(1, 100).looks(5, 100, since_s=1 - LOOK_S)
    found = read(tmp_path / "run", looked, said)
    assert found.is_consistent.all()
    assert (found.row("unaccounted") / MIB).tolist() == [0, 1000]


def test_timeline_has_the_same_moments(tmp_path: Path) -> None:
    """The export keeps what the rule needs of each sample, its beginning and its stamp too."""
    looked = worker().looks(2, 10, used_mib=80)
    found = read(tmp_path / "run", looked, engine().looks(1, 50).looks(3, 70, since_s=2.0045))
    recording = Recording.open(tmp_path / "run")
    counters = DeviceCounters(recording.processes)
    for process in recording.processes:
        for event in process.events():
            if isinstance(event, Counter):
                counters.add(process, event.name, np.array([event.ts_ns]), np.array([float(event.value)]))
            elif isinstance(event, Span):
                counters.add_look(process, event, 0)
    ((_, totals),) = counters.devices()
    drawn = [total.value / MIB for total in totals if total.name == "unaccounted_bytes"]
    assert drawn == (found.row("unaccounted") / MIB).tolist() == [0]

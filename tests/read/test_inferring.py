"""Steps and phases that nobody marks, while they go on: what the reader of the finished Recording infers, in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from growing_runs import grow
from inferred_loops import ACTOR, CRITIC, EMITS, HOOK, REF, forward, generate, learn
from recordings import SECOND, Written, span
from test_following import Followed

from rltrace.events import STEP, Span
from rltrace.read import following, inferring
from rltrace.read.following import Follower
from rltrace.read.inferred import NEVER_NS
from rltrace.read.recording import Recording

KNOWN = {**HOOK, "instrumentation": "trl", "target": "trl:step", "emits": [*EMITS, "actor.update"]}


def rl(at: float, **model: int) -> list[list[object]]:
    """A step with a generation, log-probs and two mini-batches."""
    return [
        *generate(at, at + 4), *forward(at + 4, at + 5), *forward(at + 5, at + 6, REF), *learn(at + 6), *learn(at + 9),
    ]  # fmt: skip


def opened(name: str, start: float, end: float, **args: object) -> list[list[object]]:
    """A span whose beginning is written before its end."""
    return [[name, 0, round(start * SECOND), args, True], [round(start * SECOND), round(end * SECOND), None, True]]


def sampled(at: float) -> list[list[object]]:
    """A step whose generation is made by hand, with an update."""
    return [one for n in range(6) for one in forward(at + n, at + n + 1, columns=9 + n)] + learn(at + 6)


LOOPS = {
    "generation": [rl(at) for at in range(0, 100, 20)],
    "by hand": [sampled(at) for at in range(0, 100, 20)],
    "two optimizers": [
        learn(at + 3 * n, number, (number,)) for at in range(0, 90, 9) for n, number in enumerate((1, 1, 2))
    ],
    "groups": [
        [*learn(at, 1, ()), *span("optimizer.step", at + 3, at + 4, optimizer="AdamW", number=1, models=[])]
        for at in range(0, 100, 10)
    ],
    "own phases": [[*rl(at), *span("mine", at + 5, at + 7, phase=True)] for at in range(0, 100, 20)],
    "copies": [
        [*generate(at, at + 4, 5), *learn(at + 4), *span("model.load_weights", at + 8, at + 9, model=5, by="torch")]
        for at in range(0, 100, 20)
    ],
    "log-probs": [
        [*generate(at, at + 4), *forward(at + 4, at + 5), *span("host.work", at + 5, at + 8, output_ns=2 * 10**9),
         *learn(at + 10), *span("gpu.optimizer.step", at + 12.5, at + 14, behind_host_ns=0)]
        for at in range(0, 100, 20)
    ],
    "critic": [
        [*generate(at, at + 4), *forward(at + 4, at + 5, CRITIC), *learn(at + 6), *learn(at + 9, 2, (CRITIC,))]
        for at in range(0, 100, 20)
    ],
    "generates only": [
        [*generate(at, at + 4), *span("model.load_weights", at + 5, at + 6, by="vLLM")] for at in (0, 9)
    ],
    "evaluated at last": [rl(0), rl(20), generate(40, 44)],
    "begins with forwards": [forward(0, 1), forward(1, 2, REF), rl(3), rl(23)],
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be inferred is inferred at each poll."""
    monkeypatch.setattr(following, "INFERRED_SHARE", 1e9)


def inferred(spans: list[Span]) -> list[Span]:
    return sorted((one for one in spans if one.is_inferred), key=lambda one: (one.start_ns, one.name))


def read(folder: Path) -> list[Span]:
    """What a reader of the finished Recording infers."""
    events = [event for process in Recording.open(folder).processes for event in process.events()]
    return inferred([event for event in events if isinstance(event, Span)])


class Again:
    """A Recording that is written again, and who follows it."""

    def __init__(self, folder: Path) -> None:
        self.growth = grow(folder)
        self.followed = Followed(Follower(Recording.open(folder)))
        self.given: list[list[Span]] = []
        """What each poll gave that was inferred."""

    def polls(self) -> Iterator[Follower]:
        """Poll behind each record."""
        for _ in self.growth:
            before = {key: len(spans) for key, spans in self.followed.ended.items()}
            self.followed.poll()
            ended = self.followed.ended.items()
            self.given.append([span for key, spans in ended for span in inferred(spans[before.get(key, 0) :])])
            yield self.followed.follower

    def all(self, key: str = "p") -> list[Span]:
        """What was inferred of a process, with what is open at last."""
        for _ in self.polls():
            pass
        return inferred([*self.followed.ended[key], *self.followed.follower.open_spans(key)])


def written(folder: Path, *records: list[list[object]], is_killed: bool = False) -> Path:
    """A process that ended, or was killed while its supervisor looked."""
    Written(folder).process("p", *records, hooks=(HOOK,), ended_s=None if is_killed else 200)
    if is_killed:
        with (folder / "processes" / "p" / "process.jsonl").open("a") as lines:
            exited = {"kind": "exit", "end_ns": 200 * SECOND, "killed_by": 9, "was_stopped": False}
            lines.write(json.dumps(exited) + "\n")
    return folder


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_reader_infers_the_same(loop: str, is_killed: bool, tmp_path: Path) -> None:
    """Record by record the same steps and phases come out as of the whole, also of a process that was killed."""
    again = Again(written(tmp_path / "run", *LOOPS[loop], is_killed=is_killed))
    assert again.all() == read(tmp_path / "run") and again.all()
    if loop in ("generation", "two optimizers"):
        assert sum(STEP in {span.name for span in spans} for spans in again.given) > 2  # one after the other


def test_what_goes_on_is_open(tmp_path: Path) -> None:
    """A step is open from its generation on, once something has learned; a phase is, while anything of it runs."""
    records = [*rl(0), *opened("model.generate", 20, 24, by="transformers", model=ACTOR), *learn(26)]
    again, seen = Again(written(tmp_path / "run", records)), []
    for follower in again.polls():
        spans = follower.open_spans("p") if follower.processes else []
        seen.append([span.name for span in spans if span.is_inferred])
        pending = follower.pending_spans("p") if follower.processes else []
        if "step" in seen[-1] and spans[0].start_ns == 20 * SECOND and len(seen[-1]) == 1:
            assert "rollout.generate" in [span.name for span in pending]
    assert ["step", "rollout.generate"] in seen and seen[-1] == []
    assert all(span.start_ns == 20 * SECOND for span in follower.open_spans("p"))


def test_two_ranks(tmp_path: Path) -> None:
    """Each infers its own steps, and one that only generates has its phases while the other steps."""
    run = Written(tmp_path / "run")
    for rank in range(2):
        run.process(f"rank-{rank}", *LOOPS["generation"], hooks=(HOOK,), ended_s=200, rank=rank, role="worker")
    engine = [[*generate(at, at + 3), *span("model.load_weights", at + 5, at + 6, by="vLLM")] for at in range(0, 90, 9)]
    run.process("engine", *engine, hooks=(HOOK,), ended_s=200, role="engine")
    again = Again(run.folder)
    last = [*again.polls()][-1]
    for process in Recording.open(run.folder).processes:
        whole = [event for event in process.events() if isinstance(event, Span)]
        assert again.all(process.key) == inferred(whole) != []
    before_its_end = [span for spans in again.given[:-1] for span in spans]
    assert sum(span.name == STEP for span in before_its_end) >= 2 * 3
    assert sum(span.name == "weight_sync" for span in before_its_end) > 5
    assert {last.inferred_until_ns(process.key) for process in last.processes} == {NEVER_NS}


def test_marks_win(tmp_path: Path) -> None:
    """In a run with steps of its own only phases are inferred; in one whose trainer a hook knows, nothing is."""
    for name, hooks, own in (("own", HOOK, span("step", 0, 90, step=7)), ("known", KNOWN, span("actor.update", 1, 2))):
        run = Written(tmp_path / name)
        run.process("driver", own, hooks=(hooks,), ended_s=200, role="driver")
        run.process("p", *LOOPS["generation"], hooks=(HOOK,), ended_s=200, rank=0, role="worker")
        again = Again(run.folder)
        found = again.all()
        assert found == read(run.folder)
        assert (STEP not in {one.name for one in found}) and bool(found) == (name == "own")


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that never comes to its next step is forgotten piece by piece, and its step goes on."""
    monkeypatch.setattr(inferring, "MOST_RAN", 40)
    endless = [forward(40 + n, 41 + n, columns=9 + n) for n in range(200)]
    run = written(tmp_path / "run", *LOOPS["generation"][:2], *endless, learn(300), generate(310, 311))
    again = Again(run)
    for follower in again.polls():
        assert len(follower._followed["p"].inferring._ran) <= 42
    steps = [(one.start_ns // SECOND, (one.end_ns or 0) // SECOND) for one in again.all() if one.name == STEP]
    assert steps == [(0, 20), (20, 40), (40, 310)]
    rollout = sum(one.seconds for one in again.all() if one.name == "rollout.generate" and one.start_ns >= 40 * SECOND)
    assert rollout == pytest.approx(201, abs=1)

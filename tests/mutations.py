"""Damages copies of a Recording in any way that a disk, a copy or a stranger does, and says what readers make of it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from rich.console import Console
from rltrace_exporters.archive import Archive
from rltrace_exporters.memory import Memory
from rltrace_exporters.perfetto import Perfetto

from rltrace.analysis.budget import budget
from rltrace.analysis.checks import checked
from rltrace.analysis.difference import difference, same_program, settings
from rltrace.analysis.encoded import as_json
from rltrace.analysis.findings import Why, why
from rltrace.analysis.measures import Judged
from rltrace.analysis.summary import Summary, analyse
from rltrace.cli.reports import as_junit
from rltrace.cli.tables import show
from rltrace.cli.tables.checks import show_checks
from rltrace.cli.tables.difference import show_difference
from rltrace.cli.tables.findings import show_findings
from rltrace.errors import RltraceError
from rltrace.host import clock
from rltrace.read import ending
from rltrace.read.recording import Recording
from rltrace.record import clock_readings, manifest
from rltrace.record.checksum import signed
from rltrace.record.process import append_exit

LIMITS = budget(
    None, ("step=1s", "act=10%", "memory.used=1GiB", "memory.actor.params=50%", "finding.slow_rank=1s", "startup=1ms"),
    "itself", (),
)  # fmt: skip

PROGRAM = """
import os, sys, time
import rltrace
from rltrace.record import lifecycle, spans
role, rank, is_killed = sys.argv[2], int(sys.argv[3]), sys.argv[4] == "killed"
rltrace.start(sys.argv[1], role=role, rank=None if rank < 0 else rank)
spans.current().hook("reference", "m:f", "installed", emits=("act",)).fired()
lifecycle.unavailable("GPU time", "there is none")
gather = spans.automatic_typed_span("weight_sync.gather", bytes=int, tensors=int)
pid = str(os.getpid())
for n in range(4):
    with rltrace.span("step", step=n) as step:
        with rltrace.phase("weight_sync"):
            for bucket in range(3):
                with gather(1000 + bucket, 2):
                    rltrace.flow(f"{n}.{bucket}", "out" if rank < 0 else "in")
        with spans.automatic_span("memory.edge") as edge:
            stamp = {"unchanged_ns": 1000 * n, "others_bytes": 8} if rank % 2 else {"age_ns": 0}  # as older ones
            edge.set(totals={pid: 5000}, cpu_ns={pid: 7}, **stamp)
        rltrace.counter("actor.params_bytes", 3000 + n)
        rltrace.counter("host.cpu_percent", 1.5)
        with rltrace.phase("rollout.generate", text="é", nested={"a": [1, None]}):
            time.sleep(0.001)
        now = time.monotonic_ns()
        spans.automatic_span_at("gpu.fsdp.all_gather", now - 1000, now, lane=3, bytes=64, ranks=2, error_ns=5)
        spans.automatic_span_at("rollout.request", now - 5000, now, lane=4, tokens=3)
        with rltrace.span("rollout.sleep", level=1), rltrace.span("cumem.unmap", tags={"weights": 1 << 21}):
            pass
        with rltrace.span("fails"):
            try:
                asked = {"asked_bytes": 9000, "free_bytes": 10, "owners": ["actor.params"]}
                with spans.automatic_span("memory.out_of_memory", **asked):
                    raise KeyError(n)
            except KeyError:
                pass
        step.set(tokens=100 + n, reward_mean=0.5)
if is_killed:
    rltrace.span("is open", deep={"a": {"b": 1}}).__enter__()
    os.kill(os.getpid(), 9)
rltrace.stop()
"""

UNMARKED = """
import sys, time
import rltrace
from rltrace.record import spans
rltrace.start(sys.argv[1], role=sys.argv[2], rank=max(0, int(sys.argv[3])))
emits = ("model.generate", "model.forward", "autograd.backward", "optimizer.step", "model.load_weights", "host.work")
fired = spans.current().hook("torch_models", "torch:nn.Module.__call__", "installed", emits=emits).fired
span = spans.automatic_span
for n in range(4):
    for length in range(9, 15):
        with span("model.forward", model=1, module="Policy", rows=2, columns=length):
            time.sleep(0.0002)
        fired()
    for name, args in (
        ("model.forward", {"model": 2, "module": "Policy", "rows": 2, "columns": 15}), ("host.work", {}),
        ("model.forward", {"model": 1, "module": "Policy", "rows": 2, "columns": 15, "gradient": True}),
        ("autograd.backward", {}),
        ("optimizer.step", {"optimizer": "AdamW", "tensors": 9, "number": 1, "models": [1]}),
        ("model.load_weights", {"by": "torch", "model": 2}),
    ):
        with span(name, **args):
            time.sleep(0.0005)
rltrace.stop()
"""
"""A loop that marks nothing: its steps and phases are inferred."""

KINDS = ("closed", "killed", "unmarked")


def record(folder: Path, kind: str) -> Path:
    """Have two processes record, the second of another clock that was measured; it may be killed."""
    is_killed = kind == "killed"
    program = UNMARKED if kind == "unmarked" else PROGRAM
    manifest.create(folder, owner=None, command=["python", "train.py"], config={"a": {"b": 1}})
    for role, rank, last in (("driver", -1, "ends"), ("worker", 0, "killed" if is_killed else "ends")):
        subprocess.run([sys.executable, "-c", program, str(folder), role, str(rank), last], check=not is_killed)
    worker = next(p for p in Recording.open(folder).processes if p.role == "worker")
    _give_clock(worker.folder / manifest.LINES)
    if is_killed:
        append_exit(worker.folder, end_ns=clock.now_ns(), killed_by=9, was_stopped=False)
    ending.write(folder, ending.Ending(1 if is_killed else 0, None))
    (folder / manifest.UNTRACED).write_text(json.dumps({"pid": 7, "command": ["python"], "reason": "-S"}) + "\n")
    home = (clock.domain()["boot_id"], clock.domain()["time_namespace"])
    at_ns = worker.start_ns
    exchanges = [(at_ns + n * 10**6, at_ns + 500 + n * 10**6, at_ns + 1000 + n * 10**6) for n in range(3)]
    (folder / clock_readings.FILE).write_text("".join(clock_readings.line(home, OTHER_CLOCK, one) for one in exchanges))
    return folder


def _give_clock(lines: Path) -> None:
    """Make the clock of a process another one."""
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    for line in said:
        line.pop("sum")
        if "boot_id" in line:
            line |= {"boot_id": OTHER_CLOCK[0], "time_namespace": OTHER_CLOCK[1]}
    lines.write_text("".join(signed(json.dumps(line)) + "\n" for line in said))


OTHER_CLOCK = ("other", "x")


# ---------------------------------------------------------------- damage

ODD = (
    None, True, -1, 0, 2**31, 2**63 - 1, 2**64, 10**400, 1e308, float("inf"), float("nan"), "", "a", "\ud800",
    "\x1b[2J", [], {}, [[]], {"a": None}, ["a", 1],
)  # fmt: skip


class Damaged(NamedTuple):
    """What was done."""

    what: str
    is_silent: bool
    """It was signed anew, as if a program had written it: readers must read it, and cannot know."""


def damage(folder: Path, chance: random.Random) -> Damaged:
    """Damage one file of a Recording."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    segments = [path for path in files if path.suffix == ".seg"]
    file = chance.choice(files if chance.random() < 0.5 else segments)
    kinds: list[Callable[[Path, random.Random], bool]] = [
        _flip,
        _flip,
        _flip,
        _noise,
        _cut,
        _grow,
        _zeros,
        _gone,
        _twice,
    ]
    if file.suffix in (".json", ".jsonl"):
        kinds = [*kinds, *[_line_gone, _field, _field, _field, _deep, _swap] * 2]
    kind = chance.choice(kinds)
    return Damaged(f"{kind.__name__} of {file.name}", kind(file, chance))


def _flip(file: Path, chance: random.Random) -> bool:
    content = bytearray(file.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return False


def _noise(file: Path, chance: random.Random) -> bool:
    content = bytearray(file.read_bytes())
    first = chance.randrange(len(content) + 1)
    content[first : first + chance.randrange(1, 64)] = chance.randbytes(chance.randrange(1, 64))
    file.write_bytes(content)
    return False


def _cut(file: Path, chance: random.Random) -> bool:
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content) + 1)])
    return False


def _grow(file: Path, chance: random.Random) -> bool:
    file.write_bytes(file.read_bytes() + chance.randbytes(chance.randrange(1, 300)))
    return False


def _zeros(file: Path, chance: random.Random) -> bool:
    content = bytearray(file.read_bytes())
    first = chance.randrange(len(content) + 1)
    content[first : first + 512] = bytes(len(content[first : first + 512]))
    file.write_bytes(content)
    return False


def _gone(file: Path, chance: random.Random) -> bool:
    file.unlink()
    return file.name in (ending.FILE, manifest.UNTRACED, clock_readings.FILE)


def _twice(file: Path, chance: random.Random) -> bool:
    file.write_bytes(file.read_bytes() * 2)
    return False


def _line_gone(file: Path, chance: random.Random) -> bool:
    lines = file.read_bytes().splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    file.write_bytes(b"".join(lines))
    return file.name in (ending.FILE, manifest.UNTRACED, clock_readings.FILE)


def _swap(file: Path, chance: random.Random) -> bool:
    lines = file.read_bytes().splitlines(keepends=True)
    chance.shuffle(lines)
    file.write_bytes(b"".join(lines))
    return False


def _field(file: Path, chance: random.Random) -> bool:
    """Another value, of another type or beyond all bounds, in one field."""
    return _rewrite(file, chance, lambda value: _set(value, chance))


def _deep(file: Path, chance: random.Random) -> bool:
    depth = chance.choice([70, 330, 900, 5000])

    def nest(text: str) -> str:
        name = json.dumps(chance.choice(list(json.loads(text))))
        return text.replace(name + ": ", f"{name}: " + '{"a": [' * depth + "1" + "]}" * depth + ', "b": ', 1)

    return _rewrite(file, chance, lambda value: json.loads(json.dumps(value)), nest)


def _rewrite(
    file: Path, chance: random.Random, change: Callable[[Any], Any], text_change: Callable[[str], str] = str
) -> bool:
    content = file.read_text(errors="replace")
    lines = [line for line in content.splitlines() if line] if file.suffix == ".jsonl" else [content]
    place = chance.randrange(len(lines))
    is_signed = chance.random() < 0.7
    value = json.loads(lines[place])
    value.pop("sum", None)
    text = text_change(json.dumps(change(value)))
    lines[place] = signed(text) if is_signed else text
    file.write_text("\n".join(lines) + "\n")
    return is_signed or file.suffix == ".json" or file.name in (manifest.UNTRACED, clock_readings.FILE)


def _set(value: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    name = chance.choice(list(value))
    inner = value[name]
    if isinstance(inner, dict) and inner and chance.random() < 0.7:
        return {**value, name: _set(inner, chance)}
    if chance.random() < 0.2:
        return {key: item for key, item in value.items() if key != name}
    return {**value, name: chance.choice(ODD)}


# ---------------------------------------------------------------- reading


def read(path: Path, chance: random.Random, *, is_quick: bool = True) -> Summary | None:
    """Have every reader read a Recording; one that is refused in words is None.

    Args:
        path: Of the folder, or of an archive.
        chance: Chooses when the slow ones do.
        is_quick: They do seldom.
    """
    try:
        recording = Recording.open(path)
        analysed = analyse(recording)
    except RltraceError as error:
        assert str(error)
        return None
    summary, judged = analysed.summary, why(analysed)
    assert not _broken(judged), _broken(judged)
    made = recording.manifest, recording.manifest
    found = difference(summary, summary, settings(*made), same_program=same_program(*made), whys=(judged, judged))
    run = Judged(summary, judged)
    gate = checked(run, LIMITS, run)
    assert not [change for change in found.findings if change.change in ("gone", "new")]
    json.loads(as_json((summary, found, judged, gate)))
    Perfetto().write(recording, io.BytesIO())
    Archive().write(recording, io.BytesIO())
    if not is_quick or chance.random() < 0.15:
        for whole in (False, True):
            show(summary, Console(file=io.StringIO(), width=100), whole=whole, why=judged)
        show_findings(judged, Console(file=io.StringIO(), width=100))
        show_checks(gate, Console(file=io.StringIO(), width=100))
        ElementTree.fromstring(as_junit(gate))
        if found.step is not None or found.peak is not None:
            show_difference(found, Console(file=io.StringIO(), width=100))
    if not is_quick or chance.random() < 0.02:
        try:
            Memory().write(recording, io.BytesIO())
        except RltraceError as error:
            assert str(error)
    return summary


def _broken(judged: Why) -> list[str]:
    """Findings that failed where they should have said what they lack."""
    said = {"critical_path": judged.no_path or ""} | {one.id: one.reason for one in judged.unjudged}
    return [f"{name}: {reason}" for name, reason in said.items() if reason.startswith("it failed")]


def figures(summary: Summary) -> dict[tuple[Any, ...], float]:
    """What a user reads first, by what it is of."""
    found: dict[tuple[Any, ...], float] = {("run",): summary.run.seconds}
    for step in summary.steps:
        found["step", step.lane, step.step] = step.seconds
    for row in summary.phases:
        for name, share in row.phases.items():
            found["phase", row.lane, row.step, name] = share.seconds
    for process in summary.processes:
        found["events", process.key] = process.spans + process.samples
    for device in summary.memory:
        found["peak", device.lane] = device.peak_bytes
    for hook in summary.hooks:
        found["fired", hook.target] = hook.fired
    for sync in summary.weight_sync:
        found["sync", sync.lane, sync.step] = sync.seconds
    return found


def wrong(before: Summary, after: Summary, times: float = 2) -> Iterator[str]:
    """Figures that have changed by more than `times`, or are gone."""
    of_after = figures(after)
    for what, figure in figures(before).items():
        now = of_after.get(what)
        if now is None:
            yield f"{what} is gone"
        elif not figure / times - 1e-3 <= now <= figure * times + 1e-3:
            yield f"{what} was {figure}, is {now}"


def is_warned(summary: Summary) -> bool:
    """Whether it says that something is wrong with the Recording."""
    return bool(summary.losses or summary.unsealed or not summary.complete) or any(
        not clock.aligned for clock in summary.clocks
    )


# ---------------------------------------------------------------- one case


class Run(NamedTuple):
    """A Recording that is whole, and its figures."""

    folder: Path
    summary: Summary

    @classmethod
    def recorded(cls, folder: Path, kind: str) -> Run:
        """Of two processes, of one of `KINDS`."""
        record(folder, kind)
        summary = read(folder, random.Random(0), is_quick=False)
        assert summary is not None and not summary.losses and bool(summary.unsealed) == (kind == "killed")
        assert bool(summary.inferred) == (kind == "unmarked")
        return cls(folder, summary)

    @classmethod
    def of_each_kind(cls, above: Path) -> list[Run]:
        """One of each kind."""
        return [cls.recorded(above / kind, kind) for kind in KINDS]

    @contextlib.contextmanager
    def copied(self) -> Iterator[Path]:
        """A copy to be damaged."""
        with tempfile.TemporaryDirectory(prefix="rltrace-damaged-") as folder:
            yield Path(shutil.copytree(self.folder, Path(folder) / "run"))


def check(run: Run, chance: random.Random) -> None:
    """Damage a copy of a run: every reader reads it or says why not, and no wrong figure is silent."""
    with run.copied() as copy:
        done = damage(copy, chance)
        with _in_seconds(done):
            summary = read(copy, chance)
    if summary is None or done.is_silent:
        return
    found = list(wrong(run.summary, summary))
    assert not found or is_warned(summary), f"{done}: {found[0]}, and no warning"
    assert summary.run.seconds < 2 * run.summary.run.seconds + 0.1, f"{done}: {summary.run.seconds} s"


def check_archive(run: Run, chance: random.Random) -> None:
    """The same of an archive: its bytes are damaged, or what is in it."""
    with run.copied() as copy:
        is_inside = chance.random() < 0.5
        done = damage(copy, chance) if is_inside else Damaged("an archive", True)
        file = copy.with_name("run.zip")
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            for path in sorted(path for path in copy.rglob("*") if path.is_file()):
                packed.write(path, path.relative_to(copy.parent))
        if not is_inside:
            chance.choice([_flip, _noise, _cut, _grow, _zeros])(file, chance)
        with _in_seconds(done):
            summary = read(file, chance)
        if summary is not None and not done.is_silent:
            found = list(wrong(run.summary, summary))
            assert not found or is_warned(summary), f"{done}: {found[0]}, and no warning"


MOST_SECONDS = {signal.ITIMER_PROF: 20.0, signal.ITIMER_REAL: 300.0}
"""What all readers together may take for one case, of CPU time and altogether, on a machine that does other things too;
they take 0.1."""


@contextlib.contextmanager
def _in_seconds(done: Damaged) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError(f"{done}: still reading after 20 s of CPU time, or 300 s altogether")

    before = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    for timer, seconds in MOST_SECONDS.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in MOST_SECONDS:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)

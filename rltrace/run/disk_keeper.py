"""`python -m rltrace.run.disk_keeper RECORDING`: keeps a run within its disk budget, from beside it.

The processes of a run never go over the budget themselves: they drop the oldest segments. This process does better, and
earlier. When most of the budget is spent, it makes the oldest steps brief: what figures are made of stays, and of all
other spans the totals by name. What is brief and a day old, or older than the budget allows, goes too; then totals of a
hundred steps each stay.

The supervisor starts it when it is needed, which in most runs is never.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from rltrace.events import SAMPLER, STEP, Span
from rltrace.host import clock, regular_file
from rltrace.host.mapped_file import require_size
from rltrace.limits import LIMITS
from rltrace.read import gate, order, removed
from rltrace.read.recording import Process
from rltrace.read.removed import Totals
from rltrace.read.step_records import StepRecords
from rltrace.record import checksum
from rltrace.record.announcement import complain
from rltrace.record.disk_account import DiskAccount, closed_in, on_disk
from rltrace.record.manifest import LINES, PROCESSES, to_json
from rltrace.record.process import is_of_this_host, process_key
from rltrace.run.brief import Brief, DamagedError, Form, Steps, brief
from rltrace.run.sidecar import is_over

PERIOD_SECONDS = 0.5
"""Time between two looks at the account."""

BEGIN_SHARE, ENOUGH_SHARE = 0.8, 0.65
"""Above which share of the budget steps are made brief, and until which share is left."""

AHEAD_LOOKS = 3
"""A run that grew between two looks begins to have steps made brief so many times that much below `BEGIN_SHARE`: making
them brief takes longer than writing them."""

BRIEF_SHARE = 0.3
"""Share of the budget that brief steps may take together."""

MERGED_STEPS = 100
"""How many steps are one in totals whose segments are gone, and in those that are older than `MERGED_AFTER_NS`."""

MERGED_AFTER_NS = 24 * 3600 * 10**9

MOST_LINES_BYTES = 4 << 20
"""Lines of totals that are longer than this together are merged, if they have doubled since the last time."""

DONE_NS = 1 << 62
"""Until when a segment is brief in which there is nothing more to remove."""

FIRST_LOOK_BYTES = 4096
"""In so many bytes of a segment there is a record that bears a time."""

WORTH = 0.9
"""A segment of which more than this share would stay is left as it is."""


class _Old(NamedTuple):
    """A closed segment."""

    closed_ns: int
    """When it was closed, by the clock of this host."""
    process: Process
    path: Path
    size_bytes: int


class Keeper:
    """Makes steps of a Recording brief, the oldest first."""

    def __init__(self, recording: Path, account: DiskAccount) -> None:
        self._recording = recording
        self._account = account
        self._held_bytes = 1 << 62
        """What all processes held at the last look."""
        self._processes: dict[str, Process] = {}
        self._steps: dict[str, tuple[StepRecords, set[str]]] = {}
        """The steps in each process's closed segments, and the names of those that were looked through."""
        self._brief_until_ns: dict[Path, int] = {}
        """Segments that were made brief, or were not worth it, and until which time."""
        self._first_ns: dict[Path, int] = {}
        """When each segment begins."""
        self._lines_bytes: dict[Path, int] = {}
        """What was taken of the budget for a process's lines of totals."""
        self._merged_bytes: dict[Path, int] = {}
        """How long a process's lines of totals were when they were merged."""

    def look(self) -> None:
        """Make room if most of the budget is spent."""
        budget_bytes = self._account.budget_bytes
        if budget_bytes is None:
            return
        held_bytes = self._account.held_bytes()
        grown_bytes = max(0, held_bytes - self._held_bytes)
        self._held_bytes = held_bytes
        if held_bytes + AHEAD_LOOKS * grown_bytes <= BEGIN_SHARE * budget_bytes:
            return
        enough_bytes = int(ENOUGH_SHARE * budget_bytes)
        old = self._closed()
        there = {segment.path for segment in old}
        self._first_ns = {path: first_ns for path, first_ns in self._first_ns.items() if path in there}
        self._brief_until_ns = {path: until for path, until in self._brief_until_ns.items() if path in there}
        steps = self._steps_of_run(old)
        until_ns = self._at_end_of_step(steps, self._until_ns(old, self._account.held_bytes() - enough_bytes))
        for segment in old:
            self._shorten(segment, steps, until_ns, _form_of(segment.process))
        self._fold(old, steps, until_ns, int(BRIEF_SHARE * budget_bytes))

    def _fold(self, old: list[_Old], steps: Steps, until_ns: int, most_bytes: int) -> None:
        """Leave totals only of brief steps that are a day old, and of the oldest ones while all take too much."""
        day_ago_ns = clock.now_ns() - MERGED_AFTER_NS
        known_ns = self._brief_until_ns
        are_brief = [one for one in old if one.closed_ns <= until_ns and known_ns.get(one.path, DONE_NS) < DONE_NS]
        sizes = {one.path: on_disk(_size_bytes(one.path)) for one in are_brief}
        total_bytes = sum(sizes.values())
        for segment in are_brief:
            if segment.closed_ns > day_ago_ns and total_bytes <= most_bytes:
                return
            total_bytes -= sizes[segment.path]
            self._shorten(segment, steps, segment.closed_ns, Form.TOTALS)

    # ---- what is there

    def _closed(self) -> list[_Old]:
        """Return the segments of this host's processes that nobody writes to, the oldest first."""
        behind_ns = time.time_ns() - clock.now_ns()
        found: list[_Old] = []
        for folder in (self._recording / PROCESSES).iterdir():
            if is_of_this_host(folder.name) and (folder / LINES).exists():
                segments = closed_in(folder)
                if segments:
                    process = self._process(folder)
                    found += [_Old(one.closed_ns - behind_ns, process, one.path, one.size_bytes) for one in segments]
        return sorted(found, key=lambda one: one.closed_ns)

    def _process(self, folder: Path) -> Process:
        """Return the process of a folder, with what it has said until now."""
        known = self._processes.get(folder.name)
        if known is None or known.end_ns is None:
            known = self._processes[folder.name] = Process(folder, LIMITS)
        return known

    def _steps_of_run(self, old: list[_Old]) -> Steps:
        """Return the steps that count: the driver's, else those of the lowest rank, else of any process."""
        processes = {one.process.key: one.process for one in old}
        processes |= {folder.name: self._process(folder) for folder in (self._recording / PROCESSES).iterdir()}
        in_order = sorted(
            processes.values(), key=lambda p: (p.role != "driver", p.rank is None, p.rank or 0, p.start_ns)
        )
        for process in in_order:
            spans = self._steps_in(process)
            if spans:
                numbers = [_number(span, place) for place, span in enumerate(spans)]
                ends_ns = [1 << 62 if span.end_ns is None else span.end_ns for span in spans]
                return Steps([span.start_ns for span in spans], ends_ns, numbers)
        return Steps([], [], [])

    def _steps_in(self, process: Process) -> list[Span]:
        """Return the steps of a process, in order."""
        look, seen = self._steps.setdefault(process.key, (StepRecords(process.typed(STEP)), set()))
        closed = {one.path for one in closed_in(process.folder)}
        for path in sorted(closed):
            if path.name not in seen:
                look.through(_content(path))
                seen.add(path.name)
        looked = copy.deepcopy(look)
        for path in sorted(set(process.folder.glob("*.seg")) - closed):
            looked.through(_content(path))
        return sorted(looked.spans, key=lambda span: span.start_ns)

    def _begins(self, segment: _Old) -> int:
        """Return when a segment begins."""
        if segment.path not in self._first_ns:
            self._first_ns[segment.path] = _first_ns(segment.path)
        return self._first_ns[segment.path]

    def _until_ns(self, old: list[_Old], needed_bytes: int) -> int:
        """Return until when the oldest segments are together as long as what is needed."""
        for segment in old:
            if segment.path not in self._brief_until_ns:
                needed_bytes -= segment.size_bytes
            if needed_bytes <= 0:
                return segment.closed_ns
        return old[-1].closed_ns if old else 0

    def _at_end_of_step(self, steps: Steps, until_ns: int) -> int:
        """Return the end of the last step that was over then; the time itself before the first step."""
        if not steps.starts_ns or until_ns < steps.starts_ns[0]:
            return until_ns
        return max((end_ns for end_ns in steps.ends_ns if end_ns <= until_ns), default=steps.starts_ns[0])

    # ---- what goes

    def _shorten(self, segment: _Old, steps: Steps, until_ns: int, form: Form) -> None:
        """Make a segment brief, if there is anything in it that is not."""
        done_ns = self._brief_until_ns.get(segment.path, -1)
        if form is not Form.TOTALS and (
            done_ns >= min(until_ns, segment.closed_ns) or self._begins(segment) > until_ns
        ):
            return
        content = _content(segment.path)
        try:
            made = brief(content, segment.process.types, steps, until_ns, form)
        except DamagedError:  # it goes whole, if it has to
            self._brief_until_ns[segment.path] = DONE_NS
            return
        if len(made.content) < WORTH * len(content):
            totals = _of_hundreds(made.totals) if form is Form.TOTALS else made.totals
            self._replace(segment, made._replace(totals=totals))
        self._brief_until_ns[segment.path] = DONE_NS if form is Form.TOTALS else until_ns

    def _replace(self, segment: _Old, made: Brief) -> None:
        """Write down what will be missing in a segment and how it will be then, and replace it."""
        folder = segment.path.parent
        path = folder / removed.FILE
        if path not in self._lines_bytes:
            self._settle(folder)
        form = checksum.of_bytes(made.content)
        line = {"segment": segment.path.name, "bytes": form.size_bytes, "crc32": form.crc32}
        counts = {"spans": removed.rows_of(made.totals), "samples": made.samples, "flows": made.flows}
        _append(path, {**line, **counts})
        if not self._account.replace(segment.path, made.content):
            self._settle(folder)
        elif path.stat().st_size > max(MOST_LINES_BYTES, 2 * self._merged_bytes.get(path, 0)):
            self._merge(folder)
        self._count_lines(path)

    def _settle(self, folder: Path) -> None:
        """Drop what does not hold: whoever wrote it could not, or was killed before he could, replace the segment."""
        lines = _lines(folder)
        if len(holding := removed.holding(folder, lines)) < len(lines):
            _rewrite(folder / removed.FILE, holding)
        self._count_lines(folder / removed.FILE)

    def _count_lines(self, path: Path) -> None:
        """Take of the budget what the lines need."""
        size_bytes = on_disk(_size_bytes(path))
        more_bytes = size_bytes - self._lines_bytes.get(path, 0)
        if more_bytes > 0:
            self._account.take(more_bytes)
        else:
            self._account.give_back(-more_bytes)
        self._lines_bytes[path] = size_bytes

    def _merge(self, folder: Path) -> None:
        """Make few lines of many: totals of each step, and of each hundred steps that are a day old."""
        lines = removed.holding(folder, _lines(folder))
        totals = removed.merged(map(removed.totals_of, lines))
        newest = max((group.last_step for group in totals if group.last_step is not None), default=0)
        folded = _of_hundreds(totals, before=self._first_step_of_day(newest))
        forms = {
            line["segment"]: {**line, "spans": [], "samples": 0, "flows": 0}
            for line in lines
            if "segment" in line and (folder / line["segment"]).exists()
        }
        counts = {what: sum(line[what] for line in lines) for what in ("samples", "flows")}
        path = folder / removed.FILE
        _rewrite(path, [{"spans": removed.rows_of(folded), **counts}, *forms.values()])
        self._merged_bytes[path] = path.stat().st_size

    def _first_step_of_day(self, newest: int) -> int:
        """Return the first step that is not a day old."""
        day_ago_ns = clock.now_ns() - MERGED_AFTER_NS
        spans = [span for look, _ in self._steps.values() for span in look.spans]
        recent = [_number(span, newest) for span in spans if span.start_ns >= day_ago_ns]
        return min(recent, default=newest + 1)


def _of_hundreds(totals: Totals, before: int | None = None) -> Totals:
    """Return totals with each hundred of steps as one, of all steps or of those before one."""
    found: Totals = {}
    for group, total in totals.items():
        first, last = group.first_step, group.last_step
        if first is not None and last is not None and (before is None or last < before):
            hundred = first // MERGED_STEPS * MERGED_STEPS
            group = group._replace(first_step=hundred, last_step=hundred + MERGED_STEPS - 1)  # noqa: PLW2901
        removed.add(found, {group: total})
    return found


def _number(span: Span, place: int) -> int:
    number = span.args.get("step")
    return number if isinstance(number, int) else place


def _form_of(process: Process) -> Form:
    return Form.SAMPLER if process.role == SAMPLER else Form.PROGRAM


def _content(path: Path) -> bytes:
    """Return the content of a segment; nothing if it is gone."""
    try:
        return regular_file.read(path, LIMITS)
    except OSError:
        return b""


def _size_bytes(path: Path) -> int:
    """Return the size of a file; 0 if it is gone, which it may be at any moment."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _first_ns(path: Path) -> int:
    """Return the first time that a segment bears; that of no record is before all others."""
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.read(FIRST_LOOK_BYTES)
    except OSError:
        return 0
    unpacker = msgpack.Unpacker(None, unicode_errors="replace", timestamp=1, strict_map_key=False)
    unpacker.feed(content)
    with contextlib.suppress(ValueError, TypeError, msgpack.UnpackException):
        for record in unpacker:
            stamp = order.stamp_of(record) if record.__class__ is list and len(record) > 2 else None
            if stamp is not None:
                return stamp.at_ns
    return 0


def _lines(folder: Path) -> list[dict[str, Any]]:
    try:
        content = regular_file.read(folder / removed.FILE, LIMITS)
    except OSError:
        return []
    return gate.lines(content).fitting(gate.REMOVED).values


def _append(path: Path, line: Mapping[str, Any]) -> None:
    text = checksum.signed(to_json(line)) + "\n"
    with path.open("a") as file:
        require_size(path, file.tell() + len(text))
        file.write(text)


def _rewrite(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("".join(checksum.signed(to_json(line)) + "\n" for line in lines))
    unfinished.replace(path)


def main(folder: str) -> int:
    """Keep to the budget until stdin ends."""
    recording = Path(folder)
    account = DiskAccount(recording, process_key(clock.now_ns()))
    keeper = Keeper(recording, account)
    is_said = False
    while not is_over(PERIOD_SECONDS):
        try:
            keeper.look()
        except Exception as error:
            if not is_said:
                is_said = True
                complain(f"steps cannot be made brief, so that the oldest go whole: {type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

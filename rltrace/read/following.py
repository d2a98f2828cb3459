"""Follows a Recording while it grows: each poll reads what was appended since the one before it, and nothing else.

    follower = Follower(Recording.open("rltrace-runs/latest"))
    while not follower.is_over:
        for news in follower.poll():
            for span in news.ended:
                print(news.process.name, span.name, span.seconds)
        time.sleep(1)

What `poll` gives, from first to last, is what `Process.events` of the finished Recording gives. Steps and phases that
nobody marks are given when the next step has begun (`inferring.py`). Memory is bounded: a follower holds the processes,
the open spans, one piece of a segment, and of a loop that marks nothing what ran in the step that goes on.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np

from rltrace.events import MARKED_SINCE, Counter, Span
from rltrace.host import clock, regular_file
from rltrace.host.clock import Domain
from rltrace.host.pace import Pace
from rltrace.read import alignment, engines, gate, order, packed, removed, unmarked
from rltrace.read.columns import Columns, Growing, from_events
from rltrace.read.inferred import NEVER_NS
from rltrace.read.inferring import Inferring
from rltrace.read.native import UnsoundError
from rltrace.read.recording import Event, EventReader, Process, Recording, Segment
from rltrace.read.records import last_record, records, whole_bytes
from rltrace.record import clock_readings, manifest
from rltrace.record.checksum import Sum
from rltrace.record.manifest import LINES
from rltrace.record.process import COUNTS, LOST

NEWS_BYTES = 4 << 20
"""About so many bytes of segments are decoded at a time, so that old ones do not fill the memory."""

MOST_EARLY = 10_000
"""How many ends wait for a beginning that has not been read yet; the oldest are given up as orphans."""

COLLECTING_SECONDS = 60.0
"""How long segments of another host's process are awaited that said it has ended: its lines are collected first."""

DAMAGED_SECONDS = 1.0
"""A record that is not whole for so long is damaged. Its writer may be off its processor in the middle of it."""

INFERRED_SHARE = 0.1
"""Share of the time that inferring steps and phases may take."""

_SETTLED_NS = 1_000_000_000
"""A folder that changed this short a time ago may get another file without a change of its time."""


class Losses(NamedTuple):
    """What is missing of one process, since it began."""

    lost_events: int
    """Could not be written, or make no sense."""
    torn: int
    """Damaged records."""
    orphans: int
    """Ends and arrows whose span's beginning was not read."""
    damaged_segments: int
    """Segments that are not as they were when they were closed."""
    dropped_segments: int
    """Segments that were dropped to keep to a disk budget."""
    missed_segments: int
    """Segments that were dropped or made brief before all of them was read here; those that were there before the first
    poll, and were not asked for, are among them."""


class News:
    """What one process has written since it was last given."""

    def __init__(
        self,
        process: Process,
        found: Columns | Sequence[Event],
        began: list[Span],
        losses: Losses,
        *,
        is_new: bool,
        is_aligned: bool,
    ) -> None:
        self.process = process
        """The process. Its `name`, `role`, `rank`, `device`, `end_ns` and so on are what it has said so far."""
        self._found = found
        self.began = began
        """Spans that began and are open now. When such a span ends, it is in `ended`, with the
        same thread, task and `start_ns`. So a span that was short is in `ended` only."""
        self.losses = losses
        """What is missing of the process so far."""
        self.is_new = is_new
        """Whether it is given for the first time."""
        self.is_aligned = is_aligned
        """Whether the times are on the run's clock. If not, they are those of the process's own clock, and compare with
        others only by `Process.unix_offset_ns`. Readings of the clocks may come later."""

    @cached_property
    def ended(self) -> list[Span]:
        """Spans that ended, in the order in which each thread ended them."""
        if isinstance(self._found, Columns):
            return [*self._found.spans(np.arange(len(self._found)))]
        return [event for event in self._found if isinstance(event, Span)]

    @cached_property
    def samples(self) -> list[Counter]:
        """Samples, in the order in which each thread took them."""
        if isinstance(self._found, Columns):
            return self._found.counters()
        return [event for event in self._found if isinstance(event, Counter)]

    @cached_property
    def columns(self) -> Columns:
        """Both as columns, which are much quicker where somebody wants only some of them."""
        return self._found if isinstance(self._found, Columns) else from_events(self._found)

    @property
    def is_empty(self) -> bool:
        """Whether nothing ended, and no sample was taken."""
        if isinstance(self._found, Columns):
            return not (len(self._found) or len(self._found.samples.name))
        return not self._found


class Follower:
    """Reads a Recording as it grows."""

    def __init__(self, recording: Recording, *, newest_segments: int | None = None) -> None:
        """Begin before the first record.

        Args:
            recording: An open Recording; only its folder and its manifest are used.
            newest_segments: How many closed segments of each process are read that are there already when the process
                is first seen: 8 give some seconds, or minutes, of its past. By default all are. Segments that are being
                written are always read.
        """
        self.recording = recording
        self.bytes_read = 0
        """How many bytes of files were read so far."""
        self._newest_segments = newest_segments
        self._followed: dict[str, _Followed] = {}
        self._domain = recording.own_domain
        self._aligned: dict[Domain, alignment.Alignment] = {}
        self.read_hosts: set[str] = set()
        """Other hosts of the run whose clocks were read. What they record is here once it is collected."""
        self._clock_bytes = -1
        self._is_marked = recording.manifest["version"] >= MARKED_SINCE
        self._pace = Pace(INFERRED_SHARE)
        self._has_steps = False
        """Whether the run has steps, marked or inferred."""
        self.is_over = False
        """Whether the run has ended, and the last poll has read all of it. Only a run's own host can tell that it was
        killed."""

    @property
    def processes(self) -> list[Process]:
        """The processes that were given so far."""
        return [one.process for one in self._followed.values() if one.is_given]

    @property
    def time_domain(self) -> Domain | None:
        """The clock domain of the run, as `Recording.time_domain`, of the processes that were given so far."""
        domains = [process.time_domain for process in self.processes]
        return self._domain if self._domain in domains else next(iter(domains), None)

    def open_spans(self, key: str) -> list[Span]:
        """Return the spans that a process has open, by when they began: those of one thread and task contain each
        other. A step and a phase that go on are among them if they are inferred.

        Args:
            key: `Process.key`.
        """
        return self._followed[key].open_spans()

    def pending_spans(self, key: str) -> list[Span]:
        """Return the inferred steps and phases of a process that are over, and may change until they are given.

        Args:
            key: `Process.key`.
        """
        return self._followed[key].inferring.pending

    def inferred_until_ns(self, key: str) -> int:
        """Return until when all steps and phases of a process were given that are inferred; it is far ahead if none may
        come.

        Args:
            key: `Process.key`.
        """
        inferring = self._followed[key].inferring
        return inferring.since_ns if inferring.learns or not self._has_steps else NEVER_NS

    def poll(self) -> Iterator[News]:
        """Yield what was written since the last poll, process by process; a process with much news comes repeatedly.

        It raises nothing about files that are damaged, or gone: `News.losses` counts what is missing. Go through all of
        it before the next poll.
        """
        has_ended = self._has_ended()
        is_anyone_new = self._find_processes()
        said = [one.read_lines(self._count) for one in self._followed.values() if not one.is_over]
        has_ended = has_ended and not any(one.process.is_alive for one in self._unread())
        if is_anyone_new or any("process" in kinds for kinds in said):
            self._name()
        self._read_clocks()
        for one in self._followed.values():
            if not one.is_over and one.is_identified:
                yield from one.read_segments(self._count, has_ended=has_ended)
        yield from self._infer(has_ended)
        self.is_over = has_ended

    def _infer(self, has_ended: bool) -> Iterator[News]:
        """Yield what follows from all that was read, if nobody knows the trainer."""
        everyone = [one for one in self._followed.values() if one.is_given]
        if any(one.inferring.is_known for one in everyone):
            for one in everyone:
                one.inferring.give_up()
            return
        is_due, began = self._pace.is_due, time.monotonic()
        has_steps = any(one.inferring.has_steps for one in everyone)
        for one in everyone:
            is_last = one.is_over or has_ended
            if not one.inferring.is_finished and (is_last or (is_due and one.inferring.has_changed)):
                do_others_step = has_steps or any(other.inferring.has_given_steps for other in everyone)
                yield from one.infer(has_steps=has_steps, do_others_step=do_others_step, is_last=is_last)
        self._has_steps = has_steps or any(one.inferring.has_given_steps for one in everyone)
        if is_due:
            self._pace.took(time.monotonic() - began)

    def _has_ended(self) -> bool:
        """Return whether the run itself has; some of its processes may be about to."""
        said = self.recording.manifest
        if said.get("host") == manifest.host_name():
            owner = self._followed.get(str(said.get("owner")))
            return not manifest.does_owner_live(said) or (owner is not None and owner.process.end_ns is not None)
        is_all_read = bool(self._followed) and not any(self._unread())
        return is_all_read or self.recording.ending is not None

    def _unread(self) -> Iterator[_Followed]:
        return (one for one in self._followed.values() if not one.is_over)

    def _count(self, many: int) -> None:
        self.bytes_read += many

    def _find_processes(self) -> bool:
        """Return whether there is a new one."""
        above = self.recording.folder / manifest.PROCESSES
        if above.is_symlink():
            return False
        found = _listed(above, lambda entry: entry.is_dir(follow_symlinks=False))
        new = sorted(found.keys() - self._followed.keys())
        for key in new:
            self._followed[key] = _Followed(above / key, self.recording, self._newest_segments)
        return bool(new)

    def _read_clocks(self) -> None:
        """Align the processes of other clock domains, anew when there are new readings."""
        size_bytes = _size_of(self.recording.folder / clock_readings.FILE)
        if self._domain and size_bytes != self._clock_bytes:
            self._clock_bytes = size_bytes
            self._count(size_bytes)
            said = alignment.read_lines(self.recording.folder).values
            self._aligned = alignment.fitted(said, self._domain)
            self.read_hosts = {line["host"] for line in said if isinstance(line.get("host"), str)}
        for one in self._followed.values():
            fit = self._aligned.get(one.process.clock_domain)
            if self._domain and fit is not None and one.process.clock_domain != self._domain:
                one.process.align(fit, self._domain)

    def _name(self) -> None:
        """Tell each process what only the others say of it."""
        everyone = [one.process for one in self._followed.values()]
        for process in everyone:
            process.complete(everyone, self.recording.manifest)
        of_engines = engines.places(one.process for one in self._followed.values() if one.is_identified)
        for process in everyone:
            process.of_engine = of_engines.get(process.key)
        if not self._is_marked:
            marks = unmarked.markers({process.key: process.hook_lines for process in everyone})
            for process in everyone:
                process.mark = marks[process.key]


class _Followed:
    """One process, as far as it was read."""

    def __init__(self, folder: Path, recording: Recording, newest_segments: int | None) -> None:
        self.process = Process(folder, recording.limits, b"")
        self.is_given = False
        self.is_over = False
        """Whether it has ended and all of it was read."""
        self._limits = recording.limits
        self._own_domain = recording.own_domain
        self._newest_segments = newest_segments
        self._lines_bytes = 0
        self._events = _Events(self.process)
        self.inferring = Inferring()
        self._tails: dict[str, _SegmentTail] = {}
        """Of each segment that may still grow, or has not been read to its end."""
        self._finished: set[str] = set()
        """Names of the segments that need no look any more."""
        self._listed_ns: int | None = None
        self._given_open: set[tuple[int, int, int, str]] = set()
        self._awaited_since = 0.0
        """Since when it has ended, and segments of it are to come; 0 if that is not so."""
        self._lost = 0
        self._missed_segments = 0
        self._orphans = 0
        self._given_losses: Losses | None = None

    @property
    def is_identified(self) -> bool:
        return self.process.is_identified

    # ---- lines ----

    def read_lines(self, count: Callable[[int], None]) -> set[str]:
        """Read what it has said since, and return of which kinds that was."""
        path = self.process.folder / LINES
        if _size_of(path) <= self._lines_bytes:
            return set()
        try:
            content, read_bytes, _ = regular_file.tail(path, self._lines_bytes, self._limits)
        except OSError:
            return set()
        count(read_bytes)
        whole = content[: content.rfind(b"\n") + 1]
        self._lines_bytes += len(whole)
        return self.process.learn(whole) if whole else set()

    # ---- segments ----

    def read_segments(self, count: Callable[[int], None], *, has_ended: bool) -> Iterator[News]:
        """Yield what was appended to its segments.

        Args:
            count: Is told how many bytes were read.
            has_ended: Whether the run has, so that nothing more comes of this process.
        """
        is_over = self.process.end_ns is not None or self.process.gone_ns is not None
        self._find_segments()
        is_last = is_over and (has_ended or self._is_all_here())
        if is_over and not is_last:
            self._awaited_since = self._awaited_since or time.monotonic()
            is_last = time.monotonic() - self._awaited_since > COLLECTING_SECONDS
        self._read_lost(count)
        parts: list[_Part] = []
        for name, tail in sorted(self._tails.items()):
            is_closed = is_last or self._is_closed(name)
            content = self._appended(tail, count, is_closed=is_closed)
            if content:
                parts.append(_Part(tail, content))
            if is_closed or tail.is_gone:
                self._finish(name, tail, count)
            if sum(len(part.content) for part in parts) >= NEWS_BYTES:
                yield self._news(self._decoded(parts, count))
                parts = []
        found = self._decoded(parts, count)
        self._events.give_up_early_ends(0 if is_last else MOST_EARLY)
        cut = [*self._cut_by_pauses()] if is_last else []
        self.inferring.take(cut)
        self.is_over = is_last
        news = self._news(found)
        if cut:
            news.ended.extend(cut)
        if news.is_new or news.began or cut or not news.is_empty or is_last or news.losses != self._given_losses:
            self._given_losses = news.losses
            yield news

    def _is_closed(self, name: str) -> bool:
        """Return whether a segment is as it was when it was closed. Files of other hosts are collected one by one: its
        process may have said so before it is here."""
        seal = self.process.seal(name)
        return seal is not None and (self._is_own or _size_of(self.process.folder / name) >= seal.size_bytes)

    def _is_all_here(self) -> bool:
        closed = self.process.closed_segments - self._finished
        return self._is_own or all(map(self._is_closed, closed))

    @property
    def _is_own(self) -> bool:
        """Whether it runs on this host, where files are as it wrote them."""
        return self.process.host == manifest.host_name()

    def _decoded(self, parts: Sequence[_Part], count: Callable[[int], None]) -> Columns | Sequence[Event]:
        """Decode what was read; a typed span in it may have been declared only after its lines were read."""
        if not parts:
            return []
        self.read_lines(count)
        found = self._events.decode(parts, self._bounds_ns())
        self.inferring.take(found)
        self.inferring.look_at_open(map(self._shown, self._events.open))
        return found

    def _find_segments(self) -> None:
        changed_ns = _changed_ns(self.process.folder)
        if changed_ns is not None and changed_ns == self._listed_ns:
            return
        found = _listed(self.process.folder, lambda entry: entry.name.endswith(".seg"))
        found |= dict.fromkeys(self.process.packed.look())
        self._listed_ns = changed_ns
        self._finished &= found.keys()
        new = sorted(found.keys() - self._tails.keys() - self._finished)
        if not self.is_given and self._newest_segments is not None:
            closed = [name for name in new if self.process.seal(name) is not None]
            skipped = closed[: max(0, len(closed) - self._newest_segments)]
            self._finished.update(skipped)
            self._missed_segments += len(skipped)
            new = [name for name in new if name not in self._finished]
        for name in new:
            self._tails[name] = _SegmentTail(self.process.folder / name)

    def _appended(self, tail: _SegmentTail, count: Callable[[int], None], *, is_closed: bool) -> bytes:
        """Return what was appended to a segment, whole records."""
        try:
            part = regular_file.tail(tail.path, tail.at, self._limits)
            if tail.inode not in (None, part.inode):  # it was made brief, or collected once more
                count(part.read_bytes)
                part = regular_file.tail(tail.path, 0, self._limits)
                count(part.read_bytes)
                if not tail.is_beginning_of(part.content):
                    return self._of_brief(tail, part.content)
                part = part._replace(content=part.content[tail.at :], read_bytes=0)
        except regular_file.RefusedError:
            self.process.torn += 1
            tail.is_gone = True
            return b""
        except OSError:
            return self._of_columns(tail, count)
        count(part.read_bytes)
        tail.inode = part.inode
        return tail.take(part.content, is_closed=is_closed)

    def _of_columns(self, tail: _SegmentTail, count: Callable[[int], None]) -> bytes:
        """Return what follows in a segment that is no file any more: it was replaced by columns, or dropped."""
        try:
            content = self.process.packed.read(tail.path.name)
        except packed.DamagedError:
            self.process.damaged_segments += 1
        except OSError:
            self._missed_segments += 1
        else:
            count(len(content))
            return tail.take(content[tail.at :], is_closed=True)
        tail.is_gone = True
        return b""

    def _of_brief(self, tail: _SegmentTail, content: bytes) -> bytes:
        """Return what a segment that was made brief has behind what was read before that."""
        tail.is_gone = True
        self._missed_segments += 1
        new = []
        for record in records(content, lambda _: False, lambda: None, may_grow=False):
            stamp = order.stamp_of(record)
            if stamp is not None and stamp.at_ns > tail.last_ns:
                new.append(msgpack.packb(record, unicode_errors="surrogatepass"))
        return b"".join(new)

    def _bounds_ns(self) -> tuple[int, int]:
        """From when to when a record can have been written, by the process's own clock."""
        first_ns = int(self.process.identity.get("start_ns", 0)) - gate.SLACK_NS
        is_own_clock = self.process.clock_domain == _own_clock()
        return max(0, first_ns), clock.now_ns() + gate.SLACK_NS if is_own_clock else gate.MOST_NS

    def _finish(self, name: str, tail: _SegmentTail, count: Callable[[int], None]) -> None:
        seal = self.process.seal(name)
        if seal is not None and not tail.is_gone and tail.sum != seal:
            count(_size_of(self.process.folder / removed.FILE))
            briefly = removed.read(self.process.folder, self._limits).segments
            self.process.damaged_segments += tail.sum not in briefly.get(name, ())
        del self._tails[name]
        self._finished.add(name)

    # ---- what is inferred ----

    def infer(self, *, has_steps: bool, do_others_step: bool, is_last: bool) -> Iterator[News]:
        """Yield the inferred steps and phases that are over, or nothing but what goes on."""
        is_over = self.process.end_ns is not None
        before = self.inferring.open, self.inferring.pending
        given = self.inferring.more(
            has_steps=has_steps, do_others_step=do_others_step, is_over=is_over, is_last=is_last or is_over
        )
        if given or (self.inferring.open, self.inferring.pending) != before:
            yield self._news(given)

    # ---- what is open, and what is lost ----

    def open_spans(self) -> list[Span]:
        recorded = map(self._shown, self._events.open)
        return sorted([*self.inferring.open, *recorded], key=lambda span: span.start_ns)

    def _shown(self, span: Span) -> Span:
        """Return a span that is open as it is given: the decoder's own stays on the process's clock."""
        shown = copy(span)
        if self.process.mark is not None:
            self.process.mark(shown)
        if self.process.alignment is not None:
            self.process.aligned(shown)
        return shown

    def _cut_by_pauses(self) -> Iterator[Span]:
        """End the spans that a pause cut off where it began."""
        for span in [*self._events.open]:
            paused_ns = self.process.paused_after_ns(span.start_ns)
            if paused_ns is not None:
                self._events.open.remove(span)
                shown = copy(span)
                shown.end_ns = paused_ns
                if self.process.alignment is not None:
                    self.process.aligned(shown)
                yield shown

    def _read_lost(self, count: Callable[[int], None]) -> None:
        """Read how many events the process could not write."""
        try:
            with open(self.process.folder / COUNTS, "rb", buffering=0) as file:
                said = os.pread(file.fileno(), 8, 8 * LOST)
        except OSError:
            return
        count(len(said))
        self._lost = int.from_bytes(said, "little")

    def _losses(self) -> Losses:
        process = self.process
        return Losses(
            self._lost + process.misfits,
            process.torn,
            process.orphans,
            process.damaged_segments,
            process.dropped_segments,
            self._missed_segments,
        )

    def _news(self, found: Columns | Sequence[Event]) -> News:
        is_new, self.is_given = not self.is_given, True
        open_now = {(span.start_ns, span.thread, span.task, span.name): span for span in self.open_spans()}
        began = [span for key, span in open_now.items() if key not in self._given_open]
        self._given_open = {*open_now}
        is_aligned = self._own_domain is None or self.process.time_domain == self._own_domain
        return News(self.process, found, began, self._losses(), is_new=is_new, is_aligned=is_aligned)


class _Part(NamedTuple):
    """Whole records that were appended to a segment."""

    tail: _SegmentTail
    content: bytes


class _Events:
    """Decodes what a process appends: natively, or in Python once there is something that only Python can read."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.open: list[Span] = []
        """What is open, on the process's own clock."""
        self._reader: EventReader | None = None
        self._growing: Growing | None = None
        self._counted = (0, 0, 0)
        """The losses of the native decoder that were counted."""
        try:
            self._growing = Growing(process)
        except UnsoundError:
            self._reader = EventReader(process, process.types)

    def decode(self, parts: Sequence[_Part], life_ns: tuple[int, int]) -> Columns | Sequence[Event]:
        """Return what has ended, and the samples."""
        if self._growing is not None:
            threads = [part.tail.thread for part in parts]
            try:
                return self._natively(self._growing, parts, life_ns)
            except UnsoundError:
                for part, thread in zip(parts, threads, strict=True):
                    part.tail.thread = thread
                self._go_on_in_python()
        assert self._reader is not None
        return self._in_python(self._reader, parts, life_ns)

    def give_up_early_ends(self, most: int) -> None:
        """Count ends whose beginning has not come as orphans, all but so many."""
        if self._reader is not None:
            early = self._reader.early_ends
            given_up = list(islice(early, max(0, len(early) - most)))
            for start_ns in given_up:
                del early[start_ns]
            self.process.orphans += len(given_up)
        elif self._growing is not None and (not most or self._growing.is_full(most)):
            self._make_anew(self._growing)

    def _natively(self, growing: Growing, parts: Sequence[_Part], life_ns: tuple[int, int]) -> Columns:
        growing.declare()
        for tail, content in parts:
            tail.thread = growing.add(content, life_ns, tail.thread)
        ended = growing.ended()
        self.open = growing.open()
        self._count(growing)
        return ended

    def _count(self, growing: Growing) -> None:
        torn, orphans, strays = (now - before for now, before in zip(growing.losses, self._counted, strict=True))
        self.process.torn += torn
        self.process.orphans += orphans
        self.process.stray_flows += strays
        self._counted = growing.losses

    def _make_anew(self, growing: Growing) -> None:
        """Forget all texts, keys of arrows and early ends; what is open stays so."""
        growing.finish()
        self._count(growing)
        self._growing, self._counted = Growing(self.process), (0, 0, 0)
        try:
            self._growing.resume(self.open)
        except UnsoundError:
            self._go_on_in_python()

    def _go_on_in_python(self) -> None:
        self._growing, self._reader = None, EventReader(self.process, self.process.types)
        self._reader.resume(self.open)

    def _in_python(self, reader: EventReader, parts: Sequence[_Part], life_ns: tuple[int, int]) -> Sequence[Event]:
        mark, is_aligned = self.process.mark, self.process.alignment is not None
        found: list[Event] = []
        for tail, content in parts:
            for event in reader.more(Segment(content, *life_ns), tail.thread):
                given = event if mark is None else mark(event)
                found.append(self.process.aligned(given) if is_aligned else given)
            tail.thread = reader.thread
        self.open = [span for spans in reader.open.values() for span in spans]
        return found


class _SegmentTail:
    """How far a segment was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        """Where the next record begins."""
        self.thread = 0
        """Whose its last record is."""
        self.last_ns = 0
        """The last time that a record of it had."""
        self.inode: int | None = None
        self.is_gone = False
        """Whether the file is gone, or another one is in its place."""
        self._crc32 = 0
        self._torn_since = math.inf

    @property
    def sum(self) -> Sum:
        return Sum(self.at, self._crc32)

    def is_beginning_of(self, content: bytes) -> bool:
        """Return whether what was read is the beginning of some content."""
        return len(content) >= self.at and zlib.crc32(content[: self.at]) == self._crc32

    def take(self, content: bytes, *, is_closed: bool) -> bytes:
        """Return the whole records at the beginning of what follows, and go behind them.

        A record that is torn is being written, and whole when we look again. If it still is not a second later, it is
        damaged: the reader of records counts it, and goes on behind it. Its first byte is written last: until that is
        there, it is not damaged.
        """
        whole = len(content) if is_closed else whole_bytes(content)
        if self._is_damaged(is_torn=not whole and content[:1] not in b"\0"):
            whole = content.rfind(b"\xc3") + 1
        taken = content[:whole]
        stamp = order.stamp_of(last) if (last := last_record(taken)) is not None else None
        self.last_ns = self.last_ns if stamp is None else stamp.at_ns
        self._crc32 = zlib.crc32(taken, self._crc32)
        self.at += whole
        return taken

    def _is_damaged(self, *, is_torn: bool) -> bool:
        """Return whether the next record has been torn for so long that nobody is writing it."""
        now = time.monotonic()
        self._torn_since = min(self._torn_since, now) if is_torn else math.inf
        return now - self._torn_since > DAMAGED_SECONDS


_own_clock = cache(clock.own_domain)


def _listed(folder: Path, is_meant: Callable[[os.DirEntry[str]], bool]) -> dict[str, None]:
    try:
        with os.scandir(folder) as entries:
            return dict.fromkeys(entry.name for entry in entries if is_meant(entry))
    except OSError:
        return {}


def _size_of(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def _changed_ns(folder: Path) -> int | None:
    """Return when a file was last added to a folder, or removed; None if that was just now, so that another one may
    come at the same time."""
    try:
        changed_ns = folder.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        return None
    return changed_ns if time.time_ns() - changed_ns > _SETTLED_NS else None

"""Reads a Recording: a folder that is valid at every instant, while its run goes on and after any process was killed.

Streaming: a reader holds one segment and the spans that are open, whatever the Recording's size.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import msgpack

from rltrace import alignment, archive, checksum, clock, ending, gate, manifest
from rltrace.alignment import Alignment, Domain
from rltrace.ending import Ending
from rltrace.errors import RecordingError
from rltrace.events import VERSION, Args, Counter, Span, is_of_bytes
from rltrace.manifest import LINES
from rltrace.process import COUNT_SLOTS, COUNTS, LOST, UNSAID_ROLE

Event = Span | Counter

MOST_NAMES = 20_000
"""Names of spans that a reader remembers something of."""

GIVE = "; give the folder that `rltrace exec` or `run` named"


class Recording:
    """The folder of a run, or an archive of it, read only."""

    def __init__(self, path: Path, folder: Path, fields: dict[str, Any], damaged_fields: int = 0) -> None:
        self.path = path
        """What was opened."""
        self.folder = folder
        """Where its files lie: `path`, or where an archive was unpacked."""
        self.manifest = fields
        """As written by `rltrace.manifest.create`, those fields that can be what they say."""
        self._damaged_fields = damaged_fields

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Recording:
        """Read the manifest; unpack an archive first.

        Raises:
            RecordingError: there is no Recording at `path`, its manifest is damaged, or a newer rltrace wrote it.
        """
        opened = Path(path)
        try:
            if not opened.exists():
                raise RecordingError(f"{opened}: no such file or folder{GIVE}, or an archive of it")
            folder = archive.unpack(opened) if opened.is_file() else opened
            file = folder / manifest.FILE
            fields, damaged_fields = _read_manifest(file)
        except FileNotFoundError:
            raise RecordingError(f"{folder}: no Recording here ({manifest.FILE} is missing){_nearby(folder)}") from None
        except OSError as error:
            raise RecordingError(f"{error.filename or opened}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise RecordingError(
                f"{file}: damaged: {error}; the segments beside it are intact, restore the manifest from a copy"
            ) from None
        if "version" not in fields:
            raise RecordingError(f"{file}: damaged: it has no version; restore the manifest from a copy")
        if fields["version"] > VERSION:
            raise RecordingError(
                f"{file}: written in format {fields['version']}, this rltrace reads up to {VERSION}; upgrade rltrace"
            )
        return cls(opened, folder, fields, damaged_fields)

    @property
    def name(self) -> str:
        """Of what was opened: the folder, or the archive without its ending."""
        is_folder = self.folder == self.path
        return self.path.resolve().name if is_folder else self.path.name.removesuffix(archive.SUFFIX)

    @cached_property
    def processes(self) -> list[Process]:
        """Every process that recorded, by when it began, hosts kept together.

        Processes of another clock domain tell the times of the run's, where exchanges between the two were recorded.
        """
        folders = (self.folder / manifest.PROCESSES).glob("*/")
        processes = [Process(folder) for folder in folders if _is_of_process(folder)]
        reference = self._clock_domain_of_run
        aligned = alignment.read(self.folder, reference) if reference else {}
        for process in processes:
            process.complete(processes, self.manifest)
        for process in processes:
            if reference and process.clock_domain != reference and process.clock_domain in aligned:
                process.align(aligned[process.clock_domain], reference)
        return sorted(processes, key=lambda process: (process.host, process.start_ns, process.key))

    @cached_property
    def time_domain(self) -> Domain | None:
        """The clock domain that times are compared in: the run's own, else its driver's; None of an empty Recording.

        A process whose `time_domain` is another one has times that compare with these by real time only, with an error
        that nobody measured.
        """
        domains = {process.time_domain for process in self.processes}
        if self._clock_domain_of_run in domains:
            return self._clock_domain_of_run
        first = min(self.processes, key=_seniority, default=None)
        return first.time_domain if first else None

    @property
    def _clock_domain_of_run(self) -> Domain | None:
        """Of the process that made the Recording; older ones do not say."""
        said = self.manifest.get("clock_domain")
        return (str(said.get("boot_id")), str(said.get("time_namespace"))) if said else None

    @property
    def is_live(self) -> bool:
        """Whether the process that owns the run is still there, as seen from its host."""
        return manifest.is_live(self.folder)

    @property
    def is_watched(self) -> bool:
        """Whether a supervisor made it, which sees how processes go; nobody does where a program records itself."""
        return self.manifest.get("owner") is None

    @property
    def is_complete(self) -> bool:
        """Whether every process ended its part in good order."""
        return bool(self.processes) and all(process.end_ns is not None for process in self.processes)

    @property
    def ending(self) -> Ending | None:
        """How the command ended; None while it goes on, and of a program that no `rltrace exec` or `run` started."""
        return ending.read(self.folder)

    @property
    def untraced(self) -> list[dict[str, Any]]:
        """Processes of the run that were seen and not traced: `pid`, `command` and `reason` of each."""
        return self._read_untraced().values

    def _read_untraced(self) -> gate.Lines:
        found = gate.lines(_content(self.folder / manifest.UNTRACED), by_one_writer=False)
        return found.fitting(gate.UNTRACED)

    @property
    def damaged(self) -> dict[str, int]:
        """Lines or fields that cannot be read, of the files that are of no process."""
        counts = {
            manifest.FILE: self._damaged_fields,
            manifest.UNTRACED: self._read_untraced().damaged,
            alignment.FILE: alignment.read_lines(self.folder).damaged,
            ending.FILE: int(ending.is_damaged(self.folder)),
        }
        return {file: many for file, many in counts.items() if many}

    @property
    def lost_events(self) -> int:
        """Events that could not be written, over all processes."""
        return sum(process.lost_events for process in self.processes)


class Process:
    """What one process wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder.name
        self.identity: dict[str, Any] = {}
        self.alignment: Alignment | None = None
        """How its clock's times became those of the run; None where they are as it wrote them."""
        self._aligned_to: Domain = ("", "")
        self.hooks: list[dict[str, Any]] = []
        """As last reported, each with `fired`, and with `spent_ns`, None where nobody asked for it."""
        self.end_ns: int | None = None
        """When it ended its part in good order; None if it is alive or was killed."""
        self.killed_by: int | None = None
        """The signal that killed it, where somebody watched."""
        self.gone_ns: int | None = None
        """When that somebody saw that it was gone, whatever ended it."""
        self.was_stopped = False
        """It ended because another process of the run had died."""
        self.left_running: set[str] = set()
        """Keys of who ran when it, a driver, left its Ray cluster, whose workers Ray ends then."""
        self.pauses: list[tuple[int, int | None]] = []
        """From when to when it recorded nothing because it was told so; None: it never went on."""
        self.costs: dict[str, float] = {}
        """Nanoseconds that recording one event took in it, by kind of event; empty where nobody measured."""
        self.unavailable: dict[str, str] = {}
        """What it was to measure and could not, each with the reason."""
        self.allocations_begun: set[int] = set()
        """Chosen steps whose allocations it began to keep; those that it wrote have a span."""
        self.dropped_segments = 0
        self.dropped_bytes = 0
        self.threads: dict[int, str] = {}
        """Names by native id, known after `events` passed them."""
        self.torn = 0
        """Records that are damaged, such as the one that the process died in, known after `events`."""
        self.orphans = 0
        """Ends and flows whose span's beginning was dropped or lost, known after `events`."""
        self.stray_flows = 0
        """Of these the flows: no span of their thread and task was open."""
        self.misfits = 0
        """Whole records that say nothing, such as a sample whose value is no number, known after `events`."""
        self.unfit = 0
        """Arguments and fields left out, which cannot be what they say, such as 10**19 bytes; known after `events`."""
        self.damaged_lines = 0
        self.damaged_segments = 0
        """Not as they were when they were full or closed, or not there any more; known after `events`."""
        self.unsealed: dict[str, int] = {}
        """Bytes of each segment that nobody closed, so that nothing says whether it is as it was written; known after
        `events`. Empty where segments had no checksums yet."""
        self.has_checksums = False
        self._unfit_fields = 0
        self._seals: dict[str, checksum.Sum] = {}
        """Of segments that are full or closed."""
        self._dropped: set[str] = set()
        self._last_counts: dict[int, int] | None = None
        """What `counts.u64` was when it ended."""
        self._closed_segments: int | None = None
        self._types: dict[int, tuple[str, list[str]]] = {}
        self._read_lines()
        self.life_ns = self._life_ns()
        """From when to when its own clock can have been read."""

    @property
    def host(self) -> str:
        return str(self.identity.get("host", "unknown"))

    @property
    def pid(self) -> int:
        return int(self.identity.get("pid", 0))

    @property
    def life(self) -> tuple[Any, ...] | None:
        """What programs have in common that one process ran, each by `exec`; None where nobody could say."""
        ticks = self.identity.get("start_ticks")
        return None if ticks is None else (self.host, self.identity.get("boot_id"), self.pid, ticks)

    @property
    def start_ns(self) -> int:
        return self._on_time_line(int(self.identity.get("start_ns", 0)))

    @property
    def role(self) -> str:
        return str(self.identity.get("role") or UNSAID_ROLE)

    @property
    def rank(self) -> int | None:
        return self.identity.get("rank")

    @property
    def device(self) -> dict[str, Any] | None:
        return self.identity.get("device")

    @property
    def machine(self) -> dict[str, Any] | None:
        """What `rltrace.machine.machine` said of its host, where the process is its sampler."""
        return self.identity.get("machine")

    @property
    def chosen_steps(self) -> list[int]:
        """Those whose every allocation it was to keep."""
        return self.identity.get("chosen_steps") or []

    @property
    def parent(self) -> str | None:
        """Folder name of the traced process it descends from."""
        return self.identity.get("parent")

    @property
    def place(self) -> str:
        """Its place in the run: `rank 0 engine`, or `driver`."""
        return self.role if self.rank is None else f"rank {self.rank} {self.role}"

    @property
    def name(self) -> str:
        """What a reader calls it: its place, so that no two ranks read alike; without a rank, the name it was given."""
        given = self.identity.get("name") if self.rank is None else None
        return str(given) if given else self.place

    @property
    def clock_domain(self) -> Domain:
        """Of its own clock: processes of one domain share it by construction."""
        return str(self.identity.get("boot_id")), str(self.identity.get("time_namespace"))

    @property
    def time_domain(self) -> Domain:
        """The clock domain that its times are given in."""
        return self.clock_domain if self.alignment is None else self._aligned_to

    def align(self, alignment: Alignment, domain: Domain) -> None:
        """Give all times of this process in those of another clock domain from here on."""
        self.alignment, self._aligned_to = alignment, domain
        self.end_ns, self.gone_ns = (
            None if at_ns is None else self._on_time_line(at_ns) for at_ns in (self.end_ns, self.gone_ns)
        )

    def time_bound_ns(self, last_ns: int) -> float:
        """How far its times, until `last_ns`, are off at most in its `time_domain`; 0 for those of its own clock."""
        if self.alignment is None:
            return 0.0
        return self.alignment.largest_bound_ns(int(self.identity.get("start_ns", 0)), self.alignment.undone_ns(last_ns))

    @property
    def unix_offset_ns(self) -> int:
        """What to add to its times to get nanoseconds since 1970, by its own real-time clock."""
        return int(self.identity.get("realtime_ns", 0)) - self._on_time_line(int(self.identity.get("monotonic_ns", 0)))

    @property
    def is_alive(self) -> bool:
        """Whether it still runs; only its own host can tell."""
        if self.end_ns is not None or self.host != socket.gethostname():
            return False
        ticks = manifest.started_ticks(self.pid)
        return ticks is not None and ticks == self.identity.get("start_ticks")

    @property
    def lost_events(self) -> int:
        """Events it could not write (a full disk, a record too large) or not as what they are (`misfits`)."""
        return self._count(LOST) + self.misfits

    def events(self) -> Iterator[Event]:
        """Every span and sample, decoded and matched.

        Yields:
            Spans where they end and samples where they were taken, in the order each thread wrote them; threads follow
            each other segment by segment. Spans that never ended come last, `end_ns` None.
        """
        self.torn = self.orphans = self.stray_flows = self.misfits = self.damaged_segments = 0
        self.unfit, self.unsealed = self._unfit_fields, {}
        events = _EventReader(self, self._types).events()
        return events if self.alignment is None else map(self._aligned, events)

    def _aligned(self, event: Event) -> Event:
        if isinstance(event, Counter):
            event.ts_ns = self._on_time_line(event.ts_ns)
            return event
        event.start_ns = self._on_time_line(event.start_ns)
        if event.end_ns is not None:
            event.end_ns = self._on_time_line(event.end_ns)
        return event

    def _on_time_line(self, time_ns: int) -> int:
        return time_ns if self.alignment is None else time_ns + self.alignment.shift_ns(time_ns)

    @cached_property
    def _counts(self) -> memoryview:
        try:
            data = (self.folder / COUNTS).read_bytes()
        except OSError:
            data = b""
        return memoryview(data[: len(data) // 8 * 8]).cast("Q")

    def _read_lines(self) -> None:
        found = gate.lines(_content(self.folder / LINES))
        self.has_checksums, self.damaged_lines = found.are_signed, found.damaged
        hooks: dict[tuple[str, str], dict[str, Any]] = {}
        numbers: set[int] = set()
        for line in found.values:
            try:
                kind = gate.text(line.pop("kind", None))
                number = gate.LINE_NUMBER(line.pop("line", None))
                if number in numbers:  # there twice
                    continue
                numbers |= {number} - {None}
                if kind in gate.LINES:
                    self._read_line(kind, gate.LINES[kind](line), hooks)
            except ValueError:
                self.damaged_lines += 1
        if missing := max(numbers, default=-1) + 1 - len(numbers):  # a damaged one among them is one of these
            self.damaged_lines = max(self.damaged_lines, missing)
        if "start_ns" not in self.identity:
            self.damaged_lines = max(self.damaged_lines, 1)
        self.hooks = [
            {**hook, "fired": self._count(hook["slot"]), "spent_ns": self._count(COUNT_SLOTS + hook["slot"]) or None}
            for hook in hooks.values()
        ]

    def _read_line(self, kind: str, line: dict[str, Any], hooks: dict[tuple[str, str], dict[str, Any]]) -> None:
        if kind == "process":
            if line.get("role") == UNSAID_ROLE and self.identity:  # a plug-in that joined late has no better word
                del line["role"]
            said, unfit = gate.fields(line, gate.IDENTITY)
            self.identity |= said
            self._unfit_fields += unfit
        elif kind == "hook":
            hooks[line["instrumentation"], line["target"]] = line
        elif kind == "type":
            self._types[line["number"]] = (line["name"], line["fields"])
        elif kind == "pause":
            self.pauses.append((line["ts_ns"], None))
        elif kind == "resume":
            self.pauses[-1:] = [(begin_ns, line["ts_ns"]) for begin_ns, _ in self.pauses[-1:]]
        elif kind == "cost":
            self.costs |= line
        elif kind == "unavailable":
            self.unavailable[line["what"]] = line["reason"]
        elif kind == "allocations":
            self.allocations_begun.add(line["step"])
        elif kind == "lost":
            self.dropped_segments += line["segments"]
            self.dropped_bytes += line["bytes"]
            self._dropped |= {line["segment"]} if "segment" in line else set()
        elif kind == "left":
            self.left_running |= set(line["running"])
        elif kind == "seal":
            self._seals[line["segment"]] = checksum.Sum(line["bytes"], line["crc32"])
        elif kind == "end":
            self.end_ns = line["end_ns"]
            self._closed_segments = line.get("segments")
            if "counts" in line:
                self._last_counts = {int(slot): count for slot, count in line["counts"].items() if slot.isdecimal()}
        elif kind == "exit":
            self.killed_by, self.was_stopped = line["killed_by"], line["was_stopped"]
            self.gone_ns = line["end_ns"]
            if self.killed_by is None and self.end_ns is None:
                self.end_ns = self.gone_ns

    def _life_ns(self) -> tuple[int, int]:
        last_ns = max((at_ns for at_ns in (self.end_ns, self.gone_ns) if at_ns is not None), default=None)
        if last_ns is None:
            last_ns = clock.now_ns() if self.is_alive else gate.MOST_NS
        return int(self.identity.get("start_ns", 0)), last_ns

    def complete(self, processes: Iterable[Process], manifest: dict[str, Any]) -> None:
        """Where the line that says who this process is cannot be read, take what its folder's name says, and its clock
        from another one of its host."""
        host, _, began = self.key.rpartition("-")
        host, _, pid = host.rpartition("-")
        named = {"host": host, "pid": pid, "start_ns": began}
        if "start_ns" not in self.identity and pid.isdecimal() and began.isdecimal() and len(pid + began) < 30:
            self.identity = {**named, "pid": int(pid), "start_ns": int(began)} | self.identity
            self.life_ns = self._life_ns()
        if "boot_id" not in self.identity or "realtime_ns" not in self.identity:
            alike = (p.identity for p in processes if p.host == self.host and p.identity.keys() >= set(_CLOCK))
            known = next(alike, {**(manifest.get("clock_domain") or {})} if manifest.get("host") == self.host else {})
            self.identity = {name: known[name] for name in _CLOCK if name in known} | self.identity

    def check_segment(self, name: str, content: bytes) -> bool:
        """Whether a segment is as it was when it was full or closed; one that is not is counted.

        Args:
            name: Of its file.
            content: Of the file.
        """
        seal = self._seals.get(name)
        if seal is None:
            if self._closed_segments is not None:
                self.damaged_segments += 1
            elif self.has_checksums:
                self.unsealed[name] = len(content.rstrip(b"\0"))
            return False
        if checksum.of_bytes(content) == seal:
            return True
        self.damaged_segments += 1
        return False

    def check_all_there(self, names: Iterable[str]) -> None:
        """Count the segments that were closed, and are not there; what was dropped to keep to `max_bytes` is not."""
        if self.is_alive:  # it may have dropped one a moment ago
            return
        missing = self._seals.keys() - self._dropped - set(names)
        closed = 0 if self._closed_segments is None else self._closed_segments
        self.damaged_segments += len(missing) + max(0, closed - len(self._seals.keys() - self._dropped))

    def _count(self, slot: int) -> int:
        if self._last_counts is not None:
            return self._last_counts.get(slot, 0)
        count = self._counts[slot] if slot < len(self._counts) else 0
        return count if count <= MOST_COUNT else 0


_CLOCK = ("boot_id", "time_namespace", "monotonic_ns", "realtime_ns")

MOST_COUNT = 1 << 53
"""A count beyond is damage: nothing happens so often."""


class _EventReader:
    """Matches the ends of one process to their beginnings."""

    def __init__(self, process: Process, types: dict[int, tuple[str, list[str]]]) -> None:
        self.process = process
        self.types = types
        self.thread = 0
        """Whose records are being read."""
        self.open: dict[int, list[Span]] = {}
        """Spans by their start: two of one thread never share it, two threads may."""
        self.stacks: dict[tuple[int, int], list[Span]] = {}
        """Open spans by thread and task, innermost last: a flow belongs to the innermost."""
        self.barred: dict[int, set[int | None]] = {}
        """Lanes that an open span, by its id, cannot be on: one there began before it and ended inside it."""
        self.early_ends: dict[int, tuple[int, Args | None]] = {}
        """Ends read before their beginning: another thread ended the span, and its segment was read first."""
        self.nameless: set[int] = set()
        """Starts of spans that say nothing, whose ends are still to come."""
        self.first_ns, self.last_ns = 0, gate.MOST_NS
        """From when to when the segment that is being read can have been written."""
        self.checks: dict[str, dict[str, gate.Check]] = {}
        """Of arguments, by the name of their span; forgotten where there are `MOST_NAMES`."""
        # What a record is follows from the types of its elements; one that fits none is a typed span or damaged.
        self.readers: dict[tuple[type, ...], Callable[..., Event | None]] = {
            (int, str, bool): self._thread,
            (int, int, dict, bool): self._end,
            (int, int, NoneType, bool): self._end,
            (str, int, int, dict, bool): self._begin,
            (str, int, int, NoneType, bool): self._begin,
            (str, int, int, int, dict, bool): self._whole,
            (str, int, int, int, NoneType, bool): self._whole,
            (str, int, int, bool): self._counter,
            (str, int, float, bool): self._counter,
            (str, int, bool, bool): self._switch,
            (str, int, int, str, bool): self._flow,
        }

    def events(self) -> Iterator[Event]:
        paths = sorted(self.process.folder.glob("*.seg"))
        for path in paths:
            self.thread = 0
            yield from self._segment(path)
        self.process.check_all_there(path.name for path in paths)
        for span in [span for spans in self.open.values() for span in spans]:
            self._choose_lane(span)
            yield span
        self.process.orphans += len(self.early_ends)

    def _segment(self, path: Path) -> Iterator[Event]:
        """The events of one segment.

        Nearly every record begins a span that starts alone, or ends the innermost span of its thread and task. These
        two are handled on the spot, which halves the time an event takes; all others go to the readers by type.
        """
        open_spans, stacks, leave_out_unfit = self.open, self.stacks, gate.leave_out_unfit
        records = self._records(path)
        first_ns, last_ns, checks = self.first_ns, self.last_ns, self.checks
        for record in records:
            first, size = record[0], len(record)
            if size == 4 and first.__class__ is int:
                end_ns, late = record[1], record[2]
                spans = open_spans.get(first)
                if spans is not None and len(spans) == 1 and not self.barred and late.__class__ in _ARGS:
                    span = spans[0]
                    key = (span.thread, span.task)
                    stack = stacks[key]
                    if stack[-1] is span and end_ns.__class__ is int and first <= end_ns <= last_ns:
                        del open_spans[first]
                        if len(stack) == 1:
                            del stacks[key]
                        else:
                            del stack[-1]
                        span.end_ns = end_ns
                        if late:
                            known = checks.get(span.name)
                            if known:
                                self.process.unfit += leave_out_unfit(late, known)
                            elif known is None:
                                self._check(span.name, late)
                            span.args |= late
                        yield span
                        continue
            elif size == 5 and first.__class__ is str:
                task, start_ns, args = record[1], record[2], record[3]
                if (
                    args.__class__ in _ARGS
                    and start_ns.__class__ is int
                    and first_ns <= start_ns <= last_ns
                    and task.__class__ is int
                    and start_ns not in open_spans
                    and not self.early_ends
                ):
                    if args and checks.get(first, _NEW):  # a name that is new, or whose arguments figures are made of
                        self._check(first, args)
                    span = Span(first, self.thread, task, start_ns, None, args or {})
                    open_spans[start_ns] = [span]
                    siblings = stacks.get((self.thread, task))
                    if siblings is None:
                        stacks[self.thread, task] = [span]
                    else:
                        siblings.append(span)
                    continue
            read = self.readers.get((*map(type, record),))
            event = self._typed(*record) if read is None else read(*record)
            if event is not None:
                yield event

    def _records(self, path: Path) -> Iterator[list[Any]]:
        """The records of a segment; what can have been written into it is known when the first one is asked for."""
        self.first_ns, self.last_ns = 0, gate.MOST_NS
        try:
            data = path.read_bytes()
        except OSError:  # dropped by `max_bytes` a moment ago
            return iter(())
        if not self.process.check_segment(path.name, data):
            first_ns, last_ns = self.process.life_ns
            self.first_ns = max(0, first_ns - gate.SLACK_NS)
            self.last_ns = min(last_ns + gate.SLACK_NS, gate.MOST_NS)
        return self._decoded(data)

    def _decoded(self, data: bytes) -> Iterator[list[Any]]:
        """The whole records of a segment; zeros follow the last one."""
        read = 0
        for options in (_USUAL, _ODD_KEYS):
            unpacker = _unpacker(len(data) + 1, **options)
            unpacker.feed(data)
            unpacker.feed(b"\0")  # a sound segment ends in a zero; a file cut inside a record swallows it
            try:
                for _ in range(read):
                    unpacker.skip()
                for record in unpacker:
                    if record.__class__ is not list or len(record) < 3 or record[-1] is not True:
                        if record != 0:
                            self._damaged()
                        return
                    read += 1
                    yield record
                break
            except (ValueError, TypeError, msgpack.UnpackException):
                continue
        self._damaged()

    def _damaged(self) -> None:
        self.process.torn += 1

    def _thread(self, thread: int, name: str, _: bool) -> None:
        self.thread = thread
        self.process.threads[thread] = name

    def _check(self, name: str, args: Args) -> None:
        """Leave those arguments out that cannot be what a span of this name says with them."""
        checks = self.checks.get(name)
        if checks is None:
            if len(self.checks) >= MOST_NAMES:
                self.checks.clear()
            checks = self.checks[name] = gate.arguments_of(name)
        if checks:
            self.process.unfit += gate.leave_out_unfit(args, checks)

    def _add(self, span: Span, late: Args) -> None:
        self._check(span.name, late)
        span.args |= late

    def _counter(self, name: str, ts_ns: int, value: float, _: bool) -> Counter | None:
        if 0 <= ts_ns <= self.last_ns:
            if -_MOST <= value <= _MOST or value != value or not is_of_bytes(name):
                return Counter(name, self.thread, ts_ns, value)
            self.process.unfit += 1
        else:
            self._damaged()
        return None

    def _switch(self, name: str, ts_ns: int, value: bool, _: bool) -> Counter | None:
        return self._counter(name, ts_ns, int(value), True)

    def _whole(self, name: str, lane: int, start_ns: int, end_ns: int, args: Args | None, _: bool) -> Span | None:
        if not 0 <= start_ns <= end_ns <= self.last_ns:
            self._damaged()
            return None
        if args and self.checks.get(name, _NEW):
            self._check(name, args)
        return Span(name, self.thread, lane, start_ns, end_ns, args or {}, lane=None)

    def _begin(self, name: str, task: int, start_ns: int, args: Args | None, _: bool) -> Span | None:
        if not self.first_ns <= start_ns <= self.last_ns:
            self._damaged()
            return None
        if args and self.checks.get(name, _NEW):
            self._check(name, args)
        span = Span(name, self.thread, task, start_ns, None, args or {})
        if self.early_ends and start_ns in self.early_ends:
            return self._ended(span, *self.early_ends.pop(start_ns))
        self.open.setdefault(start_ns, []).append(span)
        self.stacks.setdefault((self.thread, task), []).append(span)
        return None

    def _typed(self, *record: Any) -> Span | None:
        """A typed span; one whose declaration was lost keeps its arguments, numbered."""
        number = record[0]
        sound = (*map(type, record[-4:-2]),) == (int, int) and type(record[-2]) in _ARGS
        if not sound or number.__class__ is not int or number >= 0:
            self._misfit(record[-3] if sound and len(record) == 5 else None)
            return None
        name, fields = self.types.get(number) or (f"type {number}", [f"arg{n}" for n in range(len(record) - 5)])
        args = dict(zip(fields, record[1:-4], strict=False))
        if record[-2]:
            args |= record[-2]
        return self._begin(name, record[-4], record[-3], args, True)

    def _misfit(self, start_ns: int | None = None) -> None:
        """Whole, and of no use: the program sampled what is no number, or named a span by what is no text."""
        self.process.misfits += 1
        if start_ns is not None and self.early_ends.pop(start_ns, None) is None:
            self.nameless.add(start_ns)

    def _end(self, start_ns: int, end_ns: int, late: Args | None, _: bool) -> Span | None:
        if not 0 <= start_ns <= end_ns <= self.last_ns:
            self._damaged()
            return None
        span = self._take(start_ns)
        if span is None and start_ns in self.nameless:
            self.nameless.discard(start_ns)
            return None
        if span is None:
            self.early_ends[start_ns] = (end_ns, late)
            return None
        return self._ended(span, end_ns, late)

    def _ended(self, span: Span, end_ns: int, late: Args | None) -> Span:
        span.end_ns = end_ns
        if late:
            self._add(span, late)
        return span

    def _take(self, start_ns: int) -> Span | None:
        spans = self.open.get(start_ns)
        if spans is None:
            return None
        span = spans[-1]
        if len(spans) == 1:  # begun in this thread or in another one
            del self.open[start_ns]
        else:
            span = next((s for s in spans if s.thread == self.thread), span)
            _remove(spans, span)
        self._leave(span)
        return span

    def _leave(self, span: Span) -> None:
        """Take a span off its stack; those that began after it and are still open overlap it without nesting."""
        key = (span.thread, span.task)
        stack = self.stacks[key]
        if self.barred or stack[-1] is not span:
            self._choose_lane(span)
            at = next(index for index in reversed(range(len(stack))) if stack[index] is span)
            for younger in stack[at + 1 :]:
                self.barred.setdefault(id(younger), set()).add(span.lane)
        if len(stack) == 1:
            del self.stacks[key]
        else:
            _remove(stack, span)

    def _choose_lane(self, span: Span) -> None:
        """The first lane of its row that no span is on which began before this one and ended inside it."""
        barred = self.barred.pop(id(span), ())
        span.lane = next(lane for lane in itertools.count() if lane not in barred)

    def _flow(self, key: str, task: int, _ts_ns: int, direction: str, _: bool) -> None:
        if direction not in ("out", "in"):
            self._misfit()
            return
        stack = self.stacks.get((self.thread, task))
        if not stack:
            self.process.orphans += 1
            self.process.stray_flows += 1
            return
        span = stack[-1]
        if direction == "out":
            span.flows_out = (*span.flows_out, key)
        else:
            span.flows_in = (*span.flows_in, key)


def _unpacker(size_bytes: int, **options: Any) -> Any:
    """Dates become seconds since 1970, as they are in the manifest; nothing larger than the segment is believed."""
    return msgpack.Unpacker(None, unicode_errors="replace", timestamp=1, max_buffer_size=size_bytes, **options)


def _remove(stack: list[Span], span: Span) -> None:
    """Take out this very span: mostly the last one, but spans of interleaved generators end in any order."""
    if stack[-1] is span:
        stack.pop()
    else:
        stack[:] = [other for other in stack if other is not span]


def _text_keys(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    return {key if isinstance(key, str) else str(key): value for key, value in pairs}


_ARGS = (dict, NoneType)
_NEW: dict[str, gate.Check] = {"": gate.text}
"""Checks of a name that nothing is known of yet."""
_MOST = gate.MOST_BYTES
_USUAL: dict[str, Any] = {}
_ODD_KEYS: dict[str, Any] = {"object_pairs_hook": _text_keys, "strict_map_key": False}
"""For a segment with a map whose keys are not text: slower, and every reader gets text."""


def _is_of_process(folder: Path) -> bool:
    """Whether a process recorded into it: one whose lines are lost has segments."""
    return (folder / LINES).is_file() or (not folder.name.startswith(".") and any(folder.glob("*.seg")))


def _read_manifest(file: Path) -> tuple[dict[str, Any], int]:
    """The fields of a manifest that can be what they say, and how many cannot; one that is not as it was signed has one
    of these somewhere.

    Raises:
        ValueError: it is no JSON object.
        OSError: it cannot be read.
    """
    content = file.read_bytes()
    said = gate.parsed(content)
    if said is None:
        json.loads(content)  # says where
        raise ValueError("it is no JSON object, or has more in each other than anybody writes")
    fields, unfit = gate.fields(said, gate.MANIFEST)
    return fields, unfit or int(checksum.is_intact(content) is False)


def _content(path: Path) -> bytes:
    """Of a file; nothing of one that is not there."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _seniority(process: Process) -> tuple[bool, int]:
    """The driver first, then by when they began."""
    return process.role not in LEADING, process.start_ns + process.unix_offset_ns


LEADING = ("driver", "main")
"""Roles of processes that begin the steps of a run."""
_ROLES = (*LEADING, "worker", "engine")


def in_order(processes: Iterable[Process]) -> list[Process]:
    """As readers show them: the driver, then rank by rank its worker and its engine, then what has no rank."""
    return sorted(processes, key=_position)


def _position(process: Process) -> tuple[int, int, int, int]:
    role = _ROLES.index(process.role) if process.role in _ROLES else len(_ROLES)
    if process.rank is not None:
        return 1, process.rank, role, process.start_ns
    return (0 if process.role in LEADING else 2), 0, role, process.start_ns


def newest(runs: Path) -> Path:
    """The Recording in `runs` that was made last.

    Raises:
        RecordingError: there is none.
    """
    found = sorted(runs.glob(f"*/{manifest.FILE}"), key=lambda file: file.stat().st_mtime_ns)
    if not found:
        raise RecordingError(f"{runs}/: no Recording here; make one with `rltrace exec -- COMMAND`")
    return found[-1].parent


def _nearby(folder: Path) -> str:
    below = sorted(folder.glob(f"*/{manifest.FILE}")) if folder.is_dir() else []
    return f"; did you mean {below[-1].parent}?" if below else GIVE

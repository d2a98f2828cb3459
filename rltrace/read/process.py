"""One process of a Recording: what it says of itself, its segments, and what of them is damaged or missing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Set
from functools import cached_property
from pathlib import Path
from typing import Any

from rltrace.events import SAMPLER, STEP, Counter, Span
from rltrace.host import clock, regular_file
from rltrace.host.clock import Domain
from rltrace.limits import LIMITS, Limits
from rltrace.read import engines, gate, packed, removed, unmarked
from rltrace.read.alignment import Alignment
from rltrace.read.event_reader import Event, EventReader, Segment, TypedSpan
from rltrace.read.inferred import with_inferred
from rltrace.read.step_records import StepRecords
from rltrace.read.window import Cut, inside
from rltrace.record import checksum, manifest
from rltrace.record.manifest import LINES
from rltrace.record.process import COUNT_SLOTS, COUNTS, LOST, UNSAID_ROLE

FILES = (".jsonl", ".u64", ".seg", packed.SUFFIX)
"""Endings of the files of a process."""

_CLOCK = ("boot_id", "time_namespace", "monotonic_ns", "realtime_ns")

MOST_COUNT = 1 << 53
"""A larger count is damage: nothing happens so often."""


class Process:
    """What one process wrote."""

    def __init__(self, folder: Path, limits: Limits = LIMITS, lines: bytes | None = None) -> None:
        """Read what it says of itself.

        Args:
            folder: Its folder in the Recording.
            limits: What is read without a question.
            lines: The lines that it has written so far; by default they are read.
        """
        self.folder = folder
        self.limits = limits
        self.key = folder.name
        self.identity: dict[str, Any] = {}
        self.alignment: Alignment | None = None
        """How its clock's times were mapped to the run's; None if they are as it wrote them."""
        self._aligned_to: Domain = ("", "")
        self.mark: unmarked.Mark | None = None
        """What tells its automatic spans by their names, where its records do not."""
        self._own_end_ns: int | None = None
        self._own_gone_ns: int | None = None
        self._own_left_ns: int | None = None
        self.killed_by: int | None = None
        """The signal that killed it, if somebody watched."""
        self.was_stopped = False
        """Whether it ended because another process of the run had died."""
        self.left_running: set[str] = set()
        """Keys of the processes on its host that ran when this driver left its Ray cluster; Ray then ends the cluster's
        workers."""
        self._own_pauses: list[tuple[int, int | None]] = []
        self.infers = False
        """Whether its steps and phases are inferred from what ran in it, because nothing in the run knows them."""
        self.run_has_steps: Callable[[], bool] = lambda: False
        """Whether the run recorded steps, of which none is inferred then."""
        self.of_engine: engines.Place | None = None
        """Which engine it belongs to, if it is an engine's process without a rank."""
        self.costs: dict[str, float] = {}
        """Nanoseconds that recording one event took in it, by kind of event; empty if nobody measured."""
        self.unavailable: dict[str, str] = {}
        """What it was to measure and could not, each with the reason."""
        self.allocations_begun: set[int] = set()
        """Chosen steps whose allocations it began to keep; those that it wrote have a span."""
        self.kernels_begun: set[int] = set()
        """Chosen steps whose kernels it began to record."""
        self.kernels_written: set[int] = set()
        """Those of them that it has written."""
        self.dropped_segments = 0
        self.dropped_bytes = 0
        self.threads: dict[int, str] = {}
        """Names by native id, known after `events` has passed them."""
        self.torn = 0
        """How many records are damaged, such as the one that the process died in; known after `events`."""
        self.orphans = 0
        """How many ends and flows lost the beginning of their span; known after `events`."""
        self.stray_flows = 0
        """How many of these are flows: no span of their thread and task was open."""
        self.misfits = 0
        """How many whole records make no sense, such as a sample whose value is no number; known after `events`."""
        self.unfit = 0
        """How many arguments and fields were left out because they cannot be right, such as 10**19 bytes; known after
        `events`."""
        self.damaged_lines = 0
        self.damaged_segments = 0
        """Segments that changed after they were full or closed, or are missing; known after `events`."""
        self.unsealed: dict[str, int] = {}
        """Bytes of each segment that nobody closed, so that nothing says whether it is as it was written; known after
        `events`. Empty if segments had no checksums yet."""
        self.has_checksums = False
        self._unfit_fields = 0
        self.packed = packed.Store(folder, limits)
        """Its segments that were replaced by compressed columns."""
        self._seals: dict[str, checksum.Sum] = {}
        """Checksums of segments that are full or closed."""
        self._dropped: dict[str, bool] = {}
        """Names of segments that were dropped, and whether the process did it to keep to a bound of its own: then they
        are not among those that it says it has closed."""
        self._last_counts: dict[int, int] | None = None
        """The content of `counts.u64` when it ended."""
        self._closed_segments: int | None = None
        self.types: dict[int, TypedSpan] = {}
        """The typed spans that it declared, by number."""
        self._cut = Cut()
        self._hook_lines: dict[tuple[str, str], dict[str, Any]] = {}
        self._line_numbers: set[int] = set()
        self._unreadable_lines = 0
        self._has_said_who = False
        self.learn(content_of(self.folder / LINES, self.limits) if lines is None else lines)
        self.life_ns = self._life_ns()
        """From when to when its own clock can have been read."""

    @property
    def is_identified(self) -> bool:
        """Return whether we know when it recorded, and by which clock; for one without events, because it said so."""
        known = {"start_ns", "boot_id"} <= self.identity.keys()
        return known and (self._has_said_who or bool(self.segment_names))

    @cached_property
    def records(self) -> int:
        """Return how many spans and samples are in its segments."""
        return sum(1 for _ in self.events())

    @property
    def host(self) -> str:
        return str(self.identity.get("host", "unknown"))

    @property
    def pid(self) -> int:
        return int(self.identity.get("pid", 0))

    @property
    def life(self) -> tuple[Any, ...] | None:
        """What programs share that one process ran, each by `exec`; None if that is not known."""
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
    def world_size(self) -> int | None:
        """How many ranks its launcher started, on all hosts together."""
        return self.identity.get("world_size")

    @property
    def device(self) -> dict[str, Any] | None:
        return self.identity.get("device")

    @property
    def machine(self) -> dict[str, Any] | None:
        """What `rltrace.host.machine.machine` said of its host, if the process is its sampler."""
        return self.identity.get("machine")

    @property
    def chosen_steps(self) -> list[int]:
        """Return the steps whose every allocation it was to keep."""
        return self.identity.get("chosen_steps") or []

    @property
    def kernel_steps(self) -> list[int]:
        """Return the steps whose kernels it was to record."""
        return self.identity.get("kernel_steps") or []

    @property
    def parent(self) -> str | None:
        """The folder name of the traced process that it descends from."""
        return self.identity.get("parent")

    @property
    def place(self) -> str:
        """Its place in the run: `rank 0 engine`, or `driver`."""
        return self.role if self.rank is None else f"rank {self.rank} {self.role}"

    @property
    def pauses(self) -> list[tuple[int, int | None]]:
        """From when to when it recorded nothing because it was told so; None: it never went on."""
        return [
            (self._on_time_line(begin_ns), None if end_ns is None else self._on_time_line(end_ns))
            for begin_ns, end_ns in self._own_pauses
        ]

    def paused_after_ns(self, start_ns: int) -> int | None:
        """When it first paused after a span began, both on its own clock; None if it did not."""
        return next((begin_ns for begin_ns, _ in self._own_pauses if begin_ns >= start_ns), None)

    @property
    def name(self) -> str:
        """What a reader calls it: its place, so that no two ranks read alike; without a rank, the name it was given.

        An engine's process without a rank has that of its engine, its GPU or a number beside its name.
        """
        if self.rank is not None:
            return self.place
        return self.given_name if self.of_engine is None else self.of_engine.name

    @property
    def given_name(self) -> str:
        """The name that it gave itself; without one, its role."""
        return str(self.identity.get("name") or self.role)

    @property
    def device_uuid(self) -> str | None:
        """Of the device that it said it works on."""
        uuid = (self.device or {}).get("uuid")
        return str(uuid) if uuid else None

    @property
    def clock_domain(self) -> Domain:
        """The domain of its own clock: processes of one domain share it by construction."""
        return str(self.identity.get("boot_id")), str(self.identity.get("time_namespace"))

    @property
    def time_domain(self) -> Domain:
        """The clock domain in which its times are given."""
        return self.clock_domain if self.alignment is None else self._aligned_to

    def align(self, alignment: Alignment, domain: Domain) -> None:
        """Give all times of this process in those of another clock domain from here on."""
        self.alignment, self._aligned_to = alignment, domain

    @property
    def end_ns(self) -> int | None:
        """When it ended its part in good order; None if it is alive or was killed."""
        return self._maybe_on_time_line(self._own_end_ns)

    @property
    def gone_ns(self) -> int | None:
        """When the watcher saw that it was gone, however it ended."""
        return self._maybe_on_time_line(self._own_gone_ns)

    @property
    def left_ns(self) -> int | None:
        """When this driver left its Ray cluster, the last time."""
        return self._maybe_on_time_line(self._own_left_ns)

    def time_bound_ns(self, last_ns: int) -> float:
        """Return how far its times, until `last_ns`, are off at most in its `time_domain`; 0 for those of its own
        clock."""
        if self.alignment is None:
            return 0.0
        return self.alignment.largest_bound_ns(int(self.identity.get("start_ns", 0)), self.alignment.undone_ns(last_ns))

    @property
    def unix_offset_ns(self) -> int:
        """What to add to its times to get nanoseconds since 1970, by its own real-time clock."""
        return int(self.identity.get("realtime_ns", 0)) - self._on_time_line(int(self.identity.get("monotonic_ns", 0)))

    @property
    def is_alive(self) -> bool:
        """Return whether it still runs; only its own host can tell."""
        if self.end_ns is not None or self.host != manifest.host_name():
            return False
        ticks = manifest.started_ticks(self.pid)
        return ticks is not None and ticks == self.identity.get("start_ticks")

    def typed(self, name: str) -> dict[int, list[str]]:
        """The fields of each typed span that it declared by this name, by its number."""
        return {number: declared.fields for number, declared in self.types.items() if declared.name == name}

    @property
    def lost_events(self) -> int:
        """How many events it could not write (a full disk, a record too large), or only as `misfits`."""
        return self._count(LOST) + self.misfits

    def events(self) -> Iterator[Event]:
        """Yield every span and sample, decoded and matched.

        Yields:
            Spans where they end and samples where they were taken, in the order in which each thread wrote them;
            threads follow each other segment by segment. Spans that never ended come last, with `end_ns` None; those
            among them that a pause cut off end where it began. Behind all of them come the steps and phases that are
            inferred from them, if nobody marks any.
        """
        if self._cut.depth is None:
            return self._inside(self._all_events())
        from rltrace.read.depth import shallow  # it takes numpy

        is_shallow = shallow(self._all_events(), self._cut.depth)
        return self._inside(event for event in self._all_events() if isinstance(event, Counter) or next(is_shallow))

    def _all_events(self) -> Iterator[Event]:
        """Return the events of the whole process."""
        self._forget_losses()
        events: Iterator[Event] = EventReader(self, self.types).events()
        if self.mark is not None:
            events = map(self.mark, events)
        if self.infers:
            events = with_inferred(events, self.run_has_steps, is_over=self.end_ns is not None)
        if self.alignment is not None:
            events = map(self.aligned, events)
        return events

    def _inside(self, events: Iterator[Event]) -> Iterator[Event]:
        return events if self._cut.windows is None else map(self._numbered, inside(events, self._cut.windows))

    @property
    def segment_names(self) -> list[str]:
        """Return the names of its segments, whether they are files or columns now, in order."""
        return sorted({path.name for path in self.folder.glob("*.seg")} | self.packed.look().keys())

    def segment_bytes(self) -> int:
        """Return how many bytes its segments have, or had before they were replaced by columns."""
        sizes = {name: place.sum.size_bytes for name, place in self.packed.look().items()}
        sizes |= {path.name: path.stat().st_size for path in self.folder.glob("*.seg")}
        return sum(sizes.values())

    def segment(self, name: str) -> bytes:
        """Return the content of a segment, from its file, or from columns if there is none or it is not as it was
        closed.

        Raises:
            RefusedError: its file is no regular one, or too large.
            DamagedError: its columns are damaged.
            OSError: it cannot be read, because it was dropped for example.
        """
        try:
            content = regular_file.read(self.folder / name, self.limits)
        except FileNotFoundError:
            return self.packed.read(name)
        if self.packed.has(name) and self._is_earlier(name, content):
            with contextlib.suppress(OSError):
                return self.packed.read(name)
        return content

    def _is_earlier(self, name: str, content: bytes) -> bool:
        """Return whether a segment is not as it was when it was closed, or was made brief after that."""
        seal = self.seal(name)
        return seal is not None and packed.sum_of(content) not in (seal, *self.removed.segments.get(name, ()))

    def segments(self, known: Set[str] = frozenset(), *, closed_first: bool = False) -> Iterator[Segment]:
        """Yield its segments in order, and count what is not as it was written, as `events` does.

        Args:
            known: Names of segments that are left out.
            closed_first: Those that nobody has closed come last. The segments of a thread stay in their order.
        """
        self._forget_losses()
        return EventReader(self, self.types).segments(known, closed_first=closed_first)

    @property
    def unfit_fields(self) -> int:
        """Return how many fields of its lines were left out because they cannot be right."""
        return self._unfit_fields

    def _forget_losses(self) -> None:
        self.torn = self.orphans = self.stray_flows = self.misfits = self.damaged_segments = 0
        self.unfit, self.unsealed = self._unfit_fields, {}

    def seal(self, name: str) -> checksum.Sum | None:
        """Return how a segment was when it was full or closed; None if nobody said that yet."""
        return self._seals.get(name)

    @property
    def closed_segments(self) -> set[str]:
        """Return the segments that are full or closed and were not dropped, as far as it has said so."""
        return self._seals.keys() - self._dropped.keys()

    @property
    def names_of_unsealed(self) -> list[str]:
        """Return the segments that nobody closed; none of a process that ended before there were checksums."""
        if not self.has_checksums and self.end_ns is not None:
            return []
        return sorted(file.name for file in self.folder.glob("*.seg") if file.name not in self._seals)

    @property
    def is_cut(self) -> bool:
        """Return whether it is a part of a process, of which only some events count."""
        return self._cut.windows is not None or self._cut.depth is not None

    @property
    def cut(self) -> Cut:
        """Return what of the process it is a part of."""
        return self._cut

    @property
    def may_lack_steps(self) -> bool:
        """Whether steps of it may be gone: segments were dropped, or steps themselves are known by totals only."""
        return self.dropped_segments > 0 or any(group.name == STEP for group in self.removed.totals)

    def has_steps(self) -> bool:
        """Return whether it recorded a step itself, without decoding anything else."""
        look = StepRecords(self.typed(STEP))
        for name in self.segment_names:
            with contextlib.suppress(OSError):
                look.through(self.segment(name))
            if look.spans:
                return True
        return False

    def part(self, cut: Cut) -> Process:
        """Return the same process with some of its events; see `Recording.part`."""
        part = copy.copy(self)
        part._cut = cut
        return part

    def _numbered(self, event: Event) -> Event:
        if event.name == STEP and isinstance(event, Span) and event.start_ns in self._cut.step_numbers:
            event.args.setdefault("step", self._cut.step_numbers[event.start_ns])
        return event

    def aligned(self, event: Event) -> Event:
        """Give an event its times in the process's `time_domain`, and return it."""
        if isinstance(event, Counter):
            event.ts_ns = self._on_time_line(event.ts_ns)
            return event
        event.start_ns = self._on_time_line(event.start_ns)
        if event.end_ns is not None:
            event.end_ns = self._on_time_line(event.end_ns)
        return event

    def _maybe_on_time_line(self, time_ns: int | None) -> int | None:
        return None if time_ns is None else self._on_time_line(time_ns)

    def _on_time_line(self, time_ns: int) -> int:
        return time_ns if self.alignment is None else time_ns + self.alignment.shift_ns(time_ns)

    @cached_property
    def removed(self) -> removed.Removed:
        """What was removed from its segments to keep to a disk budget, and is known by totals only."""
        return removed.read(self.folder, self.limits)

    @cached_property
    def _counts(self) -> memoryview:
        try:
            data = regular_file.read(self.folder / COUNTS, self.limits)
        except OSError:
            data = b""
        return memoryview(data[: len(data) // 8 * 8]).cast("Q")

    def learn(self, content: bytes) -> set[str]:
        """Take lines that it has written, and return of which kinds they are.

        Args:
            content: Whole lines of its file, behind those that were taken before.
        """
        found = gate.lines(content)
        self.has_checksums |= found.are_signed
        self._unreadable_lines += found.damaged
        kinds = set()
        for line in found.readable:
            try:
                kind, number, fields = line.of_process
            except ValueError:
                self._unreadable_lines += 1
                continue
            if number is not None:
                if number in self._line_numbers:  # there twice
                    continue
                self._line_numbers.add(number)
            if fields is None:
                self._unreadable_lines += 1
            elif kind in gate.LINES:
                kinds.add(kind)
                self._read_line(kind, fields, self._hook_lines)
        self._has_said_who |= "start_ns" in self.identity
        missing = max(self._line_numbers, default=-1) + 1 - len(self._line_numbers)
        # A damaged line is one of the missing ones, if lines are numbered.
        self.damaged_lines = max(self._unreadable_lines, missing, 0 if self._has_said_who else 1)
        return kinds

    @property
    def hook_lines(self) -> list[dict[str, Any]]:
        """What it says of its hooks, without how often they fired."""
        return [*self._hook_lines.values()]

    @property
    def hooks(self) -> list[dict[str, Any]]:
        """Its hooks as last reported, each with `fired`, and with `spent_ns`, which is None if nobody asked for it."""
        return [
            {**hook, "fired": self._count(hook["slot"]), "spent_ns": self._count(COUNT_SLOTS + hook["slot"]) or None}
            for hook in self._hook_lines.values()
        ]

    def _read_line(self, kind: str, line: dict[str, Any], hooks: dict[tuple[str, str], dict[str, Any]]) -> None:
        if kind == "process":
            if line.get("role") == UNSAID_ROLE and self.identity:  # a plug-in that joined late has no better word
                line = {name: value for name, value in line.items() if name != "role"}
            said, unfit = gate.fields(line, gate.IDENTITY)
            self.identity |= said
            self._unfit_fields += unfit
        elif kind == "hook":
            hooks[line["instrumentation"], line["target"]] = line
        elif kind == "type":
            self.types[line["number"]] = TypedSpan(line["name"], line["fields"], line.get("automatic", False))
        elif kind == "pause":
            self._own_pauses.append((line["ts_ns"], None))
        elif kind == "resume":
            self._own_pauses[-1:] = [(begin_ns, line["ts_ns"]) for begin_ns, _ in self._own_pauses[-1:]]
        elif kind == "cost":
            self.costs |= line
        elif kind == "unavailable":
            self.unavailable[line["what"]] = line["reason"]
        elif kind == "allocations":
            self.allocations_begun.add(line["step"])
        elif kind == "kernels":
            (self.kernels_written if line.get("is_written") else self.kernels_begun).add(line["step"])
        elif kind == "lost":
            self._drop(line)
        elif kind == "left":
            self.left_running |= set(line["running"])
            self._own_left_ns = line.get("ts_ns")
        elif kind == "seal":
            self._seals[line["segment"]] = checksum.Sum(line["bytes"], line["crc32"])
        elif kind == "end":
            self._own_end_ns = line["end_ns"]
            self._closed_segments = line.get("segments")
            if "counts" in line:
                self._last_counts = {int(slot): count for slot, count in line["counts"].items() if slot.isdecimal()}
        elif kind == "exit":
            self.killed_by, self.was_stopped = line["killed_by"], line["was_stopped"]
            self._own_gone_ns = line["end_ns"]
            if self.killed_by is None and self._own_end_ns is None:
                self._own_end_ns = self._own_gone_ns

    def _drop(self, line: dict[str, Any]) -> None:
        """Count a segment that was dropped; whoever finishes what a killed process began says so again."""
        name = line.get("segment")
        if name is not None and name in self._dropped:
            return
        self.dropped_segments += line["segments"]
        self.dropped_bytes += line["bytes"]
        if name is not None:
            self._dropped[name] = "by" not in line

    def _life_ns(self) -> tuple[int, int]:
        last_ns = max((at_ns for at_ns in (self._own_end_ns, self._own_gone_ns) if at_ns is not None), default=None)
        if last_ns is None:
            last_ns = clock.now_ns() if self.is_alive else gate.MOST_NS
        return int(self.identity.get("start_ns", 0)), last_ns

    def complete(self, processes: Iterable[Process], manifest: dict[str, Any]) -> None:
        """Fill in what the damaged line about a process's identity would say: from its folder's name, and with the
        clock of another process of its host."""
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
        """Count a segment that is not as it was when it was full or closed.

        Args:
            name: Name of its file.
            content: Content of the file.
        """
        seal = self._seals.get(name)
        if seal is None:
            if self._closed_segments is not None:
                self.damaged_segments += 1
            elif self.has_checksums:
                self.unsealed[name] = len(content.rstrip(b"\0"))
            return False
        if packed.sum_of(content) in (seal, *self.removed.segments.get(name, ())):
            return True
        self.damaged_segments += 1
        return False

    def check_all_there(self, names: Iterable[str]) -> None:
        """Count the segments that were closed and are missing, apart from those that were dropped."""
        if not self.has_checksums:  # otherwise each segment that is missing counts
            self.damaged_segments += len(self.packed.damaged)
        if self.is_alive:  # one may have been dropped a moment ago
            return
        missing = self.closed_segments - set(names)
        closed = 0 if self._closed_segments is None else self._closed_segments
        own = {name for name, is_own in self._dropped.items() if is_own}
        self.damaged_segments += len(missing) + max(0, closed - len(self._seals.keys() - own))

    def _count(self, slot: int) -> int:
        if self._last_counts is not None:
            return self._last_counts.get(slot, 0)
        count = self._counts[slot] if slot < len(self._counts) else 0
        return count if count <= MOST_COUNT else 0


def content_of(path: Path, limits: Limits) -> bytes:
    """Return the content of a file; nothing if it is not there, or is refused, which `Recording.refused` reports."""
    try:
        return regular_file.read(path, limits)
    except OSError:
        return b""


def seniority(process: Process) -> tuple[bool, int]:
    """Sort the driver first, then by when they began."""
    return process.role not in LEADING, process.start_ns + process.unix_offset_ns


LEADING = ("driver", "main")
"""Roles of processes that begin the steps of a run."""
_ROLES = (*LEADING, "worker", "engine")


def in_order(processes: Iterable[Process]) -> list[Process]:
    """Return processes as readers show them: the driver, each rank's worker and engine, those without a rank, samplers
    last."""
    return sorted(processes, key=_position)


def _position(process: Process) -> tuple[int, int, int, int]:
    role = _ROLES.index(process.role) if process.role in _ROLES else len(_ROLES)
    if process.rank is not None:
        return 1, process.rank, role, process.start_ns
    if process.of_engine is not None and process.of_engine.rank is not None:
        return 1, process.of_engine.rank, len(_ROLES) + 1, process.start_ns
    if process.role == SAMPLER:
        return 3, 0, role, process.start_ns
    return (0 if process.role in LEADING else 2), 0, role, process.start_ns

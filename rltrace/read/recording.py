"""Reads a Recording: a folder that is valid at every moment, while its run goes on and after any process was killed.

Reading is streamed: a reader holds one segment and the open spans, whatever the Recording's size.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from rltrace.errors import RecordingError
from rltrace.events import AUTOMATIC, MARKED_SINCE, SAMPLER, STEP, VERSION, Args, Counter, Span, is_of_bytes
from rltrace.host import clock, regular_file
from rltrace.host.clock import Domain
from rltrace.limits import LIMITS, Limits
from rltrace.read import alignment, archive, ending, engines, gate, order, packed, removed, unmarked
from rltrace.read.alignment import Alignment
from rltrace.read.crossing import Crossing
from rltrace.read.ending import Ending
from rltrace.read.inferred import can_infer, is_known, with_inferred
from rltrace.read.records import records
from rltrace.read.step_records import StepRecords
from rltrace.read.window import Cut, inside
from rltrace.record import checksum, clock_readings, manifest
from rltrace.record.manifest import LINES
from rltrace.record.process import (
    COUNT_SLOTS,
    COUNTS,
    LOST,
    OPENING,
    UNSAID_ROLE,
    is_of_this_host,
    key_of_opening,
    pid_of,
)

Event = Span | Counter

MOST_MERGED = 1000
"""How many steps one total is about at most."""

MOST_NAMES = 20_000
"""How many names of spans a reader remembers something about."""

FILES = (".jsonl", ".u64", ".seg", packed.SUFFIX)
"""Endings of the files of a process."""

GIVE = "; give the folder that `rltrace exec` or `run` named"


class Recording:
    """The folder of a run, or an archive of it; read only."""

    def __init__(
        self, path: Path, folder: Path, fields: dict[str, Any], limits: Limits = LIMITS, damaged_fields: int = 0
    ) -> None:
        self.path = path
        """What was opened."""
        self.folder = folder
        """Where its files are: `path`, or the folder that an archive was unpacked into."""
        self.manifest = fields
        """The manifest as `rltrace.record.manifest.create` wrote it, without fields that cannot be right."""
        self.limits = limits
        self._damaged_fields = damaged_fields
        self._recorded_steps: bool | None = None
        self.steps_are_chosen = False
        """Whether it is a part of chosen steps: none of them is left out of a mean as warm-up."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], limits: Limits = LIMITS) -> Recording:
        """Read the manifest; unpack an archive first.

        Args:
            path: The folder or the archive.
            limits: What is read without a question; `NO_LIMITS` of `rltrace.limits` for any size.

        Raises:
            RecordingError: there is no Recording at `path`, its manifest is damaged, or a newer rltrace wrote it.
        """
        opened = Path(path)
        try:
            if not opened.exists():
                raise RecordingError(f"{opened}: no such file or folder{GIVE}, or an archive of it")
            folder = archive.unpack(opened, limits) if opened.is_file() else opened
            file = folder / manifest.FILE
            fields, damaged_fields = _read_manifest(regular_file.read(file, limits))
        except FileNotFoundError:
            raise RecordingError(f"{folder}: no Recording here ({manifest.FILE} is missing){_nearby(folder)}") from None
        except OSError as error:
            raise RecordingError(f"{error.filename or opened}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise RecordingError(
                f"{file}: damaged: {error}; restore it from a copy; this does not affect the segments beside it"
            ) from None
        if "version" not in fields:
            raise RecordingError(f"{file}: damaged: it names no version; restore it from a copy")
        if fields["version"] > VERSION:
            raise RecordingError(
                f"{file}: written in format {fields['version']}, but this rltrace reads formats up to "
                f"{VERSION}; upgrade rltrace"
            )
        return cls(opened, folder, fields, limits, damaged_fields)

    @property
    def name(self) -> str:
        """The name of what was opened: the folder's, or the archive's without its ending."""
        is_folder = self.folder == self.path
        return self.path.resolve().name if is_folder else self.path.name.removesuffix(archive.SUFFIX)

    @cached_property
    def processes(self) -> list[Process]:
        """Return every process that recorded, by when it began, with hosts kept together.

        If exchanges were recorded between another clock domain and the run's, the times of its processes are on the
        run's clock.
        """
        processes = [process for process in self._found if process.is_identified]
        reference = self.own_domain
        aligned = alignment.read(self.folder, reference) if reference else {}
        for process in processes:
            if reference and process.clock_domain != reference and process.clock_domain in aligned:
                process.align(aligned[process.clock_domain], reference)
        return sorted(processes, key=lambda process: (process.host, process.start_ns, process.key))

    def part(self, cuts: Mapping[str, Cut], *, steps_are_chosen: bool) -> Recording:
        """Return the same Recording as if it had nothing but these parts.

        Args:
            cuts: For each process in the part, by its key, what of it.
            steps_are_chosen: It is a part of chosen steps.
        """
        _ = self.time_domain, self.ranks  # of the whole
        part = copy.copy(self)
        part.steps_are_chosen = steps_are_chosen
        part.processes = [process.part(cuts[process.key]) for process in self.processes if process.key in cuts]
        return part

    @cached_property
    def unidentified(self) -> list[Unidentified]:
        """Return processes whose identity nobody knows: they count in no figure except what was lost."""
        opened = {process.key for process in self._found}
        left = sorted((self.folder / OPENING).glob("*/"))
        opening = {key: folder for folder in left if (key := key_of_opening(folder.name)) not in opened}
        found = [
            Unidentified(process.key, pid_of(process.key), process.records + process.lost_events)
            for process in self._found
            if not process.is_identified and (process.records or not _is_opening(process.folder, process.key))
        ]
        found += [Unidentified(key, pid_of(key), 0) for key, left in opening.items() if not _is_opening(left, key)]
        return sorted(found, key=lambda process: process.key)

    @cached_property
    def _found(self) -> list[Process]:
        found = [Process(folder, self.limits) for folder in sorted(self._folders)]
        for process in found:
            process.complete(found, self.manifest)
        if self.manifest["version"] < MARKED_SINCE:
            mark = unmarked.markers({process.key: process.hooks for process in found if process.is_identified})
            for process in found:
                process.mark = mark.get(process.key)
        of_engines = engines.places(process for process in found if process.is_identified)
        knows_steps = any(is_known(process.hooks) for process in found)
        for process in found:
            process.of_engine = of_engines.get(process.key)
            process.infers = not knows_steps and can_infer(process.hooks)
            process.run_has_steps = self._has_steps
        return found

    def _has_steps(self) -> bool:
        """Return whether any process recorded a step; asked only where steps would be inferred."""
        if self._recorded_steps is None:
            self._recorded_steps = any(process.has_steps() for process in self._found)
        return self._recorded_steps

    @cached_property
    def time_domain(self) -> Domain | None:
        """The clock domain in which times are compared: the run's own, else its driver's; None of an empty Recording.

        The times of a process with another `time_domain` compare with these only by real time, with an error that
        nobody measured.
        """
        domains = {process.time_domain for process in self.processes}
        if self.own_domain in domains:
            return self.own_domain
        first = min(self.processes, key=_seniority, default=None)
        return first.time_domain if first else None

    @cached_property
    def ranks(self) -> Ranks:
        """Return how many ranks there were, and how many of them are missing."""
        started = max((process.world_size for process in self.processes if process.world_size), default=None)
        here = {process.rank for process in self.processes if process.rank is not None}
        return Ranks(started, 0 if started is None else started - sum(rank < started for rank in here))

    @property
    def own_domain(self) -> Domain | None:
        """Return the clock domain of the process that made the Recording; older ones do not say."""
        said = self.manifest.get("clock_domain")
        return (str(said.get("boot_id")), str(said.get("time_namespace"))) if said else None

    @cached_property
    def brief_steps(self) -> frozenset[int]:
        """Return the steps of which something was removed to keep to a disk budget, or left on its host."""
        return _steps_of(group for process in self.processes for group in process.removed.totals)

    @cached_property
    def left_steps(self) -> frozenset[int]:
        """Return the steps of which something was left on its host when the Recording was collected."""
        return _steps_of(group for process in self.processes for group in process.removed.left)

    @property
    def is_live(self) -> bool:
        """Return whether the process that owns the run is still alive, as seen from its host."""
        return manifest.is_live(self.folder)

    @property
    def is_settled(self) -> bool:
        """Return whether no process of this host writes to it any more, so that it says the same from here on."""
        if self.is_live or any(process.is_alive for process in self.processes):
            return False
        opening = (self.folder / OPENING).glob("*/")
        unsaid = (process.folder for process in self._found if not process.is_identified)
        return not any(_is_opening(folder, key_of_opening(folder.name)) for folder in opening) and not any(
            _is_opening(folder, folder.name) for folder in unsaid
        )

    @property
    def is_watched(self) -> bool:
        """Return whether a supervisor made it, which sees how processes end; nobody does if a program records
        itself."""
        return self.manifest.get("owner") is None

    @property
    def is_complete(self) -> bool:
        """Return whether every process ended its part in good order."""
        if self.unidentified:
            return False
        return bool(self.processes) and all(process.end_ns is not None for process in self.processes)

    @property
    def ending(self) -> Ending | None:
        """Return how the command ended; None while it goes on, and for a program that neither `rltrace exec` nor `run`
        started."""
        return ending.read(self.folder)

    @property
    def _folders(self) -> list[Path]:
        """Return the folders of the processes; a folder that is a link would lead out of the Recording."""
        above = self.folder / manifest.PROCESSES
        return [] if above.is_symlink() else [folder for folder in above.glob("*/") if not folder.is_symlink()]

    @property
    def refused(self) -> list[str]:
        """Return files and folders of the Recording that are not read, each with the reason: links, pipes, excess."""
        found = {file: regular_file.refusal(file, self.limits) for file in self._files()}
        return [f"{file}: {why}" for file, why in sorted(found.items()) if why is not None]

    def _files(self) -> Iterator[Path]:
        """Return what its readers open, and links in place of folders."""
        for pattern in ("*.json", "*.jsonl"):
            yield from self.folder.glob(pattern)
        above = self.folder / manifest.PROCESSES
        yield from [folder for folder in (above, *above.glob("*")) if folder.is_symlink()]
        for folder in self._folders:
            yield from [file for file in folder.iterdir() if file.suffix in FILES]

    @property
    def untraced(self) -> list[dict[str, Any]]:
        """Return the processes of the run that were seen and not traced: `pid`, `command` and `reason` of each."""
        return self._read_untraced().values

    def _read_untraced(self) -> gate.Fitting:
        found = gate.lines(_content(self.folder / manifest.UNTRACED, self.limits), by_one_writer=False)
        return found.fitting(gate.UNTRACED)

    @property
    def damaged(self) -> dict[str, int]:
        """Return how many lines or fields cannot be read, in the files that belong to no process."""
        counts = {
            manifest.FILE: self._damaged_fields,
            manifest.UNTRACED: self._read_untraced().damaged,
            clock_readings.FILE: alignment.read_lines(self.folder).damaged,
            ending.FILE: int(ending.is_damaged(self.folder)),
        }
        return {file: many for file, many in counts.items() if many}

    @property
    def lost_events(self) -> int:
        """Return how many events could not be written, over all processes."""
        unreadable = sum(process.records for process in self.unidentified)
        return unreadable + sum(process.lost_events for process in self.processes)


def _steps_of(groups: Iterable[removed.Group]) -> frozenset[int]:
    """Return the steps that totals are of."""
    pairs = {(group.first_step, group.last_step) for group in groups}
    known = [(first, last) for first, last in pairs if first is not None and last is not None]
    return frozenset(step for first, last in known for step in range(first, min(last, first + MOST_MERGED) + 1))


class Ranks(NamedTuple):
    """The ranks of a run, on all of its hosts."""

    started: int | None
    """How many the launcher started; None if no process says so."""
    missing: int
    """How many of them no process of the Recording is."""


class Unidentified(NamedTuple):
    """A process that was killed while it opened its folder, or whose identity is damaged."""

    key: str
    """Its folder in the Recording."""
    pid: int | None
    records: int
    """Spans and samples that it wrote and could not write. Nobody knows whose they are, and by which clock."""


OPENING_SECONDS = 60.0
"""A process that exists and has not opened its folder after this time is another one with the same pid."""


def _is_opening(folder: Path, key: str) -> bool:
    """Return whether the process of a folder is about to open it, as far as this host can tell."""
    pid = pid_of(key)
    if pid is None or not is_of_this_host(key) or manifest.started_ticks(pid) is None:
        return False
    try:
        return time.time() - folder.stat().st_mtime < OPENING_SECONDS
    except OSError:  # it is open
        return True


class TypedSpan(NamedTuple):
    """What a process has declared."""

    name: str
    fields: list[str]
    is_automatic: bool


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
        self.hooks: list[dict[str, Any]] = []
        """Its hooks as last reported, each with `fired`, and with `spent_ns`, which is None if nobody asked for it."""
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
        self.learn(_content(self.folder / LINES, self.limits) if lines is None else lines)
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
        return seal is not None and checksum.of_bytes(content) not in (seal, *self.removed.segments.get(name, ()))

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
        self.hooks = [
            {**hook, "fired": self._count(hook["slot"]), "spent_ns": self._count(COUNT_SLOTS + hook["slot"]) or None}
            for hook in self._hook_lines.values()
        ]
        return kinds

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
        said = checksum.of_bytes(content)
        if said in self.removed.segments.get(name, ()):
            return True
        seal = self._seals.get(name)
        if seal is None:
            if self._closed_segments is not None:
                self.damaged_segments += 1
            elif self.has_checksums:
                self.unsealed[name] = len(content.rstrip(b"\0"))
            return False
        if said == seal:
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


_CLOCK = ("boot_id", "time_namespace", "monotonic_ns", "realtime_ns")

MOST_COUNT = 1 << 53
"""A larger count is damage: nothing happens so often."""


class Segment(NamedTuple):
    """What a process wrote into one file."""

    content: bytes
    first_ns: int
    last_ns: int
    """From when to when its records can have been written."""
    sound: list[list[Any]] | None = None
    """Its records in order, if some are not."""
    name: str = ""
    """Of the file."""


def _nothing() -> None: ...


class EventReader:
    """Matches the ends of one process's spans to their beginnings."""

    def __init__(self, process: Process, types: dict[int, TypedSpan]) -> None:
        self.process = process
        self.types = types
        self.thread = 0
        """The thread whose records are being read."""
        self.open: dict[int, list[Span]] = {}
        """Open spans by their start: two of one thread never share it, but two threads may."""
        self.stacks: dict[tuple[int, int], list[Span]] = {}
        """Open spans by thread and task, innermost last: a flow belongs to the innermost."""
        self.crossings: dict[tuple[int, int], Crossing] = {}
        """By thread and task, if an open span cannot be on every lane."""
        self.early_ends: dict[int, tuple[int, Args | None]] = {}
        """Ends that were read before their beginning: another thread ended the span, and its segment was read first."""
        self.nameless: set[int] = set()
        """Starts of spans that make no sense, whose ends are still to come."""
        self.may_grow: bool | None = None
        """Whether its process may be writing to it; None: ask the process."""
        self.first_ns, self.last_ns = 0, gate.MOST_NS
        """From when to when the segment that is being read can have been written."""
        self.checks: dict[str, dict[str, gate.Check]] = {}
        """Checks of arguments, by the name of their span; forgotten when there are `MOST_NAMES`."""
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
        for segment in self.segments():
            self.thread = 0
            yield from self._segment(segment)
        for span in [span for spans in self.open.values() for span in spans]:
            crossing = self.crossings.get((span.thread, span.task))
            span.lane = 0 if crossing is None else crossing.lane(span)
            span.end_ns = self.process.paused_after_ns(span.start_ns)  # if it ended in a pause, nobody wrote that down
            yield span
        self.process.orphans += len(self.early_ends)

    def segments(self, known: Set[str] = frozenset(), *, closed_first: bool = False) -> Iterator[Segment]:
        """Yield the segments that can be read, without those that are known."""
        names = self.process.segment_names
        order = sorted(names, key=lambda name: self.process.seal(name) is None) if closed_first else names
        for name in order:
            segment = self._content(name) if name not in known else None
            if segment is not None:
                yield segment._replace(name=name)
        self.process.check_all_there(names)

    def resume(self, spans: Iterable[Span]) -> None:
        """Go on where these spans are open, by when they began."""
        for span in spans:
            self.thread, self.first_ns = span.thread, 0
            self._begin(span.name, span.task, span.start_ns, span.args, span.is_automatic)
            begun = self.open[span.start_ns][-1]
            begun.flows_out, begun.flows_in = span.flows_out, span.flows_in

    def more(self, segment: Segment, thread: int) -> Iterator[Event]:
        """Yield the events of a part of a segment, whole records, the first of which are of this thread."""
        self.thread, self.may_grow = thread, False
        yield from self._segment(segment)

    def _segment(self, segment: Segment) -> Iterator[Event]:
        """Yield the events of one segment.

        Nearly every record begins a span that starts alone, or ends the innermost span of its thread and task. These
        two are handled right here, which halves the time per event; all others go to the readers by type.
        """
        open_spans, stacks, crossings = self.open, self.stacks, self.crossings
        leave_out_unfit = gate.leave_out_unfit
        data, first_ns, last_ns, sound, _ = segment
        self.first_ns, self.last_ns, checks = first_ns, last_ns, self.checks
        decoded = self._decoded(data, self._damaged)
        if sound is not None:
            for _ in decoded:  # which counts what is damaged besides
                pass
        for record in decoded if sound is None else sound:
            first, size = record[0], len(record)
            if size == 4 and first.__class__ is int:
                end_ns, late = record[1], record[2]
                spans = open_spans.get(first)
                if spans is not None and len(spans) == 1 and late.__class__ in _ARGS:
                    span = spans[0]
                    key = (span.thread, span.task)
                    stack = stacks[key]
                    innermost = stack[-1] is span and (not crossings or key not in crossings)
                    innermost = innermost and span.thread == self.thread
                    if innermost and end_ns.__class__ is int and first <= end_ns <= last_ns:
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
            elif (size == 5 and first.__class__ is str) or (size == 6 and first == AUTOMATIC):
                if size == 5:
                    name, task, start_ns, args, _ = record
                else:
                    _, name, task, start_ns, args, _ = record
                if (
                    args.__class__ in _ARGS
                    and name.__class__ is str
                    and start_ns.__class__ is int
                    and first_ns <= start_ns <= last_ns
                    and task.__class__ is int
                    and start_ns not in open_spans
                    and not self.early_ends
                ):
                    if args and checks.get(name, _NEW):  # a name that is new, or whose arguments figures are made of
                        self._check(name, args)
                    span = Span(name, self.thread, task, start_ns, None, args or {}, (), (), 0, size == 6)
                    open_spans[start_ns] = [span]
                    siblings = stacks.get((self.thread, task))
                    if siblings is None:
                        stacks[self.thread, task] = [span]
                    else:
                        siblings.append(span)
                    continue
            event = self._event(record)
            if event is not None:
                yield event

    def _event(self, record: list[Any]) -> Event | None:
        """What a record makes; every reader takes, for the `true` at its end, whether a hook wrote it."""
        unmarked = order.unmarked(record)
        read = self.readers.get((*map(type, unmarked),))
        return self._typed(*record) if read is None else read(*unmarked[:-1], unmarked is not record)

    def _content(self, name: str) -> Segment | None:
        """Return a segment; None if it is refused, or gone, or its columns are damaged."""
        try:
            data = self.process.segment(name)
        except regular_file.RefusedError:
            self._damaged()
            return None
        except packed.DamagedError:
            self.process.damaged_segments += 1
            return None
        except OSError:  # dropped a moment ago
            return None
        if self.process.check_segment(name, data):
            return Segment(data, 0, gate.MOST_NS)
        return self._unvouched(data)

    def _unvouched(self, data: bytes) -> Segment:
        """Return a segment that no checksum vouches for: its records are of its process's life, and in order."""
        first_ns, last_ns = self.process.life_ns
        sound: list[list[Any]] | None = None
        if self.process.has_checksums:
            found = list(self._decoded(data, _nothing))
            if last_ns == gate.MOST_NS:
                last_ns = order.last_ns(found, gate.MOST_NS)
            sound = list(order.in_order(found))
            self.process.torn += len(found) - len(sound)
            sound = sound if len(sound) < len(found) else None
        first_ns, last_ns = max(0, first_ns - gate.SLACK_NS), min(last_ns + gate.SLACK_NS, gate.MOST_NS)
        return Segment(data, first_ns, last_ns, sound)

    def _decoded(self, data: bytes, report_damage: Callable[[], None]) -> Iterator[list[Any]]:
        may_grow = self.process.is_alive if self.may_grow is None else self.may_grow
        return records(data, self._makes_sense, report_damage, may_grow=may_grow)

    def _makes_sense(self, record: Any) -> bool:
        """Return whether a value after a damaged record is a record: its type exists, and its time is in its process's
        life."""
        if record.__class__ is not list or len(record) < 3 or record[-1] is not True:
            return False
        unmarked = order.unmarked(record)
        types = (*map(type, unmarked),)
        if types in self.readers:
            times_ns = unmarked[order.TIMES[types[0], len(types)]]
        elif record[0].__class__ is int and record[0] in self.types and types[-4:-1] in _TYPED:
            times_ns = record[-3:-2]
        else:
            return False
        first_ns, last_ns = self.process.life_ns
        return all(first_ns - gate.SLACK_NS <= at_ns <= last_ns + gate.SLACK_NS for at_ns in times_ns)

    def _damaged(self) -> None:
        self.process.torn += 1

    def _thread(self, thread: int, name: str, _: bool) -> None:
        self.thread = thread
        self.process.threads[thread] = name

    def _check(self, name: str, args: Args) -> None:
        """Remove the arguments that a span of this name cannot have."""
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

    def _whole(
        self, name: str, lane: int, start_ns: int, end_ns: int, args: Args | None, is_automatic: bool
    ) -> Span | None:
        if not 0 <= start_ns <= end_ns <= self.last_ns:
            self._damaged()
            return None
        if args and self.checks.get(name, _NEW):
            self._check(name, args)
        return Span(name, self.thread, lane, start_ns, end_ns, args or {}, lane=None, is_automatic=is_automatic)

    def _begin(self, name: str, task: int, start_ns: int, args: Args | None, is_automatic: bool) -> Span | None:
        if not self.first_ns <= start_ns <= self.last_ns:
            self._damaged()
            return None
        if args and self.checks.get(name, _NEW):
            self._check(name, args)
        span = Span(name, self.thread, task, start_ns, None, args or {}, is_automatic=is_automatic)
        if self.early_ends and start_ns in self.early_ends:
            span.lane = None
            return self._ended(span, *self.early_ends.pop(start_ns))
        self.open.setdefault(start_ns, []).append(span)
        self.stacks.setdefault((self.thread, task), []).append(span)
        return None

    def _typed(self, *record: Any) -> Span | None:
        """Read a typed span; one whose declaration was lost keeps its arguments, numbered."""
        number = record[0]
        sound = (*map(type, record[-4:-2]),) == (int, int) and type(record[-2]) in _ARGS
        if not sound or number.__class__ is not int or number >= 0:
            self._misfit(record[-3] if sound and len(record) == 5 else None)
            return None
        declared = self.types.get(number)
        if declared is None:
            declared = TypedSpan(f"type {number}", [f"arg{n}" for n in range(len(record) - 5)], is_automatic=False)
        args = dict(zip(declared.fields, record[1:-4], strict=False))
        if record[-2]:
            args |= record[-2]
        return self._begin(declared.name, record[-4], record[-3], args, declared.is_automatic)

    def _misfit(self, start_ns: int | None = None) -> None:
        """Count a whole record without use: the sample is no number, or the name of the span is no text."""
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
        if span.thread != self.thread:  # the records of two threads are not in the order of their times
            span.lane = None
        return span

    def _leave(self, span: Span) -> None:
        """Take a span off its stack; those that began after it and are still open overlap it without nesting."""
        key = (span.thread, span.task)
        stack = self.stacks[key]
        if stack[-1] is span and key not in self.crossings:
            stack.pop()
        else:
            crossing = self.crossings.setdefault(key, Crossing())
            span.lane = crossing.lane(span)
            if not crossing.leave(stack, _index(stack, span), span.lane):
                del self.crossings[key]
        if not stack:
            del self.stacks[key]

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


def _remove(spans: list[Span], span: Span) -> None:
    """Remove this very span."""
    spans[:] = [other for other in spans if other is not span]


def _index(stack: list[Span], span: Span) -> int:
    """Return where this very span is: spans are in the order in which they began, unless they are damaged."""
    at = bisect_left(stack, span.start_ns, key=_start_ns)
    if at < len(stack) and stack[at] is span:
        return at
    return next(at for at, other in enumerate(stack) if other is span)


_start_ns = attrgetter("start_ns")


_ARGS = (dict, NoneType)
_TYPED = ((int, int, dict), (int, int, NoneType))
"""What precedes the end of a typed span's beginning."""
_NEW: dict[str, gate.Check] = {"": gate.text}
"""Checks for a name of which nothing is known yet."""
_MOST = gate.MOST_BYTES


def _read_manifest(content: bytes) -> tuple[dict[str, Any], int]:
    """Return the fields of a manifest that can be right, and how many cannot.

    A manifest that is not as it was signed has one of these somewhere.

    Raises:
        ValueError: it is not a JSON object.
    """
    said = gate.parsed(content)
    if said is None:
        json.loads(content)  # says where
        raise ValueError("it is not a JSON object, or is nested too deeply")
    fields, unfit = gate.fields(said, gate.MANIFEST)
    return fields, unfit or int(checksum.is_intact(content) is False)


def _content(path: Path, limits: Limits) -> bytes:
    """Return the content of a file; nothing if it is not there, or is refused, which `Recording.refused` reports."""
    try:
        return regular_file.read(path, limits)
    except OSError:
        return b""


def _seniority(process: Process) -> tuple[bool, int]:
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


class Newest(NamedTuple):
    """The Recording that was made last and is not empty."""

    folder: Path
    empty: list[Path]
    """Newer Recordings that are over and empty, the newest first."""


def newest(runs: Path) -> Newest:
    """Return the newest Recording in `runs` that goes on or has a process in it; if none has, the newest.

    Raises:
        RecordingError: there is none.
    """
    folders = newest_first(runs)
    if not folders:
        raise RecordingError(f"{runs}/: no Recording here; make one with `rltrace exec -- COMMAND`")
    for at, folder in enumerate(folders):
        if not _is_empty(folder):
            return Newest(folder, folders[:at])
    return Newest(folders[0], [])


def newest_first(runs: Path) -> list[Path]:
    """Return the Recordings in a folder, the one that began last first."""
    made = sorted(runs.glob(f"*/{manifest.FILE}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return [file.parent for file in made]


def _is_empty(folder: Path) -> bool:
    """Return whether a run is over and no process of its program recorded; one that cannot be read counts as not
    empty."""
    if manifest.is_live(folder):
        return False
    try:
        return all(process.role == SAMPLER for process in Recording.open(folder).processes)
    except RecordingError:
        return False


def _nearby(folder: Path) -> str:
    below = sorted(folder.glob(f"*/{manifest.FILE}")) if folder.is_dir() else []
    return f"; did you mean {below[-1].parent}?" if below else GIVE

"""Reads a Recording: a folder that is valid at every moment, while its run goes on and after any process was killed.

Reading is streamed: a reader holds one segment and the open spans, whatever the Recording's size.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.errors import RecordingError
from rltrace.events import MARKED_SINCE, SAMPLER, VERSION
from rltrace.host import regular_file
from rltrace.host.clock import Domain
from rltrace.limits import LIMITS, Limits
from rltrace.read import alignment, archive, ending, engines, gate, removed, unmarked
from rltrace.read.ending import Ending
from rltrace.read.event_reader import Event, EventReader, Segment, TypedSpan
from rltrace.read.inferred import can_infer, is_known
from rltrace.read.process import FILES, LEADING, Process, content_of, in_order, seniority
from rltrace.read.window import Cut
from rltrace.record import checksum, clock_readings, manifest
from rltrace.record.process import OPENING, is_of_this_host, key_of_opening, pid_of

__all__ = [
    "FILES", "LEADING", "Event", "EventReader", "Newest", "Process", "Ranks", "Recording", "Segment", "TypedSpan",
    "Unidentified", "in_order", "newest", "newest_first",
]  # fmt: skip

MOST_MERGED = 1000
"""How many steps one total is about at most."""

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
            mark = unmarked.markers({process.key: process.hook_lines for process in found if process.is_identified})
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
        first = min(self.processes, key=seniority, default=None)
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
        found = gate.lines(content_of(self.folder / manifest.UNTRACED, self.limits), by_one_writer=False)
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

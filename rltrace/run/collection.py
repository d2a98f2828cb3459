"""Collects into the Recording what processes recorded on other hosts. It can be repeated, and never overwrites anything
else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Protocol

from rltrace.analysis.step_times import step_times
from rltrace.errors import RecordingError
from rltrace.host import regular_file
from rltrace.host.clock import Domain
from rltrace.read import alignment, gate
from rltrace.read.alignment import Alignment
from rltrace.read.packed import Store
from rltrace.read.recording import Process, Recording
from rltrace.read.selection import written
from rltrace.record import allocation_steps, checksum
from rltrace.record.manifest import LINES, PROCESSES, UNTRACED
from rltrace.record.step_numbers import Numbers, numbers
from rltrace.run.abridgement import NOTHING, Given, StepRow, abridge, by_clock
from rltrace.run.nodes import Node, NodeError, Nodes
from rltrace.run.process_files import ProcessFiles, content, digest, is_sound

EVERYTHING_BYTES = 1 << 30
"""If the segments of all other hosts have more bytes, everything is brought of the last steps only, about so many bytes
of it."""

CHOSEN_FILE = "collected.jsonl"
"""Which steps of each host are in the Recording whole."""

Wanted = Numbers | Literal["all"] | None
"""Steps to bring whole; None: all if they are few bytes, else the last ones."""

SHARED_LINES = (UNTRACED, allocation_steps.FILE)
"""Files of a Recording to which every process may append lines."""


@dataclass
class Collected:
    """What a collection fetched, and what it could not fetch."""

    files: int = 0
    size_bytes: int = 0
    hosts: set[str] = field(default_factory=set)
    """Hosts besides the Recording's own on which something was recorded."""
    left: list[str] = field(default_factory=list)
    """One line per host of which only totals and some steps are here: what was left, and where."""
    failures: list[str] = field(default_factory=list)
    """One line per failure: a node that is gone, or a process whose folder holds another process here."""

    def __str__(self) -> str:
        if not self.hosts:
            return "no other host recorded anything"
        if not self.files:
            return f"nothing new on {', '.join(sorted(self.hosts))}"
        return f"{self.files:,} files, {self.size_bytes:,} bytes from {', '.join(sorted(self.hosts))}"


class Source(Protocol):
    """Where something was recorded: a node of a cluster, or the folder of another host."""

    host: str

    def digests(self) -> dict[str, str]:
        """Return a digest of every file that processes wrote there, by its path below `processes/`."""
        ...

    def read(self, path: str) -> bytes:
        """Return the content of one of these files."""
        ...


# ---- from the nodes of a cluster --------------------------------------------------------------------------------


def collect(recording: Path, nodes: Nodes, steps: Wanted = None) -> Collected:
    """Fetch from every node what is new there; what a node has lost since is kept here.

    The Recording is valid at every moment: whole files replace their own earlier states, and nothing is deleted.

    Args:
        recording: Folder of the Recording.
        nodes: Of the cluster.
        steps: Which steps of other nodes are fetched whole.
    """
    done = Collected()
    sizes: dict[Node, int] = {}
    for node in nodes.alive():
        try:
            sizes[node] = node.segment_bytes()
        except NodeError as error:
            done.failures.append(f"{error}; {_MISSING}")
    chosen, rows = None, list[StepRow]()
    if steps != "all" and (steps is not None or sum(sizes.values()) > EVERYTHING_BYTES):
        here = Recording.open(recording)
        knows_steps = here.time_domain == here.own_domain and not any(process.infers for process in here.processes)
        rows = _steps(here) if knows_steps else []
        chosen = choose(steps, [row.number for row in rows], sum(sizes.values()))
        if not rows:
            done.left.append(_NO_STEPS)
    for node, size_bytes in sizes.items():
        try:
            if chosen is not None and size_bytes:
                _abridge(node, recording, rows, chosen, size_bytes, done)
            _collect(recording / PROCESSES, node, done)
            if chosen is not None:
                node.forget()
        except NodeError as error:
            done.failures.append(f"{error}; {_MISSING}")
    for node in nodes.lost():
        done.failures.append(f"node {node.host}: gone; {_MISSING}")
    return done


def _abridge(
    node: Node, recording: Path, steps: Sequence[StepRow], chosen: Numbers, size_bytes: int, done: Collected
) -> None:
    """Have a node give columns of its processes in which only chosen steps are whole."""
    home = Recording.open(recording).own_domain
    known = alignment.read(recording, home).get(node.domain) if home and node.domain else None
    if known is None and node.domain != home:
        done.left.append(f"{node.host}: everything was brought, because nobody read its clock")
        return
    own_ns = known.undone_ns if known is not None else int
    rows = [
        StepRow(step.number, own_ns(step.start_ns), None if step.end_ns is None else own_ns(step.end_ns))
        for step in steps
    ]
    chosen = remember(recording, node.host, chosen)
    here = {folder.name: sorted(files_here(folder)) for folder in (recording / PROCESSES).iterdir()}
    where, given = node.abridge(rows, str(chosen), here)
    done.left.append(_left(node.host, where, chosen, size_bytes, given))


_NO_STEPS = "everything was brought, because no process whose clock was read says when the steps were"
_MISSING = "what it recorded since the last collection is missing here"


# ---- from the folders of other hosts ----------------------------------------------------------------------------


def bring_together(
    recordings: Sequence[Recording],
    *,
    steps: Wanted = None,
    unknown_clocks: bool = False,
    unrelated: bool = False,
) -> tuple[Recording, Collected]:
    """Bring what several hosts recorded together in the one of their Recordings by whose clock the others were read.

    Args:
        recordings: One or more of each host, in any order.
        steps: Which steps of the other hosts are brought whole.
        unknown_clocks: Take those too whose clocks nobody read; without a clock to begin with, the first one is it.
        unrelated: Take those too that are of another run, as far as one can tell.

    Returns:
        The Recording that has everything now, and what came to it.

    Raises:
        RecordingError: nobody read a host's clock, two are of different runs, or the Recording to collect into is an
            archive.
    """
    into = min(recordings, key=lambda recording: len(_unknown(recording, recordings)))
    unknown = _unknown(into, recordings)
    if unknown and not unknown_clocks:
        which = "; ".join(f"{recording.path}, of {_hosts(processes)}" for recording, processes in unknown)
        raise RecordingError(
            f"{which}: nobody read this clock against that of {into.path}, of {into.manifest.get('host')}. Give the "
            "folder of rank 0's host too, where the readings are, or align by real time, with an unknown error, by "
            "--unknown-clocks"
        )
    for other in recordings:
        if not unrelated and (difference := _difference(into, other)):
            raise RecordingError(
                f"{other.path} is of another run than {into.path}: {difference}. If they belong together all the same, "
                "insist by --unrelated"
            )
    if into.folder != into.path:
        raise RecordingError(f"{into.path}: an archive, which is read-only; unpack it and give the folder")
    done = Collected()
    others = [recording for recording in recordings if recording is not into]
    rows = next(filter(None, (_steps_by_clock_of(into, recording) for recording in (into, *others))), [])
    size_bytes = sum(map(_size_bytes, others))
    chosen = choose(steps, [row.number for row in rows], size_bytes)
    if not rows and steps != "all" and (steps is not None or size_bytes > EVERYTHING_BYTES):
        done.left.append(_NO_STEPS)
    for recording in others:
        _bring(recording, into, rows, chosen, done)
        for name in SHARED_LINES:
            _merge_lines(recording.folder / name, into.path / name)
    return into, done


def _bring(
    recording: Recording, into: Recording, steps: Sequence[StepRow], chosen: Numbers | None, done: Collected
) -> None:
    """Bring what one host recorded, or of all but chosen steps only totals and what figures are made of."""
    folder, host = into.path / PROCESSES, _Folder(recording).host
    if chosen is not None and any(process.infers and not process.run_has_steps() for process in recording.processes):
        done.left.append(f"{host}: everything was brought, because its steps are inferred from all that ran")
        chosen = None
    if all(files_here(folder / process.key).issuperset(process.segment_names) for process in recording.processes):
        chosen = None  # it is all here
    if chosen is None:
        _collect(folder, _Folder(recording), done)
        return
    chosen = remember(into.path, host, chosen)
    given = NOTHING
    with tempfile.TemporaryDirectory(prefix=".collecting-", dir=into.path) as made:
        for process in recording.processes:
            own_ns = _own_clock(process, into)
            own = by_clock(steps, own_ns) if own_ns is not None else None
            given += abridge(process, own, chosen, Path(made) / process.key, files_here(folder / process.key))
        _collect(folder, _Made(Path(made), host), done)
    done.left.append(_left(host, str(recording.path), chosen, _size_bytes(recording), given))


class _Made(ProcessFiles):
    """What was made of the processes of a host, as a source."""

    def __init__(self, folder: Path, host: str) -> None:
        super().__init__(folder)
        self.host = host


def _left(host: str, where: str, chosen: Numbers, size_bytes: int, given: Given) -> str:
    said = f"{host}: everything is here, because there was nothing to leave out besides steps {chosen}"
    if given.is_brief:
        said = (
            f"{host}: steps {chosen} are here whole; of all others, what figures are made of and totals by name. All "
            f"{size_bytes:,} bytes are in {where}; --steps brings more of them"
        )
    if given.unrelated:
        said += f". {given.unrelated:,} of its processes came whole, because nobody read their clock"
    return said


def _steps(recording: Recording) -> list[StepRow]:
    """Return the steps by the clock of a Recording, unless they are of a process whose clock nobody read against it."""
    known = {process.key for process in recording.processes if process.time_domain == recording.time_domain}
    return [StepRow(step.number, step.start_ns, step.end_ns) for step in step_times(recording) if step.key in known]


def _steps_by_clock_of(into: Recording, recording: Recording) -> list[StepRow]:
    """Return the steps that a host recorded by the clock of the Recording to collect into; none if nobody read the
    host's against that."""
    rows, home = _steps(recording), into.time_domain or into.own_domain
    if not rows or recording.time_domain == home:
        return rows
    known = alignment.read(into.folder, home).get(recording.time_domain) if home and recording.time_domain else None
    if known is None:
        return []
    return [
        StepRow(
            row.number, _moved_ns(known, row.start_ns), None if row.end_ns is None else _moved_ns(known, row.end_ns)
        )
        for row in rows
    ]


def _moved_ns(known: Alignment, time_ns: int) -> int:
    return time_ns + known.shift_ns(time_ns)


def _size_bytes(recording: Recording) -> int:
    return sum(process.segment_bytes() for process in recording.processes)


def _own_clock(process: Process, into: Recording) -> Callable[[int], int] | None:
    """Return what gives the time of a process's own clock at a time of the Recording to collect into; None if nobody
    read it."""
    home = into.time_domain or into.own_domain
    if process.clock_domain == home:
        return int
    known = alignment.read(into.folder, home).get(process.clock_domain) if home else None
    return None if known is None else known.undone_ns


# ---- how much ---------------------------------------------------------------------------------------------------


def choose(wanted: Wanted, existing: Sequence[int], size_bytes: int) -> Numbers | None:
    """Return which steps are brought whole; None if everything is brought.

    Args:
        wanted: What the user asked for.
        existing: Numbers of the steps that there are, in order.
        size_bytes: Bytes of segments on all other hosts.
    """
    if wanted == "all" or not existing:
        return None
    if wanted is not None:
        return wanted
    if size_bytes <= EVERYTHING_BYTES:
        return None
    last = max(1, len(existing) * EVERYTHING_BYTES // size_bytes)
    return numbers(written(existing[-last:]))


def remember(recording: Path, host: str, chosen: Numbers) -> Numbers:
    """Write down which steps of a host are brought whole, and return them with those that were so before: nothing
    that is here goes."""
    path = recording / CHOSEN_FILE
    try:
        lines = gate.lines(regular_file.read(path)).fitting(gate.COLLECTED).values
    except FileNotFoundError:
        lines = []
    before = [numbers(line["steps"], has_periods=True) for line in lines if line["host"] == host]
    ranges = dict.fromkeys(one for some in (chosen, *before) for one in some.ranges)
    periods = dict.fromkeys(one for some in (chosen, *before) for one in some.periods)
    together = Numbers(tuple(sorted(ranges)), tuple(sorted(periods)))
    line = checksum.signed(json.dumps({"host": host, "steps": str(together)})) + "\n"
    with path.open("a") as file:
        file.write(line)
    return together


def files_here(folder: Path) -> frozenset[str]:
    """Return the names of a process's segments that lack nothing here, or are files: those are brought whole."""
    whole = {name for name, place in Store(folder).look().items() if not place.lacks}
    return frozenset(whole | {path.name for path in folder.glob("*.seg")})


class _Folder(ProcessFiles):
    """The processes of a Recording, as a source."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.folder / PROCESSES)
        self.host = _hosts(recording.processes) or str(recording.manifest.get("host"))


def _hosts(processes: Sequence[Process]) -> str:
    return ", ".join(sorted({process.host for process in processes}))


def _difference(into: Recording, other: Recording) -> str | None:
    """Return what shows that a Recording is of another run; None if nothing does.

    Hosts of one run record at the same time, and a rank of it runs on one of them at a time.
    """
    if into.manifest.get("run_id") == other.manifest.get("run_id"):
        return None
    ours, theirs = _lives(into, into), _lives(other, into)
    if not ours or not theirs or {life.process.key for life in ours} & {life.process.key for life in theirs}:
        return None
    together = [(one, another) for one in ours for another in theirs if one.overlaps(another)]
    if not together:
        return "no process of either ran while one of the other did"
    for one, another in together:
        rank = one.process.rank
        if rank is not None and (rank, one.process.role) == (another.process.rank, another.process.role):
            return f"both have a rank {rank} ({one.process.role}) at the same time"
    return None


class _Life(NamedTuple):
    """When a process lived, by the clock of the Recording to collect into."""

    process: Process
    start_ns: int
    end_ns: int

    def overlaps(self, other: _Life) -> bool:
        return self.start_ns <= other.end_ns and other.start_ns <= self.end_ns


def _lives(recording: Recording, reference: Recording) -> list[_Life]:
    """Return when the processes lived whose clock is known."""
    home, found = reference.own_domain, []
    clocks = alignment.read(reference.folder, home) if home else {}
    for process in recording.processes:
        start_ns, end_ns = process.life_ns
        if process.clock_domain == home:
            found.append(_Life(process, start_ns, end_ns))
        elif clock := clocks.get(process.clock_domain):
            found.append(_Life(process, start_ns + clock.shift_ns(start_ns), end_ns + clock.shift_ns(end_ns)))
    return found


def _unknown(reference: Recording, recordings: Sequence[Recording]) -> list[tuple[Recording, list[Process]]]:
    """Return the processes whose clock was never read against that of a Recording, by their own Recordings."""
    home = reference.own_domain
    known: set[Domain | None] = {home, *(alignment.read(reference.folder, home) if home else ())}
    strange = [(other, [one for one in other.processes if one.clock_domain not in known]) for other in recordings]
    return [(other, processes) for other, processes in strange if processes]


def _merge_lines(there: Path, here: Path) -> None:
    """Append the lines of a file that are not in ours yet."""
    try:
        said = regular_file.read(there).splitlines(keepends=True)
    except FileNotFoundError:
        return
    known = set(regular_file.read(here).splitlines(keepends=True)) if here.exists() else set()
    if new := [line for line in said if line.endswith(b"\n") and line not in known]:
        with here.open("ab") as file:
            file.write(b"".join(new))


# ---- from either ------------------------------------------------------------------------------------------------


def _collect(folder: Path, source: Source, done: Collected) -> None:
    there = source.digests()
    processes: dict[str, list[str]] = {}
    for path in there:
        if is_sound(path):
            processes.setdefault(PurePosixPath(path).parts[0], []).append(path)
    if processes:
        done.hosts.add(source.host)
    for key, paths in sorted(processes.items()):
        # A reader knows a process by its lines, and its spans by the types said in them: they come first, and once
        # more when the segments that may use newer types are here.
        lines = f"{key}/{LINES}"
        if lines not in there:
            continue
        if not _fetch_lines(folder, source, lines, done):
            done.failures.append(f"{folder / key}: holds a different process than on {source.host}; not overwritten")
            continue
        for path in paths:
            if path != lines and there[path] != _digest_here(folder / path):
                _write(folder / path, source.read(path), done)
        _fetch_lines(folder, source, lines, done)


def _fetch_lines(folder: Path, source: Source, path: str, done: Collected) -> bool:
    """Fetch the lines of a process unless they are here; return False if those here are not an earlier state of
    them."""
    data = source.read(path)
    try:
        here = regular_file.read(folder / path)
    except FileNotFoundError:
        here = None
    if here is not None and not data.startswith(here):
        return False
    if data != here:
        _write(folder / path, data, done)
    return True


def _digest_here(path: Path) -> str | None:
    try:
        return digest(content(path))
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes, done: Collected) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(data)
    unfinished.replace(path)
    done.files += 1
    done.size_bytes += len(data)

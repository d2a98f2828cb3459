"""The runs of a folder, one line each: from manifests and as little else as possible."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from rltrace.analysis.steps import is_whole
from rltrace.errors import RecordingError
from rltrace.events import SAMPLER, STEP, Span
from rltrace.limits import LIMITS, Limits
from rltrace.read import archive, cache
from rltrace.read.recording import LEADING, Process, Recording, in_order
from rltrace.read.step_records import StepRecords
from rltrace.record import manifest

MOST_LOOKED_BYTES = 64 << 20
"""How many bytes of a run's segments are searched for steps, in order."""

MOST_INFERRED_BYTES = 16 << 20
"""How many bytes of segments are decoded to infer the steps of a run that marks none; 16 MiB take 1.5 s."""

State = Literal["running", "ended", "failed", "interrupted", "incomplete"]


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run in one line."""

    path: str
    """Path of its Recording: the folder, or an archive."""
    created_unix_seconds: float | None
    """When it began, since 1970."""
    command: list[str]
    """Its command line, with secrets redacted."""
    state: State
    """`running`; `ended` well, as far as the command's exit code or its driver says; `failed` with an exit code;
    `interrupted` by the user; `incomplete`: nobody saw how the command ended, and its driver did not end in good
    order."""
    exit_code: int | None
    """Exit code of the command; None while it goes on, and if nobody watched it."""
    ranks: int
    """How many ranks it has."""
    processes: int
    """How many processes recorded."""
    steps: int
    """How many steps have ended or begun, of the driver or the lowest rank that has some."""
    all_steps_seen: bool
    """False if the run has more segments than are searched for steps, marked or inferred: there may be more steps."""
    mean_step_seconds: float | None
    """Mean of the steps after the first that ended and were recorded; None without one."""
    size_bytes: int
    """The space that it takes on the disk."""


def listed(folder: Path, limits: Limits = LIMITS) -> Iterator[ListedRun | str]:
    """Yield every run in a folder, the newest last; a text says why one cannot be read.

    Args:
        folder: A folder of runs and archives, or one run.
        limits: Limits of what is read.
    """
    paths = [folder] if (folder / manifest.FILE).exists() else _paths(folder)
    found: list[ListedRun | str] = []
    for path in paths:
        try:
            found.append(_listed(path, limits))
        except RecordingError as error:
            found.append(str(error))
    yield from (one for one in found if isinstance(one, str))
    runs = [one for one in found if isinstance(one, ListedRun)]
    yield from sorted(runs, key=lambda run: (run.created_unix_seconds or 0, run.path))


def _paths(folder: Path) -> list[Path]:
    runs = [file.parent for file in folder.glob(f"*/{manifest.FILE}")]
    return runs + [file for file in folder.glob(f"*{archive.SUFFIX}") if file.is_file()]


def _listed(path: Path, limits: Limits) -> ListedRun:
    is_archive = path.is_file()
    opened = archive.unpack(path, limits, with_segments=False) if is_archive else path
    recording = Recording.open(opened, limits)
    processes = recording.processes
    created_ns = recording.manifest.get("created_unix_ns")
    ending = recording.ending
    spans, all_seen = _steps(path, processes)
    if not spans and all_seen:
        spans, all_seen = _inferred_steps(path, recording, limits)
    whole = [(span, span.seconds) for span in spans if is_whole(span)]
    steady = [length for span, length in whole if span is not spans[0]] or [length for _, length in whole]
    return ListedRun(
        path=str(path),
        created_unix_seconds=None if created_ns is None else created_ns / 1e9,
        command=recording.manifest.get("command") or [],
        state=_state(recording, processes),
        exit_code=None if ending is None else ending.exit_code,
        ranks=len({process.rank for process in processes} - {None}),
        processes=len(processes),
        steps=len(spans),
        all_steps_seen=all_seen,
        mean_step_seconds=fmean(steady) if steady else None,
        size_bytes=path.stat().st_size if is_archive else _size_bytes(path),
    )


def _state(recording: Recording, processes: Sequence[Process]) -> State:
    ending = recording.ending
    if ending is not None:
        if ending.interrupted_by is not None:
            return "interrupted"
        return "failed" if ending.exit_code else "ended"
    if recording.is_live or any(process.is_alive for process in processes):
        return "running"
    leading = [process for process in processes if process.role in LEADING] or processes
    has_ended = bool(leading) and all(process.end_ns is not None and not process.killed_by for process in leading)
    return "ended" if has_ended else "incomplete"


def _size_bytes(folder: Path) -> int:
    """Return the bytes on the disk: segments have their largest possible size, with holes where nothing is written
    yet. What `rltrace.read.cache` keeps there is no part of the run."""
    cached = folder / cache.FOLDER
    sizes = (file.lstat() for file in folder.rglob("*") if file != cached and cached not in file.parents)
    return sum(min(size.st_size, size.st_blocks * 512) for size in sizes)


def _steps(path: Path, processes: Sequence[Process]) -> tuple[list[Span], bool]:
    """Return the steps of the first process that has some, drivers before ranks, and whether the search was
    complete."""
    left_bytes = MOST_LOOKED_BYTES
    for process in in_order(processes):
        if process.role == SAMPLER:
            continue
        look = StepRecords(process.typed(STEP))
        for content in _segments(path, process):
            if left_bytes <= 0:
                return look.spans, False
            left_bytes -= len(content)
            look.through(content)
        if look.spans:
            return look.spans, True
    return [], True


def _inferred_steps(path: Path, recording: Recording, limits: Limits) -> tuple[list[Span], bool]:
    """Return the inferred steps of the first process that has some, in a run without others, and whether the search
    was complete."""
    if not any(process.infers for process in recording.processes):
        return [], True
    whole = Recording.open(path, limits) if path.is_file() else recording  # an archive, opened without its segments
    left_bytes = MOST_INFERRED_BYTES
    for process in in_order(process for process in whole.processes if process.infers):
        left_bytes -= process.segment_bytes()
        if left_bytes < 0:
            return [], False
        process.run_has_steps = lambda: False  # they were looked for
        if spans := [event for event in process.events() if isinstance(event, Span) and event.name == STEP]:
            return spans, True
    return [], True


def _segments(path: Path, process: Process) -> Iterator[bytes]:
    with zipfile.ZipFile(path) if path.is_file() else contextlib.nullcontext() as archived:
        zipped = {} if archived is None else _zipped(archived, process.key)
        for name in sorted(zipped.keys() | set(process.segment_names)):
            if archived is not None and name in zipped:
                yield archived.read(zipped[name])
            else:
                with contextlib.suppress(OSError):  # dropped a moment ago, or refused: the reader of all says so
                    yield process.segment(name)


def _zipped(archived: zipfile.ZipFile, key: str) -> dict[str, str]:
    """Return the entries of a process's segments in an archive, by name."""
    entries = [entry for entry in archived.namelist() if entry.split("/")[-3:-1] == [manifest.PROCESSES, key]]
    return {entry.rpartition("/")[2]: entry for entry in entries if entry.endswith(archive.SEGMENT)}

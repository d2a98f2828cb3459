"""What a host gives of a process where not all of it is wanted elsewhere, as compressed columns: the start and chosen
steps whole, of the others what figures are made of and totals by name.

The host makes this itself, of its own segments, so that only the result crosses the network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rltrace.events import SAMPLER, Span
from rltrace.host import regular_file
from rltrace.read import packed, removed
from rltrace.read.packed import Packed
from rltrace.read.recording import Process
from rltrace.read.removed import Totals
from rltrace.read.window import Windows
from rltrace.record import checksum
from rltrace.record.manifest import LINES
from rltrace.record.process import COUNTS
from rltrace.record.step_numbers import Numbers
from rltrace.run.brief import DamagedError, Form, Steps, brief
from rltrace.run.compaction import is_final

FILE_SEGMENTS = 64
"""How many segments one file of columns has, the same ones each time."""

GIVEN = "-given"
"""In the names of its files, so that they replace none that was made where they go."""

WORTH = 0.9
"""A segment of which more than this share would stay is given whole."""

ALWAYS_NS = 1 << 62


class Given(NamedTuple):
    """What is given of some processes."""

    is_brief: bool
    """Whether something was left out."""
    unrelated: int
    """How many processes are given whole because nobody read their clock, so that nobody knows when their steps were.
    """

    def __add__(self, other: Any) -> Given:
        return Given(self.is_brief or other.is_brief, self.unrelated + other.unrelated)


NOTHING = Given(is_brief=False, unrelated=0)


class StepRow(NamedTuple):
    """A step, by the clock of the run."""

    number: int
    start_ns: int
    end_ns: int | None


def abridge(
    process: Process, steps: Steps | None, chosen: Numbers, into: Path, as_segments: Set[str] = frozenset()
) -> Given:
    """Write what is given of a process into a folder, and return what that is.

    What nobody closed, because its process was killed or goes on, is given as all else is, however little there is
    of it.

    Args:
        process: As its host has it.
        steps: Of the run, by the process's clock; None if nobody read that: all of it is given.
        chosen: Which of them are given whole.
        into: The folder, which is made.
        as_segments: Names of segments that are given whole and as files, because they are whole where they go.
    """
    into.mkdir(parents=True)
    given = NOTHING if steps is not None else Given(is_brief=False, unrelated=1)
    whole = whole_windows(steps, chosen) if steps is not None else ()
    form = Form.SAMPLER if process.role == SAMPLER else Form.PROGRAM
    for number, names in _files(process.segment_names):
        some: list[Packed] = []
        for name in names:
            with contextlib.suppress(OSError):  # dropped a moment ago, or damaged: its seal tells that it is missing
                content = process.segment(name)
                if name in as_segments or _changed(process, name, content):
                    (into / name).write_bytes(content.rstrip(b"\0"))
                else:
                    some.append(_given(process, name, content, steps, form, whole))
        if some:
            packed.write(into, some, f"{number:06d}{GIVEN}")
            given += Given(any(one.lacks for one in some), 0)
    for file in (COUNTS, removed.FILE, LINES):
        with contextlib.suppress(FileNotFoundError):
            (into / file).write_bytes(regular_file.read(process.folder / file, process.limits))
    return given


def whole_windows(steps: Steps, chosen: Numbers) -> Windows:
    """Return from when to when everything is given: until the first step, and of each chosen one, until the next one
    begins."""
    found = [(-ALWAYS_NS, steps.starts_ns[0] if steps.starts_ns else ALWAYS_NS)]
    for (begin_ns, end_ns), number in zip(pairwise([*steps.starts_ns, ALWAYS_NS]), steps.numbers, strict=True):
        if chosen.has(number):
            is_next = found[-1][1] == begin_ns
            found[-1:] = [(found[-1][0], end_ns)] if is_next else [found[-1], (begin_ns, end_ns)]
    return tuple(found)


def _files(names: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the segments of each file, and its number."""
    of_file: dict[int, list[str]] = {}
    for name in names:
        stem = name.removesuffix(".seg")
        number = int(stem) if stem.isdecimal() else 1
        of_file.setdefault((number - 1) // FILE_SEGMENTS * FILE_SEGMENTS + 1, []).append(name)
    yield from of_file.items()


def _changed(process: Process, name: str, content: bytes) -> bool:
    """Return whether a segment is not as somebody said that it is, which only all of it tells."""
    is_said = process.seal(name) is not None or name in process.removed.segments
    return is_said and not is_final(process, name, checksum.of_bytes(content))


def _given(process: Process, name: str, content: bytes, steps: Steps | None, form: Form, whole: Windows) -> Packed:
    """Return a segment as it is given."""
    lacked, is_closed = _lacked(process, name), is_final(process, name, checksum.of_bytes(content))
    if not is_closed:
        content = content.rstrip(b"\0")  # the room behind its last record
    if steps is None:
        return Packed(name, content, lacked)
    try:
        made = brief(content, process.types, steps, ALWAYS_NS, form, whole, is_closed=is_closed)
    except DamagedError:
        return Packed(name, content, lacked)
    if len(made.content) >= WORTH * len(content):
        return Packed(name, content, lacked)
    before = [removed.totals_of(lacked)] if lacked else []
    marked = _marked(process, made.totals)
    is_now = checksum.of_bytes(made.content)
    lacks = {
        "segment": name,
        "bytes": is_now.size_bytes,
        "crc32": is_now.crc32,
        "spans": removed.rows_of(removed.merged([*before, marked])),
        "samples": made.samples + lacked.get("samples", 0),
        "flows": made.flows + lacked.get("flows", 0),
    }
    return Packed(name, made.content, lacks)


def _marked(process: Process, totals: Totals) -> Totals:
    """Return totals with spans of hooks told from the program's, where records do not say so."""
    if process.mark is None:
        return totals
    found: Totals = {}
    for group, total in totals.items():
        span = Span(group.name, 0, 0, 0, None, {})
        process.mark(span)
        removed.add(found, {group._replace(is_automatic=group.is_automatic or span.is_automatic): total})
    return found


def _lacked(process: Process, name: str) -> Mapping[str, Any]:
    """Return what a segment lacks already that came from another host itself."""
    place = process.packed.look().get(name)
    return {} if place is None or (process.folder / name).exists() else place.lacks


def by_clock(steps: Iterable[StepRow], own_ns: Callable[[int], int]) -> Steps:
    """Return steps by the clock of a process.

    Args:
        steps: Of the run.
        own_ns: Gives what the process's clock said at a time of theirs.
    """
    found = sorted(steps, key=lambda step: step.start_ns)
    return Steps(
        [own_ns(step.start_ns) for step in found],
        [ALWAYS_NS if step.end_ns is None else own_ns(step.end_ns) for step in found],
        [step.number for step in found],
    )

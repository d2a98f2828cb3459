"""Writes this process's part of a Recording: its folder, and a segment for each of its threads."""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rltrace.host import clock
from rltrace.host.interruption import own_failure
from rltrace.record import checksum, native, redaction
from rltrace.record.announcement import complain, complain_once
from rltrace.record.cluster import DIR_VARIABLE, PARENT_VARIABLE
from rltrace.record.disk_account import Closed, DiskAccount, closed_in, on_disk
from rltrace.record.encoding import encode, plain_text
from rltrace.record.lock import InterruptibleLock
from rltrace.record.process import (
    COUNT_SLOTS,
    COUNTS_BYTES,
    LOST,
    Line,
    ProcessFolder,
    discard_attempts,
    identity,
    process_key,
    sound_fields,
)
from rltrace.record.segment import FIRST_BYTES, NEXT_BYTES, REUSE_BYTES, SIZES, Segment

RETRY_NS = 1_000_000_000
"""How long to wait after a full disk before trying again to make a segment or the process's folder."""

_MAY_PASS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors that keep a folder from being made now but maybe not in a second: there is no space, or no descriptor."""

MOST_UNSAID = 1000
"""Lines that are kept until there is a folder for them."""

LINES_BYTES = 16 * 1024
"""How much of the disk budget a process takes for its lines at a time."""

FOLDER_BYTES = on_disk(COUNTS_BYTES) + LINES_BYTES + on_disk(1)
"""What a process takes for its folder, its counts and its first lines."""

_TOLD_AGAIN = ("process", "type", "hook")
"""Kinds of lines that `Recorder._lines` has."""


typed_spans: list[dict[str, Any]] = []
"""Typed spans that this process has declared; each of its folders lists them all."""


class HookCount:
    """One patched place of a framework: it counts how often it fired, without a Python function of ours.

    Hooks run between a program's own calls, when none of their code and data is in the processor's caches: a store in
    the mapped counts then took 2 of a hook's 7 us. So a hook takes a number each time, and the counts are written when
    the hook first fires, with every new segment, and at the end. After a kill they are as they were at the last of
    these.
    """

    __slots__ = ("_next", "_reads", "_recorder", "_slot", "fired", "line")

    fired: Callable[[], object]
    """Count once."""

    def __init__(self, recorder: Recorder, line: dict[str, Any]) -> None:
        self.line = line
        self._recorder = recorder
        self._slot: int = line["slot"]
        # One C call that never gives two threads the same number: a lock here costs a hot hook 0.3 us.
        self._next = itertools.count(1).__next__
        self.restart()

    def restart(self) -> None:
        """Count from the start again: in a forked child, what fired before belongs to its parent."""
        self._reads = self._next()
        self.fired = self._fire_first

    def _fire_first(self) -> None:
        self.fired = self._next
        self._next()
        self.settle()

    def settle(self) -> None:
        """Write how often it has fired so far."""
        try:
            self._recorder.run_alone(self._settle)
        except own_failure():  # the recorder has stopped
            pass

    def _settle(self) -> None:
        taken = self._next()
        self._reads += 1  # to look takes a number too
        self._recorder._counts[self._slot] = taken - self._reads

    def spent(self, spent_ns: int) -> None:
        """Add the time that it took; not for the hooks that share the last slot."""
        try:
            if self._slot < COUNT_SLOTS - 1:
                self._recorder._counts[COUNT_SLOTS + self._slot] += spent_ns
        except own_failure():  # the recorder has stopped
            pass


class Held:
    """The segment of a thread. Its thread-local storage has the only reference, so this dies with the thread.

    Python gives a thread that C made new storage at each call, so there this dies with the call.
    """

    __slots__ = ("c_thread", "pid", "recorder", "segment")

    segment: Segment

    def __init__(self, recorder: Recorder, c_thread: int | None) -> None:
        self.pid = recorder.pid
        self.recorder = recorder
        self.c_thread = c_thread
        """The system's number of a thread that C made."""

    def __del__(self) -> None:
        try:
            if self.pid == os.getpid():  # a forked child has no part in its parent's segments
                self.recorder.take_back(self.c_thread, self.segment)
        except own_failure():
            pass


class Recorder:
    """Writes one process's part of a Recording. `start` and `join` make it; a forked child starts anew."""

    _folder: ProcessFolder | None = None

    def __init__(
        self,
        recording: Path,
        *,
        start_ns: int | None = None,
        max_bytes: int | None = None,
        when_open: Callable[[], object] = lambda: None,
        **who: Any,
    ) -> None:
        """Open this process's folder.

        Args:
            recording: Folder with a manifest.
            start_ns: When this process began to record; now by default.
            max_bytes: Bound on this process's segments, within the host's disk budget; when it is reached, the oldest
                are dropped and counted. What its threads are writing now, at most 1 MiB per thread, is never dropped.
            when_open: Called each time that the folder of this process, or of a forked child, exists.
            **who: Added to the process's identity: role, rank, device, name.

        Raises:
            OSError: the folder cannot be written.
        """
        self.recording = recording
        self._when_open = when_open
        self.max_bytes = self._sound({"max_bytes": max_bytes}).get("max_bytes")
        self.who = self._sound(who)
        self._hooks: dict[tuple[str, str], HookCount] = {}
        self.forget_parent(start_ns)
        try:
            self.run_alone(self._open)
        except OSError as error:
            if error.errno not in _MAY_PASS:
                raise
            complain(f"{recording} cannot be written now: {error.strerror}; rltrace tries again every second")
            self._when_open()

    def forget_parent(self, start_ns: int | None = None) -> None:
        """Start with nothing: in a forked child the mappings belong to the parent, which continues to write them.

        The child makes a folder of its own at its first record, so one that records nothing leaves nothing.
        """
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        self.start_ns = clock.now_ns() if start_ns is None else start_ns
        self.key = process_key(self.start_ns)
        self.run_alone = InterruptibleLock().run  # re-entrant: a signal handler may record too
        self._counts = memoryview(bytearray(COUNTS_BYTES)).cast("Q")
        self._lost = 0
        for hook in self._hooks.values():
            hook.restart()
        self._segments: list[Segment] = []
        """Those whose checksum is still to be written: threads write to them, or a full disk kept it from them."""
        self._last_number = 0
        """Number of the newest segment."""
        self._sealed_segments = 0
        """How many have a checksum, without those that this process itself dropped."""
        self._kept: deque[Closed] = deque()
        """Those with a checksum, the oldest first, if this process has a bound of its own."""
        self._returned: list[Segment] = []
        """Those with room whose thread is dead."""
        self._left: dict[int, Segment] = {}
        """Those of threads that C made and that are not in a call of Python now, by the system's number of each. The
        native library remembers a thread's segment from call to call. Nobody else may get it before the thread ends."""
        self._is_closed = False
        self._disk: DiskAccount | None = None
        """None until this process has something to write."""
        self._lines_left_bytes = LINES_BYTES
        """What is left of what was taken for lines."""
        self._attempts = itertools.count(1)
        self._made: dict[str, tuple[ProcessFolder, list[Line]]] = {}
        """The folder that is to be shown, and what it says, by the key."""
        self._unsaid: list[Line] = []
        """Lines that came before there was a folder, without those that `_lines` has."""
        self._said: list[Line] = []
        """What the folder says of `_lines`."""
        self._is_open = False
        self._is_behind = False
        """Whether some of it could not be written."""
        self._retry_ns = self._say_ns = 0
        self.pid = os.getpid()  # last: where this does not end, it is done again

    def _open(self) -> None:
        """Make this process's folder, and write in it what is known about the process, unless that is done.

        What a signal handler raises or records may come at any point of this. So each step may be repeated, and the
        next record continues with the first step that is not done.

        Raises:
            OSError: the disk is full, now or less than `RETRY_NS` ago.
        """
        if self._is_open:
            return
        if self.pid != os.getpid():  # what is done after a fork was interrupted
            self.forget_parent()
        if self._folder is None:
            self._show()
        elif clock.now_ns() < self._say_ns:
            return
        self._is_behind = False
        lines, said = self._lines(), self._said
        for kind, fields in [line for line in lines if line not in said] if lines != said else ():
            self.append(kind, **fields)
        self._said = [] if self._is_behind else lines
        while self._unsaid:
            kind, fields = self._unsaid[0]
            self.append(kind, **fields)
            del self._unsaid[:1]
        os.environ[DIR_VARIABLE] = str(self.recording)  # processes started from here join the same Recording
        os.environ[PARENT_VARIABLE] = self.key
        self._when_open()
        self._is_open = not self._is_behind

    def _show(self) -> None:
        """Make the folder and show it to readers."""
        self._wait_for_space()
        try:
            if (made := self._made.get(self.key)) is None:
                # Which is not ours where a signal handler has recorded meanwhile.
                made = self._made.setdefault(self.key, self._attempt())
            folder, self._said = made
            folder.show()
        except own_failure(OSError):
            if self._folder is not None:  # a signal handler's record has made it
                return
            self._made.pop(self.key, None)
            self._retry_ns = clock.now_ns() + RETRY_NS
            raise
        if self._counts is not folder.counts:
            folder.counts[:] = self._counts
            self._counts = folder.counts
        self._counts[LOST] = self._lost
        self._folder = folder
        discard_attempts(self.recording, self.key)

    def _attempt(self) -> tuple[ProcessFolder, list[Line]]:
        """Make a folder that no reader sees yet, with the `_lines` that say who this process is."""
        if self._disk is None:
            disk = DiskAccount(self.recording, self.key)
            disk.take(FOLDER_BYTES)
            self._disk = disk
        kind, who = self._lines()[0]
        line = {**identity(self.start_ns), "parent": os.environ.get(PARENT_VARIABLE), **who}
        return ProcessFolder(self.recording, self.key, next(self._attempts), (kind, line)), [(kind, who)]

    def _lines(self) -> list[Line]:
        """Return the lines about this process that are written again if they could not be written."""
        types: list[Line] = [("type", line) for line in typed_spans]
        hooks: list[Line] = [("hook", hook.line) for hook in list(self._hooks.values())]
        return [("process", {**self.who}), *types, *hooks]

    def append(self, kind: str, **fields: Any) -> None:
        """Append a line about this process; one that cannot be written is written later, or counted as lost."""
        if self._folder is None:  # it has recorded nothing: `_open` will say it all
            if kind not in _TOLD_AGAIN and len(self._unsaid) < MOST_UNSAID:
                self._unsaid.append((kind, fields))
            elif kind not in _TOLD_AGAIN:
                self.lose()
            return
        try:
            self._append(self._folder, kind, fields)
        except own_failure() as error:
            if kind in _TOLD_AGAIN and isinstance(error, OSError):
                self._tell_again(RETRY_NS)
            else:
                self.lose()
        except BaseException:
            self._tell_again(0)
            raise

    def _append(self, folder: ProcessFolder, kind: str, fields: dict[str, Any]) -> None:
        """Append a line, and take more of the disk budget once `LINES_BYTES` are written."""
        if self._lines_left_bytes < 0 and self._disk is not None:
            more_bytes = on_disk(-self._lines_left_bytes) + LINES_BYTES
            self._disk.take(more_bytes)
            self._lines_left_bytes += more_bytes
        self._lines_left_bytes -= folder.append(kind, **fields)

    def _tell_again(self, wait_ns: int) -> None:
        """Have `_open` write all that it knows once more, after some time has passed."""
        self._say_ns = clock.now_ns() + wait_ns
        self._said = []
        self._is_behind = True
        self._is_open = False

    def keep_to(self, max_bytes: int | None) -> None:
        """Bound this process's segments from the next one on; None keeps the present bound."""
        bound = self._sound({"max_bytes": max_bytes}).get("max_bytes")
        if bound is not None:
            self.run_alone(self._keep_to, bound)

    def _keep_to(self, max_bytes: int) -> None:
        if self.max_bytes is None and self._folder is not None:
            self._kept = deque(sorted(closed_in(self._folder.path)))
        self.max_bytes = max_bytes

    def identify(self, **who: Any) -> None:
        """Say more about this process: role, rank, device, name. A wrong value is ignored, with a line on stderr."""
        sound = self._sound(who)
        self.who |= sound
        self.append("process", **sound)

    def _sound(self, who: dict[str, Any]) -> dict[str, Any]:
        sound, refused = sound_fields(who)
        for field in refused:
            complain_once(f"ignored: {field}")
        return sound

    def hook(
        self, instrumentation: str, target: str, state: str, reason: str | None = None, emits: tuple[str, ...] = ()
    ) -> HookCount:
        """Report a hook.

        Args:
            instrumentation: Name in the table of instrumentations.
            target: `module:Class.attribute`.
            state: "waiting", "installed", "skipped", "failed" or "undone"; a later report of the same instrumentation's
                same target replaces it.
            reason: Why it is not installed.
            emits: Names of the spans it makes.
        """
        known = self._hooks.get((instrumentation, target))
        slot = known.line["slot"] if known else min(len(self._hooks) + 1, COUNT_SLOTS - 1)
        line = {
            "slot": slot,
            "instrumentation": instrumentation,
            "target": target,
            "state": state,
            "reason": None if reason is None else redaction.text(reason),
            "emits": list(emits),
        }
        if known is None:
            self._hooks[instrumentation, target] = known = HookCount(self, line)
        known.line = line
        if state == "failed" and self._folder is None:  # a forked child that may never record anything
            self._say_all()
        else:
            self.append("hook", **line)
        return known

    def _say_all(self) -> None:
        """Open this process's part of the Recording, which says what is known about the process."""
        try:
            self.run_alone(self._open)
        except own_failure():
            self.lose()

    def lose(self, count: int = 1) -> None:
        """Count events that could not be written."""
        try:
            self.run_alone(self._lose, count)
        except own_failure():  # the recorder has stopped
            pass

    def _lose(self, count: int) -> None:
        self._lost += count
        self._counts[LOST] = self._lost

    def write(self, local: Any, records: list[bytes]) -> None:
        """Write all of this thread's records that its segment has no room for, or that came before it had one.

        Args:
            local: The thread's own storage: it gets `write`, which appends to its segment, and `held`, which has the
                segment.
            records: Removed once they are written; a signal handler may append to them meanwhile.

        Raises:
            OSError: the disk is full, now or less than `RETRY_NS` ago.
            ValueError: a record is larger than a segment, or the recorder has stopped.
        """
        while records:
            segment = self.run_alone(self._segment_of_thread, local, len(records[0]))
            segment.write(records[0])
            del records[0]
        local.write = segment.write
        if local.held.c_thread is not None:  # the next call has no `local.write`, and most calls have one record
            native.remember_segment()

    def _segment_of_thread(self, local: Any, record_bytes: int) -> Segment:
        """Return the segment of this thread, or a new one, with room for a record.

        A call that an error from outside ended is repeated: what it left is reused or overwritten.
        """
        if record_bytes > NEXT_BYTES - REUSE_BYTES:
            raise ValueError(f"a record of {record_bytes} bytes does not fit a segment of {NEXT_BYTES}")
        if self._is_closed:
            raise ValueError("the recorder has stopped")
        self._open()
        held: Held | None = getattr(local, "held", None) or self._held_again(local)
        if held is not None and held.segment.free_bytes >= record_bytes:
            return held.segment
        self._settle_hooks()
        return self._take_segment(local, held, record_bytes)

    def _held_again(self, local: Any) -> Held | None:
        """Give a thread that C made the segment of its last call, which names it already."""
        thread = threading.get_native_id()
        if thread not in self._left or _python_name() is not None:
            return None
        held = Held(self, thread)
        held.segment = self._left[thread]
        local.held = held
        del self._left[thread]
        return held

    def _take_segment(self, local: Any, held: Held | None, record_bytes: int) -> Segment:
        thread, name = threading.get_native_id(), _python_name()
        header = encode((thread, plain_text((_kernel_name() if name is None else name)[:256]), True))
        segment = self._returned_segment(held, len(header) + record_bytes)
        made = [] if segment is not None else [self._new_segment(held, len(header) + record_bytes)]
        segment = segment or made[0]
        segment.write(header)
        number = max(self._last_number, int(segment.path.stem))
        full = None if held is None else held.segment
        holder = held or Held(self, thread if name is None else None)
        # No call from here to the next comment, and so nothing that Python would run a signal handler after.
        self._segments += made
        self._last_number = number
        holder.segment = segment
        local.held = holder
        # It has the segment now.
        if full is not None:
            self._seal(full)
        return segment

    def _settle_hooks(self) -> None:
        for hook in self._hooks.values():
            if hook.fired != hook._fire_first:
                hook.settle()

    def _returned_segment(self, held: Held | None, needed_bytes: int) -> Segment | None:
        """Return a segment that a dead thread left, for a thread that has none."""
        if held is not None:
            return None
        for thread in [thread for thread in self._left if not os.path.exists(f"/proc/self/task/{thread}")]:
            self._take_back(None, self._left.pop(thread))
        for segment in self._returned:
            if segment.free_bytes > max(needed_bytes, REUSE_BYTES):
                self._returned.remove(segment)
                return segment
        return None

    def _new_segment(self, held: Held | None, needed_bytes: int) -> Segment:
        before_bytes = 0 if held is None else held.segment.size_bytes
        # No generator: what interrupts one that is closed unfinished, the interpreter drops.
        larger = [size for size in SIZES if size > max(before_bytes, needed_bytes)]
        size_bytes = larger[0] if larger else NEXT_BYTES
        self._wait_for_space()
        self._drop_oldest(size_bytes)
        assert self._disk is not None
        try:
            try:
                self._disk.take(size_bytes)
            except own_failure(OSError):
                if needed_bytes >= FIRST_BYTES:
                    raise
                size_bytes = FIRST_BYTES  # there may be room for a small one
                self._disk.take(size_bytes)
            return self._allocated(size_bytes)
        except own_failure(OSError):
            self._retry_ns = clock.now_ns() + RETRY_NS
            raise

    def _allocated(self, size_bytes: int) -> Segment:
        try:
            return Segment(self._next_path(), size_bytes)
        except own_failure(OSError):
            assert self._disk is not None
            self._disk.give_back(size_bytes)
            raise

    def _next_path(self) -> Path:
        """Return the path of the next segment; if a call was interrupted, its file exists already."""
        assert self._folder is not None
        return self._folder.path / f"{self._last_number + 1:06d}.seg"

    def _wait_for_space(self) -> None:
        """Fail at once until `RETRY_NS` have passed: asking a full disk again and again would slow the program down."""
        if self.is_short_of_space:
            raise OSError("the disk was full a moment ago")

    @property
    def is_short_of_space(self) -> bool:
        """Return whether the disk was full less than `RETRY_NS` ago."""
        return clock.now_ns() < self._retry_ns

    def lose_while_short(self, _data: bytes) -> None:
        """Lose a record, in the place of a segment's `write`, until the disk is asked again.

        Raises:
            OSError: it is time to ask.
        """
        if not self.is_short_of_space:
            raise OSError("the disk was full, and may have room now")
        self.lose()

    def _drop_oldest(self, new_bytes: int) -> None:
        """Drop this process's oldest segments until a new one fits its own bound."""
        if self.max_bytes is None or self._disk is None:
            return
        total_bytes = new_bytes + sum(s.size_bytes for s in self._segments) + sum(s.size_bytes for s in self._kept)
        while total_bytes > self.max_bytes and self._kept:
            total_bytes -= self._kept[0].size_bytes
            if self._disk.remove(self._kept[0].path) is not None:
                self._sealed_segments -= 1
            self._kept.popleft()

    @property
    def budget_bytes(self) -> int | None:
        """What the Recording may take of this host's disk; None if there is no bound, or nothing is written yet."""
        return None if self._disk is None else self._disk.budget_bytes

    @property
    def has_written(self) -> bool:
        """Return whether this very process has recorded an event."""
        return self.pid == os.getpid() and self._last_number > 0

    def take_back(self, c_thread: int | None, segment: Segment) -> None:
        """Keep a segment that has room for the next new thread, and one of a thread that C made for that thread."""
        self.run_alone(self._take_back, c_thread, segment)

    def _take_back(self, c_thread: int | None, segment: Segment) -> None:
        if c_thread is not None:
            self._left[c_thread] = segment
        elif segment.free_bytes > REUSE_BYTES:
            self._returned.append(segment)
        else:
            self._seal(segment)

    def _seal(self, segment: Segment) -> None:
        """Close a segment and write its checksum, once: nothing can be written to it any more."""
        mapped_bytes = segment.size_bytes
        segment.close()
        if self._disk is not None:
            self._disk.give_back(on_disk(mapped_bytes) - on_disk(segment.size_bytes))
        if self._folder is None or segment not in self._segments:
            return
        try:
            found = checksum.of_file(segment.path)
            seal = {"segment": segment.path.name, "bytes": found.size_bytes, "crc32": found.crc32}
            self._append(self._folder, "seal", seal)
            self._sealed_segments += 1
        except own_failure(FileNotFoundError):  # it was dropped a moment ago
            pass
        except own_failure(OSError):  # the disk is full
            return
        self._segments.remove(segment)
        if self.max_bytes is not None:
            self._kept.append(Closed(clock.now_ns(), segment.path, segment.size_bytes))

    def close(self) -> None:
        """End this process's part of the Recording."""
        self.run_alone(self._close)

    def _close(self) -> None:
        if self._lost and self._folder is None:  # it never could be made, maybe now
            self._retry_ns = 0
            self._open()
        if self._folder is None:
            return
        for segment in list(self._segments):
            self._seal(segment)
        self._next_path().unlink(missing_ok=True)
        self._settle_hooks()
        self._say_ns = 0
        self._open()
        if self._is_behind:
            self.lose()
        segments = None if self._segments else self._sealed_segments
        try:
            counts = self._folder.counts_in_file()
            self.append("end", end_ns=clock.now_ns(), segments=segments, counts=counts)
        except own_failure(OSError):  # it was deleted, or no file can be opened
            self.lose()
        self._folder.close()


def _python_name() -> str | None:
    """Return the name that this thread has in Python; None if C made it.

    `threading.current_thread` would add such a thread to those that the program sees.
    """
    thread: threading.Thread | None = threading._active.get(threading.get_ident())  # type: ignore[attr-defined]
    return None if thread is None or thread.name.startswith("Dummy-") else thread.name


def _kernel_name() -> str:
    """Return the kernel's name of this thread; none if it inherited the name from its process, as those of Ray's pools
    do."""
    try:
        own, main = (
            Path(f"/proc/self/task/{task}/comm").read_text(errors="replace").strip()
            for task in (threading.get_native_id(), os.getpid())
        )
    except own_failure(OSError):
        return "thread"
    # Ray renames its main thread with every call ("ray::Worker.step"); a pool has the name of when it was made.
    return "thread" if re.split("[.:]", own)[0] == re.split("[.:]", main)[0] else own

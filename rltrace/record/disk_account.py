"""The account of a run's disk budget on one host: a process takes bytes from it before it writes them.

The file is shared by all processes of the host, none of which waits for another. Each has an entry of its own and is
the only one to raise it: it adds what it is about to write, reads the sum of all entries, and takes back what does not
fit. So the sum of what is written is within the budget at every moment, whoever is killed then.

If nothing is left, the oldest segment goes that nobody writes to any more, whoever wrote it. Only the holder of the
file's lock removes segments. It first writes down which one, so that whoever holds the lock after a kill finishes it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rltrace.host.interruption import own_failure, suppress_own
from rltrace.host.mapped_file import require_size
from rltrace.record import checksum, disk_budget
from rltrace.record.manifest import LINES, PROCESSES, started_ticks, to_json
from rltrace.record.process import is_of_this_host, pid_of
from rltrace.record.segment import SIZES

FILE = "disk.account"

_MAGIC = b"rltdisk1"
_ENTRY_BYTES = 128
_KEY_BYTES = 104
_TAKEN, _REMOVED = 13, 14
"""Where in an entry, in units of 8 bytes, are the bytes that its process has taken and not given back, and those that
whoever held the lock has removed of them."""
_HEAD = struct.Struct("<8sQ")
"""What the first entry begins with: magic and budget."""
_PENDING_AT = _HEAD.size
_PENDING = struct.Struct("<4Q")
"""Behind it the removal that is under way: where its process's entry is (0 for none), that entry's `_REMOVED`
afterwards, and the number and the size of the segment."""
_NOTHING_PENDING = bytes(_PENDING.size)

_BRIEF_MODE = 0o444
"""Of a segment that was made brief: nobody writes to it, and who looks for segments knows it by that."""

_BLOCK_BYTES = 4096
_RUN_BYTES = 1 << 16
_RUN_SHARE = 1000
"""What is left for the files of the run itself, and for its folders: so much, and one of so many bytes of the budget.
"""
_LINE_BYTES = 256
"""More than the line takes that says which segment was removed."""

_LOCK_TRIES, _BETWEEN_SECONDS = 50, 0.001
"""How often a process tries to get the lock; then it does without what it wanted to write. It is no time by the clock,
which goes on while this process and the lock's holder are stopped."""

_LISTED = 256
"""How many of the oldest segments are remembered from one look through all folders."""


def on_disk(size_bytes: int) -> int:
    """Return what a file of this size takes of the disk."""
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


class Closed(NamedTuple):
    """A segment that nobody writes to."""

    closed_ns: int
    path: Path
    size_bytes: int
    is_brief: bool = False
    """Whether it was replaced by a shorter form of it, which has of the oldest steps what figures are made of."""


class DiskAccount:
    """This process's entry in the account, and the removal of what is oldest."""

    def __init__(self, recording: Path, key: str) -> None:
        """Add an entry for this process; the first one of a host makes the file.

        Args:
            recording: Folder of the Recording, on this host.
            key: Key of this process; its own segments are known by it.

        Raises:
            OSError: it cannot be written.
        """
        self._recording = recording
        self._path = recording / FILE
        self._key = key
        self._taken_bytes = 0
        self._oldest: list[Closed] = []
        """Segments to remove next, the oldest last."""
        self.budget_bytes = open_account(recording)
        """None if there is no bound: then nothing is counted."""
        self._most_bytes = 0 if self.budget_bytes is None else self.budget_bytes - _of_run(self.budget_bytes)
        """What all entries together may come to."""
        if self.budget_bytes is not None:
            self._at = self._add_entry()

    def _add_entry(self) -> int:
        entry = self._key.encode()[:_KEY_BYTES].ljust(_ENTRY_BYTES, b"\0")
        with open(self._path, "ab", buffering=0) as file:
            require_size(self._path, os.fstat(file.fileno()).st_size + _ENTRY_BYTES)
            file.write(entry)
            return file.tell() - _ENTRY_BYTES

    def take(self, size_bytes: int) -> None:
        """Take what a file will need, and remove the oldest segments for it if nothing else is left.

        Raises:
            OSError: what is being written leaves no room for it.
        """
        if self.budget_bytes is None or self._has_taken(size_bytes):
            return
        with self._locked() as descriptor:
            self._make_room(descriptor, size_bytes)
        if not self._has_taken(size_bytes):
            raise OSError(errno.EDQUOT, "the disk budget is spent", str(self._path))

    def give_back(self, size_bytes: int) -> None:
        """Give back what this process has taken and does not need."""
        if self.budget_bytes is not None and size_bytes:
            with suppress_own(OSError), self._opened() as descriptor:  # if not, less is left for others
                self._change(descriptor, -size_bytes)

    def remove(self, segment: Path, by: str | None = None) -> int | None:
        """Remove a segment, and say so in the lines of its process; return its size, None if that did not work now.

        Args:
            segment: Its file.
            by: Key of the process that makes room for the host; None if a process keeps to its own bound.
        """
        try:
            if self.budget_bytes is None:
                size_bytes = segment.stat().st_size
                _remove(segment, size_bytes, by)
                return size_bytes
            with self._locked() as descriptor:
                return self._remove(descriptor, segment, by)
        except own_failure(OSError):
            return None

    def replace(self, segment: Path, content: bytes) -> bool:
        """Replace a segment that nobody writes to by a shorter form of it; return whether that could be done now.

        A kill in the middle leaves one of the two forms, and at worst counts the longer one.
        """
        if self.budget_bytes is None:
            return False
        new_bytes = on_disk(len(content))
        unfinished = segment.with_suffix(".brief")
        try:
            self.take(new_bytes)
            try:
                unfinished.write_bytes(content)
                unfinished.chmod(_BRIEF_MODE)
                with self._locked() as descriptor:
                    entries, status = _read(descriptor), segment.stat()
                    at, old_bytes = _entry_of(entries, segment.parent.name), on_disk(status.st_size)
                    os.utime(unfinished, ns=(status.st_mtime_ns, status.st_mtime_ns))  # it is as old as before
                    os.replace(unfinished, segment)
                    if at is not None:
                        removed = _value(entries, at, _REMOVED) + old_bytes - new_bytes
                        _write(descriptor, at + 8 * _REMOVED, removed)
            finally:
                unfinished.unlink(missing_ok=True)
                self.give_back(new_bytes)
        except own_failure(OSError):
            return False
        return True

    def held_bytes(self) -> int:
        """Return what all processes of this host hold."""
        with self._opened() as descriptor:
            return _sum(_read(descriptor))

    def _has_taken(self, size_bytes: int) -> bool:
        with self._opened() as descriptor:
            self._change(descriptor, size_bytes)
            if _sum(_read(descriptor)) <= self._most_bytes:
                return True
            self._change(descriptor, -size_bytes)
            return False

    def _change(self, descriptor: int, size_bytes: int) -> None:
        self._taken_bytes += size_bytes
        _write(descriptor, self._at + 8 * _TAKEN, self._taken_bytes)

    # ---- with the lock

    def _make_room(self, descriptor: int, size_bytes: int) -> None:
        """Remove the oldest segments until there is room for some bytes, or nothing is left to remove."""
        has_looked = False
        while _sum(_read(descriptor)) + size_bytes > self._most_bytes:
            if not self._oldest:
                if has_looked:
                    return
                has_looked = True
                self._settle_dead(descriptor)
                self._oldest = self._closed_segments()[:_LISTED][::-1]
                continue
            oldest = self._oldest.pop()
            if oldest.is_brief or not _is_brief(oldest.path):
                self._remove(descriptor, oldest.path, by=self._key)

    def _remove(self, descriptor: int, segment: Path, by: str | None) -> int | None:
        content = _read(descriptor)
        at = _entry_of(content, segment.parent.name)
        try:
            size_bytes = segment.stat().st_size
            if at is None:  # its process is of a time before there was an account
                _remove(segment, size_bytes, by)
                return size_bytes
        except own_failure(OSError):  # it is gone
            return None
        removed = _value(content, at, _REMOVED) + max(0, on_disk(size_bytes) - _LINE_BYTES)
        os.pwrite(descriptor, _PENDING.pack(at, removed, int(segment.stem), size_bytes), _PENDING_AT)
        self._finish_removal(descriptor, by)
        return size_bytes

    def _finish_removal(self, descriptor: int, by: str | None) -> None:
        """Do what the head says is under way; it may be half done already."""
        content = _read(descriptor)
        at, removed, number, size_bytes = _PENDING.unpack_from(content, _PENDING_AT)
        if at and at + _ENTRY_BYTES <= len(content):
            _remove(self._recording / PROCESSES / _key_at(content, at) / f"{number:06d}.seg", size_bytes, by)
            _write(descriptor, at + 8 * _REMOVED, removed)
            os.pwrite(descriptor, _NOTHING_PENDING, _PENDING_AT)

    def _settle_dead(self, descriptor: int) -> None:
        """Set the entries of processes that are gone to what their folders hold."""
        content = _read(descriptor)
        for at in range(_ENTRY_BYTES, len(content) - _ENTRY_BYTES + 1, _ENTRY_BYTES):
            key = _key_at(content, at)
            taken, removed = _value(content, at, _TAKEN), _value(content, at, _REMOVED)
            if taken == removed or key == self._key or not is_of_this_host(key):
                continue
            folder = self._recording / PROCESSES / key
            if not is_running(folder):
                _write(descriptor, at + 8 * _REMOVED, max(0, taken - _folder_bytes(folder)))

    def _closed_segments(self) -> list[Closed]:
        """Return the segments of this host that nobody writes to, the oldest first; brief ones only if all are: they
        are the oldest, and would all go for the room of one that is whole."""
        found: list[Closed] = []
        with suppress_own(FileNotFoundError), os.scandir(self._recording / PROCESSES) as folders:
            for entry in folders:
                if is_of_this_host(entry.name):
                    found += [one for one in closed_in(Path(entry.path)) if one.size_bytes]
        whole = [one for one in found if not one.is_brief]
        return sorted(whole or found)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        # Opened anew, and closed by its own death if a signal handler raises: see `mapped_file`.
        with open(self._path, "r+b", buffering=0) as file:
            require_size(self._path, os.fstat(file.fileno()).st_size)
            yield file.fileno()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock, with what an earlier holder left undone done.

        Raises:
            OSError: somebody else holds it for longer than that.
        """
        import fcntl  # not everywhere where Recordings are read

        with self._opened() as descriptor:
            for tries_left in reversed(range(_LOCK_TRIES)):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except own_failure(BlockingIOError):
                    if not tries_left:
                        raise
                    time.sleep(_BETWEEN_SECONDS)
            try:
                self._finish_removal(descriptor, by=self._key)
                yield descriptor
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too


def open_account(recording: Path) -> int | None:
    """Return the budget of this host's part of a Recording; None if it has no bound.

    Whoever asks first on this host decides, and makes the account.

    Raises:
        OSError: the account cannot be made, or is not one.
    """
    path = recording / FILE
    with contextlib.suppress(FileNotFoundError):
        return _budget(path)
    recording.mkdir(parents=True, exist_ok=True)  # on another host than the run's it is the first
    budget_bytes = disk_budget.of_host(recording)
    unfinished = recording / f".{FILE}.{os.getpid()}.{time.monotonic_ns()}"
    try:
        unfinished.write_bytes(_HEAD.pack(_MAGIC, budget_bytes or 0).ljust(_ENTRY_BYTES, b"\0"))
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)  # whole or not at all
    finally:
        unfinished.unlink(missing_ok=True)
    return _budget(path)


def share_used(recording: Path) -> float:
    """Return which share of the budget the processes of this host have taken; 0 without a bound."""
    try:
        with open(recording / FILE, "rb", buffering=0) as file:
            content = file.read()
    except own_failure(OSError):
        return 0.0
    budget_bytes = int(_HEAD.unpack_from(content)[1]) if len(content) >= _ENTRY_BYTES else 0
    return _sum(content[: len(content) // _ENTRY_BYTES * _ENTRY_BYTES]) / budget_bytes if budget_bytes else 0.0


def _budget(path: Path) -> int | None:
    with open(path, "rb", buffering=0) as file:
        content = file.read(_HEAD.size)
    if len(content) < _HEAD.size or not content.startswith(_MAGIC):
        raise OSError(errno.EINVAL, "this is no account of a disk budget", str(path))
    return int(_HEAD.unpack(content)[1]) or None


# ---- entries ------------------------------------------------------------------------------------------------------


def _read(descriptor: int) -> bytes:
    size_bytes = os.fstat(descriptor).st_size
    content = os.pread(descriptor, size_bytes, 0)
    return content[: len(content) // _ENTRY_BYTES * _ENTRY_BYTES]


def _write(descriptor: int, at: int, value: int) -> None:
    os.pwrite(descriptor, struct.pack("<Q", max(0, value)), at)


def _sum(content: bytes) -> int:
    values = memoryview(content)[_ENTRY_BYTES:].cast("Q")
    step = _ENTRY_BYTES // 8
    return len(content) + sum(values[_TAKEN::step].tolist()) - sum(values[_REMOVED::step].tolist())


def _of_run(budget_bytes: int) -> int:
    return _RUN_BYTES + budget_bytes // _RUN_SHARE


def _value(content: bytes, at: int, place: int) -> int:
    return int.from_bytes(content[at + 8 * place : at + 8 * place + 8], "little")


def _key_at(content: bytes, at: int) -> str:
    return content[at : at + _KEY_BYTES].rstrip(b"\0").decode(errors="replace")


def _entry_of(content: bytes, key: str) -> int | None:
    sought = key.encode()[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0")
    at = content.find(sought, _ENTRY_BYTES)
    while at >= 0 and at % _ENTRY_BYTES:
        at = content.find(sought, at + 1)
    return at if at >= 0 else None


# ---- folders of processes -----------------------------------------------------------------------------------------


def is_running(folder: Path) -> bool:
    """Return whether the process of a folder of this host still runs, and is not another one with its pid."""
    pid = pid_of(folder.name)
    ticks = None if pid is None else started_ticks(pid)
    if ticks is None:
        return False
    try:
        with open(folder / LINES, "rb") as lines:
            said = json.loads(lines.readline())
        return bool(said.get("start_ticks", ticks) == ticks)
    except own_failure(OSError, ValueError):  # it is about to say so
        return True


def closed_in(folder: Path) -> list[Closed]:
    """Return the segments of a folder that nobody writes to: those that a running process has cut behind their last
    record."""
    may_write = is_running(folder)
    found: list[Closed] = []
    try:
        with os.scandir(folder) as files:
            for file in files:
                if not file.name.endswith(".seg") or not file.name[:-4].isdecimal():
                    continue
                status = file.stat(follow_symlinks=False)
                if not (may_write and status.st_size in SIZES):
                    is_brief = stat.S_IMODE(status.st_mode) == _BRIEF_MODE
                    found.append(Closed(status.st_mtime_ns, Path(file.path), status.st_size, is_brief))
    except own_failure(OSError):  # it is gone
        pass
    found.sort(key=lambda one: one.path)
    for place in range(1, len(found)):
        # A killed process's last one may bear a time before the one in front of it was cut.
        found[place] = found[place]._replace(closed_ns=max(found[place - 1].closed_ns, found[place].closed_ns))
    return found


def _is_brief(segment: Path) -> bool:
    """Return whether a segment has been made brief; False if it is gone."""
    try:
        return stat.S_IMODE(segment.stat().st_mode) == _BRIEF_MODE
    except own_failure(OSError):
        return False


def _folder_bytes(folder: Path) -> int:
    """Return what a folder takes of the disk; 0 if it is gone."""
    try:
        with os.scandir(folder) as files:
            return _BLOCK_BYTES + sum(on_disk(file.stat(follow_symlinks=False).st_size) for file in files)
    except own_failure(OSError):
        return 0


def _remove(segment: Path, size_bytes: int, by: str | None) -> None:
    """Remove a segment, and say so in the lines of its process.

    Args:
        segment: Its file.
        size_bytes: Size of the file.
        by: Key of the process that makes room for the host; None if a process keeps to its own bound.

    Raises:
        OSError: it cannot be removed, or there is no room for the line.
    """
    segment.unlink(missing_ok=True)
    said = {"kind": "lost", "segments": 1, "bytes": size_bytes, "segment": segment.name}
    said |= {} if by is None else {"by": by}
    line = f"{checksum.signed(to_json(said))}\n".encode()
    try:
        descriptor = os.open(segment.parent / LINES, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except own_failure(FileNotFoundError):  # somebody has deleted the folder
        return
    try:
        size_bytes = os.fstat(descriptor).st_size
        require_size(segment.parent / LINES, size_bytes + len(line) + 1)
        is_cut = size_bytes and os.pread(descriptor, 1, size_bytes - 1) != b"\n"  # its process died in its last line
        os.write(descriptor, b"\n" + line if is_cut else line)
    finally:
        os.close(descriptor)

"""Keeps what was computed from a Recording, so that nobody computes it twice from the same files.

What is kept names what it stands on: every file of the Recording, the version and the code of the reader. It is used
only if all of that is as it was. It lies in the folder `cache` of the Recording, or, where that cannot be written to
and for an archive, in the user's own cache. It can be deleted at any time, and is no part of the Recording: nothing
collects it, packs it, or counts its bytes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import NamedTuple

from rltrace.events import VERSION
from rltrace.host import regular_file
from rltrace.limits import NO_LIMITS
from rltrace.read import packed
from rltrace.read.recording import Process, Recording
from rltrace.record import checksum, manifest
from rltrace.record.process import OPENING

FOLDER = "cache"
"""Of a Recording."""

GROWING = "growing"
"""Of the cache: what is kept of each process that goes on."""

WORTH_BYTES = 32 << 20
"""Fewer bytes of segments are read again: that takes about a second."""

COMPRESSED = 10
"""About so many times as long as its columns is a segment."""

MOST_OF_USER = 32
MOST_BYTES_OF_USER = 1 << 30
"""How many files are kept in the user's own cache, and bytes of them; the oldest go first."""

_LIMITS = NO_LIMITS._replace(document_bytes=1 << 30)
_READ_WHOLE = (".json", ".jsonl", ".u64")
_SEGMENTS = (".seg", packed.SUFFIX)
_FORMAT = 2


class Look(NamedTuple):
    """What the files of a Recording were at one moment."""

    files: tuple[tuple[str, ...], ...]
    """Of each file its name and what tells its content: a segment that is closed by its size and the times of its last
    change, all others by their checksum."""
    segment_bytes: int

    def has(self, names: list[str]) -> bool:
        """Return whether all of these are files of the Recording."""
        return {file[0] for file in self.files}.issuperset(names)


class Kept(NamedTuple):
    """A file of a cache that is whole."""

    key: str
    """A digest of what it stands on."""
    names: list[str]
    """Files that it names one by one: for a Recording, segments whose content counts because nobody closed them."""
    content: bytes


class Cache:
    """What is kept of one Recording under one name."""

    def __init__(self, recording: Recording, name: str) -> None:
        """Look at the files of a Recording, of whose processes none has been read yet."""
        self._recording = recording
        self._made_by = (_FORMAT, VERSION, code(), manifest.host_name(), str(recording.path), *recording.limits)
        self._file = f"{name}-{zlib.crc32(str(recording.path).encode(errors='surrogateescape')):08x}"
        self._before = look(recording)
        self._unsealed: dict[str, int] = {}
        self.damaged: list[str] = []
        """Files of the cache that cannot be read, known after `load`."""

    @property
    def is_worth_it(self) -> bool:
        """Whether reading takes so long that keeping pays."""
        return self._before.segment_bytes >= WORTH_BYTES

    def load(self) -> bytes | None:
        """Return what was kept, if it stands on what is there now."""
        for folder in self._folders():
            file = folder / self._file
            try:
                content = regular_file.read(file, _LIMITS)
            except FileNotFoundError:
                continue
            except OSError as error:
                self.damaged.append(f"{file}: cannot be read: {error.strerror or error}")
                continue
            kept = _whole(content)
            if kept is None:
                self.damaged.append(f"{file}: damaged")
            elif self._before.has(kept.names) and kept.key == self._key(self._contents(kept.names)):
                return kept.content
        return None

    def begin(self) -> None:
        """Note what the segments that nobody closed have now, before they are read."""
        self._unsealed = self._contents(self._names_of_unsealed())

    def save(self, made: bytes) -> None:
        """Keep what was made since `begin`, unless a file changed meanwhile, or may still; if it cannot be written, it
        is not kept."""
        if not self._recording.is_settled or look(self._recording) != self._before:
            return
        if self._contents([*self._unsealed]) != self._unsealed:
            return
        head = _head(self._key(self._unsealed), [*self._unsealed], made)
        if any(_write(folder, self._file, head, made) for folder in self._folders()):
            shutil.rmtree(self._recording.folder / FOLDER / GROWING, ignore_errors=True)  # of no use any more

    def _folders(self) -> Iterator[Path]:
        """Yield where it can lie, the best place first."""
        recording = self._recording
        beside = recording.folder / FOLDER
        if recording.folder == recording.path and not beside.is_symlink():
            yield beside
        of_user = _folder_of_user()
        if of_user is not None:
            yield of_user / hashlib.sha256(os.fsencode(recording.path.absolute())).hexdigest()[:16]

    def _names_of_unsealed(self) -> list[str]:
        if self._recording.folder != self._recording.path:
            return []
        return [
            f"{manifest.PROCESSES}/{process.key}/{name}"
            for process in self._recording.processes
            for name in process.names_of_unsealed
        ]

    def _contents(self, names: list[str]) -> dict[str, int]:
        return {name: _crc32(self._recording.folder / name) for name in names}

    def _key(self, unsealed: dict[str, int]) -> str:
        return hashlib.sha256(repr((self._made_by, self._before.files, unsealed)).encode()).hexdigest()


class GrowingCache:
    """What is kept of one process while it goes on: it stands on segments that are closed.

    It lies beside the Recording and nowhere else: it is as long as what is kept in memory.
    """

    def __init__(self, recording: Recording, process: Process, names: Iterable[str]) -> None:
        """Look at the closed segments of a process, of which none has been read yet."""
        self._process = process
        self._closed = {name: (process.seal(name), self._told(name)) for name in names}
        self._made_by = (_FORMAT, VERSION, code(), manifest.host_name(), str(recording.path), *recording.limits)
        self._folder = recording.folder / FOLDER / GROWING
        self.damaged: list[str] = []
        """The file, if it cannot be read; known after `load`."""

    def load(self) -> bytes | None:
        """Return what was kept, if the segments that it stands on are as they were."""
        file = self._folder / self._process.key
        if file.parent.parent.is_symlink() or file.parent.is_symlink():
            return None
        try:
            content = regular_file.read(file, _LIMITS)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.damaged.append(f"{file}: cannot be read: {error.strerror or error}")
            return None
        kept = _whole(content)
        if kept is None:
            self.damaged.append(f"{file}: damaged")
            return None
        return kept.content if self._closed.keys() >= {*kept.names} and kept.key == self._key(kept.names) else None

    def save(self, names: Set[str], made: bytes) -> None:
        """Keep what was made of these segments; if it cannot be written, it is not kept."""
        if not self._closed.keys() >= names:
            return
        if len(made) <= _LIMITS.document_bytes // 2 and not self._folder.parent.is_symlink():
            _write(self._folder, self._process.key, _head(self._key(names), sorted(names), made), made)

    def _key(self, names: Iterable[str]) -> str:
        told = [(name, self._closed[name]) for name in sorted(names)]
        return hashlib.sha256(repr((self._made_by, told)).encode()).hexdigest()

    def _told(self, name: str) -> tuple[str, ...] | None:
        try:
            return _told_by((self._process.folder / name).stat(follow_symlinks=False))
        except OSError:  # it was dropped, or is a column now
            return None


def look(recording: Recording) -> Look:
    """Look at every file that readers of a Recording open; of an archive, at the archive."""
    if recording.folder != recording.path:
        status = recording.path.stat()
        return Look(((recording.path.name, *_told_by(status)),), _bytes_of_segments(recording.folder))
    found: list[tuple[str, ...]] = []
    size_bytes = 0
    for name, entry in _entries(recording.folder):
        status = entry.stat(follow_symlinks=False)
        if name.endswith(_READ_WHOLE) and stat.S_ISREG(status.st_mode):
            found.append((name, f"{_crc32(Path(entry.path)):08x}"))
        else:
            found.append((name, *_told_by(status)))
            size_bytes += _bytes_of_segments_in(name, status)
    return Look(tuple(found), size_bytes)


def _entries(folder: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files of a Recording in order, with their names in it."""
    yield from _files(folder, "")
    for above in (manifest.PROCESSES, OPENING):
        for entry in _listed(folder / above):
            yield f"{above}/{entry.name}/", entry
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), f"{above}/{entry.name}/")


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    for entry in _listed(folder):
        if entry.name.endswith((*_READ_WHOLE, *_SEGMENTS)):
            yield prefix + entry.name, entry


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _told_by(status: os.stat_result) -> tuple[str, ...]:
    if stat.S_ISDIR(status.st_mode):  # its times change with what lies in it, which is looked at itself
        return ("folder",)
    return tuple(map(str, (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)))


def _bytes_of_segments(folder: Path) -> int:
    return sum(_bytes_of_segments_in(name, entry.stat(follow_symlinks=False)) for name, entry in _entries(folder))


def _bytes_of_segments_in(name: str, status: os.stat_result) -> int:
    """Return how many bytes of segments are in a file, about if they are compressed."""
    if name.endswith(packed.SUFFIX):
        return COMPRESSED * status.st_size
    return status.st_size if name.endswith(_SEGMENTS) else 0


def _crc32(file: Path) -> int:
    """Return the checksum of a file; -1 of one that cannot be read."""
    try:
        return zlib.crc32(regular_file.read(file, NO_LIMITS))
    except OSError:
        return -1


@functools.cache
def code() -> int:
    """Return a checksum of the code that figures are computed by: a version is told only when it is released."""
    root = Path(__file__).parents[1]
    files = [*root.glob("*.py"), *(file for room in _ROOMS for file in (root / room).rglob("*.py"))]
    crc32 = 0
    for file in sorted(files):
        crc32 = zlib.crc32(file.read_bytes(), zlib.crc32(file.name.encode(), crc32))
    return crc32


_ROOMS = ("host", "record", "read", "analysis")


def _head(key: str, names: list[str], content: bytes) -> bytes:
    """Return the line in front of what is kept: what it stands on, and checksums."""
    digest = hashlib.sha256(content).hexdigest()
    head = {"kind": "rltrace cache", "key": key, "names": names, "bytes": len(content), "sha256": digest}
    return checksum.signed(json.dumps(head)).encode() + b"\n"


def _whole(file: bytes) -> Kept | None:
    """Return what is in a file of a cache; None if it is damaged or cut."""
    line, _, content = file.partition(b"\n")
    if not checksum.is_intact(line):
        return None
    head = json.loads(line)
    if len(content) != head["bytes"] or hashlib.sha256(content).hexdigest() != head["sha256"]:
        return None
    return Kept(head["key"], head["names"], content)


def _write(folder: Path, name: str, *parts: bytes) -> bool:
    """Write a file whole or not at all, and return whether it is there."""
    unfinished = folder / f".{name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(unfinished, "xb") as file:
                file.writelines(parts)
            unfinished.replace(folder / name)
        except OSError:
            unfinished.unlink(missing_ok=True)
            return False
    except OSError:
        return False
    of_user = _folder_of_user()
    if of_user is not None and folder.parent == of_user:
        _prune(of_user)
    return True


def _folder_of_user() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rltrace"
    except RuntimeError:  # a user without a home
        return None


def _prune(folder: Path) -> None:
    """Remove the oldest files of the user's cache."""
    told = [(file, file.stat()) for file in folder.glob("*/*")]
    kept_bytes = 0
    for place, (file, status) in enumerate(sorted(told, key=lambda one: one[1].st_mtime_ns, reverse=True)):
        kept_bytes += status.st_size
        if place >= MOST_OF_USER or (place and kept_bytes > MOST_BYTES_OF_USER):
            file.unlink(missing_ok=True)

"""Writes a Recording record by record, as a process would have, so that a test knows exactly what is in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

from rltrace.record import clock_readings

SECOND = 1_000_000_000
REALTIME_NS = 1_763_000_000 * SECOND


class RecordingFile:
    """A Recording's folder."""

    def __init__(self, path: Path):
        self.path = path
        (path / "processes").mkdir(parents=True)
        manifest = {
            "version": 1,
            "run_id": "r",
            "created_unix_ns": 0,
            "command": ["train"],
            "config": {},
            "versions": {},
        }
        self.manifest = manifest
        (path / "manifest.json").write_text(json.dumps(manifest))

    def belongs_to(self, boot: str) -> None:
        """Say whose clock is the run's."""
        self.manifest["clock_domain"] = {"boot_id": boot, "time_namespace": "t"}
        (self.path / "manifest.json").write_text(json.dumps(self.manifest))

    def exchanges(self, reference: str, boot: str, times: tuple[int, int, int]) -> None:
        """Add one exchange of two clocks: sent, read, received."""
        with (self.path / clock_readings.FILE).open("a") as file:
            file.write(clock_readings.line((reference, "t"), (boot, "t"), times))

    def process(self, pid: int = 100, *, host: str = "node", boot: str = "boot", **identity: Any) -> ProcessFile:
        return ProcessFile(self.path / "processes", pid, host, boot, identity)


class ProcessFile:
    """One process: its clock reads 1,000 s where REALTIME_NS is unless told otherwise."""

    def __init__(self, folder: Path, pid: int, host: str, boot: str, identity: dict[str, Any]):
        start_ns = identity.pop("start_ns", 1000 * SECOND)
        self.folder = folder / f"{host}-{pid}-{start_ns}"
        self.folder.mkdir()
        line = {
            "kind": "process",
            "host": host,
            "pid": pid,
            "start_ns": start_ns,
            "boot_id": boot,
            "time_namespace": "t",
        }
        line |= {"monotonic_ns": 1000 * SECOND, "realtime_ns": REALTIME_NS, "role": "worker", **identity}
        (self.folder / "process.jsonl").write_text(json.dumps(line) + "\n")
        self.pid = pid
        self.segments = 0

    def ends(self, at: int) -> None:
        """Say that the process ended in good order."""
        with (self.folder / "process.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "end", "end_ns": 1000 * SECOND + at}) + "\n")

    def is_killed(self, at: int, signal: int = 9) -> None:
        """Say that whoever watched it saw that it was gone."""
        with (self.folder / "process.jsonl").open("a") as file:
            line = {"kind": "exit", "killed_by": signal, "was_stopped": False, "end_ns": 1000 * SECOND + at}
            file.write(json.dumps(line) + "\n")

    def pauses(self, at: int, until: int) -> None:
        """Say that it recorded nothing for a while."""
        with (self.folder / "process.jsonl").open("a") as file:
            for kind, ts in (("pause", at), ("resume", until)):
                file.write(json.dumps({"kind": kind, "ts_ns": 1000 * SECOND + ts}) + "\n")

    def thread(self, number: int | None = None, name: str = "MainThread") -> ThreadFile:
        self.segments += 1
        return ThreadFile(self.folder / f"{self.segments:06d}.seg", self.pid if number is None else number, name)


class ThreadFile:
    """One segment; times are nanoseconds after the 1,000th second of the process's clock."""

    def __init__(self, path: Path, number: int, name: str):
        self.path = path
        self.size = 0
        path.write_bytes(bytes(4096))
        self._append(number, name)

    def begin(self, name: str, start: int, task: int = 0, **args: Any) -> None:
        self._append(name, task, 1000 * SECOND + start, args or None)

    def end(self, start: int, end: int, **late: Any) -> None:
        self._append(1000 * SECOND + start, 1000 * SECOND + end, late or None)

    def span(self, name: str, start: int, end: int, task: int = 0, **args: Any) -> None:
        self.begin(name, start, task, **args)
        self.end(start, end)

    def span_at(self, name: str, start: int, end: int, lane: int = 0, **args: Any) -> None:
        self._append(name, lane, 1000 * SECOND + start, 1000 * SECOND + end, args or None)

    def counter(self, name: str, ts: int, value: float) -> None:
        self._append(name, 1000 * SECOND + ts, value)

    def flow(self, key: str, ts: int, direction: str, task: int = 0) -> None:
        self._append(key, task, 1000 * SECOND + ts, direction)

    def tear(self, count: int) -> None:
        """Lose the last bytes, as `kill -9` in the middle of a write does."""
        with self.path.open("r+b") as file:
            file.seek(self.size - count)
            file.write(bytes(count))

    def _append(self, *record: Any) -> None:
        data = msgpack.packb([*record, True])
        with self.path.open("r+b") as file:
            file.seek(self.size)
            file.write(data + bytes(64))
        self.size += len(data)

"""Recordings from literals: processes with the events and the times that a test names."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from rltrace.events import AUTOMATIC, MEMORY_EDGE, Span
from rltrace.host import clock
from rltrace.read.recording import Recording
from rltrace.read.unmarked import ALWAYS, BEGINNINGS
from rltrace.record import manifest

SECOND = 1_000_000_000
THREAD = 7
NO_PID = 2**22 + 1
"""More than the kernel gives to any process."""


def span(name: str, start_s: float, end_s: float | None, **args: Any) -> list[list[Any]]:
    """Records of a span; open if it has no end."""
    start_ns = round(start_s * SECOND)
    if end_s is None:
        return [[name, 0, start_ns, args, True]]
    return [[name, 0, start_ns, round(end_s * SECOND), args, True]]


ONLY_HOOKS_MAKE = (*BEGINNINGS, *ALWAYS)
"""How the names of spans begin that are marked as automatic in a process, whatever its hooks say that they emit."""


def sample(name: str, at_s: float, value: float) -> list[list[Any]]:
    """The record of a sample."""
    return [[name, round(at_s * SECOND), value, True]]


def _marked(record: list[Any], made_by_hooks: set[str]) -> list[Any]:
    is_automatic = record[0] in made_by_hooks or str(record[0]).startswith(ONLY_HOOKS_MAKE)
    return [AUTOMATIC, *record] if len(record) in (5, 6) and is_automatic else record


class Written:
    """A Recording that is being written, from time 0."""

    def __init__(self, folder: Path, *, owner: str | None = None, **config: Any) -> None:
        self.folder = folder
        manifest.create(folder, owner=owner, command=["python", "train.py"], config=config)

    def process(
        self, key: str, *records: list[list[Any]], ended_s: float | None = None, hooks: tuple[Any, ...] = (), **who: Any
    ) -> Written:
        """Add a process; without `ended_s` it is one that died, unless its pid lives.

        Spans of the names that its hooks emit are marked as theirs.
        """
        folder = self.folder / manifest.PROCESSES / key
        folder.mkdir()
        identity = {
            "host": socket.gethostname(), "pid": NO_PID, "ppid": 1, "start_ns": 0, "monotonic_ns": 0, "realtime_ns": 0,
            **clock.domain(),
        }  # fmt: skip
        lines = [{"kind": "process", **identity, **who}, *({"kind": "hook", **hook} for hook in hooks)]
        if ended_s is not None:
            lines.append({"kind": "end", "end_ns": round(ended_s * SECOND)})
        (folder / "process.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        counts = [0, *(hook.get("fires", 0) for hook in hooks)]
        (folder / "counts.u64").write_bytes(b"".join(count.to_bytes(8, "little") for count in counts))
        encode = msgspec.msgpack.Encoder().encode
        names = {name for hook in hooks for name in hook["emits"]}
        marked = [_marked(record, names) for group in records for record in group]
        events = [[THREAD, "MainThread", True], *marked]
        (folder / "000001.seg").write_bytes(b"".join(map(encode, events)) + bytes(64))
        return self

    def read(self) -> Recording:
        """Open it."""
        return Recording.open(self.folder)


def hook(slot: int, target: str, state: str = "installed", *, fires: int = 0, **fields: Any) -> dict[str, Any]:
    """The line of a hook."""
    known = {"instrumentation": "reference", "reason": None, "emits": []}
    return {"slot": slot, "target": target, "state": state, "fires": fires, **known, **fields}


def since_of(folder: Path) -> list[int]:
    """With which of its samples the state of each began, by the stamps of a folder's only process."""
    (process,) = Recording.open(folder).processes
    samples = [event for event in process.events() if isinstance(event, Span) and event.name == MEMORY_EDGE]
    since_ns = [sample.start_ns - sample.args["unchanged_ns"] for sample in samples]
    return [sum(sample.end_ns < since for sample in samples if sample.end_ns is not None) for since in since_ns]


def two_workers(folder: Path) -> Written:
    """Two workers without a rank: three steps of 10 s, and from 1 s on four of 4 s; each acts in half of its own."""
    written = Written(folder)
    for name, begins, length, many in (("slow", 0, 10, 3), ("quick", 1, 4, 4)):
        starts = [begins + length * number for number in range(many)]
        events = [span("step", start, start + length, step=number) for number, start in enumerate(starts)]
        events += [span("act", start, start + length / 2, phase=True) for start in starts]
        events += [span("think", start, start + 1) for start in starts]
        written.process(name, *events, role=name, pid=len(name), start_ns=begins * SECOND, ended_s=31)
    return written


def two_ranks(folder: Path) -> Written:
    """Two steps of 10 s of a driver, two workers and their engines; rank 1 is slower to generate."""
    written = Written(folder, ranks=2)
    steps = [span("step", 10 + 10 * n, 20 + 10 * n, step=n) for n in range(2)]
    rewards = [sample("reward_mean", 19 + 10 * n, 0.25 * (n + 1)) for n in range(2)]
    driver = [span("reward", 15 + 10 * n, 16 + 10 * n) for n in range(2)]
    hooks = (
        hook(1, "m:Group.dispatch", fires=8),
        hook(2, "m:Group.unused"),
        hook(3, "torch:step", "skipped", reason="torch 1.0 is older than 2.11"),
        hook(4, "torch:offload", emits=["offload.h2d"]),
    )
    written.process("driver", *driver, *steps, *rewards, role="driver", pid=os.getpid(), ended_s=31, hooks=hooks)
    for rank in range(2):
        device = {"host": socket.gethostname(), "uuid": f"cpu:{rank}"}
        worker, engine = [span("actor.build", 1, 4)], [span("rollout.load", 4, 6)]
        for start in (10, 20):
            worker += [span("weight_sync", start, start + 2), span("actor.update", start + 6, start + 9)]
            for bucket in range(2):
                worker.append(span("weight_sync.gather", start + bucket, start + bucket + 0.5, bytes=10**9))
                worker.append(span("weight_sync.send", start + bucket, start + bucket + 1.5, bytes=10**9, tensors=3))
            worker.append(sample("actor.params_bytes", start, 100))
            worker.append(sample("actor.grads_bytes", start + 8, 50))
            worker.append(sample("actor.grads_bytes", start + 9, 0))
            engine.append(span("rollout.generate", start + 2, start + 4 + rank * 0.5))
            engine += [sample("rollout.kv_cache_bytes", start + 2, 400), sample("rollout.kv_cache_bytes", start + 5, 0)]
        written.process(f"worker-{rank}", *worker, role="worker", rank=rank, device=device, parent="driver", ended_s=30)
        written.process(f"engine-{rank}", *engine, role="engine", rank=rank, parent=f"worker-{rank}", ended_s=30)
    return written

"""Makes Recordings of any number of ranks and steps, of the records of a real one.

    python tests/scale/made_recording.py OUT --ranks 256 --steps 10

Every record of the shipped Recording of an 8B model on four GPUs (a first step and two more) is encoded once, with
placeholders. For each rank and step, numpy writes times, step numbers, keys of arrows and pids into a copy of the
bytes. Phases begin together on all ranks and take as long as the real ones, give or take two percent. Hosts of eight
GPUs have clocks of their own, with an offset and a drift, which are read every five seconds.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.events import STEP, Counter, Span
from rltrace.read.recording import Process, Recording
from rltrace.read.records import records
from rltrace.record.clock_readings import line as reading

SHIPPED = Path(__file__).parents[2] / "examples" / "recordings" / "qwen3_8b_4gpu.zip"
RANKS = 4
"""Of the shipped Recording."""
PHASES = (
    "rollout.wake_weights", "weight_sync", "rollout.wake_kv_cache", "rollout.generate", "rollout.sleep",
    "actor.old_log_prob", "ref.log_prob", "actor.update",
)  # fmt: skip
GENERATE, OLD_LOG_PROB, REF_LOG_PROB, UPDATE = 3, 5, 6, 7
"""Places of phases."""
STEP_NS = 9_860_000_000
"""About the length of the last shipped step, whose end nobody marks."""
BASE_NS = 5_000_000_000_000
"""When the first step begins, on the reference clock."""
UNIX_NS = 1_795_000_000_000_000_000
"""The real time at 0 of that clock."""
BEFORE_NS = 106_000_000_000
"""How long before the first step the driver begins."""
GPUS = 8
"""Of a host."""
FIRST_BYTES, NEXT_BYTES = 64 * 1024, 1024 * 1024
"""Sizes of a thread's segments."""
THIN = ("fsdp.", "gpu.fsdp.all_gather", "gpu.fsdp.reduce_scatter", "actor.state_dict", "engine.step")
"""How the names of spans begin that a thin Recording lacks."""
COLLECTIVES = ("gpu.fsdp.all_gather", "gpu.fsdp.reduce_scatter")
STEP_NUMBER = 0x7A7A
"""Stands for the number of a step."""

Numbers = NDArray[np.int64]
encode = msgspec.msgpack.Encoder().encode


# ---- the shipped Recording --------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One record of the template."""

    record: list[Any]
    times_ns: list[int]
    """In the order in which it has them."""


class Block:
    """Records of one thread in one step, encoded, and where the parts are that differ from rank to rank."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        parts, ends, places, times_ns, collectives = [], [], [], [], []
        size = 0
        for record, own_ns in pieces:
            encoded, look = encode(record), 0
            for time_ns in own_ns:
                place = encoded.index(b"\xcf" + time_ns.to_bytes(8, "big"), look)
                look = place + 9
                places.append(size + place + 1)
                times_ns.append(time_ns)
            if record[0] in COLLECTIVES:
                collectives.append(len(times_ns) - 2)
            parts.append(encoded)
            size += len(encoded)
            ends.append(size)
        content = b"".join(parts)
        self.content = np.frombuffer(content, np.uint8)
        self.ends = np.array(ends, np.int64)
        """Where each record ends."""
        self.places = np.array(places, np.int64)
        self.times_ns = np.array(times_ns, np.int64)
        self.collectives = np.array(collectives, np.int64)
        """Of the times: beginnings of collectives; their ends follow."""
        self.marks = {
            "step": _found(content, b"step" + encode(STEP_NUMBER)) + 5,
            "call": _found(content, b"ray:RRRRRRRR") + 4,
            "bucket": _found(content, b"BBBBBBBB"),
            "worker": _found(content, b"WWWW"),
            "engine": _found(content, b"EEEE"),
        }

    def filled(self, times_ns: Numbers, marks: dict[str, bytes]) -> NDArray[np.uint8]:
        """Return the bytes with these times and texts."""
        content = self.content.copy()
        if len(self.places):
            content[self.places[:, None] + np.arange(8)] = _as_bytes(times_ns)
        for name, text in marks.items():
            if len(self.marks[name]):
                content[self.marks[name][:, None] + np.arange(len(text))] = np.frombuffer(text, np.uint8)
        return content


def _found(content: bytes, what: bytes) -> Numbers:
    places, at = [], content.find(what)
    while at >= 0:
        places.append(at)
        at = content.find(what, at + 1)
    return np.array(places, np.int64)


def _as_bytes(numbers: Numbers) -> NDArray[np.uint8]:
    return numbers.astype(">u8").view(np.uint8).reshape(*numbers.shape, 8)


class Threads(NamedTuple):
    """What one process of the template recorded."""

    process: Process
    lines: list[str]
    counts: bytes
    blocks: dict[int, tuple[str, list[Block]]]
    """Name and blocks of each thread: the start-up, the first step, and two more."""


class Template:
    """The records of the shipped Recording."""

    def __init__(self, *, is_thin: bool) -> None:
        recording = Recording.open(SHIPPED)
        processes = {(process.role, process.rank): process for process in recording.processes}
        self.manifest = recording.manifest
        self.driver = processes["driver", None]
        starts_ns = [event.start_ns for event in self.driver.events() if isinstance(event, Span) and event.name == STEP]
        self.starts_ns = [*sorted(starts_ns), max(starts_ns) + STEP_NS]
        self.workers, self.engines, self.knots = [], [], []
        for rank in range(RANKS):
            worker, engine = processes["worker", rank], processes["engine", rank]
            pids = {str(worker.pid): "WWWW", str(engine.pid): "EEEE"}
            self.workers.append(self._threads(worker, pids, is_thin=is_thin))
            self.engines.append(self._threads(engine, pids, is_thin=is_thin))
            self.knots.append([self._knots(worker, step) for step in range(3)])

    def _knots(self, worker: Process, step: int) -> Numbers:
        """Return when a step began, its phases began and ended, and the next step began."""
        begin_ns, end_ns = self.starts_ns[step : step + 2]
        phases = [event for event in worker.events() if not isinstance(event, Counter) and event.is_phase]
        inside = sorted((p.start_ns, p.end_ns, p.name) for p in phases if begin_ns <= p.start_ns < end_ns)
        assert tuple(name for _, _, name in inside) == PHASES
        return np.array([begin_ns, *(at_ns for phase in inside for at_ns in phase[:2]), end_ns], np.int64)

    def _threads(self, process: Process, pids: dict[str, str], *, is_thin: bool) -> Threads:
        names: dict[int, str] = {}
        found: dict[int, list[list[Piece]]] = {}
        dropped: set[int] = set()
        calls = [0, 0, 0, 0]
        for content, *_ in process.segments():
            thread = 0
            for record in records(content, lambda _: True, lambda: None, may_grow=False):
                if len(record) == 3:
                    thread, names[record[0]] = record[0], record[1]
                    found.setdefault(thread, [[], [], [], []])
                    continue
                piece = _piece(record)
                begin_ns = piece.times_ns[0]
                step = sum(begin_ns >= at_ns for at_ns in self.starts_ns)
                if step > 3 or _is_dropped(record, dropped, is_thin=is_thin):
                    dropped.add(begin_ns)
                    continue
                if len(record) == 5 and record[3] in ("in", "out"):
                    before = found[thread][step]
                    if record[0].startswith("ray:") and not (before and before[-1].record[0] == "ray.call"):
                        continue
                    _name_key(piece.record, calls, step)
                _name_pids(piece.record, pids)
                found[thread][step].append(piece)
        lines = (process.folder / "process.jsonl").read_text().splitlines()
        blocks = {thread: (names[thread], [*map(Block, steps)]) for thread, steps in found.items()}
        return Threads(process, lines, (process.folder / "counts.u64").read_bytes(), blocks)


def _piece(record: list[Any]) -> Piece:
    if isinstance(record[0], int):
        return Piece([*record], record[:2])
    if len(record) == 6:
        return Piece([*record], record[2:4])
    return Piece([*record], [record[1]] if len(record) == 4 else [record[2]])


def _is_dropped(record: list[Any], dropped: set[int], *, is_thin: bool) -> bool:
    """Return whether a record, or the beginning of what it ends, is left out: calls that last as long as the run, and
    most spans of a thin Recording."""
    if isinstance(record[0], int):
        return record[0] in dropped
    is_span = len(record) == 6 or (len(record) == 5 and isinstance(record[3], dict))
    if record[0] == "ray.call" and is_span and record[3].get("method") == "Worker.watch":
        return True
    return is_thin and is_span and record[0].startswith(THIN)


def _name_key(record: list[Any], calls: list[int], step: int) -> None:
    if record[0].startswith("ray:"):
        record[0] = f"ray:RRRRRRRR{calls[step]:02x}{'0' * 38}"
        calls[step] += 1
    else:
        record[0] = "bucket:BBBBBBBB" + record[0][15:]


def _name_pids(record: list[Any], pids: dict[str, str]) -> None:
    """Put placeholders for pids, buckets and step numbers into the arguments of a record."""
    for place, args in enumerate(record):
        if not isinstance(args, dict):
            continue
        named = dict(args)
        if "step" in named:
            named["step"] = STEP_NUMBER
        if isinstance(named.get("bucket"), str):
            named["bucket"] = "BBBBBBBB" + named["bucket"][8:]
        for name in ("held_bytes", "cpu_ns"):
            if isinstance(named.get(name), dict):
                named[name] = {pids.get(pid, pid): value for pid, value in named[name].items()}
        record[place] = named


# ---- hosts, and when steps are ----------------------------------------------------------------------------------


class Host:
    """A host, whose clock differs from the reference by an offset and a drift; the first one keeps the reference."""

    def __init__(self, number: int, chance: random.Random) -> None:
        self.number = number
        self.name = f"node{number:04d}"
        self.domain = (f"{number:08x}-bb3f-4a95-95e2-ba92105304b8", "time:[4026531834]")
        self.offset_ns = chance.randrange(10**12, 9 * 10**14) if number else 0
        self.drift = chance.uniform(-20e-6, 20e-6) if number else 0.0

    def times(self, times_ns: Numbers) -> Numbers:
        """Return times of the reference by its own clock."""
        if not self.number:
            return times_ns
        return times_ns + self.offset_ns + np.rint((times_ns - BASE_NS) * self.drift).astype(np.int64)

    def time(self, time_ns: int) -> int:
        """Return one of them."""
        return int(self.times(np.array([time_ns]))[0])


class Wanted(NamedTuple):
    """What is to be made."""

    ranks: int
    steps: int
    slow_rank: int = -1
    """Its updates take a fifth longer; none if negative."""
    slow_step: int = -1
    """Its weight sync takes eight times as long."""
    is_coupled: bool = False
    """All ranks wait for the slow one in the collectives of their updates."""
    is_thin: bool = False
    seed: int = 0


class Plan:
    """When each rank is where in each step."""

    def __init__(self, template: Template, wanted: Wanted) -> None:
        chance = np.random.default_rng(wanted.seed)
        of_rank = np.arange(wanted.ranks) % RANKS
        self.starts_ns = [BASE_NS]
        self.knots: list[Numbers] = []
        """Of each step: by rank, as `Template.knots`."""
        for step in range(wanted.steps):
            shipped = np.stack([template.knots[rank][block_of(step)] for rank in range(RANKS)])[of_rank]
            lengths, gaps = shipped[:, 2:-1:2] - shipped[:, 1:-2:2], shipped[:, 1:-1:2] - shipped[:, :-2:2]
            longer = 1 + chance.uniform(0, 0.02, (wanted.ranks, len(PHASES)))
            if wanted.slow_rank >= 0:
                longer[slice(None) if wanted.is_coupled else wanted.slow_rank, UPDATE] *= 1.2
            if step == wanted.slow_step:
                longer[:, PHASES.index("weight_sync")] *= 8
            self._add(np.rint(lengths * longer).astype(np.int64), gaps, shipped[:, -1] - shipped[:, -2])
        self.end_ns = self.starts_ns[-1] + 2_000_000_000

    def _add(self, lengths: Numbers, gaps: Numbers, tails: Numbers) -> None:
        """Add a step: each phase begins when all ranks are through the one before."""
        now_ns = self.starts_ns[-1]
        knots = np.full((len(lengths), 2 + 2 * len(PHASES)), now_ns, np.int64)
        for phase in range(len(PHASES)):
            knots[:, 1 + 2 * phase] = now_ns + gaps[:, phase]
            knots[:, 2 + 2 * phase] = knots[:, 1 + 2 * phase] + lengths[:, phase]
            now_ns = int(knots[:, 2 + 2 * phase].max())
        knots[:, -1] = now_ns + int(tails.max())
        self.knots.append(knots)
        self.starts_ns.append(int(knots[0, -1]))


def block_of(step: int) -> int:
    """Return which shipped step a step is made of: the first one warms up."""
    return 0 if step == 0 else 1 + (step - 1) % 2


# ---- what is written --------------------------------------------------------------------------------------------


class Writer:
    """Writes the processes of a run."""

    def __init__(self, folder: Path, template: Template, wanted: Wanted) -> None:
        self.folder, self.template, self.wanted = folder, template, wanted
        self.plan = Plan(template, wanted)
        chance = random.Random(wanted.seed)
        self.hosts = [Host(number, chance) for number in range(-(-wanted.ranks // GPUS))]
        self.shift_ns = BASE_NS - template.starts_ns[0]
        self.begin_ns = BASE_NS - BEFORE_NS
        self.driver_key = f"{self.hosts[0].name}-2440-{self.begin_ns}"
        self.keys: dict[int, tuple[str, str]] = {}
        self.records = 0
        (folder / "processes").mkdir(parents=True)
        self._manifest(f"{chance.getrandbits(128):032x}")
        for rank in range(wanted.ranks):
            self._rank(rank)
        self._driver()
        for host in self.hosts:
            self._sampler(host)
        self._clocks(chance)

    def _manifest(self, run_id: str) -> None:
        boot_id, namespace = self.hosts[0].domain
        config = self.template.manifest["config"] | {"ranks": self.wanted.ranks, "steps": self.wanted.steps}
        own = {"run_id": run_id, "host": self.hosts[0].name, "config": config, "command": ["python", "train.py"]}
        clock = {"clock_domain": {"boot_id": boot_id, "time_namespace": namespace}}
        (self.folder / "manifest.json").write_text(json.dumps(self.template.manifest | own | clock))

    def _process(self, key: str, lines: str, counts: bytes, threads: Iterable[tuple[bytes, bytes, Numbers]]) -> None:
        """Write a process; each thread has the record of its name, the others, and where these end."""
        folder = self.folder / "processes" / key
        folder.mkdir()
        (folder / "process.jsonl").write_text(lines)
        (folder / "counts.u64").write_bytes(counts)
        number = 0
        for header, content, ends in threads:
            self.records += len(ends)
            begin, room = 0, FIRST_BYTES - len(header)
            while begin < len(content):
                end = int(ends[np.searchsorted(ends, begin + room, side="right") - 1])
                number += 1
                self.records += 1
                (folder / f"{number:06d}.seg").write_bytes(header + content[begin:end])
                begin, room = end, NEXT_BYTES - len(header)

    def _rank(self, rank: int) -> None:
        host, of = self.hosts[rank // GPUS], rank % RANKS
        later = 4000 if rank % GPUS >= RANKS else 0  # no two processes of a host have the same pid
        worker, engine = self.template.workers[of], self.template.engines[of]
        pids = [threads.process.pid + later for threads in (worker, engine)]
        starts_ns = [threads.process.start_ns + self.shift_ns for threads in (worker, engine)]
        keys = [f"{host.name}-{pid}-{host.time(at_ns)}" for pid, at_ns in zip(pids, starts_ns, strict=True)]
        self.keys[rank] = (keys[0], keys[1])
        texts = {"worker": f"{pids[0]:04d}".encode(), "engine": f"{pids[1]:04d}".encode()}
        parents, ends_ns = (self.driver_key, keys[0]), (self.plan.end_ns - 5_000_000, self.plan.end_ns - 10_000_000)
        for threads, key, pid, start_ns, parent, end_ns in zip(
            (worker, engine), keys, pids, starts_ns, parents, ends_ns, strict=True
        ):
            lines = _lines(threads.lines, host, pid, start_ns, end_ns, parent, rank)
            self._process(key, lines, threads.counts, self._threads(threads, rank, pid, later, texts))

    def _threads(
        self, threads: Threads, rank: int, pid: int, later: int, texts: dict[str, bytes]
    ) -> Iterator[tuple[bytes, bytes, Numbers]]:
        host = self.hosts[rank // GPUS]
        for thread, (name, blocks) in threads.blocks.items():
            parts, ends, size = [], [], 0
            for step in range(-1, self.wanted.steps):
                block = blocks[0] if step < 0 else blocks[1 + block_of(step)]
                if not len(block.ends):
                    continue
                marks = {"step": step.to_bytes(2, "big", signed=step < 0), **texts}
                marks["call"] = marks["bucket"] = f"{rank:04x}{step + 1:04x}".encode()
                parts.append(block.filled(host.times(self._times(block, rank, step)), marks))
                ends.append(block.ends + size)
                size += len(parts[-1])
            if parts:
                own = pid if thread == threads.process.pid else thread + later
                yield encode([own, name, True]), np.concatenate(parts).tobytes(), np.concatenate(ends)

    def _times(self, block: Block, rank: int, step: int) -> Numbers:
        """Return the times of a block in a step of a rank, on the reference clock."""
        if step < 0:
            return block.times_ns + self.shift_ns
        shipped, knots = self.template.knots[rank % RANKS][block_of(step)], self.plan.knots[step][rank]
        since = (block.times_ns - shipped[0]).astype(float)
        moved = np.interp(since, (shipped - shipped[0]).astype(float), (knots - knots[0]).astype(float))
        times_ns: Numbers = np.rint(moved).astype(np.int64) + knots[0]
        is_late = block.times_ns > shipped[-1]
        times_ns[is_late] = block.times_ns[is_late] - shipped[-1] + knots[-1]
        if self.wanted.is_coupled and rank == self.wanted.slow_rank and len(block.collectives):
            begins, ends = times_ns[block.collectives], times_ns[block.collectives + 1]
            waits_less = begins >= knots[1 + 2 * UPDATE]
            times_ns[block.collectives + 1] = np.where(waits_less, begins + (ends - begins) // 2, ends)
        return times_ns

    def _driver(self) -> None:
        encoded = [encode(record) for step in range(self.wanted.steps) for record in self._of_driver(step)]
        lines = (self.template.driver.folder / "process.jsonl").read_text().splitlines()
        said = _lines(lines, self.hosts[0], 2440, self.begin_ns, self.plan.end_ns, None, None)
        counts = (self.template.driver.folder / "counts.u64").read_bytes()
        threads = [(encode([2440, "MainThread", True]), b"".join(encoded), np.cumsum([*map(len, encoded)]))]
        self._process(self.driver_key, said, counts, threads)

    def _of_driver(self, step: int) -> Iterator[list[Any]]:
        """Yield the records of a step: four calls of all ranks, and what is computed between them."""
        knots, begin_ns, end_ns = (
            self.plan.knots[step],
            self.plan.starts_ns[step],
            self.plan.starts_ns[step + 1] - 50_000,
        )
        through_ns = [
            int(knots[:, 2 + 2 * phase].max()) for phase in (GENERATE + 1, OLD_LOG_PROB, REF_LOG_PROB, UPDATE)
        ]
        yield [STEP, 0, begin_ns, {"step": step}, True]
        at_ns = begin_ns + 100_000
        for call, (method, until_ns) in enumerate(
            zip(("generate", "old_log_prob", "ref_log_prob", "update"), through_ns, strict=True)
        ):
            behind_ns = yield from self._call(step, call, method, at_ns, until_ns + 1_000_000)
            for name, of, length_ns in (("reward", 0, 1_450_000), ("advantage", 2, 300_000)):
                if call == of:
                    yield [name, 0, behind_ns + 150_000, {"phase": True}, True]
                    yield [behind_ns + 150_000, behind_ns + 150_000 + length_ns, None, True]
            at_ns = until_ns + 3_000_000
        seconds, tokens = (end_ns - begin_ns) / 1e9, 2048 * self.wanted.ranks
        figures = {"reward_mean": 0.1 + 0.5 * step / self.wanted.steps, "tokens_per_second": tokens / seconds}
        for place, (name, value) in enumerate(figures.items()):
            yield [name, end_ns - 30_000 + 10_000 * place, value, True]
        yield [begin_ns, end_ns, {**figures, "tokens": tokens, "kl": 0.001, "grad_norm": 0.4}, True]

    def _call(self, step: int, call: int, method: str, at_ns: int, until_ns: int) -> Iterator[list[Any]]:
        """Yield the records of a method that is called on all ranks; return when it was over."""
        ranks = self.wanted.ranks
        yield ["ray.dispatch", 0, at_ns, {"method": method}, True]
        now_ns, each_ns = at_ns + 1000, max(300, min(200_000, 900_000 // ranks))
        for rank in range(ranks):
            yield ["ray.submit", 0, now_ns, {"method": method}, True]
            yield [f"ray:{rank:04x}{step + 1:04x}{call:02x}{'0' * 38}", 0, now_ns + each_ns // 3, "out", True]
            yield [now_ns, now_ns + each_ns // 2, None, True]
            now_ns += each_ns
        yield [at_ns, now_ns + 1000, None, True]
        waiting_ns = now_ns + 2000
        yield ["ray.execute", 0, waiting_ns, {"calls": ranks}, True]
        now_ns, each_ns = waiting_ns + 1000, max(700, (until_ns - waiting_ns - 201_000) // ranks)
        for rank in range(ranks):
            if now_ns + 700 > until_ns - 1000:
                break
            got_ns = now_ns + each_ns // 2 + 50
            yield ["ray.wait", 0, now_ns, {"objects": 1, "of": ranks - rank}, True]
            yield [now_ns, got_ns - 50, None, True]
            yield ["ray.get", 0, got_ns, {"objects": 1}, True]
            yield ["ray.deserialize", 0, got_ns + 10, got_ns + 20, {"objects": 1}, True]
            yield [got_ns, got_ns + 40, None, True]
            now_ns += each_ns
        over_ns = max(until_ns, now_ns + 10)
        yield [waiting_ns, over_ns, None, True]
        yield ["ray.collect", 0, over_ns + 100, {}, True]
        yield [over_ns + 100, over_ns + 100_100, None, True]
        return over_ns + 100

    def _sampler(self, host: Host) -> None:
        """Write a host's sampler, which samples its processes and GPUs every second."""
        ranks = [rank for rank in range(self.wanted.ranks) if rank // GPUS == host.number]
        start_ns = self.begin_ns - 100_000_000
        key = f"{host.name}-2439-{host.time(start_ns)}"
        driver = [] if host.number else [self.driver_key]
        rows = _sampled([key, *driver, *(key for rank in ranks for key in self.keys[rank])])
        rows += [row for rank in ranks for row in _sampled_of_gpu(_uuid(rank), self.keys[rank])]
        block = Block(
            [Piece([name, (1 << 62) + n, value, True], [(1 << 62) + n]) for n, (name, value) in enumerate(rows)]
        )
        seconds = (self.plan.end_ns - start_ns) // 1_000_000_000
        begun_ns = start_ns + 1_000_000_000 * np.arange(1, seconds + 1)[:, None] + 20_000 * np.arange(len(rows))
        content = np.tile(block.content, (seconds, 1))
        content[:, block.places[:, None] + np.arange(8)] = _as_bytes(host.times(begun_ns))
        ends = (block.ends + len(block.content) * np.arange(seconds)[:, None]).ravel()
        gpus = [{"uuid": _uuid(rank), "name": "NVIDIA H100 80GB HBM3"} for rank in ranks]
        identity = {
            "kind": "process", "host": host.name, "pid": 2439, "ppid": 2358, "start_ns": host.time(start_ns),
            "boot_id": host.domain[0], "time_namespace": host.domain[1], "monotonic_ns": host.time(start_ns + 500_000),
            "realtime_ns": UNIX_NS + start_ns + 500_000, "role": "sampler", "parent": None,
            "machine": {"cpu": "a CPU", "cpus": 192, "gpus": gpus, "driver": "570.86"},
        }  # fmt: skip
        end = {"kind": "end", "end_ns": host.time(self.plan.end_ns + 100_000_000)}
        lines = f"{json.dumps(identity)}\n{json.dumps(end)}\n"
        self._process(key, lines, bytes(8192), [(encode([2439, "MainThread", True]), content.tobytes(), ends)])

    def _clocks(self, chance: random.Random) -> None:
        """Write readings of the other hosts' clocks."""
        reference = self.hosts[0].domain
        with (self.folder / "clocks.jsonl").open("w") as lines:
            for at_ns in range(self.begin_ns, self.plan.end_ns, 5_000_000_000):
                for host in self.hosts[1:]:
                    sent_ns = at_ns + host.number * 1_000_000
                    there_ns = sent_ns + chance.randrange(250_000, 900_000)
                    back_ns = there_ns + chance.randrange(250_000, 900_000)
                    exchange = (sent_ns, host.time(there_ns), back_ns)
                    lines.write(reading(reference, host.domain, exchange, host=host.name, exchanges=50))


def _uuid(rank: int) -> str:
    return f"GPU-{rank:08x}-8b12-fc28-a99c-e7d26ac55695"


def _lines(
    shipped: list[str], host: Host, pid: int, start_ns: int, end_ns: int, parent: str | None, rank: int | None
) -> str:
    """Return the lines of a process as those of another one; hooks are the same."""
    said = []
    who = {
        "host": host.name, "pid": pid, "start_ns": host.time(start_ns), "boot_id": host.domain[0],
        "time_namespace": host.domain[1], "monotonic_ns": host.time(start_ns + 500_000),
        "realtime_ns": UNIX_NS + start_ns + 500_000,
    }  # fmt: skip
    for text in shipped:
        line = json.loads(text)
        if line["kind"] == "unavailable":
            continue
        if line["kind"] == "process":
            line |= {name: value for name, value in who.items() if name in line}
            if line.get("parent") is not None:
                line["parent"] = parent
            if rank is not None and line.get("device"):
                line["device"] = {"host": host.name, "uuid": _uuid(rank)}
            if line.get("rank") is not None:
                line["rank"] = rank
        elif line["kind"] == "end":
            line["end_ns"] = host.time(end_ns)
        said.append(json.dumps(line))
    return "\n".join(said) + "\n"


def _sampled(keys: Iterable[str]) -> list[tuple[str, float]]:
    of_host = [("host.cpu_percent", 12.5), ("host.available_bytes", 539_068_416_000), ("sampler.cpu_seconds", 1.25)]
    values = (("process.cpu_percent", 99.5), ("process.resident_bytes", 7_437_746_176))
    return [*of_host, *((f"{name}/{key}", value) for key in keys for name, value in values)]


def _sampled_of_gpu(uuid: str, keys: Iterable[str]) -> list[tuple[str, float]]:
    values = {
        "used_bytes": 45_000_000_000, "reserved_bytes": 644_939_776, "free_bytes": 105_000_000_000,
        "utilisation_percent": 87, "memory_utilisation_percent": 40, "power_watts": 578.934,
        "other_processes_bytes": 0.0, "nvlink_sent_bytes_per_second": 1.1e9, "nvlink_received_bytes_per_second": 1.2e9,
        "pcie_sent_bytes_per_second": 1.3e8, "pcie_received_bytes_per_second": 1.4e8,
    }  # fmt: skip
    of_gpu = [(f"gpu.{name}/{uuid}", value) for name, value in values.items()]
    return [*of_gpu, *((f"gpu.process_bytes/{uuid}/{key}", 22_000_000_000) for key in keys)]


def make(folder: Path, wanted: Wanted) -> int:
    """Make a Recording, and return how many records it has."""
    return Writer(folder, Template(is_thin=wanted.is_thin), wanted).records


def main() -> None:
    """Make the Recording that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-step", type=int, default=-1)
    parser.add_argument("--coupled", action="store_true", dest="is_coupled")
    parser.add_argument("--thin", action="store_true", dest="is_thin")
    parser.add_argument("--seed", type=int, default=0)
    asked = vars(parser.parse_args())
    folder = asked.pop("out")
    print(f"{make(folder, Wanted(**asked)):,} records in {folder}")


if __name__ == "__main__":
    main()

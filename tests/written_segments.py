"""Segments by hypothesis: records of every kind, with any arguments, whole or damaged."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import recordings
from hypothesis import strategies as st

from rltrace.read.columns import ARGUMENTS, NUMBERS
from rltrace.read.recording import Process

TYPES = [
    json.dumps({"kind": "type", "number": -1, "name": "weight_sync.gather", "fields": ["bytes", "tensors"]}),
    json.dumps({"kind": "type", "number": -2, "name": "typed", "fields": ["x", "x", "error"], "automatic": True}),
    json.dumps({"kind": "pause", "ts_ns": 20}),
]
"""Lines of the process that wrote them."""

NAMES = (
    "a", "b", "step", "weight_sync.gather", "gpu.fsdp.all_gather", "rollout.request", "engine.step", "memory.edge",
    "cumem.map", "memory.out_of_memory", "ray.call", "actor.update", "a_bytes/x", "BAD", "DAB",
)  # fmt: skip
"""`BAD` and `DAB` become letters that are no UTF-8, and read alike."""

times = st.integers(0, 120)
tasks = st.sampled_from([0, 0, 0, 1, -1, 2**63 - 1])
plain = st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=4) | st.floats(width=32)
odd = st.sampled_from(
    [2**56, 2**56 + 1, -(2**60), 2**63, -(2**63), 1e300, float("nan"), b"bytes", [], {}, [1, {"a": [None]}]]
)
values = st.recursive(
    plain | odd,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
keys = st.sampled_from([*ARGUMENTS, *NUMBERS, "x", "tags", "BAD"])
args = st.none() | st.dictionaries(keys, values, max_size=4)
names = st.sampled_from(NAMES)
starts = st.sampled_from(range(1, 30))


def _record(*parts: Any) -> st.SearchStrategy[list[Any]]:
    whole = st.tuples(*(part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts))
    return whole.map(lambda made: [*made, True])


usual = st.one_of(
    _record(names, tasks, starts, args),
    _record(0, names, tasks, starts, args),
    _record(starts, times, args),
    _record(starts, times, args),
    _record(names, tasks, times, times, args),
    _record(0, names, tasks, times, times, args),
    _record(names, times, plain.filter(lambda value: isinstance(value, (int, float)))),
    _record(st.sampled_from(["k1", "k2", "BAD"]), st.just(0) | tasks, times, st.sampled_from(["in", "out"])),
    _record(st.sampled_from([7, 8]), st.sampled_from(["main", "other"])),
    _record(-1, values, values, tasks, starts, args),
    _record(-2, values, tasks, starts, args),
)
unusual = st.one_of(
    st.lists(values, max_size=6).map(lambda parts: [*parts, True]),
    _record(names, times, odd),
    _record(names, st.just(2**63), starts, args),
    _record(names, tasks, st.sampled_from([-1, 2**59 + 1, 2**63]), args),
    _record(-3, tasks, starts, args),
    _record(names, tasks, starts, st.dictionaries(st.integers(0, 3) | st.binary(max_size=2), plain, max_size=2)),
    _record(names, tasks, starts, st.just({"at": msgpack.Timestamp(5, 0)})),
    _record(-1, *[1] * 70, 0, 5, None),
)


def _encoded(records: list[list[Any]], zeros: int) -> bytes:
    content = b"".join(map(msgpack.packb, records))
    return content.replace(b"DAB", b"\xfd\xfc3").replace(b"BAD", b"\xff\xfe3") + bytes(zeros)


@st.composite
def _nested(draw: st.DrawFn) -> list[list[Any]]:
    """Records of spans of which most end as they were begun, as a program writes them."""
    records: list[list[Any]] = []
    begun: list[int] = []
    for now_ns in range(1, draw(st.integers(2, 40))):
        match draw(st.sampled_from(["begin", "begin", "end", "end", "any end", "other"])):
            case "begin":
                mark = draw(st.sampled_from([[], [0]]))
                records.append([*mark, draw(names), draw(tasks), now_ns, draw(args), True])
                begun.append(now_ns)
            case "end" if begun:
                records.append([begun.pop(), now_ns, draw(args), True])
            case "any end" if begun:
                at = draw(st.integers(0, len(begun) - 1))
                records.append([begun.pop(at), now_ns, draw(args), True])
            case _:
                records.append(draw(usual))
    return records


@st.composite
def segments(draw: st.DrawFn) -> list[bytes]:
    """Segments of one process, sound or with some records that make no sense; a thread may have several."""
    records = draw(_nested())
    if draw(st.integers(0, 4)) == 0:
        records.insert(draw(st.integers(0, len(records))), draw(unusual))
    cuts = sorted(draw(st.lists(st.integers(0, len(records)), max_size=2)))
    pieces = [records[first:behind] for first, behind in pairwise([0, *cuts, len(records)])]
    threads = [[draw(st.sampled_from([7, 7, 8])), "main", True] for _ in pieces]
    return [
        _encoded([thread, *piece], draw(st.sampled_from([0, 1, 50])))
        for thread, piece in zip(threads, pieces, strict=True)
    ]


@st.composite
def damaged(draw: st.DrawFn, contents: list[bytes]) -> list[bytes]:
    """The same with some bytes changed, cut off or inserted."""
    at = draw(st.integers(0, len(contents) - 1))
    content = bytearray(contents[at])
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, len(content)))
        content[first : first + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return [*contents[:at], bytes(content), *contents[at + 1 :]]


def process_of_segments(folder: Path, contents: list[bytes]) -> Process:
    """A process with these segments, which lived from 0 to 200 ns."""
    written = recordings.Written(folder).process("p", ended_s=200e-9)
    own = folder / "processes" / "p"
    with (own / "process.jsonl").open("a") as said:
        said.writelines(line + "\n" for line in TYPES)
    (own / "000001.seg").unlink()
    for number, content in enumerate(contents, start=1):
        (own / f"{number:06d}.seg").write_bytes(content)
    (process,) = written.read().processes
    return process

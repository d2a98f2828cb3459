"""A finished Recording of literal spans that is written again, record by record, as its processes wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import msgpack


def grow(folder: Path) -> Iterator[None]:
    """Begin anew, and write a record of each process at a time; at last, how the processes ended."""
    processes = sorted((folder / "processes").iterdir())
    lines = {process: (process / "process.jsonl").read_bytes() for process in processes}
    contents = {process: (process / "000001.seg").read_bytes().rstrip(b"\0") for process in processes}
    for process in processes:
        said = lines[process].splitlines(keepends=True)
        (process / "process.jsonl").write_bytes(b"".join(line for line in said if b'"end_ns"' not in line))
        (process / "000001.seg").write_bytes(bytes(64))
    for ends in zip_longest(*map(_ends_of_records, contents.values())):
        for (process, content), end in zip(contents.items(), ends, strict=True):
            (process / "000001.seg").write_bytes(content[:end] + bytes(64))
        yield
    for process in processes:
        (process / "process.jsonl").write_bytes(lines[process])
    yield


def _ends_of_records(content: bytes) -> list[int]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(content)
    return [unpacker.tell() for _ in unpacker]

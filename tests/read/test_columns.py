"""Columns: what the native decoder makes of segments is what the Python reader makes of them, whatever is in them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import sanitized
from hypothesis import HealthCheck, given, settings
from part_of_recording import first_rank_of
from same_columns import decoded_natively, same_columns
from shipped import SHIPPED
from written_segments import damaged, process_of_segments, segments

from rltrace.host.native_library import DECODER, NativeLibrary
from rltrace.read import columns, native
from rltrace.read.recording import Recording

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"segments are decoded {native.decoder()}")


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(segments())
def test_whatever_was_written(contents: list[bytes]) -> None:
    """Spans, samples, arrows, their arguments and what was lost are those of the Python reader.

    Of ten thousand processes in tests/hostile.
    """
    with tempfile.TemporaryDirectory() as folder:
        same_columns(process_of_segments(Path(folder) / "run", contents))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(segments().flatmap(damaged))
def test_damaged_segments(contents: list[bytes]) -> None:
    """So they are of segments that a disk or a stranger has damaged."""
    with tempfile.TemporaryDirectory() as folder:
        same_columns(process_of_segments(Path(folder) / "run", contents))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recordings(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So they are of every Recording that is shipped, which the native decoder reads without help.

    Of one rank of its trainer: the others have the same calls, and are read in tests/hostile.
    """
    for process in Recording.open(first_rank_of(path, tmp_path)).processes:
        same_columns(process)
        assert decoded_natively(process, monkeypatch) == process.records


def test_pieces_are_joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A span, its late arguments and its arrows may lie in different pieces of the columns."""
    begin = [[7, "main", True], ["a", 0, 1, {"bytes": 5, "x": "é"}, True], ["key", 0, 2, "out", True]]
    middle = [[7, "main", True], *[["b", 0, 3, 4, None, True] for _ in range(50)]]
    end = [[7, "main", True], [1, 9, {"error": "KeyError"}, True]]
    contents = [b"".join(map(msgpack.packb, records)) for records in (begin, middle, middle, end)]
    monkeypatch.setattr(columns, "ROWS", 10)
    process = process_of_segments(tmp_path / "run", contents)
    *_, last = pieces = columns.read(process)
    assert [len(rows) for rows in pieces] == [50, 50, 1]
    (span,) = last.spans(np.arange(1))
    assert (span.args, span.flows_out) == ({"bytes": 5, "x": "é", "error": "KeyError"}, ("key",))
    same_columns(process)


def test_without_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the native decoder the columns are the same, and its absence is said."""
    process = process_of_segments(tmp_path / "run", [msgpack.packb(["a", 0, 1, 2, {"bytes": 3, "module": "m"}, True])])
    (rows,) = columns.read(process)
    found = [*rows.spans(np.arange(1)), *(column[0] for column in rows.arguments.values())]
    monkeypatch.setattr(native, "library", lambda: None)
    (rows,) = columns.read(process)
    assert repr([*rows.spans(np.arange(1)), *(column[0] for column in rows.arguments.values())]) == repr(found)
    assert "in Python" in native.decoder()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: cc")
def test_no_wrong_access() -> None:
    """The decoder, built with AddressSanitizer, stays inside of its memory; `make test-sanitizer` tries a million."""
    program = Path(__file__).with_name("sanitized_decoder.py")
    assert "no wrong access" in sanitized.said_by(program, "--segments", "500")


def test_stale_library_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another source is left alone, because it may mean something else by its columns."""
    monkeypatch.setattr(NativeLibrary, "source_crc32", lambda _: 1)
    assert native.load(DECODER.path) is None


def test_ranges_are_those_of_the_gate() -> None:
    """What the decoder takes without a question passes the check of the Python reader, for every span."""
    for checks in (columns.gate.arguments_of(name) for name in (*columns.gate.ARGUMENTS, "gpu.x")):
        for key, check in checks.items():
            argument = columns.ARGUMENTS.get(key)
            if argument is not None and check in columns.gate.RANGES:
                assert (argument.least, argument.most) == columns.gate.RANGES[check], key
            if (rare := columns.NUMBERS.get(key)) is not None:
                ends: list[Any] = [rare.least, rare.most]
                if rare.kind == native.NUMBERS:
                    ends = [{"a": end} for end in ends]
                assert [check(end) for end in ends] == ends, key

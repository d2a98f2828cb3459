"""Ten thousand processes of any records: the native decoder gives what the Python reader gives.

Of two thousand more, what is kept for figures and what is exported is what events give. So it is of whole shipped
Recordings, of which the other tests read one rank.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from perfetto_by_events import PerfettoByEvents
from same_columns import decoded_natively, same_columns
from same_seen import same_seen
from same_trace import said
from shipped import SHIPPED
from test_perfetto_columns import by_python, export, packets
from written_segments import damaged, process_of_segments, segments

from rltrace.read import native
from rltrace.read.recording import Recording

ways = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def test_the_native_decoder_is_there() -> None:
    assert native.library() is not None, f"segments are decoded {native.decoder()}"


@settings(ways, max_examples=7_000)
@given(segments())
def test_whatever_was_written(contents: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        same_columns(process_of_segments(Path(folder) / "run", contents))


@settings(ways, max_examples=3_000)
@given(segments().flatmap(damaged))
def test_damaged_segments(contents: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        same_columns(process_of_segments(Path(folder) / "run", contents))


@settings(ways, max_examples=1_000)
@given(segments() | segments().flatmap(damaged))
def test_what_is_kept(contents: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        process_of_segments(Path(folder) / "run", contents)
        same_seen(Recording.open(Path(folder) / "run"))


@settings(ways, max_examples=1_000)
@given(segments())
def test_what_is_exported(contents: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "run"
        process_of_segments(path, contents)
        found = export(path)
        assert said(found) == said(export(path, PerfettoByEvents()))
        assert packets(found) == packets(by_python(path, patch))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_whole_shipped_recordings(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process in Recording.open(file).processes:
        same_columns(process)
        assert decoded_natively(process, monkeypatch) == process.records
    found = export(file)
    assert said(found) == said(export(file, PerfettoByEvents()))
    assert packets(found) == packets(by_python(file, monkeypatch))

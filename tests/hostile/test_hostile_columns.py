"""Ten thousand processes of any records: the native decoder gives what the Python reader gives."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from same_columns import same_columns
from written_segments import damaged, process_of_segments, segments

from rltrace.read import native

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

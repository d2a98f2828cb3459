"""What is kept of columns is what is kept of events, one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from recordings import two_ranks, two_workers
from same_seen import same_seen
from shipped import SHIPPED, opened
from written_segments import damaged, process_of_segments, segments

from rltrace.read import native
from rltrace.read.recording import Recording


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(segments() | segments().flatmap(damaged))
def test_whatever_was_written(contents: list[bytes]) -> None:
    """Every list, every column, and the order in each; of a thousand processes in tests/hostile."""
    with tempfile.TemporaryDirectory() as folder:
        process_of_segments(Path(folder) / "run", contents)
        same_seen(Recording.open(Path(folder) / "run"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recordings(path: Path) -> None:
    same_seen(opened(path))


def test_made_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the native decoder and without."""
    made = [two_ranks(tmp_path / "ranks").read(), two_workers(tmp_path / "workers").read()]
    for recording in made:
        same_seen(recording)
    monkeypatch.setattr(native, "library", lambda: None)
    for recording in made:
        same_seen(recording)

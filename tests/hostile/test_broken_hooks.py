"""Hooks of frameworks that fail in the code that every program shares, which the suite tries on a small service."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_programs_run_on import CASES, IN_FRAMEWORKS, check_broken, untraced

__all__ = ["untraced"]


@pytest.mark.parametrize(("program", "place", "instrumentation"), sorted({*IN_FRAMEWORKS} - {*CASES}))
def test_programs_run_on(tmp_path: Path, untraced, program: str, place: str, instrumentation: str) -> None:
    """They print, raise and exit as they do untraced."""
    check_broken(tmp_path, untraced(program), program, place, instrumentation)

"""The native hot ways of spans, in memory that is watched."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sanitized


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler: cc")
def test_no_wrong_access() -> None:
    """Built with AddressSanitizer they stay inside of a segment, and write what they should; `make test-sanitizer`
    tries a million spans."""
    program = Path(__file__).with_name("sanitized_records.py")
    assert "no wrong access" in sanitized.said_by(program, "--spans", "2000")

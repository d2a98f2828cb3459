"""What a start loads: what few processes need comes when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rltrace

FOR_FEW = {"asyncio", "email.message", "importlib.metadata", "numpy", "rltrace.record.torch.kernels", "statistics"}


OF_EXEC = "rltrace.run.supervisor, rltrace.analysis.untraced"


@pytest.mark.parametrize("imported", ["rltrace", "rltrace.cli", OF_EXEC])
def test_a_start_loads_little(imported: str) -> None:
    """Each traced process and each command pays for what it imports."""
    code = f"import sys, {imported}; print(sorted({FOR_FEW!r} & {{*sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    """Names that are imported when they are asked for are what their modules call so."""
    assert {name: getattr(rltrace, name).__name__ for name in rltrace.__all__ if name != "instrument"} == {
        name: name for name in rltrace.__all__ if name != "instrument"
    }
    assert callable(rltrace.instrument)
    with pytest.raises(AttributeError, match="'rltrace' has no attribute 'nothing'"):
        rltrace.nothing  # noqa: B018

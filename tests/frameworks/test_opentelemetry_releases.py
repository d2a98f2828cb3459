"""OpenTelemetry's API and SDK, from the oldest supported release to the newest: our tests of it run with each."""

from __future__ import annotations

import pytest
from conftest import made
from environments import OPENTELEMETRY
from framework_runs import run_tests


@pytest.mark.parametrize("version", OPENTELEMETRY)
def test_our_tests_hold(version: str) -> None:
    """What we promise of a program's spans holds with the release."""
    done = run_tests(made(f"opentelemetry-{version}"), "tests/instrument/test_opentelemetry.py")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " skipped" not in done.stdout, done.stdout[-2000:]

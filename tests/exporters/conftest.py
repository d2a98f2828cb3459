"""What takes long to start, once for many tests: the two importers, and a browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from screenshot import chromium, shared_browser
from trace_processor import Importer


@pytest.fixture(scope="session", params=["v52", "v55"])
def importer(request: pytest.FixtureRequest) -> Iterator[Importer]:
    importer = Importer(request.param)
    yield importer
    importer.close()


@pytest.fixture(scope="module")
def one_browser() -> Iterator[None]:
    """One Chromium for all pages of a module, where there is one."""
    if chromium() is None:
        yield
        return
    with shared_browser():
        yield

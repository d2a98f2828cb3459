"""What takes long to start, once for many tests: the two importers, and a browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from screenshot import chromium, shared_browser
from trace_processor import Importer


@pytest.fixture(scope="session")
def importers() -> Iterator[Callable[[str], Importer]]:
    """Starts the importer of a version when it is first asked for; it serves all files of a process of the tests."""
    started: list[Importer] = []

    @cache
    def start(version: str) -> Importer:
        started.append(Importer(version))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture(scope="session", params=["v52", "v55"])
def importer(request: pytest.FixtureRequest, importers: Callable[[str], Importer]) -> Importer:
    return importers(request.param)


@pytest.fixture(scope="module")
def one_browser() -> Iterator[None]:
    """One Chromium for all pages of a module, where there is one."""
    if chromium() is None:
        yield
        return
    with shared_browser():
        yield

"""The two importers, one node process each for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trace_processor import Importer


@pytest.fixture(scope="session", params=["v52", "v55"])
def importer(request: pytest.FixtureRequest) -> Iterator[Importer]:
    importer = Importer(request.param)
    yield importer
    importer.close()

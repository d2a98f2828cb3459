"""A command starts no threads of numpy's, and leaves the environment as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os
from rltrace.cli.numpy_alone import behind_numpy

before = dict(os.environ)
print(behind_numpy(lambda: len(os.listdir("/proc/self/task")))(), dict(os.environ) == before)
"""


@pytest.mark.parametrize(("said", "threads"), [(None, 1), ("2", 2)])
def test_no_thread_but_those_that_somebody_asked_for(said: str | None, threads: int) -> None:
    """What the user says of numpy's threads holds; else there are none."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    if said is not None:
        environment["OPENBLAS_NUM_THREADS"] = said
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(min(threads, os.cpu_count() or 1)), "True"]

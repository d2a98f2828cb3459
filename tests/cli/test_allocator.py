"""A command keeps the memory that it gives back, where the C library can."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

ROUNDS = """
import resource, sys
from rltrace.cli.allocator import keep_memory

if sys.argv[1] == "kept":
    keep_memory()

def round():
    held = [bytearray(3 << 20) for _ in range(4)]

round()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    round()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", ROUNDS, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left as it is")
def test_pages_are_used_again() -> None:
    """Of 12 MiB that are taken and given back twenty times, 61,440 pages, next to none is a new one."""
    assert faults("kept") < 1000 < faults("as it is")

"""Runs a program again with one of our libraries built with AddressSanitizer and UndefinedBehaviorSanitizer.

Every allocation is one of the C library's then, with a guard around it: the first wrong access ends the process with a
report.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rltrace.host.native_library import NativeLibrary

FLAGS = ("-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Without optimization most of it is compiled in a fifth of the time, and no wrong access is optimized away."""
VARIABLE = "RLTRACE_SANITIZED_LIBRARY"


def said_by(program: Path, *words: str) -> str:
    """Run a program of the tests that runs itself again, and return what it says; anything wrong fails the test."""
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main(built: NativeLibrary, about: str | None, what: str, feed: Callable[[Path, int, int], Counter[str]]) -> int:
    """Build a library and run this program again with it, or feed the one that it runs with; return the exit code.

    Args:
        built: The library.
        about: What the program does.
        what: What the library is fed with, in the plural: the option that says how many.
        feed: Feeds the library at a path with so many, chosen by a seed; returns how often what came of it.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(f"--{what}", type=int, default=20_000, dest="many")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    if (library := os.environ.get(VARIABLE)) is None:
        return run_again(built)
    began_s = time.monotonic()
    said = feed(Path(library), wanted.many, wanted.seed)
    print(f"{dict(said)} in {time.monotonic() - began_s:.0f} s: no wrong access")
    return 0


def run_again(built: NativeLibrary) -> int:
    """Build a library, run this program with it, and return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / built.path.name
        if (refused := built.build(path, *FLAGS)) is not None:
            print(refused)
            return 1
        runtime = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment = {
            "LD_PRELOAD": runtime.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc",
            VARIABLE: str(path),
        }  # fmt: skip
        return subprocess.run([sys.executable, *sys.argv], env={**os.environ, **environment}, check=False).returncode

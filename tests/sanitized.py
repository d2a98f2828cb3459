"""Runs a program again with one of our libraries built with AddressSanitizer and UndefinedBehaviorSanitizer.

Every allocation is one of the C library's then, with a guard around it: the first wrong access ends the process with a
report.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rltrace.host.native_library import NativeLibrary

FLAGS = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
VARIABLE = "RLTRACE_SANITIZED_LIBRARY"


def library() -> Path | None:
    """Return the library with which this program runs; None if it runs with none yet."""
    found = os.environ.get(VARIABLE)
    return None if found is None else Path(found)


def said_by(program: Path, *words: str) -> str:
    """Run a program of the tests that runs itself again, and return what it says; anything wrong fails the test."""
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(program), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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

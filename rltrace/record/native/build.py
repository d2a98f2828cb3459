"""Compiles the native hot ways of spans into a library beside their source. It imports nothing of rltrace, because
wheels are built with it too."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "repeated.c"
LIBRARY = FOLDER / "repeated.abi3.so"
FLAGS = ("-std=c99", "-O2", "-shared", "-fPIC", "-fvisibility=hidden")


def source_crc32() -> int:
    """Return the checksum of the source, which the library has too: so a stale one is noticed."""
    return zlib.crc32(SOURCE.read_bytes())


def build(library: Path) -> str | None:
    """Compile the library.

    Args:
        library: Where it goes; it is replaced at once, so that a process that has it open keeps it.

    Returns:
        Why it cannot be built here; None if it is there now.
    """
    compiler, headers = shlex.split(os.environ.get("CC") or "cc"), sysconfig.get_paths()["include"]
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler: {compiler[0]}"
    if not (Path(headers) / "Python.h").exists():
        return f"Python's headers are missing: {headers}/Python.h"
    unfinished = library.with_name(f"{library.name}.{os.getpid()}")
    said = (f"-DSOURCE={source_crc32()}u", f"-I{headers}", "-o", str(unfinished))
    command = [*compiler, *FLAGS, *said, str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"{shlex.join(command)} failed: {done.stderr.strip()}"
    unfinished.replace(library)
    return None


if __name__ == "__main__":
    sys.exit(build(LIBRARY))

"""Compiles the native decoder, the encoder and arithmetic of intervals into a library beside their sources. It imports
nothing of rltrace, because wheels are built with it too."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCES = (FOLDER / "decoder.c", FOLDER / "packets.c", FOLDER / "intervals.c")
HEADERS = (FOLDER / "arrays.h", FOLDER / "msgpack.h", FOLDER / "texts.h")
LIBRARY = FOLDER / "decoder.so"
FLAGS = ("-std=c99", "-O3", "-shared", "-fPIC", "-fvisibility=hidden")
SANITIZER = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def source_crc32() -> int:
    """Return the checksum of the sources, which the library returns too: so a stale one is noticed."""
    return zlib.crc32(b"".join(file.read_bytes() for file in (*HEADERS, *SOURCES)))


def build(library: Path, *more_flags: str) -> str | None:
    """Compile the library.

    Args:
        library: Where the library goes; it is replaced at once, so that a process that has it open keeps it.
        more_flags: Flags of the compiler beside the usual ones.

    Returns:
        Why it cannot be built here; None if it is there now.
    """
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"there is no C compiler: {compiler[0]}"
    unfinished = library.with_name(f"{library.name}.{os.getpid()}")
    sources = map(str, SOURCES)
    command = [*compiler, *FLAGS, *more_flags, f"-DSOURCE={source_crc32()}u", "-o", str(unfinished), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"{shlex.join(command)} failed: {done.stderr.strip()}"
    unfinished.replace(library)
    return None


if __name__ == "__main__":
    refused = build(Path(sys.argv[1]), *SANITIZER) if len(sys.argv) > 1 else build(LIBRARY)
    sys.exit(refused)

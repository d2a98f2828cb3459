"""The native libraries: where each lies, what it is made of, and how a C compiler makes it. It imports nothing of
rltrace, because wheels are built with it too; `python rltrace/host/native_library.py` builds them in place."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1]
FLAGS = ("-std=c99", "-shared", "-fPIC", "-fvisibility=hidden")


class NativeLibrary(NamedTuple):
    """A library that lies beside its sources."""

    name: str
    """Below the package, as `read/native/decoder.so`."""
    headers: tuple[str, ...]
    sources: tuple[str, ...]
    """Names of files in the same folder."""
    is_module: bool
    """Whether it is a module of Python's, and so needs Python's own headers."""
    optimization: str
    """Of the compiler. What runs in cold caches is quick where it is short."""
    without: str
    """What it means that it cannot be built."""

    @property
    def path(self) -> Path:
        """Where it lies."""
        return PACKAGE / self.name

    @property
    def module_name(self) -> str:
        """What it is imported as, if it is a module."""
        return f"{PACKAGE.name}.{self.name.partition('.')[0].replace('/', '.')}"

    @property
    def files(self) -> list[Path]:
        """What it is made of."""
        return [self.path.with_name(name) for name in (*self.headers, *self.sources)]

    def source_crc32(self) -> int:
        """Return the checksum of the sources, which the library says too: so a stale one is noticed."""
        return zlib.crc32(b"".join(file.read_bytes() for file in self.files))

    def build(self, path: Path, *more_flags: str) -> str | None:
        """Compile the library.

        Args:
            path: Where it goes; it is replaced at once, so that a process that has it open keeps it.
            more_flags: Flags of the compiler beside the usual ones.

        Returns:
            Why it cannot be built here; None if it is there now.
        """
        import shlex  # these four cost a traced process milliseconds, and it compiles nothing
        import shutil
        import subprocess
        import sysconfig

        compiler, headers = shlex.split(os.environ.get("CC") or "cc"), sysconfig.get_paths()["include"]
        if shutil.which(compiler[0]) is None:
            return f"there is no C compiler: {compiler[0]}"
        if self.is_module and not Path(headers, "Python.h").exists():
            return f"Python's headers are missing: {headers}/Python.h"
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        sources = (str(self.path.with_name(name)) for name in self.sources)
        own = (f"-DSOURCE={self.source_crc32()}u", *((f"-I{headers}",) if self.is_module else ()))
        command = [*compiler, *FLAGS, self.optimization, *more_flags, *own, "-o", str(unfinished), *sources]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{shlex.join(command)} failed: {done.stderr.strip()}"
        unfinished.replace(path)
        return None


DECODER = NativeLibrary(
    "read/native/decoder.so",
    ("arrays.h", "msgpack.h", "public.h", "texts.h"),
    ("decoder.c", "packets.c", "intervals.c", "groups.c", "crc32.c"),
    is_module=False,
    optimization="-O3",
    without="segments will be decoded in Python, which takes longer",
)
RECORDS = NativeLibrary(
    "record/native/records.abi3.so",
    ("packing.h", "records.h"),
    ("records.c", "segment.c", "spans.c", "repeated.c"),
    is_module=True,
    optimization="-O2",
    without="spans will be recorded in Python, which takes longer",
)
DRIVER = NativeLibrary(
    "host/native/driver.abi3.so",
    (),
    ("driver.c",),
    is_module=True,
    optimization="-O2",
    without="GPUs will be asked through ctypes, which takes longer",
)
LIBRARIES = (DECODER, RECORDS, DRIVER)


def main() -> int:
    """Build each library in place, and say which cannot be built."""
    refused = {library.without: library.build(library.path) for library in LIBRARIES}
    for without, why in refused.items():
        if why is not None:
            print(f"{without}: {why}", file=sys.stderr)
    return int(any(refused.values()))


if __name__ == "__main__":
    sys.exit(main())

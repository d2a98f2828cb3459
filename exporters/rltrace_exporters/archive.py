"""Writes a Recording as one small file that every reader opens as it opens the folder.

Of each segment what was written, not the zeros that were allocated behind it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rltrace.archive import SUFFIX
from rltrace.recording import Recording

CONTENTS = ("*.json", "*.jsonl", "processes/*/*.jsonl", "processes/*/*.u64", "processes/*/*.seg")
"""Files of a Recording; what a process says of itself before its events, as readers of a run that goes on take them."""


class Archive:
    """The format of a Recording that is sent or kept."""

    suffix = SUFFIX

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Pack every file of a Recording, alive, dead or complete; the same ones give the same bytes."""
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            for file in _files(recording.folder):
                name = f"{recording.name}/{file.relative_to(recording.folder).as_posix()}"
                try:
                    content = file.read_bytes()
                except FileNotFoundError:  # dropped by `max_bytes` a moment ago
                    continue
                # A ZipInfo of its own: without the file's times and owner.
                packed.writestr(zipfile.ZipInfo(name), _written(file, content), zipfile.ZIP_DEFLATED)


def _files(folder: Path) -> Iterator[Path]:
    for pattern in CONTENTS:
        yield from sorted(folder.glob(pattern))


def _written(file: Path, content: bytes) -> bytes:
    """A segment up to its last record, which never ends in a zero; any other file as it is."""
    return content.rstrip(b"\0") if file.suffix == ".seg" else content

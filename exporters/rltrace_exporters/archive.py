"""Writes a Recording as one small file that every reader opens like the folder.

Of each segment it takes what was written, not the zeros that were allocated after it. Of a path it keeps only the last
name: where it lay matters only on the machine that recorded it, and says something about its user.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from rltrace.host import regular_file
from rltrace.read.archive import SUFFIX
from rltrace.read.recording import FILES, Recording
from rltrace.record import checksum
from rltrace.record.process import OPENING

CONTENTS = ("*.json", "*.jsonl", *(f"processes/*/*{ending}" for ending in FILES))
"""Files of a Recording; what a process says about itself comes before its events, as readers of a live run need it."""

_SEGMENT = r"[^/\s'\"=,:;|]+"
_PATH = re.compile(rf"(?<![\w/.~-])/(?:{_SEGMENT}/)+(?:{_SEGMENT})?")
"""An absolute path of more than one name, also inside of a text; no part of a URL, and no relative path."""


class Archive:
    """The format for a Recording that is sent or kept."""

    suffix = SUFFIX
    writes_parts = False

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Pack every file of a Recording, live, dead or complete; the same files give the same bytes."""
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
            root = recording.folder.resolve().name  # an archive's own, whatever it was renamed to: the same bytes
            for file in _files(recording.folder):
                name = f"{root}/{file.relative_to(recording.folder).as_posix()}"
                try:
                    content = regular_file.read(file, recording.limits)
                except (FileNotFoundError, regular_file.RefusedError):  # dropped by `max_bytes`, or no file of ours
                    continue
                # A ZipInfo of its own: without the file's times and owner.
                packed.writestr(zipfile.ZipInfo(name), _written(file, content), zipfile.ZIP_DEFLATED)
            for folder in sorted((recording.folder / OPENING).glob("*/")):  # that a process died in it says its name
                packed.writestr(zipfile.ZipInfo(f"{root}/{OPENING}/{folder.name}/"), b"")


def _files(folder: Path) -> Iterator[Path]:
    for pattern in CONTENTS:
        found = [file for file in folder.glob(pattern) if not _leads_out(file.parent, folder)]
        yield from sorted(found)


def _leads_out(parent: Path, folder: Path) -> bool:
    """Return whether a folder in a Recording is a link, or lies below one: its content is no part of the Recording."""
    return any(folder.joinpath(*parent.relative_to(folder).parts[:depth]).is_symlink() for depth in (1, 2))


def _written(file: Path, content: bytes) -> bytes:
    """Return what goes into the archive of a file.

    For a segment, everything up to its last record, which never ends in a zero; in texts, paths by their last names.
    """
    if file.suffix == ".seg":
        return content.rstrip(b"\0")
    if file.suffix == ".json":
        return _without_folders(content.decode(errors="surrogateescape"), indent=1)
    if file.suffix == ".jsonl":
        return b"\n".join(map(_without_folders, content.decode(errors="surrogateescape").split("\n")))
    return content


def _without_folders(text: str, indent: int | None = None) -> bytes:
    """Return a JSON text with the paths in its strings shortened; other text, such as a line that was cut, stays as it
    is.

    A signed text is signed again; a damaged one keeps its checksum, which does not match it.
    """
    content = text.encode(errors="surrogateescape")
    try:
        value = json.loads(text)
        is_intact = checksum.is_intact(content)
        if is_intact:
            del value["sum"]
        said = json.dumps(_shortened(value), indent=indent)
        return (checksum.signed(said) if is_intact else said).encode()
    except (ValueError, RecursionError):
        return content


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return _PATH.sub(lambda path: f".../{PurePosixPath(path[0]).name}", value)
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value

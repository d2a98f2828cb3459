"""Opens a Recording that is one file: a zip archive of its folder, as `rltrace export --to archive` writes it."""

from __future__ import annotations

import atexit
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path, PureWindowsPath

from rltrace import manifest
from rltrace.errors import RecordingError

SUFFIX = ".zip"

_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)
"""What zipfile raises where the file is cut, altered, encrypted, or compressed in a way that it does not know."""


def unpack(file: Path) -> Path:
    """Unpack an archive into a temporary folder, which goes when this process ends.

    Returns:
        The Recording's folder.

    Raises:
        RecordingError: it is no whole zip file, holds no Recording or a path that leads out of it, or cannot be
            unpacked here.
    """
    try:
        with zipfile.ZipFile(file) as packed:
            root = _root(packed, file)
            _refuse_ways_out(packed, file)
            folder = _temporary_folder()
            packed.extractall(folder)
    except _DAMAGED as error:
        raise RecordingError(
            f"{file}: no Recording: not a whole zip file: {error}; "
            "give the folder that `rltrace exec` or `run` named, or what `rltrace export --to archive` wrote of it"
        ) from None
    except OSError as error:
        raise RecordingError(
            f"{file}: cannot be unpacked into {tempfile.gettempdir()}: {error}; make room there, or set TMPDIR"
        ) from None
    return folder / root


def _root(packed: zipfile.ZipFile, file: Path) -> str:
    """The folder in the archive that is the Recording."""
    for name in packed.namelist():
        folder, _, last = name.rpartition("/")
        if last == manifest.FILE and "/" not in folder:
            return folder
    raise RecordingError(
        f"{file}: no Recording in it ({manifest.FILE} is missing); give what `rltrace export --to archive` wrote"
    )


def _refuse_ways_out(packed: zipfile.ZipFile, file: Path) -> None:
    for name in packed.namelist():
        path = PureWindowsPath(name)  # what leads out of a folder on any system does so here
        if path.anchor or ".." in path.parts:
            raise RecordingError(
                f"{file}: not unpacked: {name!r} leads out of it; get the archive from its maker again"
            )


def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="rltrace-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

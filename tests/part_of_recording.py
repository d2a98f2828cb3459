"""A part of a shipped Recording: ranks that do the same as the first one are left out, which saves most of its time."""

from __future__ import annotations

import shutil
from pathlib import Path

from shipped import opened


def first_rank_of(path: Path, folder: Path) -> Path:
    """Return a Recording like this one, with one trainer's rank; tests/hostile has the whole ones."""
    whole = opened(path)
    kept = folder / path.stem
    shutil.copytree(whole.folder, kept)
    for process in whole.processes:
        if process.role == "worker" and process.rank:
            shutil.rmtree(kept / process.folder.relative_to(whole.folder))
    return kept

"""A token that stays the same: in a file that nobody else can read, for a scraper that asks again and again."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from rltrace.errors import ViewError
from rltrace.read.perfetto_ui import new_token

LEAST_CHARACTERS = 22
"""Of a token: 128 bits take so many."""

_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{LEAST_CHARACTERS},512}}")


def token_in(path: Path) -> str:
    """Return the token in a file; make the file, for its owner alone, if there is none.

    Raises:
        ViewError: others may read it, it is no plain file, its content is no token, or it cannot be made.
    """
    try:
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise ViewError(f"{path}: cannot be made: {error.strerror}; name another file with --token-file") from None
    token = new_token()
    with os.fdopen(made, "w") as file:
        file.write(f"{token}\n")
    return token


def _read(path: Path) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode) or mode & 0o077:
                shown = stat.filemode(mode)
                raise ViewError(f"{path}: others may read it ({shown}); make it yours alone: chmod 600 {path}")
            token = file.read(1024).strip()
    except OSError as error:
        raise ViewError(f"{path}: cannot be read: {error.strerror}; name another file with --token-file") from None
    if not _TOKEN.fullmatch(token):
        raise ViewError(
            f"{path}: holds no token, which is {LEAST_CHARACTERS} or more of A-Z a-z 0-9 _ -; delete the file, and it "
            "is made anew"
        )
    return token

"""A process of ours beside a traced command. It ends when its stdin does: because it was told to, or its starter is
gone."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})
WITHOUT_WORKING_FOLDER = (
    "import sys; del sys.path[0]; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
"""What Python 3.10 runs a module by: it puts the working folder first, and has no PYTHONSAFEPATH."""


class Sidecar:
    """A process that runs as long as this object is kept. The caller reaps it with all other children."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] = NOTHING) -> None:
        """Start `python -m module arguments`.

        Args:
            module: Its module.
            *arguments: Its arguments, which everybody on this machine can read.
            environment: Variables for it alone.

        Raises:
            OSError: it cannot be started.
        """
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
        environment = {**inherited, **environment}
        # No module of the user's must stand in for one of Python's, or for one that we need: we have put ours first.
        environment["PYTHONSAFEPATH"] = "1"
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
        option = ["-m"] if sys.version_info >= (3, 11) else ["-c", WITHOUT_WORKING_FOLDER]
        command = [sys.executable, *option, module, *arguments]
        # A session of its own: Ctrl-C in the terminal is for the run. What is closed to us would be one of its files.
        out, errors = (subprocess.DEVNULL if stream is None else None for stream in (sys.stdout, sys.stderr))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=errors, env=environment, start_new_session=True
        )
        self._process.returncode = 0
        self.pid = self._process.pid

    def let_end(self) -> None:
        """Tell it that the run is over."""
        assert self._process.stdin is not None
        self._process.stdin.close()


def is_over(seconds: float) -> bool:
    """Run in a sidecar: wait this long, and return whether it was told to end."""
    readable, _, _ = select.select([0], [], [], seconds)
    return bool(readable) and not os.read(0, 1)

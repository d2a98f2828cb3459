"""A Python that has imported torch: programs run in forked children of it, which takes a second less than without.

What a program sees is what it would see if it had imported torch first. The start-up hook runs in the child. What is
about the start itself, or about importing torch under the hooks, is tested without this.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).parent

# ---- of the tests


class Warm:
    """The process that waits for programs."""

    def __init__(self, module: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
        environment |= {"OMP_NUM_THREADS": "1"}
        program = f"import sys; sys.path.append({str(HERE)!r}); import warm_python; warm_python.serve({module!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=HERE,
            bufsize=0,
        )

    def run(
        self, program: Path, environment: dict[str, str], cwd: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a child, with this environment."""
        out, err = cwd / "stdout", cwd / "stderr"
        job = {"program": str(program), "environment": environment, "cwd": str(cwd), "streams": [str(out), str(err)]}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        pid = int(self._process.stdout.readline())
        is_late = not select.select([self._process.stdout], [], [], timeout_s)[0]
        if is_late:
            os.kill(pid, signal.SIGKILL)
        code = int(self._process.stdout.readline())
        said = [path.read_text() for path in (out, err)]
        if is_late:
            raise subprocess.TimeoutExpired([str(program)], timeout_s, *said)
        return subprocess.CompletedProcess([str(program)], code, *said)


warm = functools.cache(Warm)
"""The one of a test process that has imported a module; it ends with it, as its standard input does."""

# ---- of the process that waits


def serve(module: str) -> None:
    """Run what is asked for in children, one after the other; in a child, run the program and return."""
    importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else the end of each child looks through all of it, and copies its pages
    answers = os.dup(1)
    for line in iter(sys.stdin.buffer.raw.readline, b""):  # type: ignore[attr-defined]
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _run(**json.loads(line))
            break
        os.write(answers, b"%d\n" % pid)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(program: str, environment: dict[str, str], cwd: str, streams: list[str]) -> None:
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    behind = [entry for entry in sys.path if entry not in ("", str(HERE), *before)]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate([os.devnull, *streams]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    ahead = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.argv, sys.path[:] = [program], [str(Path(program).parent), *ahead, *behind]
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401 - as Python does when it starts
    except ModuleNotFoundError:
        pass
    code: CodeType = compile(Path(program).read_text(), program, "exec")
    names: dict[str, Any] = vars(sys.modules["__main__"])
    names.clear()
    names |= {"__name__": "__main__", "__file__": program, "__builtins__": __builtins__, "__spec__": None}
    exec(code, names)

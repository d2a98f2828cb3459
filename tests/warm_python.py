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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).parent
ALSO = dict.fromkeys(("torch", "torch.distributed.fsdp"), ("torch._dynamo",))
"""What comes with a module sooner or later: the first optimizer imports dynamo, which takes as long as torch."""

# ---- of the tests


class Warm:
    """The process that waits for programs."""

    def __init__(self, module: str, variables: Mapping[str, str] = os.environ) -> None:
        environment = {name: value for name, value in variables.items() if not name.startswith("RLTRACE_")}
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
        self, program: Path, environment: dict[str, str], cwd: Path, timeout_s: float, words: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a child, with these words and this environment."""
        out, err = cwd / "stdout", cwd / "stderr"
        command, streams = [str(program), *words], [str(out), str(err)]
        job = {"command": command, "environment": environment, "cwd": str(cwd), "streams": streams}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        pid = int(self._process.stdout.readline())
        is_late = not select.select([self._process.stdout], [], [], timeout_s)[0]
        if is_late:
            os.kill(pid, signal.SIGKILL)
        code = int(self._process.stdout.readline())
        said = [path.read_text() for path in (out, err)]
        if is_late:
            raise subprocess.TimeoutExpired(command, timeout_s, *said)
        return subprocess.CompletedProcess(command, code, *said)


warm = functools.cache(Warm)
"""The one of a test process that has imported a module; it ends with it, as its standard input does."""

# ---- of the process that waits


def serve(module: str) -> None:
    """Run what is asked for in children, one after the other; in a child, run the program and return."""
    gc.disable()  # what is imported stays, and to look through it while it comes takes a quarter of the time
    for name in (module, *ALSO.get(module, ())):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the end of each child looks through all of it, and copies its pages
    gc.enable()
    answers = os.dup(1)
    for line in iter(sys.stdin.buffer.raw.readline, b""):  # type: ignore[attr-defined]
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _run(**json.loads(line))
            break
        os.write(answers, b"%d\n" % pid)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(command: list[str], environment: dict[str, str], cwd: str, streams: list[str]) -> None:
    program = command[0]
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    behind = [entry for entry in sys.path if entry not in ("", str(HERE), *before)]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate([os.devnull, *streams]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    ahead = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.argv, sys.path[:] = command, [*ahead, *behind]
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401 - as Python does when it starts, before the program's folder is on the path
    except ModuleNotFoundError:
        pass
    sys.path.insert(0, str(Path(program).parent))
    code: CodeType = compile(Path(program).read_text(), program, "exec")
    names: dict[str, Any] = vars(sys.modules["__main__"])
    names.clear()
    names |= {"__name__": "__main__", "__file__": program, "__builtins__": __builtins__, "__spec__": None}
    exec(code, names)

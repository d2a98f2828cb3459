"""A Python that has imported torch: programs run in forked children of it, which takes a second less than without.

What a program sees is what it would see if it had imported torch first. The start-up hook runs in the child. What is
about the start itself, or about importing torch under the hooks, is tested without this.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

HERE = Path(__file__).parent
ALSO = {
    "torch": ("torch._dynamo", "torch.distributed.fsdp"),
    "rltrace.__main__": ("rltrace.cli.tables", "matplotlib.backends.backend_svg", "pandas", "pyarrow.parquet"),
}
"""What comes with a module sooner or later: the first optimizer imports dynamo, which takes as long as torch, and which
imports FSDP. Each command imports what it needs."""

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
        (done,) = self.run_together(program, [environment], cwd, timeout_s, words)
        return done

    def run_together(
        self,
        program: Path,
        environments: Sequence[dict[str, str]],
        cwd: Path,
        timeout_s: float,
        words: Sequence[str] = (),
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run a program in as many children as there are environments, side by side: the ranks of a job."""
        command = [str(program), *words]
        streams = [[str(cwd / f"{name}.{number}") for name in ("out", "err")] for number in range(len(environments))]
        jobs = [
            {"command": command, "environment": environment, "cwd": str(cwd), "streams": of_child}
            for environment, of_child in zip(environments, streams, strict=True)
        ]
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(jobs).encode() + b"\n")
        pids = json.loads(self._process.stdout.readline())
        is_late = not select.select([self._process.stdout], [], [], timeout_s)[0]
        if is_late:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # not all of them need be late
                    os.kill(pid, signal.SIGKILL)
        codes = json.loads(self._process.stdout.readline())
        said = [[Path(path).read_text() for path in of_child] for of_child in streams]
        if is_late:
            raise subprocess.TimeoutExpired(command, timeout_s, *map("".join, zip(*said, strict=True)))
        return [subprocess.CompletedProcess(command, code, *texts) for code, texts in zip(codes, said, strict=True)]


warm = functools.cache(Warm)
"""The one of a test process that has imported a module; it ends with it, as its standard input does."""


def run_source(
    module: str, source: str, folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program's source in this folder, with these words and variables, in a Python that has imported a module.

    It is traced if it says so itself.
    """
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source))
    return warm(module).run(program, {**os.environ, **variables}, folder, 120, words)


# ---- of the process that waits


def serve(module: str) -> None:
    """Run what is asked for in children; in a child, run the program and return."""
    has_ended: list[bool] = []
    atexit.register(_leave_at_once, has_ended)  # the first one, so that it is called behind all others
    gc.disable()  # what is imported stays, and to look through it while it comes takes a quarter of the time
    for name in (module, *ALSO.get(module, ())):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the end of each child looks through all of it, and copies its pages
    gc.enable()
    answers = os.dup(1)
    for line in iter(sys.stdin.buffer.raw.readline, b""):  # type: ignore[attr-defined]
        pids = []
        for job in json.loads(line):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.close(answers)
                _run(**job)
                has_ended.append(True)
                return
        os.write(answers, json.dumps(pids).encode() + b"\n")
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        os.write(answers, json.dumps(codes).encode() + b"\n")
    has_ended.append(True)


def _leave_at_once(has_ended: list[bool]) -> None:
    """Leave a program that came to its end, and do not take down what was imported: that takes a quarter of a second.

    Its threads are over, and so is all that it wants done at its exit.
    """
    if has_ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _run(command: list[str], environment: dict[str, str], cwd: str, streams: list[str]) -> None:
    program = command[0]
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    behind = [entry for entry in sys.path if entry not in ("", str(HERE), *before)]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    for number, path in enumerate([os.devnull, *streams]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
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

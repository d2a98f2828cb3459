"""Programs that do what no program should, where everything is short: traced they end, read and write as untraced."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import rltrace

PACKAGE = Path(rltrace.__file__).parent

RECORDS = """
import os, shutil, signal, subprocess, sys, threading, time
try:
    import msgspec, rltrace
    with rltrace.span("first"):
        pass
except ImportError:
    pass
folder = os.environ.get("RLTRACE_DIR", "/there/is/none")
"""

PROGRAMS = {
    "returns": "print('out'); sys.exit(4)",
    "raises": "raise ValueError('theirs')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "is told to end": "os.kill(os.getpid(), signal.SIGTERM)",
    "leaves at once": "threading.Thread(target=os._exit, args=(7,)).start(); time.sleep(9)",
    "reads": "print(sys.stdin.read() if sys.stdin else None); sys.exit(4)",
    "becomes another": "os.execv('/bin/sh', ['sh', '-c', 'echo out; exit 9'])",
    "closes all files": "os.closerange(0, 256); os._exit(4)",
    "lowers its limit of files": """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
print(subprocess.call([sys.executable, "-c", "import msgspec, sys; sys.exit(3)"])); sys.exit(4)""",
    "lowers its limit of file size": """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
print(subprocess.call([sys.executable, "-c", "import msgspec, sys; sys.exit(3)"])); sys.exit(4)""",
    "deletes the recording": "time.sleep(0.2); shutil.rmtree(folder, ignore_errors=True); time.sleep(0.3); sys.exit(4)",
    "deletes it and is killed": "shutil.rmtree(folder, ignore_errors=True); time.sleep(0.3); os.kill(os.getpid(), 9)",
    "deletes it at the end": "shutil.rmtree(folder, ignore_errors=True); os._exit(4)",
    "puts a file in its place": """
time.sleep(0.2); shutil.rmtree(folder, ignore_errors=True)
if folder.endswith("run"): open(folder, "w").close()
time.sleep(0.3); sys.exit(4)""",
    "damages what it recorded": """
for at, _, names in os.walk(folder):
    for name in names:
        open(os.path.join(at, name), "wb").write(b"\\xff{[")
time.sleep(0.3); sys.exit(4)""",
    "makes folders of no process": """
if folder.endswith("run"):
    for name in ("x", "a-b-c", "a-1-2"): os.makedirs(f"{folder}/processes/{name}", exist_ok=True)
    open(folder + "/processes/file", "w").close()
time.sleep(0.3); sys.exit(4)""",
    "leaves a daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 3); time.sleep(1)
    os._exit(0)
os.wait(); sys.exit(0)""",
    "ignores its children": "signal.signal(17, signal.SIG_IGN); print(subprocess.call(['true'])); sys.exit(4)",
    "signals its group": "signal.signal(15, lambda *_: print('told')); os.killpg(0, 15); time.sleep(0.5); sys.exit(4)",
    "has many children": """
at_work, tell = os.pipe(); go_on, release = os.pipe(); children = []
for number in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        if "rltrace" in sys.modules: rltrace.counter("number", number)
        os.write(tell, b"x"); os.read(go_on, 1); os._exit(number % 2)
    children.append(child)
told = 0
while told < len(children): told += len(os.read(at_work, 300))
os.write(release, b"x" * told)
print(sum(os.waitpid(child, 0)[1] for child in children)); sys.exit(4)""",
}

SHORTAGES = {
    "none": "true",
    "256 files": "ulimit -n 256",
    "20 files": "ulimit -n 20",
    "small files": "ulimit -f 16",
    "little memory": "ulimit -v 4000000",
    "no stdin": "exec 0<&-",
    "no stdout": "exec 1>&-",
    "no stderr": "exec 2>&-",
    "no streams": "exec 0<&- 1>&- 2>&-",
    "full stdout": "exec 1>/dev/full",
    "full stderr": "exec 2>/dev/full",
    "children ignored": "trap '' CHLD",
    "signals ignored": "trap '' INT TERM HUP USR1",
}


def run(folder: Path, words: list[str], shortage: str) -> tuple[int, str, str]:
    """Exit code as a shell tells it, output, and what was said, by us apart."""
    line = f"{SHORTAGES[shortage]}; {shlex.join(words)}; echo $? >&9"
    with (folder / "code").open("w+") as code:
        done = subprocess.run(
            # Its own session: who signals its group signals no more than the two of us.
            ["setsid", "bash", "-c", f"exec 9>&{code.fileno()}; trap : TERM; {line}"],
            pass_fds=[code.fileno()], input="in", capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        code.seek(0)
        # Beside ours, what the shell says of a child that was killed.
        said = [
            line for line in done.stderr.splitlines() if not line.startswith(("rltrace: ", "bash: line ", "Terminated"))
        ]
        assert f"{PACKAGE}/" not in done.stderr, done.stderr  # no traceback of ours
        return int(code.read()), done.stdout, "\n".join(said)


@pytest.mark.parametrize("shortage", SHORTAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_ends_as_untraced(tmp_path: Path, program: str, shortage: str) -> None:
    """A program ends as it ends untraced."""
    file = tmp_path / "program.py"
    file.write_text(RECORDS + PROGRAMS[program])
    children = "300" if shortage == "256 files" else "30"
    words = [sys.executable, str(file), children]
    ours = [sys.executable, "-m", "rltrace", "exec", "--sample", "0.2", "--out", str(tmp_path / "run"), "--"]
    assert run(tmp_path, [*ours, *words], shortage) == run(tmp_path, words, shortage)

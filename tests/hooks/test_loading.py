"""Every way into the processes of a program that knows nothing of us, from the wheel as a user installs it."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import installed
import pytest

from rltrace.hooks.environment import STARTUP
from rltrace.read.recording import Recording

pytestmark = pytest.mark.run

PROGRAM = """
import subprocess, sys
import msgspec
child = "import msgspec, rltrace\\nwith rltrace.span('child'): pass"
if len(sys.argv) == 1:
    subprocess.run([sys.executable, __file__, "again"], check=True)
import rltrace
with rltrace.span("parent" if len(sys.argv) == 1 else "child"):
    print("ran", sys.stdin.read())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> installed.Environment:
    return installed.make(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text("import sys; sys.stdin.close(); sys.stdin = open('/dev/null')\n" + PROGRAM)
    return file


# ---- rltrace exec -----------------------------------------------------------------------------------------------


def test_command_finds_its_own_packages(environment: installed.Environment, tmp_path: Path) -> None:
    """The command finds the packages that it needs, whatever the user has on the path.

    A `click.py` and a `msgspec.py` of the user's own, on PYTHONPATH and in the working folder.
    """
    for name in ("click", "msgspec", "rich"):
        (tmp_path / f"{name}.py").write_text("mark = 'theirs'")
    command = ["exec", "--out", "run", "--", environment.python, "-c", "import msgspec; print(msgspec.mark)"]
    for words in ([environment.path / "bin" / "rltrace"], [environment.python, "-m", "rltrace"]):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        done = environment.run(*words, *command, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stdout) == (0, "theirs\n"), done.stderr
        assert sorted(process.role for process in Recording.open(tmp_path / "run").processes) == ["process", "sampler"]


def test_exec_passes_input_and_output(environment: installed.Environment, tmp_path: Path) -> None:
    """`exec` passes input, output and the exit code through."""
    command = [
        environment.path / "bin" / "rltrace",
        "exec",
        "--out",
        "run",
        "--",
        "sh",
        "-c",
        "cat; echo no >&2; exit 7",
    ]
    done = subprocess.run(
        command, input=b"\x00bytes\xff\n", env=environment.variables(), cwd=tmp_path, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (7, b"\x00bytes\xff\n")
    said, theirs, *_ = done.stderr.splitlines()
    assert said.startswith(b"rltrace: recording into run, at most ") and theirs == b"no"


def test_exec_passes_signals_to_the_command(environment: installed.Environment, tmp_path: Path) -> None:
    """One after the other; the exit code is what the command makes of the last one."""
    script = "trap 'echo TERM' TERM; trap 'echo INT' INT; trap 'echo HUP; exit 3' HUP; echo ready; "
    command = [environment.script, "exec", "--out", "run", "--", "sh", "-c", script + "while :; do sleep 0.05; done"]
    process = subprocess.Popen(command, env=environment.variables(), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name[3:]}\n"
    assert (process.stdout.read(), process.wait()) == ("", 3)


def test_exec_names_the_signal(environment: installed.Environment, tmp_path: Path) -> None:
    """`exec` reports that a signal killed the command."""
    assert environment.rltrace("exec", "--", "sh", "-c", "kill -9 $$", cwd=tmp_path).returncode == 128 + signal.SIGKILL


def test_exec_traces_children(environment: installed.Environment, tmp_path: Path, program: Path) -> None:
    """`exec` traces the command and its children."""
    done = environment.rltrace("exec", "--out", "run", "--", "python", program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "ran \nran \n")
    assert sorted(installed.span_names(tmp_path / "run")) == ["child", "parent"]
    assert "not traced" not in done.stderr


# ---- one environment variable -----------------------------------------------------------------------------------


def test_an_installed_wheel_needs_one_variable(
    environment: installed.Environment, tmp_path: Path, program: Path
) -> None:
    done = environment.run(environment.python, program, cwd=tmp_path, RLTRACE_DIR="run", RLTRACE_MAX_DISK="20MB")
    go_on = f"go on with `rltrace summary {tmp_path}/run`"
    said = f"rltrace: recording into {tmp_path}/run, at most 20 MB (--max-disk); {go_on}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran \nran \n", said), "once, not by the child"
    recording = Recording.open(tmp_path / "run")
    assert sorted(installed.span_names(tmp_path / "run")) == ["child", "parent"]
    assert recording.manifest["command"] == [environment.python, str(program)]
    assert {hook["instrumentation"] for process in recording.processes for hook in process.hooks} >= {"fsdp2", "ray"}


def test_self_traced_program_says_where(environment: installed.Environment, tmp_path: Path, program: Path) -> None:
    """A program that traces itself says where it records, unless it must be quiet."""
    code = f"import rltrace, runpy; rltrace.instrument('run'); runpy.run_path({str(program)!r})"
    loud = environment.run(environment.python, "-c", code, cwd=tmp_path, RLTRACE_MAX_DISK="none")
    go_on = f"go on with `rltrace summary {tmp_path}/run`"
    assert loud.stderr == f"rltrace: recording into {tmp_path}/run, with no bound on its size; {go_on}\n"
    assert sorted(installed.span_names(tmp_path / "run")) == ["child", "parent"]
    quiet = environment.run(environment.python, program, cwd=tmp_path, RLTRACE_DIR="quiet", RLTRACE_QUIET="1")
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert len(installed.span_names(tmp_path / "quiet")) == 2
    closed = environment.run(
        "sh", "-c", f"exec {environment.python} {program} 2>&-", cwd=tmp_path, RLTRACE_DIR="closed"
    )
    assert (closed.returncode, closed.stdout) == (0, "ran \nran \n"), "nobody to say it to"


def test_second_run_keeps_the_first(environment: installed.Environment, tmp_path: Path, program: Path) -> None:
    """A second run with the same variable leaves the first one alone."""
    for _ in range(2):
        done = environment.run(environment.python, program, cwd=tmp_path, RLTRACE_DIR="run")
    assert "holds another run already; recording into" in done.stderr
    assert len(installed.span_names(tmp_path / "run")) == len(installed.span_names(tmp_path / "run-2")) == 2


def test_wheel_does_nothing_unasked(environment: installed.Environment, tmp_path: Path) -> None:
    """Without the variable an installed wheel does nothing."""
    code = "import json.tool, msgspec, sys; print([m for m in sys.modules if 'rltrace' in m], len(sys.meta_path))"
    with_us = environment.run(environment.python, "-c", code, cwd=tmp_path)
    bare = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert (with_us.stdout.split("]")[0], with_us.stderr) == ("[", "")
    assert with_us.stdout.split()[-1] <= bare.stdout.split()[-1]
    assert list(tmp_path.iterdir()) == []


def test_recording_alone_gives_no_hooks(environment: installed.Environment, tmp_path: Path) -> None:
    """Children of a program that only records get no hooks."""
    code = (
        "import rltrace, subprocess, sys; rltrace.start('run')\n"
        "subprocess.run([sys.executable, '-c', 'import msgspec, rltrace.record.spans as r; print(r.current())'])"
    )
    done = environment.run(environment.python, "-c", code, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("None\n", "")


# ---- other sitecustomizes, and Pythons without any --------------------------------------------------------------


def test_isolated_python_needs_the_wheel(environment: installed.Environment, tmp_path: Path, program: Path) -> None:
    """An isolated Python is traced if the wheel is installed."""
    done = environment.rltrace("exec", "--out", "run", "--", "python", "-I", program, cwd=tmp_path)
    assert "not traced" not in done.stderr
    assert sorted(installed.span_names(tmp_path / "run")) == ["child", "parent"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> installed.Environment:
    return installed.make_bare(tmp_path_factory.mktemp("bare"))


LOOKED_AT = str(Path(__file__).parents[1] / "programs" / "until_looked_at.py")
UNTIL_LOOKED_AT = f"exec(open({LOOKED_AT!r}).read(), {{}})"
BRIEFLY = UNTIL_LOOKED_AT, "5"
LONG = f"import msgspec; {UNTIL_LOOKED_AT}", "45"
"""Until it is examined by its packages, which is not before the 20th look."""
IN_A_PROGRAM = f"import sys; sys.argv.append('5'); {UNTIL_LOOKED_AT}"

STARTED_WITH_S = "started with -S: Python runs no start-up hook"
UNREACHED = {
    "I": (["python", "-I", "-c", *BRIEFLY], "python -I", "started with -I: Python ignores PYTHONPATH"),
    "E": (["python", "-W", "ignore", "-Ec", *BRIEFLY], "python -W", "started with -E: Python ignores PYTHONPATH"),
    "environment": (
        ["env", "-i", "PYTHON", "-c", *BRIEFLY],
        "PYTHON -c",
        "its environment was replaced: RLTRACE_DIR is not in it",
    ),
    "grandchild": (["sh", "-c", f"sleep 0.3; python -S {LOOKED_AT} 5; true"], "python -S /", STARTED_WITH_S),
    "path": (
        ["env", "PYTHONPATH=", "python", "-c", *LONG],
        "python -c import msgspec",
        "no start-up hook ran in it: PYTHONPATH was replaced, or another sitecustomize comes before ours",
    ),
    "itself": (["true"], "python -S start_all.py", STARTED_WITH_S),
}
"""Commands of Pythons that no start-up hook reaches, how such a Python's own begins, and why none reaches it. The last
one is that which starts all others."""


@pytest.fixture(scope="module")
def unreached(bare: installed.Environment, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], str]:
    """What is said of all of them: the lines at the end of the run, and its summary."""
    folder = tmp_path_factory.mktemp("unreached")
    commands = [[bare.python if word == "PYTHON" else word for word in command] for command, *_ in UNREACHED.values()]
    (folder / "start_all.py").write_text(
        f"import subprocess\nstarted = [subprocess.Popen(one) for one in {commands!r}]\n"
        "raise SystemExit(max(one.wait() for one in started))\n"
    )
    done = bare.rltrace("exec", "--out", "run", "--", "python", "-S", "start_all.py", cwd=folder)
    assert done.returncode == 0
    return done.stderr.splitlines(), " ".join(bare.rltrace("summary", "--all", "run", cwd=folder).stdout.split())


@pytest.mark.parametrize("name", UNREACHED)
def test_unreached_python_is_named(bare: installed.Environment, unreached: tuple[list[str], str], name: str) -> None:
    """A Python that no start-up hook reaches is named."""
    _, begin, reason = UNREACHED[name]
    lines, shown = unreached
    begin = f"rltrace: not traced: {begin.replace('PYTHON', bare.python)}"
    (line,) = (line for line in lines if line.startswith(begin))
    assert f": {reason}" in line
    assert "not traced: " in shown and reason in shown


def test_standard_library_has_nothing_to_trace(environment: installed.Environment, tmp_path: Path) -> None:
    """A Python that uses only the standard library has nothing to trace.

    Neither are forks of a traced process such, nor is who imports a package late.
    """
    (tmp_path / "alone.py").write_text(f"import json; {IN_A_PROGRAM}\n")
    (tmp_path / "program.py").write_text(
        "import os, subprocess, sys, time\n"
        "late = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(0.6); import msgspec'])\n"
        "alone = [subprocess.Popen([sys.executable, 'alone.py']) for _ in range(2)]\n"
        "import msgspec\n"
        "if os.fork() == 0: time.sleep(0.6); os._exit(0)\n"
        "os.wait(); late.wait(); [child.wait() for child in alone]\n"
    )
    done = environment.rltrace("exec", "--out", "run", "--", "python", "program.py", cwd=tmp_path)
    assert done.returncode == 0
    _, first, last = done.stderr.splitlines()
    assert first.startswith("rltrace: 2 processes not recorded (nothing to trace: only standard-library imports): ")
    assert first.endswith(" alone.py") and last.startswith("rltrace: recorded in run; ")
    shown = environment.rltrace("summary", "run", cwd=tmp_path).stdout
    assert "2 processes not recorded (nothing to trace: only standard-library imports)" in " ".join(shown.split())
    assert "not traced" not in shown, "nothing was missed"


def test_missing_script_is_no_program(environment: installed.Environment, tmp_path: Path) -> None:
    """A Python whose script does not exist is not said to be a program with nothing to trace."""
    done = environment.rltrace("exec", "--out", "run", "--", "python", "nosuch.py", cwd=tmp_path)
    assert done.returncode == 2 and "nothing to trace" not in done.stderr
    assert "no process was recorded" in done.stderr


def test_forkserver_has_nothing_to_trace(environment: installed.Environment, tmp_path: Path) -> None:
    """A forkserver has nothing to trace, and its children have."""
    (tmp_path / "program.py").write_text(
        "import multiprocessing, tempfile, time\n"
        "tempfile.tempdir = '/tmp'  # short: the forkserver has a Unix socket there\n"
        "def work(late):\n"
        f"    {IN_A_PROGRAM}\n"
        "    if late: import msgspec, rltrace; rltrace.start(); rltrace.span('work').__enter__().__exit__(None)\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    children = [context.Process(target=work, args=(late,)) for late in (False, True)]\n"
        "    [child.start() for child in children]; [child.join() for child in children]\n"
    )
    done = environment.rltrace("exec", "--out", "run", "--", "python", "program.py", cwd=tmp_path)
    assert done.returncode == 0
    _, first, _ = done.stderr.splitlines()
    assert first.startswith("rltrace: 2 processes not recorded (nothing to trace: only standard-library imports): ")
    said = json.loads(environment.rltrace("summary", "run", "--json", cwd=tmp_path).stdout)["untraced"]
    program, child = (" ".join(one["command"]) for one in sorted(said, key=lambda one: "-c" in one["command"]))
    assert program.endswith(" program.py") and "multiprocessing.forkserver" in child
    names = [event.name for process in Recording.open(tmp_path / "run").processes for event in process.events()]
    assert names.count("work") == 1


def test_forks_are_not_missed(environment: installed.Environment, tmp_path: Path) -> None:
    """A fork is not reported as missed if it executes another program, nor if it makes no span.

    Until it executes the program, which a package may have brought as Ray's are, it has its parent's command line.
    Workers of a DataLoader have their parent's hooks, none of which fires.
    """
    brought = tmp_path / "site-packages" / "program.so"
    brought.parent.mkdir()
    shutil.copy(str(shutil.which("sleep")), brought)
    (tmp_path / "program.py").write_text(
        "import msgspec, os, time\n"
        f"if os.fork() == 0: time.sleep(0.5); os.execv({str(brought)!r}, ['program', '3'])\n"
        "if os.fork() == 0: time.sleep(2.5); os._exit(0)\n"
        "os.wait(); os.wait()\n"
    )
    done = environment.rltrace("exec", "--out", "run", "--", "python", "program.py", cwd=tmp_path)
    _, line = done.stderr.splitlines()
    assert line.startswith("rltrace: recorded in run; ")


def test_no_python_records_nothing(environment: installed.Environment, tmp_path: Path) -> None:
    """A command that is no Python is said to have recorded nothing."""
    done = environment.rltrace("exec", "--out", "run", "--", "sleep", "0.1", cwd=tmp_path)
    _, line = done.stderr.splitlines()  # and nothing to go on with
    assert line.startswith("rltrace: no process was recorded into run; `rltrace doctor -- COMMAND`")


def test_debians_sitecustomize_runs(environment: installed.Environment, tmp_path: Path) -> None:
    """Debian's sitecustomize still runs its hook."""
    debian = next(Path("/usr/lib").glob("python3.*/sitecustomize.py"), None)
    python = Path("/usr/bin") / (debian.parent.name if debian else "python3")
    if debian is None or not python.exists():
        pytest.skip("no Python of Debian's with its sitecustomize")
    (tmp_path / "apport_python_hook.py").write_text("def install(): print('apport is installed')\n")
    path, folder = f"{STARTUP}:{tmp_path}", str(tmp_path / "run")
    done = environment.run(python, "-c", "print('ran')", cwd=tmp_path, PYTHONPATH=path, RLTRACE_DIR=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "apport is installed\nran\n", "")
    if python.name != f"python3.{sys.version_info.minor}":
        pytest.skip("another version than that of the tests: their msgspec does not load in it")
    path += f":{environment.site}:{installed.OURS}"
    code = "import msgspec, rltrace\nwith rltrace.span('in Debian'): pass"
    done = environment.run(python, "-c", code, cwd=tmp_path, PYTHONPATH=path, RLTRACE_DIR=folder, RLTRACE_QUIET="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "apport is installed\n", "")
    assert installed.span_names(tmp_path / "run") == ["in Debian"]


@pytest.fixture(scope="module")
def with_opentelemetry(tmp_path_factory: pytest.TempPathFactory) -> installed.Environment:
    made = installed.make_core(tmp_path_factory.mktemp("opentelemetry"))
    made.pip_install("opentelemetry-distro")
    return made


OBSERVED = """
import sys
print("opentelemetry.instrumentation.auto_instrumentation" in sys.modules, "rltrace.record.writer" in sys.modules)
import rltrace
with rltrace.span("observed"):
    pass
"""


@pytest.mark.parametrize("around", ["inside", "outside"])
def test_opentelemetry_runs_too(with_opentelemetry: installed.Environment, tmp_path: Path, around: str) -> None:
    """opentelemetry-instrument and rltrace both run.

    Its sitecustomize comes first on the path and runs no other: the .pth of the wheel is read all the same.
    """
    program = tmp_path / "observed.py"
    program.write_text(OBSERVED)
    instrument = with_opentelemetry.path / "bin" / "opentelemetry-instrument"
    ours = [with_opentelemetry.path / "bin" / "rltrace", "exec", "--out", "run", "--"]
    command = [*ours, instrument] if around == "inside" else [instrument, *ours]
    done = with_opentelemetry.run(
        *command, with_opentelemetry.python, program, cwd=tmp_path,
        OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none", OTEL_LOGS_EXPORTER="none",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True True\n"
    assert installed.span_names(tmp_path / "run") == ["observed"]


# ---- one line of code -------------------------------------------------------------------------------------------

ONE_LINE = """
import rltrace; rltrace.instrument("run")
import subprocess, sys
import torch

@rltrace.traced
def reward():
    return 1

def train():
    weight = torch.nn.Parameter(torch.ones(1))
    with rltrace.span("mine"):
        weight.sum().backward()
        reward()

if __name__ == "__main__":
    train()
    subprocess.run([sys.executable, "-c", "import torch; import one_line; one_line.train()"], check=True)
    from rltrace.instrument.torch.optim import TorchOptim
    print(callable(rltrace.instrument), TorchOptim.name)
"""


def test_one_line_traces_children(environment: installed.Environment, tmp_path: Path) -> None:
    """One line traces a program and its children."""
    (tmp_path / "one_line.py").write_text(ONE_LINE)
    done = environment.run(environment.python, "one_line.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "True torch_optim\n"), done.stderr
    spans = ["actor.update", "autograd.backward", "mine", "reward"]  # the first is inferred
    assert sorted(installed.span_names(tmp_path / "run")) == sorted(2 * spans)


def test_one_line_without_a_wheel(bare: installed.Environment, tmp_path: Path, program: Path) -> None:
    """One line works without an installed wheel too: a program and its child have all hooks."""
    code = f"import rltrace, runpy; rltrace.instrument('run'); runpy.run_path({str(program)!r})"
    assert bare.run(bare.python, "-c", code, cwd=tmp_path).returncode == 0
    assert sorted(installed.span_names(tmp_path / "run")) == ["child", "parent"]
    for process in Recording.open(tmp_path / "run").processes:
        assert {hook["instrumentation"] for hook in process.hooks} >= {"fsdp2", "torch_optim", "ray"}


# ---- plug-ins of frameworks -------------------------------------------------------------------------------------

AS_A_FRAMEWORK = """
import sys
sys.path[:0] = {paths!r}
from importlib.metadata import entry_points
for entry in entry_points(group={group!r}):
    if entry.name == "rltrace":
        {load}
import rltrace
with rltrace.span("reached"):
    pass
"""


# What each does with its plug-ins, read in: vLLM 0.26 vllm/plugins/__init__.py, verl 0.9.1 verl/__init__.py:69, SGLang
# 0.5.23 sglang/srt/plugins/__init__.py.
@pytest.mark.parametrize(
    ("group", "load"),
    [
        ("vllm.general_plugins", "entry.load()()"),
        ("verl.plugins", "entry.load()"),
        ("sglang.srt.plugins", "entry.load()()"),
    ],
)
def test_plug_in_reaches_the_rest(environment: installed.Environment, tmp_path: Path, group: str, load: str) -> None:
    """A plug-in reaches a process that no start-up hook did."""
    code = AS_A_FRAMEWORK.format(paths=[str(environment.site), str(installed.OURS)], group=group, load=load)
    done = environment.run(environment.python, "-S", "-c", code, cwd=tmp_path, RLTRACE_DIR="run", RLTRACE_QUIET="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert installed.span_names(tmp_path / "run") == ["reached"]
    bare = environment.run(environment.python, "-S", "-c", code, cwd=tmp_path)
    assert (bare.returncode, bare.stdout, bare.stderr) == (0, "", "")


# ---- a Ray cluster that was there before ------------------------------------------------------------------------

CLUSTER = """
import sys, time
import ray
ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""

DRIVER = """
import os, sys
os.environ.update(word.split("=") for word in sys.argv[2:])
import ray
ray.init(sys.argv[1], log_to_driver=False)

@ray.remote(num_cpus=0)
class Worker:
    def variables(self, name):
        return os.environ.get(name)

print(ray.get(Worker.remote().variables.remote("THEIRS")))
"""

THEIR_HOOK = """
def add_variable(runtime_env):
    return {**(runtime_env or {}), "env_vars": {"THEIRS": "kept"}}
"""


@pytest.fixture(scope="module")
def foreign_cluster(
    environment: installed.Environment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """Address and token of a cluster that authenticates, started without us."""
    token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = subprocess.Popen(
        [environment.python, "-c", CLUSTER], env=environment.variables(**token, RAY_AUTH_MODE="token"),
        cwd=tmp_path_factory.mktemp("cluster"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert cluster.stdout is not None
    yield cluster.stdout.readline().strip(), token
    cluster.communicate()


@pytest.mark.parametrize("is_found", [False, True], ids=["named", "found"])
def test_foreign_clusters_workers(
    environment: installed.Environment, tmp_path: Path, foreign_cluster: tuple[str, dict[str, str]], is_found: bool
) -> None:
    """Workers of a cluster that others started are traced.

    That it authenticates is said by our environment, or by Ray in a driver that has found the cluster by itself.
    """
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "their_hook.py").write_text(THEIR_HOOK)
    address, token = foreign_cluster
    mode = "RAY_AUTH_MODE=token"
    done = environment.rltrace(
        "exec", "--out", "run", "--", "python", "driver.py", address, *([mode] if is_found else []), cwd=tmp_path,
        RAY_RUNTIME_ENV_HOOK="their_hook.add_variable", PYTHONPATH=str(tmp_path),
        **token, **({} if is_found else dict([mode.split("=")])),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
    assert "not traced" not in done.stderr, "nor is what brings the cluster's segments together"
    assert "cannot join" not in done.stderr, "as it does"
    names = installed.span_names(tmp_path / "run")
    assert names.count("ray.submit") == 1
    assert names.count("ray.call") == 2
    roles = sorted(process.role for process in Recording.open(tmp_path / "run").processes)
    assert roles[:1] == ["driver"]
    assert "worker" in roles

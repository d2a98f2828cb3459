"""The start-up hook: which processes it traces, what it leaves as it was, and that it never breaks a program."""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from traced_runs import ROOT, STARTUP, run_traced, traced_environment

from rltrace.events import COLLECTION, Span
from rltrace.hooks import environment
from rltrace.read.recording import Recording
from rltrace.record import manifest


def python(*arguments, tmp_path, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )


def site_folder(tmp_path, source):
    """A folder with somebody else's sitecustomize."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(source)
    return folder


def test_without_a_recording_nothing_happens(tmp_path):
    code = "import sys, json.tool; print(sorted(m for m in sys.modules if 'rltrace' in m), len(sys.meta_path))"
    bare = python("-c", code, tmp_path=tmp_path)
    ours = python("-c", code, tmp_path=tmp_path, PYTHONPATH=f"{STARTUP}:{ROOT}")
    assert ours.stdout.startswith("[] ")
    assert (ours.stdout, ours.stderr) == (bare.stdout, bare.stderr)


# Some of these try an import that exists on other Pythons only, half-way through their own.
STANDARD = """
import asyncio, copy, ctypes, dataclasses, json, multiprocessing, pickle, platform, pstats, subprocess, sys, xml.sax
try:
    import there_is_no_such_module
except ImportError:
    print("rltrace" in sys.modules)
"""


def test_standard_library_is_not_recorded(tmp_path):
    """A process that uses only the standard library is not recorded."""
    run = run_traced(tmp_path, STANDARD)
    assert (run.out, run.err) == ("False\n", "")
    assert run.recording.processes == []


def test_joins_before_first_import(tmp_path):
    """A process joins before its first import from outside of the standard library."""
    (tmp_path / "theirs_too.py").write_text("import sys; print('rltrace.record.writer' in sys.modules)")
    run = run_traced(tmp_path, "import theirs_too, sys; print('torch' in sys.modules, 'ray' in sys.modules)")
    assert (run.out, run.err) == ("True\nFalse False\n", "")
    assert len(run.recording.processes) == 1
    hooks = run.recording.processes[0].hooks
    assert {hook["target"] for hook in hooks if hook["state"] != "waiting"} == {"gc:callbacks"}


@pytest.fixture
def hooked(tmp_path):
    """A module `hooked` in the program's folder, and an installed instrumentation of it."""
    (tmp_path / "extra.py").write_text(
        "class Extra:\n"
        "    name, supports = 'extra', ()\n"
        "    def install(self, patches):\n"
        "        patches.span('hooked:work', 'extra.work')\n"
    )
    (tmp_path / "hooked.py").write_text("def work(): return 7\n")
    metadata = tmp_path / "extra-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rltrace.instrumentations]\nextra = extra:Extra\n")


@pytest.mark.usefixtures("hooked")
def test_first_import_may_be_hooked(tmp_path):
    """The first import may be a hooked module itself."""
    run = run_traced(tmp_path, "import hooked; print(hooked.work())")
    assert (run.out, run.err) == ("7\n", "")
    assert [span.name for span in run.spans()] == ["extra.work"]


def test_next_sitecustomize_runs(tmp_path):
    """The next sitecustomize runs as Python would have run it."""
    theirs = site_folder(tmp_path, "import sys; marker = 'theirs'; print(__name__, __file__, __spec__.name)")
    code = "import sitecustomize; print(sitecustomize.marker, sitecustomize.__file__)"
    bare = python("-c", code, tmp_path=tmp_path, PYTHONPATH=str(theirs))
    for path in (f"{STARTUP}:{ROOT}:{theirs}", f"{STARTUP}:{STARTUP}/:{ROOT}:{theirs}"):
        ours = python("-c", code, tmp_path=tmp_path, PYTHONPATH=path)
        assert (ours.returncode, ours.stdout, ours.stderr) == (0, bare.stdout, bare.stderr)


def test_two_copies_pass_on(tmp_path):
    """Two copies of our sitecustomize pass on to the next one, and not to each other.

    As where a command is traced by another installation than its own.
    """
    theirs = site_folder(tmp_path, "marker = 'theirs'")
    other = shutil.copytree(STARTUP, tmp_path / "other")
    path = f"{STARTUP}:{ROOT}:{other}:{STARTUP}:{theirs}"
    run = run_traced(tmp_path, "import msgspec, sitecustomize; print(sitecustomize.marker)", PYTHONPATH=path)
    assert (run.returncode, run.out, run.err) == (0, "theirs\n", "")
    assert len(run.recording.processes) == 1


@pytest.mark.parametrize("error", ["ValueError('theirs')", "ImportError('theirs')"])
def test_broken_sitecustomize_is_reported(tmp_path, error):
    """A broken sitecustomize is reported as Python does."""
    theirs = site_folder(tmp_path, f"raise {error}")
    bare = python("-c", "print('ran')", tmp_path=tmp_path, PYTHONPATH=str(theirs))
    ours = python("-c", "print('ran')", tmp_path=tmp_path, PYTHONPATH=f"{STARTUP}:{ROOT}:{theirs}")
    assert (ours.returncode, ours.stdout, ours.stderr) == (bare.returncode, bare.stdout, bare.stderr)


def test_traces_behind_broken_sitecustomize(tmp_path):
    """rltrace traces even behind a broken sitecustomize."""
    theirs = site_folder(tmp_path, "raise ValueError('theirs')")
    run = run_traced(tmp_path, "import msgspec", PYTHONPATH=f"{STARTUP}:{ROOT}:{theirs}")
    assert run.returncode == 0
    assert len(run.recording.processes) == 1


def test_own_failure_is_one_line(tmp_path):
    """A failure of ours is one line, and the program runs on."""
    folder = tmp_path / "gone" / "recording"
    (tmp_path / "gone").write_text("a file where a folder should be")
    environment = traced_environment(folder)
    done = python("-c", "import msgspec; print('ran')", tmp_path=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (0, "ran\n")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("rltrace: ")


def test_missing_package_runs_on(tmp_path):
    """If our package is not on the path, the program runs on."""
    (tmp_path / "theirs_too.py").write_text("print('ran')")
    done = python("-I", "-c", "", tmp_path=tmp_path)
    assert done.returncode == 0
    environment = {"RLTRACE_DIR": str(tmp_path), "PYTHONPATH": f"{STARTUP}:{tmp_path}"}
    done = python("-c", HIDE_US, tmp_path=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("rltrace: this process is not traced: ModuleNotFoundError: ")
    (untraced,) = map(json.loads, (tmp_path / "untraced.jsonl").read_text().splitlines())
    assert line.endswith(untraced["reason"])


HIDE_US = "import sys; sys.modules['rltrace'] = None; import theirs_too"


OTHERS = ("msgspec", "wrapt", "click", "rich", "msgpack", "numpy", "psutil", "typing_extensions")
# What a program imports is its own, before and after we are in it, and each of our parts that needs another works.
IMPORTS_ITS_OWN = """
import click, msgspec, wrapt
import rltrace
with rltrace.span("one"):
    pass
with rltrace.typed_span("two", bytes=int)(3):
    pass
import importlib, sys
print(*(importlib.import_module(name).mark for name in sys.argv[1:]), file=sys.stdout)
"""


@pytest.fixture
def others(tmp_path):
    """A user's folder, with modules that are named as packages are that we need."""
    folder = tmp_path / "others"
    folder.mkdir()
    for name in OTHERS:
        (folder / f"{name}.py").write_text(f"mark = 'their {name}'")
    (folder / "program.py").write_text(IMPORTS_ITS_OWN)
    return folder


THEIRS = " ".join(f"their {name}" for name in OTHERS) + "\n"


@pytest.mark.parametrize("place", ["path", "working folder"])
def test_users_modules_are_the_programs(tmp_path, others, place):
    """The user's modules are for the program and not for us.

    By the command, the sampler and the program's own process, which is recorded.
    """
    path = {"path": str(others), "working folder": ""}[place]
    command = [sys.executable, "-m", "rltrace", "exec", "--out", str(tmp_path / "run"), "--sample", "0.1", "--"]
    command += [sys.executable, "-c", "import runpy; runpy.run_path('program.py', run_name='__main__')", *OTHERS]
    environment = {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, cwd=others, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, THEIRS), done.stderr
    assert done.stderr.splitlines()[1].startswith("rltrace: recorded in ")
    recording = Recording.open(tmp_path / "run")
    assert sorted(process.role for process in recording.processes) == ["process", "sampler"]
    (program,) = [process for process in recording.processes if process.role == "process"]
    spans = [event.name for event in program.events() if isinstance(event, Span) and event.name != COLLECTION]
    assert spans == ["one", "two"]
    assert {hook["state"] for hook in program.hooks} == {"installed", "waiting"}


def test_self_recording_keeps_own_modules(tmp_path, others):
    """A program that records itself keeps its own modules."""
    program = IMPORTS_ITS_OWN.replace("import rltrace\n", "import rltrace\nrltrace.start('run')\n")
    (others / "program.py").write_text(program)
    done = python(str(others / "program.py"), *OTHERS, tmp_path=tmp_path, PYTHONPATH=str(ROOT), RLTRACE_QUIET="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, THEIRS, "")
    assert len(list(Recording.open(tmp_path / "run").processes[0].events())) == 2


def test_foreign_module_of_the_name(tmp_path, others):
    """If only another module has the name, the program is untraced and runs on.

    In an interpreter that has no packages.
    """
    folder = tmp_path / "run"
    manifest.create(folder, owner=None, command=[], config=None)
    program = (
        f"import sys; sys.path[1:1] = [{str(STARTUP)!r}]; import rltrace_startup; sys.path.insert(1, {str(ROOT)!r})\n"
    )
    program += "import msgspec; print(msgspec.mark)"
    environment = {"RLTRACE_DIR": str(folder), "PYTHONPATH": str(others)}
    done = python("-S", "-c", program, tmp_path=tmp_path, **environment)
    assert (done.returncode, done.stdout) == (0, "their msgspec\n"), done.stderr
    said = f"msgspec is {others}/msgspec.py here, and not the package that rltrace needs: pip install msgspec"
    assert done.stderr == f"rltrace: this process is not traced: ImportError: {said}\n"
    assert [line["reason"] for line in Recording.open(folder).untraced] == [f"ImportError: {said}"]


@pytest.mark.parametrize("path", ["", ":", "there:", ":there", "there::here"])
def test_python_path_is_as_it_would_be(tmp_path, path):
    """A command has the Python path that it would have.

    An empty entry is the working folder, to Python.
    """
    code = "import os, sys; print(sys.path[1:], os.environ.get('PYTHONPATH'))"
    bare = python("-c", code, tmp_path=tmp_path, PYTHONPATH=path)
    ours = python("-c", code, tmp_path=tmp_path, PYTHONPATH=environment.with_startup(path))
    assert ours.stdout.replace(f"'{STARTUP}', ", "", 1).replace(f"{STARTUP}", "").replace(" :", " ", 1) == bare.stdout


def test_bad_stderr_keeps_exit_code(tmp_path):
    """A stderr that cannot be written does not change the exit code.

    Python makes 120 of it where something is left in a buffer at the end.
    """
    variables = traced_environment("/proc/nowhere")
    command = [sys.executable, "-c", "import msgspec; print('ran')"]
    for stderr in ("2>/dev/full", "2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {stderr}', "sh", *command], env=variables, stdout=subprocess.PIPE, check=False
        )
        assert (done.returncode, done.stdout) == (0, b"ran\n")


def is_traced(*command):
    return runpy.run_path(str(STARTUP / "rltrace_startup.py"))["is_traced"](list(command))


@pytest.fixture
def site(tmp_path):
    """A folder of packages with Ray in it."""
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "_raylet.so").touch()
    return tmp_path


def test_rays_own_services_are_not_traced(site):
    assert is_traced("python", f"{site}/ray/_private/workers/default_worker.py", "--node-ip-address=127.0.0.1")
    assert not is_traced("python", f"{site}/ray/_private/workers/setup_worker.py", "--worker-setup-hook=")
    assert not is_traced("python", f"{site}/ray/dashboard/dashboard.py", "--host=127.0.0.1")
    assert not is_traced("python", "-u", f"{site}/ray/dashboard/agent.py")
    assert not is_traced("python", "-u", f"{site}/ray/_private/runtime_env/agent/main.py")
    assert not is_traced("python", "-u", f"{site}/ray/_private/log_monitor.py")
    assert not is_traced("python", "-u", f"{site}/ray/autoscaler/_private/monitor.py")
    assert not is_traced("/venv/bin/python", "/venv/bin/ray", "start", "--head")


def test_helpers_are_not_traced():
    """Helpers of multiprocessing are not traced, and what it runs is."""
    assert not is_traced("python", "-s", "-c", "from multiprocessing.resource_tracker import main;main(6)")
    assert is_traced("python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)")
    assert is_traced("python", "-c", "from multiprocessing.forkserver import main; main(4, 5, ['__main__'], **{})")


def test_names_and_arguments_do_not_matter(tmp_path):
    """A program is traced whatever its name and its arguments look like."""
    assert is_traced("/venv/bin/python", "-m", "rltrace_reference", "config.yaml")
    assert is_traced("python", "./bin/ray_train.py")
    assert is_traced("python", "train.py", "--out", "/home/u/bin/ray", "--ckpt", "/data/ray/dashboard/x")
    assert is_traced("python", "-u", f"{tmp_path}/ray/scripts/train.py")
    assert is_traced("python", "-c", "import multiprocessing.resource_tracker, train")
    assert is_traced("python")


PROGRAM = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model.weight.data.fill_(1); model.bias.data.fill_(0)
model(torch.ones(2)).sum().backward()
optimizer.step()
print(model.weight.tolist())
raise ValueError("theirs")
"""


def test_a_start_up_costs_little(tmp_path):
    """What we import beside our own two files: nothing but the frozen halves of importlib."""
    code = "import sys; print(sorted(sys.modules))"
    bare = python("-c", code, tmp_path=tmp_path)
    ours = python("-c", code, tmp_path=tmp_path, PYTHONPATH=f"{STARTUP}:{ROOT}", RLTRACE_DIR=str(tmp_path))
    added = set(eval(ours.stdout)) - set(eval(bare.stdout))
    assert added <= {"sitecustomize", "rltrace_startup"}


def test_ended_run_is_not_reopened(tmp_path):
    """The folder of a run that has ended is not recorded into again."""
    program = "import rltrace\nwith rltrace.span('once'): pass"
    untraced = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = [
        sys.executable,
        "-c",
        "from rltrace.cli import main; main()",
        "exec",
        "--out",
        "run",
        "--sample",
        "0",
        "--",
    ]
    subprocess.run([*first, sys.executable, "-c", program], cwd=tmp_path, check=True, env=untraced)
    again = python("-c", program, tmp_path=tmp_path, PYTHONPATH=f"{STARTUP}:{ROOT}", RLTRACE_DIR=str(tmp_path / "run"))
    assert again.returncode == 0
    warning, said = again.stderr.splitlines()
    assert warning == f"rltrace: {tmp_path}/run holds another run already; recording into {tmp_path}/run-2"
    assert said.startswith(f"rltrace: recording into {tmp_path}/run-2, at most ")
    assert [len(Recording.open(tmp_path / name).processes) for name in ("run", "run-2")] == [1, 1]


def test_every_failing_hook(tmp_path):
    """Every hook made to fail changes nothing."""
    broken = run_traced(tmp_path, BREAK_ALL_AND_RUN.format(program=PROGRAM), imported="torch")
    assert (broken.returncode, broken.out) == (1, "[[0.5, 0.5], [0.5, 0.5]]\n")
    assert broken.err.splitlines()[-1] == "ValueError: theirs"
    failed = [hook for hook in broken.hooks().values() if hook["state"] == "failed"]
    assert failed
    assert all("ZeroDivisionError: a bug of ours" in hook["reason"] for hook in failed)


BREAK_ALL_AND_RUN = """
from rltrace.record import lifecycle, spans
def broken(*args, **kwargs):
    raise ZeroDivisionError("a bug of ours")
spans.LiveSpan.__enter__ = spans.flow = lifecycle.identify = broken
{program}
"""


def test_a_spawned_child_is_traced_too(tmp_path):
    run = run_traced(
        tmp_path,
        """
        import subprocess, sys
        import rltrace
        with rltrace.span("parent"):
            subprocess.run([sys.executable, "-c", "import rltrace\\nwith rltrace.span('child'): pass"], check=True)
        """,
    )
    assert [span.name for span in run.spans()] == ["parent", "child"]
    parent, child = run.recording.processes
    assert child.identity["parent"] == parent.key


@pytest.mark.parametrize("preloaded", [[], ["hooked"]])
@pytest.mark.usefixtures("hooked")
def test_forkserver_children_are_traced(preloaded, tmp_path):
    """Children of a forkserver are traced too."""
    run = run_traced(
        tmp_path,
        f"""
        import multiprocessing

        def train(steps):
            import hooked  # not at the top: the parent needs none
            for _ in range(steps):
                hooked.work()

        if __name__ == "__main__":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload({preloaded})
            children = [context.Process(target=train, args=(steps,)) for steps in (1, 2)]
            for child in children:
                child.start()
            for child in children:
                child.join()
        """,
        TMPDIR="/tmp",  # short: the forkserver has a Unix socket there
    )
    steps = [
        sum(isinstance(event, Span) and event.name == "extra.work" for event in process.events())
        for process in run.recording.processes
    ]
    assert sorted(filter(None, steps)) == [1, 2]
    ends = [process.end_ns for process, count in zip(run.recording.processes, steps, strict=True) if count]
    assert None not in ends, "they leave by `os._exit`, and have joined before they forgot all finalizers"


def test_late_plugin_keeps_the_name(tmp_path):
    """A plug-in that is loaded late leaves a process the name that a hook gave it."""
    run = run_traced(
        tmp_path,
        """
        from rltrace import instrument
        from rltrace.record import lifecycle
        lifecycle.identify(role="server", rank=1)
        instrument.join_run()
        """,
    )
    assert [(process.role, process.rank) for process in run.recording.processes] == [("server", 1)]


INTERRUPTED = """
import signal, sys, time

class LateError(Exception):
    pass

def ring(number, frame):
    raise LateError

signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
try:
    import package
    while True:
        time.sleep(1)
except LateError:
    print("late")
import package
"""


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.05, 0.1, 0.2])
def test_timeout_while_joining(tmp_path: Path, seconds: float) -> None:
    """A timeout while a process joins reaches the program.

    A signal that comes in the middle of our first imports waits until they are over.
    """
    (tmp_path / "program.py").write_text(INTERRUPTED)
    (tmp_path / "package.py").write_text("")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "rltrace", "exec", "--out", str(run), "--sample", "0", "--", sys.executable]
    command += [str(tmp_path / "program.py"), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "late\n"), done.stderr[-2000:]
    assert "not traced" not in done.stderr

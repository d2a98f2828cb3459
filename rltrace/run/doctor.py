"""Checks whether a command would be traced. It asks the command's own interpreter, in the environment of `rltrace
exec`.

What can be tried is not concluded from a version: a Ray worker and child processes are really started, and count as
traced if they left a span in the Recording. The questions are in `probe.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from rltrace.analysis import summarize
from rltrace.analysis.hooks import HookFigures
from rltrace.events import Span
from rltrace.hooks.environment import traced_environment
from rltrace.read.command_line import PYTHON, python_options, words_of_program
from rltrace.read.recording import Recording
from rltrace.record import manifest, redaction
from rltrace.record.announcement import say
from rltrace.record.cluster import DIR_VARIABLE, OFF_VARIABLE, is_off
from rltrace.record.lifecycle import default_folder
from rltrace.run import probe, storage
from rltrace.run.launchers import Launch, look_through
from rltrace.run.untraced import why_untraced

ANSWER_SECONDS = 300.0
"""How long one question may take; importing vLLM on a busy machine takes longest."""

OF_EVERY_PYTHON = ("hooks", "children", "ray_worker", "nvml")
"""Questions whose answers do not depend on what the interpreter would run."""

State = Literal["ok", "missing", "unknown", "not here"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the diagnosis."""

    about: str
    state: State
    """`missing`: the Recording would lack something. `unknown`: it cannot be told before the run. `not here`: there is
    nothing to trace."""
    said: str


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What tracing a command would give."""

    works: bool
    """Whether nothing would be missing, as far as that is known."""
    is_known: bool
    """Whether it is known what the command starts."""
    command: list[str]
    interpreter: str
    findings: list[Finding]
    hooks: list[HookFigures]
    """The hooks, as in `summary`. They were installed in the processes that answered, so `fired` has no meaning
    here."""


class Answer(msgspec.Struct, frozen=True):
    """What the interpreter answered: a value, or why there is none."""

    value: dict[str, Any]
    error: str | None = None


def diagnose(command: Sequence[str], folder: Path | None) -> Diagnosis:
    """Try everything that a traced run of the command needs.

    Args:
        command: A command as for `rltrace exec`; empty for this interpreter.
        folder: Where the Recording would be made; by default, where `rltrace exec` would make it.

    Raises:
        RltraceError: there is no such program.
    """
    if command:
        from rltrace.run.supervisor import require_program

        require_program(command[0])
    if is_off():
        said = f"{OFF_VARIABLE} is set in this environment, so no process would be traced; unset it"
        return diagnosis(command, [sys.executable], [Finding(about="switch", state="missing", said=said)], [])
    in_folder = folder_finding(storage.look_at(folder or default_folder()))
    with tempfile.TemporaryDirectory(prefix="rltrace-doctor-") as made:
        recording = Path(made) / "run"
        manifest.create(recording, owner=None, command=list(command), config=None)
        launch = look_through(command or [sys.executable], traced_environment(recording, os.environ))
        environment = launch.environment
        if kept_out := launch_findings(launch):
            return diagnosis(command, launch.command, [*kept_out, in_folder], [])
        python, unknown = interpreter_of(launch)
        program = program_of(launch.command)
        first = ask(python, "interpreter", environment)
        of_python = interpreter_findings(python, first, launch, unknown)
        if first.error is not None:  # it would answer the others alike
            return diagnosis(command, python, [*of_python, in_folder], [])
        say("importing the frameworks and starting a process of each kind; this takes some seconds ...")
        with ThreadPoolExecutor(2) as pool:
            asked = {name: pool.submit(ask, python, name, environment) for name in OF_EVERY_PYTHON}
            runs = pool.submit(program_findings, program, python, environment)
        answers = {name: answer.result() for name, answer in asked.items()}
        found = Recording.open(recording)
        reached = {
            str(event.args["place"])
            for process in found.processes
            for event in process.events()
            if isinstance(event, Span) and event.name == probe.HERE and event.args
        }
        hooks = [hook for hook in summarize(found).hooks if hook.instrumentation in frameworks_in(answers["hooks"])]
    findings = [
        *of_python,
        *runs.result(),
        *framework_findings(answers["hooks"], hooks),
        child_finding(probe.SPAWNED, answers["children"], reached),
        child_finding(probe.SUBPROCESS, answers["children"], reached),
        ray_finding("ray" in first.value["versions"], answers["ray_worker"], reached),
        nvml_finding(answers["nvml"]),
        in_folder,
    ]
    return diagnosis(command, python, findings, hooks)


def diagnosis(
    command: Sequence[str], python: Sequence[str], findings: list[Finding], hooks: list[HookFigures]
) -> Diagnosis:
    """Combine all findings into one value."""
    return Diagnosis(
        works=all(finding.state != "missing" for finding in findings),
        is_known=all(finding.state != "unknown" for finding in findings),
        command=redaction.command(list(command)),
        interpreter=python[0],
        findings=findings,
        hooks=hooks,
    )


# ---- asking -----------------------------------------------------------------------------------------------------


def interpreter_of(launch: Launch) -> tuple[list[str], str | None]:
    """Return the Python that a command runs in, with the options that decide about start-up hooks.

    Returns:
        The path with the options, and None; or the first `python` on the path, and why the command's own is not known.
    """
    program = str(launch.program)
    if launch.unknown is None and PYTHON.fullmatch(Path(program).name):
        return [program, *(f"-{letter}" for letter in python_options(launch.command) if letter in "ISEs")], None
    if launch.unknown is None and (of_script := _shebang(Path(program))) is not None:
        return [of_script], None
    guess = shutil.which("python", path=launch.environment.get("PATH", os.defpath)) or sys.executable
    return [guess], launch.unknown or f"`{launch.command[0]}` is not a Python interpreter"


def program_of(command: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the module (`-m`) and the script that a command's own Python would run; each is None if it runs none."""
    if not command or not PYTHON.fullmatch(Path(command[0]).name):
        return None, None
    words = words_of_program(list(command))
    match words:
        case ["-m", name, *_]:
            return name, None
        case [script, *_] if not script.startswith("-"):
            return None, script
    return None, None


def _shebang(script: Path) -> str | None:
    with script.open("rb") as file:
        line = file.readline(512)
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-")]
    found = shutil.which(words[0]) if words else None
    return found if found is not None and PYTHON.fullmatch(Path(found).name) else None


def ask(python: Sequence[str], question: str, environment: Mapping[str, str], *words: str) -> Answer:
    """Put one question of `probe.QUESTIONS` to an interpreter."""
    command = [*python, "-m", "rltrace.run.probe", question, *words]
    try:
        done = subprocess.run(
            command, env=dict(environment), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=ANSWER_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer({}, f"no answer in {ANSWER_SECONDS:.0f} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output on standard error"])[-1]
        return Answer({}, f"exit code {done.returncode}: {last}")
    try:
        return Answer(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return Answer({}, "the answer cannot be read, because something else writes to standard output")


# ---- what the answers mean --------------------------------------------------------------------------------------


def launch_findings(launch: Launch) -> list[Finding]:
    """Return what keeps a command from being traced before its Python starts."""
    behind = _listed(launch.through)
    findings = []
    if launch.program is None:
        path = launch.environment.get("PATH", f"{os.defpath}, the default")
        said = f"{launch.command[0]}: no such program behind {behind}, where PATH is {path}"
        findings.append(Finding(about="program", state="missing", said=said))
    if DIR_VARIABLE not in launch.environment:
        said = f"{behind} replaces it, so {DIR_VARIABLE} is lost and nothing that this command starts is traced; "
        said += f"write `rltrace exec --` behind {behind}, or pass {DIR_VARIABLE} and PYTHONPATH through it"
        findings.append(Finding(about="environment", state="missing", said=said))
    return findings


def interpreter_findings(python: Sequence[str], answer: Answer, launch: Launch, unknown: str | None) -> list[Finding]:
    """Return findings about the Python that the command starts, and whether our start-up hook runs in it."""
    findings = [] if unknown is None else [unknown_finding(unknown, python[0])]
    closed = why_untraced(list(python), [f"{name}=" for name in launch.environment])
    if answer.error is not None:
        why = closed or f"{answer.error}; install rltrace for this Python"
        return [*findings, Finding(about="python", state="missing", said=f"{python[0]}: {why}")]
    value = answer.value
    through = f" (behind {_listed(launch.through)})" if launch.through and unknown is None else ""
    findings.append(Finding(about="python", state="ok", said=f"{value['python']}, {value['executable']}{through}"))
    if value["joined"]:
        hook = Finding(about="start-up hook", state="ok", said="runs when this Python starts")
    else:
        why = closed or "another sitecustomize comes before ours"
        hook = Finding(about="start-up hook", state="missing", said=f"does not run: {why}")
    return [*findings, hook]


def unknown_finding(reason: str, guess: str) -> Finding:
    """Return the finding that the command does not say which Python it starts, and what to do."""
    said = f"cannot tell which Python it starts: {reason}. The lines below are about {guess}, the first on the PATH. "
    return Finding(
        about="command",
        state="unknown",
        said=said + "Name the Python that it starts in the end instead: python train.py",
    )


def _listed(programs: Sequence[str]) -> str:
    return ", ".join(f"`{program}`" for program in programs)


def program_findings(
    program: tuple[str | None, str | None], python: Sequence[str], environment: Mapping[str, str]
) -> list[Finding]:
    """Return whether the module or script of the command exists; return nothing where that is not known."""
    module, script = program
    if module is not None:
        answer = ask(python, "module", environment, module)
        error = answer.error or answer.value["error"]
        said = (
            f"{module}: {error}; install it for {python[0]}, or run this where it is installed"
            if error
            else f"{module}: found"
        )
        return [Finding(about="module", state="missing" if error else "ok", said=said)]
    if script is not None and not Path(script).exists():
        return [Finding(about="script", state="missing", said=f"{script}: no such file in {Path.cwd()}")]
    return []


def frameworks_in(answer: Answer) -> dict[str, tuple[str, str | None]]:
    """Return package and version by instrumentation."""
    return {name: (package, version) for name, (package, version) in answer.value.get("frameworks", {}).items()}


def framework_findings(answer: Answer, hooks: Sequence[HookFigures]) -> list[Finding]:
    """Return one finding per instrumentation: which of its hooks bind."""
    if answer.error is not None:
        return [Finding(about="hooks", state="missing", said=answer.error)]
    return [
        framework_finding(name, package, version, [h for h in hooks if h.instrumentation == name], answer)
        for name, (package, version) in frameworks_in(answer).items()
    ]


def framework_finding(
    name: str, package: str, version: str | None, hooks: Sequence[HookFigures], answer: Answer
) -> Finding:
    """Return whether an instrumentation's hooks bind to the framework that is installed."""
    if version is None:
        return Finding(about=name, state="not here", said=f"{package} is not installed")
    errors: dict[str, str] = answer.value["errors"].get(name, {})
    if not hooks and not errors:
        return Finding(about=name, state="not here", said="nothing to hook on this machine, or not enabled")
    bound = sum(hook.state == "installed" for hook in hooks)
    reasons = dict.fromkeys(
        errors.get(hook.target.partition(":")[0]) or hook.reason or hook.state
        for hook in hooks
        if hook.state != "installed"
    )
    # A module that cannot be imported may be one behind which hooks are only named.
    reasons |= dict.fromkeys(errors.values())
    said = f"{package} {version}: {bound} of {len(hooks)} hooks bind"
    if unverified := sum(hook.unverified for hook in hooks):
        said += f", {unverified} unverified: their source is not the one that was read"
    if not reasons:
        return Finding(about=name, state="ok", said=said)
    disabled = all(reason.startswith("disabled by ") for reason in reasons)
    return Finding(about=name, state="ok" if disabled else "missing", said=f"{said}; {'; '.join(reasons)}")


def child_finding(place: str, answer: Answer, reached: set[str]) -> Finding:
    """Return whether a child process is traced; engines are such processes."""
    if place in reached:
        return Finding(about=place, state="ok", said="started one, and it was traced")
    why = answer.error or "no start-up hook ran in it"
    return Finding(about=place, state="missing", said=f"started one, and it was not traced: {why}")


def ray_finding(has_ray: bool, answer: Answer, reached: set[str]) -> Finding:
    """Return whether a Ray worker is traced."""
    place = probe.RAY_WORKER
    if not has_ray:
        return Finding(about=place, state="not here", said="ray is not installed")
    cluster = f"of the cluster at {os.environ['RAY_ADDRESS']}" if os.environ.get("RAY_ADDRESS") else "of a new cluster"
    if place in reached:
        return Finding(about=place, state="ok", said=f"ran a task on a worker {cluster}, and it was traced")
    why = answer.error or "no start-up hook ran in it; install rltrace for the cluster's Python"
    return Finding(about=place, state="missing", said=f"ran a task on a worker {cluster}, and it was not traced: {why}")


def nvml_finding(answer: Answer) -> Finding:
    """Return whether the memory of the GPUs can be read."""
    if answer.error is not None:
        return Finding(about="NVML", state="missing", said=answer.error)
    gpus, error = answer.value["gpus"], answer.value["error"]
    if gpus == 0:
        return Finding(about="NVML", state="not here", said="this machine has no NVIDIA GPU")
    if error is not None:
        advice = "; pip install nvidia-ml-py" if "ModuleNotFoundError" in error else ""
        return Finding(about="NVML", state="missing", said=f"cannot read the memory of {gpus} GPUs: {error}{advice}")
    return Finding(about="NVML", state="ok", said=f"reads the memory of {gpus} GPUs")


def folder_finding(place: storage.Place) -> Finding:
    """Return whether the Recording can be made where it would be."""
    if place.problem is not None:
        return Finding(about="folder", state="missing", said=f"{place.path}: {place.problem}")
    said = f"{place.path}: writable, {place.filesystem or 'a local disk'}, {place.free_bytes / 2**30:.1f} GiB free"
    return Finding(about="folder", state="ok", said=said)

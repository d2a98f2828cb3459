"""Programs under tracing whose every hook fails: they print, raise and exit as they do untraced."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from traced_runs import TracedRun, traced_environment
from warm_python import warm

from rltrace.read.recording import Recording
from rltrace.record import manifest

pytestmark = pytest.mark.run

PROGRAMS = Path(__file__).parents[1] / "programs"
BUG = "ZeroDivisionError: a bug of ours"
BROKEN = {("failed", BUG), ("skipped", f"it cannot be looked at: {BUG}")}

OUR_FRAME = re.compile(r'  File "[^"]*/rltrace/(?:hooks|host|record|instrument)/[\w/]+\.py", .*\n(?:    .*\n)*')

CALL_FRAME = re.compile(r'  File "[^"]*/torch/nn/modules/module\.py", line \d+, in _wrapped_call_impl\n(?:    .*\n)*')


def run(tmp_path: Path, program: str, *, traced: bool, broken: str = "") -> TracedRun:
    """Run a program as it is, or traced with its hooks broken at one place.

    Only working hooks of FSDP2 see it imported; else it runs in a Python that has imported FSDP2 already.
    """
    folder = tmp_path / "recording"
    manifest.create(folder, owner=None, command=[], config=None)
    environment = traced_environment(folder, collects=True, BROKEN=broken, RENDEZVOUS=str(tmp_path / "rendezvous"))
    environment["PYTHONPATH"] += f":{PROGRAMS / 'broken_hooks'}:{PROGRAMS}:{tmp_path}"
    if not traced:
        del environment["RLTRACE_DIR"]
    add_service_hooks(tmp_path)
    file = PROGRAMS / f"{program}.py"
    if program == "fsdp2_training" and (broken or not traced):
        done = warm("torch").run(file, environment, tmp_path, timeout_s=240)
    else:
        command = [sys.executable, str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    return TracedRun(done.returncode, done.stdout, done.stderr, Recording.open(folder))


def add_service_hooks(folder: Path) -> None:
    """Make `service_hooks` an installed instrumentation."""
    metadata = folder / "service_hooks-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: service-hooks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rltrace.instrumentations]\nservice = service_hooks:ServiceHooks\n")


def what_it_did(run: TracedRun) -> tuple[int, str, str]:
    """Exit code, output and the traceback it died of, without our frames, and without what differs by itself."""
    out = "".join(line for line in run.out.splitlines(keepends=True) if not is_left_out(line))
    return run.returncode, without_chance(out), without_chance(died_of(run.err))


def is_left_out(line: str) -> bool:
    """Our frames, and the frames in the text of an error that came from a Ray worker: Ray cuts some of them off."""
    if line.startswith("    frame "):
        return "/rltrace/" in line and "/tests/" not in line
    return re.match(r"  File |    (?!now handled: )", line) is not None


def died_of(errors: str) -> str:
    """The last traceback, and only that: Ray's daemons and gloo write what they like around it.

    Our `Module.__call__` does what torch's does, without its frame.
    """
    lines = errors[errors.rindex("Traceback (most recent call last):") :].splitlines(keepends=True)
    end = next(at for at, line in enumerate(lines) if at and not line.startswith(" "))
    return CALL_FRAME.sub("", OUR_FRAME.sub("", "".join(lines[: end + 1])))


def without_chance(text: str) -> str:
    """Numbers of processes and actors, addresses in memory, and which of two failing ranks was the first."""
    text = OUR_FRAME.sub("", text)
    text = re.sub(r"pid=\d+|pid: \d+|Process \d|actor_id=\w+|repr=<\S+|ip=[\d.]+|0x[0-9a-f]+", "#", text)
    return re.sub(r"#(, #)*", "#", text)


@pytest.fixture(scope="module")
def untraced(tmp_path_factory: pytest.TempPathFactory):
    """What each program does without us, run once."""
    known: dict[str, tuple[int, str, str]] = {}

    def of(program: str) -> tuple[int, str, str]:
        if program not in known:
            known[program] = what_it_did(run(tmp_path_factory.mktemp(program), program, traced=False))
        return known[program]

    return of


EVERYWHERE = ("before", "after", "binding", "look", "install", "recorder", "counting", "report")
IN_SPANS = ("args", "late_args", "flow_out", "flow_in")

FRAMEWORKS = {"fsdp2_training": "fsdp2", "ray_driver": "ray"}
IN_FRAMEWORKS = [(program, place, name) for place in EVERYWHERE for program, name in FRAMEWORKS.items()]
INSIDE_THE_FRAMEWORK = ("in turn", "recorder")
"""The others fail in code that is the same for every program: there the service, which takes no second, shows it. In
turn: some hooks before the call, the others after it; tests/hostile has each of them at both places."""

CASES = [
    *(("asyncio_service", place, "service") for place in (*IN_SPANS, *EVERYWHERE)),
    *((program, place, name) for place in INSIDE_THE_FRAMEWORK for program, name in FRAMEWORKS.items()),
]


@pytest.mark.parametrize(("program", "place", "instrumentation"), CASES)
def test_failing_hooks_change_nothing(tmp_path: Path, untraced, program: str, place: str, instrumentation: str) -> None:
    """A program whose every hook fails runs as if untraced."""
    check_broken(tmp_path, untraced(program), program, place, instrumentation)


def check_broken(tmp_path: Path, bare: tuple[int, str, str], program: str, place: str, instrumentation: str) -> None:
    """A program whose hooks fail does what it did without any, and the Recording says that they failed."""
    broken = run(tmp_path, program, traced=True, broken=place)
    assert what_it_did(broken) == bare
    failed = [
        hook
        for process in broken.recording.processes
        for hook in process.hooks
        if hook["instrumentation"] == instrumentation and (hook["state"], hook["reason"]) in BROKEN
    ]
    assert failed, "nothing was broken: the comparison says nothing"


def test_renamed_parameter_changes_nothing(tmp_path: Path, untraced) -> None:
    """A framework has renamed one parameter: its one hook is skipped, all others work, and the program runs on."""
    traced = run(tmp_path, "fsdp2_training", traced=True, broken="renamed")
    assert what_it_did(traced) == untraced("fsdp2_training")
    hooks = [hook for process in traced.recording.processes for hook in process.hooks]
    skipped = {hook["target"]: hook["reason"] for hook in hooks if hook["state"] == "skipped"}
    assert list(skipped) == ["torch.distributed.fsdp._fully_shard._fsdp_param_group:foreach_all_gather"]
    assert "parameter 0 is `shards`, not `fsdp_params`" in skipped.popitem()[1]
    assert {hook["state"] for hook in hooks} == {"skipped", "installed", "waiting"}
    names = {span.name for span in traced.spans()}
    assert "fsdp.all_gather" not in names
    assert {"fsdp.forward", "fsdp.backward", "fsdp.reduce_scatter", "optimizer.step"} <= names


@pytest.mark.parametrize("program", ["asyncio_service", "fsdp2_training", "ray_driver"])
def test_working_hooks_change_nothing(tmp_path: Path, untraced, program: str) -> None:
    """A program whose hooks work runs as if untraced."""
    traced = run(tmp_path, program, traced=True)
    assert what_it_did(traced) == untraced(program)
    assert {hook["state"] for process in traced.recording.processes for hook in process.hooks} <= {
        "installed", "waiting",
    }  # fmt: skip
    assert traced.spans()


@pytest.mark.parametrize("program", ["asyncio_service", "fsdp2_training", "ray_driver"])
def test_programs_do_fail(untraced, program: str) -> None:
    """The programs do fail, so that there is something to compare."""
    code, out, died = untraced(program)
    assert code == 1
    assert "frame" in out
    assert died.count("File ") >= 2

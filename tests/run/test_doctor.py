"""`rltrace doctor`: what it says is what a traced run would give, and it tries instead of guessing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import installed
import pytest

from rltrace import plugins
from rltrace.cli.doctor import show
from rltrace.run import doctor, storage
from rltrace.run.launchers import look_through

ROOT = Path(doctor.__file__).parents[2]

OF_FRAMEWORKS = ",".join(plugins.INSTRUMENTATIONS)
"""All of our own: importing what they hook takes seconds, where other things are asked."""

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> installed.Environment:
    return installed.make(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def without_ray(tmp_path_factory: pytest.TempPathFactory) -> installed.Environment:
    """Nothing is asked of a cluster there, which takes seconds to start."""
    return installed.make_without(tmp_path_factory.mktemp("without_ray"), "ray")


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[str, str]]:
    return {found["about"]: (found["state"], found["said"]) for found in json.loads(done.stdout)["findings"]}


def test_nothing_missing_exits_0(environment: installed.Environment, tmp_path: Path) -> None:
    """If everything works, the doctor says so and exits with 0."""
    done = environment.rltrace("doctor", "--json", cwd=tmp_path)
    found = findings(done)
    assert {about: state for about, (state, _) in found.items() if state == "missing"} == {}, found
    assert done.returncode == 0
    assert found["start-up hook"][0] == found["spawned child"][0] == found["subprocess"][0] == "ok"
    assert found["Ray worker"] == ("ok", "ran a task on a worker of a new cluster, and it was traced")
    assert "hooks bind" in found["fsdp2"][1]
    assert found["python_gc"] == ("ok", f"Python {platform.python_version()}: 1 of 1 hooks bind")
    hooks = json.loads(done.stdout)["hooks"]
    assert {hook["state"] for hook in hooks if hook["instrumentation"] in ("fsdp2", "ray", "torch_optim")} == {
        "installed"
    }
    assert list(tmp_path.iterdir()) == []


EXTRA = {
    "old": ('("msgspec > 99",)', "json:loads", "is not supported; this hook supports msgspec > 99"),
    "moved": ('("msgspec > 0.1",)', "json:gone", "0 of 1 hooks bind; not in this release: json has no gone"),
    "gone": ('("msgspec > 0.1",)', "json.gone:loads", "No module named 'json.gone'"),
    "elsewhere": ('("no-such-package > 1",)', "json:loads", "no-such-package is not installed"),
}


# Names its hooks once its framework is imported, as verl's does.
LATE = """
class Extra:
    name, supports = "late", ("msgspec > 0.1",)
    def install(self, patches):
        patches.when_imported("json", lambda _: self.name_more(patches))
    def name_more(self, patches):
        patches.span("json.later:loads", "extra.later")
"""


def test_missing_is_named_with_reason(without_ray: installed.Environment, tmp_path: Path) -> None:
    """What would be missing is named with the reason."""
    entries = ["[rltrace.instrumentations]"]
    for name, (supports, target, _) in EXTRA.items():
        (tmp_path / f"{name}_hooks.py").write_text(
            "class Extra:\n"
            f"    name, supports = {name!r}, {supports}\n"
            "    def install(self, patches):\n"
            f"        patches.span({target!r}, 'extra.work')\n"
        )
        entries.append(f"{name} = {name}_hooks:Extra")
    (tmp_path / "late_hooks.py").write_text(LATE)
    entries.append("late = late_hooks:Extra")
    metadata = tmp_path / "extra-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(entries))
    done = without_ray.rltrace(
        "doctor", "--json", "--", "python", "-m", "no_such_module.of", cwd=tmp_path, PYTHONPATH=str(tmp_path),
        RLTRACE_DISABLE=OF_FRAMEWORKS,
    )  # fmt: skip
    found = findings(done)
    assert done.returncode == 8
    for name, (_, _, reason) in EXTRA.items():
        state, said = found[name]
        assert state == ("not here" if name == "elsewhere" else "missing")
        assert reason in said
    state, said = found["module"]
    assert state == "missing"
    assert said.startswith("no_such_module.of: No module named 'no_such_module'; install it for ")
    assert found["late"][0] == "missing"
    assert found["late"][1].endswith(": 0 of 1 hooks bind; ModuleNotFoundError: No module named 'json.later'")
    assert found["fsdp2"][0] == "ok"
    assert "disabled by RLTRACE_DISABLE" in found["fsdp2"][1]
    hooks = {hook["instrumentation"]: hook for hook in json.loads(done.stdout)["hooks"]}
    assert (hooks["old"]["state"], hooks["moved"]["state"], hooks["gone"]["state"]) == ("skipped", "skipped", "waiting")


@pytest.mark.parametrize(
    ("words", "module", "script"),
    [
        (["-m", "torch.distributed.run", "-m", "x"], "torch.distributed.run", None),
        (["-u", "-W", "ignore", "-Im", "verl.trainer"], "verl.trainer", None),
        (["-mjson.tool"], "json.tool", None),
        (["-X", "dev", "train.py", "-m", "x"], None, "train.py"),
        (["-c", "import x", "-m"], None, None),
        (["-"], None, None),
        ([], None, None),
    ],
)
def test_program_of_python_words(words: list[str], module: str, script: str) -> None:
    """What a Python would run is read from its words."""
    assert doctor.program_of(["/usr/bin/python3.11", *words]) == (module, script)


def test_program_only_of_a_python() -> None:
    """Only for a Python does the doctor say what it would run."""
    assert doctor.program_of(["torchrun", "-m", "x"]) == doctor.program_of([]) == (None, None)


def test_missing_module_or_script_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing module or script is named.

    From the folder that it would run in, as Python itself would look.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("package", "runnable"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    for file in ("here.py", "runnable/__main__.py"):
        (tmp_path / file).touch()

    def found(words: list[str]) -> list[tuple[str, str, str]]:
        path = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        made = doctor.program_findings(doctor.program_of(["python", *words]), [sys.executable], path)
        return [(finding.about, finding.state, finding.said) for finding in made]

    assert found(["-m", "here"]) == [("module", "ok", "here: found")]
    assert found(["-m", "runnable"]) == [("module", "ok", "runnable: found")]
    for name, error in (("gone", "gone"), ("package", "package.__main__"), ("package.part", "package.part")):
        ((about, state, said),) = found(["-m", name])
        assert (about, state) == ("module", "missing")
        assert said.startswith(f"{name}: No module named {error!r}; install it for {sys.executable}")
    assert found(["here.py"]) == []
    assert found(["gone.py"]) == [("script", "missing", f"gone.py: no such file in {tmp_path}")]


def test_checks_own_interpreter(environment: installed.Environment, tmp_path: Path) -> None:
    """The doctor asks the command's own interpreter.

    A Python without rltrace, one whose start-up hook is switched off, and a script's.
    """
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    done = environment.rltrace("doctor", "--json", "--", bare / "bin" / "python", "train.py", cwd=tmp_path)
    assert done.returncode == 8
    assert set(findings(done)) == {"python", "folder"}
    state, said = findings(done)["python"]
    assert state == "missing"
    assert "No module named" in said
    assert said.endswith("install rltrace for this Python")

    done = environment.rltrace("doctor", "--json", "--", "python", "-S", "train.py", cwd=tmp_path)
    assert findings(done)["python"][1].endswith(": started with -S: Python runs no start-up hook")

    script = tmp_path / "launch"
    script.write_text(f"#!{bare}/bin/python\n")
    script.chmod(0o755)
    done = environment.rltrace("doctor", "--json", "--", script, cwd=tmp_path)
    assert json.loads(done.stdout)["interpreter"] == f"{bare}/bin/python"

    done = environment.rltrace("doctor", "--", "no-such-program", cwd=tmp_path)
    assert done.returncode == 127
    assert done.stderr.startswith("rltrace: no-such-program: no such program")


def test_launchers_are_looked_through(without_ray: installed.Environment, tmp_path: Path) -> None:
    """The doctor looks through launchers for what a command starts.

    `env -i` really takes the variables away; a script of a shell is not read, and no verdict is made up.
    """
    (tmp_path / "train.py").write_text("import json\n")
    done = without_ray.rltrace("doctor", "--json", "--", "env", "-i", without_ray.python, "train.py", cwd=tmp_path)
    assert done.returncode == 8
    state, said = findings(done)["environment"]
    assert state == "missing"
    assert said.startswith("`env` replaces it, so RLTRACE_DIR is lost")

    line = f"exec {without_ray.python} -S train.py"
    done = without_ray.rltrace("doctor", "--json", "--", "timeout", "9", "bash", "-c", line, cwd=tmp_path)
    assert done.returncode == 8
    assert findings(done)["python"][1].endswith(": started with -S: Python runs no start-up hook")

    (tmp_path / "train.sh").write_text("python train.py\n")
    done = without_ray.rltrace(
        "doctor", "--json", "--", "bash", "train.sh", cwd=tmp_path, RLTRACE_DISABLE=OF_FRAMEWORKS
    )
    found = findings(done)
    assert done.returncode == 9, found
    assert done.stderr.splitlines()[0].endswith("starting a process of each kind; this takes some seconds ...")
    assert found["command"][0] == "unknown"
    assert found["command"][1].startswith("cannot tell which Python it starts: `bash`: it runs a script")
    assert f"The lines below are about {without_ray.path}/bin/python" in found["command"][1]


def test_verdict_when_it_cannot_tell(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict says so if the doctor cannot tell."""
    unknown = doctor.unknown_finding("`bash`: it runs a script", "/usr/bin/python")
    show(doctor.diagnosis(["bash", "train.sh"], ["/usr/bin/python"], [unknown], []))
    said = capsys.readouterr().out
    assert "if COMMAND starts that Python" in said
    assert "records it" not in said


def test_torchrun_names_its_python() -> None:
    """torchrun says by itself which Python it starts."""
    found = look_through(["nohup", str(Path(sys.executable).with_name("torchrun")), "train.py"], os.environ)
    python, unknown = doctor.interpreter_of(found)
    assert unknown is None
    assert Path(python[0]).resolve() == Path(sys.executable).resolve()


def test_closed_start_up_hook_is_said(tmp_path: Path) -> None:
    """A Python whose start-up hook does not run is told from one without rltrace.

    By PYTHONPATH alone, another sitecustomize in front of ours is the only one that Python runs.
    """
    environment = installed.make_bare(tmp_path)
    (environment.site / "zz-unhook.pth").write_text(
        "import sys; sys.path = [p for p in sys.path if 'startup' not in p]\n"
    )
    done = environment.rltrace("doctor", "--json", cwd=tmp_path, RLTRACE_DISABLE=OF_FRAMEWORKS)
    found = findings(done)
    assert done.returncode == 8
    assert found["start-up hook"] == ("missing", "does not run: another sitecustomize comes before ours")
    for place in ("spawned child", "subprocess", "Ray worker"):
        assert found[place][0] == "missing", found
        assert "it was not traced: no start-up hook ran in it" in found[place][1]


def test_unwritable_folder_is_named(environment: installed.Environment, tmp_path: Path) -> None:
    """A folder that cannot be written is named."""
    (tmp_path / "file").write_text("")
    # Of a Python without start-up hooks nothing else is asked: that and the folder are all that is missing.
    done = environment.rltrace("doctor", "--out", "file/run", "--", "python", "-S", "train.py", cwd=tmp_path)
    assert done.returncode == 8
    assert "name another folder with --out" in " ".join(done.stdout.split())
    assert "2 of these would be missing from the Recording." in done.stdout


def test_place_of_a_recording(tmp_path: Path) -> None:
    """What the kernel says tells a good place for a Recording from a bad one."""
    place = storage.look_at(tmp_path / "not" / "made" / "yet")
    assert place.error is None
    assert list(tmp_path.iterdir()) == []
    device = subprocess.run(["stat", "-f", "-c", "%a %S", tmp_path], capture_output=True, text=True, check=True).stdout
    blocks, size = map(int, device.split())
    assert place.free_bytes == pytest.approx(blocks * size, rel=0.05)
    assert storage.filesystem_of(Path("/proc/self")) == "proc"
    assert storage.look_at(Path("/proc/run")).problem is not None


@pytest.mark.parametrize(
    ("filesystem", "free_bytes", "problem"),
    [
        ("ext4", 2 << 30, None),
        ("nfs4", 2 << 30, "on nfs4, not on a local disk"),
        ("fuse.sshfs", 2 << 30, "on fuse.sshfs, not on a local disk"),
        ("ext4", 100 << 20, "only 100 MiB are free"),
    ],
)
def test_a_poor_place_has_a_problem(filesystem: str, free_bytes: int, problem: str | None) -> None:
    place = storage.Place(
        path="/run", filesystem=filesystem, is_local=storage.is_local(filesystem), free_bytes=free_bytes, error=None
    )
    assert place.problem is None if problem is None else str(place.problem).startswith(problem)

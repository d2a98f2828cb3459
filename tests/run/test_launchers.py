"""What a command starts in the end is what its words say: compared with what the real programs start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rltrace.run.launchers import Launch, look_through

SAY = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
VARIABLES = {"PATH": os.environ["PATH"], "RLTRACE_DIR": "/run", "KEPT": "1"}


@pytest.fixture
def say(tmp_path: Path) -> str:
    path = tmp_path / "say.py"
    path.write_text(SAY)
    return str(path)


@pytest.mark.parametrize(
    ("words", "through"),
    [
        ([], []),
        (["env"], ["env"]),
        (["env", "-i"], ["env"]),
        (["env", "-"], ["env"]),
        (["env", "-i", "KEPT=2", "OTHER=a=b c"], ["env"]),
        (["env", "-u", "RLTRACE_DIR", "--unset=KEPT"], ["env"]),
        (["/usr/bin/env", "--", "OTHER="], ["env"]),
        (["timeout", "-k", "5", "--signal=KILL", "60"], ["timeout"]),
        (["nohup", "nice", "-n", "1", "setsid", "-w"], ["nohup", "nice", "setsid"]),
        (["stdbuf", "-oL", "env", "-u", "KEPT", "timeout", "60"], ["stdbuf", "env", "timeout"]),
    ],
)
def test_looks_through_real_programs(words: list[str], through: list[str], say: str) -> None:
    """A command is looked through as the real programs start it."""
    command = [*words, sys.executable, say, "-u", "x y"]
    found = look_through(command, VARIABLES)
    assert (found.unknown, found.through) == (None, through)
    assert_is_what_starts(found, command)


@pytest.mark.parametrize(
    "line",
    ["{python} {say} 'x y' \"it's\"", "exec {python} {say}", "KEPT=3 OTHER='a b' exec {python} {say} --a=[x,y]"],
)
@pytest.mark.parametrize("shell", [["sh", "-c"], ["bash", "-ec"], ["bash", "-e", "-c"]])
def test_one_simple_shell_command(shell: list[str], line: str, say: str) -> None:
    """One simple command of a shell is looked through."""
    command = [*shell, line.format(python=sys.executable, say=say)]
    found = look_through(command, VARIABLES)
    assert (found.unknown, found.through) == (None, [shell[0]])
    assert_is_what_starts(found, command)


def assert_is_what_starts(found: Launch, command: list[str]) -> None:
    """Against the real thing; a shell adds variables of its own, which are not compared."""
    done = subprocess.run(command, env=VARIABLES, capture_output=True, text=True, check=True)
    arguments, environment = json.loads(done.stdout)
    assert (found.command[0], found.command[2:]) == (sys.executable, arguments)
    for name in ("PATH", "RLTRACE_DIR", "KEPT", "OTHER"):
        assert found.environment.get(name) == environment.get(name), name


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["bash", "train.sh"], "`bash`: it runs a script"),
        (["sh"], "`sh`: it runs a script"),
        (["bash", "-c", "cd /; python x.py"], "`bash`: it runs more than one simple command"),
        (["bash", "-c", "python x.py 2>&1 | tee log"], "`bash`: it runs more than one simple command"),
        (["bash", "-c", "cd /\npython x.py"], "`bash`: it runs more than one simple command"),
        (["bash", "-c", "$PYTHON x.py"], "`bash`: it runs more than one simple command"),
        (["bash", "-c", "python 'x"], "`bash`: No closing quotation"),
        (["bash", "-lc", "python x.py"], "`bash`: option -l not recognized"),
        (["env", "-S", "python x.py"], "`env`: option -S not recognized"),
        (["env", "A=1"], "`env` was given no command"),
        (["timeout", "5"], "`timeout` was given no command"),
        (["nohup", "bash", "train.sh"], "`bash`: it runs a script"),
    ],
)
def test_unknown_words_have_a_reason(words: list[str], reason: str) -> None:
    """What the words do not say is unknown, with the reason."""
    assert look_through(words, VARIABLES).unknown == reason


def test_program_is_found_in_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is searched where its launcher would search it.

    Without a PATH there is the system's own, not ours.
    """
    program = tmp_path / "only-here"
    shutil.copy("/bin/true", program)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    monkeypatch.setenv("PATH", environment["PATH"])
    for words, path in (
        ([], str(program)),
        (["env", "-i"], None),
        (["env", "-i", f"PATH={tmp_path}"], str(program)),
        (["env", "PATH=/bin"], None),
    ):
        found = look_through([*words, "only-here"], environment)
        assert found.program == path
        done = subprocess.run([*words, "only-here"], env=environment, capture_output=True, check=False)
        assert done.returncode == (127 if path is None else 0)

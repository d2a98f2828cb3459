"""The wheel alone, in an environment without any extra: what it gives, what it says of extras, how it is switched off.

In that environment rltrace is what pip installs: its script, its `.pth`, its entry points.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from installed import Environment, make_core
from shipped import VERL

from rltrace.analysis import summarize
from rltrace.extras import requirements
from rltrace.read.recording import Recording

THERE = {"psutil>=5.9"}
"""Of an extra, and needed by the core too."""

PROGRAM = """
import sys
import msgspec  # the first import from outside of the standard library: here a traced process joins
import rltrace
with rltrace.span("step", step=1):
    with rltrace.phase("reward"):
        pass
print(sys.argv[1:], "rltrace_startup" in sys.modules, rltrace.start("mine"))
"""


class Recorded(NamedTuple):
    """A folder in which a program was recorded with the core alone."""

    environment: Environment
    folder: Path
    done: subprocess.CompletedProcess[str]

    def call(self, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command there."""
        return self.environment.run(self.environment.script, *words, cwd=self.folder, **variables)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    environment = make_core(tmp_path_factory.mktemp("wheel"))
    folder = tmp_path_factory.mktemp("work")
    (folder / "train.py").write_text(PROGRAM)
    words = ("exec", "--", environment.python, "train.py", "a b")
    return Recorded(environment, folder, environment.run(environment.script, *words, cwd=folder))


# ---- what the core gives ----------------------------------------------------------------------------------------


def test_a_program_is_recorded(core: Recorded) -> None:
    """With the core alone `rltrace exec` records a program, and `summary`, `why` and `ls` read it."""
    assert core.done.returncode == 0, core.done.stderr
    (run,) = (core.folder / "rltrace-runs").iterdir()
    found = summarize(Recording.open(run))
    assert [step.step for step in found.steps] == [1] and found.complete
    for command in ("summary", "why", "ls"):
        done = core.call(command)
        assert (done.returncode, done.stderr) == (0, "") and run.name in done.stdout


def test_the_timeline_is_served(core: Recorded) -> None:
    """`rltrace view --online` serves the trace itself; the public UI fetches it in the user's browser."""
    command = [str(core.environment.script), "view", "--online", "--no-open"]
    with subprocess.Popen(
        command,
        env=core.environment.variables(PYTHONUNBUFFERED="1"),
        cwd=core.folder,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+\S*", process.stdout.readline())
            assert address is not None
            with urllib.request.urlopen(address[0], timeout=20) as answer:
                assert answer.status == 200 and b"ui.perfetto.dev" in answer.read()
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (("view", "--no-open"), "the Perfetto UI", "view"),
        (("report",), "jinja2", "report"),
        (("diff", VERL, VERL, "-o", "diff.html"), "jinja2", "report"),
        (("sql", "select 1"), "duckdb", "sql"),
        (("export", "--to", "parquet"), "pyarrow", "sql"),
        (("export", "--to", "memory", VERL, "-o", "memory.png"), "matplotlib", "pictures"),
        (("export", "--to", "otlp"), "opentelemetry", "otel"),
        (("export", "--to", "prometheus"), "prometheus_client", "metrics"),
        (("run", VERL.parents[1] / "laptop.yaml"), "torch", "run"),
    ],
)  # fmt: skip
def test_an_extra_is_named(core: Recorded, words: tuple[str | Path, ...], package: str, extra: str) -> None:
    """A command whose packages are missing says in one line which, and how to install them; nothing is written."""
    before = sorted(core.folder.iterdir())
    done = core.call(*words)
    assert (done.returncode, done.stdout) == (6, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1 and package in done.stderr
    (command,) = re.findall(rf"pip install (.+) \(the extra \[{extra}\]\)", done.stderr)
    assert set(shlex.split(command)) == {one.what for one in requirements()[extra]} - THERE
    assert sorted(core.folder.iterdir()) == before


def test_version_lists_extras(core: Recorded) -> None:
    """`rltrace --version` says of each extra which packages there are; the tests' own environment has them."""
    lines = core.call("--version").stdout.splitlines()
    assert re.fullmatch(r"rltrace, version \d\S+", lines[0]) and lines[1].startswith("segments are decoded")
    said = dict(line.split(": ") for line in lines[2:])
    assert {"[view]", "[report]", "[sql]", "[pictures]", "[run]"} <= {*said} and not {"[dev]", "[docs]"} & {*said}
    assert said["[report]"] == "jinja2 is missing" and said["[sql]"] == "duckdb is missing, pyarrow is missing"
    here = subprocess.run(
        [sys.executable, "-m", "rltrace", "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    assert re.search(r"(?m)^\[report\]: jinja2 \d", here.stdout)


# ---- completion -------------------------------------------------------------------------------------------------


class Bash(NamedTuple):
    """What bash completes, by the function that it is given as the documentation says."""

    core: Recorded
    script: str

    def completes(self, *words: str) -> list[str]:
        """The candidates for the last of these words."""
        quoted = " ".join(f"'{word}'" for word in words)
        code = f"""{self.script}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
compopt() {{ local IFS=' '; echo "compopt $*"; }}
_rltrace_completion rltrace; printf '%s\\n' "${{COMPREPLY[@]}}" """
        done = self.core.environment.run("bash", "-c", code, cwd=self.core.folder)
        assert done.stderr == ""
        return done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def bash(core: Recorded) -> Iterator[Bash]:
    done = core.call(_RLTRACE_COMPLETE="bash_source")
    assert "complete -o nosort -F _rltrace_completion rltrace" in done.stdout
    yield Bash(core, done.stdout)


def test_bash_completes_commands_and_options(bash: Bash) -> None:
    """Bash completes commands and their options."""
    assert bash.completes("rltrace", "su") == ["summary"]
    assert {"exec", "view", "why", "sql"} <= {*bash.completes("rltrace", "")}
    assert "--steps" in bash.completes("rltrace", "summary", "--st")


def test_a_run_completes_to_the_newest(bash: Bash) -> None:
    """Where a command takes a RUN, the Recordings in ./rltrace-runs are offered, the newest first, then files."""
    runs = bash.core.folder / "rltrace-runs"
    (recorded,) = (f"rltrace-runs/{run.name}" for run in runs.iterdir())
    older = runs / "aaa"
    older.mkdir()
    try:
        (older / "manifest.json").write_text((bash.core.folder / recorded / "manifest.json").read_text())
        os.utime(older / "manifest.json", (1, 1))
        for words in (("summary", ""), ("diff", recorded, "r"), ("sql", "rltrace-runs/"), ("collect", "x", "r")):
            found = bash.completes("rltrace", *words)
            assert [one for one in found if not one.startswith("compopt")] == [recorded, "rltrace-runs/aaa"]
            assert "compopt -o default" in found
        assert bash.completes("rltrace", "view", "rltrace-runs/a")[-1] == "rltrace-runs/aaa"
    finally:
        (older / "manifest.json").unlink()
        older.rmdir()


def test_zsh_is_told_what_was_run(core: Recorded) -> None:
    """Zsh gets each Recording with its command line beside it; fish gets them too."""
    said = core.call(_RLTRACE_COMPLETE="zsh_complete", COMP_WORDS="rltrace summary ", COMP_CWORD="2").stdout.split("\n")
    assert said[0] == "file" and said[4].startswith("rltrace-runs/") and said[5] == "python train.py a b"
    assert "#compdef rltrace" in core.call(_RLTRACE_COMPLETE="zsh_source").stdout
    assert (
        "rltrace-runs/"
        in core.call(_RLTRACE_COMPLETE="fish_complete", COMP_WORDS="rltrace summary ", COMP_CWORD="").stdout
    )


# ---- off --------------------------------------------------------------------------------------------------------


def test_off_runs_the_command_untouched(core: Recorded) -> None:
    """With `RLTRACE_OFF` the command runs in our place: its own pid, environment and exit code, and no file, whatever
    else is asked for, sensible or not."""
    code = (
        "import os, signal, sys\n"
        "print([os.getpid(), dict(os.environ), int(signal.getsignal(signal.SIGPIPE))])\n"
        "sys.exit(7)"
    )
    folder = core.folder / "off_command"
    folder.mkdir()
    # pip's script in a folder with a long name is one of `sh`, which says where it runs, and sorts its environment.
    said = {"RLTRACE_OFF": "1", "PWD": str(folder)}
    asked = ("--otlp", "http://localhost:4318", "--trackers", "--max-disk", "much", "--allocations", "all")
    with subprocess.Popen(
        [str(core.environment.script), "exec", *asked, "--", core.environment.python, "-c", code],
        env=core.environment.variables(**said), cwd=folder, stdout=-1, stderr=-1, text=True,
    ) as process:  # fmt: skip
        out, err = process.communicate(timeout=60)
    assert process.returncode == 7
    assert err == (
        "rltrace: RLTRACE_OFF is set: nothing is recorded, and the command runs as it would without rltrace\n"
    )
    bare = core.environment.run(core.environment.python, "-c", code, cwd=folder, **said).stdout
    pid, environment, of_pipe = ast.literal_eval(out)
    assert pid == process.pid
    assert [environment, of_pipe] == list(ast.literal_eval(bare)[1:])
    assert list(folder.iterdir()) == []
    folder.rmdir()


def test_off_joins_no_recording(core: Recorded) -> None:
    """With `RLTRACE_OFF` the `.pth` does nothing but read the environment, and no way in records or hooks anything."""
    code = """
import sys
print([name for name in sys.modules if "rltrace" in name], len(sys.meta_path))
import rltrace, rltrace.instrument
from rltrace.hooks.installation import installed
print(rltrace.start("mine"), rltrace.join("mine"), rltrace.instrument(), rltrace.instrument.join_run())
with rltrace.span("a"):
    rltrace.start_kernels()
print(installed().patch_sets)
"""
    python = core.environment.python
    done = core.environment.run(python, "-c", code, cwd=core.folder, RLTRACE_DIR="off", RLTRACE_OFF="1")
    assert done.stdout.splitlines() == ["[] 3", "None None None None", "{}"] and done.stderr == ""
    assert not (core.folder / "off").exists() and not (core.folder / "mine").exists()
    on = core.environment.run(python, "-c", "import msgspec, sys; print('rltrace' in sys.modules)", cwd=core.folder,
                              RLTRACE_DIR="on", RLTRACE_OFF="0")  # fmt: skip
    assert on.stdout == "True\n" and (core.folder / "on" / "manifest.json").exists()

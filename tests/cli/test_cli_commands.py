"""Every command on every bad input: one line on stderr, a code of its own, no traceback, nothing overwritten."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from recordings import SECOND, Written, hook, sample, span, two_ranks
from rich.console import Console

from rltrace import plugins
from rltrace.analysis import summarize
from rltrace.cli import main, runs
from rltrace.cli.export import load_exporter
from rltrace.cli.run import report, show_steps
from rltrace.cli.tables import WIDTH, show
from rltrace.errors import RunError
from rltrace.events import VERSION
from rltrace.read import native
from rltrace.read.recording import Recording
from rltrace.record import manifest
from rltrace.run.supervisor import Outcome

EXEC = [sys.executable, "-m", "rltrace", "exec", "--sample", "0"]
"""Without the sampler, which is a process more."""


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace")


def the_line(result: Result, code: int) -> str:
    """What stderr says: one line of ours, and nothing on stdout."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("rltrace: ")
    return line.removeprefix("rltrace: ")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return two_ranks(tmp_path / "run").folder


def test_version_says_what_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rltrace --version` says whether segments are decoded natively, and what to do if they are not."""
    monkeypatch.setattr(native, "library", object)
    assert call("--version").stdout.splitlines()[1] == "segments are decoded natively"
    monkeypatch.setattr(native, "library", lambda: None)
    assert re.search(r"in Python, because .*; (install|build)", call("--version").stdout)


READERS = [
    ("summary",),
    ("summary", "--all"),
    ("summary", "--json"),
    ("export", "--to", "perfetto", "-o", "never.pftrace"),
    ("view", "--no-open"),
]


@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
class TestReaders:
    def test_nothing_at_that_path(self, command: tuple[str, ...], tmp_path: Path) -> None:
        line = the_line(call(*command, tmp_path / "nothing"), 3)
        assert line.startswith(f"{tmp_path / 'nothing'}: no such file or folder; give the folder that ")

    def test_a_folder_of_something_else(self, command: tuple[str, ...], tmp_path: Path) -> None:
        line = the_line(call(*command, tmp_path), 3)
        assert line.startswith(f"{tmp_path}: no Recording here (manifest.json is missing); give the folder that ")

    def test_folder_of_recordings_names_last(self, command: tuple[str, ...], run: Path) -> None:
        """A folder that holds Recordings names the last one."""
        assert the_line(call(*command, run.parent), 3).endswith(f"did you mean {run}?")

    def test_a_file(self, command: tuple[str, ...], run: Path) -> None:
        assert "manifest.json: not a Recording: not a complete zip file" in the_line(
            call(*command, run / "manifest.json"), 3
        )

    def test_a_damaged_manifest(self, command: tuple[str, ...], run: Path) -> None:
        (run / "manifest.json").write_text('{"version": 1,')
        assert "manifest.json: damaged" in the_line(call(*command, run), 3)

    def test_a_newer_format(self, command: tuple[str, ...], run: Path) -> None:
        (run / "manifest.json").write_text('{"version": 99}')
        assert f"format 99, but this rltrace reads formats up to {VERSION}; upgrade" in the_line(call(*command, run), 3)

    def test_impossible_file_name(self, command: tuple[str, ...], tmp_path: Path) -> None:
        """A name that no file can have is one line."""
        line = the_line(call(*command, tmp_path / ("run" * 100)), 3)
        assert line.endswith("cannot be read: File name too long")

    def test_no_runs_yet(self, command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert "no Recording here; make one" in the_line(call(*command), 3)


def test_the_newest_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("b", "a")):
        Written(tmp_path / "rltrace-runs" / name)
        os.utime(tmp_path / "rltrace-runs" / name / "manifest.json", (number, number))
    assert json.loads(call("summary", "--json").stdout)["run"]["path"] == "rltrace-runs/a"
    assert json.loads(call("summary", "b", "--json").stdout)["run"]["path"] == "rltrace-runs/b", "as `ls` names it"


def test_an_empty_run_is_no_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded last is read, and the newer runs without anything in them are named."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "rltrace-runs"
    two_ranks(runs / "a")
    make = (
        "import sys, pathlib; from rltrace.record import manifest\n"
        "for path in sys.argv[1:]: manifest.create(pathlib.Path(path), owner=None, command=['true'], config={})"
    )
    subprocess.run([sys.executable, "-c", make, runs / "b", runs / "c"], check=True)
    for number, name in enumerate(("a", "b", "c"), 1):
        os.utime(runs / name / "manifest.json", (number, number))
    done = call("summary", "--json")
    assert json.loads(done.stdout)["run"]["path"] == "rltrace-runs/a"
    assert done.stderr == (
        "rltrace: reading rltrace-runs/a: rltrace-runs/c and 1 more are newer, but nothing was recorded there\n"
    )


def test_a_live_run_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no process of it has recorded anything yet."""
    monkeypatch.chdir(tmp_path)
    two_ranks(tmp_path / "rltrace-runs" / "a")
    os.utime(tmp_path / "rltrace-runs" / "a" / "manifest.json", (1, 1))
    manifest.create(tmp_path / "rltrace-runs" / "b", owner=None, command=["true"], config={})
    done = call("summary", "--json")
    assert (json.loads(done.stdout)["run"]["path"], done.stderr) == ("rltrace-runs/b", "")


def test_unknown_format_names_known_ones(run: Path) -> None:
    """An unknown format is refused with the names of those that exist."""
    line = the_line(call("export", run, "--to", "vhs", "-o", run / "x"), 2)
    assert "--to vhs: no such format; there is archive, memory, otlp, parquet, perfetto" in line


def test_export_help_names_formats() -> None:
    """The help of export names every format with the endings of its files, if it is one of files."""
    said = " ".join(call("export", "--help").stdout.split())
    for name in plugins.EXPORTERS:
        exporter = load_exporter(name)
        endings = ", ".join(exporter.suffixes if hasattr(exporter, "suffixes") else (exporter.suffix,))
        assert (f"{name} ({endings})" if endings else f"format {name} is sent") in said


def test_unknown_ending_asks_for_format(run: Path) -> None:
    """An ending of no format asks for one."""
    assert (
        "choose one with --to: archive (.zip), memory (.html, .svg, .png), parquet (.parquet), perfetto (.pftrace)"
        in the_line(call("export", run, "-o", run / "x.vhs"), 2)
    )


def test_export_names_its_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the run, in the working folder, and never over another file; a timeline where no format is named."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for words, name in (((), "run.pftrace"), (("--to", "memory"), "run.html"), (("--to", "archive"), "run.zip")):
        done = call("export", run, *words)
        assert done.exit_code == 0, done.stderr
        size_bytes = (here / name).stat().st_size
        assert done.stderr == f"{name}  {size_bytes:,} bytes\n" and size_bytes > 0
        assert f"{name}: exists already" in the_line(call("export", run, *words), 7)
    assert "run.zip: exists already" in the_line(call("export", "run.zip", "--to", "archive"), 7)


def test_existing_file_needs_force(run: Path, tmp_path: Path) -> None:
    """An existing file is left alone without --force."""
    file = tmp_path / "trace.pftrace"
    file.write_text("precious")
    assert f"{file}: exists already; overwrite it with --force" in the_line(call("export", run, "-o", file), 7)
    assert file.read_text() == "precious"
    assert call("export", run, "-o", file, "--force").exit_code == 0
    assert file.read_bytes() != b"precious"


@pytest.mark.parametrize("words", [[], ["--force"]])
@pytest.mark.parametrize("output", [".", "..", "sub", ""])
def test_folder_is_no_output(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, words: list[str]
) -> None:
    """A folder is refused as an output file."""
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    line = the_line(call("export", run, "--to", "perfetto", "-o", output, *words), 7)
    assert line == f"{Path(output)}: a folder; name a file in it with -o, such as {Path(output, 'trace.pftrace')}"
    assert [path.name for path in tmp_path.rglob("*") if path.suffix == ".pftrace"] == []


def test_unwritable_output_leaves_nothing(run: Path, tmp_path: Path) -> None:
    """An output that cannot be written leaves nothing."""
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert "cannot be written: Not a directory" in the_line(
        call("export", run, "-o", tmp_path / "file" / "x.pftrace"), 7
    )
    assert "cannot be written: No such file" in the_line(call("export", run, "-o", tmp_path / "no" / "x.pftrace"), 7)
    assert sorted(tmp_path.rglob("*")) == before


def test_failed_export_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that fails leaves no half-written file."""
    from rltrace import plugins

    monkeypatch.setitem(plugins.EXPORTERS, "full", f"{__name__}:FullDisk")
    before = sorted(tmp_path.rglob("*"))
    assert "No space left on device" in the_line(call("export", run, "-o", tmp_path / "x.full"), 7)
    assert sorted(tmp_path.rglob("*")) == before


class FullDisk:
    suffix = ".full"

    def write(self, recording: object, out: io.BufferedIOBase) -> None:
        out.write(b"half")
        raise OSError(28, os.strerror(28))


def test_export_to_standard_output(run: Path, tmp_path: Path) -> None:
    """An export to standard output is the trace alone."""
    result = call("export", run, "--to", "perfetto", "-o", "-")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert len(result.stdout_bytes) > 100


@pytest.mark.parametrize("ending", [".html", ".svg", ".png"])
def test_picture_format_by_ending(tmp_path: Path, ending: str) -> None:
    """The format of a picture is told by its ending."""
    file = tmp_path / f"memory{ending}"
    assert call("export", two_ranks(tmp_path / "run").folder, "-o", file).exit_code == 0
    assert file.read_bytes()[:5] in (b"<html", b"<!DOC", b"<?xml", b"\x89PNG\r")


def test_a_missing_package_names_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rltrace import plugins

    monkeypatch.setitem(plugins.EXPORTERS, "needy", "no_such_package.module:Needy")
    line = the_line(call("export", run, "--to", "needy", "-o", run / "x"), 6)
    assert "needs no_such_package, which is not installed here: pip install 'viztracer>=" in line


def test_a_busy_port_is_named(run: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is not free" in the_line(
            call("view", run, "--no-open", "--port", str(port)), 5
        )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_view_leaves_nothing(run: Path, tmp_path: Path, number: int) -> None:
    """`view` leaves nothing behind, however it ends."""
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", "from rltrace.cli import main; main()", "view", str(run), "--no-open"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONUNBUFFERED": "1"}
    view = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert view.stdout is not None
    said = []
    while "Ctrl-C ends." not in (line := view.stdout.readline()):
        assert line, view.communicate()
        said.append(line)
    assert re.fullmatch(rf"{re.escape(str(run))}: http://127\.0\.0\.1:\d+/[\w-]{{22}}\n", said[0])
    assert list((tmp_path / "tmp").iterdir()) != []
    view.send_signal(number)
    _, errors = view.communicate(timeout=60)
    assert errors == ""
    assert view.returncode == (0 if number == signal.SIGINT else 128 + number)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("words", [["sumary"], ["summary", "--jsn"], ["summary", "a", "b"], ["exec"]])
def test_wrong_usage_is_one_line(words: list[str]) -> None:
    """Wrong usage is one line that names the help."""
    assert the_line(call(*words), 2).endswith("--help`")


def test_debugging_shows_the_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLTRACE_DEBUG", "1")
    assert call("summary", tmp_path).exception.__class__.__name__ == "RecordingError"


def test_second_run_keeps_first_folder(run: Path) -> None:
    """A second run does not take the folder of the first."""
    before = (run / "manifest.json").read_bytes()
    line = the_line(call("exec", "--out", run, "--", "true"), 3)
    assert f"{run}: holds a Recording already; name another folder with --out" in line
    assert (run / "manifest.json").read_bytes() == before


def test_simultaneous_runs_have_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that begin at the same moment have a folder each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "default_folder", lambda: Path("rltrace-runs/now"))
    (tmp_path / "rltrace-runs" / "now").mkdir(parents=True)  # another one is just making its manifest
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda number: runs.claim(None, [str(number)], {}), range(8)))
    assert sorted(folder.name for folder in folders) == [f"now-{number}" for number in range(2, 10)]
    assert [json.loads((folder / "manifest.json").read_text())["command"] for folder in folders] == [
        [str(number)] for number in range(8)
    ]


def test_unwritable_place_of_a_run(tmp_path: Path) -> None:
    """A run into a place that cannot be written is refused."""
    (tmp_path / "file").touch()
    assert "cannot be written" in the_line(call("exec", "--out", tmp_path / "file" / "run", "--", "true"), 3)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    assert "no-such-program: no such program" in the_line(
        call("exec", "--out", tmp_path / "r", "--", "no-such-program"), 127
    )
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("command", "meant"), [("exec", "(Did you mean one of: '--otlp', '--out'?)"), ("doctor", "Did you mean '--out'?")]
)
def test_a_misspelt_option_is_no_program(command: str, meant: str, tmp_path: Path) -> None:
    """It is an error with a suggestion; the program's own options are its own."""
    line = the_line(call(command, "--outt", tmp_path / "r", "--", "true"), 2)
    assert line == f"No such option '--outt'. {meant}; see `rltrace {command} --help`"


def test_options_of_the_program(tmp_path: Path) -> None:
    """Options after the program's name are the program's.

    Behind its name, with `--` before it or without.
    """
    for number, before in enumerate(([], ["--"])):
        words = [*EXEC, "--out", str(tmp_path / str(number)), *before, "expr", "--out", "=", "--outt"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "0\n"), done.stderr


def test_exec_keeps_exit_code(tmp_path: Path) -> None:
    """`exec` exits with the code of the program."""
    program = "import rltrace, sys; rltrace.start(); sys.exit(5)"
    command = [sys.executable, "-c", "from rltrace.cli import main; main()", "exec", "--out", str(tmp_path / "run")]
    done = subprocess.run([*command, "--", sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "recorded in" in done.stderr.splitlines()[-1]
    states = [(process["role"], process["state"]) for process in summarize_folder(tmp_path / "run")["processes"]]
    assert sorted(states) == [("process", "ended"), ("sampler", "ended")]


def test_quiet_shows_only_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With RLTRACE_QUIET only problems are reported.

    Not where it was recorded, nor what had nothing to trace, as a program of the standard library alone.
    """
    monkeypatch.setenv("RLTRACE_QUIET", "1")
    program = "import rltrace, os, subprocess, sys; rltrace.start(); subprocess.run([sys.executable, '-c', '0'])"

    def execute(name: str, then: str) -> list[str]:
        words = [*EXEC, "--out", str(tmp_path / name), "--", sys.executable, "-c", f"{program}; {then}"]
        return subprocess.run(words, capture_output=True, text=True, check=False).stderr.splitlines()

    assert execute("well", "0") == []
    (died,) = execute("killed", "os.kill(os.getpid(), 9)")
    assert "SIGKILL" in died
    show_steps(two_ranks(tmp_path / "run").folder)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("quiet", ["0", "1"])
def test_taken_folder_is_told_once(tmp_path: Path, quiet: str) -> None:
    """A program that names a folder of its own is told once that the run's is used.

    However often it does, and only by the first of its ranks; not where it names the run's own folder.
    """
    program = (
        "import msgspec, os, rltrace\n"
        "rltrace.start(os.environ['RLTRACE_DIR'])\n"
        "for rank in (1, 0, 0): rltrace.start('mine', rank=rank)\n"
    )
    folder = tmp_path / "run"
    command = [*EXEC, "--out", folder, "--", sys.executable, "-c", program]
    environment = os.environ | {"RLTRACE_QUIET": quiet}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment)
    told = f"rltrace: recording into {folder}, because this process belongs to that run, and not into mine"
    assert [line for line in done.stderr.splitlines() if "mine" in line] == ([told] if quiet == "0" else [])
    assert not (tmp_path / "mine").exists()


def commands_said(text: str) -> set[str]:
    """The folders that commands of ours in a text are of, as a shell would understand these."""
    return {shlex.split(said)[2] for said in re.findall(r"rltrace (?:view|summary) [^`\n]+", text)}


def test_printed_commands_can_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed commands can be copied, whatever the folder is called."""
    folder = tmp_path / "it's [bold]mine[/]"
    command = [*EXEC, "--out", folder / "exec", "--", sys.executable, "-c", "import msgspec"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert commands_said(done.stderr) == {str(folder / "exec")}
    two_ranks(folder / "run")
    show_steps(folder / "run")
    assert commands_said(capsys.readouterr().out) == {str(folder / "run")}
    with pytest.raises(RunError) as raised:
        report(folder / "run", Outcome(4))
    assert commands_said(str(raised.value)) == {str(folder / "run")}


@pytest.mark.parametrize(
    ("disabled", "warned"),
    [
        ("", []),
        (" fsdp2, ray ,", []),
        (
            "fsdp3,ray,tourch",
            [
                "rltrace: RLTRACE_DISABLE: no instrumentation is called fsdp3, tourch; there are "
                + ", ".join(plugins.INSTRUMENTATIONS)
            ],
        ),
    ],
)
def test_disable_typo_is_warned_once(tmp_path: Path, disabled: str, warned: list[str]) -> None:
    """A typo in RLTRACE_DISABLE is warned of once.

    Also where several processes are traced.
    """
    program = "import msgspec, subprocess, sys; subprocess.run([sys.executable, '-c', 'import msgspec'])"
    command = [*EXEC, "--out", tmp_path / "run", "--", sys.executable, "-c", program]
    environment = os.environ | {"RLTRACE_DISABLE": disabled}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert [line for line in done.stderr.splitlines()[:-1] if ": recording into " not in line] == warned
    roles = [process["role"] for process in summarize_folder(tmp_path / "run")["processes"]]
    assert roles == ["process", "process"]


@pytest.mark.parametrize("command", ["run", "exec"])
def test_help_names_disable_variable(command: str) -> None:
    """The help of commands that trace says how to disable an instrumentation."""
    said = " ".join(call(command, "--help").stdout.split())
    assert "RLTRACE_DISABLE=ray,fsdp2" in said
    assert ", ".join(plugins.INSTRUMENTATIONS) in said
    assert "RLTRACE_QUIET=1" in said


def test_closed_pipe_of_summary_is_quiet(run: Path) -> None:
    """A summary into a pipe that closes is quiet."""
    command = f"{sys.executable} -c 'from rltrace.cli import main; main()' summary {run} | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "2 steps" in done.stdout


def test_exec_code_without_a_reader(tmp_path: Path) -> None:
    """`exec` exits with the command's code even if nobody reads its output."""
    program = f"{sys.executable} -c 'import msgspec, sys; sys.exit(3)'"
    command = f"{shlex.join(EXEC)} --out {tmp_path / 'run'} -- {program}"
    assert subprocess.run(["bash", "-c", f"{command} 2> >(true)"], check=False).returncode == 3


@pytest.mark.parametrize("options", ["--all", "--json"])
def test_closed_pipe_code(run: Path, options: str) -> None:
    """A command whose output nobody reads exits with the code of a closed pipe."""
    command = f"{sys.executable} -c 'from rltrace.cli import main; main()' summary {options} {run} | true"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


def summarize_folder(folder: Path) -> dict[str, list[dict[str, object]]]:
    return dict(json.loads(call("summary", folder, "--json").stdout))


def printed(written: Written, width: int = WIDTH, *, whole: bool = False) -> str:
    return printed_recording(written.read(), width, whole=whole)


def printed_recording(recording: Recording, width: int, *, whole: bool) -> str:
    screen = Console(width=width, file=io.StringIO())
    show(summarize(recording), screen, whole=whole)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def test_tables_fit_100_columns(tmp_path: Path) -> None:
    """The tables fit into a hundred columns and hold the figures."""
    text = printed(two_ranks(tmp_path / "run"), whole=True)
    assert max(map(len, text.splitlines())) <= WIDTH
    for words in ("rollout.generate", "wait.driver", "never fired", "rank 1 engine", "peak 500 B", "0.8", "complete"):
        assert words in text


def test_folder_without_overhead(run: Path) -> None:
    """A folder without a measurement of overhead is said to have none."""
    line = the_line(call("overhead", run), 3)
    assert line.startswith(f"{run}: no measurement of overhead here (overhead.json is missing); ")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_figures_are_shown_in_any_encoding(run: Path, encoding: str) -> None:
    command = [sys.executable, "-m", "rltrace", "summary", run]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    (line,) = [line for line in done.stdout.decode(encoding).splitlines() if line.startswith("rollout.generate")]
    assert "2.250" in line.split()
    assert done.stderr == b""


def test_odd_names_are_shown(tmp_path: Path) -> None:
    """Names that are no text are shown as far as they are.

    A file's name and an argument are bytes.
    """
    folder, word = tmp_path / os.fsdecode(b"run \xff"), os.fsdecode(b"--name=\xfe")
    manifest.create(folder, owner=None, command=["python", word], config={"name": word})
    said = json.loads(call("summary", folder, "--json").stdout)
    assert (said["run"]["path"], said["run"]["command"]) == (f"{tmp_path}/run ?", ["python", "--name=?"])
    shown = call("summary", folder)
    assert shown.exit_code == 0 and "python --name=" in shown.stdout
    assert call("diff", folder, folder, "--json").exit_code == 0


@pytest.mark.parametrize("words", [["summary"], ["summary", "--json"], ["export", "--to", "perfetto", "-o", "-"]])
def test_full_disk_on_stdout_is_one_line(run: Path, words: list[str]) -> None:
    """A full disk behind standard output is one line."""
    command = [sys.executable, "-m", "rltrace", *words, str(run)]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (7, "rltrace: standard output: No space left on device; write elsewhere\n")


WIDTHS = {"160": 160, "60": 60, "": WIDTH, "0": WIDTH, "wide": WIDTH}
SUMMARIES = """
import os, sys
from rltrace.cli import main
for said in sys.argv[2:]:
    os.environ |= {"COLUMNS": said}
    if not said:
        del os.environ["COLUMNS"]
    main(["summary", sys.argv[1]], standalone_mode=False)
    print("\\f")
"""


def test_pipe_width_is_columns(tmp_path: Path) -> None:
    """Output into a pipe is as wide as COLUMNS says; a hundred columns where it is not set or says no number."""
    two_ranks(tmp_path / ("run" * 60))  # its path is folded at any width
    command = [sys.executable, "-c", SUMMARIES, tmp_path / ("run" * 60), *WIDTHS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *pages, _ = done.stdout.split("\f\n")
    assert [max(map(len, page.splitlines())) for page in pages] == [*WIDTHS.values()]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_odd_figures_are_shown(tmp_path: Path, odd: float) -> None:
    """A figure that is no number is shown as what it is."""
    records = [
        sample("loss", 1, odd),
        sample("actor.params_bytes", 1, 10),
        sample("actor.params_bytes", 2, odd),
        span("weight_sync.send", 1, 2, bytes=odd),
        span("step", 0, 5, step=0, reward_mean=odd, kl=odd),
        span("step", 5, 9, step=1, reward_mean=0.5, kl=0.25, loss=2.0),
    ]
    written = Written(tmp_path / "run").process("d", *records, role="driver", ended_s=9)
    assert f"Steps 0-1: reward {odd} → 0.5, kl {odd} → 0.25" in printed(written)
    lines = printed(written, whole=True).splitlines()
    diverged, well = lines[lines.index("Steps") + 3 :][:2]
    assert diverged.split() == ["0", "5.000", str(odd), str(odd), str(odd)]
    assert well.split() == ["1", "4.000", "0.5", "██████████", "0.25", "2"]
    assert "peak 10 B" in "\n".join(lines)
    assert summarize_folder(written.folder)["steps"][0]["reward_mean"] is None


def test_nan_in_a_step_is_summarized(tmp_path: Path) -> None:
    """A recorded step that was given NaN can be summarized."""
    program = (
        "import rltrace; rltrace.start(%r, role='driver'); nan = float('nan')\n"
        "with rltrace.span('step', step=0) as step:\n"
        " rltrace.counter('loss', nan); rltrace.counter('reward_mean', nan); step.set(kl=nan)\n"
    )
    subprocess.run([sys.executable, "-c", program % str(tmp_path / "run")], check=True)
    done = call("summary", "--all", tmp_path / "run")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[lines.index("Steps") + 3].split()[-3:] == ["nan", "nan", "nan"]


def driver_of(folder: Path, *steps: list[list[object]], **ended: float) -> Written:
    """A driver with these steps, and the reward of 1 s in each of them."""
    rewards = [span("reward", step[0][2] / SECOND, step[0][2] / SECOND + 1) for step in steps]
    return Written(folder).process("d", *rewards, *steps, role="driver", **ended)


def test_unfinished_steps_not_in_mean(tmp_path: Path) -> None:
    """Unfinished steps are marked and not in the mean."""
    whole = [span("step", 0, 4, step=0), span("step", 4, 8, step=1)]
    aborted, still_open = span("step", 8, 18, step=2, error="KeyboardInterrupt"), span("step", 18, None, step=3)
    driver = driver_of(tmp_path / "run", *whole, aborted, still_open)
    lines = printed(driver, whole=True).splitlines()
    at = lines.index("Steps") + 3
    assert [" ".join(line.split()) for line in lines[at : at + 4]] == [
        "0 4.000", "1 4.000", "2 10.000 aborted", "3 1.000 open",
    ]  # fmt: skip
    at = lines.index("Phases of each step: mean of 1 process") + 3
    assert [line.split() for line in lines[at : at + 2]] == [
        ["0", "4.000", "1.000", "3.000"], ["1", "4.000", "1.000", "3.000"],
    ]  # fmt: skip
    lines = printed(driver).splitlines()
    at = lines.index("Step 1 (step 0 excluded as warm-up; 1 aborted and 1 unfinished excluded)")
    (reward,) = [line.split()[:3] for line in lines[at:] if line.startswith("reward")]
    assert reward == ["reward", "1.000", "25%"], "of a program that is a driver alone"


def test_phases_of_unfinished_first_step(tmp_path: Path) -> None:
    """Phases of a first step that is not over say so."""
    lines = printed(driver_of(tmp_path / "run", span("step", 0, None, step=0))).splitlines()
    assert "Unfinished step (1): none has ended yet" in lines


def hook_lines(folder: Path, *hooks: dict[str, object], **who: object) -> list[str]:
    """The table of these hooks, its words apart by one blank, down to the first empty line."""
    named = tuple({**one, "slot": slot} for slot, one in enumerate(hooks, 1))
    lines = printed(Written(folder).process("p", hooks=named, ended_s=1, **who), whole=True).splitlines()
    at = lines.index("Hooks") + 3
    return [" ".join(line.split()) for line in lines[at : [*lines, ""].index("", at)]]


def test_waiting_hooks_share_a_line(tmp_path: Path) -> None:
    """Hooks that wait are one line of their instrumentation."""
    assert hook_lines(
        tmp_path / "run",
        hook(0, "m:fires", fires=3),
        hook(0, "m:fails", "failed", reason="TypeError: no"),
        hook(0, "m:unused"),
        hook(0, "n:one", "waiting"),
        hook(0, "n:other", "waiting"),
        hook(0, "o:one", "waiting", instrumentation="absent"),
        hook(0, "o:other", "waiting", instrumentation="absent"),
    ) == [
        "reference",
        "fails 0 failed: TypeError: no",
        "fires 3",
        "unused 0 never fired",
        "2 more wait for modules that were not imported",
        "absent not imported in this run",
    ]


def test_unfired_instrumentation_says_so_once(tmp_path: Path) -> None:
    """An instrumentation of which nothing fired says so once."""
    assert hook_lines(
        tmp_path / "run",
        hook(0, "m:one"),
        hook(0, "m:other"),
        hook(0, "m:broken", "failed", reason="TypeError: no"),
        hook(0, "n:one", "waiting"),
    ) == [
        "reference",
        "2 hooks 0 imported, nothing fired",
        "broken 0 failed: TypeError: no",
        "1 more waits for a module that was not imported",
    ]


def test_a_disabled_instrumentation_says_so_once(tmp_path: Path) -> None:
    hooks = [hook(0, target, "skipped", reason="disabled by RLTRACE_DISABLE") for target in ("m:one", "m:other")]
    assert hook_lines(tmp_path / "run", *hooks) == ["reference skipped: disabled by RLTRACE_DISABLE"]


def test_not_applicable_needs_ranks(tmp_path: Path) -> None:
    """What is not applicable is shown only for a run with ranks."""
    for name, who, is_said in (("plain", {}, False), ("ranks", {"role": "worker", "rank": 0}, True)):
        written = Written(tmp_path / name).process("p", hooks=(hook(1, "m:f", fires=1),), ended_s=1, **who)
        assert ("Not applicable in this run" in printed(written, whole=True)) is is_said


def test_many_ranks_as_mean_and_extremes(tmp_path: Path) -> None:
    """Many ranks are shown as mean, fastest and slowest."""
    written = Written(tmp_path / "run").process("d", span("step", 0, 10, step=0), role="driver", ended_s=10)
    for rank in range(8):
        written.process(f"w{rank}", span("actor.update", 0, 1 + rank), role="worker", rank=rank, ended_s=10)
    line = [line for line in printed(written, whole=True).splitlines() if line.startswith("actor.update  ")][-1]
    assert line.split() == ["actor.update", "4.500", "45%", "████▌", "1.000", "rank", "0", "8.000", "rank", "7"]


def test_killed_run_begins_with_deaths(tmp_path: Path) -> None:
    """The summary of a killed run begins with who died and what it did."""
    written = Written(tmp_path / "run").process("w", span("actor.update", 0, None), role="worker", rank=1)
    text = printed(written.process("d", span("step", 0, 90, step=0), role="driver", ended_s=90))
    assert "rank 1 worker (pid 4194305) died" in text.splitlines()[0]
    assert "90.0 s" in text
    assert "the process died" in text


def test_empty_and_plain_are_readable(tmp_path: Path) -> None:
    """An empty Recording and a plain program are readable."""
    assert "no process has recorded anything" in printed(Written(tmp_path / "empty"))
    plain = Written(tmp_path / "plain").process("p", span("mine", 0, 1), sample("loss", 1, 2.0), role="main", ended_s=1)
    assert "no steps" in printed(plain)
    assert printed(plain).splitlines()[0].endswith(" · nothing lost")

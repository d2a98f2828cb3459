"""A disk that is full, a folder that cannot be written or goes away: the program does not notice, the reader does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

import rltrace
from rltrace.events import Span
from rltrace.read.recording import Process, Recording

LOOKED_AT = str(Path(__file__).parents[1] / "programs" / "until_looked_at.py")
MOUNT = "mount -t tmpfs -o size=2m tmpfs"


def _can_mount() -> bool:
    """In a mount namespace of its own, which a user who is not root may make on most systems."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f"{MOUNT} /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


WAYS = ["limit", "disk"] if _can_mount() else ["limit"]
"""A bound on the size of a file refuses the next segment everywhere; a small disk where one can be mounted."""

CHILD = r"""
import json, os, resource, shutil, sys, time
import rltrace
from rltrace.record import spans, writer

way, folder, copy = sys.argv[1:]
writer.RETRY_NS = 50_000_000
asked = 0

def asking(make):
    def made(*arguments):
        global asked
        asked += 1
        return make(*arguments)
    return made

writer.Segment = asking(writer.Segment)
writer.ProcessFolder = asking(writer.ProcessFolder)
filler = os.path.join(os.path.dirname(folder), "filler")

def fill():
    if way == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, resource.RLIM_INFINITY))  # less than counts.u64
        return
    with open(filler, "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)): pass
        except OSError: pass

def free():
    if way == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    else:
        os.unlink(filler)

written = 0
def work(name, count):
    global written
    for n in range(count):
        with rltrace.span(name, n=n): pass
        written += 2

rltrace.start(folder)
work("before", 100)
fill()
hook = spans.current().hook("i", "m:f" + "x" * 4096, "installed")  # a line that may not fit either

def asks_too_often(name, count):  # once, and once more after each RETRY_NS
    begin_ns, before = time.monotonic_ns(), asked
    work(name, count)
    return asked - before > 1 + (time.monotonic_ns() - begin_ns) // writer.RETRY_NS

work("full", 5000)
impatient = asks_too_often("full", 1000)

def calls_per_span(count):
    calls = 0
    def tally(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")
    sys.setprofile(tally)
    work("full", count)
    sys.setprofile(None)
    return calls / count

calls = calls_per_span(500)
pid = os.fork()
if pid == 0:  # a child born on a full disk
    os._exit(asks_too_often("child", 2000))
child = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
children = len(os.listdir(os.path.join(folder, "processes"))) - 1
free()
time.sleep(0.06)
work("after", 5000)
rltrace.stop()
shutil.copytree(folder, copy)
print(json.dumps({"written": written, "impatient": impatient, "child": child, "children": children, "calls": calls}))
"""


@pytest.mark.parametrize("way", WAYS)
def test_full_disk_counts_losses(tmp_path: Path, process_of: Callable[[Path], Process], way: str) -> None:
    """On a full disk events are lost and counted.

    No SIGBUS, no exception; what was recorded stays, and recording goes on when there is space again.
    """
    small, copy = tmp_path / "small", tmp_path / "copy"
    small.mkdir()
    child = [sys.executable, "-c", CHILD, way, str(small / "run"), str(copy)]
    if way == "disk":
        mount = f'{MOUNT} {small} && exec "$@"'
        child = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *child]
    done = subprocess.run(child, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)

    process = process_of(copy)
    spans = [event for event in process.events() if isinstance(event, Span)]
    complete = {
        name: [s.args["n"] for s in spans if s.name == name and s.end_ns] for name in ("before", "full", "after")
    }
    assert complete["before"] == list(range(100))
    assert 0 < len(complete["full"]) < 6500
    assert complete["after"] == list(range(5000))
    assert process.lost_events > 0 and process.torn == 0
    records = _records_of_spans(process.folder)
    lost_lines = 0 if process.hooks else 1
    assert records + process.lost_events - lost_lines == said["written"], "each is recorded or counted"
    assert process.end_ns is not None
    assert (said["child"], said["children"]) == (0, 0), "a child that cannot have a folder leaves none behind"
    assert not said["impatient"], "a full disk is not asked again for every record"
    assert said["calls"] < 60, "nor does losing one take much longer than recording it, which takes 5 calls"
    assert all(path.stat().st_size for path in process.folder.glob("*.seg")), "nor is an empty file left of each time"


@pytest.mark.skipif("disk" not in WAYS, reason="no disk of its own can be mounted here")
def test_full_disk_keeps_exit_code(tmp_path: Path) -> None:
    """A command whose Recording fills the disk keeps its exit code, and the loss is reported."""
    program = tmp_path / "program.py"
    program.write_text(
        "import subprocess, sys, rltrace\n"
        f"subprocess.run([sys.executable, '-S', {LOOKED_AT!r}, '5'])\n"  # not traced: to be said
        "for n in range(40_000):\n"
        "    with rltrace.span('work', n=n, text='x' * 50): pass\n"
        "sys.exit(5)\n"
    )
    small = tmp_path / "small"
    small.mkdir()
    done = _exec_on(small, "40k", program)
    assert done.returncode == 5, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(
        r"rltrace: [\d,]+ events could not be written: the disk is full; all others are there", done.stderr
    )


@pytest.mark.skipif("disk" not in WAYS, reason="no disk of its own can be mounted here")
def test_a_full_disk_is_the_reason(tmp_path: Path) -> None:
    """Of a process that had no room for its folder; nobody replaced its PYTHONPATH."""
    program = tmp_path / "program.py"
    program.write_text(f"import msgspec, sys; sys.argv.append('45'); exec(open({LOOKED_AT!r}).read(), {{}})")
    small = tmp_path / "small"
    small.mkdir()
    said = _exec_on(small, "12k", program).stderr
    (line,) = [line for line in said.splitlines() if line.startswith("rltrace: not traced: ")]
    assert line.endswith(
        f"{program}: the disk of the Recording is full: there was no room for another process's folder"
    )


def _exec_on(disk: Path, size: str, program: Path) -> subprocess.CompletedProcess[str]:
    """`rltrace exec` of a program, into a small disk of its own: its figures are read where that is still there."""
    cli = [sys.executable, "-c", "from rltrace.cli import main; main()", "exec", "--out", str(disk / "run"), "--"]
    mounted = f'mount -t tmpfs -o size={size} tmpfs {disk} && exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", *cli]
    return subprocess.run([*command, sys.executable, str(program)], capture_output=True, text=True, check=False)


def _records_of_spans(folder: Path) -> int:
    """By another reader than ours."""
    count = 0
    for path in folder.glob("*.seg"):
        records = msgpack.Unpacker(path.open("rb"))
        count += sum(isinstance(record, list) and len(record) > 3 for record in records)
    return count


@pytest.mark.parametrize("place", ["below a file", "in /proc", "a file"])
def test_unwritable_folder_is_one_line(tmp_path: Path, place: str, capsys: pytest.CaptureFixture) -> None:
    """A folder that cannot be written is one line."""
    file = tmp_path / "file"
    file.write_text("mine")
    wanted = {"below a file": file / "run", "in /proc": Path("/proc/rltrace-run"), "a file": file}[place]
    assert rltrace.start(wanted) is None
    with rltrace.span("a"):
        rltrace.counter("c", 1)
    rltrace.stop()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("rltrace: not recording: ") and str(wanted) in said[0]
    assert file.read_text() == "mine"


def test_unjoinable_recording_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A Recording that cannot be joined is one line."""
    (tmp_path / "file").write_text("mine")
    assert rltrace.join(tmp_path / "file") is None
    assert capsys.readouterr().err.startswith(f"rltrace: not recording: {tmp_path / 'file'} cannot be written: ")


def test_deleted_folder_is_not_noticed(folder: Path) -> None:
    """The program does not notice that its folder was deleted during the run."""
    rltrace.start(folder)
    with rltrace.span("a"):
        shutil.rmtree(folder)
        for n in range(5000):
            with rltrace.span("b", n=n):
                pass
    rltrace.identify(name="x")
    rltrace.stop()
    assert not folder.exists()


def test_cut_file_kills_nobody(folder: Path) -> None:
    """A truncated file kills no process.

    A program that overwrites what it has mapped ends as it would have: no page of it is read any more.
    """
    program = (
        f"import pathlib, rltrace; folder = rltrace.start({str(folder)!r})\n"
        "with rltrace.span('a'): pass\n"
        "for file in folder.glob('processes/*/counts.u64'): file.write_bytes(b'')\n"
        "raise SystemExit(4)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (4, "")
    assert Recording.open(folder).is_complete


def test_deleted_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A deleted working directory is one line."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert rltrace.start() is None
    assert len(capsys.readouterr().err.splitlines()) == 1
    os.chdir(tmp_path)


def test_the_default_folder_names_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = rltrace.start()
    rltrace.stop()
    assert path is not None and path.parent == tmp_path / "rltrace-runs"
    assert Recording.open(path).is_complete

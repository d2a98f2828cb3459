"""A reader opens regular files of sensible size: whatever else has a name in a Recording is named and passed over."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from recordings import Written, span, two_ranks

from rltrace.cli import main
from rltrace.errors import RecordingError
from rltrace.host import regular_file
from rltrace.limits import LIMITS, NO_LIMITS
from rltrace.read.recording import Recording
from rltrace.record.segment import NEXT_BYTES

HOLES_BYTES = 100 << 30


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def holes(path: Path) -> None:
    path.touch()
    os.truncate(path, HOLES_BYTES)


def folder(path: Path) -> None:
    path.mkdir()


def listening(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


MADE = [pipe, device, link, holes, folder, listening]
FILES = ["processes/driver/000009.seg", "processes/driver/counts.u64", "processes/driver/process.jsonl", "clocks.jsonl"]
FILES += ["untraced.jsonl", "ending.json", "cluster.json"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return two_ranks(tmp_path / "run").folder


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("make", MADE)
def test_irregular_file_is_not_read(run: Path, make: Callable[[Path], None], file: str) -> None:
    """Anything but a regular file is named and not read.

    A pipe or a device would never end; the rest of the run is read as ever.
    """
    (run / file).unlink(missing_ok=True)
    make(run / file)
    recording = Recording.open(run)
    (refused,) = recording.refused
    assert refused.startswith(f"{run / file}: ")
    assert ("107,374,182,400 bytes" in refused) == (make is holes)
    events = [event for process in recording.processes for event in process.events()]
    assert len(events) > 20 and recording.ending is None and recording.untraced == []
    assert sum(process.torn for process in recording.processes) == file.endswith(".seg")


@pytest.mark.parametrize("command", [("summary",), ("summary", "--json"), ("export", "--to", "archive", "-o", "-")])
def test_commands_name_unread_files(run: Path, command: tuple[str, ...]) -> None:
    """Every command says what it did not read."""
    pipe(run / "processes" / "driver" / "000009.seg")
    done = call(*command, run)
    assert done.exit_code == 0
    said = f"rltrace: not read: {run}/processes/driver/000009.seg: a pipe, not a regular file"
    assert done.stderr.splitlines()[0] == said


def test_of_many_the_first_are_named(run: Path) -> None:
    for number in range(10, 30):
        link(run / "processes" / "driver" / f"0000{number}.seg")
    lines = call("summary", run).stderr.splitlines()
    assert len(lines) == 6 and lines[-1] == "rltrace: not read: 15 more files, for reasons such as these"


@pytest.mark.parametrize("make", MADE)
def test_no_manifest_is_one_line(run: Path, make: Callable[[Path], None]) -> None:
    """Without a manifest it is one line."""
    (run / "manifest.json").unlink()
    make(run / "manifest.json")
    done = call("summary", run)
    assert (done.exit_code, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rltrace: {run}/manifest.json: cannot be read: ")
    assert ("--no-limits" in line) == (make is holes)


@pytest.mark.parametrize("what", ["processes", "processes/driver"])
def test_linked_folder_leads_nowhere(run: Path, tmp_path: Path, what: str) -> None:
    """A folder that is a link is not followed.

    Its files would come into an archive that the user hands on.
    """
    (run / what).rename(tmp_path / "mine")
    (run / what).symlink_to(tmp_path / "mine")
    recording = Recording.open(run)
    assert recording.refused == [f"{run / what}: a link, not a regular file"]
    assert "driver" not in {process.key for process in recording.processes}
    done = CliRunner().invoke(main, ["export", str(run), "--to", "archive", "-o", str(tmp_path / "out.zip")])
    assert done.exit_code == 0, done.output
    assert "driver" not in {process.key for process in Recording.open(tmp_path / "out.zip").processes}


def test_recordings_folder_may_be_a_link(run: Path, tmp_path: Path) -> None:
    """The Recording's own folder may be a link."""
    (tmp_path / "newest").symlink_to(run)
    recording = Recording.open(tmp_path / "newest")
    assert len(recording.processes) == 5 and recording.refused == []


def test_largest_segment_is_read(tmp_path: Path) -> None:
    """The largest segment that is written is read, and a larger one only with --no-limits."""
    assert LIMITS.segment_bytes >= NEXT_BYTES
    written = Written(tmp_path / "run").process("p", span("act", 0, 1), ended_s=2)
    segment = written.folder / "processes" / "p" / "000001.seg"
    os.truncate(segment, LIMITS.segment_bytes)
    assert written.read().refused == []
    os.truncate(segment, LIMITS.segment_bytes + 1)
    (refused,) = written.read().refused
    assert "4,194,305 bytes" in refused and "4,194,304" in refused and "--no-limits" in refused
    lifted = Recording.open(written.folder, limits=NO_LIMITS)
    assert lifted.refused == [] and [event.name for event in lifted.processes[0].events()] == ["act"]
    assert "act" not in call("summary", written.folder, "--all").stdout
    done = call("summary", written.folder, "--all", "--no-limits")
    assert "act" in done.stdout and done.stderr == ""


def test_endless_line_takes_no_memory(tmp_path: Path) -> None:
    """An endless line takes no memory.

    A hundred megabytes of zeros are within the limits of a file of lines; the lines around it are read.
    """
    path = tmp_path / "x.jsonl"
    path.write_text("first\nsecond")
    os.truncate(path, 128 << 20)
    with path.open("a") as file:
        file.write("\nlast\n")
    program = f"""if True:
        import resource
        from pathlib import Path
        from rltrace.host import regular_file
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        lines = [line[:8] for line in regular_file.lines(Path({str(path)!r}))]
        assert lines == ["first", "second" + chr(0) * 2, "last"], lines
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"""
    grown_kib = int(subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout)
    assert grown_kib < 100 << 10


def test_growing_file_is_read_so_far(tmp_path: Path) -> None:
    """A file that grows while it is read is read up to where it ended first."""
    path = tmp_path / "x.json"
    path.write_bytes(b"x" * 10)
    assert regular_file.read(path) == b"x" * 10
    with pytest.raises(FileNotFoundError):
        regular_file.read(tmp_path / "y.json")
    with pytest.raises(FileNotFoundError):
        list(regular_file.lines(tmp_path / "y.jsonl"))


def test_no_file_stays_open(run: Path) -> None:
    for number, make in enumerate(MADE):
        make(run / "processes" / "driver" / f"00001{number}.seg")
    before = len(os.listdir("/proc/self/fd"))
    for process in Recording.open(run).processes:
        list(process.events())
    assert len(os.listdir("/proc/self/fd")) == before


def test_pipe_as_a_run_is_one_line(tmp_path: Path) -> None:
    """A run that is a pipe or a device is one line."""
    pipe(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(RecordingError, match="cannot be read"):
            Recording.open(path)


def test_holes_take_no_memory(run: Path) -> None:
    holes(run / "processes" / "driver" / "000009.seg")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for process in Recording.open(run).processes:
        list(process.events())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100 << 10

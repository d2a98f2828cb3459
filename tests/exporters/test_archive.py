"""A Recording as one file: every reader opens it as it opens the folder, and refuses what is none."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result
from recording_file import RecordingFile
from rltrace_exporters import archive
from rltrace_exporters.archive import Archive
from shipped import RECORDINGS
from test_perfetto import export as as_perfetto

from rltrace.cli import main
from rltrace.errors import RecordingError
from rltrace.limits import LIMITS, NO_LIMITS, Limits
from rltrace.read.recording import Recording

PROGRAM = """
import sys, rltrace

rltrace.start(sys.argv[1], role="driver")
with rltrace.span("step", step=0), rltrace.phase("reward"):
    rltrace.counter("allocated_bytes", 4096)
with rltrace.span("hangs"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace")


def archived(run: Path) -> Path:
    """RUN.zip, made by the command."""
    file = run.with_name(f"{run.name}.zip")
    done = call("export", run, "--to", "archive", "-o", file)
    assert done.exit_code == 0, done.output
    return file


def summary(run: Path) -> str:
    """What `rltrace summary --json` prints, its path apart."""
    done = call("summary", run, "--json")
    assert done.exit_code == 0, done.output
    path = json.dumps(str(run))
    assert done.stdout.count(path) == 1
    return done.stdout.replace(path, "")


def the_refusal(file: Path) -> str:
    """The one line that a command says of it."""
    done = call("summary", file)
    assert (done.exit_code, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert str(file) in line
    return line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two processes of two hosts, spans, samples and arrows, and a record that its process died in."""
    recording = RecordingFile(tmp_path / "run")
    recording.belongs_to("boot")
    recording.exchanges("boot", "other", (0, 5_000, 10_000))
    driver = recording.process(role="driver").thread()
    driver.span("step", 0, 90, step=0)
    driver.begin("ray.execute", 10)
    driver.flow("call", 11, "out")
    driver.end(10, 80)
    worker = recording.process(101, host="there", boot="other", rank=0).thread()
    worker.begin("weight_sync", 20)
    worker.flow("call", 21, "in")
    worker.end(20, 70, bytes=512)
    worker.counter("actor.params_bytes", 71, 4096)
    worker.span("hangs", 72, 73)
    worker.tear(3)
    return recording.path


@pytest.fixture
def live(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A program inside a span, with the Recording `tmp_path/live`."""
    command = [sys.executable, "-c", PROGRAM, tmp_path / "live"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    yield child
    child.kill()
    child.communicate()


def test_archive_has_same_summary(run: Path) -> None:
    """An archive has the same summary as its folder."""
    said = summary(run)
    assert '"torn": 1' in said or '"torn_records": 1' in said
    assert summary(archived(run)) == said


def test_archive_has_same_timeline(run: Path) -> None:
    """An archive has the same timeline as its folder."""
    assert as_perfetto(archived(run)) == as_perfetto(run)


def test_archive_stands_alone(run: Path, tmp_path: Path) -> None:
    """An archive opens under any name, and after the folder that it was made from is gone."""
    said = summary(run)
    file = archived(run).rename(tmp_path / "sent by mail")
    run.rename(tmp_path / "elsewhere")
    assert summary(file) == said
    assert Recording.open(file).name == "sent by mail"


def test_segments_lose_trailing_zeros_only(run: Path) -> None:
    """An archive leaves out the zeros after the last record of each segment, and no record."""
    with zipfile.ZipFile(archived(run)) as packed:
        segments = list(run.glob("processes/*/*.seg"))
        assert len(segments) == 2
        for segment in segments:
            content = packed.read(segment.relative_to(run.parent).as_posix())
            whole = segment.read_bytes()
            assert content == whole.rstrip(b"\0") and len(whole) >= 4096 > len(content) > 0


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("/opt/venv/bin/python3", ".../python3"),
        ("data.train_files=/home/me/in/rows.parquet", "data.train_files=.../rows.parquet"),
        ("data.files=[/home/me/a.parquet,'/home/me/b c.parquet']", "data.files=[.../a.parquet,'.../b c.parquet']"),
        ("--sock=/tmp/ray/session_1/sockets/raylet", "--sock=.../raylet"),
        ("/usr/lib/x.so: cannot open /home/me/lib/", ".../x.so: cannot open .../lib"),
        ("PATH=/usr/bin:/home/me/bin", "PATH=.../bin:.../bin"),
        ("examples/laptop.yaml", "examples/laptop.yaml"),
        ("../data/rows.parquet", "../data/rows.parquet"),
        ("https://host/a/b/c s3://bucket/a/b", "https://host/a/b/c s3://bucket/a/b"),
        ("actor/lr 1/2 and /tmp", "actor/lr 1/2 and /tmp"),
        ("torch.distributed.fsdp:FSDP.forward", "torch.distributed.fsdp:FSDP.forward"),
    ],
)
def test_paths_keep_last_name_only(run: Path, text: str, kept: str) -> None:
    """An archive keeps only the last name of each path, and its figures are those of the folder.

    This holds for the manifest and for what processes say of themselves.
    """
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "command": [text], "config": {"a": [{"b": text}]}}))
    lines = min(run.glob("processes/*/process.jsonl"))
    lines.write_text(
        lines.read_text() + json.dumps({"kind": "unavailable", "what": "nccl", "reason": text}) + '\n{"cut'
    )
    (run / "untraced.jsonl").write_text(json.dumps({"pid": 1, "command": [text, "x"], "reason": "no"}) + "\n")
    found = Recording.open(archived(run))
    assert (found.manifest["command"], found.manifest["config"]) == ([kept], {"a": [{"b": kept}]})
    assert kept in [reason for process in found.processes for reason in process.unavailable.values()]
    assert found.untraced[0]["command"] == [kept, "x"]
    said, archived_says = (json.loads(call("summary", it, "--json").stdout) for it in (run, found.path))
    for figures in (said, archived_says):
        del figures["run"], figures["untraced"]
    assert archived_says == said


def test_other_files_stay_in_the_folder(run: Path) -> None:
    """Files of others in the folder are not packed."""
    (run / "trace.pftrace").write_bytes(bytes(100))
    (run / "processes" / "notes").mkdir()
    (run / "processes" / "notes" / "secret.txt").write_text("mine")
    with zipfile.ZipFile(archived(run)) as packed:
        assert not [name for name in packed.namelist() if name.endswith((".pftrace", ".txt"))]


def test_archives_are_reproducible(run: Path, tmp_path: Path) -> None:
    """The same Recording gives the same bytes, and so does an archive of it that is archived again."""
    file = archived(run)
    os.utime(run / "manifest.json", (0, 0))
    renamed = tmp_path / "renamed.zip"
    renamed.write_bytes(file.read_bytes())
    for source in (run, file, renamed):
        again = io.BytesIO()
        Archive().write(Recording.open(source), again)
        assert again.getvalue() == file.read_bytes()


def test_dropped_segment_is_skipped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that is dropped meanwhile is skipped, and no file in the archive has a time.

    A time would make two archives of one Recording differ, and reveal when its run was.
    """
    files = list(archive._files(run))
    monkeypatch.setattr(archive, "_files", lambda _: [files[0], run / "processes" / "p" / "000001.seg", *files[1:]])
    packed = io.BytesIO()
    Archive().write(Recording.open(run), packed)
    with zipfile.ZipFile(packed) as found:
        assert len(found.infolist()) == len(files)
        assert {info.date_time for info in found.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_an_archive_that_zip_made_opens_too(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "made.zip"
    with zipfile.ZipFile(file, "w") as packed:
        for path in run.rglob("*"):
            packed.write(path, path.relative_to(run))
    assert summary(file) == summary(run)


def test_a_run_that_goes_on_can_be_archived(live: subprocess.Popen[str], tmp_path: Path) -> None:
    file = archived(tmp_path / "live")
    (process,) = Recording.open(file).processes
    found = {event.name: getattr(event, "end_ns", 0) is None for event in process.events()}
    assert (found.pop("hangs"), set(found)) == (True, {"step", "reward", "allocated_bytes"})
    assert (process.torn, process.end_ns) == (0, None)


def test_unpacked_files_go_at_exit(run: Path, tmp_path: Path) -> None:
    """Unpacked files are deleted when the process ends."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = (
        "import os, sys; from rltrace.read.recording import Recording; recording = Recording.open(sys.argv[1])\n"
        "assert len(recording.processes) == 2 and len(os.listdir(os.environ['TMPDIR'])) == 1"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", program, archived(run)], check=True, env=environment)
    assert list(temporary.iterdir()) == []


def test_unpacked_files_go_at_sigterm(run: Path, tmp_path: Path) -> None:
    """Unpacked files are deleted when SIGTERM ends `rltrace view`, which goes on until it is ended."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = "import sys; from rltrace.cli import main; main(['view', '--no-open', '--online', sys.argv[1]])"
    command = [sys.executable, "-c", program, archived(run)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert child.stdout is not None and "http" in child.stdout.readline()
    while child.stdout.readline() != "Ctrl-C ends.\n":
        assert child.poll() is None
    assert list(temporary.iterdir()) != []
    child.send_signal(signal.SIGTERM)
    child.communicate()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("keep", [0, 20, 0.5, -1])
def test_a_file_that_was_cut_is_refused(run: Path, keep: float) -> None:
    file = archived(run)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if 0 < keep < 1 else int(keep)])
    assert "not a Recording: not a complete zip file" in the_refusal(file)


def test_a_file_that_was_altered_is_refused(run: Path) -> None:
    file = archived(run)
    content = bytearray(file.read_bytes())
    at = content.index(b"manifest.json") + 40
    content[at : at + 8] = bytes(8)
    file.write_bytes(content)
    assert "not a Recording: not a complete zip file" in the_refusal(file)


def test_a_zip_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "photos.zip"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("holiday/sea.png", b"")
        packed.writestr("holiday/far/below/manifest.json", b"{}")
    assert "photos.zip: holds no Recording (manifest.json is missing)" in the_refusal(file)


@pytest.mark.parametrize(
    "way_out", ["../stolen", "run/../../stolen", "/tmp/stolen", "C:\\stolen", "run\\..\\..\\stolen"]
)
def test_path_traversal_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way_out: str) -> None:
    """A path that leads out of the folder is refused, and nothing is unpacked."""
    file = archived(run)
    with zipfile.ZipFile(file, "a") as packed:
        packed.writestr(way_out, b"")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert "would be written outside of the folder" in the_refusal(file)
    assert list(temporary.iterdir()) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where archives are unpacked."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def packed_zeros(file: Path, name: str, size_bytes: int) -> None:
    """Add a file of zeros to an archive, which pack to a thousandth."""
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as packed, packed.open(name, "w", force_zip64=True) as out:
        block = bytes(16 << 20)
        for _ in range(size_bytes // len(block)):
            out.write(block)


def says_it_holds(file: Path, name: str, size_bytes: int) -> None:
    """Have an archive's list say another size of a file than it has."""
    with zipfile.ZipFile(file) as packed:
        true_bytes = packed.getinfo(name).file_size
    content = file.read_bytes()
    at = content.rindex(name.encode()) - 22  # its size in the list, before its name
    assert int.from_bytes(content[at : at + 4], "little") == true_bytes
    file.write_bytes(content[:at] + size_bytes.to_bytes(4, "little") + content[at + 4 :])


def test_memory_bomb_is_refused(run: Path, temporary: Path) -> None:
    """An archive that would fill the memory is refused before it is unpacked, unless `--no-limits` is given."""
    file = archived(run)
    packed_zeros(file, "run/processes/p/000001.seg", 16 << 20)
    line = the_refusal(file)
    assert "it holds 16,777,216 bytes in 'run/processes/p/000001.seg', and the limit is 4,194,304" in line
    assert "--no-limits" in line
    assert list(temporary.iterdir()) == []
    assert call("summary", file, "--no-limits").exit_code == 0


def test_disk_bomb_is_refused(run: Path, temporary: Path) -> None:
    """An archive that would fill the disk is refused before it is unpacked.

    It says of itself that it holds two gigabytes in twenty kilobytes, as one of zeros would.
    """
    file = archived(run)
    for name in ("run/1.jsonl", "run/2.jsonl"):
        packed_zeros(file, name, 16 << 20)
        says_it_holds(file, name, 1 << 30)
    line = the_refusal(file)
    assert "it holds 2,147," in line and " times its own size, and the limit is 100 times; --no-limits" in line
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (LIMITS._replace(unpacked_bytes=500), r"it holds [\d,]+ bytes, and the limit is 500; --no-limits"),
        (LIMITS._replace(depth=2), "it holds folders 3 deep, and the limit is 2; --no-limits"),
        (LIMITS._replace(files=5), "it holds 7 files, and the limit is 5; --no-limits"),
        (LIMITS._replace(expansion=1, expansion_from_bytes=0), "times its own size, and the limit is 1 times; --no"),
        (LIMITS._replace(document_bytes=50), r"it holds \d+ bytes in 'run/manifest.json', and the limit is 50; --no"),
    ],
)
def test_each_limit_is_said_with_what_was_found(run: Path, temporary: Path, limits: Limits, said: str) -> None:
    file = archived(run)
    packed_zeros(file, "run/x.jsonl", 16 << 20)
    with pytest.raises(RecordingError, match=said):
        Recording.open(file, limits=limits)
    assert list(temporary.iterdir()) == []
    assert len(Recording.open(file, limits=NO_LIMITS).processes) == 2


def test_stated_size_is_not_trusted(run: Path, temporary: Path) -> None:
    """The size that an archive states for a file is not trusted.

    Its list says 10 bytes for a segment of 16 MiB: no more than these are unpacked, and they are refused.
    """
    file = archived(run)
    packed_zeros(file, "run/processes/p/000001.seg", 16 << 20)
    says_it_holds(file, "run/processes/p/000001.seg", 10)
    assert "not a complete zip file: Bad CRC-32" in the_refusal(file)
    assert list(temporary.iterdir()) == []


def test_free_disk_is_checked(run: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that is larger than the free disk space is refused, and the error gives both values."""
    file = archived(run)
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage(free=7))
    line = the_refusal(file)
    assert f"{temporary} has 7 free; make room there, or set TMPDIR" in line


class _Usage(NamedTuple):
    free: int


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_other_compression_is_refused(run: Path, temporary: Path, method: int, is_damaged: bool) -> None:
    """A file that was compressed by another method is refused, whether it is whole or damaged."""
    file = archived(run)
    with zipfile.ZipFile(file, "a", method) as packed:
        packed.writestr("run/processes/p/000002.seg", os.urandom(1000))
    if is_damaged:
        content = bytearray(file.read_bytes())
        at = content.index(b"000002.seg") + 40
        content[at : at + 8] = bytes(8)
        file.write_bytes(content)
    assert f"is packed by method {method}, rltrace reads deflate (8) and stored (0)" in the_refusal(file)
    assert list(temporary.iterdir()) == []


def test_what_is_unpacked_is_for_its_user_alone(run: Path, temporary: Path) -> None:
    Recording.open(archived(run))
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_shipped_archives_are_far_below_limits() -> None:
    """The shipped archives stay far below every limit."""
    shipped = list(RECORDINGS.glob("*.zip"))
    assert shipped
    for file in shipped:
        with zipfile.ZipFile(file) as packed:
            sizes = {entry.filename: entry.file_size for entry in packed.infolist()}
        assert len(sizes) * 100 < LIMITS.files and sum(sizes.values()) * 100 < LIMITS.unpacked_bytes
        assert sum(sizes.values()) < 10 * file.stat().st_size
        assert max(size / LIMITS.of(name) for name, size in sizes.items()) <= 0.25
        assert Recording.open(file).refused == []


def test_nothing_is_collected_into_an_archive(run: Path) -> None:
    done = call("collect", archived(run))
    assert done.exit_code == 3
    assert "run.zip: an archive, which is read-only" in done.stderr

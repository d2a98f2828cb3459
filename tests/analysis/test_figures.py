"""A second reading gives what the first one gave, for as long as the Recording is the same; else it is read anew."""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from file_limit import files_of_at_most
from recordings import NO_PID, Written, sample, span, two_ranks, two_workers
from shipped import SHIPPED, summary_of, why_of

from rltrace.analysis import figures as kept_figures
from rltrace.analysis.encoded import as_json
from rltrace.analysis.figures import Figures, figures
from rltrace.analysis.findings import why
from rltrace.analysis.summary import Analysed, analyse
from rltrace.cli import main
from rltrace.read import cache
from rltrace.read.recording import Recording
from rltrace.read.selection import Selection, numbers
from rltrace.record import checksum, manifest

Reads = list[Path]
"""What was read from its segments, in order."""


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of_user"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found: Reads = []

    def counted(recording: Recording) -> Analysed:
        found.append(recording.path)
        return analyse(recording)

    monkeypatch.setattr(kept_figures, "analyse", counted)
    return found


def said(found: Figures) -> tuple[bytes, bytes]:
    return as_json(found.summary), as_json(found.why)


def said_by_segments(path: Path) -> tuple[bytes, bytes]:
    analysed = analyse(Recording.open(path))
    return as_json(analysed.summary), as_json(why(analysed))


def over(written: Written) -> Path:
    """Return the folder of a Recording whose owner is gone; that of the others is this very process."""
    file = written.folder / manifest.FILE
    said = json.loads(file.read_text()) | {"owner_pid": NO_PID}
    del said["sum"]
    file.write_text(checksum.signed(json.dumps(said)))
    return written.folder


def kept_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("archive", SHIPPED, ids=lambda path: path.stem)
def test_same_bytes(archive: Path, reads: Reads) -> None:
    """The Recordings that ship say the same from segments and from what was kept; an archive's lies in the user's own
    cache."""
    first, second = (said(figures(Recording.open(archive))) for _ in range(2))
    assert first == second == (as_json(summary_of(archive)), as_json(why_of(archive)))
    assert reads == [archive]


def _in_a_segment(run: Path) -> None:
    file = run / "processes" / "quick" / "000001.seg"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"think", b"thank"))


def _in_lines(run: Path) -> None:
    with (run / "processes" / "quick" / "process.jsonl").open("a") as lines:
        lines.write(json.dumps({"kind": "process", "role": "other"}) + "\n")


def _by_a_process(run: Path) -> None:
    shutil.copytree(run / "processes" / "quick", run / "processes" / "third")


def _by_a_lost_process(run: Path) -> None:
    shutil.rmtree(run / "processes" / "quick")


def _by_an_ending(run: Path) -> None:
    (run / "ending.json").write_text(checksum.signed(json.dumps({"exit_code": 3, "interrupted_by": None})) + "\n")


CHANGES = (_in_a_segment, _in_lines, _by_a_process, _by_a_lost_process, _by_an_ending)


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_recording_is_read_anew(tmp_path: Path, reads: Reads, change: Callable[[Path], None]) -> None:
    """Whatever file of it changes; and what is kept then is of the changed one."""
    run = over(two_workers(tmp_path / "run"))
    before = said(figures(Recording.open(run)))
    change(run)
    after = [said(figures(Recording.open(run))) for _ in range(2)]
    assert after[0] == after[1] == said_by_segments(run) != before
    assert len(reads) == 2


def test_other_code_reads_anew(tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another rltrace computed is not believed, whatever version it says."""
    run = over(two_workers(tmp_path / "run"))
    figures(Recording.open(run))
    monkeypatch.setattr(cache, "code", lambda: 1)
    figures(Recording.open(run))
    assert len(reads) == 2


def _cut(content: bytes, at: int) -> bytes:
    return content[:at]


def _altered(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [_cut, _altered])
def test_a_damaged_cache_is_told(tmp_path: Path, reads: Reads, damage: Callable[[bytes, int], bytes]) -> None:
    """Wherever it is cut or altered: the figures come from the segments, and the next reading has a whole one again."""
    run = over(two_workers(tmp_path / "run"))
    whole = said(figures(Recording.open(run)))
    (file,) = kept_in(run / cache.FOLDER)
    content = file.read_bytes()
    for at in range(0, len(content), len(content) // 40):
        file.write_bytes(damage(content, at))
        found = figures(Recording.open(run))
        assert (found.damaged, said(found)) == ([f"{file}: damaged"], whole), at
        assert file.read_bytes() == content
        assert figures(Recording.open(run)).damaged == []
    file.write_bytes(damage(content, 200))
    done: Result = CliRunner().invoke(main, ["why", str(run)], prog_name="rltrace")
    assert done.exit_code == 0
    assert f"rltrace: not used: {file}: damaged; the figures come from the segments" in done.stderr


def test_no_room_beside_it(tmp_path: Path, reads: Reads) -> None:
    """Where a Recording cannot be written to, its figures are kept in the user's own cache."""
    run = over(two_workers(tmp_path / "run"))
    (run / cache.FOLDER).write_text("a file, where a folder is to be made")
    assert said(figures(Recording.open(run))) == said(figures(Recording.open(run)))
    assert (len(reads), len(kept_in(tmp_path / "of_user"))) == (1, 1)


def test_a_link_is_not_followed(tmp_path: Path, reads: Reads) -> None:
    """A Recording of somebody else cannot make its reader write somewhere."""
    run = over(two_workers(tmp_path / "run"))
    (tmp_path / "elsewhere").mkdir()
    (run / cache.FOLDER).symlink_to(tmp_path / "elsewhere")
    figures(Recording.open(run))
    assert kept_in(tmp_path / "elsewhere") == []


def test_nowhere_to_write(tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the figures come from the segments each time, and nothing else happens."""
    run = over(two_workers(tmp_path / "run"))
    (run / cache.FOLDER).write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(run / cache.FOLDER))
    assert said(figures(Recording.open(run))) == said(figures(Recording.open(run)))
    assert len(reads) == 2


def test_a_disk_that_fills(tmp_path: Path, reads: Reads) -> None:
    """A part of a cache does not stay: neither beside the Recording nor elsewhere."""
    run = over(two_workers(tmp_path / "run"))
    whole = said_by_segments(run)
    with files_of_at_most(500):
        now = said(figures(Recording.open(run)))
    assert now == whole
    assert kept_in(run / cache.FOLDER) + kept_in(tmp_path / "of_user") == []


def test_a_run_that_goes_on(tmp_path: Path, reads: Reads) -> None:
    """Its figures are of this moment, and not kept."""
    written = Written(tmp_path / "run")
    alive = {"pid": os.getpid(), "start_ticks": manifest.started_ticks(os.getpid())}
    over(written)
    written.process("alive", span("step", 1, 2, step=0), span("act", 1, None), **alive)
    for _ in range(2):
        assert figures(written.read()).summary.run.is_live
    assert len(reads) == 2
    assert not (written.folder / cache.FOLDER).exists()


def test_a_segment_that_nobody_closed(tmp_path: Path, reads: Reads) -> None:
    """Its process may be alive on another host and write through a mapping, of which the file's times say nothing."""
    written = Written(tmp_path / "run")
    written.process("elsewhere", sample("reward_mean", 1, 2), host="another", role="driver")
    over(written)
    file = written.folder / manifest.PROCESSES / "elsewhere" / "000001.seg"
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        at = mapped.find(b"reward_mean")
        mapped[at] = ord("R")  # the times are of this write
        before = file.stat()
        figures(written.read())
        mapped[at] = ord("r")
        assert file.stat().st_mtime_ns == before.st_mtime_ns
        after = figures(written.read())
    assert (said(after), len(reads)) == (said_by_segments(written.folder), 2)


def test_a_part_is_computed(tmp_path: Path, reads: Reads) -> None:
    """What is kept is of the whole Recording only."""
    run = over(two_ranks(tmp_path / "run"))
    whole = figures(Recording.open(run)).summary
    part = figures(Recording.open(run), Selection(None, numbers("1"))).summary
    assert {row.rank for row in part.weight_sync} == {1} != {row.rank for row in whole.weight_sync}
    assert len(reads) == 2


def test_no_part_of_the_recording(tmp_path: Path) -> None:
    """An archive of a Recording, and the bytes that `ls` says, are the same with a cache and without."""

    def call(*words: object) -> str:
        done = CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace")
        assert done.exit_code == 0, done.output
        return done.stdout

    run = over(two_ranks(tmp_path / "runs" / "run"))

    def shown() -> tuple[str, bytes]:
        call("export", run, "--to", "archive", "--output", tmp_path / "run.zip")
        return call("ls", tmp_path / "runs", "--json"), (tmp_path / "run.zip").read_bytes()

    before = shown()
    call("summary", run)
    assert kept_in(run / cache.FOLDER)
    (tmp_path / "run.zip").unlink()
    assert shown() == before


@pytest.mark.parametrize(("limit", "most", "left"), [("MOST_OF_USER", 2, 2), ("MOST_BYTES_OF_USER", 10, 1)])
def test_the_users_cache_stays_small(
    limit: str, most: int, left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest files go, of too many and of too many bytes; the newest stays, however long it is."""
    monkeypatch.setattr(cache, limit, most)
    for number in range(4):
        run = over(two_workers(tmp_path / str(number)))
        (run / cache.FOLDER).write_text("")
        figures(Recording.open(run))
    assert len(kept_in(tmp_path / "of_user")) == left

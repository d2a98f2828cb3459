"""`rltrace collect --compact` replaces segments by columns, and no reader shows anything else than before."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from file_limit import files_of_at_most
from hypothesis import given, settings
from hypothesis import strategies as st
from part_of_recording import first_rank_of
from shipped import QWEN, SHIPPED, opened

import rltrace
from rltrace import plugins
from rltrace.analysis.encoded import as_json
from rltrace.analysis.figures import figures
from rltrace.analysis.listing import listed
from rltrace.cli import main
from rltrace.errors import RecordingError
from rltrace.events import Span
from rltrace.read import packed
from rltrace.read.following import Follower
from rltrace.read.packed import Packed, Store
from rltrace.read.recording import Recording
from rltrace.run.compaction import compact


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted((folder / "processes").glob(f"*/*{suffix}"))


def exported(recording: Recording, kind: str, out: Path) -> bytes:
    with out.open("wb") as file:
        plugins.load(plugins.EXPORTERS[kind])().write(recording, file)
    return out.read_bytes()


def said(folder: Path) -> dict[str, Any]:
    """Return the events and the figures of a Recording."""
    recording = Recording.open(folder)
    summary = as_json(figures(recording).summary)
    return {"events": {process.key: [*process.events()] for process in recording.processes}, "summary": summary}


def shown(folder: Path, out: Path) -> dict[str, Any]:
    """Return what all readers show of it."""
    recording = Recording.open(folder)
    followed = [(news.process.key, news.ended, news.samples, news.losses) for news in Follower(recording).poll()]
    frame = rltrace.open(folder)
    tables = {table: frame.sql(f"select * from {table}") for table in ("spans", "counters", "flows")}
    return said(folder) | {
        "why": as_json(figures(recording).why),
        "timeline": exported(recording, "perfetto", out),
        "listed": [msgspec.structs.replace(run, size_bytes=0) for run in listed(folder) if not isinstance(run, str)],
        "followed": followed,
        "sql": tables,
    }


def record(folder: Path, *, spans: int = 18_000) -> Path:
    """Record a run whose segments have checksums, in two threads' worth of kinds of records."""
    rltrace.start(folder, role="driver")
    for step in range(3):
        with rltrace.span("step", step=step, tokens=100), rltrace.phase("rollout.generate"):
            for n in range(spans // 3):
                with rltrace.span("own", n=n, text=f"number {n}"):
                    rltrace.counter("loss", n / 3)
    rltrace.stop()
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recorded") / "run")


@pytest.fixture(scope="module")
def whole(recorded: Path) -> dict[str, list[Any]]:
    """All that was recorded, by process."""
    return {process.key: [*process.events()] for process in Recording.open(recorded).processes}


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(recorded, tmp_path / "run")


@pytest.mark.parametrize("archive", SHIPPED, ids=lambda path: path.stem)
def test_readers_show_the_same_of_shipped_recordings(archive: Path, tmp_path: Path) -> None:
    """Events and figures are as before; what processes had open when they were killed stays."""
    folder = first_rank_of(archive, tmp_path)
    before = said(folder)
    unsealed = sum(len(process.names_of_unsealed) for process in Recording.open(folder).processes)
    done = compact(Recording.open(folder))
    assert done.left == len(files(folder, ".seg")) == unsealed < done.segments
    after = said(folder)
    assert [what for what in before if before[what] != after[what]] == []


@pytest.mark.parametrize("archive", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recordings_take_a_seventh(archive: Path, tmp_path: Path) -> None:
    """Whole ones have less than a seventh of their bytes when they are compacted."""
    folder = shutil.copytree(opened(archive).folder, tmp_path / "run")
    done = compact(Recording.open(folder))
    assert done.after_bytes < done.before_bytes / 7


def test_readers_show_the_same_of_a_recorded_run(run: Path, tmp_path: Path) -> None:
    """Findings, timeline, SQL and news are as before too, and an archive of it has them; nothing is left to compact."""
    before = shown(run, tmp_path / "timeline")
    many = len(files(run, ".seg"))
    assert compact(Recording.open(run)).segments == many > 3 and files(run, ".seg") == []
    after = shown(run, tmp_path / "timeline")
    assert [what for what in before if before[what] != after[what]] == []
    again = compact(Recording.open(run))
    assert (again.segments, again.before_bytes) == (0, again.after_bytes)
    archive = tmp_path / "archives" / "run.zip"
    archive.parent.mkdir()
    exported(Recording.open(run), "archive", archive)
    assert said(archive)["events"] == before["events"]
    assert [run.steps for run in listed(archive.parent) if not isinstance(run, str)] == [3]


def test_what_is_open_or_damaged_stays(run: Path) -> None:
    """A segment that nobody closed and one that has changed stay as they are; the rest is compacted."""
    first, second, *others = files(run, ".seg")
    content = bytearray(first.read_bytes())
    content[1000] ^= 1
    first.write_bytes(content)
    lines = second.parent / "process.jsonl"
    sealed = [line for line in lines.read_text().splitlines() if f'"segment": "{second.name}"' not in line]
    lines.write_text("\n".join(sealed) + "\n")
    before = figures(Recording.open(run)).summary
    assert compact(Recording.open(run)).left == 2
    assert files(run, ".seg") == [first, second] and others
    assert first.read_bytes() == bytes(content)
    assert as_json(figures(Recording.open(run)).summary) == as_json(before)


@pytest.mark.parametrize("where", ["head", "block", "cut"])
def test_damaged_columns_are_said(run: Path, where: str) -> None:
    """Every reader of columns that have changed says how many segments are damaged, and shows the others."""
    many = len(files(run, ".seg"))
    compact(Recording.open(run))
    (columns,) = files(run, ".columns")
    content = bytearray(columns.read_bytes())
    if where == "cut":
        del content[-100:]
    else:  # a single bit may say nothing to zlib
        at = 20 if where == "head" else len(content) - 100
        content[at : at + 20] = b"x" * 20
    columns.write_bytes(content)
    recording = Recording.open(run)
    (losses,) = figures(recording).summary.losses
    assert losses.damaged_segments == (many if where == "head" else 1)
    assert bool([*recording.processes[0].events()]) == (where != "head")
    said = CliRunner().invoke(main, ["summary", str(run)]).output
    assert "damaged" in said
    *_, news = Follower(Recording.open(run)).poll()
    assert news.losses.damaged_segments == 1 or where == "head"


def test_damaged_columns_of_an_older_run_are_said(tmp_path: Path) -> None:
    """So it is in a run that has no checksums of segments, where nothing else says that one is missing."""
    folder = first_rank_of(QWEN, tmp_path)
    compact(Recording.open(folder))
    columns = max(files(folder, ".columns"), key=lambda path: path.stat().st_size)
    columns.write_bytes(b"x" + columns.read_bytes())
    assert sum(one.damaged_segments for one in figures(Recording.open(folder)).summary.losses) == 1


@pytest.mark.parametrize("seed", range(6))
def test_a_kill_leaves_segments_or_columns(
    recorded: Path, whole: dict[str, list[Any]], tmp_path: Path, seed: int
) -> None:
    """Whenever a compaction is killed, all records are there, and the next one finishes it."""
    run = shutil.copytree(recorded, tmp_path / "run")
    program = (
        "import os, random, signal, sys\n"
        "from pathlib import Path\n"
        "from rltrace.read.recording import Recording\n"
        "from rltrace.run import compaction\n"
        "compaction.FILE_BYTES = 1 << 18\n"
        "left = int(sys.argv[2])\n"
        "def count(event, args):\n"
        "    global left\n"
        "    if event in ('open', 'os.link', 'os.remove', 'os.rename'):\n"
        "        left -= 1\n"
        "        if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "recording = Recording.open(sys.argv[1])\n"
        "recording.processes\n"
        "sys.addaudithook(count)\n"
        "compaction.compact(recording)\n"
    )
    chance = random.Random(seed)
    died = subprocess.run([sys.executable, "-c", program, str(run), str(chance.randrange(5, 120))], check=False)
    assert died.returncode in (-signal.SIGKILL, 0)
    found = Recording.open(run)
    assert {process.key: [*process.events()] for process in found.processes} == whole
    assert figures(found).summary.losses == []
    compact(found)
    assert files(run, ".seg") == [] and files(run, packed.UNFINISHED) == []
    assert {process.key: [*process.events()] for process in Recording.open(run).processes} == whole


def test_a_full_disk_leaves_segments(run: Path) -> None:
    """If columns cannot be written, one line says so, and everything is as it was."""
    before = {path: path.read_bytes() for path in files(run, "")}
    with files_of_at_most(10_000):
        result = CliRunner().invoke(main, ["collect", "--compact", str(run)])
    assert result.exit_code == 3 and "nothing is lost: make room and compact it again" in result.output
    assert {path: path.read_bytes() for path in files(run, "")} == before


def test_a_run_that_goes_on_is_refused(tmp_path: Path) -> None:
    """Nobody takes segments away from processes that may still write, or drop them to keep to a budget."""
    rltrace.start(tmp_path / "run", role="driver")
    with rltrace.span("own"):
        pass
    with pytest.raises(RecordingError, match="still run here"):
        compact(Recording.open(tmp_path / "run"))
    rltrace.stop()


def test_the_command_says_bytes(run: Path) -> None:
    """It says how many bytes there were and are, and fetches nothing."""
    result = CliRunner().invoke(main, ["collect", "--compact", str(run)])
    assert result.exit_code == 0, result.output
    assert "bytes of segments and columns before" in result.output and "now" in result.output
    assert CliRunner().invoke(main, ["collect", "--compact", str(QWEN)]).exit_code != 0


def test_a_reader_goes_on_in_columns(run: Path) -> None:
    """A follower that has begun gives the rest of a segment that was replaced meanwhile."""
    whole = sorted(event.start_ns for event in Recording.open(run).processes[0].events() if isinstance(event, Span))
    follower = Follower(Recording.open(run))
    news = follower.poll()
    found = [span.start_ns for span in next(iter(news)).ended]
    compact(Recording.open(run))
    found += [span.start_ns for one in news for span in one.ended]
    assert sorted(found) == whole


codes = st.sampled_from([b"\xcf", b"\xcb", b"\xd3", b"\xc3\x95", b"\0", b"\xa4work\0"])


@settings(max_examples=300)
@given(st.lists(codes | st.binary(max_size=12)))
def test_any_bytes_come_back(parts: list[bytes]) -> None:
    """What is packed is restored byte for byte, whatever it is."""
    content = b"".join(parts)
    assert packed.unpack(packed.pack(content), len(content)) == content


@settings(max_examples=300)
@given(st.lists(codes | st.binary(max_size=12)), st.data())
def test_columns_that_changed_are_told(parts: list[bytes], data: st.DataObject) -> None:
    """Columns with a byte changed are damaged, or give as many bytes as before; nothing else is raised."""
    content = b"".join(parts)
    block = bytearray(packed.pack(content))
    block[data.draw(st.integers(0, len(block) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert len(packed.unpack(bytes(block), len(content))) == len(content)
    except packed.DamagedError:
        pass


def test_an_earlier_state_of_a_segment_is_not_read(run: Path) -> None:
    """A file that was collected while it was being written is passed over once its columns are there."""
    segment = files(run, ".seg")[-1]
    part = segment.read_bytes()[:10_000]
    whole = said(run)
    compact(Recording.open(run))
    segment.write_bytes(part)
    assert said(run) == whole


def test_no_column_file_is_replaced(tmp_path: Path) -> None:
    """A second file of the same segment gets another name, and the newest one that is whole counts."""
    first = packed.write(tmp_path, [Packed("000001.seg", b"one"), Packed("000002.seg", b"two")])
    second = packed.write(tmp_path, [Packed("000001.seg", b"one")])
    assert (first.name, second.name) == ("000001.columns", "000001-2.columns")
    store = Store(tmp_path)
    assert [*store.look()] == ["000001.seg", "000002.seg"] and store.read("000002.seg") == b"two"

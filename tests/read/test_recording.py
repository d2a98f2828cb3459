"""The reader: it gives back what was written, whatever happened to the files afterwards."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import pytest
import recordings
from hypothesis import given, settings
from hypothesis import strategies as st

import rltrace
from rltrace.analysis.summary import summarize
from rltrace.errors import RecordingError
from rltrace.events import VERSION, Counter, Span
from rltrace.read.recording import Process, Recording, newest
from rltrace.record import manifest, redaction, spans
from rltrace.record.error_message import message_of
from rltrace.record.process import append_exit

# ---------------------------------------------------------------- round trip

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
keys = st.text(min_size=1, max_size=8).filter(lambda key: key != "error")
arguments = st.dictionaries(keys, values, max_size=4)


@dataclass
class Node:
    """A span to be made, and what is inside it."""

    name: str
    args: dict[str, Any]
    late: dict[str, Any]
    fails: bool
    inside: list[Any]


trees = st.recursive(
    st.builds(Node, st.text(max_size=9), arguments, arguments, st.booleans(), st.just([])),
    lambda inner: st.builds(
        Node, st.text(max_size=9), arguments, arguments, st.booleans(), st.lists(inner, max_size=4)
    ),
    max_leaves=10,
)


def _make(node: Node) -> None:
    try:
        with rltrace.span(node.name, **node.args) as span:
            for inner in node.inside:
                _make(inner)
            if node.late:
                span.set(**node.late)
            if node.fails:
                raise KeyError(node.name)
    except KeyError:
        pass


def _expected(node: Node, depth: int = 0) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Depth, name and arguments in the order of the ends."""
    for inner in node.inside:
        yield from _expected(inner, depth + 1)
    yield depth, node.name, {**node.args, **node.late, **(_failure(node) if node.fails else {})}


def _failure(node: Node) -> dict[str, str]:
    return {"error": "KeyError"} | message_of(KeyError(node.name))


def _depths(spans: list[Span]) -> Iterator[int]:
    for span in spans:
        around = [s for s in spans if s.start_ns < span.start_ns and s.end_ns > span.end_ns]
        yield len(around)


@settings(max_examples=40, deadline=None)
@given(st.lists(trees, min_size=1, max_size=4))
def test_whatever_is_recorded_is_read_back(roots: list[Node]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = rltrace.start(f"{folder}/run")
        for root in roots:
            _make(root)
        rltrace.stop()
        (process,) = Recording.open(path).processes
        spans = list(process.events())
    wanted = [item for root in roots for item in _expected(root)]
    assert [(span.name, span.args) for span in spans] == [(name, args) for _, name, args in wanted]
    assert list(_depths(spans)) == [depth for depth, _, _ in wanted]
    assert process.torn == process.orphans == process.lost_events == 0


def test_nan_is_recorded(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """Not-a-number is recorded as such."""
    rltrace.start(folder)
    rltrace.counter("c", math.nan)
    rltrace.counter("c", math.inf)
    rltrace.stop()
    first, second = process_of(folder).events()
    assert math.isnan(first.value) and second.value == math.inf


def test_reading_twice_says_the_same(folder: Path, process_of: Callable[[Path], Process]) -> None:
    rltrace.start(folder)
    rltrace.flow("outside", "out")
    with rltrace.span("a", b=1) as span:
        rltrace.flow("f", "in")
        span.set(c=2)
    rltrace.stop()
    (path,) = folder.glob("processes/*/*.seg")
    path.write_bytes(path.read_bytes() + b"\x92")
    process = process_of(folder)
    first = (list(process.events()), process.torn, process.orphans)
    assert first == (list(process.events()), process.torn, process.orphans)
    assert first[1:] == (1, 1)


# ---------------------------------------------------------------- damage


SPANS = 200
"""As many of each kind roll over into a second segment, which is the larger one."""


class Written:
    """A Recording of two segments, and where each record of the second ends in its file."""

    def __init__(self, folder: Path, segments: list[bytes], ends: list[int], events: list[Any]) -> None:
        self.folder = folder
        self.segments = segments
        self.ends = ends
        self.events = events

    def __repr__(self) -> str:  # a failing example is shown with it
        return "Written()"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written") / "run"
    rltrace.start(folder)
    spans.current().hook("i", "m:f", "installed").fired()
    rltrace.pause()
    rltrace.resume()
    typed = rltrace.typed_span("typed", bytes=int)
    for n in range(SPANS):
        with rltrace.span("outer", n=n, text="é" * (n % 40)):
            with typed(n) as span:
                span.set(late=[n, None, {"k": 1.5}])
            rltrace.counter("c_bytes", n)
            rltrace.flow(f"f{n}", "out")
            rltrace.span_at("request", n, n + 1, lane=7, n=n)
    rltrace.stop()
    paths = sorted(folder.glob("processes/*/*.seg"))
    segments = [path.read_bytes() for path in paths]
    assert len(segments) == 2
    (process,) = Recording.open(folder).processes
    return Written(folder, segments, list(_record_ends(segments[1])), list(process.events()))


def _record_ends(data: bytes) -> Iterator[int]:
    """By msgpack's own reader of one object after another."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    for _ in unpacker:
        yield unpacker.tell()


def _read_damaged(written: Written, damaged: bytes) -> tuple[list[Any], Process]:
    """What the reader makes of the Recording with another second segment."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(written.folder, copy)
        sorted(copy.glob("processes/*/*.seg"))[1].write_bytes(damaged)
        (process,) = Recording.open(copy).processes
        return list(process.events()), process


@functools.cache
def _over_before(written: Written, end: int) -> list[Any]:
    """What is over in the Recording whose second segment is cut behind a record."""
    events, _ = _read_damaged(written, written.segments[1][:end])
    return _over(events)


def _over(events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, Counter) or event.end_ns is not None]


def test_undamaged_is_as_made(written: Written) -> None:
    """The undamaged Recording is what was made."""
    assert [e.args for e in written.events if e.name == "typed"] == [
        {"bytes": n, "late": [n, None, {"k": 1.5}]} for n in range(SPANS)
    ]
    assert [e.flows_out for e in written.events if e.name == "outer"] == [(f"f{n}",) for n in range(SPANS)]
    assert len(written.events) == 4 * SPANS


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_truncated_segment(written: Written, data: st.DataObject) -> None:
    """A truncated segment gives exactly what lies before the cut."""
    whole = written.segments[1]
    boundaries = st.sampled_from(written.ends)
    cut = data.draw(st.integers(0, len(whole) - 1) | boundaries)
    zeros = data.draw(st.sampled_from([0, 5000]))  # a segment that nobody closed
    events, process = _read_damaged(written, whole[:cut] + bytes(zeros))
    over = _over(events)
    assert over == written.events[: len(over)]
    still_open = events[len(over) :]
    assert len(still_open) <= 2 and all(event.name in ("outer", "typed") for event in still_open)
    if not zeros:
        assert process.torn == (cut not in (0, *written.ends))
    assert process.torn <= 1


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_corrupt_segment_keeps_earlier_events(written: Written, data: st.DataObject) -> None:
    """A corrupt segment never raises, and what lies before the damage is read."""
    whole = bytearray(written.segments[1])
    first = data.draw(st.integers(0, len(whole) - 1))
    noise = data.draw(st.binary(min_size=1, max_size=40))
    whole[first : first + len(noise)] = noise
    events, process = _read_damaged(written, bytes(whole))
    intact = sum(end <= first for end in written.ends)
    sure = _over_before(written, written.ends[intact - 1] if intact else 0)
    assert _over(events)[: len(sure)] == sure
    for event in events:
        assert isinstance(event.name, str) and isinstance(event.thread, int)
        if isinstance(event, Span):
            assert isinstance(event.start_ns, int) and isinstance(event.args, dict)
            assert event.end_ns is None or event.end_ns >= event.start_ns
    assert process.torn <= 1 + len(written.ends)


@settings(max_examples=60, deadline=None)
@given(noise=st.binary(max_size=300))
def test_noise_never_raises(written: Written, noise: bytes) -> None:
    """Noise in place of a segment never raises."""
    events, _ = _read_damaged(written, noise)
    first = _over_before(written, 0)
    assert _over(events)[: len(first)] == first


@pytest.mark.parametrize("name", ["process.jsonl", "counts.u64"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_files_never_raise(written: Written, name: str, data: st.DataObject) -> None:
    """A damaged file beside the segments never raises."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(written.folder, copy)
        (path,) = copy.glob(f"processes/*/{name}")
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content)))
        damage = data.draw(st.sampled_from(["cut", "overwritten", "a line is gone"]))
        if damage == "cut":
            content = content[:at]
        elif damage == "overwritten":
            content[at : at + 3] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            lines = content.splitlines(keepends=True)
            del lines[data.draw(st.integers(0, len(lines) - 1))]
            content = bytearray(b"".join(lines))
        path.write_bytes(content)
        recording = Recording.open(copy)
        if not recording.processes:  # who it was is damaged: it is in no figure, and all that it wrote counts as lost
            (lost,) = recording.unidentified
            assert recording.lost_events == lost.records >= len(written.events)
            return
        (process,) = recording.processes
        said = (process.host, process.pid, process.role, process.rank, process.name, process.device, process.parent)
        assert len(said) == 7 and process.clock_domain and isinstance(process.unix_offset_ns, int)
        assert isinstance(process.is_alive, bool) and isinstance(recording.lost_events, int)
        assert len(list(process.events())) == len(written.events)


def test_segment_dropped_while_read(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """A segment that is dropped while it is read is skipped."""
    rltrace.start(folder)
    for n in range(3000):
        with rltrace.span("a", n=n):
            pass
    rltrace.stop()
    events = process_of(folder).events()
    first = next(events)
    sorted(folder.glob("processes/*/*.seg"))[1].unlink()
    rest = list(events)
    assert [e.args["n"] for e in (first, *rest)] == list(range(len(rest) + 1)) and len(rest) < 2999


def test_read_while_written(folder: Path, process_of: Callable[[Path], Process]) -> None:
    """A Recording can be read while it is written."""
    rltrace.start(folder)
    with rltrace.span("running"):
        for n in range(5):
            with rltrace.span("over", n=n):
                pass
            process = process_of(folder)
            names = [(event.name, event.end_ns is None) for event in process.events()]
            assert names == [("over", False)] * (n + 1) + [("running", True)]
            assert process.torn == 0 and process.end_ns is None
    rltrace.stop()


@pytest.mark.parametrize(
    "damaged",
    [["whole", 0, 100, 50, {}, True], [100, 50, None, True]],
    ids=["ends before it begins", "an end before its beginning"],
)
def test_impossible_record_is_torn(damaged: list[Any], folder: Path) -> None:
    """A whole record that cannot be right is counted as torn, and the rest is read."""
    begin, sample = ["a", 0, 100, {}, True], ["c", 120, 1, True]
    recording = recordings.Written(folder).process("p", [begin, damaged, sample, [100, 130, None, True]]).read()
    (process,) = recording.processes
    assert [event.name for event in process.events()] == ["c", "a"]
    assert (process.torn, process.orphans) == (1, 0)


@pytest.mark.parametrize(
    "useless",
    [[5, 7, 0, 100, None, True], [None, 100, 7, True], ["b", 0, 110, "sideways", True]],
    ids=["no such kind of span", "no such record", "no such direction"],
)
def test_meaningless_record_is_lost(useless: list[Any], folder: Path) -> None:
    """A whole record that makes no sense is counted as lost, and the rest is read."""
    begin, sample = ["a", 0, 100, {}, True], ["c", 120, 1, True]
    recording = recordings.Written(folder).process("p", [begin, useless, sample, [100, 130, None, True]]).read()
    (process,) = recording.processes
    events = list(process.events())
    assert [event.name for event in events] == ["c", "a"] and not events[1].flows_in
    assert (process.misfits, process.lost_events, process.torn, process.orphans) == (1, 1, 0, 0)


def test_equal_starts_in_two_threads(folder: Path) -> None:
    """Spans of two threads that began in the same nanosecond are told apart."""
    recording = recordings.Written(folder).process("p", [["first", 0, 100, {}, True]]).read()
    other, main = [8, "other", True], [recordings.THREAD, "MainThread", True]
    later = (
        [other, ["second", 0, 100, {}, True]],
        [main, [100, 110, {"of": "first"}, True]],
        [other, [100, 115, {"of": "second"}, True]],
    )
    for number, records in enumerate(later, start=2):
        (folder / f"processes/p/{number:06d}.seg").write_bytes(b"".join(map(msgpack.packb, records)))
    (process,) = recording.processes
    found = [(span.name, span.thread, span.end_ns, span.args) for span in process.events()]
    assert found == [("first", recordings.THREAD, 110, {"of": "first"}), ("second", 8, 115, {"of": "second"})]
    assert process.orphans == 0


def test_new_folder_is_no_process_yet(folder: Path) -> None:
    """A process that has just made its folder does not exist yet for readers."""
    rltrace.start(folder)
    (folder / "processes" / "new").mkdir()
    (process,) = Recording.open(folder).processes
    assert process.key == spans.current().key
    rltrace.stop()


def test_end_is_read_after_a_torn_line(folder: Path) -> None:
    """How a process ended is read even if it died in its last line."""
    recordings.Written(folder).process("p", role="worker")
    own = folder / "processes" / "p"
    with (own / "process.jsonl").open("a") as lines:
        lines.write('{"kind": "hook", "slot": 1, "inst')
    append_exit(own, end_ns=5, killed_by=9, was_stopped=False)
    assert (Process(own).role, Process(own).killed_by, Process(own).end_ns) == ("worker", 9, None)


@pytest.mark.parametrize(("host", "is_alive"), [(socket.gethostname(), True), ("elsewhere", False)])
def test_pid_counts_on_its_host_only(folder: Path, host: str, is_alive: bool) -> None:
    """A pid says something on its own host only."""
    mine = {"pid": os.getpid(), "start_ticks": manifest.started_ticks(os.getpid())}
    (process,) = recordings.Written(folder).process("p", host=host, **mine).read().processes
    assert process.is_alive is is_alive


# ---------------------------------------------------------------- manifest


def test_no_recording_says_what_to_do(tmp_path: Path) -> None:
    """A folder that is no Recording says what to do."""
    with pytest.raises(RecordingError, match=r"no Recording here \(manifest.json is missing\); give the folder"):
        Recording.open(tmp_path)
    with pytest.raises(RecordingError, match=r"nowhere: no such file or folder; give the folder"):
        Recording.open(tmp_path / "nowhere")
    path = rltrace.start(tmp_path / "run")
    rltrace.stop()
    with pytest.raises(RecordingError, match=f"did you mean {path}"):
        Recording.open(tmp_path)
    assert newest(tmp_path).folder == path
    with pytest.raises(RecordingError, match="make one with"):
        newest(tmp_path / "nowhere")


@pytest.mark.parametrize("names", ["abc", "bca", "cab"])
def test_newest_is_the_last_made(names: str, tmp_path: Path) -> None:
    """The newest Recording is the one made last, whatever its name."""
    for age_s, name in enumerate(names):
        manifest.create(tmp_path / name, owner=None, command=[], config=None)
        os.utime(tmp_path / name / manifest.FILE, (1000 - age_s, 1000 - age_s))
    assert newest(tmp_path).folder == tmp_path / names[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"version": "1"}', "\x00\xff"])
def test_a_damaged_manifest_says_where(folder: Path, content: str) -> None:
    rltrace.start(folder)
    rltrace.stop()
    (folder / "manifest.json").write_text(content)
    with pytest.raises(RecordingError, match=f"{folder}/manifest.json: damaged"):
        Recording.open(folder)


def test_newer_format_is_refused(folder: Path) -> None:
    """A newer format is refused with both versions."""
    rltrace.start(folder)
    rltrace.stop()
    fields = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**fields, "version": VERSION + 1}))
    said = f"written in format {VERSION + 1}, but this rltrace reads formats up to {VERSION}; upgrade"
    with pytest.raises(RecordingError, match=said):
        Recording.open(folder)


SECRET = "s3cr3t-Value"
secret_names = st.sampled_from(
    ["api_key", "apiKey", "OPENAI_API_KEY", "wandb.token", "hf-token", "accessToken", "PASSWORD", "db_passwd", "secret"]
)
harmless = st.text(alphabet="abcdef_", min_size=1, max_size=6).filter(lambda name: name not in ("dsn",))
configs = st.recursive(
    st.dictionaries(secret_names, st.just(SECRET), min_size=1)
    | st.just({"url": f"https://user:{SECRET}@host/path"})
    | st.just({"header": f"Authorization: Bearer {SECRET}"})
    | st.just({"env": [f"sk-{SECRET}", f"X=hf_{SECRET}"]}),
    lambda inner: st.dictionaries(harmless, inner | st.lists(inner, max_size=2), max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(configs)
def test_manifest_has_no_secret(config: dict[str, Any]) -> None:
    """No secret of a configuration reaches the manifest."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        manifest.create(path, owner=None, command=[], config=config)
        assert SECRET not in (path / "manifest.json").read_text()


def test_what_is_no_secret_stays_readable() -> None:
    config = {
        "max_tokens": 5,
        "tokenizer": "x",
        "model": {"keys_per_page": 3, "path": "/m"},
        "monkey": 1,
        "api_key": None,
    }
    assert redaction.value(config) == config


def test_unwritable_config_keeps_the_run(tmp_path: Path) -> None:
    """A configuration that cannot be written does not stop the run."""
    circle: dict[str, Any] = {}
    circle["self"] = circle
    odd = {(1, 2): Path("/x"), 3: {4, 5}}
    for n, config in enumerate((circle, odd)):
        path = rltrace.start(tmp_path / str(n), config=config)
        rltrace.stop()
        assert path is not None
    assert "unreadable" in Recording.open(tmp_path / "0").manifest["config"]
    assert Recording.open(path).manifest["config"] == {"(1, 2)": "/x", "3": "{4, 5}"}


def test_disk_has_no_secret(folder: Path) -> None:
    """No secret of the command line or the environment reaches the disk."""
    code = "import sys, rltrace; rltrace.start(sys.argv[1]); rltrace.counter('c', 1); rltrace.stop()"
    words = [
        *("--api-key", SECRET),
        f"--hf-token={SECRET}",
        f"trainer.token={SECRET}",
        f"+trainer.wandb.api_key={SECRET}",
        f"https://me:{SECRET}@host",
        f"Authorization: Bearer {SECRET}",
    ]
    environment = {"PYTHONPATH": ":".join(sys.path), "WANDB_API_KEY": SECRET}
    subprocess.run([sys.executable, "-c", code, str(folder), *words, "--rank", "3"], check=True, env=environment)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    command = Recording.open(folder).manifest["command"]
    assert command[-2:] == ["--rank", "3"] and command[4:6] == ["--api-key", "[redacted]"]


def test_order_by_host_and_start(folder: Path) -> None:
    """Processes are ordered by host and start."""
    rltrace.start(folder)
    rltrace.stop()
    (own,) = folder.glob("processes/*")
    line = json.loads((own / "process.jsonl").read_text().splitlines()[0])
    del line["sum"]  # of this host's line
    for host, start_ns in itertools.product("ba", (3, 1)):
        other = own.with_name(f"{host}-1-{start_ns}")
        other.mkdir()
        (other / "process.jsonl").write_text(json.dumps({**line, "host": host, "start_ns": start_ns}) + "\n")
    found = [(process.host, process.start_ns) for process in Recording.open(folder).processes]
    assert found == sorted(found) and found[:4] == [("a", 1), ("a", 3), ("b", 1), ("b", 3)]


def test_late_plugin_keeps_the_role(tmp_path: Path) -> None:
    """A process keeps the role it named when a late plug-in cannot name one."""
    folder = tmp_path / "processes" / "host-1-0"
    folder.mkdir(parents=True)
    said = [{"pid": 1, "role": "process"}, {"role": "engine"}, {"role": "process"}, {"name": "mine"}]
    (folder / "process.jsonl").write_text("".join(json.dumps({"kind": "process", **line}) + "\n" for line in said))
    process = Process(folder)
    assert (process.role, process.rank, process.name) == ("engine", None, "mine")
    (folder / "process.jsonl").write_text(json.dumps({"kind": "process", **said[0]}) + "\n")
    assert Process(folder).role == "process"


def test_many_processes_without_a_parent(tmp_path: Path) -> None:
    """Reading takes time in proportion to the processes, though nobody knows the parent of any."""
    seconds = []
    for many in (250, 1000):
        written = recordings.Written(tmp_path / str(many))
        for number in range(many):
            written.process(f"p{number}", recordings.span("a", number, number + 1), pid=10 + number, ended_s=number + 2)
        began = time.process_time()
        assert len(summarize(written.read()).processes) == many
        seconds.append(time.process_time() - began)
    assert seconds[1] < 9 * seconds[0] + 0.1  # quadratic would be 16 times

"""`--steps`, `--ranks` and `--time` give every reader the same part of a run."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from recordings import Written, span, two_ranks, two_workers
from shipped import QWEN, VERL

from rltrace.analysis import browsable
from rltrace.cli import main
from rltrace.read.selection import numbers


def call(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], prog_name="rltrace")


def figures(*words: object) -> Any:
    done = call(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def slices(file: Path) -> list[str]:
    """Names of the slices in a trace, by Perfetto's own classes; of a sequence's own numbers."""
    trace = Trace()
    for packet in Trace.FromString(file.read_bytes()).packet:
        trace.MergeFromString(zlib.decompress(packet.compressed_packets))
    names: dict[tuple[int, int], str] = {}
    found = []
    for packet in trace.packet:
        sequence = packet.trusted_packet_sequence_id
        names |= {(sequence, entry.iid): entry.name for entry in packet.interned_data.event_names}
        if packet.track_event.type in (1, 3):
            found.append(packet.track_event.name or names[sequence, packet.track_event.name_iid])
    return found


PLACE = {"steady", "lane"}
"""What a step says of its place among others."""


@pytest.mark.parametrize("run", [QWEN, VERL], ids=lambda path: path.stem)
def test_one_steps_figures_are_its_row(run: Path) -> None:
    """The figures of one chosen step are those of its row.

    Of real runs: the step, each rank's phases, its weight sync and its sleeps are what the whole says of it.
    """
    whole, part = figures("summary", run), figures("summary", run, "--steps", 2)
    assert part["steady"]["steps"] == [2] and not part["steady"]["has_first"]
    for section in ("steps", "phases", "weight_sync"):
        rows = [row for row in whole[section] if row["step"] == 2]
        assert rows and part[section] == rows, section
    (step,) = part["steps"]
    assert part["steady"]["seconds"]["mean_seconds"] == step["seconds"]
    for lane in part["steady"]["lanes"]:
        (row,) = (row for row in whole["phases"] if (row["step"], row["lane"]) == (2, lane["lane"]))
        for name, phase in lane["phases"].items():
            assert phase["mean_seconds"] == row["phases"][name]["seconds"]
    for memory in part["memory"]:
        (other,) = (one for one in whole["memory"] if one["rank"] == memory["rank"])
        assert 0 < memory["peak_bytes"] <= other["peak_bytes"]


def test_chosen_steps_all_count(tmp_path: Path) -> None:
    """The first one too: whoever names it wants it."""
    run = two_ranks(tmp_path / "run").folder
    assert figures("summary", run)["steady"]["steps"] == [1]
    assert figures("summary", run, "--steps", "0-1")["steady"]["steps"] == [0, 1]
    only = figures("summary", run, "--steps", 0)["steady"]
    assert (only["steps"], only["first_step"], only["has_first"]) == ([0], None, False)


def test_chosen_ranks_are_the_only_ones(tmp_path: Path) -> None:
    """The driver stays, whose steps they are."""
    found = figures("summary", two_ranks(tmp_path / "run").folder, "--ranks", 1)
    assert {lane["lane"] for lane in found["steady"]["lanes"]} == {"driver", "rank 1"}
    assert {process["rank"] for process in found["processes"]} == {None, 1}
    assert [memory["rank"] for memory in found["memory"]] == [1]


def test_samplers_are_those_of_chosen_ranks(tmp_path: Path) -> None:
    """A sampler of a host on which other ranks are is left out; one that shares a host with no rank is not."""
    written = Written(tmp_path / "run").process("d", span("step", 0, 9, step=0), role="driver", host="a", ended_s=9)
    for rank, host in enumerate(("a", "b")):
        written.process(f"w{rank}", span("reward", 1, 2), role="worker", rank=rank, host=host, ended_s=9)
    for host in ("a", "b", "c"):
        written.process(f"s{host}", role="sampler", host=host, ended_s=9)
    found = figures("summary", written.folder, "--ranks", "1")
    assert {process["key"] for process in found["processes"]} == {"d", "w1", "sb", "sc"}


def test_unnumbered_steps_keep_their_place(tmp_path: Path) -> None:
    """Steps without a number keep their place."""
    run = Written(tmp_path / "run")
    run.process("loop", *(span("step", at, at + at) for at in (1, 2, 4, 8)), role="driver", ended_s=16)
    (step,) = figures("summary", run.folder, "--steps", 2)["steps"]
    assert (step["step"], step["seconds"]) == (2, 4)


def test_processes_with_own_steps(tmp_path: Path) -> None:
    """Processes with steps of their own have their own windows."""
    found = figures("summary", two_workers(tmp_path / "run").folder, "--steps", 2)
    assert {step["lane"].partition(" ")[0]: (step["start_seconds"], step["seconds"]) for step in found["steps"]} == {
        "slow": (20, 10), "quick": (9, 4),
    }  # fmt: skip


def test_difference_of_a_step(tmp_path: Path) -> None:
    """Both sides have the steps that were chosen."""
    found = figures("diff", QWEN, VERL, "--steps", "2", "--ranks", "0")
    assert [found[side]["steps"] for side in "ab"] == [[2], [2]]
    assert [found[side]["ranks"] for side in "ab"] == [1, 1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "9"), "steps 9: no such step; the run has steps 0-1"),
        (("--steps", "0,5-7"), "steps 5-7: no such step; the run has steps 0-1"),
        (("--ranks", "2"), "ranks 2: no such rank; the run has ranks 0-1"),
        (("--time", "99:"), "time 99: begins after the run, which lasted 31.0 s"),
        (("--steps", "1", "--time", ":5"), "steps 1 and time 0:5 do not overlap"),
        (("--steps", "one"), "'one' is neither a number nor a range; write 3, 100-110 or 1,5-7"),
        (
            ("--time", "7"),
            "'7' is not a time from A to B; write 10:20, 10: or :20, in seconds from the start of the run",
        ),
    ],
)
def test_missing_part_names_existing(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """A part that does not exist is an error that names what exists."""
    run = two_ranks(tmp_path / "run").folder
    file = tmp_path / "out.pftrace"
    for command in (("export", run, "-o", file), ("view", run, "--no-open")):
        done = call(*command, *words)
        assert (done.exit_code, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert said in line and not file.exists()


def test_no_steps_or_ranks(tmp_path: Path) -> None:
    """A run without steps or ranks says so."""
    run = Written(tmp_path / "run").process("one", span("work", 1, 2), role="main", ended_s=3).folder
    assert "steps 0: no such step; the run has no steps" in call("summary", run, "--steps", 0).stderr
    assert "ranks 0: no such rank; the run has no ranks" in call("summary", run, "--ranks", 0).stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--steps", "1"), {"step 1", "reward", "weight_sync", "actor.update", "rollout.generate"}),
        (("--time", "1:4.5"), {"actor.build", "rollout.load"}),
        (("--time", ":2", "--ranks", "1"), {"actor.build"}),
        (("--time", "29.5:"), {"step 1"}),
    ],
)
def test_part_has_whole_spans(tmp_path: Path, words: tuple[str, ...], names: set[str]) -> None:
    """A part is written with whole spans."""
    run, file = two_ranks(tmp_path / "run").folder, tmp_path / "part.pftrace"
    done = call("export", run, "-o", file, *words)
    assert done.exit_code == 0, done.output
    found = slices(file)
    assert {name for name in found if not name.startswith("weight_sync.")} == names
    if words == ("--steps", "1"):
        assert (found.count("weight_sync"), found.count("step 1")) == (2, 1)
    if "--ranks" in words:
        assert found.count("actor.build") == 1


def test_picture_of_a_part(tmp_path: Path) -> None:
    """A picture of a part is of its step."""
    run = two_ranks(tmp_path / "run").folder
    for number in (0, 1):
        done = call("export", run, "-o", tmp_path / f"{number}.svg", "--steps", number)
        assert done.exit_code == 0, done.output
        assert f"step {number}" in (tmp_path / f"{number}.svg").read_text()


def test_an_archive_is_of_the_whole(tmp_path: Path) -> None:
    done = call("export", two_ranks(tmp_path / "run").folder, "-o", tmp_path / "part.zip", "--steps", 1)
    assert done.exit_code == 2 and "leave out --steps, --ranks, --time and --depth" in done.stderr
    assert not (tmp_path / "part.zip").exists()


def test_figures_of_a_time_are_of_whole_steps(tmp_path: Path) -> None:
    """A time chooses the steps that it overlaps, as a whole: of a part of a step no figure can be made."""
    by_time, by_steps = (figures("summary", QWEN, *words) for words in (("--time", "123:124"), ("--steps", "1")))
    assert by_time["steady"]["steps"] == [1]
    assert by_time == by_steps
    run = two_ranks(tmp_path / "run").folder
    assert [step["step"] for step in figures("summary", run, "--time", "29:")["steps"]] == [1]
    assert [step["step"] for step in figures("summary", run, "--time", "5:30")["steps"]] == [0, 1]
    plain = Written(tmp_path / "plain").process("p", span("mine", 1, 2), span("mine", 5, 6), role="main", ended_s=9)
    assert figures("summary", plain.folder, "--time", "4:")["own_spans"][0]["count"] == 1
    assert "no chosen step is in that time" in call("summary", QWEN, "--steps", "2", "--time", "123:124").stderr


def test_depth_leaves_out_what_is_inside(tmp_path: Path) -> None:
    """Spans inside of others are left out; steps, phases and requests never are."""
    events = [
        *span("step", 0, 10, step=0), *span("Worker.update", 1, 9), *span("actor.update", 2, 8),
        *span("micro_batch", 3, 7), *span("forward", 4, 5), *span("alone", 11, 12),
    ]  # fmt: skip
    run = Written(tmp_path / "run").process("w", events, role="worker", rank=0, ended_s=20).folder
    found = {}
    for depth in (1, 2, 3, 4, 5):
        file = tmp_path / f"{depth}.pftrace"
        assert call("export", run, "-o", file, "--depth", depth).exit_code == 0
        found[depth] = {name for name in slices(file) if name != "recording starts"}
    always = {"step 0", "actor.update", "alone"}
    assert found[1] == always
    assert found[2] == found[3] == always | {"Worker.update"}
    assert found[4] == found[3] | {"micro_batch"}
    assert found[5] == found[4] | {"forward"}
    assert call("export", run, "-o", tmp_path / "x.pftrace", "--depth", 0).exit_code == 2
    assert "no spans; leave out --depth" in call("export", run, "-o", tmp_path / "x.svg", "--depth", 1).stderr


def test_large_export_has_what_a_browser_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too large a run is exported in part, with the slowest rank, and it is said; what was chosen is exported whole."""
    written = Written(tmp_path / "run")
    steps = [span("step", 10 * step, 10 * step + 10, step=step) for step in range(30)]
    written.process("d", *steps, role="driver", ended_s=300)
    for rank in range(12):
        took = 9 if rank == 7 else 5
        events = [span("actor.update", 10 * step, 10 * step + took) for step in range(30)]
        written.process(f"w{rank}", *events, role="worker", rank=rank, ended_s=300)
    size = (tmp_path / "run" / "processes" / "w7" / "000001.seg").stat().st_size
    monkeypatch.setattr(browsable, "MOST_RECORDS", 2 * size // browsable.RECORD_BYTES)
    done = call("export", written.folder, "-o", tmp_path / "part.pftrace")
    assert done.exit_code == 0, done.output
    said = re.search(
        r"(\d+) of 12 ranks, rank 7 among them.*--ranks ([\d,-]+); 13 of 30 steps: --steps (\S+)\. ", done.stderr
    )
    assert said is not None, done.stderr
    ranks, steps_there = (numbers(said[at]).each(100) for at in (2, 3))
    assert len(ranks) == int(said[1]) < 12 and {0, 7} <= {*ranks}
    assert steps_there == [0, 1, 2, *range(20, 30)]
    found = slices(tmp_path / "part.pftrace")
    assert found.count("actor.update") == len(ranks) * 13
    assert {name for name in found if name.startswith("step ")} == {f"step {number}" for number in steps_there}
    chosen = call("export", written.folder, "-o", tmp_path / "all.pftrace", "--ranks", "0-11")
    assert chosen.exit_code == 0 and "browser" not in chosen.stderr
    assert slices(tmp_path / "all.pftrace").count("actor.update") == 12 * 30
    archived = call("export", written.folder, "-o", tmp_path / "all.zip")
    assert archived.exit_code == 0 and "browser" not in archived.stderr

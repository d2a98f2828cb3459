"""Two runs beside each other: what takes longer, who holds more, what they were made with, and what may be chance."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from recordings import Written, sample, span
from shipped import QWEN, VERL

from rltrace.analysis.difference import Difference, Seconds, Setting, difference, same_program, settings
from rltrace.analysis.encoded import as_json
from rltrace.analysis.findings import why
from rltrace.analysis.summary import analyse
from rltrace.cli import main
from rltrace.read.recording import Recording

STEPS = range(4)
"""Of which the first is left out."""


def made(folder: Path, *, update: list[float], ranks: int = 2, kv_bytes: int = 400, **config: object) -> Path:
    """A run whose updates last so long, of rank 1 half a second longer; the driver rewards for a second behind them."""
    written = Written(folder, ranks=ranks, **config)
    starts = [10.0 * step for step in STEPS]
    driver = [span("step", start, start + 9, step=step) for step, start in zip(STEPS, starts, strict=True)]
    written.process(
        "driver", *driver, *(span("reward", start + 7, start + 8) for start in starts), role="driver", ended_s=40
    )
    for rank in range(ranks):
        device = {"host": "here", "uuid": f"GPU-{rank}"}
        events = [
            span("actor.update", start + 1, start + 1 + seconds + rank / 2)
            for start, seconds in zip(starts, update, strict=True)
        ]
        events += [span("weight_sync", start, start + 1) for start in starts]
        events += [span("weight_sync.send", start, start + 0.5, bytes=10**9) for start in starts]
        events += [sample("rollout.kv_cache_bytes", start + 1, kv_bytes + rank) for start in starts]
        events += [span("gpu.fsdp.forward", start + 2, start + 3 + rank, stream=1) for start in starts]
        events += [sample("ref.params_bytes", start + 1, 7) for start in starts if kv_bytes == 400]
        written.process(f"worker-{rank}", *events, role="worker", rank=rank, device=device, pid=rank + 1, ended_s=40)
    return folder


def between(a: Path, b: Path) -> Difference:
    run_a, run_b = Recording.open(a), Recording.open(b)
    made = run_a.manifest, run_b.manifest
    of_a, of_b = analyse(run_a), analyse(run_b)
    found = why(of_a), why(of_b)
    return difference(of_a.summary, of_b.summary, settings(*made), same_program=same_program(*made), whys=found)


def of(name: str, rows: list[Seconds]) -> Seconds:
    (row,) = (row for row in rows if row.name == name)
    return row


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """B updates for a second more, with a larger KV cache and no ref."""
    a = made(tmp_path / "a", update=[5, 1, 2, 1.5], actor={"lr": 1, "clip": 2})
    return a, made(tmp_path / "b", update=[5, 2.5, 2.25, 2.75], kv_bytes=600, actor={"lr": 1, "clip": 3})


def test_phase_is_mean_of_ranks(runs: tuple[Path, Path]) -> None:
    """A phase is the mean of the ranks over the steps after the first."""
    update = of("actor.update", between(*runs).phases)
    assert update.a is not None and update.b is not None
    assert (update.a.mean_seconds, update.a.least_seconds, update.a.most_seconds) == pytest.approx((1.75, 1.25, 2.25))
    assert update.b.mean_seconds == pytest.approx(2.75)
    assert update.difference_seconds == pytest.approx(1.0)
    assert update.ratio == pytest.approx(2.75 / 1.75)


def test_real_difference_or_chance(tmp_path: Path) -> None:
    """A clear difference is told from what may be chance."""
    a = made(tmp_path / "a", update=[5, 1, 2, 1.5])
    within = made(tmp_path / "b", update=[5, 1.75, 2.5, 3])
    apart = made(tmp_path / "c", update=[5, 2.25, 2.5, 3])
    assert of("actor.update", between(a, within).phases).overlapping is True
    assert of("actor.update", between(a, apart).phases).overlapping is False
    assert of("actor.update", between(apart, a).phases).overlapping is False


def test_one_step_says_nothing_about_chance(tmp_path: Path) -> None:
    written = Written(tmp_path / "one")
    one = written.process("driver", span("step", 0, 9, step=0), role="driver", pid=9, ended_s=40).folder
    found = between(made(tmp_path / "a", update=[5, 1, 2, 1.5]), one)
    assert found.step is not None and found.step.overlapping is None
    assert "one step of B: any difference may be chance" in call(tmp_path / "a", one).stdout
    assert of("actor.update", found.phases).b is None and of("actor.update", found.phases).ratio is None


def test_step_driver_and_sync_too(runs: tuple[Path, Path]) -> None:
    """The step, the driver and the sync are compared too."""
    found = between(*runs)
    assert found.step is not None and (found.step.difference_seconds, found.step.ratio) == pytest.approx((0, 1))
    assert of("reward", found.driver).difference_seconds == pytest.approx(0)
    send = of("weight_sync.send", found.weight_sync)
    assert send.a is not None and send.a.mean_seconds == pytest.approx(0.5)
    assert found.weight_sync_bytes is not None and found.weight_sync_bytes.a_bytes == 10**9


def test_owner_at_its_most(runs: tuple[Path, Path]) -> None:
    """An owner is compared at its peak on any device."""
    found = between(*runs)
    of_owner = {row.owner: (row.a_bytes, row.b_bytes) for row in found.memory}
    assert of_owner == {"rollout.kv_cache": (401, 601), "ref.params": (7, None)}
    assert found.peak is not None and (found.peak.a_bytes, found.peak.b_bytes) == (408, 601)


def test_gpu_work_is_mean_of_ranks(runs: tuple[Path, Path]) -> None:
    """The work of the GPUs is the mean of the ranks."""
    found = {work.name: work for work in between(*runs).gpu_work}
    assert found["fsdp.forward"].a_seconds == pytest.approx(1.5)


def test_differing_settings_are_shown(runs: tuple[Path, Path]) -> None:
    """Settings of the runs are shown if they differ."""
    assert between(*runs).settings == [Setting("actor.clip", "2", "3")]
    verl = {"command": ["python", "-m", "verl", "+data.size=8", "trainer.steps=4"], "versions": {"vllm": "0.24"}}
    other = {"command": ["python", "-m", "verl", "data.size=16", "trainer.steps=4"], "versions": {"vllm": "0.26"}}
    assert settings(verl, other) == [Setting("vllm", "0.24", "0.26"), Setting("data.size", "8", "16")]
    ours = {"config": {"ranks": 4}, "versions": {"vllm": "0.24"}}
    assert settings(verl, ours) == [] and not same_program(verl, ours), "one is not configured as the other is"
    assert settings({"command": ["t.py"]}, {"command": ["t.py", "lr=1"]}) == [Setting("lr", None, "1")]


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ("python t.py --lr 1 --fast", "python3.12 -u t.py --lr=2", [("lr", "1", "2"), ("fast", "given", None)]),
        ("python t.py a --fast b", "python t.py c --fast", [("argument 1", "a", "c"), ("fast", "b", "given")]),
        ("torchrun t.py", "torchrun u.py", [("argument 1", "t.py", "u.py")]),
        ("python -m verl x=1", "python -m verl +x=2 -v", [("x", "1", "2"), ("v", None, "given")]),
        ("python t.py --lr 1", "python u.py --lr 2", None),
        ("python -m verl", "python -m trl", None),
        ("python -c pass", "python -c print()", None),
        ("python t.py", "t.py", []),
    ],
)
def test_arguments_of_one_program_differ(
    a: str, b: str, found: list[tuple[str, str | None, str | None]] | None
) -> None:
    """Two commands of one program differ in their arguments."""
    made = {"command": a.split()}, {"command": b.split()}
    assert same_program(*made) == (found is not None)
    assert settings(*made) == [Setting(*row) for row in found or ()]


def test_other_machines_are_said(tmp_path: Path) -> None:
    """Runs on other machines say so, whatever the program."""
    runs = []
    for host, gpus in (("a", ["H200", "H200"]), ("b", ["H100"])):
        written = Written(tmp_path / host).process("p", span("step", 0, 1, step=3), ended_s=1)
        named = [{"uuid": f"GPU-{at}", "name": name} for at, name in enumerate(gpus)]
        machine = {"cpu": "EPYC", "cpus": 8, "gpus": named, "driver": "580"}
        runs.append(written.process("s", role="sampler", machine=machine, ended_s=1).folder)
    assert between(*runs).settings == [Setting("gpus", "2 H200", "1 H100")]
    text = call(*runs).stdout
    assert re.search(r"gpus +2 H200 +1 H100", text)
    assert re.search(r"B  \S+/b  step 3 \(the first, which includes warm-up\)", text)


def test_phases_of_one_process_once(tmp_path: Path) -> None:
    """Phases of one process are there once, whatever the process is called."""
    runs = []
    for role in ("driver", "process"):
        steps = [span("step", 10 * step, 10 * step + 9, step=step) for step in STEPS]
        rewards = [span("reward", 10 * step, 10 * step + 1, phase=True) for step in STEPS]
        runs.append(Written(tmp_path / role).process("p", *steps, *rewards, role=role, pid=7, ended_s=40).folder)
    for a, b in ((0, 0), (0, 1), (1, 0)):
        found = between(runs[a], runs[b])
        assert of("reward", found.phases).difference_seconds == 0
        assert found.driver == []


def test_phase_of_driver_and_of_ranks(tmp_path: Path) -> None:
    """A phase of one run's driver and the other run's ranks is there for both."""
    runs = []
    for name, lengths in (("driver", (2, 0)), ("rank", (0, 3)), ("both", (1, 1))):
        steps = [span("step", 10 * step, 10 * step + 9, step=step) for step in STEPS]
        of_driver, of_rank = (
            [span("reward", 10 * step, 10 * step + length) for step in STEPS if length] for length in lengths
        )
        of_rank += [span("actor.update", 10 * step + 4, 10 * step + 8) for step in STEPS]
        written = Written(tmp_path / name).process("d", *steps, *of_driver, role="driver", ended_s=40)
        runs.append(written.process("w", *of_rank, role="worker", rank=0, pid=2, ended_s=40).folder)
    for a, b, found in ((0, 1, [(None, 3), (2, None)]), (1, 0, [(3, None), (None, 2)]), (1, 2, [(3, 1)])):
        compared = between(runs[a], runs[b])
        rows = [row for row in (*compared.phases, *compared.driver) if row.name == "reward"]
        means = [tuple(side and side.mean_seconds for side in (row.a, row.b)) for row in rows]
        assert means == [pytest.approx(pair) for pair in found]


@pytest.mark.parametrize("sampled", ["a", "b"])
def test_unsampled_machine_is_no_difference(tmp_path: Path, sampled: str) -> None:
    """A machine that nobody sampled is no difference."""
    for name in "ab":
        written = Written(tmp_path / name).process("p", span("step", 0, 1, step=3), ended_s=1)
        if name == sampled:
            written.process(
                "s", role="sampler", machine={"cpu": "EPYC", "cpus": 8, "gpus": [], "driver": None}, ended_s=1
            )
    assert between(tmp_path / "a", tmp_path / "b").settings == []


def test_unknown_is_not_subtracted(tmp_path: Path) -> None:
    """An unknown figure is no zero to subtract from."""
    runs = []
    for name, said in (("known", [sample("cuda.context_bytes", 2, 9)]), ("unknown", [])):
        device = {"host": "here", "uuid": "GPU-1"}
        written = Written(tmp_path / name).process("p", sample("actor.params_bytes", 1, 5), *said, device=device, pid=7)
        runs.append(written.folder)
    context = next(row for row in between(*runs).memory if row.owner == "cuda.context")
    assert (context.a_bytes, context.b_bytes) == (9, None)
    assert re.search(r"cuda\.context +9 B *$", call(*runs).stdout, re.MULTILINE)


# ---- the command ------------------------------------------------------------------------------------------------


def call(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["diff", *map(str, words)], prog_name="rltrace", env={"COLUMNS": "1000"})


def test_tables_mark_chance(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """The tables show both runs and mark what may be chance."""
    text = call(*runs).stdout
    assert re.search(r"A  \S+/a  mean of steps 1-3, 2 ranks", text)
    assert re.search(r"actor\.clip +2 +3", text)
    assert re.search(r"actor\.update +1\.750 +1\.250-2\.250 +2\.750 +2\.500-3\.000 +\+1\.000 +1\.57", text)
    assert re.search(r"step +9\.000 +9\.000 +9\.000 +9\.000 +0\.000 +~ +1\.00", text)
    assert re.search(r"rollout\.kv_cache +401 B +601 B +\+200 B", text)
    assert "~: the ranges of their steps overlap, so the difference may be chance" in text


def test_run_equals_itself(runs: tuple[Path, Path]) -> None:
    """A run beside itself differs in nothing."""
    found = between(runs[0], runs[0])
    rows = [*found.phases, *found.driver, *found.weight_sync]
    assert rows and {row.difference_seconds for row in rows} == {0.0}
    assert all(row.a_bytes == row.b_bytes for row in found.memory) and found.settings == []


def test_two_real_programs() -> None:
    """Real runs of two programs are compared."""
    result = call(QWEN, VERL)
    assert result.exit_code == 0
    assert "What differs" not in result.stdout, "the same packages"
    assert "These are different programs: of their settings, only machines" in result.stdout
    assert re.search(r"weight_sync +0\.10\d .*0\.80\d .*\+0\.70\d +7\.\d\d", result.stdout)
    assert re.search(r"Weight sync of a rank: 16,381\.47 and 32,762\.94 MB", result.stdout)
    assert re.search(r"fsdp\.forward +4\.70\d +4\.09\d +-0\.61\d +0\.87", result.stdout)
    assert re.search(r"total, at its peak +62\.86 GiB +60\.06 GiB +-2\.80 GiB", result.stdout)


def test_nothing_to_compare_is_one_line(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """No Recording and nothing to compare are one line."""
    missing = call(runs[0], tmp_path / "nothing")
    assert missing.exit_code == 3 and "nothing: no such file or folder" in missing.stderr
    empty = Written(tmp_path / "empty").folder
    neither = call(empty, empty)
    assert neither.exit_code == 3 and "neither has a finished span or a memory sample" in neither.stderr
    assert call(runs[0], empty).exit_code == 0


def without_steps(folder: Path, *, load: float) -> Path:
    """A run of two phases and a span of its own, that lasts so long."""
    events = [span("reward", 1, 3, phase=True), span("load", 4, 4 + load), span("load", 9, 9.5)]
    return Written(folder).process("p", *events, ended_s=10).folder


def test_run_without_steps_is_not_zero(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """A run without steps is not shown as a step of zero seconds.

    Whole runs are compared then, which both have, and it is said what is missing.
    """
    other = without_steps(tmp_path / "other", load=1)
    for order in ((runs[0], other), (other, runs[0])):
        found = between(*order)
        assert found.step is not None and found.step.difference_seconds is None
        assert {row.difference_seconds for row in found.phases} == {None}
        text = call(*order).stdout
        assert "-9.000" not in text and "+9.000" not in text
        assert f"{'A' if order[0] is other else 'B'} has no step that is over" in text
        assert re.search(r"the run +\d+\.\d+ +\d+\.\d+ ", text)
    row = next(row for row in between(runs[0], other).totals if row.name == "reward")
    assert (row.a_seconds, row.b_seconds) == (4.0, 2.0)


def test_two_runs_without_steps_are_compared(tmp_path: Path) -> None:
    """By what both have: their phases and spans."""
    a, b = without_steps(tmp_path / "a", load=1), without_steps(tmp_path / "b", load=3)
    result = call(a, b)
    assert result.exit_code == 0
    assert re.search(r"^load +1\.500 +2 +3\.500 +2 +\+2\.000 +2\.33$", result.stdout, re.MULTILINE)
    assert re.search(r"^reward +2\.000 +2\.000 +0\.000 +1\.00$", result.stdout, re.MULTILINE)
    assert "neither has a step that is over" in result.stdout and "Neither has a sample of memory" in result.stdout


def test_json_is_the_value(runs: tuple[Path, Path]) -> None:
    """The keys of `--json` are the fields that docs/json.md lists."""
    value = json.loads(call(*runs, "--json").stdout)
    assert value == json.loads(as_json(between(*runs)))

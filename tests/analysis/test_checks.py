"""Limits of a run: what is broken, what is noise, what cannot be judged, and limits that nobody can read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from planted_runs import PlantedRun, look
from recordings import Written, sample, span
from shipped import VERL, opened

from rltrace.analysis.budget import ALWAYS, SHARE, Amount, amount, budget
from rltrace.analysis.checks import BROKEN, OK, UNJUDGED, Check, Checked, checked
from rltrace.analysis.findings import why
from rltrace.analysis.measures import Judged
from rltrace.analysis.summary import analyse
from rltrace.errors import ConfigError
from rltrace.read.recording import Recording


def judged(recording: Recording) -> Judged:
    analysed = analyse(recording)
    return Judged(analysed.summary, why(analysed))


def planted(folder: Path, plant: Callable[[PlantedRun], None] = lambda run: None, **run: int) -> Judged:
    """The figures of a run in which something is planted."""
    made = PlantedRun(folder, **run)
    plant(made)
    return judged(made.write().read())


def below(run: Judged, *limits: str) -> Checked:
    """A run beside limits."""
    return checked(run, budget(None, limits, None, ()))


def against(run: Judged, other: Judged, *shares: str) -> Checked:
    """A run beside another one."""
    return checked(run, budget(None, (), "other", shares), other)


def of(name: str, found: Checked) -> Check:
    (one,) = [one for one in found.checks if one.name == name]
    return one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """A run that is well, whose steps take 10 s."""
    return planted(tmp_path_factory.mktemp("well") / "run")


@pytest.mark.parametrize(
    ("limit", "state"),
    [
        ("step=10.5s", OK),
        ("step=9s", BROKEN),
        ("step=9000ms", BROKEN),
        ("actor.update=3.5s", OK),
        ("actor.update=3s", BROKEN),
        ("actor.update=35%", OK),
        ("actor.update=30%", BROKEN),
        ("weight_sync.gather=0.2s", BROKEN),
        ("reward=1s", OK),
        ("first_step=20s", OK),
        ("startup=0.4s", BROKEN),
        ("startup=1min", OK),
        ("finding.slow_rank=1%", OK),
    ],
)
def test_limit(run: Judged, limit: str, state: str) -> None:
    """A figure above its limit breaks it; a limit has any unit of its kind, or is a share of a step."""
    found = below(run, limit)
    assert (of(limit.partition("=")[0], found).state, found.state) == (state, state)
    assert of("complete", found).state == OK


def test_mean_above_a_limit_may_be_noise(run: Judged) -> None:
    """A mean that is above its limit by less than the noise of its steps breaks nothing, and is said."""
    mean = of("step", below(run, "step=1s")).value
    assert mean is not None
    one = of("step", below(run, f"step={mean * 0.999}s"))
    assert one.state == OK and "may be chance" in one.said
    assert "surely more than" in of("step", below(run, f"step={mean * 0.9}s")).said


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ("trian=3s", "no step has `trian`; there are step, train"),
        ("memory.used=70GiB", "nobody measured memory"),
        ("finding.nearly_full=1s", "no GPU's memory was measured"),
        ("finding.slwo_rank=1s", "no finding `slwo_rank`"),
        ("step=70GiB", "it is in seconds, and 70GiB in bytes"),
        ("startup=5%", "would be a share is unknown"),
    ],
)
def test_figure_that_is_not_there(tmp_path: Path, limit: str, reason: str) -> None:
    """A figure that a run does not have is not judged, and never passes; the reason is told."""
    steps = [span("step", 10 * n, 10 * n + 9, step=n) for n in range(4)]
    phases = [span("train", 10 * n, 10 * n + 9, phase=True) for n in range(4)]
    written = Written(tmp_path / "run").process("p", *steps, *phases, role="worker", rank=0, ended_s=40)
    found = below(judged(written.read()), limit)
    assert found.state == UNJUDGED and reason in of(limit.partition("=")[0], found).said


def test_memory_limits(tmp_path: Path) -> None:
    """Memory is judged by what anybody saw of a device, by its owner, and as a share of the card."""
    looks = [record for at in (2, 8) for record in look(at, actor__params=60e9)]
    steps = [span("step", 0, 9, step=0), span("actor.update", 2, 8)]
    written = Written(tmp_path / "run")
    device = {"host": "here", "uuid": "GPU-0"}
    written.process("w", *steps, *looks, role="worker", rank=0, device=device, pid=3, ended_s=10)
    sampled = [sample("gpu.used_bytes/GPU-0", at, 70e9) for at in (3, 4)]
    run = judged(written.process("s", *sampled, role="sampler", pid=4, ended_s=10).read())
    states = {"memory.used=71GB": OK, "memory.used=69GB": BROKEN, "memory.used=90%": OK, "memory.used=80%": BROKEN}
    states |= {"memory.actor.params=61GB": OK, "memory.actor.params=59GB": BROKEN, "memory.ref.params=1GB": UNJUDGED}
    assert {limit: of(limit.partition("=")[0], below(run, limit)).state for limit in states} == states


def test_run_that_died_breaks_its_check(tmp_path: Path) -> None:
    """A run with a process that died is broken, whatever its figures are."""
    steps = [span("step", 10 * n, 10 * n + 9, step=n) for n in range(4)]
    found = below(judged(Written(tmp_path / "run").process("p", *steps, role="driver").read()), "step=100s")
    assert found.state == BROKEN and of("step", found).state == OK
    assert "did not end in good order" in of("complete", found).said


def test_alike_runs_pass(tmp_path: Path, run: Judged) -> None:
    """A run is not worse than itself; what would have been seen is told."""
    found = against(run, run, "5%", "actor.update=5%")
    assert of("step", found).state == of("actor.update", found).state == OK
    assert "would be seen" in of("step", found).said
    assert of("memory.used", found).state == OK and found.state == OK


def test_slower_run_is_told_with_its_phase(tmp_path: Path, run: Judged) -> None:
    """A run that is slower by more than allowed is broken, with the phase that grew and the finding that is new."""

    def plant(run: PlantedRun) -> None:
        run.longer["actor.update", 1] = lambda step: 1.0

    slower = planted(tmp_path / "slower", plant)
    found = against(slower, run, "step=5%")
    one = of("step", found)
    assert one.state == BROKEN and one.change is not None
    assert one.change.share == pytest.approx(0.1, abs=0.03) and "surely more than" in one.said
    assert found.notes[0].startswith("longer: actor.update by 1.0") and "(rank 1)" in found.notes[0]
    assert any(note.startswith("new finding: rank 1 is slow in actor.update") for note in found.notes)
    assert against(slower, run, "step=20%").state == OK
    assert against(run, slower, "step=5%").state == OK


def test_few_steps_cannot_be_compared(tmp_path: Path, run: Judged) -> None:
    """With fewer than five steady steps nothing passes, and it is told how many are needed."""
    found = against(planted(tmp_path / "short", steps=4), run, "step=5%")
    assert found.state == UNJUDGED
    assert "3 steps are too few to tell a change from noise; 5 are needed" in of("step", found).said


# ---------------------------------------------------------------- limits as people write them


def test_budget_of_a_file(tmp_path: Path) -> None:
    """A file has limits and another run, beside itself; the command line goes first."""
    file = tmp_path / "budget.yaml"
    file.write_text("max:\n  step: 10s\n  memory.used: 70GiB\nbaseline: runs/good\nfail-over:\n  step: 3%\n")
    found = budget(file, ("step=9s",), None, ("reward=10%",))
    assert found.most == {
        "step": Amount(9.0, "seconds", "9s"), "memory.used": Amount(70 * 2**30, "bytes", "70GiB"),
    }  # fmt: skip
    assert found.over == {"step": 0.03, "reward": 0.1} and found.baseline == str(tmp_path / "runs/good")


def test_usual_shares() -> None:
    """Against another run, steps and memory may grow by 5 % if nothing else is said."""
    assert budget(None, (), "other", ()).over == dict.fromkeys(ALWAYS, 0.05)
    assert budget(None, (), "other", ("2%",)).over == dict.fromkeys(ALWAYS, 0.02)


@pytest.mark.parametrize(
    ("text", "amount_"),
    [("10s", 10), ("1.5 min", 90), ("200ms", 0.2), ("2e3us", 0.002), ("1GB", 1e9), ("1GiB", 2**30), ("5%", 0.05)],
)
def test_amounts(text: str, amount_: float) -> None:
    """Seconds, bytes and shares are read with their units."""
    assert amount(text, "here").value == pytest.approx(amount_)


@pytest.mark.parametrize("text", ["10", "s", "10 parsecs", "-3s", "1,000s", "nan s", "inf%", ""])
def test_no_amounts(text: str) -> None:
    """What is no number with a unit is refused in one line that says what is."""
    with pytest.raises(ConfigError, match=r"a number with its unit, such as 10s"):
        amount(text, "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max: [1, 2]\n", r"Expected `object`"),
        ("maxx:\n  step: 10s\n", r"unknown field `maxx`.*it may have max, baseline, fail-over"),
        ("max:\n  step: 10\n", r"Expected `str`"),
        ("max: {step: \n", r"expected"),
        ("", r"nothing to check"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, said: str) -> None:
    """A file that nobody can read is refused in one line, with what it may have."""
    file = tmp_path / "budget.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        budget(file, (), None, ())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("most", "baseline", "shares", "said"),
    [
        (("step",), None, (), "is no limit; write it as step=10s"),
        ((), None, ("5%",), "nothing to check"),
        (("step=1s",), None, ("5%",), "needs a run to compare with"),
        ((), "other", ("5s",), "it is a share of the other run's"),
    ],
)
def test_wrong_words(most: tuple[str, ...], baseline: str | None, shares: tuple[str, ...], said: str) -> None:
    """Wrong options are refused in one line."""
    with pytest.raises(ConfigError, match=said):
        budget(None, most, baseline, shares)
    assert SHARE


def test_workers_that_ray_ends_are_complete() -> None:
    """A run whose idle workers Ray ended is complete, to `check` and in the JSON as on the first screen."""
    found = judged(opened(VERL))
    assert any(process.state == "died" for process in found.summary.processes)
    assert found.summary.complete and of("complete", below(found, "step=20s")).state == OK


@pytest.mark.parametrize(("ending", "complete", "state"), [({}, None, UNJUDGED), ({"ended_s": 9}, True, OK)])
def test_unseen_end_cannot_be_judged(tmp_path: Path, ending: dict[str, int], complete: bool | None, state: str) -> None:
    """Nobody knows whether a run is complete whose program is gone, and was watched by nobody."""
    written = Written(tmp_path / "run", owner="p").process("p", span("step", 0, 1, step=0), **ending)
    found = judged(written.read())
    assert (found.summary.complete, of("complete", below(found, "step=20s")).state) == (complete, state)

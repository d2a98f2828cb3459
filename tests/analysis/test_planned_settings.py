"""The finding `planned_settings`: what makes room where memory ran out, and what uses room that is never used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from shipped import QWEN

from rltrace.analysis.findings.finding import Finding, UnjudgeableError
from rltrace.analysis.findings.planned_settings import judge
from rltrace.analysis.findings.run import Run
from rltrace.analysis.memory import OutOfMemory
from rltrace.analysis.summary import Analysed, analyse
from rltrace.read.recording import Recording


@pytest.fixture(scope="module")
def analysed() -> Analysed:
    """The shipped 8B run."""
    return analyse(Recording.open(QWEN))


@pytest.fixture
def configured(analysed: Analysed, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that changes a section of the run's configuration for one test."""

    def change(section: str, **values: Any) -> None:
        config = analysed[0].recording.manifest["config"]
        monkeypatch.setitem(config, section, config[section] | values)

    return change


def failed(analysed: Analysed, phase: str) -> list[Finding]:
    """Return what is found if the run had run out of memory in a phase."""
    seen, windows, summary = analysed
    moment = next(one for one in summary.memory[0].phases if one.phase == phase)
    failure = OutOfMemory(
        lane="rank 0", rank=0, process="rank 0 engine", at_seconds=1.0, asked_bytes=9 << 30, free_bytes=1 << 30,
        bound="the GPU", reason="out of memory", moment=moment, before=[moment], changes=[],
    )  # fmt: skip
    return judge(Run(seen, windows, msgspec.structs.replace(summary, out_of_memory=[failure])))


def test_room_is_for_larger_micro_batches(analysed: Analysed) -> None:
    """More than half of the card is free, and the KV cache nearly empty: the ref and larger micro-batches are named."""
    (finding,) = judge(Run(*analysed))
    assert finding.bytes == pytest.approx(77.5 * 2**30, rel=0.01)
    assert [setting.change.split(":")[0] for setting in finding.settings] == ["ref.offload", "actor.micro_batch"]
    assert "by plan ref.offload fits with false instead of true" in finding.title
    assert finding.settings[1].change == "actor.micro_batch: 16 instead of 2"
    assert any("micro-batches of a minibatch: 1 instead of 8" in fact for fact in finding.evidence.facts)


def test_out_of_memory_in_the_rollout(analysed: Analysed, configured: Callable[..., None]) -> None:
    """Where the KV cache does not fit, what frees most there comes first, and a smaller share with the value that fits
    by plan."""
    configured("rollout", gpu_memory_utilization=0.9)
    (finding,) = failed(analysed, "rollout.wake_kv_cache")
    assert [setting.change for setting in finding.settings] == [
        "actor.offload: true instead of false",
        "rollout.gpu_memory_utilization: 0.784 instead of 0.9",
    ]
    assert "Memory ran out in rollout.wake_kv_cache" in finding.title
    assert "by plan it then fits" in finding.title
    assert finding.bytes == pytest.approx(22.9 * 2**30, rel=0.01)
    assert finding.evidence.phases == ["rollout.wake_kv_cache"]


def test_out_of_memory_in_the_update(analysed: Analysed, configured: Callable[..., None]) -> None:
    """Where training does not fit, the micro-batch is halved; what gives nothing there is not named."""
    configured("actor", micro_batch=16)
    configured("rollout", max_tokens=16_000)
    (finding,) = failed(analysed, "actor.update")
    assert finding.settings[0].change == "actor.micro_batch: 8 instead of 16"
    gives = [fact.rpartition(": ")[2] for fact in finding.evidence.facts]
    assert all(given.endswith("in actor.update") for given in gives)
    assert sorted(gives, key=lambda text: -float(text.split()[0])) == gives


def test_settings_that_plan_does_not_know(analysed: Analysed, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose settings nobody can read is not judged, and the reason says so."""
    monkeypatch.setitem(analysed[0].recording.manifest, "config", {})
    with pytest.raises(UnjudgeableError, match="of no framework that plan knows"):
        judge(Run(*analysed))


def test_a_run_without_a_gpu_is_not_judged(analysed: Analysed) -> None:
    """Nothing is said where no GPU was measured."""
    seen, windows, summary = analysed
    with pytest.raises(UnjudgeableError, match="no GPU's memory"):
        judge(Run(seen, windows, msgspec.structs.replace(summary, memory=[])))

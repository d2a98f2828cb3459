"""Every file in `examples/` does what its first lines say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rltrace.analysis.summary import summarize
from rltrace.read.recording import Recording

EXAMPLES = Path(__file__).parents[1] / "examples"


def rltrace_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = "import sys; from rltrace.cli import main; sys.argv[0] = 'rltrace'; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_own_loop_is_recorded(tmp_path: Path) -> None:
    """A loop of one's own is recorded with its tasks, processes and arrows."""
    run = tmp_path / "run"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RLTRACE_")}
    subprocess.run([sys.executable, EXAMPLES / "trace_your_own_loop.py", run], env=environment, check=True, timeout=120)
    summary = summarize(Recording.open(run))
    assert [step.step for step in summary.steps] == [0, 1, 2]
    assert [step.reward_mean for step in summary.steps] == [1.5] * 3
    assert [process.role for process in summary.processes] == ["driver", "trainer", "trainer", "trainer"]
    assert summary.complete and not summary.losses
    spans = [event for process in Recording.open(run).processes for event in process.events() if hasattr(event, "task")]
    left = {key for span in spans for key in span.flows_out}
    assert left == {key for span in spans for key in span.flows_in} == {"batch 0", "batch 1", "batch 2"}
    assert len({(span.start_ns, span.task) for span in spans if span.name == "sample"}) == 12


@pytest.mark.run
def test_memory_example_frees_kv_cache(tmp_path: Path) -> None:
    """The memory example shows the KV cache leaving while the actor learns; two of its four steps are enough to see."""
    config = tmp_path / "laptop_memory.yaml"
    config.write_text((EXAMPLES / "laptop_memory.yaml").read_text().replace("steps: 4", "steps: 2"))
    result = rltrace_command("run", str(config), "--out", "run", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    summary = json.loads(rltrace_command("summary", "run", "--json", folder=tmp_path).stdout)
    assert summary["complete"] and len(summary["steps"]) == 2
    mebibyte = 1 << 20
    for device in summary["memory"]:
        assert device["owner_peaks"]["rollout.kv_cache"]["bytes"] == 128 * mebibyte
        assert device["owner_peaks"]["actor.optimizer"]["bytes"] > 40 * mebibyte
        # What the ranks share in time they never hold at once: the pool sleeps while gradients are there.
        held_at_most = sum(peak["bytes"] for peak in device["owner_peaks"].values())
        assert device["peak_bytes"] < held_at_most - 10 * mebibyte

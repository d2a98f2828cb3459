"""The memory journey on a laptop, made once: v0 has no room where predicted, and each idea gives what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from rltrace_reference.run_figures import Figures

LAPTOP = Path(__file__).parents[2] / "examples" / "memory_journey" / "laptop.yaml"
MIB = 1 << 20

pytestmark = [pytest.mark.run, pytest.mark.timeout(1200)]  # four runs in the setup of the first test


class Made(NamedTuple):
    """What the command made, and the table that it printed."""

    folder: Path
    table: str


def journey(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rltrace_reference.journey", str(LAPTOP), "--out", str(folder / "journey"), *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=580)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two variants first, and one that cannot run here."""
    folder = tmp_path_factory.mktemp("journey")
    done = journey(folder, "--only", "v0_naive", "v3_staged", "v4_torch_memory_saver")
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines() if line.endswith("running")] == [
        "v0_naive",
        "v3_staged",
    ]
    return Made(folder, done.stdout)


@pytest.fixture(scope="module")
def variants(two: Made) -> dict[str, Figures]:
    """All variants by name, when the others have run too."""
    folder = two.folder
    done = journey(folder, "--json", "--picture", str(folder / "journey.png"))
    assert done.returncode == 0, done.stderr
    running = [line.split(":")[0] for line in done.stderr.splitlines() if line.endswith("running")]
    assert running == ["v1_relaunch", "v2_sleep"], "what has ended is not run again"
    return {variant.name: variant for variant in msgspec.json.decode(done.stdout, type=list[Figures])}


def test_v0_fails_where_predicted(variants: dict[str, Figures]) -> None:
    """v0 runs out of memory in the phase that shapes foretold, and the report says who held it."""
    naive = variants["v0_naive"]
    assert naive.predicted_phase == naive.failed_phase == "actor.update"
    failure = naive.failure
    assert failure is not None and failure.moment is not None
    assert failure.process == "rank 0 worker"
    assert failure.bound is not None and failure.bound.startswith("RLIMIT_DATA of ")
    assert failure.moment.held["rollout.kv_cache"] == 320 * MIB
    assert failure.moment.held["actor.grads"] > 90 * MIB
    assert any("let the engine sleep" in change for change in failure.changes)


def test_the_others_fit_as_predicted(variants: dict[str, Figures]) -> None:
    """The other variants stay below the limit, and learn."""
    for variant in list(variants.values())[1:]:
        assert (variant.predicted_phase, variant.failed_phase, variant.error) == (None, None, "")
        assert max(moment.held_bytes for moment in variant.phases) == variant.peak_bytes <= variant.limit_bytes
        assert len(variant.rollouts) == 2
        assert variant.log_probs_off is not None and variant.log_probs_off < 0.1


def test_only_a_relaunch_changes_addresses(variants: dict[str, Figures]) -> None:
    """Asleep and awake again, weights and KV cache are where they were; a new engine is a new process."""
    assert {name: (variant.engines, variant.places) for name, variant in variants.items()} == {
        "v0_naive": (1, 1),
        "v1_relaunch": (2, 2),
        "v2_sleep": (1, 1),
        "v3_staged": (1, 1),
    }


def held(variant: Figures, phase: str, owner: str) -> int:
    return next(moment.held.get(owner, 0) for moment in variant.phases if moment.phase == phase)


def test_who_is_there_in_each_phase(variants: dict[str, Figures]) -> None:
    """The KV cache is there during the sync in v2 and not in v3; where it is used, the actor is away in both."""
    sleeps, staged = variants["v2_sleep"], variants["v3_staged"]
    assert held(sleeps, "weight_sync", "rollout.kv_cache") == 320 * MIB
    assert held(staged, "weight_sync", "rollout.kv_cache") == 0
    for variant in (variants["v1_relaunch"], sleeps, staged):
        assert held(variant, "rollout.generate", "rollout.kv_cache") == 320 * MIB
        assert held(variant, "rollout.generate", "actor.params") == 0
        assert held(variant, "actor.update", "rollout.kv_cache") == 0
        assert held(variant, "actor.update", "actor.params") > 90 * MIB


def test_each_leaves_more_for_the_kv_cache(variants: dict[str, Figures]) -> None:
    """v2 leaves what the actor's parameters need less than v3; v0 leaves least."""
    room = {name: variant.kv_room_bytes or 0 for name, variant in variants.items()}
    assert room["v0_naive"] < room["v2_sleep"] - 60 * MIB
    assert room["v2_sleep"] < room["v3_staged"] - 60 * MIB


def test_a_relaunch_loses_most_time(variants: dict[str, Figures]) -> None:
    """Relaunching the engine takes longer than letting it sleep, of which a busy machine may slow down one way."""
    lost = {name: variant.switch_seconds or 0.0 for name, variant in variants.items()}
    assert lost["v1_relaunch"] > min(lost["v2_sleep"], lost["v3_staged"]) > 0


def test_the_picture_is_drawn(variants: dict[str, Figures], two: Made) -> None:
    assert (two.folder / "journey.png").read_bytes().startswith(b"\x89PNG")


def test_table_of_what_is_there(two: Made) -> None:
    """The table has what has run, and a column for the variant that cannot run on this machine."""
    assert two.table.split()[:3] == ["v0_naive", "v3_staged", "v4_torch_memory_saver"]
    rows = [line for line in two.table.splitlines() if line.startswith("predicted")]
    assert len(rows) == 1 and "unrun: sglang needs" in rows[0]  # a GPU, in the next line


def test_nothing_but_what_cannot_run(tmp_path: Path) -> None:
    """If no variant can run here, the command says in one line what the machine lacks."""
    done = journey(tmp_path, "--only", "v4_torch_memory_saver")
    assert done.returncode == 2
    assert done.stderr == (
        "rltrace: none of the variants has run; v4_torch_memory_saver: sglang needs a GPU; leave --only out\n"
    )

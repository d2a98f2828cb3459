"""Follows findings of `rltrace why`: changes the setting that each one names, runs again, and prints what came true.

Usage: followed_findings.py OUT [--only SCENARIO ...] [--ranks N] [--steps N]

Each scenario is a reference run that has a fault, and the settings that its findings may name. A finding's price and
bound are those of the run before the change; what came true is the difference of the mean steady steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BASE: dict[str, Any] = {
    "device": "cuda",
    "seed": 0,
    "model": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "rope_theta": 1000000.0,
    },
    "task": {"prompts": 8, "prompt_tokens": 128},
    "rollout": {
        "n": 8,
        "max_tokens": 128,
        "ignore_eos": True,
        "slots": 64,
        "gpu_memory_utilization": 0.25,
        "sleep_level": 2,
        "bucket_megabytes": 512,
    },
    "actor": {"minibatches": 1, "micro_batch": 2, "learning_rate": 0.0001, "betas": [0.9, 0.999]},
    "ref": {"offload": True},
}
"""Micro-batches are small and the ref is offloaded, as a first configuration has it that is afraid of its memory."""


class Change(NamedTuple):
    """A setting that a finding names."""

    finding: str
    section: str
    key: str
    value: Any


class Scenario(NamedTuple):
    """A first configuration, and the changes that its findings may ask for."""

    sections: dict[str, dict[str, Any]]
    changes: tuple[Change, ...]


SMALL = {"hidden_size": 1024, "intermediate_size": 3072}
WIDE = {"hidden_size": 3072, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 8192}
"""Layers of 0.2 GB cross PCIe for longer than a host takes to launch them."""

SCENARIOS = {
    "small_batches": Scenario(
        {},
        (
            Change("launch_bound", "actor", "micro_batch", 8),
            Change("small_micro_batches", "actor", "micro_batch", 4),
            Change("sender_waits", "rollout", "buckets", 4),
            Change("sync_in_no_stage", "rollout", "keep_buckets", True),
        ),
    ),
    "wide_layers": Scenario({"model": WIDE}, (Change("offloaded_layers", "ref", "offload", False),)),
    "crowded_cache": Scenario(
        {
            "model": SMALL,
            "task": {"prompts": 32},
            "rollout": {"max_tokens": 512, "slots": 256, "gpu_memory_utilization": 0.1},
            "actor": {"micro_batch": 8},
        },
        (Change("kv_cache", "rollout", "gpu_memory_utilization", 0.45),),
    ),
}


def run(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Run a configuration, and return what `why` says about it."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config))
    rltrace(folder, "run", str(folder / "config.yaml"), "--out", str(folder / "run"))
    why: dict[str, Any] = json.loads(rltrace(folder, "why", str(folder / "run"), "--json"))
    return why


def rltrace(folder: Path, *words: str) -> str:
    """Run one of rltrace's commands, and return what it prints."""
    done = subprocess.run([sys.executable, "-m", "rltrace", *words], check=False, capture_output=True, text=True)
    (folder / f"{words[0]}.err").write_text(done.stderr)
    if done.returncode:
        raise SystemExit(f"followed_findings.py: rltrace {' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def with_sections(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return `BASE` with other values in its sections."""
    return {key: value | sections.get(key, {}) if isinstance(value, dict) else value for key, value in BASE.items()}


def found(why: dict[str, Any], finding: str) -> list[dict[str, Any]]:
    """Return the findings of this kind: there may be one for each phase."""
    return [one for one in why["findings"] if one["id"].partition("/")[0] == finding]


def follow(out: Path, scenario: Scenario, ranks: int, steps: int) -> Iterator[str]:
    """Yield a line for each change that the run before asks for."""
    base = with_sections(scenario.sections) | {"ranks": ranks, "steps": steps}
    before = run(out / "before", base)
    step_s = before["step_seconds"]
    yield f"before: a step takes {step_s:.3f} s"
    for one in before["findings"]:
        yield f"  {one['id']}: {one['seconds_per_step'] or 0:.3f} s, at most {one['bound_seconds'] or 0:.3f} s"
    for change in scenario.changes:
        prices = found(before, change.finding)
        if not prices:
            yield f"{change.finding}: not found"
            continue
        after = run(out / change.finding, base | {change.section: base[change.section] | {change.key: change.value}})
        price_s = sum(one["seconds_per_step"] or 0.0 for one in prices)
        bound_s = sum(one["bound_seconds"] or 0.0 for one in prices)
        left_s = sum(one["seconds_per_step"] or 0.0 for one in found(after, change.finding))
        yield (
            f"{change.finding}, {change.section}.{change.key}: {change.value}: price {price_s:.3f} s, bound "
            f"{bound_s:.3f} s; the step takes {after['step_seconds']:.3f} s, {step_s - after['step_seconds']:+.3f} s "
            f"gained; the finding's price is {left_s:.3f} s now"
        )


def main() -> None:
    """Follow them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    for name in options.only:
        print(f"{name}:", flush=True)
        for line in follow(options.out / name, SCENARIOS[name], options.ranks, options.steps):
            print(line, flush=True)


if __name__ == "__main__":
    main()

"""Follows findings of `rltrace why`: changes the setting that each one names, runs again, and prints what came true.

Usage: followed_findings.py OUT [--ranks N] [--steps N]

The run is the reference run with Qwen3's shape of 1.7 billion parameters. A finding's price and bound are those of the
run before the change; what came true is the difference of the mean steady steps.
"""

from __future__ import annotations

import argparse
import copy
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


CHANGES = (
    Change("offloaded_layers", "ref", "offload", False),
    Change("launch_bound", "actor", "micro_batch", 8),
    Change("small_micro_batches", "actor", "micro_batch", 4),
    Change("sender_waits", "rollout", "buckets", 4),
    Change("sync_in_no_stage", "rollout", "keep_buckets", True),
)


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


def changed(config: dict[str, Any], change: Change) -> dict[str, Any]:
    """Return a configuration with another setting."""
    config = copy.deepcopy(config)
    config[change.section][change.key] = change.value
    return config


def found(why: dict[str, Any], finding: str) -> list[dict[str, Any]]:
    """Return the findings of this kind: there may be one for each phase."""
    return [one for one in why["findings"] if one["id"].partition("/")[0] == finding]


def follow(out: Path, ranks: int, steps: int) -> Iterator[str]:
    """Yield a line for each change that the run before asks for."""
    base = BASE | {"ranks": ranks, "steps": steps}
    before = run(out / "before", base)
    step_s = before["step_seconds"]
    yield f"before: a step takes {step_s:.3f} s"
    for one in before["findings"]:
        yield f"  {one['id']}: {one['seconds_per_step'] or 0:.3f} s, at most {one['bound_seconds'] or 0:.3f} s"
    for change in CHANGES:
        prices = found(before, change.finding)
        if not prices:
            yield f"{change.finding}: not found"
            continue
        after = run(out / change.finding, changed(base, change))
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
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    for line in follow(options.out, options.ranks, options.steps):
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""Compares `rltrace plan` with runs: shapes and settings on one GPU, and a ceiling from both sides.

Usage: planned_peaks.py OUT [--only CASE ...] [--steps N] [--seconds S]

Each case is a run of the reference run with random weights. A case that has run is not run again, so the command can be
repeated; after S seconds it begins no other one. It prints planned and measured bytes as they come, and writes them to
OUT/planned_peaks.json. OUT/planned_cases.json has settings and measured MiB alone: tests/analysis/planned_cases.json is
one of them, so that plans are held to the runs where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rltrace.analysis.figures import figures
from rltrace.analysis.plan import settings_reference
from rltrace.analysis.plan.beside import PEAK, Beside, beside, measured_figures
from rltrace.analysis.plan.measured import Measured, of_summary, with_engine
from rltrace.analysis.plan.phases import ROLLOUT_PHASES
from rltrace.analysis.plan.plan import Plan, plan
from rltrace.analysis.plan.settings import Settings
from rltrace.analysis.summary import Summary
from rltrace.read.recording import Recording

SMALL = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
"""Qwen3's shape of 0.6 billion parameters."""
MIDDLE = SMALL | {"hidden_size": 2048, "intermediate_size": 6144}
"""Qwen3's shape of 1.7 billion parameters."""
UNTIED = MIDDLE | {"num_hidden_layers": 20, "tie_word_embeddings": False}

BASE: dict[str, Any] = {
    "device": "cuda",
    "ranks": 1,
    "model": MIDDLE,
    "task": {"prompts": 4, "prompt_tokens": 128},
    "rollout": {
        "n": 8,
        "max_tokens": 128,
        "ignore_eos": True,
        "slots": 64,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": True,
        "bucket_megabytes": 512,
    },
    "actor": {"minibatches": 1, "micro_batch": 4, "learning_rate": 0.0001, "betas": [0.9, 0.999]},
    "ref": {"offload": True},
}

CASES: dict[str, dict[str, Any]] = {
    "middle": {},
    "small_graphs": {"model": SMALL, "rollout": {"enforce_eager": False}},
    "large_micro_batch": {"model": SMALL, "actor": {"micro_batch": 32}, "rollout": {"gpu_memory_utilization": 0.15}},
    "long_sequences": {"model": SMALL, "task": {"prompt_tokens": 768}, "rollout": {"max_tokens": 256, "slots": 32}},
    "ref_on_gpu_untied": {"model": UNTIED, "ref": {"offload": False}, "rollout": {"gpu_memory_utilization": 0.4}},
    "all_awake_kept_buckets": {"rollout": {"wake_up": "all", "keep_buckets": True, "bucket_megabytes": 1024}},
    "offloaded": {"actor": {"offload": True}},
    "never_asleep": {"model": SMALL, "rollout": {"sleep_level": 0}},
}
"""What each case changes of `BASE`."""
CEILING = "middle"
"""The case whose ceiling is tried."""
BEYOND = 0.05
REFUSED = 0.97
"""A share that vLLM refuses at its start, because the trainer has more than the rest."""


def changed(changes: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return a configuration with other values in its sections."""
    merged = {key: value | changes.get(key, {}) if isinstance(value, dict) else value for key, value in BASE.items()}
    return merged | {"model": changes.get("model", MIDDLE), "steps": steps}


def run(folder: Path, config: dict[str, Any], ends: float) -> dict[str, Any] | None:
    """Run a configuration unless it has run, and return its exit code and what it said last; None if time is up."""
    done = folder / "done.json"
    if not done.is_file():
        if time.monotonic() > ends:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
        (folder / "config.yaml").write_text(json.dumps(config))
        command = [sys.executable, "-m", "rltrace", "run", str(folder / "config.yaml"), "--out", str(folder / "run")]
        start = time.monotonic()
        ended = subprocess.run([*command, "--force"], check=False, capture_output=True, text=True)
        (folder / "output.txt").write_text(ended.stdout + ended.stderr)
        said = {"exit_code": ended.returncode, "seconds": time.monotonic() - start, "said": ended.stderr[-1500:]}
        done.write_text(json.dumps(said))
    result: dict[str, Any] = json.loads(done.read_text())
    return result


def summary_of(folder: Path) -> Summary:
    """Return the figures of a case."""
    return figures(Recording.open(folder / "run")).summary


def planned(folder: Path, known: Measured, *, is_taken: bool) -> Plan:
    """Return the plan of a case: from the card alone, or with what a Recording measured."""
    return plan(settings_of(folder, known), known if is_taken else None)


def settings_of(folder: Path, known: Measured) -> Settings:
    """Return the settings of a case that has run."""
    config = json.loads((folder / "run" / "manifest.json").read_text())["config"]
    return settings_reference.settings(config, known.card)


def case(out: Path, name: str, steps: int, ends: float) -> tuple[list[Beside], list[str]]:
    """Run a case, and return each figure beside its plan, and what to print."""
    ended = run(out / name, changed(CASES[name], steps), ends)
    if ended is None:
        return [], [f"{name}: left for the next call"]
    lines = [f"{name}: exit code {ended['exit_code']} after {ended['seconds']:.0f} s"]
    summary = summary_of(out / name)
    known = of_summary(name, summary)
    if known is None or ended["exit_code"]:
        return [], [*lines, ended["said"]]
    found = planned(out / name, known, is_taken=False)
    rows = list(beside(found, summary.memory[0]))
    peak = rows[0]
    lines.append(
        f"  peak planned {peak.planned_bytes / 2**20:,.0f} in {found.peak_phase}, measured "
        f"{peak.measured_bytes / 2**20:,.0f} MiB in {summary.memory[0].peak_phase}; "
        f"{sum(row.is_within for row in rows)} of {len(rows)} figures within 5 % or 512 MiB"
    )
    for row in rows:
        off = row.planned_bytes - row.measured_bytes
        mark = "" if row.is_within else "  <-- outside"
        if not row.is_within or abs(off) > 64 << 20:
            planned_mib, measured_mib = row.planned_bytes / 2**20, row.measured_bytes / 2**20
            lines.append(f"  {row.what:48} {planned_mib:9,.0f} {measured_mib:9,.0f} {off / 2**20:+8,.0f}{mark}")
    return rows, lines


def ceiling(out: Path, steps: int, ends: float) -> Iterator[str]:
    """Try the largest share of the card for the engine, and more than that: in the KV cache, and at the start."""
    known = of_summary(str(out / CEILING), summary_of(out / CEILING))
    assert known is not None
    own = settings_of(out / CEILING, known).engine
    assert own is not None
    known = with_engine(known, own)
    found = planned(out / CEILING, known, is_taken=True)
    largest = next(one for one in found.ceilings if one.setting.endswith("gpu_memory_utilization"))
    yield f"ceiling: {largest.setting} {largest.largest}, then {largest.limited_by} is full"
    assert largest.largest is not None and largest.recommended is not None
    tried = {
        "at_ceiling": largest.largest,
        "above_ceiling": round(largest.largest + BEYOND, 3),
        "recommended": largest.recommended,
        "refused": REFUSED,
    }
    for wanted, value in tried.items():
        name = f"{wanted}_{value:g}"  # a ceiling that has moved is another run
        config = changed(CASES[CEILING], steps)
        config["rollout"]["gpu_memory_utilization"] = value
        ended = run(out / name, config, ends)
        if ended is None:
            yield f"{name}: left for the next call"
            continue
        summary = summary_of(out / name)
        verdict = planned(out / name, known, is_taken=True).verdict
        where = [msgspec.to_builtins(one) for one in summary.out_of_memory[:1]]
        phases = [device.peak_phase for device in summary.memory]
        yield f"{name}: {value}: {verdict}; exit code {ended['exit_code']}; peak in {phases}; out of memory: {where}"
        if ended["exit_code"]:
            yield ended["said"][-700:]


SECTIONS = ("ranks", "model", "task", "rollout", "actor", "ref")
"""Of a configuration, what plan reads."""


def measured_case(folder: Path) -> dict[str, Any]:
    """Return the settings of a case that has run, and what was measured of it, in MiB."""
    summary = summary_of(folder)
    config = json.loads((folder / "run" / "manifest.json").read_text())["config"]
    found = measured_figures(summary.memory[0])
    is_kept = (PEAK, *ROLLOUT_PHASES, "actor.old_log_prob", "ref.log_prob", "actor.update")
    return {
        "config": {section: config[section] for section in SECTIONS},
        "measured": {
            what: round(size / 2**20, 1) for what, size in found.items() if size and what.split(": ")[0] in is_kept
        },
    }


def tried(out: Path) -> list[dict[str, Any]]:
    """Return how the runs with other shares of the card ended."""
    found = []
    for folder in sorted(out.glob("*_0.*")):
        if not (folder / "done.json").is_file():
            continue
        code = json.loads((folder / "done.json").read_text())["exit_code"]
        where = [one.moment.phase for one in summary_of(folder).out_of_memory]
        share = float(folder.name.rpartition("_")[2])
        found.append({"share": share, "exit_code": code, "out_of_memory_in": where[0] if where else None})
    return found


def main() -> None:
    """Run what has not run, and print all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=480)
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    kept: dict[str, list[Beside]] = {}
    for name in options.only or CASES:
        if name in CASES:
            kept[name], lines = case(options.out, name, options.steps, ends)
            print(*lines, sep="\n", flush=True)
        if name == CEILING and kept[name]:  # early: a later case may not get its turn
            for line in ceiling(options.out, options.steps, ends):
                print(line, flush=True)
    (options.out / "planned_peaks.json").write_bytes(msgspec.json.format(msgspec.json.encode(kept)))
    known = of_summary(CEILING, summary_of(options.out / CEILING))
    cases = {
        "cases": {name: measured_case(options.out / name) for name, rows in kept.items() if rows},
        "known": msgspec.to_builtins(known),
        "tried": tried(options.out),
    }
    (options.out / "planned_cases.json").write_bytes(msgspec.json.format(msgspec.json.encode(cases)))


if __name__ == "__main__":
    main()

"""Starts the reference run as a user does, and reads what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from rltrace.read.recording import Recording

LAPTOP = Path(__file__).parents[1] / "examples" / "laptop.yaml"

QUICK: dict[str, Any] = {
    "task": {"prompts": 4},
    "rollout": {"n": 4, "slots": 4},
    "actor": {"minibatches": 2, "micro_batch": 4},
}
"""Changes for a run whose steps are short: for what does not depend on how much a step does."""

TINY: dict[str, Any] = {
    "task": {"prompts": 4},
    "rollout": {"n": 2, "max_tokens": 4, "slots": 8},
    "actor": {"minibatches": 1, "micro_batch": 8},
}
"""Less still: one micro-batch a step, of two answers to each prompt."""

RLTRACE = [sys.executable, "-c", "import sys; from rltrace.cli import main; main(sys.argv[1:])"]
"""The command line, of the package that is tested."""


def write_config(folder: Path, **changes: Any) -> Path:
    """The laptop configuration with changes; a section's keys are changed one by one."""
    config = yaml.safe_load(LAPTOP.read_text())
    for key, value in changes.items():
        config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def start(config: Path, *arguments: str) -> subprocess.Popen[str]:
    """The run as a process; its step lines come on stdout."""
    command = [sys.executable, "-m", "rltrace_reference", str(config), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def in_its_steps(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of one rank in the middle of its steps, without rltrace."""
    process = start(write_config(folder, ranks=1, steps=1000, **TINY))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step   1"):
            break
    yield process
    process.kill()
    process.communicate()


def children(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(run.pid).children(recursive=True)


def workers(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in children(run) if child.name() == "ray::Worker"]


def engines(run: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in children(run) if "rltrace_reference.engine" in child.cmdline()]


def reaper_of(others: list[psutil.Process]) -> psutil.Process:
    """The process of a run that removes its temporary folder, the last word of its command."""
    (reaper,) = [child for child in others if any(word.endswith("reaper.py") for word in child.cmdline())]
    return reaper


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert alive == []


def kill_and_name(role: str, victim: psutil.Process, run: subprocess.Popen[str], how: str) -> None:
    """Kills a process of a run without rltrace: it ends with one line that names it, and nobody is left."""
    others = children(run)
    victim.kill()
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 4
    (line,) = errors.splitlines()
    assert re.fullmatch(rf"rltrace: {role} of rank 0 \(pid {victim.pid}\) died: {how}", line)
    wait_until_gone(others)


def finish(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Runs to the end and returns the record of each step."""
    process = start(write_config(folder, **changes), "--out", str(folder))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors == ""
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def record(folder: Path, environment: Mapping[str, str] | None = None, **changes: Any) -> Recording:
    """Runs to the end under `rltrace run`, with more environment, and returns the Recording."""
    config = write_config(folder, **changes)
    command = [*RLTRACE, "run", str(config), "--out", str(folder / "run")]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == 0, done.stderr
    return Recording.open(folder / "run")


def rewards(records: list[dict[str, Any]]) -> list[float]:
    return [record["reward_mean"] for record in records]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)

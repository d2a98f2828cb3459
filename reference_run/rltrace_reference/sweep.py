"""`python -m rltrace_reference.sweep CONFIG.yaml --over KEY=START:STOP:STEP`: one Recording per value, side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import yaml
from rich.console import Console
from rich.table import Table

from rltrace.errors import ConfigError
from rltrace_reference.__main__ import checked
from rltrace_reference.config import Config
from rltrace_reference.exit_code import exit_code_of
from rltrace_reference.journey.table import size
from rltrace_reference.prediction import foretell
from rltrace_reference.recorded_run import RecordedRun, limit_bytes, merged, read_values
from rltrace_reference.run_figures import Figures, read

MOST_VALUES = 64


class Point(msgspec.Struct, frozen=True):
    """A value of the swept key."""

    value: Any
    skipped: str
    """Why it was not run: what plan said; empty if it was."""
    figures: Figures | None
    """What became of it; None if it was skipped."""

    @property
    def outcome(self) -> str:
        """Return what became of it, in words."""
        if self.figures is None:
            return f"skipped: {self.skipped}"
        if self.figures.failed_phase is not None:
            return f"out of memory in {self.figures.failed_phase}"
        return self.figures.error or "ran"


def main(arguments: list[str] | None = None) -> int:
    """Run what has not run, show all, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rltrace_reference.sweep", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file, such as examples/laptop.yaml")
    parser.add_argument(
        "--over", required=True, metavar="SETTING=VALUES", help="START:STOP:STEP, or values with commas"
    )
    parser.add_argument("--out", type=Path, default=Path("rltrace-runs/sweep"), help="folder; what is there is kept")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory and time by value, as .png or .svg")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--force", action="store_true", help="try untested versions of vLLM and SGLang, and GPUs others use too"
    )
    options = parser.parse_args(arguments)

    def work() -> None:
        key, values = parse(options.over)
        points = sweep(options.config, key, values, options.out, options.force)
        show(key, points, options.picture, as_json=options.json)

    return exit_code_of(work)


def parse(over: str) -> tuple[str, list[Any]]:
    """Return the key and its values.

    Raises:
        ConfigError: it says neither a range nor a list.
    """
    key, separator, text = over.partition("=")
    if not separator or not key or not text:
        raise ConfigError(f"--over: {over!r} has no SETTING=VALUES; write rollout.gpu_memory_utilization=0.2:0.6:0.05")
    values = _range(text) if ":" in text else [yaml.safe_load(part) for part in text.split(",") if part.strip()]
    if not 1 <= len(values) <= MOST_VALUES:
        raise ConfigError(f"--over: {over!r} has {len(values)} values; give 1 to {MOST_VALUES}")
    return key, values


def _range(text: str) -> list[Any]:
    """Return the numbers from START to STOP, both included if STEP leads there."""
    try:
        start, stop, step = map(Decimal, text.split(":"))
        is_upwards = step > 0 and stop >= start
    except (InvalidOperation, ValueError):
        raise ConfigError(f"--over: {text!r} is no START:STOP:STEP of numbers; write 0.2:0.6:0.05") from None
    if not is_upwards:
        raise ConfigError(f"--over: {text!r} runs from {start} to {stop} by {step}; give a STEP above 0, upwards")
    count = min(int((stop - start) / step) + 1, MOST_VALUES + 1)
    numbers = [start + step * place for place in range(count)]
    return [int(number) if number == int(number) and "." not in text else float(number) for number in numbers]


def sweep(file: Path, key: str, values: list[Any], folder: Path, force: bool = False) -> list[Point]:
    """Run the configuration with each value, except where it has run already or cannot fit.

    Raises:
        ConfigError: a value is none of the key, before anything runs.
        RunError: a run was stopped.
    """
    runs = [RecordedRun(folder, f"{key}={value}", merged(read_values(file), nested(key, value))) for value in values]
    for run in runs:
        run.write_config()
    configs = [checked(str(run.config_file), force) for run in runs]
    return [_point(run, value, config, force) for run, value, config in zip(runs, values, configs, strict=True)]


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return a configuration that has only this key, which names its section before a dot."""
    section, _, name = key.rpartition(".")
    return {section: {name: value}} if section else {name: value}


def _point(run: RecordedRun, value: Any, config: Config, force: bool) -> Point:
    ending = run.ending
    if ending is None:
        skipped = cannot_fit(run.config_file, config)
        if skipped:
            return Point(value, skipped, None)
        print(f"{run.name}: running", file=sys.stderr, flush=True)
        ending = run.make(config, force=force)
    return Point(value, "", read(run, ending, None))


def cannot_fit(file: Path, config: Config) -> str:
    """Return why a run cannot fit, or nothing if it may, or if there is no limit."""
    limit = limit_bytes(config)
    return "" if limit is None else foretell(file, config, limit).reason


def show(key: str, points: list[Point], picture: Path | None, *, as_json: bool) -> None:
    """Print the table or the JSON, and draw the picture."""
    if as_json:
        print(msgspec.json.encode({"key": key, "points": points}).decode())
    else:
        Console(width=max(150, Console().width)).print(table(key, points))
    if picture is not None:
        from rltrace_reference.sweep_picture import draw

        draw(key, [(point.value, point.figures) for point in points if point.figures is not None], picture)


def table(key: str, points: list[Point]) -> Table:
    """Return a row per value."""
    columns = ("peak", "in", "left for the KV cache", "seconds of a step", "tokens/s", "outcome")
    found = Table(key, *columns, box=None, header_style="bold", pad_edge=False)
    for point in points:
        found.add_row(str(point.value), *_cells(point.figures), point.outcome)
    return found


def _cells(figures: Figures | None) -> Iterator[str]:
    if figures is None:
        return iter(("-",) * 5)
    seconds, tokens, room = figures.step_seconds, figures.tokens_per_second, figures.kv_room_bytes
    return iter(
        (
            size(figures.peak_bytes),
            figures.peak_phase or "start-up",
            "-" if room is None else size(room),
            "-" if seconds is None else f"{seconds:.2f}",
            "-" if tokens is None else f"{tokens:,.0f}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())

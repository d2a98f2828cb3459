"""`python -m rltrace_reference.journey CONFIG.yaml [--out DIR]`: every `v*.yaml` beside it, recorded and compared."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from rltrace.errors import ConfigError
from rltrace_reference import config as configuration
from rltrace_reference import task
from rltrace_reference.__main__ import checked
from rltrace_reference.config import Config, UnmetNeedError
from rltrace_reference.exit_code import exit_code_of
from rltrace_reference.journey.table import side_by_side
from rltrace_reference.prediction import foretell
from rltrace_reference.recorded_run import RecordedRun, merged, read_values
from rltrace_reference.run_figures import Figures, read


def main(arguments: list[str] | None = None) -> int:
    """Run what has not run, show all, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rltrace_reference.journey", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML file of what all variants share")
    parser.add_argument("--out", type=Path, default=Path("rltrace-runs/journey"), help="folder; what is there is kept")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="variants to run, such as v0_naive; by default all")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw memory by owner and phase, as .png or .svg")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--force", action="store_true", help="try untested versions of vLLM and SGLang, and GPUs others use too"
    )
    options = parser.parse_args(arguments)

    def work() -> None:
        runs = variants(options.config, options.out)
        unrun = make_missing(choose(runs, options.only), options.force)
        figures, config = read_all(runs, unrun)
        show(figures, unrun, config, options.picture, as_json=options.json)

    return exit_code_of(work)


def variants(common: Path, folder: Path) -> list[RecordedRun]:
    """Return a run for each variant, in the order of their names.

    Raises:
        ConfigError: a file cannot be read, or there is no variant.
    """
    values = read_values(common)
    files = sorted(common.parent.glob("v*.yaml"))
    if not files:
        raise ConfigError(f"{common.parent}: no v*.yaml beside {common.name}; see examples/memory_journey")
    return [RecordedRun(folder, file.stem, merged(values, read_values(file))) for file in files]


def choose(runs: list[RecordedRun], names: list[str] | None) -> list[RecordedRun]:
    """Return the runs of these names, or all.

    Raises:
        ConfigError: there is no such name.
    """
    known = [run.name for run in runs]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--only: no variant {name}; use one of: {', '.join(known)}")
    return [run for run in runs if names is None or run.name in names]


def make_missing(runs: list[RecordedRun], force: bool) -> dict[str, str]:
    """Make every run that has not ended, after all of them were checked.

    Returns:
        What this machine lacks for the others, by their names.

    Raises:
        ConfigError: before anything runs.
        RunError: a run was stopped.
    """
    missing = [run for run in runs if run.ending is None]
    for run in runs:
        run.write_config()
    configs, unrun = {}, {}
    for run in missing:
        try:
            configs[run.name] = checked(str(run.config_file), force)
        except UnmetNeedError as error:
            unrun[run.name] = error.lacks
    for run in missing:
        if run.name not in configs:
            continue
        print(f"{run.name}: running", file=sys.stderr, flush=True)
        ending = run.make(configs[run.name], force=force)
        print(f"{run.name}: {ending.said or 'ended well'}, {ending.seconds:.0f} s", file=sys.stderr, flush=True)
    return unrun


def read_all(runs: list[RecordedRun], unrun: dict[str, str]) -> tuple[list[Figures], Config]:
    """Read what has ended; return it with a configuration, of which the model counts.

    Raises:
        ConfigError: nothing has.
    """
    ended = [(run, ending) for run in runs if (ending := run.ending) is not None]
    if not ended:
        lacks = "".join(f"; {name}: {lacking}" for name, lacking in unrun.items())
        raise ConfigError(f"none of the variants has run{lacks}; leave --only out")
    figures = []
    for run, ending in ended:
        config = configuration.load(run.config_file, vocabulary=task.VOCABULARY)
        limit_bytes = ending.limit_bytes or 0
        figures.append(read(run, ending, foretell(run.config_file, config, limit_bytes).phase))
    return figures, config


def show(figures: list[Figures], unrun: dict[str, str], config: Config, picture: Path | None, *, as_json: bool) -> None:
    """Print the table or the JSON, and draw the picture."""
    if as_json:
        print(msgspec.json.encode(figures).decode())
    else:
        Console(width=max(140, Console().width)).print(side_by_side(figures, unrun, config.model.kv_bytes_per_token()))
    if picture is not None:
        from rltrace_reference.journey.picture import draw

        draw(figures, picture)


if __name__ == "__main__":
    sys.exit(main())

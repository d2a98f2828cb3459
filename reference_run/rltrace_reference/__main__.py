"""`python -m rltrace_reference CONFIG.yaml [--out DIR]`: one line on stderr and a distinct exit code if it fails."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rltrace.errors import ConfigError, RltraceError

if TYPE_CHECKING:
    from rltrace_reference.config import Config


RAY_KNOWS_NO_MORE = "^A worker died or was killed .* unexpected system error.* connection error code 2"
"""What Ray says, in a thousand letters, about a worker whose socket closed; we say which worker it was, and what killed
it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the configuration and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rltrace_reference", description="One colocated GRPO run.")
    parser.add_argument("config", help="YAML file, such as examples/laptop.yaml")
    parser.add_argument("--out", type=Path, help="folder for steps.jsonl, one line a step")
    parser.add_argument(
        "--force", action="store_true", help="try untested versions of vLLM and SGLang, and GPUs others use too"
    )
    parser.add_argument("--reason-to", type=Path, metavar="FILE", help="say why it failed there, not on stderr")
    options = parser.parse_args(arguments)
    try:
        run(options.config, options.out, options.force)
    except RltraceError as error:
        if options.reason_to is None:
            print(f"rltrace: {error}", file=sys.stderr)
        else:
            options.reason_to.write_text(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def leave_out_what_ray_does_not_know() -> None:
    """Keep Ray's words about a closed socket off the terminal; call this before Ray is imported, because it reads this
    then."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RAY_KNOWS_NO_MORE)


def checked(file: str, force: bool = False) -> Config:
    """Return the configuration of a file, after checking it and the machine that it needs.

    Raises:
        ConfigError: before anything was made or started.
    """
    from rltrace_reference import config as configuration
    from rltrace_reference import task

    config = configuration.load(file, vocabulary=task.VOCABULARY, force=force)
    if config.device == "cuda" and config.ray_address is None:  # a cluster's GPUs are not this machine's
        from rltrace_reference import device  # imports torch

        device.check(config)
    return config


def run(file: str, out: Path | None, force: bool = False) -> None:
    """Check everything that can be checked, then train.

    Raises:
        ConfigError: before anything was made or started.
        RunError: the run failed.
    """
    if not sys.platform.startswith("linux"):
        raise RltraceError(f"the reference run needs Linux, this is {sys.platform}; recordings can be read anywhere")
    config = checked(file, force)
    steps_file = None if out is None else out / "steps.jsonl"
    if steps_file is not None and steps_file.exists():
        raise ConfigError(f"--out: {steps_file} is there already and would be overwritten; name another folder")

    from rltrace_reference import garbage
    from rltrace_reference.progress import Display
    from rltrace_reference.step_record import StepRecord

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)

    def keep(record: StepRecord) -> None:
        if steps_file is not None:
            with steps_file.open("ab") as lines:
                lines.write(msgspec.json.encode(record) + b"\n")

    leave_out_what_ray_does_not_know()
    garbage.pause()
    with Display(config.steps) as display:
        from rltrace_reference.train import train  # imports torch and Ray for seconds, in sight of the display

        train(config, display, keep)


if __name__ == "__main__":
    sys.exit(main())

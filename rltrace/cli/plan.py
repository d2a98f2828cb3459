"""`rltrace plan` says before a run what each GPU will hold, whether it fits, and how far each setting can go."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rltrace.cli.as_json import echo_json
from rltrace.cli.completion import recordings
from rltrace.cli.runs import LIMITS_OPTION, open_run
from rltrace.errors import ConfigError, MissingExtraError
from rltrace.limits import Limits

if TYPE_CHECKING:
    from rltrace.analysis.plan.asked import Asked
    from rltrace.analysis.plan.beside import Beside
    from rltrace.analysis.plan.measured import Measured
    from rltrace.analysis.plan.plan import Plan

REFERENCE = "rltrace_reference"


@click.command()
@click.argument("words", nargs=-1, metavar="CONFIG|RUN [-- SETTINGS]", shell_complete=recordings)
@click.option("--gpu", metavar="NAME", help="The card: H100, H200, A100 ..., or its memory, such as 80GiB.")
@click.option("--gpus", type=click.IntRange(1), help="Ranks, if the settings do not say.")
@click.option("--model", metavar="PATH", help="Folder of a checkpoint on this machine, or its config.json.")
@click.option("--shape", metavar="NAME=SIZE,...", default="", help="Sizes of the model, in the words of config.json.")
@click.option("--like", metavar="RUN", help="An earlier Recording on such a machine: better than figures of others.")
@click.option("--json", "as_json", is_flag=True, help="For programs; the keys are in docs/json.md.")
@LIMITS_OPTION
def plan(
    words: tuple[str, ...],
    gpu: str | None,
    gpus: int | None,
    model: str | None,
    shape: str,
    like: str | None,
    as_json: bool,
    limits: Limits,
) -> None:
    """Say what each GPU of a run will hold, before it runs.

    CONFIG is a configuration of the reference run, a file or a script with verl's hydra settings, or one with TRL's
    arguments; what stands after `--` is added to it, or is all there is. RUN is a Recording: its settings are planned,
    and what it measured is used. The answer is bytes by owner and phase, each with its uncertainty, the largest value
    of each setting that fits, and a recommended one.
    """
    from rltrace.analysis.plan import asked
    from rltrace.analysis.plan.plan import plan as planned

    wanted = asked.Wanted(gpu=gpu, ranks=gpus, model=model, shape=shape)
    known = _like(like, wanted, limits) if like is not None else None
    if words and _is_recording(words[0]):
        question = _of_recording(words, wanted, limits)
    else:
        question = asked.of_words(words, wanted, known, _reference)
    found = planned(question.settings, known or question.known)
    if as_json:
        echo_json(found)
        return
    from rltrace.cli.tables import console
    from rltrace.cli.tables.plan import show_plan

    screen = console()
    show_plan(found, screen)
    if len(words) == 1 and _is_recording(words[0]):
        from rltrace.cli.tables.plan import beside_line

        screen.print(beside_line(_beside(found, words[0], limits)))


def _is_recording(word: str) -> bool:
    path = Path(word)
    return path.suffix == ".zip" or (path.is_dir() and not (path / "config.json").is_file())


def _of_recording(words: tuple[str, ...], wanted: Any, limits: Limits) -> Asked:
    from rltrace.analysis.plan import asked

    known = _measured(words[0], limits)
    manifest = open_run(words[0], limits).manifest
    return asked.of_manifest(manifest, words[0], words[1:], wanted, known)


def _beside(found: Plan, run: str, limits: Limits) -> list[Beside]:
    """Return a plan's figures beside those of the run's fullest GPU."""
    from rltrace.analysis.figures import figures
    from rltrace.analysis.plan.beside import beside

    devices = figures(open_run(run, limits)).summary.memory
    return list(beside(found, max(devices, key=lambda device: device.peak_bytes)))


def _like(run: str, wanted: Any, limits: Limits) -> Measured:
    """Return what a Recording measured, with its engine's settings if plan knows them."""
    from rltrace.analysis.plan import asked

    known = _measured(run, limits)
    try:
        return (
            asked.of_manifest(open_run(run, limits).manifest, run, (), wanted._replace(gpu=None), known).known or known
        )
    except ConfigError:  # of another framework, or of a model that is elsewhere: the rest is as good
        return known


def _measured(run: str, limits: Limits) -> Measured:
    from rltrace.analysis.figures import figures
    from rltrace.analysis.plan.measured import of_summary

    found = of_summary(run, figures(open_run(run, limits)).summary)
    if found is None:
        raise ConfigError(f"{run}: no GPU's memory was measured in it; name a Recording of a run on GPUs")
    return found


def _reference(file: str) -> dict[str, Any]:
    """Return a configuration as the reference run itself has checked it, which is found by name."""
    import msgspec

    missing = [name for name in (REFERENCE, "yaml") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"a plan of {file} needs {', '.join(missing)}, not installed here", "run")
    load = importlib.import_module(f"{REFERENCE}.config").load
    settings: dict[str, Any] = msgspec.to_builtins(load(file, vocabulary=1))
    return settings

"""Checkpoints and validation inside of steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Finding, Setting
from rltrace.analysis.findings.run import Run

NAME = "checkpoints_and_validation"


class Occasion(NamedTuple):
    """What happens in some steps only."""

    what: str
    names: tuple[str, ...]
    """Names of its spans, those of verl's hooks and those that programs use."""
    settings: tuple[Setting, ...]


OCCASIONS = (
    Occasion(
        "checkpoint",
        ("trainer.save_checkpoint", "checkpoint.save", "checkpoint.load", "save_checkpoint", "checkpoint"),
        (
            Setting("verl", "trainer.save_freq: larger"),
            Setting("TRL", "GRPOConfig(save_steps=...): larger"),
            Setting("PyTorch", "torch.distributed.checkpoint.async_save"),
        ),
    ),
    Occasion(
        "validation",
        ("trainer.validate", "validate", "validation", "evaluate", "evaluation"),
        (
            Setting("verl", "trainer.test_freq: larger"),
            Setting("TRL", "GRPOConfig(eval_steps=...): larger"),
            Setting("your program", "validate on fewer samples"),
        ),
    ),
)


def judge(run: Run) -> list[Finding]:
    """Price each of them over all steps."""
    return [found for one in OCCASIONS for found in _of(run, one)] if len(run.steps) else []


def _of(run: Run, one: Occasion) -> Iterator[Finding]:
    price = run.seconds_in(run.spans_named(*one.names))
    having = price > 0
    if having.any():
        yield run.finding(
            NAME,
            f"A {one.what} takes {as_text(price[having].mean())} in {having.sum()} of {len(run.steps)} steps",
            [f"{as_text(price.mean())} of a step in the mean"],
            per_step=price,
            less_because="with fewer of them more is lost when a run dies, or it is known later how it goes",
            settings=one.settings,
        )

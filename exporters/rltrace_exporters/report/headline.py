"""What the run was, and the numbers that a reader looks for first."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from rltrace.analysis.fates import having
from rltrace.analysis.findings import notable
from rltrace.analysis.ledger import FREE
from rltrace.analysis.machines import described
from rltrace_exporters.report.amounts import as_text, between_as_text, count, gibibytes, percentage
from rltrace_exporters.report.blocks import Figure, Figures, Note
from rltrace_exporters.report.sections import Block
from rltrace_exporters.report.values import RunValues, is_gpu, most_used

SHOWN_PACKAGES = ("verl", "trl", "openrlhf", "areal", "skyrl", "vllm", "sglang", "torch", "ray", "transformers")


def title_line(values: RunValues) -> str:
    """Return in one line what was run: programs, ranks, machines, when, how long."""
    return " · ".join(_facts(values))


def _facts(values: RunValues) -> Iterator[str]:
    run = values.summary.run
    versions = [f"{name} {run.versions[name]}" for name in SHOWN_PACKAGES if name in _used(values)]
    if versions:
        yield ", ".join(versions)
    ranks = [lane for lane in values.ranks if lane.rank is not None]
    hosts = {process.host for process in values.summary.processes}
    if ranks:
        yield f"{count(len(ranks), 'rank')} on {count(len(hosts), 'host')}"
    if gpus := described(run.machines).get("gpus"):
        yield gpus
    if run.created_unix_seconds is not None:
        yield datetime.fromtimestamp(run.created_unix_seconds, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    yield f"{as_text(run.seconds)} recorded" if run.seconds < 120 else f"{run.seconds / 60:,.0f} min recorded"
    if run.is_live:
        yield "still running"
    elif run.exit_code:
        yield f"ended with exit code {run.exit_code}"


def _used(values: RunValues) -> set[str]:
    """Return the packages that the run imported, by its hooks; all that it was made with if no hook says so."""
    versions = values.summary.run.versions
    hooked = {hook.instrumentation.partition("_")[0] for hook in values.summary.hooks if hook.state == "installed"}
    used = {name for name in versions if name in hooked or name == "torch"}
    return used if hooked else set(versions)


def key_figures(values: RunValues) -> list[Block]:
    """Return the numbers that a reader looks for first, and what makes all of them less certain."""
    return [Figures(list(_figures(values))), *(Note(f"Note: {doubt}.") for doubt in values.why.doubts)]


def _figures(values: RunValues) -> Iterator[Figure]:
    steady = values.summary.steady
    if steady is not None:
        length = steady.seconds
        between = between_as_text(length.least_seconds, length.most_seconds)
        many = len(steady.steps)
        note = f"{between} over {count(many, 'step')}" if many > 1 else "one step"
        yield Figure("a step", as_text(length.mean_seconds), note + (", the first" if steady.has_first else ""))
        rates = [step.tokens_per_second for step in values.summary.steps if step.steady and step.tokens_per_second]
        if rates:
            yield Figure("tokens per second", f"{sum(rates) / len(rates):,.0f}", "mean of the steps")
    if (card := values.fullest) is not None:
        used = most_used(card)
        capacity = card.peak_bytes + card.at_peak_bytes[FREE] if card.at_peak_bytes.get(FREE) else None
        note = f"of {gibibytes(capacity)}, {gibibytes(capacity - used)} free" if capacity else "capacity unknown"
        yield Figure("peak of the fullest card" if is_gpu(card) else "peak of memory", gibibytes(used), note)
    found = notable(values.why)
    priced = [one for one in found if one.seconds_per_step is not None]
    if priced and priced[0].seconds_per_step is not None and priced[0].share is not None:
        first = priced[0]
        yield Figure("largest finding", percentage(first.share or 0), f"of a step: {first.id.replace('_', ' ')}")
    if steady is not None and steady.coverage is not None:
        idle = steady.coverage.idle + steady.coverage.unlabelled
        yield Figure("in no phase", percentage(idle), f"of a step, {percentage(steady.coverage.idle)} idle")
    if died := having(values.summary, "died"):
        yield Figure("processes that died", f"{len(died):,}", f"of {len(values.summary.processes):,}")

"""The rollout: how long its trajectories and requests were, how large, and who did them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from rltrace.analysis.distributions import Distribution
from rltrace.analysis.rollout import (
    FIRST_TOKEN_SECONDS,
    NAMES,
    PROMPT_TOKENS,
    QUEUE_SECONDS,
    REQUEST_SECONDS,
    SECONDS,
    TOKENS,
    TOKENS_PER_SECOND,
    TRAJECTORY_SECONDS,
    EngineFigures,
    Rollout,
    SteadyRollout,
)
from rltrace.analysis.summary import Summary
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled

_OF_REQUESTS = (QUEUE_SECONDS, FIRST_TOKEN_SECONDS, TOKENS_PER_SECOND, PROMPT_TOKENS, TOKENS)

FEW = 3
"""Tools that one line names."""

UNEQUAL = 1.25
"""How much longer than the median the longest one is where the first screen says so."""

TAIL_MATTERS = 0.05
"""Share of the rollout without the slowest 5 % from which on the first screen says what these cost."""


def rollout_line(summary: Summary) -> Text | None:
    """Return one line if some of a rollout take much longer than others; None if the phases say as much."""
    found = summary.rollout
    if found is None or found.seconds is None:
        return None
    lengths = found.distributions.get(TRAJECTORY_SECONDS) or found.distributions.get(REQUEST_SECONDS)
    if lengths is None or lengths.maximum < UNEQUAL * lengths.p50:
        return None
    many, what = (found.trajectories, "trajectory") if found.trajectories else (found.requests, "request")
    counted = figures.count(round(many / max(len(found.steps), 1)), what)
    spread = ", ".join(
        f"{name} {figures.seconds(value)}"
        for name, value in (("p50", lengths.p50), ("p99", lengths.p99), ("longest", lengths.maximum))
    )
    said = f" {_seconds(found.seconds)} of {counted}: {figures.with_unit(spread)}"
    if (tail := found.tail) is not None and tail.seconds >= TAIL_MATTERS * tail.without_seconds:
        said += f"; without the slowest 5 % {_seconds(tail.without_seconds)}"
    return Text.assemble(("Rollout", "bold"), said)


def rollout_table(found: SteadyRollout, when: str) -> RenderableType:
    """Draw the distributions of a rollout, and in words what it has of each of few.

    Args:
        found: The rollouts of the steady steps, or of the run.
        when: Of which steps they are; empty for the whole run.
    """
    table = Figures("", Column("mean", 4), Column("p50", 9), Column("p95", 5), Column("p99", 6), Column("longest", 8))
    for name, called in NAMES.items():
        if (of := found.distributions.get(name)) is not None:
            write, unit = (figures.seconds, ", s") if name in SECONDS else (figures.number, "")
            table.add_row(called + unit, *(write(value) for value in _values(of)))
    many = [figures.count(many, what) for what, many in _counts(found) if many]
    title = f"Rollout: {', '.join(many) or 'none'}{f', {when}' if when else ''}"
    return titled(title, table, "\n".join(_notes(found)))


def _counts(found: Rollout) -> tuple[tuple[str, int], ...]:
    return ("trajectory", found.trajectories), ("request", found.requests)


def _values(of: Distribution) -> tuple[float, ...]:
    return of.mean, of.p50, of.p95, of.p99, of.maximum


def _seconds(length: float) -> str:
    return figures.with_unit(figures.seconds(length))


def _notes(found: SteadyRollout) -> Iterator[str]:
    yield from _length(found)
    yield from _balance(found)
    yield from _groups(found)
    yield from _tools(found)
    if found.engine is not None:
        yield _of_engine(found.engine)
    yield from _in_flight(found)
    if found.validating:
        yield f"{figures.count(found.validating, 'trajectory')} of a validation: in no figure here"
    yield from _unknown(found)


def _length(found: SteadyRollout) -> Iterator[str]:
    if found.seconds is None:
        return
    whole = f"{'a rollout takes' if found.steps else 'takes'} {_seconds(found.seconds)} from first to last"
    if (tail := found.tail) is None:
        yield whole
        return
    compared = " of its last engine" if tail.of == "last engine" else ""
    yield (
        f"{whole}; its engines work for {_seconds(tail.seconds + tail.without_seconds)}, and for "
        f"{_seconds(tail.without_seconds)} without the slowest 5 % of the requests{compared}"
    )


def _balance(found: SteadyRollout) -> Iterator[str]:
    balance = found.balance
    if balance is None or balance.engines < 2:
        return
    share = figures.between(f"{balance.least:,.0f}", f"{balance.most:,.0f}")
    done = figures.between_seconds(balance.first_done_seconds, balance.last_done_seconds)
    yield (
        f"{balance.engines} engines with {share} {balance.unit} each, done after {figures.with_unit(done)}; "
        f"most often last: {balance.last_engine}"
    )


def _groups(found: SteadyRollout) -> Iterator[str]:
    groups = found.prompts
    if groups is None:
        return
    samples = figures.between(str(groups.least_samples), str(groups.most_samples))
    yield (
        f"{figures.count(groups.prompts, 'prompt')} with {samples} samples: the last one ends "
        f"{_seconds(groups.waiting_seconds.p50)} after the first (p50), {_seconds(groups.waiting_seconds.maximum)} "
        "at most"
    )


def _tools(found: SteadyRollout) -> Iterator[str]:
    longest = sorted(found.tools, key=lambda tool: -(tool.seconds.mean * tool.calls if tool.seconds else 0.0))
    parts = [
        f"{figures.count(tool.calls, 'call')} of {tool.name}"
        + (f", p50 {_seconds(tool.seconds.p50)}, p99 {_seconds(tool.seconds.p99)}" if tool.seconds else ", none over")
        for tool in longest[:FEW]
    ]
    if len(longest) > FEW:
        parts.append(f"{len(longest) - FEW} more tools")
    if parts:
        yield "; ".join(parts)


def _of_engine(engine: EngineFigures) -> str:
    parts = []
    if engine.most_running is not None:
        waited = "" if engine.most_waiting is None else f", {engine.most_waiting:,} waiting"
        parts.append(f"at most {engine.most_running:,} running{waited} in one engine")
    if engine.most_kv_cache_share is not None:
        parts.append(f"KV cache at most {engine.most_kv_cache_share:.1%} full")
    parts.append(figures.count(engine.preempted, "preemption") if engine.preempted else "no preemption")
    if engine.cached_share is not None:
        parts.append(f"{engine.cached_share:.1%} of the prompts' tokens from the prefix cache")
    if engine.drafted_tokens:
        share = engine.accepted_tokens / engine.drafted_tokens
        parts.append(f"{share:.1%} of {engine.drafted_tokens:,} drafted tokens accepted")
    return "; ".join(parts)


def _in_flight(found: SteadyRollout) -> Iterator[str]:
    """Return what crosses the edges of steps, and of the run."""
    if found.steps_without:
        without = figures.count(len(found.steps_without), "steady step")
        yield f"{without} without any: {figures.ranges(found.steps_without)}"
    if found.requests_ended_later or found.requests_carried_over:
        yield (
            f"outlasting their step, where all of their length counts: "
            f"{figures.count(found.requests_ended_later, 'request')}; in flight when a step began: "
            f"{found.requests_carried_over:,}"
        )
    open_ones = [
        figures.count(many, what)
        for what, many in (("trajectory", found.trajectories_not_over), ("request", found.requests_not_over))
        if many
    ]
    if open_ones:
        yield f"not over at the end of the Recording, and in no distribution: {', '.join(open_ones)}"


def _unknown(found: SteadyRollout) -> Iterator[str]:
    """Return what of the requests is missing, by reason; and once whether there are trajectories."""
    if not found.trajectories and not found.trajectories_not_over:
        yield 'no trajectory was recorded (`rltrace.span("trajectory")` makes one), so turns and tools are unknown'
    by_reason: dict[str, list[str]] = {}
    for name in _OF_REQUESTS:
        if name in found.unknown:
            by_reason.setdefault(found.unknown[name], []).append(NAMES[name])
    yield from (f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())

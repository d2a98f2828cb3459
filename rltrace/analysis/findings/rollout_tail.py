"""The last requests of a rollout run alone, while the engines are nearly empty."""

from __future__ import annotations

from rltrace.analysis.engine_requests import LEAST_REQUESTS, TAIL, Tails, tails
from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.engine_requests import engine_requests
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run

NAME = "rollout_tail"

LEAST_SHARE = 2 * TAIL
"""Share of the rollout that the tail must take. If requests ended evenly, it would take half of this."""

SETTINGS = (
    Setting("verl", "data.max_response_length: a lower limit cuts the tail"),
    Setting("TRL", "GRPOConfig(max_completion_length=...): a lower limit cuts the tail"),
    Setting("your program", "oversample, and go on without the slowest"),
    Setting("your program", "an asynchronous rollout keeps the engine busy with the next batch"),
)


def tails_of(run: Run) -> Tails:
    """Return for each steady step when only the slowest 5 % run in the engine that ends last.

    Only the requests of that engine are compared, because another finding tells that an engine is behind the others.

    Raises:
        UnjudgeableError: a step has too few requests in an engine.
    """
    requests = engine_requests(run)
    run.require_one_time()
    found = tails(requests, len(run.steps))
    for number, many in zip(run.numbers, found.requests.tolist(), strict=True):
        if not many:
            raise UnjudgeableError(f"step {number} has no requests")
        if many < LEAST_REQUESTS:
            raise UnjudgeableError(f"an engine has fewer requests in a step than the {LEAST_REQUESTS} that it takes")
    return found


def judge(run: Run) -> list[Finding]:
    """Price the time from which on only the slowest 5 % run in the engine that ends last."""
    found, engines = tails_of(run), engine_requests(run).engines
    tail, whole = found.seconds, found.rollout_seconds
    if tail.mean() < LEAST_SHARE * whole.mean():
        return []
    worst = int(tail.argmax())
    engine, tokens = engines[int(found.engine[worst])], int(found.tokens[worst])
    ranks = sorted({rank for place in found.engine.tolist() if (rank := engines[place].rank) is not None})
    return [
        run.finding(
            NAME,
            f"The slowest 5 % of the requests run alone for {as_text(tail.mean())} of a rollout of "
            f"{as_text(whole.mean())}",
            [
                f"without the slowest 5 % the rollout would have taken {as_text((whole - tail).mean())}",
                f"step {run.numbers[worst]}: the last request ends {as_text(tail[worst])} after 95 % of them, in "
                f"{engine.name}" + (f", with {tokens:,} tokens" if tokens >= 0 else ""),
            ],
            per_step=tail,
            less_because="samples that are cut or left out are missing from the batch, which changes what is learned",
            figures={"rollout_seconds": float(whole.mean())},
            ranks=ranks,
            phases=["rollout.generate"],
            settings=SETTINGS,
        )
    ]

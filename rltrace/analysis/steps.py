"""Steps: when each began and ended, and how it went."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import Intervals
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.observations import Observations
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.samples import Samples
from rltrace.events import BRIEF, REWARD_MEAN, TOKENS, TOKENS_PER_SECOND, Span

NOT_CHOSEN, DISK_BUDGET, LEFT = "not chosen", "disk budget", "left on its host"
"""Why a step is brief."""

FIRST = 1
"""The window of the first step; the one before it is the start-up."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the run, as its driver saw it; or of a process, if there is neither a driver nor a rank."""

    lane: str
    """Whose step it is: `driver`, `rank 0`, or the name of the process. The driver's steps count; without a driver the
    lowest rank's; without ranks each process has its own."""
    step: int
    """The `step` argument of its span; without one, its place in the run from 0."""
    start_seconds: float
    """When it began, counted from the beginning of the Recording."""
    end_seconds: float | None
    """When it ended; None while it is open."""
    seconds: float
    """Its length; until the last event of the Recording while it is open."""
    left_open_at_seconds: float | None
    """When its process ended in good order without ending the step; None otherwise."""
    error: str | None
    """Name of the exception that aborted the step; None if none did."""
    error_message: str | None
    """The first line of what that said, with secrets redacted; None where it said nothing or nobody recorded it."""
    recorded: bool
    """False if recording was paused in it, so that only its length is known (`rltrace overhead` does that)."""
    brief: bool
    """Whether spans of it are missing on purpose: they were not to be recorded (`--record-steps`), or were removed to
    keep to the disk budget. Phases, memory at their boundaries and errors are there; after a removal also weight sync
    and requests. It counts in `steady` only if all steps are like that."""
    brief_because: str | None
    """Why it is brief: `not chosen` (`--record-steps`), `left on its host` (`rltrace collect --steps`) or
    `disk budget`; None if it is not."""
    steady: bool
    """Whether the step counts in `steady`."""
    inferred: bool
    """Whether nobody marked it: it was inferred from what ran. `inferred` of the summary says how."""
    reward_mean: float | None
    """Argument `reward_mean` of the span; without it, the driver's last sample of that name inside the step."""
    tokens: float | None
    """Argument `tokens` of the span, or the driver's last sample likewise."""
    tokens_per_second: float | None
    """Argument `tokens_per_second` or the last sample likewise; without it, tokens divided by seconds."""
    figures: dict[str, float]
    """Every other number that the span was given, or that the driver sampled in the step: a loss, a gradient norm."""


class StepWindows:
    """The steps of a run, and the windows in which phases are counted.

    Windows are disjoint: if steps overlap, one ends at the beginning of the next. The first window is the start-up. A
    Recording without steps has one window: the whole of it. Steps of a driver or of ranks are the run's. Processes that
    are neither have nothing to do with one another's steps, so each has windows of its own: see `of`.
    """

    def __init__(self, seen: Observations, owner: Seen | None = None) -> None:
        owners = [owner] if owner is not None else _owners(seen)
        self.owner = owners[0] if owners else None
        """The process whose `step` spans count; None if there are none."""
        self.others = {other.lane: StepWindows(seen, other) for other in owners[1:]}
        self.spans: list[Span] = sorted(self.owner.steps, key=lambda span: span.start_ns) if self.owner else []
        self.numbers: list[int | None] = [None]
        """The step of each window; None for the start-up, or for the whole."""
        windows = [(seen.start_ns, self.spans[0].start_ns if self.spans else seen.end_ns)]
        for place, span in enumerate(self.spans):
            following = self.spans[place + 1].start_ns if place + 1 < len(self.spans) else seen.end_ns
            windows.append((span.start_ns, min(_end_ns(span, seen), following)))
            self.numbers.append(number_of(span, place))
        self.has_beginning = (
            self.owner is None or self.spans[0].args.get("step") == 0 or not self.owner.process.may_lack_steps
        )
        """Whether the first of these steps is surely the run's first: nothing is gone, or it is step 0."""
        self.windows: Intervals = np.array(windows, np.int64)
        self._starts_ns, self._ends_ns = [start for start, _ in windows[1:]], [end for _, end in windows[1:]]
        self.recorded = [True, *map(_is_recorded, self.spans)]
        """For each window, whether anything in it was recorded."""
        self.finished = [True, *map(_is_finished, self.spans)]
        """For each window, whether its step is over and was not aborted."""
        known = seen.recording.brief_steps
        self.brief = [False, *(span.args.get(BRIEF) is True for span in self.spans)]
        self.brief = [is_said or number in known for is_said, number in zip(self.brief, self.numbers, strict=True)]
        """For each window, whether only what figures of its step are made of is left of it, or was recorded at all."""
        over = [place for place in range(1, len(windows)) if self.recorded[place] and self.finished[place]]
        whole = [place for place in over if not self.brief[place]] or over
        is_warm = seen.recording.steps_are_chosen or not self.has_beginning
        later = [place for place in whole if place != FIRST or is_warm]
        self.steady = later or whole
        """Windows of the steps that a mean is computed over. The first step warms up kernels, communicators and caches,
        so that a single other one says more than a mean of both."""

    def of(self, lane: Lane) -> StepWindows:
        """Return the windows that a lane's spans are counted in."""
        return self.others.get(lane, self)

    def step_at(self, at_ns: int) -> int | None:
        """Return the number of the step that an instant is in, without its end; None before the first and between
        them."""
        place = bisect.bisect_right(self._starts_ns, at_ns)
        return self.numbers[place] if place and at_ns < self._ends_ns[place - 1] else None

    def places(self, at_ns: NDArray[np.int64]) -> NDArray[np.intp]:
        """Return the window that each instant is in; the first one if it is between two."""
        found = np.maximum(np.searchsorted(self.windows[:, 0], at_ns, side="right") - 1, 0)
        return np.where(at_ns < self.windows[found, 1], found, 0)

    def all(self) -> list[StepWindows]:
        """Return these windows, and those of each process with steps of its own."""
        return [self, *self.others.values()]


def steps(seen: Observations, windows: StepWindows) -> list[Step]:
    """Return every step in order; rewards and tokens come from the span's late arguments, else from the last sample
    inside it."""
    return [step for own in windows.all() for step in _steps(seen, own)]


def _steps(seen: Observations, windows: StepWindows) -> Iterator[Step]:
    steady = frozenset(windows.steady)
    return (_step(seen, windows, place, is_steady=place in steady) for place in range(1, len(windows.numbers)))


def _step(seen: Observations, windows: StepWindows, place: int, *, is_steady: bool) -> Step:
    span, number = windows.spans[place - 1], windows.numbers[place]  # the first window is the start-up
    assert windows.owner is not None and number is not None
    end_ns = _end_ns(span, seen)
    if span.end_ns is None and seen.is_end_known(windows.owner):
        end_ns = min(end_ns, seen.open_until_ns(windows.owner))
    seconds = (end_ns - span.start_ns) / 1e9
    numbers = {name: float(value) for name, value in span.args.items() if _is_number(value) and name != "step"}
    for name, samples in windows.owner.figures.items():
        value = _last_inside(samples, span.start_ns, end_ns)
        if value is not None:
            numbers.setdefault(name, value)
    tokens = numbers.pop(TOKENS, None)
    rate = numbers.pop(TOKENS_PER_SECOND, None)
    if rate is None and tokens is not None and seconds > 0:
        rate = tokens / seconds
    return Step(
        lane=windows.owner.lane.name,
        step=number,
        start_seconds=(span.start_ns - seen.start_ns) / 1e9,
        end_seconds=_seconds_at(span.end_ns, seen),
        seconds=seconds,
        left_open_at_seconds=_seconds_at(windows.owner.process.end_ns, seen) if span.end_ns is None else None,
        error=_error(span),
        error_message=_error_message(span),
        recorded=_is_recorded(span),
        brief=windows.brief[place],
        brief_because=_brief_because(span, is_left=number in seen.recording.left_steps)
        if windows.brief[place]
        else None,
        steady=is_steady,
        inferred=span.is_inferred,
        reward_mean=numbers.pop(REWARD_MEAN, None),
        tokens=tokens,
        tokens_per_second=rate,
        figures=numbers,
    )


def _brief_because(span: Span, *, is_left: bool) -> str:
    if span.args.get(BRIEF) is True:
        return NOT_CHOSEN
    return LEFT if is_left else DISK_BUDGET


def _seconds_at(at_ns: int | None, seen: Observations) -> float | None:
    return None if at_ns is None else (at_ns - seen.start_ns) / 1e9


def _owners(seen: Observations) -> list[Seen]:
    """Return the driver; without a driver, the lowest rank that has steps; else each process that has."""
    having = sorted(
        (process for process in seen.processes if process.steps),
        key=lambda process: (order(process.lane)[:3], process.first_ns),
    )
    is_run = having and (having[0].lane.is_driver or having[0].lane.rank is not None)
    return having[:1] if is_run else having


def _error(span: Span) -> str | None:
    error = span.args.get("error")
    return None if error is None else str(error)


def _error_message(span: Span) -> str | None:
    message = span.args.get("error_message")
    return None if message is None else str(message)


def is_whole(span: Span) -> bool:
    """Return whether a step is over, was not aborted, and was recorded."""
    return _is_finished(span) and _is_recorded(span)


def _is_finished(span: Span) -> bool:
    return span.end_ns is not None and _error(span) is None


def _is_recorded(span: Span) -> bool:
    return span.args.get("recorded") is not False


def _end_ns(span: Span, seen: Observations) -> int:
    return seen.end_ns if span.end_ns is None else span.end_ns


def number_of(span: Span, place: int) -> int:
    """Return a step's number as the program counts; for a step without a number, its place."""
    step = span.args.get("step")
    return step if isinstance(step, int) else place


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _last_inside(samples: Samples, start_ns: int, end_ns: int) -> float | None:
    behind = bisect.bisect_right(samples.times_ns, end_ns)
    if behind and samples.times_ns[behind - 1] >= start_ns:
        return samples.values[behind - 1]
    return None

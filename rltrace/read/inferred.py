"""Infers steps and phases of a loop that marks none, from what its process ran. This happens when events are read.

A hook says what ran: `model.generate`, `model.forward` with a gradient or without, `autograd.backward`,
`optimizer.step`, `model.load_weights`. From these follow the spans of a step and of its phases, each with `inferred`
and with the `reason`. Nothing is inferred for a run that marks its steps, or whose trainer a hook knows.

`inferring.py` does this step by step while a process grows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from rltrace.events import (
    BACKWARD,
    BRIEF,
    DETAIL,
    DEVICE_TIME,
    FORWARD,
    GENERATE,
    HOST_WORK,
    INFERRED_FROM,
    LOAD_WEIGHTS,
    MEMORY_MOVES,
    OPTIMIZER_STEP,
    REWARD_MODELS,
    STEP,
    STEP_PHASES,
    Counter,
    Span,
)

Event = Span | Counter
Rows = list[tuple[int, int]]

LEARNS = (BACKWARD, OPTIMIZER_STEP)
ON_GPU = f"{DEVICE_TIME}{OPTIMIZER_STEP}"
SEEN = INFERRED_FROM | {DETAIL}
MARKS = frozenset({STEP, *STEP_PHASES}) - MEMORY_MOVES
"""Spans of hooks that know a trainer. Sleeps and wake-ups are not among them, because hooks of engines make those."""
ROLLOUT, OLD, REF, UPDATE, SYNC = (
    "rollout.generate",
    "actor.old_log_prob",
    "ref.log_prob",
    "actor.update",
    "weight_sync",
)
VALUES, REWARD = "critic.values", "reward"

NEVER_NS = 1 << 62
"""Behind all times."""
LEAST_DECODED = 4
"""This many forwards in a row, each of one token more than the last, are a generation."""
SLACK_NS = 1_000_000
"""Work that begins within this time of a span's end comes right after the span."""
LEAST_NS = 20_000
"""A shorter piece of a phase is not shown: it is what a hook takes between two phases."""

UPDATES = "from the first forward with gradient to the last optimizer step"
BY_GENERATION = "from one generation to the next"
BY_OPTIMIZER = "from one completed accumulation to the next"


class Piece(NamedTuple):
    """One thing that ran."""

    start_ns: int
    end_ns: int
    span: Span
    label: str = ""
    """The phase that it makes on its own; empty if it makes none."""
    reason: str = ""


class Known:
    """What is known of a process: what its models and optimizers are for, and of the steps before those looked at."""

    def __init__(self) -> None:
        self.acting: set[object] = set()
        """Models that generate."""
        self.learns = False
        """Whether anything has learned."""
        self.generates = False
        """Whether anything was generated before what is looked at."""
        self.counts: dict[object, int] = {}
        """How often each optimizer had stepped before what is looked at."""
        self.steps = 0
        """How many steps were before."""
        self.begin_ns: int | None = None
        """When the step began that goes on; None if there was none before."""
        self.has_learned = False
        """Whether something has learned in it, before what is looked at."""
        self.is_brief = False
        """Whether the process did not record everything at the end of what was before."""
        self._held: set[object] = set()
        self._with_gradient: set[object] = set()

    @property
    def learned(self) -> set[object]:
        """The models that optimizers hold; if none of these is known, as in DeepSpeed, those with gradients."""
        return self._held or self._with_gradient

    def learn(self, ran: Iterable[Span]) -> None:
        """Learn from what ran."""
        for span in ran:
            self.learns |= span.name in LEARNS
            if span.name == GENERATE:
                self.acting.add(span.args.get("model"))
            elif span.name == OPTIMIZER_STEP:
                self._held.update(span.args.get("models") or ())
            elif span.name == FORWARD and span.args.get("gradient"):
                self._with_gradient.add(span.args.get("model"))


class Look(NamedTuple):
    """What a process ran, and the steps that it makes."""

    pieces: list[Piece]
    work: list[Span]
    """The work between them."""
    steps: Rows
    reason: str
    """Why these are steps."""
    details: list[Span]
    """Where it began to record everything, or ceased to, in order."""


def can_infer(hooks: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a hook of a process has seen anything from which steps and phases follow."""
    return any(hook["fired"] and not INFERRED_FROM.isdisjoint(hook.get("emits") or ()) for hook in hooks)


def is_known(hooks: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a hook of a process makes phases or steps itself."""
    return any(hook["fired"] and not MARKS.isdisjoint(hook.get("emits") or ()) for hook in hooks)


def with_inferred(events: Iterator[Event], has_steps: Callable[[], bool], *, is_over: bool) -> Iterator[Event]:
    """Yield the events of a process, and after them its inferred steps and phases.

    Args:
        events: Of the process, on its own clock.
        has_steps: Whether any process of the run has steps already; asked only if there is something to infer.
        is_over: Whether the process has ended its part, so that its last step is over too.
    """
    found: list[Span] = []
    own: Rows = []
    knows_phases, last_ns = False, 0
    for event in events:
        if isinstance(event, Span):
            last_ns = max(last_ns, event.start_ns, event.end_ns or 0)
            if event.is_automatic:
                if event.name in SEEN:
                    found.append(event)
                knows_phases |= event.name in MARKS
            elif event.is_phase:
                own.append((event.start_ns, NEVER_NS if event.end_ns is None else event.end_ns))
        yield event
    if found and not knows_phases:
        yield from infer(found, merged(own), last_ns, has_steps, is_over=is_over)


def infer(
    found: Sequence[Span], own: Rows, last_ns: int, has_steps: Callable[[], bool], *, is_over: bool = True
) -> Iterator[Span]:
    """Return the inferred spans.

    Args:
        found: What ran, in any order.
        own: When the program was in phases that it marks itself, in order. None is inferred there.
        last_ns: When the process last recorded a span.
        has_steps: Whether the run has steps already.
        is_over: Whether the process has ended its part.
    """
    known = Known()
    known.learn(found)
    seen = look(found, known, last_ns, is_over=is_over)
    yield from spans_of(seen, known, own, has_steps, thread=found[0].thread, is_over=is_over)


def look(found: Sequence[Span], known: Known, last_ns: int, *, is_over: bool) -> Look:
    """Return what ran, and the steps that it makes.

    Args:
        found: What ran, in any order; `known` has learned from it.
        known: What is known of the process.
        last_ns: When the process last recorded a span.
        is_over: Whether the process has ended its part.
    """
    pieces, work = _pieces(found, known, last_ns)
    details = sorted((span for span in found if span.name == DETAIL), key=_start_ns)
    return Look(pieces, work, *_steps(pieces, known, is_over=is_over), details)


def spans_of(
    seen: Look, known: Known, own: Rows, has_steps: Callable[[], bool], *, thread: int, is_over: bool
) -> Iterator[Span]:
    """Return the inferred spans; see `infer`.

    Args:
        thread: Whose they are.
    """
    pieces, work, steps, reason, details = seen
    if not (known.learns or generates(seen, known)):
        return
    if not has_steps():
        starts_ns = [piece.start_ns for piece in pieces]
        for number, (start_ns, end_ns) in enumerate(steps):
            is_open = number == len(steps) - 1 and not is_over
            said = {"step": known.steps + number, "inferred": True, "reason": reason}
            if was_brief(_middle_ns(starts_ns, start_ns, end_ns), details, known):
                said[BRIEF] = True
            yield _span(thread, STEP, start_ns, None if is_open else end_ns, said)
    begun_ns = [piece.start_ns for piece in pieces if piece.span.end_ns is None]
    for name, start_ns, end_ns, why in _phases(pieces, steps, work):
        is_open = any(start_ns <= at_ns < end_ns for at_ns in begun_ns)
        for begin_ns, until_ns in _outside(start_ns, end_ns, own):
            ended_ns = None if is_open and until_ns == end_ns else until_ns
            if ended_ns is None or ended_ns - begin_ns >= LEAST_NS:
                yield _span(thread, name, begin_ns, ended_ns, {"inferred": True, "reason": why})


def _middle_ns(starts_ns: Sequence[int], start_ns: int, end_ns: int) -> int:
    """Return when the middle one of what ran in a step began, by which the step is judged.

    At its edges the process may have been told of the next step already, or not yet of this one; and a step without
    work in its second half would be told by its own middle what is true of the next one.
    """
    first, behind = bisect_left(starts_ns, start_ns), bisect_left(starts_ns, end_ns)
    return starts_ns[(first + behind) // 2] if first < behind else (start_ns + end_ns) // 2


def was_brief(at_ns: int, details: Sequence[Span], known: Known) -> bool:
    """Return whether the process did not record everything at a time."""
    before = bisect_right(details, at_ns, key=_start_ns)
    return details[before - 1].args.get("full") is False if before else known.is_brief


def generates(seen: Look, known: Known) -> bool:
    """Return whether the process has generated anything so far."""
    return known.generates or any(piece.label == ROLLOUT for piece in seen.pieces)


def _span(thread: int, name: str, start_ns: int, end_ns: int | None, args: dict[str, object]) -> Span:
    return Span(name, thread, 0, start_ns, end_ns, args, lane=None, is_automatic=True)


# ---- what ran ---------------------------------------------------------------------------------------------------


def _pieces(found: Sequence[Span], known: Known, last_ns: int) -> tuple[list[Piece], list[Span]]:
    """Return what ran, with its label, and the work in between; both are in the order in which they began."""
    work = sorted((span for span in found if span.name == HOST_WORK), key=lambda span: span.start_ns)
    ran = sorted(
        (span for span in found if span.name not in (HOST_WORK, ON_GPU, DETAIL)), key=lambda span: span.start_ns
    )
    generations = [span for span in ran if span.name == GENERATE]
    learned, acting = known.learned, known.acting
    pieces = []
    inside = _Inside(generations)
    for span in ran:
        # A forward that makes a generation, as one behind DDP does, is that generation and no forward.
        if span.name == FORWARD and inside.has_one(span):
            continue
        label, reason = _label(span, learned, acting)
        end_ns = last_ns + 1 if span.end_ns is None else span.end_ns  # it may be the last of what was recorded
        pieces.append(Piece(span.start_ns, end_ns, span, label, reason))
    return _decoded(_until_computed(pieces, [span for span in found if span.name == ON_GPU])), work


def _until_computed(pieces: list[Piece], on_gpu: Sequence[Span]) -> list[Piece]:
    """Let a step of an optimizer last until the GPU is through with it, if nothing else was begun until then."""
    if not on_gpu:
        return pieces
    launched = sorted((span.start_ns - int(span.args.get("behind_host_ns", 0)), span.end_ns or 0) for span in on_gpu)
    limits_ns = [*(piece.start_ns for piece in pieces[1:]), 1 << 62]
    return [
        piece._replace(end_ns=max(piece.end_ns, min(limit_ns, _computed_ns(piece, launched))))
        if piece.span.name == OPTIMIZER_STEP and piece.span.end_ns is not None
        else piece
        for piece, limit_ns in zip(pieces, limits_ns, strict=True)
    ]


def _computed_ns(piece: Piece, launched: Rows) -> int:
    """Return when the GPU was through with what was launched in a piece; 0 if nothing was timed."""
    inside = launched[bisect_left(launched, (piece.start_ns, 0)) : bisect_left(launched, (piece.end_ns, 0))]
    return max((end_ns for _, end_ns in inside), default=0)


class _Inside:
    """Knows which spans have another one inside; it has to be asked in order."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._at = 0

    def has_one(self, span: Span) -> bool:
        """Return whether one begins inside of a span."""
        while self._at < len(self._spans) and self._spans[self._at].start_ns < span.start_ns:
            self._at += 1
        if span.end_ns is None or self._at == len(self._spans):
            return False
        return self._spans[self._at].start_ns < span.end_ns


def _label(span: Span, learned: set[object], acting: set[object]) -> tuple[str, str]:
    model = span.args.get("model")
    if span.name == GENERATE:
        return ROLLOUT, f"{span.args.get('by')} generates"
    if span.name == LOAD_WEIGHTS:
        copies = span.args.get("by") != "torch" or (model in acting and model not in learned)
        return (SYNC, "weights are copied into what generates") if copies else ("", "")
    if span.name != FORWARD or span.args.get("gradient"):
        return "", ""
    if model not in learned:
        if any(part in str(span.args.get("module")) for part in REWARD_MODELS):
            return REWARD, "forwards without gradient of a model that scores"
        return REF, "forwards without gradient of a model that no optimizer holds"
    if span.args.get("without_adapters"):
        return REF, "forwards without gradient of the model that learns, without its adapters"
    if acting & learned and model not in acting:
        return VALUES, "forwards without gradient of a model that learns and does not generate"
    return OLD, "forwards without gradient of the model that learns"


def _decoded(pieces: list[Piece]) -> list[Piece]:
    """Label forwards as a generation if each has one token, or one more than the last: the loop samples by hand."""
    decoded: list[Piece] = []
    reason = "forwards without gradient, each of one token more"
    for run in _runs(pieces, lambda piece: (piece.label, piece.span.args.get("model"))):
        grows = _grows(run) if run[0].span.name == FORWARD and run[0].label else []
        if sum(grows) < LEAST_DECODED:
            decoded += run
            continue
        for piece, of_generation in zip(run, grows, strict=True):
            decoded.append(piece._replace(label=ROLLOUT, reason=reason) if of_generation else piece)
    return decoded


def _grows(run: Sequence[Piece]) -> list[bool]:
    """Return for each forward whether it continues the last one, or the next one continues it."""
    lengths = [piece.span.args.get("columns", 0) for piece in run]
    goes_on = [later in (1, earlier + 1) for earlier, later in pairwise(lengths)]
    return [before or after for before, after in zip([False, *goes_on], [*goes_on, False], strict=True)]


_Item = TypeVar("_Item")


def _runs(items: Iterable[_Item], key: Callable[[_Item], object]) -> Iterator[list[_Item]]:
    """Yield runs of consecutive items that have the same key."""
    run: list[_Item] = []
    for item in items:
        if run and key(run[0]) != key(item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


# ---- steps ------------------------------------------------------------------------------------------------------


def _steps(pieces: Sequence[Piece], known: Known, *, is_over: bool) -> tuple[Rows, str]:
    """Return when each step was, and why it is one; the last one may still be under way."""
    if not pieces or not known.learns:
        return [], ""
    if known.generates or any(piece.label == ROLLOUT for piece in pieces):
        return _by_generation(pieces, known, is_over=is_over), BY_GENERATION
    steps, last_ns = _by_optimizer(pieces, known), max(piece.end_ns for piece in pieces)
    ended_ns = steps[-1][1] if steps else known.begin_ns
    if not is_over and ended_ns is not None and ended_ns < last_ns:
        steps.append((ended_ns, last_ns))
    return steps, BY_OPTIMIZER


def _by_generation(pieces: Sequence[Piece], known: Known, *, is_over: bool) -> Rows:
    starts = [] if known.begin_ns is None else [known.begin_ns]
    has_learned = known.begin_ns is None or known.has_learned
    for piece in pieces:
        if piece.label == ROLLOUT and has_learned:
            starts.append(piece.start_ns)
            has_learned = False
        has_learned |= piece.span.name in LEARNS
    last_ns = max(piece.end_ns for piece in pieces)
    steps = list(pairwise([*starts, last_ns]))
    return steps if has_learned or not is_over else steps[:-1]  # a last generation without an update is no step


def _by_optimizer(pieces: Sequence[Piece], known: Known) -> Rows:
    """Return steps that end where the optimizer that steps most rarely has stepped."""
    accumulated, counts = accumulations(pieces), {**known.counts}
    for _, numbers in accumulated:
        for number in numbers:
            counts[number] = counts.get(number, 0) + 1
    if not counts:
        return []
    rarest = min(reversed(counts), key=lambda number: counts[number])  # of several, the last one
    ends = [end_ns for end_ns, numbers in accumulated if rarest in numbers]
    return list(pairwise([pieces[0].start_ns if known.begin_ns is None else known.begin_ns, *ends]))


def accumulations(pieces: Iterable[Piece]) -> list[tuple[int, set[object]]]:
    """Return when gradients were used up, and by which optimizers.

    Steps of optimizers without a backward in between belong together: DeepSpeed makes one for each group of parameters.
    """
    found: list[tuple[int, set[object]]] = []
    is_new = True
    for piece in pieces:
        if piece.span.name == OPTIMIZER_STEP:
            if is_new:
                found.append((piece.end_ns, set()))
            found[-1][1].add(piece.span.args.get("number"))
            found[-1] = piece.end_ns, found[-1][1]
        is_new = piece.span.name == BACKWARD or (is_new and piece.span.name != OPTIMIZER_STEP)
    return found


# ---- phases -----------------------------------------------------------------------------------------------------

Phase = tuple[str, int, int, str]
"""The name of a phase, when it begins and ends, and why it is one."""


def _phases(pieces: Sequence[Piece], steps: Rows, work: Sequence[Span]) -> Iterator[Phase]:
    """Yield the phases of the steps, and those before and after them."""
    cuts = sorted({start_ns for start_ns, _ in steps} | {end_ns for _, end_ns in steps})
    window: list[Piece] = []
    at = 0
    for piece in pieces:
        while at < len(cuts) and piece.start_ns >= cuts[at]:
            yield from _of_window(window, work)
            window, at = [], at + 1
        window.append(piece)
    yield from _of_window(window, work)


def _of_window(window: Sequence[Piece], work: Sequence[Span]) -> Iterator[Phase]:
    """Yield the phases of a step, one after another. The update is one, with everything that runs inside of it."""
    update = _update(window)
    begin_ns, until_ns = update or (0, 0)
    alone = [
        piece
        for piece in window
        if (piece.label or piece.span.name != LOAD_WEIGHTS) and not begin_ns <= piece.start_ns < until_ns
    ]
    runs = [run for run in _runs(alone, lambda piece: (piece.label, piece.start_ns < begin_ns)) if run[0].label]
    found = [_of_run(run, work) for run in runs]
    if update is not None:
        found.append((UPDATE, begin_ns, until_ns, UPDATES))
    found.sort(key=lambda phase: phase[1])
    limits = [*(phase[1] for phase in found[1:]), 1 << 62]
    for (name, start_ns, end_ns, why), limit_ns in zip(found, limits, strict=False):
        yield name, start_ns, min(end_ns, limit_ns), why


def _of_run(run: Sequence[Piece], work: Sequence[Span]) -> Phase:
    first, end_ns = run[0], max(piece.end_ns for piece in run)
    if first.span.name == FORWARD and first.label != ROLLOUT:
        end_ns = _with_work(end_ns, work)
    return first.label, first.start_ns, end_ns, first.reason


def _update(window: Sequence[Piece]) -> tuple[int, int] | None:
    """Return when a model learned; None if there was no backward, and no forward for one goes on."""
    ends = [piece.end_ns for piece in window if piece.span.name == OPTIMIZER_STEP]
    ends = ends or [piece.end_ns for piece in window if piece.span.name == BACKWARD]
    ends += [piece.end_ns for piece in window if piece.span.end_ns is None and _is_of_update(piece.span)]
    starts = (piece.start_ns for piece in window if piece.span.name == BACKWARD or piece.span.args.get("gradient"))
    start_ns = next(starts, None)
    return (start_ns, max(ends)) if ends and start_ns is not None and start_ns < max(ends) else None


def _is_of_update(span: Span) -> bool:
    return span.name in LEARNS or bool(span.args.get("gradient"))


def _with_work(end_ns: int, work: Sequence[Span]) -> int:
    """Return when the program has finished what it computes from the last forward's output, such as log-probs.

    That is when it drops the output; if it keeps the output, it is when the process stops computing.
    """
    at = bisect_left(work, end_ns, key=_start_ns)
    if at == len(work) or work[at].start_ns > end_ns + SLACK_NS:
        return end_ns
    kept_ns = work[at].args.get("output_ns")
    return max(end_ns, (work[at].end_ns or end_ns) if kept_ns is None else work[at].start_ns + int(kept_ns))


_start_ns = attrgetter("start_ns")


def merged(rows: Rows) -> Rows:
    """Return the rows in order, with rows that touch merged."""
    merged: Rows = []
    for begin_ns, end_ns in sorted(rows):
        if merged and begin_ns <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end_ns, merged[-1][1])
        else:
            merged.append((begin_ns, end_ns))
    return merged


def _outside(start_ns: int, end_ns: int, own: Rows) -> Iterator[tuple[int, int]]:
    """Yield the parts of a phase in which the program marks no phase itself."""
    at = max(0, bisect_left(own, (start_ns, 0)) - 1)
    while at < len(own) and own[at][0] < end_ns:
        if own[at][1] > start_ns:
            if start_ns < own[at][0]:
                yield start_ns, own[at][0]
            start_ns = own[at][1]
        at += 1
    if start_ns < end_ns:
        yield start_ns, end_ns

"""Infers steps and phases while a process grows, by the rules of `inferred.py`.

A step is given when the next one has begun: then nothing that comes later changes it, with few exceptions. A reader of
the finished Recording knows all of it. It does not count what an optimizer did before anything was generated, and of
several optimizers it goes by the one that stepped least in all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rltrace.events import BACKWARD, PHASES, STEP, Span
from rltrace.read.columns import Columns
from rltrace.read.inferred import (
    LEARNS,
    MARKS,
    NEVER_NS,
    SEEN,
    Event,
    Known,
    Look,
    Rows,
    accumulations,
    generates,
    look,
    merged,
    spans_of,
    was_brief,
)

LEAST_ACCUMULATIONS = 6
"""Where nothing is generated, steps are given once optimizers have stepped so often: one of them may step more rarely
than the others, and then each of its steps is one of the loop's."""

MOST_RAN = 20_000
"""How many pieces of work are remembered that are in no step which was given. Of more, the older half is given up."""

MOST_OWN = 20_000
"""How many phases that the program marks itself are remembered."""

_NOTHING, _RAN, _STEP, _PHASE = range(4)
_MARKS = 4
"""Of the name of a span: it is one of `SEEN`; a step; a phase; and it may be of a hook that knows a trainer."""


class Inferring:
    """What one process ran, as far as no step has it that was given."""

    def __init__(self) -> None:
        self.has_steps = False
        """Whether it has recorded a step itself."""
        self.is_known = False
        """Whether a hook in it knows the trainer."""
        self.has_given_steps = False
        """Whether a step was given that was inferred of it."""
        self.has_changed = False
        """Whether there is anything new since the last look."""
        self.is_finished = False
        """Whether nothing more will be inferred."""
        self.open: list[Span] = []
        """The step and the phase that go on."""
        self.pending: list[Span] = []
        """Steps and phases that are over and may still change: they were not given yet."""
        self._known = Known()
        self._ran: list[Span] = []
        self._own: Rows = []
        self._open_ran: list[Span] = []
        self._thread: int | None = None
        self._last_ns = 0
        self._complete_ns = 0
        """When the last step ended that was over at the look before."""
        self._texts: Sequence[str] = ()
        self._kind_of: list[int] = []

    # ---- what it ran ----

    def take(self, found: Columns | Sequence[Event]) -> None:
        """Take what has ended."""
        if self.is_finished:
            return
        spans = self._of_columns(found) if isinstance(found, Columns) else self._of_events(found)
        for span in spans:
            if span.name == STEP:
                self.has_steps = True
            if span.is_automatic and span.name in MARKS:
                self.is_known = True
            elif span.is_automatic and span.name in SEEN:
                self._run(span)
            elif span.is_phase and not span.is_automatic:
                self._own.append((span.start_ns, NEVER_NS if span.end_ns is None else span.end_ns))
        del self._own[:-MOST_OWN]

    def look_at_open(self, spans: Iterable[Span]) -> None:
        """Take what is open now."""
        if self.is_finished:
            return
        ran = []
        for span in spans:
            self._last_ns = max(self._last_ns, span.start_ns)
            self.has_steps |= span.name == STEP
            self.is_known |= span.is_automatic and span.name in MARKS
            if span.is_automatic and span.name in SEEN:
                ran.append(span)
        if _starts(ran) != _starts(self._open_ran):
            self.has_changed = True
        self._open_ran = ran

    def _run(self, span: Span) -> None:
        self._thread = span.thread if self._thread is None else self._thread
        self._ran.append(span)
        self._known.learn([span])
        self.has_changed = True

    def _of_events(self, events: Iterable[Event]) -> Iterator[Span]:
        for event in events:
            if isinstance(event, Span):
                self._last_ns = max(self._last_ns, event.start_ns, event.end_ns or 0)
                yield event

    def _of_columns(self, columns: Columns) -> Iterator[Span]:
        if not len(columns):
            return iter(())
        self._last_ns = max(self._last_ns, int(columns.start_ns.max()), int(columns.end_ns.max()))
        return columns.spans(self._rows(columns))

    def _rows(self, columns: Columns) -> NDArray[np.intp]:
        """Return the rows that tell what was run, and what is marked."""
        if columns.texts is not self._texts:  # the decoder was made anew
            self._kind_of, self._texts = [], columns.texts
        self._kind_of += [_kind(name) for name in columns.texts[len(self._kind_of) :]]
        kinds = np.array(self._kind_of, np.int8)[columns.name]
        is_automatic, kind = columns.is_automatic, kinds % _MARKS
        is_own = ~is_automatic & ((kind == _PHASE) | columns.arguments["phase"])
        is_hooks = is_automatic & ((kinds >= _MARKS) | (kind == _RAN))
        return np.flatnonzero(is_own | is_hooks | (kind == _STEP))

    # ---- what follows from it ----

    def more(self, *, has_steps: bool, do_others_step: bool, is_over: bool, is_last: bool) -> list[Span]:
        """Return the steps and phases that are over and were not given yet, and learn what goes on.

        Args:
            has_steps: Whether the run has steps that somebody marks, so that none is inferred.
            do_others_step: Whether the run has steps without this process. If it learns nothing, its phases do not wait
                for a step then.
            is_over: Whether the process has ended its part, so that its last step is over too.
            is_last: Whether it will run nothing any more, however it ended.
        """
        self.has_changed, self.is_finished = False, is_last
        if not self._ran and not self._open_ran:
            self.open, self.pending = [], []
            return []
        self._known.learn(self._open_ran)
        seen = look([*self._ran, *self._open_ran], self._known, self._last_ns, is_over=is_over)
        spans = [*self._spans(seen, has_steps, is_over=is_over)]
        over = [span for span in spans if span.end_ns is not None]
        self.open = [span for span in spans if span.end_ns is None]
        if is_last:
            given, self.pending, self._ran, self._open_ran = over, [], [], []
        else:
            given = self._give(seen, over, do_others_step=do_others_step)
        self.has_given_steps |= any(span.name == STEP for span in given)
        return given

    def _spans(self, seen: Look, has_steps: bool, *, is_over: bool) -> Iterator[Span]:
        thread = self._open_ran[0].thread if self._thread is None else self._thread
        return spans_of(seen, self._known, merged(self._own), lambda: has_steps, thread=thread, is_over=is_over)

    def _give(self, seen: Look, over: Sequence[Span], *, do_others_step: bool) -> list[Span]:
        """Return what does not change any more, and forget what it was made of."""
        complete = self._complete(seen)
        complete_ns, self._complete_ns = self._complete_ns, complete[-1][1] if complete else self._complete_ns
        begun_ns = min((span.start_ns for span in self._open_ran), default=NEVER_NS)
        is_full = len(self._ran) > MOST_RAN
        # A record may come late, of another thread or of a GPU: a step has to be over at two looks.
        settled = complete if is_full else [step for step in complete if step[1] <= min(complete_ns, begun_ns)]
        if settled:
            return self._settle(seen, over, settled[-1][1], len(settled))
        if is_full or (do_others_step and not self._known.learns):
            return self._settle(seen, over, self._limit_ns(over, begun_ns), 0)
        self.pending = list(over)
        return []

    def _complete(self, seen: Look) -> Rows:
        """Return the steps that are over: the next one has begun."""
        if generates(seen, self._known):
            return seen.steps[:-1]
        stepped = sum(self._known.counts.values()) + sum(len(numbers) for _, numbers in accumulations(seen.pieces))
        begun_ns = max((piece.start_ns for piece in seen.pieces if piece.span.name == BACKWARD), default=0)
        return [step for step in seen.steps if step[1] <= begun_ns] if stepped >= LEAST_ACCUMULATIONS else []

    def _limit_ns(self, over: Sequence[Span], begun_ns: int) -> int:
        """Return until when phases are given that are in no step: until the last one began."""
        starts = sorted(span.start_ns for span in (*over, *self.open) if span.name != STEP)
        if len(self._ran) <= MOST_RAN:
            return min(starts[-1], begun_ns) if len(starts) > 1 else 0
        middle_ns = sorted(span.start_ns for span in self._ran)[len(self._ran) // 2]
        return max([start_ns for start_ns in starts[1:] if start_ns <= middle_ns], default=middle_ns)

    def _settle(self, seen: Look, over: Sequence[Span], until_ns: int, steps: int) -> list[Span]:
        """Return what began before a time, and forget what it was made of.

        Args:
            until_ns: The time.
            steps: How many steps end there, or before.
        """
        if steps:
            given = [span for span in over if span.start_ns < until_ns]
        else:
            given = [_until(span, until_ns) for span in (*over, *self.open) if span.start_ns < until_ns]
            given = [span for span in given if span.name != STEP]
        left = [piece for piece in seen.pieces if piece.start_ns < until_ns]
        known = self._known
        known.generates = generates(seen, known)
        for _, numbers in accumulations(left):
            for number in numbers:
                known.counts[number] = known.counts.get(number, 0) + 1
        known.steps += steps
        if steps:
            known.begin_ns, known.has_learned = until_ns, False
        elif seen.steps:
            begin_ns = seen.steps[-1][0]
            known.has_learned |= any(piece.span.name in LEARNS for piece in left if piece.start_ns >= begin_ns)
            known.begin_ns = begin_ns
        known.is_brief = was_brief(until_ns - 1, seen.details, known)
        self._ran = [span for span in self._ran if span.start_ns >= until_ns]
        self._own = [row for row in self._own if row[1] > until_ns]
        self.pending = [span for span in over if span.start_ns >= until_ns]
        return given

    def give_up(self) -> None:
        """Infer nothing: a hook knows the trainer."""
        if not self.is_finished:
            self.is_finished, self.open, self.pending, self._ran, self._open_ran = True, [], [], [], []

    @property
    def learns(self) -> bool:
        """Whether a model learns in it, so that it has steps."""
        return self._known.learns

    @property
    def since_ns(self) -> int:
        """When the first thing began that no step has which was given; far ahead if there is none."""
        starts = [span.start_ns for span in (*self._ran, *self._open_ran)]
        begin_ns = self._known.begin_ns
        return min([*starts, *([begin_ns] if starts and begin_ns is not None else [])], default=NEVER_NS)


def _until(span: Span, end_ns: int) -> Span:
    return structs.replace(span, end_ns=end_ns if span.end_ns is None else min(span.end_ns, end_ns))


def _kind(name: str) -> int:
    kind = _RAN if name in SEEN else _STEP if name == STEP else _PHASE if name in PHASES else _NOTHING
    return kind + (_MARKS if name in MARKS else 0)


def _starts(spans: Iterable[Span]) -> list[tuple[int, str]]:
    return [(span.start_ns, span.name) for span in spans]

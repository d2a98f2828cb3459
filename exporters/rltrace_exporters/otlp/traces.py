"""The traces of a run: one for each step, and one for what is in none.

Processes are read one after the other, or as they grow. A step's calls are held until it is over; then they are put
below each other and become spans.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from rltrace.events import STEP, Counter, Span
from rltrace.read.recording import Process
from rltrace_exporters.otlp import requests, steps
from rltrace_exporters.otlp.calls import GENERATION, SUM, TOTALS_ONLY, Call, Totals, Tree
from rltrace_exporters.otlp.identifiers import span_id, trace_id
from rltrace_exporters.otlp.resources import Source
from rltrace_exporters.otlp.spans import context, id_of, made_as, span_of, span_of_run

NEVER_NS = 1 << 62
"""Behind all times."""

MOST_OUTSIDE = 1_000
"""How many calls without a meaning of their own are sent of each process that are in no step."""

MOST_SETTLED = 8
"""How many steps that were given are remembered for what is recorded late of them: a span that a hook writes
afterwards, with times of its own, may be read after its step was sent."""

MOST_REMEMBERED = 20_000
"""How many arrows are remembered that left one step and may arrive in another."""


class _Settled(NamedTuple):
    """A step that was given."""

    step: Call
    trace: int
    anchors: dict[object, steps.Anchors]
    sources: list[Source]


class Traces:
    """Turns what processes recorded into spans."""

    def __init__(self, run_id: str, resource: Resource) -> None:
        self.run_id = run_id
        self.sources: dict[str, Source] = {}
        self.run = context(trace_id(run_id, "run"), span_id(run_id, "run"))
        """The span of the run."""
        self.steps_sent = 0
        """How many steps became traces."""
        self._resource = resource
        self._trees: dict[str, Tree] = {}
        self._owners: list[Source] = []
        self._places: dict[str, int] = {}
        self._numbers: dict[tuple[str, int], int] = {}
        self._settled: collections.deque[_Settled] = collections.deque(maxlen=MOST_SETTLED)
        self._left_out = 0
        self._sent: collections.OrderedDict[str, SpanContext] = collections.OrderedDict()

    def process(self, process: Process, offset_ns: int) -> Source:
        """Return a process as it is known by now.

        Args:
            process: The process.
            offset_ns: What to add to its times to get nanoseconds since 1970.
        """
        source = self.sources.get(process.key)
        if source is None:
            source = self.sources[process.key] = Source(process, self.run_id, offset_ns)
            self._trees[process.key] = Tree(process.key)
        else:
            source.update(process, offset_ns)
        return source

    def add(self, source: Source, event: Span | Counter) -> None:
        """Take what a process recorded. A span that is open ends when its process was last heard of."""
        if isinstance(event, Counter):
            source.last_ns = max(source.last_ns, event.ts_ns)
            return
        source.last_ns = max(source.last_ns, event.start_ns if event.end_ns is None else event.end_ns)
        end_ns = max(event.start_ns, source.end_ns - source.offset_ns) if event.end_ns is None else event.end_ns
        source.has_steps = source.has_steps or event.name == STEP
        self._trees[source.key].add(Call(source.key, event, end_ns, source.offset_ns))

    def add_open(self, source: Source, spans: Iterable[Span]) -> None:
        """Take the spans that a process left open, after all others."""
        for span in sorted(spans, key=lambda span: span.start_ns, reverse=True):
            self.add(source, span)

    # ---- what is over ----

    def over(self, before_ns: int = NEVER_NS) -> Iterator[ReadableSpan]:
        """Yield the spans of the steps that were over before a time, and of what is in no step until then."""
        if not self.steps_sent or not steps.are_of_run(self._owners):
            self._owners = steps.owners(self.sources.values())
        yield from self._late()
        for owner in self._owners:
            tree = self._trees[owner.key]
            done = [step for step in tree.steps if step.end_ns < before_ns]
            tree.steps = [step for step in tree.steps if step.end_ns >= before_ns]
            for step in sorted(done, key=lambda step: step.start_ns):
                yield from self._outside_of_steps(step.start_ns, self._of(owner))
                yield from self._step(owner, step)

    def rest(self) -> Iterator[ReadableSpan]:
        """Yield everything else, and the span of the run."""
        yield from self.over()
        for tree in self._trees.values():  # steps that none of those that count has the number of
            for step in tree.steps:
                yield from self._spans(self.run.trace_id, step, self.run)
            tree.steps = []
        yield from self._outside_of_steps(NEVER_NS, list(self.sources.values()), is_last=True)
        start_ns = min((source.start_ns for source in self.sources.values()), default=0)
        end_ns = max((source.end_ns for source in self.sources.values()), default=start_ns)
        said = {"rltrace.run.id": self.run_id, "rltrace.processes": len(self.sources)}
        if self._left_out:
            said["rltrace.spans_left_out"] = self._left_out
        yield span_of_run(self.run, self._resource, start_ns, end_ns, said)

    def special(self, before_ns: int, open_spans: Mapping[str, Sequence[Span]]) -> Iterator[ReadableSpan]:
        """Yield what has a meaning of its own and is in no step, while the run goes on.

        Args:
            before_ns: It began before that, as did no step that is not over.
            open_spans: What each process has open.
        """
        for source in self.sources.values():
            calls = self._trees[source.key].take_special(before_ns, _open_since(open_spans.get(source.key, ()), source))
            for call in calls:
                yield from self._spans(self.run.trace_id, call, self.run)

    @property
    def has_steps_to_send(self) -> bool:
        """Whether a step is over and has not been given yet."""
        return any(tree.steps for tree in self._trees.values())

    # ---- one step ----

    def _of(self, owner: Source) -> list[Source]:
        """Return the processes whose calls are in a process's steps."""
        return list(self.sources.values()) if len(self._owners) == 1 else [owner]

    def _step(self, owner: Source, step: Call) -> Iterator[ReadableSpan]:
        place = self._places.get(owner.key, 0)
        self._places[owner.key] = place + 1
        number = steps.step_number(step, place)
        again = self._numbers[owner.key, number] = self._numbers.get((owner.key, number), 0) + 1
        of_whom = "" if len(self._owners) == 1 else f" of {owner.key}"
        trace = trace_id(self.run_id, f"step {number}{of_whom}" + (f" again {again}" if again > 1 else ""))
        step.args.setdefault("step", number)
        sources = self._of(owner)
        calls = [call for source in sources for call in self._calls_in(source, owner, step, number)]
        for source in sources:
            left = self._trees[source.key].left_over
            _merge(step.totals, left)
            left.clear()
        anchors = self._arrange(step, calls)
        self._settled.append(_Settled(step, trace, anchors, sources))
        yield from self._spans(trace, step, None)
        self.steps_sent += 1

    def _late(self) -> Iterator[ReadableSpan]:
        """Yield what belongs to steps that were given before it was read."""
        for settled in self._settled:
            step = settled.step
            for source in settled.sources:
                if source.has_steps and source.key != step.source:  # its steps are at other times
                    continue
                for call in self._trees[source.key].take(step.start_ns, step.end_ns):
                    above = self._around(call, settled.anchors, step) or step
                    parent = context(settled.trace, id_of(above.sent_as, self.run_id))
                    yield from self._spans(settled.trace, call, parent)

    def _calls_in(self, source: Source, owner: Source, step: Call, number: int) -> list[Call]:
        """Take the calls of a process that are in a step: in its own of that number, where it has one."""
        tree = self._trees[source.key]
        own = [one for one in tree.steps if source is not owner and _is_of(one, number, step)]
        if not own:
            return tree.take(step.start_ns, step.end_ns)
        tree.steps = [one for one in tree.steps if one not in own]
        return own + [call for one in own for call in tree.take(one.start_ns, one.end_ns)]

    def _arrange(self, step: Call, calls: Sequence[Call]) -> dict[object, steps.Anchors]:
        """Put the outermost calls of all processes below the step, and return its phases."""
        everything = [call for top in (step, *calls) for call in top.walk()]
        anchors = _by_place([call for call in everything if call.is_anchor and call is not step], self.sources)
        senders = requests.Senders(everything)
        touched = {id(step): step}
        for call in _bare(calls):
            above = None if call.name == STEP else self._above(call, senders, anchors, step)
            above = step if above is None or above.is_below(call) else above
            above.adopt(call)
            touched[id(above)] = above
        self._choose_requests(step, everything)
        for above in touched.values():
            if above.is_anchor:
                above.fold_frequent()
        return anchors

    def _above(
        self, call: Call, senders: requests.Senders, anchors: dict[object, steps.Anchors], step: Call
    ) -> Call | None:
        """Return what a call without anything around it belongs to; None for the step."""
        return senders.of(call) or self._around(call, anchors, step)

    def _around(self, call: Call, anchors: dict[object, steps.Anchors], step: Call) -> Call | None:
        """Return the phase that was open when a call began: of its process, its rank, or the process of the step."""
        rank = self.sources[call.source].rank
        places = (anchors.get(call.source), None if rank is None else anchors.get(rank), anchors.get(step.source))
        return next((found for at in places if at is not None and (found := at.around(call)) is not None), None)

    def _choose_requests(self, step: Call, everything: Iterable[Call]) -> None:
        outermost = [call for call in everything if call.name in GENERATION and not _is_in_generation(call)]
        kept = {id(call) for call in requests.chosen(outermost)}
        left = [call for call in outermost if id(call) not in kept]
        parents = {id(call.parent): call.parent for call in left if call.parent is not None}
        for parent in parents.values():
            parent.inside = [call for call in parent.inside if call.name not in GENERATION or id(call) in kept]
        if left:
            step.args["requests"] = len(outermost)
            step.args["requests_sent"] = len(kept)

    # ---- outside of steps ----

    def _outside_of_steps(
        self, before_ns: int, sources: Sequence[Source], *, is_last: bool = False
    ) -> Iterator[ReadableSpan]:
        for source in sources:
            tree = self._trees[source.key]
            calls = tree.take_special(min([before_ns, *(step.start_ns for step in tree.steps)]))
            if is_last:
                rest = tree.take(0, NEVER_NS)
                plain = [call for call in rest if call.name not in TOTALS_ONLY]
                kept = plain[:MOST_OUTSIDE]
                summed = sum(count for call in rest if call.name == SUM for count, _ in call.totals.values())
                self._left_out += len(plain) - len(kept) + summed
                calls += kept
            for call in calls:
                yield from self._spans(self.run.trace_id, call, self.run)

    # ---- spans ----

    def _spans(self, trace: int, top: Call, above: SpanContext | None) -> Iterator[ReadableSpan]:
        """Yield a call and all calls below it.

        Args:
            trace: The trace that they are in.
            top: The call.
            above: The span that it is below; None for the root of a step, which is linked with the run.
        """
        calls = list(top.walk())
        contexts = {id(call): context(trace, number) for call, number in zip(calls, self._ids(calls), strict=True)}
        for call in calls:
            for key in call.flows_out:
                self._remember(key, contexts[id(call)])
        for call in calls:
            own = contexts[id(call)]
            parent = contexts.get(id(call.parent)) if call.parent is not None else None
            if call is top:
                parent = above
            links = [link for link in self._links(call, own) if parent is None or link.span_id != parent.span_id]
            if parent is None:
                links.append(self.run)
            original = made_as(call)
            if original is not None:
                links.append(original)
            yield span_of(call, own, parent, links, self.sources[call.source])

    def _ids(self, calls: Iterable[Call]) -> Iterator[int]:
        given: collections.Counter[int] = collections.Counter()
        for call in calls:
            number = id_of(call, self.run_id)
            yield id_of(call, self.run_id, given[number]) if given[number] else number
            given[number] += 1

    def _remember(self, key: str, sender: SpanContext) -> None:
        self._sent[key] = sender
        while len(self._sent) > MOST_REMEMBERED:
            self._sent.popitem(last=False)

    def _links(self, call: Call, own: SpanContext) -> list[SpanContext]:
        found = {}
        for key in call.flows_in:
            sender = self._sent.get(key)
            if sender is not None and sender.span_id != own.span_id:
                found[sender.span_id] = sender
        return list(found.values())


def _open_since(spans: Sequence[Span], source: Source) -> dict[tuple[int, int], int]:
    """Return for each thread and task since when a phase or a request of it is open."""
    since: dict[tuple[int, int], int] = {}
    for span in spans:
        if span.is_phase or span.name in GENERATION:
            start_ns = span.start_ns + source.offset_ns
            key = (span.thread, span.task)
            since[key] = min(since.get(key, start_ns), start_ns)
    return since


def _is_in_generation(call: Call) -> bool:
    return call.parent is not None and call.parent.name in GENERATION


def _is_of(step: Call, number: int, counted: Call) -> bool:
    """Return whether a rank's own step is the one that counts with this number."""
    own = step.args.get("step")
    return own == number if own is not None else counted.start_ns <= step.start_ns < counted.end_ns


def _bare(calls: Iterable[Call]) -> Iterator[Call]:
    """Yield calls; in place of one that only answers requests, such as Ray's call of a server, the requests."""
    for call in calls:
        if not call.is_special and call.inside and all(inner.name in GENERATION for inner in call.inside):
            for inner in call.inside:
                inner.parent = None
                inner.flows_in += call.flows_in
            yield from call.inside
        else:
            yield call


def _by_place(calls: Iterable[Call], sources: dict[str, Source]) -> dict[object, steps.Anchors]:
    """Return the phases of each process by its key, and of each rank by its number."""
    found: dict[object, list[Call]] = {}
    for call in calls:
        found.setdefault(call.source, []).append(call)
        rank = sources[call.source].rank
        if rank is not None:
            found.setdefault(rank, []).append(call)
    return {place: steps.Anchors(calls) for place, calls in found.items()}


def _merge(totals: Totals, more: Totals) -> None:
    for name, (count, taken_ns) in more.items():
        known = totals.setdefault(name, [0, 0])
        known[0] += count
        known[1] += taken_ns

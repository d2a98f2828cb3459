"""What is kept of a process, by going through its events one by one: slow, and plain to see that it is right."""

from __future__ import annotations

from array import array
from typing import Any, TypeGuard

import numpy as np

from rltrace.analysis.clocks import TimeLine
from rltrace.analysis.lanes import Lane
from rltrace.analysis.numbers import number
from rltrace.analysis.seen import request_rows, seeing
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.request_rows import SERVED
from rltrace.analysis.seen.rows import extend
from rltrace.analysis.seen.sample_rows import RESIDENT
from rltrace.analysis.seen.samples import Balances
from rltrace.analysis.seen.spans import DeviceSpans, EngineSteps, Intervalled, Stages, place_of
from rltrace.events import (
    AGENT_REQUEST,
    ALLOCATED_PEAK,
    ALLOCATIONS,
    ALLOCATIONS_KEPT,
    ALLOCATIONS_RESERVED,
    DEVICE_TIME,
    ENGINE_STEP,
    GENERATE,
    KERNEL,
    MEMORY_EDGE,
    MEMORY_MOVES,
    OPERATOR,
    OUT_OF_MEMORY,
    RAY_CALL,
    RAY_SUBMIT,
    REQUEST,
    SAMPLER,
    SERVER_REQUEST,
    STEP,
    STEP_FIGURES,
    TOOLS,
    TRAJECTORIES,
    TURN,
    USED,
    WEIGHT_SYNC_STAGES,
    Counter,
    Span,
    asked_ids,
    owner_of_counter,
    owner_of_pinned,
    owner_on_host,
    prompt_of,
)
from rltrace.read.columns import _signed
from rltrace.read.gate import is_size
from rltrace.read.recording import Process

_NEVER_NS = 1 << 63
OPEN = -1


def see(process: Process, lane: Lane, time_line: TimeLine) -> Seen:
    seen = Seen(process, lane)
    shift_ns = time_line.shift_ns(process)
    last_ns = last_span_ns = process.start_ns
    owner_names: dict[str, str | None] = {}
    for event in process.events():
        if isinstance(event, Counter):
            seen.samples += 1
            last_ns = max(last_ns, event.ts_ns)
            _see_sample(seen, event, owner_names, shift_ns)
            continue
        seen.spans += 1
        end_ns = event.end_ns
        if end_ns is None:
            end_ns = event.start_ns
            seen.open_spans.append(event)
        if end_ns > last_span_ns:
            last_span_ns = end_ns
        kept = _kept_whole(seen, event)
        if kept is not None:
            kept.append(event)
        error = event.args.get("error")
        if _is_exception(error) and event.name != STEP and event.name not in MEMORY_MOVES:
            _see_interval(seen.errors[_signed(event.thread), _signed(event.task), error, event.name], event, shift_ns)
            _see_message(seen.messages, event, error)
        if event.is_inferred:
            seen.inferred[event.name, str(event.args.get("reason"))] = None
        if event.name in _STAGES:
            _see_stage(seen.stages[event.name], event, shift_ns)
        elif event.is_phase:
            _see_interval(seen.phases[event.name], event, shift_ns)
        elif event.name == STEP:
            seen.steps.append(event)
        elif event.is_automatic and event.name == MEMORY_EDGE:
            end_ns = None if event.end_ns is None else event.end_ns + shift_ns
            seen.looks.add(event.start_ns + shift_ns, end_ns, event.args)
        elif event.is_automatic and event.name.startswith(DEVICE_TIME):
            _see_device_span(seen.device_spans[event.name.removeprefix(DEVICE_TIME)], event, shift_ns)
        elif kept is None and not (event.is_automatic and event.name.startswith(_PROFILED)):
            method = event.args.get("method") if event.name == RAY_CALL else None
            spans = seen.automatic_spans if event.is_automatic else seen.own_spans
            _see_interval(spans[event.name, None if method is None else str(method)], event, shift_ns)
            if event.name in _ON_THE_WAY:
                _see_passed(seen, event, shift_ns)
            elif event.name in TRAJECTORIES:
                _see_trajectory(seen, event, shift_ns)
            elif event.name in TOOLS:
                _see_tool_call(seen, event, shift_ns)
            elif event.name == ENGINE_STEP:
                _see_engine_step(seen.engine_steps, event, shift_ns)
    if shift_ns:
        seeing.shift(seen, shift_ns)
    seen.finish()
    seen.first_ns = process.start_ns + shift_ns
    seen.last_span_ns = last_span_ns + shift_ns
    seen.last_ns = max(last_ns, last_span_ns, process.end_ns or 0) + shift_ns
    return seen


_STAGES = frozenset(WEIGHT_SYNC_STAGES)
_ON_THE_WAY = frozenset({TURN, GENERATE, AGENT_REQUEST, RAY_SUBMIT, RAY_CALL, SERVER_REQUEST, REQUEST})
_PROFILED = (KERNEL, OPERATOR)


def _kept_whole(seen: Seen, span: Span) -> list[Span] | None:
    """Return where a span goes whose arguments count; a program marks its own sleeps and wake-ups too."""
    name = span.name
    if name in MEMORY_MOVES:
        return seen.moves
    if not span.is_automatic:
        return None
    if name == ALLOCATIONS_KEPT:
        return seen.allocations_kept
    return seen.out_of_memory if name == OUT_OF_MEMORY else None


def _is_exception(error: Any) -> TypeGuard[str]:
    """Return whether an argument is the name of an exception's type, and not one of the program's own values."""
    return isinstance(error, str) and error.partition("(")[0].isidentifier()  # Ray's: RayTaskError(KeyError)


def _see_message(messages: dict[tuple[str, str], tuple[int, str]], span: Span, error: str) -> None:
    """Keep the message of the exception that left a span of its name first."""
    message, key = span.args.get("error_message"), (error, span.name)
    if isinstance(message, str) and span.end_ns is not None and span.end_ns < messages.get(key, (_NEVER_NS,))[0]:
        messages[key] = span.end_ns, message


def _see_interval(kept: Intervalled, span: Span, shift_ns: int) -> None:
    assert isinstance(kept.pairs, array)
    kept.pairs.extend((span.start_ns + shift_ns, OPEN if span.end_ns is None else span.end_ns + shift_ns))
    kept.has_open |= span.end_ns is None


def _see_stage(kept: Stages, span: Span, shift_ns: int) -> None:
    _see_interval(kept, span, shift_ns)
    extend(kept.bytes, np.array([int(span.args.get("bytes", 0))]))
    extend(kept.tensors, np.array([int(span.args.get("tensors", 0))]))


def _see_device_span(kept: DeviceSpans, span: Span, shift_ns: int) -> None:
    _see_interval(kept, span, shift_ns)
    args = span.args
    ranks = int(args.get("ranks", 0))
    # A rank has its own part of a collective already.
    extend(kept.moved_bytes, np.array([int(args.get("bytes", 0)) * (ranks - 1) // ranks if ranks else 0]))
    extend(kept.queued_ns, np.array([int(args.get("queued_ns", 0))]))
    extend(kept.behind_ns, np.array([int(args.get("behind_host_ns", 0))]))
    extend(kept.of_part, np.array([bool(args.get("module"))]))
    kept.largest_error_ns = max(kept.largest_error_ns, int(args.get("error_ns", 0)))


def _see_passed(seen: Seen, span: Span, shift_ns: int) -> None:
    """Keep of a span on the way of a request what joins it with the next one; of Ray's calls only those for tokens."""
    args = span.args
    if span.name in (RAY_SUBMIT, RAY_CALL):
        flows = span.flows_out if span.name == RAY_SUBMIT else span.flows_in
        if not flows or str(args.get("method")).rpartition(".")[2] != SERVED:
            return
        key = flows[0]
    else:
        key = str(args.get("request_id", span.name))  # without one, it joins nothing
    kept = seen.passed[span.name]
    _see_interval(kept, span, shift_ns)
    kept.places.append(number(seen.process.key, _signed(span.thread), _signed(span.task)))
    kept.keys.append(number(key))
    if span.name in (RAY_SUBMIT, RAY_CALL):
        return
    kept.trajectories.append(_hash(args.get("trajectory")))
    kept.tokens.append(int(args.get("tokens", -1)))
    kept.prompt_tokens.append(int(args.get("prompt_tokens", -1)))
    if span.name == REQUEST:
        kept.stems.append(number(asked_ids(key)[1]))
        prompt = prompt_of(key)
        kept.prompts.append(0 if prompt is None else number(seen.process.key, prompt))
        kept.queued_ns.append(int(args.get("queued_ns", -1)))
        kept.first_token_ns.append(int(args.get("first_token_ns", -1)))
        kept.cached_tokens.append(int(args.get("cached_tokens", -1)))


def _hash(text: Any) -> int:
    return 0 if text is None else number(str(text))


def _see_trajectory(seen: Seen, span: Span, shift_ns: int) -> None:
    kept, args = seen.trajectories, span.args
    _see_interval(kept, span, shift_ns)
    kept.places.append(number(seen.process.key, _signed(span.thread), _signed(span.task)))
    kept.trajectories.append(_hash(args.get("trajectory")))
    prompt = request_rows.sampled_prompt(args)
    kept.prompts.append(0 if prompt is None else number(*prompt))
    kept.are_validating.append(args.get("validate") is True)


def _see_tool_call(seen: Seen, span: Span, shift_ns: int) -> None:
    kept, args = seen.tool_calls, span.args
    _see_interval(kept, span, shift_ns)
    kept.places.append(number(seen.process.key, _signed(span.thread), _signed(span.task)))
    kept.trajectories.append(_hash(args.get("trajectory")))
    kept.tools.append(place_of(span.name if args.get("tool") is None else str(args["tool"]), kept.names))


def _see_engine_step(kept: EngineSteps, span: Span, shift_ns: int) -> None:
    _see_interval(kept, span, shift_ns)
    args = span.args
    kept.running.append(int(args.get("running", -1)))
    kept.waiting.append(int(args.get("waiting", -1)))
    kept.preempted.append(int(args.get("preempted", 0)))
    kept.kv_usage.append(float(args.get("kv_usage", -1)))
    kept.drafted.append(int(args.get("drafted", 0)))
    kept.accepted.append(int(args.get("accepted", 0)))


def _see_sample(seen: Seen, sample: Counter, owner_names: dict[str, str | None], shift_ns: int) -> None:
    name = sample.name
    if seen.process.role == SAMPLER:
        seen.sampled[name].add(sample.ts_ns + shift_ns, sample.value)
        return
    if name not in owner_names:
        owner_names[name] = owner_of_counter(name)
    owner = owner_names[name]
    if owner is not None:
        if is_size(sample.value):  # else nobody knows how many bytes
            seen.owners[owner].add(sample.ts_ns + shift_ns, sample.value)
    elif name == ALLOCATIONS_RESERVED:
        if is_size(sample.value):
            seen.reserved.add(sample.ts_ns + shift_ns, sample.value)
    elif name.startswith(ALLOCATIONS):
        exact = owner_of_counter(name.removeprefix(ALLOCATIONS))
        if exact is not None and is_size(sample.value):
            _see_balance(seen.balances, exact, sample.ts_ns + shift_ns, sample.value)
    elif name in (RESIDENT, USED, ALLOCATED_PEAK):
        if is_size(sample.value):
            kept = {RESIDENT: seen.resident, USED: seen.used, ALLOCATED_PEAK: seen.allocated_peak}[name]
            kept.add(sample.ts_ns + shift_ns, sample.value)
    elif (on_host := owner_on_host(name)) is not None:
        if is_size(sample.value):
            seen.on_host[on_host].add(sample.ts_ns + shift_ns, sample.value)
    elif (pinned := owner_of_pinned(name)) is not None:
        if is_size(sample.value):
            seen.pinned[pinned].add(sample.ts_ns + shift_ns, sample.value)
    elif name in STEP_FIGURES or seen.lane.is_driver:
        seen.figures[name].add(sample.ts_ns + shift_ns, sample.value)


def _see_balance(kept: Balances, owner: str, time_ns: int, value: float) -> None:
    if owner not in kept.owners:
        kept.owners.append(owner)
    kept.times_ns.append(time_ns)
    kept.values.append(value)
    kept.places.append(kept.owners.index(owner))

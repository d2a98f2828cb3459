"""Keeps what counts of spans."""

from __future__ import annotations

from itertools import compress

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.seen.looked import Looked, places_of
from rltrace.analysis.seen.names import (
    CALL,
    DEVICE,
    KEPT,
    LOOK,
    MOVE,
    OF_ENGINE,
    OF_FORWARD,
    OF_STEP,
    ON_THE_WAY,
    PHASE,
    PROFILED,
    STAGE,
    SUBMIT,
    TOOL,
    TRAJECTORY,
)
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.request_rows import is_served, see_engine_steps, see_passed, see_tool_calls, see_trajectories
from rltrace.analysis.seen.rows import Rows, Times, by_method, by_name, extend, whole_numbers
from rltrace.analysis.seen.spans import NEVER_NS, DeviceSpans, Stages
from rltrace.events import ALLOCATIONS_KEPT, DEVICE_TIME
from rltrace.read.columns import NO_TEXT, OPEN, Columns, places_among


def see_spans(seen: Seen, rows: Columns, kinds: NDArray[np.uint16], shift_ns: int) -> None:
    """Keep the spans that count."""

    def has(bits: int) -> NDArray[np.bool_]:
        return (kinds & bits).astype(np.bool_)

    is_stage = has(STAGE)
    is_phase = (has(PHASE) | rows.arguments["phase"]) & ~is_stage
    is_step = has(OF_STEP) & ~is_phase
    is_device = has(DEVICE) & rows.is_automatic & ~is_phase
    is_look = has(LOOK) & rows.is_automatic
    is_kept = has(MOVE) | (has(KEPT) & rows.is_automatic)
    is_other = ~(is_stage | is_phase | is_step | is_device | is_look | is_kept | (has(PROFILED) & rows.is_automatic))
    times = Times(rows, shift_ns)
    _see_whole(seen, rows, kinds, is_step, is_kept)
    _see_errors(seen, rows, ~has(OF_STEP | MOVE), times)
    for row in np.flatnonzero(rows.is_automatic & rows.arguments["inferred"]).tolist():
        seen.inferred[rows.texts[rows.name[row]], str(rows.args(row).get("reason"))] = None
    looks = np.flatnonzero(is_look)
    if len(looks):
        _see_looks(seen.looks, looks, rows, times)
    for name, chosen in by_name(rows, is_stage):
        _see_stages(seen.stages[name], chosen, rows, times)
    for name, chosen in by_name(rows, is_phase):
        times.put(seen.phases[name], chosen)
    for name, chosen in by_name(rows, is_device):
        _see_device_spans(seen.device_spans[name.removeprefix(DEVICE_TIME)], chosen, rows, times)
    for spans, is_one in ((seen.automatic_spans, rows.is_automatic), (seen.own_spans, ~rows.is_automatic)):
        for name, method, chosen in by_method(rows, is_other & is_one, has(CALL)):
            times.put(spans[name, method], chosen)
    on_the_way = np.flatnonzero(is_other & has(ON_THE_WAY))
    if len(on_the_way):
        see_passed(seen, on_the_way[~has(CALL | SUBMIT)[on_the_way] | is_served(rows, on_the_way)], rows, times)
    steps_of_engine = np.flatnonzero(is_other & has(OF_ENGINE))
    if len(steps_of_engine):
        see_engine_steps(seen.engine_steps, steps_of_engine, rows, times)
    trajectories = np.flatnonzero(is_other & has(TRAJECTORY))
    if len(trajectories):
        see_trajectories(seen, trajectories, rows, times)
    calls = np.flatnonzero(is_other & has(TOOL))
    if len(calls):
        see_tool_calls(seen, calls, rows, times)
    forwards = np.flatnonzero(is_other & has(OF_FORWARD) & rows.is_automatic)
    if len(forwards):
        times.put(seen.forwards, forwards)
        extend(seen.forwards.tokens, _tokens(rows, forwards))


def _see_whole(
    seen: Seen, rows: Columns, kinds: NDArray[np.uint16], is_step: NDArray[np.bool_], is_kept: NDArray[np.bool_]
) -> None:
    """Keep the spans whose arguments count as they are, and those that are open."""
    is_open = rows.end_ns == OPEN
    is_move = (kinds & MOVE).astype(np.bool_)  # a program marks its own sleeps and wake-ups too
    chosen = np.flatnonzero(is_open | is_step | is_kept)
    spans = [*rows.spans(chosen)]
    for kept, is_one in ((seen.open_spans, is_open), (seen.steps, is_step), (seen.moves, is_kept & is_move)):
        kept.extend(compress(spans, is_one[chosen].tolist()))
    for span in compress(spans, (is_kept & ~is_move)[chosen].tolist()):
        (seen.allocations_kept if span.name == ALLOCATIONS_KEPT else seen.out_of_memory).append(span)


def _see_looks(kept: Looked, chosen: Rows, rows: Columns, times: Times) -> None:
    """Keep looks at memory."""
    times.put(kept, chosen)
    numbers = rows.numbers
    look, is_one = places_among(chosen, numbers.row)
    extend(kept.many, np.bincount(look[is_one], minlength=len(chosen)))
    extend(kept.of, numbers.of[is_one])
    extend(kept.names, places_of(numbers.name[is_one], rows.texts, kept.texts))
    extend(kept.values, numbers.value[is_one])
    extend(kept.turns, places_of(rows.arguments["turn"][chosen], rows.texts, kept.turn_texts))


def _tokens(rows: Columns, forwards: Rows) -> NDArray[np.int64]:
    """Return how many tokens forwards have; a size that no tensor has counts as nothing."""
    sequences, length = (whole_numbers(rows, key, forwards) for key in ("rows", "columns"))
    return np.where((np.abs(sequences) < 1 << 31) & (np.abs(length) < 1 << 31), sequences * length, 0)


def _see_errors(seen: Seen, rows: Columns, is_one: NDArray[np.bool_], times: Times) -> None:
    errors = rows.arguments["error"]
    for row in np.flatnonzero((errors != NO_TEXT) & is_one).tolist():
        error = rows.texts[errors[row]]
        if _is_exception(error):
            name = rows.texts[rows.name[row]]
            key = (int(rows.thread[row]), int(rows.task[row]), error, name)
            times.put(seen.errors[key], np.array([row]))
            _see_message(seen.messages, rows, row, (error, name))


def _is_exception(error: str) -> bool:
    """Return whether an argument is the name of an exception's type, and not one of the program's own values."""
    return error.partition("(")[0].isidentifier()  # Ray's: RayTaskError(KeyError)


def _see_message(
    messages: dict[tuple[str, str], tuple[int, str]], rows: Columns, row: int, key: tuple[str, str]
) -> None:
    """Keep the message of the exception that left a span of its name first."""
    end_ns = int(rows.end_ns[row])
    if end_ns != OPEN and end_ns < messages.get(key, (NEVER_NS,))[0]:
        message = rows.args(row).get("error_message")
        if isinstance(message, str):
            messages[key] = end_ns, message


def _see_stages(kept: Stages, chosen: Rows, rows: Columns, times: Times) -> None:
    times.put(kept, chosen)
    extend(kept.bytes, whole_numbers(rows, "bytes", chosen))
    extend(kept.tensors, whole_numbers(rows, "tensors", chosen))


def _see_device_spans(kept: DeviceSpans, chosen: Rows, rows: Columns, times: Times) -> None:
    times.put(kept, chosen)
    extend(kept.moved_bytes, moved(whole_numbers(rows, "bytes", chosen), whole_numbers(rows, "ranks", chosen)))
    extend(kept.queued_ns, whole_numbers(rows, "queued_ns", chosen))
    extend(kept.behind_ns, whole_numbers(rows, "behind_host_ns", chosen))
    extend(kept.of_part, rows.arguments["module"][chosen])
    error_ns = int(whole_numbers(rows, "error_ns", chosen).max())
    kept.largest_error_ns = max(kept.largest_error_ns, error_ns)


def moved(moved_bytes: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bytes that a rank sends or gets in a collective: it has its own part already."""
    if np.abs(moved_bytes).max() * float(np.abs(ranks).max()) < 2.0**62:
        return np.where(ranks == 0, 0, moved_bytes * (ranks - 1) // np.where(ranks == 0, 1, ranks))
    pairs = zip(moved_bytes.tolist(), ranks.tolist(), strict=True)
    return np.array([many * (of - 1) // of if of else 0 for many, of in pairs], np.int64)

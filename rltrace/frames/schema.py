"""Which tables there are, with the columns of each: what SQL asks, what frames have, what docs/sql.md says."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal, NamedTuple, Union

import msgspec

from rltrace.analysis.hooks import HookFigures
from rltrace.analysis.moments import Boundary
from rltrace.analysis.phases import RankStep, Share
from rltrace.analysis.processes import ProcessFigures
from rltrace.analysis.requests import STAGES
from rltrace.analysis.steps import Step
from rltrace.analysis.weight_sync import RankSync, Stage

Kind = Literal["text", "integer", "decimal", "boolean", "json"]
"""`json` is text: an object or a list that has no columns of its own."""

Struct = type[msgspec.Struct]


class Column(NamedTuple):
    """One column of a table."""

    name: str
    kind: Kind
    meaning: str = ""
    """Empty for a field of the JSON, which says it itself."""
    field: tuple[Struct, str] | None = None
    """The field of the JSON that it has the values of."""


class Table(NamedTuple):
    """A table: its rows come from what was recorded, or from the figures of `rltrace summary --json`."""

    name: str
    about: str
    """What a row is."""
    columns: tuple[Column, ...]
    without_rows: str
    """Why it has none, where it has none."""

    def names(self) -> list[str]:
        """Return the names of its columns, in order."""
        return [column.name for column in self.columns]


def _of(struct: Struct, *names: str, **called: str) -> tuple[Column, ...]:
    """Return columns of fields of the JSON, those of `called` under another name; without names all of them."""
    hints = typing.get_type_hints(struct)
    chosen = {name: name for name in (names or () if called else names or hints)} | called
    return tuple(Column(name, _kind(hints[field]), field=(struct, field)) for name, field in chosen.items())


def _kind(hint: Any) -> Kind:
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    if typing.get_origin(hint) in (Union, types.UnionType):
        return _kind(parts[0])
    if typing.get_origin(hint) is Literal:
        return "text"
    kinds: dict[Any, Kind] = {bool: "boolean", int: "integer", float: "decimal", str: "text"}
    return kinds.get(hint, "json")


_PROCESS = (
    Column("process", "text", "The process: `key` of `processes`."),
    Column("role", "text", "Role of the process: `driver`, `worker`, `engine`, `sampler`, ..."),
    Column("lane", "text", "Whose it is: `rank 0`, `driver`, or the name of the process."),
    Column("rank", "integer", "Rank of the lane, which is that of the device; null if it has none."),
)
_STEP = Column("step", "integer", "Number of the step in which it began; null outside of steps.")

SPANS = Table(
    "spans",
    "One row per span, of all kinds: phases, steps, calls, GPU work.",
    (
        *_PROCESS,
        Column(
            "span", "integer", "Its place among the spans of its process, from 0; with `process` it names the span."
        ),
        Column("name", "text", "What it is called."),
        _STEP,
        Column("phase", "text", "Phase that its lane was in when it began; null outside of phases."),
        Column("start_ns", "integer", "When it began, counted from the beginning of the Recording."),
        Column("end_ns", "integer", "When it ended; null if it is open."),
        Column("seconds", "decimal", "Its length; null if it is open."),
        Column("thread", "integer", "Native id of its thread."),
        Column(
            "task", "integer", "Identity of its asyncio task, or of another row such as a request; 0 is the thread."
        ),
        Column(
            "thread_lane",
            "integer",
            "Row of its thread and task on which spans nest; null for a span with times of its own.",
        ),
        Column("automatic", "boolean", "Whether a hook made it, and not the program itself."),
        Column("error", "text", "Name of the exception that left it; null without one."),
        Column("method", "text", "Argument `method`: what was called."),
        Column("request_id", "text", "Argument `request_id`."),
        Column("bytes", "integer", "Argument `bytes`: what it moved or holds."),
        Column("tensors", "integer", "Argument `tensors`: how many."),
        Column("ranks", "integer", "Argument `ranks`: how many take part in a collective."),
        Column("tokens", "integer", "Argument `tokens`: how many."),
        Column("running", "integer", "Argument `running`: requests that an engine computes in its step."),
        Column("waiting", "integer", "Argument `waiting`: requests that wait in an engine."),
        Column("preempted", "integer", "Argument `preempted`: requests that lost their KV cache."),
        Column("rows", "integer", "Argument `rows`: sequences of a forward."),
        Column("columns", "integer", "Argument `columns`: tokens of each."),
        Column("kv_usage", "decimal", "Argument `kv_usage`: share of an engine's KV cache that is taken, 0 to 1."),
        Column("queued_ns", "integer", "Argument `queued_ns`: how long it waited before."),
        Column("error_ns", "integer", "Argument `error_ns`: how far off the times of GPU work are at most."),
        Column("behind_host_ns", "integer", "Argument `behind_host_ns`: how long before it the host had launched it."),
        Column("args", "json", "All arguments. It is decoded only where a query asks for it."),
    ),
    "nothing was recorded",
)

COUNTERS = Table(
    "counters",
    "One row per sample of a counter.",
    (
        *_PROCESS,
        Column("name", "text", "What it is called; the unit is at its end."),
        Column("step", "integer", "Number of the step in which it was taken; null outside of steps."),
        Column("at_ns", "integer", "When it was taken, counted from the beginning of the Recording."),
        Column("value", "decimal", "What was sampled, in the unit that the name ends with."),
        Column("thread", "integer", "Native id of its thread."),
    ),
    "nothing was sampled",
)

FLOWS = Table(
    "flows",
    "One row per end of an arrow; two rows with one `key` are an arrow.",
    (
        *_PROCESS,
        Column("key", "text", "What both ends have in common."),
        Column("direction", "text", "`out` where the arrow leaves a span, `in` where it arrives."),
        Column("span", "integer", "The span: `span` of `spans`, in the same process."),
        Column("name", "text", "What the span is called."),
        _STEP,
        Column("start_ns", "integer", "When the span began, counted from the beginning of the Recording."),
        Column("end_ns", "integer", "When it ended; null if it is open."),
    ),
    "no arrow was recorded",
)

STEPS = Table(
    "steps",
    "One row per step: `steps` of the JSON.",
    _of(Step),
    "no process recorded a step, and none was inferred",
)

PHASES = Table(
    "phases",
    "One row per step, lane and phase: `phases` of the JSON. Time in no phase is there, as `wait.driver` and `idle`.",
    (
        *_of(RankStep, "step", "lane", "rank"),
        Column("phase", "text", "Name of the phase."),
        *_of(Share),
        *_of(RankStep, step_seconds="seconds"),
        *_of(RankStep, "steady", "finished", "clock_aligned", "host", "device"),
    ),
    "no process recorded a phase",
)

_DEVICE = (
    Column("lane", "text", "Lane of the rank that has the device."),
    Column("rank", "integer", "The rank; null if it has none."),
    Column("host", "text", "Host of the device."),
    Column("device", "text", "Uuid of the device; null for a CPU."),
)
_OWNER = (
    Column("owner", "text", "Who holds the bytes; `unaccounted` is what nobody does, `free` is in `memory` too."),
    Column("bytes", "integer", "What the owner holds."),
    *_of(Boundary, "used_bytes", "apart_seconds", "is_consistent"),
)

MEMORY = Table(
    "memory",
    "One row per device, moment and owner: the whole ledger, of which the JSON has peaks and boundaries.",
    (
        *_DEVICE,
        Column("moment", "integer", "Number of the moment on its device, from 0: its rows add up to `used_bytes`."),
        Column("step", "integer", "Number of the step then; null outside of steps."),
        Column("phase", "text", "Phase of the rank then; null outside of phases."),
        Column("at_seconds", "decimal", "When, counted from the beginning of the Recording."),
        *_OWNER,
    ),
    "no process measured who holds the bytes of its device",
)

BOUNDARIES = Table(
    "boundaries",
    "One row per device, phase boundary and owner: `memory[].boundaries` of the JSON.",
    (
        *_DEVICE,
        Column("boundary", "integer", "Number of the boundary on its device, from 0."),
        *_of(Boundary, "step", "phase", "side", "at_seconds", "away_seconds"),
        *_OWNER,
    ),
    MEMORY.without_rows,
)

REQUESTS = Table(
    "requests",
    "One row per request, of which the JSON has means. A stage that it did not pass is null.",
    (
        Column("name", "text", "Outermost span: `agent_loop.request`, `server.request` or `rollout.request`."),
        Column("step", "integer", "Number of the step in which it began; null before the first and between two."),
        Column("start_ns", "integer", "When it began, counted from the beginning of the Recording."),
        Column("seconds", "decimal", "Its length, which is the sum of its stages; null if it is not joined."),
        *(Column(f"{stage}_seconds", "decimal", f"Length of its stage `{stage}`.") for stage in STAGES),
        Column("unjoined", "text", "Why it could not be followed from end to end; null if it was."),
    ),
    "no process recorded a request",
)

WEIGHT_SYNC = Table(
    "weight_sync",
    "One row per step and rank that synced: `weight_sync` of the JSON.",
    tuple(column for column in _of(RankSync) if column.name != "stages"),
    "no process recorded a weight sync",
)

WEIGHT_SYNC_STAGES = Table(
    "weight_sync_stages",
    "One row per step, rank and stage of the sync: `weight_sync[].stages` of the JSON.",
    (
        *_of(RankSync, "step", "lane", "rank"),
        Column("stage", "text", "Name of the stage, in the order in which a bucket passes them."),
        *_of(Stage),
    ),
    "no process recorded a stage of a weight sync",
)

PROCESSES = Table(
    "processes",
    "One row per process: `processes` of the JSON.",
    (*_of(ProcessFigures), Column("lane", "text", "Lane of the process, as in the other tables.")),
    "no process recorded anything",
)

HOOKS = Table("hooks", "One row per hook: `hooks` of the JSON.", _of(HookFigures), "no process reported a hook")

TABLES = {
    table.name: table
    for table in (
        SPANS, COUNTERS, FLOWS, STEPS, PHASES, MEMORY, BOUNDARIES, REQUESTS, WEIGHT_SYNC, WEIGHT_SYNC_STAGES,
        PROCESSES, HOOKS,
    )
}  # fmt: skip
"""Every table by its name."""

"""What a span is by its name."""

from __future__ import annotations

from rltrace.events import (
    AGENT_REQUEST,
    ALLOCATIONS_KEPT,
    DEVICE_TIME,
    ENGINE_STEP,
    FORWARD,
    GENERATE,
    KERNEL,
    MEMORY_EDGE,
    MEMORY_MOVES,
    OPERATOR,
    OUT_OF_MEMORY,
    PHASES,
    RAY_CALL,
    RAY_SUBMIT,
    REQUEST,
    SERVER_REQUEST,
    STEP,
    TOOLS,
    TRAJECTORIES,
    TURN,
    WEIGHT_SYNC_STAGES,
)

STAGE, PHASE, OF_STEP, DEVICE, MOVE, KEPT, PROFILED, CALL, SUBMIT, ON_THE_WAY, OF_ENGINE, OF_FORWARD = (
    1 << n for n in range(12)
)
TRAJECTORY, TOOL, LOOK = 1 << 12, 1 << 13, 1 << 14
"""What a span is by its name, as bits; one that hooks make only, if a hook made it."""

_KINDS: dict[str, int] = {}
for _bit, _names in (
    (STAGE, WEIGHT_SYNC_STAGES),
    (PHASE, PHASES),
    (OF_STEP, (STEP,)),
    (MOVE, MEMORY_MOVES),
    (LOOK, (MEMORY_EDGE,)),
    (KEPT, (ALLOCATIONS_KEPT, OUT_OF_MEMORY)),
    (CALL, (RAY_CALL,)),
    (SUBMIT, (RAY_SUBMIT,)),
    (ON_THE_WAY, (TURN, GENERATE, AGENT_REQUEST, RAY_SUBMIT, RAY_CALL, SERVER_REQUEST, REQUEST)),
    (TRAJECTORY, TRAJECTORIES),
    (TOOL, TOOLS),
    (OF_ENGINE, (ENGINE_STEP,)),
    (OF_FORWARD, (FORWARD,)),
):
    for _name in _names:
        _KINDS[_name] = _KINDS.get(_name, 0) | _bit


def kind_of(name: str) -> int:
    """Return what a span of a name can be, as bits."""
    kind = _KINDS.get(name, 0)
    if name.startswith(DEVICE_TIME):
        kind |= DEVICE
    return kind | PROFILED if name.startswith((KERNEL, OPERATOR)) else kind


def has_own_figures(name: str, *, is_automatic: bool) -> bool:
    """Return whether spans of a name are in other figures than those of all other spans."""
    kind = kind_of(name)
    of_hooks = DEVICE | LOOK | KEPT | PROFILED if is_automatic else 0
    return bool(kind & (STAGE | PHASE | OF_STEP | MOVE | of_hooks))

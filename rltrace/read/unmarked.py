"""Which spans hooks made, in a format whose records do not say so: their names tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltrace.events import (
    ALLOCATIONS_KEPT,
    ALLOCATIONS_WRITTEN,
    DEVICE_TIME,
    KERNEL,
    MEMORY_EDGE,
    OPERATOR,
    OUT_OF_MEMORY,
    REQUEST,
    Counter,
    Span,
)

ALWAYS = frozenset({REQUEST, MEMORY_EDGE, OUT_OF_MEMORY, ALLOCATIONS_KEPT, ALLOCATIONS_WRITTEN})
"""Names that only rltrace gives, whatever hooks there are."""
BEGINNINGS = (DEVICE_TIME, KERNEL, OPERATOR)

Hooks = Sequence[Mapping[str, Any]]
Mark = Callable[[Span | Counter], Span | Counter]


def markers(hooks_of: Mapping[str, Hooks]) -> dict[str, Mark]:
    """What marks the automatic spans of each process.

    A process that reports no hooks, as one whose report is damaged, is judged by those of all processes.

    Args:
        hooks_of: The hooks that each process reports, by its key.
    """
    of_any = ALWAYS.union(*map(_emitted, hooks_of.values()))
    return {key: _marker(ALWAYS | _emitted(hooks) if hooks else of_any) for key, hooks in hooks_of.items()}


def _emitted(hooks: Hooks) -> frozenset[str]:
    return frozenset(str(name) for hook in hooks for name in hook.get("emits") or ())


def _marker(names: frozenset[str]) -> Mark:
    def mark(event: Span | Counter) -> Span | Counter:
        if isinstance(event, Span) and (event.name in names or event.name.startswith(BEGINNINGS)):
            event.is_automatic = True
        return event

    return mark

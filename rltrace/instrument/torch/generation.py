"""`model.generate`: a call that generates in the program's process, with whatever engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from rltrace.events import GENERATE
from rltrace.hooks.patching import end_span
from rltrace.instrument.torch.between import BETWEEN
from rltrace.instrument.torch.loop_boundaries import BOUNDARIES, GENERATION
from rltrace.instrument.torch.models import INSIDE, MODELS
from rltrace.record import spans


def begin_generation(by: str, module: Any = None, **said: Any) -> Any:
    """Open the span of a call that generates.

    Args:
        by: The library that generates.
        module: The model that generates, whose forwards are a part of this; None if an engine has it.
        **said: What is known of the call.

    Returns:
        What `end_generation` takes; None if the call is a part of another one that generates.
    """
    if INSIDE.generation:
        return None
    was_inside = WasInside(INSIDE.model)
    try:
        INSIDE.model = INSIDE.generation = True
        BOUNDARIES.begins(GENERATION)
        BETWEEN.begins()
        model = {} if module is None else {"model": MODELS.number(module)}
        return spans.automatic_span(GENERATE, by=by, **model, **said).__enter__(), was_inside
    except BaseException as error:
        was_inside.end_interrupted(error)
        raise


class WasInside(NamedTuple):
    """Whether a thread was in a model before it came into a generation."""

    model: bool

    def end(self) -> None:
        """The thread is where it was."""
        INSIDE.model, INSIDE.generation = self.model, False

    def end_interrupted(self, _interruption: BaseException | None) -> None:
        """The thread is where it was, though an error from outside has kept the hook from saying so."""
        self.end()


def end_generation(opened: Any, error: BaseException | None, **said: Any) -> None:
    """Close it, with what is known of it now."""
    if opened is None:
        return
    span, was_inside = opened
    was_inside.end()
    if said:
        span.set(**said)
    end_span(span, None, error)
    BETWEEN.ends()
    if BETWEEN.is_over:
        BOUNDARIES.ends()


def begin_request(by: str, **said: Any) -> Any:
    """Open the span of a call of which one thread has several at a time, as asyncio tasks do."""
    BOUNDARIES.begins(GENERATION)
    BETWEEN.begins()
    return spans.automatic_span(GENERATE, by=by, **said).__enter__()


def end_request(opened: Any, _result: Any, error: BaseException | None) -> None:
    """Close it."""
    end_span(opened, None, error)
    BETWEEN.ends()

"""`optimizer.step` of every torch optimizer, by torch's own global step hooks."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from rltrace.events import OPTIMIZER_STEP
from rltrace.hooks.arguments import attributes
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.torch.between import BETWEEN
from rltrace.instrument.torch.loop_boundaries import BOUNDARIES
from rltrace.instrument.torch.models import Learned
from rltrace.record import spans

MODULE = "torch.optim.optimizer:"
STEPS = (
    *attributes(MODULE, "register_optimizer_step_post_hook", "_global_optimizer_pre_hooks"),
    *attributes(f"{MODULE}Optimizer", "param_groups"),
)
"""What `watch_optimizer_steps` reads."""


class TorchOptim:
    """Makes each optimizer step a span."""

    name = "torch_optim"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Register a hook before and one after every optimizer's step."""
        patches.use(
            "torch.optim.optimizer:register_optimizer_step_pre_hook",
            functools.partial(watch_optimizer_steps, span=WorkSpan, identify=Learned()),
            (OPTIMIZER_STEP,),
            reads=STEPS,
        )


class WorkSpan:
    """The span of a step, which ends what was between two pieces of work."""

    def __init__(self, name: str, /, **args: Any) -> None:
        self._span = spans.automatic_span(name, **args)

    def __enter__(self) -> WorkSpan:
        BETWEEN.begins()
        self._span.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._span.__exit__(kind)
        BETWEEN.ends()
        BOUNDARIES.ends()


def nothing_more(_optimizer: Any) -> dict[str, Any]:
    """Add nothing to an optimizer's class and the number of its tensors."""
    return {}


def watch_optimizer_steps(
    hook: Hook,
    span: Callable[..., Any] = spans.automatic_span,
    identify: Callable[[Any], dict[str, Any]] = nothing_more,
    *,
    outermost: bool = False,
) -> Callable[[], None]:
    """Make every optimizer's step a span, or what measures it on the device.

    Args:
        hook: Whose calls are counted.
        span: Makes what is entered before the step and left after it.
        identify: Returns further arguments, which tell one optimizer from another.
        outermost: Whether to enter it before all that are watched so far. The last one registered leaves last anyway.

    Returns:
        What undoes it.
    """
    from torch.optim import optimizer as torch_optimizer

    steps = threading.local()

    def begin(args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
        # A step that raised never reached its post-hook: its span is ended here, late rather than never.
        unfinished = getattr(steps, "open", None)
        if unfinished is not None:
            unfinished.__exit__(RuntimeError)
        optimizer = args[0]
        tensors = sum(len(group["params"]) for group in optimizer.param_groups)
        said = {"optimizer": type(optimizer).__name__, "tensors": tensors, **identify(optimizer)}
        steps.open = span(OPTIMIZER_STEP, **said).__enter__()

    def end(_token: Any, _result: Any, _error: BaseException | None) -> None:
        opened, steps.open = getattr(steps, "open", None), None
        if opened is not None:
            opened.__exit__(None)

    timed_begin, timed_end = hook.timed(begin), hook.timed(end)

    def before_step(*args: Any) -> None:
        hook.enter(timed_begin, args, {})

    def after_step(*_args: Any) -> None:
        hook.leave(timed_end, None, None, None)

    handles = (
        torch_optimizer.register_optimizer_step_pre_hook(before_step),
        torch_optimizer.register_optimizer_step_post_hook(after_step),
    )

    if outermost:
        torch_optimizer._global_optimizer_pre_hooks.move_to_end(handles[0].id, last=False)

    def take_back() -> None:
        for handle in handles:
            handle.remove()

    return take_back

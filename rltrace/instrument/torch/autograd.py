"""`autograd.backward`: a whole backward, from the loss to the last gradient.

FSDP's hooks see a backward from the model's last layer on. What is between that layer and the loss, such as the softmax
over the vocabulary, is only in this span.

Source read: torch 2.6 to 2.13, torch/_tensor.py and torch/autograd/__init__.py.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from rltrace.events import BACKWARD
from rltrace.hooks.arguments import attributes
from rltrace.hooks.hook import After, Before, Function, Hook
from rltrace.hooks.patching import PatchSet, end_span
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.dynamo import outside_graphs, skip_frames
from rltrace.record import spans

TARGET = "torch:autograd.backward"
"""`Tensor.backward` calls this. It is named from torch, whose dynamo is complete only when torch is imported."""
TASK = attributes("torch._C:", "_current_graph_task_id")
"""What says whether a backward is under way."""
NO_TASK = -1
"""What that says if none is."""
NAME = BACKWARD


class TorchAutograd:
    """Makes each backward a span."""

    name = "torch_autograd"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hook."""
        patches.wrap(TARGET, functools.partial(wrap_backward, before=begin, after=end_span), (NAME,), reads=TASK)


def begin(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """Open the span. A backward inside of another one, as of a layer that is recomputed, has none."""
    return None if is_in_backward() else spans.automatic_span(NAME).__enter__()


def is_in_backward() -> bool:
    """Tell whether this thread works for a backward right now."""
    import torch

    return bool(torch._C._current_graph_task_id() != NO_TASK)


@functools.cache
def address_of_task_id() -> int:
    """Return where the function of torch's C++ begins that `torch._C._current_graph_task_id` calls; 0 if nobody knows.

    On the way to it from Python lies what a hook does not find in the processor's caches, for 3 µs. It is declared in
    torch/csrc/autograd/graph_task.h of torch 2.6 to 2.13: `TORCH_API int get_current_graph_task_id()`.
    """
    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Only the library that runs is of use: a second copy would have threads of its own.
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        function = library._ZN5torch8autograd25get_current_graph_task_idEv
        if function() == torch._C._current_graph_task_id():
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    except own_failure(OSError, AttributeError):
        pass
    return 0


def wrap_backward(original: Function, hook: Hook, before: Before, after: After) -> Function:
    """Put `before` and `after` around a backward, and let dynamo run both as they are.

    The graph of a compiled function ends where it calls `backward`. Dynamo then compiles the frames inside, which is
    right for the program's own hooks on gradients, and wrong for ours.
    """
    import torch

    timed_before, timed_after = hook.timed(before), hook.timed(after)
    enter = outside_graphs(lambda args, kwargs: hook.enter(timed_before, args, kwargs))
    leave = outside_graphs(lambda token, result, error: hook.leave(timed_after, token, result, error))
    leave_by_error = outside_graphs(
        lambda token, error, is_leaving: hook.leave_by_error(timed_after, token, error, is_leaving=is_leaving)
    )

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if not hook.live:
            return original(*args, **kwargs)
        token, is_leaving = enter(args, kwargs), False
        try:
            result = original(*args, **kwargs)
            is_leaving = True
            leave(token, result, None)
            return result
        except BaseException as error:
            leave_by_error(token, error, is_leaving)
            raise

    function: Function = backward
    skip_frames(torch._C._dynamo.eval_frame, function.__code__)
    return function

"""Hooks that torch.compile leaves alone: dynamo neither traces into them nor compiles them."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from rltrace.hooks.hook import Function


def outside_graphs(hook: Function) -> Function:
    """Return a hook that dynamo does not trace into, such as a hook on a module.

    `torch._disable_dynamo` takes 3 µs a call. Only a call under dynamo has to pay that, and none where dynamo can be
    told to leave a function and all that it calls alone: that is the hook itself.
    """
    import torch

    of_compiled: Function = torch._disable_dynamo(hook)
    dynamo = torch._C._dynamo.eval_frame
    if isinstance(hook, FunctionType) and skip_calls(dynamo, hook.__code__):
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]  # a graph ends here, as at `of_compiled`
        return hook
    compiles = getattr(dynamo, "get_eval_frame_callback", None)
    if compiles is None:
        return of_compiled

    def call(*args: Any) -> Any:
        return hook(*args) if compiles() is None else of_compiled(*args)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # a graph ends here, as at `of_compiled`
    return call if skip_frames(dynamo, call.__code__) else of_compiled


def skip_calls(dynamo: Any, code: Any) -> bool:
    """Have dynamo run frames of this code and all that they call as they are; return false if this torch cannot.

    Source: torch/csrc/dynamo/eval_frame_cpp.cpp, of torch 2.7 to 2.13.
    """
    if not hasattr(dynamo, "set_code_exec_strategy"):
        return False
    skip = dynamo._FrameAction.SKIP
    dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(skip, skip))
    return True


def skip_frames(dynamo: Any, code: Any) -> bool:
    """Have dynamo run frames of this code as they are; return false if this torch has no way to say so.

    Source: torch/csrc/dynamo/eval_frame.c and torch/_dynamo/eval_frame.py, of torch 2.6 and 2.13.
    """
    if hasattr(dynamo, "set_code_exec_strategy"):
        action = dynamo._FrameAction
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(action.SKIP, action.DEFAULT))
    elif hasattr(dynamo, "skip_code"):
        dynamo.skip_code(code)
    else:
        return False
    return True

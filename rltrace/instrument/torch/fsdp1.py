"""FSDP1 (`FullyShardedDataParallel`): the same spans as FSDP2's, of each module that it wraps.

Source read: torch 2.6 to 2.13, torch/distributed/fsdp/_runtime_utils.py and _flat_param.py. Spans are of the host: on a
CPU the collective itself, on a GPU its launch.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from rltrace.hooks.arguments import argument, attributes, keep
from rltrace.hooks.hook import Function, Hook
from rltrace.hooks.patching import PatchSet, nothing_before
from rltrace.host.interruption import own_failure
from rltrace.instrument.torch.modules import ForwardSpans, without_wrappers
from rltrace.instrument.torch.tensor_sizes import tensor_args
from rltrace.record import spans

PACKAGE = "torch.distributed.fsdp"
RUNTIME = f"{PACKAGE}._runtime_utils"
HANDLE = f"{PACKAGE}._flat_param:FlatParamHandle"
WRAPPER = f"{PACKAGE}.fully_sharded_data_parallel:FullyShardedDataParallel"

SHARDS = (
    *attributes(HANDLE, "flat_param", "world_size"),
    *attributes(f"{PACKAGE}._flat_param:FlatParameter", "_num_params"),
)
"""What says how large a flat parameter is."""


class Fsdp1:
    """Records collectives, forwards and backwards."""

    name = "fsdp1"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        paths, backwards = Paths(), Backwards()
        patches.around(f"{RUNTIME}:_share_state_and_init_handle_attrs", keep("root_module", 1), paths.learn)
        gather = f"{HANDLE}._all_gather_flat_param"
        patches.span(gather, "fsdp.all_gather", paths.gather_args, gather_bytes, reads=SHARDS)
        patches.span(f"{RUNTIME}:_reduce_grad", "fsdp.reduce_scatter", paths.reduce_args, reads=SHARDS)
        patches.wrap(f"{WRAPPER}.__init__", functools.partial(watch_forwards, paths), ("fsdp.forward",))
        patches.around(
            f"{RUNTIME}:_pre_backward_hook", functools.partial(backwards.begin, paths), leave_open, ("fsdp.backward",)
        )
        patches.around(f"{RUNTIME}:_post_backward_hook", keep("handle", 1), backwards.end)
        # A module without trainable parameters never reduces gradients: its backward ends with the whole one.
        patches.around(f"{RUNTIME}:_post_backward_final_callback", nothing_before, backwards.end_all)


class Paths:
    """Knows the path of each wrapped module in its model, from the root's first forward on."""

    def __init__(self) -> None:
        self._by_handle: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def learn(self, root: Any, _result: Any, error: BaseException | None) -> None:
        """Note the paths of all modules below a module that has just turned out to be the root."""
        from torch.distributed.fsdp import FullyShardedDataParallel

        for path, module in root.named_modules() if error is None else ():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                self._by_handle[module._handle] = without_wrappers(path)

    def of(self, handle: Any) -> str:
        """Return the path of the module whose parameters a handle holds; "" is the root, and a module without any."""
        return "" if handle is None else self._by_handle.get(handle, "")

    def gather_args(self, handle: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the arguments of an all-gather; at one rank FSDP shards nothing, and there is none."""
        return {"module": self.of(handle), "tensors": handle.flat_param._num_params, "ranks": handle.world_size}

    def reduce_args(self, _state: Any, handle: Any, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the arguments of a reduce-scatter, with the size of the unsharded gradients that go in."""
        return self.gather_args(handle) | tensor_args(handle.flat_param.grad)


def gather_bytes(result: Any, *_: Any, **__: Any) -> dict[str, Any]:
    """Return the size of the gathered parameters, all ranks' shards together."""
    return tensor_args(result)


def watch_forwards(paths: Paths, original: Function, hook: Hook) -> Function:
    """Wrap the constructor, so that each wrapped module gets a hook before and one after its forward."""
    forwards = ForwardSpans(hook)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if hook.live:
            try:
                module = args[0]
                forwards.attach([module], lambda: paths.of(module._handle))
            except own_failure() as error:
                hook.failed(error)

    return init


class Backwards:
    """The open backward spans, innermost last. Those of a backward that raised stay until the next one is over."""

    def __init__(self) -> None:
        self._open: dict[int, Any] = {}

    def begin(self, paths: Paths, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Open the span of a module about to unshard for its backward; FSDP asks once per output of its forward."""
        handle = argument("handle", 2, args, kwargs)
        if handle is None or getattr(handle, "_ran_pre_backward_hook", False):
            return
        if (unfinished := self._open.pop(id(handle), None)) is not None:
            unfinished.__exit__(RuntimeError)
        self._open[id(handle)] = spans.automatic_span("fsdp.backward", module=paths.of(handle)).__enter__()

    def end(self, handle: Any, _result: Any, _error: BaseException | None) -> None:
        """Close the span of a module whose gradients are reduced."""
        opened = self._open.pop(id(handle), None)
        if opened is not None:
            opened.__exit__(None)

    def end_all(self, _token: Any, _result: Any, error: BaseException | None) -> None:
        """Close what is open at the end of a whole backward."""
        while self._open:
            _, opened = self._open.popitem()
            opened.__exit__(None if error is None else type(error), error)


def leave_open(_token: Any, _result: Any, _error: BaseException | None) -> None:
    """Do nothing: the span goes on until the gradients are reduced."""

"""What the two ends of a module's span cost when nothing of them is in the processor's caches, in three seconds.

`python tests/bench/cold_calls.py [--calls N]`. In front of each call, a small layer of torch runs forward and backward
and 4 MiB are read, which leaves nothing of ours in the core's own caches and address translations. The figure is the
lower quartile of wall times, without that of calls of nothing: what else the machine does makes other times longer.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import rltrace
from rltrace.hooks.hook import Hook
from rltrace.instrument.torch import fsdp2, modules
from rltrace.record import repeated, spans

Call = Callable[[], object]


class Evictor:
    """Does a program's work."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._layer = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256), torch.nn.SiLU())
        self._input = torch.ones(4, 256, requires_grad=True)
        self._memory = torch.zeros(4 << 20, dtype=torch.uint8)

    def __call__(self) -> None:
        self._layer(self._input).softmax(-1).transpose(0, 1).contiguous().sum().backward()
        self._memory.sum()


def new_hook(target: str) -> Hook:
    """A hook that is in place."""
    hook = Hook("fsdp2", target, (), spans.current())
    hook.report("installed")
    return hook


def forward_hooks() -> tuple[Call, Call]:
    """What torch calls around the forward of a sharded module."""
    module = torch.nn.Module()
    modules.ForwardSpans(new_hook("torch:forward")).attach([module], lambda: "layers.12")
    (before,), (after,) = module._forward_pre_hooks.values(), module._forward_hooks.values()
    return lambda: before(module, ()), lambda: after(module, (), None)


class Stand(SimpleNamespace):
    """A stand-in for an object of FSDP2's, with the attributes that hooks read."""


def backward_hooks() -> tuple[Call, Call]:
    """What FSDP2 calls around a backward, which does nothing here."""
    group = Stand(_module_fqn="layers.12")
    state = Stand(_fsdp_param_groups=[group], _training_state=Stand(_name_="IDLE"))
    backwards = fsdp2.BackwardSpans()
    before = backwards.watch_beginnings(_nothing, new_hook("torch:backward"))
    after = backwards.watch_ends(_nothing, new_hook("torch:post_backward"))
    return lambda: before(state), lambda: after(group)


def _nothing(*_: Any) -> None:
    """Do what is hooked here."""


def measured_us(calls: dict[str, Call], count: int) -> dict[str, float]:
    """Return the microseconds of each call, which take turns."""
    evict, clock = Evictor(), time.perf_counter_ns
    times: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            evict()
            began_ns = clock()
            call()
            times[name].append(clock() - began_ns)
    return {name: statistics.quantiles(of_one)[0] / 1e3 for name, of_one in times.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=150)
    count = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        rltrace.start(Path(folder) / "run")
        calls: dict[str, Call] = {}
        for way, library in (("in C", repeated.NATIVE), ("in Python", None)):
            if way == "in Python" or library is not None:
                use(library)
                (calls[f"forward begins, {way}"], calls[f"forward ends, {way}"]) = forward_hooks()
                (calls[f"backward begins, {way}"], calls[f"backward ends, {way}"]) = backward_hooks()
                for call in calls.values():  # what is to be said is found out the first time
                    call()
        found = measured_us({**calls, "nothing": lambda: _nothing(1)}, count)
        rltrace.stop()
    nothing_us = found.pop("nothing")
    print("| end of a span | µs |\n|---|---|")
    for name, us in found.items():
        print(f"| {name} | {us - nothing_us:.1f} |")


def use(library: Any) -> None:
    """Have hooks that are made from here on use the library, or none."""
    repeated.NATIVE = library
    repeated.Stretch = repeated.PlainStretch if library is None else library.Stretch


if __name__ == "__main__":
    main()

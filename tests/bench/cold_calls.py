"""What spans, samples and the hooks around an engine's step cost when nothing of them is in the processor's caches.

`python tests/bench/cold_calls.py [--calls N] [--plain]`. In front of each call, a small layer of torch runs forward
and backward and 4 MiB are read, which leaves nothing of ours in the core's own caches and address translations. The
figure is the lower quartile of wall times, without that of calls of nothing: what else the machine does makes other
times longer.
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
from rltrace.hooks.request_spans import Requests
from rltrace.host.clock import now_ns
from rltrace.instrument.torch import fsdp2, modules
from rltrace.instrument.vllm.engine import Steps
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


def generic_calls() -> dict[str, Call]:
    """What any hook calls: both ends of a span, a span that is over, and a sample."""
    opened: list[Any] = []

    def begin() -> None:
        opened.append(spans.automatic_span("engine.add", bytes=4096, tensors=3).__enter__())

    return {
        "a span begins": begin,
        "and ends": lambda: opened.pop().__exit__(None),
        "a span that is over": lambda: spans.automatic_span_at("engine.add", now_ns(), now_ns(), bytes=4096, tensors=3),
        "a sample": lambda: spans.counter("actor.params_bytes", 4096),
    }


def engine_calls() -> dict[str, Call]:
    """What runs before and after vLLM's scheduler decides on a step, and before and after it hears of its tokens."""
    steps = Steps(Requests())
    scheduler = Stand(running=[*range(64)], waiting=[], requests={}, kv_cache_manager=Stand(usage=0.5))
    token: list[Any] = [None]
    output: list[Any] = [None]

    def before_schedule() -> None:
        token[0] = steps.begin((scheduler,), {})

    def after_schedule() -> None:
        output[0] = Stand(total_num_scheduled_tokens=64, scheduled_new_reqs=[], preempted_req_ids=set())
        output[0].scheduled_spec_decode_tokens = {}
        steps.keep_output(token[0], output[0], None)

    def before_update() -> None:
        token[0] = steps.find_output((scheduler, output[0], None), {})

    def after_update() -> None:
        steps.end(token[0], None, None)

    return {
        "before schedule": before_schedule,
        "after schedule": after_schedule,
        "before update": before_update,
        "after update": after_update,
    }


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
    parser.add_argument("--plain", action="store_true", help="record in Python")
    wanted = parser.parse_args()
    count = wanted.calls
    if wanted.plain:
        spans.record_by(*spans.PLAIN)
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
        calls |= generic_calls()
        calls |= engine_calls()
        found = measured_us({**calls, "nothing": lambda: _nothing(1)}, count)
        rltrace.stop()
    nothing_us = found.pop("nothing")
    print("| call | µs |\n|---|---|")
    for name, us in found.items():
        print(f"| {name} | {us - nothing_us:.1f} |")


def use(library: Any) -> None:
    """Have hooks that are made from here on use the library, or none."""
    repeated.NATIVE = library
    repeated.Stretch = repeated.PlainStretch if library is None else library.Stretch


if __name__ == "__main__":
    main()

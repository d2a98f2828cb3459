"""What the reference run asks of SGLang's scheduler, the process in which weights and KV cache lie.

SGLang has no request that brings a bucket of ours or proves what has arrived. So its scheduler, between two batches,
also answers a channel to the engine's process. SGLang lets a program name the function that its scheduler's process
runs (`Engine.run_scheduler_process_func`): `run` is that function.
"""

from __future__ import annotations

import faulthandler
import importlib
import select
import signal
import socket
import sys
from typing import Any

import msgspec
from torch import Tensor

from rltrace_reference.channel import Channel
from rltrace_reference.config import Config
from rltrace_reference.engine.views import checkpoint_views
from rltrace_reference.engine.weight_calls import WeightCalls

SCHEDULER = "sglang.srt.managers.scheduler"
TELL_WHERE = signal.SIGUSR1
"""A scheduler that gets this signal says on stderr what it is doing."""


def run(end: socket.socket, config: dict[str, Any], rank: int, *args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler in this process.

    Args:
        end: This process's end of the channel.
        config: The run, as builtin types.
        rank: Whose engine this is.
        *args: What SGLang gives the function that it would run instead.
        **kwargs: The same.
    """
    faulthandler.register(TELL_WHERE, all_threads=True)
    module: Any = importlib.import_module(SCHEDULER)
    module.Scheduler = answering(module.Scheduler, end, msgspec.convert(config, Config), rank)
    module.run_scheduler_process(*args, **kwargs)


def answering(scheduler: Any, end: socket.socket, config: Config, rank: int) -> type:
    """Return the class of a scheduler that answers the channel whenever it looks for requests."""
    channel = Channel(end)
    waiting = select.poll()
    waiting.register(end, select.POLLIN)

    class AnsweringScheduler(scheduler):  # type: ignore[misc]
        """SGLang's, which between two batches answers calls about its weights."""

        calls: SchedulerCalls | None = None

        def process_input_requests(self, recv_reqs: list[Any]) -> None:
            """Answer what has come, then go on as SGLang does."""
            self.calls = self.calls or SchedulerCalls(self, config, rank)
            while waiting.poll(0):
                if not self.calls.answer(channel):
                    sys.exit()  # as itself, where SGLang would kill it
            super().process_input_requests(recv_reqs)

    return AnsweringScheduler


class SchedulerCalls(WeightCalls):
    """Answers for the weights and the KV cache of a scheduler."""

    def __init__(self, scheduler: Any, config: Config, rank: int) -> None:
        super().__init__(rank)
        self.scheduler, self.config = scheduler, config

    def parameters(self) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint, as rows of SGLang's."""
        model = self.scheduler.tp_worker.model_runner.model
        return checkpoint_views(dict(model.named_parameters()), self.config.model, "SGLang")

    def on_addresses(self) -> list[int]:
        """Return where the weights and the KV cache lie."""
        cache = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        places = [*self.parameters().values(), *cache.k_buffer, *cache.v_buffer]
        return [place.data_ptr() for place in places]

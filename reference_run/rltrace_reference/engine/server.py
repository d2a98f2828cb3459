"""What an engine's process answers to its worker."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from rltrace.errors import RunError
from rltrace_reference import device, garbage
from rltrace_reference.channel import Channel
from rltrace_reference.config import Config
from rltrace_reference.device_memory import give_back_large_blocks
from rltrace_reference.engine.calls import Elsewhere
from rltrace_reference.engine.weight_calls import RecordCalls, WeightCalls

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Answer the worker's calls until it closes the channel or dies."""
    die_with_parent()
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    try:
        first, _ = channel.receive()
        config = msgspec.convert(first["config"], Config)
        if config.memory_limit_bytes is not None:
            give_back_large_blocks()
        Server(config, first["rank"], first["eos"], first["checkpoint"]).serve(channel)
    except ConnectionError:  # the worker is gone, and with it the reason to live
        pass


class Engine(Protocol):
    """An engine that samples: the embedded engine, vLLM, or SGLang."""

    @property
    def elsewhere(self) -> Elsewhere | None:
        """The process in which the weights lie; None if that is this one."""

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Weights by their names in a checkpoint, once started; contiguous views of where they lie."""

    @property
    def addresses(self) -> list[int]:
        """Where weights and KV cache lie, once started; CUDA graphs have these addresses in them."""

    def start(self) -> None:
        """Load the checkpoint's weights or dummy ones, profile, and reserve the KV pool."""

    def generate(self, prompts: list[list[int]], seed: int, step: int) -> Sequence[Response]:
        """Sample n responses of each prompt."""

    def sleep(self, level: int) -> dict[str, int]:
        """Release memory; return what is still there, in bytes by tag."""

    def wake_up(self, tags: list[str]) -> None:
        """Put memory behind the tags again."""


class Response(Protocol):
    """A finished request."""

    @property
    def tokens(self) -> list[int]:
        """Tokens that it generated."""

    @property
    def log_probs(self) -> list[float]:
        """Log-prob of each token."""


def build_engine(config: Config, rank: int, eos: int, checkpoint: str | None) -> Engine:
    """Return the engine that the configuration chose; its imports take seconds, while the worker builds its actor."""
    if config.rollout.engine == "vllm":
        from rltrace_reference.engine.vllm_engine import VllmEngine

        return VllmEngine(config, rank, eos, checkpoint)
    if config.rollout.engine == "sglang":
        from rltrace_reference.engine.sglang_engine import SglangEngine

        return SglangEngine(config, rank, eos, checkpoint)
    from rltrace_reference.engine import engine

    return engine.Engine(config, rank, eos, checkpoint)


class Server(WeightCalls):
    """Answers the worker's calls."""

    def __init__(self, config: Config, rank: int, eos: int, checkpoint: str | None = None) -> None:
        super().__init__(rank)
        self.config = config
        self.failed: str | None = None
        try:
            self.engine = build_engine(config, rank, eos, checkpoint)
        except Exception as error:  # said when the worker first asks
            self.failed = self.one_line(error)

    def call(self, name: str, arguments: dict[str, Any], descriptors: list[int]) -> Any:
        """Return the result of a call; what is about the weights is asked where they lie."""
        if self.failed is not None:
            raise RunError(self.failed)
        elsewhere = self.engine.elsewhere
        if elsewhere is not None and hasattr(WeightCalls, f"on_{name}"):
            if hasattr(RecordCalls, f"on_{name}"):
                super().call(name, arguments, descriptors)
            return elsewhere.call(name, arguments, descriptors)
        return super().call(name, arguments, descriptors)

    def parameters(self) -> dict[str, Tensor]:
        """See `Engine.parameters`."""
        return self.engine.parameters

    def on_ready(self) -> None:
        """Answer once the engine's imports are over."""

    def on_start(self) -> None:
        """See `Engine.start`."""
        self.engine.start()
        garbage.freeze()
        self.call("use_transport", {"transport": device.transport_name(self.config)}, [])

    def on_sleep(self, level: int) -> dict[str, int]:
        """See `Engine.sleep`."""
        return self.engine.sleep(level)

    def on_wake_up(self, tags: list[str]) -> None:
        """See `Engine.wake_up`."""
        self.engine.wake_up(tags)

    def on_generate(self, prompts: list[list[int]], seed: int, step: int) -> dict[str, Any]:
        """See `Engine.generate`."""
        requests = self.engine.generate(prompts, seed, step)
        return {
            "tokens": [r.tokens for r in requests],
            "log_probs": [r.log_probs for r in requests],
            "addresses": hashlib.sha256(repr(self.engine.addresses).encode()).hexdigest()[:16],
        }


def die_with_parent() -> None:
    """Ask the kernel to end this process with the worker that started it."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)

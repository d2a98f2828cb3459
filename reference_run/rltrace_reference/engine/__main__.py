"""The engine process: `python -m rltrace_reference.engine SOCKET_FD`, started by the rank's worker (`rollout.py`)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

import rltrace
from rltrace.errors import RunError
from rltrace_reference import checksum, device, engine_group, garbage
from rltrace_reference.channel import Channel
from rltrace_reference.config import Config
from rltrace_reference.device_memory import give_back_large_blocks
from rltrace_reference.weight_sync import Bucket, Receiver

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
    """An engine that samples: the embedded engine, or vLLM."""

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
    from rltrace_reference.engine import engine

    return engine.Engine(config, rank, eos, checkpoint)


class Server:
    """Dispatches the worker's calls by name."""

    def __init__(self, config: Config, rank: int, eos: int, checkpoint: str | None = None) -> None:
        self.config, self.rank = config, rank
        self.receiver: Receiver | None = None
        self.failed: str | None = None
        try:
            self.engine = build_engine(config, rank, eos, checkpoint)
        except Exception as error:  # said when the worker first asks
            self.failed = self._one_line(error)

    def serve(self, channel: Channel) -> None:
        """Answer each call with its result, or with the one line of its error.

        Raises:
            ConnectionError: the worker closed the channel.
        """
        while True:
            message, descriptors = channel.receive()
            name = message.pop("call")
            if name == "exit":
                return
            try:
                if self.failed is not None:
                    raise RunError(self.failed)
                if name == "bucket":
                    message["descriptors"] = descriptors
                channel.send({"result": getattr(self, f"on_{name}")(**message)})
            except RunError as error:
                channel.send({"error": str(error)})
            except Exception as error:
                channel.send({"error": self._one_line(error)})

    def _one_line(self, error: Exception) -> str:
        """Return what went wrong in the engine's own code; all of it goes to this process's log."""
        traceback.print_exc()
        return f"engine of rank {self.rank}: {type(error).__name__}: {' '.join(str(error).split())[:500]}"

    def on_ready(self) -> None:
        """Answer once the engine's imports are over."""

    def on_start(self) -> None:
        """See `Engine.start`."""
        self.engine.start()
        garbage.freeze()
        self.on_use_transport(device.transport_name(self.config))

    def on_use_transport(self, transport: str) -> None:
        """Let the next sync come by this transport."""
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = Receiver(self.engine.parameters, self.rank, device.transport(transport))

    def on_record(self, on: bool) -> None:
        """Continue recording, or pause."""
        (rltrace.resume if on else rltrace.pause)()

    def on_kernels(self, on: bool) -> None:
        """Begin or end recording every operator and kernel."""
        (rltrace.start_kernels if on else rltrace.stop_kernels)()

    def on_allocations(self, on: bool) -> None:
        """Begin or end recording every allocation."""
        (rltrace.start_allocations if on else rltrace.stop_allocations)()

    def on_measure_cost(self) -> None:
        """Measure what recording an event costs in this process."""
        rltrace.measure_cost()

    def on_sleep(self, level: int) -> dict[str, int]:
        """See `Engine.sleep`."""
        return self.engine.sleep(level)

    def on_wake_up(self, tags: list[str]) -> None:
        """See `Engine.wake_up`."""
        self.engine.wake_up(tags)

    def on_bucket(self, bucket: dict[str, Any], handle: bytes, size_bytes: int, descriptors: list[int]) -> str:
        """See `Receiver.receive`."""
        assert self.receiver is not None
        return self.receiver.receive(msgspec.convert(bucket, Bucket), handle, size_bytes, descriptors)

    def on_finish_sync(self, checksums: dict[str, int], keep: bool) -> None:
        """See `Receiver.finish`."""
        assert self.receiver is not None
        self.receiver.finish(checksums, keep)

    def on_join_group(self, backend: str, port: int, rank: int, size: int) -> None:
        """See `engine_group.Group`."""
        self.group = engine_group.Group(backend, port, rank, size)

    def on_receive_broadcast(self, names: list[str]) -> None:
        """See `engine_group.receive`."""
        with torch.no_grad():
            engine_group.receive(self.group, self.engine.parameters, names)

    def on_checksums(self) -> dict[str, int]:
        """See `Rollout.checksums`."""
        parameters = self.engine.parameters
        return dict(zip(parameters, checksum.of_tensors(list(parameters.values())), strict=True))

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


if __name__ == "__main__":
    main()

"""The worker's handle of its engine process: start, generate, sleep, wake up, end, close."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import IO, Any

import msgspec

from rltrace.errors import RunError
from rltrace_reference import batch, process_exit, task
from rltrace_reference.batch import Batch
from rltrace_reference.channel import Channel
from rltrace_reference.config import ENGINES, Config
from rltrace_reference.device_memory import DeviceMemory
from rltrace_reference.engine.last_words import last_words

END_SECONDS, END_SECONDS_OF_SGLANG = 5.0, 30.0
"""How long an engine may take to end before it is killed; SGLang ends its scheduler first."""


class Rollout:
    """One engine process, which lives as long as this worker does."""

    def __init__(self, config: Config, rank: int) -> None:
        """Start the process; its imports run while the worker builds its actor."""
        self.config, self.rank = config, rank
        self.memory = DeviceMemory(None)
        """What limits worker and engine together."""
        self.addresses = ""
        """Digest of the addresses of weights and KV cache in the last rollout."""
        self.end_seconds = END_SECONDS_OF_SGLANG if config.rollout.engine == "sglang" else END_SECONDS
        self._retired: subprocess.Popen[bytes] | None = None
        self._launched = threading.Event()
        self._spawn(checkpoint=None)

    def _spawn(self, checkpoint: str | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # The embedded engine says everything in its answers; others, and their children, only on stderr.
        is_of_others = self.config.rollout.engine in ENGINES["cuda"]
        self.stderr: IO[bytes] | None = os.fdopen(os.memfd_create("stderr"), "rb") if is_of_others else None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rltrace_reference.engine", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=self.stderr,
        )
        theirs.close()
        self.channel = Channel(ours)
        self.channel.send(
            {
                "config": msgspec.to_builtins(self.config),
                "rank": self.rank,
                "eos": task.EOS,
                "checkpoint": checkpoint,
            }
        )
        self._launched.set()

    def start(self) -> None:
        """Let the engine load dummy weights, profile and reserve its KV pool; vLLM captures its graphs too."""
        self._call("ready")  # what it has imported is not the device's
        self.memory.meet(self.process.pid)
        self.memory.divide()
        self._call("start")

    def restart(self, checkpoint: str) -> None:
        """End the engine and start another one, which loads its weights from this checkpoint's folder."""
        ended, channel = self.process, self.channel
        self._spawn(checkpoint)
        self.memory.forget(ended.pid)
        _end(ended, channel, self.end_seconds)
        self.start()

    def end(self) -> None:
        """End the engine, which gives all that it holds back; `restart` makes the next one."""
        self._retired = self.process
        self._launched.clear()
        self.memory.forget(self.process.pid)
        _end(self.process, self.channel, self.end_seconds)
        self.process.wait()
        self.memory.divide()

    def checksums(self) -> dict[str, int]:
        """Return the checksums of the engine's weights by their names in a checkpoint."""
        of_names: dict[str, int] = self._call("checksums")
        return of_names

    def generate(self, prompts: list[list[int]], seed: int, step: int) -> Batch:
        """Sample n responses of each prompt.

        Returns:
            Samples of one prompt adjacent, with the engine's log-probs.
        """
        said = self._call("generate", prompts=prompts, seed=seed, step=step)
        self.addresses = said["addresses"]
        repeated = [prompt for prompt in prompts for _ in range(self.config.rollout.n)]
        return batch.from_responses(repeated, said["tokens"], said["log_probs"], self.config.rollout.max_tokens)

    def sleep(self, level: int) -> dict[str, int]:
        """Let the engine release its memory.

        Returns:
            Bytes that are still there, by tag.
        """
        residual: dict[str, int] = self._call("sleep", level=level)
        self.memory.divide()
        return residual

    def wake_up(self, tags: list[str]) -> None:
        """Let the engine put memory behind these tags again."""
        self.memory.divide()
        self._call("wake_up", tags=tags)

    def use_transport(self, name: str) -> None:
        """Let the engine expect the next sync by this transport, as `device.py` names them."""
        self._call("use_transport", transport=name)

    def record(self, on: bool) -> None:
        """Let the engine's process continue recording, or pause."""
        self._call("record", on=on)

    def kernels(self, on: bool) -> None:
        """Let the engine's process begin or end recording every operator and kernel."""
        self._call("kernels", on=on)

    def allocations(self, on: bool) -> None:
        """Let the engine's process begin or end recording every allocation."""
        self._call("allocations", on=on)

    def measure_cost(self) -> None:
        """Let the engine's process measure what recording an event costs in it."""
        self._call("measure_cost")

    def death(self) -> str:
        """Wait until the engine process has ended (a restart does not count), and say how."""
        while True:
            process = self.process
            code = process.wait()
            if process is self._retired:
                self._launched.wait()
            if process is self.process:
                break
        how = process_exit.in_words(code)
        said = "" if self.stderr is None else last_words(self.stderr)
        return f"engine of rank {self.rank} (pid {self.process.pid}) died: {how}" + (
            f"; it said: {said}" if said else ""
        )

    def close(self) -> None:
        """End the engine process."""
        self._launched.set()  # whoever waits for the next one waits in vain
        _end(self.process, self.channel, self.end_seconds)

    def _call(self, name: str, **arguments: Any) -> Any:
        self.send(name, **arguments)
        return self.answer()

    def send(self, name: str, **arguments: Any) -> None:
        """Begin a call of the engine; `answer` ends it.

        Raises:
            RunError: the engine has died.
        """
        try:
            self.channel.send({"call": name} | arguments)
        except ConnectionError:
            raise RunError(self.death()) from None

    def answer(self) -> Any:
        """Return what the engine answers.

        Raises:
            RunError: it failed, or has died.
        """
        try:
            answer, _ = self.channel.receive()
        except ConnectionError:
            raise RunError(self.death()) from None
        if answer.get("error"):
            raise RunError(answer["error"])
        return answer["result"]


def _end(process: subprocess.Popen[bytes], channel: Channel, seconds: float) -> None:
    """Let an engine process exit, or kill one that does not."""
    try:
        channel.send({"call": "exit"})
        process.wait(timeout=seconds)
    except (ConnectionError, subprocess.TimeoutExpired):
        process.kill()

"""SGLang as the engine: its scheduler is a process below this one, and sleeps by torch_memory_saver's tags."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import importlib
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from rltrace.errors import RunError
from rltrace_reference.architecture import transformers_config
from rltrace_reference.channel import Channel
from rltrace_reference.config import Config
from rltrace_reference.engine import sglang_scheduler
from rltrace_reference.engine.calls import Elsewhere
from rltrace_reference.engine.last_words import last_words
from rltrace_reference.engine.response import Response, finite

START_SECONDS = 180.0
"""How long the start may take: imports in three processes, kernels that are compiled, and CUDA graphs."""
CALL_SECONDS = 120.0
"""How long any other call may take."""
IDLE_SECONDS = 30.0
"""How long the scheduler may take to end its last batch, which is under way when the last answer is here."""
END_SECONDS = 20.0
"""How long the scheduler may take to end."""
DUMP_SECONDS = 0.5
"""How long a scheduler may take to say what it is doing."""
SPARE_TOKENS = 2
"""SGLang ends a sequence so many tokens before its context does."""
TAGS = ["kv_cache", "weights"]


class SglangEngine:
    """Answers the embedded engine's calls by SGLang."""

    elsewhere: Elsewhere | None = None
    """SGLang's scheduler, once started."""

    def __init__(self, config: Config, rank: int, eos: int, checkpoint: str | None = None) -> None:
        """Import SGLang and nothing more: memory is measured in `start`."""
        self.config, self.rank, self.eos, self.checkpoint = config, rank, eos, checkpoint
        self.module: Any = importlib.import_module("sglang.srt.entrypoints.engine")

    def start(self) -> None:
        """Load weights, reserve the KV pool and capture graphs, all in SGLang's constructor."""
        show_cuda_runtime()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        run = functools.partial(sglang_scheduler.run, theirs, msgspec.to_builtins(self.config), self.rank)
        kind = type("Engine", (self.module.Engine,), {"run_scheduler_process_func": staticmethod(run)})
        with tempfile.TemporaryDirectory(prefix="rltrace-model-") as folder, self.within(START_SECONDS, "start"):
            transformers_config(self.config.model).save_pretrained(folder)
            try:
                self.llm: Any = kind(**self.server_arguments(self.checkpoint or folder))
            except Exception as error:
                traceback.print_exc()
                said = last_words(sys.stderr.fileno())
                raise RunError(f"engine of rank {self.rank}: SGLang did not start: {error}; it said: {said}") from None
        theirs.close()
        self.elsewhere = Elsewhere(Channel(ours), functools.partial(self.within, CALL_SECONDS))
        atexit.register(self.end, self.elsewhere)  # before SGLang's own, which kills

    def server_arguments(self, model: str) -> dict[str, Any]:
        """Return SGLang's arguments.

        Args:
            model: Folder of the checkpoint, or of a configuration alone.
        """
        rollout = self.config.rollout
        return {
            "model_path": model,
            "skip_tokenizer_init": True,
            "load_format": "auto" if self.checkpoint else "dummy",
            "dtype": "bfloat16",
            "sampling_defaults": "openai",  # those of no model
            "enable_memory_saver": self.config.device == "cuda",  # at level 0 too: it tells the KV cache from the rest
            "enable_weights_cpu_backup": rollout.sleep_level == 1,
            "mem_fraction_static": rollout.gpu_memory_utilization,
            "context_length": (rollout.max_model_len or self.config.sequence_tokens) + SPARE_TOKENS,
            "max_running_requests": rollout.slots,
            "disable_cuda_graph": rollout.enforce_eager,
            "cuda_graph_max_bs": rollout.slots,
            "disable_piecewise_cuda_graph": True,
            "disable_radix_cache": True,
            "random_seed": self.config.seed,
            "log_level": "error",
            **BACKENDS[self.config.device],
        }

    def end(self, scheduler: Elsewhere) -> None:
        """Let the scheduler end by itself, so that nobody takes it for one that was killed."""
        try:
            scheduler.channel.send({"call": "exit"})
        except ConnectionError:  # it is gone
            return
        pid = self.llm.get_all_child_pids()[0]
        for child in multiprocessing.active_children():
            if child.pid == pid:
                child.join(END_SECONDS)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Fail: they are elsewhere."""
        raise NotImplementedError("SGLang's weights lie in its scheduler")

    @property
    def addresses(self) -> list[int]:
        """Return where the weights and the KV cache lie, in the scheduler's process."""
        assert self.elsewhere is not None
        places: list[int] = self.elsewhere.call("addresses", {}, [])
        return places

    def sleep(self, level: int) -> dict[str, int]:
        """Give memory back to the device.

        Returns:
            Nothing: torch_memory_saver does not say what is mapped nevertheless.
        """
        if level > 0:
            with self.within(CALL_SECONDS, "sleep"):
                self._become_idle()
                self.llm.release_memory_occupation(tags=TAGS)
        return {}

    def wake_up(self, tags: list[str]) -> None:
        """Map memory behind the tags; at level 2 its former content is gone."""
        if self.config.rollout.sleep_level > 0:
            with self.within(CALL_SECONDS, "wake-up"):
                self.llm.resume_memory_occupation(tags=tags)

    def generate(self, prompts: list[list[int]], seed: int, step: int) -> list[Response]:
        """Sample as `Engine.generate` of the embedded engine does, but for the seed: SGLang has one for its life."""
        rollout = self.config.rollout
        sampling = {
            "temperature": rollout.temperature,
            "max_new_tokens": rollout.max_tokens,
            "ignore_eos": rollout.ignore_eos,
            "stop_token_ids": [] if rollout.ignore_eos else [self.eos],
        }
        repeated = [prompt for prompt in prompts for _ in range(rollout.n)]
        with self.within(CALL_SECONDS, "generate"):
            answers = self.llm.generate(input_ids=repeated, sampling_params=sampling, return_logprob=True)
            self._become_idle()
        return [response(answer, self.rank) for answer in answers]

    def _become_idle(self) -> None:
        """Wait until the scheduler has ended its last batch, and let it forget all sequences.

        Raises:
            RunError: it does not.
        """
        answer = self.llm.loop.run_until_complete(self.llm.tokenizer_manager.flush_cache(timeout_s=IDLE_SECONDS))
        if not answer.success:
            raise RunError(
                f"engine of rank {self.rank}: SGLang is not idle after {IDLE_SECONDS:.0f} s: {answer.message}"
            )

    @contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """End this process, and say where it and its children are, if what happens inside takes longer."""
        timer = threading.Timer(seconds, give_up, (self.rank, seconds, what))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


BACKENDS: dict[str, dict[str, Any]] = {
    "cuda": {"device": "cuda", "attention_backend": "triton", "sampling_backend": "pytorch"},
    "cpu": {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"},
}
"""Kernels that come in SGLang's own wheels, or that Triton compiles. On a CPU nothing sleeps: for tests alone."""


def response(answer: dict[str, Any], rank: int) -> Response:
    """Return a sampled sequence as SGLang answers it.

    Raises:
        RunError: it was not sampled to its end, or has log-probs that are no numbers.
    """
    said = answer["meta_info"]
    reason = said["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise RunError(f"engine of rank {rank}: SGLang ended a sequence by {reason}")
    tokens, log_probs = [], []
    for log_prob, token, _ in said["output_token_logprobs"]:
        tokens.append(token)
        log_probs.append(log_prob)
    if tokens != list(answer["output_ids"]):
        raise RunError(
            f"engine of rank {rank}: SGLang answered {len(answer['output_ids'])} tokens and log-probs of "
            f"{len(tokens)} others"
        )
    return Response(tokens, finite(log_probs, rank))


def show_cuda_runtime() -> None:
    """Let processes below this one find the CUDA runtime that torch has loaded here.

    torch_memory_saver is preloaded there, and needs it before torch says in which package it lies.
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart.so" in line}
    known = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    folders = [folder for folder in sorted({str(Path(file).parent) for file in mapped}) if folder not in known]
    os.environ["LD_LIBRARY_PATH"] = os.pathsep.join([folder for folder in known if folder] + folders)


def give_up(rank: int, seconds: float, what: str) -> None:
    """Say on stderr what this process and the scheduler, its first child, are doing, and end."""
    print(f"engine of rank {rank}: {what} has not ended after {seconds:.0f} s", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    pids = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
    if pids:
        os.kill(min(pids), sglang_scheduler.TELL_WHERE)
        time.sleep(DUMP_SECONDS)
    os._exit(1)

"""Says which rank a process is, if torchrun has started it, or a launcher that is built on it, such as accelerate.

torchrun tells each process its rank in environment variables, which everything that the process starts inherits. The
first process to join a process group is the rank, and what it starts is none. A framework that knows better says so.

Source read: torch 2.6 to 2.13, torch/distributed/elastic/agent/server/local_elastic_agent.py and distributed_c10d.py.
"""

from __future__ import annotations

import os
from typing import Any

from rltrace.hooks.patching import PatchSet, nothing_before
from rltrace.record import spans
from rltrace.record.process import UNSAID_ROLE

LAUNCHED, RANK = "TORCHELASTIC_RUN_ID", "RANK"
"""The environment variables that torchrun sets."""
TAKEN = "RLTRACE_RANK_TAKEN"
"""This environment variable has the pid of the process, this one or one above it, that is the rank."""


class TorchDistributed:
    """Says which rank a process is."""

    name = "torch_distributed"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hook."""
        patches.around("torch.distributed.distributed_c10d:init_process_group", nothing_before, joined)


def joined(_token: Any, _result: Any, error: BaseException | None) -> None:
    """Say which rank this process is, if nobody has said who it is."""
    recording = spans.current()
    if error is not None or recording is None or LAUNCHED not in os.environ or TAKEN in os.environ:
        return
    os.environ[TAKEN] = str(os.getpid())
    if recording.who.get("role") in (None, UNSAID_ROLE):
        recording.identify(role="worker", rank=int(os.environ[RANK]))

"""Weight sync without sharing memory: a checkpoint on disk, and a new engine that loads it.

Source: "Efficient RL Training - Optimizing Memory Usage in verl", 4.2: what colocated runs did before engines slept.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rltrace.errors import RunError
from rltrace_reference import checksum
from rltrace_reference.architecture import WEIGHTS_FILE, transformers_config
from rltrace_reference.rollout import Rollout
from rltrace_reference.weight_sync import SyncStats


class DiskReload:
    """One rank's part: a context manager, which removes the checkpoint at the end. All ranks are on one host."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def __enter__(self) -> DiskReload:
        self.is_first = dist.get_rank() == 0
        folder = [tempfile.mkdtemp(prefix="rltrace-checkpoint-") if self.is_first else None]
        dist.broadcast_object_list(folder, src=0, device=torch.device("cpu"))
        self.folder = str(folder[0])
        if self.is_first:
            transformers_config(self.rollout.config.model).save_pretrained(self.folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_first:
            shutil.rmtree(self.folder)

    def sync(self, parameters: Iterable[tuple[str, Tensor]]) -> SyncStats:
        """Save every parameter, restart the engine, and return when the engine has proven that it has them.

        Args:
            parameters: Names and sharded parameters; every rank must come with all of them.

        Raises:
            RunError: what the engine loaded is not what was saved; names the first tensor.
        """
        start = time.monotonic()
        sent, sent_bytes = self.save(parameters)
        self.load(sent)
        return SyncStats(sent_bytes, len(sent), 1, time.monotonic() - start)

    def save(self, parameters: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, int], int]:
        """Save every parameter; return their checksums by name, and how many bytes they have."""
        sent, tensors, sent_bytes = {}, {}, 0
        for name, parameter in parameters:
            gathered = whole(parameter)
            (sent[name],) = checksum.of_tensors([gathered])
            sent_bytes += gathered.nbytes
            if self.is_first:
                tensors[name] = gathered.cpu()
        if self.is_first:
            save_file(tensors, Path(self.folder) / WEIGHTS_FILE, metadata={"format": "pt"})
        dist.barrier()  # the file is whole
        return sent, sent_bytes

    def load(self, sent: dict[str, int]) -> None:
        """Restart the engine with what was saved.

        Raises:
            RunError: as `sync`.
        """
        self.rollout.restart(self.folder)
        check(sent, self.rollout.checksums(), self.rollout.rank)
        dist.barrier()  # everybody has read it


def whole(parameter: Tensor) -> Tensor:
    """Return all ranks' elements of a parameter in bf16."""
    cast = parameter.detach().bfloat16()
    return cast.full_tensor() if hasattr(cast, "full_tensor") else cast


def check(sent: dict[str, int], found: dict[str, int], rank: int) -> None:
    """Raise a RunError for the first parameter whose checksum differs."""
    for name, of_sent in sent.items():
        if found.get(name) != of_sent:
            raise RunError(
                f"weight sync: {name} did not arrive in the engine of rank {rank}: checksum {of_sent} sent, "
                f"{found.get(name, 'none')} in the engine's weights; the engine would sample from a wrong policy"
            )

"""Runs a function on two gloo ranks, forked from a process that has imported what they need: once for all tests."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
IMPORTED = ["rltrace_reference.actor", "rltrace_reference.weight_sync", "transformers.models.qwen3.modeling_qwen3"]


def on_ranks(function: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Call a function with each rank and the arguments.

    Args:
        function: Of a module: the ranks import it.
        folder: Used by no other call.
        *arguments: Behind the rank.

    Returns:
        What each rank returned.
    """
    multiprocessing.set_forkserver_preload(IMPORTED)  # of no effect once the process is there
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/tmp")  # short: the forkserver has a Unix socket there
        mp.start_processes(_rank, (function, folder, arguments), nprocs=RANKS, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _rank(rank: int, function: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(function(rank, *arguments), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()

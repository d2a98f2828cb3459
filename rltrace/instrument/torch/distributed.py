"""Says which rank a process is that torchrun or SLURM has started, or a launcher that is built on torchrun, such as
accelerate, or somebody by hand for `env://`; and lets the clocks of the job's hosts be read.

The launcher tells each process its rank in environment variables, which everything that the process starts inherits.
The first process to join a process group is the rank, and what it starts is none. A framework that knows better says
so.

Source read: torch 2.6 to 2.15, distributed_c10d.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from rltrace.hooks.arguments import argument, attributes
from rltrace.hooks.patching import PatchSet, nothing_after, nothing_before
from rltrace.instrument.torch.host_clocks import Reader
from rltrace.instrument.torch.launcher import BY_HAND, Launched, launched
from rltrace.record import cluster, lifecycle, spans
from rltrace.record.process import UNSAID_ROLE
from rltrace.record.writer import Recorder

TAKEN = "RLTRACE_RANK_TAKEN"
"""This environment variable has the pid of the process, this one or one above it, that is the rank."""

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""How often torchrun has started the ranks again, all with one store."""

CLOCKS = "clocks of other hosts"
"""What a process cannot measure if its job's store is none that others reach."""

_MODULE = "torch.distributed.distributed_c10d:"


class TorchDistributed:
    """Says which rank a process is, and reads the clocks of the job's hosts."""

    name = "torch_distributed"
    supports = ("torch >= 2.6",)

    def install(self, patches: PatchSet) -> None:
        """Name the hooks."""
        reads = attributes(_MODULE, "_get_default_store", "get_rank", "get_world_size")
        patches.around(f"{_MODULE}init_process_group", nothing_before, joined, reads=reads)
        patches.around(f"{_MODULE}destroy_process_group", end_reading, nothing_after)


class _Group:
    """The process group of all ranks in this process."""

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self.sessions = 0
        """How many there have been."""
        self._ends_with_recording = False

    def read_clocks(self, connect: Callable[[], Any], recording: Recorder, rank: int) -> None:
        """Begin to read the clocks of the hosts, or to answer who reads them."""
        if not self._ends_with_recording:
            self._ends_with_recording = True
            lifecycle.when_stopped(self.end)
        self.end()
        session = f"{os.environ.get(RESTARTS, '0')}/{self.sessions}"
        self.reader = Reader(connect, session, recording.recording if rank == 0 else None)

    def end(self) -> None:
        """End what was begun."""
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.end()


_group = _Group()


def joined(_token: Any, _result: Any, error: BaseException | None) -> None:
    """Say which rank this process is, if nobody has said who it is, and take part in the reading of clocks."""
    recording = spans.current()
    own = str(os.getpid())
    if error is not None or recording is None or os.environ.get(TAKEN, own) != own:
        return
    place = launched(os.environ) or _set_by_hand()
    if place is None or not _is_of_the_group(place):
        return
    if TAKEN not in os.environ:
        os.environ[TAKEN] = own
        _say(recording, place)
    _group.sessions += 1
    # A run on Ray knows its hosts by Ray, and reads their clocks beside the run.
    if place.hosts > 1 and place.local_rank == 0 and cluster.RUN_ID_VARIABLE not in os.environ:
        _read_clocks(recording, place.rank)


def end_reading(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Take part in the reading of clocks no longer: the store may go with the group of all ranks."""
    from torch import distributed

    if argument("group", 0, args, kwargs, None) in (None, distributed.group.WORLD):
        _group.end()


def _is_of_the_group(place: Launched) -> bool:
    """Return whether the group is that of the launched processes. torchrun starts nothing else; SLURM may start
    anything, such as a server whose workers make a group of their own."""
    from torch import distributed

    return place.by == "torchrun" or (distributed.get_rank(), distributed.get_world_size()) == place[1:3]


def _set_by_hand() -> Launched | None:
    """Return what somebody has set for `env://` without a launcher; None if that is not what the group says.

    An engine makes a group of its own, with ranks that are not those of the environment.
    """
    from torch import distributed

    group = distributed.get_rank(), distributed.get_world_size()
    said = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if said != tuple(map(str, group)):
        return None
    return Launched(BY_HAND, *group, local_rank=0, hosts=1)


def _say(recording: Recorder, place: Launched) -> None:
    if recording.who.get("role") in (None, UNSAID_ROLE):
        recording.identify(role="worker", rank=place.rank, world_size=place.world_size)
    elif recording.who.get("rank") == place.rank:
        recording.identify(world_size=place.world_size)


def _read_clocks(recording: Recorder, rank: int) -> None:
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        # A connection of its own, as a store is not to be used by two threads at once.
        connect = functools.partial(TCPStore, store.host, store.port, is_master=False, wait_for_workers=False)
        _group.read_clocks(connect, recording, rank)
    else:
        lifecycle.unavailable(CLOCKS, f"the job's store is a {type(store).__name__}, and they are read by a TCPStore")

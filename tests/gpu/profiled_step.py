"""A step of a sharded model and the copies of a bucket, timed by `cuda_time` and by torch.profiler at once.

Usage: profiled_step.py RANKS OUT

Writes OUT: a row for each span of rank 0, with the kernels that the profiler saw launched inside it. The GPU sleeps
while the host submits a step: what it then does has no gaps that the host made, in which neither of the two is busy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

import rltrace
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.torch.cuda_time import CudaEvents, CudaPairs, CudaTime, name_hooks
from rltrace.instrument.torch.device_time import DeviceSpan, DeviceTimes
from rltrace.record import spans

WIDTH, TOKENS, LAYERS = 4096, 8192, 3
"""A layer takes some 3 ms forward, longer than its parameters take to be gathered."""
SLEEP_CYCLES = 1_000_000_000
"""Half a second; a step is submitted in a tenth."""
BUCKET_BYTES = 512 << 20
COLLECTIVES = ("gpu.fsdp.all_gather", "gpu.fsdp.reduce_scatter")


@dataclass
class Row:
    """One span, and the same by the profiler."""

    name: str
    module: str
    span_ns: int
    kernels: int
    """Launched inside it; on its stream, if it is no collective's."""
    kernels_ns: int
    """From the beginning of the first to the end of the last."""
    busy_ns: int
    """While at least one of them ran."""
    room_ns: int
    """Of a collective, from its begin to its kernel's, while other kernels ran: it waits for them to leave room."""
    error_ns: int


class Marked:
    """A pair, with a range of the profiler's before and behind it: what is launched between them is its work."""

    def __init__(self, pair: Any, number: int) -> None:
        self.pair, self.number = pair, number

    def __exit__(self, kind: object = None, error: object = None, traceback: object = None, /) -> None:
        self.pair.__exit__(kind)
        with record_function(f"end {self.number}"):
            pass


class MarkedPairs(CudaPairs):
    """Pairs by number, while they are wanted."""

    def __init__(self, written: list[DeviceSpan]) -> None:
        super().__init__()
        self.times = self._times = DeviceTimes(CudaEvents(torch), written.append)
        self.are_wanted = False
        self.count = 0

    def begin(self, name: str, args: dict[str, Any], queue: int = 0) -> Any:
        """What to leave behind work that begins now."""
        if not self.are_wanted:
            return None
        self.count += 1
        with record_function(f"begin {self.count}"):
            pass
        pair = super().begin(name, {**args, "number": self.count}, queue)
        return None if pair is None else Marked(pair, self.count)


class Layer(torch.nn.Module):
    """Two large matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    """Layers, and a head that the root shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Work:
    """What is measured."""

    def __init__(self, ranks: int, pairs: MarkedPairs) -> None:
        from rltrace_reference import device
        from rltrace_reference.weight_sync import Receiver, Sender, plan

        self.ranks, self.pairs = ranks, pairs
        mesh = init_device_mesh("cuda", (ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with torch.device("cuda"):
            self.model = Model()
        whole = {name: torch.empty_like(p, dtype=torch.bfloat16) for name, p in self.model.named_parameters()}
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.x = torch.randn(TOKENS, WIDTH, device="cuda")
        parameters = dict(self.model.named_parameters())
        transport = device.transport("cuda_ipc")
        self.sender: Any = Sender(None, BUCKET_BYTES, "s", transport)  # type: ignore[arg-type]  # nothing is said on it
        self.sender.buffers = [transport.create(BUCKET_BYTES)]
        self.sender.sums = torch.zeros(len(parameters), dtype=torch.int64, device="cuda")
        self.bucket = next(iter(plan(parameters, ranks, BUCKET_BYTES, 1, "s.0")))
        with torch.no_grad():
            self.packing = self.sender._prepare(self.bucket, parameters)
        self.receiver: Any = Receiver(whole, 0, transport)
        self.receiver.buffers[0] = self.sender.buffers[0]

    def step(self, *, are_wanted: bool = False) -> None:
        """Forward, backward and optimizer step; what the first layer needs is gathered before."""
        self.model.unshard()
        self.model.layers[0].unshard()
        self._begin(are_wanted)
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()
        self._end()
        self.optimizer.zero_grad()

    def copy(self, *, are_wanted: bool = False) -> None:
        """A bucket packed at one end and loaded at the other."""
        self._begin(are_wanted)
        with torch.no_grad():
            self.sender.pack(self.bucket, self.packing)
            self.receiver.load(self.bucket)
        self._end()

    def _begin(self, are_wanted: bool) -> None:
        """Let all ranks begin at once, the device's clock read and the device asleep."""
        dist.barrier()
        torch.cuda.synchronize()
        self.pairs.are_wanted = are_wanted
        with self.pairs.span("anchor"):
            pass
        torch.cuda._sleep(SLEEP_CYCLES)

    def _end(self) -> None:
        self.pairs.are_wanted = False
        torch.cuda.synchronize()
        self.pairs.times.poll()


def profiled(work: Callable[[], None]) -> list[Any]:
    """What the profiler saw of some work."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return list(profiler.profiler.kineto_results.events())


def rows(spans: Iterable[DeviceSpan], events: list[Any]) -> list[Row]:
    """Each span beside the kernels that were launched between its two marks."""
    on_host = [event for event in events if str(event.device_type()).endswith("CPU")]
    on_gpu = [e for e in events if str(e.device_type()).endswith("CUDA") and not e.is_user_annotation()]
    marks = {event.name(): event for event in on_host if event.name().startswith(("begin ", "end "))}
    launches = {event.correlation_id(): event.start_ns() for event in on_host if event.name().startswith("cu")}
    (default,) = {event.device_resource_id() for event in on_gpu if "spin_kernel" in event.name()}
    found = []
    for span in spans:
        number = span.args["number"]
        begin_ns, end_ns = marks[f"begin {number}"].start_ns(), marks[f"end {number}"].end_ns()
        inside, others = [], []
        for event in on_gpu:
            is_inside = begin_ns <= launches.get(event.correlation_id(), 0) <= end_ns
            is_its_own = span.name in COLLECTIVES or event.device_resource_id() == default
            (inside if is_inside and is_its_own else others).append((event.start_ns(), event.end_ns()))
        found.append(row(span, inside, others))
    return found


def row(span: DeviceSpan, kernels: list[tuple[int, int]], others: list[tuple[int, int]]) -> Row:
    """A span beside the beginning and end of each of its kernels, and of the others."""
    span_ns = span.end_ns - span.start_ns
    first_ns, last_ns = min((begin for begin, _ in kernels), default=0), max((end for _, end in kernels), default=0)
    return Row(
        name=span.name,
        module=str(span.args.get("module", "")),
        span_ns=span_ns,
        kernels=len(kernels),
        kernels_ns=last_ns - first_ns,
        busy_ns=covered_ns(kernels, first_ns, last_ns),
        room_ns=covered_ns(others, last_ns - span_ns, first_ns) if span.name in COLLECTIVES else 0,
        error_ns=span.error_ns,
    )


def covered_ns(kernels: list[tuple[int, int]], begin_ns: int, end_ns: int) -> int:
    """How long at least one of them ran between two moments."""
    total_ns = 0
    for start, end in sorted(kernels):
        total_ns += max(0, min(end, end_ns) - max(start, begin_ns))
        begin_ns = max(begin_ns, end)
    return total_ns


def measure(rank: int, ranks: int, out: str) -> None:
    """One rank's part; rank 0 writes what it measured."""
    torch.cuda.set_device(rank)
    store = f"file://{out}.store"
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
    )
    rltrace.start(f"{out}.recording-{rank}")
    written: list[DeviceSpan] = []
    pairs = MarkedPairs(written)
    name_hooks(PatchSet("cuda_time", spans.current(), CudaTime.supports), pairs, of_layers=True)  # type: ignore[arg-type]
    work = Work(ranks, pairs)
    with torch.no_grad():
        work.model(work.x)  # before its first forward nothing can be gathered
    for _ in range(2):
        work.step()
        work.copy()
    profiled(work.step)  # the profiler's own first time
    events = profiled(lambda: work.step(are_wanted=True))
    of_step = rows((span for span in written if span.name != "gpu.anchor"), events)
    written.clear()
    events = profiled(lambda: work.copy(are_wanted=True))
    of_copy = rows((span for span in written if span.name != "gpu.anchor"), events)
    if rank == 0:
        said = {"rows": [asdict(row) for row in of_step + of_copy], "missed": asdict(pairs.times.missed)}
        Path(out).write_text(json.dumps(said))
    rltrace.stop()
    dist.destroy_process_group()


def main(ranks: str, out: str) -> None:
    """All ranks."""
    torch.multiprocessing.spawn(measure, args=(int(ranks), out), nprocs=int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])

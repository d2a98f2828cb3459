"""What the hooks on FSDP2 cost where a program works between them: `python tests/bench/cold_hooks.py [--steps N]`.

A loop over hooks finds all of them in the processor's caches. In a training step, a layer runs between two of them, and
leaves nothing there. So three processes train the same model of 28 checkpointed layers, each larger than a core's
caches, on a gloo world of one: without rltrace, with it, and with RLTRACE_TIME_HOOKS=1. They take turns, one step each,
and what a step takes is the thread's CPU time. A GPU's hooks run too: a device whose events fire as they are recorded,
and whose memory never changes, stands in for the GPU.

Prints what the hooks add to a step, by the difference of neighbouring steps, and what each hook says that it takes. In
the third process a timed hook that does nothing is called in front of each layer. There hooks are timed by the thread's
CPU time too, which leaves out what else the machine does, and takes longer to read than the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
from traced_runs import traced_environment

from rltrace.analysis import summarize
from rltrace.analysis.hooks import HookFigures
from rltrace.read.recording import Recording
from rltrace.record import manifest

WARM_STEPS = 5
"""Before what is compared: in the first ones, caches of torch's and of ours fill."""

NOTHING = "nothing"
"""The instrumentation of a timed hook that does nothing: what it says is what the timing takes."""

TRAINING = """
import sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS, LAYERS, MICRO_BATCHES = 320, 16, 28, 2

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (5, 64)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.second_norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x) + 0  # no view: FSDP2 warns of them

torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
said = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32)}
model = Model()
for layer in model.layers:
    fully_shard(layer, **said)
model = fully_shard(model, **said)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
if "timed_nothing" in globals() and timed_nothing is not count_nothing:
    hook_nothing(model)
tokens = torch.arange(TOKENS).reshape(1, TOKENS)

for line in sys.stdin:
    begin_ns = time.thread_time_ns()
    for _ in range(MICRO_BATCHES):
        model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    spent_ns = time.thread_time_ns() - begin_ns
    print(spent_ns, flush=True)
"""

ON_A_GPU = """
import os, time
from types import SimpleNamespace
from rltrace.hooks import hook
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.host.nvml import Memory
from rltrace.instrument.memory import cuda_memory
from rltrace.instrument.memory.cuda_ledger import CudaLedger, Reserved
from rltrace.instrument.memory.turns import Turns
from rltrace.instrument.memory.work import WORK
from rltrace.instrument.torch import cuda_time
from rltrace.record import spans

class Device:
    def new_event(self):
        return [0]
    def is_capturing(self):
        return False
    def record(self, event):
        event[0] = time.monotonic_ns()
        return 1
    record_idle = record
    def has_fired(self, event):
        return True
    def elapsed_ms(self, earlier, later):
        return (later[0] - earlier[0]) / 1e6

class Pairs(cuda_time.CudaPairs):
    def _open(self):
        self.measure(Device())
        return self._times

class Gpu:
    uuid, calls = "GPU-1", 0
    def card(self):
        return Memory(10 << 30, 1 << 29, 60 << 30)
    def held(self):
        return {os.getpid(): 10 << 30}
    def torch(self):
        self.calls += 1
        allocated = {key: dict(current=6 << 30, peak=6 << 30, allocated=self.calls, freed=0) for key in range(12)}
        return Reserved(9 << 30, allocated[0]["current"], self.calls, allocated[1]["peak"], 0)
    def pools(self, addresses):
        return Reserved(0, 0), Reserved(0, 0)
    def pinned_bytes(self):
        return 0

patches = PatchSet("cuda_time", spans.current(), cuda_time.CudaTime.supports)
cuda_time.name_hooks(patches, Pairs(), of_layers=False)
ledger = CudaLedger(Gpu)
cuda_memory.name_hooks(PatchSet("cuda_memory", spans.current()), ledger, Turns(ledger, WORK))
hook.clock = SimpleNamespace(now_ns=time.thread_time_ns)
nothing = Hook("nothing", "nothing:at_all", (), spans.current())
nothing.report("installed")
def count_nothing(*_):
    pass
timed_nothing = nothing.timed(count_nothing)
def hook_nothing(model):
    def before(module, args):
        nothing.row.fired()
        timed_nothing(module, args)
    for layer in model.layers:
        layer.register_forward_pre_hook(before)
"""


class Arm(NamedTuple):
    """A training process, which takes a step when it is told to."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, folder: Path, *, traced: bool, **environment: str) -> Arm:
        """Start it, with the hooks of a host with a GPU if it is traced."""
        folder.mkdir()
        program = folder / "training.py"
        program.write_text((ON_A_GPU if traced else "") + TRAINING)
        bare = {**os.environ, "OMP_NUM_THREADS": "1"}
        if traced:
            manifest.create(folder / "recording", owner=None, command=[], config=None)
        said = traced_environment(folder / "recording", **environment) if traced else bare
        return cls(
            subprocess.Popen(
                [sys.executable, str(program), str(folder / "store")],
                env=said,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def step(self) -> int:
        """Take a step; return the nanoseconds of CPU that it took."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> None:
        """Let it exit."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def interleaved(arms: dict[str, Arm], steps: int) -> dict[str, list[int]]:
    """Let the arms take steps in turn, each time from another one on."""
    taken: dict[str, list[int]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(WARM_STEPS + steps):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken[name].append(arms[name].step())
    return {name: of_one[WARM_STEPS:] for name, of_one in taken.items()}


def added_us(with_hooks: list[int], without: list[int]) -> tuple[float, float]:
    """Return the microseconds that hooks add to a step, and the standard error: of pairs, without the outer tenths."""
    pairs = sorted((one - other) / 1e3 for one, other in zip(with_hooks, without, strict=True))
    kept = pairs[len(pairs) // 10 : len(pairs) - len(pairs) // 10]
    return statistics.mean(kept), statistics.stdev(kept) / len(kept) ** 0.5


class Cost(NamedTuple):
    """Of a hook, by its own account."""

    instrumentation: str
    target: str
    calls_a_step: float
    us_a_call: float

    @property
    def us_a_step(self) -> float:
        return self.calls_a_step * self.us_a_call


def cost_of(hook: HookFigures, steps: int) -> Cost:
    """Return what a timed hook says of itself."""
    target = hook.target.rpartition("_fully_shard.")[2]
    return Cost(hook.instrumentation, target, hook.fired / steps, (hook.seconds or 0) * 1e6 / hook.fired)


def show(taken: dict[str, list[int]], hooks: list[HookFigures], steps: int) -> None:
    """Print what hooks add, and what each of them says."""
    bare_us = statistics.median(taken["bare"]) / 1e3
    costs = [cost_of(hook, steps) for hook in hooks if hook.fired >= steps and hook.seconds]
    (nothing,) = [cost for cost in costs if cost.instrumentation == NOTHING]
    costs.remove(nothing)
    calls, said_us = sum(cost.calls_a_step for cost in costs), sum(cost.us_a_step for cost in costs)
    print(f"a step without hooks: {bare_us / 1e3:.1f} ms of CPU")
    for name in ("on", "timed"):
        added, error = added_us(taken[name], taken["bare"])
        print(f"  {name}: {added:,.0f} ± {error:,.0f} µs a step more, {added / bare_us:.2%}")
    print(f"  by RLTRACE_TIME_HOOKS: {said_us:,.0f} µs a step for {calls:.0f} calls that are counted")
    print(f"  a timed hook that does nothing: {nothing.us_a_call:.1f} µs a call")
    print("\n| hook | calls a step | µs a call | µs a step |\n|---|---|---|---|")
    for cost in sorted(costs, key=lambda cost: -cost.us_a_step):
        figures = f"{cost.calls_a_step:.0f} | {cost.us_a_call:.1f} | {cost.us_a_step:,.0f}"
        print(f"| {cost.instrumentation} `{cost.target}` | {figures} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        arms = {
            "bare": Arm.start(Path(folder) / "bare", traced=False),
            "on": Arm.start(Path(folder) / "on", traced=True),
            "timed": Arm.start(Path(folder) / "timed", traced=True, RLTRACE_TIME_HOOKS="1"),
        }
        try:
            taken = interleaved(arms, steps)
        finally:
            for arm in arms.values():
                arm.end()
        show(taken, summarize(Recording.open(Path(folder) / "timed" / "recording")).hooks, WARM_STEPS + steps)


if __name__ == "__main__":
    main()

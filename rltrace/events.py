"""The words of rltrace: what a Recording consists of, and the names that every reader knows.

It imports the standard library and msgspec only, so that a laptop reads what a cluster wrote.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from rltrace.dependencies import msgspec

Args = dict[str, Any]

VERSION = 3
"""Version of the Recording's format; a reader refuses a higher one."""

MARKED_SINCE = 2
"""The format since which records say whether a hook made a span; in older ones its name is all that tells."""

AUTOMATIC = 0
"""Before the record of a span that a hook made; the first element of no other record is this number."""


class Span(msgspec.Struct, gc=False):
    """A named interval `[start_ns, end_ns)` on one track of a process."""

    name: str
    thread: int
    """Native thread id."""
    task: int
    """Identity of the asyncio task, or of another lane such as a request; 0 is the thread itself."""
    start_ns: int
    end_ns: int | None
    """When it ended; None if it was still open at the last event of its process."""
    args: Args
    """The arguments of the beginning, overridden by those of the end."""
    flows_out: tuple[str, ...] = ()
    """Keys of the arrows that leave here."""
    flows_in: tuple[str, ...] = ()
    """Keys of the arrows that arrive here."""
    lane: int | None = 0
    """Row among the spans of its thread and task: on one row, spans nest. It is above 0 for a span that overlaps
    another without nesting, as spans of interleaved generators do. None for a span that was recorded afterwards with
    its own times, or that another thread has ended: it may overlap anything."""
    is_automatic: bool = False
    """Whether a hook of ours made it, and not the program itself."""

    @property
    def seconds(self) -> float:
        """Length in seconds; 0 while open."""
        return 0.0 if self.end_ns is None else (self.end_ns - self.start_ns) / 1e9

    @property
    def is_phase(self) -> bool:
        """Whether this span partitions its rank's step."""
        return self.name in PHASES or self.args.get("phase") is True

    @property
    def is_inferred(self) -> bool:
        """Whether a reader made this step or phase, of what ran: nobody marked it."""
        return self.is_automatic and self.args.get("inferred") is True


class Counter(msgspec.Struct):
    """A sampled value; the unit is the end of its name (`allocated_bytes`)."""

    name: str
    thread: int
    ts_ns: int
    value: float


STARTUP_PHASES = (
    "actor.build",
    "actor.shard",
    "actor.broadcast",
    "actor.draw",
    "ref.build",
    "ref.shard",
    "ref.broadcast",
    "ref.draw",
    "critic.build",
    "critic.shard",
    "rollout.load",
    "rollout.profile",
    "rollout.reserve_kv",
    "rollout.capture",
)
"""Phases before the first step, in the order in which they happen."""

STEP_PHASES = (
    "rollout.wake_weights",
    "weight_sync",
    "rollout.wake_kv_cache",
    "rollout.generate",
    "rollout.sleep",
    "reward",
    "advantage",
    "actor.old_log_prob",
    "ref.log_prob",
    "critic.values",
    "critic.update",
    "actor.update",
)
"""The phases of a step, in the order in which they happen."""

INFERENCES = frozenset({"actor.old_log_prob", "ref.log_prob", "critic.values"})
"""Phases in which a trainer computes a model without a backward; what comes and goes in them is of its activations."""

PHASES = frozenset(STARTUP_PHASES + STEP_PHASES)
"""A hook's span with one of these names is a phase."""

DRIVER_PHASES = frozenset({"reward", "advantage"})
"""Phases of the driver; on the ranks this time is `WAIT_DRIVER`."""

STEP = "step"
"""A step; its argument `step` is its number."""
BRIEF = "brief"
"""Argument of a step that was not to be recorded in full."""
DETAIL = "recording.detail"
"""From here on a process whose loop marks no steps records everything, or not: `full`."""
REWARD_MEAN, TOKENS, TOKENS_PER_SECOND = "reward_mean", "tokens", "tokens_per_second"
STEP_FIGURES = (REWARD_MEAN, TOKENS, TOKENS_PER_SECOND)
"""Counters, or arguments of the `step` span, that say how a step went."""
WAIT_DRIVER = "wait.driver"
TRAJECTORIES = ("agent_loop.trajectory", "trajectory")
"""One trajectory, from its prompt to its reward: as hooks call it, and as programs do. The argument `trajectory` is its
id, `prompt` what its samples have in common."""
TURN = "turn"
"""One turn of a trajectory, where the program says so; elsewhere each of its requests is one."""
TOOLS = ("agent_loop.tool_call", "tool.call", "tool", "environment.step", "env.step")
"""A call of a tool or an environment, by hooks and in programs; the argument `tool` says which."""
AGENT_REQUEST, SERVER_REQUEST, REQUEST = "agent_loop.request", "server.request", "rollout.request"
"""One request as an agent loop waits for it, as a server answers it, and from an engine's queue to its last token."""
ENGINE_STEP = "engine.step"
"""An engine's step: it computes some requests by one token or more, while others wait."""
COLLECTION = "python.gc"
"""Python collects garbage: no thread of the process runs Python meanwhile."""
RAY_CALL = "ray.call"
"""A method of an actor, or a task, where it runs; `method` says which."""
RAY_SUBMIT = "ray.submit"
"""The same where it is called."""


def asked_ids(engine_id: str) -> tuple[str, str]:
    """Return the ids under which a server may have asked for an engine's request: newer vLLM puts `-` and a random text
    behind the server's."""
    return engine_id, engine_id.rpartition("-")[0] or engine_id


def prompt_of(engine_id: str) -> str | None:
    """Return what the samples of one prompt have in common, if an engine's id says so: vLLM counts them, `5_7-a6b8`."""
    sample, _, prompt = engine_id.partition("_")
    return prompt if sample.isdecimal() and prompt else None


FORWARD, BACKWARD, OPTIMIZER_STEP = "model.forward", "autograd.backward", "optimizer.step"
"""A forward of a whole model, called by the program and not by another module; a backward; a step of an optimizer."""
GENERATE = "model.generate"
"""A call that generates: of transformers, or of an engine in the program's process; `by` says whose."""
LOAD_WEIGHTS = "model.load_weights"
"""Weights are copied into a model, or into an engine in the program's process."""
HOST_WORK = "host.work"
"""Processor time of a process between two of these, in front of what it waited there."""

INPUTS, LOG_PROBS, LOSS = "micro_batch.inputs", "micro_batch.log_probs", "micro_batch.loss"
"""Work around a model's forward: its inputs; log-probs of its logits, often with entropy; and the loss computed from
these."""

MEMORY_EDGE = "memory.edge"
"""A process measures what it owns, and the kernel's totals of all processes on its device, at a phase boundary; its
length is its cost."""


class Turn(str, Enum):
    """A place between phase boundaries where memory turns."""

    FORWARD_END = "forward.end"
    BACKWARD_BEGIN = "backward.begin"
    BACKWARD_END = "backward.end"
    OPTIMIZER_BEGIN = "optimizer.begin"
    OPTIMIZER_END = "optimizer.end"
    ZERO_GRAD = "zero_grad"
    EMPTY_CACHE = "empty_cache"
    MOVED = "module.moved"
    BEAT = "beat"
    """Anywhere: what is used has changed."""


SLEEP = "rollout.sleep"
WAKE_UPS = ("rollout.wake_weights", "rollout.wake_kv_cache")
MAP, UNMAP = "cumem.map", "cumem.unmap"
MEMORY_MOVES = frozenset({SLEEP, *WAKE_UPS, MAP, UNMAP})
"""Sleep and wake-up: the phases of a rank, and the moves of memory that its engine makes inside them."""

OUT_OF_MEMORY = "memory.out_of_memory"
"""A process of a device asked for more memory than there was; its arguments say how much."""

DEVICE_TIME = "gpu."
"""Prefix of a span that was timed on a GPU's stream: `gpu.fsdp.forward` is what `fsdp.forward` launched."""
GPU_TIME = "GPU time"
"""What a process reports as unavailable, with the reasons, if some of a GPU's work was not timed."""
DEVICE_SPAN = "device_span"
"""Such a span, in the costs by kind of event."""

INFERRED_FROM = frozenset(
    {GENERATE, FORWARD, BACKWARD, OPTIMIZER_STEP, f"{DEVICE_TIME}{OPTIMIZER_STEP}", LOAD_WEIGHTS, HOST_WORK}
)
"""What the steps and phases of a loop that marks none are inferred from."""

KERNEL, OPERATOR = "kernel.", "op."
"""Prefixes of the names that torch.profiler gives to what ran on a GPU, and to what the host called."""

KERNELS_KEPT = "profiler.kernels"
"""Span in which every operator and kernel was recorded; its arguments say how many, and how far off their times are."""

KERNELS_WRITTEN = "profiler.write_kernels"
"""A process writes the operators and kernels of a step; its length is its cost."""

ALLOCATIONS = "allocations."
"""Prefix of an owner's counter that has every allocation: `allocations.actor.params_bytes` is no sample."""

ALLOCATIONS_RESERVED = "allocations.reserved_bytes"
"""Counter of what the allocators have from the driver, handed out or not, while every allocation is kept."""

ALLOCATIONS_KEPT = "memory.allocations"
"""Span in which every allocation was kept; its arguments say how far off their times are, and what was lost."""

ALLOCATIONS_WRITTEN = "memory.write_allocations"
"""A process writes what it has kept, which takes seconds for a million entries; its length is its cost."""

NO_GPU = "this process uses no GPU"
"""Why a process that uses no GPU keeps none."""


NO_TORCH = "this process had not imported torch"
"""Why a process that imports no torch has no kernels."""


def allocations_of(step: int) -> str:
    """Return what a process reports as unavailable, with the reason, if it kept none of a chosen step."""
    return f"allocations of step {step}"


def kernels_of(step: int) -> str:
    """Return what a process reports as unavailable, with the reason, if it recorded no kernels of a chosen step."""
    return f"kernels of step {step}"


EMPTY_CACHE = "allocator.empty_cache"
"""Torch's allocator gives back what it keeps."""
STATE_DICT = "actor.state_dict"
"""The actor's parameters get the names that they have in a checkpoint."""

WEIGHT_SYNC_STAGES = (
    "weight_sync.merge",
    "weight_sync.gather",
    "weight_sync.pack",
    "weight_sync.send",
    "weight_sync.wait",
    "weight_sync.map",
    "weight_sync.load",
    "weight_sync.verify",
    "weight_sync.reset_cache",
)
"""Stages of one bucket, in the order in which its bytes pass them; adapters are merged before it, and behind the last
one the engine forgets the prefixes that it cached with the old weights."""

STAGES_INSIDE = (EMPTY_CACHE, STATE_DICT)
"""What is a stage inside of a weight sync, and takes place at other times too."""

SYNC_STAGES = (*STAGES_INSIDE, *WEIGHT_SYNC_STAGES)
"""All that a weight sync is divided into."""

ENGINE_STAGES = ("weight_sync.map", "weight_sync.load")
"""Stages of the receiver. Both ends verify; the others are the sender's."""


def wake_up_of(tags: Iterable[str] | None) -> str:
    """Return the phase in which an engine's pools wake up; without tags it is all of them, which counts as weights."""
    return WAKE_UPS[1] if list(tags or ()) == ["kv_cache"] else WAKE_UPS[0]


def not_applicable(device_type: str, ranks: int, *, draws: bool = False) -> dict[str, str]:
    """Return names whose bytes do not really move in such a run, each with the reason.

    Args:
        device_type: "cpu" or "cuda".
        ranks: Number of ranks of the run.
        draws: Whether random weights were drawn in place.
    """
    reasons: dict[str, str] = {}
    if device_type == "cpu":
        no_copy = "on a CPU, host and device share one memory"
        reasons |= {"offload.h2d": no_copy, "offload.d2h": no_copy}
        reasons["rollout.capture"] = "there are no CUDA graphs on a CPU"
        one_draws = "on a CPU rank 0 draws random weights and broadcasts them"
        reasons |= {"actor.draw": one_draws, "ref.draw": one_draws}
    if draws:
        nobody_sends = "every rank draws its own random weights"
        reasons |= {"actor.broadcast": nobody_sends, "ref.broadcast": nobody_sends}
    if ranks == 1:
        alone = "a single rank exchanges no shards"
        reasons |= {"fsdp.all_gather": alone, "fsdp.reduce_scatter": alone}
    return reasons


REWARD_MODELS = ("ForSequenceClassification", "Reward")
"""A class of models that score has one of these in its name."""

OPENTELEMETRY = "otel."
"""Prefix of a span that the program made through the OpenTelemetry API: `otel.llm_request` is its `llm_request`."""

CALLS_BY_CHOICE = ("model.", "dist.", "ddp.", "actor.offload", "actor.onload", "engine.end", OPENTELEMETRY)
"""Beginnings of the names of calls, most of them into libraries, that a program makes or does without: nobody misses
those that it never makes."""

UNATTRIBUTED = "unattributed"
"""The owner of what nobody has named."""

USED = "used_bytes"
"""The counter of a device's total, as a process of the run reads it. Totals are no sum: who read last is right."""

OWNERS = (
    "actor.params",
    "actor.grads",
    "actor.optimizer",
    "actor.activations",
    "ref.params",
    "critic.params",
    "critic.grads",
    "critic.optimizer",
    "critic.activations",
    "reward.params",
    "weight_sync.gather",
    "weight_sync.bucket",
    "rollout.weights",
    "rollout.kv_cache",
    "rollout.graphs",
    "rollout.activations",
    "allocator.cached",
    "cuda.context",
    "nccl",
    "library.kernels",
    "interpreter",
    "driver.reserved",
    UNATTRIBUTED,
    "unaccounted",
    "free",
)
"""Who can hold a byte of a device, in the order in which readers show them."""

OWNER_COLORS = {
    "actor.params": "#1d4ed8",
    "actor.grads": "#38bdf8",
    "actor.optimizer": "#6366f1",
    "actor.activations": "#a5f3fc",
    "ref.params": "#0d9488",
    "critic.params": "#4d7c0f",
    "critic.grads": "#a3e635",
    "critic.optimizer": "#65a30d",
    "critic.activations": "#d9f99d",
    "reward.params": "#7c3aed",
    "weight_sync.gather": "#db2777",
    "weight_sync.bucket": "#f472b6",
    "rollout.weights": "#ea580c",
    "rollout.kv_cache": "#fbbf24",
    "rollout.graphs": "#92400e",
    "rollout.activations": "#fdba74",
    "allocator.cached": "#cbd5e1",
    "cuda.context": "#64748b",
    "nccl": "#475569",
    "library.kernels": "#94a3b8",
    "interpreter": "#e2e8f0",
    "driver.reserved": "#334155",
    "unattributed": "#a855f7",
    "unaccounted": "#dc2626",
    "free": "#f8fafc",
}
"""One colour per owner, in every picture.

Blue learns, teal is the ref, lime the critic, violet rewards, pink moves, orange samples, grey is neither.
"""


SAMPLER = "sampler"
"""Role of the process that samples a host; it samples nothing but the counters below."""

GPU_CLOCK = "gpu.sm_clock_megahertz"
POWER_LIMITED, HEAT_LIMITED = "gpu.power_limited", "gpu.heat_limited"
"""1 while NVML says that power, or heat, holds a GPU's clock back; else 0."""

WAITED_FOR_PROCESSOR = "process.waited_for_processor_seconds"
"""How long a process's main thread has been ready to run and had no processor, since it began."""

SAMPLED = (
    "host.cpu_percent",
    "host.available_bytes",
    "process.cpu_percent",
    WAITED_FOR_PROCESSOR,
    "process.resident_bytes",
    "process.pss_bytes",
    "process.uss_bytes",
    "gpu.used_bytes",
    "gpu.reserved_bytes",
    "gpu.free_bytes",
    "gpu.process_bytes",
    "gpu.other_processes_bytes",
    "gpu.utilisation_percent",
    "gpu.memory_utilisation_percent",
    "gpu.power_watts",
    GPU_CLOCK,
    POWER_LIMITED,
    HEAT_LIMITED,
    "gpu.nvlink_sent_bytes_per_second",
    "gpu.nvlink_received_bytes_per_second",
    "gpu.pcie_sent_bytes_per_second",
    "gpu.pcie_received_bytes_per_second",
    "sampler.cpu_seconds",
)
"""What a sampler samples. A slash is followed by whose it is: a process's folder, or a GPU's uuid and then a
process's."""


def subject(name: str, *of: str) -> str:
    """Return the name of a counter of one process or GPU: `process.pss_bytes/host-12-34`."""
    return "/".join((name, *of))


def subjects(name: str) -> tuple[str, list[str]]:
    """Return what `subject` joined: the counter, and whose it is."""
    counter, *of = name.split("/")
    return counter, of


ALLOCATED_PEAK = "allocated_peak_bytes"
"""Counter of the most that torch's allocator has handed out of a GPU at once, by its own count, each time that this
changed."""


def owner_of_counter(name: str) -> str | None:
    """Return the owner whose bytes a counter samples: `actor.params_bytes` gives `actor.params`; None for another
    counter."""
    return _owner_before(name, "_bytes")


HOST_BYTES, PINNED_BYTES = "_host_bytes", "_pinned_bytes"
"""How counters of a GPU process's host memory end: all of an owner's bytes there, and the page-locked ones among them,
which a GPU reads and writes by itself. What is pinned and has no owner is `unattributed_pinned_bytes`."""


def owner_on_host(name: str) -> str | None:
    """Return the owner whose bytes in the host's memory a counter samples; None for another counter."""
    return _owner_before(name, HOST_BYTES)


def owner_of_pinned(name: str) -> str | None:
    """Return the owner whose pinned bytes a counter samples; None for another counter."""
    return _owner_before(name, PINNED_BYTES)


def pinned_of(owner: str) -> str:
    """Return what a process reports as unavailable, with the reason, if an owner's pinned bytes are unknown."""
    return f"pinned bytes of {owner}"


def is_of_bytes(name: str) -> bool:
    """Return whether a counter samples a number of bytes."""
    return subjects(name)[0].endswith("_bytes")


def _owner_before(name: str, ending: str) -> str | None:
    owner = name.removesuffix(ending)
    return owner if owner != name and owner in OWNERS else None


# ---- hooks ------------------------------------------------------------------------------------------------------

UNVERIFIED = "unverified"
"""The reason of a hook begins with this if it is installed, and has found another source than the one that was read."""

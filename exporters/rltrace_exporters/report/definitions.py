"""What the words of the report mean, in one sentence each: shown where the pointer or the keyboard is."""

from __future__ import annotations

PHASES = {
    "rollout.wake_weights": "The engine takes memory for its weights.",
    "weight_sync": "The actor's weights go to the engine, bucket by bucket.",
    "rollout.wake_kv_cache": "The engine takes memory for its KV cache.",
    "rollout.generate": "The engine generates.",
    "rollout.sleep": "The engine gives its memory back.",
    "reward": "Samples are scored.",
    "advantage": "The driver computes advantages of the rewards.",
    "actor.old_log_prob": "Log-probs of the samples by the model that learns, before the update.",
    "ref.log_prob": "Log-probs of the samples by the reference model.",
    "critic.values": "The critic values the samples (PPO).",
    "critic.update": "The critic learns (PPO).",
    "actor.update": "The actor learns: micro-batches, and the optimizer's steps.",
    "wait.driver": "The driver is in a phase of its own, and the rank is in none.",
    "start-up": "Before the rank's first phase: its processes start and import.",
    "unlabelled": "In no phase, but the rank computes.",
    "idle": "In no phase, and nothing computes.",
}

STAGES = {
    "allocator.empty_cache": "torch gives its cached memory back to the driver.",
    "weight_sync.gather": "Shards of parameters are gathered from all ranks.",
    "weight_sync.pack": "Parameters are copied into a bucket.",
    "weight_sync.send": "A bucket is handed to the engine.",
    "weight_sync.wait": "The sender waits until the engine has taken a bucket.",
    "weight_sync.map": "The engine maps the sender's memory.",
    "weight_sync.load": "The engine copies a bucket into its weights.",
    "weight_sync.verify": "Checksums of what arrived are compared with what was sent.",
    "in no stage": "The part of the sync in which no stage was open.",
}

OWNERS = {
    "actor.params": "Parameters of the model that learns.",
    "actor.grads": "Its gradients.",
    "actor.optimizer": "State of its optimizer.",
    "actor.activations": "What a training pass has allocated and nothing else owns.",
    "ref.params": "Parameters of the reference model.",
    "critic.params": "Parameters of the critic.",
    "critic.grads": "Gradients of the critic.",
    "critic.optimizer": "State of the critic's optimizer.",
    "critic.activations": "What a pass of the critic has allocated.",
    "reward.params": "Parameters of a reward model.",
    "weight_sync.gather": "Parameters gathered for the weight sync.",
    "weight_sync.bucket": "Buffers of the weight sync, counted at their sender.",
    "rollout.weights": "Weights of the engine, while awake.",
    "rollout.kv_cache": "KV cache of the engine, while awake.",
    "rollout.graphs": "CUDA graphs of the engine.",
    "rollout.activations": "What else the engine's allocator has handed out.",
    "allocator.cached": "Reserved by torch and not handed out.",
    "cuda.context": "CUDA's contexts and the kernels that they load.",
    "nccl": "Communicators of NCCL.",
    "library.kernels": "Kernels and scratch memory of libraries on a CPU.",
    "interpreter": "Memory of Python itself and its libraries.",
    "driver.reserved": "What the GPU's driver keeps for itself.",
    "unattributed": "Handed out by torch to nobody with a name.",
    "unaccounted": "Bytes of the device's total that no row explains.",
}

REQUESTS = {
    "agent loop": "In the agent loop, before the call that asks for tokens.",
    "to server": "From the agent loop's call until it begins in the server.",
    "server": "In the server, of whose engine nothing was recorded.",
    "server before engine": "In the server, until the request is in the engine's queue.",
    "engine waiting": "In the engine's queue, until the first step that computes it.",
    "engine running": "From the first step of the engine that computes it to its last token.",
    "engine": "In the engine; how long of that it waited was not recorded.",
    "server after engine": "From the last token until the server's call ends.",
    "from server": "Until the agent loop goes on.",
    "p50": "Half of them take no longer.",
    "p95": "95 % of them take no longer.",
    "longest": "The one that takes longest.",
    "trajectory": "A sample from its first turn to its last, tools included.",
    "turns of a trajectory": "Times that it asked an engine.",
    "tools of a trajectory": "All its calls of tools and environments, added up.",
    "request": "As the agent loop waits for it, else as the server answers it, else as the engine runs it.",
    "waiting in the engine": "In the engine's queue, until the first step that computes it.",
    "time to first token": "From the engine's queue on, until the step that made the first token was processed.",
    "tokens per second after it": "Of one request, from its first token on.",
    "running": "Requests that engines computed.",
    "waiting": "Requests that engines kept in their queues.",
    "KV cache in use": "The share of the KV cache that is taken, of the fullest engine.",
}

GPUS = {
    "timed work on streams": "Any work that CUDA events timed: passes of models, the optimizer, collectives, copies. "
    "It contains waits for collectives.",
    "communicating": "In a collective, its wait for the slowest rank included.",
    "exposed, at least": "In a collective while the GPU surely computed nothing beside it.",
    "exposed, at most": "In a collective while the GPU may have computed nothing beside it.",
    "busy by NVML": "The mean of NVML's utilisation: the share of time in which any kernel ran.",
}

WORDS = {
    "a step": "The mean over the steady steps: those after the first that ended and were recorded.",
    "tokens per second": "Tokens of a step divided by its seconds.",
    "peak of the fullest card": "The most that anybody saw in use on any card, by the driver's own count.",
    "peak of memory": "The most that all owners together held.",
    "largest finding": "What costs the most seconds of a step; it may overlap with others.",
    "in no phase": "Time of a step in no phase: mark one there to see what it is.",
    "processes that died": "They ended without finishing their part of the Recording.",
    "headroom": "What is left of the card when most of it is in use.",
    "consistent phase boundaries": "Phase boundaries at which the samples of all processes of a card hold at once.",
    "unaccounted bytes": "Bytes of the device's total that no owner explains, at the worst consistent boundary.",
    "missed hooks": "Hooks that are installed and whose spans should be in this run, yet nothing called them.",
    "clock bound": "How far off a time of one host may be on the clock of the run.",
    "lost events": "Events that could not be written, or that were cut off when their process died.",
    "cost of tracing": "What recording took of the time of the process that pays most.",
    "cost of memory samples": "What looking at who holds the memory took of a step.",
    "confidence": "High: spans have these seconds, and the interval is above 0. Medium: one of the two. Low: neither.",
}

DEFINITIONS = {**PHASES, **STAGES, **OWNERS, **REQUESTS, **GPUS, **WORDS}
"""By the word as the page writes it."""


def definition(word: str) -> str:
    """Return what a word means; empty for one that is not ours."""
    return DEFINITIONS.get(word) or DEFINITIONS.get(word.rstrip("*"), "")

"""What the settings of a trainer say that its memory depends on."""

from __future__ import annotations

import msgspec

from rltrace.analysis.plan.shapes import ModelShape


class Trainer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's trainer: how it shards, in which types, and how much it takes at once."""

    model: ModelShape
    shards: int = 1
    """Ranks over which parameters are divided."""
    replicas: int = 1
    """Groups of ranks that hold the same shards (HSDP)."""
    is_gathered: bool = True
    """False: every rank has whole parameters and gradients, as without a wrapper or with DDP."""
    trained: int | None = None
    """Numbers of the adapters (LoRA), if they alone learn; the model's own have neither gradients nor states then."""
    param_bytes: int = 4
    """Of an element of the actor's shards."""
    compute_bytes: int = 2
    reduce_bytes: int = 4
    states: int = 2
    """Tensors of the optimizer for each parameter."""
    optimizer_bytes: int = 4
    optimizer_is_foreach: bool = False
    """True: AdamW's intermediate results are as large as the parameters."""
    recompute: bool = True
    """Activation checkpointing: a layer keeps its input only."""
    sequences: int = 1
    """Of one micro-batch of the update."""
    log_prob_sequences: int = 1
    """Of one micro-batch of log-probs."""
    update_sequences: int | None = None
    """Of one optimizer step; None if many micro-batches make one."""
    rollout_sequences: int | None = None
    """Of all log-probs of a step; None if they take many micro-batches."""
    sequence_tokens: int = 1
    has_ref: bool = True
    ref_offload: bool = False
    ref_bytes: int = 2
    root_reshards: bool = False
    """False: what lies outside of the layers stays gathered after a forward (FSDP2's default)."""
    wraps_embedding: bool = False
    """True: embedding and head are gathered by themselves, if they are two."""
    offload: bool = False
    """Parameters and optimizer states lie in host memory while the engine is awake."""
    has_fp32_logits: bool = True
    """False: log-probs are computed row by row, and nothing of the whole vocabulary is made in fp32."""
    is_expandable: bool = False
    """Torch's allocator runs with `expandable_segments`."""

    def micro_batch(self, with_grad: bool) -> int:
        """Return how many sequences are taken at once."""
        return self.sequences if with_grad else self.log_prob_sequences

    def micro_batches(self, with_grad: bool) -> int:
        """Return how many there are, up to 2: each later one repeats the second, which adds to gradients."""
        whole = self.update_sequences if with_grad else self.rollout_sequences
        return 2 if whole is None else min(-(-whole // self.micro_batch(with_grad)), 2)

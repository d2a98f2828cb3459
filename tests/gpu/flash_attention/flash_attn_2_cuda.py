"""In place of the extension that flash-attn compiles for an hour: the same kernels as torch has built them.

verl's defaults need flash-attn: without padding (`use_remove_padding`), and of a critic's model in any case. Of its
wheel without an extension (FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE) all else is Python and Triton.

Source read: flash-attn 2.8.3, flash_attn_interface.py; torch 2.11, aten/src/ATen/native/transformers/cuda/attention.cu.
"""

import torch

FORWARD, BACKWARD = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward


def fwd(q, k, v, _out, alibi_slopes, dropout, scale, causal, left, right, _softcap, _return_softmax, _generator):
    """Of sequences that all are as long, (B, S, H, D)."""
    return forward(q, k, v, (None, None, q.size(1), k.size(1)), dropout, causal, scale, left, right)


def varlen_fwd(
    q, k, v, _out, starts_q, starts_k, _used, _padding, _blocks, alibi_slopes, most_q, most_k, dropout, scale, _zero,
    causal, left, right, _softcap, _return_softmax, _generator,
):  # fmt: skip
    """Of sequences one behind the other, (T, H, D)."""
    return forward(q, k, v, (starts_q, starts_k, most_q, most_k), dropout, causal, scale, left, right)


def bwd(dout, q, k, v, out, lse, dq, dk, dv, _alibi, dropout, scale, causal, left, right, *rest):
    """The gradients, in the tensors that are given for them."""
    lengths = None, None, q.size(1), k.size(1)
    return backward(dout, q, k, v, out, lse, (dq, dk, dv), lengths, dropout, causal, rest[-1], scale, left, right)


def varlen_bwd(
    dout, q, k, v, out, lse, dq, dk, dv, starts_q, starts_k, _alibi, most_q, most_k, dropout, scale, _zero, causal,
    left, right, *rest,
):  # fmt: skip
    """The same of sequences one behind the other."""
    lengths = starts_q, starts_k, most_q, most_k
    return backward(dout, q, k, v, out, lse, (dq, dk, dv), lengths, dropout, causal, rest[-1], scale, left, right)


def forward(q, k, v, lengths, dropout, causal, scale, left, right):
    """torch's, and what flash-attn returns of it."""
    window = {"window_size_left": left, "window_size_right": right}
    out, lse, rng_state, *_ = FORWARD(q, k, v, *lengths, dropout, causal, False, scale=scale, **window)
    return out, lse, q.new_empty(0), rng_state


def backward(dout, q, k, v, out, lse, into, lengths, dropout, causal, rng_state, scale, left, right):
    """torch's, into the tensors that are there."""
    window = {"window_size_left": left, "window_size_right": right}
    made = BACKWARD(
        dout, q, k, v, out, lse, *lengths, dropout, causal, rng_state, q.new_empty(0), scale=scale, **window
    )
    for given, computed in zip(into, made, strict=True):
        if given is not None:
            given.copy_(computed)
    return *into, torch.empty_like(lse)

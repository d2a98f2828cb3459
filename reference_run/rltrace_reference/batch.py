"""What passes between driver and workers: the samples of a step and what has been computed about them.

Shapes: B sequences, samples of one prompt adjacent; T tokens, prompt and response, padded on the right.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rltrace_reference.task import PAD


@dataclass(frozen=True)
class Batch:
    """Sequences with their log-probs; position t of a log-prob is that of token t given those before it."""

    tokens_BT: Tensor
    """int64."""
    response_mask_BT: Tensor
    """bool: True where the engine said the token, EOS included."""
    engine_log_probs_BT: Tensor
    """float32, as the engine sampled; 0 outside the response."""
    old_log_probs_BT: Tensor | None = None
    """float32, by the actor before the update."""
    ref_log_probs_BT: Tensor | None = None
    """float32, by the ref model."""
    advantages_B: Tensor | None = None
    """float32, one per sequence."""

    def __len__(self) -> int:
        return len(self.tokens_BT)

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return int(self.response_mask_BT.sum())

    def rows(self, index: Tensor | slice) -> Batch:
        """Return the sequences at these positions."""
        return replace(self, **{name: value[index] for name, value in self._present().items()})

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on a device."""
        return replace(self, **{name: value.to(device) for name, value in self._present().items()})

    def split(self, parts: int) -> list[Batch]:
        """Return equal consecutive parts, one per rank."""
        size = len(self) // parts
        return [self.rows(slice(i * size, (i + 1) * size)) for i in range(parts)]

    def _present(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


def concatenate(parts: list[Batch]) -> Batch:
    """Return one batch of the ranks' parts, in rank order."""
    names = parts[0]._present()
    return Batch(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def from_responses(
    prompts: list[list[int]], responses: list[list[int]], log_probs: list[list[float]], max_tokens: int
) -> Batch:
    """Make a padded batch of the engine's responses.

    Args:
        prompts: One per response.
        responses: Tokens of each response.
        log_probs: Log-prob of each token of each response.
        max_tokens: Most tokens of a response; with the prompt it makes T, so that every rank's T is the same.
    """
    length = max(map(len, prompts)) + max_tokens
    batch = Batch(
        tokens_BT=torch.full((len(responses), length), PAD),
        response_mask_BT=torch.zeros(len(responses), length, dtype=torch.bool),
        engine_log_probs_BT=torch.zeros(len(responses), length),
    )
    for row, (prompt, response, said) in enumerate(zip(prompts, responses, log_probs, strict=True)):
        start, end = len(prompt), len(prompt) + len(response)
        batch.tokens_BT[row, :end] = torch.tensor(prompt + response)
        batch.response_mask_BT[row, start:end] = True
        batch.engine_log_probs_BT[row, start:end] = torch.tensor(said)
    return batch

"""SGLang's speculation: how many tokens a batch guessed ahead, and how many of them the model accepted.

Source read: SGLang 0.4.6 to 0.5.23. Each request counts for itself how often its guesses were verified, from 0.5.9 on
also how many of them were right; up to then that is told by its tokens, of which each verification adds one more than
it accepts. Some releases count while the batch runs, and others when its result is processed.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from rltrace.hooks.arguments import attributes

READ = (
    *attributes("sglang.srt.managers.scheduler:Scheduler", "spec_algorithm", "server_args"),
    *attributes("sglang.srt.managers.schedule_batch:Req", "spec_verify_ct", "output_ids"),
)
RIGHT = ("spec_num_correct_drafts", "spec_accepted_tokens")
"""The names that a request's count of right guesses has had."""


class Counted(NamedTuple):
    """What a request had counted when it was last looked at."""

    verifications: int
    right: int


class Guesses:
    """What became of the guesses of each batch of one scheduler."""

    def __init__(self) -> None:
        self._counted: weakref.WeakKeyDictionary[Any, Counted] = weakref.WeakKeyDictionary()

    def of(self, scheduler: Any, batch: Any, result: Any) -> dict[str, int]:
        """Return what became of the guesses of a batch that has just been processed; nothing if it verified none."""
        if scheduler.spec_algorithm.is_none():
            return {}
        verifications = right = 0
        for request in batch.reqs:
            now = counted(request)
            before = self._counted.get(request, now)  # it is met in the batch that computes its prompt
            self._counted[request] = now
            verifications += now.verifications - before.verifications
            right += now.right - before.right
        at_once = guessed_at_once(scheduler, result)
        if verifications <= 0 or at_once is None:
            return {}
        return {"drafted": verifications * at_once, "accepted": max(right, 0)}


def counted(request: Any) -> Counted:
    """Return what a request has counted; the first token is of its prompt's batch."""
    verifications = request.spec_verify_ct
    for name in RIGHT:
        if hasattr(request, name):
            return Counted(verifications, getattr(request, name))
    return Counted(verifications, len(request.output_ids) - 1 - verifications)


def guessed_at_once(scheduler: Any, result: Any) -> int | None:
    """Return how many tokens are guessed for one verification: of all that it is of, some are the model's own.

    The result says it where the number may change from batch to batch. It is as SGLang counts in what it says of an
    answer.
    """
    width = getattr(result, "speculative_num_draft_tokens", None)
    if width is None:
        width = scheduler.server_args.speculative_num_draft_tokens
    return None if width is None else width - getattr(result, "num_non_draft_tokens_per_req", 1)

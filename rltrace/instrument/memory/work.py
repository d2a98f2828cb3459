"""Knows whose model a process works on."""

from __future__ import annotations

from typing import Any

from rltrace.record import spans

ACTOR, REF, CRITIC, REWARD = "actor", "ref", "critic", "reward"
"""A model belongs to one of these. The names of the owners of its bytes begin with that word."""


class Work:
    """Whose model is made or computed now. A framework's hook says it, and whoever was given this object reads it.

    Its readers meet models and optimizers, look at passes, and name allocations.
    """

    def __init__(self) -> None:
        self.subject: str | None = None
        """Whose model it is; None if nobody has said so."""

    def begin(self, subject: str | None) -> str | None:
        """Begin to work on somebody's model; return what `end` needs."""
        before, self.subject = self.subject, subject
        return before

    def end(self, before: str | None) -> None:
        """Go back to what the process worked on before."""
        self.subject = before

    def owner_of(self, what: str) -> str:
        """Return the owner of what is allocated now: `activations` of a forward, or `optimizer` state."""
        return f"{trained_subject(self.subject)}.{what}"


def begin_startup(part: str) -> Any:
    """Open the phase of a part of the start-up, as `build` or `shard`, of the model that is worked on.

    Nobody's has none, and neither has one that rewards.
    """
    return None if WORK.subject in (None, REWARD) else spans.automatic_span(f"{WORK.subject}.{part}").__enter__()


def trained_subject(subject: str | None) -> str:
    """Return whose rows a trained model's are: what would be the ref's or a reward model's is the actor's."""
    return ACTOR if subject in (None, REF, REWARD) else str(subject)


def is_trained(subject: str | None) -> bool:
    """Return whether somebody's model is one that learns."""
    return trained_subject(subject) == subject


WORK = Work()
"""The work of this process."""

"""Whose model a process works on."""

from __future__ import annotations

ACTOR, REF, CRITIC, REWARD = "actor", "ref", "critic", "reward"
"""A model can belong to one of these; the owners of its bytes begin with that word."""


class Work:
    """Whose model is made or computed now: a framework's hook says it to those that were given this object.

    They are what meets models and optimizers, what looks at passes, and what names allocations.
    """

    def __init__(self) -> None:
        self.subject: str | None = None
        """None where nobody has said so."""

    def begin(self, subject: str | None) -> str | None:
        """Work for this one from here on; return what `end` needs."""
        before, self.subject = self.subject, subject
        return before

    def end(self, before: str | None) -> None:
        """Work for the one of before."""
        self.subject = before

    def owner_of(self, what: str) -> str:
        """Return the owner of what comes into being now: `activations` of a forward, or `optimizer`."""
        return f"{trained_subject(self.subject)}.{what}"


def trained_subject(subject: str | None) -> str:
    """Return who has the rows that only a trained model has: those of the ref, or a reward's, would be the actor's."""
    return ACTOR if subject in (None, REF, REWARD) else str(subject)


WORK = Work()
"""The work of this process."""

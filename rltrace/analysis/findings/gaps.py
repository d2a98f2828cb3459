"""Between which phases a step has time in no phase, what was open meanwhile, and how to mark it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import NamedTuple

from rltrace.analysis.findings.amounts import as_text
from rltrace.analysis.findings.finding import Setting
from rltrace.analysis.findings.run import Run
from rltrace.analysis.idle import STEADY_STEP, IdleGap

NAMED, MEANWHILE = 3, 2
"""How many gaps are named, and how many spans that were open in each."""

LEAST_SECONDS = 0.001
"""Shorter ones are not named."""

GENERATED = ("rollout.generate", "rollout.sleep")
LEARNS = ("advantage", "actor.old_log_prob", "ref.log_prob", "critic.values", "critic.update", "actor.update")
"""A sample is scored when it is generated, and before anything learns from it."""

SCORING = ("reward", "score", "scoring", "verif", "grade", "judge")
"""What the names of functions have in them that score samples."""

REWARD = Setting("your program", 'with rltrace.phase("reward"): around the reward function, so that it has its own row')
ANY = Setting("your program", 'with rltrace.phase("name"): around what runs there, so that it has its own row')


class Gap(NamedTuple):
    """Time of a step between two phases, a mean over the lanes."""

    after: str | None
    before: str | None
    seconds: float
    meanwhile: dict[str, float]
    """Seconds by the spans that were open, the longest first."""

    @property
    def words(self) -> str:
        """The phases around it, its length, and what was open."""
        longest = [*self.meanwhile.items()][:MEANWHILE]
        said = ", ".join(f"{name} {as_text(length)}" for name, length in longest if length >= LEAST_SECONDS)
        where = f"{self.after or 'step begins'} → {self.before or 'step ends'} {as_text(self.seconds)}"
        return where + (f" ({said})" if said else "")

    @property
    def may_be_reward(self) -> bool:
        """Whether samples may be scored in it."""
        is_named = any(word in name.lower() for name in self.meanwhile for word in SCORING)
        return is_named or (self.after in GENERATED and self.before in LEARNS)

    @property
    def mark(self) -> Setting:
        """How to mark what runs in it."""
        return REWARD if self.may_be_reward else ANY


def longest_gaps(run: Run, lanes: Collection[str], seconds_of: Callable[[IdleGap], float]) -> list[Gap]:
    """Return the longest gaps of a steady step.

    Args:
        run: The run.
        lanes: Names of the lanes that the mean is over.
        seconds_of: How much of a gap counts.
    """
    seconds: dict[tuple[str | None, str | None], float] = defaultdict(float)
    meanwhile: dict[tuple[str | None, str | None], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for gap in run.summary.idle:
        counted = seconds_of(gap)
        if gap.of != STEADY_STEP or gap.lane not in lanes or counted <= 0:
            continue
        key = gap.after, gap.before
        seconds[key] += counted / len(lanes)
        for who, spans in (("driver", gap.driver_seconds), ("own", gap.own_seconds)):
            for name, length in spans.items():
                meanwhile[key][f"{who} {name}"] += length / len(lanes)
    longest = sorted(seconds.items(), key=lambda item: -item[1])[:NAMED]
    return [
        Gap(*key, length, dict(sorted(meanwhile[key].items(), key=lambda item: -item[1])))
        for key, length in longest
        if length >= LEAST_SECONDS
    ]

"""Fragments of torch's allocator take room when an engine wakes: what emptying its cache cannot give back."""

from __future__ import annotations

from rltrace.analysis.findings.allocator_cache import IN_THE_WAY, has_wake_ups, in_the_way
from rltrace.analysis.findings.amounts import bytes_as_text
from rltrace.analysis.findings.finding import Finding, Setting, UnjudgeableError
from rltrace.analysis.findings.run import Run

NAME = "allocator_fragments"

SETTINGS = (
    Setting("PyTorch", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the trainer: only whole pages are kept"),
    Setting("your program", "nothing small that lives on allocated while large tensors come and go"),
)


def judge(run: Run) -> list[Finding]:
    """Say how much is cached where the cache has just been emptied."""
    if not has_wake_ups(run):
        raise UnjudgeableError("no engine's wake-up was recorded with what its GPU holds")
    found = [one for one in in_the_way(run) if one.was_emptied]
    if not found or found[0].share < IN_THE_WAY:
        return []
    worst = found[0]
    return [
        run.finding(
            NAME,
            f"Fragments keep {bytes_as_text(worst.bytes)} of {worst.device.lane}'s card while the engine wakes, though "
            "torch's cache was emptied",
            [
                f"{worst.phase} of step {worst.step}: {worst.share:.0%} of the card is in segments that hold something",
                f"so in {sum(one.share >= IN_THE_WAY for one in found)} of {len(found)} wake-ups after an emptying",
            ],
            size_bytes=worst.bytes,
            less_because="",
            ranks=[] if worst.device.rank is None else [worst.device.rank],
            phases=[worst.phase],
            about=(),
            settings=SETTINGS,
        )
    ]

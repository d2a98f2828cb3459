"""How each process went: what a healthy run does is no alarm, and what is missed is."""

from __future__ import annotations

from typing import Any

import pytest

from rltrace.analysis.fates import Circumstances, Fate, fate
from rltrace.analysis.processes import ProcessFigures

NOTHING = Circumstances(is_busy=False, is_first=False, uses_ray=False, parent_ended=False, run_ended_well=False)
IN_RAY = NOTHING._replace(uses_ray=True)
RAY_ENDED = IN_RAY._replace(run_ended_well=True)


def process(state: str, **known: Any) -> ProcessFigures:
    """A process that recorded nothing, unless told."""
    blank = dict.fromkeys(ProcessFigures.__struct_fields__)
    return ProcessFigures(**{**blank, "spans": 0, "samples": 0, "state": state, **known})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "around", "expected"),
    [
        (process("ended"), NOTHING, "fine"),
        (process("alive", spans=1), NOTHING._replace(is_busy=True), "fine"),
        (process("stopped", spans=1), NOTHING._replace(is_busy=True), "fine"),
        (process("gone", spans=1), NOTHING, "released"),
        (process("gone", spans=1), NOTHING._replace(is_busy=True), "in doubt"),
        (process("gone", spans=1), NOTHING._replace(is_first=True), "in doubt"),
        (process("died"), NOTHING, "silent"),
        (process("died"), IN_RAY, "released"),
        (process("died", killed_by="SIGKILL"), IN_RAY, "released"),
        (process("died", killed_by="SIGKILL"), NOTHING, "died"),
        (process("died", rank=0), IN_RAY, "died"),
        (process("died", samples=1), IN_RAY, "died"),
        (process("died", spans=1, killed_by="SIGTERM"), NOTHING._replace(parent_ended=True), "released"),
        (process("died", spans=1, killed_by="SIGTERM"), NOTHING._replace(parent_ended=True, is_busy=True), "died"),
        (process("died", spans=1, killed_by="SIGTERM", rank=0), NOTHING._replace(parent_ended=True), "died"),
        (process("died", spans=1, killed_by="SIGSEGV"), NOTHING._replace(parent_ended=True), "died"),
        (process("died", spans=1, killed_by="SIGKILL"), IN_RAY, "died"),
        (process("died", spans=1, killed_by="SIGKILL"), RAY_ENDED, "released"),
        (process("died", spans=1, killed_by="SIGKILL", ran_when_driver_left=True), RAY_ENDED, "released"),
        (process("died", spans=1, killed_by="SIGKILL", ran_when_driver_left=False), RAY_ENDED, "died"),
        (process("died", spans=1, killed_by="SIGKILL"), RAY_ENDED._replace(is_busy=True), "died"),
        (process("died", spans=1, killed_by="SIGSEGV"), RAY_ENDED, "died"),
        (process("died", spans=1, killed_by="SIGKILL"), NOTHING._replace(run_ended_well=True), "died"),
    ],
)
def test_fate(found: ProcessFigures, around: Circumstances, expected: Fate) -> None:
    """Ray stops idle workers, and a Pool its children; whoever was busy, crashed, or worked for a rank is missed."""
    assert fate(found, around) == expected

"""Whose settings a run has: those of the programs whose hooks are in it, in the releases that have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rltrace.analysis.findings.finding import Setting
from rltrace.analysis.hooks import HookFigures

EXAMPLE = "rltrace run"

INSTRUMENTATIONS = {"verl": "verl", "vLLM": "vllm", "TRL": "trl", "Ray": "ray", EXAMPLE: "reference"}
"""By program, whose hooks say that a run uses it; all but ours have the name of their package. Settings of others
(PyTorch, your program) fit every run."""


def programs_of(hooks: Iterable[HookFigures]) -> set[str]:
    """Return the programs whose hooks are installed in some process."""
    installed = {hook.instrumentation for hook in hooks if hook.processes.get("installed")}
    return {program for program, instrumentation in INSTRUMENTATIONS.items() if instrumentation in installed}


def applicable(settings: Iterable[Setting], programs: set[str], versions: Mapping[str, str]) -> list[Setting]:
    """Return the settings that a run of these programs has, in the versions that are installed."""
    return [
        setting
        for setting in settings
        if (setting.program not in INSTRUMENTATIONS or setting.program in programs)
        and has_setting(setting, versions.get(INSTRUMENTATIONS.get(setting.program, "")))
    ]


def has_setting(setting: Setting, version: str | None) -> bool:
    """Return whether a release has a setting; one of an unknown version may have it."""
    if version is None:
        return True
    release = _release(version)
    is_new_enough = setting.since is None or release >= _release(setting.since)
    return is_new_enough and (setting.until is None or release < _release(setting.until))


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])

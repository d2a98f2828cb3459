"""`--share`: the same page without what says whose run it was and where it ran.

The command line and the path go altogether; host and user names get numbers, wherever they stand. It works on the whole
page, so that no section has to think of it. Secrets were taken out when the run was recorded; here they are once more,
for what a program says of itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rltrace.record import redaction
from rltrace_exporters.report.values import RunValues

Value = TypeVar("Value")

LEAST_WORD = 4
"""Letters from which on a value of the command line counts as one that may say something about somebody."""

_HOME = re.compile(r"/(?:home|Users|users|root)/([^/\s:]+)")
_PATH = re.compile(r"(?<![\w.])(?:~|\.{1,3})?(?:/[\w.@+%=-]+){2,}/?")
"""A path with at least two parts."""
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\w|\.\d)")
"""An IPv4 address, as some clusters name their hosts."""

NOT_WORDS = frozenset({"color", "kind", "state"})
"""Fields that the page itself makes."""


class Redaction:
    """What to replace in every text, and by what."""

    def __init__(self, runs: Iterable[RunValues]) -> None:
        self._by_text: dict[str, str] = {}
        for values in runs:
            for text, instead in _said(values):
                self._by_text.setdefault(text, instead)
        hosts = sorted({host for values in runs for host in _hosts(values)})
        users = sorted({user for values in runs for user in _users(values)})
        for number, host in enumerate(hosts, 1):
            self._by_text |= {name: f"host-{number}" for name in (host, host.partition(".")[0]) if name}
        self._by_text |= {user: f"user-{number}" for number, user in enumerate(users, 1)}
        longest = sorted((text for text in self._by_text if text), key=len, reverse=True)
        any_of = "|".join(map(re.escape, longest))
        self._any = re.compile(rf"(?<![A-Za-z0-9])(?:{any_of})(?![A-Za-z0-9])") if longest else None

    def of(self, value: Value) -> Value:
        """Return a value of the page with every text in it redacted."""
        return self._of(value)  # type: ignore[no-any-return]

    def text(self, text: str) -> str:
        """Return one text without names and paths."""
        if self._any is not None:
            text = self._any.sub(lambda found: self._by_text[found[0]], text)
        return redaction.text(_ADDRESS.sub("(address)", _PATH.sub("(path)", text)))

    def _of(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = {
                name: item if name in NOT_WORDS else self._of(item)
                for name, item in zip(value._fields, value, strict=True)
            }
            return type(value)(**fields)
        if isinstance(value, (list, tuple)):
            return type(value)(self._of(item) for item in value)
        return value


def _said(values: RunValues) -> Iterator[tuple[str, str]]:
    """Yield the path of the Recording and what was on the command line, with what stands for them."""
    for path in {values.path, str(Path(values.path).absolute())}:
        yield path, "RUN"
    yield values.name, "RUN"
    if run_id := values.summary.run.run_id:
        yield run_id, "(id)"
    for word in values.summary.run.command:
        for part in (word, word.partition("=")[2]):
            if len(part) >= LEAST_WORD and not part.replace(".", "").isdigit() and part not in _PLAIN:
                yield part, "(argument)"


_PLAIN = frozenset({"python", "python3", "rltrace", "exec", "true", "True", "False", "false", "null", "None", "vllm",
                    "grpo", "fsdp2", "fsdp", "sglang", "bfloat16", "torchrun", "train.py"})  # fmt: skip
"""Words of command lines that say nothing about anybody."""


def _hosts(values: RunValues) -> set[str]:
    named = {str(values.manifest.get("host") or "")}
    named |= {process.process.host for process in values.seen.processes}
    named |= {machine.host for machine in values.summary.run.machines}
    return {host for host in named if host}


def _users(values: RunValues) -> set[str]:
    """Return names of users, by the homes in the command line, the path and the configuration."""
    texts = [values.path, *values.summary.run.command, *_texts(values.manifest)]
    return {found for text in texts for found in _HOME.findall(text)}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)

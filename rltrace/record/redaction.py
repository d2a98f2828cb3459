"""Takes secrets out of whatever is recorded or said: one mechanism for values, command lines and sentences.

A secret is what is named like one (`api_key`, `WANDB_API_KEY`, `Authorization`, `OTEL_EXPORTER_OTLP_HEADERS`), or looks
like one (`sk-...`, `hf_...`, `https://user:password@host`). It is a net with holes: a secret without a name that looks
like any other word stays. Spans' own arguments are not looked at: they are what a program wants to be recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

REDACTED = "[redacted]"

_NAMED = re.compile(
    r"(?:^|[^a-z])(?:key|keys|apikey|token|secret|secrets|password|passwd|passphrase|pwd|credentials?|auth|authorization"
    r"|cookies?|headers|dsn)$",
    re.I,
)
"""What ends the name of a secret."""
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_ALSO_PROSE = frozenset({"key", "keys", "token"})
"""Before a colon these are words of a sentence, as in `unexpected key: loss`, and not names of secrets."""

_WORD = r"[^\s\"',;)}\]]+"
_LIST = r""""[^"]*"?|'[^']*'?|\{[^}]*\}?|[^\s"';]+(?:;\s*[^\s"';]+)*"""


class _Form(NamedTuple):
    """A way in which a name and its value are written. The value is looked at only if the name is a secret's."""

    name: re.Pattern[str]
    value: re.Pattern[str]


_FORMS = (
    # Several in one value: `OTEL_EXPORTER_OTLP_HEADERS=api-key=X,team=Y`, `Cookie: a=X; b=Y`.
    _Form(
        re.compile(r"""(?<![\w-])(?P<name>[\w-]*(?:headers|cookies?))(?P<between>["']?\s*[=:]\s*)""", re.I),
        re.compile(_LIST),
    ),
    # `api_key=X`, `'token': 'X'`, `Authorization: Bearer X`.
    _Form(
        re.compile(r"""(?<![\w.-])(?P<name>[\w.-]+)(?P<between>["']?\s*[=:]\s*["']?)"""),
        re.compile(rf"(?:(?:Basic|Bearer|Digest|Token)\s+)?{_WORD}"),
    ),
    # `--password X`.
    _Form(
        re.compile(r"""(?<![\w-])(?P<name>--?[A-Za-z][\w.-]*)(?P<between>\s+["']?)(?!-)"""),
        re.compile(_WORD),
    ),
)
_CREDENTIALS = re.compile(r"(?<=://)(?:[^/@\s]*:[^/@\s]+|[^/@\s:]{20,})(?=@)")
_LOOKS_SO = re.compile(
    r"(?<![\w-])(?:sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|eyJ)[^\s\"',;)}\]]+|\b(?<=[Bb]earer )\S+"
)


def text(said: str) -> str:
    """Return a text without the secrets in it: `api_key=X`, `'token': 'X'`, `--password X`, `Bearer X`, `sk-X`."""
    for form in _FORMS:
        said = "".join(_without_values(form, said))
    return _LOOKS_SO.sub(REDACTED, _CREDENTIALS.sub(REDACTED, said))


def value(of: Any) -> Any:
    """Return a copy of a configuration without secrets, at any depth."""
    if isinstance(of, Mapping):
        return {str(k): REDACTED if is_secret(str(k)) and v is not None else value(v) for k, v in of.items()}
    if isinstance(of, (list, tuple)):
        return [value(item) for item in of]
    return text(of) if isinstance(of, str) else of


def command(words: list[str]) -> list[str]:
    """Return a command line without secrets: `--api-key X`, `trainer.token=X`, `bash -c "TOKEN=X train"`."""
    left: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_named = bool(equals) and not any(map(str.isspace, name)) and is_secret(name)
        if is_value and not word.startswith("-"):
            left.append(REDACTED)
        else:
            left.append(f"{name}={REDACTED}" if is_named else text(word))
        is_value = not equals and word.startswith("-") and is_secret(word)
    return left


def is_secret(name: str) -> bool:
    """Return whether what has this name is a secret."""
    return bool(_NAMED.search(_WORD_START.sub("_", name)))


def _without_values(form: _Form, said: str) -> Iterator[str]:
    """Yield a text in parts, without the values of secrets. What another name has as its value may be a name itself."""
    at = 0
    while (found := form.name.search(said, at)) is not None:
        yield said[at : found.end()]
        at = found.end()
        if is_secret(found["name"]) and not _is_prose(found) and (secret := form.value.match(said, at)) is not None:
            yield REDACTED
            at = secret.end()
    yield said[at:]


def _is_prose(found: re.Match[str]) -> bool:
    return found["between"].strip() == ":" and found["name"].lower() in _ALSO_PROSE

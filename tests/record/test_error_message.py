"""What an exception says is at the end of its span, and in the summary: its first line, without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rltrace
from rltrace.analysis import summarize
from rltrace.cli.tables.problems import problems
from rltrace.events import Span
from rltrace.hooks.patching import end_span
from rltrace.read.recording import Recording
from rltrace.record import redaction


class Tensor:
    """Whose text would wait for its GPU."""

    __dlpack__ = None

    def __str__(self) -> str:
        raise SystemExit("asked")


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def left_by(folder: Path, *errors: BaseException) -> dict[str, dict[str, Any]]:
    """Arguments of spans that these left, by the error's name; and of one that a hook ended."""
    rltrace.start(folder, role="driver")
    for error in errors:
        with pytest.raises(type(error)), rltrace.span("step", step=3), rltrace.span(type(error).__name__):
            raise error
    opened = rltrace.span("hooked").__enter__()
    end_span(opened, None, errors[0])
    rltrace.stop()
    (process,) = Recording.open(folder).processes
    return {event.name: event.args for event in process.events() if isinstance(event, Span)}


def test_first_line_is_an_argument(tmp_path: Path) -> None:
    """The first line of an error is an argument of each span that it left."""
    found = left_by(
        tmp_path / "run", ValueError("shape (3, 4)\nof actor"), KeyError(), MuteError(), TypeError(Tensor())
    )
    assert found["ValueError"] == found["hooked"] == {"error": "ValueError", "error_message": "shape (3, 4)"}
    assert found["KeyError"] == {"error": "KeyError"}
    assert found["MuteError"] == {"error": "MuteError", "error_message": "<MuteError>"}
    assert found["TypeError"] == {"error": "TypeError"}


def test_summary_says_the_message(tmp_path: Path) -> None:
    """The summary says the message with the error, and with the step that it aborted."""
    left_by(tmp_path / "run", ValueError("no room for token=abc\nat all"))
    summary = summarize(Recording.open(tmp_path / "run"))
    (error, *_) = [found for found in summary.errors if found.name == "ValueError"]
    assert error.message == summary.steps[0].error_message == "no room for token=[redacted]"
    lines = [line.plain for line in problems(summary)]
    assert any(line.startswith("Step 3 was aborted") and line.endswith(error.message) for line in lines)
    assert any(line.startswith("ValueError in ValueError") and line.endswith(error.message) for line in lines)


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("token=abc123, retry", "token=[redacted], retry"),
        ("{'api_key': 'K', 'n': 3}", "{'api_key': '[redacted]', 'n': 3}"),
        ("password: hunter2", "password: [redacted]"),
        ("Authorization: Bearer a.b-c failed", "Authorization: [redacted] failed"),
        ("got Bearer a.b-c", "got Bearer [redacted]"),
        ("Incorrect API key provided: sk-abc12.", "Incorrect API key provided: [redacted]"),
        ("GET https://me:pw@host/x", "GET https://[redacted]@host/x"),
        ("unexpected key: loss", "unexpected key: loss"),
        ("Missing key(s): a.b, 3 tokens: 5", "Missing key(s): a.b, 3 tokens: 5"),
        ("task-force of https://host:80/x", "task-force of https://host:80/x"),
    ],
)
def test_secrets_go_and_the_sentence_stays(said: str, left: str) -> None:
    assert redaction.text(said) == left

"""What a notebook shows of a Recording: the page's picture and findings; without what draws them, the findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from rltrace import plugins
from rltrace.analysis.findings.finding import Finding
from rltrace.errors import MissingExtraError
from rltrace.host.control_characters import visible
from rltrace.read.recording import Recording

DRAWN_BY = "rltrace_exporters.report.cell:html"


def html(recording: Recording, findings: Callable[[], Sequence[Finding]]) -> str:
    """Return the HTML of a cell; every text of the Recording in it is escaped.

    Args:
        recording: What is shown.
        findings: Returns its findings, for where nothing can be drawn.
    """
    try:
        drawn: Callable[[Recording], str] = plugins.load(DRAWN_BY)
    except ImportError as error:
        lacking = MissingExtraError(f"the picture of a step needs {error.name}, which is not installed here", "report")
        return _in_words(recording, findings(), str(lacking))
    return drawn(recording)


def _in_words(recording: Recording, findings: Sequence[Finding], lacking: str) -> str:
    rows = "".join(f"<li>{_text(_said(one))}</li>" for one in findings)
    return f"<p><b>{_text(recording.name)}</b></p><ol>{rows}</ol><p>{_text(lacking)}</p>"


def _said(one: Finding) -> str:
    changes = "; ".join(f"{setting.program}: {setting.change}" for setting in one.settings)
    return f"{one.title}{f' (change {changes})' if changes else ''}"


def _text(text: str) -> str:
    return escape(visible(text))

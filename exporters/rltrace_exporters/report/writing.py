"""Writes a page as one HTML file that needs nothing else, and lets nothing else be loaded."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from rltrace.analysis.figures import can_be_kept
from rltrace.host.control_characters import visible
from rltrace.host.garbage_collector import without_collection
from rltrace.read.cache import Cache
from rltrace.read.recording import Recording
from rltrace_exporters.report.chart import Chart, Plot
from rltrace_exporters.report.definitions import definition
from rltrace_exporters.report.page import Page, page
from rltrace_exporters.report.values import read, read_whole

FOLDER = Path(__file__).parent
DIGITS = 3


class Report:
    """The report of a Recording; it is written like an exporter's file."""

    suffix = ".report.html"
    """Pictures of memory end with .html alone: both are in one folder by default."""

    def __init__(self, *, is_shared: bool = False, is_part: bool = False) -> None:
        self._is_shared = is_shared
        self._is_part = is_part
        self.damaged: list[str] = []
        """Files of the cache that could not be used, because they are damaged."""

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Write the page of one Recording: the one that was kept, if nothing has changed since."""
        with without_collection():
            is_kept = not self._is_part and can_be_kept()
            out.write(self._kept(recording) if is_kept else self._made(recording))

    def _made(self, recording: Recording) -> bytes:
        return written(page([read(recording)], is_shared=self._is_shared))

    def _kept(self, recording: Recording) -> bytes:
        cache = Cache(recording, f"report-{'shared' if self._is_shared else 'whole'}")
        if not cache.is_worth_it:
            return self._made(recording)
        own = _own_code()
        content = cache.load()
        self.damaged = cache.damaged
        if content is not None and content.startswith(own):
            return content[len(own) :]
        cache.begin()
        values, damaged = read_whole(recording)
        self.damaged = [*self.damaged, *damaged]
        made = written(page([values], is_shared=self._is_shared))
        del values  # and with it all spans, before as much is written
        cache.save(own + made)
        return made


def _own_code() -> bytes:
    """Return a digest of what the page is made by; the cache knows only of what the figures are made by."""
    digest = hashlib.sha256()
    for file in sorted([*FOLDER.glob("*.*"), *FOLDER.parent.glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.digest()


class Comparison:
    """The report of a Recording beside another one."""

    suffix = ".html"

    def __init__(self, before: Recording, *, is_shared: bool = False) -> None:
        self._before = before
        self._is_shared = is_shared

    def write(self, recording: Recording, out: BinaryIO) -> None:
        """Write the page of both."""
        with without_collection():
            out.write(written(page([read(self._before), read(recording)], is_shared=self._is_shared)))


def written(made: Page) -> bytes:
    """Return the file of a page."""
    style, script = source("blocks.css") + source("page.css"), source("page.js")
    text = (
        environment()
        .get_template("page.html")
        .render(page=made, style=style, script=script, policy=_policy(style, script))
    )
    return text.lstrip().encode(errors="replace")  # macros come first in it


def environment(*, is_still: bool = False) -> Environment:
    """Return what fills the templates.

    Args:
        is_still: There is no script of ours: what it would show at the pointer, the browser shows by itself.
    """
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.finalize = lambda value: visible(value) if type(value) is str else value
    made.filters |= {"kind": lambda block: type(block).__name__, "definition": definition, "marked": marked}
    made.globals |= {"series": series, "is_still": is_still, "words_at": "title" if is_still else "data-tip"}
    return made


def source(name: str) -> Source:
    """Return our own style or script."""
    return Source((FOLDER / name).read_text())


class Source(str):
    """Our own style or script, which goes into the file as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return str(self)

    def __add__(self, other: str) -> Source:
        return Source(str(self) + other)


def marked(text: str) -> Markup:
    """Return a sentence with what stands between backticks as code."""
    parts = [escape(visible(part)) for part in text.split("`")]
    if len(parts) % 2 == 0:  # one without its partner
        return escape(visible(text))
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )


def _policy(style: str, script: str) -> str:
    """Return the content security policy: nothing may be loaded, and only our own style and script run."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def series(chart: Chart, plot: Plot) -> dict[str, Any]:
    """Return what the script shows of a plot at the pointer: at each moment the value of each layer."""
    return {
        "to": chart.x_to,
        "unit": plot.y_unit,
        "xs": _rounded(plot.xs),
        "layers": [[layer.name, layer.color, _rounded(layer.values)] for layer in reversed(plot.layers)],
    }


def _rounded(values: Iterable[float]) -> list[float]:
    rounded = (round(float(value), DIGITS) for value in values)
    return [int(value) if value == int(value) else value for value in rounded]

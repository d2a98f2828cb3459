"""A picture of a Recording in Perfetto's UI: `python tests/exporters/screenshot.py RECORDING PICTURE.png`.

Needs a Chromium on this machine and playwright to drive it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from playwright.sync_api import Browser, FloatRect, Page, sync_playwright
from rltrace_exporters.perfetto import Perfetto

from rltrace.analysis.first_look import first_look
from rltrace.read import perfetto_ui
from rltrace.read.recording import Recording
from rltrace.read.selection import Selection, numbers


def chromium() -> str | None:
    """Where this machine's Chromium is, if it has one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A headless Chromium that cannot reach anything but this machine."""
    # Its temporary folder is short: it holds a Unix socket.
    with tempfile.TemporaryDirectory(prefix="rlt-", dir="/tmp") as scratch, sync_playwright() as playwright:
        # A proxy that does not exist for every host but ours: the UI must not need the internet.
        browser = playwright.chromium.launch(
            executable_path=chromium(),
            args=["--no-sandbox", "--proxy-server=127.0.0.1:9", "--proxy-bypass-list=127.0.0.1"],
            env=os.environ | {"TMPDIR": scratch},
        )
        yield browser
        browser.close()


_shared: list[Browser] = []


@contextmanager
def shared_browser() -> Iterator[None]:
    """While it lasts, all pages are of one Chromium."""
    with running_browser() as browser:
        _shared.append(browser)
        try:
            yield
        finally:
            _shared.clear()


@contextmanager
def browser_page(width: int = 1600, height: int = 1000) -> Iterator[Page]:
    """A page of a Chromium, as of a user who has opened none before."""
    with nullcontext(_shared[0]) if _shared else running_browser() as browser:
        context = browser.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce")
        yield context.new_page()
        context.close()


def show(page: Page, url: str) -> None:
    """Open the UI and wait until the trace is there."""
    page.goto(url)
    page.wait_for_function(TRACE_LOADED, timeout=60_000)
    page.evaluate("window.waitForPerfettoIdle(300)")  # it draws when it finds time: as Perfetto's own tests wait


def visible(recording: Recording, number: int | None, *, whole: bool) -> tuple[int, int] | None:
    """What to show: a step, all of it, or what `rltrace view` does."""
    if whole:
        return None
    return first_look(recording, Selection() if number is None else Selection(numbers(str(number))))


@contextmanager
def served(
    trace: Path, recording: Recording, shown_unix_ns: tuple[int, int] | None = None
) -> Iterator[perfetto_ui.Server]:
    """The server of a Recording's trace, which it writes first, as `rltrace view` starts it."""
    with trace.open("wb") as out:
        Perfetto().write(recording, out)
    commands = perfetto_ui.startup_commands(recording.processes)
    server = perfetto_ui.serve(trace, perfetto_ui.find_ui(), commands=commands, shown_unix_ns=shown_unix_ns).start()
    try:
        yield server
    finally:
        server.close()


TRACE_LOADED = "document.body.innerText.includes('Phases')"


def take(
    run: Path,
    picture: Path,
    size: tuple[int, int] = (1600, 1000),
    *,
    step: int | None = None,
    whole: bool = False,
    rows: tuple[str, str] | None = None,
) -> None:
    """Take a picture of a Recording's timeline.

    Args:
        run: The Recording.
        picture: Where to write it.
        size: Width and height of the page.
        step: Show this one; else the step that `rltrace view` begins with.
        whole: Show all of the run.
        rows: How the titles of the first and the last row begin that are kept of the page; None: all of it.
    """
    recording = Recording.open(run)
    shown = visible(recording, step, whole=whole)
    with (
        tempfile.TemporaryDirectory() as scratch,
        served(Path(scratch) / "trace.pftrace", recording, shown) as server,
        browser_page(*size) as page,
    ):
        show(page, server.page_url)
        page.screenshot(path=picture, clip=None if rows is None else between(page, *rows, width=size[0]))


def between(page: Page, first: str, last: str, width: int) -> FloatRect:
    """Return the part of a page that has the rows from one to another."""
    boxes = [page.locator(".pf-track__header", has_text=title).first.bounding_box() for title in (first, last)]
    if boxes[0] is None or boxes[1] is None:
        raise SystemExit(f"the page does not show {first!r} and {last!r}: make it taller with --size")
    top, bottom = boxes[0]["y"], boxes[1]["y"] + boxes[1]["height"]
    return {"x": 0, "y": top, "width": width, "height": bottom - top}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--size", type=int, nargs=2, default=(1600, 1000), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--step", type=int, help="show this step; else the one that `rltrace view` begins with")
    parser.add_argument("--whole", action="store_true", help="show all of the run")
    parser.add_argument("--rows", nargs=2, metavar=("FIRST", "LAST"), help="keep only these, by what their titles say")
    given = parser.parse_args()
    take(given.recording, given.picture, given.size, step=given.step, whole=given.whole, rows=given.rows)


if __name__ == "__main__":
    main()

"""The report of a run: what stands in it, what it leaves out, and how a real browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from planted_runs import PlantedRun
from playwright.sync_api import Page as BrowserPage
from recording_file import SECOND, RecordingFile
from recordings import Written, span, two_ranks
from rltrace_exporters.report import writing
from rltrace_exporters.report.chart import Chart, Layer, Plot
from rltrace_exporters.report.page import SECTIONS, Page, page
from rltrace_exporters.report.ticks import ticks
from rltrace_exporters.report.values import RunValues, read
from rltrace_exporters.report.writing import Report, written
from screenshot import browser_page, chromium
from shipped import VERL, opened

from rltrace.analysis import figures
from rltrace.analysis.allocations import allocation_timelines
from rltrace.cli import main
from rltrace.read import cache
from rltrace.read.recording import Recording
from rltrace.record.manifest import started_ticks

pytestmark = pytest.mark.usefixtures("one_browser")
needs_browser = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")


def of(path: Path) -> RunValues:
    return read(Recording.open(path))


def text_of(made: Page) -> str:
    """The words of the file, without style and script."""
    body = written(made).decode().partition("</head>")[2]
    return unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", body, flags=re.DOTALL))


def missing(values: RunValues) -> dict[str, str]:
    """Why sections have nothing to show, by the section."""
    return {part.id: part.panels[0].missing for part in page([values]).parts if part.panels[0].missing}


@pytest.fixture(scope="module")
def verl() -> RunValues:
    return read(opened(VERL))


@pytest.fixture(scope="module")
def file(verl: RunValues, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the shipped Recording of verl."""
    path = tmp_path_factory.mktemp("report") / "verl.html"
    path.write_bytes(written(page([verl])))
    return path


# ---- what stands in it ------------------------------------------------------------------------------------------


def test_every_section_is_there_in_order(verl: RunValues) -> None:
    """A run that has everything has every section, findings first."""
    made = page([verl])
    assert [part.id for part in made.parts] == [section.id for section in SECTIONS]
    assert made.parts[0].id == "findings" and missing(verl) == {}
    assert "verl 0.9.1" in made.heads[0].line and "4 ranks on 1 host" in made.heads[0].line


def test_findings_are_those_of_why(verl: RunValues) -> None:
    """Each finding of `rltrace why` stands there with its price, in its order."""
    shown = text_of(page([verl]))
    places = [shown.index(found.title) for found in verl.why.findings]
    assert places == sorted(places) and len(places) > 5
    first = verl.why.findings[0]
    assert f"{first.share:.1%}" in shown and all(fact in shown for fact in first.evidence.facts)
    assert all(one.reason.split("`")[0] in shown for one in verl.why.unjudged)


def test_phases_add_up_to_a_step(verl: RunValues) -> None:
    """The bars of a step's phases add up to the step, as the summary has it."""
    (bars,) = [one for one in SECTIONS[3].make(verl) if type(one).__name__ == "Bars"]
    whole = sum(part.end for row in bars.rows for part in row.parts)
    overlap = np.mean([row.overlap_seconds for row in verl.summary.phases if row.steady and row.rank is not None])
    assert verl.summary.steady is not None
    assert whole - overlap == pytest.approx(verl.summary.steady.seconds.mean_seconds, rel=0.002)


def test_memory_is_that_of_the_ledger(verl: RunValues) -> None:
    """The stacked areas end where the ledger's total is, under the card's capacity."""
    (chart,) = [one for one in SECTIONS[1].make(verl) if isinstance(one, Chart)]
    plot = chart.plots[-1]
    assert verl.fullest is not None
    total = sum(layer.values for layer in plot.layers).max() * 2**30
    inside = [moment.used_bytes for moment in verl.fullest.steps if moment.step == verl.window.step]
    assert total == pytest.approx(inside[0], rel=0.01)
    capacity = verl.fullest.peak_bytes + verl.fullest.at_peak_bytes["free"]
    assert plot.levels[0].y * 2**30 == pytest.approx(capacity, rel=1e-6)
    assert len(plot.dots) > 5 and all(0 <= dot.x <= chart.x_to for dot in plot.dots)


def test_step_with_every_allocation_is_drawn(tmp_path: Path) -> None:
    """The step whose every allocation was kept is drawn, and not the one of median length."""
    file = RecordingFile(tmp_path / "run")
    driver = file.process(1, role="driver").thread()
    for step in range(4):
        driver.span("step", step * SECOND, (step + 1) * SECOND, step=step)
    worker = file.process(2, role="worker", rank=0, device={"host": "node", "uuid": "GPU-1"}).thread()
    worker.counter("actor.params_bytes", 1, 100 << 20)
    for step in range(4):
        at = step * SECOND + SECOND // 2
        worker.span("memory.edge", at, at + 1000, totals={"used": 150 << 20, "driver.reserved": 7 << 20})
        worker.span("actor.update", at + 1000, at + SECOND // 4)
    worker.span("memory.allocations", 2 * SECOND - 10, 3 * SECOND + 10, step=2)
    for at, value in ((2 * SECOND - 10, 0), (2 * SECOND + 100, 900 << 20), (2 * SECOND + 10**8, 5 << 20)):
        worker.counter("allocations.actor.grads_bytes", at, value)
    worker.counter("allocations.actor.grads_bytes", 3 * SECOND + 10, 0)
    values = of(file.path)
    assert list(allocation_timelines(values.seen, values.windows)) != []
    assert values.window.step == 2 and "every allocation" in values.window.title
    (chart,) = [one for one in SECTIONS[1].make(values) if isinstance(one, Chart)]
    (grads,) = [layer for layer in chart.plots[-1].layers if layer.name == "actor.grads"]
    assert grads.values.max() == pytest.approx(900), "the burst between boundaries shows"


def test_many_ranks_are_drawn_as_shares(tmp_path: Path) -> None:
    """Of many ranks the shares in each phase are drawn, and the slowest by name; the file stays small."""
    run = PlantedRun(tmp_path / "run", ranks=40, steps=4)
    run.longer["actor.update", 17] = lambda step: 0.5
    values = read(run.write().read())
    (chart,) = [one for one in SECTIONS[1].make(values) if isinstance(one, Chart)]
    names = [plot.label for plot in chart.plots]
    assert "40 ranks" in names and "rank 17" in names and len(names) < 15
    (shares,) = [plot for plot in chart.plots if plot.label == "40 ranks"]
    total = sum(layer.values for layer in shares.layers)
    assert total.max() <= 100.01 and total.max() > 99
    (slow,) = [plot for plot in chart.plots if plot.label == "rank 17"]
    assert "slowest in actor.update" in slow.tip
    assert len(written(page([values]))) < 500_000


def test_file_of_eight_ranks_is_small(file: Path) -> None:
    """A report of a small run is far below a megabyte."""
    assert file.stat().st_size < 400_000


# ---- what a Recording lacks -------------------------------------------------------------------------------------


def test_empty_recording_says_what_it_lacks(tmp_path: Path) -> None:
    """A Recording without anything gives a page whose sections say why they are empty."""
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 1}))
    values = of(tmp_path)
    why = missing(values)
    assert why.keys() == {"step", "steps", "phases", "sync", "memory", "rollout", "gpus"}
    assert all(said.count(". ") == 0 for said in why.values()), "one sentence each"
    assert "No process sampled" in text_of(page([values]))


def test_run_without_steps_is_drawn_whole(tmp_path: Path) -> None:
    """Phases without steps are drawn over the whole run."""
    run = Written(tmp_path / "run").process("w", span("reward", 1, 2), span("think", 2, 9), role="worker", ended_s=9)
    values = read(run.read())
    assert values.window.title == "the whole run" and "step" not in missing(values)
    assert missing(values)["steps"].startswith("No step was recorded")


def test_one_step_has_no_spread(tmp_path: Path) -> None:
    """With one step, the page says that nothing is known of how steps vary."""
    shown = text_of(page([read(PlantedRun(tmp_path / "run", steps=1).write().read())]))
    assert "Only one step can be counted" in shown


def test_run_without_a_gpu_says_so(tmp_path: Path) -> None:
    """A run on a CPU has no GPU time, in one sentence."""
    assert missing(read(two_ranks(tmp_path / "run").read()))["gpus"] == "No process of this run used a GPU."


def test_misaligned_clocks_are_named(tmp_path: Path) -> None:
    """A host whose clock was never compared is named beside the step and in trust."""
    file = RecordingFile(tmp_path / "run")
    file.belongs_to("boot")
    driver = file.process(1, role="driver").thread()
    for step in range(3):
        driver.span("step", step * SECOND, (step + 1) * SECOND, step=step)
    for rank, host in enumerate(("node", "astray")):
        thread = file.process(
            2 + rank, host=host, boot="boot" if not rank else "other", role="worker", rank=rank
        ).thread()
        for step in range(3):
            thread.span("actor.update", step * SECOND + 10, step * SECOND + SECOND // 2)
    shown = text_of(page([of(file.path)]))
    assert shown.count("The clock of astray was never compared") == 2


def test_missing_rank_and_death_are_said(tmp_path: Path) -> None:
    """A rank that is missing and a process that died are said above the figures."""
    folder = tmp_path / "run"
    PlantedRun(folder, ranks=3).write()
    for process in (folder / "processes").iterdir():
        if '"rank": 1' in (process / "process.jsonl").read_text():
            shutil.rmtree(process)
    shown = text_of(page([of(folder)]))
    assert "rank 1 of 3 is not in it" in shown


def test_damage_is_said(tmp_path: Path) -> None:
    """A torn record is counted in trust."""
    file = RecordingFile(tmp_path / "run")
    thread = file.process(1, role="driver").thread()
    for step in range(3):
        thread.span("step", step * SECOND, (step + 1) * SECOND, step=step)
    thread.tear(3)
    assert "cut or damaged" in text_of(page([of(file.path)]))


def test_live_run_is_said(tmp_path: Path) -> None:
    """A run that goes on says so at its title and in trust."""
    steps = [span("step", n, n + 1, step=n) for n in range(3)]
    run = Written(tmp_path / "run").process(
        "w", *steps, role="driver", pid=os.getpid(), start_ticks=started_ticks(os.getpid())
    )
    values = read(run.read())
    assert values.summary.run.is_live
    shown = text_of(page([values]))
    assert "still running" in shown and "goes on" in shown


# ---- untrusted names and what is shared -------------------------------------------------------------------------

EVIL = "<script>document.title = 'owned'</script>"


def evil_run(folder: Path) -> RunValues:
    """A run whose host, command, phases, owners of hooks and errors are all hostile."""
    file = RecordingFile(folder)
    file.manifest |= {"command": ["train", EVIL, f'"><img src=x onerror={EVIL}>'], "host": EVIL}
    (folder / "manifest.json").write_text(json.dumps(file.manifest))
    driver = file.process(1, role="driver").thread()
    worker = file.process(2, role=EVIL, rank=0, device={"host": EVIL, "uuid": f"GPU-{EVIL}"}).thread()
    lone = file.process(3, role=f"</script>{EVIL}").thread()
    for step in range(3):
        start, end = step * SECOND, (step + 1) * SECOND
        driver.span("step", start, end, step=step, **({"error": EVIL, "error_message": EVIL} if step == 2 else {}))
        worker.span(EVIL, start, start + SECOND // 3, phase=True)
        worker.span("]]>--></style>" + EVIL, start + SECOND // 2, end, phase=True)
        lone.span(f"own {EVIL}\u202e", start, end)
    for at in range(3):
        worker.counter("actor.params_bytes", at * SECOND, 100 << 20)
        worker.span("memory.edge", at * SECOND, at * SECOND + 1000, totals={"used": 150 << 20, "driver.reserved": 7})
    return of(folder)


@needs_browser
def test_names_are_text(tmp_path: Path) -> None:
    """Names of a Recording are shown as text: none of them becomes an element or runs."""
    made = page([evil_run(tmp_path / "run")])
    path = tmp_path / "evil.html"
    path.write_bytes(written(made))
    assert b"<script>document" not in path.read_bytes() and "\u202e" not in path.read_text()
    with browser_page(1280, 900) as browser:
        errors: list[Any] = []
        browser.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108
        browser.on("console", lambda said: errors.append(said.text))
        browser.goto(path.as_uri())
        assert browser.title() != "owned" and browser.locator("img").count() == 0
        assert EVIL in browser.inner_text("body")
        assert browser.locator("script").count() == 1 + browser.locator('script[type="application/json"]').count()
    assert errors == []


def shared_run(folder: Path) -> Path:
    """A run that says in many places who made it, and where."""
    file = RecordingFile(folder)
    command = [
        "/home/alicia/venv/bin/python",
        "train.py",
        "--token=hunter2secret",
        "data=/home/alicia/corpus/rows.parquet",
    ]
    file.manifest |= {"command": command, "host": "gpu-17.example.org", "config": {"out": "/home/alicia/out"}}
    (folder / "manifest.json").write_text(json.dumps(file.manifest))
    driver = file.process(1, role="driver", host="gpu-17.example.org").thread()
    for rank in range(2):
        device = {"host": "gpu-18", "uuid": f"GPU-{rank}"}
        worker = file.process(2 + rank, host="gpu-18", boot="other", role="worker", rank=rank, device=device).thread()
        for step in range(3):
            worker.span("actor.update", step * SECOND, step * SECOND + SECOND // 2)
            worker.span("alicia", step * SECOND + SECOND // 2, (step + 1) * SECOND, phase=True)
            worker.counter("actor.params_bytes", step * SECOND, 100 << 20)
    for step in range(3):
        error = (
            {"error": "OSError", "error_message": "/home/alicia/corpus/rows.parquet on gpu-18, 10.11.12.13"}
            if step == 2
            else {}
        )
        driver.span("step", step * SECOND, (step + 1) * SECOND, step=step, **error)
    return file.path


def test_shared_page_names_nobody(tmp_path: Path) -> None:
    """With --share neither command line nor host, user or path is anywhere in the bytes."""
    folder = shared_run(tmp_path / "of-alicia")
    plain, shared = (written(page([of(folder)], is_shared=asked)) for asked in (False, True))
    shown = (b"alicia", b"gpu-18", b"hunter2", b"rows.parquet", b"10.11.12.13", str(tmp_path).encode())
    assert [secret for secret in shown if secret not in plain] == []
    secrets = (*shown, b"gpu-17", b"example.org", b"corpus", b"of-alicia")
    assert [secret for secret in secrets if secret in shared] == []
    assert b"host-2" in shared and b"actor.update" in shared


def test_shared_page_keeps_its_figures(verl: RunValues) -> None:
    """Sharing changes names only: of the shipped Recording every finding and figure stays."""
    plain, shared = (text_of(page([verl], is_shared=asked)) for asked in (False, True))
    assert re.findall(r"\d+\.\d+ (?:ms|s|GiB)\b", plain) == re.findall(r"\d+\.\d+ (?:ms|s|GiB)\b", shared)
    for found in verl.why.findings:
        assert found.title in shared


# ---- two runs ---------------------------------------------------------------------------------------------------


def test_two_runs_have_one_page(tmp_path: Path) -> None:
    """The page of two runs opens with what changed, has both in every section, and the same axes for both."""
    plain, slow = PlantedRun(tmp_path / "a", gpu=False), PlantedRun(tmp_path / "b", gpu=False)
    for rank in range(4):
        slow.longer["actor.update", rank] = lambda step: 2.0
    made = page([read(run.write().read()) for run in (plain, slow)])
    assert [part.id for part in made.parts] == ["changes", *(section.id for section in SECTIONS)]
    assert "B is slower" in text_of(made)
    for part in made.parts[1:]:
        assert [panel.side for panel in part.panels] == ["A", "B"]
    charts = [[one for one in panel.blocks if isinstance(one, Chart)] for panel in made.parts[2].panels]
    assert charts[0][0].x_to == charts[1][0].x_to


# ---- charts -----------------------------------------------------------------------------------------------------


def heights(path: str, at: float) -> list[float]:
    """Where a vertical line crosses the outline of an area made of horizontal and vertical edges."""
    x = y = 0.0
    crossed = []
    for kind, numbers in re.findall(r"([MHVZ])([\d. ]*)", path):
        if kind == "M":
            x, y = map(float, numbers.split())
        elif kind == "H":
            if min(x, float(numbers)) < at < max(x, float(numbers)):
                crossed.append(y)
            x = float(numbers)
        elif kind == "V":
            y = float(numbers)
    return sorted(crossed)


def test_areas_hold_their_values() -> None:
    """At every moment each area lies between the sum of those below and its own top, also where values repeat."""
    chance = np.random.default_rng(0)
    xs = np.array([0.0, 1, 2, 3, 5, 8, 9, 9, 10])
    layers = [Layer(str(n), "#000000", chance.integers(0, 3, len(xs)).astype(float)) for n in range(4)]
    plot = Plot("", 100, y_to=10, xs=xs, layers=layers)
    chart = Chart("", 10, "s", [plot], [])
    for at in (0.5, 1.5, 2.5, 4, 6, 8.5, 9.5):
        place = int(np.searchsorted(xs, at, side="right")) - 1
        sums = np.cumsum([0.0, *(layer.values[place] for layer in layers)])
        for number in range(4):
            found = heights(chart.area(plot, number), at * 100)
            assert found == pytest.approx([100 - 10 * sums[number + 1], 100 - 10 * sums[number]])


@pytest.mark.parametrize(("to", "expected"), [(9.84, [0, 2, 4, 6, 8]), (0.0123, [0, 0.005, 0.01]), (0, [0]), (100, 6)])
def test_ticks_are_round(to: float, expected: Any) -> None:
    """Marks of an axis are round numbers within it."""
    found = ticks(to, 5 if to != 0.0123 else 3)
    assert found == expected if isinstance(expected, list) else len(found) == expected


# ---- in a browser -----------------------------------------------------------------------------------------------

OVERFLOWING = """() => [...document.querySelectorAll('body *')].filter((one) => {
    if (one.closest('.scroll, nav ul, .skip, #tip, svg') || !one.offsetParent) return false;
    const box = one.getBoundingClientRect();
    return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map((one) => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`)"""

CLIPPED = """() => [...document.querySelectorAll('.chart text')].filter((text) => {
    const box = text.getBoundingClientRect();
    if (!box.width) return false;
    if (text.matches('.label')) {
        const bar = text.closest('.bar').querySelector('rect').getBoundingClientRect();
        return box.left < bar.left - 1 || box.right > bar.right + 1;
    }
    const section = text.closest('section').getBoundingClientRect();
    return box.left < section.left || box.right > section.right;
}).map((text) => text.textContent)"""

OVERLAPPING = """() => [...document.querySelectorAll('svg.x, svg.y')].flatMap((axis) => {
    const boxes = [...axis.querySelectorAll('text')].map((text) => [text.textContent, text.getBoundingClientRect()])
        .filter(([, box]) => box.width);
    return boxes.flatMap(([one, a], place) => boxes.slice(place + 1).filter(([, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4)
        .map(([other]) => `${one} over ${other}`));
})"""


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 360])
def test_page_fits_every_width(file: Path, width: int, scheme: Any) -> None:
    """At three widths nothing overflows, no label is clipped, and nothing is asked of anybody."""
    with browser_page(width, 900) as browser:
        asked, wrong = watched(browser)
        browser.emulate_media(color_scheme=scheme)
        browser.goto(file.as_uri())
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.evaluate(OVERFLOWING) == []
        assert browser.evaluate(CLIPPED) == []
        assert browser.evaluate(OVERLAPPING) == []
        colors = browser.evaluate(
            "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        )
    assert [url for url in asked if url != file.as_uri()] == [] and wrong == []
    ink, paper = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors)
    assert (ink > paper + 400) if scheme == "dark" else (paper > ink + 400)


def watched(browser: BrowserPage) -> tuple[list[str], list[Any]]:
    """What the page asks for, and what goes wrong in it; violations of its policy are among them."""
    asked: list[str] = []
    wrong: list[Any] = []
    browser.on("request", lambda request: asked.append(request.url))
    browser.on("pageerror", lambda error: wrong.append(error))  # noqa: PLW0108
    browser.on("console", lambda said: wrong.append(said.text))
    return asked, wrong


@needs_browser
def test_axes_are_aligned(file: Path, verl: RunValues) -> None:
    """A phase of a rank and the memory of the same moment lie above each other."""
    (chart,) = [one for one in SECTIONS[1].make(verl) if isinstance(one, Chart)]
    with browser_page(1280, 900) as browser:
        browser.goto(file.as_uri())
        boxes = browser.evaluate(
            "[...document.querySelectorAll('#step .plot')].map((one) => one.getBoundingClientRect().toJSON())"
        )
        bars = browser.evaluate(
            "[...document.querySelectorAll('#step .plot:not(:has(path)) .bar rect')]"
            ".map((one) => one.getBoundingClientRect().left)"
        )
    assert len({(round(box["left"], 1), round(box["width"], 1)) for box in boxes}) == 1
    left, width = boxes[0]["left"], boxes[0]["width"]
    expected = [left + width * bar.start / chart.x_to for plot in chart.plots for bar in plot.bars]
    assert bars == pytest.approx(expected, abs=1)


@needs_browser
def test_policy_stops_what_is_foreign(file: Path) -> None:
    """The page's own policy stops a script that somebody puts into it."""
    with browser_page(1280, 900) as browser:
        browser.goto(file.as_uri())
        browser.evaluate(
            "() => { const one = document.createElement('script'); one.textContent = 'window.ran = 1';"
            " document.body.append(one); }"
        )
        assert browser.evaluate("window.ran") is None
        policy = browser.locator('meta[http-equiv="Content-Security-Policy"]').get_attribute("content")
    assert policy is not None and policy.startswith("default-src 'none'") and "unsafe" not in policy


@needs_browser
def test_keyboard_reaches_everything(file: Path, verl: RunValues) -> None:
    """Definitions show at the focus, the arrow keys go from bar to bar and through the moments of the memory."""
    with browser_page(1280, 900) as browser:
        browser.goto(file.as_uri())
        browser.keyboard.press("Tab")
        assert browser.evaluate("document.activeElement.className") == "skip"
        browser.evaluate("document.querySelector('#step .plot .bar[tabindex=\"0\"]').focus()")
        browser.keyboard.press("ArrowRight")
        assert "waited for rank 0: rollout.sleep" in browser.inner_text("#tip")
        browser.evaluate("document.querySelector('#step .pointed').focus()")
        browser.keyboard.press("ArrowRight")
        shown = browser.inner_text("#tip")
        assert "all together" in shown and "actor.params" in shown
        browser.keyboard.press("Escape")
        assert browser.is_hidden("#tip")
        browser.keyboard.press("Tab")
        assert browser.is_visible("#tip"), "the next one is a word of the legend"


@needs_browser
def test_bytes_are_shown_at_the_pointer(file: Path, verl: RunValues) -> None:
    """At the pointer the page shows what each owner held then."""
    (chart,) = [one for one in SECTIONS[1].make(verl) if isinstance(one, Chart)]
    plot = chart.plots[-1]
    with browser_page(1280, 900) as browser:
        browser.goto(file.as_uri())
        area = browser.locator("#step .pointed")
        area.scroll_into_view_if_needed()
        browser.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = area.bounding_box()  # the page is still by now: its tip goes when it scrolls
        assert box is not None
        browser.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 20)
        shown = dict(re.findall(r"([\w.]+)\t([\d.,]+) GiB", browser.inner_text("#tip")))
    place = int(np.searchsorted(plot.xs, 0.7 * chart.x_to, side="right")) - 1
    for layer in plot.layers:
        if layer.values[place] > 0.01:
            assert float(shown[layer.name]) == pytest.approx(layer.values[place], abs=0.006)


@needs_browser
def test_print_shows_everything(file: Path) -> None:
    """On paper every finding is open, and nothing of the screen's navigation is there."""
    with browser_page(1000, 900) as browser:
        browser.goto(file.as_uri())
        browser.emulate_media(media="print", color_scheme="dark")
        browser.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert browser.is_hidden("nav")
        assert browser.locator("details:not([open])").count() == 0
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.evaluate("getComputedStyle(document.body).color") == "rgb(17, 24, 39)"


# ---- the command ------------------------------------------------------------------------------------------------


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_command_writes_and_does_not_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes a file named for the run, and overwrites none unasked."""
    monkeypatch.chdir(tmp_path)
    two_ranks(tmp_path / "run")
    subprocess.run([sys.executable, "-m", "rltrace", "report", "run"], check=True, capture_output=True)
    assert (tmp_path / "run.report.html").read_text().startswith("<!DOCTYPE html>")
    assert call("export", "run", "--to", "memory").exit_code == 0, "its file is another one"
    again = call("report", "run")
    assert again.exit_code == 7 and "--force" in again.stderr and len(again.stderr.splitlines()) == 1
    assert call("report", "run", "--force", "--share", "--steps", "1").exit_code == 0


def three_steps(path: Path) -> RecordingFile:
    """Write a run that is over."""
    file = RecordingFile(path)
    process = file.process(1, role="driver")
    thread = process.thread()
    for step in range(3):
        thread.span("step", step * SECOND, (step + 1) * SECOND, step=step)
        thread.span("actor.update", step * SECOND, step * SECOND + SECOND // 2)
    process.ends(3 * SECOND)
    return file


def test_kept_figures_make_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a summary the page is made of the figures that were kept of it, and says the same."""
    path = three_steps(tmp_path / "run").path
    fresh, behind = BytesIO(), BytesIO()
    Report().write(Recording.open(path), fresh)
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    assert figures.figures(Recording.open(path)).summary.steps
    monkeypatch.setattr(figures, "analyse", None)
    Report().write(Recording.open(path), behind)
    assert behind.getvalue() == fresh.getvalue()


def test_large_page_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of a large Recording is made once: again only if the Recording or what is asked for changed."""
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    made: list[Recording] = []

    def counted(recording: Recording) -> RunValues:
        made.append(recording)
        return read(recording)

    def whole(recording: Recording) -> tuple[RunValues, list[str]]:
        return counted(recording), []

    monkeypatch.setattr(writing, "read", counted)
    monkeypatch.setattr(writing, "read_whole", whole)
    file = three_steps(tmp_path / "run")

    def page_of(**asked: bool) -> bytes:
        out = BytesIO()
        Report(**asked).write(Recording.open(file.path), out)
        return out.getvalue()

    first = page_of()
    assert page_of() == first and len(made) == 1
    assert page_of(is_shared=True) != first and len(made) == 2
    assert page_of(is_part=True) == first and len(made) == 3
    (file.path / "manifest.json").write_text(json.dumps(file.manifest | {"command": ["other.py"]}))
    assert b"other.py" in page_of() and len(made) == 4
    monkeypatch.setattr(writing, "_own_code", lambda: b"changed")
    page_of()
    assert len(made) == 5, "another release writes another page"


def test_diff_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`diff -o` writes a page of both runs, which is for people and not for programs."""
    monkeypatch.chdir(tmp_path)
    two_ranks(tmp_path / "a")
    two_ranks(tmp_path / "b")
    done = call("diff", "a", "b", "-o", "page.html")
    assert done.exit_code == 0, done.stderr
    assert "What changed" in (tmp_path / "page.html").read_text()
    assert call("diff", "a", "b", "-o", "other.html", "--json").exit_code == 2
    assert call("diff", "a", "b", "--share").exit_code == 2


def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without jinja2 the command says in one line what to install."""
    two_ranks(tmp_path / "run")
    monkeypatch.delitem(sys.modules, "rltrace_exporters.report.writing")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "-o", str(tmp_path / "run.html")])
    assert isinstance(done.exception, SystemExit) and done.exit_code == 6
    assert "a report needs jinja2, which is not installed here" in done.stderr and "[report]" in done.stderr

"""The picture of memory, drawn of real Recordings and looked at in a real browser that reaches nothing else."""

from __future__ import annotations

import json
import re
import shutil
import sys
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread
from matplotlib.legend import Legend
from msgspec.structs import replace
from recording_file import SECOND, RecordingFile
from rltrace_exporters import memory_image
from rltrace_exporters.memory import Memory
from rltrace_exporters.memory_picture import Picture, _note, picture
from rltrace_exporters.timeline_colors import slice_color
from screenshot import browser_page, chromium, take
from shipped import QWEN, VERL, opened, summary_of

from rltrace.analysis.memory import AllocatedPeak
from rltrace.cli import main
from rltrace.errors import MissingExtraError, OutputError
from rltrace.events import OWNER_COLORS, OWNERS
from rltrace.read.recording import Recording


@cache
def shipped(file: Path) -> Picture:
    """The picture of a shipped Recording."""
    return picture(opened(file))


def drawn_as(suffix: str, recording: Recording) -> bytes:
    """The file of a picture."""
    out = BytesIO()
    Memory().for_file(f"memory{suffix}").write(recording, out)
    return out.getvalue()


@cache
def shipped_as(suffix: str) -> bytes:
    """The file of the picture of a shipped Recording."""
    return drawn_as(suffix, opened(QWEN))


def test_every_owner_has_a_colour_of_its_own() -> None:
    assert list(OWNER_COLORS) != []
    assert set(OWNER_COLORS) == set(OWNERS)
    assert len(set(OWNER_COLORS.values())) == len(OWNERS)


def test_layers_add_up_to_what_the_summary_says() -> None:
    """Of the device that is drawn of four that are alike: the fullest."""
    (device,) = shipped(QWEN).devices
    memory = max(summary_of(QWEN).memory, key=lambda one: one.steps[-1].used_bytes)
    assert device.name == f"{memory.lane} · {memory.device}, the fullest of 4 that are alike"
    assert (device.unit, device.moments) == ("GiB", f"step {memory.steps[-1].step}")
    assert device.used.max() * 2**30 == pytest.approx(memory.steps[-1].used_bytes)
    layers = sum(layer.area for layer in device.layers) * 2**30
    below_zero = min(0, *(moment.bytes["unaccounted"] for moment in memory.boundaries))
    assert (layers - device.used * 2**30 >= -1).all() and (layers - device.used * 2**30 <= 1 - below_zero).all()
    most = {moment.phase: moment.used_bytes for moment in memory.phases if moment.step is not None}
    assert {name.rstrip("*"): round(top * 2**30) for name, top in zip(device.phases, device.tops, strict=True)} == most
    assert [band.name for band in device.bands][:3] == ["rollout.wake_weights", "weight_sync", "rollout.wake_kv_cache"]
    assert device.seconds[0] == 0
    assert (device.seconds[1:] >= device.seconds[:-1]).all()


@pytest.mark.parametrize("recording", [QWEN, VERL])
def test_the_bar_of_an_update_has_its_gradients(recording: Path) -> None:
    """It shows when most was allocated: at its end nothing is but caches, which are more in all."""
    (device,) = shipped(recording).devices
    bars = {layer.owner: dict(zip(device.phases, layer.bars, strict=True)) for layer in device.layers}
    assert bars["actor.grads"]["actor.update"] > 7
    top = dict(zip(device.phases, device.tops, strict=True))["actor.update"]
    assert sum(owner["actor.update"] for owner in bars.values()) < top, "and says how much there was in all"
    assert "rollout.generate*" in device.phases and device.note.endswith("* sampled at its ends only")


def test_similar_devices_form_a_band() -> None:
    """Devices that are alike are drawn as a band, from the least to the most that they have."""
    (device,) = shipped(VERL).devices
    assert device.others is not None
    least, most = device.others
    assert (least <= most).all() and least.shape == device.seconds.shape == device.used.shape
    assert np.median(np.abs(device.used - most)) < 0.5, "GiB: all four do the same"


def test_what_a_card_has_is_a_line(tmp_path: Path) -> None:
    (device,) = shipped(QWEN).devices
    assert device.capacity == pytest.approx(140.4, abs=0.1)
    assert device.height > device.top == device.capacity
    svg = shipped_as(".svg").decode()
    assert svg.count('id="capacity"') == 2 and "on_a_cpu" not in svg
    written, _ = written_with_part(tmp_path / "cpu")
    assert picture(Recording.open(written.path)).devices[0].capacity is None, "nobody said what was free"


def written_ranks(
    folder: Path, most: list[int], *, steps: bool = True, last: dict[str, Any] | None = None
) -> RecordingFile:
    """Two steps of 10 s, or none; each rank has a constant part of 100 and in the middle of a step its own most."""
    written = RecordingFile(folder)
    driver = written.process(1, role="driver").thread()
    for step in range(2 if steps else 0):
        driver.span("step", 10 * step * SECOND, (10 * step + 10) * SECOND, step=step)
    if last is not None:
        driver.begin("step", 20 * SECOND, step=2)
    if last:
        driver.end(20 * SECOND, 30 * SECOND, **last)
    for rank, size in enumerate(most):
        device = {"host": "node", "uuid": f"GPU-{rank}"}
        worker = written.process(10 + rank, role="worker", rank=rank, device=device).thread()
        for at in range(0, 20, 5):
            worker.counter("actor.params_bytes", at * SECOND, size if at % 10 else 100)
            totals = {"used": size if at % 10 else 100, "driver.reserved": 0}
            worker.span("memory.edge", at * SECOND, at * SECOND + 1000, totals=totals, free_bytes=1000)
    return written


def test_unlike_devices_are_drawn_apart(tmp_path: Path) -> None:
    """Devices that are not alike are drawn apart.

    Ranks 0, 1 and 3 are within a tenth; rank 2 has twice as much.
    """
    written = written_ranks(tmp_path / "run", [500, 520, 1000, 510])
    shown = picture(Recording.open(written.path)).devices
    assert [device.name for device in shown] == ["rank 1 · GPU-1, the fullest of 3 that are alike", "rank 2 · GPU-2"]
    first, apart = shown
    assert first.others is not None and apart.others is None
    assert [round(size.max() * 2**20) for size in first.others] == [500, 510]


def test_no_steps_counts_from_start(tmp_path: Path) -> None:
    """A run without steps is drawn whole, in seconds from its beginning."""
    (device,) = picture(Recording.open(written_ranks(tmp_path / "run", [500], steps=False).path)).devices
    assert (device.moments, device.axis) == ("the whole Recording", "seconds from the beginning of the Recording")
    figure = memory_image.figure_of(picture(Recording.open(tmp_path / "run")))
    assert figure.axes[0].get_xlabel() == device.axis
    assert device.phases == [] and "no phase was recorded" in {text.get_text() for text in figure.axes[1].texts}


@pytest.mark.parametrize("is_raised", [True, False])
def test_failed_step_is_drawn_last(tmp_path: Path, is_raised: bool) -> None:
    """A failed step is drawn after the last one that did not fail, and a line shows where memory ran out.

    The step fails by an exception, or because its process dies.
    """
    written = written_ranks(tmp_path / "run", [500], last={"error": "ValueError"} if is_raised else {})
    worker = written.process(30, role="worker", rank=0, device={"host": "node", "uuid": "GPU-0"}).thread()
    for at, size in ((21, 700), (25, 900)):
        worker.counter("actor.params_bytes", at * SECOND, size)
        worker.span("memory.edge", at * SECOND, at * SECOND + 1000, totals={"used": size, "driver.reserved": 0})
    worker.span("memory.out_of_memory", 26 * SECOND, 26 * SECOND + 10, asked_bytes=5)
    drawn = picture(Recording.open(written.path))
    why = "which failed: ValueError" if is_raised else "which did not end"
    assert [device.moments for device in drawn.devices] == ["step 1", f"step 2, {why}"]
    assert drawn.devices[1].failures == [6.0] and round(drawn.devices[1].used.max() * 2**20) >= 900
    words = memory_image.figure_of(drawn).axes[5].get_children()
    said = {text.get_text() for legend in words if isinstance(legend, Legend) for text in legend.get_texts()}
    assert "out of memory" in said


def test_nothing_of_a_picture_is_cut_off() -> None:
    figure = memory_image.figure_of(shipped(QWEN))
    figure.draw_without_rendering()
    (words,) = figure.axes[2::3]
    for legend in words.get_children():
        if isinstance(legend, Legend):
            box = legend.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0 and box.y1 <= figure.bbox.y1


def test_picture_is_named_after_opened_path(tmp_path: Path) -> None:
    """A picture is named after the folder or the archive that was opened.

    The folder inside an archive may be called anything.
    """
    folder = written_ranks(tmp_path / "recording", [500]).path
    archive = shutil.make_archive(str(tmp_path / "sent by mail"), "zip", tmp_path, folder.name)
    assert picture(Recording.open(archive)).title == "Who holds every byte · sent by mail"
    folder.rename(tmp_path / "of verl")
    assert picture(Recording.open(tmp_path / "of verl")).title == "Who holds every byte · of verl"


def test_overlapping_engines_share_a_band(tmp_path: Path) -> None:
    """Engines of one device that generate at the same time share one band."""
    device = {"host": "node", "uuid": "GPU-1"}
    written = RecordingFile(tmp_path / "run")
    written.process(1, role="driver").thread().span("step", 0, 10 * SECOND, step=0)
    worker = written.process(2, role="worker", rank=0, device=device).thread()
    worker.counter("actor.params_bytes", 1, 5)
    for at in (SECOND // 2, 4 * SECOND, 6 * SECOND):
        worker.span("memory.edge", at, at + 1000, totals={"used": 5, "driver.reserved": 0})
        worker.span("weight_sync", at + 1000, at + SECOND)
    for pid, start, end in ((3, 2 * SECOND, 3 * SECOND), (4, 5 * SECOND // 2, 7 * SECOND // 2)):
        written.process(pid, role="server", device=device).thread().span("rollout.generate", start, end)
    bands = picture(Recording.open(written.path)).devices[0].bands
    assert [(band.name, round(band.start, 3), band.end) for band in bands] == [
        ("weight_sync", 0.5, 1.5), ("rollout.generate", 2, 3.5), ("weight_sync", 4, 5), ("weight_sync", 6, 7)
    ], "those that do not overlap stay apart"  # fmt: skip


def test_verl_device_has_phases_of_both() -> None:
    """A device of verl has the phases of its server and those of its worker."""
    bands = shipped(VERL).devices[0].bands
    (generate,) = [band for band in bands if band.name == "rollout.generate"]
    assert generate.end - generate.start == pytest.approx(2.38, abs=0.01)
    assert [band.name for band in bands][:3] == ["rollout.generate", "rollout.sleep", "actor.old_log_prob"]
    assert len([band for band in bands if band.name == "weight_sync"]) == 3


@pytest.mark.parametrize("says_reserved", [True, False])
def test_kept_step_is_drawn_from_allocations(tmp_path: Path, says_reserved: bool) -> None:
    """A step with every allocation is drawn from its allocations, and its caches are drawn where they are known."""
    written = RecordingFile(tmp_path / "run")
    driver = written.process(1, role="driver").thread()
    for step in (0, 1, 2):
        driver.span("step", step * SECOND, (step + 1) * SECOND, step=step)
    worker = written.process(2, role="worker", rank=0, device={"host": "node", "uuid": "GPU-1"}).thread()
    worker.counter("actor.params_bytes", 1, 100)
    worker.counter("cuda.context_bytes", 1, 50)
    for at in (SECOND // 2, 3 * SECOND // 2, 5 * SECOND // 2):
        worker.span("memory.edge", at, at + 1000, totals={"used": 150, "driver.reserved": 7})
        worker.span("actor.update", at + 1000, at + SECOND // 4)
    worker.span("memory.allocations", SECOND - 10, 2 * SECOND + 10, step=1)
    most = {"allocations.actor.params_bytes": [(SECOND - 10, 100), (2 * SECOND + 10, 0)]}
    # Within a millionth of the step: it shows all the same, and what is left behind it.
    burst = [(SECOND + 100, 30), (SECOND + 200, 900), (SECOND + 300, 40), (SECOND + 400, 20)]
    most["allocations.actor.grads_bytes"] = [(SECOND - 10, 0), *burst, (2 * SECOND + 10, 0)]
    if says_reserved:
        most["allocations.reserved_bytes"] = [(SECOND - 10, 400), (SECOND + 150, 1200), (2 * SECOND + 10, 0)]
    for name, values in most.items():
        for at, value in values:
            worker.counter(name, at, value)
    (device,) = picture(Recording.open(written.path)).devices
    assert device.moments == "step 1, every allocation", "and not step 2, the last one"
    assert [band.name for band in device.bands] == ["actor.update"]
    area = {layer.owner: [round(size * 2**20) for size in layer.area] for layer in device.layers}
    used = [round(size * 2**20) for size in device.used]
    assert area["actor.grads"] == [0, 900, 20, 20] and area["actor.params"] == [100] * 4
    assert area["cuda.context"] == [50] * 4 and area["driver.reserved"] == [7] * 4, "as the edges have them"
    assert [round(at * 1e9) for at in device.seconds] == [0, 200, 400, SECOND]
    if says_reserved:
        assert area["allocator.cached"] == [300, 200, 1080, 1080]
        assert used == [457, 1257, 1257, 1257]
    else:
        assert not any(area.get("allocator.cached", ()))
        assert used == [157, 1057, 177, 177]
    assert ("caches are not drawn" in device.note) != says_reserved


def written_with_part(folder: Path) -> tuple[RecordingFile, Any]:
    """One step of ten seconds, an edge each second; from 3 to 7 s a worker kept its allocations. And its thread."""
    written = RecordingFile(folder)
    written.process(1, role="driver").thread().span("step", 0, 10 * SECOND, step=0)
    worker = written.process(2, role="worker", rank=0, device={"host": "node", "uuid": "GPU-1"}).thread()
    for at in range(10):
        worker.counter("actor.params_bytes", at * SECOND, 100 + at)
        worker.span("memory.edge", at * SECOND, at * SECOND + 1000, totals={"used": 100 + at, "driver.reserved": 0})
    worker.span("memory.allocations", 3 * SECOND, 7 * SECOND, step=0)
    for name, peak in (("actor.params", 500), ("reserved", 500)):
        for at, value in ((3, 103), (5, peak), (6, 106), (7, 0)):
            worker.counter(f"allocations.{name}_bytes", at * SECOND, value)
    return written, worker


def test_kept_part_lies_between_boundaries(
    tmp_path: Path,
) -> None:
    """A part with every allocation is drawn between the step's phase boundaries, and never falls to zero."""
    written, _ = written_with_part(tmp_path / "run")
    (device,) = picture(Recording.open(written.path)).devices
    assert device.moments == "step 0, every allocation from 3.0 to 7.0 s"
    (params,) = [layer for layer in device.layers if layer.owner == "actor.params"]
    shown = [(round(at), round(size * 2**20)) for at, size in zip(device.seconds, params.area, strict=True)]
    assert dict(shown) == {0: 100, 1: 101, 2: 102, 3: 103, 5: 500, 6: 106, 7: 107, 8: 108, 9: 109, 10: 109}
    assert [round(size * 2**20) for size in device.used] == [size for _, size in shown]
    assert (device.seconds[1:] >= device.seconds[:-1]).all()


def test_no_gap_where_last_process_begins(tmp_path: Path) -> None:
    """Where the last process begins to keep its allocations, the total has no gap.

    The engine keeps its allocations from 2 s on, the worker, which holds nearly all bytes, from 3 s on.
    """
    written, _ = written_with_part(tmp_path / "run")
    engine = written.process(3, role="engine", rank=0, device={"host": "node", "uuid": "GPU-1"}).thread()
    engine.span("memory.allocations", 2 * SECOND, 7 * SECOND, step=0)
    for at, value in ((2, 9), (7, 0)):
        engine.counter("allocations.rollout.weights_bytes", at * SECOND, value)
        engine.counter("allocations.reserved_bytes", at * SECOND, value)
    (device,) = picture(Recording.open(written.path)).devices
    assert device.moments == "step 0, every allocation from 3.0 to 7.0 s"
    assert round(min(device.used) * 2**20) == 100


def test_partly_kept_step_uses_boundaries(tmp_path: Path) -> None:
    """A step is drawn from its phase boundaries if one process of the device kept no allocations."""
    written, _ = written_with_part(tmp_path / "run")
    engine = written.process(3, role="engine", rank=0, device={"host": "node", "uuid": "GPU-1"}).thread()
    for at in (1, 9):
        engine.counter("rollout.weights_bytes", at * SECOND, 1000)
        engine.span("memory.edge", at * SECOND, at * SECOND + 1000)
    (device,) = picture(Recording.open(written.path)).devices
    assert device.moments == "step 0"
    (weights,) = [layer for layer in device.layers if layer.owner == "rollout.weights"]
    assert weights.area.max() * 2**20 == 1000


def test_unknown_rows_are_named() -> None:
    """Unknown rows are named, whether or not the total is known."""
    known = summary_of(QWEN).memory[0]
    assert "not drawn" not in _note(known)
    refused = replace(known, unknown={"cuda.context": "NVML: No Permission", "nccl": "NVML: No Permission"})
    assert _note(refused) == f"{_note(known)}; unknown here, so not drawn: cuda.context, nccl"
    assert _note(replace(refused, residual=None)) == "unknown here, so not drawn: cuda.context, nccl"


def test_caption_has_torchs_peak() -> None:
    """The caption says what torch counted between the samples."""
    known = summary_of(QWEN).memory[0]
    assert "torch" not in _note(known), "nobody counted then"
    size_bytes = 3 << 29
    peak = AllocatedPeak(
        process="rank 0 worker", bytes=size_bytes, at_most_bytes=size_bytes, at_seconds=1, step=1, phase="actor.update",
        at_peak_bytes={"actor.params": size_bytes},
    )  # fmt: skip
    said = "by torch's own count rank 0 worker had 1.50 GiB at once in actor.update, between samples too"
    assert _note(replace(known, allocated_peaks=[peak])) == f"{_note(known)}; {said}"


@pytest.mark.usefixtures("one_browser")
@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
def test_html_shows_bytes_at_pointer(tmp_path: Path) -> None:
    """The HTML shows the bytes at the pointer, and an owner alone that is clicked, without the internet."""
    file = tmp_path / "memory.html"
    file.write_bytes(shipped_as(".html"))
    assert file.stat().st_size < 300_000
    (device,) = shipped(QWEN).devices
    with browser_page(1320, 1100) as page:
        asked: list[str] = []
        errors: list[Any] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108  # it wants a Python function
        page.goto(file.as_uri())
        left, top, right, bottom = page.evaluate(PLACE, "area_box")
        page.mouse.move(left + 0.75 * (right - left), (top + bottom) / 2)
        at_moment = page.evaluate(SAID)
        left, top, right, bottom = page.evaluate(PLACE, "bars_box")
        page.mouse.move(left + (right - left) * 0.94, (top + bottom) / 2)
        at_bar = page.evaluate(SAID)
        page.click('[id="owner:actor.optimizer"]', force=True)
        bright = page.evaluate("[...new Set(owners.filter(o => !o.classList.contains('dim')).map(o => o.id))]")
        colors = page.evaluate("Object.fromEntries(devices[0].layers.map(layer => [layer.owner, layer.color]))")
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    place = int(np.flatnonzero(device.seconds <= 0.75 * device.seconds[-1])[-1])
    assert at_moment["used, in all"] == f"{device.used[place]:.3f}".rstrip("0").rstrip(".") + " GiB"
    (grads,) = (layer for layer in device.layers if layer.owner == "actor.grads")
    assert at_bar["title"] == "actor.update"
    assert float(at_bar["actor.grads"].removesuffix(" GiB")) == pytest.approx(grads.bars[-1], abs=0.001)
    assert bright == ["owner:actor.optimizer"]
    assert colors == {owner: OWNER_COLORS[owner] for owner in colors} and len(colors) > 8


PLACE = """(box) => {
    const {left, top, width, height} = picture.getBoundingClientRect();
    const [x0, y0, x1, y1] = devices[0][box];
    return [left + x0 * width, top + y0 * height, left + x1 * width, top + y1 * height];
}"""
SAID = """Object.fromEntries([['title', said.firstChild.textContent],
    ...[...said.querySelectorAll('tr')].map((row) => [row.cells[0].textContent, row.cells[1].textContent])])"""


@pytest.mark.usefixtures("one_browser")
@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
def test_a_phase_has_the_colour_of_the_timeline(tmp_path: Path) -> None:
    """As Perfetto's UI draws it."""
    phases = ("rollout.generate", "actor.old_log_prob", "ref.log_prob", "actor.update", "weight_sync")
    thread = RecordingFile(tmp_path / "run").process(rank=0).thread()
    for number, phase in enumerate(phases):
        thread.span(phase, 100 * number, 100 * number + 90, phase=True)
    thread.span("step", 500, 590, step=4)
    take(tmp_path / "run", tmp_path / "timeline.png", whole=True)
    shown = (imread(tmp_path / "timeline.png")[..., :3] * 255).round().astype(int).reshape(-1, 3)
    found = {"#{:02x}{:02x}{:02x}".format(*color) for color in np.unique(shown, axis=0)}
    names = (*phases, "step 4")
    assert {name: slice_color(name) for name in names if slice_color(name) not in found} == {}


def test_the_svg_and_the_png_are_pictures() -> None:
    svg = shipped_as(".svg").decode()
    assert svg.count(OWNER_COLORS["rollout.kv_cache"]) >= 5, "an area, bars and a legend"
    assert (
        "http" not in re.sub(r'(xmlns|xlink|rdf|dc|cc)[:\w]*="[^"]*"|<!DOCTYPE[^>]*>', "", svg).partition("<defs>")[2]
    )
    assert shipped_as(".png").startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("moments", ["step 1, every allocation", "step 1234, every allocation from 1234.1 to 2345.6 s"])
def test_long_titles_do_not_overlap(tmp_path: Path, moments: str) -> None:
    """A long title does not run into the one beside it."""
    written, _ = written_with_part(tmp_path / "run")
    drawn = picture(Recording.open(written.path))
    (device,) = drawn.devices
    name = "rank 0 · GPU-2a4c231e-7087-7460-8227-451fa473f363"
    figure = memory_image.figure_of(drawn._replace(devices=[device._replace(name=name, moments=moments)]))
    figure.draw_without_rendering()
    area, bars = (axes.get_title(loc="left") and axes._left_title.get_window_extent() for axes in figure.axes[:2])
    assert area.x1 < bars.x0


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_pictures_are_reproducible(suffix: str) -> None:
    """The same Recording gives the same picture, byte for byte."""
    assert drawn_as(suffix, opened(QWEN)) == shipped_as(suffix)


def test_suffix_chooses_the_format(tmp_path: Path) -> None:
    """The suffix of the file chooses the format, and an unknown suffix is refused in one line."""
    run = written_ranks(tmp_path / "run", [500]).path

    def export(name: str) -> Result:
        return CliRunner().invoke(main, ["export", str(run), "--to", "memory", "-o", str(tmp_path / name)])

    assert export("memory.svg").exit_code == 0
    assert (tmp_path / "memory.svg").read_text().startswith("<?xml")
    refused = export("memory.gif")
    assert refused.exit_code != 0
    assert refused.stderr.strip().endswith("a picture of memory is a file of .html, .svg, .png; name one with -o")
    assert len(refused.stderr.strip().splitlines()) == 1


def test_a_recording_without_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(OutputError, match="nothing to draw"):
        Memory().write(Recording.open(tmp_path), (tmp_path / "out").open("wb"))


@pytest.mark.parametrize(("suffix", "library"), [(".html", "matplotlib"), (".png", "matplotlib")])
def test_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, library: str) -> None:
    """A library that is not installed is named, with the command that installs it."""
    for module in [name for name in sys.modules if name.startswith(("rltrace_exporters.memory_", library))]:
        if not module.endswith("picture"):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    recording = Recording.open(written_ranks(tmp_path / "run", [500]).path)
    with pytest.raises(
        MissingExtraError, match=rf"needs {library}.*, which is not installed here: pip install .*\[pictures\]"
    ):
        drawn_as(suffix, recording)

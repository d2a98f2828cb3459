"""Takes the pictures of the timeline and of the report anew, from the shipped Recordings: `python docs/pictures.py`.

Needs a Chromium on this machine. Pictures of Recordings that are not shipped stay as they are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/exporters"))

from screenshot import browser_page, shared_browser, take  # noqa: E402

QWEN = ROOT / "examples/recordings/qwen3_8b_4gpu.zip"
VERL = ROOT / "examples/recordings/verl_8b_4gpu.zip"
STREAMS = ("rank 0 worker · vm", "gpu stream 5")
"""The first and the last row of a worker's threads and its GPU."""


def take_all(folder: Path) -> None:
    """Take each picture."""
    take_report(VERL, folder / "report_verl.png")
    take_timeline(QWEN, folder / "first_look_after.png")
    take_timeline(VERL, folder / "first_look_after_verl.png")
    take_timeline(QWEN, folder / "qwen3_8b_4gpu.png", size=(1600, 1110))
    take_timeline(VERL, folder / "verl_8b_4gpu.png", size=(1600, 1960))
    take_timeline(QWEN, folder / "qwen3_8b_streams.png", size=(1600, 3000), step=2, rows=STREAMS)


def take_report(run: Path, picture: Path) -> None:
    """Take a picture of what the report says of one step."""
    with tempfile.TemporaryDirectory() as scratch, browser_page(1280, 900) as page:
        report = Path(scratch) / "report.html"
        command = [sys.executable, "-m", "rltrace", "report", str(run.relative_to(ROOT)), "-o", str(report)]
        subprocess.run(command, cwd=ROOT, check=True)
        page.goto(report.as_uri())
        page.locator("section#step").screenshot(path=picture)


def take_timeline(run: Path, picture: Path, **shown: Any) -> None:
    """Take a picture of the timeline, with 256 colours: a third of the bytes, and no difference that one sees."""
    take(run, picture, **shown)
    few_colors = Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few_colors.save(picture, optimize=True)


if __name__ == "__main__":
    with shared_browser():
        take_all(Path(__file__).with_name("images"))

"""What the live view costs: seconds of one processor per second of the run that it watches, reading and drawing.

    python tests/bench/live.py --ranks 8 --steps 2

A Recording is made of the records of a real one (`tests/scale/made_recording.py`), and written again piece by piece, as
much each time as its processes wrote in a second. Only the watcher's processor time counts.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scale"))

from made_recording import Wanted, make
from rich.console import Console

from rltrace.analysis.live import Live
from rltrace.cli.tables.live import Heading, LiveScreen
from rltrace.read.following import Follower
from rltrace.read.recording import Recording
from rltrace.read.records import whole_bytes

STEP_SECONDS = 9.86
"""Of the real run."""
SEGMENT_BYTES = 1 << 20
LONGEST_BYTES = 4096
"""A record is shorter."""


class Growing:
    """A Recording that is written again."""

    def __init__(self, finished: Path, folder: Path) -> None:
        self.folder = folder
        (folder / "processes").mkdir(parents=True)
        for file in finished.glob("*.json*"):
            shutil.copy(file, folder)
        self.processes = []
        for process in (finished / "processes").iterdir():
            to = folder / "processes" / process.name
            to.mkdir()
            lines = (process / "process.jsonl").read_text().splitlines(keepends=True)
            (to / "process.jsonl").write_text("".join(line for line in lines if '"kind": "end"' not in line))
            shutil.copy(process / "counts.u64", to)
            segments = sorted(process.glob("*.seg"))
            self.processes.append((to, segments, sum(file.stat().st_size for file in segments)))

    def grow(self, parts: int) -> Iterator[None]:
        """Write one of so many equal parts of each process."""
        writers = [self._write(*process, parts) for process in self.processes]
        for _ in range(parts):
            for writer in writers:
                next(writer)
            yield

    def _write(self, to: Path, segments: list[Path], size_bytes: int, parts: int) -> Iterator[None]:
        left = iter(segments)
        content, at, path = b"", 0, to
        for part in range(parts):
            due = size_bytes * (part + 1) // parts - size_bytes * part // parts
            while due:
                if at == len(content):
                    segment = next(left, None)
                    if segment is None:
                        break
                    content, at, path = segment.read_bytes(), 0, to / segment.name
                    with path.open("wb") as file:
                        file.truncate(SEGMENT_BYTES)
                many = whole_bytes(content[at : at + max(due, LONGEST_BYTES)]) if due < len(content) - at else 0
                many = min(many or len(content) - at, len(content) - at)
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(content[at : at + many])
                at, due = at + many, max(0, due - many)
            yield


def main() -> None:
    """Print what the view costs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two pictures")
    parser.add_argument("--thin", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        finished, parts = Path(folder) / "made", round(asked.steps * STEP_SECONDS / asked.every)
        many = make(finished, Wanted(asked.ranks, asked.steps, is_thin=asked.thin))
        growing = Growing(finished, Path(folder) / "growing")
        live = Live(Follower(Recording.open(growing.folder)))
        console = Console(width=200, height=60, force_terminal=True, file=io.StringIO())
        spent, first, pictures = [0.0, 0.0], 0.0, 0
        for _ in growing.grow(parts):
            began = time.process_time()
            live.poll()
            read = time.process_time()
            now = live.now()
            console.print(LiveScreen(now, Heading("x", "12:00:00", 1, is_screen=True), None, ""))
            spent[0] += read - began
            spent[1] += time.process_time() - read
            if not pictures:  # it learns of all processes
                first, spent = sum(spent), [0.0, 0.0]
            pictures += 1
        later = (pictures - 1) * asked.every
        seconds = pictures * asked.every
        written = sum(process[2] for process in growing.processes)
        print(
            f"{asked.ranks:,} ranks, {len(growing.processes):,} processes, {many / seconds:,.0f} records/s, "
            f"{written / seconds / 1e6:.2f} MB/s, a picture every {asked.every:g} s: "
            f"{first:.2f} s of a processor for the first one, then {spent[0] / later:.1%} of one to read and "
            f"{spent[1] / later:.1%} to draw; "
            f"{live.follower.bytes_read / written:.2f} bytes read per byte written"
        )


if __name__ == "__main__":
    main()

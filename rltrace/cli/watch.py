"""`rltrace summary --watch` shows what a run does now, until it ends.

A terminal gets a screen of its own, which is drawn anew; a file or a pipe gets one picture after the other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from rltrace.cli.completion import RUNS
from rltrace.cli.echo import echo
from rltrace.host.pace import Pace
from rltrace.limits import Limits
from rltrace.record import manifest

if TYPE_CHECKING:
    from rich.console import Console

    from rltrace.analysis.findings import Why
    from rltrace.analysis.live import Live, Now
    from rltrace.cli.tables.live import Findings
    from rltrace.read.recording import Recording

EVERY_SECONDS = 1.0
"""How often there is a new picture, if that costs little."""

MOST_BUSY = 0.5
"""Share of one processor that reading and drawing may take; with more to read there are fewer pictures."""

SELDOM_SECONDS = 30.0
"""There is a picture at least this often, whatever it costs."""

LOOK_SECONDS = 0.3
"""How often it is looked whether a run has begun."""

PAST_SEGMENTS = 64
"""About so many closed segments of a run that has gone on are read, all processes together; its past is not shown."""

MOST_FOUND_BYTES = 256 << 20
"""Findings are computed from the whole Recording: of one with more segments than this, at its end only."""

FOUND_SHARE = 0.05
"""Share of the time in which findings are computed, beside this process."""


def watch(run: str | None, limits: Limits) -> Recording | None:
    """Show what a run does until it ends.

    Args:
        run: Its folder; None: the run that goes on in `rltrace-runs`, else the next one there.
        limits: What is read without a question.

    Returns:
        The Recording, if it has ended; None if the user ended the view before.

    Raises:
        RecordingError: it cannot be read.
    """
    from rltrace.analysis.live import Live
    from rltrace.cli.tables import console
    from rltrace.read.following import Follower

    # When the terminal is closed or this process is told to end, the terminal is put back first.
    with contextlib.suppress(KeyboardInterrupt), _at(["SIGTERM", "SIGHUP"], lambda number: sys.exit(128 + number)):
        recording = _begun(run, limits)
        if recording.folder != recording.path:  # an archive does not change
            return recording
        many = sum(1 for _ in (recording.folder / manifest.PROCESSES).glob("*/"))
        live = Live(Follower(recording, newest_segments=max(1, PAST_SEGMENTS // max(1, many))))
        wake = threading.Event()
        with _picture(console(), wake) as show, _Finder(recording) as finder:
            _follow(live, finder, show, wake)
        return recording
    return None


class Show(Protocol):
    """Shows a picture."""

    def __call__(self, now: Now, path: str, every_seconds: float, finder: _Finder) -> None:
        """Draw it over the one before, or print it."""


def _follow(live: Live, finder: _Finder, show: Show, wake: threading.Event) -> None:
    """Show one picture after the other until the run is over."""
    every_seconds = EVERY_SECONDS
    while True:
        began, began_cpu = time.monotonic(), time.process_time()
        live.poll()
        if live.follower.is_over:
            return
        now = live.now()
        finder.look(now)
        show(now, str(live.follower.recording.path), every_seconds, finder)
        needed_seconds = (time.process_time() - began_cpu) / MOST_BUSY
        every_seconds = min(max(EVERY_SECONDS, needed_seconds), SELDOM_SECONDS)
        while (left := began + every_seconds - time.monotonic()) > 0:
            if wake.wait(left):  # the terminal has another size
                wake.clear()
                show(live.now(), str(live.follower.recording.path), every_seconds, finder)


# ---- which run ----------------------------------------------------------------------------------------------------


def _begun(run: str | None, limits: Limits) -> Recording:
    """Return the run; wait until it begins."""
    from rltrace.read.recording import Recording

    is_told = False
    while True:
        folder = Path(run) if run is not None else _going_on()
        if folder is not None and (folder.is_file() or (folder / manifest.FILE).exists()):
            return Recording.open(folder, limits)
        if not is_told:
            where = f"{folder}: no run has begun here" if folder is not None else f"{RUNS}/: no run is going on here"
            echo(f"rltrace: {where}; it is shown once it begins. Ctrl-C ends.", err=True)
            is_told = True
        time.sleep(LOOK_SECONDS)


def _going_on() -> Path | None:
    """Return the newest run that goes on."""
    made = sorted(RUNS.glob(f"*/{manifest.FILE}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    return next((file.parent for file in made if manifest.is_live(file.parent)), None)


# ---- pictures -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _picture(console: Console, wake: threading.Event) -> Iterator[Show]:
    """Give what shows a picture: on a screen of its own if there is a terminal, which is put back at the end."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda *what: console.print(_drawn(*what, is_screen=False), "")
        return
    from rich.live import Live as Screen

    screen = Screen(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def show(now: Now, path: str, every_seconds: float, finder: _Finder) -> None:
        picture = _drawn(now, path, every_seconds, finder, is_screen=True)
        with _uninterrupted():
            screen.update(picture, refresh=True)

    with _at(["SIGWINCH"], lambda _: wake.set()), _at(["SIGTSTP"], lambda _: _stop(screen)):
        try:
            with _uninterrupted():
                screen.start()
            yield show
        finally:
            with _uninterrupted():
                screen.stop()


def _drawn(now: Now, path: str, every_seconds: float, finder: _Finder, *, is_screen: bool) -> Any:
    from rltrace.cli.tables.live import Heading, LiveScreen

    heading = Heading(path, time.strftime("%H:%M:%S"), every_seconds, is_screen)
    return LiveScreen(now, heading, finder.found, finder.why_not)


@contextlib.contextmanager
def _at(names: Iterable[str], act: Callable[[int], object]) -> Iterator[None]:
    """Act at these signals, of which this system may lack some, with the number of each."""
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda number, _: act(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(screen: Any) -> None:
    """Give the terminal back while this process is stopped by Ctrl-Z."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a second one wants the same
    with _uninterrupted():
        screen.stop()
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
    with _uninterrupted():
        screen.start(refresh=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let signals that stop or end this process arrive after what is done to the terminal.

    Rich collects what it writes: a handler that runs in the middle would write into that, and stop before it is out.
    """
    came: list[int] = []
    try:
        with _at(("SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP"), came.append):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


# ---- findings -----------------------------------------------------------------------------------------------------


class _Finder:
    """Has findings computed by `rltrace why`, in a process of its own that gives way to the run."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.found: Findings | None = None
        self.why_not = ""
        """Why there are none yet."""
        self._running: subprocess.Popen[bytes] | None = None
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the view ends
        self._began = 0.0
        self._pace = Pace(FOUND_SHARE)
        self._steps = -1

    def __enter__(self) -> _Finder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()
        self._out.close()

    def look(self, now: Now) -> None:
        """Take what was found, and begin anew if a step has ended since."""
        if self._running is not None:
            if self._running.poll() is None:
                return
            self._take(self._running.returncode == 0)
            self._running = None
        over = [step.number for step in now.steps if step.is_over]
        if len(over) < 2:
            self.why_not = "after the second step"
        elif over[-1] != self._steps and self._pace.is_due:
            self._begin(over[-1])

    def _begin(self, step: int) -> None:
        size_bytes = sum(file.stat().st_size for file in self.recording.folder.glob(f"{manifest.PROCESSES}/*/*.seg"))
        if size_bytes > MOST_FOUND_BYTES:
            self.why_not = f"this Recording is large: `rltrace why {self.recording.path}` computes them"
            return
        self._began, self._steps = time.monotonic(), step
        self.why_not = "being computed"
        command = [sys.executable, "-m", "rltrace", "why", "--json", str(self.recording.path)]
        self._out.seek(0)
        self._out.truncate()
        lowest = ["nice", "-n", "19"] if shutil.which("nice") else []
        try:
            self._running = subprocess.Popen(
                [*lowest, *command], stdin=subprocess.DEVNULL, stdout=self._out, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            self.why_not = f"`rltrace why` cannot be started: {error.strerror or error}"

    def _take(self, is_done: bool) -> None:
        from rltrace.analysis.findings import Why
        from rltrace.cli.tables import figures
        from rltrace.cli.tables.live import Findings

        self._pace.took(time.monotonic() - self._began)
        self._out.seek(0)
        try:
            why: Why = msgspec.json.decode(self._out.read(), type=Why)
        except (ValueError, TypeError):
            is_done = False
        if not is_done:
            self.why_not = f"`rltrace why {self.recording.path}` failed"
            return
        self.found = Findings(why, time.strftime("%H:%M:%S"), figures.ranges(why.steps))

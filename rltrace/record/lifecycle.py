"""Starts, pauses and stops the recording of this process."""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rltrace.host import clock
from rltrace.host.interruption import own_failure, suppress_own
from rltrace.record import chosen_steps, cluster, manifest, redaction, spans
from rltrace.record.announcement import complain, say, say_once
from rltrace.record.cluster import DIR_VARIABLE, HOOKS_VARIABLE, PARENT_VARIABLE
from rltrace.record.process import process_key
from rltrace.record.writer import Recorder

_switches: list[Callable[[bool], None]] = []
_endings: list[Callable[[], None]] = []


def start(
    folder: str | os.PathLike[str] | None = None,
    *,
    role: str = "main",
    rank: int | None = None,
    device: Mapping[str, Any] | None = None,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> Path | None:
    """Record this process from here on.

    Processes that name the folder of a run that is still going on join it. A folder that holds a finished Recording is
    left alone: a numbered folder beside it is used, and a line on stderr says so.

    Args:
        folder: Folder of the Recording; `rltrace-runs/<time>` by default. It is ignored under `rltrace exec`, where
            `RLTRACE_DIR` is set, and if this process records already: that folder is used, and a line on stderr says
            so.
        role: What this process is: "main", "driver", "worker", "engine".
        rank: Rank of its device in the run.
        device: {"host": ..., "uuid": ...} of the device it works on.
        name: What a reader calls it if it has no rank.
        config: Configuration of the run, kept in the manifest with secrets redacted.
        max_bytes: Bound on what this process keeps; when it is reached, the oldest records are dropped and counted. A
            process that records already, as under `rltrace exec`, keeps to it from its next segment on. A forked child
            has the same bound for what it records itself; any other child has the one that it gives itself.

    A value of the wrong type is ignored, and a line on stderr says so.

    Returns:
        The folder; None if recording is impossible, with one line on stderr that says why, or if `RLTRACE_OFF` is set.
        Never raises.
    """
    if cluster.is_off():
        return None
    who = {"role": role, "rank": rank, "device": device, "name": name}
    if (recorder := spans.current()) is not None:
        identify(**{key: value for key, value in who.items() if value is not None and (key, value) != ("role", "main")})
        recorder.keep_to(max_bytes)
        _say_where(folder, recorder.recording, rank)
        return recorder.recording
    start_ns = clock.now_ns()
    try:
        inherited = os.environ.get(DIR_VARIABLE)
        key = process_key(start_ns)
        recording = _inherited(config, key) if inherited else _claim(folder, config, key)
        if inherited:
            _say_where(folder, recording, rank)
    except own_failure() as error:
        complain(f"not recording: {error}")
        return None
    return join(recording, start_ns=start_ns, max_bytes=max_bytes, **who)


def join(
    recording: str | os.PathLike[str], *, start_ns: int | None = None, max_bytes: int | None = None, **who: Any
) -> Path | None:
    """Record this process into a Recording that another process made.

    Args:
        recording: Folder of the Recording.
        start_ns: When this process began to record; now by default.
        max_bytes: As for `start`.
        **who: role, rank, device and name of this process.

    Returns:
        The folder; None if recording is impossible, with one line on stderr, or if `RLTRACE_OFF` is set. Never raises.
    """
    if cluster.is_off():
        return None
    if (recorder := spans.current()) is not None:
        recorder.keep_to(max_bytes)
        return recorder.recording
    try:
        path = Path(recording).absolute()
        recorder = Recorder(path, start_ns=start_ns, max_bytes=max_bytes, when_open=_stop_at_exit, **who)
    except own_failure() as error:
        complain(f"not recording: {recording} cannot be written: {error}")
        return None
    spans.record_with(recorder)
    chosen_steps.follow(recorder)
    return path


def stop() -> None:
    """End this process's part of the Recording. Spans that are still open stay open in it. Never raises."""
    if spans.current() is not None:
        for ending in _endings:
            ending()
    recorder = spans.current()
    spans.record_with(None)
    if recorder is None:
        return
    chosen_steps.forget()
    atexit.unregister(stop)
    if os.environ.get(PARENT_VARIABLE) == recorder.key:
        os.environ.pop(DIR_VARIABLE, None)
        os.environ.pop(PARENT_VARIABLE, None)
        os.environ.pop(HOOKS_VARIABLE, None)
    try:
        recorder.close()
    except own_failure() as error:
        complain(f"the end of this process could not be written to {recorder.recording}: {error}")


def identify(**who: Any) -> None:
    """Say more about this process: role, rank, device, name. Never raises.

    Args:
        **who: As for `start`; a value of the wrong type is ignored, and a line on stderr says so.
    """
    if (recorder := spans.current()) is not None:
        recorder.identify(**who)


def unavailable(what: str, reason: str) -> None:
    """Record why this process cannot measure something."""
    if (recorder := spans.current()) is not None:
        recorder.append("unavailable", what=what, reason=redaction.text(reason))


def pause() -> None:
    """Record nothing in this process until `resume`; its hooks stay in place and do nothing.

    The Recording says from when to when. A span that is open now and ends meanwhile stays open in it.
    """
    recorder = spans.current()
    if recorder is None or not spans.is_recording():
        return
    recorder.append("pause", ts_ns=clock.now_ns())
    spans.hold(True)
    for switch in _switches:
        switch(False)


def resume() -> None:
    """Continue recording after `pause`."""
    recorder = spans.current()
    if recorder is None or spans.is_recording():
        return
    for switch in _switches:
        switch(True)
    spans.hold(False)
    recorder.append("resume", ts_ns=clock.now_ns())


def when_switched(switch: Callable[[bool], None]) -> None:
    """Call `switch(False)` at every `pause` and `switch(True)` at every `resume` of this process."""
    _switches.append(switch)


def when_stopped(ending: Callable[[], None]) -> Callable[[], None]:
    """Call `ending` when this process stops recording, while it still records; it must not raise. Returns what undoes
    this."""
    _endings.append(ending)
    return lambda: _endings.remove(ending)


def _inherited(config: Mapping[str, Any] | None, owner: str) -> Path:
    """Return the Recording that the environment names; the first process of a user's run makes it, as `start` does."""
    recording = cluster.recording_here(os.environ)
    began_elsewhere = os.environ.get(PARENT_VARIABLE) or os.environ.get(cluster.RUN_ID_VARIABLE)
    return recording if began_elsewhere else _claim(recording, config, owner)


def _claim(folder: str | os.PathLike[str] | None, config: Mapping[str, Any] | None, owner: str) -> Path:
    """Return the folder to record into: made, joined if its run goes on, or numbered if it belongs to another run."""
    wanted = Path(folder) if folder is not None else default_folder()
    for path in itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2))):
        try:
            manifest.create(path, owner=owner, command=sys.orig_argv, config=config)
        except FileExistsError:
            if not manifest.is_live(path):
                continue
        if path != wanted:
            say(f"{wanted} holds another run already; recording into {path}")
        return path
    raise AssertionError("unreachable: the numbers do not end")


def _say_where(named: str | os.PathLike[str] | None, recording: Path, rank: int | None) -> None:
    """Say where this process records if its program named another folder; of several ranks only the first says so."""
    if named is None or rank:
        return
    with suppress_own(Exception):  # a name that is none, or a working directory that is gone
        # On another host than the run's its folder is not the one that records.
        used = {os.path.abspath(folder) for folder in (recording, os.environ.get(DIR_VARIABLE, recording))}
        if os.path.abspath(named) not in used:
            say_once(f"recording into {recording}, because this process belongs to that run, and not into {named}")


def default_folder() -> Path:
    """Return `rltrace-runs/` with the time to the second."""
    return Path("rltrace-runs") / time.strftime("%Y%m%d-%H%M%S")


def _after_fork_in_child() -> None:
    spans.forget_threads()  # first
    if (recorder := spans.current()) is not None:
        recorder.forget_parent()


_is_bequeathed = False


def _stop_at_exit() -> None:
    """Stop at exit. Children of multiprocessing do not run atexit's functions when they exit; they run its
    finalizers."""
    global _is_bequeathed
    atexit.register(stop)
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None:
        return
    _finalize(None)
    if not _is_bequeathed:  # a child begins by forgetting all finalizers, those too that its own main module made
        util.register_after_fork(stop, _finalize)
        _is_bequeathed = True


def _finalize(_: object) -> None:
    from multiprocessing.process import parent_process
    from multiprocessing.util import Finalize

    if parent_process() is not None:
        Finalize(None, stop, exitpriority=-100)


if hasattr(os, "register_at_fork"):  # readers run where nothing forks
    os.register_at_fork(after_in_child=_after_fork_in_child)

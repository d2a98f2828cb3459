"""What every test can count on: nothing is recorded before it and nothing after it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

import rltrace
from rltrace.events import Span
from rltrace.read.recording import Process, Recording
from rltrace.record import cluster, native, spans

os.environ.setdefault("RAY_TMPDIR", "/tmp")  # short: the clusters of the tests' own programs hold Unix sockets there
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # a process per CPU that no actor of ours ever uses
os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15 other tests starve its workers
for library in ("OMP", "OPENBLAS"):  # threads of small computations wait for each other in loops, on all processors
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

OWN_PROCESS = "TEST_IN_ITS_OWN_PROCESS"
"""Set in the process of a test that has one of its own."""

# readline, which pytest loads, says 80 and 24 of no terminal: its workers would have that, and all that they start.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
    os.unsetenv(name)


def pytest_configure(config: pytest.Config) -> None:
    """Background jobs are deaf to Ctrl-C, those of `nohup` to SIGHUP: so would be what the tests start and signal."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import settings

        settings.register_profile("rltrace", deadline=None)  # how long an example takes is the machine's load
        settings.load_profile("rltrace")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where pytest-xdist runs files side by side, one that takes long must not be the last, with nobody beside it."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        runs = Counter(item.path for item in items if "run" in item.keywords)
        items.sort(key=lambda item: -runs[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the test files bring stays to the end: no garbage collection looks through it, no forked child copies it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that wants a process of its own in another pytest."""
    if pyfuncitem.get_closest_marker("own_process") is None or OWN_PROCESS in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    environment = {**os.environ, OWN_PROCESS: "1"}
    done = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture(autouse=True)
def no_recorder_survives(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that leaves a recorder behind fails itself, not the one after it."""
    for variable in (cluster.DIR_VARIABLE, cluster.PARENT_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    assert spans.current() is None
    yield
    leaked = spans.current()
    rltrace.stop()
    assert leaked is None, f"the test leaves a recorder of {leaked.recording} behind" if leaked else ""


@pytest.fixture(params=["native", "plain"])
def recording_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Records in C, and in Python."""
    if request.param == "plain":
        spans.record_by(*spans.PLAIN)
        monkeypatch.setattr(rltrace, "counter", spans.counter)
    elif native.LIBRARY is None:
        pytest.skip("the library is not built: make native")
    yield request.param
    spans.record_by(*spans.FASTEST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a Recording can be made."""
    return tmp_path / "run"


@pytest.fixture
def process_of() -> Callable[[Path], Process]:
    """Reads the only process of a Recording."""

    def read(path: Path) -> Process:
        (process,) = Recording.open(path).processes
        return process

    return read


@pytest.fixture
def spans_of() -> Callable[..., list[Span]]:
    """Reads the spans of a Recording's processes, in the order of their beginning."""

    def read(path: Path, name: str | None = None, **identity: Any) -> list[Span]:
        spans = [
            event
            for process in Recording.open(path).processes
            if all(process.identity.get(key) == value for key, value in identity.items())
            for event in process.events()
            if isinstance(event, Span) and name in (None, event.name)
        ]
        return sorted(spans, key=lambda span: span.start_ns)

    return read


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """The file with the limit on memory of a control group of the kernel's, version 1 or 2."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"rltrace-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            yield group / limit
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no control group with a limit on memory can be made here: that needs root, and cgroup's memory")

"""The runs that a program has open, in the trackers that it has imported; nothing is imported here.

Read and called: W&B 0.31 (`wandb.run`, `Run.log`, `Run.define_metric`), MLflow 3.17 (`active_run`,
`MlflowClient.log_batch`), TensorBoard 2.21 and tensorboardX 2.6 (`EventFileWriter.add_event`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Protocol
from weakref import WeakSet, ref

from rltrace.record.trackers import PREFIX, STEP_NUMBER


class OpenRun(Protocol):
    """A run of a tracker."""

    name: str
    """Of the tracker."""
    tracked: Any
    """What the program closes when the run is over: a run of W&B, the id of one of MLflow, the writer of a file."""

    def log(self, number: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of a step."""


class WandbRun:
    """A run of W&B. The program's own steps there are left as they are: ours come with the next row that it logs."""

    name = "W&B"

    def __init__(self, run: Any) -> None:
        self.tracked = run

    def log(self, number: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars to the row that the program will log next, on an axis of their own."""
        if self.tracked not in _WITH_AXIS:
            _WITH_AXIS.add(self.tracked)
            self.tracked.define_metric(STEP_NUMBER, hidden=True)
            self.tracked.define_metric(f"{PREFIX}*", step_metric=STEP_NUMBER, step_sync=False)
        self.tracked.log({STEP_NUMBER: number, **scalars}, commit=False)

    def closes(self) -> None:
        """Give what waits for the program's next row a row of its own: there is no next one, and W&B may drop it."""
        if self.tracked in _WITH_AXIS:
            self.tracked.log({}, commit=True)


_WITH_AXIS: WeakSet[Any] = WeakSet()
"""Runs of W&B that know which axis our scalars are on."""


class MlflowRun:
    """A run of MLflow, whose metrics each have steps of their own."""

    name = "MLflow"

    def __init__(self, mlflow: Any, run_id: str) -> None:
        self._mlflow = mlflow
        self.tracked = run_id

    def log(self, number: int, scalars: Mapping[str, float]) -> None:
        """Log the scalars at the step's number."""
        client, now_ms = self._mlflow.MlflowClient(), int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        client.log_batch(self.tracked, [metric(name, value, now_ms, number) for name, value in scalars.items()])


class EventFile:
    """An event file for TensorBoard, whose scalars each have steps of their own.

    Args:
        writer: TensorBoard's own, or that of tensorboardX.
        name: Of the package.
        protos: The package's module of messages: a writer takes its own alone.
    """

    def __init__(self, writer: Any, name: str, protos: str) -> None:
        self.name = name
        self.tracked = writer
        self._protos = protos

    def log(self, number: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars at the step's number; a file that was closed is left alone."""
        event_pb2, summary_pb2 = (import_module(f"{self._protos}.{part}_pb2") for part in ("event", "summary"))
        values = [summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = event_pb2.Event(wall_time=time.time(), step=number, summary=summary_pb2.Summary(value=values))
        try:
            self.tracked.add_event(event)
        except Exception:
            forget_file(self.tracked)
            raise


EVENT_FILES: list[ref[Any]] = []
"""The writers of event files that the program has made and not closed, the first one first."""


def forget_file(writer: Any) -> None:
    """Forget a writer that was closed, and those that nobody has any more."""
    EVENT_FILES[:] = [known for known in EVENT_FILES if known() is not None and known() is not writer]


def _of_wandb() -> OpenRun | None:
    run = getattr(sys.modules.get("wandb"), "run", None)
    return None if run is None else WandbRun(run)


def active_run_of_mlflow() -> MlflowRun | None:
    """Return the run that is active in MLflow."""
    mlflow = sys.modules.get("mlflow")
    active = getattr(mlflow, "active_run", None)
    run = None if active is None else active()
    return None if run is None else MlflowRun(mlflow, run.info.run_id)


def _of_event_files(name: str, protos: str) -> OpenRun | None:
    package = protos.partition(".")[0]
    for known in EVENT_FILES:
        writer = known()
        if writer is not None and type(writer).__module__.partition(".")[0] == package:
            return EventFile(writer, name, protos)
    return None


FINDERS: tuple[Callable[[], OpenRun | None], ...] = (
    _of_wandb,
    active_run_of_mlflow,
    partial(_of_event_files, "TensorBoard", "tensorboard.compat.proto"),
    partial(_of_event_files, "tensorboardX", "tensorboardX.proto"),
)


def find_runs() -> list[OpenRun]:
    """Return the runs that are open now, of each tracker one."""
    found = (find() for find in FINDERS)
    return [run for run in found if run is not None]

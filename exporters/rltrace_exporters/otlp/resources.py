"""Who sends: one resource for each process of a run, and one for the run."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from rltrace.read.recording import Process, Recording

SERVICE = "rltrace"
"""The service's name, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another."""

ENGINES = ("vllm", "sglang")
"""Packages whose engines answer requests, in the order in which they are looked for."""


class Source:
    """A process of a Recording, as a resource."""

    def __init__(self, process: Process, run_id: str, offset_ns: int) -> None:
        self.key = process.key
        self.offset_ns = offset_ns
        """What to add to its times to get nanoseconds since 1970."""
        self.run_id = run_id
        self.has_steps = False
        """Whether it has recorded a step."""
        self.last_ns = process.start_ns
        """The last time that anything in it has, on its own time line."""
        self.resource = Resource.get_empty()
        self.update(process, offset_ns)

    def update(self, process: Process, offset_ns: int) -> None:
        """Take over what the process has said of itself since."""
        self.role, self.rank, self.name = process.role, process.rank, process.name
        self.offset_ns = offset_ns
        self.start_ns = process.start_ns + offset_ns
        self.killed_by = process.killed_by
        self.over_ns = process.end_ns if process.end_ns is not None else process.gone_ns
        self.engine = next((name for name in ENGINES if any(_is_of(hook, name) for hook in process.hooks)), None)
        said = _attributes(process, self.run_id)
        if said != dict(self.resource.attributes):
            self.resource = _named().merge(Resource(said))

    @property
    def end_ns(self) -> int:
        """When it ended, or was last heard of, in nanoseconds since 1970."""
        return max(self.over_ns or 0, self.last_ns) + self.offset_ns


def of_run(recording: Recording) -> Resource:
    """Return the resource of what no process did alone."""
    said = {
        "service.instance.id": recording.manifest["run_id"],
        "host.name": str(recording.manifest.get("host", "unknown")),
        "rltrace.run.id": recording.manifest["run_id"],
    }
    return _named().merge(Resource(said))


def _named() -> Resource:
    return Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())


def _attributes(process: Process, run_id: str) -> dict[str, Any]:
    said: dict[str, Any] = {
        "service.instance.id": process.key,
        "host.name": process.host,
        "process.pid": process.pid,
        "rltrace.run.id": run_id,
        "rltrace.process.name": process.name,
        "rltrace.process.role": process.role,
    }
    if process.identity.get("python"):
        said |= {"process.runtime.name": "cpython", "process.runtime.version": str(process.identity["python"])}
    if process.rank is not None:
        said["rltrace.rank"] = process.rank
    if process.world_size is not None:
        said["rltrace.world_size"] = process.world_size
    if process.device_uuid is not None:
        said["rltrace.gpu.uuid"] = process.device_uuid
    # A damaged line may have half of a pair of surrogates, which is no text elsewhere.
    return {
        key: value.encode(errors="replace").decode() if isinstance(value, str) else value for key, value in said.items()
    }


def _is_of(hook: dict[str, Any], engine: str) -> bool:
    return str(hook.get("instrumentation", "")).split("_")[0] == engine and bool(hook.get("fired"))

"""What a trainer asks of SGLang's scheduler: weights, sleep and wake-up.

Source read: SGLang 0.4.6 to 0.5.23; 0.5.12 was run.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from rltrace.events import wake_up_of
from rltrace.hooks import boundaries
from rltrace.hooks.arguments import argument
from rltrace.hooks.bucket_flow import flow_key
from rltrace.hooks.patching import PatchSet, end_span, nothing_after, nothing_before
from rltrace.instrument.sglang.buckets import Keys, handles_of
from rltrace.instrument.torch.tensor_sizes import announced_bytes, tensor_bytes
from rltrace.record import spans

MODEL_RUNNER = "sglang.srt.model_executor.model_runner"
WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
UNWRAP = "_unwrap_tensor"
"""Gives the tensor of a handle: in the model runner's module, or its weight updater's since a release after 0.5.14."""
LOAD_FLATTENED = "_update_weights_from_flattened_bucket"
"""A method of the class that loads: it gets one tensor that holds a bucket."""
LOAD_ADAPTER = "load_lora_adapter_from_tensors"
"""A method of the model runner."""


def place_of_loads() -> tuple[str, str]:
    """Return the module and the class of what loads an update in the release that is installed."""
    has_moved = not hasattr(importlib.import_module(MODEL_RUNNER), UNWRAP)
    return (WEIGHT_UPDATER, "WeightUpdater") if has_moved else (MODEL_RUNNER, "ModelRunner")


class ControlRequests:
    """The sleeps, wake-ups and updates of one scheduler, each from its request to its end."""

    def __init__(self) -> None:
        self._keys = Keys()
        self._arrived: list[int] | None = None
        """The bytes of each tensor of the update under way."""
        self.is_scheduler = False
        """Whether this process is a scheduler: the server, and a controller of several, have dispatchers too."""

    def name_loads(self, patches: PatchSet) -> None:
        """Name the hooks on what brings an update's tensors in this release."""
        module, owner = place_of_loads()
        patches.around(f"{module}:{UNWRAP}", nothing_before, self.count_unwrapped)
        for place, class_name, method, count in (
            (module, owner, LOAD_FLATTENED, self.count_flattened),
            (MODEL_RUNNER, "ModelRunner", LOAD_ADAPTER, self.count_adapter),
        ):
            if hasattr(getattr(importlib.import_module(place), class_name), method):
                patches.around(f"{place}:{class_name}.{method}", count, nothing_after)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Open the span of a control request, and tell of the boundary of a phase; other requests have no span."""
        if not self.is_scheduler:
            return None
        request = argument("obj", 1, args, kwargs)
        kind = type(request).__name__
        source = source_of(kind)
        if source is not None:
            return (), self._begin_update(request, source)
        tags = list(getattr(request, "tags", None) or ())
        name = phase_of(kind, tags)
        if name is None:
            return None
        boundaries.reached(boundaries.Boundary((name,), is_end=False))
        return (name,), spans.phase(name, tags=tags).__enter__()

    def end(self, token: Any, _result: Any, error: BaseException | None) -> None:
        """Close the span."""
        if token is None:
            return
        names, opened = token
        arrived, self._arrived = self._arrived, None
        if arrived:
            opened.set(bytes=sum(arrived), tensors=len(arrived))
        end_span(opened, None, error)
        if names:
            boundaries.reached(boundaries.Boundary(names, error=error))

    def count_unwrapped(self, _token: Any, tensor: Any, error: BaseException | None) -> None:
        """Count a tensor of the update that has come."""
        if error is None:
            self._count([tensor_bytes(tensor)])

    def count_flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a bucket that has come as one tensor, with a list of what is in it."""
        bucket = argument("flattened_tensor_bucket_dict", 1, args, kwargs)
        element_bytes = bucket["flattened_tensor"].element_size()
        self._count(part.numel * element_bytes for part in bucket["metadata"])

    def count_adapter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tensors of a LoRA adapter that have come."""
        tensors = argument("tensors", 2, args, kwargs)
        self._count([tensor_bytes(tensor) for tensor in tensors.values()])

    def _count(self, sizes: Iterable[int]) -> None:
        if self._arrived is not None:
            self._arrived += sizes

    def _begin_update(self, request: Any, source: str) -> Any:
        """Open the span of an update; an update of tensors is a bucket, which somebody sent."""
        self._arrived = sizes_told(request)
        handles = handles_of(request)
        if handles is None:
            return spans.automatic_span("weight_sync.load", source=source).__enter__()
        key = self._keys.of(handles)
        opened = spans.automatic_span("weight_sync.load", source=source, bucket=key).__enter__()
        spans.flow(flow_key(key), "in")
        return opened


def phase_of(request: str, tags: list[str]) -> str | None:
    """Return the phase that a request of this class begins; `tags` are the pools that it names, none for all."""
    if request == "ReleaseMemoryOccupationReqInput":
        return "rollout.sleep"
    if request == "ResumeMemoryOccupationReqInput":
        return wake_up_of(tags)
    return None


def source_of(request: str) -> str | None:
    """Return where the weights of a request come from: "tensor", "disk", "lora" ...; None if it brings none."""
    kind = request.removesuffix("ReqInput")
    if kind == request:  # an answer to one, which the server hands on
        return None
    if kind.startswith(("UpdateWeightFrom", "UpdateWeightsFrom")):
        return kind.partition("From")[2].lower()
    return "lora" if kind.startswith("LoadLoRAAdapter") else None


def sizes_told(request: Any) -> list[int]:
    """Return the bytes of each tensor of a broadcast update, by its request's shapes and dtypes, or an empty list."""
    dtypes, shapes = getattr(request, "dtypes", None) or (), getattr(request, "shapes", None) or ()
    return announced_bytes(dtypes, shapes)

"""The three tables of what can be plugged in. Adding an instrumentation, an exporter or a finding is one file and one
line here.

Other distributions add theirs by the entry-point groups `rltrace.instrumentations`, `rltrace.exporters` and
`rltrace.findings`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

INSTRUMENTATIONS = {
    "fsdp2": "rltrace.instrument.torch.fsdp2:Fsdp2",
    "fsdp1": "rltrace.instrument.torch.fsdp1:Fsdp1",
    "torch_distributed": "rltrace.instrument.torch.distributed:TorchDistributed",
    "torch_optim": "rltrace.instrument.torch.optim:TorchOptim",
    "torch_autograd": "rltrace.instrument.torch.autograd:TorchAutograd",
    "torch_models": "rltrace.instrument.torch.models:TorchModels",
    "torch_collectives": "rltrace.instrument.torch.collectives:TorchCollectives",
    "transformers": "rltrace.instrument.transformers:Transformers",
    "peft": "rltrace.instrument.peft:Peft",
    "cuda_time": "rltrace.instrument.torch.cuda_time:CudaTime",
    "cuda_memory": "rltrace.instrument.memory.cuda_memory:CudaMemory",
    "allocations": "rltrace.instrument.memory.allocation_owners:Allocations",
    "chosen_allocations": "rltrace.instrument.memory.chosen_allocations:ChosenAllocations",
    "chosen_loop_steps": "rltrace.instrument.torch.chosen_loop_steps:ChosenLoopSteps",
    "chosen_kernels": "rltrace.instrument.torch.chosen_kernels:ChosenKernels",
    "ray": "rltrace.instrument.ray:Ray",
    "opentelemetry": "rltrace.instrument.opentelemetry:OpenTelemetry",
    "opentelemetry_sdk": "rltrace.instrument.opentelemetry:OpenTelemetrySdk",
    "ray_context": "rltrace.instrument.opentelemetry.ray_calls:RayContext",
    "requests_context": "rltrace.instrument.opentelemetry.http:RequestsContext",
    "httpx_context": "rltrace.instrument.opentelemetry.http:HttpxContext",
    "aiohttp_context": "rltrace.instrument.opentelemetry.http:AiohttpContext",
    "python_gc": "rltrace.instrument.python_gc:PythonGc",
    "vllm": "rltrace.instrument.vllm.engine:Vllm",
    "vllm_calls": "rltrace.instrument.vllm.calls:VllmCalls",
    "vllm_context": "rltrace.instrument.opentelemetry.vllm_requests:VllmContext",
    "vllm_allocations": "rltrace.instrument.vllm.allocations:VllmAllocations",
    "sglang": "rltrace.instrument.sglang.scheduler:Sglang",
    "sglang_calls": "rltrace.instrument.sglang.calls:SglangCalls",
    "sglang_allocations": "rltrace.instrument.sglang.allocations:SglangAllocations",
    "torch_memory_saver": "rltrace.instrument.torch_memory_saver:TorchMemorySaver",
    "trl": "rltrace.instrument.trl:Trl",
    "trackers": "rltrace.instrument.trackers:Trackers",
    "tensorboard": "rltrace.instrument.trackers:Tensorboard",
    "tensorboardx": "rltrace.instrument.trackers:TensorboardX",
    "wandb": "rltrace.instrument.trackers:Wandb",
    "verl": "rltrace.instrument.verl:Verl",
    "openrlhf": "rltrace.instrument.openrlhf:OpenRlhf",
    "areal": "rltrace.instrument.areal:AReaL",
    "skyrl": "rltrace.instrument.skyrl:SkyRl",
    "reference": "rltrace.instrument.reference.phases:Reference",
    "reference_memory": "rltrace.instrument.reference.memory:ReferenceMemory",
}
"""Name -> "module:Class"; installed in this order."""

DISABLE_VARIABLE = "RLTRACE_DISABLE"
"""Environment variable with the names of instrumentations to leave out, separated by commas."""

EXPORTERS = {
    "perfetto": "rltrace_exporters.perfetto:Perfetto",
    "memory": "rltrace_exporters.memory:Memory",
    "parquet": "rltrace_exporters.parquet:Parquet",
    "archive": "rltrace_exporters.archive:Archive",
    "otlp": "rltrace_exporters.otlp.exporter:Otlp",
    "prometheus": "rltrace_exporters.prometheus:Prometheus",
}
"""Name -> "module:Class"."""

FINDINGS = {
    "wide_weights": "rltrace.analysis.findings.wide_weights:judge",
    "garbage_collection": "rltrace.analysis.findings.garbage_collection:judge",
    "uneven_engines": "rltrace.analysis.findings.uneven_engines:judge",
    "uneven_batches": "rltrace.analysis.findings.uneven_batches:judge",
    "rollout_tail": "rltrace.analysis.findings.rollout_tail:judge",
    "slow_host": "rltrace.analysis.findings.slow_host:judge",
    "slow_rank": "rltrace.analysis.findings.slow_rank:judge",
    "launch_bound": "rltrace.analysis.findings.launch_bound:judge",
    "slow_clocks": "rltrace.analysis.findings.slow_clocks:judge",
    "offloaded_layers": "rltrace.analysis.findings.offloaded_layers:judge",
    "small_micro_batches": "rltrace.analysis.findings.small_micro_batches:judge",
    "exposed_collectives": "rltrace.analysis.findings.exposed_collectives:judge",
    "sender_waits": "rltrace.analysis.findings.sender_waits:judge",
    "one_by_one": "rltrace.analysis.findings.one_by_one:judge",
    "sync_in_no_stage": "rltrace.analysis.findings.sync_in_no_stage:judge",
    "requests_outside": "rltrace.analysis.findings.requests_outside:judge",
    "slow_tools": "rltrace.analysis.findings.slow_tools:judge",
    "driver_phases": "rltrace.analysis.findings.driver_phases:judge",
    "unlabelled_work": "rltrace.analysis.findings.unlabelled_work:judge",
    "between_phases": "rltrace.analysis.findings.between_phases:judge",
    "slow_steps": "rltrace.analysis.findings.slow_steps:judge",
    "checkpoints_and_validation": "rltrace.analysis.findings.occasional:judge",
    "first_step": "rltrace.analysis.findings.first_step:judge",
    "startup": "rltrace.analysis.findings.startup:judge",
    "kv_cache": "rltrace.analysis.findings.kv_cache:judge",
    "nearly_full": "rltrace.analysis.findings.nearly_full:judge",
    "planned_settings": "rltrace.analysis.findings.planned_settings:judge",
    "memory_grows": "rltrace.analysis.findings.memory_grows:judge",
    "sleep_leaves": "rltrace.analysis.findings.sleep_leaves:judge",
    "allocator_cache": "rltrace.analysis.findings.allocator_cache:judge",
    "allocator_fragments": "rltrace.analysis.findings.allocator_fragments:judge",
    "busy_processors": "rltrace.analysis.findings.busy_processors:judge",
}
"""Name -> "module:function" of a `Run` of rltrace/analysis/findings."""


def instrumentations() -> dict[str, str]:
    """Return our instrumentations and those of other distributions, name -> "module:Class"."""
    return INSTRUMENTATIONS | _entry_points("rltrace.instrumentations")


def exporters() -> dict[str, str]:
    """Return our exporters and those of other distributions, name -> "module:Class"."""
    return EXPORTERS | _entry_points("rltrace.exporters")


def findings() -> dict[str, str]:
    """Return our findings and those of other distributions, name -> "module:function"."""
    return FINDINGS | _entry_points("rltrace.findings")


def load(reference: str) -> Any:
    """Return the object that "module:Class" names."""
    module, _, attr = reference.partition(":")
    return getattr(importlib.import_module(module), attr)


def _entry_points(group: str) -> dict[str, str]:
    return {entry.name: entry.value for entry in _all_entry_points(tuple(sys.path)).select(group=group)}


@functools.lru_cache(maxsize=4)
def _all_entry_points(_path: tuple[str, ...]) -> Any:
    """Look for them once for each path, for it reads a file of each distribution."""
    # Imported here: a laptop's `import rltrace` should not pay its 24 ms.
    from importlib.metadata import entry_points

    return entry_points()

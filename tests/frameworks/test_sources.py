"""Every hook against the real source of every release that it says it knows, where importing that would need a GPU.

Read by ast: that a target is there, with the parameters that its hook reads, and the attributes that it reads of them.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from environments import RELEASES
from packaging.version import Version

from rltrace import plugins
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.versions import unmet_support
from rltrace.instrument.sglang import control
from rltrace.instrument.sglang import scheduler as sglang

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
ALLOCATOR = "vllm.device_allocator.cumem:CuMemAllocator"
FSDP = "torch.distributed.fsdp"

PARAMETERS = {
    f"{SCHEDULER}.update_from_output": ["self", "scheduler_output"],
    f"{SCHEDULER}.add_request": ["self", "request"],
    f"{SCHEDULER}._free_request": ["self", "request"],
    f"{ALLOCATOR}.sleep": ["self", "offload_tags"],
    f"{ALLOCATOR}.wake_up": ["self", "tags"],
    "sglang.srt.managers.scheduler:Scheduler.run_batch": ["self", "batch"],
    "sglang.srt.managers.scheduler:Scheduler.process_batch_result": ["self", "batch", "result"],
    "sglang.utils:TypeBasedDispatcher.__call__": ["self", "obj"],
    "torch_memory_saver.entrypoint:TorchMemorySaver.pause": ["self", "tag"],
    "torch_memory_saver.entrypoint:TorchMemorySaver.resume": ["self", "tag"],
    f"{FSDP}._flat_param:FlatParamHandle._all_gather_flat_param": ["self"],
    f"{FSDP}._runtime_utils:_share_state_and_init_handle_attrs": ["root_state", "root_module"],
    f"{FSDP}._runtime_utils:_reduce_grad": ["state", "handle"],
    f"{FSDP}._runtime_utils:_pre_backward_hook": ["state", "module", "handle"],
    f"{FSDP}._runtime_utils:_post_backward_hook": ["state", "handle"],
    f"{FSDP}._runtime_utils:_post_backward_final_callback": ["state", "module"],
    f"{FSDP}._fully_shard._fsdp_collectives:foreach_all_gather": ["fsdp_params", "group"],
    f"{FSDP}._fully_shard._fsdp_collectives:foreach_reduce": ["fsdp_params", "unsharded_grads", "reduce_scatter_group"],
    f"{FSDP}._fully_shard._fsdp_state:FSDPState._pre_backward": ["self"],
    f"{FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward": ["self"],
}
"""The first parameters of a target, by the names and in the order that its hook reads them; others it reads none of."""

ATTRIBUTES = {
    "vllm": {
        SCHEDULER: ["running", "waiting", "kv_cache_manager"],
        "vllm.v1.core.kv_cache_manager:KVCacheManager": ["usage"],
        "vllm.v1.core.sched.output:SchedulerOutput": ["total_num_scheduled_tokens", "scheduled_new_reqs"],
        "vllm.v1.core.sched.output:NewRequestData": ["req_id"],
        "vllm.v1.request:Request": ["request_id", "num_prompt_tokens", "num_output_tokens", "status"],
        "vllm.v1.request:RequestStatus": ["PREEMPTED"],
        ALLOCATOR: ["instance", "pointer_to_data"],
        "vllm.device_allocator.cumem:AllocationData": ["handle", "tag", "cpu_backup_tensor"],
    },
    "sglang": {
        "sglang.srt.managers.scheduler:Scheduler": ["waiting_queue"],
        "sglang.srt.managers.schedule_batch:ScheduleBatch": ["batch_size", "forward_mode", "extend_num_tokens", "reqs"],
        "sglang.srt.managers.schedule_batch:Req": ["finished"],
        "sglang.srt.model_executor.forward_batch_info:ForwardMode": ["is_extend"],
        "sglang.srt.managers.io_struct:ReleaseMemoryOccupationReqInput": [],
        "sglang.srt.managers.io_struct:ResumeMemoryOccupationReqInput": [],
        "sglang.srt.managers.io_struct:UpdateWeightsFromTensorReqInput": ["serialized_named_tensors"],
        "sglang.srt.managers.io_struct:UpdateWeightsFromDistributedReqInput": [],
        "sglang.srt.managers.io_struct:UpdateWeightFromDiskReqInput": [],
    },
    "torch_memory_saver": {
        "torch_memory_saver.entrypoint:TorchMemorySaver": ["_impl"],
        "torch_memory_saver.entrypoint:_TorchMemorySaverImpl": ["_mem_pools", "_binary_wrapper"],
    },
    "fsdp1": {
        f"{FSDP}._flat_param:FlatParamHandle": ["flat_param", "world_size"],
        f"{FSDP}._flat_param:FlatParameter": ["_num_params"],
    },
    "fsdp2": {
        f"{FSDP}._fully_shard._fsdp_state:FSDPState": ["_modules", "_training_state", "_fsdp_param_group"],
        f"{FSDP}._fully_shard._fsdp_param_group:FSDPParamGroup": ["fsdp_params", "_module_fqn"],
        f"{FSDP}._fully_shard._fsdp_param:FSDPParam": ["_param_fqn", "sharded_param"],
        f"{FSDP}._fully_shard._fsdp_collectives:AllGatherResult": ["all_gather_output"],
    },
}
"""What the hooks of an instrumentation read of the objects they are given, by their class."""

INSTRUMENTATIONS = {"vllm": "vllm", "sglang": "sglang", "torch_memory_saver": "torch_memory_saver"}
INSTRUMENTATIONS |= {"fsdp1": "torch", "fsdp2": "torch"}
"""Of which package's releases each is checked."""

every_release = pytest.mark.parametrize(
    ("name", "version"),
    [(name, version) for name, package in INSTRUMENTATIONS.items() for version in RELEASES[package]],
)


class Source:
    """The Python files of one release."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str) -> ast.Module:
        path = self.folder.joinpath(*name.split("."))
        return _parse(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))

    def find(self, target: str) -> ast.AST | None:
        """The definition that `module:Class.attr` names, through imports and base classes of the release itself."""
        module, _, path = target.partition(":")
        first, *rest = path.split(".")
        found = _definition(self.module(module).body, first)
        if found is None and (origin := _imported_from(self.module(module), module, first)) is not None:
            return self.find(f"{origin}:{path}")
        for attr in rest:
            assert found is None or isinstance(found, ast.ClassDef), target
            found = None if found is None else self._attribute(module, found, attr)
        return found

    def _attribute(self, module: str, owner: ast.ClassDef, attr: str) -> ast.AST | None:
        own = _definition(owner.body, attr)
        if own is not None:
            return own
        bases = [base.id for base in owner.bases if isinstance(base, ast.Name)]
        return next((found for base in bases if (found := self._inherited(module, base, attr)) is not None), None)

    def _inherited(self, module: str, base: str, attr: str) -> ast.AST | None:
        try:
            return self.find(f"{module}:{base}.{attr}")
        except (FileNotFoundError, AssertionError):  # of another package
            return None

    def has_attribute(self, target: str, attr: str) -> bool:
        """Whether a class defines an attribute, or a method of it sets one of its object."""
        if self.find(f"{target}.{attr}") is not None:
            return True
        sets = (node for node in ast.walk(self.find(target)) if isinstance(node, ast.Attribute))
        return any(node.attr == attr for node in sets)


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _definition(body: list[ast.stmt], name: str) -> ast.AST | None:
    """The last definition of a name in a body, that under an `if` too."""
    found: ast.AST | None = None
    for node in body:
        if name in _names_defined(node):
            found = node
        elif isinstance(node, ast.If | ast.Try):
            found = _definition(node.body + node.orelse, name) or found
    return found


def _names_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    assigned = (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    )
    return [target.id for target in assigned if isinstance(target, ast.Name)]


def _imported_from(tree: ast.Module, module: str, name: str) -> str | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            parents = module.split(".")[: -node.level] if node.level else []
            return ".".join([*parents, *filter(None, [node.module])])
    return None


class Rows:
    """Where hooks report to; nobody reads it."""

    def hook(self, *_args, **_kwargs):
        return self

    def fired(self):
        pass


def targets(name: str) -> list[str]:
    """What an instrumentation hooks."""
    instrumentation = plugins.load(plugins.INSTRUMENTATIONS[name])()
    patches = PatchSet(name, Rows(), ("msgspec < 0",))  # binds nothing, whatever is installed
    instrumentation.install(patches)
    return [hook.target for hook in patches.hooks]


def test_every_parameter_named_here_is_of_a_hook():
    hooked = {target for name in INSTRUMENTATIONS for target in targets(name)}
    # FSDP2's collectives are hooked where they are called, and defined elsewhere.
    assert {target for target in PARAMETERS if "_fsdp_collectives" not in target} <= hooked


@every_release
def test_targets_have_their_parameters(name, version, sources):
    """Each target of a hook exists, and has the parameters that the hook reads."""
    source = Source(sources / f"{INSTRUMENTATIONS[name]}-{version}")
    for target in targets(name):
        found = source.find(target)
        assert isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef), f"{target} is not in {source.folder.name}"
        defined = next((key for key in PARAMETERS if key.endswith(":" + target.partition(":")[2])), target)
        wanted = PARAMETERS.get(defined, [])
        parameters = [argument.arg for argument in (*found.args.posonlyargs, *found.args.args)]
        assert parameters[: len(wanted)] == wanted, f"{target} of {source.folder.name}"


@every_release
def test_attributes_exist(name, version, sources):
    """Each attribute that a hook reads exists."""
    source = Source(sources / f"{INSTRUMENTATIONS[name]}-{version}")
    for owner, attributes in ATTRIBUTES[name].items():
        assert isinstance(source.find(owner), ast.ClassDef), f"{owner} is not in {source.folder.name}"
        missing = [attr for attr in attributes if not source.has_attribute(owner, attr)]
        assert not missing, f"{owner} of {source.folder.name}"


@every_release
def test_release_is_supported(name, version, monkeypatch):
    """The release is one that the instrumentation supports."""
    monkeypatch.setattr("importlib.metadata.version", lambda _package: version)
    assert unmet_support(plugins.load(plugins.INSTRUMENTATIONS[name]).supports) is None


@pytest.mark.parametrize("version", RELEASES["sglang"])
def test_moved_parts_of_sglang_are_found(version, sources):
    """What SGLang has moved is where its hook looks for it."""
    source = Source(sources / f"sglang-{version}")
    runner = control.MODEL_RUNNER
    has_moved = source.find(f"{runner}:{control.UNWRAP}") is None
    where, owner = (control.WEIGHT_UPDATER, "WeightUpdater") if has_moved else (runner, "ModelRunner")
    assert isinstance(source.find(f"{where}:{control.UNWRAP}"), ast.FunctionDef)
    for phase, names in sglang.STARTUP:
        there = [name for name in names if source.find(f"{runner}:ModelRunner.{name}") is not None]
        assert len(there) == 1, f"{phase} of {source.folder.name}"
    release = Version(version).release
    flattened = source.find(f"{where}:{owner}.{control.LOAD_FLATTENED}")
    assert (flattened is not None) == (release >= (0, 5)), source.folder.name
    adapter = source.find(f"{runner}:ModelRunner.{control.LOAD_ADAPTER}")
    assert (adapter is not None) == (release >= (0, 5, 8)), source.folder.name
    for method, wanted in (
        (flattened, ["self", "flattened_tensor_bucket_dict"]),
        (adapter, ["self", "lora_ref", "tensors"]),
    ):
        assert method is None or [argument.arg for argument in method.args.args][: len(wanted)] == wanted


@pytest.mark.parametrize("version", RELEASES["sglang"])
def test_sglang_scheduler_knows_its_name(version, sources):
    """A scheduler of SGLang is given what its name is made of."""
    begins = Source(sources / f"sglang-{version}").find(f"{sglang.SCHEDULER}:run_scheduler_process")
    wanted = {"server_args", "gpu_id", "tp_rank", "pp_rank", "dp_rank"}
    assert wanted <= {argument.arg for argument in begins.args.args}


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_vllm_tells_preempted_requests(version, sources):
    """vLLM names the requests that it preempts, or gives them a status."""
    source = Source(sources / f"vllm-{version}")
    named = source.has_attribute("vllm.v1.core.sched.output:SchedulerOutput", "preempted_req_ids")
    assert named == (tuple(map(int, version.split("."))) >= (0, 12))
    scheduler = ast.unparse(source.find(SCHEDULER))
    assert ("preempted_req_ids=" if named else "status = RequestStatus.PREEMPTED") in scheduler


def test_a_target_that_moved_is_found_to_have(sources):
    source = Source(sources / "vllm-0.26.0")
    assert source.find(f"{SCHEDULER}.schedule") is not None
    assert source.find(f"{SCHEDULER}.schedule_elsewhere") is None
    assert not source.has_attribute(SCHEDULER, "no_such_attribute")

"""Every hook against the real source of every release that was read, where importing that would need a GPU.

That a target is there, with the parameters and the attributes that its hook reads; and that what ships is what the last
release has.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from digests import FILE, last_releases, parameters_read, read_all, written
from environments import RELEASES
from packaging.version import Version
from release import Releases, releases_in

from rltrace import plugins
from rltrace.hooks.sources import Parameters, Source
from rltrace.hooks.versions import package_with, unmet_support
from rltrace.instrument.sglang import control
from rltrace.instrument.sglang import scheduler as sglang
from rltrace.instrument.sglang.speculation import RIGHT
from rltrace.instrument.vllm.engine import SCHEDULER
from rltrace.instrument.vllm.speculation import SPECULATORS

IN_C = ("torch.distributed.distributed_c10d:ProcessGroup.", "torch.distributed:_Backend.")
"""Targets that have no source."""

NOT_YET = {
    ("cuda_time", "2.11.0"): ("SymmMemAllGather.__call__", "SymmMemReduceScatter.__call__"),
    ("vllm", "0.8.5"): ("base_loader:initialize_model",),
    ("ray", "2.41.0"): ("_inject_tracing_into_class",),
}
"""Targets that a release does not have, whose hooks are skipped there."""


def package_of(name: str) -> str | None:
    """The package that an instrumentation is about; None if it is ours or Python's."""
    supports = plugins.load(plugins.INSTRUMENTATIONS[name]).supports
    package = package_with(supports[0].split()[0]) if supports else ""
    return package if package in RELEASES else None


def supported(name: str) -> Iterator[tuple[str, str]]:
    """The releases that were read of an instrumentation's package, as far as it supports them."""
    package = package_of(name)
    least = plugins.load(plugins.INSTRUMENTATIONS[name]).supports[0].rpartition(" ")[2] if package else ""
    return ((name, version) for version in RELEASES.get(package or "", ()) if Version(version) >= Version(least))


every_release = pytest.mark.parametrize(
    ("name", "version"), [release for name in plugins.INSTRUMENTATIONS for release in supported(name)]
)


@pytest.fixture
def release(sources: Path):
    """Makes the releases of all packages, the last ones but for that of one."""
    return lambda package, version: releases_in(sources, last_releases() | {package: version})


def function(source: Source, target: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The definition of a function."""
    found = source.find(target)
    return found if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) else None


def hooked(releases: Releases, name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each target of an instrumentation's own package that has a source, with the attributes that its hook reads."""
    patches = releases.hooks(name)
    for hook in patches.hooks:
        if hook.target.partition(":")[0].partition(".")[0] == package_of(name) and not hook.target.startswith(IN_C):
            yield hook.target, patches.reads.get(hook.target, ())


@every_release
def test_targets_are_there(name: str, version: str, release) -> None:
    """Every target is in the release, with the parameters that its hook reads, at their places."""
    releases = release(package_of(name), version)
    patches = releases.hooks(name)
    for target, _ in hooked(releases, name):
        if target.endswith(NOT_YET.get((name, version), "no such")):
            continue
        assert function(releases.source, target) is not None, f"{target} is not in {version}"
        parameters_read(releases, patches, target)


@every_release
def test_attributes_are_there(name: str, version: str, release) -> None:
    """Every attribute that a hook says it reads is there."""
    releases = release(package_of(name), version)
    reads = {attribute for _, attributes in hooked(releases, name) for attribute in attributes}
    of_source = [attribute for attribute in reads if releases.source.has(attribute.partition(":")[0])]
    assert [attribute for attribute in of_source if not releases.source.has_attribute(attribute)] == []


@every_release
def test_release_is_supported(name: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The instrumentation supports the release, by strict versions too."""
    monkeypatch.setenv("RLTRACE_STRICT_VERSIONS", "1")
    monkeypatch.setattr("importlib.metadata.version", lambda _package: version)
    supports = plugins.load(plugins.INSTRUMENTATIONS[name]).supports[:1]
    assert unmet_support(supports, last_releases()) is None


def test_digests_are_current(sources: Path) -> None:
    """What ships is what the last releases have: after a change of hooks or of releases, `make digests`."""
    assert FILE.read_text() == written(read_all(releases_in(sources, last_releases())))


@pytest.mark.parametrize("version", RELEASES["sglang"])
def test_moved_in_sglang(version: str, release) -> None:
    """What has moved in SGLang is where its hook looks for it."""
    source = release("sglang", version).source
    runner = control.MODEL_RUNNER
    has_moved = function(source, f"{runner}:{control.UNWRAP}") is None
    where, owner = (control.WEIGHT_UPDATER, "WeightUpdater") if has_moved else (runner, "ModelRunner")
    assert function(source, f"{where}:{control.UNWRAP}") is not None
    for phase, names in sglang.STARTUP:
        there = [name for name in names if source.find(f"{runner}:ModelRunner.{name}") is not None]
        assert len(there) == 1, phase
    flattened = function(source, f"{where}:{owner}.{control.LOAD_FLATTENED}")
    assert (flattened is not None) == (Version(version).release >= (0, 5))
    adapter = function(source, f"{runner}:ModelRunner.{control.LOAD_ADAPTER}")
    assert (adapter is not None) == (Version(version).release >= (0, 5, 8))


@pytest.mark.parametrize("version", RELEASES["sglang"])
def test_sglang_scheduler_is_told_its_name(version: str, release) -> None:
    """A scheduler of SGLang is told what its name is made of."""
    begins = function(release("sglang", version).source, f"{sglang.SCHEDULER}:run_scheduler_process")
    assert begins is not None
    assert {"server_args", "gpu_id", "tp_rank", "pp_rank", "dp_rank"} <= set(Parameters.of(begins).by_place)


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_vllm_says_who_is_preempted(version: str, release) -> None:
    """vLLM names preempted requests, or gives them a status."""
    source = release("vllm", version).source
    named = source.has_attribute("vllm.v1.core.sched.output:SchedulerOutput.preempted_req_ids")
    assert named == (Version(version).release >= (0, 12))
    scheduler = ast.unparse(source.find(SCHEDULER))
    assert ("preempted_req_ids=" if named else "status = RequestStatus.PREEMPTED") in scheduler


def methods_that_guess(folder: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """What the newer model runner of a release of vLLM may guess by, as targets, with their definitions."""
    for file in sorted(folder.glob("vllm/v1/worker/gpu/spec_decode/**/*.py")):
        module = ".".join(file.relative_to(folder).with_suffix("").parts)
        for owner in ast.parse(file.read_text()).body:
            for method in owner.body if isinstance(owner, ast.ClassDef) else ():
                is_guess = isinstance(method, ast.FunctionDef) and method.name == "propose"
                if is_guess and "abstractmethod" not in map(ast.unparse, method.decorator_list):
                    yield f"{module}:{owner.name}.propose", method


@pytest.mark.parametrize("version", RELEASES["vllm"])
def test_vllm_says_of_what_it_guesses(version: str, sources: Path) -> None:
    """A guess of the newer model runner says whether it is about nothing, since a warm-up makes such guesses."""
    found = dict(methods_that_guess(sources / f"vllm-{version}"))
    assert bool(found) == (Version(version).release >= (0, 12))
    for target, method in found.items():
        assert ("dummy_run" in Parameters.of(method).by_place) == (Version(version).release >= (0, 17)), target


def test_every_speculator_is_known(sources: Path) -> None:
    """Of the last release of vLLM all that it may guess by has a digest."""
    assert set(dict(methods_that_guess(sources / f"vllm-{RELEASES['vllm'][-1]}"))) == set(SPECULATORS)


@pytest.mark.parametrize("version", RELEASES["sglang"])
def test_sglang_counts_right_guesses(version: str, release) -> None:
    """A request of SGLang counts its right guesses by one of the known names, or by none in the first releases."""
    source = release("sglang", version).source
    there = [name for name in RIGHT if source.has_attribute(f"sglang.srt.managers.schedule_batch:Req.{name}")]
    assert len(there) == (Version(version).release >= (0, 5, 9))


def test_moved_target_is_missed(release) -> None:
    """A target that has moved is not found, nor an attribute that nobody sets."""
    source = release("vllm", "0.26.0").source
    assert function(source, f"{SCHEDULER}.schedule") is not None
    assert source.find(f"{SCHEDULER}.schedule_elsewhere") is None
    assert not source.has_attribute(f"{SCHEDULER}.no_such_attribute")

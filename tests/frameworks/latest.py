"""Installs the newest release of each framework into an environment of its own, and says what has moved in it.

    python tests/frameworks/latest.py FOLDER [ENVIRONMENT ...]

Each is looked at twice: its sources against what ships, without an import; and in its environment, where every hook is
put around what is imported there. The exit code is 1 if a hook is skipped for what has changed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from environments import ROOT, make_environment
from release import Releases, Rows, with_driver

from rltrace import plugins
from rltrace.events import UNVERIFIED
from rltrace.hooks import binding
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.sources import Parameters, digest
from rltrace.run.probe import import_targets

TESTED = ["--constraint", str(ROOT / "constraints.txt")]
"""What a framework is built on is of the releases that the other tests use, where it is not looked at itself."""

ENVIRONMENTS = {
    "torch": (["torch", "numpy", "torch_memory_saver"], ["torch", "torch_memory_saver"]),
    "trl": ([*TESTED, "trl", "transformers", "peft"], ["trl", "transformers", "peft"]),
    "ray": (["ray"], ["ray"]),
    "verl": ([*TESTED, "verl"], ["verl"]),
    "vllm": (["vllm"], ["vllm"]),
    "sglang": (["sglang"], ["sglang"]),
}
"""What pip installs into each environment, and which packages are looked at there."""


def main(folder: Path, chosen: list[str]) -> bool:
    """Look at the newest releases in each environment; whether all hooks find what they read."""
    found = [report(folder / f"latest-{name}", *ENVIRONMENTS[name]) for name in chosen or ENVIRONMENTS]
    return all(found)


def report(environment: Path, requirements: list[str], packages: list[str]) -> bool:
    """Make an environment, and print what has moved in its packages; whether every hook finds what it reads."""
    try:
        make_environment(environment, ["--upgrade", *requirements])
    except subprocess.CalledProcessError as error:
        print(error, flush=True)
        return False
    found = [look(environment, package) for package in packages]
    return all(found)


def look(environment: Path, package: str) -> bool:
    """Print what has moved in a package; whether every hook finds what it reads."""
    (site_packages,) = environment.glob("lib/python*/site-packages")
    version = version_in(site_packages, package)
    print(f"{package} {version}, of which {binding.known().versions[package]} was read last", flush=True)
    moved = dict(differences(Releases({package: site_packages}, {package: version}), package))
    for target, difference in moved.items():
        print(f"  {target}: {difference}", flush=True)
    print(f"  {bound_in(environment, package)}", flush=True)
    return all(difference.startswith(UNVERIFIED) for difference in moved.values())


def version_in(site_packages: Path, package: str) -> str:
    """The version of a package that is installed in a folder."""
    (found,) = metadata.distributions(name=package, path=[str(site_packages)])
    return found.version


def differences(releases: Releases, package: str) -> Iterator[tuple[str, str]]:
    """What has moved since the release that was read, by target; an instrumentation may have a remark of its own."""
    known, source = binding.known(), releases.source
    for name in plugins.INSTRUMENTATIONS:
        patches = releases.hooks(name)
        for target in (hook.target for hook in patches.hooks if hook.target.split(".")[0].split(":")[0] == package):
            reads, node = patches.reads.get(target, ()), source.find(target)
            wanted = known.parameters.get(name, {}).get(target, {})
            if node is None and known.digests.get(target) is not None:
                yield f"{name} {target}", "it is gone"
            elif gone := _changed(wanted, node) or binding.missing_attributes(
                _with_source(releases, reads), source.has_attribute
            ):
                yield f"{name} {target}", gone
            elif others := [one for one in (target, *reads) if _digest(source.find(one)) != known.digests.get(one)]:
                yield f"{name} {target}", f"{UNVERIFIED}: another source of {', '.join(others)}"


def _changed(wanted: dict[str, int | None], node: ast.AST | None) -> str | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    there = Parameters.of(node)
    return next(filter(None, (binding.changed(there, name, place) for name, place in wanted.items())), None)


def _with_source(releases: Releases, reads: tuple[str, ...]) -> list[str]:
    return [name for name in reads if releases.source.has(name.partition(":")[0])]


def _digest(node: ast.AST | None) -> str | None:
    return None if node is None else digest(node)


# ---- in the environment -----------------------------------------------------------------------------------------


def bound_in(environment: Path, package: str) -> str:
    """What becomes of the hooks on a package where it is imported, in words."""
    command = [environment / "bin/python", __file__, "--bind", package]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        return f"imported: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}"
    said: dict[str, tuple[str, str | None]] = json.loads(done.stdout.splitlines()[-1])
    bound = sum(state == "installed" for state, _ in said.values())
    others = [f"{target}: {reason or state}" for target, (state, reason) in said.items() if state != "installed"]
    return "\n    ".join([f"imported: {bound} of {len(said)} hooks bind", *others])


def bind(package: str) -> dict[str, tuple[str, str | None]]:
    """Put the hooks around what is installed here; what each of them says."""
    said: dict[str, tuple[str, str | None]] = {}

    class Saying(Rows):
        def hook(self, name: str, target: str, state: str, reason: str | None = None, *_: Any) -> Rows:
            if target.split(".")[0].split(":")[0] == package:
                said[f"{name} {target}"] = state, reason
            return self

    for name, reference in plugins.INSTRUMENTATIONS.items():
        instrumentation = plugins.load(reference)()
        patches = PatchSet(name, Saying(), instrumentation.supports)
        with with_driver():
            instrumentation.install(patches)
        errors = import_targets(patches)
        for key, (state, reason) in said.items():
            if state == "waiting" and key.startswith(f"{name} "):
                said[key] = state, errors.get(key.split()[1].partition(":")[0], reason)
    return said


if __name__ == "__main__":
    if sys.argv[1] == "--bind":
        print(json.dumps(bind(sys.argv[2])))
    else:
        sys.exit(0 if main(Path(sys.argv[1]), sys.argv[2:]) else 1)

"""Who may import whom: the arrows of `rltrace/README.md`, read from the source."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = {
    "rltrace": ROOT / "rltrace",
    "rltrace_exporters": ROOT / "exporters" / "rltrace_exporters",
    "rltrace_reference": ROOT / "reference_run" / "rltrace_reference",
}
OURS = frozenset(SOURCES)

EVENTS = {"rltrace.events"}
LOW = EVENTS | {"rltrace.errors", "rltrace.clock", "rltrace.versions", "rltrace.interruption", "rltrace.checksum"}
WRITING = LOW | {"rltrace.cluster", "rltrace.manifest", "rltrace.process", "rltrace.segment", "rltrace.mapped_file"}
READING = WRITING | {"rltrace.gate", "rltrace.alignment", "rltrace.archive", "rltrace.ending", "rltrace.recording"}

MAY_IMPORT = {
    "rltrace.events": set(),
    "rltrace.interruption": set(),
    "rltrace.errors": set(),
    "rltrace.clock": set(),
    "rltrace.mapped_file": set(),
    "rltrace.segment": {"rltrace.mapped_file"},
    "rltrace.checksum": set(),
    "rltrace.gate": EVENTS | {"rltrace.checksum"},
    "rltrace.alignment": {"rltrace.checksum", "rltrace.gate"},
    "rltrace.manifest": EVENTS | {"rltrace.checksum", "rltrace.clock"},
    "rltrace.cluster": {"rltrace.manifest"},
    "rltrace.chosen_steps": set(),
    "rltrace.process": LOW | {"rltrace.manifest", "rltrace.mapped_file"},
    "rltrace.recorder": WRITING | {"rltrace.announcement"},
    "rltrace.decorator": {"rltrace.recorder"},
    "rltrace.archive": {"rltrace.errors", "rltrace.manifest"},
    "rltrace.ending": {"rltrace.checksum", "rltrace.gate"},
    "rltrace.recording": WRITING | {"rltrace.gate", "rltrace.alignment", "rltrace.archive", "rltrace.ending"},
    "rltrace.versions": set(),
    "rltrace.lineage": set(),
    "rltrace.memory": LOW | {"rltrace.recorder"},
    "rltrace.edges": EVENTS,
    "rltrace.patching": LOW | {"rltrace.recorder", "rltrace.edges"},
    "rltrace.device_time": LOW,
    "rltrace.gpu_use": set(),
    "rltrace.kernels": LOW | {"rltrace.recorder"},
    "rltrace.allocation_history": EVENTS,
    "rltrace.allocations": LOW
    | {"rltrace.recorder", "rltrace.kernels", "rltrace.allocation_history", "rltrace.gpu_use"},
    "rltrace.cost": LOW | {"rltrace.recorder", "rltrace.segment", "rltrace.patching"},
    "rltrace.host": READING,
    "rltrace.nvml": LOW,
    "rltrace.attendant": set(),
    "rltrace.machine": {"rltrace.nvml"},
    "rltrace.sampler": READING
    | {"rltrace.recorder", "rltrace.host", "rltrace.nvml", "rltrace.machine", "rltrace.attendant"},
    "rltrace.command_line": set(),
    "rltrace.environment": {"rltrace.recorder"},
    "rltrace.instrument": WRITING
    | {"rltrace", "rltrace.recorder", "rltrace.patching", "rltrace.plugins", "rltrace.memory", "rltrace.instrument"}
    | {"rltrace.environment", "rltrace.device_time", "rltrace.edges", "rltrace.nvml", "rltrace.cost"}
    | {"rltrace.allocations", "rltrace.allocation_history", "rltrace.chosen_steps", "rltrace.announcement"}
    | {"rltrace.lineage", "rltrace.gpu_use"},
    "rltrace.announcement": {"rltrace.manifest"},
    "rltrace.startup": {"rltrace.instrument"},
    "rltrace.nodes": READING | {"rltrace.chosen_steps"},
    "rltrace.collection": READING | {"rltrace.nodes"},
    "rltrace.companion": READING | {"rltrace.nodes", "rltrace.collection", "rltrace.attendant", "rltrace.announcement"},
    "rltrace.analysis": READING | {"rltrace.analysis", "rltrace.command_line"},
    "rltrace_exporters": READING | {"rltrace.analysis", "rltrace_exporters"},
}
"""What each part may import of ours; a part is the longest of these names that a module's name begins with."""

THIRD_PARTY = {
    "rltrace.events": {"msgspec"},
    "rltrace.interruption": set(),
    "rltrace.errors": set(),
    "rltrace.clock": set(),
    "rltrace.mapped_file": set(),
    "rltrace.segment": set(),
    "rltrace.cluster": set(),
    "rltrace.manifest": set(),
    "rltrace.chosen_steps": set(),
    "rltrace.process": set(),
    "rltrace.recorder": {"msgspec"},
    "rltrace.recording": {"msgspec", "msgpack"},
    "rltrace.patching": {"wrapt"},
}
"""What each part may import of others' when it is itself imported."""

FRAMEWORKS = {"torch", "ray", "vllm", "verl", "sglang", "transformers"}


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


NAMES = frozenset(name for name, _ in _modules())


@functools.cache
def _imports(path: Path, module: str, *, at_import_only: bool) -> frozenset[str]:
    """Full names of the modules that a file imports, those for type checkers apart."""
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if at_import_only and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            found |= {_module_of(base, alias.name) for alias in node.names}
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def _module_of(base: str, name: str) -> str:
    """`from rltrace import clock` imports a module, `from rltrace import span` a name of the package."""
    return f"{base}.{name}" if f"{base}.{name}" in NAMES else base


def _part(module: str, table: dict[str, set[str]]) -> str | None:
    names = [name for name in table if module == name or module.startswith(name + ".")]
    return max(names, key=len, default=None)


def _within(module: str, allowed: set[str]) -> bool:
    return any(module == name or (name != "rltrace" and module.startswith(name + ".")) for name in allowed)


MODULES = [pytest.param(module, path, id=module) for module, path in _modules()]


@pytest.mark.parametrize(("module", "path"), MODULES)
def test_dependencies_point_one_way(module: str, path: Path) -> None:
    part = _part(module, MAY_IMPORT)
    if part is None:  # the command line, the table of plug-ins, the reference run: the tests below
        return
    ours = {name for name in _imports(path, module, at_import_only=False) if name.split(".")[0] in OURS}
    wrong = {name for name in ours if not _within(name, MAY_IMPORT[part])}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}; {part} may import {sorted(MAY_IMPORT[part])}"


@pytest.mark.parametrize(("module", "path"), MODULES)
def test_what_a_traced_program_loads_is_small(module: str, path: Path) -> None:
    part = _part(module, THIRD_PARTY)
    if part is None:
        return
    foreign = _foreign(_imports(path, module, at_import_only=True))
    assert foreign <= THIRD_PARTY[part], f"{path.relative_to(ROOT)} loads {sorted(foreign - THIRD_PARTY[part])}"


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if m.id.startswith(("rltrace.", "rltrace_exp"))])
def test_no_module_of_the_toolkit_loads_a_framework_when_it_is_imported(module: str, path: Path) -> None:
    loaded = _foreign(_imports(path, module, at_import_only=True)) & FRAMEWORKS
    assert not loaded, f"{path.relative_to(ROOT)} loads {sorted(loaded)}: import it inside the function that needs it"


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if m.id.startswith("rltrace_reference")])
def test_the_reference_run_uses_public_names_only(module: str, path: Path) -> None:
    """`import rltrace`, the words, and the errors with their exit codes."""
    ours = {name for name in _imports(path, module, at_import_only=False) if name.split(".")[0] in OURS}
    wrong = {name for name in ours if not _within(name, LOW | {"rltrace", "rltrace_reference"})}
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize(("module", "path"), [m for m in MODULES if m.id.startswith("rltrace.")])
def test_the_toolkit_knows_exporters_and_the_reference_run_by_name_only(module: str, path: Path) -> None:
    ours = {name.split(".")[0] for name in _imports(path, module, at_import_only=False)} & OURS
    assert ours <= {"rltrace"}, f"{path.relative_to(ROOT)} imports {sorted(ours - {'rltrace'})}"


def test_source_roots_are_never_imported_as_packages() -> None:
    """`exporters` and `reference_run` are folders: a top-level package of such a name would overwrite others'."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in (ROOT / "rltrace", ROOT / "exporters", ROOT / "reference_run", ROOT / "tests", ROOT / "examples")
        for path in folder.rglob("*.py")
        for name in _imports(path, path.stem, at_import_only=False)
        if name.split(".")[0] in ("exporters", "reference_run")
    ]
    assert not wrong


def test_files_are_named_for_what_they_hold() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [path for folder in SOURCES.values() for path in folder.rglob("*.py") if path.stem in vague]


def test_the_check_sees_the_arrows_it_is_about() -> None:
    """A check that finds no import at all would pass on anything."""
    found = {module: _imports(path, module, at_import_only=False) for module, path in _modules()}
    assert {"rltrace.clock", "rltrace.manifest", "msgspec"} <= found["rltrace.recorder"]
    assert "rltrace.recorder" in found["rltrace"]


def _foreign(names: Set[str]) -> Set[str]:
    return {name.split(".")[0] for name in names} - OURS - sys.stdlib_module_names - {"__future__"}

"""Which room may import which: the table below, read from the source. No import points back up."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping, Set
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from rltrace.host.garbage_collector import without_collection

ROOT = Path(__file__).parent.parent
SOURCES = {
    "rltrace": ROOT / "rltrace",
    "rltrace_exporters": ROOT / "exporters" / "rltrace_exporters",
    "rltrace_reference": ROOT / "reference_run" / "rltrace_reference",
}
OURS = frozenset(SOURCES)

WORDS = {"events", "errors", "plugins", "limits", "dependencies", "extras"}
"""Files of the root that every room may import: the words, errors, the two tables, limits, what is installed."""

MAY_IMPORT = {
    "host": set(),
    "record": {"host"},
    "hooks": {"host", "record"},
    "instrument": {"host", "record", "hooks"},
    "read": {"host", "record"},
    "analysis": {"host", "record", "read"},
    "frames": {"host", "read", "analysis"},
    "run": {"host", "record", "hooks", "instrument", "read", "analysis"},
    "cli": {"host", "record", "hooks", "instrument", "read", "analysis", "frames", "run"},
    # Beside the toolkit:
    "rltrace_exporters": {"host", "record", "read", "analysis", "frames"},
    "rltrace_reference": set(),
}
"""What each room may import besides itself and the words; the lower ones come first."""

PUBLIC = {"rltrace": {"record", "hooks", "instrument", "read", "frames"}}
"""`import rltrace` gathers what users call."""

DOORS = {
    "rltrace.__main__": {"host", "cli"},
    "rltrace.verl_plugin": {"instrument"},
    "rltrace.sampler": {"run"},
    "rltrace.otlp": {"run"},
}
"""Files of the root that only begin something."""

INSIDE = {
    "rltrace.host": {
        "native": {"native_library"},
        "nvml": {"clock", "native"},
        "machine": {"nvml"},
    },
    "rltrace.instrument": {
        "torch": set(),
        "memory": {"torch"},
        "torch_memory_saver": {"memory"},
        "python_gc": set(),
        "trackers": {"torch"},
        "ray": set(),
        "opentelemetry": set(),
        "trl": {"memory"},
        "transformers": {"torch"},
        "peft": {"torch"},
        "reference": {"torch", "memory"},
        "vllm": {"torch", "memory"},
        "sglang": {"torch", "memory", "torch_memory_saver"},
        "verl": {"torch", "memory", "sglang"},
        "openrlhf": {"torch", "memory", "vllm"},
        "areal": {"torch", "memory", "vllm"},
        "skyrl": {"torch", "memory", "vllm"},
    },
}
"""What the parts of a room may import of each other; a part that is not named here may import none."""

EVERYWHERE = {"interruption"}
"""Parts that all parts of their room may import: how code in a traced process catches errors."""

LOADS = {
    "rltrace": {"msgspec"},
    "rltrace.dependencies": {"msgspec"},
    "rltrace.events": {"msgspec"},
    "rltrace.errors": set(),
    "rltrace.host": {"msgspec"},
    "rltrace.record": {"msgspec"},
    "rltrace.hooks": {"msgspec", "wrapt"},
    "rltrace.hooks.startup": {"rltrace_startup"},
    "rltrace.instrument": {"msgspec"},
    "rltrace.read": {"msgspec", "msgpack"},
    "rltrace.read.columns": {"msgpack", "numpy"},
    "rltrace.read.cut_columns": {"msgpack", "numpy"},
    "rltrace.read.depth": {"msgpack", "numpy"},
    "rltrace.read.following": {"msgpack", "numpy"},
    "rltrace.read.inferring": {"msgspec", "numpy"},
    "rltrace.read.native": {"numpy"},
    "rltrace.analysis": {"msgspec", "numpy"},
    "rltrace.frames": {"msgspec", "numpy", "pyarrow"},
    "rltrace.frames.database": {"duckdb", "pyarrow"},
}
"""What a module loads of others' packages when it is itself imported."""

FRAMEWORKS = {"torch", "ray", "vllm", "verl", "sglang", "transformers"}


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = (package, *path.relative_to(folder).with_suffix("").parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


NAMES = frozenset(name for name, _ in _modules())
PACKAGES = frozenset(name for name, path in _modules() if path.name == "__init__.py")


def _imports(path: Path, module: str, *, at_import_only: bool) -> frozenset[str]:
    """Full names of the modules that a file imports, inside functions too, those for type checkers apart."""
    at_import, later = _at_import_and_later(path, module)
    return at_import if at_import_only else at_import | later


@functools.cache
def _at_import_and_later(path: Path, module: str) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a file imports when it is itself imported, and those inside of functions; its tree is not kept."""
    found: dict[bool, set[str]] = {False: set(), True: set()}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    with without_collection():  # which looks through all trees again and again
        pending: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while pending:
        node, is_later = pending.pop()
        if isinstance(node, ast.If) and _is_for_type_checkers(node.test):
            pending.extend((child, is_later) for child in node.orelse)
            continue
        is_later |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.Import):
            found[is_later] |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            found[is_later] |= {_module_of(base, alias.name) for alias in node.names}
        pending.extend((child, is_later) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return frozenset(found[False]), frozenset(found[True])


def _is_for_type_checkers(test: ast.expr) -> bool:
    return any(getattr(part, "id", getattr(part, "attr", None)) == "TYPE_CHECKING" for part in ast.walk(test))


def _module_of(base: str, name: str) -> str:
    """`from rltrace.host import clock` imports a module, `from rltrace import span` a name of the package."""
    return f"{base}.{name}" if f"{base}.{name}" in NAMES else base


def _ours(path: Path, module: str) -> set[str]:
    return {name for name in _imports(path, module, at_import_only=False) if name.split(".")[0] in OURS}


def _foreign(names: Set[str]) -> Set[str]:
    return {name.split(".")[0] for name in names} - OURS - sys.stdlib_module_names - {"__future__"}


def _room(module: str) -> str:
    """The folder of `rltrace/` that a module lies in, or the file of its root; beside it, the package."""
    package, _, rest = module.partition(".")
    return (rest.split(".")[0] or package) if package == "rltrace" else package


def _allowed(module: str) -> set[str]:
    """The rooms that a module may import; those of a room are the same for all its files."""
    special = PUBLIC.get(module) or DOORS.get(module)
    room = _room(module)
    if special is not None:
        return special | WORDS
    if room in MAY_IMPORT:
        public = {"rltrace"} if module == "rltrace.run.probe" or room == "rltrace_reference" else set()
        return MAY_IMPORT[room] | {room} | WORDS | public
    return {"dependencies", "extras"} if room in WORDS else set()


def _said(wrong: Mapping[Path, Set[str]]) -> dict[str, list[str]]:
    """Return by file what of its imports is wrong; nothing of files where nothing is."""
    return {str(path.relative_to(ROOT)): sorted(names) for path, names in wrong.items() if names}


def test_rooms() -> None:
    """A module imports what its room may import, wherever in it the import stands."""
    wrong = {
        path: {name for name in _ours(path, module) if _room(name) not in _allowed(module)}
        for module, path in _modules()
    }
    assert not _said(wrong), "may import less: see MAY_IMPORT"


def test_every_room_is_in_the_table() -> None:
    """A folder that nobody has placed could import everything; a file of the root is the words, or a door."""
    rooms = {_room(module) for module in NAMES} - {"rltrace", *WORDS}
    assert rooms - {door.split(".")[1] for door in DOORS} == set(MAY_IMPORT)


def test_no_room_imports_one_above_it() -> None:
    """The table itself has no circle, and its rows are in order."""
    order = list(MAY_IMPORT)
    assert all(order.index(below) < order.index(room) for room, rooms in MAY_IMPORT.items() for below in rooms)
    for parts in INSIDE.values():
        list(TopologicalSorter(parts).static_order())


@pytest.mark.parametrize("room", INSIDE)
def test_parts_of_a_room(room: str) -> None:
    """Frameworks know of each other only what the table says; machinery of the room itself is its `__init__.py`."""
    wrong = {}
    for module, path in _modules():
        if module.startswith(room):
            imported = {_part(name, room) for name in _ours(path, module) if name.startswith(room)}
            part = _part(module, room)
            wrong[path] = imported - {part} - INSIDE[room].get(part, set()) - EVERYWHERE
    assert wrong and not _said(wrong)


def _part(module: str, room: str) -> str:
    return module.removeprefix(room).strip(".").split(".")[0]


def test_no_circle_of_modules() -> None:
    """No two modules import each other at once, over however many others; a package comes with its `__init__.py`."""
    graph = {}
    for module, path in _modules():
        direct = {name for name in _imports(path, module, at_import_only=True) if name in NAMES}
        graph[module] = direct - {module} - {name for name in PACKAGES if module.startswith(name + ".")}
    list(TopologicalSorter(graph).static_order())


def _loaded(*packages: str) -> dict[str, tuple[Path, Set[str]]]:
    """Return by module of these packages its file, and which of others' packages come with it."""
    return {
        module: (path, _foreign(_imports(path, module, at_import_only=True)))
        for module, path in _modules()
        if module.partition(".")[0] in packages
    }


def test_what_is_loaded_with_a_module() -> None:
    """A traced program gets little of others' packages from us, and a reader no more than it needs."""
    wrong = {}
    for module, (path, loaded) in _loaded("rltrace").items():
        parts = [name for name in LOADS if module == name or (name != "rltrace" and module.startswith(name + "."))]
        if parts:
            wrong[path] = loaded - LOADS[max(parts, key=len)]
    assert wrong and not _said(wrong)


def test_no_framework_is_loaded() -> None:
    """The toolkit imports a framework inside the function that needs it."""
    wrong = {path: loaded & FRAMEWORKS for path, loaded in _loaded("rltrace", "rltrace_exporters").values()}
    assert wrong and not _said(wrong)


def test_source_roots_are_no_packages() -> None:
    """Source roots are never imported as packages.

    `exporters` and `reference_run` are folders: a top-level package of such a name would overwrite others'.
    """
    roots = "exporters", "reference_run"
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in (ROOT / "rltrace", ROOT / "exporters", ROOT / "reference_run", ROOT / "tests", ROOT / "examples")
        for path in folder.rglob("*.py")
        if any(name in path.read_text() for name in roots)  # to parse all of them takes seconds
        for name in _imports(path, path.stem, at_import_only=False)
        if name.split(".")[0] in roots
    ]
    assert not wrong


def test_files_have_nouns_for_names() -> None:
    """Files are named for what they hold."""
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [path for folder in SOURCES.values() for path in folder.rglob("*.py") if path.stem in vague]


def test_every_folder_has_a_purpose() -> None:
    """Each folder says what flows in, what flows out, and where to add one: in 30 lines at most, before any code."""
    folders = {path.parent for _, path in _modules() if path.parent.name != "startup"} - set(SOURCES.values())
    said = {folder: ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or "" for folder in folders}
    said |= {folder: (folder / "README.md").read_text() for folder in map(ROOT.joinpath, WITH_README)}
    for folder, text in said.items():
        assert len(text.splitlines()) <= 30, folder.relative_to(ROOT)
        missing = [word for word in ("In: ", "Out: ", "o add ") if word not in text]
        assert not missing, (folder.relative_to(ROOT), missing)


WITH_README = ("rltrace", "exporters", "reference_run", "examples", "tests")


def test_check_sees_its_arrows() -> None:
    """The check sees the imports that it is about.

    A check that finds no import at all would pass on anything.
    """
    found = {module: _imports(path, module, at_import_only=False) for module, path in _modules()}
    assert {"rltrace.host.clock", "rltrace.record.process"} <= found["rltrace.record.writer"]
    assert "rltrace.record.spans" in found["rltrace"]
    assert "host" not in _allowed("rltrace_reference.train") and "run" not in _allowed("rltrace.record.writer")

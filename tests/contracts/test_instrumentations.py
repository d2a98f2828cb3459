"""What every row of the table of instrumentations promises, and what `install` does with them."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from rltrace import instrument, plugins
from rltrace.hooks import binding
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.versions import PYTHON
from rltrace.instrument.memory import allocation_owners, cuda_memory
from rltrace.instrument.sglang import allocations as sglang_allocations
from rltrace.instrument.torch import cuda_time
from rltrace.instrument.vllm import allocations as vllm_allocations
from rltrace.run import probe

FRAMEWORKS = (
    "torch",
    "ray",
    "vllm",
    "verl",
    "sglang",
    "torch_memory_saver",
    "trl",
    "openrlhf",
    "areal",
    "skyrl",
    "transformers",
    "peft",
    "opentelemetry",
    "requests",
    "httpx",
    "aiohttp",
    "rltrace_reference",
)

REPLACE_NOTHING = (
    "torch.optim.optimizer:register_optimizer_step_pre_hook",
    "torch.nn.modules.module:Module.register_forward_pre_hook",
    "gc:callbacks",
    "rltrace.hooks.boundaries:watch",
    "rltrace.record.spans:watch_spans",
)
"""Public hooks: what registers with them leaves them as they are."""

VERSIONS = Path(__file__).parents[2] / "docs" / "versions.md"

every_row = pytest.mark.parametrize("name", plugins.INSTRUMENTATIONS)


def installed(name):
    """The row, left out where its framework is not installed: vLLM comes with a GPU machine."""
    supports = plugins.load(plugins.INSTRUMENTATIONS[name]).supports
    package = supports[0].split()[0] if supports else "rltrace_reference"
    module = package.partition("-")[0]  # opentelemetry-api is a part of opentelemetry
    missing = package != PYTHON and importlib.util.find_spec(module) is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason=f"{package} is not installed here"))


installed_row = pytest.mark.parametrize("name", [installed(name) for name in plugins.INSTRUMENTATIONS])


class Row:
    """What a hook last reported."""

    def fired(self):
        pass


class Rows:
    """A register that keeps what hooks report."""

    def __init__(self):
        self.rows = {}

    def hook(self, instrumentation, target, state, reason=None, emits=()):
        row = self.rows.setdefault((instrumentation, target), Row())
        row.state, row.reason, row.emits = state, reason, emits
        return row

    def states(self):
        return {row.state for row in self.rows.values()}


@pytest.fixture(autouse=True)
def as_on_a_gpu_machine(monkeypatch):
    """Hooks that need a driver, or a chosen step, are named as they are where there is one."""
    for needing in (allocation_owners, cuda_memory, cuda_time, sglang_allocations, vllm_allocations):
        monkeypatch.setattr(needing, "DRIVER", Path("/dev/null"))
    monkeypatch.setenv("RLTRACE_ALLOCATIONS", "3")
    monkeypatch.setenv("RLTRACE_TRACKERS", "1")
    monkeypatch.setenv("RLTRACE_KERNELS", "3")
    monkeypatch.setenv("RLTRACE_RECORD_STEPS", "3")


@pytest.fixture
def rows():
    yield Rows()
    instrument.install(Rows(), []).undo()


def patch_set(name, rows):
    """The row's PatchSet, its hooks named."""
    instrumentation = plugins.load(plugins.INSTRUMENTATIONS[name])()
    patches = PatchSet(name, rows, instrumentation.supports)
    instrumentation.install(patches)
    return patches


def import_targets(patches):
    """Import every module that a hook waits for."""
    assert probe.import_targets(patches) == {}


def attributes(patches, *, inherited=False):
    """What stands at every target now; None where it is only inherited, unless that is asked for too."""
    found = {}
    for hook in patches.hooks:
        module, _, path = hook.target.partition(":")
        *parents, attr = path.split(".")
        owner = sys.modules[module]
        for parent in parents:
            owner = getattr(owner, parent)
        found[hook.target] = inspect.getattr_static(owner, attr) if inherited else vars(owner).get(attr)
    return found


@every_row
def test_row_has_its_classs_name(name):
    """A row has the name of its class."""
    instrumentation = plugins.load(plugins.INSTRUMENTATIONS[name])
    assert instrumentation.name == name
    assert isinstance(instrumentation.supports, tuple)
    assert instrumentation.__doc__


@every_row
def test_versions_table_names_every_row(name):
    """The table of what is traced names the versions of every row."""
    table = VERSIONS.read_text().splitlines()
    (line,) = [line for line in table if line.startswith(f"| `{name}` |")]
    supports = plugins.load(plugins.INSTRUMENTATIONS[name]).supports
    assert line.split(" | ")[2] == (", ".join(supports) or "ours")


def test_versions_table_names_last_releases():
    """The table of newer versions names the last release of each package that was read."""
    rows = [line.strip("|").split("|") for line in VERSIONS.read_text().partition("## Newer")[2].splitlines()]
    named = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2 and row[1].strip()[:1].isdigit()}
    assert named == binding.known().versions


def test_installing_imports_no_framework():
    """No row does, one after the other in one process."""
    code = (
        "import sys; from rltrace import instrument, plugins; from rltrace.record import spans\n"
        "class Rows:\n"
        "    def hook(self, *a, **k): return self\n"
        "    def fired(self): pass\n"
        "for name in plugins.INSTRUMENTATIONS:\n"
        "    installed = instrument.install(Rows(), [name])\n"
        f"    print(name, [*installed.patch_sets], [m for m in {FRAMEWORKS!r} if m in sys.modules])\n"
        "    installed.undo()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} [{name!r}] []" for name in plugins.INSTRUMENTATIONS]
    assert done.stderr == ""


@installed_row
def test_hooks_bind_to_the_framework(name, rows):
    """Every hook binds to the installed framework."""
    patches = patch_set(name, rows)
    import_targets(patches)
    assert patches.hooks
    assert {target: (row.state, row.reason) for (_, target), row in rows.rows.items()} == {
        hook.target: ("installed", None) for hook in patches.hooks
    }
    patches.undo()


@every_row
def test_what_hooks_read_ships(name, rows):
    """The digests of every target, and of all that its hook reads, ship: else `make digests`."""
    patches = PatchSet(name, rows)
    patches.refuse("only named")
    plugins.load(plugins.INSTRUMENTATIONS[name])().install(patches)
    read = {hook.target for hook in patches.hooks} | {one for reads in patches.reads.values() for one in reads}
    packages = binding.known().versions
    assert {one for one in read if one.split(":")[0].split(".")[0] in packages} <= binding.known().digests.keys()


@installed_row
def test_undo_restores_every_attribute(name, rows):
    before = patch_set(name, Rows())
    import_targets(before)
    before.undo()
    originals = attributes(before)
    patches = patch_set(name, rows)
    replaced = attributes(patches)
    assert patches.undo() == []
    restored = attributes(patches)
    for target, original in originals.items():
        assert restored[target] is original, target
    assert rows.states() == {"undone"}
    assert replaced != originals or name in (
        "torch_optim",
        "python_gc",
        "chosen_allocations",
        "chosen_loop_steps",
        "trackers",
    )  # a public hook replaces nothing


@installed_row
def test_hook_keeps_kind_and_signature(name, rows):
    """A hook keeps the kind and the signature of what it wraps."""
    bare = patch_set(name, Rows())
    import_targets(bare)
    bare.undo()
    originals = attributes(bare, inherited=True)
    patches = patch_set(name, rows)
    replacements = attributes(patches, inherited=True)
    patches.undo()
    for target, replacement in replacements.items():
        original = originals[target]
        if replacement is original:
            assert target in REPLACE_NOTHING
            continue
        if type(original).__name__ == "instancemethod":  # of a C++ class: a function binds as it does
            assert replacement.__wrapped__ is original, target
            continue
        assert type(replacement) is type(original), target
        # A static method's own attributes are those of what is in it.
        in_place, wrapped = (getattr(at, "__func__", at) for at in (replacement, original))
        for kind in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction):
            assert kind(in_place) == kind(wrapped), target
        assert inspect.signature(in_place) == inspect.signature(wrapped), target
        assert in_place.__wrapped__ is wrapped, target
        for_dynamo = {"_torchdynamo_inline": wrapped} if "_torchdynamo_inline" in vars(in_place) else {}
        assert vars(in_place) == vars(wrapped) | {"__wrapped__": wrapped} | for_dynamo


@installed_row
def test_unsupported_version_is_skipped(name, rows):
    """An unsupported version is skipped with the reason."""
    instrumentation = plugins.load(plugins.INSTRUMENTATIONS[name])()
    package = (*instrumentation.supports, "msgspec")[0].split()[0]
    patches = PatchSet(name, rows, (f"{package} > 99",))
    instrumentation.install(patches)
    import_targets(patches)
    assert rows.states() == {"skipped"}
    assert all(f"is not supported; this hook supports {package} > 99" in row.reason for row in rows.rows.values())


@installed_row
def test_installing_twice_is_installing_once(name, rows):
    installed = instrument.install(rows, [name])
    import_targets(installed.patch_sets[name])
    once = attributes(installed.patch_sets[name])
    again = instrument.install(Rows(), [name])
    assert again is installed
    assert attributes(installed.patch_sets[name]) == once
    assert installed.undo() == []


@every_row
def test_disabled_row_binds_nothing(name, rows, monkeypatch):
    """A disabled row binds nothing and says so."""
    monkeypatch.setenv(instrument.DISABLE_VARIABLE, f"other, {name}")
    installed = instrument.install(rows, [name])
    assert name not in installed.patch_sets
    assert rows.rows
    assert {(row.state, row.reason) for row in rows.rows.values()} == {("skipped", "disabled by RLTRACE_DISABLE")}


def test_broken_row_leaves_the_others(rows, monkeypatch, capfd):
    """A row that does not load is reported, and the others are installed."""
    monkeypatch.setitem(plugins.INSTRUMENTATIONS, "broken", "rltrace.instrument.gone:Gone")
    installed = instrument.install(rows, ["broken", "torch_optim"])
    assert list(installed.patch_sets) == ["torch_optim"]
    assert rows.rows["broken", "rltrace.instrument.gone:Gone"].state == "failed"
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_other_distributions_row_is_found(tmp_path, monkeypatch):
    """Another distribution's instrumentation is found."""
    metadata = tmp_path / "extra-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[rltrace.instrumentations]\nextra = extra_hooks:Extra\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert plugins.instrumentations() == plugins.INSTRUMENTATIONS | {"extra": "extra_hooks:Extra"}

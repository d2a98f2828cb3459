"""What a hook does in a release that is newer than the last one that was read: it binds by what it finds."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rltrace import plugins
from rltrace.events import UNVERIFIED
from rltrace.hooks import binding
from rltrace.hooks.arguments import attributes, keep
from rltrace.hooks.binding import Known
from rltrace.hooks.patching import PatchSet, nothing_after, nothing_before
from rltrace.hooks.sources import ModuleText, Source, digest
from rltrace.hooks.versions import STRICT_VARIABLE
from rltrace.instrument.memory import allocation_owners, cuda_memory
from rltrace.instrument.torch import cuda_time

READ = '''
"""A framework, as it was when it was read."""
from frame.base import Base

class Engine(Base):
    def __init__(self):
        self.running = 3

    def step(self, batch, scale=1):
        """Compute a step."""
        return len(batch) * scale  # of a batch

    def stop(self):
        return self.running

def load(path, *, device="cpu"):
    return f"{path}:{device}"
'''
BASE = """
class Base:
    @property
    def usage(self):
        return 0.5
"""
STEP, STOP, LOAD = "frame:Engine.step", "frame:Engine.stop", "frame:load"
READS = attributes("frame:Engine", "running", "usage")


class Rows:
    """A register that keeps what hooks report."""

    def __init__(self) -> None:
        self.said: dict[str, tuple[str, str | None]] = {}

    def hook(self, _instrumentation: str, target: str, state: str, reason: str | None = None, _emits: Any = ()) -> Rows:
        self.said[target] = state, reason
        return self

    def fired(self) -> None:
        pass


class Frame:
    """A package in a folder, and hooks that know its release 1.0."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        texts = {"frame": ModuleText(READ, True), "frame.base": ModuleText(BASE, False)}
        source = Source(texts.get)
        names = (STEP, STOP, LOAD, *READS)
        digests = {name: None if (node := source.find(name)) is None else digest(node) for name in names}
        parameters = {"test": {STEP: {"batch": 1, "scale": 2}, LOAD: {"device": None}}}
        known = Known({"frame": "1.0"}, digests, parameters)
        monkeypatch.setattr(binding, "known", lambda: known)
        monkeypatch.syspath_prepend(folder)

    def release(self, text: str = READ, *, base: str = BASE, version: str | None = "1.1") -> types.ModuleType:
        """Install a release, and import it."""
        package = self.folder / "frame"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(text)
        (package / "base.py").write_text(base)
        if version is not None:
            self.add_metadata(self.folder, version)
        importlib.invalidate_caches()
        return importlib.import_module("frame")

    @staticmethod
    def add_metadata(folder: Path, version: str) -> None:
        """Say which version lies in a folder."""
        metadata = folder / f"frame-{version}.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: frame\nVersion: {version}\n")

    def hooked(self) -> dict[str, tuple[str, str | None]]:
        """Put hooks around what is there; what they say."""
        rows = Rows()
        self.patches = PatchSet("test", rows, ("frame >= 0.9",))
        self.patches.around(STEP, keep("batch", 1), nothing_after)
        self.patches.around(STOP, nothing_before, nothing_after, reads=READS)
        self.patches.around(LOAD, nothing_before, nothing_after)
        return rows.said


@pytest.fixture
def frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Frame]:
    for name, cached in (("_is_in_source", binding._is_in_source), ("_digest_there", binding._digest_there)):
        monkeypatch.setattr(binding, name, cached.__wrapped__)  # of a package that each test has anew
    monkeypatch.setattr(binding, "_SOURCE", Source())
    made = Frame(tmp_path, monkeypatch)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] == "frame"]:
        del sys.modules[name]


BOUND = ("installed", None)


def is_unverified(said: tuple[str, str | None]) -> bool:
    return said[0] == "installed" and (said[1] or "").startswith(UNVERIFIED)


# ---- newer releases ---------------------------------------------------------------------------------------------


def test_same_source_is_bound(frame: Frame) -> None:
    """A newer release with the same source has all hooks, and nothing is said."""
    frame.release()
    assert frame.hooked() == dict.fromkeys((STEP, STOP, LOAD), BOUND)


def test_layout_is_no_change(frame: Frame) -> None:
    """Neither comments, layout, docstrings nor annotations make another source."""
    text = READ.replace('"""Compute a step."""', '"""Compute one step of the engine."""')
    text = text.replace("# of a batch", "# changed").replace(
        "len(batch) * scale", "(\n            len(batch)\n * scale)"
    )
    text = text.replace("batch, scale=1", "batch: list[int], scale: int = 1,")
    frame.release(text)
    assert frame.hooked() == dict.fromkeys((STEP, STOP, LOAD), BOUND)


def test_other_source_is_unverified(frame: Frame) -> None:
    """Another source of a target or of an attribute that is read makes the hook unverified, and it works."""
    module = frame.release(READ.replace("* scale", "* scale * 2"), base=BASE.replace("0.5", "0.75"))
    said = frame.hooked()
    assert is_unverified(said[STEP]) and "frame 1.1 the source of Engine.step is not 1.0's" in str(said[STEP][1])
    assert is_unverified(said[STOP]) and "Engine.usage" in str(said[STOP][1])
    assert said[LOAD] == BOUND
    assert module.Engine().step([1, 2]) == 4


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ("batch, scale=1", "scale=1, batch=()", "parameter `batch` is at place 2, not 1"),
        ("self, batch, scale=1", "self, items, scale=1", "parameter 1 is `items`, not `batch`"),
        ("self, batch, scale=1", "self", "there is no parameter `batch`"),
        ('path, *, device="cpu"', 'path, *, where="cpu"', "there is no parameter `device`"),
        ("self.running", "self.active", "there is no `Engine.running`"),
        ("class Engine(Base)", "class Engine", "there is no `Engine.usage`"),
        ("def stop", "def halt", "not in this release: frame.Engine has no stop"),
    ],
)
def test_change_skips_one_hook(frame: Frame, before: str, after: str, difference: str) -> None:
    """What is gone or has another place skips the one hook that reads it, with the difference; the others work."""
    text = READ.replace(before, after).replace("len(batch)", "1").replace('"{path}:{device}"', '"{path}"')
    module = frame.release(text)
    bare = module.load("a")
    said = frame.hooked()
    (skipped,) = [target for target, (state, _) in said.items() if state == "skipped"]
    assert difference in str(said[skipped][1])
    assert [state for target, (state, _) in said.items() if target != skipped] == ["installed"] * 2
    assert module.load("a") == bare


def test_new_parameter_is_no_loss(frame: Frame) -> None:
    """A parameter that no hook reads may come, behind those that it reads or by name alone."""
    frame.release(READ.replace("scale=1", "scale=1, *, depth=2").replace("(path, *", "(path, name='', *"))
    said = frame.hooked()
    assert is_unverified(said[STEP]) is is_unverified(said[LOAD]) is True


def test_known_release_is_not_looked_at(frame: Frame, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the last release that was read nothing is looked at: that takes time."""
    monkeypatch.setattr(binding, "_SOURCE", None)
    frame.release(READ.replace("* scale", "* scale * 2"), version="1.0")
    assert set(frame.hooked().values()) == {BOUND}


def test_unknown_version_is_looked_at(frame: Frame) -> None:
    """A package without metadata, as a checkout on the path, is bound by what it has."""
    frame.release(READ.replace("* scale", "* scale * 2"), version=None)
    said = frame.hooked()
    assert is_unverified(said[STEP]) and "frame of an unknown version" in str(said[STEP][1])
    assert said[LOAD] == BOUND


def test_strict_versions(frame: Frame, monkeypatch: pytest.MonkeyPatch) -> None:
    """RLTRACE_STRICT_VERSIONS=1 leaves out what is newer than the last release that was read."""
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    frame.release()
    reason = f"frame 1.1 is newer than 1.0, the last one that was read; {STRICT_VARIABLE}=1 leaves it out"
    assert set(frame.hooked().values()) == {("skipped", reason)}


# ---- what is hostile to a look ----------------------------------------------------------------------------------


def test_raising_target_is_skipped(frame: Frame, capfd: pytest.CaptureFixture[str]) -> None:
    """A target that raises when it is looked at is skipped with the reason, and the program still gets its error."""
    lazy = (
        READ.replace("class Engine", "class Other") + "\ndef __getattr__(name):\n    raise RuntimeError('no ' + name)\n"
    )
    module = frame.release(lazy)
    said = frame.hooked()
    assert said[STEP] == ("skipped", "it cannot be looked at: RuntimeError: no Engine")
    assert said[LOAD] == BOUND
    with pytest.raises(RuntimeError, match="no Engine"):
        module.Engine  # noqa: B018
    assert capfd.readouterr().err == ""


def test_raising_signature_is_skipped(frame: Frame) -> None:
    """So is a function whose signature raises."""
    module = frame.release(READ + "\nload.__signature__ = 'none'\n")
    said = frame.hooked()
    assert said[LOAD][0] == "skipped"
    assert "it has no signature, which would say where `device` is" in str(said[LOAD][1])
    assert said[STEP] == BOUND
    assert module.load("a") == "a:cpu"


def test_replaced_module_is_skipped(frame: Frame) -> None:
    """A module that puts another object in its place has no hooks: nobody would call them."""
    replaced = READ + "\nimport sys\nclass Lazy:\n    load = staticmethod(load)\nsys.modules[__name__] = Lazy()\n"
    frame.folder.joinpath("frame").mkdir()
    said = frame.hooked()  # it is found out when the module is imported
    there = frame.release(replaced)
    assert set(said.values()) == {("skipped", "frame was replaced by an object of Lazy")}
    assert there.load("a") == "a:cpu"


def test_function_in_c_without_signature(frame: Frame) -> None:
    """A function in C that has no signature is skipped if the hook reads a parameter of it, and else bound."""
    module = frame.release(READ.replace("def load(", "def old_load(") + "\nload = max\nEngine.stop = max\n")
    said = frame.hooked()
    assert said[LOAD][0] == "skipped"
    assert "it has no signature, which would say where `device` is" in str(said[LOAD][1])
    assert said[STOP][0] == "installed"
    assert module.load(1, 2) == module.Engine.stop(1, 2) == 2


def test_two_versions_on_the_path(frame: Frame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two versions the one that comes first is asked; if the other one is imported, its hooks are skipped."""
    frame.release(version="1.0")
    other = tmp_path / "other"
    frame.add_metadata(other, "1.2")
    sys.path.append(str(other))
    assert set(frame.hooked().values()) == {BOUND}, "the first one is imported"
    monkeypatch.syspath_prepend(other)
    reason = f"two versions of frame are on the path: 1.2 in {other} comes first, and 1.0 in {tmp_path} was imported"
    assert set(frame.hooked().values()) == {("skipped", reason)}
    sys.path.remove(str(other))


# ---- real frameworks --------------------------------------------------------------------------------------------


def readings() -> list[Any]:
    """Every parameter that a hook on an installed framework reads, with the hook."""
    return [
        pytest.param(name, target, parameter, id=f"{name}-{target.rpartition(':')[2]}-{parameter}")
        for name, targets in binding.known().parameters.items()
        for target, parameters in targets.items()
        if target.partition(".")[0] in ("torch", "ray", "transformers")
        for parameter in parameters
    ]


def renamed(code: types.CodeType, parameter: str) -> types.CodeType:
    """The code of a function that calls a parameter by another name, and does the same."""
    return code.replace(co_varnames=tuple("renamed" if name == parameter else name for name in code.co_varnames))


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed is newer than what was read, on a machine with a GPU's driver."""
    for needing in (allocation_owners, cuda_memory, cuda_time):
        monkeypatch.setattr(needing, "DRIVER", Path("/dev/null"))
    known = binding.known()._replace(versions=dict.fromkeys(binding.known().versions, "0.1"))
    monkeypatch.setattr(binding, "known", lambda: known)


@pytest.mark.parametrize(("name", "target", "parameter"), readings())
def test_renamed_parameter_skips_its_hook(newer: None, name: str, target: str, parameter: str) -> None:
    """One parameter of one target of a real framework has another name: exactly its hook is skipped."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for attr in path.split("."):
        found = getattr(found, attr)
    function = inspect.unwrap(found)
    if parameter in function.__code__.co_cellvars:
        pytest.skip("a closure holds it")
    before, function.__code__ = function.__code__, renamed(function.__code__, parameter)
    try:
        rows = Rows()
        patches = PatchSet(name, rows)
        plugins.load(plugins.INSTRUMENTATIONS[name])().install(patches)
        skipped = {target: reason for target, (state, reason) in rows.said.items() if state == "skipped"}
        patches.undo()
    finally:
        function.__code__ = before
    assert list(skipped) == [target]
    assert f"`{parameter}`" in str(skipped[target])


# ---- digests ----------------------------------------------------------------------------------------------------

SYNTAX = '''
async def work(a, /, b: int = -1, *args: str, c=..., **kwargs) -> "None":
    """Do all of it."""
    total = [x async for x in a if x] or {**kwargs, "k": (b, *args)}
    text = f"{a!r:>{b}} and {{braces}} {c=}" "joined" f"{total}"
    match a:
        case {"key": [1, *_]} | None: return lambda y, *, z=1j: y[1:2, ..., ::3] @ z
    with (open("x") as f, open("y") as g): del f.a, g[0]
    try:
        assert (n := 10) < 0x1F <= 1_000.5, b"bytes"
    except* ValueError: raise
'''


def test_digest_is_of_all_pythons() -> None:
    """A digest is the same for every Python that rltrace runs on."""
    text = SYNTAX if sys.version_info >= (3, 11) else SYNTAX.replace("except*", "except")
    (node,) = ast.parse(text).body
    assert digest(node) == ("67277132f352" if sys.version_info >= (3, 11) else "32d8fc518f10")


def test_what_is_read_is_there() -> None:
    """What ships is what is there, of the packages that are installed in just the release that was read."""
    source = Source()
    installed = [p for p, version in binding.known().versions.items() if binding.installed_version(p) == version]
    names = [name for name in binding.known().digests if name.partition(".")[0].partition(":")[0] in installed]
    for package in {name.partition(":")[0].rpartition(".")[0] for name in names} - {""}:
        importlib.import_module(package)  # sources are looked for beside what is imported, as in a traced program
    found = {name: None if (node := source.find(name)) is None else digest(node) for name in names}
    assert found == {name: binding.known().digests[name] for name in names}

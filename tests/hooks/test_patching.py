"""What a hook promises to the code it is put on."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import pickle
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest
from ray import cloudpickle

import rltrace
from rltrace.hooks.hook import Hook
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.wrapping import watch_items, wrap_each_item, wrap_same_kind

SOURCE = """
import contextlib

def add(a, b=1):
    "Add."
    return a + b

def fail(error):
    raise error

async def add_later(a, b=1):
    return a + b

def count(n):
    got = []
    for i in range(n):
        got.append((yield i))
    return got

async def count_later(n):
    for i in range(n):
        try:
            got = yield i
        except KeyError as error:
            yield ("caught", error)
        else:
            if got is not None:
                yield ("sent", got)

@contextlib.contextmanager
def opened(log):
    log.append("open")
    try:
        yield log
    except KeyError:
        log.append("swallowed")
    finally:
        log.append("closed")

@contextlib.asynccontextmanager
async def opened_later(log):
    log.append("open")
    try:
        yield log
    finally:
        log.append("closed")

def returns_coroutine(a):
    return add_later(a)

def closes_badly():
    try:
        yield
    finally:
        raise LookupError("in closing")

async def closes_badly_later():
    try:
        yield
    finally:
        raise LookupError("in closing")

class Base:
    def inherited(self, a):
        return ("base", self, a)

class Thing(Base):
    CONSTANT = object()

    def method(self, *args, **kwargs):
        return self, args, kwargs

    @staticmethod
    def static(a):
        return a

    @classmethod
    def of_class(cls, a):
        return cls, a

    @property
    def value(self):
        return 1

Thing.method.magic = {"kept": True}
"""


class Row:
    """What a hook last reported, and how often it fired."""

    count = 0

    def fired(self):
        self.count += 1


class Rows:
    """A register that keeps what hooks report."""

    def __init__(self):
        self.rows = {}

    def hook(self, instrumentation, target, state, reason=None, emits=()):
        row = self.rows.setdefault(target, Row())
        row.state, row.reason = state, reason
        return row


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "traced_program.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("traced_program")
    sys.modules.pop("traced_program", None)


@pytest.fixture
def log():
    return []


@pytest.fixture
def rows():
    return Rows()


@pytest.fixture
def patches(rows):
    patch_set = PatchSet("test", rows)
    yield patch_set
    patch_set.undo()


def watch(patches, attr, log):
    """Put a hook around an attribute that notes what it sees."""
    patches.around(
        f"traced_program:{attr}",
        lambda args, kwargs: log.append(("before", args, kwargs)),
        lambda token, result, error: log.append(("after", result, error)),
    )


def test_function_keeps_face(module, patches, log):
    """A function returns the same object and keeps its face."""
    original = module.add
    watch(patches, "add", log)
    assert module.add(2, b=5) == 7
    assert log == [("before", (2,), {"b": 5}), ("after", 7, None)]
    assert module.add.__wrapped__ is original
    assert (module.add.__name__, module.add.__doc__) == ("add", "Add.")
    assert inspect.signature(module.add) == inspect.signature(original)


def test_function_error(module, patches, log):
    """A function raises the same error."""
    watch(patches, "fail", log)
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        module.fail(error)
    assert caught.value is error
    assert log[1] == ("after", None, error)
    assert error.__context__ is None


def test_coroutine_function(module, patches, log):
    """A coroutine function stays one and is watched until it ends."""
    watch(patches, "add_later", log)
    assert inspect.iscoroutinefunction(module.add_later)
    coroutine = module.add_later(1)
    assert log == []
    assert asyncio.run(coroutine) == 2
    assert log[1] == ("after", 2, None)


def test_returned_coroutine(module, patches, log):
    """A plain function that returns a coroutine is watched until that ends."""
    watch(patches, "returns_coroutine", log)
    assert not inspect.iscoroutinefunction(module.returns_coroutine)
    coroutine = module.returns_coroutine(1)
    assert inspect.iscoroutine(coroutine)
    assert len(log) == 1
    assert asyncio.run(coroutine) == 2
    assert log[1] == ("after", 2, None)


def test_cancelled_coroutine(module, patches, log):
    """A cancelled coroutine is seen as cancelled."""

    async def forever():
        await asyncio.Event().wait()

    module.add_later = forever
    watch(patches, "add_later", log)

    async def cancel():
        task = asyncio.ensure_future(module.add_later())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert isinstance(log[1][2], asyncio.CancelledError)


def test_generator(module, patches, log):
    """A generator passes what is sent and returned."""
    watch(patches, "count", log)
    assert inspect.isgeneratorfunction(module.count)
    generator = module.count(2)
    assert [next(generator), generator.send("a")] == [0, 1]
    with pytest.raises(StopIteration) as stop:
        generator.send("b")
    assert stop.value.value == ["a", "b"]
    assert log[1] == ("after", ["a", "b"], None)


@pytest.mark.parametrize("each_item", [False, True])
def test_generator_raises_in_closing(module, patches, each_item):
    """What a generator raises in closing reaches who closes it.

    A generator that is left to the garbage collector would be closed too, and nobody would hear of the error.
    """
    patches.span("traced_program:closes_badly", "work", each_item=each_item)
    generator = module.closes_badly()
    next(generator)
    with pytest.raises(LookupError):
        generator.close()


def test_async_generator_raises_in_closing(module, patches, log):
    """What an asynchronous generator raises in closing reaches who closes it."""
    watch(patches, "closes_badly_later", log)

    async def close():
        generator = module.closes_badly_later()
        await generator.__anext__()
        await generator.aclose()

    with pytest.raises(LookupError):
        asyncio.run(close())


def test_generator_closed_early(module, patches, log):
    """A generator closed early is no error."""
    watch(patches, "count", log)
    generator = module.count(2)
    next(generator)
    generator.close()
    assert log[1] == ("after", None, None)


def test_each_item(module, log):
    """Each item of a generator can be watched alone."""

    def note(args, kwargs):
        log.append("before")

    hook = Hook("test", "traced_program:count")
    hook.bind(True)
    count = wrap_each_item(module.count, hook, note, lambda token, result, error: log.append((result, error)))
    generator = count(2)
    assert log == []
    assert next(generator) == 0
    assert log == ["before", (0, None)]
    assert generator.send("a") == 1
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == ["a", None]
    generator = count(2)
    next(generator)
    error = KeyError("x")
    with pytest.raises(KeyError) as caught:
        generator.throw(error)
    assert caught.value is error
    assert log[-1] == (None, error)
    closed = count(1)
    next(closed)
    closed.close()


@pytest.mark.parametrize("attr", ["add", "add_later", "returns_coroutine"])
def test_replaced_argument(module, patches, attr):
    """An argument can be replaced whatever the kind of the function."""
    original = getattr(module, attr)
    patches.arguments(f"{module.__name__}:{attr}", lambda _hook, args, kwargs: ((args[0] + 100,), kwargs))
    replacement = getattr(module, attr)
    assert inspect.iscoroutinefunction(replacement) == inspect.iscoroutinefunction(original)
    assert inspect.signature(replacement) == inspect.signature(original)
    result = replacement(1)
    assert (asyncio.run(result) if inspect.iscoroutine(result) else result) == 102


def test_irreplaceable_arguments(module, patches, rows, capfd):
    """Arguments that cannot be replaced are passed on."""

    def change(_hook, args, kwargs):
        raise LookupError("ours")

    patches.arguments(f"{module.__name__}:add", change)
    assert module.add(1, b=5) == 6
    assert "LookupError: ours" in capfd.readouterr().err
    patches.undo()
    assert module.add(1, b=5) == 6


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("add", lambda add: add(1)),
        ("returns_coroutine", lambda add: asyncio.run(add(1))),
        ("add_later", lambda add: asyncio.run(add(1))),
        ("count", lambda count: list(count(1))),
        ("count_later", lambda count: asyncio.run(_to_its_end(count(1)))),
        ("opened", lambda opened: _enter(opened([]))),
    ],
)
def test_time_of_a_hook(module, monkeypatch, name, call):
    """Where hooks are timed, what runs on either side of a call counts, whatever is called."""
    monkeypatch.setenv("RLTRACE_TIME_HOOKS", "1")
    hook, spent_ns = Hook("ours", f"{module.__name__}:{name}"), []
    hook.bind(True)
    hook.row = SimpleNamespace(fired=lambda: None, spent=spent_ns.append)

    def sleep(*_told):
        time.sleep(0.002)

    call(wrap_same_kind(getattr(module, name), hook, sleep, sleep))
    assert len(spent_ns) == 2
    assert min(spent_ns) >= 2e6


async def _to_its_end(items):
    return [item async for item in items]


def _enter(manager):
    with manager:
        pass


def test_each_item_passed_on(log):
    """Each item of an iterable that is passed on can be watched."""
    hook = Hook("test", "somewhere:passed")
    hook.bind(True)
    items = {"a": 1, "b": 2}.items()
    watched = watch_items(items, hook, lambda *_: log.append("asked"), lambda _token, item, _error: log.append(item))
    assert log == []
    assert dict(watched) == {"a": 1, "b": 2}
    assert log == ["asked", ("a", 1), "asked", ("b", 2), "asked", None]


def test_async_generator(module, patches, log):
    """An asynchronous generator passes what is sent and thrown."""
    watch(patches, "count_later", log)
    assert inspect.isasyncgenfunction(module.count_later)
    error = KeyError("x")

    async def drive():
        agen = module.count_later(3)
        got = [await agen.asend(None), await agen.asend("a"), await agen.__anext__(), await agen.athrow(error)]
        await agen.aclose()
        return got, [item async for item in module.count_later(2)]

    assert asyncio.run(drive()) == ([0, ("sent", "a"), 1, ("caught", error)], [0, 1])
    assert [entry for entry in log if entry[0] == "after"] == [("after", None, None)] * 2


def test_context_manager(module, patches, log):
    """A context manager is watched for the length of its block."""
    kind = type(module.opened([]))
    watch(patches, "opened", log)
    notes = []
    manager = module.opened(notes)
    assert type(manager) is kind
    assert log == []
    with manager as value:
        assert value is notes
        assert log == [("before", (notes,), {})]
        raise KeyError("swallowed by the block's own manager")
    assert notes == ["open", "swallowed", "closed"]
    assert log[1][0] == "after"


def test_async_context_manager(module, patches, log):
    """An asynchronous context manager is watched for the length of its block."""
    watch(patches, "opened_later", log)

    async def use():
        async with module.opened_later([]) as notes:
            assert len(log) == 1
        return notes

    assert asyncio.run(use()) == ["open", "closed"]
    assert len(log) == 2


def test_descriptors(module, patches, log):
    """Methods stay in their descriptors."""
    for attr in ("method", "static", "of_class"):
        watch(patches, f"Thing.{attr}", log)
    thing = module.Thing()
    assert thing.method(1, k=2) == (thing, (1,), {"k": 2})
    assert module.Thing.static(3) == thing.static(3) == 3
    assert module.Thing.of_class(4) == thing.of_class(4) == (module.Thing, 4)
    assert isinstance(vars(module.Thing)["static"], staticmethod)
    assert isinstance(vars(module.Thing)["of_class"], classmethod)
    assert module.Thing.method.magic == {"kept": True}
    assert len(log) == 10


@pytest.mark.parametrize(
    ("attr", "reason"),
    [
        ("Thing.value", "a property"),
        ("Thing", "a class"),
        ("Thing.CONSTANT", "an object of builtins.object"),
        ("Thing.gone", "not in this release: traced_program.Thing has no gone"),
        ("Gone.method", "not in this release: traced_program has no Gone"),
    ],
)
def test_untouchable(module, patches, rows, log, attr, reason):
    """What cannot be hooked is left alone with the reason."""
    before = dict(vars(module)), dict(vars(module.Thing))
    watch(patches, attr, log)
    row = rows.rows[f"traced_program:{attr}"]
    assert row.state == "skipped"
    assert row.reason.startswith(reason)
    assert (dict(vars(module)), dict(vars(module.Thing))) == before


def test_type_in_c(patches, rows):
    """A type written in C is left alone."""
    patches.around("builtins:str.upper", lambda args, kwargs: None, lambda token, result, error: None)
    assert rows.rows["builtins:str.upper"].state == "skipped"
    assert "a".upper() == "A"


def test_inherited_method(module, patches, log):
    """An inherited method is hooked on the subclass only."""
    base = vars(module.Base)["inherited"]
    watch(patches, "Thing.inherited", log)
    thing = module.Thing()
    assert thing.inherited(1) == ("base", thing, 1)
    assert len(log) == 2
    assert vars(module.Base)["inherited"] is base
    patches.undo()
    assert "inherited" not in vars(module.Thing)


def test_undo(module, patches, log):
    """Undo puts the same objects back."""
    targets = ["Thing.method", "Thing.static", "Thing.of_class"]
    before = dict(vars(module.Thing)), module.add
    for attr in [*targets, "add"]:
        watch(patches, attr, log)
    assert patches.undo() == []
    assert module.add is before[1]
    for attr in targets:
        name = attr.partition(".")[2]
        assert vars(module.Thing)[name] is before[0][name]


def test_undo_spares_later_patch(module, patches, rows, log):
    """Undo leaves a later foreign patch alone."""
    watch(patches, "add", log)
    ours = module.add

    @functools.wraps(ours)
    def foreign(*args, **kwargs):
        return ours(*args, **kwargs) * 10

    module.add = foreign
    assert patches.undo() == ["traced_program:add"]
    assert module.add is foreign
    assert module.add(1, 1) == 20
    assert log == []
    assert rows.rows["traced_program:add"].state == "undone"
    assert "patched by other code since" in rows.rows["traced_program:add"].reason


def test_left_in_place_is_inert(module, patches, log):
    """What is left in place is inert whatever its kind."""
    attrs = ["add", "add_later", "returns_coroutine", "count", "count_later", "opened", "opened_later"]
    for attr in attrs:
        watch(patches, attr, log)
    left = {attr: getattr(module, attr) for attr in attrs}
    patches.undo()

    async def use_later():
        async with left["opened_later"]([]):
            pass
        return await left["add_later"](1), await left["returns_coroutine"](1), [i async for i in left["count_later"](2)]

    with left["opened"]([]):
        assert (left["add"](1), list(left["count"](2))) == (2, [0, 1])
    assert asyncio.run(use_later()) == (2, 2, [0, 1])
    assert log == []


def test_two_names_undone(module, patches, log):
    """A method hooked by two names of its class is put back."""
    original = vars(module.Thing)["method"]
    module.Alias = module.Thing
    for attr in ("Thing.method", "Alias.method"):
        watch(patches, attr, log)
    module.Thing().method()
    assert len(log) == 4
    assert patches.undo() == []
    assert vars(module.Thing)["method"] is original


def test_name_of_a_package_above(tmp_path, monkeypatch, patches, log):
    """A function that packages above its module have imported by name is hooked there too, and put back."""
    inner = tmp_path / "traced_package" / "inner"
    inner.mkdir(parents=True)
    (inner / "functions.py").write_text("def add(a):\n    return a + 1\n")
    (inner / "__init__.py").write_text("from traced_package.inner.functions import add\n")
    (inner.parent / "__init__.py").write_text("from traced_package.inner import add\n")
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("traced_package")
    original = package.add
    patches.around(
        "traced_package.inner.functions:add",
        lambda args, kwargs: log.append(args),
        lambda token, result, error: log.append(result),
    )
    assert package.add(1) == package.inner.add(1) == package.inner.functions.add(1) == 2
    assert log == [(1,), 2] * 3
    assert patches.undo() == []
    assert package.add is package.inner.add is package.inner.functions.add is original


def test_installed_twice(module, patches, log):
    """Installing twice changes nothing."""
    watch(patches, "add", log)
    once = module.add
    watch(patches, "add", log)
    assert module.add is once
    module.add(1)
    assert len(log) == 2


def test_shared_function(module, rows, log):
    """Two instrumentations share a function."""
    original = module.add
    first, second = PatchSet("first", rows), PatchSet("second", rows)
    watch(first, "add", log)
    watch(second, "add", log)
    module.add(1)
    assert len(log) == 4
    assert second.undo() == first.undo() == []
    assert module.add is original


def test_waiting_hook(tmp_path, monkeypatch, patches, rows, log):
    """A hook waits for its module."""
    (tmp_path / "traced_program.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "traced_program", raising=False)
    watch(patches, "add", log)
    row = rows.rows["traced_program:add"]
    assert (row.state, row.reason) == ("waiting", "traced_program is not imported")
    from traced_program import add

    assert (row.state, row.reason) == ("installed", None)
    assert add(1) == 2
    assert row.count == 1
    sys.modules.pop("traced_program")


def test_import_after_undo(tmp_path, monkeypatch, patches, log):
    """After undo an import binds nothing."""
    (tmp_path / "traced_program.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "traced_program", raising=False)
    watch(patches, "add", log)
    patches.undo()
    from traced_program import add

    assert not hasattr(add, "__wrapped__")
    sys.modules.pop("traced_program")


def break_down(*args):
    raise ZeroDivisionError("a bug of ours")


@pytest.mark.parametrize(("before", "after"), [(break_down, break_down), (lambda args, kwargs: None, break_down)])
def test_failing_hook(module, patches, rows, capfd, before, after):
    """A hook that raises never reaches the program."""
    attrs = ["add", "fail", "add_later", "count", "count_later", "opened", "opened_later", "Thing.method"]
    for attr in [*attrs, "returns_coroutine"]:
        patches.around(f"traced_program:{attr}", before, after)

    async def use_later():
        async with module.opened_later([]) as notes:
            pass
        return (
            await module.add_later(1),
            await module.returns_coroutine(1),
            notes,
            [i async for i in module.count_later(2)],
        )

    for _ in range(2):
        assert module.add(1) == 2
        assert list(module.count(2)) == [0, 1]
        with module.opened([]) as notes:
            pass
        assert notes == ["open", "closed"]
        assert module.Thing().method(1)[1:] == ((1,), {})
        assert asyncio.run(use_later()) == (2, 2, ["open", "closed"], [0, 1])
        error = KeyError("theirs")
        with pytest.raises(KeyError) as caught:
            module.fail(error)
        assert caught.value is error
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(attrs) + 1  # one line a hook, however often it fails
    assert {row.state for row in rows.rows.values()} == {"failed"}
    assert all("ZeroDivisionError: a bug of ours" in row.reason for row in rows.rows.values())
    assert min(hook.failures for hook in patches.hooks) == 2


def test_never_begun(module, patches, log):
    """What did not begin is not ended."""
    attrs = ["add", "add_later", "returns_coroutine", "count", "fail"]
    for attr in attrs:
        patches.around(f"traced_program:{attr}", break_down, lambda token, result, error: log.append(token))
    module.add(1)
    list(module.count(1))
    for later in (module.add_later(1), module.returns_coroutine(1)):
        asyncio.run(later)
    with pytest.raises(KeyError):
        module.fail(KeyError("theirs"))
    assert log == []


def test_no_span_no_arrow(module, patches, rows, folder, spans_of):
    """A call that is no span has no arrow and one that raises no late arguments."""
    rltrace.start(folder)
    patches.span(
        "traced_program:add",
        "add",
        lambda a, b=1: None if a == 0 else {"a": a},
        lambda result, a, b=1: {"negative": -result},
        flow_out=lambda a, b=1: f"out {a}",
        flow_in=lambda a, b=1: f"in {a}",
    )
    with rltrace.span("around"):
        assert (module.add(0), module.add(1)) == (1, 2)
        with pytest.raises(TypeError):
            module.add("x")
    rltrace.stop()
    around, added, failed = spans_of(folder)
    assert (around.name, around.flows_out, around.flows_in) == ("around", (), ())
    assert (added.args, added.flows_out, added.flows_in) == ({"a": 1, "negative": -2}, ("out 1",), ("in 1",))
    message = 'can only concatenate str (not "int") to str'
    assert failed.args == {"a": "x", "error": "TypeError", "error_message": message}
    assert rows.rows["traced_program:add"].state == "installed"


def test_interrupt_in_hook(module, patches):
    """An interrupt in a hook is the program's own."""

    def interrupt(args, kwargs):
        raise KeyboardInterrupt

    patches.around("traced_program:add", interrupt, lambda token, result, error: None)
    with pytest.raises(KeyboardInterrupt):
        module.add(1)


def test_unknown_version(module, rows, log):
    """A framework of an older version is skipped with the reason."""
    original = module.add
    patches = PatchSet("test", rows, supports=("pytest >= 99",))
    watch(patches, "add", log)
    row = rows.rows["traced_program:add"]
    assert row.state == "skipped"
    assert row.reason == f"pytest {pytest.__version__} is not supported; this hook supports pytest >= 99"
    assert module.add is original
    patches.undo()
    assert row.state == "skipped", "what was never there is not taken back"


def test_public_hook(module, patches, rows):
    """A public hook is registered once and taken back."""
    registered = []

    def register(hook):
        assert hook.live, "it may be called at once"
        registered.append(hook)
        return registered.clear

    patches.use("traced_program:add", register)
    patches.use("traced_program:add", register)
    assert len(registered) == 1
    assert rows.rows["traced_program:add"].state == "installed"
    patches.undo()
    assert registered == []
    assert rows.rows["traced_program:add"].state == "undone"


def test_awaited_import_is_no_hook(module, patches, rows):
    """What waits for an import is no hook.

    It runs once, is live while recording is on, is taken back, and leaves no row among the hooks.
    """
    told = []
    patches.when_imported("traced_program", lambda awaited: told.append(awaited) or told.clear)
    (awaited,) = told
    assert awaited.live
    patches.hold(True)
    assert not awaited.live
    patches.undo()
    assert told == []
    assert rows.rows == {}
    assert patches.hooks == []


def test_awaited_import_failed(module, rows, capfd):
    """What waits for an import says why it was not done.

    By its module's name: skipped, with the versions that it knows, or failed.
    """
    PatchSet("old", rows, supports=("pytest >= 99",)).when_imported("traced_program", break_down)
    row = rows.rows["traced_program"]
    assert (row.state, row.reason) == (
        "skipped",
        f"pytest {pytest.__version__} is not supported; this hook supports pytest >= 99",
    )
    patches = PatchSet("broken", rows)
    patches.when_imported("traced_program", break_down)
    assert "ZeroDivisionError" in capfd.readouterr().err
    patches.undo()
    assert rows.rows["traced_program"].state == "failed"


def test_hooks_named_behind_import(module, patches, rows, log):
    """Hooks may be named behind an import.

    Which hooks there are may depend on the release: `modules` names those to import, as they become known.
    """
    patches.when_imported("traced_program", lambda _: watch(patches, "add", log))
    assert module.add(1, 1) == 2
    assert len(log) == 2
    assert list(rows.rows) == ["traced_program:add"]
    assert patches.modules() == ["traced_program"]


def test_dormant_hook(module, patches, rows, log):
    """A dormant hook passes calls through until it is wanted."""
    with patches.dormant() as switch:
        watch(patches, "add", log)
        assert module.add(1, 1) == 2  # its module is there already: it is bound at once
    watch(patches, "fail", log)
    log.clear()
    row = rows.rows["traced_program:add"]
    fired = row.count
    for on, seen in ((False, 0), (True, 2), (False, 0)):
        switch(on)
        assert module.add(1, 1) == 2
        assert (row.state, len(log), row.count - fired) == ("installed", seen, seen // 2)
        log.clear()
        fired = row.count
    with pytest.raises(KeyError):
        module.fail(KeyError())
    assert len(log) == 2  # one that is named behind is not dormant
    patches.undo()
    assert row.state == "undone"


def test_dormant_hook_waits(tmp_path, monkeypatch, patches, log):
    """A dormant hook whose module comes later sleeps too."""
    with patches.dormant() as switch:
        watch(patches, "add", log)
    (tmp_path / "traced_program.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("traced_program")
    try:
        module.add(1)
        assert log == []
        switch(True)
        module.add(1)
        assert len(log) == 2
    finally:
        del sys.modules["traced_program"]


def test_failed_hook_goes_on(module, patches, rows, log):
    """A hook that failed goes on and is undone all the same. Also one that was told to sleep in between."""
    failures = iter([True])

    def begin(args, _kwargs):
        if next(failures, False):
            raise LookupError("ours")
        log.append(args)

    with patches.dormant() as switch:
        patches.around("traced_program:add", begin, lambda *_: None)
    for on in (True, False, True):
        switch(on)
        module.add(1, 1)
    assert rows.rows["traced_program:add"].state == "failed"
    assert log == [(1, 1)]
    add = module.add
    patches.undo()
    assert rows.rows["traced_program:add"].state == "undone"
    switch(True)
    assert (add(1, 1), log) == (2, [(1, 1)])


def test_public_hook_failed(module, patches, rows, capfd):
    """A public hook that cannot be registered is said to have failed to the end."""
    patches.use("traced_program:add", break_down)
    assert "ZeroDivisionError" in capfd.readouterr().err
    patches.undo()
    assert rows.rows["traced_program:add"].state == "failed"


def test_wrapper_by_value(module, patches, log):
    """A wrapper that is sent by value works and is inert."""
    watch(patches, "add", log)
    cloudpickle.register_pickle_by_value(module)
    try:
        there = pickle.loads(cloudpickle.dumps(module.add))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert there is not module.add
    assert there(1) == 2
    assert log == []


def test_pickled_hook(rows):
    """A hook travels without its register."""
    hook = Hook("test", "a:b", ("x",), rows)
    copy = pickle.loads(pickle.dumps(hook))
    assert (copy.target, copy.emits, copy.live) == ("a:b", ("x",), False)
    hook.row.fired()
    copy.row.fired()
    assert rows.rows["a:b"].count == 1

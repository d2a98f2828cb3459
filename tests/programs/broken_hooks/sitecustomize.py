"""Makes every hook fail at the place that BROKEN names, in every process: run by Python's start-up, behind ours."""

import os
import sys
import zlib

PLACE = os.environ.get("BROKEN")


def broken(*_args, **_kwargs):
    raise ZeroDivisionError("a bug of ours")


def break_spans(**callables):
    """Hooks that are spans get these in place of their own."""
    span = patching.PatchSet.span

    def broken_span(self, target, name, args=None, late_args=None, **options):
        given = {"args": args, "late_args": late_args, **callables}
        options |= {key: given.pop(key) for key in callables if key.startswith("flow")}
        span(self, target, name, **given, **options)

    patching.PatchSet.span = broken_span


def break_wrappers(**callables):
    """Whatever is wrapped gets these in place of its `before` and `after`."""
    for name in [name for name in vars(wrapping) if name.startswith("wrap_") and name != "wrap_same_kind"]:
        setattr(wrapping, name, with_broken(getattr(wrapping, name), callables))
    for name, at in (("enter", "before"), ("leave", "after")):  # hooks that are no wrappers
        if at in callables:
            setattr(hook.Hook, name, with_broken_call(getattr(hook.Hook, name)))


def with_broken(wrap, callables):
    def wrapped(original, hook, before, after):
        given = {"before": before, "after": after, **callables}
        return wrap(original, hook, given["before"], given["after"])

    return wrapped


def with_broken_call(method):
    return lambda self, _callback, *rest: method(self, broken, *rest)


def break_in_turn():
    """Some hooks fail before the call that they are around, the others after it."""
    for name in [name for name in vars(wrapping) if name.startswith("wrap_") and name != "wrap_same_kind"]:
        wrap = getattr(wrapping, name)
        both = [with_broken(wrap, {at: broken}) for at in ("before", "after")]
        setattr(wrapping, name, lambda original, hook, *rest, both=both: both[turn_of(hook)](original, hook, *rest))
    for turn, name in enumerate(("enter", "leave")):
        method = getattr(hook.Hook, name)
        both = [method, with_broken_call(method)]
        setattr(
            hook.Hook,
            name,
            lambda self, *rest, both=both, turn=turn: both[turn_of(self) == turn](self, *rest),
        )


def turn_of(hook):
    return zlib.crc32(hook.target.encode()) % 2


def break_binding():
    """A hook's own code runs while it is put in place, too."""
    wrap, use = patching.PatchSet.wrap, patching.PatchSet.use
    patching.PatchSet.wrap = lambda self, target, make, *more, **options: wrap(self, target, broken, *more, **options)
    patching.PatchSet.use = lambda self, target, register, *more, **options: use(self, target, broken, *more, **options)


def break_look():
    """Every hook fails while it looks at what it is about to be put around."""
    binding.look = broken


def rename_parameter():
    """Torch is newer than what was read, and has renamed one parameter that one hook reads."""

    def rename(module):
        function = module.foreach_all_gather.__wrapped__  # behind `torch.no_grad`
        names = tuple("shards" if name == "fsdp_params" else name for name in function.__code__.co_varnames)
        function.__code__ = function.__code__.replace(co_varnames=names)

    known = binding.known()._replace(versions={**binding.known().versions, "torch": "2.6"})
    binding.known = lambda: known
    patching.register_post_import_hook(rename, "torch.distributed.fsdp._fully_shard._fsdp_collectives")


def break_install():
    """Every instrumentation fails once it has named its hooks."""
    load = plugins.load

    def load_broken(reference):
        made = load(reference)
        install = made.install

        def install_and_fail(self, patches):
            install(self, patches)
            broken()

        made.install = install_and_fail
        return made

    plugins.load = load_broken


def break_recorder():
    spans.automatic_span = spans.flow = lifecycle.identify = spans.counter = broken


def break_counting():
    writer.HookCount._fire_first = broken


def break_report():
    """What is reported of a hook cannot be written, once it waits for its module."""
    report = hook.Hook.report

    def broken_report(self, state, reason=None):
        report(self, state, reason)
        if state != "waiting":
            broken()

    hook.Hook.report = broken_report


if PLACE:
    # An installed rltrace waits for the first import already, and would join before anything is broken.
    waiting = [finder for finder in sys.meta_path if type(finder).__name__ == "FirstImport"]
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in waiting]
    from rltrace import plugins
    from rltrace.hooks import binding, hook, patching, wrapping
    from rltrace.record import lifecycle, spans, writer

    {
        "args": lambda: break_spans(args=broken),
        "late_args": lambda: break_spans(late_args=broken),
        "flow_out": lambda: break_spans(flow_out=broken),
        "flow_in": lambda: break_spans(flow_in=broken),
        "before": lambda: break_wrappers(before=broken),
        "after": lambda: break_wrappers(after=broken),
        "in turn": break_in_turn,
        "binding": break_binding,
        "look": break_look,
        "renamed": rename_parameter,
        "install": break_install,
        "recorder": break_recorder,
        "counting": break_counting,
        "report": break_report,
    }[PLACE]()
    sys.meta_path[:0] = waiting

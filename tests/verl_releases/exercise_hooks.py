"""Binds every hook of the installed verl, calls what it is put on, takes it back, and prints what came of it as JSON.

Usage: exercise_hooks.py RECORDING

Two ways of calling. `real_calls.py` calls verl's own code with small real input and lets it finish. Then every hooked
function is called on a bare object, with and without its hook: both must raise the same out of verl's own code.
"""

import asyncio
import faulthandler
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from contextlib import redirect_stdout

import real_calls

import rltrace
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.memory.chosen_allocations import ChosenAllocations
from rltrace.instrument.verl import Verl
from rltrace.record import allocation_steps, spans

MAGIC = "attrs_3141562937"
"""What verl's `@register` leaves on a method; without it a worker group does not know the method."""


class Rows:
    """The Recording's register of hooks, and what they last reported."""

    def __init__(self):
        self.states = {}

    def hook(self, instrumentation, target, state, reason=None, emits=()):
        self.states[target] = [state, reason]
        return spans.current().hook(instrumentation, target, state, reason, emits)


class Fired:
    """Counts how often each hook ran."""

    def __init__(self, hooks):
        self.counts = {}
        for hook in hooks:
            hook.row = CountedRow(hook.target, hook.row, self.counts)


class CountedRow:
    """The row of a hook in the Recording, counted here too."""

    def __init__(self, target, row, counts):
        self.target, self.row, self.counts = target, row, counts

    def fired(self):
        self.counts[self.target] = self.counts.get(self.target, 0) + 1
        self.row.fired()


def import_targets(patches):
    """Import every module that a hook waits for; what fails, by module."""
    failures = {}
    importlib.import_module("verl")  # only then it is known which release it is, and which hooks there are
    for module in patches.modules():
        try:
            importlib.import_module(module)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures[module] = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    return failures


def standing_at(patch):
    """What stands at a patch's place now."""
    return inspect.getattr_static(patch.owner, patch.attr)


def function_of(attribute):
    """What a class method or a static one is of; anything else is a function."""
    return getattr(attribute, "__func__", attribute)


def face(function):
    """What a caller, and verl itself, can tell of a function."""
    return {
        "coroutine": inspect.iscoroutinefunction(function),
        "generator": inspect.isgeneratorfunction(function),
        "signature": str(inspect.signature(function)),
        "name": function.__qualname__,
        "registered": str(vars(function).get(MAGIC)),
    }


def raised_by(function, owner):
    """What a function raises on a bare object and nothing else, as text; None if it returns."""
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    arguments = [None for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = {p.name: None for p in required if p.kind is p.KEYWORD_ONLY}
    if inspect.isclass(owner):
        arguments[:1] = [bare_object(owner)]
    asyncio.set_event_loop(asyncio.new_event_loop())  # whichever coroutine ran before takes its own away
    try:
        result = function(*arguments, **named)
        if inspect.iscoroutine(result):
            asyncio.run(result)
        elif inspect.isgenerator(result):
            list(result)
    except BaseException as error:
        return re.sub("0x[0-9a-f]+", "0x", f"{type(error).__name__}: {error}")
    return None


def bare_object(owner):
    """An instance that nobody has initialised."""
    concrete = type(owner.__name__, (owner,), dict.fromkeys(getattr(owner, "__abstractmethods__", ())))
    return object.__new__(concrete)


def main():
    rltrace.start(sys.argv[1], role="test")
    os.environ[allocation_steps.VARIABLE] = "7"
    chosen = PatchSet("chosen_allocations", spans.current())
    ChosenAllocations().install(chosen)
    rows = Rows()
    patches = PatchSet("verl", rows, Verl.supports)
    Verl().install(patches)
    failures = import_targets(patches)
    replaced = {patch.hook.target: patch for patch in patches._patches}
    faces = {
        target: [face(function_of(at)) for at in (patch.original, patch.replacement)]
        for target, patch in replaced.items()
    }
    in_place = [target for target, patch in replaced.items() if standing_at(patch) is patch.replacement]
    fired = Fired(patches.hooks)
    errors = real_calls.call_all()
    called = sorted(fired.counts)
    raised = {
        target: [raised_by(function_of(at), patch.owner) for at in (patch.original, patch.replacement)]
        for target, patch in replaced.items()
        if target not in called and not target.startswith("torch.")
    }
    chosen.undo()
    left = patches.undo()
    fired_before = dict(fired.counts)
    inert = {
        target: raised_by(function_of(patch.replacement), patch.owner)
        for target, patch in replaced.items()
        if target in raised
    }
    rltrace.stop()
    return {
        "states": rows.states,
        "failures": failures,
        "faces": faces,
        "in_place": in_place,
        "called": called,
        "errors": errors,
        "raised": raised,
        "inert": inert,
        "fired": fired_before,
        "fired_after_undo": {t: n for t, n in fired.counts.items() if n != fired_before[t]},
        "restored": [target for target, patch in replaced.items() if standing_at(patch) is patch.original],
        "left": left,
    }


if __name__ == "__main__":
    faulthandler.dump_traceback_later(240, exit=True)  # a call that hangs says where
    try:
        with redirect_stdout(sys.stderr):
            found = main()
        json.dump(found, sys.stdout)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # what verl and its dependencies left running has no part in this

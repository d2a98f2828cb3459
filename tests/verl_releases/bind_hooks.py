"""Imports every module that a hook of the installed verl waits for, and prints what became of each hook, as JSON."""

import importlib
import inspect
import json
import sys
import traceback

from rltrace.instrument.verl import Verl
from rltrace.patching import PatchSet

MAGIC = "attrs_3141562937"
"""What verl's `@register` leaves on a method; without it a worker group does not know the method."""


class Rows:
    """A register that keeps what hooks report."""

    def __init__(self):
        self.states = {}

    def hook(self, instrumentation, target, state, reason=None, emits=()):
        self.states[target] = [state, reason]
        return self

    def fired(self):
        pass


def attribute(target):
    """What stands at a target, unbound."""
    module, _, path = target.partition(":")
    *parents, attr = path.split(".")
    owner = sys.modules[module]
    for parent in parents:
        owner = getattr(owner, parent)
    found = inspect.getattr_static(owner, attr)
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def face(function):
    """What a caller, and verl itself, can tell of a function."""
    return {
        "kind": [inspect.iscoroutinefunction(function), inspect.isgeneratorfunction(function)],
        "signature": str(inspect.signature(function)),
        "registered": hasattr(function, MAGIC),
    }


def main():
    rows = Rows()
    patches = PatchSet("verl", rows, Verl.supports)
    Verl().install(patches)
    failures = {}
    for hook in patches.hooks:  # grows when the first one finds out which release it is
        try:
            importlib.import_module(hook.target.partition(":")[0])
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            failures[hook.target] = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    bound = {target: state for target, state in rows.states.items()}
    replaced = {patch.hook.target: patch for patch in patches._patches}
    faces = {target: [face(patch.original), face(patch.replacement)] for target, patch in replaced.items()}
    in_place = [target for target, patch in replaced.items() if attribute(target) is patch.replacement]
    left = patches.undo()
    restored = [target for target, patch in replaced.items() if attribute(target) is patch.original]
    json.dump(
        {
            "states": bound,
            "failures": failures,
            "faces": faces,
            "in_place": in_place,
            "restored": restored,
            "left": left,
        },
        sys.stdout,
    )


main()

"""Placeholders for the names that verl imports from vLLM, so that verl's own modules import without it.

Nothing of vLLM works here: each name is an empty class. What verl's hooks do beneath vLLM is another test's business.
"""

import sys
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType


class Placeholders:
    """Finds every `vllm.*` and makes its names when they are asked for."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("vllm.") else None

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        module.__getattr__ = lambda name: placeholder(module, name)


def placeholder(module, name):
    """An empty class, the same at every asking."""
    if name.startswith("__"):
        raise AttributeError(name)
    made = type(name, (), {"__module__": module.__name__})
    setattr(module, name, made)
    return made


__version__ = metadata.version("vllm")  # of an empty distribution that the test makes

sys.meta_path.append(Placeholders())  # behind the hooks' own finder, which looks for modules in those after it


def __getattr__(name):
    return placeholder(sys.modules[__name__], name)

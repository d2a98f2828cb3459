"""Runs when a Python starts with this folder on PYTHONPATH; first the `sitecustomize` that it would have run without.

Where rltrace is installed, `rltrace-startup.pth` does the same and needs no PYTHONPATH.
"""

import os
import sys


def run_next_sitecustomize():
    """Run the `sitecustomize` behind ours on the path; what it raises is Python's to report."""
    # The frozen halves of importlib: they are loaded already, importlib.util would cost each start 4 ms.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    ran = vars(sys).setdefault("_rltrace_startups", set())  # two copies of rltrace would find each other for ever
    ran.add(os.path.dirname(os.path.realpath(__file__)))
    behind = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) not in ran]
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    run_next_sitecustomize()
finally:
    if os.environ.get("RLTRACE_DIR") and os.environ.get("RLTRACE_OFF", "") in ("", "0"):
        import rltrace_startup  # noqa: F401 - beside this file

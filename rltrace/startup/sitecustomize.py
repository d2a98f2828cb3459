"""Runs when a Python starts with this folder on PYTHONPATH: joins the Recording that RLTRACE_DIR names.

First the `sitecustomize` that Python would have run without us is run, as Python would have. Then nothing happens until
the program imports something that is not the standard library: a process that never does has nothing to trace, and pays
nothing. No framework is imported here.
"""

import os
import sys

# Ray's own services, and helpers that the standard library starts. A Ray worker's interpreter runs twice with one pid:
# setup_worker.py sets up the environment and then executes default_worker.py, which is the one to trace.
UNTRACED = (
    "/ray/dashboard/",
    "/ray/_private/log_monitor.py",
    "/ray/_private/runtime_env/",
    "/ray/_private/workers/setup_worker.py",
    "/ray/autoscaler/",
    "/ray/scripts/",
    "/bin/ray",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
)


def run_next_sitecustomize():
    """Run the `sitecustomize` behind ours on the path; what it raises is Python's to report."""
    # The frozen halves of importlib: they are loaded already, importlib.util would cost each start 4 ms.
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder

    here = os.path.dirname(os.path.realpath(__file__))
    behind = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != here]
    spec = PathFinder.find_spec("sitecustomize", behind)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def is_traced(command):
    """Whether a process started by this command line is one to trace."""
    words = " ".join(command)
    return not any(name in words for name in UNTRACED)


class FirstImport:
    """Waits on `sys.meta_path` for the first import from outside the standard library, then joins and steps aside."""

    # No typing here, nor any import that a bare interpreter would not do anyway: this runs in every process.
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NOT_YET or name.startswith("_sysconfigdata"):
            return None
        # The standard library tries names that only Jython has, in the middle of its own modules: not yet.
        others = [finder for finder in sys.meta_path if finder is not self]
        if first_spec(others, name, path, target) is None:
            return None
        try:
            sys.meta_path.remove(self)
        except ValueError:  # another thread was first
            return None
        join()
        # Asked again: the hooks' own finder was just put in front of the list that is being walked.
        return first_spec(sys.meta_path, name, path, target)


def first_spec(finders, name, path, target):
    """What the first of the finders that knows the module says of it."""
    for finder in list(finders):
        find_spec = getattr(finder, "find_spec", None)  # importlib passes over older finders too
        spec = None if find_spec is None else find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


NOT_YET = sys.stdlib_module_names | {"sitecustomize", "usercustomize", "apport_python_hook"}


def join():
    """Join the Recording and install the hooks; one line on stderr if that fails."""
    try:
        from rltrace import cluster, instrument, recorder

        if recorder.join(cluster.recording_here(os.environ)) is not None:
            instrument.install(recorder.current())
    except Exception as error:
        print(f"rltrace: this process is not traced: {type(error).__name__}: {error}", file=sys.stderr)


try:
    run_next_sitecustomize()
finally:
    if os.environ.get("RLTRACE_DIR") and is_traced(sys.orig_argv):
        sys.meta_path.insert(0, FirstImport())

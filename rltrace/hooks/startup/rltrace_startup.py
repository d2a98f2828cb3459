"""Joins this Python process to the Recording that RLTRACE_DIR names, at its first import of a package.

Loaded while Python starts: by `rltrace-startup.pth` where rltrace is installed, by `sitecustomize.py` where this folder
is on PYTHONPATH, or by both, once. A process that imports nothing but the standard library has nothing to trace, and
pays nothing. No framework is imported here.
"""

import os
import sys

# Ray's own services. A Ray worker's interpreter runs twice with one pid: setup_worker.py sets up the environment and
# then executes default_worker.py, which is the one to trace.
SERVICES_OF_RAY = (
    "dashboard/",
    "_private/log_monitor.py",
    "_private/runtime_env/",
    "_private/workers/setup_worker.py",
    "autoscaler/",
    "scripts/",
)
# Helpers that the standard library, our example and rltrace itself start. multiprocessing's forkserver is none: whoever
# it forks has its command line.
HELPERS = ("/bin/ray", "/rltrace_reference/reaper.py", "rltrace.run.cluster_sidecar")
TRACKER = "from multiprocessing.resource_tracker import main"

NOT_YET = sys.stdlib_module_names | {"sitecustomize", "usercustomize", "apport_python_hook", "rltrace_startup"}


def is_traced(command: list[str]) -> bool:
    """Tell whether to trace a process that was started by this command line; its arguments may have any name."""
    program = next((word for word in command[1:] if not word.startswith("-")), "")  # a script, a module or a code
    return not (program.endswith(HELPERS) or program.startswith(TRACKER) or is_service_of_ray(program))


def is_service_of_ray(script: str) -> bool:
    """Whether a script is one of those, and no user's in a folder that is named alike."""
    folder, _, within = script.rpartition("/ray/")
    return within.startswith(SERVICES_OF_RAY) and os.path.exists(f"{folder}/ray/_raylet.so")


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
        join_undisturbed()
        # Asked again: the hooks' own finder was just put in front of the list that is being walked.
        return first_spec(sys.meta_path, name, path, target)


def first_spec(finders, name, path, target):
    """Return what the first finder that knows the module says of it."""
    for finder in list(finders):
        find_spec = getattr(finder, "find_spec", None)  # importlib passes over older finders too
        spec = None if find_spec is None else find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def join_undisturbed():
    """Join, and let signals wait meanwhile: modules whose import a signal handler's error ends stay broken."""
    from _signal import SIG_BLOCK, SIG_SETMASK, pthread_sigmask, valid_signals

    before = pthread_sigmask(SIG_BLOCK, valid_signals())
    try:
        join()
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def join():
    """Join the Recording and install the hooks; a failure is one line on stderr and one in the Recording."""
    try:
        from rltrace.hooks.installation import join_run
    except Exception as error:
        say_untraced(f"{type(error).__name__}: {error}")
    else:
        join_run()


def say_untraced(reason):
    """Say that this process is not traced: rltrace, or what it needs, is not there for this interpreter."""
    if os.environ.get("RAY_RUNTIME_ENV_HOOK", "").startswith("rltrace."):  # Ray would import it, and fail
        del os.environ["RAY_RUNTIME_ENV_HOOK"]
    try:
        # Not by `print`: without a stderr it takes stdout, and what it cannot write makes 120 of the exit code.
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"rltrace: this process is not traced: {reason}\n".encode(errors="replace"))
    except Exception:  # it takes nothing
        pass
    try:
        import json

        line = {"pid": os.getpid(), "command": [sys.executable], "reason": reason}  # its arguments may hold secrets
        with open(os.path.join(os.environ["RLTRACE_DIR"], "untraced.jsonl"), "a") as lines:
            lines.write(json.dumps(line) + "\n")
    except Exception:  # the folder may be the reason
        pass


def is_asked_for(environment):
    """Whether this process is to join: whoever only records itself hands its children a folder, but no hooks."""
    inherits_hooks = "RLTRACE_HOOKS" in environment or "RLTRACE_PARENT" not in environment
    is_on = bool(environment.get("RLTRACE_DIR")) and environment.get("RLTRACE_OFF", "") in ("", "0")
    return is_on and inherits_hooks and is_traced(sys.orig_argv)


if __name__ == "rltrace_startup" and is_asked_for(os.environ):
    os.environ["RLTRACE_DIR"] = os.path.abspath(os.environ["RLTRACE_DIR"])  # children may run in other folders
    sys.meta_path.insert(0, FirstImport())

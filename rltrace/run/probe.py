"""The questions that `rltrace doctor` asks a command's interpreter: `python -m rltrace.run.probe QUESTION [WORD]`.

Each question is a process of its own, in the environment of `rltrace exec`, so that what breaks one does not affect the
others. The answer is one line of JSON. A process that the start-up hook reached leaves a span in the Recording, as the
processes of a traced program do.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import rltrace
from rltrace import plugins
from rltrace.hooks import versions
from rltrace.hooks.installation import installed, join_run
from rltrace.hooks.patching import PatchSet
from rltrace.record import manifest, spans

HERE = "doctor.here"
"""The span of a process that the start-up hook reached; `place` says which process it is."""

SPAWNED, SUBPROCESS, RAY_WORKER = "spawned child", "subprocess", "Ray worker"

RAY_SECONDS = 120.0


def interpreter() -> dict[str, Any]:
    """Return which Python this is, what is installed for it, and whether the start-up hook ran."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "rltrace": os.path.dirname(rltrace.__file__),
        "joined": spans.current() is not None,
        "versions": manifest.installed_versions(),
    }


def module(name: str) -> dict[str, Any]:
    """Return whether `python -m NAME` would find something to run, from the current folder.

    Returns:
        `error`: null if it would.
    """
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        return {"error": str(error)}
    except Exception as error:  # a package above it fails while it is imported
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None if spec is not None else f"No module named {name!r}"}


def hooks() -> dict[str, Any]:
    """Import every module that has hooks. What became of the hooks is in the Recording.

    Returns:
        `frameworks`: package and version by instrumentation, the version null where it is not installed. `errors`: by
            instrumentation and module.
    """
    join_run()
    frameworks: dict[str, tuple[str, str | None]] = {}
    errors: dict[str, dict[str, str]] = {}
    patch_sets = installed().patch_sets
    for name, reference in plugins.instrumentations().items():
        supports = plugins.load(reference).supports
        if not supports:  # of our own example
            continue
        package = supports[0].split()[0]
        frameworks[name] = package, versions.installed_version(package)
        if frameworks[name][1] is not None and name in patch_sets:
            errors[name] = import_targets(patch_sets[name])
    return {"frameworks": frameworks, "errors": errors}


def import_targets(patches: PatchSet) -> dict[str, str]:
    """Import the modules that an instrumentation's hooks wait for; return those that cannot be imported, with the
    error."""
    errors: dict[str, str] = {}
    tried: set[str] = set()
    # Which hooks there are may be known only once the framework itself is imported.
    while waiting := [module for module in patches.modules() if module not in tried]:
        tried.update(waiting)
        for module in waiting:
            try:
                importlib.import_module(module)
            except Exception as error:
                errors[module] = f"{type(error).__name__}: {error}"
    return errors


def children() -> dict[str, Any]:
    """Start a child by multiprocessing, as engines do, and one as launchers do."""
    import multiprocessing

    spawned = multiprocessing.get_context("spawn").Process(target=say_here, args=(SPAWNED,))
    spawned.start()
    spawned.join()
    code = f"from rltrace.run.probe import say_here; say_here({SUBPROCESS!r})"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    return {SPAWNED: spawned.exitcode, SUBPROCESS: done.returncode}


def ray_worker() -> dict[str, Any]:
    """Run a task on a real Ray worker, of the cluster that RAY_ADDRESS names or else of one that is started for it."""
    import ray

    begun = time.monotonic()
    folder = tempfile.mkdtemp(prefix="rlt-", dir="/tmp")  # short: it holds Unix sockets
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        ray.get(ray.remote(num_cpus=0)(say_here).remote(RAY_WORKER), timeout=RAY_SECONDS)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    return {"seconds": time.monotonic() - begun, "address": os.environ.get("RAY_ADDRESS")}


def nvml() -> dict[str, Any]:
    """Return whether the GPUs of this machine can be asked for their memory."""
    gpus = len(glob.glob("/dev/nvidia[0-9]*"))
    if gpus == 0:
        return {"gpus": 0, "error": None}
    try:
        import pynvml

        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
        return {"gpus": gpus, "error": None}
    except Exception as error:
        return {"gpus": gpus, "error": f"{type(error).__name__}: {error}"}


def say_here(place: str) -> None:
    """Leave a span in the Recording, if this process is traced."""
    with rltrace.span(HERE, place=place):
        pass


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "interpreter": interpreter,
    "module": module,
    "hooks": hooks,
    "children": children,
    "ray_worker": ray_worker,
    "nvml": nvml,
}

if __name__ == "__main__":
    answer = QUESTIONS[sys.argv[1]](*sys.argv[2:])
    print(json.dumps(answer))

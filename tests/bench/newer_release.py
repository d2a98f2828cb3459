"""What it takes to put every hook on torch in place: in a release that was read, and in one that is newer.

    python tests/bench/newer_release.py

Each is a process of its own. Processor time, of importing torch and its FSDP as well, for comparison.
"""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

from rltrace import plugins
from rltrace.hooks import binding
from rltrace.hooks.patching import PatchSet
from rltrace.instrument.memory import allocation_owners, cuda_memory
from rltrace.instrument.torch import cuda_time

IMPORTED = ("torch", "torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.nn.parallel.distributed")
TIMES = 5


class Rows:
    """Where hooks report to; nobody reads it."""

    def hook(self, *_args: Any, **_kwargs: Any) -> Rows:
        return self

    def fired(self) -> None:
        pass


def measure(release: str) -> None:
    """Print the milliseconds of the imports and of the hooks, and how many hooks there are."""
    began_ns = time.process_time_ns()
    for module in IMPORTED:
        importlib.import_module(module)
    imported_ns = time.process_time_ns()
    known = binding.known()
    if release == "newer":
        known = known._replace(versions=dict.fromkeys(known.versions, "0.1"))
    bound = 0
    with contextlib.ExitStack() as patched:
        patched.enter_context(mock.patch.object(binding, "known", lambda: known))
        for needing in (allocation_owners, cuda_memory, cuda_time):
            patched.enter_context(mock.patch.object(needing, "DRIVER", Path("/dev/null")))
        for name, reference in plugins.INSTRUMENTATIONS.items():
            instrumentation = plugins.load(reference)()
            if instrumentation.supports and instrumentation.supports[0].startswith("torch "):
                patches = PatchSet(name, Rows(), instrumentation.supports)  # type: ignore[arg-type]
                instrumentation.install(patches)
                bound += sum(hook.state == "installed" for hook in patches.hooks)
    print(f"{(imported_ns - began_ns) / 1e6:.0f} {(time.process_time_ns() - imported_ns) / 1e6:.1f} {bound}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for release in ("read", "newer"):
            for _ in range(TIMES):
                done = subprocess.run([sys.executable, __file__, release], capture_output=True, text=True, check=True)
                imports_ms, hooks_ms, hooks = done.stdout.split()
                print(f"{release}: {hooks} hooks in {hooks_ms} ms, imports {imports_ms} ms", flush=True)

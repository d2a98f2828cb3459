"""Starts what the tests of GPUs look at: the command line of the package that is tested, programs and the example."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpu.yaml"
MIB, GIB = 1 << 20, 1 << 30
GRANULE_BYTES = 2 << 20
"""Of the driver's memory."""


def rltrace_(*words: str, timeout_s: float = 280, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line, with these variables added to its environment."""
    cli = "import sys; from rltrace.cli import main; main(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", cli, *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=os.environ | environment,
    )


def exec_(
    folder: Path, programs: dict[str, str], *words: str, sample_s: float = 1.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The first of these programs under `rltrace exec`; what it recorded is in `folder/run`.

    Args:
        folder: Gets the programs as files, and is on their path: one named `sitecustomize` runs in each process.
        programs: Source by name.
        *words: Its arguments.
        sample_s: Of the sampler.
        **environment: Added to its own.
    """
    for name, source in programs.items():
        (folder / f"{name}.py").write_text(source)
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTHONPATH": path, **environment}  # as NVML counts them
    program = [sys.executable, str(folder / f"{next(iter(programs))}.py"), *words]
    return rltrace_("exec", "--out", str(folder / "run"), "--sample", str(sample_s), "--", *program, **variables)


def reference_run(folder: Path, **changes: dict[str, Any] | Any) -> subprocess.CompletedProcess[str]:
    """The example, changed in these keys of its parts, under `rltrace run`."""
    config = yaml.safe_load(EXAMPLE.read_text())
    for part, keys in changes.items():
        config[part] = config[part] | keys if isinstance(keys, dict) else keys
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return rltrace_("run", str(folder / "config.yaml"), "--out", str(folder / "run"))

"""An instrument that is not rltrace's: each GPU's used memory by NVML, ten times a second, with the monotonic clock.

Usage: nvml_log.py LOG [HZ]

A line is `monotonic_ns`, the GPU's uuid and the bytes that are not free, as `nvidia-smi` counts them. It ends when it
is killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pynvml


def main(log: Path, hz: float = 10.0) -> None:
    """Write until the end."""
    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(gpu) for gpu in gpus]
    due_s = time.monotonic()
    with log.open("w", buffering=1) as lines:
        while True:
            for uuid, gpu in zip(uuids, gpus, strict=True):
                used_bytes = pynvml.nvmlDeviceGetMemoryInfo(gpu).used  # version 1: with what the driver reserves
                lines.write(f"{time.monotonic_ns()} {uuid} {used_bytes}\n")
            due_s += 1 / hz
            time.sleep(max(0.0, due_s - time.monotonic()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:]))

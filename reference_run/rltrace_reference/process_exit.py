"""How a process ended, in words; also for a process that is somebody else's child."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time

PIDFD_GET_INFO = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes); Linux 6.13
PIDFD_INFO_EXIT = 1 << 3  # Linux 6.15
INFO_BYTES = 64
REAP_SECONDS = 1.0
"""How long the parent may take to notice; before that the kernel does not say."""


def in_words(code: int | None) -> str:
    """Return `killed by SIGKILL` for -9 and `exit code 1` for 1, as `subprocess` counts; None is unknown."""
    if code is None:
        return "killed or crashed"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def exit_code(pidfd: int) -> int | None:
    """Return the exit code of an ended process by its pidfd, negative for a signal; None if the kernel does not say."""
    end = time.monotonic() + REAP_SECONDS
    while time.monotonic() < end:
        info = bytearray(struct.pack("Q", PIDFD_INFO_EXIT).ljust(INFO_BYTES, b"\0"))
        try:
            fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
        except OSError:
            return None
        if struct.unpack_from("Q", info)[0] & PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(struct.unpack_from("i", info, INFO_BYTES - 4)[0])
        time.sleep(0.01)
    return None

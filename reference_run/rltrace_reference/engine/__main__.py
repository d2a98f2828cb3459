"""The engine process: `python -m rltrace_reference.engine SOCKET_FD`, started by the rank's worker (`rollout.py`)."""

from __future__ import annotations

from rltrace_reference import garbage

if __name__ == "__main__":
    garbage.pause()
    from rltrace_reference.engine import server  # imports torch

    server.main()

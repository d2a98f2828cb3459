"""Beside the command: what `rltrace run`, `exec`, `doctor` and `collect` do while, before and after it runs.

In: a command and the folder to record in. Out: the same command traced, its exit code and signals untouched, and in the
Recording what no traced process can say itself: how it ended (`supervisor.py`, `group_watcher.py`), what hosts and GPUs
were doing (`sampler.py`, `host_usage.py`), who was not traced (`untraced.py`), the clocks and segments of other hosts
(`nodes.py`, `collection.py`).

`sampler.py` and `cluster_sidecar.py` are processes of their own; `sidecar.py` is how one starts and ends, so that no
thread of a traced program waits for us. `doctor.py` asks before a run, by `probe.py` in the command's own interpreter,
`launchers.py` for what a command starts in the end, and `storage.py` for the place of the Recording.

To watch another thing during a run, add a value to `host_usage.py`, or a sidecar of its own.
"""

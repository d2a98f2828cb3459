"""What `rltrace run`, `exec`, `doctor` and `collect` do beside the command: before, while and after it runs.

In: a command and the folder to record in. Out: the same command, traced, with its exit code and signals untouched. The
Recording also gets what no traced process can say itself: how each process ended (`supervisor.py`), what hosts and GPUs
were doing (`sampler.py`, `host_usage.py`), which processes were not traced (`untraced.py`), and the clocks and segments
of other hosts (`nodes.py`, `process_files.py`, `collection.py`), or of some steps only (`abridgement.py`). When it is
over, `compaction.py` makes it a tenth as large. `group_watcher.py` tells the supervisor which signals went to the whole
process group.

`sampler.py`, `cluster_sidecar.py`, `live_export.py` and `step_totals.py` (for trackers) run as processes of their own,
so that no thread of a traced program waits for us. `sidecar.py` starts and ends such a process. `doctor.py` checks a
command before its run: it asks the command's own interpreter with `probe.py`, finds out with `launchers.py` what the
command starts in the end, and checks the place of the Recording with `storage.py`.

To add a figure of a host, sample it in `host_usage.py`; of a GPU, in `host/nvml.py`. Its name belongs in `SAMPLED` of
`events.py`. `supervisor.py` sees who died and writes how; `analysis/processes.py` and `fates.py` judge it. To watch
anything else, add a sidecar.
"""

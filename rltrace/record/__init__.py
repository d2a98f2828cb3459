"""Writes spans into segments: what a traced process writes, and the files that it writes.

In: calls of `span`, `counter`, `flow` and `traced`, by a program or by a hook. Out: the folder of one process in a
Recording, with `process.jsonl` (`process.py`) and the segments of its threads (`segment.py`), beside the run's
`manifest.json` (`manifest.py`) and the files by which the processes of a run agree (`cluster.py`,
`allocation_steps.py`) and tell of each other's clocks (`clock_readings.py`). `spans.py` holds the hot path, `writer.py`
the folder and the segments of this process under the lock of `lock.py`, `lifecycle.py` start, pause and stop,
`encoding.py` a record's bytes, `repeated.py` spans of places that a step passes hundreds of times. What is hot in
`spans.py` and `repeated.py` is written by `native/`. `disk_budget.py` says how much disk a run may use. `torch/` keeps
a chosen part of a run whole.

Nothing here raises into the traced program, and nothing has a thread or a buffer. `import rltrace` loads all of it: the
standard library and msgspec only.

To add a kind of record, add its array to `spans.py`, its reading to `read/event_reader.py`, its type to `events.py`,
and its row to the table of the format. To add what a process says of itself, add it to `identity` in `process.py`, its
check to `IDENTITY` in `read/gate.py`, and a property to `Process` in `read/process.py`.
"""

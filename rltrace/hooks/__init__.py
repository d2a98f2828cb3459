"""Hooks on code that is not ours: how they are put there, what they share, and how they get into every process.

In: the targets that an instrumentation names ("module:Class.method"), and the environment of a command. Out: calls of
the recorder around these targets, a row for each hook (installed, skipped and why, how often it fired), and memory
looked at on both sides of each phase.

`installation.py` installs the instrumentations and lets a process join a run; `patching.py` holds the only `setattr` on
foreign code; `versions.py` says which releases a hook knows; `boundaries.py` tells who watches memory that a phase
begins or ends, and `phase.py` is the phase that a program marks itself; `open_span.py`, `request_spans.py` and
`bucket_flow.py` are the spans that several frameworks have; `cost.py` measures what an event costs. `environment.py`
and `startup/` reach the processes of a run: `startup/` is no package, for Python runs it before anything else can be
imported.

To hook another place of a framework, go to its file in `instrument/`. A new kind of wrapper belongs into `patching.py`.
"""

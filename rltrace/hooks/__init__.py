"""Hooks on foreign code: how they are put there, what they share, and how they get into every process.

In: the targets that an instrumentation names ("module:Class.method"), and the environment of a command. Out: calls of
the recorder around these targets, a row for each hook (installed, skipped and why, how often it fired), and a look at
memory at every phase boundary.

`installation.py` installs the instrumentations and lets a process join a run. `patching.py` has the only `setattr` on
foreign code, `arguments.py` finds an argument of a call, and `versions.py` says which releases a hook knows.
`boundaries.py` tells those who watch memory that a phase begins or ends, and `phase.py` is the phase that a program
marks itself. `held_span.py`, `request_spans.py`, `serving.py` and `bucket_flow.py` are the spans that several
frameworks have; `cost.py` measures what an event costs. `environment.py` and `startup/` reach the processes of a run:
`startup/` is no package, because Python runs it before anything else can be imported.

To hook another place of a framework, go to its file in `instrument/`. A new kind of wrapper belongs into `patching.py`.
"""

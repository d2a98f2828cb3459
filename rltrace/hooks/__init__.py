"""Hooks on foreign code: how they are put there, what they share, and how they get into every process.

In: the targets that an instrumentation names ("module:Class.method"), and the environment of a command. Out: calls of
the recorder around these targets, a row for each hook (installed, skipped and why, how often it fired), and a look at
memory at every phase boundary.

`installation.py` installs the instrumentations and lets a process join a run. `patching.py` has the only `setattr` on
foreign code, `wrapping.py` a wrapper for each kind of function, and `hook.py` what a hook counts and how it fails.
`arguments.py` finds an argument of a call, `call_frames.py` a variable of a caller, and `versions.py` says which
releases are too old for a hook.
In a release that is newer than the last one that was read, `binding.py` decides by what is there, from the source that
`sources.py` reads and from `digests.json`.
`boundaries.py` tells those who watch memory that a phase begins or ends, and `phase.py` is the phase that a program
marks itself. `held_span.py`, `request_spans.py`, `serving.py` and `bucket_flow.py` are the spans that several
frameworks have; `cost.py` measures what an event costs. `environment.py` and `startup/` reach the processes of a run:
`startup/` is no package, because Python runs it before anything else can be imported.

To add a kind of wrapper, write it in `wrapping.py`. Another place of a framework belongs in its file in `instrument/`.
"""

"""A chosen part of a run, kept whole by torch's own means: every operator and kernel, every allocation.

In: `rltrace.start_kernels` and `rltrace.start_allocations`, with their `stop_` halves. Out: spans and counters of the
Recording, on its own clock, each with the bound of its error. torch is imported by the process that starts such a part
and by no other. To add one, write a file with a `start_` and a `stop_` and name both in `rltrace/__init__.py`.
"""

"""The reference run (`rltrace_reference`): its phases and its memory, hooked as any other program's.

In: the functions and methods of `rltrace_reference`. Out: the spans of a step (`phases.py`) and its bytes by owner
(`memory.py`). To add a part of the run, add a line to `phases.py`.
"""

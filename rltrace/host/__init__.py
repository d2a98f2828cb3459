"""What this machine says: its clock, its processes, its memory, its GPUs, its files and its terminal.

In: the kernel, the C library and NVML, each asked when a caller asks. Out: values with their units in the name. Nothing
is recorded or kept here, no framework is imported, and nothing here wakes CUDA up: every other room may ask.

To add a question, write one function in the file of the thing that is asked (`clock`, `parents`, `memory`, `nvml`,
`gpu_use`, `machine`); a figure that cannot be had is an error with its reason, never a zero. Code that runs in a traced
process catches errors as `interruption.py` says: those that come from outside pass.
"""

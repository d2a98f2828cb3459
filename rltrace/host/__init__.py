"""What this machine says about its clock, processes, memory, GPUs, files and terminal.

In: the kernel, the C library and NVML, each asked when a caller asks. Out: values with their units in the name. Nothing
is recorded or kept here, no framework is imported, and nothing here initializes CUDA, so every other room may ask.

`native_library.py` has the compiler make our own libraries.

To add a question, write one function in the file of the thing that is asked (`clock`, `parents`, `memory`, `nvml`,
`gpu_use`, `machine`). A figure that cannot be had is an error with its reason, never a zero. Code that runs in a traced
process catches errors with the helpers of `interruption.py`, which let errors from outside pass.
"""

"""torch: sharded models, optimizers, backwards, ranks, and time on the GPU's streams.

In: calls of `fully_shard`, FSDP1, optimizers, autograd and process groups. Out: spans of the host (`fsdp.*`,
`optimizer.step`, `autograd.backward`), and beside them spans of the GPU (`gpu.*`), which `cuda_time.py` makes of CUDA
events by `device_time.py`. `launcher.py` knows what torchrun and SLURM say, and `host_clocks.py` reads the clocks of
their hosts. `modules.py` has the hooks on torch's modules, and `dynamo.py` keeps them out of compiled
graphs. Who owns the bytes is said in `memory/`.

`step_follower.py` finds out in which chosen step a process is, by `loop_steps.py` where nobody marks steps. In such a
step `kept_step.py` has something kept: kernels by `chosen_kernels.py`, allocations in `memory/`. By the same
`loop_steps.py`, `chosen_loop_steps.py` tells which steps are recorded in full.

To add a part of torch, write one file with a class of `name`, `supports` and `install`, and one line in `plugins.py`.
"""

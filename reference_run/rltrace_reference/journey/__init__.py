"""The memory journey: the same run with one more idea each time, under the same memory, side by side.

In: the configurations of `examples/memory_journey/`. Out: a Recording of each, a table and a picture. `__main__.py` is
the command, `table.py` and `picture.py` show what `run_figures.py` has read and `prediction.py` said beforehand.
To add a variant, write a `v*.yaml` with the keys that it changes; to add a row, a line in `table.py`.

Source: "Efficient RL Training - Optimizing Memory Usage in verl", section 4.
"""

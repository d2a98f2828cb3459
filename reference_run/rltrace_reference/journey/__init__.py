"""The memory journey: the same run with one more idea each time, under the same memory, side by side.

In: the configurations of `examples/memory_journey/`. Out: a Recording of each, a table and a picture. `__main__.py` is
the command, `prediction.py` says beforehand which phase has no room, `figures.py` reads what became of it, `table.py`
and `picture.py` show it.

Source: "Efficient RL Training - Optimizing Memory Usage in verl", section 4.
"""

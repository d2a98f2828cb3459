"""The plan of a run before it runs: shapes and settings in, bytes of each owner in each phase out.

In: a configuration of the reference run, of verl or of TRL (`settings_*.py` read one framework each), the shape of a
model (`shapes.py`), a card (`cards.py`), and what an earlier Recording measured (`measured.py`). Out: a `Plan`.

`training.py` walks through a trainer's allocations on a model of torch's caching allocator (`allocator.py`).
`engine.py` has vLLM's rules; `processes.py` and `constants.py` have what no shape says. `phases.py` puts them together,
`ceilings.py` says how far each setting can go, and `rates.py` how long phases take.

To add a framework, write a `settings_NAME.py` that returns `Settings`, and name it in `rltrace/cli/plan.py`.
"""

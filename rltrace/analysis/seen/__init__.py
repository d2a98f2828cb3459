"""What is kept of each process: its rows go through once, and what the figures are computed from stays.

In: the columns of a process (`rltrace/read/columns.py`), some ten thousand rows at a time. Out: a `Seen`
(`process.py`), all times of which are on the Recording's time line. `Observations` (`../observations.py`) has those of
all processes.

`spans.py`, `samples.py` and `looked.py` say what of spans, samples and looks at memory is kept. `names.py` says what a
span is by its name, `rows.py` finds rows that belong together. `seeing.py` begins and ends a process; in between
`span_rows.py`, `request_rows.py` and `sample_rows.py` take what counts of its rows.

To add what a new figure needs, give `Seen` a field, and take it from the rows in the file of its kind.
`tests/oracle/seen_by_events.py` keeps the same from events one by one.
"""

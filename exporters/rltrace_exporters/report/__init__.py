"""The report of a run as one offline page, for a reader who did not see the run.

In: what `analysis` found in one Recording or two (`values.py`). Out: one HTML file that needs nothing else.

`page.py` puts a page together of sections. Each section is a pure function in a file of its own, from a `RunValues` to
blocks of `blocks.py`; where the Recording lacks what it needs, it raises `Missing` with the reason, which stands in its
place. `chart.py` has the charts in units of their data. `writing.py` makes the file: `blocks.html` and `blocks.css` are
what a block looks like, `page.html`, `page.css` and `page.js` are the rest. `cell.py` shows a step and the findings in
a notebook. `redaction.py` is `--share`, `definitions.py` says what words mean.

To add a section, write its function, and name it in `SECTIONS` of `page.py`.
"""

"""Output formats: each is a class with a `suffix` and `write(recording, out)`, named in `rltrace/plugins.py`.

In: a Recording, and figures of `analysis`. Out: one file; a format of several has `write_folder(recording, folder)`
instead. The timeline is `perfetto.py`, with its rows in `perfetto_tracks.py`; the picture of memory is `memory.py`,
with what it shows in `memory_picture.py`; the Recording as one file is `archive.py`, its tables are `parquet.py`.
`prometheus.py` has the metrics that a view serves, read by `prometheus_scrapes.py`. `report/` is the page of
`rltrace report`. `otlp/` is sent to a collector: it has `send(recording, url)`.
Owners have the colours of `events.OWNER_COLORS`. Phases have those that Perfetto's UI makes of their names, which
`timeline_colors.py` computes: nobody can choose them.

To add one, see `CONTRIBUTING.md`.
"""

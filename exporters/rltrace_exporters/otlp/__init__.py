"""OpenTelemetry: a run as traces and metrics, sent to a collector by the SDK's own OTLP exporters.

In: the spans and samples of processes, from a finished Recording (`exporter.py`) or as they are appended (`live.py`).
Out: requests to a collector (`collector.py`).

`calls.py` nests the spans of a process and folds what is too deep or too frequent; `steps.py` and `requests.py` say
what belongs to what across processes; `traces.py` puts a step together. `spans.py`, `generation.py` and `resources.py`
translate into OpenTelemetry's words, `metrics.py` measures, `identifiers.py` makes ids.

To add an attribute of a span, see `spans.py`; a metric is one line of its table in `metrics.py`, and where it is
measured there. Both have a row in `docs/opentelemetry.md`.
"""

"""The queue in front of a collector, while nobody listens."""

from __future__ import annotations

import threading

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext
from rltrace_exporters.otlp.collector import Collector
from rltrace_exporters.otlp.sending import Sender, wait_seconds


def threads_of_senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rltrace-otlp"]


def test_waits_grow_to_a_limit() -> None:
    """Each wait is twice as long as the one before, up to half a minute, however often a request failed."""
    assert [wait_seconds(failures) for failures in (1, 2, 3)] == [0.5, 1.0, 2.0]
    assert wait_seconds(8) == wait_seconds(100_000) == 30.0


def test_what_nobody_took_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the time to finish is over, the thread ends, and what waits is still counted."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    before = threads_of_senders()
    sender = Sender(Collector())
    threads = [thread for thread in threads_of_senders() if thread not in before]
    sender.add_spans([ReadableSpan("step", SpanContext(1, 1, is_remote=False), start_time=1, end_time=2)])
    sender.finish(0.1)
    for thread in threads:
        thread.join(5)
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)
    assert (sender.waiting_spans, sender.sent_spans) == (1, 0)

"""One grammar for the part of a run: `--steps`, `--ranks` and `--time`."""

from __future__ import annotations

import math

import pytest

from rltrace.events import Counter, Span
from rltrace.read.selection import Range, Seconds, numbers, seconds, written
from rltrace.read.window import inside


@pytest.mark.parametrize(
    ("text", "ranges"),
    [
        ("3", [(3, 3)]),
        ("100-110", [(100, 110)]),
        ("1,5-7", [(1, 1), (5, 7)]),
        (" 0 , 8-15 ", [(0, 0), (8, 15)]),
    ],
)
def test_numbers(text: str, ranges: list[tuple[int, int]]) -> None:
    """A number, a range with both its ends, and lists of these."""
    found = numbers(text)
    assert found.ranges == tuple(Range(*one) for one in ranges)
    assert all(found.has(first) and found.has(last) and not found.has(last + 1) for first, last in ranges[-1:])
    assert not found.has(None) and numbers(str(found)) == found


@pytest.mark.parametrize("text", ["", " ", "x", "3,", ",", "1-", "-1", "7-5", "1..3", "1-2-3", "1.5", "٣", "9" * 30])
def test_wrong_numbers_say_the_form(text: str) -> None:
    """A text that is no number or range is refused with the right form."""
    with pytest.raises(ValueError, match="write 3, 100-110 or 1,5-7") as error:
        numbers(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [("10:20", (10, 20)), ("10:", (10, math.inf)), (":2.5", (0, 2.5)), (" 1 : 2 ", (1, 2)), (".5:1", (0.5, 1))],
)
def test_time(text: str, found: tuple[float, float]) -> None:
    """Either side may be empty."""
    assert seconds(text) == Seconds(*found)


@pytest.mark.parametrize("text", ["", ":", "5", "20:10", "5:5", "a:b", "1:2:3", "-1:3", "nan:", "inf:", "1e3:"])
def test_wrong_time_says_the_form(text: str) -> None:
    """A text that is no time window is refused with the right form."""
    with pytest.raises(ValueError, match="write 10:20, 10: or :20, in seconds from the start of the run"):
        seconds(text)


@pytest.mark.parametrize(("existing", "text"), [([], ""), ([3], "3"), ([7, 0, 2, 1, 1], "0-2,7"), ([0, 2], "0,2")])
def test_numbers_are_written_as_read(existing: list[int], text: str) -> None:
    """Numbers are written in the form in which they are read."""
    assert written(existing) == text
    assert not text or all(numbers(text).has(number) for number in existing)


def test_each_number_once() -> None:
    """Each number comes once, and there cannot be too many."""
    assert numbers("5-7,6,1").each(10) == [1, 5, 6, 7]
    with pytest.raises(ValueError, match="more than 10 numbers"):
        numbers("0-999999999999").each(10)


def test_windows_have_whole_spans() -> None:
    """Windows have whole spans, and samples that still hold.

    Spans that touch a window only are not in it; the last sample before it still holds when it begins.
    """

    def span(name: str, start: int, end: int | None) -> Span:
        return Span(name, 1, 0, start, end, {})

    events = [
        span("before", 0, 10),
        span("into", 5, 11),
        span("instant", 10, 10),
        span("memory.edge", 3, 4),
        span("over", 0, 99),
        span("from its end", 20, 25),
        span("second", 31, 32),
        span("open", 1, None),
        span("open later", 50, None),
        Counter("a", 1, 1, 1.0),
        Counter("a", 1, 2, 2.0),
        Counter("a", 1, 15, 3.0),
        Counter("a", 1, 22, 4.0),
        Counter("a", 1, 25, 5.0),
        Counter("a", 1, 45, 6.0),
        Counter("b", 1, 7, 7.0),
    ]
    found = list(inside(events, ((10, 20), (30, 40))))
    assert {event.name for event in found if isinstance(event, Span)} == {
        "into", "instant", "over", "second", "open", "memory.edge",
    }  # fmt: skip
    assert [event.value for event in found if isinstance(event, Counter)] == [2, 3, 5, 7]

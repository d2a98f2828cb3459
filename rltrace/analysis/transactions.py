"""Sleeps and wake-ups as transactions: what should have moved, what did, what stayed and with whom, and a verdict.

Expected is what the ledger says that the tags hold. Moved is what the engine said that it mapped or unmapped. Freed or
taken is how the device's total changed, by the kernel. These are three sources, so that one of them can be found wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.intervals import LATEST_NS
from rltrace.analysis.lanes import Lane, order
from rltrace.analysis.ledger import UNACCOUNTED, Ledger, ledgers
from rltrace.analysis.moments import where_known
from rltrace.analysis.observations import Observations
from rltrace.analysis.steps import StepWindows
from rltrace.events import MAP, SLEEP, UNMAP, WAKE_UPS, Span

OWNER_OF_TAG = {"weights": "rollout.weights", "kv_cache": "rollout.kv_cache"}

SMALL_BYTES = 1 << 20
"""Fewer bytes than this are not worth a verdict."""

SLACK_BYTES = 32 << 20
"""By how much less the device may fall than what was unmapped: kernels and channels that other processes load
meanwhile, a few of the driver's granules of 2 MiB, and the pages of a laptop's processes. Healthy sleeps of 34 GiB on
eight GPUs under vLLM and verl were short by 0.1 MiB at most."""

ABOUT_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
"""Errors whose name says that they are about memory; others are told by `memory.out_of_memory`."""

TOLD_WITHIN_NS = 1_000_000_000
"""The innermost hook that an error about memory passes tells of it, just before or after the end of a wake-up."""

BOUNDED = frozenset({"interpreter", "free"})
"""Rows with an end: pages of files that exist already, and memory without an owner."""

CACHES = frozenset({"allocator.cached", "library.kernels"})
"""Rows that grow with what they see for the first time, without a known end."""

LEAK_SLEEPS = 3
"""A leak is what grew by `SMALL_BYTES` after each of so many sleeps in a row."""

GROWTH_SLEEPS = 8
"""What grew after each of so many sleeps, and by `SMALL_BYTES` over all of them, is a leak too, a cache's growth
included: noise goes up and down, and a cache that fills is full by then."""

STEADY_SHARE = 0.1
"""Growth over `GROWTH_SLEEPS` is steady if each sleep brought at least this share of the mean. Less is noise around
what grew once or now and then, as a cache does that meets its last new shapes."""


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """One sleep or wake-up of a rank's engine."""

    step: int | None
    """Number of the step; None before the first one."""
    lane: str
    """The rank's lane."""
    rank: int | None
    """The rank."""
    name: str
    """`rollout.sleep`, `rollout.wake_weights` or `rollout.wake_kv_cache`; `cumem.map` or `cumem.unmap` where no phase
    is around it."""
    at_seconds: float
    """When it began, counted from the beginning of the Recording."""
    seconds: float
    """How long it took."""
    level: int | None
    """Level of a sleep; level 1 keeps a copy of the weights in host memory."""
    expected_bytes: dict[str, int]
    """By tag, what was awake before a sleep, or what slept before a wake-up, according to the ledger."""
    moved_bytes: dict[str, int]
    """By tag, what the engine says it moved."""
    changed_bytes: int | None
    """How much the device's total fell, or rose for a wake-up, without what other owners moved meanwhile; None if
    nobody read the total."""
    left_bytes: dict[str, int]
    """By owner, what the engine still held after a sleep."""
    gigabytes_per_second: float | None
    """10^9 bytes moved per second of the engine's own spans."""
    verdict: str
    """`ok`, or what is wrong: `freed nothing`, `freed less than it said`, `partly awake`, `left bytes behind`, `no
    room`, `took less`, `never ended`, or `failed: ` and the error."""
    reason: str
    """The verdict in words and bytes; empty if it is `ok`."""


class Leak(msgspec.Struct, frozen=True, kw_only=True):
    """A row that held more after every sleep."""

    lane: str
    """The rank's lane."""
    rank: int | None
    """The rank."""
    owner: str
    """The row of the ledger that grew."""
    sleeps: int
    """Over how many sleeps in a row it grew: 3, or 8 for a slow growth or a cache (`library.kernels`,
    `allocator.cached`)."""
    bytes_per_sleep: int
    """Mean growth from one sleep to the next."""
    last_bytes: int
    """What it held after the last sleep."""


def transactions(seen: Observations, windows: StepWindows) -> list[Transaction]:
    """Return every sleep and wake-up, rank by rank."""
    found = ledgers(seen)
    return [
        made
        for lane in sorted(_lanes(seen), key=order)
        for made in _Rank(lane, found.get(lane), seen, windows.of(lane)).all()
    ]


def leaks(seen: Observations) -> list[Leak]:
    """Return owners that grew from sleep to sleep, apart from the start-up's: what is built once is no leak."""
    found = ledgers(seen)
    return [leak for lane in sorted(found, key=order) for leak in _leaks(lane, found[lane], _moves(seen, lane))]


def _lanes(seen: Observations) -> set[Lane]:
    return {process.lane for process in seen.processes if process.moves}


def _moves(seen: Observations, lane: Lane) -> list[Span]:
    moves = [move for process in seen.on(lane) for move in process.moves]
    return sorted(moves, key=attrgetter("start_ns"))


class _Rank:
    """The moves of one rank beside its ledger."""

    def __init__(self, lane: Lane, ledger: Ledger | None, seen: Observations, windows: StepWindows) -> None:
        self.lane, self.ledger, self.seen, self.windows = lane, ledger, seen, windows
        self.moves = _outer_moves(_moves(seen, lane))
        self.failures = [span for process in seen.on(lane) for span in process.out_of_memory]

    def all(self) -> Iterator[Transaction]:
        """Return its transactions in order of time."""
        starts_ns = np.array([outer.start_ns for outer, _ in self.moves], np.int64)
        ends_ns = np.array([outer.end_ns or self.seen.end_ns for outer, _ in self.moves], np.int64)
        are_sleeps = np.array([outer.name in (SLEEP, UNMAP) for outer, _ in self.moves], np.bool_)
        columns = (
            are_sleeps.tolist(),
            *self.around(starts_ns, ends_ns, are_sleeps),
            [self.windows.numbers[place] for place in self.windows.places(starts_ns).tolist()],
            ((starts_ns - self.seen.start_ns) / 1e9).tolist(),
            ((ends_ns - starts_ns) / 1e9).tolist(),
        )
        awake: dict[str, int] = {}
        for (outer, inner), is_sleep, held, left, changed_bytes, slack_bytes, step, at_seconds, seconds in zip(
            self.moves, *columns, strict=True
        ):
            moved, engine_seconds, went_well = _moved(inner)
            level = outer.args.get("level")
            expected = held if is_sleep else {tag: awake.get(tag, size) for tag, size in moved.items()}
            if is_sleep:
                awake |= {tag: size for tag, size in held.items() if size >= SMALL_BYTES} or moved
            made = Transaction(
                step=step,
                lane=self.lane.name,
                rank=self.lane.rank,
                name=outer.name,
                at_seconds=at_seconds,
                seconds=seconds,
                level=level if isinstance(level, int) else None,
                expected_bytes=expected,
                moved_bytes=moved,
                changed_bytes=changed_bytes,
                left_bytes=left,
                gigabytes_per_second=sum(moved.values()) / 1e9 / engine_seconds if engine_seconds and moved else None,
                verdict="ok",
                reason="",
            )
            has_ended = went_well and outer.end_ns is not None and "error" not in outer.args
            wrong = None if has_ended else self.of_trouble(made, outer, inner, is_sleep=is_sleep)
            if wrong is None:
                wrong = self.of_sleep(made, awake, slack_bytes) if is_sleep else _of_wake_up(made)
            yield made if wrong is None else msgspec.structs.replace(made, verdict=wrong[0], reason=wrong[1])

    def around(
        self, starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], are_sleeps: NDArray[np.bool_]
    ) -> _Around:
        """Return what the ledger says before and after each of some moves; nothing is known without one."""
        if self.ledger is None or not len(self.ledger.times_ns):
            many = len(starts_ns)
            return _Around([{}] * many, [{}] * many, [None] * many, [None] * many)
        return _around(self.ledger, starts_ns, ends_ns, are_sleeps)

    def of_trouble(
        self, made: Transaction, outer: Span, inner: list[Span], *, is_sleep: bool
    ) -> tuple[str, str] | None:
        """Return what is wrong with a move that failed, or with a wake-up that never ended, and why."""
        failure = _failure(outer, inner)
        if failure is not None:
            verdict = "no room" if self.is_about_memory(outer, failure) else f"failed: {failure}"
            return verdict, _of_failure(made, outer, inner, failure)
        cut = next((span for span in (outer, *inner) if span.end_ns is None), None)
        if cut is None or is_sleep:
            return None
        reason = f"{cut.name} of {_tags(inner)} was still under way when the process ended, perhaps out of memory"
        return "never ended", reason

    def of_sleep(self, sleep: Transaction, known: dict[str, int], slack_bytes: int | None) -> tuple[str, str] | None:
        """Return what is wrong with a sleep; nothing where nobody told of bytes."""
        return None if self.ledger is None else _of_sleep(sleep, known, self.copy_bytes(sleep, known), slack_bytes)

    def is_about_memory(self, move: Span, error: str) -> bool:
        """Return whether the error that ended a move says that it is about memory, or memory was reported to have run
        out then.

        CUDA's error is a RuntimeError like any other: its text, which would say it, is not in the span.
        """
        until_ns = (move.end_ns or self.seen.end_ns) + TOLD_WITHIN_NS
        was_told = any(move.start_ns <= told.start_ns <= until_ns for told in self.failures)
        return was_told or error in ABOUT_MEMORY

    def copy_bytes(self, sleep: Transaction, known: dict[str, int]) -> int:
        """Return the bytes of the copy among the weights that a sleep leaves: they are in a row if host and device are
        one memory."""
        if sleep.level != 1 or self.ledger is None or self.ledger.is_of_gpu:
            return 0
        size = max(known.get("weights", 0), sleep.moved_bytes.get("weights", 0))
        return min(sleep.left_bytes.get(OWNER_OF_TAG["weights"], 0), size)


# ---- the ledger around moves ------------------------------------------------------------------------------------


class _Around(NamedTuple):
    """What a device's ledger says at the last moment before each move, and at the first after it."""

    held: list[dict[str, int]]
    """By tag, what was held before a sleep; nothing for a wake-up."""
    left: list[dict[str, int]]
    """By owner, what the engine still held after a sleep; nothing is known to be left if nobody looked again."""
    changed_bytes: list[int | None]
    """By how much the device's total fell, or rose for a wake-up, without what others said about themselves; None if
    that is not known.

    A trainer empties its cache while an engine wakes up. But what an engine's own allocator hands out of its cache, or
    takes back, is no change of the total: a cache and the engine's rest moved against each other."""
    slack_bytes: list[int | None]
    """By how much less the device may fall than it should: None unless all samples hold at both moments."""


def _around(
    ledger: Ledger, starts_ns: NDArray[np.int64], ends_ns: NDArray[np.int64], are_sleeps: NDArray[np.bool_]
) -> _Around:
    before = np.searchsorted(ledger.times_ns, starts_ns, side="right") - 1
    after = np.searchsorted(ledger.times_ns, ends_ns)
    was_seen, is_seen = before >= 0, after < len(ledger.times_ns)
    after = np.minimum(after, len(ledger.times_ns) - 1)
    tags = {tag: owner for tag, owner in OWNER_OF_TAG.items() if owner in ledger.owners}
    of_engine = [owner for owner in ledger.owners if owner.startswith("rollout.")]
    many, sleeps = len(starts_ns), np.flatnonzero(are_sleeps)
    held, left = [dict[str, int]()] * many, [dict[str, int]()] * many
    for place, was, held_bytes, is_, left_bytes in zip(
        sleeps.tolist(),
        was_seen[sleeps].tolist(),
        _bytes_of(ledger, [*tags.values()], before[sleeps]),
        is_seen[sleeps].tolist(),
        _bytes_of(ledger, of_engine, after[sleeps]),
        strict=True,
    ):
        if was:
            held[place] = dict(zip(tags, held_bytes, strict=True))
        if is_:
            left[place] = {owner: size for owner, size in zip(of_engine, left_bytes, strict=True) if size}
    changed = (np.where(are_sleeps, -1, 1) * _rose_bytes(ledger, before, after)).astype(np.int64)
    changed_bytes = where_known(changed.tolist(), was_seen & is_seen & ledger.has_total)
    is_consistent = was_seen & ledger.is_consistent[before] & ledger.is_consistent[after]
    return _Around(held, left, changed_bytes, where_known([SLACK_BYTES] * many, is_consistent))


def _bytes_of(ledger: Ledger, owners: list[str], moments: NDArray[np.intp]) -> list[list[int]]:
    """Return the bytes of some owners at each of some moments."""
    columns = [ledger.owners.index(owner) for owner in owners]
    rows: list[list[int]] = ledger.bytes[moments[:, np.newaxis], columns].astype(np.int64).tolist()
    return rows


def _rose_bytes(ledger: Ledger, before: NDArray[np.intp], after: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return by how much the total rose from one moment to another, without what others said about themselves."""
    rose = ledger.bytes.take(after, axis=0) - ledger.bytes.take(before, axis=0)
    own = [place for place, owner in enumerate(ledger.owners) if owner == UNACCOUNTED or owner.startswith("rollout.")]
    if not all(owner in ledger.owners for owner in _CACHE_AND_REST):
        return np.asarray(rose[:, own].sum(axis=1))
    cached, rest = (np.trunc(rose[:, ledger.owners.index(owner)]) for owner in _CACHE_AND_REST)
    handed_out = np.where(cached * rest < 0, np.sign(rest) * np.minimum(np.abs(cached), np.abs(rest)), 0)
    return np.asarray(rose[:, own].sum(axis=1) - handed_out)


_CACHE_AND_REST = ("allocator.cached", "rollout.activations")


# ---- verdicts ---------------------------------------------------------------------------------------------------


def _of_sleep(
    sleep: Transaction, known: dict[str, int], copy_bytes: int, slack_bytes: int | None
) -> tuple[str, str] | None:
    """Return what is wrong with a sleep.

    Args:
        sleep: The sleep.
        known: By tag, what was last known to be awake.
        copy_bytes: Bytes of the weights' copy, in the row of those that it leaves.
        slack_bytes: By how much less the device may fall than it should; None if that is not known well enough.
    """
    expected, moved = sum(sleep.expected_bytes.values()), sum(sleep.moved_bytes.values())
    if sleep.level == 0 or not (known or expected or moved):
        return None
    remaining = -copy_bytes
    for owner in OWNER_OF_TAG.values():
        remaining += sleep.left_bytes.get(owner, 0)
    asleep = [tag for tag in known if known[tag] >= SMALL_BYTES > sleep.expected_bytes.get(tag, 0)]
    if asleep and (moved < SMALL_BYTES or remaining >= SMALL_BYTES):
        names = ", ".join(sorted(asleep))
        return "partly awake", f"{names} slept already, and the call did nothing: {_in_mib(remaining)} are still awake"
    if expected >= SMALL_BYTES and remaining >= expected // 2:
        what = _listed_left(sleep, copy_bytes)
        return "freed nothing", f"{_in_mib(remaining)} of {_in_mib(expected)} are still there: {what}"
    fell_less = sleep.changed_bytes is not None and sleep.changed_bytes < moved
    if fell_less and (short := _of_shortfall(sleep, slack_bytes)):
        return short
    if asleep:
        return "partly awake", f"{', '.join(sorted(asleep))} slept already; the rest was freed"
    return ("left bytes behind", _listed_left(sleep, copy_bytes)) if remaining >= SMALL_BYTES else None


def _listed_left(sleep: Transaction, copy_bytes: int) -> str:
    left = {owner: sleep.left_bytes.get(owner, 0) for owner in OWNER_OF_TAG.values()}
    left[OWNER_OF_TAG["weights"]] -= copy_bytes
    return ", ".join(f"{owner} {_in_mib(size)}" for owner, size in left.items() if size)


def _of_shortfall(sleep: Transaction, slack_bytes: int | None) -> tuple[str, str] | None:
    """Return what is wrong with a sleep by which the device fell less than what was unmapped, if no row shows it."""
    must_fall = sum(
        max(0, size - sleep.left_bytes.get(OWNER_OF_TAG.get(tag, ""), 0)) for tag, size in sleep.moved_bytes.items()
    )
    if sleep.changed_bytes is None or must_fall < SMALL_BYTES:
        return None
    if sleep.changed_bytes < must_fall // 2:
        verdict = "freed nothing"
    elif slack_bytes is not None and must_fall - sleep.changed_bytes > slack_bytes:
        verdict = "freed less than it said"
    else:
        return None
    fell = _in_mib(sleep.changed_bytes)
    return verdict, f"{_in_mib(must_fall)} were unmapped, but the device's total fell by only {fell}"


def _failure(outer: Span, inner: list[Span]) -> str | None:
    """Return the name of the error that ended a move, nearest to where it was raised."""
    return next((str(span.args["error"]) for span in (*inner, outer) if "error" in span.args), None)


def _of_failure(move: Transaction, outer: Span, inner: list[Span], error: str) -> str:
    failed = next(span for span in (outer, *inner) if "error" in span.args)
    return f"{failed.name} of {_tags(inner)} failed after {move.seconds:.3f} s: {error}"


def _of_wake_up(wake: Transaction) -> tuple[str, str] | None:
    """Return what is wrong with a wake-up that ended."""
    moved_bytes = sum(wake.moved_bytes.values())
    if wake.changed_bytes is None or moved_bytes < SMALL_BYTES or wake.changed_bytes >= moved_bytes // 2:
        return None
    rose = _in_mib(wake.changed_bytes)
    return "took less", f"{_in_mib(moved_bytes)} were mapped, but the device's total rose by only {rose}"


def _leaks(lane: Lane, ledger: Ledger, moves: list[Span]) -> Iterator[Leak]:
    ends_ns = [sleep.end_ns for sleep in _joined(moves, SLEEP) if sleep.end_ns is not None]
    if len(ends_ns) <= LEAK_SLEEPS:
        return
    places = np.minimum(np.searchsorted(ledger.times_ns, ends_ns), len(ledger.times_ns) - 1)
    for owner in ledger.owners:
        held = ledger.row(owner)[places]
        sleeps = 0 if owner in BOUNDED else _sleeps_grown(np.diff(held), is_cache=owner in CACHES)
        if sleeps:
            yield Leak(
                lane=lane.name,
                rank=lane.rank,
                owner=owner,
                sleeps=sleeps,
                bytes_per_sleep=int((held[-1] - held[-1 - sleeps]) / sleeps),
                last_bytes=int(held[-1]),
            )


def _sleeps_grown(growth: NDArray[np.float64], *, is_cache: bool) -> int:
    """Return over how many of the last sleeps a row has grown enough to be reported; 0 if it has not."""
    if not is_cache and (growth[-LEAK_SLEEPS:] >= SMALL_BYTES).all():
        return LEAK_SLEEPS
    last = growth[-GROWTH_SLEEPS:]
    is_steady = len(last) == GROWTH_SLEEPS and bool((last > STEADY_SHARE * max(0.0, last.mean())).all())
    return GROWTH_SLEEPS if is_steady and last.sum() >= SMALL_BYTES else 0


# ---- spans ------------------------------------------------------------------------------------------------------


def _outer_moves(moves: list[Span]) -> list[tuple[Span, list[Span]]]:
    """Return each phase with the engine's moves inside it; a move outside of all phases stands alone.

    Args:
        moves: The phases and the engine's moves of one rank, in order of their beginnings.
    """
    phases = [phase for name in (SLEEP, *WAKE_UPS) for phase in _joined(moves, name)]
    inner = [move for move in moves if move.name in (MAP, UNMAP)]
    starts_ns = np.array([move.start_ns for move in inner], np.int64)
    ends_ns = [LATEST_NS if phase.end_ns is None else phase.end_ns for phase in phases]
    first = np.searchsorted(starts_ns, [phase.start_ns for phase in phases])
    behind = np.maximum(first, np.searchsorted(starts_ns, ends_ns))
    many = len(inner) + 1
    is_alone = np.cumsum(np.bincount(first, minlength=many) - np.bincount(behind, minlength=many))[:-1] == 0
    outer = [
        (phase, inner[begin:end]) for phase, begin, end in zip(phases, first.tolist(), behind.tolist(), strict=True)
    ]
    outer += [(inner[place], [inner[place]]) for place in np.flatnonzero(is_alone).tolist()]
    return sorted(outer, key=lambda one: one[0].start_ns)


def _joined(moves: list[Span], name: str) -> Iterator[Span]:
    """Return the phases of a name, overlapping ones joined: nobody knows to which of them a move of memory belongs.

    They belong to servers of other devices that name this one as theirs, or to two servers on one device.
    """
    joined: Span | None = None
    for move in (move for move in moves if move.name == name):
        if joined is not None and (joined.end_ns is None or move.start_ns < joined.end_ns):
            ends_ns = [end_ns for end_ns in (joined.end_ns, move.end_ns) if end_ns is not None]
            end_ns = max(ends_ns) if len(ends_ns) == 2 else None
            joined = msgspec.structs.replace(joined, end_ns=end_ns, args=joined.args | move.args)
        else:
            if joined is not None:
                yield joined
            joined = move
    if joined is not None:
        yield joined


def _moved(inner: list[Span]) -> tuple[dict[str, int], float, bool]:
    """Return bytes by tag, the seconds of all spans that ended, and whether all of them ended without an error.

    The embedded engine has a span per tag, vLLM one for several tags.
    """
    moved: dict[str, int] = {}
    length_ns, went_well = 0, True
    for span in inner:
        args = span.args
        if span.end_ns is not None:
            length_ns += span.end_ns - span.start_ns
        if span.end_ns is None or "error" in args:
            went_well = False
            continue
        tags = args.get("tags")
        if not isinstance(tags, dict):
            tags = {str(args.get("tag", "all")): args.get("bytes", 0)}
        for tag, size in tags.items():
            moved[tag] = moved.get(tag, 0) + _integer(size)
    return moved, length_ns / 1e9, went_well


def _tags(inner: list[Span]) -> str:
    tags = [str(tag) for span in inner for tag in (span.args.get("tags") or [span.args.get("tag", "memory")])]
    return ", ".join(dict.fromkeys(tags)) or "memory"


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) else 0


def _in_mib(size: float) -> str:
    return f"{size / (1 << 20):,.1f} MiB"

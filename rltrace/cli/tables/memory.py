"""Who held the bytes of each device and of the hosts, and when memory ran out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rltrace.analysis.allocations import AllocationPeak, AllocationsMissed
from rltrace.analysis.host_memory import HostMemory
from rltrace.analysis.kernels import KernelsMissed
from rltrace.analysis.ledger import FREE, UNACCOUNTED
from rltrace.analysis.looks import GRANULE_BYTES
from rltrace.analysis.memory import DeviceMemory, OutOfMemory, Residual
from rltrace.analysis.moments import Moment
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, bars, titled, words
from rltrace.events import NO_GPU, OWNERS, UNATTRIBUTED

MOST_CHANGES = 8

SMALL = 0.01
"""Share of a device's peak below which an owner has no row on the first screen."""
ALIKE = 0.01
"""Share of a device's peak by which no row of another device must differ to need no tables of its own."""
NOBODYS = (UNATTRIBUTED, UNACCOUNTED, FREE)
UNKNOWN = "unknown"
"""Shown in place of a figure that is unknown."""
MOST_OTHERS = 4
MOST_OWNERS = 4
"""Of a peak, the largest."""
LATE = (
    "late: how far into the step the last process began to keep its allocations; "
    "what it allocated and freed before that is missing"
)

LEGEND = {
    UNATTRIBUTED: "unattributed: allocated, but by none of the owners above",
    UNACCOUNTED: "unaccounted: the device's total less all other rows; it is computed, not measured",
}
CONSISTENT = (
    "consistent: no sample at that phase boundary is older than 5 ms, or nothing has moved since; the limit does not "
    "apply to others"
)


def fullest_table(devices: Sequence[DeviceMemory]) -> RenderableType:
    """Draw who held the bytes of the fullest device: the large owners, and bytes without an owner."""
    fullest = max(devices, key=lambda device: device.peak_bytes)
    owners = _owners(fullest)
    named = [owner for owner in owners if owner not in NOBODYS]
    known = [owner for owner in named if owner not in fullest.unknown]
    small = [owner for owner in known if _most(owner, fullest) < SMALL * fullest.peak_bytes]
    table = _table()
    for owner in (owner for owner in named if owner not in small):
        _add_owner(table, owner, fullest)
    for owner in (owner for owner in NOBODYS if owner in owners):
        _add_owner(table, owner, fullest)
    others = [device.peak_bytes for device in devices if device is not fullest]
    remarks = _short_remarks(fullest, [owner for owner in small if _most(owner, fullest)])
    return titled(_short_title(fullest, others), table, "\n".join(remarks))


def device_table(device: DeviceMemory) -> RenderableType:
    """Draw who held the bytes of one device at its peak, and by how much each owner's own peak is higher."""
    table = _table()
    for owner in _owners(device):
        _add_owner(table, owner, device)
    return titled(_title(device), table, "\n".join(_remarks(device)))


def is_alike(device: DeviceMemory, shown: DeviceMemory) -> bool:
    """Return whether the tables of a device would say nothing that those of another one do not say."""
    if device.peak_phase != shown.peak_phase or device.unknown != shown.unknown:
        return False
    phases, others = _columns(device), _columns(shown)
    if [moment.phase for moment in phases] != [moment.phase for moment in others]:
        return False
    rows = [(device.at_peak_bytes, shown.at_peak_bytes)]
    rows += [(own.bytes, other.bytes) for own, other in zip(phases, others, strict=True)]
    return all(abs(size) <= ALIKE * shown.peak_bytes for pair in rows for size in _more(*pair).values())


def _more(own: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return by owner how many bytes more the first one has."""
    return {owner: own.get(owner, 0) - other.get(owner, 0) for owner in {**own, **other}}


def alike_lines(device: DeviceMemory, shown: DeviceMemory) -> RenderableType:
    """Say that a device is as another one, and what differs most."""
    more = _more(device.at_peak_bytes, shown.at_peak_bytes)
    owner = max(more, key=lambda name: abs(more[name]))
    differs = ""
    if more[owner]:
        size, other = (figures.size(of.at_peak_bytes.get(owner, 0)) for of in (device, shown))
        differs = f", most in {owner}: {size} and {other}"
    alike = f"As {shown.lane}'s: no row differs by more than {ALIKE:.0%} of the peak{differs}"
    return Group(Text(_title(device), "bold"), *map(Text, (alike, *_remarks(device))))


def _table() -> Figures:
    return Figures("owner", "at the peak", bars(1), Column("own peak", 6), words("in", 5))


def _owners(device: DeviceMemory) -> list[str]:
    """Return all owners of the device, unknown ones included; `unaccounted` is last."""
    return sorted({**device.at_peak_bytes, **device.unknown}, key=lambda row: (row == UNACCOUNTED, OWNERS.index(row)))


def _add_owner(table: Figures, owner: str, device: DeviceMemory) -> None:
    size, own = device.at_peak_bytes.get(owner, 0), device.owner_peaks.get(owner)
    share = size / device.peak_bytes if device.peak_bytes and owner != FREE else 0.0  # of what is used
    most = _said(owner, own.bytes, device) if own is not None else ""
    phase = "" if own is None or not own.bytes else own.phase or "no phase"
    style = None if size else "dim"
    table.add_row(owner, _said(owner, size, device), figures.bar(share), most, phase, style=style)


def _said(owner: str, size: int, device: DeviceMemory, size_of: Callable[[int], str] = figures.size) -> str:
    """Write bytes; for an owner with unknown parts, at least the known ones."""
    if owner not in device.unknown:
        return size_of(size)
    return f"{_at_least(owner)}{size_of(size)}" if size else UNKNOWN


def _at_least(owner: str) -> str:
    return "" if owner in NOBODYS else "≥ "  # those are of the whole device: somebody read its total


def _most(owner: str, device: DeviceMemory) -> int:
    """Return the most that an owner held at any time."""
    own = device.owner_peaks.get(owner)
    return max(abs(device.at_peak_bytes[owner]), own.bytes if own is not None else 0)


def _short_title(device: DeviceMemory, others: Sequence[int]) -> str:
    where = f"in {device.peak_phase}" if device.peak_phase else "in no phase"
    step = f", step {device.peak_step}" if device.peak_step is not None else ""
    title = f"Memory of {device.lane}: peak {figures.size(device.peak_bytes)} {where}{step}"
    alike = {figures.size(size) for size in others} == {figures.size(device.peak_bytes)}
    return title + (f"; others {'alike' if alike else _between(others)}" if others else "")


def _short_remarks(device: DeviceMemory, small: Sequence[str]) -> Iterator[str]:
    """Return what has no row and what is unknown, how much has no owner, and what the words mean."""
    if small:
        together = figures.size(sum(device.at_peak_bytes[owner] for owner in small))
        yield f"Below {SMALL:.0%} each, {together} together: {', '.join(small)}"
    yield from _unknown(device)
    yield from _others(device)
    if (found := device.residual) is not None and _judged(found):
        yield _unaccounted(found)
    if UNACCOUNTED in device.at_peak_bytes:
        yield "unattributed: of no named owner; unaccounted: the total less all other rows"


def _title(device: DeviceMemory) -> str:
    step = f" of step {device.peak_step}" if device.peak_step is not None else ""
    title = f"Memory of {_place(device)}: peak {figures.size(device.peak_bytes)}, in {device.peak_phase or 'no phase'}"
    return f"{title}{step}, {device.peak_at_seconds:.1f} s"


def _between(sizes: Sequence[int]) -> str:
    return figures.between(figures.size(min(sizes)), figures.size(max(sizes))) if sizes else ""


def _place(device: DeviceMemory) -> str:
    where = " ".join(filter(None, (device.device, device.host and f"on {device.host}")))
    return f"{device.lane} ({where})" if where else device.lane


def legend(devices: Sequence[DeviceMemory]) -> Text:
    """Return what the words of the tables mean."""
    lines = [said for owner, said in LEGEND.items() if any(owner in device.at_peak_bytes for device in devices)]
    lines += [CONSISTENT] if any(device.residual is not None for device in devices) else []
    return Text("\n".join(lines), "dim")


def _remarks(device: DeviceMemory) -> Iterator[str]:
    """Return what is unknown, and how much has no owner."""
    yield from _unknown(device)
    yield from _others(device)
    yield from _most_used(device)
    yield from _allocated_peaks(device)
    if (found := device.residual) is not None:
        if _judged(found):
            over = f"; {found.boundaries_over_limit} exceed theirs" if found.boundaries_over_limit else ""
            limit = figures.size(found.worst_limit_bytes)
            yield f"{_unaccounted(found)}, most in {found.worst_phase}, where the limit is {limit}{over}"
        else:
            yield f"Unaccounted: not judged, for none of {_boundaries(found.boundaries)} is consistent"
        share = f"; all samples take {found.sample_share:.1%} of a step" if found.sample_share is not None else ""
        yield f"A sample takes {found.sample_seconds * 1e3:.1f} ms{share}"


def _judged(found: Residual) -> int:
    """Return at how many phase boundaries the limit applies."""
    return found.boundaries - found.inconsistent_boundaries


def _unaccounted(found: Residual) -> str:
    """Return how many bytes had no owner at most."""
    judged = _judged(found)
    where = f"all {_boundaries(judged)}" if judged > 1 else _boundaries(judged)
    if found.inconsistent_boundaries:
        where = f"{judged:,} of {_boundaries(found.boundaries)}"
    return f"Unaccounted: ≤ {figures.size(found.worst_bytes)} at {where}"


def _boundaries(many: int) -> str:
    return f"{many:,} phase {'boundary' if many == 1 else 'boundaries'}"


def _allocated_peaks(device: DeviceMemory) -> Iterator[str]:
    """Return what was handed out between phase boundaries; most of it is in the cache by the next one."""
    for peak in device.allocated_peaks:
        where = f"{peak.phase or 'no phase'}{f', step {peak.step}' if peak.step is not None else ''}"
        largest = sorted(peak.at_peak_bytes.items(), key=lambda one: -one[1])[:MOST_OWNERS]
        held = ", ".join(f"{owner} {figures.size(size)}" for owner, size in largest)
        yield f"torch in {peak.process} had handed out {figures.size(peak.bytes)} at its peak, in {where}: {held}"


def _most_used(device: DeviceMemory) -> Iterator[str]:
    """What the sampler saw between the samples of the processes, if that was more."""
    if (most := device.most_used) is not None and most.by_sampler and most.bytes - device.peak_bytes > GRANULE_BYTES:
        more = figures.size(most.bytes - device.peak_bytes)
        yield (
            f"The sampler saw {figures.size(most.bytes)} used, at {most.at_seconds:.1f} s: {more} more than the "
            "processes did at their samples"
        )


def _unknown(device: DeviceMemory) -> Iterator[str]:
    """Return rows that could not be measured, by reason."""
    for reason in dict.fromkeys(device.unknown.values()):
        rows = [row for row in _owners(device) if device.unknown.get(row) == reason]
        yield f"unknown, {reason}: {', '.join(rows)}"


def _others(device: DeviceMemory) -> Iterator[str]:
    """Return who else is on the card, and how much of the unaccounted bytes they hold."""
    if (found := device.others) is None:
        return
    held = [f"pid {pid} {figures.size(size)}" for pid, size in found.held_bytes.items()]
    named = ", ".join(held[:MOST_OTHERS]) + (f", and {len(held) - MOST_OTHERS} more" if held[MOST_OTHERS:] else "")
    together = figures.size(sum(found.held_bytes.values()))
    unaccounted = f"Of {figures.size(found.unaccounted_bytes)} unaccounted at {found.at_seconds:.1f} s"
    yield f"{unaccounted}, {together} belong to processes outside of this Recording: {named}"


def allocation_line(peaks: Sequence[AllocationPeak]) -> Text:
    """Return one line with the highest of the exact peaks."""
    highest = max(peaks, key=lambda peak: peak.peak_bytes)
    step = f", step {highest.step}" if highest.step is not None else ""
    said = f": allocators had handed out {figures.size(highest.peak_bytes)} at the peak, on {highest.lane}{step}"
    return Text.assemble(("Every allocation", "bold"), said)


def allocation_table(peaks: Sequence[AllocationPeak]) -> RenderableType:
    """Draw the exact peaks of the steps whose every allocation was kept, beside the sampled ones."""
    most = words("most of it", 3)
    columns = ("device", "step", "exact peak", "sampled", "reserved", most, "at", "within", "lost", "late")
    table = Figures(*columns)
    for peak in peaks:
        owner = max(peak.at_peak_bytes, key=lambda owner: peak.at_peak_bytes[owner], default="")
        table.add_row(
            peak.lane,
            figures.number(peak.step),
            figures.size(peak.peak_bytes),
            "" if peak.sampled_peak_bytes is None else figures.size(peak.sampled_peak_bytes),
            "" if peak.reserved_peak_bytes is None else figures.size(peak.reserved_peak_bytes),
            owner,
            f"{peak.peak_at_seconds:.3f} s",
            f"{peak.error_seconds * 1e6:.0f} µs",
            figures.number(peak.lost) if peak.lost else "",
            figures.short(peak.late_seconds) if peak.late_seconds else "",
        )
    caption = "bytes requested from torch's and vLLM's allocators, without contexts, NCCL, caches and the driver's own"
    if any(peak.reserved_peak_bytes is not None for peak in peaks):
        caption += "\nreserved: the most that those allocators had from the driver in the step, caches included"
    if any(peak.late_seconds for peak in peaks):
        caption += f"\n{LATE}"
    return titled("Peaks of the steps with every allocation", table, caption)


def is_without_gpu(missed: AllocationsMissed, peaks: Sequence[AllocationPeak]) -> bool:
    """Return whether these had nothing to keep in the step, beside others that had."""
    return missed.reason == NO_GPU and any(peak.step == missed.step for peak in peaks)


def allocations_missed_line(missed: AllocationsMissed) -> str:
    """Return of which step allocations are missing, whose, and why."""
    return missed_line("allocations", "kept", missed)


def missed_line(what: str, done: str, missed: AllocationsMissed | KernelsMissed) -> str:
    """Return of which step something is missing, whose, and why."""
    names = Counter(missed.processes)
    whose = ", ".join(name if many == 1 else f"{many} x {name}" for name, many in names.items())
    return f"{what} of step {missed.step} were not {done}{' by ' if whose else ''}{whose}: {missed.reason}"


def _columns(device: DeviceMemory) -> list[Moment]:
    """Return the phases of steps; without steps, all."""
    return [moment for moment in device.phases if moment.step is not None] or device.phases


def phase_table(device: DeviceMemory) -> RenderableType:
    """Draw owners by phases, each at the phase's peak, in MiB; in GiB if a GPU's memory would be too wide."""
    phases = _columns(device)
    held = [owner for owner in device.at_peak_bytes if any(moment.bytes[owner] for moment in phases)]
    owners = [owner for owner in _owners(device) if owner in held or (phases and owner in device.unknown)]
    unit, divisor = ("GiB", 1 << 30) if device.peak_bytes >= 10 << 30 else ("MiB", 1 << 20)

    def size_of(size: int) -> str:
        return f"{size / divisor:,.1f}" if size else "·"

    table = Figures("owner", *(str(number) for number in range(1, len(phases) + 1)))
    for owner in owners:
        table.add_row(owner, *(_said(owner, moment.bytes.get(owner, 0), device, size_of) for moment in phases))
    table.add_section()
    table.add_row("used", *(size_of(moment.used_bytes) for moment in phases), style="bold")
    names = "  ".join(f"{number} {moment.phase}" for number, moment in enumerate(phases, 1))
    return titled(f"Memory of {device.lane} by phase, each at its peak, {unit}", table, names)


def host_memory_table(processes: Sequence[HostMemory]) -> RenderableType:
    """Draw what each process has in its host's memory; one line if that is the devices' memory."""
    apart = [process for process in processes if not process.is_device]
    if not apart:
        return Text("On a CPU the devices' memory is the host's: the tables above show all of it.", "dim")
    owners = list(dict.fromkeys(owner for process in apart for owner in process.peak_owner_bytes))
    of_owners = (heading for owner in owners for heading in (owner, "pinned"))
    table = Figures("process", "resident", "pinned", "no owner", *of_owners)
    for process in apart:
        table.add_row(
            process.process,
            _size_or_unknown(process.peak_resident_bytes),
            _pinned_of(process),
            _pinned_of_owner(process, UNATTRIBUTED),
            *(cell for owner in owners for cell in _on_host(process, owner)),
        )
    title = "Host memory: each process at its peak, how much of it was pinned, and by which owner"
    return titled(title, table, _why_unknown(apart))


def _on_host(process: HostMemory, owner: str) -> tuple[str, str]:
    """Return an owner's peak there, and how much is pinned; two blanks if it has nothing."""
    size = process.peak_owner_bytes.get(owner)
    return ("", "") if not size else (figures.size(size), _pinned_of_owner(process, owner))


def _pinned_of(process: HostMemory) -> str:
    """Return what a process had pinned; "at least" if some is unknown. Blank if nothing can be pinned."""
    if process.peak_pinned_bytes is None:
        return UNKNOWN if process.pinned_unknown else ""
    size = figures.size(process.peak_pinned_bytes)
    return f"≥ {size}" if process.pinned_unknown else size


def _pinned_of_owner(process: HostMemory, owner: str) -> str:
    """Return how much of an owner was pinned; unknown with a reason, else blank."""
    size = process.peak_owner_pinned_bytes.get(owner)
    if size is None:
        return UNKNOWN if owner in process.pinned_unknown else ""
    return figures.size(size)


def _size_or_unknown(size: int | None) -> str:
    return UNKNOWN if size is None else figures.size(size)


def _why_unknown(processes: Iterable[HostMemory]) -> str:
    """Return each reason once, with the owners whose pinned bytes are unknown for it."""
    owners: dict[str, dict[str, None]] = {}
    for process in processes:
        for owner, reason in process.pinned_unknown.items():
            owners.setdefault(reason, {})[owner] = None
    return "; ".join(f"pinned: unknown, {reason}: {', '.join(whose)}" for reason, whose in owners.items())


def out_of_memory_table(failure: OutOfMemory) -> RenderableType:
    """Draw who held what when a process asked for more memory than there was, and what would have made room."""
    table = Figures("owner", "held", bars(1), words(f"peak of {len(failure.before)} samples in the last 30 s"))
    held = failure.moment.bytes if failure.moment is not None else {}
    for owner, size in sorted(held.items(), key=lambda item: -item[1]):
        most = max(moment.bytes.get(owner, 0) for moment in failure.before)
        if size or most:
            used = failure.moment.used_bytes if failure.moment is not None else 0
            table.add_row(owner, figures.size(size), figures.bar(size / used if used else 0.0), figures.size(most))
    room = [Text(f"To make room: {change}", "yellow") for change in failure.changes[:MOST_CHANGES]]
    title = Text(out_of_memory_line(failure), "bold red")
    return Group(title, Text(failure.reason, "dim"), table, *room)


def out_of_memory_line(failure: OutOfMemory) -> str:
    """Return who asked for how much, and how much there was."""
    asked = figures.size(failure.asked_bytes) if failure.asked_bytes is not None else "memory"
    free = f", {figures.size(failure.free_bytes)} were free" if failure.free_bytes is not None else ""
    bound = f" ({failure.bound})" if failure.bound else ""
    return f"Out of memory: {failure.process} asked for {asked}{free}{bound}, {failure.at_seconds:.1f} s"

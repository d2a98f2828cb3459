"""What the GPUs' own streams did in a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from rltrace.analysis.gpu_work import BACKWARD, COLLECTIVES, GATHERS_AND_SCATTERS, PASSES, WHOLE_BACKWARD, GpuWork
from rltrace.cli.tables import figures
from rltrace.cli.tables.fit import Column, Figures, titled

FEW = 2
"""Kinds of work that one line names."""
PLAIN = {"fsdp", "autograd", "micro_batch"}
"""Subjects that are left out of names there."""

WHOLES = "a layer's forward and backward lie in its model's, whose waits for collectives are in the seconds"
FROM_LOSS = "autograd.backward: from the loss on, the model's is a part of it"
COLLECTIVE = (
    "collectives: each rank waits in them for the slowest, which has the fewest seconds of them; GB/s: by what one "
    "rank receives or sends, (ranks - 1) / ranks of the whole; queued: ready, and behind another one; not in the "
    "seconds"
)
EXPOSED = (
    "exposed: no layer and no optimizer step was under way beside them on their GPU; from - to, for a part of a "
    "layer's backward, and of a model outside its layers, may be waiting"
)
UNKNOWN = "how much was exposed is unknown: layers were not timed (RLTRACE_CUDA_TIME=layers)"


class _Row:
    """One kind of work, in a step or in one of its phases, as a mean over the GPUs."""

    def __init__(self, items: Sequence[GpuWork], gpus: int) -> None:
        self.items = items
        self.gpus = gpus
        self.work = items[0].work
        self.phase = items[0].phase
        self.seconds = self.mean(lambda item: item.seconds)

    def mean(self, of: Callable[[GpuWork], float]) -> float:
        """Return the mean; a GPU without such work counts as 0."""
        return sum(map(of, self.items)) / self.gpus

    def exposed(self) -> str:
        """Return a range, or nothing if it is unknown."""
        if any(item.least_exposed_seconds is None for item in self.items):
            return ""
        least = self.mean(lambda item: item.least_exposed_seconds or 0.0)
        most = self.mean(lambda item: item.most_exposed_seconds or 0.0)
        return figures.between_seconds(least, most)

    def cells(self) -> list[str]:
        seconds = [item.seconds for item in self.items] + [0.0] * (self.gpus - len(self.items))
        between = figures.spread(seconds)
        most_on = max(self.items, key=lambda item: item.seconds).lane
        queued = self.mean(lambda item: item.queued_seconds)
        return [
            figures.seconds(self.seconds),
            between if self.gpus > 1 else "",
            most_on if "-" in between else "",
            figures.number(self.mean(lambda item: item.count)),
            figures.rate(self.mean(lambda item: item.bytes), self.seconds),
            figures.seconds(queued) if queued else "",
            self.exposed(),
        ]


def gpu_work_line(found: Sequence[GpuWork]) -> Text:
    """Return one line: the kinds that took longest, the collectives, and how much of them was exposed."""
    whole = {row.work: row for row in _rows(found) if row.phase is None}
    contained = (*GATHERS_AND_SCATTERS, COLLECTIVES, *([BACKWARD] if WHOLE_BACKWARD in whole else []))
    others = [row for name, row in whole.items() if name not in contained]
    parts = [_short(row) for row in sorted(others, key=lambda row: -row.seconds)[:FEW]]
    said = [figures.with_units(parts)] if parts else []
    together = whole.get(COLLECTIVES)
    if together is not None:
        exposed = together.exposed()
        said.append(figures.with_unit(_short(together)) + (f", exposed {exposed}" if exposed else ""))
    return Text.assemble(("GPU", "bold"), f" in a step {'; meanwhile '.join(said)}")


def gpu_work_table(found: Sequence[GpuWork]) -> RenderableType:
    """Draw each kind of work, with its phases below it if there are several."""
    gpus = len({item.lane for item in found})
    table = Figures(
        "on the GPU's streams", "seconds", Column(figures.count(gpus, "GPU"), 6), Column("most on", 4),
        Column("times", 5), "GB/s", Column("queued", 7), Column("exposed", 8),
    )  # fmt: skip
    rows = _rows(found)
    for work in dict.fromkeys(row.work for row in rows):
        whole, *phases = [row for row in rows if row.work == work]
        table.add_row(work, *whole.cells(), style="bold" if work == COLLECTIVES else None)
        for row in phases if len(phases) > 1 else ():
            table.add_row(f"  {row.phase}", *row.cells(), style="dim")
    return titled("GPU work: a steady step, mean over the GPUs; what overlaps counts once", table, _caption(found))


def gpu_work_missed_lines(missed: Mapping[str, str]) -> RenderableType:
    """Return what is not in the table, one line per process."""
    return Group(*(Text(f"GPU work of {process} that was not timed: {reason}") for process, reason in missed.items()))


def _rows(found: Sequence[GpuWork]) -> list[_Row]:
    """Return rows in the order of the first GPU that has each."""
    alike: dict[tuple[str, str | None], list[GpuWork]] = {}
    for item in found:
        alike.setdefault((item.work, item.phase), []).append(item)
    gpus = len({item.lane for item in found})
    return [_Row(items, gpus) for items in alike.values()]


def _short(row: _Row) -> str:
    subject, _, action = row.work.partition(".")
    return f"{action if subject in PLAIN else row.work} {figures.seconds(row.seconds)}"


def _caption(found: Sequence[GpuWork]) -> str:
    """Return what the columns mean, if they are there, and how far off the times are."""
    works = {item.work for item in found}
    error = figures.short(max(item.largest_error_seconds for item in found))
    parts = [WHOLES] if works.intersection(PASSES) else []
    parts += [FROM_LOSS] if works.issuperset((WHOLE_BACKWARD, BACKWARD)) else []
    if COLLECTIVES in works:
        is_known = any(item.least_exposed_seconds is not None for item in found)
        parts += [COLLECTIVE, EXPOSED if is_known else UNKNOWN]
    return "\n".join([*parts, f"every start and end is off by {error} at most"])

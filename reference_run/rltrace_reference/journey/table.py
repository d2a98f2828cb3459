"""The variants side by side, as a table of the terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from rltrace_reference.run_figures import Figures


def side_by_side(variants: list[Figures], unrun: dict[str, str], kv_bytes_per_token: int) -> Table:
    """Return the table: a column per variant, and one for each that cannot run here, with what is lacking."""
    table = Table("", *(variant.name for variant in variants), *unrun, box=None, header_style="bold", pad_edge=False)
    for place, (title, value) in enumerate(_rows(variants, kv_bytes_per_token)):
        reasons = [f"unrun: {lacks}" for lacks in unrun.values()] if place == 0 else []
        table.add_row(title, *(value(variant) for variant in variants), *reasons)
    return table


def _rows(variants: list[Figures], kv_bytes_per_token: int) -> list[tuple[str, Callable[[Figures], str]]]:
    phases = list(dict.fromkeys(moment.phase for variant in variants for moment in variant.phases))
    return [
        ("predicted", lambda variant: _no_room(variant.predicted_phase)),
        ("measured", lambda variant: variant.error or _no_room(variant.failed_phase)),
        ("asked for, free", _missing),
        ("peak", lambda variant: f"{size(variant.peak_bytes)} of {size(variant.limit_bytes)}"),
        *((f"  {phase}", _held_in(phase)) for phase in phases if phase),
        ("left for the KV cache", lambda variant: _room(variant, kv_bytes_per_token)),
        ("seconds lost switching", lambda variant: _seconds(variant.switch_seconds)),
        ("seconds of a step", lambda variant: _seconds(variant.step_seconds)),
        ("engine processes", lambda variant: f"{variant.engines} in {len(variant.rollouts)} rollouts"),
        ("addresses", _addresses),
        ("CUDA graphs", _graphs),
        ("log-probs off by", lambda variant: _number(variant.log_probs_off)),
    ]


def _no_room(phase: str | None) -> str:
    return "fits" if phase is None else f"no room in {phase}"


def _missing(variant: Figures) -> str:
    failure = variant.failure
    if failure is None or failure.asked_bytes is None:
        return "-"
    return f"{size(failure.asked_bytes)}, {'unknown' if failure.free_bytes is None else size(failure.free_bytes)}"


def _held_in(phase: str) -> Callable[[Figures], str]:
    def held(variant: Figures) -> str:
        sizes = [moment.held_bytes for moment in variant.phases if moment.phase == phase]
        return size(max(sizes)) if sizes else "-"

    return held


def _room(variant: Figures, kv_bytes_per_token: int) -> str:
    room_bytes = variant.kv_room_bytes
    if room_bytes is None:
        return "-"
    at_most = "at most " if variant.failure is not None else ""
    return f"{at_most}{size(room_bytes)}, {room_bytes // kv_bytes_per_token:,} tokens"


def _addresses(variant: Figures) -> str:
    count = len(variant.rollouts)
    if count < 2:
        return f"{count} rollout"
    return f"the same in {count} rollouts" if variant.places == 1 else f"{variant.places} in {count} rollouts"


def _graphs(variant: Figures) -> str:
    if not variant.captures:
        return "none on a CPU"
    return f"captured {'once' if variant.captures == 1 else f'{variant.captures} times'}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def size(size_bytes: int) -> str:
    """Return bytes in the unit that fits."""
    gibibytes = size_bytes / (1 << 30)
    return f"{gibibytes:.1f} GiB" if gibibytes >= 1 else f"{size_bytes / (1 << 20):.0f} MiB"

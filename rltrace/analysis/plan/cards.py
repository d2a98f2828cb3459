"""The sizes of GPUs: what NVML says of the card, and what the driver keeps of it."""

from __future__ import annotations

import re

import msgspec

from rltrace.errors import ConfigError

MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30


class Card(msgspec.Struct, frozen=True):
    """A GPU."""

    name: str
    total_bytes: int
    """NVML's `total`."""
    reserved_bytes: int
    """NVML's `reserved` (version 2); CUDA's total is what is left."""
    is_measured: bool

    @property
    def cuda_bytes(self) -> int:
        """Return the total that CUDA and vLLM go by."""
        return self.total_bytes - self.reserved_bytes


def _card(name: str, total_mebibytes: float, reserved_mebibytes: float = 0) -> Card:
    reserved = reserved_mebibytes or RESERVED_SHARE * total_mebibytes
    return Card(name, int(total_mebibytes * MEBIBYTE), int(reserved * MEBIBYTE), bool(reserved_mebibytes))


RESERVED_SHARE = 0.006
"""What the driver keeps of a card that was not measured: 480 of 81,559 MiB are 0.59 %, 615 of 143,771 are 0.43 %."""

CARDS = {
    card.name: card
    for card in (
        _card("H100", 81_559, 480),
        _card("H200", 143_771, 615.06),
        _card("A100", 81_920),
        _card("A100-40GB", 40_960),
        _card("H20", 97_871),
        _card("L40S", 46_068),
        _card("A10", 23_028),
        _card("L4", 23_034),
        _card("RTX4090", 24_564),
        _card("B200", 183_359),
    )
}
"""By name. H100 and H200 are from NVML in our Recordings; the others' totals are what `nvidia-smi` prints for them, and
what the driver keeps of those is assumed."""


def card_of(name: str) -> Card:
    """Return the card of this name, or of this size, such as `80GiB`.

    Raises:
        ConfigError: there is none.
    """
    wanted = name.upper().replace("NVIDIA", "").strip(" -_")
    if wanted in CARDS:
        return CARDS[wanted]
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GIB|GB|MIB)", wanted)
    if size and float(size[1]) > 0:
        unit = {"GIB": GIBIBYTE, "GB": 10**9, "MIB": MEBIBYTE}[size[2]]
        return _card(name, float(size[1]) * unit / MEBIBYTE)
    raise ConfigError(
        f"--gpu {name}: not known; give one of {', '.join(sorted(CARDS))}, or its memory, such as --gpu 80GiB"
    )

"""The native checksum of segments is zlib's."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrace.read import native
from rltrace.read.packed import sum_of


@given(st.binary(max_size=400), st.integers(0, 70))
def test_it_is_zlibs(content: bytes, more_blocks: int) -> None:
    """Of any content, with whole blocks of 64 bytes and what is left behind them, at any place in memory."""
    longer = content * (1 + more_blocks)
    assert native.crc32(longer) == zlib.crc32(longer)
    assert sum_of(longer[1:]) == (max(0, len(longer) - 1), zlib.crc32(longer[1:]))


@pytest.mark.parametrize("size_bytes", [0, 1, 15, 16, 63, 64, 65, 127, 128, 1 << 20])
def test_each_flipped_bit_is_seen(size_bytes: int) -> None:
    """A segment in which one bit has flipped has another checksum."""
    content = bytearray(range(256)) * (size_bytes // 256 + 1)
    del content[size_bytes:]
    whole = native.crc32(bytes(content))
    for place in {0, size_bytes // 2, size_bytes - 1} if size_bytes else ():
        content[place] ^= 4
        assert native.crc32(bytes(content)) != whole
        content[place] ^= 4


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no library was built, or for a processor that cannot, zlib computes it."""
    monkeypatch.setattr(native, "library", lambda: None)
    assert native.crc32(b"segment") == zlib.crc32(b"segment")

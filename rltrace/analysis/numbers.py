"""Numbers that stand for ids: the same in every process, so that what was kept by one means the same to the next."""

from __future__ import annotations

from hashlib import blake2b


def number(*parts: object) -> int:
    """Return a number of 64 bits for texts and numbers together; never 0, which stands for nothing."""
    return number_of("\0".join(map(str, parts)))


def number_of(text: str) -> int:
    """Return the number for one text."""
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1

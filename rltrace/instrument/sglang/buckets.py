"""A bucket of weights on its way to SGLang: sender and scheduler have nothing in common but the request itself."""

from __future__ import annotations

import base64
from hashlib import blake2b
from typing import Any

REMEMBERED = 10_000
"""Counting begins again after this many buckets, on both sides alike."""


def handles_of(request: Any) -> bytes | str | None:
    """Return what a request to the engine holds for the first of its ranks; None if it brings no tensors.

    A request has a list by rank, or one value for all ranks, as for adapters until some release after 0.5.12.
    """
    handles = getattr(request, "serialized_named_tensors", None) or getattr(request, "serialized_tensors", None)
    return (handles[0] if isinstance(handles, list | tuple) else handles) or None


class Keys:
    """Names each bucket by the handles of its tensors, which its request holds; sender and receiver name it alike."""

    def __init__(self) -> None:
        self._seen: dict[bytes, int] = {}

    def of(self, serialized: bytes | str) -> str:
        """Return the key of the next bucket.

        Args:
            serialized: `serialized_named_tensors` for one rank of the engine; text where it went over HTTP.

        Returns:
            What it holds, and how often that came before: memory that is used again has the same handle.
        """
        raw = base64.b64decode(serialized) if isinstance(serialized, str) else serialized
        digest = blake2b(raw, digest_size=8).digest()
        if len(self._seen) >= REMEMBERED:
            self._seen.clear()
        self._seen[digest] = times = self._seen.get(digest, 0) + 1
        return f"{digest.hex()}:{times}"

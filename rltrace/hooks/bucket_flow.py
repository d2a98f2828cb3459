"""The arrow of a bucket of weights, whoever sends it and however it is named."""

from __future__ import annotations


def flow_key(bucket: str) -> str:
    """Return the key of the arrow from the place where a bucket is sent to the place where it is loaded."""
    return f"bucket:{bucket}"

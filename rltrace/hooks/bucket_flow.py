"""The arrow of a bucket of weights, whoever sends it and however it is named."""

from __future__ import annotations


def flow_key(bucket: str) -> str:
    """The arrow from a bucket sent to the same bucket loaded, by the bucket's key."""
    return f"bucket:{bucket}"

"""How hooks say the size of tensors: of those that are there, and of those whose types and shapes alone are told."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from typing import Any


def tensor_bytes(tensor: Any) -> int:
    """Return the bytes of a whole tensor."""
    return int(tensor.numel() * tensor.element_size())


def tensor_args(tensor: Any) -> dict[str, Any]:
    """Return the bytes and the dtype of a whole tensor."""
    return {"bytes": tensor_bytes(tensor), "dtype": dtype_name(tensor.dtype)}


@functools.cache
def dtype_name(dtype: Any) -> str:
    """Return `bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def sizes_of(tensors: Collection[Any]) -> dict[str, Any]:
    """Return the bytes of some tensors together, and how many there are."""
    return {"bytes": sum(map(tensor_bytes, tensors)), "tensors": len(tensors)}


def announced_bytes(dtypes: Iterable[Any], shapes: Iterable[Any]) -> list[int]:
    """Return the bytes of each tensor of which the dtype, or its name, and the shape are told."""
    import torch

    known = (getattr(torch, dtype) if isinstance(dtype, str) else dtype for dtype in dtypes)
    return [math.prod(shape) * dtype.itemsize for dtype, shape in zip(known, shapes, strict=True)]


def announced_sizes(dtypes: Iterable[Any], shapes: Iterable[Any]) -> dict[str, Any]:
    """Return the bytes of such tensors together, and how many there are."""
    sizes = announced_bytes(dtypes, shapes)
    return {"bytes": sum(sizes), "tensors": len(sizes)}
